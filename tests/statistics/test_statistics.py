"""Every built-in statistic equals its textbook formula in float64, over all elements, whatever the magnitudes and the split."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers.textbook import PLAIN, textbook
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_module_monitor import STATISTICS, Statistic
from lightning_module_monitor.statistics import running
from lightning_module_monitor.statistics.lanes import CPU_BLOCK_ELEMENTS, PIECE_ELEMENTS, piecing
from lightning_module_monitor.statistics.moments import HostMoments, Moments, Need
from lightning_module_monitor.statistics.rows import nan_where_empty
from lightning_module_monitor.statistics.table import Table, to_host


@pytest.fixture(scope="module", autouse=True, params=["compiled", "eager"])
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here is true with the compiled kernel, and without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "compiled":
            assert running.kernel() is not None, "numba is missing; pip install 'lightning-module-monitor[fast]'"
        else:
            patch.setattr(running, "kernel", lambda: None)
        yield


def measured(tensors: list[Tensor], needs: int = Need.EVERYTHING, together: bool = False) -> Moments:
    """Moments of one row that all the tensors were added to."""
    table = Table()
    if together:
        table.add_all((0, tensor, needs) for tensor in tensors)
    else:
        for tensor in tensors:
            table.add(0, tensor, needs)
    return collected(table, 1)


def collected(table: Table, num_rows: int) -> Moments:
    """What statistics are finished from."""
    shares, _scalars = to_host(table.collect(num_rows), [])
    return Moments(*shares[0])


def finish(name: str, moments: Moments) -> float:
    """A statistic of the first row."""
    statistic = STATISTICS[name]
    assert isinstance(statistic, Statistic)
    with np.errstate(all="ignore"):
        return float(statistic.finish(HostMoments(*nan_where_empty(torch.stack(moments).numpy())))[0])


def assert_statistics_equal(tensors: list[Tensor], rtol: float = 1e-6, together: bool = False) -> None:
    """All statistics of all elements, against the textbook; the mean within a part of the magnitudes that it is a sum of."""
    whole = torch.cat([tensor.double().reshape(-1, tensor.shape[-1]) for tensor in tensors])
    for name in PLAIN:
        statistic = STATISTICS[name]
        assert isinstance(statistic, Statistic)
        # On its own, and with everything else: what others need must not change it.
        for needs in (statistic.needs, Need.EVERYTHING):
            value = finish(name, measured(tensors, needs, together))
            expected = textbook(name, whole)
            atol = rtol * textbook("abs_mean", whole) if name == "mean" else 0.0
            assert value == pytest.approx(expected, rel=rtol, abs=atol), f"{name} with needs {needs:b}"


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of the standard normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7,), (4, 8), (2, 3, 8), (64, 128), (100, 331), (5, 9000), (37, 8191)], ids=str)
def test_statistics_of_every_dtype_and_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Odd sizes leave a rest piece, large ones fill several lanes; half precision is accumulated in float32."""
    x = normal(*shape).to(dtype)
    x.view(-1)[:: max(2, x.numel() // 5)] = 0
    if x.numel() == 1:
        x += 2  # a single element has no variance
        assert math.isnan(finish("std", measured([x])))
        assert finish("norm", measured([x])) == float(x.double().norm())
        return
    assert_statistics_equal([x])


@pytest.mark.parametrize(
    ("scale", "shift"),
    [(1.0, 1000.0), (1.0, 1e6), (1e30, 0.0), (1e-30, 0.0), (1e30, 1e33), (1e-42, 0.0), (3e37, 1e37), (1e-3, -1.0)],
)
@pytest.mark.parametrize("size", [300, 20_000])
def test_large_means_and_extreme_magnitudes_in_float32(scale: float, shift: float, size: int) -> None:
    """Squares leave float32, and a mean hides the spread: both come out right."""
    x = (normal(size, 3).double() * scale + shift).float()
    assert bool(x.isfinite().all())
    assert_statistics_equal([x])


@pytest.mark.parametrize(("dtype", "top"), [(torch.float16, 60_000.0), (torch.bfloat16, 3e38)], ids=str)
def test_half_precision_up_to_its_largest_values(dtype: torch.dtype, top: float) -> None:
    """Norm and squares leave half precision long before the values do."""
    x = (torch.rand((50, 200), generator=torch.Generator().manual_seed(1)).double() * top).to(dtype)
    assert_statistics_equal([x])


def test_magnitudes_thirty_orders_apart_in_one_tensor() -> None:
    """What is lost beside the largest element is below its own rounding."""
    x = normal(9000)
    x[17] = 1e30
    x[18] = 1e-30
    assert_statistics_equal([x.view(-1, 1)])


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
@pytest.mark.parametrize("size", [3, PIECE_ELEMENTS + 1])
def test_the_norm_of_what_is_infinite_is_infinite(bad: float, size: int) -> None:
    """Whatever else is asked for: it is where a user looks for an overflow."""
    x = normal(size)
    x[size // 2] = bad
    for needs in (Need.SQUARES, Need.SQUARES | Need.MEAN, Need.SQUARES | Need.DEVIATIONS, Need.SQUARES | Need.MAGNITUDE, Need.EVERYTHING):
        assert finish("norm", measured([x], needs)) == math.inf
        assert finish("rms", measured([x], needs)) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [10, PIECE_ELEMENTS + 1])
def test_nonfinite_elements_are_counted_and_never_hidden(bad: float, size: int) -> None:
    """One bad element makes all that it enters non-finite; the counts stay exact."""
    x = normal(size)
    x[3] = bad
    x[5] = 0
    moments = measured([x])
    assert finish("nonfinite_count", moments) == 1
    assert finish("zero_fraction", moments) == 1 / size
    for name in ("mean", "std", "norm", "rms", "abs_mean", "abs_max", "token_norm"):
        assert not math.isfinite(finish(name, moments)), name
    untouched = {math.nan: [], math.inf: ["min"], -math.inf: ["max"]}[bad]
    for name in ("min", "max"):
        assert math.isfinite(finish(name, moments)) == (name in untouched), name


def test_an_empty_tensor_changes_nothing_and_alone_has_no_mean() -> None:
    """The identity of merging: a norm of 0, no mean, no extremes."""
    x = normal(4, 5)
    for with_empty, without in zip(measured([torch.empty(0, 5), x]), measured([x]), strict=True):
        assert torch.equal(with_empty, without)
    nothing = Moments.of_nothing(1)
    assert finish("norm", nothing) == 0.0
    assert finish("nonfinite_count", nothing) == 0.0
    for name in ("mean", "std", "rms", "min", "max", "abs_mean", "abs_max", "zero_fraction", "token_norm"):
        assert math.isnan(finish(name, nothing)), name


def test_micro_batches_of_three_and_five_are_their_concatenation() -> None:
    """No mean of means: the known wrong answer elsewhere is 0.143 for 0.107."""
    three, five = torch.tensor([[0.0], [0.0], [3 / 7]]), torch.tensor([[0.0], [0.0], [0.0], [0.0], [3 / 7]])
    assert finish("mean", measured([three, five])) == pytest.approx(6 / 7 / 8, rel=1e-7)
    assert finish("min", measured([torch.tensor([-1.0]), torch.tensor([-100.0])])) == -100.0


@pytest.mark.parametrize("together", [False, True])
def test_many_tensors_of_one_row(together: bool) -> None:
    """Gathered by one operation or added one by one, small, large and with a rest."""
    tensors = [normal(3, 8, seed=1), normal(40, 8, seed=2), normal(PIECE_ELEMENTS // 8 + 1, 8, seed=3), normal(3, 8, seed=4)]
    tensors += [normal(CPU_BLOCK_ELEMENTS // 4, 8, seed=5)]
    assert_statistics_equal(tensors, together=together)


def test_rows_do_not_mix() -> None:
    """Tensors of many rows share lanes; each row is that of its own tensors."""
    tensors = [normal(20, 16, seed=seed) * (seed + 1) for seed in range(40)]
    for fill in ("one by one", "together"):
        table = Table()
        if fill == "together":
            table.add_all((row % 30, tensor, Need.EVERYTHING) for row, tensor in enumerate(tensors))
        else:
            for row, tensor in enumerate(tensors):
                table.add(row % 30, tensor, Need.EVERYTHING)
        moments = collected(table, 30)
        for row in range(30):
            mine = torch.cat([tensor for at, tensor in enumerate(tensors) if at % 30 == row])
            assert float(moments.squares[row].sqrt()) == pytest.approx(float(mine.double().norm()), rel=1e-6)
            assert float(moments.maximum[row]) == float(mine.max())


def test_a_tensor_may_be_overwritten_after_it_was_added() -> None:
    """In-place layers do that; only a large tensor is measured where it lies, and at once."""
    for size in (100, CPU_BLOCK_ELEMENTS * 3):
        x = normal(size)
        expected = textbook("norm", x)
        table = Table()
        table.add(0, x, Need.SQUARES)
        x.zero_()
        assert finish("norm", collected(table, 1)) == pytest.approx(expected, rel=1e-6)


def test_memory_layout_does_not_matter() -> None:
    """Transposed, expanded, sliced and channels-last tensors are their elements."""
    base = normal(6, 8, 10, 12)
    for x in (base.transpose(1, 3), base[:, ::2], base.to(memory_format=torch.channels_last), base[:1].expand(6, 8, 10, 12)):
        assert_statistics_equal([x])


@given(num_tokens=st.integers(1, 40_000), features=st.integers(1, 20_000))
@settings(max_examples=300, deadline=None)
def test_pieces_cover_a_tensor_once_and_hold_whole_tokens(num_tokens: int, features: int) -> None:
    """No element is lost or counted twice, and no token is cut."""
    num_pieces, length, rest = piecing(num_tokens * features, features)
    assert num_pieces * length + rest == num_tokens * features
    assert length % features == rest % features == 0
    assert length <= max(PIECE_ELEMENTS, features)
    assert rest < length


finite_values = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=60)


@given(values=finite_values, dtype=st.sampled_from([torch.float32, torch.bfloat16]), data=st.data())
@settings(max_examples=200, deadline=None)
def test_moments_of_any_split_merge_to_the_moments_of_the_whole(values: list[float], dtype: torch.dtype, data: st.DataObject) -> None:
    """The algebra of merging: any cut, any order."""
    x = torch.tensor(values, dtype=dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    parts = [x[start:end] for start, end in zip([0, *cuts], [*cuts, len(values)], strict=True)]
    parts = data.draw(st.permutations(parts))
    merged = measured(parts)
    largest = float(x.double().abs().max())
    for name in PLAIN:
        if name in ("std", "var") and len(values) == 1:
            continue
        # The textbook's token is the last dimension; here every part is one token, so it is left to the tests of shapes.
        if not name.startswith("token"):
            # What float32 rounds away of a deviation is in proportion to the largest element.
            scale = {"var": largest**2, "zero_fraction": 0.0, "nonfinite_count": 0.0}.get(name, largest)
            assert finish(name, merged) == pytest.approx(textbook(name, x), rel=1e-6, abs=1e-6 * scale), name


@given(
    groups=st.lists(st.lists(st.integers(-1000, 1000), min_size=1, max_size=20), min_size=2, max_size=6),
)
@settings(max_examples=100, deadline=None)
def test_merging_rows_is_associative_and_has_an_identity(groups: list[list[int]]) -> None:
    """Moments merged row by row, or all at once, with empty rows between, are the same; exact on small integers."""
    rows = [measured([torch.tensor(group, dtype=torch.float64)]) for group in groups]
    at_once = Moments(*(torch.cat(parts) for parts in zip(*rows, strict=True))).merge(torch.zeros(len(rows), dtype=torch.int64), 1)
    one_by_one = Moments.of_nothing(1)
    for row in rows:
        pair = Moments(*(torch.cat(parts) for parts in zip(one_by_one, row, strict=True)))
        one_by_one = pair.merge(torch.zeros(2, dtype=torch.int64), 1)
    everything = torch.tensor([value for group in groups for value in group], dtype=torch.float64)
    for moments in (at_once, one_by_one):
        assert float(moments.elements) == len(everything)
        assert float(moments.mean) == pytest.approx(float(everything.mean()), rel=1e-12, abs=1e-9)
        assert float(moments.deviations) == pytest.approx(float(((everything - everything.mean()) ** 2).sum()), rel=1e-9, abs=1e-6)
        assert float(moments.squares) == pytest.approx(float((everything**2).sum()), rel=1e-12)
        assert float(moments.maximum) == float(everything.max())
        assert float(moments.minimum) == float(everything.min())


def test_float64_keeps_what_float32_cannot_hold() -> None:
    """A spread of 1e-9 around 1e6 is seen in float64."""
    x = normal(500).double() * 1e-6 + 1e6
    assert finish("std", measured([x])) == pytest.approx(textbook("std", x), rel=1e-9)


def test_a_user_adds_a_statistic_under_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of STATISTICS is a name that rules can give: a Statistic, or a plain function."""
    from lightning_module_monitor import ModuleMonitor, Rule

    monkeypatch.setitem(STATISTICS, "range", Statistic(Need.EXTREMES, lambda m: m.maximum - m.minimum))
    monkeypatch.setitem(STATISTICS, "first", lambda x: x.flatten()[0])
    model = torch.nn.Linear(2, 3)
    monitor = ModuleMonitor(rules=[Rule(kinds="parameter", statistics=["range", "first"])])
    monitor.set_module(model)
    monitor.begin_step(0)
    monitor.monitor_parameters()
    record = monitor.end_step()
    assert record is not None
    weight = model.weight.detach()
    assert record.values["parameter/weight/range"] == pytest.approx(float(weight.max() - weight.min()))
    assert record.values["parameter/weight/first"] == float(weight[0, 0])
