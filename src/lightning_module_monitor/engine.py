"""The phases of a step: hooks go on, tensors are observed, hooks go off, values are finished. It knows no Trainer."""

from __future__ import annotations

import functools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_module_monitor.distributed.ranks import Ranks, disagreement, is_first_process, process_ranks
from lightning_module_monitor.distributed.reduce import DistributedReducer
from lightning_module_monitor.distributed.shards import flat_shards_by_name
from lightning_module_monitor.errors import ConfigError, RanksLostError, shortened
from lightning_module_monitor.health.replicas import ReplicaWatch
from lightning_module_monitor.model.hooks import Unobserved, is_tracing
from lightning_module_monitor.plan import ActiveRules, Planner
from lightning_module_monitor.probes.activations import ActivationProbe, DifferenceProbe, ModuleTable
from lightning_module_monitor.probes.attention import AttentionProbe
from lightning_module_monitor.probes.base import Among, Probe
from lightning_module_monitor.probes.capture import CaptureProbe
from lightning_module_monitor.probes.coordinate_check import CoordinateCheckProbe
from lightning_module_monitor.probes.gradient_flow import GradientFlowProbe
from lightning_module_monitor.probes.parameters import ParameterAccess, ParameterProbe, WholeTensors, expected_tensors
from lightning_module_monitor.probes.planned import Plan
from lightning_module_monitor.probes.reference import Reference, ReferenceProbe
from lightning_module_monitor.probes.reporting import ErrorReporter, unchanged_grad_mode
from lightning_module_monitor.probes.step_context import StepContext
from lightning_module_monitor.record import (
    CONTEXT_KIND,
    OWN_KIND,
    RANK_DISAGREEMENT,
    RCC_SKIPPED_CALLS,
    SECONDS_PER_STEP,
    TRAIN,
    Finding,
    Record,
    Values,
)
from lightning_module_monitor.schedule import MinutesSchedule
from lightning_module_monitor.sinks.history import StorageManager
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.functions import UserFunction
from lightning_module_monitor.statistics.registry import Recent, memory
from lightning_module_monitor.statistics.results import SeriesState
from lightning_module_monitor.statistics.spec import MetricSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_NO_ATTENTION = (
    "called none of F.scaled_dot_product_attention, F.multi_head_attention_forward and nn.MultiheadAttention, and no attention is "
    'recorded. Try attn_implementation="sdpa" for a Hugging Face model, and monitor_scaled_dot_product_attention in a forward of your own.'
)


class StepEngine:
    """Observes a module step by step; see :class:`~lightning_module_monitor.monitor.ModuleMonitor`, which adds what users ask of it.

    Args:
        reporter: Reports errors.
        planner: What is recorded, when and where.
        storage: Receives every record.
        distributed: Whether values are those of all ranks together; in tensor parallel training the mesh of the ranks that share their
            input.
    """

    def __init__(self, reporter: ErrorReporter, planner: Planner, storage: StorageManager, distributed: bool | DeviceMesh) -> None:
        self._reporter = reporter
        self.planner = planner
        self.storage = storage
        self.distributed = distributed
        self.access = ParameterAccess()
        """Reads parameters and their gradients."""
        self._forget_module()

    def _forget_module(self) -> None:
        """Set everything that is not an option to what it is where there is no module."""
        self._module: nn.Module | None = None
        self.wrapper: nn.Module | None = None
        """What wraps the module, where a strategy has wrapped it."""
        self._states: dict[tuple[str, ActiveRules], tuple[SeriesState, DistributedReducer | None]] = {}
        """What lives from step to step, by the plan that says what may be observed."""
        self._units: defaultdict[str, Recent] = defaultdict(memory)
        """What units did in the last monitored steps, by key, whatever else was due in them."""
        self._has_agreed = False
        """Whether all ranks are known to watch the same."""
        self.ranks: Ranks | None = None
        """The processes that train together, once they have met; ``None`` where this is the only one."""
        self._replicas = ReplicaWatch()
        self.has_lost_ranks = False
        """Whether another rank has left: nothing is monitored any more, and training goes on."""
        self._reference: Reference | None = None
        self._begun: int | None = None
        """The step that was begun and has not ended, monitored or not."""
        self._context: StepContext | None = None
        self._clock: MinutesSchedule | None = None
        """If it picked the step that was begun."""
        self._suspended: list[StepContext | None] = []
        self._silences: set[object] = set()
        """One for each block in which nothing is observed."""
        self._awaits_attention = True
        """Whether no step has ended yet in which attention was due."""
        self._own_specs: dict[tuple[str, str, str, str], MetricSpec] = {}
        self._modules = ModuleTable(())
        self._expected: list[MetricSpec] = []
        """What is known to come in training besides what rules record."""

    @property
    def module(self) -> nn.Module | None:
        """The module that is monitored; ``None`` before :meth:`set_module`."""
        return self._module

    @property
    def current_step(self) -> int | None:
        """The step that was begun and has not ended, monitored or not, or that of the open validation loop; ``None`` if there is none."""
        return self._begun if self._context is None else self._context.step

    def is_step_monitored(self, step: int) -> bool:
        """Whether the schedule picks a step, a rule with a cadence of its own is due in it, or tensors are captured in it."""
        return self._due(step) is not None

    def is_monitoring(self) -> bool:
        """Whether what happens now is observed: nothing is while torch traces (``torch.export``, ``FakeTensorMode``, any dispatch mode)."""
        return self._context is not None and not self._silences and not is_tracing()

    # The phases of a step

    def begin_step(self, step: int) -> bool:
        """Begin a step; if it is monitored, the hooks go on. A step that an error left open is closed first.

        Args:
            step: Number of the optimizer step. It may be lower than before: after a resume it is.

        Returns:
            Whether the step is monitored.

        Raises:
            ValueError: If no module was set.
        """
        self._join_what_is_open()
        if self._module is None:
            raise ValueError("There is no module to monitor; call set_module(module) before the first step.")
        self._begun = step
        due, self._clock = self._due(step), self.planner.clock(step)
        if due is not None:
            self._open(due, step, TRAIN, self.planner.capture_plan(step))
        return self._context is not None

    def begin_backward(self, scale: Tensor | float | None = None) -> None:
        """The backward pass begins: from now to :meth:`end_backward` gradients that arrive at outputs count.

        Where neither is ever called, all do, as they arrive.

        Args:
            scale: What the loss was multiplied by, shape ``()``: those gradients are divided by it, and values are of the loss
                itself. Of a ``GradScaler`` that is ``scaler.scale(torch.ones((), device=loss.device))``, which unlike
                ``scaler.get_scale()`` reads nothing on the host.
        """
        if self._context is not None:
            self._context.notify("backward pass", Probe.begin_backward, _as_scale(scale))

    def end_backward(self) -> None:
        """The backward pass is over: an ``autograd.grad`` of the user's from now on does not count."""
        if self._context is not None:
            self._context.notify("backward pass", Probe.end_backward)

    def monitor_gradients(
        self, before_clip: bool = False, parameters: Iterable[Tensor] | None = None, scale: Tensor | float | None = None
    ) -> None:
        """Take in the gradients of the parameters, as they are now.

        Args:
            before_clip: Whether they are about to be clipped; they get keys of their own then.
            parameters: Of which parameters, where several optimizers have their own; all without it.
            scale: What they are still multiplied by, where no ``GradScaler.unscale_`` has seen to that; see :meth:`begin_backward`.
        """
        kind = "gradient_before_clip" if before_clip else "gradient"
        among, factor = _identities(parameters), _as_scale(scale)
        self._notify("gradients", Probe.observe_gradients, kind, among, factor)

    def monitor_parameters(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Take in the parameters, as they are now: before the optimizer moves them.

        Args:
            parameters: Which ones, where several optimizers have their own; all without it.
        """
        among = _identities(parameters)
        self._notify("parameters", Probe.observe_parameters, among)

    def monitor_updates(self, parameters: Iterable[Tensor] | None = None, *, is_skipped: bool = False) -> None:
        """Take in what the optimizer did to the parameters since :meth:`monitor_parameters`; :meth:`end_step` does it otherwise.

        Args:
            parameters: Which ones, where several optimizers have their own; all without it.
            is_skipped: Whether the optimizer left them where they were: then the update is 0, whatever anybody else did.
        """
        among = _identities(parameters)
        self._notify("updates", Probe.observe_updates, among, is_skipped=is_skipped)

    def after_micro_batch(self) -> None:
        """End one of several micro-batches of a step."""
        if self._context is not None:
            self._context.notify("micro-batch", Probe.end_micro_batch)

    def end_step(self) -> Record | None:
        """End the step: hooks off, one transfer, values finished.

        Returns:
            The record, if the step was monitored.
        """
        if self.is_in_stage():
            return None
        self._begun = None
        if self._context is None:
            return None
        self.monitor_updates()
        return self._finish() if self._clock is None else self._finish_by_clock(self._clock, self._context)

    def end_comparison(self) -> None:
        """The model has run on what the reference was run on: what of the reference is left over is said, and forgotten."""
        if self._context is not None and self._context.reference is not None:
            self._context.reference.end_micro_batch()

    def begin_stage(self, stage: str, step: int) -> bool:
        """Begin a validation, test or predict loop. A step that is open is suspended until it ends.

        A loop that an error left open is closed first.

        Args:
            stage: ``validation``, ``test`` or ``predict``.
            step: The step that its record gets.

        Returns:
            Whether any rule asks for activations.
        """
        if self._context is not None and self.is_in_stage():
            self._context.lose()
            self.end_stage()
        everything = self.planner.everything()
        plan = self.planner.plan(everything, stage)
        if self._context is not None:
            self._context.set_open(False)
            self._context.set_suspended(True)
        self._suspended.append(self._context)
        self._context = None  # where opening the loop fails, the step around it is not the loop
        self._open(everything, step, stage)
        return bool(plan.modules)

    def is_in_stage(self) -> bool:
        """Whether a loop of another stage than training is monitored now."""
        return bool(self._suspended)

    def end_stage(self) -> Record | None:
        """End the loop that was begun last, and go on with the step that it interrupted.

        Returns:
            The record of the loop.
        """
        if not self._suspended:
            return None
        record = None if self._context is None else self._finish()
        self._context = self._suspended.pop()
        if self._context is not None:
            self._context.set_suspended(False)
        self._set_open()
        return record

    @contextmanager
    def no_monitor(self) -> Iterator[None]:
        """Within the block nothing is observed."""
        silence = object()
        try:
            self._silences.add(silence)
            self._set_open()
            yield
        finally:
            self._silences.discard(silence)
            self._set_open()

    # Inside

    def agree(self) -> None:
        """Make sure that all ranks watch the same: one collective, of every rank. Without it the first step that is monitored begins so.

        Raises:
            ConfigError: On every rank, if rules, schedules or modules differ.
        """
        if self._has_agreed or self.has_lost_ranks or self.distributed is False or self._module is None:
            return
        try:
            if self.ranks is None:
                self.ranks = process_ranks(None if self.distributed is True else self.distributed)
            differences = "" if self.ranks is None else disagreement(self.planner.one_by_one(), self.ranks)
        except RanksLostError as error:
            self.lose_ranks(error)
            return
        if differences:
            raise ConfigError(differences)
        self._has_agreed = self.ranks is not None

    def lose_ranks(self, error: RanksLostError) -> None:
        """Another rank has left: end the monitoring on this one, for good."""
        if self.has_lost_ranks:
            return
        self.has_lost_ranks = True
        self.lose()
        last = self.storage.last_step()
        after = "before the first record" if last is None else f"after the record of step {last}"
        self._reporter.log_once(f"Monitoring ends {after}: {error}. Training goes on.", logging.WARNING)

    def lose(self) -> None:
        """An error: what is open gives no record when it ends, which it must all the same, for other ranks wait for that."""
        for context in (self._context, *self._suspended):
            if context is not None:
                context.lose()

    def _join_what_is_open(self) -> None:
        """Close what an error has left open, in the order in which other ranks have ended it: the loop, then the step around it."""
        self.lose()
        while self._context is not None or self._suspended:
            if self._context is not None:
                self._finish()
            self._context = self._suspended.pop() if self._suspended else None

    def abandon(self) -> None:
        """Close the step, and what it suspended, at once and without a record; other ranks are not told."""
        with ExitStack() as stack:
            for context in (self._context, *self._suspended):
                if context is not None:
                    stack.callback(context.close)
        self._context = self._begun = None
        self._suspended.clear()

    def _due(self, step: int) -> ActiveRules | None:
        """What is due in a step, if it is monitored; where a function of the user's fails, raw tensors alone are captured."""
        try:
            return self.planner.due(step)
        except Exception as error:
            self._reporter.report(f"every_n_steps failed at step {step} ({type(error).__name__}: {error}).", error, "every_n_steps")
            return ActiveRules((), gradient_flow=False) if self.planner.is_captured(step) else None

    def _open(self, due: ActiveRules, step: int, stage: str, captured: Plan | None = None) -> None:
        self.agree()
        if self.has_lost_ranks:
            return
        self._leave_out_what_is_gone()
        plan, sites = self.planner.plan(due, stage), self.planner.index
        state, reducer = self._lasting(due, stage)
        accumulator = StepAccumulator(self._reporter.of_spec, state)
        parameters = {site.name: site.tensor() for site in sites.parameters} if stage == TRAIN else {}
        flat = flat_shards_by_name(parameters, self.wrapper or self._module)
        expected = expected_tensors(plan.parameters_with_functions, [] if captured is None else captured.parameters, flat)
        whole_tensors = WholeTensors(expected, None if reducer is None else reducer.ranks, self._not_captured)
        self._context = StepContext(step, stage, accumulator, reducer, whole_tensors=whole_tensors, reporter=self._reporter)
        probes: list[Probe] = [
            ParameterProbe(
                plan.parameters_by_kind, accumulator, whole_tensors, self._reporter.log_once, self.access, flat, self._reference
            ),
            ActivationProbe(plan.outputs, accumulator, sites.further_name, self._reporter.log_once),
        ]
        shapes = self._modules.probe() if stage == TRAIN else None
        if shapes is not None:
            probes.append(shapes)
        if plan.chain is not None:
            probes.append(GradientFlowProbe(plan.chain, accumulator))
        if captured is not None:
            probes.append(
                CaptureProbe(
                    captured.modules, captured.parameters, sites.further_name, self._not_captured, whole_tensors, access=self.access
                )
            )
        if self._reference is not None:
            probes += self._reference_probes(plan, accumulator, self._reference)
        attention = AttentionProbe(
            plan.modules,
            plan.modules_with_heads,
            accumulator,
            sites.head_name,
            self._reporter.log_once,
            is_asked_for=self.planner.asks_for_attention(due),
        )
        self._context.attach(attention, probes)
        self._set_open()

    def _leave_out_what_is_gone(self) -> None:
        gone = self.planner.leave_out_what_is_gone()
        if gone:
            self._states.clear()
            why = "what took its place is not watched, and there are no more values of it before the next fit"
            self._reporter.log_once(f"{shortened(gone)} was taken out of the model while it trains: {why}.", logging.WARNING)

    def _lasting(self, due: ActiveRules, stage: str) -> tuple[SeriesState, DistributedReducer | None]:
        """What lives from step to step of one plan, and what reduces over ranks; ``None`` where this is the only one."""
        if (stage, due) not in self._states:
            expected = self._expected if stage == TRAIN else []
            specs = [*self.planner.plan(due, stage).all_specs(), *expected]
            reducer = None if self.ranks is None else DistributedReducer(self.ranks, specs)
            self._states[stage, due] = SeriesState(self._units), reducer
        return self._states[stage, due]

    def _reference_probes(self, plan: Plan, accumulator: StepAccumulator, reference: Reference) -> list[Probe]:
        """Those that compare with the reference, and, if any of them will, the one that keeps what it gives."""
        name, say = self.planner.index.further_name, self._reporter.log_once
        reference_calls = ReferenceProbe(reference, functools.partial(self._failed, "The reference could not run", "reference"), say)
        probes: list[Probe] = [
            DifferenceProbe(plan.modules, accumulator, reference_calls, name),
            CoordinateCheckProbe(
                plan.modules, accumulator, reference_calls, self._own_spec(OWN_KIND, "", RCC_SKIPPED_CALLS, TRAIN), name, say
            ),
        ]
        # The last to be attached: by then it is known what is wanted of it.
        return [*probes, reference_calls] if reference_calls.is_needed() else []

    def _notify(self, what: str, moment: Callable[..., None], *args: object, **kwargs: object) -> None:
        if self._context is not None and self.is_monitoring():
            self._context.notify(what, moment, *args, **kwargs)

    def _failed(self, what: str, once: str, error: Exception) -> None:
        """Report and count an error that costs some values of the open step.

        Raises:
            MonitorError: If errors are to be raised.
        """
        if self._context is not None:
            self._context.accumulator.num_errors += 1
        name, cause = type(error).__name__, str(error).strip().partition("\n")[0]
        self._reporter.report(f"{what} ({name}: {cause}).", error, f"{once} {name}")

    def _set_open(self) -> None:
        if self._context is not None:
            self._context.set_open(not self._silences)

    def _finish(self) -> Record | None:
        """Close the context and finish what it saw; ``None`` if an error has spoiled that, on any rank, or another rank has left."""
        if self.has_lost_ranks:
            self._context = None  # it was closed, and no rank waits for its end
            return None
        try:
            return self._finished()
        except RanksLostError as error:
            self.lose_ranks(error)
            return None

    @unchanged_grad_mode()
    def _finished(self) -> Record | None:
        assert self._context is not None
        context, tensors = self._context, []
        try:
            tensors = context.finish_probes()
        finally:
            with self._reporter.guard("hooks", context.accumulator):
                context.close()
            # Not before: what Ctrl-C has left on is taken off by whoever closes this monitor.
            self._context = None
        if context.has_missed():
            self._reporter.log_once(Unobserved.message, logging.WARNING)
        values: Values | dict[str, float] = Values()
        # Of the other kinds nothing is measured; to find out takes as long as all else at the end of a step.
        by_users = [spec for spec in self._own_specs.values() if spec.kind not in (OWN_KIND, CONTEXT_KIND)]
        for key in context.accumulator.drop_overwriting(by_users):
            self._reporter.log_once(f"{key!r} is logged, and is measured too: what is measured is recorded.", logging.WARNING)
        with self._reporter.guard("values", context.accumulator):
            values = collected = context.accumulator.collect(context.reducer)
            values = context.with_derived(collected)
        if context.accumulator.is_lost:
            return None
        if self._awaits_attention and context.attention is not None and context.attention.is_asked_for:
            self._awaits_attention = False
            if not context.attention.has_observed and self._speaks_for_all():
                self._reporter.log_once(f"attention: step {context.step} {_NO_ATTENTION}", logging.WARNING)
        values[self.planner.own_key("errors", context.stage)] = float(context.accumulator.num_errors)
        findings: list[Finding] = []
        if context.reducer is not None and context.stage == TRAIN:
            differing = context.accumulator.differing
            values[self.planner.own_key(RANK_DISAGREEMENT)] = float(len({spec.site for spec in differing}))
            findings = self._replicas.examine(context.step, differing)
        record = Record(context.step, values, context.accumulator.histograms, tensors, findings, self._modules.modules())
        self.storage.add(record)
        return record

    def _finish_by_clock(self, clock: MinutesSchedule, context: StepContext) -> Record | None:
        """Finish a step that the clock picked, and choose the next one: by the time that all ranks have in their record."""
        seconds = clock.seconds_per_step(context.step)
        if seconds is not None:
            spec, function = self._own_spec(OWN_KIND, "", SECONDS_PER_STEP, TRAIN), UserFunction(SECONDS_PER_STEP, float, "max")
            context.accumulator.add_result(spec, function, seconds, 1)
        record = self._finish()
        values: Mapping[str, float] = {} if record is None else record.values
        clock.decide(context.step, values.get(self.planner.own_key(SECONDS_PER_STEP), math.nan))
        return record

    def _own_spec(self, kind: str, site: str, name: str, stage: str) -> MetricSpec:
        """What stands for a value that no probe takes: always the same for the same key, on every rank, whatever else there is."""
        return self._own_specs.setdefault((kind, site, name, stage), MetricSpec(kind, site, stage, self.planner.prefix))

    def _not_captured(self, what: str, error: Exception) -> None:
        self._failed(f"{what} could not be captured", "capture", error)

    def _speaks_for_all(self) -> bool:
        return self.distributed is False or is_first_process()


def _identities(parameters: Iterable[Tensor] | None) -> Among:
    return None if parameters is None else frozenset(map(id, parameters))


def _as_scale(scale: Tensor | float | None) -> Tensor | None:
    return torch.tensor(scale, dtype=torch.float64, device="cpu") if isinstance(scale, float | int) else scale
