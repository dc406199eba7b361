"""Quantiles from fine counts, and how far the largest magnitude stands out."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.casts import BOUND, QUANTILES, quantile, recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

GENERATOR = torch.Generator().manual_seed(7)
NORMAL = torch.randn(10_001, generator=GENERATOR)
SAMPLES = {
    "normal": NORMAL,
    "heavy-tailed": NORMAL / torch.rand(10_001, generator=GENERATOR) ** 3,
    "one-sided": NORMAL.abs(),
    "negative": -NORMAL.exp(),
    "constant": torch.full((1000,), -0.3),
    "half zero": torch.where(torch.rand(10_001, generator=GENERATOR) < 0.5, 0.0, NORMAL),
    "zeros": torch.zeros(50),
    "within an eighth of an octave": 1.2 + 0.05 * torch.rand(1000, generator=GENERATOR),
    "subnormal": 1e-40 * NORMAL,
    "from 1e-38 to 1e38": 10 ** (76 * torch.rand(10_001, generator=GENERATOR) - 38),
    "bfloat16": NORMAL.bfloat16(),
    "float16": (1e-6 * NORMAL).half(),
    "float64": NORMAL.double() * 1e-30,
    "one element": torch.tensor([2.5]),
    "two elements": torch.tensor([-2.5, 4.0]),
    "infinities": torch.cat([NORMAL, torch.full((1000,), math.inf), torch.full((150,), -math.inf)]),
}


def assert_close(x: Tensor, actual: dict[str, float]) -> None:
    """Each quantile is that of the sorted elements, within the promised bound; zeros are zeros, and infinities are infinities."""
    for name, percent in QUANTILES.items():
        expected = quantile(x, percent)
        assert actual[name] == pytest.approx(expected, rel=BOUND, abs=0.0), name
    values = [actual[name] for name in QUANTILES]
    assert values == sorted(values)


@pytest.mark.parametrize("name", SAMPLES)
def test_quantiles_are_within_their_bound(name: str) -> None:
    """Whatever the distribution, of parts together as of the whole; those of a constant are exact."""
    x = SAMPLES[name]
    actual = recorded([x], [*QUANTILES])
    assert_close(x, actual)
    assert recorded([part for part in x.split(777)], [*QUANTILES]) == actual
    if name in ("constant", "one element", "zeros"):
        assert {*actual.values()} == {float(x[0])}


@settings(deadline=None, max_examples=80)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=300))
def test_quantiles_of_any_elements(values: list[float]) -> None:
    """Found examples, subnormal numbers and zeros among them."""
    x = torch.tensor(values)
    assert_close(x, recorded([x], [*QUANTILES]))


def test_nan_has_no_place_in_the_order() -> None:
    """With NaN among the elements, or without elements, there is no quantile."""
    for x in (torch.tensor([1.0, math.nan, 3.0]), torch.empty(0)):
        assert all(map(math.isnan, recorded([x], [*QUANTILES]).values()))


def test_peak_to_rms() -> None:
    """1 for a constant magnitude, sqrt(n) for a single peak; a non-finite element makes it NaN."""
    assert recorded([torch.tensor([2.0, -2.0, 2.0])], ["peak_to_rms"])["peak_to_rms"] == pytest.approx(1.0)
    assert recorded([torch.zeros(99), torch.tensor([-1e30])], ["peak_to_rms"])["peak_to_rms"] == pytest.approx(10.0)
    assert math.isnan(recorded([torch.tensor([1.0, math.inf])], ["peak_to_rms"])["peak_to_rms"])
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double()
    assert recorded([x], ["peak_to_rms"])["peak_to_rms"] == pytest.approx(float(x.abs().max() / x.square().mean().sqrt()))
