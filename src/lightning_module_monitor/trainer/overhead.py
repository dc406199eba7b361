"""The share of the time that monitoring takes, and how far apart monitored steps have to be to keep it below a limit."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import Any

import torch

CLOSEST = 2
"""Steps from one monitored step to the next, at least: those in between are the baseline for the cost."""

NUM_PLAIN, NUM_MONITORED = 50, 5
"""How many of the latest steps count: the median of unmonitored ones, the mean of monitored ones."""


class HostClock:
    """The clock of this process. A moment has a type of the clock's own."""

    def now(self) -> Any:  # noqa: ANN401
        """Return a moment, which a device may not have reached yet."""
        return time.perf_counter()

    def has_come(self, moment: Any) -> bool:  # noqa: ANN401
        """Whether a moment was reached, so that no call waits for it."""
        return True

    def seconds(self, start: Any, end: Any) -> float:  # noqa: ANN401
        """The time between two moments that were reached."""
        return float(end - start)


class _DeviceClock(HostClock):
    """The clock of a CUDA device, by events in its stream."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_come(self, moment: torch.cuda.Event) -> bool:
        return bool(moment.query())

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3


class Overhead:
    """Compares the time of monitored steps with that of the others, and keeps the share of monitoring below a limit, from 0 to 1.

    The record has the largest figure of all ranks, and the decision uses that one, so that all ranks monitor the same steps.
    """

    def __init__(self, limit: float, clock: HostClock) -> None:
        self._limit = limit
        self._clock = clock
        self._plain: deque[float] = deque(maxlen=NUM_PLAIN)
        self._monitored: deque[float] = deque(maxlen=NUM_MONITORED)
        self._is_monitored = False
        self._batches: list[tuple[Any, Any]] = []
        """Begin and end of each batch of the step."""
        self._start: Any = None
        self._waiting: deque[tuple[bool, list[tuple[Any, Any]]]] = deque()
        """Steps that are over for the host, and may not be for the device."""
        self._has_warmed_up = False
        self._last: int | None = None
        self._gap: int | None = None
        """Steps between the last monitored step and the one before."""
        self.closest = CLOSEST
        """Least number of steps from one monitored step to the next."""

    def allows(self, step: int) -> bool:
        """Whether a step is far enough from the monitored step before it; also if it is run again after a resume."""
        return self._last is None or step < self._last or step - self._last >= self.closest

    def begin_batch(self) -> None:
        """A batch begins; called before all other work of the monitor."""
        self._start = self._clock.now()

    def begin_step(self, step: int, *, is_monitored: bool) -> None:
        """A step begins with this batch."""
        self._batches = []
        self._is_monitored = is_monitored
        if is_monitored:
            self._gap = None if self._last is None or step <= self._last else step - self._last
            self._last = step

    def end_batch(self) -> None:
        """The batch is over; called after all other work of the monitor."""
        if self._start is not None:
            self._batches.append((self._start, self._clock.now()))
        self._start = None

    def end_step(self) -> None:
        """The step is over with this batch."""
        if self._is_monitored and not self._has_warmed_up:
            # The first compiles, allocates and opens files.
            self._has_warmed_up = True
        elif self._batches:
            self._waiting.append((self._is_monitored, self._batches))
        self._batches = []

    def fraction(self) -> float | None:
        """The share of the time that monitoring takes in a monitored step and the steps since the one before; ``None``: too few steps."""
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
        return cost / total if total else 0.0  # steps shorter than the clock can measure

    def decide(self, fraction: float) -> None:
        """Set how far apart monitored steps have to be, from the largest :meth:`fraction` of all ranks in the last monitored step."""
        if self._gap is None or not 0 <= fraction < 1:
            return
        in_plain_steps = self._gap * fraction / (1 - fraction)
        needed = in_plain_steps * (1 - self._limit) / self._limit
        self.closest = max(CLOSEST, math.ceil(round(needed, 6)))  # without the rounding error of the division


def clock_of(device: torch.device) -> HostClock:
    """The clock of the device that a model is on."""
    return _DeviceClock() if device.type == "cuda" else HostClock()
