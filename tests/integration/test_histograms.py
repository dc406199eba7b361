"""Histograms from the callback: in loggers with a type for them, and in the store."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import NAME, CSVLogger, Logger, TensorBoardLogger, WandbLogger
from helpers.offline_wandb import history
from helpers.textbook import histogram
from helpers.tiny import KeepRecords, Tiny, fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_module_monitor import Health, Histogram, ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.errors import ConfigError

RULES = [
    Rule(kinds=["activation", "activation_gradient"], statistics=["hist", "rms"]),
    Rule(kinds=["parameter", "gradient", "update"], statistics="hist"),
]


def train(root: Path, loggers: list[Logger] | bool = False, **options: Any) -> tuple[ModuleMonitorCallback, KeepRecords]:
    """The records of a short run with accumulation and a validation loop."""
    callback = ModuleMonitorCallback(**{"every_n_steps": 1, "rules": RULES, "stages": ["train", "validate"], **options})
    kept = KeepRecords(callback)
    fit(root, [callback, kept], logger=loggers, accumulate_grad_batches=2)
    return callback, kept


def recorded(kept: KeepRecords) -> dict[tuple[str, int], Histogram]:
    """Histogram by key and step."""
    return {(key, record.step): one for record in kept.records for key, one in record.histograms.items()}


def test_every_element_of_a_step_is_counted(tmp_path: Path) -> None:
    """Over both micro-batches, and of parameters before the step; equal to numpy's counts."""
    outputs: list[torch.Tensor] = []

    class Keeps(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.first = [self.model[0].weight.detach().clone()] if batch_idx % 2 == 0 else self.first
            outputs.append(self.model[1](self.model[0](batch[0])).detach())
            return super().training_step(batch, batch_idx)

    callback = ModuleMonitorCallback(1, rules=[Rule(kinds=["activation", "parameter"], sites=r"model\.(1|0\.weight)", statistics="hist")])
    kept = KeepRecords(callback)
    weights = []

    class KeepWeights(Keeps):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            weights.append(self.model[0].weight.detach().clone())

    fit(tmp_path, [callback, kept], KeepWeights, accumulate_grad_batches=2)
    for step, record in enumerate(kept.records):
        # The call above is observed, too.
        both = torch.cat([outputs[2 * step]] * 2 + [outputs[2 * step + 1]] * 2)
        assert record.histograms == {
            "activation/model.1/hist": histogram(both),
            "parameter/model.0.weight/hist": histogram(weights[step]),
        }
        assert record.histograms["activation/model.1/hist"].counts[130] > 0, "a ReLU gives zeros"
    assert len(kept.records) == 3


def test_tensorboard_has_them_in_its_own_type(tmp_path: Path) -> None:
    """A real event file: buckets and counts of each histogram are the record's, at the record's step."""
    _callback, kept = train(tmp_path, [TensorBoardLogger(tmp_path, name="", version="tb", prefix="run")])
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"histograms": 0})
    events.Reload()
    expected = recorded(kept)
    assert set(events.Tags()["histograms"]) == {f"run-{key}" for key, _step in expected}
    found = {(key[4:], event.step): event.histogram_value for key in events.Tags()["histograms"] for event in events.Histograms(key)}
    assert found.keys() == expected.keys()
    assert {key for key, _step in found} >= {"validation/activation/model.2/hist", "update/model.0.weight/hist"}
    for place, one in expected.items():
        counts, edges = one.occupied()
        assert found[place].bucket == counts.tolist()
        assert [found[place].min, *found[place].bucket_limit] == edges.tolist()
        assert (found[place].max, found[place].num) == (edges[-1], counts.sum())


def test_wandb_has_them_in_its_own_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real offline run: counts and bins are the record's, in the row of the step's numbers."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    _callback, kept = train(tmp_path, [WandbLogger(project="tiny", save_dir=tmp_path, offline=True)])
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in history(tmp_path):
        for key, value in row.items():
            name, _, part = key.rpartition("/")  # the file has the parts of a histogram one by one
            if name.endswith("/hist"):
                assert any(other.endswith("/rms") for other in row), "numbers and histograms of a step are one row"
                found.setdefault((name, row["trainer/global_step"]), {})[part] = value
    expected = recorded(kept)
    assert found.keys() == expected.keys()
    for place, one in expected.items():
        counts, edges = one.occupied()
        assert found[place] == {"_type": "histogram", "values": counts.tolist(), "bins": edges.tolist()}


def test_a_logger_without_histograms_gets_the_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One message reports that they are left out; another logger has them."""
    with caplog.at_level(logging.INFO, logger=NAME):
        train(tmp_path, [CSVLogger(tmp_path, name="", version="csv"), TensorBoardLogger(tmp_path, name="", version="tb")])
    messages = [record.getMessage() for record in caplog.records if "istogram" in record.getMessage()]
    assert messages == ["Histograms are left out of CSVLogger: TensorBoard, W&B and a store take them."]
    header = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()[0]
    assert "activation/model.2/rms" in header
    assert "hist" not in header
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Tags()["histograms"]


def test_roll_ups_have_the_histogram_of_all_sites(tmp_path: Path) -> None:
    """Beyond max_logged_keys, which includes them, a kind's histograms are summed; the store has each."""
    callback, kept = train(tmp_path, [TensorBoardLogger(tmp_path, name="", version="tb")], max_logged_keys=25, stages=["train"])
    assert len(kept.records[0].histograms) == 20  # of 22 that are planned: _root_ is not called
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"histograms": 0})
    events.Reload()
    kinds = ["activation", "activation_gradient", "parameter", "gradient", "update"]
    assert set(events.Tags()["histograms"]) == {f"{kind}/_all_/hist" for kind in kinds}
    (first, *_others) = events.Histograms("parameter/_all_/hist")
    of_all = [one for key, one in kept.records[0].histograms.items() if key.startswith("parameter/")]
    assert sum(first.histogram_value.bucket) == sum(one.row.sum() for one in of_all) == 8 * 4 + 8 + 3 * 8 + 3
    assert len(load_store(callback.store_path).histogram_keys()) == 20


class Sick(Tiny):
    """Some weights of the last layer are not finite."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.model[2].weight[0, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), float("inf")])


@pytest.mark.parametrize("loggers", [["tb"], ["wandb"], []])
def test_what_is_not_finite_is_counted_apart(
    loggers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Loggers get the finite elements, the store all; an output without any finite element is no error for either."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    made: list[Logger] = [TensorBoardLogger(tmp_path, name="", version="tb")] if loggers == ["tb"] else []
    made += [WandbLogger(project="tiny", save_dir=tmp_path, offline=True)] if loggers == ["wandb"] else []
    callback = ModuleMonitorCallback(1, rules=RULES, health=Health(nonfinite="ignore"))
    with caplog.at_level(logging.WARNING, logger=NAME):
        fit(tmp_path, [callback], Sick, logger=made or False, max_steps=2)
    assert not caplog.records
    store = load_store(callback.store_path)
    steps, counts = store.nonfinite("parameter/model.2.weight/hist")
    assert steps.tolist() == [0, 1]
    assert counts[0].tolist() == [1, 2, 1]
    assert store.histogram("parameter/model.2.weight/hist")[1][0].sum() == 3 * 8 - 4
    assert store.nonfinite("gradient/model.0.weight/hist")[1][1].tolist() == [0, 0, 32]
    assert store.histogram("gradient/model.0.weight/hist")[1][1].sum() == 0
    if loggers == ["wandb"]:
        assert any("parameter/model.0.weight/hist/values" in row for row in history(tmp_path))


def test_callback_metrics_cannot_be_histograms(tmp_path: Path) -> None:
    """A pattern that matches only histograms is an error; a pattern that also matches numbers logs these."""
    with pytest.raises(
        ConfigError, match=r"'update/\.\*/hist' matches 'update/model.0.weight/hist', a histogram; expected keys of numbers"
    ):
        train(tmp_path, callback_metrics=["update/.*/hist"])
    callback = ModuleMonitorCallback(1, rules=RULES, callback_metrics=["activation/model.0/.*"])
    used = fit(tmp_path, [callback])
    assert "activation/model.0/rms" in used.callback_metrics
    assert not [key for key in used.callback_metrics if "hist" in key]


def test_a_dry_run_counts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys and bytes before they are paid: 22 histograms of 264 counts of 8 bytes, 11 numbers, and 6 of the context."""
    callback = ModuleMonitorCallback(1, rules=RULES, dry_run=True)
    fit(tmp_path, [callback], max_steps=2)
    printed = capsys.readouterr().out
    assert "activation: 5 sites x 2 (hist, rms)" in printed
    assert "  33 keys and 12 context keys; a table of" in printed
    assert f"2 monitored steps in max_steps=2: at most {2 * (23 + 22 * 264) * 8 / 1024:.3g} KiB of numbers in the store" in printed


def test_a_dry_run_counts_the_fine_bins_of_quantiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of two weights has 35 KB of counts in the transfer; a quantile is one number in the store."""
    rules = [Rule(kinds="parameter", statistics="p99", sites=".*weight")]
    fit(tmp_path, [ModuleMonitorCallback(1, rules=rules, dry_run=True)], max_steps=2)
    printed = capsys.readouterr().out
    size = re.search(r"  3 keys and 12 context keys; a table of ([0-9.]+) KiB to copy", printed)
    assert size is not None
    assert float(size[1]) * 1024 / 2 == pytest.approx(35_700, rel=0.01)
    assert f"2 monitored steps in max_steps=2: at most {2 * 15 * 8} B of numbers in the store" in printed


def test_hist_is_a_name_like_any_other() -> None:
    """The error of a misspelled name has the nearest; a function cannot have its name in the same rule."""
    callback = ModuleMonitorCallback(rules=[Rule(kinds="activation", statistics="histt")])
    with pytest.raises(ConfigError, match=r"'histt' is not a statistic; expected mean, .* in STATISTICS\); nearest: 'hist'"):
        callback.setup(None, None, "fit")  # type: ignore[arg-type]  # refused before it looks at them
    callback = ModuleMonitorCallback(rules=[Rule(kinds="activation", statistics="hist", functions={"hist": torch.mean})])
    with pytest.raises(ConfigError, match="'hist' is also in its statistics"):
        callback.setup(None, None, "fit")  # type: ignore[arg-type]  # as above
