"""The contract of the kernels, and the table of a step: each tensor goes to the kernel of its device."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.cuda import OutOfMemoryError  # torch.OutOfMemoryError since torch 2.5

from lightning_module_monitor.kernels import numba_kernel, triton_kernel
from lightning_module_monitor.kernels.bins_of_floats import Bins
from lightning_module_monitor.kernels.elements import PLAIN, strided
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.numba_kernel import NumbaKernel
from lightning_module_monitor.kernels.torch_kernel import TorchKernel, widest
from lightning_module_monitor.kernels.triton_kernel import TritonKernel

Scale: TypeAlias = Tensor | float | None
"""The factor of a loss: a number, or a tensor of shape ``()`` on any device; ``None`` if it was not scaled."""

_HOST = torch.device("cpu")


class Kernel(Protocol):
    """Rows of moments and of counts, of the tensors of one device.

    A tensor may change as soon as a method returns. No method reads a value on the host before :meth:`collect`, and on an
    accelerator not even that does. ``needs`` are bits of :class:`~lightning_module_monitor.kernels.moments.Need`, always the same
    for a row. A method that raises has added nothing.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device) -> None: ...

    def add(
        self,
        rows: Sequence[int],
        tensor: Tensor,
        needs: int,
        other: Tensor | None = None,
        shift: Tensor | None = None,
        *,
        scale: Tensor | None = None,
    ) -> None:
        """Measure ``(tensor - other - shift) / scale`` once and merge it into rows. It is float32 for half-precision tensors.

        Args:
            rows: Row numbers.
            tensor: Any shape with at least one element, any real floating dtype of this kernel, strided, detached.
            needs: What the rows need.
            other: Of the same shape; ``None`` is zero.
            shift: Of a shape that is broadcast to that; ``None`` is zero.
            scale: Shape ``()``, on the same device; ``None`` is 1.
        """

    def add_all(self, rows: Sequence[int], tensors: Sequence[Tensor], needs: Sequence[int], *, scale: Tensor | None = None) -> None:
        """:meth:`add` of many tensors that exist at the same time, each into its row."""

    def add_product(self, row: int, tensor: Tensor, other: Tensor, sign: int) -> None:
        """Measure the mean of ``sign * tensor * other``, in the widest dtype of the device, in which a product of float32 is exact.

        Args:
            row: A row that needs the mean alone.
            tensor: As for :meth:`add`.
            other: Of the same shape.
            sign: 1 or -1.
        """

    def collect(self, num_rows: int) -> Tensor:
        """Moments of the rows from 0 to ``num_rows``, float64, shape ``(NUM_FIELDS, num_rows)``, on the kernel's device.

        On the host for a device without float64. A row without tensors has the moments of an empty tensor.
        """

    def counts(self, bins: Bins, rows: Sequence[int]) -> Tensor:
        """Counts of some rows, float64, shape ``(len(rows), bins.num_counts)``, on the same device; zeros for rows without any."""


class MomentTable:
    """Numbered rows of moments, and of counts where they are needed, on the devices of their tensors.

    A row may get tensors of several precisions and devices. Methods and arguments are those of :class:`Kernel`, but tensors may have any
    layout and a graph; an empty tensor changes nothing.
    """

    def __init__(self) -> None:
        self._kernels: dict[tuple[type[Kernel], torch.device], Kernel] = {}

    def add(
        self,
        rows: Sequence[int],
        tensor: Tensor,
        needs: int,
        other: Tensor | None = None,
        shift: Tensor | None = None,
        *,
        scale: Scale = None,
    ) -> None:
        """Measure ``(tensor - other - shift) / scale`` once and merge it into rows; the scale may be on any device.

        Raises:
            ValueError: If the elements of a tensor cannot be read.
        """
        kernel, tensor, other, shift = self._kernel_of(tensor, other, shift)
        if not tensor.numel():
            return
        try:
            kernel.add(rows, tensor, needs, other, shift, scale=None if scale is None else _on_device(scale, tensor.device))
        except Exception as error:
            others = (None if operand is None else operand.detach() for operand in (other, shift))
            scale = None if scale is None else _on_device(scale, tensor.device)
            self._fallback(kernel, tensor.device, error).add(rows, tensor.detach(), needs, *others, scale=scale)

    def add_all(
        self, rows: Sequence[int], tensors: Sequence[Tensor], needs: Sequence[int], *, scale: Scale = None
    ) -> list[tuple[int, Exception]]:
        """:meth:`add` of many tensors that exist at the same time, each into its row.

        Returns:
            Index and error of each tensor that cannot be read.
        """
        failed: list[tuple[int, Exception]] = []
        waiting: defaultdict[Kernel, list[tuple[int, int, Tensor, int]]] = defaultdict(list)
        for index, tensor in enumerate(tensors):
            try:
                kernel, readable, *_operands = self._kernel_of(tensor)
                if not readable.numel():
                    continue
                divisor = None if scale is None else _on_device(scale, readable.device)
                if type(kernel) is NumbaKernel or type(tensor) not in PLAIN:  # gains nothing from several, or may be a copy
                    try:
                        kernel.add((rows[index],), readable, needs[index], scale=divisor)
                    except Exception as error:
                        self._fallback(kernel, readable.device, error).add((rows[index],), readable.detach(), needs[index], scale=divisor)
                else:
                    waiting[kernel].append((index, rows[index], readable, needs[index]))
            except Exception as error:
                failed.append((index, error))
        for kernel, members in waiting.items():
            indices, *arguments = zip(*members, strict=True)
            device = arguments[1][0].device
            divisor = None if scale is None else _on_device(scale, device)
            try:
                kernel.add_all(*arguments, scale=divisor)
            except OutOfMemoryError as error:
                failed += [(index, error) for index in indices]
            except Exception as error:
                self._fallback(kernel, device, error).add_all(*arguments, scale=divisor)
        return failed

    def add_product(self, row: int, row_of_product: int, tensor: Tensor, other: Tensor, *, is_negated: bool = False) -> None:
        """Measure the sum of squares of a tensor, and the mean of its product with another of its shape (or of minus the product)."""
        self.add((row,), tensor, Need.SQUARES)
        kernel, tensor, readable, _shift = self._kernel_of(tensor, other)
        if not tensor.numel():
            return
        assert readable is not None
        sign = -1 if is_negated else 1
        try:
            kernel.add_product(row_of_product, tensor, readable, sign)
        except Exception as error:
            self._fallback(kernel, tensor.device, error).add_product(row_of_product, tensor.detach(), readable.detach(), sign)

    def add_rows(self, rows: Sequence[int], values: Tensor, counted: Tensor, needs: Sequence[int]) -> None:
        """Measure each row of a matrix, strided, detached: its elements for which ``counted``, boolean, is true.

        Every element is a token.
        """
        kernel = self._kernel(TorchKernel, values.device)
        assert isinstance(kernel, TorchKernel)
        kernel.add_rows(rows, values, counted, needs)

    def collect(self, num_rows: int) -> list[Tensor]:
        """Shares of every row, to be merged, each float64, shape ``(NUM_FIELDS, num_rows)``, still on its device."""
        return [kernel.collect(num_rows) for kernel in self._kernels.values()]

    def collect_counts(self, bins: Bins, rows: Sequence[int]) -> list[Tensor]:
        """Shares of the counts of rows, to be added, each float64, shape ``(len(rows), bins.num_counts)``, still on its device."""
        return [kernel.counts(bins, rows) for kernel in self._kernels.values()] if rows else []

    def _kernel_of(
        self, tensor: Tensor, other: Tensor | None = None, shift: Tensor | None = None
    ) -> tuple[Kernel, Tensor, Tensor | None, Tensor | None]:
        """The kernel that measures a difference, and the tensors in a form that it reads."""
        takes = numba_kernel.takes
        if takes(tensor) and (other is None or takes(other)) and (shift is None or takes(shift)):
            return self._kernel(NumbaKernel, _HOST), tensor, other, shift
        tensor = strided(tensor).detach()
        other, shift = (None if operand is None else strided(operand).detach() for operand in (other, shift))
        is_for_triton = all(operand is None or triton_kernel.takes(operand) for operand in (tensor, other, shift))
        return self._kernel(TritonKernel if is_for_triton else TorchKernel, tensor.device), tensor, other, shift

    def _kernel(self, kind: type[Kernel], device: torch.device) -> Kernel:
        kernel = self._kernels.get((kind, device))
        if kernel is None:
            kernel = self._kernels[kind, device] = kind(device)
        return kernel

    def _fallback(self, kernel: Kernel, device: torch.device, error: Exception) -> Kernel:
        """The kernel of torch operations, for tensors that another kernel failed to measure.

        Raises:
            Exception: The error, if the kernel of torch operations itself failed, which needs the most memory, or if there is none left.
        """
        if isinstance(kernel, TorchKernel) or isinstance(error, OutOfMemoryError):
            raise error
        if isinstance(kernel, TritonKernel):
            triton_kernel.give_up(device, error)
        return self._kernel(TorchKernel, device)


def _on_device(scale: Tensor | float, device: torch.device) -> Tensor:
    return scale.detach().to(device) if isinstance(scale, Tensor) else _constant(scale, device)


@functools.lru_cache(maxsize=16)
def _constant(number: float, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.full((), number, dtype=widest(device), device=device)
