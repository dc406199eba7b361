"""What processes that train together import, for the server that they are forked from."""

from __future__ import annotations

import importlib

for name in (
    "distributed.compiled_runs",
    "distributed.scenarios",
    "lightning_module_monitor.kernels.numba_loops",
    "lightning_module_monitor.report.stored_run",
    "lightning_module_monitor.sinks.store.writer",
    "lightning_module_monitor.trainer.controller",
):
    importlib.import_module(name)
