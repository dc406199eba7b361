"""Which rows of the table are whose, and how they become values: the same from step to step, as long as the same is seen."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_module_monitor.kernels.moments import Array, Moments
from lightning_module_monitor.record import Values
from lightning_module_monitor.statistics.registry import Statistic
from lightning_module_monitor.statistics.watch import BASE, CURRENT, OWN, PRODUCT, Watch, Wish


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

    def form(self, seen: list[int]) -> Form:
        """How those watches are finished that are seen in a step, which have these first rows."""
        if self._form[0] != seen:
            self._form = seen, Form([(self.watches[row], row) for row in seen])
        return self._form[1]


@dataclass(frozen=True)
class _Group:
    """Watches with the same statistics, which are finished together."""

    first: Watch
    """One of them."""
    parts: Sequence[np.ndarray | slice]
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
        self._one_token = np.array([row for watch, row in watches if watch.is_one_token], dtype=np.int64)
        alike: defaultdict[tuple[str, ...], list[Wish]] = defaultdict(list)
        for watch, row in watches:
            if watch.statistics:
                alike[tuple(watch.statistics)].append((watch, row))
        self._groups = [_group(members) for members in alike.values()]
        keys = [key for group in self._groups for key in group.keys]
        self._num_keys = len(keys)
        last = {key: place for place, key in enumerate(keys)}
        self._last_places = np.array([*last.values()], dtype=np.int64)
        """Of keys that several watches have, the last of each."""
        self._places = {key: place for place, key in enumerate(last)}

    def finish(self, table: Tensor, fail: Callable[[Watch, str, Exception], None]) -> Values:
        """Statistics by key.

        Args:
            table: The fields of all rows' moments, shape ``(fields, rows)``, float64, on the host.
            fail: Told of a statistic that could not be finished, by its name, and one of those that want it; its values are NaN.
        """
        numbers, start = np.empty(self._num_keys), 0
        with np.errstate(all="ignore"):  # what there is too little of is NaN, as torch has it
            fields = nan_where_empty(table.numpy())
            if len(self._one_token):
                fields = _with_whole_tokens(fields, self._one_token)
            for group in self._groups:
                end = start + len(group.keys)
                columns = numbers[start:end].reshape(-1, len(group.first.statistics))
                parts = [Moments(*fields[:, index]) for index in group.parts]
                for column, (name, one) in enumerate(group.first.statistics.items()):
                    try:
                        columns[:, column] = one.finish(*_taken_by(one, parts))
                    except Exception as error:  # one of the user's own
                        columns[:, column] = np.nan
                        fail(group.first, name, error)
                start = end
        return Values(self._places, numbers if len(self._places) == len(numbers) else numbers[self._last_places])


def nan_where_empty(fields: Array) -> Array:
    """Of an empty tensor mean, spread and extremes are NaN for statistics, and not what merging starts from.

    Args:
        fields: Of all rows' moments, shape ``(fields, rows)``, float64; it is written into.

    Returns:
        The same array.
    """
    if 0.0 in fields[0].tolist():
        fields[np.ix_(_OF_ELEMENTS, fields[0] == 0)] = np.nan
    return fields


_OF_ELEMENTS = [Moments._fields.index(name) for name in ("mean", "deviations", "third", "fourth", "maximum", "minimum")]
"""The moments that there are none of without an element."""


def _group(members: Sequence[Wish]) -> _Group:
    first = members[0][0]
    rows = [row for _watch, row in members]
    return _Group(
        first,
        [_index([row + part for row in rows]) for part in range(first.num_rows)],
        [*itertools.chain.from_iterable(watch.statistic_keys for watch, _row in members)],
    )


def _index(rows: list[int]) -> np.ndarray | slice:
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))  # nothing is gathered
    return np.array(rows, dtype=np.int64)


def _with_whole_tokens(fields: Array, index: np.ndarray) -> Array:
    """Of rows that are one token each, whose parts were measured as if they were whole: the norm of the whole."""
    changed: Array = fields.copy()
    moments = Moments(*changed)
    norm = np.sqrt(moments.squares[index])
    moments.tokens[index], moments.token_norm[index] = 1.0, norm
    moments.token_rms[index] = norm / np.sqrt(moments.elements[index])
    return changed


def _taken_by(statistic: Statistic, parts: list[Moments]) -> list[Moments]:
    """The moments that a statistic is finished from."""
    if statistic.paired:
        return [parts[CURRENT], parts[BASE], parts[PRODUCT]]
    return [parts[OWN], parts[BASE]] if statistic.relative else [parts[OWN]]
