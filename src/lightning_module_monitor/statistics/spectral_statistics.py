"""Statistics of singular values: what of a tensor they are computed from, and how the host finishes them."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.kinds import KINDS, RESIDUALS, SINGULAR_VALUES
from lightning_module_monitor.record import UNDEFINED
from lightning_module_monitor.statistics import effective_rank as ranks
from lightning_module_monitor.statistics.effective_rank import MAX_FEATURES, singular_values
from lightning_module_monitor.statistics.functions import Value
from lightning_module_monitor.statistics.spectra import NUM_STEPS, Spectra, spectra

MAX_VALUES = len(SINGULAR_VALUES)
"""Limit of the singular values that are recorded."""


class Source(enum.Enum):
    """The numbers from which a statistic is computed."""

    LEADING = "the largest singular values"
    """Largest singular values of matrices, by :mod:`~lightning_module_monitor.statistics.spectra`."""
    ALL = "all singular values"
    """All singular values of features or matrices, by :mod:`~lightning_module_monitor.statistics.effective_rank`."""


class Spectrum:
    """The singular values of the matrices of a tensor; those of several groups together are those of a block-diagonal matrix.

    Args:
        source: What the numbers are of.
        row: Float64: the number of times they were added up, that times the number of matrices, and all numbers
            of each matrix, one after the other. They may be the sums of several ranks.
    """

    def __init__(self, source: Source, row: Array) -> None:
        self.source = source
        times, num_matrices = row[:2]
        self._numbers = row[2:].reshape(round(num_matrices / times), -1)
        self._times = times

    @functools.cached_property
    def leading(self) -> Spectra:
        """The figures of all matrices together, each of shape ``(1, ...)``."""
        each = spectra(self._numbers / self._times, MAX_VALUES)
        if len(self._numbers) == 1:
            return each
        norm = each.spectral_norm.max(keepdims=True)
        stable_rank = (each.stable_rank * (each.spectral_norm / norm) ** 2).sum(keepdims=True) if norm else np.array([UNDEFINED])
        order = np.argsort(-each.values, axis=None)[:MAX_VALUES]  # NaN, of values that are not known, last
        return Spectra(norm, stable_rank, each.values.reshape(1, -1)[:, order], each.residuals.reshape(1, -1)[:, order])

    @functools.cached_property
    def values(self) -> Array:
        """All singular values."""
        return np.concatenate([singular_values(products) for _num_rows, _totals, products in self._sums()])

    @functools.cached_property
    def centered_values(self) -> Array:
        """All singular values of the features less their means."""
        return np.concatenate([singular_values(products, totals, num_rows) for num_rows, totals, products in self._sums()])

    def _sums(self) -> list[tuple[int, Array, Array]]:
        num_features = round((math.sqrt(4 * self._numbers.shape[1] - 3) - 1) / 2)  # one number, the features, and their products
        return [
            (round(numbers[0]), numbers[1 : 1 + num_features], numbers[1 + num_features :].reshape(num_features, num_features))
            for numbers in self._numbers
        ]


def num_products(shape: Sequence[int], source: Source) -> int:
    """About how many multiplications a source takes, of matrices of shape ``(groups, rows, columns)``."""
    groups, smaller, larger = shape[0], min(shape[1:]), max(shape[1:])
    if source is Source.ALL:
        return groups * smaller**2 * (larger + 4 * smaller)  # products, and eigenvalues
    steps = min(smaller, NUM_STEPS)
    return groups * steps * (2 * smaller * larger + steps * (smaller + larger))  # with the matrix, and with known directions


def row_of(matrices: Sequence[Array]) -> Array:
    """The numbers of matrices as :class:`Spectrum` takes them."""
    return np.concatenate([np.array([1.0, len(matrices)]), *(numbers.reshape(-1) for numbers in matrices)])


def _spectral_norm(spectrum: Spectrum) -> float:
    """The largest singular value, at least 0, to within 0.1 %, by 40 steps of Golub-Kahan bidiagonalization."""
    return float(spectrum.leading.spectral_norm[0])


def _stable_rank(spectrum: Spectrum) -> float:
    """``sum(s**2) / max(s)**2`` of the singular values ``s``, from 1 to their number; undefined if all are zero.

    Of parameters to within 0.2 %.
    """
    return ranks.stable_rank(spectrum.values) if spectrum.source is Source.ALL else float(spectrum.leading.stable_rank[0])


def _effective_rank(spectrum: Spectrum) -> float:
    """``exp(-sum(p * ln(p)))`` of the singular values' shares ``p = s / sum(s)``, from 1 to their number (Roy and Vetterli 2007).

    Undefined if all are zero.
    """
    return ranks.effective_rank(spectrum.values)


def _centered_stable_rank(spectrum: Spectrum) -> float:
    """``stable_rank`` of the features less their means over all samples and tokens of the step."""
    return ranks.stable_rank(spectrum.centered_values)


def _centered_effective_rank(spectrum: Spectrum) -> float:
    """``effective_rank`` of the features less their means over all samples and tokens of the step."""
    return ranks.effective_rank(spectrum.centered_values)


def _value(spectrum: Spectrum, *, number: int) -> float:
    return float(spectrum.leading.values[0, number])


def _residual(spectrum: Spectrum, *, number: int) -> float:
    return float(spectrum.leading.residuals[0, number])


@dataclass(frozen=True)
class SpectralStatistic(Value):
    """A statistic of the singular values of a tensor as matrices, or of an activation's features.

    Attributes:
        finish: Takes the :class:`Spectrum`, and returns the statistic.
        is_of_all: Whether it needs all singular values.
        is_of_features: Whether it is of activations alone.
        is_of_matrices: Whether it is of parameters, their gradients, updates, states and differences alone.
        max_features: Limit of the features, or of the smaller side of a matrix, where all singular values are needed.
        gathers: Whether a matrix that is laid out over ranks is assembled on one of them; else it is refused.
    """

    finish: Callable[[Spectrum], float] = field(kw_only=True)
    is_of_all: bool = False
    is_of_features: bool = False
    is_of_matrices: bool = False
    max_features: int = MAX_FEATURES
    gathers: bool = False

    @property
    def is_merged_by_name(self) -> bool:
        """It is not: it is finished once, from the numbers of all ranks."""
        return False

    @property
    def kinds(self) -> list[str]:
        """The kinds that have it."""
        of_features = [name for name, kind in KINDS.items() if kind.has_units and not self.is_of_matrices]
        of_matrices = [name for name, kind in KINDS.items() if kind.has_matrices and not self.is_of_features]
        return [*of_features, *of_matrices]

    def source(self, kind: str) -> Source:
        """The source for tensors of a kind."""
        return Source.ALL if self.is_of_all or KINDS[kind].has_units else Source.LEADING


SPECTRAL_STATISTICS: Mapping[str, SpectralStatistic] = {
    "spectral_norm": SpectralStatistic(finish=_spectral_norm, is_of_matrices=True),
    "stable_rank": SpectralStatistic(finish=_stable_rank),
    "effective_rank": SpectralStatistic(finish=_effective_rank, is_of_all=True),
    "centered_stable_rank": SpectralStatistic(finish=_centered_stable_rank, is_of_all=True, is_of_features=True),
    "centered_effective_rank": SpectralStatistic(finish=_centered_effective_rank, is_of_all=True, is_of_features=True),
}
"""By name."""


LARGEST_VALUES: Mapping[str, SpectralStatistic] = {
    name: SpectralStatistic(finish=functools.partial(finish, number=number), is_of_matrices=True)
    for number, names in enumerate(zip(SINGULAR_VALUES, RESIDUALS, strict=True))
    for name, finish in zip(names, (_value, _residual), strict=True)
}
"""The largest singular values, each followed by its residual, by the name in the key."""
