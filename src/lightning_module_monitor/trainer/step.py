"""The steps of a run: which step a batch belongs to, whether it is monitored, and its phases; and the loops that interrupt it."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.distributed.ranks import is_first_process
from lightning_module_monitor.errors import ConfigError, MonitorError, NonfiniteError, RanksLostError
from lightning_module_monitor.health.options import STOP
from lightning_module_monitor.record import OVERHEAD_FRACTION, Record
from lightning_module_monitor.trainer.context import ContextNames, MonitoredStep
from lightning_module_monitor.trainer.health import HealthController
from lightning_module_monitor.trainer.options import STAGES
from lightning_module_monitor.trainer.overhead import Overhead, clock_of
from lightning_module_monitor.trainer.reference import ReferenceController
from lightning_module_monitor.trainer.run import Run, step_of
from lightning_module_monitor.trainer.sinks import SinksController


class StepController:
    """Begins and ends the steps of a run, notifies the monitor of what happens in between, and gives every record to all receivers."""

    def __init__(self, run: Run, health: HealthController, sinks: SinksController, reference: ReferenceController | None) -> None:
        self._run = run
        self._monitor = run.monitor
        self._engine = run.engine
        self._trainer = run.trainer
        self._observes_training = run.observes_training
        self.health = health
        self._nonfinite = health.nonfinite
        self._sinks = sinks
        self._reference = reference
        limit = run.options.max_overhead
        self._overhead = None if limit is None else Overhead(limit, clock_of(run.module.device))
        self._names: ContextNames | None = None
        """From the first batch on, when there are optimizers."""
        self.is_idle = True
        """Whether nothing is left to do in this step."""
        self._step: int | None = None
        """The step of the latest training batch; ``None`` when it is over."""
        self._monitored: MonitoredStep | None = None
        """The step, if it is monitored."""

    # A training step

    def begin_batch(self, batch: object, batch_idx: int) -> None:
        """A micro-batch begins; the first one of a step begins the step."""
        step = step_of(self._trainer)
        # The number grows after the last micro-batch of a step.
        is_first = step != self._step
        if is_first:
            self._step = step
            # An error below must not prevent the end of the step: other ranks wait for it.
            self.is_idle = not self._observes_training or self._engine.has_lost_ranks
        if self._sinks.first_step is None:
            self._sinks.first_step = step
        nonfinite = self._nonfinite
        if self.is_idle:
            if self._engine.has_lost_ranks and nonfinite is not None:
                nonfinite.close()
            return
        if self._overhead is not None:
            self._overhead.begin_batch()
        if is_first:
            self.is_idle = not self._begin_step(step)
            if self.is_idle:
                return
        # Until on_before_backward, a backward pass is an inner one of the user's.
        self._monitor.end_backward()
        if self._monitored is not None:
            self._monitored.begin_batch(batch)
        if self._reference is not None and self._engine.awaits_reference():
            self._reference.run(batch, batch_idx)
        is_monitored = self._monitor.is_monitoring()
        if nonfinite is not None:
            nonfinite.begin_micro_batch(batch, batch_idx, is_first=is_first, is_monitored=is_monitored)
            if is_first and is_monitored:
                nonfinite.report_marked_steps(step)

    def begin_backward(self, loss: Tensor) -> None:
        """The backward pass of the loss begins."""
        if self._nonfinite is not None:
            self._nonfinite.begin_backward(loss)
        if self._monitored is not None:
            self._monitored.begin_backward(loss)

    def end_backward(self) -> None:
        """The backward pass is over."""
        self._monitor.end_backward()
        if self._nonfinite is not None:
            self._nonfinite.end_backward()

    def before_clipping(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are complete and not clipped.

        Raises:
            NonfiniteError: If there is a non-finite value, and ``health.nonfinite`` is ``stop``.
        """
        if self._trainer.fit_loop._should_accumulate():
            return  # DeepSpeed accumulates itself, and its optimizer is called for each micro-batch
        if self._nonfinite is not None:
            step = step_of(self._trainer)
            found = self._nonfinite.before_update(step)
            self.health.note(found)
            if found is not None and self.health.options.nonfinite == STOP:
                self._emit(None)
                raise NonfiniteError(f"Step {step}, {found.site}: {found.words} Training ends here, as health.nonfinite is 'stop'.")
        if self._monitored is not None:
            self._monitored.before_clipping(optimizer)

    def end_batch(self) -> None:
        """A micro-batch is over; the last one of a step ends the step."""
        if self._nonfinite is not None:
            self._nonfinite.end_micro_batch()
        self._monitor.after_micro_batch()
        ends_step = not self._trainer.fit_loop._should_accumulate()
        if ends_step:
            self._end_step()
        if self._overhead is not None:
            self._overhead.end_batch()
            if ends_step:
                self._overhead.end_step()

    # Loops without training

    def begin_loop(self) -> None:
        """A loop of another stage begins, also in the middle of an accumulated step, whose hooks observe nothing meanwhile."""
        options, running = self._run.options, self._trainer.state.stage
        stage = "" if running is None else running.value
        if options.observes(stage) and not (self._trainer.sanity_checking or options.dry_run):
            self._run.model.wrapper = self._trainer.strategy.model
            self._engine.begin_stage(STAGES[stage], step_of(self._trainer))
        else:
            self._engine.gate.close(self)

    def end_loop(self) -> None:
        """End the loop at the last moment at which values may be logged. What the module's own hooks do after it has no stage."""
        record = self._engine.end_stage()
        if record is not None:
            self._engine.gate.close(self)
        self._emit(record)

    def continue_step(self) -> None:
        """The loop is over; training goes on."""
        self._engine.gate.open(self)

    # The end

    def fail(self, event: str, error: Exception) -> None:
        """An error of the monitor, raised in an event, ends the monitoring of this step, and not the run.

        Raises:
            Exception: The error, if errors are to be raised or it is meant for the user.
        """
        is_meant_for_user = isinstance(error, MonitorError | ConfigError) or self._run.options.given["on_error"] == "raise"
        if is_meant_for_user and not isinstance(error, RanksLostError):
            raise error
        self._engine.gate.open(self)
        self._close_monitored()
        if self._nonfinite is not None:
            self._nonfinite.forget_step()
        if isinstance(error, RanksLostError):
            self._engine.lose_ranks(error)
            return
        self._engine.lose()
        name = type(error).__name__
        message = f"{event} failed ({name}: {error}); this step is not monitored. Logged once."
        self._run.reporter.log_once(message, logging.WARNING, f"{event} {name}", error)

    def close(self) -> None:
        """Remove every hook; a second call does no harm."""
        self.is_idle = True
        with ExitStack() as stack:
            stack.callback(self._close_monitored)
            stack.callback(self._engine.gate.open, self)
            if self._nonfinite is not None:
                stack.callback(self._nonfinite.close)

    # Inside

    def _begin_step(self, step: int) -> bool:
        """Begin a step, and return whether anything is to be done in it: also where it is not monitored, it may be timed or searched."""
        if self._names is None:
            self._names = ContextNames(self._run.model, self._trainer.optimizers)
        overhead = self._overhead
        if self._monitor.begin_step(step) if overhead is None else self._begin_limited(step, overhead):
            self._monitored = MonitoredStep(self._run, self._names, self.fail)
            self._monitored.attach()
        return self._monitored is not None or overhead is not None or self._nonfinite is not None

    def _begin_limited(self, step: int, overhead: Overhead) -> bool:
        """Begin a step, unless the limit of overhead leaves it out, which is reported once; returns whether it is monitored."""
        is_allowed, closest = overhead.allows(step), overhead.closest
        left_out = f"max_overhead={self._run.options.max_overhead}: "
        if not is_allowed and self._monitor.is_step_monitored(step):
            message = f"{left_out}at most one step in {closest} is monitored, from step {step} on. This is logged once."
            self._run.reporter.log_once(message, once="left out")
        if not is_allowed and self._run.recipe.is_captured(step) and is_first_process():
            apart = f"capture has step {step}, less than {closest} steps after another that was monitored"
            message = f"{left_out}{apart}; the raw tensors of such steps are not written. This is logged once."
            self._run.reporter.log_once(message, logging.WARNING, "left out capture")
        try:
            return is_allowed and self._monitor.begin_step(step)
        finally:
            # A step that fails to begin on this rank is monitored on others, and all count from it to the next.
            overhead.begin_step(step, is_monitored=is_allowed and self._monitor.is_monitoring())

    def _close_monitored(self) -> None:
        if self._monitored is not None:
            self._monitored.close()
        self._monitored = None

    def _end_step(self) -> None:
        """End the step. Under manual optimization the next batch may have the same number: it begins it anew."""
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
        # Reached whatever has failed: other ranks wait for this one.
        record = self._monitor.end_step()
        if record is not None and self._overhead is not None:
            self._overhead.decide(record.values.get(self._run.recipe.figure_key(OVERHEAD_FRACTION), math.nan))
        if self._nonfinite is not None:
            self.health.note(self._nonfinite.end_step(step_of(self._trainer), record))
        if record is not None and monitored is not None:
            record = replace(record, facts=monitored.facts())
        self._emit(record)

    def _emit(self, record: Record | None) -> None:
        """Give a record, and what was found since the last one, to every sink, and act on the findings."""
        record = self.health.examined(step_of(self._trainer), record)
        if record is None:
            return
        if record.values:  # else it has only findings, of a step that was not monitored
            self._run.results.awaited.compare(record)
            # Raw tensors are for the file, and may be large.
            self._run.results.last_record = replace(record, tensors=())
        self._sinks.emit(record)
        self.health.follow(record.findings)
