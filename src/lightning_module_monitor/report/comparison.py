"""Common and different parts of runs: sites are matched by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.report.arrays import late, typical
from lightning_module_monitor.report.run import Run

NEGLIGIBLE = 1e-3
"""Of the median magnitude of a kind's statistic over the sites of both runs."""


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


def match(runs: Sequence[Run]) -> list[Match]:
    """Match the sites of each kind by name.

    Args:
        runs: Two or more.

    Returns:
        One entry for each kind that one of them has.
    """
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

    Args:
        before: The run that is compared with.
        after: The run that is compared.
        most: Largest number of series.

    Returns:
        Series whose late medians differ, the largest factors first; they are infinite where one is zero. What is negligible beside
        other sites in both runs is left out: noise of a layer that does nothing has the largest factors.
    """
    others = {(table.kind, table.statistic): table for table in after.tables}
    changes: dict[tuple[str, str], Change] = {}
    for table in before.tables:
        other = others.get((table.kind, table.statistic))
        if other is None:
            continue
        own, others_sizes = typical(late(table.values)), typical(late(other.values))
        least = NEGLIGIBLE * _median_magnitude(np.concatenate([own, others_sizes]))
        sizes = dict(zip(other.sites, others_sizes.tolist(), strict=True))
        for site, size in zip(table.sites, own.tolist(), strict=True):
            if (
                site in sizes
                and np.isfinite([size, sizes[site]]).all()
                and size != sizes[site]
                and max(abs(size), abs(sizes[site])) > least
            ):
                change = Change(table.kind, site, table.statistic, size, sizes[site])
                known = changes.setdefault((table.kind, site), change)
                if _distance(change) > _distance(known):
                    changes[table.kind, site] = change
    return sorted(changes.values(), key=_distance, reverse=True)[:most]


def _median_magnitude(sizes: NDArray[np.float64]) -> float:
    magnitudes = np.abs(sizes[np.isfinite(sizes) & (sizes != 0)])
    return float(np.median(magnitudes)) if magnitudes.size else 0.0


def _distance(change: Change) -> float:
    if change.before * change.after < 0:  # a mean that is near zero changes its sign for nothing
        return 0.0
    return float("inf") if np.isnan(change.factor) else float(abs(np.log(change.factor)))


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
