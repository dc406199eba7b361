"""State is kept from step to step: whatever was observed before, the values of a step are those of a fresh table."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_module_monitor.statistics.accumulator import SeriesState, StepAccumulator
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from lightning_module_monitor.statistics.stream import Output, Stream


def output_of(name: str) -> Output:
    """A built-in output."""
    output = STATISTICS[name]
    assert not callable(output)
    return output


def stream_of(site: str, *names: str) -> Stream:
    """A stream of some statistics."""
    return Stream("activation", site, {name: output_of(name) for name in names})


STREAMS = [
    stream_of("a", "mean", "std"),
    stream_of("b", "max"),
    stream_of("c", "mean", "std"),
    stream_of("d", "norm", "ratio"),
    stream_of("e", "hist", "max"),
]
"""Of two groups of statistics that take turns, one with two rows, one with a histogram."""

STEPS = [[0, 1, 2], [0, 1, 2], [2, 0], [4, 3, 1], [3], [], [0, 1, 2, 3, 4]]
"""The streams that each step observes, in this order."""


def observed(rows: SeriesState | None, indices: list[int], tensors: list[Tensor]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Values and counts of one step."""
    accumulator = StepAccumulator(lambda *_error: None, rows)
    for index in indices:
        accumulator.observe(STREAMS[index], tensors[index])
        accumulator.observe_base([(STREAMS[index], 2 * tensors[index])])
    values = accumulator.collect()
    return values, {key: histogram.counts for key, histogram in accumulator.histograms.items()}


def test_a_step_does_not_depend_on_earlier_steps() -> None:
    """Other sites, another order, none, all of them."""
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


def test_a_step_that_was_left_leaves_nothing_to_the_next() -> None:
    """Neither one that nobody finished, nor one that goes on beside another, as a step does around a validation loop."""
    rows, x = SeriesState(), torch.arange(6.0).view(2, 3)
    first = observed(rows, [0, 1], [x, x])
    left, around = (StepAccumulator(lambda *_error: None, rows) for _ in range(2))
    left.observe(STREAMS[0], 100 * x)
    around.observe(STREAMS[0], x)
    assert observed(rows, [0, 1], [x, x]) == first
    around.observe(STREAMS[1], x)
    assert around.collect() == around.collect() == first[0]
    assert observed(rows, [1], [x, x])[0] == {"activation/b/max": 5.0}


def test_a_statistic_that_fails_costs_its_own_values_alone() -> None:
    """A statistic of the user's that fails, as one that was written for tensors: its values are NaN, and a message names it."""

    def root(moments: Any) -> Any:
        return moments.squares.sqrt()

    statistics: dict[str, Output] = {**stream_of("a", "mean", "max").outputs, "root": Statistic(STATISTICS["norm"].needs, root)}
    reported: list[tuple[str, str, type]] = []
    accumulator = StepAccumulator(lambda stream, name, _source, error: reported.append((stream.site, name, type(error))))
    for site in "ab":
        accumulator.observe(Stream("activation", site, statistics), torch.arange(3.0))
    expected = {"mean": 1.0, "max": 2.0, "root": pytest.approx(math.nan, nan_ok=True)}
    assert accumulator.collect() == {f"activation/{site}/{name}": value for site in "ab" for name, value in expected.items()}
    assert reported == [("a", "root", AttributeError)]
    assert accumulator.num_errors == 1


def test_the_last_of_two_streams_with_one_key_counts() -> None:
    """Streams with different statistics are finished separately."""
    first, second = stream_of("a", "mean", "std"), stream_of("a", "mean", "max")
    accumulator = StepAccumulator(lambda *_error: None)
    accumulator.observe(first, torch.arange(3.0))
    accumulator.observe(second, torch.arange(5.0))
    expected = {"activation/a/mean": 2.0, "activation/a/std": 1.0, "activation/a/max": 4.0}
    assert dict(accumulator.collect()) == expected


def test_tensors_taken_in_together_are_as_one_by_one() -> None:
    """Known and new streams, with a histogram, in another precision, and without outputs."""
    streams = [*STREAMS[:4], stream_of("f", "hist", "max"), stream_of("g", "mean"), Stream("activation", "h")]
    rows = SeriesState()
    for missing in ([], [0, 3], [5], [], [*range(7)]):
        tensors = [torch.randn(40, 3) for _place in range(7)]
        tensors[5] = torch.randn(40).double()
        pairs = [(streams[index], tensors[index]) for index in range(7) if index not in missing]
        together, alone = (StepAccumulator(lambda *_error: None, state) for state in (rows, None))
        together.observe_all(pairs)
        for pair in pairs:
            alone.observe(*pair)
        values, own_values = together.collect(), alone.collect()
        assert values == {key: pytest.approx(value, rel=1e-9, nan_ok=True) for key, value in own_values.items()}
        assert together.histograms == alone.histograms
        assert {key.split("/")[1] for key in values} == {"abcdfgh"[index] for index in range(6) if index not in missing}


def test_of_an_empty_tensor_there_is_no_mean() -> None:
    """And of others there is: it differs from theirs in its number of elements alone."""
    for shapes in ([(0, 3), (2, 3)], [(2, 3), (0,)], [(0,), (0,)]):
        accumulator = StepAccumulator(lambda *_error: None)
        tensors = [torch.full(shape, 2.0) for shape in shapes]
        for index, tensor in enumerate(tensors):
            accumulator.observe(stream_of("xy"[index], "mean", "std", "norm", "min", "abs_max"), tensor)
        values = accumulator.collect()
        for index, tensor in enumerate(tensors):
            found = {key.split("/")[2]: value for key, value in values.items() if key.split("/")[1] == "xy"[index]}
            if not tensor.numel():
                # A site with empty tensors alone counts as observed.
                assert found.pop("norm") == 0.0
                assert len(found) == 4
                assert all(math.isnan(value) for value in found.values())
            else:
                assert found == {"mean": 2.0, "std": 0.0, "norm": pytest.approx(24**0.5), "min": 2.0, "abs_max": 2.0}
