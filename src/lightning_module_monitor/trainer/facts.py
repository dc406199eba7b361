"""What a record needs besides its numbers to be judged: states of parameters and modules, the graph of the loss, the input."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.lightning_packages import LightningModule
from lightning_module_monitor.model.hooks import as_torch_itself
from lightning_module_monitor.model.outputs import named_tensors
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.record import Facts, GroupFacts, ParameterFacts, Training
from lightning_module_monitor.trainer.optimizers import parameter_ids

INPUT = {"input_abs_max": "max", "input_is_constant": "min", "stale_gradients": "max"}
"""Values of the context that describe the batch and the gradients before the backward pass, with their aggregates."""

MAX_NODES = 100
"""Number of nodes of the loss's graph that are looked at."""
_CROSS_ENTROPIES = {"LogSoftmax": ("Softmax",), "BinaryCrossEntropyWithLogits": ("Sigmoid", "Softmax")}
"""Nodes of the graph that take the softmax or sigmoid of logits, and those that must not come right before them."""
_OF_CLASSES = (*_CROSS_ENTROPIES, "NllLoss", "BinaryCrossEntropy", "CtcLoss")
_RESHAPING = (
    "View",
    "UnsafeView",
    "Reshape",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "T",
    "Permute",
    "ToCopy",
    "Clone",
    "Slice",
    "Select",
)


class StepFacts:
    """Collects the facts of a step."""

    def __init__(self, monitor: ModuleMonitor) -> None:
        self._monitor = monitor
        self.begin_step()

    def begin_step(self) -> None:
        """A monitored step begins."""
        self._softmax_twice = self._is_classification = False
        self._stale: dict[Optimizer, Tensor | float] = {}
        """Whether the gradients of an optimizer were not zero when any backward pass began."""

    @torch.no_grad()
    def observe_batch(self, batch: object) -> None:
        """Describe a micro-batch by its largest tensor, the input. Nothing is read on the host."""
        parts = [plain(one) for _path, one in named_tensors(batch)]
        tensors = [one for one in parts if one.dim() and one.numel() and one.layout is torch.strided]
        if not tensors:
            return
        data = max(tensors, key=Tensor.numel)
        if len(data) > 1:
            self._add("input_is_constant", (data == data[:1]).all().float())
        if data.is_floating_point():
            self._add("input_abs_max", data.detach().abs().max().float())

    @torch.no_grad()
    def observe_backward(self, loss: Tensor, optimizers: Iterable[Any]) -> None:
        """The backward pass of a loss is about to begin."""
        names = [*_names(loss)]
        self._is_classification |= any(name in _OF_CLASSES or name.startswith("NllLoss") for name, _before in names)
        self._softmax_twice |= any(before in _CROSS_ENTROPIES.get(name, ()) for name, before in names)
        for optimizer in optimizers:
            gradient = _first_gradient(optimizer)
            is_stale = 0.0 if gradient is None else (gradient != 0).any().float()
            known = self._stale.get(optimizer)
            self._stale[optimizer] = is_stale if known is None else known * is_stale

    def end_step(self, stepped: Iterable[Optimizer]) -> None:
        """The optimizers have made their steps. Gradients that are zero again by now were accumulated on purpose."""
        for optimizer in stepped:
            self._add("stale_gradients", 0.0 if _first_gradient(optimizer) is None else self._stale.get(optimizer, 0.0))

    def _add(self, name: str, value: Tensor | float) -> None:
        self._monitor.monitor_context(name, value, INPUT[name])

    def facts(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> Facts:
        """The facts of the step that is over."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        names = [type(optimizer).__name__ for optimizer in optimizers for _group in optimizer.param_groups]
        parameters = _parameters(self._monitor, optimizers)
        return Facts(
            parameters,
            tuple(
                GroupFacts(name, float(group.get("momentum") or 0.0), float(group.get("weight_decay") or 0.0))
                for name, group in zip(names, groups, strict=True)
            ),
            tuple(self._in_eval(parameters)),
            self._softmax_twice,
            self._is_classification,
            not module.automatic_optimization,
            float(module.trainer.gradient_clip_val or 0.0),
            module.trainer.gradient_clip_algorithm == "value",
        )

    def _in_eval(self, parameters: dict[str, ParameterFacts]) -> Iterable[str]:
        """Modules with running statistics that are in eval, some of whose own weights are trained."""
        for site in self._monitor.planner.index.modules:
            if not site.module.training and getattr(site.module, "running_mean", None) is not None:
                own = (parameters.get(f"{site.name}.{name}") for name in ("weight", "bias"))
                if any(one is not None and one.training == "trained" for one in own):
                    yield site.name


def _parameters(monitor: ModuleMonitor, optimizers: Sequence[Optimizer]) -> dict[str, ParameterFacts]:
    """What is known of each parameter, by the name of its site. Optimizers without any of them have copies: all are trained."""
    optimized = parameter_ids(optimizers)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    group_of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    parameters = {site.name: site.tensor() for site in monitor.planner.index.parameters}
    has_copies = not any(id(one) in optimized for one in parameters.values())

    def training_of(one: Tensor | None) -> Training:
        if one is None or not one.requires_grad or monitor.access.is_empty(one) or not optimizers:
            return "frozen"
        return "trained" if has_copies or id(one) in optimized else "untrained"

    return {
        name: ParameterFacts(training_of(one), group_of.get(id(one), -1), 0 if one is None else one.numel())
        for name, one in parameters.items()
    }


def _first_gradient(optimizer: Optimizer) -> Tensor | None:
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
