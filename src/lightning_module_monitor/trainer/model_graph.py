"""Facts about a model from the graph of its loss: whether it is linear, and which weights it uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

MAX_NODES_OF_MODEL = 2000
"""Largest number of nodes that are read of a model; a larger one is not judged."""
RESHAPING = {"View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose", "T", "Permute"}
RESHAPING |= {"ToCopy", "Clone", "Slice", "Select"}
"""Nodes that only reshape or copy."""
_PRODUCTS = {"Addmm": (1, 2), "Mm": (0, 1), "Bmm": (0, 1), "Convolution": (0, 1), "MkldnnConvolution": (0, 1), "Linear": (0, 1)}
"""Nodes that multiply an input by a weight, with the places of the two."""
_FACTORS = ("Mul", "Div")
_LEAF = "torch::autograd::AccumulateGrad"
_LINEAR = {*RESHAPING, *_PRODUCTS, *_FACTORS, _LEAF, "Add", "Sub", "Neg", "Sum", "Mean", "Expand", "Cat", "Stack"}
_LINEAR |= {"NativeBatchNorm", "CudnnBatchNorm", "AvgPool1D", "AvgPool2D", "AdaptiveAvgPool1D", "AdaptiveAvgPool2D", "NativeDropout"}


class ModelGraph(NamedTuple):
    """Facts about a model from the graph of its loss."""

    is_linear: bool = False
    """Whether at least two layers follow each other, and nothing between them and the input but linear functions."""
    weights: Sequence[Tensor] = ()
    """The leaves by which inputs are multiplied."""


def read_model(loss: Tensor) -> ModelGraph:
    """Read the graph of a loss; a model of more than ``MAX_NODES_OF_MODEL`` nodes is not read."""
    nodes = [*_nodes_of_model(loss)]
    if len(nodes) > MAX_NODES_OF_MODEL:
        return ModelGraph()
    products = [node for node, _is_behind in nodes if name_of(node) in _PRODUCTS]
    behind = [node for node, is_behind in nodes if is_behind]
    is_linear = any(name_of(node) in _PRODUCTS for node in behind) and all(map(_is_linear, behind))
    is_linear = is_linear and not any(_multiplies(node) for node, _is_behind in nodes)
    places = ((node, _PRODUCTS[name_of(node)][1]) for node in products)
    leaves = (_leaf(node.next_functions[place][0]) for node, place in places)
    return ModelGraph(is_linear, [*{id(leaf): leaf.variable for leaf in leaves if leaf is not None}.values()])


def _nodes_of_model(loss: Tensor) -> Iterator[tuple[Any, bool]]:
    """The nodes of a graph, each with whether it computes what a product gets; one too many if there are more than are read."""
    waiting: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    known: dict[Any, bool] = {}
    while waiting and len(known) <= MAX_NODES_OF_MODEL:
        node, is_behind = waiting.pop()
        if node is None or known.get(node, -1) >= is_behind:
            continue
        known[node] = is_behind
        is_behind = is_behind or name_of(node) in _PRODUCTS
        waiting.extend((part, is_behind) for part, _index in node.next_functions)
    yield from known.items()


def _is_linear(node: Any) -> bool:  # noqa: ANN401  # a node of autograd's graph
    """Whether a node is a linear function, given that no node multiplies what others compute."""
    return name_of(node) in _LINEAR or getattr(node, "_saved_negative_slope", None) == 1


def _multiplies(node: Any) -> bool:  # noqa: ANN401  # a node of autograd's graph
    """Whether a node multiplies or divides two results of other nodes; a square does not count, as that of a loss."""
    name, parts = name_of(node), [part for part, _index in node.next_functions]
    if name not in _PRODUCTS and name not in _FACTORS:
        return False
    factors = {parts[place] for place in _PRODUCTS.get(name, (0, 1)) if place < len(parts)}
    return sum(factor is not None and _leaf(factor) is None for factor in factors) > 1


def _leaf(node: Any) -> Any:  # noqa: ANN401  # nodes of autograd's graph
    """The node of a leaf that is only reshaped on its way to a node; ``None`` if something computes it."""
    while node is not None and name_of(node) in RESHAPING:
        node = node.next_functions[0][0]
    return node if node is not None and name_of(node) == _LEAF else None


def name_of(node: Any) -> str:  # noqa: ANN401  # a node of autograd's graph, or None
    """The name of the function that a node differentiates; empty for ``None``."""
    return "" if node is None else str(node.name()).partition("Backward")[0]
