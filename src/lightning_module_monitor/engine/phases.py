"""The phases of a step: hooks are attached, tensors observed, hooks removed, values finished. Without a Trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from lightning_module_monitor.config.rules import Rule
from lightning_module_monitor.engine.observed_model import ObservedModel
from lightning_module_monitor.engine.step_context import StepContext
from lightning_module_monitor.errors import RanksLostError
from lightning_module_monitor.kinds import CONTEXT_KIND, KINDS, OWN_KIND, RANK_DISAGREEMENT, SECONDS_PER_STEP, TRAIN
from lightning_module_monitor.model.hooks import Unobserved, is_capturing, is_tracing
from lightning_module_monitor.plan.recipe import ActiveRules, Recipe
from lightning_module_monitor.probes.base import ErrorReporter, Gate, unchanged_grad_mode
from lightning_module_monitor.record import Finding, NumbersOfStep, RawTensor, Record
from lightning_module_monitor.sinks.recent_records import StorageManager
from lightning_module_monitor.statistics.functions import Aggregate
from lightning_module_monitor.step.accumulator import StepAccumulator

_NO_ATTENTION = (
    "called none of F.scaled_dot_product_attention, F.multi_head_attention_forward and nn.MultiheadAttention, and no attention is "
    'recorded. Try attn_implementation="sdpa" for a Hugging Face model, and monitor_scaled_dot_product_attention in a forward of your own.'
)


class StepEngine:
    """The phases of a step in any loop; :class:`~lightning_module_monitor.monitor.ModuleMonitor` documents those that users call.

    Args:
        recipe: What is recorded, and when.
        reporter: Reports errors.
        storage: Keeps the records.
    """

    def __init__(self, recipe: Recipe, reporter: ErrorReporter, storage: StorageManager) -> None:
        self.base_recipe = recipe
        """The options that select what is recorded, for any module."""
        self._reporter = reporter
        self._storage = storage
        self.gate = Gate()
        """Hooks ask it whether to observe."""
        self.observed: ObservedModel | None = None
        """The module that is monitored; ``None`` where none is set."""
        self.open_step: StepContext | None = None
        """The step, or the loop of another stage, that is open and monitored; ``None`` if there is none."""
        self._unopened: StepAccumulator | None = None
        """The accumulator of a step or loop that an error keeps from being opened."""
        self._suspended: list[StepContext | None] = []
        """The step that the open loop of another stage has suspended, ``None`` if it is not monitored; empty without such a loop."""
        self.begun: int | None = None
        """The step that was begun and has not ended, monitored or not."""
        self.findings: list[Finding] = []
        """Findings of the engine itself, about ranks that disagree, until the health controller takes them."""
        self.has_lost_ranks = False
        """Whether another rank has left: nothing is monitored any more, and training goes on."""

    @property
    def model(self) -> ObservedModel:
        """The module that is monitored.

        Raises:
            ValueError: If none is set.
        """
        if self.observed is None:
            raise ValueError("There is no module to monitor; call set_module(module) before the first step.")
        return self.observed

    @property
    def recipe(self) -> Recipe:
        """The options that apply now, with those that were added for the module that is set."""
        return self.base_recipe if self.observed is None else self.observed.planner.recipe

    @property
    def observing_step(self) -> StepContext | None:
        """The open step if it observes what happens now."""
        return self.open_step if self.is_monitoring() else None

    def is_monitoring(self) -> bool:
        """Whether what happens now is observed."""
        # In this order: compiled code reads no state of ours.
        return not is_tracing() and self.gate.observer is not None and not (self.gate.may_be_captured and is_capturing())

    def due(self, step: int) -> ActiveRules | None:
        """The rules that are due in a step, if it is monitored; where a user's schedule function fails, raw tensors alone are captured."""
        try:
            return self.recipe.due(step)
        except Exception as error:
            message = f"every_n_steps failed at step {step} ({type(error).__name__}: {error}): no rule is due in such a step."
            self._reporter.report(message, error, "every_n_steps", is_counted=False)
            return ActiveRules((), gradient_flow=False, gradient_noise=False) if self.recipe.is_captured(step) else None

    # A step

    def begin_step(self, step: int) -> bool:
        """Begin a step; returns whether it is monitored. A step that an error left open is closed first."""
        self.discard()
        # In the order in which other ranks have ended it: the loop, then the step around it.
        self.end_stage()
        if self._unopened is not None:
            self._end_unopened()
        if self.open_step is not None:
            self._finish(self.open_step)
        model = self.model
        self.begun = step
        due = self.due(step)
        if due is not None:
            self._open(model, due, step, TRAIN)
        return self.open_step is not None

    def monitor_figure(self, name: str, value: Tensor | float) -> None:
        """Record one of the monitor's own figures in this step: ``monitor/<name>`` is the largest of all ranks."""
        if self.open_step is not None and not is_tracing():
            self.add(self.open_step, OWN_KIND, name, value, "max")

    def add(self, context: StepContext, kind: str, name: str, value: Tensor | float, aggregate: Aggregate, *, site: str = "") -> None:
        """Add a value that no probe observes to a step; a tensor is not read before the step ends."""
        stream = self.model.stream_of_value(kind, name, aggregate, site=site, stage=context.stage)
        context.accumulator.add_value(stream, name, value)

    def add_at_once(self, step: int, key: str, value: Tensor | float) -> None:
        """Record a value in a step that is not monitored; what is no number is reported, and not recorded."""
        try:
            self._storage.add(Record.of(step, {key: float(value)}))
        except Exception as error:
            message = f"The value of {key!r} could not be recorded ({type(error).__name__}: {error})."
            self._reporter.report(message, error, is_counted=False)

    def end_step(self) -> Record | None:
        """End the step: hooks off, one transfer, values finished; returns the record, if the step was monitored."""
        if self._suspended:
            return None
        self.begun = None
        context = self.open_step
        if context is None:
            if self._unopened is not None:
                self._end_unopened()
            return None
        if self.is_monitoring():
            context.observe_updates()
        if context.clock is None:
            return self._finish(context)
        seconds = context.clock.seconds_per_step(context.step)
        if seconds is not None:
            self.monitor_figure(SECONDS_PER_STEP, seconds)
        record = self._finish(context)
        # All ranks have the same time in their record, and choose the same next step.
        seconds = math.nan if record is None else record.get(self.recipe.figure_key(SECONDS_PER_STEP))
        context.clock.decide(context.step, seconds)
        return record

    def discard(self) -> None:
        """Discard the open steps after an error: they give no record. End them as usual, because other ranks wait for that."""
        for context in self._open_steps():
            context.discard()

    def drop_steps(self) -> None:
        """Close the step, and the step that it suspended, at once and without a record, on this rank alone."""
        self.begun = None
        with ExitStack() as stack:
            for context in self._open_steps():
                stack.callback(context.close)
        self._go_on_with(None)
        self._unopened = None
        self._suspended.clear()

    def add_rule(self, rule: Rule, label: str, *, is_optional: bool) -> None:
        """Add a rule, which messages call ``label``; from the next step on it counts. An optional rule may match nothing.

        Raises:
            ConfigError: If it is wrong, or matches nothing in the module.
        """
        parsed = self.recipe.parsed(rule, label, is_optional=is_optional)
        if self.observed is not None:
            self.observed.add_rule(parsed)
        self.base_recipe = self.base_recipe.with_rule(parsed)

    def leave_out(self, kinds: Collection[str]) -> list[str]:
        """Set the kinds that are never recorded; returns those that a rule or a capture asks for."""
        recipe = self.base_recipe = replace(self.base_recipe, left_out=frozenset(kinds))
        named = {kind for rule in (*recipe.rules, *recipe.captures) for kind in rule.kinds}
        return [kind for kind in kinds if kind in named]

    def close(self) -> None:
        """Close what is open, without a record, and leave the other ranks; a second call does no harm."""
        self.drop_steps()
        if self.observed is not None and self.observed.ranks is not None:
            self.observed.ranks.close()

    # The reference

    def awaits_reference(self) -> bool:
        """Whether the step that is open compares the model's activations with the reference's, which is to be run first."""
        probe = None if self.open_step is None else self.open_step.reference
        return probe is not None and not probe.reference.follows and not is_tracing()

    def run_reference(self, call: Callable[[], object]) -> None:
        """Run the reference; an error is reported and counted, and training continues.

        Args:
            call: Runs it, e.g. by its ``training_step``. A second time if it needs tensors for a backward pass of its own.

        Raises:
            MonitorError: If errors are to be raised.
        """
        if self.open_step is not None and self.open_step.reference is not None:
            with self.gate.closed():
                self.open_step.reference.run(call)

    def end_comparison(self) -> None:
        """The model has run on the input of the reference: calls of the reference that are left over are reported, and released."""
        if self.open_step is not None and self.open_step.reference is not None:
            self.open_step.reference.end_micro_batch()

    # Loops of other stages

    def begin_stage(self, stage: str, step: int) -> bool:
        """Begin a validation, test or predict loop, and suspend the open step. A loop that an error left open is closed first.

        Args:
            stage: ``validation``, ``test`` or ``predict``.
            step: The step that its record gets.

        Returns:
            Whether any rule records something at modules.
        """
        if self._suspended:
            if self.open_step is not None:
                self.open_step.discard()
            self.end_stage()
        everything = self.recipe.everything()
        plan = self.model.planner.plan(everything, stage)
        self._suspended.append(self.open_step)
        self._go_on_with(None)  # where opening the loop fails, the step around it is not the loop
        self._open(self.model, everything, step, stage)
        return bool(plan.modules)

    def end_stage(self) -> Record | None:
        """End the loop that was begun last, and go on with the step that it interrupted; returns the record of the loop."""
        if not self._suspended:
            return None
        self._end_unopened()
        record = None if self.open_step is None else self._finish(self.open_step)
        self._go_on_with(self._suspended.pop())
        return record

    # Ranks

    def check_agreement(self) -> None:
        """Make sure that all ranks record the same: one collective, of every rank.

        Raises:
            ConfigError: On every rank, if rules, schedules or modules differ.
        """
        try:
            if not self.has_lost_ranks:
                self.model.check_agreement()
        except RanksLostError as error:
            self.lose_ranks(error)

    def lose_ranks(self, error: RanksLostError) -> None:
        """Another rank has left: end the monitoring on this one, for good."""
        if self.has_lost_ranks:
            return
        self.has_lost_ranks = True
        self.discard()
        last = self._storage.last_step()
        after = "before the first record" if last is None else f"after the record of step {last}"
        self._reporter.log_once(f"Monitoring ends {after}: {error}. Training goes on.", logging.WARNING)

    # Inside

    def _open_steps(self) -> list[StepContext]:
        return [context for context in (self.open_step, *self._suspended) if context is not None]

    def _go_on_with(self, context: StepContext | None) -> None:
        """Continue with this step, or with none: hooks give their tensors to its accumulator."""
        self.open_step = context
        self.gate.current = None if context is None else context.accumulator

    def _open(self, model: ObservedModel, due: ActiveRules, step: int, stage: str) -> None:
        self.check_agreement()
        if not self.has_lost_ranks:
            model.read_names_again()
            self.gate.may_be_captured = torch.cuda.is_initialized()
            # First: if anything below fails, other ranks wait for its end all the same.
            self._unopened = StepAccumulator(model.reporter.of_stream, model.state(due, stage), model.gate.closed)
            context = StepContext(model, due, step, stage, self._unopened)
            self._unopened = None
            self._go_on_with(context)
            context.attach()

    def _end_unopened(self) -> None:
        """Inform other ranks, which wait for this step or loop, that it could not be opened here: no rank makes a record of it."""
        accumulator, self._unopened = self._unopened, None
        if accumulator is None or self.model.ranks is None or self.has_lost_ranks:
            return
        accumulator.is_lost = True
        try:
            accumulator.collect(self.model.ranks)
        except RanksLostError as error:
            self.lose_ranks(error)

    def _finish(self, context: StepContext) -> Record | None:
        """Close the context and finish its values; ``None`` if an error has ended the step, on any rank, or another rank has left."""
        if self.has_lost_ranks:
            self._go_on_with(None)  # it was closed, and no rank waits for its end
            return None
        try:
            with unchanged_grad_mode():
                return self._make_record(context)
        except RanksLostError as error:
            self.lose_ranks(error)
            return None

    def _make_record(self, context: StepContext) -> Record | None:
        model, accumulator = self.model, context.accumulator
        tensors = self._end_probes(context)
        numbers = _numbers(context, self._reporter)
        if accumulator.is_lost:
            return None
        _report_attention(context, self._reporter)
        numbers.put(context.errors_key, float(accumulator.num_errors))
        if model.ranks is not None and context.stage == TRAIN:
            # Optimizers that share out their work keep a state on one rank alone.
            differing = [stream for stream in accumulator.differing if not KINDS[stream.kind].of_states]
            numbers.put(self.recipe.figure_key(RANK_DISAGREEMENT), float(len({stream.site for stream in differing})))
            self.findings += model.replicas.examine(context.step, differing)
        record = Record(context.step, numbers.columns, numbers.finished(), accumulator.histograms, tensors, model.table.modules())
        self._storage.add(record)
        return record

    def _end_probes(self, context: StepContext) -> list[RawTensor]:
        """End the probes of a step; returns its raw tensors. Modules that did not run, and code that torch traced, are reported."""
        try:
            tensors = context.finish_probes()
        finally:
            with self._reporter.guard("hooks", context.accumulator):
                context.close()
            # Later than close(): if Ctrl-C interrupts it, the hooks that are left are removed when this monitor is closed.
            self._go_on_with(None)
        if Unobserved.number > context.num_unobserved:
            self._reporter.log_once(Unobserved.message, logging.WARNING)
        if context.stage == TRAIN and self.model.awaits_first_step:
            self.model.awaits_first_step = False
            self.model.report_not_run(context.step)
        return tensors


def _numbers(context: StepContext, reporter: ErrorReporter) -> NumbersOfStep:
    """The numbers of a step, of all ranks together; none after an error. A logged value that is measured too is reported."""
    model, numbers = context.model, NumbersOfStep(context.model.columns[context.stage])
    # Values of the other kinds are never measured, and a search among them takes as long as the rest of the end of a step.
    logged_streams = [stream for stream in model.logged.values() if stream.kind not in (OWN_KIND, CONTEXT_KIND)]
    for key in context.accumulator.drop_overwriting(logged_streams):
        reporter.log_once(f"{key!r} is logged, and is measured too: what is measured is recorded.", logging.WARNING)
    with reporter.guard("values", context.accumulator):
        numbers = context.accumulator.collect(model.ranks)
        for probe in context.deriving:
            probe.derive(numbers)
    return numbers


def _report_attention(context: StepContext, reporter: ErrorReporter) -> None:
    """Report, once, whether the first step with a rule about attention has observed any."""
    if context.attention is None or not context.attention.is_requested or not context.model.awaits_attention:
        return
    context.model.awaits_attention = False
    if context.attention.has_observed:
        reporter.suppress("attention")
    elif reporter.is_first():
        reporter.log_once(f"attention: step {context.step} {_NO_ATTENTION}", logging.WARNING, "attention")
