"""Healthy runs, the examples and variations of them: with all detectors at every step, there is no finding."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.documents import program
from helpers.lightning_package import NAME, seed_everything
from helpers.training import Classifier, loader, seed, trainer
from torch import nn

from lightning_module_monitor import Health, ModuleMonitorCallback, Rule

ROOT = Path(__file__).parents[2]
EVERYTHING = Health(nonfinite="always", watch="all")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The examples make Lightning and its warnings quieter, for the whole process."""
    logger = logging.getLogger(NAME)
    level = logger.level
    with warnings.catch_warnings():
        yield
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("char_gpt", "--max_steps 14 --layers 1 --width 32 --heads 2 --context 32 --batch_size 8 --megabytes 0.1"),
        ("gan", "--max_epochs 1"),
        ("lora", "--max_epochs 1"),
    ],
)
def test_an_example(name: str, arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Accumulation and clipping; two optimizers by hand; adapters beside frozen layers."""
    monkeypatch.chdir(tmp_path)
    module, made = program(f"examples/{name}.py"), list[ModuleMonitorCallback]()

    def watching(every_n_steps: int, **options: Any) -> ModuleMonitorCallback:
        made.append(ModuleMonitorCallback(1, health=EVERYTHING, **options))
        return made[-1]

    monkeypatch.setattr(module, "ModuleMonitorCallback", watching)
    module.main(arguments.split())
    [callback] = made
    assert callback.last_record is not None
    assert callback.last_record.step >= 13
    assert callback.findings == []


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}], ids=["float32", "bf16, accumulated"])
def test_the_demonstration(options: dict[str, Any], tmp_path: Path) -> None:
    """Convolutions, BatchNorm, ReLU in place, dropout, AdamW."""
    digits = program("examples/digits.py")
    seed_everything(0, verbose=False)
    callback = ModuleMonitorCallback(1, health=EVERYTHING)
    run = trainer(tmp_path, [callback], max_epochs=1, **options)
    run.fit(digits.DigitsClassifier(), digits.Digits())
    assert callback.last_record is not None
    assert "activation/model.relu3/dead_fraction" in callback.last_record.values
    assert callback.findings == []


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", {}),
        ("cnn", {"accumulate_grad_batches": 3}),
        ("transformer", {"gradient_clip_val": 0.1}),
        ("gpt", {"precision": "bf16-mixed"}),
        ("shared", {"precision": "64-true"}),
    ],
)
def test_a_model_of_the_zoo(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Small models, small batches, dropout, attention, tied weights."""
    seed()
    callback = ModuleMonitorCallback(1, health=EVERYTHING)
    trainer(tmp_path, [callback], max_steps=30, max_epochs=-1, **options).fit(Classifier(model), loader(40, 4, shuffle=True), loader(8))
    assert callback.last_record is not None
    assert callback.last_record.step == 29
    assert callback.findings == []


def test_a_mask_of_infinities_is_no_fault(tmp_path: Path) -> None:
    """Neither the module that masks infinities nor the module that made them is named."""

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.softmax, self.head = torch.nn.Linear(6, 6), torch.nn.Softmax(-1), torch.nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.softmax(self.fc(x).masked_fill(torch.arange(6) > 2, -torch.inf)))

    callback = ModuleMonitorCallback(1, health=EVERYTHING)
    trainer(tmp_path, [callback], max_steps=5).fit(Classifier(Masked()), loader(), loader(8))
    assert callback.findings == []


def test_a_bias_in_front_of_a_normalization_has_not_vanished(tmp_path: Path) -> None:
    """BatchNorm takes off what such a bias adds: its gradient is what rounding leaves, whatever rules of the user's record of it."""
    seed()
    layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds="gradient", statistics="rms")], health=Health(watch="vanishing"))
    trainer(tmp_path, [callback], max_steps=4).fit(Classifier(layers), loader(), loader(8))
    assert callback.last_record is not None
    bias, weight = (callback.last_record.values[f"gradient/model.0.{name}/rms"] for name in ("bias", "weight"))
    assert 0 < bias < 1e-6 * weight
    assert callback.findings == []
