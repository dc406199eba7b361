"""Counts: every element is in its bin, of either set of bins, exactly, in every dtype, however the elements are split."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.casts import EDGES, adversaries, fine_counts
from helpers.kernels import Implementation, over_dtypes, over_implementations
from helpers.textbook import histogram
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_module_monitor.histogram import NUM_COUNTS
from lightning_module_monitor.kernels import bins_of_floats
from lightning_module_monitor.kernels.bins_of_floats import ALL_BINS, FINE, HISTOGRAM, Bins
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.table import MomentTable
from lightning_module_monitor.statistics.registry import STATISTICS, HistogramStatistic, Statistic
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.step.accumulator import StepAccumulator

over_bins = pytest.mark.parametrize("bins", ALL_BINS, ids=["histogram", "fine"])


def truth(bins: Bins, numbers: Tensor) -> np.ndarray:
    """The row of counts by numpy."""
    return histogram(numbers.double()).row if bins == HISTOGRAM else fine_counts(numbers)


def row_of(implementation: Implementation, tensors: list[Tensor], bins: Bins, needs: int, *, together: bool = False) -> np.ndarray:
    """The row of counts that all tensors were added to."""
    kernel = implementation.make()
    tensors = [tensor.to(implementation.device) for tensor in tensors if tensor.numel()]
    if together:
        kernel.add_all([3] * len(tensors), tensors, [needs] * len(tensors))
    else:
        for tensor in tensors:
            kernel.add((3,), tensor, needs)
    return kernel.counts(bins, [3])[0].long().cpu().numpy()


def assert_counted(implementation: Implementation, tensors: list[Tensor], bins: Bins) -> None:
    """The counts are numpy's, with single tensors and with many, alone and with everything."""
    if bins == FINE and implementation.rtol > 1e-9:  # a device without float64 has no fine bins for subnormal float32
        tensors = [x[(x == 0) | ~(x.abs().double() < torch.finfo(torch.float32).smallest_normal)] for x in tensors]
    whole = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
    for together, needs in itertools.product([False, True], [bins.need, Need.COUNTS | Need.EVERYTHING]):
        row = row_of(implementation, tensors, bins, needs, together=together)
        np.testing.assert_array_equal(row, truth(bins, whole))
        assert row.sum() == whole.numel()


def powers_of_two(dtype: torch.dtype) -> Tensor:
    """All powers of two of a dtype and their neighbors, of both signs."""
    powers = torch.tensor([2.0**exponent for exponent in range(-1074, 1024)], dtype=torch.float64).to(dtype)
    powers = powers[powers.isfinite() & (powers > 0)].unique()
    near = [torch.nextafter(powers, torch.full_like(powers, bound)) for bound in (0.0, math.inf)]
    return torch.cat([powers, *near, -powers, *(-values for values in near)])


def test_a_row_has_4446_counts() -> None:
    """35 KB: eight bins for each octave of float32 and sign, and four limits of formats."""
    assert FINE.num_counts == 4446
    assert len(EDGES) == len(FINE.edges) == 277 * 8 + 4
    assert (EDGES[1:] / EDGES[:-1]).max() <= 2 ** (1 / 8) * (1 + 2**-22)
    assert (FINE.num_counts, HISTOGRAM.num_counts) == (len(fine_counts(torch.zeros(1))), 264)


@over_bins
@over_dtypes
def test_edges_limits_and_their_neighbours(implementation: Implementation, dtype: torch.dtype, bins: Bins) -> None:
    """A power of two is in the bin that begins with it in a histogram, nothing is rounded on the way; subnormal numbers and NaN too."""
    values = torch.cat([adversaries(dtype), powers_of_two(dtype)])
    assert len(values) > {torch.float64: 23_000, torch.float32: 9500, torch.bfloat16: 7500, torch.float16: 1000}[dtype]
    assert_counted(implementation, [values], bins)


@over_bins
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@over_implementations
def test_every_number_of_half_precision(implementation: Implementation, dtype: torch.dtype, bins: Bins) -> None:
    """Every bit pattern."""
    assert_counted(implementation, [torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)], bins)


@over_bins
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-45, math.inf, -math.inf, math.nan, -math.nan, 3.4028234663852886e38, 1.0, -1.0])
@pytest.mark.parametrize("size", [1, 3, 4, 1001])
@over_implementations
def test_one_value_alone(implementation: Implementation, value: float, size: int, bins: Bins) -> None:
    """Values that share bits with others are distinguished, also in a tensor without others."""
    assert_counted(implementation, [torch.full((size,), value)], bins)


@over_bins
@over_dtypes
@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 8), (100, 331), (70_000,)], ids=str)
def test_every_shape(implementation: Implementation, dtype: torch.dtype, shape: tuple[int, ...], bins: Bins) -> None:
    """Any number of elements, in any dtype, of magnitudes over the whole range, and tensors that are merged."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10 ** (12 * torch.randn(shape, generator=generator))
    assert_counted(implementation, [x.to(dtype), 2 * x.to(dtype)], bins)


@over_dtypes
def test_values_that_share_their_bits_in_any_portion(implementation: Implementation, dtype: torch.dtype) -> None:
    """Zeros and infinities of both signs among the last elements, among the first, or everywhere."""
    for index, value in itertools.product((slice(-3, None), slice(2), slice(None, None, 3)), (0.0, -0.0, math.inf, -math.inf)):
        x = torch.ones(9001, dtype=dtype)
        x[index] = value
        x[4500] = math.nan
        assert_counted(implementation, [x], HISTOGRAM)


any_float = st.floats(width=32) | st.sampled_from([2.0**-64, -(2.0**-64), 2.0**64, 1e-45, 0.0, -0.0, 65504.0])


@over_implementations
@settings(deadline=None, max_examples=60)
@given(values=st.lists(any_float, min_size=1, max_size=80), cuts=st.lists(st.integers(0, 80), max_size=6), data=st.data())
def test_the_parts_add_up_to_the_whole(implementation: Implementation, values: list[float], cuts: list[int], data: st.DataObject) -> None:
    """Whatever the values, and however they are split over micro-batches and calls."""
    whole = torch.tensor(values, dtype=torch.float64).to(data.draw(st.sampled_from(implementation.dtypes)))
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [whole[start:end] for start, end in itertools.pairwise(bounds)]
    expected = truth(HISTOGRAM, whole)
    np.testing.assert_array_equal(row_of(implementation, parts, HISTOGRAM, Need.HISTOGRAM), expected)
    np.testing.assert_array_equal(sum(row_of(implementation, [part], HISTOGRAM, Need.HISTOGRAM) for part in parts), expected)


@over_implementations
def test_only_what_is_needed_is_counted(implementation: Implementation) -> None:
    """A row may have a histogram and fine counts; one that needs no counts has none."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for needs, bins in itertools.product((Need.COUNTS, Need.HISTOGRAM, Need.FINE_COUNTS, Need.EVERYTHING), ALL_BINS):
        assert row_of(implementation, [x], bins, needs).sum() == (1000 if needs & bins.need else 0)


@over_bins
@over_implementations
def test_the_counts_of_a_difference(implementation: Implementation, bins: Bins) -> None:
    """Of the difference as float32 has it."""
    a, b, shift = torch.randn(30, 7), torch.randn(30, 7), torch.randn(7)
    kernel = implementation.make()
    kernel.add((1,), a, bins.need | Need.MEAN, b, shift)
    np.testing.assert_array_equal(kernel.counts(bins, [1])[0].long().numpy(), truth(bins, a - b - shift))


@over_bins
def test_masked_elements_are_not_counted(bins: Bins) -> None:
    """Rows with padding, as attention has them; NaN that count are counted."""
    table, values = MomentTable(), torch.tensor([1.0, math.nan, 2.0, math.nan, math.inf, 0.0])
    table.add_rows([2], values.unsqueeze(0), torch.tensor([[True, True, False, False, True, True]]), [Need.COUNTS])
    table.add((2,), torch.tensor([-1e-45]), Need.COUNTS)
    total = torch.stack([share[0] for share in table.collect_counts(bins, [2])]).sum(0)
    np.testing.assert_array_equal(total.long().numpy(), truth(bins, torch.tensor([1.0, math.nan, math.inf, 0.0, -1e-45])))


@over_bins
def test_flushing_subnormal_numbers_changes_no_count(bins: Bins) -> None:
    """``torch.set_flush_denormal`` is about arithmetic; nothing is flushed before it is counted."""
    x = torch.tensor([1e-45, -1e-40, 0.0, 2.0**-134])
    expected = truth(bins, x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        table = MomentTable()
        table.add((0,), x, bins.need)
        (share,) = table.collect_counts(bins, [0])
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(share[0].long().numpy(), expected)


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
    values, actual = accumulator.collect().values, accumulator.histograms
    assert actual == {"activation/good/hist": histogram(torch.ones(3))}
    assert values["activation/good/mean"] == 1.0
    assert math.isnan(values["activation/bad/mean"])
    assert math.isnan(values["activation/bad_too/mean"])


def test_only_histograms_are_asked_for() -> None:
    """A stream without numbers; with an empty tensor its histogram is all zeros."""
    accumulator = StepAccumulator(lambda *_error: None)
    accumulator.observe(Stream("activation", "fc", {"hist": HistogramStatistic()}), torch.tensor([1.0, 2.0]))
    accumulator.observe(Stream("activation", "empty", {"hist": HistogramStatistic()}), torch.empty(0))
    values, actual = accumulator.collect().values, accumulator.histograms
    assert values == {}
    assert actual["activation/fc/hist"] == histogram(torch.tensor([1.0, 2.0]))
    assert actual["activation/empty/hist"].row.sum() == 0
