"""A module while a monitor has it: opens its steps, and keeps what lives from one step to the next."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_module_monitor.config.rules import Capture, ParsedRule, Rule, parse_capture
from lightning_module_monitor.distributed.ranks import Ranks, disagreement, num_processes
from lightning_module_monitor.distributed.shards import flat_shards_by_name, fsdp1_units
from lightning_module_monitor.engine.step_context import StepContext
from lightning_module_monitor.errors import ConfigError, nearest, or_examples, shortened
from lightning_module_monitor.health.alerts import ReplicaAlert
from lightning_module_monitor.model.compiled import Uncompiled, compiled_parts, num_compiled
from lightning_module_monitor.model.names import ROOT, ModelIndex
from lightning_module_monitor.plan.plan import Plan
from lightning_module_monitor.plan.planner import Planner
from lightning_module_monitor.plan.recipe import DETAIL, ActiveRules, Recipe
from lightning_module_monitor.probes.activations import ActivationProbe, DifferenceProbe, ModuleTable
from lightning_module_monitor.probes.attention import AttentionProbe
from lightning_module_monitor.probes.attention_calls import RawCall, read_scaled_dot_product_attention
from lightning_module_monitor.probes.base import Gate, Probe, StepTools
from lightning_module_monitor.probes.capture import CaptureProbe
from lightning_module_monitor.probes.cosines import PreviousUpdates
from lightning_module_monitor.probes.gradient_flow import GradientFlowProbe
from lightning_module_monitor.probes.gradient_noise import GradientNoiseProbe, NoiseState
from lightning_module_monitor.probes.optimizer_states import StateReader
from lightning_module_monitor.probes.parameters import ParameterAccess, ParameterTap, fail_removed
from lightning_module_monitor.probes.rcc_terms import CoordinateCheckProbe, intermediate_streams
from lightning_module_monitor.probes.reference import Reference, ReferenceProbe, structural_differences
from lightning_module_monitor.probes.reporting import ErrorReporter
from lightning_module_monitor.probes.tap import Consumer, ModuleTap
from lightning_module_monitor.record import CONTEXT_KIND, OWN_KIND, RCC_SKIPPED_CALLS, TRAIN
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.functions import Aggregate, Value
from lightning_module_monitor.statistics.layout import SeriesState
from lightning_module_monitor.statistics.registry import Recent, memory
from lightning_module_monitor.statistics.stream import Identity, Stream

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class LoggedValues:
    """The streams of values that no probe observes: the monitor's own figures, the context of training, and what users log."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._streams: dict[Identity, Stream] = {}
        self.by_users: list[Stream] = []
        """The streams of what users log."""

    def stream(self, kind: str, name: str, aggregate: Aggregate, *, site: str = "", stage: str = TRAIN) -> Stream:
        """The stream of a value: the same object in every step, while the aggregate is the same."""
        value = Value(aggregate)
        stream = self._streams.get((kind, site, name, stage))
        if stream is None or stream.values[name] != value:
            stream = self._streams[kind, site, name, stage] = Stream(kind, site, {name: value}, stage, self._prefix)
            self.by_users = [known for known in self._streams.values() if known.kind not in (OWN_KIND, CONTEXT_KIND)]
        return stream


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
        self.logged = LoggedValues(recipe.prefix)
        self._expected: list[Stream] = []
        """Streams that were announced before the first step."""
        self.noise = NoiseState()
        """What the gradient noise keeps from step to step."""
        self.replicas = ReplicaAlert()
        self.wrapper: nn.Module | None = None
        """The module that a strategy has wrapped this one in; ``None`` where it has not."""
        self.reference: Reference | None = None
        """The module to compare with; ``None`` where there is none."""
        self.ranks: Ranks | None = None
        """The processes that train together, once they have met; ``None`` where this is the only one."""
        self.has_lost_ranks = False
        """Whether another rank has left: nothing is monitored any more, and training goes on."""
        self.awaits_first_step = True
        """Whether no step of training has ended yet."""
        self.awaits_attention = True
        """Whether no step has ended yet in which attention was due."""
        self._reporter = reporter
        self._gate = gate
        self._distributed = distributed
        self._access = access
        self._has_agreed = False
        """Whether all ranks are known to record the same."""
        self._num_compiled_before = num_compiled()
        self._num_compiled = -1
        """How much was compiled when compiled code was last looked for in the module."""
        self._states: dict[tuple[str, ActiveRules], SeriesState] = {}
        """State kept between steps, by stage and active rules."""
        self._units: defaultdict[str, Recent] = defaultdict(memory)
        """What units did in the last monitored steps, by key, whatever else was due in them."""
        self._previous_updates = PreviousUpdates()

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
        self.add_rule(self.planner.recipe.parsed(rule, DETAIL, is_optional=True))
        parsed, recipe = replace(parse_capture(capture), is_optional=True), self.planner.recipe
        self._use(replace(self.planner, recipe=replace(recipe, captures=(*recipe.captures, parsed))))

    def expect_context(self, aggregates: Mapping[str, str]) -> None:
        """Announce values of the context before the first step, by their names, with the aggregate of each."""
        self._expected = [self.logged.stream(CONTEXT_KIND, name, aggregate) for name, aggregate in aggregates.items()]

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

    def agree(self) -> None:
        """Make sure that all ranks record the same: one collective, of every rank. Otherwise the first monitored step begins with it.

        Raises:
            ConfigError: On every rank, if rules, schedules or modules differ.
            RanksLostError: If another rank has left.
        """
        if self._has_agreed or self.has_lost_ranks or self._distributed is False:
            return
        if self.ranks is None:
            self.ranks = Ranks(None if self._distributed is True else self._distributed) if num_processes() > 1 else None
        differences = "" if self.ranks is None else disagreement(self.planner.one_by_one(), self.ranks)
        if differences:
            raise ConfigError(differences)
        self._has_agreed = self.ranks is not None

    def close(self) -> None:
        """Release the process group."""
        if self.ranks is not None:
            self.ranks.close()

    # Steps

    def open(self, due: ActiveRules, step: int, stage: str) -> StepContext:
        """Open a step; its probes are not attached yet."""
        self._find_compiled()
        self._find_removed()
        model = self.wrapper or self.module
        self._gate.wrapped = None if model is self.module else self.module
        planner, reporter, is_training = self.planner, self._reporter, stage == TRAIN
        plan, recipe = planner.plan(due, stage), planner.recipe
        tools = StepTools(StepAccumulator(reporter.of_stream, self._state(due, stage)), planner.index, reporter, self._gate)
        captured = (planner.capture_plan(step) if is_training else None) or Plan([], [], None)
        calls = None if self.reference is None else ReferenceProbe(self.reference, tools)
        consumers: list[Consumer[Any]] = [] if calls is None else [DifferenceProbe(plan.modules, tools, calls)]
        consumers.append(ActivationProbe(plan.modules, tools))
        capture = CaptureProbe(captured.modules, tools) if captured.modules or captured.parameters else None
        shapes = self.table.probe() if is_training else None
        flow = None if plan.chain is None else GradientFlowProbe(plan.chain, tools)
        consumers += [consumer for consumer in (capture, shapes, flow) if consumer is not None]
        parameters = self._parameter_tap(plan, captured, capture, tools, model) if plan.parameters or captured.parameters else None
        modules = ModuleTap(consumers, self._gate, tools.accumulator)
        probes: list[Probe] = [*([] if parameters is None else [parameters]), modules, *consumers]
        if calls is not None:
            probes.append(CoordinateCheckProbe(plan.modules, tools, calls, self._skipped_calls()))
            # After those that name the tensors of the reference that they need.
            calls = calls if calls.is_needed() else None
            probes += [] if calls is None else [calls]
        noise = None if plan.noise is None else GradientNoiseProbe(plan.noise, tools, modules, self.ranks, self.noise)
        probes += [] if noise is None else [noise]
        attention = None
        if plan.has_heads():
            is_requested = recipe.has_attention_rule(due)
            attention = AttentionProbe(plan.modules, plan.modules_with_heads, tools, is_requested=is_requested)
            probes.append(attention)
        return StepContext(
            step,
            plan,
            tools,
            self.ranks,
            modules,
            probes,
            stage=stage,
            errors_key=recipe.figure_key("errors", stage),
            parameters=parameters,
            capture=capture,
            reference=calls,
            attention=attention,
            noise=noise,
            clock=recipe.clock(step) if is_training else None,
            uncompiled=None if recipe.keeps_compiled else Uncompiled(),
        )

    def _parameter_tap(self, plan: Plan, captured: Plan, capture: CaptureProbe | None, tools: StepTools, model: nn.Module) -> ParameterTap:
        tensors = {site.name: site.tensor() for site in self.index.parameters}
        if None in tensors.values():
            fail_removed(plan.parameters, tools.accumulator)
        flat = flat_shards_by_name(tensors, model)
        states = None if plan.states is None else StateReader(plan.states.stream, plan.states.all_totals, plan.states.report_idle, tools)
        return ParameterTap(
            plan.parameters,
            captured.parameters,
            capture,
            tools,
            self._access,
            self.ranks,
            flat,
            self.reference,
            states,
            self._previous_updates,
        )

    def report_not_run(self, step: int) -> None:
        """After the first step report modules that may have run in a compiled function which nothing in the model holds."""
        has_compiled = self.planner.recipe.keeps_compiled and num_compiled() > self._num_compiled_before
        names = self.table.not_run() if has_compiled else []
        if names:
            what = f"{shortened(names)} did not run in step {step}, or inside a compiled function, where nothing is observed"
            self._reporter.log_once(f"{what}. compiled: uncompiled observes it, and runs monitored steps uncompiled.")

    def observe_attention(self, context: StepContext, module: nn.Module | str, call: RawCall, *, is_reference: bool) -> None:
        """Observe a call of attention that the model or the reference reports.

        Raises:
            ValueError: If there is no such module, or no reference.
        """
        reference = self.reference if is_reference else None
        live = module if reference is None or isinstance(module, str) else reference.model_of(module)
        site = None if live is None else self.index.module_site(live)
        if site is None and all(live is not inner for inner in self.module.modules()):
            what = repr(module) if isinstance(module, str) else f"This {type(module).__name__}"
            names = [known.name for known in self.index.modules]
            which = "of the reference" if is_reference else "that are watched"
            near = or_examples(nearest(module, names), names) if isinstance(module, str) else "."
            raise ValueError(f"{what} is none of the {len(names)} modules {which}{near}")
        if site is None or context.accumulator.is_lost:  # it is excluded, or an error has ended the step
            return
        probe = context.attention_by_hand()
        watched = probe.watched(site)
        if reference is not None:
            probe.keep_of_reference(watched, read_scaled_dot_product_attention, call, to_host=reference.cpu_offload)
        else:
            watched = self.planner.attention_by_hand(watched, context.stage)
            probe.observe(watched, read_scaled_dot_product_attention, call, is_reported=True)

    def _find_compiled(self) -> None:
        """Look for what was compiled since the names were read, if anything was."""
        if self.planner.recipe.keeps_compiled and self._num_compiled != num_compiled():
            self._num_compiled, compiled = num_compiled(), compiled_parts(self.module, self.wrapper)
            if compiled != self.index.compiled:
                self._use(self.planner.after_compiling(self.module, compiled))

    def _find_removed(self) -> None:
        removed = self.index.forget_removed_modules()
        if removed:
            self._use(replace(self.planner))
            self._previous_updates.forget_others({site.name for site in self.index.parameters})
            why = "what took its place is not observed, and there are no more values of it before the next fit"
            self._reporter.log_once(f"{shortened(removed)} was taken out of the model while it trains: {why}.", logging.WARNING)

    def _state(self, due: ActiveRules, stage: str) -> SeriesState:
        """The state that steps of one plan have in common."""
        if (stage, due) not in self._states:
            plan = self.planner.plan(due, stage)
            streams = [*intermediate_streams(plan.modules), *plan.all_streams(), *(self._expected if stage == TRAIN else ())]
            if plan.noise is not None:
                streams += plan.noise.streams(self.noise.loss_divisor or 1, 1 if self.ranks is None else self.ranks.size)
            if plan.has_coordinate_check():
                streams.append(self._skipped_calls())
            self._states[stage, due] = SeriesState(streams, self._units)
        return self._states[stage, due]

    def _skipped_calls(self) -> Stream:
        return self.logged.stream(OWN_KIND, RCC_SKIPPED_CALLS, "sum")
