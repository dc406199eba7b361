"""The largest magnitude of each of many tensors: one number that also shows whether an element is NaN or infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_module_monitor.kernels.elements import in_memory, is_on_host, own_elements, plain, to_host

UNKNOWN = -1
"""The index of a number that does not exist."""


def has_fractions(tensor: Tensor) -> bool:
    """Whether the elements of a tensor can be non-finite: real or complex numbers in floating point."""
    return tensor.is_floating_point() or tensor.is_complex()


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """The smallest and the largest element of a tensor, each of shape ``()``, on its device; ``None`` if it has no element.

    One operation takes both. Unlike a sum neither overflows; both are NaN if any element is. A complex tensor counts by its real and
    imaginary parts.
    """
    tensor = plain(tensor)
    if tensor.is_complex() or tensor.layout is not torch.strided:
        stored = tensor.detach() if tensor.layout is torch.strided else tensor.detach().coalesce().values()
        tensor = torch.view_as_real(stored.resolve_conj()) if stored.is_complex() else stored
    if not tensor.numel():
        return None
    tensor = in_memory(own_elements(tensor))
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if not tensor.dim():
        return tensor, tensor
    least, largest = torch.aminmax(tensor)
    return least, largest


class Magnitudes:
    """A list of largest magnitudes, which stay on the devices of their tensors until they are read. On a CPU each is read at once."""

    def __init__(self) -> None:
        self._numbers: list[float | tuple[Tensor, Tensor]] = []

    def add(self, tensor: Tensor) -> int:
        """Add a tensor of any shape and floating dtype.

        Returns:
            The index of its number; ``UNKNOWN`` if the tensor has no element.
        """
        found = extremes(tensor)
        if found is None:
            return UNKNOWN
        least, largest = found
        self._numbers.append(max(-least.item(), largest.item()) if is_on_host(least) else found)
        return len(self._numbers) - 1

    def read(self) -> list[float]:
        """The largest magnitudes, NaN and infinity included, by one transfer from each device."""
        values = iter(to_host([extreme for number in self._numbers if isinstance(number, tuple) for extreme in number]))
        return [max(-float(next(values)), float(next(values))) if isinstance(number, tuple) else number for number in self._numbers]
