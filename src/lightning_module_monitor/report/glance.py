"""The run at a glance: losses, learning rates with their parameter groups, norms of the whole model, steps and duration."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, count, takewhile
from typing import Any, NamedTuple

import numpy as np

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.keys import name_of_rate
from lightning_module_monitor.kinds import BATCH_SIZE, LOSS, ROOT_SITE, TRAIN
from lightning_module_monitor.report.stored_run import StoredRun
from lightning_module_monitor.sinks.store.matrices import Table

VALIDATION_LOSS = re.compile(r".*val.*loss.*")
TOTALS = {"gradient_before_clip": "gradient before clipping", "gradient": "whole gradient", "parameter": "all parameters"}
"""The norms of the whole model: the name on the page, by kind."""
EXTREME_WORDS = {"Loss": "best", "Learning rate": "largest", "Norm": "largest", "Gradient noise": "largest"}
"""The word for the extreme of a series, by the title of its group."""
MAX_ROWS = 6
"""Largest number of series of a group in the table."""


@dataclass(frozen=True)
class SeriesSummary:
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
    summaries: Sequence[SeriesSummary | None]
    """One for each run; ``None`` where the run does not have the series."""

    @property
    def notes(self) -> list[str]:
        """The different notes."""
        return [*dict.fromkeys(summary.note for summary in self.summaries if summary is not None and summary.note)]


class Group(NamedTuple):
    """Rows below one title."""

    title: str
    extreme_word: str
    rows: Sequence[SeriesRow]


def at_a_glance(runs: Sequence[StoredRun]) -> list[Group]:
    """The series to look at first, as far as any run has them."""
    summaries = [{(title, name): summary for title, name, summary in _first_series(run)} for run in runs]
    rows = defaultdict[str, list[SeriesRow]](list)
    for title, name in dict.fromkeys(chain.from_iterable(summaries)):
        rows[title].append(SeriesRow(name, [of_run.get((title, name)) for of_run in summaries]))
    return [Group(title, word, rows[title]) for title, word in EXTREME_WORDS.items() if title in rows]


def as_lines(run: StoredRun) -> list[str]:
    """For a terminal the title of each group, a line for each of its first series, and the number of further series."""
    lines = []
    for title, word, rows in at_a_glance([run]):
        lines += [title]
        for name, [summary] in rows[:MAX_ROWS]:
            if summary is not None:
                lines += [f"   {name}: {summary.first:.4g} to {summary.last:.4g}, {word} {summary.extreme:.4g} at step {summary.step}"]
        if len(rows) > MAX_ROWS:
            lines += [f"   and {len(rows) - MAX_ROWS} more"]
    return lines


def _first_series(run: StoredRun) -> Iterator[tuple[str, str, SeriesSummary]]:
    """Title of the group, name and summary of the series of a run to look at first."""
    by_name = {table.statistic: table for table in run.context}
    for name, table in by_name.items():
        if name == LOSS or VALIDATION_LOSS.fullmatch(name):
            yield "Loss", name, _summary(table, np.argmin)
    facts = _last_facts(run)
    for number, name in enumerate(takewhile(by_name.__contains__, map(name_of_rate, count()))):
        yield "Learning rate", name, _summary(by_name[name], note=_group_note(facts, number))
    for table in norms_of(run):
        if table.sites[0] == ROOT_SITE:
            yield "Norm", TOTALS[table.name.kind], _summary(table)
    for scale in noise_scales_of(run):
        if scale.sites[0] == ROOT_SITE:
            yield "Gradient noise", "noise scale", _summary(scale)
            if BATCH_SIZE in by_name:  # to compare it with
                yield "Gradient noise", "batch size", _summary(by_name[BATCH_SIZE])


def _last_facts(run: StoredRun) -> Facts:
    _step, facts = run.facts[-1] if run.facts else (0, Facts())
    return facts


def _group_note(facts: Facts, number: int) -> str:
    """Name, size and optimizer of a parameter group; empty if unknown. One of several groups may have its first parameter's name."""
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
    return [group.name for group in _last_facts(run).groups]


def norms_of(run: StoredRun) -> list[Table]:
    """The norms of gradients and parameters of the whole model, and of modules of which they were recorded."""
    norms = [table for table in run.totals if table.statistic == "norm" and table.name.stage == TRAIN and table.name.kind in TOTALS]
    return sorted(norms, key=lambda table: [*TOTALS].index(table.name.kind))


def noise_scales_of(run: StoredRun) -> list[Table]:
    """The noise scales of all modules, those of the whole model first."""
    return [table for table in run.totals if (table.name.kind, table.statistic) == ("gradient_noise", "scale")]


def _summary(table: Table, index_of_extreme: Callable[[Any], Any] = np.argmax, note: str = "") -> SeriesSummary:
    steps, values = table.steps[table.is_recorded[0]], table.values[0][table.is_recorded[0]]
    finite = np.flatnonzero(np.isfinite(values))
    index = finite[index_of_extreme(values[finite])] if finite.size else 0
    return SeriesSummary(float(values[0]), float(values[-1]), float(values[index]) if finite.size else np.nan, int(steps[index]), note)


def length_of(run: StoredRun) -> list[tuple[str, str]]:
    """Steps and duration of a run, from the first record to the last, as far as they are known."""
    steps, configurations = run.steps, run.attributes["configurations"]
    length = [("steps", f"{steps[0]:,} to {steps[-1]:,} ({len(steps):,} recorded)")] if steps else []
    duration = _duration(configurations)
    if duration is not None:
        length.append(("duration", duration_text(duration) + (f" in {len(configurations)} runs" if len(configurations) > 1 else "")))
    return length


def _duration(configurations: Sequence[Mapping[str, Any]]) -> timedelta | None:
    """The time from the first record to the last, of all runs of a store; ``None`` if a run of an earlier version did not write it."""
    try:
        times = [[datetime.fromisoformat(configuration[name]) for name in ("started", "last_record")] for configuration in configurations]
        return sum((last - first for first, last in times), timedelta())
    except (KeyError, ValueError, TypeError):  # absent, or not a time
        return None


def duration_text(duration: timedelta) -> str:
    """A duration in hours and minutes, in minutes and seconds, or in seconds.

    >>> duration_text(timedelta(seconds=7)), duration_text(timedelta(days=1, hours=2, minutes=3))
    ('7 s', '26 h 3 min')
    """
    seconds = round(duration.total_seconds())
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"
