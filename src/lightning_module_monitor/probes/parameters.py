"""Parameters, their gradients, and their updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_module_monitor.modules.names import ParameterSite
from lightning_module_monitor.modules.shards import has_parts_of_tokens, is_sharded, own_part
from lightning_module_monitor.probes.probe import Probe, WatchedParameter
from lightning_module_monitor.probes.reference import Reference
from lightning_module_monitor.statistics.moments import Need
from lightning_module_monitor.statistics.observation import Observation
from lightning_module_monitor.statistics.watch import Watch


@dataclass
class ParameterProbe(Probe):
    """Reads parameters at the moments that it is told, under ``torch.no_grad``: of every tensor what is this rank's to count."""

    watched: Sequence[WatchedParameter]
    observation: Observation
    reference: Reference | None = None
    rank: int = 0
    _before: list[tuple[Watch, ParameterSite, Tensor]] = field(default_factory=list)

    def see_parameters(self) -> None:
        """Take in the parameters, and keep a copy of those whose update is asked for."""
        self._observe([(watch, parameter.detach()) for _site, watch, parameter in self._wanted("parameter")])
        if self.reference is not None:
            # One after the other: all differences at once would take as much memory as the parameters.
            for site, watch, parameter in self._wanted("parameter_difference"):
                twin = self.reference.parameter(site)
                if twin is not None:
                    self._see_difference(watch, parameter, twin)
        self._before = [(watch, site, parameter.detach().clone()) for site, watch, parameter in self._wanted("update")]

    def see_gradients(self, kind: str) -> None:
        """Take in the gradients that there are.

        Args:
            kind: ``gradient`` or ``gradient_before_clip``.
        """
        gradients = ((watch, parameter.grad) for _site, watch, parameter in self._wanted(kind))
        self._observe([(watch, gradient) for watch, gradient in gradients if gradient is not None])

    def see_updates(self) -> None:
        """Take in parameter now minus parameter when it was last seen, and forget the copies."""
        before, self._before = self._before, []
        self.observation.observe_base(self._own([(watch, copy) for watch, _site, copy in before]))
        pairs = ((watch, site.tensor(), copy) for watch, site, copy in before)
        self._observe([(watch, difference(parameter.detach(), copy)) for watch, parameter, copy in pairs if parameter is not None])

    def close(self) -> None:
        """Forget the copies."""
        self._before = []

    def _observe(self, pairs: Sequence[tuple[Watch, Tensor]]) -> None:
        self.observation.measure_all(self._own(pairs))
        for watch, tensor in pairs:
            # A function gets the whole; to put it together all ranks are needed.
            whole = tensor if not watch.functions or not is_sharded(tensor) else tensor.full_tensor()
            if self.rank == 0:
                self.observation.call_functions(watch, whole)

    def _own(self, pairs: Sequence[tuple[Watch, Tensor]]) -> list[tuple[Watch, Tensor]]:
        parts = []
        for watch, tensor in pairs:
            if (watch.needs | watch.base_needs) & Need.TOKENS and has_parts_of_tokens(tensor):
                watch.is_one_token = tensor.dim() == 1
                if not watch.is_one_token:
                    why = "its last dimension is laid out over ranks; expected whole tokens. Leave token_norm and token_rms out"
                    self.observation.fail(watch, tensor, ValueError(why))
                    continue
            part = own_part(tensor, self.rank)
            if part is not None:
                parts.append((watch, part))
        return parts

    def _see_difference(self, watch: Watch, parameter: Tensor, twin: Tensor) -> None:
        try:
            own, of_twin = own_part(parameter.detach(), self.rank), own_part(twin.detach(), self.rank)
            if own is not None and of_twin is not None:
                self.observation.measure_pair(watch, own, of_twin.to(own.device))
            if watch.functions:
                whole, whole_twin = (one.full_tensor() if is_sharded(one) else one for one in (parameter.detach(), twin.detach()))
                if self.rank == 0:
                    self.observation.call_functions(watch, whole, whole_twin.to(whole.device))
        except Exception as error:
            self.observation.fail(watch, parameter, error)

    def _wanted(self, kind: str) -> Iterator[tuple[ParameterSite, Watch, Tensor]]:
        for watched in self.watched:
            watch = watched.watches.get(kind)
            parameter = watched.site.tensor() if watch is not None else None
            if watch is not None and parameter is not None and parameter.is_floating_point():
                yield watched.site, watch, parameter


def difference(after: Tensor, before: Tensor) -> Tensor:
    """``after - before`` in the place of ``before``; of half-precision tensors in float32, which does not round it again."""
    if after.dtype in (torch.float32, torch.float64):
        return torch.sub(after, before, out=before)
    return after.float() - before.float()
