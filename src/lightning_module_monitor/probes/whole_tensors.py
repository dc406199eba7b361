"""Tensors that are laid out over ranks, put together at the end of a step: to do so takes all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.distributed.shards import is_sharded, whole
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.probes.probe import WatchedParameter

FOR_THE_FILE = "for the file"

Use = Callable[..., None]
"""Takes as many whole tensors as were kept together."""


class WholeTensors:
    """Keeps a copy of this rank's part until the step is over.

    By the time that a parameter or a gradient is seen, an error may have taken the step from one of the ranks, and the others
    would wait for its part. At the end of the step all ranks say what they have, and what all of them have is put together.

    Args:
        expected: Names of all that may come, in an order that every rank has alike. Where there are none nobody is asked.
        ranks: The processes that train together; ``None`` where there is one.
        failed: Told of a tensor, by its name, that could not be used.
    """

    def __init__(self, expected: Sequence[str], ranks: Ranks | None, failed: Callable[[str, Exception], None]) -> None:
        self._expected = expected
        self._ranks = ranks
        self._failed = failed
        self._kept: defaultdict[str, list[tuple[list[Tensor], Use]]] = defaultdict(list)

    def give(self, name: str, tensors: Sequence[Tensor], use: Use) -> None:
        """Have something done with whole tensors, by the first rank: at once where they are, at the end of the step where not.

        Args:
            name: One of those expected, if any of the tensors is laid out over ranks.
            tensors: They may be overwritten as soon as this returns.
            use: What is done.
        """
        if self._ranks is None:
            use(*(whole(tensor) for tensor in tensors))
        elif any(is_sharded(tensor) for tensor in tensors):
            self._kept[name].append(([tensor.detach().clone() for tensor in tensors], use))
        elif self._ranks.index == 0:
            use(*tensors)

    def put_together(self) -> None:
        """The step is over, on every rank."""
        if self._ranks is None or not self._expected:
            return
        counts = torch.tensor([len(self._kept[name]) for name in self._expected], dtype=torch.float64, device=self._ranks.device)
        most, minus_least = self._ranks.all_reduce(torch.cat([counts, -counts]), "max").view(2, -1)
        for name, has_any in zip(self._expected, ((most > 0) & (most == -minus_least)).tolist(), strict=True):
            for parts, use in self._kept.pop(name) if has_any else ():
                tensors = [whole(part) for part in parts]
                if self._ranks.index == 0:
                    self._use(name, tensors, use)
        self._kept.clear()

    def forget(self) -> None:
        """The step is lost: other ranks are told that there is nothing here."""
        self._kept.clear()

    def _use(self, name: str, tensors: Sequence[Tensor], use: Use) -> None:
        try:
            use(*tensors)
        except MonitorError:
            raise
        except Exception as error:
            # The next one is put together all the same: the others are there.
            self._failed(name, error)


def name_of(kind: str, site: str, purpose: str = "for functions") -> str:
    """What a whole tensor is called, in messages too."""
    return f"The whole {kind} of {site!r} {purpose}"


def expected_names(with_functions: Iterable[WatchedParameter], captured: Iterable[WatchedParameter]) -> list[str]:
    """Of parameters that are laid out over ranks: all tensors that functions want, and those that are captured."""
    functions = [
        name_of(kind, one.site.name)
        for one in with_functions
        if _is_laid_out(one)
        for kind, watch in one.watches.items()
        if watch.functions
    ]
    return functions + [name_of(kind, one.site.name, FOR_THE_FILE) for one in captured if _is_laid_out(one) for kind in one.watches]


def _is_laid_out(watched: WatchedParameter) -> bool:
    parameter = watched.site.tensor()
    return parameter is not None and is_sharded(parameter)
