"""Which step is open: each that the schedule picks, whether or not a rule is due in it, so that modules may record values of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import Classifier, loader, trainer
from torch import Tensor, nn

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, MonitorMixin, Record, RefinedCoordinateCheck, Rule, load_store
from lightning_module_monitor.monitor import NOTHING_RECORDED

KEY = "own/fc/mean"


class Logs(nn.Module, MonitorMixin):
    """Records the mean of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        monitor = self.get_module_monitor()
        if self.is_monitoring and monitor is not None:
            monitor.log_tensor(KEY, y)
        return y


def run(monitor: ModuleMonitor, net: nn.Module, num_steps: int) -> tuple[list[bool], list[Record | None]]:
    """What ``begin_step`` returns in each step of a loop, and its record."""
    begun, records = [], []
    for step in range(num_steps):
        begun.append(monitor.begin_step(step))
        assert begun[-1] is monitor.is_step_monitored(step) is monitor.is_monitoring()
        net(torch.ones(2, 6))
        records.append(monitor.end_step())
    return begun, records


def test_without_rules_the_values_of_modules_are_recorded() -> None:
    """In each step that the schedule picks, and in no other; the value is the mean in float64."""
    net = Logs()
    with ModuleMonitor(lambda step: step % 2 == 0) as monitor:
        monitor.set_module(net)
        begun, records = run(monitor, net, 4)
    assert begun == [True, False, True, False]
    assert [record is not None for record in records] == begun
    mean = float(nn.functional.linear(torch.ones(2, 6), net.fc.weight, net.fc.bias).detach().double().mean())
    for record in records[::2]:
        assert record is not None
        assert record.values == {KEY: pytest.approx(mean, rel=1e-6), "monitor/errors": 0.0}


def test_a_rule_with_a_cadence_of_its_own_closes_no_step() -> None:
    """Rules are due where they say; values of modules have the monitor's schedule, and come along where a rule is due besides."""
    net = Logs()
    rule = Rule(kinds="activation", sites="fc", statistics="mean", every_n_steps=3)
    with ModuleMonitor(2, rules=[rule]) as monitor:
        monitor.set_module(net)
        begun, records = run(monitor, net, 5)
    assert begun == [True, False, True, True, True]
    assert [KEY in record.values for record in records if record is not None] == [True] * 4
    assert ["activation/fc/mean" in record.values for record in records if record is not None] == [True, False, True, False]


def test_in_the_callback_too(tmp_path: Path) -> None:
    """With rules that are seldom due, own values have the cadence of ``every_n_steps``."""
    rule = Rule(kinds="activation", sites="model.fc", statistics="mean", every_n_steps=4)
    callback = ModuleMonitorCallback(2, rules=[rule])
    trainer(tmp_path, [callback], max_steps=6).fit(Classifier(Logs()), loader(), loader(8))
    store = load_store(str(callback.store_path))
    assert store.series(KEY)[0].tolist() == [0, 2, 4]
    assert store.series("activation/model.fc/mean")[0].tolist() == [0, 4]


def test_what_is_set_and_which_step_is_open_can_be_read() -> None:
    """Module, reference and step, ``None`` where there is none; in a step that is not monitored, too, as in torch-module-monitor."""
    net, reference = Logs(), Logs()
    monitor = ModuleMonitor(2)
    assert (monitor.module, monitor.reference_module, monitor.current_step) == (None, None, None)
    monitor.set_module(net)
    assert (monitor.module, monitor.reference_module, monitor.current_step) == (net, None, None)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    assert monitor.reference_module is check.reference_module is reference
    assert check.module is net
    for step in (4, 5):
        assert monitor.begin_step(step) is (step == 4)
        assert monitor.current_step == step
        monitor.engine.begin_stage("validation", 7)
        assert monitor.current_step == 7
        monitor.engine.end_stage()
        assert monitor.current_step == step
        monitor.end_step()
        assert monitor.current_step is None
    monitor.begin_step(6)
    monitor.remove_reference_module()
    assert (check.reference_module, monitor.current_step) == (None, None)
    monitor.begin_step(7)
    monitor.close()
    assert (monitor.module, monitor.reference_module, monitor.current_step, check.module) == (None, None, None, None)


@pytest.mark.parametrize("name", ["module", "reference_module", "current_step"])
def test_they_cannot_be_set(name: str) -> None:
    """There are methods for that."""
    with pytest.raises(AttributeError, match=name):
        setattr(ModuleMonitor(), name, None)


def test_a_forward_knows_its_step_in_a_run(tmp_path: Path) -> None:
    """In the callback as in a plain loop, at steps that are monitored and at others."""
    steps = []

    class Reads(nn.Module, MonitorMixin):
        def forward(self, x: Tensor) -> Tensor:
            monitor = self.get_module_monitor()
            assert monitor is not None
            steps.append(monitor.current_step)
            return x

    net = nn.Sequential(nn.Linear(6, 3), Reads())
    run = trainer(tmp_path, [ModuleMonitorCallback(2, store=False)], max_steps=4, accumulate_grad_batches=2, limit_val_batches=0)
    run.fit(Classifier(net), loader(), loader(8))
    assert steps == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("rules", [(), []])
def test_a_monitor_that_records_nothing_says_so_once(rules: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The line says what to give it, ``None`` for the default of the callback, which records something."""
    for given, num_lines in ((rules, 1), (None, 0)):
        caplog.clear()
        with ModuleMonitor(rules=given) as monitor:
            monitor.set_module(model := nn.Linear(2, 1))
            for step in range(2):
                monitor.begin_step(step)
                model(torch.ones(1, 2)).sum().backward()
                monitor.monitor_gradients()
                monitor.end_step()
        assert caplog.messages == [NOTHING_RECORDED] * num_lines
