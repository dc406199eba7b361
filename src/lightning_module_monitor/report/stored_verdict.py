"""The verdict on a stored run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from lightning_module_monitor.health.detectors import DETECTORS, NONFINITE
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.health.judgement import Verdict, verdict_of
from lightning_module_monitor.kinds import TRAIN
from lightning_module_monitor.record import Finding, ModuleInfo, Record
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
        watched: The detectors for which training recorded values, with ``nonfinite`` if it searched for non-finite values.
        facts: Facts about training besides numbers, each with its first step.
        modules: The modules of the model; empty where they are not known.

    Returns:
        The verdict on training; validation and other stages are not judged.
    """
    searched = NONFINITE in watched
    detectors = [detector for name, detector in DETECTORS.items() if detector.rule is not None and not (name == NONFINITE and searched)]
    rules = [detector.alert() for detector in detectors]
    judge = Judge(rules, [site for table in tables for site in table.sites], [module.name for module in modules])
    alarms = [alarm for record in _records([*tables, *figures], facts) for alarm in judge.observe(record)] + judge.alarms_of_whole_run()
    others = [finding for finding in findings if finding.name not in DETECTORS or finding.name == NONFINITE]
    return verdict_of(
        judge, alarms, [*others, *(alarm.finding for alarm in alarms)], watched=watched, types={module.type for module in modules}
    )


def _records(tables: Sequence[Table], facts: Sequence[tuple[int, Facts]]) -> Iterator[Record]:
    """The records of a run, as far as a store has them; those of training have facts."""
    steps = np.unique(np.concatenate([table.steps for table in tables])) if tables else np.empty(0, int)
    columns = [
        (table, [table.key(row) for row in range(len(table.sites))], {step: column for column, step in enumerate(table.steps.tolist())})
        for table in tables
    ]
    of_training = {step for table in tables if table.name.stage == TRAIN for step in table.steps.tolist()}
    waiting, current = [*facts], None
    for step in steps.tolist():
        while waiting and waiting[0][0] <= step:
            current = waiting.pop(0)[1]
        values: dict[str, float] = {}
        for table, keys, column_by_step in columns:
            column = column_by_step.get(step)
            if column is not None:
                rows = zip(keys, table.values[:, column].tolist(), table.is_recorded[:, column].tolist(), strict=True)
                values |= {key: value for key, value, is_recorded in rows if is_recorded}
        yield Record(step, values, facts=current if step in of_training else None)
