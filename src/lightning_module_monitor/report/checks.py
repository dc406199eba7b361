"""The checks that look at one table at a time: rules of thumb, with their thresholds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.report.arrays import growth, late, typical, where
from lightning_module_monitor.report.findings import Check, Finding, Level, Look, count
from lightning_module_monitor.report.run import Table, of_training

MOSTLY_ZERO: dict[Level, float] = {"watch": 0.99, "sick": 0.999}
"""Share of the elements."""
FAINT_GRADIENT = 1e-4
"""Of the median over the sites."""
GROWTH: dict[Level, float] = {"watch": 30.0, "sick": 1000.0}
"""From the first quarter of the records to the last; for what is sick also from the first record on."""
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


class _Seen(NamedTuple):
    """A row of a table that is not as it should be."""

    row: int
    level: Level
    step: int
    evidence: str


def _check(
    problem: str, sources: Iterable[tuple[Sequence[str], Sequence[str]]], needs: str, find: Callable[[Table], Iterator[_Seen]]
) -> Callable[[Sequence[Table]], Look]:
    """A check that looks at each table of its sources by itself: of kinds and statistics that tell the same at the first that there is."""

    def look(tables: Sequence[Table]) -> Look:
        seen: list[Table] = []
        for kinds, statistics in sources:
            there = (of_training(tables, kind, statistic) for kind in kinds for statistic in statistics)
            seen += next(filter(None, there), [])
        found = [
            Finding(one.level, problem, table.kind, table.sites[one.row], table.statistic, one.step, one.evidence)
            for table in seen
            for one in find(table)
        ]
        return Look(Check(problem, sum(len(table.sites) for table in seen), needs), found)

    return look


def _zero_output(table: Table) -> Iterator[_Seen]:
    is_fraction = table.statistic == "zero_fraction"
    is_zero = _all_late(table, table.values == (1.0 if is_fraction else 0.0))
    for row in where(is_zero):
        yield _Seen(row, "sick", *_since(table, row, "every element is zero"))
    if is_fraction:
        share = typical(late(table.values))
        for row in where((share >= MOSTLY_ZERO["watch"]) & ~is_zero):
            part = f"{share[row]:.3%} of the elements are zero" if share[row] < 1 else f"every element is zero {_MOSTLY}"
            since = _first(table, table.values[row] >= MOSTLY_ZERO["watch"])
            yield _Seen(row, _level(share[row], MOSTLY_ZERO), since, f"{part}{_late_steps(table)}")


def _no_gradient(table: Table) -> Iterator[_Seen]:
    is_zero = _all_late(table, table.values == 0)
    for row in where(is_zero):
        yield _Seen(row, "sick", *_since(table, row, f"{table.statistic} is 0"))
    size = typical(late(table.values))
    usual = typical(np.where(size > 0, size, np.nan)[np.newaxis])[0]
    for row in where((size < FAINT_GRADIENT * usual) & ~is_zero):
        faint = f"{table.statistic} is {size[row]:.2g}, {size[row] / usual:.1g} of the median over the sites"
        evidence = faint if size[row] > 0 else f"{table.statistic} is 0 {_MOSTLY}"
        yield _Seen(row, "watch", _first(table, table.values[row] < FAINT_GRADIENT * usual), f"{evidence}{_late_steps(table)}")


def _growing(table: Table) -> Iterator[_Seen]:
    if table.values.shape[1] < 4:
        return
    magnitudes = np.abs(table.values)
    after = typical(late(magnitudes))
    slowly, at_once = growth(table.values), _growth_at_once(magnitudes, after)
    for row in where((slowly >= GROWTH["watch"]) | (at_once >= GROWTH["sick"])):
        factor = float(np.nanmax([slowly[row], at_once[row]]))
        before = after[row] / factor
        step = int(table.steps[(magnitudes[row] >= GROWTH["watch"] * before).argmax()])
        evidence = f"{table.statistic} grew {factor:.2g} times from step {step} on, from {before:.2g} to {after[row]:.2g}"
        yield _Seen(row, _level(factor, GROWTH), step, evidence)


def _growth_at_once(magnitudes: NDArray[np.float64], after: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many times larger each site is at the end than in its first record, where all were usual sizes.

    It tells of what has grown within the first quarter of the records. A site that began much smaller than others, as some are meant
    to, has not exploded by being as large as these: there it is 0, shape ``(sites,)``.
    """
    with np.errstate(invalid="ignore"):
        is_size = np.isfinite(magnitudes) & (magnitudes > 0)
    first = np.where(is_size.any(axis=1), np.take_along_axis(magnitudes, is_size.argmax(axis=1)[:, np.newaxis], axis=1)[:, 0], np.nan)
    usual = typical(first[np.newaxis])[0]
    factors = after / first
    return np.where(after >= GROWTH["watch"] * usual, factors, 0.0)


def _spiking(table: Table) -> Iterator[_Seen]:
    magnitudes = np.where(np.isfinite(table.values), np.abs(table.values), 0.0)
    usual, largest, grown = typical(np.abs(table.values)), magnitudes.max(axis=1), growth(table.values)
    for row in where((largest >= SPIKE * usual) & (usual > 0) & ~(grown >= GROWTH["watch"])):
        step = int(table.steps[magnitudes[row].argmax()])
        evidence = f"{table.statistic} {largest[row]:.2g} at step {step}; its median over the run is {usual[row]:.2g}"
        yield _Seen(row, "watch", step, evidence)


def _large_update(table: Table) -> Iterator[_Seen]:
    ratio = typical(late(table.values))
    for row in where(ratio >= LARGE_UPDATE["watch"]):
        evidence = f"a step moves it by {ratio[row]:.2g} of its norm{_late_steps(table)}; 0.001 is customary"
        yield _Seen(row, _level(ratio[row], LARGE_UPDATE), _first(table, table.values[row] >= LARGE_UPDATE["watch"]), evidence)


def _small_update(table: Table) -> Iterator[_Seen]:
    ratio = typical(late(table.values))
    never = ((table.values == 0) | ~table.is_recorded).all(axis=1)
    for row in where(ratio <= SMALL_UPDATE):
        seen = "it has never moved" if never[row] else f"a step moves it by {ratio[row]:.2g} of its norm{_late_steps(table)}"
        yield _Seen(row, "sick" if never[row] else "watch", _first(table, table.values[row] <= SMALL_UPDATE), seen)


def _gain(table: Table) -> Iterator[_Seen]:
    with np.errstate(divide="ignore"):
        strengths = np.maximum(table.values, 1 / table.values)
        gain = typical(late(table.values))
        strength = np.maximum(gain, 1 / gain)
    for row in where(strength >= GAIN["watch"]):
        change = f"{strength[row]:.2g} times {'larger' if gain[row] > 1 else 'smaller'}" if gain[row] > 0 else "zero"
        evidence = f"on its way back the gradient becomes {change} here{_late_steps(table)}"
        yield _Seen(row, _level(strength[row], GAIN), _first(table, strengths[row] >= GAIN["watch"]), evidence)


def _large_logit(table: Table) -> Iterator[_Seen]:
    logit = typical(late(table.values))
    for row in where(logit >= LARGE_LOGIT["watch"]):
        evidence = f"largest logit {logit[row]:.2g}{_late_steps(table)}; training tends to fail near 1e4"
        yield _Seen(row, _level(logit[row], LARGE_LOGIT), _first(table, table.values[row] >= LARGE_LOGIT["watch"]), evidence)


def _collapsed(table: Table) -> Iterator[_Seen]:
    entropy = typical(late(table.values))
    for row in where(entropy <= COLLAPSED_ENTROPY):
        evidence = f"entropy is {entropy[row]:.2g} of the largest possible{_late_steps(table)}: a query sees one key"
        yield _Seen(row, "watch", _first(table, table.values[row] <= COLLAPSED_ENTROPY), evidence)


_SIZES = ("rms", "norm", "abs_max", "abs_mean")
_ACTIVATION, _AT_ACTIVATION, _GRADIENT = ("activation",), ("activation_gradient",), ("gradient_before_clip", "gradient")
_OF_GRADIENTS = "kinds: [activation_gradient, gradient], statistics: rms"
_OF_UPDATES = "kinds: update, statistics: ratio"
CHECKS = (
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
    others = where(values != values[-1])
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
