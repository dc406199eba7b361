"""Moments of tensors in host memory, by the compiled loops of :mod:`.numba_loops` over numpy arrays of the same memory."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import dlpack

from lightning_module_monitor.kernels.bins_of_floats import BINS_OF_OCTAVE, FINE, HISTOGRAM, Bins, cells_of, needed_bins
from lightning_module_monitor.kernels.elements import PLAIN, has_memory
from lightning_module_monitor.kernels.moments import NUM_FIELDS, Moments, Need, num_features

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
FIRST_ROWS = 256
"""Initial capacity of a table."""
_HOST = (int(dlpack.DLDeviceType.kDLCPU), 0)
PORTION = 1 << 17
"""Elements of half precision that are widened at once for a product."""
NOTICEABLE_S = 1.0
"""Compiling for longer than this is logged."""

_log = logging.getLogger(__name__)


@functools.cache
def loops() -> Any:  # noqa: ANN401  # a module, whose compiled functions have no types
    """The compiled loops; ``None`` where numba is not installed or does not work. The first call compiles them or reads numba's cache."""
    numba_log = logging.getLogger("numba")
    level = numba_log.level
    if level == logging.NOTSET:
        numba_log.setLevel(logging.WARNING)  # numba logs each step of its compiler to a root logger that takes everything
    try:
        start = time.perf_counter()
        from lightning_module_monitor.kernels import numba_loops  # noqa: PLC0415  # numba is optional, and takes a second

        is_compiled = _compile(numba_loops)
        duration = time.perf_counter() - start
    except Exception as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name in ("numba", "llvmlite")):
            _log.warning("The compiled kernel is not used (%s: %s); monitoring costs more without it.", type(error).__name__, error)
        return None
    finally:
        numba_log.setLevel(level)
    if is_compiled and duration > NOTICEABLE_S:
        _log.info("Compiled the kernel for CPU tensors in %.1f s; numba caches it.", duration)
    return numba_loops


def _compile(numba_loops: ModuleType) -> bool:
    """Run every loop once, which compiles it or reads numba's cache; returns whether any was compiled."""
    row, wide, halves = np.zeros(NUM_FIELDS), np.ones(1, np.float32), np.ones(1, np.uint16)
    wide.flags.writeable = halves.flags.writeable = False  # as the memory of a tensor is
    numba_loops.add(wide, 1, Need.EVERYTHING, row)
    numba_loops.add_bfloat16(halves, 1, Need.EVERYTHING, row)
    numba_loops.merge(row, row)
    numba_loops.product(wide, wide)
    _count(numba_loops, wide.view(np.uint32), HISTOGRAM)
    compiled = (numba_loops.add, numba_loops.add_bfloat16, numba_loops.merge, numba_loops.product, numba_loops.count)
    return any(loop.stats.cache_misses for loop in compiled if hasattr(loop, "stats"))  # it has none with NUMBA_DISABLE_JIT


def _count(numba_loops: ModuleType, bits: NDArray[np.uint32], bins: Bins) -> NDArray[np.int64]:
    """The row of counts of the bits of float32."""
    counts = np.zeros(bins.num_counts, np.int64)
    numba_loops.count(bits, *cells_of(bins, torch.float32), 23 - bins.mantissa_size, BINS_OF_OCTAVE if bins == FINE else 0, counts)
    return counts


def takes(tensor: Tensor) -> bool:
    """Whether the kernel reads a tensor: its elements must lie in host memory, in a dtype whose squares fit into float64."""
    if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.dtype not in DTYPES or loops() is None:
        return False
    try:
        storage = tensor.untyped_storage()
        has_address = storage.data_ptr() != 0
    except RuntimeError:  # it is sparse
        return False
    # Zero tensors have no address; the memory of nested and lazily negated tensors holds other elements.
    return has_address and not (tensor.is_nested or tensor.is_neg()) and has_memory(tensor, storage)


class _Exported:
    """Exports a tensor's memory to numpy for reading, also if it requires a gradient.

    ``Tensor.numpy()`` would forbid later resizing of the storage, which programs that stream weights do.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_options: object) -> Any:  # noqa: ANN401  # a capsule
        return dlpack.to_dlpack(self._tensor)  # type: ignore[attr-defined]  # documented, and not in the module's __all__

    def __dlpack_device__(self) -> tuple[int, int]:
        return _HOST


def array_of(tensor: Tensor) -> NDArray[np.float32] | NDArray[np.uint16]:
    """The elements in order, of a tensor for which :func:`takes` is true: float32, or the bits of bfloat16 as uint16."""
    if tensor.dtype is torch.float32:
        array: Any = np.from_dlpack(_Exported(tensor))
        floats: NDArray[np.float32] = array.ravel()
        return floats
    if tensor.dtype is torch.bfloat16:
        return np.from_dlpack(_Exported(tensor.view(torch.int16))).view(np.uint16).ravel()
    return array_of(tensor.float())


class NumbaKernel:
    """The kernel of tensors in host memory; see :class:`~lightning_module_monitor.kernels.table.Kernel`."""

    def __init__(self, _device: torch.device) -> None:
        self._table = np.tile(_EMPTY_ROW, (FIRST_ROWS, 1))
        """Moments of the rows, shape ``(rows, NUM_FIELDS)``."""
        self._counts: dict[tuple[Bins, int], NDArray[np.int64]] = {}
        """By set of bins and row."""

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
        """Measure ``(tensor - other - shift) / scale`` once, in float32, and merge it into rows."""
        for operand in (other, shift):
            if operand is not None:
                tensor = tensor.float() - operand.float()
        if scale is not None:
            tensor = tensor.float() / scale
        array = array_of(tensor)
        is_float32 = array.dtype == np.float32
        if needs & Need.EVERYTHING:
            features = num_features(tensor) if needs & Need.TOKENS else 1
            first, *further = rows
            target = _EMPTY_ROW.copy() if further else self._row(first)
            (loops().add if is_float32 else loops().add_bfloat16)(array, features, needs, target)
            for row in rows if further else ():
                loops().merge(target, self._row(row))
        if needs & Need.COUNTS:
            # A bfloat16 is the upper half of a float32.
            bits = array.view(np.uint32) if is_float32 else array.astype(np.uint32) << np.uint32(16)
            for bins in needed_bins(needs):
                counts = _count(loops(), bits, bins)
                for row in rows:
                    self._counts[bins, row] = self._counts[bins, row] + counts if (bins, row) in self._counts else counts

    def add_all(self, rows: Sequence[int], tensors: Sequence[Tensor], needs: Sequence[int], *, scale: Tensor | None = None) -> None:
        """:meth:`add` of many tensors."""
        for row, tensor, need in zip(rows, tensors, needs, strict=True):
            self.add((row,), tensor, need, scale=scale)

    def add_product(self, row: int, tensor: Tensor, other: Tensor, sign: int) -> None:
        """Measure the mean of ``sign * tensor * other``, in float64."""
        total = 0.0
        for portion, factor in zip(tensor.reshape(-1).split(PORTION), other.reshape(-1).split(PORTION), strict=True):
            total += loops().product(array_of(portion.float()), array_of(factor.float()))
        moments = _EMPTY_ROW.copy()
        moments[:2] = tensor.numel(), sign * total / tensor.numel()
        loops().merge(moments, self._row(row))

    def collect(self, num_rows: int) -> Tensor:
        """Moments of the rows, float64, shape ``(NUM_FIELDS, num_rows)``."""
        self._grow(num_rows)
        return torch.from_numpy(self._table[:num_rows].T.copy())

    def counts(self, bins: Bins, rows: Sequence[int]) -> Tensor:
        """Counts of some rows, float64, shape ``(len(rows), bins.num_counts)``."""
        nothing = np.zeros(bins.num_counts, np.int64)
        return torch.from_numpy(np.array([self._counts.get((bins, row), nothing) for row in rows], np.float64))

    def _row(self, row: int) -> NDArray[np.float64]:
        try:
            moments: NDArray[np.float64] = self._table[row]
        except IndexError:
            self._grow(2 * row)
            moments = self._table[row]
        return moments

    def _grow(self, num_rows: int) -> None:
        if num_rows > len(self._table):
            self._table = np.concatenate([self._table, np.tile(_EMPTY_ROW, (num_rows - len(self._table), 1))])


_EMPTY_ROW: NDArray[np.float64] = np.array([float(field) for field in Moments.empty(1)])
