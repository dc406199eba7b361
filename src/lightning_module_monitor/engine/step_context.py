"""One step, or one validation loop, while it is observed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.model.compiled import Uncompiled
from lightning_module_monitor.model.hooks import Unobserved
from lightning_module_monitor.probes.attention import AttentionProbe
from lightning_module_monitor.probes.base import Probe, StepTools
from lightning_module_monitor.probes.capture import CaptureProbe
from lightning_module_monitor.probes.parameters import ParameterTap
from lightning_module_monitor.probes.reference import ReferenceProbe
from lightning_module_monitor.probes.reporting import unchanged_grad_mode
from lightning_module_monitor.probes.tap import ModuleTap
from lightning_module_monitor.record import RawTensor
from lightning_module_monitor.statistics.accumulator import StepAccumulator


@dataclass(eq=False)
class StepContext:
    """One step, or one loop of another stage, while it is observed: its probes and what they observe."""

    step: int
    stage: str
    tools: StepTools
    ranks: Ranks | None
    parameters: ParameterTap
    modules: ModuleTap
    capture: CaptureProbe
    reference: ReferenceProbe | None
    """Keeps what the reference computes, if that is needed."""
    attention: AttentionProbe | None
    """A model can report attention to it by hand; ``None`` in a step that was lost."""
    probes: Sequence[Probe]
    """All of them, in the order in which they register their hooks."""
    uncompiled: Uncompiled | None
    """Given where compiled code runs uncompiled in the step."""
    _num_unobserved: int = field(default_factory=lambda: Unobserved.number)

    @property
    def accumulator(self) -> StepAccumulator:
        """Everything that is observed."""
        return self.tools.accumulator

    def attach(self) -> None:
        """Register the hooks of the probes."""
        if self.uncompiled is not None:
            self.uncompiled.begin()
        for probe in self.probes:
            probe.attach()

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
        self.attention, self.probes = None, ()
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
        with self.guard("whole tensors"):
            self.parameters.assemble()
        self._each("what has waited", lambda probe: probe.finish())
        tensors: list[RawTensor] = []
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
