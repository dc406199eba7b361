"""Lightning as the tests use it: ``lightning.pytorch``, or with ``LIGHTNING_PACKAGE=pytorch_lightning`` the other package of it.

``from helpers.lightning_package import Trainer, ModelCheckpoint`` gives the classes of the package that this run of the tests is about.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

NAME = os.environ.get("LIGHTNING_PACKAGE", "lightning.pytorch")
LOGGER = f"{NAME}.module_monitor"
"""The logger of our messages."""
_PACKAGE = importlib.import_module(NAME)
_PARTS = (
    "",
    ".accelerators",
    ".callbacks",
    ".loggers",
    ".loggers.logger",
    ".plugins",
    ".plugins.io",
    ".strategies",
    ".tuner",
    ".utilities",
    ".utilities.model_helpers",
)


def __getattr__(name: str) -> Any:
    """A class of the package, or of one of its parts."""
    if not name.startswith("_"):
        for part in _PARTS:
            module = importlib.import_module(NAME + part)
            if hasattr(module, name):
                return getattr(module, name)
        if name.startswith("LightningC") or name == "LightningArgumentParser":
            return getattr(importlib.import_module(f"{NAME}.cli"), name)
    message = f"{NAME} has no {name!r}"
    raise AttributeError(message)
