"""The tutorial notebook runs, and its figures and tables show what its runs have recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from lightning_module_monitor import load_store

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"

CONTENT = """
import json
names = [name for name in dir() if name.endswith("_axes")]
print(json.dumps({name: {
    "title": axes.get_title(), "x": axes.get_xlabel(), "y": axes.get_ylabel(),
    "rows": [text.get_text() for text in axes.get_yticklabels()],
    "bar": [image.colorbar.ax.get_ylabel() for image in axes.images if image.colorbar],
    "image": [list(image.get_array().shape) for image in axes.images],
    "lines": {line.get_label(): len(line.get_xdata()) for line in axes.get_lines()},
} for name in names for axes in [globals()[name]]}))
"""


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The notebook after its run in an empty folder; a last cell prints the content of its figures."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / "settings"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(CONTENT))
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    return notebook


def outputs(notebook: Any, source: str, mime: str) -> list[str]:
    """The outputs of one type of the cell that contains a text."""
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source and cell.source != CONTENT]
    return [one.data[mime] for one in cell.outputs if mime in one.get("data", {})]


def printed(cell: Any) -> str:
    """What a cell has printed."""
    return "".join(one.text for one in cell.outputs if one.output_type == "stream" and one.name == "stdout")


def test_the_file_holds_no_outputs() -> None:
    """It stays small, and what it shows is of the reader's own run."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
def test_the_notebook_shows_what_was_recorded(executed: Any, tmp_path: Path) -> None:
    """Each figure is displayed once, with the sites, steps, labels and lines of its store; objects are tables; a diagnosis is printed."""
    store = load_store(tmp_path / "healthy.h5")
    figures = json.loads(printed(executed.cells[-1]))
    layers = [f"model.{number}" for number in range(9)]
    parameters = [f"model.{number}.{part}" for number in range(0, 9, 2) for part in ("weight", "bias")]
    assert {name: figure["title"] for name, figure in figures.items()} == {
        "loss_axes": "context/loss",
        "heat_axes": "activation: rms",
        "profile_axes": "gradient: norm over depth",
        "histogram_axes": "gradient/model.0.weight/hist",
        "dead_axes": "activation: zero_fraction",
    }
    assert all(len(outputs(executed, f"{name} = ", "image/png")) == 1 for name in figures)
    assert figures["loss_axes"]["lines"] == {"context/loss": len(store["context/loss"][0])} == {"context/loss": 12}
    assert (figures["heat_axes"]["rows"], figures["heat_axes"]["image"], figures["heat_axes"]["bar"]) == (layers, [[9, 12]], ["rms"])
    assert figures["profile_axes"]["rows"] == parameters
    lines = {f"{part}, step {step}": 5 for step in (0, 110) for part in ("weight", "bias")}
    assert (figures["profile_axes"]["lines"], figures["profile_axes"]["x"]) == (lines, "norm")
    assert figures["histogram_axes"]["image"][0][1] == 12
    assert (figures["dead_axes"]["rows"], figures["dead_axes"]["bar"]) == (layers[1::2], ["zero_fraction [0 to 1]"])
    for source, word in (("train(1e-3", "healthy.h5"), ('store = load_store("healthy', "zero_fraction"), ("sick.findings", "severity")):
        [table] = outputs(executed, source, "text/html")
        assert word in table
    [cell] = [cell for cell in executed.cells if "sick.diagnose" in cell.source]
    assert "learning rate" in printed(cell)
    assert len(load_store(tmp_path / "sick.h5").findings()) > 0
    assert (tmp_path / "compare.html").exists()
