"""Reading a store: series, frame, xarray, attributes, and errors."""

from __future__ import annotations

import math
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_module_monitor.histogram import FINITE, NUM_COUNTS, Histogram
from lightning_module_monitor.keys import Columns
from lightning_module_monitor.record import ABSENT, UNDEFINED, Record
from lightning_module_monitor.sinks.store import schema
from lightning_module_monitor.sinks.store.reader import load_store
from lightning_module_monitor.sinks.store.writer import Store

VALUES = {
    "activation/model.fc/rms": 1.0,
    "activation/model.fc/std": 2.0,
    "activation/model.out/rms": 3.0,
    "validation/activation/model.fc/rms": 4.0,
    "run1/test/update/model.fc.weight/ratio": 5.0,
    "monitor/errors": 6.0,
    "logged/mine": 7.0,
    "loss": 8.0,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store: all of ``VALUES`` at step 0, one value at step 10 (a NaN) and one at step 20."""
    store = Store(tmp_path / "monitor.h5", configuration={"every_n_steps": 10, "folder": Path("logs")})
    store.write(Record.of(0, VALUES))
    store.write(Record.of(10, {"activation/model.fc/rms": math.nan}))
    store.write(Record.of(20, {"activation/model.out/rms": -1.0}))
    store.close()
    return tmp_path / "monitor.h5"


def test_keys_are_those_that_were_recorded(path: Path) -> None:
    """All keys by their full names, in the order of the columns."""
    keys = load_store(path).keys()
    assert sorted(keys) == sorted(VALUES)
    assert [key for key in keys if key.startswith("activation/")] == list(VALUES)[:3]


def test_what_never_came_is_nowhere(tmp_path: Path) -> None:
    """A planned key without a record is never returned; a key recorded as NaN is. The same holds while the store is written."""
    columns = Columns.of(
        ["activation/seldom/rms", "activation/never/rms", "activation/nan/rms", "activation/never/std", "validation/activation/nan/rms"]
    )

    def record(step: int, values: dict[str, float], **options: Any) -> Record:
        return Record(step, columns, np.array([values.get(key, ABSENT) for key in columns.texts]), **options)

    row = np.arange(NUM_COUNTS)
    with closing(Store(tmp_path / "monitor.h5", configuration={})) as store:
        store.write(record(0, {"activation/nan/rms": math.nan}))
        reader = load_store(tmp_path / "monitor.h5")
        assert (reader.keys(), reader.histogram_keys(), reader.histogram_kinds()) == (["activation/nan/rms"], [], [])
        store.write(record(10, {"activation/seldom/rms": 1.0}, histograms={"activation/seldom/hist": Histogram(row)}))
        store.write(record(20, {"activation/nan/rms": 2.0}))
    assert (reader.keys(), reader.kinds()) == (["activation/seldom/rms", "activation/nan/rms"], ["activation"])
    matrix = reader.matrix("activation")
    assert [key.format() for key in matrix.keys] == reader.keys()
    np.testing.assert_array_equal(matrix.values, [[math.nan, math.nan], [1.0, math.nan], [math.nan, 2.0]])
    np.testing.assert_array_equal(matrix.is_recorded, [[False, True], [True, False], [False, True]])
    assert reader.to_frame()["site"].tolist() == ["nan", "seldom", "nan"]
    dataset = reader.to_xarray("activation")
    assert (list(dataset), dataset["site"].values.tolist()) == (["rms"], ["seldom", "nan"])
    assert (reader.histogram_keys(), reader.histogram_kinds()) == (["activation/seldom/hist"], ["activation"])
    of_kind = reader.histogram_matrix("activation")
    assert [key.format() for key in of_kind.keys] == ["activation/seldom/hist"]
    np.testing.assert_array_equal(of_kind.counts, [[row[FINITE]]])


def test_a_pattern_gives_a_column_for_each_key(path: Path) -> None:
    """Steps in which any of them was recorded, NaN where a key was not; from several kinds, with the names from ``keys``."""
    reader = load_store(path)
    names = ["activation/model.fc/rms", "activation/model.out/rms"]
    assert reader.keys("activation/.*/rms") == names
    steps, values = reader.series("activation/.*/rms")
    assert (steps.tolist(), steps.dtype, values.dtype) == ([0, 10, 20], np.int64, np.float64)
    np.testing.assert_array_equal(values, [[1.0, 3.0], [math.nan, math.nan], [math.nan, -1.0]])
    names = reader.keys(".*(out/rms|loss|errors|mine|ratio)")
    steps, values = reader.series(".*(out/rms|loss|errors|mine|ratio)")
    assert steps.tolist() == [0, 20]
    assert dict(zip(names, values[0].tolist(), strict=True)) == {key: VALUES[key] for key in names}
    assert dict(zip(names, np.isfinite(values[1]).tolist(), strict=True)) == {key: key == "activation/model.out/rms" for key in names}
    assert reader.series("los.")[1].shape == (1, 1)
    np.testing.assert_array_equal(reader["activation/.*/std"][1], [[2.0]])
    assert "activation/.*/std" not in reader


def test_a_key_is_preferred_to_the_pattern_that_it_is(tmp_path: Path) -> None:
    """A dot in a name matches any character, and a key stands for itself alone."""
    with closing(Store(tmp_path / "monitor.h5", configuration={})) as store:
        store.write(Record.of(0, {"gradient/a.b/norm": 1.0, "gradient/a-b/norm": 2.0}))
    reader = load_store(tmp_path)
    assert reader.series("gradient/a.b/norm")[1].tolist() == [1.0]
    assert reader.series("gradient/a.b/nor.")[1].tolist() == [[1.0, 2.0]]
    assert [line.get_label() for line in reader.plot.series("gradient/a.b/norm").lines] == ["gradient/a.b/norm"]


def test_singular_values_of_a_site_are_one_array(tmp_path: Path) -> None:
    """A row for each record that has any, a column for each value, the largest first; residuals likewise; NaN where there is none."""
    columns = [f"{name}_{rank}" for rank in (1, 2, 3) for name in ("singular_value", "residual")]
    rows = {0: [9.0, 0.1, 4.0, 0.2, UNDEFINED, UNDEFINED], 20: [8.0, 0.3, UNDEFINED, 0.4, UNDEFINED, UNDEFINED]}
    with closing(Store(tmp_path / "monitor.h5", configuration={})) as store:
        for step, numbers in rows.items():
            values = {f"run1/gradient/a.weight/{name}": value for name, value in zip(columns, numbers, strict=True)}
            store.write(Record.of(step, {**values, "run1/gradient/b.weight/singular_value_1": 1.0, "run1/gradient/a.weight/norm": 7.0}))
        store.write(Record.of(30, {"run1/gradient/a.weight/norm": 7.0}))
    reader = load_store(tmp_path)
    steps, values, residuals = reader.singular_values("run1/gradient/a.weight")
    assert (steps.tolist(), steps.dtype, values.dtype, residuals.dtype) == ([0, 20], np.int64, np.float64, np.float64)
    np.testing.assert_array_equal(values, [[9.0, 4.0, math.nan], [8.0, math.nan, math.nan]])
    np.testing.assert_array_equal(residuals, [[0.1, 0.2, math.nan], [0.3, 0.4, math.nan]])
    for wrong in ("run1/gradient/a.weigh", "run1/gradient/a.weight/singular_value_1"):
        with pytest.raises(KeyError, match=rf"no singular values of '{wrong}'; nearest: 'run1/gradient/a\.weight'"):
            reader.singular_values(wrong)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (
            "act/.*/rms",
            r"has no key 'act/\.\*/rms', and as a pattern it matches none of 8 keys as a whole; 'activation/\.\*/rms' matches 2",
        ),
        ("activation/model.fc/rsm", r"; nearest: 'activation/model\.fc/rms'"),
        ("activation/(", r"has no key 'activation/\('.*; nearest: 'activation/model"),
        ("zzz", r"; expected e\.g\. 'loss', 'logged/mine', 'monitor/errors'"),
    ],
)
def test_a_pattern_without_keys_is_a_key_error(pattern: str, words: str, path: Path) -> None:
    """With the nearest key or pattern; what is no regular expression is no key."""
    reader = load_store(path)
    for call in (reader.series, reader.keys, reader.plot.series):
        with pytest.raises(KeyError, match=words):
            call(pattern)


def test_frame_is_tidy(path: Path) -> None:
    """A row for each recorded value with the parts of its key; a recorded NaN has a row, an absent value has none."""
    pytest.importorskip("pandas")
    frame = load_store(path).to_frame()
    assert list(frame.columns) == ["step", "stage", "kind", "site", "statistic", "value"]
    rows = {tuple(row) for row in frame[frame["value"].notna()].itertuples(index=False)}
    assert rows == {
        (0, "train", "activation", "model.fc", "rms", 1.0),
        (0, "train", "activation", "model.fc", "std", 2.0),
        (0, "train", "activation", "model.out", "rms", 3.0),
        (0, "validation", "activation", "model.fc", "rms", 4.0),
        (0, "test", "run1/update", "model.fc.weight", "ratio", 5.0),
        (0, "train", "monitor", "", "errors", 6.0),
        (0, "train", "logged", "", "mine", 7.0),
        (0, "train", "", "", "loss", 8.0),
        (20, "train", "activation", "model.out", "rms", -1.0),
    }
    assert frame[frame["value"].isna()][["step", "site"]].values.tolist() == [[10, "model.fc"]]


def test_xarray_has_step_and_site(path: Path) -> None:
    """A variable for each statistic; values by step and site; NaN where nothing was recorded."""
    pytest.importorskip("xarray")
    reader = load_store(path)
    dataset = reader.to_xarray("activation")
    assert set(dataset.data_vars) == {"rms", "std"}
    assert dataset["rms"].sel(step=20, site="model.out").item() == -1.0
    assert dataset["std"].sel(step=0, site="model.fc").item() == 2.0
    assert math.isnan(dataset["std"].sel(step=0, site="model.out").item())
    assert dataset["rms"].shape == (3, 2)
    assert reader.to_xarray("validation/activation")["rms"].values.tolist() == [[4.0]]
    assert reader.to_xarray("monitor")["errors"].values.tolist() == [6.0]
    assert reader.to_xarray("run1/test/update")["ratio"].values.tolist() == [[5.0]]


def test_attributes_are_decoded(path: Path) -> None:
    """Versions, start, and the configuration of every run, as Python objects."""
    attributes = load_store(path).attributes
    assert set(attributes) == {"format_version", "package_version", "started", "configurations"}
    assert attributes["format_version"] == schema.FORMAT_VERSION
    assert isinstance(attributes["configurations"], list)
    (run,) = attributes["configurations"]
    started, last_record = (datetime.fromisoformat(time) for time in (run["started"], run.pop("last_record")))
    assert started <= last_record
    assert run == {"started": attributes["started"], "first_step": 0, "configuration": {"every_n_steps": 10, "folder": "logs"}}


def test_errors_name_the_path_and_the_nearest(path: Path) -> None:
    """The error for a wrong path, key or kind has the nearest name."""
    with pytest.raises(FileNotFoundError, match=r"no store at .*missing\.h5"):
        load_store(path.with_name("missing.h5"))
    with pytest.raises(KeyError, match=r"nearest: 'activation/model\.fc/rms'"):
        load_store(path).series("activation/model.fc/rmse")
    pytest.importorskip("xarray")
    with pytest.raises(KeyError, match="nearest: 'activation'"):
        load_store(path).to_xarray("activations")


def test_repair_refuses_a_live_file_and_leaves_a_plain_one(tmp_path: Path) -> None:
    """Repair never changes the file of a live run, nor a closed file."""
    store = Store(tmp_path / "m.h5", configuration={})
    store.write(Record.of(0, {"loss": 0.0}))
    reader = load_store(tmp_path / "m.h5")
    with pytest.raises(RuntimeError, match="being written by a live run"):
        reader.repair()
    store.write(Record.of(1, {"loss": 1.0}))
    store.close()
    before = reader.path.read_bytes(), reader.path.stat().st_ino
    reader.repair()
    assert (reader.path.read_bytes(), reader.path.stat().st_ino) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.h5"]


def test_a_kind_is_read_as_a_matrix(path: Path) -> None:
    """A whole kind: its keys, a row for each record, and which values were recorded, also as NaN."""
    reader = load_store(path)
    assert sorted(reader.kinds()) == ["activation", "logged", "monitor", "run1/test/update", "validation/activation"]
    matrix = reader.matrix("activation")
    assert [key.format() for key in matrix.keys] == list(VALUES)[:3]
    assert matrix.steps.tolist() == [0, 10, 20]
    assert matrix.values[0].tolist() == [1.0, 2.0, 3.0]
    assert matrix.is_recorded.tolist() == [[True, True, True], [True, False, False], [False, False, True]]
    assert math.isnan(matrix.values[1, 0])
    assert math.isnan(matrix.values[1, 1])
    assert matrix.values[2, 2] == -1.0
    with pytest.raises(KeyError, match="nearest: 'activation'"):
        reader.matrix("activations")


def test_a_store_is_a_mapping_from_keys_to_series(path: Path) -> None:
    """Item, membership, length, iteration and ``dict`` agree with ``keys`` and ``series``; a ``with`` block needs no close."""
    with load_store(path) as store:
        assert list(store) == store.keys()
        assert len(store) == len(store.keys()) == 8
        assert ("loss" in store, "validation/activation/model.fc/rms" in store, "los" in store, 3 in store) == (True, True, False, False)
        steps, values = store["activation/model.fc/rms"]
        assert (steps.tolist(), values[0], len(values)) == ([0, 10], 1.0, 2)
        assert {key: series[1].tolist() for key, series in dict(store).items()}["loss"] == [8.0]
        with pytest.raises(KeyError, match="nearest: 'loss'"):
            store["los"]
    assert store["loss"][0].tolist() == [0]
