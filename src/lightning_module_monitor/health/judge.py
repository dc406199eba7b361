"""One judge for the records of a run, while it trains and on its store."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_module_monitor.health.alerts import Action, AlertRule, Fired, RuleState, conditions, has_fallen, words_of
from lightning_module_monitor.health.detector import Detector
from lightning_module_monitor.health.detectors import DIVERGING, NOT_LEARNING, ZERO_RATE
from lightning_module_monitor.health.run_history import NO_FACTS, History, is_kept
from lightning_module_monitor.record import (
    CONTEXT_KIND,
    LOSS,
    OWN_KIND,
    ROOT_SITE,
    STEP_SKIPPED,
    Finding,
    Key,
    ParameterFacts,
    Record,
    Severity,
    is_total,
)

UNKNOWN_PARAMETER = ParameterFacts("trained", -1, 0)
"""Without facts every parameter counts as trained."""


class Alarm(NamedTuple):
    """A finding, and the actions that follow it."""

    finding: Finding
    then: tuple[Action, ...] = ("warn",)
    fired: Sequence[Fired] = ()
    """The figures that met the condition."""


class Judge:
    """Judges the records of a run, one after the other, by rules; and the whole run at its end.

    Args:
        rules: The rules.
        sites: The names of all sites in the order of the model. Rules get their values in this order; a record groups keys by kind.
        modules: The names of all modules. Values of all parameters inside a module together are for few rules.
    """

    def __init__(self, rules: Sequence[AlertRule], sites: Iterable[str] = (), modules: Iterable[str] = ()) -> None:
        self.states = [RuleState(rule) for rule in rules]
        self.history = History()
        self._order = {site: rank for rank, site in enumerate(dict.fromkeys(sites))}
        self._modules = frozenset(modules)
        self._rank_by_key: dict[str, int] = {}
        """Position of the key's site in the order of the model."""
        self._parts: dict[str, Key] = {}
        self._kept: dict[str, Key | None] = {}
        """Keys without prefix of the values that the history keeps."""
        self._rules_by_key: dict[str, list[int]] = {}
        """Indices of the rules that judge a key."""
        self._has_value: dict[str, bool] = {}
        """Whether any record had a value that is not NaN, by key."""

    def observe(self, record: Record) -> list[Alarm]:
        """The alarms of a record: at most one per rule, about all keys that meet its condition now and did not before."""
        history = self.history
        if record.facts is not None and record.facts != history.facts:
            history.facts = record.facts
            self._rules_by_key.clear()
        values_by_rule: list[dict[str, float]] = [{} for _state in self.states]
        values: dict[Key, float] = {}
        for key, value in itertools.chain(record.values.items(), () if record.facts is None else record.facts.as_values().items()):
            parts = self._parts.get(key)
            if parts is None:
                parts = self._parts[key] = Key.parse(key)
                self._rank_by_key[key] = self._order.get(parts.site, -1)
                self._kept[key] = parts._replace(prefix="") if is_kept(parts) and not self._is_of_part(parts) else None
            if key not in self._rules_by_key:
                self._rules_by_key[key] = self._rules_of(parts, key)
            for rule in self._rules_by_key[key]:
                values_by_rule[rule][key] = value
            self._has_value[key] = self._has_value.get(key, False) or not math.isnan(value)
            kept = self._kept[key]
            if kept is not None:
                values[kept] = value
        if values:
            history.add(record.step, values)
        was_skipped = values.get(Key(OWN_KIND, "", STEP_SKIPPED), 0.0) > 0
        judged = zip(self.states, values_by_rule, strict=True)
        alarms = (self._judge(state, record.step, rule_values, was_skipped=was_skipped) for state, rule_values in judged)
        return [alarm for alarm in alarms if alarm is not None]

    def _judge(self, state: RuleState, step: int, values: Mapping[str, float], *, was_skipped: bool) -> Alarm | None:
        rule, history = state.rule, self.history
        if rule.needs_rate:
            values = {key: value for key, value in values.items() if history.rate_of(self._parts[key].site) != 0}
        state.num_records += not values and rule.is_of_facts and history.facts is not NO_FACTS
        if rule.name == DIVERGING:
            # A loss that crosses 0 has no factor by which it grows.
            has_factor = not history.facts.is_manual and min(history.losses, default=1.0) > 0
            values = dict.fromkeys(values, history.rise) if has_factor else {}
        if not values or (rule.needs_step and was_skipped):
            return None
        has_fallen_by_now = has_fallen(history.first_loss, history.loss, rule.unless_loss_falls)
        if step > rule.until_step or has_fallen_by_now:
            state.num_records += 1
            state.num_passed_over += has_fallen_by_now
            return None
        keys = tuple(sorted(values, key=self._rank_by_key.__getitem__))
        fired = state.observe(step, keys, np.array([values[key] for key in keys], dtype=float))
        if rule.needs_rate and history.facts.is_manual:
            fired = self._without_clamped(state, fired)
        if not fired:
            return None
        since, site = min(figure.since for figure in fired), Key.parse(fired[0].key).site
        finding = Finding(step, rule.name, site, fired[0].key, words_of(rule, fired, step), rule.severity, step - since)
        return Alarm(finding, rule.then, fired)

    def _without_clamped(self, state: RuleState, fired: Sequence[Fired]) -> list[Fired]:
        """The parameters in groups that stand still as a whole. In other groups, code of the user holds weights, as a WGAN's clamp does."""
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
            states = (None, *counted) if len(counted) == 1 else (None,)
            return [index for index, rule in rules if rule.parameters in states and rule.concerns_total(parts, key)]
        accepted = (None, self._parameter(parts.site).training)
        return [index for index, rule in rules if rule.parameters in accepted and rule.concerns(parts, key)]

    def _is_of_part(self, parts: Key) -> bool:
        """Whether a key is of all parameters inside a module together, and the module is a part of what is monitored."""
        return parts.site != ROOT_SITE and is_total(parts, self._modules)

    def finish(self) -> list[Alarm]:
        """The alarms that need the whole run."""
        return [*self._zero_rates(), *self._not_learning()]

    def series_of(self, detector: Detector) -> list[bool]:
        """The series of the records that a detector judges, without those of other kinds that it uses besides: whether each has a value."""
        series = []
        for key, has_value in self._has_value.items():
            parts = self._parts[key]
            concerns = detector.concerns_total if is_total(parts, self._modules) else detector.concerns
            if concerns(parts) and parts.kind in detector.sources[0][0]:
                series.append(has_value)
        return series

    def _zero_rates(self) -> list[Alarm]:
        history, alarms = self.history, []
        for name, (num_records, largest, _first) in history.rates.items():
            sites = history.sites_of(name)
            if largest == 0 and num_records >= 3 and sites:
                more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
                words = f"{sites[0]}{more}: the learning rate is 0 in all {num_records} records, and the gradient is not."
                alarms.append(self._alarm_of_run(ZERO_RATE, sites[0], name, words, "error"))
        return alarms

    def _not_learning(self) -> list[Alarm]:
        history, (before, after) = self.history, self.history.ends
        if history.learning not in ("flat", "still"):
            return []
        medians = f"its median is {np.median(before):.4g} in the first {len(before)} records and {np.median(after):.4g} in the last"
        what = "does not fall" if history.learning == "flat" else "hardly changes, and the weights hardly move"
        words = f"The loss {what}: {medians} {len(after)}."
        return [self._alarm_of_run(NOT_LEARNING, "", LOSS, words, "warning")]

    def _alarm_of_run(self, name: str, site: str, statistic: str, words: str, severity: Severity) -> Alarm:
        first, last, key = self.history.steps[0], self.history.steps[-1], Key(CONTEXT_KIND, "", statistic).format()
        return Alarm(Finding(last, name, site, key, words, severity, last - first), fired=[Fired(key, math.nan, 1.0, first)])

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, in plain numbers and texts: the state of every rule's figures, and the history."""
        return {
            "history": self.history.state(),
            **{conditions(state.rule): (state.num_records, state.num_passed_over, state.state()) for state in self.states},
        }

    def load(self, content: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state`; a rule with other conditions begins anew."""
        self.history.load(content.get("history", {}))
        for state in self.states:
            state.num_records, state.num_passed_over, figures = content.get(conditions(state.rule), (0, 0, {}))
            state.load(figures)
