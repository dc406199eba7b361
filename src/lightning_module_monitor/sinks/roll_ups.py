"""What loggers get of a record: roll-ups where there are many keys, and no counts that are zero."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.keys import Key, is_context, is_rate, is_total
from lightning_module_monitor.kinds import LOSS, OWN_KIND, ROLL_UP_SITES, SUMMARY_SITE
from lightning_module_monitor.record import is_undefined

*_SITES, ALL = ROLL_UP_SITES
"""The sites of roll-ups: minimum, median and maximum; and the sum of all histograms."""

NONFINITE_COUNT = "nonfinite_count"

_COUNTS = (f"/{NONFINITE_COUNT}", f"{OWN_KIND}/errors")
"""How the keys of counts end that are logged once they are not zero."""


def without_context(values: Mapping[str, float]) -> dict[str, float]:
    """The values without the context of training."""
    return {key: value for key, value in values.items() if not is_context(key)}


def logged_values(values: Mapping[str, float]) -> dict[str, float]:
    """The values that loggers get: of the context of training only the loss and the learning rates.

    Lightning logs the other values of the context itself, in other steps and, in a CSV file, in other rows.
    """
    return {key: value for key, value in values.items() if not is_context(key) or (name := key.rpartition("/")[2]) == LOSS or is_rate(name)}


def summed(histograms: Mapping[str, Histogram], modules: Collection[str] = ()) -> dict[str, Histogram]:
    """The sum of the histograms of all sites, for each kind, under the site ``_all_``; and totals."""
    sums: dict[str, Histogram] = {}
    for text, histogram in histograms.items():
        parts = Key.parse(text)
        key = text if is_total(parts, modules) else parts._replace(site=ALL).format()
        sums[key] = sums[key] + histogram if key in sums else histogram
    return sums


class ZeroCounts:
    """Drops counts of non-finite elements and of errors while they are zero, unless a pattern of ``always`` matches the key.

    The former are a third of the activations' values under the default rules, and the store has them. After its first non-zero value a
    key is kept, so that its chart returns to zero.
    """

    def __init__(self, always: Iterable[re.Pattern[str]] = ()) -> None:
        self._always = list(always)
        self._kept: set[str] = set()

    def drop_from(self, values: dict[str, float]) -> None:
        """Drop such values."""
        for key in [key for key in values if key.endswith(_COUNTS)]:
            if values[key] != 0 or (self._always and any(pattern.fullmatch(key) for pattern in self._always)):
                self._kept.add(key)
            elif key not in self._kept:
                del values[key]


class RollUps:
    """Minimum, median and maximum over the sites, for each kind and statistic. Keys are parsed once for all records with the same keys.

    A NaN among the values makes all three NaN, so that it is not hidden; an undefined statistic of a finite tensor is left out.
    Keys that match a pattern of ``always``, keys without a site, summaries, totals and the values at ``blocks`` are kept.
    """

    def __init__(self, always: Iterable[re.Pattern[str]] = (), modules: Collection[str] = (), blocks: Collection[str] = ()) -> None:
        self._always = list(always)
        self._modules = modules
        self._blocks = blocks
        self._keys: list[str] = []
        self._kept: list[int] = []
        """Indices of the keys that are kept."""
        self._groups: list[tuple[list[str], NDArray[np.int64]]] = []
        """The three keys of a group, and the indices of its members."""

    def __call__(self, values: Mapping[str, float]) -> dict[str, float]:
        """Value by key, with the sites ``_min_``, ``_median_`` and ``_max_``."""
        keys = list(values)
        if keys != self._keys:
            self._read(keys)
        numbers = np.fromiter(values.values(), np.float64, len(keys))
        rolled = {keys[index]: float(numbers[index]) for index in self._kept}
        for names, indices in self._groups:
            members = numbers[indices]
            if np.isnan(members).any():
                members = members[~is_undefined(members)]
            if not len(members) or np.isnan(members).any():
                rolled.update(dict.fromkeys(names, math.nan))
            else:
                rolled.update(zip(names, (float(members.min()), float(np.median(members)), float(members.max())), strict=True))
        return rolled

    def _read(self, keys: list[str]) -> None:
        self._keys, self._kept = keys, []
        indices_by_group: defaultdict[Key, list[int]] = defaultdict(list)
        for index, text in enumerate(keys):
            key = Key.parse(text)
            is_of_all = key.site in ("", SUMMARY_SITE) or is_total(key, self._modules)
            is_kept = is_of_all or key.kind == OWN_KIND or key.site in self._blocks
            if is_kept or any(pattern.fullmatch(text) for pattern in self._always):
                self._kept.append(index)
            if not is_of_all:
                indices_by_group[key._replace(site="")].append(index)
        self._groups = [
            ([group._replace(site=site).format() for site in _SITES], np.array(indices)) for group, indices in indices_by_group.items()
        ]
