"""Parameters that differ between ranks although they must be equal."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_module_monitor.health.causes_in_setup import ADVICE_ON_RANKS
from lightning_module_monitor.kinds import RANK_DISAGREEMENT
from lightning_module_monitor.record import Finding
from lightning_module_monitor.statistics.stream import Stream


class ReplicaAlert:
    """Reports parameters that differ between ranks although they must be equal; again only after a record in which all are equal."""

    def __init__(self) -> None:
        self._is_reported = False

    def examine(self, step: int, differing: Sequence[Stream]) -> list[Finding]:
        """The finding of a record, if any, from the streams whose values differ, in the order of the model."""
        was_reported, self._is_reported = self._is_reported, bool(differing)
        if was_reported or not differing:
            return []
        first, num_sites = differing[0], len({stream.site for stream in differing})
        what = f"{first.kind} {first.site}" + (f" and {num_sites - 1} more" if num_sites > 1 else "")
        coverage = "Recorded statistics cover the elements of all ranks"
        words = f"Ranks have different values of {what}, which must be equal. {coverage}. Try: {ADVICE_ON_RANKS}."
        return [Finding(step, RANK_DISAGREEMENT, first.site, next(iter(first.number_keys), ""), words)]
