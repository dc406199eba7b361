"""Rules on recorded values, judged record by record. All ranks have the same records, so a rule fires on all of them alike."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.bound import Bound
from lightning_module_monitor.health.facts import Training
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import ROOT_SITE
from lightning_module_monitor.record import UNDEFINED_BITS, Finding, Severity

Action = Literal["warn", "stop", "checkpoint", "capture"]
ACTIONS: tuple[Action, ...] = ("warn", "stop", "checkpoint", "capture")
"""Reactions to a finding, which is logged in any case."""

MEDIAN_RECORDS = 50
"""Number of earlier records in a median."""

LEAST_RECORDS = 10
"""Number of earlier records that a median needs."""

FIRST_RECORDS = 3
"""Largest number of first records whose largest figure is the base of ``relative_to="first"``."""

QUIET_RECORDS = 10
"""Number of consecutive records in which a condition has to be false before its rule fires again."""

MAX_NAMED = 3
"""Number of keys that a finding names."""


class Figures(NamedTuple):
    """The figures that a rule judges in one record; all of one length."""

    names: tuple[str, ...]
    """Identify the figures from record to record."""
    values: NDArray[np.float64]
    keys: Sequence[str]
    """The recorded key that shows each figure best."""
    is_present: NDArray[np.bool_] | None = None
    """Which figures this record has; ``None``: all of them."""
    lacks_gradient: NDArray[np.bool_] | None = None
    """Parameters without a gradient in this record; ``None``: none."""


def nothing(_parts: Key, _key: str) -> bool:
    """No key."""
    return False


def each(bound: Bound, values: NDArray[np.float64]) -> Figures:
    """Every value is a figure."""
    return Figures(bound.texts, values, bound.texts)


@dataclass(frozen=True)
class AlertRule:
    """A condition on recorded values, and the actions when it is met."""

    name: str
    concerns: Callable[[Key, str], bool]
    """Whether the rule judges a key (its parts, and the whole key). Callables here are named functions, so a callback can be pickled."""
    concerns_total: Callable[[Key, str], bool] = nothing
    """Whether the rule judges a key of all parameters inside a module together."""
    above: float | None = None
    below: float | None = None
    relative_to: Literal["", "median", "first"] = ""
    """The base of which ``above`` and ``below`` are multiples: the median of the figure's earlier values, or its largest first value. With
    a base, the sign of a figure does not count."""
    is_unchanged: bool = False
    """Whether the condition is that a figure equals that of the record before to the last bit."""
    for_steps: int = 1
    """Number of consecutive records in which the condition has to be met."""
    then: tuple[Action, ...] = ("warn",)
    figures: Callable[[Bound, NDArray[np.float64]], Figures] = each
    """Makes figures of the rule's series and their values in one record."""
    num_base: int = 0
    """Number of records that make the base: the first ones (default: 3), or the fewest earlier ones of a median (default: 10)."""
    needs_step: bool = False
    """Whether steps that a ``GradScaler`` skipped do not count."""
    needs_rate: bool = False
    """Whether parameters whose learning rate is 0 do not count."""
    is_of_facts: bool = False
    """Whether a record without such values passes, provided that the facts of its step are known."""
    judges_rise: bool = False
    """Whether the rule judges the rise of the training loss (:attr:`History.rise`) in place of the loss."""
    until_step: float = math.inf
    """Records of later steps do not count."""
    unless_loss_falls: float = math.inf
    """Records do not count in which the training loss has fallen by more than this part of the first one; see :func:`has_fallen`."""
    needs_fall: bool = False
    """Whether only records meet the condition in which the training loss is below the first one; none under manual optimization."""
    of_samples: bool = False
    """Whether the rule judges only modules that return a tensor for each sample, where these are known; no modules of losses."""
    without_last: bool = False
    """Whether the rule does not judge the last of these, whose output is to be as large as the targets."""
    parameters: Training | None = None
    """State of the parameters that the rule judges; ``None``: all."""
    severity: Severity = "warning"
    phrase: str = ""
    """The finding in words, a format of ``value``, ``times`` (the value over its base), ``sites``, ``kind``, ``statistic`` and ``most``
    (where the largest part of a total is). Default: the keys with their values, and the condition."""

    @property
    def base_records(self) -> int:
        """Number of records that make the base of ``relative_to``."""
        return self.num_base or (LEAST_RECORDS if self.relative_to == "median" else FIRST_RECORDS)

    @property
    def min_records(self) -> int:
        """Number of records below which the condition cannot be met."""
        earlier = {"": 0, "first": 1, "median": self.base_records}[self.relative_to]
        return self.for_steps + max(earlier, self.is_unchanged)


class Fired(NamedTuple):
    """A figure that met its rule's condition for long enough."""

    key: str
    value: float
    base: float
    """The figure that it is compared with; 1 without such a figure."""
    since: int
    """The step of the first consecutive record in which the condition was met."""


class Alarm(NamedTuple):
    """A finding, and the actions that follow it."""

    finding: Finding
    then: tuple[Action, ...] = ("warn",)
    fired: Sequence[Fired] = ()
    """The figures that met the condition."""


def has_fallen(first: float, loss: float, part: float) -> bool:
    """Whether a loss is below the first loss by more than a part of its magnitude; ``False`` for NaN and for an infinite part.

    >>> has_fallen(2.3, 1.1, 0.5), has_fallen(2.3, 2.0, 0.5), has_fallen(-1.0, -1.6, 0.5)
    (True, False, True)
    """
    return loss < first - part * abs(first)


class RuleState:
    """The state of a rule from record to record, figure by figure."""

    def __init__(self, rule: AlertRule) -> None:
        self.rule = rule
        self._rows: dict[str, int] = {}
        self.num_records = 0
        """Number of records with figures, judged or not, and of records that pass without figures (``is_of_facts``)."""
        self.num_passed_over = 0
        """Number of records that were not judged, because the loss had fallen."""
        self._newest: tuple[tuple[str, ...], NDArray[np.intp]] = (), np.empty(0, np.intp)
        """The last names and their rows: from record to record they are mostly the same."""
        num_recent = MEDIAN_RECORDS if rule.relative_to == "median" else 1
        # A row for each figure.
        self._recent = np.empty((0, num_recent))
        """The last values, the newest last, padded with NaN."""
        self._first = np.empty((0, FIRST_RECORDS))
        """The first values, padded with NaN."""
        self._num_met = np.empty(0, int)
        """Number of consecutive records, up to the last, in which the condition was met."""
        self._since = np.empty(0, int)
        """The step of the first of these."""
        self._num_quiet = np.empty(0, int)
        """Number of records without the condition since the rule fired, at least ``QUIET_RECORDS`` if it has not fired."""
        self._was_trained = np.empty(0, bool)
        """Whether the parameter had a gradient, or moved, in an earlier record."""

    def count_unjudged(self, *, has_loss_fallen: bool = False) -> None:
        """Count a record whose figures, if it has any, are not judged."""
        self.num_records += 1
        self.num_passed_over += has_loss_fallen

    def observe(self, step: int, bound: Bound, values: NDArray[np.float64], *, can_meet: bool = True) -> list[Fired]:
        """The figures that with this record have met the condition for long enough.

        ``bound`` are the rule's series in the record, with ``values`` of shape ``(series,)``. A NaN meets no condition and ends a streak,
        and so does a record that cannot meet it. Within ``np.errstate(invalid="ignore")``: an infinite base may be multiplied by 0.
        """
        is_defined = values.view(np.uint64) != UNDEFINED_BITS
        if False in is_defined:  # a store does not show them either
            bound, values = bound.where(is_defined), values[is_defined]
        figures = self.rule.figures(bound, values)
        rows, value, lacks_gradient = self._rows_of(figures.names), figures.values, figures.lacks_gradient
        is_judged = value == value  # noqa: PLR0124  # not NaN
        judged = None
        if figures.is_present is not None:
            self._num_met[rows[figures.is_present & ~is_judged]] = 0
            is_judged = is_judged & figures.is_present
        elif False in is_judged:
            self._num_met[rows[~is_judged]] = 0
        if False in is_judged:
            judged = np.flatnonzero(is_judged)
            rows, value = rows[judged], value[judged]
            lacks_gradient = None if lacks_gradient is None else lacks_gradient[judged]
        if not len(rows):
            return []
        self.num_records += 1
        base = self._base(rows)
        is_met = self._is_met(value, rows, base) & can_meet
        if lacks_gradient is not None:
            is_met &= ~(lacks_gradient & self._was_trained[rows])
            # Steps between two records count, too: without a gradient in any of them the norm stays as it is.
            self._was_trained[rows] |= ~lacks_gradient | ~(is_met | np.isnan(self._recent[rows, -1]))
        self._keep(rows, value)
        num_met, num_quiet = self._num_met[rows], self._num_quiet[rows]
        self._since[rows[is_met & (num_met == 0)]] = step
        num_met = np.where(is_met, num_met + 1, 0)
        num_quiet = np.where(is_met & (num_quiet < QUIET_RECORDS), 0, num_quiet + ~is_met)
        fires = (num_met >= self.rule.for_steps) & (num_quiet >= QUIET_RECORDS)
        num_quiet[fires] = 0
        self._num_met[rows], self._num_quiet[rows] = num_met, num_quiet
        if True not in fires:
            return []
        fired = np.flatnonzero(fires).tolist()
        keys = [figures.keys[index if judged is None else judged[index]] for index in fired]
        bases = [1.0] * len(value) if base is None else base.tolist()
        return [Fired(key, float(value[i]), bases[i], int(self._since[rows[i]])) for key, i in zip(keys, fired, strict=True)]

    def num_met(self) -> dict[str, int]:
        """Number of consecutive records, up to the last, in which each figure met the condition."""
        return {name: int(self._num_met[row]) for name, row in self._rows.items()}

    def state(self) -> tuple[int, int, dict[str, tuple[Any, ...]]]:
        """The state for a checkpoint, in plain numbers: the two numbers of records, and a row for each figure, by its name."""
        padded = [[numbers[~np.isnan(numbers)].tolist() for numbers in array] for array in (self._recent, self._first)]
        others = [array.tolist() for array in (self._num_met, self._since, self._num_quiet, self._was_trained)]
        rows = [*zip(*padded, *others, strict=True)]
        return self.num_records, self.num_passed_over, {name: rows[row] for name, row in self._rows.items()}

    def load(self, state: tuple[int, int, Mapping[str, tuple[Any, ...]]]) -> None:
        """Restore a result of :meth:`state`."""
        self.num_records, self.num_passed_over, figures = state
        rows = self._rows_of(tuple(figures))
        for row, (recent, first, *rest) in zip(rows, figures.values(), strict=True):
            self._recent[row], self._first[row] = np.nan, np.nan
            if recent:
                self._recent[row, -len(recent) :] = recent
            self._first[row, : len(first)] = first
            self._num_met[row], self._since[row], self._num_quiet[row], self._was_trained[row] = rest

    def _rows_of(self, names: tuple[str, ...]) -> NDArray[np.intp]:
        """Rows of figures; new ones get a row."""
        if names == self._newest[0]:
            return self._newest[1]
        num_new = len(self._rows.keys() | names) - len(self._num_met)
        if num_new > 0:
            # Before the names: a Ctrl-C in between leaves no name without a row.
            self._recent = np.concatenate([self._recent, np.full((num_new, self._recent.shape[1]), np.nan)])
            self._first = np.concatenate([self._first, np.full((num_new, FIRST_RECORDS), np.nan)])
            self._since = np.concatenate([self._since, np.zeros(num_new, int)])
            self._num_quiet = np.concatenate([self._num_quiet, np.full(num_new, QUIET_RECORDS)])
            self._was_trained = np.concatenate([self._was_trained, np.zeros(num_new, bool)])
            self._num_met = np.concatenate([self._num_met, np.zeros(num_new, int)])
        rows = np.array([self._rows.setdefault(name, len(self._rows)) for name in names], np.intp)
        self._newest = names, rows
        return rows

    def _keep(self, rows: NDArray[np.intp], value: NDArray[np.float64]) -> None:
        """Keep the values for later records, as far as the rule compares with earlier ones."""
        if self.rule.relative_to == "median" or self.rule.is_unchanged:
            self._recent[rows, :-1] = self._recent[rows, 1:]
            self._recent[rows, -1] = value
        elif self.rule.relative_to == "first":
            num_first = (~np.isnan(self._first[rows])).sum(axis=1)
            begins = np.flatnonzero(num_first < FIRST_RECORDS)
            self._first[rows[begins], num_first[begins]] = value[begins]

    def _base(self, rows: NDArray[np.intp]) -> NDArray[np.float64] | None:
        """The base of which limits are multiples, NaN while it is not known; ``None`` where they are limits themselves."""
        if self.rule.relative_to == "median":
            recent = self._recent[rows]
            is_known = (~np.isnan(recent)).sum(axis=1) >= self.rule.base_records
            base = np.full(len(rows), np.nan)
            base[is_known] = np.abs(np.nanmedian(recent[is_known], axis=1))
            return base
        if self.rule.relative_to == "first":
            return np.asarray(np.fmax.reduce(np.abs(self._first[rows, : self.rule.base_records]), axis=1))
        return None

    def _is_met(self, value: NDArray[np.float64], rows: NDArray[np.intp], base: NDArray[np.float64] | None) -> NDArray[np.bool_]:
        if self.rule.is_unchanged:
            return np.asarray(value == self._recent[rows, -1])
        size, unit = (value, 1.0) if base is None else (np.abs(value), base)
        # A limit that is not given is a comparison that is never true.
        above, below = (math.nan if limit is None else limit for limit in (self.rule.above, self.rule.below))
        return np.asarray((size > above * unit) | (size < below * unit))


_CONDITIONS = ("name", "above", "below", "relative_to", "num_base", "until_step", "is_unchanged", "for_steps")


def conditions(rule: AlertRule) -> str:
    """A text that differs between rules that fire at different times."""
    return repr(tuple(getattr(rule, name) for name in _CONDITIONS))


def matching(patterns: Iterable[re.Pattern[str]]) -> Callable[[Key, str], bool]:
    """Whether any pattern matches a key as a whole."""
    return functools.partial(_matches, tuple(patterns))


def _matches(patterns: Sequence[re.Pattern[str]], _parts: Key, key: str) -> bool:
    return any(pattern.fullmatch(key) for pattern in patterns)


def naming(patterns: Iterable[re.Pattern[str]]) -> Callable[[Key, str], bool]:
    """Whether any pattern matches a key as a whole and names its site, unlike ``.*``, which matches any other site as well."""
    return functools.partial(_names, tuple(patterns))


def _names(patterns: Sequence[re.Pattern[str]], parts: Key, key: str) -> bool:
    others = [parts._replace(site=site).format() for site in (_UNLIKELY, f"{parts.site}.{_UNLIKELY}")]
    name = re.compile(rf"(?<!\w){re.escape(parts.site)}(?!\w)")
    for pattern in [pattern for pattern in patterns if pattern.fullmatch(key)]:
        text = pattern.pattern.replace("\\", "").split("/")
        if name.search(text[-2] if len(text) > 2 else "/".join(text)) or not any(map(pattern.fullmatch, others)):
            return True
    return False


_UNLIKELY = "qjxzkvwq"
"""No name of a module or parameter."""


def words_of(rule: AlertRule, fired: Sequence[Fired], step: int) -> str:
    """The finding of a rule in a record, in a sentence."""
    since = min(figure.since for figure in fired)
    if rule.phrase:
        first, num_sites = fired[0], len({Key.parse(figure.key).site for figure in fired})
        parts = Key.parse(first.key)
        most = "" if parts.site == ROOT_SITE else f", most of it in {parts.site}"
        times = abs(first.value) / first.base if first.base else math.inf
        sites = parts.site + (f" and {num_sites - 1} more" if num_sites > 1 else "")
        words = {"sites": sites, "kind": parts.kind.replace("_", " "), "statistic": parts.statistic, "most": most}
        text = rule.phrase.format(value=first.value, times=times, **words)
        return f"{text}, since step {since}{' at the latest' if since else ''}."
    when = f"in {rule.for_steps} records from step {since} to {step}" if rule.for_steps > 1 else f"in step {step}"
    more = f"; and {len(fired) - MAX_NAMED} more" if len(fired) > MAX_NAMED else ""
    figures = "; ".join(f"{figure.key}: {_figure(rule, figure)}" for figure in fired[:MAX_NAMED])
    return f"{figures}{more}; {_condition(rule)} {when}."


def _figure(rule: AlertRule, fired: Fired) -> str:
    if not rule.relative_to:
        return f"{fired.value:.4g}"
    base = f"{abs(fired.value) / fired.base:.3g} times its median" if fired.base else "its median is 0"
    return f"{fired.value:.4g} ({base})"


def _condition(rule: AlertRule) -> str:
    """The condition of a user's alert in words."""
    unit = " times the median of earlier records" if rule.relative_to == "median" else ""
    limits = {"above": rule.above, "below": rule.below}
    return " or ".join(f"{name} {limit:g}{unit}" for name, limit in limits.items() if limit is not None)
