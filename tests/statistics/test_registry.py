"""Statistics of constant tensors, and statistics that a user adds."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.kernels import Implementation, finished, measured, over_implementations

from lightning_module_monitor import STATISTICS, ModuleMonitor, Rule, Statistic
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.record import is_undefined


@over_implementations
@pytest.mark.parametrize("elements", [[0.5], [0.0, 0.0, 0.0], [-2.0] * 5], ids=str)
def test_a_statistic_that_a_finite_tensor_does_not_have_is_undefined(implementation: Implementation, elements: list[float]) -> None:
    """Zero over zero is a NaN of its own, which no check takes for a fault."""
    moments = measured(implementation, [torch.tensor(elements)])
    undefined = {"std", "var", "skewness", "kurtosis"} if len(elements) == 1 else {"skewness", "kurtosis"}
    for name in ("mean", "std", "var", "skewness", "kurtosis", "norm"):
        assert is_undefined(finished(name, moments)) == (name in undefined), name


@over_implementations
def test_non_finite_elements_do_not_make_a_statistic_undefined(implementation: Implementation) -> None:
    """The NaN shows the fault."""
    for bad in (math.nan, math.inf):
        moments = measured(implementation, [torch.tensor([1.0, bad, 2.0])])
        for name in ("std", "var", "skewness", "kurtosis"):
            value = finished(name, moments)
            assert math.isnan(value), name
            assert not is_undefined(value), name


@over_implementations
def test_skewness_and_kurtosis_by_hand(implementation: Implementation) -> None:
    """Without a correction for bias: a fair coin has skewness 0 and an excess of -2; a coin with 1/4 has skewness 2 / sqrt(3)."""
    fair, unfair = torch.tensor([0.0, 1.0]).repeat(50), torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(50)
    moments = measured(implementation, [fair])
    assert finished("skewness", moments) == pytest.approx(0.0, abs=implementation.rtol)
    assert finished("kurtosis", moments) == pytest.approx(-2.0, rel=implementation.rtol)
    moments = measured(implementation, [unfair])
    assert finished("skewness", moments) == pytest.approx(2 / 3**0.5, rel=implementation.rtol)
    assert finished("kurtosis", moments) == pytest.approx(1 / (0.25 * 0.75) - 6, rel=implementation.rtol)
    mirrored = measured(implementation, [-unfair])
    assert finished("skewness", mirrored) == pytest.approx(-2 / 3**0.5, rel=implementation.rtol)


def test_a_user_adds_a_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of STATISTICS is a name that rules can give: a Statistic, or a plain function."""
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
