"""The largest magnitude of each of many tensors: one number that also shows whether an element is NaN or infinite."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from lightning_module_monitor.kernels.elements import in_memory, is_on_host, plain, transfer

UNKNOWN = -1
"""The place of a number that does not exist."""


class Magnitudes:
    """Numbers one after the other, each at a place of its own, on the devices of their tensors until they are read.

    Smallest and largest element are taken by one operation: unlike a sum neither overflows, so that what is not finite is in the tensor. On
    a CPU the number is there at once.
    """

    def __init__(self) -> None:
        self._numbers: list[float | tuple[Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, tensor: Tensor) -> int:
        """Add a tensor, of any shape and floating dtype, which is left as it is. A complex one counts by its real and imaginary parts.

        Returns:
            The place of its number; ``UNKNOWN`` if it has no element.
        """
        tensor = plain(tensor)
        if tensor.is_complex() or tensor.layout is not torch.strided:
            stored = tensor.detach() if tensor.layout is torch.strided else tensor.detach().coalesce().values()
            tensor = torch.view_as_real(stored.resolve_conj()) if stored.is_complex() else stored
        if not tensor.numel():
            return UNKNOWN
        least, largest = torch.aminmax(in_memory(tensor).detach())
        if is_on_host(tensor):
            self._numbers.append(max(-least.item(), largest.item()))  # NaN, if one element is: then both are
        else:
            self._numbers.append((least, largest))
        return len(self._numbers) - 1

    def read(self) -> list[float]:
        """All numbers, by one transfer from each device: the largest magnitudes; NaN and infinity stay what they are."""
        found = [math.nan if isinstance(one, tuple) else one for one in self._numbers]
        of_devices: defaultdict[torch.device, list[tuple[int, Tensor, Tensor]]] = defaultdict(list)
        for place, one in enumerate(self._numbers):
            if isinstance(one, tuple):
                of_devices[one[0].device].append((place, *one))
        for members in of_devices.values():
            both = torch.stack([torch.stack([-least.double(), largest.double()]) for _place, least, largest in members])
            for (place, *_tensors), value in zip(members, transfer(both.amax(1)).tolist(), strict=True):
                found[place] = value
        return found

    def nonfinite(self) -> Tensor:
        """Whether an element is not finite: shape ``()``, bool, on the device of the first number that is on one; nothing is read."""
        extremes = [extreme for one in self._numbers if isinstance(one, tuple) for extreme in one]
        on_host = any(not math.isfinite(one) for one in self._numbers if isinstance(one, float))
        found = torch.full((), on_host, device=extremes[0].device if extremes else "cpu")
        for one in extremes:
            found = found | ~one.isfinite().to(found.device)
        return found

    def clear(self) -> None:
        """Forget them."""
        self._numbers.clear()
