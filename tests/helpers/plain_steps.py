"""Steps of a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_module_monitor import ModuleMonitor, Record


@contextmanager
def in_step(
    module: nn.Module, /, *args: Any, reference: nn.Module | None = None, follows: bool = False, **options: Any
) -> Iterator[ModuleMonitor]:
    """A monitor with these arguments, in the first step of a module, which it compares with a reference if there is one."""
    with ModuleMonitor(*args, **options) as monitor:
        monitor.set_module(module)
        if reference is not None:
            monitor.set_reference_module(reference, follows=follows)
        monitor.begin_step(0)
        yield monitor


def run_both(monitor: ModuleMonitor, reference: nn.Module, model: nn.Module, *inputs: Tensor) -> None:
    """Run the reference, which is not observed, and then the model on the same input."""
    with monitor.no_monitor():
        reference(*inputs)
    model(*inputs)


def record_of(monitor: ModuleMonitor) -> Record:
    """End a monitored step, and return its record."""
    record = monitor.end_step()
    assert record is not None
    return record
