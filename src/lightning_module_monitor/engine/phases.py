"""The phases of a step: hooks are attached, tensors observed, hooks removed, values finished. Without a Trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_module_monitor.config.schedule import MinutesSchedule
from lightning_module_monitor.distributed.ranks import Ranks, disagreement, is_first_process, process_ranks
from lightning_module_monitor.engine.logged import LoggedValues
from lightning_module_monitor.engine.opening import StepOpener
from lightning_module_monitor.engine.step_context import StepContext
from lightning_module_monitor.errors import ConfigError, RanksLostError, shortened
from lightning_module_monitor.health.alerts import ReplicaAlert
from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.model.compiled import num_compiled
from lightning_module_monitor.model.hooks import Unobserved, is_tracing
from lightning_module_monitor.plan.planner import ActiveRules, Planner
from lightning_module_monitor.probes.base import Among, Gate
from lightning_module_monitor.probes.parameters import ParameterAccess
from lightning_module_monitor.probes.reference import Reference
from lightning_module_monitor.probes.reporting import ErrorReporter, unchanged_grad_mode
from lightning_module_monitor.record import OWN_KIND, RANK_DISAGREEMENT, SECONDS_PER_STEP, TRAIN, Finding, Record
from lightning_module_monitor.sinks.recent_records import StorageManager

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_NO_ATTENTION = (
    "called none of F.scaled_dot_product_attention, F.multi_head_attention_forward and nn.MultiheadAttention, and no attention is "
    'recorded. Try attn_implementation="sdpa" for a Hugging Face model, and monitor_scaled_dot_product_attention in a forward of your own.'
)


class StepEngine:
    """Observes a module step by step; see :class:`~lightning_module_monitor.monitor.ModuleMonitor`, which adds what users ask of it."""

    def __init__(self, reporter: ErrorReporter, planner: Planner, storage: StorageManager, distributed: bool | DeviceMesh) -> None:
        self._reporter = reporter
        self.planner = planner
        self.storage = storage
        self.distributed = distributed
        self.access = ParameterAccess()
        """Reads parameters and their gradients."""
        self._awaits_attention = True
        """Whether no step of this module has ended yet in which attention was due."""
        self._forget_module()

    def _forget_module(self) -> None:
        """Set everything that is not an option to what it is where there is no module."""
        self._module: nn.Module | None = None
        self.wrapper: nn.Module | None = None
        """What wraps the module, where a strategy has wrapped it."""
        self.logged = LoggedValues(self.planner.prefix)
        """Values that no probe observes."""
        self.gate = Gate()
        """Says whether what happens now is observed."""
        self._opener = StepOpener(self.planner, self._reporter, self.logged, self.gate)
        self._has_agreed = False
        """Whether all ranks are known to record the same."""
        self.ranks: Ranks | None = None
        """The processes that train together, once they have met; ``None`` where this is the only one."""
        self._replicas = ReplicaAlert()
        self.has_lost_ranks = False
        """Whether another rank has left: nothing is monitored any more, and training goes on."""
        self._reference: Reference | None = None
        self._begun: int | None = None
        """The step that was begun and has not ended, monitored or not."""
        self._context: StepContext | None = None
        self._clock: MinutesSchedule | None = None
        """If it picked the step that was begun."""
        self._suspended: list[StepContext | None] = []
        self._num_compiled_before = num_compiled()
        self._awaits_first_step = True
        """Whether no step of training has ended yet."""

    @property
    def module(self) -> nn.Module | None:
        """The module that is monitored; ``None`` before :meth:`set_module`."""
        return self._module

    @property
    def module_names(self) -> dict[nn.Module, str]:
        """The name of every module of the monitored one, also of those that are excluded; empty before :meth:`set_module`."""
        return {} if self._module is None else self.planner.index.names()

    @property
    def current_step(self) -> int | None:
        """The step that was begun and has not ended, monitored or not, or that of the open validation loop; ``None`` if there is none."""
        return self._begun if self._context is None else self._context.step

    def is_step_monitored(self, step: int) -> bool:
        """Whether the schedule picks a step, a rule with a cadence of its own is due in it, or tensors are captured in it."""
        return self._due(step) is not None

    def is_monitoring(self) -> bool:
        """Whether what happens now is observed: nothing is while torch traces (``torch.export``, ``FakeTensorMode``, any dispatch mode)."""
        return not is_tracing() and self.gate.observer is not None  # in this order: compiled code reads no state of ours

    # The phases of a step

    def begin_step(self, step: int) -> bool:
        """Begin a step; if it is monitored, the hooks go on. A step that an error left open is closed first.

        Args:
            step: Number of the optimizer step. It may be lower than before: after a resume it is.

        Returns:
            Whether the step is monitored.

        Raises:
            ValueError: If no module was set.
        """
        self._close_open_steps()
        if self._module is None:
            raise ValueError("There is no module to monitor; call set_module(module) before the first step.")
        self._begun = step
        due, self._clock = self._due(step), self.planner.clock(step)
        if due is not None:
            self._open(due, step, TRAIN)
        return self._context is not None

    def begin_backward(self, scale: Tensor | float | None = None) -> None:
        """The backward pass begins: from now to :meth:`end_backward` gradients that arrive at outputs count.

        Where neither is ever called, all do, as they arrive.

        Args:
            scale: What the loss was multiplied by, shape ``()``: those gradients are divided by it, and values are of the loss
                itself. Of a ``GradScaler`` that is ``scaler.scale(torch.ones((), device=loss.device))``, which unlike
                ``scaler.get_scale()`` reads nothing on the host.
        """
        if self._context is not None:
            self._context.modules.begin_backward(_as_scale(scale))

    def end_backward(self) -> None:
        """The backward pass is over: an ``autograd.grad`` of the user's from now on does not count."""
        if self._context is not None:
            self._context.modules.end_backward()

    def monitor_gradients(
        self, before_clip: bool = False, parameters: Iterable[Tensor] | None = None, scale: Tensor | float | None = None
    ) -> None:
        """Take in the gradients of the parameters, as they are now.

        Args:
            before_clip: Whether they are about to be clipped; they get keys of their own then.
            parameters: Of which parameters, where several optimizers have their own; all without it.
            scale: What they are still multiplied by, where no ``GradScaler.unscale_`` has divided by it; see :meth:`begin_backward`.
        """
        if self._context is not None and self.is_monitoring():
            kind = "gradient_before_clip" if before_clip else "gradient"
            with self._context.guard("gradients"):
                self._context.parameters.observe_gradients(kind, _identities(parameters), _as_scale(scale))

    def monitor_parameters(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Take in the parameters, as they are now: before the optimizer moves them.

        Args:
            parameters: Which ones, where several optimizers have their own; all without it.
        """
        if self._context is not None and self.is_monitoring():
            with self._context.guard("parameters"):
                self._context.parameters.observe_parameters(_identities(parameters))

    def monitor_updates(self, parameters: Iterable[Tensor] | None = None, *, is_skipped: bool = False) -> None:
        """Take in what the optimizer did to the parameters since :meth:`monitor_parameters`; :meth:`end_step` does it otherwise.

        Args:
            parameters: Which ones, where several optimizers have their own; all without it.
            is_skipped: Whether the optimizer left them where they were: then the update is 0, whatever else has changed them.
        """
        if self._context is not None and self.is_monitoring():
            with self._context.guard("updates"):
                self._context.parameters.observe_updates(_identities(parameters), is_skipped=is_skipped)

    def after_micro_batch(self) -> None:
        """End one of several micro-batches of a step."""
        if self._context is not None:
            self._context.end_micro_batch()

    def end_step(self) -> Record | None:
        """End the step: hooks off, one transfer, values finished.

        Returns:
            The record, if the step was monitored.
        """
        if self.is_in_stage():
            return None
        self._begun = None
        if self._context is None:
            return None
        self.monitor_updates()
        return self._finish() if self._clock is None else self._finish_by_clock(self._clock, self._context)

    def end_comparison(self) -> None:
        """The model has run on the input of the reference: calls of the reference that are left over are reported, and released."""
        if self._context is not None and self._context.reference is not None:
            self._context.reference.end_micro_batch()

    def begin_stage(self, stage: str, step: int) -> bool:
        """Begin a validation, test or predict loop. A step that is open is suspended until it ends.

        A loop that an error left open is closed first.

        Args:
            stage: ``validation``, ``test`` or ``predict``.
            step: The step that its record gets.

        Returns:
            Whether any rule records activations.
        """
        if self._context is not None and self.is_in_stage():
            self._context.lose()
            self.end_stage()
        everything = self.planner.everything()
        plan = self.planner.plan(everything, stage)
        self._suspended.append(self._context)
        self._go_on_with(None)  # where opening the loop fails, the step around it is not the loop
        self._open(everything, step, stage)
        return bool(plan.modules)

    def is_in_stage(self) -> bool:
        """Whether a loop of another stage than training is monitored now."""
        return bool(self._suspended)

    def end_stage(self) -> Record | None:
        """End the loop that was begun last, and go on with the step that it interrupted.

        Returns:
            The record of the loop.
        """
        if not self._suspended:
            return None
        record = None if self._context is None else self._finish()
        self._go_on_with(self._suspended.pop())
        return record

    def no_monitor(self) -> AbstractContextManager[None]:
        """Within the block nothing is observed."""
        return self.gate.closed()

    # What was recorded

    def get_step_metrics(self) -> dict[str, float]:
        """The values of the step that ended last, by key."""
        last = self.storage.last_step()
        return {} if last is None else self.storage.get_step_metrics(last)

    def get_step_histograms(self) -> dict[str, Histogram]:
        """The histograms of the step that ended last, by key; those of earlier steps are in a store, if there is one."""
        return self.storage.last_histograms()

    def get_all_metrics(self) -> dict[int, dict[str, float]]:
        """The values by key of every step that is still in memory, by step."""
        return self.storage.get_all_metrics()

    # Inside

    def agree(self) -> None:
        """Make sure that all ranks record the same: one collective, of every rank. Without it the first step that is monitored begins so.

        Raises:
            ConfigError: On every rank, if rules, schedules or modules differ.
        """
        if self._has_agreed or self.has_lost_ranks or self.distributed is False or self._module is None:
            return
        try:
            if self.ranks is None:
                self.ranks = process_ranks(None if self.distributed is True else self.distributed)
            differences = "" if self.ranks is None else disagreement(self.planner.one_by_one(), self.ranks)
        except RanksLostError as error:
            self.lose_ranks(error)
            return
        if differences:
            raise ConfigError(differences)
        self._has_agreed = self.ranks is not None

    def lose_ranks(self, error: RanksLostError) -> None:
        """Another rank has left: end the monitoring on this one, for good."""
        if self.has_lost_ranks:
            return
        self.has_lost_ranks = True
        self.lose()
        last = self.storage.last_step()
        after = "before the first record" if last is None else f"after the record of step {last}"
        self._reporter.log_once(f"Monitoring ends {after}: {error}. Training goes on.", logging.WARNING)

    def lose(self) -> None:
        """An error: what is open gives no record when it ends, which it must all the same, for other ranks wait for that."""
        for context in (self._context, *self._suspended):
            if context is not None:
                context.lose()

    def _close_open_steps(self) -> None:
        """Close what an error has left open, in the order in which other ranks have ended it: the loop, then the step around it."""
        self.lose()
        while self._context is not None or self._suspended:
            if self._context is not None:
                self._finish()
            self._go_on_with(self._suspended.pop() if self._suspended else None)

    def abandon(self) -> None:
        """Close the step, and what it suspended, at once and without a record, on this rank alone."""
        with ExitStack() as stack:
            for context in (self._context, *self._suspended):
                if context is not None:
                    stack.callback(context.close)
        self._begun = None
        self._go_on_with(None)
        self._suspended.clear()

    def _due(self, step: int) -> ActiveRules | None:
        """What is due in a step, if it is monitored; where a function of the user's fails, raw tensors alone are captured."""
        try:
            return self.planner.due(step)
        except Exception as error:
            self._reporter.report(f"every_n_steps failed at step {step} ({type(error).__name__}: {error}).", error, "every_n_steps")
            return ActiveRules((), gradient_flow=False) if self.planner.is_captured(step) else None

    def _open(self, due: ActiveRules, step: int, stage: str) -> None:
        self.agree()
        if self.has_lost_ranks or self._module is None:
            return
        if self.planner.find_compiled(self._module, self.wrapper):
            self._opener.forget_plans()
        model = self.wrapper or self._module
        self.gate.wrapped = None if model is self._module else self._module
        self._go_on_with(self._opener.open(due, step, stage, model=model, access=self.access, reference=self._reference, ranks=self.ranks))
        assert self._context is not None
        self._context.attach()

    def _go_on_with(self, context: StepContext | None) -> None:
        """From now on this step observes what happens, or none does."""
        self._context = context
        self.gate.enter(None if context is None else context.accumulator)

    def _finish(self) -> Record | None:
        """Close the context and finish what it saw; ``None`` if an error has spoiled that, on any rank, or another rank has left."""
        if self.has_lost_ranks:
            self._go_on_with(None)  # it was closed, and no rank waits for its end
            return None
        try:
            return self._finished()
        except RanksLostError as error:
            self.lose_ranks(error)
            return None

    @unchanged_grad_mode()
    def _finished(self) -> Record | None:
        assert self._context is not None
        context, tensors = self._context, []
        try:
            tensors = context.finish_probes()
        finally:
            with self._reporter.guard("hooks", context.accumulator):
                context.close()
            # Not before: hooks that Ctrl-C has left are removed when this monitor is closed.
            self._go_on_with(None)
        if context.has_missed():
            self._reporter.log_once(Unobserved.message, logging.WARNING)
        if context.stage == TRAIN:
            self._report_not_run(context)
        values: dict[str, float] = {}
        # Of the other kinds nothing is measured; to find out takes as long as all else at the end of a step.
        for key in context.accumulator.drop_overwriting(self.logged.of_users()):
            self._reporter.log_once(f"{key!r} is logged, and is measured too: what is measured is recorded.", logging.WARNING)
        with self._reporter.guard("values", context.accumulator):
            values = context.accumulator.collect(context.ranks)
            context.derive(values)
        if context.accumulator.is_lost:
            return None
        if self._awaits_attention and context.attention is not None and context.attention.is_requested:
            self._awaits_attention = False
            if not context.attention.has_observed and self._speaks_for_all():
                self._reporter.log_once(f"attention: step {context.step} {_NO_ATTENTION}", logging.WARNING)
        values[self.planner.own_key("errors", context.stage)] = float(context.accumulator.num_errors)
        findings: list[Finding] = []
        if context.ranks is not None and context.stage == TRAIN:
            differing = context.accumulator.differing
            values[self.planner.own_key(RANK_DISAGREEMENT)] = float(len({stream.site for stream in differing}))
            findings = self._replicas.examine(context.step, differing)
        record = Record(context.step, values, context.accumulator.histograms, tensors, findings, self._opener.modules.modules())
        self.storage.add(record)
        return record

    def _report_not_run(self, context: StepContext) -> None:
        """After the first step report modules that may have run in a compiled function which nothing in the model holds."""
        is_first, self._awaits_first_step = self._awaits_first_step, False
        has_compiled = self.planner.keeps_compiled and num_compiled() > self._num_compiled_before
        names = self._opener.modules.not_run() if is_first and has_compiled else []
        if names:
            what = f"{shortened(names)} did not run in step {context.step}, or inside a compiled function, where nothing is observed"
            self._reporter.log_once(f"{what}. compiled: uncompiled observes it, and runs monitored steps uncompiled.")

    def _finish_by_clock(self, clock: MinutesSchedule, context: StepContext) -> Record | None:
        """Finish a step that the clock picked, and choose the next one: by the time that all ranks have in their record."""
        seconds = clock.seconds_per_step(context.step)
        if seconds is not None:
            self.logged.add(context, OWN_KIND, SECONDS_PER_STEP, seconds, "max")
        record = self._finish()
        values: Mapping[str, float] = {} if record is None else record.values
        clock.decide(context.step, values.get(self.planner.own_key(SECONDS_PER_STEP), math.nan))
        return record

    def _speaks_for_all(self) -> bool:
        return self.distributed is False or is_first_process()


def _identities(parameters: Iterable[Tensor] | None) -> Among:
    return None if parameters is None else frozenset(map(id, parameters))


def _as_scale(scale: Tensor | float | None) -> Tensor | None:
    return torch.tensor(scale, dtype=torch.float64, device="cpu") if isinstance(scale, float | int) else scale
