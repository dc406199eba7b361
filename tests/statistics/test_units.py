"""A unit is dead only if it was zero throughout: all elements, calls, micro-batches, and the last ten monitored steps."""

from __future__ import annotations

import copy
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.profiler import profile

from lightning_module_monitor import ModuleMonitor, Rule
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.kinds import DEAD_AFTER
from lightning_module_monitor.statistics.registry import saturated_sigmoid, saturated_softmax, saturated_tanh
from lightning_module_monitor.statistics.units import MAX_UNITS, RecentUnits


def fractions(steps: list[list[Tensor]], rule: Rule | None = None) -> list[float]:
    """The recorded fractions of an identity, step by step, from its micro-batches."""
    rule = rule or Rule(kinds="activation", statistics=["dead_fraction", "rms"])
    model, recorded = nn.Identity(), []
    with ModuleMonitor(rules=[rule]) as monitor:
        monitor.set_module(model)
        for step, micro_batches in enumerate(steps):
            monitor.begin_step(step)
            for x in micro_batches:
                model(x)
                monitor.after_micro_batch()
            record = monitor.end_step()
            assert record is not None
            recorded.append(record.values["activation/_root_/dead_fraction"])
    return recorded


def unit(*alive: int, units: int = 8) -> Tensor:
    """A tensor of two tokens; some units of the second are not zero."""
    x = torch.zeros(1, 2, units)
    x[0, 1, list(alive)] = -1.0
    return x


def test_alive_once_is_alive() -> None:
    """In any micro-batch, in any of the last ten steps, and no longer."""
    steps = [[unit(0), unit(1, 2)], *[[unit(3)]] * 9, [unit(3)]]
    assert fractions(steps) == [5 / 8, *[4 / 8] * 9, 7 / 8]


@pytest.mark.parametrize(
    ("shape", "expected"), [((6,), 5 / 6), ((4, 6), 5 / 6), ((2, 4, 6), 5 / 6), ((2, 4, 3, 6), 3 / 4), ((2, 4, 1, 3, 6), 3 / 4)]
)
def test_the_dimension_of_units(shape: tuple[int, ...], expected: float) -> None:
    """A channel where there are four or five dimensions, else an index along the last dimension."""
    x = torch.zeros(shape)
    x[(0,) * len(shape)] = 1.0
    assert fractions([[x]]) == [expected]


def test_evenly_spaced_units_of_a_large_layer_are_observed() -> None:
    """Every third of 3,000."""
    x = torch.zeros(2, 3000)
    x[1, ::6] = 1.0
    assert fractions([[x]]) == [0.5]


def test_nan_is_no_zero_and_nothing_is_nothing() -> None:
    """NaN is alive; an empty output counts for nothing."""
    assert fractions([[torch.tensor([[float("nan"), 0.0]])]]) == [0.5]
    assert fractions([[torch.ones(2, 4), torch.empty(0, 4)]]) == [0.0]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=25))
def test_the_memory_is_that_of_the_last_ten_records(steps: list[list[bool]]) -> None:
    """Also of a layer whose number of units changes: units that no record of the last ten had are none."""
    memory, last = RecentUnits(), deque[list[bool]](maxlen=DEAD_AFTER)
    for is_alive in steps:
        last.append(is_alive)
        alive = np.logical_or.reduce([np.pad(units, (0, 6 - len(units))) for units in last])
        counts = np.zeros((2, MAX_UNITS))
        counts[:, : len(is_alive)] = is_alive, [True] * len(is_alive)
        num_units = max(map(len, last))
        [other, fraction] = memory.fractions(["other", "layer"], np.stack([np.ones(2 * MAX_UNITS), counts.reshape(-1)]))
        assert (other, fraction) == (0.0, np.count_nonzero(~alive[:num_units]) / num_units)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.GELU()], ids=lambda module: type(module).__name__)
def test_a_layer_takes_few_operations(activation: nn.Module) -> None:
    """One reduction a call where outputs are not negative, two else; and of a step with 20 layers as many more as of one with 2."""

    def operations(num_layers: int) -> int:
        model = nn.Sequential(*(copy.deepcopy(activation) for _layer in range(num_layers)))
        with ModuleMonitor(rules=[Rule(kinds="activation", leaf_modules=True, statistics="dead_fraction")]) as monitor:
            monitor.set_module(model)
            for step in range(2):
                monitor.begin_step(step)
                with profile() as profiled:
                    model(torch.randn(4, 8))
                    monitor.end_step()
        return sum(event.name.startswith("aten::") for event in profiled.function_events)

    of_module = {nn.ReLU: 4, nn.ReLU6: 4, nn.GELU: 9}[type(activation)]  # detach, and three for each reduction
    with profile() as alone:
        activation(torch.randn(4, 8))
    of_forward = sum(event.name.startswith("aten::") for event in alone.function_events) - 3  # without those of randn
    assert (operations(20) - operations(2)) / 18 - of_forward <= of_module


def test_it_is_of_activations() -> None:
    """A parameter has no units."""
    with pytest.raises(
        ConfigError, match=r"'dead_fraction' is of the units of a layer, and 'parameter' has none; expected kinds activation"
    ):
        ModuleMonitor(rules=[Rule(kinds="parameter", statistics="dead_fraction")])


def test_saturated_fractions() -> None:
    """By the slope of the function, at outputs on both sides of the limit."""
    logits = torch.tensor([0.0, 4.58, 4.61, -4.61], dtype=torch.float64)
    slope = torch.autograd.functional.jacobian(torch.sigmoid, logits).diagonal()
    assert saturated_sigmoid(torch.sigmoid(logits)) == (slope < 0.01).double().mean() == 0.5
    x = torch.tensor([0.0, 2.28, 2.31, -2.31], dtype=torch.float64)
    slope = torch.autograd.functional.jacobian(torch.tanh, x).diagonal()
    assert saturated_tanh(torch.tanh(x)) == (slope < 0.04).double().mean() == 0.5
    rows = torch.tensor([[0.995, 0.005], [0.5, 0.5], [0.0, 1.0], [0.02, 0.98]])
    assert float(saturated_softmax(rows)) == pytest.approx(0.5)
    assert float(saturated_softmax(rows.T)) == pytest.approx(0.5)
