"""The page as a file: its content, its stores, and no markup from names."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from helpers.all_trainings import stored_path, stored_verdict
from helpers.processes import kill, start
from helpers.stores import open_store, write_store

from lightning_module_monitor import Record, load_store
from lightning_module_monitor.cli import main
from lightning_module_monitor.histogram import NUM_COUNTS, Histogram
from lightning_module_monitor.record import Finding
from lightning_module_monitor.report.page import distinct_names, write_report
from lightning_module_monitor.sinks.store import schema

SERIES: dict[str, list[float | None]] = {"activation/fc/rms": [1.0, 2.0, 3.0], "activation/out/rms": [4.0, 5.0, 6.0]}
SPECTRUM: dict[str, list[float | None]] = {"parameter/fc.weight/singular_value_1": [1.0], "parameter/fc.weight/residual_1": [0.0]}


def page_of(path: Path, *stores: Path) -> str:
    """The page about these stores."""
    write_report([load_store(store) for store in stores], path)
    return path.read_text()


def payload_of(html: str) -> dict[str, Any]:
    """The input of its script."""
    (text,) = re.findall(r'<script type="application/json" id="payload">(.*?)</script>', html)
    content: dict[str, Any] = json.loads(text)
    return content


def sections_of(html: str) -> list[str]:
    """The sections of the page."""
    return re.findall(r'<section id="(\w+)"', html)


def test_a_store_is_a_path_a_folder_or_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is beside the store, the page of several runs in the current folder, or at the given path; its path is returned."""
    monkeypatch.chdir(tmp_path)
    store = write_store(make(tmp_path / "run") / "m.h5", SERIES)
    for source in (store, str(store.parent), load_store(store)):
        assert write_report(source) == store.with_suffix(".html")
        assert payload_of(store.with_suffix(".html").read_text())["runs"][0]["name"] == "m.h5"
        store.with_suffix(".html").unlink()
    assert write_report([store, str(store)]) == Path("compare.html")
    assert len(payload_of(Path("compare.html").read_text())["runs"]) == 2
    assert write_report(store.parent, "new/folder/mine.html") == Path("new/folder/mine.html")
    with pytest.raises(FileNotFoundError, match="no store at 'nowhere'"):
        write_report("nowhere")


def make(folder: Path) -> Path:
    """A new folder."""
    folder.mkdir()
    return folder


def test_the_page_stands_alone(tmp_path: Path) -> None:
    """No address of a script, a style or a picture; only its own two scripts may run, by their digests; plotly's is there once."""
    html = page_of(tmp_path / "m.html", write_store(tmp_path / "m.h5", SERIES))
    without_scripts = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", without_scripts)
    assert "@import" not in without_scripts
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert len(scripts) == 2
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert "default-src &#39;none&#39;" in policy
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert html.count("plotly.js v") == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.h5", "m.html"]


def test_names_and_options_cannot_become_markup(tmp_path: Path) -> None:
    """Whatever a site, a key or an option is called, it is text."""
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    options = {"prefix": attack, "rules": [{"sites": attack}]}
    series: dict[str, list[float | None]] = {f"activation/{attack.replace('/', '')}/rms": [0.0], "<b>mine</b>": [1.0], **SERIES}
    html = page_of(tmp_path / "m.html", write_store(tmp_path / "<b>m.h5", series, configuration=options))
    assert "<img" not in html
    assert "<script>alert" not in html
    assert html.count("<script") == 3
    assert "<b>m" not in html
    assert attack.replace("/", "") in [site for names in payload_of(html)["lists"] for site in names]


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    """A store of two activations has few sections, one of everything has all; several runs are compared."""
    few = write_store(tmp_path / "few.h5", SERIES)
    assert sections_of(page_of(tmp_path / "few.html", few)) == ["verdict", "glance", "heat", "profiles", "run"]
    counts = Histogram(np.ones(NUM_COUNTS, np.int64))
    more = {
        **SERIES,
        "update/fc.weight/ratio": [1e-3],
        "rcc_effective_update/fc/rms": [1.0],
        "attention_entropy/attn.head_0/mean": [1.0],
        "gradient_noise/_root_/scale": [100.0],
        **SPECTRUM,
    }
    all_of_it = write_store(tmp_path / "all.h5", more, histograms={"gradient/fc.weight/hist": [counts]})
    every = ["verdict", "glance", "heat", "profiles", "updates", "noise", "rcc", "attention", "histograms", "spectra", "run"]
    assert sections_of(page_of(tmp_path / "all.html", all_of_it)) == every
    both = page_of(tmp_path / "both.html", few, all_of_it)
    assert sections_of(both) == ["verdict", "glance", "match", *every[2:]]
    assert [run["name"] for run in payload_of(both)["runs"]] == ["few", "all"]
    of_spectra = write_store(tmp_path / "spectra.h5", SPECTRUM)
    assert sections_of(page_of(tmp_path / "spectra.html", of_spectra)) == ["verdict", "glance", "spectra", "run"]
    of_figures = write_store(tmp_path / "figures.h5", {"monitor/errors": [0.0]})
    assert sections_of(page_of(tmp_path / "figures.html", of_figures)) == ["verdict", "glance", "run"]


def test_the_page_shows_no_site_without_values(tmp_path: Path) -> None:
    """A key that was planned and never recorded is in no table and in no panel."""
    counts = Histogram(np.ones(NUM_COUNTS, np.int64))
    histograms = {"activation/_root_/hist": [], "activation/fc/hist": [counts], "gradient/never/hist": []}
    series: dict[str, list[float | None]] = {"activation/_root_/rms": [], **SERIES}
    payload = payload_of(page_of(tmp_path / "m.html", write_store(tmp_path / "m.h5", series, histograms=histograms)))
    (run,) = payload["runs"]
    sites = {table["statistic"]: payload["lists"][table["sites"]] for table in (*run["tables"], *run["histograms"])}
    assert sites == {"rms": ["fc", "out"], "hist": ["fc"]}
    assert [table["kind"] for table in run["histograms"]] == ["activation"]


def test_singular_values_are_apart_from_other_tables(tmp_path: Path) -> None:
    """With their residuals; a function that has the name of one, of activations, is not among them."""
    series = {**SERIES, **SPECTRUM, "activation/fc/residual_1": [1.0]}
    [run] = payload_of(page_of(tmp_path / "m.html", write_store(tmp_path / "m.h5", series)))["runs"]
    names = {part: [(table["kind"], table["statistic"]) for table in run[part]] for part in ("tables", "spectra")}
    assert names == {
        "tables": [("activation", "rms"), ("activation", "residual_1")],
        "spectra": [("parameter", "singular_value_1"), ("parameter", "residual_1")],
    }


def test_the_verdict_stands_on_the_page(tmp_path: Path) -> None:
    """With the site's name and the evidence, readable without a script; also the checks that were not judged."""
    series = {"gradient/fc.weight/norm": [0.5, *[0.0] * 10], "gradient/head.weight/norm": [0.5] * 11, "monitor/errors": [0.0]}
    store = write_store(tmp_path / "m.h5", series)
    html = page_of(tmp_path / "m.html", store)
    for expected in (
        "<strong>watch</strong>",
        "A part of the model gets gradients of nothing but zeros, from step 10 at the latest, first at fc.weight",
        "fc.weight</button>: gradients are exactly zero, since step 10 at the latest.",
        "nonfinite <span",
        "large_logits: add health: {watch: large_logits}",
        "monitor/errors",
    ):
        assert expected in html


def test_what_follows_from_a_diagnosis_is_folded_under_it(tmp_path: Path) -> None:
    """Each check stands once, with one definition and its sites, the worst first; advice stands once for a diagnosis."""
    grown = [1.0, 1.0, 1.0, *[1e3] * 13]
    series = {
        "context/loss": [1.0, 1.1, 1.0, *[2e5] * 13],
        "gradient/fc.weight/norm": grown,
        "parameter/fc.weight/norm": grown,
        **{
            f"activation/{name}/rms": [1.0, 1.0, 1.0, *[size] * 13]
            for name, size in (("fc", 1.0), ("act", 1e6), ("mid", 2e4), ("head", 1e5))
        },
        "gradient/out.weight/norm": [1.0, 1.0, 1.0, *[0.0] * 13],
    }
    html = page_of(tmp_path / "m.html", write_store(tmp_path / "m.h5", series))
    section = html.partition('<section id="verdict"')[2].partition("</section>")[0]
    assert section.count("<p>Try ") == 1
    shown, _, folded = section.partition('<details class="consequences">')
    names = [re.findall(r"</span> <b>(\w+)</b>", part) for part in (shown, folded.partition("</details>")[0])]
    assert "exploding" in names[0]
    assert "zero_gradients" in names[1]
    assert len({*names[0], *names[1]}) == len([*names[0], *names[1]])
    [grown_sites] = re.findall(r"<b>growing_over_depth</b>.*?</li>", section, re.DOTALL)
    assert re.findall(r'class="link"[^>]*>(\w+)<', grown_sites) == ["act", "head", "mid"]


def test_findings_of_training_stand_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A site with a series is a button, a site without is not; sentences are text."""
    store = open_store(tmp_path / "m.h5", SERIES)
    words = "NaN in block.2, from [bold] <b>inputs</b>."
    shown = Finding(30, "large", "fc", "activation/fc/rms", "It is 0.9.")
    store.write(Record(30), [Finding(30, "nonfinite", "block.2", "", words, "error"), shown])
    store.close()
    html = page_of(tmp_path / "m.html", tmp_path / "m.h5")
    text = " ".join(re.sub(r"<[^>]*>", " ", html.partition('<section id="verdict"')[2].partition("</section>")[0]).split())
    assert "NaN in block.2 at step 30." in text
    assert "NaN in block.2, from [bold] &lt;b&gt;inputs&lt;/b&gt;." in text
    pressed = re.findall(r'data-series="([^"]*)">([^<]*)<', html)
    assert [site for series, site in pressed if "fc" in series] == ["fc"]
    assert all(series for series, _site in pressed)
    assert main(["summary", str(tmp_path / "m.h5")]) == 1
    assert "from [bold] <b>inputs</b>" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["the sum of losses", "SGD at 50", "dead ReLUs", "one class a batch", "vanishing gradients", "AdamW"])
def test_a_site_is_a_link_once_in_a_problem_and_checks_are_those_of_the_headline(name: str, tmp_path: Path) -> None:
    """In the words where they have its name, else below; the numbers of checks in the headline are those of the lists."""
    html = page_of(tmp_path / "page.html", stored_path(name))
    verdict = html.partition('<section id="verdict"')[2].partition("</section>")[0]
    problems = re.findall(r'<li class="problem .*?</li>', verdict, re.DOTALL)
    assert len(problems) == len({finding.name for finding in stored_verdict(name).findings})
    for problem in problems:
        links = re.findall(r'class="link"[^>]*>([^<]*)<', problem)
        assert len(links) == len({*links}), problem
        for link in links:
            words = re.sub(r"<button[^>]*>|</button>", "", problem)
            assert len(re.findall(rf"(?<![\w.]){re.escape(link)}(?!\w|\.\w)", re.sub(r'data-site="[^"]*"', "", words))) >= 1
    counts = {status: int(number) for status, number in re.findall(r"<summary>([^<]*): (\d+) checks?<", verdict)}
    judged = re.search(r"(\d+) of (\d+) checks could judge", verdict)
    if judged is not None:
        assert (int(judged[1]), int(judged[2])) == (counts["not found"], sum(counts.values()) - counts["does not apply"])
    assert (judged is None) == bool(problems)


def test_the_configuration_and_the_cost_stand_on_the_page(tmp_path: Path) -> None:
    """Options of each run that wrote to the file; size, steps and the share of the time that monitoring took."""
    store = write_store(
        tmp_path / "m.h5", {**SERIES, "monitor/overhead_fraction": [math.nan, 0.01, 0.03]}, configuration={"every_n_steps": 17}
    )
    html = page_of(tmp_path / "m.html", store)
    assert "<pre>17</pre>" in html
    assert "2.00% of the time of training" in html
    assert "3, 0 to 20" in html


def test_a_page_of_a_run_that_still_writes(tmp_path: Path) -> None:
    """It shows the records so far."""
    store = open_store(tmp_path / "m.h5", SERIES)
    html = page_of(tmp_path / "m.html", tmp_path / "m.h5")
    store.close()
    assert "3 monitored steps, 0 to 20; 2 sites" in html


def test_a_page_of_a_run_that_was_killed(tmp_path: Path) -> None:
    """The flushed records are on the page."""
    script = """
store = Store(path, configuration={})
for step in (0, 10):
    store.write(Record.of(step, {"activation/fc/rms": 1.0}))
print(step, flush=True)
import time; time.sleep(60)
"""
    writer = start(script, tmp_path / "m.h5")
    assert writer.stdout is not None
    kill(writer, writer.stdout.readline())
    assert "2 monitored steps, 0 to 10; 1 site<" in page_of(tmp_path / "m.html", tmp_path / "m.h5")


def test_a_store_without_a_record_has_a_page(tmp_path: Path) -> None:
    """With the tables of a run, and no row."""
    run = {"started": "2026-01-01", "first_step": 0, "configuration": {}}
    with h5py.File(tmp_path / "m.h5", "w") as file:
        schema.create(file, of_tensors=False)
        schema.write_attributes(file, schema.Attributes("0.1.0", "2026-01-01", [run]))
        for group, column in (("activation", "fc/rms"), ("gradient/histograms", "w/hist")):
            schema.require_table(file, group, [column])
    assert "nothing recorded yet" in page_of(tmp_path / "m.html", tmp_path / "m.h5")


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it, and no file is written."""
    store = write_store(tmp_path / "m.h5", SERIES)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-module-monitor\[report\]'"):
        page_of(tmp_path / "m.html", store)
    assert not (tmp_path / "m.html").exists()


def test_names_of_runs_differ() -> None:
    """By the shortest parts of their paths."""
    assert distinct_names(["a/x.h5"]) == ["x.h5"]
    assert distinct_names(["logs/a/x.h5", "logs/b/x.h5"]) == ["a", "b"]
    assert distinct_names(["logs/sgd/version_0/x.h5", "logs/adam/version_3/x.h5"]) == ["sgd/version_0", "adam/version_3"]
    assert distinct_names(["before.h5", "after.h5"]) == ["before", "after"]
    assert distinct_names(["a/x.h5", "a/b/x.h5"]) == ["x", "b/x"]
    assert distinct_names(["x.h5", "x.h5"]) == ["1: x", "2: x"]
