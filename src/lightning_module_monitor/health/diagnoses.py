"""Diagnoses: at most three causes that explain the findings of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_module_monitor.display import Described, Description, counted
from lightning_module_monitor.health.alerts import has_fallen
from lightning_module_monitor.health.cause import Cause
from lightning_module_monitor.health.causes import CAUSES
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.finding_names import NONFINITE, NOT_LEARNING
from lightning_module_monitor.health.run_history import History
from lightning_module_monitor.kinds import DEAD_AFTER, ROOT_SITE
from lightning_module_monitor.record import Finding

MAX_DIAGNOSES = MAX_EVIDENCE = 3
_UNEXPLAINED = ("", "learning_rate", "update", "recurrent")
"""Causes that the search for a non-finite value names, and that another diagnosis may explain."""


@dataclass(frozen=True, repr=False)
class Diagnosis(Described):
    """A likely cause of findings, and what to try.

    Attributes:
        name: Name of the cause, e.g. ``learning_rate``.
        headline: The cause in a sentence.
        first_step: The first step that shows it.
        site: The first module or parameter that shows it; empty if the cause has no site.
        evidence: The findings in sentences with figures, and facts that rule other causes out.
        consequences: Names of the other findings that follow from it.
        advice: What to try.
        key: The key of the series that shows it first; empty if there is none.
    """

    name: str
    headline: str
    first_step: int
    site: str
    evidence: tuple[str, ...]
    consequences: tuple[str, ...]
    advice: str
    key: str = ""

    @property
    def title(self) -> str:
        """The cause with its first step and site. A condition that a record shows may have begun after the record before."""
        begin = f"from step {self.first_step} {'at the latest' if self.key and self.first_step else 'on'}"
        return f"{self.headline}, {begin}{f', first at {self.site}' if self.site not in ('', ROOT_SITE) else ''}"

    def _describe(self) -> Description:
        rows = [("from step", str(self.first_step)), ("where", self.site), *(("evidence", words) for words in self.evidence)]
        consequences = [("explains", ", ".join(dict.fromkeys(self.consequences)))] if self.consequences else []
        return Description(self.headline, ("", ""), [*rows, *consequences, ("try", self.advice)])

    def __repr__(self) -> str:
        return f"Diagnosis({self})"

    def __str__(self) -> str:
        num = len(self.consequences)
        more = f" {counted(num, 'other finding')} follow{'s' if num == 1 else ''} from it." if num else ""
        return f"{self.title}. {' '.join(self.evidence)}{more} Try: {self.advice}."


class Diagnoses(Described, list[Diagnosis]):
    """Diagnoses in their order."""

    def _describe(self) -> Description:
        rows = [(str(cause.first_step), cause.headline, cause.site, cause.evidence[0], cause.advice) for cause in self]
        return Description(counted(len(self), "diagnosis", "diagnoses"), ("from step", "what", "where", "evidence", "try"), rows)

    def __repr__(self) -> str:
        return "[" + ",\n ".join(map(repr, self)) + "]"


_EXPLOSION_FALLEN = 0.5
"""Part of the first loss by which a loss has fallen that contradicts an explosion, which is none the less for a smaller one."""


def is_withdrawn(finding: Finding, history: History) -> bool:
    """Whether later records contradict a finding: what did not move has moved, or has a gradient, or the loss has fallen all the same."""
    if finding.name == "zero_gradients":
        return history.gradient_of(finding.site) > 0
    if finding.name == "frozen_updates":
        norms = history.frozen.get(finding.step, {})
        return bool(norms) and all(history.norm_of(site) != norm for site, norm in norms.items())
    if finding.name == "no_gradients":
        return not history.facts.no_gradient and any(value > 0 for key, value in history.last.items() if key.kind == "gradient")
    rule = DETECTORS[finding.name].rule if finding.name in DETECTORS else None
    part = math.inf if rule is None else rule.unless_loss_falls
    return _falls_since(finding, max(part, _EXPLOSION_FALLEN) if finding.name == "exploding" else part, history)


def _falls_since(finding: Finding, part: float, history: History) -> bool:
    """Whether the loss has fallen by more than this part of the first one in the end, below chance, and had not before the finding."""
    losses = history.losses
    is_judged = finding.step < max(losses.steps, default=0) and not (history.facts.is_manual or losses.last_median < 0)
    if not is_judged or not has_fallen(losses.first, losses.last_median, part) or history.learning == "chance":
        return False
    earlier = [loss for step, loss in zip(losses.steps, losses.values, strict=True) if step < finding.first_step]
    return not any(has_fallen(losses.first, loss, part) for loss in earlier)


def diagnose(findings: Iterable[Finding], history: History | None = None) -> Diagnoses:
    """The causes that findings show, the surest first; at most ``MAX_DIAGNOSES``. Each finding belongs to one of them."""
    history = History() if history is None else history
    # A finding on the whole run begins with the run, whenever its cause does.
    rest = sorted(
        (finding for finding in findings if not is_withdrawn(finding, history)),
        key=lambda finding: (finding.name == NOT_LEARNING, finding.first_step, finding.severity != "error", finding.name, finding.step),
    )
    diagnoses = Diagnoses()
    for cause in CAUSES:
        evidence = [finding for finding in rest if finding.name in cause.evidence_for and cause.is_shown(finding, history)]
        if not evidence or cause.is_ruled_out(history) or len(diagnoses) == MAX_DIAGNOSES:
            continue
        first = evidence[0]
        consequences = [finding for finding in rest if finding not in evidence and _follows(finding, cause, first, history)]
        shown = sorted(evidence, key=lambda finding: finding.name != NONFINITE)[:MAX_EVIDENCE]
        words = tuple(filter(None, [*(finding.words for finding in shown), cause.remark(history)]))
        names = tuple(finding.name for finding in consequences)
        first_step = history.losses.steps[0] if cause.is_from_start and history.losses.steps else first.first_step
        site = first.site or cause.site(history)
        diagnoses.append(Diagnosis(cause.name, cause.headline, first_step, site, words, names, cause.advice, first.key))
        rest = [finding for finding in rest if finding not in evidence and finding not in consequences]
    return diagnoses


def _follows(finding: Finding, cause: Cause, first: Finding, history: History) -> bool:
    """Whether a cause, first shown by ``first``, explains another finding."""
    begin = first.first_step
    earlier = [step for step in history.losses.steps if step < begin]
    if finding.name == NONFINITE and finding.cause in _UNEXPLAINED:
        # It has its own step, and the condition that a record shows may have begun right after the record before.
        begin = max(earlier, default=-1) + 1
    elif first.name == "dead_units":
        begin = earlier[-DEAD_AFTER] if len(earlier) >= DEAD_AFTER else 0
    return finding.name in cause.explains and (finding.first_step >= begin or finding.name == NOT_LEARNING)
