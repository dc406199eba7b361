"""How much of the time monitoring takes, and how far monitored steps have to be apart so that it is no more than it may be."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import Any, Protocol

import torch

from lightning_module_monitor.errors import ConfigError

CLOSEST = 2
"""Steps from one monitored step to the next, at least: what a monitored step costs is known from those in between."""

NUM_PLAIN, NUM_MONITORED = 50, 5
"""How many of the latest steps of either sort count: the median of plain ones, the mean of monitored ones."""


class Clock(Protocol):
    """Tells the time of moments that may still lie ahead, on a device that works on its own."""

    def now(self) -> Any:  # noqa: ANN401  # what it likes
        """A moment."""

    def has_come(self, moment: Any) -> bool:  # noqa: ANN401
        """Whether a moment has come, so that its time is known without waiting."""

    def seconds(self, start: Any, end: Any) -> float:  # noqa: ANN401
        """The time between two moments that have come."""


class HostClock:
    """The time of this process."""

    def now(self) -> float:
        """Seconds from some moment on."""
        return time.perf_counter()

    def has_come(self, moment: float) -> bool:
        """Always."""
        return True

    def seconds(self, start: float, end: float) -> float:
        """The time between."""
        return end - start


class DeviceClock:
    """The time of a CUDA device, by events in its stream: nobody waits for it."""

    def now(self) -> torch.cuda.Event:
        """The moment at which the device has done what was launched before."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_come(self, moment: torch.cuda.Event) -> bool:
        """Whether the device is past it."""
        has_come: bool = moment.query()
        return has_come

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The time between."""
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3


class Overhead:
    """Compares the time of monitored steps with that of the others, and keeps the cost of monitoring below a limit.

    What a rank measures it tells the others, as a figure of the record: what is decided is decided by that, so that all
    ranks monitor the same steps.

    Args:
        limit: Share of the time that monitoring may take, between 0 and 1.
        clock: Tells the time.

    Raises:
        ConfigError: If the limit is none.
    """

    def __init__(self, limit: float, clock: Clock) -> None:
        check_limit(limit)
        self._limit = limit
        self._clock = clock
        self._plain: deque[float] = deque(maxlen=NUM_PLAIN)
        self._monitored: deque[float] = deque(maxlen=NUM_MONITORED)
        self._is_monitored = False
        self._batches: list[tuple[Any, Any]] = []
        """Begin and end of each batch of the step."""
        self._start: Any = None
        self._waiting: deque[tuple[bool, list[tuple[Any, Any]]]] = deque()
        """Steps that are over, of which the device may still have to do a part."""
        self._has_warmed_up = False
        self._last: int | None = None
        self._gap: int | None = None
        """Steps between the last monitored step and the one before."""
        self.closest = CLOSEST
        """Steps from one monitored step to the next, at least."""

    def allows(self, step: int) -> bool:
        """Whether a step is far enough from the monitored step before it. One that comes again, after a resume, is."""
        return self._last is None or step < self._last or step - self._last >= self.closest

    def begin_batch(self) -> None:
        """A batch begins: before anything of ours is done."""
        self._start = self._clock.now()

    def begin_step(self, step: int, *, is_monitored: bool) -> None:
        """With this batch a step begins."""
        self._batches = []
        self._is_monitored = is_monitored
        if is_monitored:
            self._gap = None if self._last is None or step <= self._last else step - self._last
            self._last = step

    def end_batch(self) -> None:
        """The batch is over: after everything of ours was done."""
        if self._start is not None:
            self._batches.append((self._start, self._clock.now()))
        self._start = None

    def end_step(self) -> None:
        """With this batch the step is over."""
        if self._is_monitored and not self._has_warmed_up:
            # The first compiles, allocates and opens files.
            self._has_warmed_up = True
        elif self._batches:
            self._waiting.append((self._is_monitored, self._batches))
        self._batches = []

    def fraction(self) -> float | None:
        """The share of the time that monitoring takes: of a monitored step and those since the one before.

        Returns:
            0 to 1; ``None`` while it is not known.
        """
        while self._waiting and all(self._clock.has_come(end) for _start, end in self._waiting[0][1]):
            is_monitored, batches = self._waiting.popleft()
            duration = sum(self._clock.seconds(start, end) for start, end in batches)
            (self._monitored if is_monitored else self._plain).append(duration)
        if not self._plain or not self._monitored or self._gap is None:
            return None
        plain = statistics.median(self._plain)
        # The mean: where rules are due in different steps, a few monitored steps may be what costs.
        cost = max(0.0, statistics.fmean(self._monitored) - plain)
        total = cost + self._gap * plain
        return cost / total if total else 0.0  # steps that take no time that the clock could tell

    def decide(self, fraction: float) -> None:
        """Set how far apart monitored steps have to be.

        Args:
            fraction: That of the last monitored step, the largest of any rank.
        """
        if self._gap is None or not 0 <= fraction < 1:
            return
        in_plain_steps = self._gap * fraction / (1 - fraction)
        needed = in_plain_steps * (1 - self._limit) / self._limit
        self.closest = max(CLOSEST, math.ceil(round(needed, 6)))  # what only rounding has put above a number is that number


def check_limit(limit: object) -> None:
    """Check an option.

    Raises:
        ConfigError: If it is no share.
    """
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < 1:
        raise ConfigError(f"max_overhead is {limit!r}; expected a share of the time, more than 0 and less than 1, e.g. 0.02.")


def clock_of(device: torch.device) -> Clock:
    """The clock of the device that a model is on."""
    return DeviceClock() if device.type == "cuda" else HostClock()
