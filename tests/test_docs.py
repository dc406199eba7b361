"""Every snippet and command of the documents runs."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stores import write_store
from helpers.training import Classifier, loader, trainer
from helpers.widths import WideMlp, gaussian_batches
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from matplotlib import pyplot as plt
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_module_monitor import STATISTICS, ModuleMonitor, ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.cli import COMMANDS, main
from lightning_module_monitor.config import KINDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def snippets(language: str, text: str = README) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def snippet(containing: str) -> str:
    """The one block of Python with something in it."""
    [found] = [one for one in snippets("python") if containing in one]
    return found


class Model(Classifier):
    """What the README's model may look like: it has the layer that a snippet names."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model or nn.Sequential())
        if model is None:
            self.model.head = nn.Linear(6, 3)  # type: ignore[assignment]  # a named child of a Sequential

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    val_dataloader = train_dataloader


def quiet_trainer(**options: Any) -> Trainer:
    """What the documents' Trainer is here."""
    return Trainer(
        **options, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0,
    )  # fmt: skip


def test_python_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks run one after the other, as a reader would run them, with a model and batches of the reader's."""
    monkeypatch.chdir(tmp_path)
    model = Model()
    names: dict[str, Any] = {"Trainer": quiet_trainer, "model": model, "batches": loader(), "loss_fn": F.cross_entropy}
    wanted = ("ModuleMonitorCallback()", "load_store(trainer", "ModuleMonitor(rules=", "with track(", "coordinate_check(lambda")
    first, store, loop, raw, width_check = map(snippet, wanted)
    exec(first, names)  # the README is ours
    assert names["trainer"].global_step == 100
    exec(store, names)  # as above
    assert list(names["steps"]) == [0, 50]
    assert (names["values"] > 0).all()
    assert list(names["frame"].columns) == ["step", "stage", "kind", "site", "statistic", "value"]
    exec(snippet("store.plot.heatmap"), names)  # as above
    assert names["heat_map"].get_title() == "gradient: norm"
    assert len(names["curves"].get_lines()) == 2
    plt.close("all")
    names |= {"model": model.model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(loop, names)  # as above
    printed = capsys.readouterr().out
    assert "'activation/head/rms'" in printed
    assert "'parameter/head.weight/largest'" in printed
    exec(raw, names)  # as above
    assert capsys.readouterr().out == "head False torch.Size([4, 3])\nhead True torch.Size([4, 3])\n"
    exec(snippet("RefinedCoordinateCheck(monitor)"), names)  # as above
    found = names["monitor"].get_step_metrics()
    assert found["rcc_effective_update/head.weight/rms"] > 0
    assert 0 < found["rcc_alignment/head/effective"] <= 1.05
    exec(width_check, {"MyModule": WideMlp, "batches": gaussian_batches()})  # as above
    assert "Exponents of width against mup: widths 128, 256, 512; 4 seeds, 1 step" in capsys.readouterr().out


def test_python_of_the_page_about_ranks() -> None:
    """The loop, where there is one rank; as many as there are run it in tests/distributed."""
    (block,) = snippets("python", (ROOT / "docs" / "distributed.md").read_text())
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {"model": model, "batches": loader(), "loss_fn": F.cross_entropy, "optimizer": optimizer}
    names |= {"ModuleMonitor": ModuleMonitor, "Rule": Rule}
    exec(block, names)  # the page is ours
    assert names["record"].step == 9
    assert names["record"].values["gradient/weight/norm"] > 0


MIGRATION = (ROOT / "docs" / "migration.md").read_text()


@pytest.mark.parametrize("number", range(len(snippets("python", MIGRATION))))
def test_python_of_the_migration_page(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each block runs by itself, and leaves what it is about."""
    block = snippets("python", MIGRATION)[number]
    monkeypatch.chdir(tmp_path)
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


def test_histograms_of_the_readme(tmp_path: Path) -> None:
    """The store gives what the block asks for."""
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds="gradient", statistics="hist")])
    options: dict[str, Any] = {"max_steps": 3, "limit_val_batches": 0, "enable_model_summary": False, "enable_progress_bar": False}
    Trainer(callbacks=[callback], accelerator="cpu", logger=False, default_root_dir=tmp_path, **options).fit(Model(), loader())
    names: dict[str, Any] = {"store": load_store(callback.store_path)}
    exec(snippet("store.histogram("), names)  # the README is ours
    assert names["counts"].sum(1).tolist() == [18, 18, 18]
    assert names["counts"].shape[1] == len(names["edges"]) - 1


def test_watcher_of_the_readme(tmp_path: Path) -> None:
    """Every tenth step of the reader's loop is in the reader's logger."""
    model = Model().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logger = CSVLogger(tmp_path, name="", version="csv")
    names = {"model": model, "batches": loader(80), "loss_fn": F.cross_entropy, "optimizer": optimizer, "logger": logger}
    exec(snippet("TorchWatcher("), names)  # the README is ours
    logger.save()
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "10"]
    assert all(float(row["model_internals/parameter/head.weight/norm"]) > 0 for row in rows)


def test_mixin_of_the_readme() -> None:
    """The module's own value is in the record."""
    names: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(snippet("MonitorMixin"), names)  # the README is ours
    with ModuleMonitor(rules=[Rule(kinds="activation", statistics="mean")]) as monitor:
        monitor.set_module(gated := names["Gated"]())
        monitor.begin_step(0)
        gated(torch.tensor([-1.0, 1.0, 2.0, 3.0]))
        record = monitor.end_step()
    assert record is not None
    assert record.values["gate/head/open_fraction"] == 0.75


def test_yaml_of_the_readme(tmp_path: Path) -> None:
    """It runs in the real LightningCLI, and each of its rules gives values."""

    class Net(Classifier):
        def __init__(self) -> None:
            super().__init__("mlp")

        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

        val_dataloader = train_dataloader

    block, compared = snippets("yaml")
    (tmp_path / "readme.yaml").write_text(block)
    (tmp_path / "compared.yaml").write_text(compared)
    flags = {"max_steps": 3, "accelerator": "cpu", "logger": "false", "default_root_dir": tmp_path, "limit_val_batches": 0}
    quiet = {"enable_progress_bar": "false", "enable_checkpointing": "false", "enable_model_summary": "false"}

    def keys_of(file: str) -> set[str]:
        args = ["fit", f"--config={tmp_path / file}", *(f"--trainer.{name}={value}" for name, value in (flags | quiet).items())]
        cli = LightningCLI(Net, args=args, seed_everything_default=1, save_config_callback=None)
        (callback,) = [one for one in cli.trainer.callbacks if isinstance(one, ModuleMonitorCallback)]  # type: ignore[attr-defined]
        assert callback.last_record is not None
        return set(callback.last_record.values)

    assert {
        "activation_difference/model.layers.0/cosine",
        "parameter_difference/model.layers.0.weight/ratio",
        "rcc_propagating_update/model.layers.3.weight/rms",
    } <= keys_of("compared.yaml")
    keys = keys_of("readme.yaml")
    for expected in (
        "activation/model.layers.0/zero_fraction",
        "activation_gradient/model.layers.3/rms",
        "gradient/model.layers.0.bias/norm",
        "update/model.layers.0.weight/ratio",
        "activation/model.layers.0/spread",
    ):
        assert expected in keys
    assert not [key for key in keys if "layers.0.bias/ratio" in key]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_of_the_documents(document: Path) -> None:
    """Every make target exists and says what it would do; every extra that is named exists; paths are there."""
    commands = [line.split("#")[0].strip() for block in snippets("sh", document.read_text()) for line in block.splitlines()]
    assert commands
    pyproject = (ROOT / "pyproject.toml").read_text()
    for command in filter(None, commands):
        words = shlex.split(command)
        if words[0] == "make":
            done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        elif words[:2] == ["pip", "install"]:
            extras = re.findall(r"\[(.*?)\]", command)[0].split(",")
            assert all(re.search(rf"^{extra} = \[", pyproject, re.MULTILINE) for extra in extras), command
        elif words[0] == "lightning-module-monitor":
            assert words[1] in [one.name for one in COMMANDS]
            # tests/width_check/test_command.py runs it; those of stores are run below
            assert words[1] != "coordinate-check" or (ROOT / words[2]).is_file()
        else:
            assert words == [".venv/bin/pre-commit", "install"], f"{command} is run by no test"


def test_commands_for_stores_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as they stand, on stores of these names."""
    monkeypatch.chdir(tmp_path)
    for name in ("monitor", "before", "after"):
        write_store(tmp_path / f"{name}.h5", {"gradient/model.head.weight/norm": [1.0, 2.0]})
    lines = [line for block in snippets("sh") for line in block.splitlines() if line.startswith("lightning-module-monitor")]
    commands = [shlex.split(line, comments=True)[1:] for line in lines]
    for command in commands:
        if command[0] != "coordinate-check":
            assert main(command) == 0, command
    assert {"monitor.html", "both.html", "monitor.csv"} <= {path.name for path in tmp_path.iterdir()}
    # A snapshot is of a run that has gone bad: tests/health/test_nonfinite.py shows one again.
    assert {command[0] for command in commands} == {one.name for one in COMMANDS} - {"replay"}


def test_make_demo_is_the_example_that_is_tested() -> None:
    """What ``make demo`` runs is what tests/test_examples.py runs."""
    done = subprocess.run(["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "examples/digits.py fit --config configs/digits.yaml" in done.stdout


def test_yaml_names_the_callback_in_full() -> None:
    """A short name is known in some programs only."""
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*.py")):
        for line in path.read_text().splitlines():
            short = re.search(r"(class_path: |callbacks\S*[=:] ?|^\s*- )ModuleMonitorCallback\b", line)
            assert short is None, f"{path.name}: {line}"


def test_installing_into_an_environment_pins_nothing() -> None:
    """Neither the README's command nor what the package asks for takes another torch or numpy than a recent one that is there."""
    (command,) = [line for text in snippets("sh") for line in text.splitlines() if "pip install" in line]
    assert re.fullmatch(r"pip install '\.\[[\w,]+\]'", command)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked_for = set(re.findall(r"\w+", command.partition("[")[2]))
    requirements = [*project["dependencies"], *(one for extra in asked_for for one in project["optional-dependencies"][extra])]
    assert all(re.fullmatch(r"[\w-]+(\[\w+\])?>=[\d.]+", one) for one in requirements)


def test_links_and_named_tests_of_the_readme_exist() -> None:
    """No dead link, and the test that holds a promise is there."""
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for path, _, name in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", README + MIGRATION):
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), name


def test_tables_of_the_readme_are_complete() -> None:
    """Every kind and every statistic is in its table."""
    for name in (*KINDS, *STATISTICS):
        assert f"`{name}`" in README, name


def test_the_model_of_the_snippets_is_a_lightning_module() -> None:
    """It is what a reader has."""
    assert isinstance(Model(), LightningModule)
