"""Comparison of runs: sites that match by name, series and options that differ."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.keys import Key, is_residual
from lightning_module_monitor.report.stored_run import StoredRun, median_of_finite
from lightning_module_monitor.sinks.store.matrices import Table
from lightning_module_monitor.suggestions import nearest_pattern

NEGLIGIBLE = 1e-3
"""Share of the median magnitude over the sites of both runs below which a non-negative value is ignored."""


class MatchedSites(NamedTuple):
    """The sites of one kind in several runs."""

    kind: str
    num_matched: int
    """Number of sites in every run."""
    num_sites: Sequence[int]
    """Number of sites of each run."""
    unmatched: Sequence[Sequence[str]]
    """The sites of each run that are not in every run."""


class Level(NamedTuple):
    """The size of a series at the end of a run: in the last quarter of its records, at least one record."""

    median: float
    """Median of the finite values; NaN if there is none."""
    is_finite: bool
    """Whether all values are finite."""


class Change(NamedTuple):
    """A series of two runs, by its level at the end of each."""

    key: Key
    before: Level
    after: Level

    @property
    def factor(self) -> float:
        """The ratio of the medians, infinite from zero to another number, 1 between equal medians; negative where the signs differ."""
        before, after = self.before.median, self.after.median
        return 1.0 if before == after else after / before if before else np.inf

    @property
    def distance(self) -> float:
        """Magnitude of the factor's logarithm, by which changes are ranked; 0 where the signs differ, as of a mean near zero."""
        factor = self.factor
        return 0.0 if factor < 0 else abs(math.log(factor)) if factor else math.inf

    def exceeds(self, ratio: float) -> bool:
        """Whether a median is more than ``ratio`` times the other; also where the signs differ, or values of only one run are finite."""
        if self.before.is_finite != self.after.is_finite:
            return True
        before, after = self.before.median, self.after.median
        return before * after < 0 or max(abs(before), abs(after)) > ratio * min(abs(before), abs(after))

    def __str__(self) -> str:
        notes = {"not finite before": self.before.is_finite, "not finite after": self.after.is_finite}
        note = ", ".join(name for name, is_finite in notes.items() if not is_finite) or f"x {self.factor:.3g}"
        return f"{self.key.format()}: {self.before.median:.4g} -> {self.after.median:.4g} ({note})"


def match_sites(runs: Sequence[StoredRun]) -> list[MatchedSites]:
    """Match sites by name, for each kind of any run."""
    kinds = dict.fromkeys(table.kind for run in runs for table in run.tables)
    matches = []
    for kind in kinds:
        sites = [dict.fromkeys(site for table in run.tables if table.kind == kind for site in table.sites) for run in runs]
        in_all = set(sites[0]).intersection(*sites[1:])
        unmatched = [[site for site in sites_of_run if site not in in_all] for sites_of_run in sites]
        matches.append(MatchedSites(kind, len(in_all), [len(sites_of_run) for sites_of_run in sites], unmatched))
    return matches


def largest_changes(before: StoredRun, after: StoredRun, most: int = 20) -> list[Change]:
    """The series of both runs with the largest factors between them: one statistic for each kind and site.

    Some series are left out. Noise of an idle layer has the largest factors, so a series must not be negligible beside other sites in both
    runs. A statistic of both signs, such as a mean, has any factor near zero, so it must reach the median magnitude in one of the runs. A
    kind may have the same values as another, as gradients before clipping without clipping; only the first kind counts. Residuals of
    singular values are mostly rounding errors.

    Returns:
        At most ``most`` series whose medians differ, those first in which one median is zero, those last whose signs differ.
    """
    tables = {table.name: table for table in after.tables}
    changes: dict[Key, Change] = {}
    for table in before.tables:
        other = None if is_residual(table.name) else tables.get(table.name)
        for change in _changes(table, other) if other is not None else ():
            known = changes.setdefault(change.key._replace(statistic=""), change)
            if change.distance > known.distance:
                changes[change.key._replace(statistic="")] = change
    different: dict[tuple[object, ...], Change] = {}
    for change in changes.values():
        different.setdefault((change.key.site, change.key.statistic, change.before.median, change.after.median), change)
    return sorted(different.values(), key=lambda change: change.distance, reverse=True)[:most]


def _changes(before: Table, after: Table) -> Iterator[Change]:
    """The sites of two tables of one statistic whose medians differ and are not negligible."""
    levels_before, levels_after = _levels(before), _levels(after)
    medians = np.array([level.median for level in (*levels_before.values(), *levels_after.values())])
    medians = medians[np.isfinite(medians) & (medians != 0)]
    share = 1.0 if (medians < 0).any() else NEGLIGIBLE
    least = share * float(np.median(np.abs(medians))) if medians.size else 0.0
    for site in before.sites:
        if site in levels_after:
            change = Change(before.name._replace(site=site), levels_before[site], levels_after[site])
            sizes = [abs(change.before.median), abs(change.after.median)]
            if np.isfinite(sizes).all() and change.before.median != change.after.median and max(sizes) >= least:
                yield change


def compare_series(before: StoredRun, after: StoredRun, patterns: Sequence[re.Pattern[str]]) -> list[Change]:
    """The series of both runs whose whole key matches a pattern.

    Raises:
        ConfigError: If a pattern matches no key.
    """
    levels_before, levels_after = (
        {table.name._replace(site=site): level for table in (*run.tables, *run.figures) for site, level in _levels(table).items()}
        for run in (before, after)
    )
    common = {key.format(): key for key in levels_before if key in levels_after}
    for pattern in patterns:
        if not any(map(pattern.fullmatch, common)):
            runs, near = f"{before.path} and {after.path}", nearest_pattern(pattern.pattern, common)
            raise ConfigError(f"--fail-on {pattern.pattern!r} matches none of the {len(common)} keys of {runs}{near}")
    matched = [key for text, key in common.items() if any(pattern.fullmatch(text) for pattern in patterns)]
    return [Change(key, levels_before[key], levels_after[key]) for key in matched]


def _levels(table: Table) -> dict[str, Level]:
    num_from_end = np.cumsum(table.is_recorded[:, ::-1], axis=1)[:, ::-1]
    is_late = table.is_recorded & (num_from_end <= np.maximum(1, num_from_end[:, :1] // 4))
    medians = median_of_finite(np.where(is_late, table.values, np.nan))
    are_finite = (np.isfinite(table.values) | ~is_late).all(axis=1)
    return dict(zip(table.sites, map(Level, medians.tolist(), are_finite.tolist()), strict=True))


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
