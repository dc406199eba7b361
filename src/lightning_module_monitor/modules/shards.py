"""Which part of a tensor that several ranks have is this rank's to count, so that every element counts once."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is laid out over ranks by torch (FSDP2, tensor parallel)."""
    # Where the module was never imported there is none; importing it takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_part(tensor: Tensor, rank: int) -> Tensor | None:
    """The elements that a rank counts.

    Args:
        tensor: A parameter, or its gradient. A plain one is replicated: data parallel training keeps it the same everywhere.
        rank: This process's.

    Returns:
        All of a plain tensor on rank 0, and nothing on the others. Of one that is laid out over ranks the local shard; where
        it is also replicated, on the first of the ranks that have it. ``None``: another rank counts them.

    Raises:
        ValueError: If its values are still to be reduced over ranks.
    """
    if not is_sharded(tensor):
        return tensor if rank == 0 else None
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"its placements are {tensor.placements}; expected none that is still to be reduced over ranks")
    is_copy = coordinate is None or any(
        placement.is_replicate() and place for placement, place in zip(tensor.placements, coordinate, strict=True)
    )
    # Of several groups of ranks with the same tensor the one with rank 0 counts it.
    return None if is_copy or not (mesh.mesh == 0).any() else tensor.to_local()
