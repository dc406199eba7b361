"""The report on the gradient's flow: text for a terminal or a log file, in colours where rich prints it."""

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
"""What stands behind a transition."""

STYLES = {
    r"^\w.*$": "bold",
    r"\[Healthy\]": "green",
    r"\[no gradient\]|: none$": "dim",
    r"\[(AMPLIFYING|DAMPING)\]": "yellow",
    r"\[(VANISHING|NOT FINITE)\]": "bold red",
}
"""How rich shows what a pattern matches."""


class GainReport(str):
    """A text like any other, plain ASCII; ``rich.print`` shows it in colours."""

    __slots__ = ()

    def __rich__(self) -> Text:
        """The same text in colours."""
        from rich.text import Text  # noqa: PLC0415  # who calls this has rich; nobody else needs it

        text = Text(str(self))
        for pattern, style in STYLES.items():
            text.highlight_regex(f"(?m){pattern}", style)
        return text


def gain_report(norms: Sequence[float | None], found: Sequence[Transition], norm_type: str, thresholds: Thresholds) -> GainReport:
    """Put what was found into words.

    Args:
        norms: Norm of the gradient at each block's output.
        found: The transitions between them.
        norm_type: What the norms are.
        thresholds: Which gains are called damping and amplifying.

    Returns:
        Lines of at most about 80 characters.
    """
    width = max(2, len(str(len(norms) - 1)))
    lines = ["Gradient Flow Analysis", f"  norm: {norm_type}; blocks: {len(norms)}", "", "Gradient Norms:"]
    lines += [f"  Block {i:{width}d}: {_number(norm, '.4e')}" for i, norm in enumerate(norms)]
    lines += ["", "Gradient Gains (norm over norm of the next block; marks are heuristics):"]
    lines += [_line(i, one, width) for i, one in enumerate(found)]
    sums = summary(found)
    names = {"Mean gain": "mean_gain", "Min gain": "min_gain", "Max gain": "max_gain", "Mean log-gain": "mean_log_gain"}
    lines += ["", "Summary Statistics:", *(f"  {label + ':':<15}{_number(sums[name])}" for label, name in names.items())]
    low, high = thresholds
    categories = {
        f"Healthy ({low:g} <= gamma <= {high:g})": "num_healthy",
        f"Amplifying (gamma > {high:g})": "num_amplifying",
        f"Damping (gamma < {low:g})": "num_damping",
        "Vanishing (gamma = inf)": "num_vanishing",
        "Missing (no gradient)": "num_missing",
    }
    longest = max(map(len, categories)) + 1
    lines += ["", "Transition Categories:", *(f"  {label + ':':<{longest}} {sums[name]}" for label, name in categories.items())]
    return GainReport("\n".join(lines))


def _line(place: int, one: Transition, width: int) -> str:
    values = f"gamma={_number(one.gain)}, log_gamma={_number(one.log_gain)}"
    return f"  Transition {place:{width}d} to {place + 1:{width}d}: {values} {MARKS[one.category]}"


def _number(value: float | None, form: str = "") -> str:
    """Four digits behind the point, or, where they would not tell or be too many, in scientific notation.

    >>> list(map(_number, (2.0, 0.00012345, 54321.0, 0.0, None)))
    ['2.0000', '1.2345e-04', '5.4321e+04', '0.0000', 'none']
    """
    if value is None:
        return "none"
    is_plain = value == 0 or not math.isfinite(value) or 1e-2 <= abs(value) < 1e4
    return format(value, form or (".4f" if is_plain else ".4e"))
