"""The processes that train together, by ``torch.distributed``, and whether all of them record the same."""

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
"""How long a rank waits for the others, which have finished the same step: less than NCCL's ten minutes, after which the run would end."""


class Ranks:
    """The processes that train together, in a process group of their own. Each makes the same calls in the same order, this one too.

    In the default group a collective of the monitor's would meet others' where ranks are not in the same step: those of DDP, or of torch's
    ``Join``. The group is one of gloo: a rank that does not take part is then an error, where NCCL ends the process.

    Args:
        same_input: The mesh of the ranks that share their input with this one, in tensor parallel training.

    Raises:
        RanksLostError: If another rank does not make its own in time; so do all methods, if another rank does not take part.
    """

    def __init__(self, same_input: DeviceMesh | None = None) -> None:
        self.index: int = distributed.get_rank()
        """Number of this rank."""
        with self._others_in_time():
            self.group: distributed.ProcessGroup | None = distributed.new_group(timeout=TIMEOUT, backend="gloo")
        self.place: int = 0 if same_input is None else same_input.get_local_rank()
        """Number of this rank among those that share their input, as tensor parallel ones do; 0 where each has its own."""
        self.num_sharing: int = 1 if same_input is None else same_input.size()
        """Number of ranks that share their input; 1 where each has its own."""

    def all_reduce(self, tensor: Tensor, how: Literal["max", "sum"]) -> Tensor:
        """Reduce a float64 tensor on the host, of the same shape on each rank, in place; without NaN where ``how`` is ``max``."""
        with self._others_in_time():
            distributed.all_reduce(tensor, op=getattr(distributed.ReduceOp, how.upper()), group=self.group)
        return tensor

    def gather(self, one: Any) -> list[Any]:  # noqa: ANN401  # anything that can be pickled
        """Exchange objects: those of all ranks, in the order of the ranks. For rare data, or the user's own."""
        everything: list[Any] = [None] * distributed.get_world_size()
        with self._others_in_time():
            distributed.all_gather_object(everything, one, group=self.group)
        return everything

    def close(self) -> None:
        """Destroy the group; a second call does no harm."""
        with suppress(ValueError):  # the default group was destroyed, and this one with it
            distributed.destroy_process_group(self.group)

    @contextmanager
    def _others_in_time(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RanksLostError(f"another rank did not take part within {TIMEOUT.total_seconds():g} s ({error})") from error


def process_ranks(same_input: DeviceMesh | None = None) -> Ranks | None:
    """The ranks, where there is more than this process."""
    return Ranks(same_input) if _is_initialized() and distributed.get_world_size() > 1 else None


def is_first_process() -> bool:
    """Whether this is rank 0, or the only process."""
    return not _is_initialized() or distributed.get_rank() == 0


def _is_initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()


@torch.no_grad()
def share_values_of_first(tensors: Iterable[Tensor]) -> None:
    """Give plain tensors the values that they have on rank 0, as DDP does with a model's; called on every rank."""
    for tensor in tensors if _is_initialized() else ():
        # As bytes: not every backend knows every dtype.
        values = tensor.detach().clone(memory_format=torch.contiguous_format)
        distributed.broadcast(values.view(-1).view(torch.uint8), 0)
        if not torch.equal(values, tensor):  # an expanded buffer, which is alike everywhere, cannot be written to
            tensor.copy_(values)


def disagreement(recorded: Sequence[str], ranks: Ranks) -> str:
    """A sentence about what ranks record differently, the same on each; empty if they all record the same.

    ``recorded`` is what this rank records, item by item, in an order that is to be the same everywhere. One collective, or two.
    """
    digest = hashlib.sha256("\n".join(recorded).encode()).digest()
    if len(set(ranks.gather(digest))) == 1:
        return ""
    first, *others = ranks.gather(list(recorded))
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    only = [(0, one) for one in first if one not in other] + [(rank, one) for one in other if one not in first]
    what = f"rank {only[0][0]} alone has {only[0][1]!r}" if only else "they are in another order"
    return f"ranks 0 and {rank} do not record the same: {what}; expected the same rules, steps and modules on every rank."
