"""The detectors on a store: those with a rule are judged record by record as while training, the others on the whole run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.alerts import RuleState, when
from lightning_module_monitor.health.detectors import FINITE_STATISTICS, Detector
from lightning_module_monitor.record import STEP_SKIPPED, Finding, Key, Severity
from lightning_module_monitor.report.run import early, late, of_training, typical
from lightning_module_monitor.sinks.store.matrices import Table


@dataclass(frozen=True)
class Check:
    """A detector's search in a store."""

    name: str
    """Name of the detector."""
    num_series: int
    """Number of series that it judged; 0 if none was recorded, or none has a value."""
    needs: str
    """The options that record them."""
    num_empty: int = 0
    """Number of series without a value in any record, as none could be computed."""

    @property
    def obstacle(self) -> str:
        """Why it judged no series."""
        return (
            f"no value could be computed: NaN in all of {self.num_empty} series" if self.num_empty else f"not recorded; needs {self.needs}"
        )


class _Violation(NamedTuple):
    """A row of a table that meets a detector's condition."""

    row: int
    severity: Severity
    step: int
    words: str


def judge(detector: Detector, tables: Sequence[Table], skipped_steps: Collection[int], *, is_known: bool) -> tuple[Check, list[Finding]]:
    """The check of a run by a detector, and a finding for each site that meets its condition.

    If the training has judged it (``is_known``), there is no finding. ``skipped_steps`` are those that a ``GradScaler`` skipped.
    """
    sources: list[Table] = []
    for kinds, statistics in detector.sources:
        candidates = (of_training(tables, kind, statistic) for kind in kinds for statistic in statistics)
        sources += next(filter(None, candidates), [])
    num_empty = _num_empty(sources)
    check = Check(detector.name, sum(len(table.sites) for table in sources) - num_empty, detector.needs, num_empty)
    if is_known:
        return check, []
    if detector.rule is not None:
        return check, _by_record(detector, sources, skipped_steps)
    violations = ((table, one) for table in sources for one in _WHOLE_RUN[detector.name](table, detector))
    return check, [_finding(detector.name, table, violation) for table, violation in violations]


def _num_empty(tables: Sequence[Table]) -> int:
    return sum(int(np.isnan(table.values).all(axis=1).sum()) for table in tables)


def _finding(name: str, table: Table, violation: _Violation) -> Finding:
    row = violation.row
    return Finding(violation.step, name, table.sites[row], table.key(row), violation.words, violation.severity)


# Record by record


def _by_record(detector: Detector, tables: Sequence[Table], skipped_steps: Collection[int]) -> list[Finding]:
    """The findings of a rule on the records of a store: the first of each key, at the step at which training found it."""
    rule = detector.alert()
    state = RuleState(rule)
    steps = np.unique(np.concatenate([table.steps for table in tables])) if tables else np.empty(0, int)
    keys = tuple(table.key(row) for table in tables for row in range(len(table.sites)))
    values, is_recorded = np.empty((len(steps), len(keys))), np.zeros((len(steps), len(keys)), bool)
    first = 0
    for table in tables:
        block = np.ix_(np.searchsorted(steps, table.steps), np.arange(first, first := first + len(table.sites)))
        values[block], is_recorded[block] = table.values.T, table.is_recorded.T
    found: dict[str, Finding] = {}
    for step, row, is_there in zip(steps.tolist(), values, is_recorded, strict=True):
        if (rule.needs_step and step in skipped_steps) or step > rule.until_step:
            continue
        own = keys if is_there.all() else tuple(keys[place] for place in np.flatnonzero(is_there))
        for one in state.observe(step, own, row[is_there]):
            parts = Key.parse(one.key)
            words = f"{parts.statistic} {one.words}{when(rule, one.since, step)}. {rule.words}"
            found.setdefault(one.key, Finding(step, detector.name, parts.site, one.key, words, detector.severity, step - one.since))
    if rule.is_unchanged:
        # A store does not hold which parameters require a gradient: those that never had one may be frozen on purpose.
        trained = {site for table in tables if table.name.kind == "gradient" for site in table.sites}
        return [one for one in found.values() if one.site in trained]
    return list(found.values())


# On the whole run


def _zero_output(table: Table, detector: Detector) -> Iterator[_Violation]:
    is_fraction = table.statistic == "zero_fraction"
    is_zero = _late_share(table, table.values == (1.0 if is_fraction else 0.0)) == 1
    for row in _where(is_zero):
        yield _Violation(row, "error", *_since(table, row, "every element is zero"))
    share, least = typical(late(table.values)), detector.limits["warning"]
    for row in _where((share >= least) & ~is_zero) if is_fraction else ():
        part = f"{share[row]:.3%} of the elements are zero" if share[row] < 1 else "every element is zero in half of the records or more"
        yield _Violation(row, detector.severity_of(share[row]), _first(table, table.values[row] >= least), f"{part}{_late_steps(table)}")


def _zero_gradient(table: Table, detector: Detector) -> Iterator[_Violation]:
    share = _late_share(table, table.values == 0)
    for row in _where(share >= detector.limits["warning"]):
        severity = detector.severity_of(share[row])
        if severity == "error":
            yield _Violation(row, severity, *_since(table, row, f"{table.statistic} is 0"))
        else:
            evidence = f"{table.statistic} is 0 in half of the records or more{_late_steps(table)}"
            yield _Violation(row, severity, _first(table, table.values[row] == 0), evidence)


def growth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many times larger the last quarter's median is than that of the first, shape ``(rows,)``; NaN where that is zero."""
    before, after = typical(early(np.abs(values))), typical(late(np.abs(values)))
    factors: NDArray[np.float64] = np.divide(after, before, out=np.full(len(values), np.nan), where=before > 0)
    return factors


def _growing(table: Table, detector: Detector) -> Iterator[_Violation]:
    if table.values.shape[1] < 4:
        return
    least, magnitudes = detector.limits["warning"], np.abs(table.values)
    after = typical(late(magnitudes))
    slowly, at_once = growth(table.values), _growth_at_once(magnitudes, after, least)
    for row in _where((slowly >= least) | (at_once >= detector.limits["error"])):
        factor = float(np.nanmax([slowly[row], at_once[row]]))
        before = after[row] / factor
        step = _first(table, magnitudes[row] >= least * before)
        evidence = f"{table.statistic} grew {factor:.2g} times from step {step} on, from {before:.2g} to {after[row]:.2g}"
        yield _Violation(row, detector.severity_of(factor), step, evidence)


def _growth_at_once(magnitudes: NDArray[np.float64], after: NDArray[np.float64], least: float) -> NDArray[np.float64]:
    """Growth from each site's first record to the end, to see growth within the first quarter of the records; shape ``(sites,)``.

    A site that began much smaller than the others, as some are meant to, has not exploded when it is as large as these: its result is 0.
    """
    with np.errstate(invalid="ignore"):
        is_size = np.isfinite(magnitudes) & (magnitudes > 0)
    first = np.where(is_size.any(axis=1), np.take_along_axis(magnitudes, is_size.argmax(axis=1)[:, np.newaxis], axis=1)[:, 0], np.nan)
    return np.where(after >= least * typical(first), after / first, 0.0)


def _spiking(table: Table, detector: Detector) -> Iterator[_Violation]:
    least = detector.limits["warning"]
    magnitudes = np.where(np.isfinite(table.values), np.abs(table.values), 0.0)
    usual, largest, grown = typical(np.abs(table.values)), magnitudes.max(axis=1), growth(table.values)
    for row in _where((largest >= least * usual) & (usual > 0) & ~(grown >= least)):
        peak = magnitudes[row].argmax()
        around = np.delete(magnitudes[row], peak)[max(0, peak - 5) : peak + 5]
        if not largest[row] >= least * typical(around):
            continue  # its neighbours are as large: gradients fall as a run converges
        step = int(table.steps[peak])
        evidence = f"{table.statistic} {largest[row]:.2g} at step {step}; its median over the run is {usual[row]:.2g}"
        yield _Violation(row, "warning", step, evidence)


def _large(table: Table, detector: Detector, evidence: str) -> Iterator[_Violation]:
    """Rows whose late median is at least the limit; ``evidence`` is a format of the median and its steps."""
    size, least = typical(late(table.values)), detector.limits["warning"]
    for row in _where(size >= least):
        words = evidence.format(size[row], _late_steps(table))
        yield _Violation(row, detector.severity_of(size[row]), _first(table, table.values[row] >= least), words)


def _gain(table: Table, detector: Detector) -> Iterator[_Violation]:
    gain, least = typical(late(table.values)), detector.limits["warning"]
    with np.errstate(divide="ignore"):
        strength, strengths = np.maximum(gain, 1 / gain), np.maximum(table.values, 1 / table.values)
    for row in _where(strength >= least):
        change = f"{strength[row]:.2g} times {'larger' if gain[row] > 1 else 'smaller'}" if gain[row] > 0 else "zero"
        words = f"on its way back the gradient becomes {change} here{_late_steps(table)}"
        yield _Violation(row, detector.severity_of(strength[row]), _first(table, strengths[row] >= least), words)


def _small_update(table: Table, detector: Detector) -> Iterator[_Violation]:
    ratio, most = typical(late(table.values)), detector.limits["warning"]
    never = ((table.values == 0) | ~table.is_recorded).all(axis=1)
    for row in _where(ratio <= most):
        evidence = "it has never moved" if never[row] else f"a step moves it by {ratio[row]:.2g} of its norm{_late_steps(table)}"
        yield _Violation(row, "error" if never[row] else "warning", _first(table, table.values[row] <= most), evidence)


def _frequent(table: Table, detector: Detector) -> Iterator[_Violation]:
    is_event = table.values[0] > 0
    share = float(is_event.mean())
    if share > detector.limits["warning"]:
        is_skipped = table.statistic == STEP_SKIPPED
        errors = f"{np.nansum(table.values):.0f} errors, at {share:.0%} of steps"
        yield _Violation(0, "warning", _first(table, is_event), f"the loss scale skipped {share:.0%} of steps" if is_skipped else errors)


_WHOLE_RUN: dict[str, Callable[[Table, Detector], Iterator[_Violation]]] = {
    "outputs that are zero": _zero_output,
    "gradients that are zero": _zero_gradient,
    "activations that explode": _growing,
    "gradients that explode": _growing,
    "spikes of the gradient": _spiking,
    "updates that are large": functools.partial(_large, evidence="a step moves it by {:.2g} of its norm{}; 0.001 is customary"),
    "weights that do not move": _small_update,
    "gain of the gradient between blocks": _gain,
    "large logits of attention": functools.partial(_large, evidence="largest logit {:.2g}{}; training tends to fail near 1e4"),
    "what could not be measured": _frequent,
    "skipped steps": _frequent,
}


def _where(mask: NDArray[np.bool_]) -> list[int]:
    """Indices of the true values of a vector."""
    found: list[int] = np.flatnonzero(mask).tolist()
    return found


def _late_share(table: Table, condition: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The share of each site's late records in which a condition holds, shape ``(sites,)``; NaN without late records."""
    is_late = late(table.is_recorded)
    number = is_late.sum(axis=1)
    counts = (late(condition) & is_late).sum(axis=1)
    share: NDArray[np.float64] = np.divide(counts, number, out=np.full(len(number), np.nan), where=number > 0)
    return share


def _since(table: Table, row: int, what: str) -> tuple[int, str]:
    """The step since which a site's value is the one of its last record, and a sentence about it."""
    values = table.values[row][table.is_recorded[row]]
    steps = table.steps[table.is_recorded[row]]
    others = np.flatnonzero(values != values[-1])
    first = int(others[-1]) + 1 if len(others) else 0
    extent = "in all of the run" if first == 0 else f"since step {steps[first]}"
    return int(steps[first]), f"{what} {extent} ({counted(len(steps) - first, 'record')})"


def _first(table: Table, condition: NDArray[np.bool_]) -> int:
    """The step of the first record in which a condition of shape ``(steps,)`` holds."""
    return int(table.steps[condition.argmax()])


def _late_steps(table: Table) -> str:
    steps = late(table.steps)
    return f" (steps {steps[0]} to {steps[-1]})" if len(steps) > 1 else f" (step {steps[0]})"


# Values that are not finite

_NONFINITE = "values that are not finite"
# The order of events in a step, in which earlier ones are the cause of later ones; in the backward pass modules are in reverse order.
_ORDER = ("parameter", "activation", "activation_gradient", "gradient_before_clip", "gradient", "update")
_BACKWARD = ("activation_gradient", "gradient_before_clip", "gradient")


def judge_nonfinite(tables: Sequence[Table], skipped_steps: Collection[int], *, is_known: bool) -> tuple[Check, list[Finding]]:
    """Find each site's first non-finite value, in the order of events: the first of all is the likely cause.

    Overflow of gradients in ``skipped_steps``, where the scale of a ``GradScaler`` was too large, does no harm. If the training has
    searched at every step (``is_known``), there is no finding: infinities of a mask, for example, are recorded and do no harm.
    """
    sources = [table for kind in _ORDER for table in _most_informative(tables, kind)]
    firsts = [] if is_known else sorted((one for table in sources for one in _firsts(table, skipped_steps)), key=lambda one: one[0])
    findings = [finding for _place, finding in firsts]
    if findings:
        first = findings[0]
        at_once = sum(finding.step == first.step for finding in findings)
        words = f"the first: {first.words}, of {counted(at_once, 'series')} at that step and {len(findings)} in all"
        findings[0] = dataclasses.replace(first, words=words)
    # After the training's own search the check has the name of its findings: it is not "ok" beside them.
    num_empty = _num_empty([table for table in sources if table.statistic == "nonfinite_count"])  # another that is NaN is a finding
    num_series = sum(len(table.sites) for table in sources) - num_empty
    return Check("nonfinite" if is_known else _NONFINITE, num_series, "statistics: nonfinite_count", num_empty), findings


def _firsts(table: Table, skipped_steps: Collection[int]) -> Iterator[tuple[tuple[int, int, int], Finding]]:
    """The finding on each site's first non-finite value, with its place in the order of events."""
    is_count, kind = table.statistic == "nonfinite_count", table.name.kind
    is_bad: NDArray[np.bool_] = table.values > 0 if is_count else table.is_recorded & ~np.isfinite(table.values)
    if kind in _BACKWARD or kind == "update":
        is_bad[:, np.isin(table.steps, list(skipped_steps))] = False
    for row in np.flatnonzero(is_bad.any(axis=1)).tolist():
        column = is_bad[row].argmax()
        step, value = int(table.steps[column]), table.values[row, column]
        what = f"{value:.0f} elements" if is_count else f"{table.statistic} {value}"
        place = step, _ORDER.index(kind), -row if kind in _BACKWARD else row
        yield place, _finding(_NONFINITE, table, _Violation(row, "error", step, f"{what} at step {step}"))


def _most_informative(tables: Sequence[Table], kind: str) -> Iterator[Table]:
    """For each site of a kind the most informative table: the count, or else any statistic that must be finite."""
    known: set[tuple[str, str]] = set()
    for statistic in FINITE_STATISTICS:
        for table in of_training(tables, kind, statistic):
            rows = [row for row, site in enumerate(table.sites) if (table.name.prefix, site) not in known]
            known.update((table.name.prefix, table.sites[row]) for row in rows)
            if rows:
                sites = tuple(table.sites[row] for row in rows)
                yield Table(table.name, sites, table.steps, table.values[rows], table.is_recorded[rows])
