"""Pieces of tensors that wait in buffers to be measured together: on every device, and in every precision.

A tensor that is added is cut into pieces and copied into a *lane*, a buffer of pieces of one length; a full lane is
measured in one go. The copy is why a tensor may be overwritten right after it was added (in-place layers do), and
measuring many small tensors at once is what makes it cheap: a dispatch costs as much as a thousand elements.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_module_monitor.statistics.moments import Figures, Moments, Need, Scratch, measure, moments_of_pieces

PIECE_ELEMENTS = 8192
"""Longest piece, unless one token has more features: what float32 rounds away in a pairwise sum of so many is below 1e-6."""

CPU_BLOCK_ELEMENTS = 1 << 17
"""Elements that pass through the scratch at once on a CPU: a block and its scratch stay in the second-level cache."""

CPU_LANE_ELEMENTS = 1 << 18
"""Elements that a lane holds on a CPU, to be measured together."""

MAX_LANE_PIECES = 512
"""Pieces that a lane holds at most: of tiny tensors so many share their dispatches that more would not show."""

ELEMENTS = 1 << 20
"""Elements of a block and of a lane on an accelerator: enough to be worth the launches."""


def block_elements(device: torch.device) -> int:
    """Elements that pass through the scratch at once."""
    return CPU_BLOCK_ELEMENTS if device.type == "cpu" else ELEMENTS


def lane_elements(device: torch.device) -> int:
    """Elements that a lane holds."""
    return CPU_LANE_ELEMENTS if device.type == "cpu" else ELEMENTS


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


class Lane:
    """Pieces of one length that wait to be measured, and the figures of those that were.

    Args:
        key: What its pieces have in common.
        scratch: Buffers to measure in, of the lane's dtype and device, each at least a piece long.
    """

    def __init__(self, key: LaneKey, scratch: Scratch) -> None:
        self.key = key
        self.capacity = min(MAX_LANE_PIECES, max(1, lane_elements(key.device) // key.length))
        self._scratch = scratch
        self._buffer: Tensor | None = None
        self._waiting = 0
        """How many of the buffer's pieces are filled."""
        self._rows: list[int] = []
        """Row of the table for each piece, measured or waiting, in order."""
        self._figures: list[Figures] = []
        self._shared: list[tuple[int, range]] = []
        """Further rows that pieces belong to: row, and which pieces."""

    def __len__(self) -> int:
        """Number of pieces that were added."""
        return len(self._rows)

    def share(self, row: int, pieces: range) -> None:
        """Let pieces that were added belong to one more row."""
        self._shared.append((row, pieces))

    def add(self, row: int, pieces: Tensor, num_pieces: int) -> None:
        """Copy pieces of shape ``(num_pieces, length)``, of any dtype, in; a full lane is measured."""
        buffer = self._allocated()
        start = 0
        while start < num_pieces:
            size = min(num_pieces - start, self.capacity - self._waiting)
            buffer.narrow(0, self._waiting, size).copy_(pieces.narrow(0, start, size))
            self._rows += [row] * size
            self._waiting += size
            start += size
            if self._waiting == self.capacity:
                self.measure_waiting()

    def add_one(self, row: int, piece: Tensor) -> None:
        """Copy one piece of shape ``(length,)``, of any dtype, in."""
        self._allocated()[self._waiting].copy_(piece)
        self._rows.append(row)
        self._waiting += 1
        if self._waiting == self.capacity:
            self.measure_waiting()

    def add_together(self, rows: list[int], tensors: list[Tensor], num_pieces: int) -> None:
        """Gather tensors of the lane's dtype and one shape, which together fit into the lane, and measure them.

        Args:
            rows: Row of each tensor.
            tensors: Each of ``num_pieces`` times the lane's length elements.
            num_pieces: Number of pieces that each is cut into.
        """
        self.measure_waiting()
        filled = self._allocated()[: len(rows) * num_pieces]
        torch.stack(tensors, out=filled.view(len(tensors), *tensors[0].shape))
        self._measure([row for row in rows for _piece in range(num_pieces)], filled)

    def add_unbuffered(self, row: int, pieces: Tensor, num_pieces: int) -> None:
        """Measure pieces of shape ``(num_pieces, length)`` in the lane's dtype where they lie."""
        self.measure_waiting()
        self._measure([row] * num_pieces, pieces)

    def measure_waiting(self) -> None:
        """Measure what waits, if anything does."""
        if self._buffer is not None and self._waiting:
            waiting, self._waiting = self._waiting, 0
            self._measure([], self._buffer[:waiting])

    def rows(self) -> list[int]:
        """Row of the table for each of :meth:`moments`."""
        return self._rows + [row for row, pieces in self._shared for _piece in pieces]

    def moments(self) -> Moments:
        """Moments of every piece, and once more of every piece for each row that shares it, float64, on the lane's device."""
        names = self._figures[0]
        joined = torch.cat([torch.stack([figures[name] for name in names]) for figures in self._figures], dim=1).double()
        length = torch.full((len(self._rows),), float(self.key.length), dtype=torch.float64, device=self.key.device)
        moments = moments_of_pieces(dict(zip(names, joined, strict=True)), length, self.key.features)
        if not self._shared:
            return moments
        order = [*range(len(self)), *(piece for _row, pieces in self._shared for piece in pieces)]
        return moments.rows(torch.tensor(order, device=self.key.device))

    def _allocated(self) -> Tensor:
        if self._buffer is None:
            # A step may begin in a validation loop under inference mode; its buffers are written outside of it too.
            with torch.inference_mode(mode=False):
                self._buffer = torch.empty((self.capacity, self.key.length), dtype=self.key.dtype, device=self.key.device)
        return self._buffer

    def _measure(self, rows: list[int], pieces: Tensor) -> None:
        self._figures.append(measure(pieces, self.key.needs, self.key.features, self._scratch))
        self._rows += rows


class Place(NamedTuple):
    """Where tensors of one shape, dtype and device go."""

    num_pieces: int
    length: int
    rest: int
    lane: Lane
    rest_lane: Lane
    """For the shorter piece, if there is one."""
    is_lane_dtype: bool


class Lanes:
    """Moments of numbered rows, on the devices that the tensors are on.

    Rows are numbered from 0 by whoever fills the table. Nothing is read on the host before :meth:`collect`.
    """

    def __init__(self) -> None:
        self._lanes: dict[LaneKey, Lane] = {}
        self._places: dict[tuple[torch.Size, torch.dtype, torch.device, int], Place] = {}
        self._scratch: dict[tuple[torch.device, torch.dtype], Scratch] = {}
        self._last: list[tuple[Lane, int]] = []
        """The lanes that got the tensor that was added last, each with its length before."""

    def add(self, row: int, tensor: Tensor, needs: int) -> None:
        """Merge all elements of a tensor into a row.

        The tensor may change as soon as this returns.

        Args:
            row: Number of the row.
            tensor: Any shape with at least one element, any real floating dtype, strided.
            needs: Which moments to take, bits of :class:`Need`. Always the same for one row.
        """
        num_pieces, length, rest, lane, rest_lane, is_lane_dtype = self._place(tensor, needs)
        self._last = [(one, len(one)) for one in ((lane, rest_lane) if rest else (lane,))]
        flat = tensor.detach().reshape(-1)
        if num_pieces == 1 and not rest:
            lane.add_one(row, flat)
            return
        if num_pieces:
            pieces = (flat[:-rest] if rest else flat).view(num_pieces, length)
            if num_pieces >= lane.capacity and is_lane_dtype:
                lane.add_unbuffered(row, pieces, num_pieces)
            else:
                lane.add(row, pieces, num_pieces)
        if rest:
            rest_lane.add_one(row, flat[-rest:])

    def add_last_again(self, row: int) -> None:
        """Merge all elements of the tensor that :meth:`add` got last into one more row, which has the same needs."""
        for lane, before in self._last:
            lane.share(row, range(before, len(lane)))

    def add_all(self, rows: Iterable[tuple[int, Tensor, int]]) -> None:
        """Like :meth:`add` for many tensors that exist at the same time: those of one shape are gathered by one operation.

        Args:
            rows: Row, tensor and needs of each, as :meth:`add` takes them.
        """
        together: defaultdict[tuple[torch.Size, torch.dtype, torch.device, int], list[tuple[int, Tensor]]] = defaultdict(list)
        for row, tensor, needs in rows:
            together[tensor.shape, tensor.dtype, tensor.device, needs].append((row, tensor))
        for (_shape, _dtype, _device, needs), members in together.items():
            place = self._place(members[0][1], needs)
            at_once = place.lane.capacity // max(1, place.num_pieces)
            if at_once < 2 or place.rest or not place.is_lane_dtype:
                for row, tensor in members:
                    self.add(row, tensor, needs)
                continue
            for start in range(0, len(members), at_once):
                part = members[start : start + at_once]
                place.lane.add_together([row for row, _tensor in part], [tensor for _row, tensor in part], place.num_pieces)

    def collect(self, num_rows: int) -> list[Moments]:
        """Measure what still waits and merge the pieces into rows.

        Args:
            num_rows: Number of rows of the result; those that nothing was added to are the moments of an empty tensor.

        Returns:
            For each device on which there is anything, its share of every row, float64, still on that device.
        """
        lanes_by_device: defaultdict[torch.device, list[Lane]] = defaultdict(list)
        for lane in self._lanes.values():
            lane.measure_waiting()
            if lane.rows():
                lanes_by_device[lane.key.device].append(lane)
        merged = []
        for device, lanes in lanes_by_device.items():
            index = torch.tensor([row for lane in lanes for row in lane.rows()], device=device)
            pieces = Moments(*(torch.cat(parts) for parts in zip(*(lane.moments() for lane in lanes), strict=True)))
            merged.append(pieces.merge(index, num_rows))
        return merged

    def _place(self, tensor: Tensor, needs: int) -> Place:
        """Where a tensor goes; looked up once for all of its shape."""
        key = (tensor.shape, tensor.dtype, tensor.device, needs)
        place = self._places.get(key)
        if place is None:
            features = _features(tensor, needs)
            num_pieces, length, rest = piecing(tensor.numel(), features)
            dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            lane = self._lane(LaneKey(tensor.device, dtype, needs, features, length))
            rest_lane = self._lane(LaneKey(tensor.device, dtype, needs, features, rest)) if rest else lane
            place = self._places[key] = Place(num_pieces, length, rest, lane, rest_lane, tensor.dtype == dtype)
        return place

    def _lane(self, key: LaneKey) -> Lane:
        lane = self._lanes.get(key)
        if lane is None:
            scratch = self._scratch.get((key.device, key.dtype))
            if scratch is None or scratch.num_elements < key.length:
                size = max(block_elements(key.device), key.length)
                scratch = self._scratch[key.device, key.dtype] = Scratch.allocate(size, key.dtype, key.device)
            lane = self._lanes[key] = Lane(key, scratch)
        return lane


def _features(tensor: Tensor, needs: int) -> int:
    """Size of the last dimension where tokens are asked for: else it is not looked at, and more pieces share a lane."""
    return tensor.shape[-1] if needs & Need.TOKENS and tensor.dim() else 1
