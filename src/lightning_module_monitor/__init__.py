"""See inside a model while it trains: one Lightning callback, or the same engine in any loop."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time a name's home is imported when it is asked for: see __getattr__
    from lightning_module_monitor.callback import ModuleMonitorCallback
    from lightning_module_monitor.config.gradient_options import GradientFlow, GradientNoise
    from lightning_module_monitor.config.rules import Capture, Rule
    from lightning_module_monitor.health.alert_options import Alert, Health
    from lightning_module_monitor.health.causes import Diagnosis
    from lightning_module_monitor.histogram import Histogram
    from lightning_module_monitor.monitor import ModuleMonitor
    from lightning_module_monitor.probes.rcc_layers import register_rcc_layer
    from lightning_module_monitor.record import Finding, Record
    from lightning_module_monitor.report.page import write_report
    from lightning_module_monitor.sinks.recent_records import StorageManager
    from lightning_module_monitor.sinks.store.reader import load_store
    from lightning_module_monitor.standalone.forward import MonitorMixin, monitor_scaled_dot_product_attention
    from lightning_module_monitor.standalone.gradient_gain import GradientGainMonitor
    from lightning_module_monitor.standalone.refined_coordinate_check import RefinedCoordinateCheck
    from lightning_module_monitor.standalone.tracker import Event, Stash, Tracker, track
    from lightning_module_monitor.standalone.watcher import TorchWatcher
    from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
    from lightning_module_monitor.width_check.check import coordinate_check
    from lightning_module_monitor.width_check.report import WidthCheck

    __version__: str

__all__ = [
    "STATISTICS",
    "Alert",
    "Capture",
    "Diagnosis",
    "Event",
    "Finding",
    "GradientFlow",
    "GradientGainMonitor",
    "GradientNoise",
    "Health",
    "Histogram",
    "ModuleMonitor",
    "ModuleMonitorCallback",
    "MonitorMixin",
    "Record",
    "RefinedCoordinateCheck",
    "Rule",
    "Stash",
    "Statistic",
    "StorageManager",
    "TorchWatcher",
    "Tracker",
    "WidthCheck",
    "coordinate_check",
    "load_store",
    "monitor_scaled_dot_product_attention",
    "register_rcc_layer",
    "track",
    "write_report",
]

_HOMES = {
    "callback": ("ModuleMonitorCallback",),
    "config.gradient_options": ("GradientFlow", "GradientNoise"),
    "config.rules": ("Capture", "Rule"),
    "health.causes": ("Diagnosis",),
    "health.alert_options": ("Alert", "Health"),
    "monitor": ("ModuleMonitor",),
    "probes.rcc_layers": ("register_rcc_layer",),
    "histogram": ("Histogram",),
    "record": ("Finding", "Record"),
    "report.page": ("write_report",),
    "sinks.recent_records": ("StorageManager",),
    "sinks.store.reader": ("load_store",),
    "standalone.refined_coordinate_check": ("RefinedCoordinateCheck",),
    "standalone.forward": ("MonitorMixin", "monitor_scaled_dot_product_attention"),
    "standalone.gradient_gain": ("GradientGainMonitor",),
    "standalone.tracker": ("Event", "Stash", "Tracker", "track"),
    "standalone.watcher": ("TorchWatcher",),
    "statistics.registry": ("STATISTICS", "Statistic"),
    "width_check.check": ("coordinate_check",),
    "width_check.report": ("WidthCheck",),
}
_HOME_BY_NAME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """A public name, from its home: torch and Lightning take seconds to import, and a program that reads a store needs neither."""
    if name == "__version__":
        return importlib.import_module(f"{__name__}.errors").package_version()
    if name not in _HOME_BY_NAME:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOME_BY_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_BY_NAME})
