"""One step, or one validation loop, while it is observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from lightning_module_monitor.distributed.reduce import DistributedReducer
from lightning_module_monitor.model.compiled import Uncompiled
from lightning_module_monitor.model.hooks import Unobserved
from lightning_module_monitor.probes.attention import AttentionProbe
from lightning_module_monitor.probes.base import Probe, StepTools
from lightning_module_monitor.probes.parameters import WholeTensors
from lightning_module_monitor.probes.reference import ReferenceProbe
from lightning_module_monitor.probes.reporting import unchanged_grad_mode
from lightning_module_monitor.record import RawTensor


class StepContext:
    """One step, or one loop of another stage, while it is observed: its probes and what they observe.

    Compiled code runs uncompiled in it if ``uncompiled`` is given.
    A model can report attention by hand to the probe ``attention``, so that it is apart from the other ``probes``.
    """

    def __init__(
        self,
        step: int,
        stage: str,
        tools: StepTools,
        reducer: DistributedReducer | None,
        *,
        whole_tensors: WholeTensors,
        attention: AttentionProbe,
        probes: Sequence[Probe],
        uncompiled: Uncompiled | None,
    ) -> None:
        self.step = step
        self.stage = stage
        self.accumulator = tools.accumulator
        self.reducer = reducer
        self.whole_tensors = whole_tensors
        self._reporter = tools.reporter
        self.attention: AttentionProbe | None = attention
        """``None`` in a step that was lost."""
        self.probes: Sequence[Probe] = (*probes, attention)
        self._uncompiled = uncompiled
        self._num_unobserved = Unobserved.number

    def attach(self) -> None:
        """Register the hooks of the probes."""
        if self._uncompiled is not None:
            self._uncompiled.begin()
        for probe in self.probes:
            probe.attach()

    @property
    def reference(self) -> ReferenceProbe | None:
        """The probe that keeps what the reference computes, if it is needed."""
        return next((probe for probe in self.probes if isinstance(probe, ReferenceProbe)), None)

    def has_missed(self) -> bool:
        """Whether something was not observed because torch traced it."""
        return Unobserved.number > self._num_unobserved

    def set_open(self, is_open: bool) -> None:
        """Whether what happens from now on is observed."""
        for probe in self.probes:
            probe.is_open = is_open

    def set_suspended(self, is_suspended: bool) -> None:
        """Whether a loop of another stage runs in the middle of the step."""
        for probe in self.probes:
            probe.is_suspended = is_suspended

    def close(self) -> None:
        """Remove every hook and release every tensor; a second call closes what an error or Ctrl-C in the first has left."""
        with ExitStack() as stack:
            if self._uncompiled is not None:
                stack.callback(self._uncompiled.end)
            for probe in reversed(self.probes):
                stack.callback(probe.close)

    def lose(self) -> None:
        """Discard everything that was observed: no rank makes a record."""
        self.close()
        self.attention, self.probes = None, ()
        self.whole_tensors.forget()
        self.accumulator.is_lost = True

    def notify(self, what: str, moment: Callable[..., None], *args: object, **kwargs: object) -> None:
        """Call a method of ``Probe`` on every probe that overrides it; an error in one keeps it from no other."""
        with unchanged_grad_mode():
            for probe in self.probes:
                if probe.overrides(moment):
                    with self._reporter.guard(what, self.accumulator):
                        getattr(probe, moment.__name__)(*args, **kwargs)

    def finish_probes(self) -> list[RawTensor]:
        """Let the probes finish what waits for the end of the step; returns the raw tensors of the step."""
        with self._reporter.guard("whole tensors", self.accumulator):
            self.whole_tensors.assemble()
        self.notify("what has waited", Probe.finish)
        tensors: list[RawTensor] = []
        for probe in self.probes:
            if probe.overrides(Probe.tensors):
                with self._reporter.guard("raw tensors", self.accumulator):
                    tensors += probe.tensors()
        return tensors

    def derive(self, values: dict[str, float]) -> None:
        """Let some probes put what they derive from values in their place."""
        for probe in self.probes:
            if probe.overrides(Probe.derive):
                probe.derive(values)
