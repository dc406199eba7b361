"""What a step costs in a Trainer, counted in calls of Python and of builtins: a number that no clock enters."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from helpers.accelerator import as_accelerator
from helpers.deep import NUM_TENSORS, fit, operations_of_steps
from helpers.documents import ROOT
from helpers.lightning_package import Callback
from torch import nn
from torch.profiler import ProfilerActivity

from lightning_module_monitor import Health, ModuleMonitor, ModuleMonitorCallback, Rule, TorchWatcher
from lightning_module_monitor.health.alerts import AlertRule, matching
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.keys import Columns, Key
from lightning_module_monitor.record import Record

ANY = re.compile(".*")


class Counting(Callback):
    """Counts the calls from the first callback's ``on_train_batch_start`` to the last one's ``on_train_batch_end``."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        """Number of calls in each step."""
        self.end = _EndOfCount()

    def on_train_batch_start(self, *_args: object) -> None:
        self.calls.append(0)
        sys.setprofile(self._count)

    def _count(self, _frame: object, event: str, _argument: object) -> None:
        self.calls[-1] += event in ("call", "c_call")


class _EndOfCount(Callback):
    def on_train_batch_end(self, *_args: object) -> None:
        sys.setprofile(None)


def calls_of_steps(folder: Path, callback: ModuleMonitorCallback | None) -> tuple[float, float]:
    """Calls in a monitored step and in another one, the means of 15 steps each, of a run that is monitored in every second step."""
    counting = Counting()
    try:
        fit(folder, [counting, *([] if callback is None else [callback]), counting.end], 40)
    finally:
        sys.setprofile(None)
    return mean(counting.calls[10:39:2]), mean(counting.calls[11:40:2])


@pytest.mark.parametrize(
    ("options", "most", "most_elsewhere"),
    [
        # 31 are the kernel's own look at a tensor, 11 torch's to put a hook on and take it off; before records were vectors it was 84.
        ({"health": False}, 58, 140),
        # 12 for the judge, the facts and the units of 64 ReLUs; before it was 120. In other steps the loss and gradients are looked at.
        ({}, 70, 435),
    ],
    ids=["without health", "default"],
)
def test_calls_of_a_step_in_a_trainer(
    options: dict[str, Any], most: float, most_elsewhere: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond a run without the callback: for each recorded tensor in a monitored step, and in another step as a whole."""
    caplog.set_level(logging.ERROR, "lightning.pytorch")
    plain, plain_elsewhere = calls_of_steps(tmp_path / "plain", None)
    found, elsewhere = calls_of_steps(tmp_path / "monitored", ModuleMonitorCallback(2, **options))
    assert (found - plain) / NUM_TENSORS < most, (found, plain)
    assert elsewhere - plain_elsewhere < most_elsewhere, (elsewhere, plain_elsewhere)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "`health: false`": {"health": False},
    "default": {},
    "`health: {nonfinite: always}`": {"health": Health(nonfinite="always")},
    "`health: {watch: [all]}`": {"health": Health(watch=["all"])},
}
BUDGET = 450
"""What health may add to the operations of a monitored step, and 12 to those of another one."""


def documented(configuration: str) -> list[int]:
    """The counts of a configuration in docs/cost.md: operations of a monitored step and of another one, then kernels."""
    row = re.search(rf"^\| {re.escape(configuration)} \|(.+)\|$", (ROOT / "docs" / "cost.md").read_text(), re.MULTILINE)
    assert row is not None
    return [int(count) for count in row[1].split("|")]


def is_about(found: int, expected: int) -> bool:
    """At most the documented number, and not much less, or the document is out of date."""
    return 0.9 * expected - 5 <= found <= expected


def test_health_keeps_to_its_budget_on_an_accelerator() -> None:
    """By the documented counts, to which the tests below compare what is counted."""
    without, default, always = (documented(name) for name in list(CONFIGURATIONS)[:3])
    assert default[0] - without[0] <= BUDGET
    assert always[0] - without[0] <= BUDGET
    assert default[1] - without[1] <= 12


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_operations_of_a_step_on_an_accelerator(configuration: str, tmp_path: Path) -> None:
    """Beyond a run without the callback: as documented. The compiled kernel measures, which is no operation of torch."""
    with as_accelerator() as transfers:
        plain, plain_elsewhere = operations_of_steps(None, tmp_path / "plain")
        assert transfers == []
        callback = ModuleMonitorCallback(2, **CONFIGURATIONS[configuration])
        found, elsewhere = operations_of_steps(callback, tmp_path / "monitored")
    most, most_elsewhere, *_kernels = documented(configuration)
    assert is_about(found - plain, most)
    assert is_about(elsewhere - plain_elsewhere, most_elsewhere)
    assert len(transfers) == (6 + 12 if "always" in configuration else 6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_kernels_of_a_step_on_a_cuda_device(configuration: str, tmp_path: Path) -> None:
    """The same for the kernels that are launched."""
    options: dict[str, Any] = {"activity": ProfilerActivity.CUDA, "accelerator": "cuda", "devices": 1}
    plain, plain_elsewhere = operations_of_steps(None, tmp_path / "plain", **options)
    found, elsewhere = operations_of_steps(ModuleMonitorCallback(2, **CONFIGURATIONS[configuration]), tmp_path / "monitored", **options)
    _most, _elsewhere, most, most_elsewhere = documented(configuration)
    assert (is_about(found - plain, most), is_about(elsewhere - plain_elsewhere, most_elsewhere)) == (True, True), (
        found - plain,
        elsewhere - plain_elsewhere,
    )


def test_histograms_take_one_transfer() -> None:
    """Those of all parameters and gradients of a step together."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    monitor = ModuleMonitor(rules=[Rule(kinds=["parameter", "gradient"], statistics="hist")])
    monitor.set_module(model)
    with as_accelerator() as transfers:
        monitor.begin_step(0)
        model(torch.randn(4, 8)).square().mean().backward()
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        record = monitor.end_step()
    monitor.close()
    assert record is not None
    assert (len(transfers), len(record.histograms)) == (1, 6 + 6)


class Values:
    """A logger that keeps the values of the last step."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.last = metrics


def test_the_watcher_takes_one_transfer() -> None:
    """For five statistics of outputs, their gradients, parameters and theirs; and the monitor's own count of errors."""
    model, logger = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), Values()
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = TorchWatcher(model, logger, tensor_stats=["mean", "std", "norm", "min", "max"])
    with as_accelerator() as transfers:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        watcher.watch(0, track_parameters=True)
    watcher.close()
    assert (len(transfers), len(logger.last)) == (1, 5 * (4 + 4 + 6 + 6) + 1)


def calls_of_judge(num_rules: int, num_keys: int) -> int:
    """Calls of a judge for a record that is like those before it, by rules that judge all of its keys."""
    columns = Columns(Key("gradient", f"layer{number}.weight", "norm") for number in range(num_keys))
    rules = [AlertRule(f"rule {limit}", matching([ANY]), above=limit + 1e3, for_steps=2) for limit in range(num_rules)]
    judge, calls = Judge(rules, [key.site for key in columns.keys]), 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for step in range(4):
        record = Record(step, columns, np.arange(num_keys) + 1.0)
        sys.setprofile(count if step == 3 else None)
        try:
            judge.observe(record)
        finally:
            sys.setprofile(None)
    return calls


@pytest.mark.parametrize("num_keys", [10, 1000])
def test_a_further_rule_costs_a_constant_number_of_calls(num_keys: int) -> None:
    """Whatever the number of its keys."""
    few, many = calls_of_judge(5, num_keys), calls_of_judge(50, num_keys)
    assert (many - few) / 45 <= 20, (few, many)
    assert few == calls_of_judge(5, 20)
