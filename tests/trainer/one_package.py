"""A program in which one package of Lightning is not installed, as far as it can tell: ``one_package.py WHAT PACKAGE FOLDER``."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ROOTS = {"lightning.pytorch": ("lightning",), "pytorch_lightning": ("pytorch_lightning", "lightning_fabric")}


class NotInstalled(importlib.abc.MetaPathFinder):
    """Some top packages cannot be found."""

    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = roots

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in self.roots:
            message = f"No module named {fullname!r}"
            raise ModuleNotFoundError(message, name=fullname)
        return None


def main(what: str, name: str, folder: str) -> None:
    """Print the keys of a run (``alone``) or the error (``none``)."""
    missing = [root for package, roots in ROOTS.items() if package != name for root in roots]
    sys.meta_path.insert(0, NotInstalled(missing))
    if what == "none":
        try:
            importlib.import_module("lightning_module_monitor.callback")
        except ImportError as error:
            print(error)
        return
    from helpers.either_package import QUIET, batches, model_of

    monitor = importlib.import_module("lightning_module_monitor")
    package = importlib.import_module(name)
    callback = monitor.ModuleMonitorCallback(1, rcc=True)
    package.Trainer(**QUIET, default_root_dir=folder, callbacks=callback).fit(model_of(package), batches())
    print(*monitor.load_store(callback.store_path).keys(), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
