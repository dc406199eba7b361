"""The run at a glance: what a stranger looks for first, beside the verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import pytest
from helpers.stores import copy_of_killed, write_store

from lightning_module_monitor import Record, load_store
from lightning_module_monitor.health.facts import Facts, GroupFacts, ParameterFacts
from lightning_module_monitor.record import UNDEFINED, ModuleInfo
from lightning_module_monitor.report.glance import SeriesRow, SeriesSummary, at_a_glance, length_of
from lightning_module_monitor.report.page import write_report
from lightning_module_monitor.report.stored_run import StoredRun, read_run
from lightning_module_monitor.sinks.store import rows, schema
from lightning_module_monitor.sinks.store.writer import Store

FACTS = Facts(
    {
        "net.a.weight": ParameterFacts("trained", 0, 1000),
        "net.b.weight": ParameterFacts("trained", 0, 234),
        "net.b.bias": ParameterFacts("trained", 1, 6),
        "net.frozen": ParameterFacts("frozen", -1, 50),
    },
    (GroupFacts("AdamW", 0.0, 0.1, "decay"), GroupFacts("AdamW", 0.0, 0.0)),
)
SERIES: dict[str, list[float | None]] = {
    "context/loss": [4.0, 0.5, 1.0],
    "context/val_loss": [None, 2.0, 3.0],
    "context/accuracy": [0.1, 0.2, 0.3],
    "context/lr": [0.01, 0.1, 0.05],
    "context/lr_1": [0.2, 0.2, 0.2],
    "gradient_before_clip/_root_/norm": [2.0, 8.0, 0.5],
    "gradient/_root_/norm": [1.0, 1.0, 0.5],
    "gradient/net.a/norm": [0.7, 0.6, 0.4],
    "gradient/net.a.weight/norm": [0.7, 0.6, 0.4],
    "parameter/_root_/norm": [7.0, 7.5, 7.25],
}


def store_with(path: Path, series: Mapping[str, Sequence[float | None]], facts: Facts | None = FACTS, **options: object) -> StoredRun:
    """A run with these values in steps 0, 50 and 100, and with these facts."""
    store = Store(path, **{"configuration": {}, **options})  # type: ignore[arg-type]
    for row in range(3):
        values = {key: value for key, of_key in series.items() if (value := of_key[row]) is not None}
        store.write(Record.of(50 * row, values), facts=facts)
    store.close()
    return read_run(load_store(path))


def clock(monkeypatch: pytest.MonkeyPatch, *times: str) -> None:
    """Let the next records be written at these times."""
    remaining = [*times]
    monkeypatch.setattr("lightning_module_monitor.sinks.store.file_writer.now", lambda: f"2026-01-01T{remaining.pop(0)}+00:00")


def words(html: str, section: str) -> str:
    """The text of a section."""
    content = html.partition(f'<section id="{section}"')[2].partition(">")[2].partition("</section>")[0]
    return " ".join(re.sub(r"<[^>]*>", " ", content).split())


def test_it_has_losses_rates_with_their_groups_and_norms_of_the_whole_model(tmp_path: Path) -> None:
    """First, last and best value, with the step of the best; a group has its own name, or that of its first parameter."""
    assert at_a_glance([store_with(tmp_path / "m.h5", SERIES)]) == [
        (
            "Loss",
            "best",
            [SeriesRow("loss", [SeriesSummary(4.0, 1.0, 0.5, 50)]), SeriesRow("val_loss", [SeriesSummary(2.0, 3.0, 2.0, 50)])],
        ),
        (
            "Learning rate",
            "largest",
            [
                SeriesRow("lr", [SeriesSummary(0.01, 0.05, 0.1, 50, "decay: 2 tensors, 1,234 elements (AdamW)")]),
                SeriesRow("lr_1", [SeriesSummary(0.2, 0.2, 0.2, 0, "net.b.bias: 1 tensor, 6 elements (AdamW)")]),
            ],
        ),
        (
            "Norm",
            "largest",
            [
                SeriesRow("gradient before clipping", [SeriesSummary(2.0, 0.5, 8.0, 50)]),
                SeriesRow("whole gradient", [SeriesSummary(1.0, 0.5, 1.0, 0)]),
                SeriesRow("all parameters", [SeriesSummary(7.0, 7.25, 7.5, 50)]),
            ],
        ),
    ]


def test_it_is_on_the_page_beside_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readable without a script; names are no markup."""
    clock(monkeypatch, "00:00:00", "00:00:00", "00:30:00", "02:05:00")
    facts = Facts(FACTS.parameters, (GroupFacts("AdamW", 0.0, 0.1, "<b>decay</b>"), FACTS.groups[1]))
    store_with(tmp_path / "m.h5", SERIES, facts)
    html = write_report(tmp_path / "m.h5").read_text()
    assert "<b>decay" not in html
    assert words(html, "glance").startswith(
        "The run at a glance steps 0 to 100 (3 recorded) duration 2 h 5 min"
        " Loss first last best at step loss 4 1 0.5 50 val_loss 2 3 2 50"
        " Learning rate first last largest at step lr 0.01 0.05 0.1 50 &lt;b&gt;decay&lt;/b&gt;: 2 tensors, 1,234 elements (AdamW)"
    )
    assert "accuracy" not in words(html, "glance")
    assert html.index('id="verdict"') < html.index('id="glance"') < html.index('id="heat"')


def test_it_has_the_noise_scale_beside_the_batch_size(tmp_path: Path) -> None:
    """The first value of a scale may be unknown; a run without gradient noise shows no batch size either."""
    noise = {"gradient_noise/_root_/scale": [None, 80.0, 120.0], "gradient_noise/net.a/scale": [1.0] * 3, "context/batch_size": [32.0] * 3}
    group = at_a_glance([store_with(tmp_path / "m.h5", SERIES | noise)])[-1]
    assert group == (
        "Gradient noise",
        "largest",
        [SeriesRow("noise scale", [SeriesSummary(80.0, 120.0, 120.0, 100)]), SeriesRow("batch size", [SeriesSummary(32.0, 32.0, 32.0, 0)])],
    )
    without = SERIES | {"context/batch_size": [32.0] * 3}
    assert at_a_glance([store_with(tmp_path / "n.h5", without)])[-1].title == "Norm"


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    """The last value is shown as it is; the best is the best of the finite ones, if there is one."""
    broken = {"context/loss": [3.0, 2.0, math.nan], "context/lr": [math.inf] * 3}
    loss, rate = (group.rows[0].summaries[0] for group in at_a_glance([store_with(tmp_path / "m.h5", broken)]))
    assert loss is not None
    assert (loss.first, loss.extreme, loss.step) == (3.0, 2.0, 50)
    assert math.isnan(loss.last)
    assert rate is not None
    assert math.isnan(rate.extreme)
    assert "nan" in words(write_report(tmp_path / "m.h5").read_text(), "glance")


def test_the_only_group_has_all_trained_parameters(tmp_path: Path) -> None:
    """Also under a strategy whose optimizer holds copies of them."""
    parameters = {name: facts._replace(group=-1) for name, facts in FACTS.parameters.items()}
    run = store_with(tmp_path / "m.h5", {"context/lr": [0.1] * 3}, Facts(parameters, (GroupFacts("Adam", 0.0, 0.0),)))
    (group,) = at_a_glance([run])
    assert group.rows[0].notes == ["3 tensors, 1,240 elements (Adam)"]


def test_a_store_of_an_earlier_version(tmp_path: Path) -> None:
    """It has no times, no facts and no totals: the page shows the rest."""
    run = store_with(tmp_path / "m.h5", {"context/loss": [3.0, 2.0, 1.0], "context/lr": [0.1] * 3}, None)
    with h5py.File(tmp_path / "m.h5", "r+") as file:
        del file[schema.LAST_RECORD], file[rows.FACTS]
    run = read_run(load_store(tmp_path / "m.h5"))
    assert [(group.title, group.rows[0].notes) for group in at_a_glance([run])] == [("Loss", []), ("Learning rate", [])]
    assert length_of(run) == [("steps", "0 to 100 (3 recorded)")]
    assert "Loss first last best" in words(write_report(tmp_path / "m.h5").read_text(), "glance")
    old = [*GroupFacts("Adam", 0.9, 0.1)][:3]
    assert Facts.of_json({"parameters": {}, "groups": [old], "in_eval": []}).groups == (GroupFacts("Adam", 0.9, 0.1, ""),)


def test_the_duration_is_that_of_all_runs_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time between a run and its resume does not count; a late key, a kill and a repair leave it as it is."""
    path = tmp_path / "m.h5"
    clock(monkeypatch, "00:00:00", "00:00:00", "00:00:10", "00:00:20", "05:00:00", "05:00:00", "05:00:07")
    assert length_of(store_with(path, SERIES))[1] == ("duration", "20 s")
    resumed = Store(path, configuration={}, resumed=path, resume_from=100)
    resumed.write(Record.of(100, {"context/loss": 1.0}))
    resumed.write(Record.of(150, {"context/loss": 1.0, "context/late": 1.0}))
    killed = tmp_path / "killed.h5"
    copy_of_killed(path, killed)
    resumed.close()
    load_store(killed).repair()
    for file in (path, killed):
        assert length_of(read_run(load_store(file)))[1] == ("duration", "27 s in 2 runs")
        times = [(run["started"], run["last_record"]) for run in load_store(file).attributes["configurations"]]  # type: ignore[attr-defined]
        expected = [("00:00:00", "00:00:20"), ("05:00:00", "05:00:07")]
        assert times == [tuple(f"2026-01-01T{time}+00:00" for time in pair) for pair in expected]


def test_a_time_that_is_none_is_left_out(tmp_path: Path) -> None:
    """A file from elsewhere may have anything there."""
    store_with(tmp_path / "m.h5", SERIES)
    with h5py.File(tmp_path / "m.h5", "r+") as file:
        file[schema.LAST_RECORD][()] = b"noon"
    assert [name for name, _value in length_of(read_run(load_store(tmp_path / "m.h5")))] == ["steps"]


def test_many_groups_are_cut(tmp_path: Path) -> None:
    """Rates by layer have a group for each; the table at the end has all of them."""
    rates: dict[str, list[float | None]] = {"context/lr": [0.1] * 3} | {f"context/lr_{number}": [0.1] * 3 for number in range(1, 9)}
    store_with(tmp_path / "m.h5", rates, None)
    html = write_report(tmp_path / "m.h5").read_text()
    assert "lr_5 0.1 0.1 0.1 0 and 3 more, in the table at the end of the page" in words(html, "glance")
    assert "context/lr_8" in words(html, "run")


def test_runs_are_compared_by_losses_rates_and_norms(tmp_path: Path) -> None:
    """A column for each run, first and last value; where a run has no such series the cell is empty."""
    first = store_with(tmp_path / "a.h5", SERIES)
    lower = {"context/loss": [4.0, 3.0, 2.0], "context/lr": [0.001] * 3}
    other = store_with(tmp_path / "b.h5", lower, Facts(FACTS.parameters, (GroupFacts("SGD", 0.9, 0.0, "all"), FACTS.groups[1])))
    loss, rate, norm = at_a_glance([first, other])
    assert loss.rows[0] == SeriesRow("loss", [SeriesSummary(4.0, 1.0, 0.5, 50), SeriesSummary(4.0, 2.0, 2.0, 100)])
    assert [row.summaries[1] is None for row in (*loss.rows, *rate.rows, *norm.rows)] == [False, True, False, True, True, True, True]
    assert rate.rows[0].notes == ["decay: 2 tensors, 1,234 elements (AdamW)", "all: 2 tensors, 1,234 elements (SGD)"]
    html = write_report([tmp_path / "a.h5", tmp_path / "b.h5"], tmp_path / "both.html").read_text()
    text = words(html, "glance")
    assert "Loss a b loss 4 → 1 best 0.5 4 → 2 best 2 val_loss" in text
    assert "lr 0.01 → 0.05 largest 0.1 0.001 → 0.001 largest 0.001" in text


def test_the_list_of_modules_says_that_it_scrolls(tmp_path: Path) -> None:
    """Where it is long; a keyboard can scroll it."""
    for number, says in ((5, False), (60, True)):
        modules = [ModuleInfo(f"layer{index}", "Linear", 1) for index in range(number)]
        html = write_report(write_store(tmp_path / f"{number}.h5", SERIES, modules=modules)).read_text()
        assert ("60 modules. This list scrolls." in words(html, "modules")) is says
        assert 'class="scroll tall" tabindex="0"' in html


def test_a_figure_without_a_defined_value_is_left_out(tmp_path: Path) -> None:
    """The ratio of zero to zero, of a whole model too, has no first or last value."""
    undefined: dict[str, list[float | None]] = {"update/_root_/ratio": [UNDEFINED] * 3, "parameter/_root_/norm": [UNDEFINED] * 3}
    write_store(tmp_path / "m.h5", {"context/loss": [1.0, 2.0, 3.0], **undefined})
    html = write_report(tmp_path / "m.h5").read_text()
    assert "all parameters" not in words(html, "glance")
    assert "update/_root_/ratio" not in words(html, "run")
