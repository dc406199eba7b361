"""The order of streams that all ranks share, and where the numbers of each stream are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.kernels.bins_of_floats import Bins
from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.keys import Key
from lightning_module_monitor.statistics.channels import ChannelStatistic
from lightning_module_monitor.statistics.functions import Value
from lightning_module_monitor.statistics.stream import Identity, Stream, Sums
from lightning_module_monitor.statistics.units import UNITS

Flags: TypeAlias = NDArray[np.float64]
"""0 or 1 for each item."""

Rows: TypeAlias = NDArray[np.int64]
"""Indices of rows or of streams in a layout."""


class Layout:
    """Streams in the same order on every rank: the planned ones, then those first observed during training.

    Attributes:
        streams: All streams, in order.
        positions: The index of each stream, by identity.
        first_rows: The first row of each stream in the table of moments.
        num_rows: Number of rows.
        summed: Streams whose counts or sums are added over ranks, each with what its row sums.
        slices: Where these rows are in ``Numbers.counts``, which has ``num_counts`` elements.
        replicated: Streams whose tensors are expected to be equal on every rank.
        values: Functions and values, each with its stream and name.
        channels: Statistics of channels, likewise.
        units: Statistics of units, each with its stream and name.
        totals: Streams with members; they are merged after the reduction over ranks.
    """

    def __init__(self, streams: Iterable[Stream] = ()) -> None:
        self.streams: list[Stream] = []
        self.positions: dict[Identity, int] = {}
        self.first_rows: list[int] = []
        self.num_rows = 0
        self.summed: list[tuple[Stream, Sums]] = []
        self.slices: dict[tuple[Identity, Sums], slice] = {}
        self.num_counts = 0
        self.replicated: list[Stream] = []
        self.values: list[tuple[Stream, str, Value]] = []
        self.channels: list[tuple[Stream, str, ChannelStatistic]] = []
        self.units: list[tuple[Stream, str]] = []
        self._columns_of_units: tuple[Sequence[tuple[Stream, int]], NDArray[np.intp]] = (), np.empty(0, np.intp)
        self.totals: list[Stream] = []
        self._order: tuple[Mapping[Stream, int], Flags, NDArray[np.int64]] = {}, np.zeros(0), np.full(0, -1)
        self.add(streams)

    def add(self, streams: Iterable[Stream]) -> None:
        """Add streams at the end; those that are known are left out."""
        for stream in streams:
            if stream.identity in self.positions:
                continue
            self.positions[stream.identity] = len(self.streams)
            self.streams.append(stream)
            self.first_rows.append(self.num_rows)
            self.num_rows += stream.num_rows
            for sums in stream.rows_of_sums:
                self.summed.append((stream, sums))
                self.slices[stream.identity, sums] = slice(self.num_counts, self.num_counts + sums.num_counts)
                self.num_counts += sums.num_counts
            self.totals += [stream] if stream.members else []
            self.__dict__.pop("merged", None)  # computed again
            self.replicated += [stream] if stream.is_replicated else []
            self.values += [(stream, name, value) for name, value in stream.values.items()]
            self.channels += [(stream, name, statistic) for name, statistic in stream.channels.items()]
            self.units += [(stream, name) for name in stream.units]

    def keys_of_failed(self, raised: Flags) -> list[Key]:
        """The keys of the values that could not be computed, and of the parts of those that are dicts."""
        failed = [(stream, name) for stream, name, _value in itertools.compress(self.values, raised)]
        parts = [
            part.series[part_name]
            for stream, name in failed
            for part, part_name, _value in self.values
            if part.origin is not None and part.origin.identity == stream.identity
            if part_name.startswith(f"{name}.") and part_name not in stream.values
        ]
        return [*parts, *(stream.series[name] for stream, name in failed)]

    def slices_of(self, bins: Bins) -> dict[Stream, slice]:
        """Slices of ``Numbers.counts`` with the counts in a set of bins, by stream."""
        return {stream: self.slices[stream.identity, bins] for stream, sums in self.summed if sums == bins}

    def columns_of_units(self, num_units: Sequence[tuple[Stream, int]]) -> NDArray[np.intp]:
        """Indices in ``Numbers.counts`` of the units of some streams, stream by stream; -1 for a stream that is not known.

        They are looked up again only if streams or numbers of units have changed since the last step.
        """
        if self._columns_of_units[0] != num_units or -1 in self._columns_of_units[1]:
            slices = [(self.slices.get((stream.identity, UNITS)), num) for stream, num in num_units]
            columns = [np.full(num, -1) if where is None else np.arange(where.start, where.start + num) for where, num in slices]
            self._columns_of_units = num_units, np.concatenate(columns).astype(np.intp)
        return self._columns_of_units[1]

    def rows_of_units(self, counts: Array) -> Array:
        """The rows of :attr:`units` in the counts of a step, shape ``(units, num_counts)``."""
        starts = [self.slices[stream.identity, UNITS].start for stream, _name in self.units]
        return counts[np.add.outer(np.array(starts, np.intp), np.arange(UNITS.num_counts))]

    def order_of(self, rows: Mapping[Stream, int]) -> tuple[Flags, NDArray[np.int64]]:
        """Flags of the observed streams, and for each row of the layout its row in the table, or -1.

        It is computed again only if rows or streams have changed since the last step.
        """
        if self._order[0] != rows or len(self._order[1]) != len(self.streams):
            observed, order = np.zeros(len(self.streams)), np.full(self.num_rows, -1)
            for stream, row in rows.items():
                position = self.positions.get(stream.identity)
                if position is not None:
                    first = self.first_rows[position]
                    observed[position] = 1.0
                    order[first : first + stream.num_rows] = range(row, row + stream.num_rows)
            self._order = dict(rows), observed, order
        return self._order[1], self._order[2]

    @functools.cached_property
    def merged(self) -> MergedTotals:
        """The indices that the numbers of totals are merged by."""
        # The layout lacks states of optimizers that no rank has observed.
        present = [(total, [member for member in total.members if member.identity in self.positions]) for total in self.totals]
        totals = [(total, members) for total, members in present if members]
        groups = [
            (part, self.positions[total.identity], [self.positions[member.identity] for member in members])
            for total, members in totals
            for part in range(total.num_rows)
        ]
        return MergedTotals(
            rows=np.array([self.first_rows[position] + part for part, position, _members in groups]),
            positions=np.array([position for _part, position, _members in groups]),
            sources=np.array([self.first_rows[member] + part for part, _position, members in groups for member in members]),
            members=np.array([member for _part, _position, members in groups for member in members]),
            first=np.cumsum([0, *(len(members) for _part, _position, members in groups[:-1])]),
            counted=[
                (self.slices[total.identity, bins], [self.slices[member.identity, bins] for member in members])
                for total, members in totals
                for bins in total.counted_bins
            ],
        )


class MergedTotals(NamedTuple):
    """The indices that totals are merged by: a group of rows for each row of a total."""

    rows: Rows
    """Rows of totals."""
    positions: Rows
    """Positions of the totals of these rows."""
    sources: Rows
    """Rows of the members, one group after the other."""
    members: Rows
    """Positions of the members of these rows."""
    first: Rows
    """Start of each group."""
    counted: Sequence[tuple[slice, Sequence[slice]]]
    """Rows of counts of totals and of their members."""
