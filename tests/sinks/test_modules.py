"""The module table of a store: types and outputs of modules, also while it is written, resumed and rewritten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import pytest
import torch
from helpers.stores import copy_of_killed
from helpers.tiny import Tiny, fit
from torch import Tensor, nn

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, Record, Rule, load_store
from lightning_module_monitor.record import ModuleInfo
from lightning_module_monitor.sinks.store.writer import Store

FIRST = [ModuleInfo("net", "Net", 12), ModuleInfo("net.fc", "Linear", 12, (5, 3), "float32")]
KNOWN = [ModuleInfo("net", "Net", 12, (5, 3), "bfloat16"), FIRST[1]]
"""The same later."""


class Branches(Tiny):
    """A layer runs from batch 4 on, a layer never; a layer returns a dict, and two layers share parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(4, 3, dtype=torch.float64)
        self.never = nn.Linear(4, 2)
        self.pair = nn.ModuleList([Pair(), nn.Identity()])
        self.tied = nn.Sequential(self.model[0], nn.Linear(4, 8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) + self.pair[0](batch[0])["first"].float().mean()
        return loss + self.late(batch[0].double()).mean() if batch_idx >= 4 else loss


class Pair(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"first": x.sum(dim=1).to(torch.float16), "second": x}


def test_a_run_has_a_table_of_its_modules(tmp_path: Path) -> None:
    """Types, parameters with submodules, each once; shape and dtype of the first output under any rules; none if it never ran."""
    callback = ModuleMonitorCallback(every_n_steps=2, rules=[Rule(kinds="parameter", statistics="norm")])
    assert callback.store_path is None
    fit(tmp_path, [callback], Branches)
    assert callback.store_path is not None
    own = 4 * 8 + 8 + 8 * 3 + 3
    assert load_store(callback.store_path).modules() == [
        ModuleInfo("_root_", "Branches", own + 15 + 10 + 40),
        ModuleInfo("model", "Sequential", own, (5, 3), "float32"),
        ModuleInfo("model.0", "Linear", 40, (5, 8), "float32"),
        ModuleInfo("model.1", "ReLU", 0, (5, 8), "float32"),
        ModuleInfo("model.2", "Linear", 27, (5, 3), "float32"),
        ModuleInfo("late", "Linear", 15, (5, 3), "float64"),
        ModuleInfo("never", "Linear", 10),
        ModuleInfo("pair", "ModuleList", 0),
        ModuleInfo("pair.0", "Pair", 0, (5,), "float16"),
        ModuleInfo("pair.1", "Identity", 0),
        ModuleInfo("tied", "Sequential", 80),
        ModuleInfo("tied.1", "Linear", 40),
    ]


def test_a_module_that_has_run_costs_nothing_afterwards() -> None:
    """The hooks for shapes are removed after the first monitored step; the table is the same object from then on."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    tables, hooks = [], []
    with ModuleMonitor(rules=[Rule(kinds="parameter", statistics="norm")]) as monitor:
        monitor.set_module(model)
        for step in range(3):
            monitor.begin_step(step)
            hooks.append(sum(len(module._forward_hooks) for module in model.modules()))
            model(torch.ones(2, 4))
            record = monitor.end_step()
            assert record is not None
            tables.append(record.modules)
    assert hooks == [3, 0, 0]
    assert tables[0] is tables[1] is tables[2]
    assert [one.output_shape for one in tables[0]] == [(2, 3)] * 3


def test_a_late_shape_is_read_by_others_while_the_file_is_written(tmp_path: Path) -> None:
    """The file is not written anew, and a reader in another process has it with the record that brings it."""
    path = tmp_path / "m.h5"
    store = Store(path, configuration={})
    store.write(Record.of(0, {"a/b/c": 0.0}, modules=FIRST))
    inode = path.stat().st_ino
    code = f"from lightning_module_monitor import load_store; print(load_store({str(path)!r}).modules())"
    for modules in (FIRST, KNOWN):
        store.write(Record.of(1, {"a/b/c": 1.0}, modules=modules))
        out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        assert out.strip() == repr(modules)
    assert path.stat().st_ino == inode
    store.close()
    assert load_store(path).modules() == KNOWN


def test_late_keys_and_repair_keep_the_table(tmp_path: Path) -> None:
    """Every replacement of the file has it."""
    path, killed = tmp_path / "m.h5", tmp_path / "killed.h5"
    store = Store(path, configuration={})
    store.write(Record.of(0, {"a/b/c": 0.0}, modules=KNOWN))
    store.write(Record.of(1, {"a/b/late": 0.0}, modules=KNOWN))
    assert load_store(path).modules() == KNOWN
    copy_of_killed(path, killed)
    store.close()
    load_store(killed).repair()
    assert load_store(killed).modules() == KNOWN


@pytest.mark.parametrize("place", ["the same file", "elsewhere"])
def test_a_resumed_run_adds_its_own_modules(place: str, tmp_path: Path) -> None:
    """A known shape stays if the resumed run has none yet."""
    path = tmp_path / "m.h5"
    store = Store(path, configuration={})
    store.write(Record.of(0, {"a/b/c": 0.0}, modules=KNOWN))
    store.close()
    own = path if place == "the same file" else tmp_path / "elsewhere" / "m.h5"
    resumed = Store(own, configuration={}, resumed=path, resume_from=1)
    resumed.write(Record.of(1, {"a/b/c": 0.0}, modules=FIRST))
    assert load_store(own).modules() == KNOWN
    other = ModuleInfo("net.new", "ReLU", 0, (5, 3), "float32")
    resumed.write(Record.of(2, {"a/b/c": 0.0}, modules=[*FIRST, other]))
    resumed.close()
    assert load_store(own).modules() == [*KNOWN, other]
    assert load_store(own).series("a/b/c")[0].tolist() == [0, 1, 2]


def test_a_store_without_a_table_is_read_and_gone_on_in(tmp_path: Path) -> None:
    """As in stores of earlier versions."""
    path = tmp_path / "m.h5"
    store = Store(path, configuration={})
    store.write(Record.of(0, {"a/b/c": 0.0}))
    store.close()
    with h5py.File(path) as file:
        assert "module table" not in file
    assert load_store(path).modules() == []
    resumed = Store(path, configuration={}, resumed=path, resume_from=1)
    resumed.write(Record.of(1, {"a/b/c": 0.0}, modules=KNOWN))
    resumed.close()
    assert load_store(path).modules() == KNOWN


def test_a_shape_or_a_name_that_is_too_long(tmp_path: Path) -> None:
    """A shape that does not fit is left out, and the name of a type is cut: never a number that is wrong."""
    store = Store(tmp_path / "m.h5", configuration={})
    store.write(Record.of(0, {"a/b/c": 0.0}, modules=[ModuleInfo("net", "N" * 100, 1, (10**6,) * 20, "float32")]))
    store.close()
    [found] = load_store(store.path).modules()
    assert found == ModuleInfo("net", "N" * 77 + "...", 1, None, "float32")
