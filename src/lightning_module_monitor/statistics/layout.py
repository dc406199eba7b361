"""Where the numbers of each stream are, in an order that every rank has alike; and all numbers of a step in this order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_module_monitor.histogram import NUM_COUNTS
from lightning_module_monitor.kernels.moments import Moments
from lightning_module_monitor.statistics.functions import Results, Value
from lightning_module_monitor.statistics.registry import MAX_UNITS
from lightning_module_monitor.statistics.spec import Identity, MetricSpec

ABSENT = -1.0
"""Stands for a unit that a rank does not have: less than 0, dead, and 1, alive."""


class Layout:
    """Streams in an order that every rank has alike: those that are planned, and those that turn up later.

    Attributes:
        streams: All of them, in their order, by identity.
        first_rows: The first row of each in the table of moments, by identity.
        num_rows: Number of rows.
        counted: Those with a histogram.
        with_units: Those with statistics of units.
        replicated: Those that every rank is expected to have alike.
        values: Functions and values, each with its stream and name.
    """

    def __init__(self, streams: Iterable[MetricSpec] = ()) -> None:
        self.streams: dict[Identity, MetricSpec] = {}
        self.first_rows: dict[Identity, int] = {}
        self.num_rows = 0
        self.counted: list[MetricSpec] = []
        self.with_units: list[MetricSpec] = []
        self.replicated: list[MetricSpec] = []
        self.values: list[tuple[MetricSpec, str, Value]] = []
        self.add(streams)

    def add(self, streams: Iterable[MetricSpec]) -> None:
        """Add streams at the end; those that are known are left out."""
        for stream in streams:
            if stream.identity in self.streams:
                continue
            self.streams[stream.identity], self.first_rows[stream.identity] = stream, self.num_rows
            self.num_rows += stream.num_rows
            self.counted += [stream] if stream.histograms else []
            self.with_units += [stream] if stream.units else []
            self.replicated += [stream] if stream.is_replicated else []
            self.values += [(stream, name, value) for name, value in stream.values.items()]


@dataclass
class Numbers:
    """What one rank, or all ranks together, have observed in a step: on the host, float64, in the order of a layout.

    The fields of ``LARGEST`` are merged over ranks by their maximum, those of ``SUMMED`` by their sum, and moments as moments.
    """

    moments: Moments
    """Shape ``(rows,)``."""
    observed: Tensor
    """Whether a stream has moments, 0 or 1; shape ``(streams,)``."""
    failed: Tensor
    """Whether the statistics of a stream could not be computed."""
    called: Tensor
    """Whether there is a result, shape ``(values,)``."""
    raised: Tensor
    """Whether a result could not be computed."""
    extremes: Tensor
    """The largest result; where the aggregate is ``min``, minus the least. Shape ``(values,)``."""
    has_nan: Tensor
    """Whether a result is NaN."""
    units: Tensor
    """Which units were alive, 1 or 0, or ``ABSENT``; shape ``(streams with units, MAX_UNITS)``."""
    is_lost: Tensor
    """Whether an error has ended the monitoring of the step, shape ``()``."""
    has_more: Tensor
    """Whether something was observed that the layout lacks, shape ``()``."""
    counts: Tensor
    """Of the bins, shape ``(streams with histograms, NUM_COUNTS)``."""
    totals: Tensor
    """Sum of the results, times their weights where the aggregate is ``mean``; shape ``(values,)``."""
    weights: Tensor
    num_results: Tensor
    num_errors: Tensor
    """Shape ``()``."""

    def value(self, index: int, aggregate: str) -> float:
        """A result, from what is known of it."""
        if aggregate in ("min", "max"):
            return float("nan") if self.has_nan[index] else float(self.extremes[index]) * (-1 if aggregate == "min" else 1)
        if aggregate == "mean" and self.num_results[index] == 1 and self.weights[index] and not self.has_nan[index]:
            return float(self.extremes[index])  # times its weight and divided by it, a value could round
        return float(self.totals[index] / self.weights[index] if aggregate == "mean" else self.totals[index])


LARGEST = ("observed", "failed", "called", "raised", "extremes", "has_nan", "units", "is_lost", "has_more")
SUMMED = ("counts", "totals", "weights", "num_results", "num_errors")


@dataclass
class Observed:
    """What one rank has observed in a step, on the host, in the order in which it came."""

    streams: Sequence[MetricSpec] = ()
    """Those that anything is known of."""
    rows: Mapping[MetricSpec, int] = field(default_factory=dict)
    """First row of those that have moments."""
    moments: Tensor = field(default_factory=lambda: torch.stack(tuple(Moments.of_nothing(1))))
    """Shape ``(fields, rows + 1)``; the last row is that of an empty tensor."""
    counts: Mapping[Identity, Tensor] = field(default_factory=dict)
    """Of the bins, shape ``(NUM_COUNTS,)`` each."""
    units: Mapping[Identity, Tensor] = field(default_factory=dict)
    """Which units were alive, 0 or 1, as :func:`~lightning_module_monitor.statistics.registry.is_alive` returns it."""
    results: Mapping[str, Results] = field(default_factory=dict)
    """By key."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Torchmetrics objects that received tensors, by key."""
    final: Mapping[str, float] = field(default_factory=dict)
    """What they computed, by key, where this is the only rank."""
    parts: frozenset[Identity] = frozenset()
    """Those of which this rank has a part that is its own to count."""
    failed: frozenset[str] = frozenset()
    """Keys of what could not be computed."""
    num_errors: int = 0
    is_lost: bool = False

    def numbers(self, layout: Layout, *, has_more: bool = False) -> Numbers:
        """All numbers in the order of a layout; what the layout lacks is left out."""
        observed, units = _zeros(len(layout.streams)), torch.full((len(layout.with_units), MAX_UNITS), ABSENT, dtype=torch.float64)
        rows = torch.full((layout.num_rows,), self.moments.shape[1] - 1, dtype=torch.int64, device="cpu")
        places = {identity: place for place, identity in enumerate(layout.streams)}
        for stream, row in self.rows.items():
            first = layout.first_rows.get(stream.identity)
            if first is not None:
                observed[places[stream.identity]] = 1.0
                rows[first : first + stream.num_rows] = torch.arange(row, row + stream.num_rows)
        for of_stream, stream in zip(units, layout.with_units, strict=True):
            alive = self.units.get(stream.identity)
            if alive is not None:
                of_stream[: len(alive)] = alive
        counts = [self.counts.get(stream.identity, _NO_COUNTS) for stream in layout.counted]
        keys = [stream.keys[name] for stream, name, _value in layout.values]
        named = [self.results.get(key) for key in keys]
        return Numbers(
            moments=Moments(*self.moments[:, rows]),
            observed=observed,
            failed=_flags(not self.failed.isdisjoint(stream.moment_keys) for stream in layout.streams.values()),
            called=_flags(key in self.results or key in self.metrics for key in keys),
            raised=_flags(key in self.failed for key in keys),
            units=units,
            is_lost=_flags([self.is_lost]),
            has_more=_flags([has_more]),
            counts=torch.stack(counts) if counts else _zeros(0, NUM_COUNTS),
            num_errors=_flags([self.num_errors]),
            **_numbers_of_results([None if one is None or not isinstance(one.aggregate, str) else one for one in named]),
        )


_NO_COUNTS = torch.zeros(NUM_COUNTS, dtype=torch.float64, device="cpu")


def _numbers_of_results(results: Sequence[Results | None]) -> dict[str, Tensor]:
    """The fields of :class:`Numbers` that named aggregates are merged from, in a few operations; each float64, shape ``(results,)``."""
    there = [(place, one) for place, one in enumerate(results) if one is not None and one.values]
    index = torch.tensor([place for place, one in there for _value in one.values], dtype=torch.int64, device="cpu")
    values = torch.stack([value for _place, one in there for value in one.values]) if there else _zeros(0)
    weights = _flags(weight for _place, one in there for weight in one.weights)
    is_mean = _flags(one.aggregate == "mean" for _place, one in there for _value in one.values) > 0
    sign = _flags(-1.0 if one.aggregate == "min" else 1.0 for _place, one in there for _value in one.values)
    nothing, is_nan = _zeros(len(results)), values.isnan()
    least = torch.full_like(nothing, -torch.inf)
    return {
        "extremes": least.scatter_reduce(0, index, (values * sign).masked_fill(is_nan, -torch.inf), "amax"),
        "has_nan": nothing.scatter_reduce(0, index, is_nan.double(), "amax"),
        "totals": nothing.index_add(0, index, torch.where(is_mean, values * weights, values)),
        "weights": nothing.index_add(0, index, weights),
        "num_results": nothing.index_add(0, index, torch.ones_like(values)),
    }


def _flags(values: Iterable[float]) -> Tensor:
    return torch.tensor([*values], dtype=torch.float64, device="cpu")


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device="cpu")
