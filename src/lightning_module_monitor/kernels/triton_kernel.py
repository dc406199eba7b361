"""Moments by Triton: CUDA and ROCm tensors are read once, in place, by a launch for each tensor or for many.

A launch writes *parts*, float64 rows of moments, into slots on the device; :meth:`TritonKernel.collect` merges them by another launch.
It reads nothing from the device, does not wait, and copies only from pinned memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_module_monitor.kernels.bins_of_floats import ALL_BINS, FINE, HISTOGRAM, Bins, needed_bins
from lightning_module_monitor.kernels.moments import NUM_FIELDS, Need, num_features
from lightning_module_monitor.kernels.slots import Parts, Reserved, Slots, Stream, copied, current_stream

TILE = 1024
"""Elements that a program loads at once."""

WARPS = 8
"""Warps of a program: each thread has four elements of a tile, and all their sums stay in registers."""

COLUMNS_OF_ROWS, COLUMNS_OF_SHORT_ROWS = 32, 4
"""So many of them are of one row, of at least so many elements: on an H100 as fast as any number for rows of 64 to 4096 elements."""

LONG_ROW = 4096
"""All elements that a program loads at once are of one row, if rows are longer: they are few, and each is read by one program."""

PROGRAMS_OF_PROCESSOR = 4
"""At most as many programs of a tensor for each multiprocessor of a GPU, which runs so many at once; fewer would load too little at once.
A larger tensor has longer spans, not more programs."""

NUM_PROCESSORS = 132
"""Where it is not known how many there are: those of an H100."""

PROGRAMS_OF_TENSORS = 1 << 12
"""At most as many programs for tensors that share a launch, plus one for each tensor: so many that the last ones end together."""

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
        except torch.cuda.OutOfMemoryError:  # no error of Triton
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


@functools.lru_cache(maxsize=64)
def num_programs_of(device: torch.device) -> int:
    """The most programs for a tensor."""
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NUM_PROCESSORS
    return PROGRAMS_OF_PROCESSOR * num_processors


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
        self._parts = Parts(device, self._merge_launches)
        self._launches: list[tuple[int, int]] = []
        """For each launch and row: the row, and the number of the launch, or of the tensor in a launch."""
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=device)
        self._counts = {bins: Slots(zeros, device, bins.num_counts, 64) for bins in ALL_BINS}
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
        self._measure(rows, tensor, needs, other, shift=shift, scale=scale)

    def add_product(self, row: int, tensor: Tensor, other: Tensor, sign: int) -> None:
        """Measure the mean of ``sign * tensor * other`` by one launch, in float64."""
        self._measure((row,), tensor, Need.MEAN, other, sign=sign)

    def _measure(
        self,
        rows: Sequence[int],
        tensor: Tensor,
        needs: int,
        other: Tensor | None,
        *,
        sign: int | None = None,
        shift: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
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
        cut = _spans((tensor.numel(),), (place.length,), num_programs_of(self._device))
        parts = self._parts.reserve(cut.num_programs)
        counts = self._reserve_counts(needs, 1)
        launch(
            self._device, self._functions.measure, cut.num_programs[0],
            tensor, other, sign, shift, shift_stride, scale, tensor.numel(), *place, cut.steps, parts.chunk, parts.start,
            *_arguments(counts),
            NEEDS=needs, ROWS=TILE // cut.columns, COLUMNS=cut.columns, IS_FLAT=not place.length, IN_PAIRS=self._in_pairs,
        )  # fmt: skip
        self._launches += [(row, parts.number) for row in rows]
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
        launches: list[tuple[int, int]] = []
        counted: list[tuple[int, tuple[Bins, int]]] = []
        for (_dtype, need, _num_columns, is_flat), members in alike.items():
            rows_alike, tensors_alike, places = zip(*members, strict=True)
            first, counts = self._measure_alike(tensors_alike, places, need, scale, is_flat=is_flat)
            launches += zip(rows_alike, itertools.count(first), strict=False)
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
            parts, places = self._parts.all()
            launches = np.array(sorted(self._launches), dtype=np.int64).reshape(-1, 2)
            begins = np.searchsorted(launches[:, 0], np.arange(num_rows + 1))
            layout = copied(self._device, np.concatenate([begins, *places[launches[:, 1]].T]))
            merge = self._functions.merge
            launch(self._device, merge, num_rows, parts, layout, len(launches), num_rows, moments, 1, num_rows, LANES=MERGE_LANES)
        return moments

    def counts(self, bins: Bins, rows: Sequence[int]) -> Tensor:
        """Counts of some rows, float64, shape ``(len(rows), bins.num_counts)``, on the device."""
        counts = torch.zeros((len(rows), bins.num_counts), dtype=torch.float64, device=self._device)
        pairs = [(index, slot) for index, row in enumerate(rows) for slot in self._counted.get((bins, row), ())]
        if not pairs:
            return counts
        indices, slots = copied(self._device, np.array(pairs, dtype=np.int64).T.copy())
        return counts.index_add_(0, indices, self._counts[bins].all()[slots].double())

    def _reserve_counts(self, needs: int, num: int) -> dict[Bins, Reserved]:
        """Slots of the counts of tensors, for each set of bins."""
        return {bins: slots.reserve(num if needs & bins.need else 0) for bins, slots in self._counts.items()}

    def _measure_alike(
        self, tensors: Sequence[Tensor], places: tuple[_Place, ...], needs: int, scale: Tensor | None, *, is_flat: bool
    ) -> tuple[int, dict[Bins, Reserved]]:
        """Measure tensors by a single launch; returns the number of the first, and the slots of their counts."""
        addresses, sizes = tuple(tensor.data_ptr() for tensor in tensors), tuple(tensor.numel() for tensor in tensors)
        cut, layout = _layout(self._device, current_stream(self._device), addresses, sizes, places)
        parts = self._parts.reserve(cut.num_programs)
        counts = self._reserve_counts(needs, len(tensors))
        launch(
            self._device, self._functions.measure_all, sum(cut.num_programs),
            tensors[0], layout, len(tensors), scale, cut.steps, parts.chunk, parts.start, *_arguments(counts),
            NEEDS=needs, ROWS=TILE // cut.columns, COLUMNS=cut.columns, IS_FLAT=is_flat, IN_PAIRS=self._in_pairs,
        )  # fmt: skip
        return parts.number, counts

    def _merge_launches(self, parts: Tensor, places: Sequence[tuple[int, int]], merged: Tensor) -> None:
        num = len(places)
        layout = copied(self._device, np.concatenate([np.arange(num + 1), *np.array(places, dtype=np.int64).T]))
        merge = self._functions.merge
        launch(self._device, merge, num, parts, layout, num, num, merged, NUM_FIELDS, 1, LANES=MERGE_LANES)


def _arguments(counts: dict[Bins, Reserved]) -> tuple[Tensor | int | None, ...]:
    """The slots of counts as a launch takes them."""
    return counts[HISTOGRAM].chunk, counts[HISTOGRAM].start, counts[FINE].chunk, counts[FINE].start


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


class _Spans(NamedTuple):
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
def _spans(sizes: tuple[int, ...], lengths: tuple[int, ...], most: int) -> _Spans:
    """Cut tensors of ``sizes`` elements, with rows of ``lengths`` elements that are loaded alike (0: all elements are one stretch).

    There are at most ``most`` programs, plus one for each tensor.
    """
    columns = _columns(lengths[0])
    blocks = [-(-size // ((length or columns) * (TILE // columns))) for size, length in zip(sizes, lengths, strict=True)]
    steps = -(-sum(blocks) // most)
    return _Spans(columns, steps, [-(-num // steps) for num in blocks])


@functools.lru_cache(maxsize=16)
def _layout(
    device: torch.device,
    _stream: Stream,
    addresses: tuple[int, ...],
    sizes: tuple[int, ...],
    places: tuple[_Place, ...],
) -> tuple[_Spans, Tensor]:
    """How tensors are cut, and the layout that ``measure_all`` reads. Cached: addresses are often those of the previous step."""
    cut = _spans(sizes, tuple(place.length for place in places), PROGRAMS_OF_TENSORS)
    firsts = np.cumsum([0, *cut.num_programs[:-1]])
    table = np.column_stack([addresses, sizes, np.array(places), firsts])
    return cut, copied(device, np.concatenate([table.reshape(-1), np.repeat(np.arange(len(sizes)), cut.num_programs)]))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a contiguous stretch of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
