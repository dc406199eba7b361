"""The two packages of Lightning, ``lightning.pytorch`` and ``pytorch_lightning``: the same classes, each package with its own."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_utilities.core import rank_zero

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


def _installed() -> list[ModuleType]:
    """The packages that can be imported, at least one; after the first package, the second takes 0.1 s."""
    packages, errors = [], []
    # The last imported package replaces the logger of both; the package that the program has imported keeps its logger.
    log = rank_zero.log if any(name in sys.modules for name in NAMES) else None
    for name in NAMES:
        try:
            packages.append(importlib.import_module(name))
        except Exception as error:  # a package that cannot be imported, e.g. too old for this torch, runs no Trainer
            errors.append(f"{name}: {type(error).__name__}: {error}")
    if log is not None:
        rank_zero.log = log
    if not packages:
        message = f"Neither package of Lightning can be imported ({'; '.join(errors)}). Install one with: pip install lightning"
        raise ImportError(message)
    return packages


PACKAGES = _installed()

if TYPE_CHECKING:

    class Callback(lightning.pytorch.Callback, pytorch_lightning.Callback):  # type: ignore[misc]  # each has a Trainer of its own
        """A callback of both packages."""
else:
    Callback = type("Callback", tuple(package.Callback for package in PACKAGES), {"__doc__": "A callback of every installed package."})


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
    """The package of Lightning whose class an object is an instance of; without such a class the first installed package."""
    roots = [base.__module__.partition(".")[0] for base in type(value).__mro__]
    return next((package for root in roots for package in PACKAGES if package.__name__.partition(".")[0] == root), PACKAGES[0])


class _Messages(logging.LoggerAdapter):  # type: ignore[type-arg]  # Python 3.10 takes no argument here
    """Logs below the logger of the package whose Trainer runs, so that Lightning's settings apply."""

    def follow(self, trainer: Trainer) -> None:
        """Log below the logger of the package of a Trainer, whose run begins; a process has one run at a time."""
        self.logger = _logger_of(package_of(trainer))

    def __reduce__(self) -> tuple[Callable[[], _Messages], tuple[()]]:
        """Copies log here, too. YAML, in which some libraries write their callbacks, knows no object by its name."""
        return _the_messages, ()


def _logger_of(package: ModuleType) -> logging.Logger:
    return logging.getLogger(f"{package.__name__}.module_monitor")


def _the_messages() -> _Messages:
    return messages


messages = _Messages(_logger_of(PACKAGES[0]))
"""Receives all messages of a run."""
