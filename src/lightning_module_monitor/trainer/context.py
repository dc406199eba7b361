"""A monitored training step: its optimizers, its context (the loss, learning rates, samples, logged metrics), and its facts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.engine.observed_model import ObservedModel
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.keys import name_of_rate
from lightning_module_monitor.kinds import BATCH_SIZE, LEARNING_RATE, LOSS
from lightning_module_monitor.lightning_packages import is_a
from lightning_module_monitor.model.names import Namer
from lightning_module_monitor.model.outputs import is_known, named_tensors, num_samples
from lightning_module_monitor.trainer.facts_reader import FactsReader, first_gradient
from lightning_module_monitor.trainer.logged_metrics import logged_metrics
from lightning_module_monitor.trainer.moved_elsewhere import MovedElsewhere
from lightning_module_monitor.trainer.optimizers import DeepSpeedTracker, OptimizerTracker, parameter_ids
from lightning_module_monitor.trainer.run import Run
from lightning_module_monitor.trainer.strategy import scaler_of
from lightning_module_monitor.trainer.variation import OutputVariation, sample_dimension, variation

CONTEXT = {
    LOSS: "mean",
    LEARNING_RATE: "max",
    BATCH_SIZE: "sum",
    "input_abs_max": "max",
    "input_is_constant": "min",
    "input_variation": "max",
    "output_variation": "max",
    "constant_from": "max",
    "same_units": "max",
    "target_min": "min",
    "target_max": "max",
    "stale_gradients": "max",
}
"""The context of the monitored steps of a fit: the aggregate over micro-batches and ranks, by name. Some steps have not all of it."""

MIN_TARGETS = 8
"""Number of targets of a batch below which their range is not taken."""


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


def prepare_gradient_noise(run: Run) -> None:
    """Before a step: note for the gradient noise what the losses of the step are divided by, and which parameters an optimizer has."""
    if run.recipe.gradient_noise is not None:
        optimizers = run.trainer.optimizers
        are_known = all(isinstance(optimizer, Optimizer) for optimizer in optimizers)
        run.model.noise.loss_divisor = run.trainer.accumulate_grad_batches
        run.model.noise.trained = parameter_ids(optimizers) if are_known else None


class MonitoredStep:
    """Notifies the monitor of the optimizers of a step, and adds its context; only metrics of the progress bar are read on the host."""

    def __init__(
        self,
        run: Run,
        name_of_metric: Callable[[str], str],
        *,
        facts: FactsReader | None,
        variation: OutputVariation | None,
        elsewhere: MovedElsewhere,
        fail: Callable[[str, Exception], None],
    ) -> None:
        self._run = run
        self._facts, self._variation, self._elsewhere = facts, variation, elsewhere
        """What detectors need beside the values of the step; ``None`` where nothing needs it."""
        self._labels: list[Tensor] = []
        """The tensors of integers in the micro-batch."""
        self._tokens: Tensor | None = None
        """The input of the micro-batch, if it is of integers."""
        self._trainer = run.trainer
        self._name_of_metric = name_of_metric
        self._optimizers = [optimizer for optimizer in run.trainer.optimizers if isinstance(optimizer, Optimizer)]
        """The optimizers that are torch's: a strategy may have other objects."""
        if facts is not None:
            facts.begin_step()
        if variation is not None:
            variation.begin_step()
        self._stale: dict[Optimizer, Tensor | float] = {}
        """Whether the first gradient of an optimizer was not zero at the begin of every backward pass; it stands for all of them."""
        self._rates: dict[Optimizer, list[Tensor | float | None]] = {}
        """The learning rates that the optimizers used."""
        self.tracker: OptimizerTracker | DeepSpeedTracker
        if is_a(run.trainer.strategy, "DeepSpeedStrategy"):
            self.tracker = DeepSpeedTracker(run.monitor, run.trainer.strategy.model)
        else:
            is_automatic, scaler = run.module.automatic_optimization, scaler_of(run.trainer)
            elsewhere.begin_step()
            self.tracker = OptimizerTracker(run.monitor, run.module, self._optimizers, is_automatic, scaler, elsewhere, fail)

    @torch.no_grad()
    def begin_batch(self, batch: object) -> None:
        """A micro-batch begins. Its largest tensor is the input."""
        tensors = [tensor for tensor in (plain(item) for _path, item in named_tensors(batch)) if tensor.dim()]
        size = num_samples(batch)
        if size is not None:
            # Input that several ranks share counts once.
            num_replicas = (self._trainer.distributed_sampler_kwargs or {}).get("num_replicas", self._trainer.world_size)
            self._add(BATCH_SIZE, size * num_replicas / self._trainer.world_size)
            is_of_first = bool(tensors) and size == len(tensors[0])
            if self._run.recipe.gradient_noise is not None and is_of_first and {size} != {*map(len, tensors)}:
                why = f"the first tensor of the batch has length {size}, and others have other lengths"
                message = f"gradient_noise counts {BATCH_SIZE} in rows of the first tensor: {why}."
                self._run.reporter.log_once(message, logging.WARNING, "rows of the first tensor")
        dense = [tensor for tensor in tensors if tensor.numel() and tensor.layout is torch.strided]
        data = max(dense, key=Tensor.numel, default=None)
        for tensor in dense if is_known(batch) else ():
            # Another tensor that differs between samples may be the input; one of a single number for each sample is rather a target.
            if len(tensor) > 1 and (tensor is data or tensor.numel() > len(tensor)):
                self._add("input_is_constant", (tensor == tensor[:1]).all().float())
        if data is not None and data.is_floating_point():
            self._add("input_abs_max", data.detach().abs().max().float())
        if self._variation is not None:
            self._variation.begin_batch(size, dense)
            dimension = None if data is None or data.is_complex() else sample_dimension(data, size or 0)
            if data is not None and dimension is not None:
                self._add("input_variation", variation(data, dimension))
            self._labels = [tensor for tensor in dense if not (tensor.is_floating_point() or tensor.is_complex())]
            self._tokens = next((tensor for tensor in self._labels if tensor is data), None)

    @torch.no_grad()
    def begin_backward(self, loss: Tensor) -> None:
        """A loss is about to be differentiated. Its value is recorded without the factor of a ``GradScaler``."""
        self.tracker.begin_backward(loss)
        value, scale, num_batches = plain(loss).detach(), self.tracker.scale, self._trainer.accumulate_grad_batches
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        # Under automatic optimization the trainer has divided the loss by its number of micro-batches.
        value = value if num_batches == 1 else value * num_batches
        self._add(LOSS, value if scale is None else value / scale)
        if self._facts is not None:
            num_targets = self._facts.note_loss(loss, self._tokens, is_scaled=scale is not None)
            self._observe_targets(num_targets)
            if self._variation is not None:
                self._variation.note_targets(num_targets)
        for optimizer in self._optimizers:
            gradient = first_gradient(optimizer)
            is_stale = 0.0 if gradient is None else (gradient != 0).any().float()
            self._stale[optimizer] = self._stale[optimizer] * is_stale if optimizer in self._stale else is_stale

    def _observe_targets(self, num_targets: int) -> None:
        """Take the range of the labels that the loss compares with: of the only tensor in the batch with this number of integers."""
        labels = [tensor for tensor in self._labels if tensor.numel() == num_targets >= MIN_TARGETS]
        self._labels = []
        if len(labels) == 1 and labels[0].dtype != torch.bool:
            least, largest = torch.aminmax(labels[0])
            self._add("target_min", least)
            self._add("target_max", largest)

    def before_step(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are complete; under automatic optimization they are not clipped yet."""
        self.tracker.before_step(optimizer)
        self._observe_rates(optimizer)
        if self._facts is not None:
            self._facts.note_gradients(optimizer, moves_elsewhere=bool(self._elsewhere.parameters))

    def _observe_rates(self, optimizer: Optimizer) -> None:
        """Note the learning rates that an optimizer is about to use, which a scheduler may change before the step is over."""
        if optimizer not in self._rates:
            rates = [group.get("lr") for group in optimizer.param_groups]
            self._rates[optimizer] = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def end(self) -> None:
        """The step is over. An optimizer that has not stepped in it has its present learning rates."""
        for optimizer in self.tracker.first_steps:
            # Gradients that were cleared since were accumulated on purpose.
            self._add("stale_gradients", 0.0 if first_gradient(optimizer) is None else self._stale.get(optimizer, 0.0))
        self.tracker.finish()
        for name, value in ({} if self._variation is None else self._variation.end_step()).items():
            self._add(name, value)
        for optimizer in self._trainer.optimizers:
            self._observe_rates(optimizer)
        for number, (optimizer, group) in enumerate(self._run.groups.numbered(self._trainer.optimizers)):
            rates = self._rates[optimizer]
            rate = rates[group] if group < len(rates) else None  # the group was added after the optimizer's step
            if isinstance(rate, Tensor | float | int):
                self._run.monitor.monitor_context(name_of_rate(number), rate, CONTEXT[LEARNING_RATE])
        for name, value in logged_metrics(self._trainer):
            self._run.monitor.monitor_context(self._name_of_metric(name), value)

    def facts(self) -> Facts | None:
        """The facts of the step beside its values, when it is over; ``None`` where nothing needs them."""
        return None if self._facts is None else self._facts.read(self._optimizers, self._run.results.calls, self._elsewhere.trained)

    def close(self) -> None:
        """Remove every hook; a second call does nothing."""
        self.tracker.close()
        if self._variation is not None:
            self._variation.close()

    def _add(self, name: str, value: Tensor | float) -> None:
        self._run.monitor.monitor_context(name, value, CONTEXT[name])
