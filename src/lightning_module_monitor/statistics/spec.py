"""What is recorded of one kind at one site."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchmetrics import Metric

from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.record import MAX_STATISTIC_LENGTH, TRAIN, Key, fit_for_loggers
from lightning_module_monitor.statistics.functions import UserFunction
from lightning_module_monitor.statistics.registry import Statistic

OWN, BASE, CURRENT, PRODUCT = range(4)
"""Rows of one specification in the table, from its first on: of the tensor itself; of what that is relative to (the reference, of a
difference); of the model's tensor of a difference, and of the product of both tensors."""

Identity = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class MetricSpec:
    """What all rules together record of one kind at one site. Specifications are compared by identity.

    Attributes:
        kind: Its kind.
        site: Name of the module or parameter.
        stage: ``train``, ``validation``, ``test`` or ``predict``.
        prefix: Put before every key.
        statistics: Statistics that are made of moments, by name.
        histograms: Names of the histograms: none, or the one that ``STATISTICS`` has.
        functions: The user's functions by name.
        units: Names of the statistics of units.
        is_compared: Whether ranks that share their input find out whether they have the same of it, which then counts once.
        is_replicated: Whether every rank is expected to have the same of it, which then counts once.
        layers: Of a kind of the coordinate check what follows the module's name at its sites: ``""``, ``".weight"``, ``".q_proj"``.
        origin: The specification that this one was derived from.
    """

    kind: str
    site: str
    stage: str = TRAIN
    prefix: str = ""
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    histograms: tuple[str, ...] = ()
    functions: Mapping[str, UserFunction] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    is_compared: bool = False
    is_replicated: bool = False
    layers: tuple[str, ...] = ()
    origin: MetricSpec | None = None
    _derived: dict[object, MetricSpec] = field(default_factory=dict, repr=False)
    """What :meth:`derive` has returned, by name."""

    @functools.cached_property
    def identity(self) -> Identity:
        """What distinguishes it from all others, the same on every rank."""
        return self.kind, self.site, self.stage, self.prefix, *self.statistics, *self.histograms, *self.functions, *self.units

    @functools.cached_property
    def needs(self) -> int:
        """What its statistics are finished from, bits of ``Need``."""
        needs = functools.reduce(operator.or_, (one.needs for one in self.statistics.values()), Need.HISTOGRAM if self.histograms else 0)
        # These distinguish parts of a tensor, which may well have the same histogram, or the same result of a function.
        compared = Need.MEAN | Need.SQUARES | Need.EXTREMES if self.is_compared else 0
        return needs | compared | (Need.MEAN | Need.SQUARES if self.is_replicated else 0)

    @functools.cached_property
    def base_needs(self) -> int:
        """Which moments are needed of what the relative statistics are relative to; 0 if none is."""
        needs = functools.reduce(operator.or_, (one.needs for one in self.statistics.values() if one.relative), 0)
        return needs | (Need.SQUARES if self.is_paired else 0)

    @functools.cached_property
    def is_paired(self) -> bool:
        """Whether any statistic is of two tensors."""
        return any(one.paired for one in self.statistics.values())

    @functools.cached_property
    def looks_at_features(self) -> bool:
        """Whether it matters which dimension is that of the features: to norms of tokens, and to the user's functions."""
        return bool(self.needs & Need.TOKENS or self.functions or self.units)

    @functools.cached_property
    def num_rows(self) -> int:
        """How many rows it has in the table."""
        return 4 if self.is_paired else 2 if self.base_needs else 1

    @functools.cached_property
    def statistic_keys(self) -> list[str]:
        """Keys of the statistics, in order."""
        return [self.key(name) for name in self.statistics]

    @functools.cached_property
    def histogram_keys(self) -> list[str]:
        """Keys of the histograms."""
        return [self.key(name) for name in self.histograms]

    def keys(self) -> list[str]:
        """The key of every number: statistic and function; a function that returns a dict has others instead."""
        return self.statistic_keys + [self.key(name) for name in (*self.functions, *self.units)]

    def planned_keys(self) -> list[str]:
        """The keys of numbers that are known before the first step: not those of results that may turn out to be dicts."""
        plain = [one for one in self.functions.values() if isinstance(one.aggregate, str) and not isinstance(one.function, Metric)]
        return self.statistic_keys + [self.key(name) for name in (*(one.name for one in plain), *self.units)]

    def key(self, statistic: str) -> str:
        """The key of one value."""
        if statistic not in self._keys:
            fit = fit_for_loggers(statistic, MAX_STATISTIC_LENGTH)
            self._keys[statistic] = Key(self.kind, self.site, fit, self.stage, self.prefix).format()
        return self._keys[statistic]

    @functools.cached_property
    def _keys(self) -> dict[str, str]:
        return {}

    def at(self, site: str) -> MetricSpec:
        """The same for another site, a further output of the module."""
        return self.derive(site, site=site, layers=(), origin=self)

    def with_function(self, function: UserFunction) -> MetricSpec:
        """A function alone at the same site; the specification itself if it has the function."""
        if function.name in self.functions:
            return self
        return self.derive((function.name,), statistics={}, histograms=(), units=(), functions={function.name: function}, origin=self)

    @functools.cached_property
    def by_layer(self) -> dict[str, MetricSpec]:
        """The specification of each of :attr:`layers`."""
        return {one: self.at(f"{self.site}{one}") if one else self for one in self.layers}

    def derive(self, name: object, **changes: Any) -> MetricSpec:  # values of fields
        """The specification with other values of some fields: for one name always the same object."""
        derived = self._derived.get(name)
        if derived is None:
            derived = self._derived[name] = replace(self, _derived={}, **changes)
        return derived
