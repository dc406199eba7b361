"""From the rules and the model's names to what is recorded of which site in which step."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from lightning_module_monitor.config.rules import Capture, GradientFlow, ParsedRule, Rule, parse_capture, parse_gradient_flow, parse_rule
from lightning_module_monitor.config.schedule import MinutesSchedule, ParsedSchedule
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.model.compiled import NOT_COMPILED, CompiledParts, compiled_parts, num_compiled
from lightning_module_monitor.model.names import ModelIndex, ModuleSite, NameFormat, ParameterSite
from lightning_module_monitor.plan.matching import check_rule, compiled_in_words, idle_kinds, layer_sites, matching
from lightning_module_monitor.plan.plan import Plan
from lightning_module_monitor.probes.base import SiteT, Watched, WatchedModule
from lightning_module_monitor.probes.gradient_flow import Chain
from lightning_module_monitor.probes.reporting import ErrorReporter
from lightning_module_monitor.record import (
    CONTEXT_KIND,
    KINDS,
    OWN_FIGURES,
    OWN_KIND,
    RCC_SKIPPED_CALLS,
    STAGES,
    TRAIN,
    Key,
    check_prefix,
    is_context,
)
from lightning_module_monitor.statistics.stream import Output, Stream

DETAIL = "detail"
"""The label of rules that last as long as the model."""


class ActiveRules(NamedTuple):
    """What is due in a monitored step; nothing of it where only values that modules log themselves are recorded."""

    rules: tuple[int, ...]
    """Numbers of the rules."""
    gradient_flow: bool


class Planner:
    """What one monitor records: rules, gradient flow and raw tensors; in which steps, and where in the model.

    The arguments are those of ``ModuleMonitor``, which documents them; ``within`` is its ``module``.

    Raises:
        ConfigError: If an option is wrong; with what was expected, and the nearest right name.
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
        keeps_compiled: bool,
        reporter: ErrorReporter,
    ) -> None:
        self._schedule = schedule
        self.keeps_compiled = keeps_compiled
        """Whether compiled code runs as without the monitor, and is not observed inside."""
        self._num_compiled = -1
        """How much was compiled when it was last looked for in the model."""
        self.rules = [parse_rule(rule, f"rules[{i}]", schedule) for i, rule in enumerate(rules)]
        self._gradient_flow = None if gradient_flow is None else parse_gradient_flow(gradient_flow)
        self._captures = [] if capture is None else [parse_capture(capture)]
        self._within, self._exclude, self._format_name = within, exclude, format_name
        self.prefix = check_prefix(prefix)
        if not {*prefix.split("/")}.isdisjoint(STAGES):
            expected = f"expected none of {', '.join(STAGES)}, which keys have already"
            raise ConfigError(f"prefix {prefix!r} has the name of a stage in it; {expected}.")
        self._reporter = reporter
        self._has_ranks = False
        """Whether values are those of several ranks together."""
        self.shares_input = False
        """Whether other ranks have the same input as this one."""
        self._left_out: frozenset[str] = frozenset()
        """Kinds that nothing is recorded of, whatever rules name."""
        self._index: ModelIndex | None = None
        self._chain: Chain | None = None
        self._plans: dict[object, Plan] = {}
        """By stage and active rules; under a stage alone what is recorded of attention that the model reports by hand."""
        self._taken: dict[str, set[str]] = {}
        """Keys that are recorded, by stage."""

    # The model

    def read_names(self, module: nn.Module, *, has_ranks: bool = False, shares_input: bool = False) -> ModelIndex:
        """Read a model's names, and check the rules against them.

        Args:
            module: The model.
            has_ranks: Whether values are those of several ranks together.
            shares_input: Whether other ranks have the same input as this one, as in tensor parallel training.

        Raises:
            ConfigError: If a rule matches nothing in it, or needs what parts of tensors do not show, or it has no such blocks
                as ``gradient_flow`` names.
        """
        self._has_ranks, self.shares_input = has_ranks, shares_input
        if self._schedule.by_clock is not None:
            self._schedule.by_clock.begin()
        self._num_compiled = -1
        index = self._read(module, compiled_parts(module) if self.keeps_compiled else NOT_COMPILED)
        for rule in self.rules:
            check_rule(rule, index, self._reporter, shares_input=shares_input)
        for capture in self._captures:
            idle_kinds(capture, index)
        self._chain = self._chain_of(index)
        self._index = index
        try:
            self.plan()  # in which no two things may have one name
        except ConfigError:
            self.forget_names()
            raise
        self._report_renamed()
        self._report_compiled(index)
        return index

    def _read(self, module: nn.Module, compiled: CompiledParts) -> ModelIndex:
        return ModelIndex(module, self._within, self._exclude, self._format_name, compiled)

    def _chain_of(self, index: ModelIndex) -> Chain | None:
        return None if self._gradient_flow is None else Chain.of(self._gradient_flow, index, self.prefix, is_compared=self.shares_input)

    def find_compiled(self, module: nn.Module, wrapper: nn.Module | None) -> bool:
        """Look for what was compiled since the names were read, if anything was; returns whether more of the model is, or less.

        It never fails: training has begun, or is about to.

        Args:
            module: The model.
            wrapper: What a strategy has wrapped it in.
        """
        if not self.keeps_compiled or self._num_compiled == num_compiled():
            return False
        self._num_compiled, compiled = num_compiled(), compiled_parts(module, wrapper)
        if compiled == self.index.compiled:
            return False
        is_more_inside, self._index = compiled.inside != self.index.compiled.inside, self._read(module, compiled)
        try:
            self._chain = self._chain_of(self._index)
        except ConfigError as error:
            self._chain = None
            self._reporter.log_once(str(error), logging.WARNING)
        self._forget_plans()
        if is_more_inside:
            self._report_compiled(self._index)
        return True

    def forget_names(self) -> None:
        """Forget the model, and rules that are about its details."""
        self._index = self._chain = None
        self.rules = [rule for rule in self.rules if rule.label != DETAIL]
        self._captures = [capture for capture in self._captures if not capture.is_optional]
        self._forget_plans()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no model."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied.forget_names()
        return vars(copied)

    def forget_removed_modules(self) -> list[str]:
        """Forget modules that are no longer in the model, and what was planned with them; returns their names."""
        removed = self.index.forget_removed_modules()
        if removed:
            self._forget_plans()
        return removed

    @property
    def index(self) -> ModelIndex:
        """The names of the model.

        Raises:
            ValueError: If there is none.
        """
        if self._index is None:
            raise ValueError("There is no module to monitor; call set_module(module) first.")
        return self._index

    # What is recorded

    def add(self, rule: Rule, label: str, *, is_optional: bool = False) -> None:
        """Add a rule, which messages call ``label``; from the next plan on it counts. An optional one may match nothing.

        Raises:
            ConfigError: If it is wrong, or matches nothing in the model.
        """
        parsed = parse_rule(rule, f"{label}[{len(self.rules)}]" if label == "rules" else label, self._schedule)
        parsed = replace(parsed, is_optional=is_optional)
        if self._index is not None:
            check_rule(parsed, self._index, self._reporter, shares_input=self.shares_input)
        self.rules.append(parsed)
        self._forget_plans()
        try:
            if self._index is not None:
                self._report_renamed()
        except ConfigError:
            self.rules.pop()
            self._forget_plans()
            raise

    def add_capture(self, capture: Capture) -> None:
        """Capture more, of what the model has of it."""
        self._captures.append(replace(parse_capture(capture), is_optional=True))

    def leave_out(self, kinds: Collection[str]) -> list[str]:
        """Record nothing of some kinds, in place of those of an earlier call; returns the ones that a rule or a capture has."""
        self._left_out = frozenset(kinds)
        self._forget_plans()
        named = {kind for one in (*self.rules, *self._captures) for kind in one.kinds}
        return [kind for kind in kinds if kind in named]

    def has_any(self) -> bool:
        """Whether anything is recorded."""
        return bool(self.rules) or self._gradient_flow is not None or bool(self._captures)

    def first_of_reference(self, *, running: bool = False) -> str | None:
        """The first rule with a kind that needs a reference, and that kind; ``None`` if no rule has one.

        Args:
            running: Whether only kinds count for which the reference has to run.
        """
        found = (
            f"{rule.label}.kinds {kind!r}"
            for rule in self.rules
            for kind in rule.kinds
            if KINDS[kind].needs_reference and (KINDS[kind].site == "module" or not running)
        )
        return next(found, None)

    def first_of_kind(self, kind: str, *, without: str) -> str | None:
        """The first rule, or capture, of a kind that is not of another kind as well; ``None`` if there is none."""
        found = (f"{one.label}.kinds {kind!r}" for one in (*self.rules, *self._captures) if kind in one.kinds and without not in one.kinds)
        return next(found, None)

    def one_by_one(self) -> list[str]:
        """All that is recorded of the model, and when: what has to be the same on all ranks that monitor it together."""
        recorded = [f"gradient_flow {self._schedule}"]
        for rule in (*self.rules, *self._captures):
            steps = rule.schedule.value
            when = f"at steps {sorted(steps)}" if isinstance(steps, frozenset) else str(rule.schedule)
            recorded += [f"{_path(stream)} {when}" for stream in self._plan([rule]).streams()]
        return recorded + [_path(stream) for stream in (self._chain.streams if self._chain is not None else ())]

    # When

    def due(self, step: int) -> ActiveRules | None:
        """What is due in a step; ``None`` if the step is not monitored. An error is one of a function of the user's.

        A step is monitored if the monitor's own schedule picks it, a rule is due in it, or its raw tensors are captured.
        """
        is_picked = self._schedule(step)
        rules = tuple(i for i, rule in enumerate(self.rules) if rule.schedule(step))
        if not (is_picked or rules or self.is_captured(step)):
            return None
        return ActiveRules(rules, self._gradient_flow is not None and is_picked)

    def clock(self, step: int) -> MinutesSchedule | None:
        """The schedule that picks a step by the clock; ``None`` if none does."""
        clock = self._schedule.by_clock
        return clock if clock is not None and clock(step) else None

    def has_attention_rule(self, due: ActiveRules) -> bool:
        """Whether a rule that is due, other than an optional one, is about attention."""
        return any(KINDS[kind].of_heads for i in due.rules if not self.rules[i].is_optional for kind in self.rules[i].kinds)

    def everything(self) -> ActiveRules:
        """What is recorded when every rule is due, but those for a few steps after a finding."""
        rules = tuple(place for place, rule in enumerate(self.rules) if rule.label != DETAIL)
        return ActiveRules(rules, self._gradient_flow is not None)

    def is_captured(self, step: int) -> bool:
        """Whether the record of a step holds raw tensors."""
        return any(capture.schedule(step) for capture in self._captures)

    # Where

    def plan(self, due: ActiveRules | None = None, stage: str = TRAIN) -> Plan:
        """What of the model is recorded; without ``due`` when every rule is.

        Raises:
            ValueError: If there is no model.
        """
        due = self.everything() if due is None else due
        if (stage, due) not in self._plans:
            chain = self._chain if due.gradient_flow and stage == TRAIN else None
            self._plans[stage, due] = self._plan([self.rules[i] for i in due.rules], stage, chain)
        return self._plans[stage, due]

    def capture_plan(self, step: int | None = None) -> Plan | None:
        """Where raw tensors are captured, in a step or in any; ``None`` if none are."""
        captures = [capture for capture in self._captures if step is None or capture.schedule(step)]
        return self._plan(captures) if captures and self._index is not None else None

    def attention_by_hand(self, watched: WatchedModule, stage: str) -> WatchedModule:
        """What is recorded of a call of attention that the model reports by hand: by default the mean entropy."""
        if any(KINDS[kind].of_heads for rule in self.rules for kind in rule.kinds):
            return watched
        if stage not in self._plans:
            rule = parse_rule(Rule(kinds="attention_entropy", statistics="mean"), "attention by hand", self._schedule)
            self._plans[stage] = self._plan([rule], stage)
        by_hand = next(one for one in self._plans[stage].modules if one.site is watched.site)
        return Watched(watched.site, {**by_hand.streams, **watched.streams})

    def _forget_plans(self) -> None:
        self._plans, self._taken = {}, {}

    def plan_inside(self, stage: str = TRAIN) -> Plan:
        """What every rule would record inside compiled code, were it observed."""
        whole = self._plan(self.rules, stage, index=self.index.whole)
        observed = {site.name for site in self.index.modules}
        return Plan([one for one in whole.modules if one.site.name not in observed], [], None)

    def _plan(
        self, rules: Iterable[ParsedRule], stage: str = TRAIN, chain: Chain | None = None, *, index: ModelIndex | None = None
    ) -> Plan:
        """What some rules record together. Outside of training there are only activations."""
        index = index or self.index
        by_site: defaultdict[str, defaultdict[str, list[ParsedRule]]] = defaultdict(lambda: defaultdict(list))
        """Rules by site and kind: a module and a parameter never have one name."""
        for rule in rules:
            for kind in [kind for kind in rule.kinds if self._is_recorded(kind, stage)]:
                for site in matching(rule, kind, index):
                    by_site[site.name][kind].append(rule)

        def watched(site: SiteT) -> Watched[SiteT]:
            streams = {kind: self._stream(site, kind, of_kind, stage) for kind, of_kind in by_site[site.name].items()}
            layers = {kind: {name: stream.at(name) for name in layer_sites(site, kind)} for kind, stream in streams.items()}
            return Watched(site, {kind: one for kind, one in streams.items() if not layers[kind]}, {k: v for k, v in layers.items() if v})

        return Plan(
            [watched(site) for site in index.modules if site.name in by_site],
            [watched(site) for site in index.parameters if site.name in by_site],
            chain,
        )

    def _is_recorded(self, kind: str, stage: str) -> bool:
        return kind not in self._left_out and (stage == TRAIN or KINDS[kind].in_every_stage)

    def _stream(self, site: ModuleSite | ParameterSite, kind: str, rules: Sequence[ParsedRule], stage: str) -> Stream:
        """What rules record of a kind at a site, together.

        Raises:
            ConfigError: If two different things have one name.
        """
        outputs: dict[str, Output] = {}
        for rule in rules:
            for name, output in rule.outputs.items():
                if outputs.setdefault(name, output) != output:
                    why = f"another rule records something else as {name!r} of kind {kind!r} at {site.name!r}"
                    raise ConfigError(f"{rule.label}: {why}; expected names that differ.")
        return Stream(
            kind,
            site.name,
            outputs,
            stage,
            self.prefix,
            is_compared=self.shares_input and isinstance(site, ModuleSite),
            is_replicated=self._has_ranks and isinstance(site, ParameterSite),
        )

    # Keys

    def planned_keys(self, stages: Iterable[str] = (TRAIN,), *, figures: Sequence[str] = (), context: Sequence[str] = ()) -> list[str]:
        """Every key of a number that is known before the first step, those of all rules together.

        Args:
            stages: Of which stages: ``train``, ``validation``, ``test``, ``predict``.
            figures: The monitor's own figures that are recorded of training besides.
            context: The names of what is recorded of the context of training.
        """
        names = [*stages]
        keys = [key for stage in names for key in (*self.plan(stage=stage).keys(), self.own_key("errors", stage))]
        more = [RCC_SKIPPED_CALLS] if self.plan().has_coordinate_check() else []
        of_training = [self.own_key(name) for name in (*figures, *more)]
        of_training += [Key(CONTEXT_KIND, "", name, prefix=self.prefix).format() for name in context]
        return keys + (of_training if TRAIN in names else [])

    def planned_histograms(self, stages: Iterable[str] = (TRAIN,)) -> list[str]:
        """Every key of a histogram, those of all rules together; for stages as :meth:`planned_keys` takes them."""
        return [key for stage in stages for key in self.plan(stage=stage).histogram_keys()]

    def is_taken(self, key: str, stage: str) -> bool:
        """Whether a key is one of the monitor's own, as far as they are known: a figure, of the context, or of what a rule records."""
        if is_context(key) or (Key.parse(key).kind == OWN_KIND and Key.parse(key).statistic in OWN_FIGURES):
            return True
        if stage not in self._taken:
            plan = self.plan(stage=stage)
            of_rules = (key for stream in plan.all_streams() for key in stream.keys.values())
            self._taken[stage] = {*of_rules, *plan.keys()}
        return key in self._taken[stage]

    def own_key(self, name: str, stage: str = TRAIN) -> str:
        """The key of a figure of the monitor's own."""
        return Key(OWN_KIND, "", name, stage, self.prefix).format()

    def _report_compiled(self, index: ModelIndex) -> None:
        """Report, in one line, which modules are compiled, and what is left out for that."""
        words = compiled_in_words(index, self.rules, len(self.plan_inside().modules), self.plan())
        if words:
            self._reporter.log_once(words)

    def report_uncompiled_reference(self) -> None:
        """Report, if activations are compared with a reference's, that these are not those of compiled code."""
        if self.index.compiled.outermost and any(KINDS[kind].needs_reference for one in self.plan().modules for kind in one.streams):
            what = "at the first step differences are rounding instead of zero, and the masks of dropout differ"
            self._reporter.log_once(f"The reference runs uncompiled, and the model compiled: {what}.")

    def _report_renamed(self) -> None:
        """Report, in one line, the names in keys that are not those of the model, as loggers would not take these."""
        plan = self.plan()
        used = {stream.site for stream in plan.streams()}.union(plan.chain.transitions if plan.chain is not None else ())
        changed = [f"{old!r} is called {new!r} in keys" for old, new in self.index.namer.changed.items() if new in used]
        if changed:
            differ = f"{len(changed)} {'name differs' if len(changed) == 1 else 'names differ'} from those of the model"
            fit = "Loggers take letters, digits, '_', '-' and '.', and names must differ"
            self._reporter.log_once(f"{differ}: {', '.join(changed[:3])}. {fit}.")


def _path(stream: Stream) -> str:
    return "/".join(filter(None, stream.identity))
