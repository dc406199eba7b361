"""The limit of the time that monitoring may take, with clocks that are set by hand."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import LOGGER
from helpers.tiny import KeepRecords, Tiny, fit
from torch import Tensor

from lightning_module_monitor import Capture, ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.trainer.overhead import CLOSEST, HostClock, Overhead


class SetClock(HostClock):
    """A clock that is set by hand. A timestamp is pending while it is later than :attr:`done`."""

    def __init__(self) -> None:
        self.time = 0.0
        self.done = math.inf

    def now(self) -> float:
        return self.time

    def has_passed(self, timestamp: float) -> bool:
        return timestamp <= self.done

    def seconds(self, start: float, end: float) -> float:
        return end - start


def run(overhead: Overhead, clock: SetClock, num_steps: int, cost: float, num_batches: int = 1) -> list[int]:
    """Run steps of a second a batch plus the cost of monitoring; the first monitored step takes a minute more.

    A second lies between batches.

    Returns:
        The monitored steps.
    """
    monitored = []
    for step in range(num_steps):
        is_monitored = overhead.allows(step)
        for batch in range(num_batches):
            overhead.begin_batch()
            if batch == 0:
                overhead.begin_step(step, is_monitored=is_monitored)
            clock.time += 1 + is_monitored * cost / num_batches
            if is_monitored and batch == num_batches - 1:
                clock.time += 60 * (not monitored)
                monitored.append(step)
                fraction = overhead.fraction()
                if fraction is not None:
                    overhead.decide(fraction)
            overhead.end_batch(ends_step=batch == num_batches - 1)
            clock.time += 1  # the time between batches does not count
    return monitored


@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("limit", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("cost", [0.0, 0.05, 0.4, 7.0])
def test_monitored_steps_are_as_far_apart_as_the_limit_asks(cost: float, limit: float, num_batches: int) -> None:
    """The closed form: cost / (cost + gap * plain) <= limit for the smallest gap, once the cost is known."""
    clock = SetClock()
    overhead = Overhead(limit, clock)
    monitored = run(overhead, clock, 4000, cost, num_batches)
    gap = max(CLOSEST, math.ceil(cost * (1 - limit) / limit / num_batches - 1e-9))
    assert overhead.closest == gap
    assert {later - earlier for earlier, later in pairwise(monitored[3:])} == {gap}
    # Before the cost is known, every second step is monitored.
    assert monitored[:3] == [0, CLOSEST, 2 * CLOSEST]
    fraction = overhead.fraction()
    assert fraction == pytest.approx(cost / (cost + gap * num_batches), abs=1e-9)
    assert fraction <= limit + 1e-9


@pytest.mark.parametrize("period", [1, 2, 3, 5, 7])
def test_the_limit_holds_where_only_some_monitored_steps_cost(period: int) -> None:
    """A cheap rule is due in every step, an expensive rule in few steps: their share of all the time is the limit."""
    clock, spent, num_steps = SetClock(), 0, 4000
    overhead = Overhead(0.1, clock)
    for step in range(num_steps):
        is_monitored = overhead.allows(step)
        cost = 10 * (is_monitored and step % period == 0)
        overhead.begin_batch()
        overhead.begin_step(step, is_monitored=is_monitored)
        clock.time += 1 + cost
        spent += cost
        fraction = overhead.fraction() if is_monitored else None
        if fraction is not None:
            overhead.decide(fraction)
        overhead.end_batch(ends_step=True)
    assert spent / (spent + num_steps) == pytest.approx(0.1, rel=0.1)


def test_a_device_that_is_behind_is_not_waited_for() -> None:
    """Its times are known later."""
    clock = SetClock()
    overhead = Overhead(0.1, clock)
    clock.done = 0.0
    assert run(overhead, clock, 20, cost=3.0) == list(range(0, 20, CLOSEST))
    assert overhead.fraction() is None
    clock.done = math.inf
    assert overhead.fraction() == pytest.approx(3 / (3 + CLOSEST))


def test_a_missing_fraction_changes_nothing() -> None:
    """A step with an error has none; and a step that is repeated after a resume is allowed."""
    clock = SetClock()
    overhead = Overhead(0.1, clock)
    run(overhead, clock, 20, cost=3.0)
    closest = overhead.closest
    for fraction in (math.nan, -1.0, 1.0, math.inf):
        overhead.decide(fraction)
    assert overhead.closest == closest > CLOSEST
    assert not overhead.allows(19)
    assert overhead.allows(3)


def test_steps_that_take_no_time_have_no_share() -> None:
    """A coarse clock may measure 0 seconds: the share is 0, without a division by it."""
    clock = SetClock()
    overhead = Overhead(0.1, clock)
    for step in range(6):
        overhead.begin_batch()
        overhead.begin_step(step, is_monitored=step % 2 == 0)
        overhead.end_batch(ends_step=True)
    assert overhead.fraction() == 0.0


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetClock]:
    """The process's clock stands still until a test sets it."""
    clock = SetClock()
    monkeypatch.setattr(HostClock, "now", lambda _self: clock.time)
    return clock


def test_a_run_leaves_steps_out_and_logs_it(virtual_time: SetClock, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step takes a second, a metric half a second for each of the two micro-batches: 10 % allow it every ninth step."""

    class Slow(Tiny):
        def training_step(self, *args: Any) -> Tensor:
            virtual_time.time += 0.5
            return super().training_step(*args)

    def metric(output: Tensor) -> Tensor:
        virtual_time.time += 0.5
        return output.mean()

    rule = Rule(kinds="activation", sites="model.0", functions={"slow": metric})
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[rule], max_overhead=0.1)
    keep = KeepRecords(callback)
    with caplog.at_level(logging.INFO, LOGGER):
        fit(tmp_path, [callback, keep], Slow, max_steps=60, max_epochs=-1, accumulate_grad_batches=2)
    steps = [record.step for record in keep.records]
    assert steps == [0, 2, 4, *range(13, 60, 9)]
    key = "monitor/overhead_fraction"
    assert [record.values.get(key) for record in keep.records[:2]] == [None, None]
    assert keep.records[2].values[key] == pytest.approx(1 / (1 + 2))
    assert [record.values[key] for record in keep.records[3:]] == pytest.approx([1 / (1 + 9)] * len(steps[3:]))
    messages = [message for message in caplog.messages if "max_overhead" in message]
    assert messages == ["max_overhead=0.1: at most one step in 2 is monitored, from step 1 on. This is logged once."]
    assert callback.store_path is not None
    assert load_store(callback.store_path).series(key)[0].tolist() == steps[2:]


def test_a_schedule_within_the_limit_is_left_as_it_is(virtual_time: SetClock, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is logged either."""

    class Slow(Tiny):
        def training_step(self, *args: Any) -> Tensor:
            virtual_time.time += 1.0
            return super().training_step(*args)

    callback = ModuleMonitorCallback(every_n_steps=5, max_overhead=0.02)
    keep = KeepRecords(callback)
    with caplog.at_level(logging.INFO, LOGGER):
        fit(tmp_path, [callback, keep], Slow, max_steps=30, max_epochs=-1)
    assert [record.step for record in keep.records] == list(range(0, 30, 5))
    assert keep.records[-1].values["monitor/overhead_fraction"] == 0.0
    assert not any("max_overhead" in message for message in caplog.messages)


def test_raw_tensors_of_a_step_that_is_left_out_are_logged(
    virtual_time: SetClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names, once, a captured step that is not in the file."""
    capture = Capture(sites="model.2", steps=[4, 5, 7, 9])
    rule = Rule(kinds="activation", statistics="norm")
    callback = ModuleMonitorCallback(every_n_steps=4, rules=[rule], capture=capture, max_overhead=0.5)
    with caplog.at_level(logging.WARNING, LOGGER):
        fit(tmp_path, [callback], max_steps=12, max_epochs=-1)
    [message] = [message for message in caplog.messages if "capture" in message]
    assert message.startswith("max_overhead=0.5: capture has step 5, less than 2 steps after another that was monitored;")
    assert callback.store_path is not None
    assert {tensor.step for tensor in load_store(callback.store_path).tensors()} == {4, 7, 9}


@pytest.mark.gpu
def test_the_device_measures_its_time() -> None:
    """By events, without waiting, the time of the kernels in between is measured."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from lightning_module_monitor.trainer.overhead import clock_of

    clock = clock_of(torch.device("cuda"))
    start = clock.now()
    torch.cuda._sleep(200_000_000)
    end = clock.now()
    assert not clock.has_passed(end)
    torch.cuda.synchronize()
    assert clock.has_passed(end)
    assert clock.seconds(start, end) > 0.01
