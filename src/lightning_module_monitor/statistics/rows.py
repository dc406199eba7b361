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

from lightning_module_monitor.statistics.moments import Moments, Need
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


class Block(NamedTuple):
    """Watches of which the kernel can read one tensor each, all in one call."""

    of: Sequence[Watch]
    """These, and those that want more than moments."""
    places: list[int]
    """Which of them it is."""
    first: dict[int, int]
    """First row by the identity of each."""
    rows: np.ndarray
    """The first rows again, int64."""
    needs: np.ndarray
    """What is needed of each, bits of ``Need``, int64."""


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
        self._blocks: dict[int, Block] = {}
        """By the identity of the watches."""
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

    def block(self, watches: Sequence[Watch]) -> Block:
        """Those of some watches that want no more than moments; of the same object they are looked up once."""
        known = self._blocks.get(id(watches))
        if known is None:
            places = [place for place, watch in enumerate(watches) if 0 < watch.needs < Need.HISTOGRAM]
            measured = [watches[place] for place in places]
            rows = np.array([self.first(watch) for watch in measured], dtype=np.int64)
            needs = np.array([watch.needs for watch in measured], dtype=np.int64)
            known = Block(watches, places, dict(zip(map(id, measured), rows.tolist(), strict=True)), rows, needs)
            self._blocks[id(watches)] = known
        return known

    def form(self, seen: list[int]) -> Form:
        """How those watches are finished that are seen in a step, which have these first rows."""
        if self._form[0] != seen:
            self._form = seen, Form([(self.watches[row], row) for row in seen])
        return self._form[1]


@dataclass(frozen=True)
class _Group:
    """Watches with the same statistics, which are finished together."""

    statistics: Sequence[Statistic]
    parts: Sequence[Tensor | slice]
    """Of each of a watch's rows, those of all watches: int64, shape ``(watches,)``, or where they lie in a row the whole of it."""
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

    def finish(self, table: Tensor) -> dict[str, float]:
        """Statistics by key.

        Args:
            table: The fields of all rows' moments, shape ``(fields, rows)``, float64, on the host.
        """
        if len(self._one_token):
            table = torch.stack(_with_whole_tokens(Moments(*table), self._one_token))
        nan_where_empty(table)
        values: dict[str, float] = {}
        for group in self._groups:
            parts = [Moments(*table[:, index]) for index in group.parts]
            columns = torch.stack([one.finish(*_taken_by(one, parts)) for one in group.statistics], dim=1)
            values.update(zip(group.keys, columns.flatten().tolist(), strict=True))
        return values


def nan_where_empty(table: Tensor) -> None:
    """Of an empty tensor mean, spread and extremes are NaN for statistics, and not what merging starts from.

    Args:
        table: As for :meth:`Form.finish`; it is written into.
    """
    fields = table.numpy()
    if np.count_nonzero(fields[0]) < fields.shape[1]:
        fields[np.ix_(_OF_ELEMENTS, fields[0] == 0)] = np.nan


_OF_ELEMENTS = [Moments._fields.index(name) for name in ("mean", "deviations", "maximum", "minimum")]
"""The moments that there are none of without an element."""


def _group(members: Sequence[Wish]) -> _Group:
    first = members[0][0]
    rows = [row for _watch, row in members]
    return _Group(
        tuple(first.statistics.values()),
        [_index([row + part for row in rows]) for part in range(first.num_rows)],
        [*itertools.chain.from_iterable(watch.statistic_keys for watch, _row in members)],
    )


def _index(rows: list[int]) -> Tensor | slice:
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))  # nothing is gathered
    return torch.tensor(rows, device="cpu")


def _with_whole_tokens(moments: Moments, index: Tensor) -> Moments:
    """Of rows that are one token each, whose parts were measured as if they were whole: the norm of the whole."""
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
