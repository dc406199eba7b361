"""What is wanted of one kind at one site."""

from __future__ import annotations

import functools
import operator
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor
from torchmetrics import Metric

from lightning_module_monitor.record import MAX_STATISTIC_LENGTH, TRAIN, Key, fit_for_loggers
from lightning_module_monitor.statistics.functions import UserFunction
from lightning_module_monitor.statistics.moments import Need
from lightning_module_monitor.statistics.registry import Statistic
from lightning_module_monitor.statistics.units import memory

OWN, BASE, CURRENT, PRODUCT = range(4)
"""Rows of one watch in the table, from its first on: of what is watched; of what that is relative to (the reference, of a
difference); of the model's tensor of a difference, and of the product of both tensors."""


Identity = tuple[str, ...]


@dataclass
class Watch:
    """What is wanted of one kind at one site, by all rules together."""

    kind: str
    site: str
    stage: str = TRAIN
    prefix: str = ""
    statistics: dict[str, Statistic] = field(default_factory=dict)
    histograms: dict[str, None] = field(default_factory=dict)
    """Names of the histograms: none, or the one that ``STATISTICS`` has."""
    functions: dict[str, UserFunction] = field(default_factory=dict)
    units: dict[str, None] = field(default_factory=dict)
    """Names of the statistics of units."""
    recent_units: deque[Tensor] = field(default_factory=memory, compare=False)
    """What the units of the site did in the last monitored steps; it lives from step to step."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """The site's own copies of the torchmetrics objects among the functions; they live from step to step."""
    further: dict[str, Watch] = field(default_factory=dict)
    """The same wish for the module's further outputs, by site."""
    parts: dict[str, Watch] = field(default_factory=dict)
    """The watches of the coordinate check by what follows the module's name at their sites: ``""``, ``".weight"``, ``".q_proj"``."""
    is_one_token: bool = False
    """Whether what is watched is a single token that several ranks have parts of; its norm is that of all elements."""
    is_compared: bool = False
    """Whether ranks that share their input are to find out if they have the same of it, which then counts once."""
    made_of: dict[str, Watch] = field(default_factory=dict)
    """Watches of what its values are made of, by name; they live from step to step as it does."""
    origin: Watch | None = None
    """The watch that this is a further one of."""
    _keys: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def identity(self) -> Identity:
        """What tells it from all others, on every rank alike."""
        return self.kind, self.site, self.stage, self.prefix, *self.statistics, *self.histograms, *self.functions, *self.units

    @functools.cached_property
    def needs(self) -> int:
        """What its statistics are finished from, bits of ``Need``."""
        needs = functools.reduce(operator.or_, (one.needs for one in self.statistics.values()), Need.HISTOGRAM if self.histograms else 0)
        # These tell parts apart, which may well have one histogram, or one result of a function.
        return needs | (Need.MEAN | Need.SQUARES | Need.EXTREMES if self.is_compared else 0)

    @functools.cached_property
    def is_of_moments(self) -> bool:
        """Whether statistics of one tensor are all that is wanted."""
        return 0 < self.needs < Need.HISTOGRAM and not (self.functions or self.units)

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
        """How many rows it has in the table, once it is there."""
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
        """The keys of numbers that are known before the first step: not those of results that may yet turn out to be dicts."""
        plain = [one for one in self.functions.values() if isinstance(one.aggregate, str) and not isinstance(one.function, Metric)]
        return self.statistic_keys + [self.key(name) for name in (*(one.name for one in plain), *self.units)]

    def key(self, statistic: str) -> str:
        """The key of one value."""
        known = self._keys.get(statistic)
        if known is None:
            fit = fit_for_loggers(statistic, MAX_STATISTIC_LENGTH)
            known = self._keys[statistic] = Key(self.kind, self.site, fit, self.stage, self.prefix).format()
        return known

    def at(self, site: str) -> Watch:
        """The same wish for another site, a further output of the module: always the same object."""
        if site not in self.further:
            wish = self.statistics, self.histograms, self.functions
            self.further[site] = Watch(
                self.kind, site, self.stage, self.prefix, *wish, units=self.units, is_compared=self.is_compared, origin=self
            )
        return self.further[site]


Wish = tuple[Watch, int]
"""A watch, and the row of it that a tensor is for."""
