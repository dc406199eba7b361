"""Steps of a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_module_monitor import ModuleMonitor, Record


@contextmanager
def in_step(module: nn.Module, *args: Any, **options: Any) -> Iterator[ModuleMonitor]:
    """A monitor with these arguments, in the first step of a module."""
    with ModuleMonitor(*args, **options) as monitor:
        monitor.set_module(module)
        monitor.begin_step(0)
        yield monitor


def record_of(monitor: ModuleMonitor) -> Record:
    """End a monitored step, and return its record."""
    record = monitor.end_step()
    assert record is not None
    return record
