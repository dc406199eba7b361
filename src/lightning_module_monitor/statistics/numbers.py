"""The numbers of a step: what one rank has observed, and of one rank or of all together in the order of a layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

from lightning_module_monitor.kernels.moments import Array, Moments, merged_groups
from lightning_module_monitor.keys import Key
from lightning_module_monitor.statistics.functions import Aggregate
from lightning_module_monitor.statistics.layout import Flags, Layout
from lightning_module_monitor.statistics.spectral_statistics import Source, SpectralStatistic
from lightning_module_monitor.statistics.stream import Identity, Stream, Sums
from lightning_module_monitor.statistics.units import MAX_UNITS

NO_MOMENTS: Array = torch.stack(tuple(Moments.empty(1))).numpy()
"""The moments of an empty tensor, shape ``(fields, 1)``."""


@dataclass
class Numbers:
    """The observations of a step, of one rank or of all together: on the host, float64, in the order of a layout.

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

    def merge_totals(self, layout: Layout) -> None:
        """Fill in the numbers of streams with members, from those of their members, which all ranks have reduced before."""
        if not layout.totals:
            return
        merged = layout.merged
        self.moments[:, merged.rows] = merged_groups(self.moments[:, merged.sources], merged.first)
        flags = np.stack([self.observed, self.failed])
        flags[:, merged.positions] = np.maximum.reduceat(flags[:, merged.members], merged.first, axis=1)
        self.observed, self.failed = flags
        for total, members in merged.counted:
            self.counts[total] = sum(self.counts[member] for member in members)

    def results(self, layout: Layout) -> tuple[NDArray[np.bool_], Array]:
        """Which functions and values have a result that is merged by the name of an aggregate, and all results, shape ``(values,)``."""
        values = [value for _stream, _name, value in layout.values]
        is_merged = np.array([value.is_merged_by_name for value in values], bool) & (self.called > 0)
        return is_merged, np.array(self.merged([value.aggregate for value in values]))

    def channels(self, layout: Layout) -> dict[Key, float]:
        """The statistics of channels by key."""
        rows = [
            (stream.series[name], statistic, layout.slices[stream.identity, statistic.sums]) for stream, name, statistic in layout.channels
        ]
        return {key: statistic.finish(self.counts[where]) for key, statistic, where in rows if self.counts[where].any()}

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
    """The observations of one rank in a step, on the host, in the order in which they were made."""

    streams: Sequence[Stream] = ()
    """Streams with any moments, counts, results or errors."""
    rows: Mapping[Stream, int] = field(default_factory=dict)
    """First row of each stream that has moments."""
    moments: Array = field(default_factory=lambda: NO_MOMENTS)
    """Shape ``(fields, rows + 1)``; the last row is that of an empty tensor."""
    counts: Mapping[tuple[Identity, Sums], Array] = field(default_factory=dict)
    """Rows of counts, by stream and set of bins, and of sums of channels."""
    num_units: Sequence[tuple[Stream, int]] = ()
    """Streams with units, and their numbers of units."""
    is_alive: Array = field(default_factory=lambda: np.empty(0))
    """Whether each unit of these streams was alive, 0 or 1."""
    results: Mapping[str, tuple[str, Sequence[float], Sequence[float]]] = field(default_factory=dict)
    """Aggregate, results, and their weights, by key, where the aggregate has a name."""
    whole_results: Mapping[str, tuple[Aggregate, Tensor]] = field(default_factory=dict)
    """Aggregate of the user's, and what it receives, by key."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Torchmetrics objects that received tensors, by key."""
    final: Mapping[Key, float] = field(default_factory=dict)
    """Results of torchmetrics objects by key; only on a single rank."""
    parts: frozenset[Identity] = frozenset()
    """Streams of which this rank holds its own shard."""
    spectra: Mapping[tuple[Identity, Source], Array] = field(default_factory=dict)
    """Rows of numbers that singular values are computed from, by stream and source."""
    failed: frozenset[str] = frozenset()
    """Keys of outputs that could not be computed."""
    failed_streams: frozenset[Identity] = frozenset()
    """Streams of which a tensor could not be measured."""
    num_errors: int = 0
    is_lost: bool = False

    def numbers(self, layout: Layout, *, has_more: bool = False) -> Numbers:
        """All numbers in the order of a layout; what the layout lacks is left out."""
        observed, rows = layout.order_of(self.rows)
        keys = [stream.keys[name] for stream, name, _value in layout.values]
        of_spectra = {
            stream.keys[name]
            for stream, name, value in (layout.values if self.spectra else ())
            if isinstance(value, SpectralStatistic) and (stream.identity, value.source(stream.kind)) in self.spectra
        }
        return Numbers(
            moments=self.moments[:, rows],
            observed=observed,
            failed=_flags([stream.identity in self.failed_streams for stream in layout.streams]),
            called=_flags([key in self.results or key in self.whole_results or key in self.metrics or key in of_spectra for key in keys]),
            raised=_flags([key in self.failed for key in keys]),
            is_lost=_flags([self.is_lost]),
            has_more=_flags([has_more]),
            counts=self._counts(layout),
            num_errors=_flags([self.num_errors]),
            **self._numbers_of_results(keys),
        )

    def _counts(self, layout: Layout) -> Array:
        """All rows of counts, sums and units, one after the other, shape ``(layout.num_counts,)``."""
        counts = np.zeros(layout.num_counts)
        for name, row in self.counts.items():
            if name in layout.slices:
                counts[layout.slices[name]] = row
        if self.num_units:
            columns = layout.columns_of_units(self.num_units)
            is_known = columns >= 0
            counts[columns[is_known]], counts[columns[is_known] + MAX_UNITS] = self.is_alive[is_known], 1.0
        return counts

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


def _flags(values: Sequence[float]) -> Flags:
    return np.array(values, dtype=np.float64)
