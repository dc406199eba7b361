"""The most recent records, in memory."""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.keys import Columns
from lightning_module_monitor.record import Record, is_absent, values_by_key
from lightning_module_monitor.sinks.store.reader import load_store
from lightning_module_monitor.sinks.store.writer import Store


class _Row(NamedTuple):
    """The numbers of a step: 8 bytes for each, where a dict of floats takes 100."""

    columns: Columns
    numbers: NDArray[np.float64]

    def values(self) -> dict[str, float]:
        """Value by key."""
        return values_by_key(self.columns, self.numbers)

    def updated(self, record: Record) -> _Row:
        """The row with the values of a later record of the same step."""
        if record.columns is not self.columns:
            merged = Record.of(record.step, self.values() | dict(record.values))
            return _Row(merged.columns, merged.numbers)
        numbers = record.numbers.copy()
        earlier = numbers[: len(self.numbers)]
        np.copyto(earlier, self.numbers, where=is_absent(earlier))
        return _Row(self.columns, numbers)


class StorageManager:
    """Keeps the values of the last steps in memory, writes them to a store, and reads stores.

    Args:
        max_records: Number of steps to keep; older steps are dropped. A store on disk keeps all.
    """

    def __init__(self, max_records: int = 1000) -> None:
        self._max_records = max_records
        self._rows: OrderedDict[int, _Row] = OrderedDict()
        self._histograms: dict[str, Histogram] = {}
        """Histograms of the newest step only: a histogram takes as much memory as 264 values."""

    def add(self, record: Record) -> None:
        """Keep a record, merged with an earlier record of the same step. Histograms are kept for the newest step."""
        is_same_step = record.step == self.last_step()
        self._histograms = {**(self._histograms if is_same_step else {}), **record.histograms}
        earlier = self._rows.get(record.step)
        self._rows[record.step] = _Row(record.columns, record.numbers) if earlier is None else earlier.updated(record)
        self._rows.move_to_end(record.step)
        while len(self._rows) > self._max_records:
            self._rows.popitem(last=False)

    def last_step(self) -> int | None:
        """The newest step."""
        return next(reversed(self._rows), None)

    def last_histograms(self) -> dict[str, Histogram]:
        """Histogram by key of the newest step."""
        return dict(self._histograms)

    def get_step_metrics(self, step: int) -> dict[str, float]:
        """Value by key of a step; empty if it has no record."""
        return self._rows[step].values() if step in self._rows else {}

    def get_all_metrics(self) -> dict[int, dict[str, float]]:
        """Value by key of every step, by step."""
        return {step: row.values() for step, row in self._rows.items()}

    def clear(self) -> None:
        """Remove all records."""
        self._rows.clear()
        self._histograms.clear()

    def save_hdf5(self, path: str | os.PathLike[str]) -> Path:
        """Write the steps in memory to a store, the newest step with its histograms.

        Args:
            path: Path of the file. An existing file is not changed.

        Returns:
            The path, or the next free numbered name.

        Raises:
            OSError: If the file cannot be written; a warning has the reason.
        """
        keys = dict.fromkeys(key for row in self._rows.values() for key in row.values())
        store = Store(path, configuration={}, keys=keys, histogram_keys=self._histograms)
        last = self.last_step()
        for step, row in self._rows.items():
            store.write(Record(step, row.columns, row.numbers, self._histograms if step == last else {}))
        store.close()
        if store.failed:
            raise OSError(f"The steps could not be written to {str(path)!r}; the previous warning has the reason.")
        return store.path

    @staticmethod
    def load_hdf5(path: str | os.PathLike[str]) -> dict[int, dict[str, float]]:
        """Value by key of every step in a store, by step.

        Raises:
            FileNotFoundError: If there is no file.
            ValueError: If it is not a store.
        """
        store = load_store(path)
        loaded: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for key in store:
            steps, values = store.series(key)
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                loaded[step][key] = value
        return dict(sorted(loaded.items()))
