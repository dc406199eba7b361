"""Which rows of the table are whose, and how they become values: the same from step to step, as long as the same is seen."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_module_monitor.statistics.moments import Moments
from lightning_module_monitor.statistics.registry import Statistic
from lightning_module_monitor.statistics.watch import BASE, CURRENT, OWN, PRODUCT, Watch, Wish

Wishes = Sequence[Sequence[Wish]]
"""Of several terms the wishes for each."""


class Targets(NamedTuple):
    """The rows that several terms go into."""

    first: Mapping[int, int]
    """First row by the identity of a watch."""
    pairs: np.ndarray
    """Row and number of a term, int64, shape ``(any, 2)``."""


class Rows:
    """Numbers of rows. A watch keeps those that it got when it was first seen.

    Attributes:
        watches: Whose each row is.
    """

    def __init__(self, seen: Sequence[Watch] = ()) -> None:
        self.watches: list[Watch] = []
        self._first: dict[int, int] = {}
        """First row by the identity of a watch."""
        self._form: tuple[list[int], Form] = [], Form(())
        """What was seen in the last step, and how that was finished."""
        self._targets: dict[int, tuple[Wishes, Targets]] = {}
        """By the identity of the wishes."""
        for watch in seen:
            self.first(watch)

    def __reduce__(self) -> tuple[type[Rows], tuple[list[Watch]]]:
        """A copy's watches have other identities."""
        return Rows, ([self.watches[row] for row in self._first.values()],)

    def first(self, watch: Watch) -> int:
        """First row of a watch."""
        row = self._first.get(id(watch))
        if row is None:
            row = self._first[id(watch)] = len(self.watches)
            self.watches += [watch] * watch.num_rows
        return row

    def targets(self, wishes: Wishes) -> Targets:
        """The rows of wishes for several terms; of the same object they are looked up once."""
        known = self._targets.get(id(wishes))
        if known is None:
            first = {id(watch): self.first(watch) for of_one in wishes for watch, _row in of_one}
            pairs = [(first[id(watch)] + row, place) for place, of_one in enumerate(wishes) for watch, row in of_one]
            known = self._targets[id(wishes)] = wishes, Targets(first, np.array(pairs, dtype=np.int64).reshape(-1, 2))
        return known[1]

    def form(self, seen: list[int]) -> Form:
        """How those watches are finished that are seen in a step, which have these first rows."""
        if self._form[0] != seen:
            self._form = seen, Form([(self.watches[row], row) for row in seen])
        return self._form[1]


@dataclass(frozen=True)
class _Group:
    """Watches with the same statistics, which are finished together."""

    statistics: Sequence[Statistic]
    parts: Sequence[Tensor]
    """Of each of a watch's rows, those of all watches; int64, shape ``(watches,)``."""
    keys: Sequence[str]
    """Of every statistic of the first watch, of the second, and so on."""


class Form:
    """How moments become statistics.

    Args:
        watches: Each with its first row.
    """

    def __init__(self, watches: Sequence[Wish]) -> None:
        self.watches = watches
        self.counted = [row for watch, row in watches if watch.histograms]
        """Rows that have a histogram."""
        self._one_token = torch.tensor([row for watch, row in watches if watch.is_one_token], dtype=torch.int64, device="cpu")
        alike: defaultdict[tuple[str, ...], list[Wish]] = defaultdict(list)
        for watch, row in watches:
            if watch.statistics:
                alike[tuple(watch.statistics)].append((watch, row))
        self._groups = [_group(members) for members in alike.values()]

    def finish(self, moments: Moments) -> dict[str, float]:
        """Statistics by key.

        Args:
            moments: Of all rows, on the host.
        """
        table = torch.stack(_with_whole_tokens(moments, self._one_token))
        values: dict[str, float] = {}
        for group in self._groups:
            parts = [Moments(*table[:, index]) for index in group.parts]
            columns = torch.stack([one.finish(*_taken_by(one, parts)) for one in group.statistics], dim=1)
            values.update(zip(group.keys, columns.flatten().tolist(), strict=True))
        return values


def _group(members: Sequence[Wish]) -> _Group:
    first = members[0][0]
    index = torch.tensor([row for _watch, row in members], device="cpu")
    return _Group(
        tuple(first.statistics.values()),
        [index + part for part in range(first.num_rows)],
        [*itertools.chain.from_iterable(watch.statistic_keys for watch, _row in members)],
    )


def _with_whole_tokens(moments: Moments, index: Tensor) -> Moments:
    """Of rows that are one token each, whose parts were measured as if they were whole: the norm of the whole."""
    if not len(index):
        return moments
    norm = moments.squares[index].sqrt()
    return moments._replace(
        tokens=moments.tokens.index_fill(0, index, 1.0),
        token_norm=moments.token_norm.index_copy(0, index, norm),
        token_rms=moments.token_rms.index_copy(0, index, norm / moments.elements[index].sqrt()),
    )


def _taken_by(statistic: Statistic, parts: list[Moments]) -> list[Moments]:
    """The moments that a statistic is finished from."""
    if statistic.paired:
        return [parts[CURRENT], parts[BASE], parts[PRODUCT]]
    return [parts[OWN], parts[BASE]] if statistic.relative else [parts[OWN]]
