"""The run at a glance: losses, learning rates with their parameter groups, norms of the whole model, steps and duration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count, takewhile
from typing import Any, NamedTuple

import numpy as np

from lightning_module_monitor.display import counted
from lightning_module_monitor.record import BATCH_SIZE, LOSS, ROOT_SITE, TRAIN, Facts, name_of_rate
from lightning_module_monitor.report.stored_run import StoredRun
from lightning_module_monitor.sinks.store.matrices import Table

VALIDATION_LOSS = re.compile(r".*val.*loss.*")
TOTALS = {"gradient_before_clip": "gradient before clipping", "gradient": "whole gradient", "parameter": "all parameters"}
"""The norms of the whole model: the name on the page, by kind."""
EXTREMES = {"Loss": "best", "Learning rate": "largest", "Norm": "largest", "Gradient noise": "largest"}
"""The word for the extreme of a series, by the title of its group."""
MAX_ROWS = 6
"""Largest number of series of a group in the table."""


@dataclass(frozen=True)
class Course:
    """A series of one run in few numbers."""

    first: float
    last: float
    extreme: float
    """The smallest loss, or the largest other value; NaN without a finite value."""
    step: int
    """The step of the extreme."""
    note: str = ""
    """The parameter group of a learning rate."""


class SeriesRow(NamedTuple):
    """A series of all runs."""

    name: str
    courses: Sequence[Course | None]
    """One for each run; ``None`` where the run does not have the series."""

    @property
    def notes(self) -> list[str]:
        """The different notes."""
        return [*dict.fromkeys(course.note for course in self.courses if course is not None and course.note)]


class Group(NamedTuple):
    """Series of one sort."""

    title: str
    extreme: str
    """The word for the extreme."""
    rows: Sequence[SeriesRow]


def at_a_glance(runs: Sequence[StoredRun]) -> list[Group]:
    """The series to look at first, as far as any run has them."""
    courses = [{(group, name): course for group, name, course in _first_series(run)} for run in runs]
    names = dict.fromkeys(name for courses_of_run in courses for name in courses_of_run)
    groups = {
        title: [SeriesRow(name[1], [of_run.get(name) for of_run in courses]) for name in names if name[0] == title] for title in EXTREMES
    }
    return [Group(title, EXTREMES[title], rows) for title, rows in groups.items() if rows]


def as_lines(run: StoredRun) -> list[str]:
    """For a terminal the title of each group, and a line for each of its series."""
    lines = []
    for title, extreme, rows in at_a_glance([run]):
        lines += [title]
        for name, [course] in rows[:MAX_ROWS]:
            if course is not None:
                lines += [f"   {name}: {course.first:.4g} to {course.last:.4g}, {extreme} {course.extreme:.4g} at step {course.step}"]
    return lines


def _first_series(run: StoredRun) -> Iterator[tuple[str, str, Course]]:
    """Group, name and course of the series of a run to look at first."""
    by_name = {table.statistic: table for table in run.context}
    for name, table in by_name.items():
        if name == LOSS or VALIDATION_LOSS.fullmatch(name):
            yield "Loss", name, _course(table, np.argmin)
    facts = run.facts[-1][1] if run.facts else Facts()
    for number, name in enumerate(takewhile(by_name.__contains__, map(name_of_rate, count()))):
        yield "Learning rate", name, _course(by_name[name], note=_group_note(facts, number))
    for table in norms_of(run):
        if table.sites[0] == ROOT_SITE:
            yield "Norm", TOTALS[table.name.kind], _course(table)
    for scale in noise_scales_of(run):
        if scale.sites[0] == ROOT_SITE:
            yield "Gradient noise", "noise scale", _course(scale)
            if BATCH_SIZE in by_name:  # to compare it with
                yield "Gradient noise", "batch size", _course(by_name[BATCH_SIZE])


def _group_note(facts: Facts, number: int) -> str:
    """Name and size of a parameter group; a group without a name has that of its first parameter. Empty if it is not known."""
    if number >= len(facts.groups):
        return ""
    # A single group has all trained parameters, also where the optimizer holds copies.
    is_only = len(facts.groups) == 1
    members = {
        name: parameter.numel
        for name, parameter in facts.parameters.items()
        if parameter.group == number or (is_only and parameter.training == "trained")
    }
    group = facts.groups[number]
    first = "" if is_only else f"{next(iter(members), '')}{', ...' if len(members) > 1 else ''}"
    size = f"{counted(len(members), 'tensor')}, {sum(members.values()):,} elements" if members else ""
    return ": ".join(filter(None, (group.name or first, f"{size} ({group.optimizer})" if size else group.optimizer)))


def names_of_groups(run: StoredRun) -> list[str]:
    """The names that the parameter groups have themselves, in the order of the learning rates."""
    return [group.name for group in run.facts[-1][1].groups] if run.facts else []


def norms_of(run: StoredRun) -> list[Table]:
    """The norms of gradients and parameters of the whole model, and of modules of which they were recorded."""
    norms = [table for table in run.totals if table.statistic == "norm" and table.name.stage == TRAIN and table.name.kind in TOTALS]
    return sorted(norms, key=lambda table: [*TOTALS].index(table.name.kind))


def noise_scales_of(run: StoredRun) -> list[Table]:
    """The noise scales of all modules, those of the whole model first."""
    return [table for table in run.totals if (table.name.kind, table.statistic) == ("gradient_noise", "scale")]


def _course(table: Table, extreme: Callable[[Any], Any] = np.argmax, note: str = "") -> Course:
    steps, values = table.steps[table.is_recorded[0]], table.values[0][table.is_recorded[0]]
    finite = np.flatnonzero(np.isfinite(values))
    index = finite[extreme(values[finite])] if finite.size else 0
    return Course(float(values[0]), float(values[-1]), float(values[index]) if finite.size else np.nan, int(steps[index]), note)


def length_of(run: StoredRun) -> list[tuple[str, str]]:
    """Steps and duration of a run, from the first record to the last, as far as they are known."""
    steps, runs = run.steps, run.attributes["configurations"]
    length = [("steps", f"{steps[0]:,} to {steps[-1]:,} ({len(steps):,} recorded)")] if steps else []
    duration = _duration(runs)
    if duration is not None:
        length.append(("duration", in_words(duration) + (f" in {len(runs)} runs" if len(runs) > 1 else "")))
    return length


def _duration(runs: Sequence[Mapping[str, Any]]) -> timedelta | None:
    """The time from the first record to the last, of all runs of a store; ``None`` if a run of an earlier version did not write it."""
    try:
        return sum((datetime.fromisoformat(run["last_record"]) - datetime.fromisoformat(run["started"]) for run in runs), timedelta())
    except (KeyError, ValueError, TypeError):  # absent, or not a time
        return None


def in_words(duration: timedelta) -> str:
    """A duration in its two largest units.

    >>> in_words(timedelta(seconds=7)), in_words(timedelta(days=1, hours=2, minutes=3))
    ('7 s', '26 h 3 min')
    """
    seconds = round(duration.total_seconds())
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"
