"""Other code runs the model within a batch: only calls of ``training_step``, or of the step of another stage, are recorded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from helpers.other_code import OF_CALLBACK, OF_MODULE, Visitor, Visits, assert_same, fresh, is_within, records_of

from lightning_module_monitor import Record


@pytest.fixture(scope="module", params=[False, True], ids=["automatic", "manual"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, list[Record]]:
    """Whether optimization is manual, and the records without other code."""
    return request.param, records_of(tmp_path_factory.mktemp("undisturbed"), fresh(is_manual=request.param))


@pytest.mark.parametrize("is_first", [True, False], ids=["after us", "before us"])
def test_events_of_callbacks(undisturbed: tuple[bool, list[Record]], is_first: bool, tmp_path: Path) -> None:
    """In each event of a callback the model runs; nothing of that is recorded."""
    is_manual, records = undisturbed
    num_visits = {}
    for event in OF_CALLBACK:
        visits = Visits()
        others = records_of(tmp_path, fresh(is_manual=is_manual), Visitor(event, visits), is_first=is_first)
        assert_same(records, others)
        num_visits[event] = visits.num
    expected = {"on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward", "on_before_optimizer_step"}
    assert {event for event, num in num_visits.items() if num} >= expected - ({"on_before_optimizer_step"} if is_manual else set())


def test_hooks_of_the_module(undisturbed: tuple[bool, list[Record]], tmp_path: Path) -> None:
    """The same in hooks and overrides of the LightningModule."""
    is_manual, records = undisturbed
    num_visits: dict[str, int] = {}
    for event in OF_MODULE:
        visits = Visits()
        if not is_within(event, is_manual):
            assert_same(records, records_of(tmp_path, fresh(event, visits, is_manual)))
        num_visits[event] = visits.num
    expected = {"on_train_batch_start", "on_before_backward", "transfer_batch_to_device"}
    expected |= set() if is_manual else {"optimizer_step", "configure_gradient_clipping", "backward", "optimizer_zero_grad"}
    assert {event for event, num in num_visits.items() if num} >= expected


def test_a_call_within_the_step_counts(tmp_path: Path) -> None:
    """Whatever it is for."""
    [record, *_rest] = records_of(tmp_path, fresh("log", Visits()))
    assert record.values["activation/model.first/abs_max"] > 20
    assert math.isfinite(record.values["activation/model.first/rms"])
