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


def test_the_interval_is_that_of_least_squares() -> None:
    """Slope and standard error are those of numpy's polynomial fit, times the tabulated t of 14 degrees of freedom."""
    values = WIDTHS**0.5 * np.exp(np.random.default_rng(0).normal(0, 0.2, len(WIDTHS)))
    (slope, _), covariance = np.polyfit(np.log(WIDTHS), np.log(values), 1, cov=True)
    half_width = 2.144787 * covariance[0, 0] ** 0.5
    assert fit_power_law(WIDTHS, values) == pytest.approx((slope, slope - half_width, slope + half_width), rel=1e-6)


def test_the_interval_holds_what_it_says() -> None:
    """Of 2,000 samples with known scatter the interval of 95 % holds the true exponent in 95 %, within four standard deviations."""
    rng = np.random.default_rng(1)
    laws = [fit_power_law(WIDTHS, WIDTHS**-0.5 * np.exp(rng.normal(0, 0.5, len(WIDTHS)))) for _ in range(2000)]
    held = np.mean([law.lower <= -0.5 <= law.upper for law in laws])
    assert abs(held - 0.95) < 4 * (0.95 * 0.05 / 2000) ** 0.5


def test_two_points_have_a_line_and_no_interval() -> None:
    """A line through two points fits exactly, which says nothing of its slope's scatter."""
    assert fit_power_law([10, 1000], [1.0, 10.0]) == pytest.approx((0.5, -np.inf, np.inf))


@pytest.mark.parametrize("degrees_of_freedom", [*range(1, 32), 40, 61, 1000])
def test_student_t_encloses_its_probability(degrees_of_freedom: int) -> None:
    """The share of the density between -t and t, integrated numerically, is 95 %; also above the table."""
    t = student_t(degrees_of_freedom)

    def density(x: np.ndarray) -> np.ndarray:
        return (1 + x**2 / degrees_of_freedom) ** (-(degrees_of_freedom + 1) / 2)

    # Of x = tan(angle), so that the whole line is a finite interval.
    inside, whole = (np.linspace(-limit, limit, 400_001) for limit in (np.arctan(t), np.pi / 2 - 1e-9))
    shares = [np.trapezoid(density(np.tan(angle)) / np.cos(angle) ** 2, angle) for angle in (inside, whole)]
    assert shares[0] / shares[1] == pytest.approx(0.95, abs=1e-6 if degrees_of_freedom <= 30 else 1e-5)
