"""The simple noise scale: how much gradients of small batches differ, relative to their mean.

S. McCandlish and others, "An Empirical Model of Large-Batch Training", 2018, arXiv 1812.06162, appendix A.1.
"""

from __future__ import annotations

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

    def noise_scale(self) -> float:
        """``noise / signal``, in samples; undefined while the signal is not above 0."""
        return self.noise / self.signal if self.signal > 0 else UNDEFINED

    def moving_average(self, previous: NoiseAndSignal | None) -> NoiseAndSignal:
        """The exponential moving averages after these estimates.

        They are not corrected for their bias to 0. The bias is the same factor for both, so it cancels in :meth:`noise_scale`.

        Args:
            previous: The averages before; ``None`` at the first record.
        """
        previous = previous or NoiseAndSignal(0.0, 0.0)
        return NoiseAndSignal(*(DECAY * average + (1 - DECAY) * new for average, new in zip(previous, self, strict=True)))


def noise_and_signal(squares: Array, sizes: Array, square_of_mean: float) -> NoiseAndSignal:
    """Unbiased estimates from the gradients ``g_i`` of ``n`` batches with ``b_i`` samples each, and their mean ``g``.

    With ``h = mean(1 / b_i)``: ``noise = (mean(|g_i|**2) - |g|**2) / (h - h / n)`` and ``signal = |g|**2 - noise * h / n``.

    Args:
        squares: ``|g_i|**2``, shape ``(n,)``.
        sizes: ``b_i``, of the same shape.
        square_of_mean: ``|g|**2``.

    Returns:
        Noise and signal, in squared units of the gradient. Both are undefined for fewer than two gradients, or if a size is undefined.
    """
    num = len(squares)
    if num < 2 or is_undefined(sizes).any():
        return NoiseAndSignal(UNDEFINED, UNDEFINED)
    with np.errstate(all="ignore"):  # gradients that are not finite give NaN
        h = np.mean(1 / sizes)
        noise = (np.mean(squares) - square_of_mean) / (h - h / num)
        return NoiseAndSignal(float(noise), float(square_of_mean - noise * h / num))


def largest_over_median(squares: Array) -> tuple[int, float]:
    """Index of the gradient with the largest norm, and that norm over the median norm.

    A norm that is not finite counts as the largest. ``squares`` as in :func:`noise_and_signal`.
    """
    norms = np.sqrt(squares)
    index = int(np.argmax(np.where(np.isnan(norms), np.inf, norms)))
    median = float(np.median(norms))
    with np.errstate(all="ignore"):
        return index, UNDEFINED if norms[index] == median == 0 else float(np.divide(norms[index], median))
