"""From what each rank has seen to what all have seen together: the same rows in the same order on every rank.

A step is two collectives and, from an accelerator, one transfer. Rows and results are laid out by a directory that all ranks
have alike: what the rules want (which they have made sure of), and what turned up later (a further output, a head
of attention) on any of them. When something turns up for the first time, its rank tells the others, and that step is exchanged
once more. What cannot be told by numbers alone (torchmetrics objects, aggregates of the user's) is synchronized after the two,
on all ranks in the directory's order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_module_monitor.distributed.marks import Marks, marks_of
from lightning_module_monitor.distributed.ranks import Merged, Ranks, merge_over_ranks
from lightning_module_monitor.kernels.moments import Moments
from lightning_module_monitor.kernels.transfer import transfer
from lightning_module_monitor.record import NUM_COUNTS
from lightning_module_monitor.statistics.functions import Results, UserFunction
from lightning_module_monitor.statistics.units import ABSENT, MAX_UNITS
from lightning_module_monitor.statistics.watch import Identity, Watch


@dataclass
class Share:
    """What one rank has seen in a step, on the device where the ranks meet."""

    watches: list[Watch]
    """All that anything is known of."""
    rows: Mapping[Identity, int]
    """First row of those that have moments."""
    moments: Moments
    """Shape ``(rows + 1,)``; the last are those of an empty tensor."""
    counted: Mapping[Identity, int]
    """Row of those that have a histogram."""
    counts: Tensor
    """Float64, shape ``(counted rows + 1, NUM_COUNTS)``; the last row is zero."""
    results: Mapping[str, Results]
    """What functions gave, by key."""
    metrics: Mapping[str, Metric]
    """Torchmetrics objects that got tensors, by key."""
    units: Mapping[Identity, Tensor]
    """What units did, as :func:`~lightning_module_monitor.statistics.units.signs_of_life` tells it."""
    failed: frozenset[str]
    """Keys of what could not be computed."""
    num_errors: int
    is_lost: bool
    """Whether an error has ended the monitoring of this step."""

    @classmethod
    def of_a_lost_step(cls, device: torch.device) -> Share:
        """What a rank gives that has nothing to give: it is waited for."""
        moments, counts = Moments.of_nothing(1).to(device), torch.zeros(1, NUM_COUNTS, dtype=torch.float64, device=device)
        return cls([], {}, moments, {}, counts, {}, {}, {}, frozenset(), num_errors=0, is_lost=True)


class Together(NamedTuple):
    """What all ranks have seen in a step, on the host, the same on every rank."""

    rows: list[tuple[Watch, int]]
    """Watches that moments were taken for, each with its first row."""
    moments: Moments
    counted: list[tuple[Watch, Tensor]]
    """Watches that a histogram was taken for, with the counts, int64, shape ``(NUM_COUNTS,)``."""
    units: list[tuple[Watch, Tensor]]
    """Watches that units were seen for, with what they did."""
    values: dict[str, float]
    """What named aggregates make of the results of functions, by key."""
    copied: frozenset[Identity]
    """Of these, ranks that share their input have the same, which is counted once."""
    unfinished: list[tuple[Watch, UserFunction]]
    """Functions with results, on any rank, that an aggregate of the user's or a torchmetrics object makes a value of."""
    failed: list[Watch]
    """Of these nothing is known."""
    failed_keys: list[str]
    """Nor of these functions."""
    num_errors: int
    is_lost: bool


class Directory:
    """What is exchanged, in an order that every rank has alike.

    Args:
        watches: What the rules want.
    """

    def __init__(self, watches: Iterable[Watch]) -> None:
        self.watches: dict[Identity, Watch] = {}
        self.functions: list[tuple[Watch, UserFunction]] = []
        self.add(watches)

    def add(self, watches: Iterable[Watch]) -> None:
        """Put watches at the end."""
        for watch in watches:
            if watch.identity not in self.watches:
                self.watches[watch.identity] = watch
                self.functions += [(watch, function) for function in watch.functions.values()]

    def unknown(self, watches: Iterable[Watch]) -> list[Watch]:
        """Those that are not in it."""
        return [watch for watch in watches if watch.identity not in self.watches]

    def learn(self, told: Sequence[bytes], own: Iterable[Watch]) -> None:
        """Add what ranks have told, in their order.

        Args:
            told: What :func:`message_of` made on each of them.
            own: What this rank has told.
        """
        # Where this rank has the watch, or the rule, it has what cannot be sent: the functions themselves.
        of_this_rank = {watch.identity: watch for watch in own}
        for message in told:
            for watch in pickle.loads(message):
                origin = self.watches.get(watch.origin.identity) if watch.origin is not None else None
                self.add([of_this_rank.get(watch.identity, watch) if origin is None else origin.at(watch.site)])


def message_of(watches: Sequence[Watch], failed: Callable[[Watch, Exception], None]) -> bytes:
    """Watches as they are told to other ranks; one that cannot be sent is said to have failed, and left out."""
    sent = []
    for watch in watches:
        origin = None if watch.origin is None else _plain(watch.origin)
        plain = dataclasses.replace(_plain(watch), origin=origin)
        try:
            pickle.dumps(plain)
        except Exception as error:
            failed(watch, error)
        else:
            sent.append(plain)
    return pickle.dumps(sent)


def _plain(watch: Watch) -> Watch:
    """A watch without what belongs to this process."""
    aggregates = {name: function.aggregate for name, function in watch.functions.items()}
    named = {name: UserFunction(name, float, one if isinstance(one, str) else _unknown_here) for name, one in aggregates.items()}
    wish = watch.statistics, watch.histograms, named
    return Watch(watch.kind, watch.site, watch.stage, watch.prefix, *wish, units=watch.units, is_compared=watch.is_compared)


def _unknown_here(_values: Tensor) -> float:
    """Stands for an aggregate of the user's that only other ranks have."""
    raise ValueError("its aggregate is not known on this rank; expected every rank to record it")


class Exchange:
    """Brings the shares of all ranks together, step by step.

    Args:
        ranks: The processes that train together.
        watches: What the rules want, on every rank alike.
    """

    def __init__(self, ranks: Ranks, watches: Iterable[Watch]) -> None:
        self.ranks = ranks
        self.directory = Directory(watches)

    def bring_together(self, see: Callable[[], Share], failed: Callable[[Watch, Exception], None]) -> Together:
        """Exchange a step.

        Args:
            see: Gives what this rank has seen. Where that fails, the step is lost on every rank, and the error is raised when
                they know: they wait for this one.
            failed: Told of a watch that other ranks cannot be told of.
        """
        nothing = Share.of_a_lost_step(self.ranks.device)
        share, error = _unless_it_fails(see, nothing)
        untold: set[Identity] = set()
        while True:
            unknown = [watch for watch in self.directory.unknown(share.watches) if watch.identity not in untold]
            given, another = _unless_it_fails(functools.partial(self._given, share, bool(unknown)), None)
            if given is None:
                share, error, given = nothing, error or another, self._given(nothing, bool(unknown))
            merged = merge_over_ranks(given.moments, given.largest, given.summed, self.ranks, given.marks)
            together = _read(_on_host(merged), self.directory)
            if together is None:
                message = message_of(unknown, failed)
                self.directory.learn(self.ranks.gather(message), unknown)
                untold.update(watch.identity for watch in self.directory.unknown(unknown))
            elif error is not None:
                raise error
            else:
                return together

    def _given(self, share: Share, has_more: bool) -> _Given:
        """What this rank gives, laid out by the directory."""
        directory, device = self.directory, self.ranks.device
        watches = list(directory.watches.values())
        results = _results(share, directory, device)
        flags = [flag for watch in watches for flag in (watch.identity in share.rows, _has_failed(share, watch))]
        for watch, function in directory.functions:
            key = watch.key(function.name)
            flags += [key in share.results or key in share.metrics, key in share.failed]
        flags += [has_more, share.is_lost]
        of_watches = [place for watch in watches for place in _places(share, watch)]
        counted = [watch for watch in watches if watch.histograms]
        of_counts = [share.counted.get(watch.identity, len(share.counts) - 1) for watch in counted]
        moments = share.moments.rows(torch.tensor(of_watches, dtype=torch.int64, device=device))
        counts = share.counts[torch.tensor(of_counts, dtype=torch.int64, device=device)]
        nothing = torch.full((MAX_UNITS,), ABSENT, dtype=torch.float64, device=device)
        units = [share.units.get(watch.identity, nothing) for watch in watches if watch.units]
        return _Given(
            moments,
            torch.cat([torch.tensor(flags, dtype=torch.float64, device=device), results.extremes, results.nan, *units]),
            torch.cat([counts.flatten(), results.totals, results.weights, torch.tensor([float(share.num_errors)], device=device)]),
            None if self.ranks.num_sharing == 1 else _marks(directory, moments, counts, results),
        )


class _Given(NamedTuple):
    """What one rank gives to both collectives."""

    moments: Moments
    largest: Tensor
    summed: Tensor
    marks: Marks | None


T = TypeVar("T")


def _unless_it_fails(make: Callable[[], T], instead: T) -> tuple[T, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return instead, error


def _places(share: Share, watch: Watch) -> list[int]:
    """The rows of a watch; those of an empty tensor for what was not seen."""
    nothing = len(share.moments.elements) - 1
    first = share.rows.get(watch.identity)
    return [nothing] * watch.num_rows if first is None else list(range(first, first + watch.num_rows))


def _has_failed(share: Share, watch: Watch) -> bool:
    return any(key in share.failed for key in (*watch.statistic_keys, *watch.histogram_keys, *map(watch.key, watch.units)))


class _Results(NamedTuple):
    """What named aggregates of functions are merged from, each float64, shape ``(functions,)``."""

    extremes: Tensor
    nan: Tensor
    totals: Tensor
    weights: Tensor


def _results(share: Share, directory: Directory, device: torch.device) -> _Results:
    """Results of this rank by function, all of them by a few operations."""
    scalars: list[Tensor] = []
    weights: list[float] = []
    index: list[int] = []
    for number, (watch, function) in enumerate(directory.functions):
        results = share.results.get(watch.key(function.name))
        if results is not None and isinstance(results.aggregate, str):
            scalars += results.values
            # A sum weighs nothing; of a minimum the negative is the largest.
            weights += results.weights
            index += [number] * len(results.values)
    size = len(directory.functions)
    aggregates = [function.aggregate for _watch, function in directory.functions]
    is_mean = torch.tensor([one == "mean" for one in aggregates], dtype=torch.bool, device=device)
    sign = torch.tensor([-1.0 if one == "min" else 1.0 for one in aggregates], dtype=torch.float64, device=device)
    places = torch.tensor(index, dtype=torch.int64, device=device)
    values = torch.stack([one.to(device) for one in scalars]) if scalars else torch.empty(0, dtype=torch.float64, device=device)
    weight = torch.tensor(weights, dtype=torch.float64, device=device)
    nothing = torch.zeros(size, dtype=torch.float64, device=device)
    is_nan = values.isnan()
    least = torch.full_like(nothing, -torch.inf)
    return _Results(
        extremes=least.scatter_reduce(0, places, (values * sign[places]).masked_fill(is_nan, -torch.inf), "amax"),
        nan=nothing.scatter_reduce(0, places, is_nan.double(), "amax"),
        totals=nothing.index_add(0, places, torch.where(is_mean[places], values * weight, values)),
        weights=nothing.index_add(0, places, weight),
    )


def _marks(directory: Directory, moments: Moments, counts: Tensor, results: _Results) -> Marks:
    """What tells whether ranks that share their input have the same of a watch.

    All that is known of it does: parts of a tensor may well have one histogram. Of a parameter, and of a value of the user's own,
    every rank takes in what is its own to count: parts of a constant are alike, and no copies.
    """
    watches = [*directory.watches.values()]
    numbers = {watch.identity: number for number, watch in enumerate(watches) if watch.is_compared}
    none = len(watches)
    of_rows = [numbers.get(watch.identity, none) for watch in watches for _row in range(watch.num_rows)]
    of_counts = [numbers.get(watch.identity, none) for watch in watches if watch.histograms]
    of_functions = [numbers.get(watch.identity, none) for watch, _function in directory.functions]
    rows, counted, called = (torch.tensor(one, dtype=torch.int64, device=counts.device) for one in (of_rows, of_counts, of_functions))
    columns = [(torch.stack(moments), rows), (counts.T, counted), (torch.stack(results), called)]
    known = torch.cat([values.flatten() for values, _things in columns])
    things = torch.cat([of_columns.repeat(len(values)) for values, of_columns in columns])
    return Marks(
        marks_of(known, things, none),
        rows,
        # As they are put together: counts, totals, weights, and the number of errors.
        torch.cat([counted.repeat_interleave(NUM_COUNTS), called, called, called.new_full((1,), none)]),
    )


def _on_host(merged: Merged) -> Merged:
    """By one transfer."""
    parts = [torch.stack(merged.moments), merged.largest, merged.summed, merged.are_copies.double()]
    arrived = transfer(torch.cat([part.flatten() for part in parts]))
    of_rows, largest, summed, are_copies = arrived.split([part.numel() for part in parts])
    return Merged(Moments(*of_rows.view_as(parts[0])), largest, summed, are_copies > 0)


def _read(merged: Merged, directory: Directory) -> Together | None:
    """Take what arrived apart, in the order in which it was put together; ``None`` if any rank has more than the directory knows."""
    watches, num_functions = list(directory.watches.values()), len(directory.functions)
    counted = [watch for watch in watches if watch.histograms]
    with_units = [watch for watch in watches if watch.units]
    of_watches, of_functions, more, lost, extremes, nan, units = merged.largest.split(
        [2 * len(watches), 2 * num_functions, 1, 1, num_functions, num_functions, MAX_UNITS * len(with_units)]
    )
    if more:
        return None
    seen, failed = of_watches.view(-1, 2).bool().T.tolist()
    called, raised = of_functions.view(-1, 2).bool().T.tolist()
    counts, totals, weights, num_errors = merged.summed.split([len(counted) * NUM_COUNTS, num_functions, num_functions, 1])
    firsts, row = [], 0
    for watch in watches:
        firsts.append(row)
        row += watch.num_rows
    rows = [(watch, first) for watch, first, is_seen in zip(watches, firsts, seen, strict=True) if is_seen]
    has_rows = {watch.identity for watch, _first in rows}
    finished = {
        "mean": (totals / weights).tolist(),
        "sum": totals.tolist(),
        "max": torch.where(nan > 0, torch.nan, extremes).tolist(),
        "min": torch.where(nan > 0, torch.nan, -extremes).tolist(),
    }
    with_results = [one for one, is_called in zip(enumerate(directory.functions), called, strict=True) if is_called]
    return Together(
        rows=rows,
        moments=merged.moments,
        counted=[
            (watch, row_of_counts)
            for watch, row_of_counts in zip(counted, counts.view(-1, NUM_COUNTS).long(), strict=True)
            if watch.identity in has_rows
        ],
        units=[(watch, signs) for watch, signs in zip(with_units, units.view(-1, MAX_UNITS), strict=True) if (signs != ABSENT).any()],
        values={
            watch.key(function.name): finished[function.aggregate][number]
            for number, (watch, function) in with_results
            if isinstance(function.aggregate, str) and not isinstance(function.function, Metric)
        },
        copied=frozenset(itertools.compress(directory.watches, merged.are_copies.tolist())),
        # What has failed on any rank is NaN, whatever others make of theirs, and none of them is asked for it.
        unfinished=[
            (watch, function)
            for number, (watch, function) in with_results
            if not raised[number] and (isinstance(function.function, Metric) or not isinstance(function.aggregate, str))
        ],
        failed=[watch for watch, has_failed in zip(watches, failed, strict=True) if has_failed],
        failed_keys=[watch.key(one.name) for (watch, one), has_raised in zip(directory.functions, raised, strict=True) if has_raised],
        num_errors=int(num_errors),
        is_lost=bool(lost),
    )
