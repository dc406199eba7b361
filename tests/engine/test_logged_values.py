"""Values that users log."""

from __future__ import annotations

import pytest
import torch
from helpers.plain_steps import record_of
from torch import nn

from lightning_module_monitor import ModuleMonitor, Rule


def test_an_aggregate_that_is_made_in_every_step_leaves_nothing_behind() -> None:
    """A lambda of each step aggregates the values of its own step, and the monitor keeps one stream for the key."""
    model = nn.Sequential(nn.Linear(2, 2))
    with ModuleMonitor(rules=[Rule(kinds="activation", statistics="rms")], on_error="raise") as monitor:
        monitor.set_module(model)
        for step in range(5):
            monitor.begin_step(step)
            model(torch.ones(1, 2))
            for value in (1.0, 3.0):
                monitor.log_scalar("own/value", value, lambda values, factor=step: factor * values.sum())
            record = record_of(monitor)
            assert record.values["own/value"] == pytest.approx(4.0 * step)
        assert [*monitor.engine.model.logged] == [("own", "", "value", "train")]
