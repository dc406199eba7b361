"""Search of a step before its update: by a flag, and by a second run or a probe."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from torch import Tensor, nn

from lightning_module_monitor.distributed.ranks import Ranks, least_of_all
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.kinds import STEP_SKIPPED
from lightning_module_monitor.lightning_packages import Trainer, messages
from lightning_module_monitor.model.names import ROOT
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.nonfinite.exceptions import speaks_of_nonfinite, was_raised_in
from lightning_module_monitor.nonfinite.flag import ReadFlag
from lightning_module_monitor.nonfinite.magnitudes import UNKNOWN
from lightning_module_monitor.nonfinite.probe import NonfiniteProbe
from lightning_module_monitor.nonfinite.producer import Producer, producer
from lightning_module_monitor.nonfinite.record_search import OrderOfStep, is_of_one
from lightning_module_monitor.nonfinite.search import ALWAYS_NAMES, NonfiniteSearch, about_float16
from lightning_module_monitor.nonfinite.second_run import SecondRun
from lightning_module_monitor.record import Finding, Record

_Search: TypeAlias = Callable[[], Producer | None]
"""Finds the source of the first non-finite value of a step."""


@dataclass
class _SearchedStep:
    is_light: bool
    """Whether the flag covers only the loss and the gradients of some biases and normalization weights."""
    has_probe: bool
    """Whether the probe observes the step itself."""
    second_run: SecondRun | None
    """Runs the first non-finite micro-batch again, with the probe; ``None`` if no second run is possible or needed."""
    has_record: bool
    """Whether a record of the step follows."""
    was_finite_again: bool = False
    """Whether all was finite in the second run."""
    batch_indices: list[int] = field(default_factory=list)


class StepSearch(NonfiniteSearch):
    """Searches a step before its update: ``always`` and ``stop``, and ``warn`` where reading a value does not make the host wait.

    A flag of losses and gradients is read before the optimizer's step; if it is raised, the micro-batch is run again. Manual
    optimization, and strategies that only run a model as a whole, allow no second run: there the probe observes the step itself.

    Args:
        monitor: The monitor of the run.
        trainer: The Trainer.
        is_at_every_step: Whether every step is searched as a whole. Otherwise steps that are not monitored are searched lightly.
        can_run_again: Whether all ranks together can run a part of a step again on a copy of the model.
        is_scaled: Whether the loss is scaled: its gradients may overflow, which the scaler handles.
        stops: Whether a finding ends the training, before the update.
        raises_errors: Whether an error in a hook is raised.
    """

    is_on = True

    def __init__(
        self,
        monitor: ModuleMonitor,
        trainer: Trainer,
        *,
        is_at_every_step: bool,
        can_run_again: bool,
        is_scaled: bool,
        stops: bool,
        raises_errors: bool,
    ) -> None:
        self._monitor, self._trainer, self._stops = monitor, trainer, stops
        self._is_at_every_step, self._raises_errors = is_at_every_step, raises_errors
        self._can_run_again, self._is_scaled = can_run_again, is_scaled
        index = monitor.engine.model.planner.index
        self._probe = NonfiniteProbe(index.modules, self._report_hook_error, monitor.engine.gate.is_in_step)
        # The flag and the second run also cover compiled code: by gradients, and by a copy that runs uncompiled.
        self._all_sites = index.whole.modules
        self._flag = ReadFlag(self._all_sites)
        self._step: _SearchedStep | None = None
        """The search in the open step; ``None`` after an error."""
        self._was_finite: bool | None = None
        """Whether no optimizer's part of the step had a non-finite value, on any rank; ``None`` before the first part."""
        self._unnamed: Finding | None = None
        """A finding without a module, of a step whose second run was finite, and whose record may show one."""
        self._order = OrderOfStep()

    @property
    def _ranks(self) -> Ranks | None:
        return self._monitor.engine.model.ranks

    @cached_property
    def _weights(self) -> list[nn.Parameter]:
        """The model's weights when the first step begins that can be repeated exactly, without lazy parameters and inference tensors."""
        weights = self._trainer.lightning_module.parameters()
        return [weight for weight in weights if not (nn.parameter.is_lazy(weight) or weight.is_inference())]

    def close(self) -> None:
        """Remove every hook; a second call does nothing."""
        self.end_search()
        self._probe.close()

    def begin_step(self, step: int, *, is_monitored: bool) -> None:
        """A step begins."""
        self.end_search()
        self._was_finite = None
        is_light, module = not (is_monitored or self._is_at_every_step), self._trainer.lightning_module
        runs_again = self._can_run_again and module.automatic_optimization
        has_probe = not is_light and not runs_again
        second_run = None
        if module.automatic_optimization and not has_probe:
            second_run = SecondRun(module, self._all_sites, None if is_light else self._weights, is_scaled=self._is_scaled)
        self._step = _SearchedStep(is_light, has_probe, second_run, has_record=is_monitored)
        if has_probe:
            self._probe.attach()

    def begin_micro_batch(self, batch: object, batch_idx: int) -> None:
        """A micro-batch is about to be run."""
        step = self._step
        if step is None:
            return
        self._flag.micro_batch = len(step.batch_indices)
        step.batch_indices.append(batch_idx)
        if step.has_probe:
            self._probe.begin_micro_batch()
        elif step.second_run is not None:
            step.second_run.keep(batch, batch_idx)

    def begin_backward(self, loss: Tensor) -> None:
        """The loss of a backward pass exists."""
        if self._step is not None:
            self._flag.observe_loss(loss)
        self._probe.begin_backward(loss)
        if self._is_scaled:
            self._probe.end_backward()

    def end_backward(self) -> None:
        """The gradients exist."""
        if self._step is not None and not self._is_scaled:
            self._flag.observe_gradients(lightly=self._step.is_light)
        self._probe.end_backward()

    def before_update(self, step: int) -> Finding | None:
        """Search the step before the parameters move; returns the finding of the first of a series."""
        searched = self._step
        # If every step is searched, other ranks expect the collective also after an error on this rank.
        if searched is None and not self._is_at_every_step:
            return None
        first_here = self._flag.first_nonfinite()
        self._flag.forget()
        least = least_of_all(math.inf if first_here is None else first_here, self._ranks)
        first = int(least) if math.isfinite(least) else None
        self._was_finite = first is None and self._was_finite is not False
        if first is None or self.is_reported:
            return None
        with self._monitor.no_monitor():
            finding = self._find(step, first, is_here=first_here == first)
        if searched is not None and searched.was_finite_again and searched.has_record and not self._stops:
            self._unnamed = finding
            return None
        return finding

    def end_micro_batch(self) -> None:
        """The micro-batch is over."""
        self._probe.end_micro_batch()

    def end_step(self, step: int, record: Record | None) -> Finding | None:
        """The step ends, and was searched."""
        self.is_reported &= not self._was_finite
        self.end_search()
        finding, self._unnamed = self._unnamed, None
        if finding is None or record is None:
            return finding
        key = self._order.first_nonfinite(record, was_skipped=record.get(self._monitor.engine.recipe.figure_key(STEP_SKIPPED), 0.0) > 0)
        if key is None or not is_of_one(key):
            return finding
        words = f"In the order of a step, {key.format()} is the first recorded value that shows it."
        return replace(finding, site=key.site, words=f"{finding.words} {words}")

    def after_exception(self, step: int, error: Exception) -> Finding | None:
        """Search the step that an exception has ended, on this rank alone."""
        searched = self._step
        if self._unnamed is not None:  # no record follows
            return self._unnamed
        if self.is_reported or self._trainer.world_size > 1 or searched is None:
            return None
        # After a finite part of the step, the weights have moved: it cannot be run again.
        if not searched.has_probe and (self._was_finite is not None or not self._may_have_caused(error)):
            return None
        flagged = self._flag.first_nonfinite()
        with self._monitor.no_monitor():
            search = self._search(searched, len(searched.batch_indices) - 1 if flagged is None else flagged, error)
            source = None if search is None else search()
        if source is None or not source.value:
            return None
        words = f"{source.words} {type(error).__name__} has ended the step; whether this value has led to it is not known."
        return self._finding(step, 0, replace(source, words=words))

    def _may_have_caused(self, error: Exception) -> bool:
        """Whether a non-finite value may have caused an exception: another is no reason to run ``training_step`` once more."""
        strategy = self._trainer.strategy
        is_of_step = was_raised_in(error, strategy, "training_step") or was_raised_in(error, strategy.precision_plugin, "backward")
        return is_of_step and speaks_of_nonfinite(error)

    def end_search(self) -> None:
        """Search no further in this step."""
        self._step = None
        self._probe.forget()
        self._flag.forget()
        if not self._is_at_every_step:
            self._probe.close()

    def _find(self, step: int, micro_batch: int, *, is_here: bool) -> Finding:
        """Find, with all ranks, the module of the first non-finite value: in a micro-batch, the first of this rank too if ``is_here``."""
        search, obstacle = self._prepared(micro_batch)
        obstacles = [obstacle] if self._ranks is None else self._ranks.gather(obstacle)
        # Every rank runs it, or none: the step of one may wait for the others.
        if self._can_run_again and any(obstacles):
            search, obstacle = None, next(filter(None, obstacles))
        source = None
        if search is not None:
            try:
                source = search()
                source = source if source is None or source.value or is_here else None
            except Exception as error:
                obstacle = _not_run_again(error)
        rank, first = _earliest(source, self._ranks)
        if first is None:
            is_light = self._step is not None and self._step.is_light
            if self._step is not None:
                self._step.was_finite_again = not obstacle
            why = f" with torch's random states alone as they were. {ALWAYS_NAMES}" if is_light else ""
            reason = obstacle or f"all was finite when the step was run again{why}"
            words = f"The loss or a gradient is not finite, and the module that made it is not known: {reason.removesuffix('.')}."
            first = Producer(ROOT, True, UNKNOWN, 0, words)
        return self._finding(step, rank, first)

    def _prepared(self, micro_batch: int) -> tuple[_Search | None, str]:
        """The search for the source in this step; or ``None``, and the reason."""
        if self._step is None:
            return None, "an error has ended the search in this step"
        try:
            search = self._search(self._step, micro_batch)
        except Exception as error:
            return None, _not_run_again(error)
        return search, "" if search else f"under manual optimization no step can be run again. {ALWAYS_NAMES}"

    def _search(self, searched: _SearchedStep, micro_batch: int, error: Exception | None = None) -> _Search | None:
        """The search for the source: by the probe, which has observed the step that an ``error`` may have ended, or by a second run."""
        if searched.has_probe:
            return lambda: producer(self._probe.observed(was_cut_short=error is not None))
        return None if searched.second_run is None else searched.second_run.prepare(micro_batch, error)

    def _finding(self, step: int, rank: int, source: Producer) -> Finding:
        self.is_reported = True
        words = about_float16(self._trainer)
        if words:
            source = replace(source, words=f"{source.words} {words}", cause=source.cause if source.cause == "data" else "overflow")
        where = f"micro-batch {source.micro_batch}" + (f" on rank {rank}" if self._monitor.distributed is not False else "")
        direction = f"the {'forward' if source.is_forward else 'backward'} pass of "
        direction = "" if direction in source.location else f"in {direction}"
        indices = [] if self._step is None else self._step.batch_indices
        batch_idx = indices[source.micro_batch] if 0 <= source.micro_batch < len(indices) else ""
        when = f"epoch {self._trainer.current_epoch}, batch_idx {batch_idx}"
        kind = "NaN" if source.value == "NaN" else "Infinity"
        words = ""  # nothing is known
        if source.value:
            words = f"{kind} in {source.location}, {direction}{where} ({when}). "
        elif source.micro_batch != UNKNOWN:
            words = f"The first non-finite value occurred in {where}, and the module that made it is not known: "
        return Finding(step, "nonfinite", source.site, "", f"{words}{source.words}", "error", cause=source.cause)

    def _report_hook_error(self, error: Exception) -> None:
        message = f"The search for non-finite values failed ({type(error).__name__}: {error})"
        if self._raises_errors:
            raise MonitorError(f"{message}.") from error
        messages.warning("%s; this step is not searched.", message)


def _not_run_again(error: Exception) -> str:
    return f"the step could not be run again ({type(error).__name__}: {error})"


def _earliest(source: Producer | None, ranks: Ranks | None) -> tuple[int, Producer | None]:
    """The rank whose producer came first, and that producer: the same on every rank."""
    sources: list[Producer | None] = [source] if ranks is None else ranks.gather(source)
    order = [(item.micro_batch, not item.is_forward, item.position, rank) for rank, item in enumerate(sources) if item is not None]
    rank = min(order)[-1] if order else 0
    return rank, sources[rank]
