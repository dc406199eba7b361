"""The verdict on a run: its findings and their causes, and the result of each check."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.alerts import Alarm, Fired
from lightning_module_monitor.health.checks import (
    FOUND,
    NOT_COMPUTED,
    NOT_FOUND,
    PASSED_OVER,
    TOO_FEW,
    WITHOUT_ANSWER,
    Check,
    Judged,
    doubt_about_loss,
    status_of,
)
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.diagnoses import Diagnoses, diagnose, is_withdrawn
from lightning_module_monitor.health.finding_names import NONFINITE
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.health.run_history import History
from lightning_module_monitor.kinds import ROOT_SITE
from lightning_module_monitor.record import Finding, Severity

LEVELS: Mapping[Severity, str] = {"error": "sick", "warning": "watch"}
"""The verdict on a finding in a word, by its severity."""


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
        doubts = [*filter(None, [doubt_about_loss(self.history)])]
        doubts += [f"no value could be computed for {check.name}" for check in self.checks_with(NOT_COMPUTED)]
        return doubts + [
            f"too few records for {check.name} ({check.reason}), use a smaller every_n_steps" for check in self.checks_with(TOO_FEW)
        ]

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
        nonfinite = next((finding for finding in self.findings if finding.name == NONFINITE), None)
        if nonfinite is not None:
            return self._headline_of_nonfinite(nonfinite)
        if self.findings:
            diagnoses = self.diagnoses
            return diagnoses[0].title if diagnoses else self.findings[0].message.removesuffix(".")
        num_judged, num_checks = len(self.checks_with(NOT_FOUND)), len(self.checks_with(NOT_FOUND, PASSED_OVER, *WITHOUT_ANSWER))
        result = f"{num_judged} of {num_checks} checks could judge, and found nothing"
        if self._doubts:
            return f"{self._doubts[0]}; {result}"
        losses, extent = self.history.losses, self._extent()
        return f"loss {losses.first:.3g} to {losses.last_median:.3g}; {result}{f' in {extent}' if extent else ''}"

    def _headline_of_nonfinite(self, finding: Finding) -> str:
        is_named = finding.words.startswith(("NaN in ", "Infinity in "))
        where = f" in {finding.site}" if finding.site not in ("", ROOT_SITE) else ""
        what = finding.words.partition(", ")[0] if is_named else f"a value that is not finite{where}"
        causes = [cause for cause in self.diagnoses if finding.words in cause.evidence or NONFINITE in cause.consequences]
        has_cause = bool(causes) and causes[0].name != NONFINITE
        why = f": {causes[0].headline[:1].lower()}{causes[0].headline[1:]}" if has_cause else ""
        return f"{what} at step {finding.step}{why}"

    @property
    def sentence(self) -> str:
        """The verdict in a line, with its level in front."""
        return f"{self.level}: {self.headline}"

    def _extent(self) -> str:
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
    history = judge.history
    fired: dict[str, dict[str, Fired]] = {}
    for alarm in alarms:
        for figure in alarm.fired:
            fired.setdefault(alarm.finding.name, {}).setdefault(figure.key, figure)
    states = {state.rule.name: state for state in judge.states}
    num_losses = len(history.losses)
    findings = [finding for finding in findings if not is_withdrawn(finding, history)]
    names = {finding.name for finding in findings}
    checks = [Check(NONFINITE, FOUND if NONFINITE in names else NOT_FOUND, 0, num_losses, 1)] if NONFINITE in watched else []
    doubt = doubt_about_loss(history)
    for name, detector in DETECTORS.items():
        if name == NONFINITE and NONFINITE in watched:
            continue
        have_values, state = judge.have_values(detector), states.get(name)
        num_series = sum(have_values)
        judged = Judged(
            is_found=name in names,
            num_series=num_series,
            num_without_value=len(have_values) - num_series,
            num_records=num_losses if state is None else state.num_records,
            num_passed_over=0 if state is None else state.num_passed_over,
            is_watched=name in watched,
        )
        status, reason = status_of(detector, judged, history, doubt, types)
        figures = [*fired.get(name, {}).values()]
        checks.append(Check(name, status, num_series, judged.num_records, detector.num_needed, reason, figures))
    ordered = sorted(findings, key=lambda finding: (finding.severity != "error", finding.name, finding.step))
    return Verdict(ordered, checks, history)
