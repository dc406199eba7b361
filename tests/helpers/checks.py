"""Checks of values as programs have them, in a file whose assertions pytest does not rewrite."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_finite(value: Tensor) -> None:
    """An assertion without a message."""
    assert torch.isfinite(value).all()


def assert_positive(value: Tensor) -> None:
    """An assertion of something else."""
    assert bool((value > 0).all())


def raise_arithmetic_error(value: Tensor) -> None:
    """An error of the type that a check raises."""
    if value.isnan().any():
        raise FloatingPointError("diverged")


def raise_lookup_error(value: Tensor) -> None:
    """An error of another type."""
    if value.isnan().any():
        raise LookupError("diverged")
