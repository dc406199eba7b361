"""What a step costs in a Trainer, counted in calls of Python and of builtins: a number that no clock enters."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from helpers.lightning_package import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitorCallback
from lightning_module_monitor.health.alerts import AlertRule, matching
from lightning_module_monitor.health.judge import Judge
from lightning_module_monitor.keys import Columns, Key
from lightning_module_monitor.record import Record

ANY = re.compile(".*")

NUM_TENSORS = 129 + 128 + 128
"""Activations, parameters and gradients of the model, each measured once in a monitored step."""


class Counting(Callback):
    """Counts the calls from the first callback's ``on_train_batch_start`` to the last one's ``on_train_batch_end``."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        """Number of calls in each step."""
        self.end = _EndOfCount()

    def on_train_batch_start(self, *_args: object) -> None:
        self.calls.append(0)
        sys.setprofile(self._count)

    def _count(self, _frame: object, event: str, _argument: object) -> None:
        self.calls[-1] += event in ("call", "c_call")


class _EndOfCount(Callback):
    def on_train_batch_end(self, *_args: object) -> None:
        sys.setprofile(None)


class Deep(LightningModule):
    """W2 of the benchmarks: 64 times a linear layer and a ReLU, 385 recorded tensors."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _layer in range(64) for layer in (nn.Linear(128, 128), nn.ReLU())]
        self.model = nn.Sequential(*layers)

    def training_step(self, batch: Sequence[Any], _batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def calls_of_steps(folder: Path, callback: ModuleMonitorCallback | None) -> tuple[float, float]:
    """Calls in a monitored step and in another one, the means of 15 steps each, of a run that is monitored in every second step."""
    torch.manual_seed(0)
    batches = [(torch.randn(64, 128), torch.randint(128, (64,))) for _step in range(40)]
    counting = Counting()
    trainer = Trainer(
        max_steps=len(batches),
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[counting, *([] if callback is None else [callback]), counting.end],
    )
    try:
        trainer.fit(Deep(), torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]  # a list is a dataset
    finally:
        sys.setprofile(None)
    return mean(counting.calls[10:39:2]), mean(counting.calls[11:40:2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "most", "most_elsewhere"),
    [
        # 31 are the kernel's own look at a tensor, 11 torch's to put a hook on and take it off; before records were vectors it was 84.
        ({"health": False}, 58, 140),
        # 12 for the judge, the facts and the units of 64 ReLUs; before it was 120. In other steps the loss and gradients are looked at.
        ({}, 70, 435),
    ],
    ids=["without health", "default"],
)
def test_calls_of_a_step_in_a_trainer(
    options: dict[str, Any], most: float, most_elsewhere: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond a run without the callback: for each recorded tensor in a monitored step, and in another step as a whole."""
    caplog.set_level(logging.ERROR, "lightning.pytorch")
    plain, plain_elsewhere = calls_of_steps(tmp_path / "plain", None)
    found, elsewhere = calls_of_steps(tmp_path / "monitored", ModuleMonitorCallback(2, **options))
    assert (found - plain) / NUM_TENSORS < most, (found, plain)
    assert elsewhere - plain_elsewhere < most_elsewhere, (elsewhere, plain_elsewhere)


def calls_of_judge(num_rules: int, num_keys: int) -> int:
    """Calls of a judge for a record that is like those before it, by rules that judge all of its keys."""
    columns = Columns(Key("gradient", f"layer{number}.weight", "norm") for number in range(num_keys))
    rules = [AlertRule(f"rule {limit}", matching([ANY]), above=limit + 1e3, for_steps=2) for limit in range(num_rules)]
    judge, calls = Judge(rules, [key.site for key in columns.keys]), 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for step in range(4):
        record = Record(step, columns, np.arange(num_keys) + 1.0)
        sys.setprofile(count if step == 3 else None)
        try:
            judge.observe(record)
        finally:
            sys.setprofile(None)
    return calls


@pytest.mark.parametrize("num_keys", [10, 1000])
def test_a_further_rule_costs_a_constant_number_of_calls(num_keys: int) -> None:
    """Whatever the number of its keys."""
    few, many = calls_of_judge(5, num_keys), calls_of_judge(50, num_keys)
    assert (many - few) / 45 <= 20, (few, many)
    assert few == calls_of_judge(5, 20)
