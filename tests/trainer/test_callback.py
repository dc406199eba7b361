"""The callback's values, steps and life in a real Trainer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.lightning_package import ModelCheckpoint
from helpers.textbook import slack, textbook
from helpers.tiny import KeepRecords
from helpers.training import Classifier, KeepRawTensors, loader, seed, trainer
from torch import Tensor, nn

from lightning_module_monitor import ModuleMonitorCallback, Rule, load_store

KINDS = ["activation", "activation_gradient", "parameter", "gradient", "gradient_before_clip", "update"]
NAMES = ["mean", "std", "norm", "abs_max", "skewness", "kurtosis"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_values_are_those_of_raw_tensors_under_accumulation_and_clipping(
    precision: Any, optimizer: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    """All kinds in every step, the short last group too; ``gradient`` is clipped, ``gradient_before_clip`` is not."""
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[Rule(kinds=KINDS, sites="model.layers.0(.weight)?", statistics=NAMES)])
    records, truth = KeepRecords(callback), KeepRawTensors("model.layers.0")
    options = {"momentum": 0.9, "nesterov": True} if optimizer is torch.optim.SGD else {}
    run = trainer(tmp_path, [callback, records, truth], accumulate_grad_batches=3, gradient_clip_val=0.02, precision=precision)
    seed()
    run.fit(Classifier("mlp", optimizer, **options), loader(40), loader(8))
    assert [record.step for record in records.records] == [0, 1, 2, 3]  # ten batches: groups of 3, 3, 3 and 1
    assert [len(step["activation"]) for step in truth.steps] == [3, 3, 3, 1]
    for record, step in zip(records.records, truth.steps, strict=True):
        for kind, tensors in step.items():
            site = "model.layers.0" if "activation" in kind else "model.layers.0.weight"
            whole = torch.cat([tensor.double().reshape(-1) for tensor in tensors])
            for name in NAMES:
                atol = 1e-6 * slack(name, whole)
                assert record.values[f"{kind}/{site}/{name}"] == pytest.approx(textbook(name, whole), rel=2e-6, abs=atol, nan_ok=True), (
                    f"{kind} {name}"
                )
        assert textbook("norm", step["gradient"][0]) < textbook("norm", step["gradient_before_clip"][0])


def test_the_default_is_useful_and_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No argument: leaf modules' activations, parameters, gradients; logged once at the start."""
    callback = ModuleMonitorCallback()
    with caplog.at_level(logging.INFO):
        trainer(tmp_path, [callback], max_steps=3).fit(Classifier("cnn"), loader(), loader(8))
    record = callback.last_record
    assert record is not None
    assert record.step == 0
    leaves = ["model.stem.0", "model.stem.1", "model.stem.2", "model.block", "model.head"]
    expected = {f"activation/{leaf}/{name}" for leaf in leaves for name in ("rms", "abs_max", "nonfinite_count")}
    parameters = [f"{leaf}.{which}" for leaf in leaves if leaf != "model.stem.2" for which in ("weight", "bias")]
    expected |= {f"{kind}/{name}/norm" for kind in ("parameter", "gradient") for name in parameters}
    expected |= {"parameter/_root_/norm", "gradient/_root_/norm"}
    # What the watches look at besides.
    expected |= {"activation/model.stem.2/dead_fraction", *(f"gradient/{name}/rms" for name in parameters if name.endswith("weight"))}
    context = {
        *(f"context/{name}" for name in ("loss", "lr", "batch_size", "loss_2", "input_abs_max", "input_is_constant", "stale_gradients")),
        *(f"context/{name}" for name in ("input_variation", "output_variation", "constant_from", "same_units")),
    }  # the last key is what the module logs as "loss"
    assert set(record.values) == expected | context | {"monitor/errors"}
    line = "Watching 5 modules, 8 parameters: 39 keys and 12 context keys a step, every 50 steps."
    assert [m for m in caplog.messages if "Watching" in m] == [line]


def test_which_steps_are_monitored_is_counted_in_optimizer_steps(tmp_path: Path) -> None:
    """Steps 0, 3, 6, ... under accumulation, over epochs; ``max_steps`` ends in between."""
    callback = ModuleMonitorCallback(every_n_steps=3, rules=[Rule(kinds="parameter", statistics="norm")])
    records = KeepRecords(callback)
    trainer(tmp_path, [callback, records], accumulate_grad_batches=2, max_epochs=-1, max_steps=11).fit(
        Classifier("mlp"), loader(20), loader(8)
    )
    assert [record.step for record in records.records] == [0, 3, 6, 9]


def test_validation_does_not_enter_training_values_and_has_its_own_on_request(tmp_path: Path) -> None:
    """Sanity check and validation in the middle of an accumulated step: no record, or, with ``stages``, a record for each loop."""

    class Scaled(Classifier):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.model(batch[0] * 1000 + batch_idx)

    rule = Rule(kinds=["activation", "gradient"], sites="model(.layers.0.weight)?", statistics=["abs_max", "mean"])
    training: list[dict[int, dict[str, float]]] = []
    for stages in (["train"], ["train", "validate"], ["validate"]):
        callback = ModuleMonitorCallback(every_n_steps=1, rules=[rule], stages=stages)
        records = KeepRecords(callback)
        seed()
        module = Scaled("mlp")
        run = trainer(tmp_path, [callback, records], accumulate_grad_batches=4, val_check_interval=2, num_sanity_val_steps=2)
        run.fit(module, loader(32), loader(8))
        training.append({r.step: dict(r.values) for r in records.records if "monitor/errors" in r.values})
        validation = [r for r in records.records if "validation/monitor/errors" in r.values]
        assert [r.step for r in validation] == ([0, 0, 1, 1] if "validate" in stages else [])
        for record in validation:
            assert set(record.values) == {
                "validation/activation/model/abs_max",
                "validation/activation/model/mean",
                "validation/monitor/errors",
            }
        if validation:
            with torch.no_grad():
                module.eval()
                outputs = torch.cat([module.model(x * 1000 + i) for i, (x, _y) in enumerate(loader(8))])
            assert validation[-1].values["validation/activation/model/abs_max"] == pytest.approx(float(outputs.abs().max()))
            assert validation[-1].values["validation/activation/model/mean"] == pytest.approx(float(outputs.double().mean()), rel=1e-5)
    assert training[0] == training[1]
    assert list(training[0]) == [0, 1]
    assert all(values["activation/model/abs_max"] < 100 for values in training[0].values())
    assert training[2] == {}


@pytest.mark.parametrize("stage", ["test", "predict", "validate"])
def test_loops_outside_of_fit(stage: str, tmp_path: Path) -> None:
    """``trainer.test``, ``predict`` and ``validate`` give a record only if ``stages`` has them."""
    name = {"test": "test", "predict": "predict", "validate": "validation"}[stage]
    for stages in ([stage], ["train"]):
        callback = ModuleMonitorCallback(rules=[Rule(kinds="activation", sites="model", statistics="rms")], stages=stages)
        module = Classifier("mlp")
        getattr(trainer(tmp_path, [callback]), stage)(module, loader(12))
        if stages == [stage]:
            outputs = torch.cat([module.model.eval()(x) for x, _y in loader(12)]).detach()
            assert callback.last_record is not None
            assert callback.last_record.values[f"{name}/activation/model/rms"] == pytest.approx(textbook("rms", outputs), rel=1e-6)
        else:
            assert callback.last_record is None
        assert not any(part._forward_hooks for part in module.modules())


def test_a_dry_run_has_a_line_for_sites_with_the_same_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rules on different sites are two lines, whose products are the numbers of keys."""
    rules = [Rule(kinds="parameter", statistics="norm"), Rule(kinds="parameter", statistics=["mean", "std"], sites=".*weight")]
    trainer(tmp_path, [ModuleMonitorCallback(rules=rules, dry_run=True)], max_steps=1).fit(Classifier("mlp"), loader(), loader(8))
    lines = capsys.readouterr().out.splitlines()[1:4]
    assert lines[:2] == ["  parameter: 2 sites x 3 (norm, mean, std)", "  parameter: 2 sites x 1 (norm)"]
    assert lines[2].startswith(f"  {2 * 3 + 2 * 1 + 1} keys and 12 context keys")  # with that of errors


def test_dry_run_prints_the_plan_and_records_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints sites x statistics, keys, bytes of the table and of the store."""
    rules = [Rule(kinds=["activation", "gradient"], statistics=["mean", "std"]), Rule(kinds="update", statistics="ratio")]
    callback = ModuleMonitorCallback(every_n_steps=4, rules=rules, dry_run=True)
    trainer(tmp_path, [callback], max_steps=9).fit(Classifier("mlp"), loader(), loader(8))
    assert callback.last_record is None
    assert not list(tmp_path.rglob("*.h5"))
    # _root_, model, model.layers and four layers; two weights and two biases of 6*16 + 16 + 16*3 + 3 = 163 floats.
    assert capsys.readouterr().out.splitlines() == [
        "Dry run: nothing is recorded. With these rules a monitored step has",
        "  activation: 7 sites x 2 (mean, std)",
        "  gradient: 4 sites x 2 (mean, std)",
        "  update: 4 sites x 1 (ratio)",
        "  a copy of the parameters whose update is recorded: 652 B during the step",
        "  27 keys and 12 context keys; a table of 1.64 KiB to copy to the host, once",
        "  3 monitored steps in max_steps=9: at most 936 B of numbers in the store",
    ]


def test_the_store_holds_every_record(tmp_path: Path) -> None:
    """The file returns what the callback recorded, with the configuration."""
    callback = ModuleMonitorCallback(every_n_steps=2, rules=[Rule(kinds=KINDS, statistics=NAMES)], store=str(tmp_path / "new" / "run.h5"))
    records = KeepRecords(callback)
    trainer(tmp_path, [callback, records]).fit(Classifier("cnn"), loader(), loader(8))
    store = load_store(tmp_path / "new" / "run.h5")
    assert callback.store_path == str(tmp_path / "new" / "run.h5")
    for key in records.records[0].values:
        steps, values = store.series(key)
        assert list(steps) == [0, 2, 4, 6, 8]
        np.testing.assert_array_equal(values, [record.values[key] for record in records.records])
    configuration = store.attributes["configurations"][0]["configuration"]
    assert configuration["every_n_steps"] == 2
    assert configuration["rules"][0]["kinds"] == KINDS
    json.dumps(configuration)


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """Repeated steps are removed; the file equals that of an uninterrupted run, to the last bit."""
    rules = [Rule(kinds=["parameter", "gradient", "activation"], statistics=["norm", "std"])]

    def run(folder: Path, steps: int, resume: Path | None = None) -> ModuleMonitorCallback:
        seed()
        callback = ModuleMonitorCallback(every_n_steps=1, rules=rules)
        options: dict[str, Any] = {"enable_checkpointing": True, "max_steps": steps, "max_epochs": -1}
        checkpoints = ModelCheckpoint(folder / f"to_{steps}", every_n_train_steps=5, save_top_k=-1, filename="{step}")
        run = trainer(folder, [callback, checkpoints], **options)
        run.fit(Classifier(nn.Linear(6, 3)), loader(), loader(8), ckpt_path=resume)
        return callback

    whole = run(tmp_path / "whole", 20)
    first = run(tmp_path / "parts", 13)
    second = run(tmp_path / "parts", 20, tmp_path / "parts" / "to_13" / "step=10.ckpt")
    assert second.store_path == first.store_path != whole.store_path
    assert whole.store_path is not None
    assert second.store_path is not None
    expected, resumed = load_store(whole.store_path), load_store(second.store_path)
    # What the last validation has logged is in no checkpoint of Lightning's: there is none of it before the next validation.
    keys = [key for key in expected if key != "context/validation_loss"]
    assert [key for key in resumed if key != "context/validation_loss"] == keys
    for key in keys:
        np.testing.assert_array_equal(resumed.series(key), expected.series(key), err_msg=key)
    assert [configuration["first_step"] for configuration in resumed.attributes["configurations"]] == [0, 10]


def test_a_test_after_the_fit_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """A run has one file: training's rows stay, and the test loop's record has another group."""
    rule = Rule(kinds="activation", sites="model", statistics="rms")
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[rule], stages=["train", "test"])
    run = trainer(tmp_path, [callback], max_steps=4)
    module = Classifier("mlp")
    run.fit(module, loader(), loader(8))
    run.test(module, loader(8), verbose=False)
    assert [path.name for path in tmp_path.glob("*.h5")] == ["monitor.h5"]
    store = load_store(tmp_path / "monitor.h5")
    assert list(store.series("activation/model/rms")[0]) == [0, 1, 2, 3]
    assert list(store.series("test/activation/model/rms")[0]) == [4]


def test_a_validation_before_the_fit_keeps_its_rows(tmp_path: Path) -> None:
    """Step 0 of the fit is not a repeated step."""
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds="activation", sites="model", statistics="rms")], stages=["train", "validate"])
    run = trainer(tmp_path, [callback], max_steps=3, limit_val_batches=2)
    module = Classifier("mlp")
    run.validate(module, loader(8), verbose=False)
    run.fit(module, loader(), loader(8))
    assert [path.name for path in tmp_path.glob("*.h5")] == ["monitor.h5"]
    store = load_store(tmp_path / "monitor.h5")
    assert store.series("validation/activation/model/rms")[0][0] == 0
    assert list(store.series("activation/model/rms")[0]) == [0, 1, 2]


def test_validating_a_checkpoint_does_not_write_into_the_file_of_its_run(tmp_path: Path) -> None:
    """It is another run, and resumes nothing."""
    rule = Rule(kinds="activation", sites="model", statistics="rms")
    run = trainer(tmp_path, [ModuleMonitorCallback(1, rules=[rule])], max_steps=3)
    run.fit(Classifier("mlp"), loader(), loader(8))
    run.save_checkpoint(tmp_path / "end.ckpt")
    before = (tmp_path / "monitor.h5").read_bytes()
    callback = ModuleMonitorCallback(rules=[rule], stages="validate")
    trainer(tmp_path, [callback]).validate(Classifier("mlp"), loader(8), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    assert (tmp_path / "monitor.h5").read_bytes() == before
    assert callback.store_path == str(tmp_path / "monitor-2.h5")


def test_two_callbacks_in_one_trainer_work_side_by_side(tmp_path: Path) -> None:
    """Each has its keys, its cadence, its store and its entry in the checkpoint."""
    first = ModuleMonitorCallback(every_n_steps=2, rules=[Rule(kinds=KINDS, statistics="norm")], prefix="a")
    second = ModuleMonitorCallback(every_n_steps=3, rules=[Rule(kinds=KINDS, statistics="norm")], prefix="b")
    records = KeepRecords(first), KeepRecords(second)
    run = trainer(tmp_path, [first, second, *records], max_steps=7, enable_checkpointing=True)
    run.fit(Classifier("mlp"), loader(), loader(8))
    run.save_checkpoint(tmp_path / "both.ckpt")
    assert [[r.step for r in record.records] for record in records] == [[0, 2, 4, 6], [0, 3, 6]]
    at_six = [{key[2:]: value for key, value in record.records[-1].values.items()} for record in records]
    assert at_six[0] == at_six[1]
    assert {first.store_path, second.store_path} == {str(tmp_path / "monitor.h5"), str(tmp_path / "monitor-2.h5")}
    states = torch.load(tmp_path / "both.ckpt")["callbacks"]
    assert states["ModuleMonitorCallback[prefix=a]"]["store"] == first.store_path
    assert states["ModuleMonitorCallback[prefix=b]"]["store"] == second.store_path


def test_a_branch_that_first_runs_late_gets_its_keys_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A further output that appears at step 3: its column is empty before."""

    class Late(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            out = self.part(x)
            return out if self.calls <= 3 else (out, out * 2)

    class First(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            out = self.model(batch[0])
            return (out if isinstance(out, Tensor) else out[0] + out[1]).pow(2).mean()

    callback = ModuleMonitorCallback(every_n_steps=1, rules=[Rule(kinds="activation", sites="model", statistics="max")])
    with caplog.at_level(logging.INFO):
        trainer(tmp_path, [callback], max_steps=6, limit_val_batches=0).fit(First(Late()), loader(), loader(8))
    assert callback.store_path is not None
    store = load_store(callback.store_path)
    assert list(store.series("activation/model/max")[0]) == [0, 1, 2, 3, 4, 5]
    assert list(store.series("activation/model.output_1/max")[0]) == [3, 4, 5]
    assert len([message for message in caplog.messages if "activation/model.output_1/max" in message]) == 1


@pytest.mark.parametrize(
    ("method", "event", "optimizer"),
    [
        ("monitor_parameters", "on_before_optimizer_step", torch.optim.SGD),
        ("monitor_gradients", "optimizer.step", torch.optim.SGD),
        ("monitor_gradients", "optimizer.step", torch.optim.LBFGS),
    ],
)
def test_an_error_inside_the_callback_costs_one_step(
    method: str, event: str, optimizer: type[torch.optim.Optimizer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise 4: the error is logged, its step is lost, also if the optimizer calls its closure again; the next step is observed."""
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[Rule(kinds=["activation", "parameter", "gradient"], statistics="norm")])
    original = getattr(callback.monitor, method)
    calls = iter(range(100))

    def fails_once(*arguments: Any, **options: Any) -> None:
        if not options.get("before_clip") and next(calls) == 1:
            raise RuntimeError("a bug of ours")
        original(*arguments, **options)

    setattr(callback.monitor, method, fails_once)
    records = KeepRecords(callback)
    module = Classifier(nn.Linear(6, 3), optimizer, lr=0.1)
    trainer(tmp_path, [callback, records], max_steps=4, limit_val_batches=0).fit(module, loader(), loader(8))
    assert [record.step for record in records.records] == [0, 2, 3]
    for record in records.records:
        assert record.values["activation/model/norm"] > 0
        assert record.values["gradient/model.weight/norm"] > 0
    assert any(f"{event} failed (RuntimeError: a bug of ours)" in message for message in caplog.messages)


@pytest.mark.parametrize("where", ["setup", "configure_model"])
def test_layers_made_late_are_recorded_and_checked(where: str, tmp_path: Path) -> None:
    """They do not exist in the callback's ``setup``; the names are read once they exist."""

    class Configured(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.late(self.model(batch[0])).pow(2).mean()

    def make_layer(self: Configured, stage: str | None = None) -> None:
        self.late = nn.Linear(3, 3)

    setattr(Configured, where, make_layer)
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[Rule(kinds="gradient", sites="late.weight", statistics="norm")])
    trainer(tmp_path, [callback], max_steps=1).fit(Configured("mlp"), loader(), loader(8))
    assert callback.last_record is not None
    assert callback.last_record.values["gradient/late.weight/norm"] > 0
    wrong = ModuleMonitorCallback(rules=[Rule(kinds="gradient", sites="lste.weight", statistics="norm")])
    with pytest.raises(ValueError, match=r"rules\[0\].sites 'lste.weight' matches none of 6 parameter names; nearest: 'late.weight'"):
        trainer(tmp_path, [wrong], max_steps=1).fit(Configured("mlp"), loader(), loader(8))


def test_a_store_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tilde stands for the home directory, as in a shell."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    callback = ModuleMonitorCallback(every_n_steps=1, store="~/runs/monitor.h5")
    trainer(tmp_path, [callback], max_steps=1).fit(Classifier("mlp"), loader(8), loader(8))
    assert (tmp_path / "runs" / "monitor.h5").exists()
    assert not (tmp_path / "~").exists()
