"""The search for the first non-finite value of a run: the events that it receives."""

from __future__ import annotations

from torch import Tensor

from lightning_module_monitor.lightning_packages import Trainer
from lightning_module_monitor.record import Finding, Record

ALWAYS_NAMES = "health: {nonfinite: always} names the module."
"""Advice for a non-finite value whose module is not known."""


class NonfiniteSearch:
    """Receives the events of a run, from when the model exists to :meth:`close`. This class finds nothing: ``ignore``."""

    is_on = False
    """Whether steps are searched: otherwise none begins here."""
    is_reported = False
    """Whether a non-finite value was reported, and no finite step followed."""

    def begin_step(self, step: int, *, is_monitored: bool) -> None:
        """A step begins."""

    def begin_micro_batch(self, batch: object, batch_idx: int) -> None:
        """A micro-batch is about to be run."""

    def begin_backward(self, loss: Tensor) -> None:
        """The loss of a backward pass exists."""

    def end_backward(self) -> None:
        """The gradients exist."""

    def before_update(self, step: int) -> Finding | None:
        """The parameters are about to move; returns the finding of the first of a series, if it is known now."""
        return None

    def end_micro_batch(self) -> None:
        """The micro-batch is over."""

    def end_step(self, step: int, record: Record | None) -> Finding | None:
        """A step ends, which has a record if it was monitored; returns the finding, if only the record shows the non-finite value."""
        return None

    def after_exception(self, step: int, error: Exception) -> Finding | None:
        """The run is ended by an exception, possibly one that a NaN has caused: search what was not searched yet, on this rank alone."""
        return None

    def end_search(self) -> None:
        """Search no further in this step."""

    def close(self) -> None:
        """Remove every hook; a second call does nothing."""
        self.end_search()


def about_float16(trainer: Trainer) -> str:
    """The advice for a run that computes in float16, in a sentence; empty for any other."""
    if not str(trainer.precision).startswith("16"):
        return ""
    return f"The run computes in float16 (precision: {trainer.precision}), in which values above 65504 are infinite."
