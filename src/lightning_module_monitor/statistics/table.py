"""Rows of moments: filled while a step runs, merged and copied to the host once, at its end.

A tensor that is added is cut into pieces and copied into a *lane*, a buffer of pieces of one length; a full lane is
measured in one go. The copy is why a tensor may be overwritten right after it was added (in-place layers do), and
measuring many small tensors at once is what makes it cheap: a dispatch costs as much as a thousand elements.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_module_monitor.statistics.moments import Figures, Moments, Need, Scratch, measure, moments_of_pieces

PIECE_ELEMENTS = 8192
"""Longest piece, unless one token has more features: what float32 rounds away in a pairwise sum of so many is below 1e-6."""

CPU_BLOCK_ELEMENTS = 1 << 16
"""Elements measured at once on a CPU: a block and its scratch stay in the second-level cache."""

BLOCK_ELEMENTS = 1 << 20
"""Elements measured at once on an accelerator: enough to be worth the launches."""


def block_elements(device: torch.device) -> int:
    """Elements that are measured at once on a device."""
    return CPU_BLOCK_ELEMENTS if device.type == "cpu" else BLOCK_ELEMENTS


class Piecing(NamedTuple):
    """How a tensor is cut: ``num_pieces`` of ``length`` elements, then one shorter piece of ``rest`` elements (or none)."""

    num_pieces: int
    length: int
    rest: int


@functools.lru_cache(maxsize=4096)
def piecing(num_elements: int, features: int) -> Piecing:
    """Cut ``num_elements`` into pieces of at most ``PIECE_ELEMENTS``, of whole tokens, and of one length if one divides evenly."""
    num_tokens = num_elements // features
    most = max(1, PIECE_ELEMENTS // features)
    fewest = -(-num_tokens // most)
    for num_pieces in range(fewest, 4 * fewest + 1):
        if num_tokens % num_pieces == 0:
            return Piecing(num_pieces, num_elements // num_pieces, 0)
    length = most * features
    return Piecing(num_elements // length, length, num_elements % length)


class LaneKey(NamedTuple):
    """What pieces must have in common to be measured together."""

    device: torch.device
    dtype: torch.dtype
    needs: int
    features: int
    """Size of the last dimension; 1 where the tokens are not asked for and it does not matter."""
    length: int


@dataclass
class Lane:
    """Pieces of one length that wait to be measured, and the figures of those that were."""

    key: LaneKey
    capacity: int
    buffer: Tensor | None = None
    """Waiting pieces, shape ``(capacity, length)``; the first ``waiting`` are filled."""
    waiting: int = 0
    rows: list[int] = field(default_factory=list)
    """Row of the table for each piece, measured or waiting, in order."""
    figures: list[Figures] = field(default_factory=list)

    def add(self, row: int, pieces: Tensor, num_pieces: int, scratch: Scratch) -> None:
        """Copy pieces of shape ``(num_pieces, length)`` in; whatever fills the lane is measured."""
        self.rows += [row] * num_pieces
        start = 0
        while start < num_pieces:
            size = min(num_pieces - start, self.capacity - self.waiting)
            part = pieces if size == num_pieces else pieces.narrow(0, start, size)
            self._buffer().narrow(0, self.waiting, size).copy_(part)
            self.waiting += size
            start += size
            if self.waiting == self.capacity:
                self.measure_waiting(scratch)

    def add_together(self, rows: Sequence[int], tensors: Sequence[Tensor], scratch: Scratch) -> None:
        """Gather tensors of the lane's dtype and one size, which together fit into the lane, and measure them.

        Args:
            rows: For each piece of each tensor its row of the table.
            tensors: Each of shape ``(elements,)``, a multiple of the lane's length.
            scratch: Buffers to measure in.
        """
        self.measure_waiting(scratch)
        self.rows += rows
        self.waiting = len(rows)
        torch.stack(list(tensors), out=self._buffer()[: self.waiting].view(len(tensors), -1))
        self.measure_waiting(scratch)

    def add_unbuffered(self, row: int, pieces: Tensor, num_pieces: int, scratch: Scratch) -> None:
        """Measure pieces of shape ``(num_pieces, length)`` in the lane's dtype where they lie, a block at a time."""
        self.measure_waiting(scratch)
        self.rows += [row] * num_pieces
        for block in pieces.split(self.capacity):
            self.measure(block, scratch)

    def _buffer(self) -> Tensor:
        if self.buffer is None:
            # A step may begin in a validation loop under inference mode; its buffers are written outside of it too.
            with torch.inference_mode(mode=False):
                self.buffer = torch.empty((self.capacity, self.key.length), dtype=self.key.dtype, device=self.key.device)
        return self.buffer

    def measure_waiting(self, scratch: Scratch) -> None:
        """Measure what waits, if anything does."""
        if self.buffer is not None and self.waiting:
            self.measure(self.buffer[: self.waiting], scratch)
            self.waiting = 0

    def measure(self, block: Tensor, scratch: Scratch) -> None:
        """Measure one block and keep its figures."""
        self.figures.append(measure(block, self.key.needs, self.key.features, scratch))

    def moments(self) -> Moments:
        """Moments of every piece that was measured, float64, on the lane's device."""
        names = self.figures[0]
        joined = torch.cat([torch.stack([figures[name] for name in names]) for figures in self.figures], dim=1).double()
        length = torch.full((len(self.rows),), float(self.key.length), dtype=torch.float64, device=self.key.device)
        return moments_of_pieces(dict(zip(names, joined, strict=True)), length, self.key.features)


class Table:
    """Moments of numbered rows, on the devices that the tensors are on.

    Rows are numbered from 0 by whoever fills the table. Nothing is read on the host before :meth:`collect`.
    """

    def __init__(self) -> None:
        self._lanes: dict[LaneKey, Lane] = {}
        self._scratch: dict[tuple[torch.device, torch.dtype], Scratch] = {}

    def add(self, row: int, tensor: Tensor, needs: int) -> None:
        """Merge all elements of a tensor into a row.

        The tensor may change as soon as this returns. An empty one changes nothing.

        Args:
            row: Number of the row.
            tensor: Any shape, any real floating dtype, strided; not part of a graph.
            needs: Which moments to take, bits of :class:`Need`. Always the same for one row.
        """
        num_elements = tensor.numel()
        if num_elements == 0:
            return
        features = _features(tensor, needs)
        num_pieces, length, rest = piecing(num_elements, features)
        flat = tensor.reshape(-1)
        if num_pieces:
            lane, scratch = self._lane(tensor, needs, features, length)
            pieces = (flat[:-rest] if rest else flat).view(num_pieces, length)
            if num_pieces >= lane.capacity and tensor.dtype == lane.key.dtype:
                lane.add_unbuffered(row, pieces, num_pieces, scratch)
            else:
                lane.add(row, pieces, num_pieces, scratch)
        if rest:
            lane, scratch = self._lane(tensor, needs, features, rest)
            lane.add(row, flat[-rest:].view(1, rest), 1, scratch)

    def add_all(self, rows: Iterable[tuple[int, Tensor, int]]) -> None:
        """Like :meth:`add` for many tensors that exist at the same time: those of one size are gathered by one operation.

        Args:
            rows: Row, tensor and needs of each, as :meth:`add` takes them.
        """
        together: defaultdict[tuple[torch.device, torch.dtype, int, int, int], list[tuple[int, Tensor]]] = defaultdict(list)
        for row, tensor, needs in rows:
            together[tensor.device, tensor.dtype, needs, _features(tensor, needs), tensor.numel()].append((row, tensor))
        for (device, _dtype, needs, features, num_elements), members in together.items():
            at_once = block_elements(device) // num_elements if num_elements else 0
            if at_once < 2 or piecing(num_elements, features).rest:
                for row, tensor in members:
                    self.add(row, tensor, needs)
                continue
            num_pieces, length, _rest = piecing(num_elements, features)
            lane, scratch = self._lane(members[0][1], needs, features, length)
            for start in range(0, len(members), at_once):
                part = members[start : start + at_once]
                piece_rows = [row for row, _tensor in part for _piece in range(num_pieces)]
                lane.add_together(piece_rows, [tensor.reshape(-1).to(lane.key.dtype) for _row, tensor in part], scratch)

    def collect(self, num_rows: int) -> list[Moments]:
        """Measure what still waits and merge the pieces into rows.

        Args:
            num_rows: Number of rows of the result; those that nothing was added to are the moments of an empty tensor.

        Returns:
            For each device on which there is anything, its share of every row, float64, still on that device.
        """
        lanes_by_device: defaultdict[torch.device, list[Lane]] = defaultdict(list)
        for lane in self._lanes.values():
            lane.measure_waiting(self._scratch[lane.key.device, lane.key.dtype])
            lanes_by_device[lane.key.device].append(lane)
        merged = []
        for device, lanes in lanes_by_device.items():
            index = torch.tensor([row for lane in lanes for row in lane.rows], device=device)
            pieces = Moments(*(torch.cat(parts) for parts in zip(*(lane.moments() for lane in lanes), strict=True)))
            merged.append(pieces.merge(index, num_rows))
        return merged

    def _lane(self, like: Tensor, needs: int, features: int, length: int) -> tuple[Lane, Scratch]:
        """The lane for pieces of one length of a tensor, and the scratch of its dtype and device."""
        device = like.device
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key = LaneKey(device, dtype, needs, features, length)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key, capacity=max(1, block_elements(device) // length))
        scratch = self._scratch.get((device, dtype))
        if scratch is None or scratch.num_elements < length:
            scratch = self._scratch[device, dtype] = Scratch.allocate(max(block_elements(device), length), dtype, device)
        return lane, scratch


def _features(tensor: Tensor, needs: int) -> int:
    """Size of the last dimension where tokens are asked for: else it is not looked at, and more pieces share a lane."""
    return tensor.shape[-1] if needs & Need.TOKENS and tensor.dim() else 1


def to_host(shares: Sequence[Moments], scalars: Sequence[Tensor]) -> tuple[list[Moments], Tensor]:
    """Copy everything that a step found to the host, with one transfer per device.

    Args:
        shares: Moments of shape ``(rows,)``, each on its device.
        scalars: Float64 scalars of shape ``()``, on any device.

    Returns:
        The moments, and the scalars as one tensor of shape ``(scalars,)``, float64, both on the CPU.
    """
    parcels: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    places = []
    for tensor in [*(torch.stack(share) for share in shares), *scalars]:
        parcels[tensor.device].append(tensor.reshape(-1))
        places.append((tensor.device, tensor.numel()))
    arrived = {device: transfer(torch.cat(parts)) for device, parts in parcels.items()}
    starts = dict.fromkeys(arrived, 0)
    unpacked = []
    for device, size in places:
        unpacked.append(arrived[device][starts[device] : starts[device] + size])
        starts[device] += size
    moments = [Moments(*part.view(len(Moments._fields), -1)) for part in unpacked[: len(shares)]]
    return moments, torch.cat([torch.empty(0, dtype=torch.float64), *unpacked[len(shares) :]])


def transfer(tensor: Tensor) -> Tensor:
    """The one place where a value leaves its device."""
    return tensor.to("cpu")
