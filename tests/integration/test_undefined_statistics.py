"""What finite tensors do not have (zero over zero, the variance of one element) is NaN, and no sign of anything that is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import KeepRecords
from helpers.training import Classifier, loader, seed, trainer
from torch import nn

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.record import UNDEFINED, Record, is_undefined
from lightning_module_monitor.report.payload import Payload
from lightning_module_monitor.report.stored_run import read_run
from lightning_module_monitor.sinks.roll_ups import LoggedValues


def recorded(model: nn.Module, reference: nn.Module, update: float) -> dict[str, float]:
    """The statistics of a step that moves every parameter by a number."""
    rules = [Rule(kinds="update", statistics="ratio"), Rule(kinds="parameter_difference", statistics=["ratio", "cosine"])]
    rules.append(Rule(kinds="parameter", statistics=["std", "var", "mean"]))
    with ModuleMonitor(rules=rules, on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        monitor.begin_step(0)
        monitor.monitor_parameters()
        for parameter in model.parameters():
            parameter.data.add_(update)
        record = monitor.end_step()
    assert record is not None
    return dict(record.values)


def zeros(value: float = 0.0) -> nn.Module:
    """A bias from a number, and a weight of one element."""
    module = nn.Linear(1, 1)
    nn.init.constant_(module.bias, value)
    return module


def test_zero_over_zero_is_told_from_what_is_not_finite() -> None:
    """Both are NaN; something over zero is infinite."""
    found = recorded(zeros(), zeros(), 0.0)
    undefined = {key for key, value in found.items() if is_undefined(value)}
    assert undefined == {"update/bias/ratio", "parameter_difference/bias/ratio", "parameter_difference/bias/cosine"} | {
        f"parameter/{name}/{statistic}" for name in ("weight", "bias") for statistic in ("std", "var")
    }
    assert all(math.isnan(found[key]) for key in undefined)
    assert recorded(zeros(), zeros(), 1.0)["update/bias/ratio"] == math.inf
    for value in (math.nan, math.inf):
        found = recorded(zeros(value), zeros(), 0.0)
        assert math.isnan(found["update/bias/ratio"])
        assert not any(is_undefined(found[f"{kind}/bias/ratio"]) for kind in ("update", "parameter_difference"))
        assert not is_undefined(found["parameter/bias/var"])


def test_biases_from_zero_are_healthy(tmp_path: Path) -> None:
    """Recorded, planned and stored as NaN, for the whole run; no finding, alert, color or roll-up is of them."""
    seed()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.zeros_(model[0].bias)
    model[0].bias.requires_grad_(False)
    rules = [Rule(kinds=["update", "parameter_difference"], statistics="ratio")]
    alerts: list[Any] = [{"keys": "update/.*/ratio", "above": 1.0}, {"keys": "update/.*/ratio", "below": -1.0}]
    options: dict[str, Any] = {"rules": rules, "reference": "init", "alerts": alerts, "health": {"watch": "all"}}
    callback = ModuleMonitorCallback(every_n_steps=1, store=str(tmp_path / "m.h5"), on_error="raise", **options)
    records = KeepRecords(callback)
    planned = []

    class Plans(KeepRecords):
        def on_train_start(self, *_args: Any) -> None:
            planned.extend(callback.monitor.planned_keys())

    trainer(tmp_path, [callback, records, Plans(callback)], max_epochs=1).fit(Classifier(model), loader(), loader(8))
    keys = {f"{kind}/model.0.bias/ratio" for kind in ("update", "parameter_difference")}
    assert keys <= set(planned)
    assert all(is_undefined(record.values[key]) for record in records.records for key in keys)
    assert [one for one in callback.findings if one.name != "not_learning"] == []  # its labels are random
    store = load_store(tmp_path / "m.h5")
    assert keys <= set(store.keys())
    for key in keys:
        assert len(store.series(key)[1]) == 10
        assert np.isnan(store.series(key)[1]).all()
    run = read_run(store)
    tables = {(table.kind, table.statistic): table for table in run.tables}
    for kind in ("update", "parameter_difference"):
        table = tables[kind, "ratio"]
        row = table.sites.index("model.0.bias")
        assert not table.is_recorded[row].any()
        assert table.is_recorded[table.sites.index("model.0.weight")].all()
        assert Payload(10, 0).table(table)["data"]
    verdict = run.verdict()
    assert not [finding for finding in verdict.findings if finding.site == "model.0.bias"]
    rolled = LoggedValues(roll_up=True)(records.records[-1])
    assert rolled["update/_max_/ratio"] == max(
        value for key, value in records.records[-1].values.items() if key.startswith("update/") and not math.isnan(value)
    )


@pytest.mark.parametrize("others", [[], [1.0, 3.0]])
def test_a_roll_up_leaves_out_what_is_not_defined_and_hides_no_other_nan(others: list[float]) -> None:
    """Where nothing is left it is NaN."""
    values = {f"update/layer{place}/ratio": value for place, value in enumerate([UNDEFINED, *others])}
    expected = [1.0, 2.0, 3.0] if others else [math.nan] * 3
    found = LoggedValues(roll_up=True)(Record.of(0, values))
    np.testing.assert_equal([found[f"update/{site}/ratio"] for site in ("_min_", "_median_", "_max_")], expected)
    broken = LoggedValues(roll_up=True)(Record.of(0, values | {"update/other/ratio": math.nan}))
    assert all(math.isnan(broken[f"update/{site}/ratio"]) for site in ("_min_", "_median_", "_max_"))
    assert not is_undefined(broken["update/_max_/ratio"])
    assert torch.tensor(UNDEFINED).isnan()
