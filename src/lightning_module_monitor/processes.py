"""The processes that train together, by ``torch.distributed``."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, distributed

OPERATIONS = {"max": "MAX", "sum": "SUM"}


class ProcessRanks:
    """The ranks of the default process group, as :class:`~lightning_module_monitor.statistics.ranks.Ranks` describes them."""

    def __init__(self) -> None:
        self.index: int = distributed.get_rank()
        backend = distributed.get_backend()
        # NCCL reduces only what is on the GPU of its rank.
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    def all_reduce(self, tensor: Tensor, how: Literal["max", "sum"]) -> Tensor:
        """One collective, in place."""
        distributed.all_reduce(tensor, op=getattr(distributed.ReduceOp, OPERATIONS[how]))
        return tensor

    def gather(self, one: Any) -> list[Any]:  # noqa: ANN401  # anything that can be pickled
        """What every rank gives, in the order of the ranks."""
        everything: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everything, one)
        return everything


def process_ranks() -> ProcessRanks | None:
    """The ranks, where there is more than this process."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None
    return ProcessRanks()


def is_first_process() -> bool:
    """Whether this is rank 0, or the only process."""
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
