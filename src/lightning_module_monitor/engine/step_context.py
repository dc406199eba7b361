"""Steps, and loops of other stages, while they are observed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.config.schedule import MinutesSchedule
from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.model.compiled import Uncompiled
from lightning_module_monitor.model.hooks import Unobserved
from lightning_module_monitor.plan.plan import Plan
from lightning_module_monitor.probes.attention import AttentionProbe
from lightning_module_monitor.probes.base import Among, Gate, Probe, StepTools
from lightning_module_monitor.probes.capture import CaptureProbe
from lightning_module_monitor.probes.gradient_noise import GradientNoiseProbe
from lightning_module_monitor.probes.parameters import ParameterTap
from lightning_module_monitor.probes.reference import ReferenceProbe
from lightning_module_monitor.probes.reporting import unchanged_grad_mode
from lightning_module_monitor.probes.tap import ModuleTap
from lightning_module_monitor.record import RawTensor
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.stream import Stream


@dataclass(eq=False)
class StepContext:
    """One step, or one loop of another stage, while it is observed: its probes, and the accumulator that they fill."""

    step: int
    plan: Plan
    tools: StepTools
    ranks: Ranks | None
    modules: ModuleTap
    probes: list[Probe]
    """All probes, in the order in which they register their hooks. A probe that the plan does not need is not made."""
    stage: str
    errors_key: str
    """The key of the number of errors."""
    parameters: ParameterTap | None
    capture: CaptureProbe | None
    reference: ReferenceProbe | None
    """Keeps what the reference computes."""
    attention: AttentionProbe | None
    noise: GradientNoiseProbe | None
    clock: MinutesSchedule | None
    """The schedule, if it picked the step by the clock."""
    uncompiled: Uncompiled | None
    """Has compiled code run uncompiled in the step."""
    _num_unobserved: int = field(default_factory=lambda: Unobserved.number)

    @property
    def accumulator(self) -> StepAccumulator:
        """The values of the step."""
        return self.tools.accumulator

    def attach(self) -> None:
        """Register the hooks of the probes."""
        if self.uncompiled is not None:
            self.uncompiled.begin()
        for probe in self.probes:
            probe.attach()

    def add(self, stream: Stream, name: str, value: Tensor | float) -> None:
        """Add a value that no probe observes; a tensor is not read before the step ends."""
        value, size = (plain(value).detach(), plain(value).numel()) if isinstance(value, Tensor) else (value, 1)
        self.accumulator.add_result(stream, name, value, size)

    def observe_gradients(self, kind: str, parameters: Iterable[Tensor] | None, scale: Tensor | float | None) -> None:
        """Observe the gradients of some parameters, or of all."""
        among = _identities(parameters)
        if self.parameters is not None:
            with self.guard("gradients"):
                self.parameters.observe_gradients(kind, among, as_scale(scale))
        if self.noise is not None:
            with self.guard("gradient noise"):
                self.noise.observe_gradients(among, as_scale(scale))

    def count_samples(self, number: float | Tensor) -> None:
        """The micro-batch that runs has so many samples."""
        if self.noise is not None:
            self.noise.count_samples(number)

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

    def attention_by_hand(self) -> AttentionProbe:
        """The probe to which a model reports calls of attention; without hooks where no rule is about attention."""
        if self.attention is None:
            self.attention = AttentionProbe(self.plan.modules, (), self.tools, is_requested=False)
            self.probes.append(self.attention)
        return self.attention

    def has_missed(self) -> bool:
        """Whether something was not observed because torch traced it."""
        return Unobserved.number > self._num_unobserved

    def close(self) -> None:
        """Remove every hook and release every tensor; a second call closes what an error or Ctrl-C in the first has left."""
        with ExitStack() as stack:
            if self.uncompiled is not None:
                stack.callback(self.uncompiled.end)
            for probe in reversed(self.probes):
                stack.callback(probe.close)

    def lose(self) -> None:
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
                self.parameters.assemble()
        self._each("what has waited", lambda probe: probe.finish())
        tensors: list[RawTensor] = []
        if self.capture is not None:
            with self.guard("raw tensors"):
                tensors += self.capture.tensors()
        return tensors

    def derive(self, values: dict[str, float]) -> None:
        """Replace values by what some probes derive from them."""
        for probe in self.probes:
            probe.derive(values)

    def _each(self, what: str, act: Callable[[Probe], None]) -> None:
        """Let every probe act; an error in one does not affect the others."""
        with unchanged_grad_mode(), torch.no_grad():
            for probe in self.probes:
                try:
                    act(probe)
                except MonitorError:
                    raise
                except Exception as error:
                    self.tools.reporter.not_taken(what, error, self.accumulator)


class OpenSteps:
    """The step that is open, and the steps that loops of other stages have suspended; the gate follows."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.current: StepContext | None = None
        """The step, or the loop, that runs; ``None`` where none is observed."""
        self.suspended: list[StepContext | None] = []
        """Innermost last; ``None`` for a step that is not monitored."""

    def go_on_with(self, context: StepContext | None) -> None:
        """Continue with this step, or with none: hooks give their tensors to its accumulator."""
        self.current = context
        self._gate.enter(None if context is None else context.accumulator)

    def suspend(self) -> None:
        """A loop of another stage begins in the middle of the step."""
        self.suspended.append(self.current)
        self.go_on_with(None)

    def resume(self) -> None:
        """The loop that was begun last is over."""
        self.go_on_with(self.suspended.pop() if self.suspended else None)

    def lose(self) -> None:
        """After an error the open steps give no record when they end, which they must all the same: other ranks wait for that."""
        for context in (self.current, *self.suspended):
            if context is not None:
                context.lose()

    def close(self) -> None:
        """Close all of them at once and without a record, on this rank alone."""
        with ExitStack() as stack:
            for context in (self.current, *self.suspended):
                if context is not None:
                    stack.callback(context.close)
        self.go_on_with(None)
        self.suspended.clear()


def _identities(parameters: Iterable[Tensor] | None) -> Among:
    return None if parameters is None else frozenset(map(id, parameters))


def as_scale(scale: Tensor | float | None) -> Tensor | None:
    """A scale of the loss as a tensor."""
    return torch.tensor(scale, dtype=torch.float64, device="cpu") if isinstance(scale, float | int) else scale
