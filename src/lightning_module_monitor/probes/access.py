"""How parameters, their gradients and their updates are read."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_module_monitor.distributed.shards import gradient_of, is_flattened
from lightning_module_monitor.kernels.elements import in_memory
from lightning_module_monitor.model.names import ParameterSite
from lightning_module_monitor.probes.base import Among
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
