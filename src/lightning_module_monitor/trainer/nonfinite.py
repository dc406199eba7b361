"""Non-finite values of a run: whether there are any, which module made the first one, and the finding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.health.figures import FINITE_STATISTICS
from lightning_module_monitor.health.options import WARN
from lightning_module_monitor.health.producer import Producer, producer
from lightning_module_monitor.lightning_packages import messages
from lightning_module_monitor.model.names import ROOT
from lightning_module_monitor.probes.nonfinite import FiniteStep, NonfiniteProbe
from lightning_module_monitor.record import CONTEXT_KIND, LOSS, STEP_SKIPPED, STEPS_SINCE_NONFINITE, Finding, Key, Record
from lightning_module_monitor.statistics.magnitudes import UNKNOWN
from lightning_module_monitor.trainer.rerun import StepRerun
from lightning_module_monitor.trainer.run import Run
from lightning_module_monitor.trainer.strategy import can_run_again, scaler_of

ALWAYS_NAMES = "health: {nonfinite: always} names the module."
"""The advice where a step that is not monitored was not finite."""


def marks_steps(run: Run) -> bool:
    """Whether records show non-finite values, of their own step and of those before: to read a flag, the host or other ranks would wait."""
    is_remote = run.trainer.world_size > 1 or run.trainer.strategy.root_device.type != "cpu"
    return run.options.health.nonfinite == WARN and is_remote


@dataclass
class _Search:
    """The search of one step."""

    is_light: bool
    """Whether the flag is of the loss and of the gradients of some biases and gains alone."""
    has_probe: bool
    """Whether the probe observes the step itself; else the micro-batch that is not finite is run again, and observed then."""
    batch_indices: list[int] = field(default_factory=list)
    """Of the micro-batches."""
    was_finite: bool | None = None
    """Whether all of the step was, before every optimizer's part of it; ``None`` before the first one."""


class NonfiniteController:
    """Finds the first non-finite value, from when the model exists to :meth:`close`.

    A flag of losses and gradients is read before the optimizer's step; if it is raised, the micro-batch is run again. No second run is
    possible under manual optimization, and under strategies that run a model only as a whole: there the probe observes the step itself.
    With ``warn`` steps that are not monitored are searched lightly. On an accelerator and on several ranks ``warn`` reads no flag, for
    which they would wait: in monitored steps the probe observes, and the record shows whether all is finite; in the others the flag
    stays on the device, and the next record has the first step of it.
    """

    def __init__(self, run: Run) -> None:
        self._options = run.options.health
        self._monitor = run.monitor
        self._engine = run.engine
        self._recipe = run.recipe
        self._trainer = run.trainer
        self._on_error = run.options.given["on_error"]
        index = run.index
        self._probe = NonfiniteProbe(index.modules, self._hook_failed)
        # These look inside compiled code too: at gradients, and at a copy that runs uncompiled.
        self._flag = FiniteStep(index.whole.modules)
        self._rerun = StepRerun(run.module, index.whole.modules)
        self._marks_steps = marks_steps(run)
        self._runs_again = can_run_again(run.trainer)
        self._is_scaled = scaler_of(run.trainer) is not None
        """Whether gradients are those of a scaled loss: they may overflow, which the scaler handles."""
        self._search: _Search | None = None
        """That of the open step; ``None`` after an error."""
        self.is_reported = False
        """Whether a non-finite value was reported, and there still is one."""

    def close(self) -> None:
        """Take every hook off; a second call does no harm."""
        self.forget_step()
        self._probe.close()

    def begin_micro_batch(self, batch: object, batch_idx: int, *, is_first: bool, is_monitored: bool) -> None:
        """A micro-batch is about to be run."""
        if is_first:
            self.forget_step()
            is_light = not (is_monitored or self._options.is_at_every_step)
            has_probe = not is_light and (self._marks_steps or not (self._runs_again and self._is_automatic()))
            self._search = _Search(is_light, has_probe)
            if has_probe and not self._probe.is_attached():
                self._probe.attach()
        search = self._search
        if search is None:
            return
        self._flag.micro_batch = len(search.batch_indices)
        search.batch_indices.append(batch_idx)
        if search.has_probe:
            self._probe.begin_micro_batch()
        elif not self._marks_steps and self._is_automatic():
            self._rerun.keep(batch, batch_idx, is_first=is_first, is_whole=not search.is_light)

    def begin_backward(self, loss: Tensor) -> None:
        """The loss of a backward pass exists."""
        if self._search is not None and (self._search.is_light or not self._marks_steps):
            self._flag.observe_loss(loss)
        self._probe.begin_backward(loss)
        if self._is_scaled:
            self._probe.end_backward()

    def end_backward(self) -> None:
        """The gradients exist."""
        if self._search is not None and (self._search.is_light or not self._marks_steps) and not self._is_scaled:
            self._flag.observe_gradients(lightly=self._search.is_light)
        self._probe.end_backward()

    def before_update(self, step: int) -> Finding | None:
        """Search the step; parameters are as they were in the forward pass.

        Returns:
            The finding, if there is a non-finite value, that is known now, and it is the first of a series.
        """
        search = self._search
        if self._marks_steps:
            if search is not None and search.is_light:
                self._flag.mark(step)
            elif search is not None:
                self._probe.observe_weights()
            return None
        # Where every step is searched, other ranks expect the collective also after an error of ours.
        if search is None and not self._options.is_at_every_step:
            return None
        own = self._flag.first_nonfinite()
        self._flag.forget()
        first = _first_of_all(own, self._engine.model.ranks)
        if search is not None:
            search.was_finite = first is None and search.was_finite is not False
        if first is None or self.is_reported:
            return None
        with self._monitor.no_monitor():
            return self._find(step, first, is_mine=own == first)

    def report_marked_steps(self, step: int) -> None:
        """Give the flag of the steps before to the record of a monitored step, whose transfer and reduction it shares."""
        steps_since = self._flag.steps_since(step)
        if steps_since is not None:
            self._engine.monitor_figure(STEPS_SINCE_NONFINITE, steps_since)

    def end_micro_batch(self) -> None:
        """It is over."""
        self._probe.end_micro_batch()

    def end_step(self, step: int, record: Record | None) -> Finding | None:
        """The step is over, and has a record if it was monitored.

        Returns:
            The finding, if there is a non-finite value that only the record shows.
        """
        num_steps = 0.0 if record is None else record.values.get(self._recipe.figure_key(STEPS_SINCE_NONFINITE), 0.0)
        finding = None if self.is_reported or not num_steps > 0 else self._marked(step, num_steps)
        search = self._search
        if search is not None and search.has_probe and self._marks_steps and record is not None:
            was_skipped = record.values.get(self._recipe.figure_key(STEP_SKIPPED), 0.0) > 0
            search.was_finite = not _has_nonfinite(record, was_skipped=was_skipped)
            if not search.was_finite:
                rank, found = _earliest(producer(self._probe.observed()), self._engine.model.ranks)
                finding = finding if found is None or self.is_reported else self._finding(step, rank, found)
        self.is_reported &= search is None or not search.was_finite
        self.forget_step()
        return finding

    def forget_step(self) -> None:
        """Nothing more is searched in this step."""
        self._search = None
        self._rerun.forget()
        self._probe.forget()
        self._flag.forget()
        if not self._options.is_at_every_step:
            self._probe.close()

    def _is_automatic(self) -> bool:
        return self._trainer.lightning_module.automatic_optimization

    def _marked(self, step: int, num_steps: float) -> Finding:
        """The finding of the first marked step, which was ``num_steps`` before this one."""
        self.is_reported = True
        words = f"The loss or a gradient was not finite for the first time, in a step that was not monitored. {ALWAYS_NAMES}"
        return Finding(step - int(num_steps), "nonfinite", ROOT, "", words, "error")

    def _find(self, step: int, first: int, *, is_mine: bool) -> Finding:
        """Find the module that made a non-finite value, on all ranks.

        ``first`` is the first micro-batch of any rank that has one, and ``is_mine`` whether this rank's has.
        """
        search = self._search
        is_light = search is not None and search.is_light
        own, why = None, "all was finite when the step was run again"
        if is_light:
            why += f" with torch's random states alone as they were. {ALWAYS_NAMES}"
        try:
            if search is not None and search.has_probe:
                own = producer(self._probe.observed())
            elif is_light and not self._is_automatic():
                why = f"under manual optimization no step can be run again. {ALWAYS_NAMES}"
            else:
                # On every rank: in tensor parallel training none can run it alone.
                own = self._rerun.look(first)
                own = own if own is None or own.is_known or is_mine else None
        except Exception as error:
            why = f"the step could not be run again ({type(error).__name__}: {error})"
        rank, found = _earliest(own, self._engine.model.ranks)
        if found is None:
            words = f"The loss or a gradient is not finite, and the module that made it is not known: {why.removesuffix('.')}."
            found = Producer(ROOT, True, UNKNOWN, 0, words)
        return self._finding(step, rank, found)

    def _finding(self, step: int, rank: int, found: Producer) -> Finding:
        self.is_reported = True
        if str(self._trainer.precision).startswith("16"):
            words = f"The run computes in float16 (precision: {self._trainer.precision}): what is above 65504 is infinite in it."
            found = replace(found, words=f"{found.words} {words}", cause=found.cause if found.cause == "data" else "overflow")
        where = f"micro-batch {found.micro_batch}" + (f" on rank {rank}" if self._monitor.distributed is not False else "")
        direction = f"the {'forward' if found.is_forward else 'backward'} pass of "
        direction = "" if direction in found.place_in_words else f"in {direction}"
        indices = [] if self._search is None else self._search.batch_indices
        batch_idx = indices[found.micro_batch] if 0 <= found.micro_batch < len(indices) else ""
        at = f"epoch {self._trainer.current_epoch}, batch_idx {batch_idx}"
        kind = "NaN" if found.value == "NaN" else "Infinity"
        words = f"{kind} in {found.place_in_words}, {direction}{where} ({at}). " if found.value else ""
        if not found.is_known:
            words = f"The first value that is not finite came in {where}, and the module that made it is not known: "
        return Finding(step, "nonfinite", found.site, "", f"{words}{found.words}", "error", cause=found.cause)

    def _hook_failed(self, error: Exception) -> None:
        message = f"Looking for values that are not finite failed ({type(error).__name__}: {error})"
        if self._on_error == "raise":
            raise MonitorError(f"{message}.") from error
        messages.warning("%s; in this step it is not done.", message)


def _first_of_all(micro_batch: int | None, ranks: Ranks | None) -> int | None:
    """The first of all ranks' micro-batches; ``None`` where no rank has one: one collective of one number."""
    if ranks is None:
        return micro_batch
    own = torch.tensor([-math.inf if micro_batch is None else -micro_batch], dtype=torch.float64, device="cpu")
    first = -float(ranks.all_reduce(own, "max")[0])
    return int(first) if math.isfinite(first) else None


def _earliest(own: Producer | None, ranks: Ranks | None) -> tuple[int, Producer | None]:
    """The rank whose producer came first, and that producer: the same on every rank."""
    everyones: list[Producer | None] = [own] if ranks is None else ranks.gather(own)
    found = [(one.micro_batch, not one.is_forward, one.place, rank) for rank, one in enumerate(everyones) if one is not None]
    rank = min(found)[-1] if found else 0
    return rank, everyones[rank]


def _has_nonfinite(record: Record, *, was_skipped: bool) -> bool:
    """Whether the loss or a statistic of a tensor is that of a non-finite element.

    In a step that the scaler skipped (``was_skipped``) losses and gradients may have overflowed, and do not count.
    """
    may_overflow = ("activation_gradient", "gradient", "gradient_before_clip", CONTEXT_KIND)
    kinds = ("activation", "parameter", *(() if was_skipped else may_overflow))
    counts, suspects = f"/{FINITE_STATISTICS[0]}", record.values.items()
    keys = [Key.parse(key) for key, value in suspects if not math.isfinite(value) or (value and key.endswith(counts))]
    return any(one.kind in kinds and one.statistic in ((LOSS,) if one.kind == CONTEXT_KIND else FINITE_STATISTICS) for one in keys)
