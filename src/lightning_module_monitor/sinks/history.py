"""The last records, in memory."""

from __future__ import annotations

from collections import OrderedDict

from lightning_module_monitor.record import Record


class StorageManager:
    """Keeps the values of the last steps in memory, and writes them to a store or reads them from one.

    Args:
        max_records: Number of steps that are kept; older ones are dropped. A store on disk keeps all.
    """

    def __init__(self, max_records: int = 1000) -> None:
        self._max_records = max_records
        self._values: OrderedDict[int, dict[str, float]] = OrderedDict()

    def add(self, record: Record) -> None:
        """Keep a record; one of a step that is there already is merged with it."""
        values = self._values.pop(record.step, {})
        values.update(record.values)
        self._values[record.step] = values
        while len(self._values) > self._max_records:
            self._values.popitem(last=False)

    def last_step(self) -> int | None:
        """The step that a record was kept of last."""
        return next(reversed(self._values), None)

    def has_step(self, step: int) -> bool:
        """Whether there is a record of a step."""
        return step in self._values

    def get_step_metrics(self, step: int) -> dict[str, float]:
        """Value by key of one step; empty if there is no record of it."""
        return dict(self._values.get(step, {}))

    def get_all_metrics(self) -> dict[int, dict[str, float]]:
        """Value by key of every step, by step."""
        return {step: dict(values) for step, values in self._values.items()}

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
