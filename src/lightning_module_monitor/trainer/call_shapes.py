"""Faults that the shape of a module's input shows: it mixes samples, or normalizes next to nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from lightning_module_monitor.kernels.elements import plain

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""Without :class:`torch.nn.SyncBatchNorm`, which normalizes the values of all ranks."""


def mixes_samples(called: nn.Module, args: Sequence[object], num_samples: int) -> bool:
    """Whether a recurrent or attention module, which expects sequences first, gets the samples first, or a softmax is over samples.

    Not a softmax of a square: of the similarities of all pairs of samples.
    """
    first = plain(args[0]) if args and isinstance(args[0], Tensor) else None
    if first is None or first.dim() < 2 or not first.shape[0] == num_samples > 1:
        return False
    if isinstance(called, nn.Softmax | nn.LogSoftmax):
        return called.dim in (0, -first.dim()) and first.shape != (num_samples, num_samples)
    return first.dim() == 3 and num_samples != first.shape[1] and getattr(called, "batch_first", None) is False


def normalizes_two_values(called: nn.Module, args: Sequence[object]) -> bool:
    """Whether a normalization layer normalizes two values at a time, of which only the sign of their difference is left."""
    first = plain(args[0]) if args and isinstance(args[0], Tensor) else None
    if first is None or first.dim() < 2 or not called.training:
        return False
    if isinstance(called, nn.LayerNorm):
        return math.prod(called.normalized_shape) == 2
    is_of_batch = isinstance(called, _BATCH_NORMS)
    num_groups = called.num_groups if isinstance(called, nn.GroupNorm) else first.shape[1]
    is_known = is_of_batch or isinstance(called, (nn.GroupNorm, *_INSTANCE_NORMS))
    return is_known and first.numel() == 2 * num_groups * (1 if is_of_batch else len(first))
