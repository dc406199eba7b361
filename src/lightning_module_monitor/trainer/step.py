"""The steps of a run: which step a batch belongs to, whether it is monitored, and its phases; and the loops that interrupt it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.distributed.ranks import is_first_process
from lightning_module_monitor.errors import ConfigError, MonitorError, NonfiniteError, RanksLostError
from lightning_module_monitor.health.options import STOP
from lightning_module_monitor.lightning_packages import LightningModule, Trainer, is_a
from lightning_module_monitor.record import OVERHEAD_FRACTION
from lightning_module_monitor.trainer.context import ContextController
from lightning_module_monitor.trainer.facts import StepFacts
from lightning_module_monitor.trainer.nonfinite import NonfiniteController
from lightning_module_monitor.trainer.optimizers import EngineTracker, OptimizerTracker
from lightning_module_monitor.trainer.options import STAGES
from lightning_module_monitor.trainer.overhead import Overhead, clock_of
from lightning_module_monitor.trainer.run import RunController, step_of
from lightning_module_monitor.trainer.strategy import scaler_of


class StepController:
    """Begins and ends steps, and notifies the monitor of what happens in between."""

    def __init__(self, run: RunController) -> None:
        self._run = run
        self._monitor = run.monitor
        self._forget()

    def _forget(self) -> None:
        self.is_idle = True
        """Whether nothing is left to do in this step."""
        self._step: int | None = None
        """The step of the latest training batch; ``None`` when it is over."""
        self._overhead: Overhead | None = None
        self._optimizers: OptimizerTracker | EngineTracker | None = None
        """The optimizers of a monitored step."""
        self._context = ContextController(self._monitor)
        self._facts = StepFacts(self._monitor)
        self._silence = ExitStack()
        """Silences the monitor in a loop that is not monitored."""

    def __getstate__(self) -> dict[str, object]:
        """A copy made in the middle of a run has no step: hooks belong to the original."""
        idle = object.__new__(type(self))
        vars(idle).update(vars(self))
        idle._forget()
        return vars(idle)

    def begin_fit(self, pl_module: LightningModule) -> None:
        """A fit begins; its steps may have a limit of overhead."""
        limit = self._run.options.max_overhead
        self._overhead = None if limit is None else Overhead(limit, clock_of(pl_module.device))
        self._context = ContextController(self._monitor)

    # A training step

    def begin_batch(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """A micro-batch begins; the first one of a step begins the step."""
        step = step_of(trainer)
        # The number grows after the last micro-batch of a step.
        is_first = step != self._step
        if is_first:
            self._step = step
            self._run.sinks.note_step(step)
            # An error below must not prevent the end of the step: other ranks wait for it.
            self.is_idle = not self._run.observes_training or self._monitor.has_lost_ranks
        nonfinite = self._nonfinite
        if self.is_idle:
            if self._monitor.has_lost_ranks and nonfinite is not None:
                nonfinite.close()
            return
        if self._overhead is not None:
            self._overhead.begin_batch()
        if is_first:
            if not self._context.is_announced:
                self._context.announce(trainer.optimizers)
            if self._begin_step(step):
                self._context.begin_step()
                self._facts.begin_step()
                self._track_optimizers(trainer, pl_module)
            elif self._overhead is None and nonfinite is None:
                self.is_idle = True
                return
        # Until on_before_backward, a backward pass is an inner one of the user's.
        self._monitor.end_backward()
        if self._optimizers is not None:
            self._context.observe_batch(trainer, batch)
            self._facts.observe_batch(batch)
        if self._run.reference is not None and self._monitor.awaits_reference():
            self._run.reference.run(trainer, batch, batch_idx)
        is_monitored = self._monitor.is_monitoring()
        if nonfinite is not None:
            nonfinite.begin_micro_batch(batch, batch_idx, is_first=is_first, is_monitored=is_monitored)
            if is_first and is_monitored:
                nonfinite.report_marked_steps(step)

    def begin_backward(self, trainer: Trainer, loss: Tensor) -> None:
        """The backward pass of the loss begins."""
        nonfinite = self._nonfinite
        if nonfinite is not None:
            nonfinite.begin_backward(loss)
        if self._optimizers is not None:
            self._optimizers.begin_backward(loss)
            self._context.observe_loss(trainer, loss, self._optimizers.scale)
            self._facts.observe_backward(loss, _real(trainer.optimizers))

    def end_backward(self) -> None:
        """The backward pass is over."""
        self._monitor.end_backward()
        nonfinite = self._nonfinite
        if nonfinite is not None:
            nonfinite.end_backward()

    def before_clipping(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """The gradients of an optimizer are complete and not clipped.

        Raises:
            NonfiniteError: If there is a non-finite value, and ``health.nonfinite`` is ``stop``.
        """
        if trainer.fit_loop._should_accumulate():
            return  # DeepSpeed accumulates itself, and its optimizer is called for each micro-batch
        nonfinite = self._nonfinite
        if nonfinite is not None:
            step, health = step_of(trainer), self._run.health
            found = nonfinite.before_update(step)
            health.note(found)
            if found is not None and health.options.nonfinite == STOP:
                self._run.emit(trainer, pl_module, None)
                raise NonfiniteError(f"Step {step}, {found.site}: {found.words} Training ends here, as health.nonfinite is 'stop'.")
        if self._optimizers is not None:
            self._optimizers.before_clipping(optimizer)
            self._context.observe_rates(optimizer)

    def end_batch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A micro-batch is over; the last one of a step ends the step."""
        nonfinite = self._nonfinite
        if nonfinite is not None:
            nonfinite.end_micro_batch()
        self._monitor.after_micro_batch()
        ends_step = not trainer.fit_loop._should_accumulate()
        if ends_step:
            self._end_step(trainer, pl_module)
        if self._overhead is not None:
            self._overhead.end_batch()
            if ends_step:
                self._overhead.end_step()

    # Loops without training

    def begin_loop(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A loop of another stage begins, also in the middle of an accumulated step, whose hooks observe nothing meanwhile."""
        options, running = self._run.options, trainer.state.stage
        stage = "" if running is None else running.value
        if options.observes(stage) and not (trainer.sanity_checking or options.dry_run):
            if self._monitor.module is None:
                # Outside of fit this is the first event after `configure_model`.
                self._run.set_module(trainer, pl_module)
            self._monitor.wrapper = trainer.strategy.model
            self._monitor.begin_stage(STAGES[stage], step_of(trainer))
        else:
            self._silence.enter_context(self._monitor.no_monitor())

    def end_loop(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the loop at the last moment at which values may be logged. What the module's own hooks do after it has no stage."""
        record = self._monitor.end_stage()
        if record is not None:
            self._silence.enter_context(self._monitor.no_monitor())
        self._run.emit(trainer, pl_module, record)

    def continue_step(self) -> None:
        """The loop is over; training goes on."""
        self._silence.close()

    # The end

    def fail(self, event: str, error: Exception) -> None:
        """An error of the monitor, raised in an event, ends the monitoring of this step, and not the run.

        Raises:
            Exception: The error, if errors are to be raised or it is meant for the user.
        """
        is_meant_for_user = isinstance(error, MonitorError | ConfigError) or self._run.options.on_error == "raise"
        if is_meant_for_user and not isinstance(error, RanksLostError):
            raise error
        self._silence.close()
        self._close_optimizers()
        if self._nonfinite is not None:
            self._nonfinite.forget_step()
        if isinstance(error, RanksLostError):
            self._monitor.lose_ranks(error)
            return
        self._monitor.lose()
        name = type(error).__name__
        message = f"{event} failed ({name}: {error}); this step is not monitored. Logged once."
        self._run.reporter.log_once(message, logging.WARNING, f"{event} {name}", error)

    def close(self) -> None:
        """Remove every hook; a second call does no harm."""
        with ExitStack() as stack:
            stack.callback(self._close_optimizers)
            stack.callback(self._silence.close)
        self._forget()

    # Inside

    @property
    def _nonfinite(self) -> NonfiniteController | None:
        return self._run.health.nonfinite

    def _begin_step(self, step: int) -> bool:
        """Begin a step, and return whether it is monitored. Report, once each, steps that the limit of overhead leaves out."""
        if self._overhead is None:
            return self._monitor.begin_step(step)
        is_allowed, closest = self._overhead.allows(step), self._overhead.closest
        left_out = f"max_overhead={self._run.options.max_overhead}: "
        if not is_allowed and self._monitor.is_step_monitored(step):
            message = f"{left_out}at most one step in {closest} is monitored, from step {step} on. This is logged once."
            self._run.reporter.log_once(message, once="left out")
        if not is_allowed and self._monitor.planner.is_captured(step) and is_first_process():
            apart = f"capture has step {step}, less than {closest} steps after another that was monitored"
            message = f"{left_out}{apart}; the raw tensors of such steps are not written. This is logged once."
            self._run.reporter.log_once(message, logging.WARNING, "left out capture")
        try:
            return is_allowed and self._monitor.begin_step(step)
        finally:
            # A step that fails to begin on this rank is monitored on others, and all count from it to the next.
            self._overhead.begin_step(step, is_monitored=is_allowed and self._monitor.is_monitoring())

    def _track_optimizers(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_a(trainer.strategy, "DeepSpeedStrategy"):
            self._optimizers = EngineTracker(self._monitor, trainer.strategy.model)
            return
        is_automatic, scaler = pl_module.automatic_optimization, scaler_of(trainer)
        self._optimizers = OptimizerTracker(
            self._monitor, pl_module, _real(trainer.optimizers), is_automatic=is_automatic, scaler=scaler, fail=self.fail
        )
        self._optimizers.attach()

    def _close_optimizers(self) -> None:
        if self._optimizers is not None:
            self._optimizers.close()
        self._optimizers = None

    def _end_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the step. Under manual optimization the next batch may have the same number: it begins it anew."""
        self._step, self.is_idle = None, True
        try:
            if self._optimizers is not None:
                self._facts.end_step(self._optimizers.stepped)
                self._optimizers.finish()
                self._optimizers = None
                self._context.end_step(trainer)
            fraction = None if self._overhead is None else self._overhead.fraction()
            if fraction is not None:
                self._monitor.monitor_figure(OVERHEAD_FRACTION, fraction)
        except Exception as error:
            self.fail("on_train_batch_end", error)
        # Reached whatever has failed: other ranks wait for this one.
        record = self._monitor.end_step()
        if record is not None and self._overhead is not None:
            self._overhead.decide(record.values.get(self._monitor.planner.own_key(OVERHEAD_FRACTION), math.nan))
        if self._nonfinite is not None:
            self._run.health.note(self._nonfinite.end_step(step_of(trainer), record))
        if record is not None:
            record = replace(record, facts=self._facts.facts(pl_module, _real(trainer.optimizers)))
        self._run.emit(trainer, pl_module, record)


def _real(optimizers: Sequence[object]) -> list[Optimizer]:
    """The optimizers of torch: a strategy may have objects of its own."""
    return [one for one in optimizers if isinstance(one, Optimizer)]
