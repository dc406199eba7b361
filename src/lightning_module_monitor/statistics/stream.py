"""What is recorded of one kind at one site."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.record import MAX_STATISTIC_LENGTH, TRAIN, Key, fit_for_loggers
from lightning_module_monitor.statistics.functions import Function, Value
from lightning_module_monitor.statistics.registry import HistogramStatistic, Statistic, UnitStatistic

OWN, BASE, CURRENT, PRODUCT = range(4)
"""Row offsets of a stream in the table: the tensor, what it is relative to (the reference, of a difference), the model's tensor of a
difference, the product of both tensors."""

Output: TypeAlias = Statistic | HistogramStatistic | UnitStatistic | Value
"""What a stream records: a number made of moments, counts of bins, a number made of units, or the result of a function or a value."""

Identity: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Stream:
    """What all rules together record of one kind at one site. Streams are compared by identity.

    Attributes:
        kind: Its kind.
        site: Name of the module or parameter.
        outputs: What is recorded, by the name that it has in the key.
        stage: ``train``, ``validation``, ``test`` or ``predict``.
        prefix: Put before every key.
        is_compared: Whether ranks that share their input find out whether they have the same of it, which then counts once.
        is_replicated: Whether every rank is expected to have the same of it, which then counts once.
        origin: The stream that this one is a further site of.
    """

    kind: str
    site: str
    outputs: Mapping[str, Output] = field(default_factory=dict)
    stage: str = TRAIN
    prefix: str = ""
    is_compared: bool = False
    is_replicated: bool = False
    origin: Stream | None = None

    @functools.cached_property
    def identity(self) -> Identity:
        """What distinguishes it from all others, the same on every rank."""
        return self.kind, self.site, self.stage, self.prefix, *self.outputs

    @functools.cached_property
    def statistics(self) -> dict[str, Statistic]:
        """The outputs that are made of moments."""
        return {name: output for name, output in self.outputs.items() if isinstance(output, Statistic)}

    @functools.cached_property
    def histograms(self) -> tuple[str, ...]:
        """Names of the histograms: none, or the one that ``STATISTICS`` has."""
        return tuple(name for name, output in self.outputs.items() if isinstance(output, HistogramStatistic))

    @functools.cached_property
    def units(self) -> tuple[str, ...]:
        """Names of the statistics of units."""
        return tuple(name for name, output in self.outputs.items() if isinstance(output, UnitStatistic))

    @functools.cached_property
    def values(self) -> dict[str, Value]:
        """The outputs that are results of functions, or are computed elsewhere."""
        return {name: output for name, output in self.outputs.items() if isinstance(output, Value)}

    @functools.cached_property
    def functions(self) -> dict[str, Function]:
        """The functions that get the stream's tensors."""
        return {name: output for name, output in self.outputs.items() if isinstance(output, Function)}

    @functools.cached_property
    def needs(self) -> int:
        """What its statistics are finished from, bits of ``Need``."""
        needs = functools.reduce(operator.or_, (output.needs for output in self.statistics.values()), Need.NOTHING)
        # These distinguish parts of a tensor, which may well have the same histogram, or the same result of a function.
        compared = Need.MEAN | Need.SQUARES | Need.EXTREMES if self.is_compared else 0
        return needs | (Need.HISTOGRAM if self.histograms else 0) | compared | (Need.MEAN | Need.SQUARES if self.is_replicated else 0)

    @functools.cached_property
    def base_needs(self) -> int:
        """The moments of the base that relative statistics need; 0 without such a statistic."""
        needs = functools.reduce(operator.or_, (output.needs for output in self.statistics.values() if output.relative), 0)
        return needs | (Need.SQUARES if self.is_paired else 0)

    @functools.cached_property
    def is_paired(self) -> bool:
        """Whether any statistic is of two tensors."""
        return any(output.paired for output in self.statistics.values())

    @functools.cached_property
    def looks_at_features(self) -> bool:
        """Whether it matters which dimension is that of the features: to norms of tokens, and to the user's functions."""
        return bool(self.needs & Need.TOKENS or self.functions or self.units)

    @functools.cached_property
    def num_rows(self) -> int:
        """How many rows it has in the table."""
        return 4 if self.is_paired else 2 if self.base_needs else 1

    @functools.cached_property
    def keys(self) -> dict[str, str]:
        """The key of every output, by its name; a function that returns a dict has others instead."""
        fit = {name: fit_for_loggers(name, MAX_STATISTIC_LENGTH) for name in self.outputs}
        return {name: Key(self.kind, self.site, short, self.stage, self.prefix).format() for name, short in fit.items()}

    @functools.cached_property
    def histogram_keys(self) -> list[str]:
        """Keys of the histograms."""
        return [self.keys[name] for name in self.histograms]

    @functools.cached_property
    def number_keys(self) -> list[str]:
        """Keys of the numbers: of statistics, functions, values and units, in this order."""
        return [self.keys[name] for name in (*self.statistics, *self.values, *self.units)]

    @functools.cached_property
    def moment_keys(self) -> list[str]:
        """Keys of the outputs that are made of tensors: statistics, histograms and units."""
        return [self.keys[name] for name in (*self.statistics, *self.histograms, *self.units)]

    @functools.cached_property
    def planned_keys(self) -> list[str]:
        """The keys of numbers that are known before the first step; a result that may be a dict has none."""
        unknown = {self.keys[name] for name, output in self.values.items() if not output.is_number}
        return [key for key in self.number_keys if key not in unknown]

    def part_key(self, name: str, part: str) -> str:
        """The key of one part of an output that is a dict."""
        return Key(self.kind, self.site, fit_for_loggers(f"{name}.{part}", MAX_STATISTIC_LENGTH), self.stage, self.prefix).format()

    def at(self, site: str) -> Stream:
        """The same for a further site, as a further output of the module; for one site always the same object."""
        return self.derive(site, site=site, origin=self)

    def derive(self, name: object, **changes: Any) -> Stream:  # values of fields
        """The stream with other values of some fields: for one name always the same object."""
        stream = self._derived.get(name)
        if stream is None:
            stream = self._derived[name] = replace(self, **changes)
        return stream

    @functools.cached_property
    def _derived(self) -> dict[object, Stream]:
        return {}
