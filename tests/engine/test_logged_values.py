"""Values that users log."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.plain_steps import record_of
from helpers.tiny import Tiny, fit
from torch import Tensor, nn

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, MonitorMixin, Rule
from lightning_module_monitor.errors import MonitorError

RULES = [Rule(kinds="parameter", statistics="norm")]
ODD = ["much", [1.0], None, 1j, torch.ones(2, dtype=torch.complex64), np.ones(2), object(), torch.ones(2, device="meta")]


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


class LogsOddValues(Tiny, MonitorMixin):
    """Logs values that are no numbers, from its ``training_step``."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        monitor = self.get_module_monitor()
        assert monitor is not None
        for number, value in enumerate(ODD):
            monitor.log_scalar(f"own/scalar/of_{number}", value)  # type: ignore[arg-type]
            monitor.log_tensor(f"own/tensor/of_{number}", value)  # type: ignore[arg-type]
            monitor.monitor_context(f"of_{number}", value)  # type: ignore[arg-type]
        monitor.log_tensor("own/tensor/of_a_number", 3)  # type: ignore[arg-type]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("value", [np.bool_(True), np.float32(1.0), np.int64(1), True, Fraction(1), torch.tensor(True)])
def test_a_number_of_any_sort_is_a_value(value: Any) -> None:
    """NumPy's numbers, also its bool, which is no number of Python."""
    with ModuleMonitor(rules=RULES, on_error="raise") as monitor:
        monitor.set_module(nn.Linear(1, 1))
        monitor.begin_step(0)
        monitor.log_scalar("own/value", value)
        record = monitor.end_step()
    assert record is not None
    assert record.values["own/value"] == 1.0


def test_of_a_long_error_the_first_line_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Some messages of torch are a page."""

    def fail(_tensor: Tensor) -> Tensor:
        raise RuntimeError(f"no such operation. {'word ' * 100}\nInstructions for developers")

    with ModuleMonitor(rules=[Rule(kinds="activation", functions={"fails": fail})]) as monitor:
        model = nn.Linear(1, 1)
        monitor.set_module(model)
        monitor.begin_step(0)
        model(torch.ones(1, 1))
        monitor.end_step()
    [message] = caplog.messages
    assert message.startswith("activation '_root_', tensor of shape (1, 1): fails failed with RuntimeError: no such operation. word word")
    assert message.endswith("word [...]. It is recorded as NaN. Logged once; monitor/errors counts them.")
    assert len(message) < 450


def test_a_value_that_is_no_number_does_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is NaN in the record, counted, and reported once for a name and a sort of error; ``on_error: raise`` raises."""
    callback = ModuleMonitorCallback(2, rules=RULES, store=False)
    run = fit(tmp_path, [callback], LogsOddValues)
    assert run.global_step > 2
    assert callback.last_record is not None
    values = callback.last_record.values
    for number in range(len(ODD)):
        for key in (f"own/scalar/of_{number}", f"own/tensor/of_{number}", f"context/of_{number}"):
            assert math.isnan(values[key]), key
    assert values["monitor/errors"] == 3 * len(ODD)
    assert values["own/tensor/of_a_number"] == 3.0
    text = "own 'scalar', a str: of_0 failed with TypeError: expected a real tensor or a number. It is recorded as NaN."
    assert f"{text} Logged once; monitor/errors counts them." in caplog.messages
    with pytest.raises(MonitorError, match=r"a str: of_0 failed with TypeError: expected a real tensor or a number"):
        fit(tmp_path, [ModuleMonitorCallback(2, rules=RULES, store=False, on_error="raise")], LogsOddValues)


@pytest.mark.parametrize("value", ODD)
def test_a_forced_value_that_is_no_number_is_reported(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In a step that is not monitored, too, where no record counts it."""
    with ModuleMonitor(2, rules=RULES) as monitor:
        monitor.set_module(nn.Linear(1, 1))
        monitor.begin_step(1)
        monitor.log_scalar("own/value", value, force=True)
        assert monitor.get_all_metrics() == {}
    [message] = caplog.messages
    assert message.startswith("The value of 'own/value' could not be recorded (")
    assert message.endswith("). Logged once.")


@pytest.mark.parametrize("key", [3, None, b"own/value", ("own", "value")])
def test_a_key_that_is_no_text_is_refused_as_any_other_that_does_not_fit(key: Any) -> None:
    """In every step, monitored or not, so that it is found in the first."""
    with ModuleMonitor(2, rules=RULES) as monitor:
        monitor.set_module(nn.Linear(1, 1))
        for step in range(2):
            monitor.begin_step(step)
            with pytest.raises(ValueError, match=r"key .* does not fit; expected at most three parts .*, e.g. 'own/value'"):
                monitor.log_scalar(key, 1.0)
