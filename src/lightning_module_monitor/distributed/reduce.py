"""Reduce the numbers of a step over ranks: two collectives, after the one transfer.

All ranks keep streams in the same order: those of the rules, which are checked to be equal, then those that were first observed during
training (a further output, a head of attention) on any rank. A rank that observes a new stream sends its description to the others, and
that step is reduced again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_module_monitor.distributed.rank_moments import Fingerprints, Replicas, fingerprints_of, reduce_moments
from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.kernels.moments import NUM_FIELDS, Array, Moments
from lightning_module_monitor.statistics.functions import Aggregate, Function, Value, compute_and_reset
from lightning_module_monitor.statistics.layout import Layout
from lightning_module_monitor.statistics.numbers import LARGEST, SUMMED, Numbers, Observed
from lightning_module_monitor.statistics.registry import STATISTICS
from lightning_module_monitor.statistics.stream import Identity, Output, Stream

OnError = Callable[[Stream, Exception], None]
_Name = TypeVar("_Name")


class Reduced(NamedTuple):
    """The numbers of a step over all ranks, equal on every rank."""

    observed: Observed
    """The observations of this rank."""
    numbers: Numbers
    copied: frozenset[Identity] = frozenset()
    """Streams that are equal on ranks that share their input, and count once."""
    differing: Sequence[Stream] = ()
    """Replicated streams whose values differ between ranks."""


def reduce_step(observe: Callable[[], Observed], layout: Layout, ranks: Ranks, on_error: OnError) -> Reduced:
    """Reduce a step over ranks, and add new streams to ``layout``.

    Args:
        observe: Returns the observations of this rank. If it fails, the step is lost on every rank; the error is raised after the
            collectives that the other ranks wait for.
        layout: The streams that all ranks know.
        ranks: The ranks that train together.
        on_error: Receives a stream that cannot be sent to other ranks, after the collectives.
    """
    observed: Observed | None = None
    lost_by: Exception | None = None
    unsent: dict[Identity, tuple[Stream, Exception]] = {}
    has_more = True
    while has_more:
        try:
            observed = observed or observe()
            new = [stream for stream in observed.streams if stream.identity not in layout.positions]
            unknown = {stream.identity: stream for stream in new if stream.identity not in unsent}
            numbers = observed.numbers(layout, has_more=bool(unknown))
        except Exception as error:
            observed, unknown, lost_by = Observed(is_lost=True), {}, error
            numbers = observed.numbers(layout)
        reduced = _reduced(observed, numbers, layout, ranks)
        has_more = bool(reduced.numbers.has_more[0])
        if has_more:
            unsent |= _exchange(unknown, layout, ranks)
    # Only now, because other ranks wait for the collectives.
    if lost_by is not None:
        raise lost_by
    for stream, reason in unsent.values():
        on_error(stream, reason)
    return reduced


def _reduced(observed: Observed, numbers: Numbers, layout: Layout, ranks: Ranks) -> Reduced:
    """The numbers of all ranks, by two collectives."""
    largest, summed = _joined(numbers, LARGEST), _joined(numbers, SUMMED)
    fingerprints = None if ranks.num_sharing == 1 else _fingerprints(numbers, layout)
    moments = Moments(*torch.from_numpy(numbers.moments))
    result = reduce_moments(moments, largest, summed, ranks, _replicas(observed, layout), fingerprints=fingerprints)
    fields = _parted(result.largest, numbers, LARGEST) | _parted(result.summed, numbers, SUMMED)
    total = Numbers(moments=torch.stack(result.moments).numpy(), **fields)
    failed = {*itertools.compress(layout.streams, total.failed)}
    differing = [stream for stream in itertools.compress(layout.replicated, result.differ.tolist()) if stream not in failed]
    return Reduced(observed, total, frozenset(itertools.compress(layout.positions, result.are_copies.tolist())), differing)


def _exchange(streams: Mapping[Identity, Stream], layout: Layout, ranks: Ranks) -> dict[Identity, tuple[Stream, Exception]]:
    """Add the streams that any rank has observed to the layout, in the order of ranks.

    Args:
        streams: Streams that this rank has observed and the layout lacks.
        layout: The streams that all ranks know.
        ranks: Every rank makes this call.

    Returns:
        Streams that cannot be sent to other ranks, each with the reason.
    """
    descriptions: list[_StreamDescription] = []
    unsent: dict[Identity, tuple[Stream, Exception]] = {}
    for identity, stream in streams.items():
        try:
            descriptions.append(_describe(stream))
        except Exception as error:
            unsent[identity] = stream, error
    for description in itertools.chain.from_iterable(ranks.gather(descriptions)):
        layout.add([streams.get(description.identity) or _make(description, layout)])
    return unsent


class _StreamDescription(NamedTuple):
    """A stream as it is sent to other ranks, which make the stream from it."""

    identity: Identity
    origin: Identity | None
    """The stream that it is derived from."""
    aggregates: dict[str, str | None]
    """Aggregate of each value; ``None`` for a function of the user."""
    is_compared: bool


def _describe(stream: Stream) -> _StreamDescription:
    """The description of a stream.

    Raises:
        ValueError: If other ranks cannot make one of its outputs.
    """
    if stream.origin is None:
        for name, output in stream.outputs.items():
            if isinstance(output, Function) or (not isinstance(output, Value) and STATISTICS.get(name) is not output):
                raise ValueError(f"{name!r} is not among STATISTICS, and no rule of other ranks has it; expected every rank to record it")
    aggregates = {name: value.aggregate if isinstance(value.aggregate, str) else None for name, value in stream.values.items()}
    return _StreamDescription(stream.identity, None if stream.origin is None else stream.origin.identity, aggregates, stream.is_compared)


def _make(description: _StreamDescription, layout: Layout) -> Stream:
    """A stream that only other ranks have observed."""
    kind, site, stage, prefix, names = description.identity
    if description.origin in layout.positions:
        return layout.streams[layout.positions[description.origin]].derived(site, names)
    outputs: dict[str, Output] = {}
    for name in names:
        aggregate: Aggregate = description.aggregates.get(name) or _unknown_aggregate
        known = STATISTICS.get(name)
        outputs[name] = Value(aggregate) if name in description.aggregates or known is None or callable(known) else known
    return Stream(kind, site, outputs, stage, prefix, is_compared=description.is_compared)


def _unknown_aggregate(_values: Tensor) -> float:
    """Stands for an aggregate function that only other ranks have."""
    raise ValueError("its aggregate is not known on this rank; expected every rank to record it")


def _fingerprints(numbers: Numbers, layout: Layout) -> Fingerprints:
    """Fingerprints of the compared streams, from all their numbers, because different parts of a tensor may have equal histograms.

    Parameters and logged values are not compared: each rank observes its own part, and the parts of a constant are equal.
    """
    num_items = len(layout.streams)
    items = _items_of(layout, {stream: index for index, stream in enumerate(layout.streams) if stream.is_compared}, num_items)
    results = np.stack([numbers.extremes, numbers.has_nan, numbers.totals, numbers.weights])
    columns = [(numbers.moments, items.rows), (numbers.counts[np.newaxis], items.counts), (results, items.values)]
    values = torch.from_numpy(np.concatenate([matrix.ravel() for matrix, _item_of_column in columns]))
    item_of_value = torch.cat([item_of_column.repeat(len(matrix)) for matrix, item_of_column in columns])
    return Fingerprints(fingerprints_of(values, item_of_value, num_items), items.item_of_summed(num_items))


def _replicas(observed: Observed, layout: Layout) -> Replicas:
    """The streams that must be equal on all ranks, and those of which this rank holds a part."""
    num_items = len(layout.replicated)
    items = _items_of(layout, {stream: index for index, stream in enumerate(layout.replicated)}, num_items)
    identities = [stream.identity for stream in layout.replicated]
    return Replicas(
        first_rows=_indices(layout.first_rows[layout.positions[identity]] for identity in identities),
        are_parts=_indices(identity in observed.parts for identity in identities).double(),
        item_of_number=items.item_of_summed(num_items),
    )


class _Items(NamedTuple):
    """The item of each row, of each count and of each value, int64."""

    rows: Tensor
    counts: Tensor
    values: Tensor

    def item_of_summed(self, no_item: int) -> Tensor:
        """The item of each number that is summed: of all fields of the moments, then of ``SUMMED``."""
        others = {"counts": self.counts, "num_errors": self.values.new_full((1,), no_item)}
        return torch.cat([self.rows.repeat(NUM_FIELDS), *(others.get(name, self.values) for name in SUMMED)])


def _items_of(layout: Layout, item_by_stream: Mapping[Stream, int], no_item: int) -> _Items:
    return _Items(
        rows=_indices(item_by_stream.get(stream, no_item) for stream in layout.streams for _row in range(stream.num_rows)),
        counts=torch.repeat_interleave(
            _indices(item_by_stream.get(stream, no_item) for stream, _sums in layout.summed),
            _indices(sums.num_counts for _stream, sums in layout.summed),
        ),
        values=_indices(item_by_stream.get(stream, no_item) for stream, _name, _value in layout.values),
    )


def _indices(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


def _joined(numbers: Numbers, fields: Sequence[str]) -> Tensor:
    return torch.from_numpy(np.concatenate([getattr(numbers, name).ravel() for name in fields]))


def _parted(joined: Tensor, like: Numbers, fields: Sequence[str]) -> dict[str, Array]:
    """The inverse of :func:`_joined`, in the shapes of other numbers."""
    shaped = [getattr(like, name) for name in fields]
    pieces = np.split(joined.numpy(), np.cumsum([array.size for array in shaped])[:-1])
    return {name: piece.reshape(array.shape) for name, piece, array in zip(fields, pieces, shaped, strict=True)}


def sum_rows(names: Sequence[_Name], rows: Mapping[_Name, Array], ranks: Ranks) -> dict[_Name, Array]:
    """Add rows of numbers of all ranks, by two collectives.

    Args:
        names: The same on every rank.
        rows: By name; a rank may have some of them.
        ranks: Every rank makes this call.

    Returns:
        The sums; NaN where rows differ in length.
    """
    lengths = np.array([rows[name].size if name in rows else -np.inf for name in names])
    reduced = ranks.all_reduce(torch.from_numpy(np.concatenate([lengths, np.where(lengths > 0, -lengths, -np.inf)])), "max")
    longest, minus_shortest = reduced.view(2, -1).tolist()
    sums: dict[_Name, Array] = {}
    for name, length, minus_least in zip(names, longest, minus_shortest, strict=True):
        if length > 0:
            own = np.full(int(length), 0.0 if length == -minus_least else np.nan)
            sums[name] = rows[name] if name in rows and length == -minus_least else own
    total = ranks.all_reduce(torch.from_numpy(np.concatenate([np.empty(0), *sums.values()])), "sum").numpy()
    return dict(zip(sums, np.split(total, np.cumsum([row.size for row in sums.values()])[:-1]), strict=True))


def compute_over_ranks(metric: Metric, ranks: Ranks) -> object:
    """The result of a torchmetrics object over all ranks, which it exchanges itself; it is empty and on the host afterwards."""
    metric.process_group = ranks.group  # where its collectives meet none of training's
    metric.to("cpu")  # the group is one of the host
    return compute_and_reset(metric)
