"""Steps by the clock: a monitor with a clock that is set by hand; every other schedule is a function of the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.tiny import KeepRecords, Tiny, fit
from torch import nn

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, Rule
from lightning_module_monitor.config import schedule
from lightning_module_monitor.config.schedule import parse_schedule

RULES = [Rule(kinds="parameter", statistics="norm")]


class SetClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetClock]:
    """The clock of this process."""
    clock = SetClock()
    monkeypatch.setattr(schedule.time, "monotonic", clock)
    return clock


def run(monitor: ModuleMonitor, clock: SetClock, num_steps: int, duration: Callable[[int], float]) -> dict[int, float]:
    """The moments of the steps that are monitored in a loop, by step."""
    moments = {}
    for step in range(num_steps):
        is_monitored = monitor.begin_step(step)
        clock.time += duration(step)
        monitor.monitor_parameters()
        assert (monitor.end_step() is not None) == is_monitored
        if is_monitored:
            moments[step] = clock.time
    return moments


@pytest.mark.parametrize("seconds", [0.02, 0.7, 7.0, 200.0])
@pytest.mark.parametrize("minutes", [5, 0.5])
def test_steps_are_as_far_apart_as_the_clock_asks(minutes: float, seconds: float, clock: SetClock) -> None:
    """After the first steps, each at most ten times as far away as the one before, the interval is the shortest of at least that time."""
    with ModuleMonitor({"minutes": minutes}, rules=RULES) as monitor:
        monitor.set_module(nn.Linear(2, 2))
        moments = run(monitor, clock, 40_000 if seconds < 1 else 400, lambda step: seconds + 60 * (step == 0))
    first = [0, 1, 11, 111, 1111, 11111]
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    num_first = sum(step * seconds < 60 * minutes for step in (1, 10, 100, 1000, 10_000))
    assert list(moments)[: num_first + 1] == first[: num_first + 1]
    assert len(gaps) > num_first
    for (one, start), (other, end) in [*pairwise(moments.items())][num_first:]:
        assert end - start >= 60 * minutes - 1e-6
        assert end - start < 60 * minutes + seconds or other == one + 1


def test_an_interval_in_which_steps_become_slower_is_longer(clock: SetClock) -> None:
    """The approximation: the number of the next step stands, and the interval after it is right again."""
    with ModuleMonitor({"minutes": 1}, rules=RULES) as monitor:
        monitor.set_module(nn.Linear(2, 2))
        moments = run(monitor, clock, 500, lambda step: 1.0 if step <= 111 else 3.0)
    assert list(moments)[:6] == [0, 1, 11, 71, 131, 167]
    assert moments[131] - moments[71] == pytest.approx(40 + 20 * 3)
    assert list(moments)[6:9] == [187, 207, 227]


def test_it_begins_anew_with_a_run_and_with_a_lower_step(clock: SetClock) -> None:
    """A step that is run again after a resume is monitored; a copy of a monitor shares nothing with it."""
    monitor = ModuleMonitor({"minutes": 1}, rules=RULES)
    for _time in range(2):
        monitor.set_module(nn.Linear(2, 2))
        assert list(run(monitor, clock, 150, lambda _step: 1.0)) == [0, 1, 11, 71, 131]
        assert monitor.begin_step(100)
        assert monitor.end_step() is not None
        other = copy.deepcopy(monitor)
        monitor.close()
        other.set_module(nn.Linear(2, 2))
        assert list(run(other, clock, 30, lambda _step: 1.0)) == [0, 1, 11]


def test_a_rule_with_steps_of_its_own_leaves_the_clock_alone(clock: SetClock) -> None:
    """Its steps are monitored besides, and choose nothing."""
    rules = [*RULES, Rule(kinds="parameter", statistics="rms", every_n_steps=25)]
    with ModuleMonitor({"minutes": 1}, rules=rules) as monitor:
        monitor.set_module(nn.Linear(2, 2))
        assert list(run(monitor, clock, 140, lambda _step: 1.0)) == [0, 1, 11, 25, 50, 71, 75, 100, 125, 131]


def test_a_fit_by_the_clock(tmp_path: Path, clock: SetClock) -> None:
    """The record has the time of a step, whose key is planned; training is that without the callback; the log has the schedule."""

    class Timed(Tiny):
        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            clock.time += 10.0

    callback = ModuleMonitorCallback({"minutes": 1}, rules=RULES, store=False, callback_metrics="monitor/seconds_per_step")
    kept = KeepRecords(callback)
    trainer = fit(tmp_path, [callback, kept], Timed, max_epochs=5)
    plain = fit(tmp_path, [], Tiny, max_epochs=5)
    assert [record.step for record in kept.records] == [0, 1, 7, 13, 19, 25]
    assert kept.series()["monitor/seconds_per_step"] == dict.fromkeys([1, 7, 13, 19, 25], 10.0)
    assert trainer.callback_metrics["monitor/seconds_per_step"] == 10.0
    for one, other in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_dry_run_by_the_clock_has_no_number_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not known how long a step takes."""
    fit(tmp_path, [ModuleMonitorCallback({"minutes": 5}, rules=RULES, dry_run=True)], max_steps=3)
    assert "of numbers in the store for each monitored step (every 5 minutes)" in capsys.readouterr().out


def test_schedules_in_words() -> None:
    """As the line at the start of a fit has them."""
    words = {"log": "at steps 1, 2, 5, 10, ...", 1: "every step", 7: "every 7 steps"}
    assert {value: str(parse_schedule(value, "")) for value in words} == words
    assert str(parse_schedule({"minutes": 0.5}, "", may_be_by_clock=True)) == "every 0.5 minutes"
