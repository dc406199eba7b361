"""What the optimizer did to the parameters: copies of before, and what they differ from after."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_module_monitor.kernels.elements import in_memory
from lightning_module_monitor.model.names import ParameterSite
from lightning_module_monitor.probes.probe import Among
from lightning_module_monitor.statistics.loss_scale import WIDE, widened


class Copies:
    """Copies of parameters, from right before the optimizer moves them until their update was seen."""

    def __init__(self) -> None:
        self._by_site: dict[ParameterSite, tuple[int, Tensor]] = {}

    def keep(self, site: ParameterSite, parameter: Tensor) -> None:
        """Copy a parameter; the copy of before, if there is one, is forgotten."""
        copy = in_memory(parameter).detach()
        self._by_site[site] = (id(parameter), copy.clone() if copy.layout is torch.strided else copy.to_dense())

    def take(self, among: Among = None) -> list[tuple[ParameterSite, Tensor]]:
        """The copies of some parameters, or of all, which are not kept any longer."""
        taken = [(site, copy) for site, (parameter, copy) in self._by_site.items() if among is None or parameter in among]
        for site, _copy in taken:
            del self._by_site[site]
        return taken


def update(site: ParameterSite, before: Tensor, *, is_skipped: bool = False) -> Tensor | None:
    """A parameter now minus its copy of before, in whose place it is computed; ``None`` if the parameter is gone.

    Args:
        site: The parameter.
        before: What :meth:`Copies.take` gave.
        is_skipped: Whether the optimizer left it where it was: then it is zeros, whatever anybody else did.

    Raises:
        ValueError: If the parameter's memory was given back.
    """
    parameter = site.tensor()
    if parameter is None:
        return None
    return before.zero_() if is_skipped else difference(in_memory(parameter).detach(), before)


def difference(after: Tensor, before: Tensor) -> Tensor:
    """``after - before`` in the place of ``before``; of half-precision tensors in float32, which does not round it again."""
    if after.dtype in WIDE:
        return torch.sub(after, before, out=before)
    return widened(after) - widened(before)
