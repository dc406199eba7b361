"""The store in processes that are killed or run at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
from helpers.processes import PROLOGUE, kill, start

from lightning_module_monitor.cli import main
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.store.reader import StoreReader, load_store
from lightning_module_monitor.sinks.store.writer import Store

# Says each step once its record is written; with "widen" every seventh step brings a new key.
WRITER = """
from lightning_module_monitor.sinks.store import writer
writer._SMALL = 20_000  # the file is replaced often
store = Store(path, configuration={"by": "writer"})
for step in range(100_000):
    late = {f"activation/late.{step // 7}/rms": 1.0} if sys.argv[2] == "widen" else {}
    store.write(Record.of(step, {"activation/fc/rms": step * 0.5, "validation/activation/fc/rms": float(step), **late}))
    print(step, flush=True)
"""


def run_and_kill(path: Path, mode: str, wait_s: float) -> int:
    """Kill a writer so long after its first record, and read all the time; returns the last step that it reported."""
    process = start(WRITER, path, mode)
    assert process.stdout is not None
    first = process.stdout.readline()
    end, num_before = time.monotonic() + wait_s, 0
    while time.monotonic() < end:
        steps, values = load_store(path).series("activation/fc/rms")
        np.testing.assert_array_equal(steps, np.arange(len(steps)))
        np.testing.assert_array_equal(values, 0.5 * steps)
        assert len(steps) >= num_before
        num_before = len(steps)
        with h5py.File(path) as file:  # at any time a plain file
            assert file["activation/values"][0, 0] == 0
    return kill(process, first)


def assert_written(path: Path, last_step: int) -> None:
    """All steps up to the last reported step are in the file with their values, and at most one further step."""
    for key, factor in (("activation/fc/rms", 0.5), ("validation/activation/fc/rms", 1.0)):
        steps, values = load_store(path).series(key)
        np.testing.assert_array_equal(steps, np.arange(len(steps)))
        np.testing.assert_array_equal(values, factor * steps)
        assert last_step < len(steps) <= last_step + 2


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 on this system")
@pytest.mark.parametrize("mode", ["append", "widen"])
def test_what_was_written_survives_kill_9(tmp_path: Path, mode: str) -> None:
    """Killed at any moment, also while columns are added or the file is replaced: read all the time, and plain HDF5 after a repair."""
    rng = np.random.default_rng()
    for number in range(10):
        path = tmp_path / f"m{number}.h5"
        last_step = run_and_kill(path, mode, wait_s=float(rng.uniform(0, 0.25)))
        assert_written(path, last_step)
        load_store(path).repair()
        assert_written(path, last_step)
        with h5py.File(path) as file:
            assert len(file["activation/values"]) == len(file["activation/steps"]) > last_step
            assert file["activation/values"][last_step, 0] == 0.5 * last_step


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 on this system")
def test_a_killed_run_is_resumed_in_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kill releases the lock; the resumed run supersedes repeated steps, and closes a plain file with both configurations."""
    path = tmp_path / "m.h5"
    last_step = run_and_kill(path, "append", wait_s=0.1)
    first = last_step // 2
    store = Store(path, configuration={"by": "resumed"}, resumed=path, resume_from=first)
    store.write(Record.of(first, {"activation/fc/rms": -1.0, "activation/out/rms": -2.0}))
    store.close()
    assert store.path == path
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert 'another configuration (by was "writer", is "resumed")' in caplog.messages[0]
    reader = load_store(path)
    assert reader.series("activation/fc/rms")[1].tolist() == [0.5 * step for step in range(first)] + [-1.0]
    assert reader.series("validation/activation/fc/rms")[0].tolist() == list(range(first))
    assert reader.series("activation/out/rms")[0].tolist() == [first]
    configurations = reader.attributes["configurations"]
    assert [run["configuration"]["by"] for run in configurations] == ["writer", "resumed"]  # type: ignore[attr-defined]
    h5py.File(path).close()


# A process for every 37th line of the sinks that a run goes through: it kills itself there.
KILLED = """
import logging, os, signal, torch
from lightning_module_monitor.record import RawTensor
from lightning_module_monitor.sinks.store import schema
from lightning_module_monitor.sinks.store.tensors import RunFiles
from lightning_module_monitor.sinks.store.reader import load_store
folder = os.path.dirname(schema.__file__)

def run(first, resumed):
    options = {"resumed": path, "resume_from": first} if resumed else {}
    files = RunFiles(path, configuration={}, **options, logger=logging.getLogger("test"))
    for step in range(first, first + 2):
        files.write(Record.of(step, {"loss": float(step)}, tensors=[RawTensor("activation", "fc", 0, torch.tensor([step]))]))
    files.close()
    return files.path

def killed_at(line, resumed):
    num_lines = 0

    def trace(frame, event, argument):
        nonlocal num_lines
        if os.path.dirname(frame.f_code.co_filename) != folder:
            return None
        num_lines += event == "line"
        if num_lines == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    child = os.fork()
    if not child:
        sys.settrace(trace)
        run(1, resumed)
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL

def content(one):
    return load_store(one).series("loss")[0].tolist() if one.exists() else []

line = 0
while True:
    line += 37
    for old in path.parent.iterdir():
        old.unlink()
    if sys.argv[2] == "resumed":
        run(0, False)
    was_killed = killed_at(line, sys.argv[2] == "resumed")
    found, tensors = content(path), [one.step for one in load_store(path).tensors()] if path.exists() else []
    if sys.argv[2] == "resumed":
        assert found in ([0, 1], [0], [0, 1, 2]), (line, found)
        assert tensors in ([0, 1], [0], [0, 1, 2]), (line, tensors)
    else:
        assert found in ([], [1], [1, 2]), (line, found)
        assert tensors in ([], [1], [1, 2]), (line, tensors)
    if not was_killed:
        break
    is_free = not path.exists()
    taken = run(5, False)
    assert taken.name == ("m.h5" if is_free else "m-2.h5"), (line, taken)
    assert content(taken) == [5, 6]
    left = sorted(one.name for one in path.parent.iterdir() if one.name.startswith("."))
    assert not left, (line, left)
print(line)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("mode", ["new", "resumed"])
def test_killed_anywhere(tmp_path: Path, mode: str) -> None:
    """At any moment there is a readable file or none at the path; the next run uses a free name, and removes leftovers."""
    process = start(KILLED, tmp_path / "m.h5", mode)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert int(output) > 300


@pytest.mark.parametrize("mode", ["append", "widen"])
def test_reading_while_another_process_writes(tmp_path: Path, mode: str) -> None:
    """At any moment the file has every reported record, and readers do not disturb the writer."""
    path = tmp_path / "m.h5"
    process = start(WRITER, path, mode)
    assert process.stdout is not None
    try:
        for _ in range(40):
            last_step = int(process.stdout.readline())
            steps, values = load_store(path).series("activation/fc/rms")
            assert len(steps) > last_step
            np.testing.assert_array_equal(values, 0.5 * steps)
        with pytest.raises(RuntimeError, match="live run"):
            load_store(path).repair()
    finally:
        process.kill()
        _, errors = process.communicate()
    assert not errors


def test_reading_while_a_run_ends(tmp_path: Path) -> None:
    """The file can be read while a run opens and closes it."""
    script = """
for run in range(30):
    store = Store(path, configuration={}, resumed=path, resume_from=run)
    store.write(Record.of(run, {"loss": float(run)}))
    store.close()
    print(run, flush=True)
"""
    process = start(script, tmp_path / "m.h5")
    assert process.stdout is not None
    process.stdout.readline()
    reader = load_store(tmp_path / "m.h5")
    while process.poll() is None:
        steps, values = reader.series("loss")
        assert steps.tolist() == values.tolist()
    output, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert output.split()[-1] == "29"
    assert reader.series("loss")[0].tolist() == list(range(30))


def test_two_processes_that_start_at_once_write_two_files(tmp_path: Path) -> None:
    """Neither process writes to the other's file."""
    script = """
store = Store(path, configuration={})
sys.stdin.readline()
for step in range(20):
    store.write(Record.of(step, {"loss": float(sys.argv[2])}))
store.close()
"""
    command = [sys.executable, "-c", PROLOGUE + script, str(tmp_path / "m.h5")]
    processes = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for number in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait() for process in processes] == [0, 0, 0]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m-2.h5", "m-3.h5", "m.h5"]
    written = [load_store(entry).series("loss")[1].tolist() for entry in tmp_path.iterdir()]
    assert sorted(written) == [[float(number)] * 20 for number in range(3)]


@pytest.mark.parametrize("damage", ["cut short", "zeros"])
def test_a_crash_of_the_machine_does_not_hang_the_resumed_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    """A file left in use without its last blocks is an error at once, not an endless wait for its writer: a new file is used."""
    path = tmp_path / "m.h5"
    run_and_kill(path, "append", wait_s=0.1)
    content = path.read_bytes()
    rest = len(content) - 1500
    path.write_bytes(content[:1500] + (bytes(rest) if damage == "zeros" else b""))
    with pytest.raises((ValueError, OSError, RuntimeError, KeyError)):
        StoreReader(path).repair()
    store = Store(path, configuration={}, resumed=path, resume_from=1)
    store.write(Record.of(1, {"loss": 1.0}))
    store.close()
    assert store.path == tmp_path / "m-2.h5"
    assert ["cannot be resumed" in record.getMessage() for record in caplog.records] == [True]
    assert path.stat().st_size == (len(content) if damage == "zeros" else 1500)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc/self/statm here")
def test_a_copy_that_was_broken_off_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the file; the journal beside it does not matter."""
    path = tmp_path / "m.h5"
    run_and_kill(path, "append", wait_s=0.1)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert main(["summary", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "is not a readable HDF5 file: damaged, cut short, or of another kind" in line


def test_a_store_that_is_damaged_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever a part of it was lost: intact data is read, damaged data is an error."""
    path = tmp_path / "m.h5"
    with closing(Store(path, configuration={})) as store:
        for step in range(30):
            store.write(Record.of(step, {f"activation/m.{i}/rms": float(step + i) for i in range(40)}))
    content = path.read_bytes()
    statuses = []
    for part in range(12):
        place = len(content) * part // 12
        path.write_bytes(content[:place] + bytes(2000) + content[place + 2000 :])
        for command in ("keys", "summary"):
            status = main([command, str(path)])
            statuses.append(status)
            assert len(capsys.readouterr().err.splitlines()) == (status == 2), (part, command)
    assert set(statuses) <= {0, 1, 2}
    assert 2 in statuses
