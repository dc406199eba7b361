"""One judge for the records of a run, while it trains and on its store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.alerts import Alarm, AlertRule, Fired, RuleState, conditions, has_fallen, words_of
from lightning_module_monitor.health.bound import Bound
from lightning_module_monitor.health.detector import Detector
from lightning_module_monitor.health.facts import Facts, ParameterFacts
from lightning_module_monitor.health.kept_columns import KeptColumns, is_kept
from lightning_module_monitor.health.run_history import History
from lightning_module_monitor.health.whole_run import alarms_of
from lightning_module_monitor.keys import Columns, Key, is_rate, is_total, name_of_rate
from lightning_module_monitor.kinds import CONTEXT_KIND, ROOT_SITE
from lightning_module_monitor.record import Finding, Record, is_absent

UNKNOWN_PARAMETER = ParameterFacts("trained", -1, 0)
"""Without facts every parameter counts as trained."""

MAX_BOUND = 8
"""Number of columns to which the judge is bound at once: a run has those of its stages, and records made by hand have their own."""

_NO_RATE = np.array([math.nan])
"""The last element of the judge's vector: the learning rate of series without one, whose column is -1."""


class _Binding(NamedTuple):
    """Keys and rules bound to the columns of records; valid until the columns or the facts change."""

    version: int
    """Number of columns of the record."""
    fact_values: NDArray[np.float64]
    """The values of the facts, which follow the numbers of a record in the judge's vector."""
    keys: Sequence[Key]
    """The keys of the record's columns and of the facts."""
    by_rule: Sequence[Bound]
    """The series of each rule, in the order of the model."""
    kept: KeptColumns
    """The columns that the history uses."""
    was_recorded: NDArray[np.bool_]
    """Whether any record had a value, shape ``(keys,)``."""
    had_value: NDArray[np.bool_]
    """Whether any record had a value that is not NaN, of the same shape."""


class _JudgedRecord(NamedTuple):
    """The part of a record that all rules share."""

    step: int
    numbers: NDArray[np.float64]
    """The record's numbers, the values of the facts, and a NaN."""
    is_recorded: NDArray[np.bool_]
    """Which of them have a value."""
    first_loss: float
    loss: float
    has_facts: bool


class Judge:
    """Judges the records of a run, one after the other, by rules; and the whole run at its end.

    Args:
        rules: The rules.
        sites: The names of all sites in the order of the model. Rules get their values in this order, because records group keys by kind.
        modules: The names of all modules. The values of all parameters inside a module together (totals) have such a site; few rules
            judge them.
    """

    def __init__(self, rules: Sequence[AlertRule], sites: Iterable[str] = (), modules: Iterable[str] = ()) -> None:
        self.states = [RuleState(rule) for rule in rules]
        self.history = History()
        self._order = {site: rank for rank, site in enumerate(dict.fromkeys(sites))}
        self._modules = frozenset(modules)
        self._bindings: dict[tuple[Columns, bool], _Binding] = {}
        """Keys and rules by the columns of a stage, and by whether there are facts."""
        self._has_value: dict[Key, bool] = {}
        """Whether any record had a value that is not NaN, by the key of each series that had a value; without those of ``_bindings``."""

    def observe(self, record: Record, facts: Facts | None = None) -> list[Alarm]:
        """The alarms of a record: at most one per rule, about all figures that have met its condition in ``for_steps`` records.

        A figure that has led to an alarm can do so again only after ``QUIET_RECORDS`` records without the condition.

        Args:
            record: The record.
            facts: The facts of its step; ``None`` without any, as outside of training. The same object while nothing changes.
        """
        if facts is not None and facts is not self.history.facts and facts != self.history.facts:
            self._unbind()
            self.history.facts = facts
        binding = self._binding_of(record.columns, len(record.numbers), has_facts=facts is not None)
        numbers = np.concatenate([record.numbers, binding.fact_values, _NO_RATE])
        is_recorded = ~is_absent(numbers)
        binding.was_recorded[:] |= is_recorded[:-1]
        binding.had_value[:] |= numbers[:-1] == numbers[:-1]  # not NaN
        self.history.add(record.step, numbers, binding.kept)
        judged = _JudgedRecord(record.step, numbers, is_recorded, self.history.losses.first, self.history.loss, has_facts=facts is not None)
        with np.errstate(invalid="ignore"):
            alarms = [self._judge(state, bound, judged) for state, bound in zip(self.states, binding.by_rule, strict=True)]
        return [alarm for alarm in alarms if alarm is not None]

    def _judge(self, state: RuleState, bound: Bound, record: _JudgedRecord) -> Alarm | None:
        """The alarm of one rule, whose series in the record are bound; ``None`` if it does not fire."""
        rule, history = state.rule, self.history
        values, is_judged = record.numbers[bound.columns], record.is_recorded[bound.columns]
        if rule.needs_rate:
            is_judged &= record.numbers[bound.rates] != 0
        if False in is_judged:
            bound, values = bound.where(is_judged), values[is_judged]
        if not len(values):
            if rule.is_of_facts and record.has_facts:  # a record of validation has no facts
                state.count_unjudged()
            return None
        if rule.judges_rise:
            values = np.full(len(values), history.rise)
        if rule.needs_step and history.was_skipped:
            return None
        # A fall of the loss shows nothing under manual optimization, where a loss need not fall, or below 0, where it may have no bound.
        may_pass_over = rule.unless_loss_falls < math.inf and not history.facts.is_manual and not record.loss < 0
        has_loss_fallen = may_pass_over and has_fallen(record.first_loss, record.loss, rule.unless_loss_falls)
        if record.step > rule.until_step or has_loss_fallen:
            state.count_unjudged(has_loss_fallen=has_loss_fallen)
            return None
        can_meet = not rule.needs_fall or (not history.facts.is_manual and has_fallen(record.first_loss, record.loss, 0.0))
        fired = state.observe(record.step, bound, values, can_meet=can_meet)
        if fired and rule.needs_rate and history.facts.is_manual:
            fired = self._without_clamped(state, fired)
        if not fired:
            return None
        if rule.is_unchanged:
            history.frozen[record.step] = {Key.parse(figure.key).site: figure.value for figure in fired}
        return _alarm_of(rule, fired, record.step)

    # Binding to columns

    def _binding_of(self, columns: Columns, version: int, *, has_facts: bool) -> _Binding:
        """Keys and rules bound to the first ``version`` columns, as many as the record has numbers."""
        binding = self._bindings.get((columns, has_facts))
        if binding is None or binding.version != version:
            if binding is not None or len(self._bindings) >= MAX_BOUND:
                self._unbind()
            binding = self._bindings[columns, has_facts] = self._bind(columns.keys[:version], has_facts=has_facts)
        return binding

    def _bind(self, recorded: Sequence[Key], *, has_facts: bool) -> _Binding:
        of_facts = self.history.facts.as_values() if has_facts else {}
        keys = [*recorded, *of_facts]
        is_of_part = [key.site != ROOT_SITE and is_total(key, self._modules) for key in keys]
        # The history keeps totals of the whole model, and no others.
        kept = {column: key._replace(prefix="") for column, key in enumerate(keys) if is_kept(key) and not is_of_part[column]}
        rates = {key.statistic: column for column, key in kept.items() if key.kind == CONTEXT_KIND and is_rate(key.statistic)}
        columns_by_rule: list[list[int]] = [[] for _state in self.states]
        for column in sorted(range(len(keys)), key=lambda column: self._order.get(keys[column].site, -1)):
            for index in self._indices_of_rules(keys[column]):
                columns_by_rule[index].append(column)
        rate_by_site = {site: rates.get(name_of_rate(facts.group), -1) for site, facts in self.history.facts.parameters.items()}
        by_rule = [
            Bound(
                [keys[column] for column in columns],
                np.array(columns, np.intp),
                np.array([rate_by_site.get(keys[column].site, -1) for column in columns], np.intp),
            )
            for columns in columns_by_rule
        ]
        was_recorded, had_value = np.zeros((2, len(keys)), bool)
        values = np.array([*of_facts.values()], np.float64)
        return _Binding(len(recorded), values, keys, by_rule, KeptColumns(kept, self.history.facts), was_recorded, had_value)

    def _unbind(self) -> None:
        """Drop the bound keys and rules, and keep which series had a value."""
        self._has_value = self._had_values()
        self._bindings.clear()

    def _had_values(self) -> dict[Key, bool]:
        had = dict(self._has_value)
        for binding in self._bindings.values():
            for column in np.flatnonzero(binding.was_recorded).tolist():
                key = binding.keys[column]
                had[key] = had.get(key, False) or bool(binding.had_value[column])
        return had

    def _without_clamped(self, state: RuleState, fired: Sequence[Fired]) -> list[Fired]:
        """The figures of parameters in groups of which no parameter moves.

        In a group with others that move, code of the user may hold the weight, as the clamp of a WGAN does.
        """
        moving_groups = {self._parameter(Key.parse(name).site).group for name, num in state.num_met().items() if num == 0}
        return [figure for figure in fired if self._parameter(Key.parse(figure.key).site).group not in moving_groups]

    def _parameter(self, site: str) -> ParameterFacts:
        return self.history.facts.parameters.get(site, UNKNOWN_PARAMETER)

    def _indices_of_rules(self, key: Key) -> list[int]:
        """Indices of the rules that judge a key."""
        text = key.format()
        rules = [*enumerate(state.rule for state in self.states)]
        if is_total(key, self._modules):
            trainings = {facts.training for facts in self.history.facts.parameters.values()}
            if key.kind.startswith("gradient"):
                trainings.discard("frozen")  # without a gradient
            trainings = trainings or {UNKNOWN_PARAMETER.training}
            # A rule on parameters of one state judges a total only if all parameters have that state.
            accepted = (None, *trainings) if len(trainings) == 1 else (None,)
            return [index for index, rule in rules if rule.parameters in accepted and rule.concerns_total(key, text)]
        accepted, order = (None, self._parameter(key.site).training), self.history.facts.order
        if order and key.site and key.site not in order:
            rules = [(index, rule) for index, rule in rules if not rule.of_samples]
        if order and key.site == order[-1]:
            rules = [(index, rule) for index, rule in rules if not rule.without_last]
        return [index for index, rule in rules if rule.parameters in accepted and rule.concerns(key, text)]

    def alarms_of_whole_run(self) -> list[Alarm]:
        """The alarms that need the whole run."""
        return alarms_of(self.history)

    def have_values(self, detector: Detector) -> list[bool]:
        """Whether each series that a detector judges has a value; only series of its main kinds."""
        series = []
        for key, has_value in self._had_values().items():
            concerns = detector.concerns_total if is_total(key, self._modules) else detector.concerns
            if concerns(key) and key.kind in detector.main_kinds:
                series.append(has_value)
        return series

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, in plain numbers and texts: the state of every rule, and the history."""
        return {"history": self.history.state(), **{conditions(state.rule): state.state() for state in self.states}}

    def load(self, content: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state`; a rule with other conditions begins anew."""
        self.history.load(content.get("history", {}))
        for state in self.states:
            state.load(content.get(conditions(state.rule), (0, 0, {})))


def _alarm_of(rule: AlertRule, fired: Sequence[Fired], step: int) -> Alarm:
    finding = Finding(
        step=step,
        name=rule.name,
        site=Key.parse(fired[0].key).site,
        key=fired[0].key,
        words=words_of(rule, fired, step),
        severity=rule.severity,
        steps_before=step - min(figure.since for figure in fired),
    )
    return Alarm(finding, rule.then, fired)
