"""What a monitored step has to say: a step number and named values. Every sink gets this and nothing else."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # who writes numbers only does without torch
    from torch import Tensor

from lightning_module_monitor.bins import Histogram

TRAIN = "train"
STAGES = ("validation", "test", "predict")
"""Stages that are named in a key. Training is not: its keys start with the kind."""

OWN_KIND = "monitor"
"""The kind of the monitor's own figures; its keys have no site: ``monitor/errors``."""

STEP_SKIPPED = "step_skipped"
"""The name of the figure that is 1 where a ``GradScaler`` skipped a step."""

OVERHEAD_FRACTION = "overhead_fraction"
"""The name of the figure that is the share of the time that monitoring takes."""

RCC_SKIPPED_CALLS = "rcc_skipped_calls"
"""The name of the number of calls that the refined coordinate check leaves out, of all ranks."""

OWN_FIGURES = ("errors", OVERHEAD_FRACTION, STEP_SKIPPED, RCC_SKIPPED_CALLS)
"""The names under :data:`OWN_KIND`: with them ``monitor`` is the kind, with any other statistic it may be a module's name."""

SUMMARY_SITE = "_summary_"
"""The site that stands for all of a kind together, where one kind has figures of that sort."""

ROLL_UP_SITES = ("_min_", "_median_", "_max_", "_all_")
"""The sites that stand for all of a kind together in loggers, where there are many keys; the last one is of histograms."""

MAX_PREFIX_LENGTH = 40
MAX_SITE_LENGTH = 128
MAX_STATISTIC_LENGTH = 40
"""With the longest stage and kind, a key stays within the 250 characters that MLflow takes."""

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")


def fit_for_loggers(name: str, max_length: int = MAX_SITE_LENGTH) -> str:
    """A name of letters, digits, ``_``, ``-`` and single dots.

    What a logger would refuse or strip becomes ``_``; of a name that is too long the middle gives way to a digest of it.

    >>> fit_for_loggers("experts.a/b [0]")
    'experts.a_b__0_'
    """
    fit = _UNFIT.sub("_", name).replace("..", "._.")
    if len(fit) <= max_length:
        return fit
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    keep = (max_length - len(digest) - 2) // 2
    return f"{fit[:keep]}-{digest}-{fit[-keep:]}"


class Key(NamedTuple):
    """The name of one series: ``[prefix/][stage/]kind/site/statistic``.

    No part but ``prefix`` holds a ``/``, so that :meth:`parse` undoes :meth:`format`.
    """

    kind: str
    site: str
    statistic: str
    stage: str = TRAIN
    prefix: str = ""

    def format(self) -> str:
        """The key as loggers and the store know it, e.g. ``validation/activation/model.fc/rms``."""
        stage = "" if self.stage == TRAIN else self.stage
        return "/".join(part for part in (self.prefix, stage, self.kind, self.site, self.statistic) if part)

    @classmethod
    def parse(cls, text: str) -> Key:
        """Take a key apart; the inverse of :meth:`format`.

        Args:
            text: A key. One with two parts, ``a/b``, has no site: kind ``a``, statistic ``b``; nor have the
                monitor's own figures, ``monitor/errors``. One without a ``/`` has neither kind nor site.

        Returns:
            Its parts.
        """
        *head, statistic = text.split("/")
        own = statistic in OWN_FIGURES and head[-1:] == [OWN_KIND]
        site = head.pop() if len(head) >= 2 and not own else ""
        kind = head.pop() if head else ""
        stage = head.pop() if head and head[-1] in STAGES else TRAIN
        return cls(kind, site, statistic, stage, "/".join(head))


@dataclass(frozen=True, eq=False)
class RawTensor:
    """A tensor of a monitored step as it was, on the host."""

    kind: str
    site: str
    call: int
    """Which of the step's calls of the module it is of: 0, 1, ... in the order of the forward passes, over all micro-batches. A gradient
    has the number of the output that it is of. A parameter has one, 0, and so have its gradient and its update."""
    value: Tensor
    """On the CPU, of any shape and dtype, part of no graph, and nobody else's."""


Severity = Literal["warning", "error"]
"""An ``error`` is a value that is not finite: what follows from it is lost. A ``warning`` may be meant."""


@dataclass(frozen=True)
class Finding:
    """Something that is not well with the model, said once for each cause."""

    step: int
    """Number of the optimizer step in which it was found."""

    name: str
    """What is wrong: ``nonfinite``, one of the built-in watches (``dead_units``), or the name of an alert."""

    site: str
    """Name of the module or parameter that it is about; empty where it is about none."""

    key: str
    """The key of the series that shows it; empty where there is none."""

    words: str
    """What was found, in sentences with figures."""

    severity: Severity = "warning"


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
    """What was captured in this step."""

    findings: Sequence[Finding] = ()
    """What was found to be wrong in this step."""
