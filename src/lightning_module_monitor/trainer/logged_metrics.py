"""The metrics that a LightningModule logs, as values of the context of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from lightning_module_monitor.keys import Columns, Key, is_context
from lightning_module_monitor.kinds import CONTEXT_KIND
from lightning_module_monitor.lightning_packages import Trainer
from lightning_module_monitor.record import Record
from lightning_module_monitor.trainer.run import Run, passed_keys, step_of


def logged_metrics(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """The present metrics that are single numbers, by name, without those that other callbacks got from this package.

    This converts metrics of the progress bar to numbers, which waits for the device; Lightning does so again at the end of each step.
    """
    metrics, passed = trainer.callback_metrics, passed_keys.get(trainer, ())
    for name, value in metrics.items():
        is_twice = name.endswith("_step") and name.removesuffix("_step") in metrics  # a metric that is logged by step and by epoch
        if isinstance(value, Tensor) and value.numel() == 1 and not is_twice and name not in passed:
            yield name, value


class LastValidation:
    """The metrics of a validation loop that no record has: each record has the present ones, and the last loop comes after all records."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._has_ended = False
        """Whether a loop has ended since the last record."""
        self._of_training: set[str] | None = None
        """The keys of the context in the first record, which is before any loop: those of training."""

    def note_record(self, columns: Columns) -> None:
        """There is a record of training with these columns."""
        if self._of_training is None:
            self._of_training = set() if self._has_ended else {*filter(is_context, columns.texts)}
        self._has_ended = False

    def note_loop(self) -> None:
        """A validation loop has ended."""
        self._has_ended = self._run.is_fit and not self._run.trainer.sanity_checking

    @property
    def has_metrics(self) -> bool:
        """Whether a loop has ended after the last record; not on several ranks, whose metrics would have to be averaged."""
        return self._has_ended and self._of_training is not None and self._run.trainer.world_size == 1

    def record(self, name_of_metric: Callable[[str], str]) -> Record | None:
        """The metrics of that loop; ``None`` if it has logged none."""
        trainer, prefix = self._run.trainer, self._run.recipe.prefix
        keys = {Key(CONTEXT_KIND, "", name_of_metric(name), prefix=prefix).format(): value for name, value in logged_metrics(trainer)}
        values = {key: float(value) for key, value in keys.items() if key not in (self._of_training or ())}
        return Record.of(step_of(trainer), values) if values else None
