"""Rules on recorded values, judged record by record. All ranks have the same records, so a rule fires on all of them alike."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.facts import Training
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import ROOT_SITE
from lightning_module_monitor.record import Severity, is_undefined

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
    is_there: NDArray[np.bool_] | None = None
    """Which figures this record has; ``None``: all of them."""
    is_idle: NDArray[np.bool_] | None = None
    """Parameters without a gradient in this record; ``None``: none."""
    first: NDArray[np.float64] | None = None
    """What counts as the first values of the figures; ``None``: the values."""


def nothing(_parts: Key, _key: str) -> bool:
    """No key."""
    return False


def each(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """Every value is a figure."""
    return Figures(keys, values, keys)


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
    figures: Callable[[tuple[str, ...], NDArray[np.float64]], Figures] = each
    """Makes figures of the rule's keys and their values in one record."""
    num_base: int = 0
    """Number of records that make the base: the first ones (default: 3), or the fewest earlier ones of a median (default: 10)."""
    needs_step: bool = False
    """Whether steps that a ``GradScaler`` skipped do not count."""
    needs_rate: bool = False
    """Whether parameters whose learning rate is 0 do not count."""
    is_of_facts: bool = False
    """Whether a record without values of it is well, if the facts of its step are known."""
    judges_rise: bool = False
    """Whether the rule judges the rise of the training loss (:attr:`History.rise`) in place of the loss."""
    until_step: float = math.inf
    """Records of later steps do not count."""
    unless_loss_falls: float = math.inf
    """Records do not count in which the training loss has fallen by more than this part of the first one; see :func:`has_fallen`."""
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
        """Number of records with figures, judged or not, and of records that are well without figures (``is_of_facts``)."""
        self.num_passed_over = 0
        """Number of records that were not judged, because the loss had fallen."""
        self._newest: tuple[tuple[str, ...], NDArray[np.intp]] = (), np.empty(0, np.intp)
        """The last names and their rows: from record to record they are mostly the same."""
        num_recent = MEDIAN_RECORDS if rule.relative_to == "median" else 1
        fields: list[tuple[Any, ...]] = [("recent", float, (num_recent,)), ("first", float, (FIRST_RECORDS,))]
        counts = [("num_met", int), ("since", int), ("num_well", int), ("has_worked", bool)]
        self._state = np.zeros(0, [*fields, *counts])
        """A row for each figure. ``recent`` holds the last values, the newest last, and ``first`` the first values, padded with NaN.
        ``num_met`` counts the consecutive records, up to the last, in which the condition was met, and ``since`` is the step of the first.
        ``num_well`` counts the records without the condition since the rule fired. ``has_worked``: the figure was not idle in a record."""

    def count_unjudged(self, *, has_loss_fallen: bool = False) -> None:
        """Count a record whose figures, if it has any, are not judged."""
        self.num_records += 1
        self.num_passed_over += has_loss_fallen

    def observe(self, step: int, keys: tuple[str, ...], values: NDArray[np.float64]) -> list[Fired]:
        """The figures that with this record have met the condition for long enough.

        ``keys`` are the rule's keys in the record, with ``values`` of shape ``(keys,)``. A NaN meets no condition and ends a streak.
        """
        is_defined = ~is_undefined(values)
        if not is_defined.all():  # a store does not show them either
            keys, values = tuple(itertools.compress(keys, is_defined.tolist())), values[is_defined]
        figures = self.rule.figures(keys, values)
        is_number, rows = ~np.isnan(figures.values), self._rows_of(figures.names)
        is_there = np.ones(len(rows), bool) if figures.is_there is None else figures.is_there
        self._state["num_met"][rows[is_there & ~is_number]] = 0
        judged = np.flatnonzero(is_there & is_number)
        rows, value = rows[judged], figures.values[judged]
        self.num_records += len(rows) > 0
        is_idle = np.zeros(len(rows), bool) if figures.is_idle is None else figures.is_idle[judged]
        before = self._state[rows]
        base = self._base(before)
        is_met = self._is_met(value, before, base) & ~(is_idle & before["has_worked"])
        after = before.copy()
        after["has_worked"] |= ~is_idle
        after["num_met"] = np.where(is_met, before["num_met"] + 1, 0)
        after["since"] = np.where(is_met & (before["num_met"] == 0), step, before["since"])
        after["num_well"] = np.where(is_met & (before["num_well"] < QUIET_RECORDS), 0, before["num_well"] + ~is_met)
        fires = (after["num_met"] >= self.rule.for_steps) & (after["num_well"] >= QUIET_RECORDS)
        after["num_well"][fires] = 0
        after["recent"][:, :-1] = before["recent"][:, 1:]
        after["recent"][:, -1] = value
        num_first = (~np.isnan(before["first"])).sum(axis=1)
        begins = np.flatnonzero(num_first < FIRST_RECORDS)
        after["first"][begins, num_first[begins]] = (value if figures.first is None else figures.first[judged])[begins]
        self._state[rows] = after
        fired = np.flatnonzero(fires).tolist()
        return [Fired(figures.keys[judged[index]], float(value[index]), float(base[index]), int(after["since"][index])) for index in fired]

    def num_met(self) -> dict[str, int]:
        """Number of consecutive records, up to the last, in which each figure met the condition."""
        return {name: int(self._state[row]["num_met"]) for name, row in self._rows.items()}

    def state(self) -> tuple[int, int, dict[str, tuple[Any, ...]]]:
        """The state for a checkpoint, in plain numbers: the two numbers of records, and a row for each figure, by its name."""
        rows = {name: tuple(map(_as_plain, self._state[row].item())) for name, row in self._rows.items()}
        return self.num_records, self.num_passed_over, rows

    def load(self, state: tuple[int, int, Mapping[str, tuple[Any, ...]]]) -> None:
        """Restore a result of :meth:`state`."""
        self.num_records, self.num_passed_over, figures = state
        rows = self._rows_of(tuple(figures))
        for row, (recent, first, *rest) in zip(rows, figures.values(), strict=True):
            self._state[row] = (np.full_like(self._state["recent"][row], np.nan), np.full(FIRST_RECORDS, np.nan), *rest)
            if recent:
                self._state["recent"][row, -len(recent) :] = recent
            self._state["first"][row, : len(first)] = first

    def _rows_of(self, names: tuple[str, ...]) -> NDArray[np.intp]:
        """Rows of figures; new ones get a row."""
        if names == self._newest[0]:
            return self._newest[1]
        num_rows = len(self._rows.keys() | names)
        if num_rows > len(self._state):
            new = np.zeros(num_rows - len(self._state), self._state.dtype)
            new["recent"], new["first"], new["num_well"] = np.nan, np.nan, QUIET_RECORDS
            # Before the names: a Ctrl-C in between leaves no name without a row.
            self._state = np.concatenate([self._state, new])
        rows = np.array([self._rows.setdefault(name, len(self._rows)) for name in names], np.intp)
        self._newest = names, rows
        return rows

    def _base(self, state: NDArray[Any]) -> NDArray[np.float64]:
        """The base of which limits are multiples; NaN while it is not known."""
        if self.rule.relative_to == "median":
            is_known = (~np.isnan(state["recent"])).sum(axis=1) >= self.rule.base_records
            base = np.full(len(state), np.nan)
            base[is_known] = np.abs(np.nanmedian(state["recent"][is_known], axis=1))
            return base
        if self.rule.relative_to == "first":
            return np.asarray(np.fmax.reduce(np.abs(state["first"][:, : self.rule.base_records]), axis=1))
        return np.ones(len(state))

    def _is_met(self, value: NDArray[np.float64], state: NDArray[Any], base: NDArray[np.float64]) -> NDArray[np.bool_]:
        if self.rule.is_unchanged:
            return np.asarray(value == state["recent"][:, -1])
        size = np.abs(value) if self.rule.relative_to else value
        is_met = np.zeros(len(value), bool)
        with np.errstate(invalid="ignore"):  # an infinite base times 0
            if self.rule.above is not None:
                is_met |= size > self.rule.above * base
            if self.rule.below is not None:
                is_met |= size < self.rule.below * base
        return is_met


def _as_plain(field: Any) -> Any:  # noqa: ANN401  # an array of numbers, or a number
    return field[~np.isnan(field)].tolist() if isinstance(field, np.ndarray) else field


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
    return f"{figures}{more}, {when}. {_condition(rule)}"


def _figure(rule: AlertRule, fired: Fired) -> str:
    """A figure that met the condition, and its base."""
    if not rule.relative_to:
        return f"{fired.value:.4g}"
    base = f"{abs(fired.value) / fired.base:.3g} times its median" if fired.base else "its median is 0"
    return f"{fired.value:.4g} ({base})"


def _condition(rule: AlertRule) -> str:
    """The condition of a user's alert in words."""
    unit = " times the median of earlier records" if rule.relative_to == "median" else ""
    limits = {"above": rule.above, "below": rule.below}
    return f"The alert is for {' or '.join(f'{name} {limit:g}{unit}' for name, limit in limits.items() if limit is not None)}."
