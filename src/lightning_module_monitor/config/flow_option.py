"""The option ``gradient_flow``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_module_monitor.config.plain import PlainFields, any_hints
from lightning_module_monitor.config.rules import as_tuple, check_choice, options_of
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.statistics.gains import HEURISTIC, NORMS, Thresholds


@any_hints
@dataclass(frozen=True, kw_only=True)
class GradientFlow(PlainFields):
    """How the gradient grows and shrinks from block to block.

    The gain of a transition is the norm of the loss's gradient at the output of its first block over that at the output of its
    second one: what the second block makes of the gradient on its way back.

    Attributes:
        blocks: Name of a container, whose children are the blocks; or the names of the blocks in their order; or a pattern
            (``re.fullmatch``) of their names, which are taken in the model's order.
        norm: ``l2``, ``l1``, ``linf`` (largest magnitude) or ``mean`` (mean magnitude).
        thresholds: A gain below the first counts as damping, one above the second as amplifying. Heuristics.
    """

    blocks: str | Sequence[str]
    norm: str = "l2"
    thresholds: Sequence[float] = field(default_factory=lambda: list(HEURISTIC))


@dataclass(frozen=True)
class ParsedGradientFlow:
    """A checked :class:`GradientFlow`, except its blocks, which are looked up in the model."""

    blocks: str | tuple[str, ...]
    norm: str
    thresholds: Thresholds


def parse_gradient_flow(flow: GradientFlow | Mapping[str, Any]) -> ParsedGradientFlow:
    """Check a gradient flow; its blocks are looked up when there is a model.

    Raises:
        ConfigError: If a value is wrong. The message names it, what was expected, and the nearest right name.
    """
    flow = options_of(GradientFlow, flow, "gradient_flow", "{blocks: model.blocks}")
    names = as_tuple(flow.blocks)
    if not names or not all(isinstance(name, str) and name for name in names):
        expected = "expected a container's name, a list of names, or a pattern"
        raise ConfigError(f"gradient_flow.blocks is {flow.blocks!r}; {expected}, e.g. 'model.blocks'.")
    blocks = flow.blocks if isinstance(flow.blocks, str) else names
    check_choice(flow.norm, NORMS, f"gradient_flow.norm {flow.norm!r} is not a norm")
    thresholds = parse_thresholds(flow.thresholds, "gradient_flow.thresholds")
    return ParsedGradientFlow(blocks, flow.norm, thresholds)


def parse_thresholds(thresholds: Iterable[float], label: str) -> Thresholds:
    """Two gains, in their order.

    Raises:
        ConfigError: If they are not.
    """
    values = as_tuple(thresholds)
    are_numbers = all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    if len(values) != 2 or not are_numbers or not 0 <= values[0] <= values[1]:
        raise ConfigError(
            f"{label} is {thresholds!r}; expected two numbers, damping below the first, amplifying above the second, e.g. [0.5, 2]."
        )
    return Thresholds(*map(float, values))
