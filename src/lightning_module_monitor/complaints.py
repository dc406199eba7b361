"""What goes wrong in the monitor, said once and counted; and what else the user is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.spec import MetricSpec


@contextmanager
def unchanged_grad_mode() -> Iterator[None]:
    """After the block the grad mode is as before. Around guards: Ctrl-C may come when one is about to restore it."""
    before = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(before)


class Guard:
    """A block as :meth:`Complaints.guard` has it. No generator: a monitored step has ten of them, each cold."""

    def __init__(self, complaints: Complaints, what: str, observation: StepAccumulator) -> None:
        self._complaints = complaints
        self._what = what
        self._observation = observation

    def __enter__(self) -> None:
        self._grad_mode = torch.set_grad_enabled(False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        self._grad_mode.__exit__(kind, error, traceback)
        if not isinstance(error, Exception) or isinstance(error, MonitorError):
            return False
        self._observation.num_errors += 1
        self._complaints.report(f"The {self._what} of this step could not be taken ({type(error).__name__}: {error}).", error)
        return True


class Complaints:
    """Says everything once, and sees to it that an error of ours is never the reason that a run dies.

    Args:
        logger: Where it is said.
        on_error: ``warn``: an error is said and counted. ``raise``: it is a ``MonitorError``.
        speaks_for_all: Whether this process, of several that have the same to say, is the one to say it.
    """

    def __init__(self, logger: logging.Logger, on_error: str, speaks_for_all: Callable[[], bool]) -> None:
        self._logger = logger
        self._raises = on_error == "raise"
        self._speaks_for_all = speaks_for_all
        self._said: set[str] = set()

    def guard(self, what: str, observation: StepAccumulator) -> Guard:
        """Within the block an error is said and counted; tensors made there have no graph.

        Raises:
            MonitorError: If errors are to be raised.
        """
        return Guard(self, what, observation)

    def of_watch(self, watch: MetricSpec, name: str, seen: str, error: Exception) -> None:
        """A statistic or function of a watch failed; ``seen`` says of what tensor."""
        message = f"{watch.kind} {watch.site!r}, {seen}: {name} failed with {type(error).__name__}: {error}"
        self.report(f"{message}. It is recorded as NaN.", error, f"{watch.kind} {name} {type(error).__name__}")

    def report(self, message: str, error: Exception, once: str = "") -> None:
        """Say an error that somebody counts.

        Args:
            message: A sentence.
            error: Its cause.
            once: What of it is said once; without it the sentence itself.

        Raises:
            MonitorError: If errors are to be raised.
        """
        if self._raises:
            raise MonitorError(message) from error
        if (once or message) not in self._said:
            self._said.add(once or message)
            self._logger.warning("%s Said once; monitor/errors counts them.", message)

    def say_once(self, message: str, level: int = logging.INFO, once: str = "") -> None:
        """Say what is good to know; what is no problem one of several ranks says.

        Args:
            message: A sentence.
            level: Of the logger.
            once: What of it is said once; without it the sentence itself.
        """
        if (level >= logging.WARNING or self._speaks_for_all()) and (once or message) not in self._said:
            self._said.add(once or message)
            self._logger.log(level, message)

    def forget(self) -> None:
        """What was said may be said again."""
        self._said.clear()
