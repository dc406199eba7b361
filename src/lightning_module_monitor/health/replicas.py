"""The finding that ranks have different values of a parameter that all of them should have alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_module_monitor.record import RANK_DISAGREEMENT, Finding

if TYPE_CHECKING:  # imports torch, which a command that reads a store does without
    from lightning_module_monitor.statistics.spec import MetricSpec

CURE = "look for what moves it on one rank alone, e.g. a parameter that the reduction of gradients leaves out"


class ReplicaWatch:
    """Reports once that ranks have come apart, and again after a record in which they had not."""

    def __init__(self) -> None:
        self._is_reported = False

    def examine(self, step: int, differing: Sequence[MetricSpec]) -> list[Finding]:
        """Take in a record.

        Args:
            step: Its step.
            differing: Of what ranks have different values, in the order of the model.

        Returns:
            The finding, if there is one.
        """
        was_reported, self._is_reported = self._is_reported, bool(differing)
        if was_reported or not differing:
            return []
        first, num_sites = differing[0], len({spec.site for spec in differing})
        what = f"{first.kind} {first.site}" + (f" and {num_sites - 1} more" if num_sites > 1 else "")
        meaning = "Those recorded are of all ranks' elements together"
        words = f"Ranks have different values of {what}, and should have the same. {meaning}. Try: {CURE}."
        return [Finding(step, RANK_DISAGREEMENT, first.site, next(iter(first.keys()), ""), words)]
