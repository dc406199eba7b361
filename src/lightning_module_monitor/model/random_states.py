"""Random states that are as they were, whatever was run in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomStates:
    """The states of the generators that a model may draw from: Python's, numpy's, torch's on the CPU and on one device."""

    of_python: tuple[Any, ...] | None
    of_numpy: dict[str, Any] | None
    of_cpu: Tensor
    device: torch.device | None
    of_device: Tensor | None

    @classmethod
    def now(cls, device: torch.device, *, of_torch_alone: bool = False) -> RandomStates:
        """The states of the CPU's and a device's generators as they are; those of Python and numpy take ten times as long as torch's."""
        own = None if device.type == "cpu" else device
        of_device = None if own is None else getattr(torch, own.type).get_rng_state(own)
        of_python = None if of_torch_alone else random.getstate()
        of_numpy = None if of_torch_alone else np.random.get_state(legacy=False)
        return cls(of_python, of_numpy, torch.get_rng_state(), own, of_device)

    def restore(self) -> None:
        """Let the generators go on from here."""
        if self.of_python is not None and self.of_numpy is not None:
            random.setstate(self.of_python)
            np.random.set_state(self.of_numpy)
        torch.set_rng_state(self.of_cpu)
        if self.device is not None:
            getattr(torch, self.device.type).set_rng_state(self.of_device, self.device)


@contextmanager
def unchanged_random_states(device: torch.device) -> Iterator[None]:
    """What is drawn in the block from the CPU's and a device's generators is drawn again after it."""
    states = RandomStates.now(device)
    try:
        yield
    finally:
        states.restore()
