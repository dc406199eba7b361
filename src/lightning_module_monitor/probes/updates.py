"""What the optimizer did to the parameters: copies of before, and what they differ from after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightning_module_monitor.modules.names import ParameterSite
from lightning_module_monitor.probes.probe import Among


class Copies:
    """Copies of parameters, from right before the optimizer moves them until their update was seen."""

    def __init__(self) -> None:
        self._by_site: dict[ParameterSite, tuple[int, Tensor]] = {}

    def keep(self, site: ParameterSite, parameter: Tensor) -> None:
        """Copy a parameter; the copy of before, if there is one, is forgotten."""
        copy = parameter.detach()
        self._by_site[site] = (id(parameter), copy.clone() if copy.layout is torch.strided else copy.to_dense())

    def take(self, among: Among = None) -> list[tuple[ParameterSite, Tensor]]:
        """The copies of some parameters, or of all, which are not kept any longer."""
        taken = [(site, copy) for site, (parameter, copy) in self._by_site.items() if among is None or parameter in among]
        for site, _copy in taken:
            del self._by_site[site]
        return taken


def updates(before: Iterable[tuple[ParameterSite, Tensor]], *, is_skipped: bool = False) -> Iterator[tuple[ParameterSite, Tensor]]:
    """Parameters now minus their copies of before, in whose place they are computed.

    Args:
        before: What :meth:`Copies.take` gave.
        is_skipped: Whether the optimizer left them where they were: then it is zeros, whatever anybody else did.
    """
    for site, copy in before:
        parameter = site.tensor()
        if parameter is not None:
            yield site, copy.zero_() if is_skipped else difference(parameter.detach(), copy)


def difference(after: Tensor, before: Tensor) -> Tensor:
    """``after - before`` in the place of ``before``; of half-precision tensors in float32, which does not round it again."""
    if after.dtype in (torch.float32, torch.float64):
        return torch.sub(after, before, out=before)
    return after.float() - before.float()
