"""A callback that several Trainers use, or copy: its results are those of the latest run that recorded."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.lightning_package import LOGGER, Trainer
from helpers.tiny import Tiny, fit, loader, trainer

from lightning_module_monitor import Alert, ModuleMonitorCallback, load_store

STAGES: dict[str, Callable[[Trainer], object]] = {
    "validate": lambda used: used.validate(Tiny(), loader(2)),
    "predict": lambda used: used.predict(Predicting(), loader(2)),
    "fast_dev_run": lambda used: used.fit(Tiny(), loader(2), loader(2)),
}


class Predicting(Tiny):
    def predict_step(self, batch: list[Any], batch_idx: int) -> Any:
        return self.model(batch[0])


def alarmed(**options: Any) -> ModuleMonitorCallback:
    """A callback with a finding in the first step of every fit."""
    return ModuleMonitorCallback(1, alerts=[Alert(keys="gradient/.*/norm", above=0.0, name="any")], **options)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("stages", [["train"], ["train", "validate", "predict"]])
def test_results_of_a_fit_stay_while_other_trainers_use_the_callback(stage: str, stages: list[str], tmp_path: Path) -> None:
    """The path of the store, the findings and the diagnoses are those of the fit until another run writes another store."""
    callback = alarmed(stages=stages)
    fit(tmp_path / "fit", [callback])
    findings, last_record = list(callback.findings), callback.last_record
    assert (callback.store_path, len(findings) > 0) == (str(tmp_path / "fit" / "monitor.h5"), True)
    other = trainer(tmp_path / stage, [callback], fast_dev_run=stage == "fast_dev_run")
    STAGES[stage](other)
    records = stage in stages
    assert callback.store_path == str(tmp_path / (stage if records else "fit") / "monitor.h5")
    assert list(load_store(tmp_path / "fit" / "monitor.h5").series("gradient/model.0.weight/norm")[0]) == list(range(6))
    if stage != "fast_dev_run":  # which is a fit with further findings
        assert list(callback.findings) == findings
        assert (callback.last_record is last_record) != records


def test_a_checkpoint_of_another_trainer_names_no_store_of_the_first(tmp_path: Path) -> None:
    """Until the second run has recorded something, a checkpoint has no store to continue."""
    callback = alarmed()
    fit(tmp_path / "first", [callback])
    second = trainer(tmp_path / "second", [callback], max_steps=0)
    second.fit(Tiny(), loader(2), loader(2))
    assert callback.state_dict()["store"] is None
    assert callback.store_path == str(tmp_path / "first" / "monitor.h5")


@pytest.mark.parametrize("generations", [1, 2])
def test_a_callback_shows_the_run_of_its_deep_copy(generations: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a library trains with copies, the user's object shows store, record and findings of the copy; the log names the store."""
    callback = alarmed()
    before = repr(callback)
    used = callback
    for _generation in range(generations):
        used = copy.deepcopy(used)
    with caplog.at_level(logging.INFO, LOGGER):
        fit(tmp_path, [used])
    store = str(tmp_path / "monitor.h5")
    assert (callback.store_path, callback.last_record) == (store, used.last_record)
    assert callback.last_record is not None
    assert callback.last_record.step == 5
    assert list(callback.findings) == list(used.findings) != []
    assert [str(diagnosis) for diagnosis in callback.diagnose()] == [str(diagnosis) for diagnosis in used.diagnose()]
    assert "of a copy that was trained with" not in before + repr(used)
    assert repr(callback) == repr(used)[:-1] + ", of a copy that was trained with)"
    assert sum(store in record.message for record in caplog.records) == 1
    # The next run of the callback itself is shown again.
    fit(tmp_path / "own", [callback])
    assert callback.store_path == str(tmp_path / "own" / "monitor.h5")
    assert used.store_path == store


def test_a_copy_that_runs_nothing_is_not_shown(tmp_path: Path) -> None:
    """Neither a temporary copy, as with a copy of the model that holds the callback, nor a copy that only predicts."""
    callback = alarmed()
    fit(tmp_path, [callback])
    copied = copy.deepcopy(callback)
    trainer(tmp_path / "other", [copied]).predict(Predicting(), loader(2))
    assert callback.store_path == str(tmp_path / "monitor.h5")
    assert "of a copy" not in repr(callback)


def test_a_pickled_callback_shows_its_own_run(tmp_path: Path) -> None:
    """A pickle of a callback holds no other callback, and no run of another callback."""
    callback = alarmed()
    used = copy.deepcopy(callback)
    fit(tmp_path, [used])
    size = len(pickle.dumps(alarmed()))
    again = pickle.loads(pickle.dumps(callback))  # our own bytes
    assert (again.store_path, again.last_record, list(again.findings)) == (None, None, [])
    assert len(pickle.dumps(callback)) < 1.1 * size
    del used
    gc.collect()
    assert callback.store_path == str(tmp_path / "monitor.h5")
