"""The options of the callback, parsed once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lightning_module_monitor.config.health_options import ParsedHealth, parse_health
from lightning_module_monitor.config.plain import plain
from lightning_module_monitor.config.rules import as_tuple, check_choice, parse_patterns
from lightning_module_monitor.config.schedule import ParsedSchedule, parse_schedule
from lightning_module_monitor.errors import ConfigError, require
from lightning_module_monitor.kinds import TRAIN
from lightning_module_monitor.sinks.store.paths import journal_path
from lightning_module_monitor.sinks.store.remote import is_url

STAGES = {"train": TRAIN, "validate": "validation", "test": "test", "predict": "predict"}
"""Name of a stage in keys, by the name that Lightning gives it."""

INIT = "init"
"""The reference is the model as it was at the start of the run."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The parsed arguments of ``ModuleMonitorCallback``, which documents them. ``ModuleMonitor`` parses the arguments that both have."""

    arguments: Mapping[str, Any]
    """The arguments in plain containers, by name."""
    every_n_steps: ParsedSchedule
    reference: str | nn.Module | None
    """The origin of the reference; ``None`` if there is no reference."""
    rcc: bool
    save_reference: bool
    attention: bool
    health: ParsedHealth
    """The options ``health`` and ``alerts``."""
    store: bool | str
    report: bool
    callback_metrics: tuple[re.Pattern[str], ...]
    progress_bar: bool
    stages: tuple[str, ...]
    max_logged_keys: int
    max_overhead: float | None
    dry_run: bool

    @classmethod
    def parse(cls, **arguments: Any) -> Options:
        """Parse the arguments of the callback; a wrong value is a ``ConfigError``."""
        plain_arguments = {name: plain(value) for name, value in arguments.items()}
        parsed = {name: parse(plain_arguments[name], name) for name, parse in _PARSERS.items()}
        alerts, has_default_rules = as_tuple(plain_arguments["alerts"]), plain_arguments["rules"] is None
        health = parse_health(plain_arguments["health"], alerts, has_default_rules=has_default_rules)
        if parsed["reference"] is None and parsed["rcc"]:
            parsed["reference"] = INIT
        options = cls(arguments=plain_arguments, health=health, **parsed)
        options._check()
        return options

    def _check(self) -> None:
        """Check options against each other."""
        if not self.callback_metrics and self.progress_bar:
            raise ConfigError("progress_bar is true, and callback_metrics is empty; expected patterns of the keys that the bar shows.")
        if self.report and self.store is False:
            raise ConfigError("report is true, and store is false; expected a store: the report is made from it.")
        if self.report:
            try:
                for module in ("jinja2", "plotly"):
                    require(module, "report")
            except ImportError as error:
                raise ConfigError(f"report is true, and {error}") from error
        has_capture = self.arguments["capture"] is not None
        captures = "capture is given" if has_capture else "capture follows an alert" if self.health.may_capture else ""
        if captures and self.store is False:
            raise ConfigError(f"{captures}, and store is false; expected a store: raw tensors are written to a file beside it.")
        if self.health.is_at_every_step and not self.observes("train"):
            setting = f"health.nonfinite is {self.health.nonfinite!r}"
            raise ConfigError(f"{setting}, and stages has no train; expected train among stages, or nonfinite: warn.")

    def observes(self, stage: str) -> bool:
        """Whether a stage of Lightning (``train``, ``validate``, ``test``, ``predict``) is monitored."""
        return stage in self.stages

    def observes_run(self, stage: str) -> bool:
        """Whether any stage of a run (``fit``, ``validate``, ``test`` or ``predict``) is monitored."""
        return self.observes(stage) or (stage == "fit" and (self.observes("train") or self.observes("validate")))

    def described(self) -> dict[str, Any]:
        """The options in types that JSON has, and the names of the detectors that judge while training, for the store."""
        return {**_in_json(self.arguments), "watched": [*self.health.watched]}


def _parse_flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; expected true or false.")
    return value


def _parse_stages(value: object, name: str) -> tuple[str, ...]:
    stages = ("train",) if value is None else as_tuple(value)
    if not stages:
        raise ConfigError(f"{name} is empty, and nothing would be recorded; expected one or several of {', '.join(STAGES)}.")
    for stage in stages:
        check_choice(stage, STAGES, f"{name} {stage!r} is not a stage")
    return stages


def _parse_reference(value: object, name: str) -> str | nn.Module | None:
    source = os.fspath(value) if isinstance(value, os.PathLike) else value
    if source is not None and not (isinstance(source, str | nn.Module) and source):
        raise ConfigError(f"{name} is {source!r}; expected 'init', the path of a checkpoint, or a module.")
    return source


def _parse_max_overhead(value: object, name: str) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1):
        raise ConfigError(f"{name} is {value!r}; expected a share of the time, more than 0 and less than 1, e.g. 0.02.")
    return value


def _parse_max_logged_keys(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; expected a whole number >= 1.")
    return value


def _parse_store(value: object, name: str) -> bool | str:
    if not isinstance(value, bool | str | os.PathLike):
        raise ConfigError(f"{name} is {value!r}; expected the path of a file, or true or false.")
    if isinstance(value, bool):
        return value
    path = os.fspath(value).removeprefix("file://")
    reason = _why_no_url(path) if is_url(path) else _why_no_file(path)
    if reason:
        shown = repr(value) if len(path) < 150 else f"{path[:60]!r}..."
        raise ConfigError(f"{name} is {shown}, and {reason}; expected the path of a file, e.g. 'runs/monitor.h5', or true or false.")
    return path


def _why_no_url(url: str) -> str:
    """Why no store can be at a URL; empty if one can."""
    folder, _, file = url.partition("://")[2].rpartition("/")
    return "" if folder and file else "that names no file in a folder or bucket"


def _why_no_file(text: str) -> str:
    """Why neither a store can be at a path, nor its journal beside it; empty if they can."""
    if not text.strip():
        return "that is no path"
    try:
        path = Path(text).expanduser()
        blocking = next((part for part in path.parents if part.exists() and not part.is_dir()), None)
        if blocking is not None:
            return f"{str(blocking)!r} is not a folder"
        for file in (journal_path(path), path):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                mode = file.stat().st_mode
                if file == path and not stat.S_ISREG(mode):
                    return "that is a folder" if stat.S_ISDIR(mode) else "that is no plain file"
    except (OSError, RuntimeError, ValueError) as error:  # e.g. a long name, a loop of links, an unknown user, a null character
        return f"that is no path of a file ({error.strerror if isinstance(error, OSError) else error})"
    return "that is a folder" if text.endswith(("/", os.sep)) else ""


_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("rcc", "attention", "progress_bar", "dry_run", "save_reference", "report"), _parse_flag),
    "stages": _parse_stages,
    "reference": _parse_reference,
    "max_overhead": _parse_max_overhead,
    "every_n_steps": functools.partial(parse_schedule, may_be_by_clock=True),
    "max_logged_keys": _parse_max_logged_keys,
    "callback_metrics": parse_patterns,
    "store": _parse_store,
}
"""Function that parses an option, by the name of the option: it gets the value and the name."""


def _in_json(value: object) -> Any:  # noqa: ANN401  # a value of JSON
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _in_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _in_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_json(item) for item in value]
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    return value if value is None or isinstance(value, bool | int | float | str) else getattr(value, "__qualname__", repr(value))
