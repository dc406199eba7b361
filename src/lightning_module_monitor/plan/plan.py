"""The plan of one step: the modules and parameters to observe, with their streams."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.plan.states import StateRules
from lightning_module_monitor.probes.base import WatchedModule, WatchedParameter
from lightning_module_monitor.probes.gradient_flow import Chain
from lightning_module_monitor.probes.gradient_noise import NoiseSites
from lightning_module_monitor.statistics.stream import Stream


@dataclass(frozen=True)
class Plan:
    """Modules and parameters that are observed in one step, and what is recorded of each."""

    modules: list[WatchedModule]
    parameters: list[WatchedParameter]
    totals: Sequence[Stream] = ()
    """Streams over all parameters of a module."""
    states: StateRules | None = None
    """The rules about states of optimizers."""
    chain: Chain | None = None
    """The blocks whose gradient flow is recorded."""
    noise: NoiseSites | None = None
    """The modules whose gradient noise is recorded."""

    @functools.cached_property
    def modules_with_heads(self) -> list[WatchedModule]:
        """The modules with a rule about heads of attention. Neither their number nor their keys are known before they run."""
        return [watched for watched in self.modules if any(KINDS[kind].of_heads for kind in watched.streams)]

    def streams(self) -> list[Stream]:
        """Every stream of a rule: totals, modules, parameters, in the model's order."""
        module_streams = [stream for watched in self.modules for stream in watched.all_streams()]
        return [*self.totals, *module_streams] + [stream for watched in self.parameters for stream in watched.all_streams()]

    def all_streams(self) -> list[Stream]:
        """Every stream of a rule, and the streams of the gradient flow."""
        return self.streams() + ([] if self.chain is None else list(self.chain.streams))

    def knows_all_keys(self, kind: str = "") -> bool:
        """Whether all keys, of a kind or of any, are known before the first step: attention, states and some functions have others."""
        if self.states is not None and (kind == "" or (kind in KINDS and KINDS[kind].of_states)):
            return False
        if self.modules_with_heads and (kind in ("", "activation") or (kind in KINDS and KINDS[kind].of_heads)):
            return False
        return all(stream.planned_keys == stream.number_keys for stream in self.streams() if kind in ("", stream.kind))

    def figures(self) -> list[str]:
        """The monitor's own figures that come with the kinds of the modules."""
        kinds = dict.fromkeys(kind for watched in self.modules for kind in (*watched.streams, *watched.layers))
        return list(dict.fromkeys(figure for kind in kinds for figure in KINDS[kind].figures))

    def keys(self) -> list[str]:
        """Every key of a number that is known beforehand, kind by kind."""
        keys = [key for stream in self.expected() if not KINDS[stream.kind].has_late_sites for key in stream.planned_keys]
        keys += self.chain.keys() if self.chain is not None else []
        return keys + (self.noise.keys() if self.noise is not None else [])

    def histogram_keys(self) -> list[str]:
        """Every key of a histogram, kind by kind."""
        return [key for stream in self.expected() if not KINDS[stream.kind].has_late_sites for key in stream.histogram_keys]

    def expected(self) -> list[Stream]:
        """The streams that will have values, totals first, kind by kind: a container never runs, and a frozen parameter has no gradient."""
        module_streams = [
            stream for watched in self.modules for stream in watched.all_streams() if watched.site.runs or KINDS[stream.kind].of_heads
        ]
        parameter_streams = [stream for watched in self.parameters for kind, stream in watched.streams.items() if watched.site.has(kind)]
        order = {kind: position for position, kind in enumerate(KINDS)}
        has_values = {*parameter_streams}
        totals = [total for total in self.totals if not has_values.isdisjoint(total.members)]
        # Totals are in this order already.
        return [*totals, *sorted(module_streams + parameter_streams, key=lambda stream: order[stream.kind])]
