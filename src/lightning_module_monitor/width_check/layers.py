"""Layers of a network that is made wider: their roles, how they are trained, and which of them feed which."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop

from lightning_module_monitor.model.hooks import HookSet, UncopiedHook
from lightning_module_monitor.model.names import UNWATCHED, Namer
from lightning_module_monitor.model.outputs import named_tensors
from lightning_module_monitor.probes.rcc_layers import has_own_weights, layer_parts

Role = Literal["input", "hidden", "output", "fixed", "unknown"]
"""``input``: only the fan-out grows with the width (embeddings, biases and gains of norms too); ``hidden``: fan-in and fan-out;
``output``: only the fan-in; ``fixed``: neither; ``unknown``: the shapes do not show it."""

GROWTH: Mapping[Role, tuple[bool, bool]] = {
    "input": (False, True),
    "hidden": (True, True),
    "output": (True, False),
    "fixed": (False, False),
}
"""Whether fan-in and fan-out grow, by role."""

LINEAR = (nn.Linear, _ConvNd, nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _BatchNorm, _InstanceNorm)

ENTRYWISE = (Adam, AdamW, Adamax, NAdam, Adagrad, RMSprop)
"""Optimizers whose first update has entries of the size of the learning rate, whatever the size of the gradient."""


@dataclass(frozen=True)
class Upstream:
    """The layers that feed a layer."""

    names: frozenset[str] = field(default_factory=frozenset)
    """The nearest layers from which its inputs are computed; none if they come from the data alone."""
    is_homogeneous: bool = True
    """Whether all operations between them and this layer scale with their input, as ReLU does and tanh does not."""


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """The facts about a module that owns weights."""

    optimizer: Literal["sgd", "entrywise"] | None
    """How an update depends on the gradient; ``None`` for any other optimizer."""
    has_weight_decay: bool
    is_shared: bool
    """Whether it shares a parameter with another layer."""
    is_linear: bool
    upstream: Upstream | None
    """The layers that feed it; ``None`` where they are not known."""


@dataclass(frozen=True, kw_only=True)
class LayerAtWidth(_Facts):
    """A layer in the network of one width, after training."""

    fans: tuple[int, int] | None
    """Fan-in and fan-out; ``None`` for an unknown type, or a weight that is computed from others (weight norm)."""
    matrix_rates: tuple[float, ...]
    """Learning rates of its trained parameters of two dimensions and more."""
    vector_rates: tuple[float, ...]
    """Learning rates of its other trained parameters."""


@dataclass(frozen=True, kw_only=True)
class Layer(_Facts):
    """A layer over all widths."""

    role: Role
    matrix_rate: float | None
    """Exponent of width of its matrices' learning rate, ``-inf`` where none is trained, ``None`` where it is no power of the width."""
    vector_rate: float | None
    """The same for its vectors."""

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters is in an optimizer."""
        return not (self.matrix_rate == self.vector_rate == -math.inf)


def find_units(root: nn.Module) -> dict[str, nn.Module]:
    """The layers of a network by name: modules that own weights. MultiheadAttention is one layer, with its projections."""
    found: set[nn.Module] = set()
    waiting, visited = [root], {root}
    while waiting:
        module = waiting.pop()
        if isinstance(module, UNWATCHED):
            continue
        is_whole = bool(layer_parts(module)) or is_parametrized(module)
        if is_whole or has_own_weights(module):
            found.add(module)
        children = [] if is_whole else [child for child in module.children() if child not in visited]
        waiting += children
        visited.update(children)
    return {site.name: site.module for site in Namer().module_sites(root) if site.module in found}


def describe(
    layers: Mapping[str, nn.Module], optimizers: Iterable[Optimizer], upstream: Mapping[str, Upstream | None]
) -> dict[str, LayerAtWidth]:
    """Describe the layers of one network, by name. Their learning rates are those before any schedule (``initial_lr``)."""
    groups = {id(one): (optimizer, group) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    parameters = {name: _own_parameters(layer, set(layers.values())) for name, layer in layers.items()}
    num_owners = Counter(id(one) for own in parameters.values() for one in own)
    described = {}
    for name, layer in layers.items():
        trained = [one for one in parameters[name] if one.requires_grad and id(one) in groups]
        rates = [(one.ndim, float(groups[id(one)][1].get("initial_lr", groups[id(one)][1]["lr"]))) for one in trained]
        families = {_family(groups[id(one)][0]) for one in trained}
        described[name] = LayerAtWidth(
            fans=None if is_parametrized(layer) else _fans(layer),
            matrix_rates=tuple(rate for ndim, rate in rates if ndim >= 2),
            vector_rates=tuple(rate for ndim, rate in rates if ndim < 2),
            optimizer=families.pop() if len(families) == 1 else None,
            has_weight_decay=any(groups[id(one)][1].get("weight_decay", 0) for one in trained),
            is_shared=any(num_owners[id(one)] > 1 for one in parameters[name]),
            is_linear=isinstance(layer, LINEAR),
            upstream=upstream.get(name),
        )
    return described


def over_widths(widths: Sequence[int], layers: Sequence[LayerAtWidth]) -> Layer:
    """One layer over all widths, from its descriptions at several widths (increasing)."""
    fans = [layer.fans for layer in layers if layer.fans is not None]
    growth = tuple(_grows(widths, sizes) for sizes in zip(*fans, strict=True)) if len(fans) == len(layers) else ()
    first = layers[0]
    return Layer(
        role=next((role for role, known in GROWTH.items() if known == growth), "unknown"),
        matrix_rate=_rate_exponent(widths, [layer.matrix_rates for layer in layers]),
        vector_rate=_rate_exponent(widths, [layer.vector_rates for layer in layers]),
        optimizer=first.optimizer if len({layer.optimizer for layer in layers}) == 1 else None,
        has_weight_decay=any(layer.has_weight_decay for layer in layers),
        is_shared=any(layer.is_shared for layer in layers),
        is_linear=first.is_linear,
        upstream=first.upstream if len({layer.upstream for layer in layers}) == 1 else None,
    )


def _own_parameters(layer: nn.Module, layers: Collection[nn.Module]) -> list[nn.Parameter]:
    """Parameters of the layer, with those of its parts if none of these is a layer itself."""
    has_layers = any(part in layers for part in layer.modules() if part is not layer)
    return list(layer.parameters(recurse=not has_layers))


def _fans(layer: nn.Module) -> tuple[int, int] | None:
    """Number of inputs that each output sums, and number of outputs."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, _ConvNd):
        return layer.in_channels // layer.groups, layer.out_channels
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return 1, layer.embedding_dim  # a look-up, not a sum
    if isinstance(layer, nn.MultiheadAttention):
        is_square = layer.kdim == layer.vdim == layer.embed_dim
        return (layer.embed_dim, layer.embed_dim) if is_square else None
    parameters = list(layer.parameters())
    if isinstance(layer, NORMS) and parameters:
        return 1, max(one.numel() for one in parameters)  # each gain has one input
    return None


def _family(optimizer: Optimizer) -> Literal["sgd", "entrywise"] | None:
    # By class, not by inheritance: a user's subclass may do anything.
    if type(optimizer) is SGD:
        return "sgd"
    return "entrywise" if type(optimizer) in ENTRYWISE else None


def _grows(widths: Sequence[int], sizes: Sequence[int]) -> bool | None:
    """Whether a size grows like the width; ``None`` where it grows otherwise."""
    if len(set(sizes)) == 1:
        return False
    if list(sizes) != sorted(sizes) or min(sizes) <= 0:
        return None
    # With a constant beside the width (a concatenated input) the exponent is near 1, but not 1.
    return True if 0.75 <= _slope(widths, sizes) <= 1.25 else None


def _rate_exponent(widths: Sequence[int], rates: Sequence[Sequence[float]]) -> float | None:
    """Exponent of a learning rate, ``-inf`` if there is none, ``None`` if it is no power of the width."""
    if not any(rates):
        return -math.inf
    if any(len(set(one)) != 1 or one[0] <= 0 for one in rates):
        return None
    by_width = [one[0] for one in rates]
    exponent = _slope(widths, by_width)
    law = [by_width[0] * (width / widths[0]) ** exponent for width in widths]
    return exponent if all(math.isclose(one, other, rel_tol=0.01) for one, other in zip(by_width, law, strict=True)) else None


def _slope(widths: Sequence[int], values: Sequence[float]) -> float:
    return math.log(values[-1] / values[0]) / math.log(widths[-1] / widths[0])


# Which layers feed which

_HOMOGENEOUS = re.compile(
    r"(Add|Sub|Neg|Relu|LeakyRelu|Mean|Sum|Mul|Div|NativeDropout|Clone|ToCopy|Alias|Copy|Contiguous"
    r"|View|UnsafeView|ReshapeAlias|Reshape|T|Transpose|Permute|Expand|Repeat|Squeeze|Unsqueeze|Select|Slice|Split|Unbind|Index|IndexSelect|Cat|Stack"
    r"|MaxPool[123]D(WithIndices)?|AvgPool[123]D|AdaptiveAvgPool[123]D|Amax|Unfold)Backward\d*"
)
"""Operations that multiply their output by the same factor as their input."""


class Topology:
    """Reads, while its hooks are registered, which layers feed each layer. A detached tensor counts as data."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = layers
        self.upstream: dict[str, Upstream | None] = {}
        """The layers that feed each layer that ran; ``None`` where the graph does not show them."""
        self._source: dict[Node, str] = {}
        self._hooks = HookSet()
        for name, layer in layers.items():
            self._hooks.add_forward(layer, UncopiedHook(functools.partial(self._read, name)), with_kwargs=True)

    def close(self) -> None:
        """Remove the hooks and release the graph."""
        self._hooks.close()
        self._source.clear()

    def _read(self, name: str, _layer: nn.Module, args: object, kwargs: object, output: object) -> None:
        now = self._walk((args, kwargs)) if torch.is_grad_enabled() else None
        before = self.upstream.get(name, Upstream())
        joined = None
        if now is not None and before is not None:  # all calls of the layer count
            joined = Upstream(before.names | now.names, before.is_homogeneous and now.is_homogeneous)
        self.upstream[name] = joined
        for _path, tensor in named_tensors(output):
            if tensor.grad_fn is not None:
                self._source.setdefault(tensor.grad_fn, name)

    def _walk(self, inputs: object) -> Upstream | None:
        """Walk from the inputs back to the outputs of other layers."""
        names: set[str] = set()
        is_homogeneous = True
        pending = [tensor.grad_fn for _path, tensor in named_tensors(inputs) if tensor.grad_fn is not None]
        visited = set(pending)
        while pending:
            node = pending.pop()
            if node in self._source:
                names.add(self._source[node])
                continue
            if _hides_weights(node):
                return None
            before = [one for one, _index in node.next_functions if one is not None]
            # A product of two learned tensors scales with the square.
            is_product = node.name().startswith(("Mul", "Div")) and len(before) > 1
            is_homogeneous &= not is_product and _HOMOGENEOUS.fullmatch(node.name()) is not None
            pending += [one for one in before if one not in visited]
            visited.update(before)
        return Upstream(frozenset(names), is_homogeneous)


def _hides_weights(node: object) -> bool:
    """Whether unknown weights may be behind a node: a weight used outside of its layer, or a Python Function, as of checkpointing."""
    return isinstance(node, BackwardCFunction) or isinstance(getattr(node, "variable", None), nn.Parameter)
