"""A monitored training step: its optimizers, its context (the loss, learning rates, samples, logged metrics), and its facts."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.engine.observed_model import ObservedModel
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.lightning_packages import is_a
from lightning_module_monitor.model.hooks import as_torch_itself
from lightning_module_monitor.model.names import Namer
from lightning_module_monitor.model.outputs import named_tensors
from lightning_module_monitor.record import (
    BATCH_SIZE,
    KINDS,
    LEARNING_RATE,
    LOSS,
    OWN_KIND,
    Facts,
    GroupFacts,
    Key,
    ParameterFacts,
    Training,
    name_of_rate,
)
from lightning_module_monitor.trainer.optimizers import DeepSpeedTracker, OptimizerTracker, parameter_ids
from lightning_module_monitor.trainer.run import Run
from lightning_module_monitor.trainer.strategy import scaler_of

MAX_NODES = 100
"""Largest number of nodes of the loss's graph that are read."""
_CROSS_ENTROPIES = {"LogSoftmax": ("Softmax",), "BinaryCrossEntropyWithLogits": ("Sigmoid", "Softmax")}
"""Nodes of the graph that apply a softmax or sigmoid to logits, each with the nodes that must not precede it."""
_CLASSIFICATION_LOSSES = (*_CROSS_ENTROPIES, "NllLoss", "BinaryCrossEntropy", "CtcLoss")
_RESHAPING = {"View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose", "T", "Permute"}
_RESHAPING |= {"ToCopy", "Clone", "Slice", "Select"}

CONTEXT = {
    LOSS: "mean",
    LEARNING_RATE: "max",
    BATCH_SIZE: "sum",
    "input_abs_max": "max",
    "input_is_constant": "min",
    "stale_gradients": "max",
}
"""The context of every monitored step of a fit: the aggregate over micro-batches and ranks, by name."""


def announce_context(model: ObservedModel, optimizers: Sequence[Optimizer]) -> Callable[[str], str]:
    """Announce the context to the monitor before a fit's first step; returns a function that names the module's metrics in keys."""
    num_rates = sum(len(optimizer.param_groups) for optimizer in optimizers)
    rates = [name_of_rate(number) for number in range(num_rates)]
    expected = CONTEXT | dict.fromkeys(rates, CONTEXT[LEARNING_RATE])
    model.expect_context(expected)
    namer = Namer()
    for name in expected:
        namer.name(name)
    return functools.cache(namer.name)


def note_accumulation(run: Run) -> None:
    """Before a step: note what its losses are divided by, and which parameters an optimizer has, for the gradient noise."""
    if run.recipe.gradient_noise is not None:
        optimizers = run.trainer.optimizers
        are_known = all(isinstance(optimizer, Optimizer) for optimizer in optimizers)
        run.model.noise.loss_divisor = run.trainer.accumulate_grad_batches
        run.model.noise.trained = parameter_ids(optimizers) if are_known else None


class MonitoredStep:
    """Notifies the monitor of the optimizers of a step, and adds the context of the step, without a read on the host."""

    def __init__(self, run: Run, name_of_metric: Callable[[str], str], fail: Callable[[str, Exception], None]) -> None:
        self._run = run
        self._trainer = run.trainer
        self._name_of_metric = name_of_metric
        self._optimizers = [optimizer for optimizer in run.trainer.optimizers if isinstance(optimizer, Optimizer)]
        """The optimizers that are torch's: a strategy may have other objects."""
        self._loss_facts = LossFacts()
        self._stale: dict[Optimizer, Tensor | float] = {}
        """Whether the gradients of an optimizer were not zero at the begin of every backward pass."""
        self._rates: dict[Optimizer, list[Tensor | float | None]] = {}
        """The learning rates that the optimizers used."""
        is_automatic, scaler = run.module.automatic_optimization, scaler_of(run.trainer)
        if is_a(run.trainer.strategy, "DeepSpeedStrategy"):
            self.tracker: OptimizerTracker = DeepSpeedTracker(run.monitor, run.trainer.strategy.model, [], is_automatic, scaler, fail)
        else:
            self.tracker = OptimizerTracker(run.monitor, run.module, self._optimizers, is_automatic, scaler, fail)

    @torch.no_grad()
    def begin_batch(self, batch: object) -> None:
        """A micro-batch begins. The length of its first tensor is the number of samples; its largest tensor is the input."""
        tensors = [tensor for tensor in (plain(item) for _path, item in named_tensors(batch)) if tensor.dim()]
        if tensors:
            # Input that several ranks share counts once.
            num_replicas = (self._trainer.distributed_sampler_kwargs or {}).get("num_replicas", self._trainer.world_size)
            self._add(BATCH_SIZE, len(tensors[0]) * num_replicas / self._trainer.world_size)
        dense = [tensor for tensor in tensors if tensor.numel() and tensor.layout is torch.strided]
        data = max(dense, key=Tensor.numel, default=None)
        if data is not None and len(data) > 1:
            self._add("input_is_constant", (data == data[:1]).all().float())
        if data is not None and data.is_floating_point():
            self._add("input_abs_max", data.detach().abs().max().float())

    @torch.no_grad()
    def begin_backward(self, loss: Tensor) -> None:
        """A loss is about to be differentiated. Its value is recorded without the factor of a ``GradScaler``."""
        self.tracker.begin_backward(loss)
        value, scale, num_batches = plain(loss).detach(), self.tracker.scale, self._trainer.accumulate_grad_batches
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        # Under automatic optimization the trainer has divided the loss by its number of micro-batches.
        value = value if num_batches == 1 else value * num_batches
        self._add(LOSS, value if scale is None else value / scale)
        self._loss_facts = self._loss_facts.joined(loss)
        for optimizer in self._optimizers:
            gradient = _first_gradient(optimizer)
            is_stale = 0.0 if gradient is None else (gradient != 0).any().float()
            self._stale[optimizer] = self._stale[optimizer] * is_stale if optimizer in self._stale else is_stale

    def before_clipping(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are complete and not clipped."""
        self.tracker.before_clipping(optimizer)
        self._observe_rates(optimizer)

    def _observe_rates(self, optimizer: Optimizer) -> None:
        """Note the learning rates that an optimizer is about to use, which a scheduler may change before the step is over."""
        if optimizer not in self._rates:
            rates = [group.get("lr") for group in optimizer.param_groups]
            self._rates[optimizer] = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def end(self) -> None:
        """The step is over. An optimizer that has not stepped in it has its present learning rates."""
        for optimizer in self.tracker.first_steps:
            # Gradients that were cleared since were accumulated on purpose.
            self._add("stale_gradients", 0.0 if _first_gradient(optimizer) is None else self._stale.get(optimizer, 0.0))
        self.tracker.finish()
        for optimizer in self._trainer.optimizers:
            self._observe_rates(optimizer)
        rates = [rate for optimizer in self._trainer.optimizers for rate in self._rates[optimizer]]
        for number, rate in enumerate(rates):
            if isinstance(rate, Tensor | float | int):
                self._run.monitor.monitor_context(name_of_rate(number), rate, CONTEXT[LEARNING_RATE])
        # Reading the metrics converts those of the progress bar to numbers, as Lightning itself does right afterwards.
        metrics = self._trainer.callback_metrics
        for name, value in metrics.items():
            is_twice = name.endswith("_step") and name.removesuffix("_step") in metrics  # a metric that is logged by step and by epoch
            if isinstance(value, Tensor) and value.numel() == 1 and not is_twice and not _is_ours(name):
                self._run.monitor.monitor_context(self._name_of_metric(name), value)

    def facts(self) -> Facts:
        """The facts of the step beside its values, when it is over."""
        run, optimizers, loss_facts = self._run, self._optimizers, self._loss_facts
        parameters = _parameters(run, optimizers)
        return Facts(
            parameters,
            tuple(_group(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups),
            tuple(_in_eval(run, parameters)),
            loss_facts.softmax_twice,
            loss_facts.is_classification,
            not run.module.automatic_optimization,
            float(run.trainer.gradient_clip_val or 0.0),
            run.trainer.gradient_clip_algorithm == "value",
        )

    def _add(self, name: str, value: Tensor | float) -> None:
        self._run.monitor.monitor_context(name, value, CONTEXT[name])


def _is_ours(name: str) -> bool:
    """Whether a logged name is a key of a monitor, which ``callback_metrics`` passes to Lightning."""
    key = Key.parse(name)
    return key.kind == OWN_KIND or (key.kind in KINDS and key.site != "")


# Facts of a step that detectors need beside its values: states of parameters and modules, and the graph of the loss


class LossFacts(NamedTuple):
    """Facts that the graph of a loss shows."""

    is_classification: bool = False
    softmax_twice: bool = False

    def joined(self, loss: Tensor) -> LossFacts:
        """These facts, together with the facts of a further loss."""
        names = [*_names(loss)]
        is_classification = any(name in _CLASSIFICATION_LOSSES or name.startswith("NllLoss") for name, _before in names)
        softmax_twice = any(before in _CROSS_ENTROPIES.get(name, ()) for name, before in names)
        return LossFacts(self.is_classification or is_classification, self.softmax_twice or softmax_twice)


def _group(optimizer: Optimizer, group: Mapping[str, Any]) -> GroupFacts:
    name = group.get("name")
    momentum, weight_decay = (float(group.get(option) or 0.0) for option in ("momentum", "weight_decay"))
    return GroupFacts(type(optimizer).__name__, momentum, weight_decay, name if isinstance(name, str) else "")


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


def _first_gradient(optimizer: Optimizer) -> Tensor | None:
    """The first gradient with elements of an optimizer's parameters."""
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return next((grad for grad in gradients if grad is not None and grad.layout is torch.strided and grad.numel()), None)


def _names(loss: Tensor) -> Iterable[tuple[str, str]]:
    """Names of the nodes of a loss's graph, from the loss on, each with the name of the nearest earlier node that does not only reshape."""
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
        waiting.extend(function for function, _index in node.next_functions)


def _name(node: Any) -> str:  # noqa: ANN401  # a node of autograd's graph
    return str(node.name()).partition("Backward")[0]
