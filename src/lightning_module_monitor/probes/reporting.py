"""Errors of the monitor, reported once and counted; and what else is logged."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_module_monitor.errors import Log, MonitorError
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.stream import Stream


def unchanged_grad_mode() -> AbstractContextManager[None]:
    """After the block the grad mode is as before. Around guards: Ctrl-C may come when one is about to restore it."""
    return torch.set_grad_enabled(torch.is_grad_enabled())


@contextmanager
def failing_alone(report: Callable[[Exception], None]) -> Iterator[None]:
    """Give an error of the block to ``report`` and go on behind it. A ``MonitorError`` is raised: errors are to be raised then."""
    try:
        yield
    except MonitorError:
        raise
    except Exception as error:
        report(error)


class ErrorReporter:
    """Reports everything once for each model, in all its runs. An error of the monitor never ends a run.

    Args:
        logger: Receives the messages.
        on_error: ``warn``: an error is logged and counted. ``raise``: it is raised as a ``MonitorError``.
        is_first: Whether this is the process, of several with the same message, that logs it.
    """

    def __init__(self, logger: Log, on_error: str, is_first: Callable[[], bool]) -> None:
        self._logger = logger
        self._raises = on_error == "raise"
        self.is_first = is_first
        self._reported: set[str] = set()
        self._model: weakref.ref[nn.Module] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_model": None}

    def begin(self, model: nn.Module) -> None:
        """A model is about to be observed. If it is not the same as before, everything may be reported again."""
        if self._model is None or self._model() is not model:
            self._reported.clear()
            self._model = weakref.ref(model)

    @contextmanager
    def guard(self, what: str, accumulator: StepAccumulator) -> Iterator[None]:
        """Within the block an error is reported and counted; tensors made there have no graph.

        Raises:
            MonitorError: If errors are to be raised.
        """
        with failing_alone(lambda error: self.not_taken(what, error, accumulator)), torch.no_grad():
            yield

    def not_taken(self, what: str, error: Exception, accumulator: StepAccumulator) -> None:
        """Report and count an error that costs one sort of values of a step."""
        sentence = f"The {what} of this step could not be taken"
        self.count(sentence, sentence, error, accumulator)

    def of_stream(self, stream: Stream, name: str, tensor: str, error: Exception) -> None:
        """Report a statistic or function that failed; ``tensor`` describes what it was computed from."""
        message = f"{stream.kind} {stream.site!r}, {tensor}: {name} failed with {type(error).__name__}: {error}"
        self.report(f"{message}. It is recorded as NaN.", error, f"{stream.kind} {name} {type(error).__name__}")

    def report(self, message: str, error: Exception, once: str = "") -> None:
        """Report an error that is counted elsewhere; ``once`` is what is reported once, by default the message itself.

        Raises:
            MonitorError: If errors are to be raised.
        """
        if self._raises:
            raise MonitorError(message) from error
        if (once or message) not in self._reported:
            self._reported.add(once or message)
            self._logger.warning("%s Logged once; monitor/errors counts them.", message)

    def count(self, what: str, once: str, error: Exception, accumulator: StepAccumulator) -> None:
        """Report and count an error that costs some values of a step.

        Args:
            what: Begin of a sentence, e.g. "The reference could not run".
            once: Of what, together with the type of the error, one is reported.
            error: The error.
            accumulator: Of the step.

        Raises:
            MonitorError: If errors are to be raised.
        """
        accumulator.num_errors += 1
        name, cause = type(error).__name__, str(error).strip().partition("\n")[0]
        self.report(f"{what} ({name}: {cause}).", error, f"{once} {name}")

    def log_once(self, message: str, level: int = logging.INFO, once: str = "", error: Exception | None = None) -> None:
        """Log a message once, with the traceback of an error; one that is no problem is logged by one of several ranks."""
        if (level >= logging.WARNING or self.is_first()) and (once or message) not in self._reported:
            self._reported.add(once or message)
            self._logger.log(level, message, exc_info=error)

    def settle(self, once: str) -> None:
        """Log no message of this name any more, in all runs of the model: its cause is known not to exist."""
        self._reported.add(once)
