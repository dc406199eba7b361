"""The verdict on a run: its findings and their causes, and what is known of each check."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.alerts import Fired
from lightning_module_monitor.health.causes import Diagnoses, diagnose
from lightning_module_monitor.health.detector import Detector
from lightning_module_monitor.health.detectors import DETECTORS, DIVERGING, NONFINITE, NOT_LEARNING
from lightning_module_monitor.health.judge import Alarm, Judge
from lightning_module_monitor.health.run_history import MIN_LOSSES, History
from lightning_module_monitor.record import FACT_KIND, ROOT_SITE, Finding, Severity

LEVELS: Mapping[Severity, str] = {"error": "sick", "warning": "watch"}
"""The verdict on a finding in a word, by its severity."""
LEVELS_IN_WORDS = {"watch": "to watch"}
FOUND, NOT_FOUND, TOO_FEW, NOT_APPLICABLE = "found", "not found", "too few records", "does not apply"
PASSED_OVER, NOT_RECORDED, NOT_COMPUTED = "not judged while the loss falls", "not recorded", "not computed"

_LOSS_IN_WORDS = {
    "unclear": "too few or too noisy losses to tell whether they fall",
    "settled": "the loss hardly changes, as that of trained weights may",
    "too few": f"too few losses (fewer than {MIN_LOSSES}) to tell whether they fall",
    "none": "no loss was recorded",
    "manual": "a loss is not judged under manual optimization",
    "negative": "a loss at or below 0 is not judged",
}


@dataclass(frozen=True)
class Check:
    """What is known of a condition.

    Attributes:
        name: Name of the detector.
        status: ``found``, ``not found``, ``not judged while the loss falls``, ``too few records``, ``not recorded``, ``not computed``,
            or ``does not apply``.
        num_series: Number of series that it judged; those without a value do not count.
        num_records: Number of records with values of them.
        num_needed: Number of records below which it cannot find anything.
        reason: Why it says nothing, and the option that records what it needs.
        fired: The figures that met the condition, the first of each key.
    """

    name: str
    status: str
    num_series: int
    num_records: int
    num_needed: int
    reason: str = ""
    fired: Sequence[Fired] = field(default=(), repr=False)


@dataclass(frozen=True)
class Verdict:
    """The findings of a run, and the checks."""

    findings: Sequence[Finding]
    """The errors first; then in the order of names and steps."""
    checks: Sequence[Check]
    history: History

    @property
    def is_sick(self) -> bool:
        """Whether any finding is sick."""
        return any(finding.severity == "error" for finding in self.findings)

    @property
    def level(self) -> str:
        """The verdict in a word: ``sick``, ``watch``, ``healthy``, or ``unknown`` where not enough was recorded to say so."""
        if self.findings:
            return "sick" if self.is_sick else "watch"
        return "unknown" if self._doubts else "healthy"

    @property
    def _doubts(self) -> list[str]:
        """What is not known of a run without findings."""
        doubts = [_LOSS_IN_WORDS[self.history.learning]] if self.history.learning in _LOSS_IN_WORDS else []
        doubts += [f"no value could be computed for {check.name}" for check in self.checks_with(NOT_COMPUTED)]
        return doubts + [f"too few records for {check.name} ({check.reason})" for check in self.checks_with(TOO_FEW)]

    @property
    def problems(self) -> list[tuple[str, str, list[Finding]]]:
        """Level, name and findings of each problem."""
        groups = groupby(self.findings, key=lambda finding: (finding.severity, finding.name))
        return [(LEVELS[severity], name, list(findings)) for (severity, name), findings in groups]

    def checks_with(self, *statuses: str) -> list[Check]:
        """The checks of which that much is known."""
        return [check for check in self.checks if check.status in statuses]

    @property
    def diagnoses(self) -> Diagnoses:
        """The causes that the findings show."""
        return diagnose(self.findings, self.history)

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        diagnoses = self.diagnoses
        first = next((one for one in self.findings if one.name == NONFINITE), None)
        if first is not None:
            cause = next((one for one in diagnoses if first.words in one.evidence or NONFINITE in one.consequences), None)
            where = f" in {first.site}" if first.site not in ("", ROOT_SITE) else ""
            is_named = first.words.startswith(("NaN in ", "Infinity in "))
            what = first.words.partition(", ")[0] if is_named else f"a value that is not finite{where}"
            return f"{what} at step {first.step}" + ("" if cause is None or cause.name == NONFINITE else f": {_lower(cause.headline)}")
        if self.findings:
            return diagnoses[0].title if diagnoses else self.findings[0].message.removesuffix(".")
        looked = self._looked_at()
        course = f"loss {self.history.first_loss:.3g} to {np.median(self.history.ends[1] or math.nan):.3g}"
        return f"{self._doubts[0] if self._doubts else course}{looked and f'; no fault in {looked}'}"

    @property
    def sentence(self) -> str:
        """The verdict in a line, with its level in front."""
        return f"{LEVELS_IN_WORDS.get(self.level, self.level)}: {self.headline}"

    def _looked_at(self) -> str:
        """What was looked at, in words."""
        recorded = {key.kind for key in self.history.last}
        names = {"gradient": "gradients", "activation": "activations", "parameter": "weights", "update": "updates"}
        kinds = [name for kind, name in names.items() if kind in recorded]
        num_sites = len({key.site for key in self.history.last if key.site})
        num_records = max((check.num_records for check in self.checks), default=0)
        return f"{', '.join(kinds)} of {counted(num_sites, 'site')} at {counted(num_records, 'record')}" if kinds else ""

    @property
    def beginning(self) -> Finding | None:
        """Where to look first: the first finding on the series of the first diagnosis, else the first error; ``None`` without either."""
        key = self.diagnoses[0].key if self.diagnoses else ""
        candidates = [one for one in self.findings if (one.key == key if key else one.severity == "error")]
        return min(candidates, key=lambda one: one.first_step, default=None)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def verdict_of(judge: Judge, alarms: Sequence[Alarm], findings: Sequence[Finding], *, searched: bool, types: Collection[str]) -> Verdict:
    """The verdict of a judge that is through with the records of a run.

    Args:
        judge: The judge, by the rules of detectors.
        alarms: The alarms of detectors, where the figures that they are about are to be shown.
        findings: All findings.
        searched: Whether values that are not finite were searched for as the run went on, and are none of the judge's.
        types: Names of the classes of the model's modules; empty where they are not known.
    """
    fired: dict[str, dict[str, Fired]] = {}
    for alarm in alarms:
        for figure in alarm.fired:
            fired.setdefault(alarm.finding.name, {}).setdefault(figure.key, figure)
    states = {state.rule.name: state for state in judge.states}
    num_losses = len(judge.history.losses)
    found, series = {one.name for one in findings}, judge.series()
    checks = [Check(NONFINITE, FOUND if NONFINITE in found else NOT_FOUND, 0, num_losses, 1)] if searched else []
    for one in (one for name, one in DETECTORS.items() if not (name == NONFINITE and searched)):
        have_values = [has_value for key, has_value in series if one.concerns(key) and key.kind in one.sources[0][0]]
        own, state = sum(have_values), states.get(one.name)
        num = num_losses if state is None else state.num_records
        if one.name in found:
            status, reason = FOUND, ""
        elif have_values and not own:
            status, reason = NOT_COMPUTED, f"no value could be computed: NaN in all of {len(have_values)} series"
        else:
            status, reason = _check(one, own, num, judge.history, types)
            status = PASSED_OVER if status == NOT_FOUND and state is not None and state.num_passed_over else status
        checks.append(Check(one.name, status, own, num, one.num_needed, reason, [*fired.get(one.name, {}).values()]))
    ordered = sorted(findings, key=lambda one: (one.severity != "error", one.name, one.step))
    return Verdict(ordered, checks, judge.history)


def _check(one: Detector, num_series: int, num_records: int, history: History, types: Collection[str]) -> tuple[str, str]:
    """The status of a check that found nothing, and the reason."""
    if one.types and types and not {*types} & {*one.types}:
        return NOT_APPLICABLE, f"no {', '.join(one.types[:-1])} or {one.types[-1]} module"
    learning = _LOSS_IN_WORDS.get(history.learning, "")
    if one.name in (NOT_LEARNING, DIVERGING) and history.learning in ("manual", "negative"):
        return NOT_APPLICABLE, learning
    of_facts = FACT_KIND in one.sources[0][0] or (one.rule is not None and one.rule.is_of_facts)
    if of_facts and not num_records:
        return NOT_APPLICABLE, "known of a Trainer's runs alone"
    if not (num_series and num_records) and not of_facts:
        option = one.recorded_by or f"health: {{watch: {one.name}}}"
        return (NOT_APPLICABLE, one.without) if option == "-" or num_series else (NOT_RECORDED, f"add {option}")
    is_unclear = one.name == NOT_LEARNING and learning != ""
    if is_unclear or num_records < one.num_needed:
        return TOO_FEW, learning if is_unclear else f"{num_records} of {one.num_needed}"
    return NOT_FOUND, ""
