"""SeriesState live from step to step: whatever was seen before, a step's values are those of a table of its own."""

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


def watch(site: str, *names: str) -> Stream:
    """A watch of some statistics."""
    return Stream("activation", site, {name: output_of(name) for name in names})


WATCHES = [watch("a", "mean", "std"), watch("b", "max"), watch("c", "mean", "std"), watch("d", "norm", "ratio"), watch("e", "hist", "max")]
"""Of two groups of statistics that take turns, one with two rows, one with a histogram."""

STEPS = [[0, 1, 2], [0, 1, 2], [2, 0], [4, 3, 1], [3], [], [0, 1, 2, 3, 4]]
"""What is seen in each, in this order."""


def observed(rows: SeriesState | None, seen: list[int], tensors: list[Tensor]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Values and counts of one step."""
    observation = StepAccumulator(lambda *_trouble: None, rows)
    for place in seen:
        observation.observe(WATCHES[place], tensors[place])
        observation.observe_base([(WATCHES[place], 2 * tensors[place])])
    values = observation.collect()
    return values, {key: histogram.counts for key, histogram in observation.histograms.items()}


def test_a_step_does_not_know_what_was_seen_before() -> None:
    """Other sites, another order, none, all of them."""
    rows = SeriesState()
    for number, seen in enumerate(STEPS):
        tensors = [torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * number + place)) for place in range(5)]
        values, counts = observed(rows, seen, tensors)
        own_values, own_counts = observed(None, seen, tensors)
        assert values == own_values
        assert {key.split("/")[1] for key in values} == {WATCHES[place].site for place in seen}
        assert counts.keys() == own_counts.keys() == {"activation/e/hist" for place in seen if place == 4}
        assert all((counts[key] == own_counts[key]).all() for key in counts)
        for place in seen:
            if place in (0, 2):
                site = WATCHES[place].site
                assert values[f"activation/{site}/mean"] == pytest.approx(float(tensors[place].double().mean()), rel=1e-6)


def test_a_step_that_was_left_leaves_nothing_to_the_next() -> None:
    """Neither one that nobody finished, nor one that goes on beside another, as a step does around a validation loop."""
    rows, x = SeriesState(), torch.arange(6.0).view(2, 3)
    first = observed(rows, [0, 1], [x, x])
    left, around = (StepAccumulator(lambda *_trouble: None, rows) for _ in range(2))
    left.observe(WATCHES[0], 100 * x)
    around.observe(WATCHES[0], x)
    assert observed(rows, [0, 1], [x, x]) == first
    around.observe(WATCHES[1], x)
    assert around.collect() == around.collect() == first[0]
    assert observed(rows, [1], [x, x])[0] == {"activation/b/max": 5.0}


def test_a_statistic_that_fails_costs_its_own_values_alone() -> None:
    """One of the user's own, that was written for tensors, say: its values are NaN, and it is said which it was."""

    def root(moments: Any) -> Any:
        return moments.squares.sqrt()

    statistics: dict[str, Output] = {**watch("a", "mean", "max").outputs, "root": Statistic(STATISTICS["norm"].needs, root)}
    told: list[tuple[str, str, type]] = []
    observation = StepAccumulator(lambda one, name, _seen, error: told.append((one.site, name, type(error))))
    for site in "ab":
        observation.observe(Stream("activation", site, statistics), torch.arange(3.0))
    expected = {"mean": 1.0, "max": 2.0, "root": pytest.approx(math.nan, nan_ok=True)}
    assert observation.collect() == {f"activation/{site}/{name}": value for site in "ab" for name, value in expected.items()}
    assert told == [("a", "root", AttributeError)]
    assert observation.num_errors == 1


def test_of_two_watches_of_one_key_the_last_one_counts() -> None:
    """Which are watches of different kinds of statistics: each kind is finished by itself."""
    first, second = watch("a", "mean", "std"), watch("a", "mean", "max")
    observation = StepAccumulator(lambda *_trouble: None)
    observation.observe(first, torch.arange(3.0))
    observation.observe(second, torch.arange(5.0))
    expected = {"activation/a/mean": 2.0, "activation/a/std": 1.0, "activation/a/max": 4.0}
    assert dict(observation.collect()) == expected


def test_tensors_taken_in_together_are_as_one_by_one() -> None:
    """Of known watches and new ones, with a histogram, in another precision, and where nothing is wanted."""
    watches = [*WATCHES[:4], watch("f", "hist", "max"), watch("g", "mean"), Stream("activation", "h")]
    rows = SeriesState()
    for missing in ([], [0, 3], [5], [], [*range(7)]):
        tensors = [torch.randn(40, 3) for _place in range(7)]
        tensors[5] = torch.randn(40).double()
        pairs = [(watches[place], tensors[place]) for place in range(7) if place not in missing]
        together, alone = (StepAccumulator(lambda *_trouble: None, one) for one in (rows, None))
        together.observe_all(pairs)
        for pair in pairs:
            alone.observe(*pair)
        values, own_values = together.collect(), alone.collect()
        assert values == {key: pytest.approx(value, rel=1e-9, nan_ok=True) for key, value in own_values.items()}
        assert together.histograms == alone.histograms
        assert {key.split("/")[1] for key in values} == {"abcdfgh"[place] for place in range(6) if place not in missing}


def test_of_an_empty_tensor_there_is_no_mean() -> None:
    """And of others there is: it is told from theirs by nothing but its number of elements."""
    for shapes in ([(0, 3), (2, 3)], [(2, 3), (0,)], [(0,), (0,)]):
        observation = StepAccumulator(lambda *_trouble: None)
        tensors = [torch.full(shape, 2.0) for shape in shapes]
        for place, tensor in enumerate(tensors):
            observation.observe(watch("xy"[place], "mean", "std", "norm", "min", "abs_max"), tensor)
        values = observation.collect()
        for place, tensor in enumerate(tensors):
            found = {key.split("/")[2]: value for key, value in values.items() if key.split("/")[1] == "xy"[place]}
            if not tensor.numel():
                # A site of which nothing but empty tensors was seen is seen.
                assert found.pop("norm") == 0.0
                assert len(found) == 4
                assert all(math.isnan(value) for value in found.values())
            else:
                assert found == {"mean": 2.0, "std": 0.0, "norm": pytest.approx(24**0.5), "min": 2.0, "abs_max": 2.0}
