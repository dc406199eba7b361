"""What is healthy in a run and what is not, from its numbers alone: which site, since when, by which evidence.

Each check is a rule of thumb with its threshold in this file. ``sick`` is what ends a training or leaves a part of the model out of it;
``watch`` is what is unusual, and may be meant.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.record import OWN_KIND, STEP_SKIPPED, TRAIN
from lightning_module_monitor.report.run import Table, of_training

Level = Literal["sick", "watch"]

MOSTLY_ZERO: dict[Level, float] = {"watch": 0.99, "sick": 0.999}
"""Share of the elements."""
FAINT_GRADIENT = 1e-4
"""Of the median over the sites."""
GROWTH: dict[Level, float] = {"watch": 30.0, "sick": 1000.0}
"""From the first quarter of the records to the last."""
SPIKE = 100.0
"""Over the median of the site's own records."""
LARGE_UPDATE: dict[Level, float] = {"watch": 0.05, "sick": 0.3}
"""Norm of update over norm of parameter; 1e-3 is customary (A. Karpathy, "Neural Networks: Zero to Hero", part 4)."""
SMALL_UPDATE = 1e-7
GAIN: dict[Level, float] = {"watch": 10.0, "sick": 1000.0}
"""Of the gradient from block to block, or one over it."""
LARGE_LOGIT: dict[Level, float] = {"watch": 1e3, "sick": 1e4}
"""Training ends near 1e4 (Wortsman et al., "Small-scale proxies for large-scale Transformer training instabilities", arXiv 2309.14322)."""
COLLAPSED_ENTROPY = 0.02
"""Of the entropy that the visible keys allow."""
SKIPPED_SHARE = 0.1

# Within a step what comes first is the cause of what comes later; backward it is the last module that comes first.
_ORDER = ("parameter", "activation", "activation_gradient", "gradient_before_clip", "gradient", "update")
_BACKWARD = ("activation_gradient", "gradient_before_clip", "gradient")
# Statistics that are finite for finite tensors. A std of one element, or a ratio to a zero, is not.
_FINITE = ("norm", "rms", "abs_max", "abs_mean", "mean", "min", "max", "token_norm", "token_rms")


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    level: Level
    problem: str
    """What it is, in few words: findings of one problem are shown together."""
    kind: str
    site: str
    statistic: str
    """The series that shows it."""
    step: int
    """The monitored step at which it began, or is at its worst."""
    evidence: str
    """What was seen, with its numbers, in a sentence."""


@dataclass(frozen=True)
class Check:
    """What was looked for."""

    problem: str
    num_series: int
    """In how many series; 0: in none, because nothing of the sort was recorded."""
    needs: str
    """What has to be recorded for it, as a rule's options."""


@dataclass(frozen=True)
class Verdict:
    """What was found, and what was looked for."""

    findings: Sequence[Finding]
    """The sick ones first; then in the order of the checks, of steps, and of the model."""
    checks: Sequence[Check]

    @property
    def is_sick(self) -> bool:
        """Whether anything is worse than unusual."""
        return any(finding.level == "sick" for finding in self.findings)

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        if not any(check.num_series for check in self.checks):
            return "nothing was recorded that a check could look at"
        sick = {finding.site for finding in self.findings if finding.level == "sick"}
        others = {finding.site for finding in self.findings} - sick
        told = [f"{count(num, 'site')} {level}" for level, num in (("sick", len(sick)), ("to watch", len(others))) if num]
        return ", ".join(told) or "no check found anything"

    @property
    def beginning(self) -> Finding | None:
        """The sick finding with the earliest step: where to look first. ``None`` if nothing is sick."""
        return min((finding for finding in self.findings if finding.level == "sick"), key=lambda finding: finding.step, default=None)


def verdict_on(tables: Sequence[Table], figures: Sequence[Table] = ()) -> Verdict:
    """Look for all that these checks know.

    Args:
        tables: Those of one run's sites.
        figures: The monitor's own, and others without sites.

    Returns:
        What was found in training; validation and other stages are not looked at.
    """
    looks = [_look_for_nonfinite(tables, figures), *(check(tables) for check in _CHECKS), *_look_at_own_figures(figures)]
    findings = [finding for look in looks for finding in look.findings]
    return Verdict(sorted(findings, key=lambda finding: finding.level != "sick"), [look.check for look in looks])


@dataclass(frozen=True)
class _Look:
    check: Check
    findings: list[Finding]


# ------------------------------------------------------------------ arrays


def early(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first quarter of the records, at least one; ``(sites, steps)`` to ``(sites, some)``."""
    return values[:, : max(1, values.shape[1] // 4)]


def late(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The last quarter of the records, at least one; ``(sites, steps)`` to ``(sites, some)``."""
    return values[:, -max(1, values.shape[1] // 4) :]


def typical(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median of each row's finite values, shape ``(rows,)``; NaN where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a row without any
        medians: NDArray[np.float64] = np.nanmedian(np.where(np.isfinite(values), values, np.nan), axis=1)
    return medians


def growth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many times larger the last quarter's median is than that of the first, shape ``(rows,)``; NaN where that is zero."""
    before, after = typical(early(np.abs(values))), typical(late(np.abs(values)))
    factors: NDArray[np.float64] = np.divide(after, before, out=np.full(len(values), np.nan), where=before > 0)
    return factors


def _where(mask: NDArray[np.bool_]) -> list[int]:
    found: list[int] = np.flatnonzero(mask).tolist()
    return found


def first_true(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Index of the first true value of each row, shape ``(rows,)``; the row's length where there is none."""
    first: NDArray[np.int64] = np.where(mask.any(axis=1), mask.argmax(axis=1), mask.shape[1])
    return first


def nonfinite(table: Table) -> NDArray[np.bool_]:
    """Where a tensor had an element that was not finite, as this statistic tells it; shape ``(sites, steps)``."""
    if table.statistic == "nonfinite_count":
        return table.values > 0
    return table.is_recorded & ~np.isfinite(table.values)


# ------------------------------------------------------------------ non-finite values


def _look_for_nonfinite(tables: Sequence[Table], figures: Sequence[Table]) -> _Look:
    problem, needs = "values that are not finite", "statistics: nonfinite_count"
    skipped = {step for table in _own(figures, STEP_SKIPPED) for step in table.steps[table.values[0] > 0].tolist()}
    seen = [table for kind in _ORDER for table in _telling(tables, kind)]
    # (step, place of the kind, place in the order of events) of each site's first, and what says so.
    firsts: list[tuple[int, int, int, Table, int]] = []
    for table in seen:
        order = _ORDER.index(table.name.kind)
        bad = nonfinite(table)
        if table.name.kind in (*_BACKWARD, "update"):
            bad[:, np.isin(table.steps, list(skipped))] = False  # a loss scale that was too large; the step was not made
        for row, column in enumerate(first_true(bad)):
            if column < len(table.steps):
                firsts.append((int(table.steps[column]), order, -row if table.name.kind in _BACKWARD else row, table, int(column)))
    firsts.sort(key=lambda first: first[:3])
    findings = []
    for number, (step, _order, place, table, column) in enumerate(firsts):
        row = abs(place)
        at_once = sum(first[0] == step for first in firsts)
        value = table.values[row, column]
        what = f"{value:.0f} elements" if table.statistic == "nonfinite_count" else f"{table.statistic} {value}"
        if number == 0:
            evidence = f"the first: {what} at step {step}, of {count(at_once, 'series')} at that step and {len(firsts)} in all"
        else:
            evidence = f"{what} at step {step}"
        findings.append(Finding("sick", problem, table.kind, table.sites[row], table.statistic, step, evidence))
    return _Look(Check(problem, sum(len(table.sites) for table in seen), needs), findings)


def _telling(tables: Sequence[Table], kind: str) -> Iterator[Table]:
    """For each site of a kind the one table that tells best: the count, or else any statistic that must be finite."""
    told: set[tuple[str, str]] = set()
    for statistic in ("nonfinite_count", *_FINITE):
        for table in of_training(tables, kind, statistic):
            rows = [row for row, site in enumerate(table.sites) if (table.name.prefix, site) not in told]
            told.update((table.name.prefix, table.sites[row]) for row in rows)
            if rows:
                yield _rows_of(table, rows)


def _rows_of(table: Table, rows: list[int]) -> Table:
    return Table(table.name, tuple(table.sites[row] for row in rows), table.steps, table.values[rows], table.is_recorded[rows])


# ------------------------------------------------------------------ one table at a time


class _Seen(NamedTuple):
    """A row of a table that is not as it should be."""

    row: int
    level: Level
    step: int
    evidence: str


def _check(
    problem: str, sources: Iterable[tuple[Sequence[str], Sequence[str]]], needs: str, find: Callable[[Table], Iterator[_Seen]]
) -> Callable[[Sequence[Table]], _Look]:
    """A check that looks at each table of its sources by itself: of kinds and statistics that tell the same at the first that there is."""

    def look(tables: Sequence[Table]) -> _Look:
        seen: list[Table] = []
        for kinds, statistics in sources:
            there = (of_training(tables, kind, statistic) for kind in kinds for statistic in statistics)
            seen += next(filter(None, there), [])
        found = [
            Finding(one.level, problem, table.kind, table.sites[one.row], table.statistic, one.step, one.evidence)
            for table in seen
            for one in find(table)
        ]
        return _Look(Check(problem, sum(len(table.sites) for table in seen), needs), found)

    return look


def _zero_output(table: Table) -> Iterator[_Seen]:
    is_fraction = table.statistic == "zero_fraction"
    is_zero = _all_late(table, table.values == (1.0 if is_fraction else 0.0))
    for row in _where(is_zero):
        yield _Seen(row, "sick", *_since(table, row, "every element is zero"))
    if is_fraction:
        share = typical(late(table.values))
        for row in _where((share >= MOSTLY_ZERO["watch"]) & ~is_zero):
            part = f"{share[row]:.3%} of the elements are zero" if share[row] < 1 else f"every element is zero {_MOSTLY}"
            since = _first(table, table.values[row] >= MOSTLY_ZERO["watch"])
            yield _Seen(row, _level(share[row], MOSTLY_ZERO), since, f"{part}{_late_steps(table)}")


def _no_gradient(table: Table) -> Iterator[_Seen]:
    is_zero = _all_late(table, table.values == 0)
    for row in _where(is_zero):
        yield _Seen(row, "sick", *_since(table, row, f"{table.statistic} is 0"))
    size = typical(late(table.values))
    usual = typical(np.where(size > 0, size, np.nan)[np.newaxis])[0]
    for row in _where((size < FAINT_GRADIENT * usual) & ~is_zero):
        faint = f"{table.statistic} is {size[row]:.2g}, {size[row] / usual:.1g} of the median over the sites"
        evidence = faint if size[row] > 0 else f"{table.statistic} is 0 {_MOSTLY}"
        yield _Seen(row, "watch", _first(table, table.values[row] < FAINT_GRADIENT * usual), f"{evidence}{_late_steps(table)}")


def _growing(table: Table) -> Iterator[_Seen]:
    if table.values.shape[1] < 4:
        return
    factors = growth(table.values)
    before, after = typical(early(np.abs(table.values))), typical(late(np.abs(table.values)))
    for row in _where(factors >= GROWTH["watch"]):
        step = int(table.steps[(np.abs(table.values[row]) >= GROWTH["watch"] * before[row]).argmax()])
        evidence = f"{table.statistic} grew {factors[row]:.2g} times from step {step} on, from {before[row]:.2g} to {after[row]:.2g}"
        yield _Seen(row, _level(factors[row], GROWTH), step, evidence)


def _spiking(table: Table) -> Iterator[_Seen]:
    magnitudes = np.where(np.isfinite(table.values), np.abs(table.values), 0.0)
    usual, largest, grown = typical(np.abs(table.values)), magnitudes.max(axis=1), growth(table.values)
    for row in _where((largest >= SPIKE * usual) & (usual > 0) & ~(grown >= GROWTH["watch"])):
        step = int(table.steps[magnitudes[row].argmax()])
        evidence = f"{table.statistic} {largest[row]:.2g} at step {step}; its median over the run is {usual[row]:.2g}"
        yield _Seen(row, "watch", step, evidence)


def _large_update(table: Table) -> Iterator[_Seen]:
    ratio = typical(late(table.values))
    for row in _where(ratio >= LARGE_UPDATE["watch"]):
        evidence = f"a step moves it by {ratio[row]:.2g} of its norm{_late_steps(table)}; 0.001 is customary"
        yield _Seen(row, _level(ratio[row], LARGE_UPDATE), _first(table, table.values[row] >= LARGE_UPDATE["watch"]), evidence)


def _small_update(table: Table) -> Iterator[_Seen]:
    ratio = typical(late(table.values))
    never = ((table.values == 0) | ~table.is_recorded).all(axis=1)
    for row in _where(ratio <= SMALL_UPDATE):
        seen = "it has never moved" if never[row] else f"a step moves it by {ratio[row]:.2g} of its norm{_late_steps(table)}"
        yield _Seen(row, "sick" if never[row] else "watch", _first(table, table.values[row] <= SMALL_UPDATE), seen)


def _gain(table: Table) -> Iterator[_Seen]:
    with np.errstate(divide="ignore"):
        strengths = np.maximum(table.values, 1 / table.values)
        gain = typical(late(table.values))
        strength = np.maximum(gain, 1 / gain)
    for row in _where(strength >= GAIN["watch"]):
        change = f"{strength[row]:.2g} times {'larger' if gain[row] > 1 else 'smaller'}" if gain[row] > 0 else "zero"
        evidence = f"on its way back the gradient becomes {change} here{_late_steps(table)}"
        yield _Seen(row, _level(strength[row], GAIN), _first(table, strengths[row] >= GAIN["watch"]), evidence)


def _large_logit(table: Table) -> Iterator[_Seen]:
    logit = typical(late(table.values))
    for row in _where(logit >= LARGE_LOGIT["watch"]):
        evidence = f"largest logit {logit[row]:.2g}{_late_steps(table)}; training tends to fail near 1e4"
        yield _Seen(row, _level(logit[row], LARGE_LOGIT), _first(table, table.values[row] >= LARGE_LOGIT["watch"]), evidence)


def _collapsed(table: Table) -> Iterator[_Seen]:
    entropy = typical(late(table.values))
    for row in _where(entropy <= COLLAPSED_ENTROPY):
        evidence = f"entropy is {entropy[row]:.2g} of the largest possible{_late_steps(table)}: a query sees one key"
        yield _Seen(row, "watch", _first(table, table.values[row] <= COLLAPSED_ENTROPY), evidence)


_SIZES = ("rms", "norm", "abs_max", "abs_mean")
_ACTIVATION, _AT_ACTIVATION, _GRADIENT = ("activation",), ("activation_gradient",), ("gradient_before_clip", "gradient")
_OF_GRADIENTS = "kinds: [activation_gradient, gradient], statistics: rms"
_OF_UPDATES = "kinds: update, statistics: ratio"
_CHECKS = (
    _check(
        "outputs that are zero", [(_ACTIVATION, ("zero_fraction", *_SIZES))], "kinds: activation, statistics: zero_fraction", _zero_output
    ),
    _check("gradients that are zero or faint", [(_AT_ACTIVATION, _SIZES), (("gradient",), _SIZES)], _OF_GRADIENTS, _no_gradient),
    _check("activations that explode", [(_ACTIVATION, _SIZES)], "kinds: activation, statistics: rms", _growing),
    _check("gradients that explode", [(_AT_ACTIVATION, _SIZES), (_GRADIENT, _SIZES)], _OF_GRADIENTS, _growing),
    _check("spikes of the gradient", [(_GRADIENT, _SIZES)], "kinds: gradient, statistics: norm", _spiking),
    _check("updates that are large", [(("update",), ("ratio",))], _OF_UPDATES, _large_update),
    _check("weights that do not move", [(("update",), ("ratio",))], _OF_UPDATES, _small_update),
    _check("gain of the gradient between blocks", [(("gradient_flow",), ("gain",))], "the option gradient_flow", _gain),
    _check("large logits of attention", [(("attention_max_logit",), ("max",))], "the option attention", _large_logit),
    _check("heads that see one key", [(("attention_relative_entropy",), ("mean",))], "the option attention", _collapsed),
)


# ------------------------------------------------------------------ the monitor's own figures


def _look_at_own_figures(figures: Sequence[Table]) -> Iterator[_Look]:
    yield from _look_at(
        figures, "errors", "what could not be measured", 0.0, lambda share, num: f"{num:.0f} errors, at {share:.0%} of steps"
    )
    yield from _look_at(
        figures, STEP_SKIPPED, "skipped steps", SKIPPED_SHARE, lambda share, _: f"the loss scale skipped {share:.0%} of steps"
    )


def _look_at(figures: Sequence[Table], name: str, problem: str, most: float, tell: Callable[[float, float], str]) -> list[_Look]:
    """A figure that is larger than zero at a larger share of the steps than ``most``; nothing where there is no such figure."""
    tables = _own(figures, name)
    findings = []
    for table in tables:
        happened = table.values[0] > 0
        if happened.mean() > most:
            evidence = tell(float(happened.mean()), float(np.nansum(table.values)))
            findings.append(Finding("watch", problem, table.kind, "", name, int(table.steps[happened.argmax()]), evidence))
    return [_Look(Check(problem, len(tables), ""), findings)] if tables else []


def _own(figures: Sequence[Table], name: str) -> list[Table]:
    return [table for table in figures if (table.name.kind, table.statistic, table.name.stage) == (OWN_KIND, name, TRAIN)]


# ------------------------------------------------------------------ words


def _level(value: float, thresholds: dict[Level, float]) -> Level:
    return "sick" if value >= thresholds["sick"] else "watch"


def _all_late(table: Table, is_so: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of which sites all late records are so; a site without one has none. Shape ``(sites,)``."""
    num = max(1, len(table.steps) // 4)
    recorded = table.is_recorded[:, -num:]
    return np.asarray((is_so[:, -num:] | ~recorded).all(axis=1) & recorded.any(axis=1))


def _since(table: Table, row: int, what: str) -> tuple[int, str]:
    """The step since which a site's value is the one of its last record, and a sentence about it."""
    values = table.values[row][table.is_recorded[row]]
    steps = table.steps[table.is_recorded[row]]
    others = _where(values != values[-1])
    first = others[-1] + 1 if others else 0
    when = "in all of the run" if first == 0 else f"since step {steps[first]}"
    return int(steps[first]), f"{what} {when} ({count(len(steps) - first, 'record')})"


def _first(table: Table, is_so: NDArray[np.bool_]) -> int:
    """The step of the first record at which something is so of a site; shape ``(steps,)``."""
    return int(table.steps[is_so.argmax()])


_MOSTLY = "in half of the records or more"


def _late_steps(table: Table) -> str:
    steps = table.steps[-max(1, len(table.steps) // 4) :]
    return f" (steps {steps[0]} to {steps[-1]})" if len(steps) > 1 else f" (step {steps[0]})"


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(2, "site")
    '2 sites'
    """
    return f"{number} {noun}" if number == 1 or noun == "series" else f"{number} {noun}s"
