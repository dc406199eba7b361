"""How parameters, their gradients and their updates are read, and assembled where they are laid out over ranks."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.distributed.shards import FlatShard, gradient_of, is_flattened, is_sharded, whole, whole_of_flat
from lightning_module_monitor.kernels.elements import in_memory
from lightning_module_monitor.model.names import ParameterSite
from lightning_module_monitor.probes.base import Among, WatchedParameter, failing_alone
from lightning_module_monitor.statistics.precision import WIDE, widened


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
    """A parameter minus its copy, in whose memory it is computed; ``None`` if the parameter is gone.

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


def expected_tensors(
    with_functions: Iterable[WatchedParameter], captured: Iterable[WatchedParameter], flat: Mapping[str, FlatShard]
) -> dict[str, FlatShard | None]:
    """The tensors of parameters that are laid out over ranks and that functions get, or that are captured, by name."""
    named = [(name_of(kind, one.site.name), one.site) for one in with_functions for kind, spec in one.specs.items() if spec.functions]
    named += [(name_of(kind, one.site.name, FOR_THE_FILE), one.site) for one in captured for kind in one.specs]
    parameters = [(name, site.name, site.tensor()) for name, site in named]
    return {name: flat.get(site) for name, site, one in parameters if site in flat or (one is not None and is_sharded(one))}
