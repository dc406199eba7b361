"""The verdict on a stored run: its findings and their causes, and what is known of each check."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from lightning_module_monitor.display import counted
from lightning_module_monitor.health.alerts import Fired
from lightning_module_monitor.health.causes import Diagnoses, diagnose
from lightning_module_monitor.health.detector import Detector
from lightning_module_monitor.health.detectors import DETECTORS, NONFINITE, NOT_LEARNING, ZERO_RATE
from lightning_module_monitor.health.history import MIN_LOSSES, History
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.record import FACT_KIND, Facts, Finding, Key, ModuleInfo, Record, Severity
from lightning_module_monitor.sinks.store.matrices import Table

LEVELS: Mapping[Severity, str] = {"error": "sick", "warning": "watch"}
"""The verdict on a finding in a word, by its severity."""
FOUND, NOT_FOUND, TOO_FEW, NOT_APPLICABLE = "found", "not found", "too few records", "does not apply"
NOT_RECORDED, NOT_COMPUTED = "not recorded", "not computed"

_LOSS_IN_WORDS = {
    "unclear": "the loss may fall: too few records to tell",
    "too few": f"too few losses (fewer than {MIN_LOSSES})",
    "none": "no loss was recorded",
    "manual": "whether it learns is not known: the loss is not judged under manual optimization",
    "negative": "whether it learns is not known: a loss at or below 0 is not judged",
}


@dataclass(frozen=True)
class Check:
    """What is known of a condition.

    Attributes:
        name: Name of the detector.
        status: ``found``, ``not found``, ``too few records``, ``not recorded``, ``not computed``, or
            ``does not apply``.
        num_series: Number of series that it judged; those without a value do not count.
        num_records: Number of records with values of them.
        num_needed: Number of records below which it cannot find anything.
        reason: Why it says nothing, and the option that records what it needs.
        fired: The figures that met the condition, the first of each key.
    """

    name: str
    status: str
    num_series: int
    num_records: int
    num_needed: int
    reason: str = ""
    fired: Sequence[Fired] = field(default=(), repr=False)


@dataclass(frozen=True)
class Verdict:
    """The findings of a run, and the checks."""

    findings: Sequence[Finding]
    """The errors first; then in the order of names and steps."""
    checks: Sequence[Check]
    history: History

    @property
    def is_sick(self) -> bool:
        """Whether any finding is sick."""
        return any(finding.severity == "error" for finding in self.findings)

    @property
    def level(self) -> str:
        """The verdict in a word: ``sick``, ``watch``, ``healthy``, or ``unknown`` where not enough was recorded to say so."""
        if self.findings:
            return "sick" if self.is_sick else "watch"
        return "unknown" if self._doubts else "healthy"

    @property
    def _doubts(self) -> list[str]:
        """What is not known of a run without findings."""
        few = [check for check in self.checks if check.status == TOO_FEW and check.name != NOT_LEARNING]
        doubts = [_LOSS_IN_WORDS[self.history.learning]] if self.history.learning in _LOSS_IN_WORDS else []
        doubts += [f"{check.name}: {check.reason}" for check in self.checks_with(NOT_COMPUTED)[:2]]
        return doubts + [f"{check.name} needs {check.num_needed} records and has {check.num_records}" for check in few[:2]]

    @property
    def problems(self) -> list[tuple[str, str, list[Finding]]]:
        """Level, name and findings of each problem."""
        groups = groupby(self.findings, key=lambda finding: (finding.severity, finding.name))
        return [(LEVELS[severity], name, list(findings)) for (severity, name), findings in groups]

    def checks_with(self, *statuses: str) -> list[Check]:
        """The checks of which that much is known."""
        return [check for check in self.checks if check.status in statuses]

    @property
    def diagnoses(self) -> Diagnoses:
        """The causes that the findings show."""
        return diagnose(self.findings, self.history)

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        diagnoses = self.diagnoses
        first = next((one for one in self.findings if one.name == NONFINITE), None)
        if first is not None:
            cause = next((one for one in diagnoses if first.words in one.evidence or NONFINITE in one.consequences), None)
            what = first.words.split(" ", 1)[0] if first.words.startswith(("NaN", "Infinity")) else "a value that is not finite"
            where = first.site if first.site not in ("", "_root_") else "the batch or the loss"
            return f"{what} in {where} at step {first.step}" + (f": {_lower(cause.headline)}" if cause is not None else "")
        if self.findings:
            return diagnoses[0].title if diagnoses else self.findings[0].message.removesuffix(".")
        looked = self._looked_at()
        if self._doubts:
            return f"not enough is known to call it healthy: {'; '.join(self._doubts)}. No check found a fault{looked and f' in {looked}'}"
        return f"loss {self.history.first_loss:.3g} to {np.median(self.history.ends[1]):.3g}; no fault in {looked}"

    def _looked_at(self) -> str:
        """What was looked at, in words."""
        recorded = {key.kind for key in self.history.last}
        names = {"gradient": "gradients", "activation": "activations", "parameter": "weights", "update": "updates"}
        kinds = [name for kind, name in names.items() if kind in recorded]
        num_sites = len({key.site for key in self.history.last if key.site})
        num_records = max((check.num_records for check in self.checks), default=0)
        return f"{', '.join(kinds)} of {counted(num_sites, 'site')} at {counted(num_records, 'record')}" if kinds else ""

    @property
    def beginning(self) -> Finding | None:
        """Where to look first: the first finding on the series of the first diagnosis, else the first error; ``None`` without either."""
        key = self.diagnoses[0].key if self.diagnoses else ""
        candidates = [one for one in self.findings if (one.key == key if key else one.severity == "error")]
        return min(candidates, key=lambda one: one.first_step, default=None)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


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
        watched: ``nonfinite`` if the training searched for such values, and the detectors that ``health.watch`` may have named.
        facts: What is known of training besides numbers, each with its first step.
        modules: The modules of the model; empty where they are not known.

    Returns:
        The findings on training; validation and other stages are not judged.
    """
    detectors = [one for name, one in DETECTORS.items() if not (name == NONFINITE and NONFINITE in watched)]
    judge = Judge([one.alert() for one in detectors if one.rule is not None], [site for table in tables for site in table.sites])
    alarms = [alarm for record in _records([*tables, *figures], facts) for alarm in judge.observe(record)] + judge.finish()
    of_training = [one for one in findings if one.name not in DETECTORS or one.name == NONFINITE]
    together = sorted([*of_training, *(alarm.finding for alarm in alarms)], key=lambda one: (one.severity != "error", one.name, one.step))
    fired: dict[str, dict[str, Fired]] = {}
    for alarm in alarms:
        for figure in alarm.fired:
            fired.setdefault(alarm.finding.name, {}).setdefault(figure.key, figure)
    num_records = {state.rule.name: state.num_records for state in judge.states}
    num_records |= {NOT_LEARNING: len(judge.history.losses), ZERO_RATE: len(judge.history.losses)}
    found = {one.name for one in together}
    series = [
        (Key(table.name.kind, "", table.statistic, table.name.stage), bool(has_value))
        for table in (*tables, *figures)
        for has_value in np.any(table.is_recorded & ~np.isnan(table.values), axis=1)
    ]
    types = {one.type for one in modules}
    checks = []
    for one in detectors:
        have_values, num = [has_value for key, has_value in series if one.concerns(key)], num_records.get(one.name, 0)
        own, num_empty = sum(have_values), have_values.count(False)
        status, reason = (FOUND, "") if one.name in found else _check(one, own, num, judge.history, types)
        if status != FOUND and num_empty and not own:
            status, reason = NOT_COMPUTED, f"no value could be computed: NaN in all of {num_empty} series"
        checks.append(Check(one.name, status, own, num, one.num_needed, reason, [*fired.get(one.name, {}).values()]))
    if NONFINITE in watched:
        checks.insert(0, Check(NONFINITE, FOUND if NONFINITE in found else NOT_FOUND, 0, len(judge.history.losses), 1))
    return Verdict(together, checks, judge.history)


def _check(one: Detector, num_series: int, num_records: int, history: History, types: Collection[str]) -> tuple[str, str]:
    """The status of a check that found nothing, and the reason."""
    if one.types and types and not {*types} & {*one.types}:
        return NOT_APPLICABLE, f"no {', '.join(one.types[:-1])} or {one.types[-1]} module"
    if one.name == NOT_LEARNING and history.learning in ("manual", "negative"):
        return NOT_APPLICABLE, _LOSS_IN_WORDS[history.learning]
    of_facts = FACT_KIND in one.sources[0][0] or (one.rule is not None and one.rule.is_of_facts)
    if of_facts and not num_records:
        return NOT_APPLICABLE, "known of a Trainer's runs alone"
    if not (num_series and num_records) and not of_facts:
        option = one.recorded_by or f"health: {{watch: {one.name}}}"
        return (NOT_RECORDED, f"add {option}") if option != "-" else (NOT_APPLICABLE, "there are no such values")
    is_unclear = one.name == NOT_LEARNING and history.learning == "unclear"
    if is_unclear or num_records < one.num_needed:
        return TOO_FEW, _LOSS_IN_WORDS["unclear"] if is_unclear else f"{num_records} of {one.num_needed}"
    return NOT_FOUND, ""


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
