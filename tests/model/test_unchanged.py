"""Parameters that a run writes into are as before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from helpers.memory import peak_bytes
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
    """What must not change of each parameter: the object, its storage, and its bytes."""
    return {
        name: (id(parameter), storage_of(parameter), parameter.shape, parameter.stride(), parameter.dtype, bytes_of(parameter))
        for name, parameter in module.named_parameters()
    }


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, which other tensors may share."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def bytes_of(tensor: Tensor) -> list[int]:
    """The bytes of the elements."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [write, replace_memory, share_memory, replace_objects])
def test_parameters_are_as_before_every_run(change: Callable[[nn.Module], None]) -> None:
    """Each parameter is the same object, with the same storage and the same bits, also after a write between runs."""
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


def test_writing_by_an_address_is_undone() -> None:
    """As numpy and kernels of other packages write, without an operation of torch."""
    module = Odd()
    before = state(module)
    with UnchangedParameters(module).restored():
        module.matrix.detach().numpy()[:] = 0  # type: ignore[operator, union-attr]
        assert state(module) != before
    assert state(module) == before


def test_a_first_run_that_fails_is_no_proof_that_nothing_is_written() -> None:
    """The reference is run again after an error, which may have come before the writing; or after it, which is undone, too."""
    module = Odd()
    parameters, before = UnchangedParameters(module), state(module)
    for writes in (False, True):
        with suppress(ZeroDivisionError), parameters.restored():
            if writes:
                write(module)
            raise ZeroDivisionError
        assert state(module) == before
    for _run in range(2):
        with parameters.restored():
            write(module)
        assert state(module) == before


def test_tensors_that_share_a_parameters_memory_still_share_it() -> None:
    """A view that the module holds, and a second parameter in the same storage."""
    module = Odd()
    view, module.tied = module.matrix.data[0], nn.Parameter(module.matrix.data[1:])  # type: ignore[index]
    before = state(module)
    with UnchangedParameters(module).restored():
        view.zero_()
        assert not module.matrix[0].any()  # type: ignore[index]
    assert state(module) == before
    module.matrix.data[:2] = 5.0  # type: ignore[index]
    assert (view == 5).all()
    assert (module.tied[0] == 5).all()


@pytest.mark.parametrize("shared", [lambda: torch.from_numpy(np.ones(3)), lambda: torch.ones(3).share_memory_()])
def test_memory_that_has_another_owner_is_restored(shared: Callable[[], Tensor]) -> None:
    """That of numpy and of other processes, which torch copies at once."""
    module = nn.ParameterDict({"weight": nn.Parameter(shared())})
    with UnchangedParameters(module).restored():
        module["weight"].data.zero_()
    assert (module["weight"] == 1).all()


def test_only_what_was_written_into_is_copied_in_later_runs() -> None:
    """A teacher of 4 KB beside a student of 4 MB. No copy is ever on the host: all are where the parameter is."""
    module = nn.ModuleDict({"student": nn.Linear(1000, 1000), "teacher": nn.Linear(31, 32)})
    parameters, before = UnchangedParameters(module), state(module)

    def move_teacher() -> None:
        with parameters.restored():
            for parameter in module["teacher"].parameters():
                parameter.data.mul_(0.5)
            module["student"](torch.ones(1, 1000))

    assert 4_000_000 < peak_bytes(move_teacher) < 9_000_000  # the bits of the largest parameter are compared
    assert state(module) == before
    for _later_run in range(2):
        assert peak_bytes(move_teacher) < 100_000
        assert state(module) == before


def test_no_parameter_is_copied_to_the_host() -> None:
    """In the first run and the second, in which the host reads which parameters were written into, and nothing else."""
    module = Odd()
    parameters = UnchangedParameters(module)
    sizes: list[int] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "device" not in (kwargs or {})
            return function(*args, **(kwargs or {}))

    original = Tensor.tolist

    def tolist(tensor: Tensor) -> Any:
        sizes.append(tensor.numel())
        return original(tensor)

    with pytest.MonkeyPatch.context() as patch, Reads():
        patch.setattr(Tensor, "tolist", tolist)
        for _run in range(3):
            with parameters.restored():
                write(module)
    assert sizes == [len(list(module.parameters()))]


def test_a_parameter_without_memory_is_left_alone() -> None:
    """Not read, as it has no values."""
    module = nn.Linear(3, 3, device="meta")
    with UnchangedParameters(module).restored():
        pass
    assert module.weight.is_meta
