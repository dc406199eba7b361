"""The options ``gradient_flow`` and ``gradient_noise``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_module_monitor.config.plain import PlainFields, any_hints, plain
from lightning_module_monitor.config.rules import ParsedRule, as_tuple, check_choice, options_of, parse_patterns
from lightning_module_monitor.config.schedule import ParsedSchedule
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.kinds import ROOT_SITE
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


@any_hints
@dataclass(frozen=True, kw_only=True)
class GradientNoise(PlainFields):
    r"""The simple noise scale, from the gradients of the micro-batches of a step and of all ranks.

    Attributes:
        per_module: Pattern or patterns (``re.fullmatch``) of module names. All parameters inside such a module count as one
            gradient. ``_root_`` is the whole model, ``model\.blocks\.\d+`` every block.
    """

    per_module: str | Sequence[str] = ROOT_SITE


def parse_gradient_noise(option: GradientNoise | Mapping[str, Any] | bool | None, schedule: ParsedSchedule) -> ParsedRule | None:
    """Check the option; its modules are looked up when there is a model.

    Returns:
        A rule for the parameters that count together, without statistics; ``None`` if the option is off.

    Raises:
        ConfigError: If a value is wrong.
    """
    if option is None or option is False:
        return None
    if not isinstance(plain(option), Mapping | GradientNoise | bool):
        raise ConfigError(f"gradient_noise is {option!r}; expected true, false, or options, e.g. {{per_module: _root_}}.")
    options = GradientNoise() if option is True else options_of(GradientNoise, option, "gradient_noise", "{per_module: _root_}")
    if not as_tuple(options.per_module):
        raise ConfigError(f"gradient_noise.per_module is empty; expected at least one pattern, e.g. {ROOT_SITE} for the whole model.")
    per_module = parse_patterns(options.per_module, "gradient_noise.per_module")
    return ParsedRule(label="gradient_noise", kinds=("gradient",), sites=(re.compile(".*"),), schedule=schedule, per_module=per_module)
