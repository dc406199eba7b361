"""Common and different parts of runs: sites are matched by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_module_monitor.errors import ConfigError, nearest_pattern
from lightning_module_monitor.report.run import Run, late, typical
from lightning_module_monitor.sinks.store.matrices import Table

NEGLIGIBLE = 1e-3
"""Fraction of the median magnitude of a kind's statistic over the sites of both runs, where no value is negative."""


@dataclass(frozen=True)
class Match:
    """The sites of one kind."""

    kind: str
    num_matched: int
    """Number of sites in every run."""
    num_sites: Sequence[int]
    """Number of sites of each run."""
    unmatched: Sequence[Sequence[str]]
    """For each run its sites that are not in every run."""


@dataclass(frozen=True)
class Change:
    """A series that is not the same in two runs: its median over the last quarter of the records."""

    kind: str
    site: str
    statistic: str
    before: float
    after: float

    @property
    def factor(self) -> float:
        """How many times larger it is; NaN where one is zero or the signs differ."""
        return self.after / self.before if self.before * self.after > 0 else np.nan

    @property
    def distance(self) -> float:
        """Magnitude of the factor's logarithm: infinite where one is zero, 0 where the signs differ, as those of a mean near zero do."""
        if self.before * self.after < 0:
            return 0.0
        return float("inf") if np.isnan(self.factor) else float(abs(np.log(self.factor)))


def match(runs: Sequence[Run]) -> list[Match]:
    """Match the sites of each kind that one of the runs has by name."""
    kinds = dict.fromkeys(table.kind for run in runs for table in run.tables)
    matches = []
    for kind in kinds:
        sites = [dict.fromkeys(site for table in run.tables if table.kind == kind for site in table.sites) for run in runs]
        in_all = {site for site in sites[0] if all(site in own for own in sites)}
        unmatched = [[site for site in own if site not in in_all] for own in sites]
        matches.append(Match(kind, len(in_all), [len(own) for own in sites], unmatched))
    return matches


def largest_changes(before: Run, after: Run, most: int = 20) -> list[Change]:
    """The series of both runs with the largest factors between them: one statistic for each kind and site.

    At most ``most`` series whose late medians differ, the largest factors first; they are infinite where one is zero. A series that is
    negligible beside other sites in both runs is left out: noise of a layer that does nothing has the largest factors. So is one of
    a statistic of both signs, such as a mean, that is below the median magnitude in both runs: near zero every factor occurs. And
    so is a kind with the same values as another, as gradients before clipping where nothing is clipped.
    """
    others = {(table.kind, table.statistic): table for table in after.tables}
    changes: dict[tuple[str, str], Change] = {}
    for table in before.tables:
        other = others.get((table.kind, table.statistic))
        if other is None:
            continue
        own, others_sizes = typical(late(table.values)), typical(late(other.values))
        levels = np.concatenate([own, others_sizes])
        levels = levels[np.isfinite(levels) & (levels != 0)]
        negligible = 1.0 if (levels < 0).any() else NEGLIGIBLE
        least = negligible * float(np.median(np.abs(levels))) if levels.size else 0.0
        sizes = dict(zip(other.sites, others_sizes.tolist(), strict=True))
        for site, size in zip(table.sites, own.tolist(), strict=True):
            both = size, sizes.get(site, np.nan)
            if np.isfinite(both).all() and size != both[1] and max(map(abs, both)) >= least:
                change = Change(table.kind, site, table.statistic, *both)
                known = changes.setdefault((table.kind, site), change)
                if change.distance > known.distance:
                    changes[table.kind, site] = change
    different: dict[tuple[object, ...], Change] = {}
    for change in changes.values():
        different.setdefault((change.site, change.statistic, change.before, change.after), change)
    return sorted(different.values(), key=lambda change: change.distance, reverse=True)[:most]


def differing_options(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Options of the newest configurations that are not the same in all runs: the name, then each run's value as text."""
    configurations = [dict(run.attributes["configurations"][-1]["configuration"]) for run in runs]
    names = dict.fromkeys(name for configuration in configurations for name in configuration)
    rows = [(name, *(as_text(configuration.get(name)) for configuration in configurations)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def as_text(value: object) -> str:
    """The value of an option as text: text unchanged, all else as JSON; a list of mappings on several lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        return "\n".join(json.dumps(one) for one in value)
    return json.dumps(value)


# Series that differ by more than a factor, for a check in continuous integration


class Level(NamedTuple):
    """The size of a series at the end of a run."""

    median: float
    """Over the last quarter of the records, of finite values; NaN if there is none."""
    is_finite: bool
    """Whether all of these values are finite."""


class Difference(NamedTuple):
    """A series of two runs."""

    key: str
    before: Level
    after: Level

    def exceeds(self, ratio: float) -> bool:
        """Whether one level is more than ``ratio`` times the other; also where their signs differ, or only one run is finite."""
        if self.before.is_finite != self.after.is_finite:
            return True
        one, other = self.before.median, self.after.median
        return one * other < 0 or max(abs(one), abs(other)) > ratio * min(abs(one), abs(other))

    def __str__(self) -> str:
        factor = self.after.median / self.before.median if self.before.median else np.inf
        notes = {"not finite before": self.before.is_finite, "not finite after": self.after.is_finite}
        note = ", ".join(name for name, is_finite in notes.items() if not is_finite) or f"x {factor:.3g}"
        return f"{self.key}: {self.before.median:.4g} -> {self.after.median:.4g} ({note})"


def compare_series(before: Run, after: Run, patterns: Sequence[re.Pattern[str]]) -> list[Difference]:
    """The series of both runs whose key a pattern matches as a whole.

    Raises:
        ConfigError: If a pattern matches none.
    """
    one, other = before.series, after.series
    common = [key for key in one if key in other]
    for pattern in patterns:
        if not any(map(pattern.fullmatch, common)):
            runs, near = f"{before.path} and {after.path}", nearest_pattern(pattern.pattern, common)
            raise ConfigError(f"--fail-on {pattern.pattern!r} matches none of the {len(common)} keys of {runs}{near}")
    matched = [key for key in common if any(pattern.fullmatch(key) for pattern in patterns)]
    return [Difference(key, _level(*one[key]), _level(*other[key])) for key in matched]


def _level(table: Table, row: int) -> Level:
    last = late(table.values[row, table.is_recorded[row]])
    return Level(float(typical(last)), bool(np.isfinite(last).all()))
