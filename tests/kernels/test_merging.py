"""Moments merge exactly: any split of the elements, in any order, is the whole."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.kernels import (
    EXACT,
    Implementation,
    assert_measured,
    assert_textbook,
    finished,
    measured,
    merge,
    over_dtypes,
    over_exact_ones,
    over_implementations,
)
from helpers.textbook import PLAIN, slack, textbook
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_module_monitor.kernels.moments import Moments, Need

WITHOUT_TOKENS = [name for name in PLAIN if not name.startswith("token")]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of the standard normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same_statistics(moments: Moments, other: Moments, whole: Tensor, rtol: float) -> None:
    """Two ways to the moments of a tensor finish into the same numbers."""
    for name in PLAIN:
        value = finished(name, moments)
        assert value == pytest.approx(finished(name, other), rel=rtol, abs=rtol * slack(name, whole), nan_ok=True), name


@over_dtypes
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_parts_of_any_size_are_the_whole(implementation: Implementation, dtype: torch.dtype, scale: float) -> None:
    """Small and large calls of one site, among them single tokens."""
    sizes = [3, 40, 1, 513, 3, 9000]
    assert_measured(implementation, [(normal(size, 8, seed=size) * (1 + size % 7) * scale).to(dtype) for size in sizes])


@over_exact_ones
def test_parts_with_large_means_of_their_own(implementation: Implementation) -> None:
    """What the distance of the means adds to the spread is right beside what the parts have."""
    parts = [normal(3000, 4, seed=seed) * 10.0 ** (seed % 3) + 1e3 * seed for seed in range(6)]
    assert_measured(implementation, parts, 1e-11)


any_finite = st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, -0.0, 1e30, -1e30, 1e-30])


@over_implementations
@settings(max_examples=60, deadline=None)
@given(values=st.lists(any_finite, min_size=2, max_size=60), cuts=st.lists(st.integers(0, 60), max_size=4), data=st.data())
def test_moments_of_any_split_merge_to_the_moments_of_the_whole(
    implementation: Implementation, values: list[float], cuts: list[int], data: st.DataObject
) -> None:
    """Any cut, any order; added to one row, or merged from rows of their own."""
    x = torch.tensor(values)
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts: list[Tensor] = [x[start:end] for start, end in itertools.pairwise(bounds) if end > start]
    parts = data.draw(st.permutations(parts))
    added = measured(implementation, parts)
    rows = merge(*(measured(implementation, [part]) for part in parts))
    largest = float(x.double().abs().max())
    rtol = max(implementation.rtol, 1e-9)
    for name in WITHOUT_TOKENS:  # here every part is one token
        # What rounding leaves of a spread is in proportion to the largest element; what is divided by it has no such bound.
        if name in ("skewness", "kurtosis") and not textbook("std", x) > 1e-3 * largest:
            continue
        atol = {"var": largest**2, "zero_fraction": 0.0, "nonfinite_count": 0.0}.get(name, largest) * rtol
        atol = rtol * slack(name, x) * 10 if name in ("skewness", "kurtosis") else atol
        for actual in (added, rows):
            is_undefined = name == "peak_to_rms" and largest == 0
            assert finished(name, actual) == pytest.approx(textbook(name, x), rel=rtol, abs=atol, nan_ok=is_undefined), name


@over_implementations
def test_merging_is_associative_and_commutative_and_has_an_identity(implementation: Implementation) -> None:
    """Row by row, in pairs, backwards, or all at once; with empty rows between."""
    parts = [normal(5 + 40 * seed, 4, seed=seed) * 3**seed + 10 * seed for seed in range(5)]
    whole = torch.cat(parts)
    rows = [measured(implementation, [part]) for part in parts]
    nothing = Moments.empty(1)
    at_once = merge(*rows)
    assert_textbook(at_once, whole, implementation.rtol)
    a, b, c, d, e = rows
    for actual in (
        merge(merge(merge(merge(a, b), c), d), e),
        merge(a, merge(b, merge(c, merge(d, e)))),
        merge(merge(a, b), merge(c, d), e),
        merge(*reversed(rows)),
        merge(nothing, a, nothing, b, c, nothing, d, e),
    ):
        assert_same_statistics(actual, at_once, whole, 1e-11)
    for row in rows:
        for merged_with_nothing in (merge(row, nothing), merge(nothing, row), merge(nothing, row, nothing)):
            assert all(torch.equal(*pair) for pair in zip(merged_with_nothing, row, strict=True))


@over_implementations
def test_what_is_not_finite_survives_merging(implementation: Implementation) -> None:
    """In a row or from one to another, from either side."""
    good = measured(implementation, [normal(10)])
    for bad in (math.nan, math.inf, -math.inf):
        spoiled = measured(implementation, [torch.tensor([1.0, bad])])
        for actual in (merge(good, spoiled), merge(spoiled, good), merge(good, Moments.empty(1), spoiled)):
            assert finished("nonfinite_count", actual) == 1
            for name in ("mean", "std", "skewness", "kurtosis", "norm", "abs_mean", "abs_max", "token_norm"):
                assert not math.isfinite(finished(name, actual)), name


def test_about_a_center_and_back() -> None:
    """Sums about a center add up; of the added ones the moments are those of the whole."""
    implementation = EXACT["torch"]
    parts = [normal(40, 5, seed=seed).double() * (seed + 1) + 3 * seed for seed in range(3)]
    center = torch.tensor([2.5], dtype=torch.float64)
    rows = [measured(implementation, [part]).about(center) for part in parts]
    added = Moments(*(torch.stack(fields).sum(0) for fields in zip(*rows, strict=True)))
    actual, whole = added.about_mean(center), torch.cat(parts)
    assert_textbook(actual, whole, 1e-11, ["mean", "std", "var", "skewness", "kurtosis", "norm"])
    nothing = Moments.empty(1)
    back = nothing.about(center).about_mean(center)
    assert all(float(getattr(back, name)) == 0 for name in ("deviations", "third", "fourth", "squares", "elements"))


@over_implementations
@pytest.mark.parametrize("needs", [Need.MEAN, Need.DEVIATIONS, Need.SQUARES, Need.EXTREMES, Need.EXTREMES | Need.ZEROS, Need.TOKENS])
def test_what_is_not_needed_costs_nothing_its_value(implementation: Implementation, needs: int) -> None:
    """The number of elements is there whatever is needed, and what is needed merges by it."""
    parts = [normal(30, 4, seed=seed) + seed for seed in range(4)]
    moments = merge(*(measured(implementation, [part], needs) for part in parts), measured(implementation, parts, needs))
    whole = torch.cat([*parts, *parts])
    names = {
        Need.MEAN: ["mean"],
        Need.DEVIATIONS: ["std"],
        Need.SQUARES: ["rms"],
        Need.EXTREMES: ["abs_max"],
        Need.EXTREMES | Need.ZEROS: ["zero_fraction", "min"],
        Need.TOKENS: ["token_rms"],
    }[needs]
    assert moments.elements.tolist() == [whole.numel()]
    assert_textbook(moments, whole, implementation.rtol, names)
