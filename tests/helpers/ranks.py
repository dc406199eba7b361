"""Ranks that are threads: every collective is counted, and NaN is dropped where a real one may drop it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Meeting(Generic[T]):
    """Several ranks that must all make the same calls in the same order, as real ones must.

    Args:
        num_ranks: How many.
        num_sharing: How many of them, one after the other, have the same input.
    """

    def __init__(self, num_ranks: int, num_sharing: int = 1) -> None:
        self.num_ranks = num_ranks
        self.num_sharing = num_sharing
        self.calls: list[str] = []
        """What all of them have called together, in order."""
        self._barrier = threading.Barrier(num_ranks, timeout=30)
        self._given: dict[int, tuple[str, Any]] = {}

    def run(self, work: Callable[[ThreadRank], T]) -> list[T]:
        """What each rank returns; an error on one of them is raised here."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def run_one(rank: int) -> None:
            try:
                results[rank] = work(ThreadRank(self, rank))
            except BaseException as error:  # raised again in the thread that waits
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run_one, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            raise error
        return [results[rank] for rank in range(self.num_ranks)]

    def exchange(self, rank: int, call: str, given: Any) -> list[Any]:
        """What all ranks have given to one call."""
        self._given[rank] = (call, given)
        self._barrier.wait()
        calls, everything = zip(*(self._given[one] for one in range(self.num_ranks)), strict=True)
        assert len(set(calls)) == 1, f"ranks made different calls: {calls}"
        if self._barrier.wait() == 0:
            self.calls.append(call)
        return list(everything)


class ThreadRank:
    """One of the ranks of a meeting, as a monitor knows it."""

    def __init__(self, meeting: Meeting[Any], index: int) -> None:
        self.index = index
        self.size = meeting.num_ranks
        self.group = None
        self.sharing_index = index % meeting.num_sharing
        self.num_sharing = meeting.num_sharing
        self._meeting = meeting

    def all_reduce(self, tensor: Tensor, how: Literal["max", "sum"]) -> Tensor:
        stacked = torch.stack(self._meeting.exchange(self.index, how, tensor.clone()))
        return stacked.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(0) if how == "max" else stacked.sum(0)

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.index, "gather", value)

    def close(self) -> None:
        pass
