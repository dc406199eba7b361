"""A path of a store: the file, a run's folder, a log directory."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import h5py
import pytest
from helpers.stores import open_store, write_store

from lightning_module_monitor import load_store
from lightning_module_monitor.cli import main

SERIES = {"activation/fc/rms": [1.0, 2.0], "monitor/errors": [0.0, 0.0]}


def make_run(folder: Path, *, written_at: int, name: str = "monitor.h5") -> Path:
    """A store in a new folder, with this modification time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write_store(folder / name, SERIES)
    os.utime(path, (written_at, written_at))
    return path


def test_the_folder_of_a_run_is_its_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Raw tensors beside it, other HDF5 files and empty files are ignored; without a warning, because there is one run."""
    path = make_run(tmp_path / "version_0", written_at=1)
    tensors = path.with_name("monitor.tensors.h5")
    with h5py.File(path) as file, h5py.File(tensors, "w") as copy:
        copy.attrs.update({**file.attrs, "content": "raw tensors"})
    with h5py.File(path.with_name("weights.h5"), "w") as file:
        file["kernel"] = [1.0]
    path.with_name("empty.h5").touch()
    assert load_store(path.parent).path == path
    assert load_store(str(tmp_path)).path == path
    assert caplog.messages == []


def test_of_several_runs_the_newest_is_used_and_all_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one warning, newest first, in the order of time and not of names."""
    oldest = make_run(tmp_path / "version_2", written_at=1)
    newest = make_run(tmp_path / "version_1", written_at=3, name="monitor-2.h5")
    middle = make_run(tmp_path / "deep" / "down" / "version_0", written_at=2)
    assert load_store(tmp_path).path == newest
    (message,) = caplog.messages
    assert message.splitlines() == [
        f"{tmp_path} has 3 runs; the newest is used: {newest}. Give the path of a file for another run:",
        f"  {middle}",
        f"  {oldest}",
    ]
    caplog.clear()
    for number in range(12):
        make_run(tmp_path / f"many_{number}", written_at=10 + number)
    load_store(tmp_path)
    (message,) = caplog.messages
    assert [*message.splitlines()[-2:], len(message.splitlines())] == [f"  {tmp_path / 'many_1' / 'monitor.h5'}", "  and 4 more", 12]


def test_a_damaged_newest_run_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An older run in its place would be a wrong answer."""
    make_run(tmp_path / "version_0", written_at=1)
    damaged = tmp_path / "version_1" / "monitor.h5"
    damaged.parent.mkdir()
    damaged.write_bytes(b"no HDF5")
    with caplog.at_level(logging.CRITICAL), pytest.raises(ValueError, match=r"version_1.* is not a readable HDF5 file"):
        load_store(tmp_path)


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    """The error has the folder and the expected file."""
    with pytest.raises(FileNotFoundError, match=r"no store at .*\. No folder from here down has a run's \.h5 file"):
        load_store(tmp_path)


def test_commands_take_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also during the run; a command writes its file beside the store."""
    monkeypatch.chdir(tmp_path)
    live = open_store(make_run(tmp_path / "logs" / "version_0", written_at=1).with_name("live.h5"), SERIES)
    assert main(["keys", "logs", "activation/.*"]) == 0
    assert capsys.readouterr().out == "activation/fc/rms\n"
    live.close()
    Path("logs/version_0/live.h5").unlink()
    for command in (["summary", "logs"], ["export", "logs"], ["repair", "logs"], ["report", "logs"], ["compare", "logs", "logs/version_0"]):
        assert main(command) == 0, command
    assert {path.name for path in Path("logs/version_0").iterdir()} >= {"monitor.h5", "monitor.csv", "monitor.html"}
    assert Path("compare.html").exists()
