"""The verdict on a stored run: which sites have a problem, since which step, with the evidence."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.record import CONTEXT_KIND, LOSS, OWN_KIND, STEP_SKIPPED, Finding
from lightning_module_monitor.report.arrays import early, late, typical
from lightning_module_monitor.report.checks import look
from lightning_module_monitor.report.findings import Verdict
from lightning_module_monitor.report.nonfinite import look_for_nonfinite
from lightning_module_monitor.report.run import Table, of_training


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
    losses = [
        (float(typical(early(one.values))[0]), float(typical(late(one.values))[0])) for one in of_training(figures, CONTEXT_KIND, LOSS)
    ]
    known |= {name for name, one in DETECTORS.items() for first, last in losses if one.is_silenced_by(first, last)}
    judged = [
        look(
            one,
            figures if one.is_of_monitor else tables,
            skipped,
            is_known=one.name in known,
        )
        for one in DETECTORS.values()
        if one.is_known_later or one.name in known
    ]
    checked = [
        look_for_nonfinite(tables, skipped, is_known="nonfinite" in known),
        *(one for one in judged if one[0].num_series or one[0].needs),
    ]
    together = sorted(findings, key=lambda finding: finding.name) + [one for _check, found in checked for one in found]
    return Verdict(sorted(together, key=lambda finding: finding.severity != "error"), [check for check, _found in checked])
