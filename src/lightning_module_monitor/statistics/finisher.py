"""Computes statistics from moments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.kernels.moments import Array, Moments, Need
from lightning_module_monitor.keys import Columns
from lightning_module_monitor.record import NumbersOfStep
from lightning_module_monitor.statistics.fine_counts import FineCounts
from lightning_module_monitor.statistics.stream import BASE, COMPARED_ROWS, OWN, Stream


class _Group(NamedTuple):
    """Streams with the same statistics, which are finished together."""

    streams: Sequence[Stream]
    parts: Sequence[np.ndarray]
    """For each row offset the rows of all streams: int64, shape ``(streams,)``."""
    columns: NDArray[np.intp]
    """Columns of the statistics in a record, shape ``(streams, statistics)``."""


class Finisher:
    """Finishes the statistics of some streams, given with their first rows, into the columns of a record."""

    def __init__(self, rows: Sequence[tuple[Stream, int]], columns: Columns) -> None:
        self.rows = rows
        alike: defaultdict[tuple[str, ...], list[tuple[Stream, int]]] = defaultdict(list)
        for stream, row in rows:
            if stream.statistics:
                alike[tuple(stream.statistics)].append((stream, row))
        self._groups: list[_Group] = []
        for members in alike.values():
            first = members[0][0]
            parts = [np.array([row + part for _stream, row in members]) for part in range(first.num_rows)]
            indices = columns.add(stream.series[name] for stream, _row in members for name in first.statistics)
            self._groups.append(_Group([stream for stream, _row in members], parts, indices.reshape(len(members), -1)))

    def finish(
        self,
        moments: Array,
        counts: Mapping[Stream, Array],
        written: NumbersOfStep,
        fail: Callable[[Stream, str, str, Exception], None],
    ) -> None:
        """Write the statistics.

        Args:
            moments: Of all rows, shape ``(fields, rows)``, float64; written into.
            counts: Rows of counts in fine bins, of the streams that have a statistic of them.
            written: Receives the statistics.
            fail: Receives a statistic that could not be finished: a stream that has it, its name, "its moments", the error. Its values
                are NaN.
        """
        with np.errstate(all="ignore"):  # a statistic of too few elements is NaN, as in torch
            fields = nan_where_empty(moments)
            for group in self._groups:
                first = group.streams[0]
                numbers = np.empty((len(group.parts[0]), len(first.statistics)))
                parts = [Moments(*fields[:, index]) for index in group.parts]
                counted = [FineCounts([counts[stream] for stream in group.streams])] if first.needs & Need.FINE_COUNTS else []
                for column, (name, statistic) in enumerate(first.statistics.items()):
                    taken = COMPARED_ROWS.get(statistic.compared_with) or ((OWN, BASE) if statistic.relative else (OWN,))
                    further = counted if statistic.needs & Need.FINE_COUNTS else []
                    try:
                        numbers[:, column] = statistic.finish(*[parts[part] for part in taken], *further)
                    except Exception as error:  # a user's statistic
                        numbers[:, column] = np.nan
                        fail(first, name, "its moments", error)
                written.write(group.columns, numbers)


def nan_where_empty(fields: Array) -> Array:
    """Make mean, spread and extremes of empty tensors NaN, in place of what merging starts from.

    ``fields`` of all rows' moments, shape ``(fields, rows)``, float64, is written into and returned.
    """
    if 0.0 in fields[0].tolist():
        fields[np.ix_(_OF_ELEMENTS, fields[0] == 0)] = np.nan
    return fields


_OF_ELEMENTS = [Moments._fields.index(name) for name in ("mean", "deviations", "third", "fourth", "maximum", "minimum")]
"""The moments that are undefined without an element."""
