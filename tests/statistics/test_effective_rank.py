"""Effective ranks from Gram matrices against an SVD in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.operations import no_host_reads
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lightning_module_monitor.kernels import torch_kernel
from lightning_module_monitor.record import is_undefined
from lightning_module_monitor.statistics import effective_rank as module
from lightning_module_monitor.statistics.effective_rank import (
    GramSums,
    effective_rank,
    gram_sums,
    gram_sums_of_matrix,
    singular_values,
    stable_rank,
)

GENERATOR = torch.Generator()
CLOSE = 1e-2
"""The tolerance of effective ranks."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test has the same matrices, whichever run before it."""
    GENERATOR.manual_seed(5)


def normal(*shape: int) -> Tensor:
    """Random elements."""
    return torch.randn(shape, generator=GENERATOR)


def with_values(values: Tensor, size: int) -> Tensor:
    """A random square matrix with these singular values, float64."""
    left, right = (torch.linalg.qr(normal(size, size).double())[0][:, : len(values)] for _side in range(2))
    return (left * values.double()) @ right.T


def ranks_of(values: NDArray[np.float64]) -> tuple[float, float]:
    """The formulas, written out."""
    shares = [float(value) / float(values.sum()) for value in values]
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    return math.exp(entropy), float((values**2).sum() / values.max() ** 2)


def ranks_from(sums: GramSums, *, is_centred: bool = False) -> tuple[float, float]:
    """Effective and stable rank as they are finished on the host."""
    values = singular_values(sums.products.numpy(), sums.totals.numpy() if is_centred else None, sums.num_rows)
    return effective_rank(values), stable_rank(values)


SAMPLES: dict[str, Callable[[], Tensor]] = {
    "tall": lambda: normal(300, 70),
    "wide": lambda: normal(70, 300),
    "one row": lambda: normal(1, 300),
    "one column": lambda: normal(300, 1),
    "rank one": lambda: torch.outer(normal(600), normal(400)),
    "rank one, many features": lambda: torch.outer(normal(1500), normal(1024)),
    "rank one, bfloat16": lambda: torch.outer(normal(60), normal(40)).bfloat16(),
    "rank three": lambda: normal(300, 3) @ normal(3, 200),
    "equal elements": lambda: torch.full((300, 200), 0.3),
    "identity": lambda: torch.eye(200),
    "geometric": lambda: with_values(0.9 ** torch.arange(200), 200),
    "power law": lambda: with_values(1 / torch.arange(1, 301), 300),
    "small values that count": lambda: with_values(torch.tensor([1.0] + [1e-5] * 511), 512),
    "values at the level of rounding": lambda: with_values(torch.tensor([1.0] + [5e-8] * 511), 512),
    "float16": lambda: normal(300, 200).half(),
    "huge": lambda: normal(300, 200) * 1e30,
    "tiny": lambda: normal(300, 200) * 1e-30,
    "columns over orders": lambda: normal(300, 200) * torch.logspace(-6, 6, 200),
    "a large mean": lambda: normal(600, 200) + 100,
    "rank one about a large mean": lambda: torch.outer(normal(600).double(), normal(200).double()) + 1000 * normal(200).double(),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_ranks_are_those_of_an_svd(name: str) -> None:
    """Also those of centred features."""
    matrix = SAMPLES[name]()
    expected = ranks_of(torch.linalg.svdvals(matrix.double()).numpy())
    assert ranks_from(gram_sums_of_matrix(matrix)) == pytest.approx(expected, rel=CLOSE)
    if matrix.shape[1] > 1 and name != "equal elements" and len(matrix) > 1:
        centred = matrix.double() - matrix.double().mean(0)
        expected = ranks_of(torch.linalg.svdvals(centred).numpy())
        assert ranks_from(gram_sums(matrix), is_centred=True) == pytest.approx(expected, rel=CLOSE)


def test_a_rank_of_one_is_one() -> None:
    """Rounding errors of a thousand zeros would add to it: in float32 it would be 1.27."""
    for sums, is_centred in (
        (gram_sums(SAMPLES["rank one, many features"]()), False),
        (gram_sums(SAMPLES["rank one about a large mean"]()), True),
    ):
        assert ranks_from(sums, is_centred=is_centred) == pytest.approx((1.0, 1.0), rel=1e-6)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 90), st.integers(1, 60), st.integers(0, 2**31), st.floats(-30, 30), st.lists(st.integers(1, 30), max_size=6))
def test_sums_of_parts_are_those_of_the_whole(rows: int, columns: int, seed: int, exponent: float, sizes: list[int]) -> None:
    """Whatever the parts, also in more dimensions; the ranks are those of an SVD."""
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10**exponent + 10**exponent
    whole = gram_sums(matrix)
    parts, start = [], 0
    for size in [*sizes, rows]:
        parts.append(gram_sums(matrix[start : start + size].unsqueeze(1)))
        start += size
    merged = functools.reduce(GramSums.plus, parts)
    assert merged.num_rows == whole.num_rows == rows
    torch.testing.assert_close(merged.products, whole.products, rtol=1e-13, atol=1e-13 * float(whole.products.abs().max()))
    torch.testing.assert_close(merged.totals, whole.totals, rtol=1e-13, atol=1e-13 * float(whole.totals.abs().max()))
    assert ranks_from(merged) == pytest.approx(ranks_of(torch.linalg.svdvals(matrix.double()).numpy()), rel=CLOSE)


@pytest.mark.parametrize("portion", [1, 1000])
def test_a_tensor_is_widened_in_portions(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are the same, without a host read."""
    rows = normal(7, 11, 20)
    expected = rows.flatten(0, 1).double().T @ rows.flatten(0, 1).double()
    monkeypatch.setattr(module, "CPU_PORTION", portion)
    with no_host_reads():
        sums = gram_sums(rows)
    torch.testing.assert_close(sums.products, expected)
    torch.testing.assert_close(sums.totals, rows.double().sum((0, 1)))
    assert sums.num_rows == 77


def test_a_device_without_float64_sums_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64."""
    monkeypatch.setattr(torch_kernel, "WITH_FLOAT64", frozenset())
    copied: list[Tensor] = []
    copy = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: (copied.append(tensor), copy(tensor))[1])
    sums = gram_sums(normal(30, 20))
    assert [tensor.shape for tensor in copied] == [(30, 20)]
    assert sums.products.dtype is torch.float64


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_ranks_of_elements_that_are_not_finite_are_nan(bad: float) -> None:
    """A NaN that is not that of an undefined rank."""
    matrix = normal(30, 20)
    matrix[3, 4] = bad
    for rank in (*ranks_from(gram_sums(matrix)), *ranks_from(gram_sums(matrix), is_centred=True)):
        assert math.isnan(rank)
        assert not is_undefined(rank)


def test_ranks_of_zeros_are_undefined() -> None:
    """Zero over zero; centred also of equal rows, and without rows or features."""
    for sums, is_centred in (
        (gram_sums(torch.zeros(5, 4)), False),
        (gram_sums(normal(4).expand(7, 4)), True),
        (gram_sums(torch.zeros(0, 4)), True),
        (gram_sums(torch.zeros(3, 0)), False),
    ):
        assert all(map(is_undefined, ranks_from(sums, is_centred=is_centred)))


def test_too_many_features_are_refused() -> None:
    """The error names their number. Of a matrix the smaller side counts; the limit can be raised, and not without end."""
    assert len(gram_sums_of_matrix(normal(4, 2000)).totals) == 4
    assert len(gram_sums(normal(4, 1030), 1030).totals) == 1030
    with pytest.raises(ValueError, match="it has 1025 features; expected at most max_features=1024"):
        gram_sums(normal(4, 1025))
    with pytest.raises(ValueError, match="it has 40 features; expected at most max_features=30"):
        gram_sums_of_matrix(normal(40, 50), 30)
    with pytest.raises(ValueError, match="max_features is 5000; expected 1 to 4096"):
        gram_sums(normal(4, 4), 5000)
