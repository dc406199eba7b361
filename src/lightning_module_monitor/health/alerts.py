"""Rules on recorded values, judged record by record: each fires once for a cause, on every rank alike, as all have the same records."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.record import (
    CONTEXT_KIND,
    LOSS,
    RANK_DISAGREEMENT,
    STEP_SKIPPED,
    Finding,
    Key,
    Record,
    Severity,
    is_context,
)

if TYPE_CHECKING:  # imports torch, which a command that reads a store does without
    from lightning_module_monitor.statistics.spec import MetricSpec

Action = Literal["warn", "stop", "checkpoint", "capture"]
ACTIONS: tuple[Action, ...] = ("warn", "stop", "checkpoint", "capture")
"""Reactions to a finding, which is logged in any case."""

MEDIAN_RECORDS = 50
"""Number of earlier records in a median."""

Training = Literal["trained", "untrained", "frozen"]
"""State of a parameter: an optimizer has it; it requires a gradient, and no optimizer has it; or it requires none."""

LEAST_RECORDS = 10
"""Number of earlier records without which there is no median."""

FIRST_RECORDS = 3
"""Number of first records whose largest figure is the base of ``relative_to="first"``."""

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
    num_first: int = FIRST_RECORDS
    """Number of first records whose largest figure is the base of ``relative_to="first"``."""
    needs_step: bool = False
    """Whether steps that a ``GradScaler`` skipped do not count."""
    until_step: float = math.inf
    """Records of later steps do not count."""
    unless_loss_falls: float = math.inf
    """Records do not count in which the training loss has fallen by more than this part of the first one; see :func:`has_fallen`."""
    parameters: Training | None = None
    """State of the parameters that the rule is for; ``None``: all."""
    severity: Severity = "warning"
    words: str = ""
    """Meaning of the condition, and what to try."""


class Fired(NamedTuple):
    """A figure that met its rule's condition for long enough."""

    key: str
    words: str
    """The figure, and the one it is compared with."""
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
        self._newest: tuple[tuple[str, ...], NDArray[np.intp]] = (), np.empty(0, np.intp)
        """The last names and their rows: from record to record they are mostly the same."""
        num_recent = MEDIAN_RECORDS if rule.relative_to == "median" else 1
        fields = [("recent", float, (num_recent,)), ("first", float, (FIRST_RECORDS,))]
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
        found = self.rule.figures(keys, values)
        is_number, rows = ~np.isnan(found.values), self._rows_of(found.names)
        is_there = np.ones(len(rows), bool) if found.is_there is None else found.is_there
        self._state["num_met"][rows[is_there & ~is_number]] = 0
        places = np.flatnonzero(is_there & is_number)
        rows, value = rows[places], found.values[places]
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
        fired = []
        for one in np.flatnonzero(fires).tolist():
            words = self._in_words(value[one], base[one])
            fired.append(Fired(found.keys[places[one]], words, int(after["since"][one])))
        return fired

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
            is_known = (~np.isnan(state["recent"])).sum(axis=1) >= LEAST_RECORDS
            base = np.full(len(state), np.nan)
            base[is_known] = np.abs(np.nanmedian(state["recent"][is_known], axis=1))
            return base
        if self.rule.relative_to == "first":
            return np.asarray(np.fmax.reduce(np.abs(state["first"][:, : self.rule.num_first]), axis=1))
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

    def _in_words(self, value: float, base: float) -> str:
        """A figure that met the condition, and the one it is compared with."""
        rule = self.rule
        if rule.is_unchanged:
            return f"{value:.4g} as before"
        if not rule.relative_to:
            return f"{value:.4g}"
        what = "its median" if rule.relative_to == "median" else "that of the first records"
        return f"{value:.4g} ({abs(value) / base:.3g} times {what})" if base else f"{value:.4g} ({what} is 0)"


class Alarm(NamedTuple):
    """A finding, and the actions that follow it."""

    finding: Finding
    then: tuple[Action, ...]


class Alerts:
    """Judges records by rules.

    Args:
        rules: The rules.
        sites: The names of all sites in the order of the model, in which rules get their values. A record groups keys by what is recorded.
    """

    def __init__(self, rules: Sequence[AlertRule], sites: Iterable[str] = ()) -> None:
        self._states = [RuleState(rule) for rule in rules]
        self._places = {site: place for place, site in enumerate(sites)}
        self._place_of_key: dict[str, int] = {}
        self._concerned: dict[str, list[int]] = {}
        self._first_loss: float | None = None
        self._parameters: Mapping[str, Training] = {}

    def set_parameters(self, parameters: Mapping[str, Training]) -> None:
        """Set the states of parameters, by the names of their sites."""
        if parameters != self._parameters:
            self._parameters = parameters
            self._concerned.clear()

    def alarms(self, record: Record) -> list[Alarm]:
        """The alarms of a record: of each rule at most one, for all keys together that meet its condition now and did not before."""
        if not self._states:
            return []
        was_skipped = any(value for key, value in record.values.items() if key.endswith(STEP_SKIPPED))
        of_rules: list[dict[str, float]] = [{} for _state in self._states]
        for key, value in record.values.items():
            if key not in self._concerned:
                self._concerned[key] = self._rules_of(key)
                self._place_of_key[key] = self._places.get(Key.parse(key).site, -1)
            for place in self._concerned[key]:
                of_rules[place][key] = value
        loss = next((value for key, value in record.values.items() if key.endswith(f"{CONTEXT_KIND}/{LOSS}") and is_context(key)), math.nan)
        if self._first_loss is None and math.isfinite(loss):
            self._first_loss = loss
        first_loss = math.nan if self._first_loss is None else self._first_loss
        alarms = []
        for state, values in zip(self._states, of_rules, strict=True):
            rule = state.rule
            is_left_out = (rule.needs_step and was_skipped) or record.step > rule.until_step
            if values and not is_left_out and not has_fallen(first_loss, loss, rule.unless_loss_falls):
                keys = tuple(sorted(values, key=self._place_of_key.__getitem__))
                fired = state.observe(record.step, keys, np.array([values[key] for key in keys], dtype=float))
                if fired:
                    since, key = min(one.since for one in fired), fired[0].key
                    words = f"{_named(fired)}{when(rule, since, record.step)}. {rule.words or _condition(rule)}"
                    finding = Finding(record.step, rule.name, Key.parse(key).site, key, words, rule.severity, record.step - since)
                    alarms.append(Alarm(finding, rule.then))
        return alarms

    def _rules_of(self, key: str) -> list[int]:
        """Places of the rules that are for a key."""
        parts = Key.parse(key)
        training = self._parameters.get(parts.site)
        rules = [state.rule for state in self._states]
        is_for = [rule.parameters is None or (training or "trained") == rule.parameters for rule in rules]
        return [place for place, rule in enumerate(rules) if is_for[place] and rule.concerns(parts, key)]

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, in plain numbers and texts: the state of every rule's figures."""
        return {LOSS: self._first_loss} | {_conditions(state.rule): state.state() for state in self._states}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state`; a rule with other conditions begins anew."""
        self._first_loss = state.get(LOSS)
        for one in self._states:
            one.load(state.get(_conditions(one.rule), {}))


_CONDITIONS = ("name", "above", "below", "relative_to", "num_first", "until_step", "is_unchanged", "for_steps")


def _conditions(rule: AlertRule) -> str:
    """Differs between rules that fire at different times."""
    return repr(tuple(getattr(rule, name) for name in _CONDITIONS))


def matching(patterns: Iterable[re.Pattern[str]]) -> Callable[[Key, str], bool]:
    """Whether any pattern matches a key as a whole."""
    return functools.partial(_matches, tuple(patterns))


def _matches(patterns: Sequence[re.Pattern[str]], _parts: Key, key: str) -> bool:
    return any(pattern.fullmatch(key) for pattern in patterns)


def when(rule: AlertRule, since: int, step: int) -> str:
    """In which records a rule's condition was met, as the end of a sentence."""
    return f", in {rule.for_steps} records from step {since} to {step}" if rule.for_steps > 1 else f", in step {step}"


def _named(fired: Sequence[Fired]) -> str:
    more = f"; and {len(fired) - MAX_NAMED} more" if len(fired) > MAX_NAMED else ""
    return "; ".join(f"{one.key}: {one.words}" for one in fired[:MAX_NAMED]) + more


def _condition(rule: AlertRule) -> str:
    """The condition of a user's alert in words."""
    unit = " times the median of earlier records" if rule.relative_to == "median" else ""
    limits = {"above": rule.above, "below": rule.below}
    words = [f"{name} {limit:g}{unit}" for name, limit in limits.items() if limit is not None]
    return f"The alert is for {' or '.join(words)}."


# Between ranks

CURE = "look for what moves it on one rank alone, e.g. a parameter that the reduction of gradients leaves out"


class ReplicaAlert:
    """Reports once that ranks have different values of a parameter that should be the same, and again after a record without."""

    def __init__(self) -> None:
        self._is_reported = False

    def examine(self, step: int, differing: Sequence[MetricSpec]) -> list[Finding]:
        """The finding of a record, if there is one, from the specifications whose values differ, in the order of the model."""
        was_reported, self._is_reported = self._is_reported, bool(differing)
        if was_reported or not differing:
            return []
        first, num_sites = differing[0], len({spec.site for spec in differing})
        what = f"{first.kind} {first.site}" + (f" and {num_sites - 1} more" if num_sites > 1 else "")
        meaning = "Those recorded are of all ranks' elements together"
        words = f"Ranks have different values of {what}, and should have the same. {meaning}. Try: {CURE}."
        return [Finding(step, RANK_DISAGREEMENT, first.site, next(iter(first.keys()), ""), words)]
