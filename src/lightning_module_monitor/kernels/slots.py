"""Memory on a device that launches write to, in slots of a few numbers. A chunk of slots belongs to the stream that allocated it.

So no stream writes to memory that another has yet to initialize. The host knows which slots are whose, and reads none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_module_monitor.kernels.elements import to_device
from lightning_module_monitor.kernels.moments import NUM_FIELDS

PARTS_OF_CHUNK = 1 << 14
"""1.75 MiB: the parts of some sixty large tensors."""

Stream: TypeAlias = "torch.cuda.Stream | None"


class Reserved(NamedTuple):
    """Consecutive slots."""

    chunk: Tensor | None
    """Their memory; ``None`` if there are none."""
    start: int
    """Index of the first in the chunk."""
    number: int
    """Number of the first among all slots, or of the first launch of parts."""


class Slots:
    """Slots, each of ``width`` numbers. They are numbered in the order of their chunks, which are never moved."""

    def __init__(self, make: Callable[[tuple[int, int]], Tensor], device: torch.device, width: int, slots_of_chunk: int) -> None:
        self._make, self._device, self._width, self._slots_of_chunk = make, device, width, slots_of_chunk
        self._chunks: list[tuple[Stream, Tensor]] = []
        self._free: dict[Stream, tuple[Reserved, int]] = {}
        """By stream: the free slots of its last chunk, and their number."""
        self._num_slots = 0

    def reserve(self, num: int) -> Reserved:
        """The next free slots of the current stream."""
        if not num:
            return Reserved(None, 0, 0)
        stream = current_stream(self._device)
        free, num_free = self._free.get(stream, (None, 0))
        if free is None or num > num_free:
            num_free = max(num, self._slots_of_chunk)
            chunk = _made(self._make, (num_free, self._width))
            self._chunks.append((stream, chunk))
            free = Reserved(chunk, 0, self._num_slots)
            self._num_slots += num_free
        self._free[stream] = Reserved(free.chunk, free.start + num, free.number + num), num_free - num
        return free

    def all(self) -> Tensor:
        """All slots in the order of their numbers. The current stream of the device waits for the streams that wrote to them."""
        return _joined(self._chunks, self._device) if self._chunks else self._make((1, self._width))


@dataclass
class _Chunk:
    """A chunk of parts, and the launches that wrote to it."""

    memory: Tensor
    num_used: int = 0
    launches: list[int] = field(default_factory=list)


class Parts:
    """Parts of moments: each program of a launch writes one. In a full chunk they are merged: one stays of each launch.

    Args:
        device: The device.
        merge: Merges, by a launch, the parts of each of several rows into a tensor, shape ``(rows, NUM_FIELDS)``: it gets all parts,
            and for each row the index of its first part and their number.
    """

    def __init__(self, device: torch.device, merge: Callable[[Tensor, Sequence[tuple[int, int]], Tensor], None]) -> None:
        self._device, self._merge = device, merge
        self._chunks: dict[Stream, _Chunk] = {}
        self._merged: list[tuple[Stream, Tensor, list[int]]] = []
        """Parts of launches of full chunks, one each."""
        self._places: list[tuple[int, int]] = []
        """For each launch the index of its first part in its chunk, and the number of its parts."""

    def reserve(self, numbers: Sequence[int]) -> Reserved:
        """Slots of the current stream for launches, or tensors of a launch, each with so many programs."""
        stream, total = current_stream(self._device), sum(numbers)
        chunk = self._chunks.get(stream)
        if chunk is not None and chunk.num_used and chunk.num_used + total > len(chunk.memory):
            merged = self._new(len(chunk.launches))
            self._merge(chunk.memory, [self._places[launch] for launch in chunk.launches], merged)
            self._merged.append((stream, merged, chunk.launches))
            chunk.num_used, chunk.launches = 0, []  # what is written next is written after that launch has read
        if chunk is None or total > len(chunk.memory):
            chunk = self._chunks[stream] = _Chunk(self._new(max(total, PARTS_OF_CHUNK)))
        reserved = Reserved(chunk.memory, chunk.num_used, len(self._places))
        for number in numbers:
            chunk.launches.append(len(self._places))
            self._places.append((chunk.num_used, number))
            chunk.num_used += number
        return reserved

    def all(self) -> tuple[Tensor, NDArray[np.int64]]:
        """All parts, and for each launch the index of its first part and their number, shape ``(launches, 2)``."""
        places = np.array(self._places, dtype=np.int64).reshape(-1, 2)
        memories: list[tuple[Stream, Tensor]] = []
        start = 0
        for stream, merged, launches in self._merged:
            places[launches] = np.column_stack([np.arange(start, start + len(launches)), np.ones(len(launches), np.int64)])
            memories.append((stream, merged))
            start += len(merged)
        for stream, chunk in self._chunks.items():
            places[chunk.launches, 0] += start
            memories.append((stream, chunk.memory))
            start += len(chunk.memory)
        return (_joined(memories, self._device) if memories else self._new(1)), places

    def _new(self, num: int) -> Tensor:
        return _made(lambda shape: torch.empty(shape, dtype=torch.float64, device=self._device), (num, NUM_FIELDS))


def current_stream(device: torch.device) -> Stream:
    """The current stream of a device; ``None`` for one without streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def copied(device: torch.device, numbers: NDArray[np.int64]) -> Tensor:
    """Copy numbers to the device; the host does not wait."""
    with torch.inference_mode(mode=False):
        return to_device(torch.from_numpy(numbers), device)


def _made(make: Callable[[tuple[int, int]], Tensor], shape: tuple[int, int]) -> Tensor:
    # A step may begin in a validation loop under inference mode and continue outside of it.
    with torch.inference_mode(mode=False):
        return make(shape)


def _joined(memories: Iterable[tuple[Stream, Tensor]], device: torch.device) -> Tensor:
    """The slots of several chunks; the current stream waits for the streams that wrote to them."""
    current = current_stream(device)
    tensors: list[Tensor] = []
    for stream, memory in memories:
        if current is not None and stream is not None and stream != current:
            current.wait_stream(stream)
            memory.record_stream(current)
        tensors.append(memory)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
