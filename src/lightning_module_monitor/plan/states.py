"""The rules about the states of optimizers. Names of states are known only after the first step of an optimizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightning_module_monitor.config.rules import ParsedRule
from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.model.names import ModelIndex, ParameterSite, matches
from lightning_module_monitor.plan.matching import is_picked
from lightning_module_monitor.plan.totals import Totals
from lightning_module_monitor.probes.base import ErrorReporter, WatchedParameter
from lightning_module_monitor.probes.optimizer_states import STATE
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.suggestions import unmatched


class _StateStreams(NamedTuple):
    """The streams of the states of one name, such as ``exp_avg``."""

    by_parameter: Mapping[str, Stream]
    """By the name of the parameter; a parameter whose state no rule picks has none."""
    totals: Sequence[Stream]
    """The totals over parameters, with sites such as ``_root_.exp_avg``."""


@dataclass(eq=False)
class StateRules:
    """Rules for optimizer states that are active in a step, and the states known so far.

    A plan has one stream for all states of a parameter, and one for each total of a module. The streams of a state are derived from these
    when an optimizer is first found to keep a state of its name. Patterns match a name of a parameter, or of a state:
    ``head.weight.exp_avg``.
    """

    rules: Sequence[ParsedRule]
    rule_by_total: Mapping[Stream, ParsedRule]
    """The rule of each planned total of states."""
    watched: Mapping[str, WatchedParameter]
    """The parameters whose states are planned, by name."""
    index: ModelIndex
    reporter: ErrorReporter
    _known: dict[str, _StateStreams] = field(default_factory=dict, init=False)
    """By the name of the state."""
    _has_reported: bool = field(default=False, init=False)

    @classmethod
    def of(
        cls,
        rules: Sequence[ParsedRule],
        totals: Totals,
        watched: Sequence[WatchedParameter],
        index: ModelIndex,
        reporter: ErrorReporter,
    ) -> StateRules | None:
        """Select the rules and totals for optimizer states; ``None`` if no rule is for states."""
        of_states = [rule for rule in rules if any(KINDS[kind].of_states for kind in rule.kinds)]
        rule_by_total = {total: rule for total, rule in totals.rule_by_total.items() if KINDS[total.kind].of_states}
        planned = {target.site.name: target for target in watched if STATE in target.streams}
        return cls(of_states, rule_by_total, planned, index, reporter) if of_states else None

    def stream(self, watched: WatchedParameter, state: str) -> Stream | None:
        """The stream of a state of a parameter, always the same object; ``None`` if no rule picks it."""
        known = self._known.get(state)
        if known is None:
            known = self._known[state] = self._streams_of(state)
        return known.by_parameter.get(watched.site.name)

    def known_totals(self) -> list[Stream]:
        """The totals over parameters of the states known so far."""
        return [total for known in self._known.values() for total in known.totals]

    def _streams_of(self, state: str) -> _StateStreams:
        streams = {name: self._stream(watched, state) for name, watched in self.watched.items()}
        recorded = {name: stream for name, stream in streams.items() if stream is not None}
        totals = [self._total(planned, rule, state, recorded) for planned, rule in self.rule_by_total.items()]
        return _StateStreams(recorded, [total for total in totals if total.members])

    def _stream(self, watched: WatchedParameter, state: str) -> Stream | None:
        rules = [rule for rule in self.rules if self._is_picked(watched, state, rule)]
        recorded = {name for rule in rules if not rule.per_module for name in rule.outputs}
        planned = watched.streams[STATE]
        is_member = bool(planned.shared) and any(rule.per_module for rule in rules)  # of a total
        if not recorded and not is_member:
            return None
        return planned.at(self.index.part_name(watched.site.name, state), [name for name in planned.outputs if name in recorded])

    def _total(self, planned: Stream, rule: ParsedRule, state: str, streams: Mapping[str, Stream]) -> Stream:
        """A total of a state. Its members are the states that its rule picks, whether or not an optimizer keeps them."""
        picked = [member.site for member in planned.members if self._is_picked(self.watched[member.site], state, rule)]
        members = tuple(streams[name] for name in picked if name in streams)
        site = self.index.part_name(planned.site, state)
        return replace(planned, site=site, origin=planned, members=members)

    def _is_picked(self, watched: WatchedParameter, state: str, rule: ParsedRule) -> bool:
        site = with_names_of_state(watched.site, state)
        return is_picked(site, rule) and not matches(site.aliases, self.index.exclude)

    def unmatched_patterns(self) -> dict[str, list[re.Pattern[str]]]:
        """The patterns that match no name of a parameter, by the path of their option. They may match names of states, not yet known."""
        names = {name for site in self.index.parameters for name in (site.name, *site.aliases)}
        by_option = {
            f"{rule.label}.{option}": [pattern for pattern in patterns if not any(map(pattern.fullmatch, names))]
            for rule in self.rules
            for option, patterns in (("sites", rule.sites), ("exclude", rule.exclude))
            if not rule.is_optional
        }
        return {option: patterns for option, patterns in by_option.items() if patterns}

    def report_unmatched(self, states: Collection[tuple[ParameterSite, str]]) -> None:
        """Warn of patterns that match no name of a parameter or a state. Later calls do nothing.

        Args:
            states: All states that the optimizers keep, at least one, each with its parameter.
        """
        if self._has_reported:
            return
        self._has_reported = True
        names_of_states = {name for site, state in states for name in with_names_of_state(site, state).aliases}
        for option, patterns in self.unmatched_patterns().items():
            without_match = [pattern.pattern for pattern in patterns if not any(map(pattern.fullmatch, names_of_states))]
            if without_match:
                names = [*(site.name for site in self.index.parameters), *(f"{site.name}.{state}" for site, state in states)]
                message = f"{option} {unmatched(without_match, names, 'names of parameters and of their states')}"
                self.reporter.log_once(message, logging.WARNING, f"{option} of states")


def with_names_of_state(site: ParameterSite, state: str) -> ParameterSite:
    """The site of a parameter, with the names of a state in addition to its own."""
    return replace(site, aliases=(*site.aliases, *(f"{alias}.{state}" for alias in dict.fromkeys((site.name, *site.aliases)))))
