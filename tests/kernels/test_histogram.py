"""Histograms: every element is counted in its bin, exactly, in every dtype, however the elements are split."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.kernels import Implementation, over_dtypes, over_implementations
from helpers.textbook import histogram
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_module_monitor.histogram import NUM_COUNTS, Histogram
from lightning_module_monitor.kernels import bins_of_floats
from lightning_module_monitor.kernels.bins_of_floats import HISTOGRAM
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.table import MomentTable
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.registry import STATISTICS, HistogramStatistic, Statistic
from lightning_module_monitor.statistics.stream import Stream


def counted(implementation: Implementation, tensors: list[Tensor], together: bool = False, needs: int = Need.HISTOGRAM) -> Histogram:
    """The histogram of one row that all the tensors were added to."""
    kernel = implementation.make()
    tensors = [tensor.to(implementation.device) for tensor in tensors if tensor.numel()]
    if together:
        kernel.add_all([3] * len(tensors), tensors, [needs] * len(tensors))
    else:
        for tensor in tensors:
            kernel.add((3,), tensor, needs)
    (row,) = kernel.counts(HISTOGRAM, [3]).cpu()
    return Histogram(row.long().numpy())


WAYS = list(itertools.product([False, True], [Need.HISTOGRAM, Need.HISTOGRAM | Need.EVERYTHING]))
"""Alone or together, for the counts alone or for everything."""


def assert_counted(implementation: Implementation, tensors: list[Tensor]) -> None:
    """The counts are numpy's, with single tensors and with many."""
    whole = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
    for together, needs in WAYS:
        actual = counted(implementation, tensors, together, needs)
        np.testing.assert_array_equal(actual.row, histogram(whole).row)
        assert actual.row.sum() == whole.numel()


def edge_values(dtype: torch.dtype) -> Tensor:
    """All powers of two of a dtype and their neighbors, subnormal numbers, zeros, the largest, infinities, NaN; of both signs."""
    info = torch.finfo(dtype)
    powers = torch.tensor([2.0**exponent for exponent in range(-1074, 1024)], dtype=torch.float64).to(dtype)
    powers = powers[powers.isfinite() & (powers > 0)].unique()
    zero, top = torch.zeros(1, dtype=dtype), torch.tensor([info.max, info.tiny, info.smallest_normal, math.inf], dtype=dtype)
    near = [torch.nextafter(powers, bound.expand_as(powers)) for bound in (zero, top[-1:])]
    magnitudes = torch.cat([powers, *near, zero, top])
    return torch.cat([magnitudes, -magnitudes, torch.tensor([math.nan], dtype=dtype)])


@over_dtypes
def test_edge_values_of_every_dtype(implementation: Implementation, dtype: torch.dtype) -> None:
    """A power of two is in the bin that begins with it, its lower neighbor in the one before; nothing is rounded on the way."""
    values = edge_values(dtype)
    assert len(values) > {torch.float64: 10_000, torch.float32: 1500, torch.bfloat16: 1500, torch.float16: 200}[dtype]
    assert_counted(implementation, [values])
    actual = counted(implementation, [values])
    assert actual.nonfinite["nan"] == 1
    assert actual.nonfinite["inf"] == actual.nonfinite["-inf"] > 0
    assert actual.counts[130] == (values == 0).sum()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-45, math.inf, -math.inf, math.nan, -math.nan, 3.4028234663852886e38, 1.0, -1.0])
@pytest.mark.parametrize("size", [1, 3, 4, 1001])
@over_implementations
def test_one_value_alone(implementation: Implementation, value: float, size: int) -> None:
    """Values that share bits with others are distinguished, also in a tensor without others."""
    assert_counted(implementation, [torch.full((size,), value)])


@over_dtypes
@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 8), (100, 331), (70_000,)], ids=str)
def test_every_shape(implementation: Implementation, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Any number of elements, in any dtype, of magnitudes from 1e-30 to 1e30."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10 ** (20 * torch.randn(shape, generator=generator))
    assert_counted(implementation, [x.to(dtype)])


@over_dtypes
def test_values_that_share_their_bits_in_any_chunk(implementation: Implementation, dtype: torch.dtype) -> None:
    """Zeros and infinities of both signs among the last elements, among the first, or everywhere."""
    for index in (slice(-3, None), slice(2), slice(None, None, 3)):
        for value in (0.0, -0.0, math.inf, -math.inf):
            x = torch.ones(9001, dtype=dtype)
            x[index] = value
            x[4500] = math.nan
            assert_counted(implementation, [x])


any_float = st.floats(width=32) | st.sampled_from([2.0**-64, -(2.0**-64), 2.0**64, 1e-45, 0.0, -0.0, 65504.0])


@over_implementations
@settings(deadline=None, max_examples=60)
@given(values=st.lists(any_float, min_size=1, max_size=80), cuts=st.lists(st.integers(0, 80), max_size=6), data=st.data())
def test_the_parts_add_up_to_the_whole(implementation: Implementation, values: list[float], cuts: list[int], data: st.DataObject) -> None:
    """Whatever the values, and however they are split over micro-batches and calls."""
    whole = torch.tensor(values, dtype=torch.float64).to(data.draw(st.sampled_from(implementation.dtypes)))
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [whole[start:end] for start, end in itertools.pairwise(bounds)]
    assert counted(implementation, parts) == counted(implementation, [whole]) == histogram(whole)
    nothing = Histogram(np.zeros(NUM_COUNTS, dtype=np.int64))
    assert sum((counted(implementation, [part]) for part in parts), nothing) == histogram(whole)


@over_implementations
def test_the_counts_of_a_difference(implementation: Implementation) -> None:
    """Of the difference as float32 has it."""
    a, b, shift = torch.randn(30, 7), torch.randn(30, 7), torch.randn(7)
    kernel = implementation.make()
    kernel.add((1,), a, Need.HISTOGRAM | Need.MEAN, b, shift)
    np.testing.assert_array_equal(kernel.counts(HISTOGRAM, [1])[0].long().numpy(), histogram(a - b - shift).row)


def test_what_does_not_count_is_left_out() -> None:
    """Of a row with padding, as attention has them; NaN that count are counted."""
    table = MomentTable()
    values = torch.tensor([1.0, math.nan, 2.0, math.nan, math.inf, 0.0])
    counting = torch.tensor([True, True, False, False, True, True])
    table.add_counts(2, values, counting, Need.HISTOGRAM)
    table.add((2,), torch.tensor([-1.0]), Need.HISTOGRAM)
    total = torch.stack([share[0] for share in table.collect_counts(HISTOGRAM, [2])]).sum(0)
    np.testing.assert_array_equal(total.long().numpy(), histogram(torch.tensor([1.0, math.nan, math.inf, 0.0, -1.0])).row)


@pytest.mark.parametrize("size", [1, 63, 64, 5000])
def test_counting_without_a_read_on_the_host(size: int) -> None:
    """What an accelerator does counts the same, by operations of which none needs to know a value beforehand."""

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.operations: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.operations.add(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    bins = torch.randint(NUM_COUNTS, (size,), generator=torch.Generator().manual_seed(0))
    with Names() as names:
        actual = bins_of_floats.scattered_counts(bins, NUM_COUNTS)
    np.testing.assert_array_equal(actual.numpy(), np.bincount(bins.numpy(), minlength=NUM_COUNTS))
    assert names.operations <= {"arange", "remainder_", "mul_", "add_", "zeros", "ones_like", "scatter_add_", "view", "sum"}


def test_a_histogram_that_misses_elements_is_not_there() -> None:
    """If a tensor cannot be read, numbers are NaN, and the histogram, which has no NaN, is absent."""
    mean = STATISTICS["mean"]
    assert isinstance(mean, Statistic)
    streams = [Stream("activation", site, {"mean": mean, "hist": HistogramStatistic()}) for site in ("good", "bad", "bad_too")]
    _good, bad, bad_too = streams
    accumulator = StepAccumulator(lambda *_error: None)
    for stream in streams:
        accumulator.observe(stream, torch.ones(3))
    accumulator.fail(bad, torch.ones(3), ValueError("on purpose"))
    accumulator.observe_all([(bad_too, torch.ones(3, device="meta"))])
    assert accumulator.num_errors == 2
    values, actual = accumulator.collect(), accumulator.histograms
    assert actual == {"activation/good/hist": histogram(torch.ones(3))}
    assert values["activation/good/mean"] == 1.0
    assert math.isnan(values["activation/bad/mean"])
    assert math.isnan(values["activation/bad_too/mean"])


def test_only_histograms_are_asked_for() -> None:
    """A stream without numbers; with an empty tensor its histogram is all zeros."""
    accumulator = StepAccumulator(lambda *_error: None)
    accumulator.observe(Stream("activation", "fc", {"hist": HistogramStatistic()}), torch.tensor([1.0, 2.0]))
    accumulator.observe(Stream("activation", "empty", {"hist": HistogramStatistic()}), torch.empty(0))
    values, actual = accumulator.collect(), accumulator.histograms
    assert values == {}
    assert actual["activation/fc/hist"] == histogram(torch.tensor([1.0, 2.0]))
    assert actual["activation/empty/hist"].row.sum() == 0
