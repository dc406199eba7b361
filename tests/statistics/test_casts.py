"""What a cast to another format would lose: equal to the limits of the format, and to torch's cast."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.casts import LIMITS, adversaries, recorded
from helpers.kernels import without_numba
from torch import Tensor

from lightning_module_monitor.record import is_undefined

NAMES = [f"{loss}_{name}" for loss in ("underflow", "overflow", "scaled_underflow") for name in LIMITS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def samples(dtype: torch.dtype) -> dict[str, Tensor]:
    """Finite tensors at the limits and far from them."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(5000, generator=generator, dtype=torch.float64) * 10 ** (12 * torch.randn(5000, generator=generator))
    hard = adversaries(dtype)
    # A cast of torch rounds a float64 twice, by way of float32.
    hard = hard[hard.isfinite() & (hard == hard.float().to(dtype))]
    tensors = {
        "adversaries": hard,
        "normal": torch.randn(5000, generator=generator).to(dtype),
        "wide": wide.float().to(dtype),
        "powers of two": (2.0 ** torch.arange(-149, 128).double()).to(dtype).repeat(3)
        * torch.tensor([1.0, -1.0, 1.0]).repeat(277).to(dtype),
        "tiny": (1e-45 * torch.arange(1, 3000).double()).float().to(dtype),
        "one": torch.tensor([3.0]).to(dtype),
    }
    return {name: x[x.isfinite()] for name, x in tensors.items()}


SAMPLES = [pytest.param(x, id=f"{name}, {dtype}") for dtype in DTYPES for name, x in samples(dtype).items()]


def lost(x: Tensor, name: str) -> tuple[float, float]:
    """What torch's cast makes zero, as a part of what is not zero; and what it makes infinite or NaN, or the largest number instead."""
    cast = x.float().to(getattr(torch, name)).float()
    largest = LIMITS[name][3]
    # A cast that saturates gives the largest number: it is beyond if nothing smaller than halfway to the next is.
    beyond = ~cast.isfinite() | ((cast.abs() == largest) & (x.abs().double() > (464.0 if name == "float8_e4m3fn" else math.inf)))
    nonzero = x != 0
    underflow = (nonzero & (cast == 0)).sum() / nonzero.sum() if nonzero.any() else torch.tensor(math.nan)
    return float(underflow.double()), float(beyond.double().mean())


@pytest.mark.parametrize("x", SAMPLES)
def test_underflow_and_overflow_are_those_of_the_cast(x: Tensor) -> None:
    """For every format: ties round to zero, and 65520 is the first number that float16 does not hold."""
    actual = recorded([x], NAMES)
    for name in LIMITS:
        underflow, overflow = lost(x, name)
        np.testing.assert_allclose(actual[f"underflow_{name}"], underflow, rtol=1e-6)
        np.testing.assert_allclose(actual[f"overflow_{name}"], overflow, rtol=1e-6)


@pytest.mark.parametrize("x", SAMPLES)
def test_the_limits_of_every_format(x: Tensor) -> None:
    """The counts are those of comparisons with the limits, to the last element."""
    a = np.abs(x.double().numpy())
    nonzero = np.count_nonzero(a)
    actual = recorded([x], NAMES)
    for name, (least, beyond, is_beyond, largest) in LIMITS.items():
        if nonzero:
            assert actual[f"underflow_{name}"] == ((a > 0) & (a <= least)).sum() / nonzero, name
            power = math.floor(math.log2(largest) - math.log2(a.max())) + 2
            while np.ldexp(a.max(), power) > largest:
                power -= 1
            under = ((a > 0) & (np.ldexp(a, power) <= least)).sum() / nonzero
            assert actual[f"scaled_underflow_{name}"] == under, name
        assert actual[f"overflow_{name}"] == (a >= beyond if is_beyond else a > beyond).sum() / a.size, name


def test_float64_between_two_float32() -> None:
    """A float64 is compared as it is, and not rounded to float32 before."""
    for least, beyond, is_beyond, name in ((*limits[:3], name) for name, limits in LIMITS.items()):
        for limit, is_lost in ((least, True), (beyond, is_beyond)):
            below, above = np.nextafter(limit, 0), np.nextafter(limit, np.inf)
            x = torch.tensor([below, limit, above, 1.0], dtype=torch.float64)
            actual = recorded([x], NAMES)
            lost = actual[f"underflow_{name}"] if limit == least else actual[f"overflow_{name}"]
            assert lost == (1 + is_lost) / 4, (name, limit)


def test_elements_that_are_not_finite_do_not_count() -> None:
    """Parts are of finite elements; where there are none they are NaN, and so is what depends on the largest magnitude."""
    x = torch.tensor([1e-30, 1.0, 1e5, 0.0, math.inf, -math.inf, math.nan])
    actual = recorded([x], [*NAMES, "dynamic_range"])
    assert actual["underflow_float16"] == 1 / 3
    assert actual["overflow_float16"] == 1 / 4
    assert math.isnan(actual["scaled_underflow_float16"])
    assert math.isnan(actual["dynamic_range"])
    assert not is_undefined(actual["scaled_underflow_float16"])
    nothing = recorded([torch.tensor([math.nan, math.inf])], NAMES)
    assert all(math.isnan(value) and not is_undefined(value) for value in nothing.values())


def test_zeros_lose_nothing() -> None:
    """There is no part of no elements: the statistic is undefined, which no check takes for a fault."""
    actual = recorded([torch.zeros(5)], [*NAMES, "dynamic_range", "peak_to_rms"])
    assert all(is_undefined(value) == (not name.startswith("overflow")) for name, value in actual.items())
    assert actual["overflow_float16"] == 0.0


@pytest.mark.parametrize("has_numba", [True, False])
def test_scaling_brings_small_gradients_into_the_format(has_numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of 1e-9 are lost in float16, and fit with a factor; a range of 60 powers of two fits with none."""
    if not has_numba:
        without_numba(monkeypatch)
    small = 1e-9 * (1 + torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    actual = recorded([small], NAMES)
    assert (actual["underflow_float16"], actual["scaled_underflow_float16"], actual["underflow_bfloat16"]) == (1.0, 0.0, 0.0)
    actual = recorded([small, 1e9 * small, torch.zeros(3)], [*NAMES, "dynamic_range"])
    assert actual["scaled_underflow_float16"] == 0.0
    actual = recorded([small, 1e18 * small], [*NAMES, "dynamic_range"])
    assert actual["scaled_underflow_float16"] == 0.5
    assert actual["dynamic_range"] == pytest.approx(math.log2(1e18 * float(small.max()) / float(small.min())), abs=1e-6)


@pytest.mark.parametrize("x", SAMPLES)
def test_dynamic_range(x: Tensor) -> None:
    """The powers of two between the magnitudes: exact where all elements have one sign, else to within 0.065."""
    a = np.abs(x.double().numpy())
    expected = math.log2(a.max() / a[a > 0].min()) if a.any() else math.nan
    actual = recorded([x], ["dynamic_range"])["dynamic_range"]
    assert actual == pytest.approx(expected, abs=0.065, nan_ok=True)
    one_sign = torch.from_numpy(a[a > 0])
    if len(one_sign):
        assert recorded([one_sign], ["dynamic_range"])["dynamic_range"] == pytest.approx(expected, abs=1e-12)
