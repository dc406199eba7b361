"""Makes recorded values metrics of the Trainer, for EarlyStopping, ModelCheckpoint and the progress bar."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_module_monitor.keys import Columns, is_context
from lightning_module_monitor.kinds import CONTEXT_KIND, TRAIN
from lightning_module_monitor.lightning_packages import LightningModule
from lightning_module_monitor.record import Record


def names_context(pattern: re.Pattern[str]) -> bool:
    """Whether a pattern of ``callback_metrics`` names context keys explicitly, unlike ``.*``."""
    return f"{CONTEXT_KIND}/" in pattern.pattern


class CallbackMetrics:
    """Logs values whose keys match a pattern for EarlyStopping, ModelCheckpoint and, as an option, the progress bar.

    Args:
        pl_module: Logs them.
        patterns: The patterns.
        progress_bar: Whether the progress bar shows them.
    """

    def __init__(self, pl_module: LightningModule, patterns: Sequence[re.Pattern[str]], *, progress_bar: bool) -> None:
        self._pl_module = pl_module
        self._patterns = patterns
        self._progress_bar = progress_bar
        self._matching: dict[Columns, tuple[int, list[int]]] = {}
        """The number of columns that were compared with the patterns, and those that match."""

    def write(self, record: Record) -> list[str]:
        """Log the values of a record, from a hook that may log; returns their keys."""
        columns, version = record.columns, len(record.numbers)
        known, matching = self._matching.get(columns, (0, []))
        if known < version:
            matching = matching + [column for column in range(known, version) if self._is_matching(columns.texts[column])]
            self._matching[columns] = version, matching
        recorded = [column for column in matching if record.is_recorded[column]]
        for column in recorded:
            in_step = columns.keys[column].stage == TRAIN
            value = float(record.numbers[column])
            self._pl_module.log(
                columns.texts[column], value, prog_bar=self._progress_bar, logger=False, on_step=in_step, on_epoch=not in_step
            )
        return [columns.texts[column] for column in recorded]

    def _is_matching(self, key: str) -> bool:
        return any(pattern.fullmatch(key) and (names_context(pattern) or not is_context(key)) for pattern in self._patterns)
