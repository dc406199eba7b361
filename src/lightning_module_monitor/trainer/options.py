"""The options of the callback, and their check."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from lightning_module_monitor.config.plain import PlainFields
from lightning_module_monitor.config.rules import Capture, GradientFlow, Rule, as_tuple, check_choice, parse_patterns
from lightning_module_monitor.config.schedule import ParsedSchedule, Schedule, parse_schedule
from lightning_module_monitor.errors import ConfigError, require
from lightning_module_monitor.health.options import IGNORE, Alert, Health, ParsedHealth, parse_health
from lightning_module_monitor.record import TRAIN

STAGES = {"train": TRAIN, "validate": "validation", "test": "test", "predict": "predict"}
"""Stage in a key by Lightning's name of it."""

INIT = "init"
"""The reference is the model as it was at the start of the run."""


@dataclass(frozen=True, kw_only=True)
class Options(PlainFields):
    """The arguments of ``ModuleMonitorCallback``, which documents them, in plain containers.

    Options that ``ModuleMonitor`` and health have too are checked there.

    Raises:
        ConfigError: If a value is wrong.
    """

    every_n_steps: Schedule
    module: str | None
    exclude: str | list[str] | None
    rules: Sequence[Rule | dict[str, Any]] | None
    reference: str | os.PathLike[str] | nn.Module | None
    rcc: bool
    save_reference: bool
    attention: bool
    gradient_flow: GradientFlow | dict[str, Any] | None
    capture: Capture | dict[str, Any] | None
    health: Health | dict[str, Any] | bool | str | None
    alerts: list[Alert | dict[str, Any]] | dict[str, Any] | str | None
    store: bool | str
    report: bool
    callback_metrics: str | list[str] | None
    progress_bar: bool
    stages: str | list[str] | None
    prefix: str
    max_logged_keys: int
    max_overhead: float | None
    compiled: str
    on_error: str
    dry_run: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rcc", "attention", "progress_bar", "dry_run", "save_reference", "report"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected true or false.")
        if self.stages is not None and not as_tuple(self.stages):
            raise ConfigError(f"stages is empty, and nothing would be recorded; expected one or several of {', '.join(STAGES)}.")
        for stage in as_tuple(self.stages):
            check_choice(stage, STAGES, f"stages {stage!r} is not a stage")
        source, limit, _schedule = self.source, self.max_overhead, self.schedule
        if source is not None and not (isinstance(source, str | nn.Module) and source):
            raise ConfigError(f"reference is {source!r}; expected 'init', the path of a checkpoint, or a module.")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < 1):
            raise ConfigError(f"max_overhead is {limit!r}; expected a share of the time, more than 0 and less than 1, e.g. 0.02.")
        if not isinstance(self.max_logged_keys, int) or self.max_logged_keys < 1:
            raise ConfigError(f"max_logged_keys is {self.max_logged_keys!r}; expected a number >= 1.")
        if not self.metric_patterns and self.progress_bar:
            raise ConfigError("progress_bar is true, and callback_metrics is empty; expected patterns of the keys that the bar shows.")
        self._check_store()
        if self.parsed_health.is_at_every_step and not self.observes("train"):
            what = f"health.nonfinite is {self.parsed_health.nonfinite!r}"
            raise ConfigError(f"{what}, and stages has no train; expected train among stages, or nonfinite: warn.")

    @cached_property
    def parsed_health(self) -> ParsedHealth:
        """The checked ``health`` and ``alerts``."""
        return parse_health(self.health, as_tuple(self.alerts), has_default_rules=self.rules is None)

    @cached_property
    def metric_patterns(self) -> tuple[re.Pattern[str], ...]:
        """The checked ``callback_metrics``."""
        return parse_patterns(self.callback_metrics, "callback_metrics")

    @cached_property
    def schedule(self) -> ParsedSchedule:
        """The checked ``every_n_steps``."""
        return parse_schedule(self.every_n_steps, "every_n_steps", may_be_by_clock=True)

    @property
    def source(self) -> str | nn.Module | None:
        """The origin of the reference; ``None`` if there is no reference."""
        if self.reference is None and self.rcc:
            return INIT
        return os.fspath(self.reference) if isinstance(self.reference, os.PathLike) else self.reference

    def observes(self, stage: str) -> bool:
        """Whether one of Lightning's stages is monitored."""
        return stage in (as_tuple(self.stages) or ("train",))

    def observes_run(self, stage: str) -> bool:
        """Whether anything of Lightning's ``fit``, ``validate``, ``test`` or ``predict`` is monitored."""
        return self.observes(stage) or (stage == "fit" and (self.observes("train") or self.observes("validate")))

    def described(self) -> dict[str, Any]:
        """The options in types that JSON has, and the names of the watches, for the store."""
        given = {field.name: _in_json(getattr(self, field.name)) for field in dataclasses.fields(self)}
        nonfinite = ["nonfinite"] if self.parsed_health.nonfinite != IGNORE else []
        return {**given, "watched": [*nonfinite, *self.parsed_health.recorded]}

    def _check_store(self) -> None:
        store = self.store
        if not isinstance(store, bool | str | os.PathLike):
            raise ConfigError(f"store is {store!r}; expected the path of a file, or true or false.")
        if not isinstance(store, bool):
            path = Path(store).expanduser()
            blocking = next((part for part in path.parents if part.exists() and not part.is_dir()), None)
            if not store or path.is_dir() or blocking is not None:
                why = f"{str(blocking)!r} is not a folder" if blocking else "that is a folder" if store else "that is no path"
                raise ConfigError(f"store is {store!r}, and {why}; expected the path of a file, e.g. 'runs/monitor.h5', or true or false.")
        if self.report and store is False:
            raise ConfigError("report is true, and store is false; expected a store: the report is made from it.")
        if self.report:
            try:
                for module in ("jinja2", "plotly"):
                    require(module, "report")
            except ImportError as error:
                raise ConfigError(f"report is true, and {error}") from error
        captures = "capture is given" if self.capture is not None else "capture follows an alert" if self.parsed_health.may_capture else ""
        if captures and store is False:
            raise ConfigError(f"{captures}, and store is false; expected a store: raw tensors are written to a file beside it.")


def _in_json(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _in_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _in_json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_in_json(one) for one in value]
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    return value if value is None or isinstance(value, bool | int | float | str) else getattr(value, "__qualname__", repr(value))
