"""Exponents and their intervals, against closed forms, numpy and the tables of Student's distribution."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_module_monitor.width_check.power_law import fit_power_law, student_t

WIDTHS = np.repeat([128, 256, 512, 1024], 4)


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.0, 0.5, 1.0, 1.37])
@pytest.mark.parametrize("factor", [1e-30, 1.0, 3e20])
def test_a_power_law_gives_its_exponent(exponent: float, factor: float) -> None:
    """Without scatter exponent and both ends of the interval are the law's, whatever stands before it."""
    law = fit_power_law(WIDTHS, factor * WIDTHS.astype(float) ** exponent)
    assert law == pytest.approx((exponent, exponent, exponent), abs=1e-10)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_the_interval_is_that_of_least_squares(confidence: float) -> None:
    """Slope and standard error are those of numpy's polynomial fit, times the tabulated t of 14 degrees of freedom."""
    t_of_14 = {0.8: 1.345030, 0.95: 2.144787, 0.99: 2.976843}[confidence]
    values = WIDTHS**0.5 * np.exp(np.random.default_rng(0).normal(0, 0.2, len(WIDTHS)))
    (slope, _), covariance = np.polyfit(np.log(WIDTHS), np.log(values), 1, cov=True)
    half_width = t_of_14 * covariance[0, 0] ** 0.5
    assert fit_power_law(WIDTHS, values, confidence) == pytest.approx((slope, slope - half_width, slope + half_width), rel=1e-6)


def test_the_interval_holds_what_it_says() -> None:
    """Of 2,000 samples with known scatter the interval of 90 % holds the true exponent in 90 %, within four standard deviations."""
    rng = np.random.default_rng(1)
    laws = [fit_power_law(WIDTHS, WIDTHS**-0.5 * np.exp(rng.normal(0, 0.5, len(WIDTHS))), 0.9) for _ in range(2000)]
    held = np.mean([law.lower <= -0.5 <= law.upper for law in laws])
    assert abs(held - 0.9) < 4 * (0.9 * 0.1 / 2000) ** 0.5


def test_two_points_have_a_line_and_no_interval() -> None:
    """A line through two points fits exactly, which says nothing of its slope's scatter."""
    assert fit_power_law([10, 1000], [1.0, 10.0]) == pytest.approx((0.5, -np.inf, np.inf))


@pytest.mark.parametrize(
    ("degrees_of_freedom", "confidence", "tabulated"),
    [(1, 0.95, 12.706205), (2, 0.95, 4.302653), (3, 0.9, 2.353363), (5, 0.99, 4.032143), (10, 0.5, 0.699812), (30, 0.95, 2.042272)],
)
def test_student_t_is_that_of_the_tables(degrees_of_freedom: int, confidence: float, tabulated: float) -> None:
    """Odd and even degrees of freedom, which have formulas of their own."""
    assert student_t(confidence, degrees_of_freedom) == pytest.approx(tabulated, abs=1e-6)


@pytest.mark.parametrize("degrees_of_freedom", [1, 2, 7, 14, 61])
def test_student_t_encloses_its_probability(degrees_of_freedom: int) -> None:
    """The share of the density between -t and t, integrated numerically, is the confidence."""
    t = student_t(0.95, degrees_of_freedom)

    def density(x: np.ndarray) -> np.ndarray:
        return (1 + x**2 / degrees_of_freedom) ** (-(degrees_of_freedom + 1) / 2)

    # Of x = tan(angle), so that the whole line is a finite interval.
    inside, whole = (np.linspace(-limit, limit, 400_001) for limit in (np.arctan(t), np.pi / 2 - 1e-9))
    shares = [np.trapezoid(density(np.tan(angle)) / np.cos(angle) ** 2, angle) for angle in (inside, whole)]
    assert shares[0] / shares[1] == pytest.approx(0.95, abs=1e-6)
