"""What follows a finding: words in every place, a stop, a checkpoint, more detail; and what is kept of it."""

from __future__ import annotations

import copy
import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from helpers.lightning_package import LOGGER, AsyncCheckpointIO, LightningModule, TensorBoardLogger, TorchCheckpointIO
from helpers.training import Classifier, loader, seed, trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lightning_module_monitor import Alert, GradientFlow, Health, ModuleMonitorCallback, MonitorMixin, Rule, load_store
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.sinks.store.reader import StoreReader

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
    with caplog.at_level(logging.WARNING, LOGGER):
        callback = run(tmp_path, Alert(keys=HEAD, above=0.0, for_steps=2, name="any"), **options)
    [found] = callback.findings
    assert (found.step, found.name, found.site, found.key) == (1, "any", "model.layers.3.weight", HEAD)
    value = load_store(callback.store_path).series(HEAD)[1][1]
    assert found.words == f"{HEAD}: {value:.4g}; above 0 in 2 records from step 0 to 1."
    assert [record.getMessage() for record in caplog.records] == [f"[monitor] Step 1, any: {found.words}"]
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


class FullDisk(TorchCheckpointIO):
    """Writes half of a checkpoint."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        Path(path).write_bytes(b"half a checkpoint")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_checkpoint_without_space_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The name stands for a whole checkpoint only; one warning, and the run goes on and is recorded."""
    callback = ModuleMonitorCallback(1, alerts=[Alert(keys=HEAD, above=0.0, name="a", then="checkpoint")])
    run = trainer(tmp_path, [callback], max_steps=3, plugins=[FullDisk()])
    run.fit(Classifier("mlp"), loader(), loader(8))
    assert [path.name for path in tmp_path.iterdir()] == ["monitor.h5"]
    assert load_store(callback.store_path).series(HEAD)[0].tolist() == [0, 1, 2]
    path = tmp_path / "monitor-a-step=0.ckpt"
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING and "checkpoint" in record.getMessage()]
    assert warned == [f"The checkpoint {path} was not saved (OSError: [Errno 28] No space left on device). Training goes on."]


def test_a_checkpoint_that_is_saved_in_a_thread(tmp_path: Path) -> None:
    """Lightning's plugin for that sees to its files itself. The checkpoint of another run in the folder stays."""
    callback = ModuleMonitorCallback(1, alerts=[Alert(keys=HEAD, above=0.0, name="a", then="checkpoint")])
    (tmp_path / "monitor-a-step=0.ckpt").write_text("of another run")
    run = trainer(tmp_path, [callback], max_steps=2, plugins=[AsyncCheckpointIO()])
    run.fit(Classifier("mlp"), loader(), loader(8))
    assert torch.load(tmp_path / "monitor-a-step=0-2.ckpt", weights_only=True)["global_step"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["monitor-a-step=0-2.ckpt", "monitor-a-step=0.ckpt", "monitor.h5"]
    assert (tmp_path / "monitor-a-step=0.ckpt").read_text() == "of another run"


def test_detail_is_raised_for_the_next_steps(tmp_path: Path) -> None:
    """Every statistic and the raw tensors of the module that the parameter is of, in steps that no rule is due at."""
    seed()
    callback = ModuleMonitorCallback(20, alerts=[Alert(keys=HEAD, above=0.0, then="capture")], health=Health(capture_steps=2))
    run = trainer(tmp_path, [callback], max_steps=5)
    run.fit(Classifier("mlp"), loader(), loader(8))
    store = load_store(callback.store_path)
    for key in ("activation/model.layers.3/std", "parameter/model.layers.3.weight/zero_fraction", "gradient/model.layers.3.bias/abs_mean"):
        assert store.series(key)[0].tolist() == [1, 2]
    assert not any("layers.0" in key for key in store if key.endswith("/std"))
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
from lightning_module_monitor.sinks.store.writer import Store
store = Store({str(tmp_path / "monitor.h5")!r}, configuration={{}}, keys=["activation/fc/rms"])
store.write(Record.of(0, {{"activation/fc/rms": 1.0}}), [Finding(0, "a", "fc", "", "é" * 2000)])
store.write(Record(3), [Finding(3, "b", "", "k", "w", "error")])
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


def fitted(folder: Path, module: Classifier, steps: int, ckpt_path: Path | None = None, **options: Any) -> StoreReader:
    """A run, from a checkpoint or from the start, with a checkpoint of its end."""
    callback = ModuleMonitorCallback(1, **options)
    run = trainer(folder, [callback], max_steps=steps, max_epochs=-1, limit_val_batches=0)
    run.fit(module, loader(4), loader(4), ckpt_path=ckpt_path)  # one batch an epoch: a loader begins anew when a run is resumed
    run.save_checkpoint(folder / f"{steps}.ckpt")
    return load_store(callback.store_path)


def test_a_resumed_run_finds_what_the_whole_run_finds(tmp_path: Path) -> None:
    """A streak continues, a finding is not repeated, raised detail lasts; steps that run again give their findings once."""
    alerts = [
        Alert(keys="parameter/model.1.weight/norm", above=0.0, for_steps=4, name="streak"),
        Alert(keys="parameter/model.1.weight/norm", above=0.0, name="once", then="capture"),
        Alert(keys="gradient/.*/norm", above=1.1, relative_to_median=True, name="changes"),
    ]
    options: dict[str, Any] = {"alerts": alerts, "health": Health(capture_steps=4)}
    module = Classifier(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
    twin, third = copy.deepcopy(module), copy.deepcopy(module)
    whole = fitted(tmp_path / "whole", module, 8, **options)
    fitted(tmp_path / "parts", twin, 2, **options)
    for steps in (8, 6):
        store = fitted(tmp_path / "parts", third, steps, tmp_path / "parts" / "2.ckpt", **options)
        expected = [one for one in whole.findings() if one.step < steps]
        assert {(one.name, one.step) for one in expected} >= {("streak", 3), ("once", 0)}
        assert store.findings() == expected
        assert store.series("activation/model.1/std")[0].tolist() == [1, 2, 3, 4]
    # Another alert begins anew, beside the findings until the checkpoint, and so does a fit that is not resumed.
    alerts = [Alert(keys="parameter/.*/norm", above=0.0, for_steps=4)]
    callback = ModuleMonitorCallback(1, alerts=alerts, store=False)
    options = {"max_epochs": -1, "max_steps": 6, "limit_val_batches": 0}
    trainer(tmp_path, [callback], **options).fit(third, loader(4), loader(4), ckpt_path=tmp_path / "parts" / "2.ckpt")
    assert [(one.name, one.step) for one in callback.findings if one.name != "changes"] == [("once", 0), ("parameter/.*/norm", 5)]
    trainer(tmp_path, [callback], **options).fit(third, loader(4), loader(4))
    assert [one.step for one in callback.findings] == [3]


def test_a_resumed_run_knows_what_was_found_before(tmp_path: Path) -> None:
    """Diagnoses and verdict are those of the whole run; what is judged at the end is judged anew."""

    class Forgotten(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model[1].parameters(), lr=0.0 if self.trainer.max_steps == 10 else 0.1)

    module = Forgotten(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
    options: dict[str, Any] = {"max_epochs": -1, "limit_val_batches": 0}
    first, resumed = ModuleMonitorCallback(1), ModuleMonitorCallback(1)
    run = trainer(tmp_path, [first], max_steps=10, **options)
    run.fit(module, loader(4), loader(4))
    run.save_checkpoint(tmp_path / "first.ckpt")
    assert {one.name for one in first.findings} == {"no_optimizer", "zero_rate"}
    trainer(tmp_path, [resumed], max_steps=12, **options).fit(module, loader(4), loader(4), ckpt_path=tmp_path / "first.ckpt")
    assert resumed.findings[0] == first.findings[0]
    assert "no_optimizer" in [one.name for one in resumed.diagnose()]
    assert [one.name for one in resumed.findings].count("no_optimizer") == 1


def test_what_was_not_finite_is_not_said_again(tmp_path: Path) -> None:
    """By a run that resumes after the finding."""
    module = Classifier(nn.Linear(6, 3))
    nn.init.constant_(module.model.bias, torch.inf)
    assert len(fitted(tmp_path, module, 2).findings()) == 1
    assert len(fitted(tmp_path, module, 4, tmp_path / "2.ckpt").findings()) == 1


OWN = "own/half/value"


class Logs(Classifier, MonitorMixin):
    """Has a value of its own, which is 0 from the third step on."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.is_monitoring:
            self.get_module_monitor().log_scalar(OWN, float(batch_idx < 2))
        return super().training_step(batch, batch_idx)


def test_alerts_on_values_of_the_user_s_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They fire; a key that the first record lacks is reported after that record."""
    keys = [OWN, "run1/own/half/value"]
    alerts = [Alert(keys=f"run1/{OWN}", below=0.5, name="low"), Alert(keys="run1/owm/half/value", above=0)]
    callback = ModuleMonitorCallback(1, prefix="run1", alerts=alerts, store=False, callback_metrics=keys[1])
    run = trainer(tmp_path, [callback], max_steps=4)
    run.fit(Logs("mlp"), loader(), loader(8))
    assert [(one.name, one.step, one.site, one.key) for one in callback.findings] == [("low", 2, "half", keys[1])]
    assert run.callback_metrics[keys[1]] == 0
    [message] = [record.getMessage() for record in caplog.records if "Later records" in record.getMessage()]
    assert message.startswith("alerts[1].keys 'run1/owm/half/value' matches none of ")
    assert message.endswith("; nearest: 'run1/own/half/value'. Later records may have such keys.")


def test_alerts_on_keys_that_come_later(tmp_path: Path) -> None:
    """Those of further outputs and of parts of a dict are not known before they come; those of summaries are."""
    rules = [Rule(kinds="activation", statistics="rms", functions={"f": lambda x: {"largest": x.max()}})]
    alerts = [
        Alert(keys=r"activation/model\.lstm\.output_1_0/rms", above=0, name="output"),
        Alert(keys=r"activation/model\.lstm/f\.largest", above=-2, name="part"),
        Alert(keys=r"gradient_flow/_summary_/.*gain", above=0, name="gain"),
    ]

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    callback = ModuleMonitorCallback(
        1, rules=rules, alerts=alerts, store=False, gradient_flow=GradientFlow(blocks=["model.lstm", "model.head"])
    )
    trainer(tmp_path, [callback], max_steps=1).fit(Classifier(Recurrent()), loader(), loader(8))
    assert [one.name for one in callback.findings] == ["output", "part", "gain"]


def test_a_store_without_findings_can_be_read(tmp_path: Path) -> None:
    """One that an earlier version wrote."""
    callback = run(tmp_path, steps=1)
    with h5py.File(callback.store_path, "r+") as file:
        del file["findings"]
    assert load_store(callback.store_path).findings() == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nonfinite": ({"health": Health(nonfinite="Always")}, r"health.nonfinite is 'Always'; expected warn, .*nearest: 'always'"),
    "watch": ({"health": Health(watch="dead")}, r"health.watch 'dead' is not a detector; .*nearest: 'dead_units'"),
    "health": ({"health": "off"}, r"health is 'off'; expected options, e.g. \{nonfinite: always\}"),
    "no option of health": (
        {"health": {"nonfinit": "warn"}},
        r"health has no option 'nonfinit'; expected nonfinite, .*nearest: 'nonfinite'",
    ),
    "nonfinite off": ({"health": {"nonfinite": False}}, r"health.nonfinite is False; expected warn, always, stop, ignore\."),
    "all in capitals": ({"health": {"watch": ["All"]}}, r"health.watch 'All' is not a detector; expected all, .*nearest: 'all'"),
    "no option of an alert": ({"alerts": [{"keys": ".*", "for_step": 1}]}, r"alerts\[0\] has no option 'for_step'; .*nearest: 'for_steps'"),
    "no alert": ({"alerts": "gradient"}, r"alerts\[0\] is 'gradient'; expected options, e.g. \{keys: "),
    "no keys": ({"alerts": {"above": 1}}, r"alerts\[0\].keys is empty; expected at least one pattern"),
    "infinite": ({"alerts": {"keys": ".*", "above": float("inf")}}, r"alerts\[0\].above is inf; expected a finite number"),
    "all values": ({"alerts": {"keys": ".*", "above": 1, "below": 2}}, r"above is 1, and below is 2: every value .* smaller one"),
    "name": ({"alerts": {"keys": ".*", "above": 1, "name": "exploding"}}, "name is 'exploding', which is the name of a detector"),
    "negative multiple": (
        {"alerts": {"keys": ".*", "below": -1, "relative_to_median": True}},
        r"alerts\[0\].below is -1, and relative_to_median is true; expected a multiple",
    ),
    "no training": (
        {"health": Health(nonfinite="stop"), "stages": "validate"},
        r"health.nonfinite is 'stop', and stages .* no train; expected train among stages",
    ),
    "then": ({"health": Health(then="halt")}, r"health.then 'halt' is unknown; expected warn, stop"),
    "capture_steps": ({"health": Health(capture_steps=0)}, r"health.capture_steps is 0; expected a whole number >= 1"),
    "capture without a store": (
        {"health": Health(watch="vanishing", then="capture"), "store": False},
        r"capture follows an alert, and store",
    ),
    "no limit": ({"alerts": [Alert(keys=".*")]}, r"alerts\[0\] has no limit; expected above"),
    "no key": (
        {"alerts": [Alert(keys="gradient/modl.*/norm", above=1)]},
        r"alerts\[0\].keys 'gradient/modl.*' matches none of the \d+ keys as a whole; 'gradient/model",
    ),
    "no key among several": (
        {"alerts": [Alert(keys=["gradient/model.*/norm", "gradeint/.*/norm"], above=1)]},
        r"alerts\[0\].keys 'gradeint/.*/norm' matches none of the \d+ keys as a whole; 'gradient/\.\*/norm' matches 5 of them",
    ),
    "no key of a kind that is known, with heads": (
        {"alerts": [Alert(keys="gradient/modl.*/norm", above=1)], "attention": True},
        r"alerts\[0\].keys 'gradient/modl.*' matches none",
    ),
    "no key of an output": ({"alerts": [Alert(keys="activation/modl.output_1/rms", above=1)]}, r"'activation/modl.* matches none"),
    "roll-up": (
        {"alerts": [Alert(keys="gradient/_max_/norm", above=1)]},
        r"the site _max_ is made for loggers, .* expected the keys themselves, e.g. 'gradient/\.\*/norm'",
    ),
    "histogram": (
        {"alerts": [Alert(keys="parameter/.*/hist", above=1)], "rules": [Rule(kinds="parameter", statistics="hist")]},
        r"alerts\[0\].keys 'parameter/.*/hist' matches 'parameter/.*', a histogram; expected keys of numbers",
    ),
    "no number": ({"alerts": [Alert(keys=".*", above="x")]}, r"alerts\[0\].above is 'x'; expected a finite number"),  # type: ignore[arg-type]
    "for_steps": ({"alerts": [Alert(keys=".*", above=1, for_steps=0)]}, r"alerts\[0\].for_steps is 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_refused_before_the_first_batch(name: str, tmp_path: Path) -> None:
    """In setup, with what was wrong, what was expected, and the nearest right name."""
    options, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, [ModuleMonitorCallback(1, **options)]).fit(Classifier("mlp"), loader(), loader(8))


def test_a_trial_writes_no_file(tmp_path: Path) -> None:
    """As Lightning writes none in ``fast_dev_run``: no checkpoint; findings are logged."""
    module = Classifier(nn.Linear(6, 3))
    nn.init.constant_(module.model.bias, torch.inf)
    options: dict[str, Any] = {
        "health": {"nonfinite": "always"},
        "alerts": {"keys": "monitor/errors", "above": -1, "then": "checkpoint"},
    }
    callback = ModuleMonitorCallback(1, **options)
    trainer(tmp_path, [callback], fast_dev_run=True).fit(module, loader(), loader(8))
    assert [one.name for one in callback.findings] == ["nonfinite", "monitor/errors"]
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_nothing_to_capture_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a figure without a site; of a transition of the gradient flow it is the block that the gradient has come through."""
    alerts = [Alert(keys=keys, above=-1, then="capture") for keys in ("monitor/errors", "gradient_flow/.*-.*/gain")]
    callback = ModuleMonitorCallback(
        1, alerts=alerts, gradient_flow=GradientFlow(blocks=["model.0", "model.1"]), health=Health(capture_steps=1)
    )
    module = Classifier(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
    trainer(tmp_path, [callback], max_steps=2).fit(module, loader(), loader(8))
    assert "There is nothing to capture: '' is no module or parameter, nor within one." in [one.getMessage() for one in caplog.records]
    assert {one.site for one in load_store(callback.store_path).tensors()} == {"model.1", "model.1.weight", "model.1.bias"}


def test_findings_of_a_validation(tmp_path: Path) -> None:
    """An alert on a validation's values fires at its end."""

    class Grows(Classifier):
        def on_validation_start(self: LightningModule) -> None:
            with torch.no_grad():
                next(self.parameters()).mul_(10)

    callback = ModuleMonitorCallback(
        100, stages=["validate"], alerts=[Alert(keys="validation/activation/.*/rms", above=10.0, name="grows")]
    )
    trainer(tmp_path, [callback], max_epochs=2).fit(Grows("mlp"), loader(), loader(8))
    assert [(one.name, one.step, one.site) for one in callback.findings] == [("grows", 19, "model.layers.0")]
