"""The verdict on a stored run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from lightning_module_monitor.health.detectors import DETECTORS, NONFINITE
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.health.judgement import Verdict, verdict_of
from lightning_module_monitor.record import Facts, Finding, ModuleInfo, Record
from lightning_module_monitor.sinks.store.matrices import Table


def verdict_on(  # noqa: PLR0917  # what a store has
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
        figures: The monitor's own, and others without sites.
        findings: Those of training, which knew more than is recorded: of values that are not finite, of alerts, of ranks.
        watched: The detectors for which training recorded values, with ``nonfinite`` if it searched for non-finite values.
        facts: What is known of training besides numbers, each with its first step.
        modules: The modules of the model; empty where they are not known.

    Returns:
        The findings on training; validation and other stages are not judged.
    """
    searched = NONFINITE in watched
    rules = [one.alert() for name, one in DETECTORS.items() if one.rule is not None and not (name == NONFINITE and searched)]
    judge = Judge(rules, [site for table in tables for site in table.sites])
    alarms = [alarm for record in _records([*tables, *figures], facts) for alarm in judge.observe(record)] + judge.finish()
    of_training = [one for one in findings if one.name not in DETECTORS or one.name == NONFINITE]
    together = [*of_training, *(alarm.finding for alarm in alarms)]
    return verdict_of(judge, alarms, together, watched=watched, types={module.type for module in modules})


def _records(tables: Sequence[Table], facts: Sequence[tuple[int, Facts]]) -> Iterator[Record]:
    """The records of training, as far as a store has them."""
    steps = np.unique(np.concatenate([table.steps for table in tables])) if tables else np.empty(0, int)
    columns = [
        (table, [table.key(row) for row in range(len(table.sites))], dict(zip(table.steps.tolist(), range(len(table.steps)), strict=True)))
        for table in tables
    ]
    waiting, current = [*facts], None
    for step in steps.tolist():
        while waiting and waiting[0][0] <= step:
            current = waiting.pop(0)[1]
        values: dict[str, float] = {}
        for table, keys, places in columns:
            place = places.get(step)
            if place is not None:
                own = zip(keys, table.values[:, place].tolist(), table.is_recorded[:, place].tolist(), strict=True)
                values |= {key: value for key, value, is_recorded in own if is_recorded}
        yield Record(step, values, facts=current)
