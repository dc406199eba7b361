"""See inside a model while it trains: one Lightning callback, or the same engine in any loop."""

from lightning_module_monitor.callback import ModuleMonitorCallback
from lightning_module_monitor.config import Rule
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.history import StorageManager
from lightning_module_monitor.sinks.reader import load_store
from lightning_module_monitor.standalone.coordinate_check import RefinedCoordinateCheck
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from lightning_module_monitor.width_check.check import coordinate_check
from lightning_module_monitor.width_check.report import WidthCheck

__all__ = [
    "STATISTICS",
    "ModuleMonitor",
    "ModuleMonitorCallback",
    "Record",
    "RefinedCoordinateCheck",
    "Rule",
    "Statistic",
    "StorageManager",
    "WidthCheck",
    "coordinate_check",
    "load_store",
]
