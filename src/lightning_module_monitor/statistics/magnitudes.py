"""The largest magnitude of each of many tensors: one number that also shows whether an element is NaN or infinite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_module_monitor.kernels.elements import in_memory, is_on_host, own_elements, plain, to_host

UNKNOWN = -1
"""The index of a number that does not exist."""


class Magnitudes:
    """A list of largest magnitudes, which stay on the devices of their tensors until they are read.

    One operation takes the smallest and the largest element. Unlike a sum neither overflows, so a non-finite number shows a non-finite
    element. On a CPU the number is computed at once.
    """

    def __init__(self) -> None:
        self._numbers: list[float | tuple[Tensor, Tensor]] = []

    def add(self, tensor: Tensor) -> int:
        """Add a tensor of any shape and floating dtype. A complex tensor counts by its real and imaginary parts.

        Returns:
            The index of its number; ``UNKNOWN`` if the tensor has no element.
        """
        tensor = plain(tensor)
        if tensor.is_complex() or tensor.layout is not torch.strided:
            stored = tensor.detach() if tensor.layout is torch.strided else tensor.detach().coalesce().values()
            tensor = torch.view_as_real(stored.resolve_conj()) if stored.is_complex() else stored
        if not tensor.numel():
            return UNKNOWN
        least, largest = torch.aminmax(in_memory(own_elements(tensor)).detach())
        if is_on_host(tensor):
            self._numbers.append(max(-least.item(), largest.item()))  # both are NaN if any element is
        else:
            self._numbers.append((least, largest))
        return len(self._numbers) - 1

    def read(self) -> list[float]:
        """The largest magnitudes, NaN and infinity included, by one transfer from each device."""
        extremes = iter(to_host([extreme for number in self._numbers if isinstance(number, tuple) for extreme in number]))
        return [max(-float(next(extremes)), float(next(extremes))) if isinstance(number, tuple) else number for number in self._numbers]

    def nonfinite(self) -> Tensor:
        """Whether any element is not finite, without a host read: shape ``()``, bool, on the first of the devices."""
        extremes = [extreme for number in self._numbers if isinstance(number, tuple) for extreme in number]
        on_host = any(not math.isfinite(number) for number in self._numbers if isinstance(number, float))
        flag = torch.full((), on_host, device=extremes[0].device if extremes else "cpu")
        for extreme in extremes:
            flag = flag | ~extreme.isfinite().to(flag.device)
        return flag
