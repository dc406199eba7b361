"""The options of a width check, parsed and validated."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_module_monitor.config.plain import plain
from lightning_module_monitor.config.rules import as_tuple, check_choice, is_whole, parse_count
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.lightning_packages import packages
from lightning_module_monitor.suggestions import nearest
from lightning_module_monitor.width_check.expectations import TERMS, Parametrization, parse_parametrization

DEFAULT_TERMS = ("effective_update", "propagating_update")

TRAINER_OPTIONS: Mapping[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "max_epochs": -1,
}
"""Options of the Trainer that users cannot set: no files, and no loop except training."""

_RESERVED = (*TRAINER_OPTIONS, "max_steps", "max_time", "callbacks", "default_root_dir", "fast_dev_run", "barebones")


@dataclass(frozen=True)
class Settings:
    """The valid options of :func:`~lightning_module_monitor.coordinate_check`."""

    widths: tuple[int, ...]
    seeds: tuple[int, ...]
    steps: int
    parametrization: Parametrization
    terms: tuple[str, ...]
    tolerance: float
    trainer: Mapping[str, Any]

    @classmethod
    def parse(cls, **options: Any) -> Settings:
        """Check all options, given by name.

        Raises:
            ConfigError: If one is wrong.
        """
        settings = cls(**plain(options))
        if not isinstance(settings.tolerance, int | float) or not 0 < settings.tolerance < math.inf:
            raise ConfigError(f"tolerance is {settings.tolerance!r}; expected a number > 0, e.g. 0.25.")
        return replace(
            settings,
            widths=_parse_widths(settings.widths),
            seeds=_parse_seeds(settings.seeds),
            steps=parse_count(settings.steps, "steps", ": before the first step nothing has changed"),
            parametrization=parse_parametrization(settings.parametrization),
            terms=_parse_terms(settings.terms),
            trainer=_parse_trainer(settings.trainer),
        )


def _parse_widths(widths: object) -> tuple[int, ...]:
    parsed = _whole_numbers(widths)
    if parsed is None or min(parsed, default=1) < 1:
        raise ConfigError(f"widths is {widths!r}; expected whole numbers > 0, e.g. [128, 256, 512, 1024].")
    if len(parsed) < 2:
        raise ConfigError(f"widths is {widths!r}; expected at least two, e.g. [128, 256, 512, 1024]: an exponent is a slope.")
    if list(parsed) != sorted(set(parsed)):
        raise ConfigError(f"widths is {widths!r}; expected every width once, increasing: {sorted(set(parsed))}.")
    return parsed


def _parse_seeds(seeds: object) -> tuple[int, ...]:
    parsed = tuple(range(seeds)) if is_whole(seeds) else _whole_numbers(seeds)
    if not parsed or min(parsed) < 0 or len(set(parsed)) < len(parsed):
        raise ConfigError(f"seeds is {seeds!r}; expected a number of seeds >= 1, or a list of seeds that differ.")
    return parsed


def _parse_terms(terms: object) -> tuple[str, ...]:
    parsed = as_tuple(terms)
    for term in parsed:
        check_choice(term, TERMS, f"terms {term!r} is not a term")
    if not parsed:
        raise ConfigError(f"terms is empty; expected at least one of {', '.join(TERMS)}.")
    return parsed


def _parse_trainer(trainer: object) -> dict[str, Any]:
    if trainer is None:
        return {}
    if not isinstance(trainer, Mapping):
        raise ConfigError(f"trainer is {trainer!r}; expected options of the Trainer by name, e.g. {{'precision': 'bf16-mixed'}}.")
    known = inspect.signature(packages()[0].Trainer).parameters
    for name in trainer:
        if name in _RESERVED:
            raise ConfigError(f"trainer has {name!r}, which the check sets itself; leave it out.")
        if name not in known:
            raise ConfigError(f"trainer has {name!r}, which is no option of the Trainer{nearest(str(name), set(known) - set(_RESERVED))}")
    return dict(trainer)


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    """A number or several as a tuple; ``None`` for anything else."""
    numbers: list[Any] = value if isinstance(value, list) else [value]
    return tuple(numbers) if all(map(is_whole, numbers)) else None
