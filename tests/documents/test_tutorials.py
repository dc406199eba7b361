"""The tutorials run, their outputs are those of a run, and what their text says is so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from lightning_module_monitor import load_store

pytestmark = pytest.mark.xdist_group("tutorials")  # groups are begun first, and these tests take long

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
NAMES = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))

FIGURES = """{name: {
    "title": axes.get_title(), "x": axes.get_xlabel(), "y": axes.get_ylabel(),
    "rows": [text.get_text() for text in axes.get_yticklabels()],
    "bar": [image.colorbar.ax.get_ylabel() for image in axes.images if image.colorbar],
    "image": [list(image.get_array().shape) for image in axes.images],
    "lines": {line.get_label(): len(line.get_xdata()) for line in axes.get_lines()},
} for name, axes in sorted(globals().items()) if name.endswith("_axes")}"""


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, wanted: str) -> tuple[Any, Any]:
    """Run a tutorial in a folder.

    Returns:
        The notebook with its outputs, and the value of an expression at its end.
    """
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(variable, str(folder / "settings"))
    notebook = nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4)
    committed = [kinds_of(cell) for cell in notebook.cells]
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({wanted}))"))
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", coalesce_streams=True, resources=resources).execute()
    last = notebook.cells.pop()
    # Where this fails, write the outputs anew: docs/run_tutorials.py
    assert [kinds_of(cell) for cell in notebook.cells] == committed
    return notebook, json.loads(last.outputs[0].text)


def kinds_of(cell: Any) -> list[str]:
    """What a cell shows: streams, which come in any order, and the richest form of each object."""
    shown = [one.get("name") or max(one.data, key=("text/plain", "text/html", "image/png").index) for one in cell.get("outputs", ())]
    return sorted(shown)


def outputs(notebook: Any, source: str, mime: str) -> list[str]:
    """The outputs of one type of the cell that contains a text."""
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    return [one.data[mime] for one in cell.outputs if mime in one.get("data", {})]


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_is_committed_with_its_outputs(name: str) -> None:
    """Pages of the site show them. They name no folder of the machine that made them, and there is no error among them."""
    text = (TUTORIALS / f"{name}.ipynb").read_text()
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert len(text) < 500_000
    assert "/tmp" not in text
    assert "/home" not in text
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(one.output_type != "error" for cell in cells for one in cell.outputs)
    assert any("image/png" in one.get("data", {}) for cell in cells for one in cell.outputs)


def test_every_tutorial_has_a_test() -> None:
    """One that is not run is wrong soon."""
    text = Path(__file__).read_text()
    assert len(NAMES) == 9
    assert [name for name in NAMES if f'run("{name}"' not in text] == []


@pytest.mark.slow
def test_my_loss_is_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding names the faulty module, in the step whose loss is the first NaN; the cure cures."""
    wanted = """{
        "first": first, "found": [[one.site, one.step] for one in callback.findings], "spoilt": bool(model.model[1].weight.isnan().any()),
        "healthy": len(healthy.findings), "losses": model.losses,
    }"""
    _, found = run("my_loss_is_nan", tmp_path, monkeypatch, wanted)
    assert found["found"] == [["model.0", found["first"]]]
    assert found["healthy"] == 0
    assert not found["spoilt"]
    assert all(map(math.isfinite, found["losses"]))


@pytest.mark.slow
def test_is_my_model_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure is displayed once, with the content of its store; objects are tables; ratios and dead units are as the text has them."""
    notebook, figures = run("is_my_model_learning", tmp_path, monkeypatch, FIGURES)
    store, sick = load_store(tmp_path / "healthy.h5"), load_store(tmp_path / "sick.h5")
    layers = [f"model.{number}" for number in range(9)]
    parameters = [f"model.{number}.{part}" for number in range(0, 9, 2) for part in ("weight", "bias")]
    assert {name: figure["title"] for name, figure in figures.items()} == {
        "loss_axes": "context/loss",
        "ratio_axes": "5 series",
        "heat_axes": "activation: rms",
        "profile_axes": "gradient: norm over depth",
        "histogram_axes": "gradient/model.0.weight/hist",
        "dead_axes": "activation: dead_fraction",
    }
    assert all(len(outputs(notebook, f"{name} = ", "image/png")) == 1 for name in figures)
    assert figures["loss_axes"]["lines"] == {"context/loss": len(store["context/loss"][0])} == {"context/loss": 12}
    assert (figures["heat_axes"]["rows"], figures["heat_axes"]["image"], figures["heat_axes"]["bar"]) == (layers, [[9, 12]], ["rms"])
    assert figures["profile_axes"]["rows"] == parameters
    lines = {f"{part}, step {step}": 5 for step in (0, 110) for part in ("weight", "bias")}
    assert (figures["profile_axes"]["lines"], figures["profile_axes"]["x"]) == (lines, "norm")
    assert figures["histogram_axes"]["image"][0][1] == 12
    assert (figures["dead_axes"]["rows"], figures["dead_axes"]["bar"]) == (layers[1::2], ["dead_fraction [0 to 1]"])
    for source, word in (("train(1e-3", "healthy.h5"), ('store = load_store("healthy', "dead_fraction"), ("sick.findings", "severity")):
        [table] = outputs(notebook, source, "text/html")
        assert word in table
    [cell] = [cell for cell in notebook.cells if "sick.diagnose" in cell.source]
    assert "learning rate" in cell.outputs[0].text
    assert len(sick.findings()) > 0
    assert (tmp_path / "compare.html").exists()
    for number in range(0, 9, 2):
        ratios = store[f"update/model.{number}.weight/ratio"][1]
        assert 0.002 < ratios.min() <= ratios.max() < 0.02
    dead = [[run[f"activation/model.{number}/dead_fraction"][1][-1] for number in (1, 3, 5, 7)] for run in (store, sick)]
    assert max(dead[0]) < 0.2
    assert min(dead[1]) > 0.5


@pytest.mark.slow
def test_is_my_batch_size_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise scale predicts where a larger batch helps; cosines are above those of noise where the learning rate is too low."""
    wanted = """{
        "scale": scale, "steps": list(steps.values()), "predicted": [1 + scale / size for size in steps], "noise_share": noise_share,
        "noise": [float(to_gradient), float(to_previous)], "previous": list(previous.values()), "expected": expected,
        "by_block": list(by_block.values()),
    }"""
    _, found = run("is_my_batch_size_right", tmp_path, monkeypatch, wanted)
    assert 3 * 16 < found["scale"] < 8 * 16
    assert found["noise_share"] > 0.7
    gains = [[few / many for few, many in zip(found[name], found[name][1:], strict=False)] for name in ("steps", "predicted")]
    assert gains[0] == pytest.approx(gains[1], rel=0.5)
    assert gains[0][0] > 2 > gains[0][2]
    assert found["noise"] == pytest.approx([(1 - 0.9**2) ** 0.5, 0.9], abs=0.02)
    adamw_low, adamw, sgd_low, sgd = found["previous"]
    assert adamw_low > 0.98
    assert adamw == pytest.approx(0.9, abs=0.03)
    assert sgd_low == pytest.approx(found["expected"], abs=0.05)
    assert -0.3 < sgd < 0
    stores = {name: load_store(tmp_path / f"{name}.h5") for name in ("batch_16", "adamw_low", "adamw", "sgd_low", "sgd")}
    losses = {name: store["context/loss"][1] for name, store in stores.items()}
    assert losses["adamw"][-20:].mean() < 0.1 * losses["adamw_low"][-20:].mean()
    assert losses["sgd"][-20:].mean() < 0.2 * losses["sgd_low"][-20:].mean()
    momentum = {name: stores[name]["optimizer_state/_root_.exp_avg/cosine_to_gradient"][1].mean() for name in ("adamw_low", "adamw")}
    assert momentum["adamw_low"] > 0.7
    assert momentum["adamw"] == pytest.approx(found["noise"][0], abs=0.05)
    assert stores["sgd"]["update/_root_/cosine_to_gradient"][1] == pytest.approx(1, abs=1e-4)
    relative = [value / last for block in found["by_block"] for value, last in zip(block, found["by_block"][2], strict=True)]
    assert relative == pytest.approx([3, 1, 1, 1.5, 1, 1, 1, 1, 1], rel=0.25)
    norms = stores["batch_16"]["gradient/_root_/norm"][1]
    assert norms[-30:].mean() > 0.6 * norms[:30].mean()
    assert losses["batch_16"][-30:].mean() < 0.15 * losses["batch_16"][:30].mean()


@pytest.mark.slow
def test_transfer_across_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard parametrization grows in two layers; muP is sound, also by the package mup, and its best learning rate stays."""
    wanted = (
        '{"grows": sorted({row.module for row in standard.rows if row.verdict == "grows"}), '
        '"is_sound": [one.is_sound for one in (standard, mup, package)]}'
    )
    notebook, found = run("transfer_across_width", tmp_path, monkeypatch, wanted)
    assert found == {"grows": ["head", "second"], "is_sound": [False, True, True]}
    [cell] = [cell for cell in notebook.cells if "best learning rate" in cell.source]
    best = [float(line.split()[-1]) for line in cell.outputs[0].text.splitlines()]
    assert best[1] <= best[0] / 2
    assert best[2] == best[3] == best[0]


@pytest.mark.slow
def test_which_norm_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the best rate stays so does the spectral norm, and neither the Frobenius norm nor the ratio does so for both optimizers."""
    wanted = """{"best": [[*rates.values()] for rates in best.values()], **{
        name: [[of_run[optimizer, width] for width in WIDTHS] for optimizer in OPTIMIZERS] for name, of_run in (hidden | relative).items()
    }}"""
    _, found = run("which_norm_transfers", tmp_path, monkeypatch, wanted)
    standard, adam, muon = ({name: np.array(values[index]) for name, values in found.items()} for index in range(3))
    assert standard["best"][-1] < 0.55 * standard["best"][0]
    for optimizer in (adam, muon):
        assert np.ptp(np.log(optimizer["best"])) < math.log(1.5)
        assert np.ptp(np.log(optimizer["spectral_norm"])) < math.log(1.5)
        layers = np.array([optimizer[layer] for layer in ("first", "hidden", "head")])
        assert layers.max() < 2 * layers.min()
    assert np.ptp(np.log(muon["best"])) < math.log(1.2)
    (adam_norm, adam_ratio), (muon_norm, muon_ratio) = ([of[name][-1] / of[name][0] for name in ("norm", "ratio")] for of in (adam, muon))
    assert (adam_norm, muon_ratio) == (pytest.approx(1, rel=0.35), pytest.approx(1, rel=0.35))
    assert muon_norm > 2
    assert adam_ratio < 0.6
    assert 2 < adam["stable_rank"].min() < adam["stable_rank"].max() < 4.5
    assert muon["stable_rank"][-1] > 4 * muon["stable_rank"][0]
    assert standard["first"][-1] < 0.5 * standard["first"][0]
    assert all(standard[layer][-1] > 1.2 * standard[layer][0] for layer in ("hidden", "head"))


@pytest.mark.slow
def test_drift_in_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 0 nothing has drifted; the harsh learning rate loses the first block, which the gentle one keeps."""
    wanted = '{"harsh": drift(harsh, "blocks.0"), "gentle": drift(gentle, "blocks.0"), "later": drift(gentle, "blocks.1")}'
    _, found = run("drift_in_fine_tuning", tmp_path, monkeypatch, wanted)
    assert found["gentle"] < 0.5 < found["later"]
    assert found["harsh"] > 1
    for name in ("gentle", "harsh"):
        store = load_store(tmp_path / f"{name}.h5")
        keys = [key for key in store if key.endswith("/ratio")]
        assert len(keys) > 20
        assert all(store[key][1][0] == 0 for key in keys)
        assert store["context/loss"][1][-1] < store["context/loss"][1][0] - 1


@pytest.mark.slow
def test_watching_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads begin with all tokens and some end with a few; the loss falls meanwhile; the wrong scale has its diagnosis."""
    _, found = run("watching_attention", tmp_path, monkeypatch, '{"names": [one.name for one in sick.diagnose()], "largest": largest}')
    store = load_store(tmp_path / "attention.h5")
    entropies = [store[key][1] for key in store if key.startswith("attention_relative_entropy")]
    assert len(entropies) == 8
    assert all(values[0] > 0.95 for values in entropies)
    assert sum(values[-1] < 0.2 for values in entropies) >= 2
    losses = store["context/loss"][1]
    assert losses[0] > 2
    assert losses[-1] < 0.1
    assert found["names"] == ["attention"]
    assert found["largest"]["healthy"] < 100
    assert found["largest"]["sick"] > 1000


@pytest.mark.slow
def test_own_loop_and_fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain loop and Fabric have the same values; parts of a batch have those of the whole."""
    wanted = '{"fabric": list(in_fabric.values()), "parts": [rms_of([x]), rms_of([x[:10], x[10:]])]}'
    _, found = run("own_loop_and_fabric", tmp_path, monkeypatch, wanted)
    assert found["parts"][0] == pytest.approx(found["parts"][1], rel=1e-6)
    steps, clipped = load_store(tmp_path / "loop.h5").series("gradient/0.weight/norm")
    assert steps.tolist() == [0, 10, 20]
    assert found["fabric"] == pytest.approx(clipped.tolist(), rel=1e-5)


@pytest.mark.slow
def test_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes record what one does, histograms to the last element."""
    wanted = '{"largest": both.difference.max(), "num": len(both), "two": len(frames[1])}'
    _, found = run("several_gpus", tmp_path, monkeypatch, wanted)
    assert found["num"] == found["two"] > 50
    assert found["largest"] < 1e-3
    for number in (1, 2):
        counts = load_store(tmp_path / f"{number}_processes.h5").histogram("activation/model.2/hist")[1]
        assert counts.sum(axis=1).tolist() == [640] * 4
