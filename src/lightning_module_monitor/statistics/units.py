"""Which units of a layer ever do anything: over micro-batches, calls and ranks, and over the last monitored steps."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import torch
from torch import Tensor

MAX_UNITS = 1024
"""As many numbers of every site are reduced over ranks. Of more units, evenly spaced ones are watched."""

NUM_STEPS = 10
"""A unit is dead if it was zero throughout so many monitored steps."""

ALIVE, DEAD, ABSENT = 1.0, 0.0, -1.0
"""What there is of a unit; the largest of several is what there is of all together."""


def signs_of_life(tensor: Tensor) -> Tensor:
    """Which units of a tensor are anything but zero.

    Args:
        tensor: Any shape, with at least one element. A unit is a channel (dimension 1) where there are four or five dimensions, else a
            place along the last one.

    Returns:
        ``ALIVE``, ``DEAD`` or ``ABSENT`` of each, shape ``(MAX_UNITS,)``, float32, on the same device. NaN is alive.
    """
    dimension = 1 if tensor.dim() in (4, 5) else tensor.dim() - 1
    others = [axis for axis in range(tensor.dim()) if axis != dimension]
    is_alive = (tensor != 0).any(others) if others else (tensor != 0).reshape(-1)
    is_alive = is_alive[:: -(-len(is_alive) // MAX_UNITS)]
    signs = torch.full((MAX_UNITS,), ABSENT, dtype=torch.float32, device=tensor.device)
    signs[: len(is_alive)] = is_alive.float()
    return signs


def dead_fraction(recent: deque[Tensor]) -> float:
    """The fraction of units that were dead in all of some steps.

    Args:
        recent: What :func:`signs_of_life` gave of each of them, on the host.

    Returns:
        From 0 to 1; NaN if there is no unit.
    """
    together = np.maximum.reduce([one.numpy() for one in recent])
    num_units = np.count_nonzero(together != ABSENT)
    return float(np.count_nonzero(together == DEAD) / num_units) if num_units else math.nan


def memory() -> deque[Tensor]:
    """Holds the last steps."""
    return deque(maxlen=NUM_STEPS)
