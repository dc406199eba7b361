"""Values that no probe observes, and the values of earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_module_monitor.engine.phases import StepEngine
from lightning_module_monitor.model.hooks import is_tracing
from lightning_module_monitor.record import BATCH_SIZE, CONTEXT_KIND, STEP_SKIPPED, TRAIN, Key, Record
from lightning_module_monitor.sinks.recent_records import StorageManager


class ValueMethods:
    """The methods of ``ModuleMonitor`` that take values from the user, or return recorded ones."""

    engine: StepEngine
    storage: StorageManager

    def get_step_metrics(self) -> dict[str, float]:
        """The values of the step that ended last, by key."""
        last = self.storage.last_step()
        return {} if last is None else self.storage.get_step_metrics(last)

    def get_all_metrics(self) -> dict[int, dict[str, float]]:
        """The values by key of every step that is still in memory, by step."""
        return self.storage.get_all_metrics()

    def monitor_skipped_step(self, is_skipped: bool | Tensor) -> None:
        """Record whether a ``GradScaler`` skipped the step of an optimizer; ``monitor/step_skipped`` is 1 if that of any in this step.

        Args:
            is_skipped: Also a tensor of shape ``()``, on any device, which is not 0 if so; it is not read before the step ends.
        """
        if not is_tracing():
            value = (is_skipped != 0).float() if isinstance(is_skipped, Tensor) else float(is_skipped)
            self.engine.monitor_figure(STEP_SKIPPED, value)

    def monitor_context(self, name: str, value: Tensor | float, aggregate: str = "mean") -> None:
        """Record a value of the context of this step, e.g. ``monitor.monitor_context("loss", loss)``: its key is ``context/<name>``.

        Args:
            name: Letters, digits, ``_``, ``-`` and ``.``.
            value: A number, or a tensor of one element on any device, which is not read before the step ends.
            aggregate: How several values of this step and of all ranks are joined: ``mean``, ``sum``, ``min`` or ``max``.
        """
        step = self.engine.observing_step
        if step is not None:
            self.engine.add(step, CONTEXT_KIND, name, value, aggregate)
            if name == BATCH_SIZE and step.noise is not None:
                step.noise.count_samples(value)

    def log_scalar(
        self, key: str, value: float | Tensor, aggregation_fn: Callable[[Tensor], Any] | None = None, force: bool = False
    ) -> None:
        """Record a value of your own in this step. Several of one key are joined as those of a metric are.

        Args:
            key: At most three parts, ``kind/site/name``, of letters, digits, ``_``, ``-`` and ``.``.
            value: A number, or a tensor on any device, which is not read before the step ends.
            aggregation_fn: Function of the concatenated values; the default is their mean.
            force: In a step that is not monitored, record it at once all the same.

        Raises:
            ValueError: If the key does not fit, or is one that the monitor has a value for.
        """
        engine, parts = self.engine, Key.of_user(key)
        stage = TRAIN if engine.open_step is None else engine.open_step.stage
        parts = parts._replace(stage=stage, prefix=engine.recipe.prefix)
        if engine.observed is not None and engine.observed.planner.is_taken(parts.format(), stage):
            expected = f"expected one of your own, e.g. 'own/{parts.statistic}'"
            raise ValueError(f"key {parts.format()!r} is one that the monitor records itself; {expected}.")
        if engine.observing_step is not None:
            engine.add(engine.observing_step, parts.kind, parts.statistic, value, aggregation_fn or "mean", site=parts.site)
        elif force:
            last = self.storage.last_step()
            number = float(value)
            self.storage.add(Record(0 if last is None else last, {parts._replace(stage=TRAIN).format(): number}))

    def log_scalars(self, monitor_dict: Mapping[str, float | Tensor], force: bool = False) -> None:
        """Record several values; see :meth:`log_scalar`."""
        for key, value in monitor_dict.items():
            self.log_scalar(key, value, force=force)

    def log_tensor(self, key: str, tensor: Tensor, aggregation_fn: Callable[[Tensor], Any] | None = None) -> None:
        """Record the mean of a tensor's elements, or what a function makes of those of the whole step; see :meth:`log_scalar`."""
        self.log_scalar(key, tensor.clone(), aggregation_fn)
