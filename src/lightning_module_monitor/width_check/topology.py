"""Which layers feed which: read from the graph that autograd keeps of one forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from lightning_module_monitor.model.hooks import HookSet
from lightning_module_monitor.model.outputs import named_tensors

_HOMOGENEOUS = re.compile(
    r"(Add|Sub|Neg|Relu|LeakyRelu|Mean|Sum|Mul|Div|NativeDropout|Clone|ToCopy|Alias|Copy|Contiguous"
    r"|View|UnsafeView|ReshapeAlias|Reshape|T|Transpose|Permute|Expand|Repeat|Squeeze|Unsqueeze|Select|Slice|Split|Unbind|Index|IndexSelect|Cat|Stack"
    r"|MaxPool[123]D(WithIndices)?|AvgPool[123]D|AdaptiveAvgPool[123]D|Amax|Unfold)Backward\d*"
)
"""Operations of whose inputs any multiple gives that multiple of the output: what grows by a factor grows by it behind them, too."""

_PRODUCTS = ("Mul", "Div")


@dataclass(frozen=True)
class Upstream:
    """What feeds a layer."""

    names: frozenset[str] = field(default_factory=frozenset)
    """The nearest layers that its inputs are computed from; none where they come from the data alone."""
    is_homogeneous: bool = True
    """Whether everything between them and this layer scales with its input, as ReLU does and tanh does not."""


class Topology:
    """Reads, while its hooks are on, what feeds each of the layers. What is detached counts as data.

    Args:
        layers: The layers, by name.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.upstream: dict[str, Upstream | None] = {}
        """What feeds each layer that ran; ``None`` where the graph does not tell."""
        self._source: dict[Node, str] = {}
        self._hooks = HookSet()
        for name, layer in layers.items():
            self._hooks.add(layer.register_forward_hook(self._reader(name), with_kwargs=True))

    def close(self) -> None:
        """Take the hooks off and let the graph go."""
        self._hooks.close()
        self._source.clear()

    def _reader(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
            known = self._walk((args, kwargs)) if torch.is_grad_enabled() else None
            before = self.upstream.get(name, Upstream())
            joined = None
            if known is not None and before is not None:  # of all calls of the layer together
                joined = Upstream(before.names | known.names, before.is_homogeneous and known.is_homogeneous)
            self.upstream[name] = joined
            for _path, tensor in named_tensors(output):
                if tensor.grad_fn is not None:
                    self._source.setdefault(tensor.grad_fn, name)

        return read

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
    """Whether weights may be behind a node that are in none of the layers seen.

    They are where a weight is used outside of the layer that owns it. A Function in Python hides what is in it: where it checkpoints
    activations, whole layers.
    """
    return isinstance(node, BackwardCFunction) or isinstance(getattr(node, "variable", None), nn.Parameter)


def _is_homogeneous(operation: str, num_inputs: int) -> bool:
    """Whether an operation scales with its input; a product of two things that are learned scales with the square."""
    if operation.startswith(_PRODUCTS) and num_inputs > 1:
        return False
    return _HOMOGENEOUS.fullmatch(operation) is not None
