"""Rows live from step to step: whatever was seen before, a step's values are those of a table of its own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_module_monitor.statistics import running
from lightning_module_monitor.statistics.observation import Observation
from lightning_module_monitor.statistics.registry import STATISTICS, Statistic
from lightning_module_monitor.statistics.rows import Rows
from lightning_module_monitor.statistics.watch import BASE, OWN, Watch


def watch(site: str, *names: str) -> Watch:
    """A watch of some statistics."""
    statistics = {name: one for name in names if isinstance(one := STATISTICS[name], Statistic)}
    return Watch("activation", site, statistics=statistics, histograms={"hist": None} if "hist" in names else {})


WATCHES = [watch("a", "mean", "std"), watch("b", "max"), watch("c", "mean", "std"), watch("d", "norm", "ratio"), watch("e", "hist", "max")]
"""Of two groups of statistics that take turns, one with two rows, one with a histogram."""

STEPS = [[0, 1, 2], [0, 1, 2], [2, 0], [4, 3, 1], [3], [], [0, 1, 2, 3, 4]]
"""What is seen in each, in this order."""


def observed(rows: Rows | None, seen: list[int], tensors: list[Tensor]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Values and counts of one step."""
    observation = Observation(lambda *_trouble: None, rows)
    for place in seen:
        observation.observe(WATCHES[place], tensors[place])
        observation.observe_base([(WATCHES[place], 2 * tensors[place])])
    values = observation.collect()
    return values, {key: histogram.counts for key, histogram in observation.histograms.items()}


def test_a_step_does_not_know_what_was_seen_before() -> None:
    """Other sites, another order, none, all of them."""
    rows = Rows()
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


def test_a_copy_numbers_its_own_watches() -> None:
    """Of a monitor that is copied, with all that it watches."""
    watches, rows = copy.deepcopy(WATCHES), Rows()
    firsts = [rows.first(one) for one in watches]
    copied_watches, copied_rows = copy.deepcopy((watches, rows))
    assert [copied_rows.first(one) for one in copied_watches] == firsts == [0, 1, 2, 3, 5]
    assert [*map(id, copied_rows.watches)] == [id(one) for one in copied_watches for _row in range(one.num_rows)]


@pytest.mark.skipif(running.kernel() is None, reason="needs the compiled kernel")
def test_totals_of_terms_go_into_every_row_that_wishes_for_them() -> None:
    """Into the second row of one that is relative too; what is measured twice in a step is merged."""
    relative, plain, rows = watch("x", "norm", "ratio"), watch("y", "norm"), Rows()
    wishes = [[(relative, OWN), (plain, OWN)], [(relative, BASE)]]
    for _step in range(2):
        observation = Observation(lambda *_trouble: None, rows)
        totals = np.zeros((2, running.NUM_FIELDS))
        totals[:, 0], totals[:, 2] = 4, [9.0, 36.0]
        observation.add_totals([(wishes, totals)])
        observation.add_totals([(wishes, totals)])
        assert observation.collect() == {
            "activation/x/norm": pytest.approx(18**0.5),
            "activation/x/ratio": pytest.approx(0.5),
            "activation/y/norm": pytest.approx(18**0.5),
        }
