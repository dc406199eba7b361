"""Which steps are monitored."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_module_monitor.config.plain import plain
from lightning_module_monitor.errors import ConfigError

Schedule = int | Sequence[int] | Literal["log"] | Mapping[str, float] | Callable[[int], bool]
"""Every n-th step from 0 on, the listed steps, 1, 2, 5, 10, 20, 50, ..., one every so many minutes, or where a function returns True."""

GROWTH = 10
"""A distance between steps is at most so many times the one before: a first step may take much less time than those after it."""


class MinutesSchedule:
    """Picks a step every so many minutes.

    At the end of a picked step the next one is chosen by its number, from the time that a step took since the one before. That time is the
    largest of all ranks, so that all of them pick the same steps, and the steps between need neither a clock nor a collective.

    Args:
        minutes: The time from one picked step to the next, at least, while the time of a step does not change.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self.begin()

    def begin(self) -> None:
        """A run begins: its first step is picked."""
        self._last: int | None = None
        """The step that was picked last."""
        self._gap = 0
        """The number of steps to the next one."""
        self._moment = 0.0
        """The end of the last one, on the clock of this process."""

    def __call__(self, step: int) -> bool:
        """Whether a step is picked; a step that was not monitored although it was picked is followed by the next one."""
        return self._last is None or not self._last < step < self._last + self._gap

    def seconds_per_step(self, step: int) -> float | None:
        """Measure, at the end of a picked step, the time that a step took since the last one; ``None`` if this is the first of a run."""
        before, self._moment = self._moment, time.monotonic()
        return None if self._last is None or step <= self._last else (self._moment - before) / (step - self._last)

    def decide(self, step: int, seconds: float) -> None:
        """Choose the next step.

        Args:
            step: The picked step that has ended.
            seconds: The time of a step, the largest of all ranks; NaN if it is not known.
        """
        if seconds > 0:
            wanted = math.ceil(round(60 * self.minutes / seconds, 6))  # without the rounding error of the division
            self._gap = max(1, min(wanted, GROWTH * self._gap))
        self._gap, self._last = max(1, self._gap), step


@dataclass(frozen=True)
class ParsedSchedule:
    """A checked schedule: a function of the step."""

    value: int | frozenset[int] | Literal["log"] | MinutesSchedule | Callable[[int], bool]

    @property
    def by_clock(self) -> MinutesSchedule | None:
        """The schedule that picks by the clock, if this is one."""
        return self.value if isinstance(self.value, MinutesSchedule) else None

    def __call__(self, step: int) -> bool:
        """Whether a step is monitored."""
        if isinstance(self.value, int):
            return step % self.value == 0
        if isinstance(self.value, frozenset):
            return step in self.value
        if self.value == "log":
            digits = str(step)
            return digits[0] in "125" and not digits[1:].strip("0")
        return bool(self.value(step))

    def __str__(self) -> str:
        if isinstance(self.value, int):
            return "every step" if self.value == 1 else f"every {self.value} steps"
        if isinstance(self.value, frozenset):
            return f"at {len(self.value)} listed steps"
        if isinstance(self.value, MinutesSchedule):
            return f"every {self.value.minutes:g} minutes"
        return "at steps 1, 2, 5, 10, ..." if self.value == "log" else "at steps of your choice"


def parse_schedule(value: object, label: str, *, may_be_by_clock: bool = False) -> ParsedSchedule:
    """Check a schedule of the option ``label``; one by the clock, ``{minutes: 5}``, is for the monitor alone, which has one clock.

    Raises:
        ConfigError: If it has none of the forms.
    """
    value = plain(value)
    if value == "log":
        return ParsedSchedule("log")
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ConfigError(f"{label} is {value}; expected a whole number of steps >= 1. Use 1 to monitor every step.")
        return ParsedSchedule(value)
    if isinstance(value, dict) and may_be_by_clock:
        return ParsedSchedule(_parse_minutes(value, label))
    if isinstance(value, list):
        for step in value:
            if not isinstance(step, int) or isinstance(step, bool) or step < 0:
                raise ConfigError(f"{label} lists {step!r}; expected step numbers >= 0, e.g. [0, 100, 1000].")
        if not value:
            raise ConfigError(f"{label} is an empty list; expected at least one step. Leave the rule out to monitor nothing.")
        return ParsedSchedule(frozenset(value))
    if callable(value):
        return ParsedSchedule(value)
    clock = "{minutes: 5}, " if may_be_by_clock else ""
    raise ConfigError(f"{label} is {value!r}; expected a whole number of steps, a list of steps, 'log', {clock}or a function of the step.")


def _parse_minutes(value: dict[object, object], label: str) -> MinutesSchedule:
    wrong = next((name for name in value if name != "minutes"), None)
    if wrong is not None or not value:
        raise ConfigError(f"{label} has {f'the unit {wrong!r}' if value else 'no unit'}; expected minutes, e.g. {{minutes: 5}}.")
    minutes = value["minutes"]
    if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not 0 < minutes < math.inf:
        raise ConfigError(f"{label}.minutes is {minutes!r}; expected a number > 0, e.g. 5 or 0.5.")
    return MinutesSchedule(minutes)
