"""One short training of the width check, which restores all global state."""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from lightning_module_monitor.callback import ModuleMonitorCallback
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.lightning_packages import Callback, LightningDataModule, LightningModule, Trainer, is_a, package_of
from lightning_module_monitor.model.outputs import named_tensors
from lightning_module_monitor.model.unchanged import unchanged_random_states
from lightning_module_monitor.trainer.checks import makes_layers_late
from lightning_module_monitor.width_check.layers import LayerAtWidth, describe
from lightning_module_monitor.width_check.settings import TRAINER_OPTIONS, Settings

Data: TypeAlias = "Iterable[Any] | LightningDataModule | None"


class _Batches(list[Any]):
    """Batches in memory as a single loader: a Trainer reads a plain list as a list of loaders."""


def as_loader(data: Data) -> Data:
    """The data; a list of batches becomes a single loader. Batches contain tensors, loaders do not."""
    if not isinstance(data, list | tuple) or not data:
        return data
    return _Batches(data) if all(next(named_tensors(batch), None) is not None for batch in data) else data


class _StopWithoutBatches(Callback):
    """Ends a training that has no more data: Lightning would begin empty epochs for ever."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_batches = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._has_batches = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop |= not self._has_batches


@dataclass(frozen=True)
class Training:
    """The measurements of one training."""

    values: Mapping[str, float]
    """Value by key, of the network after ``steps`` steps."""
    layers: Mapping[str, LayerAtWidth]
    """The layers by name."""


def train(make_module: Callable[[int], LightningModule], data: Data, width: int, seed: int, settings: Settings) -> Training:
    """Train a network of one width, and measure it. Every generator is seeded before the module is made, and again before training.

    Raises:
        ConfigError: If ``make_module`` returns no module, or a module with manual optimization, or if the training ended early.
        MonitorError: If a value could not be measured.
    """
    with ExitStack() as undo:
        undo.enter_context(_unchanged_randomness())
        for generator in _generators(data):
            undo.callback(generator.set_state, generator.get_state())
        folder = undo.enter_context(tempfile.TemporaryDirectory())
        module = _make(make_module, width, seed)
        package = package_of(module)
        logger = logging.getLogger(package.__name__)  # every Trainer logs the devices
        undo.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.WARNING)
        # Again: wide networks draw more numbers than narrow ones; the order of batches must not depend on it.
        _seed(seed)
        # The user's callbacks write files, and expect metrics of a validation that does not run.
        module.configure_callbacks = list  # type: ignore[method-assign]
        steps = settings.steps
        monitor = ModuleMonitorCallback([steps], rules=[], rcc=True, save_reference=False, store=False, on_error="raise")
        options = {"devices": 1, **settings.trainer, **TRAINER_OPTIONS, "max_steps": steps + 1, "default_root_dir": folder}
        trainer = package.Trainer(**options, callbacks=[monitor, _StopWithoutBatches()])
        if is_a(data, "LightningDataModule"):
            undo.callback(setattr, data, "trainer", getattr(data, "trainer", None))
            trainer.fit(module, datamodule=data)
        else:
            trainer.fit(module, data)
        if monitor.last_record is None:
            cure = "give more batches, which every training can read again"
            raise ConfigError(f"Training at width {width} ended after {trainer.global_step} steps; expected {steps + 1}: {cure}.")
        return Training(monitor.last_record.values, describe(module, trainer.optimizers))


def check_width_is_used(make_module: Callable[[int], LightningModule], settings: Settings) -> None:
    """Make the narrowest and the widest network, before the first training.

    Raises:
        ConfigError: If all their parameters have the same shapes, or ``make_module`` returns no module that can be checked.
    """
    narrow, wide = settings.widths[0], settings.widths[-1]
    with _unchanged_randomness():
        modules = [_make(make_module, width, settings.seeds[0]) for width in (narrow, wide)]
    if any(map(makes_layers_late, modules)):
        return
    shapes = [[None if is_lazy(parameter) else parameter.shape for parameter in module.parameters()] for module in modules]
    if shapes[0] == shapes[1] and None not in shapes[0]:
        raise ConfigError(f"Every parameter has the same shape at widths {narrow} and {wide}; expected make_module to use the width.")


def _make(make_module: Callable[[int], LightningModule], width: int, seed: int) -> LightningModule:
    _seed(seed)
    module = make_module(width)
    if not is_a(module, "LightningModule"):
        raise ConfigError(f"make_module({width}) returned a {type(module).__name__}; expected a LightningModule.")
    if not module.automatic_optimization:
        raise ConfigError(f"make_module({width}) returned a module with manual optimization; expected automatic optimization.")
    return module


@contextmanager
def _unchanged_randomness() -> Iterator[None]:
    # On every device: seeding affects all of them.
    with unchanged_random_states(torch.device("cpu")), torch.random.fork_rng(range(torch.cuda.device_count())):
        yield


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _generators(data: Data) -> list[torch.Generator]:
    """The generators of a loader, which decide its order of batches."""
    parts = [data, data.sampler, data.batch_sampler] if isinstance(data, DataLoader) else []
    generators = [getattr(part, "generator", None) for part in parts]
    return list({generator for generator in generators if isinstance(generator, torch.Generator)})
