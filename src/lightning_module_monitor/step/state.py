"""The state of series between steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torchmetrics import Metric

from lightning_module_monitor.keys import Columns
from lightning_module_monitor.statistics.finisher import Finisher
from lightning_module_monitor.statistics.layout import Flags, Layout
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.statistics.units import RecentUnits


class SeriesState:
    """State kept between steps: the layout, copies of torchmetrics objects, and which units were alive.

    Args:
        streams: The planned streams.
        columns: The columns of records, which states of other plans of the stage may share.
        units: Which units were alive in the last monitored steps, by key; several states may share them.
    """

    def __init__(self, streams: Iterable[Stream] = (), columns: Columns | None = None, units: RecentUnits | None = None) -> None:
        self.layout = Layout(streams)
        self.columns = Columns() if columns is None else columns
        self.metrics: dict[str, Metric] = {}
        """The copy of the user's torchmetrics object by key."""
        self.units = RecentUnits() if units is None else units
        self._finisher = Finisher((), self.columns)
        self._columns_of_values = np.empty(0, np.intp)

    def finisher(self, is_observed: Flags) -> Finisher:
        """Finishes the statistics of the observed streams; the same object while these do not change."""
        rows = [*itertools.compress(zip(self.layout.streams, self.layout.first_rows, strict=True), is_observed)]
        if self._finisher.rows != rows:
            self._finisher = Finisher(rows, self.columns)
        return self._finisher

    def columns_of_values(self, has_result: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Columns of the functions and values of the layout that have a result, which ``has_result`` marks, shape ``(values,)``."""
        known = self._columns_of_values
        if len(known) < len(has_result):
            known = self._columns_of_values = np.concatenate([known, np.full(len(has_result) - len(known), -1)])
        new = has_result & (known < 0)
        if new.any():
            known[new] = self.columns.add(stream.series[name] for stream, name, _value in itertools.compress(self.layout.values, new))
        return known[has_result]
