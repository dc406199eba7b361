"""Which steps are monitored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_module_monitor.errors import ConfigError

Schedule = int | list[int] | Literal["log"] | Callable[[int], bool]
"""Every n-th step from 0 on, the listed steps, 1, 2, 5, 10, 20, 50, ..., or those for which a function returns True."""


@dataclass(frozen=True)
class ParsedSchedule:
    """A checked schedule: a function of the step."""

    value: int | frozenset[int] | Literal["log"] | Callable[[int], bool]

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
        return "at steps 1, 2, 5, 10, ..." if self.value == "log" else "at steps of your choice"


def parse_schedule(value: object, label: str) -> ParsedSchedule:
    """Check a schedule.

    Args:
        value: One of the forms of :data:`Schedule`.
        label: Path of the option, for messages.

    Raises:
        ConfigError: If it has none of the forms.
    """
    if value == "log":
        return ParsedSchedule("log")
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ConfigError(f"{label} is {value}; expected a number of steps >= 1. Use 1 to monitor every step.")
        return ParsedSchedule(value)
    if isinstance(value, Iterable) and not isinstance(value, str):
        steps = list(value)
        for step in steps:
            if not isinstance(step, int) or isinstance(step, bool) or step < 0:
                raise ConfigError(f"{label} lists {step!r}; expected step numbers >= 0, e.g. [0, 100, 1000].")
        if not steps:
            raise ConfigError(f"{label} is an empty list; expected at least one step. Leave the rule out to monitor nothing.")
        return ParsedSchedule(frozenset(steps))
    if callable(value):
        return ParsedSchedule(value)
    raise ConfigError(f"{label} is {value!r}; expected a number of steps, a list of steps, 'log', or a function of the step.")
