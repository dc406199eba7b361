"""Which steps are monitored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_module_monitor.errors import ConfigError

Schedule = int | list[int] | Literal["log"] | Callable[[int], bool]
"""Every n-th step from 0 on, the listed steps, 1, 2, 5, 10, 20, 50, ..., or those for which a function says so."""


@dataclass(frozen=True)
class EveryN:
    """Steps 0, n, 2n, ..."""

    n: int

    def __call__(self, step: int) -> bool:
        """Whether a step is monitored."""
        return step % self.n == 0

    def __str__(self) -> str:
        return "every step" if self.n == 1 else f"every {self.n} steps"


@dataclass(frozen=True)
class Listed:
    """Just these steps."""

    steps: frozenset[int]

    def __call__(self, step: int) -> bool:
        """Whether a step is monitored."""
        return step in self.steps

    def __str__(self) -> str:
        return f"at {len(self.steps)} listed steps"


@dataclass(frozen=True)
class Logarithmic:
    """Steps 1, 2, 5, 10, 20, 50, ..."""

    def __call__(self, step: int) -> bool:
        """Whether a step is monitored."""
        digits = str(step)
        return digits[0] in "125" and not digits[1:].strip("0")

    def __str__(self) -> str:
        return "at steps 1, 2, 5, 10, ..."


@dataclass(frozen=True)
class Chosen:
    """Steps for which a function of the user's says so."""

    is_chosen: Callable[[int], bool]

    def __call__(self, step: int) -> bool:
        """Whether a step is monitored."""
        return bool(self.is_chosen(step))

    def __str__(self) -> str:
        return "at steps of your choice"


ParsedSchedule = EveryN | Listed | Logarithmic | Chosen


def parse_schedule(value: object, label: str) -> ParsedSchedule:
    """Check a schedule and make it a function of the step.

    Args:
        value: One of the forms of :data:`Schedule`.
        label: Path of the option, for messages.

    Returns:
        A function that says whether a step is monitored.

    Raises:
        ConfigError: If it has none of the forms.
    """
    if value == "log":
        return Logarithmic()
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ConfigError(f"{label} is {value}; expected a number of steps >= 1. Use 1 to monitor every step.")
        return EveryN(value)
    if isinstance(value, Iterable) and not isinstance(value, str):
        steps = list(value)
        for step in steps:
            if not isinstance(step, int) or isinstance(step, bool) or step < 0:
                raise ConfigError(f"{label} lists {step!r}; expected step numbers >= 0, e.g. [0, 100, 1000].")
        if not steps:
            raise ConfigError(f"{label} is an empty list; expected at least one step. Leave the rule out to monitor nothing.")
        return Listed(frozenset(steps))
    if callable(value):
        return Chosen(value)
    raise ConfigError(f"{label} is {value!r}; expected a number of steps, a list of steps, 'log', or a function of the step.")
