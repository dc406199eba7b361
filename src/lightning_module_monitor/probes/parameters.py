"""Parameters, their gradients and their updates: how they are read, assembled where they are laid out over ranks, and observed."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.distributed.shards import (
    FlatShard,
    gradient_of,
    is_flattened,
    is_sharded,
    own_part,
)
from lightning_module_monitor.kernels.elements import WIDE, in_memory, own_elements, strided, widened
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.table import Scale
from lightning_module_monitor.model.names import ParameterSite
from lightning_module_monitor.probes.base import Probe, Selected, StepTools, Watched, WatchedParameter, failing_alone
from lightning_module_monitor.probes.capture import CaptureProbe
from lightning_module_monitor.probes.cosines import Cosines, PreviousUpdates
from lightning_module_monitor.probes.optimizer_states import STATE, StateReader
from lightning_module_monitor.probes.reference import Reference
from lightning_module_monitor.probes.whole_tensors import WholeTensors
from lightning_module_monitor.statistics.precision import Difference, divided_by_scale
from lightning_module_monitor.statistics.spectra import as_matrices
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.step.accumulator import StepAccumulator

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Convolutions whose weights have the inputs first."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)


class ParameterAccess:
    """Reads parameters and gradients where torch has them. A strategy that keeps them elsewhere has its own."""

    makes_copies = False
    """Whether a read takes memory of its own: then one is read after the other."""

    def parameter(self, parameter: Tensor) -> Tensor | None:
        """All elements of a parameter, or its DTensor."""
        return parameter

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Its gradient, in the same way; ``None`` if there is none."""
        return gradient_of(parameter)

    def is_empty(self, parameter: Tensor) -> bool:
        """Whether it has no element, on any rank."""
        return not parameter.numel() and not is_flattened(parameter)


def update(before: Tensor, after: Tensor) -> Tensor:
    """A parameter minus its copy, in whose memory it is computed.

    Raises:
        ValueError: If the parameter's memory was given back, or its elements cannot be read.
    """
    after = _readable(after)
    # Of half-precision tensors in float32, which does not round the difference again.
    return torch.sub(after, before, out=before) if after.dtype in WIDE else widened(after) - widened(before)


def matrices_of(site: ParameterSite, tensor: Tensor) -> Tensor:
    """A parameter, or what belongs to it and has its shape, as matrices, shape ``(groups, rows, columns)``: see :func:`as_matrices`."""
    module = site.owner
    if isinstance(module, CONVOLUTIONS):
        return as_matrices(tensor, module.groups, is_transposed=isinstance(module, TRANSPOSED))
    return as_matrices(tensor)


def _readable(parameter: Tensor) -> Tensor:
    """The parameter, or the tensor that a quantized one stands for; without a graph, a DTensor as it is."""
    parameter = in_memory(parameter)
    return (parameter if is_sharded(parameter) else own_elements(parameter)).detach()


def name_of(kind: str, site: str) -> str:
    """The name of a whole tensor, also in messages."""
    return f"The whole {kind} of {site!r}"


def fail_removed(watched: Sequence[WatchedParameter], accumulator: StepAccumulator) -> None:
    """Record NaN for parameters that were removed from their modules: an absent value would go unnoticed."""
    for target in watched:
        for stream in target.streams.values() if target.site.registered() is None else ():
            if stream.kind == STATE:
                continue  # its keys are not known
            accumulator.fail(stream, target.site.owner, LookupError("the module has no parameter of this name any more"))


_Tensors = Sequence[tuple[WatchedParameter, Tensor]]

PARAMETER, DIFFERENCE, GRADIENT, UPDATE = "parameter", "parameter_difference", "gradient", "update"


@dataclass
class ParameterTap(Probe):
    """Reads parameters, gradients and updates, each once at its moment of the step, under ``torch.no_grad``.

    Each tensor is measured, passed to the user's functions, compared with the reference, and kept if it is captured. A tensor that is laid
    out over ranks is measured on each rank by its part.
    """

    watched: Sequence[WatchedParameter]
    captured: Sequence[WatchedParameter]
    """The parameters that are captured; their streams say which kinds."""
    capture: CaptureProbe | None
    """Copies what is captured; ``None`` where nothing is."""
    tools: StepTools
    access: ParameterAccess
    ranks: Ranks | None
    flat: Mapping[str, FlatShard]
    """The parameters of FSDP1 that are laid out over ranks, by site."""
    reference: Reference | None
    states: StateReader | None
    """Finds the states of optimizers; ``None`` where no rule is about them."""
    previous: PreviousUpdates
    _before: dict[str, tuple[WatchedParameter, int, Tensor]] = field(default_factory=dict)
    """By site the ``id`` of a parameter, and its copy from before the optimizer moves it until its update is observed."""
    _unsupported: defaultdict[torch.dtype | type, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Names of parameters that are not real floating ones."""

    def __post_init__(self) -> None:
        with_functions = [
            (kind, target.site)
            for target in self.watched
            for kind, stream in target.streams.items()
            if (stream.functions or stream.sources) and kind != STATE
        ]
        captured = [(kind, target.site) for target in self.captured for kind in target.streams]
        # Those that are laid out over ranks, by name.
        expected = {
            name_of(kind, site.name): self.flat.get(site.name)
            for kind, site in with_functions + captured
            if site.name in self.flat or ((tensor := site.tensor()) is not None and is_sharded(tensor))
        }
        self.whole_tensors = WholeTensors(expected, self.ranks, self.tools.report_not_captured)
        self._accumulator = self.tools.accumulator
        self._cosines = Cosines(self.tools, self.access.gradient, self._own_part, self.previous)
        self._captured = {(kind, site.name) for kind, site in captured}
        known = {target.site.name for target in self.watched} if self.captured else ()
        self._sites = [*self.watched, *(Watched(target.site, {}) for target in self.captured if target.site.name not in known)]

    def observe_parameters(self, only: Selected = None) -> None:
        """Observe parameters, and copy those whose update is recorded."""
        for read in self._read({PARAMETER, DIFFERENCE, UPDATE}, only, self.access.parameter):
            self._observe(PARAMETER, "parameters", read)
            # One after the other: all differences at once would take as much memory as the parameters.
            differences: dict[Stream, Difference] = {}
            for target, parameter in () if self.reference is None else read:
                with self._failing({DIFFERENCE}, target, parameter):
                    self._compare(target, parameter, differences)
            if differences:
                self._accumulator.observe_matrices(differences)
            for target, parameter in read:
                if UPDATE in target.streams or (UPDATE, target.site.name) in self._captured:
                    with self._failing({UPDATE}, target, parameter):
                        self._copy(target, parameter)

    def observe_gradients(self, kind: str, only: Selected = None, scale: Scale = None) -> None:
        """Observe the gradients that there are, of ``gradient`` or ``gradient_before_clip``."""
        for gradients in self._read({kind}, only, self.access.gradient):
            self._observe(kind, "gradients", gradients, scale)
        if kind == GRADIENT:
            self._cosines.keep_versions(self.watched)

    def observe_arriving(self, parameter: Tensor, gradient: Tensor, scale: Scale) -> None:
        """Observe a gradient that arrives at a parameter, whose ``grad`` does not have it yet."""
        read = self._read({GRADIENT}, (id(parameter),), lambda _parameter: gradient)
        for gradients in read:
            self._observe(GRADIENT, "gradients", gradients, scale)

    def observe_updates(self, only: Selected = None, *, is_skipped: bool | Tensor = False, optimizers: Iterable[Optimizer] = ()) -> None:
        """Observe parameters minus their copies, release the copies, and observe what optimizers keep of the parameters.

        The update of a skipped step is 0, whatever else moved them. Where ``is_skipped`` is a tensor, its value is not read.
        """
        optimizers = [*optimizers]
        self._observe_states(only, optimizers, is_skipped)
        before = [(target, copy) for target, identity, copy in self._before.values() if only is None or identity in only]
        if not before:
            return
        for target, _copy in before:
            del self._before[target.site.name]
        relative_to = [(target.streams[UPDATE], copy) for target, copy in before if UPDATE in target.streams and copy.is_floating_point()]
        self._accumulator.measure_all(self._own(relative_to), are_bases=True)
        updates: list[tuple[WatchedParameter, Tensor]] = []
        dtypes: dict[str, torch.dtype] = {}
        """Dtype of each parameter by site. The update of a half-precision parameter is float32."""
        for target, copy in before:
            parameter = target.site.tensor()
            if parameter is not None:
                with self._failing({UPDATE}, target, copy):
                    after = None if is_skipped is True else self.access.parameter(parameter)
                    if is_skipped is True or after is not None:
                        dtypes[target.site.name] = copy.dtype
                        updates.append((target, copy.zero_() if after is None else update(copy, after)))
        self._observe(UPDATE, "updates", updates)
        for target, tensor in updates:
            stream = target.streams.get(UPDATE)
            if stream is not None and stream.compared_with and tensor.is_floating_point():
                with self._failing({UPDATE}, target, tensor):
                    self._cosines.compare_with_gradient(stream, target, tensor, optimizers, is_negated=True)
                    self._cosines.compare_with_previous(stream, tensor, dtypes[target.site.name], is_skipped)

    def finish(self) -> None:
        """Log which parameters are not recorded."""
        self.tools.log_unsupported("parameters", self._unsupported, "Totals are without them.")
        if self.states is not None:
            self.states.finish()

    def close(self) -> None:
        """Release the copies; nothing is read any more."""
        self._sites = []
        self._before.clear()
        self.whole_tensors.close()

    def _read(self, kinds: Set[str], only: Selected, read: Callable[[Tensor], Tensor | None]) -> Iterator[_Tensors]:
        """Read the parameters with a stream or a capture of these kinds: all at once, where that takes no memory."""
        captured = {site for kind, site in self._captured if kind in kinds}
        wanted = [target for target in self._sites if not kinds.isdisjoint(target.streams) or target.site.name in captured]
        present = [
            (target, tensor) for target in wanted if (tensor := target.site.tensor()) is not None and (only is None or id(tensor) in only)
        ]
        if not self.access.makes_copies:
            yield [(target, tensor) for target, parameter in present if (tensor := read(parameter)) is not None]
            return
        # One after the other: all at once would take as much memory as the parameters.
        for target, parameter in present:
            tensor = None
            with self._failing(kinds, target, parameter):
                tensor = read(parameter)
            if tensor is not None:
                yield [(target, tensor)]

    def _observe(self, kind: str, what: str, read: _Tensors, scale: Scale = None) -> None:
        """Measure tensors divided by a scale, call the user's functions with them, and keep those that are captured."""
        measured = [
            (target.streams[kind], tensor)
            for target, tensor in read
            if kind in target.streams and self._is_supported(target.site.name, tensor)
        ]
        if measured:
            with self.tools.reporter.guard(what, self._accumulator):
                self._accumulator.measure_all(self._own(measured), scale=scale)
        matrices: dict[Stream, Difference] = {}
        for target, tensor in read:
            stream = target.streams[kind] if kind in target.streams else None  # noqa: SIM401  # `get` would be a call for each tensor
            is_captured = (kind, target.site.name) in self._captured
            if not is_captured and (stream is None or not (stream.functions or stream.sources)):
                continue
            is_laid_out = is_sharded(tensor) or target.site.name in self.flat
            if stream is not None and stream.sources and tensor.is_floating_point() and not is_laid_out:
                with failing_alone(functools.partial(self._accumulator.fail_spectra, stream)):
                    matrices[stream] = Difference(matrices_of(target.site, divided_by_scale(strided(tensor), scale)))
            if is_captured or is_laid_out or (stream is not None and stream.functions):
                name = name_of(kind, target.site.name)
                use = functools.partial(self._use_whole, kind, target, is_laid_out=is_laid_out)
                with failing_alone(functools.partial(self.tools.report_not_captured, name)):
                    self.whole_tensors.give(name, [divided_by_scale(tensor, scale)], use)
        if matrices:
            self._accumulator.observe_matrices(matrices)

    def _use_whole(self, kind: str, target: WatchedParameter, tensor: Tensor, *, is_laid_out: bool) -> None:
        """Call the user's functions with a whole tensor, and keep it if it is captured."""
        if kind in target.streams and tensor.is_floating_point():
            self._accumulator.call_functions(target.streams[kind], tensor)
            if is_laid_out and target.streams[kind].sources:
                self._accumulator.observe_matrices({target.streams[kind]: Difference(matrices_of(target.site, tensor))})
        if self.capture is not None and (kind, target.site.name) in self._captured:
            self.capture.keep(kind, target.site.name, 0, tensor)

    def _copy(self, target: WatchedParameter, parameter: Tensor) -> None:
        """Copy a parameter before the optimizer moves it, in place of an older copy."""
        if (UPDATE, target.site.name) in self._captured or self._is_supported(target.site.name, parameter):
            copy = _readable(parameter)
            copy = copy.clone() if copy.layout is torch.strided else copy.to_dense()
            self._before[target.site.name] = target, id(target.site.tensor()), copy

    def _compare(self, target: WatchedParameter, parameter: Tensor, differences: dict[Stream, Difference]) -> None:
        """Observe the difference of a parameter from the reference's, and put matrices whose singular values are recorded with others'."""
        assert self.reference is not None
        stream, reference = target.streams.get(DIFFERENCE), self.reference.parameter(target.site)
        if stream is None or reference is None or not self._is_supported(target.site.name, parameter):
            return
        parameter, reference = parameter.detach(), reference.detach()
        live_part, reference_part = self._own_part(stream, parameter), self._own_part(stream, reference)
        if live_part is not None and reference_part is not None:
            self._accumulator.measure_pair(stream, live_part, reference_part.to(live_part.device))
        if stream.functions:
            call = functools.partial(self._accumulator.call_functions, stream)
            self.whole_tensors.give(name_of(DIFFERENCE, stream.site), (parameter, reference.to(parameter.device)), call)
        if stream.sources:
            reference = reference.to(parameter.device)
            if is_sharded(parameter) or target.site.name in self.flat:
                use = functools.partial(self._use_difference, stream, target.site)
                self.whole_tensors.give(name_of(DIFFERENCE, stream.site), (parameter, reference), use)
            else:
                differences[stream] = Difference(matrices_of(target.site, parameter), matrices_of(target.site, reference))

    def _use_difference(self, stream: Stream, site: ParameterSite, parameter: Tensor, reference: Tensor) -> None:
        self._accumulator.observe_matrices({stream: Difference(matrices_of(site, parameter), matrices_of(site, reference))})

    def _observe_states(self, only: Selected, optimizers: Sequence[Optimizer], is_skipped: bool | Tensor) -> None:
        """Measure the states that optimizers keep of some parameters, and call the user's functions with them."""
        if self.states is None:
            return
        watched = [target for target in self._sites if STATE in target.streams and (only is None or id(target.site.tensor()) in only)]
        with self.tools.reporter.guard("optimizer states", self._accumulator):
            read = [*self.states.states(optimizers, watched, has_stepped=is_skipped is False)]
            self._accumulator.measure_all(self._own([(stream, tensor) for _target, stream, tensor in read]))
            self._accumulator.totals = self.states.totals()
            matrices: dict[Stream, Difference] = {}
            for target, stream, tensor in read:
                with failing_alone(functools.partial(self._accumulator.fail, stream, tensor)):
                    self._cosines.compare_with_gradient(stream, target, tensor, optimizers)
                    if (stream.functions or stream.sources) and (is_sharded(tensor) or target.site.name in self.flat):
                        what = "functions" if stream.functions else "statistics of singular values"
                        raise ValueError(f"it is laid out over ranks, and {what} get whole tensors; expected a rule without {what}")
                    if stream.sources:
                        matrices[stream] = Difference(matrices_of(target.site, strided(tensor)))
                    if stream.functions:
                        call = functools.partial(self._accumulator.call_functions, stream)
                        self.whole_tensors.give(name_of(STATE, stream.site), [tensor], call)
            if matrices:
                self._accumulator.observe_matrices(matrices)

    def _own(self, pairs: Iterable[tuple[Stream, Tensor]]) -> list[tuple[Stream, Tensor]]:
        """This rank's part of each tensor. Plain tensors are returned whole; equal copies on other ranks are not counted again."""
        parts = []
        for stream, tensor in pairs:
            try:
                if (stream.needs | stream.base_needs) & Need.TOKENS:
                    self._check_tokens(stream, tensor)
                part = self._own_part(stream, tensor) if self.flat or is_sharded(tensor) else tensor
            except Exception as error:
                self._accumulator.fail(stream, tensor, error)  # this one alone
                continue
            if part is not None:
                parts.append((stream, part))
        return parts

    def _check_tokens(self, stream: Stream, tensor: Tensor) -> None:
        """Check that this rank has whole tokens, whose norms are recorded."""
        if self._shard_of(stream) is not None or is_sharded(tensor):
            raise ValueError("it is laid out over ranks, and token_norm and token_rms are of whole tokens; expected a rule without them")

    def _own_part(self, stream: Stream, tensor: Tensor) -> Tensor | None:
        shard, part = self._shard_of(stream), None
        if shard is not None:
            part = None if shard.is_copy else tensor
        elif is_sharded(tensor):
            part = own_part(tensor)
        else:
            return tensor
        if part is not None:
            self._accumulator.parts.add(stream)
        return part

    def _shard_of(self, stream: Stream) -> FlatShard | None:
        """The layout of a parameter of FSDP1, which its states share."""
        return self.flat.get(stream.site if stream.origin is None else stream.origin.site)

    def _failing(self, kinds: Set[str], target: WatchedParameter, tensor: Tensor) -> AbstractContextManager[None]:
        """Within the block a parameter that cannot be read, copied or compared is reported."""

        def fail(error: Exception) -> None:
            for kind in sorted(kinds):
                if kind in target.streams:
                    self._accumulator.fail(target.streams[kind], tensor, error)
                if (kind, target.site.name) in self._captured:
                    self.tools.report_not_captured(name_of(kind, target.site.name), error)

        return failing_alone(fail)

    def _is_supported(self, site: str, tensor: Tensor) -> bool:
        """Whether a tensor is a real floating one; another is noted."""
        if not tensor.is_floating_point():
            self._unsupported[tensor.dtype].append(site)
            return False
        return True
