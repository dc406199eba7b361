"""Search for the first non-finite value of a run, and for the module that made it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor, nn

from lightning_module_monitor.config.health_options import IGNORE, WARN
from lightning_module_monitor.distributed.ranks import Ranks, least_of_all
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.health.figures import FINITE_STATISTICS
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import CONTEXT_KIND, LOSS, STEP_SKIPPED, STEPS_SINCE_NONFINITE
from lightning_module_monitor.lightning_packages import messages
from lightning_module_monitor.model.names import ROOT
from lightning_module_monitor.nonfinite.producer import Producer, producer
from lightning_module_monitor.probes.nonfinite import FiniteStep, NonfiniteProbe
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.statistics.magnitudes import UNKNOWN
from lightning_module_monitor.trainer.rerun import StepRerun
from lightning_module_monitor.trainer.run import Run
from lightning_module_monitor.trainer.strategy import can_run_again, scaler_of

ALWAYS_NAMES = "health: {nonfinite: always} names the module."
"""Advice for a non-finite value in a step that is not monitored."""


def marks_steps(run: Run) -> bool:
    """Whether non-finite values of a step are reported with the next record, so that neither the host nor other ranks wait for a flag."""
    is_remote = run.trainer.world_size > 1 or run.trainer.strategy.root_device.type != "cpu"
    return run.options.health.nonfinite == WARN and is_remote


@dataclass
class _StepSearch:
    """The search in one step."""

    is_light: bool
    """Whether the flag covers only the loss and the gradients of some biases and normalization weights."""
    has_probe: bool
    """Whether the probe observes the step itself."""
    rerun: StepRerun | None
    """Runs the first non-finite micro-batch again, with the probe; ``None`` if no second run is possible or needed."""
    batch_indices: list[int] = field(default_factory=list)
    """``batch_idx`` of each micro-batch."""
    was_finite: bool | None = None
    """Whether no optimizer's part of the step had a non-finite value; ``None`` before the first part."""


class NonfiniteSearch:
    """Finds the first non-finite value, from when the model exists to :meth:`close`.

    A flag of losses and gradients is read before the optimizer's step; if it is raised, the micro-batch is run again. Manual
    optimization, and strategies that only run a model as a whole, allow no second run: there the probe observes the step itself.
    With ``warn``, steps that are not monitored are searched lightly. On an accelerator and on several ranks, ``warn`` reads no flag,
    because that would wait: in monitored steps the probe observes, and the record shows whether all values are finite; in other steps
    the flag stays on the device, and the next record has the first such step.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._options = run.options.health
        self.is_on = self._options.nonfinite != IGNORE
        """Whether steps are searched: otherwise none begins here."""
        self._engine = run.engine
        self._trainer = run.trainer
        self._probe = NonfiniteProbe(run.planner.index.modules, self._report_hook_error)
        # The flag and the second run also cover compiled code: by gradients, and by a copy that runs uncompiled.
        self._all_sites = run.planner.index.whole.modules
        self._flag = FiniteStep(self._all_sites)
        self._marks_steps = marks_steps(run)
        self._runs_again = can_run_again(run.trainer)
        self._is_scaled = scaler_of(run.trainer) is not None
        """Whether the loss is scaled: its gradients may overflow, which the scaler handles."""
        self._search: _StepSearch | None = None
        """The search in the open step; ``None`` after an error."""
        self.is_reported = False
        """Whether a non-finite value was reported, and no finite step followed."""

    @cached_property
    def _weights(self) -> list[nn.Parameter]:
        """The model's weights when the first step begins that can be repeated exactly, without lazy parameters and inference tensors."""
        return [weight for weight in self._run.module.parameters() if not (nn.parameter.is_lazy(weight) or weight.is_inference())]

    def close(self) -> None:
        """Remove every hook; a second call does nothing."""
        self.end_search()
        self._probe.close()

    @property
    def _raises_flag(self) -> bool:
        """Whether losses and gradients raise the flag: not where the record shows them."""
        return self._search is not None and (self._search.is_light or not self._marks_steps)

    def begin_step(self, step: int, *, is_monitored: bool) -> None:
        """A step begins. The record of a monitored step gets the flag of the steps before, and shares its transfer and reduction."""
        self.end_search()
        is_light = not (is_monitored or self._options.is_at_every_step)
        is_automatic = self._trainer.lightning_module.automatic_optimization
        has_probe = not is_light and (self._marks_steps or not (self._runs_again and is_automatic))
        has_rerun = is_automatic and not (has_probe or self._marks_steps)
        rerun = StepRerun(self._run.module, self._all_sites, None if is_light else self._weights) if has_rerun else None
        self._search = _StepSearch(is_light, has_probe, rerun)
        if has_probe:
            self._probe.attach()
        steps_since = self._flag.steps_since(step) if is_monitored else None
        if steps_since is not None:
            self._engine.monitor_figure(STEPS_SINCE_NONFINITE, steps_since)

    def begin_micro_batch(self, batch: object, batch_idx: int) -> None:
        """A micro-batch is about to be run."""
        search = self._search
        if search is None:
            return
        self._flag.micro_batch = len(search.batch_indices)
        search.batch_indices.append(batch_idx)
        if search.has_probe:
            self._probe.begin_micro_batch()
        elif search.rerun is not None:
            search.rerun.keep(batch, batch_idx)

    def begin_backward(self, loss: Tensor) -> None:
        """The loss of a backward pass exists."""
        if self._raises_flag:
            self._flag.observe_loss(loss)
        self._probe.begin_backward(loss)
        if self._is_scaled:
            self._probe.end_backward()

    def end_backward(self) -> None:
        """The gradients exist."""
        if self._search is not None and self._raises_flag and not self._is_scaled:
            self._flag.observe_gradients(lightly=self._search.is_light)
        self._probe.end_backward()

    def before_update(self, step: int) -> Finding | None:
        """Search the step before the parameters move; returns the finding of the first of a series, if the flag is read now."""
        search = self._search
        if self._marks_steps:
            if search is not None and search.is_light:
                self._flag.mark(step)
            elif search is not None:
                self._probe.observe_weights()
            return None
        # If every step is searched, other ranks expect the collective also after an error on this rank.
        if search is None and not self._options.is_at_every_step:
            return None
        first_here = self._flag.first_nonfinite()
        self._flag.forget()
        least = least_of_all(math.inf if first_here is None else first_here, self._engine.model.ranks)
        first = int(least) if math.isfinite(least) else None
        if search is not None:
            search.was_finite = first is None and search.was_finite is not False
        if first is None or self.is_reported:
            return None
        with self._run.monitor.no_monitor():
            return self._find(step, first, is_here=first_here == first)

    def end_micro_batch(self) -> None:
        """The micro-batch is over."""
        self._probe.end_micro_batch()

    def end_step(self, step: int, record: Record | None) -> Finding | None:
        """End a step, which has a record if it was monitored; returns the finding, if only the record shows the non-finite value."""
        search, finding, figure_key = self._search, None, self._run.recipe.figure_key
        num_steps = 0.0 if record is None else record.get(figure_key(STEPS_SINCE_NONFINITE), 0.0)
        if num_steps > 0 and not self.is_reported:
            finding = self._unmonitored(step - int(num_steps))
        if search is not None and search.has_probe and self._marks_steps and record is not None:
            was_skipped = record.get(figure_key(STEP_SKIPPED), 0.0) > 0
            search.was_finite = not _has_nonfinite(record, was_skipped=was_skipped)
            if not search.was_finite:
                rank, first = _earliest(producer(self._probe.observed()), self._engine.model.ranks)
                finding = finding if first is None or self.is_reported else self._finding(step, rank, first)
        self.is_reported &= search is None or not search.was_finite
        self.end_search()
        return finding

    def after_exception(self, step: int, error: Exception) -> Finding | None:
        """The run is ended by an exception, possibly one that a NaN has caused: search what was not searched yet, on this rank alone."""
        if self.is_reported or self._trainer.world_size > 1:
            return None
        steps_since, search = self._flag.steps_since(step), self._search
        if steps_since is not None and steps_since > 0:
            return self._unmonitored(step - int(steps_since))
        # After a finite part of the step, the weights have moved: it cannot be run again.
        if search is None or not (search.has_probe or search.was_finite is None):
            return None
        flagged = self._flag.first_nonfinite()
        with self._run.monitor.no_monitor():
            source = self._source(search, len(search.batch_indices) - 1 if flagged is None else flagged, error)
        if source is None or not source.value:
            return None
        words = f"{source.words} {type(error).__name__} has ended the step; whether this value has led to it is not known."
        return self._finding(step, 0, replace(source, words=words))

    def end_search(self) -> None:
        """Search no further in this step."""
        self._search = None
        self._probe.forget()
        self._flag.forget()
        if not self._options.is_at_every_step:
            self._probe.close()

    def _find(self, step: int, micro_batch: int, *, is_here: bool) -> Finding:
        """Find, with all ranks, the module of the first non-finite value: in a micro-batch, the first of this rank too if ``is_here``."""
        search, source = self._search, None
        reason = "all was finite when the step was run again"
        try:
            if search is None:
                reason = "an error has ended the search in this step"
            elif search.rerun is None and not search.has_probe:
                reason = f"under manual optimization no step can be run again. {ALWAYS_NAMES}"
            else:
                if search.is_light:
                    reason += f" with torch's random states alone as they were. {ALWAYS_NAMES}"
                # Every rank runs it: in tensor parallel training a rank cannot run it alone.
                source = self._source(search, micro_batch)
                source = source if source is None or source.value or is_here else None
        except Exception as error:
            reason = f"the step could not be run again ({type(error).__name__}: {error})"
        rank, first = _earliest(source, self._engine.model.ranks)
        if first is None:
            words = f"The loss or a gradient is not finite, and the module that made it is not known: {reason.removesuffix('.')}."
            first = Producer(ROOT, True, UNKNOWN, 0, words)
        return self._finding(step, rank, first)

    def _source(self, search: _StepSearch, micro_batch: int, error: Exception | None = None) -> Producer | None:
        """The source that the probe has observed in the step, which an ``error`` may have ended, or that it observes in a second run."""
        if search.has_probe:
            return producer(self._probe.observed(was_cut_short=error is not None))
        return None if search.rerun is None else search.rerun.find(micro_batch, error)

    def _unmonitored(self, step: int) -> Finding:
        """The finding of a step without a record, whose flag is known and no more."""
        self.is_reported = True
        words = f"The loss or a gradient was not finite for the first time, in a step that was not monitored. {ALWAYS_NAMES}"
        return Finding(step, "nonfinite", ROOT, "", words, "error")

    def _finding(self, step: int, rank: int, source: Producer) -> Finding:
        self.is_reported = True
        if str(self._trainer.precision).startswith("16"):
            words = f"The run computes in float16 (precision: {self._trainer.precision}), in which values above 65504 are infinite."
            source = replace(source, words=f"{source.words} {words}", cause=source.cause if source.cause == "data" else "overflow")
        where = f"micro-batch {source.micro_batch}" + (f" on rank {rank}" if self._run.monitor.distributed is not False else "")
        direction = f"the {'forward' if source.is_forward else 'backward'} pass of "
        direction = "" if direction in source.location else f"in {direction}"
        indices = [] if self._search is None else self._search.batch_indices
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
        if self._run.options.arguments["on_error"] == "raise":
            raise MonitorError(f"{message}.") from error
        messages.warning("%s; this step is not searched.", message)


def _earliest(source: Producer | None, ranks: Ranks | None) -> tuple[int, Producer | None]:
    """The rank whose producer came first, and that producer: the same on every rank."""
    sources: list[Producer | None] = [source] if ranks is None else ranks.gather(source)
    order = [(item.micro_batch, not item.is_forward, item.position, rank) for rank, item in enumerate(sources) if item is not None]
    rank = min(order)[-1] if order else 0
    return rank, sources[rank]


def _has_nonfinite(record: Record, *, was_skipped: bool) -> bool:
    """Whether the loss or a statistic of a tensor shows a non-finite element.

    In a step that the scaler skipped (``was_skipped``), losses and gradients may have overflowed, and do not count.
    """
    may_overflow = ("activation_gradient", "gradient", "gradient_before_clip", CONTEXT_KIND)
    kinds = ("activation", "parameter", *(() if was_skipped else may_overflow))
    counts, values = f"/{FINITE_STATISTICS[0]}", record.values.items()
    keys = [Key.parse(name) for name, value in values if not math.isfinite(value) or (value and name.endswith(counts))]
    return any(key.kind in kinds and key.statistic in ((LOSS,) if key.kind == CONTEXT_KIND else FINITE_STATISTICS) for key in keys)
