"""Values for loggers besides numbers: no counts of zero, charts of all layers, heat maps; read from the loggers' files."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.lightning_package import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from helpers.offline_wandb import config, history
from helpers.stores import write_store
from helpers.tiny import KeepRecords, Tiny, fit
from PIL import Image
from torch import Tensor, nn

from lightning_module_monitor import GradientFlow, ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.keys import Columns, Key
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks import heat_maps
from lightning_module_monitor.sinks.charts import Chart, charts_of
from lightning_module_monitor.sinks.roll_ups import LoggedValues

COUNT = "activation/blink/nonfinite_count"


class Blinking(Tiny):
    """A module outside of the loss whose output is infinite in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.blink = nn.Identity()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.blink(torch.tensor([1.0, float("inf") if self.global_step == 2 else 2.0]))
        return super().training_step(batch, batch_idx)


def fails_on_infinity(x: Tensor) -> Tensor:
    """A function of the user's."""
    if not x.isfinite().all():
        raise ValueError("infinite")
    return x.sum()


def events_of(root: Path, **guidance: int) -> Any:
    """The content of a TensorBoardLogger's folder, by TensorBoard's reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(root / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0, **guidance})
    events.Reload()
    return events


def layout_of(root: Path) -> dict[str, dict[str, list[str]]]:
    """The patterns of tags by chart by category, of the only layout."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    [event] = events_of(root).Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    return {one.title: {chart.title: list(chart.multiline.tag) for chart in one.chart} for one in layout.category}


def shown_charts(root: Path) -> dict[str, list[str]]:
    """The charts by category that TensorBoard's tab shows for a folder of runs."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin

    runs = EventMultiplexer().AddRunsFromDirectory(str(root))
    runs.Reload()
    plugin = CustomScalarsPlugin(TBContext(logdir=str(root), data_provider=MultiplexerDataProvider(runs, str(root))))
    layout = json.loads(plugin.layout_impl(RequestContext(), ""))
    return {category["title"]: [chart["title"] for chart in category["chart"]] for category in layout["category"]}


def with_tensorboard(root: Path, **options: Any) -> KeepRecords:
    """A short run with TensorBoard."""
    callback = ModuleMonitorCallback(1, **options)
    kept = KeepRecords(callback)
    fit(root, [callback, kept], Blinking, logger=TensorBoardLogger(root, name="", version="tensorboard", prefix="my+run"))
    return kept


class WithCharts(Tiny):
    """Has charts of its own."""

    def on_train_start(self) -> None:
        self.logger.experiment.add_custom_scalars({"mine": {"my loss": ["Multiline", ["loss"]]}})  # type: ignore[union-attr]


# Layouts of charts


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning")  # by the plugin, when it is imported
def test_charts_of_the_user_stay_beside_those_of_every_callback(tmp_path: Path) -> None:
    """TensorBoard shows the last layout of a run alone, and those of all runs together."""
    callbacks = [ModuleMonitorCallback(1, prefix=prefix, store=str(tmp_path / f"{prefix}.h5")) for prefix in ("one", "two")]
    fit(tmp_path, callbacks, WithCharts, logger=TensorBoardLogger(tmp_path, name="", version="tensorboard"))
    charts = shown_charts(tmp_path)
    assert charts["mine"] == ["my loss"]
    for prefix in ("one", "two"):
        assert f"{prefix}/gradient: norm" in charts[f"{prefix}/gradient"]


def test_charts_are_in_the_run_itself_where_it_has_none(tmp_path: Path) -> None:
    """No further run is listed."""
    with_tensorboard(tmp_path)
    assert [path.parent.name for path in tmp_path.rglob("*tfevents*")] == ["tensorboard"]


# Counts of zero


def test_counts_of_zero_are_not_logged(tmp_path: Path) -> None:
    """The store has every count. A logger gets a count from its first non-zero value on, in a file with changing columns."""
    fit(tmp_path, [ModuleMonitorCallback(1)], Blinking, logger=CSVLogger(tmp_path, name="", version="csv"))
    store = load_store(tmp_path)
    counts = [key for key in store if key.endswith("/nonfinite_count")]
    assert len(counts) == 4
    assert store[COUNT][1].tolist() == [0, 0, 1, 0, 0, 0]
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["parameter/model.0.weight/norm"]]
    assert [key for key in rows[0] if key.endswith("/nonfinite_count")] == [COUNT]
    assert [row[COUNT] for row in rows] == ["", "", "1.0", "0.0", "0.0", "0.0"]
    assert all(row["activation/model.0/rms"] for row in rows)
    assert "monitor/errors" not in rows[0]


def test_errors_are_logged_once_there_are_any(tmp_path: Path) -> None:
    """The number of errors has a column from the first error on, returns to 0, and is always in the store."""
    rule = Rule(kinds="activation", sites="blink", functions={"finite": fails_on_infinity})
    fit(tmp_path, [ModuleMonitorCallback(1, rules=[rule])], Blinking, logger=CSVLogger(tmp_path, name="", version="csv"))
    assert load_store(tmp_path)["monitor/errors"][1].tolist() == [0, 0, 1, 0, 0, 0]
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["context/loss"]]
    assert [row["monitor/errors"] for row in rows] == ["", "", "1.0", "0.0", "0.0", "0.0"]


def test_a_count_that_was_asked_for_by_name_is_logged(tmp_path: Path) -> None:
    """A key of callback_metrics is kept, also beside roll-ups; roll-ups of counts are left out while they are zero."""
    options: dict[str, Any] = {"callback_metrics": "activation/model.0/nonfinite_count", "max_logged_keys": 1}
    fit(tmp_path, [ModuleMonitorCallback(1, **options)], Blinking, logger=CSVLogger(tmp_path, name="", version="csv"), max_steps=2)
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        found = [key for key in next(csv.DictReader(file)) if key.endswith("/nonfinite_count")]
    assert found == ["activation/model.0/nonfinite_count"]


def test_only_counts_of_errors_and_of_elements_that_are_not_finite_are_left_out() -> None:
    """A zero of another statistic is kept; a NaN is not zero."""
    logged, columns = LoggedValues(), Columns.of(["a/x/nonfinite_count", "a/y/nonfinite_count", "a/x/rms", "run/validation/monitor/errors"])
    for number in (float("nan"), 0.0):
        record = Record(0, columns, np.array([0.0, number, 0.0, 0.0]))
        assert list(logged(record)) == ["a/y/nonfinite_count", "a/x/rms"]


# Charts


@pytest.mark.parametrize("max_logged_keys", [500, 1])
def test_tensorboard_has_a_chart_for_each_kind_and_statistic(max_logged_keys: int, tmp_path: Path) -> None:
    """A chart has the tags of all its sites, or of their roll-ups, and no others; one layout for all stages, with the logger's prefix."""
    options: dict[str, Any] = {"stages": ["train", "validate"], "gradient_flow": GradientFlow(blocks="model"), "prefix": "a.b"}
    with_tensorboard(tmp_path, max_logged_keys=max_logged_keys, **options)
    scalars = [tag for tag in events_of(tmp_path).Tags()["scalars"] if tag.startswith("my+run-a.b/")]
    found: dict[tuple[str, str], list[str]] = {}
    for category, charts in layout_of(tmp_path).items():
        for title, patterns in charts.items():
            found[category, title] = sorted(tag for tag in scalars for pattern in patterns if re.match(pattern, tag))
    expected: dict[tuple[str, str], list[str]] = {}
    for tag in scalars:
        key = Key.parse(tag.removeprefix("my+run-"))
        kind = key._replace(site="", statistic="").format()
        if key.kind == "context":
            expected["at a glance", {"loss": "loss", "lr": "learning rate"}[key.statistic]] = [tag]
        elif key.site not in ("", "_summary_") and key.statistic != "nonfinite_count":
            category = "at a glance" if key.site == "_root_" and key.kind in ("gradient", "parameter") else kind
            expected.setdefault((category, f"{kind}: {key.statistic}"), []).append(tag)
    assert found == {chart: sorted(tags) for chart, tags in expected.items()}
    assert {kind for kind, _title in found} == {"at a glance"} | {
        f"a.b/{kind}" for kind in ("activation", "parameter", "gradient", "gradient_flow", "validation/activation")
    }


@pytest.mark.parametrize("max_logged_keys", [500, 1])
def test_singular_values_of_a_site_share_a_chart(max_logged_keys: int, tmp_path: Path) -> None:
    """Or those of a roll-up, where loggers get no site. The largest of all sites have a chart, residuals none."""
    rules = [Rule(kinds=["parameter", "update"], sites=".*weight", singular_values=2), Rule(kinds="gradient", singular_values=1)]
    with_tensorboard(tmp_path, rules=rules, max_logged_keys=max_logged_keys, prefix="a.b")
    scalars = events_of(tmp_path).Tags()["scalars"]
    found = {
        title: sorted(tag.removeprefix("my+run-a.b/") for tag in scalars for pattern in patterns if re.match(pattern, tag))
        for category, charts in layout_of(tmp_path).items()
        for title, patterns in charts.items()
        if category != "at a glance"
    }
    rolled, weights = ["_max_", "_median_", "_min_"], ["model.0.weight", "model.2.weight"]
    sites = rolled if max_logged_keys == 1 else weights
    every = rolled if max_logged_keys == 1 else sorted([*weights, "model.0.bias", "model.2.bias"])
    expected = {"a.b/gradient: singular_value_1": [f"gradient/{site}/singular_value_1" for site in every]}
    for kind in ("parameter", "update"):
        expected[f"a.b/{kind}: singular_value_1"] = [f"{kind}/{site}/singular_value_1" for site in sites]
        for site in sites:
            expected[f"a.b/{kind}: singular values of {site}"] = [f"{kind}/{site}/singular_value_{rank}" for rank in (1, 2)]
    assert found == expected


def test_the_picture_of_a_kind_is_of_its_largest_singular_values() -> None:
    """Where the others, and residuals, are of as many sites; a function of activations may have the name of a residual."""
    names = ("residual_1", "singular_value_2", "residual_2", "singular_value_1")
    keys = [*(f"update/{site}.weight/{name}" for name in names for site in ("a", "b")), "activation/a/residual_1"]
    assert [tuple(chart) for chart in heat_maps.drawn_charts(keys)] == [("update", "singular_value_1"), ("activation", "residual_1")]


# Heat maps


class Clock:
    """A clock that advances by minutes with each reading."""

    def __init__(self, minutes: float) -> None:
        self.seconds, self._minutes = 0.0, minutes

    def monotonic(self) -> float:
        self.seconds += 60 * self._minutes
        return self.seconds


def test_tensorboard_gets_heat_maps_at_the_end(tmp_path: Path) -> None:
    """A picture for each kind, of the statistic with the most sites, at the last step."""
    kept = with_tensorboard(tmp_path)
    events = events_of(tmp_path)
    tags = [f"my+run-heat_maps/{name}" for name in ("activation/rms", "gradient/norm", "parameter/norm")]
    assert sorted(events.Tags()["images"]) == tags
    for tag in tags:
        [event] = events.Images(tag)
        assert event.step == kept.records[-1].step == 5
        picture = Image.open(io.BytesIO(event.encoded_image_string))
        assert picture.size == (event.width, event.height) == (640, 320)
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 50


def test_heat_maps_are_drawn_ever_more_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 10, 20, 40, ... minutes of a run: here each record takes 9 minutes."""
    monkeypatch.setattr(heat_maps, "time", Clock(9.0))
    with_tensorboard(tmp_path, rules=[Rule(kinds="parameter", statistics="norm")])
    assert [event.step for event in events_of(tmp_path).Images("my+run-heat_maps/parameter/norm")] == [1, 2, 4, 5]


def test_a_run_without_matplotlib_has_no_heat_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No pictures and no warning; likewise without a store."""
    with_tensorboard(tmp_path / "no_store", store=False)
    find = importlib.util.find_spec
    absent = SimpleNamespace(find_spec=lambda name: None if name == "matplotlib" else find(name))
    monkeypatch.setattr(heat_maps, "importlib", SimpleNamespace(util=absent, import_module=importlib.import_module))
    with caplog.at_level(logging.WARNING):
        with_tensorboard(tmp_path / "no_matplotlib")
    assert not [message for message in caplog.messages if "Heat maps" in message]
    assert [events_of(tmp_path / name).Tags()["images"] for name in ("no_store", "no_matplotlib")] == [[], []]


class Full(TensorBoardLogger):
    """A logger whose pictures cannot be written."""

    @property
    def experiment(self) -> Any:
        def fail(*_args: object, **_options: object) -> None:
            raise OSError("no space left")

        writer = super().experiment
        writer.add_image = fail
        return writer


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_of_a_heat_map_is_one_warning(
    place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the logger. Training continues, numbers are logged, and another logger gets all pictures, in either order."""
    monkeypatch.setattr(heat_maps, "time", Clock(9.0))
    both: list[Logger] = [TensorBoardLogger(tmp_path / "other", name="", version="tensorboard")]
    both.insert(place, Full(tmp_path, name="", version="tensorboard"))
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, [ModuleMonitorCallback(1, store=str(tmp_path / "monitor.h5"))], logger=both)
    assert [event.step for event in events_of(tmp_path / "other").Images("heat_maps/parameter/norm")] == [1, 2, 4, 5]
    messages = [message for message in caplog.messages if "Heat maps" in message]
    assert messages == ["Heat maps were not drawn for Full (OSError: no space left). Logged once."]
    assert len(events_of(tmp_path).Scalars("parameter/model.0.weight/norm")) == 6


@pytest.fixture
def wandb_logger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Logger]:
    """An offline run, which ends with the test."""
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield WandbLogger(project="tiny", save_dir=tmp_path, offline=True)
    wandb.finish()


def test_wandb_gets_charts_and_heat_maps(tmp_path: Path, wandb_logger: Logger) -> None:
    """The run's configuration defines a chart for each kind: a line for each site, of the store's values; pictures as in TensorBoard."""
    fit(tmp_path, [ModuleMonitorCallback(1, store=str(tmp_path / "monitor.h5"))], Blinking, logger=wandb_logger)
    rows = history(tmp_path)
    definitions = {key: value for key, value in config(tmp_path).items() if key.startswith("_wandb/visualize/")}
    names = ["activation/rms", "gradient/norm", "parameter/norm"]
    assert sorted(definitions) == [f"_wandb/visualize/charts/{name}" for name in names]
    store = load_store(tmp_path / "monitor.h5")
    [folder] = (tmp_path / "wandb").glob("offline-run-*/files")
    for name in names:
        panel = definitions[f"_wandb/visualize/charts/{name}"]["panel_config"]
        assert panel["panelDefId"] == "wandb/lineseries/v0"
        assert panel["stringSettings"] == {"title": name.replace("/", ": "), "xname": "optimizer step"}
        kind, statistic = name.split("/")
        expected = {
            (step, key.split("/")[1]): value
            for key in store
            if key.startswith(f"{kind}/") and key.endswith(f"/{statistic}") and (kind == "activation" or "/_root_/" not in key)
            for step, value in zip(*(one.tolist() for one in store[key]), strict=True)
        }
        [path] = [row[f"charts/{name}_table/path"] for row in rows if f"charts/{name}_table/path" in row]
        table = {(step, site): value for step, site, value in json.loads((folder / path).read_text())["data"]}
        infinite = {key for key in expected if key not in table}
        assert infinite == ({(2, "blink")} if kind == "activation" else set())
        assert table == pytest.approx({key: value for key, value in expected.items() if key not in infinite})
        [[picture]] = [row[f"heat_maps/{name}/filenames"] for row in rows if f"heat_maps/{name}/filenames" in row]
        with Image.open(folder / picture) as image:
            assert image.size == (640, 320)


def test_the_first_charts_are_those_that_are_looked_at_first(tmp_path: Path) -> None:
    """Loss, learning rates and totals, the gradient first. Totals are no lines of other charts, nor rows of a heat map."""
    rules = [
        Rule(kinds=["activation", "gradient"], statistics="rms"),
        Rule(kinds=["parameter", "gradient"], statistics="rms", per_module=["_root_", r"model\.\d"]),
    ]
    with_tensorboard(tmp_path, rules=rules)
    layout = layout_of(tmp_path)
    assert [*layout] == ["at a glance", "activation", "gradient"]
    first = {title: [pattern.replace("\\", "") for pattern in patterns] for title, patterns in layout["at a glance"].items()}
    by_module = [f"^my+run-gradient/model.{layer}/rms$" for layer in (0, 2)]
    assert [*first.items()] == [
        ("loss", ["^my+run-context/loss$"]),
        ("learning rate", ["^my+run-context/lr$"]),
        ("gradient: rms", ["^my+run-gradient/_root_/rms$"]),
        ("parameter: rms", ["^my+run-parameter/_root_/rms$"]),
        ("gradient: rms by module", by_module),
        ("parameter: rms by module", [pattern.replace("gradient", "parameter") for pattern in by_module]),
    ]
    [each] = layout["gradient"]["gradient: rms"]
    tags = [tag for tag in events_of(tmp_path).Tags()["scalars"] if "gradient/" in tag]
    matched = {Key.parse(tag.removeprefix("my+run-")).site for tag in tags if re.match(each, tag)}
    assert matched == {f"model.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")}
    assert re.match(layout["activation"]["activation: rms"][0], "my+run-activation/_root_/rms")
    modules = {"model.0", "model.2"}
    assert charts_of(["gradient/_root_/rms", "gradient/model.0/rms", "gradient/model.0.weight/rms"], modules).total() == 1


@pytest.mark.parametrize(
    ("limit", "fc", "head"), [(10_000, [0, 10, 20, 40, 50], [0, 20, 30, 50]), (10, [0, 20, 40], [0, 20]), (5, [0], [0, 30])]
)
def test_lines_of_a_chart_keep_their_order_within_the_limit_of_wandb(
    limit: int, fc: list[int], head: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each site but totals, of its finite values; every second or third row is taken where all are too many."""
    of_fc, of_head = [0.0, 1.0, 2.0, None, 4.0, 5.0], [0.0, np.nan, 2.0, 3.0, np.inf, 5.0]
    series = {"gradient/fc/norm": of_fc, "gradient/head/norm": of_head, "gradient/_root_/norm": of_fc, "gradient/fc/rms": of_fc}
    monkeypatch.setattr(heat_maps, "_MAX_ROWS", limit)
    lines = heat_maps.lines(load_store(write_store(tmp_path / "m.h5", series)), Chart("gradient", "norm"))
    assert lines == {site: (steps, [step / 10 for step in steps]) for site, steps in (("fc", fc), ("head", head))}
