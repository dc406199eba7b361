"""What a monitored step is recorded as: keys, values, histograms, raw tensors and findings. Every sink receives this and nothing else."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.histogram import Histogram

if TYPE_CHECKING:  # a program that only writes numbers needs no torch
    from torch import Tensor

TRAIN = "train"
STAGES = ("validation", "test", "predict")
"""Stages that are named in a key. Training is not: its keys start with the kind."""

OWN_KIND = "monitor"
"""The kind of the monitor's own figures; its keys have no site: ``monitor/errors``."""

CONTEXT_KIND = "context"
"""The kind of a step's context: its loss, logged values and learning rates; its keys have no site."""

FACT_KIND = "fact"
"""The kind of conditions that are judged as values and not recorded as such; see :class:`Facts`."""

LOSS, LEARNING_RATE, BATCH_SIZE = "loss", "lr", "batch_size"
"""Names under :data:`CONTEXT_KIND`: of the training loss, of the first learning rate, and of the number of samples in a step."""

STEP_SKIPPED = "step_skipped"
"""The name of the figure that is 1 where a ``GradScaler`` skipped a step."""

OVERHEAD_FRACTION = "overhead_fraction"
"""The name of the figure that is the share of the time that monitoring takes."""

RCC_SKIPPED_CALLS = "rcc_skipped_calls"
"""The name of the number of calls that the refined coordinate check leaves out, of all ranks."""

DEAD_AFTER = 10
"""Number of monitored steps throughout which a dead unit was zero for every input."""

STEPS_SINCE_NONFINITE = "steps_since_nonfinite"
"""The name of the figure that is how many steps ago a loss or gradient was not finite for the first time since the last record; 0: none."""

SECONDS_PER_STEP = "seconds_per_step"
"""The name of the time that a step took since the last record, where steps are picked by the clock: the largest of all ranks."""

RANK_DISAGREEMENT = "rank_disagreement"
"""The name of the number of parameters that differ between ranks although they must be equal, and of the finding about them."""

OWN_FIGURES = ("errors", OVERHEAD_FRACTION, STEP_SKIPPED, RCC_SKIPPED_CALLS, STEPS_SINCE_NONFINITE, SECONDS_PER_STEP, RANK_DISAGREEMENT)
"""The names under :data:`OWN_KIND`: with them ``monitor`` is the kind, with any other statistic it may be a module's name."""

ROOT_SITE = "_root_"
"""The site of the module that is monitored as a whole."""

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


@dataclass(frozen=True)
class Kind:
    """The properties of a kind."""

    name: str
    site: Literal["module", "parameter"]
    """The sort of its sites: a rule's ``sites`` are matched with names of modules or of parameters."""
    is_relative: bool = False
    """Whether it has a base, as an update has its parameter, and so a ``ratio``."""
    in_every_stage: bool = False
    """Whether it exists in loops without training, too."""
    of_heads: bool = False
    """Whether its sites are the heads of the attention within the module, which are known once it runs."""
    of_states: bool = False
    """Whether its sites are the states that optimizers keep of the parameter, which are known once these have stepped."""
    of_layers: bool = False
    """Whether its sites are the linear maps within the module, which the coordinate check compares with the reference's."""
    is_pair: bool = False
    """Whether it compares two tensors, the model's and the reference's, and functions get both."""
    compared_with: tuple[str, ...] = ()
    """What statistics may compare its tensors with: see :attr:`Statistic.compared_with`."""
    needs_reference: bool = False
    """Whether it requires a reference."""
    values: tuple[str, ...] = ()
    """The names of its values, where they are not statistics of a tensor."""
    can_be_captured: bool = False
    """Whether its tensors can be captured as they are."""
    has_units: bool = False
    """Whether its tensors have units, channels or features, as the outputs of a layer have."""
    has_option: bool = False
    """Whether an option of the same name records it, and no rule does."""
    figures: tuple[str, ...] = ()
    """The monitor's own figures that a step has which records it."""

    @property
    def has_late_sites(self) -> bool:
        """Whether its sites, and their keys, are known only after a step in which they occur."""
        return self.of_heads or self.of_states


KINDS = {
    kind.name: kind
    for kind in (
        Kind("activation", "module", in_every_stage=True, can_be_captured=True, has_units=True),
        Kind("activation_gradient", "module", can_be_captured=True, has_units=True),
        *(
            Kind(f"attention_{figure}", "module", in_every_stage=True, of_heads=True)
            for figure in ("entropy", "relative_entropy", "max_logit", "sink")
        ),
        Kind("activation_difference", "module", is_relative=True, is_pair=True, compared_with=("reference",), needs_reference=True),
        *(
            Kind(f"rcc_{term}", "module", of_layers=True, needs_reference=True, figures=(RCC_SKIPPED_CALLS,))
            for term in ("effective_update", "propagating_update", "output", "reference_output", "input", "input_change")
        ),
        *(
            Kind(f"rcc_{name}", "module", of_layers=True, needs_reference=True, values=values, figures=(RCC_SKIPPED_CALLS,))
            for name, values in (("operator_norm", ("update", "reference")), ("alignment", ("effective", "propagating")))
        ),
        Kind("parameter", "parameter", can_be_captured=True),
        Kind("parameter_difference", "parameter", is_relative=True, is_pair=True, compared_with=("reference",), needs_reference=True),
        Kind("gradient_before_clip", "parameter", can_be_captured=True),
        Kind("gradient", "parameter", can_be_captured=True),
        Kind("update", "parameter", is_relative=True, can_be_captured=True, compared_with=("gradient", "previous")),
        Kind("optimizer_state", "parameter", of_states=True, compared_with=("gradient",)),
        Kind("gradient_flow", "module", has_option=True),
        Kind("gradient_noise", "parameter", has_option=True),
    )
}
"""Kind by name, in the order in which their keys are listed."""


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

    @property
    def full_kind(self) -> str:
        """The kind with prefix and stage: ``run1/validation/activation``."""
        return self._replace(site="", statistic="").format()

    @classmethod
    def parse(cls, text: str) -> Key:
        """Take a key apart; the inverse of :meth:`format`.

        Args:
            text: A key. One with two parts, ``a/b``, has no site: kind ``a``, statistic ``b``; nor have the
                monitor's own figures, ``monitor/errors``, and the context, ``context/loss``. One without a ``/`` has neither kind nor site.

        Returns:
            Its parts.
        """
        *head, statistic = text.split("/")
        is_figure = statistic in OWN_FIGURES and head[-1:] == [OWN_KIND]
        is_of_context = head[-1:] == [CONTEXT_KIND] and not KINDS.keys() & head[-2:-1]  # behind a kind it is a module of this name
        site = head.pop() if len(head) >= 2 and not (is_figure or is_of_context) else ""
        kind = head.pop() if head else ""
        stage = head.pop() if head and head[-1] in STAGES else TRAIN
        return cls(kind, site, statistic, stage, "/".join(head))

    @classmethod
    def of_user(cls, text: str) -> Key:
        """The parts of a key that a user gives to a value.

        Raises:
            ValueError: If it has more than three parts, or one that a logger would not take.
        """
        parts = text.split("/") if isinstance(text, str) else []
        if not 1 <= len(parts) <= 3 or any(not part or fit_for_loggers(part) != part for part in parts):
            fit = "/".join(map(fit_for_loggers, parts[:3])) or "own/value"
            raise ValueError(f"key {text!r} does not fit; expected at most three parts of letters, digits, '_', '-' and '.', e.g. {fit!r}.")
        return cls.parse(text)


def is_total(key: Key, modules: Collection[str] = ()) -> bool:
    """Whether a key is of all parameters inside a module together, as ``per_module`` records them: its site is no parameter.

    Args:
        key: The key.
        modules: Names of the modules of the model, as in keys; ``_root_``, which is everything that is monitored, need not be there.

    >>> (
    ...     is_total(Key.parse("gradient/_root_/norm")),
    ...     is_total(Key.parse("gradient/head/norm"), ["head"]),
    ...     is_total(Key.parse("gradient/a/norm")),
    ... )
    (True, True, False)
    """
    kind = KINDS.get(key.kind)
    site = key.site.rpartition(".")[0] if kind is not None and kind.of_states else key.site
    return kind is not None and kind.site == "parameter" and (site == ROOT_SITE or site in modules)


def is_context(key: str) -> bool:
    """Whether a key is one of :data:`CONTEXT_KIND`.

    >>> is_context("run1/context/loss"), is_context("activation/context/rms")
    (True, False)
    """
    if f"{CONTEXT_KIND}/" not in key:  # quicker
        return False
    parts = Key.parse(key)
    return parts.kind == CONTEXT_KIND and not parts.site


def name_of_rate(number: int) -> str:
    """The name of a learning rate under :data:`CONTEXT_KIND`.

    >>> name_of_rate(0), name_of_rate(1)
    ('lr', 'lr_1')
    """
    return f"{LEARNING_RATE}_{number}" if number else LEARNING_RATE


def is_rate(name: str) -> bool:
    """Whether a name under :data:`CONTEXT_KIND` is that of a learning rate.

    >>> is_rate("lr_1"), is_rate("lr_ratio")
    (True, False)
    """
    return re.fullmatch(rf"{LEARNING_RATE}(_\d+)?", name) is not None


UNDEFINED_BITS = 0x7FF8_756E_6465_662E
"""A quiet NaN that spells "undef.": a statistic that finite tensors do not have, as the ratio of zero to zero. Any other NaN shows
elements that are not finite."""

UNDEFINED: float = float(np.uint64(UNDEFINED_BITS).view(np.float64))


def is_undefined(numbers: npt.ArrayLike) -> NDArray[np.bool_]:
    """Which numbers are of a statistic that finite tensors do not have; of the same shape."""
    return np.asarray(np.asarray(numbers, dtype=np.float64).view(np.uint64) == UNDEFINED_BITS)


def check_prefix(prefix: str, label: str = "prefix") -> str:
    """Check the prefix of keys; returns it.

    Raises:
        ConfigError: If a logger would not take it.
    """
    parts = prefix.split("/") if isinstance(prefix, str) else [""]
    if prefix != "" and (len("/".join(parts)) > MAX_PREFIX_LENGTH or any(not part or fit_for_loggers(part) != part for part in parts)):
        expected = f"at most {MAX_PREFIX_LENGTH} letters, digits, '_', '-' and '.', with '/' between parts"
        raise ConfigError(f"{label} {prefix!r} cannot stand in a key; expected {expected}, e.g. 'run1'.")
    return prefix


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


Training = Literal["trained", "untrained", "frozen"]
"""State of a parameter: an optimizer has it; it requires a gradient, and no optimizer has it; or it requires none."""


class ParameterFacts(NamedTuple):
    """Facts about a parameter in a step."""

    training: Training
    group: int
    """Number of its learning rate, ``context/lr`` (0), ``context/lr_1``, ...; -1 where no optimizer has it, or only a copy of it."""
    numel: int


class GroupFacts(NamedTuple):
    """Facts about a parameter group of the optimizers."""

    optimizer: str
    """Name of the optimizer's class."""
    momentum: float
    weight_decay: float
    name: str = ""
    """The group's own ``name``; empty without one, and in stores of earlier versions."""
    eps: float = 0.0
    """What Adam and its relatives add to the root of the second moment; 0 in stores of earlier versions."""


@dataclass(frozen=True)
class Facts:
    """Facts about training in a step, in addition to the numbers of its record."""

    parameters: Mapping[str, ParameterFacts] = field(default_factory=dict)
    """By the name of the site."""
    groups: Sequence[GroupFacts] = ()
    in_eval: Sequence[str] = ()
    """Modules with running statistics that were in eval while their own weights were trained."""
    softmax_twice: bool = False
    """Whether the loss takes the log-softmax of a softmax, or the sigmoid of one."""
    is_classification: bool = False
    """Whether the loss has a cross-entropy."""
    is_manual: bool = False
    """Whether optimization is manual."""
    clip: float = 0.0
    """The Trainer's ``gradient_clip_val``; 0 where it clips nothing."""
    clips_values: bool = False
    """Whether it clips every element, and not the norm."""
    num_classes: int = 0
    """The number of classes, where the loss is the mean of a cross-entropy and nothing else; else 0."""

    def as_values(self) -> dict[str, float]:
        """The conditions among them, as values of a record."""
        in_eval = {Key(FACT_KIND, name, "in_eval").format(): 1.0 for name in self.in_eval}
        return {Key(FACT_KIND, "", "softmax_twice").format(): float(self.softmax_twice), **in_eval}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Facts:
        """The inverse of ``dataclasses.asdict`` and JSON."""
        parameters = {name: ParameterFacts(*values) for name, values in content["parameters"].items()}
        groups = tuple(GroupFacts(*values) for values in content["groups"])
        return cls(**{**content, "parameters": parameters, "groups": groups, "in_eval": tuple(content["in_eval"])})


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
