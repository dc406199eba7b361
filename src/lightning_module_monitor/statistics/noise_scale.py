"""The simple noise scale: how much gradients of small batches differ, relative to their mean. Plain numbers, no model.

S. McCandlish and others, "An Empirical Model of Large-Batch Training", 2018, arXiv 1812.06162, appendix A.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.record import UNDEFINED, is_undefined

DECAY = 0.95
"""Decay of the averages from record to record."""


class NoiseAndSignal(NamedTuple):
    """Estimates from the gradients of one step, or their averages over steps."""

    noise: float
    """Trace of the covariance matrix of the gradient of one sample."""
    signal: float
    """Squared norm of the true gradient. An estimate may be negative."""

    def is_finite(self) -> bool:
        """Whether both are finite."""
        return math.isfinite(self.noise) and math.isfinite(self.signal)

    def scale(self) -> float:
        """The noise scale ``noise / signal``, in samples; undefined while the signal is not above 0."""
        return self.noise / self.signal if self.signal > 0 else UNDEFINED

    def averaged(self, before: NoiseAndSignal | None) -> NoiseAndSignal:
        """The exponential averages, from those before; ``None`` before the first record.

        They lack the correction for the bias to 0, a factor that both have in common: :meth:`scale` is the same with it.
        """
        before = before or NoiseAndSignal(0.0, 0.0)
        return NoiseAndSignal(*(DECAY * old + (1 - DECAY) * new for old, new in zip(before, self, strict=True)))


def noise_and_signal(squares: Array, sizes: Array, mean_square: float) -> NoiseAndSignal:
    """Unbiased estimates from the gradients ``g_i`` of ``n`` batches with ``b_i`` samples each, and their mean ``g``.

    With ``h = mean(1 / b_i)``: ``noise = (mean(|g_i|**2) - |g|**2) / (h - h / n)`` and ``signal = |g|**2 - noise * h / n``.

    Args:
        squares: ``|g_i|**2``, shape ``(n,)``.
        sizes: ``b_i``, of the same shape.
        mean_square: ``|g|**2``.

    Returns:
        Noise and signal, in squared units of the gradient. Both are undefined for one gradient, and where a size is.
    """
    num = len(squares)
    if num < 2 or is_undefined(sizes).any():
        return NoiseAndSignal(UNDEFINED, UNDEFINED)
    with np.errstate(all="ignore"):  # gradients that are not finite give NaN
        h = np.mean(1 / sizes)
        noise = (np.mean(squares) - mean_square) / (h - h / num)
        return NoiseAndSignal(float(noise), float(mean_square - noise * h / num))


def largest(squares: Array) -> tuple[int, float]:
    """Index of the gradient with the largest norm, and that norm over the median of all.

    A norm that is not finite counts as the largest. ``squares`` as in :func:`noise_and_signal`.
    """
    norms = np.sqrt(squares)
    index = int(np.argmax(np.where(np.isnan(norms), np.inf, norms)))
    middle = float(np.median(norms))
    with np.errstate(all="ignore"):
        return index, UNDEFINED if norms[index] == middle == 0 else float(np.divide(norms[index], middle))
