"""Functions and torchmetrics objects of the user's: called without disturbing training, their results aggregated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_module_monitor.kernels.elements import own_elements, plain
from lightning_module_monitor.kernels.torch_kernel import has_float64
from lightning_module_monitor.model.unchanged import unchanged_random_states

AGGREGATES: dict[str, Callable[[Tensor], Tensor]] = {"mean": torch.mean, "sum": torch.sum, "min": torch.min, "max": torch.max}
"""How the elements of a result are joined when it arrives, and the results of a step on the host; for a mean these have weights then."""


@dataclass(frozen=True)
class UserFunction:
    """A function of a tensor, or a torchmetrics object, with its name and the way its results are joined."""

    name: str
    function: Metric | Callable[..., Any]
    aggregate: str | Callable[[Tensor], Any]


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Run a user's code on a tensor of a device without side effects: no graph, no autocast, every random state as it was before."""
    autocast = torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else torch.no_grad()
    with unchanged_random_states(device), torch.no_grad(), autocast:
        yield


@dataclass
class Results:
    """What one function returned at one site within a step."""

    aggregate: str | Callable[[Tensor], Any]
    values: list[Tensor] = field(default_factory=list)
    """Scalars in float64, or, for an aggregate of the user's, flat results as they came."""
    weights: list[float] = field(default_factory=list)

    def add(self, result: object, num_elements: int) -> None:
        """Keep a result, a real tensor of any shape or a number, still on its device.

        A scalar weighs ``num_elements``, from which it was computed, a tensor as many elements as it has.

        Raises:
            TypeError: If it is neither.
            ValueError: If it is a tensor without elements of its own.
        """
        if isinstance(result, Real):
            result = torch.tensor(float(result), dtype=torch.float64, device="cpu")
        result = plain(result) if isinstance(result, Tensor) else result
        if not isinstance(result, Tensor) or result.is_complex() or result.is_meta:
            what = f"a tensor of dtype {result.dtype} on {result.device}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            raise TypeError(f"returned {what}; expected a real tensor or a number")
        result = own_elements(result if result.layout is torch.strided else result.to_dense())
        if isinstance(self.aggregate, str):
            wide = result.to(torch.float64 if has_float64(result.device) else torch.float32)
            self.values.append(wide if wide.dim() == 0 else AGGREGATES[self.aggregate](wide))
            self.weights.append(num_elements if result.dim() == 0 else result.numel())
        else:
            self.values.append(result.reshape(-1))

    def parts(self, name: str) -> dict[str, Results]:
        """Results to be merged on the host, by the name that they get in the key.

        An aggregate of the user's is applied here, on the device; where it returns a dict, its keys are appended.
        """
        if isinstance(self.aggregate, str):
            return {name: self}
        with undisturbed(self.values[0].device):
            return by_part(name, self.aggregate(torch.cat(self.values)))

    def merge(self, values: Tensor) -> float:
        """The one number, from this object's values as they arrived on the host, float64, shape ``(results,)``."""
        assert isinstance(self.aggregate, str)
        if len(self.weights) == 1 and self.weights != [0]:  # multiplied by its weight and divided by it, a value could round
            return float(values[0])
        if self.aggregate != "mean":
            return float(AGGREGATES[self.aggregate](values))
        weights = torch.tensor(self.weights, dtype=torch.float64, device="cpu")
        return float((values * weights).sum() / weights.sum())


def by_part(name: str, result: object) -> dict[str, Results]:
    """A final result as one, or for a dict several, entries: ``name``, or ``name.part`` for each part."""
    parts = {f"{name}.{part}": value for part, value in result.items()} if isinstance(result, Mapping) else {name: result}
    entries = {}
    for key, value in parts.items():
        entries[key] = Results("mean")
        entries[key].add(value, 1)
    return entries
