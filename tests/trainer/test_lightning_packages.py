"""Both packages of Lightning in one process, and each of them alone, which running all tests with one package cannot show."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.either_package import QUIET, batches, model_of
from torch import nn

from lightning_module_monitor import ModuleMonitorCallback, coordinate_check, load_store
from lightning_module_monitor.lightning_packages import NAMES, is_a, is_overridden, package_of

SCRIPT = Path(__file__).with_name("one_package.py")
STATE = Path(__file__).with_name("process_state.py")
CALLBACK = "lightning_module_monitor.callback"


@pytest.fixture(params=NAMES)
def package(request: pytest.FixtureRequest) -> Any:
    """One of the two packages."""
    return importlib.import_module(request.param)


def test_the_callback_is_a_callback_of_every_package(package: Any) -> None:
    """Its class for LightningCLI, and its object for a Trainer that gets no list."""
    callback = ModuleMonitorCallback()
    assert issubclass(ModuleMonitorCallback, package.Callback)
    assert callback in package.Trainer(**QUIET, logger=False, callbacks=callback).callbacks


def test_one_callback_serves_trainers_of_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """References, histograms and charts in TensorBoard are alike; each run's messages go to the logger of its Trainer's package."""
    values, tags, callback = (
        [],
        [],
        ModuleMonitorCallback(1, reference="init", rcc=True, rules=[{"kinds": "gradient", "statistics": "hist"}]),
    )
    for name in NAMES:
        package = importlib.import_module(name)
        logger = package.loggers.TensorBoardLogger(tmp_path, name=name)
        torch.manual_seed(0)
        caplog.clear()
        with caplog.at_level(logging.INFO, name):
            package.Trainer(**QUIET, callbacks=callback, logger=logger, log_every_n_steps=1).fit(model_of(package), batches())
        loggers = {record.name for record in caplog.records if "module_monitor" in record.name}
        assert loggers == {f"{name}.module_monitor"}
        store = load_store(callback.store_path or "")
        values.append({key: store.series(key)[1].tolist() for key in store if "seconds" not in key})
        accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        events = accumulator.EventAccumulator(logger.log_dir)
        events.Reload()
        tags.append({kind: names for kind, names in events.Tags().items() if isinstance(names, list)})
    assert values[0] == values[1]
    assert values[0]["rcc_output/fc/rms"][0] == values[0]["rcc_reference_output/fc/rms"][0] != 0
    assert tags[0] == tags[1]
    assert "gradient/fc.weight/hist" in tags[0]["histograms"]


def test_the_width_check_trains_modules_of_either(package: Any) -> None:
    """The Trainer of a module's package trains it."""
    check = coordinate_check(lambda width: model_of(package, width), [8, 16], batches(), seeds=1, quiet=True, parametrization={".*": None})
    assert {row.module for row in check.rows} == {"fc", "head"}


def test_classes_are_recognised_in_either(package: Any) -> None:
    """By the name of a class of Lightning's in the object's ancestry, and not by another library's class of that name."""
    model = model_of(package)
    assert is_a(model, "LightningModule")
    assert not is_a(model, "Trainer")
    assert package_of(model) is package
    assert not is_overridden(model, "setup")
    assert is_overridden(model, "configure_optimizers")

    class LightningModule(nn.Module):
        """Another library's."""

    assert not is_a(LightningModule(), "LightningModule")


def _run(script: Path, *arguments: str) -> str:
    command = [sys.executable, str(script), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _states(imports: str, folder: Path) -> list[dict[str, str]]:
    """The state of a process after these imports, and after a run with what they import."""
    states: list[dict[str, str]] = json.loads(_run(STATE, imports, str(folder)).splitlines()[-1])
    return states


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_either_package_alone_is_enough(name: str, tmp_path: Path) -> None:
    """Without the other package the callback trains, and its reference and its check run."""
    assert "rcc_output/fc/rms" in _run(SCRIPT, "alone", name, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_imports_and_runs_leave_the_process_as_it_was(name: str, tmp_path: Path) -> None:
    """Without the other package, in either order of imports: settings of Lightning's, of Python's and of torch's are as without us."""
    before, after = _states(name, tmp_path)
    for imports in (f"{name},{CALLBACK}", f"{CALLBACK},{name}"):
        states = _states(imports, tmp_path)
        assert states[0] == before
        assert states[1] == after


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_callback_becomes_one_of_a_package_that_is_imported_later(name: str) -> None:
    """Its class for LightningCLI, and objects that were made before."""
    assert _run(STATE, "later", name).split() == ["True", "True"]


def test_without_lightning_the_error_names_both(tmp_path: Path) -> None:
    """The error also says what to install."""
    printed = _run(SCRIPT, "none", "-", str(tmp_path))
    assert "Neither package of Lightning can be imported" in printed
    assert "pip install lightning" in printed
