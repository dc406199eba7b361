"""Comparison of runs: sites that match by name, series and options that differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_module_monitor.errors import ConfigError, nearest_pattern
from lightning_module_monitor.report.stored_run import StoredRun, late, typical
from lightning_module_monitor.sinks.store.matrices import Table

NEGLIGIBLE = 1e-3
"""Share of the median magnitude over the sites of both runs below which a non-negative value is ignored."""


@dataclass(frozen=True)
class Match:
    """The sites of one kind."""

    kind: str
    num_matched: int
    """Number of sites in every run."""
    num_sites: Sequence[int]
    """Number of sites of each run."""
    unmatched: Sequence[Sequence[str]]
    """The sites of each run that are not in every run."""


@dataclass(frozen=True)
class Change:
    """A series that differs between two runs, by its median over the last quarter of the records."""

    kind: str
    site: str
    statistic: str
    before: float
    after: float

    @property
    def factor(self) -> float:
        """The ratio of the medians; NaN where a median is zero or the signs differ."""
        return self.after / self.before if self.before * self.after > 0 else np.nan

    @property
    def distance(self) -> float:
        """Magnitude of the factor's logarithm: infinite where a median is zero, 0 where the signs differ, as of a mean near zero."""
        if self.before * self.after < 0:
            return 0.0
        return float("inf") if np.isnan(self.factor) else float(abs(np.log(self.factor)))


def match(runs: Sequence[StoredRun]) -> list[Match]:
    """Match sites by name, for each kind of any run."""
    kinds = dict.fromkeys(table.kind for run in runs for table in run.tables)
    matches = []
    for kind in kinds:
        sites = [dict.fromkeys(site for table in run.tables if table.kind == kind for site in table.sites) for run in runs]
        in_all = set(sites[0]).intersection(*sites[1:])
        unmatched = [[site for site in sites_of_run if site not in in_all] for sites_of_run in sites]
        matches.append(Match(kind, len(in_all), [len(sites_of_run) for sites_of_run in sites], unmatched))
    return matches


def largest_changes(before: StoredRun, after: StoredRun, most: int = 20) -> list[Change]:
    """The series of both runs with the largest factors between them: one statistic for each kind and site.

    Some series are left out. Noise of an idle layer has the largest factors, so a series must not be negligible beside other sites in both
    runs. A statistic of both signs, such as a mean, has any factor near zero, so it must reach the median magnitude in one of the runs. A
    kind may have the same values as another, as gradients before clipping without clipping; only the first kind counts.

    Returns:
        At most ``most`` series whose late medians differ, the largest factors first. A factor is infinite where a median is zero.
    """
    tables = {(table.kind, table.statistic): table for table in after.tables}
    changes: dict[tuple[str, str], Change] = {}
    for table in before.tables:
        other = tables.get((table.kind, table.statistic))
        for change in _changes(table, other) if other is not None else ():
            known = changes.setdefault((change.kind, change.site), change)
            if change.distance > known.distance:
                changes[change.kind, change.site] = change
    different: dict[tuple[object, ...], Change] = {}
    for change in changes.values():
        different.setdefault((change.site, change.statistic, change.before, change.after), change)
    return sorted(different.values(), key=lambda change: change.distance, reverse=True)[:most]


def _changes(before: Table, after: Table) -> Iterator[Change]:
    """The sites of two tables of one statistic whose late medians differ and are not negligible."""
    medians_before, medians_after = (typical(late(table.values)) for table in (before, after))
    levels = np.concatenate([medians_before, medians_after])
    levels = levels[np.isfinite(levels) & (levels != 0)]
    share = 1.0 if (levels < 0).any() else NEGLIGIBLE
    least = share * float(np.median(np.abs(levels))) if levels.size else 0.0
    median_after = dict(zip(after.sites, medians_after.tolist(), strict=True))
    for site, median in zip(before.sites, medians_before.tolist(), strict=True):
        change = Change(before.kind, site, before.statistic, median, median_after.get(site, np.nan))
        medians = change.before, change.after
        if np.isfinite(medians).all() and change.before != change.after and max(map(abs, medians)) >= least:
            yield change


def differing_options(runs: Sequence[StoredRun]) -> list[tuple[str, ...]]:
    """Options of the newest configurations that differ between runs: the name, then the value of each run as text."""
    configurations = [dict(run.attributes["configurations"][-1]["configuration"]) for run in runs]
    names = dict.fromkeys(name for configuration in configurations for name in configuration)
    rows = [(name, *(as_text(configuration.get(name)) for configuration in configurations)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def as_text(value: object) -> str:
    """The value of an option as text: strings unchanged, others as JSON, a list of mappings with a line for each."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return "\n".join(map(json.dumps, value))
    return json.dumps(value)


# Series that differ by more than a factor, for a check in continuous integration


class Level(NamedTuple):
    """The size of a series at the end of a run."""

    median: float
    """Median of the finite values in the last quarter of the records; NaN if there is none."""
    is_finite: bool
    """Whether all values in the last quarter are finite."""


class ComparedSeries(NamedTuple):
    """A series of two runs."""

    key: str
    before: Level
    after: Level

    def exceeds(self, ratio: float) -> bool:
        """Whether a level is more than ``ratio`` times the other; also where the signs differ, or only one run is finite."""
        if self.before.is_finite != self.after.is_finite:
            return True
        before, after = self.before.median, self.after.median
        return before * after < 0 or max(abs(before), abs(after)) > ratio * min(abs(before), abs(after))

    def __str__(self) -> str:
        factor = self.after.median / self.before.median if self.before.median else np.inf
        notes = {"not finite before": self.before.is_finite, "not finite after": self.after.is_finite}
        note = ", ".join(name for name, is_finite in notes.items() if not is_finite) or f"x {factor:.3g}"
        return f"{self.key}: {self.before.median:.4g} -> {self.after.median:.4g} ({note})"


def compare_series(before: StoredRun, after: StoredRun, patterns: Sequence[re.Pattern[str]]) -> list[ComparedSeries]:
    """The series of both runs whose whole key matches a pattern.

    Raises:
        ConfigError: If a pattern matches no key.
    """
    series_before, series_after = before.series, after.series
    common = [key for key in series_before if key in series_after]
    for pattern in patterns:
        if not any(map(pattern.fullmatch, common)):
            runs, near = f"{before.path} and {after.path}", nearest_pattern(pattern.pattern, common)
            raise ConfigError(f"--fail-on {pattern.pattern!r} matches none of the {len(common)} keys of {runs}{near}")
    matched = [key for key in common if any(pattern.fullmatch(key) for pattern in patterns)]
    return [ComparedSeries(key, _level(*series_before[key]), _level(*series_after[key])) for key in matched]


def _level(table: Table, row: int) -> Level:
    last = late(table.values[row, table.is_recorded[row]])
    return Level(float(typical(last)), bool(np.isfinite(last).all()))
