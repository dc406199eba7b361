"""The results of functions and torchmetrics objects of a step, and values that are computed elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.distributed.reduce import compute_over_ranks
from lightning_module_monitor.kernels.elements import in_words, strided
from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.kernels.torch_kernel import widest
from lightning_module_monitor.keys import Key
from lightning_module_monitor.statistics.functions import (
    Aggregate,
    Results,
    Value,
    aggregated,
    as_tensor,
    called_at,
    compute_and_reset,
    finished_results,
    joined,
    metric_of,
    parts_of,
    undisturbed,
)
from lightning_module_monitor.statistics.spectral_statistics import SpectralStatistic
from lightning_module_monitor.statistics.stream import Identity, Stream
from lightning_module_monitor.step.state import SeriesState

OnError: TypeAlias = Callable[[Stream, str, str, Exception], None]
"""Receives a failure: the stream, the names of outputs, a description of what they are computed from, the error."""


class ObservedResults:
    """Calls functions while a step runs, and keeps their results on their devices.

    Args:
        on_error: Receives failures.
        state: The state from step to step, which has the torchmetrics objects.
        unobserved: Makes a context in which nothing is observed. Functions run in it, as they may call the model.
    """

    def __init__(self, on_error: OnError, state: SeriesState, unobserved: Callable[[], AbstractContextManager[None]]) -> None:
        self._fail, self._state, self._unobserved = on_error, state, unobserved
        self._results: dict[str, tuple[Stream, str, Results]] = {}
        self._metrics: dict[str, tuple[Stream, str, Metric]] = {}
        self._final: dict[Key, Tensor] = {}
        self._named: dict[str, Results] = {}
        self._whole: dict[str, tuple[Aggregate, Tensor]] = {}
        """Copied to the host: results of torchmetrics objects, and results that are joined by a named aggregate or by one of the user's."""

    def call(self, stream: Stream, *tensors: Tensor) -> None:
        """Call the user's functions with a tensor, or with both tensors of a pair."""
        for name, function in stream.functions.items():
            try:
                with undisturbed(tensors[0].device), self._unobserved():
                    # Copies, without their graph: the function may write into them, and a torchmetrics object may keep them,
                    # while the layer after this one overwrites the original.
                    copies = [strided(tensor).detach().clone() for tensor in tensors]
                    if isinstance(function.function, Metric):
                        self._update_metric(stream, function.function, name, copies)
                    else:
                        result = called_at(f"function {name!r} of {stream.kind} {stream.site!r}", function.function, copies)
                        for part, value in parts_of(result).items():
                            self.add(*stream.part(name, part), value, tensors[0].numel())
            except Exception as error:
                self._fail(stream, name, in_words(tensors[0]), error)

    def add(self, stream: Stream, name: str, result: object, num_elements: int) -> None:
        """Take a result of a function or a value: a real tensor, a number or an unfinished result, computed from ``num_elements`` elements.

        Raises:
            TypeError: If it is neither tensor nor number.
            ValueError: If another value has its key.
        """
        key = stream.keys[name]
        entry = self._results.get(key) or (stream, name, Results(stream.values[name].aggregate))
        if entry[0].identity != stream.identity:
            raise ValueError(f"{key} is the key of two values; expected another name for one of them")
        entry[2].add(result, num_elements)
        self._results[key] = entry

    def discard(self, keys: Collection[str]) -> None:
        """Discard results."""
        for key in keys:
            del self._results[key]

    def keys_of(self, streams: Collection[Stream]) -> list[str]:
        """The keys of the results of some streams."""
        return [key for key, (stream, *_rest) in self._results.items() if stream in streams]

    @property
    def streams(self) -> list[Stream]:
        """The streams with any."""
        return [stream for stream, *_rest in (*self._results.values(), *self._metrics.values())]

    def _update_metric(self, stream: Stream, metric: Metric, name: str, tensors: Sequence[Tensor]) -> None:
        key = stream.keys[name]
        if key not in self._state.metrics:
            self._state.metrics[key] = metric.clone()
        copy = self._state.metrics[key]
        if key not in self._metrics:
            copy.to(tensors[0].device).reset()
            self._metrics[key] = (stream, name, copy)
        copy.update(*(tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1).float() for tensor in tensors))

    def _parts(self, stream: Stream, name: str, compute: Callable[[], object]) -> dict[Key, Tensor]:
        """A final result by key; each part of a dict has a key of its own."""
        try:
            parts = [(*stream.part(name, part), joined(as_tensor(value), "mean")) for part, value in parts_of(compute()).items()]
        except Exception as error:
            self._fail(stream, name, "its results", error)
            return {}
        return {stream_of_part.series[part]: value for stream_of_part, part, value in parts}

    def tensors(self, *, is_alone: bool) -> Iterator[Tensor]:
        """The tensors to copy to the host; with ``is_alone``, on a single rank, also the results of torchmetrics objects."""
        for stream, name, metric in self._metrics.values() if is_alone else ():
            self._final |= self._parts(stream, name, functools.partial(compute_and_reset, metric))
        self._named = {key: result for key, (_stream, _name, result) in self._results.items() if isinstance(result.aggregate, str)}
        for key, (stream, name, results) in ((key, entry) for key, entry in self._results.items() if key not in self._named):
            try:
                self._whole[key] = results.aggregate, torch.cat(results.values)
            except Exception as error:
                self._fail(stream, name, "its results", error)
        yield from (value for results in self._named.values() for value in results.values)
        yield from self._final.values()
        yield from (values.to(widest(values.device)) for _aggregate, values in self._whole.values())

    def arrived(self, arrived: Iterator[Array]) -> dict[str, Any]:
        """The fields of :class:`Observed` that have results, from the arrays of :meth:`tensors` on the host."""
        numbers = finished_results(self._named, arrived)
        return {
            "results": {key: (str(result.aggregate), numbers[key], result.weights) for key, result in self._named.items()},
            "final": {key: float(next(arrived)) for key in self._final},
            "whole_results": {key: (how, torch.from_numpy(next(arrived)).to(result.dtype)) for key, (how, result) in self._whole.items()},
            "metrics": {key: metric for key, (_stream, _name, metric) in self._metrics.items()},
        }

    def finished_once(
        self,
        due: Sequence[tuple[Stream, str, Value]],
        final: Mapping[Key, float],
        whole_results: Mapping[str, tuple[Aggregate, Tensor]],
        copied: Collection[Identity],
        ranks: Ranks | None,
    ) -> dict[Key, float]:
        """The results of the user's own aggregates and of torchmetrics objects, by key.

        Every rank computes the same results in the same order. A result that failed on any rank is NaN on all, and is not gathered.
        ``final`` and ``whole_results`` are fields of :class:`Observed`.
        """
        due = [(stream, name, value) for stream, name, value in due if not isinstance(value, SpectralStatistic)]
        results_here = {key: results for key, (_aggregate, results) in whole_results.items()}
        gathered = [results_here] if ranks is None else []
        if ranks is not None and any(metric_of(value) is None for _stream, _name, value in due):
            ours = [stream.keys[name] for stream, name, _value in due if ranks.sharing_index == 0 or stream.identity not in copied]
            gathered = ranks.gather({key: results_here[key] for key in ours if key in results_here})
        values = dict(final)
        for stream, name, value in due:
            key = stream.keys[name]
            metric = metric_of(value)
            if metric is None:
                aggregate = whole_results[key][0] if key in results_here else value.aggregate
                compute = functools.partial(aggregated, key, aggregate, [results[key] for results in gathered if key in results])
            elif ranks is not None:
                compute = functools.partial(compute_over_ranks, self._metrics[key][2] if key in self._metrics else metric.clone(), ranks)
            else:
                continue  # it is in `final`
            values |= {part: float(result) for part, result in self._parts(stream, name, compute).items()}
        return values
