"""``attention: true`` in real training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.attention import truth
from helpers.lightning_package import CSVLogger, EarlyStopping
from helpers.tiny import KeepRecords, measured
from helpers.training import Classifier, loader, seed, trainer
from helpers.zoo import make
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_module_monitor import ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.config.rules import default_rules

SITES = ["model.head_0", "model.head_1"]
STATISTICS = {
    "attention_entropy": "mean",
    "attention_relative_entropy": "mean",
    "attention_max_logit": "max",
    "attention_sink": "mean",
}
KEYS = [f"{kind}/{site}/{statistic}" for kind, statistic in STATISTICS.items() for site in SITES]


class Gpt(Classifier):
    """The zoo's model with attention by function, with its data."""

    def __init__(self) -> None:
        super().__init__(make("gpt"))

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    val_dataloader = train_dataloader


def expected(inputs: Tensor) -> dict[str, float]:
    """Expected values of ``attention: true`` for the untrained model and these inputs, by key."""
    gpt: Any = make("gpt")
    query, key, _value = gpt.query_key_value(gpt.embedding(inputs.unsqueeze(-1))).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    of_kind = truth(query, key, is_causal=True)._asdict()
    reduce = {"mean": np.nanmean, "max": np.nanmax}
    return {
        f"{kind}/{site}/{statistic}": float(reduce[statistic](of_kind[kind][:, head]))
        for kind, statistic in STATISTICS.items()
        for head, site in enumerate(SITES)
    }


def test_attention_true_is_mean_of_each_kind_and_the_largest_logit(tmp_path: Path) -> None:
    """Over all micro-batches of a step; beside other rules; in the store; with other keys in validation."""
    rules = [*default_rules(), Rule(kinds="attention_entropy", statistics="hist")]
    callback = ModuleMonitorCallback(every_n_steps=1, rules=rules, attention=True, stages=["train", "validate"])
    records = KeepRecords(callback)
    run = trainer(tmp_path, [callback, records], accumulate_grad_batches=3, max_steps=2, val_check_interval=3)
    run.fit(Gpt(), loader(), loader(8))
    values = records.records[0].values
    inputs = torch.cat([batch[0] for batch, _number in zip(loader(), range(3), strict=False)])
    assert {key: values[key] for key in KEYS} == pytest.approx(expected(inputs), rel=1e-5)
    assert "activation/model.head/rms" in values
    assert {key for key in values if key.startswith("attention")} == set(KEYS)
    store = load_store(callback.store_path)
    for key in KEYS:
        steps, stored = store.series(key)
        assert list(steps) == [0, 1]
        assert stored[0] == values[key]
        if not key.startswith("attention_max_logit"):
            assert store.series(f"validation/{key}")[1][0] > 0
    _steps, counts, _edges = store.histogram("attention_entropy/model.head_1/hist")
    assert counts.sum(axis=1).tolist() == [12 * 6, 12 * 6]  # three batches of four samples of six tokens
    assert store.series("monitor/errors")[1].max() == 0


def test_rules_of_the_attention_kinds(tmp_path: Path) -> None:
    """With other statistics, sites and cadence; early stopping reads a head's value."""
    rule = Rule(kinds="attention_entropy", sites="model", statistics=["min", "std"], every_n_steps=2)
    callback = ModuleMonitorCallback(every_n_steps=4, rules=[rule], callback_metrics=r"attention_entropy/model\.head_1/min", store=False)
    stop = EarlyStopping("attention_entropy/model.head_1/min", stopping_threshold=100.0, check_on_train_epoch_end=True)
    run = trainer(tmp_path, [callback, stop], max_epochs=3)
    run.fit(Gpt(), loader(), loader(8))
    assert callback.last_record is not None
    assert callback.last_record.step == 8
    names = {f"attention_entropy/{site}/{statistic}" for site in SITES for statistic in ("min", "std")}
    assert set(measured(callback.last_record)) == {*names, "monitor/errors"}
    assert run.current_epoch == 1  # below the threshold at the end of the first epoch


def test_many_heads_are_rolled_up_for_loggers(tmp_path: Path) -> None:
    """Their number is known from the first record."""
    logger = CSVLogger(tmp_path, name="", version="csv")
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[], attention=True, max_logged_keys=5)
    seed()
    trainer(tmp_path, [callback], logger=logger, log_every_n_steps=1, max_steps=2).fit(Gpt(), loader(), loader(8))
    head = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {column.split("/")[1] for column in head if column.startswith("attention")} == {"_min_", "_median_", "_max_"}
    stored = load_store(callback.store_path).keys()
    assert {key for key in stored if key.startswith("attention")} == set(KEYS)


def test_a_dry_run_reports_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their keys are not counted."""
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[], attention=True, dry_run=True)
    trainer(tmp_path, [callback], max_steps=2).fit(Gpt(), loader(), loader(8))
    lines = capsys.readouterr().out.splitlines()
    assert "  attention_max_logit: heads of attention within 6 modules, known when it runs, x 1 (max)" in lines
    assert "  1 key and 12 context keys; a table of 0 B to copy to the host, once" in lines
