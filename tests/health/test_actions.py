"""What follows a finding: words in every place, a stop, a checkpoint, more detail; and what is kept of it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from helpers.training import Classifier, loader, seed, trainer
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_module_monitor import Alert, Health, ModuleMonitorCallback, load_store
from lightning_module_monitor.errors import ConfigError

HEAD = "parameter/model.layers.3.weight/norm"


def run(folder: Path, *alerts: Alert, steps: int = 6, every: int = 1, **options: Any) -> ModuleMonitorCallback:
    """A run with alerts."""
    seed()
    callback = ModuleMonitorCallback(every, alerts=list(alerts), on_error="raise")
    trainer(folder, [callback], max_steps=steps, **options).fit(Classifier("mlp"), loader(), loader(8))
    return callback


def test_it_is_said_in_the_log_the_logger_and_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, in the same words everywhere."""
    logger = TensorBoardLogger(tmp_path, name="", version="tb")
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1}
    with caplog.at_level(logging.WARNING, "lightning.pytorch.module_monitor"):
        callback = run(tmp_path, Alert(keys=HEAD, above=0.0, for_steps=2, name="any"), **options)
    [found] = callback.findings
    assert (found.step, found.name, found.site, found.key) == (1, "any", "model.layers.3.weight", HEAD)
    value = load_store(callback.store_path).series(HEAD)[1][1]
    assert found.words == f"{HEAD}: {value:.4g}, in 2 records up to step 1. The alert is for above 0."
    assert [record.getMessage() for record in caplog.records] == [f"any at {found.site}, step 1: {found.words}"]
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    [text] = events.Tensors("monitor/findings/any/text_summary")
    assert (text.step, found.words in text.tensor_proto.string_val[0].decode()) == (1, True)
    assert load_store(callback.store_path).findings() == [found]


def test_training_stops_after_the_step(tmp_path: Path) -> None:
    """As EarlyStopping does."""
    callback = run(tmp_path, Alert(keys=HEAD, above=0.0, for_steps=3, then="stop"))
    assert callback.last_record is not None
    assert callback.last_record.step == 2


def test_a_checkpoint_is_saved(tmp_path: Path) -> None:
    """Beside the store, of the state after the step, from which a run can go on."""
    run(tmp_path, Alert(keys=HEAD, above=0.0, name="a/b", then="checkpoint"))
    checkpoint = torch.load(tmp_path / "monitor-a_b-step=0.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 1
    assert "model.layers.3.weight" in checkpoint["state_dict"]


def test_detail_is_raised_for_the_next_steps(tmp_path: Path) -> None:
    """Every statistic and the raw tensors of the module that the parameter is of, in steps that no rule is due at."""
    seed()
    callback = ModuleMonitorCallback(20, alerts=[Alert(keys=HEAD, above=0.0, then="capture")], health=Health(capture_steps=2))
    run = trainer(tmp_path, [callback], max_steps=5)
    run.fit(Classifier("mlp"), loader(), loader(8))
    store = load_store(callback.store_path)
    for key in ("activation/model.layers.3/std", "parameter/model.layers.3.weight/zero_fraction", "gradient/model.layers.3.bias/abs_mean"):
        assert store.series(key)[0].tolist() == [1, 2]
    assert not any("layers.0" in key for key in store.keys() if key.endswith("/std"))  # noqa: SIM118  # a store is no dict
    assert {(one.kind, one.site, one.step) for one in store.tensors()} == {
        (kind, f"model.layers.3{name}", step)
        for kind, name in [
            *(("activation", ""), ("activation_gradient", "")),
            *((kind, name) for kind in ("parameter", "gradient") for name in (".weight", ".bias")),
        ]
        for step in (1, 2)
    }
    # Another run of the same callback begins anew.
    trainer(tmp_path / "again", [callback], max_steps=1).fit(Classifier("mlp"), loader(), loader(8))
    assert "activation/model.layers.3/std" not in load_store(callback.store_path).keys()  # noqa: SIM118  # as above


def test_findings_survive_a_kill(tmp_path: Path) -> None:
    """What was found is in the file while it is written, and after a kill -9."""
    code = f"""
import os, sys
sys.path[:0] = {[str(Path(__file__).parents[1])]!r}
from lightning_module_monitor.record import Finding, Record
from lightning_module_monitor.sinks.hdf5 import Store
store = Store({str(tmp_path / "monitor.h5")!r}, configuration={{}}, keys=["activation/fc/rms"])
store.write(Record(0, {{"activation/fc/rms": 1.0}}, findings=[Finding(0, "a", "fc", "", "é" * 2000)]))
store.write(Record(3, findings=[Finding(3, "b", "", "k", "w", "error")]))
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=False)
    assert done.returncode == -9
    store = load_store(tmp_path / "monitor.h5")
    first, second = store.findings()
    assert (first.name, first.site, first.words) == ("a", "fc", "é" * 798 + "...")
    assert (second.step, second.name, second.key, second.words, second.severity) == (3, "b", "k", "w", "error")
    assert store.series("activation/fc/rms")[0].tolist() == [0]
    store.repair()
    assert store.findings() == [first, second]


def test_a_resumed_run_takes_out_what_is_run_again(tmp_path: Path) -> None:
    """A finding of a step that is run again is found again, and there once."""
    seed()
    alerts = [Alert(keys=HEAD, above=0.0, for_steps=4)]
    callback = ModuleMonitorCallback(1, alerts=alerts)
    first = trainer(tmp_path, [callback], max_steps=2, max_epochs=-1)
    first.fit(Classifier("mlp"), loader(), loader(8))
    first.save_checkpoint(tmp_path / "two.ckpt")
    callback = ModuleMonitorCallback(1, alerts=alerts)
    trainer(tmp_path, [callback], max_steps=8, max_epochs=-1).fit(Classifier("mlp"), loader(), loader(8), ckpt_path=tmp_path / "two.ckpt")
    store = load_store(callback.store_path)
    assert [one.step for one in store.findings()] == [5]
    callback = ModuleMonitorCallback(1, alerts=alerts)
    trainer(tmp_path, [callback], max_steps=7, max_epochs=-1).fit(Classifier("mlp"), loader(), loader(8), ckpt_path=tmp_path / "two.ckpt")
    assert [one.step for one in load_store(callback.store_path).findings()] == [5]


def test_a_store_without_findings_can_be_read(tmp_path: Path) -> None:
    """One that an earlier version wrote."""
    callback = run(tmp_path, steps=1)
    with h5py.File(callback.store_path, "r+") as file:
        del file["findings"]
    assert load_store(callback.store_path).findings() == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nonfinite": ({"health": Health(nonfinite="Always")}, r"health.nonfinite is 'Always'; expected warn, .*nearest: 'always'"),
    "watch": ({"health": Health(watch="dead")}, r"health.watch 'dead' is not a watch; .*nearest: 'dead_units'"),
    "health": ({"health": False}, r"health is a bool; expected a Health"),
    "no training": (
        {"health": Health(nonfinite="stop"), "stages": "validate"},
        r"health.nonfinite is 'stop', and stages .* no train; expected train among stages",
    ),
    "then": ({"health": Health(then="halt")}, r"health.then 'halt' is unknown; expected warn, stop"),
    "capture_steps": ({"health": Health(capture_steps=0)}, r"health.capture_steps is 0; expected a number >= 1"),
    "snapshot": ({"health": Health(snapshot=True)}, r"health.snapshot is true, and nonfinite is 'warn'.*always, or stop"),
    "capture without a store": (
        {"health": Health(watch="vanishing", then="capture"), "store": False},
        r"capture follows an alert, and store",
    ),
    "no limit": ({"alerts": [Alert(keys=".*")]}, r"alerts\[0\] has no limit; expected above"),
    "no key": (
        {"alerts": [Alert(keys="gradient/modl.*/norm", above=1)]},
        r"alerts\[0\].keys 'gradient/modl.*' matches none of the \d+ keys; ",
    ),
    "no number": ({"alerts": [Alert(keys=".*", above="x")]}, r"alerts\[0\].above is 'x'; expected a number"),  # type: ignore[arg-type]
    "factor": ({"alerts": [Alert(keys=".*", changes_by=1)]}, r"alerts\[0\].changes_by is 1; expected a factor above 1"),
    "median of nothing": (
        {"alerts": [Alert(keys=".*", changes_by=2, relative_to_median=True)]},
        r"relative_to_median is true, and there is",
    ),
    "for_steps": ({"alerts": [Alert(keys=".*", above=1, for_steps=0)]}, r"alerts\[0\].for_steps is 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_refused_before_the_first_batch(name: str, tmp_path: Path) -> None:
    """In setup, with what was wrong, what was expected, and the nearest right name."""
    options, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, [ModuleMonitorCallback(1, **options)]).fit(Classifier("mlp"), loader(), loader(8))


def test_findings_of_a_validation(tmp_path: Path) -> None:
    """An alert on a validation's values fires at its end."""

    class Grows(Classifier):
        def on_validation_start(self: LightningModule) -> None:
            with torch.no_grad():
                next(self.parameters()).mul_(10)

    callback = ModuleMonitorCallback(
        100, stages=["validate"], alerts=[Alert(keys="validation/activation/.*/rms", changes_by=5, name="grows")]
    )
    trainer(tmp_path, [callback], max_epochs=2).fit(Grows("mlp"), loader(), loader(8))
    assert [(one.name, one.step, one.site) for one in callback.findings] == [("grows", 19, "model.layers.0")]
