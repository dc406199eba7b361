"""The check for values that are not finite: which site was the first."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.detectors import FINITE_STATISTICS
from lightning_module_monitor.record import Finding
from lightning_module_monitor.report.arrays import first_true
from lightning_module_monitor.report.findings import Check, Checked
from lightning_module_monitor.report.run import Table, of_training

_NAME = "values that are not finite"
# Within a step what comes first is the cause of what comes later; backward it is the last module that comes first.
_ORDER = ("parameter", "activation", "activation_gradient", "gradient_before_clip", "gradient", "update")
_BACKWARD = ("activation_gradient", "gradient_before_clip", "gradient")


def look_for_nonfinite(tables: Sequence[Table], skipped_steps: Collection[int], *, is_known: bool = False) -> Checked:
    """Find each site's first non-finite value, in the order of events: the first of all is the likely cause.

    Args:
        tables: The tables of one run's sites.
        skipped_steps: Steps that a ``GradScaler`` skipped, as its scale was too large: gradients overflow there, and do no harm.
        is_known: Whether the training has looked for them, at every step: infinities of a mask, say, are recorded and do no harm.

    Returns:
        A finding for each such site.
    """
    seen = [table for kind in _ORDER for table in _tables_of(tables, kind)]
    firsts = sorted((first for table in (() if is_known else seen) for first in _firsts(table, skipped_steps)), key=lambda first: first[0])
    findings = [_finding(table, row, column) for _place, table, row, column in firsts]
    if findings:
        first = findings[0]
        at_once = sum(finding.step == first.step for finding in findings)
        words = f"the first: {first.words}, of {counted(at_once, 'series')} at that step and {len(findings)} in all"
        findings[0] = dataclasses.replace(first, words=words)
    # Of the training's own search the check has its name: it is not "ok" beside what that has found.
    return Check("nonfinite" if is_known else _NAME, sum(len(table.sites) for table in seen), "statistics: nonfinite_count"), findings


def _firsts(table: Table, skipped_steps: Collection[int]) -> Iterator[tuple[tuple[int, int, int], Table, int, int]]:
    """For each site that has one: the first's place in the order of events, the table, its row, and the column."""
    bad = nonfinite(table)
    is_backward = table.name.kind in _BACKWARD
    if is_backward or table.name.kind == "update":
        bad[:, np.isin(table.steps, list(skipped_steps))] = False
    for row, column in enumerate(first_true(bad).tolist()):
        if column < len(table.steps):
            place = (int(table.steps[column]), _ORDER.index(table.name.kind), -row if is_backward else row)
            yield place, table, row, column


def _finding(table: Table, row: int, column: int) -> Finding:
    value, step = table.values[row, column], int(table.steps[column])
    what = f"{value:.0f} elements" if table.statistic == "nonfinite_count" else f"{table.statistic} {value}"
    return table.finding(row, _NAME, step, f"{what} at step {step}", "error")


def nonfinite(table: Table) -> NDArray[np.bool_]:
    """Where a statistic shows a non-finite element; shape ``(sites, steps)``."""
    if table.statistic == "nonfinite_count":
        return table.values > 0
    return table.is_recorded & ~np.isfinite(table.values)


def _tables_of(tables: Sequence[Table], kind: str) -> Iterator[Table]:
    """For each site of a kind the most informative table: the count, or else any statistic that must be finite."""
    known: set[tuple[str, str]] = set()
    for statistic in FINITE_STATISTICS:
        for table in of_training(tables, kind, statistic):
            rows = [row for row, site in enumerate(table.sites) if (table.name.prefix, site) not in known]
            known.update((table.name.prefix, table.sites[row]) for row in rows)
            if rows:
                yield _rows_of(table, rows)


def _rows_of(table: Table, rows: list[int]) -> Table:
    return Table(table.name, tuple(table.sites[row] for row in rows), table.steps, table.values[rows], table.is_recorded[rows])
