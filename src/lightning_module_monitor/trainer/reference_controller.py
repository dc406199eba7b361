"""The reference of a run: how it is made, also of shards, saved in a checkpoint and restored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from lightning_module_monitor.distributed.ranks import share_values_of_first
from lightning_module_monitor.distributed.shards import is_laid_out
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.kernels.elements import in_memory
from lightning_module_monitor.lightning_packages import LightningModule, Trainer, is_a, messages
from lightning_module_monitor.model import copies
from lightning_module_monitor.model.compiled import take_out_compiled_code
from lightning_module_monitor.model.names import is_fsdp_wrapper
from lightning_module_monitor.model.unchanged import unchanged_random_states
from lightning_module_monitor.silent_copy import attach, run_training_step, silence
from lightning_module_monitor.trainer.options import INIT
from lightning_module_monitor.trainer.run import Run

MODULE = "module"
"""Origin of a reference that the user has passed as a module."""

_NEW_VALUES = "a new initialization, which is the first run's only if the seed is the same"


@dataclass(eq=False)
class ReferenceController:
    """The reference of a fit, which is set in the monitor."""

    run: Run
    source: str
    """``init``, ``module`` or the path of a checkpoint."""
    module: nn.Module
    is_restored: bool
    """Whether the checkpoint of the resumed run held it, which a strategy may load after the start of the fit."""
    is_laid_out: bool = False
    """Whether each rank has a part of it, as it has a part of the model."""
    wrapper: nn.Module | None = None
    """The unit that runs it under FSDP1."""

    def run_on(self, batch: object, batch_idx: int) -> None:
        """Run the reference on a batch, before the model gets it."""
        module = cast(LightningModule, self.module)  # it has a training_step
        self.run.engine.run_reference(lambda: run_training_step(module, self.run.trainer, batch, batch_idx, self.wrapper))

    def state(self) -> dict[str, Any]:
        """The entries of a checkpoint: the reference, as tensors only, if the checkpoint holds it."""
        # One rank writes the checkpoint, and has only a part of a sharded reference.
        if not self.run.options.save_reference or self.is_laid_out:
            return {}
        # For a reference from a file, the path is enough.
        tensors = copies.tensors_of(self.module) if self.source in (INIT, MODULE) else {}
        return {"reference": {"source": self.source, "tensors": tensors}}

    def note_checkpoint(self) -> None:
        """A checkpoint's weights were loaded after the start of the fit, as strategies do that lay parameters out."""
        if self.source == INIT and not self.is_restored:
            _warn_of_new_values(_NEW_VALUES)

    def leave_device(self) -> None:
        """Move the reference to the CPU, as Lightning does with the model; FSDP1 cannot move it, so the monitor releases it."""
        if self.wrapper is not None:
            self.run.monitor.remove_reference_module()
        else:
            self.module.cpu()


class ReferenceOrigin:
    """Makes the reference of a fit; created in ``setup``, and used once, when the first batch of training begins.

    With the option ``module`` the reference is called beside that submodule; else it is a copy of the whole model, and runs its own
    ``training_step``. It holds a copy of the model's present values, if there are any: a checkpoint may replace them before the first
    step.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._source = run.options.reference
        self._name = self._source if isinstance(self._source, str) else MODULE
        self._within: str | None = run.options.arguments["module"]
        self._saved: list[Mapping[str, Any]] = []
        """The reference in the checkpoint of the resumed run, if there is one."""
        self._is_resumed = False
        self._initial = self._present_values() if self._source == INIT else {}
        """The values of the model; empty if it does not exist yet."""
        runs = self._source == INIT and run.recipe.first_needing_reference(running=True) is not None
        will_lay_out = is_a(run.trainer.strategy, "FSDPStrategy", "ModelParallelStrategy") and not is_laid_out(run.module)
        self._unconfigured = LaidOutCopy(run.trainer.strategy, run.module) if runs and will_lay_out else None
        """A copy of the model from before it is laid out over ranks."""

    def _present_values(self) -> Mapping[str, Tensor]:
        module, within = self._run.module, self._within or ""
        try:
            live = self._run.planner.index.within if self._run.monitor.module is not None else module.get_submodule(within)
        except AttributeError:  # the submodule does not exist yet
            return {}
        if copies.lazy_tensors(live):
            return {}
        _check_memory(live)
        return {name: tensor.clone() for name, tensor in copies.tensors_of(live).items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the state of the resumed run, which may hold a reference."""
        self._saved = [state["reference"]] if "reference" in state else []

    def state(self) -> dict[str, Any]:
        """That reference, for a checkpoint from before the first batch."""
        return {"reference": self._saved[0]} if self._saved and self._run.options.save_reference else {}

    def note_checkpoint(self) -> None:
        """A checkpoint's weights were loaded, possibly from a run without this callback."""
        self._is_resumed = True

    def make(self) -> ReferenceController:
        """Make the reference and set it in the monitor; the reference of a resumed run gets the values of the earlier run.

        It is copied after everything that changes a model (its own hooks up to the first batch, other callbacks). If the weights of a
        checkpoint were loaded since ``setup``, it gets the values of the model from before.

        Raises:
            ConfigError: If it cannot be made, or does not have the model's structure.
        """
        run, trainer, wrapper = self._run, self._run.trainer, None
        has_shards = is_laid_out(run.planner.index.within)
        if has_shards:
            reference, wrapper = self._made_of_shards()
        else:
            reference = trainer.precision_plugin.convert_module(self._copied()).to(run.module.device)
        values = self._earlier_values(reference)
        try:
            if values:
                copies.set_tensors(reference, values)
            if trainer.world_size > 1 and not has_shards:
                # The user's module or a new initialization may differ between ranks, which may have different seeds.
                share_values_of_first(copies.tensors_of(reference).values())
            run.monitor.set_reference_module(reference, follows=self._within is not None, wrapper=wrapper)
        except ValueError as error:
            raise ConfigError(f"reference: {error}") from error
        return ReferenceController(run, self._name, reference, bool(self._saved), has_shards, wrapper)

    def _copied(self) -> nn.Module:
        """A frozen copy of the model or of the user's module; with the weights of the file, if there is one."""
        # The user's module is copied too, and stays as it is.
        live = self._source if isinstance(self._source, nn.Module) else self._run.planner.index.within
        if self._within is None and not callable(getattr(live, "training_step", None)):
            expected = f"expected a LightningModule as the model, or module, the name of the submodule that a {type(live).__name__} is of"
            raise ConfigError(f"reference is a {type(live).__name__}, and has no training_step; {expected}.")
        _check_memory(live)
        reference = copies.frozen_copy(live, self._within or "")
        if isinstance(self._source, str) and self._source != INIT:
            copies.load_weights(reference, self._source, self._within)
        silence(reference)
        return reference

    def _made_of_shards(self) -> tuple[nn.Module, nn.Module | None]:
        """The reference of a model that is laid out over ranks, and its unit of FSDP1; only its parameters, if it does not have to run."""
        live, reason = self._run.planner.index.within, "the model is laid out over ranks"
        if self._source != INIT:
            raise ConfigError(f"reference is {self._name!r}, and {reason}; expected reference: init.")
        needed_by = self._run.recipe.first_needing_reference(running=True)
        if needed_by is None:
            return copies.parameter_copy(live), None
        laid_out = self._unconfigured
        if laid_out is None or self._run.planner.shares_input:
            expected = "expected a model that FSDP alone lays out, and not before this fit"
            raise ConfigError(f"{needed_by} needs a reference that runs, and {reason}; {expected}, or no kind but parameter_difference.")
        laid_out.lay_out(self._run.trainer, self._run.module)
        silence(laid_out.module)
        reference = laid_out.module.get_submodule(self._within or "")
        try:
            # By the names of the copy: activation checkpointing may have wrapped parts of the model.
            copies.set_tensors(reference, dict(zip(copies.tensors_of(reference), copies.tensors_of(live).values(), strict=True)))
        except ValueError as error:
            expected = "expected a configure_model and an auto_wrap_policy that do the same with a copy"
            raise ConfigError(f"reference: the copy is not laid out as the model is ({error}); {expected}.") from error
        return reference, laid_out.wrapper

    def _earlier_values(self, reference: nn.Module) -> Mapping[str, Tensor]:
        """The values that replace the present values of the reference; may be empty. Warns if a resumed run had another reference."""
        # Layers that were created since setup have no initial values.
        initial = {} if copies.differing_tensors(reference, self._initial) else self._initial
        for saved in self._saved:
            if saved["source"] == self._name:
                values: Mapping[str, Tensor] = saved["tensors"]
                return values
            messages.warning("The run that is resumed had reference %r; this one has %r.", saved["source"], self._name)
        if self._is_resumed and not self._saved and self._source == INIT:
            _warn_of_new_values(_NEW_VALUES if initial else "the checkpoint's weights")
        return initial if self._is_resumed else {}


def _warn_of_new_values(values: str) -> None:
    messages.warning("The checkpoint holds no reference of this callback's: differences are from %s.", values)


def _check_memory(module: nn.Module) -> None:
    """Refuse a module with a tensor that has no memory: torch would read past the end of a storage, and crash."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        try:
            in_memory(tensor)
        except ValueError as error:
            cure = "Bring it back before the fit, or give a module as the reference"
            raise ConfigError(f"reference is a copy of the model, and {name} cannot be copied ({error}). {cure}.") from error


# A reference that FSDP lays out over ranks like the model: a copy made before, which goes through the same steps


class LaidOutCopy:
    """A copy of a model, made before ``configure_model``, that FSDPStrategy or ModelParallelStrategy has not laid out yet."""

    def __init__(self, strategy: Any, model: LightningModule) -> None:  # noqa: ANN401  # of either package
        self._strategy = strategy
        self.module = cast(LightningModule, copies.frozen_copy(model))
        self.wrapper: nn.Module | None = None
        """The unit that runs the copy under FSDP1: it calls its first argument with all others."""
        siblings: dict[object, Any] = dict(zip(model.modules(), self.module.modules(), strict=True))
        siblings |= dict(zip(model.parameters(), self.module.parameters(), strict=True))
        # An iterator is left alone: the wrapper of the model consumes it.
        self._options = {
            name: [siblings.get(item, item) for item in value]
            if name in ("ignored_modules", "ignored_states") and isinstance(value, Collection)
            else value
            for name, value in getattr(strategy, "kwargs", {}).items()
        }

    def lay_out(self, trainer: Trainer, model: LightningModule) -> None:
        """Lay the copy out as Lightning has laid out the model, and freeze it; random states stay as they are."""
        strategy, copied = self._strategy, self.module
        copied._device_mesh = model._device_mesh  # the property device_mesh, which configure_model reads, has no setter
        contexts = strategy.tensor_init_context(), strategy.model_sharded_context(), trainer.precision_plugin.module_init_context()
        attach(copied, trainer)
        try:
            with unchanged_random_states(model.device), contexts[0], contexts[1], contexts[2]:
                copied.configure_model()
        finally:
            copied.trainer = None
        take_out_compiled_code(copied.modules())
        trainer.precision_plugin.convert_module(copied.requires_grad_(requires_grad=False))
        if is_a(strategy, "FSDPStrategy"):
            self.wrapper = None if any(map(is_fsdp_wrapper, copied.modules())) else _wrapped(copied, strategy, self._options)
            return
        if any(tensor.is_meta for tensor in copies.tensors_of(copied).values()):
            copied.to_empty(device=strategy.root_device)
        copied.to(strategy.root_device)


class _Call(nn.Module):
    """Replaces a module that FSDP1 wraps: calls a function while the module's parameters are whole, without its hooks.

    Lightning does the same with ``training_step``.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)


def _wrapped(copied: nn.Module, strategy: Any, options: dict[str, Any]) -> nn.Module:  # noqa: ANN401  # of either package
    """A copy in FSDP1's wrapper, with the options of the model's wrapper."""
    # The other sharding strategies keep whole parameters for a backward pass, which does not follow here.
    without_backward = {
        ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy.FULL_SHARD,
        ShardingStrategy._HYBRID_SHARD_ZERO2: ShardingStrategy.HYBRID_SHARD,
    }
    common: dict[str, Any] = {
        "cpu_offload": strategy.cpu_offload,
        "mixed_precision": strategy.mixed_precision_config,
        "sharding_strategy": without_backward.get(strategy.sharding_strategy, strategy.sharding_strategy),
        "device_id": strategy.root_device.index,
    }
    unit = FullyShardedDataParallel(copied, **common, **options)
    unit._fsdp_wrapped_module = _Call(copied)
    # Only the outermost unit stays whole after a forward pass; so the outermost unit is one without parameters.
    shared = {name: options[name] for name in ("process_group", "device_mesh", "use_orig_params") if name in options}
    return FullyShardedDataParallel(unit, **common, **shared)
