"""Every built-in statistic, and the histogram, by its formula, in numpy's float64."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from lightning_module_monitor import STATISTICS, Histogram, Statistic
from lightning_module_monitor.histogram import EDGES
from lightning_module_monitor.kernels.moments import Need


def histogram(x: Tensor) -> Histogram:
    """The histogram in numpy's float64, each element compared with the edges of the bins."""
    a = x.detach().double().numpy().ravel()
    finite = a[np.isfinite(a)]
    magnitudes = EDGES[len(EDGES) // 2 :]
    bins = len(magnitudes) - 1
    place = np.minimum(np.searchsorted(magnitudes, np.abs(finite), side="right"), bins)  # 0: zero
    counts = np.bincount((bins + np.sign(finite) * place).astype(int), minlength=2 * bins + 1)
    return Histogram(np.array([(a == -np.inf).sum(), *counts, (a == np.inf).sum(), np.isnan(a).sum()], dtype=np.int64))


PLAIN = [
    name
    for name, one in STATISTICS.items()
    if isinstance(one, Statistic) and not one.relative and not one.compared_with and not one.needs & Need.COUNTS
]
"""The statistics of moments alone."""


def deviations_of(flat: np.ndarray) -> np.ndarray:
    """Deviations from the mean. Their own mean, which the rounding of a large mean leaves, is subtracted again."""
    deviations: np.ndarray = flat - flat.mean()
    return deviations - deviations.mean()


def slack(name: str, x: Tensor) -> float:
    """The magnitude that the rounding of a statistic is in proportion to, where that is not the statistic's own.

    A mean is right to within the magnitudes that it is a sum of. Standardized moments are right to within the mean magnitude of
    their terms, and to within the rounding of the mean, counted in standard deviations.
    """
    a = x.detach().double().numpy().ravel()
    found = 0.0
    with np.errstate(all="ignore"):
        if name == "mean":
            found = np.abs(a).mean()
        elif name in ("skewness", "kurtosis"):
            d = np.abs(deviations_of(a))
            std = math.sqrt((d * d).mean()) or math.nan
            d, of_mean = d / std, np.abs(a).mean() / std
            third, fourth = (d * d * d).mean(), (d * d * d * d).mean()
            found = third + 3 * of_mean if name == "skewness" else 3 + fourth + 4 * third * of_mean
    return float(found) if np.isfinite(found) else 0.0


def textbook(name: str, x: Tensor) -> float:
    """The statistic in numpy's float64, by its formula."""
    a = x.detach().double().numpy()
    flat = a.ravel()
    n = flat.size
    tokens = a.reshape(-1, a.shape[-1]) if a.ndim else flat.reshape(1, 1)
    with np.errstate(all="ignore"):
        d = deviations_of(flat) if name in ("var", "std", "skewness", "kurtosis") else flat
        formulas = {
            "mean": lambda: flat.sum() / n,
            "var": lambda: (d**2).sum() / (n - 1),
            "std": lambda: math.sqrt((d**2).sum() / (n - 1)),
            "skewness": lambda: (d * d * d).mean() / (d * d).mean() ** 1.5,
            "kurtosis": lambda: (d * d * d * d).mean() / (d * d).mean() ** 2 - 3,
            "norm": lambda: math.sqrt((flat**2).sum()),
            "rms": lambda: math.sqrt((flat**2).sum() / n),
            "min": flat.min,
            "max": flat.max,
            "abs_mean": lambda: np.abs(flat).sum() / n,
            "abs_max": lambda: np.abs(flat).max(),
            "peak_to_rms": lambda: np.abs(flat).max() / math.sqrt((flat**2).sum() / n),
            "zero_fraction": lambda: (flat == 0).sum() / n,
            "nonfinite_count": lambda: float((~np.isfinite(flat)).sum()),
            "token_norm": lambda: np.sqrt((tokens**2).sum(1)).mean(),
            "token_rms": lambda: np.sqrt((tokens**2).mean(1)).mean(),
        }
        return float(formulas[name]())
