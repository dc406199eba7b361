"""What a monitored step is recorded as: values, histograms, raw tensors and findings. Every sink receives this and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.keys import Key

if TYPE_CHECKING:  # a program that only writes numbers needs no torch
    from torch import Tensor

    from lightning_module_monitor.health.facts import Facts

UNDEFINED_BITS = 0x7FF8_756E_6465_662E
"""A quiet NaN that spells "undef.": a statistic that finite tensors do not have, as the ratio of zero to zero. Any other NaN shows
elements that are not finite."""

UNDEFINED: float = float(np.uint64(UNDEFINED_BITS).view(np.float64))


def is_undefined(numbers: npt.ArrayLike) -> NDArray[np.bool_]:
    """Which numbers are of a statistic that finite tensors do not have; of the same shape."""
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


@dataclass(frozen=True)
class Record:
    """The finished values of one monitored step (or of one validation, test or predict loop)."""

    step: int
    """Number of the optimizer step, on Lightning's own x axis."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Value by key. A key that was planned and has no value in this step is absent."""
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    """Histogram by key."""
    tensors: Sequence[RawTensor] = field(default=(), compare=False, repr=False)
    """The raw tensors that were captured in this step."""
    findings: Sequence[Finding] = ()
    """The findings of this step."""
    modules: Sequence[ModuleInfo] = field(default=(), compare=False, repr=False)
    """The modules of the model; the same object until the output of a further module is known."""
    facts: Facts | None = field(default=None, compare=False, repr=False)
    """Facts about training in this step; ``None`` if there are none."""
