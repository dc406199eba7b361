"""Metrics by function: rules for the outputs or parameters whose names begin in one way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_module_monitor.config.rules import Rule
from lightning_module_monitor.model.names import beginning_with

Function = Callable[[Tensor], Any]
PairFunction = Callable[[Tensor, Tensor], Any]


class MetricMethods(ABC):
    """The methods of ``ModuleMonitor`` that add a metric."""

    _metrics: set[tuple[str, str]]
    """Kind and name of each metric."""

    @abstractmethod
    def add_rules(self, rules: Rule | Sequence[Rule], label: str = "rules", *, are_optional: bool = False) -> None:
        """Add rules."""

    def add_activation_metric(
        self, metric_name: str, metric_fn: Function | None = None, metric_regex: str = ".*", metric_aggregation_fn: Function | None = None
    ) -> None:
        """Add a metric of every module's output.

        Args:
            metric_name: Its name in the key; without a function, that of a built-in statistic.
            metric_fn: Function of the output, which returns a tensor of any shape.
            metric_regex: Modules whose name begins like this (``re.match``).
            metric_aggregation_fn: Function of the concatenated results of a step; the default is their mean.

        Raises:
            ValueError: If there is one of this name.
        """
        self._add_metric(("activation",), metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_activation_difference_metric(
        self,
        metric_name: str,
        metric_fn: PairFunction | None = None,
        metric_regex: str = ".*",
        metric_aggregation_fn: Function | None = None,
    ) -> None:
        """Add a metric of every module's output and the reference's; arguments as for :meth:`add_activation_metric`.

        The function gets the output and the reference's output for the same input. A built-in statistic is that of their
        difference; ``ratio`` its norm over the norm of the reference's, ``cosine`` that of the angle between the two.
        """
        self._add_metric(("activation_difference",), metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_parameter_difference_metric(self, metric_name: str, metric_fn: PairFunction | None = None, metric_regex: str = ".*") -> None:
        """Add a metric of every parameter and the reference's; as for :meth:`add_activation_difference_metric`."""
        self._add_metric(("parameter_difference",), metric_name, metric_fn, metric_regex, None)

    def add_parameter_metric(self, metric_name: str, metric_fn: Function | None = None, metric_regex: str = ".*") -> None:
        """Add a metric of every parameter; arguments as for :meth:`add_activation_metric`."""
        self._add_metric(("parameter",), metric_name, metric_fn, metric_regex, None)

    def add_gradient_metric(self, metric_name: str, metric_fn: Function | None = None, metric_regex: str = ".*") -> None:
        """Add a metric of every parameter's gradient; arguments as for :meth:`add_activation_metric`."""
        self._add_metric(("gradient", "gradient_before_clip"), metric_name, metric_fn, metric_regex, None)

    def _add_metric(
        self, kinds: tuple[str, ...], name: str, function: Callable[..., Any] | None, regex: str, aggregation: Function | None
    ) -> None:
        if (kinds[0], name) in self._metrics:
            raise ValueError(f"There is a metric {name!r} of kind {kinds[0]!r} already; expected another name.")
        recorded: dict[str, Any] = {"statistics": name} if function is None else {"functions": {name: function}}
        rule = Rule(kinds=list(kinds), sites=beginning_with(regex), aggregate=aggregation or "mean", **recorded)
        self.add_rules(rule, f"metric {name!r}")
        self._metrics.add((kinds[0], name))
