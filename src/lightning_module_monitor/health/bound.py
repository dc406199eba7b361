"""The series that a rule judges, bound to the columns of records: what is known of them is found once, and not in each record."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import ROOT_SITE

ORDER_OF_EVENTS = ("parameter", "activation", "activation_gradient", "gradient_before_clip", "gradient", "update")
"""Kinds in the order of a step, in which causes precede effects."""
_BACKWARD = ("activation_gradient", "gradient_before_clip", "gradient")

MAX_PARTS = 64
"""Number of parts of a rule's series that are kept: in most runs all series have values in every record, or few sets of them do."""


def is_weight(site: str) -> bool:
    """Whether a parameter is no bias by its own name, or by that of the bias that a parametrization computes from it.

    >>> is_weight("fc.weight"), is_weight("adapter.a"), is_weight("biases.0.weight"), is_weight("weights.0.bias")
    (True, True, True, False)
    """
    *path, name = site.split(".")
    return "bias" not in (path[-1] if path[-2:-1] == ["parametrizations"] else name)


class Bound:
    """Series in the order of the model, and their columns.

    Args:
        keys: Their keys.
        columns: Their columns in the vector that the judge makes of a record, shape ``(series,)``.
        rates: The columns of the learning rates of their parameters, of the same shape; -1 where there is none.
    """

    def __init__(self, keys: Sequence[Key], columns: NDArray[np.intp], rates: NDArray[np.intp]) -> None:
        self.keys = keys
        self.columns = columns
        self.rates = rates
        self._parts: dict[bytes, Bound] = {}
        self._by_statistic: dict[str, NDArray[np.bool_]] = {}

    def where(self, mask: NDArray[np.bool_]) -> Bound:
        """Some of the series: the same object for the same ones."""
        name = mask.tobytes()
        if name not in self._parts:
            if len(self._parts) == MAX_PARTS:
                self._parts.clear()
            self._parts[name] = Bound([*itertools.compress(self.keys, mask)], self.columns[mask], self.rates[mask])
        return self._parts[name]

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """The keys as texts."""
        return tuple(key.format() for key in self.keys)

    def _mask(self, flags: Sequence[bool]) -> NDArray[np.bool_]:
        return np.array(flags, bool)

    @functools.cached_property
    def is_weight(self) -> NDArray[np.bool_]:
        """Which series are of a weight."""
        return self._mask([is_weight(key.site) for key in self.keys])

    @functools.cached_property
    def is_first_output(self) -> NDArray[np.bool_]:
        """Which series are of the first output of a module."""
        return self._mask([key.kind == "activation" and "output_" not in key.site.rpartition(".")[2] for key in self.keys])

    def has_statistic(self, name: str) -> NDArray[np.bool_]:
        """Which series are of a statistic."""
        if name not in self._by_statistic:
            self._by_statistic[name] = self._mask([key.statistic == name for key in self.keys])
        return self._by_statistic[name]

    @functools.cached_property
    def by_kind(self) -> dict[str, NDArray[np.intp]]:
        """Indices of the series of single tensors, by kind."""
        kinds = [key.kind if key.site != ROOT_SITE else "" for key in self.keys]
        return {kind: np.flatnonzero([kind == other for other in kinds]) for kind in sorted({*kinds} - {""})}

    @functools.cached_property
    def roots(self) -> dict[str, int]:
        """Index of the series of all tensors together, by kind."""
        return {key.kind: index for index, key in enumerate(self.keys) if key.site == ROOT_SITE}

    @functools.cached_property
    def parameters(self) -> NDArray[np.intp]:
        """Indices of the series of parameters."""
        return np.array([index for index, key in enumerate(self.keys) if key.kind == "parameter"], np.intp)

    @functools.cached_property
    def gradients(self) -> NDArray[np.intp]:
        """Index of the gradient of each of the :attr:`parameters`; -1 without one."""
        gradient_by_site = {key.site: index for index, key in enumerate(self.keys) if key.kind == "gradient"}
        return np.array([gradient_by_site.get(self.keys[index].site, -1) for index in self.parameters], np.intp)

    @functools.cached_property
    def parameter_texts(self) -> tuple[str, ...]:
        """The keys of the :attr:`parameters` as texts."""
        return tuple(self.texts[index] for index in self.parameters)

    @functools.cached_property
    def order_of_events(self) -> NDArray[np.intp]:
        """Indices in the order of a step, in which causes precede effects; modules run in reverse order backward."""
        kinds = [key.kind for key in self.keys]
        ranks = [(ORDER_OF_EVENTS.index(kind), -index if kind in _BACKWARD else index) for index, kind in enumerate(kinds)]
        return np.array(sorted(range(len(kinds)), key=ranks.__getitem__), np.intp)

    @functools.cached_property
    def texts_in_order_of_events(self) -> tuple[str, ...]:
        """The keys as texts in this order."""
        return tuple(self.texts[index] for index in self.order_of_events)
