"""The built-in statistics, finished from moments or from the units of a layer, and the place where a user's own are added.

``n`` is the number of elements and ``x`` an element, over all micro-batches and calls of a step; a token is a slice
along the last dimension. A non-finite element makes every statistic that it enters non-finite; only the counts stay. What finite
tensors do not have (the variance of one element, zero over zero) is a NaN of its own, ``UNDEFINED``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_module_monitor.kernels.moments import Array, Moments, Need
from lightning_module_monitor.record import UNDEFINED


@dataclass(frozen=True)
class Statistic:
    """A statistic that is finished from moments.

    Attributes:
        needs: Bits of :class:`~lightning_module_monitor.kernels.moments.Need`.
        finish: Takes moments, numpy arrays of shape ``(sites,)``, float64, and returns the statistic, float64, of the same
            shape. A relative statistic also takes the moments of what it is relative to; a paired one takes those of the
            model's tensor, the reference's, and the elementwise product of both.
        relative: Whether it is relative to another tensor: the parameter of an update, the reference of a difference.
        paired: Whether it is of the two tensors of a difference, and not of the difference.
    """

    needs: int
    finish: Callable[..., Array]
    relative: bool = False
    paired: bool = False


@dataclass(frozen=True)
class HistogramStatistic:
    """Not a number but one for each of the fixed bins: how many elements there are in it."""


@dataclass(frozen=True)
class UnitStatistic:
    """A number that is made of what every unit of a layer did, in this monitored step and those before it."""


TensorFunction = Callable[[Tensor], Tensor]


# Named functions and no lambdas, so that a callback with its rules can be pickled.


def _mean(moments: Moments) -> Array:
    """``m = sum(x) / n``."""
    return moments.mean


def _var(moments: Moments) -> Array:
    """``sum((x - m)**2) / (n - 1)``, at least 0: with Bessel's correction, as ``torch.var``. One element has none."""
    return _over(moments.deviations, moments.elements - 1)


def _std(moments: Moments) -> Array:
    """``sqrt(var)``, at least 0, as ``torch.std``."""
    var = _var(moments)
    return np.where(np.isnan(var), var, np.sqrt(var))


def _skewness(moments: Moments) -> Array:
    """``sqrt(n) * sum((x - m)**3) / sum((x - m)**2)**1.5``, without a correction for bias, as ``scipy.stats.skew``."""
    return _standardized(np.sqrt(moments.elements) * moments.third, 1.5, moments)


def _kurtosis(moments: Moments) -> Array:
    """``n * sum((x - m)**4) / sum((x - m)**2)**2 - 3``, at least -2, without a correction for bias, as ``scipy.stats.kurtosis``."""
    return _standardized(moments.elements * moments.fourth - 3 * moments.deviations**2, 2.0, moments)


def _standardized(numerator: Array, power: float, moments: Moments) -> Array:
    """A central moment over a power of the deviations. Constant elements have none: what deviates is rounding of the mean, as in SciPy."""
    is_constant = moments.deviations <= moments.elements * (1e-15 * moments.mean) ** 2
    return np.where(is_constant, UNDEFINED, numerator / moments.deviations**power)


def _norm(moments: Moments) -> Array:
    """``sqrt(sum(x**2))``, at least 0, as ``torch.linalg.vector_norm``."""
    return np.sqrt(moments.squares)


def _rms(moments: Moments) -> Array:
    """``sqrt(sum(x**2) / n)``, at least 0."""
    return np.sqrt(moments.squares / moments.elements)


def _min(moments: Moments) -> Array:
    """The smallest element; NaN if any is NaN, as ``torch.min``."""
    return moments.minimum


def _max(moments: Moments) -> Array:
    """The largest element; NaN if any is NaN, as ``torch.max``."""
    return moments.maximum


def _abs_mean(moments: Moments) -> Array:
    """``sum(|x|) / n``, at least 0."""
    return moments.magnitude / moments.elements


def _abs_max(moments: Moments) -> Array:
    """The largest ``|x|``, at least 0."""
    return np.maximum(moments.maximum, -moments.minimum)


def _zero_fraction(moments: Moments) -> Array:
    """The share of elements that are zero, from 0 to 1."""
    return moments.zeros / moments.elements


def _nonfinite_count(moments: Moments) -> Array:
    """The number of elements that are NaN or infinite."""
    return moments.nonfinite


def _token_norm(moments: Moments) -> Array:
    """The mean over tokens of ``sqrt(sum(x**2))``, at least 0."""
    return moments.token_norm / moments.tokens


def _token_rms(moments: Moments) -> Array:
    """The mean over tokens of ``sqrt(sum(x**2) / features)``, at least 0: the measure of the coordinate check (arXiv 2505.22491)."""
    return moments.token_rms / moments.tokens


def _ratio(moments: Moments, base: Moments) -> Array:
    """``norm(x) / norm(base)``, at least 0; of an update the update ratio of Karpathy's makemore. Zero over zero is undefined."""
    return _over(_norm(moments), _norm(base))


def _cosine(current: Moments, reference: Moments, product: Moments) -> Array:
    """``sum(x * y) / (norm(x) * norm(y))``, from -1 to 1; undefined where a norm is 0."""
    # Rounding must not make it more than one can be.
    norms = _norm(current) * _norm(reference)
    cosine = np.clip(product.mean * product.elements / norms, -1.0, 1.0)
    return np.where(norms == 0, UNDEFINED, cosine)


def _over(numerator: Array, denominator: Array) -> Array:
    """A quotient; of zero and zero there is none."""
    return np.where((numerator == 0) & (denominator == 0), UNDEFINED, numerator / denominator)


STATISTICS: dict[str, Statistic | HistogramStatistic | UnitStatistic | TensorFunction] = {
    "mean": Statistic(Need.MEAN, _mean),
    "std": Statistic(Need.DEVIATIONS, _std),
    "var": Statistic(Need.DEVIATIONS, _var),
    "skewness": Statistic(Need.DEVIATIONS | Need.POWERS, _skewness),
    "kurtosis": Statistic(Need.DEVIATIONS | Need.POWERS, _kurtosis),
    "norm": Statistic(Need.SQUARES, _norm),
    "rms": Statistic(Need.SQUARES, _rms),
    "min": Statistic(Need.EXTREMES, _min),
    "max": Statistic(Need.EXTREMES, _max),
    "abs_mean": Statistic(Need.MAGNITUDE, _abs_mean),
    "abs_max": Statistic(Need.EXTREMES, _abs_max),
    "zero_fraction": Statistic(Need.ZEROS, _zero_fraction),
    "nonfinite_count": Statistic(Need.NONFINITE, _nonfinite_count),
    "token_norm": Statistic(Need.TOKENS, _token_norm),
    "token_rms": Statistic(Need.TOKENS, _token_rms),
    "ratio": Statistic(Need.SQUARES, _ratio, relative=True),
    "cosine": Statistic(Need.NOTHING, _cosine, paired=True),
    "hist": HistogramStatistic(),
    "dead_fraction": UnitStatistic(),
}
"""Statistic by name; the formulas are at the functions above. ``hist`` is a histogram over the bins of ``Histogram``; ``dead_fraction`` is
the share of units (channels, features) that were zero throughout the last monitored steps, up to ten. Add an entry to have a statistic of
your own under a name that a rule can give: a function ``Tensor -> Tensor``, or a :class:`Statistic`."""

# Units that are zero throughout the last monitored steps, and outputs where a squashing function is flat

MAX_UNITS = 1024
"""Of more units, as many evenly spaced ones are observed."""

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
