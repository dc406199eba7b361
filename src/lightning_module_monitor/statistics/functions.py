"""Joins the results of user functions, of torchmetrics objects and of logged values within a step."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_module_monitor.kernels.elements import own_elements, plain
from lightning_module_monitor.kernels.moments import Array
from lightning_module_monitor.kernels.torch_kernel import widest
from lightning_module_monitor.model.unchanged import full_precision, unchanged_random_states

Aggregate = str | Callable[[Tensor], Any]

AGGREGATES: dict[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "sum": torch.sum, "min": torch.min, "max": torch.max}
"""Joins the elements of a result when it arrives. ``Numbers.merged`` joins the results of a step by the same names."""


@dataclass(frozen=True)
class Value:
    """How the results of an output within a step are joined: by the name of an aggregate, or a function.

    The results are logged or computed elsewhere, or come from the function of a :class:`Function`.
    """

    aggregate: Aggregate = "mean"

    @property
    def is_merged_by_name(self) -> bool:
        """Whether it gives one number, merged by a named aggregate.

        Else, as for a torchmetrics object, it is finished once, from everything, and may be a dict.
        """
        return isinstance(self.aggregate, str) and metric_of(self) is None


@dataclass(frozen=True, eq=False)
class Function(Value):
    """A function of a tensor, or a torchmetrics object, and how its results are joined."""

    function: Metric | Callable[..., Any] = field(kw_only=True)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same function. Torchmetrics objects are compared by class, as their ``==`` returns a third object."""
        return isinstance(other, Function) and self._same == other._same

    def __hash__(self) -> int:
        return hash(self._same)

    @property
    def _same(self) -> tuple[object, object]:
        return type(self.function) if isinstance(self.function, Metric) else self.function, self.aggregate


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Run a user's code on a tensor of a device without side effects: no graph, no autocast, every random state as it was before."""
    with unchanged_random_states(device), torch.no_grad(), full_precision(device):
        yield


def called_at(place: str, function: Callable[..., object], tensors: Sequence[Tensor]) -> object:
    """The result of a user's function for tensors.

    A warning that a function of torch's gives names the file that calls the function. To users ours says nothing: ``place`` stands for it.
    """
    return FunctionType(_call.__code__.replace(co_filename=f"<{place}>"), _NAMES)(function, tensors)


def _call(function: Callable[..., object], tensors: Sequence[Tensor]) -> object:
    return function(*tensors)


_NAMES: dict[str, Any] = {"__name__": __name__}
"""Global names of the calls, where Python keeps which warnings were shown: once each by default."""


Finish = Callable[[Sequence[Array]], Sequence[float]]
"""Makes a number of each of several arrays on the host, in float64. It does not fail."""


class Unfinished(NamedTuple):
    """A result that becomes a number on the host, where it arrives with everything else."""

    numbers: Tensor
    """A small tensor: real, of any shape, on any device."""
    finish: Finish
    """Is called once for the numbers of all results that have it."""


@dataclass
class Results:
    """The results of one output within a step, still on their devices."""

    aggregate: Aggregate
    values: list[Tensor] = field(default_factory=list)
    """Scalars in float64, if the device has it, or unfinished numbers; for an aggregate function of the user the results, flat."""
    weights: list[float] = field(default_factory=list)
    """The weight of each scalar, and of each unfinished result."""
    unfinished: dict[int, Finish] = field(default_factory=dict)
    """The function that finishes a value, by the index of the value."""

    def add(self, result: object, num_elements: int) -> None:
        """Keep a result: a real tensor of any shape, a number, or one that is unfinished.

        A scalar weighs ``num_elements``, from which it was computed, a tensor as many elements as it has.

        Raises:
            TypeError: If it is none of these.
            ValueError: If it is a tensor without elements of its own.
        """
        if isinstance(result, Unfinished):
            self.unfinished[len(self.values)] = result.finish
            self.values.append(result.numbers)
            self.weights.append(num_elements)
            return
        tensor = as_tensor(result)
        if isinstance(self.aggregate, str):
            self.values.append(joined(tensor, self.aggregate))
            self.weights.append(num_elements if tensor.dim() == 0 else tensor.numel())
        else:
            self.values.append(tensor.reshape(-1))


def finished_results(results: Mapping[str, Results], arrived: Iterator[Array]) -> dict[str, list[float]]:
    """The numbers of results that are joined by the name of an aggregate, by key, in the order of their values.

    Args:
        results: The results by key.
        arrived: The values of all results on the host, one after the other.
    """
    numbers: dict[str, list[float]] = {}
    unfinished: defaultdict[Finish, list[tuple[str, int, Array]]] = defaultdict(list)
    for key, result in results.items():
        arrays = [next(arrived) for _value in result.values]
        numbers[key] = [0.0 if index in result.unfinished else float(array) for index, array in enumerate(arrays)]
        for index, finish in result.unfinished.items():
            unfinished[finish].append((key, index, arrays[index]))
    for finish, entries in unfinished.items():
        made = finish([array for _key, _index, array in entries])
        for (key, index, _array), number in zip(entries, made, strict=True):
            numbers[key][index] = number
    return numbers


def as_tensor(result: object) -> Tensor:
    """A result as a tensor of its own elements.

    Raises:
        TypeError: If it is neither a real tensor nor a number.
        ValueError: If it is a tensor without elements of its own.
    """
    if isinstance(result, Real | np.bool_):
        result = torch.tensor(float(result), dtype=torch.float64, device="cpu")
    result = plain(result) if isinstance(result, Tensor) else result
    if not isinstance(result, Tensor) or result.is_complex() or result.is_meta:
        what = f"a tensor of dtype {result.dtype} on {result.device}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise TypeError(f"returned {what}; expected a real tensor, a number, or a dict of these")
    return own_elements(result if result.layout is torch.strided else result.to_dense())


def joined(tensor: Tensor, aggregate: str) -> Tensor:
    """The elements of a tensor joined to a scalar, shape ``()``, in float64 if the device has it."""
    wide = tensor.to(widest(tensor.device))
    return wide if wide.dim() == 0 else AGGREGATES[aggregate](wide)


def parts_of(result: object) -> Mapping[Any, object]:
    """The parts of a result that is a dict; any other result by ``""``."""
    return result if isinstance(result, Mapping) else {"": result}


def metric_of(value: Value) -> Metric | None:
    """The torchmetrics object that computes a value; ``None`` if there is none."""
    return value.function if isinstance(value, Function) and isinstance(value.function, Metric) else None


def aggregated(key: str, aggregate: Aggregate, results: Sequence[Tensor]) -> object:
    """The result of a user's aggregate function for the results of all ranks, on the host, as the value of a key."""
    assert callable(aggregate)
    with undisturbed(torch.device("cpu")):
        return called_at(f"aggregate of {key}", aggregate, [torch.cat(list(results))])


def compute_and_reset(metric: Metric) -> object:
    """The result of a torchmetrics object, which is empty afterwards."""
    with undisturbed(metric.device), warnings.catch_warnings():
        # Of several ranks only some may have had tensors for it.
        warnings.filterwarnings("ignore", "The ``compute`` method of metric", UserWarning)
        try:
            return metric.compute()
        finally:
            metric.reset()
