"""The report on gradient flow: text for a terminal or a log file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_module_monitor.statistics.gains import Category, Thresholds, Transition, summary

if TYPE_CHECKING:
    from rich.text import Text

MARKS: dict[Category, str] = {
    "healthy": "[Healthy]",
    "amplifying": "[AMPLIFYING]",
    "damping": "[DAMPING]",
    "vanishing": "[VANISHING]",
    "missing": "[no gradient]",
    "undefined": "[NOT FINITE]",
}

STYLES = {
    r"^\w.*$": "bold",
    r"\[Healthy\]": "green",
    r"\[no gradient\]|: none$": "dim",
    r"\[(AMPLIFYING|DAMPING)\]": "yellow",
    r"\[(VANISHING|NOT FINITE)\]": "bold red",
}
"""Style of rich by pattern."""


class GainReport(str):
    """Plain ASCII text; ``rich.print`` shows it in colours."""

    __slots__ = ()

    def __rich__(self) -> Text:
        """The same text in colours."""
        from rich.text import Text  # noqa: PLC0415  # the caller has rich; it is no dependency of others

        text = Text(str(self))
        for pattern, style in STYLES.items():
            text.highlight_regex(f"(?m){pattern}", style)
        return text


def gain_report(norms: Sequence[float | None], found: Sequence[Transition], norm_type: str, thresholds: Thresholds) -> GainReport:
    """Format norms and transitions as lines of at most about 80 characters.

    Args:
        norms: Norm of the gradient at each block's output.
        found: The transitions between them.
        norm_type: Name of the norm.
        thresholds: The range of healthy gains.
    """
    width = max(2, len(str(len(norms) - 1)))
    low, high = thresholds
    sums = summary(found)
    categories = {
        f"Healthy ({low:g} <= gamma <= {high:g}):": sums["num_healthy"],
        f"Amplifying (gamma > {high:g}):": sums["num_amplifying"],
        f"Damping (gamma < {low:g}):": sums["num_damping"],
        "Vanishing (gamma = inf):": sums["num_vanishing"],
        "Missing (no gradient):": sums["num_missing"],
    }
    longest = max(map(len, categories))
    gains = [f"gamma={_number(one.gain)}, log_gamma={_number(one.log_gain)} {MARKS[one.category]}" for one in found]
    lines = [
        "Gradient Flow Analysis",
        f"  norm: {norm_type}; blocks: {len(norms)}",
        *("", "Gradient Norms:"),
        *(f"  Block {i:{width}d}: {_number(norm, '.4e')}" for i, norm in enumerate(norms)),
        *("", "Gradient Gains (norm over norm of the next block; marks are heuristics):"),
        *(f"  Transition {i:{width}d} to {i + 1:{width}d}: {text}" for i, text in enumerate(gains)),
        *("", "Summary Statistics:"),
        f"  Mean gain:     {_number(sums['mean_gain'])}",
        f"  Min gain:      {_number(sums['min_gain'])}",
        f"  Max gain:      {_number(sums['max_gain'])}",
        f"  Mean log-gain: {_number(sums['mean_log_gain'])}",
        *("", "Transition Categories:"),
        *(f"  {label:<{longest}} {number}" for label, number in categories.items()),
    ]
    return GainReport("\n".join(lines))


def _number(value: float | None, form: str = "") -> str:
    """Four decimal places, or scientific notation where these would show too little or too much.

    >>> list(map(_number, (2.0, 0.00012345, 54321.0, 0.0, None)))
    ['2.0000', '1.2345e-04', '5.4321e+04', '0.0000', 'none']
    """
    if value is None:
        return "none"
    is_plain = value == 0 or not math.isfinite(value) or 1e-2 <= abs(value) < 1e4
    return format(value, form or (".4f" if is_plain else ".4e"))
