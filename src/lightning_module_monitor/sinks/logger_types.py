"""The classes of Lightning's loggers: which take histograms and pictures; their errors, which must not stop a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

from lightning_module_monitor.errors import Log
from lightning_module_monitor.lightning_packages import Logger, is_a


def is_tensorboard(logger: object) -> TypeGuard[Logger]:
    """Whether it is a ``TensorBoardLogger``, of either package of Lightning."""
    return is_a(logger, "TensorBoardLogger")


def is_wandb(logger: object) -> TypeGuard[Logger]:
    """Whether it is a ``WandbLogger``, of either package of Lightning."""
    return is_a(logger, "WandbLogger")


def takes_media(logger: object) -> bool:
    """Whether a logger takes histograms and pictures beside numbers."""
    return is_tensorboard(logger) or is_wandb(logger)


def key_prefix(logger: Logger) -> str:
    """The prefix that the logger adds to each key."""
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""


class LoggerFailures:
    """Keeps errors of loggers away from the training, and reports the first error of each logger."""

    def __init__(self, message: str, messages: Log) -> None:
        self._message = message  # with the names of the logger and of the error's class, and the error's text
        self._messages = messages
        self._reported: set[int] = set()

    @contextmanager
    def reported(self, logger: Logger) -> Iterator[None]:
        """Catch the errors of this logger."""
        try:
            yield
        except Exception as error:
            if id(logger) not in self._reported:
                self._reported.add(id(logger))
                self._messages.warning(self._message, type(logger).__name__, type(error).__name__, error)
