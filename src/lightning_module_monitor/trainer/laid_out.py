"""A reference that FSDP lays out over ranks like the model: a copy made before, which goes through the same steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from lightning_module_monitor.distributed.shards import is_laid_out
from lightning_module_monitor.lightning_packages import LightningModule, Trainer, is_a
from lightning_module_monitor.model import copies
from lightning_module_monitor.model.compiled import uncompile
from lightning_module_monitor.model.names import is_fsdp_wrapper
from lightning_module_monitor.model.unchanged import unchanged_random_states
from lightning_module_monitor.trainer.silent_copy import attach


class LaidOutCopy:
    """A copy of a model that no strategy has laid out yet.

    Args:
        strategy: The FSDPStrategy or ModelParallelStrategy of the run.
        model: The model, before ``configure_model``.
    """

    def __init__(self, strategy: Any, model: LightningModule) -> None:  # noqa: ANN401  # of either package
        self._strategy = strategy
        self.module = cast(LightningModule, copies.frozen_copy(model))
        """The copy."""
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

    @classmethod
    def of(cls, trainer: Trainer, model: LightningModule) -> LaidOutCopy | None:
        """A copy of a model that the strategy will lay out over ranks; ``None`` if it already has, or never does."""
        strategy = trainer.strategy
        if not is_a(strategy, "FSDPStrategy", "ModelParallelStrategy") or is_laid_out(model):
            return None
        return cls(strategy, model)

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
        uncompile(copied.modules())
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
        """Call the function."""
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
