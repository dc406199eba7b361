"""A linear layer once more, for a result that is looked at and forgotten: into memory that is there already.

New memory is zeroed by the system, page by page, before it can be written. And what a step finds prepared it need not make: while a
model runs, the caches belong to its layers, and an operation of torch that does next to nothing takes as long as reading a small tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


class LinearAgain:
    """Does what a plain ``torch.nn.Linear`` does, by the same operation. A result is gone when the next one comes."""

    def __init__(self) -> None:
        self._memory = _NOTHING
        self._prepared: dict[nn.Module, _Prepared] = {}

    def release(self) -> None:
        """Give memory back, if it is much."""
        if self._memory.numel() > KEPT_ELEMENTS:
            self.clear()

    def clear(self) -> None:
        """Forget all layers, and give all memory back."""
        self._memory = _NOTHING
        self._prepared.clear()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor | None:
        """The module's output, without a graph; ``None`` where it must be called: it is no such layer, or the operation another.

        Args:
            module: Any.
            args: The arguments of a call without keywords.
        """
        if len(args) != 1 or not _is_plain(module) or torch.is_autocast_enabled("cpu"):
            return None
        x, weight, bias = args[0], module._parameters["weight"], module._parameters["bias"]
        if weight is None or weight.dim() != 2 or not readable_address(x):
            return None
        # A bias of another shape is added to other things, or by another operation.
        if bias is not None and (bias.shape != weight.shape[:1] or not readable_address(bias)):
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
        with torch.no_grad():
            tokens = x if x.dim() == 2 else x.view(-1, x.shape[-1])
            if bias is None:
                torch.mm(tokens, known.transposed, out=known.rows)
            else:
                torch.addmm(bias, tokens, known.transposed, out=known.rows)
        return known.result

    def _prepare(self, weight: Tensor, place: int, shape: torch.Size) -> _Prepared:
        features = len(weight)
        size = shape[:-1].numel() * features
        if self._memory.numel() < size:
            self.clear()
            self._memory = _memory(size)
        with torch.inference_mode(mode=False), torch.no_grad():
            memory = self._memory[:size]
            return _Prepared(weight, place, weight.t(), shape, memory.view(-1, features), memory.view(*shape[:-1], features))


def _is_plain(module: nn.Module) -> bool:
    """Whether a call runs the forward of ``torch.nn.Linear``, its own parameters, and no hooks but the monitor's."""
    is_linear = type(module).forward is nn.Linear.forward and {"weight", "bias"} <= module._parameters.keys()
    return is_linear and runs_forward_alone(module)


def _memory(num_elements: int) -> Tensor:
    """Memory that any step can write, whatever the program's defaults are, and the mode that this step runs in."""
    with torch.inference_mode(mode=False):
        return torch.empty(num_elements, dtype=torch.float32, device="cpu")


_NOTHING = _memory(0)
"""Made once: where an error has left a mode of torch's on, nothing new is to be made of it."""
