"""The norms of the whole gradient and of all parameters, which a callback without rules records, in a real Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import Callback, LightningModule, MixedPrecision, Trainer
from helpers.tiny import KeepRecords, Tiny, fit
from torch import Tensor
from torch.amp import GradScaler

from lightning_module_monitor import ModuleMonitorCallback, Rule, load_store

ROOT = "{}/_root_/norm"
BEFORE, GRADIENT, PARAMETER = (ROOT.format(kind) for kind in ("gradient_before_clip", "gradient", "parameter"))


class Norms(Callback):
    """The norms of one flat tensor in float64: of the gradient before and after clipping, and of the parameters."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.now: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.now = {BEFORE: self.norm([p.grad for p in pl_module.parameters()]), PARAMETER: self.norm(pl_module.parameters())}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_args: Any) -> None:
        if self.now:
            self.steps.append(self.now | {GRADIENT: self.norm([p.grad for p in pl_module.parameters()])})
        self.now = {}

    @staticmethod
    def norm(tensors: Any) -> float:
        return float(torch.cat([tensor.detach().double().flatten() for tensor in tensors]).norm())


class Clipped(Tiny):
    """Keeps what torch returns when it clips."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        if gradient_clip_val:
            self.returned.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)))


class Manual(Tiny):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.model(batch[0]).pow(2).mean()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def recorded(root: Path, model: Any = Tiny, rules: Any = None, **options: Any) -> tuple[KeepRecords, Norms]:
    """The records of a run in which every step is monitored."""
    callback = ModuleMonitorCallback(every_n_steps=1, rules=rules)
    records, norms = KeepRecords(callback), Norms()
    fit(root, [callback, records, norms], model, **options)
    return records, norms


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
        {"precision": "bf16-mixed"},
        {"precision": "16-mixed", "gradient_clip_val": 0.05},
    ],
    ids=str,
)
def test_the_default_has_the_norms_of_the_whole(options: dict[str, Any], tmp_path: Path) -> None:
    """In every step; before clipping only where the Trainer clips. With a GradScaler they are of the loss itself."""
    if options.get("precision") == "16-mixed":
        plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=256.0, growth_interval=1))
        options = {"plugins": [plugin], "gradient_clip_val": options["gradient_clip_val"]}
    records, norms = recorded(tmp_path, **options)
    assert len(records.records) == len(norms.steps) > 1
    for record, truth in zip(records.records, norms.steps, strict=True):
        expected = truth if options.get("gradient_clip_val") else {key: truth[key] for key in (GRADIENT, PARAMETER)}
        assert {key: record.values[key] for key in record.values if "/_root_/" in key} == pytest.approx(expected, rel=2e-6)
        assert record.values["monitor/errors"] == 0


def test_clipping_by_torch_returns_the_norm_before_and_leaves_the_norm_after(tmp_path: Path) -> None:
    """``clip_grad_norm_`` and the two totals agree, step by step."""
    kept: list[Clipped] = []

    def model() -> Clipped:
        kept.append(Clipped())
        return kept[-1]

    records, _norms = recorded(tmp_path, model, gradient_clip_val=0.05)
    assert [record.values[BEFORE] for record in records.records] == pytest.approx(kept[0].returned, rel=1e-6)
    assert [record.values[GRADIENT] for record in records.records] == pytest.approx(
        [min(0.05, norm) for norm in kept[0].returned], rel=1e-4
    )
    assert min(kept[0].returned) > 0.05


@pytest.mark.parametrize(
    ("options", "more"),
    [
        pytest.param({"gradient_clip_val": 0.05, "rules": [Rule(kinds="gradient", statistics="norm")]}, set(), id="rules of the user"),
        pytest.param({"gradient_clip_val": 0.05, "rules": []}, None, id="no rules"),
        pytest.param({"gradient_clip_val": 0}, {GRADIENT, PARAMETER}, id="a clip value of 0"),
        pytest.param({"model": Manual}, {GRADIENT, PARAMETER}, id="manual optimization"),
    ],
)
def test_where_nothing_is_clipped_or_rules_are_given(options: dict[str, Any], more: set[str] | None, tmp_path: Path) -> None:
    """There is no norm before clipping, and rules of the user replace the default."""
    if more is None:
        options |= {"rules": [Rule(kinds="parameter", statistics="norm", per_module="_root_")]}
        more = {PARAMETER}
    records, _norms = recorded(tmp_path, **options)
    assert {key for key in records.records[-1].values if "/_root_/" in key} == more


def test_callbacks_of_lightning_get_the_norm_of_the_whole_gradient(tmp_path: Path) -> None:
    """``callback_metrics`` names a total like any other key."""
    callback = ModuleMonitorCallback(every_n_steps=1, callback_metrics=[GRADIENT])
    norms = Norms()
    used = fit(tmp_path, [callback, norms])
    assert used.callback_metrics[GRADIENT].item() == pytest.approx(norms.steps[-1][GRADIENT], rel=2e-6)


def test_a_second_run_that_does_not_clip_has_no_norm_before_clipping(tmp_path: Path) -> None:
    """What one Trainer clips is no rule of the next one."""
    callback = ModuleMonitorCallback(every_n_steps=1)
    fit(tmp_path / "first", [callback], gradient_clip_val=0.05)
    assert callback.last_record is not None
    assert BEFORE in callback.last_record.values
    fit(tmp_path / "second", [callback])
    assert BEFORE not in callback.last_record.values
    assert GRADIENT in callback.last_record.values


def test_a_store_has_totals_and_its_pictures_leave_them_out(tmp_path: Path) -> None:
    """They are series of their own; a heat map and a profile are of single parameters, unless totals are asked for."""
    pytest.importorskip("matplotlib")
    rules = [
        Rule(kinds="gradient", statistics="norm"),
        Rule(kinds="gradient", statistics="norm", per_module=["_root_", r"model\.\d"]),
    ]
    callback = ModuleMonitorCallback(every_n_steps=1, rules=rules)
    fit(tmp_path, [callback])
    assert callback.store_path is not None
    store = load_store(callback.store_path)
    steps, values = store.series(GRADIENT)
    assert len(steps) == len(values) == 6
    names = [f"model.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")]
    drawn = store.plot._table("gradient", "norm", ".*").sites
    assert [*drawn] == names
    assert [*store.plot._table("gradient", "norm", r"model\.\d").sites] == ["model.0", "model.2"]
    assert [*store.plot._table("gradient", "norm", "_root_").sites] == ["_root_"]
