"""Search by records alone, where reading a value would make the host or other ranks wait."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lightning_module_monitor.health.figures import FINITE_STATISTICS
from lightning_module_monitor.keys import Columns, Key
from lightning_module_monitor.kinds import CONTEXT_KIND, LOSS, ROOT_SITE, STEP_SKIPPED, STEPS_SINCE_NONFINITE
from lightning_module_monitor.lightning_packages import Trainer
from lightning_module_monitor.model.names import ROOT
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.nonfinite.flag import MarkedSteps
from lightning_module_monitor.nonfinite.search import ALWAYS_NAMES, NonfiniteSearch, about_float16
from lightning_module_monitor.record import Finding, Record

_ORDER = ("parameter", "activation", CONTEXT_KIND, "activation_gradient", "gradient_before_clip", "gradient")
"""Kinds in the order of a step."""
_OF_BACKWARD = ("activation_gradient", "gradient_before_clip", "gradient")


class RecordSearch(NonfiniteSearch):
    """Finds a non-finite value by records: ``warn`` on accelerators, and on several ranks.

    In a monitored step the record itself shows the first site. In other steps the flag stays on the device, and the next record, whose
    transfer and reduction it shares, has the first such step.

    Args:
        monitor: The monitor of the run.
        trainer: The Trainer.
        is_scaled: Whether the loss is scaled: its gradients may overflow, which the scaler handles.
    """

    is_on = True

    def __init__(self, monitor: ModuleMonitor, trainer: Trainer, *, is_scaled: bool) -> None:
        self._monitor, self._trainer, self._is_scaled = monitor, trainer, is_scaled
        self._flag = MarkedSteps(monitor.engine.model.planner.index.whole.modules)
        self._is_marking = False
        """Whether the open step is marked, because no record will show it."""
        self._order = OrderOfStep()

    def begin_step(self, step: int, *, is_monitored: bool) -> None:
        """A step begins. The record of a monitored step gets the flag of the steps before."""
        self._is_marking = not is_monitored
        steps_since = self._flag.steps_since(step) if is_monitored else None
        if steps_since is not None:
            self._monitor.engine.monitor_figure(STEPS_SINCE_NONFINITE, steps_since)

    def begin_backward(self, loss: Tensor) -> None:
        """The loss of a backward pass exists."""
        if self._is_marking:
            self._flag.observe_loss(loss)

    def end_backward(self) -> None:
        """The gradients exist."""
        if self._is_marking and not self._is_scaled:
            self._flag.observe_gradients(lightly=True)

    def end_step(self, step: int, record: Record | None) -> Finding | None:
        """A step ends; returns the finding of the first of a series, if there is a record and it shows one."""
        if self._is_marking:
            self._flag.mark(step)
        self.end_search()
        if record is None:
            return None
        figure_key, finding = self._monitor.engine.recipe.figure_key, None
        num_steps = record.get(figure_key(STEPS_SINCE_NONFINITE), 0.0)
        key = self._order.first_nonfinite(record, was_skipped=record.get(figure_key(STEP_SKIPPED), 0.0) > 0)
        if not self.is_reported:
            finding = self._unmonitored(record.step - int(num_steps)) if num_steps > 0 else self._monitored(record, key)
        self.is_reported = key is not None
        return finding

    def after_exception(self, step: int, error: Exception) -> Finding | None:
        """An exception ends the run, and no record will have the flag: it is read now, on this rank alone."""
        if self.is_reported or self._trainer.world_size > 1:
            return None
        steps_since = self._flag.steps_since(step)
        return self._unmonitored(step - int(steps_since)) if steps_since is not None and steps_since > 0 else None

    def end_search(self) -> None:
        """Search no further in this step."""
        self._is_marking = False

    def _unmonitored(self, step: int) -> Finding:
        """The finding of a step without a record, whose flag is known and no more."""
        words = f"The loss or a gradient was not finite for the first time, in a step that was not monitored. {ALWAYS_NAMES}"
        return Finding(step, "nonfinite", ROOT, "", words, "error")

    def _monitored(self, record: Record, key: Key | None) -> Finding | None:
        """The finding of a step with a record, if it shows a value that is not finite."""
        if key is None:
            return None
        site, cause = key.site if is_of_one(key) else ROOT, ""
        if key.kind == CONTEXT_KIND:
            words = "The loss is not finite, and no recorded activation shows a non-finite value."
        elif key.kind == "parameter":
            words, cause = f"{site if is_of_one(key) else 'A parameter'} is not finite before the update.", "update"
        else:
            what = f"NaN or infinity in the {key.kind.replace('_', ' ')} of {site}"
            words = f"{what}. In the order of a step it is the first that is recorded ({key.format()})."
        float16 = about_float16(self._trainer)
        words = " ".join(filter(None, (words, float16, ALWAYS_NAMES)))
        return Finding(record.step, "nonfinite", site, "", words, "error", cause="overflow" if float16 else cause)


def is_of_one(key: Key) -> bool:
    """Whether a value is that of one module or parameter."""
    return key.site != ROOT_SITE and key.kind != CONTEXT_KIND


class OrderOfStep:
    """The columns of records that show a non-finite loss or element of a tensor, in the order of a step."""

    def __init__(self) -> None:
        self._bound_to: tuple[Columns | None, int] = None, 0
        self._columns = np.empty(0, np.intp)
        self._is_count = self._may_overflow = np.empty(0, bool)

    def first_nonfinite(self, record: Record, *, was_skipped: bool) -> Key | None:
        """The first key whose value shows a non-finite value; ``None`` if all are finite.

        In a step that the scaler skipped (``was_skipped``), losses and gradients may have overflowed, and do not count.
        """
        columns, num_columns = record.columns, len(record.numbers)
        if self._bound_to != (columns, num_columns):
            self._bind(columns, num_columns)
        numbers = record.numbers[self._columns]
        is_bad = np.where(self._is_count, numbers > 0, ~np.isfinite(numbers)) & record.is_recorded[self._columns]
        if was_skipped:
            is_bad &= ~self._may_overflow
        return columns.keys[self._columns[is_bad.argmax()]] if is_bad.any() else None

    def _bind(self, columns: Columns, num_columns: int) -> None:
        order: list[tuple[int, bool, int, int]] = []
        for column, key in enumerate(columns.keys[:num_columns]):
            if key.kind in _ORDER and key.statistic in ((LOSS,) if key.kind == CONTEXT_KIND else FINITE_STATISTICS):
                # A norm of all tensors together names none of them.
                place = -column if key.kind in _OF_BACKWARD else column
                order.append((_ORDER.index(key.kind), key.site == ROOT_SITE, place, column))
        found = [entry[-1] for entry in sorted(order)]
        keys = [columns.keys[column] for column in found]
        self._bound_to, self._columns = (columns, num_columns), np.array(found, np.intp)
        self._is_count = np.array([key.statistic == FINITE_STATISTICS[0] for key in keys], bool)
        self._may_overflow = np.array([key.kind not in _ORDER[:2] for key in keys], bool)
