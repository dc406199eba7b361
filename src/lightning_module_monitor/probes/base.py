"""What probes share: what is recorded of a site, the tools of a step, and its phases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_module_monitor.errors import shortened
from lightning_module_monitor.model.names import ModelIndex, ModuleSite, ParameterSite
from lightning_module_monitor.model.outputs import Path, is_first
from lightning_module_monitor.probes.reporting import ErrorReporter
from lightning_module_monitor.record import RawTensor
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.spec import MetricSpec

SiteT = TypeVar("SiteT", ModuleSite, ParameterSite)


@dataclass(frozen=True)
class Watched(Generic[SiteT]):
    """A module or parameter, and what is recorded of it, by kind."""

    site: SiteT
    specs: Mapping[str, MetricSpec]


WatchedModule = Watched[ModuleSite]
WatchedParameter = Watched[ParameterSite]
Among = Collection[int] | None
"""Some of the parameters, by their ``id``; ``None`` for all."""


class StepTools(NamedTuple):
    """What the probes of a step have in common."""

    accumulator: StepAccumulator
    names: ModelIndex
    """Names further outputs, inputs and heads."""
    reporter: ErrorReporter

    def output_name(self, site: str, path: Path) -> str:
        """The name of an output of a module; of the output itself, or the first element of it, the module's own."""
        return site if is_first(path) else self.names.further_name(site, path)

    def log_unsupported(self, what: str, names: Mapping[torch.dtype | type, list[str]]) -> None:
        """Log the names of outputs or parameters that are no real floating tensors, in one line for each dtype or class."""
        for sort, of_sort in names.items():
            of_what = f"dtype {sort}" if isinstance(sort, torch.dtype) else f"class {sort.__name__}"
            why = "only real floating ones are" if isinstance(sort, torch.dtype) else "no tensor is found in them"
            self.reporter.log_once(f"{shortened(of_sort)}: {what} of {of_what} are not recorded; {why}.")

    def report_not_captured(self, what: str, error: Exception) -> None:
        """Report and count a raw tensor that could not be captured."""
        self.reporter.count(f"{what} could not be captured", "capture", error, self.accumulator)


class Probe:
    """Observes one step from :meth:`attach` to :meth:`close`. A probe overrides the phases that concern it."""

    is_open = True
    """Whether calls are observed now: not under ``no_monitor``, and not in a loop of another stage."""
    is_suspended = False
    """Whether a loop of another stage runs in the middle of the step. The reference is run under ``no_monitor`` too, and a call of it
    belongs to the step only where this is false."""

    def overrides(self, method: Callable[..., object]) -> bool:
        """Whether the probe does anything in a phase, one of the methods below."""
        return getattr(type(self), method.__name__) is not method

    def attach(self) -> None:
        """Register the hooks."""

    def begin_backward(self, scale: Tensor | None = None) -> None:
        """The backward pass of the loss times ``scale``, shape ``()``, begins. In a loop that never reports one, every gradient counts."""

    def end_backward(self) -> None:
        """The backward pass of the loss is over."""

    def observe_parameters(self, among: Among = None) -> None:
        """The optimizer is about to move ``among``, or all parameters."""

    def observe_gradients(self, kind: str, among: Among = None, scale: Tensor | None = None) -> None:
        """The gradients of parameters are complete.

        Args:
            kind: ``gradient_before_clip``, or ``gradient`` if the optimizer is about to use them.
            among: Of which parameters; all without it.
            scale: The factor of the loss that they still have, shape ``()``, on any device.
        """

    def observe_updates(self, among: Among = None, *, is_skipped: bool = False) -> None:
        """The optimizer has moved parameters, or skipped its step: then the update is 0, whatever else has changed them."""

    def end_micro_batch(self) -> None:
        """One of several micro-batches of the step is over."""

    def finish(self) -> None:
        """The step is over: record what was deferred. Before :meth:`close`."""

    def tensors(self) -> list[RawTensor]:
        """The captured tensors of the step, on the host. Before :meth:`close`."""
        return []

    def close(self) -> None:
        """Remove every hook and release every tensor; a second call does nothing."""

    def derive(self, values: dict[str, float]) -> None:
        """After the step, on the host: replace values that are only parts of others by those others."""
