"""The reference of a run: where it is from, what a checkpoint holds of it, and how a resumed run gets it back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_module_monitor.distributed.ranks import share_values_of_first
from lightning_module_monitor.distributed.shards import is_sharded
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.kernels.elements import in_memory
from lightning_module_monitor.model.copies import (
    differing_tensors,
    frozen_copy,
    lazy_tensors,
    load_weights,
    parameter_copy,
    set_tensors,
    tensors_of,
)
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.trainer.training_reference import run_training_step, silence

INIT, MODULE = "init", "module"
"""Where a reference is from, if it is not from a file: the model as it was, or a module that was handed over."""


class ReferenceOfRun:
    """Makes the reference, hands it to the monitor, and runs it.

    Args:
        source: ``init``, the path of a checkpoint, or a module.
        within: Name of the submodule that it is a sibling of, which it is called beside; ``None``: it is one of the whole, and
            runs its own ``training_step``.
        is_saved: Whether checkpoints hold it.
        messages: Where it is said what a resumed run compares with.
    """

    def __init__(self, source: str | nn.Module, within: str | None, *, is_saved: bool, messages: logging.Logger) -> None:
        self.source = source
        self._within = within
        self._is_saved = is_saved
        self._messages = messages
        self._module: nn.Module | None = None
        """Kept after the run, for a checkpoint that is written then."""
        self.begin()

    def __getstate__(self) -> dict[str, Any]:
        """Without the module: a second set of weights."""
        return {**self.__dict__, "_module": None}

    def begin(self) -> None:
        """Forget the run before, but for its module."""
        self._is_resumed = False
        self._saved: Mapping[str, Any] | None = None
        self._initial: Mapping[str, Tensor] | None = None

    def begin_fit(self, pl_module: LightningModule, monitor: ModuleMonitor) -> None:
        """Keep the values that the model has now, before a checkpoint's come in, if any will: Lightning does not say so yet."""
        self._module = None
        if self.source == INIT:
            self._initial = self._values_now(pl_module, monitor)

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint holds of it, tensors only; ``None``: nothing."""
        # Of what is laid out over ranks each has a part, and one writes the checkpoint.
        if self._module is None or not self._is_saved or any(is_sharded(one) for one in self._module.parameters()):
            return None
        # Of a checkpoint the path is enough.
        return {"source": self._name(), "tensors": tensors_of(self._module) if self._name() in (INIT, MODULE) else {}}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take what the checkpoint of the run that is resumed holds of it."""
        self._saved = state

    def resume(self) -> None:
        """The model has the weights of a checkpoint, also where that knows nothing of the reference."""
        self._is_resumed = True
        if self._module is not None and self._saved is None and self.source == INIT:
            # Strategies that lay parameters out load them after the fit's start.
            self._say_fresh()

    def leave_device(self) -> None:
        """The model leaves its device, and so does this."""
        if self._module is not None:
            self._module.cpu()

    def prepare(self, trainer: Trainer, pl_module: LightningModule, monitor: ModuleMonitor) -> None:
        """Hand the monitor the reference, with the values that a run which is resumed compared with.

        It is copied now, when all that makes a model has had its turn (its own ``setup``, other callbacks); where a
        checkpoint's weights have come in since, it gets back those of before.

        Raises:
            ConfigError: If it cannot be made, or is not of the model's structure.
        """
        reference = trainer.precision_plugin.convert_module(self._made(monitor)).to(pl_module.device)
        if self._initial is not None and differing_tensors(reference, self._initial):
            self._initial = None  # of layers that were made since
        values = self._values_of_a_resumed_run()
        try:
            if values is not None:
                set_tensors(reference, values)
            if trainer.world_size > 1 and not any(is_sharded(one) for one in reference.parameters()):
                # Made from a seed of its own on every rank: a module that was handed over, or a new initialization.
                share_values_of_first(tensors_of(reference).values())
            monitor.set_reference_module(reference, follows=self._within is not None)
        except ValueError as error:
            raise ConfigError(f"reference: {error}") from error
        self._module, self._initial = reference, None

    def run(self, trainer: Trainer, batch: object, batch_idx: int, monitor: ModuleMonitor) -> None:
        """Run it on the batch that the model is about to get."""
        assert isinstance(self._module, LightningModule)
        monitor.run_reference(functools.partial(run_training_step, self._module, trainer, batch, batch_idx))

    def _name(self) -> str:
        return self.source if isinstance(self.source, str) else MODULE

    def _values_now(self, pl_module: LightningModule, monitor: ModuleMonitor) -> Mapping[str, Tensor] | None:
        """A copy of what the reference would be a copy of; ``None`` where that is still to be made."""
        try:
            live = monitor.planner.index.within if monitor.module is not None else pl_module.get_submodule(self._within or "")
        except AttributeError:
            return None
        if lazy_tensors(live):
            return None
        _check_memory(live)
        return {name: tensor.clone() for name, tensor in tensors_of(live).items()}

    def _made(self, monitor: ModuleMonitor) -> nn.Module:
        """A sibling of what is watched."""
        live = monitor.planner.index.within
        if any(is_sharded(one) for one in live.parameters()):
            return self._made_of_parts(live, monitor)
        if isinstance(self.source, nn.Module):
            # Theirs stays as it is.
            live = self.source
        if self._within is None and not isinstance(live, LightningModule):
            expected = f"expected a LightningModule as the model, or module, the name of the submodule that a {type(live).__name__} is of"
            raise ConfigError(f"reference is a {type(live).__name__}, and has no training_step; {expected}.")
        _check_memory(live)
        reference = frozen_copy(live, self._within or "")
        if isinstance(self.source, str) and self.source != INIT:
            load_weights(reference, self.source, self._within)
        if isinstance(reference, LightningModule):
            silence(reference)
        return reference

    def _made_of_parts(self, live: nn.Module, monitor: ModuleMonitor) -> nn.Module:
        """Of a model that is laid out over ranks: its parameters, each rank's part."""
        why = "the model is laid out over ranks"
        if self.source != INIT:
            raise ConfigError(f"reference is {self._name()!r}, and {why}; expected reference: init.")
        needed_by = monitor.planner.first_of_reference(running=True)
        if needed_by is not None:
            raise ConfigError(f"{needed_by} needs a reference that runs, and {why}; expected no kind but parameter_difference.")
        return parameter_copy(live)

    def _values_of_a_resumed_run(self) -> Mapping[str, Tensor] | None:
        """The reference's values of before; ``None`` if those that it has are right. Says where they are not of the same."""
        if self._saved is not None and self._saved["source"] == self._name():
            return self._saved["tensors"] or None
        if self._saved is not None:
            self._messages.warning("The run that is resumed had reference %r; this one has %r.", self._saved["source"], self._name())
        elif self._is_resumed and self.source == INIT:
            self._say_fresh()
        return self._initial if self._is_resumed else None

    def _say_fresh(self) -> None:
        fresh = "a new initialization, which is the first run's only if the seed is the same"
        what = "the checkpoint's weights" if self._initial is None and self._module is None else fresh
        self._messages.warning("The checkpoint holds no reference of this callback's: differences are from %s.", what)


def _check_memory(module: nn.Module) -> None:
    """Check that all tensors of a module that is to be copied have memory: torch would read on, and end the process.

    Raises:
        ConfigError: If one has not; names it.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        try:
            in_memory(tensor)
        except ValueError as error:
            cure = "Bring it back before the fit, or give a module as the reference"
            raise ConfigError(f"reference is a copy of the model, and {name} cannot be copied ({error}). {cure}.") from error
