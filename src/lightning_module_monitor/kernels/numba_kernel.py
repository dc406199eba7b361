"""Moments of tensors in host memory, by the compiled loops of :mod:`.numba_loops` over numpy arrays of the same memory."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import dlpack

from lightning_module_monitor.kernels.bins_of_floats import places_of_codes
from lightning_module_monitor.kernels.elements import PLAIN, has_memory
from lightning_module_monitor.kernels.moments import NUM_FIELDS, Moments, Need
from lightning_module_monitor.record import NUM_COUNTS

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
FIRST_PIECES = 1024
"""Pieces that there is room for at first."""
_HOST = (int(dlpack.DLDeviceType.kDLCPU), 0)
NOTICEABLE_S = 1.0
"""Compiling for longer than this is logged."""

_log = logging.getLogger(__name__)


@functools.cache
def loops() -> ModuleType | None:
    """The compiled loops; ``None`` where numba is not installed, or does not work."""
    numba_log = logging.getLogger("numba")
    level = numba_log.level
    if level == logging.NOTSET:
        numba_log.setLevel(logging.WARNING)  # numba logs each step of its compiler to a root logger that takes everything
    try:
        start = time.perf_counter()
        from lightning_module_monitor.kernels import numba_loops  # noqa: PLC0415  # numba is optional, and takes a second

        _compile(numba_loops)
        duration = time.perf_counter() - start
    except Exception as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name in ("numba", "llvmlite")):
            _log.warning("The compiled kernel is not used (%s: %s); monitoring costs more without it.", type(error).__name__, error)
        return None
    finally:
        numba_log.setLevel(level)
    if duration > NOTICEABLE_S:
        _log.info("Compiled the kernel for CPU tensors in %.1f s; numba caches it.", duration)
    return numba_loops


def _compile(numba_loops: ModuleType) -> None:
    """Run every loop once, which compiles it or reads numba's cache."""
    wide, halves = np.ones(1, np.float32), np.ones(1, np.uint16)
    wide.flags.writeable = halves.flags.writeable = False  # as the memory of a tensor is
    buffer, sums = np.empty(1, np.float32), np.zeros((1, NUM_FIELDS + 1))
    numba_loops.add(wide, wide.view(np.int32), 1, Need.EVERYTHING, sums, 0)
    numba_loops.add_made((halves, _EMPTY, _EMPTY, _EMPTY), buffer, buffer.view(np.int32), 1, Need.EVERYTHING, sums, 0)
    numba_loops.count(wide.view(np.uint32), np.zeros(1024, np.int64), np.zeros(NUM_COUNTS, np.int64))
    numba_loops.largest_magnitude(wide.view(np.int32), np.int32(1))
    numba_loops.largest_magnitude(halves.view(np.int16), np.int16(1))


def takes(tensor: Tensor) -> bool:
    """Whether the kernel reads a tensor: one whose elements lie in host memory, in a dtype whose squares float64 holds."""
    if type(tensor) not in PLAIN or not tensor.is_cpu or tensor.dtype not in DTYPES or loops() is None:
        return False
    try:
        has_address = tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # it is sparse, or a transform of torch.func wraps it
        return False
    # A functional tensor and zeros without memory have no address, and a nested one or one that is to be negated has other elements there.
    return has_address and not (tensor.is_nested or tensor.is_neg()) and has_memory(tensor)


class _Exported:
    """Gives numpy a tensor's memory, also of one that needs a gradient, and to be read only.

    After ``Tensor.numpy()`` the program could never again resize the tensor's storage, as one that streams weights does.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_options: object) -> Any:  # noqa: ANN401  # a capsule
        return dlpack.to_dlpack(self._tensor)  # type: ignore[attr-defined]  # documented, and not in the module's __all__

    def __dlpack_device__(self) -> tuple[int, int]:
        return _HOST


def array_of(tensor: Tensor) -> NDArray[np.float32] | NDArray[np.uint16]:
    """The elements of a tensor that :func:`takes` is true of, in order: float32, or the bits of bfloat16 as uint16."""
    if tensor.dtype is torch.float32:
        array: Any = np.from_dlpack(_Exported(tensor))
        floats: NDArray[np.float32] = array.ravel()
        return floats
    if tensor.dtype is torch.bfloat16:
        return np.from_dlpack(_Exported(tensor.view(torch.int16))).view(np.uint16).ravel()
    return array_of(tensor.float())


@functools.cache
def _place_of_code() -> NDArray[np.int64]:
    return np.ascontiguousarray(places_of_codes(8).reshape(-1))


_EMPTY, _NO_HALVES = np.empty(0, np.float32), np.empty(0, np.uint16)
_EMPTY.flags.writeable = _NO_HALVES.flags.writeable = False  # as the memory of a tensor is: the loops are compiled for that
# Made here: what is made within a transform of torch.func has no memory that numpy could read.
_NOTHING = np.array([field.numpy() for field in Moments.of_nothing(1)])
_INFINITY, _NAN = np.array([np.inf, np.nan], np.float32).view(np.int32).tolist()
"""Bits of float32."""


class NumbaKernel:
    """The kernel of tensors in host memory; see :class:`~lightning_module_monitor.kernels.kernel.Kernel`."""

    def __init__(self, _device: torch.device) -> None:
        self._sums = np.zeros((FIRST_PIECES, NUM_FIELDS + 1))
        """Those of the pieces of tensors, as the loops make them."""
        self._rows: list[Sequence[int]] = []
        """The rows that every piece belongs to."""
        self._counts: dict[int, NDArray[np.int64]] = {}

    def add(self, rows: Sequence[int], tensor: Tensor, needs: int) -> None:
        """Measure a tensor once and merge it into rows."""
        array = array_of(tensor)
        is_float32 = array.dtype == np.float32
        if needs & _MOMENTS:
            features = tensor.shape[-1] if needs & _TOKENS and tensor.dim() else 1
            if is_float32:
                self._sum(rows, array.size, _compiled().add, array, array.view(np.int32), features, needs)
            else:
                self._sum(rows, array.size, _compiled().add_made, (array, _EMPTY, _EMPTY, _EMPTY), *_buffers(), features, needs)
        if needs & _HISTOGRAM:
            # A bfloat16 is the upper half of a float32.
            self._count(rows, array.view(np.uint32) if is_float32 else array.astype(np.uint32) << np.uint32(16))

    def add_all(self, rows: Sequence[int], tensors: Sequence[Tensor], needs: Sequence[int]) -> None:
        """:meth:`add` of many tensors."""
        for row, tensor, need in zip(rows, tensors, needs, strict=True):
            self.add((row,), tensor, need)

    def add_difference(self, rows: Sequence[int], tensor: Tensor, other: Tensor | None, shift: Tensor | None, needs: int) -> None:
        """:meth:`add` of ``tensor - other - shift``, in float32."""
        is_repeated = shift is None or shift.shape == tensor.shape[-1:]
        if not is_repeated or needs & Need.HISTOGRAM:
            difference = tensor.float() if other is None else tensor.float() - other.float()
            self.add(rows, difference if shift is None else difference - shift.float(), needs)
            return
        features = tensor.shape[-1] if tensor.dim() else 1
        arrays = [_EMPTY if one is None else array_of(one.float()) for one in (tensor, other, shift)]
        self._sum(rows, tensor.numel(), _compiled().add_made, (_NO_HALVES, *arrays), *_buffers(), features, needs)

    def collect(self, num_rows: int) -> Tensor:
        """The moments of the rows, float64, shape ``(NUM_FIELDS, num_rows)``."""
        rows = [row for rows in self._rows for row in rows]
        sums = self._sums[: len(self._rows)].T.copy()
        place = Moments._fields.index("maximum")
        sums[place : place + 2] = _floats_of(sums[place : place + 2])
        with np.errstate(invalid="ignore"):
            moments = np.stack(Moments(*sums[:-1]).finished(sums[-1]))
        if len(rows) > len(self._rows):
            moments = moments[:, [piece for piece, rows in enumerate(self._rows) for _row in rows]]
        if len(set(rows)) < len(rows):
            return torch.stack(Moments(*torch.from_numpy(moments)).merge(torch.tensor(rows), num_rows))
        together = np.repeat(_NOTHING, num_rows, axis=1)
        together[:, np.array(rows, np.int64)] = moments
        return torch.from_numpy(together)

    def counts(self, rows: Sequence[int]) -> Tensor:
        """The counts of some rows, float64, shape ``(len(rows), NUM_COUNTS)``."""
        nothing = np.zeros(NUM_COUNTS, np.int64)
        return torch.from_numpy(np.stack([self._counts.get(row, nothing) for row in rows])).double()

    def _sum(self, rows: Sequence[int], size: int, loop: Callable[..., None], *arguments: object) -> None:
        """Sum over a tensor of ``size`` elements by a loop."""
        first, num_pieces = len(self._rows), -(-size // _compiled().PIECE)
        if first + num_pieces > len(self._sums):
            self._sums = np.concatenate([self._sums, np.zeros((first + num_pieces, NUM_FIELDS + 1))])
        loop(*arguments, self._sums, first)
        self._rows += [rows] * num_pieces

    def _count(self, rows: Sequence[int], bits: NDArray[np.uint32]) -> None:
        counts = np.zeros(NUM_COUNTS, np.int64)
        _compiled().count(bits, _place_of_code(), counts)
        for row in rows:
            self._counts[row] = self._counts[row] + counts if row in self._counts else counts


def _floats_of(bits: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest and the smallest elements, from their bits with their signs, shape ``(2, pieces)``; NaN where one of them is NaN."""
    magnitudes = np.abs(bits)
    magnitudes[:, (magnitudes > _INFINITY).any(0)] = _NAN
    return np.copysign(magnitudes.astype(np.int32).view(np.float32), bits)


def _buffers() -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Room for a chunk, and the same memory as bits."""
    buffer = np.empty(_compiled().CHUNK, np.float32)
    return buffer, buffer.view(np.int32)


def _compiled() -> ModuleType:
    compiled = loops()
    assert compiled is not None
    return compiled


_MOMENTS, _TOKENS, _HISTOGRAM = Need.EVERYTHING, Need.TOKENS, Need.HISTOGRAM
