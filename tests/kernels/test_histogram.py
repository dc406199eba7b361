"""Histograms: every element is counted in its bin, exactly, in every dtype, however the elements are split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.textbook import histogram
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_module_monitor.bins import NUM_COUNTS, Histogram
from lightning_module_monitor.statistics import compiled_histogram, running
from lightning_module_monitor.statistics import histogram as histograms
from lightning_module_monitor.statistics.moments import Need
from lightning_module_monitor.statistics.observation import Observation
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from lightning_module_monitor.statistics.table import Table
from lightning_module_monitor.statistics.watch import Watch

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True, params=["compiled", "eager"])
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here is true with the compiled kernel, and without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "compiled":
            assert running.kernel() is not None, "numba is missing; pip install 'lightning-module-monitor[fast]'"
        else:
            patch.setattr(running, "kernel", lambda: None)
        yield


def counted(tensors: list[Tensor], together: bool = False, needs: int = Need.HISTOGRAM) -> Histogram:
    """The histogram of one row that all the tensors were added to."""
    table = Table()
    if together:
        with torch.no_grad():
            table.add_all((3, tensor, needs) for tensor in tensors)
    else:
        for tensor in tensors:
            table.add(3, tensor, needs)
    rows = [share[0] for share in table.collect_histograms([3])]
    return Histogram(torch.stack([torch.zeros(NUM_COUNTS, dtype=torch.float64), *rows]).sum(0).long().numpy())


def assert_counted(tensors: list[Tensor], expected: Tensor | None = None) -> None:
    """The counts are numpy's, whichever way the tensors come in."""
    whole = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]) if expected is None else expected
    for together, needs in itertools.product([False, True], [Need.HISTOGRAM, Need.HISTOGRAM | Need.EVERYTHING]):
        found = counted(tensors, together, needs)
        np.testing.assert_array_equal(found.row, histogram(whole).row)
        assert found.row.sum() == whole.numel()


def edge_values(dtype: torch.dtype) -> Tensor:
    """All powers of two of a dtype and their neighbors, subnormal numbers, zeros, the largest, infinities, NaN; of both signs."""
    info = torch.finfo(dtype)
    powers = torch.tensor([2.0**exponent for exponent in range(-1074, 1024)], dtype=torch.float64).to(dtype)
    powers = powers[powers.isfinite() & (powers > 0)].unique()
    zero, top = torch.zeros(1, dtype=dtype), torch.tensor([info.max, info.tiny, info.smallest_normal, math.inf], dtype=dtype)
    near = [torch.nextafter(powers, one.expand_as(powers)) for one in (zero, top[-1:])]
    magnitudes = torch.cat([powers, *near, zero, top])
    return torch.cat([magnitudes, -magnitudes, torch.tensor([math.nan], dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edge_values_of_every_dtype(dtype: torch.dtype) -> None:
    """A power of two is in the bin that begins with it, its lower neighbor in the one before; nothing is rounded on the way."""
    values = edge_values(dtype)
    assert len(values) > {torch.float64: 10_000, torch.float32: 1500, torch.bfloat16: 1500, torch.float16: 200}[dtype]
    assert_counted([values])
    found = counted([values])
    assert found.nonfinite["nan"] == 1
    assert found.nonfinite["inf"] == found.nonfinite["-inf"] > 0
    assert found.counts[130] == (values == 0).sum()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-45, math.inf, -math.inf, math.nan, -math.nan, 3.4028234663852886e38, 1.0, -1.0])
@pytest.mark.parametrize("size", [1, 3, 4, 1001])
def test_one_value_alone(value: float, size: int) -> None:
    """Those that share their bits with others are told apart, also where nothing else is there."""
    assert_counted([torch.full((size,), value)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 8), (100, 331), (70_000,)], ids=str)
def test_every_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Any number of elements, in any dtype, of magnitudes from 1e-30 to 1e30."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10 ** (20 * torch.randn(shape, generator=generator))
    assert_counted([x.to(dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_share_their_bits_in_any_chunk(dtype: torch.dtype) -> None:
    """Zeros and infinities of both signs among the last elements, among the first, or everywhere."""
    for place in (slice(-3, None), slice(2), slice(None, None, 3)):
        for value in (0.0, -0.0, math.inf, -math.inf):
            x = torch.ones(9001, dtype=dtype)
            x[place] = value
            x[4500] = math.nan
            assert_counted([x])


VIEWS = {
    "transposed": torch.randn(70, 90).T,
    "every third": torch.randn(40, 300)[:, ::3],
    "expanded": torch.randn(1, 50).expand(20, 50),
    "channels last": torch.randn(3, 5, 7, 9).to(memory_format=torch.channels_last),
    "negated by a flag": torch._neg_view(torch.randn(30, 40).abs()),
    "zeros without memory": torch._efficientzerotensor((6, 5)),
    "with a graph": torch.randn(20, 30).requires_grad_() * 2,
    "a parameter": nn.Parameter(torch.randn(20, 30)),
    "half of a storage": torch.randn(1000)[17:900],
    "float64, negated by a flag": torch._neg_view(torch.randn(30, 40, dtype=torch.float64).abs()),
}


@pytest.mark.parametrize("name", VIEWS)
def test_any_view_is_read_right(name: str) -> None:
    """However the elements lie in memory."""
    assert_counted([VIEWS[name]], VIEWS[name].detach().resolve_neg().clone())


def test_an_empty_tensor_adds_nothing() -> None:
    """Neither alone nor beside others."""
    assert counted([torch.empty(0, 3)]).row.sum() == 0
    assert_counted([torch.empty(0), torch.ones(3), torch.empty(2, 0)])


any_float = st.floats(width=32) | st.sampled_from([2.0**-64, -(2.0**-64), 2.0**64, 1e-45, 0.0, -0.0, 65504.0])


@settings(deadline=None, max_examples=60)
@given(values=st.lists(any_float, min_size=1, max_size=80), cuts=st.lists(st.integers(0, 80), max_size=6), dtype=st.sampled_from(DTYPES))
def test_the_parts_add_up_to_the_whole(values: list[float], cuts: list[int], dtype: torch.dtype) -> None:
    """Whatever the values, and however they are split over micro-batches and calls."""
    whole = torch.tensor(values, dtype=torch.float64).to(dtype)
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [whole[start:end] for start, end in itertools.pairwise(bounds)]
    assert counted(parts) == counted([whole]) == histogram(whole)
    nothing = Histogram(np.zeros(NUM_COUNTS, dtype=np.int64))
    assert sum((counted([part]) for part in parts), nothing) == histogram(whole)


def test_dtypes_of_one_row_add_up() -> None:
    """A row may get tensors of several dtypes: one part is counted by the kernel, another by torch."""
    tensors = [torch.randn(50).to(dtype) for dtype in DTYPES]
    assert_counted(tensors)


def test_more_rows_than_there_were_at_first() -> None:
    """Rows are added as sites turn up, and what was in them stays; the last tensor can be counted again elsewhere."""
    table = Table()
    for row in (0, 500, 63, 64):
        table.add(row, torch.full((row + 1,), 1.0), Need.HISTOGRAM)
    table.add_last_again(1000)
    table.add(7, torch.empty(0), Need.HISTOGRAM)
    table.add_last_again(8)
    (share,) = table.collect_histograms([0, 63, 64, 500, 1000, 7, 8])
    assert share.sum(1).tolist() == [1, 64, 65, 501, 65, 0, 0]


def test_more_elements_than_the_kernel_counts_at_once() -> None:
    """Its 32-bit counts are added to the row before they are full."""
    assert compiled_histogram.BLOCK_ELEMENTS < 2**32
    if running.kernel() is None:
        return
    x = torch.ones(compiled_histogram.BLOCK_ELEMENTS + 5)
    x[0], x[-1] = 0.0, math.inf
    found = counted([x])
    few, one = histogram(torch.tensor([0.0, 1.0, math.inf])), histogram(torch.ones(1))
    np.testing.assert_array_equal(found.row, few.row + one.row * (len(x) - 3))


@pytest.mark.parametrize("size", [1, 63, 64, 5000])
def test_counting_without_a_read_on_the_host(size: int) -> None:
    """What an accelerator does counts the same, by operations of which none needs to know a value beforehand."""

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.add(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    places = torch.randint(NUM_COUNTS, (size,), generator=torch.Generator().manual_seed(0))
    with Names() as names:
        found = histograms.scattered_counts(places)
    np.testing.assert_array_equal(found.numpy(), np.bincount(places.numpy(), minlength=NUM_COUNTS))
    assert names.seen <= {"arange", "remainder_", "mul_", "add_", "zeros", "ones_like", "scatter_add_", "view", "sum"}


def test_a_step_that_begins_under_inference_mode() -> None:
    """A validation loop under inference mode, then one outside of it, in one row."""
    x = torch.randn(30, dtype=torch.float64)
    histograms._places_on.cache_clear()
    table = Table()
    with torch.inference_mode():
        table.add(3, x.clone(), Need.HISTOGRAM)
    table.add(3, x.clone().requires_grad_(), Need.HISTOGRAM)
    (share,) = table.collect_histograms([3])
    np.testing.assert_array_equal(share[0].numpy(), 2 * histogram(x).row)


def test_a_histogram_that_misses_elements_is_not_there() -> None:
    """Of a tensor that cannot be read nothing is made up: numbers are NaN, and the histogram, which has no NaN, is absent."""
    mean = STATISTICS["mean"]
    assert isinstance(mean, Statistic)
    watches = [Watch("activation", site, statistics={"mean": mean}, histograms={"hist": None}) for site in ("good", "bad", "bad_too")]
    _good, bad, bad_too = watches
    observation = Observation(lambda *_trouble: None)
    for watch in watches:
        observation.observe(watch, torch.ones(3))
    observation.fail(bad, torch.ones(3), ValueError("on purpose"))
    observation.observe_all([(bad_too, torch.ones(3, device="meta"))])
    assert observation.num_errors == 2
    values, found = observation.collect(), observation.histograms
    assert found == {"activation/good/hist": histogram(torch.ones(3))}
    assert values["activation/good/mean"] == 1.0
    assert math.isnan(values["activation/bad/mean"])
    assert math.isnan(values["activation/bad_too/mean"])


def test_only_histograms_are_asked_for() -> None:
    """A watch without a number; one of which only an empty tensor was seen has a histogram of nothing."""
    observation = Observation(lambda *_trouble: None)
    observation.observe(Watch("activation", "fc", histograms={"hist": None}), torch.tensor([1.0, 2.0]))
    observation.observe(Watch("activation", "empty", histograms={"hist": None}), torch.empty(0))
    values, found = observation.collect(), observation.histograms
    assert values == {}
    assert found["activation/fc/hist"] == histogram(torch.tensor([1.0, 2.0]))
    assert found["activation/empty/hist"].row.sum() == 0
