"""The numbers of a step by key: one array, whose keys other steps have too."""

from __future__ import annotations

import itertools
from collections.abc import ItemsView, Iterator, Mapping, ValuesView

import numpy as np
import numpy.typing as npt

_NO_PLACES: Mapping[str, int] = {}
_NO_NUMBERS: npt.NDArray[np.float64] = np.empty(0)


UNDEFINED_BITS = 0x7FF8_756E_6465_662E
"""A quiet NaN that spells "undef.": a statistic that finite tensors do not have, as the ratio of zero to zero. Any other NaN tells of
elements that are not finite."""

UNDEFINED: float = float(np.uint64(UNDEFINED_BITS).view(np.float64))


def is_undefined(numbers: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which numbers are of a statistic that finite tensors do not have; of the same shape."""
    return np.asarray(np.asarray(numbers, dtype=np.float64).view(np.uint64) == UNDEFINED_BITS)


class Values(Mapping[str, float]):
    """Values by key, to which more may be added.

    No number is an object of Python's before somebody asks for it, and a thousand records in memory are as large as their numbers:
    a dict of floats takes eight times as much, and as long to make as all that a monitored step does after the update.

    Args:
        places: Place in ``numbers`` by key, from 0 on in order. It is shared with other steps and is not written to.
        numbers: Shape ``(places,)``, float64; nobody else's.
    """

    def __init__(self, places: Mapping[str, int] = _NO_PLACES, numbers: npt.NDArray[np.float64] = _NO_NUMBERS) -> None:
        self._places = places
        self._numbers = numbers
        self._others: dict[str, float] = {}
        """What was set under further keys."""

    def __getitem__(self, key: str) -> float:
        place = self._places.get(key)
        return self._others[key] if place is None else float(self._numbers[place])

    def __setitem__(self, key: str, value: float) -> None:
        place = self._places.get(key)
        if place is None:
            self._others[key] = value
        else:
            self._numbers[place] = value

    def __contains__(self, key: object) -> bool:
        return key in self._places or key in self._others

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self._places, self._others)

    def __len__(self) -> int:
        return len(self._numbers) + len(self._others)

    def copy(self) -> Values:
        """The same values, to be changed apart from these."""
        copied = Values(self._places, self._numbers.copy())
        copied._others = self._others.copy()
        return copied

    __copy__ = copy

    def update(self, more: Mapping[str, float]) -> None:
        """Set several."""
        for key, value in more.items():
            self[key] = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.items())})"

    def items(self) -> ItemsView[str, float]:
        """Every key with its value, without a look at each."""
        return _Items(self)

    def values(self) -> ValuesView[float]:
        """Every value, likewise."""
        return _Numbers(self)

    def in_order(self) -> Iterator[float]:
        """The values in the order of the keys."""
        return itertools.chain(self._numbers.tolist(), self._others.values())


class _Items(ItemsView[str, float]):
    _mapping: Values

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return zip(self._mapping, self._mapping.in_order(), strict=True)


class _Numbers(ValuesView[float]):
    _mapping: Values

    def __iter__(self) -> Iterator[float]:
        return self._mapping.in_order()
