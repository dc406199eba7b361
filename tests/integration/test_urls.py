"""Runs whose folder is at a URL: the store is written in a local folder and copied, and read from a copy."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
from helpers.lightning_package import CSVLogger, Logger, ModelCheckpoint, TensorBoardLogger
from helpers.training import Classifier, loader, seed, trainer

from lightning_module_monitor import ModuleMonitorCallback, load_store
from lightning_module_monitor.cli import main
from lightning_module_monitor.sinks.store import remote
from lightning_module_monitor.sinks.store.remote import RemoteFolder

ROOT = "memory://bucket/runs"
LOSS = "context/loss"
STEP = 3


# Lightning's, for a second run in a folder.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty file system in memory, an empty working folder, and a folder for temporary files."""
    file_system = fsspec.filesystem("memory")
    file_system.store.clear()
    file_system.pseudo_dirs[:] = [""]
    (tmp_path / "work").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield file_system
    file_system.store.clear()
    assert list((tmp_path / "work").iterdir()) in ([], [tmp_path / "work" / "monitor.html"])


def fit(root: str, max_steps: int, logger: Logger | bool = False, ckpt_path: str | None = None, **options: Any) -> ModuleMonitorCallback:
    """A run with a record in every step, and a checkpoint in every third."""
    seed()
    callback = ModuleMonitorCallback(every_n_steps=1, **options)
    checkpoints = ModelCheckpoint(every_n_train_steps=STEP, save_top_k=-1)
    places = {"default_root_dir": root, "logger": logger, "enable_checkpointing": True, "log_every_n_steps": 1}
    training = trainer(Path(), [callback, checkpoints], max_steps=max_steps, max_epochs=-1, **places)
    training.fit(Classifier(), loader(), loader(), ckpt_path=ckpt_path)
    return callback


@pytest.mark.parametrize("logger", [None, CSVLogger, TensorBoardLogger])
def test_the_store_is_at_the_url(memory: Any, logger: type[CSVLogger] | type[TensorBoardLogger] | None, tmp_path: Path) -> None:
    """In the first logger's folder or the root folder; nothing odd is in the working folder, and no local copy stays."""
    callback = fit(ROOT, 4, False if logger is None else logger("memory://logs"))
    folder = ROOT if logger is None else "memory://logs/lightning_logs/version_0"
    assert callback.store_path == f"{folder}/monitor.h5"
    assert {path.rpartition("/")[2] for path in memory.ls(folder, detail=False)} >= {"monitor.h5"}
    assert not [path for path in memory.find("/") if path.endswith((".journal", ".lock", ".new"))]
    assert load_store(callback.store_path)[LOSS][0].tolist() == [0, 1, 2, 3]
    assert not any((tmp_path / "temporary").iterdir())
    with memory.open(callback.store_path) as opened, h5py.File(opened) as file:
        assert "context" in file


def test_commands_and_the_page_take_a_url(memory: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """The page of the run is beside its store; a page that is made later is in the working folder."""
    caplog.set_level(logging.INFO)
    url = fit(ROOT, 4, report=True).store_path
    assert memory.exists(f"{ROOT}/monitor.html")
    assert f"Monitored values: {url}; page: {ROOT}/monitor.html. Verdict: lightning-module-monitor summary {url}" in caplog.messages
    assert url is not None
    assert main(["summary", url]) in (0, 1)
    assert url in capsys.readouterr().out
    assert main(["report", url]) == 0
    assert capsys.readouterr().out.startswith("monitor.html: ")
    assert repr(load_store(url)).startswith(f"StoreReader('{url}': ")
    assert main(["keys", f"{ROOT}/none.h5"]) == 2
    assert f"There is no store at '{ROOT}/none.h5'." in capsys.readouterr().err
    assert main(["keys", "nosuch://a/b.h5"]) == 2
    assert "Check the URL, the network and the credentials." in capsys.readouterr().err


def test_a_resumed_run_goes_on_at_its_url_and_another_leaves_it(memory: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As in a local folder: it supersedes rows; another run gets a numbered name; elsewhere a resumed run begins with a copy."""
    first = fit(ROOT, 4).store_path
    [checkpoint] = [path for path in memory.find("/") if path.endswith("step=3.ckpt")]
    assert fit(ROOT, 6, ckpt_path=f"memory:/{checkpoint}").store_path == first
    assert first is not None
    assert load_store(first)[LOSS][0].tolist() == [*range(6)]
    before = memory.cat_file(first)
    other = fit(ROOT, 2).store_path
    assert other == f"{ROOT}/monitor-2.h5"
    assert load_store(other)[LOSS][0].tolist() == [0, 1]
    elsewhere = fit("memory://elsewhere", 5, ckpt_path=f"memory:/{checkpoint}").store_path
    assert elsewhere == "memory://elsewhere/monitor.h5"
    assert load_store(elsewhere)[LOSS][0].tolist() == [*range(5)]
    assert memory.cat_file(first) == before


def test_a_checkpoint_names_no_other_server(memory: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A store at a URL is read for a run at a URL of the same kind alone."""
    fit(ROOT, 4)
    [checkpoint] = [path for path in memory.find("/") if path.endswith("step=3.ckpt")]
    local = fit(str(tmp_path / "local"), 5, ckpt_path=f"memory:/{checkpoint}").store_path
    assert local == str(tmp_path / "local" / "monitor.h5")
    assert load_store(local)[LOSS][0].tolist() == [3, 4]
    assert any("does not exist: this run's store begins without its earlier steps" in message for message in caplog.messages)


def test_a_killed_run_has_lost_ten_minutes_at_most(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is copied with the file every ten minutes, and when the file is replaced."""
    now = {"s": 0.0}
    monkeypatch.setattr(remote.time, "monotonic", lambda: now["s"])
    folder = RemoteFolder(ROOT, logging.getLogger("test"))
    assert folder.prepare("m.h5", None) is None
    store, journal = folder.local / "m.h5", folder.local / "m.h5.journal"
    store.write_text("first")
    journal.write_text("a")
    folder.copy_if_due(store)
    assert memory.cat_file(f"{ROOT}/m.h5.journal") == b"a"
    journal.write_text("ab")
    now["s"] = 599.0
    folder.copy_if_due(store)
    assert memory.cat_file(f"{ROOT}/m.h5.journal") == b"a"
    now["s"] = 600.0
    folder.copy_if_due(store)
    assert memory.cat_file(f"{ROOT}/m.h5.journal") == b"ab"
    (folder.local / "next").write_text("second")
    (folder.local / "next").replace(store)
    journal.unlink()
    folder.copy_if_due(store)
    assert memory.cat_file(f"{ROOT}/m.h5") == b"second"
    assert not memory.exists(f"{ROOT}/m.h5.journal")
    assert folder.close()
    assert not folder.local.exists()


def test_a_network_that_fails_is_tried_again_every_ten_minutes(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with every record, each of which would wait for it; a folder that is gone raises nothing."""
    now, calls = {"s": 0.0}, []

    def refuse(*_arguments: object, **_options: object) -> None:
        calls.append(now["s"])
        raise ConnectionError("no route to host")

    monkeypatch.setattr(remote.time, "monotonic", lambda: now["s"])
    folder = RemoteFolder(ROOT, logging.getLogger("test"))
    folder.prepare("m.h5", None)
    store = folder.local / "m.h5"
    store.write_text("first")
    monkeypatch.setattr(type(memory), "put_file", refuse)
    for second in range(0, 1300, 100):
        now["s"] = float(second)
        folder.copy_if_due(store)
    assert calls == [0.0, 600.0, 1200.0]
    store.unlink()
    folder.copy_if_due(store)


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_without_a_network_the_files_stay_here(
    memory: Any, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, with the local folder, which has everything; training goes on."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(type(memory), "ls" if when == "at the start" else "put_file", refuse)
    memory.makedirs(ROOT)
    caplog.set_level(logging.INFO)
    callback = ModuleMonitorCallback(every_n_steps=1)
    training = trainer(Path(), [callback], default_root_dir=ROOT, max_steps=4, max_epochs=-1, logger=False, enable_checkpointing=False)
    training.fit(Classifier(), loader(), loader())
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING and ROOT in record.getMessage()]
    assert f"{ROOT} cannot be written (ConnectionError: no route to host). Training goes on; the files of this run are in " in warning
    folder = Path(warning.rpartition(" are in ")[2].removesuffix("."))
    assert any(f"Monitored values: {folder / 'monitor.h5'}" in message for message in caplog.messages)
    assert callback.store_path == str(folder / "monitor.h5")
    np.testing.assert_array_equal(load_store(callback.store_path)[LOSS][0], range(4))


def test_a_url_of_a_local_file_is_its_path(tmp_path: Path) -> None:
    """Of the file system that is there without any of fsspec's."""
    assert fit(str(tmp_path), 2, store=f"file://{tmp_path}/a/run.h5").store_path == f"{tmp_path}/a/run.h5"
    assert load_store(tmp_path / "a" / "run.h5")[LOSS][0].tolist() == [0, 1]


def test_an_option_may_be_a_url(memory: Any) -> None:
    """``store`` as well as the root folder; raw tensors are beside it."""
    callback = fit(str(Path.cwd().parent / "local"), 2, store="memory://mine/run.h5", capture={"sites": ".*", "steps": [1]})
    assert callback.store_path == "memory://mine/run.h5"
    store = load_store("memory://mine/run.h5")
    assert store[LOSS][0].tolist() == [0, 1]
    assert store.tensors()
    assert store.tensor(*store.tensors()[0][:4]) is not None
