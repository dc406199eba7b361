"""Rows of moments and of counts: filled while a step runs, merged and copied to the host once, at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_module_monitor.statistics.histogram import Histograms
from lightning_module_monitor.statistics.lanes import Lanes
from lightning_module_monitor.statistics.moments import Moments, Need
from lightning_module_monitor.statistics.running import RunningRows, may_be_readable, takes


class Table:
    """Moments, and where they are asked for histograms, of numbered rows, on the devices that the tensors are on.

    Rows are numbered from 0 by whoever fills the table. Nothing is read on the host of what is on another device. A row may
    get tensors of several precisions and devices: what can be read by the compiled kernel goes through
    :class:`~lightning_module_monitor.statistics.running.RunningRows`, all else through
    :class:`~lightning_module_monitor.statistics.lanes.Lanes`.

    Args:
        num_rows: How many rows there will be, as far as is known.
        running: Rows to bring up to date, if there are any to be used again.
    """

    def __init__(self, num_rows: int = 0, running: RunningRows | None = None) -> None:
        self._num_rows = num_rows
        self._lanes = Lanes()
        self.running = running
        """Those rows that the compiled kernel brings up to date, once there are any."""
        self._histograms = Histograms()
        self._finished: defaultdict[torch.device, list[tuple[list[int], Tensor]]] = defaultdict(list)
        """Moments that others have taken, with their rows, by device."""
        self._last: Sequence[Lanes | RunningRows | Histograms] = ()
        """Who got the tensor that was added last."""

    def add(self, row: int, tensor: Tensor, needs: int) -> None:
        """Merge all elements of a tensor into a row.

        The tensor may change as soon as this returns. An empty one changes nothing.

        Args:
            row: Number of the row.
            tensor: Any shape, any real floating dtype, strided. It may be part of a graph, which is left as it is.
            needs: What to take, bits of :class:`~lightning_module_monitor.statistics.moments.Need`. Always the same for one row.
        """
        self._last = ()
        if not tensor.numel():
            return
        if needs & Need.EVERYTHING:
            taker = self._taker(tensor)
            taker.add(row, tensor, needs & Need.EVERYTHING)
            self._last = (taker,)
        if needs & Need.HISTOGRAM:
            self._histograms.add(row, tensor)
            self._last = (*self._last, self._histograms)

    def running_rows(self) -> RunningRows:
        """:attr:`running`, from now on, where the kernel is installed."""
        if self.running is None:
            self.running = RunningRows(self._num_rows)
        return self.running

    def running_rows_for(self, tensor: object) -> RunningRows | None:
        """:attr:`running`, from now on if the kernel may be able to read what is given."""
        return self.running_rows() if may_be_readable(tensor) else self.running

    def note_read(self) -> None:
        """The tensor that was added last was added to :attr:`running`, without this table."""
        self._last = (self.running_rows(),)

    def add_last_again(self, row: int) -> None:
        """Merge all elements of the tensor that :meth:`add` got last into one more row, which has the same needs."""
        for taker in self._last:
            taker.add_last_again(row)

    def add_all(self, rows: Iterable[tuple[int, Tensor, int]]) -> None:
        """Like :meth:`add` for many tensors that exist at the same time, which is cheaper.

        Args:
            rows: Row, tensor and needs of each, as :meth:`add` takes them.
        """
        by_taker: defaultdict[Lanes | RunningRows, list[tuple[int, Tensor, int]]] = defaultdict(list)
        for row, tensor, needs in rows:
            if tensor.numel() and needs & Need.EVERYTHING:
                by_taker[self._taker(tensor)].append((row, tensor, needs & Need.EVERYTHING))
            if tensor.numel() and needs & Need.HISTOGRAM:
                self._histograms.add(row, tensor)
        for taker, members in by_taker.items():
            taker.add_all(members)

    def add_moments(self, rows: list[int], moments: Moments) -> None:
        """Merge moments of shape ``(rows,)``, float64, into as many rows."""
        stacked = torch.stack(moments)
        # A copy in plain memory: what a functorch transform wraps is refused here and not at the end, with all that there is.
        with torch.inference_mode(mode=False):
            kept = torch.empty(stacked.shape, dtype=stacked.dtype, device=stacked.device).copy_(stacked)
        self._finished[stacked.device].append((rows, kept))

    def add_counted(self, row: int, tensor: Tensor, counting: Tensor) -> None:
        """Count in a row's histogram the elements of a tensor that count, of one dimension, by a boolean tensor of its shape."""
        self._histograms.add_counted(row, tensor, counting)

    def collect(self, num_rows: int) -> list[Tensor]:
        """Finish what waits.

        Args:
            num_rows: Number of rows of the result; those that nothing was added to are the moments of an empty tensor.

        Returns:
            Shares of every row, to be merged: the fields of ``Moments`` one below the other, shape ``(fields, num_rows)``, float64,
            each still on its device.
        """
        running = [] if self.running is None else [self.running.moments(num_rows)]
        others = self._lanes.collect(num_rows) + [_merged(parts, num_rows) for parts in self._finished.values()]
        return running + [torch.stack(share) for share in others]

    def collect_histograms(self, rows: Sequence[int]) -> list[Tensor]:
        """The counts of rows that histograms were asked for.

        Returns:
            Shares of the rows of counts, to be added up, each float64, shape ``(len(rows), NUM_COUNTS)``, still on its device.
        """
        return self._histograms.collect(rows) if rows else []

    def _taker(self, tensor: Tensor) -> Lanes | RunningRows:
        return self.running_rows() if takes(tensor) else self._lanes


def _merged(parts: Sequence[tuple[list[int], Tensor]], num_rows: int) -> Moments:
    """Rows of moments of one device, with the number of the row that each belongs to, merged."""
    device = parts[0][1].device
    index = torch.tensor([row for rows, _moments in parts for row in rows], device=device)
    return Moments(*torch.cat([moments for _rows, moments in parts], dim=1)).merge(index, num_rows)


def to_host(shares: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Copy everything that a step found to the host, with one transfer per device.

    Args:
        shares: What :meth:`Table.collect` gives.
        others: Float64 tensors of any shape, on any device.

    Returns:
        The shares, and the elements of the others, one tensor after the other, as one of shape ``(elements,)``, float64, both
        on the CPU.
    """
    if len(shares) == 1 and not others:
        # As nearly always, and a tenth of a millisecond less.
        return [transfer(shares[0])], torch.empty(0, dtype=torch.float64, device="cpu")
    parcels: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    places = []
    for tensor in [*shares, *others]:
        parcels[tensor.device].append(tensor.reshape(-1))
        places.append((tensor.device, tensor.numel()))
    arrived = {device: transfer(parts[0] if len(parts) == 1 else torch.cat(parts)) for device, parts in parcels.items()}
    starts = dict.fromkeys(arrived, 0)
    unpacked = []
    for device, size in places:
        unpacked.append(arrived[device][starts[device] : starts[device] + size])
        starts[device] += size
    moments = [part.view(share.shape) for part, share in zip(unpacked, shares, strict=False)]
    return moments, torch.cat([torch.empty(0, dtype=torch.float64, device="cpu"), *unpacked[len(shares) :]])


def transfer(tensor: Tensor) -> Tensor:
    """The one place where a value leaves its device."""
    return tensor if tensor.is_cpu else tensor.to("cpu")
