"""What probes share: what is recorded of a site, the gate and the tools of a step, and its phases."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import nn

from lightning_module_monitor.errors import shortened
from lightning_module_monitor.model.names import ModelIndex, ModuleSite, ParameterSite
from lightning_module_monitor.model.outputs import Path, is_first
from lightning_module_monitor.probes.reporting import ErrorReporter
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.stream import Stream

SiteT = TypeVar("SiteT", ModuleSite, ParameterSite)


@dataclass(frozen=True)
class Watched(Generic[SiteT]):
    """A module or parameter, and what is recorded of it, by kind."""

    site: SiteT
    streams: Mapping[str, Stream]
    layers: Mapping[str, Mapping[str, Stream]] = field(default_factory=dict)
    """Streams of the linear maps of a module, by kind and by the name of the map's site."""

    def all_streams(self) -> list[Stream]:
        """The streams of every kind, linear maps included."""
        return [*self.streams.values(), *(stream for by_site in self.layers.values() for stream in by_site.values())]


WatchedModule = Watched[ModuleSite]
WatchedParameter = Watched[ParameterSite]
Among = Collection[int] | None
"""Some of the parameters, by their ``id``; ``None`` for all."""


class Gate:
    """Whether what happens now is observed, and by which step: one for all steps of a module, which hooks read."""

    def __init__(self) -> None:
        self.current: object = None
        """The accumulator of the step that runs, or of the loop of another stage that has suspended it; ``None`` without either."""
        self.observer: object = None
        """The accumulator that takes what happens now: the current one, or ``None`` while the gate is closed."""
        self.wrapped: nn.Module | None = None
        """The monitored module, if a strategy has wrapped it."""
        self._closed_by: set[object] = set()

    def enter(self, step: object) -> None:
        """The step with this accumulator goes on, or none does."""
        self.current = step
        self._update()

    def close(self, by: object) -> None:
        """Nothing is observed from now on, until :meth:`open` is called with the same object. A second call does nothing."""
        self._closed_by.add(by)
        self._update()

    def open(self, by: object) -> None:
        """Observe again, unless the gate is closed by another object."""
        self._closed_by.discard(by)
        self._update()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Within the block nothing is observed."""
        by = object()
        try:
            self.close(by)
            yield
        finally:
            self.open(by)

    def is_redirected(self, module: nn.Module) -> bool:
        """Whether a call of a module that begins now is the wrapper's: Lightning has replaced ``forward`` by the step for this call.

        What it takes and returns is the step's, and no activation. Calls within it are the module's own.
        """
        # Lightning's own name for the replacement: strategies/strategy.py, _ForwardRedirection.
        return module is self.wrapped and getattr(module.__dict__.get("forward"), "__name__", "") == "wrapped_forward"

    def _update(self) -> None:
        self.observer = None if self._closed_by else self.current


class StepTools(NamedTuple):
    """The objects that all probes of a step share."""

    accumulator: StepAccumulator
    names: ModelIndex
    """Names further outputs, inputs and heads."""
    reporter: ErrorReporter
    gate: Gate

    def is_observed(self) -> bool:
        """Whether this step observes what happens now."""
        return self.gate.observer is self.accumulator

    def is_suspended(self) -> bool:
        """Whether a loop of another stage runs in the middle of the step. If not, the reference's calls count though the gate is closed."""
        return self.gate.current is not self.accumulator

    def output_name(self, site: str, path: Path) -> str:
        """The name of an output of a module; of the output itself, or the first element of it, the module's own."""
        return site if is_first(path) else self.names.further_name(site, path)

    def log_unsupported(self, what: str, names: Mapping[torch.dtype | type, list[str]]) -> None:
        """Log the names of outputs or parameters that are no real floating tensors, in one line for each dtype or class."""
        for sort, sites in names.items():
            description = f"dtype {sort}" if isinstance(sort, torch.dtype) else f"class {sort.__name__}"
            why = "only real floating ones are" if isinstance(sort, torch.dtype) else "no tensor is found in them"
            self.reporter.log_once(f"{shortened(sites)}: {what} of {description} are not recorded; {why}.")

    def report_not_captured(self, what: str, error: Exception) -> None:
        """Report and count a raw tensor that could not be captured."""
        self.reporter.count(f"{what} could not be captured", "capture", error, self.accumulator)


class Probe:
    """Observes one step from :meth:`attach` to :meth:`close`. A probe overrides the phases that concern it."""

    def attach(self) -> None:
        """Register the hooks."""

    def end_micro_batch(self) -> None:
        """One of several micro-batches of the step is over."""

    def finish(self) -> None:
        """The step is over: record what was deferred. Before :meth:`close`."""

    def close(self) -> None:
        """Remove every hook and release every tensor; a second call does nothing."""

    def derive(self, values: dict[str, float]) -> None:
        """After the step, on the host: replace intermediate values by derived ones."""
