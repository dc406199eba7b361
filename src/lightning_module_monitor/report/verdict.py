"""The verdict on a stored run: which sites have a problem, since which step, with the evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lightning_module_monitor import record
from lightning_module_monitor.health.detectors import DETECTORS, Level
from lightning_module_monitor.record import OWN_KIND, STEP_SKIPPED, TRAIN, Key
from lightning_module_monitor.report.checks import look
from lightning_module_monitor.report.findings import Check, Finding, Look, Verdict
from lightning_module_monitor.report.nonfinite import look_for_nonfinite
from lightning_module_monitor.report.run import Table

SKIPPED_SHARE = 0.1
"""Limit of the share of skipped steps: a ``GradScaler`` tries a larger scale every 2,000 steps, and skips one if it is too large."""


def verdict_on(tables: Sequence[Table], figures: Sequence[Table] = (), said: Sequence[record.Finding] = ()) -> Verdict:
    """Judge a run by every detector.

    Args:
        tables: The tables of one run's sites.
        figures: The monitor's own, and others without sites.
        said: The findings of training, which knew more than is recorded.

    Returns:
        The findings on training; validation and other stages are not judged. A detector with findings from training is not judged again.
    """
    skipped = {step for table in _own(figures, STEP_SKIPPED) for step in table.steps[table.values[0] > 0].tolist()}
    known = {finding.name for finding in said}
    looked = [look(detector, tables, skipped) for name, detector in DETECTORS.items() if name not in known]
    looks = [look_for_nonfinite(tables, skipped), *looked, *_look_at_own_figures(figures)]
    reported = sorted(map(_as_said, said), key=lambda finding: finding.problem)
    findings = [*reported, *(finding for look in looks for finding in look.findings)]
    return Verdict(sorted(findings, key=lambda finding: finding.level != "sick"), [look.check for look in looks])


def _as_said(said: record.Finding) -> Finding:
    shown_by = Key.parse(said.key)
    level: Level = "sick" if said.severity == "error" else DETECTORS[said.name].level if said.name in DETECTORS else "watch"
    kind = shown_by._replace(site="", statistic="").format().rstrip("/") if said.key else ""
    return Finding(level, f"said in training: {said.name}", kind, said.site, shown_by.statistic if said.key else "", said.step, said.words)


def _look_at_own_figures(figures: Sequence[Table]) -> Iterator[Look]:
    yield from _look_at(
        figures, "errors", "what could not be measured", 0.0, lambda share, num: f"{num:.0f} errors, at {share:.0%} of steps"
    )
    yield from _look_at(
        figures, STEP_SKIPPED, "skipped steps", SKIPPED_SHARE, lambda share, _: f"the loss scale skipped {share:.0%} of steps"
    )


def _look_at(figures: Sequence[Table], name: str, problem: str, most: float, tell: Callable[[float, float], str]) -> list[Look]:
    """Finds a figure above zero in a larger share of the steps than ``most``; no check where it was not recorded."""
    tables = _own(figures, name)
    findings = []
    for table in tables:
        happened = table.values[0] > 0
        if happened.mean() > most:
            evidence = tell(float(happened.mean()), float(np.nansum(table.values)))
            findings.append(Finding("watch", problem, table.kind, "", name, int(table.steps[happened.argmax()]), evidence))
    return [Look(Check(problem, len(tables), ""), findings)] if tables else []


def _own(figures: Sequence[Table], name: str) -> list[Table]:
    return [table for table in figures if (table.name.kind, table.statistic, table.name.stage) == (OWN_KIND, name, TRAIN)]
