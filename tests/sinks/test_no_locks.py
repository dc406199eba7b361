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
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import PROLOGUE, start

from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.store import lock
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
