"""The reference of a run: how it is made, saved in a checkpoint and restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from lightning_module_monitor.distributed.ranks import share_values_of_first
from lightning_module_monitor.distributed.shards import is_laid_out
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.kernels.elements import in_memory
from lightning_module_monitor.lightning_packages import LightningModule, messages
from lightning_module_monitor.model import copies
from lightning_module_monitor.trainer.laid_out import LaidOutCopy
from lightning_module_monitor.trainer.options import INIT
from lightning_module_monitor.trainer.run import Run
from lightning_module_monitor.trainer.silent_copy import run_training_step, silence

MODULE = "module"
"""Origin of a reference that the user has handed over as a module."""


class ReferenceController:
    """Makes the reference of a fit, sets it in the monitor, and runs it; made in ``setup``.

    With the option ``module`` the reference is called beside that submodule; else it is one of the whole model, and runs its own
    ``training_step``. The present values of the model are copied, if they exist: a checkpoint's may replace them before the first step.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._monitor = run.monitor
        self._source = run.options.reference
        self._name = self._source if isinstance(self._source, str) else MODULE
        self._within: str | None = run.options.given["module"]
        self._module: nn.Module | None = None
        """The reference, from the start of the fit on."""
        self._wrapper: nn.Module | None = None
        """What runs it under FSDP1."""
        self._is_resumed = False
        self._is_laid_out = False
        """Whether each rank has parts of the reference, as it has of the model."""
        self._saved: Mapping[str, Any] | None = None
        """What the checkpoint of the resumed run has of it."""
        self._initial = self._present_values() if self._source == INIT else None
        """The values that the model had, until the reference has them."""
        needs_layout = self._source == INIT and run.recipe.first_of_reference(running=True) is not None
        self._unconfigured = LaidOutCopy.of(run.trainer, run.module) if needs_layout else None
        """A copy of the model from before it was laid out over ranks."""

    def _present_values(self) -> Mapping[str, Tensor] | None:
        module, within = self._run.module, self._within or ""
        try:
            live = self._run.index.within if self._monitor.module is not None else module.get_submodule(within)
        except AttributeError:  # it is made later
            return None
        if copies.lazy_tensors(live):
            return None
        _check_memory(live)
        return {name: tensor.clone() for name, tensor in copies.tensors_of(live).items()}

    def state(self) -> dict[str, Any] | None:
        """The reference in a checkpoint, as tensors only; ``None``: nothing."""
        # Each rank has a part of a sharded one, and one rank writes the checkpoint.
        if self._module is None or not self._run.options.save_reference or self._is_laid_out:
            return None
        # The path of a file is enough.
        return {"source": self._name, "tensors": copies.tensors_of(self._module) if self._name in (INIT, MODULE) else {}}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take what :meth:`state` gave for the checkpoint of the resumed run."""
        self._saved = state

    def resume(self) -> None:
        """The model has the weights of a checkpoint, also of one without this callback."""
        self._is_resumed = True
        if self._module is not None and self._saved is None and self._source == INIT:
            # Strategies that lay parameters out load them after the fit's start.
            self._warn_of_fresh()

    def leave_device(self) -> None:
        """Move the reference to the CPU, as Lightning does with the model; FSDP1 moves none, and it is released."""
        if self._wrapper is not None:
            self._monitor.remove_reference_module()
            self._module = self._wrapper = None
        if self._module is not None:
            self._module.cpu()

    def prepare(self) -> None:
        """Make the reference and set it in the monitor; that of a resumed run gets the values that were compared with before.

        It is copied after everything that changes a model (its own ``setup``, other callbacks). If the weights of a checkpoint were loaded
        since, it gets back those of before.

        Raises:
            ConfigError: If it cannot be made, or does not have the model's structure.
        """
        trainer, reference = self._run.trainer, self._made()
        if not self._is_laid_out:
            reference = trainer.precision_plugin.convert_module(reference).to(self._run.module.device)
        if self._initial is not None and copies.differing_tensors(reference, self._initial):
            self._initial = None  # of layers that were made since
        values = self._values_of_resumed_run()
        try:
            if values is not None:
                copies.set_tensors(reference, values)
            if trainer.world_size > 1 and not self._is_laid_out:
                # A module of the user's, or a new initialization, may have another seed on each rank.
                share_values_of_first(copies.tensors_of(reference).values())
            self._monitor.set_reference_module(reference, follows=self._within is not None, wrapper=self._wrapper)
        except ValueError as error:
            raise ConfigError(f"reference: {error}") from error
        self._module, self._initial, self._unconfigured = reference, None, None

    def run(self, batch: object, batch_idx: int) -> None:
        """Run the reference on the batch that the model is about to get."""
        reference = cast(LightningModule, self._module)  # it has a training_step
        self._run.engine.run_reference(lambda: run_training_step(reference, self._run.trainer, batch, batch_idx, self._wrapper))

    def _made_of_shards(self) -> nn.Module:
        """The reference of a model that is laid out over ranks: laid out in the same way, or, if it does not have to run, its parameters.

        Raises:
            ConfigError: If it cannot be made.
        """
        live, why = self._run.index.within, "the model is laid out over ranks"
        if self._source != INIT:
            raise ConfigError(f"reference is {self._name!r}, and {why}; expected reference: init.")
        needed_by = self._run.recipe.first_of_reference(running=True)
        if needed_by is None:
            return copies.parameter_copy(live)
        laid_out = self._unconfigured
        if laid_out is None or self._run.planner.shares_input:
            expected = "expected a model that FSDP alone lays out, and not before this fit"
            raise ConfigError(f"{needed_by} needs a reference that runs, and {why}; {expected}, or no kind but parameter_difference.")
        laid_out.lay_out(self._run.trainer, self._run.module)
        silence(laid_out.module)
        self._wrapper = laid_out.wrapper
        reference = laid_out.module.get_submodule(self._within or "")
        try:
            # By its own names: activation checkpointing may have wrapped parts of the model.
            copies.set_tensors(reference, dict(zip(copies.tensors_of(reference), copies.tensors_of(live).values(), strict=True)))
        except ValueError as error:
            expected = "expected a configure_model and an auto_wrap_policy that do the same with a copy"
            raise ConfigError(f"reference: the copy is not laid out as the model is ({error}); {expected}.") from error
        return reference

    def _made(self) -> nn.Module:
        """A new reference."""
        live = self._run.index.within
        self._is_laid_out = is_laid_out(live)
        if self._is_laid_out:
            return self._made_of_shards()
        if isinstance(self._source, nn.Module):
            # It is copied too: the user's module stays as it is.
            live = self._source
        if self._within is None and not callable(getattr(live, "training_step", None)):
            expected = f"expected a LightningModule as the model, or module, the name of the submodule that a {type(live).__name__} is of"
            raise ConfigError(f"reference is a {type(live).__name__}, and has no training_step; {expected}.")
        _check_memory(live)
        reference = copies.frozen_copy(live, self._within or "")
        if isinstance(self._source, str) and self._source != INIT:
            copies.load_weights(reference, self._source, self._within)
        silence(reference)
        return reference

    def _values_of_resumed_run(self) -> Mapping[str, Tensor] | None:
        """The earlier values of the reference; ``None`` if its present ones are right. Warns if the run compares with others."""
        if self._saved is not None and self._saved["source"] == self._name:
            return self._saved["tensors"] or None
        if self._saved is not None:
            messages.warning("The run that is resumed had reference %r; this one has %r.", self._saved["source"], self._name)
        elif self._is_resumed and self._source == INIT:
            self._warn_of_fresh()
        return self._initial if self._is_resumed else None

    def _warn_of_fresh(self) -> None:
        fresh = "a new initialization, which is the first run's only if the seed is the same"
        what = "the checkpoint's weights" if self._initial is None and self._module is None else fresh
        messages.warning("The checkpoint holds no reference of this callback's: differences are from %s.", what)


def _check_memory(module: nn.Module) -> None:
    """Check that all tensors of a module have memory: torch would read past the end of one that has not, and the process would die.

    Raises:
        ConfigError: If one has not; names it.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        try:
            in_memory(tensor)
        except ValueError as error:
            cure = "Bring it back before the fit, or give a module as the reference"
            raise ConfigError(f"reference is a copy of the model, and {name} cannot be copied ({error}). {cure}.") from error
