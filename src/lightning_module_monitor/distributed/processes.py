"""The processes that train together, by ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OPERATIONS = {"max": "MAX", "sum": "SUM"}


class ProcessRanks:
    """The ranks of the default process group, as :class:`~lightning_module_monitor.distributed.ranks.Ranks` describes them.

    Args:
        same_input: The mesh of the ranks that share their input with this one, in tensor parallel training.
    """

    def __init__(self, same_input: DeviceMesh | None = None) -> None:
        self.index: int = distributed.get_rank()
        backend = distributed.get_backend()
        # NCCL reduces only what is on the GPU of its rank.
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self.place: int = 0 if same_input is None else same_input.get_local_rank()
        self.num_sharing: int = 1 if same_input is None else same_input.size()

    def all_reduce(self, tensor: Tensor, how: Literal["max", "sum"]) -> Tensor:
        """One collective, in place."""
        distributed.all_reduce(tensor, op=getattr(distributed.ReduceOp, OPERATIONS[how]))
        return tensor

    def gather(self, one: Any) -> list[Any]:  # noqa: ANN401  # anything that can be pickled
        """What every rank gives, in the order of the ranks."""
        everything: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everything, one)
        return everything


def process_ranks(same_input: DeviceMesh | None = None) -> ProcessRanks | None:
    """The ranks, where there is more than this process."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None
    return ProcessRanks(same_input)


def is_first_process() -> bool:
    """Whether this is rank 0, or the only process."""
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


@torch.no_grad()
def share_values_of_first(tensors: Iterable[Tensor]) -> None:
    """Give plain tensors the values that they have on rank 0, as DDP does with a model's; called on every rank."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    for tensor in tensors:
        # As bytes: not every backend knows every dtype.
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        distributed.broadcast(values.view(-1).view(torch.uint8), 0)
        if not torch.equal(values, tensor):  # an expanded buffer, which is alike everywhere, cannot be written to
            tensor.copy_(values)
