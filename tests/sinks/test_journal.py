"""The journal beside a store: what is read of it with the file, damaged, foreign and hostile journals."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import tracemalloc
import zlib
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
from helpers.processes import start
from helpers.stores import copy_of_killed

from lightning_module_monitor import load_store
from lightning_module_monitor.cli import main
from lightning_module_monitor.histogram import NUM_COUNTS, Histogram
from lightning_module_monitor.keys import Columns
from lightning_module_monitor.record import Finding, ModuleInfo, Record
from lightning_module_monitor.sinks.store import writer
from lightning_module_monitor.sinks.store.journal import Journal
from lightning_module_monitor.sinks.store.paths import journal_path
from lightning_module_monitor.sinks.store.reader import StoreReader
from lightning_module_monitor.sinks.store.writer import Store

RMS, LATE, HIST = "activation/fc/rms", "gradient/fc/norm", "activation/fc/hist"
HEAD = {"format": 1, "lineage": "", "generation": 1, "run": "r", "host": "h", "pid": 1, "process_start": 0.0}


def record(step: int) -> Record:
    """A number, from step 2 on another one, and a histogram."""
    values = {RMS: 0.5 * step} | ({LATE: -float(step)} if step >= 2 else {})
    return Record.of(
        step, values, {HIST: Histogram(np.full(NUM_COUNTS, step))}, modules=[ModuleInfo("fc", "Linear", 6, (step, 2), "float32")]
    )


def written(path: Path, num_steps: int) -> Store:
    """An open store: the first record is in the file, the others in the journal, each with a finding."""
    store = Store(path, configuration={"a": 1})
    for step in range(num_steps):
        store.write(record(step), [Finding(step, "dead_units", "fc", RMS, f"Dead in {step}.", steps_before=np.int64(step))])  # type: ignore[arg-type]
    return store


def assert_has(store: StoreReader, num_steps: int) -> None:
    """Everything of so many records is read, by every method."""
    steps = np.arange(num_steps)
    keys = [RMS, LATE] if num_steps > 2 else [RMS]
    assert (store.keys(), store.histogram_keys(), store.kinds()) == (keys, [HIST], ["activation", "gradient"][: len(keys)])
    np.testing.assert_array_equal(store.series(RMS), [steps, 0.5 * steps])
    np.testing.assert_array_equal(store.histogram(HIST)[1][:, 0], steps)
    np.testing.assert_array_equal(store.histogram_matrix("activation").counts[:, 0, 7], steps)
    assert [finding.words for finding in store.findings()] == [f"Dead in {step}." for step in steps]
    assert [finding.steps_before for finding in store.findings()] == steps.tolist()
    assert store.modules() == [ModuleInfo("fc", "Linear", 6, (num_steps - 1, 2), "float32")]
    if num_steps > 2:
        np.testing.assert_array_equal(store.series(LATE), [steps[2:], -steps[2:].astype(float)])
        np.testing.assert_array_equal(store.matrix("gradient").values[:, 0], -steps[2:])
        both = store.series(".*")
        np.testing.assert_array_equal(both[1][:, 1], [np.nan, np.nan, *-steps[2:]])


def test_file_and_journal_are_read_as_one(tmp_path: Path) -> None:
    """While the run writes, after a kill, after a repair and at the end; alone the file is what it was with the first record."""
    path = tmp_path / "m.h5"
    store = written(path, 5)
    assert_has(load_store(path), 5)
    assert load_store(path).attributes["configurations"][0]["configuration"] == {"a": 1}  # type: ignore[index]
    killed, alone = copy_of_killed(path, tmp_path / "killed.h5"), Path(shutil.copy(path, tmp_path / "alone.h5"))
    assert_has(load_store(killed), 5)
    assert_has(load_store(alone), 1)
    assert load_store(killed).repair()
    store.close()
    for one in (path, killed):
        assert not journal_path(one).exists()
        assert_has(load_store(one), 5)
        with h5py.File(one) as file:
            assert file["activation/values"][:, 0].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_the_journal_is_taken_in_when_it_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as the file, and as the limit; the file is then at most so far behind, and nothing is read twice."""
    monkeypatch.setattr(writer, "_SMALL", 5000)
    path, generations = tmp_path / "m.h5", set()
    with closing(Store(path, configuration={})) as store:
        for step in range(300):
            store.write(Record.of(step, {RMS: float(step)}))
            with h5py.File(path) as file:
                generations.add(int(file.attrs["generation"]))
                assert step - file["activation/steps"][-1] < 200
            beside = journal_path(path)
            assert not beside.exists() or beside.stat().st_size < max(5000, path.stat().st_size) + 300
    assert len(generations) > 2
    np.testing.assert_array_equal(load_store(path).series(RMS), [np.arange(300)] * 2)


@pytest.mark.parametrize(("share", "is_taken_in"), [(0.005, True), (0.02, False)])
def test_an_old_journal_is_taken_in_if_that_is_cheap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, is_taken_in: bool
) -> None:
    """After ten minutes, if replacing the file took less than 1 % of the run."""
    times = {"now": 0.0}
    monkeypatch.setattr(writer.time, "monotonic", lambda: times["now"])
    path = tmp_path / "m.h5"
    with closing(Store(path, configuration={})) as store:
        for step in range(3):
            store.write(Record.of(step, {RMS: float(step)}))
        store._seconds = share * 1000
        for step, now in ((3, 599.0), (4, 1000.0)):
            times["now"] = now
            store.write(Record.of(step, {RMS: float(step)}))
            with h5py.File(path) as file:
                assert len(file["activation/steps"]) == (5 if now == 1000 and is_taken_in else 1)


def test_a_checkpoint_brings_the_file_up_to_date(tmp_path: Path) -> None:
    """So that a copy of the folder has both; without a new record the file stays as it is."""
    path = tmp_path / "m.h5"
    store = written(path, 3)
    store.checkpoint()
    inode = path.stat().st_ino
    assert_has(load_store(Path(shutil.copy(path, tmp_path / "alone.h5"))), 3)
    store.checkpoint()
    assert path.stat().st_ino == inode
    store.close()
    store.checkpoint()
    assert_has(load_store(path), 3)


def test_columns_that_come_twice_are_columns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an interrupt between the write of a frame and the note that it was written, at any frame."""
    path = tmp_path / "m.h5"
    store = Store(path, configuration={})
    for step in range(6):
        with monkeypatch.context() as context:
            if step in (0, 2, 3):
                context.setattr(writer.Encoder, "note_written", lambda *_arguments: None)
            store.write(Record.of(step, {RMS: 0.5 * step} | ({LATE: 1.0, "gradient/out/norm": float(step)} if step >= 2 else {})))
    for _ in range(2):
        reader = load_store(path)
        assert reader.keys() == [RMS, LATE, "gradient/out/norm"]
        assert reader.series(RMS)[1].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
        assert reader.series("gradient/out/norm")[1].tolist() == [2.0, 3.0, 4.0, 5.0]
        store.close()
    with h5py.File(path) as file:
        assert file["gradient/columns"][...].tolist() == [b"fc/norm", b"out/norm"]


SIGNALLED = """
import os, signal, threading, time
from lightning_module_monitor import load_store
from lightning_module_monitor.sinks.store import writer
writer._SMALL = 2000  # the file is replaced every few records
store, steps, interrupted, is_writing = Store(path, configuration={}), [0], 0, False

def interrupt(number, frame):
    # Not in this code itself: where the interrupt before is caught, or is about to be raised.
    if is_writing and frame.f_code.co_filename != "<string>":
        raise KeyboardInterrupt

def send():
    while not has_ended.wait(0.001):
        os.kill(os.getpid(), signal.SIGINT)

store.write(Record.of(0, {"activation/fc/rms": 0.0}))
signal.signal(signal.SIGINT, interrupt)
has_ended = threading.Event()
threading.Thread(target=send, daemon=True).start()
end, step = time.monotonic() + 5, 0
while time.monotonic() < end:
    step += 1
    try:
        is_writing = True
        store.write(Record.of(step, {"activation/fc/rms": 0.5 * step}))
        is_writing = False
        steps.append(step)
    except KeyboardInterrupt:
        is_writing = False
        interrupted += 1
has_ended.set()
store.close()
read, values = load_store(store.path).series("activation/fc/rms")
assert {*steps} <= {*read.tolist()}, "a record is missing"
assert len({*read.tolist()}) == len(read), "a record is there twice"
assert (values == 0.5 * read).all()
print(interrupted > 20, len(steps) > 20, store.path == path)
"""


@pytest.mark.skipif(os.name == "nt", reason="no signals to send to oneself")
def test_ctrl_c_at_any_moment(tmp_path: Path) -> None:
    """Hundreds of interrupts, also while HDF5 writes, end no process, and no record that was written is lost."""
    process = start(SIGNALLED, tmp_path / "m.h5")
    output, errors = process.communicate()
    assert (process.returncode, output) == (0, "True True True\n"), errors


IN_HDF5 = """
import os, signal
from lightning_module_monitor import load_store
from lightning_module_monitor.sinks.store import successor

class Disk(successor._Disk):
    def write(self, data):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        return super().write(data)

store, interrupted, num_terminated = Store(path, configuration={}), 0, 0

def terminate(number, frame):
    global num_terminated
    num_terminated += 1

signal.signal(signal.SIGTERM, terminate)
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
store.write(Record.of(0, {"activation/fc/rms": 0.0}))
successor._Disk = Disk
for step in range(1, 30):
    store.write(Record.of(step, {"activation/fc/rms": 0.5 * step, f"activation/{step}/rms": 1.0}))
    try:
        store.checkpoint()
    except KeyboardInterrupt:
        interrupted += 1
assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
print(interrupted, num_terminated > 29, load_store(path).series("activation/fc/rms")[0].tolist() == [*range(30)])
"""


@pytest.mark.skipif(os.name == "nt", reason="no signals to send to oneself")
def test_ctrl_c_while_hdf5_writes_comes_when_the_file_is_replaced(tmp_path: Path) -> None:
    """An exception that came out of a call of HDF5's would end the process, or be lost."""
    process = start(IN_HDF5, tmp_path / "m.h5")
    output, errors = process.communicate()
    assert (process.returncode, output) == (0, "29 True True\n"), errors


def test_a_checkpoint_leaves_a_file_of_another_run_alone(tmp_path: Path) -> None:
    """Which has come to its path since the last record: nothing is taken into it."""
    path, other = tmp_path / "m.h5", tmp_path / "other.h5"
    written(other, 1).close()
    store = written(path, 2)
    other.replace(path)
    before = path.read_bytes()
    store.checkpoint()
    assert path.read_bytes() == before
    store.write(record(2))
    store.close()
    assert path.read_bytes() == before
    assert load_store(store.path).series(RMS)[0].tolist() == [2]


def test_an_interrupt_while_a_journal_is_read_costs_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same reader reads everything afterwards: a part of a record that was taken in is not used."""
    path = tmp_path / "m.h5"
    store = written(path, 3)
    reader = load_store(path)
    assert_has(reader, 3)
    store.write(record(3), [Finding(3, "dead_units", "fc", RMS, "Dead in 3.", steps_before=3)])

    def interrupt(_group: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr("lightning_module_monitor.sinks.store.journal._dtype_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            reader.series(RMS)
    assert_has(reader, 4)
    store.close()


def test_damage_of_the_own_journal_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When the file is replaced, what is whole is in it."""
    path = tmp_path / "m.h5"
    store = written(path, 2)
    size = journal_path(path).stat().st_size
    store.write(record(2))
    store.write(record(3))
    with journal_path(path).open("r+b") as file:
        file.seek(size + 200)
        file.write(b"\xff\xfe\xfd")
    store.close()
    assert load_store(path).series(RMS)[0].tolist() == [0, 1]
    assert caplog.messages == [f"The journal of {path} is damaged: records since its last replacement are lost."]


# ------------------------------------------------------------------ what a kill leaves


def test_a_frame_that_was_cut_off_anywhere_is_not_read(tmp_path: Path) -> None:
    """Nor is a part of it: whatever the length, the whole records before it are there, for a reader and for the next writer."""
    path = tmp_path / "m.h5"
    store = written(path, 2)
    whole = journal_path(path).read_bytes()
    store.write(record(2))
    longer = journal_path(path).read_bytes()
    kept = copy_of_killed(path, tmp_path / "killed.h5")
    store.close()
    assert longer.startswith(whole)
    for length in [*range(len(whole), len(whole) + 60), *range(len(whole) + 60, len(longer), 211), len(longer) - 1]:
        journal_path(kept).write_bytes(longer[:length])
        assert load_store(kept).series(RMS)[0].tolist() == [0, 1], length
    resumed = Store(kept, configuration={"a": 1}, resumed=kept, resume_from=2)
    resumed.write(record(2))
    assert load_store(kept).series(RMS)[0].tolist() == [0, 1, 2]
    resumed.close()
    assert load_store(kept).series(RMS)[0].tolist() == [0, 1, 2]


def test_a_damaged_frame_is_reported_and_ends_the_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the place where it begins; an incomplete frame at the end is ignored."""
    path = tmp_path / "m.h5"
    store = written(path, 2)
    size = journal_path(path).stat().st_size
    store.write(record(2))
    store.write(record(3))
    killed = copy_of_killed(path, tmp_path / "killed.h5")
    store.close()
    content = bytearray(journal_path(killed).read_bytes())
    content[size + 200] ^= 1
    journal_path(killed).write_bytes(content)
    assert load_store(killed).series(RMS)[0].tolist() == [0, 1]
    [message] = caplog.messages
    assert "killed.h5 is damaged at byte" in message


def test_file_and_journal_of_different_generations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A journal that is in the file already is ignored; with a file that is older than the journal, a warning has it."""
    path = tmp_path / "m.h5"
    store = written(path, 3)
    first, journal_of_first = path.read_bytes(), journal_path(path).read_bytes()
    store.checkpoint()
    store.write(record(3))
    second, journal_of_second = path.read_bytes(), journal_path(path).read_bytes()
    store.close()
    for name, content, beside, num_steps in (
        ("same", second, journal_of_second, 4),
        ("older", second, journal_of_first, 3),
        ("newer", first, journal_of_second, 1),
    ):
        copy = tmp_path / f"{name}.h5"
        copy.write_bytes(content)
        journal_path(copy).write_bytes(beside)
        assert not caplog.messages
        assert load_store(copy).series(RMS)[0].tolist() == list(range(num_steps))
    assert all("newer.h5 is older than its journal, which is not read" in message for message in caplog.messages)
    assert caplog.messages


def test_a_journal_of_another_file_is_kept_under_another_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is never taken in; a run that begins one at its path says where it is."""
    path, other = tmp_path / "m.h5", tmp_path / "other.h5"
    written(path, 3)._leave()
    written(other, 2).close()
    shutil.move(other, path)
    assert_has(load_store(path), 2)
    foreign = journal_path(path).read_bytes()
    resumed = Store(path, configuration={"a": 1}, resumed=path, resume_from=2)
    resumed.write(record(2))
    resumed.close()
    assert load_store(path).series(RMS)[0].tolist() == [0, 1, 2]
    assert (tmp_path / "m.h5-2.journal").read_bytes() == foreign
    assert caplog.messages == [f"The journal {path}.journal belongs to another file than {path}; it is now {path}-2.journal."]


def test_a_journal_that_is_removed_costs_nothing(tmp_path: Path) -> None:
    """The file is replaced by one that has it, from the run's own open file."""
    path = tmp_path / "m.h5"
    store = written(path, 3)
    journal_path(path).unlink()
    store.write(record(3))
    store.write(record(4))
    assert load_store(path).series(RMS)[0].tolist() == [0, 1, 2, 3, 4]
    store.close()
    assert load_store(path).series(RMS)[0].tolist() == [0, 1, 2, 3, 4]


def test_a_file_that_is_replaced_during_the_run_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning; later records are in a new file, and those of the journal are kept. A file that is only touched is none."""
    path, other = tmp_path / "m.h5", tmp_path / "other.h5"
    written(other, 1).close()
    store = written(path, 2)
    os.utime(path, (1, 1))
    store.write(record(2))
    assert store.path == path
    other.replace(path)
    before = path.read_bytes()
    store.write(record(3))
    store.close()
    assert (path.read_bytes(), store.path) == (before, tmp_path / "m-2.h5")
    assert load_store(store.path).series(RMS)[0].tolist() == [3]
    kept, replaced, moved = caplog.messages
    assert f"The last records of {path} are in its journal, which is now {path}-2.journal" in kept
    assert "was replaced while the run wrote to it: the records from step 3 on are in a new file" in replaced
    assert f"This run writes to {store.path}" in moved


# ------------------------------------------------------------------ strangers


def frame(kind: bytes, payload: bytes, length: int | None = None, checksum: int | None = None) -> bytes:
    """A frame, by the documented form."""
    checksum = zlib.crc32(kind + payload) if checksum is None else checksum
    return struct.pack("<QIc", len(payload) if length is None else length, checksum, kind) + payload


def record_frame(change: dict[str, object], numbers: bytes = struct.pack("<d", 1.0)) -> bytes:
    """A frame of a record with one row, or with something else."""
    content = {"step": 5, "time": "2026-01-01", "columns": {}, "rows": {"activation": 1}, "findings": [], "facts": None, "modules": []}
    text = json.dumps({**content, **change}).encode()
    return frame(b"R", struct.pack("<I", len(text)) + text + numbers)


FINDING = {"step": 1, "name": "a", "site": "", "key": "", "words": "w", "severity": "error", "steps_before": 0, "cause": ""}
HOSTILE: dict[str, bytes] = {
    "a huge length": frame(b"R", b"x", length=2**63) * 3,
    "a length beyond 64 bits": b"\xff" * 13,
    "a wrong checksum": frame(b"R", b"x", checksum=7) * 3,
    "an unknown type": frame(b"X", b"x"),
    "a second head": frame(b"H", json.dumps(HEAD).encode()),
    "a million frames of one byte": frame(b"R", b"x") * 1_000_000,
    "a million empty frames": frame(b"R", b"") * 1_000_000,
    "a million ends": frame(b"E", b"") * 1_000_000,
    "JSON that is none": frame(b"R", struct.pack("<I", 2) + b"{]"),
    "JSON longer than the frame": frame(b"R", struct.pack("<I", 2**32 - 1) + b"{}"),
    "deep JSON": frame(b"R", struct.pack("<I", 100_000) + b"[" * 100_000),
    "a list": frame(b"R", struct.pack("<I", 2) + b"[]"),
    "more columns than the table": record_frame({"rows": {"activation": 3}}, bytes(24)),
    "a row longer than the frame": record_frame({"rows": {"activation": 2**60}}),
    "a negative row": record_frame({"rows": {"activation": -1}}),
    "a row of text": record_frame({"rows": {"activation": "1"}}),
    "bytes behind the rows": record_frame({}, bytes(800)),
    "a step too large": record_frame({"step": 2**70}),
    "a step that is a text": record_frame({"step": "five"}),
    "a table above": record_frame({"columns": {"../activation": ["a"]}, "rows": {"../activation": 1}}),
    "a table inside a table": record_frame({"columns": {"activation/values": ["a"]}, "rows": {"activation/values": 1}}),
    "superseded rows": record_frame({"columns": {"superseded/1/activation": ["a"]}, "rows": {"superseded/1/activation": 1}}),
    "columns that are numbers": record_frame({"columns": {"gradient": [1, 2]}}),
    "columns that are no text": record_frame({"columns": {"gradient": ["\ud800"]}}),
    "a finding with more": record_frame({"findings": [{**FINDING, "more": 1}]}),
    "a finding with a list": record_frame({"findings": [{**FINDING, "words": ["w"]}]}),
    "a finding with less": record_frame({"findings": [{"step": 1}]}),
    "facts that are none": record_frame({"facts": {"parameters": 3}}),
    "a module that is none": record_frame({"modules": [["fc"]]}),
    "a module with a number": record_frame({"modules": [[1, "Linear", 6, None, ""]]}),
}
HEADS: dict[str, bytes] = {
    "no head": b"not a journal at all, but longer than a frame",
    "a head that is a list": frame(b"H", b"[]"),
    "a head with less": frame(b"H", b'{"format": 1}'),
    "a newer head": frame(b"H", json.dumps({**HEAD, "format": 2}).encode()),
    "a head of texts": frame(b"H", json.dumps({**HEAD, "generation": "1"}).encode()),
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A closed store with one column and one step."""
    monkeypatch.chdir(tmp_path)
    with closing(Store(tmp_path / "m.h5", configuration={})) as store:
        store.write(Record.of(0, {RMS: 0.0}))
    return tmp_path / "m.h5"


def head_of(path: Path) -> bytes:
    """The head of a journal that goes on from a file."""
    with h5py.File(path) as file:
        return frame(
            b"H", json.dumps({**HEAD, "lineage": file.attrs["lineage"].decode(), "generation": int(file.attrs["generation"])}).encode()
        )


@pytest.mark.parametrize("content", [*HOSTILE.values(), *HEADS.values()], ids=[*HOSTILE, *HEADS])
def test_a_hostile_journal_is_a_line_or_not_read(path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, no memory for a length that is not there, and never a number that is not in the file."""
    before = path.read_bytes()
    journal_path(path).write_bytes(content if content in HEADS.values() else head_of(path) + content)
    tracemalloc.start()
    for command in ("keys", "summary", "export", "repair"):
        status = main([command, "m.h5"])
        errors = capsys.readouterr().err.splitlines()
        assert (status, len(errors)) in {(0, 0), (1, 0), (2, 1)}, (command, errors)
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * len(content) + (64 << 20)
    if status == 2:
        assert path.read_bytes() == before
        assert "is damaged" in errors[0] or "has format 2" in errors[0]
    else:
        assert load_store(path).series(RMS)[0].tolist() == [0]


def test_the_form_is_the_documented_one(path: Path) -> None:
    """A journal that is made here by the form that the module documents is read, and taken in by a repair."""
    content = {"columns": {"activation": ["fc/std"]}, "rows": {"activation": 2}, "findings": [FINDING]}
    journal_path(path).write_bytes(head_of(path) + record_frame(content, struct.pack("<dd", 1.0, 2.0)))
    for _ in range(2):
        store = load_store(path)
        assert store.series(RMS)[1].tolist() == [0.0, 1.0]
        assert store.series("activation/fc/std")[0].tolist() == [5]
        assert [finding.words for finding in store.findings()] == ["w"]
        store.repair()


def test_rows_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    """A series of one key needs the memory of that key, and an index of 24 bytes for a row, whatever the journal has."""
    path, num_keys = tmp_path / "m.h5", 20_000
    store, columns = Store(path, configuration={}), Columns.of(f"activation/m.{index}/rms" for index in range(num_keys))
    for step in range(60):
        store.write(Record(step, columns, np.full(num_keys, float(step))))
    assert journal_path(path).stat().st_size > 59 * 8 * num_keys
    reader = load_store(path)
    tracemalloc.start()
    steps, values = reader.series("activation/m.777/rms")
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert steps.tolist() == values.tolist() == list(range(60))
    assert peak < 60 * 8 * num_keys / 2
    store.close()


def test_a_column_is_read_without_the_others(tmp_path: Path) -> None:
    """Of the file, the chunks of a column alone are read."""
    path, num_keys = tmp_path / "m.h5", 4000
    with closing(Store(path, configuration={})) as store:
        for step in range(40):
            store.write(Record.of(step, {f"activation/m.{index}/rms": float(step) for index in range(num_keys)}))
    with h5py.File(path) as file:
        rows, columns = file["activation/values"].chunks
        assert rows * columns * 8 <= 1 << 16
        assert columns < num_keys / 4


def test_a_run_that_ended_says_so(tmp_path: Path) -> None:
    """In a journal that could not be taken in at the end."""
    with closing(Store(tmp_path / "m.h5", configuration={})) as store:
        store.write(record(0))
        store.write(record(1))
        beside = journal_path(store.path)
        assert not Journal(io.BytesIO(beside.read_bytes())).index.has_ended
        store._replace_file = lambda: False  # type: ignore[method-assign]
    assert Journal(io.BytesIO(beside.read_bytes())).index.has_ended
    assert load_store(store.path).series(RMS)[0].tolist() == [0, 1]
