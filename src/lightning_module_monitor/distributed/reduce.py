"""From what each rank has observed to what all ranks have together: two collectives a step and, from an accelerator, one transfer.

Specifications and functions are laid out in an order that all ranks have alike: those of the rules (which are checked to be the same), and
those that turned up later (a further output, a head of attention) on any of them. When one turns up for the first time, its rank sends it
to the others, and that step is reduced once more. What cannot be reduced by numbers alone (torchmetrics objects, aggregates of the
user's) is synchronized after the two collectives, on all ranks in the same order.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_module_monitor.distributed.moments import Marks, Reduced, Replicas, marks_of, reduce_moments
from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.kernels.moments import Moments
from lightning_module_monitor.kernels.transfer import to_host
from lightning_module_monitor.record import NUM_COUNTS
from lightning_module_monitor.statistics.functions import UserFunction
from lightning_module_monitor.statistics.registry import MAX_UNITS
from lightning_module_monitor.statistics.results import GlobalResult, LocalResult
from lightning_module_monitor.statistics.spec import Identity, MetricSpec

OnError = Callable[[MetricSpec, Exception], None]
Parts = Mapping[str, Tensor]
"""Tensors by name that are reduced as one."""

ABSENT = -1.0
"""Stands for a unit that a rank does not have: less than 0, dead, and 1, alive."""


class DistributedReducer:
    """Reduces what all ranks have observed, step by step.

    Args:
        ranks: The processes that train together.
        specs: The specifications of the rules, the same on every rank.
    """

    def __init__(self, ranks: Ranks, specs: Iterable[MetricSpec]) -> None:
        self.ranks = ranks
        self.group = ranks.group
        self.is_first_sharing = ranks.place == 0
        self.specs: dict[Identity, MetricSpec] = {}
        """What is reduced, in an order that every rank has alike."""
        self._functions: list[tuple[MetricSpec, UserFunction]] = []
        self._add(specs)

    def reduce(self, local: Callable[[], LocalResult], on_error: OnError) -> GlobalResult:
        """Reduce a step.

        Args:
            local: Makes what this rank has observed. Where that fails, the step is lost on every rank, and the error is raised when
                they know: they wait for this one.
            on_error: Receives a specification that cannot be sent to other ranks.
        """
        nothing = LocalResult.of_lost_step()
        own, error = _unless_it_fails(local, nothing)
        unsent: set[Identity] = set()
        while True:
            unknown = [spec for spec in own.specs if spec.identity not in self.specs and spec.identity not in unsent]
            packed, another = _unless_it_fails(functools.partial(self._pack, own, bool(unknown)), None)
            if packed is None:
                own, error = nothing, error or another
                packed = self._pack(own, bool(unknown))
            result = self._unpack(*self._reduce(*packed))
            if result is None:
                message, another = _unless_it_fails(functools.partial(message_of, unknown, on_error), pickle.dumps([]))
                error = error or another  # not before the other ranks have what they wait for
                self.learn(self.ranks.gather(message), unknown)
                unsent.update(spec.identity for spec in unknown if spec.identity not in self.specs)
            elif error is not None:
                raise error
            else:
                return result

    def gather(self, results: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The results of all ranks, for an aggregate of the user's."""
        return self.ranks.gather(results)

    def learn(self, messages: Sequence[bytes], own: Iterable[MetricSpec]) -> None:
        """Add the specifications that ranks have sent, in their order.

        Args:
            messages: What :func:`message_of` made on each of them.
            own: What this rank has sent.
        """
        # Where this rank has the specification, or the rule, it has what cannot be sent: the functions themselves.
        of_this_rank = {spec.identity: spec for spec in own}
        for message in messages:
            for spec in pickle.loads(message):
                origin = None if spec.origin is None or spec.origin.functions.keys() != spec.functions.keys() else spec.origin
                known = None if origin is None else self.specs.get(origin.identity)
                self._add([of_this_rank.get(spec.identity, spec) if known is None else known.at(spec.site)])

    def _add(self, specs: Iterable[MetricSpec]) -> None:
        for spec in specs:
            if spec.identity not in self.specs:
                self.specs[spec.identity] = spec
                self._functions += [(spec, function) for function in spec.functions.values()]

    @property
    def _counted(self) -> list[MetricSpec]:
        return [spec for spec in self.specs.values() if spec.histograms]

    @property
    def _replicated(self) -> list[MetricSpec]:
        return [spec for spec in self.specs.values() if spec.is_replicated]

    @property
    def _with_units(self) -> list[MetricSpec]:
        return [spec for spec in self.specs.values() if spec.units]

    def _pack(self, own: LocalResult, has_more: bool) -> tuple[Moments, Parts, Parts, Marks | None, Replicas]:
        """What this rank gives: moments, what the maximum and what the sum is taken of, and what shows copies and replicas."""
        specs = self.specs.values()
        functions = [(spec.key(function.name), function) for spec, function in self._functions]
        rows = own.moments.rows(self._tensor([row for spec in specs for row in _rows_of(own, spec)], torch.int64))
        none = len(own.counts) - 1
        counts = own.counts[self._tensor([own.counted.get(spec.identity, none) for spec in self._counted], torch.int64)]
        units = torch.full((len(self._with_units), MAX_UNITS), ABSENT, dtype=torch.float64, device="cpu")
        for of_spec, spec in zip(units, self._with_units, strict=True):
            if spec.identity in own.units:
                of_spec[: len(own.units[spec.identity])] = own.units[spec.identity]
        results = self._results(own)
        largest = {
            "seen": self._tensor([spec.identity in own.rows for spec in specs]),
            "failed": self._tensor([_has_failed(own, spec) for spec in specs]),
            "called": self._tensor([key in own.results or key in own.metrics for key, _function in functions]),
            "raised": self._tensor([key in own.failed for key, _function in functions]),
            "more": self._tensor([has_more]),
            "lost": self._tensor([own.is_lost]),
            "extremes": results["extremes"],
            "nan": results["nan"],
            "units": units,
        }
        summed = {
            "counts": counts,
            "totals": results["totals"],
            "weights": results["weights"],
            "errors": self._tensor([own.num_errors]),
        }
        marks = None if self.ranks.num_sharing == 1 else self._marks(rows, counts, results)
        return rows, largest, summed, marks, self._replicas(own)

    def _reduce(
        self, moments: Moments, largest: Parts, summed: Parts, marks: Marks | None, replicas: Replicas
    ) -> tuple[Reduced, Parts, Parts]:
        """The two collectives."""
        reduced = reduce_moments(moments, _joined(largest), _joined(summed), self.ranks, marks, replicas=replicas)
        return reduced, _parted(reduced.largest, largest), _parted(reduced.summed, summed)

    def _unpack(self, reduced: Reduced, largest: Parts, summed: Parts) -> GlobalResult | None:
        """The inverse of :meth:`_pack`, on the host; ``None`` if any rank has more than all know."""
        if largest["more"]:
            return None
        specs = list(self.specs.values())
        firsts = itertools.accumulate((spec.num_rows for spec in specs), initial=0)
        rows = [(spec, first) for spec, first, is_seen in zip(specs, firsts, largest["seen"].tolist(), strict=False) if is_seen]
        measured = {spec.identity for spec, _first in rows}
        called, raised = largest["called"].tolist(), largest["raised"].tolist()
        finished = {
            "mean": (summed["totals"] / summed["weights"]).tolist(),
            "sum": summed["totals"].tolist(),
            "max": torch.where(largest["nan"] > 0, torch.nan, largest["extremes"]).tolist(),
            "min": torch.where(largest["nan"] > 0, torch.nan, -largest["extremes"]).tolist(),
        }
        values: dict[str, float] = {}
        unfinished: list[tuple[MetricSpec, UserFunction]] = []
        for number, (spec, function) in enumerate(self._functions):
            if called[number] and isinstance(function.aggregate, str) and not isinstance(function.function, Metric):
                values[spec.key(function.name)] = finished[function.aggregate][number]
            elif called[number] and not raised[number]:
                # What has failed on any rank is NaN, whatever others make of theirs, and none of them is asked for it.
                unfinished.append((spec, function))
        failed = [*itertools.compress(specs, largest["failed"].tolist())]
        return GlobalResult(
            rows=rows,
            moments=torch.stack(reduced.moments),
            counted=[
                (spec, counts) for spec, counts in zip(self._counted, summed["counts"].long(), strict=True) if spec.identity in measured
            ],
            units=[
                (spec, units[units != ABSENT] > 0)
                for spec, units in zip(self._with_units, largest["units"], strict=True)
                if (units != ABSENT).any()
            ],
            values=values,
            copied=frozenset(itertools.compress(self.specs, reduced.are_copies.tolist())),
            unfinished=unfinished,
            differing=[spec for spec in itertools.compress(self._replicated, reduced.differ.tolist()) if spec not in failed],
            failed=failed,
            failed_keys=[spec.key(one.name) for (spec, one), has_raised in zip(self._functions, raised, strict=True) if has_raised],
            num_errors=int(summed["errors"]),
            is_lost=bool(largest["lost"]),
        )

    def _results(self, own: LocalResult) -> dict[str, Tensor]:
        """What named aggregates of functions are merged from, by a few operations: each float64, shape ``(functions,)``."""
        scalars: list[Tensor] = []
        weights: list[float] = []
        index: list[int] = []
        for number, (spec, function) in enumerate(self._functions):
            results = own.results.get(spec.key(function.name))
            if results is not None and isinstance(results.aggregate, str):
                scalars += results.values
                # A sum weighs nothing; of a minimum the negative is the largest.
                weights += results.weights
                index += [number] * len(results.values)
        aggregates = [function.aggregate for _spec, function in self._functions]
        is_mean, sign = (
            self._tensor([one == "mean" for one in aggregates]),
            self._tensor([-1.0 if one == "min" else 1.0 for one in aggregates]),
        )
        places, weight = self._tensor(index, torch.int64), self._tensor(weights)
        values = to_host([], scalars)[1]
        nothing, is_nan = torch.zeros_like(sign), values.isnan()
        least = torch.full_like(nothing, -torch.inf)
        return {
            "extremes": least.scatter_reduce(0, places, (values * sign[places]).masked_fill(is_nan, -torch.inf), "amax"),
            "nan": nothing.scatter_reduce(0, places, is_nan.double(), "amax"),
            "totals": nothing.index_add(0, places, torch.where(is_mean[places] > 0, values * weight, values)),
            "weights": nothing.index_add(0, places, weight),
        }

    def _marks(self, moments: Moments, counts: Tensor, results: Mapping[str, Tensor]) -> Marks:
        """What shows whether ranks that share their input have the same of a specification.

        All that is known of it does: parts of a tensor may well have one histogram. Of a parameter, and of a value of the user's own,
        every rank observes what is its own to count: parts of a constant are alike, and no copies.
        """
        none = len(self.specs)
        rows, counted, called = self._of_things({spec: place for place, spec in enumerate(self.specs.values()) if spec.is_compared}, none)
        columns = [(torch.stack(moments), rows), (counts.T, counted), (torch.stack([*results.values()]), called)]
        known = torch.cat([values.flatten() for values, _things in columns])
        things = torch.cat([of_columns.repeat(len(values)) for values, of_columns in columns])
        return Marks(marks_of(known, things, none), rows, _of_summed(counted, called, none))

    def _replicas(self, own: LocalResult) -> Replicas:
        """What every rank is expected to have alike, and of what this one has a part."""
        replicated = self._replicated
        rows, counted, called = self._of_things({spec: place for place, spec in enumerate(replicated)}, len(replicated))
        firsts = dict(zip(self.specs, itertools.accumulate((spec.num_rows for spec in self.specs.values()), initial=0), strict=False))
        return Replicas(
            first_rows=self._tensor([firsts[spec.identity] for spec in replicated], torch.int64),
            are_parts=self._tensor([spec.identity in own.parts for spec in replicated]),
            of_rows=rows,
            of_summed=_of_summed(counted, called, len(replicated)),
        )

    def _of_things(self, things: Mapping[MetricSpec, int], none: int) -> tuple[Tensor, Tensor, Tensor]:
        """The thing that each row, each histogram and each function is of; ``none`` where it is of none."""
        rows = [things.get(spec, none) for spec in self.specs.values() for _row in range(spec.num_rows)]
        counted = [things.get(spec, none) for spec in self._counted]
        called = [things.get(spec, none) for spec, _function in self._functions]
        return self._tensor(rows, torch.int64), self._tensor(counted, torch.int64), self._tensor(called, torch.int64)

    def _tensor(self, values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu")


def message_of(specs: Sequence[MetricSpec], on_error: OnError) -> bytes:
    """Specifications as they are sent to other ranks; one that cannot be sent is reported and left out."""
    sent = []
    for spec in specs:
        plain = replace(_plain(spec), origin=None if spec.origin is None else _plain(spec.origin))
        try:
            pickle.dumps(plain)
        except Exception as error:
            on_error(spec, error)
        else:
            sent.append(plain)
    return pickle.dumps(sent)


def _plain(spec: MetricSpec) -> MetricSpec:
    """A specification without what belongs to this process."""
    aggregates = {name: function.aggregate for name, function in spec.functions.items()}
    named = {name: UserFunction(name, float, one if isinstance(one, str) else _unknown_here) for name, one in aggregates.items()}
    return replace(spec, functions=named, origin=None, _derived={})


def _unknown_here(_values: Tensor) -> float:
    """Stands for an aggregate of the user's that only other ranks have."""
    raise ValueError("its aggregate is not known on this rank; expected every rank to record it")


T = TypeVar("T")


def _unless_it_fails(make: Callable[[], T], instead: T) -> tuple[T, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return instead, error


def _rows_of(own: LocalResult, spec: MetricSpec) -> Sequence[int]:
    """The rows of a specification; those of an empty tensor for what was not observed."""
    first = own.rows.get(spec.identity)
    return [len(own.moments.elements) - 1] * spec.num_rows if first is None else range(first, first + spec.num_rows)


def _has_failed(own: LocalResult, spec: MetricSpec) -> bool:
    return any(key in own.failed for key in (*spec.statistic_keys, *spec.histogram_keys, *map(spec.key, spec.units)))


def _of_summed(counted: Tensor, called: Tensor, none: int) -> Tensor:
    """The thing that each number is of that is summed, in their order: counts, totals, weights, and the number of errors."""
    return torch.cat([counted.repeat_interleave(NUM_COUNTS), called, called, called.new_full((1,), none)])


def _joined(parts: Parts) -> Tensor:
    return torch.cat([part.flatten() for part in parts.values()])


def _parted(joined: Tensor, parts: Parts) -> dict[str, Tensor]:
    """The inverse of :func:`_joined`, with the names and shapes of some parts."""
    pieces = joined.split([part.numel() for part in parts.values()])
    return {name: piece.view_as(part) for (name, part), piece in zip(parts.items(), pieces, strict=True)}
