"""What a release wrote, this version reads: the store of a finished run, that of a killed one, and a checkpoint."""

from __future__ import annotations

import json
import logging
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.released_files import BATCH, FOLDER, KILLED_AFTER, SAVED_AFTER, STEPS, Net, batches, monitor
from helpers.training import trainer

from lightning_module_monitor import StoreReader, load_store
from lightning_module_monitor.cli import main

ARCHIVES = sorted(FOLDER.glob("*.tar.xz"))


@pytest.fixture(params=ARCHIVES, ids=[path.name.removesuffix(".tar.xz") for path in ARCHIVES])
def released(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the files of a release."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path / "released", filter="data")
    return tmp_path / "released"


def truth_of(released: Path) -> dict[str, list[float]]:
    """The series by formulas in float64, as the release's run computed them."""
    series: dict[str, list[float]] = json.loads((released / "truth.json").read_text())["series"]
    assert len(series) == 7
    return series


def assert_has(store: StoreReader, series: dict[str, list[float]], steps: range) -> None:
    """A store has the values of these steps."""
    for key, values in series.items():
        found, numbers = store.series(key)
        assert found.tolist() == [*steps], key
        np.testing.assert_allclose(numbers, values[steps.start : steps.stop], rtol=1e-5, err_msg=key)


def test_a_finished_store(released: Path) -> None:
    """Its series, histograms, tensors, modules, findings and attributes."""
    store, truth = load_store(released / "monitor.h5"), truth_of(released)
    assert_has(store, truth, range(STEPS))
    steps, counts, edges = store.histogram("activation/fc/hist")
    assert steps.tolist() == [*range(STEPS)]
    assert counts.sum(axis=1).tolist() == [BATCH * 3] * STEPS
    assert len(edges) > 200
    output = store.tensor("activation", "fc", 0).double()
    assert output.shape == (BATCH, 3)
    assert store.series("activation/fc/rms")[1][0] == pytest.approx(output.square().mean().sqrt().item(), rel=1e-6)
    assert [(module.name, module.type, module.num_parameters) for module in store.modules()] == [
        ("_root_", "Net", 15),
        ("fc", "Linear", 15),
    ]
    assert store.findings() == []
    assert store.attributes["package_version"] == json.loads((released / "truth.json").read_text())["version"]


def test_every_command_reads_it(released: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Besides ``info``, which reads no store."""
    path = str(released / "monitor.h5")
    commands = {"report": ["-o", str(released / "page.html")], "compare": [path, "-o", str(released / "pages.html")], "formats": []}
    commands |= {"summary": ["--json"], "keys": ["gradient/.*"], "export": [], "repair": []}
    printed = {}
    for command, arguments in commands.items():
        assert main([command, path, *arguments]) == (command == "formats"), command  # no statistics of formats were recorded
        printed[command] = capsys.readouterr().out
    summary = json.loads(printed["summary"])
    assert (summary["first_step"], summary["last_step"], summary["level"]) == (0, STEPS - 1, "unknown")
    assert printed["keys"].split() == ["gradient/fc.weight/norm", "gradient/fc.bias/norm"]
    assert (released / "page.html").stat().st_size > 100_000
    losses = [line for line in (released / "monitor.csv").read_text().splitlines() if ",context,,loss," in line]
    assert len(losses) == STEPS


def test_the_store_of_a_killed_run(released: Path) -> None:
    """With its journal, up to the last step; repaired, it is a plain file."""
    store, truth = load_store(released / "killed.h5"), truth_of(released)
    assert_has(store, truth, range(KILLED_AFTER))
    store.repair()
    assert not (released / "killed.h5.journal").exists()
    assert_has(load_store(released / "killed.h5"), truth, range(KILLED_AFTER))


def test_a_checkpoint_is_resumed(released: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the reference of the first run, and the rows of its store: the store is that of a run that was never interrupted."""
    path = moved(released / "saved.ckpt", store=str(released / "monitor.h5"))
    callback = monitor()
    caplog.set_level(logging.WARNING)
    trainer(tmp_path / "resumed", [callback], max_steps=STEPS).fit(Net(), batches(), ckpt_path=path)
    assert_has(load_store(str(callback.store_path)), truth_of(released), range(STEPS))
    assert [message for message in caplog.messages if "checkpoint" in message or "reference" in message] == []


@pytest.mark.parametrize("version", [2, 0, "1"])
def test_a_checkpoint_of_another_version_is_not_continued(
    version: object, released: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run trains on, with a line, and records from the step of the checkpoint on."""
    path = moved(released / "saved.ckpt", store=str(released / "monitor.h5"), format_version=version)
    callback = monitor()
    trainer(tmp_path / "resumed", [callback], max_steps=STEPS).fit(Net(), batches(), ckpt_path=path)
    [message] = [message for message in caplog.messages if "format version" in message]
    assert message.startswith(f"The monitor's state in the checkpoint has format version {version}; expected one from 1 to 1. ")
    truth = truth_of(released)
    of_weights = {key: values for key, values in truth.items() if "difference" not in key}
    assert_has(load_store(str(callback.store_path)), of_weights, range(SAVED_AFTER, STEPS))


def moved(path: Path, **entries: Any) -> Path:
    """A checkpoint, after a change of the callback's state."""
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["callbacks"]["ModuleMonitorCallback"].update(entries)
    torch.save(checkpoint, path)
    return path
