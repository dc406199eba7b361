"""Which part of a tensor that several ranks have is this rank's to count, so that every element counts once."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is laid out over ranks by torch (FSDP2, tensor parallel)."""
    if type(tensor) is Tensor or type(tensor) is Parameter:
        return False
    # Where the module was never imported there is none; importing it takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_part(tensor: DTensor) -> Tensor | None:
    """The elements that this rank counts of a tensor that is laid out over ranks.

    Returns:
        The local shard; where it is also replicated, on the first of the ranks that have it. ``None``: another rank counts them.

    Raises:
        ValueError: If its values are still to be reduced over ranks.
    """
    _check_reduced(tensor)
    # Of several groups of ranks with the same tensor the one with rank 0 counts it.
    is_elsewhere = _is_copy(tensor) or not (tensor.device_mesh.mesh == 0).any()
    part: Tensor = tensor.to_local()
    return None if is_elsewhere else part


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be laid out over ranks: then by a collective, in which all of them take part."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def has_parts_of_tokens(tensor: Tensor) -> bool:
    """Whether the last dimension is laid out over ranks."""
    return is_sharded(tensor) and any(placement.is_shard(tensor.dim() - 1) for placement in tensor.placements)


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
    """What a rank has of an activation that every rank of its mesh has a part of.

    Args:
        tensor: Any; a plain one is all there is. One that a collective is still under way for is waited for.
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
