"""The content of a store as the report reads it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from helpers.stores import write_store

from lightning_module_monitor import load_store
from lightning_module_monitor.kinds import TRAIN
from lightning_module_monitor.record import ModuleInfo
from lightning_module_monitor.report.stored_run import StoredRun, read_run
from lightning_module_monitor.sinks.store.matrices import Table


def training_table(run: StoredRun, kind: str, statistic: str) -> Table:
    """The table of a kind and statistic in training, whatever its prefix."""
    names = [(table.name.kind, table.statistic, table.name.stage) for table in run.tables]
    return run.tables[names.index((kind, statistic, TRAIN))]


def test_tables_hold_what_series_gives(tmp_path: Path) -> None:
    """Each site's row is its series, NaN where it has none; figures without a site stand apart; series without a value are left out."""
    series = {
        "activation/a/rms": [1.0, None, math.nan, math.inf],
        "activation/b/rms": [None, None, 3.0, 4.0],
        "activation/a/mean": [None, -1.0],
        "activation/never/rms": [None],
        "validation/activation/a/rms": [7.0],
        "run1/gradient/w/norm": [5.0, 6.0],
        "gradient_flow/_summary_/mean_gain": [1.5],
        "gradient_flow/a-b/gain": [2.5],
        "monitor/errors": [0.0, 1.0],
        "loss": [0.5],
    }
    store = load_store(write_store(tmp_path / "m.h5", series))
    run = read_run(store)
    assert [(table.kind, table.statistic, table.sites) for table in run.tables if table.name.kind == "activation"] == [
        ("activation", "rms", ("a", "b")),
        ("activation", "mean", ("a",)),
        ("validation/activation", "rms", ("a",)),
    ]
    rms = training_table(run, "activation", "rms")
    assert rms.steps.tolist() == [0, 20, 30]  # at step 10 there is another statistic only
    np.testing.assert_array_equal(rms.values, [[1.0, math.nan, math.inf], [math.nan, 3.0, 4.0]])
    assert rms.is_recorded.tolist() == [[True, True, True], [False, True, True]]
    prefixed = training_table(run, "gradient", "norm")
    assert (prefixed.kind, prefixed.values.tolist()) == ("run1/gradient", [[5.0, 6.0]])
    gain = training_table(run, "gradient_flow", "gain")
    assert gain.sites == ("a-b",)
    assert sorted((table.kind, table.statistic, table.values.tolist()) for table in run.figures) == [
        ("", "loss", [[0.5]]),
        ("gradient_flow", "mean_gain", [[1.5]]),
        ("monitor", "errors", [[0.0, 1.0]]),
    ]
    assert run.attributes["configurations"][0]["first_step"] == 0


def test_late_sites_are_beside_their_modules(tmp_path: Path) -> None:
    """Heads of attention follow their module; without a table of modules they follow the site that contains them."""
    names = ["net", "net.0", "net.0.attn", "net.0.attn.out", "net.1", "net.1.attn"]
    series = {f"activation/net.{site}/rms": [1.0] for site in ("0.attn", "0.attn.out", "1.attn")}
    late = {f"activation/net.{layer}.attn.head_{head}.query/rms": [2.0] for layer in (1, 0) for head in (0, 1)}
    expected = ["attn", "attn.head_0.query", "attn.head_1.query", "attn.out"]
    for modules in ([ModuleInfo(name, "Module", 0) for name in names], ()):
        store = load_store(write_store(tmp_path / f"{len(modules)}.h5", {**series, **late}, modules=modules))
        [table] = read_run(store).tables
        assert table.sites == (*(f"net.0.{name}" for name in expected), *(f"net.1.{name}" for name in expected[:3]))
        assert table.values[:, 0].tolist() == [1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0]


def test_totals_stand_apart_from_tables_of_parameters(tmp_path: Path) -> None:
    """Those of ``_root_`` first, a row for each; in tables and so in heat maps, profiles and comparisons are single parameters."""
    series: dict[str, list[float | None]] = {
        "gradient/fc.weight/norm": [1.0],
        "gradient/fc/norm": [2.0],
        "gradient/_root_/norm": [3.0],
        "activation/fc/rms": [4.0],
        "activation/_root_/rms": [5.0],
    }
    modules = [ModuleInfo("_root_", "Net", 4), ModuleInfo("fc", "Linear", 4)]
    run = read_run(load_store(write_store(tmp_path / "m.h5", series, modules=modules)))
    assert [(table.kind, *table.sites) for table in run.totals] == [("gradient", "_root_"), ("gradient", "fc")]
    assert {(table.kind, table.sites) for table in run.tables} == {("activation", ("_root_", "fc")), ("gradient", ("fc.weight",))}
    assert {*run.series} == {*series}
    assert run.sites == {"fc.weight", "fc", "_root_"}
