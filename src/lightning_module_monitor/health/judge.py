"""One judge for the records of a run, while it trains and on its store."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_module_monitor.health.alerts import Action, AlertRule, Fired, RuleState, conditions, has_fallen, words_of
from lightning_module_monitor.health.detector import Detector
from lightning_module_monitor.health.detectors import DETECTORS, NOT_LEARNING, ZERO_RATE
from lightning_module_monitor.health.facts import ParameterFacts
from lightning_module_monitor.health.run_history import History, is_kept
from lightning_module_monitor.keys import Key, is_total
from lightning_module_monitor.kinds import CONTEXT_KIND, LOSS, OWN_KIND, ROOT_SITE, STEP_SKIPPED
from lightning_module_monitor.record import Finding, Record

UNKNOWN_PARAMETER = ParameterFacts("trained", -1, 0)
"""Without facts every parameter counts as trained."""


_LOSS_PHRASES = {
    "flat": "does not fall by more than its noise",
    "still": "hardly falls, and the weights hardly move",
    "stopped": "falls no more, and the weights hardly move",
}
"""What is wrong with the loss, by the result of :attr:`History.learning`."""


class Alarm(NamedTuple):
    """A finding, and the actions that follow it."""

    finding: Finding
    then: tuple[Action, ...] = ("warn",)
    fired: Sequence[Fired] = ()
    """The figures that met the condition."""


class _Series(NamedTuple):
    """What is known of a series beside its values."""

    parts: Key
    rank: int
    """Position of the site in the order of the model."""
    kept: Key | None
    """The key without prefix, if the history keeps the values."""
    rules: Sequence[int]
    """Indices of the rules that judge it."""


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
        self._series: dict[str, _Series] = {}
        """What is known of a series while the facts are the same, by key."""
        self._has_value: dict[str, bool] = {}
        """Whether any record had a value that is not NaN, by key."""

    def observe(self, record: Record) -> list[Alarm]:
        """The alarms of a record: at most one per rule, about all figures that have met its condition in ``for_steps`` records.

        A figure that has led to an alarm can do so again only after ``QUIET_RECORDS`` records without the condition.
        """
        history = self.history
        if record.facts is not None and record.facts != history.facts:
            history.facts = record.facts
            self._series.clear()
        values_by_rule: list[dict[str, float]] = [{} for _state in self.states]
        values: dict[Key, float] = {}
        for key, value in itertools.chain(record.values.items(), () if record.facts is None else record.facts.as_values().items()):
            series = self._series.get(key)
            if series is None:
                parts = Key.parse(key)
                # Of all parameters inside a module together, the history keeps those of the whole model alone.
                is_of_part = parts.site != ROOT_SITE and is_total(parts, self._modules)
                kept = parts._replace(prefix="") if is_kept(parts) and not is_of_part else None
                series = self._series[key] = _Series(parts, self._order.get(parts.site, -1), kept, self._rules_of(parts, key))
            for rule in series.rules:
                values_by_rule[rule][key] = value
            self._has_value[key] = self._has_value.get(key, False) or not math.isnan(value)
            if series.kept is not None:
                values[series.kept] = value
        if values:
            history.add(record.step, values)
        was_skipped = values.get(Key(OWN_KIND, "", STEP_SKIPPED), 0.0) > 0
        judged = zip(self.states, values_by_rule, strict=True)
        alarms = (self._judge(state, record, rule_values, was_skipped=was_skipped) for state, rule_values in judged)
        return [alarm for alarm in alarms if alarm is not None]

    def _judge(self, state: RuleState, record: Record, values: Mapping[str, float], *, was_skipped: bool) -> Alarm | None:
        rule, history, step = state.rule, self.history, record.step
        if rule.needs_rate:
            values = {key: value for key, value in values.items() if history.rate_of(self._series[key].parts.site) != 0}
        if rule.judges_rise:
            values = dict.fromkeys(values, history.rise)
        if not values:
            if rule.is_of_facts and record.facts is not None:  # of training: a record of validation has none
                state.count_unjudged()
            return None
        if rule.needs_step and was_skipped:
            return None
        has_loss_fallen = has_fallen(history.first_loss, history.loss, rule.unless_loss_falls)
        if step > rule.until_step or has_loss_fallen:
            state.count_unjudged(has_loss_fallen=has_loss_fallen)
            return None
        keys = tuple(sorted(values, key=lambda key: self._series[key].rank))
        fired = state.observe(step, keys, np.array([values[key] for key in keys], dtype=float))
        if rule.needs_rate and history.facts.is_manual:
            fired = self._without_clamped(state, fired)
        if not fired:
            return None
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

    def _without_clamped(self, state: RuleState, fired: Sequence[Fired]) -> list[Fired]:
        """The figures of parameters in groups that stand still as a whole.

        In other groups, code of the user holds weights, as the clamp of a WGAN does.
        """
        moving = {self._parameter(Key.parse(name).site).group for name, num in state.num_met().items() if num == 0}
        return [figure for figure in fired if self._parameter(Key.parse(figure.key).site).group not in moving]

    def _parameter(self, site: str) -> ParameterFacts:
        return self.history.facts.parameters.get(site, UNKNOWN_PARAMETER)

    def _rules_of(self, parts: Key, key: str) -> list[int]:
        """Indices of the rules that judge a key."""
        rules = [*enumerate(state.rule for state in self.states)]
        if is_total(parts, self._modules):
            known = {facts.training for facts in self.history.facts.parameters.values()}
            counted = known - ({"frozen"} if parts.kind.startswith("gradient") else set()) or {UNKNOWN_PARAMETER.training}
            # A total is of the trained parameters only where all are trained.
            accepted = (None, *counted) if len(counted) == 1 else (None,)
            return [index for index, rule in rules if rule.parameters in accepted and rule.concerns_total(parts, key)]
        accepted = (None, self._parameter(parts.site).training)
        return [index for index, rule in rules if rule.parameters in accepted and rule.concerns(parts, key)]

    def alarms_of_whole_run(self) -> list[Alarm]:
        """The alarms that need the whole run."""
        return [*self._zero_rates(), *self._not_learning()]

    def have_values(self, detector: Detector) -> list[bool]:
        """Whether each series that a detector judges has a value, without the series of other kinds that it uses besides."""
        series = []
        for key, has_value in self._has_value.items():
            parts = Key.parse(key)
            concerns = detector.concerns_total if is_total(parts, self._modules) else detector.concerns
            if concerns(parts) and parts.kind in detector.main_kinds:
                series.append(has_value)
        return series

    def _zero_rates(self) -> list[Alarm]:
        history, alarms = self.history, []
        for name, rate in history.rates.items():
            sites = history.sites_of(name)
            if rate.largest == 0 and rate.num_records >= DETECTORS[ZERO_RATE].min_records and sites:
                more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
                words = f"{sites[0]}{more}: the learning rate is 0 in all {rate.num_records} records, and the gradient is not."
                alarms.append(self._alarm_of_run(ZERO_RATE, sites[0], name, words))
        return alarms

    def _not_learning(self) -> list[Alarm]:
        history, (before, after) = self.history, self.history.ends
        what = _LOSS_PHRASES.get(history.learning)
        if what is None:
            return []
        medians = f"its median is {np.median(before):.4g} in the first {len(before)} records and {np.median(after):.4g} in the last"
        words = f"The loss {what}: {medians} {len(after)}."
        return [self._alarm_of_run(NOT_LEARNING, "", LOSS, words, history.stalled_since if history.learning == "stopped" else None)]

    def _alarm_of_run(self, name: str, site: str, statistic: str, words: str, since: int | None = None) -> Alarm:
        first = self.history.steps[0] if since is None else since
        last, key = self.history.steps[-1], Key(CONTEXT_KIND, "", statistic).format()
        severity = DETECTORS[name].severity
        finding = Finding(step=last, name=name, site=site, key=key, words=words, severity=severity, steps_before=last - first)
        return Alarm(finding, fired=[Fired(key, math.nan, 1.0, first)])

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, in plain numbers and texts: the state of every rule, and the history."""
        return {"history": self.history.state(), **{conditions(state.rule): state.state() for state in self.states}}

    def load(self, content: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state`; a rule with other conditions begins anew."""
        self.history.load(content.get("history", {}))
        for state in self.states:
            state.load(content.get(conditions(state.rule), (0, 0, {})))
