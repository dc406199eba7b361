"""Non-finite values of a run: whether there are any, which module made the first one, and the finding."""

from __future__ import annotations

import enum
import math
from dataclasses import replace

import torch
from torch import Tensor

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.health.figures import FINITE_STATISTICS
from lightning_module_monitor.health.options import WARN, ParsedHealth
from lightning_module_monitor.health.producer import Producer, producer
from lightning_module_monitor.lightning_packages import Trainer, messages
from lightning_module_monitor.model.names import ROOT
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.probes.nonfinite import FiniteStep, NonfiniteProbe
from lightning_module_monitor.record import STEP_SKIPPED, STEPS_SINCE_NONFINITE, Finding, Key, Record
from lightning_module_monitor.statistics.magnitudes import UNKNOWN
from lightning_module_monitor.trainer.rerun import StepRerun
from lightning_module_monitor.trainer.strategy import can_run_again, scaler_of

ALWAYS_NAMES = "health: {nonfinite: always} names the module."
"""The advice where a step that is not monitored was not finite."""


class _Search(enum.Enum):
    """How a step is searched for non-finite values."""

    NONE = enum.auto()
    RERUN = enum.auto()
    """A flag is read before the optimizer's step; if it is raised, the micro-batch is run again and observed by the probe."""
    PROBE = enum.auto()
    """The same without a second run: the probe observes the step itself."""
    RECORD = enum.auto()
    """The probe observes the step itself; instead of a flag, which would cost a collective, the common record shows non-finite values."""
    LIGHT = enum.auto()
    """As ``RERUN``, but the flag is of the loss and of the gradients of some biases and gains alone."""
    DEFERRED = enum.auto()
    """As ``LIGHT``, but the flag stays on the device, and the next record has the first step of it."""


_LIGHT = (_Search.LIGHT, _Search.DEFERRED)
_FLAGGED = (_Search.RERUN, _Search.PROBE, *_LIGHT)
_PROBED = (_Search.PROBE, _Search.RECORD)


def marks_steps(options: ParsedHealth, trainer: Trainer) -> bool:
    """Whether the next record shows which step before it was not finite: to read that at once, the host or other ranks would wait."""
    return options.nonfinite == WARN and (trainer.world_size > 1 or trainer.strategy.root_device.type != "cpu")


class NonfiniteController:
    """Finds the first non-finite value, from when the model exists to :meth:`close`.

    Steps that are monitored, or all with ``always`` and ``stop``, are searched by a flag and a second run (``_Search.RERUN``). No second
    run is possible under manual optimization, and under strategies that run a model only as a whole; monitored steps of several ranks
    need none. With ``warn`` the other steps are searched lightly; where a read would make an accelerator wait, or ranks would have to
    agree, that is deferred.
    """

    def __init__(self, options: ParsedHealth, monitor: ModuleMonitor, trainer: Trainer, *, on_error: str) -> None:
        self._options = options
        self._monitor = monitor
        self._trainer = trainer
        self._on_error = on_error
        index = monitor.planner.index
        self._probe = NonfiniteProbe(index.modules, self._hook_failed)
        # These look inside compiled code too: at gradients, and at a copy that runs uncompiled.
        self._flag = FiniteStep(index.whole.modules)
        self._rerun = StepRerun(trainer.lightning_module, index.whole.modules)
        self._is_by_record = not options.is_at_every_step and trainer.world_size > 1
        """Whether the common record shows whether a monitored step is finite."""
        self._marks_steps = marks_steps(options, trainer)
        self._runs_again = can_run_again(trainer)
        self._is_scaled = scaler_of(trainer) is not None
        """Whether gradients are those of a scaled loss: they may overflow, which the scaler handles."""
        self._search = _Search.NONE
        self._batch_indices: list[int] = []
        """Of the micro-batches of the step."""
        self.is_reported = False
        """Whether a non-finite value was reported, and there still is one."""
        self._was_finite: bool | None = None
        """Whether all of the step was, before every optimizer's part of it; ``None`` before the first one."""
        self._steps_since: Tensor | None = None
        """The flag of the steps before a monitored one."""

    def close(self) -> None:
        """Take every hook off; a second call does no harm."""
        self.forget_step()
        self._probe.close()

    def begin_micro_batch(self, batch: object, batch_idx: int, *, is_first: bool, is_monitored: bool) -> None:
        """A micro-batch is about to be run."""
        self._flag.micro_batch = 0 if is_first else self._flag.micro_batch + 1
        if is_first:
            self._batch_indices.clear()
            self.forget_step()
            self._search = self._search_of(is_monitored=is_monitored)
            if self._search in _PROBED and not self._probe.is_attached():
                self._probe.attach()
        self._batch_indices.append(batch_idx)
        if self._search in _PROBED:
            self._probe.begin_micro_batch()
        elif self._search in (_Search.RERUN, _Search.LIGHT) and self._is_automatic():
            self._rerun.keep(batch, batch_idx, is_first=is_first, is_whole=self._search is _Search.RERUN)

    def begin_backward(self, loss: Tensor) -> None:
        """The loss of a backward pass exists."""
        if self._search in _FLAGGED:
            self._flag.observe_loss(loss)
        self._probe.begin_backward(loss)
        if self._is_scaled:
            self._probe.end_backward()

    def end_backward(self) -> None:
        """The gradients exist."""
        if self._search in _FLAGGED and not self._is_scaled:
            self._flag.observe_gradients(lightly=self._search in _LIGHT)
        self._probe.end_backward()

    def before_update(self, step: int) -> Finding | None:
        """Search the step; parameters are as they were in the forward pass.

        Returns:
            The finding, if there is a non-finite value, that is known now, and it is the first of a series.
        """
        if self._search is _Search.DEFERRED:
            self._flag.mark(step)
        elif self._search is _Search.RECORD:
            self._probe.observe_weights()
        # Where every step is searched, other ranks expect the collective also after an error of ours.
        elif self._search is not _Search.NONE or self._options.is_at_every_step:
            own = self._flag.first_nonfinite()
            self._flag.forget()
            first = _first_of_all(own, self._monitor.ranks)
            self._was_finite = first is None and self._was_finite is not False
            if first is not None and not self.is_reported:
                num_steps = 0.0 if self._steps_since is None else float(self._steps_since)
                if num_steps:
                    return self._marked(step, num_steps)
                with self._monitor.no_monitor():
                    return self._find(step, first, is_mine=own == first)
        return None

    def report_marked_steps(self, step: int) -> None:
        """Give the flag of the steps before to the record of a monitored step, whose transfer and reduction it shares."""
        self._steps_since = self._flag.steps_since(step)
        if self._steps_since is not None:
            self._monitor.monitor_figure(STEPS_SINCE_NONFINITE, self._steps_since)

    def end_micro_batch(self) -> None:
        """It is over."""
        self._probe.end_micro_batch()

    def end_step(self, step: int, record: Record | None) -> Finding | None:
        """The step is over, and has a record if it was monitored.

        Returns:
            The finding, if there is a non-finite value that only the record shows.
        """
        num_steps = 0.0 if record is None else record.values.get(self._monitor.planner.own_key(STEPS_SINCE_NONFINITE), 0.0)
        finding = None if self.is_reported or not num_steps > 0 else self._marked(step, num_steps)
        if self._search is _Search.RECORD and record is not None:
            self._was_finite = not _has_nonfinite(record)
            if not self._was_finite:
                rank, found = _earliest(producer(self._probe.observed()), self._monitor.ranks)
                finding = finding if found is None or self.is_reported else self._finding(step, rank, found)
        self.is_reported &= not self._was_finite
        self.forget_step()
        return finding

    def forget_step(self) -> None:
        """Nothing more is searched in this step."""
        self._search = _Search.NONE
        self._was_finite = self._steps_since = None
        self._rerun.forget()
        self._probe.forget()
        self._flag.forget()
        if not self._options.is_at_every_step:
            self._probe.close()

    def _is_automatic(self) -> bool:
        return self._trainer.lightning_module.automatic_optimization

    def _search_of(self, *, is_monitored: bool) -> _Search:
        if not (is_monitored or self._options.is_at_every_step):
            return _Search.DEFERRED if self._marks_steps else _Search.LIGHT
        if self._is_by_record:
            return _Search.RECORD
        return _Search.RERUN if self._runs_again and self._is_automatic() else _Search.PROBE

    def _marked(self, step: int, num_steps: float) -> Finding:
        """The finding of the first marked step, which was ``num_steps`` before this one."""
        self.is_reported = True
        words = f"The loss or a gradient was not finite for the first time, in a step that was not monitored. {ALWAYS_NAMES}"
        return Finding(step - int(num_steps), "nonfinite", ROOT, "", words, "error")

    def _find(self, step: int, first: int, *, is_mine: bool) -> Finding:
        """Find the module that made a non-finite value, on all ranks.

        ``first`` is the first micro-batch of any rank that has one, and ``is_mine`` whether this rank's has.
        """
        is_light = self._search is _Search.LIGHT
        own, why = None, "all was finite when the step was run again"
        if is_light:
            why += f" with torch's random states alone as they were. {ALWAYS_NAMES}"
        try:
            if self._search is _Search.PROBE:
                own = producer(self._probe.observed())
            elif is_light and not self._is_automatic():
                why = f"under manual optimization no step can be run again. {ALWAYS_NAMES}"
            else:
                # On every rank: in tensor parallel training none can run it alone.
                own = self._rerun.look(first)
                own = own if own is None or own.is_known or is_mine else None
        except Exception as error:
            why = f"the step could not be run again ({type(error).__name__}: {error})"
        rank, found = _earliest(own, self._monitor.ranks)
        if found is None:
            words = f"The loss or a gradient is not finite, and the module that made it is not known: {why.removesuffix('.')}."
            found = Producer(ROOT, True, UNKNOWN, 0, words)
        if str(self._trainer.precision).startswith("16"):
            words = f"The run computes in float16 (precision: {self._trainer.precision}): what is above 65504 is infinite in it."
            found = replace(found, words=f"{found.words} {words}", cause=found.cause if found.cause == "data" else "overflow")
        return self._finding(step, rank, found)

    def _finding(self, step: int, rank: int, found: Producer) -> Finding:
        self.is_reported = True
        where = f"micro-batch {found.micro_batch}" + (f" on rank {rank}" if self._monitor.distributed is not False else "")
        direction = f"the {'forward' if found.is_forward else 'backward'} pass of "
        direction = "" if direction in found.place_in_words else f"in {direction}"
        batch_idx = self._batch_indices[found.micro_batch] if 0 <= found.micro_batch < len(self._batch_indices) else ""
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


def _has_nonfinite(record: Record) -> bool:
    """Whether a statistic of a tensor shows a non-finite element; gradients of a step that the scaler skipped do not count."""
    was_skipped = any(value for key, value in record.values.items() if key.endswith(STEP_SKIPPED))
    kinds = ("activation", "parameter", *(() if was_skipped else ("activation_gradient", "gradient", "gradient_before_clip")))
    counts, suspects = f"/{FINITE_STATISTICS[0]}", record.values.items()
    keys = [Key.parse(key) for key, value in suspects if not math.isfinite(value) or (value and key.endswith(counts))]
    return any(one.kind in kinds and one.statistic in FINITE_STATISTICS for one in keys)
