"""Moments by Triton: CUDA and ROCm tensors are read once, in place, by a launch for each tensor or for many.

A launch writes *parts*, float64 rows of moments, into slots on the device; :meth:`TritonKernel.collect` merges them by another launch.
The host knows which slots belong to which row. It reads nothing from the device, does not wait, and copies only from pinned memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_module_monitor.kernels.bins_of_floats import ALL_BINS, FINE, HISTOGRAM, Bins, needed_bins
from lightning_module_monitor.kernels.elements import to_device
from lightning_module_monitor.kernels.moments import NUM_FIELDS, Need, num_features

TILE = 1024
"""Elements that a program loads at once."""

WARPS = 8
"""Warps of a program: each thread has four elements of a tile, and all their sums stay in registers."""

COLUMNS_OF_ROWS, COLUMNS_OF_SHORT_ROWS = 32, 4
"""So many of them are of one row, of at least so many elements: on an H100 as fast as any number for rows of 64 to 4096 elements."""

LONG_ROW = 4096
"""All elements that a program loads at once are of one row, if rows are longer: they are few, and each is read by one program."""

PROGRAMS_OF_TENSOR = 1024
"""At most as many programs for a tensor: enough to fill a large GPU. A larger tensor has longer spans, not more programs."""

PROGRAMS_OF_TENSORS = 1 << 14
"""The same for tensors that share a launch, plus one for each tensor."""

MERGE_LANES = 256
"""Parts of a row that are merged at once."""

_logger = logging.getLogger(__name__)
_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}


def takes(tensor: Tensor) -> bool:
    """Whether the kernel measures a tensor: it must be on a CUDA or ROCm device on which Triton works."""
    return tensor.is_cuda and tensor.dtype in _DTYPES and tensor.layout is torch.strided and works(tensor.device)


_is_working: dict[torch.device, bool] = {}


def works(device: torch.device) -> bool:
    """Whether Triton works on a device. The first call compiles and launches a small kernel, without waiting for its result."""
    if device not in _is_working:
        _is_working[device] = True
        try:
            kernel = TritonKernel(device)
            kernel.add((0,), torch.zeros(TILE, device=device), Need.SQUARES)
            kernel.collect(1)
        except torch.cuda.OutOfMemoryError:  # says nothing of Triton
            del _is_working[device]
            raise
        # Triton, its C compiler and the driver fail in many ways; the torch kernel needs none of them.
        except Exception as error:
            give_up(device, error)
    return _is_working[device]


@functools.lru_cache(maxsize=64)
def has_slow_float64(device: torch.device) -> bool:
    """Whether a device has few units for float64, as cards for graphics and inference do: sums are pairs of float32 numbers there."""
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx10", "gfx11", "gfx12"))
    major, minor = torch.cuda.get_device_capability(device)
    return (major, minor) in {(7, 5), (8, 6), (8, 7), (8, 9)} or major == 12


def give_up(device: torch.device, error: Exception) -> None:
    """Stop using Triton on a device, and warn once."""
    if _is_working.get(device, True):
        _logger.warning(
            "Triton does not work on %s (%s: %s); tensors there are measured by torch operations, with more launches. "
            "Check that triton is the version that torch %s requires.",
            device, type(error).__name__, error, torch.__version__,
        )  # fmt: skip
    _is_working[device] = False


def launch(device: torch.device, function: Any, num_programs: int, *arguments: object, **constants: object) -> None:  # noqa: ANN401  # untyped
    """Launch a device function on the current stream. Tests count the launches here."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        function[(num_programs,)](*arguments, **constants, num_warps=WARPS)


class TritonKernel:
    """The kernel of a CUDA or ROCm device; see :class:`~lightning_module_monitor.kernels.table.Kernel`. It needs Triton."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._functions = importlib.import_module("lightning_module_monitor.kernels.triton_loops")
        self._in_pairs = has_slow_float64(device)
        self._parts = _Slots(functools.partial(torch.empty, dtype=torch.float64, device=device), device, NUM_FIELDS, 1 << 14)
        self._launches: list[tuple[int, int, int]] = []
        """For each launch and row: the row, the launch's first slot, and its number of slots."""
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=device)
        self._counts = {bins: _Slots(zeros, device, bins.num_counts, 64) for bins in ALL_BINS}
        self._counted: defaultdict[tuple[Bins, int], list[int]] = defaultdict(list)
        """Numbers of the slots of each set of bins and row."""

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
        """Measure ``(tensor - other - shift) / scale`` by one launch, in float32 or float64."""
        features, shift_stride = num_features(tensor), 0
        in_rows = bool(needs & Need.TOKENS) or shift is not None
        if shift is not None:
            is_one_row = shift.shape[:-1].numel() == 1
            shift_stride = 0 if is_one_row else features
            shift = (shift.reshape(-1).expand(features) if is_one_row else shift.expand(tensor.shape)).resolve_neg().contiguous()
        is_ordered = in_rows
        if other is not None:
            other = other.resolve_neg()
            if in_rows or other.stride() != tensor.stride() or not _is_dense(other):
                other, is_ordered = other.contiguous(), True
        tensor, place = _readable(tensor, is_ordered=is_ordered, in_rows=in_rows)
        cut = _cut((tensor.numel(),), (place.length,), PROGRAMS_OF_TENSOR)
        num_programs = cut.num_programs[0]
        parts = self._parts.reserve(num_programs)
        counts = self._reserve_counts(needs, 1)
        launch(
            self._device, self._functions.measure, num_programs,
            tensor, other, shift, shift_stride, scale, tensor.numel(), *place, cut.steps, parts.chunk, parts.start, *_arguments(counts),
            NEEDS=needs, ROWS=TILE // cut.columns, COLUMNS=cut.columns, IS_FLAT=not place.length, IN_PAIRS=self._in_pairs,
        )  # fmt: skip
        self._launches += [(row, parts.number, num_programs) for row in rows]
        for bins in needed_bins(needs):
            for row in rows:
                self._counted[bins, row].append(counts[bins].number)

    def add_all(self, rows: Sequence[int], tensors: Sequence[Tensor], needs: Sequence[int], *, scale: Tensor | None = None) -> None:
        """Measure all tensors of the same dtype and needs, and rows of about the same length, by a single launch."""
        alike: defaultdict[tuple[torch.dtype, int, int, bool], list[tuple[int, Tensor, _Place]]] = defaultdict(list)
        for row, tensor, need in zip(rows, tensors, needs, strict=True):
            in_rows = bool(need & Need.TOKENS)
            readable, place = _readable(tensor, is_ordered=in_rows, in_rows=in_rows)
            alike[tensor.dtype, need, _columns(place.length), not place.length].append((row, readable, place))
        launches: list[tuple[int, int, int]] = []
        counted: list[tuple[int, tuple[Bins, int]]] = []
        for (_dtype, need, _num_columns, is_flat), members in alike.items():
            rows_alike, tensors_alike, places = zip(*members, strict=True)
            cut, first_part, counts = self._measure_alike(tensors_alike, places, need, scale, is_flat=is_flat)
            launches += zip(rows_alike, itertools.accumulate(cut.num_programs, initial=first_part), cut.num_programs, strict=False)
            for bins in needed_bins(need):
                counted += enumerate(((bins, row) for row in rows_alike), counts[bins].number)
        # After all launches: if any fails, another kernel measures all tensors.
        self._launches += launches
        for number, target in counted:
            self._counted[target].append(number)

    def collect(self, num_rows: int) -> Tensor:
        """Moments of the rows, float64, shape ``(NUM_FIELDS, num_rows)``, on the device."""
        moments = torch.empty((NUM_FIELDS, num_rows), dtype=torch.float64, device=self._device)
        if num_rows:
            launches = np.array(sorted(self._launches), dtype=np.int64).reshape(-1, 3)
            begins = np.searchsorted(launches[:, 0], np.arange(num_rows + 1))
            layout = _copied(self._device, np.concatenate([begins, launches[:, 1], launches[:, 2]]))
            merge = self._functions.merge
            launch(self._device, merge, num_rows, self._parts.all(), layout, len(launches), moments, num_rows, LANES=MERGE_LANES)
        return moments

    def counts(self, bins: Bins, rows: Sequence[int]) -> Tensor:
        """Counts of some rows, float64, shape ``(len(rows), bins.num_counts)``, on the device."""
        counts = torch.zeros((len(rows), bins.num_counts), dtype=torch.float64, device=self._device)
        pairs = [(index, slot) for index, row in enumerate(rows) for slot in self._counted.get((bins, row), ())]
        if not pairs:
            return counts
        indices, slots = _copied(self._device, np.array(pairs, dtype=np.int64).T.copy())
        return counts.index_add_(0, indices, self._counts[bins].all()[slots].double())

    def _reserve_counts(self, needs: int, num: int) -> dict[Bins, _Reserved]:
        """Slots of the counts of tensors, for each set of bins."""
        return {bins: slots.reserve(num if needs & bins.need else 0) for bins, slots in self._counts.items()}

    def _measure_alike(
        self, tensors: Sequence[Tensor], places: tuple[_Place, ...], needs: int, scale: Tensor | None, *, is_flat: bool
    ) -> tuple[_Cut, int, dict[Bins, _Reserved]]:
        """Measure tensors by a single launch; returns how they are cut, and the first slots of parts and of counts."""
        addresses, sizes = tuple(tensor.data_ptr() for tensor in tensors), tuple(tensor.numel() for tensor in tensors)
        cut, layout = _layout(self._device, _current_stream(self._device), addresses, sizes, places)
        total = sum(cut.num_programs)
        parts = self._parts.reserve(total)
        counts = self._reserve_counts(needs, len(tensors))
        launch(
            self._device, self._functions.measure_all, total,
            tensors[0], layout, len(tensors), scale, cut.steps, parts.chunk, parts.start, *_arguments(counts),
            NEEDS=needs, ROWS=TILE // cut.columns, COLUMNS=cut.columns, IS_FLAT=is_flat, IN_PAIRS=self._in_pairs,
        )  # fmt: skip
        return cut, parts.number, counts


class _Reserved(NamedTuple):
    """Consecutive slots."""

    chunk: Tensor | None
    """Their memory; ``None`` if there are none."""
    start: int
    """Index of the first in the chunk."""
    number: int
    """Number of the first among all slots."""


def _arguments(counts: dict[Bins, _Reserved]) -> tuple[Tensor | int | None, ...]:
    """The slots of counts as a launch takes them."""
    return counts[HISTOGRAM].chunk, counts[HISTOGRAM].start, counts[FINE].chunk, counts[FINE].start


class _Slots:
    """Slots of memory on a device, each ``width`` numbers. They are numbered in the order of their chunks, which are never moved.

    A chunk belongs to the stream that allocated it, so that no stream writes to memory that another has yet to initialize.
    """

    def __init__(self, make: Callable[[tuple[int, int]], Tensor], device: torch.device, width: int, slots_of_chunk: int) -> None:
        self._make, self._device, self._width, self._slots_of_chunk = make, device, width, slots_of_chunk
        self._chunks: list[tuple[torch.cuda.Stream | None, Tensor]] = []
        self._free: dict[torch.cuda.Stream | None, tuple[_Reserved, int]] = {}
        """By stream: the free slots of its last chunk, and their number."""
        self._num_slots = 0

    def reserve(self, num: int) -> _Reserved:
        """The next free slots of the current stream."""
        if not num:
            return _Reserved(None, 0, 0)
        stream = _current_stream(self._device)
        free, num_free = self._free.get(stream, (None, 0))
        if free is None or num > num_free:
            num_free = max(num, self._slots_of_chunk)
            # A step may begin in a validation loop under inference mode and continue outside of it.
            with torch.inference_mode(mode=False):
                chunk = self._make((num_free, self._width))
            self._chunks.append((stream, chunk))
            free = _Reserved(chunk, 0, self._num_slots)
            self._num_slots += num_free
        self._free[stream] = _Reserved(free.chunk, free.start + num, free.number + num), num_free - num
        return free

    def all(self) -> Tensor:
        """All slots in the order of their numbers. The current stream of the device waits for the streams that wrote to them."""
        if not self._chunks:
            return self._make((1, self._width))
        current = _current_stream(self._device)
        for stream, chunk in self._chunks:
            if current is not None and stream is not None and stream != current:
                current.wait_stream(stream)
                chunk.record_stream(current)
        return self._chunks[0][1] if len(self._chunks) == 1 else torch.cat([chunk for _stream, chunk in self._chunks])


def _current_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class _Place(NamedTuple):
    """Where the elements of a tensor lie: in rows without a gap, and these in groups."""

    length: int
    """Elements of a row; 0 if all elements are one stretch without a gap, of which any part may be a row."""
    stride: int = 0
    """Elements from the begin of a row to that of the next."""
    group: int = 1
    """After so many rows there is a gap."""
    gap: int = 0
    """How many elements more than ``stride`` the first row of a group begins after the last row of the one before; may be negative."""


_ONE_STRETCH = _Place(0)


def _readable(tensor: Tensor, *, is_ordered: bool, in_rows: bool) -> tuple[Tensor, _Place]:
    """The tensor, and where its elements lie; a copy if they are not in two levels of rows.

    Args:
        tensor: Any shape.
        is_ordered: Whether the elements are read in the order of the dimensions.
        in_rows: Whether the rows are those of the last dimension.
    """
    tensor = tensor.resolve_neg()
    if not in_rows and (tensor.is_contiguous() or (not is_ordered and _is_dense(tensor))):
        return tensor, _ONE_STRETCH
    place = _place(tensor, in_rows=in_rows)
    if place is not None:
        return tensor, place
    features = num_features(tensor)
    return tensor.contiguous(), _Place(features, features) if in_rows else _ONE_STRETCH


def _place(tensor: Tensor, *, in_rows: bool) -> _Place | None:
    """Where the elements of a tensor lie, in the order of its dimensions; ``None`` if they are not in two levels of rows."""
    sizes, strides = list(tensor.shape), list(tensor.stride())
    length = 1
    while sizes and (sizes[-1] == 1 or strides[-1] == length):
        length *= sizes.pop()
        strides.pop()
        if in_rows:
            break
    if in_rows and length != num_features(tensor):
        return None
    levels: list[tuple[int, int]] = []  # sizes and strides, from the inside
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = levels[-1][0] * size, levels[-1][1]
        elif size != 1:
            levels.append((size, stride))
    match levels:
        case []:
            return _Place(length, length)
        case [(_num_rows, stride)]:
            return _Place(length, stride)
        case [(num_rows, stride), (_num_groups, stride_of_groups)]:
            return _Place(length, stride, num_rows, stride_of_groups - num_rows * stride)
    return None


class _Cut(NamedTuple):
    """How tensors are cut into spans, each of ``steps`` blocks of ``TILE // columns`` rows, a program for each span."""

    columns: int
    """Elements of a row that are loaded at once."""
    steps: int
    num_programs: list[int]
    """For each tensor."""


def _columns(length: int) -> int:
    """Elements of a row that are loaded at once: few numbers, each compiled once, and known from the length of rows alone."""
    if not length or length > LONG_ROW:
        return TILE
    return COLUMNS_OF_ROWS if length >= COLUMNS_OF_ROWS else COLUMNS_OF_SHORT_ROWS


@functools.lru_cache(maxsize=1024)
def _cut(sizes: tuple[int, ...], lengths: tuple[int, ...], most: int) -> _Cut:
    """Cut tensors of ``sizes`` elements, with rows of ``lengths`` elements that are loaded alike (0: all elements are one stretch).

    There are at most ``most`` programs, plus one for each tensor.
    """
    columns = _columns(lengths[0])
    blocks = [-(-size // ((length or columns) * (TILE // columns))) for size, length in zip(sizes, lengths, strict=True)]
    steps = -(-sum(blocks) // most)
    return _Cut(columns, steps, [-(-num // steps) for num in blocks])


@functools.lru_cache(maxsize=16)
def _layout(
    device: torch.device,
    _stream: torch.cuda.Stream | None,
    addresses: tuple[int, ...],
    sizes: tuple[int, ...],
    places: tuple[_Place, ...],
) -> tuple[_Cut, Tensor]:
    """How tensors are cut, and the layout that ``measure_all`` reads. Cached: addresses are often those of the previous step."""
    cut = _cut(sizes, tuple(place.length for place in places), PROGRAMS_OF_TENSORS)
    firsts = np.cumsum([0, *cut.num_programs[:-1]])
    table = np.column_stack([addresses, sizes, np.array(places), firsts])
    return cut, _copied(device, np.concatenate([table.reshape(-1), np.repeat(np.arange(len(sizes)), cut.num_programs)]))


def _copied(device: torch.device, numbers: NDArray[np.int64]) -> Tensor:
    """Copy numbers to the device; the host does not wait."""
    with torch.inference_mode(mode=False):
        return to_device(torch.from_numpy(numbers), device)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a contiguous stretch of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
