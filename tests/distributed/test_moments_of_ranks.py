"""Merging over ranks: the same as merging all their tensors in one place, for any number of ranks and any magnitudes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.ranks import Meeting, ThreadRank
from helpers.textbook import PLAIN, slack, textbook
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_module_monitor import STATISTICS, Statistic
from lightning_module_monitor.distributed.rank_moments import BITS, ReducedMoments, Replicas, fingerprints_of, reduce_moments
from lightning_module_monitor.kernels.elements import to_host
from lightning_module_monitor.kernels.moments import NUM_FIELDS, Moments, Need
from lightning_module_monitor.kernels.table import MomentTable
from lightning_module_monitor.statistics.finisher import nan_where_empty


def moments_of(rows: list[list[Tensor]]) -> Moments:
    """Moments of several rows, each of several tensors."""
    table = MomentTable()
    for row, tensors in enumerate(rows):
        for tensor in tensors:
            table.add((row,), tensor, Need.EVERYTHING)
    shares = to_host(table.collect(len(rows)))
    return Moments(*torch.from_numpy(shares[0])) if shares else Moments.empty(len(rows))


def reduced_alone(moments: Moments, largest: Tensor, summed: Tensor, rank: ThreadRank) -> ReducedMoments:
    """The reduction without replicas."""
    none = torch.zeros(0, dtype=torch.int64)
    item_of_number = none.new_zeros(NUM_FIELDS * len(moments.elements) + len(summed))
    return reduce_moments(moments, largest, summed, rank, Replicas(none, none.double(), item_of_number))


def assert_merged(rows_by_rank: list[list[list[Tensor]]]) -> None:
    """Every rank gets, by two collectives, the textbook value of every statistic over the tensors of all."""
    meeting: Meeting[ReducedMoments] = Meeting(len(rows_by_rank))
    mine = torch.arange(3.0, dtype=torch.float64)
    merged = meeting.run(lambda rank: reduced_alone(moments_of(rows_by_rank[rank.index]), mine * rank.index, mine, rank))
    assert meeting.calls == ["max", "sum"]
    assert all(
        torch.equal(reduced.largest, mine * (len(merged) - 1)) and torch.equal(reduced.summed, mine * len(merged)) for reduced in merged
    )
    results = [reduced.moments for reduced in merged]
    for result in (Moments(*nan_where_empty(torch.stack(moments).numpy())) for moments in results):
        for row in range(len(rows_by_rank[0])):
            tensors = [tensor for rows in rows_by_rank for tensor in rows[row]]
            whole = torch.cat([tensor.double().reshape(-1, 4) for tensor in tensors]) if tensors else None
            for name in PLAIN:
                statistic = STATISTICS[name]
                assert isinstance(statistic, Statistic)
                with np.errstate(all="ignore"):
                    value = float(statistic.finish(result)[row])
                if whole is None:
                    assert value == 0.0 if name in ("norm", "nonfinite_count") else value != value, name  # noqa: PLR0124  # NaN
                    continue
                assert value == pytest.approx(textbook(name, whole), rel=1e-9, abs=1e-9 * slack(name, whole), nan_ok=True), name
    assert all(torch.equal(torch.stack(results[0]).nan_to_num(), torch.stack(moments).nan_to_num()) for moments in results)


def numbers(seed: int, rows: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    """Normally distributed, shape ``(rows, 4)``; in float64, of which no rank rounds anything away."""
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale + mean


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("scale", "mean"), [(1.0, 0.0), (1.0, 1e5), (1e30, 0.0), (1e-30, 0.0), (0.0, 3.0)])
def test_all_ranks_get_the_statistics_of_all_elements(num_ranks: int, scale: float, mean: float) -> None:
    """Uneven shares, too."""
    assert_merged([[[numbers(10 * rank + call, 3 + 500 * rank, scale, mean) for call in range(2)]] for rank in range(num_ranks)])


def test_a_row_that_only_some_ranks_have() -> None:
    """A module that runs on one rank only, an empty tensor, a row that no rank has: rows do not mix."""
    first, second = numbers(1, 5), numbers(2, 7, scale=100.0, mean=-1e4)
    assert_merged(
        [[[first], [], [], [second]], [[], [second], [], [torch.empty(0, 4, dtype=torch.float64)]], [[], [], [], [first, second]]]
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_on_one_rank_is_not_hidden(bad: float) -> None:
    """Also where the collective drops NaN."""
    spoiled = numbers(3, 6)
    spoiled[2, 1] = bad
    clean = [[numbers(4, 5)]]
    nothing = torch.empty(0, dtype=torch.float64)
    for order in ([clean, [[spoiled]]], [[[spoiled]], clean]):
        meeting: Meeting[ReducedMoments] = Meeting(2)
        for merged in meeting.run(lambda rank, rows=order: reduced_alone(moments_of(rows[rank.index]), nothing, nothing, rank)):
            result = merged.moments
            assert float(result.nonfinite[0]) == 1
            assert not torch.stack([result.mean, result.deviations, result.squares, result.magnitude]).isfinite().any()
            assert not (result.maximum.isfinite() & result.minimum.isfinite()).any()
            assert bool(result.maximum.isnan()) == (bad != bad)  # noqa: PLR0124  # NaN


def reduced_replicas(rows_by_rank: list[list[list[Tensor]]], are_parts: list[list[float]]) -> list[ReducedMoments]:
    """What ranks have of rows that all of them should have alike; each row is summed over ranks once more, as a number."""
    things = torch.arange(len(rows_by_rank[0]))

    def work(rank: ThreadRank) -> ReducedMoments:
        moments = moments_of(rows_by_rank[rank.index])
        item_of_number = things.repeat(NUM_FIELDS + 1)
        replicas = Replicas(things, torch.tensor(are_parts[rank.index], dtype=torch.float64), item_of_number)
        return reduce_moments(moments, torch.empty(0, dtype=torch.float64), moments.elements, rank, replicas)

    meeting: Meeting[ReducedMoments] = Meeting(len(rows_by_rank))
    reduced = meeting.run(work)
    assert meeting.calls == ["max", "sum"]
    return reduced


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_what_all_ranks_have_alike_counts_once_and_what_differs_on_all(scale: float) -> None:
    """Also where a rank has added it up in another order, has nothing of it, has zeros, or has a part of it that is like another's."""
    tensor, other = numbers(1, 5000, scale), numbers(2, 3, scale)
    changed, zeros = tensor.clone(), torch.zeros(3, 4, dtype=torch.float64)
    changed[2000, 1] += 1e-3 * scale
    first = [[tensor], [tensor], [tensor], [other], [zeros], [zeros], [tensor]]
    second = [[tensor], [*tensor.split(7)], [changed], [], [zeros], [], [tensor]]
    expected = [[tensor], [tensor], [tensor, changed], [other], [zeros], [zeros], [tensor, tensor]]
    parts = [0.0] * 6 + [1.0]
    for reduced in reduced_replicas([first, second], [parts, parts]):
        assert reduced.differ.tolist() == [False, False, True, True, False, True, False]
        for row, tensors in enumerate(expected):
            together = torch.cat(tensors)
            assert float(reduced.moments.elements[row]) == float(reduced.summed[row]) == together.numel()
            assert float(reduced.moments.squares[row]) == pytest.approx(float(together.square().sum()), rel=1e-12)
            assert float(reduced.moments.mean[row]) == pytest.approx(float(together.mean()), rel=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_replicas_that_are_not_finite_are_compared_too(bad: float) -> None:
    """Alike where all ranks have the same bad value, and different where one has."""
    clean, spoiled = numbers(3, 6), numbers(3, 6)
    spoiled[2, 1] = bad
    for reduced in reduced_replicas([[[spoiled], [clean]], [[spoiled], [spoiled]]], [[0.0, 0.0]] * 2):
        assert reduced.differ.tolist() == [False, True]
        assert reduced.moments.nonfinite.tolist() == [1.0, 1.0]
        assert reduced.moments.elements.tolist() == [24.0, 48.0]


@settings(max_examples=40, deadline=None)
@given(
    elements=st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=60),
    owners=st.lists(st.integers(0, 2), min_size=15, max_size=15),
)
def test_any_split_over_ranks_is_the_whole(elements: list[float], owners: list[int]) -> None:
    """Tokens of four elements, dealt out to three ranks in any way."""
    tokens = torch.tensor(elements[: len(elements) // 4 * 4], dtype=torch.float64).view(-1, 4)
    dealt: list[list[Tensor]] = [[], [], []]
    for token, owner in zip(tokens, owners, strict=False):
        dealt[owner].append(token)
    assert_merged([[tensors] for tensors in dealt])


def test_each_bit_of_a_fingerprint_depends_on_all_bits_of_its_numbers() -> None:
    """A flipped bit of a number changes about half of them, as two numbers that change places do; only its item is concerned."""
    numbers = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    items = torch.tensor([0, 1] * 4)

    def bits_of(numbers: Tensor) -> Tensor:
        values = fingerprints_of(numbers, items, 2).long()
        return torch.stack([value >> bit & 1 for value in values for bit in range(BITS)])

    flipped = [(numbers.view(torch.int64) ^ (torch.arange(8) == 2).long() * (1 << bit)).view(torch.float64) for bit in range(63)]
    changes = torch.stack([bits_of(changed) != bits_of(numbers) for changed in [*flipped, numbers[[2, 1, 0, 3, 4, 5, 6, 7]]]]).double()
    assert changes.shape == (64, 2 * BITS, 2)
    assert (changes[:, :, 0].mean(0) - 0.5).abs().max() < 0.3
    assert (changes[:, :, 0].mean(1) - 0.5).abs().max() < 0.3
    assert not changes[:, :, 1].any()
