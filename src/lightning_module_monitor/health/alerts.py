"""Rules on recorded values: each fires once for a cause, in words with figures; on every rank alike, as all have the same records."""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lightning_module_monitor.record import STEP_SKIPPED, Finding, Key, Record

Action = Literal["warn", "stop", "checkpoint", "capture"]
ACTIONS: tuple[Action, ...] = ("warn", "stop", "checkpoint", "capture")
"""What may follow a finding; that it is said always does."""

MEDIAN_RECORDS = 50
"""Of how many earlier records a median is."""

LEAST_RECORDS = 10
"""How many there have to be before there is one."""

FIRST_RECORDS = 3
"""Of how many records the largest figure is what a run is measured by that may explode."""

QUIET_RECORDS = 10
"""In how many records, one after the other, a figure has to be well before it is said anew that it is not."""

MAX_NAMED = 3
"""How many keys a sentence names."""


class Figure(NamedTuple):
    """What a rule looks at, and the key that shows it best."""

    value: float
    key: str
    is_idle: bool = False
    """Whether nothing acts on it in this record."""


Figures = Callable[[Mapping[str, float]], Mapping[str, Figure]]
"""Makes figures, by name, of the values of the keys that a rule is about."""


def each(values: Mapping[str, float]) -> dict[str, Figure]:
    """Every value by itself."""
    return {key: Figure(value, key) for key, value in values.items()}


@dataclass(frozen=True)
class AlertRule:
    """When something is to be said of some keys."""

    name: str
    concerns: Callable[[Key, str], bool]
    """Whether it is about a key, given in parts and as a whole. A named function, as all others here: a callback can be pickled."""
    above: float | None = None
    below: float | None = None
    relative_to: Literal["", "median", "first"] = ""
    """What ``above`` and ``below`` are multiples of: the median of the figure's own earlier values, or the largest of its first ones. Then
    the sign of a figure does not count."""
    changes_by: float | None = None
    """The factor by which the magnitude of a figure grows, or shrinks, from one record to the next; see :func:`change`."""
    is_unchanged: bool = False
    """Whether it is about figures that are the same to the last bit as in the record before."""
    for_steps: int = 1
    """In how many records, one after the other."""
    then: tuple[Action, ...] = ("warn",)
    figures: Figures = each
    needs_step: bool = False
    """Whether it says nothing of a step that a ``GradScaler`` has skipped."""
    words: str = ""
    """What it means that figures are so, and what to try."""


@dataclass
class _Course:
    """One figure over the records."""

    recent: deque[float]
    """Its last values: as many as its rule looks back on."""
    first: list[float] = field(default_factory=list)
    not_zero: float = 0.0
    """The last value that was not 0."""
    num_met: int = 0
    """In how many records, up to the last one, the condition was met."""
    num_well: int = QUIET_RECORDS
    """In how many it was not, since it was said that it is."""
    has_worked: bool = False
    """Whether it was not idle in any record."""

    @classmethod
    def of(cls, rule: AlertRule, recent: Iterable[float] = (), *more: Any) -> _Course:
        """One that begins, or goes on from what :meth:`state` gave."""
        return cls(deque(recent, MEDIAN_RECORDS if rule.relative_to == "median" else 1), *more)

    def add(self, value: float) -> None:
        self.recent.append(value)
        self.not_zero = value or self.not_zero
        if len(self.first) < FIRST_RECORDS:
            self.first.append(value)

    def state(self) -> tuple[Any, ...]:
        """Of numbers alone."""
        return [*self.recent], [*self.first], self.not_zero, self.num_met, self.num_well, self.has_worked


def change(value: float, before: float, not_zero: float) -> float:
    """By which factor a figure has changed, up or down: of the larger magnitude over the smaller one, of two values.

    Args:
        value: What it is.
        before: What it was in the record before.
        not_zero: The last value before that was not 0; 0 if there was none.

    Returns:
        At least 1. A fall to 0 is infinite. From 0 on it is of the last value that was not 0, and 1 if there was none: what begins
        at 0 changes by no factor.

    Examples:
        >>> change(-8.0, 2.0, 2.0), change(0.0, 2.0, 2.0), change(6.0, 0.0, 2.0), change(6.0, 0.0, 0.0)
        (4.0, inf, 3.0, 1.0)
    """
    if not value:
        return math.inf if before else 1.0
    smaller, larger = sorted((abs(value), abs(not_zero)))
    return 1.0 if smaller in (0.0, larger) else larger / smaller


class Alarm(NamedTuple):
    """A finding, and what is to follow it."""

    finding: Finding
    then: tuple[Action, ...]


class Alerts:
    """Watches records go by.

    Args:
        rules: What to look out for.
        is_trained: Whether a parameter, by the name of its site, is one that is to be trained.
    """

    def __init__(self, rules: Sequence[AlertRule], is_trained: Callable[[str], bool] = lambda _site: True) -> None:
        self._rules = rules
        self._is_trained = is_trained
        self._rules_by_key: dict[str, list[int]] = {}
        self._courses: list[dict[str, _Course]] = [{} for _rule in rules]

    def alarms(self, record: Record) -> list[Alarm]:
        """What a record gives rise to: of each rule at most one, for all keys together that meet its condition now and did not before.

        A value that is NaN meets no condition, and counts for none.
        """
        if not self._rules:
            return []
        was_skipped = any(value for key, value in record.values.items() if key.endswith(STEP_SKIPPED))
        of_rules: list[dict[str, float]] = [{} for _rule in self._rules]
        for key, value in record.values.items():
            for number in self._concerned(key):
                of_rules[number][key] = value
        alarms = []
        for rule, values, courses in zip(self._rules, of_rules, self._courses, strict=True):
            if values and not (rule.needs_step and was_skipped):
                fired = [(figure, told) for figure, told in _judged(rule, rule.figures(values), courses) if self._counts(rule, figure)]
                if fired:
                    alarms.append(Alarm(_finding(rule, fired, record.step), rule.then))
        return alarms

    def state(self) -> dict[str, Any]:
        """What a run that goes on from here has to know, in plain numbers and texts: of every rule how each of its figures went."""
        every = zip(self._rules, self._courses, strict=True)
        return {_conditions(rule): {name: course.state() for name, course in courses.items()} for rule, courses in every}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave; a rule that was another one begins anew."""
        for rule, courses in zip(self._rules, self._courses, strict=True):
            courses |= {name: _Course.of(rule, *values) for name, values in state.get(_conditions(rule), {}).items()}

    def _concerned(self, key: str) -> list[int]:
        if key not in self._rules_by_key:
            parts = Key.parse(key)
            self._rules_by_key[key] = [number for number, rule in enumerate(self._rules) if rule.concerns(parts, key)]
        return self._rules_by_key[key]

    def _counts(self, rule: AlertRule, figure: Figure) -> bool:
        return not rule.is_unchanged or self._is_trained(Key.parse(figure.key).site)


def _conditions(rule: AlertRule) -> str:
    """What tells a rule from others that fire at other times."""
    return repr((rule.name, rule.above, rule.below, rule.relative_to, rule.changes_by, rule.is_unchanged, rule.for_steps))


def matching(patterns: Sequence[re.Pattern[str]]) -> Callable[[Key, str], bool]:
    """Whether any pattern matches a key as a whole."""
    return functools.partial(_matches, tuple(patterns))


def _matches(patterns: Sequence[re.Pattern[str]], _parts: Key, key: str) -> bool:
    return any(pattern.fullmatch(key) for pattern in patterns)


def _judged(rule: AlertRule, figures: Mapping[str, Figure], courses: dict[str, _Course]) -> Iterable[tuple[Figure, str]]:
    """The figures that have met the condition for as long as they have to, since this record; and how, in words."""
    for name, figure in figures.items():
        course = courses.get(name)
        if course is None:
            course = courses[name] = _Course.of(rule)
        if math.isnan(figure.value):
            course.num_met = 0
            continue
        # What has been at work and is idle now waits for its turn.
        told = "" if figure.is_idle and course.has_worked else _met(rule, figure.value, course)
        course.has_worked |= not figure.is_idle
        course.num_met = course.num_met + 1 if told else 0
        course.num_well = 0 if course.num_well < QUIET_RECORDS and told else course.num_well + (not told)
        course.add(figure.value)
        if course.num_met >= rule.for_steps and course.num_well >= QUIET_RECORDS:
            course.num_well = 0
            yield figure, told


def _met(rule: AlertRule, value: float, course: _Course) -> str:
    """How the condition is met, in words; empty if it is not."""
    before = course.recent[-1] if course.recent else None
    if rule.is_unchanged:
        return f"{value:.4g} as before" if value == before else ""
    if rule.changes_by is not None and before is not None and change(value, before, course.not_zero) > rule.changes_by:
        last = f", {course.not_zero:.4g} before that" if not before else ""
        return f"{value:.4g}, {before:.4g} in the record before{last}"
    base = _base(rule, course)
    if base is None:
        return ""
    size = abs(value) if rule.relative_to else value
    told = f"{size / base:.3g} times {_RELATIVE[rule.relative_to]}" if base else f"{_RELATIVE[rule.relative_to]} is 0"
    is_out = (rule.above is not None and size > rule.above * base) or (rule.below is not None and size < rule.below * base)
    return (f"{value:.4g} ({told})" if rule.relative_to else f"{value:.4g}") if is_out else ""


_RELATIVE = {"": "", "median": "its median", "first": "that of the first records"}


def _base(rule: AlertRule, course: _Course) -> float | None:
    """What limits are multiples of; ``None`` where that is not known yet."""
    if rule.relative_to == "median":
        return abs(statistics.median(course.recent)) if len(course.recent) >= LEAST_RECORDS else None
    if rule.relative_to == "first":
        return max(map(abs, course.first)) if course.first else None
    return 1.0


def _finding(rule: AlertRule, fired: Sequence[tuple[Figure, str]], step: int) -> Finding:
    named = "; ".join(f"{figure.key}: {told}" for figure, told in fired[:MAX_NAMED])
    more = f"; and {len(fired) - MAX_NAMED} more" if len(fired) > MAX_NAMED else ""
    records = f", in {rule.for_steps} records up to step {step}" if rule.for_steps > 1 else f", in step {step}"
    key = fired[0][0].key
    return Finding(step, rule.name, Key.parse(key).site, key, f"{named}{more}{records}. {rule.words or _condition(rule)}")


def _condition(rule: AlertRule) -> str:
    """A rule of the user's, in words."""
    unit = " times the median of earlier records" if rule.relative_to == "median" else ""
    limits = {"above": rule.above, "below": rule.below}
    told = [f"{name} {limit:g}{unit}" for name, limit in limits.items() if limit is not None]
    told += [] if rule.changes_by is None else [f"a change by more than {rule.changes_by:g} times"]
    return f"The alert is for {' or '.join(told)}."
