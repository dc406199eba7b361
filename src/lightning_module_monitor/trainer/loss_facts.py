"""Facts about a loss, which its graph shows: what kind of loss it is, and what it is made of."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor

from lightning_module_monitor.model.hooks import as_torch_itself
from lightning_module_monitor.trainer.model_graph import RESHAPING, name_of, read_model

MAX_NODES = 100
"""Largest number of nodes of the loss's graph that are read."""
NUM_FIRST_NODES = 8
"""Number of nodes from the loss on whose names tell kinds of losses apart."""
MAX_LOSSES = 64
"""Number of kinds of losses that are remembered: a graph that differs in each step is read in each step."""
_CROSS_ENTROPIES = {"LogSoftmax": ("Softmax", "Sigmoid"), "BinaryCrossEntropyWithLogits": ("Sigmoid", "Softmax")}
"""Nodes of the graph that apply a softmax or sigmoid to logits, each with the nodes that must not precede it."""
_CLASSIFICATION_LOSSES = (*_CROSS_ENTROPIES, "NllLoss", "BinaryCrossEntropy", "CtcLoss")
_LOSSES = ("NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy")
"""Beginnings of the names of nodes that apply a loss to outputs and targets."""
_OF_SAMPLES, _SUM = 0, 2
"""Values of torch's ``reduction``: none, and the sum."""
_ELEMENTWISE = RESHAPING | {"Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Mean", "Sum", "Pow", "Abs", "Sqrt", "Clamp", "ClampMin"}
_ELEMENTWISE |= {"LinalgVectorNorm", "Expand"}
"""Nodes between a loss and the outputs of the model that it is made of."""
_OF_LOSSES = _ELEMENTWISE | {"Maximum", "Minimum", "Where", "MaskedFill", "Index", "Stack", "Relu", "Softplus", "Log", "Log1P"}
"""These, and further ones of losses that have a part for each target. Not a minimum over, or an exponential of, all pairs on purpose."""
_COMPARISONS = ("Mul", "Sub", "MseLoss", "SmoothL1Loss", "HuberLoss")
"""Nodes that compare two tensors of one shape."""
MAX_NODES_OF_OUTPUT = 2000
"""Largest number of nodes that are read of an output that a loss compares with another one."""


class LossFacts(NamedTuple):
    """Facts that the graph of a loss shows."""

    is_classification: bool = False
    softmax_twice: bool = False
    is_summed: bool = False
    is_broadcast: bool = False
    compares_outputs: bool = False
    is_linear: bool = False
    num_unregistered: int = 0
    of_tokens: bool = False
    num_classes: int = 0

    def joined(self, other: LossFacts) -> LossFacts:
        """The facts of a step with two losses, of which ``other`` is the second."""
        either = {name: getattr(self, name) or getattr(other, name) for name in self._fields if name not in ("num_classes", "is_linear")}
        return other._replace(**either)


class LossReader:
    """Reads the graphs of losses: the first nodes of each loss, and the rest once for each kind of loss.

    Args:
        num_registered: Returns how many of some weights belong to the module or to an optimizer.
    """

    def __init__(self, num_registered: Callable[[Sequence[Tensor]], int]) -> None:
        self._num_registered = num_registered
        self._known: dict[tuple[str, ...], LossFacts] = {}
        """Facts by the names of the first nodes."""

    def read(self, loss: Tensor, *, is_scaled: bool) -> tuple[LossFacts, int]:
        """The facts of a loss, which may be scaled by a ``GradScaler``, and the number of its targets; 0 if it is not known."""
        nodes = _nodes(loss)
        first = [*itertools.islice(nodes, NUM_FIRST_NODES)]
        names = tuple([name_of(node) for node, _before in first])
        facts = self._known.get(names)
        if facts is None:
            facts, model = _facts_of_graph([*first, *nodes], is_scaled=is_scaled), as_torch_itself(lambda: read_model(loss))
            num_registered = self._num_registered(model.weights)
            # Without any that is known, a strategy has put other tensors in their places.
            num_unregistered = len(model.weights) - num_registered if num_registered else 0
            facts = facts._replace(is_linear=model.is_linear, num_unregistered=num_unregistered)
            if len(self._known) < MAX_LOSSES:
                self._known[names] = facts
        of_loss = _first_of(first, is_scaled=is_scaled)
        num_targets = next(filter(None, (_num_targets(*node) for node in first)), 0)
        return facts._replace(num_classes=0 if of_loss is None else _num_classes(*of_loss)), num_targets


def _facts_of_graph(nodes: Sequence[tuple[Any, Any]], *, is_scaled: bool) -> LossFacts:
    """Facts that the nodes of a loss's graph show, each with the nearest earlier node that does not only reshape."""
    names = [(name_of(node), name_of(before)) for node, before in nodes]
    is_classification = any(name in _CLASSIFICATION_LOSSES or name.startswith("NllLoss") for name, _before in names)
    first = _first_of(nodes, is_scaled=is_scaled)
    return LossFacts(
        is_classification=is_classification,
        softmax_twice=any(before in _CROSS_ENTROPIES.get(name, ()) for name, before in names),
        is_summed=first is not None and _is_summed(*first),
        is_broadcast=any(_is_broadcast(behind) for node, _before in nodes[:1] for behind in _behind(node, _OF_LOSSES)),
        compares_outputs=not is_classification and first is not None and _compares_outputs(first[0]),
    )


def _first_of(nodes: Sequence[tuple[Any, Any]], *, is_scaled: bool) -> tuple[Any, Any] | None:
    """The node that computed a loss, of the first nodes of its graph; ``None`` if it is not known."""
    # Lightning divides the loss by the number of micro-batches, also by 1.
    factors = ["Mul", "Div"] if is_scaled else ["Div"]
    is_by_trainer = [name_of(node) for node, _before in nodes[: len(factors)]] == factors
    return nodes[len(factors)] if is_by_trainer and len(nodes) > len(factors) else None


def _is_summed(node: Any, before: Any) -> bool:  # noqa: ANN401  # nodes of autograd's graph
    """Whether a node is a loss that is summed over samples, or the sum of losses of samples."""
    summed, reduction = (before, _OF_SAMPLES) if name_of(node) == "Sum" else (node, _SUM)
    return name_of(summed).startswith(_LOSSES) and getattr(summed, "_saved_reduction", None) == reduction


def _is_broadcast(node: Any) -> bool:  # noqa: ANN401  # a node of autograd's graph
    """Whether a node compares outputs of shape ``(N, 1)`` with ``N`` targets, so that each is compared with all of them."""
    name, parts = name_of(node), [function for function, _index in node.next_functions]
    outputs = [part for part in parts if part is not None]
    if not (name.startswith(("MseLoss", "SmoothL1Loss", "HuberLoss")) or name == "Sub") or not len(outputs) == 1 < len(parts):
        return False
    output = outputs[0]
    before = output.next_functions[0][0] if name_of(output) == "Expand" else output
    compared = _shape(output) if before is not output else _shape(node)
    return len(compared) == 2 and compared[0] == compared[1] > 1 and _shape(before) == (compared[0], 1)


def _shape(node: Any) -> Sequence[int]:  # noqa: ANN401  # a node of autograd's graph
    """The shape of the first result of a node; ``()`` if it is not known."""
    metadata = getattr(node, "_input_metadata", ())
    return tuple(metadata[0].shape) if metadata else ()


def _compares_outputs(loss: Any) -> bool:  # noqa: ANN401  # a node of autograd's graph
    """Whether a loss compares two outputs of one network for different inputs: both use its parameters, in calls of their own."""
    for node in _behind(loss, _ELEMENTWISE):
        parts = [function for function, _index in node.next_functions]
        if name_of(node) in _COMPARISONS and len(parts) > 1 and None not in parts[:2]:
            first, second = _uses(parts[0]), _uses(parts[1])
            shared = first.keys() & second.keys()
            if shared and all(first[parameter].isdisjoint(second[parameter]) for parameter in shared):
                return True
    return False


def _behind(loss: Any, functions: Set[str]) -> Iterator[Any]:  # noqa: ANN401  # nodes of autograd's graph
    """The nodes that a loss is made of by these functions, the nodes behind the last ones included, from the loss on."""
    waiting: deque[Any] = deque([loss])
    known: set[Any] = set()
    while waiting and len(known) < MAX_NODES:
        node = waiting.popleft()
        if node is None or node in known:
            continue
        known.add(node)
        yield node
        if name_of(node) in functions:
            waiting.extend(function for function, _index in node.next_functions)


def _uses(output: Any) -> dict[Any, set[Any]]:  # noqa: ANN401  # a node of autograd's graph
    """The nodes that use each parameter in the graph of an output, by the parameter's own node."""
    uses: dict[Any, set[Any]] = {}
    waiting, known = deque([output]), {output}
    while waiting and len(known) < MAX_NODES_OF_OUTPUT:
        node = waiting.popleft()
        for part, _index in node.next_functions:
            if name_of(part).endswith("AccumulateGrad"):
                uses.setdefault(part, set()).add(node)
            elif part is not None and part not in known:
                known.add(part)
                waiting.append(part)
    return uses


def _num_targets(node: Any, before: Any) -> int:  # noqa: ANN401  # nodes of autograd's graph
    """The number of labels that a cross-entropy compares with; 0 for another node."""
    if name_of(node).startswith("NllLoss") and name_of(before) == "LogSoftmax":
        shape = _shape(before)
        return math.prod(shape) // shape[1 if len(shape) > 1 else 0] if shape else 0
    is_binary = name_of(node).startswith("BinaryCrossEntropy")
    return math.prod(_shape(node.next_functions[0][0])) if is_binary else 0


def _num_classes(node: Any, before: Any) -> int:  # noqa: ANN401  # nodes of autograd's graph
    """The number of classes of a mean of cross-entropies; 0 for another node."""
    # The shape of the saved result: reading the result itself would call hooks on saved tensors, and checkpointing computes again in them.
    is_mean = name_of(node).startswith("NllLoss") and getattr(node, "_saved_reduction", 0) == 1
    if not is_mean or name_of(before) != "LogSoftmax" or not _shape(before):
        return 0
    shape, dim = _shape(before), before._saved_dim
    return int(shape[dim if dim < len(shape) else -1])  # -1 is stored as 2 ** 64 - 1


def _nodes(loss: Tensor) -> Iterable[tuple[Any, Any]]:
    """The nodes of a loss's graph, from the loss on, each with the nearest earlier node that does not only reshape."""
    waiting: deque[Any] = deque([as_torch_itself(lambda: loss.grad_fn)])
    known: set[Any] = set()
    while waiting and len(known) < MAX_NODES:
        node = waiting.popleft()
        if node is None or node in known:
            continue
        known.add(node)
        before = node.next_functions[0][0] if node.next_functions else None
        while before is not None and name_of(before) in RESHAPING:
            before = before.next_functions[0][0]
        yield node, before
        waiting.extend(function for function, _index in node.next_functions)
