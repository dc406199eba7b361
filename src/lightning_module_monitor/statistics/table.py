"""Rows of moments: filled while a step runs, merged and copied to the host once, at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_module_monitor.statistics.difference import Difference
from lightning_module_monitor.statistics.lanes import Lanes
from lightning_module_monitor.statistics.moments import Moments
from lightning_module_monitor.statistics.running import RunningRows, takes, takes_difference


class Table:
    """Moments of numbered rows, on the devices that the tensors are on.

    Rows are numbered from 0 by whoever fills the table. Nothing is read on the host of what is on another device. A row may
    get tensors of several precisions and devices: what can be read by the compiled kernel goes through
    :class:`~lightning_module_monitor.statistics.running.RunningRows`, all else through
    :class:`~lightning_module_monitor.statistics.lanes.Lanes`.
    """

    def __init__(self) -> None:
        self._lanes = Lanes()
        self._running: RunningRows | None = None
        self._last: Lanes | RunningRows | None = None
        """Who got the tensor that was added last."""

    def add(self, row: int, tensor: Tensor, needs: int) -> None:
        """Merge all elements of a tensor into a row.

        The tensor may change as soon as this returns. An empty one changes nothing.

        Args:
            row: Number of the row.
            tensor: Any shape, any real floating dtype, strided. It may be part of a graph, which is left as it is.
            needs: Which moments to take, bits of :class:`~lightning_module_monitor.statistics.moments.Need`. Always the same
                for one row.
        """
        self._last = None
        if tensor.numel():
            taker = self._taker(tensor)
            taker.add(row, tensor, needs)
            self._last = taker

    def add_difference(self, row: int, difference: Difference, needs: int) -> None:
        """Merge all elements of a difference into a row, as :meth:`add` does those of a tensor."""
        if difference.tensor.numel() and takes_difference(difference, needs):
            self._running = self._running or RunningRows()
            self._running.add_difference(row, difference)
            self._last = self._running
        else:
            self.add(row, difference.computed(), needs)

    def add_last_again(self, row: int) -> None:
        """Merge all elements of the tensor that :meth:`add` got last into one more row, which has the same needs."""
        if self._last is not None:
            self._last.add_last_again(row)

    def add_all(self, rows: Iterable[tuple[int, Tensor, int]]) -> None:
        """Like :meth:`add` for many tensors that exist at the same time, which is cheaper.

        Args:
            rows: Row, tensor and needs of each, as :meth:`add` takes them.
        """
        by_taker: defaultdict[Lanes | RunningRows, list[tuple[int, Tensor, int]]] = defaultdict(list)
        for row, tensor, needs in rows:
            if tensor.numel():
                by_taker[self._taker(tensor)].append((row, tensor, needs))
        for taker, members in by_taker.items():
            taker.add_all(members)

    def collect(self, num_rows: int) -> list[Moments]:
        """Finish what waits.

        Args:
            num_rows: Number of rows of the result; those that nothing was added to are the moments of an empty tensor.

        Returns:
            Shares of every row, to be merged, float64, each still on its device.
        """
        running = [] if self._running is None else [self._running.moments(num_rows)]
        return running + self._lanes.collect(num_rows)

    def _taker(self, tensor: Tensor) -> Lanes | RunningRows:
        if not takes(tensor):
            return self._lanes
        if self._running is None:
            self._running = RunningRows()
        return self._running


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
    return moments, torch.cat([torch.empty(0, dtype=torch.float64, device="cpu"), *unpacked[len(shares) :]])


def transfer(tensor: Tensor) -> Tensor:
    """The one place where a value leaves its device."""
    return tensor.to("cpu")
