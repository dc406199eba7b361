"""The kinds: what can be observed, and at which sort of site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Kind:
    """What is true of everything of one kind."""

    name: str
    site: Literal["module", "parameter"]
    """What its sites are: a rule's ``sites`` are matched with names of these."""
    is_relative: bool = False
    """Whether it has something to be relative to, as an update has its parameter: whether it has a ``ratio``."""
    in_every_stage: bool = False
    """Whether it is also there in a loop without training."""
    of_heads: bool = False
    """Whether it is of the heads of the attention within the module: they are known when it runs, and so are their keys."""
    is_pair: bool = False
    """Whether it is of two tensors, the model's and the reference's: functions get both, and there is a ``cosine``."""
    needs_reference: bool = False
    """Whether there is nothing to see of it without a reference."""
    values: tuple[str, ...] = ()
    """The names of its values, where they are not statistics of a tensor."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("activation", "module", in_every_stage=True),
        Kind("activation_gradient", "module"),
        Kind("attention_entropy", "module", in_every_stage=True, of_heads=True),
        Kind("attention_relative_entropy", "module", in_every_stage=True, of_heads=True),
        Kind("attention_max_logit", "module", in_every_stage=True, of_heads=True),
        Kind("attention_sink", "module", in_every_stage=True, of_heads=True),
        Kind("activation_difference", "module", is_relative=True, is_pair=True, needs_reference=True),
        Kind("rcc_effective_update", "module", needs_reference=True),
        Kind("rcc_propagating_update", "module", needs_reference=True),
        Kind("rcc_output", "module", needs_reference=True),
        Kind("rcc_reference_output", "module", needs_reference=True),
        Kind("rcc_input", "module", needs_reference=True),
        Kind("rcc_input_change", "module", needs_reference=True),
        Kind("rcc_operator_norm", "module", needs_reference=True, values=("update", "reference")),
        Kind("rcc_alignment", "module", needs_reference=True, values=("effective", "propagating")),
        Kind("parameter", "parameter"),
        Kind("parameter_difference", "parameter", is_relative=True, is_pair=True, needs_reference=True),
        Kind("gradient_before_clip", "parameter"),
        Kind("gradient", "parameter"),
        Kind("update", "parameter", is_relative=True),
    )
}
"""Kind by name, in the order in which their keys are listed."""

CAPTURED = ("activation", "activation_gradient", "parameter", "gradient_before_clip", "gradient", "update")
"""The kinds whose tensors can be captured as they are."""
