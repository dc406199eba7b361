"""A linear layer once more, for a result that is looked at and forgotten: into memory that is there already.

New memory is zeroed by the system, page by page, before it can be written. And what a step finds prepared it need not make: while a
model runs, the caches belong to its layers, and an operation of torch that does next to nothing takes as long as reading a small tensor.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_module_monitor.modules.hooks import runs_forward_alone
from lightning_module_monitor.statistics.running import readable_address

KEPT_ELEMENTS = 1 << 22
"""So much is kept from step to step: 16 MiB."""


@dataclass(frozen=True)
class _Prepared:
    """What one layer needs for inputs of one shape."""

    weight: Tensor
    place: int
    """Where the weight's elements were when it was transposed."""
    transposed: Tensor
    shape: torch.Size
    """That of the input."""
    rows: Tensor
    """The result, shape ``(tokens, features)``."""
    result: Tensor
    """The same in the shape of the layer's output."""
    result_place: int


class Again(NamedTuple):
    """A layer and an input of it, both seen to be what they seem.

    Attributes:
        prepared: What the layer needs.
        x: The input.
        bias: The layer's.
        input_place: Where the input lies in memory.
        bias_place: Where the bias does, 0 without one.
    """

    prepared: _Prepared
    x: Tensor
    bias: Tensor | None
    input_place: int
    bias_place: int

    def run(self) -> Tensor:
        """The layer's output, without a graph. It is gone when another layer is run again."""
        # Detached, which is quicker than a mode in which there is no graph.
        tokens = self.x.detach() if self.x.dim() == 2 else self.x.detach().view(-1, self.x.shape[-1])
        if self.bias is None:
            torch.mm(tokens, self.prepared.transposed, out=self.prepared.rows)
        else:
            torch.addmm(self.bias.detach(), tokens, self.prepared.transposed, out=self.prepared.rows)
        return self.prepared.result


class LinearAgain:
    """Does what a plain ``torch.nn.Linear`` does, by the same operation, for one at a time.

    Attributes:
        turn: The thread that has it may run a layer and look at the result. Others go on while torch computes.
    """

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self._memory = _NOTHING
        self._prepared: dict[nn.Module, _Prepared] = {}

    def __reduce__(self) -> tuple[type[LinearAgain], tuple[()]]:
        """A copy has prepared nothing, and nobody has its turn: what is prepared are addresses, and a lock cannot be copied."""
        return LinearAgain, ()

    def release(self) -> None:
        """Give memory back, if it is much."""
        if self._memory.numel() > KEPT_ELEMENTS:
            self.clear()

    def clear(self) -> None:
        """Forget all layers, and give all memory back."""
        self._memory = _NOTHING
        self._prepared.clear()

    def prepare(self, module: nn.Module, args: tuple[Any, ...]) -> Again | None:
        """Get ready; ``None`` where the module must be called: it is no such layer, or the operation another.

        Args:
            module: Any.
            args: The arguments of a call without keywords.
        """
        if len(args) != 1 or not _is_plain(module) or torch.is_autocast_enabled("cpu"):
            return None
        x, weight, bias = args[0], module._parameters["weight"], module._parameters["bias"]
        input_place, bias_place = readable_address(x), 0 if bias is None else readable_address(bias)
        if weight is None or weight.dim() != 2 or not input_place:
            return None
        # A bias of another shape is added to other things, or by another operation.
        if bias is not None and (bias.shape != weight.shape[:1] or not bias_place):
            return None
        # What a transform of torch.func makes is wrapped, and what is prepared is not.
        place = 0 if torch._C._are_functorch_transforms_active() else readable_address(weight)
        if not place or x.dim() not in (2, 3) or x.shape[-1] != weight.shape[1]:
            return None
        known = self._prepared.get(module)
        is_known = known is not None and known.weight is weight and known.place == place and known.shape == x.shape
        # Rows may have been cut off a weight, which is where it was.
        if known is None or not is_known or known.rows.shape[1] != len(weight):
            known = self._prepared[module] = self._prepare(weight, place, x.shape)
        return Again(known, x, bias, input_place, bias_place)

    def _prepare(self, weight: Tensor, place: int, shape: torch.Size) -> _Prepared:
        features = len(weight)
        size = shape[:-1].numel() * features
        if self._memory.numel() < size:
            self.clear()
            self._memory = _memory(size)
        with torch.inference_mode(mode=False), torch.no_grad():
            memory = self._memory[:size]
            rows, result = memory.view(-1, features), memory.view(*shape[:-1], features)
            return _Prepared(weight, place, weight.detach().t(), shape, rows, result, result.data_ptr())


def _is_plain(module: nn.Module) -> bool:
    """Whether a call runs the forward of ``torch.nn.Linear``, its own parameters, and no hooks but the monitor's."""
    parameters = module._parameters
    return type(module).forward is nn.Linear.forward and "weight" in parameters and "bias" in parameters and runs_forward_alone(module)


def _memory(num_elements: int) -> Tensor:
    """Memory that any step can write, whatever the program's defaults are, and the mode that this step runs in."""
    with torch.inference_mode(mode=False):
        return torch.empty(num_elements, dtype=torch.float32, device="cpu")


_NOTHING = _memory(0)
"""Made once: where an error has left a mode of torch's on, nothing new is to be made of it."""
