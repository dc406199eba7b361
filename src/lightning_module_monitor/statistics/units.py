"""Units of a layer's output that are zero for every input: which were alive in a step, and how long ago in the steps before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.kinds import DEAD_AFTER
from lightning_module_monitor.statistics.channels import with_channels

MAX_UNITS = 1024
"""Limit of units for which it is observed whether they are alive. In larger layers evenly spaced units are observed."""

NONNEGATIVE = (nn.ReLU, nn.ReLU6)
"""Modules whose outputs are not negative."""


@dataclass(frozen=True)
class UnitStatistic:
    """The fraction of units (channels, features) that were zero throughout the last monitored steps, up to ten, from 0 to 1.

    A unit is a channel (dimension 1) of an output with four or five dimensions, else an index along the last dimension. NaN is not zero.
    """


@dataclass(frozen=True)
class UnitCounts:
    """For each unit the number of ranks on which it was alive, then the number of ranks that have the unit. They are added over ranks."""

    num_counts: int = 2 * MAX_UNITS
    """Length of a row."""


UNITS = UnitCounts()


def largest_of_units(tensor: Tensor, *, is_nonnegative: bool) -> Tensor:
    """The largest magnitude of each unit, NaN where an element is.

    Args:
        tensor: Any shape, with at least one element, detached.
        is_nonnegative: Whether no element is negative.

    Returns:
        Shape ``(units,)``, at most ``MAX_UNITS``, of the tensor's dtype.
    """
    tensor, others = with_channels(tensor)
    largest = tensor.amax(others)
    if not is_nonnegative:
        largest = torch.maximum(largest, tensor.amin(others).neg())
    num_units = largest.shape[0]
    return largest if num_units <= MAX_UNITS else largest[:: -(-num_units // MAX_UNITS)]


def merged_units(largest: Tensor, other: Tensor) -> Tensor:
    """The largest magnitudes of two tensors together, whose numbers of units may differ."""
    longer, shorter = (largest, other) if largest.shape[0] >= other.shape[0] else (other, largest)
    padding = longer.shape[0] - shorter.shape[0]
    return torch.maximum(longer, nn.functional.pad(shorter, (0, padding)) if padding else shorter)


class RecentUnits:
    """Number of monitored steps since the units of each layer were last alive, and since they were last observed."""

    def __init__(self) -> None:
        self._row_by_key: dict[str, int] = {}
        self._since = np.empty((2, 0, MAX_UNITS), np.int8)
        """Number of records since each unit was alive, and since it was there, at most ``DEAD_AFTER``; shape ``(2, keys, units)``."""

    def fractions(self, keys: Sequence[str], counts: Array) -> NDArray[np.float64]:
        """The fractions of dead units of some layers, shape ``(keys,)``, with one more record.

        Args:
            keys: The keys of the fractions.
            counts: Rows of :data:`UNITS`, shape ``(keys, 2 * MAX_UNITS)``, each with a unit.
        """
        rows = [self._row_by_key.setdefault(key, len(self._row_by_key)) for key in keys]
        num_new = len(self._row_by_key) - self._since.shape[1]
        if num_new > 0:
            self._since = np.concatenate([self._since, np.full((2, num_new, MAX_UNITS), DEAD_AFTER, np.int8)], axis=1)
        happened = counts.reshape(len(rows), 2, MAX_UNITS).transpose(1, 0, 2) > 0
        self._since[:, rows] = since = np.where(happened, 0, np.minimum(self._since[:, rows] + 1, DEAD_AFTER))
        is_dead, is_present = since[0] >= DEAD_AFTER, since[1] < DEAD_AFTER
        return np.asarray((is_dead & is_present).sum(axis=1) / is_present.sum(axis=1))
