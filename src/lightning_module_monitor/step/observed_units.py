"""The units of layers that are observed in a step, all of a device together."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.keys import Key
from lightning_module_monitor.statistics.layout import Layout
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.statistics.units import RecentUnits, largest_of_units, merged_units


class ObservedUnits:
    """The largest magnitude of each unit of each stream in a step, on its device."""

    def __init__(self) -> None:
        self._largest: dict[Stream, Tensor] = {}

    @property
    def streams(self) -> list[Stream]:
        """The streams that were observed, device by device."""
        return [stream for streams in self._by_device().values() for stream in streams]

    @property
    def num_units(self) -> list[tuple[Stream, int]]:
        """These streams, each with its number of units."""
        return [(stream, self._largest[stream].shape[0]) for stream in self.streams]

    def observe(self, stream: Stream, tensor: Tensor) -> None:
        """Take a tensor with at least one element, detached."""
        largest, before = largest_of_units(tensor, is_nonnegative=stream.is_nonnegative), self._largest.get(stream)
        self._largest[stream] = largest if before is None else merged_units(before, largest)

    def is_alive(self) -> list[Tensor]:
        """Which units are not zero, stream by stream; one tensor for each device."""
        return [torch.cat([self._largest[stream] for stream in streams]) != 0 for streams in self._by_device().values()]

    def _by_device(self) -> dict[torch.device, list[Stream]]:
        by_device: defaultdict[torch.device, list[Stream]] = defaultdict(list)
        for stream, largest in self._largest.items():
            by_device[largest.device].append(stream)
        return by_device


def dead_fractions(counts: Array, layout: Layout, recent: RecentUnits) -> dict[Key, float]:
    """The fractions of dead units of all layers by key, given the counts of a step of all ranks together."""
    rows = layout.rows_of_units(counts)
    observed = np.flatnonzero(rows.any(axis=1)).tolist()
    if not observed:
        return {}
    outputs = [layout.units[index] for index in observed]
    fractions = recent.fractions([stream.keys[name] for stream, name in outputs], rows[observed]).tolist()
    return {stream.series[name]: fraction for (stream, name), fraction in zip(outputs, fractions, strict=True)}
