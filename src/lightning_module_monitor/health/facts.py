"""Facts about training in a step: states of parameters and modules, and the form of the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import FACT_KIND

Training = Literal["trained", "untrained", "frozen"]
"""State of a parameter: an optimizer has it; it requires a gradient, and no optimizer has it; or it requires none."""


_OF_RUN = ("softmax_twice", "is_broadcast", "no_gradient", "maximizes", "num_unregistered", "has_swapped_betas")
_OF_SITES = ("in_eval", "mixes_samples", "of_two_values", "in_two_optimizers")
"""Facts that are judged as values of a record are: of the run, and of modules or parameters."""


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
    """The ``eps`` of Adam and its relatives; 0 in stores of earlier versions."""
    number: int = 0
    """Number of its optimizer."""
    dtype: str = ""
    """Dtype of its first parameter, such as ``float16``."""

    @property
    def is_half(self) -> bool:
        """Whether its parameters have 16 bits."""
        return self.dtype in ("float16", "bfloat16")

    @property
    def eps_is_zero(self) -> bool:
        """Whether ``eps`` is rounded to 0 in the dtype of its parameters: in float16 below half of the smallest number."""
        return self.dtype == "float16" and 0 < self.eps < 2.0**-25


class CallFacts(NamedTuple):
    """Facts about the calls of modules."""

    order: tuple[str, ...] = ()
    """The innermost modules that returned a tensor of the batch's samples in the first step, in the order of their last calls."""
    without_gradient: bool = False
    """Whether the output of the model was computed without gradients, too."""
    mixes_samples: tuple[str, ...] = ()
    """Modules that take samples for elements of a sequence, in the first step."""
    of_two_values: tuple[str, ...] = ()
    """Modules that normalize two values, in the first step."""
    output: str = ""
    """The module, also one with others inside, that was the last to return a tensor of the batch's samples: the output of the model."""


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
    is_summed: bool = False
    """Whether the loss is the sum over the samples, and not their mean."""
    is_broadcast: bool = False
    """Whether the loss compares each output with the targets of all samples: shapes ``(N, 1)`` and ``(N,)``."""
    compares_outputs: bool = False
    """Whether the loss compares outputs of two calls of the model with each other, and nothing holds them apart."""
    dropout: float = 0.0
    """The largest probability of a dropout module in training mode."""
    no_gradient: bool = False
    """Whether the optimizers got no gradient at all."""
    maximizes: bool = False
    """Whether an optimizer moves against the loss (``maximize=True``)."""
    computes_targets: bool = False
    """Whether ``training_step`` calls the model without gradients, too: it computes targets by itself."""
    mixes_samples: Sequence[str] = ()
    """Recurrent and attention modules that take the samples of a batch for the elements of a sequence."""
    of_two_values: Sequence[str] = ()
    """Modules that normalize two values: only the sign of their difference is left."""
    is_linear: bool = False
    """Whether the model has several layers and no function between them that is not linear."""
    of_tokens: bool = False
    """Whether the targets of a cross-entropy are as many as the tokens of the input, or one less for each sample."""
    num_unregistered: int = 0
    """Number of weights that get a gradient, and that neither the module nor an optimizer has."""
    has_swapped_betas: bool = False
    """Whether an optimizer averages squares over fewer steps than gradients."""
    in_two_optimizers: Sequence[str] = ()
    """Parameters of an optimizer that another optimizer with further parameters has, too."""
    order: Sequence[str] = ()
    """The modules that returned an output for each sample, in the order of execution in the first record; the last one is the output."""

    @property
    def num_optimizers(self) -> int:
        """Number of optimizers."""
        return max((group.number + 1 for group in self.groups), default=0)

    def optimizer_of(self, site: str) -> int:
        """The number of the optimizer that has a parameter; -1 if none has it."""
        parameter = self.parameters.get(site)
        return self.groups[parameter.group].number if parameter is not None and 0 <= parameter.group < len(self.groups) else -1

    def as_values(self) -> dict[Key, float]:
        """The facts that are conditions, as values of a record, by key."""
        of_run = {Key(FACT_KIND, "", name): float(getattr(self, name)) for name in _OF_RUN}
        of_sites = {Key(FACT_KIND, site, name): 1.0 for name in _OF_SITES for site in getattr(self, name)}
        return of_run | of_sites

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Facts:
        """The inverse of ``dataclasses.asdict`` and JSON."""
        parameters = {name: ParameterFacts(*values) for name, values in content["parameters"].items()}
        groups = tuple(GroupFacts(*values) for values in content["groups"])
        names = {name: tuple(content.get(name, ())) for name in (*_OF_SITES, "order")}
        return cls(**{**content, "parameters": parameters, "groups": groups, **names})
