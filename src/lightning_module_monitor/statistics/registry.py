"""The built-in statistics, computed from moments or from the units of a layer; users add their own to :data:`STATISTICS`.

``n`` is the number of elements and ``x`` an element, over all micro-batches and calls of a step; a token is a slice
along the last dimension. A non-finite element makes every statistic that depends on it non-finite, except for the counts. A
statistic that a finite tensor does not have (the variance of one element, zero over zero) is ``UNDEFINED``, a NaN with bits of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_module_monitor.kernels.moments import Array, Moments, Need
from lightning_module_monitor.kernels.number_formats import NUMBER_FORMATS
from lightning_module_monitor.kernels.torch_kernel import widest
from lightning_module_monitor.record import UNDEFINED
from lightning_module_monitor.statistics import casts
from lightning_module_monitor.statistics.channels import CHANNEL_SUMS, ChannelStatistic, outlier_channels
from lightning_module_monitor.statistics.fine_counts import FineCounts
from lightning_module_monitor.statistics.spectral_statistics import SPECTRAL_STATISTICS, SpectralStatistic
from lightning_module_monitor.statistics.units import UnitStatistic


@dataclass(frozen=True)
class Statistic:
    """A statistic that is computed from moments.

    Attributes:
        needs: Bits of :class:`~lightning_module_monitor.Need`.
        finish: Takes :class:`~lightning_module_monitor.Moments`, numpy arrays of shape ``(sites,)``, float64, and returns the statistic,
            float64, of the same shape. A relative statistic also takes the moments of its base; one that compares two tensors takes
            the moments of either, and of their elementwise product. A statistic that needs ``FINE_COUNTS`` also takes
            :class:`~lightning_module_monitor.statistics.fine_counts.FineCounts`.
        relative: Whether it is relative to another tensor: the parameter of an update, the reference of a difference.
        compared_with: The name of the tensor that it compares with: ``reference`` (the model's tensor of a difference is compared),
            ``gradient``, or ``previous`` (the tensor of the monitored step before); empty for a statistic of one tensor.
    """

    needs: int
    finish: Callable[..., Array]
    relative: bool = False
    compared_with: str = ""


@dataclass(frozen=True)
class HistogramStatistic:
    """The number of elements in each of the fixed bins."""


TensorFunction = Callable[[Tensor], Tensor]


# Named functions instead of lambdas, so that a callback with its rules can be pickled.


def _mean(moments: Moments) -> Array:
    """``m = sum(x) / n``."""
    return moments.mean


def _var(moments: Moments) -> Array:
    """``sum((x - m)**2) / (n - 1)``, at least 0, as ``torch.var`` with Bessel's correction. Undefined for one element."""
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
    """A central moment over a power of the deviations; undefined for a constant, whose deviations are rounding errors, as in SciPy."""
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
    return casts.largest_magnitude(moments)


def _peak_to_rms(moments: Moments) -> Array:
    """``abs_max / rms``, from 1 to ``sqrt(n)``, the crest factor of a signal: how far the largest magnitude stands out.

    Undefined if all elements are zero.
    """
    return _over(_abs_max(moments), _rms(moments))


def _quantile(moments: Moments, counts: FineCounts, *, percent: int) -> Array:
    """The smallest element that at least NN percent of all elements (``median``: 50) are not larger than.

    As ``numpy.quantile`` with the method ``inverted_cdf``, to within 4.4 % from 1e-45 to 3.4e38; zeros are zeros. NaN has no quantiles.
    """
    return np.clip(counts.quantile(percent), moments.minimum, moments.maximum)


def _zero_fraction(moments: Moments) -> Array:
    """The fraction of elements that are zero, from 0 to 1."""
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
    """``norm(x) / norm(base)``, at least 0; for an update the update ratio of Karpathy's makemore. Zero over zero is undefined."""
    return _over(_norm(moments), _norm(base))


def _cosine(tensor: Moments, other: Moments, product: Moments) -> Array:
    """``sum(x * y) / (norm(x) * norm(y))``, from -1 to 1; undefined where a norm is 0."""
    # Rounding could leave the range.
    norms = _norm(tensor) * _norm(other)
    cosine = np.clip(product.mean * product.elements / norms, -1.0, 1.0)
    return np.where(norms == 0, UNDEFINED, cosine)


def _cosine_to_gradient(tensor: Moments, gradient: Moments, product: Moments) -> Array:
    """``sum(x * g) / (norm(x) * norm(g))`` with the gradient ``g``, from -1 to 1; undefined where a norm is 0.

    Of an update with the opposite sign: 1 for plain gradient descent.
    """
    return _cosine(tensor, gradient, product)


def _cosine_to_previous(tensor: Moments, previous: Moments, product: Moments) -> Array:
    """``sum(x * p) / (norm(x) * norm(p))`` with the update ``p`` of the monitored step before, from -1 to 1.

    Undefined in the first monitored step, and where a norm is 0. Steps that were skipped do not count.
    """
    return _cosine(tensor, previous, product)


def _over(numerator: Array, denominator: Array) -> Array:
    """A quotient; zero over zero is undefined."""
    return np.where((numerator == 0) & (denominator == 0), UNDEFINED, numerator / denominator)


QUANTILES = {"p01": 1, "p05": 5, "p25": 25, "median": 50, "p75": 75, "p95": 95, "p99": 99}
"""Percent by name."""

STATISTICS: dict[str, Statistic | HistogramStatistic | ChannelStatistic | UnitStatistic | SpectralStatistic | TensorFunction] = {
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
    "peak_to_rms": Statistic(Need.EXTREMES | Need.SQUARES, _peak_to_rms),
    **{
        name: Statistic(Need.EXTREMES | Need.FINE_COUNTS, functools.partial(_quantile, percent=percent))
        for name, percent in QUANTILES.items()
    },
    "dynamic_range": Statistic(Need.EXTREMES | Need.FINE_COUNTS, casts.dynamic_range),
    **{
        f"{loss.__name__}_{name}": Statistic(
            Need.FINE_COUNTS | (Need.EXTREMES if loss is casts.scaled_underflow else 0),
            functools.partial(loss, number_format=number_format),
        )
        for loss in (casts.underflow, casts.overflow, casts.scaled_underflow)
        for name, number_format in NUMBER_FORMATS.items()
    },
    "ratio": Statistic(Need.SQUARES, _ratio, relative=True),
    "cosine": Statistic(Need.NOTHING, _cosine, compared_with="reference"),
    "cosine_to_gradient": Statistic(Need.SQUARES, _cosine_to_gradient, compared_with="gradient"),
    "cosine_to_previous": Statistic(Need.SQUARES, _cosine_to_previous, compared_with="previous"),
    "hist": HistogramStatistic(),
    "dead_fraction": UnitStatistic(),
    "outlier_channels": ChannelStatistic(CHANNEL_SUMS, outlier_channels),
    **SPECTRAL_STATISTICS,
}
"""Statistic by name; their functions have the formulas. ``hist`` is a histogram over the bins of ``Histogram``. To name a statistic of your
own in rules, add an entry: a function ``Tensor -> Tensor``, or a :class:`Statistic`."""

# Saturated outputs of squashing functions

FLAT = 0.04
"""A slope below this fraction of the largest slope is flat."""

NEAR_ONE_HOT = 0.99
"""A distribution with a probability above this is nearly one-hot."""


def saturated_sigmoid(y: Tensor) -> Tensor:
    """Fraction of a sigmoid's outputs ``y`` whose slope ``y (1 - y)``, at most 1/4, is flat; shape ``()``."""
    return _fraction(y * (1 - y) < FLAT / 4)


def saturated_tanh(y: Tensor) -> Tensor:
    """Fraction of a tanh's outputs ``y`` whose slope ``1 - y^2``, at most 1, is flat; shape ``()``."""
    return _fraction(1 - y * y < FLAT)


def _fraction(is_counted: Tensor) -> Tensor:
    return is_counted.to(widest(is_counted.device)).mean()


def saturated_softmax(y: Tensor) -> Tensor:
    """Fraction of a softmax's distributions that have a probability above 0.99; shape ``()``."""
    # Each distribution sums to 1, so the sum of all elements is their number, whichever dimension they lie along.
    wide = widest(y.device)
    return (y > NEAR_ONE_HOT).to(wide).sum() / y.to(wide).sum()
