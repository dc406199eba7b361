"""The raw tensors' file: tensors are read bit for bit, also after a kill and a resume."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from helpers.stores import digests
from torch import Tensor

from lightning_module_monitor.record import RawTensor, Record
from lightning_module_monitor.sinks.store import paths, tensors
from lightning_module_monitor.sinks.store.paths import temporary_path
from lightning_module_monitor.sinks.store.reader import StoreReader, load_store
from lightning_module_monitor.sinks.store.tensors import RunFiles, TensorStore
from lightning_module_monitor.sinks.store.writer import Store

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
]


def bits(tensor: Tensor) -> list[int]:
    """A tensor's bytes: -0.0 differs from 0.0, and NaNs differ by their bits."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bit patterns: all kinds of NaN, infinities, subnormals."""
    size = torch.empty((), dtype=dtype).element_size() * int(np.prod(shape))
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).view(dtype).reshape(shape)


def raw(value: Tensor, site: str = "fc", kind: str = "activation", call: int = 0) -> RawTensor:
    """A tensor in the form of a record."""
    return RawTensor(kind, site, call, value)


def run(path: Path, *records: Record, resume_from: int | None = None, resumed: Path | None = None) -> tuple[Path, Path]:
    """The paths of a run's two closed files. By default a run resumes the file at the path."""
    resumed = None if resume_from is None else resumed or path
    files = RunFiles(path, configuration={}, resumed=resumed, resume_from=resume_from, logger=logging.getLogger("test"))
    for record in records:
        files.write(record)
    files.close()
    assert files._tensors is not None
    return files.path, files._tensors.path


def record(step: int, *tensors: RawTensor) -> Record:
    """A step with a value, as every step has."""
    return Record.of(step, {"monitor/errors": 0.0}, tensors=tensors)


def content(path: Path) -> dict[tuple[str, str, int, int], list[int]]:
    """All captured tensors, bit-exact."""
    store = load_store(path)
    return {one[:4]: bits(store.tensor(*one[:4])) for one in store.tensors()}


# ------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (2, 3, 5), (1,) * 12])
def test_round_trip_is_bit_exact(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every dtype with any bits; no dimension, twelve dimensions, and no element."""
    value = random_bits(shape, dtype)
    run(tmp_path / "m.h5", record(3, raw(value)))
    back = load_store(tmp_path / "m.h5").tensor("activation", "fc", 3)
    assert (back.dtype, back.shape) == (dtype, torch.Size(shape))
    assert bits(back) == bits(value)
    back.copy_(value)  # it is the reader's to change


def test_views_are_written_as_their_elements(tmp_path: Path) -> None:
    """Transposed, strided, expanded, channels-last, conjugated and negated tensors."""
    x = torch.randn(2, 3, 4, 5)
    z = torch.randn(3, 4, dtype=torch.complex64)
    views = [
        *(x.transpose(0, 3), x[:, ::2], torch.randn(3, 1).expand(3, 4), x.to(memory_format=torch.channels_last)),
        *(z.conj(), z.conj().imag, z.mT),
    ]
    run(tmp_path / "m.h5", record(0, *(raw(view, call=call) for call, view in enumerate(views))))
    store = load_store(tmp_path / "m.h5")
    for call, view in enumerate(views):
        assert torch.equal(store.tensor("activation", "fc", 0, call), view)


def test_calls_kinds_sites_and_steps_are_distinct_and_listed(tmp_path: Path) -> None:
    """Each tensor has its value; ``tensors`` lists all or some in the order of capture."""
    names = [(kind, site, call) for kind in ("activation", "gradient") for site in ("fc", "fc.output_1") for call in (0, 1)]
    steps = [record(step, *(raw(torch.tensor([step, i]), s, k, c) for i, (k, s, c) in enumerate(names))) for step in (0, 100)]
    run(tmp_path / "m.h5", *steps)
    store = load_store(tmp_path / "m.h5")
    for step in (0, 100):
        for i, (kind, site, call) in enumerate(names):
            assert store.tensor(kind, site, step, call).tolist() == [step, i]
            assert store.tensor(kind, site, step=step, call=call).tolist() == [step, i]
    listed = store.tensors()
    assert [(one.kind, one.site, one.step, one.call) for one in listed] == [(k, s, step, c) for step in (0, 100) for k, s, c in names]
    assert {(one.dtype, one.shape) for one in listed} == {("int64", (2,))}
    assert store.tensors(kind="gradient", site="fc", step=100) == [one for one in listed[-4:-2]]
    assert store.tensors("update") == []
    assert store.tensor("activation", "fc", 0).tolist() == [0, 0]


def test_errors_for_tensors_that_were_not_captured_name_those_that_were(tmp_path: Path) -> None:
    """The error has the wrong part of the request and the nearest value, or the captured values."""
    run(tmp_path / "m.h5", record(0, raw(torch.ones(2), "model.head")), record(100, raw(torch.ones(2), "model.head", call=1)))
    store = load_store(tmp_path / "m.h5")
    for arguments, message in [
        (("activations", "model.head", 0), "there is no such kind; nearest: 'activation'"),
        (("activation", "model.haed", 0), "there is no such site; nearest: 'model.head'"),
        (("activation", "model.head", 7), "there is no such step; captured: 0, 100"),
        (("activation", "model.head", 100), "there is no such call; captured: 1"),
    ]:
        with pytest.raises(KeyError) as wrong:
            store.tensor(*arguments)
        assert message in str(wrong.value)
    Store(tmp_path / "other.h5", configuration={}).write(record(0))
    with pytest.raises(FileNotFoundError, match=r"other.h5' has no raw tensors: there is no 'other.tensors.h5'.*option capture"):
        load_store(tmp_path / "other.h5").tensor("activation", "fc", 0)
    assert load_store(tmp_path / "other.h5").tensors() == []


def test_other_programs_show_it(tmp_path: Path) -> None:
    """Plain h5py: a dataset for each tensor, by kind, site and step, with its dtype and shape; further calls are beside the first."""
    values = [torch.randn(2, 3), torch.tensor([3, 4, 5], dtype=torch.int16), torch.tensor(True), torch.randn(4, dtype=torch.complex64)]
    sites = ["fc", "fc.output_1", "attn.head_0.query", "attn.head_0"]
    again = torch.randn(2, 3)
    run(tmp_path / "m.h5", record(7, *map(raw, values, sites), raw(again, call=1), raw(again, "fc.weight", "parameter")))
    with h5py.File(tmp_path / "m.tensors.h5") as file:
        assert {kind: sorted(group) for kind, group in file.items()} == {"activation": sorted(sites), "parameter": ["fc.weight"]}
        for site, value in zip(sites, values, strict=True):
            dataset = file[f"activation/{site}/7"]
            assert dataset.dtype == value.numpy().dtype
            np.testing.assert_array_equal(dataset[()], value.numpy(), strict=True)
            assert dataset.attrs["dtype"].decode() == str(value.dtype).removeprefix("torch.")
        assert sorted(file["activation/fc"]) == ["7", "7.call_1"]
        np.testing.assert_array_equal(file["activation/fc/7.call_1"], again.numpy())
        np.testing.assert_array_equal(file["parameter/fc.weight/7"], again.numpy())


@pytest.mark.parametrize(("dtype", "stored"), [(torch.bfloat16, "u2"), (torch.float8_e4m3fn, "u1"), (torch.float8_e5m2, "u1")], ids=str)
def test_a_dtype_that_hdf5_does_not_have_is_its_bits(tmp_path: Path, dtype: torch.dtype, stored: str) -> None:
    """Unsigned integers of the same size, and an attribute that names the dtype."""
    value = random_bits((3, 5), dtype)
    run(tmp_path / "m.h5", record(0, raw(value)))
    with h5py.File(tmp_path / "m.tensors.h5") as file:
        dataset = file["activation/fc/0"]
        assert (dataset.dtype, dataset.shape) == (np.dtype(stored), (3, 5))
        assert dataset[...].tobytes() == bytes(bits(value))
        assert dataset.attrs["dtype"].decode() == str(dtype).removeprefix("torch.")


def test_a_second_record_of_a_step(tmp_path: Path) -> None:
    """Tensors of both records have the later value, as in the store; the others are kept."""
    first, second = (
        record(4, raw(torch.tensor([1])), raw(torch.tensor([2]), "a")),
        record(4, raw(torch.tensor([3])), raw(torch.tensor([4]), "b")),
    )
    run(tmp_path / "m.h5", first, second)
    store = load_store(tmp_path / "m.h5")
    assert {one.site: store.tensor(*one[:4]).item() for one in store.tensors()} == {"fc": 3, "a": 2, "b": 4}


def test_it_is_a_plain_file_while_the_run_goes_on(tmp_path: Path) -> None:
    """Any program opens it between two captured steps; an open file keeps its content."""
    files = RunFiles(tmp_path / "m.h5", configuration={}, logger=logging.getLogger("test"))
    files.write(record(0, raw(torch.tensor([1]))))
    with h5py.File(tmp_path / "m.tensors.h5") as held:
        files.write(record(1, raw(torch.tensor([2]))))
        assert list(held["activation/fc"]) == ["0"]
        with h5py.File(tmp_path / "m.tensors.h5") as file:
            assert [file[f"activation/fc/{step}"][0] for step in (0, 1)] == [1, 2]
    files.close()


@pytest.mark.parametrize(("name", "expected"), [("m.h5", "m.tensors.h5"), ("run", "run.tensors.h5"), ("v1.5", "v1.5.tensors.h5")])
def test_the_file_is_beside_the_store(tmp_path: Path, name: str, expected: str) -> None:
    """For any name of the store; two stores never share a file of tensors."""
    run(tmp_path / name, record(0, raw(torch.ones(2))))
    assert {path.name for path in tmp_path.iterdir()} == {name, expected}
    assert load_store(tmp_path / name).tensor("activation", "fc", 0).tolist() == [1, 1]


# ------------------------------------------------------------------ other runs' files, and resumed runs


def test_tensors_of_another_run_are_never_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Both files of a second run have the same number, also if only the first run's tensors remain."""
    path = tmp_path / "m.h5"
    run(path, record(0, raw(torch.tensor([1]))))
    before = digests(tmp_path / "m.tensors.h5")
    store, tensors = run(path, record(0, raw(torch.tensor([2]))))
    assert (store.name, tensors.name) == ("m-2.h5", "m-2.tensors.h5")
    path.unlink()
    store, tensors = run(path, record(0, raw(torch.tensor([3]))))
    assert (store.name, tensors.name) == ("m-3.h5", "m-3.tensors.h5")
    assert "m.tensors.h5 exists" in caplog.messages[-1]
    assert digests(tmp_path / "m.tensors.h5") == before
    assert [load_store(tmp_path / f"m-{number}.h5").tensor("activation", "fc", 0).item() for number in (2, 3)] == [2, 3]


def test_a_resumed_run_goes_on_without_the_steps_that_run_again(tmp_path: Path) -> None:
    """Tensors of later steps are superseded and not listed; both configurations are kept."""
    path = tmp_path / "m.h5"
    values = {step: torch.full((1000,), float(step)) for step in range(6)}
    run(path, *(record(step, raw(value)) for step, value in values.items()))
    run(path, record(3, raw(-values[3])), record(4, raw(-values[4], call=1)), resume_from=3)
    assert content(path) == {
        **{("activation", "fc", step, 0): bits(values[step]) for step in (0, 1, 2)},
        ("activation", "fc", 3, 0): bits(-values[3]),
        ("activation", "fc", 4, 1): bits(-values[4]),
    }
    with h5py.File(tmp_path / "m.tensors.h5") as file:
        assert sorted(file["activation/fc"]) == ["0", "1", "2", "3", "4.call_1"]
        assert {int(step): value[0] for step, value in file["superseded/1/activation/fc"].items()} == {3: 3.0, 4: 4.0, 5: 5.0}
    runs = StoreReader(tmp_path / "m.tensors.h5").attributes["configurations"]
    assert [run["first_step"] for run in runs] == [0, 3]  # type: ignore[attr-defined]


def test_a_resumed_run_that_captures_nothing_takes_out_what_runs_again(tmp_path: Path) -> None:
    """With its first record: after a kill right then, no tensor of a repeated step remains."""
    path = tmp_path / "m.h5"
    run(path, record(0, raw(torch.ones(2))), record(8, raw(torch.ones(2))))
    before = digests(tmp_path / "m.tensors.h5")
    run(path, record(9), resume_from=9)
    assert digests(tmp_path / "m.tensors.h5") == before
    run(path, record(5), resume_from=5)
    assert list(content(path)) == [("activation", "fc", 0, 0)]


def test_a_resumed_run_elsewhere_begins_with_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy of the tensors of earlier steps, also if it captures none; the file of the resumed run is unchanged."""
    caplog.set_level(logging.INFO)
    path = tmp_path / "m.h5"
    values = {step: torch.full((10,), float(step)) for step in range(6)}
    run(path, *(record(step, raw(value)) for step, value in values.items()))
    before = digests(tmp_path / "m.tensors.h5")
    run(tmp_path / "other.h5", record(3), resumed=path, resume_from=3)
    run(tmp_path / "third.h5", record(3, raw(-values[3])), resumed=path, resume_from=3)
    assert content(tmp_path / "other.h5") == {("activation", "fc", step, 0): bits(values[step]) for step in range(3)}
    assert content(tmp_path / "third.h5") == {("activation", "fc", step, 0): bits(values[step] * (-1) ** (step == 3)) for step in range(4)}
    assert digests(tmp_path / "m.tensors.h5") == before
    own, copied = tmp_path / "other.tensors.h5", tmp_path / "m.tensors.h5"
    message = f"{own} goes on from step 3; it begins with a copy of 3 tensors of earlier steps from {copied}, which is left as it is."
    assert message in caplog.messages


def test_damaged_tensors_are_not_changed_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resumed run that cannot continue the file uses a numbered file, which can be opened by its path."""
    path = tmp_path / "m.h5"
    run(path, record(0, raw(torch.ones(2))))
    damaged = tmp_path / "m.tensors.h5"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    before = digests(damaged)
    store, tensors = run(path, record(3), record(4, raw(torch.tensor([5]))), resume_from=3)
    assert digests(damaged) == before
    assert (store.name, tensors.name) == ("m.h5", "m.tensors-2.h5")
    assert ["cannot be resumed" in message for message in caplog.messages] == [True]
    assert load_store(tensors).tensor("activation", "fc", 4).item() == 5
    with pytest.raises(ValueError, match="not a readable HDF5 file"):
        load_store(path).tensor("activation", "fc", 4)


# ------------------------------------------------------------------ failures


def interrupted(function: Callable[..., Any], at_call: int) -> Callable[..., Any]:
    """A function that raises KeyboardInterrupt in a given call."""
    calls = itertools.count(1)

    def call(*arguments: object) -> object:
        if next(calls) == at_call:
            raise KeyboardInterrupt
        return function(*arguments)

    return call


@pytest.mark.parametrize("moment", ["tensors", "name"])
def test_ctrl_c_in_the_middle_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Between the tensors of a step, or before the rename: no tensor of the step is in the file, and no temporary file remains."""
    path = tmp_path / "m.tensors.h5"
    opened = TensorStore(path, configuration={})
    opened.write(record(0, raw(torch.tensor([1]))))
    with monkeypatch.context() as patch:
        if moment == "tensors":
            patch.setattr(tensors, "_to_array", interrupted(tensors._to_array, at_call=2))
        else:
            patch.setattr(paths, "replace", interrupted(paths.replace, at_call=1))
        with pytest.raises(KeyboardInterrupt):
            opened.write(record(1, raw(torch.tensor([2])), raw(torch.tensor([3]), "b")))
    assert list(content(path)) == [("activation", "fc", 0, 0)]
    assert not temporary_path(path).exists()
    opened.write(record(2, raw(torch.tensor([4]))))
    opened.close()
    assert [load_store(path).tensor("activation", "fc", step).item() for step in (0, 2)] == [1, 4]


def test_a_broken_write_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Any error of a write is one warning."""
    opened = TensorStore(tmp_path / "m.tensors.h5", configuration={})
    opened.write(record(0, raw(torch.tensor([1]))))
    opened.write(record(1, raw("no tensor")))  # type: ignore[arg-type]
    opened.write(record(2, raw(torch.tensor([3]))))
    opened.close()
    assert opened.failed
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert list(content(tmp_path / "m.tensors.h5")) == [("activation", "fc", 0, 0)]


# ------------------------------------------------------------------ processes that are killed

# Both files of a run; says each step once it is written.
