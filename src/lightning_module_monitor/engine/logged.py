"""Values that no probe observes: the monitor's own figures, the context of training, and what users log."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_module_monitor.engine.step_context import StepContext
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.record import CONTEXT_KIND, OWN_KIND, TRAIN
from lightning_module_monitor.statistics.functions import Aggregate, Value
from lightning_module_monitor.statistics.stream import Identity, Stream


class LoggedValues:
    """Adds values to the open step, each of the same stream in every step and on every rank."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._streams: dict[Identity, Stream] = {}
        self.expected: list[Stream] = []
        """Streams announced before the first step."""

    def stream(self, kind: str, name: str, aggregate: Aggregate, *, site: str = "", stage: str = TRAIN) -> Stream:
        """The stream of a value: the same object in every step, while the aggregate is the same."""
        value = Value(aggregate)
        stream = self._streams.get((kind, site, name, stage))
        if stream is None or stream.values[name] != value:
            stream = self._streams[kind, site, name, stage] = Stream(kind, site, {name: value}, stage, self._prefix)
        return stream

    def of_users(self) -> list[Stream]:
        """The streams of what users log."""
        return [stream for stream in self._streams.values() if stream.kind not in (OWN_KIND, CONTEXT_KIND)]

    def expect_context(self, aggregates: Mapping[str, str]) -> None:
        """Announce values of the context, by their names, with the aggregate of each."""
        self.expected = [self.stream(CONTEXT_KIND, name, aggregate) for name, aggregate in aggregates.items()]

    def add(self, context: StepContext, kind: str, name: str, value: Tensor | float, aggregate: Aggregate, *, site: str = "") -> None:
        """Add a value to a step; a tensor is not read before the step ends."""
        value, size = (plain(value).detach(), plain(value).numel()) if isinstance(value, Tensor) else (value, 1)
        context.accumulator.add_result(self.stream(kind, name, aggregate, site=site, stage=context.stage), name, value, size)
