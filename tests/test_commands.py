"""The commands for a store: output, files, exit statuses, one-line errors."""

from __future__ import annotations

import csv
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from helpers.stores import copy_of_killed, open_store, write_store

from lightning_module_monitor import Histogram, StoreReader, load_store
from lightning_module_monitor.cli import COMMANDS, main
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.histogram import NUM_COUNTS

SERIES: dict[str, list[float | None]] = {
    "activation/fc/rms": [1.0, 2.0, math.inf],
    "activation/fc/zero_fraction": [0.1, None, 0.2],
    "gradient/fc.weight/norm": [3.0, 4.0, 5.0],
    "monitor/errors": [0.0, 0.0, 0.0],
}
HEALTHY = {
    **{f"activation/fc/{name}": [1.0, 1.1, 1.2] for name in ("rms", "abs_max")},
    **{f"activation/fc/{name}": [0.0, 0.0, 0.0] for name in ("nonfinite_count", "dead_fraction")},
    **{f"gradient/fc.weight/{name}": [1.0, 1.1, 1.2] for name in ("norm", "rms")},
    "parameter/fc.weight/norm": [1.0, 1.1, 1.2],
    "update/fc.weight/ratio": [1e-3, 1e-3, 1e-3],
    "context/loss": [1.0, 0.9, 0.8],
}
OF_STORES = ["report", "compare", "summary", "formats", "keys", "export", "repair"]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A healthy run with one infinite activation."""
    return write_store(tmp_path / "monitor.h5", SERIES)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """The output of a command, after a check of its status."""
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert err == ""
    return out


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The single error line of a command."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    start = f"lightning-module-monitor {arguments[0]}: error: "
    assert line.startswith(start)
    return line.removeprefix(start)


def test_keys(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All keys, or those that a pattern matches; status 1 without a match."""
    assert sorted(printed(capsys, "keys", "monitor.h5").split()) == sorted(SERIES)
    assert printed(capsys, "keys", "monitor.h5", ".*/(rms|norm)").split() == ["activation/fc/rms", "gradient/fc.weight/norm"]
    assert main(["keys", "monitor.h5", "rms"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "PATTERN 'rms' matches none of 4 keys as a whole; '.*rms.*' matches 1 of them.\n")
    assert "PATTERN is '('; expected a regular expression" in error(capsys, "keys", "monitor.h5", "(")


def test_keys_stops_when_the_pipe_is_closed(store: Path) -> None:
    """``keys monitor.h5 | head -1`` is not an error."""
    many = write_store(store.with_name("many.h5"), {f"activation/layer{number}/rms": [1.0] for number in range(5000)})
    program = f"import sys; from lightning_module_monitor.cli import main; sys.exit(main(['keys', {str(many)!r}]))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        assert command.stdout.readline() == "activation/layer0/rms\n"
        command.stdout.close()
        assert command.stderr.read() == ""
    assert command.returncode == 0


def test_summary_of_histograms_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sites and steps of histograms are counted."""
    histograms = {f"parameter/{site}/hist": [Histogram(np.ones(NUM_COUNTS, np.int64))] * 3 for site in ("a", "b")}
    write_store(tmp_path / "monitor.h5", {"monitor/errors": [0.0] * 3}, histograms=histograms)
    assert "monitor.h5: 3 monitored steps, 0 to 20; 2 sites\n" in printed(capsys, "summary", "monitor.h5")


def test_export(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each recorded value, in CSV and in Parquet; the path is printed."""
    pytest.importorskip("pandas")
    rows = sum(value is not None for values in SERIES.values() for value in values)
    assert f"monitor.csv: {rows} values, " in printed(capsys, "export", "monitor.h5")
    with Path("monitor.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == rows
    assert {"step": "20", "stage": "train", "kind": "activation", "site": "fc", "statistic": "rms", "value": "inf"} in table
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    assert "other.parquet: " in printed(capsys, "export", "monitor.h5", "--format", "parquet", "-o", "other.parquet")
    pandas.testing.assert_frame_equal(pandas.read_parquet("other.parquet"), load_store(store).to_frame(), check_dtype=False)


@pytest.mark.parametrize("format_", ["csv", "parquet"])
def test_export_of_several_runs(format_: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows of each run in their order, behind a column with its path; the same store twice is there once."""
    pandas = pytest.importorskip("pandas")
    other = write_store(Path("=other.h5"), {"loss": [1.0, 2.0]})
    line = printed(capsys, "export", "monitor.h5", "=other.h5", "./monitor.h5", "--format", format_)
    assert line.startswith(f"export.{format_}: {11 + 2} values, ")
    frame = pandas.read_csv("export.csv", keep_default_na=False) if format_ == "csv" else pandas.read_parquet("export.parquet")
    assert list(frame) == ["run", "step", "stage", "kind", "site", "statistic", "value"]
    escaped = "'=other.h5" if format_ == "csv" else "=other.h5"
    assert [*dict.fromkeys(frame["run"])] == ["monitor.h5", escaped]
    for run, path in (("monitor.h5", store), (escaped, other)):
        part = frame[frame["run"] == run].drop(columns="run").reset_index(drop=True)
        pandas.testing.assert_frame_equal(part, load_store(path).to_frame(), check_dtype=False)
    assert error(capsys, "export", "monitor.h5", "=other.h5", "-o", "=other.h5") == "'=other.h5' cannot be written: it is the store itself."
    assert error(capsys, "export", "monitor.h5", "absent.h5").startswith("There is no store at 'absent.h5'")
    assert "export-several.csv" in printed(capsys, "export", "monitor.h5", "=other.h5", "-o", "export-several.csv")


def test_summary_prints_the_verdict(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Site and evidence of sick checks, with status 1; healthy checks; checks without data; status 0 if none is sick."""
    out = printed(capsys, "summary", "monitor.h5", status=1)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0].endswith("monitor.h5: 3 monitored steps, 0 to 20; 2 sites")
    assert "step 20: The first value that is not finite is in activation fc, since step 20 at the latest." in lines
    assert "large_logits: add health: {watch: large_logits}" in lines
    assert lines[-1] == "sick: a value that is not finite in fc at step 20"
    write_store(Path("healthy.h5"), HEALTHY)
    assert printed(capsys, "summary", "healthy.h5").splitlines()[-1].startswith("unknown: too few losses ")
    falling = {"gradient/w/norm": [1.0] * 12, "context/loss": [1.0 / (step + 1) for step in range(12)], "context/lr": [0.1, 0.2]}
    write_store(Path("falling.h5"), falling)
    lines = printed(capsys, "summary", "falling.h5").splitlines()
    loss, rate = "   loss: 1 to 0.08333, best 0.08333 at step 110", "   lr: 0.1 to 0.2, largest 0.2 at step 10"
    assert lines[1:5] == ["Loss", loss, "Learning rate", rate]
    assert lines[-1].startswith("healthy: loss 1 to 0.106; 12 of 24 checks could judge, and found nothing in gradients")
    write_store(
        Path("many.h5"), {f"gradient/[bold]{number}.weight/norm": [0.0] * 10 for number in range(40)} | {"gradient/a.bias/norm": [1.0] * 10}
    )
    out = printed(capsys, "summary", "many.h5")
    assert "and 35 more" in out
    assert "[bold]4" in out


def test_report_and_compare_write_a_page(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the store, or at the given path; path and size are printed."""
    assert re.fullmatch(r"monitor\.html: \d\.\d+ MiB\n", printed(capsys, "report", "monitor.h5"))
    assert f"<title>{'/'.join(store.parts[-3:])}</title>" in Path("monitor.html").read_text()
    Path("pages").mkdir()
    printed(capsys, "report", str(store), "-o", "pages/mine.html")
    assert Path("pages/mine.html").exists()
    shutil.copy(store, "other.h5")
    out = printed(capsys, "compare", "monitor.h5", "other.h5").splitlines()
    assert re.fullmatch(r"compare\.html: \d\.\d+ MiB", out[0])
    assert [line.endswith("other.h5: no series of both differs") for line in out[1:]] == [True]
    assert "<title>monitor and other</title>" in Path("compare.html").read_text()
    assert error(capsys, "compare", "monitor.h5") == "one STORE is given; expected two or more. For one run there is the command report."
    assert "there is no folder 'nowhere'" in error(capsys, "report", "monitor.h5", "-o", "nowhere/page.html")
    assert "it is the store itself" in error(capsys, "report", "monitor.h5", "-o", "monitor.h5")
    assert "it is a folder" in error(capsys, "report", "monitor.h5", "-o", "pages")


def test_compare_fails_on_keys_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the medians of the last quarter of the records: status 1 and the keys; 0 where none differs; nothing is written."""
    healthy = {
        "gradient/a/norm": [9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 1.0],
        "gradient/b/norm": [1.0] * 8,
        "gradient/c/norm": [0.0] * 8,
        "gradient/d/norm": [2.0] * 8,
        "gradient/e/rms": [1.0] * 8,
        "gradient/only_before/norm": [1.0],
        "validation/gradient/a/norm": [1.0] * 8,
        "context/loss": [1.0] * 8,
    }
    other = {
        "gradient/a/norm": [1.0] * 6 + [1.9, 2.1],
        "gradient/b/norm": [1.0] * 6 + [2.0, 2.2],
        "gradient/c/norm": [0.0] * 8,
        "gradient/d/norm": [2.0] * 6 + [2.0, math.inf],
        "gradient/e/rms": [7.0] * 8,
        "context/loss": [-1.0] * 8,
    }
    write_store(tmp_path / "before.h5", healthy)
    write_store(tmp_path / "after.h5", other)
    runs = ("compare", "before.h5", "after.h5", "--fail-on")
    # e and the loss are not asked for; a is at 2, c is zero in both
    lines = printed(capsys, *runs, "gradient/.*/norm", "--ratio", "2", status=1).splitlines()
    assert lines[:2] == ["gradient/b/norm: 1 -> 2.1 (x 2.1)", "gradient/d/norm: 2 -> 2 (not finite after)"]
    assert lines[2].endswith("after.h5: 2 of 4 keys differ by more than a factor of 2")
    assert "context/loss: 1 -> -1 (x -1)" in printed(capsys, *runs, "context/loss", "--ratio", "100", status=1)
    assert "0 of 2 keys differ" in printed(capsys, *runs, "gradient/[ac]/norm", "--ratio", "2.1")
    assert "1 of 3 keys differ" in printed(capsys, *runs, "gradient/[ac]/norm", "--fail-on", "gradient/e/rms", status=1)
    assert "0 of 4 keys" in printed(capsys, "compare", "before.h5", "before.h5", "--fail-on", "gradient/[a-d]/norm", "--ratio", "1")
    assert not list(tmp_path.glob("*.html"))
    assert ".html: " in printed(capsys, *runs, "gradient/b/norm", "-o", "page.html", status=1)
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fail-on", "gradient/only.*"), "--fail-on 'gradient/only.*' matches none of the 1 keys of"),
        (("--fail-on", "norm"), "as a whole; '.*norm.*' matches 1 of them"),
        (("--fail-on", "("), "--fail-on is '('; expected a regular expression"),
        (("--fail-on", ".*", "--ratio", "0.5"), "--ratio is 0.5; expected a number >= 1"),
        (("--ratio", "2"), "--ratio is 2, and there is no --fail-on"),
    ],
)
def test_a_wrong_check_of_two_runs_is_a_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With status 2: neither a success nor a failure."""
    write_store(Path("before.h5"), {"gradient/a/norm": [1.0], "gradient/only_before/norm": [1.0]})
    write_store(Path("after.h5"), {"gradient/a/norm": [1.0]})
    assert message in error(capsys, "compare", "before.h5", "after.h5", *arguments)


def test_compare_prints_what_differs_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The medians of the last quarter, the largest factor first, for each run against the first; of two equal series only one."""
    runs = {"one.h5": (1.0, 2.0, 1.0), "two.h5": (1.0, 2.5, 4.0), "three.h5": (1.0, 2.0, 0.0)}
    for name, (same, other, most) in runs.items():
        values = {"same": same, "other": other, "most": most}
        kinds = ("gradient_before_clip", "gradient")
        twins = {f"{kind}/{site}/norm": [9.0, 9.0, 9.0, value] for kind in kinds for site, value in values.items()}
        write_store(tmp_path / name, twins)
    out = printed(capsys, "compare", *(str(tmp_path / name) for name in runs), "-o", str(tmp_path / "all.html")).splitlines()[1:]
    first, second, third = (tmp_path / name for name in runs)
    assert out == [
        f"{first} -> {second}: medians of the last quarter that differ most",
        "  gradient/most/norm: 1 -> 4 (x 4)",
        "  gradient/other/norm: 2 -> 2.5 (x 1.25)",
        f"{first} -> {third}: medians of the last quarter that differ most",
        "  gradient/most/norm: 1 -> 0 (x 0)",
    ]


def test_compare_says_that_no_site_is_in_both_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where totals are, which differ."""
    for name, site in (("a", "fc"), ("b", "head")):
        write_store(tmp_path / f"{name}.h5", {f"gradient/{site}.weight/norm": [1.0], "gradient/_root_/norm": [float(len(site))]})
    out = printed(capsys, "compare", str(tmp_path / "a.h5"), str(tmp_path / "b.h5")).splitlines()
    assert out[-1].endswith("b.h5: no site is in both runs")


def test_compare_prints_the_last_losses_rates_and_norms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of those that both runs have."""
    shared: dict[str, list[float | None]] = {"context/loss": [4.0, 1.0], "context/lr": [0.1, 0.2], "gradient/_root_/norm": [3.0, 2.0]}
    first = write_store(tmp_path / "a.h5", {**shared, "context/val_loss": [5.0, 6.0]})
    other = write_store(tmp_path / "b.h5", {**shared, "context/loss": [4.0, 0.123456]})
    assert main(["compare", str(first), str(other), "-o", str(tmp_path / "c.html")]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = lines.index(f"{first} -> {other}: last values")
    assert lines[heading + 1 : heading + 4] == ["  loss: 1 -> 0.1235", "  lr: 0.2 -> 0.2", "  whole gradient: 2 -> 2"]
    assert lines[heading + 4].startswith(f"{first} -> {other}: ")


@pytest.mark.parametrize("command", [("report",), ("compare", "monitor.h5"), ("export",), ("export", "--format", "parquet")], ids=" ".join)
def test_a_file_that_cannot_be_written_is_a_line(store: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    """The system's reason, without a traceback; here the name is too long."""
    path = "x" * 300
    assert error(capsys, *command, store.name, "-o", path).startswith(f"{path!r} cannot be written: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_a_line(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error occurs while the file is written."""
    assert error(capsys, "export", store.name, "-o", "/dev/full") == "'/dev/full' cannot be written: No space left on device."


def test_repair(store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed store is unchanged; the store of a killed run becomes plain; the store of a live run is an error."""
    assert printed(capsys, "repair", "monitor.h5") == "monitor.h5: was closed; nothing to repair\n"
    live = open_store(Path("live.h5"), SERIES)
    copy_of_killed(Path("live.h5"), Path("killed.h5"))
    assert "being written by a live run" in error(capsys, "repair", "live.h5")
    live.close()
    assert printed(capsys, "repair", "killed.h5") == "killed.h5: repaired\n"
    assert printed(capsys, "repair", "killed.h5") == "killed.h5: was closed; nothing to repair\n"
    with h5py.File("killed.h5") as file:
        assert file["gradient/values"][:, 0].tolist() == [3.0, 4.0, 5.0]

    def refuse(_store: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(StoreReader, "repair", refuse)
    assert "'killed.h5' cannot be written: Permission denied." in error(capsys, "repair", "killed.h5")


@pytest.mark.parametrize("command", OF_STORES)
def test_a_store_that_cannot_be_read_is_a_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing, foreign, newer or damaged file: what is wrong with it, status 2, and nothing is written."""
    with h5py.File("foreign.h5", "w") as file:
        file["x"] = 1
    write_store(Path("newer.h5"), SERIES)
    with h5py.File("newer.h5", "r+") as file:
        file.attrs["format_version"] = 99
    Path("damaged.h5").write_bytes(b"no HDF5")
    Path("folder.h5").mkdir()
    messages = {
        "missing.h5": "There is no store at 'missing.h5'.",
        "folder.h5": "There is no store at 'folder.h5'.",
        "foreign.h5": "is an HDF5 file of another program",
        "newer.h5": "has format version 99, newer than 1. Update lightning-module-monitor to read it.",
        "damaged.h5": "is not a readable HDF5 file",
    }
    before = sorted(Path().iterdir())
    for name, words in messages.items():
        assert words in error(capsys, command, *([name, name] if command == "compare" else [name]))
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("command", [*OF_STORES, "info"])
def test_help_has_examples_and_exit_statuses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help has commands to copy and the meaning of the status."""
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"\n  lightning-module-monitor {command}" in out
    assert "\nexit status:\n  0  " in out


def test_a_missing_extra_is_a_line(store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the package to install, before a file is read or written."""
    for module in ("plotly.offline", "rich", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)
    assert "pip install 'lightning-module-monitor[report]'" in error(capsys, "report", "monitor.h5")
    assert "pip install 'lightning-module-monitor[report]'" in error(capsys, "summary", "monitor.h5")
    assert "pip install 'lightning-module-monitor[parquet]'" in error(capsys, "export", "monitor.h5", "--format", "parquet")
    assert sorted(path.name for path in Path().iterdir()) == ["monitor.h5"]


def test_reading_keys_imports_neither_torch_nor_pandas(store: Path) -> None:
    """A command imports only its own packages."""
    program = (
        "import sys; from lightning_module_monitor.cli import main\n"
        f"main(['keys', {str(store)!r}]); main(['summary', {str(store)!r}])\n"
        "print([name for name in ('torch', 'lightning', 'pandas', 'plotly', 'jinja2', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_command_is_tested() -> None:
    """The list above has every command."""
    assert [command.name for command in COMMANDS] == [*OF_STORES, "info"]  # of which tests/test_installation.py has the tests
    assert issubclass(ConfigError, ValueError)
