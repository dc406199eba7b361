"""Opens a step: makes the probes of what is due in it, and keeps what lives from one step to the next."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

from torch import nn

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.distributed.shards import flat_shards_by_name
from lightning_module_monitor.engine.logged import LoggedValues
from lightning_module_monitor.engine.step_context import StepContext
from lightning_module_monitor.errors import shortened
from lightning_module_monitor.model.compiled import Uncompiled
from lightning_module_monitor.plan.plan import Plan
from lightning_module_monitor.plan.planner import ActiveRules, Planner
from lightning_module_monitor.probes.activations import ActivationProbe, DifferenceProbe, ModuleTable
from lightning_module_monitor.probes.attention import AttentionProbe
from lightning_module_monitor.probes.base import Gate, Probe, StepTools
from lightning_module_monitor.probes.capture import CaptureProbe
from lightning_module_monitor.probes.gradient_flow import GradientFlowProbe
from lightning_module_monitor.probes.parameters import ParameterAccess, ParameterTap, fail_removed
from lightning_module_monitor.probes.rcc_terms import CoordinateCheckProbe, intermediate_streams
from lightning_module_monitor.probes.reference import Reference, ReferenceProbe
from lightning_module_monitor.probes.reporting import ErrorReporter
from lightning_module_monitor.probes.tap import Consumer, ModuleTap
from lightning_module_monitor.record import OWN_KIND, RCC_SKIPPED_CALLS, TRAIN
from lightning_module_monitor.statistics.accumulator import SeriesState, StepAccumulator
from lightning_module_monitor.statistics.registry import Recent, memory


class StepOpener:
    """Opens the steps of one module."""

    def __init__(self, planner: Planner, reporter: ErrorReporter, logged: LoggedValues, gate: Gate) -> None:
        self._planner = planner
        self._reporter = reporter
        self._logged = logged
        self._gate = gate
        self.modules = ModuleTable()
        self._states: dict[tuple[str, ActiveRules], SeriesState] = {}
        """State kept between steps, by stage and active rules."""
        self._units: defaultdict[str, Recent] = defaultdict(memory)
        """What units did in the last monitored steps, by key, whatever else was due in them."""

    def forget_plans(self) -> None:
        """What is recorded has changed."""
        self._states.clear()

    def open(
        self,
        due: ActiveRules,
        step: int,
        stage: str,
        *,
        model: nn.Module,
        access: ParameterAccess,
        reference: Reference | None,
        ranks: Ranks | None,
    ) -> StepContext:
        """Open a step; its probes are not attached yet. ``model`` is the module, or what a strategy has wrapped it in."""
        self._forget_removed_modules()
        plan, sites, reporter = self._planner.plan(due, stage), self._planner.index, self._reporter
        tools = StepTools(StepAccumulator(reporter.of_stream, self._state(due, stage)), sites, reporter, self._gate)
        captured = (self._planner.capture_plan(step) if stage == TRAIN else None) or Plan([], [], None)
        tensors = {site.name: site.tensor() for site in sites.parameters} if stage == TRAIN else {}
        if None in tensors.values():
            fail_removed(plan.parameters, tools.accumulator)
        flat = flat_shards_by_name(tensors, model)
        calls = None if reference is None else ReferenceProbe(reference, tools)
        capture = CaptureProbe(captured.modules, tools)
        consumers: list[Consumer[Any]] = [] if calls is None else [DifferenceProbe(plan.modules, tools, calls)]
        consumers += [ActivationProbe(plan.modules, tools), capture]
        shapes = self.modules.probe() if stage == TRAIN else None
        if shapes is not None:
            consumers.append(shapes)
        if plan.chain is not None:
            consumers.append(GradientFlowProbe(plan.chain, tools))
        watched = plan.parameters, captured.parameters
        parameters = ParameterTap(*watched, capture.keep, tools, access, ranks, flat, reference)
        modules = ModuleTap(consumers, self._gate, tools.accumulator)
        attention = AttentionProbe(plan.modules, plan.modules_with_heads, tools, is_requested=self._planner.has_attention_rule(due))
        probes: list[Probe] = [parameters, modules, *consumers]
        if calls is not None:
            probes.append(CoordinateCheckProbe(plan.modules, tools, calls, self._logged.stream(OWN_KIND, RCC_SKIPPED_CALLS, "sum")))
            # After those that name the tensors of the reference that they need.
            calls = calls if calls.is_needed() else None
            probes += [] if calls is None else [calls]
        uncompiled = None if self._planner.keeps_compiled else Uncompiled()
        taps = parameters, modules
        return StepContext(step, stage, tools, ranks, *taps, capture, calls, attention, [*probes, attention], uncompiled)

    def _forget_removed_modules(self) -> None:
        removed = self._planner.forget_removed_modules()
        if removed:
            self.forget_plans()
            why = "what took its place is not observed, and there are no more values of it before the next fit"
            self._reporter.log_once(f"{shortened(removed)} was taken out of the model while it trains: {why}.", logging.WARNING)

    def _state(self, due: ActiveRules, stage: str) -> SeriesState:
        """What lives from step to step of one plan."""
        if (stage, due) not in self._states:
            plan = self._planner.plan(due, stage)
            streams = [*intermediate_streams(plan.modules), *plan.all_streams(), *(self._logged.expected if stage == TRAIN else ())]
            if plan.has_coordinate_check():
                streams.append(self._logged.stream(OWN_KIND, RCC_SKIPPED_CALLS, "sum"))
            self._states[stage, due] = SeriesState(streams, self._units)
        return self._states[stage, due]
