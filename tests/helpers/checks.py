"""Checks of values as programs have them, in a file whose assertions pytest does not rewrite; each fails for a NaN."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def _assert_finite(value: Tensor) -> None:
    assert torch.isfinite(value).all()


def _assert_over_lines(value: Tensor) -> None:
    assert (
        torch.isfinite(value).all()
    ), (
        "the output is bad"
    )  # fmt: skip


def _raise_arithmetic_error(value: Tensor) -> None:
    if value.isnan().any():
        message = "diverged"
        raise FloatingPointError(message)


def _call_check_of_torch(value: Tensor) -> None:
    torch._assert(torch.isfinite(value).all(), "bad")


def _call_check_of_numpy(value: Tensor) -> None:
    np.testing.assert_(np.isfinite(value.numpy()).all())  # noqa: PT009  # the check that is tested


def _divide(value: Tensor) -> None:
    _scale = 1 / int(value.isfinite())


OF_FINITE = (_assert_finite, _assert_over_lines, _raise_arithmetic_error, _call_check_of_torch, _call_check_of_numpy, _divide)
"""Checks that a value is finite."""


def _assert_positive(value: Tensor) -> None:
    assert bool((value > 0).all())


def _assert_after_check(value: Tensor) -> None:
    is_finite = torch.isfinite(value).all()
    assert is_finite is None


def _assert_with_comment(value: Tensor) -> None:
    # isnan(value) is tested elsewhere
    assert value > 0  # and isinf


def _assert_within_check(value: Tensor) -> None:
    is_finite = _is_finite(value.isfinite())  # noqa: F841  # what is tested is the value of the call


def _is_finite(value: Tensor) -> Tensor:
    assert value.dim() > 0
    return value


def _raise_lookup_error(value: Tensor) -> None:
    if value.isnan().any():
        raise LookupError("diverged")


OF_OTHERS = (_assert_positive, _assert_after_check, _assert_with_comment, _assert_within_check, _raise_lookup_error)
"""Checks of something else, and an error of another type."""
