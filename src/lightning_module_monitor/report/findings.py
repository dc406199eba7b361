"""What a verdict is made of: what was found, what was looked for, and both together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_module_monitor.health.detectors import Level


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
    def level(self) -> str:
        """The verdict in a word: ``sick``, ``watch``, ``ok``, or ``not looked at``, where there was nothing to look at."""
        if self.findings:
            return "sick" if self.is_sick else "watch"
        return "ok" if any(check.num_series for check in self.checks) else "not looked at"

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        if self.level == "not looked at":
            return "nothing was recorded that a check could look at"
        sick = {finding.site for finding in self.findings if finding.level == "sick"}
        others = {finding.site for finding in self.findings} - sick
        told = [f"{count(num, 'site')} {level}" for level, num in (("sick", len(sick)), ("to watch", len(others))) if num]
        return ", ".join(told) or "no check found anything"

    @property
    def beginning(self) -> Finding | None:
        """The sick finding with the earliest step: where to look first. ``None`` if nothing is sick."""
        return min((finding for finding in self.findings if finding.level == "sick"), key=lambda finding: finding.step, default=None)


@dataclass(frozen=True)
class Look:
    """What one check gives."""

    check: Check
    findings: Sequence[Finding]


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(2, "site")
    '2 sites'
    """
    return f"{number} {noun}" if number == 1 or noun == "series" else f"{number} {noun}s"
