"""Values of a run that are not finite: whether there are any, who made the first one, and how training ends then."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_module_monitor.distributed.ranks import process_ranks
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.health.options import ParsedHealth
from lightning_module_monitor.health.producer import Producer, producer
from lightning_module_monitor.health.snapshot import save
from lightning_module_monitor.kernels.transfer import transfer
from lightning_module_monitor.model.names import ROOT
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.probes.finite_step import FiniteStep
from lightning_module_monitor.probes.nonfinite import NonfiniteProbe
from lightning_module_monitor.record import STEP_SKIPPED, Finding, Key, Record
from lightning_module_monitor.statistics.magnitudes import UNKNOWN
from lightning_module_monitor.trainer.rerun import StepAgain, site_of

Folder = Callable[[Trainer], Path | None]
"""Tells where the files of a run go; ``None`` if there are to be none."""

TELLING = ("norm", "rms")
"""Statistics that are finite where all elements are."""


class NonfiniteOfRun:
    """Looks for values that are not finite, in monitored steps or in every one, from when the model is there to :meth:`close`.

    Args:
        options: How.
        monitor: Whose model it is.
        on_error: ``raise``: an error of ours in a hook is one.
        messages: Where trouble of ours is said.
    """

    def __init__(self, options: ParsedHealth, monitor: ModuleMonitor, *, on_error: str, messages: logging.Logger) -> None:
        self._options = options
        self._monitor = monitor
        self._on_error = on_error
        self._messages = messages
        self._probe = NonfiniteProbe(monitor.planner.index.modules, self._hook_failed)
        self._finite: FiniteStep | None = None
        """Says before the optimizer's step whether all is finite. Of several ranks all have to know that, which takes a collective of its
        own: in monitored steps alone, their record tells, and the probe has to have looked at all of them."""
        self._again = StepAgain()
        if options.is_at_every_step or monitor.distributed is False:
            self._finite = FiniteStep(monitor.planner.index.modules)
        self._is_looking = False
        """Whether the step is one to look at."""
        self._is_watching = False
        """Whether the probe looks at all of the step."""
        self.is_told = False
        """Whether that something is not finite was said, and it still is so."""
        self._was_finite: bool | None = None
        """Whether all of the step was, before every optimizer's part of it; ``None`` before the first one."""
        self._micro_batch = 0
        """Which one of the step is running."""

    def close(self) -> None:
        """Take every hook off; a second call does no harm."""
        self.forget_step()
        self._probe.close()

    def begin_micro_batch(self, pl_module: LightningModule, batch: object, batch_idx: int, *, is_first: bool, is_monitored: bool) -> None:
        """A micro-batch is about to be run."""
        self._micro_batch = 0 if is_first else self._micro_batch + 1
        if self._finite is not None:
            self._finite.micro_batch = self._micro_batch
        if is_first:
            self.forget_step()
            self._is_looking = is_monitored or self._options.is_at_every_step
            # Under manual optimization nobody can run a step again: there is nothing but to look at all of every one.
            self._is_watching = self._is_looking and (self._finite is None or not pl_module.automatic_optimization)
            if self._is_watching and not self._probe.is_attached():
                self._probe.attach()
        if self._is_watching:
            self._probe.begin_micro_batch()
        elif self._is_looking:
            self._again.keep(pl_module, batch, batch_idx, is_first=is_first)

    def begin_backward(self, loss: Tensor, *, is_scaled: bool) -> None:
        """The loss of a backward pass is there; it may be scaled, so that its gradients may overflow, and who scales sees to that."""
        if self._finite is not None and self._is_looking:
            self._finite.see_loss(loss)
        if self._is_watching:
            self._probe.begin_backward(loss)
            if is_scaled:
                self._probe.end_backward()

    def end_backward(self, *, is_scaled: bool) -> None:
        """Gradients are there."""
        if self._finite is not None and self._is_looking and not is_scaled:
            self._finite.see_gradients()
        self._probe.end_backward()

    def before_update(self, trainer: Trainer, pl_module: LightningModule, step: int, folder: Folder, *, is_scaled: bool) -> Finding | None:
        """Parameters are as they were in the forward pass.

        Args:
            trainer: Its trainer.
            pl_module: Its module.
            step: Number of the step.
            folder: Where a snapshot goes.
            is_scaled: Whether the loss is.

        Returns:
            Who made a value that is not finite, if that is known now, and it is the first of such a series.
        """
        if self._finite is None:
            if self._is_watching:
                self._probe.see_weights()
            return None
        # Where every step is looked at, other ranks count on this one also after an error of ours.
        if not (self._is_looking or self._options.is_at_every_step):
            return None
        finding = None
        own = self._finite.first_nonfinite()
        micro_batch = _first_of_all(own, self._monitor)
        if micro_batch is not None:
            self._was_finite = False
            with self._monitor.no_monitor():
                finding = self._look(trainer, pl_module, step, folder, micro_batch, is_mine=own == micro_batch, is_scaled=is_scaled)
        elif self._was_finite is None:
            self._was_finite = True
        self._finite.forget()
        return finding

    def end_micro_batch(self) -> None:
        """It is over."""
        self._probe.end_micro_batch()

    def end_step(self, step: int, record: Record | None) -> Finding | None:
        """The step is over.

        Args:
            step: Its number.
            record: What it gave, if it was monitored.

        Returns:
            Who made a value that is not finite, if only the record tells that there is one.
        """
        finding = None
        if self._was_finite:
            self.is_told = False
        if self._finite is None and self._is_watching and record is not None:
            if _suspicious(record):
                seen = self._probe.seen()
                finding = self._told(step, *_earliest(None if seen is None else producer(seen), self._monitor))
            else:
                self.is_told = False
        self.forget_step()
        return finding

    def forget_step(self) -> None:
        """Nothing more is looked at in this step."""
        self._is_looking = self._is_watching = False
        self._was_finite = None
        self._again.forget()
        self._probe.forget()
        if self._finite is not None:
            self._finite.forget()
        if not self._options.is_at_every_step:
            self._probe.close()

    def _look(
        self, trainer: Trainer, pl_module: LightningModule, step: int, folder: Folder, micro_batch: int, *, is_mine: bool, is_scaled: bool
    ) -> Finding | None:
        """Look who made a value that is not finite, on all ranks; ``None`` if that it is so was said before.

        ``micro_batch`` is the first of all ranks' that had one, and ``is_mine`` whether this rank's did.
        """
        if self.is_told:
            return None
        sites, own, why = self._monitor.planner.index.modules, None, "all was finite when the step was run again"
        try:
            if self._is_watching:
                seen = self._probe.seen()
                own = None if seen is None else producer(seen)
            else:
                # On every rank: in tensor parallel training none can run it alone.
                own = self._again.look(trainer, pl_module, sites, micro_batch, is_scaled=is_scaled)
                own = own if own is None or own.is_known or is_mine else None
        except Exception as error:
            why = f"the step could not be run again ({type(error).__name__}: {error})"
        rank, found = _earliest(own, self._monitor)
        if found is None:
            found = Producer(ROOT, True, UNKNOWN, 0, f"The loss or a gradient is not finite, and who made it is not known: {why}.")
        snapshot = ""
        if self._options.snapshot and not self._is_watching and (place := folder(trainer)) is not None:
            path = place / f"monitor.snapshot-step={step}.pt"
            try:
                taken = self._again.snapshot(trainer, pl_module, found, step, site=site_of(sites, found))
                if rank == trainer.global_rank:
                    save(taken, path)
                snapshot = f" Snapshot: {path}."
            except Exception as error:
                self._messages.warning("There is no snapshot of step %d (%s: %s).", step, type(error).__name__, error)
        return self._told(step, rank, found, snapshot)

    def _told(self, step: int, rank: int, found: Producer | None, more: str = "") -> Finding | None:
        """What is to be said of who made a value that is not finite, once for as long as there are such values."""
        if found is None or self.is_told:
            return None
        self.is_told = True
        where = f"micro-batch {found.micro_batch}" + (f" on rank {rank}" if self._monitor.distributed is not False else "")
        direction = "forward" if found.is_forward else "backward"
        words = "" if found.micro_batch == UNKNOWN else f"It made the first value that is not finite, in the {direction} pass of {where}. "
        if not found.is_known:
            words = f"The first value that is not finite came in {where}, and who made it is not known: "
        return Finding(step, "nonfinite", found.site, "", f"{words}{found.words}{more}", "error")

    def _hook_failed(self, error: Exception) -> None:
        message = f"Looking for values that are not finite failed ({type(error).__name__}: {error})"
        if self._on_error == "raise":
            raise MonitorError(f"{message}.") from error
        self._messages.warning("%s; in this step it is not done.", message)


def _first_of_all(micro_batch: int | None, monitor: ModuleMonitor) -> int | None:
    """The first of all ranks' micro-batches; ``None`` where no rank has one: one collective of one number."""
    ranks = process_ranks() if monitor.distributed is not False else None
    if ranks is None:
        return micro_batch
    own = torch.tensor([-math.inf if micro_batch is None else -micro_batch], dtype=torch.float64, device=ranks.device)
    first = -float(transfer(ranks.all_reduce(own, "max"))[0])
    return int(first) if math.isfinite(first) else None


def _earliest(own: Producer | None, monitor: ModuleMonitor) -> tuple[int, Producer | None]:
    """Of all ranks' producers the one that came first, and its rank: the same on every rank."""
    ranks = process_ranks() if monitor.distributed is not False else None
    everyones: list[Producer | None] = [own] if ranks is None else ranks.gather(own)
    found = [(one.micro_batch, not one.is_forward, one.place, rank) for rank, one in enumerate(everyones) if one is not None]
    rank = min(found)[-1] if found else 0
    return rank, everyones[rank]


def _suspicious(record: Record) -> bool:
    """Whether anything that was recorded of tensors tells that an element is not finite."""
    was_skipped = any(value for key, value in record.values.items() if key.endswith(STEP_SKIPPED))
    return any(_tells(key, value, was_skipped=was_skipped) for key, value in record.values.items())


def _tells(key: str, value: float, *, was_skipped: bool) -> bool:
    """Whether a value does."""
    if math.isfinite(value) and not (value and key.endswith("/nonfinite_count")):
        return False
    parts = Key.parse(key)
    kinds = ("activation", "parameter", *(() if was_skipped else ("activation_gradient", "gradient", "gradient_before_clip")))
    return parts.kind in kinds and parts.statistic in ("nonfinite_count", *TELLING)
