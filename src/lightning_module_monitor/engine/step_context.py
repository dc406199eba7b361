"""A step, or a loop of another stage, while it is observed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.config.schedule import MinutesSchedule
from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.model.compiled import Uncompiled
from lightning_module_monitor.model.hooks import Unobserved
from lightning_module_monitor.plan.plan import Plan
from lightning_module_monitor.probes.attention import AttentionProbe
from lightning_module_monitor.probes.base import Among, Probe, StepTools
from lightning_module_monitor.probes.capture import CaptureProbe
from lightning_module_monitor.probes.gradient_noise import GradientNoiseProbe
from lightning_module_monitor.probes.parameters import ParameterTap
from lightning_module_monitor.probes.reference import ReferenceProbe
from lightning_module_monitor.probes.reporting import failing_alone, unchanged_grad_mode
from lightning_module_monitor.probes.tap import ModuleTap
from lightning_module_monitor.record import RawTensor
from lightning_module_monitor.statistics.accumulator import StepAccumulator


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
    num_unobserved: int = field(default_factory=lambda: Unobserved.number)
    """How much had not been observed before the step because torch traced it."""

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

    def observe_gradients(self, kind: str, parameters: Iterable[Tensor] | None, scale: Tensor | float | None) -> None:
        """Observe the gradients of some parameters, or of all."""
        among = _identities(parameters)
        if self.parameters is not None:
            with self.guard("gradients"):
                self.parameters.observe_gradients(kind, among, as_scale(scale))
        if self.noise is not None:
            with self.guard("gradient noise"):
                self.noise.observe_gradients(among, as_scale(scale))

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

    def _each(self, what: str, act: Callable[[Probe], None]) -> None:
        """Let every probe act; an error in one does not affect the others."""
        with unchanged_grad_mode(), torch.no_grad():
            for probe in self.probes:
                with failing_alone(lambda error: self.tools.reporter.not_taken(what, error, self.accumulator)):
                    act(probe)


def _identities(parameters: Iterable[Tensor] | None) -> Among:
    return None if parameters is None else frozenset(map(id, parameters))


def as_scale(scale: Tensor | float | None) -> Tensor | None:
    """A scale of the loss as a tensor."""
    return torch.tensor(scale, dtype=torch.float64, device="cpu") if isinstance(scale, float | int) else scale
