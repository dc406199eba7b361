"""From what each rank has observed to what all ranks have together: two collectives a step, after the one transfer.

Streams are in an order that all ranks have alike: those of the rules (which are checked to be the same), and those that turned up later (a
further output, a head of attention) on any of them. When one turns up for the first time, its rank names it to the others, and that step is
reduced once more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_module_monitor.distributed.moments import Fingerprints, Replicas, fingerprints_of, reduce_moments
from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.histogram import NUM_COUNTS
from lightning_module_monitor.kernels.moments import NUM_FIELDS, Array, Moments
from lightning_module_monitor.statistics.functions import Aggregate, Function, Value
from lightning_module_monitor.statistics.layout import LARGEST, SUMMED, Layout, Numbers, Observed
from lightning_module_monitor.statistics.registry import STATISTICS
from lightning_module_monitor.statistics.stream import Identity, Output, Stream

OnError = Callable[[Stream, Exception], None]


class Reduced(NamedTuple):
    """What all ranks have observed in a step, the same on every rank."""

    observed: Observed
    """What this rank has observed."""
    numbers: Numbers
    copied: frozenset[Identity] = frozenset()
    """Streams that ranks which share their input have alike, and that count once."""
    differing: Sequence[Stream] = ()
    """Streams that every rank is expected to have alike, and that differ between ranks."""


def reduce_step(observe: Callable[[], Observed], layout: Layout, ranks: Ranks, on_error: OnError) -> Reduced:
    """Reduce a step over ranks; ``layout`` gets the streams that it lacks.

    Args:
        observe: Returns what this rank has observed. Where that fails, the step is lost on every rank, and the error is raised when
            they know: they wait for this one.
        layout: The streams that are known on every rank.
        ranks: The processes that train together.
        on_error: Receives a stream that cannot be named to other ranks.
    """
    lost, error, unsent = Observed(is_lost=True), None, set[Identity]()
    try:
        observed = observe()
    except Exception as caught:
        observed, error = lost, caught
    while True:
        unknown = [stream for stream in observed.streams if stream.identity not in layout.places and stream.identity not in unsent]
        try:
            numbers = observed.numbers(layout, has_more=bool(unknown))
        except Exception as caught:
            observed, error = lost, error or caught
            numbers = observed.numbers(layout, has_more=bool(unknown))
        reduced = _reduced(observed, numbers, layout, ranks)
        if not reduced.numbers.has_more[0]:
            break
        named: list[_Name] = []
        for stream in unknown:
            try:
                named.append(_name_of(stream))
            except Exception as caught:
                unsent.add(stream.identity)
                try:
                    on_error(stream, caught)
                except Exception as raised:  # not before the other ranks have what they wait for
                    error = error or raised
        learn(layout, ranks.gather(named), unknown)
    if error is not None:
        raise error
    return reduced


def _reduced(observed: Observed, own: Numbers, layout: Layout, ranks: Ranks) -> Reduced:
    """The numbers of all ranks, by two collectives."""
    largest = _joined(own, LARGEST)
    summed = _joined(own, SUMMED)
    fingerprints = None if ranks.num_sharing == 1 else _fingerprints(own, layout)
    result = reduce_moments(
        Moments(*torch.from_numpy(own.moments)), largest, summed, ranks, fingerprints, replicas=_replicas(observed, layout)
    )
    fields = _parted(result.largest, own, LARGEST) | _parted(result.summed, own, SUMMED)
    numbers = Numbers(moments=torch.stack(result.moments).numpy(), **fields)
    failed = {*itertools.compress(layout.streams, numbers.failed)}
    differing = [stream for stream in itertools.compress(layout.replicated, result.differ.tolist()) if stream not in failed]
    return Reduced(observed, numbers, frozenset(itertools.compress(layout.places, result.are_copies.tolist())), differing)


class _Name(NamedTuple):
    """A stream as it is named to other ranks, which make their own of it."""

    identity: Identity
    origin: Identity | None
    """The stream that it is a further site of."""
    aggregates: dict[str, str | None]
    """Of values by name; ``None`` for a function of the user's."""
    is_compared: bool


def _name_of(stream: Stream) -> _Name:
    """What names a stream to other ranks.

    Raises:
        ValueError: If an output is one that other ranks do not know.
    """
    if stream.origin is None:
        for name, output in stream.outputs.items():
            if isinstance(output, Function) or (not isinstance(output, Value) and STATISTICS.get(name) is not output):
                raise ValueError(f"{name!r} is not among STATISTICS, and no rule of other ranks has it; expected every rank to record it")
    aggregates = {name: value.aggregate if isinstance(value.aggregate, str) else None for name, value in stream.values.items()}
    return _Name(stream.identity, None if stream.origin is None else stream.origin.identity, aggregates, stream.is_compared)


def learn(layout: Layout, names: Iterable[Iterable[_Name]], own: Iterable[Stream]) -> None:
    """Add the streams that all ranks have named, in their order; ``own`` are those of this rank."""
    of_this_rank = {stream.identity: stream for stream in own}
    for name in itertools.chain.from_iterable(names):
        origin = None if name.origin not in layout.places else layout.streams[layout.places[name.origin]]
        known = of_this_rank.get(name.identity)
        layout.add([known or (_made_of(name) if origin is None else origin.at(name.identity[1]))])


def _made_of(name: _Name) -> Stream:
    """A stream that only other ranks have observed."""
    kind, site, stage, prefix, *names = name.identity
    outputs: dict[str, Output] = {}
    for output in names:
        aggregate: Aggregate = name.aggregates.get(output) or _unknown_here
        known = STATISTICS.get(output)
        outputs[output] = Value(aggregate) if output in name.aggregates or known is None or callable(known) else known
    return Stream(kind, site, outputs, stage, prefix, is_compared=name.is_compared)


def _unknown_here(_values: Tensor) -> float:
    """Stands for an aggregate of the user's that only other ranks have."""
    raise ValueError("its aggregate is not known on this rank; expected every rank to record it")


def _fingerprints(own: Numbers, layout: Layout) -> Fingerprints:
    """Fingerprints of everything that is known of each stream: parts of a tensor may well have one histogram.

    Parameters and values of the user's own are left out: there each rank observes its own part, and parts of a constant are alike.
    """
    none = len(layout.streams)
    items = _items(layout, {stream: place for place, stream in enumerate(layout.streams) if stream.is_compared}, none)
    results = np.stack([own.extremes, own.has_nan, own.totals, own.weights])
    columns = [(own.moments, items.rows), (own.counts.T, items.counted), (results, items.values)]
    known = torch.from_numpy(np.concatenate([values.ravel() for values, _items in columns]))
    of_known = torch.cat([of_columns.repeat(len(values)) for values, of_columns in columns])
    return Fingerprints(fingerprints_of(known, of_known, none), items.of_summed(none))


def _replicas(observed: Observed, layout: Layout) -> Replicas:
    """The streams that every rank is expected to have alike, and those that this one has a part of."""
    none = len(layout.replicated)
    items = _items(layout, {stream: place for place, stream in enumerate(layout.replicated)}, none)
    identities = [stream.identity for stream in layout.replicated]
    return Replicas(
        first_rows=torch.tensor([layout.first_rows[layout.places[one]] for one in identities], dtype=torch.int64, device="cpu"),
        are_parts=torch.tensor([one in observed.parts for one in identities], dtype=torch.float64, device="cpu"),
        of_numbers=items.of_summed(none),
    )


class _Items(NamedTuple):
    """The item that each row, each histogram and each value is of, int64."""

    rows: Tensor
    counted: Tensor
    values: Tensor

    def of_summed(self, none: int) -> Tensor:
        """The item of each number that is summed, in their order: of all fields of the moments, then of ``SUMMED``."""
        of_results = [self.values] * (len(SUMMED) - 2)
        counts = self.counted.repeat_interleave(NUM_COUNTS)
        return torch.cat([self.rows.repeat(NUM_FIELDS), counts, *of_results, self.values.new_full((1,), none)])


def _items(layout: Layout, items: dict[Stream, int], none: int) -> _Items:
    rows = [items.get(stream, none) for stream in layout.streams for _row in range(stream.num_rows)]
    counted = [items.get(stream, none) for stream in layout.counted]
    values = [items.get(stream, none) for stream, _name, _value in layout.values]
    return _Items(*(torch.tensor(one, dtype=torch.int64, device="cpu") for one in (rows, counted, values)))


def _joined(numbers: Numbers, fields: Sequence[str]) -> Tensor:
    return torch.from_numpy(np.concatenate([getattr(numbers, name).ravel() for name in fields]))


def _parted(joined: Tensor, like: Numbers, fields: Sequence[str]) -> dict[str, Array]:
    """The inverse of :func:`_joined`, in the shapes of other numbers."""
    shaped = [getattr(like, name) for name in fields]
    pieces = np.split(joined.numpy(), np.cumsum([array.size for array in shaped])[:-1])
    return {name: piece.reshape(array.shape) for name, piece, array in zip(fields, pieces, shaped, strict=True)}
