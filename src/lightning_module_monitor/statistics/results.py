"""State of series from step to step, and what one rank, or all ranks together, have observed in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, distributed
from torchmetrics import Metric

from lightning_module_monitor.kernels.moments import Moments
from lightning_module_monitor.record import NUM_COUNTS
from lightning_module_monitor.statistics.functions import Results, UserFunction
from lightning_module_monitor.statistics.layout import Layout
from lightning_module_monitor.statistics.spec import Identity, MetricSpec
from lightning_module_monitor.statistics.units import Recent, memory


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
    """What units did, as :func:`~lightning_module_monitor.statistics.units.is_alive` returns it."""
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


class Reducer(Protocol):
    """Reduces what each rank has observed; see :class:`~lightning_module_monitor.distributed.reduce.DistributedReducer`."""

    group: distributed.ProcessGroup | None
    """The process group in which the ranks meet; ``None``: the default one."""
    is_first_sharing: bool
    """Whether this is the first of the ranks that share their input."""

    def reduce(self, local: Callable[[], LocalResult], on_error: Callable[[MetricSpec, Exception], None]) -> GlobalResult:
        """What all ranks have together; every rank calls it. ``local`` makes this rank's part, and may fail."""

    def gather(self, results: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The results of all ranks, for an aggregate of the user's."""
