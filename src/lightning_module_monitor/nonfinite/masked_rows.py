"""Attention that masks all keys of a query: its softmax divides zero by zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)
_MASKS = {F.scaled_dot_product_attention: ("attn_mask",), F.multi_head_attention_forward: ("attn_mask", "key_padding_mask")}


class MaskedRows(TorchFunctionMode):
    """Reads the results of softmax and attention on the host, in a step that is known to have a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.is_found = False
        """Whether a result was NaN because all keys of a row were masked."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  # the result of the function
        result = func(*args, **(kwargs or {}))
        if not self.is_found and (func in _SOFTMAX or func in _MASKS):
            output = result[0] if isinstance(result, tuple) else result
            if isinstance(output, Tensor) and bool(output.isnan().any()):
                self.is_found = self._has_masked_row(func, args, kwargs or {})
        return result

    def _has_masked_row(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if func in _SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            return bool((args[0] == -torch.inf).all(dim=dim).any())
        is_sdpa = func is F.scaled_dot_product_attention
        positional = args[3] if is_sdpa and len(args) > 3 else None
        masks = [mask for name in _MASKS[func] if isinstance(mask := kwargs.get(name, positional), Tensor)]
        # A boolean mask is true for the visible keys of scaled dot product attention, and for the hidden ones of the other function.
        hidden = [(~mask if is_sdpa else mask) if mask.dtype is torch.bool else mask == -torch.inf for mask in masks]
        return any(bool(keys.all(dim=-1).any()) for keys in hidden)
