"""Prints the global state of a process after imports, and after a run: ``process_state.py IMPORTS FOLDER``.

``IMPORTS`` are a package of Lightning, whose Trainer trains, and perhaps the callback, in this order, joined by a comma.
``process_state.py later PACKAGE`` imports the package after the callback.
"""

from __future__ import annotations

import gc
import importlib
import json
import locale
import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

CALLBACK = "lightning_module_monitor.callback"


def state() -> dict[str, Any]:
    """Global settings by name, as text."""
    rank_zero = sys.modules["lightning_utilities.core.rank_zero"]
    backends = torch.backends
    values = {
        "rank_zero": [*vars(rank_zero).items(), rank_zero.rank_zero_only.rank],
        "warnings": [*sorted(map(str, warnings.filters)), warnings.formatwarning.__module__, warnings.showwarning.__module__],
        "loggers": sorted(filter(None, map(_settings, (logging.root, *logging.root.manager.loggerDict.values())))),
        "logging": logging.root.manager.disable,
        "environment": sorted(os.environ.items()),
        "dtype": [torch.get_default_dtype(), torch.get_default_device()],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()],
        "autograd": [
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
            torch.is_autocast_enabled("cpu"),
        ],
        "precision": [torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32],
        "backends": [backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.enabled, backends.mkldnn.enabled],
        "attention": [backends.cuda.flash_sdp_enabled(), backends.cuda.math_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled()],
        "random": [zlib.crc32(str(state).encode()) for state in (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state())],
        "numpy": [np.geterr(), np.get_printoptions()],
        "hooks": [sys.excepthook, sys.displayhook, sys.gettrace(), sys.getprofile(), threading.excepthook.__module__],
        # Importing torch.distributed.nn adds a temporary folder, in old versions of torch.
        "path": [entry for entry in sys.path if Path(entry).parent != Path(tempfile.gettempdir())],
        "folder": os.getcwd(),  # noqa: PTH109  # as any program reads it
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "processes": [multiprocessing.get_start_method(allow_none=True), torch.multiprocessing.get_sharing_strategy()],
        "interpreter": [sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(), gc.get_threshold(), locale.getlocale()],
        "packages": [name for name in ("lightning", "lightning_fabric", "pytorch_lightning") if name in sys.modules],
    }
    return {name: re.sub(r" at 0x\w+", "", str(value)) for name, value in values.items()}


def _settings(logger: Any) -> str:
    """A logger's settings, empty if it has none of its own: who imports a library makes such loggers."""
    if not isinstance(logger, logging.Logger) or not (logger.level or logger.handlers or logger.filters or logger.disabled):
        return ""
    handlers = [f"{type(handler).__name__}({handler.level})" for handler in logger.handlers]
    return f"{logger.name}: {logger.level}, {handlers}, {logger.filters}, {logger.disabled}, {logger.propagate}"


def later(name: str) -> list[bool]:
    """Whether the callback's class, and an object that exists already, are callbacks of a package that is imported now."""
    monitor_class = importlib.import_module(CALLBACK).ModuleMonitorCallback
    callback = monitor_class()
    package = importlib.import_module(name)
    return [issubclass(monitor_class, package.Callback), callback in package.Trainer(logger=False, callbacks=callback).callbacks]


def fit(name: str, folder: str, *, is_monitored: bool) -> None:
    """Train with the Trainer of a package."""
    from helpers.either_package import QUIET, batches, model_of

    package = importlib.import_module(name)
    callbacks = [importlib.import_module(CALLBACK).ModuleMonitorCallback(1, reference="init")] if is_monitored else []
    logger = package.loggers.TensorBoardLogger(folder)
    package.Trainer(**QUIET, callbacks=callbacks, logger=logger, log_every_n_steps=1).fit(model_of(package), batches())


def main(imports: str, folder: str) -> None:
    """Import, train, and print the states after either."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    names = imports.split(",")
    for name in names:
        importlib.import_module(name)
    before = state()
    fit(*(name for name in names if name != CALLBACK), folder, is_monitored=CALLBACK in names)
    print(json.dumps([before, state()]))


if __name__ == "__main__":
    if sys.argv[1] == "later":
        print(*later(sys.argv[2]))
    else:
        main(*sys.argv[1:])
