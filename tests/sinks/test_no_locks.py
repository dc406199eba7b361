"""File systems without locks: Lustre without the mount option ``flock``, NFS without a lock daemon, some FUSE."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from helpers.processes import PROLOGUE, start
from helpers.training import Classifier, loader, trainer

from lightning_module_monitor import ModuleMonitorCallback
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.store import lock, owner
from lightning_module_monitor.sinks.store.journal import head_frame, read_head
from lightning_module_monitor.sinks.store.paths import journal_path
from lightning_module_monitor.sinks.store.reader import load_store
from lightning_module_monitor.sinks.store.writer import Store

RMS = "activation/fc/rms"
NO_LOCKS = ("ENOSYS", "ENOLCK", "EOPNOTSUPP", "EINVAL")
WAIT_S = 30
"""A process that writes three records takes two seconds; one that waits for a lock never ends."""


def write(path: Path, first: int, last: int, resumed: Path | None = None) -> Store:
    """A run that writes some steps and ends."""
    store = Store(path, configuration={}, resumed=resumed, resume_from=None if resumed is None else first)
    for step in range(first, last):
        store.write(Record.of(step, {RMS: 0.5 * step}))
    store.close()
    return store


@pytest.fixture(params=NO_LOCKS)
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system on which every lock fails, each with one of the errors that are seen."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(getattr(errno, request.param), os.strerror(getattr(errno, request.param)))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("no_locks")
def test_a_run_is_written_resumed_and_repaired(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line says that there are no locks, and no hidden file stays."""
    path = tmp_path / "m.h5"
    with caplog.at_level(logging.INFO):
        assert not write(path, 0, 4).failed
    assert caplog.messages == [
        f"{path}: its file system has no locks (flock); the journal beside it tells other runs that this one writes."
    ]
    assert write(path, 2, 6, resumed=path).path == path
    assert write(path, 0, 1).path == tmp_path / "m-2.h5"
    load_store(path).repair()
    steps, values = load_store(path).series(RMS)
    np.testing.assert_array_equal(steps, range(6))
    np.testing.assert_array_equal(values, 0.5 * np.arange(6))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m-2.h5", "m.h5"]


@pytest.mark.usefixtures("no_locks")
def test_what_may_belong_to_a_live_run_stays(tmp_path: Path) -> None:
    """Without locks a killed run cannot be told from a live one: its temporary file is not removed."""
    path = tmp_path / "m.h5"
    write(path, 0, 1)
    (tmp_path / ".m.h5.lock").touch()
    (tmp_path / ".m.h5.new").write_bytes(b"half a file")
    assert write(path, 0, 1).path == tmp_path / "m-2.h5"
    assert (tmp_path / ".m.h5.new").exists()


def test_an_error_of_another_kind_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the file that was opened for it is closed."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    open_files = Path("/proc/self/fd")
    num_open = len([*open_files.iterdir()]) if open_files.exists() else 0
    with pytest.raises(OSError, match="Input/output error"):
        lock.acquire(tmp_path / "m.h5")
    assert not num_open or len([*open_files.iterdir()]) == num_open


FLOCK = """
#include <errno.h>
int flock(int descriptor, int operation) { errno = %s; return -1; }
"""


KILLED = """
import os, signal
store = Store(path, configuration={})
for step in range(3):
    store.write(Record.of(step, {"activation/fc/rms": 0.5 * step}))
print("written", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
RESUMED = """
from lightning_module_monitor import load_store
store = Store(path, configuration={}, resumed=path, resume_from=2)
for step in (2, 3):
    store.write(Record.of(step, {"activation/fc/rms": 0.5 * step}))
store.close()
steps, values = load_store(path).series("activation/fc/rms")
print(steps.tolist(), values.tolist())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD is of Linux")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) here")
@pytest.mark.parametrize("error", NO_LOCKS)
def test_a_process_whose_system_has_no_flock(error: str, tmp_path: Path) -> None:
    """The C library's function fails, for HDF5 too: a run is written, killed, read and resumed, and never waits."""
    (tmp_path / "flock.c").write_text(FLOCK % error)
    library = tmp_path / "flock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "flock.c")], check=True, timeout=60)
    path = tmp_path / "m.h5"
    environment = os.environ | {"LD_PRELOAD": str(library)}
    outputs = []
    for program in (KILLED, RESUMED):
        command = [sys.executable, "-c", PROLOGUE + program, str(path), ""]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        outputs.append(done.stdout.splitlines())
    assert outputs == [["written"], ["[0, 1, 2, 3] [0.0, 0.5, 1.0, 1.5]"]]


HOLDER = """
import time
from lightning_module_monitor.sinks.store import lock
held = lock.acquire(path)
print(held.is_exclusive, flush=True)
time.sleep(60)
"""


def test_a_lock_that_is_held_is_told_from_none(tmp_path: Path) -> None:
    """By another process, and by this one; a killed holder has none, nor has one that has released it."""
    path = tmp_path / "m.h5"
    with start(HOLDER, path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert lock.acquire(path) is None
        assert lock.acquire(path) is None
        holder.kill()
    own = lock.acquire(path)
    assert own is not None
    assert lock.acquire(path) is None
    lock.release(own)
    assert not lock.exists(path)
    assert not lock.exists(path)


# ------------------------------------------------------------------ who writes, by the journal alone

LIVE = """
import time, fcntl, errno
def flock(descriptor, operation):
    raise OSError(errno.ENOSYS, "no flock")
fcntl.flock = flock
store = Store(path, configuration={})
for step in range(3):
    store.write(Record.of(step, {"activation/fc/rms": 0.5 * step}))
print(store.run, flush=True)
time.sleep(100)
"""


@pytest.mark.usefixtures("no_locks")
def test_a_live_run_on_this_host_keeps_its_file(tmp_path: Path) -> None:
    """By its process; a run that is killed does not, at once."""
    path = tmp_path / "m.h5"
    with start(LIVE, path) as live:
        assert live.stdout is not None
        live.stdout.readline()
        assert write(path, 3, 4, resumed=path).path == tmp_path / "m-2.h5"
        with pytest.raises(RuntimeError, match="being written by a live run"):
            load_store(path).repair()
        live.kill()
    assert write(path, 3, 4, resumed=path).path == path
    assert load_store(path).series(RMS)[0].tolist() == [0, 1, 2, 3]


def killed_elsewhere(path: Path, seconds_ago: float) -> str:
    """A store that a run on another host has left, whose journal is so old; returns the identifier of that run."""
    with start(LIVE, path) as live:
        assert live.stdout is not None
        run = live.stdout.readline().strip()
        live.kill()
    (path.parent / ".m.h5.lock").unlink()
    with journal_path(path).open("rb") as file:
        head = read_head(file)
    content = journal_path(path).read_bytes()[len(head_frame(head)) :]
    journal_path(path).write_bytes(head_frame(head._replace(host="another")) + content)
    modified = time.time() - seconds_ago
    os.utime(journal_path(path), (modified, modified))
    return run


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize(("seconds_ago", "names_run", "goes_on"), [(100, False, False), (140, False, True), (0, True, True)])
def test_a_run_on_another_host(tmp_path: Path, seconds_ago: float, names_run: bool, goes_on: bool) -> None:
    """It has ended if it has not renewed the journal's time for two minutes, or if the checkpoint that is resumed names it."""
    path = tmp_path / "m.h5"
    run = killed_elsewhere(path, seconds_ago)
    resumed = Store(path, configuration={}, resumed=path, resume_from=3, resumed_run=run if names_run else "")
    resumed.write(Record.of(3, {RMS: 1.5}))
    resumed.close()
    assert (resumed.path == path) is goes_on
    assert load_store(resumed.path).series(RMS)[0].tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize(("content", "name_when_old"), [(b"", "m.h5"), (b"no journal at all", "m-3.h5")], ids=["empty", "foreign"])
def test_a_journal_without_a_head_is_judged_by_its_time(tmp_path: Path, content: bytes, name_when_old: str) -> None:
    """As after a power cut, which leaves an empty one. One that has something else is left as it is. The run has a store in any case."""
    path = tmp_path / "m.h5"
    write(path, 0, 2)
    for seconds_ago, name in ((10, "m-2.h5"), (140, name_when_old)):
        journal_path(path).write_bytes(content)
        os.utime(journal_path(path), (time.time() - seconds_ago,) * 2)
        resumed = write(path, 2, 3, resumed=path)
        assert not resumed.failed
        assert resumed.path.name == name


@pytest.mark.usefixtures("no_locks")
def test_the_time_is_renewed_while_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock, and no longer than the run."""
    monkeypatch.setattr(owner, "_RENEWED_EVERY_S", 0.02)
    path = tmp_path / "m.h5"
    store = Store(path, configuration={})
    store.write(Record.of(0, {RMS: 0.0}))
    os.utime(journal_path(path), (1, 1))
    end = time.monotonic() + WAIT_S
    while journal_path(path).stat().st_mtime < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert journal_path(path).stat().st_mtime > time.time() - 60
    store.close()
    end = time.monotonic() + WAIT_S
    while any(thread.name == "monitor-renewal" for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(thread.name == "monitor-renewal" for thread in threading.enumerate())


def test_a_checkpoint_names_the_run(tmp_path: Path) -> None:
    """So that a run that is requeued on another host takes its store over at once."""
    callback = ModuleMonitorCallback(every_n_steps=1)
    training = trainer(tmp_path, [callback], max_steps=2)
    training.fit(Classifier(), loader(), loader())
    training.save_checkpoint(tmp_path / "c.ckpt")
    states = torch.load(tmp_path / "c.ckpt", weights_only=False)["callbacks"]
    [state] = [state for name, state in states.items() if "ModuleMonitor" in name]
    with h5py.File(tmp_path / "monitor.h5") as file:
        assert file.attrs["run"].decode() == state["run"] != ""
