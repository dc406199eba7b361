"""The values that are logged: roll-ups if there are many keys, and no counts that are zero."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.keys import Columns, Key, is_context, is_rate, is_total
from lightning_module_monitor.kinds import LOSS, OWN_KIND, ROLL_UP_SITES, SUMMARY_SITE
from lightning_module_monitor.record import ABSENT, Record, is_absent, is_undefined

*SITES, ALL = ROLL_UP_SITES
"""The sites of roll-ups: minimum, median and maximum; and the sum of all histograms."""

NONFINITE_COUNT = "nonfinite_count"

_COUNTS = (f"/{NONFINITE_COUNT}", f"{OWN_KIND}/errors")
"""Endings of the keys of counts that are logged only after their first value other than zero."""


def without_context(values: Mapping[str, float]) -> dict[str, float]:
    """The values without the context of training."""
    return {key: value for key, value in values.items() if not is_context(key)}


def summed(histograms: Mapping[str, Histogram], modules: Collection[str] = ()) -> dict[str, Histogram]:
    """The sum of the histograms of all sites, for each kind, under the site ``_all_``; and totals."""
    sums: dict[str, Histogram] = {}
    for text, histogram in histograms.items():
        parts = Key.parse(text)
        key = text if is_total(parts, modules) else parts._replace(site=ALL).format()
        sums[key] = sums[key] + histogram if key in sums else histogram
    return sums


class _Logged(NamedTuple):
    """The columns that are logged of records with the same columns."""

    version: int
    """Number of the columns."""
    texts: list[str]
    """The keys that they may get: of single columns, then the three of each group."""
    kept: NDArray[np.intp]
    """The columns that they get as they are."""
    groups: list[NDArray[np.intp]]
    """The columns that are rolled up together."""
    is_count: NDArray[np.bool_]
    """Which of the keys are left out while they are zero."""
    is_shown: NDArray[np.bool_]
    """Which of these have not been zero before, or are always logged."""


class LoggedValues:
    """The values that loggers get of records. They are selected once for the columns of a stage.

    Of the context of training that is the loss and the learning rates: Lightning logs other values of it itself, in other steps and, in a
    CSV file, in other rows.

    Counts of non-finite elements and of errors are left out while they are zero. They are a third of the activations' values under the
    default rules, and the store has them. After its first non-zero value a key is kept, so that its chart returns to zero.

    With roll-ups, loggers get minimum, median and maximum over the sites for each kind and statistic. A NaN among the values makes all
    three NaN, so that it is not hidden; an undefined statistic of a finite tensor is left out. Keys without a site, summaries, totals, and
    the values at ``blocks`` are kept.

    Args:
        roll_up: Whether they get roll-ups.
        always: Patterns of keys that are always logged.
        modules: Names of the modules of the model, by which totals are known.
        blocks: Names of the modules whose values are logged beside roll-ups.
    """

    def __init__(
        self, *, roll_up: bool = False, always: Iterable[re.Pattern[str]] = (), modules: Collection[str] = (), blocks: Collection[str] = ()
    ) -> None:
        self._roll_up = roll_up
        self._always = list(always)
        self._modules = modules
        self._blocks = blocks
        self._logged: dict[Columns, _Logged] = {}

    def __call__(self, record: Record) -> dict[str, float]:
        """Value by key."""
        logged = self._logged.get(record.columns)
        if logged is None or logged.version != len(record.numbers):
            logged = self._logged[record.columns] = self._bind(record.columns, len(record.numbers), logged)
        numbers = np.concatenate([record.numbers[logged.kept], *(_rolled(record.numbers[group]) for group in logged.groups)])
        is_recorded = ~is_absent(numbers)
        np.logical_or(logged.is_shown, is_recorded & (numbers != 0), out=logged.is_shown)
        indices = np.flatnonzero(is_recorded & (logged.is_shown | ~logged.is_count)).tolist()
        values = numbers.tolist()
        return {logged.texts[index]: values[index] for index in indices}

    def _is_always(self, text: str) -> bool:
        return any(pattern.fullmatch(text) for pattern in self._always)

    def _bind(self, columns: Columns, version: int, before: _Logged | None) -> _Logged:
        kept: list[int] = []
        groups: defaultdict[Key, list[int]] = defaultdict(list)
        for column, (key, text) in enumerate(zip(columns.keys[:version], columns.texts[:version], strict=True)):
            if is_context(text) and key.statistic != LOSS and not is_rate(key.statistic):
                continue
            is_of_all = key.site in ("", SUMMARY_SITE) or is_total(key, self._modules)
            is_kept = is_of_all or key.kind == OWN_KIND or key.site in self._blocks
            if not self._roll_up or is_kept or self._is_always(text):
                kept.append(column)
            if self._roll_up and not is_of_all:
                groups[key._replace(site="")].append(column)
        texts = [columns.texts[column] for column in kept]
        texts += [group._replace(site=site).format() for group in groups for site in SITES]
        shown = set() if before is None else {text for text, is_shown in zip(before.texts, before.is_shown, strict=True) if is_shown}
        is_count = np.array([text.endswith(_COUNTS) for text in texts], bool)
        is_shown = np.array([text in shown or self._is_always(text) for text in texts], bool)
        indices = [np.array(members, np.intp) for members in groups.values()]
        return _Logged(version, texts, np.array(kept, np.intp), indices, is_count, is_shown)


def _rolled(members: NDArray[np.float64]) -> list[float]:
    """Minimum, median and maximum of the numbers of a group; absent if all are."""
    is_number = members == members  # noqa: PLR0124  # not NaN
    if False in is_number:
        members = members[~is_absent(members)]
        if not len(members):
            return [ABSENT] * 3
        members = members[~is_undefined(members)]
        if not len(members) or np.isnan(members).any():
            return [math.nan] * 3
    return [members.min(), np.median(members), members.max()]
