"""What is asked for: rules, gradient flow, raw tensors; in which steps, and where in the model."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from lightning_module_monitor.config import Capture, GradientFlow, ParsedRule, Rule, parse_capture, parse_gradient_flow, parse_rule
from lightning_module_monitor.errors import ConfigError, nearest
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.model.names import NameFormat
from lightning_module_monitor.plan import Plan, Sites
from lightning_module_monitor.probes.base import Say, Watched, WatchedModule
from lightning_module_monitor.probes.gradient_flow import KIND as GRADIENT_FLOW
from lightning_module_monitor.probes.gradient_flow import Chain
from lightning_module_monitor.record import OWN_FIGURES, OWN_KIND, RCC_SKIPPED_CALLS, ROLL_UP_SITES, STAGES, TRAIN, Key
from lightning_module_monitor.schedule import ParsedSchedule

DETAIL = "detail"
"""The label of rules that last as long as the model."""


class Due(NamedTuple):
    """What is due in a monitored step; nothing of it where only values that modules log themselves are recorded."""

    rules: tuple[int, ...]
    """Numbers of the rules."""
    gradient_flow: bool


class Wishes:
    """All that one monitor is asked for, and what of a model that is.

    Args:
        schedule: When a rule is due that has no cadence of its own, and the gradient flow.
        rules: What to watch.
        gradient_flow: Blocks between which the gain of the gradient is watched.
        capture: Which raw tensors the records of which steps hold.
        within: Name of the submodule outside of which nothing is watched; ``None`` for all.
        exclude: Names that are never watched, with what is inside.
        format_name: Makes a name of what ``named_modules`` gives.
        prefix: Put before every key.
        say: Tells of a rule that matches nothing.

    Raises:
        ConfigError: If a wish is wrong; says which, what was expected, and the nearest right one.
    """

    def __init__(
        self,
        schedule: ParsedSchedule,
        rules: Sequence[Rule | Mapping[str, Any]],
        gradient_flow: GradientFlow | Mapping[str, Any] | None,
        capture: Capture | Mapping[str, Any] | None,
        *,
        within: str | None,
        exclude: Sequence[re.Pattern[str]],
        format_name: NameFormat,
        prefix: str,
        say: Say,
    ) -> None:
        self._schedule = schedule
        self._rules = [parse_rule(rule, f"rules[{i}]", schedule) for i, rule in enumerate(rules)]
        self._gradient_flow = None if gradient_flow is None else parse_gradient_flow(gradient_flow)
        self._captures = [] if capture is None else [parse_capture(capture)]
        self._within, self._exclude, self._format_name = within, exclude, format_name
        self._prefix = prefix
        self._say = say
        self._shares_input = False
        """Whether other ranks have the same input as this one."""
        self._sites: Sites | None = None
        self._chain: Chain | None = None
        self._plans: dict[tuple[str, Due], Plan] = {}
        self._told_plans: dict[str, Plan] = {}
        """What is wanted of attention that the model tells of by hand, where no rule is about attention, by stage."""

    # The model

    def read_names(self, module: nn.Module, *, shares_input: bool = False) -> Sites:
        """Read a model's names, and check the wishes against them.

        Args:
            module: The model.
            shares_input: Whether other ranks have the same input as this one, as in tensor parallel training.

        Raises:
            ConfigError: If a rule matches nothing in it, or asks for what parts of tensors do not tell, or it has no such blocks
                as ``gradient_flow`` names.
        """
        self._shares_input = shares_input
        sites = Sites(module, self._within, self._exclude, self._format_name)
        for rule in self._rules:
            self._check(rule, sites)
        if self._gradient_flow is not None:
            self._chain = sites.chain(self._gradient_flow, self._prefix, is_compared=shares_input)
        for wish in self._captures:
            sites.check(wish)
        self._sites = sites
        return sites

    def forget_names(self) -> None:
        """The model is gone, and with it what was to be looked at more closely in it."""
        self._sites = self._chain = None
        self._rules = [rule for rule in self._rules if rule.label != DETAIL]
        self._captures = [wish for wish in self._captures if not wish.is_optional]
        self._plans, self._told_plans = {}, {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy knows no model."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin.forget_names()
        return vars(twin)

    def leave_out_what_is_gone(self) -> list[str]:
        """Forget modules that are no longer in the model, and what was planned with them; gives their names."""
        gone = self.sites.leave_out_what_is_gone()
        if gone:
            self._plans.clear()
            self._told_plans.clear()
        return gone

    @property
    def sites(self) -> Sites:
        """The names of the model.

        Raises:
            ValueError: If there is none.
        """
        if self._sites is None:
            raise ValueError("There is no module to monitor; call set_module(module) first.")
        return self._sites

    # What is asked for

    def add(self, rule: Rule, label: str, *, is_optional: bool = False) -> None:
        """Add a rule; from the next plan on it counts.

        Args:
            rule: The rule.
            label: What it is called in messages.
            is_optional: Whether it may match nothing.

        Raises:
            ConfigError: If it is wrong, or matches nothing in the model.
        """
        parsed = parse_rule(rule, f"{label}[{len(self._rules)}]" if label == "rules" else label, self._schedule)
        parsed = replace(parsed, is_optional=is_optional)
        if self._sites is not None:
            self._check(parsed, self._sites)
        self._rules.append(parsed)
        self._plans.clear()

    def add_capture(self, capture: Capture) -> None:
        """Capture more, of what the model has of it."""
        self._captures.append(replace(parse_capture(capture), is_optional=True))

    def has_any(self) -> bool:
        """Whether anything is asked for."""
        return bool(self._rules) or self._gradient_flow is not None or bool(self._captures)

    def first_of_reference(self, *, running: bool = False) -> str | None:
        """The first rule with a kind that is nothing without a reference, and that kind; ``None`` if no rule has one.

        Args:
            running: Whether only what a reference has to run for is meant.
        """
        wishes = (
            f"{rule.label}.kinds {kind!r}"
            for rule in self._rules
            for kind in rule.kinds
            if KINDS[kind].needs_reference and (KINDS[kind].site == "module" or not running)
        )
        return next(wishes, None)

    def first_of_kind(self, kind: str, *, without: str) -> str | None:
        """The first rule, or capture, of a kind that is not of another kind as well; ``None`` if there is none."""
        wishes = [*self._rules, *self._captures]
        return next((f"{wish.label}.kinds {kind!r}" for wish in wishes if kind in wish.kinds and without not in wish.kinds), None)

    def one_by_one(self) -> list[str]:
        """All that is wanted of the model, and when: what has to be alike on all ranks that monitor it together."""
        rules = [*self._rules, *self._captures]
        return [f"gradient_flow {self._schedule}", *self.sites.wishes(rules, self._chain)]

    # When

    def due(self, step: int) -> Due | None:
        """What is due in a step; ``None`` if the step is not monitored. An error is one of a function of the user's.

        A step is monitored if the monitor's own schedule picks it, a rule is due in it, or its raw tensors are captured.
        """
        is_picked = self._schedule(step)
        due = Due(tuple(i for i, rule in enumerate(self._rules) if rule.schedule(step)), self._gradient_flow is not None and is_picked)
        return due if is_picked or due.rules or self.is_captured(step) else None

    def asks_for_attention(self, due: Due) -> bool:
        """Whether a rule that is due, other than an optional one, is about attention."""
        rules = (self._rules[i] for i in due.rules)
        return any(KINDS[kind].of_heads for rule in rules if not rule.is_optional for kind in rule.kinds)

    def everything(self) -> Due:
        """What is watched when every rule is due."""
        return Due(tuple(range(len(self._rules))), self._gradient_flow is not None)

    def is_captured(self, step: int) -> bool:
        """Whether the record of a step holds raw tensors."""
        return any(wish.schedule(step) for wish in self._captures)

    # Where

    def plan(self, due: Due | None = None, stage: str = TRAIN) -> Plan:
        """What of the model is watched; without ``due`` when every rule is.

        Raises:
            ValueError: If there is no model.
        """
        due = self.everything() if due is None else due
        plan = self._plans.get((stage, due))
        if plan is None:
            chain = self._chain if due.gradient_flow else None
            rules = [self._rules[i] for i in due.rules]
            plan = self.sites.plan(rules, chain, stage, self._prefix, is_compared=self._shares_input)
            self._plans[stage, due] = plan
        return plan

    def capture_plan(self, step: int | None = None) -> Plan | None:
        """Where raw tensors are captured, in a step or in any; ``None`` if none are."""
        wishes = [wish for wish in self._captures if step is None or wish.schedule(step)]
        return self._sites.plan(wishes) if wishes and self._sites is not None else None

    def told_attention(self, watched: WatchedModule, stage: str) -> WatchedModule:
        """What is wanted of a call of attention that is told by hand: what the rules say; if none is about attention the mean entropy."""
        if any(KINDS[kind].of_heads for rule in self._rules for kind in rule.kinds):
            return watched
        if stage not in self._told_plans:
            rule = parse_rule(Rule(kinds="attention_entropy", statistics="mean"), "attention by hand", self._schedule)
            self._told_plans[stage] = self.sites.plan([rule], stage=stage, prefix=self._prefix)
        told = next(one for one in self._told_plans[stage].modules if one.site is watched.site)
        return Watched(watched.site, {**told.watches, **watched.watches})

    # Keys

    def renamed(self) -> dict[str, str]:
        """New name by old name of what is watched, where loggers would not take the old one."""
        changed = self.sites.renamed
        if not changed:
            return {}
        plan = self.plan()
        used = {watch.site for watch in plan.watches()}.union(plan.chain.transitions if plan.chain is not None else ())
        return {old: new for old, new in changed.items() if new in used}

    def planned_keys(self, stages: Iterable[str] = (TRAIN,), *, figures: Sequence[str] = ()) -> list[str]:
        """Every key of a number that is known before the first step, those of all rules together.

        Args:
            stages: Of which stages: ``train``, ``validation``, ``test``, ``predict``.
            figures: What is recorded of training besides, of the monitor's own.
        """
        names = [*stages]
        keys = [key for stage in names for key in (*self.plan(stage=stage).keys(), self.own_key("errors", stage))]
        more = [RCC_SKIPPED_CALLS] if self.plan().has_coordinate_check() else []
        return keys + ([self.own_key(name) for name in (*figures, *more)] if TRAIN in names else [])

    def planned_histograms(self, stages: Iterable[str] = (TRAIN,)) -> list[str]:
        """Every key of a histogram, those of all rules together; for stages as :meth:`planned_keys` takes them."""
        return [key for stage in stages for key in self.plan(stage=stage).histogram_keys()]

    def is_taken(self, key: str, stage: str) -> bool:
        """Whether a key is one of the monitor's own, as far as they are known: of its figures, or of what a rule asks for."""
        if Key.parse(key).kind == OWN_KIND and Key.parse(key).statistic in OWN_FIGURES:
            return True
        plan = self.plan(stage=stage)
        of_rules = (one for watch in plan.all_watches() for one in (*watch.keys(), *watch.histogram_keys))
        return key in of_rules or key in plan.keys()  # noqa: SIM118  # a plan is no dict

    def own_key(self, name: str, stage: str = TRAIN) -> str:
        """The key of a figure of the monitor's own."""
        return Key(OWN_KIND, "", name, stage, self._prefix).format()

    def check_keys(self, pattern: re.Pattern[str], label: str, keys: Sequence[str], histograms: Sequence[str]) -> bool:
        """Check that a pattern of keys matches one.

        Args:
            pattern: The pattern.
            label: What it is called in messages.
            keys: Those of numbers that are planned.
            histograms: Those of histograms.

        Returns:
            Whether it does; else it may match one that is not known yet.

        Raises:
            ConfigError: If it matches none that there can be.
        """
        if any(pattern.fullmatch(key) for key in keys):
            return True
        text, near = pattern.pattern, nearest(pattern.pattern, keys)
        wrong = f"{label} {text!r} matches"
        histogram = next((key for key in histograms if pattern.fullmatch(key)), None)
        if histogram is not None:
            raise ConfigError(f"{wrong} {histogram!r}, a histogram; expected keys of numbers{near}")
        roll_up = next((site for site in ROLL_UP_SITES if site in text), None)
        if roll_up is not None:
            expected = f"expected the keys themselves, e.g. {text.replace(roll_up, '.*')!r}"
            raise ConfigError(
                f"{wrong} no key that is recorded: the site {roll_up} is made for loggers, where there are many keys; {expected}"
            )
        if not self._may_come(text):
            raise ConfigError(f"{wrong} none of the {len(keys)} keys{near}")
        return False

    def _may_come(self, pattern: str) -> bool:
        """Whether a pattern that matches no planned key may match one that comes: of a further output, a head, or one of the user's own."""
        start = f"{self._prefix}/" if self._prefix else ""
        stage, *rest = pattern.removeprefix(start).split("/", 1)
        kind, *_more = rest[0].split("/") if stage in STAGES and rest else [stage]
        is_plain = re.fullmatch(r"\w+", kind) is not None and pattern.startswith(start)
        ours = (*KINDS, GRADIENT_FLOW, OWN_KIND, *STAGES)
        if is_plain and kind not in ours:
            return not difflib.get_close_matches(kind, ours, n=1, cutoff=0.75)
        shorter = re.sub(r"\\?\.output_[\w.-]+", "", pattern)
        if shorter != pattern and any(re.fullmatch(shorter, key) for key in self.planned_keys((TRAIN, *STAGES))):
            return True
        return not self.plan().knows_all_keys(kind if is_plain else "")

    def _check(self, rule: ParsedRule, sites: Sites) -> None:
        if self._shares_input:
            _check_tensor_parallel(rule)
        for kind in () if rule.is_optional else sites.check(rule):
            self._say(f"{rule.label} matches nothing of kind {kind!r}.", logging.WARNING)
        left_out = sites.left_out_of_coordinate_check(rule)
        if left_out:
            shown = ", ".join(left_out[:10]) + (f" and {len(left_out) - 10} more" if len(left_out) > 10 else "")
            self._say(f"rcc leaves out modules whose type is not in its table: {shown}. register_rcc_layer(type, function) adds a type.")


def _check_tensor_parallel(rule: ParsedRule) -> None:
    """Refuse what a part of a tensor does not tell, where nobody knows which part it is.

    Raises:
        ConfigError: Names the rule.
    """
    names = [name for name, one in rule.statistics.items() if one.needs & Need.TOKENS]
    if names:
        why = "in tensor parallel training a rank may have parts of the tokens"
        raise ConfigError(f"{rule.label}.statistics {names[0]!r}: {why}; expected statistics without {' and '.join(names)}.")
    of_heads = [kind for kind in rule.kinds if KINDS[kind].of_heads]
    if of_heads:
        why = "in tensor parallel training a rank may have some of the heads, and does not know which"
        raise ConfigError(f"{rule.label}.kinds {of_heads[0]!r}: {why}; expected kinds of whole modules, or of parameters.")
