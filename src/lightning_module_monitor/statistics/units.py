"""Units of a layer that are zero throughout the last monitored steps, and outputs where a squashing function is flat."""

from __future__ import annotations

import math
from collections import deque
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

MAX_UNITS = 1024
"""Of more units, as many evenly spaced ones are watched."""

Recent: TypeAlias = deque[NDArray[np.bool_]]
"""Which units were alive in each of the last steps."""

NUM_STEPS = 10
"""A unit is dead if it was zero throughout so many monitored steps."""


def is_alive(tensor: Tensor) -> Tensor:
    """Which units of a tensor are anything but zero.

    Args:
        tensor: Any shape, with at least one element. A unit is a channel (dimension 1) where there are four or five dimensions, else a
            place along the last one.

    Returns:
        Bool, shape ``(units,)``, at most ``MAX_UNITS``, on the same device. NaN is alive.
    """
    dimension = 1 if tensor.dim() in (4, 5) else tensor.dim() - 1
    others = [axis for axis in range(tensor.dim()) if axis != dimension]
    # Two reductions of numbers take a tenth of the time of one of booleans.
    found = torch.logical_or(tensor.amax(others), tensor.amin(others)) if others else tensor.reshape(-1) != 0
    return found[:: -(-len(found) // MAX_UNITS)]


def in_either(one: Tensor, other: Tensor) -> Tensor:
    """Which units are alive in either of two tensors, of which one may have more units; bool, shape ``(most units,)``."""
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    return longer | nn.functional.pad(shorter, (0, len(longer) - len(shorter)))


def dead_fraction(recent: Recent) -> float:
    """The fraction of units, 0 to 1, that were dead in all of some steps, from :func:`is_alive` of each; NaN if there is no unit."""
    found = np.zeros(max(map(len, recent)), bool)
    for one in recent:
        found[: len(one)] |= one
    return np.count_nonzero(~found) / len(found) if len(found) else math.nan


def memory() -> Recent:
    """Holds the last steps."""
    return deque(maxlen=NUM_STEPS)


FLAT = 0.04
"""A slope of less than this fraction of the largest one is flat."""

NEARLY_ONE = 0.99
"""A distribution with a probability above this is next to one-hot."""


def saturated_sigmoid(y: Tensor) -> Tensor:
    """Fraction of a sigmoid's outputs ``y`` whose slope ``y (1 - y)`` is flat; shape ``()``, its largest slope being 1/4."""
    return (y * (1 - y) < FLAT / 4).double().mean()


def saturated_tanh(y: Tensor) -> Tensor:
    """Fraction of a tanh's outputs ``y`` whose slope ``1 - y^2`` is flat; shape ``()``, its largest slope being 1."""
    return (1 - y * y < FLAT).double().mean()


def saturated_softmax(y: Tensor) -> Tensor:
    """Fraction of a softmax's distributions that have a probability above 0.99; shape ``()``.

    As each sums to 1, the sum of all elements is how many there are, along whichever dimension they lie.
    """
    return (y > NEARLY_ONE).double().sum() / y.double().sum()
