"""The bare callback on small trainings: no wrong cause, no false alarm, and healthy only where the loss falls and records are enough."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.lightning_package import LightningModule
from helpers.silent_faults import SILENT_HEALTHY, SILENT_SICK
from helpers.small_data import digits
from helpers.structural_faults import STRUCTURAL_HEALTHY, STRUCTURAL_SICK
from helpers.training import trainer
from helpers.trainings import HEALTHY, SICK, Case, run_seed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import ModuleMonitorCallback, load_store
from lightning_module_monitor.health.judgement import NOT_RECORDED, Verdict
from lightning_module_monitor.report.stored_run import read_run

SEEDS = [int(seed) for seed in os.environ.get("HEALTH_SEEDS", "0").split(",")]
"""``make test-health`` has three."""
ALL_SICK, ALL_HEALTHY = SICK | SILENT_SICK | STRUCTURAL_SICK, HEALTHY | SILENT_HEALTHY | STRUCTURAL_HEALTHY
LONGEST = 160
"""Characters of a message, besides names."""


def verdict_of(case: Case, folder: Path, seed: int, caplog: pytest.LogCaptureFixture) -> Verdict:
    """The verdict on the store of a training, which is that of the run itself; messages are short."""
    run_seed(seed)
    caplog.set_level(logging.INFO)
    callback = ModuleMonitorCallback(case.every)
    options = {"max_steps": case.steps, "max_epochs": -1, "limit_val_batches": 0} | case.options
    trainer(folder, [callback], **options).fit(case.make(), case.data())
    run = read_run(load_store(callback.store_path))
    verdict = run.verdict()
    # Once, at the end, and the same as on the store.
    lines = [one for one in caplog.messages if one.startswith("[monitor] Verdict: ")]
    assert lines == [f"[monitor] Verdict: {verdict.sentence}."]
    live, stored = ([(one.name, one.site, one.step, one.words) for one in found] for found in (callback.findings, verdict.findings))
    assert sorted(live) == sorted(stored)
    assert [one.name for one in callback.diagnose()] == [one.name for one in verdict.diagnoses]
    names = sorted(run.sites, key=len, reverse=True)
    for line in (*(one.message for one in callback.findings), *lines):
        assert len(re.sub("|".join(map(re.escape, names)), "", line)) <= LONGEST
        assert "Try" not in line
    return verdict


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALL_SICK)
def test_a_sick_training(name: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first cause is the right one, with its site, its first step and advice; what is not finite stands in the headline."""
    case = ALL_SICK[name]
    verdict = verdict_of(case, tmp_path, seed, caplog)
    assert verdict.level in case.levels
    assert [one.name for one in verdict.diagnoses[:1]] == [one.name for one in verdict.diagnoses[:1] if one.name in case.causes]
    for first in verdict.diagnoses[:1]:
        assert case.site in ("", first.site)
        assert case.first_step in (None, first.first_step)
        assert first.advice
        assert f"from step {first.first_step} {'at the latest' if first.key and first.first_step else 'on'}" in str(first)
    # A loss that may fall, between 1 % and 5 %, has no finding.
    assert bool(verdict.diagnoses) == (bool(case.causes) and verdict.level != "unknown")
    if any(one.name == "nonfinite" for one in verdict.findings):
        assert verdict.headline.startswith(("NaN in ", "Infinity in "))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALL_HEALTHY)
def test_a_healthy_training(name: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No finding; healthy, with what was looked at, unless its loss is of a kind that is not judged."""
    case = ALL_HEALTHY[name]
    verdict = verdict_of(case, tmp_path, seed, caplog)
    assert verdict.findings == []
    assert verdict.level in (case.levels if "unknown" in case.levels else ("healthy",)), verdict.headline


# Advice


class Everything(LightningModule):
    """Blocks with attention, every function whose saturation is looked at, and a loss that falls."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), act()) for act in (nn.ReLU, nn.Sigmoid, nn.Tanh)])
        self.attention, self.softmax, self.head = nn.TransformerEncoder(layer, 1), nn.Softmax(-1), nn.Linear(8, 10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        h = self.attention(batch[0].view(-1, 8, 8))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head((self.softmax(h) * h).mean(1)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def judged(folder: Path, **options: Any) -> Verdict:
    """The verdict on a run with such options."""
    run_seed(0)
    callback = ModuleMonitorCallback(2, **options)
    trainer(folder, [callback], max_steps=24, max_epochs=-1, limit_val_batches=0).fit(Everything(), digits())
    return read_run(load_store(callback.store_path)).verdict()


RULES: dict[str, list[dict[str, Any]] | None] = {"by default": None, "own rules": [{"kinds": "parameter", "statistics": "norm"}]}


@pytest.mark.parametrize("rules", RULES)
def test_advice_adds(rules: str, tmp_path: Path) -> None:
    """Each piece of advice, followed to the letter: the check has values afterwards, and all others have what they had."""
    before = judged(tmp_path / "before", rules=RULES[rules])
    missing = before.checks_with(NOT_RECORDED)
    assert "large_logits" in {check.name for check in missing}
    for check in missing[:: 1 if rules == "by default" else 6]:
        option = yaml.safe_load(check.reason.removeprefix("add "))
        after = judged(tmp_path / check.name, rules=RULES[rules], **option)
        assert {one.name for one in after.checks if one.num_series} >= {one.name for one in before.checks if one.num_series} | {check.name}
        assert {one.name for one in after.findings} >= {one.name for one in before.findings}


def test_watching_all_looks_at_all(tmp_path: Path) -> None:
    """Attention included; what is off says so."""
    everything = judged(tmp_path / "all", health={"watch": "all"})
    assert everything.checks_with(NOT_RECORDED) == []
    nothing = ModuleMonitorCallback(2, health={"watch": []})
    run_seed(0)
    case = SICK["Adam at 1.0"]
    trainer(tmp_path / "none", [nothing], max_steps=40, max_epochs=-1, limit_val_batches=0).fit(case.make(), case.data())
    assert nothing.findings == []


class OfLine(LightningModule):
    """A linear regression; by hand it has no loss that the monitor sees."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return None

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_log_ends_with_the_verdict_on_the_store(by_hand: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also without a loss, and where validation runs after monitored steps and after others; steps of validation are no records of it."""
    run_seed(0)
    caplog.set_level(logging.INFO)
    data = DataLoader(TensorDataset(torch.randn(128, 8)), 8)
    callback = ModuleMonitorCallback(5, stages=["train", "validate"])
    trainer(tmp_path, [callback], max_steps=64, max_epochs=-1, limit_val_batches=1).fit(OfLine(by_hand), data, data)
    verdict = read_run(load_store(callback.store_path)).verdict()
    assert [one for one in caplog.messages if one.startswith("[monitor] Verdict: ")] == [f"[monitor] Verdict: {verdict.sentence}."]
    num_monitored = len(range(0, 64, 5))
    assert {check.num_records for check in verdict.checks} <= {0, num_monitored}
    if not by_hand:
        assert f"at {num_monitored} records" in verdict.sentence
