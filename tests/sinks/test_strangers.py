"""Files from strangers: nothing outside of them is read, no shape takes memory, and whatever is wrong is one line."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from helpers.stores import write_store

from lightning_module_monitor import load_store
from lightning_module_monitor.cli import main
from lightning_module_monitor.histogram import NUM_COUNTS, Histogram
from lightning_module_monitor.record import RawTensor, Record
from lightning_module_monitor.sinks.store.paths import tensors_path
from lightning_module_monitor.sinks.store.tensors import TensorStore
from lightning_module_monitor.sinks.store.writer import Store

SERIES = {"activation/fc/rms": [1.0, 2.0], "gradient/fc/norm": [3.0, 4.0]}
COMMANDS = ["keys", "summary", "export", "report", "repair"]
SECRET = np.array([[1234.5], [6789.0]])


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with numbers and histograms, and a secret file beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_bytes(SECRET.tobytes())
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["values"], file["steps"] = SECRET, np.array([0, 10])
        file["columns"] = np.array([b"fc/rms"])
    histograms = {"activation/fc/hist": [Histogram(np.ones(NUM_COUNTS, np.int64))] * 2}
    return write_store(tmp_path / "m.h5", SERIES, histograms=histograms)


def one_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The single error line of a command with status 2."""
    status = main(arguments)
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), err
    (line,) = err.splitlines()
    return line


# ------------------------------------------------------------------ data outside of the file


def external_storage(file: h5py.File) -> None:
    """The numbers are the bytes of another file."""
    del file["activation/values"]
    file["activation"].create_dataset("values", SECRET.shape, "f8", external=[(str(Path("secret").resolve()), 0, h5py.h5f.UNLIMITED)])


def external_link(file: h5py.File) -> None:
    """The numbers are a dataset of another file."""
    del file["activation/values"]
    file["activation/values"] = h5py.ExternalLink("secret.h5", "/values")


def linked_group(file: h5py.File) -> None:
    """A kind is a group of another file."""
    file["update"] = h5py.ExternalLink("secret.h5", "/")


def soft_link(file: h5py.File) -> None:
    """The numbers are elsewhere in the file, or nowhere."""
    file["update"] = h5py.SoftLink("/activation")


def virtual(file: h5py.File) -> None:
    """The numbers are views of another file."""
    del file["activation/values"]
    view = h5py.VirtualLayout(SECRET.shape, "f8")
    view[...] = h5py.VirtualSource("secret.h5", "values", SECRET.shape)
    file["activation"].create_virtual_dataset("values", view)


OUTSIDE = [external_storage, external_link, linked_group, soft_link, virtual]


@pytest.mark.parametrize("change", OUTSIDE, ids=lambda change: change.__name__)
def test_data_outside_of_the_file_is_refused(path: Path, change: Callable[[h5py.File], None], capsys: pytest.CaptureFixture[str]) -> None:
    """The reader and every command refuse it; nothing is written."""
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(ValueError, match="has data outside of itself"):
        load_store(path)
    before = sorted(path.parent.iterdir())
    for command in COMMANDS:
        assert "has data outside of itself, at '" in one_line(capsys, command, "m.h5")
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize("change", OUTSIDE, ids=lambda change: change.__name__)
def test_a_resumed_run_copies_nothing_from_outside(
    path: Path, change: Callable[[h5py.File], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint can name any file; no row of such a file is copied."""
    with h5py.File(path, "r+") as file:
        change(file)
    resumed = Store(path.with_name("own.h5"), configuration={}, resumed=path, resume_from=100)
    resumed.write(Record.of(100, {"activation/fc/rms": 1.0}))
    resumed.close()
    assert load_store(path.with_name("own.h5")).series("activation/fc/rms")[0].tolist() == [100]
    assert ["has data outside of itself" in message for message in caplog.messages] == [True]


def test_tensors_outside_of_the_file_are_refused(path: Path) -> None:
    """As for numbers."""
    tensors = TensorStore(tensors_path(path), configuration={})
    tensors.write(Record(0, tensors=[RawTensor("activation", "columns", 0, torch.ones(2))]))
    tensors.close()
    assert load_store(path).tensor("activation", "columns", 0).tolist() == [1.0, 1.0]
    with h5py.File(tensors_path(path), "r+") as file:
        dataset = file["activation"].create_dataset(
            "fc/0", SECRET.shape, "f8", external=[(str(Path("secret").resolve()), 0, h5py.h5f.UNLIMITED)]
        )
        dataset.attrs["dtype"], dataset.attrs["index"] = "float64", 0
    for read in (load_store(path).tensors, lambda: load_store(path).tensor("activation", "fc", 0)):
        with pytest.raises(ValueError, match="has data outside of itself, at 'activation/fc/0'"):
            read()


# ------------------------------------------------------------------ shapes, attributes, tables


def resized(name: str, shape: tuple[int, ...]) -> Callable[[h5py.File], None]:
    """A dataset with a shape larger than any memory."""

    def change(file: h5py.File) -> None:
        file[name].resize(shape)

    return change


def replaced(name: str, data: object) -> Callable[[h5py.File], None]:
    """Replaces a dataset."""

    def change(file: h5py.File) -> None:
        if name in file:
            del file[name]
        if data is not None:
            file[name] = data

    return change


TABLES = {
    "rows": resized("activation/values", (10**12, 1)),
    "steps": resized("activation/steps", (10**14,)),
    "findings": resized("findings", (10**12,)),
    "columns": replaced("activation/columns", np.array([b"fc/rms", b"fc/std"])),
    "no columns": replaced("activation/columns", np.array([], "S1")),
    "columns of another encoding": replaced("activation/columns", np.array([b"\xff\xfe"])),
    "columns of numbers": replaced("activation/columns", np.array([1.0])),
    "columns as a scalar": replaced("activation/columns", 1.0),
    "values of texts": replaced("activation/values", np.array([[b"a"], [b"b"]])),
    "values of integers": replaced("activation/values", np.array([[1], [2]])),
    "values as a scalar": replaced("activation/values", 1.0),
    "other columns": replaced("gradient/columns", np.array([b"fc/norm"] * 3)),
    "no values": replaced("activation/values", None),
    "no steps": replaced("activation/steps", None),
    "steps of floats": replaced("activation/steps", np.array([0.5, 1.5])),
    "steps in two dimensions": replaced("activation/steps", np.array([[0], [1]])),
    "findings of another kind": replaced("findings", np.array([1.0, 2.0])),
    "histograms of another shape": replaced("activation/histograms/values", np.ones((2, 1, 5), np.int64)),
}


@pytest.mark.parametrize("change", TABLES.values(), ids=TABLES.keys())
def test_tables_that_do_not_fit_are_a_line(path: Path, change: Callable[[h5py.File], None], capsys: pytest.CaptureFixture[str]) -> None:
    """Before memory is allocated: no shape is larger than the file can have, and the parts of a table fit each other."""
    with h5py.File(path, "r+") as file:
        change(file)
    for command in COMMANDS:
        assert "is damaged: the requested data cannot be read" in one_line(capsys, command, "m.h5")


VALUES: list[Any] = [
    *(0, -3, 10**6, 2.5, float("nan"), True, "", "text", b"\xff", "1", np.array([1, 2]), np.array([], "i8"), np.array(["a", "b"], "S3")),
    *("{}", "[]", "[1]", "[{}]", "null", "{", "[" * 5000, json.dumps([{"started": 1, "first_step": 0, "configuration": {}}])),
    *(
        json.dumps([{"started": "", "first_step": "0", "configuration": {}}]),
        json.dumps([{"started": "", "first_step": 0, "configuration": []}]),
    ),
    None,
]


@pytest.mark.parametrize("name", ["format_version", "package_version", "started", "configurations", "edges"])
def test_an_attribute_that_is_wrong_is_a_line(path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Any value, or a missing attribute: an error line with status 2, or no effect. Never a traceback."""
    place = "activation/histograms/values" if name == "edges" else "/"
    content = path.read_bytes()
    statuses = set()
    for value in VALUES:
        path.write_bytes(content)
        with h5py.File(path, "r+") as file:
            del file[place].attrs[name]
            if value is not None:
                file[place].attrs[name] = value
        for command in COMMANDS:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                status = main([command, "m.h5"])
            errors = capsys.readouterr().err.splitlines()
            assert (status, len(errors)) in {(0, 0), (1, 0), (2, 1)}, (command, value, errors)
            statuses.add(status)
    assert 2 in statuses


# ------------------------------------------------------------------ what is printed and exported


def test_names_do_not_control_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences and line ends are replaced in printed text, and kept by the reader."""
    monkeypatch.chdir(tmp_path)
    key = "gradient/fc\x1b[2J\r\n\x07\u202ek.weight/norm"
    write_store(tmp_path / "m.h5", {key: [0.0] * 20, "loss\x1b]0;title\x07": [1.0]})
    assert key in load_store("m.h5")
    for arguments in (["keys", "m.h5"], ["summary", "m.h5"]):
        main(arguments)
        out, err = capsys.readouterr()
        assert err == ""
        assert all(character.isprintable() for line in out.split("\n") for character in line), arguments
        assert "fc\ufffd[2J\ufffd\ufffd\ufffd\ufffdk" in out, arguments
    assert one_line(capsys, "keys", "no\x1bfile.h5").isprintable()


def test_a_table_has_no_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Text that a spreadsheet would run begins with a quote in CSV; numbers and Parquet are unchanged."""
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    formulas = ["=cmd|'/C calc'!A0", "+1", "-1", "@SUM(1)"]
    write_store(tmp_path / "m.h5", {f"{text}/{text}/{text}": [-1.5] for text in formulas if "/" not in text} | {"activation/a/rms": [-2.5]})
    assert main(["export", "m.h5"]) == 0
    with Path("m.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["kind"], row["site"], row["statistic"]) for row in rows} == {
        *((f"'{text}", f"'{text}", f"'{text}") for text in formulas if "/" not in text),
        ("activation", "a", "rms"),
    }
    assert {row["value"] for row in rows} == {"-1.5", "-2.5"}
    capsys.readouterr()
