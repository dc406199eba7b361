"""Parameters, their gradients, and their updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from lightning_module_monitor.distributed.shards import FlatShard, has_parts_of_tokens, is_sharded, own_part
from lightning_module_monitor.kernels.elements import PLAIN
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.model.names import ParameterSite, tensors_of
from lightning_module_monitor.probes.access import ParameterAccess
from lightning_module_monitor.probes.base import NO_PARAMETERS, Among, ParametersOfKind, PassedOver, Probe, failing_alone
from lightning_module_monitor.probes.reference import Reference
from lightning_module_monitor.probes.updates import Copies, update
from lightning_module_monitor.probes.whole_tensors import WholeTensors, name_of
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.precision import unscaled
from lightning_module_monitor.statistics.spec import MetricSpec


@dataclass
class ParameterProbe(Probe):
    """Reads parameters in the phases of a step, under ``torch.no_grad``: of a tensor that is laid out over ranks this rank's part."""

    watched: Mapping[str, ParametersOfKind]
    """What is watched, by kind."""
    accumulator: StepAccumulator
    whole_tensors: WholeTensors
    say: Callable[[str], None]
    """Takes a sentence for the user."""
    access: ParameterAccess
    flat: Mapping[str, FlatShard]
    """The parameters of FSDP1 that are laid out over ranks, by site."""
    reference: Reference | None = None
    _before: Copies = field(default_factory=Copies)
    _passed_over: PassedOver = field(default_factory=lambda: PassedOver("parameters"))

    def observe_parameters(self, among: Among = None) -> None:
        """Take in parameters, and keep a copy of those whose update is asked for."""
        self._observe_kind("parameter", among, self.access.parameter)
        if self.reference is not None:
            # One after the other: all differences at once would take as much memory as the parameters.
            for site, spec, parameter in self._wanted("parameter_difference", among):
                reference = self.reference.parameter(site)
                if reference is not None:
                    self._see_difference(spec, parameter, reference)
        for site, spec, parameter in self._wanted("update", among):
            with self._failing(spec, parameter):
                self._before.keep(site, parameter, self.access)

    def observe_gradients(self, kind: str, among: Among = None, scale: Tensor | None = None) -> None:
        """Observe the gradients that there are, of ``gradient`` or ``gradient_before_clip``."""
        if scale is None:
            self._observe_kind(kind, among, self.access.gradient)
        else:
            self._observe_kind(kind, among, functools.partial(_unscaled_gradient, self.access, scale), makes_copies=True)

    def observe_updates(self, among: Among = None, *, is_skipped: bool = False) -> None:
        """Take in parameter now minus parameter when it was last seen, and forget the copies."""
        before = self._before.take(among)
        if not before:
            return
        of_kind = self.watched.get("update", NO_PARAMETERS)
        specs = dict(zip(of_kind.sites, of_kind.specs, strict=True))
        self.accumulator.observe_base(self._own([(specs[site], copy) for site, copy in before]))
        seen: list[tuple[MetricSpec, Tensor]] = []
        for site, copy in before:
            with self._failing(specs[site], copy):
                difference = update(site, copy, self.access, is_skipped=is_skipped)
                seen += [] if difference is None else [(specs[site], difference)]
        self._observe(seen)

    def finish(self) -> None:
        """Report which parameters were passed over."""
        self._passed_over.report(self.say)

    def close(self) -> None:
        """Forget the copies."""
        self._before.take()

    def _observe_kind(self, kind: str, among: Among, read: Callable[[Tensor], Tensor | None], *, makes_copies: bool = False) -> None:
        """Observe what is read of each parameter that is watched for a kind, where there is anything."""
        of_kind = self.watched.get(kind, NO_PARAMETERS)
        there = [(spec, one) for spec, one in zip(of_kind.specs, self._there(kind, among), strict=True) if one is not None]
        if not (makes_copies or self.access.makes_copies):
            self._observe([(spec, tensor) for spec, one in there if (tensor := read(one)) is not None])
            return
        # One after the other: all at once would take as much memory as the parameters.
        for spec, one in there:
            with self._failing(spec, one):
                tensor = read(one)
                self._observe([] if tensor is None else [(spec, tensor)])

    def _observe(self, pairs: Sequence[tuple[MetricSpec, Tensor]]) -> None:
        """Measure tensors, and give those that functions are to get to these."""
        real = [(spec, tensor) for spec, tensor in pairs if tensor.is_floating_point() or self._pass_over(spec.site, tensor)]
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
                    self.accumulator.count_as_one_token(spec)
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
            self.accumulator.count_as_part(spec)
        return part

    def _see_difference(self, spec: MetricSpec, parameter: Tensor, reference: Tensor) -> None:
        with self._failing(spec, parameter):
            own, of_twin = self._own_part(spec, parameter.detach()), self._own_part(spec, reference.detach())
            if own is not None and of_twin is not None:
                self.accumulator.measure_pair(spec, own, of_twin.to(own.device))
            if spec.functions:
                self._call_functions(spec, parameter.detach(), reference.detach().to(parameter.device))

    def _failing(self, spec: MetricSpec, seen: Tensor) -> AbstractContextManager[None]:
        return failing_alone(functools.partial(self.accumulator.fail, spec, seen))

    def _wanted(self, kind: str, among: Among) -> Iterator[tuple[ParameterSite, MetricSpec, Tensor]]:
        of_kind = self.watched.get(kind, NO_PARAMETERS)
        for site, spec, parameter in zip(of_kind.sites, of_kind.specs, self._there(kind, among), strict=True):
            if parameter is not None and (parameter.is_floating_point() or self._pass_over(site.name, parameter)):
                yield site, spec, parameter

    def _there(self, kind: str, among: Among) -> list[Tensor | None]:
        """The parameters that are watched for a kind, as they are now; ``None`` for what is gone, or not among those that are meant."""
        parameters = tensors_of(self.watched.get(kind, NO_PARAMETERS).sites)
        return parameters if among is None else [one if id(one) in among else None for one in parameters]

    def _pass_over(self, site: str, tensor: Tensor) -> bool:
        """Note a parameter that is no real floating one."""
        self._passed_over.add(site, tensor)
        return False


def _unscaled_gradient(access: ParameterAccess, scale: Tensor, parameter: Tensor) -> Tensor | None:
    gradient = access.gradient(parameter)
    return None if gradient is None else unscaled(gradient, scale)
