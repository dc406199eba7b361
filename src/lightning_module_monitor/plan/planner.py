"""The planner applies the rules to the names of a model."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from lightning_module_monitor.config.rules import ParsedRule, Rule, parse_rule
from lightning_module_monitor.distributed.ranks import num_processes
from lightning_module_monitor.distributed.shards import is_laid_out
from lightning_module_monitor.errors import ConfigError, shortened
from lightning_module_monitor.keys import Key, is_context
from lightning_module_monitor.kinds import CONTEXT_KIND, KINDS, OWN_FIGURES, OWN_KIND, TRAIN
from lightning_module_monitor.model.compiled import NOT_COMPILED, CompiledParts, compiled_parts
from lightning_module_monitor.model.names import ModelIndex, ModuleSite, without_wrappers
from lightning_module_monitor.plan.matching import WATCH_LABEL, check_rule, idle_kinds, layer_sites, matching, report_unmatched
from lightning_module_monitor.plan.plan import Plan
from lightning_module_monitor.plan.recipe import ActiveRules, Recipe
from lightning_module_monitor.plan.states import StateRules
from lightning_module_monitor.plan.totals import Totals, check_per_module, joined_outputs, parameters_by_module
from lightning_module_monitor.probes.base import ErrorReporter, SiteT, Watched, WatchedModule
from lightning_module_monitor.probes.gradient_flow import Chain
from lightning_module_monitor.probes.gradient_noise import NoiseSites
from lightning_module_monitor.probes.optimizer_states import STATE
from lightning_module_monitor.statistics.stream import Output, Stream
from lightning_module_monitor.statistics.units import NONNEGATIVE


@dataclass(frozen=True, eq=False)
class Planner:
    """Applies a recipe to the names of a model. Other rules or other names make another planner."""

    recipe: Recipe
    index: ModelIndex
    """The names of the model."""
    chain: Chain | None
    """The blocks whose gradient flow is recorded."""
    noise: NoiseSites | None
    """The modules whose gradient noise is recorded."""
    reporter: ErrorReporter
    has_ranks: bool = False
    """Whether the values of several ranks are merged."""
    shares_input: bool = False
    """Whether other ranks have the same input as this one, as in tensor parallel training."""
    _plans: dict[object, Plan] = field(default_factory=dict, init=False)
    """Plans by stage and active rules; by stage alone, the plan of attention that the model reports by hand."""
    _recorded_keys: dict[str, set[str]] = field(default_factory=dict, init=False)
    """By stage."""

    @classmethod
    def of(
        cls, recipe: Recipe, module: nn.Module, reporter: ErrorReporter, *, has_ranks: bool = False, shares_input: bool = False
    ) -> Planner:
        """Read a model's names, and check the rules against them.

        Raises:
            ConfigError: If a rule matches nothing in the model, or needs whole tensors where the model has shards, or if the
                model lacks the blocks that ``gradient_flow`` names.
        """
        index = _index_of(recipe, module, compiled_parts(module) if recipe.keeps_compiled else NOT_COMPILED)
        for rule in recipe.rules:
            check_rule(rule, index, reporter, shares_input=shares_input)
            check_per_module(rule, index)
        if not any(KINDS[kind].of_states for rule in recipe.rules for kind in rule.kinds):  # names of states come later
            whole = index.whole
            report_unmatched("exclude", recipe.exclude, [*whole.modules, *whole.parameters, *whole.excluded], reporter)
        for capture in recipe.captures:
            idle_kinds(capture, index)
        if recipe.gradient_noise is not None:
            check_per_module(recipe.gradient_noise, index)
            _check_ranks_of_noise(index, has_ranks=has_ranks, shares_input=shares_input)
        planner = cls(recipe, index, _chain_of(recipe, index, shares_input), _noise_of(recipe, index), reporter, has_ranks, shares_input)
        planner.plan()  # refuses two outputs of one name
        planner.report_renamed()
        planner.report_compiled()
        return planner

    def with_rule(self, rule: ParsedRule) -> Planner:
        """The planner with one more rule.

        Raises:
            ConfigError: If the rule matches nothing in the model, or another rule records a different output by the same name.
        """
        check_rule(rule, self.index, self.reporter, shares_input=self.shares_input)
        check_per_module(rule, self.index)
        planner = replace(self, recipe=self.recipe.with_rule(rule))
        planner.report_renamed()
        return planner

    def after_compiling(self, module: nn.Module, compiled: CompiledParts) -> Planner:
        """The planner after more or fewer parts of the model were compiled. It never fails: training has begun, or is about to."""
        index, chain = _index_of(self.recipe, module, compiled), None
        try:
            chain = _chain_of(self.recipe, index, self.shares_input)
        except ConfigError as error:
            self.reporter.log_once(str(error), logging.WARNING)
        planner = replace(self, index=index, chain=chain, noise=_noise_of(self.recipe, index))
        if compiled.inside != self.index.compiled.inside:
            planner.report_compiled()
        return planner

    def recorded_outputs(self) -> list[str]:
        """Every recorded output with its schedule. All ranks that monitor the model together must have the same."""
        recorded = [f"gradient_flow, gradient_noise {self.recipe.schedule}"]
        for rule in (*self.recipe.rules, *self.recipe.captures):
            steps = rule.schedule.value
            when = f"at steps {sorted(steps)}" if isinstance(steps, frozenset) else str(rule.schedule)
            recorded += [f"{_path(stream)} {when}" for stream in self._plan([rule]).streams()]
        recorded += [] if self.noise is None else self.noise.keys()
        return recorded + [_path(stream) for stream in (self.chain.streams if self.chain is not None else ())]

    def plan(self, due: ActiveRules | None = None, stage: str = TRAIN) -> Plan:
        """The plan for the rules that are due; without ``due``, for all rules."""
        due = self.recipe.everything() if due is None else due
        if (stage, due) not in self._plans:
            chain, noise = (self.chain if due.gradient_flow else None), (self.noise if due.gradient_noise else None)
            plan = self._plan([self.recipe.rules[number] for number in due.rules], stage)
            self._plans[stage, due] = replace(plan, chain=chain, noise=noise) if stage == TRAIN else plan
        return self._plans[stage, due]

    def capture_plan(self, step: int | None = None) -> Plan | None:
        """The plan of the raw tensors to capture, in a step or in any; ``None`` without any."""
        captures = [capture for capture in self.recipe.captures if step is None or capture.schedule(step)]
        return self._plan(captures) if captures else None

    def attention_by_hand(self, watched: WatchedModule, stage: str) -> WatchedModule:
        """The streams of a call of attention that the model reports by hand: by default the mean entropy."""
        if any(KINDS[kind].of_heads for rule in self.recipe.rules for kind in rule.kinds):
            return watched
        if stage not in self._plans:
            rule = parse_rule(Rule(kinds="attention_entropy", statistics="mean"), "attention by hand", self.recipe.schedule)
            self._plans[stage] = self._plan([rule], stage)
        by_hand = next(module for module in self._plans[stage].modules if module.site is watched.site)
        return Watched(watched.site, {**by_hand.streams, **watched.streams})

    def plan_inside(self, stage: str = TRAIN) -> Plan:
        """The plan of the modules inside compiled code, as if they were observed."""
        whole = self._plan(self.recipe.rules, stage, index=self.index.whole)
        observed = {site.name for site in self.index.modules}
        return Plan([module for module in whole.modules if module.site.name not in observed], [])

    def _plan(self, rules: Iterable[ParsedRule], stage: str = TRAIN, *, index: ModelIndex | None = None) -> Plan:
        """The plan for some rules. Outside of training there are only activations."""
        index, rules = index or self.index, [*rules]
        by_site: defaultdict[str, defaultdict[str, list[ParsedRule]]] = defaultdict(lambda: defaultdict(list))
        """Rules by site and kind: a module and a parameter never have one name."""
        totals = Totals()
        for rule in rules:
            for kind in [kind for kind in rule.kinds if self._is_recorded(kind, stage)]:
                if rule.per_module:
                    totals.add(rule, kind, index)
                else:
                    for site in matching(rule, kind, index):
                        by_site[site.name][kind].append(rule)
        members = totals.outputs_of_members()
        modules = [self._watched(site, by_site[site.name], {}, stage) for site in index.modules if site.name in by_site]
        parameters = [
            self._watched(site, by_site.get(site.name, {}), members.get(site.name, {}), stage)
            for site in index.parameters
            if site.name in by_site or site.name in members
        ]
        totals.plan(parameters, stage, self.recipe.prefix)
        states = StateRules.of([rule for rule in rules if self._is_recorded(STATE, stage)], totals, parameters, index, self.reporter)
        return Plan(modules, parameters, [*totals.rule_by_total], states)

    def _watched(
        self, site: SiteT, rules: Mapping[str, Sequence[ParsedRule]], shared: Mapping[str, Mapping[str, Output]], stage: str
    ) -> Watched[SiteT]:
        """The streams of a site: outputs of the rules that pick it, and of the totals that it is a member of (``shared``), both by kind."""
        streams: dict[str, Stream] = {}
        layers: dict[str, dict[str, Stream]] = {}
        is_module = isinstance(site, ModuleSite)
        for kind in {**rules, **shared}:
            stream = Stream(
                kind,
                site.name,
                joined_outputs(rules.get(kind, ()), kind, site.name),
                stage,
                self.recipe.prefix,
                is_compared=self.shares_input and is_module,
                is_replicated=self.has_ranks and not is_module,
                is_nonnegative=isinstance(site, ModuleSite) and kind == "activation" and type(site.module) in NONNEGATIVE,
                shared=shared.get(kind, {}),
            )
            maps = layer_sites(site, kind)
            if maps:
                layers[kind] = {name: stream.at(name) for name in maps}
            else:
                streams[kind] = stream
        return Watched(site, streams, layers)

    def _is_recorded(self, kind: str, stage: str) -> bool:
        return kind not in self.recipe.left_out and (stage == TRAIN or KINDS[kind].in_every_stage)

    # Keys

    def planned_keys(self, stages: Iterable[str] = (TRAIN,), *, figures: Sequence[str] = (), context: Sequence[str] = ()) -> list[str]:
        """Every key of a number that is known before the first step, of all rules.

        Args:
            stages: Any of ``train``, ``validation``, ``test`` and ``predict``.
            figures: Further figures of the monitor that training records.
            context: Names of the values of the context of training.
        """
        names = [*stages]
        keys = [key for stage in names for key in (*self.plan(stage=stage).keys(), self.recipe.figure_key("errors", stage).format())]
        of_training = [self.recipe.figure_key(name).format() for name in (*figures, *self.plan().figures())]
        of_training += [Key(CONTEXT_KIND, "", name, prefix=self.recipe.prefix).format() for name in context]
        return keys + (of_training if TRAIN in names else [])

    def planned_histograms(self, stages: Iterable[str] = (TRAIN,)) -> list[str]:
        """Every key of a histogram, of all rules; ``stages`` as in :meth:`planned_keys`."""
        return [key for stage in stages for key in self.plan(stage=stage).histogram_keys()]

    def is_taken(self, key: str, stage: str) -> bool:
        """Whether the monitor itself records a key: a figure, a value of the context, or an output of a rule."""
        if is_context(key) or (Key.parse(key).kind == OWN_KIND and Key.parse(key).statistic in OWN_FIGURES):
            return True
        if stage not in self._recorded_keys:
            plan = self.plan(stage=stage)
            of_rules = (key for stream in plan.all_streams() for key in stream.keys.values())
            self._recorded_keys[stage] = {*of_rules, *plan.keys()}
        return key in self._recorded_keys[stage]

    def report_compiled(self) -> None:
        """Report, in one line, which modules are compiled, and what is not recorded for that."""
        message = compiled_message(self.index, self.recipe.rules, len(self.plan_inside().modules), self.plan())
        if message:
            self.reporter.log_once(message)

    def report_uncompiled_reference(self) -> None:
        """Report that the reference runs uncompiled, if a compiled model is compared with it."""
        if self.index.compiled.outermost and any(KINDS[kind].needs_reference for module in self.plan().modules for kind in module.streams):
            what = "at the first step differences are rounding instead of zero, and the masks of dropout differ"
            self.reporter.log_once(f"The reference runs uncompiled, and the model compiled: {what}.")

    def report_renamed(self) -> None:
        """Report, in one line, names that differ in keys because loggers refuse the model's names."""
        plan = self.plan()
        used = {stream.site for stream in plan.streams()}.union(plan.chain.transitions if plan.chain is not None else ())
        changed = [f"{old!r} is called {new!r} in keys" for old, new in self.index.namer.changed.items() if new in used]
        if changed:
            differ = f"{len(changed)} {'name differs' if len(changed) == 1 else 'names differ'} from those of the model"
            fit = "Loggers take letters, digits, '_', '-' and '.', and names must differ"
            self.reporter.log_once(f"{differ}: {', '.join(changed[:3])}. {fit}.")


def _index_of(recipe: Recipe, module: nn.Module, compiled: CompiledParts) -> ModelIndex:
    return ModelIndex(module, recipe.within, recipe.exclude, recipe.format_name, compiled)


def _chain_of(recipe: Recipe, index: ModelIndex, shares_input: bool) -> Chain | None:
    flow = recipe.gradient_flow
    return None if flow is None else Chain.of(flow, index, recipe.prefix, is_compared=shares_input)


def _check_ranks_of_noise(index: ModelIndex, *, has_ranks: bool, shares_input: bool) -> None:
    """Refuse gradient noise where a rank has no gradient of its own micro-batch, or does not know those of other ranks."""
    if shares_input or any(is_laid_out(site.owner) for site in index.parameters):
        why = "parameters are laid out over ranks (FSDP or tensor parallel), and no rank has the whole gradient of its own micro-batch"
        raise ConfigError(f"gradient_noise: {why}; expected one device or DDP.")
    if num_processes() > 1 and not has_ranks:
        why = f"the gradients of {num_processes()} ranks are compared, and each rank is monitored by itself"
        raise ConfigError(f"gradient_noise: {why}; expected ModuleMonitor(distributed=True).")


def _noise_of(recipe: Recipe, index: ModelIndex) -> NoiseSites | None:
    if recipe.gradient_noise is None:
        return None
    indices = {site.name: number for number, site in enumerate(index.parameters)}
    names_by_module = parameters_by_module(recipe.gradient_noise, "gradient", index)
    members = {module: [indices[name] for name in names] for module, names in names_by_module.items()}
    return NoiseSites(index.parameters, members, recipe.prefix)


def _path(stream: Stream) -> str:
    return "/".join(filter(None, (stream.kind, stream.site, stream.stage, stream.prefix, *stream.outputs)))


def compiled_message(index: ModelIndex, rules: Iterable[ParsedRule], num_inside: int, plan: Plan) -> str:
    """One line that names the compiled modules and what is not recorded for that: modules that rules match, detectors, attention.

    Empty if everything is recorded.
    """
    left_out = []
    if num_inside:
        left_out.append(f"Modules inside are not observed: {num_inside} of the {num_inside + len(plan.modules)} that the rules match.")
    watch_rules = [rule for rule in rules if rule.label == WATCH_LABEL and not any(matching(rule, kind, index) for kind in rule.kinds)]
    idle = {name: None for rule in watch_rules for name in rule.outputs if any(matching(rule, kind, index.whole) for kind in rule.kinds)}
    if idle:
        left_out.append(f"{WATCH_LABEL} has no {', '.join(idle)} to judge.")
    has_attention_rule = any(KINDS[kind].of_heads for rule in rules if rule.label != WATCH_LABEL for kind in rule.kinds)
    callers = [watched.site.name for watched in plan.modules_with_heads if watched.site.module in index.compiled.callers]
    if has_attention_rule and callers:
        left_out.append(f"{shortened(callers)} call compiled functions: attention is recorded in modules within, not in their own code.")
    if not left_out:
        return ""
    names = shortened([without_wrappers(name) for name in index.compiled.names])
    cure = "compiled: uncompiled records them, and runs monitored steps uncompiled"
    return f"Compiled: {names}. {' '.join(left_out)} {cure}."
