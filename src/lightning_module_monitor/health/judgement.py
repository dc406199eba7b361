"""The verdict on a run: its findings and their causes, and the result of each check."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.alerts import Alarm, Fired
from lightning_module_monitor.health.detector import Detector
from lightning_module_monitor.health.detectors import DETECTORS, DIVERGING, NONFINITE, NOT_LEARNING, ONE_SIDED
from lightning_module_monitor.health.diagnoses import Diagnoses, diagnose, is_withdrawn
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.health.run_history import MIN_LOSSES, History
from lightning_module_monitor.health.whole_run import has_only_constant_targets, sees_its_labels, still_part
from lightning_module_monitor.kinds import ROOT_SITE
from lightning_module_monitor.record import Finding, Severity

LEVELS: Mapping[Severity, str] = {"error": "sick", "warning": "watch"}
"""The verdict on a finding in a word, by its severity."""
FOUND, NOT_FOUND, TOO_FEW, UNCLEAR = "found", "not found", "too few records", "unclear"
PASSED_OVER = "skipped: the loss has fallen"
NOT_RECORDED, NOT_COMPUTED, NOT_APPLICABLE = "not recorded", "not computed", "does not apply"
WITHOUT_ANSWER = (TOO_FEW, UNCLEAR, NOT_COMPUTED, NOT_RECORDED)
"""Statuses of checks that could find nothing in this run, and might in another."""
WITHOUT_FINDING = (NOT_FOUND, PASSED_OVER, *WITHOUT_ANSWER, NOT_APPLICABLE)
"""Statuses of checks without a finding, in the order in which reports show them."""

_LOSS_IN_WORDS = {
    "above": "loss {first:.3g} to {last:.3g}, which is above its start",
    "not finite": "the loss is not finite at the end",
    "hardly": "loss {first:.3g} to {last:.3g}, a fall of less than 3 %",
    "stalled": "loss {first:.3g} to {last:.3g}, without a clear fall since step {stalled_since}",
    "chance": "loss {first:.3g} to {last:.3g}, which is no better than guessing among {num_classes} classes",
    "at once": "loss {first:.3g} to {last:.3g} within the first records, without a clear fall since",
    "unclear": "too noisy losses to tell whether they fall",
    "short": "{num_steps} steps, too few or too small to show in the loss",
    "settled": "the loss hardly changes, as that of trained weights may",
    "too few": f"too few losses ({{num}} of {MIN_LOSSES}), use a smaller every_n_steps",
    "none": "no loss was recorded",
    "manual": "a loss is not judged under manual optimization",
}


def _doubt_about_loss(history: History) -> str:
    """Why it is not known whether the loss falls; empty where it is known."""
    if history.learning == "falls" and history.facts.compares_outputs:
        return "the loss falls, and whether outputs differ between samples was not looked at"
    if history.learning == "falls" and (part := still_part(history)):
        return f"the loss falls, and {part}, which is logged, does not"
    if history.learning == "falls" and sees_its_labels(history):
        last = np.median(history.ends[1])
        return f"loss {last:.3g} for tokens: the model may see its labels (look at shift and mask)"
    if has_only_constant_targets(history):
        return "all targets that were looked at are the same"
    words = _LOSS_IN_WORDS.get(history.learning, "")
    return words.format(
        first=history.first_loss,
        last=np.median(history.ends[1] or math.nan),
        stalled_since=history.stalled_since,
        num_steps=history.steps[-1] - history.steps[0] if history.steps else 0,
        num=sum(map(math.isfinite, history.losses)),
        num_classes=history.facts.num_classes,
    )


@dataclass(frozen=True)
class Check:
    """The result of a detector in a run.

    Attributes:
        name: Name of the detector.
        status: ``found``, ``not found``, ``skipped: the loss has fallen``, ``too few records``, ``unclear``, ``not recorded``,
            ``not computed``, or ``does not apply``.
        num_series: Number of series that it judged, without those that have no value.
        num_records: Number of records with values of these series.
        num_needed: Number of records below which it cannot find anything.
        reason: Why it has no result, and the option that records the values it needs.
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
    """Errors first, then by name and step."""
    checks: Sequence[Check]
    history: History

    @property
    def level(self) -> str:
        """The verdict in a word: ``sick``, ``watch``, ``healthy``, or ``unknown`` where not enough was recorded to say so."""
        if self.findings:
            return "sick" if any(finding.severity == "error" for finding in self.findings) else "watch"
        return "unknown" if self._doubts else "healthy"

    @property
    def _doubts(self) -> list[str]:
        """Why a run without findings may not be healthy."""
        doubts = [*filter(None, [_doubt_about_loss(self.history)])]
        doubts += [f"no value could be computed for {check.name}" for check in self.checks_with(NOT_COMPUTED)]
        return doubts + [f"too few records for {check.name} ({check.reason})" for check in self.checks_with(TOO_FEW)]

    @property
    def problems(self) -> list[tuple[str, str, list[Finding]]]:
        """Level, name and findings of each problem."""
        groups = groupby(self.findings, key=lambda finding: (finding.severity, finding.name))
        return [(LEVELS[severity], name, list(findings)) for (severity, name), findings in groups]

    def checks_with(self, *statuses: str) -> list[Check]:
        """The checks with one of these statuses."""
        return [check for check in self.checks if check.status in statuses]

    @property
    def diagnoses(self) -> Diagnoses:
        """The causes that the findings show."""
        return diagnose(self.findings, self.history)

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        diagnoses = self.diagnoses
        first = next((finding for finding in self.findings if finding.name == NONFINITE), None)
        if first is not None:
            cause = next((cause for cause in diagnoses if first.words in cause.evidence or NONFINITE in cause.consequences), None)
            where = f" in {first.site}" if first.site not in ("", ROOT_SITE) else ""
            is_named = first.words.startswith(("NaN in ", "Infinity in "))
            what = first.words.partition(", ")[0] if is_named else f"a value that is not finite{where}"
            why = "" if cause is None or cause.name == NONFINITE else f": {cause.headline[:1].lower()}{cause.headline[1:]}"
            return f"{what} at step {first.step}{why}"
        if self.findings:
            return diagnoses[0].title if diagnoses else self.findings[0].message.removesuffix(".")
        num_judged, num_checks = len(self.checks_with(NOT_FOUND)), len(self.checks_with(NOT_FOUND, PASSED_OVER, *WITHOUT_ANSWER))
        judged = f"{num_judged} of {num_checks} checks"
        if self._doubts:
            return f"{self._doubts[0]}; {judged} could judge, and found nothing"
        course = f"loss {self.history.first_loss:.3g} to {np.median(self.history.ends[1] or math.nan):.3g}"
        looked_at = self._looked_at()
        return f"{course}; {judged} could judge, and found nothing{f' in {looked_at}' if looked_at else ''}"

    @property
    def sentence(self) -> str:
        """The verdict in a line, with its level in front."""
        return f"{self.level}: {self.headline}"

    def _looked_at(self) -> str:
        """The kinds, sites and records in which no fault was found, in words; empty where no site was recorded."""
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
        candidates = [finding for finding in self.findings if (finding.key == key if key else finding.severity == "error")]
        return min(candidates, key=lambda finding: finding.first_step, default=None)


def verdict_of(
    judge: Judge, alarms: Sequence[Alarm], findings: Sequence[Finding], *, watched: Collection[str], types: Collection[str]
) -> Verdict:
    """The verdict of a judge that has observed all records of a run.

    Args:
        judge: The judge, by the rules of detectors.
        alarms: The alarms of detectors, where the figures that they are about are to be shown.
        findings: All findings.
        watched: Names of the detectors for which the run recorded values; with ``nonfinite`` if training searched for non-finite values, so
            that the judge does not.
        types: Names of the classes of the model's modules; empty where they are not known.
    """
    fired: dict[str, dict[str, Fired]] = {}
    for alarm in alarms:
        for figure in alarm.fired:
            fired.setdefault(alarm.finding.name, {}).setdefault(figure.key, figure)
    states = {state.rule.name: state for state in judge.states}
    num_losses = len(judge.history.losses)
    findings = [finding for finding in findings if not is_withdrawn(finding, judge.history)]
    names = {finding.name for finding in findings}
    checks = [Check(NONFINITE, FOUND if NONFINITE in names else NOT_FOUND, 0, num_losses, 1)] if NONFINITE in watched else []
    for name, detector in DETECTORS.items():
        if name == NONFINITE and checks:
            continue
        have_values = judge.have_values(detector)
        num_series, state = sum(have_values), states.get(name)
        num_records = num_losses if state is None else state.num_records
        if name in names:
            status, reason = FOUND, ""
        elif have_values and not num_series:
            status, reason = NOT_COMPUTED, f"no value could be computed: NaN in all of {len(have_values)} series"
        else:
            status, reason = _status_without_finding(detector, num_series, num_records, judge.history, types, is_recorded=name in watched)
            status = PASSED_OVER if status == NOT_FOUND and state is not None and state.num_passed_over else status
        checks.append(Check(name, status, num_series, num_records, detector.num_needed, reason, [*fired.get(name, {}).values()]))
    ordered = sorted(findings, key=lambda finding: (finding.severity != "error", finding.name, finding.step))
    return Verdict(ordered, checks, judge.history)


def _status_without_finding(  # noqa: PLR0911  # a reason each
    detector: Detector, num_series: int, num_records: int, history: History, types: Collection[str], *, is_recorded: bool
) -> tuple[str, str]:
    """The status of a check that found nothing, and the reason."""
    if detector.types and types and not {*types} & {*detector.types}:
        return NOT_APPLICABLE, f"no {', '.join(detector.types[:-1])} or {detector.types[-1]} module"
    doubt = _doubt_about_loss(history)
    if detector.name in (NOT_LEARNING, DIVERGING) and history.learning == "manual":
        return NOT_APPLICABLE, doubt
    if detector.name == DIVERGING and history.has_negative_losses:
        return NOT_APPLICABLE, "a loss below 0 has no factor by which it grows"
    if detector.name == ONE_SIDED and not history.gradients_by_optimizer:
        return NOT_APPLICABLE, detector.without
    if detector.judges_facts:
        return (NOT_FOUND, "") if num_records else (NOT_APPLICABLE, "known of a Trainer's runs alone")
    if num_series and not num_records and detector.needs_rate and history.has_no_rate:
        return NOT_APPLICABLE, "all learning rates are 0"
    if not (num_series and num_records):
        is_missing = not (num_series or detector.is_always_recorded or (is_recorded and not detector.recorded_by))
        option = detector.recorded_by or f"health: {{watch: {detector.name}}}"
        return (NOT_RECORDED, f"add {option}") if is_missing else (NOT_APPLICABLE, detector.without)
    if num_records < detector.num_needed:
        return TOO_FEW, f"{num_records} of {detector.num_needed}"
    return (UNCLEAR, doubt) if detector.name == NOT_LEARNING and doubt else (NOT_FOUND, "")
