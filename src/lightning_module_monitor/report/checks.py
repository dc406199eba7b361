"""The detectors on a store: those with a rule are judged record by record as while training, the others on the whole run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.alerts import Course, when
from lightning_module_monitor.health.detectors import Detector
from lightning_module_monitor.record import STEP_SKIPPED, Finding, Key, Severity
from lightning_module_monitor.report.arrays import growth, late, typical, where
from lightning_module_monitor.report.findings import Check, Checked
from lightning_module_monitor.report.run import Table, of_training


class _Sick(NamedTuple):
    """A row of a table that is not as it should be."""

    row: int
    severity: Severity
    step: int
    words: str


def look(detector: Detector, tables: Sequence[Table], skipped_steps: Collection[int], *, is_known: bool = False) -> Checked:
    """Judge a run by a detector.

    Args:
        detector: The detector.
        tables: The tables of the run's sites.
        skipped_steps: Steps that a ``GradScaler`` skipped.
        is_known: Whether the training has judged it: then nothing is looked for.

    Returns:
        The check, and a finding for each site that meets the detector's condition.
    """
    seen: list[Table] = []
    for kinds, statistics in detector.sources:
        there = (of_training(tables, kind, statistic) for kind in kinds for statistic in statistics)
        seen += next(filter(None, there), [])
    check = Check(detector.name, sum(len(table.sites) for table in seen), detector.needs)
    if is_known:
        return check, []
    if detector.rule is not None:
        return check, _replayed(detector, seen, skipped_steps)
    judge = _WHOLE_RUN[detector.name]
    return check, [
        table.finding(one.row, detector.name, one.step, one.words, one.severity) for table in seen for one in judge(table, detector)
    ]


# Record by record


def _replayed(detector: Detector, tables: Sequence[Table], skipped_steps: Collection[int]) -> list[Finding]:
    """The findings of a rule on the records of a store: of each key the first, at the step at which it was found while training."""
    rule = detector.alert()
    course = Course(rule)
    steps = np.unique(np.concatenate([table.steps for table in tables])) if tables else np.empty(0, int)
    keys = tuple(table.name._replace(site=site).format() for table in tables for site in table.sites)
    values, is_recorded = np.empty((len(steps), len(keys))), np.zeros((len(steps), len(keys)), bool)
    first = 0
    for table in tables:
        block = np.ix_(np.searchsorted(steps, table.steps), np.arange(first, first := first + len(table.sites)))
        values[block], is_recorded[block] = table.values.T, table.is_recorded.T
    found: dict[str, Finding] = {}
    for step, row, is_there in zip(steps.tolist(), values, is_recorded, strict=True):
        if rule.needs_step and step in skipped_steps:
            continue
        own = keys if is_there.all() else tuple(keys[place] for place in where(is_there))
        for one in course.observe(step, own, row[is_there]):
            parts = Key.parse(one.key)
            words = f"{parts.statistic} {one.words}{when(rule, one.since, step)}. {rule.words}"
            found.setdefault(one.key, Finding(step, detector.name, parts.site, one.key, words, detector.severity, step - one.since))
    if rule.is_unchanged:
        # A store does not hold which parameters require a gradient: those that never had one may be frozen on purpose.
        trained = {site for table in tables if table.name.kind == "gradient" for site in table.sites}
        return [one for one in found.values() if one.site in trained]
    return list(found.values())


# On the whole run


def _zero_output(table: Table, detector: Detector) -> Iterator[_Sick]:
    is_fraction = table.statistic == "zero_fraction"
    is_zero = _late_share(table, table.values == (1.0 if is_fraction else 0.0)) == 1
    for row in where(is_zero):
        yield _Sick(row, "error", *_since(table, row, "every element is zero"))
    share, least = typical(late(table.values)), detector.limits["warning"]
    for row in where((share >= least) & ~is_zero) if is_fraction else ():
        part = f"{share[row]:.3%} of the elements are zero" if share[row] < 1 else "every element is zero in half of the records or more"
        yield _Sick(row, detector.severity_of(share[row]), _first(table, table.values[row] >= least), f"{part}{_late_steps(table)}")


def _zero_gradient(table: Table, detector: Detector) -> Iterator[_Sick]:
    share = _late_share(table, table.values == 0)
    for row in where(share >= detector.limits["warning"]):
        severity = detector.severity_of(share[row])
        if severity == "error":
            yield _Sick(row, severity, *_since(table, row, f"{table.statistic} is 0"))
        else:
            evidence = f"{table.statistic} is 0 in half of the records or more{_late_steps(table)}"
            yield _Sick(row, severity, _first(table, table.values[row] == 0), evidence)


def _growing(table: Table, detector: Detector) -> Iterator[_Sick]:
    if table.values.shape[1] < 4:
        return
    least, magnitudes = detector.limits["warning"], np.abs(table.values)
    after = typical(late(magnitudes))
    slowly, at_once = growth(table.values), _growth_at_once(magnitudes, after, least)
    for row in where((slowly >= least) | (at_once >= detector.limits["error"])):
        factor = float(np.nanmax([slowly[row], at_once[row]]))
        before = after[row] / factor
        step = _first(table, magnitudes[row] >= least * before)
        evidence = f"{table.statistic} grew {factor:.2g} times from step {step} on, from {before:.2g} to {after[row]:.2g}"
        yield _Sick(row, detector.severity_of(factor), step, evidence)


def _growth_at_once(magnitudes: NDArray[np.float64], after: NDArray[np.float64], least: float) -> NDArray[np.float64]:
    """How many times larger each site is at the end than in its first record, where all were usual sizes; shape ``(sites,)``.

    This shows growth within the first quarter of the records. A site that began much smaller than others, as some are meant to, has not
    exploded when it is as large as these: there the result is 0.
    """
    with np.errstate(invalid="ignore"):
        is_size = np.isfinite(magnitudes) & (magnitudes > 0)
    first = np.where(is_size.any(axis=1), np.take_along_axis(magnitudes, is_size.argmax(axis=1)[:, np.newaxis], axis=1)[:, 0], np.nan)
    return np.where(after >= least * typical(first[np.newaxis])[0], after / first, 0.0)


def _spiking(table: Table, detector: Detector) -> Iterator[_Sick]:
    least = detector.limits["warning"]
    magnitudes = np.where(np.isfinite(table.values), np.abs(table.values), 0.0)
    usual, largest, grown = typical(np.abs(table.values)), magnitudes.max(axis=1), growth(table.values)
    for row in where((largest >= least * usual) & (usual > 0) & ~(grown >= least)):
        peak = magnitudes[row].argmax()
        around = np.delete(magnitudes[row], peak)[max(0, peak - 5) : peak + 5]
        if not largest[row] >= least * typical(around[np.newaxis])[0]:
            continue  # those beside it are as large: gradients fall as a run converges
        step = int(table.steps[magnitudes[row].argmax()])
        evidence = f"{table.statistic} {largest[row]:.2g} at step {step}; its median over the run is {usual[row]:.2g}"
        yield _Sick(row, "warning", step, evidence)


def _above(
    table: Table, detector: Detector, usual: NDArray[np.float64], values: NDArray[np.float64], tell: Callable[[float, int], str]
) -> Iterator[_Sick]:
    """Rows whose late median ``usual`` is at least the limit; ``tell`` gives the evidence, of the median and the row."""
    least = detector.limits["warning"]
    for row in where(usual >= least):
        yield _Sick(row, detector.severity_of(usual[row]), _first(table, values[row] >= least), tell(usual[row], row))


def _large_update(table: Table, detector: Detector) -> Iterator[_Sick]:
    def tell(ratio: float, _row: int) -> str:
        return f"a step moves it by {ratio:.2g} of its norm{_late_steps(table)}; 0.001 is customary"

    return _above(table, detector, typical(late(table.values)), table.values, tell)


def _large_logit(table: Table, detector: Detector) -> Iterator[_Sick]:
    def tell(logit: float, _row: int) -> str:
        return f"largest logit {logit:.2g}{_late_steps(table)}; training tends to fail near 1e4"

    return _above(table, detector, typical(late(table.values)), table.values, tell)


def _gain(table: Table, detector: Detector) -> Iterator[_Sick]:
    gain = typical(late(table.values))

    def tell(strength: float, row: int) -> str:
        change = f"{strength:.2g} times {'larger' if gain[row] > 1 else 'smaller'}" if gain[row] > 0 else "zero"
        return f"on its way back the gradient becomes {change} here{_late_steps(table)}"

    with np.errstate(divide="ignore"):
        return _above(table, detector, np.maximum(gain, 1 / gain), np.maximum(table.values, 1 / table.values), tell)


def _small_update(table: Table, detector: Detector) -> Iterator[_Sick]:
    ratio, most = typical(late(table.values)), detector.limits["warning"]
    never = ((table.values == 0) | ~table.is_recorded).all(axis=1)
    for row in where(ratio <= most):
        evidence = "it has never moved" if never[row] else f"a step moves it by {ratio[row]:.2g} of its norm{_late_steps(table)}"
        yield _Sick(row, "error" if never[row] else "warning", _first(table, table.values[row] <= most), evidence)


def _often(table: Table, detector: Detector) -> Iterator[_Sick]:
    happened = table.values[0] > 0
    share = float(happened.mean())
    if share > detector.limits["warning"]:
        is_skipped = table.statistic == STEP_SKIPPED
        evidence = (
            f"the loss scale skipped {share:.0%} of steps"
            if is_skipped
            else f"{np.nansum(table.values):.0f} errors, at {share:.0%} of steps"
        )
        yield _Sick(0, "warning", _first(table, happened), evidence)


_WHOLE_RUN: dict[str, Callable[[Table, Detector], Iterator[_Sick]]] = {
    "outputs that are zero": _zero_output,
    "gradients that are zero": _zero_gradient,
    "activations that explode": _growing,
    "gradients that explode": _growing,
    "spikes of the gradient": _spiking,
    "updates that are large": _large_update,
    "weights that do not move": _small_update,
    "gain of the gradient between blocks": _gain,
    "large logits of attention": _large_logit,
    "what could not be measured": _often,
    "skipped steps": _often,
}


def _late_share(table: Table, is_so: NDArray[np.bool_]) -> NDArray[np.float64]:
    """In which share of its late records something is so of each site; NaN of a site without one. Shape ``(sites,)``."""
    is_late = late(table.is_recorded)
    number = is_late.sum(axis=1)
    share: NDArray[np.float64] = np.divide((late(is_so) & is_late).sum(axis=1), number, out=np.full(len(number), np.nan), where=number > 0)
    return share


def _since(table: Table, row: int, what: str) -> tuple[int, str]:
    """The step since which a site's value is the one of its last record, and a sentence about it."""
    values = table.values[row][table.is_recorded[row]]
    steps = table.steps[table.is_recorded[row]]
    others = where(values != values[-1])
    first = others[-1] + 1 if others else 0
    when = "in all of the run" if first == 0 else f"since step {steps[first]}"
    return int(steps[first]), f"{what} {when} ({counted(len(steps) - first, 'record')})"


def _first(table: Table, is_so: NDArray[np.bool_]) -> int:
    """The step of the first record at which something is so of a site; shape ``(steps,)``."""
    return int(table.steps[is_so.argmax()])


def _late_steps(table: Table) -> str:
    steps = table.steps[-max(1, len(table.steps) // 4) :]
    return f" (steps {steps[0]} to {steps[-1]})" if len(steps) > 1 else f" (step {steps[0]})"
