"""Every built-in statistic, and the histogram, by its formula, in numpy's float64."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from lightning_module_monitor import STATISTICS, Histogram, Statistic
from lightning_module_monitor.bins import EDGES


def histogram(x: Tensor) -> Histogram:
    """The histogram in numpy's float64, each element compared with the edges of the bins."""
    a = x.detach().double().numpy().ravel()
    finite = a[np.isfinite(a)]
    magnitudes = EDGES[len(EDGES) // 2 :]
    bins = len(magnitudes) - 1
    place = np.minimum(np.searchsorted(magnitudes, np.abs(finite), side="right"), bins)  # 0: zero
    counts = np.bincount((bins + np.sign(finite) * place).astype(int), minlength=2 * bins + 1)
    return Histogram(np.array([(a == -np.inf).sum(), *counts, (a == np.inf).sum(), np.isnan(a).sum()], dtype=np.int64))


PLAIN = [name for name, one in STATISTICS.items() if isinstance(one, Statistic) and not one.relative and not one.paired]


def textbook(name: str, x: Tensor) -> float:
    """The statistic in numpy's float64, by its formula."""
    a = x.detach().double().numpy()
    flat = a.ravel()
    n = flat.size
    tokens = a.reshape(-1, a.shape[-1]) if a.ndim else flat.reshape(1, 1)
    with np.errstate(all="ignore"):
        formulas = {
            "mean": lambda: flat.sum() / n,
            "var": lambda: ((flat - flat.mean()) ** 2).sum() / (n - 1),
            "std": lambda: math.sqrt(((flat - flat.mean()) ** 2).sum() / (n - 1)),
            "norm": lambda: math.sqrt((flat**2).sum()),
            "rms": lambda: math.sqrt((flat**2).sum() / n),
            "min": flat.min,
            "max": flat.max,
            "abs_mean": lambda: np.abs(flat).sum() / n,
            "abs_max": lambda: np.abs(flat).max(),
            "zero_fraction": lambda: (flat == 0).sum() / n,
            "nonfinite_count": lambda: float((~np.isfinite(flat)).sum()),
            "token_norm": lambda: np.sqrt((tokens**2).sum(1)).mean(),
            "token_rms": lambda: np.sqrt((tokens**2).mean(1)).mean(),
        }
        return float(formulas[name]())
