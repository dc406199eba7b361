"""The sums and matrices of a step from which singular values are computed, on their devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from torch import Tensor

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.distributed.reduce import sum_rows
from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.keys import Key
from lightning_module_monitor.statistics.channels import with_channels
from lightning_module_monitor.statistics.effective_rank import GramSums, gram_sums, gram_sums_of_matrix
from lightning_module_monitor.statistics.functions import Value
from lightning_module_monitor.statistics.precision import Difference
from lightning_module_monitor.statistics.spectra import bidiagonals
from lightning_module_monitor.statistics.spectral_statistics import Source, SpectralStatistic, Spectrum, row_of
from lightning_module_monitor.statistics.stream import Identity, Stream

OnError: TypeAlias = Callable[[Stream, Source, Exception], None]


class ObservedSpectra:
    """The sums of products of features, and the bidiagonal matrices of parameters.

    Args:
        on_error: Receives a stream, the source of its statistics that could not be computed, and the error.
    """

    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error
        self._sums: dict[Stream, list[GramSums]] = {}
        self._bidiagonals: list[tuple[Sequence[Stream], Tensor]] = []
        """Batches of matrices, with the stream of each."""

    def observe_features(self, stream: Stream, tensor: Tensor) -> None:
        """Add samples and tokens to those of the step.

        Args:
            stream: The stream of an activation or of its gradient.
            tensor: Any shape, with at least one element, detached. Its channels are the features; one, if it has no dimension or one.
        """
        try:
            tensor, others = with_channels(tensor if tensor.dim() > 1 else tensor.reshape(-1, 1))
            rows = tensor.permute(*others, *({*range(tensor.dim())} - {*others}))
            sums = gram_sums(rows, _max_features(stream))
            self._sums[stream] = [self._sums[stream][0].plus(sums)] if stream in self._sums else [sums]
        except Exception as error:
            self._on_error(stream, Source.ALL, error)

    def observe_matrices(self, weights: Mapping[Stream, Difference]) -> None:
        """Take matrices, each of shape ``(groups, rows, columns)``, or differences of matrices."""
        leading = {stream: weight for stream, weight in weights.items() if Source.LEADING in stream.sources}
        try:
            self._bidiagonals += bidiagonals(leading)
        except Exception as error:
            for stream in leading:
                self._on_error(stream, Source.LEADING, error)
        for stream, weight in weights.items():
            if Source.ALL in stream.sources:
                try:
                    limit = _max_features(stream)
                    self._sums[stream] = [gram_sums_of_matrix(matrix, limit) for matrix in weight.computed()]
                except Exception as error:
                    self._on_error(stream, Source.ALL, error)

    def tensors(self) -> list[Tensor]:
        """The tensors to copy to the host."""
        sums = (tensor for several in self._sums.values() for each in several for tensor in (each.totals, each.products))
        return [*sums, *(numbers for _streams, numbers in self._bidiagonals)]

    def rows(self, arrived: Iterator[Array]) -> dict[tuple[Identity, Source], Array]:
        """The row of numbers of each stream and source, from the arrays of :meth:`tensors` on the host."""
        matrices: dict[tuple[Identity, Source], list[Array]] = {}
        for stream, several in self._sums.items():
            matrices[stream.identity, Source.ALL] = [
                np.concatenate([[each.num_rows], next(arrived), next(arrived).reshape(-1)]) for each in several
            ]
        for streams, _numbers in self._bidiagonals:
            for stream, numbers in zip(streams, next(arrived), strict=True):
                matrices.setdefault((stream.identity, Source.LEADING), []).append(numbers)
        return {name: row_of(several) for name, several in matrices.items()}

    @property
    def streams(self) -> list[Stream]:
        """The streams that were observed."""
        return [*self._sums, *(stream for streams, _numbers in self._bidiagonals for stream in streams)]


def finished_spectra(
    due: Iterable[tuple[Stream, str, Value]],
    rows: Mapping[tuple[Identity, Source], Array],
    ranks: Ranks | None,
    fail: Callable[[Stream, str, str, Exception], None],
) -> dict[Key, float]:
    """The statistics of singular values by key.

    Args:
        due: Streams, each with the name of a value and the value; the same on every rank.
        rows: The rows of numbers that this rank has observed.
        ranks: The ranks that train together, on each of which this is called; ``None`` for one alone.
        fail: Receives what cannot be finished, after the collectives, as eigenvalues that do not converge: a stream, the name, the source.
    """
    statistics = [(stream, name, value) for stream, name, value in due if isinstance(value, SpectralStatistic)]
    if not statistics:
        return {}
    if ranks is not None:
        rows = sum_rows([*dict.fromkeys((stream.identity, each.source(stream.kind)) for stream, _name, each in statistics)], rows, ranks)
    known: dict[tuple[Identity, Source], Spectrum] = {}
    values: dict[Key, float] = {}
    for stream, name, statistic in statistics:
        of_source = stream.identity, statistic.source(stream.kind)
        if of_source in rows:
            try:
                if of_source not in known:
                    known[of_source] = Spectrum(of_source[1], rows[of_source])
                values[stream.series[name]] = statistic.finish(known[of_source])
            except Exception as error:
                fail(stream, name, of_source[1].value, error)
    return values


def _max_features(stream: Stream) -> int:
    return max(statistic.max_features for statistic in stream.spectral.values())
