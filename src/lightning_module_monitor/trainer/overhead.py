"""The share of the time that monitoring takes, and how far apart monitored steps have to be to keep it below a limit."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import Any, NamedTuple

import torch

CLOSEST = 2
"""Least number of steps from one monitored step to the next: the steps in between are the baseline for the cost."""

NUM_PLAIN, NUM_MONITORED = 50, 5
"""Numbers of the latest steps that count: by the median of unmonitored steps, and the mean of monitored steps."""


class HostClock:
    """The clock of the host. A timestamp has a type of the clock's own."""

    def now(self) -> Any:  # noqa: ANN401
        """Return a timestamp; on a device it may be pending."""
        return time.perf_counter()

    def has_passed(self, timestamp: Any) -> bool:  # noqa: ANN401
        """Whether a timestamp is no longer pending, so that reading it waits for nothing."""
        return True

    def seconds(self, start: Any, end: Any) -> float:  # noqa: ANN401
        """The time between two timestamps that have passed."""
        return float(end - start)


class _DeviceClock(HostClock):
    """The clock of a CUDA device, by events in its stream."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, timestamp: torch.cuda.Event) -> bool:
        return bool(timestamp.query())

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3


class _Step(NamedTuple):
    """The times of a step."""

    is_monitored: bool
    batches: list[tuple[Any, Any]]
    """Begin and end of each batch."""


class Overhead:
    """Compares the time of monitored steps with that of the others, and keeps the share of monitoring below a limit, from 0 to 1.

    The record has the largest share of all ranks, and :meth:`decide` uses that share, so that all ranks monitor the same steps.
    """

    def __init__(self, limit: float, clock: HostClock) -> None:
        self._limit = limit
        self._clock = clock
        self._plain: deque[float] = deque(maxlen=NUM_PLAIN)
        self._monitored: deque[float] = deque(maxlen=NUM_MONITORED)
        self._step = _Step(False, [])
        self._start = clock.now()
        self._pending: deque[_Step] = deque()
        """Steps that are over on the host; the device may still run them."""
        self._has_warmed_up = False
        self._last = math.inf
        """The last monitored step."""
        self._gap = 0.0
        """Steps between the last monitored step and the monitored step before; 0 if it is not known."""
        self.closest = CLOSEST
        """Least number of steps from one monitored step to the next."""

    def allows(self, step: int) -> bool:
        """Whether a step is far enough from the monitored step before it, or is run again after a resume."""
        return step < self._last or step - self._last >= self.closest

    def begin_batch(self) -> None:
        """A batch begins; called before all other work of the monitor."""
        self._start = self._clock.now()

    def begin_step(self, step: int, *, is_monitored: bool) -> None:
        """A step begins with this batch."""
        self._step = _Step(is_monitored, [])
        if is_monitored:
            self._gap = max(0.0, step - self._last)
            self._last = step

    def end_batch(self, *, ends_step: bool) -> None:
        """The batch is over; called after all other work of the monitor."""
        self._step.batches.append((self._start, self._clock.now()))
        if not ends_step:
            return
        if self._step.is_monitored and not self._has_warmed_up:
            self._has_warmed_up = True  # the first monitored step compiles, allocates and opens files
        else:
            self._pending.append(self._step)
        self._step = _Step(False, [])

    def fraction(self) -> float | None:
        """The share of the time that monitoring takes from one monitored step to the next; ``None``: too few steps."""
        while self._pending and all(self._clock.has_passed(end) for _start, end in self._pending[0].batches):
            is_monitored, batches = self._pending.popleft()
            duration = sum(self._clock.seconds(start, end) for start, end in batches)
            (self._monitored if is_monitored else self._plain).append(duration)
        if not self._plain or not self._monitored or not self._gap:
            return None
        plain = statistics.median(self._plain)
        # The mean: if rules are due in different steps, a few monitored steps may cause most of the cost.
        cost = max(0.0, statistics.fmean(self._monitored) - plain)
        total = cost + self._gap * plain
        return cost / total if total else 0.0  # steps shorter than the clock can measure

    def decide(self, fraction: float) -> None:
        """Set how far apart monitored steps have to be, from the largest :meth:`fraction` of all ranks in the last monitored step."""
        if not self._gap or not 0 <= fraction < 1:
            return
        cost_in_steps = self._gap * fraction / (1 - fraction)
        gap = cost_in_steps * (1 - self._limit) / self._limit
        self.closest = max(CLOSEST, math.ceil(round(gap, 6)))  # without the rounding error of the division


def clock_of(device: torch.device) -> HostClock:
    """The clock of the device that a model is on."""
    return _DeviceClock() if device.type == "cuda" else HostClock()
