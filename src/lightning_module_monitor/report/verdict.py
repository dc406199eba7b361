"""The verdict on a stored run: which sites have a problem, since which step, with the evidence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.diagnoses import Diagnoses, diagnose
from lightning_module_monitor.record import CONTEXT_KIND, LOSS, OWN_KIND, STEP_SKIPPED, Finding, Severity
from lightning_module_monitor.report.checks import Check, judge, judge_nonfinite
from lightning_module_monitor.report.run import early, late, of_training, typical
from lightning_module_monitor.sinks.store.matrices import Table

LEVELS: Mapping[Severity, str] = {"error": "sick", "warning": "watch"}
"""The verdict on a site in a word, by the severity of its finding."""


@dataclass(frozen=True)
class Verdict:
    """The findings of a run, and the checks."""

    findings: Sequence[Finding]
    """The errors first; then in the order of checks, steps and model."""
    checks: Sequence[Check]

    @property
    def is_sick(self) -> bool:
        """Whether any finding is sick."""
        return any(finding.severity == "error" for finding in self.findings)

    @property
    def level(self) -> str:
        """The verdict in a word: ``sick``, ``watch``, ``ok``, or ``not looked at`` if less than half of the checks had a series."""
        if self.findings:
            return "sick" if self.is_sick else "watch"
        return "ok" if len(self.checks) > 0 and 2 * len(self.blind) <= len(self.checks) else "not looked at"

    @property
    def problems(self) -> list[tuple[str, str, list[Finding]]]:
        """Level, name and findings of each problem."""
        groups = groupby(self.findings, key=lambda finding: (finding.severity, finding.name))
        return [(LEVELS[severity], name, list(findings)) for (severity, name), findings in groups]

    @property
    def passed(self) -> list[Check]:
        """The checks that had a series, and found nothing."""
        found = {finding.name for finding in self.findings}
        return [check for check in self.checks if check.num_series and check.name not in found]

    @property
    def blind(self) -> list[Check]:
        """The checks without a series that has a value."""
        return [check for check in self.checks if not check.num_series]

    @property
    def diagnoses(self) -> Diagnoses:
        """The causes that the findings show."""
        return diagnose(self.findings)

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        if self.level == "not looked at":
            num_checked = len(self.checks) - len(self.blind)
            return f"not enough was recorded to judge: {num_checked} of {len(self.checks)} checks had values to look at"
        sick = {finding.site for finding in self.findings if finding.severity == "error"}
        others = {finding.site for finding in self.findings} - sick
        levels = [f"{counted(num, 'site')} {level}" for level, num in (("sick", len(sick)), ("to watch", len(others))) if num]
        return ", ".join(levels) or "no check found anything"

    @property
    def beginning(self) -> Finding | None:
        """Where to look first: the first finding on the series of the first diagnosis, else the first error; ``None`` without either."""
        key = self.diagnoses[0].key if self.diagnoses else ""
        candidates = [one for one in self.findings if (one.key == key if key else one.severity == "error")]
        return min(candidates, key=lambda one: one.first_step, default=None)


def verdict_on(
    tables: Sequence[Table], figures: Sequence[Table] = (), findings: Sequence[Finding] = (), watched: Collection[str] = ()
) -> Verdict:
    """Judge a run by every detector.

    Args:
        tables: The tables of one run's sites.
        figures: The monitor's own, and others without sites.
        findings: Those of training, which knew more than is recorded.
        watched: Names of the detectors that the training judged.

    Returns:
        The findings on training; validation and other stages are not judged. A detector that the training judged is not judged again.
    """
    skipped = {step for table in of_training(figures, OWN_KIND, STEP_SKIPPED) for step in table.steps[table.values[0] > 0].tolist()}
    known = {finding.name for finding in findings} | {*watched}
    for table in of_training(figures, CONTEXT_KIND, LOSS):
        first, last = (float(typical(part(table.values))[0]) for part in (early, late))
        known |= {name for name, one in DETECTORS.items() if one.is_silenced_by(first, last)}
    checked = [judge_nonfinite(tables, skipped, is_known="nonfinite" in known)]
    for name, one in DETECTORS.items():
        if one.is_known_later or name in known:
            check, found = judge(one, figures if one.is_of_monitor else tables, skipped, is_known=name in known)
            if check.num_series or check.num_empty or check.needs:
                checked.append((check, found))
    together = sorted(findings, key=lambda finding: finding.name) + [one for _check, found in checked for one in found]
    return Verdict(sorted(together, key=lambda finding: finding.severity != "error"), [check for check, _found in checked])
