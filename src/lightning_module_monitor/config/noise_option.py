"""The option ``gradient_noise``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_module_monitor.config.plain import PlainFields, any_hints, plain
from lightning_module_monitor.config.rules import ParsedRule, as_tuple, options_of, parse_patterns
from lightning_module_monitor.config.schedule import ParsedSchedule
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.record import ROOT_SITE

LABEL = "gradient_noise"


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
        raise ConfigError(f"{LABEL} is {option!r}; expected true, false, or options, e.g. {{per_module: _root_}}.")
    options = GradientNoise() if option is True else options_of(GradientNoise, option, LABEL, "{per_module: _root_}")
    if not as_tuple(options.per_module):
        raise ConfigError(f"{LABEL}.per_module is empty; expected at least one pattern, e.g. {ROOT_SITE} for the whole model.")
    per_module = parse_patterns(options.per_module, f"{LABEL}.per_module")
    return ParsedRule(label=LABEL, kinds=("gradient",), sites=(re.compile(".*"),), schedule=schedule, per_module=per_module)
