"""The bare callback on small trainings: no wrong cause, no false alarm, and healthy only where the loss falls and records are enough."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.all_trainings import ALL_HEALTHY, ALL_SICK, TRAININGS, entry, stored_verdict, table, train
from helpers.lightning_package import LightningModule
from helpers.silent_faults import SILENT_HEALTHY, SILENT_SICK
from helpers.small_data import digits
from helpers.structural_faults import STRUCTURAL_HEALTHY, STRUCTURAL_SICK
from helpers.training import trainer
from helpers.trainings import HEALTHY, SICK, Case, run_seed
from helpers.unlike_faults import UNLIKE_FAULTS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import ModuleMonitorCallback, load_store
from lightning_module_monitor.health.checks import NOT_RECORDED
from lightning_module_monitor.health.judgement import Verdict
from lightning_module_monitor.report.stored_run import read_run

SEEDS = [int(seed) for seed in os.environ.get("HEALTH_SEEDS", "0").split(",")]
"""``make test-health`` has three."""
LIVE = {
    "Adam at 1.0", "shuffled labels", "data with a NaN", "dead ReLUs", "float16", "an overflow between records", "one code for all",
    "an MLP", "a GPT, warmed up", "a GAN", "by hand", "a cosine",
}  # fmt: skip
"""What is trained in ``make test``; of all others the stores are judged there, and trainings are slow."""
LONGEST = 160
"""Characters of a message, besides names."""


def as_parameters(names: Iterable[str]) -> list[Any]:
    """Trainings as parameters of a test."""
    return [pytest.param(name, marks=[] if name in LIVE else pytest.mark.slow) for name in names]


def live_verdict(case: Case, folder: Path, seed: int, caplog: pytest.LogCaptureFixture) -> Verdict:
    """The verdict on the store of a training, which is that of the run itself; messages are short."""
    caplog.set_level(logging.INFO)
    callback = train(case, folder, seed)
    run = read_run(load_store(callback.store_path))
    verdict = run.verdict()
    # Once, at the end, and the same as on the store.
    lines = [message for message in caplog.messages if message.startswith("[monitor] Verdict: ")]
    assert lines == [f"[monitor] Verdict: {verdict.sentence}."]
    live, stored = (
        [(finding.name, finding.site, finding.step, finding.words) for finding in found] for found in (callback.findings, verdict.findings)
    )
    assert sorted(live) == sorted(stored)
    assert [diagnosis.name for diagnosis in callback.diagnose()] == [diagnosis.name for diagnosis in verdict.diagnoses]
    names = sorted(run.sites, key=len, reverse=True)
    for line in (*(finding.message for finding in callback.findings), *lines):
        assert len(re.sub("|".join(map(re.escape, names)), "", line)) <= LONGEST
        assert "Try" not in line
    return verdict


def assert_sick(case: Case, verdict: Verdict) -> None:
    """The first cause is the right one, with its site, its first step and advice; what is not finite stands in the headline."""
    assert verdict.level in case.levels
    first_of_all = verdict.diagnoses[:1]
    assert [first.name for first in first_of_all if first.name not in case.causes] == []
    for first in first_of_all:
        assert case.site in ("", first.site)
        assert case.first_step in (None, first.first_step)
        assert first.advice
        assert f"from step {first.first_step} {'at the latest' if first.key and first.first_step else 'on'}" in str(first)
    # A loss that may fall, between 1 % and 5 %, has no finding.
    assert bool(verdict.diagnoses) == (bool(case.causes) and verdict.level != "unknown")
    if any(finding.name == "nonfinite" for finding in verdict.findings):
        assert verdict.headline.startswith(("NaN in ", "Infinity in "))


def assert_healthy(case: Case, verdict: Verdict) -> None:
    """No finding; healthy, with what was looked at, unless its loss is of a kind that is not judged."""
    assert verdict.findings == []
    assert verdict.level in (case.levels if "unknown" in case.levels else ("healthy",)), verdict.headline


@pytest.mark.parametrize("name", TRAININGS)
def test_a_stored_training(name: str) -> None:
    """What is said of the same records is what the table says: any other verdict is a difference to look at."""
    verdict = stored_verdict(name)
    (assert_sick if name in ALL_SICK else assert_healthy)(TRAININGS[name], verdict)
    assert entry(name, verdict) == table()[name], "write tests/health/verdicts.txt with: make verdicts"


def test_the_table_has_all_trainings() -> None:
    """Also those that were added since; no two have the same name."""
    assert list(table()) == list(TRAININGS)
    assert len(TRAININGS) == sum(map(len, (SICK, SILENT_SICK, STRUCTURAL_SICK, HEALTHY, SILENT_HEALTHY, STRUCTURAL_HEALTHY, UNLIKE_FAULTS)))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", as_parameters(ALL_SICK))
def test_a_sick_training(name: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A training of its own."""
    assert_sick(ALL_SICK[name], live_verdict(ALL_SICK[name], tmp_path, seed, caplog))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", as_parameters(ALL_HEALTHY))
def test_a_healthy_training(name: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A training of its own."""
    assert_healthy(ALL_HEALTHY[name], live_verdict(ALL_HEALTHY[name], tmp_path, seed, caplog))


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
