"""Files that cannot grow: a full disk, a quota, a limit on the size of files. No failing write reaches HDF5."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from helpers.processes import PROLOGUE, start

from lightning_module_monitor.record import RawTensor, Record
from lightning_module_monitor.sinks.store import journal, paths, successor, writer
from lightning_module_monitor.sinks.store.paths import journal_path, temporary_path
from lightning_module_monitor.sinks.store.reader import load_store
from lightning_module_monitor.sinks.store.tensors import RunFiles, TensorStore
from lightning_module_monitor.sinks.store.writer import Store

RMS = "activation/fc/rms"
REFUSALS = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO]


class Disk:
    """A disk with limited space."""

    def __init__(self) -> None:
        self.refusal: int | None = None
        """What it says, when it is full."""
        self.num_refused = 0

    def check(self) -> None:
        """Raise the refusal."""
        if self.refusal is not None:
            self.num_refused += 1
            raise OSError(self.refusal, os.strerror(self.refusal))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Stands before the writes of the journal, and before those of HDF5's files."""
    disk, write = Disk(), os.write

    def limited(descriptor: int, data: bytes) -> int:
        if disk.refusal is not None and len(data) > 1:
            write(descriptor, data[: len(data) // 2])  # as at the end of the space: a part is written, then nothing
        disk.check()
        return write(descriptor, data)

    class LimitedFile(successor._Disk):
        def write(self, data: memoryview) -> int:
            try:
                disk.check()
            except OSError as error:
                self.fail(error)
            return super().write(data)

    monkeypatch.setattr(journal, "os", SimpleNamespace(**{**vars(os), "write": limited}))
    monkeypatch.setattr(successor, "_Disk", LimitedFile)
    return disk


def tensor_record(step: int) -> Record:
    """A record with a value and a tensor."""
    return Record.of(step, {RMS: float(step)}, tensors=[RawTensor("activation", "fc", 0, torch.full((5000,), float(step)))])


def steps_of(path: Path) -> list[int]:
    """The steps of a store, after a check of its values, and that plain h5py opens it."""
    steps, values = load_store(path).series(RMS)
    assert values.tolist() == steps.tolist()
    h5py.File(path).close()
    found: list[int] = steps.tolist()
    return found


# ------------------------------------------------------------------ a disk that is full, and freed


@pytest.mark.parametrize("refusal", REFUSALS, ids=errno.errorcode.get)
def test_no_space_is_one_warning_and_nothing_raises(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, refusal: int) -> None:
    """For any reason; earlier records are in the file, and it is closed."""
    opened = Store(tmp_path / "m.h5", configuration={})
    for step in (0, 1):
        opened.write(Record.of(step, {RMS: float(step)}))
    disk.refusal = refusal
    for step in range(2, 40):
        opened.write(Record.of(step, {RMS: float(step)}))
        assert steps_of(tmp_path / "m.h5") == [0, 1]
    opened.close()
    assert opened.failed
    (message,) = caplog.messages
    assert f"m.h5 cannot be written at step 2 ([Errno {refusal}] {os.strerror(refusal)})" in message
    assert message.endswith("Training goes on; what was written before can be read with load_store, and later records are tried again.")
    assert steps_of(tmp_path / "m.h5") == [0, 1]
    disk.refusal = None
    assert load_store(tmp_path / "m.h5").repair()
    assert steps_of(tmp_path / "m.h5") == [0, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.h5"]


def test_a_disk_that_is_freed_is_used_again(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """Records are tried at growing intervals, and a message has the number of missing records."""
    caplog.set_level(logging.INFO)
    opened = Store(tmp_path / "m.h5", configuration={})
    opened.write(Record.of(0, {RMS: 0.0}))
    disk.refusal = errno.ENOSPC
    refused = []
    for step in range(1, 100):
        before = disk.num_refused
        opened.write(Record.of(step, {RMS: float(step)}))
        refused += [step] if disk.num_refused > before else []
    assert refused == [1, 3, 6, 11, 20, 37, 70]
    disk.refusal = None
    for step in range(100, 200):
        opened.write(Record.of(step, {RMS: float(step)}))
    opened.close()
    assert steps_of(tmp_path / "m.h5") == [0, *range(135, 200)]
    assert len(caplog.messages) == 2
    assert caplog.messages[1] == f"{tmp_path / 'm.h5'} is written again from step 135 on; 134 records are missing."


def test_a_file_that_cannot_be_replaced_goes_on_in_its_journal(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so; no record is lost, and it is tried again with a larger journal."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(writer, "_SMALL", 2000)
    path = tmp_path / "m.h5"
    opened = Store(path, configuration={})
    monkeypatch.setattr(journal, "os", os)
    num_bytes = 0
    for step in range(400):
        disk.refusal = errno.ENOSPC if 100 < step < 300 else None
        opened.write(Record.of(step, {RMS: float(step)}))
        num_bytes = max(num_bytes, journal_path(path).stat().st_size if journal_path(path).exists() else 0)
    assert steps_of(path) == list(range(400))
    with h5py.File(path) as file:
        assert file["activation/steps"][-1] > 300
    assert not opened.failed
    assert disk.num_refused > 5
    opened.close()
    assert steps_of(path) == list(range(400))
    (message,) = caplog.messages
    assert f"They stay in {path}.journal; load_store reads both." in message


def test_a_folder_that_may_not_be_changed_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after ``chmod``, or on Windows while a reader holds the file: the journal goes on; one warning at the end."""
    monkeypatch.setattr(writer, "_SMALL", 2000)
    path = tmp_path / "m.h5"
    opened = Store(path, configuration={})
    opened.write(Record.of(0, {RMS: 0.0}))

    def refuse(_temporary: Path, refused: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(refused))

    with monkeypatch.context() as context:
        context.setattr(paths, "replace", refuse)
        for step in range(1, 100):
            opened.write(Record.of(step, {RMS: float(step)}))
        assert steps_of(path) == [*range(100)]
        opened.close()
    (message,) = caplog.messages
    assert f"m.h5 cannot be replaced by one with its latest records ([Errno 13] {os.strerror(errno.EACCES)})" in message
    assert not opened.failed
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.h5", "m.h5.journal"]
    assert load_store(path).repair()
    assert steps_of(path) == [*range(100)]


def test_the_tensors_file_without_space(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """As the store: one warning, the file is unchanged, and is written again later."""
    files = RunFiles(tmp_path / "m.h5", configuration={}, logger=logging.getLogger("test"))
    files.write(tensor_record(0))
    disk.refusal = errno.EDQUOT
    for step in range(1, 6):
        files.write(tensor_record(step))
    assert [entry.name for entry in sorted(tmp_path.glob("*.h5"))] == ["m.h5", "m.tensors.h5"]
    assert [one.step for one in load_store(tmp_path / "m.h5").tensors()] == [0]
    disk.refusal = None
    for step in range(6, 20):
        files.write(tensor_record(step))
    files.close()
    assert [one.step for one in load_store(tmp_path / "m.h5").tensors()] == [0, *range(6, 20)]
    assert steps_of(tmp_path / "m.h5") == [0, *range(6, 20)]
    assert [message.split()[2].rpartition("/")[2] for message in caplog.messages] == ["m.h5", "m.tensors.h5"]


@pytest.mark.parametrize("kind", [Store, TensorStore])
def test_a_resumed_run_without_space_goes_on_later(tmp_path: Path, disk: Disk, kind: type[Store] | type[TensorStore]) -> None:
    """Its file is unchanged until then, and no other file is created."""
    path = tmp_path / "m.h5"
    first = kind(path, configuration={})
    for step in range(4):
        first.write(tensor_record(step))
    first.close()
    before = path.read_bytes()
    resumed = kind(path, configuration={}, resumed=path, resume_from=2)
    disk.refusal = errno.ENOSPC
    resumed.write(tensor_record(2))
    assert path.read_bytes() == before
    disk.refusal = None
    for step in (3, 4):
        resumed.write(tensor_record(step))
    resumed.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.h5"]
    if kind is Store:
        assert steps_of(path) == [0, 1, 4]
    else:
        assert [one.step for one in load_store(path).tensors()] == [0, 1, 4]


def test_late_keys_without_space(tmp_path: Path, disk: Disk) -> None:
    """The file keeps its columns until there is space for new columns."""
    path = tmp_path / "m.h5"
    opened = Store(path, configuration={})
    opened.write(Record.of(0, {RMS: 0.0}))
    disk.refusal = errno.ENOSPC
    opened.write(Record.of(1, {RMS: 1.0, "loss": 1.0}))
    assert load_store(path).keys() == [RMS]
    disk.refusal = None
    for step in (2, 3):
        opened.write(Record.of(step, {RMS: float(step), "loss": 1.0}))
    opened.close()
    assert steps_of(path) == [0, 3]
    assert load_store(path).series("loss")[0].tolist() == [3]


# ------------------------------------------------------------------ limits and disks of the system

LIMITED = """
import resource, torch
from lightning_module_monitor.record import RawTensor
from lightning_module_monitor.sinks.store.tensors import RunFiles
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    files = RunFiles(path / f"{limit}.h5", configuration={"limit": limit}, logger=logging.getLogger(str(limit)))
    for step in range(200):
        values = {f"activation/m.{index}/rms": float(step) for index in range(200)} | {"activation/fc/rms": float(step)}
        values |= {f"update/{index}.{step}/rms": step / 7 + index for index in range(10) if step % 50 == 20}
        tensors = [RawTensor("activation", "fc", 0, torch.full((5000,), float(step)))] if step % 10 == 0 else []
        files.write(Record.of(step, values, tensors=tensors))
    files.close()
print("trained to the end")
"""


@pytest.mark.skipif(os.name == "nt", reason="no limits on the size of files")
def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """At the first record, at a late key, in the middle, in the tensors' file: status 0, one warning each, and complete files or none."""
    limits = [0, 100, 1000, 4000, 9000, 20_000, 50_000, 100_000, 200_000, 300_000, 1_000_000, 1_100_000, 1_500_000, 3_000_000]
    process = start(LIMITED, tmp_path, *limits)
    output, errors = process.communicate()
    assert (process.returncode, output) == (0, "trained to the end\n"), errors
    assert all(line.startswith("WARNING The store") for line in errors.splitlines()), errors
    num_steps = []
    for limit in limits:
        warned = [line for line in errors.splitlines() if f"/{limit}." in line]
        assert len(warned) <= 2, errors
        path = tmp_path / f"{limit}.h5"
        if path.exists():
            steps = steps_of(path)
            assert steps[:1] in ([], [0])
            assert (len(steps) == 200) == (not [line for line in warned if f"/{limit}.h5" in line])
            for stored in load_store(path).tensors():
                assert (load_store(path).tensor(*stored[:4]) == stored.step).all()
            num_steps.append(len(steps))
        else:
            assert "there is no file yet" in warned[0]
            assert "load_store" not in warned[0]
    assert num_steps[-1] == 200
    assert len([number for number in num_steps if number < 200]) > 3
    assert {path.name.split(".", 1)[1] for path in tmp_path.iterdir()} <= {"h5", "h5.journal", "tensors.h5"}


LOWERED = """
import resource
store = Store(path, configuration={})
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for step in range(60):
    if step in (5, 20):
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000 if step == 5 else resource.RLIM_INFINITY, hard))
    store.write(Record.of(step, {f"activation/m.{index}/rms": float(step) for index in range(50)}))
store.close()
print("trained to the end")
"""


@pytest.mark.skipif(os.name == "nt", reason="no limits on the size of files")
def test_a_limit_that_is_lowered_below_what_was_written(tmp_path: Path) -> None:
    """The file is complete, later records are written without the limit, and the process ends with status 0."""
    process = start(LOWERED, tmp_path / "m.h5")
    output, errors = process.communicate()
    assert (process.returncode, output) == (0, "trained to the end\n"), errors
    steps, values = load_store(tmp_path / "m.h5").series("activation/m.7/rms")
    assert list(steps[:5]) == [0, 1, 2, 3, 4]
    assert 15 not in steps
    assert steps[-1] == 59
    assert list(values) == list(steps)


QUOTA = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static size_t total = 0;

static int is_refused(int descriptor, size_t count) {
    char link[64], name[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length <= 0) return 0;
    name[length] = 0;
    if (!strstr(name, "/quota/")) return 0;
    total += count;
    return total > (size_t) atol(getenv("QUOTA"));
}

ssize_t write(int descriptor, const void *data, size_t count) {
    ssize_t (*original)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    if (is_refused(descriptor, count)) { errno = EDQUOT; return -1; }
    return original(descriptor, data, count);
}

ssize_t pwrite(int descriptor, const void *data, size_t count, off_t place) {
    ssize_t (*original)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, "pwrite");
    if (is_refused(descriptor, count)) { errno = EDQUOT; return -1; }
    return original(descriptor, data, count, place);
}

ssize_t pwrite64(int descriptor, const void *data, size_t count, off_t place) { return pwrite(descriptor, data, count, place); }
"""
FILLED = """
from lightning_module_monitor.sinks.store import writer
writer._SMALL = 30_000
store = Store(path, configuration={})
for step in range(300):
    store.write(Record.of(step, {f"activation/m.{index}/rms": float(step) for index in range(20)}))
store.close()
print("trained to the end")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD is of Linux")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) here")
def test_a_quota_is_one_warning_wherever_it_ends(tmp_path: Path) -> None:
    """In the journal, in a consolidation, and in every write of one: status 0, and what was written before is read."""
    (tmp_path / "quota.c").write_text(QUOTA)
    library = tmp_path / "quota.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "quota.c"), "-ldl"], check=True, timeout=60)
    lengths = []
    for quota in (500, 12_000, 20_000, 48_000, 60_000, 75_000, 90_000, 130_000, 10_000_000):
        path = tmp_path / "quota" / f"{quota}.h5"
        environment = os.environ | {"LD_PRELOAD": str(library), "QUOTA": str(quota)}
        command = [sys.executable, "-c", PROLOGUE + FILLED, str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (0, "trained to the end\n"), (quota, done.stderr)
        assert done.stderr.count("\n") == (quota < 10_000_000), (quota, done.stderr)
        steps, values = load_store(path).series("activation/m.7/rms") if path.exists() else (np.empty(0), np.empty(0))
        assert steps.tolist() == values.tolist() == [*range(len(steps))]
        lengths.append(len(steps))
    assert lengths[0] == 0
    assert lengths == sorted(lengths)
    assert lengths[-1] == 300
    assert len({*lengths}) > 4


FILLER = """
import random
store = Store(path, configuration={})
for step in range(600):
    store.write(Record.of(step, {f"activation/m.{index}/rms": random.random() + step for index in range(4000)}))
    if not store.failed:
        print(step, flush=True)
store.close()
print("trained to the end")
"""


def test_a_disk_that_really_fills_up(small_disk: Path) -> None:
    """One warning, the process ends with status 0, and earlier records can be read."""
    process = start(FILLER, small_disk / "m.h5")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert output.endswith("trained to the end\n")
    assert errors.count("The store") == errors.count("\n") == 1
    last_step = int(output.split("\n")[-3])
    steps, values = load_store(small_disk / "m.h5").series("activation/m.7/rms")
    np.testing.assert_array_equal(steps, np.arange(last_step + 1))
    np.testing.assert_array_equal(np.floor(values), steps)
    assert sum(entry.stat().st_size for entry in small_disk.iterdir()) > 8 * 2**20


TENSORS = """
import torch
from lightning_module_monitor.record import RawTensor
from lightning_module_monitor.sinks.store.tensors import TensorStore
tensors = TensorStore(path, configuration={})
for step in range(60):
    tensors.write(Record(step, tensors=[RawTensor("activation", "fc", 0, torch.full((100_000,), step, dtype=torch.bfloat16))]))
tensors.close()
print("trained to the end")
"""


def test_tensors_that_fill_the_disk(small_disk: Path) -> None:
    """As the store; the space of the incomplete copy is freed."""
    process = start(TENSORS, small_disk / "m.tensors.h5")
    output, errors = process.communicate()
    assert (process.returncode, output) == (0, "trained to the end\n"), errors
    assert errors.count("m.tensors.h5 cannot be written") == errors.count("\n") == 1, errors
    store = load_store(small_disk / "m.tensors.h5")
    steps = [one.step for one in store.tensors()]
    assert steps == list(range(len(steps)))
    assert len(steps) > 20
    assert all((store.tensor("activation", "fc", step) == step).all() for step in steps)
    assert [entry.name for entry in small_disk.iterdir()] == ["m.tensors.h5"]
    assert not temporary_path(small_disk / "m.tensors.h5").exists()
