"""Facts of a step that detectors need beside its values: states of parameters and modules, and the graph of the loss."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.health.facts import Facts, GroupFacts, ParameterFacts, Training
from lightning_module_monitor.health.run_history import NO_FACTS
from lightning_module_monitor.model.hooks import as_torch_itself
from lightning_module_monitor.trainer.optimizers import parameter_ids
from lightning_module_monitor.trainer.run import Run

MAX_NODES = 100
"""Largest number of nodes of the loss's graph that are read."""
NUM_FIRST_NODES = 8
"""Number of nodes from the loss on whose names tell kinds of losses apart."""
MAX_LOSSES = 64
"""Number of kinds of losses that are remembered: a graph that differs in each step is read in each step."""
_OPTIONS = ("momentum", "weight_decay", "eps", "name")
"""Options of a group that are among the facts."""
_CROSS_ENTROPIES = {"LogSoftmax": ("Softmax",), "BinaryCrossEntropyWithLogits": ("Sigmoid", "Softmax")}
"""Nodes of the graph that apply a softmax or sigmoid to logits, each with the nodes that must not precede it."""
_CLASSIFICATION_LOSSES = (*_CROSS_ENTROPIES, "NllLoss", "BinaryCrossEntropy", "CtcLoss")
_RESHAPING = {"View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose", "T", "Permute"}
_RESHAPING |= {"ToCopy", "Clone", "Slice", "Select"}


class LossFacts(NamedTuple):
    """Facts that the graph of a loss shows."""

    is_classification: bool = False
    softmax_twice: bool = False
    num_classes: int = 0


class LossReader:
    """Reads the graphs of losses: the first nodes of each loss, and the rest once for each kind of loss."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], LossFacts] = {}
        """Facts by the names of the first nodes."""

    def read(self, loss: Tensor, *, is_scaled: bool) -> LossFacts:
        """The facts of a loss, which may be scaled by a ``GradScaler``."""
        nodes = _nodes(loss)
        first = [*itertools.islice(nodes, NUM_FIRST_NODES)]
        names = tuple([_name(node) for node, _before in first])
        facts = self._known.get(names)
        if facts is None:
            facts = _facts_of_graph([*first, *nodes])
            if len(self._known) < MAX_LOSSES:
                self._known[names] = facts
        return facts._replace(num_classes=_num_classes_of(first, is_scaled=is_scaled))


class FactsReader:
    """Reads the facts of a run. They are read anew where something changes, and are the same object otherwise."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._facts = NO_FACTS
        self._fingerprint: object = None
        """What the facts were read from; see :meth:`_fingerprint_of`."""
        self._parameters: Sequence[Tensor] = ()
        """The parameters that the model had then."""
        self._normalizations = [site.module for site in run.planner.index.modules if getattr(site.module, "running_mean", None) is not None]
        self._losses = LossReader()
        self._loss = LossFacts()

    def begin_step(self) -> None:
        """A monitored step begins."""
        self._loss = LossFacts()

    def note_loss(self, loss: Tensor, *, is_scaled: bool) -> None:
        """Note one of the losses of the step, which may be scaled by a ``GradScaler``."""
        is_classification, softmax_twice, num_classes = self._losses.read(loss, is_scaled=is_scaled)
        self._loss = LossFacts(self._loss.is_classification or is_classification, self._loss.softmax_twice or softmax_twice, num_classes)

    def read(self, optimizers: Sequence[Optimizer]) -> Facts:
        """The facts of the step, when it is over."""
        fingerprint = self._fingerprint_of(optimizers)
        if fingerprint != self._fingerprint:
            sites = self._run.planner.index.parameters
            self._parameters = [tensor for site in sites if (tensor := site.tensor()) is not None]
            facts = facts_of(self._run, optimizers, self._loss)
            self._facts = self._facts if facts == self._facts else facts
            self._fingerprint = self._fingerprint_of(optimizers)
        return self._facts

    def _fingerprint_of(self, optimizers: Sequence[Optimizer]) -> object:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return (
            [(id(group["params"]), len(group["params"]), *map(group.get, _OPTIONS)) for group in groups],
            [parameter.requires_grad for parameter in self._parameters],
            [module.training for module in self._normalizations],
            len(self._run.planner.index.parameters),
            self._run.trainer.current_epoch,
            self._run.module.automatic_optimization,
            self._loss,
        )


def _facts_of_graph(nodes: Sequence[tuple[Any, Any]]) -> LossFacts:
    """Facts that the nodes of a loss's graph show, each with the nearest earlier node that does not only reshape."""
    names = [(_name(node), _name(before)) for node, before in nodes]
    is_classification = any(name in _CLASSIFICATION_LOSSES or name.startswith("NllLoss") for name, _before in names)
    return LossFacts(is_classification, any(before in _CROSS_ENTROPIES.get(name, ()) for name, before in names))


def _num_classes_of(nodes: Sequence[tuple[Any, Any]], *, is_scaled: bool) -> int:
    """The number of classes of a loss that is the mean of cross-entropies, given the first nodes of its graph; else 0."""
    # Lightning divides the loss by the number of micro-batches, also by 1.
    factors = ["Mul", "Div"] if is_scaled else ["Div"]
    is_by_trainer = [_name(node) for node, _before in nodes[: len(factors)]] == factors
    return _num_classes(*nodes[len(factors)]) if is_by_trainer and len(nodes) > len(factors) else 0


def facts_of(run: Run, optimizers: Sequence[Optimizer], loss_facts: LossFacts) -> Facts:
    """The facts of a step, when it is over."""
    groups = [(type(optimizer).__name__, group) for optimizer in optimizers for group in optimizer.param_groups]
    parameters = _parameters(run, optimizers)
    return Facts(
        parameters,
        tuple(_group(name, group) for name, group in groups),
        tuple(_in_eval(run, parameters)),
        loss_facts.softmax_twice,
        loss_facts.is_classification,
        not run.module.automatic_optimization,
        float(run.trainer.gradient_clip_val or 0.0),
        run.trainer.gradient_clip_algorithm == "value",
        loss_facts.num_classes,
    )


def _group(optimizer: str, group: Mapping[str, Any]) -> GroupFacts:
    name = group.get("name")
    momentum, weight_decay, eps = (_number(group.get(option)) for option in ("momentum", "weight_decay", "eps"))
    return GroupFacts(optimizer, momentum, weight_decay, name if isinstance(name, str) else "", eps)


def _number(option: object) -> float:
    """An option of an optimizer; 0 if it is absent or no number, as the pair that Adafactor has for ``eps``."""
    return float(option) if isinstance(option, int | float) else 0.0


def _in_eval(run: Run, parameters: dict[str, ParameterFacts]) -> Iterable[str]:
    """Names of modules with running statistics that are in eval mode although their weight or bias is trained."""
    for site in run.planner.index.modules:
        if not site.module.training and getattr(site.module, "running_mean", None) is not None:
            affine = (parameters.get(f"{site.name}.{name}") for name in ("weight", "bias"))
            if any(parameter is not None and parameter.training == "trained" for parameter in affine):
                yield site.name


def _parameters(run: Run, optimizers: Sequence[Optimizer]) -> dict[str, ParameterFacts]:
    """Facts of each parameter, by the name of its site. Optimizers that hold none of the parameters hold copies: all are trained."""
    optimized = parameter_ids(optimizers)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    group_by_id = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    parameters = {site.name: site.tensor() for site in run.planner.index.parameters}
    has_copies = not any(id(parameter) in optimized for parameter in parameters.values())

    def training_of(parameter: Tensor | None) -> Training:
        if parameter is None or not parameter.requires_grad or run.monitor.access.is_empty(parameter) or not optimizers:
            return "frozen"
        return "trained" if has_copies or id(parameter) in optimized else "untrained"

    return {
        name: ParameterFacts(training_of(parameter), group_by_id.get(id(parameter), -1), 0 if parameter is None else parameter.numel())
        for name, parameter in parameters.items()
    }


def first_gradient(optimizer: Optimizer) -> Tensor | None:
    """The first gradient with elements of an optimizer's parameters."""
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return next((grad for grad in gradients if grad is not None and grad.layout is torch.strided and grad.numel()), None)


def _num_classes(node: Any, before: Any) -> int:  # noqa: ANN401  # nodes of autograd's graph
    """The number of classes of a mean of cross-entropies; 0 for another node."""
    # The shape of the saved result: reading the result itself would call hooks on saved tensors, and checkpointing computes again in them.
    metadata = getattr(before, "_input_metadata", ())
    is_mean = _name(node).startswith("NllLoss") and getattr(node, "_saved_reduction", 0) == 1
    if not is_mean or _name(before) != "LogSoftmax" or not metadata:
        return 0
    shape, dim = metadata[0].shape, before._saved_dim
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
        while before is not None and _name(before) in _RESHAPING:
            before = before.next_functions[0][0]
        yield node, before
        waiting.extend(function for function, _index in node.next_functions)


def _name(node: Any) -> str:  # noqa: ANN401  # a node of autograd's graph, or None
    return "" if node is None else str(node.name()).partition("Backward")[0]
