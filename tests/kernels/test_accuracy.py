"""Every kernel's moments finish into the textbook's statistics, whatever the magnitudes, the dtype, the memory and the split."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.kernels import (
    DTYPED,
    IMPLEMENTATIONS,
    Implementation,
    assert_measured,
    assert_textbook,
    collected,
    finished,
    measured,
    needs_of,
    over_dtypes,
    over_exact_ones,
    over_implementations,
    views,
)
from helpers.textbook import PLAIN, histogram, textbook
from torch import Tensor

from lightning_module_monitor.kernels.bins_of_floats import HISTOGRAM
from lightning_module_monitor.kernels.moments import Need


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of the standard normal distribution, some of them zero."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(x.abs() < 0.05, 0.0, x)


SHAPES = [(1, 1), (2,), (7,), (4, 8), (2, 3, 8), (1, 1, 2), (64, 128), (100, 331), (5, 9000), (70_001,)]


@over_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_of_every_dtype_and_shape(implementation: Implementation, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Sizes that fill no chunk, leave a rest, or fill several; half precision is summed as what it is."""
    x = normal(*shape).to(dtype)
    x.view(-1)[:: max(2, x.numel() // 5)] = 0
    assert_measured(implementation, [x])


@over_dtypes
def test_a_tensor_without_dimensions(implementation: Implementation, dtype: torch.dtype) -> None:
    """It is one token of one element, and has no spread."""
    moments = measured(implementation, [torch.tensor(-2.5, dtype=dtype)])
    for name in ("mean", "min", "max"):
        assert finished(name, moments) == -2.5
    for name in ("norm", "rms", "abs_mean", "abs_max", "token_norm", "token_rms"):
        assert finished(name, moments) == pytest.approx(2.5, rel=implementation.rtol)
    for name in ("std", "var", "skewness", "kurtosis"):
        assert math.isnan(finished(name, moments))
    assert float(moments.elements) == float(moments.tokens) == 1


TOKENS = [(3, 5000), (1, 9000), (2, 4096), (5, 4097), (700, 13), (4097, 1), (33, 7), (2, 70_000)]


@over_dtypes
@pytest.mark.parametrize("shape", TOKENS, ids=str)
def test_tokens_that_chunks_cut(implementation: Implementation, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A token may be longer than a chunk, or lie in two, or end with one."""
    x = normal(*shape).to(dtype)
    for needs in (Need.EVERYTHING, Need.TOKENS):
        moments = measured(implementation, [x], needs)
        assert float(moments.tokens) == shape[0]
        assert_textbook(moments, x, implementation.rtol, ["token_norm", "token_rms"])


@over_dtypes
def test_tokens_of_several_sizes_in_one_row(implementation: Implementation, dtype: torch.dtype) -> None:
    """A site whose calls differ in their features: the mean is over all tokens."""
    parts = [normal(30, size, seed=size).to(dtype) for size in (1, 7, 512, 5000)]
    moments = measured(implementation, parts)
    for name in ("token_norm", "token_rms"):
        expected = sum(textbook(name, part) for part in parts) / len(parts)
        assert finished(name, moments) == pytest.approx(expected, rel=implementation.rtol), name


@over_dtypes
def test_any_number_of_elements(implementation: Implementation, dtype: torch.dtype) -> None:
    """Vectors of instructions leave a rest: the last element counts, the largest or the smallest, wherever the memory begins."""
    numbers = normal(5000).to(dtype)
    for size in [*range(1, 20), 31, 33, 51, 4095, 4096, 4097, 4096 + 33]:
        for last in (9.0, -9.0):
            shifted = numbers[: 3 + size].clone()[3:]
            shifted[-1] = last
            moments = measured(implementation, [shifted])
            assert_textbook(moments, shifted, implementation.rtol, ["norm", "min", "max", "abs_mean", "zero_fraction"])
            assert float(moments.elements) == size


def with_first(count: int, value: float) -> Tensor:
    """Numbers of which the first ones are others."""
    x = normal(100, 100)
    x.view(-1)[:count] = value
    return x


HARD = {
    "sorted": normal(100, 100).flatten().sort().values,
    "in steps": torch.arange(10_000.0).div(64, rounding_mode="floor"),
    "zeros": torch.zeros(50, 100),
    "zeros of both signs": torch.tensor([0.0, -0.0]).repeat(3000),
    "an outlier at first": with_first(1, 1e6),
    "outliers at first": with_first(64, -1e5),
    "outliers where a center is sought": torch.cat([with_first(1, 1e6).flatten(), torch.tensor([-1e6, 1e6])]),
    "a chunk between outliers": torch.cat([torch.tensor([3e38]), normal(4094), torch.tensor([3e38])]),
    "zeros at first": with_first(500, 0.0),
    "a first thousand that is far from the rest": torch.cat([normal(1024) + 1e6, normal(64_000)]),
    "a first part that is far from the rest": torch.cat([normal(8751) + 1e6, normal(61_249)]),
    "huge": normal(100, 100) * 1e30,
    "nearly the largest": normal(100, 100) * 1e37,
    "squares leave float32": normal(100, 100) * 1e25,
    "tiny": normal(100, 100) * 1e-30,
    "two tiny ones": torch.tensor([1e-30, -1e-30]).repeat(2500),
    "thirty orders apart": torch.cat([torch.tensor([1e30, 1e-30]), normal(9000)]),
    "all negative": -normal(100, 100).abs() - 1,
    "all positive": normal(100, 100).abs() + 1,
    "skewed": normal(100, 100).exp(),
    "NaN": with_first(1, math.nan),
    "NaN of the other sign": torch.cat([normal(5000), torch.tensor([-1], dtype=torch.int32).view(torch.float32)]),
    "infinite": with_first(2, math.inf),
    "infinite downwards": -with_first(3, math.inf),
    "both infinities": torch.cat([with_first(2, math.inf).flatten(), torch.tensor([-math.inf])]),
    "a long chunk and one more": normal(65_537),
    "a NaN in the last of long chunks": torch.cat([normal(70_000), torch.tensor([math.nan])]),
}


@over_dtypes
@pytest.mark.parametrize("name", HARD)
def test_numbers_that_float32_is_too_small_for(implementation: Implementation, dtype: torch.dtype, name: str) -> None:
    """Their squares leave it, or they are not finite; in half precision as far as that has them: rounded, infinite, or zero."""
    assert_measured(implementation, [HARD[name].to(dtype)])


@over_exact_ones
def test_subnormal_numbers(implementation: Implementation) -> None:
    """A device may flush them to zero, as float32 sums do; float64 has all of their powers up to the second."""
    x = normal(100, 100) * 1e-41
    assert_textbook(measured(implementation, [x]), x, implementation.rtol, [name for name in PLAIN if name != "kurtosis"])


@over_exact_ones
@pytest.mark.parametrize(("scale", "shift"), [(1e-2, 1e4), (1.0, 1000.0), (1.0, 1e6), (1e30, 1e33), (1e-3, -1.0)])
@pytest.mark.parametrize("size", [300, 20_000])
def test_a_large_mean_hides_no_spread(implementation: Implementation, scale: float, shift: float, size: int) -> None:
    """Neither in a chunk nor where chunks are merged, whose means round in proportion to themselves."""
    x = (normal(size, 3).double() * scale + shift).float()
    assert_measured(implementation, [x], 1e-9)


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 1000.0), (1e-2, -1.0), (1e30, 1e33)])
@pytest.mark.parametrize("size", [300, 20_000])
@over_implementations
def test_a_mean_of_a_thousand_deviations(implementation: Implementation, scale: float, shift: float, size: int) -> None:
    """Also where sums are float32."""
    x = (normal(size, 3).double() * scale + shift).float()
    assert_measured(implementation, [x], max(implementation.rtol, 1e-11))


@over_dtypes
@pytest.mark.parametrize("value", [0.1, -3.0, 1e30, 1e-30])
def test_constant_elements_have_no_spread(implementation: Implementation, dtype: torch.dtype, value: float) -> None:
    """Whatever rounding leaves of it is nothing beside the mean; what is divided by no spread is not a number."""
    x = torch.full((90, 100), value).to(dtype)
    moments = measured(implementation, [x, x[:7]])
    assert_textbook(
        moments, torch.cat([x, x[:7]]), implementation.rtol, ["mean", "norm", "rms", "min", "max", "abs_mean", "abs_max", "token_rms"]
    )
    mean = abs(float(x[0, 0]))
    std = finished("std", moments)
    assert std <= implementation.rtol * mean if math.isfinite(mean) else math.isnan(std)


@over_exact_ones
def test_constant_elements_have_no_skewness_and_no_kurtosis(implementation: Implementation) -> None:
    """No spread is left by rounding that a third or fourth power of it could be divided by."""
    for value in (0.1, -3.0, 1e4 / 3):
        moments = measured(implementation, [torch.full((90, 100), value)])
        assert math.isnan(finished("skewness", moments))
        assert math.isnan(finished("kurtosis", moments))


@over_dtypes
def test_up_to_the_largest_values_of_a_dtype(implementation: Implementation, dtype: torch.dtype) -> None:
    """Norm and squares leave a dtype long before the values do."""
    top = min(torch.finfo(dtype).max, 3e38)
    x = (torch.rand((50, 200), generator=torch.Generator().manual_seed(1)).double() * top * 0.99).to(dtype)
    names = [name for name in PLAIN if name != "kurtosis"] if dtype != torch.float16 else PLAIN
    assert_textbook(measured(implementation, [x]), x, implementation.rtol, names)


@pytest.mark.parametrize("name", ["torch", "torch in small portions"])
def test_float64_keeps_what_float32_cannot_hold(name: str) -> None:
    """A spread of 1e-6 around 1e6."""
    implementation = next(param.values[0] for param in DTYPED if param.id == f"{name}, torch.float64")
    assert isinstance(implementation, Implementation)
    x = normal(500).double() * 1e-6 + 1e6
    assert finished("std", measured(implementation, [x])) == pytest.approx(textbook("std", x), rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
@pytest.mark.parametrize("size", [3, 4097, 70_001])
@over_implementations
def test_the_norm_of_what_is_infinite_is_infinite(implementation: Implementation, size: int, bad: float) -> None:
    """Whatever else is asked for: it is where a user looks for an overflow."""
    x = normal(size)
    x[size // 2] = bad
    for more in (Need.NOTHING, Need.MEAN, Need.DEVIATIONS, Need.MAGNITUDE, Need.POWERS, Need.EVERYTHING):
        moments = measured(implementation, [x], Need.SQUARES | more)
        assert finished("norm", moments) == math.inf
        assert finished("rms", moments) == math.inf


@over_dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [10, 4097, 70_001])
def test_nonfinite_elements_are_counted_and_never_hidden(implementation: Implementation, dtype: torch.dtype, size: int, bad: float) -> None:
    """One bad element makes all that it enters non-finite, before and after good ones; the counts stay exact."""
    x = torch.where(normal(size) == 0, 1.0, normal(size)).to(dtype)
    x[3] = bad
    x[5] = 0
    good = torch.ones(size, dtype=dtype)
    for parts in ([x], [x, good], [good, x]):
        moments = measured(implementation, parts)
        assert finished("nonfinite_count", moments) == 1
        assert finished("zero_fraction", moments) == 1 / (size * len(parts))
        for name in ("mean", "std", "var", "skewness", "kurtosis", "norm", "rms", "abs_mean", "abs_max", "token_norm", "token_rms"):
            assert not math.isfinite(finished(name, moments)), name
        untouched = [] if math.isnan(bad) else ["min"] if bad > 0 else ["max"]
        for name in ("min", "max"):
            assert math.isfinite(finished(name, moments)) == (name in untouched), name


WITHOUT_ELEMENTS_OF_ITS_OWN = ["negated by a flag", "negated by a flag, transposed", "zeros without memory"]
"""Not every kernel has to read these."""


@over_dtypes
@pytest.mark.parametrize("name", views(torch.float32))
def test_any_view_is_read_right(implementation: Implementation, dtype: torch.dtype, name: str) -> None:
    """However the elements lie in memory."""
    tensor, plain = views(dtype)[name]
    if not implementation.takes(tensor):
        assert name in WITHOUT_ELEMENTS_OF_ITS_OWN
        return
    kernel = implementation.make()
    kernel.add((2,), tensor, Need.EVERYTHING | Need.HISTOGRAM)
    kernel.add_all([0, 1, 0], [tensor, tensor, tensor], [Need.EVERYTHING | Need.HISTOGRAM] * 3)
    moments, counts = collected(kernel, 3), kernel.counts(HISTOGRAM, [0, 1, 2]).cpu().long().numpy()
    for row, expected in enumerate([torch.stack([plain, plain]), plain, plain]):
        assert_textbook(moments, expected, implementation.rtol, row=row)
        np.testing.assert_array_equal(counts[row], histogram(expected).row)


@over_dtypes
def test_what_was_made_under_inference_mode(implementation: Implementation, dtype: torch.dtype) -> None:
    """A step may begin in a validation loop under inference mode, and go on outside of it, in the same rows."""
    x = normal(30, 40).to(dtype)
    kernel = implementation.make()
    with torch.inference_mode():
        kernel.add((0,), x.clone(), Need.EVERYTHING | Need.HISTOGRAM)
        kernel.add_all([0], [x.clone()], [Need.EVERYTHING | Need.HISTOGRAM])
    kernel.add((0,), x.clone().requires_grad_().detach(), Need.EVERYTHING | Need.HISTOGRAM)
    kernel.add((0,), x.clone(), Need.EVERYTHING | Need.HISTOGRAM)
    assert_textbook(collected(kernel), x.repeat(4, 1), implementation.rtol)
    assert float(kernel.counts(HISTOGRAM, [0]).sum()) == 4 * x.numel()


@over_dtypes
@pytest.mark.parametrize("size", [100, 200_000])
def test_a_tensor_may_be_overwritten_after_it_was_added(implementation: Implementation, dtype: torch.dtype, size: int) -> None:
    """In-place layers do that."""
    x = normal(size).to(dtype)
    kept, kernel = x.clone(), implementation.make()
    kernel.add((0,), x, Need.EVERYTHING | Need.HISTOGRAM)
    x.zero_()
    x.copy_(kept)
    kernel.add_all([1, 1], [x, x], [Need.EVERYTHING] * 2)
    other = torch.ones(1, dtype=dtype)
    x.zero_()
    x.copy_(kept)
    kernel.add((2,), x, Need.EVERYTHING, None, other)
    x.zero_()
    other.zero_()
    moments = collected(kernel, 3)
    assert_textbook(moments, kept, implementation.rtol)
    assert_textbook(moments, kept.repeat(2), implementation.rtol, ["mean", "std", "norm", "min"], row=1)
    assert_textbook(moments, kept.double() - 1, max(implementation.rtol, 1e-5), ["mean", "std", "norm", "min"], row=2)
    assert int(kernel.counts(HISTOGRAM, [0])[0].sum()) == size


@over_dtypes
def test_one_tensor_in_several_rows(implementation: Implementation, dtype: torch.dtype) -> None:
    """It is measured once, and merged into what each row has."""
    first, second = normal(50, 30).to(dtype), (normal(20, 30, seed=1) * 3 + 1).to(dtype)
    kernel = implementation.make()
    kernel.add((4,), first, Need.EVERYTHING | Need.HISTOGRAM)
    kernel.add((0, 4, 2), second, Need.EVERYTHING | Need.HISTOGRAM)
    kernel.add((2,), first, Need.EVERYTHING | Need.HISTOGRAM)
    moments = collected(kernel, 5)
    assert kernel.counts(HISTOGRAM, [0, 2, 4, 1000]).sum(1).tolist() == [600, 2100, 2100, 0]
    for row, parts in {0: [second], 2: [second, first], 4: [first, second]}.items():
        assert_textbook(moments, torch.cat(parts), implementation.rtol, row=row)
    assert moments.elements[[1, 3]].tolist() == [0, 0]


@over_dtypes
def test_many_tensors_at_once_are_as_one_by_one(implementation: Implementation, dtype: torch.dtype) -> None:
    """Small and large, of one shape and of others, with other needs, several of one row."""
    shapes = [(20, 16)] * 40 + [(3, 8), (16,), (), (1, 1), (4097, 3), (300, 400), (20, 16)]
    tensors = [(normal(*shape, seed=seed) * (seed + 1) + seed).to(dtype) for seed, shape in enumerate(shapes)]
    rows = [seed % 30 for seed in range(len(shapes))]
    needs = [(Need.EVERYTHING, Need.EVERYTHING | Need.HISTOGRAM, Need.MEAN | Need.SQUARES)[row % 3] for row in rows]
    together, one_by_one = implementation.make(), implementation.make()
    together.add_all(rows, tensors, needs)
    for row, tensor, need in zip(rows, tensors, needs, strict=True):
        one_by_one.add((row,), tensor, need)
    assert torch.equal(together.counts(HISTOGRAM, range(30)), one_by_one.counts(HISTOGRAM, range(30)))
    moments, others = collected(together, 30), collected(one_by_one, 30)
    for row in range(30):
        mine = torch.cat([tensor.double().reshape(-1) for tensor, at in zip(tensors, rows, strict=True) if at == row])
        for actual in (moments, others):
            names = ["mean", "rms"] if row % 3 == 2 else ["mean", "std", "skewness", "kurtosis", "min", "max", "abs_mean", "zero_fraction"]
            assert_textbook(actual, mine, max(implementation.rtol, 1e-11), names, row=row)
        assert float(moments.tokens[row]) == float(others.tokens[row]) or row % 3 == 2


@over_implementations
def test_more_rows_than_there_were_at_first(implementation: Implementation) -> None:
    """Rows are added as sites turn up, in any order, and what was in them stays; a row that nothing was added to is empty."""
    kernel = implementation.make()
    numbers = [0, 5000, 300, 255, 256, 10_000]
    for number in numbers:
        kernel.add((number,), torch.full((3,), float(number + 1)), Need.MEAN | Need.EXTREMES | Need.HISTOGRAM)
    moments = collected(kernel, 20_001)
    assert [float(moments.mean[number]) for number in numbers] == [number + 1 for number in numbers]
    assert float(moments.elements.sum()) == 3 * len(numbers)
    assert (float(moments.maximum[20_000]), float(moments.minimum[20_000])) == (-math.inf, math.inf)
    assert kernel.counts(HISTOGRAM, [300, 7, 20_000]).sum(1).tolist() == [3, 0, 0]


@over_implementations
def test_collecting_changes_nothing(implementation: Implementation) -> None:
    """It may happen twice, and tensors may follow."""
    x, kernel = normal(40, 50), implementation.make()
    kernel.add((1,), x, Need.EVERYTHING | Need.HISTOGRAM)
    first, counts = collected(kernel, 2), kernel.counts(HISTOGRAM, [1]).clone()
    kept = [field.clone() for field in first]
    assert all(torch.equal(*pair) for pair in zip(collected(kernel, 2), kept, strict=True))
    kernel.add((1,), x, Need.EVERYTHING | Need.HISTOGRAM)
    assert all(torch.equal(*pair) for pair in zip(first, kept, strict=True))
    assert torch.equal(kernel.counts(HISTOGRAM, [1]), 2 * counts)
    assert_textbook(collected(kernel, 2), x.repeat(2, 1), implementation.rtol, row=1)


@pytest.mark.parametrize("implementation", [pytest.param(item, id=name) for name, item in IMPLEMENTATIONS.items() if "small" not in name])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_half_precision_is_widened_exactly(implementation: Implementation, dtype: torch.dtype) -> None:
    """All 65,536: largest and smallest, and the mean of several of them, to the last bit."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    repeats = 17
    kernel = implementation.make()
    kernel.add_all(range(len(numbers)), numbers.unsqueeze(1).expand(-1, repeats).contiguous().unbind(), [Need.MEAN | Need.EXTREMES] * 2**16)
    moments, expected = collected(kernel, len(numbers)), numbers.double()
    # Float32's mean may flush what is subnormal there.
    is_normal = torch.ones_like(expected, dtype=torch.bool) if implementation.rtol < 1e-9 else ~(expected.abs() < 2.0**-126)
    assert torch.equal(moments.mean[is_normal].nan_to_num(7.0), expected[is_normal].nan_to_num(7.0))
    is_number = ~expected.isnan()
    for actual in (moments.maximum, moments.minimum):
        assert bool(actual[~is_number].isnan().all())
        assert torch.equal(actual[is_number], expected[is_number])


@over_exact_ones
def test_every_statistic_is_the_same_alone_and_with_all_others(implementation: Implementation) -> None:
    """What others need changes it by no more than the order of a sum does."""
    for seed in range(3):
        x = normal(123, 77, seed=seed) * 10**seed + seed
        everything = measured(implementation, [x])
        for name in PLAIN:
            alone = finished(name, measured(implementation, [x], needs_of(name)))
            assert alone == pytest.approx(finished(name, everything), rel=1e-12, abs=1e-12), name


@over_implementations
def test_the_largest_magnitude_of_zeros_has_no_sign(implementation: Implementation) -> None:
    """It is 0.0, whatever the signs of the zeros."""
    for zeros in (torch.zeros(4), -torch.zeros(4), torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0])):
        assert math.copysign(1.0, finished("abs_max", measured(implementation, [zeros]))) == 1.0
