"""Gains, their logarithms, categories and summary, for known numbers."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_module_monitor.kernels.moments import Moments
from lightning_module_monitor.statistics.gains import HEURISTIC, NORMS, Thresholds, summary, transitions

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("earlier", "later", "gain", "log_gain", "category"),
    [
        (3.0, 2.0, 1.5, math.log(1.5), "healthy"),
        (1.0, 2.0, 0.5, math.log(0.5), "healthy"),
        (4.0, 2.0, 2.0, math.log(2.0), "healthy"),
        (5.0, 2.0, 2.5, math.log(2.5), "amplifying"),
        (1.0, 4.0, 0.25, math.log(0.25), "damping"),
        (0.0, 4.0, 0.0, -INF, "damping"),
        (9e-31, 4.0, 2.25e-31, -INF, "damping"),
        (1e-30, 1e-30, 1.0, 0.0, "healthy"),
        (1.0, 9e-31, INF, INF, "vanishing"),
        (0.0, 0.0, INF, INF, "vanishing"),
        (1e200, 1e-20, 1e220, 220 * math.log(10), "amplifying"),
        (1e300, 1e-29, INF, 329 * math.log(10), "amplifying"),
        (INF, 2.0, INF, INF, "amplifying"),
        (1.0, INF, 0.0, -INF, "damping"),
        (INF, INF, NAN, NAN, "undefined"),
        (NAN, 1.0, NAN, NAN, "undefined"),
        (1.0, NAN, NAN, NAN, "undefined"),
        (None, 1.0, None, None, "missing"),
        (1.0, None, None, None, "missing"),
    ],
)
def test_a_transition(earlier: float | None, later: float | None, gain: float | None, log_gain: float | None, category: str) -> None:
    """The gain is the norm before over the norm after; natural logarithm; only the later norm can vanish."""
    [transition] = transitions([earlier, later], 1e-30, HEURISTIC)
    assert transition.gain == pytest.approx(gain, rel=1e-12, nan_ok=True) if gain is not None else transition.gain is None
    assert transition.log_gain == pytest.approx(log_gain, rel=1e-12, nan_ok=True) if log_gain is not None else transition.log_gain is None
    assert transition.category == category


@pytest.mark.parametrize(
    ("thresholds", "categories"),
    [
        (HEURISTIC, ["amplifying", "healthy", "healthy", "damping"]),
        (Thresholds(0.3, 4.0), ["healthy"] * 4),
        (Thresholds(0.5, 0.5), ["amplifying", "healthy", "amplifying", "damping"]),
    ],
)
def test_thresholds_move_the_categories(thresholds: Thresholds, categories: list[str]) -> None:
    """A gain on a threshold is healthy."""
    norms = [8.0, 2.0, 4.0, 2.0, 6.0]  # gains 4, 1/2, 2, 1/3
    assert [transition.category for transition in transitions(norms, 1e-30, thresholds)] == categories


def test_the_summary_by_hand() -> None:
    """Norms 1, 4, 1, None, 2, 0, 5: gains 1/4, 4, none, none, infinite, 0; the logarithm of the last is minus infinite."""
    changes = transitions([1.0, 4.0, 1.0, None, 2.0, 0.0, 5.0], 1e-30, HEURISTIC)
    assert summary(changes) == {
        "mean_gain": pytest.approx((0.25 + 4 + 0) / 3),
        "min_gain": 0.0,
        "max_gain": 4.0,
        "mean_log_gain": pytest.approx(0.0, abs=1e-15),  # log 1/4 + log 4
        "num_amplifying": 1,
        "num_damping": 2,
        "num_healthy": 0,
        "num_vanishing": 1,
        "num_missing": 2,
    }


def test_the_summary_without_finite_gains() -> None:
    """Without a finite gain there is no mean. A NaN at any position makes the summary NaN."""
    for norms in ([], [1.0], [1.0, None], [1.0, 0.0]):
        values = summary(transitions(norms, 1e-30, HEURISTIC))
        assert [values[name] for name in ("mean_gain", "min_gain", "max_gain", "mean_log_gain")] == [None] * 4
    for norms in ([NAN, 1.0, 2.0, 3.0], [1.0, 2.0, NAN, 3.0], [1.0, 2.0, 3.0, NAN]):
        values = summary(transitions(norms, 1e-30, HEURISTIC))
        assert all(math.isnan(values[name] or 0.0) for name in ("mean_gain", "min_gain", "max_gain", "mean_log_gain"))


def test_norms_of_an_empty_gradient_are_zero() -> None:
    """As for a sum without terms."""
    nothing = Moments(*torch.stack(Moments.empty(3)).numpy())
    for name, norm in NORMS.items():
        assert norm.finish(nothing).tolist() == [0.0, 0.0, 0.0], name
