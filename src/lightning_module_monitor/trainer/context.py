"""A monitored step of training: its optimizers, its context (the loss, learning rates, samples, logged metrics), and its facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.engine.observed_model import ObservedModel
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.lightning_packages import is_a
from lightning_module_monitor.model.names import Namer
from lightning_module_monitor.model.outputs import named_tensors
from lightning_module_monitor.probes.gradient_flow import KIND as GRADIENT_FLOW
from lightning_module_monitor.record import KINDS, LOSS, OWN_KIND, Facts, Key
from lightning_module_monitor.trainer.facts import LossFacts, facts_of, first_gradient
from lightning_module_monitor.trainer.optimizers import EngineTracker, OptimizerTracker
from lightning_module_monitor.trainer.run import Run
from lightning_module_monitor.trainer.strategy import scaler_of

LEARNING_RATE, BATCH_SIZE = "lr", "batch_size"
CONTEXT = {
    LOSS: "mean",
    LEARNING_RATE: "max",
    BATCH_SIZE: "sum",
    "input_abs_max": "max",
    "input_is_constant": "min",
    "stale_gradients": "max",
}
"""The context of every monitored step of a fit, with the aggregate over its micro-batches and all ranks."""


class ContextNames:
    """The names in keys of what the context of a fit holds, the same in every step."""

    def __init__(self, model: ObservedModel, optimizers: Sequence[Optimizer]) -> None:
        """Announce to the monitor which values there will be, before the first step of the fit, when there are optimizers."""
        self._namer = Namer()
        self._names: dict[str, str] = {}
        """Name in keys by name of the module's metric."""
        rates = [_name_of_rate(number) for number in range(sum(len(one.param_groups) for one in optimizers))]
        expected = CONTEXT | dict.fromkeys(rates, CONTEXT[LEARNING_RATE])
        model.expect_context(expected)
        for name in expected:
            self._namer.name(name)

    def of_metric(self, name: str) -> str:
        """The name in keys of a metric that the module logs."""
        if name not in self._names:
            self._names[name] = self._namer.name(name)
        return self._names[name]


class MonitoredStep:
    """Notifies the monitor of what the optimizers of a step do, and gives it the context of the step, without a read on the host.

    Args:
        run: The run.
        names: Of the context.
        fail: Receives where an error was raised in a hook of an optimizer, and the error.
    """

    def __init__(self, run: Run, names: ContextNames, fail: Callable[[str, Exception], None]) -> None:
        self._run = run
        self._trainer = run.trainer
        self._names = names
        self._optimizers = [one for one in run.trainer.optimizers if isinstance(one, Optimizer)]
        """The optimizers of torch: a strategy may have objects of its own."""
        self._of_loss = LossFacts()
        self._stale: dict[Optimizer, Tensor | float] = {}
        """Whether the gradients of an optimizer were not zero when any backward pass began."""
        self._rates: dict[Optimizer, list[Tensor | float | None]] = {}
        """The learning rates that the optimizers used."""
        self._tracker: OptimizerTracker | EngineTracker
        if is_a(run.trainer.strategy, "DeepSpeedStrategy"):
            self._tracker = EngineTracker(run.monitor, run.trainer.strategy.model)
        else:
            is_automatic, scaler = run.module.automatic_optimization, scaler_of(run.trainer)
            self._tracker = OptimizerTracker(run.monitor, run.module, self._optimizers, is_automatic=is_automatic, scaler=scaler, fail=fail)

    def attach(self) -> None:
        """Register the hooks of the optimizers."""
        self._tracker.attach()

    def close(self) -> None:
        """Remove the hooks."""
        self._tracker.close()

    @torch.no_grad()
    def begin_batch(self, batch: object) -> None:
        """A micro-batch begins. Its samples are the length of its first tensor; its largest tensor is the input."""
        tensors = [one for one in (plain(one) for _path, one in named_tensors(batch)) if one.dim()]
        if tensors:
            # Ranks that share their input count it once.
            num_replicas = (self._trainer.distributed_sampler_kwargs or {}).get("num_replicas", self._trainer.world_size)
            self._add(BATCH_SIZE, len(tensors[0]) * num_replicas / self._trainer.world_size)
        dense = [one for one in tensors if one.numel() and one.layout is torch.strided]
        data = max(dense, key=Tensor.numel, default=None)
        if data is not None and len(data) > 1:
            self._add("input_is_constant", (data == data[:1]).all().float())
        if data is not None and data.is_floating_point():
            self._add("input_abs_max", data.detach().abs().max().float())

    @torch.no_grad()
    def begin_backward(self, loss: Tensor) -> None:
        """A loss is about to be differentiated. Its value is recorded without the factor of a ``GradScaler``."""
        self._tracker.begin_backward(loss)
        own, scale, num_batches = plain(loss).detach(), self._tracker.scale, self._trainer.accumulate_grad_batches
        own = own.to(torch.promote_types(own.dtype, torch.float32))
        # Under automatic optimization the trainer has divided it by its number of micro-batches.
        own = own if num_batches == 1 else own * num_batches
        self._add(LOSS, own if scale is None else own / scale)
        self._of_loss = self._of_loss.joined(loss)
        for optimizer in self._optimizers:
            gradient = first_gradient(optimizer)
            is_stale = 0.0 if gradient is None else (gradient != 0).any().float()
            self._stale[optimizer] = self._stale[optimizer] * is_stale if optimizer in self._stale else is_stale

    def before_clipping(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are complete and not clipped."""
        self._tracker.before_clipping(optimizer)
        self._observe_rates(optimizer)

    def _observe_rates(self, optimizer: Optimizer) -> None:
        """Note the learning rates that an optimizer is about to use: a scheduler may change them before the step is over."""
        if optimizer not in self._rates:
            rates = [group.get("lr") for group in optimizer.param_groups]
            self._rates[optimizer] = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def end(self) -> None:
        """The step is over. An optimizer that has made no step in it has the learning rates of now."""
        for optimizer in self._tracker.stepped:
            # Gradients that are zero again by now were accumulated on purpose.
            self._add("stale_gradients", 0.0 if first_gradient(optimizer) is None else self._stale.get(optimizer, 0.0))
        self._tracker.finish()
        for optimizer in self._trainer.optimizers:
            self._observe_rates(optimizer)
        rates = [rate for optimizer in self._trainer.optimizers for rate in self._rates[optimizer]]
        for number, rate in enumerate(rates):
            if isinstance(rate, Tensor | float | int):
                self._run.monitor.monitor_context(_name_of_rate(number), rate, CONTEXT[LEARNING_RATE])
        # Reading the metrics makes numbers of those that the progress bar shows; Lightning does so itself a moment later.
        metrics = self._trainer.callback_metrics
        for name, value in metrics.items():
            is_twice = name.endswith("_step") and name.removesuffix("_step") in metrics  # a metric that is logged by step and by epoch
            if isinstance(value, Tensor) and value.numel() == 1 and not is_twice and not _is_ours(name):
                self._run.monitor.monitor_context(self._names.of_metric(name), value)

    def facts(self) -> Facts:
        """What is known of the step besides its numbers."""
        return facts_of(self._run, self._optimizers, self._of_loss)

    def _add(self, name: str, value: Tensor | float) -> None:
        self._run.monitor.monitor_context(name, value, CONTEXT[name])


def _name_of_rate(number: int) -> str:
    return f"{LEARNING_RATE}_{number}" if number else LEARNING_RATE


def _is_ours(name: str) -> bool:
    """Whether a logged name is a key of a monitor, which ``callback_metrics`` gives to Lightning."""
    key = Key.parse(name)
    return key.kind == OWN_KIND or (key.kind in (*KINDS, GRADIENT_FLOW) and key.site != "")
