"""The verdict on the values of one term at several widths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.width_check.expectations import NOTHING
from lightning_module_monitor.width_check.fit import PowerLaw, fit_power_law
from lightning_module_monitor.width_check.layers import Role
from lightning_module_monitor.width_check.settings import Settings

Verdict = Literal["nonfinite", "grows", "vanishes", "unclear", "ok"]

OFFENDING: tuple[Verdict, ...] = ("nonfinite", "grows", "vanishes")


@dataclass(frozen=True)
class Row:
    """How one term of one module depends on the width."""

    module: str
    role: Role
    """``input``, ``hidden``, ``output``, ``fixed`` or ``unknown``."""
    term: str
    """``effective_update``, ``propagating_update``, ``effective_alignment`` or ``propagating_alignment``."""
    exponent: float
    """The fitted exponent of width; ``-inf`` for a term that is zero at every width, NaN where there is no fit."""
    lower: float
    """Lower end of its confidence interval."""
    upper: float
    """Upper end of its confidence interval."""
    expected: float | None
    """The exponent by the parametrization: ``-inf`` for exactly zero, ``None`` where it is not known."""
    verdict: Verdict
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


def judge(module: str, role: Role, term: str, *, values: NDArray[np.float64], expected: float | None, settings: Settings) -> Row:
    """Fit one term and compare its exponent with the expected one.

    Args:
        module: Name of the module.
        role: Its role.
        term: Name of the term.
        values: The term's values, shape ``(widths, seeds)``.
        expected: The expected exponent; ``-inf`` for exactly zero, ``None`` for unknown.
        settings: Widths, confidence and tolerance.
    """

    def row(law: PowerLaw, verdict: Verdict, note: str = "") -> Row:
        return Row(module, role, term, *law, expected, verdict, note, values)

    undefined = PowerLaw(math.nan, math.nan, math.nan)
    bad = [str(width) for width, of_seeds in zip(settings.widths, values, strict=True) if not np.isfinite(of_seeds).all()]
    if bad:
        return row(undefined, "nonfinite", f"not finite at width {', '.join(bad)}")
    if not values.any():
        is_known = expected == NOTHING
        note = "" if is_known else "zero at every width: is it trained, and has it a gradient in these steps?"
        return row(PowerLaw(NOTHING, NOTHING, NOTHING), "ok" if is_known else "unclear", note)
    positive = values > 0
    widths = np.broadcast_to(np.array(settings.widths)[:, None], values.shape)[positive]
    if len(set(widths.tolist())) < 2:
        return row(undefined, "unclear", f"zero at all widths but {widths[0]}")
    law = fit_power_law(widths, values[positive], settings.confidence)
    if not positive.all():
        return row(law, "unclear", f"zero in {(~positive).sum()} of {values.size} runs, which are left out")
    if expected == NOTHING:
        return row(law, "unclear", "expected to be zero, and is not")
    return row(law, _compare(law, expected, settings.tolerance))


def _compare(law: PowerLaw, expected: float | None, tolerance: float) -> Verdict:
    if expected is None:
        return "unclear"
    low, high = expected - tolerance, expected + tolerance
    if law.lower > high or law.upper < low:
        return "grows" if law.lower > high else "vanishes"
    return "ok" if low <= law.lower and law.upper <= high else "unclear"
