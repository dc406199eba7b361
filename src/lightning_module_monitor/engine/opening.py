"""Opens a step: makes the probes of what is due in it, and keeps what lives from one step to the next."""

from __future__ import annotations

import logging
from collections import defaultdict

from torch import nn

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.distributed.shards import flat_shards_by_name
from lightning_module_monitor.engine.logged import LoggedValues
from lightning_module_monitor.engine.step_context import StepContext
from lightning_module_monitor.errors import shortened
from lightning_module_monitor.model.compiled import Uncompiled
from lightning_module_monitor.plan import ActiveRules, Planner
from lightning_module_monitor.probes.activations import ActivationProbe, ModuleTable
from lightning_module_monitor.probes.attention import AttentionProbe
from lightning_module_monitor.probes.base import Probe, StepTools
from lightning_module_monitor.probes.capture import CaptureProbe
from lightning_module_monitor.probes.coordinate_check import CoordinateCheckProbe, intermediate_streams
from lightning_module_monitor.probes.gradient_flow import GradientFlowProbe
from lightning_module_monitor.probes.parameters import ParameterAccess, ParameterProbe, WholeTensors, expected_tensors, fail_removed
from lightning_module_monitor.probes.reference import Reference, ReferenceProbe
from lightning_module_monitor.probes.reporting import ErrorReporter
from lightning_module_monitor.record import OWN_KIND, RCC_SKIPPED_CALLS, TRAIN
from lightning_module_monitor.statistics.accumulator import SeriesState, StepAccumulator
from lightning_module_monitor.statistics.registry import Recent, memory


class StepOpener:
    """Opens the steps of one module."""

    def __init__(self, planner: Planner, reporter: ErrorReporter, logged: LoggedValues) -> None:
        self._planner = planner
        self._reporter = reporter
        self._logged = logged
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
        tools = StepTools(StepAccumulator(reporter.of_spec, self._state(due, stage)), sites, reporter)
        captured = self._planner.capture_plan(step) if stage == TRAIN else None
        parameters = {site.name: site.tensor() for site in sites.parameters} if stage == TRAIN else {}
        if None in parameters.values():
            fail_removed(plan.parameters_by_kind, tools.accumulator)
        flat = flat_shards_by_name(parameters, model)
        expected = expected_tensors(plan.parameters_by_kind, {} if captured is None else captured.parameters_by_kind, flat)
        whole_tensors = WholeTensors(expected, ranks, tools.report_not_captured)
        calls = None if reference is None else ReferenceProbe(reference, tools)
        probes: list[Probe] = [
            ParameterProbe(plan.parameters_by_kind, tools, whole_tensors, access, flat, reference),
            ActivationProbe(plan.modules, tools, calls),
        ]
        shapes = self.modules.probe() if stage == TRAIN else None
        if shapes is not None:
            probes.append(shapes)
        if plan.chain is not None:
            probes.append(GradientFlowProbe(plan.chain, tools))
        if captured is not None:
            probes.append(CaptureProbe(captured.modules, captured.parameters_by_kind, tools, whole_tensors, access))
        if calls is not None:
            probes.append(CoordinateCheckProbe(plan.modules, tools, calls, self._logged.stream(OWN_KIND, RCC_SKIPPED_CALLS, "sum")))
            # The last to be attached: by now it is known which tensors of the reference the others need.
            probes += [calls] if calls.is_needed() else []
        is_requested = self._planner.has_attention_rule(due)
        attention = AttentionProbe(plan.modules, plan.modules_with_heads, tools, is_requested=is_requested)
        uncompiled = None if self._planner.keeps_compiled else Uncompiled()
        return StepContext(
            step, stage, tools, ranks, whole_tensors=whole_tensors, attention=attention, probes=probes, uncompiled=uncompiled
        )

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
            streams = [*intermediate_streams(plan.modules), *plan.all_specs(), *(self._logged.expected if stage == TRAIN else ())]
            if plan.has_coordinate_check():
                streams.append(self._logged.stream(OWN_KIND, RCC_SKIPPED_CALLS, "sum"))
            self._states[stage, due] = SeriesState(streams, self._units)
        return self._states[stage, due]
