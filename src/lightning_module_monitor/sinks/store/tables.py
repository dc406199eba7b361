"""The tables of an open store, to which rows are appended."""

from __future__ import annotations

import h5py
import numpy as np

from lightning_module_monitor.sinks.store import schema


class Table:
    """A group of the open file.

    Args:
        group: The group; what is written goes behind its last complete row.
        part: Its columns among those of all tables of numbers, or of histograms.
    """

    def __init__(self, group: h5py.Group, part: slice) -> None:
        steps = schema.read_steps(group)
        self.values, self.steps, self.part = group["values"], group["steps"], part
        self.num_rows = len(steps)
        self._last_step = int(steps[-1]) if len(steps) else -1
        self._last_row: schema.Values | None = self.values[len(steps) - 1] if len(steps) else None

    def put_values(self, step: int, row: schema.Values) -> None:
        """Write a row of shape ``(columns,)`` or ``(columns, bins)``; a second one of the same step is merged into the first."""
        if self._last_row is not None and step == self._last_step:
            merged, recorded = self._last_row.copy(), schema.is_recorded(row)
            merged[recorded] = row[recorded]
            _put(self.values, self.num_rows - 1, merged)
            self._last_row = merged
        else:
            _put(self.values, self.num_rows, row)
            self._last_row = row

    def put_step(self, step: int) -> None:
        """Write the step of the row that was written last: for readers, and after a kill, it is there from now on."""
        if step != self._last_step or not self.num_rows:
            _put(self.steps, self.num_rows, step)
            self.num_rows += 1
            self._last_step = step


def _put(dataset: h5py.Dataset, index: int, item: object) -> None:
    """Write one item of a dataset that grows along its first axis. ``dataset[index] = item`` takes four times as long."""
    rows = np.array([item], dataset.dtype)
    if len(dataset) <= index:
        dataset.id.set_extent((index + 1, *rows.shape[1:]))
    place = dataset.id.get_space()
    place.select_hyperslab((index, *[0] * (rows.ndim - 1)), rows.shape)
    dataset.id.write(h5py.h5s.create_simple(rows.shape), place, rows)
