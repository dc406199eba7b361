"""The parts of a verdict: findings and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.diagnoses import Diagnoses, diagnose
from lightning_module_monitor.record import Finding, Severity

LEVELS: Mapping[Severity, str] = {"error": "sick", "warning": "watch"}
"""The verdict on a site in a word, by the severity of its finding."""


@dataclass(frozen=True)
class Check:
    """A problem that was looked for."""

    name: str
    """Of the detector."""
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
        return "ok" if 2 * self.num_checked >= len(self.checks) > 0 else "not looked at"

    @property
    def num_checked(self) -> int:
        """Number of checks that had a series."""
        return sum(check.num_series > 0 for check in self.checks)

    @property
    def diagnoses(self) -> Diagnoses:
        """The causes that the findings show."""
        return diagnose(self.findings)

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        if self.level == "not looked at":
            return f"not enough was recorded to judge: {self.num_checked} of {len(self.checks)} checks had values to look at"
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
