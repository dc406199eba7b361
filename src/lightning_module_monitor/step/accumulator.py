"""The observations of one monitored step, or one validation loop, until they are finished into values by key."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.distributed.reduce import Reduced, reduce_step
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.kernels.bins_of_floats import ALL_BINS, FINE, HISTOGRAM
from lightning_module_monitor.kernels.elements import in_words, plain, strided, to_host
from lightning_module_monitor.kernels.moments import Array, Need, merged
from lightning_module_monitor.kernels.table import MomentTable, Scale
from lightning_module_monitor.keys import Key
from lightning_module_monitor.record import NumbersOfStep
from lightning_module_monitor.statistics.channels import ChannelSums, merged_sums
from lightning_module_monitor.statistics.numbers import NO_MOMENTS, Observed
from lightning_module_monitor.statistics.precision import Difference, divided_by_scale
from lightning_module_monitor.statistics.spectral_statistics import Source
from lightning_module_monitor.statistics.stream import BASE, COMPARED_ROWS, OTHER, OWN, PRODUCT, Identity, Stream, Sums
from lightning_module_monitor.step.observed_results import ObservedResults, OnError
from lightning_module_monitor.step.observed_spectra import ObservedSpectra, finished_spectra
from lightning_module_monitor.step.observed_units import ObservedUnits, dead_fractions
from lightning_module_monitor.step.state import SeriesState


class StepAccumulator:
    """Takes tensors while a step runs, without a host read, and returns their values at its end.

    Args:
        on_error: Receives failures.
        state: The state from step to step.
        unobserved: Makes a context in which nothing is observed. Functions of the user run in it, as they may call the model.
    """

    def __init__(
        self,
        on_error: OnError,
        state: SeriesState | None = None,
        unobserved: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._on_error = on_error
        self._state = SeriesState() if state is None else state
        self._table, self._num_rows = MomentTable(), 0
        self._rows: dict[Stream, int] = {}
        """First row of each observed stream."""
        self._results = ObservedResults(self._fail, self._state, unobserved)
        self._sums: dict[tuple[Stream, ChannelSums], Tensor] = {}
        """Sums of a site's channels, on their device."""
        self._units = ObservedUnits()
        self._spectra = ObservedSpectra(self._fail_spectra)
        self.parts: set[Stream] = set()
        """Streams of which this rank holds its own shard."""
        self.totals: Iterable[Stream] = ()
        """Totals that were not planned, of streams that were observed."""
        self._failed: dict[str, Key] = {}
        """Keys of outputs that could not be computed, by themselves as loggers know them."""
        self.num_errors, self._failed_streams = 0, set[Identity]()
        self.has_totals = True
        """Whether totals are of all their members: where parameters are left out, there are none."""
        self.is_lost = False
        """Whether an error has ended the monitoring of this step, on any rank once :meth:`collect` was called."""
        self.differing: Sequence[Stream] = ()
        """Streams that differ between ranks although they must be equal, once :meth:`collect` was called."""
        self.histograms: dict[str, Histogram] = {}
        """Histogram by key, once :meth:`collect` was called; one that could not be counted is absent."""

    def observe(self, stream: Stream, tensor: Tensor, scale: Scale = None) -> None:
        """Take one tensor; it may be overwritten as soon as this returns. One that cannot be read is reported.

        Args:
            stream: What is recorded of it.
            tensor: Any shape, any real floating dtype; may be part of a graph, which is left as it is.
            scale: What the tensor is divided by.
        """
        try:
            if stream.needs:
                self._table.add((self._row(stream),), tensor, stream.needs, scale=scale)
            if scale is not None and (stream.channel_sums or stream.units or stream.sources or stream.functions):
                tensor = divided_by_scale(tensor, scale)
            for of in stream.channel_sums if tensor.numel() else ():
                sums = of.measure(strided(tensor).detach())
                self._sums[stream, of] = merged_sums(self._sums[stream, of], sums) if (stream, of) in self._sums else sums
            if stream.units and tensor.numel():
                self._units.observe(stream, strided(tensor).detach())
            if stream.sources and tensor.numel():
                self._spectra.observe_features(stream, strided(tensor).detach())
            if stream.functions:
                self.call_functions(stream, tensor)
        except MonitorError:
            raise
        except Exception as error:
            self.fail(stream, tensor, error)

    def observe_for(self, terms: Iterable[tuple[Difference, Sequence[tuple[Stream, int]]]]) -> None:
        """Take tensors, each for several rows. Rows that need no more than another row of the tensor share its measurement.

        Args:
            terms: Differences of tensors as :meth:`observe` takes them, each with streams, and for each of these the row that it
                is for: ``OWN`` or ``BASE``.
        """
        for term, targets in terms:
            rows: dict[int, list[int]] = {}
            for stream, part in targets:
                needs = stream.base_needs if part == BASE else stream.needs
                # A row without counts gets none of another's.
                enough = (known for known in rows if not needs & ~known and not (needs ^ known) & Need.COUNTS)
                if needs:
                    rows.setdefault(next(enough, needs), []).append(self._row(stream) + part)
                if stream.functions and part == OWN:
                    self.call_functions(stream, strided(term.written()))
            for needs, needing in rows.items():
                self._table.add(needing, term.tensor, needs, term.other, term.shift)

    def observe_pair(self, stream: Stream, current: Tensor, reference: Tensor) -> None:
        """Take the difference of two tensors, the model's and the reference's, and what its statistics need of either.

        Raises:
            ValueError: If their shapes differ.
        """
        self.measure_pair(stream, current, reference)
        self.call_functions(stream, current, reference)

    def measure_pair(self, stream: Stream, current: Tensor, reference: Tensor) -> None:
        """:meth:`observe_pair` without the functions: of tensors that are parts of what a function receives."""
        current, reference = strided(current), strided(reference)
        difference, row = Difference(current, reference), self._row(stream)
        if stream.needs:
            self._table.add((row + OWN,), difference.tensor, stream.needs, difference.other)
        if stream.base_needs:
            self._table.add((row + BASE,), reference, stream.base_needs)
        if "reference" in stream.compared_with:
            self._table.add_product(row + OTHER, row + PRODUCT, current, reference)

    def measure_comparison(self, stream: Stream, name: str, tensor: Tensor, other: Tensor, *, is_negated: bool = False) -> None:
        """Take another tensor and the product with it, for statistics that compare a tensor with it; not the tensor itself.

        Args:
            stream: What is recorded of the tensor.
            name: The other tensor's name: ``gradient`` or ``previous``.
            tensor: The tensor, or this rank's part of it.
            other: The other tensor, of the same shape, on any device.
            is_negated: Whether minus the tensor is compared.

        Raises:
            ValueError: If their shapes differ.
        """
        tensor, other = strided(tensor).detach(), strided(other).detach()
        Difference(tensor, other)  # checks the shapes
        first, (_tensor, other_row, product_row) = self._row(stream), COMPARED_ROWS[name]
        self._table.add_product(first + other_row, first + product_row, other.to(tensor.device), tensor, is_negated=is_negated)

    def observe_all(self, pairs: Iterable[tuple[Stream, Tensor]]) -> None:
        """Like :meth:`observe` for many tensors that exist at the same time, which is cheaper. A tensor that cannot be read fails alone."""
        pairs = list(pairs)
        self.measure_all(pairs)
        for stream, tensor in pairs:
            self.call_functions(stream, tensor)

    def measure_all(self, pairs: Iterable[tuple[Stream, Tensor]], *, are_bases: bool = False, scale: Scale = None) -> None:
        """:meth:`observe_all` without the functions: of tensors that are parts of what a function receives.

        With ``are_bases`` the tensors are those that relative statistics are relative to. They are divided by ``scale``.
        """
        measured = [(stream, tensor, needs) for stream, tensor in pairs if (needs := stream.base_needs if are_bases else stream.needs)]
        rows = [self._row(stream) + (BASE if are_bases else OWN) for stream, _tensor, _needs in measured]
        try:
            failed = self._table.add_all(rows, [tensor for _, tensor, _ in measured], [needs for *_, needs in measured], scale=scale)
        except Exception:
            for stream, _tensor, _needs in measured:  # it is not known how many were added
                self._give_up(stream)
            raise
        for index, error in failed:
            self.fail(*measured[index][:2], error)

    def observe_matrices(self, weights: Mapping[Stream, Difference]) -> None:
        """Take matrices for statistics of singular values; see :meth:`ObservedSpectra.observe_matrices`."""
        self._spectra.observe_matrices(weights)

    def observe_rows(self, streams: Sequence[Stream], values: Tensor, counts: Tensor) -> None:
        """Take a short tensor for each of several streams, of which not every element has to count.

        Args:
            streams: What is recorded of each row.
            values: Shape ``(streams, elements)``, any real floating dtype, detached. Every element is a token of its own.
            counts: Which elements count, of the same shape. A function gets NaN in place of those that do not.
        """
        values = strided(values)
        indices = [index for index, stream in enumerate(streams) if stream.needs]
        if indices:
            measured, counted = (torch.stack([matrix[index] for index in indices]) for matrix in (values, counts))
            rows, needs = [self._row(streams[index]) for index in indices], [streams[index].needs for index in indices]
            self._table.add_rows(rows, measured, counted, needs)
        for stream, row, is_counted in zip(streams, values, counts, strict=True):
            if stream.functions:
                self.call_functions(stream, torch.where(is_counted, row, torch.nan))

    def call_functions(self, stream: Stream, *tensors: Tensor) -> None:
        """Call the user's functions with a tensor, or with both tensors of a pair."""
        if stream.functions:
            self._results.call(stream, *tensors)

    def add_result(self, stream: Stream, name: str, result: object, num_elements: int) -> None:
        """Take a result of a value; see :meth:`ObservedResults.add`."""
        self._results.add(stream, name, result, num_elements)

    def add_value(self, stream: Stream, name: str, value: Tensor | float) -> None:
        """Take a value that no probe observes; what is neither a real tensor nor a number is recorded as NaN, and reported."""
        try:
            value, size = (plain(value).detach(), plain(value).numel()) if isinstance(value, Tensor) else (value, 1)
            self._results.add(stream, name, value, size)
        except Exception as error:
            is_wrong_type = isinstance(error, TypeError)
            self._fail(stream, name, in_words(value), TypeError("expected a real tensor or a number") if is_wrong_type else error)

    def drop_overwriting(self, logged: Collection[Stream]) -> list[str]:
        """Discard logged values whose keys are measured as well; returns the keys."""
        results = self._results.keys_of(logged)
        if not results:
            return []
        measured = set(itertools.chain.from_iterable(stream.number_keys for stream in self._rows))
        dropped = [key for key in results if key in measured]
        self._results.discard(dropped)
        return dropped

    def fail(self, stream: Stream, observed: object, error: Exception) -> None:
        """Record NaN for all outputs of a stream."""
        self.num_errors += 1
        self._give_up(stream)
        self._on_error(stream, ", ".join({**stream.outputs, **stream.shared}), in_words(observed), error)

    # The end of the step

    def collect(self, ranks: Ranks | None = None) -> NumbersOfStep:
        """Finish everything, :attr:`histograms` too: one transfer per device.

        Args:
            ranks: The processes whose tensors count together, on each of which this is called; ``None`` for this one alone.

        Returns:
            The numbers. Those of a site that was not observed are absent; what could not be computed is NaN.
        """
        layout, written = self._state.layout, NumbersOfStep(self._state.columns)
        try:
            if ranks is None:
                alone = self._observed(is_alone=True)
                layout.add(alone.streams)
                reduced = Reduced(alone, alone.numbers(layout))
            else:
                reduced = reduce_step(functools.partial(self._observed, is_alone=False), layout, ranks, self._cannot_send)
            observed, numbers, copied, self.differing = reduced
        except Exception:
            self.is_lost = True
            raise
        self.num_errors, self.is_lost = int(numbers.num_errors[0]), bool(numbers.is_lost[0])
        if self.is_lost:
            # No rank continues: the rank that lost the step may lack what the next collectives need.
            return written
        if self.has_totals:
            numbers.merge_totals(layout)
        for stream in itertools.compress(layout.streams, numbers.failed):
            self._note_failed(stream.series[name] for name in (*stream.statistics, *stream.channels, *stream.units))
        self._note_failed(layout.keys_of_failed(numbers.raised))
        # Further collectives come before everything that may fail: an error must not keep this rank from a collective.
        due = [
            entry for entry in itertools.compress(layout.values, numbers.called * (1 - numbers.raised)) if not entry[2].is_merged_by_name
        ]
        results = self._results.finished_once(due, observed.final, observed.whole_results, copied, ranks)
        results |= finished_spectra(due, observed.spectra, ranks, self._fail)
        fine = {stream: numbers.counts[where] for stream, where in layout.slices_of(FINE).items()}
        self._state.finisher(numbers.observed).finish(numbers.moments, fine, written, self._fail)
        has_result, merged_results = numbers.results(layout)
        written.write(self._state.columns_of_values(has_result), merged_results[has_result])
        written.write(self._state.columns.add(results), [*results.values()])
        derived = numbers.channels(layout) | dead_fractions(numbers.counts, layout, self._state.units)
        written.write(self._state.columns.add(derived), [*derived.values()])
        self.histograms = {
            key: Histogram(numbers.counts[where].astype(np.int64))
            for stream, where in layout.slices_of(HISTOGRAM).items()
            for key in stream.histogram_keys
            if numbers.observed[position := layout.positions[stream.identity]] and not numbers.failed[position]
        }
        written.write(self._state.columns.add(self._failed.values()), math.nan)
        return written

    def _observed(self, *, is_alone: bool) -> Observed:
        """The observations of this rank, on the host, by one transfer per device."""
        counted = [
            (bins, streams, share)
            for bins in ALL_BINS
            for streams in [[stream for stream in self._rows if bins in stream.counted_bins]]
            for share in self._table.collect_counts(bins, [self._rows[stream] for stream in streams])
        ]
        results = [*self._results.tensors(is_alone=is_alone)]
        shares, counts_of_shares, sums, alive, spectra, results_here = _groups_to_host(
            self._table.collect(self._num_rows),
            [share for _bins, _streams, share in counted],
            [*self._sums.values()],
            self._units.is_alive(),
            self._spectra.tensors(),
            results,
        )
        counts: dict[tuple[Identity, Sums], Array] = {}
        for (bins, streams, _share), rows in zip(counted, counts_of_shares, strict=True):
            for stream, row in zip(streams, rows, strict=True):
                counts[stream.identity, bins] = counts.get((stream.identity, bins), 0.0) + row
        counts |= {(stream.identity, of): of.row(row) for (stream, of), row in zip(self._sums, sums, strict=True)}
        return Observed(
            streams=[
                *self._rows,
                *self._results.streams,
                *(stream for stream, _sums in self._sums),
                *self._spectra.streams,
                *self._units.streams,
                *self.totals,
            ],
            rows=self._rows,
            moments=np.concatenate([merged(shares, self._num_rows), NO_MOMENTS], 1),
            counts=counts,
            num_units=self._units.num_units,
            is_alive=np.concatenate([np.empty(0), *alive]),
            spectra=self._spectra.rows(iter(spectra)),
            **self._results.arrived(iter(results_here)),
            parts=frozenset(stream.identity for stream in self.parts),
            failed=frozenset(self._failed),
            failed_streams=frozenset(self._failed_streams),
            num_errors=self.num_errors,
            is_lost=self.is_lost,
        )

    def _row(self, stream: Stream) -> int:
        """First row of a stream in the table."""
        row = self._rows.get(stream)
        if row is None:
            row = self._rows[stream] = self._num_rows
            self._num_rows += stream.num_rows
        return row

    def _note_failed(self, keys: Iterable[Key]) -> None:
        self._failed.update((key.format(), key) for key in keys)

    def _give_up(self, stream: Stream) -> None:
        self._failed_streams.add(stream.identity)
        self._note_failed(stream.numbers)

    def _cannot_send(self, stream: Stream, error: Exception) -> None:
        self._give_up(stream)
        self._on_error(stream, "sending to other ranks", "what was observed on this one alone", error)

    def fail_spectra(self, stream: Stream, error: Exception) -> None:
        """Record NaN for the statistics of singular values of a stream."""
        for source in stream.sources:
            self._fail_spectra(stream, source, error)

    def _fail_spectra(self, stream: Stream, source: Source, error: Exception) -> None:
        """Record NaN for the statistics of a stream that are computed from a source."""
        names = [name for name, statistic in stream.spectral.items() if statistic.source(stream.kind) is source]
        if not any(stream.keys[name] in self._failed for name in names):  # of several calls or micro-batches once
            self.num_errors += 1
            self._note_failed(stream.series[name] for name in names)
            self._on_error(stream, ", ".join(names), source.value, error)

    def _fail(self, stream: Stream, name: str, source: str, error: Exception) -> None:
        """Record that a statistic or function could not be computed; ``source`` describes its input."""
        self.num_errors += 1
        self._note_failed([stream.series[name]])
        self._on_error(stream, name, source, error)


def _groups_to_host(*groups: Sequence[Tensor]) -> list[list[Array]]:
    """Each group of tensors on the host, by one transfer per device for all groups."""
    arrived = iter(to_host([*itertools.chain(*groups)]))
    return [[*itertools.islice(arrived, len(group))] for group in groups]
