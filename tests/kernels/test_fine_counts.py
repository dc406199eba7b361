"""Fine counts: every element is counted in its bin, exactly, in every dtype, however the elements are split."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from helpers.casts import EDGES, adversaries, fine_counts
from helpers.kernels import Implementation, over_dtypes, over_implementations
from torch import Tensor

from lightning_module_monitor.kernels import numba_loops
from lightning_module_monitor.kernels.bins_of_floats import FINE, HISTOGRAM, LOWEST_OCTAVE, STEPS, Bins
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.number_formats import NUMBER_FORMATS
from lightning_module_monitor.kernels.table import MomentTable

WAYS = list(itertools.product([False, True], [Need.FINE_COUNTS, Need.FINE_COUNTS | Need.EVERYTHING | Need.HISTOGRAM]))
"""Alone or together, for the counts alone or for everything."""


def row_of(implementation: Implementation, tensors: list[Tensor], needs: int, bins: Bins = FINE, *, together: bool = False) -> np.ndarray:
    """The row of counts that all tensors were added to."""
    kernel = implementation.make()
    tensors = [tensor.to(implementation.device) for tensor in tensors]
    if together:
        kernel.add_all([3] * len(tensors), tensors, [needs] * len(tensors))
    else:
        for tensor in tensors:
            kernel.add((3,), tensor, needs)
    return kernel.counts(bins, [3])[0].long().cpu().numpy()


def assert_counted(implementation: Implementation, tensors: list[Tensor]) -> None:
    """The counts are numpy's, with single tensors and with many."""
    expected = fine_counts(torch.cat([tensor.double().reshape(-1) for tensor in tensors]))
    for together, needs in WAYS:
        np.testing.assert_array_equal(row_of(implementation, tensors, needs, together=together), expected)


def without_subnormal(implementation: Implementation, numbers: Tensor) -> Tensor:
    """A device without float64 has no bins for subnormal float32."""
    has_float64 = implementation.rtol < 1e-9
    return numbers if has_float64 else numbers[(numbers == 0) | ~(numbers.abs().double() < torch.finfo(torch.float32).smallest_normal)]


def test_a_row_has_4446_counts() -> None:
    """35 KB: eight bins for each octave of float32 and sign, and four limits of formats."""
    assert FINE.num_counts == 4446
    assert len(EDGES) == len(FINE.edges) == 277 * 8 + 4
    assert (EDGES[1:] / EDGES[:-1]).max() <= 2 ** (1 / 8) * (1 + 2**-22)
    assert (FINE.num_counts, HISTOGRAM.num_counts) == (len(fine_counts(torch.zeros(1))), 264)


@over_dtypes
def test_edges_limits_and_their_neighbours(implementation: Implementation, dtype: torch.dtype) -> None:
    """No element is in a bin beside its own, whichever of them it is nearest to; subnormal numbers and infinities included."""
    values = without_subnormal(implementation, adversaries(dtype))
    assert len(values) > {torch.float64: 13_000, torch.float32: 8000, torch.bfloat16: 6000, torch.float16: 800}[dtype]
    assert_counted(implementation, [values])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@over_implementations
def test_every_number_of_half_precision(implementation: Implementation, dtype: torch.dtype) -> None:
    """Every bit pattern."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    assert_counted(implementation, [without_subnormal(implementation, numbers)])


@over_dtypes
@pytest.mark.parametrize("shape", [(), (1,), (7,), (100, 331), (70_000,)], ids=str)
def test_every_shape(implementation: Implementation, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Magnitudes over the whole range, and tensors that are merged."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10 ** (12 * torch.randn(shape, generator=generator))
    x = without_subnormal(implementation, x.to(dtype).reshape(-1))
    assert_counted(implementation, [x, 2 * x])


@over_implementations
def test_both_sets_of_bins_together(implementation: Implementation) -> None:
    """A row may have a histogram and fine counts; one that needs no counts has none."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for needs in (Need.COUNTS, Need.HISTOGRAM, Need.FINE_COUNTS, Need.EVERYTHING):
        for bins in (HISTOGRAM, FINE):
            assert row_of(implementation, [x], needs, bins).sum() == (1000 if needs & bins.need else 0)


@over_implementations
def test_fine_counts_of_a_difference(implementation: Implementation) -> None:
    """They are those of the difference in float32."""
    a, b, shift = torch.randn(30, 7), torch.randn(30, 7), torch.randn(7)
    kernel = implementation.make()
    kernel.add((1,), a, Need.FINE_COUNTS | Need.MEAN, b, shift)
    np.testing.assert_array_equal(kernel.counts(FINE, [1])[0].long().numpy(), fine_counts(a - b - shift))


def test_masked_elements_are_not_counted() -> None:
    """Rows with padding, as attention has them."""
    table, values = MomentTable(), torch.tensor([1.0, math.nan, 2.0, math.nan, math.inf, 0.0])
    table.add_counts(2, values, torch.tensor([True, True, False, False, True, True]), Need.COUNTS)
    table.add((2,), torch.tensor([-1e-45]), Need.FINE_COUNTS)
    total = torch.stack([share[0] for share in table.collect_counts(FINE, [2])]).sum(0)
    np.testing.assert_array_equal(total.long().numpy(), fine_counts(torch.tensor([1.0, math.nan, math.inf, 0.0, -1e-45])))


def test_flushing_subnormal_numbers_changes_no_count() -> None:
    """``torch.set_flush_denormal`` is about arithmetic; nothing is flushed before it is counted."""
    x = torch.tensor([1e-45, -1e-40, 0.0, 2.0**-134])
    expected = fine_counts(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        table = MomentTable()
        table.add((0,), x, Need.FINE_COUNTS)
        (share,) = table.collect_counts(FINE, [0])
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(share[0].long().numpy(), expected)


def test_the_numbers_of_the_loops_are_those_of_the_bins() -> None:
    """They stand in the file of the loops, which numba's cache depends on."""
    loops = numba_loops
    assert (HISTOGRAM.zero_bin, HISTOGRAM.num_counts - 1) == (loops.ZERO_BIN, loops.NAN_BIN)
    assert 2.0 ** (int(loops.LOWEST_OCTAVE) - 127) == HISTOGRAM.edges[0].magnitude
    assert len(HISTOGRAM.edges) - 1 == loops.NUM_OCTAVES
    assert (FINE.zero_bin, FINE.num_counts - 1) == (loops.FINE_ZERO_BIN, loops.FINE_NAN_BIN)
    assert (loops.FINE_FIRST, loops.FINE_SUBNORMAL) == ((LOWEST_OCTAVE + 127) << 23, LOWEST_OCTAVE << 23)
    assert [int(getattr(loops, f"STEP_{number}")) for number in range(1, 8)] == list(STEPS)
    limits = [np.float32(form.beyond).view(np.int32) - form.is_beyond_rounded_away for form in NUMBER_FORMATS.values()]
    assert [int(getattr(loops, f"LIMIT_{number}")) for number in range(1, 5)] == sorted(map(int, limits))
