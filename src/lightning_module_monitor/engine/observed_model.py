"""A module while a monitor has it: what is recorded of it, and what lives from one step to the next."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from lightning_module_monitor.config.rules import Capture, ParsedRule, Rule, parse_capture
from lightning_module_monitor.distributed.ranks import Ranks, disagreement, num_processes
from lightning_module_monitor.distributed.shards import fsdp1_units
from lightning_module_monitor.engine.replicas import ReplicaAlert
from lightning_module_monitor.errors import ConfigError, shortened
from lightning_module_monitor.keys import Columns
from lightning_module_monitor.kinds import CONTEXT_KIND, OWN_KIND, TRAIN
from lightning_module_monitor.model.compiled import compiled_parts, num_compile_attempts
from lightning_module_monitor.model.names import ROOT, ModelIndex, has_forward
from lightning_module_monitor.plan.planner import Planner
from lightning_module_monitor.plan.recipe import DETAIL_LABEL, ActiveRules, Recipe
from lightning_module_monitor.probes.activations import ModuleTable
from lightning_module_monitor.probes.base import ErrorReporter, Gate
from lightning_module_monitor.probes.cosines import PreviousUpdates
from lightning_module_monitor.probes.gradient_noise import NoiseState
from lightning_module_monitor.probes.parameters import ParameterAccess
from lightning_module_monitor.probes.rcc_terms import intermediate_streams
from lightning_module_monitor.probes.reference import Reference, structural_differences
from lightning_module_monitor.statistics.functions import Aggregate, Value
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.statistics.units import RecentUnits
from lightning_module_monitor.step.state import SeriesState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ObservedModel:
    """A module from ``set_module`` until the monitor releases it.

    Args:
        module: The module.
        recipe: What is recorded of it.
        reporter: Reports errors.
        gate: Tells hooks whether they observe.
        distributed: The argument of ``ModuleMonitor``.
        access: Reads parameters and their gradients.

    Raises:
        ConfigError: If a rule matches nothing in the module, or it has no such blocks as ``gradient_flow`` names.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe,
        reporter: ErrorReporter,
        gate: Gate,
        *,
        distributed: bool | DeviceMesh,
        access: ParameterAccess,
    ) -> None:
        if recipe.schedule.by_clock is not None:
            recipe.schedule.by_clock.begin()
        reporter.begin(module)
        shares_input = not isinstance(distributed, bool) and distributed.size() > 1
        self.module = module
        self.planner = Planner.of(recipe, module, reporter, has_ranks=distributed is not False, shares_input=shares_input)
        self.watched = self.index.with_wrapped(module)
        """The module and every module in it that is not excluded."""
        self.table = ModuleTable(self.index.whole.modules, self.index.modules)
        self.logged: dict[tuple[str, str, str, str], Stream] = {}
        """The streams of values that no probe observes, by kind, site, name and stage: own figures, context, what users log."""
        self._expected: list[Stream] = []
        """Streams that were announced before the first step."""
        self.noise = NoiseState()
        """State of the gradient noise from step to step."""
        self.replicas = ReplicaAlert()
        self.wrapper: nn.Module | None = None
        """The module that a strategy has wrapped this one in; ``None`` where it has not."""
        self.reference: Reference | None = None
        """The module to compare with; ``None`` where there is none."""
        self.ranks: Ranks | None = None
        """The processes that train together, once they have met; ``None`` where this is the only one."""
        self.awaits_first_step = True
        """Whether no step of training has ended yet."""
        self.awaits_attention = True
        """Whether no step has ended yet in which attention was due."""
        self.reporter = reporter
        self.gate = gate
        self._distributed = distributed
        self.access = access
        self._has_agreed = False
        """Whether all ranks are known to record the same."""
        self._num_attempts_before = num_compile_attempts()
        self._num_attempts = -1
        """Number of attempts to compile when compiled code was last looked for in the module."""
        self.columns: defaultdict[str, Columns] = defaultdict(Columns)
        """The columns of records, by stage."""
        self._states: dict[tuple[str, ActiveRules], SeriesState] = {}
        """State kept between steps, by stage and active rules."""
        self._units = RecentUnits()
        """Activity of units in recent monitored steps, by key."""
        self.previous_updates = PreviousUpdates()

    @property
    def index(self) -> ModelIndex:
        """The names of the module."""
        return self.planner.index

    # What is recorded

    def add_rule(self, rule: ParsedRule) -> None:
        """Record more from the next step on.

        Raises:
            ConfigError: If the rule matches nothing in the module.
        """
        self._has_agreed = False
        self._use(self.planner.with_rule(rule))

    def add_detail(self, rule: Rule, capture: Capture) -> None:
        """Record and capture more. The rule and the capture may match nothing."""
        self.add_rule(self.planner.recipe.parsed(rule, DETAIL_LABEL, is_optional=True))
        parsed, recipe = replace(parse_capture(capture), is_optional=True), self.planner.recipe
        self._use(replace(self.planner, recipe=replace(recipe, captures=(*recipe.captures, parsed))))

    def expect_context(self, aggregates: Mapping[str, str]) -> None:
        """Announce values of the context before the first step, by their names, with the aggregate of each."""
        self._expected = [self.stream_of_value(CONTEXT_KIND, name, aggregate) for name, aggregate in aggregates.items()]

    def stream_of_value(self, kind: str, name: str, aggregate: Aggregate, *, site: str = "", stage: str = TRAIN) -> Stream:
        """The stream of a value that no probe observes: the same object in every step, while the aggregate is the same."""
        value = Value(aggregate)
        stream = self.logged.get((kind, site, name, stage))
        if stream is None or stream.values[name] != value:
            stream = self.logged[kind, site, name, stage] = Stream(kind, site, {name: value}, stage, self.planner.recipe.prefix)
        return stream

    def _use(self, planner: Planner) -> None:
        self.planner = planner
        self._states.clear()

    def set_reference(self, module: nn.Module, *, follows: bool, cpu_offload: bool, wrapper: nn.Module | None) -> None:
        """Compare with a module; see :meth:`ModuleMonitor.set_reference_module`.

        Raises:
            ValueError: If names or shapes of modules or parameters differ; lists them.
        """
        within = self.planner.recipe.within
        live = self.module if within is not None and not structural_differences(self.module, module) else self.index.within
        units = fsdp1_units(self.wrapper or self.module) | fsdp1_units(wrapper or module)
        name = within or ROOT
        self.reference = Reference(live, module, follows=follows, cpu_offload=cpu_offload, name=name, wrapper=wrapper, units=units)
        self.planner.report_uncompiled_reference()

    # Ranks

    def check_agreement(self) -> None:
        """Make sure that all ranks record the same: one collective, of every rank. Otherwise the first monitored step begins with it.

        Raises:
            ConfigError: On every rank, if rules, schedules or modules differ.
            RanksLostError: If another rank has left.
        """
        if self._has_agreed or self._distributed is False:
            return
        if self.ranks is None:
            self.ranks = Ranks(None if self._distributed is True else self._distributed) if num_processes() > 1 else None
        differences = "" if self.ranks is None else disagreement(self.planner.recorded_outputs(), self.ranks)
        if differences:
            raise ConfigError(differences)
        self._has_agreed = self.ranks is not None

    # Steps

    def report_not_run(self, step: int) -> None:
        """After the first step report modules that ran, or may have run, where hooks do not observe them."""
        sites = self.table.not_run()
        if self.planner.recipe.keeps_compiled and num_compile_attempts() > self._num_attempts_before:
            what = f"did not run in step {step}, or inside a compiled function, where nothing is observed"
            advice = "compiled: uncompiled observes it, and runs monitored steps uncompiled"
        else:
            sites = [
                site for site in sites if site.name != ROOT and site.is_leaf and has_forward(site.module) and _has_gradient(site.module)
            ]
            what = f"had gradients in step {step}, but no call that hooks observe, so there are no values of the output"
            advice = "Call the module itself, and not its forward or another method"
        if sites:
            self.reporter.log_once(f"{shortened([site.name for site in sites])} {what}. {advice}.")

    def read_names_again(self) -> None:
        """Look for what was compiled since the names were read, if anything was, and for what was taken out of the model."""
        if self.planner.recipe.keeps_compiled and self._num_attempts != num_compile_attempts():
            self._num_attempts, compiled = num_compile_attempts(), compiled_parts(self.module, self.wrapper)
            if compiled != self.index.compiled:
                self._use(self.planner.after_compiling(self.module, compiled))
        plan = self.planner.plan()
        removed = self.index.forget_removed_modules()
        if removed:
            self._use(replace(self.planner))
            self.previous_updates.forget_others({site.name for site in self.index.parameters})
            self._report_lost({stream.site for stream in plan.streams()}, removed)

    def _report_lost(self, recorded: set[str], removed: list[str]) -> None:
        """Report removed modules that had values, given the recorded sites: not those that never ran, such as a loss of other stages."""
        with_values = recorded - {site.name for site in self.table.waiting()}
        lost = [name for name in removed if any(f"{site}.".startswith(f"{name}.") for site in with_values)]
        if lost:
            was, its, it = ("was", "its", "it") if len(lost) == 1 else ("were", "their", "them")
            why = f"what took {its} place is not observed, and there are no more values of {it} before the next fit"
            self.reporter.log_once(f"{shortened(lost)} {was} taken out of the model while it trains: {why}.", logging.WARNING)

    def state(self, due: ActiveRules, stage: str) -> SeriesState:
        """The state that steps of one plan have in common."""
        if (stage, due) not in self._states:
            plan = self.planner.plan(due, stage)
            streams = [*intermediate_streams(plan.modules), *plan.all_streams(), *(self._expected if stage == TRAIN else ())]
            if plan.noise is not None:
                streams += plan.noise.streams(self.noise.loss_divisor or 1, 1 if self.ranks is None else self.ranks.size)
            streams += [self.stream_of_value(OWN_KIND, figure, "sum") for figure in plan.figures()]
            self._states[stage, due] = SeriesState(streams, self.columns[stage], self._units)
        return self._states[stage, due]


def _has_gradient(module: nn.Module) -> bool:
    return any(parameter is not None and parameter.grad is not None for parameter in module._parameters.values())
