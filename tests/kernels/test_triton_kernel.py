"""The values of the Triton kernel against float64 formulas: interpreted on a CPU with TRITON_INTERPRET=1, else on a CUDA device.

``make test-triton`` installs Triton and runs these tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.casts import adversaries, fine_counts
from helpers.textbook import histogram
from helpers.triton import (
    DEVICE,
    IGNORED_WARNINGS,
    IS_INTERPRETED,
    assert_added,
    assert_moments,
    measured,
    random,
    row_of_counts,
    skip_without_triton,
    textbook_moments,
    with_pairs,
)
from torch import Tensor

from lightning_module_monitor.histogram import EDGES
from lightning_module_monitor.kernels import triton_kernel
from lightning_module_monitor.kernels.bins_of_floats import FINE, HISTOGRAM
from lightning_module_monitor.kernels.moments import FIELDS_OF_NEED, NUM_FIELDS, Moments, Need
from lightning_module_monitor.kernels.triton_kernel import TritonKernel
from lightning_module_monitor.kernels.warm_up import Form, Launch, check_triton
from lightning_module_monitor.statistics.casts import largest_magnitude

skip_without_triton()
pytestmark = [pytest.mark.gpu, *IGNORED_WARNINGS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True, params=[False, True], ids=["float64", "pairs"])
def _in_pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in float64, and in pairs of float32 numbers as on devices on which float64 is slow."""
    monkeypatch.setattr(triton_kernel, "has_slow_float64", lambda _device: request.param)


@pytest.fixture
def long_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a few thousand elements is measured in several steps of several programs, as a large one is else."""
    monkeypatch.setattr(triton_kernel, "num_programs_of", lambda _device: 2)
    monkeypatch.setattr(triton_kernel, "PROGRAMS_OF_TENSORS", 3)
    triton_kernel._layout.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 65), (1, 1500), (5000,), (300, 1), (6, 1024)], ids=str)
def test_all_moments_of_a_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every moment equals its float64 formula, for every dtype, also of shapes that fill no tile."""
    assert_added(random(*shape, dtype=dtype, mean=0.5))


def test_the_largest_magnitude_of_zeros_has_no_sign() -> None:
    """It is 0.0 for zeros of either sign."""
    for zeros in (torch.zeros(4), -torch.zeros(4)):
        moments = Moments(*measured(lambda kernel, x=zeros: kernel.add((0,), x.to(DEVICE), Need.EXTREMES)).cpu().numpy())  # type: ignore[misc]
        assert np.copysign(1.0, largest_magnitude(moments)) == 1.0


@pytest.mark.usefixtures("long_spans")
@pytest.mark.parametrize("shape", [(8191,), (4, 2100), (100, 70), (2600, 3)], ids=str)
@pytest.mark.parametrize("needs", [Need.EVERYTHING, Need.EVERYTHING & ~Need.TOKENS])
def test_a_span_of_several_blocks(shape: tuple[int, ...], needs: int) -> None:
    """A program measures its whole span, and no element of the next one's."""
    assert_added(random(*shape, mean=2.0), needs)


@pytest.mark.parametrize("mean", [-9.0, 9.0])
@pytest.mark.parametrize("needs", [Need.EVERYTHING, Need.EXTREMES])
def test_extremes_of_elements_of_one_sign(mean: float, needs: int) -> None:
    """What fills up a tile is no element: zero is not the maximum of negative numbers."""
    assert_added(random(3, 50, mean=mean), needs)


@pytest.mark.parametrize("need", list(FIELDS_OF_NEED))
def test_each_need_alone(need: int) -> None:
    """What is needed is there, whatever else is needed or not."""
    assert_added(random(5, 300), need)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("std", [1e30, 1e-30])
def test_magnitudes_whose_squares_leave_float32(std: float, dtype: torch.dtype) -> None:
    """Huge and tiny elements have their exact squares, deviations and powers."""
    assert_added(random(40, 50, dtype=dtype, std=std))


@pytest.mark.parametrize(("mean", "std", "dtype"), [(1e4, 1e-2, torch.float32), (1e8, 1.0, torch.float64), (-3e4, 30.0, torch.float16)])
def test_a_mean_much_larger_than_the_spread(mean: float, std: float, dtype: torch.dtype) -> None:
    """The variance is that of the elements, and not what a large mean leaves of it."""
    x, y = (random(3000, dtype=dtype, mean=mean, std=std, seed=seed) for seed in (0, 1))
    needs = Need.MEAN | Need.DEVIATIONS
    assert_added(x, needs, rel=1e-9)
    assert_moments(measured(lambda kernel: kernel.add_all([0, 0], [x, y], [needs] * 2)), [x, y], needs, rel=1e-9)


def test_a_first_element_far_from_the_others() -> None:
    """The center of a span may be any element."""
    x = random(20_000)
    x[0] = 1e3
    assert_added(x, rel=1e-10)  # all powers are about 1e3; the fourth is 2e16 there, and 1e12 about the mean


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("values", [["nan"], ["inf"], ["-inf"], ["inf", "-inf"], ["nan", "inf"], ["0"], ["-0.0"]], ids=str)
@pytest.mark.parametrize("start", [0, 1500])
def test_elements_that_are_not_finite(values: list[str], start: int, dtype: torch.dtype) -> None:
    """They are counted, and never hidden: NaN makes the extremes NaN, and an infinity the squares infinite."""
    x = random(1700, dtype=dtype)
    x[start : start + len(values)] = torch.tensor([float(value) for value in values], dtype=dtype, device=DEVICE)
    actual = Moments(*measured(lambda kernel: kernel.add((0,), x, Need.EVERYTHING)).tolist())
    expected = textbook_moments([x])
    exact = ["nonfinite", "zeros", "maximum", "minimum", "squares", "magnitude", "token_norm"]
    for name in exact:
        assert getattr(actual, name) == pytest.approx(expected[name], rel=with_pairs(1e-12), nan_ok=True), name
    if expected["nonfinite"]:
        assert not np.isfinite(actual.mean)
        assert not np.isfinite(actual.deviations)


def test_nothing_but_nan() -> None:
    """All is NaN, and counted."""
    actual = Moments(*measured(lambda kernel: kernel.add((0,), torch.full((9,), torch.nan, device=DEVICE), Need.EVERYTHING)).tolist())
    assert actual.nonfinite == 9
    assert all(np.isnan(value) for value in (actual.maximum, actual.minimum, actual.mean, actual.squares))


def test_several_tensors_in_several_rows() -> None:
    """Rows merge all that was added to them, of different sizes and dtypes; a row without tensors is an empty tensor's."""
    first, second, third = random(3, 700, mean=5.0), random(40, dtype=torch.bfloat16), random(9000, dtype=torch.float64, mean=-1.0)
    kernel = TritonKernel(DEVICE)
    kernel.add((0, 3), first, Need.EVERYTHING)
    kernel.add((3,), second, Need.EVERYTHING)
    kernel.add((1, 3), third, Need.EVERYTHING)
    actual = kernel.collect(5)
    assert actual.shape == (NUM_FIELDS, 5)
    assert (actual.dtype, actual.device) == (torch.float64, DEVICE)
    assert_moments(actual[:, 0], [first])
    assert_moments(actual[:, 1], [third])
    assert_moments(actual[:, 3], [first, second, third])
    nothing = torch.stack(Moments.empty(2)).to(DEVICE)
    assert torch.equal(actual[:, [2, 4]], nothing)
    assert torch.equal(TritonKernel(DEVICE).collect(2), nothing)


def test_merging_is_that_of_the_moments() -> None:
    """Parts merged on the device are those that ``Moments.merge`` merges."""
    tensors = [random(n, mean=n, seed=n) for n in (3, 1100, 20, 4000)]
    apart, together = TritonKernel(DEVICE), TritonKernel(DEVICE)
    for row, tensor in enumerate(tensors):
        apart.add((row,), tensor, Need.EVERYTHING)
        together.add((row % 2,), tensor, Need.EVERYTHING)
    expected = torch.stack(Moments(*apart.collect(4)).merge(torch.tensor([0, 1, 0, 1], device=DEVICE), 2))
    torch.testing.assert_close(together.collect(2), expected, rtol=1e-12, atol=1e-9)


def test_what_is_added_may_change_afterwards() -> None:
    """A tensor belongs to its owner again when the method returns."""
    x = random(2000)
    before = x.clone()
    kernel = TritonKernel(DEVICE)
    kernel.add((0,), x, Need.EVERYTHING)
    x.zero_()
    assert_moments(kernel.collect(1)[:, 0], [before])


def strided(form: str) -> Tensor:
    """A tensor whose elements are not in the order of its dimensions, or not in one stretch of memory."""
    x = random(4, 6, 5, 8)
    forms = {
        "channels last": lambda: x.to(memory_format=torch.channels_last),
        "transposed": lambda: x.transpose(0, 3),
        "slice": lambda: x[:, 1:4],
        "every other": lambda: x[..., ::2],
        "expanded": lambda: x[:, :1].expand(4, 3, 5, 8),
        "unaligned": lambda: x.reshape(-1)[1:],
        "negative": lambda: torch._neg_view(x),
        "head": lambda: x[:, 1],
        "head of tokens": lambda: random(4, 20, 3, 8)[:, :, 1],
        "one token": lambda: x[:, 2, 3],
        "column": lambda: x[..., 3],
        "three levels": lambda: x[:, 1:3, 1:4, :5],
        "first tokens": lambda: random(2, 6, 5, 80)[:, :, :3, :70],
        "long rows": lambda: random(3, 4, 5000)[:, 1:3, 1:4500],
        "half": lambda: x.bfloat16()[:, 1],
        "short tokens": lambda: random(4, 6, 5, 3)[:, 1:5],
    }
    return forms[form]()


FORMS = ["channels last", "transposed", "slice", "every other", "expanded", "unaligned", "negative"]
FORMS += ["head", "head of tokens", "one token", "column", "three levels", "first tokens", "long rows", "half", "short tokens"]


@pytest.mark.parametrize("spans", ["short", "long"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("needs", [Need.EVERYTHING | Need.HISTOGRAM, Need.EVERYTHING & ~Need.TOKENS])
def test_a_tensor_in_another_order(form: str, needs: int, spans: str, request: pytest.FixtureRequest) -> None:
    """Every element counts once, and a token is along the last dimension, wherever the elements lie: alone, among others, with a shift."""
    if spans == "long":
        request.getfixturevalue("long_spans")
    x, kernel = strided(form), TritonKernel(DEVICE)
    shift = random(x.shape[-1], seed=5)
    kernel.add((0,), x, needs)
    kernel.add_all([1, 2], [x, random(7, 9)], [needs] * 2)
    kernel.add((3,), x, needs, None, shift)
    kernel.add((4,), x, needs, x.flip(0), shift)
    moments = kernel.collect(5)
    for row, expected in ((0, x), (1, x), (3, x.float() - shift), (4, x.float() - x.flip(0).float() - shift)):
        assert_moments(moments[:, row], [expected], needs)
        if needs & Need.HISTOGRAM:
            assert row_of_counts(kernel, row) == histogram(expected.cpu())


@pytest.mark.parametrize("form", ["channels last", "transposed"])
def test_a_dense_tensor_is_read_where_it_lies(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is made where the order of the elements does not matter."""
    read: list[int] = []
    monkeypatch.setattr(
        triton_kernel, "launch", lambda *arguments, **_constants: read.extend(x.data_ptr() for x in arguments[3:5] if x is not None)
    )
    kernel, x, other = TritonKernel(DEVICE), strided(form), strided(form)
    kernel.add((0,), x, Need.EVERYTHING & ~Need.TOKENS)
    kernel.add((0,), x, Need.SQUARES, other)
    assert read == [x.data_ptr(), x.data_ptr(), other.data_ptr()]


SHIFTS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "last dimension": lambda: random(70, seed=3),
    "scalar": lambda: random(seed=3),
    "channels": lambda: random(3, 1, seed=3),
    "full": lambda: random(4, 3, 70, seed=3),
    "half": lambda: random(70, seed=3, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("has_other", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("needs", [Need.EVERYTHING | Need.HISTOGRAM, Need.SQUARES])
def test_differences(shift: str, has_other: bool, dtype: torch.dtype, needs: int) -> None:
    """The moments and the counts are those of the difference, taken in float32, or in float64 where a tensor is."""
    x, taken = random(4, 3, 70, dtype=dtype), SHIFTS[shift]()
    other = random(4, 3, 70, dtype=torch.float32, seed=1, mean=3.0) if has_other else None
    expected = x if dtype == torch.float64 else x.float()
    for operand in (other, taken):
        expected = expected if operand is None else expected - operand
    kernel = TritonKernel(DEVICE)
    kernel.add((0,), x, needs, other, taken)
    assert_moments(kernel.collect(1)[:, 0], [expected], needs)
    if needs & Need.HISTOGRAM:
        assert row_of_counts(kernel) == histogram(expected.cpu())


@pytest.mark.usefixtures("long_spans")
def test_differences_over_several_programs() -> None:
    """Each program takes its own part of the other tensor and of the shift."""
    x, other = random(90, 70), random(90, 70, seed=1)
    for shift in (random(70, seed=2), random(90, 1, seed=2)):
        expected = x - other - shift
        assert_moments(measured(lambda kernel, shift=shift: kernel.add((0,), x, Need.EVERYTHING, other, shift)), [expected])


def test_the_difference_of_tensors_in_different_orders() -> None:
    """Elements are compared with those at the same index."""
    x, other = strided("channels last"), random(4, 6, 5, 8, seed=1)
    for tensor, taken in ((x, other), (other, x), (strided("slice"), other[:, 1:4])):
        add = lambda kernel, tensor=tensor, taken=taken: kernel.add((0,), tensor, Need.EVERYTHING, taken)  # noqa: E731
        assert_moments(measured(add), [tensor - taken])
    zero = Moments(*measured(lambda kernel: kernel.add((0,), x, Need.EVERYTHING, x.clone())))
    assert (zero.squares, zero.maximum, zero.zeros) == (0, 0, x.numel())


@pytest.mark.parametrize("spans", ["short", "long"])
@pytest.mark.parametrize("needs", [Need.EVERYTHING | Need.HISTOGRAM, Need.SQUARES | Need.EXTREMES])
def test_many_tensors_at_once(spans: str, needs: int, request: pytest.FixtureRequest) -> None:
    """Each row gets the moments and the counts of its tensor: of different sizes, dtypes, alignments and orders."""
    if spans == "long":
        request.getfixturevalue("long_spans")
    tensors = [random(3, 700), random(8, 16), random(1), random(1101)[1:], random(5, 77), *map(strided, FORMS[:3])]
    tensors += [random(70, 40, dtype=torch.bfloat16, mean=1.0), random(90, dtype=torch.float64), random(300, 3, dtype=torch.bfloat16)]
    kernel = TritonKernel(DEVICE)
    kernel.add((0,), tensors[1], needs)
    kernel.add_all(range(len(tensors)), tensors, [needs] * len(tensors))
    actual = kernel.collect(len(tensors))
    for row, tensor in enumerate(tensors):
        added = [tensor] if row else [tensor, tensors[1]]
        assert_moments(actual[:, row], added, needs)
        if needs & Need.HISTOGRAM:
            assert row_of_counts(kernel, row) == histogram(torch.cat([x.cpu().double().reshape(-1) for x in added]))


def test_tensors_with_different_needs() -> None:
    """A tensor's row has what it needs, whatever those beside it need."""
    tensors, needs = [random(50, 3), random(60, 7), random(70)], [Need.TOKENS, Need.SQUARES, Need.HISTOGRAM | Need.POWERS]
    kernel = TritonKernel(DEVICE)
    kernel.add_all([2, 0, 1], tensors, needs)
    actual = kernel.collect(3)
    for row, tensor, need in zip([2, 0, 1], tensors, needs, strict=True):
        assert_moments(actual[:, row], [tensor], need)
    assert kernel.counts(HISTOGRAM, [0, 1, 2]).sum(1).tolist() == [0, 70, 0]


def assert_counted(tensor: Tensor) -> None:
    """The counts are numpy's."""
    kernel = TritonKernel(DEVICE)
    kernel.add((0,), tensor, Need.HISTOGRAM)
    assert row_of_counts(kernel) == histogram(tensor.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_bin_of_every_number_of_half_precision(dtype: torch.dtype) -> None:
    """Every bit pattern is counted where it belongs: subnormal numbers, zeros of either sign, infinities and NaN among them."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).to(DEVICE)
    if IS_INTERPRETED and dtype == torch.bfloat16:
        # The interpreter, other than a GPU, makes zero of the smallest subnormal ones when it widens them.
        numbers = numbers[(numbers == 0) | ~(numbers.abs() < torch.finfo(dtype).smallest_normal)]
    assert_counted(numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_bins_at_their_edges(dtype: torch.dtype) -> None:
    """An edge, and its neighbours on both sides, are counted where they belong."""
    edges = torch.from_numpy(EDGES.copy()).to(dtype)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max]).to(dtype)
    up, down = (torch.nextafter(edges, torch.full_like(edges, sign * torch.inf)) for sign in (1, -1))
    assert_counted(torch.cat([edges, up, down, odd]).to(DEVICE))


def assert_finely_counted(tensor: Tensor) -> None:
    """The fine counts are numpy's."""
    kernel = TritonKernel(DEVICE)
    kernel.add((0,), tensor, Need.FINE_COUNTS)
    np.testing.assert_array_equal(kernel.counts(FINE, [0])[0].long().cpu().numpy(), fine_counts(tensor.cpu()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fine_bins_at_their_edges(dtype: torch.dtype) -> None:
    """Edges, limits of formats, and their neighbours, subnormal numbers among them, are counted where they belong."""
    numbers = adversaries(dtype).to(DEVICE)
    if IS_INTERPRETED and dtype == torch.bfloat16:  # as above
        numbers = numbers[(numbers == 0) | ~(numbers.abs() < torch.finfo(dtype).smallest_normal)]
    assert_finely_counted(numbers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fine_counts_within_and_outside_of_the_window(dtype: torch.dtype, long_spans: None) -> None:
    """A span's first elements tell its window: smaller and larger ones, zeros and what is not finite are counted as well."""
    largest = torch.finfo(dtype).max
    middle = random(5000, dtype=torch.float64)
    far = torch.tensor([0.0, -0.0, 1e-44, -1e-44, 1e-30, -1e-30, 1e30, -1e30, largest, -largest, torch.inf, -torch.inf, torch.nan])
    for first in (middle, middle * 1e-30, middle * 1e30, torch.zeros(5000), torch.full((5000,), torch.nan)):
        assert_finely_counted(torch.cat([first.double().cpu(), far.double(), middle.cpu()]).clamp(-largest, largest).to(dtype).to(DEVICE))


def test_elements_are_counted_finely_without_an_addition_to_memory_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a normal distribution, of zeros and NaN none, of a few outliers each; at the end a program adds its counts that are not zero."""
    if not IS_INTERPRETED:
        pytest.skip("only the interpreter tells how many lanes add to memory")
    from triton.runtime.interpreter import InterpreterBuilder  # only where Triton interprets

    added = {1: 0, 2: 0}  # by the dimensions of what adds: the counts of a program, and a tile of elements
    create = InterpreterBuilder.create_atomic_rmw

    def count(builder: object, *arguments: Any) -> object:
        mask = arguments[3].data
        added[mask.ndim] += int(mask.sum())
        return create(builder, *arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", count)
    x = random(100_000)
    x[::7], x[::1000] = 0.0, torch.nan
    for num_outliers in (0, 50):
        x[5001 : 5001 + num_outliers] = 1e30
        added.update({1: 0, 2: 0})
        assert_finely_counted(x)
        assert added[2] == num_outliers
        assert 0 < added[1] <= 98 * 256  # of each of 98 programs less than half of the slots


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(sign: int, dtype: torch.dtype, long_spans: None) -> None:
    """Their mean is the float64 formula's, also where a product leaves the range of the dtype, and wherever the elements lie."""
    x, y = random(40, 70, dtype=dtype), random(40, 70, dtype=dtype, seed=1)
    cases = [(x, y), (x.T, y.T), (x[:, 3:50], y[:, 3:50]), (x, y.T.contiguous().T), (x[0], y[0]), (x[:1, :1], y[:1, :1])]
    if dtype is not torch.float16:
        cases.append((x * 1e30, y * 1e20))
    kernel = TritonKernel(DEVICE)
    for row, (tensor, other) in enumerate(cases):
        kernel.add_product(row, tensor, other, sign)
    moments = kernel.collect(len(cases)).cpu()
    for row, (tensor, other) in enumerate(cases):
        product = sign * tensor.cpu().double() * other.cpu().double()
        assert float(moments[0, row]) == product.numel()
        assert float(moments[1, row]) == pytest.approx(float(product.mean()), rel=1e-12, abs=1e-13 * float(product.abs().mean()))


def test_fine_counts_of_many_tensors() -> None:
    """Each row has the counts of its tensors, beside a histogram or without one, of single tensors and of many at once."""
    kernel, tensors = TritonKernel(DEVICE), [random(300, 7, seed=seed, dtype=dtype) for seed, dtype in enumerate(DTYPES)]
    needs = [Need.FINE_COUNTS, Need.COUNTS, Need.FINE_COUNTS | Need.SQUARES, Need.HISTOGRAM]
    kernel.add_all(range(4), tensors, needs)
    kernel.add((0, 2), tensors[1], Need.FINE_COUNTS)
    expected = [[tensors[0], tensors[1]], [tensors[1]], [tensors[2], tensors[1]], []]
    actual = kernel.counts(FINE, range(4)).long().cpu().numpy()
    for row, members in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(row, fine_counts(torch.cat([torch.empty(0), *(x.cpu().double().reshape(-1) for x in members)])))
    assert row_of_counts(kernel, 1) == histogram(tensors[1].cpu())
    assert kernel.counts(HISTOGRAM, range(4)).sum(1).tolist() == [0, 2100, 0, 2100]


def test_counts_add_up() -> None:
    """Tensors of a row are counted together, over chunks of memory; a row without any has zeros; rows come in the order asked for."""
    kernel = TritonKernel(DEVICE)
    tensors = [random(10, seed=seed, dtype=DTYPES[seed % 4]) for seed in range(70)]
    for seed, tensor in enumerate(tensors):
        kernel.add((5, seed % 2), tensor, Need.HISTOGRAM)
    for row, members in ((5, tensors), (0, tensors[::2]), (1, tensors[1::2])):
        assert row_of_counts(kernel, row) == histogram(torch.cat([tensor.double().cpu() for tensor in members]))
    actual = kernel.counts(HISTOGRAM, [7, 1, 5])
    assert (actual.dtype, actual.device, actual.sum(1).tolist()) == (torch.float64, DEVICE, [0, 350, 700])


def test_a_step_that_begins_under_inference_mode() -> None:
    """A row goes on outside of inference mode, and inside again."""
    kernel, x, needs = TritonKernel(DEVICE), random(40), Need.EVERYTHING | Need.HISTOGRAM
    with torch.inference_mode():
        kernel.add((0,), x, needs)
    kernel.add((0,), x, needs)
    with torch.inference_mode():
        actual = kernel.collect(1)
        assert_moments(actual[:, 0], [x, x])
        assert row_of_counts(kernel) == histogram(torch.cat([x, x]).cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_before_the_first_step(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Every form: the values are those of torch's operations, so that the kernel is used."""
    monkeypatch.setattr(triton_kernel, "_is_working", {})
    needs = [Need.SQUARES, Need.SQUARES | Need.EXTREMES | Need.NONFINITE, Need.EVERYTHING | Need.COUNTS]
    launches = [Launch(dtype, need, form) for need in needs for form in Form if form is not Form.PRODUCT]
    check_triton(DEVICE, [*launches, Launch(dtype, Need.MEAN, Form.PRODUCT)])
    assert triton_kernel.works(DEVICE), caplog.text
