"""A run that is resumed from a checkpoint: its file, and the rows of other runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import Callback, CSVLogger, LightningModule, ModelCheckpoint, Trainer
from helpers.stores import digests
from helpers.training import Classifier, loader, seed, trainer
from torch import nn

from lightning_module_monitor import Capture, ModuleMonitorCallback, Rule, load_store

NORM = "parameter/model.weight/norm"


def fit(folder: Path, max_steps: int, resume: Path | None = None, *, logger: Any = False, **options: Any) -> ModuleMonitorCallback:
    """A run that records every step, and saves a checkpoint every five."""
    seed()
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds="parameter", statistics="norm")], **options)
    checkpoint = ModelCheckpoint(folder / f"to_{max_steps}", every_n_train_steps=5, save_top_k=-1, filename="{step}")
    run = trainer(
        folder, [callback, checkpoint], enable_checkpointing=True, max_steps=max_steps, max_epochs=-1, logger=logger, log_every_n_steps=1
    )
    run.fit(Classifier(nn.Linear(6, 3)), loader(), loader(8), ckpt_path=resume)
    return callback


def steps_of(path: Path | str | None) -> list[int]:
    """The steps in a store."""
    assert path is not None
    steps: list[int] = load_store(path).series(NORM)[0].tolist()
    return steps


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The folder of a finished run of twelve steps, with tensors of two steps."""
    fit(tmp_path / "first", 12, capture=Capture(sites="model", steps=[0, 11]))
    return tmp_path / "first"


def test_trials_from_one_checkpoint_have_files_of_their_own(first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each begins with the rows up to the checkpoint; the first run is unchanged; a message and the attributes name its file."""
    caplog.set_level(logging.INFO)
    finished = first / "monitor.h5", first / "monitor.tensors.h5"
    before, whole = digests(*finished), load_store(finished[0]).series(NORM)
    for number in range(3):
        own = tmp_path / f"trial{number}" / "monitor.h5"
        trial = fit(own.parent, 13 + number, first / "to_12" / "step=10.ckpt")
        assert trial.store_path == str(own)
        assert steps_of(own) == list(range(13 + number))
        assert load_store(own).series(NORM)[1][:10].tolist() == whole[1][:10].tolist()
        assert next(one.step for one in load_store(own).tensors()) == 0
        configurations: Any = load_store(own).attributes["configurations"]
        assert [run.get("copied_from") for run in configurations] == [None, str(finished[0])]
        line = f"{own} goes on from step 10; it begins with a copy of 30 rows of earlier steps from {finished[0]}, which is left as it is."
        assert caplog.messages.count(line) == 1
    assert digests(*finished) == before


def test_an_explicit_store_is_where_a_resumed_run_writes(first: Path, tmp_path: Path) -> None:
    """For any path in the checkpoint; resumed again, the run continues that file."""
    before = digests(first / "monitor.h5")
    own = tmp_path / "mine" / "B.h5"
    trial = fit(tmp_path / "second", 16, first / "to_12" / "step=10.ckpt", store=str(own))
    assert trial.store_path == str(own)
    assert steps_of(own) == list(range(16))
    again = fit(tmp_path / "third", 18, tmp_path / "second" / "to_16" / "step=15.ckpt", store=str(own))
    assert again.store_path == str(own)
    assert steps_of(own) == list(range(18))
    assert digests(first / "monitor.h5") == before
    assert sorted(path.name for path in own.parent.iterdir()) == ["B.h5", "B.tensors.h5"]


def test_the_next_version_of_a_logger_has_its_own_file(tmp_path: Path) -> None:
    """Lightning gives a resumed run a new folder: its store begins with the earlier records, and the old store stays."""
    fit(tmp_path, 12, logger=CSVLogger(tmp_path))
    old = tmp_path / "lightning_logs" / "version_0" / "monitor.h5"
    before = digests(old)
    fit(tmp_path, 14, tmp_path / "to_12" / "step=10.ckpt", logger=CSVLogger(tmp_path))
    assert digests(old) == before
    assert steps_of(old) == list(range(12))
    assert steps_of(tmp_path / "lightning_logs" / "version_1" / "monitor.h5") == list(range(14))


def test_the_same_place_goes_on_in_the_same_file_and_keeps_what_runs_again(first: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also with a numbered name; rows and tensors of repeated steps are in a group of the file."""
    caplog.set_level(logging.INFO)
    path = first / "monitor.h5"
    steps, values = load_store(path).series(NORM)
    resumed = fit(first, 14, first / "to_12" / "step=10.ckpt", capture=Capture(sites="model", steps=[13]))
    assert resumed.store_path == str(path)
    assert steps_of(path) == list(range(14))
    assert f"{path} goes on from step 10; 6 rows of steps that run again are now in its group superseded." in caplog.messages
    import h5py

    with h5py.File(path) as file:
        group = file["superseded/1/parameter"]
        assert group["steps"][...].tolist() == steps[10:].tolist() == [10, 11]
        column = group["columns"][...].tolist().index(b"model.weight/norm")
        assert group["values"][:, column].tolist() == values[10:].tolist()
    with h5py.File(first / "monitor.tensors.h5") as file:
        assert list(file["superseded/1/activation/model"]) == ["11"]
    assert sorted({one.step for one in load_store(path).tensors()}) == [0, 13]
    other = fit(first, 13)  # a new run beside it
    assert other.store_path == str(first / "monitor-2.h5")
    numbered = fit(first, 17, first / "to_13" / "step=10.ckpt")
    assert numbered.store_path == str(first / "monitor-2.h5")
    assert steps_of(numbered.store_path) == list(range(17))
    assert steps_of(path) == list(range(14))


class SavesOnException(Callback):
    """Saves a checkpoint when an exception ends the run, as OnExceptionCheckpoint does; it raises one itself, at a step."""

    def __init__(self, path: Path, step: int) -> None:
        self._path, self._step = path, step

    def on_train_batch_end(self, trainer: Trainer, *_args: Any) -> None:
        if trainer.global_step == self._step:
            raise ValueError("the end")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        trainer.save_checkpoint(self._path)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_checkpoint_saved_on_an_exception_is_resumed(is_first: bool, tmp_path: Path) -> None:
    """Also if the monitor has closed the run before: the resumed run goes on in its store, with the same reference."""
    ratio = Rule(kinds="parameter_difference", statistics="ratio")
    for step in (3, 6):
        callback = ModuleMonitorCallback(1, rules=[Rule(kinds="parameter", statistics="norm"), ratio], reference="init")
        others = [SavesOnException(tmp_path / f"{step}.ckpt", step)]
        run = trainer(tmp_path, [*others, callback] if is_first else [callback, *others], max_steps=9, max_epochs=-1)
        seed()
        with pytest.raises(ValueError, match="the end"):
            run.fit(Classifier(nn.Linear(6, 3)), loader(), loader(8), ckpt_path=tmp_path / "3.ckpt" if step == 6 else None)
    assert callback.store_path == str(tmp_path / "monitor.h5")
    # The last step of a run ends for the callbacks behind the one that raises: its record is there in one order alone.
    assert steps_of(callback.store_path) == ([0, 1, 3, 4] if is_first else [0, 1, 2, 3, 4, 5])
    differences = load_store(callback.store_path).series("parameter_difference/model.weight/ratio")[1]
    assert differences[0] == 0
    assert all(difference > 0 for difference in differences[1:])


def test_a_store_that_no_longer_exists_is_reported(first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The resumed run has a separate store, from the resumed step on."""
    (first / "monitor.h5").unlink()
    resumed = fit(tmp_path / "second", 12, first / "to_12" / "step=10.ckpt")
    assert resumed.store_path is not None
    assert steps_of(resumed.store_path) == [10, 11]
    path = str(first / "monitor.h5")
    assert f"The store of the resumed run, {path!r}, does not exist: this run's store begins without its earlier steps." in caplog.messages


@pytest.mark.parametrize("store", ["a file of mine", "no HDF5", 7, None, "", "x" * 5000, "a\0b"])
def test_a_strangers_checkpoint_decides_nothing(first: Path, tmp_path: Path, store: object) -> None:
    """The path in it is at most read."""
    mine = tmp_path / "precious.h5"
    mine.write_bytes((first / "monitor.h5").read_bytes() if store == "a file of mine" else b"notes of mine")
    path = first / "to_12" / "step=10.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["callbacks"]["ModuleMonitorCallback"]["store"] = str(mine) if store in ("a file of mine", "no HDF5") else store
    torch.save(checkpoint, path)
    before = digests(mine)
    trial = fit(tmp_path / "own", 12, path)
    assert trial.store_path == str(tmp_path / "own" / "monitor.h5")
    assert steps_of(trial.store_path) == list(range(0 if store == "a file of mine" else 10, 12))
    assert digests(mine) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["first", "own", "precious.h5"]
