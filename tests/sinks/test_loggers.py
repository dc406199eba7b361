"""Records in the real Lightning loggers, offline: written by the callback, and read back from the files of each tool."""

from __future__ import annotations

import csv
import json
import logging
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.lightning_package import NAME, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from helpers.offline_wandb import history
from helpers.tiny import KeepRecords, Tiny, fit, is_logged, loader, trainer
from torch import nn

from lightning_module_monitor import Alert, GradientFlow, ModuleMonitorCallback, Rule
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.loggers import LoggerSink
from lightning_module_monitor.sinks.roll_ups import LoggedValues, summed

Series = dict[str, dict[int, float]]

RULES = [
    Rule(kinds=["activation", "activation_gradient"], statistics=["rms", "mean", "zero_fraction"]),
    Rule(kinds=["parameter", "gradient", "gradient_before_clip", "update"], statistics="norm"),
]
LIGHTNINGS_OWN = {"epoch", "loss", "own_weight_norm", "validation_loss"}


def rows_of(root: Path) -> list[dict[str, str]]:
    """The rows of a CSVLogger without empty cells."""
    with (root / "csv" / "metrics.csv").open() as file:
        return [{key: text for key, text in row.items() if text} for row in csv.DictReader(file)]


def read_csv(root: Path) -> Series:
    """The values of a CSVLogger, by key and step."""
    series: Series = {}
    for row in rows_of(root):
        step = int(row.pop("step"))
        for key, text in row.items():
            series.setdefault(key, {})[step] = float(text)
    return series


def read_tensorboard(root: Path) -> Series:
    """The scalars of a TensorBoardLogger, by TensorBoard's reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(root / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {key: {event.step: event.value for event in events.Scalars(key)} for key in events.Tags()["scalars"]}


def read_wandb(root: Path) -> Series:
    """The numbers in the history rows of an offline wandb run."""
    series: Series = {}
    for row in history(root):
        for key, value in row.items():
            if not key.startswith("_") and key != "trainer/global_step":
                series.setdefault(key, {})[row["trainer/global_step"]] = float(value)
    return series


def read_mlflow(root: Path) -> Series:
    """The metrics of the run in a local MLflow file store, by MLflow's client."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"file:{root / 'mlflow'}")
    [experiment] = [one for one in client.search_experiments() if one.name == "tiny"]
    [run] = client.search_runs([experiment.experiment_id])
    return {key: {one.step: one.value for one in client.get_metric_history(run.info.run_id, key)} for key in run.data.metrics}


MAKE: dict[str, Callable[[Path], Logger]] = {
    "csv": lambda root: CSVLogger(root, name="", version="csv"),
    "tensorboard": lambda root: TensorBoardLogger(root, name="", version="tensorboard"),
    "wandb": lambda root: WandbLogger(project="tiny", save_dir=root, offline=True),
    "mlflow": lambda root: MLFlowLogger(experiment_name="tiny", tracking_uri=f"file:{root / 'mlflow'}"),
}
READ = {"csv": read_csv, "tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Loggers send nothing, and a wandb run ends with its test."""
    import wandb

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.17 has to be asked
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    wandb.finish()


def assert_holds(name: str, found: Series, expected: Series) -> None:
    """The logger called ``name`` has exactly these keys, steps and values."""
    found = {key: by_step for key, by_step in found.items() if key not in LIGHTNINGS_OWN}
    assert found.keys() == expected.keys(), name
    for key, by_step in expected.items():
        wide = {step: float(np.float32(value)) if name == "tensorboard" else value for step, value in by_step.items()}
        assert found[key] == pytest.approx(wide, rel=0, abs=0, nan_ok=True), (name, key)


def train(root: Path, loggers: list[Logger], **options: Any) -> KeepRecords:
    """A short run with accumulation, clipping and a validation loop; returns what was recorded."""
    options = {"every_n_steps": 1, "rules": RULES, "stages": ["train", "validate"], "store": False, **options}
    callback = ModuleMonitorCallback(**options)
    kept = KeepRecords(callback)
    fit(root, [callback, kept], logger=loggers, accumulate_grad_batches=2, gradient_clip_val=0.01)
    return kept


@pytest.mark.parametrize("name", MAKE)
def test_a_real_logger_holds_every_record(name: str, tmp_path: Path) -> None:
    """Every key arrives unchanged in each of the four loggers, with the record's values at the record's steps."""
    expected = train(tmp_path, [MAKE[name](tmp_path)], gradient_flow=GradientFlow(blocks="model")).logged()
    assert set(expected["gradient/model.0.weight/norm"]) == {0, 1, 2}
    assert set(expected["gradient_flow/model.0-model.1/gain"]) == {0, 1, 2}
    assert set(expected["validation/activation/model.2/rms"]) == {2}  # the validation loop ends within Lightning's step 2
    assert_holds(name, READ[name](tmp_path), expected)


def test_real_loggers_side_by_side_hold_the_same(tmp_path: Path) -> None:
    """With all four loggers in a Trainer each has every record."""
    expected = train(tmp_path, [make(tmp_path) for make in MAKE.values()]).logged()
    for name, read in READ.items():
        assert_holds(name, read(tmp_path), expected)


def tags_by_event(root: Path) -> list[tuple[int, list[str]]]:
    """Step and tags of every event with numbers of the callback in the files of a TensorBoardLogger, in their order."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    # A name ends with the number of the writer in this process.
    paths = sorted((root / "tensorboard").glob("events*"), key=lambda path: int(path.name.rpartition(".")[2]))
    events = (event for path in paths for event in LegacyEventFileLoader(str(path)).Load())
    tags = [(event.step, [value.tag for value in event.summary.value if "/" in value.tag]) for event in events]
    return [(step, one) for step, one in tags if one]


def test_tensorboard_gets_one_event_for_each_record(tmp_path: Path) -> None:
    """The event has every number of the record: an event for each number would take most of the time of a monitored step."""
    logger = TensorBoardLogger(tmp_path, name="", version="tensorboard", prefix="run")
    kept = train(tmp_path, [logger], stages=["train"])
    keys = [key for key in kept.records[0].values if is_logged(key) and key != "monitor/errors"]
    assert tags_by_event(tmp_path) == [(record.step, [f"run-{key}" for key in keys]) for record in kept.records]
    assert len(kept.records) == 3


def test_tensorboard_holds_the_records_of_every_loop_of_a_trainer(tmp_path: Path) -> None:
    """Lightning closes the event file when ``fit`` ends; the record of a validation loop after that opens the next file."""
    callback = ModuleMonitorCallback(1, rules=RULES, stages=["train", "validate"], store=False)
    kept = KeepRecords(callback)
    run = fit(tmp_path, [callback, kept], logger=MAKE["tensorboard"](tmp_path))
    for _ in range(2):
        run.validate(run.lightning_module, loader(2), verbose=False)
    assert [record.step for record in kept.records] == [0, 1, 2, 3, 4, 5, 5, 6, 6]
    found = [(step, tag) for step, tags in tags_by_event(tmp_path) for tag in tags]
    logged = [(record.step, key) for record in kept.records for key in record.values if is_logged(key)]
    assert found == [(step, key) for step, key in logged if not key.endswith("monitor/errors")]


class Renaming(TensorBoardLogger):
    """A user's logger with other names of arguments."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({key.replace("model.", "net."): value for key, value in metrics.items()}, step)


def test_a_tensorboard_logger_of_the_users_keeps_its_own_log_metrics(tmp_path: Path) -> None:
    """A subclass that overrides ``log_metrics`` gets the numbers through it."""
    expected = train(tmp_path, [Renaming(tmp_path, name="", version="tensorboard")]).logged()
    assert_holds("tensorboard", read_tensorboard(tmp_path), {key.replace("model.", "net."): one for key, one in expected.items()})


@pytest.mark.parametrize("name", MAKE)
def test_values_stand_on_lightnings_own_x_axis(name: str, tmp_path: Path) -> None:
    """With two micro-batches in a step, values of step k have the step at which Lightning logs the model's values."""
    train(tmp_path, [MAKE[name](tmp_path)])
    found = READ[name](tmp_path)
    assert set(found["loss"]) == {0, 1, 2}
    own = found["own_weight_norm"]
    assert len(set(own.values())) == 3, "the weights must move, or a shifted axis would not show"
    assert found["parameter/model.0.weight/norm"] == pytest.approx(own, rel=1e-6)
    assert set(found["validation/activation/model.2/rms"]) == set(found["validation_loss"])


def test_a_row_of_a_csv_file_has_the_loss_and_the_norms(tmp_path: Path) -> None:
    """With the defaults of the callback and of Lightning, whose own rows are at other steps: 49 and not 50."""
    callback = ModuleMonitorCallback()
    kept = KeepRecords(callback)
    run = trainer(tmp_path, [callback, kept], logger=CSVLogger(tmp_path, name="", version="csv"), log_every_n_steps=50)
    run.fit(Tiny(), loader(60), loader(2))
    rows = [row for row in rows_of(tmp_path) if "gradient/model.0.weight/norm" in row]
    assert [int(row["step"]) for row in rows] == [0, 50]
    for row, record in zip(rows, kept.records, strict=True):
        assert float(row["context/loss"]) == record.values["context/loss"]
        assert float(row["context/lr"]) == 0.1
        assert [key for key in row if key.startswith("context/")] == ["context/loss", "context/lr"]
    assert [row["step"] for row in rows_of(tmp_path) if "loss" in row] == ["49"]


class TwoGroups(Tiny):
    """An optimizer with two groups, and a metric whose name is like that of a learning rate."""

    def training_step(self, batch: list[Any], batch_idx: int) -> Any:
        self.log("lr_ratio", 2.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[2].parameters(), "lr": 0.2}]
        return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("prefix", ["", "run1"])
def test_a_row_has_the_learning_rate_of_each_group(prefix: str, tmp_path: Path) -> None:
    """Rates have the callback's prefix. Metrics that the model logs have no column of the monitor."""
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds="parameter", statistics="norm")], prefix=prefix, store=False)
    fit(tmp_path, [callback], TwoGroups, logger=CSVLogger(tmp_path, name="", version="csv"), max_steps=2)
    start = f"{prefix}/" if prefix else ""
    rows = [row for row in rows_of(tmp_path) if f"{start}parameter/model.0.weight/norm" in row]
    assert [(row[f"{start}context/lr"], row[f"{start}context/lr_1"]) for row in rows] == [("0.1", "0.2")] * 2
    assert {key for key in rows[0] if "context/" in key} == {f"{start}context/{name}" for name in ("loss", "lr", "lr_1")}


def test_a_sparse_schedule_logs_only_its_steps(tmp_path: Path) -> None:
    """Steps outside of the schedule have no row of the monitor."""
    train(tmp_path, [CSVLogger(tmp_path, name="", version="csv")], every_n_steps=2, stages=["train"])
    found = read_csv(tmp_path)
    assert set(found["parameter/model.0.weight/norm"]) == {0, 2}
    assert set(found["loss"]) == {0, 1, 2}


class Failing(CSVLogger):
    """A logger whose service is down, except for Lightning's values."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if any(key.startswith("parameter/") for key in metrics):
            raise ConnectionError("service unavailable")
        super().log_metrics(metrics, step)


@pytest.mark.parametrize("place", [0, 1])
def test_a_failing_logger_costs_one_warning_and_no_value_elsewhere(place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error of a logger is reported once; training continues, and the other logger gets all values, in either order."""
    loggers: list[Logger] = [CSVLogger(tmp_path, name="", version="csv")]
    loggers.insert(place, Failing(tmp_path, name="", version="failing"))
    with caplog.at_level(logging.WARNING, logger=NAME):
        kept = train(tmp_path, loggers)
    assert_holds("csv", read_csv(tmp_path), kept.logged())
    assert len(kept.records) == 4
    messages = [record.getMessage() for record in caplog.records if "Failing" in record.getMessage()]
    assert messages == ["Failing did not take the monitor's values (ConnectionError: service unavailable). Logged once."]


def test_loggers_without_histograms_are_named_also_without_a_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One message names all of them, and does not say that there is a store."""
    rules = [Rule(kinds="parameter", statistics="hist")]
    with caplog.at_level(logging.INFO, logger=NAME):
        train(tmp_path, [MAKE[name](tmp_path) for name in ("csv", "mlflow")], rules=rules, stages=["train"])
    messages = [message for message in caplog.messages if message.startswith("Histograms")]
    assert messages == ["Histograms are left out of CSVLogger, MLFlowLogger: TensorBoard, W&B and a store take them."]


# Roll-ups


def with_roll_ups(root: Path, **options: Any) -> tuple[KeepRecords, Series]:
    """A run with more keys than loggers get, and the rows of the CSVLogger."""
    kept = train(root, [CSVLogger(root, name="", version="csv")], max_logged_keys=5, **options)
    return kept, {key: by_step for key, by_step in read_csv(root).items() if key not in LIGHTNINGS_OWN}


def test_roll_ups_are_minimum_median_and_maximum_over_the_sites(tmp_path: Path) -> None:
    """Beyond max_logged_keys a logger gets three values for each kind and statistic; the record keeps every key."""
    kept, found = with_roll_ups(tmp_path)
    assert {key for key in found if key.startswith("gradient/")} == {f"gradient/{site}/norm" for site in ("_min_", "_median_", "_max_")}
    roll_ups: dict[str, Callable[[list[float]], float]] = {"_min_": min, "_median_": statistics.median, "_max_": max}
    groups = [
        *[("", kind, name) for kind in ("activation", "activation_gradient") for name in ("rms", "mean", "zero_fraction")],
        *[("", kind, "norm") for kind in ("parameter", "gradient", "gradient_before_clip", "update")],
        *[("validation/", "activation", name) for name in ("rms", "mean", "zero_fraction")],
    ]
    expected: Series = {}
    for record in kept.records:
        for stage, kind, name in groups:
            head, tail = f"{stage}{kind}/", f"/{name}"
            members = [value for key, value in record.values.items() if key.startswith(head) and key.endswith(tail)]
            for site, roll_up in roll_ups.items() if members else ():
                expected.setdefault(f"{head}{site}{tail}", {})[record.step] = roll_up(members)
    assert found == expected | {key: by_step for key, by_step in kept.logged().items() if key.startswith("context/")}
    assert sum(key.startswith("gradient/") for key in kept.records[0].values) == 4


def test_as_many_keys_as_allowed_are_not_rolled_up(tmp_path: Path) -> None:
    """max_logged_keys is the largest number of keys that are logged individually."""
    rules = [Rule(kinds="parameter", statistics="norm")]
    kept = train(tmp_path, [CSVLogger(tmp_path, name="", version="csv")], rules=rules, stages=["train"], max_logged_keys=5)
    counted = [key for key in kept.logged() if not key.startswith("context/")]
    assert len(counted) == 4
    assert_holds("csv", read_csv(tmp_path), kept.logged())


def test_roll_ups_keep_what_is_asked_for_by_name(tmp_path: Path) -> None:
    """A key of callback_metrics is logged beside the roll-ups."""
    kept, found = with_roll_ups(tmp_path, callback_metrics=["gradient/model.0.weight/norm"])
    assert found["gradient/model.0.weight/norm"] == kept.logged()["gradient/model.0.weight/norm"]
    assert "gradient/model.2.weight/norm" not in found


def in_one_norm(values: Mapping[str, float], kind: str, block: str) -> float:
    """The norm of all parameters of a block, from their norms."""
    return math.hypot(*(value for key, value in values.items() if re.fullmatch(rf"{kind}/{block}\.[^/]+/norm", key)))


class Deep(Tiny):
    """Three blocks of two layers each between a first and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)]
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*blocks), nn.Linear(8, 3))


def test_values_by_block_stay_beside_roll_ups(tmp_path: Path) -> None:
    """Norms of all parameters of a block, and activations that a rule records at the block itself."""
    rules = [
        Rule(kinds="activation", statistics="rms", sites=".*"),
        Rule(kinds=["parameter", "gradient"], statistics="norm", every_n_steps=2),
    ]
    callback = ModuleMonitorCallback(1, rules=rules, max_logged_keys=20)
    kept = KeepRecords(callback)
    fit(tmp_path, [callback, kept], Deep, logger=MAKE["tensorboard"](tmp_path), max_steps=3)
    found = {key: by_step for key, by_step in read_tensorboard(tmp_path).items() if key not in LIGHTNINGS_OWN}
    blocks = [f"model.1.{number}" for number in range(3)]
    roll_ups = ("_min_", "_median_", "_max_")
    sites_of = {"activation": "rms", "parameter": "norm", "gradient": "norm"}
    expected = {f"{kind}/{site}/{name}" for kind, name in sites_of.items() for site in (*roll_ups, *blocks)}
    assert found.keys() == expected | {"context/loss", "context/lr"}
    for block in blocks:
        assert found[f"activation/{block}/rms"].keys() == {0, 1, 2}
        for kind in ("parameter", "gradient"):
            norms = {record.step: in_one_norm(record.values, kind, block) for record in kept.records if record.step % 2 == 0}
            assert found[f"{kind}/{block}/norm"] == pytest.approx(norms, rel=1e-6)
    assert found["activation/_max_/rms"][1] == pytest.approx(
        max(value for key, value in kept.records[1].values.items() if "activation/" in key)
    )
    norms = [value for key, value in kept.records[0].values.items() if re.fullmatch(r"gradient/.*(weight|bias)/norm", key)]
    assert found["gradient/_max_/norm"][0] == pytest.approx(max(norms), rel=1e-6), "a total is no site"


@pytest.mark.parametrize("max_logged_keys", [2, 500])
def test_values_by_block_are_recorded_only_beside_roll_ups_and_if_they_are_few(max_logged_keys: int, tmp_path: Path) -> None:
    """Neither where loggers get every key, nor where the blocks alone have more keys than loggers get."""
    rules = [Rule(kinds=["activation", "parameter", "gradient"], statistics="norm")]
    callback = ModuleMonitorCallback(1, rules=rules, max_logged_keys=max_logged_keys)
    fit(tmp_path, [callback], Deep, logger=CSVLogger(tmp_path, name="", version="csv"), max_steps=1)
    assert callback.last_record is not None
    assert not [key for key in callback.last_record.values if re.fullmatch(r"(parameter|gradient)/model\.1\.\d/norm", key)]
    assert ("activation/model.1.0/norm" in read_csv(tmp_path)) is (max_logged_keys == 500)


def test_roll_ups_keep_a_summary_as_it_is(tmp_path: Path) -> None:
    """A summary is logged as it is; its transitions are rolled up."""
    kept, found = with_roll_ups(tmp_path, gradient_flow=GradientFlow(blocks="model"))
    series = kept.logged()
    for name in ("mean_gain", "num_missing"):
        assert found[f"gradient_flow/_summary_/{name}"] == series[f"gradient_flow/_summary_/{name}"]
        assert f"gradient_flow/_min_/{name}" not in found
    gains = [series[f"gradient_flow/model.{i}-model.{i + 1}/gain"] for i in (0, 1)]
    assert found["gradient_flow/_max_/gain"] == {step: max(gain[step] for gain in gains) for step in (0, 1, 2)}
    assert "gradient_flow/model.0-model.1/gain" not in found


class Sick(Tiny):
    """A weight of the last layer is NaN, and so are its outputs."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.model[2].weight, float("nan"))


def test_roll_ups_do_not_hide_a_nan(tmp_path: Path) -> None:
    """A site with a NaN makes the roll-ups of its kind and statistic NaN, and no others."""
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds=["activation", "parameter"], statistics="rms")], store=False, max_logged_keys=1)
    fit(tmp_path, [callback], Sick, logger=CSVLogger(tmp_path, name="", version="csv"), max_steps=1)
    assert callback.last_record is not None
    assert math.isfinite(callback.last_record.values["activation/model.0/rms"])
    found = read_csv(tmp_path)
    assert all(math.isnan(found[f"activation/{site}/rms"][0]) for site in ("_min_", "_median_", "_max_"))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_anywhere_makes_a_roll_up_nan(place: int) -> None:
    """For any index of the NaN: Python's min and max depend on the order."""
    members = [1.0, 2.0]
    members.insert(place, float("nan"))
    values = {f"activation/layer{i}/rms": value for i, value in enumerate(members)} | {"activation/layer0/mean": 3.0}
    result = LoggedValues(roll_up=True)(Record.of(0, values))
    assert all(math.isnan(result[f"activation/{site}/rms"]) for site in ("_min_", "_median_", "_max_"))
    assert [result[f"activation/{site}/mean"] for site in ("_min_", "_median_", "_max_")] == [3.0] * 3


class Shrinking(Tiny):
    """Its middle layer runs at even steps only."""

    def training_step(self, batch: list[Any], batch_idx: int) -> Any:
        hidden = self.model[0](batch[0])
        return self.model[2](self.model[1](hidden) if self.global_step % 2 == 0 else hidden).pow(2).mean()


def test_columns_are_the_same_at_every_step(tmp_path: Path) -> None:
    """Roll-ups are decided once for a run: a step with fewer keys has the same columns."""
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds="activation", statistics="rms")], store=False, max_logged_keys=4)
    kept = KeepRecords(callback)
    fit(tmp_path, [callback, kept], Shrinking, logger=CSVLogger(tmp_path, name="", version="csv"), max_steps=4)
    counts = [sum(not key.startswith("context/") for key in record.values) for record in kept.records]
    assert counts == [4, 3, 4, 3]  # with _root_'s and model's outputs absent
    found = read_csv(tmp_path)
    columns = {key for key in found if "/" in key}
    sites = ("_min_", "_median_", "_max_", "model.0", "model.2")  # the layers with parameters are the blocks of this model
    assert columns == {"context/loss", "context/lr", *(f"activation/{site}/rms" for site in sites)}
    assert all(set(found[key]) == {0, 1, 2, 3} for key in columns)


def test_the_roll_up_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first message reports roll-ups, with the option that changes them."""
    with caplog.at_level(logging.INFO, logger=NAME):
        with_roll_ups(tmp_path)
    messages = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Watching")]
    assert len(messages) == 1
    assert messages[0].endswith("Loggers get roll-ups, as the keys are more than max_logged_keys=5.")


def test_no_roll_up_is_announced_without_a_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a logger the first message does not mention roll-ups, also with more keys than max_logged_keys."""
    with caplog.at_level(logging.INFO, logger=NAME):
        fit(tmp_path, [ModuleMonitorCallback(1, store=False, max_logged_keys=1)], logger=False)
    [message] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Watching")]
    assert "roll-ups" not in message


class Still(Tiny):
    """Its learning rate is 0."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def texts_of(root: Path, tag: str) -> list[tuple[int, str]]:
    """Step and text of each event of a text in a TensorBoardLogger's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(root / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(f"{tag}/text_summary")]


@pytest.mark.parametrize("validates_afterwards", [False, True])
def test_tensorboard_has_the_diagnosis_as_text(validates_afterwards: bool, tmp_path: Path) -> None:
    """The list of causes, when they change; at the end of a fit it is what ``diagnose`` returns."""
    callback = ModuleMonitorCallback(1, stages=["train", "validate"], alerts=[Alert(keys="parameter/model.0.weight/norm", above=0.0)])
    run = fit(tmp_path, [callback], Still, logger=MAKE["tensorboard"](tmp_path), max_epochs=2)
    if validates_afterwards:
        run.validate(run.lightning_module, loader(2), verbose=False)
    [diagnosis] = callback.diagnose()
    assert diagnosis.name == "zero_rate"
    assert texts_of(tmp_path, "monitor/diagnoses") == [(11, f"1. {diagnosis}")]


class Interrupted(TensorBoardLogger):
    """A logger that cannot write its first text."""

    failures = 1

    @property
    def experiment(self) -> Any:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("service unavailable")
        return super().experiment


def test_a_diagnosis_that_failed_is_logged_again(tmp_path: Path) -> None:
    """The next call repeats it for the logger that does not have it, and for no other."""
    roots = [tmp_path / name for name in ("healthy", "interrupted")]
    both: list[Logger] = [
        TensorBoardLogger(roots[0], name="", version="tensorboard"),
        Interrupted(roots[1], name="", version="tensorboard"),
    ]
    sink = LoggerSink(both, roll_up=False, always=(), messages=logging.getLogger(NAME), keys=())
    for step in (3, 4, 5):
        sink.write_diagnoses(["first", "second"], step)
    for logger in both:
        logger.save()
    assert [texts_of(root, "monitor/diagnoses") for root in roots] == [[(step, "1. first\n2. second")] for step in (3, 4)]


def test_a_diagnosis_is_a_table_in_wandb(tmp_path: Path) -> None:
    """The table has a row for each cause, with its step."""
    callback = ModuleMonitorCallback(1)
    fit(tmp_path, [callback], Still, logger=MAKE["wandb"](tmp_path))
    [file] = (tmp_path / "wandb").glob("offline-run-*/files/media/table/monitor/diagnoses*.table.json")
    assert json.loads(file.read_text())["data"] == [["5", str(diagnosis)] for diagnosis in callback.diagnose()]


def test_a_finding_is_a_table_in_wandb(tmp_path: Path) -> None:
    """The table has the finding's step, name, site and text; the step's numbers are in a separate row."""
    key = "parameter/model.0.weight/norm"
    callback = ModuleMonitorCallback(1, alerts=[Alert(keys=key, above=0.0, for_steps=2)])
    fit(tmp_path, [callback], logger=MAKE["wandb"](tmp_path))
    [found] = callback.findings
    assert found.step == 1
    [table] = [row for row in history(tmp_path) if any(name.startswith("monitor/findings") for name in row)]
    assert "table-file" in str(table)
    [file] = (tmp_path / "wandb").glob("offline-run-*/files/media/table/monitor/findings*.table.json")
    assert json.loads(file.read_text())["data"] == [["1", found.name, found.site, found.words]]


def test_totals_are_logged_as_they_are_beside_roll_ups(tmp_path: Path) -> None:
    """No roll-up counts them, no number of keys hides them, and their histograms are not added to those of parameters."""
    rules = [
        Rule(kinds="gradient", statistics=["norm", "hist"]),
        Rule(kinds="gradient", statistics=["norm", "hist"], per_module=["_root_", r"model\.\d"]),
    ]
    callback = ModuleMonitorCallback(1, rules=rules, store=False, max_logged_keys=2)
    kept = KeepRecords(callback)
    fit(tmp_path, [callback, kept], logger=CSVLogger(tmp_path, name="", version="csv"), max_steps=2)
    found = read_csv(tmp_path)
    sites = {key.split("/")[1] for key in found if key.startswith("gradient/")}
    assert sites == {"_root_", "model.0", "model.2", "_min_", "_median_", "_max_"}
    values = kept.records[1].values
    singles = [values[f"gradient/model.{layer}.{name}/norm"] for layer in (0, 2) for name in ("weight", "bias")]
    assert found["gradient/_max_/norm"][1] == pytest.approx(max(singles))
    assert found["gradient/_min_/norm"][1] == pytest.approx(min(singles))
    assert found["gradient/_root_/norm"][1] == pytest.approx(values["gradient/_root_/norm"])
    histograms = summed(kept.records[1].histograms, ["model.0", "model.2"])
    assert {*histograms} == {f"gradient/{site}/hist" for site in ("_root_", "model.0", "model.2", "_all_")}
    assert (histograms["gradient/_all_/hist"].counts == histograms["gradient/_root_/hist"].counts).all()
