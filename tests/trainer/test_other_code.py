"""Other code runs the model within a batch: only calls of ``training_step``, or of the step of another stage, are recorded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers.lightning_package import Callback
from helpers.other_code import OF_CALLBACK, OF_MODULE, Fitted, Visitor, Visits, assert_same, fresh, is_within, records_of
from helpers.training import seed, trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import ModuleMonitorCallback, Record, Rule

pytestmark = pytest.mark.xdist_group("other_code")  # one worker makes what they share


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


class Skipping(Fitted):
    """Leaves the rest of the first epoch out, from one of its batches on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def on_train_batch_start(self, batch: object, batch_idx: int) -> int | None:
        return -1 if self.trainer.current_epoch == 0 and batch_idx == self.first else None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(("accumulate", "first"), [(1, 2), (2, 2), (2, 3)])
def test_a_batch_that_is_skipped(accumulate: int, first: int, tmp_path: Path) -> None:
    """Nothing of it is in a record: neither its samples nor its values, nor those of the reference, which ran before it was skipped.

    Nor is anything of micro-batches before it in the same step, whose gradients Lightning forgets.
    """
    seen: list[Record] = []
    rules = [Rule(kinds="activation_difference", statistics=["norm", "abs_max"]), Rule(kinds="activation", statistics="abs_max")]
    monitor = ModuleMonitorCallback(1, store=False, on_error="raise", reference="init", rules=rules)
    keep = type("Keep", (Callback,), {"on_train_batch_end": lambda *_args: seen.append(monitor.last_record)})()
    x = torch.ones(40, 6)
    x[8:12] = 50.0  # the third batch
    data = DataLoader(TensorDataset(x, torch.arange(40) % 3), batch_size=4)
    options = {"max_steps": 2 + 2 // accumulate, "max_epochs": 3, "accumulate_grad_batches": accumulate}
    seed()
    trainer(tmp_path, [monitor, keep], limit_val_batches=1, **options).fit(Skipping(first), data, data)
    records = [*{record.step: record for record in seen if record is not None}.values()]
    assert len(records) == options["max_steps"]
    assert [record.values["context/batch_size"] for record in records] == [4.0 * accumulate] * len(records)
    # Each batch but the third, which the second epoch has in its third step, or in its second one.
    is_large = [step == 4 // accumulate for step in range(len(records))]
    assert [record.values["context/input_abs_max"] > 1 for record in records] == is_large
    assert [record.values["activation/model.first/abs_max"] > 10 for record in records] == is_large
    assert {record.values["activation_difference/model.first/norm"] for record in records} == {0.0}  # no weight moves
