"""The largest magnitude of each of many tensors: one number that also shows whether an element is NaN or infinite."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from lightning_module_monitor.kernels import numba_kernel
from lightning_module_monitor.kernels.elements import in_memory
from lightning_module_monitor.kernels.transfer import transfer

INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80}
"""The bits of infinity; those of NaN are larger."""

BITS = {torch.float32: np.int32, torch.bfloat16: np.int16}
"""Integers as long as the floats."""

_WITHOUT_SIGN = {dtype: whole(np.iinfo(whole).max) for dtype, whole in BITS.items()}

UNKNOWN = -1
"""The place of a number that does not exist."""


class Magnitudes:
    """Numbers one after the other, each at a place of its own, on the devices of their tensors until they are read.

    In a CPU's memory the compiled kernel reads a tensor where it lies. Elsewhere, and without the kernel, smallest and largest element are
    taken by one operation: unlike a sum neither overflows, so that what is not finite is in the tensor.
    """

    def __init__(self) -> None:
        self._numbers: list[tuple[torch.dtype, int] | tuple[Tensor, Tensor]] = []
        self._has_tensors = False
        self._has_nonfinite = False

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, tensor: Tensor) -> int:
        """Add a tensor, of any shape and floating dtype, which is left as it is. A complex one counts by its real and imaginary parts.

        Returns:
            The place of its number; ``UNKNOWN`` if it has no element.
        """
        if tensor.is_complex() or tensor.layout is not torch.strided:
            tensor = _plain(tensor)
        if not tensor.numel():
            return UNKNOWN
        loops = numba_kernel.loops() if numba_kernel.takes(tensor) else None
        if loops is not None:
            array = numba_kernel.array_of(in_memory(tensor))
            dtype = torch.float32 if array.dtype == np.float32 else torch.bfloat16
            bits = loops.largest_magnitude(array.view(BITS[dtype]), _WITHOUT_SIGN[dtype])
            self._has_nonfinite |= bits >= INFINITY[dtype]
            self._numbers.append((dtype, bits))
        else:
            least, largest = torch.aminmax(in_memory(tensor).detach())
            self._has_tensors = True
            self._numbers.append((least, largest))
        return len(self._numbers) - 1

    def read(self) -> list[float]:
        """All numbers, by one transfer from each device: the largest magnitudes; NaN and infinity stay what they are."""
        found = [0.0] * len(self._numbers)
        of_devices: defaultdict[torch.device, list[tuple[int, Tensor, Tensor]]] = defaultdict(list)
        for place, (one, other) in enumerate(self._numbers):
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                of_devices[one.device].append((place, one, other))
            elif isinstance(one, torch.dtype):
                found[place] = _float_of(one, int(other))
        for members in of_devices.values():
            both = torch.stack([torch.stack([-one.double(), other.double()]) for _place, one, other in members])
            for (place, *_tensors), value in zip(members, transfer(both.amax(1)).tolist(), strict=True):
                found[place] = value
        return found

    def may_have_nonfinite(self) -> bool:
        """Whether there may be a non-finite element; reads nothing from other devices."""
        return self._has_nonfinite or self._has_tensors

    def nonfinite(self) -> Tensor:
        """Whether an element is not finite: shape ``()``, bool, on the device of the first number that is on one; nothing is read."""
        extremes = [one for pair in self._numbers for one in pair if isinstance(one, Tensor)]
        found = torch.full((), self._has_nonfinite, device=extremes[0].device if extremes else "cpu")
        for one in extremes:
            found = found | ~one.isfinite().to(found.device)
        return found

    def clear(self) -> None:
        """Forget them."""
        self._numbers.clear()
        self._has_tensors = self._has_nonfinite = False


def _plain(tensor: Tensor) -> Tensor:
    """The stored elements as real numbers; the zeros of a sparse tensor change nothing."""
    tensor = tensor.detach()
    dense = tensor if tensor.layout is torch.strided else tensor.coalesce().values()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _float_of(dtype: torch.dtype, bits: int) -> float:
    whole = torch.int32 if dtype is torch.float32 else torch.int16
    return torch.tensor(bits, dtype=whole, device="cpu").view(dtype).item()
