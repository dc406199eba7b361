"""Which tensors fit into a format: the command ``formats``, and its section of the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.stores import write_store
from torch import Tensor, nn

from lightning_module_monitor import ModuleMonitor, Rule, load_store, write_report
from lightning_module_monitor.cli import main
from lightning_module_monitor.report.formats import format_fits
from lightning_module_monitor.report.stored_run import read_run
from lightning_module_monitor.sinks.store.writer import Store

LOSSES = ("underflow", "overflow", "scaled_underflow")


def series(kind: str, site: str, *losses: float, name: str = "float16", zeros: float = 0.25) -> dict[str, list[float | None]]:
    """What is recorded of a site: nothing lost in the first record, ``losses`` in the second, and less in the third."""
    keys = [f"{kind}/{site}/{loss}_{name}" for loss in LOSSES]
    values: dict[str, list[float | None]] = {key: [0.0, loss, loss / 2] for key, loss in zip(keys, losses, strict=True)}
    return values | {f"{kind}/{site}/zero_fraction": [0.0, zeros, 0.0]}


SERIES = {
    **series("gradient", "a", 0.001, 0.0, 0.5),
    **series("gradient", "b", 0.0011, 0.0, 0.0),
    **series("gradient", "c", 0.5, 0.0, 0.4, zeros=0.5),
    **series("gradient", "d", 0.0, 1e-9, 0.0),
    **series("validation/activation", "a", 0.0, 0.25, 0.01),
    "gradient/a/underflow_bfloat16": [0.0],
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with statistics of formats."""
    return write_store(tmp_path / "monitor.h5", SERIES)


def test_the_table(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The worst record of a site counts; bfloat16 is left out, because its overflow was not recorded."""
    assert main(["formats", str(store)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "kind                   format   sites  fits  fits scaled  does not fit   zeros",
        "gradient               float16      4  25 %         50 %          25 %  31.2 %",
        "validation/activation  float16      1   0 %          0 %         100 %    25 %",
        "",
        "worst sites (the largest value of all records)",
        "  gradient/c, float16: does not fit: underflow 50 %, 40 % when scaled, overflow 0 %",
        "  gradient/b, float16: fits scaled: underflow 0.11 %, 0 % when scaled, overflow 0 %",
        "  gradient/d, float16: fits scaled: underflow 0 %, 0 % when scaled, overflow 1e-07 %",
        "  validation/activation/a, float16: does not fit: underflow 0 %, 1 % when scaled, overflow 25 %",
    ]


def test_json(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same numbers, of which none is NaN."""
    assert main(["formats", "--json", str(store)]) == 0
    content = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    gradient, _activation = content["formats"]
    worst = gradient.pop("worst_sites")
    assert gradient == {
        "kind": "gradient", "format": "float16", "num_sites": 4, "num_without_values": 0, "fits": 0.25, "fits_scaled": 0.5,
        "does_not_fit": 0.25, "zeros": 0.3125,
    }  # fmt: skip
    assert worst[0] == {"site": "c", "status": "does not fit", "underflow": 0.5, "overflow": 0.0, "scaled_underflow": 0.4, "zeros": 0.5}


def test_without_such_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, and what to record; what else is missing is named below the table."""
    without = write_store(tmp_path / "without.h5", {"activation/fc/rms": [1.0]})
    assert main(["formats", str(without)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "has no statistics of formats for any kind; record overflow_<format> and underflow_<format>" in printed.err
    assert main(["formats", "--json", str(without)]) == 1
    assert json.loads(capsys.readouterr().out)["formats"] == []
    few = write_store(tmp_path / "few.h5", {"gradient/w/underflow_float8_e5m2": [0.5], "gradient/w/overflow_float8_e5m2": [0.0]})
    assert main(["formats", str(few)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Not recorded: scaled_underflow, zero_fraction."


class Spread(nn.Module):
    """Its three outputs fit, fit scaled, and fit not at all; the fourth is zero."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x * 1e-9, torch.cat([x * 1e-9, x * 1e9]), x * 0.0


def test_a_recorded_run(tmp_path: Path) -> None:
    """From tensors to the table: an output that is all zeros has nothing to lose and is no site with values."""
    names = [f"{loss}_float16" for loss in LOSSES]
    monitor = ModuleMonitor(rules=[Rule(kinds="activation", statistics=[*names, "zero_fraction"])])
    monitor.set_module(Spread())
    monitor.begin_step(0)
    assert monitor.module is not None
    monitor.module(1 + torch.rand(100, generator=torch.Generator().manual_seed(0)))
    record = monitor.end_step()
    assert record is not None
    with_store = Store(tmp_path / "monitor.h5", configuration={}, keys=record.values, histogram_keys=())
    with_store.write(record)
    with_store.close()
    (fit,) = format_fits(read_run(load_store(tmp_path / "monitor.h5")))
    assert {site.site: site.status for site in fit.sites} == {
        "_root_": "fits", "_root_.output_1": "fits scaled", "_root_.output_2": "does not fit", "_root_.output_3": "no values"
    }  # fmt: skip
    assert fit.share("fits") == pytest.approx(1 / 3)
    assert fit.zeros == pytest.approx(1 / 4)


def test_the_section_of_the_page(store: Path, tmp_path: Path) -> None:
    """The table without a script, the worst sites folded; a run without such statistics has no section."""
    pytest.importorskip("plotly")
    html = write_report(store).read_text()
    assert '<h2 id="formats-title">Formats</h2>' in html
    assert '<th scope="row">gradient</th><td>float16</td><td class="number">4</td><td class="number">25 %</td>' in html
    assert "c: does not fit: underflow 50 %, 40 % when scaled, overflow 0 %" in html
    assert 'id="formats-title"' not in write_report(write_store(tmp_path / "few.h5", {"activation/fc/rms": [1.0]})).read_text()
