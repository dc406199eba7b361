"""The exponent of the width in the values of one term, its confidence interval, and the verdict on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_module_monitor.width_check.expectations import NOTHING
from lightning_module_monitor.width_check.layers import Role
from lightning_module_monitor.width_check.settings import Settings

RowVerdict = Literal["nonfinite", "grows", "vanishes", "unclear", "ok"]

OFFENDING: tuple[RowVerdict, ...] = ("nonfinite", "grows", "vanishes")


@dataclass(frozen=True)
class Row:
    """The dependence of one term of one module on the width."""

    module: str
    role: Role
    """``input``, ``hidden``, ``output``, ``fixed`` or ``unknown``."""
    term: str
    """``effective_update``, ``propagating_update``, ``effective_alignment`` or ``propagating_alignment``."""
    exponent: float
    """The fitted exponent of width; ``-inf`` for a term that is zero at every width, NaN where there is no fit."""
    lower: float
    """Lower end of its confidence interval, of 95 %."""
    upper: float
    """Upper end of its confidence interval."""
    expected: float | None
    """The exponent by the parametrization: ``-inf`` for exactly zero, ``None`` where none is expected."""
    verdict: RowVerdict
    """``ok``: the interval lies within the tolerance of the expected exponent; ``grows``, ``vanishes``: it lies above, below;
    ``unclear``: it lies on the edge, or nothing is expected; ``nonfinite``: a value is NaN or infinite."""
    note: str
    """A remark; often empty."""
    values: NDArray[np.float64]
    """The measured values, shape ``(widths, seeds)``."""

    @property
    def is_offending(self) -> bool:
        """Whether the verdict is against the module."""
        return self.verdict in OFFENDING


class PowerLaw(NamedTuple):
    """The exponent ``a`` of ``value = c * width ** a``, and its confidence interval."""

    exponent: float
    lower: float
    upper: float


def judge(module: str, role: Role, term: str, *, values: NDArray[np.float64], expected: float | None, settings: Settings) -> Row:
    """Fit the values of one term, shape ``(widths, seeds)``, and compare its exponent with the expected one; see :class:`Row`."""

    def row(law: PowerLaw, verdict: RowVerdict, note: str = "") -> Row:
        return Row(module, role, term, *law, expected, verdict, note, values)

    undefined = PowerLaw(math.nan, math.nan, math.nan)
    bad = [str(width) for width, row_values in zip(settings.widths, values, strict=True) if not np.isfinite(row_values).all()]
    if bad:
        return row(undefined, "nonfinite", f"not finite at width {', '.join(bad)}")
    if not values.any():
        # At no width the input of a first layer changes.
        is_right = expected == NOTHING or (term == "propagating_update" and expected == 0.0)
        note = "" if is_right else "zero at every width: is it trained, and has it a gradient in these steps?"
        return row(PowerLaw(NOTHING, NOTHING, NOTHING), "ok" if is_right else "unclear", note)
    positive = values > 0
    widths = np.broadcast_to(np.array(settings.widths)[:, None], values.shape)[positive]
    if len(set(widths.tolist())) < 2:
        return row(undefined, "unclear", f"zero at all widths but {widths[0]}")
    law = fit_power_law(widths, values[positive])
    if not positive.all():
        return row(law, "unclear", f"zero in {(~positive).sum()} of {values.size} runs, which are left out")
    if expected == NOTHING:
        return row(law, "unclear", "expected to be zero, and is not")
    verdict: RowVerdict = "unclear"
    if expected is not None:
        low, high = expected - settings.tolerance, expected + settings.tolerance
        if law.lower > high or law.upper < low:
            verdict = "grows" if law.lower > high else "vanishes"
        elif low <= law.lower and law.upper <= high:
            verdict = "ok"
    return row(law, verdict)


def fit_power_law(widths: ArrayLike, values: ArrayLike) -> PowerLaw:
    r"""Least squares of :math:`\ln v = \ln c + a \ln n` over all points.

    With :math:`s^2 = \sum r^2 / (N - 2)` of the residuals :math:`r`, the interval is
    :math:`a \pm t_{N - 2} \, s / \sqrt{\sum (\ln n - \overline{\ln n})^2}`, with Student's :math:`t`. The residuals contain both the
    scatter of the seeds and the deviation from a power law.

    Args:
        widths: Widths n, shape ``(points,)``, at least two that differ.
        values: Values v, shape ``(points,)``, finite and greater than 0.

    Returns:
        Exponent and interval of 95 %, dimensionless; the interval is infinite where there are two points, whose line fits exactly.
    """
    x, y = np.log(np.asarray(widths, dtype=np.float64)), np.log(np.asarray(values, dtype=np.float64))
    x_from_mean = x - x.mean()
    spread = float(x_from_mean @ x_from_mean)
    exponent = float(x_from_mean @ y) / spread
    if len(x) == 2:
        return PowerLaw(exponent, -math.inf, math.inf)
    residuals = y - y.mean() - exponent * x_from_mean
    standard_error = math.sqrt(float(residuals @ residuals) / (len(x) - 2) / spread)
    half_width = student_t(len(x) - 2) * standard_error
    return PowerLaw(exponent, exponent - half_width, exponent + half_width)


T_OF_95 = (
    *(12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139),
    *(2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963),
    *(2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272),
)
"""By degrees of freedom from 1 on: Student's t lies within plus and minus this number with a probability of 95 %."""


def student_t(degrees_of_freedom: int) -> float:
    """The two-sided quantile of 95 % of Student's t distribution, from the table :data:`T_OF_95`; above 30 to within 1e-4.

    References:
        Abramowitz and Stegun, Handbook of Mathematical Functions, table 26.10 and 26.7.5.
    """
    if degrees_of_freedom <= len(T_OF_95):
        return T_OF_95[degrees_of_freedom - 1]
    z = 1.959964  # of the normal distribution
    return z + (z**3 + z) / (4 * degrees_of_freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees_of_freedom**2)
