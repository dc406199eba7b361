"""Every snippet and command of the documents runs, and does what the text around it says."""

from __future__ import annotations

import csv
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.compiling import Net, Trained
from helpers.documents import DOCUMENTS, ROOT, Model, documents_with, names_in_a_loop, names_in_a_trainer, quiet_trainer, snippets
from helpers.lightning_package import CSVLogger, LightningCLI, Trainer, seed_everything
from helpers.stores import write_store
from helpers.training import loader, trainer
from helpers.widths import WideMlp, gaussian_batches
from matplotlib import pyplot as plt
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from lightning_module_monitor import STATISTICS, ModuleMonitor, ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.cli import COMMANDS, main
from lightning_module_monitor.health.causes import CAUSES
from lightning_module_monitor.kinds import KINDS, OWN_FIGURES, OWN_KIND

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------ Python: the blocks of a page, one after the other


def run_page(document: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the blocks of a document in one namespace, as its reader does."""
    for block in snippets("python", document):
        exec(compile(block, document, "exec"), names)  # the documents are ours
    return names


def test_every_page_with_python_has_a_test() -> None:
    """A block that is not run is wrong soon."""
    tests = (ROOT / "tests" / "documents" / "test_docs.py").read_text() + (ROOT / "tests" / "health" / "test_page.py").read_text()
    assert [path for path in documents_with("python") if path.rpartition("/")[2] not in tests] == []


def test_python_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """Five lines train with a callback, and two read a series; the home page of the site has the same."""
    blocks = snippets("python", "README.md")
    assert snippets("python", "docs/index.md") == blocks
    assert [sum(bool(line.strip()) for line in block.splitlines()) for block in blocks] == [5, 2]
    names = run_page("README.md", names_in_a_trainer() | {"batches": loader(400)})
    assert names["trainer"].global_step == 100
    assert list(names["steps"]) == list(range(0, 100, 10))
    assert (names["norms"] > 0).all()


def test_getting_started_prints_what_it_shows(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Every line of output there and in the README is printed or logged, numbers aside: these differ a little from machine to machine."""
    document = "docs/getting_started.md"
    with caplog.at_level("INFO"):
        run_page(document, {"__name__": "page"})
    for command in store_commands(document):
        assert main(command) == 0
    printed = {without_numbers(line) for line in (capsys.readouterr().out + caplog.text).splitlines()}
    blocks = [*snippets("text", document), *snippets("text", "README.md")]
    shown = [without_numbers(line) for block in blocks for line in block.splitlines()]
    assert len(shown) == 17
    assert [line for line in shown if not any(one.endswith(line) for one in printed)] == []


def without_numbers(line: str) -> str:
    """A line with one space between words, and # for every number but those of checks, which are the same on every machine."""
    return " ".join(re.sub(r"(?<![\w.])(?!\d+ (of \d+ )?checks)\d[\d.]*(e[+-]?\d+)?", "#", line).split())


def test_python_of_the_page_about_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A page is written, and the table names the key that differs most."""
    for name, factor in (("monitor", 1.0), ("before", 1.0), ("after", 3.0)):
        series = {"gradient/model.head.weight/norm": [1.0, 2.0], "gradient/model.head.bias/norm": [factor, 2.0 * factor]}
        write_store(Path(f"{name}.h5"), series)
    names = run_page("docs/how_to/runs.md", {})
    assert Path(names["page"]).read_text().startswith("<!doctype html>")
    assert "model.head.bias" in capsys.readouterr().out.splitlines()[-1]
    assert names["both"].factor.max() == 3


def test_python_of_the_page_about_the_store() -> None:
    """Series, frame, dataset, figures, histograms and singular values are of the runs on the page."""
    names = run_page("docs/how_to/store.md", names_in_a_trainer())
    assert len(names["losses"]) == 5
    assert names["table"].shape == (5, 9)  # a column for each parameter, and for all together
    assert names["largest"].dims == ("site",)
    assert names["heat_map"].get_title() == "gradient: norm"
    assert len(names["curves"].get_lines()) == 2
    plt.close("all")
    assert names["counts"].sum(1).tolist() == [24, 24, 24]
    assert names["counts"].shape[1] == len(names["edges"]) - 1
    assert names["not_finite"].tolist() == [[0, 0, 0]] * 3
    assert names["values"].shape == names["residuals"].shape == (3, 3)
    assert len(names["lines"].get_lines()) == 3


def test_python_of_the_page_about_loggers() -> None:
    """The rows of the CSV file have the loss, the learning rate and the norms, at the steps that the text names."""
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    names = {"Trainer": functools.partial(Trainer, accelerator="cpu", limit_val_batches=0, **quiet), "model": Model()}
    rows = run_page("docs/how_to/loggers.md", names | {"batches": loader(400)})["rows"]
    assert rows["step"].tolist() == [0, 50]
    assert rows[["context/loss", "context/lr", "gradient/model.head.weight/norm"]].notna().all(axis=None)
    assert names["Trainer"](logger=False).log_every_n_steps == 50


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not")
@pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no")
def test_python_of_the_page_about_compiled_models() -> None:
    """Outputs of compiled blocks are recorded, and nothing inside of them."""
    names = names_in_a_trainer() | {"model": Trained(Net()), "batches": loader()}
    values = run_page("docs/how_to/compiled.md", names)["callback"].last_record.values
    assert {"activation/model.blocks.0/rms", "gradient_flow/model.blocks.0-model.blocks.1/gain"} <= values.keys()
    assert not any(key.startswith("activation") and "fc" in key for key in values)


def test_python_of_the_page_about_early_stopping() -> None:
    """The recorded norm ends training before the last epoch, and the file of a checkpoint has it in its name, without a folder."""
    with_checkpoints = {"Trainer": functools.partial(quiet_trainer, enable_checkpointing=True)}
    names = run_page("docs/how_to/early_stopping.md", names_in_a_trainer() | with_checkpoints | {"model": Model(lr=0.05)})
    assert names["stop"].stopped_epoch > 0
    assert names["trainer"].global_step < 500
    assert names["trainer"].callback_metrics[names["key"]] < 1.0
    [file] = Path("best").rglob("*")
    assert re.fullmatch(rf"epoch=[01]-norm={names['checkpoint'].best_model_score:.2f}\.ckpt", file.name)


def test_python_of_the_page_about_a_loss_that_does_not_fall(capsys: pytest.CaptureFixture[str]) -> None:
    """Its diagnosis is printed, then the parameter with the smallest update; the table names each diagnosis but those of later faults."""
    document = "docs/how_to/loss_does_not_fall.md"
    run_page(document, names_in_a_trainer() | {"model": Model(lr=1e-8), "new_model": Model(lr=0.03)})
    diagnosis, _loss, update, gradient, *losses = capsys.readouterr().out.splitlines()
    assert diagnosis.startswith("The learning rate is too low")
    assert float(update.split()[-1]) < 1e-6
    assert float(gradient.split()[-1]) > 0
    first, *_rest, last = map(float, " ".join(losses).strip("[]").split())
    assert last < 0.1 * first
    shown = {name for line in DOCUMENTS[document].splitlines() if line.startswith("| ") for name in re.findall(r"`(\w+)`", line)}
    rest = {"rank_disagreement", "overflow", "infinite_slope", "update", "nonfinite", "growth"}
    assert shown | rest == {cause.name for cause in CAUSES}
    assert not shown & rest


def test_python_of_the_page_about_own_statistics() -> None:
    """Built-in, function, torchmetrics object, named function and values of a module and of gradients are in the records."""
    added = {name for name in STATISTICS}
    names = names_in_a_trainer() | {"MyModule": Model}
    try:
        run_page("docs/how_to/custom_statistics.md", names)
        callback = ModuleMonitorCallback(1, rules=[names["own"], names["named"]], store=False)
        quiet_trainer(callbacks=[callback], max_steps=1).fit(Model(), loader())
    finally:
        for name in STATISTICS.keys() - added:
            del STATISTICS[name]
    kurtosis, entropy = load_store("kurtosis.h5"), load_store("entropy.h5")
    assert [key for key in kurtosis if key.startswith("activation")] == [f"activation/model.{name}/kurtosis" for name in ("first", "head")]
    assert kurtosis["activation/model.head/kurtosis"][0].tolist() == [0, 100, 200]
    assert (entropy["activation/model.head/entropy"][1] < 1.1).all()  # ln 3
    assert callback.last_record is not None
    assert {"activation/model.head/average", "gradient/model.head.bias/l1"} <= callback.last_record.values.keys()
    balance = load_store("balance.h5")
    frame = balance.to_frame().query("kind == 'gradient' and statistic == 'norm'")
    for step, ratio in zip(*balance["balance/model/head_to_blocks"], strict=True):
        head, blocks = (frame[(frame.step == step) & frame.site.str.startswith(f"model.{part}.")].value for part in ("head", "blocks"))
        assert ratio == pytest.approx(np.linalg.norm(head) / np.linalg.norm(blocks), rel=1e-5)
    assert balance["balance/model/head_to_blocks"][0].tolist() == [0, 10, 20]
    with ModuleMonitor(rules=[Rule(kinds="activation", statistics="mean")]) as monitor:
        monitor.set_module(gated := names["Gated"]())
        monitor.begin_step(0)
        gated(torch.tensor([-1.0, 1.0, 2.0, 3.0]))
        record = monitor.end_step()
    assert record is not None
    assert record.values["gate/head/open_fraction"] == 0.75


def test_python_of_the_page_about_the_reference() -> None:
    """The check by hand gives terms and alignments."""
    found = run_page("docs/how_to/reference_model.md", names_in_a_loop())["monitor"].get_step_metrics()
    assert found["rcc_effective_update/head.weight/rms"] > 0
    assert 0 < found["rcc_alignment/head/effective"] <= 1.05


def test_python_of_the_page_about_width(capsys: pytest.CaptureFixture[str]) -> None:
    """The check runs for a reader's module and batches."""
    run_page("docs/how_to/width.md", {"MyModule": WideMlp, "batches": gaussian_batches()})
    printed = capsys.readouterr().out
    assert "Exponents of width against mup: widths 128, 256, 512; 4 seeds, 1 step" in printed
    assert printed.splitlines()[-1] == "False"


def test_python_of_the_page_about_singular_values(capsys: pytest.CaptureFixture[str]) -> None:
    """Each weight is printed with the spectral norm of its last update, relative to its shape."""
    names = run_page("docs/how_to/singular_values.md", names_in_a_trainer() | {"batches": loader(400)})
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("model."))
    shapes = {"first": (8, 6), "blocks.0.linear": (8, 8), "blocks.1.linear": (8, 8), "head": (3, 8)}
    assert [*printed] == [f"model.{name}.weight" for name in shapes]
    for name, (fan_out, fan_in) in shapes.items():
        steps, norms = names["store"].series(f"update/model.{name}.weight/spectral_norm")
        assert steps.tolist() == [0, 10, 20, 30, 40]
        assert float(printed[f"model.{name}.weight"]) == pytest.approx(norms[-1] * (fan_in / fan_out) ** 0.5)
        assert norms[-1] > 0


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_python_of_the_page_about_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    """In a Trainer states, and cosines of the whole update, are recorded; the loop prints a cosine."""
    loop = names_in_a_loop()
    trained, by_hand = snippets("python", "docs/how_to/optimizer.md")
    names = names_in_a_trainer()
    exec(trained, names)  # the page is ours
    values = names["monitor"].last_record.values
    assert {"optimizer_state/model.head.weight.exp_avg/norm", "optimizer_state/model.head.weight.exp_avg_sq/zero_fraction"} <= values.keys()
    assert -1 <= values["update/_root_/cosine_to_previous"] <= 1
    exec(by_hand, loop | {"optimizer": torch.optim.AdamW(loop["model"].parameters())})
    assert -1 <= float(capsys.readouterr().out.splitlines()[-1]) <= 1


def test_python_of_the_page_about_raw_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs, parameters and both gradients of the layer are listed, and the output comes back."""
    names = run_page("docs/how_to/raw_tensors.md", names_in_a_trainer())
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {
        "activation",
        "activation_gradient",
        "parameter",
        "gradient",
    }
    assert names["logits"].shape == (4, 3)


def test_python_of_the_page_about_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine prints values, the watcher logs every tenth step, tensors and gains are those of the last pass."""
    names = names_in_a_loop() | {"logger": CSVLogger(tmp_path, name="", version="csv")}
    run_page("docs/how_to/own_loop.md", names)
    printed = capsys.readouterr().out
    assert "'activation/head/rms'" in printed
    assert "'parameter/head.weight/largest'" in printed
    assert "head False torch.Size([4, 3])\nhead True torch.Size([4, 3])\n" in printed
    assert "Gradient Norms:" in printed
    names["logger"].save()
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "10"]
    assert all(float(row["model_internals/parameter/head.weight/norm"]) > 0 for row in rows)
    assert not any(module._forward_hooks for module in names["model"].modules())


def test_python_of_the_page_about_ranks() -> None:
    """The loop of docs/distributed.md, where there is one rank; as many as there are run it in tests/distributed."""
    (block,) = snippets("python", "docs/distributed.md")
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {"model": model, "batches": loader(), "loss_fn": F.cross_entropy, "optimizer": optimizer}
    names |= {"ModuleMonitor": ModuleMonitor, "Rule": Rule}
    exec(block, names)  # the page is ours
    assert names["record"].step == 9
    assert names["record"].values["gradient/weight/norm"] > 0


def test_python_of_the_page_about_gradient_noise(capsys: pytest.CaptureFixture[str]) -> None:
    """The loop prints a noise scale for every step."""
    (block,) = snippets("python", "docs/how_to/gradient_noise.md")
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {"model": model, "micro_batches": [*loader()][:2], "loss_fn": F.cross_entropy, "optimizer": optimizer}
    exec(block, names)  # the page is ours
    assert len([float(line) for line in capsys.readouterr().out.splitlines()]) == 3


MIGRATION = "docs/migration.md"


@pytest.mark.parametrize("number", range(len(snippets("python", MIGRATION))))
def test_python_of_the_migration_page(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each block runs by itself, and leaves what it is about."""
    block = snippets("python", MIGRATION)[number]
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(6, 3))
    logger = CSVLogger(tmp_path)
    names: dict[str, Any] = {
        **{"model": layers, "blocks": [layers[0], layers[3]], "lightning_model": Model(layers), "batches": loader(16)},
        **{
            "optimizer": torch.optim.SGD(layers.parameters(), lr=0.1),
            "loss_fn": F.cross_entropy,
            "logger": logger,
            "Trainer": quiet_trainer,
        },
    }
    exec(block, names)  # the page is ours
    printed = capsys.readouterr().out
    left = {
        "monitor = ModuleMonitor(": lambda: names["metrics"][2]["gradient/0.weight/largest"] > 0,
        "watcher = TorchWatcher(": lambda: logger.experiment.metrics or list(tmp_path.rglob("metrics.csv")),
        "GradientGainMonitor(blocks)": lambda: "Gradient Norms:" in printed,
        "rule = Rule(": lambda: trained_with(names["callback"], tmp_path).keys() > {"model_internals/activation/model.0/norm"},
        "track(model": lambda: "Tracker(stashes=10, tracking=0)" in printed and names["tracker"][0].args[0].shape == (4, 6),
        "Capture(": lambda: torch.equal(names["logits"], names["store"].tensor("activation", "model.3", 0)) and names["listed"],
    }
    (check,) = [check for sign, check in left.items() if sign in block]
    assert check()
    assert not any(module._forward_hooks for module in layers.modules())


def trained_with(callback: ModuleMonitorCallback, folder: Path) -> dict[str, float]:
    """The values of a short run with a callback."""
    trainer(folder, [callback], max_steps=2, limit_val_batches=0).fit(Model(nn.Sequential(nn.Linear(6, 3))), loader(), loader(8))
    assert callback.last_record is not None
    return dict(callback.last_record.values)


# ------------------------------------------------------------------ YAML


RECORDED = {
    "docs/how_to/lightning_cli.md": [
        {
            "activation/model.first/zero_fraction", "activation_gradient/model.head/rms", "gradient/model.head.bias/norm",
            "update/model.first.weight/ratio", "activation/model.head/spread",
        },
        set(),
    ],
    "docs/how_to/formats.md": [{"gradient/model.head.weight/scaled_underflow_float16", "activation/model.head/overflow_float8_e4m3fn"}],
    "docs/how_to/compiled.md": [{"activation/model.head/rms"}],
    "docs/how_to/early_stopping.md": [{"gradient/_root_/norm"}, {"gradient/model.head.weight/norm"}],
    "docs/reference/kinds.md": [{"gradient/_root_/norm", "parameter/model.blocks.1/norm", "update/_root_/ratio"}],
    "docs/how_to/loggers.md": [{"monitor/activation/model.head/rms"}],
    "docs/how_to/custom_statistics.md": [{"activation/model.head/median", "activation/model.head/average"}],
    "docs/how_to/reference_model.md": [
        {
            "activation_difference/model.first/cosine", "parameter_difference/model.first.weight/ratio",
            "rcc_propagating_update/model.head.weight/rms",
        },
    ],
    "docs/how_to/attention_and_gradient_flow.md": [
        {"attention_entropy/model.blocks.0.head_1/mean", "gradient_flow/model.blocks.0-model.blocks.1/gain"},
    ],
    "docs/how_to/optimizer.md": [{"optimizer_state/model.head.weight.exp_avg/norm", "update/_root_/cosine_to_previous"}],
    "docs/how_to/singular_values.md": [
        {
            "gradient/model.head.weight/stable_rank", "update/model.head.weight/residual_4", "parameter/model.head.weight/effective_rank",
            "activation/model.head/centered_effective_rank",
        },
        {"parameter/model.head.weight/spectral_norm", "update/model.head.weight/stable_rank"},
    ],
    "docs/how_to/gradient_noise.md": [
        {"gradient_noise/_root_/scale", "gradient/_root_/norm"},
        {"gradient_noise/_root_/largest_rank", "gradient_noise/model.blocks.0/scale"},
    ],
    "docs/how_to/raw_tensors.md": [{"gradient/model.head.weight/norm"}],
    "docs/cost.md": [{"gradient/model.head.weight/norm"}],
}  # fmt: skip
"""Keys that each block records; nothing where it is a dry run. tests/health/test_page.py runs the block of docs/health.md.

Those of docs/how_to/hydra.md are no configuration of LightningCLI, and run below."""


@pytest.mark.parametrize("document", documents_with("yaml", but=["docs/health.md", "docs/how_to/hydra.md"]))
def test_yaml_of_a_page(document: str, tmp_path: Path) -> None:
    """Each block runs in the real LightningCLI, and its rules give values."""

    class Reader(Model):
        def __init__(self) -> None:
            super().__init__()

    blocks = snippets("yaml", document)
    for block, keys in zip(blocks, RECORDED[document], strict=True):
        (tmp_path / "page.yaml").write_text(block)
        flags = {"max_steps": 3, "accelerator": "cpu", "logger": "false", "default_root_dir": tmp_path, "limit_val_batches": 0}
        quiet = {"enable_progress_bar": "false", "enable_checkpointing": "false", "enable_model_summary": "false"}
        args = ["fit", "--config=page.yaml", *(f"--trainer.{name}={value}" for name, value in (flags | quiet).items())]
        cli = LightningCLI(Reader, args=args, seed_everything_default=1, save_config_callback=None)
        [callback] = [one for one in cli.trainer.callbacks if isinstance(one, ModuleMonitorCallback)]  # type: ignore[attr-defined]
        recorded = set() if callback.store_path is None else set(load_store(callback.store_path).keys())
        assert keys <= recorded
        assert bool(keys) == bool(recorded)
        assert not [key for key in recorded if key.startswith("update/") and "bias" in key]


HYDRA = "docs/how_to/hydra.md"
MY_PROJECT = """
from helpers.documents import Model
from helpers.training import loader
from helpers.lightning_package import LightningDataModule

class MyModule(Model):
    def __init__(self):
        super().__init__()

class MyData(LightningDataModule):
    def train_dataloader(self):
        return loader()
"""


@pytest.mark.slow
def test_the_page_about_hydra(tmp_path: Path) -> None:
    """The program runs with the files of the page and a flag, and records what the same options in Python record."""
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    for block in snippets("yaml", HYDRA) + snippets("python", HYDRA):
        path = tmp_path / block.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block)
    flags = ["callbacks.module_monitor.every_n_steps=5", "+trainer.accelerator=cpu", "+trainer.logger=false", "hydra.run.dir=run"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])}
    overrides = re.findall(r"\+?callbacks\.module_monitor\.\w+=[^`']+", DOCUMENTS[HYDRA])
    composed = [sys.executable, "train.py", "--cfg", "job", *overrides]
    shown = subprocess.run(composed, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    assert ("every_n_steps: 10" in shown, "stages:" in shown) == (True, True)
    subprocess.run([sys.executable, "train.py", *flags], cwd=tmp_path, env=environment, check=True, capture_output=True)
    of_hydra = load_store("run/monitor.h5")

    rules = [
        Rule(kinds=["activation", "activation_gradient"], statistics=["rms", "abs_max"]),
        Rule(kinds="update", statistics="ratio", sites=".*weight"),
        Rule(kinds="activation", types=nn.Linear, functions={"spread": torch.std, "average": MeanMetric()}),
    ]
    callback = ModuleMonitorCallback(5, rules=rules, callback_metrics="update/.*/ratio", store="python.h5")
    seed_everything(1)
    quiet_trainer(callbacks=[callback], max_epochs=2).fit(Model(), loader())
    of_python = load_store("python.h5")
    assert [*of_hydra] == [*of_python]
    assert {"activation/model.head/average", "update/model.first.weight/ratio"} <= {*of_python}
    for key in of_python:
        assert of_hydra.series(key)[0].tolist() == of_python.series(key)[0].tolist() == [0, 5, 10, 15]
        np.testing.assert_array_equal(of_hydra.series(key)[1], of_python.series(key)[1])
    [run] = of_hydra.attributes["configurations"]
    assert run["configuration"]["rules"][0] == {"kinds": ["activation", "activation_gradient"], "statistics": ["rms", "abs_max"]}


def test_the_page_about_ray(tmp_path: Path) -> None:
    """The store is under ``storage_path``, and has the records of the run."""
    pytest.importorskip("ray", reason="Ray is not installed")
    run_page("docs/how_to/ray.md", {"model": Model(), "batches": loader(), "storage_path": str(tmp_path)})
    assert len(load_store(tmp_path / "monitored" / "monitor.h5").series("gradient/_root_/norm")[0]) > 0


# ------------------------------------------------------------------ commands


@pytest.mark.parametrize("document", documents_with("sh"))
def test_commands_of_a_document(document: str) -> None:
    """Every make target exists and says what it would do; every extra that is named exists; paths are there."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    for command in commands(document):
        words = shlex.split(command)
        if words[0] == "make":
            done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        elif words[:2] == ["pip", "install"]:
            extras = re.findall(r"\[(.*?)\]", command)[0].split(",")
            assert all(re.search(rf"^{extra} = \[", pyproject, re.MULTILINE) for extra in extras), command
        elif words[0] == "lightning-module-monitor":
            assert words[1] in ["--help", *(one.name for one in COMMANDS)]  # they are run below
        else:
            assert words == [".venv/bin/pre-commit", "install"], f"{command} is run by no test"


def commands(document: str) -> list[str]:
    """The command lines of a document, without their comments."""
    return [found for block in snippets("sh", document) for line in block.splitlines() if (found := line.split("#")[0].strip())]


def store_commands(document: str) -> list[list[str]]:
    """The arguments of the commands for stores."""
    words = [shlex.split(command) for command in commands(document) if command.startswith("lightning-module-monitor")]
    return [arguments for _program, *arguments in words if arguments[0] != "--help"]


def test_commands_for_stores(tmp_path: Path) -> None:
    """They run as they stand, on stores of these names, and every command is shown."""
    for name in ("monitor", "before", "after"):
        names = ("norm", "underflow_float16", "overflow_float16")
        write_store(tmp_path / f"{name}.h5", {f"gradient/model.head.weight/{statistic}": [1.0, 2.0] for statistic in names})
    shown = store_commands("docs/how_to/runs.md")
    for command in shown:
        assert main(command) == 0, command
    assert {"monitor.html", "both.html", "monitor.csv"} <= {path.name for path in tmp_path.iterdir()}
    [info] = [command for command in store_commands("docs/getting_started.md") if command[0] == "info"]
    assert main(info) == 0
    assert {command[0] for command in [*shown, info]} == {one.name for one in COMMANDS}


def test_make_demo_is_the_example_that_is_tested() -> None:
    """What ``make demo`` runs is what tests/documents/test_examples.py runs."""
    done = subprocess.run(["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "examples/digits.py fit --config configs/digits.yaml" in done.stdout


def test_yaml_names_the_callback_in_full() -> None:
    """A short name is known in some programs only."""
    programs = {path.name: path.read_text() for path in (*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*.py"))}
    for name, text in (DOCUMENTS | programs).items():
        for line in text.splitlines():
            short = re.search(r"(class_path: |callbacks\S*[=:] ?|^\s*- )ModuleMonitorCallback\b", line)
            assert short is None, f"{name}: {line}"


@pytest.mark.parametrize("document", ["README.md", "docs/index.md", "docs/getting_started.md"])
def test_installing_into_an_environment_pins_nothing(document: str) -> None:
    """Neither the command nor what the package asks for takes another torch or numpy than a recent one that is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (command,) = [line for line in commands(document) if "pip install" in line]
    url = re.escape(project["urls"]["Homepage"])
    assert re.fullmatch(rf"pip install '(\.\[[\w,]+\]|lightning-module-monitor\[[\w,]+\] @ git\+{url})'", command)
    asked_for = set(re.findall(r"\w+", command.partition("[")[2].partition("]")[0]))
    requirements = [*project["dependencies"], *(one for extra in asked_for for one in project["optional-dependencies"][extra])]
    assert all(re.fullmatch(r"[\w-]+(\[\w+\])?>=[\d.]+(post\d+)?", one) for one in requirements)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_named_tests_exist(document: str) -> None:
    """No dead link to a file, and the test that holds a promise is there."""
    for target in re.findall(r"\]\((?!\w+:)([^)#]+)", DOCUMENTS[document]):
        assert ((ROOT / document).parent / target).exists(), target
    for path, _, name in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", DOCUMENTS[document]):
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), name


def test_ways_to_train_name_tests_that_exist() -> None:
    """Each number in a cell of the matrix is listed below it, and each listed test is in its file."""
    table, _, listed = (ROOT / "docs" / "equivalence.md").read_text(encoding="utf-8").partition("\n1. ")
    tests = re.findall(r"^(\d+)\. \[(\S+)\]\(\S+\) `(\w+)`", "1. " + listed, flags=re.MULTILINE)
    rows = [line.split("|")[2:] for line in table.splitlines() if line.startswith("| ")][1:]
    shown = {number for row in rows for cell in row for number in re.findall(r"\d+", cell)}
    assert shown == {number for number, _path, _name in tests}
    for _number, path, name in tests:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name}"


def test_the_readme_is_short() -> None:
    """Limits and details are on the pages."""
    assert len(DOCUMENTS["README.md"].splitlines()) <= 110


def test_every_kind_and_figure_is_documented() -> None:
    """In the table of kinds, with the monitor's own figures."""
    for name in (*KINDS, *(f"{OWN_KIND}/{figure}" for figure in OWN_FIGURES)):
        assert f"`{name}`" in DOCUMENTS["docs/reference/kinds.md"], name
