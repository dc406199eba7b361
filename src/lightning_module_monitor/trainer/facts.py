"""What a record needs besides its numbers to be judged: states of parameters and modules, and the graph of the loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.model.hooks import as_torch_itself
from lightning_module_monitor.record import Facts, GroupFacts, ParameterFacts, Training
from lightning_module_monitor.trainer.optimizers import parameter_ids
from lightning_module_monitor.trainer.run import Run

MAX_NODES = 100
"""Number of nodes of the loss's graph that are looked at."""
_CROSS_ENTROPIES = {"LogSoftmax": ("Softmax",), "BinaryCrossEntropyWithLogits": ("Sigmoid", "Softmax")}
"""Nodes of the graph that take the softmax or sigmoid of logits, and those that must not come right before them."""
_OF_CLASSES = (*_CROSS_ENTROPIES, "NllLoss", "BinaryCrossEntropy", "CtcLoss")
_RESHAPING = {"View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose", "T", "Permute"}
_RESHAPING |= {"ToCopy", "Clone", "Slice", "Select"}


class LossFacts(NamedTuple):
    """What the graph of a loss shows."""

    is_classification: bool = False
    softmax_twice: bool = False

    def joined(self, loss: Tensor) -> LossFacts:
        """These, and what the graph of a further loss shows."""
        names = [*_names(loss)]
        is_classification = any(name in _OF_CLASSES or name.startswith("NllLoss") for name, _before in names)
        softmax_twice = any(before in _CROSS_ENTROPIES.get(name, ()) for name, before in names)
        return LossFacts(self.is_classification or is_classification, self.softmax_twice or softmax_twice)


def facts_of(run: Run, optimizers: Sequence[Optimizer], of_loss: LossFacts) -> Facts:
    """The facts of a step that is over."""
    groups = [(type(optimizer).__name__, group) for optimizer in optimizers for group in optimizer.param_groups]
    parameters = _parameters(run, optimizers)
    return Facts(
        parameters,
        tuple(GroupFacts(name, float(group.get("momentum") or 0.0), float(group.get("weight_decay") or 0.0)) for name, group in groups),
        tuple(_in_eval(run, parameters)),
        of_loss.softmax_twice,
        of_loss.is_classification,
        not run.module.automatic_optimization,
        float(run.trainer.gradient_clip_val or 0.0),
        run.trainer.gradient_clip_algorithm == "value",
    )


def _in_eval(run: Run, parameters: dict[str, ParameterFacts]) -> Iterable[str]:
    """Modules with running statistics that are in eval, some of whose own weights are trained."""
    for site in run.index.modules:
        if not site.module.training and getattr(site.module, "running_mean", None) is not None:
            own = (parameters.get(f"{site.name}.{name}") for name in ("weight", "bias"))
            if any(one is not None and one.training == "trained" for one in own):
                yield site.name


def _parameters(run: Run, optimizers: Sequence[Optimizer]) -> dict[str, ParameterFacts]:
    """What is known of each parameter, by the name of its site. Optimizers without any of them have copies: all are trained."""
    optimized = parameter_ids(optimizers)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    group_of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    parameters = {site.name: site.tensor() for site in run.index.parameters}
    has_copies = not any(id(one) in optimized for one in parameters.values())

    def training_of(one: Tensor | None) -> Training:
        if one is None or not one.requires_grad or run.monitor.access.is_empty(one) or not optimizers:
            return "frozen"
        return "trained" if has_copies or id(one) in optimized else "untrained"

    return {
        name: ParameterFacts(training_of(one), group_of.get(id(one), -1), 0 if one is None else one.numel())
        for name, one in parameters.items()
    }


def first_gradient(optimizer: Optimizer) -> Tensor | None:
    """The first gradient of an optimizer that has elements."""
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return next((one for one in gradients if one is not None and one.layout is torch.strided and one.numel()), None)


def _names(loss: Tensor) -> Iterable[tuple[str, str]]:
    """Names of the nodes of a loss's graph, from the loss on, each with that of the node before it that does more than reshape."""
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
        yield _name(node), "" if before is None else _name(before)
        waiting.extend(one for one, _number in node.next_functions)


def _name(node: Any) -> str:  # noqa: ANN401  # a node of autograd's graph
    return str(node.name()).partition("Backward")[0]
