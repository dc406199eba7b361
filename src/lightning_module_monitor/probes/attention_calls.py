"""Splits calls of attention into heads: calls of torch's two functions and of its module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias


class RawCall(NamedTuple):
    """Arguments and output of a call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention, head by head."""

    query: Tensor
    """Shape ``(batch, heads, queries, features)``."""
    key: Tensor
    """Shape ``(batch, heads, keys, features)``; a key head that several query heads share is repeated for each."""
    value: Tensor | None
    """Shape ``(batch, heads, keys, value_features)``; ``None`` if it is not recorded."""
    masks: tuple[Tensor, ...] = ()
    """Four dimensions each, which broadcast to ``(batch, heads, queries, keys)``: true for visible keys, or added to the logits."""
    is_causal: bool = False
    scale: float | None = None
    output: Tensor | None = None
    """Shape ``(batch, heads, queries, value_features)``; ``None`` if the function returns no heads."""
    arguments: tuple[Tensor, ...] = ()
    """The arguments query and key, if it is a call of a function that the model may also report."""


Reader = Callable[[RawCall, bool], AttentionCall]
"""Takes a call, and whether values and outputs are recorded."""


def read_scaled_dot_product_attention(call: RawCall, _has_value: bool) -> AttentionCall:
    """Heads of a call of ``F.scaled_dot_product_attention``: its third dimension from the end; three dimensions are one head."""
    return _heads_of(call.output, *call.args, **call.kwargs)


def _heads_of(  # noqa: PLR0917  # torch's own, in its order
    output: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    arguments = query, key
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], dim=-3) for tensor in (key, value))
    if isinstance(attn_mask, CausalBias):
        attn_mask = attn_mask._materialize(query.device)  # it supports no operation but attention
    masks = () if attn_mask is None else (torch.atleast_2d(attn_mask),)
    leading = torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in (query, key, value, *masks)))

    def expanded(tensor: Tensor) -> Tensor:
        return _in_four_dimensions(tensor.expand(*leading, *tensor.shape[-2:]), leading)

    return AttentionCall(
        expanded(query),
        expanded(key),
        expanded(value),
        tuple(_in_four_dimensions(mask, leading) for mask in masks),
        is_causal,
        scale,
        None if output is None else expanded(output),
        arguments,
    )


def _in_four_dimensions(tensor: Tensor, leading: torch.Size) -> Tensor:
    """A tensor whose dimensions before the last two broadcast to ``leading``, as ``(batch, heads, ...)``; sizes of 1 stay."""
    if len(leading) > 2:
        return tensor.expand(*leading, *tensor.shape[-2:]).flatten(0, -4)
    tensor = tensor[(None,) * (len(leading) + 2 - tensor.dim())]
    return tensor[(slice(None),) * len(leading) + (None,) * (2 - len(leading))]


_FUNCTION_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_SEPARATE_WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_MODULE_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


def read_multi_head_attention_forward(call: RawCall, has_value: bool) -> AttentionCall:
    """Heads of a call of ``F.multi_head_attention_forward``, projected again because the function does not return them."""
    return _projected(_arguments(_FUNCTION_SIGNATURE, call), has_value)


def read_multihead_attention(call: RawCall, has_value: bool) -> AttentionCall:
    """Heads of a call of ``nn.MultiheadAttention.forward``, whichever function computes them."""
    arguments = _arguments(_MODULE_SIGNATURE, call)
    module, is_token = arguments.self, None
    if arguments.query.is_nested:  # torch's TransformerEncoder removes padding in self-attention
        lengths = torch.tensor([len(sample) for sample in arguments.query.unbind()], device=arguments.query.device)
        arguments.query = torch.nested.to_padded_tensor(arguments.query, 0.0)
        is_token = torch.arange(arguments.query.shape[1], device=lengths.device) < lengths[:, None]
        arguments.key = arguments.value = arguments.query
        arguments.key_padding_mask = ~is_token
    if module.batch_first and arguments.query.dim() == 3:
        arguments.query, arguments.key, arguments.value = (
            tensor.transpose(0, 1) for tensor in (arguments.query, arguments.key, arguments.value)
        )
    for name in ("num_heads", "add_zero_attn", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v", *_SEPARATE_WEIGHTS):
        setattr(arguments, name, getattr(module, name))
    arguments.use_separate_proj_weight = not module._qkv_same_embed_dim
    arguments.static_k = arguments.static_v = None
    heads = _projected(arguments, has_value)
    return heads if is_token is None else replace(heads, masks=(*heads.masks, is_token[:, None, :, None]))


def _arguments(signature: inspect.Signature, call: RawCall) -> SimpleNamespace:
    """The arguments of a call by name, defaults included."""
    bound = signature.bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


def _projected(call: SimpleNamespace, has_value: bool) -> AttentionCall:
    """Heads from the arguments of ``F.multi_head_attention_forward``, as that function computes them."""
    tensors = call.query, call.key, call.value
    if call.query.dim() == 2:  # without a batch
        tensors = tuple(tensor.unsqueeze(1) for tensor in tensors)
        if call.key_padding_mask is not None:
            call.key_padding_mask = call.key_padding_mask.unsqueeze(0)
    batch, heads = tensors[0].shape[1], call.num_heads
    separate = call.use_separate_proj_weight
    weights = [getattr(call, name) for name in _SEPARATE_WEIGHTS] if separate else call.in_proj_weight.chunk(3)
    biases = (None, None, None) if call.in_proj_bias is None else call.in_proj_bias.chunk(3)

    def projected(index: int, static: Tensor | None = None, added: Tensor | None = None) -> Tensor:
        if static is not None:
            projection = static.unflatten(0, (batch, heads))
        else:
            flat = F.linear(tensors[index], weights[index], biases[index])
            flat = flat if added is None else torch.cat([flat, added.expand(1, batch, -1).to(flat.dtype)])
            projection = flat.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
        has_zero = index > 0 and call.add_zero_attn
        return torch.cat([projection, torch.zeros_like(projection[:, :, :1])], dim=2) if has_zero else projection

    query, key = projected(0), projected(1, call.static_k, call.bias_k)
    value = projected(2, call.static_v, call.bias_v) if has_value else None
    # As in the function: the hint is used if nothing else is masked, otherwise the mask itself.
    is_causal = call.is_causal and call.key_padding_mask is None and not call.need_weights
    masks = []
    if call.attn_mask is not None and not is_causal:
        masks.append(call.attn_mask[None, None] if call.attn_mask.dim() == 2 else call.attn_mask.unflatten(0, (batch, heads)))
    if call.key_padding_mask is not None:
        masks.append(call.key_padding_mask[:, None, None])
    num_added = (call.bias_k is not None) + call.add_zero_attn
    return AttentionCall(query, key, value, tuple(_extended_mask(mask, num_added) for mask in masks), is_causal)


def _extended_mask(mask: Tensor, num_added: int) -> Tensor:
    """A mask of ``nn.MultiheadAttention``, true for hidden keys, as a mask that is true for visible keys; added keys are visible."""
    visible = ~mask if mask.dtype == torch.bool else mask
    return F.pad(visible, (0, num_added), value=visible.dtype == torch.bool) if num_added else visible
