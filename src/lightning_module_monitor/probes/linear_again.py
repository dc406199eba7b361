"""A linear layer once more, for a result that is looked at and forgotten: into memory that is there already.

New memory is zeroed by the system, page by page, before it can be written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_module_monitor.modules.hooks import runs_forward_alone
from lightning_module_monitor.statistics.running import readable_address

KEPT_ELEMENTS = 1 << 22
"""So much is kept from step to step: 16 MiB."""


class LinearAgain:
    """Does what a plain ``torch.nn.Linear`` does, by the same operation. A result is gone when the next one comes."""

    def __init__(self) -> None:
        self._memory = _memory(0)

    def release(self) -> None:
        """Give memory back, if it is much."""
        if self._memory.numel() > KEPT_ELEMENTS:
            self._memory = _memory(0)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor | None:
        """The module's output, without a graph; ``None`` where it must be called: it is no such layer, or the operation another.

        Args:
            module: Any.
            args: The arguments of a call without keywords.
        """
        if len(args) != 1 or not _is_plain(module):
            return None
        x, weight, bias = args[0], module._parameters["weight"], module._parameters["bias"]
        parts = [part for part in (x, weight, bias) if part is not None]
        if not all(map(readable_address, parts)) or x.dim() not in (2, 3):
            return None
        if weight is None or torch.is_autocast_enabled("cpu") or x.shape[-1] != weight.shape[1]:
            return None
        shape = (*x.shape[:-1], len(weight))
        size = x.numel() // max(1, x.shape[-1]) * len(weight)
        memory = self._memory if self._memory.numel() >= size else _memory(size)
        result, rows = memory[:size].view(-1, len(weight)), x.detach().reshape(-1, x.shape[-1])
        if not readable_address(result):
            return None  # within a transform of torch.func, which wraps what is made there
        self._memory = memory
        with torch.no_grad():
            torch.mm(rows, weight.t(), out=result) if bias is None else torch.addmm(bias, rows, weight.t(), out=result)
        return result.view(shape)


def _is_plain(module: nn.Module) -> bool:
    """Whether a call runs the forward of ``torch.nn.Linear``, its own parameters, and no hooks but the monitor's."""
    is_linear = type(module).forward is nn.Linear.forward and {"weight", "bias"} <= module._parameters.keys()
    return is_linear and runs_forward_alone(module)


def _memory(num_elements: int) -> Tensor:
    """Memory that any step can write, whatever the program's defaults are, and the mode that this step runs in."""
    with torch.inference_mode(mode=False):
        return torch.empty(num_elements, dtype=torch.float32, device="cpu")
