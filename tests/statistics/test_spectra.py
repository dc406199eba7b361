"""Largest singular values, spectral norms and stable ranks against an SVD in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from helpers.accelerator import as_accelerator
from helpers.operations import no_host_reads, operations
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_module_monitor.record import is_undefined
from lightning_module_monitor.statistics import spectra as module
from lightning_module_monitor.statistics.functions import Unfinished, Value
from lightning_module_monitor.statistics.precision import Difference
from lightning_module_monitor.statistics.spectra import (
    CONVERGED,
    NUM_STEPS,
    TOLERANCE,
    Spectra,
    as_matrices,
    bidiagonal,
    bidiagonals,
    spectra,
    spectral_norms,
)
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.step.accumulator import StepAccumulator

GENERATOR = torch.Generator()
ROUNDING = 1e-5
"""By how much a spectral norm may be too large, and too small where it has a gap to the next value."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test has the same matrices, whichever run before it."""
    GENERATOR.manual_seed(11)


def normal(*shape: int) -> Tensor:
    """Random elements."""
    return torch.randn(shape, generator=GENERATOR)


def with_values(values: Sequence[float] | Tensor, rows: int, columns: int, generator: torch.Generator = GENERATOR) -> Tensor:
    """A random matrix with these singular values, float64."""
    values = torch.as_tensor(values, dtype=torch.float64)
    sides = (torch.randn(size, len(values), dtype=torch.float64, generator=generator) for size in (rows, columns))
    left, right = (torch.linalg.qr(side)[0] for side in sides)
    return (left * values) @ right.T


def finished(matrices: Tensor, num_values: int = 5) -> Spectra:
    """Spectra as a step finishes them."""
    return spectra(bidiagonal(matrices).double().numpy(), num_values)


def without_ones(rows: int, columns: int) -> Tensor:
    """The leading direction is orthogonal to the vector of ones, to which the other directions are close."""
    direction = torch.cat([torch.ones(columns // 2), -torch.ones(columns // 2)]) / columns**0.5
    rest = torch.ones(rows, columns) + 0.1 * normal(rows, columns)
    rest -= torch.outer(rest @ direction, direction)
    return rest + torch.outer(3 * rows * normal(rows).sign(), direction)


SAMPLES: dict[str, Callable[[], Tensor]] = {
    "tall": lambda: normal(300, 70),
    "wide": lambda: normal(70, 300),
    "square": lambda: normal(200, 200),
    "large": lambda: normal(512, 512),
    "as many as steps": lambda: normal(50, 40),
    "fewer than steps": lambda: normal(9, 17),
    "one row": lambda: normal(1, 500),
    "one column": lambda: normal(500, 1),
    "one element": lambda: -normal(1, 1),
    "rank one": lambda: torch.outer(normal(300), normal(200)),
    "rank one, fewer than steps": lambda: torch.outer(normal(30), normal(20)),
    "rank three": lambda: normal(300, 3) @ normal(3, 200),
    "equal elements": lambda: torch.full((1000, 400), 0.3),
    "opposite elements": lambda: torch.tensor([1.0, -1.0]).repeat(150, 100),
    "identity": lambda: torch.eye(300),
    "orthogonal": lambda: with_values(torch.ones(200), 200, 200),
    "orthogonal, fewer than steps": lambda: with_values(torch.ones(30), 60, 30),
    "triple": lambda: with_values([1.0] * 3 + [0.5] * 97, 200, 100),
    "clustered": lambda: with_values([1.0, 0.999, 0.999] + [0.5] * 97, 200, 100),
    "flat below one": lambda: with_values([1.0] + [0.05] * 299, 300, 300),
    "geometric": lambda: with_values(0.9 ** torch.arange(200), 200, 200),
    "linear": lambda: with_values(torch.arange(1024, 0, -1) / 1024, 1024, 1024),
    "linear, half": lambda: with_values(torch.linspace(1, 0.5, 200), 200, 200),
    "without ones": lambda: without_ones(300, 200),
    "rows over ten orders": lambda: torch.logspace(-5, 5, 300).unsqueeze(1) * normal(300, 100),
    "rows and columns over orders": lambda: torch.logspace(-20, 0, 300).unsqueeze(1) * normal(300, 100) * torch.logspace(0, 4, 100),
    "an outlier": lambda: normal(300, 200).index_put((torch.tensor(7), torch.tensor(9)), torch.tensor(1e4)),
}


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SAMPLES)
def test_spectra_are_those_of_an_svd(name: str, dtype: torch.dtype, scale: float) -> None:
    """The norm within its tolerance and not too large, and the other values within their residuals."""
    matrix = (SAMPLES[name]().double() * scale).to(dtype)
    expected = torch.linalg.svdvals(matrix.double()).numpy()
    found = finished(matrix.unsqueeze(0), 7)
    missing = 1 - found.spectral_norm[0] / expected[0]
    has_gap = len(expected) == 1 or expected[1] < 0.99 * expected[0]
    assert -2 * ROUNDING < missing < (2 * ROUNDING if has_gap else TOLERANCE)
    assert found.stable_rank[0] == pytest.approx(float(((expected / expected[0]) ** 2).sum()), rel=2 * TOLERANCE)
    values, residuals = found.values[0], found.residuals[0]
    assert is_undefined(values).tolist() == sorted(is_undefined(values).tolist())
    for value, residual in zip(values[~is_undefined(values)], residuals, strict=False):
        assert residual <= CONVERGED * found.spectral_norm[0]
        # What is taken for rounding errors is below 1.3e-4 of the norm.
        assert np.abs(expected - value).min() <= residual + 2e-4 * expected[0]


@pytest.mark.parametrize(
    ("name", "num_expected"),
    [("rank three", 7), ("orthogonal", 7), ("triple", 3), ("geometric", 7), ("fewer than steps", 7), ("as many as steps", 7), ("tall", 3)],
)
def test_the_largest_values_are_found_in_order(name: str, num_expected: int) -> None:
    """Also where several are equal, or zero; those of a matrix with few rows or columns are all found."""
    matrix = SAMPLES[name]().double()
    expected = torch.linalg.svdvals(matrix).numpy()[:num_expected]
    found = finished(matrix.unsqueeze(0), 7).values[0, :num_expected]
    assert found == pytest.approx(expected, abs=1e-3 * expected[0])


def test_values_that_do_not_exist_or_have_not_converged_are_undefined() -> None:
    """A 3 x 2 matrix has two; of a linear spectrum of a thousand values the later ones have not converged, with residuals that show it."""
    few = finished(normal(1, 3, 2))
    assert is_undefined(few.values).tolist() == is_undefined(few.residuals).tolist() == [[False, False, True, True, True]]
    many = finished(SAMPLES["linear"]().float().unsqueeze(0), NUM_STEPS)
    assert is_undefined(many.values[0, 10:]).all()
    assert (many.residuals[0, 10:20] > CONVERGED).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(dtype: torch.dtype) -> None:
    """The elements are those of the half type; nothing else is rounded to it."""
    matrices = normal(3, 80, 120).to(dtype)
    expected = torch.linalg.svdvals(matrices.double())[:, 0].numpy()
    assert finished(matrices).spectral_norm == pytest.approx(expected, rel=ROUNDING)


SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 70))


@settings(deadline=None, max_examples=150)
@given(SHAPES, st.integers(0, 2**31), st.floats(-30, 30), st.floats(0, 12), st.booleans())
def test_norms_of_any_shape(shape: tuple[int, int], seed: int, exponent: float, decades: float, is_repeated: bool) -> None:
    """Found shapes, magnitudes, decays of the singular values, and values that occur several times."""
    generator = torch.Generator().manual_seed(seed)
    count = min(shape)
    values = 10 ** -(decades * torch.rand(count, dtype=torch.float64, generator=generator))
    if is_repeated:
        values = values[torch.randint(0, max(1, count // 3), (count,), generator=generator)]
    matrix = (with_values(values, *shape, generator=generator) * 10**exponent).float()
    expected = torch.linalg.svdvals(matrix.double()).numpy()
    found = finished(matrix.unsqueeze(0))
    assert 1 - TOLERANCE < found.spectral_norm[0] / expected[0] < 1 + ROUNDING
    assert found.stable_rank[0] == pytest.approx(float(((expected / expected[0]) ** 2).sum()), rel=2 * TOLERANCE)
    assert found.stable_rank[0] >= 1


def test_norms_of_spectra_that_are_made_to_miss_the_tolerance() -> None:
    """A value close to a dense spectrum: most start vectors keep the tolerance, and the others seven times that, as documented."""
    missing = []
    for gap, last in ((0.0, 0.0), (0.0, 0.5), (0.001, 0.0), (0.002, 0.0), (0.003, 0.0)):
        values = (1 - gap) * torch.linspace(1, last, 512)
        matrices = torch.stack([with_values(torch.cat([torch.ones(1), values[:-1]]), 512, 512) for _seed in range(8)])
        missing += (1 - finished(matrices.float()).spectral_norm).tolist()
    assert max(missing) < 7 * TOLERANCE
    assert min(missing) > -ROUNDING
    assert np.quantile(missing, 0.8) < TOLERANCE


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(60, 50), (3, 50), (1, 50)])
def test_an_element_that_is_not_finite_makes_its_own_matrix_nan(shape: tuple[int, int], bad: float) -> None:
    """And changes nothing in its neighbours. That NaN is not the one of an undefined figure."""
    matrices = normal(3, *shape)
    expected = finished(matrices[[0, 2]])
    matrices[1, -1, 4] = bad
    found = finished(matrices)
    residuals = found.residuals
    for figures, others in zip(found, expected, strict=True):
        assert np.isnan(figures[1]).all()
        if figures.ndim == 1:
            assert not is_undefined(figures[1])
        if figures is not residuals:  # some of which are rounding errors
            np.testing.assert_allclose(figures[[0, 2]], others, rtol=1e-5)
    assert np.isnan(spectral_norms(bidiagonal(matrices).double().numpy())).tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(2, 60, 50), (1, 3, 3), (2, 0, 3), (2, 3, 0), (0, 3, 3)])
def test_a_matrix_without_a_nonzero_element_has_the_norm_zero(shape: tuple[int, ...]) -> None:
    """Its stable rank is zero over zero: undefined."""
    found = finished(torch.zeros(shape))
    assert found.spectral_norm.tolist() == [0.0] * shape[0]
    assert is_undefined(found.stable_rank).all()
    assert (is_undefined(found.values) | (found.values == 0)).all()
    assert is_undefined(found.values).all() == (0 in shape)


def test_stable_rank_of_millions_of_elements_of_one_magnitude() -> None:
    """A sum of so many squares in float32 would lose a percent. Half of the rows are orthogonal to the others: the rank is 2."""
    matrix = torch.full((1, 4096, 1024), 0.3)
    matrix[:, 2048:, ::2] = -0.3
    matrix[0, 0, 0] = 1.0  # by which they are divided: ones would be summed exactly
    found = finished(matrix)
    assert found.stable_rank[0] == pytest.approx(2.0, rel=2e-4)
    assert found.spectral_norm[0] == pytest.approx(0.3 * (2048 * 1024) ** 0.5, rel=1e-4)


def test_matrices_of_one_shape_share_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with those that are their transposes, up to a limit of memory; the figures are those of each alone."""
    weights = {name: normal(2, 50, 60) for name in ("a", "b")} | {"transposed": normal(1, 60, 50), "other": normal(1, 50, 61)}
    weights |= {"half": normal(1, 50, 60).half(), "empty": torch.ones(0, 50, 60)}
    differences = {name: Difference(weight, 0.5 * weight.flip(1)) for name, weight in weights.items()}
    batches = bidiagonals(differences)
    assert [owners for owners, _numbers in batches] == [["a", "a", "b", "b", "transposed"], ["other"], ["half"]]
    monkeypatch.setattr(module, "CPU_ELEMENTS", 3 * 50 * 60)
    limited = bidiagonals(differences)
    assert [owners for owners, _numbers in limited] == [["a", "a"], ["b", "b", "transposed"], ["other"], ["half"]]
    for parts in (batches, limited):
        found: dict[str, list[float]] = {}
        for owners, numbers in parts:
            for owner, norm in zip(owners, spectral_norms(numbers.double().numpy()).tolist(), strict=True):
                found.setdefault(owner, []).append(norm)
        for name, norms in found.items():
            expected = torch.linalg.svdvals(differences[name].computed().double())[:, 0]
            assert norms == pytest.approx(expected.tolist(), rel=ROUNDING), name


def test_the_number_of_operations_does_not_depend_on_the_number_of_matrices() -> None:
    """Each step has ten operations for each side, besides views; no value is read on the host, and no tensor has to be real."""
    called = []
    for groups in (1, 6):
        with operations() as found:
            bidiagonal(normal(groups, 60, 50))
        called.append(found.names)
    views = {"slice", "select", "transpose", "split", "unfold", "expand"}
    assert called[0] == called[1]
    assert len([name for name in called[0] if name not in views]) <= 20 * NUM_STEPS + 30
    with no_host_reads():
        bidiagonals({"weight": Difference(normal(2, 60, 50))})
    with FakeTensorMode() as mode:
        (((owner,), numbers),) = bidiagonals({"weight": Difference(mode.from_tensor(normal(1, 60, 50)))})
    assert (owner, numbers.shape) == ("weight", (1, 2 * NUM_STEPS + 2))


def test_unfinished_results_are_finished_together_after_one_transfer() -> None:
    """Beside finished ones of the same key, with which they are joined."""
    stream = Stream("own", "site", {name: Value(name) for name in ("mean", "max")})
    received: list[list[NDArray[np.float64]]] = []

    def finish(arrays: Sequence[NDArray[np.float64]]) -> list[float]:
        received.append([*arrays])
        return [float(array.sum()) for array in arrays]

    accumulator = StepAccumulator(pytest.fail)  # type: ignore[arg-type]
    accumulator.add_result(stream, "mean", 5.0, 1)
    for name, numbers in (("mean", torch.ones(2, 3)), ("max", torch.full((4,), 2.0).double()), ("max", torch.tensor(7.5))):
        accumulator.add_result(stream, name, Unfinished(numbers, finish), 3)
    with as_accelerator() as transfers:
        values = accumulator.collect().values
    assert len(transfers) == 1
    assert [[array.shape for array in arrays] for arrays in received] == [[(2, 3), (4,), ()]]
    assert values == {"own/site/mean": (5.0 + 3 * 6.0) / 4, "own/site/max": 8.0}


def test_the_program_is_as_it_was() -> None:
    """The random state, the precision of products, the weight and its graph; a weight of a default device elsewhere."""
    weight = nn.Parameter(normal(1, 60, 50))
    before = weight.detach().clone()
    state = torch.get_rng_state()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.device("meta"), torch.autocast("cpu"):
            numbers = bidiagonal(weight)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weight, before)
    assert not numbers.requires_grad
    assert spectral_norms(numbers.double().numpy()) == pytest.approx(torch.linalg.svdvals(before.double())[:, 0].numpy(), rel=ROUNDING)


def test_products_are_not_computed_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the program allows, when the products are computed it does not."""
    allowed = []
    computed = module._bidiagonal
    monkeypatch.setattr(module, "_bidiagonal", lambda matrices: (allowed.append(precisions()), computed(matrices))[1])

    def precisions() -> list[object]:
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            return [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]  # type: ignore[attr-defined]
        return [torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()]

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    during = precisions()
    try:
        bidiagonal(normal(1, 5, 4))
        assert precisions() == during
    finally:
        torch.set_float32_matmul_precision(before)
    assert allowed in ([["ieee", "ieee"]], [[False, "highest"]])


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(5, 3), (1, 3, 5)),
    "convolution": (nn.Conv2d(4, 6, (3, 2)), (1, 6, 24)),
    "convolution in groups": (nn.Conv1d(4, 6, 3, groups=2), (2, 3, 6)),
    "depthwise convolution": (nn.Conv2d(4, 4, 3, groups=4), (4, 1, 9)),
    "transposed convolution": (nn.ConvTranspose2d(4, 6, (3, 2)), (1, 6, 24)),
    "transposed convolution in groups": (nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 3, 6)),
    "bilinear": (nn.Bilinear(3, 4, 5), (1, 5, 12)),
    "norm": (nn.LayerNorm(7), (1, 1, 7)),
    "norm of two dimensions": (nn.LayerNorm((7, 2)), (1, 7, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_weights_as_matrices(name: str) -> None:
    """Each row has the weights of one output feature: with the others at zero, only that feature depends on the input."""
    layer, shape = LAYERS[name]
    weight = layer.weight.detach()
    assert isinstance(weight, Tensor)
    matrices = as_matrices(weight, getattr(layer, "groups", 1), is_transposed=getattr(layer, "transposed", False))
    assert matrices.shape == shape
    assert sorted(matrices.flatten().tolist()) == sorted(weight.flatten().tolist())
    if "convolution" in name:
        # An impulse in each input channel, far from the border: the responses of an output feature are its weights.
        num_inputs, sizes = 4, [9] * (weight.dim() - 2)
        impulses = torch.zeros(num_inputs, num_inputs, *sizes)
        impulses[(torch.arange(num_inputs), torch.arange(num_inputs), *[torch.tensor(4)] * len(sizes))] = 1.0
        responses = (layer(impulses) - layer(torch.zeros_like(impulses))).detach()
        expected = responses.square().sum((0, *range(2, responses.dim())))
        torch.testing.assert_close(matrices.square().sum(2).flatten(), expected)


def test_vectors_and_numbers_are_one_row() -> None:
    """Their norm is the spectral norm, and the rank is 1. Groups do not part them, nor a matrix."""
    assert as_matrices(torch.tensor(-3.0), 2).shape == (1, 1, 1)
    vector = normal(10)
    assert as_matrices(vector, 2).shape == (1, 1, 10)
    found = finished(as_matrices(vector))
    assert found.spectral_norm[0] == pytest.approx(float(vector.norm()), rel=1e-6)
    assert found.stable_rank[0] == 1
    in_proj_weight = nn.MultiheadAttention(4, 2).in_proj_weight
    assert as_matrices(in_proj_weight, 3).shape == (1, 12, 4)
    with pytest.raises(ValueError, match="its first dimension is 6; expected a multiple of its 4 groups"):
        as_matrices(normal(6, 2, 3), 4)
