"""Parameters, their gradients, and their updates."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_module_monitor.distributed.shards import FlatShard, has_parts_of_tokens, is_sharded, own_part
from lightning_module_monitor.kernels.elements import PLAIN
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.model.names import ParameterSite, tensors_of
from lightning_module_monitor.probes.access import Copies, ParameterAccess, WholeTensors, name_of, update
from lightning_module_monitor.probes.base import Among, Probe, failing_alone, log_unsupported
from lightning_module_monitor.probes.reference import Reference
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.precision import unscaled
from lightning_module_monitor.statistics.spec import MetricSpec


@dataclass
class ParameterProbe(Probe):
    """Reads parameters in the phases of a step, under ``torch.no_grad``: of a tensor that is laid out over ranks this rank's part."""

    watched: Mapping[str, Mapping[ParameterSite, MetricSpec]]
    """What is recorded of each parameter, by kind."""
    accumulator: StepAccumulator
    whole_tensors: WholeTensors
    log: Callable[[str], None]
    """Logs a message once."""
    access: ParameterAccess
    flat: Mapping[str, FlatShard]
    """The parameters of FSDP1 that are laid out over ranks, by site."""
    reference: Reference | None = None
    _before: Copies = field(default_factory=Copies)
    _unsupported: defaultdict[torch.dtype, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Names of parameters that are not real floating ones."""

    def observe_parameters(self, among: Among = None) -> None:
        """Observe parameters, and keep a copy of those whose update is recorded."""
        self._observe_kind("parameter", among, self.access.parameter)
        if self.reference is not None:
            # One after the other: all differences at once would take as much memory as the parameters.
            for site, spec, parameter in self._supported("parameter_difference", among):
                reference = self.reference.parameter(site)
                if reference is not None:
                    with self._failing(spec, parameter):
                        self._observe_difference(spec, parameter.detach(), reference.detach())
        for site, spec, parameter in self._supported("update", among):
            with self._failing(spec, parameter):
                self._before.keep(site, parameter, self.access)

    def observe_gradients(self, kind: str, among: Among = None, scale: Tensor | None = None) -> None:
        """Observe the gradients that there are, of ``gradient`` or ``gradient_before_clip``."""

        def unscaled_gradient(parameter: Tensor) -> Tensor | None:
            gradient = self.access.gradient(parameter)
            return None if gradient is None else unscaled(gradient, scale)

        self._observe_kind(kind, among, self.access.gradient if scale is None else unscaled_gradient, makes_copies=scale is not None)

    def observe_updates(self, among: Among = None, *, is_skipped: bool = False) -> None:
        """Observe parameters minus their copies, and release the copies."""
        before = self._before.take(among)
        if not before:
            return
        specs = self.watched["update"]
        self.accumulator.observe_base(self._own([(specs[site], copy) for site, copy in before]))
        updates: list[tuple[MetricSpec, Tensor]] = []
        for site, copy in before:
            with self._failing(specs[site], copy):
                difference = update(site, copy, self.access, is_skipped=is_skipped)
                updates += [] if difference is None else [(specs[site], difference)]
        self._observe(updates)

    def finish(self) -> None:
        """Log which parameters are not watched."""
        log_unsupported("parameters", self._unsupported, self.log)

    def close(self) -> None:
        """Release the copies."""
        self._before.take()

    def _observe_kind(self, kind: str, among: Among, read: Callable[[Tensor], Tensor | None], *, makes_copies: bool = False) -> None:
        """Observe what is read of each parameter that is watched for a kind, where there is anything."""
        present = self._present(kind, among)
        if not (makes_copies or self.access.makes_copies):
            self._observe([(spec, tensor) for _site, spec, one in present if (tensor := read(one)) is not None])
            return
        # One after the other: all at once would take as much memory as the parameters.
        for _site, spec, one in present:
            with self._failing(spec, one):
                tensor = read(one)
                self._observe([] if tensor is None else [(spec, tensor)])

    def _observe(self, pairs: Sequence[tuple[MetricSpec, Tensor]]) -> None:
        """Measure tensors, and call the user's functions with them."""
        real = [(spec, tensor) for spec, tensor in pairs if self._is_supported(spec.site, tensor)]
        if real:
            self.accumulator.measure_all(self._own(real))
        for spec, tensor in real:
            if spec.functions:
                self._call_functions(spec, tensor)

    def _call_functions(self, spec: MetricSpec, *tensors: Tensor) -> None:
        call = functools.partial(self.accumulator.call_functions, spec)
        self.whole_tensors.give(name_of(spec.kind, spec.site), tensors, call)

    def _own(self, pairs: Iterable[tuple[MetricSpec, Tensor]]) -> list[tuple[MetricSpec, Tensor]]:
        """What this rank has of each tensor: all of a plain one, which counts once where all ranks have the same."""
        parts = []
        for spec, tensor in pairs:
            if type(tensor) in PLAIN and spec.site not in self.flat:  # as nearly all are
                parts.append((spec, tensor))
                continue
            if (spec.needs | spec.base_needs) & Need.TOKENS and (spec.site in self.flat or has_parts_of_tokens(tensor)):
                if len(self.flat[spec.site].shape if spec.site in self.flat else tensor.shape) == 1:
                    self.accumulator.whole_tokens.add(spec)
                else:
                    why = "its last dimension is laid out over ranks; expected whole tokens. Leave token_norm and token_rms out"
                    self.accumulator.fail(spec, tensor, ValueError(why))
                    continue
            part = self._own_part(spec, tensor)
            if part is not None:
                parts.append((spec, part))
        return parts

    def _own_part(self, spec: MetricSpec, tensor: Tensor) -> Tensor | None:
        shard, part = self.flat.get(spec.site), None
        if shard is not None:
            part = None if shard.is_copy else tensor
        elif is_sharded(tensor):
            part = own_part(tensor)
        else:
            return tensor
        if part is not None:
            self.accumulator.parts.add(spec)
        return part

    def _observe_difference(self, spec: MetricSpec, parameter: Tensor, reference: Tensor) -> None:
        own, of_reference = self._own_part(spec, parameter), self._own_part(spec, reference)
        if own is not None and of_reference is not None:
            self.accumulator.measure_pair(spec, own, of_reference.to(own.device))
        if spec.functions:
            self._call_functions(spec, parameter, reference.to(parameter.device))

    def _failing(self, spec: MetricSpec, tensor: Tensor) -> AbstractContextManager[None]:
        return failing_alone(functools.partial(self.accumulator.fail, spec, tensor))

    def _supported(self, kind: str, among: Among) -> Iterator[tuple[ParameterSite, MetricSpec, Tensor]]:
        return (one for one in self._present(kind, among) if self._is_supported(one[0].name, one[2]))

    def _present(self, kind: str, among: Among) -> list[tuple[ParameterSite, MetricSpec, Tensor]]:
        """The parameters of a kind, as they are now, without those that are gone or not among the given ones."""
        specs = self.watched.get(kind, {})
        pairs = zip(specs.items(), tensors_of(specs), strict=True)
        return [(site, spec, one) for (site, spec), one in pairs if one is not None and (among is None or id(one) in among)]

    def _is_supported(self, site: str, tensor: Tensor) -> bool:
        """Whether a tensor is a real floating one; another is noted."""
        if not tensor.is_floating_point():
            self._unsupported[tensor.dtype].append(site)
            return False
        return True
