"""The contract of the kernels, and the table of a step: each tensor goes to the kernel of its device, and is collected at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_module_monitor.kernels import numba_kernel, triton_kernel
from lightning_module_monitor.kernels.elements import strided
from lightning_module_monitor.kernels.moments import Moments
from lightning_module_monitor.kernels.numba_kernel import NumbaKernel
from lightning_module_monitor.kernels.torch_kernel import TorchKernel
from lightning_module_monitor.kernels.triton_kernel import TritonKernel

_HOST = torch.device("cpu")


class Kernel(Protocol):
    """Rows of moments, and where a histogram is needed rows of counts, of the tensors of one device.

    A tensor may change as soon as a method returns. No method reads a value on the host before :meth:`collect`, and on an
    accelerator not even that does. ``needs`` are bits of :class:`~lightning_module_monitor.kernels.moments.Need`, always the same
    for one row. A method that raises has added nothing.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device) -> None: ...

    def add(self, rows: Sequence[int], tensor: Tensor, needs: int, other: Tensor | None = None, shift: Tensor | None = None) -> None:
        """Measure ``tensor - other - shift`` once and merge it into rows; of half-precision tensors in float32, without another rounding.

        Args:
            rows: Numbers of the rows.
            tensor: Any shape with at least one element, any real floating dtype of this kernel, strided, detached.
            needs: What the rows need.
            other: Of the same shape; ``None`` is zero.
            shift: Of a shape that is broadcast to that; ``None`` is zero.
        """

    def add_all(self, rows: Sequence[int], tensors: Sequence[Tensor], needs: Sequence[int]) -> None:
        """:meth:`add` of many tensors that exist at the same time, each into one row."""

    def collect(self, num_rows: int) -> Tensor:
        """The moments of the rows from 0 to ``num_rows``, float64, shape ``(NUM_FIELDS, num_rows)``, on the kernel's device.

        A device without float64 gives them on the host. A row that nothing was added to has the moments of an empty tensor.
        """

    def counts(self, rows: Sequence[int]) -> Tensor:
        """The counts of some rows, float64, shape ``(len(rows), NUM_COUNTS)``, on the same device; zeros for rows without any."""


class MomentTable:
    """Moments, and where they are needed histograms, of numbered rows, on the devices that the tensors are on.

    A row may get tensors of several precisions and devices. Methods and arguments are those of :class:`Kernel`, but for tensors of any
    layout, which may be part of a graph; an empty tensor changes nothing.
    """

    def __init__(self) -> None:
        self._kernels: dict[tuple[type[Kernel], torch.device], Kernel] = {}
        self._masked: dict[torch.device, TorchKernel] = {}
        """Counts of tensors of which not every element counts."""
        self._merged: list[tuple[list[int], Tensor]] = []

    def add(self, rows: Sequence[int], tensor: Tensor, needs: int, other: Tensor | None = None, shift: Tensor | None = None) -> None:
        """Measure ``tensor - other - shift`` once and merge it into rows.

        Raises:
            ValueError: If a tensor has no elements of its own.
        """
        kernel, tensor, other, shift = self._kernel_of(tensor, other, shift)
        if not tensor.numel():
            return
        try:
            kernel.add(rows, tensor, needs, other, shift)
        except Exception as error:
            others = (None if one is None else one.detach() for one in (other, shift))
            self._instead_of(kernel, tensor.device, error).add(rows, tensor.detach(), needs, *others)

    def add_all(self, rows: Sequence[int], tensors: Sequence[Tensor], needs: Sequence[int]) -> list[tuple[int, Exception]]:
        """:meth:`add` of many tensors that exist at the same time, each into one row.

        Returns:
            The tensors that cannot be read: place and error.
        """
        failed: list[tuple[int, Exception]] = []
        waiting: defaultdict[Kernel, list[tuple[int, Tensor, int]]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            try:
                kernel, readable, *_nothing = self._kernel_of(tensor)
                if not readable.numel():
                    continue
                if type(kernel) is NumbaKernel:  # which gains nothing from several at once
                    try:
                        kernel.add((rows[place],), readable, needs[place])
                    except Exception as error:
                        self._instead_of(kernel, readable.device, error).add((rows[place],), readable.detach(), needs[place])
                else:
                    waiting[kernel].append((rows[place], readable, needs[place]))
            except Exception as error:
                failed.append((place, error))
        for kernel, members in waiting.items():
            try:
                kernel.add_all(*zip(*members, strict=True))
            except Exception as error:
                self._instead_of(kernel, members[0][1].device, error).add_all(*zip(*members, strict=True))
        return failed

    def add_moments(self, rows: list[int], moments: Moments) -> None:
        """Merge moments that were taken elsewhere, float64, shape ``(rows,)``."""
        stacked = torch.stack(tuple(moments))
        # A copy in plain memory: what a functorch transform wraps is refused here and not at the end, with everything else.
        with torch.inference_mode(mode=False):
            kept = torch.empty(stacked.shape, dtype=stacked.dtype, device=stacked.device).copy_(stacked)
        self._merged.append((rows, kept))

    def collect(self, num_rows: int) -> list[Tensor]:
        """Shares of every row, to be merged, each float64, shape ``(NUM_FIELDS, num_rows)``, still on its device."""
        shares = [kernel.collect(num_rows) for kernel in self._kernels.values()]
        for rows, stacked in self._merged:
            index = torch.tensor(rows, device=stacked.device)
            shares.append(torch.stack(Moments(*stacked).merge(index, num_rows)))
        return shares

    def collect_counts(self, rows: Sequence[int]) -> list[Tensor]:
        """Shares of the counts of rows, to be added up, each float64, shape ``(len(rows), NUM_COUNTS)``, still on its device."""
        return [kernel.counts(rows) for kernel in (*self._kernels.values(), *self._masked.values())] if rows else []

    def add_counts(self, row: int, tensor: Tensor, counting: Tensor) -> None:
        """Count in a row's histogram the elements of a tensor for which ``counting``, boolean, of its shape, is true."""
        if tensor.device not in self._masked:
            self._masked[tensor.device] = TorchKernel(tensor.device)
        self._masked[tensor.device].add_counted(row, tensor, counting)

    def _kernel_of(
        self, tensor: Tensor, other: Tensor | None = None, shift: Tensor | None = None
    ) -> tuple[Kernel, Tensor, Tensor | None, Tensor | None]:
        """The kernel that measures a difference, and its tensors as that kernel reads them."""
        takes = numba_kernel.takes
        if takes(tensor) and (other is None or takes(other)) and (shift is None or takes(shift)):
            return self._kernel(NumbaKernel, _HOST), tensor, other, shift
        tensor = strided(tensor).detach()
        other, shift = (None if one is None else strided(one).detach() for one in (other, shift))
        is_for_triton = all(one is None or triton_kernel.takes(one) for one in (tensor, other, shift))
        return self._kernel(TritonKernel if is_for_triton else TorchKernel, tensor.device), tensor, other, shift

    def _kernel(self, kind: type[Kernel], device: torch.device) -> Kernel:
        kernel = self._kernels.get((kind, device))
        if kernel is None:
            kernel = self._kernels[kind, device] = kind(device)
        return kernel

    def _instead_of(self, kernel: Kernel, device: torch.device, error: Exception) -> Kernel:
        """The kernel of torch operations, for what another cannot measure after all: it has noted nothing of it.

        Within a transform of torch.func a tensor may give no array, and Triton may fail to compile.

        Raises:
            Exception: The error, if it is the kernel of torch operations that failed.
        """
        if isinstance(kernel, TorchKernel):
            raise error
        if isinstance(kernel, TritonKernel):
            triton_kernel.give_up(device, error)
        return self._kernel(TorchKernel, device)
