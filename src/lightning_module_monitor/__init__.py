"""See inside a model while it trains: one Lightning callback, or the same engine in any loop.

The names in ``__all__``, and those in ``__all__`` of :mod:`.standalone`, are public and follow semantic versioning. All other modules are
internal, and change in any version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time a name's home is imported when it is asked for: see __getattr__
    from lightning_module_monitor.callback import ModuleMonitorCallback as ModuleMonitorCallback
    from lightning_module_monitor.config.gradient_options import GradientFlow as GradientFlow
    from lightning_module_monitor.config.gradient_options import GradientNoise as GradientNoise
    from lightning_module_monitor.config.health_options import Alert as Alert
    from lightning_module_monitor.config.health_options import Health as Health
    from lightning_module_monitor.config.rules import Capture as Capture
    from lightning_module_monitor.config.rules import Rule as Rule
    from lightning_module_monitor.errors import ConfigError as ConfigError
    from lightning_module_monitor.errors import MonitorError as MonitorError
    from lightning_module_monitor.errors import NonfiniteError as NonfiniteError
    from lightning_module_monitor.errors import RanksLostError as RanksLostError
    from lightning_module_monitor.health.diagnoses import Diagnosis as Diagnosis
    from lightning_module_monitor.histogram import Histogram as Histogram
    from lightning_module_monitor.kernels.moments import Moments as Moments
    from lightning_module_monitor.kernels.moments import Need as Need
    from lightning_module_monitor.keys import Key as Key
    from lightning_module_monitor.monitor import ModuleMonitor as ModuleMonitor
    from lightning_module_monitor.probes.rcc_layers import register_rcc_layer as register_rcc_layer
    from lightning_module_monitor.record import Finding as Finding
    from lightning_module_monitor.record import Record as Record
    from lightning_module_monitor.report.page import write_report as write_report
    from lightning_module_monitor.sinks.recent_records import StorageManager as StorageManager
    from lightning_module_monitor.sinks.store.plot import StorePlots as StorePlots
    from lightning_module_monitor.sinks.store.reader import StoreReader as StoreReader
    from lightning_module_monitor.sinks.store.reader import load_store as load_store
    from lightning_module_monitor.standalone.forward import MonitorMixin as MonitorMixin
    from lightning_module_monitor.standalone.forward import monitor_scaled_dot_product_attention as monitor_scaled_dot_product_attention
    from lightning_module_monitor.standalone.gradient_gain import GradientGainMonitor as GradientGainMonitor
    from lightning_module_monitor.standalone.refined_coordinate_check import RefinedCoordinateCheck as RefinedCoordinateCheck
    from lightning_module_monitor.standalone.tracker import Event as Event
    from lightning_module_monitor.standalone.tracker import Stash as Stash
    from lightning_module_monitor.standalone.tracker import Tracker as Tracker
    from lightning_module_monitor.standalone.tracker import track as track
    from lightning_module_monitor.standalone.watcher import TorchWatcher as TorchWatcher
    from lightning_module_monitor.statistics.registry import STATISTICS as STATISTICS
    from lightning_module_monitor.statistics.registry import Statistic as Statistic
    from lightning_module_monitor.width_check.check import coordinate_check as coordinate_check
    from lightning_module_monitor.width_check.report import WidthCheck as WidthCheck

    __version__: str

_HOMES = {
    "callback": ("ModuleMonitorCallback",),
    "config.gradient_options": ("GradientFlow", "GradientNoise"),
    "config.health_options": ("Alert", "Health"),
    "config.rules": ("Capture", "Rule"),
    "errors": ("ConfigError", "MonitorError", "NonfiniteError", "RanksLostError"),
    "health.diagnoses": ("Diagnosis",),
    "histogram": ("Histogram",),
    "kernels.moments": ("Moments", "Need"),
    "keys": ("Key",),
    "monitor": ("ModuleMonitor",),
    "probes.rcc_layers": ("register_rcc_layer",),
    "record": ("Finding", "Record"),
    "report.page": ("write_report",),
    "sinks.recent_records": ("StorageManager",),
    "sinks.store.plot": ("StorePlots",),
    "sinks.store.reader": ("StoreReader", "load_store"),
    "standalone.forward": ("MonitorMixin", "monitor_scaled_dot_product_attention"),
    "standalone.gradient_gain": ("GradientGainMonitor",),
    "standalone.refined_coordinate_check": ("RefinedCoordinateCheck",),
    "standalone.tracker": ("Event", "Stash", "Tracker", "track"),
    "standalone.watcher": ("TorchWatcher",),
    "statistics.registry": ("STATISTICS", "Statistic"),
    "width_check.check": ("coordinate_check",),
    "width_check.report": ("WidthCheck",),
}
_HOME_BY_NAME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_HOME_BY_NAME)


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
