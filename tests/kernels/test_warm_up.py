"""Before the first step: the Triton kernel is used only if its values are those of torch's operations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_module_monitor.kernels import triton_kernel, warm_up
from lightning_module_monitor.kernels.bins_of_floats import Bins
from lightning_module_monitor.kernels.moments import FIELDS_OF_NEED, Moments, Need
from lightning_module_monitor.kernels.torch_kernel import TorchKernel
from lightning_module_monitor.kernels.warm_up import Form, Launch, check_triton

CPU = torch.device("cpu")
NEEDS = Need.EVERYTHING | Need.COUNTS
LAUNCHES = [Launch(dtype, Need.MEAN if form is Form.PRODUCT else NEEDS, form) for dtype in (torch.float32, torch.bfloat16) for form in Form]
added: list[tuple[str, torch.dtype, bool]] = []


class Right(TorchKernel):
    """In place of the Triton kernel; notes what is measured."""

    is_within = False
    """Whether ``add`` is called by the kernel itself."""

    def add(self, rows: Any, tensor: Tensor, needs: int, *operands: Tensor | None, scale: Tensor | None = None) -> None:
        if not self.is_within:
            added.append(("one" if operands in ((), (None, None)) else "difference", tensor.dtype, scale is not None))
        super().add(rows, tensor, needs, *operands, scale=scale)

    def add_product(self, row: int, tensor: Tensor, other: Tensor, sign: int) -> None:
        added.append(("product", tensor.dtype, False))
        self.is_within = True
        super().add_product(row, tensor, other, sign)
        self.is_within = False

    def add_all(self, rows: Any, tensors: Any, needs: Any, *, scale: Tensor | None = None) -> None:
        added.append(("many", tensors[0].dtype, scale is not None))
        self.is_within = True
        super().add_all(rows, tensors, needs, scale=scale)
        self.is_within = False


class NoCompiler(Right):
    """One that cannot be compiled for half precision."""

    def add(self, rows: Any, tensor: Tensor, *arguments: Any, **scale: Any) -> None:
        if tensor.dtype == torch.bfloat16:
            raise RuntimeError("PTX JIT compilation failed")
        super().add(rows, tensor, *arguments, **scale)


class IsFull(Right):
    """One on a device without memory."""

    def collect(self, num_rows: int) -> Tensor:
        raise torch.cuda.OutOfMemoryError(f"no memory for {num_rows} rows")


def wrong(field: str) -> type[Right]:
    """A kernel with one wrong value in one field."""

    class Wrong(Right):
        def collect(self, num_rows: int) -> Tensor:
            moments = super().collect(num_rows).clone()
            moments[Moments._fields.index(field), 0] *= 1.001
            return moments

    return Wrong


class WrongCounts(Right):
    """A kernel that counts an element in the bin beside its own."""

    def counts(self, bins: Bins, rows: Any) -> Tensor:
        return super().counts(bins, rows).roll(1, -1)


def checked(kernel: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of a check with a kernel in place of Triton's."""
    monkeypatch.setattr(triton_kernel, "_is_working", {CPU: True})
    monkeypatch.setattr(warm_up, "TritonKernel", kernel)
    added.clear()
    with caplog.at_level(logging.WARNING):
        check_triton(CPU, LAUNCHES)
    return [record.getMessage() for record in caplog.records]


def test_a_kernel_that_is_right(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is logged, it is used, and no random number was drawn; each form was tried in each dtype."""
    state = torch.get_rng_state()
    assert checked(Right, monkeypatch, caplog) == []
    assert triton_kernel.works(CPU)
    assert torch.equal(torch.get_rng_state(), state)
    forms = [("one", False), ("one", True), ("difference", False), ("many", False), ("product", False)]
    assert {*added} == {(how, dtype, is_scaled) for how, is_scaled in forms for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("field", [name for names in FIELDS_OF_NEED.values() for name in names if name not in ("zeros", "nonfinite")])
def test_a_kernel_with_a_wrong_value(field: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One line gives both values, and torch's operations measure."""
    (warning,) = checked(wrong(field), monkeypatch, caplog)
    first = "product" if field == "mean" else "difference"  # of those that have the field
    assert warning.startswith(f"Triton does not work on cpu (ValueError: {field} of a {first} of tensors of torch.bfloat16 was [")
    assert "tensors there are measured by torch operations" in warning
    assert not triton_kernel.works(CPU)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (WrongCounts, "(ValueError: counts of a difference of tensors of torch.bfloat16 differ from those of torch's operations)"),
        (NoCompiler, "(RuntimeError: PTX JIT compilation failed)"),
    ],
)
def test_a_kernel_that_does_not_work(
    kernel: type, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if only one dtype, or only counts, are wrong."""
    (warning,) = checked(kernel, monkeypatch, caplog)
    assert warning.startswith(f"Triton does not work on cpu {expected}")
    assert not triton_kernel.works(CPU)


def test_a_device_without_memory_says_nothing_of_the_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is used."""
    assert checked(IsFull, monkeypatch, caplog) == []
    assert triton_kernel.works(CPU)


@pytest.mark.parametrize(("device", "is_checked"), [("cuda", True), ("cpu", False), ("mps", False), ("xpu", False)])
def test_what_is_compiled_for_a_device(device: str, is_checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels for CUDA and ROCm."""
    found: list[object] = []
    check: Callable[..., None] = lambda *arguments: found.append(arguments)  # noqa: E731
    monkeypatch.setattr(warm_up, "check_triton", check)
    warm_up.warm_up(torch.device(device), LAUNCHES)
    assert found == ([(torch.device(device), LAUNCHES)] if is_checked else [])
