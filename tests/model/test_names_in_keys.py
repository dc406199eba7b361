"""Messages about names that are not valid in keys."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from lightning_module_monitor import ModuleMonitor, Rule


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages about names."""
    return [message for message in caplog.messages if "in keys" in message]


def test_any_number_of_odd_names_takes_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """With their number, and three of them."""
    model = nn.ModuleDict({f"layer {number}": nn.Linear(1, 1) for number in range(500)})
    with caplog.at_level(logging.INFO), ModuleMonitor(rules=Rule(kinds=["activation", "parameter"], statistics="norm")) as monitor:
        monitor.set_module(model)
        sites = {key.split("/")[1] for key in monitor.planned_keys()} - {"errors"}
    assert len(sites) == 1500
    (message,) = messages(caplog)
    examples = ", ".join(f"'layer {number}' is called 'layer_{number}' in keys" for number in range(3))
    assert message.startswith(f"1500 names differ from those of the model: {examples}. Loggers take letters")


def test_names_that_are_in_no_key_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Until a rule is added that has them in keys."""
    model = nn.ModuleDict({"a b": nn.Linear(1, 1), "c": nn.Linear(1, 1)})
    with caplog.at_level(logging.INFO), ModuleMonitor(rules=Rule(kinds="parameter", sites="c.*", statistics="norm")) as monitor:
        monitor.set_module(model)
        assert messages(caplog) == []
        monitor.add_rules(Rule(kinds="parameter", sites="a b.weight", statistics="norm"))
        monitor.add_rules(Rule(kinds="parameter", sites="c.weight", statistics="max"))
    (message,) = messages(caplog)
    assert message.startswith("1 name differs from those of the model: 'a b.weight' is called 'a_b.weight' in keys. Loggers take letters")
