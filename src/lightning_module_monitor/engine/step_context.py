"""A step, or a loop of another stage, while it is observed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_module_monitor.distributed.shards import flat_shards_by_name
from lightning_module_monitor.engine.observed_model import ObservedModel
from lightning_module_monitor.kernels.table import Scale
from lightning_module_monitor.kinds import OWN_KIND, RCC_SKIPPED_CALLS, TRAIN
from lightning_module_monitor.model.compiled import OriginalCode
from lightning_module_monitor.model.hooks import Unobserved
from lightning_module_monitor.plan.plan import Plan
from lightning_module_monitor.plan.recipe import ActiveRules
from lightning_module_monitor.probes.activations import ActivationProbe, DifferenceProbe
from lightning_module_monitor.probes.attention import AttentionProbe
from lightning_module_monitor.probes.attention_calls import RawCall, read_scaled_dot_product_attention
from lightning_module_monitor.probes.base import Probe, Selected, StepTools, Watched, unchanged_grad_mode
from lightning_module_monitor.probes.capture import CaptureProbe
from lightning_module_monitor.probes.gradient_flow import GradientFlowProbe
from lightning_module_monitor.probes.gradient_noise import GradientNoiseProbe
from lightning_module_monitor.probes.optimizer_states import StateReader
from lightning_module_monitor.probes.parameters import ParameterTap, fail_removed
from lightning_module_monitor.probes.rcc_terms import CoordinateCheckProbe
from lightning_module_monitor.probes.reference import ReferenceProbe
from lightning_module_monitor.probes.tap import Consumer, ModuleTap
from lightning_module_monitor.record import RawTensor
from lightning_module_monitor.step.accumulator import StepAccumulator
from lightning_module_monitor.suggestions import nearest, or_examples


class StepContext:
    """One step, or one loop of another stage, while it is observed: its probes, and the accumulator that they fill.

    Args:
        model: The module that is monitored.
        due: The rules that are due.
        step: Number of the optimizer step.
        stage: ``train``, or the stage of the loop.
        accumulator: Takes the values.
    """

    def __init__(  # what it is about, and what it fills
        self, model: ObservedModel, due: ActiveRules, step: int, stage: str, accumulator: StepAccumulator
    ) -> None:
        model.gate.wrapped = None if model.wrapper in (None, model.module) else model.module
        planner, is_training = model.planner, stage == TRAIN
        plan, recipe = planner.plan(due, stage), planner.recipe
        captured = (planner.capture_plan(step) if is_training else None) or Plan([], [])
        self.model, self.plan, self.step, self.stage = model, plan, step, stage
        self.tools = tools = StepTools(accumulator, planner.index, model.reporter, model.gate)
        clock = recipe.schedule.by_clock if is_training else None
        self.clock = clock if clock is not None and clock(step) else None
        """The schedule, if it picked the step by the clock."""
        self.num_unobserved = Unobserved.number
        """How much had not been observed before the step because torch traced it."""
        self._original_code = None if recipe.keeps_compiled else OriginalCode()
        """Runs original code in place of compiled code in the step; ``None`` where compiled code is kept."""
        self.errors_key = recipe.figure_key("errors", stage)
        """The key of the number of errors."""
        calls = None if model.reference is None else ReferenceProbe(model.reference, tools)
        consumers: list[Consumer[Any]] = [] if calls is None else [DifferenceProbe(plan.modules, tools, calls)]
        consumers.append(ActivationProbe(plan.modules, tools))
        self.capture = CaptureProbe(captured.modules, tools) if captured.modules or captured.parameters else None
        shapes = model.table.probe() if is_training else None
        flow = None if plan.chain is None else GradientFlowProbe(plan.chain, tools)
        consumers += [consumer for consumer in (self.capture, shapes, flow) if consumer is not None]
        self.parameters = self._parameter_tap(captured) if plan.parameters or captured.parameters else None
        self.modules = ModuleTap(consumers, model.gate, accumulator)
        check = None
        if calls is not None:
            skipped_calls = model.stream_of_value(OWN_KIND, RCC_SKIPPED_CALLS, "sum")
            check = CoordinateCheckProbe(plan.modules, tools, calls, skipped_calls)
        # Only now: the probes made so far have noted in `wanted` which tensors of the reference they need.
        self.reference = calls if calls is not None and calls.wanted else None
        """Keeps what the reference computes."""
        self.noise = None if plan.noise is None else GradientNoiseProbe(plan.noise, tools, self.modules, model.ranks, model.noise)
        is_requested, heads = recipe.has_attention_rule(due), plan.modules_with_heads
        self.attention = AttentionProbe(heads, tools, is_requested=is_requested) if heads else None
        probes = (self.parameters, self.modules, *consumers, check, self.reference, self.noise, self.attention)
        self.probes: list[Probe] = [probe for probe in probes if probe is not None]
        """All probes, in the order in which they register their hooks. A probe that the plan does not need is not made."""
        self.deriving = [probe for probe in (flow, check, self.noise) if probe is not None]
        """The probes that replace intermediate numbers of the step by derived ones, on the host."""

    @property
    def accumulator(self) -> StepAccumulator:
        """The values of the step."""
        return self.tools.accumulator

    def _parameter_tap(self, captured: Plan) -> ParameterTap:
        model, plan, tools = self.model, self.plan, self.tools
        tensors = {site.name: site.tensor() for site in model.index.parameters}
        if [name for name, tensor in tensors.items() if tensor is None]:
            fail_removed(plan.parameters, tools.accumulator)
        rules = plan.states
        states = None if rules is None else StateReader(rules.stream, rules.known_totals, rules.report_unmatched, tools)
        return ParameterTap(
            plan.parameters,
            captured.parameters,
            self.capture,
            tools,
            model.access,
            model.ranks,
            flat_shards_by_name(tensors, model.wrapper or model.module),
            model.reference,
            states,
            model.previous_updates,
        )

    def attach(self) -> None:
        """Register the hooks of the probes."""
        if self._original_code is not None:
            self._original_code.begin()
        for probe in self.probes:
            probe.attach()

    def observe_gradients(self, kind: str, parameters: Iterable[Tensor] | None, scale: Scale) -> None:
        """Observe the gradients of some parameters, or of all."""
        only = _identities(parameters)
        if self.parameters is not None:
            with self.guard("gradients"):
                self.parameters.observe_gradients(kind, only, scale)
        if self.noise is not None:
            with self.guard("gradient noise"):
                self.noise.observe_gradients(only, scale)

    def observe_arriving(self, parameter: Tensor, gradient: Tensor, scale: Scale) -> None:
        """Observe the gradient of a parameter while it arrives, before anything uses it."""
        if self.parameters is not None:
            with self.guard("gradients"):
                self.parameters.observe_arriving(parameter, gradient, scale)

    def observe_parameters(self, parameters: Iterable[Tensor] | None) -> None:
        """Observe some parameters, or all, before the optimizer moves them."""
        if self.parameters is not None:
            with self.guard("parameters"):
                self.parameters.observe_parameters(_identities(parameters))

    def observe_updates(
        self, parameters: Iterable[Tensor] | None = None, *, is_skipped: bool | Tensor = False, optimizers: Iterable[Optimizer] = ()
    ) -> None:
        """Observe the updates of some parameters, or of all, and what optimizers keep of them."""
        if self.parameters is not None:
            with self.guard("updates"):
                self.parameters.observe_updates(_identities(parameters), is_skipped=is_skipped, optimizers=optimizers)

    def observe_attention(self, module: nn.Module | str, call: RawCall, *, is_reference: bool) -> None:
        """Observe a call of attention that the model or the reference reports.

        Raises:
            ValueError: If there is no such module, or no reference.
        """
        reference = self.model.reference if is_reference else None
        live = module if reference is None or isinstance(module, str) else reference.model_of(module)
        site = None if live is None else self.tools.names.module_site(live)
        if site is None and all(live is not inner for inner in self.model.module.modules()):
            what = repr(module) if isinstance(module, str) else f"This {type(module).__name__}"
            names = [known.name for known in self.tools.names.modules]
            which = "of the reference" if is_reference else "that are watched"
            near = or_examples(nearest(module, names), names) if isinstance(module, str) else "."
            raise ValueError(f"{what} is none of the {len(names)} modules {which}{near}")
        if site is None or self.accumulator.is_lost:  # it is excluded, or an error has ended the step
            return
        if self.attention is None:  # no rule is about attention: without hooks
            self.attention = AttentionProbe((), self.tools, is_requested=False)
            self.probes.append(self.attention)
        watched = next((recorded for recorded in self.plan.modules if recorded.site is site), Watched(site, {}))
        if reference is not None:
            self.attention.keep_of_reference(watched, call, to_host=reference.cpu_offload)
        else:
            watched = self.model.planner.attention_by_hand(watched, self.stage)
            self.attention.observe(watched, read_scaled_dot_product_attention, call, is_reported=True)

    def close(self) -> None:
        """Remove every hook and release every tensor; a second call closes what an error or Ctrl-C in the first has left."""
        with ExitStack() as stack:
            if self._original_code is not None:
                stack.callback(self._original_code.end)
            for probe in reversed(self.probes):
                stack.callback(probe.close)

    def discard(self) -> None:
        """Discard everything that was observed: no rank makes a record."""
        self.close()
        self.probes.clear()
        self.accumulator.is_lost = True

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Within the block an error is reported and counted, and tensors have no graph."""
        with unchanged_grad_mode(), self.tools.reporter.guard(what, self.accumulator):
            yield

    def end_micro_batch(self) -> None:
        """One of several micro-batches of the step is over."""
        self._each("micro-batch", lambda probe: probe.end_micro_batch())

    def finish_probes(self) -> list[RawTensor]:
        """Let the probes finish what waits for the end of the step; returns the raw tensors of the step."""
        if self.parameters is not None:
            with self.guard("whole tensors"):
                self.parameters.whole_tensors.assemble()
        self._each("what has waited", lambda probe: probe.finish())
        tensors: list[RawTensor] = []
        if self.capture is not None:
            with self.guard("raw tensors"):
                tensors += self.capture.tensors()
        return tensors

    def _each(self, what: str, act: Callable[[Probe], None]) -> None:
        """Let every probe act; an error in one does not affect the others."""
        for probe in self.probes:
            with self.guard(what):
                act(probe)


def _identities(parameters: Iterable[Tensor] | None) -> Selected:
    return None if parameters is None else frozenset(map(id, parameters))
