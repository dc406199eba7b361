"""Layers of a network that is made wider: which of their fans grow with the width, and which layers are trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from lightning_module_monitor.model.names import UNWATCHED, Namer
from lightning_module_monitor.probes.rcc_layers import has_own_weights, layer_parts

Role = Literal["input", "hidden", "output", "fixed", "unknown"]
"""``input``: only the fan-out grows with the width (embeddings, biases and weights of normalization layers too); ``hidden``: fan-in
and fan-out; ``output``: only the fan-in; ``fixed``: neither; ``unknown``: the shapes do not show it."""

ROLES: Mapping[tuple[bool | None, ...], Role] = {
    (False, True): "input",
    (True, True): "hidden",
    (True, False): "output",
    (False, False): "fixed",
}
"""The role by the growth of fan-in and fan-out."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, *BATCH_NORMS)


@dataclass(frozen=True)
class LayerAtWidth:
    """A layer in the network of one width."""

    fans: tuple[int, int] | None
    """Fan-in and fan-out; ``None`` for an unknown type, or a weight that is computed from others (weight norm)."""
    is_trained: bool
    """Whether any of its parameters is in an optimizer."""


@dataclass(frozen=True)
class Layer:
    """A layer over all widths."""

    role: Role
    is_trained: bool


def find_layers(root: nn.Module) -> dict[str, nn.Module]:
    """The layers of a network by name: modules that own weights. MultiheadAttention is one layer, with its projections."""
    layers: set[nn.Module] = set()
    waiting, visited = [root], {root}
    while waiting:
        module = waiting.pop()
        if isinstance(module, UNWATCHED):
            continue
        is_whole = bool(layer_parts(module)) or is_parametrized(module)
        if is_whole or has_own_weights(module):
            layers.add(module)
        children = [] if is_whole else [child for child in module.children() if child not in visited]
        waiting += children
        visited.update(children)
    return {site.name: site.module for site in Namer().module_sites(root) if site.module in layers}


def describe(root: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, LayerAtWidth]:
    """The layers of the network of one width, by name."""
    layers = find_layers(root)
    modules = set(layers.values())
    optimized = {parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
    described = {}
    for name, layer in layers.items():
        has_layers = any(part in modules for part in layer.modules() if part is not layer)
        parameters = layer.parameters(recurse=not has_layers)
        is_trained = any(parameter.requires_grad and parameter in optimized for parameter in parameters)
        described[name] = LayerAtWidth(None if is_parametrized(layer) else _fans(layer), is_trained)
    return described


def over_widths(widths: Sequence[int], layers: Sequence[LayerAtWidth]) -> Layer:
    """One layer over all widths, from its descriptions at several widths (increasing)."""
    fans = [layer.fans for layer in layers if layer.fans is not None]
    growth = tuple(_grows(widths, sizes) for sizes in zip(*fans, strict=True)) if len(fans) == len(layers) else ()
    return Layer(ROLES.get(growth, "unknown"), any(layer.is_trained for layer in layers))


def _fans(layer: nn.Module) -> tuple[int, int] | None:
    """Number of inputs that each output sums, and number of outputs."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, CONVOLUTIONS):
        return layer.in_channels // layer.groups, layer.out_channels
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return 1, layer.embedding_dim  # a look-up, not a sum
    if isinstance(layer, nn.MultiheadAttention):
        is_square = layer.kdim == layer.vdim == layer.embed_dim
        return (layer.embed_dim, layer.embed_dim) if is_square else None
    sizes = [parameter.numel() for parameter in layer.parameters()]
    if isinstance(layer, NORMS) and sizes:
        return 1, max(sizes)  # each gain has one input
    return None


def _grows(widths: Sequence[int], sizes: Sequence[int]) -> bool | None:
    """Whether a size grows like the width; ``None`` where it grows otherwise."""
    if len(set(sizes)) == 1:
        return False
    if list(sizes) != sorted(sizes) or min(sizes) <= 0:
        return None
    # With a constant beside the width (a concatenated input) the exponent is near 1, but not 1.
    exponent = math.log(sizes[-1] / sizes[0]) / math.log(widths[-1] / widths[0])
    return True if 0.75 <= exponent <= 1.25 else None
