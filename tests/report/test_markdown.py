"""The verdict as a page of Markdown whose queries run, and as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path

import pytest
from helpers.stores import write_store

from lightning_module_monitor import load_store
from lightning_module_monitor.cli import main
from lightning_module_monitor.record import ModuleInfo, Record
from lightning_module_monitor.report.markdown import MAX_MODULES, as_markdown
from lightning_module_monitor.report.stored_run import read_run
from lightning_module_monitor.sinks.store.writer import Store

NUM = 40
SICK = {
    "activation/fc/rms": [1.0] * NUM,
    "activation/head/rms": [2.0] * NUM,
    "context/loss": [1.0] * 20 + [50.0] * 20,
    "context/lr": [0.1] * NUM,
    "parameter/fc.weight/norm": [1.0] * 20 + [1e4] * 20,
    "gradient/fc.weight/norm": [1.0] * 20 + [math.nan] * 20,
}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int) -> str:
    """The output of ``summary``."""
    assert main(["summary", *arguments]) == status
    out, err = capsys.readouterr()
    assert err == ""
    return out


def section(page: str, name: str) -> str:
    """A part of the page."""
    return page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def rows(table: str) -> list[list[str]]:
    """The cells of a table, without its header."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_has_the_diagnoses_and_what_supports_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same diagnoses, findings and checks as the verdict has; the series behind them with their values; what is in the store."""
    path = write_store(tmp_path / "monitor.h5", SICK)
    page = printed(capsys, str(path), "--markdown", status=1)
    run = read_run(load_store(path))
    verdict = run.verdict()
    assert page == as_markdown(run, verdict).rstrip() + "\n"
    assert "## Model" not in page
    assert page.startswith("# Verdict: sick\n")
    assert verdict.diagnoses
    diagnoses = section(page, "Diagnoses")
    for diagnosis in verdict.diagnoses:
        assert f"**{diagnosis.title}**." in diagnoses
        assert all(sentence in diagnoses for sentence in diagnosis.evidence)
        assert f"Try: {diagnosis.advice}." in diagnoses
    assert {row[1] for row in rows(section(page, "Findings"))} == {finding.name for finding in verdict.findings}
    values = {row[0]: row[1:] for row in rows(section(page, "Series"))}
    assert values["context/loss"][0] == "1"
    assert values["context/loss"][-1] == "50"
    assert values["gradient/fc.weight/norm"][-1] == "nan"
    steps = [int(step) for step in re.findall(r"step (\d+)", section(page, "Series"))]
    assert {0, 10 * NUM - 10, *(diagnosis.first_step for diagnosis in verdict.diagnoses)} <= {*steps}
    assert len(rows(section(page, "Checks"))) == len(verdict.checks)
    assert ["activation", "rms", "2", str(NUM), "1.5", "1.5"] in rows(section(page, "What the store has"))


def test_the_queries_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as they stand, on this store: a series, the sites with the largest values, findings and keys."""
    path = write_store(tmp_path / "it's.h5", SICK)
    queries = re.findall(r"```python\n(.*?)```", printed(capsys, str(path), "--markdown", status=1), re.DOTALL)
    outputs, names = [], dict[str, object]()
    for query in queries:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(query, names)
        outputs.append(output.getvalue())
    assert outputs[0] == f"{dict.fromkeys(range(0, 10 * NUM, 10), 1.0)}\n"
    assert outputs[1] == "head 2.0\nfc 1.0\n"
    assert sorted(outputs[2].split()) == sorted(SICK)


def test_the_page_has_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first modules of a large one, with the number of the others."""
    modules = [ModuleInfo(f"layer{number}", "Linear", 1200, (5, 3), "float32") for number in range(MAX_MODULES + 7)]
    store = Store(tmp_path / "monitor.h5", configuration={}, keys=["gradient/a/norm"])
    store.write(Record.of(0, {"gradient/a/norm": 1.0}, modules=modules))
    store.close()
    main(["summary", str(store.path), "--markdown"])
    table = rows(section(capsys.readouterr().out, f"Model: {MAX_MODULES + 7} modules"))
    assert table[0] == ["layer0", "Linear", "1,200", "(5, 3)", "float32"]
    assert len(table) == MAX_MODULES + 1
    assert table[-1][0] == "and 7 more: `store.modules()`"


def test_a_page_of_many_findings_stays_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few sites of each problem, and the number of the others. No name breaks a table."""
    series = {f"activation/a|b{number}/rms": [math.inf] * 3 for number in range(30)}
    page = printed(capsys, str(write_store(tmp_path / "monitor.h5", series)), "--markdown", status=1)
    findings = section(page, "Findings")
    assert "a\\|b0 and 29 more" in findings
    assert len(page) < 8000


def test_residuals_of_singular_values_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their medians say nothing; the values have a row each."""
    series = {f"gradient/w/{name}_{rank}": [float(rank)] for rank in (1, 2) for name in ("singular_value", "residual")}
    page = printed(capsys, str(write_store(tmp_path / "monitor.h5", series)), "--markdown", status=0)
    content = section(page, "What the store has")
    assert [row[:2] for row in rows(content)] == [["gradient", "singular_value_1"], ["gradient", "singular_value_2"]]
    assert "has a `residual_1`" in content


def test_an_empty_store_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict is unknown, and there is no diagnosis."""
    path = write_store(tmp_path / "monitor.h5", {"monitor/errors": [0.0]})
    page = printed(capsys, str(path), "--markdown", status=0)
    assert page.startswith("# Verdict: unknown\n")
    assert section(page, "Diagnoses").strip() == "No cause was found."
    assert "## Findings" not in page


def test_json_has_the_whole_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a program: the fields of every diagnosis, finding and check."""
    path = write_store(tmp_path / "monitor.h5", SICK)
    content = json.loads(printed(capsys, str(path), "--json", status=1))
    run = read_run(load_store(path))
    verdict = run.verdict()
    assert (content["level"], content["first_step"], content["last_step"], content["num_steps"]) == ("sick", 0, 10 * NUM - 10, NUM)
    assert [diagnosis["name"] for diagnosis in content["diagnoses"]] == [diagnosis.name for diagnosis in verdict.diagnoses]
    assert [(finding["name"], finding["site"], finding["words"]) for finding in content["findings"]] == [
        (finding.name, finding.site, finding.words) for finding in verdict.findings
    ]
    assert [check["num_series"] for check in content["checks"]] == [check.num_series for check in verdict.checks]
    with pytest.raises(SystemExit):
        main(["summary", str(path), "--json", "--markdown"])
