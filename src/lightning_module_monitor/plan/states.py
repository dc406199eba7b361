"""Which rules record the states of optimizers, whose names are known only after an optimizer's first step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from lightning_module_monitor.config.rules import ParsedRule
from lightning_module_monitor.errors import nearest_pattern
from lightning_module_monitor.model.names import ModelIndex, ParameterSite, matches
from lightning_module_monitor.plan.matching import is_picked
from lightning_module_monitor.probes.base import WatchedParameter
from lightning_module_monitor.probes.optimizer_states import STATE
from lightning_module_monitor.probes.reporting import ErrorReporter
from lightning_module_monitor.record import KINDS
from lightning_module_monitor.statistics.stream import Stream


@dataclass(frozen=True, eq=False)
class StateRules:
    """The rules about states that are due in a step. Patterns match a parameter's name, or that of a state: ``head.weight.exp_avg``."""

    rules: Sequence[ParsedRule]
    index: ModelIndex
    reporter: ErrorReporter
    _streams: dict[tuple[str, str], Stream | None] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, rules: Sequence[ParsedRule], index: ModelIndex, reporter: ErrorReporter) -> StateRules | None:
        """The rules about states among some; ``None`` if there are none."""
        chosen = [rule for rule in rules if any(KINDS[kind].of_states for kind in rule.kinds)]
        return cls(chosen, index, reporter) if chosen else None

    def stream(self, watched: WatchedParameter, state: str) -> Stream | None:
        """What is recorded of a state of a parameter: always the same object; ``None`` if no rule picks it."""
        key = watched.site.name, state
        if key not in self._streams:
            planned, site = watched.streams[STATE], with_state(watched.site, state)
            is_left_out = matches(site.aliases, self.index.exclude)
            rules = [] if is_left_out else [rule for rule in self.rules if is_picked(site, site.owner, rule)]
            names = [name for name in planned.outputs if any(name in rule.outputs for rule in rules)]
            self._streams[key] = planned.at(self.index.part_name(watched.site.name, state), names) if names else None
        return self._streams[key]

    def waiting(self) -> list[tuple[str, str]]:
        """The patterns that match no parameter's name, and wait for names of states; each with the path of its rule."""
        return [
            (rule.label, pattern.pattern)
            for rule in self.rules
            for pattern in rule.sites
            if not rule.is_optional and not any(matches((site.name, *site.aliases), (pattern,)) for site in self.index.parameters)
        ]

    def report_idle(self, states: Collection[str]) -> None:
        """Warn, once, of patterns that match no parameter's name and no state's name.

        Args:
            states: All names of states that the optimizers keep, at least one.
        """
        rules = {rule.label: rule for rule in self.rules}
        for label, text in self.waiting():
            pattern = next(pattern for pattern in rules[label].sites if pattern.pattern == text)
            if not matches(states, (pattern,)):
                names = [*(site.name for site in self.index.parameters), *states]
                message = f"{label}.sites {text!r} matches none of {len(names)} names of parameters and of their states"
                self.reporter.log_once(f"{message}{nearest_pattern(text, names)}", logging.WARNING, f"{label} {text} of states")


def with_state(site: ParameterSite, state: str) -> ParameterSite:
    """The site of a parameter with the names that a state has, too."""
    return replace(site, aliases=(*site.aliases, *(f"{alias}.{state}" for alias in dict.fromkeys((site.name, *site.aliases)))))
