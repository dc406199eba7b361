"""The refined coordinate check in a plain loop."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_module_monitor.config.rules import coordinate_check_rules
from lightning_module_monitor.monitor import ModuleMonitor


class RefinedCoordinateCheck:
    """Splits each change of an activation into the effect of the weight's change and the effect of the input's change.

    For a module with weights ``W`` and input ``x``, and the reference's ``W0`` and ``x0``::

        W x - W0 x0  =  (W - W0) x  +  W0 (x - x0)

    In every monitored step run the reference, then the model::

        monitor.set_module(model)
        monitor.set_reference_module(copy.deepcopy(model))
        check = RefinedCoordinateCheck(monitor)
        for step, (x, y) in enumerate(batches):
            if monitor.begin_step(step):
                with monitor.no_monitor():
                    reference(x)
            loss_fn(model(x), y).backward()
            check.refined_coordinate_check()
            optimizer.step()
            optimizer.zero_grad()
            monitor.end_step()

    Keys are ``rcc_effective_update/fc/rms``, ``rcc_propagating_update/fc/rms``, ``rcc_output``, ``rcc_reference_output``,
    ``rcc_input`` and ``rcc_input_change``, the same for the weight without its bias (``fc.weight``),
    ``rcc_operator_norm/fc/update`` and ``/reference``, and ``rcc_alignment/fc/effective`` and ``/propagating``.

    Args:
        monitor: A monitor with a module and a reference.
        statistics: Names in ``STATISTICS``, for the terms.

    Raises:
        ValueError: If the monitor has no module or no reference.
        ConfigError: If a statistic is unknown.
    """

    def __init__(self, monitor: ModuleMonitor, statistics: Sequence[str] = ("rms",)) -> None:
        if monitor.module is None:
            raise ValueError("The monitor has no module; call monitor.set_module(module) first.")
        if not monitor.has_reference_module():
            raise ValueError("The monitor has no reference; call monitor.set_reference_module(module) first.")
        self._monitor = monitor
        terms, *optional_rules = coordinate_check_rules(statistics)
        monitor.add_rules(terms)
        monitor.add_rules(optional_rules, are_optional=True)

    @property
    def module(self) -> nn.Module | None:
        """The monitor's module."""
        return self._monitor.module

    @property
    def reference_module(self) -> nn.Module | None:
        """The monitor's reference."""
        return self._monitor.reference_module

    def refined_coordinate_check(self) -> None:
        """End the check of a micro-batch, after its forward passes, which computed the terms."""
        if self._monitor.is_monitoring():
            self._monitor.engine.end_comparison()
