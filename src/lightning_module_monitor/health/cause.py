"""A cause: what shows it, what rules it out, what it explains, and what to try."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_module_monitor.health.finding_names import LARGE_START, LARGE_STEPS, NONFINITE, NOT_LEARNING, ONE_SIDED, OVERWRITTEN
from lightning_module_monitor.health.run_history import History
from lightning_module_monitor.record import Finding

GROWTH = (LARGE_STEPS, LARGE_START, "exploding", "growing_weights", "diverging", "growing_over_depth", ONE_SIDED)
"""Findings on sizes that grow."""
FLAT = ("saturation", "vanishing", "large_logits")
"""Findings on functions whose slope is next to 0."""
STILL = ("zero_gradients", "no_gradients", "frozen_updates", OVERWRITTEN)
"""Findings on weights that do not move."""
SYMPTOMS = (*STILL, *FLAT, "dead_units", "constant_output", "shrinking_outputs", NOT_LEARNING)
"""Findings that most causes may lead to, besides growth."""


@dataclass(frozen=True)
class Cause:
    """An entry of the table of causes."""

    name: str
    headline: str
    evidence_for: tuple[str, ...]
    """Names of the findings that show it."""
    advice: str
    explains: tuple[str, ...] = ()
    """Names of the findings that may follow from it, unless they begin earlier."""
    needs: str = ""
    """Further evidence for it, in words; ``is_shown`` tests it."""
    is_shown: Callable[[Finding, History], bool] = lambda _finding, _history: True
    """Whether a finding with such a name shows the cause, given the history of the run."""
    evidence_against: str = ""
    """The evidence that rules it out, in words; ``is_ruled_out`` tests it."""
    is_ruled_out: Callable[[History], bool] = lambda _history: False
    remark: Callable[[History], str] = lambda _history: ""
    """A sentence with the figures that show it, or that rule other causes out."""
    is_from_start: bool = False
    """Whether the first record shows it, whenever its findings come."""
    site: Callable[[History], str] = lambda _history: ""
    """The module or parameter that shows it, where its findings have none."""


def search_named(*names: str) -> Callable[[Finding, History], bool]:
    """Whether the search for a non-finite value named one of these causes; an empty name stands for no cause."""
    return lambda finding, _history: finding.name != NONFINITE or finding.cause in names


def max_change_remark(history: History) -> str:
    """A sentence on how far all steps together can move a weight; empty where it is not known."""
    change = history.max_relative_change
    times = f"{change:.0f} times" if change >= 10 else f"{change:.2g} of"
    return f"All steps together can move a weight by {times} its norm." if math.isfinite(change) else ""
