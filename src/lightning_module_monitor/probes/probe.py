"""What all probes have in common: they are put on for the length of one observation, and taken off after it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from lightning_module_monitor.distributed.shards import local_part
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.model.names import ModuleSite, ParameterSite
from lightning_module_monitor.model.outputs import of_all_samples
from lightning_module_monitor.record import KINDS, RawTensor
from lightning_module_monitor.statistics.loss_scale import unscaled
from lightning_module_monitor.statistics.spec import MetricSpec

SiteT = TypeVar("SiteT", ModuleSite, ParameterSite)


@dataclass(frozen=True)
class Watched(Generic[SiteT]):
    """A module or parameter, and what is wanted of it, by kind."""

    site: SiteT
    watches: Mapping[str, MetricSpec]

    @functools.cached_property
    def has_functions(self) -> bool:
        """Whether a function of the user's is to get any of it."""
        return any(watch.functions for watch in self.watches.values())

    @functools.cached_property
    def is_of_heads(self) -> bool:
        """Whether any of it is of heads of attention."""
        return any(KINDS[kind].of_heads for kind in self.watches)


@dataclass(frozen=True)
class ParametersOfKind:
    """Parameters, and what is wanted of each, of one kind."""

    sites: Sequence[ParameterSite]
    watches: Sequence[MetricSpec]

    @functools.cached_property
    def with_functions(self) -> list[int]:
        """Places of those that a function of the user's is to get."""
        return [place for place, watch in enumerate(self.watches) if watch.functions]


NO_PARAMETERS = ParametersOfKind((), ())


WatchedModule = Watched[ModuleSite]
WatchedParameter = Watched[ParameterSite]

Among = Collection[int] | None
"""Some of the parameters, by their ``id``; ``None`` for all."""


class Say(Protocol):
    """Reports a fact to the user, once."""

    def __call__(self, message: str, level: int = logging.INFO, once: str = "") -> None:
        """Report it; ``once`` is what of it is reported once, without it the message itself."""
        ...


@contextmanager
def failing_alone(report: Callable[[Exception], None]) -> Iterator[None]:
    """Within the block an error is reported, and keeps nothing else from being seen."""
    try:
        yield
    except MonitorError:
        raise
    except Exception as error:
        report(error)


class Probe:
    """Watches something from :meth:`attach` to :meth:`close`. A probe overrides what concerns it."""

    is_open = True
    """Whether what happens now counts: the monitor closes a probe's eyes under ``no_monitor`` and in loops of other stages."""

    is_suspended = False
    """Whether a loop of another stage runs in the middle of the step: even the reference, which is run under ``no_monitor``,
    is not that of this step then."""

    def overrides(self, method: Callable[..., object]) -> bool:
        """Whether it does anything at a moment, of the methods below: most probes have nothing to do at most of them."""
        return getattr(type(self), method.__name__) is not method

    def attach(self) -> None:
        """Put the hooks on."""

    def begin_backward(self, scale: Tensor | None = None) -> None:
        """The backward pass of the loss begins. Where nobody tells of backward passes, every gradient counts.

        Args:
            scale: What the loss was multiplied by; shape ``()``, on any device.
        """

    def end_backward(self) -> None:
        """The backward pass of the loss is over."""

    def see_parameters(self, among: Among = None) -> None:
        """Parameters are about to be moved.

        Args:
            among: Which ones; all of them without it.
        """

    def see_gradients(self, kind: str, among: Among = None, scale: Tensor | None = None) -> None:
        """The gradients of parameters are there.

        Args:
            kind: ``gradient_before_clip``, or ``gradient`` where they are about to be used.
            among: Of which parameters.
            scale: What they are still multiplied by; as :meth:`begin_backward` takes it.
        """

    def see_updates(self, among: Among = None, *, is_skipped: bool = False) -> None:
        """Parameters have been moved.

        Args:
            among: Which ones.
            is_skipped: Whether their optimizer left them where they were, whatever anybody else did.
        """

    def end_micro_batch(self) -> None:
        """One of several micro-batches of the step is over."""

    def finish(self) -> None:
        """The step is over: take in what has waited until now. Before :meth:`close`."""

    def tensors(self) -> list[RawTensor]:
        """The step is over: the raw tensors of it that are wanted, on the host. Before :meth:`close`."""
        return []

    def close(self) -> None:
        """Take every hook off and forget every tensor; a second call does no harm."""

    def derive(self, values: dict[str, float]) -> None:
        """After the step, on the host: put what follows from the values in the place of what nobody asked for itself."""


def elements_of(tensor: Tensor, scale: Tensor | None = None) -> Tensor:
    """The elements of an activation, or of its gradient without a scale, that this rank counts: of all samples under ``vmap``."""
    return unscaled(local_part(of_all_samples(tensor)), scale)
