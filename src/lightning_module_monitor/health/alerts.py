"""Rules on recorded values, judged record by record: each fires once for a cause, on every rank alike, as all have the same records."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.record import RANK_DISAGREEMENT, Finding, Key, Severity, Training, is_undefined

if TYPE_CHECKING:  # imports torch, which a command that reads a store does without
    from lightning_module_monitor.statistics.stream import Stream

Action = Literal["warn", "stop", "checkpoint", "capture"]
ACTIONS: tuple[Action, ...] = ("warn", "stop", "checkpoint", "capture")
"""Reactions to a finding, which is logged in any case."""

MEDIAN_RECORDS = 50
"""Number of earlier records in a median."""

LEAST_RECORDS = 10
"""Number of earlier records without which there is no median."""

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
    """Which ones nothing acts on in this record; ``None``: none of them."""


def each(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """Every value is a figure."""
    return Figures(keys, values, keys)


@dataclass(frozen=True)
class AlertRule:
    """A condition on recorded values, and the actions when it is met."""

    name: str
    concerns: Callable[[Key, str], bool]
    """Whether a key is one of the rule's, given in parts and as a whole. Callables here are named functions: a callback can be pickled."""
    above: float | None = None
    below: float | None = None
    relative_to: Literal["", "median", "first"] = ""
    """``above`` and ``below`` are multiples of: the median of the figure's earlier values, or the largest of its first ones. Then the sign
    of a figure does not count."""
    is_unchanged: bool = False
    """Whether the condition is that a figure equals the one of the record before to the last bit."""
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
    until_step: float = math.inf
    """Records of later steps do not count."""
    unless_loss_falls: float = math.inf
    """Records do not count in which the training loss has fallen by more than this part of the first one; see :func:`has_fallen`."""
    parameters: Training | None = None
    """State of the parameters that the rule is for; ``None``: all."""
    severity: Severity = "warning"
    phrase: str = ""
    """The finding in words, a format of ``value``, ``times`` (the value over its base), ``sites``, ``kind`` and ``statistic``. Default:
    the keys with their values, and the condition."""

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
    """The figure that it is compared with; 1 where it is compared with none."""
    since: int
    """The step of the first of the records in which the condition was met."""


def has_fallen(first: float, loss: float, part: float) -> bool:
    """Whether a loss is below the first one by more than a part of its magnitude; never where one is NaN or the part is infinite.

    >>> has_fallen(2.3, 1.1, 0.5), has_fallen(2.3, 2.0, 0.5), has_fallen(-1.0, -1.6, 0.5)
    (True, False, True)
    """
    return loss < first - part * abs(first)


class RuleState:
    """One rule over the records: the state of each of its figures."""

    def __init__(self, rule: AlertRule) -> None:
        self.rule = rule
        self._rows: dict[str, int] = {}
        self.num_records = 0
        """Number of records with figures."""
        self.num_passed_over = 0
        """Number of those that were not judged, as the loss had fallen."""
        self._newest: tuple[tuple[str, ...], NDArray[np.intp]] = (), np.empty(0, np.intp)
        """The last names and their rows: from record to record they are mostly the same."""
        num_recent = MEDIAN_RECORDS if rule.relative_to == "median" else 1
        fields: list[tuple[Any, ...]] = [("recent", float, (num_recent,)), ("first", float, (FIRST_RECORDS,))]
        counts = [("num_met", int), ("since", int), ("num_well", int), ("has_worked", bool)]
        self._state = np.zeros(0, [*fields, *counts])
        """By row. ``recent`` holds the last values, the newest last, and ``first`` the first ones, NaN where there are fewer; ``num_met``
        counts the records up to the last one in which the condition was met, ``since`` is the step of the first of these, ``num_well``
        counts those in which it was not since the rule fired; ``has_worked`` is whether the figure was not idle in any record."""

    def observe(self, step: int, keys: tuple[str, ...], values: NDArray[np.float64]) -> list[Fired]:
        """The figures that with this record have met the condition for long enough.

        ``keys`` are those of the rule in the record, and ``values`` theirs, shape ``(keys,)``. A NaN meets no condition and ends a series
        of records that do.
        """
        is_defined = ~is_undefined(values)
        if not is_defined.all():  # a store does not show them either
            keys, values = tuple(itertools.compress(keys, is_defined.tolist())), values[is_defined]
        found = self.rule.figures(keys, values)
        is_number, rows = ~np.isnan(found.values), self._rows_of(found.names)
        is_there = np.ones(len(rows), bool) if found.is_there is None else found.is_there
        self._state["num_met"][rows[is_there & ~is_number]] = 0
        places = np.flatnonzero(is_there & is_number)
        rows, value = rows[places], found.values[places]
        self.num_records += len(rows) > 0
        is_idle = np.zeros(len(rows), bool) if found.is_idle is None else found.is_idle[places]
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
        after["first"][begins, num_first[begins]] = value[begins]
        self._state[rows] = after
        rows_of_fired = np.flatnonzero(fires).tolist()
        return [Fired(found.keys[places[row]], float(value[row]), float(base[row]), int(after["since"][row])) for row in rows_of_fired]

    def num_met(self) -> dict[str, int]:
        """In how many consecutive records, up to the last one, each figure met the condition."""
        return {name: int(self._state[row]["num_met"]) for name, row in self._rows.items()}

    def state(self) -> dict[str, tuple[Any, ...]]:
        """The state for a checkpoint, in plain numbers, by name of the figure."""
        numbers = {name: self._state[row] for name, row in self._rows.items()}
        return {
            name: tuple(part[~np.isnan(part)].tolist() if part.ndim else part.item() for part in (one[field] for field in one.dtype.names))
            for name, one in numbers.items()
        }

    def load(self, state: Mapping[str, tuple[Any, ...]]) -> None:
        """Restore a result of :meth:`state`."""
        rows = self._rows_of(tuple(state))
        for row, (recent, first, *rest) in zip(rows, state.values(), strict=True):
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
        """The base that limits are multiples of; NaN where it is not known yet."""
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


_CONDITIONS = ("name", "above", "below", "relative_to", "num_base", "until_step", "is_unchanged", "for_steps")


def conditions(rule: AlertRule) -> str:
    """Differs between rules that fire at different times."""
    return repr(tuple(getattr(rule, name) for name in _CONDITIONS))


def matching(patterns: Iterable[re.Pattern[str]]) -> Callable[[Key, str], bool]:
    """Whether any pattern matches a key as a whole."""
    return functools.partial(_matches, tuple(patterns))


def _matches(patterns: Sequence[re.Pattern[str]], _parts: Key, key: str) -> bool:
    return any(pattern.fullmatch(key) for pattern in patterns)


def words_of(rule: AlertRule, fired: Sequence[Fired], step: int) -> str:
    """What a rule found in a record, in a sentence."""
    since = min(one.since for one in fired)
    if rule.phrase:
        first, num_sites = fired[0], len({Key.parse(one.key).site for one in fired})
        parts = Key.parse(first.key)
        times = abs(first.value) / first.base if first.base else math.inf
        sites = parts.site + (f" and {num_sites - 1} more" if num_sites > 1 else "")
        text = rule.phrase.format(value=first.value, times=times, sites=sites, kind=parts.kind.replace("_", " "), statistic=parts.statistic)
        return f"{text}, since step {since}{' at the latest' if since else ''}."
    when = f"in {rule.for_steps} records from step {since} to {step}" if rule.for_steps > 1 else f"in step {step}"
    more = f"; and {len(fired) - MAX_NAMED} more" if len(fired) > MAX_NAMED else ""
    figures = "; ".join(f"{one.key}: {_figure(rule, one)}" for one in fired[:MAX_NAMED])
    return f"{figures}{more}, {when}. {_condition(rule)}"


def _figure(rule: AlertRule, one: Fired) -> str:
    """A figure that met the condition, and the one it is compared with."""
    if not rule.relative_to:
        return f"{one.value:.4g}"
    return f"{one.value:.4g} ({abs(one.value) / one.base:.3g} times its median)" if one.base else f"{one.value:.4g} (its median is 0)"


def _condition(rule: AlertRule) -> str:
    """The condition of a user's alert in words."""
    unit = " times the median of earlier records" if rule.relative_to == "median" else ""
    limits = {"above": rule.above, "below": rule.below}
    return f"The alert is for {' or '.join(f'{name} {limit:g}{unit}' for name, limit in limits.items() if limit is not None)}."


# Between ranks

CURE = "look for what moves it on one rank alone, e.g. a parameter that the reduction of gradients leaves out"


class ReplicaAlert:
    """Reports once that ranks have different values of a parameter that should be the same, and again after a record without."""

    def __init__(self) -> None:
        self._is_reported = False

    def examine(self, step: int, differing: Sequence[Stream]) -> list[Finding]:
        """The finding of a record, if there is one, from the streams whose values differ, in the order of the model."""
        was_reported, self._is_reported = self._is_reported, bool(differing)
        if was_reported or not differing:
            return []
        first, num_sites = differing[0], len({stream.site for stream in differing})
        what = f"{first.kind} {first.site}" + (f" and {num_sites - 1} more" if num_sites > 1 else "")
        meaning = "Those recorded are of all ranks' elements together"
        words = f"Ranks have different values of {what}, and should have the same. {meaning}. Try: {CURE}."
        return [Finding(step, RANK_DISAGREEMENT, first.site, next(iter(first.number_keys), ""), words)]
