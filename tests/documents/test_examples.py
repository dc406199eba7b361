"""Every program in examples/ runs as a user runs it, and what it prints and stores is true."""

from __future__ import annotations

import csv
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.documents import program

from lightning_module_monitor import load_store

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("examples")]  # groups are begun first, and these tests take long

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 200


def run(command: list[str], folder: Path) -> str:
    """Run a command in a folder, in a wide terminal; returns what it printed."""
    environment = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder / "matplotlib")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_example(name: str, arguments: str, folder: Path) -> str:
    """Run an example in a folder; returns what it printed."""
    return run([sys.executable, str(ROOT / "examples" / name), *shlex.split(arguments)], folder)


def total(norms: list[float]) -> float:
    """The norm of all parameters together."""
    return math.sqrt(sum(norm**2 for norm in norms))


def test_every_example_has_a_test() -> None:
    """An example that is not run is wrong soon."""
    text = Path(__file__).read_text()
    assert [path.name for path in (ROOT / "examples").glob("*.py") if path.stem not in text] == []


def test_digits_trains_and_sums_up_its_store(tmp_path: Path) -> None:
    """The demonstration: accuracy, progress bar, the table, the places, and the command that looks further."""
    printed = run_example("digits.py", f"fit --config {shlex.quote(str(ROOT / 'configs' / 'digits.yaml'))}", tmp_path)
    assert float(printed.partition("validation accuracy: ")[2].split()[0]) > 0.9

    store_path = tmp_path / "demo_output" / "digits" / "version_0" / "monitor.h5"
    store = load_store(store_path)
    ratio_steps, ratios = store.series("update/model.head.weight/ratio")
    assert ratio_steps.tolist() == list(range(0, 8 * 23, 5))
    assert f"update/model.head.weight/ratio: {ratios[-1]:.3g}" in printed  # the bar

    lowest, highest = (
        {site: store.series(f"activation/{site}/{name}")[1] for site in sites_of(store.keys(), "activation")} for name in ("min", "max")
    )
    widest = max(lowest, key=lambda site: highest[site].max() - lowest[site].min())
    row = re.search(r"^activation +(\d+) +(\S+) \.\. (\S+) +(\S+) +(\d+) *$", printed, re.MULTILINE)
    assert row is not None
    assert row.groups() == ("14", f"{lowest[widest].min():.2g}", f"{highest[widest].max():.2g}", widest, "0")
    assert all((lowest[f"model.relu{number}"] == 0).all() for number in (1, 2, 3))

    assert "store: demo_output/digits/version_0/monitor.h5" in printed
    assert "TensorBoard logs: demo_output/digits/version_0" in printed
    assert "report, to open in a browser: demo_output/digits/version_0/monitor.html" in printed
    assert "<strong>healthy</strong>" in store_path.with_suffix(".html").read_text()
    plot, tensorboard = (shlex.split(line) for line in printed.partition("Look further:")[2].strip().splitlines())
    assert plot[1].endswith("examples/plot_store.py")
    assert "activation/rms" in run(plot, tmp_path)
    assert store_path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert tensorboard[-2:] == ["--logdir", "demo_output/digits/version_0"]
    assert list((tmp_path / tensorboard[-1]).glob("events.out.tfevents.*"))


def sites_of(keys: list[str], kind: str) -> list[str]:
    """The sites of a kind, in the store's order."""
    return list(dict.fromkeys(key.split("/")[1] for key in keys if key.startswith(f"{kind}/")))


def test_char_gpt_learns_and_tells_its_update_ratios(tmp_path: Path) -> None:
    """The loss falls, steps count optimizer steps and not micro-batches, clipping shows, the printed table is the store's."""
    size = "--layers 1 --width 32 --heads 2 --context 32 --batch_size 8 --megabytes 0.1"
    printed = run_example("char_gpt.py", f"--max_steps 9 --every_n_steps 4 {size}", tmp_path)
    losses = re.search(r"100,000 characters; .*: (\S+) before, (\S+) after 9 steps", printed)
    assert losses is not None
    before, after = (float(loss) for loss in losses.groups())
    assert before == pytest.approx(math.log(256), abs=0.4)
    assert after < before - 0.2

    store = load_store(tmp_path / printed.partition("store: ")[2].strip())
    sites = sites_of(store.keys(), "update")
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("gpt.")] == sites
    assert len(sites) == 7  # two embeddings, four linear layers of the block, the head
    for site in sites:
        steps, ratios = store.series(f"update/{site}/ratio")
        assert steps.tolist() == [0, 4, 8]
        assert re.search(rf"^{re.escape(site)} +{ratios[0]:.2g} +{ratios[-1]:.2g} +{ratios.max():.2g}$", printed, re.MULTILINE)

    parameters = sites_of(store.keys(), "gradient")
    for row in range(3):
        unclipped, clipped = (
            total([store.series(f"{kind}/{site}/norm")[1][row] for site in parameters]) for kind in ("gradient_before_clip", "gradient")
        )
        assert unclipped > 1.0  # otherwise this run would show nothing
        assert clipped == pytest.approx(1.0, rel=1e-4)


def test_plain_loop_prints_what_clipping_did(tmp_path: Path) -> None:
    """One line for each monitored step, with finite values, a falling loss, and gradients that clipping made smaller."""
    printed = run_example("plain_loop.py", "--max_steps 41 --every_n_steps 20", tmp_path)
    number = r"(\d+\.\d+)"
    lines = re.findall(
        rf"^step +(\d+)  loss {number}  hidden rms {number}  gradient of 0\.weight {number} -> clipped {number}  update ratio {number}$",
        printed,
        re.MULTILINE,
    )
    assert [int(line[0]) for line in lines] == [0, 20, 40]
    values = np.array(lines, dtype=float)
    assert values[0, 1] == pytest.approx(math.log(10), abs=0.1)
    assert (np.diff(values[:, 1]) < 0).all()
    assert (values[:, 4] < values[:, 3]).all()
    assert (values[:, 4] < 0.25).all()  # one of the parameters whose norm together is at most 0.25
    assert ((values[:, 5] > 1e-4) & (values[:, 5] < 0.1)).all()
    assert float(printed.partition("accuracy on all digits: ")[2]) > 0.6


def test_without_trainer_looks_at_raw_tensors(tmp_path: Path) -> None:
    """A line for each layer before and after training, and what they say is so: units that die while the loss falls."""
    printed = run_example("without_trainer.py", "--max_steps 100", tmp_path)
    before, after = printed.split("after training: ")
    losses = [float(re.search(r"loss (\S+), Tracker\(stashes=10, tracking=0\)", part)[1]) for part in (before, after)]  # type: ignore[index]
    assert losses[0] == pytest.approx(math.log(10), abs=0.1)
    assert losses[1] < 0.2
    layers = re.findall(r"^(\d) +(\w+) +std (\S+)  gradient (\S+)(?:  dead (\d+) of 128)?$", printed, re.MULTILINE)
    assert [layer[:2] for layer in layers] == 2 * [("0", "Linear"), ("1", "ReLU"), ("2", "Linear"), ("3", "ReLU"), ("4", "Linear")]
    gains = [[float(gain) for gain in line.split()] for line in re.findall(r"^gains .*: (.*)$", printed, re.MULTILINE)]
    assert [len(line) for line in gains] == [2, 2]
    spread = [float(layer[3]) for layer in layers if layer[1] == "Linear"]  # of mean zero, nearly: so a gain is a ratio of these
    assert gains[0][0] == pytest.approx(spread[0] / spread[1], rel=0.02)
    dead = [int(layer[4]) for layer in layers if layer[1] == "ReLU"]
    assert dead[2] > dead[0]  # this run's learning rate is high

    example = program("examples/without_trainer.py")
    assert example.num_dead(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])) == 1
    torch.manual_seed(0)
    images, _labels = example.load_data()
    first = example.build_model()[0](images).detach()
    assert float(layers[0][2]) == pytest.approx(float(first.std()), abs=1e-3)
    assert dead[0] == int((first <= 0).all(dim=0).sum())


def test_fabric_loop_logs_through_fabric(tmp_path: Path) -> None:
    """The CSV file has a row for each monitored step, under the names of the module and not of Fabric's wrapper."""
    printed = run_example("fabric_loop.py", "--max_epochs 4 --every_n_steps 10", tmp_path)
    path = tmp_path / printed.partition("values: ")[2].strip()
    assert path == tmp_path / "demo_output" / "fabric" / "version_0" / "metrics.csv"
    with path.open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert [row["step"] for row in rows] == [0, 10, 20, 30, 40, 50]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert all(row["activation/1/nonfinite_count"] == 0 and row["monitor/errors"] == 0 for row in rows)
    sites = sites_of(list(rows[0]), "gradient")
    assert sorted(sites) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    for row in rows:
        unclipped, clipped = (total([row[f"{kind}/{site}/norm"] for site in sites]) for kind in ("gradient_before_clip", "gradient"))
        assert clipped == pytest.approx(min(unclipped, 1.0), rel=1e-4)


def test_gan_has_one_set_of_keys_with_two_optimizers(tmp_path: Path) -> None:
    """Every parameter of both networks at every monitored step, as is printed; both move, and both get gradients."""
    printed = run_example("gan.py", "--max_epochs 1 --every_n_steps 7", tmp_path)
    store = load_store(tmp_path / printed.partition("store: ")[2].strip())
    parameters = sites_of(store.keys(), "parameter")
    assert sites_of(store.keys(), "gradient") == parameters
    assert sites_of(store.keys(), "update") == [site for site in parameters if site.endswith("weight")]
    assert len(parameters) == 8
    for site in parameters:
        steps, norms = store.series(f"gradient/{site}/norm")
        assert steps.tolist() == [0, 7, 14, 21, 28]  # 29 batches, with a step of each optimizer
        assert (norms > 0).all()
    for layer in ("generator.2", "discriminator.0"):
        _steps, ratios = store.series(f"update/{layer}.weight/ratio")
        assert 1e-4 < ratios.min() <= ratios.max() < 0.5
        assert f"{layer}.weight: update ratio {np.median(ratios):.2g}, gradient" in printed


def test_lora_trains_adapters_and_nothing_else(tmp_path: Path) -> None:
    """Frozen weights have no gradient and updates of 0; adapters have both, and add nothing at first."""
    printed = run_example("lora.py", "--max_epochs 2", tmp_path)
    accuracies = re.search(r"accuracy on turned digits: (\S+) before, (\S+) with adapters", printed)
    assert accuracies is not None
    assert float(accuracies[2]) > float(accuracies[1]) + 0.2
    store = load_store(tmp_path / printed.partition("store: ")[2].strip())
    adapters = [f"model.{place}.{part}.weight" for place in (0, 2) for part in ("down", "up")]
    assert sorted(sites_of(store.keys(), "gradient")) == adapters
    for site in sites_of(store.keys(), "parameter"):
        _steps, norms = store.series(f"update/{site}/norm")
        # A gradient comes to `down` through `up`, which is zero at first.
        assert (norms > 0).tolist() == [site in adapters and not (step == 0 and site.endswith("down.weight")) for step in range(len(norms))]
    for place in (0, 2):
        added = store.series(f"activation/model.{place}.up/rms")[1]
        assert added[0] == 0
        assert (added[1:] > 0).all()
        assert re.search(
            rf"^model.{place}: adapter adds 0.000 of .* largest update: base 0, down 0\.\d+, up 0\.\d+$", printed, re.MULTILINE
        )


def test_coordinate_check_tells_sp_from_mup(tmp_path: Path) -> None:
    """SP's second layer and head grow with the width, muP's network is sound; the picture is there."""
    printed = run_example("coordinate_check.py", "--output check/curves.png", tmp_path)
    standard, maximal = printed.split("mup: Adam, learning rates by layer")
    assert "offending: head, second" in standard
    # The page shows these rows; their second decimal may differ from machine to machine.
    shown, rows = (
        [(*line.split()[:3], line.split()[-1]) for line in text.splitlines() if line.startswith(("first ", "second ", "head "))]
        for text in ((ROOT / "docs" / "how_to" / "width.md").read_text(), standard)
    )
    assert shown == rows
    assert re.search(r"^second +hidden +effective_update +\+(0\.[89]|1\.[01]).* grows *$", standard, re.MULTILINE)
    assert "no offending module" in maximal
    assert not re.search(" (grows|vanishes|nonfinite) *$", maximal, re.MULTILINE)
    assert "curves: check/curves.png" in printed
    assert (tmp_path / "check" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_make_rcc_is_this_example() -> None:
    """What ``make rcc`` runs is what is tested here."""
    done = subprocess.run(["make", "--dry-run", "rcc"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "examples/coordinate_check.py" in done.stdout
