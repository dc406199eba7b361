"""A module and the inputs of one call, in one file: written, read, and run again by itself."""

from __future__ import annotations

import copy
import os
import zipfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_module_monitor.errors import ConfigError, printable
from lightning_module_monitor.health.producer import producer
from lightning_module_monitor.model.names import Namer
from lightning_module_monitor.model.outputs import named_tensors, suffix
from lightning_module_monitor.model.unchanged import RandomStates, unchanged_random_states
from lightning_module_monitor.probes.nonfinite import NonfiniteProbe
from lightning_module_monitor.sinks.store.rewrite import whole_file

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
    """Keyword arguments of the call."""
    random_states: RandomStates | None = None
    """As they were when it was called."""
    autocast: torch.dtype | None = None
    """Dtype of mixed precision, if it ran in that."""


def save(snapshot: Snapshot, path: Path) -> None:
    """Write a snapshot to a file, whole or not at all.

    Raises:
        Exception: Whatever pickle raises for a module of a class that cannot be imported, and the system for the file.
    """
    content = {one.name: getattr(snapshot, one.name) for one in fields(snapshot)}
    content |= {name: _plain(vars(content[name])) for name in _STATES if content[name] is not None}
    with whole_file(path) as temporary:
        torch.save({"format": FORMAT, **content}, temporary)


def load(path: str | os.PathLike[str], *, trust: bool = False) -> Snapshot:
    """Read a snapshot, on the CPU. Unless ``trust``, one that would run code, as a whole module does, is refused.

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


# Run again


def show(path: str, *, trust: bool = False) -> int:
    """Run the module of a snapshot again, and print its inputs and outputs; returns 1 if anything is not finite. See :func:`load`."""
    snapshot = load(path, trust=trust)
    print(printable(f"Step {snapshot.step}, {snapshot.site}: {snapshot.words}"))
    if snapshot.module is None:
        print("The module could not be kept by itself; the batch is here.")
        return _print_tensors("batch", snapshot.batch)
    _print_tensors("input", (snapshot.args, snapshot.kwargs))
    _print_tensors("weight", dict(snapshot.module.named_parameters()))
    return replay(snapshot)


def replay(snapshot: Snapshot) -> int:
    """Run the module of a snapshot, forward and backward; returns 1 if anything is not finite."""
    module = snapshot.module
    assert module is not None
    inputs = [one.requires_grad_() for _path, one in named_tensors((snapshot.args, snapshot.kwargs)) if one.is_floating_point()]
    inside = nn.ModuleDict({"module": module})  # under a root: the probe observes all but the root
    probe = NonfiniteProbe(Namer().module_sites(inside))
    probe.attach()
    try:
        is_mixed = snapshot.autocast is not None
        with unchanged_random_states(torch.device("cpu")), torch.autocast("cpu", dtype=snapshot.autocast, enabled=is_mixed):
            if snapshot.random_states is not None:
                torch.set_rng_state(snapshot.random_states.of_cpu)
            probe.begin_micro_batch()
            # Copies: the module may write into its inputs, and a leaf that requires a gradient does not allow that.
            args, kwargs = copy.deepcopy((snapshot.args, snapshot.kwargs), {id(one): one.clone() for one in inputs})
            output = module(*args, **kwargs)
        found = _print_tensors("output", output)
        outputs = [one for _path, one in named_tensors(output) if one.is_floating_point() and one.requires_grad]
        if not found and outputs:
            # The gradient that arrived then was not kept: one of ones shows where the backward pass breaks.
            probe.begin_backward(outputs[0].detach().sum())
            torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
            found = _print_tensors("gradient of input", [one.grad for one in inputs])
            found |= _print_tensors("gradient of weight", {name: one.grad for name, one in module.named_parameters()})
        inner = producer(probe.observed())
        if inner is not None:
            is_whole = inner.site in ("_root_", "module")
            where = f"It is {snapshot.site} itself" if is_whole else f"Within it, {inner.site.removeprefix('module.')}"
            print(f"{where}: {inner.words}")
    finally:
        probe.close()
    return found


def _print_tensors(label: str, value: object) -> int:
    """A line for each tensor; returns 1 if anything in them is not finite."""
    found = 0
    for path, tensor in named_tensors(value):
        line = f"  {suffix(path, label):32} {tuple(tensor.shape)!s:20} {str(tensor.dtype).removeprefix('torch.'):9}"
        if tensor.is_floating_point() and tensor.numel():
            finite = tensor.detach()[tensor.detach().isfinite()].double()
            limits = f"{finite.min().item():.4g} to {finite.max().item():.4g}" if finite.numel() else "nothing finite"
            num_nan, num_infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
            line += f" {limits:28} {num_nan} NaN, {num_infinite} infinite"
            found |= int(num_nan + num_infinite > 0)
        print(printable(line.rstrip()))
    return found
