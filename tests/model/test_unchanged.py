"""Parameters that a run writes into are as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_module_monitor.model.unchanged import UnchangedParameters


class Odd(nn.Module):
    """Parameters of many dtypes and layouts: a scalar, an empty one, one with gaps, one with NaN and -0, one that is not written into."""

    def __init__(self) -> None:
        super().__init__()
        values: dict[str, Tensor] = {
            "matrix": torch.randn(3, 4),
            "scalar": torch.tensor(2.0),
            "empty": torch.empty(0),
            "transposed": torch.randn(4, 3).T,
            "with_gaps": torch.randn(4, 6)[:, ::2],
            "expanded": torch.randn(1, 4).expand(3, 4),
            "odd": torch.tensor([float("nan"), -0.0, 1.0]),
            "of_bfloat16": torch.randn(5).bfloat16(),
            "of_float8": torch.randn(5).to(torch.float8_e4m3fn),
            "of_complex": torch.randn(5, dtype=torch.complex64),
            "integers": torch.arange(5),
        }
        for name, tensor in values.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.untouched = nn.Parameter(torch.tensor([float("nan"), -0.0]))


def write(module: nn.Module) -> None:
    """Write into the memory of parameters as EMA code does."""
    for name, parameter in module.named_parameters():
        if name == "odd":
            parameter.data.abs_()  # -0 becomes 0, which is equal
        elif name not in {"untouched", "expanded"}:
            wide = torch.complex64 if parameter.is_complex() else torch.float32  # float8 has no sums
            parameter.data.copy_(parameter.data.to(wide) + 1)
    module.expanded.data[0].add_(1)  # type: ignore[operator, union-attr]


def replace_memory(module: nn.Module) -> None:
    """Give each parameter other memory, of another layout."""
    for parameter in module.parameters():
        parameter.data = torch.ones(7)


def share_memory(module: nn.Module) -> None:
    """Give two parameters the memory of a third, and write into it."""
    module.scalar.data = module.with_gaps.data = module.matrix.data
    module.matrix.data.zero_()  # type: ignore[operator]


def replace_objects(module: nn.Module) -> None:
    """Replace, add and remove parameters, as a VQ-VAE does with its codebook."""
    module.matrix.data.zero_()  # type: ignore[operator]
    module.matrix, module.late = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(3))
    del module.scalar


def state(module: nn.Module) -> dict[str, Any]:
    """What must not change of each parameter: the object, its memory, and its bytes."""
    return {
        name: (id(parameter), parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype, bytes_of(parameter))
        for name, parameter in module.named_parameters()
    }


def bytes_of(tensor: Tensor) -> list[int]:
    """The bytes of the elements."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [write, replace_memory, share_memory, replace_objects])
def test_parameters_are_as_before_every_run(change: Callable[[nn.Module], None]) -> None:
    """Each parameter is the same object, with the same memory and the same bits, also where the user writes values into it between runs."""
    torch.manual_seed(0)
    module = Odd()
    parameters = UnchangedParameters(module)
    for _run in range(3):
        before = state(module)
        with parameters.restored():
            change(module)
            assert state(module) != before
        assert state(module) == before
        module.matrix.data.add_(1)


def test_a_first_run_that_fails_is_no_proof_that_nothing_is_written() -> None:
    """The reference is run again after an error, which may have come before the writing."""
    module = Odd()
    parameters, before = UnchangedParameters(module), state(module)
    with pytest.raises(ZeroDivisionError), parameters.restored():
        raise ZeroDivisionError
    for _run in range(2):
        with parameters.restored():
            write(module)
        assert state(module) == before


class Copies(TorchDispatchMode):
    """Counts copied elements."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}:
            self.num += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_only_what_was_written_into_is_copied_in_later_runs() -> None:
    """A teacher of 12 weights beside a student of 5000."""
    module = nn.ModuleDict({"student": nn.Linear(99, 50), "teacher": nn.Linear(3, 3)})
    parameters, counts = UnchangedParameters(module), []
    for _run in range(3):
        with Copies() as copies, parameters.restored():
            for parameter in module["teacher"].parameters():
                parameter.data.mul_(0.5)
        counts.append(copies.num)
    assert counts == [5012, 12, 12]


def test_a_parameter_without_memory_is_left_alone() -> None:
    """Not read, as it has no values."""
    module = nn.Linear(3, 3, device="meta")
    with UnchangedParameters(module).restored():
        pass
    assert module.weight.is_meta
