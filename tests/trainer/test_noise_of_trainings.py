"""Gradient noise in a real Trainer, against the gradients that reach the parameters in each micro-batch."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.lightning_package import (
    Callback,
    DDPStrategy,
    FSDPStrategy,
    GradientAccumulationScheduler,
    LightningModule,
    MixedPrecision,
    ModelCheckpoint,
    ModelParallelStrategy,
    Trainer,
)
from helpers.noise import by_hand, scales, values_of
from helpers.tiny import KeepRecords
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.trainer.strategy import check_gradient_noise


class Gradients(Callback):
    """Keeps the gradient of each micro-batch of each step, by hooks of its own, and the number of its samples."""

    def __init__(self) -> None:
        self.steps: list[list[list[Tensor]]] = []
        self.sizes: list[list[int]] = []
        self._is_new = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parameters = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        for index, parameter in enumerate(self._parameters):
            parameter.register_hook(lambda gradient, index=index: self._keep(index, gradient))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._is_new:
            self.steps.append([])
            self.sizes.append([])
        self._is_new = not trainer.fit_loop._should_accumulate()
        self.steps[-1].append([torch.zeros_like(parameter, dtype=torch.float64) for parameter in self._parameters])
        self.sizes[-1].append(len(batch[0]))
        self._factor = float(trainer.accumulate_grad_batches)  # of the first call of a closure alone

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._scale, self._factor = self._factor / (1.0 if scaler is None else scaler.get_scale()), 0.0

    def _keep(self, index: int, gradient: Tensor) -> None:
        self.steps[-1][-1][index] += gradient.double() * self._scale

    def expected(self) -> list[dict[str, float]]:
        """Noise and signal of each step with several micro-batches."""
        steps = zip(self.steps, self.sizes, strict=True)
        return [by_hand(gradients, sizes) if len(sizes) > 1 else {"noise": math.nan} for gradients, sizes in steps]


def fit(
    folder: Path, module: LightningModule, batches: Any = None, *, noise: Any = True, more: Any = (), **options: Any
) -> tuple[Any, Any]:
    """Train with nothing but gradient noise; returns what was recorded, and the gradients."""
    callback = ModuleMonitorCallback(1, rules=[], gradient_noise=noise, on_error="raise", store=str(folder / "monitor.h5"))
    records, truth = KeepRecords(callback), Gradients()
    seed()
    run = trainer(folder, [callback, records, truth, *more], **{"accumulate_grad_batches": 3, **options})
    run.fit(module, loader(40) if batches is None else batches, loader(8))
    return records, truth


def assert_true(records: KeepRecords, truth: Gradients, rel: float = 1e-4) -> None:
    """Every value is that of the gradients."""
    expected = truth.expected()
    assert len(records.records) == len(expected)
    for record, values, scale in zip(records.records, expected, scales(expected), strict=True):
        measured = values_of(record)
        near = rel * abs(values["noise"])
        assert {name: measured[name] for name in values} == pytest.approx(values, rel=rel, abs=near, nan_ok=True)
        assert measured["scale"] == pytest.approx(scale, rel=50 * rel, nan_ok=True)
        assert record.values["monitor/errors"] == 0


@pytest.mark.parametrize("model", ["mlp", "cnn", "shared", "frozen"])
def test_micro_batches_of_every_window_count(model: str, tmp_path: Path) -> None:
    """With clipping, a validation loop within windows, and an epoch's last window of one micro-batch and of two, whose last is smaller."""
    for num_samples in (37, 32):
        records, truth = fit(
            tmp_path / str(num_samples),
            Classifier(model, torch.optim.SGD),
            loader(num_samples, batch_size=5),
            gradient_clip_val=0.01,
            max_epochs=2,
            val_check_interval=2,
        )
        sizes = truth.sizes
        assert len({len(of_step) for of_step in sizes}) == 2
        assert_true(records, truth)


@pytest.mark.parametrize(("fused", "clip"), [(False, 0.01), (True, None)], ids=["clipped", "fused"])
def test_gradients_have_no_scale(fused: bool, clip: float | None, tmp_path: Path) -> None:
    """Under 16-mixed the scale doubles with every step, and a fused optimizer unscales by itself."""
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=256.0, growth_interval=1))
    module = Classifier("mlp", torch.optim.AdamW, fused=fused)
    assert_true(*fit(tmp_path, module, plugins=[plugin], gradient_clip_val=clip))


def test_an_overflow_is_no_estimate(tmp_path: Path) -> None:
    """The first step's gradients are infinite: its values are NaN, and the averages begin with the second."""
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-32))
    records, truth = fit(tmp_path, Classifier("mlp"), plugins=[plugin])
    first, second = (values_of(record) for record in records.records[:2])
    assert all(math.isnan(first[name]) for name in ("noise", "signal", "scale"))
    expected = truth.expected()[1]
    assert second["noise"] == pytest.approx(expected["noise"], rel=1e-4)
    assert second["scale"] == pytest.approx(scales([expected])[0], rel=1e-3, nan_ok=True)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions(precision: str, tmp_path: Path) -> None:
    """The gradient of the step is rounded to the parameters' precision, those of micro-batches to their own."""
    rel = {"bf16-true": 0.1, "64-true": 1e-9}.get(precision, 1e-4)
    assert_true(*fit(tmp_path, Classifier("mlp", torch.optim.SGD), precision=precision), rel)


def test_modules_and_their_store(tmp_path: Path) -> None:
    """With patterns every site has its values, in the store too; a parameter that no optimizer has is left out."""

    class Untrained(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([*self.model.layers[0].parameters()], lr=0.1)

    records, truth = fit(tmp_path, Untrained("mlp"), noise={"per_module": ["_root_", r"model\.layers\.\d"]})
    truth.steps = [[each[:2] for each in step] for step in truth.steps]
    assert_true(records, truth)
    store = load_store(tmp_path / "monitor.h5")
    sites = {key.split("/")[1] for key in store if key.startswith("gradient_noise/")}
    assert sites >= {"_root_", "model.layers.0"}
    _steps, noise = store.series("gradient_noise/_root_/noise")
    assert noise.tolist() == pytest.approx([values_of(record)["noise"] for record in records.records], nan_ok=True)
    assert values_of(records.records[0], "model.layers.0") == values_of(records.records[0])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_goes_on_with_the_averages(tmp_path: Path) -> None:
    """The scales after a checkpoint are those of a run that was not interrupted."""
    checkpoints = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    large = loader(400, batch_size=40)  # of which the signal is above 0
    whole, _truth = fit(tmp_path / "whole", Classifier("mlp"), large, more=[checkpoints], enable_checkpointing=True, max_epochs=2)
    callback = ModuleMonitorCallback(1, rules=[], gradient_noise=True, store=False)
    records = KeepRecords(callback)
    seed()
    run = trainer(tmp_path / "resumed", [callback, records], accumulate_grad_batches=3, max_epochs=2)
    run.fit(Classifier("mlp"), large, loader(8), ckpt_path=tmp_path / "step=4.ckpt")
    before = [values_of(record) for record in whole.records if record.step < 4]
    after = [values_of(record) for record in records.records]
    assert [record.step for record in records.records] == list(range(4, 8))
    assert [values["scale"] for values in after] == pytest.approx(scales([*before, *after])[4:], rel=1e-9, nan_ok=True)
    assert scales(after) != pytest.approx([values["scale"] for values in after], rel=1e-3, nan_ok=True)


def test_lbfgs_counts_by_the_first_call_of_its_closure(tmp_path: Path) -> None:
    """As all gradients are recorded; later calls of the closure add to them."""
    records, truth = fit(tmp_path, Classifier("mlp", torch.optim.LBFGS, max_iter=3), accumulate_grad_batches=2)
    assert len(records.records) == 5
    assert_true(records, truth)


class Manual(Classifier):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__("mlp")
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Classifier, {}, "expected Trainer(accumulate_grad_batches=2) or more, or DDP on several devices"),
        (Manual, {}, "Manual uses manual optimization, and which gradients add up is not known; expected automatic optimization"),
    ],
    ids=["one gradient", "manual"],
)
def test_what_cannot_be_measured_is_refused_before_the_first_batch(module: Any, options: Any, message: str, tmp_path: Path) -> None:
    """By the option's name, and with what would do."""
    callback, losses = ModuleMonitorCallback(1, rules=[], gradient_noise=True), KeepLosses()
    with pytest.raises(ConfigError, match=r"^gradient_noise: ") as caught:
        trainer(tmp_path, [callback, losses], **options).fit(module(), loader(8), loader(8))
    assert message in str(caught.value)
    assert not losses.losses


def test_a_scheduler_of_accumulation_is_let_through(tmp_path: Path) -> None:
    """One micro-batch a step in the first epoch, two in the second."""
    more = [GradientAccumulationScheduler({0: 1, 1: 2})]
    records, truth = fit(tmp_path, Classifier("mlp"), more=more, accumulate_grad_batches=1, max_epochs=2)
    assert [math.isnan(values_of(record)["noise"]) for record in records.records] == [True] * 10 + [False] * 5
    assert_true(records, truth)


def test_a_run_without_training_needs_no_micro_batches(tmp_path: Path) -> None:
    """Validating with the same callback is not refused, and gives its record."""
    rules = [Rule(kinds="activation", sites="model", statistics="rms")]
    callback = ModuleMonitorCallback(1, rules=rules, gradient_noise=True, stages=["train", "validate"], store=False)
    trainer(tmp_path, [callback]).validate(Classifier("mlp"), loader(8), verbose=False)
    assert callback.last_record is not None
    assert [key for key in callback.last_record.values if "monitor/" not in key] == ["validation/activation/model/rms"]


def test_a_dry_run_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """With the number of modules, and what it measures."""
    callback = ModuleMonitorCallback(1, rules=[], gradient_noise={"per_module": ["_root_", "model"]}, dry_run=True, store=False)
    trainer(tmp_path, [callback], accumulate_grad_batches=4).fit(Classifier("mlp"), loader(8), loader(8))
    assert "gradient_noise: 2 modules x 6 (noise, signal, scale, largest, largest_rank, largest_micro_batch)" in capsys.readouterr().out


class SkipsBatches(Classifier):
    """Has no loss for every third batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return None if batch_idx % 3 == 1 else F.cross_entropy(self.model(batch[0]), batch[1])


@pytest.mark.parametrize(
    "strategy", [ModelParallelStrategy, FSDPStrategy, type("DeepSpeedStrategy", (DDPStrategy,), {"__module__": "lightning.x"})]
)
def test_strategies_that_lay_parameters_out_are_refused(strategy: Any) -> None:
    """By their names."""
    run = SimpleNamespace(strategy=strategy(), world_size=2)
    with pytest.raises(ConfigError, match=f"^gradient_noise: {strategy.__name__} shows no rank the whole gradient of its own micro-batch"):
        check_gradient_noise(run)  # type: ignore[arg-type]  # it reads no more of a Trainer


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_micro_batch_without_a_loss_is_left_out(tmp_path: Path) -> None:
    """The gradients of the others are compared, and numbered as the micro-batches are."""
    records, truth = fit(tmp_path, SkipsBatches("mlp", torch.optim.SGD))
    truth.steps = [[each for number, each in enumerate(step) if number != 1] for step in truth.steps]
    truth.sizes = [[size for number, size in enumerate(sizes) if number != 1] for sizes in truth.sizes]
    for record, expected in zip(records.records, truth.expected(), strict=True):
        if math.isfinite(expected["noise"]):
            assert values_of(record)["noise"] == pytest.approx(expected["noise"], rel=1e-4)
            assert values_of(record)["largest_micro_batch"] == 2 * expected["largest_micro_batch"]
