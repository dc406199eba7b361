"""A plain layer once more, by its operation alone: for a result that is looked at and forgotten."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as global_hooks

from lightning_module_monitor.modules.hooks import UncopiedHook
from lightning_module_monitor.statistics.running import readable_address


class LayerAgain:
    """Does what a plain ``torch.nn.Linear``, ``LayerNorm`` or ``RMSNorm`` does. A result is gone when the next one comes."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Tensor | None:
        """The module's output, without a graph; ``None`` where it must be called: it is no such layer, or the operation another.

        Args:
            module: Any.
            args: The arguments of a call without keywords.
        """
        operation, names = _OPERATIONS.get(type(module).forward, (None, set()))
        if len(args) != 1 or operation is None or not _is_plain(module, names):
            return None
        x, parameters = args[0], [one for one in module._parameters.values() if one is not None]
        if not all(map(readable_address, (x, *parameters))) or torch.is_autocast_enabled("cpu"):
            return None
        with torch.no_grad():
            return operation(self, module, x)

    def _linear(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Into memory that is there already: new memory is zeroed by the system, page by page, before it can be written."""
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        if weight is None or x.dim() not in (2, 3) or x.shape[-1] != weight.shape[1]:
            return None
        shape = (*x.shape[:-1], len(weight))
        size = x.numel() // max(1, x.shape[-1]) * len(weight)
        if self._memory.numel() < size:
            self._memory = torch.empty(size)
        result, rows = self._memory[:size].view(-1, len(weight)), x.detach().reshape(-1, x.shape[-1])
        torch.mm(rows, weight.t(), out=result) if bias is None else torch.addmm(bias, rows, weight.t(), out=result)
        return result.view(shape)

    def _layer_norm(self, module: nn.Module, x: Tensor) -> Tensor | None:
        assert isinstance(module, nn.LayerNorm)
        shape, weight, bias = module.normalized_shape, module._parameters["weight"], module._parameters["bias"]
        return F.layer_norm(x.detach(), list(shape), weight, bias, module.eps) if x.shape[-len(shape) :] == shape else None

    def _rms_norm(self, module: nn.Module, x: Tensor) -> Tensor | None:
        assert isinstance(module, nn.RMSNorm)
        shape = module.normalized_shape
        return F.rms_norm(x.detach(), list(shape), module._parameters["weight"], module.eps) if x.shape[-len(shape) :] == shape else None


_OPERATIONS = {
    nn.Linear.forward: (LayerAgain._linear, {"weight", "bias"}),
    nn.LayerNorm.forward: (LayerAgain._layer_norm, {"weight", "bias"}),
    nn.RMSNorm.forward: (LayerAgain._rms_norm, {"weight"}),
}
"""The operation, and the names of its parameters, by what a module runs."""


def _is_plain(module: nn.Module, names: set[str]) -> bool:
    """Whether a call runs the forward of the module's type, its own parameters, and no hooks but the monitor's."""
    if type(module).__call__ is not nn.Module.__call__ or "forward" in vars(module) or module._compiled_call_impl is not None:
        return False
    if not names <= module._parameters.keys():
        return False
    if global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        return False
    return all(isinstance(hook, UncopiedHook) for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
