"""The reference in a real Trainer: what it is compared with, where it comes from, and that nobody else notices it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import KeepRecords
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_module_monitor import ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.errors import ConfigError

DIFFERENCES = Rule(kinds=["activation_difference", "parameter_difference"], statistics=["norm", "ratio", "cosine"])


class Truth(Callback):
    """Compares in its own way: another model at initialization, called on the batch, in float64."""

    def __init__(self, module: LightningModule) -> None:
        self.model = module.model
        self.steps: list[dict[str, float]] = []
        self.outputs: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.outputs.append((pl_module.model(batch[0]).double(), self.model.double()(batch[0].double())))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        current, reference = (torch.cat(tensors) for tensors in zip(*self.outputs, strict=True))
        weight, own = (one.model.layers[0].weight.detach().double() for one in (pl_module, self))
        self.outputs = []
        self.steps.append(
            {
                "activation_difference/model/norm": float((current - reference).norm()),
                "activation_difference/model/ratio": float((current - reference).norm() / reference.norm()),
                "activation_difference/model/cosine": float((current * reference).sum() / current.norm() / reference.norm()),
                "parameter_difference/model.layers.0.weight/ratio": float((weight - own).norm() / own.norm()),
            }
        )


class WithoutDropout(Classifier):
    """Two layers and a GELU, so that a further call of the model changes nothing."""

    def __init__(self) -> None:
        super().__init__("mlp")
        self.model.layers[2] = nn.Identity()  # type: ignore[operator]


@pytest.mark.parametrize("module", [None, "model"])
def test_drift_from_the_initialization_is_that_of_another_copy(module: str | None, tmp_path: Path) -> None:
    """Under accumulation, at every step, both ways of running the reference: its own training_step, and the submodule's sibling."""
    seed()
    live = WithoutDropout()
    seed()
    truth = Truth(WithoutDropout())
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference="init", module=module, on_error="raise")
    records = KeepRecords(callback)
    trainer(tmp_path, [callback, records, truth], accumulate_grad_batches=3, max_epochs=2).fit(live, loader(), loader(8))
    assert len(records.records) == len(truth.steps) == 8
    for record, expected in zip(records.records, truth.steps, strict=True):
        for key, value in expected.items():
            assert record.values[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (record.step, key)
    assert records.records[-1].values["activation_difference/model/norm"] > 0.1
    prefixes = {key.split("/")[1].split(".")[0] for key in records.records[0].values if "difference" in key}
    assert prefixes == ({"model"} if module else {"model", "_root_"} - {"_root_"})


@pytest.mark.parametrize("module", [None, "model"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("model", ["cnn", "transformer"])
def test_at_step_0_nothing_differs_and_later_something_does(model: str, precision: Any, module: str | None, tmp_path: Path) -> None:
    """Dropout, BatchNorm, half precision: every difference and every term of the check is exactly zero."""
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], module=module, rcc=True, on_error="raise")
    records = KeepRecords(callback)
    seed()
    trainer(tmp_path, [callback, records], precision=precision, max_steps=2).fit(Classifier(model), loader(), loader(8))
    first, second = (dict(record.values) for record in records.records)
    compared = ("activation_difference", "parameter_difference", "rcc_effective_update", "rcc_propagating_update", "rcc_input_change")
    zero = [key for key in first if key.startswith(compared) and not key.endswith("cosine") and not (key.endswith("ratio") and "bias" in key)]
    assert len(zero) > 40
    assert {key: first[key] for key in zero if first[key] != 0} == {}
    assert second["parameter_difference/model.head.weight/norm"] > 0
    assert second["rcc_effective_update/model.head/rms"] > 0
    assert second["activation_difference/model/norm"] > 0


class Talkative(Classifier):
    """Logs in every way, keeps a metric, writes into its batch, and counts its calls."""

    def __init__(self) -> None:
        super().__init__("mlp")
        self.accuracy = MulticlassAccuracy(3)
        self.told: list[str] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        batch[0].mul_(2)
        logits = self.model(batch[0])
        self.accuracy(logits, batch[1])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        self.log_dict({"accuracy": self.accuracy, "step": float(self.trainer.global_step)})
        self.logger.log_metrics({"own": float(loss)}, self.global_step)  # type: ignore[union-attr]
        self.print("x")
        return loss


def test_the_reference_is_silent_and_the_model_gets_its_batch_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is logged, printed or written into twice; weights are those of a run without it."""
    runs = []
    for monitored in (False, True):
        seed()
        module, keep = Talkative(), KeepLosses()
        callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference="init", on_error="raise", store=False)
        logger = CSVLogger(tmp_path / str(monitored), flush_logs_every_n_steps=1)
        options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "max_steps": 5}
        trainer(tmp_path, [callback, keep] if monitored else [keep], **options).fit(module, loader(), loader(8))
        rows = [line.split(",") for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()]
        own = [row[rows[0].index("own")] for row in rows[1:] if row[rows[0].index("own")]]
        accuracy = [row[rows[0].index("accuracy")] for row in rows[1:] if row[rows[0].index("accuracy")]]
        runs.append((own, accuracy, [float(one) for one in keep.losses], capsys.readouterr().out, module.state_dict()))
        if monitored:
            assert callback.last_record is not None
            assert callback.last_record.values["activation_difference/model/norm"] > 0
            assert callback.last_record.values["monitor/errors"] == 0
    assert runs[0][:4] == runs[1][:4]
    assert len(runs[0][0]) == 5
    assert all(torch.equal(a, b) for a, b in zip(runs[0][4].values(), runs[1][4].values(), strict=True))


def test_a_reference_that_wants_the_optimizers_is_told_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It never gets the model's."""

    class Asks(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            assert self.optimizers() is not None
            return super().training_step(batch, batch_idx)

    callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference="init")
    run = trainer(tmp_path, [callback], max_steps=2)
    run.fit(Asks("mlp"), loader(), loader(8))
    assert run.global_step == 2
    assert "The reference could not run (RuntimeError: the reference has no optimizers; give module" in caplog.text
    assert callback.last_record is not None
    assert callback.last_record.values["monitor/errors"] == 1
    assert callback.last_record.values["parameter_difference/model.layers.0.weight/norm"] > 0


ALL = {"every_n_steps": 1, "rules": [DIFFERENCES], "rcc": True, "on_error": "raise"}


def records_of(root: Path, callback: ModuleMonitorCallback, model: LightningModule, **options: Any) -> dict[int, dict[str, float]]:
    """Train for six steps in all, and return what was recorded."""
    records = KeepRecords(callback)
    path = options.pop("ckpt_path", None)
    save = ModelCheckpoint(root, filename="at_{step}", every_n_train_steps=3, save_top_k=-1)
    run = trainer(root, [callback, records, save], enable_checkpointing=True, **{"max_steps": 6, **options})
    run.fit(model, loader(24), loader(8), ckpt_path=path)
    return {record.step: dict(record.values) for record in records.records}


class BuiltLate(LightningModule):
    """Makes its layers in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Classifier("mlp").model

    training_step = Classifier.training_step
    validation_step = Classifier.validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


@pytest.mark.parametrize("module", [None, "model"])
@pytest.mark.parametrize("late", [False, True])
def test_a_resumed_run_compares_with_the_first_runs_initialization(late: bool, module: str | None, tmp_path: Path) -> None:
    """Interrupted after step 3 and gone on with from other weights: every difference and term is that of the uninterrupted run."""

    def model(random_seed: int) -> LightningModule:
        torch.manual_seed(random_seed)
        return BuiltLate() if late else Classifier("mlp")

    whole = records_of(tmp_path / "whole", ModuleMonitorCallback(**ALL, module=module), model(0))
    (path,) = [str(one) for one in (tmp_path / "whole").glob("at_*=3.ckpt")]
    torch.manual_seed(99)
    callback = ModuleMonitorCallback(**ALL, module=module)
    keep_random = RandomStates(path)
    resumed = records_of_resumed(tmp_path / "resumed", callback, keep_random, model(99), path)
    assert sorted(resumed) == [3, 4, 5]
    assert len(resumed[3]) > 50
    for step, values in resumed.items():
        compared = {key: value for key, value in values.items() if "difference" in key or key.startswith("rcc_")}
        assert compared == {key: whole[step][key] for key in compared}, step


class RandomStates(Callback):
    """Lightning's checkpoints hold no random states; dropout's masks are a function of the step here."""

    def __init__(self, _path: str = "") -> None:
        pass

    def on_train_batch_start(self, trainer: Trainer, *_args: Any) -> None:
        torch.manual_seed(trainer.global_step)


def records_of_resumed(
    root: Path, callback: ModuleMonitorCallback, before: Callback, model: LightningModule, path: str
) -> dict[int, dict[str, float]]:
    """The rest of a run."""
    records = KeepRecords(callback)
    trainer(root, [before, callback, records], max_steps=6).fit(model, loader(24), loader(8), ckpt_path=path)
    return {record.step: dict(record.values) for record in records.records}
