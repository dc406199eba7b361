"""Facts about training in a step: states of parameters and modules, and the form of the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import FACT_KIND

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

    def as_values(self) -> dict[Key, float]:
        """The conditions among them, which are judged as values of a record are."""
        in_eval = {Key(FACT_KIND, name, "in_eval"): 1.0 for name in self.in_eval}
        return {Key(FACT_KIND, "", "softmax_twice"): float(self.softmax_twice), **in_eval}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Facts:
        """The inverse of ``dataclasses.asdict`` and JSON."""
        parameters = {name: ParameterFacts(*values) for name, values in content["parameters"].items()}
        groups = tuple(GroupFacts(*values) for values in content["groups"])
        return cls(**{**content, "parameters": parameters, "groups": groups, "in_eval": tuple(content["in_eval"])})
