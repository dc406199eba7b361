"""Which part of a squashing function's outputs lies where it is flat."""

from __future__ import annotations

from torch import Tensor

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
