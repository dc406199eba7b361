"""The order of streams that all ranks share, the numbers of a step in it, how moments become statistics, and the state between steps."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

from lightning_module_monitor.kernels.bins_of_floats import Bins
from lightning_module_monitor.kernels.moments import Array, Moments, Need, merged_groups
from lightning_module_monitor.statistics.channels import ChannelStatistic, ChannelSums, Recent, recent_units
from lightning_module_monitor.statistics.fine_counts import FineCounts
from lightning_module_monitor.statistics.functions import Aggregate, Value
from lightning_module_monitor.statistics.stream import BASE, COMPARED_ROWS, OWN, Identity, Stream

Flags: TypeAlias = NDArray[np.float64]
"""0 or 1 for each item."""

Rows: TypeAlias = NDArray[np.int64]
"""Indices of rows or of streams in a layout."""

NO_MOMENTS: Array = torch.stack(tuple(Moments.empty(1))).numpy()
"""The moments of an empty tensor, shape ``(fields, 1)``."""


class Layout:
    """Streams in the same order on every rank: the planned ones, then those first observed during training.

    Attributes:
        streams: All streams, in order.
        positions: The index of each stream, by identity.
        first_rows: The first row of each stream in the table of moments.
        num_rows: Number of rows.
        summed: Streams whose counts or sums are added over ranks, each with the sort of its row.
        slices: Where these rows are in ``Numbers.counts``, which has ``num_counts`` elements.
        replicated: Streams whose tensors are expected to be equal on every rank.
        values: Functions and values, each with its stream and name.
        channels: Statistics of channels, likewise.
        totals: Streams with members; they are merged after the reduction over ranks.
    """

    def __init__(self, streams: Iterable[Stream] = ()) -> None:
        self.streams: list[Stream] = []
        self.positions: dict[Identity, int] = {}
        self.first_rows: list[int] = []
        self.num_rows = 0
        self.summed: list[tuple[Stream, Bins | ChannelSums]] = []
        self.slices: dict[tuple[Identity, Bins | ChannelSums], slice] = {}
        self.num_counts = 0
        self.replicated: list[Stream] = []
        self.values: list[tuple[Stream, str, Value]] = []
        self.channels: list[tuple[Stream, str, ChannelStatistic]] = []
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
            for sort in stream.rows_of_sums:
                self.summed.append((stream, sort))
                self.slices[stream.identity, sort] = slice(self.num_counts, self.num_counts + sort.num_counts)
                self.num_counts += sort.num_counts
            self.totals += [stream] if stream.members else []
            self.__dict__.pop("_merged", None)  # computed again
            self.replicated += [stream] if stream.is_replicated else []
            self.values += [(stream, name, value) for name, value in stream.values.items()]
            self.channels += [(stream, name, statistic) for name, statistic in stream.channels.items()]

    def keys_of_failed(self, raised: Flags) -> set[str]:
        """The keys of the values that could not be computed, and of the parts of those that are dicts."""
        failed = [(stream, name) for stream, name, _value in itertools.compress(self.values, raised)]
        parts = [
            part.keys[part_name]
            for stream, name in failed
            for part, part_name, _value in self.values
            if part.origin is not None and part.origin.identity == stream.identity
            if part_name.startswith(f"{name}.") and part_name not in stream.values
        ]
        return {*parts, *(stream.keys[name] for stream, name in failed)}

    def rows_of_counts(self, bins: Bins, numbers: Numbers) -> dict[Stream, Array]:
        """The rows of counts in a set of bins, by stream."""
        return {stream: numbers.counts[self.slices[stream.identity, bins]] for stream, sort in self.summed if sort == bins}

    def order_of(self, rows: Mapping[Stream, int]) -> tuple[Flags, NDArray[np.int64]]:
        """Which streams were observed, and for each row of the layout its row in the table; -1 where there is none.

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

    def merge_totals(self, numbers: Numbers) -> None:
        """Fill in the numbers of streams with members, from those of their members, which all ranks have reduced before."""
        if not self.totals:
            return
        merged = self._merged
        numbers.moments[:, merged.rows] = merged_groups(numbers.moments[:, merged.sources], merged.first)
        flags = np.stack([numbers.observed, numbers.failed])
        flags[:, merged.positions] = np.maximum.reduceat(flags[:, merged.members], merged.first, axis=1)
        numbers.observed, numbers.failed = flags
        for total, members in merged.counted:
            numbers.counts[total] = sum(numbers.counts[member] for member in members)

    @functools.cached_property
    def _merged(self) -> _Merged:
        # The layout lacks states of optimizers that no rank has observed.
        present = [(total, [member for member in total.members if member.identity in self.positions]) for total in self.totals]
        totals = [(total, members) for total, members in present if members]
        groups = [
            (part, self.positions[total.identity], [self.positions[member.identity] for member in members])
            for total, members in totals
            for part in range(total.num_rows)
        ]
        return _Merged(
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


class _Merged(NamedTuple):
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
    """Where each group begins."""
    counted: Sequence[tuple[slice, Sequence[slice]]]
    """Rows of counts of totals and of their members."""


@dataclass
class Numbers:
    """What one rank, or all ranks together, have observed in a step: on the host, float64, in the order of a layout.

    The fields of ``LARGEST`` are merged over ranks by their maximum, those of ``SUMMED`` by their sum, and moments as moments.
    """

    moments: Array
    """Shape ``(fields, rows)``."""
    observed: Flags
    """Whether a stream has moments; shape ``(streams,)``."""
    failed: Flags
    """Whether the statistics, histogram or units of a stream could not be computed."""
    called: Flags
    """Whether there is a result, shape ``(values,)``."""
    raised: Flags
    """Whether a result could not be computed."""
    extremes: Array
    """The largest result; where the aggregate is ``min``, minus the least. Shape ``(values,)``."""
    has_nan: Flags
    """Whether a result is NaN."""
    is_lost: Flags
    """Whether an error has ended the monitoring of the step, shape ``(1,)``."""
    has_more: Flags
    """Whether something was observed that the layout lacks, shape ``(1,)``."""
    counts: Array
    """Rows of counts, and of sums of channels, one after the other: shape ``(counts,)``."""
    totals: Array
    """Sum of the results, times their weights where the aggregate is ``mean``; shape ``(values,)``."""
    weights: Array
    num_results: Array
    num_errors: Array
    """Shape ``(1,)``."""

    def merged(self, aggregates: Sequence[Aggregate]) -> list[float]:
        """The value of each result, by its aggregate; NaN for an aggregate of the user's."""
        with np.errstate(all="ignore"):
            means = self.totals / self.weights
        # Times its weight and divided by it, a value could round.
        means = np.where((self.num_results == 1) & (self.weights != 0) & (self.has_nan == 0), self.extremes, means)
        extremes = np.where(self.has_nan > 0, np.nan, self.extremes)
        by_name = {"mean": means, "sum": self.totals, "max": extremes, "min": -extremes}
        return [float(by_name[aggregate][index]) if isinstance(aggregate, str) else math.nan for index, aggregate in enumerate(aggregates)]


LARGEST = ("observed", "failed", "called", "raised", "extremes", "has_nan", "is_lost", "has_more")
SUMMED = ("counts", "totals", "weights", "num_results", "num_errors")


@dataclass
class Observed:
    """What one rank has observed in a step, on the host, in the order in which it came."""

    streams: Sequence[Stream] = ()
    """Streams with any moments, counts, results or errors."""
    rows: Mapping[Stream, int] = field(default_factory=dict)
    """First row of each stream that has moments."""
    moments: Array = field(default_factory=lambda: NO_MOMENTS)
    """Shape ``(fields, rows + 1)``; the last row is that of an empty tensor."""
    counts: Mapping[tuple[Identity, Bins | ChannelSums], Array] = field(default_factory=dict)
    """Rows of counts, by stream and set of bins, and of sums of channels."""
    results: Mapping[str, tuple[str, Sequence[float], Sequence[float]]] = field(default_factory=dict)
    """Aggregate, results, and their weights, by key, where the aggregate has a name."""
    whole_results: Mapping[str, tuple[Aggregate, Tensor]] = field(default_factory=dict)
    """Aggregate of the user's, and what it receives, by key."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Torchmetrics objects that received tensors, by key."""
    final: Mapping[str, float] = field(default_factory=dict)
    """What they computed, by key, where this is the only rank."""
    parts: frozenset[Identity] = frozenset()
    """Streams of which this rank holds its own shard."""
    failed: frozenset[str] = frozenset()
    """Keys of outputs that could not be computed."""
    failed_streams: frozenset[Identity] = frozenset()
    """Streams of which a tensor could not be measured."""
    num_errors: int = 0
    is_lost: bool = False

    def numbers(self, layout: Layout, *, has_more: bool = False) -> Numbers:
        """All numbers in the order of a layout; what the layout lacks is left out."""
        observed, rows = layout.order_of(self.rows)
        summed = [self.counts.get((stream.identity, sort), np.zeros(sort.num_counts)) for stream, sort in layout.summed]
        keys = [stream.keys[name] for stream, name, _value in layout.values]
        return Numbers(
            moments=self.moments[:, rows],
            observed=observed,
            failed=_flags(stream.identity in self.failed_streams for stream in layout.streams),
            called=_flags(key in self.results or key in self.whole_results or key in self.metrics for key in keys),
            raised=_flags(key in self.failed for key in keys),
            is_lost=_flags([self.is_lost]),
            has_more=_flags([has_more]),
            counts=np.concatenate(summed) if summed else np.zeros(0),
            num_errors=_flags([self.num_errors]),
            **self._numbers_of_results(keys),
        )

    def _numbers_of_results(self, keys: Sequence[str]) -> dict[str, Array]:
        """The fields of :class:`Numbers` that named aggregates are merged from, each of shape ``(keys,)``."""
        extremes, (has_nan, totals, all_weights, num_results) = np.full(len(keys), -np.inf), np.zeros((4, len(keys)))
        for index, key in enumerate(keys):
            if key in self.results:
                aggregate, values, weights = self.results[key]
                weighted = (value * weight for value, weight in zip(values, weights, strict=True))
                totals[index] = sum(weighted if aggregate == "mean" else values)
                all_weights[index], num_results[index], has_nan[index] = sum(weights), len(values), any(map(math.isnan, values))
                if not has_nan[index]:
                    extremes[index] = -min(values) if aggregate == "min" else max(values)
        return {"extremes": extremes, "has_nan": has_nan, "totals": totals, "weights": all_weights, "num_results": num_results}


def _flags(values: Iterable[float]) -> Flags:
    return np.array([*values], dtype=np.float64)


class _Group(NamedTuple):
    """Streams with the same statistics, which are finished together."""

    streams: Sequence[Stream]
    parts: Sequence[np.ndarray]
    """For each row offset the rows of all streams: int64, shape ``(streams,)``."""
    keys: Sequence[str]
    """Of every statistic of the first stream, of the second, and so on."""


class Finisher:
    """Finishes the statistics of some streams, given with their first rows."""

    def __init__(self, rows: Sequence[tuple[Stream, int]]) -> None:
        self.rows = rows
        alike: defaultdict[tuple[str, ...], list[tuple[Stream, int]]] = defaultdict(list)
        for stream, row in rows:
            if stream.statistics:
                alike[tuple(stream.statistics)].append((stream, row))
        self._groups: list[_Group] = []
        for members in alike.values():
            first = members[0][0]
            parts = [np.array([row + part for _stream, row in members]) for part in range(first.num_rows)]
            keys = [stream.keys[name] for stream, _row in members for name in first.statistics]
            self._groups.append(_Group([stream for stream, _row in members], parts, keys))

    def values(
        self, moments: Array, counts: Mapping[Stream, Array], fail: Callable[[Stream, str, str, Exception], None]
    ) -> dict[str, float]:
        """Statistics by key.

        Args:
            moments: Of all rows, shape ``(fields, rows)``, float64; written into.
            counts: Rows of counts in fine bins, of the streams that have a statistic of them.
            fail: Receives a statistic that could not be finished: a stream that has it, its name, "its moments", the error. Its values
                are NaN.
        """
        values: dict[str, float] = {}
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
                values.update(zip(group.keys, numbers.ravel().tolist(), strict=True))
        return values


def nan_where_empty(fields: Array) -> Array:
    """Make mean, spread and extremes of empty tensors NaN, in place of what merging starts from.

    ``fields`` of all rows' moments, shape ``(fields, rows)``, float64, is written into and returned.
    """
    if 0.0 in fields[0].tolist():
        fields[np.ix_(_OF_ELEMENTS, fields[0] == 0)] = np.nan
    return fields


_OF_ELEMENTS = [Moments._fields.index(name) for name in ("mean", "deviations", "third", "fourth", "maximum", "minimum")]
"""The moments that are undefined without an element."""


class SeriesState:
    """State kept between steps: the layout, copies of torchmetrics objects, and which units were alive.

    Args:
        streams: The planned streams.
        units: Which units were alive in the last monitored steps, by key; several states may share them.
    """

    def __init__(self, streams: Iterable[Stream] = (), units: defaultdict[str, Recent] | None = None) -> None:
        self.layout = Layout(streams)
        self.metrics: dict[str, Metric] = {}
        """The copy of the user's torchmetrics object by key."""
        self.units: defaultdict[str, Recent] = defaultdict(recent_units) if units is None else units
        self._finisher = Finisher(())

    def finisher(self, is_observed: Flags) -> Finisher:
        """Finishes the statistics of the observed streams; the same object while these do not change."""
        rows = [*itertools.compress(zip(self.layout.streams, self.layout.first_rows, strict=True), is_observed)]
        if self._finisher.rows != rows:
            self._finisher = Finisher(rows)
        return self._finisher
