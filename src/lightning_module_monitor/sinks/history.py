"""The last records, in memory."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path

from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.store.reader import load_store
from lightning_module_monitor.sinks.store.writer import Store


class StorageManager:
    """Keeps the values of the last steps in memory, and writes them to a store or reads them from one.

    Args:
        max_records: Number of steps that are kept; older ones are dropped. A store on disk keeps all.
    """

    def __init__(self, max_records: int = 1000) -> None:
        self._max_records = max_records
        self._values: OrderedDict[int, Mapping[str, float]] = OrderedDict()
        self._histograms: dict[str, Histogram] = {}
        """Histograms of the newest step only: each takes as much memory as 264 values."""

    def add(self, record: Record) -> None:
        """Keep a record, merged with an earlier one of the same step. Histograms are kept for the newest step."""
        is_same_step = record.step == self.last_step()
        self._histograms = {**(self._histograms if is_same_step else {}), **record.histograms}
        earlier = self._values.pop(record.step, None)
        # A copy: other holders of the record may add to its values.
        self._values[record.step] = copy.copy(record.values) if earlier is None else dict(earlier.items()) | dict(record.values.items())
        while len(self._values) > self._max_records:
            self._values.popitem(last=False)

    def last_step(self) -> int | None:
        """The newest step."""
        return next(reversed(self._values), None)

    def last_histograms(self) -> dict[str, Histogram]:
        """Histogram by key, of the newest step."""
        return dict(self._histograms)

    def get_step_metrics(self, step: int) -> dict[str, float]:
        """Value by key of one step; empty if there is no record of it."""
        return dict(self._values.get(step, {}).items())

    def get_all_metrics(self) -> dict[int, dict[str, float]]:
        """Value by key of every step, by step."""
        return {step: dict(values.items()) for step, values in self._values.items()}

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
        self._histograms.clear()

    def save_hdf5(self, path: str | os.PathLike[str]) -> Path:
        """Write the steps that are in memory to a store, the newest one with its histograms.

        Args:
            path: Where the file should be. A file that is there already is left alone.

        Returns:
            The file: the path, or the next numbered name that is free.

        Raises:
            OSError: If it could not be written; a warning has the reason.
        """
        keys = dict.fromkeys(key for values in self._values.values() for key in values)
        store = Store(path, configuration={}, keys=keys, histogram_keys=self._histograms)
        last = self.last_step()
        for step, values in self._values.items():
            store.write(Record(step, values, self._histograms if step == last else {}))
        store.close()
        if store.failed:
            raise OSError(f"The steps could not be written to {str(path)!r}; the warning before this has the reason.")
        return store.path

    @staticmethod
    def load_hdf5(path: str | os.PathLike[str]) -> dict[int, dict[str, float]]:
        """Value by key of every step in a store, by step.

        Raises:
            FileNotFoundError: If there is no file.
            ValueError: If it is no store.
        """
        store = load_store(path)
        loaded: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for key in store:
            steps, values = store.series(key)
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                loaded[step][key] = value
        return dict(sorted(loaded.items()))
