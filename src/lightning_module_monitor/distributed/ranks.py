"""Collectives between the ranks of ``torch.distributed``, and the check that all ranks record the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, distributed

from lightning_module_monitor.errors import RanksLostError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = timedelta(minutes=5)
"""Timeout of a collective: less than NCCL's ten minutes, after which the run would end."""


class Ranks:
    """The ranks in a separate process group, for collectives of the monitor. Every rank makes the same calls in the same order.

    In the default group a collective of the monitor would meet those of DDP or of torch's ``Join`` when ranks are not in the same step. The
    backend is gloo, which raises an error if a rank does not take part; NCCL would end the process.

    Args:
        same_input: The mesh of the ranks that share their input with this rank, in tensor parallel training.

    Raises:
        RanksLostError: If another rank does not take part in time. All methods raise it.
    """

    def __init__(self, same_input: DeviceMesh | None = None) -> None:
        self.index: int = distributed.get_rank()
        """The rank of this process."""
        self.size: int = distributed.get_world_size()
        """Number of ranks."""
        with self._lost_ranks():
            self.group: distributed.ProcessGroup | None = distributed.new_group(timeout=TIMEOUT, backend="gloo")
        self.sharing_index: int = 0 if same_input is None else same_input.get_local_rank()
        """Index of this rank among the ranks that share their input; 0 if none do."""
        self.num_sharing: int = 1 if same_input is None else same_input.size()
        """Number of ranks that share their input; 1 if none do."""

    def all_reduce(self, tensor: Tensor, how: Literal["max", "sum"]) -> Tensor:
        """Reduce a float64 tensor on the host, of the same shape on each rank, in place; without NaN if ``how`` is ``max``."""
        with self._lost_ranks():
            distributed.all_reduce(tensor, op=getattr(distributed.ReduceOp, how.upper()), group=self.group)
        return tensor

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401  # anything that can be pickled
        """Gather the objects of all ranks, in the order of the ranks. For rare data and objects of the user."""
        values: list[Any] = [None] * self.size
        with self._lost_ranks():
            distributed.all_gather_object(values, value, group=self.group)
        return values

    def close(self) -> None:
        """Destroy the group; a second call does nothing."""
        with suppress(ValueError):  # the default group was destroyed, and this group with it
            distributed.destroy_process_group(self.group)

    @contextmanager
    def _lost_ranks(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RanksLostError(f"another rank did not take part within {TIMEOUT.total_seconds():g} s ({error})") from error


def num_processes() -> int:
    """Number of processes of ``torch.distributed``."""
    return distributed.get_world_size() if _is_initialized() else 1


def is_first_process() -> bool:
    """Whether this is rank 0, or the only process."""
    return not _is_initialized() or distributed.get_rank() == 0


def _is_initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()


@torch.no_grad()
def least_of_all(value: float, ranks: Ranks | None) -> float:
    """The least of a number of all ranks, by one collective; of one process its own."""
    return value if ranks is None else -float(ranks.all_reduce(torch.tensor([-value], dtype=torch.float64, device="cpu"), "max"))


def share_values_of_first(tensors: Iterable[Tensor]) -> None:
    """Broadcast the values of plain tensors from rank 0, as DDP does for a model; called on every rank."""
    for tensor in tensors if _is_initialized() else ():
        # As bytes, because not every backend supports every dtype.
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        distributed.broadcast(values.view(-1).view(torch.uint8), 0)
        if not torch.equal(values, tensor):  # an expanded buffer, which is equal everywhere, cannot be written to
            tensor.copy_(values)


def disagreement(recorded: Sequence[str], ranks: Ranks) -> str:
    """A sentence about a difference in what ranks record, the same on all ranks; empty if there is none. One collective, or two.

    ``recorded`` describes each item that this rank records, in an order that must be the same on all ranks.
    """
    digest = hashlib.sha256("\n".join(recorded).encode()).digest()
    if len(set(ranks.gather(digest))) == 1:
        return ""
    first, *others = ranks.gather(list(recorded))
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    only = [(0, item) for item in first if item not in other] + [(rank, item) for item in other if item not in first]
    what = f"rank {only[0][0]} alone has {only[0][1]!r}" if only else "they are in another order"
    return f"ranks 0 and {rank} do not record the same: {what}; expected the same rules, steps and modules on every rank."
