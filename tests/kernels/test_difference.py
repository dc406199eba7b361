"""A difference that is never written down is measured as one that is."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels import Implementation, assert_textbook, collected, over_implementations, without_numba
from helpers.textbook import PLAIN, textbook
from torch import Tensor

from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.statistics.functions import Function
from lightning_module_monitor.statistics.precision import Difference
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from lightning_module_monitor.statistics.stream import BASE, OWN, Stream
from lightning_module_monitor.step.accumulator import StepAccumulator

SHARED_CHUNK_ELEMENTS = 1024
"""What the compiled kernel measures at once."""

NAMES = ["rms", "norm", "mean", "std", "abs_max", "token_norm"]


def stream(site: str, *names: str) -> Stream:
    """A stream of differences with some statistics."""
    statistics = {name: item for name in names if isinstance(item := STATISTICS[name], Statistic)}
    return Stream("activation_difference", site, dict(statistics))


def forms(dtype: torch.dtype) -> dict[str, Difference]:
    """A difference in every form, and in memory that is not in order."""
    generator = torch.Generator().manual_seed(0)
    a, b, shift = (torch.randn(shape, generator=generator).to(dtype) for shape in ((40, 3, 130), (40, 3, 130), (130,)))
    return {
        "of two": Difference(a, b),
        "of two and a shift": Difference(a, b, shift),
        "of one and a shift": Difference(a, None, shift),
        "transposed": Difference(a.transpose(0, 1), b.transpose(0, 1)),
        "one transposed": Difference(a, b.transpose(0, 1).contiguous().transpose(0, 1), shift),
        "shift of another dimension": Difference(a, b, shift[:3].reshape(3, 1)),
        "huge": Difference(a.float() * 1e30, b.float() * 1e30),
        "tiny": Difference(a.float() * 1e-30, b.float() * 1e-30),
        "not finite": Difference(a.clone().index_fill_(0, torch.tensor([3]), torch.nan), b),
        "empty": Difference(a[:0], b[:0]),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("form", forms(torch.float32))
@pytest.mark.parametrize("has_numba", [True, False])
def test_every_form_is_the_textbooks(form: str, dtype: torch.dtype, has_numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares alone, and everything; with the compiled loops, and without them."""
    if not has_numba:
        without_numba(monkeypatch)
    difference = forms(dtype)[form]
    parts = [part.double() for part in (difference.tensor, difference.other, difference.shift) if part is not None]
    expected: Tensor = parts[0] - sum(parts[1:])
    accumulator = StepAccumulator(lambda *_error: None)
    squares, everything = stream("squares", "rms"), stream("everything", *NAMES)
    for _micro_batch in range(2):
        accumulator.observe_for([(difference, [(squares, OWN)]), (difference, [(everything, OWN)])])
    values = accumulator.collect().values
    twice = torch.cat([expected, expected])
    for key, value in values.items():
        name = key.rpartition("/")[2]
        if twice.numel():
            atol = 1e-6 * textbook("abs_mean", twice) if name == "mean" else 0
            assert value == pytest.approx(textbook(name, twice), rel=2e-6, abs=atol, nan_ok=True), key
    assert len(values) == 7


def test_rows_that_need_no_more_than_the_first_share_its_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that need more get their own; functions get the difference itself."""
    difference = forms(torch.float32)["of two"]
    accumulator = StepAccumulator(lambda *_error: None)
    added: list[object] = []
    original = accumulator._table.add
    monkeypatch.setattr(accumulator._table, "add", lambda *args: (added.append(args), original(*args))[1])
    first, same, relative = stream("a", "rms"), stream("b", "norm"), stream("c", "ratio")
    more = Stream("activation_difference", "d", {**stream("d", "mean").outputs, "total": Function("sum", function=torch.sum)})
    accumulator.observe_for([(difference, [(first, OWN), (same, OWN), (relative, OWN), (relative, BASE), (more, OWN)])])
    values = accumulator.collect().values
    assert len(added) == 2
    computed = difference.computed()
    assert values["activation_difference/b/norm"] == pytest.approx(textbook("norm", computed), rel=1e-6)
    assert values["activation_difference/c/ratio"] == pytest.approx(1.0, rel=1e-9)
    assert values["activation_difference/d/total"] == pytest.approx(float(computed.double().sum()), rel=1e-4)


def test_shapes_must_agree() -> None:
    """Nothing is broadcast by accident."""
    with pytest.raises(ValueError, match=r"its shape is \(3, 4\), and it is compared with a tensor of shape \(3, 1\)"):
        Difference(torch.ones(3, 4), torch.ones(3, 1))


def test_squares_that_leave_float32_are_taken_in_float64_chunk_by_chunk() -> None:
    """Ordinary elements, some too small to be squared in float32, some too large, zeros: what is a chunk's is right in the sum."""
    x = torch.randn(8, SHARED_CHUNK_ELEMENTS // 64, 64)
    scale = torch.tensor([1e-30, 1.0, 0.0, 1e-19, 1e-3, 1e-14, 1.0, 1e-25]).view(-1, 1, 1)
    for factor in (1.0, 1e30):
        difference = Difference(x * scale * factor, x * -scale * factor)
        accumulator = StepAccumulator(lambda *_error: None)
        chunks = [Difference(difference.tensor[i], -difference.tensor[i]) for i in range(8)]
        accumulator.observe_for((chunk, [(stream(f"chunk_{i}", "norm"), OWN)]) for i, chunk in enumerate(chunks))
        accumulator.observe_for([(difference, [(stream("all", "norm"), OWN)])])
        values = accumulator.collect().values
        for i, chunk in enumerate(chunks):
            assert values[f"activation_difference/chunk_{i}/norm"] == pytest.approx(textbook("norm", chunk.computed()), rel=1e-6, abs=0)
        assert values["activation_difference/all/norm"] == pytest.approx(textbook("norm", difference.computed()), rel=1e-6, abs=0)


@over_implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", [form for form in forms(torch.float32) if form != "empty"])
def test_a_kernel_measures_a_difference_as_float32_has_it(implementation: Implementation, form: str, dtype: torch.dtype) -> None:
    """Every statistic, in one row and in several, merged into what is there."""
    difference = forms(dtype)[form]
    written = difference.computed()
    kernel = implementation.make()
    kernel.add((2,), written, Need.EVERYTHING)
    for rows in ((0,), (1, 2)):
        kernel.add(rows, difference.tensor, Need.EVERYTHING, difference.other, difference.shift)
    moments = collected(kernel, 3)
    for row, expected in enumerate([written, written, torch.cat([written, written])]):
        assert_textbook(moments, expected, implementation.rtol, PLAIN, row)
