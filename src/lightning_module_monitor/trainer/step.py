"""The steps of a run: the step of each batch, whether it is monitored, and its phases; and the loops that interrupt it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property

from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.config.health_options import STOP
from lightning_module_monitor.distributed.ranks import is_first_process
from lightning_module_monitor.errors import ConfigError, MonitorError, NonfiniteError, RanksLostError
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.kinds import OVERHEAD_FRACTION
from lightning_module_monitor.lightning_packages import messages, runs_hook
from lightning_module_monitor.record import Record
from lightning_module_monitor.trainer.checks import check_awaited, check_detectors
from lightning_module_monitor.trainer.context import MonitoredStep, announce_context, prepare_gradient_noise
from lightning_module_monitor.trainer.facts_reader import FactsReader
from lightning_module_monitor.trainer.health_controller import HealthController
from lightning_module_monitor.trainer.logged_metrics import LastValidation
from lightning_module_monitor.trainer.moved_elsewhere import MovedElsewhere
from lightning_module_monitor.trainer.options import STAGES
from lightning_module_monitor.trainer.overhead import Overhead, clock_of
from lightning_module_monitor.trainer.reference_controller import ReferenceController
from lightning_module_monitor.trainer.run import Run, step_of
from lightning_module_monitor.trainer.sinks_controller import SinksController
from lightning_module_monitor.trainer.variation import OutputVariation


class StepController:
    """Begins and ends the steps of a run, notifies the monitor of the events in between, and gives every record to all receivers."""

    def __init__(self, run: Run, health: HealthController, sinks: SinksController) -> None:
        self._run = run
        self._monitor = run.monitor
        self._engine = run.engine
        self._trainer = run.trainer
        self._observes_training = run.observes_training
        self.health = health
        self._nonfinite = health.nonfinite
        self._facts = FactsReader(run) if health.needs_facts else None
        self._variation = OutputVariation(run) if health.needs_facts else None
        self._elsewhere = MovedElsewhere(run)
        self._sinks = sinks
        self._last_validation = LastValidation(run)
        self.reference: ReferenceController | None = None
        """Once it is made, which is before the first batch."""
        limit = run.options.max_overhead
        self._overhead = None if limit is None else Overhead(limit, clock_of(run.module.device))
        self._runs_training_step = run.engine.gate.is_in_step = runs_hook(run.module, "training_step")
        self.is_idle = True
        """Whether nothing is left to do in this step."""
        self._has_record = False
        """Whether training has a record."""
        self._step: int | None = None
        """The open step, monitored or not; ``None`` between two steps."""
        self._monitored: MonitoredStep | None = None
        """The open step, if it is monitored."""

    @cached_property
    def _name_of_metric(self) -> Callable[[str], str]:
        return announce_context(self._run.model, self._trainer.optimizers)

    # A training step

    def begin_batch(self, batch: object, batch_idx: int) -> None:
        """A micro-batch begins; the first micro-batch of a step begins the step."""
        step = step_of(self._trainer)
        # The number grows after the last micro-batch of a step. A step that an epoch has cut short (on_train_batch_start returned -1) is
        # begun anew: Lightning forgets its gradients.
        is_first = step != self._step or batch_idx == 0
        if is_first:
            self._close_monitored()
            self._step = step
            # An error below must not prevent the end of the step, which other ranks wait for.
            self.is_idle = not self._observes_training or self._engine.has_lost_ranks
            self._sinks.begin_step(step)
        if self.is_idle:
            if self._engine.has_lost_ranks:
                self._nonfinite.close()
            return
        if self._overhead is not None:
            self._overhead.begin_batch()
        if is_first:
            self.is_idle = not self._begin_step(step)
            if self.is_idle:
                return
        # Until on_before_backward, every backward pass is an inner one of the user's.
        self._monitor.end_backward()
        if self._monitored is not None:
            self._monitored.begin_batch(batch)
        if self.reference is not None and self._engine.awaits_reference():
            self.reference.run_on(batch, batch_idx)
        if is_first and self._nonfinite.is_on:
            self._nonfinite.begin_step(step, is_monitored=self._monitor.is_monitoring())
        self._nonfinite.begin_micro_batch(batch, batch_idx)

    def begin_backward(self, loss: Tensor) -> None:
        """The backward pass of the loss begins."""
        self._nonfinite.begin_backward(loss)
        if self._monitored is not None:
            self._monitored.begin_backward(loss)

    def end_backward(self) -> None:
        """The backward pass is over."""
        self._monitor.end_backward()
        self._nonfinite.end_backward()

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are complete; a non-finite value raises an error if ``health.nonfinite`` is ``stop``."""
        if self._trainer.fit_loop._should_accumulate():
            return  # DeepSpeed accumulates itself, and its optimizer is called for each micro-batch
        step = step_of(self._trainer)
        finding = self._nonfinite.before_update(step)
        self.health.note(finding)
        if finding is not None and self._run.options.health.nonfinite == STOP:
            self._emit(None)
            message = f"Step {step}, {finding.site}: {finding.words} Training ends here, as health.nonfinite is 'stop'."
            raise NonfiniteError(message)
        if self._monitored is not None:
            self._monitored.before_step(optimizer)

    def end_batch(self) -> None:
        """A micro-batch is over; the last micro-batch of a step ends the step."""
        self._nonfinite.end_micro_batch()
        self._monitor.after_micro_batch()
        ends_step = not self._trainer.fit_loop._should_accumulate()
        if ends_step:
            self._end_step()
        if self._overhead is not None:
            self._overhead.end_batch(ends_step=ends_step)

    def search_after(self, error: Exception) -> None:
        """An exception ends the run: report a NaN that has caused it, if there is one. An error here never takes its place."""
        try:
            self.health.note(self._nonfinite.after_exception(step_of(self._trainer), error))
            self._emit(None)  # also what was found before the exception, in this step
        except BaseException as own_error:  # also Ctrl-C in the second run: the exception that ends the run is the user's
            messages.debug("The step was not searched for NaN (%s: %s).", type(own_error).__name__, own_error)

    # Loops without training

    def begin_loop(self) -> None:
        """A loop of another stage begins, possibly within an accumulated step, whose hooks observe nothing until it ends."""
        options, running = self._run.options, self._trainer.state.stage
        stage = "" if running is None else running.value
        if options.observes(stage) and not (self._trainer.sanity_checking or options.dry_run):
            self._run.model.wrapper = self._trainer.strategy.model
            self._engine.gate.is_in_step = runs_hook(self._run.module, f"{STAGES[stage]}_step")
            self._engine.begin_stage(STAGES[stage], step_of(self._trainer))
        else:
            self._engine.gate.close(self)

    def end_loop(self) -> None:
        """End the loop at the last event that may log values. Later hooks of the module belong to no stage."""
        record = self._engine.end_stage()
        if record is not None:
            self._engine.gate.close(self)
        self._emit(record)

    def continue_step(self) -> None:
        """The loop is over; training continues."""
        self._last_validation.note_loop()
        self._engine.gate.is_in_step = self._runs_training_step
        self._engine.gate.open(self)

    # The end

    def metrics_of_last_validation(self) -> Record | None:
        """What a validation loop has logged since the last record."""
        return self._last_validation.record(self._name_of_metric) if self._last_validation.has_metrics else None

    def fail(self, event: str, error: Exception) -> None:
        """An error in an event ends the monitoring of this step, and not the run, unless errors are raised or it is meant for the user."""
        is_meant_for_user = isinstance(error, MonitorError | ConfigError) or self._run.options.arguments["on_error"] == "raise"
        if is_meant_for_user and not isinstance(error, RanksLostError):
            raise error
        self._engine.gate.open(self)
        self._close_monitored()
        self._nonfinite.end_search()
        if isinstance(error, RanksLostError):
            self._engine.lose_ranks(error)
            return
        self._engine.discard()
        name = type(error).__name__
        message = f"{event} failed ({name}: {error}); this step is not monitored. Logged once."
        self._run.reporter.log_once(message, logging.WARNING, f"{event} {name}", error)

    def close(self) -> None:
        """Remove every hook; a second call does nothing."""
        self.is_idle = True
        with ExitStack() as stack:
            stack.callback(self._close_monitored)
            stack.callback(self._engine.gate.open, self)
            stack.callback(self._nonfinite.close)
        self._engine.gate.is_in_step = None

    # Inside

    def _begin_step(self, step: int) -> bool:
        """Begin a step; returns whether any event of it matters: a step that is not monitored may be timed or searched."""
        name_of_metric, overhead = self._name_of_metric, self._overhead
        prepare_gradient_noise(self._run)
        if self._monitor.begin_step(step) if overhead is None else self._begin_limited(step, overhead):
            facts, variation, elsewhere = self._facts, self._variation, self._elsewhere
            self._monitored = MonitoredStep(
                self._run, name_of_metric, facts=facts, variation=variation, elsewhere=elsewhere, fail=self.fail
            )
            self._monitored.tracker.attach()
        return self._monitored is not None or overhead is not None or self._nonfinite.is_on

    def _begin_limited(self, step: int, overhead: Overhead) -> bool:
        """Begin a step, unless the limit of overhead leaves it out, which is logged once; returns whether it is monitored."""
        is_allowed, closest = overhead.allows(step), overhead.closest
        option = f"max_overhead={self._run.options.max_overhead}: "
        if not is_allowed and self._monitor.is_step_monitored(step):
            message = f"{option}at most one step in {closest} is monitored, from step {step} on. This is logged once."
            self._run.reporter.log_once(message, once="left out")
        if not is_allowed and self._run.recipe.is_captured(step) and is_first_process():
            reason = f"capture has step {step}, less than {closest} steps after another that was monitored"
            message = f"{option}{reason}; the raw tensors of such steps are not written. This is logged once."
            self._run.reporter.log_once(message, logging.WARNING, "left out capture")
        try:
            return is_allowed and self._monitor.begin_step(step)
        finally:
            # A step that fails to begin on this rank is monitored on other ranks, and all ranks count from the same step.
            overhead.begin_step(step, is_monitored=is_allowed and self._monitor.is_monitoring())

    def _close_monitored(self) -> None:
        if self._monitored is not None:
            self._monitored.close()
        self._monitored = None

    def _end_step(self) -> None:
        """End the step. Under manual optimization the next batch may have the same number, and begins the step anew."""
        self._step, self.is_idle = None, True
        monitored = self._monitored
        try:
            if monitored is not None:
                monitored.end()
                self._monitored = None
            fraction = None if self._overhead is None else self._overhead.fraction()
            if fraction is not None:
                self._engine.monitor_figure(OVERHEAD_FRACTION, fraction)
        except Exception as error:
            self.fail("on_train_batch_end", error)
        # Reached after any error: other ranks wait for this rank.
        record = self._engine.end_step()
        if record is not None:
            self._last_validation.note_record(record.columns)
        if record is not None and self._overhead is not None:
            self._overhead.decide(record.get(self._run.recipe.figure_key(OVERHEAD_FRACTION)))
        self.health.note(self._nonfinite.end_step(step_of(self._trainer), record))
        self._emit(record, None if record is None or monitored is None else monitored.facts())

    def _emit(self, record: Record | None, facts: Facts | None = None) -> None:
        """Give a record, and the findings since the last record, to every sink, and act on the findings."""
        run, step = self._run, step_of(self._trainer)
        findings = self.health.examined(step, record, facts)
        if record is not None:
            if run.results.awaited:
                check_awaited(run.results.awaited, record)
            if not self._has_record and run.is_fit and self._trainer.is_global_zero:
                self._check_first(record)
            # Raw tensors are for the file, and may be large.
            run.results.last_record = record.without_tensors()
        elif not findings:
            return
        self._sinks.emit(Record(step) if record is None else record, findings, facts)
        self.health.follow(findings)

    def _check_first(self, record: Record) -> None:
        """Check the detectors that the user named with the first record of training."""
        run = self._run
        if not math.isnan(record.get(run.recipe.figure_key("errors"))):
            self._has_record = True
            check_detectors(run.planner, run.options.health.named, record, run.reporter)
