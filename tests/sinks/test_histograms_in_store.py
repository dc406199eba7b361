"""Histograms in the store's file: appended, merged, resumed, read while written and after a kill."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from helpers.processes import kill

from lightning_module_monitor import Record, StorageManager, load_store
from lightning_module_monitor.histogram import EDGES, LABELS, NUM_COUNTS, Histogram
from lightning_module_monitor.sinks.store.writer import Store

KEY = "activation/fc/hist"


def made(step: int) -> Histogram:
    """Counts that differ between steps."""
    return Histogram(np.arange(NUM_COUNTS, dtype=np.int64) * (step + 1))


def assert_steps(path: Path, steps: list[int], key: str = KEY) -> None:
    """The store has the histograms of these steps, and no others."""
    found, counts, edges = load_store(path).histogram(key)
    assert found.tolist() == steps
    np.testing.assert_array_equal(counts, np.stack([made(step).counts for step in steps]))
    np.testing.assert_array_equal(load_store(path).nonfinite(key)[1], np.stack([list(made(step).nonfinite.values()) for step in steps]))
    np.testing.assert_array_equal(edges, EDGES)


def test_a_round_trip(tmp_path: Path) -> None:
    """Beside numbers, alone, of several kinds and stages; a step without one has no row; counts beyond float64 are exact."""
    path = tmp_path / "m.h5"
    store = Store(path, configuration={}, keys=["activation/fc/rms"], histogram_keys=[KEY])
    store.write(Record.of(0, {"activation/fc/rms": 1.0}, {KEY: made(0)}))
    store.write(Record.of(1, {"activation/fc/rms": 2.0}))
    store.write(Record.of(2, {}, {KEY: made(2), "validation/activation/fc/hist": made(7), "run/gradient/w/hist": made(8)}))
    huge = Histogram(np.full(NUM_COUNTS, 2**53 + 1, dtype=np.int64))
    store.write(Record.of(3, {}, {"update/w/hist": huge}))
    store.close()
    assert_steps(path, [0, 2])
    reader = load_store(path)
    assert reader.keys() == ["activation/fc/rms"]
    assert set(reader.histogram_keys()) == {KEY, "validation/activation/fc/hist", "run/gradient/w/hist", "update/w/hist"}
    assert reader.series("activation/fc/rms")[1].tolist() == [1.0, 2.0]
    assert (reader.histogram("update/w/hist")[1] == 2**53 + 1).all()
    assert reader.histogram("run/gradient/w/hist")[0].tolist() == [2]
    assert set(reader.to_frame()["statistic"]) == {"rms"}
    with pytest.raises(KeyError, match=r"is a histogram, not a series of numbers; read it with histogram\('activation/fc/hist'\)"):
        reader.series(KEY)
    with pytest.raises(KeyError, match=r"no histogram 'activation/fc/rms'; nearest: 'activation/fc/hist'"):
        reader.histogram("activation/fc/rms")


def test_a_kind_is_read_as_a_matrix(tmp_path: Path) -> None:
    """All records, or ``max_rows`` of them, evenly spaced; zeros if a record has no histogram of a key."""
    store = Store(tmp_path / "m.h5", configuration={}, histogram_keys=[KEY, "activation/out/hist"])
    for step in range(5):
        store.write(Record.of(step, {}, {KEY: made(step)} | ({"activation/out/hist": made(9)} if step == 4 else {})))
    store.close()
    reader = load_store(tmp_path / "m.h5")
    assert reader.histogram_kinds() == ["activation"]
    matrix = reader.histogram_matrix("activation", max_rows=3)
    assert [key.site for key in matrix.keys] == ["fc", "out"]
    assert matrix.steps.tolist() == [0, 2, 4]
    assert reader.histogram_matrix("activation").steps.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(matrix.counts[:, 0], [made(step).counts for step in (0, 2, 4)])
    np.testing.assert_array_equal(matrix.nonfinite[:, 1], [[0, 0, 0], [0, 0, 0], list(made(9).nonfinite.values())])
    assert not matrix.counts[:2, 1].any()
    np.testing.assert_array_equal(matrix.edges, EDGES)
    with pytest.raises(KeyError, match="nearest: 'activation'"):
        reader.histogram_matrix("activatio")


def test_other_programs_read_it(tmp_path: Path) -> None:
    """Plain HDF5 once it is closed: counts, steps, columns, what each bin is; xarray opens the group, with every dimension named."""
    xarray = pytest.importorskip("xarray")
    path = tmp_path / "m.h5"
    store = Store(path, configuration={})
    store.write(Record.of(5, {"activation/fc/rms": 1.0}, {KEY: made(5)}))
    store.close()
    with h5py.File(path) as file:
        group = file["activation/histograms"]
        assert group["values"].shape == (1, 1, NUM_COUNTS)
        assert group["values"].dtype == np.int64
        np.testing.assert_array_equal(group["values"][0, 0], made(5).row)
        np.testing.assert_array_equal(group["values"].attrs["edges"], EDGES)
        assert [text.decode() for text in group["bins"]] == list(LABELS)
        assert group["columns"][0] == b"fc/hist"
    with xarray.open_dataset(path, group="activation/histograms", engine="h5netcdf") as dataset:
        assert dataset["values"].dims == ("steps", "columns", "bins")
        assert dataset["values"].sel(bins=b"[2^0, 2^1)").item() == made(5).row[LABELS.index("[2^0, 2^1)")]


def test_a_key_that_looks_like_the_group(tmp_path: Path) -> None:
    """A prefix and a kind with the names of the layout's groups do not collide with them."""
    path = tmp_path / "m.h5"
    store = Store(path, configuration={})
    keys = ["activation/histograms/fc/rms", "histograms/fc/rms", "histograms/values/fc/rms", "activation/histograms_/fc/rms"]
    histograms = {"activation/fc/hist": made(1), "histograms/fc/hist": made(2), "activation/histograms/fc/hist": made(3)}
    store.write(Record.of(0, {key: float(i) for i, key in enumerate(keys)}, histograms))
    store.close()
    reader = load_store(path)
    assert set(reader.keys()) == set(keys)
    assert set(reader.histogram_keys()) == set(histograms)
    for i, key in enumerate(keys):
        assert reader.series(key)[1].tolist() == [float(i)]
    for key, one in histograms.items():
        np.testing.assert_array_equal(reader.histogram(key)[1][0], one.counts)


def test_two_records_of_one_step_are_one_row(tmp_path: Path) -> None:
    """Keys that the second record lacks keep the value of the first."""
    path = tmp_path / "m.h5"
    store = Store(path, configuration={}, histogram_keys=[KEY, "activation/out/hist"])
    store.write(Record.of(0, {}, {KEY: made(0)}))
    store.write(Record.of(0, {}, {"activation/out/hist": made(9)}))
    store.close()
    assert_steps(path, [0])
    np.testing.assert_array_equal(load_store(path).histogram("activation/out/hist")[1][0], made(9).counts)


def test_a_late_one_is_added(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file gets a column or a group for it, and keeps its content."""
    path = tmp_path / "m.h5"
    store = Store(path, configuration={}, histogram_keys=[KEY])
    with caplog.at_level(logging.INFO):
        for step in range(3):
            late = {"activation/late/hist": made(step), "gradient/w/hist": made(step)} if step == 2 else {}
            store.write(Record.of(step, {"activation/fc/rms": 1.0}, {KEY: made(step), **late}))
            assert_steps(path, list(range(step + 1)))
    store.close()
    assert_steps(path, [2], "activation/late/hist")
    assert_steps(path, [2], "gradient/w/hist")
    assert ["2 new keys (activation/late/hist, gradient/w/hist)" in record.getMessage() for record in caplog.records] == [True]


def test_a_resumed_run_takes_out_what_it_runs_again(tmp_path: Path) -> None:
    """Rows of its first step and later are superseded and not read; its rows follow, in the columns of both."""
    path = tmp_path / "m.h5"
    first = Store(path, configuration={})
    for step in range(200):
        first.write(Record.of(step, {"activation/fc/rms": 1.0}, {KEY: made(step)}))
    first.close()
    second = Store(path, configuration={}, resumed=path, resume_from=150)
    for step in (150, 151):
        second.write(Record.of(step, {"activation/fc/rms": 1.0}, {KEY: made(step), "activation/new/hist": made(step)}))
    second.close()
    assert second.path == path
    assert_steps(path, list(range(152)))
    assert_steps(path, [150, 151], "activation/new/hist")
    with h5py.File(path) as file:
        superseded = file["superseded/1/activation/histograms"]
        assert superseded["steps"][...].tolist() == list(range(150, 200))
        np.testing.assert_array_equal(superseded["values"][:, 0], np.stack([made(step).row for step in range(150, 200)]))


WRITER = """
import sys
import numpy as np
from pathlib import Path
from lightning_module_monitor.histogram import NUM_COUNTS, Histogram
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.store.writer import Store
store = Store(Path(sys.argv[1]), configuration={})
for step in range(100_000):
    store.write(Record.of(step, {"activation/fc/rms": 1.0}, {"activation/fc/hist": Histogram(np.arange(NUM_COUNTS) * (step + 1))}))
    print(step, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 on this system")
def test_read_while_written_and_after_kill_9_and_resumed(tmp_path: Path) -> None:
    """At any moment the file has each reported histogram; a repair makes it plain; a resumed run continues it."""
    path = tmp_path / "m.h5"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(20):
        line = process.stdout.readline()
        reported = int(line)
        steps, counts, _edges = load_store(path).histogram(KEY)
        assert len(steps) > reported
        np.testing.assert_array_equal(counts, made(0).counts * (steps[:, None] + 1))
        time.sleep(0.005)
    last = kill(process, line)
    written = len(load_store(path).histogram(KEY)[0])
    assert last < written <= last + 2
    assert_steps(path, list(range(written)))
    load_store(path).repair()
    h5py.File(path).close()
    assert_steps(path, list(range(written)))
    resumed = Store(path, configuration={}, resumed=path, resume_from=10)
    resumed.write(Record.of(10, {"activation/fc/rms": 1.0}, {KEY: made(10)}))
    resumed.close()
    assert resumed.path == path
    assert_steps(path, list(range(11)))


def test_the_history_keeps_those_of_the_newest_step(tmp_path: Path) -> None:
    """Two records of a step are merged; those of a newer step replace them; they are saved with the numbers."""
    storage = StorageManager()
    storage.add(Record.of(0, {"activation/fc/rms": 1.0}, {KEY: made(0)}))
    storage.add(Record.of(1, {"activation/fc/rms": 2.0}, {KEY: made(1)}))
    storage.add(Record.of(1, {"validation/activation/fc/rms": 3.0}, {"validation/activation/fc/hist": made(2)}))
    assert storage.last_histograms() == {KEY: made(1), "validation/activation/fc/hist": made(2)}
    path = storage.save_hdf5(tmp_path / "m.h5")
    assert_steps(path, [1])
    assert load_store(path).series("activation/fc/rms")[0].tolist() == [0, 1]
    assert StorageManager.load_hdf5(path)[1] == {"activation/fc/rms": 2.0, "validation/activation/fc/rms": 3.0}
    storage.clear()
    assert storage.last_histograms() == {}
