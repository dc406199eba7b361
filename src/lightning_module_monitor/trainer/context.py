"""The context of a monitored step: the loss, the learning rates, the number of samples, and the metrics that the module logs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.model.names import Namer
from lightning_module_monitor.model.outputs import named_tensors
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.probes.gradient_flow import KIND as GRADIENT_FLOW
from lightning_module_monitor.record import KINDS, LOSS, OWN_KIND, Key
from lightning_module_monitor.trainer.facts import INPUT
from lightning_module_monitor.trainer.run import Run

LEARNING_RATE, BATCH_SIZE = "lr", "batch_size"
CONTEXT = {LOSS: "mean", LEARNING_RATE: "max", BATCH_SIZE: "sum", **INPUT}
"""The context of every monitored step of a fit, with the aggregate over its micro-batches and all ranks."""


class ContextNames:
    """The names in keys of what the context of a fit holds, the same in every step."""

    def __init__(self, monitor: ModuleMonitor, optimizers: Sequence[Optimizer]) -> None:
        """Announce to the monitor which values there will be, before the first step of the fit, when there are optimizers."""
        self._namer = Namer()
        self._names: dict[str, str] = {}
        """Name in keys by name of the module's metric."""
        rates = [_name_of_rate(number) for number in range(sum(len(one.param_groups) for one in optimizers))]
        expected = CONTEXT | dict.fromkeys(rates, CONTEXT[LEARNING_RATE])
        monitor.logged.expect_context(expected)
        for name in expected:
            self._namer.name(name)

    def of_metric(self, name: str) -> str:
        """The name in keys of a metric that the module logs."""
        if name not in self._names:
            self._names[name] = self._namer.name(name)
        return self._names[name]


class StepContextController:
    """Gives a monitor the context of one step, without a read on the host."""

    def __init__(self, run: Run, names: ContextNames) -> None:
        self._monitor = run.monitor
        self._trainer = run.trainer
        self._names = names
        self._rates: dict[Optimizer, list[Tensor | float | None]] = {}
        """The learning rates that the optimizers used."""

    def observe_batch(self, batch: object) -> None:
        """Count the samples of a micro-batch: the length of its first tensor. Ranks that share their input count it once."""
        size = next((len(tensor) for tensor in (plain(one) for _path, one in named_tensors(batch)) if tensor.dim()), None)
        if size is not None:
            trainer = self._trainer
            num_replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)
            self._monitor.monitor_context(BATCH_SIZE, size * num_replicas / trainer.world_size, CONTEXT[BATCH_SIZE])

    def observe_loss(self, loss: Tensor, scale: Tensor | None) -> None:
        """Record a loss that is about to be differentiated, without ``scale``, by which a ``GradScaler`` has multiplied it."""
        # Under automatic optimization the trainer has divided it by its number of micro-batches.
        loss = plain(loss).detach()
        own = loss.to(torch.promote_types(loss.dtype, torch.float32))
        num_batches = self._trainer.accumulate_grad_batches
        own = own if num_batches == 1 else own * num_batches
        self._monitor.monitor_context(LOSS, own if scale is None else own / scale, CONTEXT[LOSS])

    def observe_rates(self, optimizer: Optimizer) -> None:
        """Note the learning rates that an optimizer is about to use: a scheduler may change them before the step is over."""
        if optimizer not in self._rates:
            rates = [group.get("lr") for group in optimizer.param_groups]
            self._rates[optimizer] = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def end_step(self) -> None:
        """The step is over; an optimizer that has made no step in it has the learning rates of now."""
        trainer = self._trainer
        for optimizer in trainer.optimizers:
            self.observe_rates(optimizer)
        rates = [rate for optimizer in trainer.optimizers for rate in self._rates[optimizer]]
        for number, rate in enumerate(rates):
            if isinstance(rate, Tensor | float | int):
                self._monitor.monitor_context(_name_of_rate(number), rate, CONTEXT[LEARNING_RATE])
        # Reading the metrics makes numbers of those that the progress bar shows; Lightning does so itself a moment later.
        metrics = trainer.callback_metrics
        for name, value in metrics.items():
            is_twice = name.endswith("_step") and name.removesuffix("_step") in metrics  # a metric that is logged by step and by epoch
            if isinstance(value, Tensor) and value.numel() == 1 and not is_twice and not _is_ours(name):
                self._monitor.monitor_context(self._names.of_metric(name), value)


def _name_of_rate(number: int) -> str:
    return f"{LEARNING_RATE}_{number}" if number else LEARNING_RATE


def _is_ours(name: str) -> bool:
    """Whether a logged name is a key of a monitor, which ``callback_metrics`` gives to Lightning."""
    key = Key.parse(name)
    return key.kind == OWN_KIND or (key.kind in (*KINDS, GRADIENT_FLOW) and key.site != "")
