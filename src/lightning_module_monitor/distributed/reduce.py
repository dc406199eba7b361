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

from lightning_module_monitor.distributed.moments import Fingerprints, Reduced, Replicas, fingerprints_of, reduce_moments
from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.histogram import NUM_COUNTS
from lightning_module_monitor.kernels.moments import NUM_FIELDS, Moments
from lightning_module_monitor.kernels.transfer import to_host
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
    """Reduces what all ranks have observed, step by step. The ``specs`` of the rules are the same on every rank."""

    def __init__(self, ranks: Ranks, specs: Iterable[MetricSpec]) -> None:
        self.ranks = ranks
        self.specs: dict[Identity, MetricSpec] = {}
        """The reduced specifications, in an order that every rank has alike; each has its rows in this order."""
        self._first_rows: dict[Identity, int] = {}
        self._num_rows = 0
        self._functions: list[tuple[MetricSpec, UserFunction]] = []
        self._counted: list[MetricSpec] = []
        """Those with histograms."""
        self._with_units: list[MetricSpec] = []
        self._replicated: list[MetricSpec] = []
        for spec in specs:
            self._add(spec)

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
            moments, largest, summed, fingerprints, replicas = packed
            reduced = reduce_moments(moments, _joined(largest), _joined(summed), self.ranks, fingerprints, replicas=replicas)
            result = self._unpack(reduced, _parted(reduced.largest, largest), _parted(reduced.summed, summed))
            if result is None:
                message, another = _unless_it_fails(functools.partial(message_of, unknown, on_error), pickle.dumps([]))
                error = error or another  # not before the other ranks have what they wait for
                self.learn(self.ranks.gather(message), unknown)
                unsent.update(spec.identity for spec in unknown if spec.identity not in self.specs)
            elif error is not None:
                raise error
            else:
                return result

    def learn(self, messages: Sequence[bytes], own: Iterable[MetricSpec]) -> None:
        """Add the specifications that all ranks have sent by :func:`message_of`, in their order; ``own`` are those of this rank."""
        # Where this rank has the specification, or the rule, it has what cannot be sent: the functions themselves.
        of_this_rank = {spec.identity: spec for spec in own}
        for message in messages:
            for spec in pickle.loads(message):
                origin = None if spec.origin is None or spec.origin.functions.keys() != spec.functions.keys() else spec.origin
                known = None if origin is None else self.specs.get(origin.identity)
                self._add(of_this_rank.get(spec.identity, spec) if known is None else known.at(spec.site))

    def _add(self, spec: MetricSpec) -> None:
        if spec.identity in self.specs:
            return
        self.specs[spec.identity], self._first_rows[spec.identity] = spec, self._num_rows
        self._num_rows += spec.num_rows
        self._functions += [(spec, function) for function in spec.functions.values()]
        for is_one, those in ((spec.histograms, self._counted), (spec.units, self._with_units), (spec.is_replicated, self._replicated)):
            if is_one:
                those.append(spec)

    def _pack(self, own: LocalResult, has_more: bool) -> tuple[Moments, Parts, Parts, Fingerprints | None, Replicas]:
        """This rank's part: moments, numbers to take the maximum of, numbers to add up, and what shows copies and replicas."""
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
            "observed": self._tensor([spec.identity in own.rows for spec in specs]),
            "failed": self._tensor(
                [not own.failed.isdisjoint((*spec.statistic_keys, *spec.histogram_keys, *map(spec.key, spec.units))) for spec in specs]
            ),
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
        fingerprints = None if self.ranks.num_sharing == 1 else self._fingerprints(rows, counts, results)
        return rows, largest, summed, fingerprints, self._replicas(own)

    def _unpack(self, reduced: Reduced, largest: Parts, summed: Parts) -> GlobalResult | None:
        """The inverse of :meth:`_pack`, on the host; ``None`` if any rank has more than all know."""
        if largest["more"]:
            return None
        specs = list(self.specs.values())
        rows = [(spec, self._first_rows[spec.identity]) for spec in itertools.compress(specs, largest["observed"].tolist())]
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
                # A function that failed on any rank is NaN on all, and no rank gathers its results.
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
        """Numbers that named aggregates of functions are merged from, in a few operations: each float64, shape ``(functions,)``."""
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
        is_mean = self._tensor([one == "mean" for one in aggregates])
        sign = self._tensor([-1.0 if one == "min" else 1.0 for one in aggregates])
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

    def _fingerprints(self, moments: Moments, counts: Tensor, results: Mapping[str, Tensor]) -> Fingerprints:
        """Fingerprints of everything that is known of each specification: parts of a tensor may well have one histogram.

        Parameters and values of the user's own are left out: there each rank observes its own part, and parts of a constant are alike.
        """
        none = len(self.specs)
        rows, counted, called = self._of_items({spec: place for place, spec in enumerate(self.specs.values()) if spec.is_compared}, none)
        columns = [(torch.stack(moments), rows), (counts.T, counted), (torch.stack([*results.values()]), called)]
        known = torch.cat([values.flatten() for values, _things in columns])
        items = torch.cat([of_columns.repeat(len(values)) for values, of_columns in columns])
        return Fingerprints(fingerprints_of(known, items, none), _of_numbers(rows, counted, called, none))

    def _replicas(self, own: LocalResult) -> Replicas:
        """The specifications that every rank is expected to have alike, and those that this one has a part of."""
        replicated = self._replicated
        rows, counted, called = self._of_items({spec: place for place, spec in enumerate(replicated)}, len(replicated))
        return Replicas(
            first_rows=self._tensor([self._first_rows[spec.identity] for spec in replicated], torch.int64),
            are_parts=self._tensor([spec.identity in own.parts for spec in replicated]),
            of_numbers=_of_numbers(rows, counted, called, len(replicated)),
        )

    def _of_items(self, items: Mapping[MetricSpec, int], none: int) -> tuple[Tensor, Tensor, Tensor]:
        """The item that each row, each histogram and each function is of; ``none`` where it is of none."""
        rows = [items.get(spec, none) for spec in self.specs.values() for _row in range(spec.num_rows)]
        counted = [items.get(spec, none) for spec in self._counted]
        called = [items.get(spec, none) for spec, _function in self._functions]
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


def _of_numbers(rows: Tensor, counted: Tensor, called: Tensor, none: int) -> Tensor:
    """The item that each summed number belongs to, in their order: moments, counts, totals, weights, and the number of errors."""
    return torch.cat([rows.repeat(NUM_FIELDS), counted.repeat_interleave(NUM_COUNTS), called, called, called.new_full((1,), none)])


def _joined(parts: Parts) -> Tensor:
    return torch.cat([part.flatten() for part in parts.values()])


def _parted(joined: Tensor, parts: Parts) -> dict[str, Tensor]:
    """The inverse of :func:`_joined`, with the names and shapes of some parts."""
    pieces = joined.split([part.numel() for part in parts.values()])
    return {name: piece.view_as(part) for (name, part), piece in zip(parts.items(), pieces, strict=True)}
