"""A module and the inputs of one call, in one file: enough to run it again by itself."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.model.unchanged import RandomStates

FORMAT = 2
"""Raise it with every change that a reader has to handle."""

_STATES = ("batch_random_states", "random_states")


@dataclass(frozen=True)
class Snapshot:
    """The call in which a module made a non-finite value."""

    step: int
    site: str
    """Name of the module; ``_root_`` where it was the LightningModule's own code, or the batch: then there is no module here."""
    words: str
    """The finding."""
    is_forward: bool
    """Whether it was in the forward pass."""
    batch: Any
    """The batch of the micro-batch, as ``training_step`` got it."""
    batch_random_states: RandomStates
    """As they were before it was run."""
    module: nn.Module | None = None
    """With the weights that it had; ``None`` where it could not be run again."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    """What it was called with."""
    random_states: RandomStates | None = None
    """As they were when it was called."""
    autocast: torch.dtype | None = None
    """Of mixed precision, if it ran in that."""


def save(snapshot: Snapshot, path: Path) -> None:
    """Write a snapshot to a file, whole or not at all.

    Raises:
        Exception: Whatever pickle raises for a module of a class that cannot be imported, and the system for the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    content = {one.name: getattr(snapshot, one.name) for one in fields(snapshot)}
    content |= {name: _plain(vars(content[name])) for name in _STATES if content[name] is not None}
    try:
        torch.save({"format": FORMAT, **content}, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], *, trust: bool = False) -> Snapshot:
    """Read a snapshot, on the CPU.

    Args:
        path: The file.
        trust: Whether code of the file may run, as a whole module in it makes it. If not, one that holds more than tensors and plain
            containers is refused.

    Raises:
        ConfigError: If there is none that this version can read.
    """
    if not Path(path).is_file():
        raise ConfigError(f"There is no snapshot at {str(path)!r}; expected a file that health.snapshot has written.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=not trust)
    except (ImportError, AttributeError) as error:
        remedy = "expected to be run where the modules of its classes can be imported, with PYTHONPATH set to where they are"
        if "__main__" in str(error):
            remedy = "it was defined in the script that trained; expected it in a module of its own, from which the script imports it"
        raise ConfigError(f"{str(path)!r} has a class that is not found here ({error}); {remedy}.") from error
    except Exception as error:  # pickle does not document what other files raise
        if isinstance(error, UnpicklingError) and not trust and zipfile.is_zipfile(path):
            why = "holds more than tensors and plain containers, e.g. a whole module, whose code would run"
            raise ConfigError(f"{str(path)!r} {why}. If the file is your own, add --trust (load: trust=True).") from error
        raise ConfigError(f"{str(path)!r} is no snapshot ({error}); expected a file that health.snapshot has written.") from error
    version = content.pop("format", None) if isinstance(content, dict) else None
    if version != FORMAT:
        raise ConfigError(f"{str(path)!r} has snapshot format {version!r}; this version reads {FORMAT}.")
    try:
        states: dict[str, Any] = {name: RandomStates(**content[name]) for name in _STATES if content.get(name) is not None}
        return Snapshot(**(content | states))
    except TypeError as error:
        raise ConfigError(f"{str(path)!r} is a damaged snapshot ({error}); expected a file that health.snapshot has written.") from error


def _plain(value: Any) -> Any:  # noqa: ANN401  # of the same structure, of types that pickle reads without running code
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
