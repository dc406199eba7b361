"""The store's writer: content, files, and errors."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from helpers.stores import copy_of_killed, digests
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_module_monitor.record import Finding, ModuleInfo, Record
from lightning_module_monitor.sinks.store import lock, rows, schema
from lightning_module_monitor.sinks.store.paths import is_numbered_path_of, tensors_path
from lightning_module_monitor.sinks.store.reader import load_store
from lightning_module_monitor.sinks.store.tensors import RunFiles
from lightning_module_monitor.sinks.store.writer import Store

RMS = "activation/model.fc/rms"
STD = "activation/model.fc/std"


def bits(value: float) -> bytes:
    """A float's eight bytes: -0.0 differs from 0.0, and NaNs differ by their bits."""
    return struct.pack("<d", value)


def store(path: Path, *records: Record, findings: Mapping[int, Sequence[Finding]] | None = None, **options: object) -> Store:
    """A closed store with these records, and the findings that come with them, by the step of the record."""
    resumed = {"resumed": path} if "resume_from" in options else {}
    opened = Store(path, **{"configuration": {}, **resumed, **options})  # type: ignore[arg-type]
    for record in records:
        opened.write(record, (findings or {}).get(record.step, ()))
    opened.close()
    return opened


def content(path: Path) -> dict[str, list[tuple[int, bytes]]]:
    """All values of a store, bit-exact: (step, bits) by key."""
    reader = load_store(path)
    keys = reader.keys()
    return {key: [(int(step), bits(value)) for step, value in zip(*reader.series(key), strict=True)] for key in keys}


part = st.text("abcXYZ019_.-é", min_size=1, max_size=8) | st.sampled_from(
    ["values", "steps", "columns", "logged", "values_", ".", "monitor", "errors", "_", "superseded"]
)
any_key = st.lists(part, min_size=1, max_size=5).map("/".join) | st.sampled_from(["", "a/", "/a", "a//b", "a//b/c", "//", "logged/x"])


@given(any_key)
def test_a_key_comes_back_from_its_place(key: str) -> None:
    """Group and column determine the key, for any text."""
    group, column = schema.split(key)
    assert schema.join(group, column) == key
    assert not {"", ".", "values", "steps", "columns", "superseded"} & set(group.split("/"))


plain_key = st.sampled_from(
    [
        RMS,
        STD,
        "validation/activation/model.fc/rms",
        "run1/activation/fc/rms",
        "run1/test/update/fc/ratio",
        "monitor/errors",
        "loss",
        "validation/loss",
    ]
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.dictionaries(plain_key, st.floats(width=64), min_size=1), min_size=1, max_size=8))
def test_round_trip_is_bit_exact(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, float]]) -> None:
    """Every value is read bit for bit, from the journal and from the file, also NaN, infinities and -0.0; absent values are not read."""
    path = tmp_path_factory.mktemp("store") / "monitor.h5"
    opened = Store(path, configuration={})
    for i, row in enumerate(rows):
        opened.write(Record.of(10 * i, row))
    expected: dict[str, list[tuple[int, bytes]]] = {}
    for i, row in enumerate(rows):
        for key, value in row.items():
            expected.setdefault(key, []).append((10 * i, bits(value)))
    assert content(path) == expected
    opened.close()
    assert content(path) == expected


def test_a_recorded_nan_is_not_an_absent_value(tmp_path: Path) -> None:
    """A recorded NaN is read; a step without a value of the key is left out."""
    store(tmp_path / "m.h5", Record.of(0, {RMS: math.nan, STD: 1.0}), Record.of(1, {STD: 2.0}), Record.of(2, {RMS: 3.0}))
    steps, values = load_store(tmp_path / "m.h5").series(RMS)
    assert steps.tolist() == [0, 2]
    np.testing.assert_array_equal(values, [math.nan, 3.0])


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    """Groups, columns, scales and attributes are as documented, for other tools."""
    keys = [RMS, STD, "validation/activation/model.fc/rms", "monitor/errors", "loss"]
    store(tmp_path / "m.h5", Record.of(7, dict.fromkeys(keys, 1.5)), configuration={"every_n_steps": 7})
    with h5py.File(tmp_path / "m.h5") as file:
        assert set(file) == {"activation", "validation", "monitor", "logged", "findings", "facts", "last record"}
        assert file["activation/columns"][...].tolist() == [b"model.fc/rms", b"model.fc/std"]
        assert file["monitor/columns"][...].tolist() == [b"errors"]
        assert file["logged/columns"][...].tolist() == [b"loss"]
        values = file["validation/activation/values"]
        assert (values.dtype, values.shape, values[0, 0]) == (np.dtype("f8"), (1, 1), 1.5)
        assert file["activation/steps"][...].tolist() == [7]
        assert file["activation/values"].dims[0][0].name == "/activation/steps"
        assert file["activation/values"].dims[1][0].name == "/activation/columns"
        assert file.attrs["format_version"] == 1
        assert set(file.attrs) == {"format_version", "package_version", "started", "configurations", "lineage", "generation", "run"}


@pytest.mark.filterwarnings("ignore")
def test_xarray_opens_a_closed_file(tmp_path: Path) -> None:
    """A closed file is plain HDF5: xarray reads the same numbers, and opens groups with a table of modules."""
    xarray = pytest.importorskip("xarray")
    modules = [ModuleInfo("model.fc", "Linear", 3, (2, 1), "float32")]
    store(tmp_path / "m.h5", Record.of(0, {RMS: 1.0, STD: -2.0}, modules=modules), Record.of(5, {RMS: 3.0, STD: math.inf}))
    with xarray.open_dataset(tmp_path / "m.h5", engine="h5netcdf") as dataset:
        assert "module table" in dataset.variables
    with xarray.open_dataset(tmp_path / "m.h5", group="activation", engine="h5netcdf") as dataset:
        assert dataset["steps"].values.tolist() == [0, 5]
        assert dataset["values"].values.tolist() == [[1.0, -2.0], [3.0, math.inf]]
        assert [bytes(name).decode() for name in dataset["columns"].values] == ["model.fc/rms", "model.fc/std"]


def test_nothing_recorded_leaves_no_file(tmp_path: Path) -> None:
    """A run without records creates neither file nor folder; a run without tensors only the store, and no lock."""
    store(tmp_path / "logs" / "m.h5", Record.of(0, {}), keys=[RMS])
    assert list(tmp_path.iterdir()) == []
    files = RunFiles(tmp_path / "m.h5", configuration={})
    files.write(Record.of(0, {RMS: 1.0}))
    files.close()
    assert [path.name for path in tmp_path.iterdir()] == ["m.h5"]


def test_close_leaves_only_the_file_and_does_no_harm_twice(tmp_path: Path) -> None:
    """After close there is one plain file, no lock and no temporary file; a second close and a late record change nothing."""
    path = tmp_path / "new" / "folder" / "m.h5"
    opened = Store(path, configuration={})
    opened.write(Record.of(0, {RMS: 1.0}))
    assert {entry.name for entry in path.parent.iterdir()} == {"m.h5", "m.h5.journal", ".m.h5.lock"}
    opened.close()
    before = digests(path)
    opened.close()
    opened.write(Record.of(1, {RMS: 2.0}))
    assert digests(path) == before
    assert [entry.name for entry in path.parent.iterdir()] == ["m.h5"]
    assert not opened.failed


def test_an_existing_file_is_never_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new run uses the next free numbered name, logs it, and changes no other file."""
    path = tmp_path / "monitor.h5"
    store(path, Record.of(0, {RMS: 1.0}))
    (tmp_path / "monitor-2.h5").write_text("notes of mine")
    before = digests(path), digests(tmp_path / "monitor-2.h5")
    second = store(path, Record.of(0, {RMS: 2.0}))
    assert second.path == tmp_path / "monitor-3.h5"
    assert content(second.path) == {RMS: [(0, bits(2.0))]}
    assert (digests(path), digests(tmp_path / "monitor-2.h5")) == before
    assert [r.getMessage() for r in caplog.records] == [
        f"The store at {path} is left as it is: it exists. This run writes to {second.path}."
    ]


def test_two_records_of_one_step_are_one_row(tmp_path: Path) -> None:
    """Two records of a step share a row; the later value counts; other stages have rows of their own."""
    validation = "validation/activation/model.fc/rms"
    store(
        tmp_path / "m.h5",
        Record.of(4, {RMS: 1.0, validation: 9.0}),
        Record.of(4, {STD: 2.0}),
        Record.of(4, {RMS: math.nan}),
        Record.of(5, {RMS: 5.0}),
    )
    assert content(tmp_path / "m.h5") == {
        RMS: [(4, bits(math.nan)), (5, bits(5.0))],
        STD: [(4, bits(2.0))],
        validation: [(4, bits(9.0))],
    }
    with h5py.File(tmp_path / "m.h5") as file:
        assert file["activation/steps"][...].tolist() == [4, 5]


def test_late_keys_are_added_and_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A branch that first runs at step 2 gets columns; earlier rows stay; an existing reader reads both."""
    caplog.set_level(logging.INFO)
    opened = Store(tmp_path / "m.h5", configuration={}, keys=[RMS])
    for step in range(2):
        opened.write(Record.of(step, {RMS: float(step)}))
    reader = load_store(tmp_path / "m.h5")
    assert reader.keys() == [RMS]
    late = {STD: 8.0, "update/model.fc/ratio": 9.0}
    for step in range(2, 4):
        opened.write(Record.of(step, {RMS: float(step), **late}))
    assert reader.keys() == [RMS, STD, "update/model.fc/ratio"]
    assert reader.series(RMS)[1].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert reader.series(STD)[0].tolist() == [2, 3]
    opened.close()
    assert reader.keys() == [RMS, STD, "update/model.fc/ratio"]
    assert reader.series(STD)[1].tolist() == [8.0, 8.0]
    assert [record.getMessage() for record in caplog.records] == [f"Step 2 brought 2 new keys ({STD}, update/model.fc/ratio)."]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.h5"]


def test_resume_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """Rows of repeated steps are superseded, columns are united, both configurations are kept."""
    path = tmp_path / "m.h5"
    store(path, *(Record.of(step, {RMS: float(step)}) for step in range(5)), configuration={"run": 1})
    resumed = store(path, Record.of(3, {STD: 30.0, RMS: 31.0}), Record.of(4, {RMS: 40.0}), configuration={"run": 2}, resume_from=3)
    assert resumed.path == path
    assert content(path) == {
        RMS: [(0, bits(0.0)), (1, bits(1.0)), (2, bits(2.0)), (3, bits(31.0)), (4, bits(40.0))],
        STD: [(3, bits(30.0))],
    }
    runs = load_store(path).attributes["configurations"]
    assert [(run["first_step"], run["configuration"]) for run in runs] == [(0, {"run": 1}), (3, {"run": 2})]  # type: ignore[attr-defined]
    h5py.File(path).close()


def superseded(path: Path, number: int) -> dict[str, list[tuple[int, float]]]:
    """The superseded rows, read by plain h5py: (step, value) by key."""
    found: dict[str, list[tuple[int, float]]] = {}
    with h5py.File(path) as file:
        for kind, group in file[f"superseded/{number}"].items():
            if kind not in ("findings", "facts"):
                for index, column in enumerate(group["columns"][...].tolist()):
                    pairs = zip(group["steps"][...].tolist(), group["values"][:, index].tolist(), strict=True)
                    found[f"{kind}/{column.decode()}"] = [(step, value) for step, value in pairs if not math.isnan(value)]
    return found


def test_rows_that_are_run_again_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each resumed run has a group, also with findings; readers skip it; a message has file, first step and number of rows."""
    caplog.set_level(logging.INFO)
    path, norm = tmp_path / "m.h5", "gradient/fc/norm"
    found = [Finding(step, "spike", "fc", RMS, "It is high.") for step in range(5)]
    store(path, *(Record.of(step, {RMS: step, norm: step + 0.5}) for step in range(5)), findings={one.step: [one] for one in found})
    store(path, *(Record.of(step, {RMS: 10 * step}) for step in (3, 4)), resume_from=3)
    store(path, Record.of(4, {RMS: 100, STD: 100}), resume_from=4)
    store(path, Record.of(5, {RMS: 5}), resume_from=5)
    assert superseded(path, 1) == {RMS: [(3, 3), (4, 4)], norm: [(3, 3.5), (4, 4.5)]}
    assert superseded(path, 2) == {RMS: [(4, 40)]}
    reader = load_store(path)
    assert content(path) == {
        RMS: [(step, bits(value)) for step, value in enumerate([0, 1, 2, 30, 100, 5])],
        STD: [(4, bits(100))],
        norm: [(step, bits(step + 0.5)) for step in range(3)],
    }
    assert sorted(reader.kinds()) == ["activation", "gradient"]
    assert reader.findings() == found[:3]
    with h5py.File(path) as file:
        assert rows.read_findings(file["superseded/1"]) == found[3:]
        assert list(file["superseded"]) == ["1", "2"]
    assert caplog.messages == [
        f"{path} goes on from step 3; 4 rows of steps that run again are now in its group superseded.",
        f"{path} goes on from step 4; 1 rows of steps that run again are now in its group superseded.",
        f"{path} goes on from step 5.",
    ]


def test_what_is_superseded_stays_when_the_file_is_written_anew(tmp_path: Path) -> None:
    """A further replacement and a repair after a kill keep the superseded rows."""
    path = tmp_path / "m.h5"
    store(path, *(Record.of(step, {RMS: step}) for step in range(4)))
    opened = Store(path, configuration={}, resumed=path, resume_from=2)
    for step in range(2, 5):
        opened.write(Record.of(step, {RMS: -step} | ({STD: 1.0} if step == 4 else {})))
    copy_of_killed(path, tmp_path / "killed.h5")
    opened.close()
    load_store(tmp_path / "killed.h5").repair()
    for file in (path, tmp_path / "killed.h5"):
        assert superseded(file, 1) == {RMS: [(2, 2), (3, 3)]}
        assert content(file)[STD] == [(4, bits(1.0))]


def test_a_resumed_run_elsewhere_begins_with_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rows before its first step are copied, the other file is unchanged, and a message and the attributes name it."""
    caplog.set_level(logging.INFO)
    path, own = tmp_path / "first.h5", tmp_path / "own" / "m.h5"
    store(path, *(Record.of(step, {RMS: step}) for step in range(5)), configuration={"run": 1})
    store(path, Record.of(4, {RMS: 40}), configuration={"run": 1}, resume_from=4)
    before = digests(path)
    caplog.clear()
    store(own, Record.of(3, {STD: 1.0}), configuration={"run": 1}, resumed=path, resume_from=3)
    assert digests(path) == before
    assert content(own) == {RMS: [(step, bits(step)) for step in range(3)], STD: [(3, bits(1.0))]}
    with h5py.File(own) as file:
        assert "superseded" not in file
    runs: Any = load_store(own).attributes["configurations"]
    assert [(run["first_step"], run.get("copied_from")) for run in runs] == [(0, None), (4, None), (3, str(path))]
    assert caplog.messages == [
        f"{own} goes on from step 3; it begins with a copy of 3 rows of earlier steps from {path}, which is left as it is."
    ]


def test_a_resumed_run_reads_the_file_of_a_live_run(tmp_path: Path) -> None:
    """Also the file of a killed run: neither is changed."""
    path = tmp_path / "first.h5"
    live = Store(path, configuration={})
    for step in range(4):
        live.write(Record.of(step, {RMS: step}))
    killed = copy_of_killed(path, tmp_path / "killed.h5")
    before = digests(path), digests(killed)
    for number, resumed in enumerate((path, killed)):
        own = store(tmp_path / f"own{number}.h5", Record.of(2, {RMS: 20.0}), resumed=resumed, resume_from=2)
        assert content(own.path) == {RMS: [(0, bits(0)), (1, bits(1)), (2, bits(20))]}
    assert (digests(path), digests(killed)) == before
    live.close()


def test_a_resumed_run_whose_other_file_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It begins without the copy, and logs the reason; a missing file is no failure."""
    path, own = tmp_path / "first.h5", tmp_path / "own.h5"
    path.write_text("not HDF5 at all")
    store(own, Record.of(3, {RMS: 1.0}), resumed=path, resume_from=3)
    assert content(own) == {RMS: [(3, bits(1.0))]}
    (message,) = caplog.messages
    assert "not a readable HDF5 file" in message
    caplog.clear()
    store(tmp_path / "third.h5", Record.of(3, {RMS: 1.0}), resumed=tmp_path / "gone.h5", resume_from=3)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("name", "is_own"),
    [("m.h5", True), ("m-2.h5", True), ("m-17.h5", True), ("m-2b.h5", False), ("n.h5", False), ("m.h5.h5", False), ("../m.h5", False)],
)
def test_the_names_that_a_run_writes_by_itself(tmp_path: Path, name: str, is_own: bool) -> None:
    """The wanted path, and the numbered names beside it."""
    assert is_numbered_path_of((tmp_path / name).resolve(), tmp_path / "m.h5") is is_own


def spoil(path: Path, how: str) -> None:
    """Make a store a file that cannot be continued."""
    if how == "text":
        path.write_text("not HDF5 at all")
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:3000])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "foreign":
        with h5py.File(path, "w") as file:
            file["weights"] = [1.0]
    elif how == "newer":
        with h5py.File(path, "r+") as file:
            file.attrs["format_version"] = 2
    elif how == "incomplete":
        with h5py.File(path, "r+") as file:
            del file["activation/steps"]


REASONS = {
    "text": "not a readable HDF5 file",
    "truncated": "not a readable HDF5 file",
    "empty": "not a readable HDF5 file",
    "foreign": "HDF5 file of another program",
    "newer": "format version 2, newer than 1",
}


@pytest.mark.parametrize(("how", "reason"), [*(one for one in REASONS.items() if one[0] != "empty"), ("incomplete", "steps")])
def test_resume_leaves_alone_what_it_cannot_continue(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, reason: str) -> None:
    """A damaged, foreign or newer file is not changed: a numbered name, and a warning with the reason."""
    path = tmp_path / "m.h5"
    store(path, *(Record.of(step, {RMS: 1.0}) for step in range(100)))
    spoil(path, how)
    before = digests(path)
    resumed = store(path, Record.of(3, {RMS: 2.0}), resume_from=3)
    assert digests(path) == before
    assert resumed.path == tmp_path / "m-2.h5"
    assert content(resumed.path) == {RMS: [(3, bits(2.0))]}
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m-2.h5", "m.h5"]


@pytest.mark.parametrize("resumes", [False, True])
def test_an_empty_file_is_free(tmp_path: Path, caplog: pytest.LogCaptureFixture, resumes: bool) -> None:
    """The name of an empty file without a lock, the store's or the tensors', is used."""
    path = tmp_path / "m.h5"
    path.touch()
    tensors_path(path).touch()
    opened = store(path, Record.of(3, {RMS: 1.0}), **({"resume_from": 3} if resumes else {}))
    assert opened.path == path
    assert content(path) == {RMS: [(3, bits(1.0))]}
    assert not caplog.messages


def test_an_empty_file_whose_lock_is_held_is_not(tmp_path: Path) -> None:
    """Another run is about to create its file there."""
    path = tmp_path / "m.h5"
    path.touch()
    held = lock.acquire(path)
    assert held is not None
    assert store(path, Record.of(0, {RMS: 1.0})).path == tmp_path / "m-2.h5"
    lock.release(held)


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    """The next run that tries the name removes locks and temporary files; those of a live run stay."""
    path = tmp_path / "m.h5"
    store(path, Record.of(0, {RMS: 1.0}))
    store(path, Record.of(0, {RMS: 1.0}))
    for name in ("m.h5", "m.tensors.h5"):
        (tmp_path / f".{name}.lock").touch()
        (tmp_path / f".{name}.new").write_bytes(b"half a file")
    (tmp_path / ".m.h5.journal.new").write_bytes(b"half a journal")
    live = Store(tmp_path / "m-2.h5", configuration={}, resumed=tmp_path / "m-2.h5")
    live.write(Record.of(1, {RMS: 1.0}))
    assert store(path, Record.of(0, {RMS: 1.0})).path == tmp_path / "m-3.h5"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".m-2.h5.lock", "m-2.h5", "m-2.h5.journal", "m-3.h5", "m.h5"]
    live.close()


@pytest.mark.parametrize(("how", "reason"), REASONS.items())
def test_errors_of_load_store_have_the_reason(tmp_path: Path, how: str, reason: str) -> None:
    """A file that is not a store is an error with its path and the reason."""
    path = tmp_path / "m.h5"
    store(path, Record.of(0, {RMS: 1.0}))
    spoil(path, how)
    with pytest.raises(ValueError, match=reason) as caught:
        load_store(path)
    assert str(path) in str(caught.value)


# ------------------------------------------------------------------ failures


def test_a_broken_write_does_not_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Any error of a write, also a key that is no text, is one warning."""
    opened = Store(tmp_path / "m.h5", configuration={})
    opened.write(Record.of(0, {RMS: 1.0}))
    opened.write(Record.of(1, {"activation/\ud800/rms": 1.0}))
    opened.write(Record.of(2, {RMS: 2.0}))
    assert opened.failed
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert content(tmp_path / "m.h5") == {RMS: [(0, bits(1.0))]}


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A read-only folder is one warning and no file."""
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o555)
    if os.access(folder, os.W_OK):  # root may write everywhere: a file in the folder's place refuses root, too
        folder.rmdir()
        folder.write_text("")
    opened = store(folder / "m.h5", Record.of(0, {RMS: 1.0}))
    assert opened.failed
    assert [str(folder) in record.getMessage() for record in caplog.records] == [True]


def test_a_file_of_an_older_version_is_read_and_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its findings have neither first step nor cause, and it has no journal: a resumed run begins a file of its own."""
    path = tmp_path / "m.h5"
    later = [Finding(step, "dead_units", "fc", RMS, "Units are dead.", "error", steps_before=1, cause="data") for step in (1, 2, 3)]
    plain = [dataclasses.replace(one, steps_before=0, cause="") for one in later]
    with monkeypatch.context() as context:
        context.setitem(rows.DTYPES, rows.FINDINGS, rows.DTYPES[rows.FINDINGS][["step", "name", "site", "key", "severity", "words"]])
        store(path, *(Record.of(one.step, {RMS: 1.0}) for one in later), findings={one.step: [one] for one in later})
    with h5py.File(path, "r+") as file:
        for name in ("lineage", "generation", "run"):
            del file.attrs[name]
    assert load_store(path).findings() == plain
    before = path.read_bytes()
    store(path, Record.of(3, {RMS: 2.0}), findings={3: [later[2]]}, resume_from=3)
    assert path.read_bytes() == before
    assert load_store(tmp_path / "m-2.h5").findings() == [later[2]]
    [message] = caplog.messages
    assert "cannot be resumed: it was written by an earlier version, whose files are read, but not continued. This run" in message


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc on this system")
def test_where_no_file_can_be_made_there_is_no_lock() -> None:
    """The error is raised at once: filelock would try for ever in a folder where no file can be created."""
    with pytest.raises(OSError, match="No such file"):
        lock.acquire(Path("/proc/monitor.h5"))
