"""The display of public objects at the prompt and in a notebook."""

from __future__ import annotations

import copy
import pickle
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from helpers.stores import write_store
from helpers.tiny import fit
from matplotlib import pyplot as plt
from torch import nn

from lightning_module_monitor import Alert, Finding, ModuleMonitor, ModuleMonitorCallback, Rule, WidthCheck, load_store
from lightning_module_monitor.display import Findings, Modules
from lightning_module_monitor.health.detectors import BUILT_IN
from lightning_module_monitor.health.diagnoses import diagnose
from lightning_module_monitor.histogram import NUM_COUNTS, Histogram
from lightning_module_monitor.width_check.power_law import Row
from lightning_module_monitor.width_check.settings import Settings

NASTY = "<script>alert('x')</script>"


class Cells(HTMLParser):
    """The texts of a table, and its tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.caption = ""
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows:
            self.rows[-1][-1] += data
        else:
            self.caption += data


def shown(thing: object) -> Cells:
    """The texts of an object's display in a notebook, which is a table."""
    cells = Cells(thing._repr_html_())  # type: ignore[attr-defined]  # IPython's own protocol
    assert cells.tags <= {"table", "caption", "b", "thead", "tbody", "tr", "th", "td"}
    return cells


def test_a_store_is_a_table_of_its_kinds(tmp_path: Path) -> None:
    """With sites, statistics, records and steps of each kind; a missing store is reported."""
    series = {f"activation/{site}/{name}": [1.0] * 3 for site in ("a", "b") for name in ("rms", "mean")} | {"loss": [1.0, 2.0]}
    histograms = {"gradient/w/hist": [Histogram(np.ones(NUM_COUNTS, np.int64))]}
    path = write_store(tmp_path / f"{NASTY.replace('/', '-')}.h5", series, histograms=histograms)
    store = load_store(path)
    cells = shown(store)
    assert cells.rows[0] == ["kind", "sites", "statistics", "records", "steps"]
    assert sorted(cells.rows[1:]) == [
        ["activation", "2", "rms, mean", "3", "0 to 20"],
        ["gradient", "1", "hist", "1", "0 to 0"],
        ["logged", "", "loss", "2", "0 to 10"],
    ]
    assert repr(store) == f"StoreReader({str(path)!r}: 3 tables)"
    path.unlink()
    assert repr(store).startswith(f"StoreReader({str(path)!r}, which cannot be read: There is no store at")
    assert shown(store).rows == [[]]


def test_a_monitor_is_a_table_of_its_rules() -> None:
    """Patterns are shown unchanged, with the module and the last record."""
    monitor = ModuleMonitor(
        rules=[
            Rule(kinds=["activation", "gradient"], sites=["<b>.*", ".*"], statistics=["rms", "hist"]),
            Rule(kinds="update", functions={"f": max}, every_n_steps=10),
        ]
    )
    cells = shown(monitor)
    assert cells.rows == [
        ["kinds", "sites", "statistics", "when"],
        ["activation, gradient", "<b>.*, .*", "rms, hist", "every step"],
        ["update", ".*", "f", "every 10 steps"],
    ]
    assert repr(monitor) == "ModuleMonitor(no module, 2 rules, no record)"
    watching = ModuleMonitor(rules=Rule(kinds="parameter", statistics="rms"))
    watching.set_module(nn.Linear(2, 2))
    watching.begin_step(7)
    watching.monitor_parameters()
    watching.end_step()
    assert repr(watching) == "ModuleMonitor(Linear, 1 rule, last record of step 7)"


def test_a_callback_says_what_it_did(tmp_path: Path) -> None:
    """Rules, the last record, the store and the findings: before the run, after it, and with wrong options."""
    callback = ModuleMonitorCallback(
        2, rules=[Rule(kinds="parameter", statistics="norm")], alerts=[Alert(keys="parameter/.*", above=0.0, name="<large>")]
    )
    assert repr(callback) == "ModuleMonitorCallback(every 2 steps, 1 rule, store: none, 0 findings)"
    fit(tmp_path, [callback])
    assert repr(callback) == f"ModuleMonitorCallback(every 2 steps, 1 rule, store: {tmp_path / 'monitor.h5'}, 1 finding)"
    rows = shown(callback).rows[1:]
    assert callback.last_record is not None
    assert rows[:4] == [
        ["watched", "parameter: norm, every 2 steps"],
        ["health", f"nonfinite: warn, {len(BUILT_IN)} detectors, 1 alert"],
        ["last record", f"of step 4: {len(callback.last_record.values)} values"],
        ["store", str(tmp_path / "monitor.h5")],
    ]
    ((name, words),) = rows[4:]
    assert name == "finding"
    assert words.startswith("step 0, <large>: parameter/model.0.weight/norm: ")
    assert repr(ModuleMonitorCallback("sometimes")).startswith("ModuleMonitorCallback(refused: every_n_steps is 'sometimes'")  # type: ignore[arg-type]


@pytest.mark.parametrize("runs", [False, True])
def test_a_callback_shows_the_rules_that_the_user_gave(runs: bool, tmp_path: Path) -> None:
    """The default is named as such, and what detectors need is one line; so are options that stand for rules, and rules that are added."""
    callback = ModuleMonitorCallback(2, rcc=True, health={"watch": "dead_units", "nonfinite": "always"})
    callback.monitor.add_rules(Rule(kinds="gradient", sites="model.0.*", statistics="rms"))
    if runs:
        fit(tmp_path, [callback])
    assert repr(callback).startswith("ModuleMonitorCallback(every 2 steps, default rules, store: ")
    rows = shown(callback).rows[1:]
    assert [name for name, _words in rows[:-2]] == ["watched by default"] * 3 + ["watched"] * 4 + ["health"]
    assert rows[0][1] == "activation: rms, abs_max, nonfinite_count, every 2 steps"
    assert rows[2][1] == "parameter, gradient together, of _root_: norm, every 2 steps"
    assert rows[6][1] == "gradient of model.0.*: rms, every 2 steps"
    assert rows[7][1] == f"nonfinite: always, {len(BUILT_IN)} detectors (dead_units named), 0 alerts"
    off = ModuleMonitorCallback(rules=[{"kinds": "update", "statistics": "norm"}], health=False)
    assert shown(off).rows[1:3] == [["watched", "update: norm, every 50 steps"], ["health", "nonfinite: ignore, no detectors, 0 alerts"]]
    assert repr(callback.monitor).startswith("ModuleMonitor(no module, 7 rules, ")


def test_one_diagnosis_is_a_table() -> None:
    """Its site, evidence and advice, which the prompt shows in a sentence; not among them what it does not have."""
    causes = diagnose(
        [Finding(5, "exploding", NASTY, f"gradient/{NASTY}/norm", "Large."), Finding(7, "diverging", "", "context/loss", "The loss rises.")]
    )
    first = causes[0]
    cells = shown(first)
    names = [name for name, _text in cells.rows[1:]]
    assert cells.caption == f"Diagnosis: {first.headline}"
    assert names == ["from step", "where", *["evidence"] * len(first.evidence), *["explains"] * bool(first.consequences), "try"]
    assert [text for name, text in cells.rows[1:] if name == "evidence"] == [*first.evidence]
    assert (cells.rows[1][1], cells.rows[2][1], cells.rows[-1][1]) == (str(first.first_step), first.site, first.advice)
    assert repr(first) == f"Diagnosis({first})"
    assert pickle.loads(pickle.dumps(first)) == copy.deepcopy(first) == first


def test_modules_are_a_table(tmp_path: Path) -> None:
    """A row for each module, and a list for everything else."""
    fit(tmp_path, [ModuleMonitorCallback(2)])
    modules = load_store(tmp_path / "monitor.h5").modules()
    cells = shown(modules)
    assert cells.caption == "Modules: 5 modules"
    assert cells.rows[0] == ["name", "type", "num parameters", "output shape", "output dtype"]
    assert cells.rows[3] == ["model.0", "Linear", "40", "(5, 8)", "float32"]
    assert cells.rows[1][3] == "", "the module as a whole is not called"
    assert repr(modules) == repr([*modules])
    assert shown(Modules()).caption == "Modules: 0 modules"


def test_the_figures_of_a_store_are_a_table_of_calls_that_draw(tmp_path: Path) -> None:
    """Each call, as it is shown, draws something; a store that is missing is reported."""
    rules = [
        Rule(kinds=["activation", "gradient"], statistics=["rms", "hist"]),
        Rule(kinds="gradient", per_module="_root_", statistics="norm"),
    ]
    callback = ModuleMonitorCallback(1, rules=rules, stages=["train", "validate"], prefix="run1")
    fit(tmp_path, [callback])
    store = load_store(tmp_path / "monitor.h5")
    cells = shown(store.plot)
    calls = [call for (call,) in cells.rows[1:]]
    assert "heatmap('run1/activation', 'rms')" in calls
    assert "profile('run1/validation/activation', 'rms')" in calls
    assert "series('run1/context/loss')" in calls
    assert sum(call.startswith("histogram") for call in calls) == 1
    assert repr(store.plot) == f"StorePlots({str(store.path)!r}: {len(calls)} figures)"
    for call in calls:
        axes = eval(f"plot.{call}", {"plot": store.plot})  # the calls are ours
        assert axes.lines or axes.images, call
    plt.close("all")
    write_store(tmp_path / "heads.h5", {f"attention_sink/a.head_{i}/mean": [0.1, 0.2] for i in range(2)})
    assert ["attention('attention_sink')"] in shown(load_store(tmp_path / "heads.h5").plot).rows
    store.path.unlink()
    assert "which cannot be read" in repr(store.plot)


def test_findings_are_a_list_that_reads_as_a_table(tmp_path: Path) -> None:
    """A line for each at the prompt, a row for each in a notebook; otherwise a list, also after a copy."""
    finding = Finding(120, "dead_units", NASTY, "activation/x/rms", "97 % of units are zero.")
    assert repr(finding) == "Finding(step 120, warning, dead_units: 97 % of units are zero.)"
    several = Findings([finding] * 40)
    assert repr(Findings([finding] * 2)) == f"[{finding!r},\n {finding!r}]"
    assert repr(Findings()) == "[]"
    rows = shown(several).rows
    assert rows[:2] == [["step", "severity", "name", "site", "words"], ["120", "warning", "dead_units", NASTY, "97 % of units are zero."]]
    assert (len(rows), rows[-1]) == (1 + 30 + 1, ["and 10 more"])
    assert shown(several).caption == "Findings: 40 findings"
    for again in (copy.copy(several), pickle.loads(pickle.dumps(several))):
        assert again == several
        assert again == [finding] * 40
    callback = ModuleMonitorCallback(3, alerts=[Alert(keys="gradient/.*", above=0.0)])
    fit(tmp_path, [callback])
    found = load_store(tmp_path / "monitor.h5").findings()
    assert shown(found).rows == shown(callback.findings).rows
    assert len(found) > 0


@pytest.mark.parametrize("module", ["fc", NASTY])
def test_a_width_check_is_its_table(module: str) -> None:
    """The rows and cells of the printed table."""
    settings = Settings.parse(
        widths=[64, 128], seeds=1, steps=1, parametrization="mup", terms=["effective_update"], tolerance=0.25, trainer=None
    )
    row = Row(module, "hidden", "effective_update", 0.98, 0.91, 1.05, 0.0, "grows", "", np.ones((2, 1)))
    check = WidthCheck([row], settings)
    assert repr(check) == f"WidthCheck(1 row, offending: {module})"
    cells = shown(check)
    assert cells.rows[1] == [module, "hidden", "effective_update", "+0.98", "+0.91 .. +1.05", "+0.00", "grows"]
    assert cells.rows[0] == str(check).splitlines()[2].split()
