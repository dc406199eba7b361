"""A SeriesState lives over steps: earlier steps do not change a step's values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.textbook import PLAIN
from torch import Tensor

from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from lightning_module_monitor.statistics.stream import Output, Stream
from lightning_module_monitor.step.accumulator import StepAccumulator
from lightning_module_monitor.step.state import SeriesState


def output_of(name: str) -> Output:
    """A built-in output."""
    output = STATISTICS[name]
    assert not callable(output)
    return output


def stream(site: str, *names: str) -> Stream:
    """A stream of some statistics."""
    return Stream("activation", site, {name: output_of(name) for name in names})


STREAMS = [stream("a", "mean", "std"), stream("b", "max"), stream("c", "mean", "std")]
STREAMS += [stream("d", "norm", "ratio"), stream("e", "hist", "max")]
"""Streams with different statistics; a stream has two rows, another a histogram."""

STEPS = [[0, 1, 2], [0, 1, 2], [2, 0], [4, 3, 1], [3], [], [0, 1, 2, 3, 4]]
"""Indices of the observed streams of each step, in order."""


def observed(rows: SeriesState | None, indices: list[int], tensors: list[Tensor]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Values and counts of one step."""
    accumulator = StepAccumulator(lambda *_error: None, rows)
    for index in indices:
        accumulator.observe(STREAMS[index], tensors[index])
        accumulator.measure_all([(STREAMS[index], 2 * tensors[index])], are_bases=True)
    values = accumulator.collect().values
    return values, {key: histogram.counts for key, histogram in accumulator.histograms.items()}


def test_earlier_steps_do_not_change_a_step() -> None:
    """With other sites, another order, none, and all of them."""
    rows = SeriesState()
    for number, indices in enumerate(STEPS):
        tensors = [torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * number + index)) for index in range(5)]
        values, counts = observed(rows, indices, tensors)
        own_values, own_counts = observed(None, indices, tensors)
        assert values == own_values
        assert {key.split("/")[1] for key in values} == {STREAMS[index].site for index in indices}
        assert counts.keys() == own_counts.keys() == {"activation/e/hist" for index in indices if index == 4}
        assert all((counts[key] == own_counts[key]).all() for key in counts)
        for index in indices:
            if index in (0, 2):
                site = STREAMS[index].site
                assert values[f"activation/{site}/mean"] == pytest.approx(float(tensors[index].double().mean()), rel=1e-6)


def test_an_abandoned_step_leaves_nothing_to_the_next() -> None:
    """Also a step that goes on around another, as around a validation loop."""
    rows, x = SeriesState(), torch.arange(6.0).view(2, 3)
    first = observed(rows, [0, 1], [x, x])
    left, around = (StepAccumulator(lambda *_error: None, rows) for _ in range(2))
    left.observe(STREAMS[0], 100 * x)
    around.observe(STREAMS[0], x)
    assert observed(rows, [0, 1], [x, x]) == first
    around.observe(STREAMS[1], x)
    assert around.collect().values == around.collect().values == first[0]
    assert observed(rows, [1], [x, x])[0] == {"activation/b/max": 5.0}


def test_a_statistic_that_fails_is_nan_and_others_stay() -> None:
    """For example a user's statistic that is written for tensors: its values are NaN, and it is reported by name."""

    def root(moments: Any) -> Any:
        return moments.squares.sqrt()

    statistics: dict[str, Output] = {**stream("a", "mean", "max").outputs, "root": Statistic(STATISTICS["norm"].needs, root)}
    errors: list[tuple[str, str, type]] = []
    accumulator = StepAccumulator(lambda failed, name, _tensor, error: errors.append((failed.site, name, type(error))))
    for site in "ab":
        accumulator.observe(Stream("activation", site, statistics), torch.arange(3.0))
    expected = {"mean": 1.0, "max": 2.0, "root": pytest.approx(math.nan, nan_ok=True)}
    assert accumulator.collect().values == {f"activation/{site}/{name}": value for site in "ab" for name, value in expected.items()}
    assert errors == [("a", "root", AttributeError)]
    assert accumulator.num_errors == 1


def test_the_last_of_two_streams_with_the_same_key_counts() -> None:
    """Statistics that only the first stream has stay."""
    first, second = stream("a", "mean", "std"), stream("a", "mean", "max")
    accumulator = StepAccumulator(lambda *_error: None)
    accumulator.observe(first, torch.arange(3.0))
    accumulator.observe(second, torch.arange(5.0))
    expected = {"activation/a/mean": 2.0, "activation/a/std": 1.0, "activation/a/max": 4.0}
    assert dict(accumulator.collect().values) == expected


def test_observe_all_is_observe_for_each_tensor() -> None:
    """For known and new streams, with a histogram, in another precision, and for a stream without outputs."""
    streams = [*STREAMS[:4], stream("f", "hist", "max"), stream("g", "mean"), Stream("activation", "h")]
    rows = SeriesState()
    for missing in ([], [0, 3], [5], [], [*range(7)]):
        tensors = [torch.randn(40, 3) for _index in range(7)]
        tensors[5] = torch.randn(40).double()
        pairs = [(streams[index], tensors[index]) for index in range(7) if index not in missing]
        together, alone = (StepAccumulator(lambda *_error: None, state) for state in (rows, None))
        together.observe_all(pairs)
        for pair in pairs:
            alone.observe(*pair)
        values, own_values = together.collect().values, alone.collect().values
        assert values == {key: pytest.approx(value, rel=1e-9, nan_ok=True) for key, value in own_values.items()}
        assert together.histograms == alone.histograms
        assert {key.split("/")[1] for key in values} == {"abcdfgh"[index] for index in range(6) if index not in missing}


def test_an_empty_tensor_has_no_mean() -> None:
    """It has no spread and no extremes, a norm of 0; other tensors have. A site with empty tensors only is recorded."""
    for shapes in ([(0, 3), (2, 3)], [(2, 3), (0,)], [(0,), (0,)]):
        accumulator = StepAccumulator(lambda *_error: None)
        tensors = [torch.full(shape, 2.0) for shape in shapes]
        for index, tensor in enumerate(tensors):
            accumulator.observe(stream("xy"[index], *PLAIN), tensor)
        values = accumulator.collect().values
        for index, tensor in enumerate(tensors):
            statistics = {name: values[f"activation/{'xy'[index]}/{name}"] for name in PLAIN}
            if not tensor.numel():
                zero = {name: value for name, value in statistics.items() if not math.isnan(value)}
                assert zero == {"norm": 0.0, "nonfinite_count": 0.0}
            else:
                expected = {"mean": 2.0, "std": 0.0, "norm": pytest.approx(24**0.5), "min": 2.0, "abs_max": 2.0}
                assert {name: statistics[name] for name in expected} == expected
