"""What all probes have in common: they are put on for the length of one observation, and taken off after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_module_monitor.modules.names import ModuleSite, ParameterSite
from lightning_module_monitor.statistics.observation import Watch

SiteT = TypeVar("SiteT", ModuleSite, ParameterSite)


@dataclass(frozen=True)
class Watched(Generic[SiteT]):
    """A module or parameter, and what is wanted of it, by kind."""

    site: SiteT
    watches: Mapping[str, Watch]


WatchedModule = Watched[ModuleSite]
WatchedParameter = Watched[ParameterSite]


class Probe:
    """Watches something from :meth:`attach` to :meth:`close`. A probe overrides what concerns it."""

    is_open = True
    """Whether what happens now counts: the monitor closes a probe's eyes under ``no_monitor`` and in loops of other stages."""

    is_suspended = False
    """Whether a loop of another stage runs in the middle of the step: even the reference, which is run under ``no_monitor``,
    is not that of this step then."""

    def attach(self) -> None:
        """Put the hooks on."""

    def begin_backward(self) -> None:
        """The backward pass of the loss begins. Where nobody tells of backward passes, every gradient counts."""

    def end_backward(self) -> None:
        """The backward pass of the loss is over."""

    def end_micro_batch(self) -> None:
        """One of several micro-batches of the step is over."""

    def finish(self, values: dict[str, float]) -> None:
        """Complete the values of the step, which are on the host now; after :meth:`close`."""

    def close(self) -> None:
        """Take every hook off and forget every tensor; a second call does no harm."""
