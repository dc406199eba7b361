"""The verdict on a stored run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.health.finding_names import NONFINITE
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.health.judgement import Verdict, verdict_of
from lightning_module_monitor.keys import Columns
from lightning_module_monitor.kinds import TRAIN
from lightning_module_monitor.record import ABSENT, Finding, ModuleInfo, Record
from lightning_module_monitor.sinks.store.matrices import Table


def verdict_on(  # noqa: PLR0917  # the contents of a store
    tables: Sequence[Table],
    figures: Sequence[Table] = (),
    findings: Sequence[Finding] = (),
    watched: Collection[str] = (),
    facts: Sequence[tuple[int, Facts]] = (),
    modules: Sequence[ModuleInfo] = (),
) -> Verdict:
    """Judge a run by every detector, record by record, as training does.

    Args:
        tables: The tables of one run's sites.
        figures: Series without sites, such as the monitor's own.
        findings: The findings of training. Those on non-finite values, alerts and ranks are kept, because they rest on more than records.
        watched: The detectors for which training recorded values, with ``nonfinite`` if it searched for non-finite values; empty for
            records of another origin, in which such values are looked for.
        facts: Facts about training besides numbers, each with its first step.
        modules: The modules of the model; empty where they are not known.

    Returns:
        The verdict on training; validation and other stages are not judged.
    """
    # A run of the callback searched for non-finite values itself, or was to ignore them.
    detectors = [detector for name, detector in DETECTORS.items() if detector.rule is not None and not (name == NONFINITE and watched)]
    rules = [detector.alert() for detector in detectors]
    judge = Judge(rules, [site for table in tables for site in table.sites], [module.name for module in modules])
    records = _records([*tables, *figures], facts)
    alarms = [alarm for record, of_record in records for alarm in judge.observe(record, of_record)] + judge.alarms_of_whole_run()
    others = [finding for finding in findings if finding.name not in DETECTORS or finding.name == NONFINITE]
    return verdict_of(
        judge, alarms, [*others, *(alarm.finding for alarm in alarms)], watched=watched, types={module.type for module in modules}
    )


def _records(tables: Sequence[Table], facts: Sequence[tuple[int, Facts]]) -> Iterator[tuple[Record, Facts | None]]:
    """The records of a run, as far as a store has them, each with the facts of its step; only those of training have facts."""
    steps = np.unique(np.concatenate([table.steps for table in tables])) if tables else np.empty(0, int)
    columns = Columns()
    columns_of_tables = [columns.add(table.name._replace(site=site) for site in table.sites) for table in tables]
    numbers = np.full((len(steps), columns.version), ABSENT)
    for table, indices in zip(tables, columns_of_tables, strict=True):
        values = np.where(table.is_recorded, table.values, ABSENT)
        numbers[np.ix_(np.searchsorted(steps, table.steps), indices)] = values.T
    of_training = {step for table in tables if table.name.stage == TRAIN for step in table.steps.tolist()}
    waiting, current = [*facts], None
    for step, row in zip(steps.tolist(), numbers, strict=True):
        while waiting and waiting[0][0] <= step:
            current = waiting.pop(0)[1]
        yield Record(step, columns, row), current if step in of_training else None
