"""Files that are removed or renamed while a run writes to them."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import pytest
import torch

from lightning_module_monitor.record import RawTensor, Record
from lightning_module_monitor.sinks.store.reader import load_store
from lightning_module_monitor.sinks.store.tensors import RunFiles
from lightning_module_monitor.sinks.store.writer import Store

RMS = "activation/model.fc/rms"


def record_with_tensor(step: int) -> Record:
    """A value and a raw tensor, both the step."""
    return Record.of(step, {RMS: float(step)}, tensors=[RawTensor("activation", "fc", 0, torch.tensor([float(step)]))])


def test_a_folder_that_is_removed_during_the_run_is_reported_and_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning for each file; later records are in new files at the same paths, and nothing is left beside them."""
    path = tmp_path / "run" / "m.h5"
    written = RunFiles(path, configuration={})
    written.write(record_with_tensor(0))
    shutil.rmtree(path.parent)
    written.write(record_with_tensor(1))
    written.write(record_with_tensor(2))
    written.close()
    removed = "was removed or renamed while the run wrote to it: the records from step 1 on are in a new file. Training goes on."
    assert caplog.messages == [f"The store {name} {removed}" for name in (path, path.with_name("m.tensors.h5"))]
    store = load_store(path)
    assert store[RMS][0].tolist() == store[RMS][1].tolist() == [1, 2]
    assert [tensor.step for tensor in store.tensors()] == [1, 2]
    assert {entry.name for entry in path.parent.iterdir()} == {"m.h5", "m.tensors.h5"}


def test_a_file_that_is_removed_after_the_last_record_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the end of the run, which then has no file; a file that is removed after the end is the user's own business."""
    for removed_first in (True, False):
        written = Store(tmp_path / "m.h5", configuration={})
        written.write(Record.of(0, {RMS: 0.0}))
        if removed_first:
            (tmp_path / "m.h5").unlink()
        written.close()
        assert written.has_begun is not removed_first
    (tmp_path / "m.h5").unlink()
    written.close()
    (message,) = caplog.messages
    assert message.endswith("was removed or renamed while the run wrote to it: its records are not there. Training goes on.")


def test_a_file_that_is_renamed_keeps_its_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is closed at its new path, and later records are in a new file."""
    written = Store(tmp_path / "m.h5", configuration={})
    written.write(Record.of(0, {RMS: 0.0}))
    (tmp_path / "m.h5").rename(tmp_path / "moved.h5")
    written.write(Record.of(1, {RMS: 1.0}))
    written.close()
    assert len(caplog.messages) == 1
    assert [load_store(tmp_path / name)[RMS][0].tolist() for name in ("moved.h5", "m.h5")] == [[0], [1]]
    h5py.File(tmp_path / "moved.h5").close()


def test_a_folder_in_the_place_of_the_file_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Later records are in a file of the next free name."""
    written = Store(tmp_path / "m.h5", configuration={})
    written.write(Record.of(0, {RMS: 0.0}))
    (tmp_path / "m.h5").unlink()
    (tmp_path / "m.h5").mkdir()
    written.write(Record.of(1, {RMS: 1.0}))
    written.close()
    assert written.path == tmp_path / "m-2.h5"
    assert load_store(written.path)[RMS][0].tolist() == [1]
    removed, moved = caplog.messages
    assert "was removed or renamed while the run wrote to it: the records from step 1 on are in a new file" in removed
    assert f"This run writes to {written.path}" in moved
