"""Which series of two runs differ by more than a factor, for a check in continuous integration."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_module_monitor.errors import ConfigError, nearest_pattern
from lightning_module_monitor.record import is_undefined
from lightning_module_monitor.report.arrays import late, typical
from lightning_module_monitor.sinks.store.reader import StoreReader


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


def compare_series(before: StoreReader, after: StoreReader, patterns: Sequence[re.Pattern[str]]) -> list[Difference]:
    """The series of both runs whose key a pattern matches as a whole.

    Raises:
        ConfigError: If a pattern matches none.
    """
    common = set(before.keys()) & set(after.keys())
    for pattern in patterns:
        if not any(map(pattern.fullmatch, common)):
            runs, near = f"{before.path} and {after.path}", nearest_pattern(pattern.pattern, common)
            raise ConfigError(f"--fail-on {pattern.pattern!r} matches none of the {len(common)} keys of {runs}{near}")
    matched = {key for key in common if any(pattern.fullmatch(key) for pattern in patterns)}
    levels = dict(_levels(after, matched))
    return [Difference(key, level, levels[key]) for key, level in _levels(before, matched)]


def _levels(store: StoreReader, keys: Collection[str]) -> Iterator[tuple[str, Level]]:
    """Some series with their levels, in the order of the store."""
    for kind in store.kinds():
        matrix = store.matrix(kind)
        for column, key in enumerate(matrix.keys):
            if (name := key.format()) in keys:
                recorded = matrix.values[matrix.is_recorded[:, column], column]
                last = late(recorded[~is_undefined(recorded)][np.newaxis])
                yield name, Level(float(typical(last)[0]), bool(np.isfinite(last).all()))
