"""The part of a tensor that this rank counts, where a tensor is laid out over ranks: every element counts once.

Torch lays parameters out over ranks in two ways. FSDP2 and tensor parallel training make DTensors of them. FSDP1 makes views of this rank's
shard of a flat parameter: plain tensors of one dimension, of which only the wrapper knows.
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
    """Whether a tensor is laid out over ranks by torch (FSDP2, tensor parallel)."""
    # By what it can do: to import its class takes half a second, and before torch 2.5 the module was a private one.
    kind = type(tensor)
    return kind not in PLAIN and hasattr(kind, "full_tensor")


class FlatShard(NamedTuple):
    """Layout of a parameter of FSDP1. On this rank it is a plain tensor of one dimension, which may be empty."""

    shape: torch.Size
    """Shape of the whole parameter."""
    is_copy: bool
    """Whether another rank has the same part, and counts it (``HYBRID_SHARD``)."""


def flat_shards_by_name(parameters: Mapping[str, Tensor | None], wrapper: nn.Module | None) -> dict[str, FlatShard]:
    """The parameters that FSDP1 has laid out over ranks, by name.

    Args:
        parameters: By name; ``None``: it was removed.
        wrapper: A module that has FSDP1's wrappers in it, or is one.

    Raises:
        ConfigError: If a parameter belongs to another wrapper.
    """
    flattened = {name: id(one) for name, one in parameters.items() if one is not None and is_flattened(one)}
    shards = _flat_shards(wrapper) if flattened and wrapper is not None else {}
    unknown = [name for name, one in flattened.items() if one not in shards]
    if unknown:
        expected = "expected set_module(what FullyShardedDataParallel returns), and use_orig_params=True"
        raise ConfigError(f"{shortened(unknown)}: FSDP has it in a unit that is not known here; {expected}.")
    found = {name: shards[one] for name, one in flattened.items()}
    return {name: shard for name, shard in found.items() if shard is not None}


def _flat_shards(wrapper: nn.Module) -> dict[int, FlatShard | None]:
    """The parameters of FSDP1's units in a module, by ``id``; ``None`` for one that is not laid out over ranks (``NO_SHARD``)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    shards: dict[int, FlatShard | None] = {}
    for unit in () if fsdp is None else fsdp.FullyShardedDataParallel.fsdp_modules(wrapper):
        handle = unit._handle  # which parameters are in a unit, and of what shape, is in no public interface
        if handle is not None and handle.flat_param._params is not None:
            replicas = getattr(unit, "_inter_node_pg", None)
            is_copy = replicas is not None and distributed.get_rank(replicas) > 0
            for parameter, shape in zip(handle.flat_param._params, handle.flat_param._shapes, strict=True):
                shards[id(parameter)] = FlatShard(shape, is_copy) if handle.uses_sharded_strategy else None
    return shards


def is_flattened(parameter: Tensor) -> bool:
    """Whether a parameter belongs to a unit of FSDP1."""
    return getattr(parameter, "_fsdp_flattened", False)  # FSDP's own mark, by which it leaves out what an inner unit has


def is_laid_out(module: nn.Module) -> bool:
    """Whether any parameter of a module is, or may be, laid out over ranks: such a module cannot be copied."""
    return any(is_sharded(one) or is_flattened(one) for one in module.parameters())


def own_part(tensor: DTensor) -> Tensor | None:
    """The elements that this rank counts of a tensor that is laid out over ranks.

    Returns:
        The local shard; where it is also replicated, on the first of the ranks that have it. ``None``: another rank counts them.

    Raises:
        ValueError: If its values are still to be reduced over ranks.
    """
    _check_reduced(tensor)
    # If several groups of ranks have the same tensor, the group with rank 0 counts it.
    is_elsewhere = _is_copy(tensor) or not (tensor.device_mesh.mesh == 0).any()
    part: Tensor = tensor.to_local()
    return None if is_elsewhere else part


def fsdp2_units(module: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was applied to."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]


def fsdp1_units(root: nn.Module) -> dict[nn.Module, Any]:
    """The innermost unit of FSDP1 around each module that is in one."""
    # This decides which units are the outermost ones: the first that is gathered would take itself for one.
    _fsdp1_units(root, root_only=True)
    return {module: unit for unit in _fsdp1_units(root) for module in unit.modules()}  # an outer unit comes before its inner ones


def _fsdp1_units(root: nn.Module, *, root_only: bool = False) -> list[Any]:
    if not any(map(is_fsdp_wrapper, root.modules())):
        return []
    units: list[Any] = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel.fsdp_modules(root, root_only)
    return units


def gathered(unit: Any) -> AbstractContextManager[None]:  # noqa: ANN401  # FSDP1 may never have been imported
    """Within the block the parameters of a unit of FSDP1 are whole, but not those of units in it: by a collective of all ranks."""
    block: AbstractContextManager[None] = unit.summon_full_params(unit, recurse=False, writeback=False)
    return block


def reshard(module: nn.Module) -> None:
    """Give up the whole parameters that FSDP keeps after a forward pass, for the backward pass that follows it in training."""
    for unit in fsdp2_units(module):
        unit.reshard()
    for unit in _fsdp1_units(module, root_only=True):
        with gathered(unit):
            pass  # after it the parameters are shards; those that are whole need no collective


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be laid out over ranks: then by a collective, in which all of them take part."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def whole_of_flat(part: Tensor, shard: FlatShard, ranks: Ranks) -> Tensor:
    """All of a parameter of FSDP1, or of what belongs to it, by a collective, in which all ranks take part."""
    parts = ranks.gather(None if shard.is_copy else part.to("cpu"))
    return torch.cat([one for one in parts if one is not None]).view(shard.shape).to(part.device)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter, of which a part without elements has an empty one: FSDP1 leaves that out."""
    is_empty = parameter.grad is None and parameter.requires_grad and not parameter.numel() and is_flattened(parameter)
    return torch.empty_like(parameter) if is_empty else parameter.grad


def _is_copy(tensor: DTensor) -> bool:
    """Whether this rank's elements are those of the first of the ranks that have them all."""
    coordinate = tensor.device_mesh.get_coordinate()
    # No coordinate: this rank has no part of it.
    return coordinate is None or any(
        placement.is_replicate() and place > 0 for placement, place in zip(tensor.placements, coordinate, strict=True)
    )


def _check_reduced(tensor: DTensor) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"its placements are {tensor.placements}; expected none that is still to be reduced over ranks")


def local_part(tensor: Tensor, *, is_reduced: bool = True) -> Tensor:
    """This rank's part of an activation that may be laid out over the ranks of a mesh.

    Args:
        tensor: Any tensor; a plain one is returned whole. Waits for a collective that still computes it.
        is_reduced: Whether it has to be reduced over ranks; if not, a part of a sum will do.

    Returns:
        A plain tensor: the local shard, which is empty where the same elements are the first rank's to count.

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
    module = sys.modules.get("torch.distributed._functional_collectives")
    return tensor.trigger_wait() if module is not None and isinstance(tensor, module.AsyncCollectiveTensor) else tensor
