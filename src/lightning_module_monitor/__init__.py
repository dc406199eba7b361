"""See inside a model while it trains: one Lightning callback, or the same engine in any loop."""

from lightning_module_monitor.bins import Histogram
from lightning_module_monitor.callback import ModuleMonitorCallback
from lightning_module_monitor.config import Capture, GradientFlow, Rule
from lightning_module_monitor.mixin import MonitorMixin
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.history import StorageManager
from lightning_module_monitor.sinks.reader import load_store
from lightning_module_monitor.standalone.attention import monitor_scaled_dot_product_attention
from lightning_module_monitor.standalone.coordinate_check import RefinedCoordinateCheck
from lightning_module_monitor.standalone.gradient_gain import GradientGainMonitor
from lightning_module_monitor.standalone.tracker import Event, Stash, Tracker, track
from lightning_module_monitor.standalone.watcher import TorchWatcher
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from lightning_module_monitor.width_check.check import coordinate_check
from lightning_module_monitor.width_check.report import WidthCheck

__all__ = [
    "STATISTICS",
    "Capture",
    "Event",
    "GradientFlow",
    "GradientGainMonitor",
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
    "track",
]
