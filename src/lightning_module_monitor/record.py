"""The record of a monitored step: a vector of numbers, histograms, raw tensors; and the findings about it.

Internal: it may change in any version.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.keys import Columns, Key

if TYPE_CHECKING:  # a program that only writes numbers needs no torch
    from torch import Tensor

UNDEFINED_BITS = 0x7FF8_756E_6465_662E
"""A quiet NaN that spells "undef.": a statistic that finite tensors do not have, as the ratio of zero to zero. Any other NaN shows
elements that are not finite."""

UNDEFINED: float = float(np.uint64(UNDEFINED_BITS).view(np.float64))


ABSENT_BITS = 0x7FF8_6162_7365_6E74
"""A quiet NaN that spells "absent": a value that was never recorded, unlike a recorded NaN."""

ABSENT: float = float(np.uint64(ABSENT_BITS).view(np.float64))


def is_absent(numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Flags of the numbers that were not recorded; of the same shape."""
    return np.asarray(numbers.view(np.uint64) == ABSENT_BITS)


def is_undefined(numbers: npt.ArrayLike) -> NDArray[np.bool_]:
    """Flags of the numbers that stand for an undefined statistic of finite tensors; of the same shape."""
    return np.asarray(np.asarray(numbers, dtype=np.float64).view(np.uint64) == UNDEFINED_BITS)


@dataclass(frozen=True, eq=False)
class RawTensor:
    """A tensor of a monitored step as it was, on the host."""

    kind: str
    site: str
    call: int
    """Number of the module's call in the step: 0, 1, ... in the order of the forward passes, over all micro-batches. A gradient has the
    number of its output. For parameters, their gradients and updates it is 0."""
    value: Tensor
    """On the CPU, of any shape and dtype, part of no graph, and not shared."""


class ModuleInfo(NamedTuple):
    """Description of a module, and its first output in the first monitored step in which it ran."""

    name: str
    """Name in keys."""
    type: str
    """Name of its class."""
    num_parameters: int
    """Number of elements of its parameters, modules inside included."""
    output_shape: tuple[int, ...] | None = None
    """Shape of the first tensor in its output; ``None`` before its first output."""
    output_dtype: str = ""
    """Name of the dtype in torch: ``bfloat16``."""


Severity = Literal["warning", "error"]
"""An ``error`` ends a training, as a value that is not finite does, or leaves a part of the model out of it. A ``warning`` may be meant."""


@dataclass(frozen=True, repr=False)
class Finding:
    """A fault of the model, reported once for each cause."""

    step: int
    """Number of the optimizer step in which it was found."""
    name: str
    """What is wrong: ``nonfinite``, the name of a detector (``dead_units``), or that of an alert."""
    site: str
    """Name of the module or parameter that it is about; empty where it is about none."""
    key: str
    """The key of the series that shows it; empty where there is none."""
    words: str
    """The fault, in sentences with figures."""
    severity: Severity = "warning"
    steps_before: int = 0
    """For how many steps it was there before it was found: some conditions have to be met for several records."""
    cause: str = ""
    """The name of the diagnosis that it shows, where the evidence itself shows one, as a batch with NaN does (``data``)."""

    @property
    def first_step(self) -> int:
        """The first step that shows it."""
        return self.step - self.steps_before

    @property
    def message(self) -> str:
        """The first sentence of its words: what was found, where, since when, and how much."""
        return re.split(r"(?<=\.) ", self.words, maxsplit=1)[0]

    @property
    def kind(self) -> str:
        """Prefix, stage and kind of the series that shows it."""
        return Key.parse(self.key).full_kind

    @property
    def statistic(self) -> str:
        """Statistic of the series that shows it."""
        return Key.parse(self.key).statistic

    def __repr__(self) -> str:
        return f"Finding(step {self.step}, {self.severity}, {self.name}: {self.words})"


@dataclass(frozen=True, eq=False)
class Record:
    """The finished values of one monitored step (or of one validation, test or predict loop): a vector with a number for each column."""

    step: int
    """Number of the optimizer step, on Lightning's own x axis."""
    columns: Columns = field(default_factory=Columns, repr=False)
    """The keys of the numbers, the same object for all records of a stage. It may have got more columns since."""
    numbers: NDArray[np.float64] = field(default_factory=lambda: np.empty(0), repr=False)
    """Shape ``(columns,)``, :data:`ABSENT` where the step has no value."""
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    """Histogram by key."""
    tensors: Sequence[RawTensor] = field(default=(), repr=False)
    """The raw tensors that were captured in this step."""
    modules: Sequence[ModuleInfo] = field(default=(), repr=False)
    """The modules of the model; the same object until the output of a further module is known."""

    @classmethod
    def of(cls, step: int, values: Mapping[str, float], histograms: Mapping[str, Histogram] | None = None, **options: Any) -> Record:
        """A record with columns of its own, from values by key; ``options`` are the other fields.

        >>> Record.of(3, {"gradient/fc.weight/norm": 0.5})
        Record(step=3, values={'gradient/fc.weight/norm': 0.5}, histograms={})
        """
        numbers = np.fromiter(values.values(), np.float64, len(values))
        return cls(step, Columns.of(values), numbers, histograms or {}, **options)

    @functools.cached_property
    def is_recorded(self) -> NDArray[np.bool_]:
        """Flags of the columns with a value, shape ``(columns,)``."""
        return ~is_absent(self.numbers)

    @functools.cached_property
    def values(self) -> Mapping[str, float]:
        """Value by key. A key that was planned and has no value in this step is absent."""
        return values_by_key(self.columns, self.numbers)

    def get(self, key: Key, default: float = math.nan) -> float:
        """The value of a key, or the default without one."""
        column = self.columns.find(key.format())
        if column is None or column >= len(self.numbers) or is_absent(self.numbers[column : column + 1])[0]:
            return default
        return float(self.numbers[column])

    def __hash__(self) -> int:
        return hash(self.step)

    def __eq__(self, other: object) -> bool:
        """Whether a record of the same step has the same values and histograms."""
        return isinstance(other, Record) and (self.step, self.values, self.histograms) == (other.step, other.values, other.histograms)

    def without_tensors(self) -> Record:
        """The record without raw tensors."""
        return dataclasses.replace(self, tensors=()) if self.tensors else self

    def __repr__(self) -> str:
        return f"Record(step={self.step}, values={self.values}, histograms={self.histograms})"


def values_by_key(columns: Columns, numbers: NDArray[np.float64]) -> dict[str, float]:
    """The numbers that were recorded, by key."""
    there = np.flatnonzero(~is_absent(numbers))
    return {columns.texts[column]: number for column, number in zip(there.tolist(), numbers[there].tolist(), strict=True)}


class NumbersOfStep:
    """The numbers of a record while they are made, of columns to which more may be added."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._numbers = np.full(columns.version, ABSENT)

    def write(self, columns: NDArray[np.intp], numbers: npt.ArrayLike) -> None:
        """Write numbers of some columns, both of one shape."""
        self.finished()[columns] = numbers

    def put(self, key: Key, number: float) -> None:
        """Write the number of a key."""
        self.write(self.columns.add([key]), number)

    def pop(self, key: str) -> float | None:
        """Take the number of a key out; ``None`` without one."""
        column, numbers = self.columns.find(key), self.finished()
        if column is None or is_absent(numbers[column : column + 1])[0]:
            return None
        number, numbers[column] = float(numbers[column]), ABSENT
        return number

    @property
    def values(self) -> dict[str, float]:
        """The numbers that were written, by key."""
        return values_by_key(self.columns, self.finished())

    def finished(self) -> NDArray[np.float64]:
        """The numbers of all columns, shape ``(columns,)``."""
        num_new = self.columns.version - len(self._numbers)
        if num_new:
            self._numbers = np.concatenate([self._numbers, np.full(num_new, ABSENT)])
        return self._numbers
