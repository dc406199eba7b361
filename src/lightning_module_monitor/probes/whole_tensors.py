"""Whole tensors for functions and files, of tensors that are laid out over ranks."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.distributed.shards import FlatShard, is_sharded, whole, whole_of_flat
from lightning_module_monitor.probes.base import failing_alone


class WholeTensors:
    """Gives whole tensors to functions; of a tensor that is laid out over ranks it keeps this rank's part until the step is over.

    When a parameter or a gradient is observed, an error may have ended the step on one rank, and the others would wait for its part.
    At the end of the step the ranks exchange which parts they have; a tensor is assembled if every rank has its part.

    Args:
        expected: All tensors that may come, by name, in the same order on every rank: those of FSDP1 with their shard. Without any there
            is no collective.
        ranks: The processes that train together; ``None`` for a single one.
        failed: Gets the name of a tensor that could not be used, and the error.
    """

    def __init__(self, expected: Mapping[str, FlatShard | None], ranks: Ranks | None, failed: Callable[[str, Exception], None]) -> None:
        self._expected = expected
        self._ranks = ranks
        self._failed = failed
        self._kept: defaultdict[str, list[tuple[list[Tensor], Callable[..., None]]]] = defaultdict(list)

    def give(self, name: str, tensors: Sequence[Tensor], use: Callable[..., None]) -> None:
        """Call a function with whole tensors, on rank 0: at once, or at the end of the step if they are laid out over ranks.

        Args:
            name: One of the expected names, if any of the tensors is laid out over ranks.
            tensors: They may be overwritten as soon as this returns.
            use: The function, which gets as many tensors.
        """
        if self._ranks is None:
            use(*(whole(tensor) for tensor in tensors))
        elif self._expected.get(name) is not None or any(is_sharded(tensor) for tensor in tensors):
            self._kept[name].append(([tensor.detach().clone() for tensor in tensors], use))
        elif self._ranks.index == 0:
            use(*tensors)

    def assemble(self) -> None:
        """Assemble the tensors at the end of the step, on every rank."""
        if self._ranks is None or not self._expected:
            return
        counts = torch.tensor([len(self._kept[name]) for name in self._expected], dtype=torch.float64, device="cpu")
        most, minus_least = self._ranks.all_reduce(torch.cat([counts, -counts]), "max").view(2, -1)
        for (name, shard), has_any in zip(self._expected.items(), ((most > 0) & (most == -minus_least)).tolist(), strict=True):
            for parts, use in self._kept.pop(name) if has_any else ():
                tensors = [whole(part) if shard is None else whole_of_flat(part, shard, self._ranks) for part in parts]
                if self._ranks.index == 0:
                    with failing_alone(functools.partial(self._failed, name)):  # the other ranks go on to the next tensor
                        use(*tensors)
        self._kept.clear()

    def close(self) -> None:
        """Release all parts, as the step is lost; the other ranks then assemble nothing."""
        self._kept.clear()
