"""The two packages of Lightning, ``lightning.pytorch`` and ``pytorch_lightning``: the same classes, each package with its own.

Internal: it may change in any version.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import lightning.pytorch
    import pytorch_lightning

LightningModule: TypeAlias = "lightning.pytorch.LightningModule | pytorch_lightning.LightningModule"
LightningDataModule: TypeAlias = "lightning.pytorch.LightningDataModule | pytorch_lightning.LightningDataModule"
Logger: TypeAlias = Any
"""A logger of either package; each class has further methods."""
Trainer: TypeAlias = "lightning.pytorch.Trainer | pytorch_lightning.Trainer"

NAMES = ("lightning.pytorch", "pytorch_lightning")
_ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")
"""Names of the top-level packages with Lightning's classes."""


def packages() -> list[ModuleType]:
    """The packages that the program has imported, at least one; if it has imported none, the first that can be imported.

    Importing the other one takes 0.1 s, and changes the logger, the class of deprecation warnings and the filters of the one in use.
    """
    imported = [sys.modules[name] for name in NAMES if name in sys.modules]
    return imported or [importlib.import_module(_INSTALLED[0])]


def _is_installed(name: str) -> bool:
    with suppress(ImportError, ValueError):  # a finder forbids it, or a program has put a module of its own in its place
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    return False


_INSTALLED = [name for name in NAMES if _is_installed(name)]
if not _INSTALLED:
    raise ImportError(f"Neither package of Lightning can be imported ({', '.join(NAMES)}). Install one with: pip install lightning")

if TYPE_CHECKING:

    class Callback(lightning.pytorch.Callback, pytorch_lightning.Callback):  # type: ignore[misc]  # each has a Trainer of its own
        """A callback of both packages."""
else:

    class _NoPackage:
        """The base until a package is imported: Python gives no other bases to a class that extends ``object`` itself."""

    class Callback(_NoPackage):
        """A callback of every package that the program has imported, or imports later: their classes are its bases."""


class _ImportsOfPackages(importlib.abc.MetaPathFinder):
    """Makes ``Callback`` a callback of each package that the program imports after this module.

    Python asks its finders before each import. A package imports further modules after its callbacks, so none is complete without this.
    """

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> None:
        """Find nothing, but look at what is imported by now."""
        _extend_imported()


def _extend_imported() -> bool:
    """Give ``Callback`` the bases that there are by now; returns whether these are those of all installed packages."""
    imported = [getattr(sys.modules.get(f"{name}.callbacks"), "Callback", None) for name in _INSTALLED]
    bases = tuple(base for base in imported if base is not None)
    if bases and bases != Callback.__bases__:
        with suppress(TypeError):  # a user's class extends Lightning's and ours in an order that excludes it; an import never fails here
            Callback.__bases__ = bases
    return None not in imported


if not _extend_imported():
    sys.meta_path.insert(0, _ImportsOfPackages())


def is_a(value: object, *names: str) -> bool:
    """Whether an object is an instance of a class of Lightning with one of these names, in either package."""
    return any(base.__name__ in names and base.__module__.partition(".")[0] in _ROOTS for base in type(value).__mro__)


def is_overridden(value: object, name: str) -> bool:
    """Whether a method of an object is defined outside of Lightning."""
    return getattr(getattr(value, name), "__module__", "").partition(".")[0] not in _ROOTS


def runs_hook(module: LightningModule, name: str) -> Callable[[], bool]:
    """A function that tells whether a hook of a module, or one of its steps, runs now, and no other one that Lightning calls.

    Lightning keeps the name for ``self.log``; it is not public anywhere.
    """
    return lambda: module._current_fx_name == name


def package_of(value: object) -> ModuleType:
    """The package of Lightning whose class an object is an instance of; without such a class the first of them."""
    known = packages()
    roots = [base.__module__.partition(".")[0] for base in type(value).__mro__]
    return next((package for root in roots for package in known if package.__name__.partition(".")[0] == root), known[0])


class _Messages(logging.LoggerAdapter):  # type: ignore[type-arg]  # Python 3.10 takes no argument here
    """Logs below the logger of the package whose Trainer runs, so that Lightning's settings apply."""

    def follow(self, trainer: Trainer) -> None:
        """Log below the logger of the package of a Trainer, whose run begins; a process has one run at a time."""
        self.logger = _logger_of(package_of(trainer).__name__)

    def __reduce__(self) -> tuple[Callable[[], _Messages], tuple[()]]:
        """Copies log here as well. YAML, in which some libraries write their callbacks, knows no object by its name."""
        return _the_messages, ()


def _logger_of(package: str) -> logging.Logger:
    return logging.getLogger(f"{package}.module_monitor")


def _the_messages() -> _Messages:
    return messages


messages = _Messages(_logger_of(_INSTALLED[0]))
"""Receives all messages of a run."""
