"""The part of a sharded tensor that this rank counts, so that each element counts once.

FSDP2 and tensor parallel training turn parameters into DTensors. FSDP1 turns them into views of this rank's shard of a flat parameter:
plain tensors of one dimension, whose layout only the wrapper knows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, distributed, nn

from lightning_module_monitor.errors import ConfigError, shortened
from lightning_module_monitor.kernels.elements import PLAIN
from lightning_module_monitor.model.names import is_fsdp_wrapper

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from lightning_module_monitor.distributed.ranks import Ranks


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor (FSDP2, tensor parallel)."""
    # By its method: the import of the class takes half a second, and its module was private before torch 2.5.
    tensor_class = type(tensor)
    return tensor_class not in PLAIN and hasattr(tensor_class, "full_tensor")


class FlatShard(NamedTuple):
    """Layout of a parameter of FSDP1, which is on this rank a plain tensor of one dimension, possibly empty."""

    shape: torch.Size
    """Shape of the whole parameter."""
    is_copy: bool
    """Whether another rank counts the same part (``HYBRID_SHARD``)."""


def flat_shards_by_name(parameters: Mapping[str, Tensor | None], wrapper: nn.Module | None) -> dict[str, FlatShard]:
    """The parameters that FSDP1 has sharded, by name.

    Args:
        parameters: By name; ``None`` for a removed parameter.
        wrapper: A module that contains FSDP1's wrappers or is one.

    Raises:
        ConfigError: If a parameter belongs to another wrapper.
    """
    ids = {name: id(tensor) for name, tensor in parameters.items() if tensor is not None and is_flattened(tensor)}
    shards = _flat_shards(wrapper) if ids and wrapper is not None else {}
    unknown = [name for name, identity in ids.items() if identity not in shards]
    if unknown:
        expected = "expected set_module(what FullyShardedDataParallel returns), and use_orig_params=True"
        raise ConfigError(f"{shortened(unknown)}: FSDP has it in a unit that is not known here; {expected}.")
    return {name: shard for name, identity in ids.items() if (shard := shards[identity]) is not None}


def _flat_shards(wrapper: nn.Module) -> dict[int, FlatShard | None]:
    """The parameters of FSDP1's units in a module, by ``id``; ``None`` for an unsharded one (``NO_SHARD``)."""
    shards: dict[int, FlatShard | None] = {}
    for unit in _fsdp1_units(wrapper):
        handle = unit._handle  # there is no public interface to the parameters of a unit and their shapes
        if handle is not None and handle.flat_param._params is not None:
            replicas = getattr(unit, "_inter_node_pg", None)
            is_copy = replicas is not None and distributed.get_rank(replicas) > 0
            for parameter, shape in zip(handle.flat_param._params, handle.flat_param._shapes, strict=True):
                shards[id(parameter)] = FlatShard(shape, is_copy) if handle.uses_sharded_strategy else None
    return shards


def is_flattened(parameter: Tensor) -> bool:
    """Whether a parameter belongs to a unit of FSDP1."""
    return getattr(parameter, "_fsdp_flattened", False)  # FSDP's own mark: an outer unit skips marked parameters


def is_laid_out(module: nn.Module) -> bool:
    """Whether any parameter of a module is a DTensor or belongs to FSDP1: such a module cannot be copied."""
    return any(is_sharded(parameter) or is_flattened(parameter) for parameter in module.parameters())


def own_part(tensor: DTensor) -> Tensor | None:
    """The elements of a DTensor that this rank counts.

    Returns:
        The local shard; ``None`` if another rank counts the same elements: the first of the ranks that hold them.

    Raises:
        ValueError: If its values are still to be reduced over ranks.
    """
    _check_reduced(tensor)
    # If several groups of ranks hold the same tensor, the group with rank 0 counts it.
    is_counted_elsewhere = _is_copy(tensor) or not (tensor.device_mesh.mesh == 0).any()
    part: Tensor = tensor.to_local()
    return None if is_counted_elsewhere else part


def fsdp2_units(module: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was applied to."""
    fsdp_class = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if fsdp_class is None else [part for part in module.modules() if isinstance(part, fsdp_class)]


def fsdp1_units(root: nn.Module) -> dict[nn.Module, Any]:
    """The innermost unit of FSDP1 around each module that is in a unit."""
    # This call makes FSDP determine the outermost units. Otherwise FSDP would take the first gathered unit for an outermost unit.
    _fsdp1_units(root, root_only=True)
    # An inner unit follows its outer unit, and replaces it.
    return {module: unit for unit in _fsdp1_units(root) for module in unit.modules()}


def _fsdp1_units(root: nn.Module, *, root_only: bool = False) -> list[Any]:
    if not any(map(is_fsdp_wrapper, root.modules())):
        return []
    units: list[Any] = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel.fsdp_modules(root, root_only)
    return units


def gathered(unit: Any) -> AbstractContextManager[None]:  # noqa: ANN401  # FSDP1 may never have been imported
    """Within the block the parameters of a unit of FSDP1 are whole, but not those of units in it. A collective of all ranks."""
    block: AbstractContextManager[None] = unit.summon_full_params(unit, recurse=False, writeback=False)
    return block


def reshard(module: nn.Module) -> None:
    """Free the whole parameters that FSDP keeps after a forward pass for the backward pass of training."""
    for unit in fsdp2_units(module):
        unit.reshard()
    for unit in _fsdp1_units(module, root_only=True):
        with gathered(unit):
            pass  # the parameters are whole already, so this starts no collective; at its end FSDP keeps the shards alone


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; of a DTensor by a collective of all its ranks."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def whole_of_flat(part: Tensor, shard: FlatShard, ranks: Ranks) -> Tensor:
    """A whole parameter of FSDP1, or its whole gradient or update, by a collective of all ranks."""
    parts = ranks.gather(None if shard.is_copy else part.to("cpu"))
    return torch.cat([tensor for tensor in parts if tensor is not None]).view(shard.shape).to(part.device)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter. FSDP1 sets none for an empty shard, which gets an empty one here."""
    is_empty = parameter.grad is None and parameter.requires_grad and not parameter.numel() and is_flattened(parameter)
    return torch.empty_like(parameter) if is_empty else parameter.grad


def _is_copy(tensor: DTensor) -> bool:
    """Whether another rank counts the same elements."""
    coordinate = tensor.device_mesh.get_coordinate()
    # No coordinate: the tensor is on other ranks.
    return coordinate is None or any(
        placement.is_replicate() and index > 0 for placement, index in zip(tensor.placements, coordinate, strict=True)
    )


def _check_reduced(tensor: DTensor) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"its placements are {tensor.placements}; expected none that is still to be reduced over ranks")


def local_part(tensor: Tensor, *, is_reduced: bool = True) -> Tensor:
    """This rank's part of an activation, which may be a DTensor.

    Args:
        tensor: Any tensor; a plain one is returned whole. Waits for a collective that still computes it.
        is_reduced: Whether values that are still to be reduced over ranks are an error.

    Returns:
        A plain tensor: the local shard, or an empty tensor if another rank counts the same elements.

    Raises:
        ValueError: If its values are still to be reduced over ranks.
    """
    if type(tensor) is Tensor:
        return tensor
    if is_sharded(tensor):
        if is_reduced:
            _check_reduced(tensor)
        local: Tensor = tensor.to_local().detach()
        tensor = local[:0] if _is_copy(tensor) else local
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor  # an AsyncCollectiveTensor
