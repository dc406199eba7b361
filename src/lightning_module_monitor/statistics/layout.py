"""How rows of moments become values of statistics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lightning_module_monitor.kernels.moments import Array, Moments
from lightning_module_monitor.record import Values
from lightning_module_monitor.statistics.spec import BASE, CURRENT, OWN, PRODUCT, MetricSpec


class _Group(NamedTuple):
    """Specifications with the same statistics, which are finished together."""

    first: MetricSpec
    parts: Sequence[np.ndarray | slice]
    """For each row of a specification those of all of them: int64, shape ``(specifications,)``, or a slice where they are adjacent."""
    keys: Sequence[str]
    """Of every statistic of the first specification, of the second, and so on."""


class Layout:
    """How moments become statistics.

    Args:
        rows: First row of each specification.
    """

    def __init__(self, rows: Sequence[tuple[MetricSpec, int]]) -> None:
        alike: defaultdict[tuple[str, ...], list[tuple[MetricSpec, int]]] = defaultdict(list)
        for spec, row in rows:
            if spec.statistics:
                alike[tuple(spec.statistics)].append((spec, row))
        self._groups: list[_Group] = []
        for members in alike.values():
            first = members[0][0]
            parts = [_index([row + part for _spec, row in members]) for part in range(first.num_rows)]
            self._groups.append(_Group(first, parts, [key for spec, _row in members for key in spec.statistic_keys]))
        keys = [key for group in self._groups for key in group.keys]
        self._num_keys = len(keys)
        last = {key: place for place, key in enumerate(keys)}
        self._last_places = np.array([*last.values()], dtype=np.int64)
        """Of keys that several specifications have, the last of each."""
        self._places = {key: place for place, key in enumerate(last)}

    def finish(self, table: Tensor, whole_tokens: Collection[int], fail: Callable[[MetricSpec, str, str, Exception], None]) -> Values:
        """Statistics by key.

        Args:
            table: The fields of all rows' moments, shape ``(fields, rows)``, float64, on the host.
            whole_tokens: Rows that are one token each, of which several ranks have parts.
            fail: Receives a statistic that could not be finished: a specification that has it, its name, "its moments", the error. Its
                values are NaN.
        """
        numbers, start = np.empty(self._num_keys), 0
        with np.errstate(all="ignore"):  # what there is too little of is NaN, as torch has it
            fields = nan_where_empty(table.numpy())
            if whole_tokens:
                fields = _with_whole_tokens(fields, np.array([*whole_tokens], dtype=np.int64))
            for group in self._groups:
                end = start + len(group.keys)
                columns = numbers[start:end].reshape(-1, len(group.first.statistics))
                parts = [Moments(*fields[:, index]) for index in group.parts]
                for column, (name, one) in enumerate(group.first.statistics.items()):
                    taken = (CURRENT, BASE, PRODUCT) if one.paired else (OWN, BASE) if one.relative else (OWN,)
                    try:
                        columns[:, column] = one.finish(*[parts[part] for part in taken])
                    except Exception as error:  # one of the user's own
                        columns[:, column] = np.nan
                        fail(group.first, name, "its moments", error)
                start = end
        return Values(self._places, numbers if len(self._places) == len(numbers) else numbers[self._last_places])


def nan_where_empty(fields: Array) -> Array:
    """Make mean, spread and extremes of empty tensors NaN, in place of what merging starts from.

    ``fields`` of all rows' moments, shape ``(fields, rows)``, float64, is written into and returned.
    """
    if 0.0 in fields[0].tolist():
        fields[np.ix_(_OF_ELEMENTS, fields[0] == 0)] = np.nan
    return fields


_OF_ELEMENTS = [Moments._fields.index(name) for name in ("mean", "deviations", "third", "fourth", "maximum", "minimum")]
"""The moments that there are none of without an element."""


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
