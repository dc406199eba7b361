"""Parameters, their gradients and their updates: how they are read, assembled where they are laid out over ranks, and observed."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.distributed.shards import (
    FlatShard,
    gradient_of,
    is_flattened,
    is_sharded,
    own_part,
    whole,
    whole_of_flat,
)
from lightning_module_monitor.kernels.elements import in_memory
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.model.names import ParameterSite
from lightning_module_monitor.probes.base import Among, Probe, StepTools
from lightning_module_monitor.probes.reference import Reference
from lightning_module_monitor.probes.reporting import failing_alone
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.precision import WIDE, unscaled, widened
from lightning_module_monitor.statistics.spec import MetricSpec


class ParameterAccess:
    """Reads parameters and gradients where torch has them. A strategy that keeps them elsewhere has its own."""

    makes_copies = False
    """Whether a read takes memory of its own: then one is read after the other."""

    def parameter(self, parameter: Tensor) -> Tensor | None:
        """All elements of a parameter; of one that is laid out over ranks by torch, the tensor that says so."""
        return parameter

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Its gradient, in the same way; ``None`` if there is none."""
        return gradient_of(parameter)

    def unscaled_gradient(self, parameter: Tensor, scale: Tensor | None) -> Tensor | None:
        """Its gradient, divided by the scale of the loss."""
        gradient = self.gradient(parameter)
        return None if gradient is None else unscaled(gradient, scale)

    def is_empty(self, parameter: Tensor) -> bool:
        """Whether it has no element, on any rank."""
        return not parameter.numel() and not is_flattened(parameter)


class Copies:
    """Copies of parameters, from before the optimizer moves them until their update is observed."""

    def __init__(self) -> None:
        self._by_site: dict[ParameterSite, tuple[int, Tensor]] = {}

    def keep(self, site: ParameterSite, parameter: Tensor, access: ParameterAccess) -> None:
        """Copy a parameter, in place of an older copy."""
        value = access.parameter(parameter)
        if value is not None:
            copy = in_memory(value).detach()
            self._by_site[site] = (id(parameter), copy.clone() if copy.layout is torch.strided else copy.to_dense())

    def take(self, among: Among = None) -> list[tuple[ParameterSite, Tensor]]:
        """Remove and return the copies of some parameters, or of all."""
        taken = [(site, copy) for site, (parameter, copy) in self._by_site.items() if among is None or parameter in among]
        for site, _copy in taken:
            del self._by_site[site]
        return taken


def update(site: ParameterSite, before: Tensor, access: ParameterAccess, *, is_skipped: bool = False) -> Tensor | None:
    """A parameter minus its copy, in whose memory it is computed; ``None`` if the parameter was removed.

    Args:
        site: The parameter.
        before: The copy.
        access: Reads the parameter.
        is_skipped: Whether the optimizer skipped its step: then the update is 0, whatever else has changed the parameter.

    Raises:
        ValueError: If the parameter's memory was given back.
    """
    parameter = site.tensor()
    if parameter is None:
        return None
    if is_skipped:
        return before.zero_()
    value = access.parameter(parameter)
    if value is None:
        return None
    after = in_memory(value).detach()
    # Of half-precision tensors in float32, which does not round the difference again.
    return torch.sub(after, before, out=before) if after.dtype in WIDE else widened(after) - widened(before)


FOR_THE_FILE = "for the file"


class WholeTensors:
    """Keeps a copy of this rank's part until the step is over.

    When a parameter or a gradient is observed, an error may have ended the step on one rank, and the others would wait for its part.
    At the end of the step the ranks exchange which parts they have; tensors of which every rank has its part are assembled.

    Args:
        expected: All tensors that may come, by name, in the same order on every rank: those of FSDP1 with their shard. Without any there
            is no collective.
        ranks: The processes that train together; ``None`` for a single one.
        failed: Gets the name of a tensor that could not be used, and the error.
    """

    def __init__(self, expected: Mapping[str, FlatShard | None], ranks: Ranks | None, failed: Callable[[str, Exception], None]) -> None:
        self._expected = expected
        self._ranks = ranks
        self._failed = failed
        self._kept: defaultdict[str, list[tuple[list[Tensor], Callable[..., None]]]] = defaultdict(list)

    def give(self, name: str, tensors: Sequence[Tensor], use: Callable[..., None]) -> None:
        """Call a function with whole tensors, on rank 0: at once, or at the end of the step if they are laid out over ranks.

        Args:
            name: One of the expected names, if any of the tensors is laid out over ranks.
            tensors: They may be overwritten as soon as this returns.
            use: The function, which gets as many tensors.
        """
        if self._ranks is None:
            use(*(whole(tensor) for tensor in tensors))
        elif self._expected.get(name) is not None or any(is_sharded(tensor) for tensor in tensors):
            self._kept[name].append(([tensor.detach().clone() for tensor in tensors], use))
        elif self._ranks.index == 0:
            use(*tensors)

    def assemble(self) -> None:
        """Assemble the tensors at the end of the step, on every rank."""
        if self._ranks is None or not self._expected:
            return
        counts = torch.tensor([len(self._kept[name]) for name in self._expected], dtype=torch.float64, device="cpu")
        most, minus_least = self._ranks.all_reduce(torch.cat([counts, -counts]), "max").view(2, -1)
        for (name, shard), has_any in zip(self._expected.items(), ((most > 0) & (most == -minus_least)).tolist(), strict=True):
            for parts, use in self._kept.pop(name) if has_any else ():
                tensors = [whole(part) if shard is None else whole_of_flat(part, shard, self._ranks) for part in parts]
                if self._ranks.index == 0:
                    with failing_alone(functools.partial(self._failed, name)):  # the other ranks go on to the next tensor
                        use(*tensors)
        self._kept.clear()

    def forget(self) -> None:
        """Release all parts, as the step is lost; the other ranks then assemble nothing."""
        self._kept.clear()


def name_of(kind: str, site: str, purpose: str = "for functions") -> str:
    """The name of a whole tensor, also in messages."""
    return f"The whole {kind} of {site!r} {purpose}"


SpecsByKind = Mapping[str, Mapping[ParameterSite, MetricSpec]]
"""What is recorded of each parameter, by kind."""


def present(by_kind: SpecsByKind, kind: str, among: Among) -> list[tuple[ParameterSite, MetricSpec, Tensor]]:
    """The parameters that a kind is recorded of, as they are now, without those that were removed or are not among the given ones."""
    found = [(site, spec, site.tensor()) for site, spec in by_kind.get(kind, {}).items()]
    return [(site, spec, one) for site, spec, one in found if one is not None and (among is None or id(one) in among)]


def expected_tensors(watched: SpecsByKind, captured: SpecsByKind, flat: Mapping[str, FlatShard]) -> dict[str, FlatShard | None]:
    """The tensors of parameters that are laid out over ranks and that functions get, or that are captured, by name."""
    named = [(name_of(kind, site.name), site) for kind, specs in watched.items() for site, spec in specs.items() if spec.functions]
    named += [(name_of(kind, site.name, FOR_THE_FILE), site) for kind, specs in captured.items() for site in specs]
    parameters = [(name, site.name, site.tensor()) for name, site in named]
    return {name: flat.get(site) for name, site, one in parameters if site in flat or (one is not None and is_sharded(one))}


def fail_removed(by_kind: SpecsByKind, accumulator: StepAccumulator) -> None:
    """Record NaN for parameters that were removed from their modules: an absent value would go unnoticed."""
    for specs in by_kind.values():
        for site, spec in specs.items():
            if site.is_removed():
                accumulator.fail(spec, site.owner, LookupError("the module has no parameter of this name any more"))


@dataclass
class ParameterProbe(Probe):
    """Reads parameters in the phases of a step, under ``torch.no_grad``: of a tensor that is laid out over ranks this rank's part."""

    specs: SpecsByKind
    tools: StepTools
    whole_tensors: WholeTensors
    access: ParameterAccess
    flat: Mapping[str, FlatShard]
    """The parameters of FSDP1 that are laid out over ranks, by site."""
    reference: Reference | None = None
    _before: Copies = field(default_factory=Copies)
    _unsupported: defaultdict[torch.dtype | type, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Names of parameters that are not real floating ones."""

    def __post_init__(self) -> None:
        self._accumulator = self.tools.accumulator

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
        read = self.access.gradient if scale is None else functools.partial(self.access.unscaled_gradient, scale=scale)
        self._observe_kind(kind, among, read, makes_copies=scale is not None)

    def observe_updates(self, among: Among = None, *, is_skipped: bool = False) -> None:
        """Observe parameters minus their copies, and release the copies."""
        before = self._before.take(among)
        if not before:
            return
        specs = self.specs["update"]
        self._accumulator.observe_base(self._own([(specs[site], copy) for site, copy in before]))
        updates: list[tuple[MetricSpec, Tensor]] = []
        for site, copy in before:
            with self._failing(specs[site], copy):
                difference = update(site, copy, self.access, is_skipped=is_skipped)
                updates += [] if difference is None else [(specs[site], difference)]
        self._observe(updates)

    def finish(self) -> None:
        """Log which parameters are not recorded."""
        self.tools.log_unsupported("parameters", self._unsupported)

    def close(self) -> None:
        """Release the copies."""
        self._before.take()

    def _observe_kind(self, kind: str, among: Among, read: Callable[[Tensor], Tensor | None], *, makes_copies: bool = False) -> None:
        """Observe what is read of each parameter that a kind is recorded of, where there is anything."""
        watched = present(self.specs, kind, among)
        if not (makes_copies or self.access.makes_copies):
            self._observe([(spec, tensor) for _site, spec, one in watched if (tensor := read(one)) is not None])
            return
        # One after the other: all at once would take as much memory as the parameters.
        for _site, spec, one in watched:
            with self._failing(spec, one):
                tensor = read(one)
                self._observe([] if tensor is None else [(spec, tensor)])

    def _observe(self, pairs: Sequence[tuple[MetricSpec, Tensor]]) -> None:
        """Measure tensors, and call the user's functions with them."""
        real = [(spec, tensor) for spec, tensor in pairs if self._is_supported(spec.site, tensor)]
        if real:
            self._accumulator.measure_all(self._own(real))
        for spec, tensor in real:
            if spec.functions:
                self._call_functions(spec, tensor)

    def _call_functions(self, spec: MetricSpec, *tensors: Tensor) -> None:
        call = functools.partial(self._accumulator.call_functions, spec)
        self.whole_tensors.give(name_of(spec.kind, spec.site), tensors, call)

    def _own(self, pairs: Iterable[tuple[MetricSpec, Tensor]]) -> list[tuple[MetricSpec, Tensor]]:
        """What this rank has of each tensor: all of a plain one, which counts once where all ranks have the same."""
        parts = []
        for spec, tensor in pairs:
            try:
                if (spec.needs | spec.base_needs) & Need.TOKENS:
                    self._check_tokens(spec, tensor)
                part = self._own_part(spec, tensor)
            except Exception as error:
                self._accumulator.fail(spec, tensor, error)  # this one alone
                continue
            if part is not None:
                parts.append((spec, part))
        return parts

    def _check_tokens(self, spec: MetricSpec, tensor: Tensor) -> None:
        """Check that this rank has whole tokens, whose norms are recorded.

        Raises:
            ValueError: If the tensor is laid out over ranks.
        """
        if spec.site in self.flat or is_sharded(tensor):
            raise ValueError("it is laid out over ranks, and token_norm and token_rms are of whole tokens; expected a rule without them")

    def _own_part(self, spec: MetricSpec, tensor: Tensor) -> Tensor | None:
        shard, part = self.flat.get(spec.site), None
        if shard is not None:
            part = None if shard.is_copy else tensor
        elif is_sharded(tensor):
            part = own_part(tensor)
        else:
            return tensor
        if part is not None:
            self._accumulator.parts.add(spec)
        return part

    def _observe_difference(self, spec: MetricSpec, parameter: Tensor, reference: Tensor) -> None:
        own, of_reference = self._own_part(spec, parameter), self._own_part(spec, reference)
        if own is not None and of_reference is not None:
            self._accumulator.measure_pair(spec, own, of_reference.to(own.device))
        if spec.functions:
            self._call_functions(spec, parameter, reference.to(parameter.device))

    def _failing(self, spec: MetricSpec, tensor: Tensor) -> AbstractContextManager[None]:
        return failing_alone(functools.partial(self._accumulator.fail, spec, tensor))

    def _supported(self, kind: str, among: Among) -> Iterator[tuple[ParameterSite, MetricSpec, Tensor]]:
        return (one for one in present(self.specs, kind, among) if self._is_supported(one[0].name, one[2]))

    def _is_supported(self, site: str, tensor: Tensor) -> bool:
        """Whether a tensor is a real floating one; another is noted."""
        if not tensor.is_floating_point():
            self._unsupported[tensor.dtype].append(site)
            return False
        return True
