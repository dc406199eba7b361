"""What one rank, or all ranks together, have observed in a step; the rows of its moments, and how they become values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_module_monitor.histogram import NUM_COUNTS
from lightning_module_monitor.kernels.moments import Array, Moments
from lightning_module_monitor.statistics.functions import Results, UserFunction
from lightning_module_monitor.statistics.registry import Recent, memory
from lightning_module_monitor.statistics.spec import BASE, CURRENT, OWN, PRODUCT, Identity, MetricSpec


class _Group(NamedTuple):
    """Specifications with the same statistics, which are finished together."""

    first: MetricSpec
    parts: Sequence[np.ndarray]
    """For each row of a specification those of all of them: int64, shape ``(specifications,)``."""
    keys: Sequence[str]
    """Of every statistic of the first specification, of the second, and so on."""


class Layout:
    """How moments become statistics, by the first row of each specification."""

    def __init__(self, rows: Sequence[tuple[MetricSpec, int]]) -> None:
        alike: defaultdict[tuple[str, ...], list[tuple[MetricSpec, int]]] = defaultdict(list)
        for spec, row in rows:
            if spec.statistics:
                alike[tuple(spec.statistics)].append((spec, row))
        self._groups: list[_Group] = []
        for members in alike.values():
            first = members[0][0]
            parts = [np.array([row + part for _spec, row in members]) for part in range(first.num_rows)]
            self._groups.append(_Group(first, parts, [key for spec, _row in members for key in spec.statistic_keys]))
        self._keys = [key for group in self._groups for key in group.keys]
        """Of a key that several specifications have, the last value counts."""

    def finish(
        self, table: Tensor, whole_tokens: Collection[int], fail: Callable[[MetricSpec, str, str, Exception], None]
    ) -> dict[str, float]:
        """Statistics by key.

        Args:
            table: The fields of all rows' moments, shape ``(fields, rows)``, float64, on the host.
            whole_tokens: Rows that are one token each, of which several ranks have parts.
            fail: Receives a statistic that could not be finished: a specification that has it, its name, "its moments", the error. Its
                values are NaN.
        """
        numbers, start = np.empty(len(self._keys)), 0
        with np.errstate(all="ignore"):  # what there is too little of is NaN, as torch has it
            fields = nan_where_empty(table.numpy())
            if whole_tokens:
                fields = _with_whole_tokens(fields, np.array([*whole_tokens], dtype=np.int64))
            for group in self._groups:
                end = start + len(group.keys)
                columns = numbers[start:end].reshape(-1, len(group.first.statistics))
                parts = [Moments(*fields[:, index]) for index in group.parts]
                for column, (name, one) in enumerate(group.first.statistics.items()):
                    taken = (CURRENT, BASE, PRODUCT) if one.paired else (OWN, BASE) if one.relative else (OWN,)
                    try:
                        columns[:, column] = one.finish(*[parts[part] for part in taken])
                    except Exception as error:  # one of the user's own
                        columns[:, column] = np.nan
                        fail(group.first, name, "its moments", error)
                start = end
        return dict(zip(self._keys, numbers.tolist(), strict=True))


def nan_where_empty(fields: Array) -> Array:
    """Make mean, spread and extremes of empty tensors NaN, in place of what merging starts from.

    ``fields`` of all rows' moments, shape ``(fields, rows)``, float64, is written into and returned.
    """
    if 0.0 in fields[0].tolist():
        fields[np.ix_(_OF_ELEMENTS, fields[0] == 0)] = np.nan
    return fields


_OF_ELEMENTS = [Moments._fields.index(name) for name in ("mean", "deviations", "third", "fourth", "maximum", "minimum")]
"""The moments that there are none of without an element."""


def _with_whole_tokens(fields: Array, index: np.ndarray) -> Array:
    """Of rows that are one token each, whose parts were measured as if they were whole: the norm of the whole."""
    changed: Array = fields.copy()
    moments = Moments(*changed)
    norm = np.sqrt(moments.squares[index])
    moments.tokens[index], moments.token_norm[index] = 1.0, norm
    moments.token_rms[index] = norm / np.sqrt(moments.elements[index])
    return changed


class SeriesState:
    """State from step to step: rows of specifications, copies of torchmetrics objects, and which units were alive.

    Several states may share ``units``.
    """

    def __init__(self, units: defaultdict[str, Recent] | None = None) -> None:
        self.specs: list[MetricSpec] = []
        """The specification of each row."""
        self.metrics: dict[str, Metric] = {}
        """The copy of the user's torchmetrics object by key."""
        self.units: defaultdict[str, Recent] = defaultdict(memory) if units is None else units
        """Which units were alive in the last monitored steps, by key."""
        self._first: dict[MetricSpec, int] = {}
        self._layout: tuple[Sequence[tuple[MetricSpec, int]], Layout] = (), Layout(())

    def first_row(self, spec: MetricSpec) -> int:
        """First row of a specification, the same in every step."""
        row = self._first.get(spec)
        if row is None:
            row = self._first[spec] = len(self.specs)
            self.specs += [spec] * spec.num_rows
        return row

    def layout(self, rows: Sequence[tuple[MetricSpec, int]]) -> Layout:
        """How these rows are finished; made anew only when they differ from those of the step before."""
        if self._layout[0] != rows:
            self._layout = rows, Layout(rows)
        return self._layout[1]


@dataclass
class LocalResult:
    """What one rank has observed in a step, on the device where the ranks meet."""

    specs: list[MetricSpec]
    """Those that anything is known of."""
    rows: Mapping[Identity, int]
    """First row of those that have moments."""
    moments: Moments
    """Shape ``(rows + 1,)``; the last row is that of an empty tensor."""
    counted: Mapping[Identity, int]
    """Row of those that have a histogram."""
    counts: Tensor
    """Float64, shape ``(counted rows + 1, NUM_COUNTS)``; the last row is zero."""
    results: Mapping[str, Results] = field(default_factory=dict)
    """What functions returned, by key."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Torchmetrics objects that received tensors, by key."""
    units: Mapping[Identity, Tensor] = field(default_factory=dict)
    """What units did, as :func:`~lightning_module_monitor.statistics.registry.is_alive` returns it."""
    parts: frozenset[Identity] = frozenset()
    """Those of which this rank has a part that is its own to count."""
    failed: frozenset[str] = frozenset()
    """Keys of what could not be computed."""
    num_errors: int = 0
    is_lost: bool = False
    """Whether an error has ended the monitoring of this step."""

    @classmethod
    def of_lost_step(cls) -> LocalResult:
        """What a rank contributes that has nothing: the other ranks wait for it."""
        counts = torch.zeros(1, NUM_COUNTS, dtype=torch.float64, device="cpu")
        return cls([], {}, Moments.of_nothing(1), {}, counts, is_lost=True)


@dataclass
class GlobalResult:
    """What all ranks have observed in a step, on the host, the same on every rank."""

    rows: Sequence[tuple[MetricSpec, int]]
    """Specifications that moments were taken for, each with its first row."""
    moments: Tensor
    """Float64, shape ``(NUM_FIELDS, rows)``."""
    counted: Sequence[tuple[MetricSpec, Tensor]]
    """Specifications that a histogram was taken for, with the counts, int64, shape ``(NUM_COUNTS,)``."""
    units: Sequence[tuple[MetricSpec, Tensor]]
    """Specifications that units were observed for, with what they did."""
    values: dict[str, float]
    """What functions gave, by key."""
    copied: frozenset[Identity] = frozenset()
    """Of these, ranks that share their input have the same, which is counted once."""
    unfinished: Sequence[tuple[MetricSpec, UserFunction]] = ()
    """Functions with results, on any rank, that an aggregate of the user's or a torchmetrics object makes a value of."""
    differing: Sequence[MetricSpec] = ()
    """Those that every rank is expected to have alike, and of which ranks have different values."""
    failed: Sequence[MetricSpec] = ()
    failed_keys: Sequence[str] = ()
    """Keys of functions that failed."""
    num_errors: int = 0
    is_lost: bool = False
