"""The recipe of a monitor: what to record, and in which steps, whatever the model is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_module_monitor.config.gradient_options import ParsedGradientFlow
from lightning_module_monitor.config.rules import ParsedRule, Rule, parse_rule
from lightning_module_monitor.config.schedule import ParsedSchedule
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.keys import Key, check_prefix
from lightning_module_monitor.kinds import KINDS, OWN_KIND, STAGES, TRAIN
from lightning_module_monitor.model.names import NameFormat

DETAIL_LABEL = "detail"
"""The label of rules that last as long as the model."""


class ActiveRules(NamedTuple):
    """The rules that are due in a monitored step; there are none where a step only records values that modules log themselves."""

    rules: tuple[int, ...]
    """Numbers of the rules."""
    gradient_flow: bool
    gradient_noise: bool


@dataclass(frozen=True, eq=False)
class Recipe:
    """The checked options of a monitor that select what is recorded. A method that adds a rule returns another recipe.

    The fields are arguments of ``ModuleMonitor``, which documents them; ``within`` is its ``module``.

    Raises:
        ConfigError: If the prefix does not fit.
    """

    schedule: ParsedSchedule
    rules: tuple[ParsedRule, ...]
    gradient_flow: ParsedGradientFlow | None
    gradient_noise: ParsedRule | None
    captures: tuple[ParsedRule, ...]
    within: str | None
    exclude: Sequence[re.Pattern[str]]
    format_name: NameFormat
    prefix: str
    keeps_compiled: bool
    """Whether compiled code runs as without the monitor, and is not observed inside."""
    left_out: frozenset[str] = frozenset()
    """Kinds that are never recorded, whatever the rules name."""

    def __post_init__(self) -> None:
        check_prefix(self.prefix)
        if not {*self.prefix.split("/")}.isdisjoint(STAGES):
            expected = f"expected none of {', '.join(STAGES)}, which keys have already"
            raise ConfigError(f"prefix {self.prefix!r} has the name of a stage in it; {expected}.")

    def parsed(self, rule: Rule, label: str, *, is_optional: bool = False) -> ParsedRule:
        """Check a rule, which messages call ``label``. An optional rule may match nothing.

        Raises:
            ConfigError: If a value is wrong.
        """
        numbered = f"{label}[{len(self.rules)}]" if label == "rules" else label
        return replace(parse_rule(rule, numbered, self.schedule), is_optional=is_optional)

    def with_rule(self, rule: ParsedRule) -> Recipe:
        """This recipe and one more rule."""
        return replace(self, rules=(*self.rules, rule))

    def has_any(self) -> bool:
        """Whether anything is recorded."""
        return bool(self.rules or self.captures) or self.gradient_flow is not None or self.gradient_noise is not None

    def first_needing_reference(self, *, running: bool = False) -> str | None:
        """The first rule with a kind that needs a reference, and that kind; ``None`` if no rule has one.

        Args:
            running: Whether only kinds count for which the reference has to run.
        """
        named = (
            f"{rule.label}.kinds {kind!r}"
            for rule in self.rules
            for kind in rule.kinds
            if KINDS[kind].needs_reference and (KINDS[kind].site == "module" or not running)
        )
        return next(named, None)

    def first_with(self, kind: str, *, but_not: str) -> str | None:
        """The first rule or capture that has a kind, but not another kind; ``None`` if there is none."""
        rules = (rule for rule in (*self.rules, *self.captures) if kind in rule.kinds and but_not not in rule.kinds)
        return next((f"{rule.label}.kinds {kind!r}" for rule in rules), None)

    # Steps

    def due(self, step: int) -> ActiveRules | None:
        """The rules that are due in a step; ``None`` if the step is not monitored. Raises what a user's schedule function raises.

        A step is monitored if the monitor's own schedule picks it, a rule is due in it, or its raw tensors are captured.
        """
        own = self.schedule
        is_picked = own(step)
        rules = tuple([number for number, rule in enumerate(self.rules) if (is_picked if rule.schedule is own else rule.schedule(step))])
        if not (is_picked or rules or self.is_captured(step)):
            return None
        return ActiveRules(rules, self.gradient_flow is not None and is_picked, self.gradient_noise is not None and is_picked)

    def everything(self) -> ActiveRules:
        """All rules except those that are added for a few steps after a finding."""
        rules = tuple(number for number, rule in enumerate(self.rules) if rule.label != DETAIL_LABEL)
        return ActiveRules(rules, self.gradient_flow is not None, self.gradient_noise is not None)

    def is_captured(self, step: int) -> bool:
        """Whether the record of a step holds raw tensors."""
        return any(capture.schedule(step) for capture in self.captures)

    def has_attention_rule(self, due: ActiveRules) -> bool:
        """Whether a rule that is due, other than an optional one, is about attention."""
        rules = (self.rules[number] for number in due.rules)
        return any(KINDS[kind].of_heads for rule in rules if not rule.is_optional for kind in rule.kinds)

    def figure_key(self, name: str, stage: str = TRAIN) -> Key:
        """The key of one of the monitor's own figures."""
        return Key(OWN_KIND, "", name, stage, self.prefix)
