"""The parts of a verdict: findings and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.detectors import Level
from lightning_module_monitor.health.diagnoses import Diagnoses, Symptom, diagnose


@dataclass(frozen=True)
class Finding:
    """A site with a problem."""

    level: Level
    problem: str
    """Name of the detector: findings of one problem are shown together."""
    kind: str
    site: str
    statistic: str
    """The series that shows it."""
    step: int
    """The monitored step at which it began, or is at its worst."""
    evidence: str
    """The evidence in a sentence, with figures."""


@dataclass(frozen=True)
class Check:
    """A problem that was looked for."""

    problem: str
    num_series: int
    """Number of series that were looked at; 0 if none was recorded."""
    needs: str
    """The options that record what it looks at."""


Checked = tuple[Check, Sequence[Finding]]
"""A check and its findings."""


@dataclass(frozen=True)
class Verdict:
    """The findings of a run, and the checks."""

    findings: Sequence[Finding]
    """The sick ones first; then in the order of checks, steps and model."""
    checks: Sequence[Check]

    @property
    def is_sick(self) -> bool:
        """Whether any finding is sick."""
        return any(finding.level == "sick" for finding in self.findings)

    @property
    def level(self) -> str:
        """The verdict in a word: ``sick``, ``watch``, ``ok``, or ``not looked at`` if less than half of the checks had a series."""
        if self.findings:
            return "sick" if self.is_sick else "watch"
        return "ok" if 2 * self.num_checked >= len(self.checks) > 0 else "not looked at"

    @property
    def num_checked(self) -> int:
        """Number of checks that had a series."""
        return sum(check.num_series > 0 for check in self.checks)

    @property
    def diagnoses(self) -> Diagnoses:
        """The causes that the findings show."""
        return diagnose(Symptom(one.problem, one.step, one.site, one.evidence) for one in self.findings)

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        if self.level == "not looked at":
            return f"not enough was recorded to judge: {self.num_checked} of {len(self.checks)} checks had values to look at"
        sick = {finding.site for finding in self.findings if finding.level == "sick"}
        others = {finding.site for finding in self.findings} - sick
        levels = [f"{counted(num, 'site')} {level}" for level, num in (("sick", len(sick)), ("to watch", len(others))) if num]
        return ", ".join(levels) or "no check found anything"

    @property
    def beginning(self) -> Finding | None:
        """The sick finding with the earliest step: where to look first. ``None`` if nothing is sick."""
        return min((finding for finding in self.findings if finding.level == "sick"), key=lambda finding: finding.step, default=None)
