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


KINDS = {
    kind.name: kind
    for kind in (
        Kind("activation", "module", in_every_stage=True),
        Kind("activation_gradient", "module"),
        Kind("attention_entropy", "module", in_every_stage=True, of_heads=True),
        Kind("attention_relative_entropy", "module", in_every_stage=True, of_heads=True),
        Kind("attention_max_logit", "module", in_every_stage=True, of_heads=True),
        Kind("attention_sink", "module", in_every_stage=True, of_heads=True),
        Kind("parameter", "parameter"),
        Kind("gradient_before_clip", "parameter"),
        Kind("gradient", "parameter"),
        Kind("update", "parameter", is_relative=True),
    )
}
"""Kind by name, in the order in which their keys are listed."""

CAPTURED = ("activation", "activation_gradient", "parameter", "gradient_before_clip", "gradient", "update")
"""The kinds whose tensors can be captured as they are."""
