"""The rules about the states of optimizers. Names of states are known only after the first step of an optimizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_module_monitor.config.rules import ParsedRule
from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.model.names import ModelIndex, ParameterSite, matches
from lightning_module_monitor.plan.matching import is_picked
from lightning_module_monitor.plan.totals import Totals
from lightning_module_monitor.probes.base import ErrorReporter, WatchedParameter
from lightning_module_monitor.probes.optimizer_states import STATE
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.suggestions import unmatched


@dataclass(eq=False)
class StateRules:
    """The rules about states that are due in a step, and the states that optimizers have so far.

    Patterns match a name of a parameter, or of a state: ``head.weight.exp_avg``.
    """

    rules: Sequence[ParsedRule]
    rules_by_total: Mapping[Stream, ParsedRule]
    """The totals that are planned of all states of a module's parameters, each with its rule."""
    watched: Mapping[Stream, WatchedParameter]
    """Parameters by the stream that is planned of all their states."""
    index: ModelIndex
    reporter: ErrorReporter
    _streams: dict[tuple[str, str], Stream | None] = field(default_factory=dict, init=False)
    """What is recorded of each state that is known, by the names of its parameter and of the state."""
    _total_streams: dict[tuple[Stream, str], Stream | None] = field(default_factory=dict, init=False)
    """The totals of the states of a name, by the total that is planned of all states."""
    _has_reported: bool = field(default=False, init=False)
    """Whether unmatched patterns have been reported, with the first states."""

    @classmethod
    def of(
        cls,
        rules: Sequence[ParsedRule],
        totals: Totals,
        watched: Sequence[WatchedParameter],
        index: ModelIndex,
        reporter: ErrorReporter,
    ) -> StateRules | None:
        """The rules about states among some; ``None`` if there are none."""
        chosen = [rule for rule in rules if any(KINDS[kind].of_states for kind in rule.kinds)]
        of_states = {total: rule for total, rule in totals.rules.items() if KINDS[total.kind].of_states}
        planned = {target.streams[STATE]: target for target in watched if STATE in target.streams}
        return cls(chosen, of_states, planned, index, reporter) if chosen else None

    def stream(self, watched: WatchedParameter, state: str) -> Stream | None:
        """What is recorded of a state of a parameter: always the same object; ``None`` if no rule picks it."""
        key = watched.site.name, state
        if key not in self._streams:
            planned = watched.streams[STATE]
            rules = [rule for rule in self.rules if self._is_picked(watched, state, rule)]
            of_itself = {name for rule in rules if not rule.per_module for name in rule.outputs}
            names = [name for name in planned.outputs if name in of_itself]
            is_recorded = bool(names) or (bool(planned.shared) and any(rule.per_module for rule in rules))
            self._streams[key] = planned.at(self.index.part_name(watched.site.name, state), names) if is_recorded else None
        return self._streams[key]

    def known_totals(self) -> list[Stream]:
        """The streams of the totals, such as ``_root_.exp_avg``, of the states that :meth:`stream` was called with.

        The members of a total are the states of one name that its rule picks, whether or not an optimizer keeps them.
        """
        for state in dict.fromkeys(state for _site, state in self._streams) if self.rules_by_total else ():
            for total, rule in self.rules_by_total.items():
                if (total, state) not in self._total_streams:
                    targets = [self.watched[member] for member in total.members]
                    streams = [self.stream(target, state) for target in targets if self._is_picked(target, state, rule)]
                    members = tuple(stream for stream in streams if stream is not None)
                    site = self.index.part_name(total.site, state)
                    of_state = replace(total, site=site, origin=total, members=members) if members else None
                    self._total_streams[total, state] = of_state
        return [total for total in self._total_streams.values() if total is not None]

    def _is_picked(self, watched: WatchedParameter, state: str, rule: ParsedRule) -> bool:
        site = with_state(watched.site, state)
        return is_picked(site, rule) and not matches(site.aliases, self.index.exclude)

    def unmatched_patterns(self) -> dict[str, list[re.Pattern[str]]]:
        """The patterns that match no parameter's name, and wait for names of states, by the path of their option."""
        names = {name for site in self.index.parameters for name in (site.name, *site.aliases)}
        by_option = {
            f"{rule.label}.{option}": [pattern for pattern in patterns if not any(map(pattern.fullmatch, names))]
            for rule in self.rules
            for option, patterns in (("sites", rule.sites), ("exclude", rule.exclude))
            if not rule.is_optional
        }
        return {label: patterns for label, patterns in by_option.items() if patterns}

    def report_unmatched(self, states: Collection[tuple[ParameterSite, str]]) -> None:
        """Warn of patterns that match no name of a parameter or a state. Later calls do nothing.

        Args:
            states: All states that the optimizers keep, at least one, each with its parameter.
        """
        waiting, self._has_reported = {} if self._has_reported else self.unmatched_patterns(), True
        names_of_states = {name for site, state in states for name in with_state(site, state).aliases} if waiting else set()
        for label, patterns in waiting.items():
            without_match = [pattern.pattern for pattern in patterns if not any(map(pattern.fullmatch, names_of_states))]
            if without_match:
                names = [*(site.name for site in self.index.parameters), *(f"{site.name}.{state}" for site, state in states)]
                message = f"{label} {unmatched(without_match, names, 'names of parameters and of their states')}"
                self.reporter.log_once(message, logging.WARNING, f"{label} of states")


def with_state(site: ParameterSite, state: str) -> ParameterSite:
    """The site of a parameter with the names that a state has, too."""
    return replace(site, aliases=(*site.aliases, *(f"{alias}.{state}" for alias in dict.fromkeys((site.name, *site.aliases)))))
