"""Functions that are methods of ``ModuleMonitor``: they add a metric, take values from the user, or return recorded values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from lightning_module_monitor.config.rules import Rule
from lightning_module_monitor.engine.phases import StepEngine
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import BATCH_SIZE, CONTEXT_KIND, STEP_SKIPPED, TRAIN
from lightning_module_monitor.model.hooks import is_tracing
from lightning_module_monitor.model.names import beginning_with
from lightning_module_monitor.sinks.recent_records import StorageManager

Function = Callable[[Tensor], Any]
PairFunction = Callable[[Tensor, Tensor], Any]


class Parts(Protocol):
    """The parts of a ``ModuleMonitor`` that these functions use."""

    engine: StepEngine
    storage: StorageManager
    metrics: set[tuple[str, str]]
    """Kind and name of each metric."""


def add_activation_metric(
    monitor: Parts,
    metric_name: str,
    metric_fn: Function | None = None,
    metric_regex: str = ".*",
    metric_aggregation_fn: Function | None = None,
) -> None:
    """Add a metric of every module's output.

    Args:
        monitor: The monitor that has this method.
        metric_name: Its name in the key; without a function, that of a built-in statistic.
        metric_fn: Function of the output, which returns a tensor of any shape.
        metric_regex: Modules whose name begins like this (``re.match``).
        metric_aggregation_fn: Function of the concatenated results of a step; the default is their mean.

    Raises:
        ValueError: If there is one of this name.
    """
    _add_metric(monitor, ("activation",), metric_name, metric_fn, metric_regex, aggregation=metric_aggregation_fn)


def add_activation_difference_metric(
    monitor: Parts,
    metric_name: str,
    metric_fn: PairFunction | None = None,
    metric_regex: str = ".*",
    metric_aggregation_fn: Function | None = None,
) -> None:
    """Add a metric of every module's output and the reference's; arguments as for `add_activation_metric`.

    The function gets the output and the reference's output for the same input. A built-in statistic is that of their
    difference; ``ratio`` its norm over the norm of the reference's, ``cosine`` that of the angle between the two.
    """
    _add_metric(monitor, ("activation_difference",), metric_name, metric_fn, metric_regex, aggregation=metric_aggregation_fn)


def add_parameter_difference_metric(
    monitor: Parts, metric_name: str, metric_fn: PairFunction | None = None, metric_regex: str = ".*"
) -> None:
    """Add a metric of every parameter and the reference's; as for `add_activation_difference_metric`."""
    _add_metric(monitor, ("parameter_difference",), metric_name, metric_fn, metric_regex)


def add_parameter_metric(monitor: Parts, metric_name: str, metric_fn: Function | None = None, metric_regex: str = ".*") -> None:
    """Add a metric of every parameter; arguments as for `add_activation_metric`."""
    _add_metric(monitor, ("parameter",), metric_name, metric_fn, metric_regex)


def add_gradient_metric(monitor: Parts, metric_name: str, metric_fn: Function | None = None, metric_regex: str = ".*") -> None:
    """Add a metric of every parameter's gradient; arguments as for `add_activation_metric`."""
    _add_metric(monitor, ("gradient", "gradient_before_clip"), metric_name, metric_fn, metric_regex)


def get_step_metrics(monitor: Parts) -> dict[str, float]:
    """The values of the step that ended last, by key."""
    last = monitor.storage.last_step()
    return {} if last is None else monitor.storage.get_step_metrics(last)


def get_all_metrics(monitor: Parts) -> dict[int, dict[str, float]]:
    """The values by key of every step that is still in memory, by step."""
    return monitor.storage.get_all_metrics()


def monitor_skipped_step(monitor: Parts, is_skipped: bool | Tensor) -> None:
    """Record whether a ``GradScaler`` skipped the step of an optimizer; ``monitor/step_skipped`` is 1 if that of any in this step.

    Args:
        monitor: The monitor that has this method.
        is_skipped: Also a tensor of shape ``()``, on any device, which is not 0 if so; it is not read before the step ends.
    """
    if not is_tracing():
        value = (is_skipped != 0).float() if isinstance(is_skipped, Tensor) else float(is_skipped)
        monitor.engine.monitor_figure(STEP_SKIPPED, value)


def monitor_context(monitor: Parts, name: str, value: Tensor | float, aggregate: str = "mean") -> None:
    """Record a value of the context of this step, e.g. ``monitor.monitor_context("loss", loss)``: its key is ``context/<name>``.

    Args:
        monitor: The monitor that has this method.
        name: Letters, digits, ``_``, ``-`` and ``.``.
        value: A number, or a tensor of one element on any device, which is not read before the step ends.
        aggregate: How several values of this step and of all ranks are joined: ``mean``, ``sum``, ``min`` or ``max``.
    """
    step = monitor.engine.observing_step
    if step is not None:
        monitor.engine.add(step, CONTEXT_KIND, name, value, aggregate)
        if name == BATCH_SIZE and step.noise is not None:
            step.noise.count_samples(value)


def log_scalar(
    monitor: Parts, key: str, value: float | Tensor, aggregation_fn: Callable[[Tensor], Any] | None = None, force: bool = False
) -> None:
    """Record a value of your own in this step. Several of one key are joined as those of a metric are.

    Args:
        monitor: The monitor that has this method.
        key: At most three parts, ``kind/site/name``, of letters, digits, ``_``, ``-`` and ``.``.
        value: A number, or a tensor on any device, which is not read before the step ends. Anything else is recorded as NaN, and
            reported as ``on_error`` asks.
        aggregation_fn: Function of the concatenated values; the default is their mean.
        force: In a step that is not monitored, record it at once all the same.

    Raises:
        ValueError: If the key does not fit, or is one that the monitor has a value for.
    """
    engine, parts = monitor.engine, Key.of_user(key)
    stage = TRAIN if engine.open_step is None else engine.open_step.stage
    parts = parts._replace(stage=stage, prefix=engine.recipe.prefix)
    if engine.observed is not None and engine.observed.planner.is_taken(parts.format(), stage):
        expected = f"expected one of your own, e.g. 'own/{parts.statistic}'"
        raise ValueError(f"key {parts.format()!r} is one that the monitor records itself; {expected}.")
    if engine.observing_step is not None:
        engine.add(engine.observing_step, parts.kind, parts.statistic, value, aggregation_fn or "mean", site=parts.site)
    elif force:
        last = monitor.storage.last_step()
        engine.add_at_once(0 if last is None else last, parts._replace(stage=TRAIN).format(), value)


def log_scalars(monitor: Parts, monitor_dict: Mapping[str, float | Tensor], force: bool = False) -> None:
    """Record several values; see `log_scalar`."""
    for key, value in monitor_dict.items():
        log_scalar(monitor, key, value, force=force)


def log_tensor(monitor: Parts, key: str, tensor: Tensor, aggregation_fn: Callable[[Tensor], Any] | None = None) -> None:
    """Record the mean of a tensor's elements, or what a function makes of those of the whole step; see `log_scalar`."""
    log_scalar(monitor, key, tensor.clone() if isinstance(tensor, Tensor) else tensor, aggregation_fn)


def _add_metric(
    monitor: Parts,
    kinds: tuple[str, ...],
    name: str,
    function: Callable[..., Any] | None,
    regex: str,
    *,
    aggregation: Function | None = None,
) -> None:
    if (kinds[0], name) in monitor.metrics:
        raise ValueError(f"There is a metric {name!r} of kind {kinds[0]!r} already; expected another name.")
    recorded: dict[str, Any] = {"statistics": name} if function is None else {"functions": {name: function}}
    rule = Rule(kinds=list(kinds), sites=beginning_with(regex), aggregate=aggregation or "mean", **recorded)
    monitor.engine.add_rule(rule, f"metric {name!r}", is_optional=False)
    monitor.metrics.add((kinds[0], name))
