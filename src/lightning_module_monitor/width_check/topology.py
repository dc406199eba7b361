"""Which layers feed which: read from the graph that autograd keeps of one forward pass."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from lightning_module_monitor.model.hooks import HookSet, UncopiedHook
from lightning_module_monitor.model.outputs import named_tensors

_HOMOGENEOUS = re.compile(
    r"(Add|Sub|Neg|Relu|LeakyRelu|Mean|Sum|Mul|Div|NativeDropout|Clone|ToCopy|Alias|Copy|Contiguous"
    r"|View|UnsafeView|ReshapeAlias|Reshape|T|Transpose|Permute|Expand|Repeat|Squeeze|Unsqueeze|Select|Slice|Split|Unbind|Index|IndexSelect|Cat|Stack"
    r"|MaxPool[123]D(WithIndices)?|AvgPool[123]D|AdaptiveAvgPool[123]D|Amax|Unfold)Backward\d*"
)
"""Operations that multiply their output by the same factor as their input."""


@dataclass(frozen=True)
class Upstream:
    """The layers that feed a layer."""

    names: frozenset[str] = field(default_factory=frozenset)
    """The nearest layers from which its inputs are computed; none if they come from the data alone."""
    is_homogeneous: bool = True
    """Whether all operations between them and this layer scale with their input, as ReLU does and tanh does not."""


class Topology:
    """Reads, while its hooks are registered, which layers feed each layer. A detached tensor counts as data."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = layers
        self.upstream: dict[str, Upstream | None] = {}
        """What feeds each layer that ran; ``None`` where the graph does not show it."""
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
        """From the inputs back to the outputs of other layers."""
        names: set[str] = set()
        is_homogeneous = True
        pending = [tensor.grad_fn for _path, tensor in named_tensors(inputs) if tensor.grad_fn is not None]
        seen = set(pending)
        while pending:
            node = pending.pop()
            if node in self._source:
                names.add(self._source[node])
                continue
            if _is_opaque(node):
                return None
            before = [one for one, _index in node.next_functions if one is not None]
            is_homogeneous &= _is_homogeneous(node.name(), len(before))
            pending += [one for one in before if one not in seen]
            seen.update(before)
        return Upstream(frozenset(names), is_homogeneous)


def _is_opaque(node: object) -> bool:
    """Whether weights outside of all known layers may be behind a node.

    This holds where a weight is used outside of its layer, and for a Python Function, which hides its operations: under checkpointing,
    whole layers.
    """
    return isinstance(node, BackwardCFunction) or isinstance(getattr(node, "variable", None), nn.Parameter)


def _is_homogeneous(operation: str, num_inputs: int) -> bool:
    """Whether an operation scales with its input; a product of two learned tensors scales with the square."""
    is_product = operation.startswith(("Mul", "Div")) and num_inputs > 1
    return not is_product and _HOMOGENEOUS.fullmatch(operation) is not None
