"""Values that no probe observes: the monitor's own figures, the context of training, and what users log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_module_monitor.engine.step_context import StepContext
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.record import CONTEXT_KIND, OWN_KIND, TRAIN
from lightning_module_monitor.statistics.functions import UserFunction
from lightning_module_monitor.statistics.spec import MetricSpec


class LoggedValues:
    """Adds values to the open step, each with the same specification in every step and on every rank."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._specs: dict[tuple[str, str, str, str], MetricSpec] = {}
        self.expected: list[MetricSpec] = []
        """Those that are known beforehand, besides the specifications of the rules."""

    def spec(self, kind: str, name: str, *, site: str = "", stage: str = TRAIN) -> MetricSpec:
        """The specification of a value, which is the same object in every step."""
        return self._specs.setdefault((kind, site, name, stage), MetricSpec(kind, site, stage, self._prefix))

    def of_users(self) -> list[MetricSpec]:
        """The specifications of what users log."""
        return [spec for spec in self._specs.values() if spec.kind not in (OWN_KIND, CONTEXT_KIND)]

    def expect_context(self, aggregates: Mapping[str, str]) -> None:
        """Announce values of the context, by their names, with the aggregate of each."""
        specs = [(self.spec(CONTEXT_KIND, name), UserFunction(name, float, aggregate)) for name, aggregate in aggregates.items()]
        self.expected = [spec.with_function(function) for spec, function in specs]

    def add(
        self,
        context: StepContext,
        kind: str,
        name: str,
        value: Tensor | float,
        aggregate: str | Callable[[Tensor], Any],
        *,
        site: str = "",
    ) -> None:
        """Add a value to a step; a tensor is not read before the step ends."""
        spec, function = self.spec(kind, name, site=site, stage=context.stage), UserFunction(name, float, aggregate)
        value, size = (plain(value).detach(), plain(value).numel()) if isinstance(value, Tensor) else (value, 1)
        context.accumulator.add_result(spec, function, value, size)
