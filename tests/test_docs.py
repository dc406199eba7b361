"""Every snippet and command of the documents runs."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import Classifier, loader
from helpers.widths import WideMlp, gaussian_batches
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_module_monitor import STATISTICS, ModuleMonitorCallback
from lightning_module_monitor.cli import COMMANDS
from lightning_module_monitor.config import KINDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def snippets(language: str, text: str = README) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


class Model(Classifier):
    """What the README's model may look like: it has the layer that a snippet names."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential())
        self.model.head = nn.Linear(6, 3)  # type: ignore[assignment]  # a named child of a Sequential

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    val_dataloader = train_dataloader


def test_python_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks run one after the other, as a reader would run them, with a model and batches of the reader's."""
    monkeypatch.chdir(tmp_path)

    def quiet_trainer(**options: Any) -> Trainer:
        return Trainer(
            **options, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            limit_val_batches=0,
        )  # fmt: skip

    model = Model()
    names: dict[str, Any] = {"Trainer": quiet_trainer, "model": model, "batches": loader(), "loss_fn": F.cross_entropy}
    first, store, loop, width_check = snippets("python")
    exec(first, names)  # the README is ours
    assert names["trainer"].global_step == 100
    exec(store, names)  # as above
    assert list(names["steps"]) == [0, 50]
    assert (names["values"] > 0).all()
    assert list(names["frame"].columns) == ["step", "stage", "kind", "site", "statistic", "value"]
    names |= {"model": model.model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(loop, names)  # as above
    printed = capsys.readouterr().out
    assert "'activation/head/rms'" in printed
    assert "'parameter/head.weight/largest'" in printed
    exec(width_check, {"MyModule": WideMlp, "batches": gaussian_batches()})  # as above
    assert "Exponents of width against mup: widths 128, 256, 512; 4 seeds, 1 step" in capsys.readouterr().out


def test_yaml_of_the_readme(tmp_path: Path) -> None:
    """It runs in the real LightningCLI, and each of its rules gives values."""

    class Net(Classifier):
        def __init__(self) -> None:
            super().__init__("mlp")

        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

        val_dataloader = train_dataloader

    (block,) = snippets("yaml")
    (tmp_path / "readme.yaml").write_text(block)
    flags = {"max_steps": 3, "accelerator": "cpu", "logger": "false", "default_root_dir": tmp_path, "limit_val_batches": 0}
    quiet = {"enable_progress_bar": "false", "enable_checkpointing": "false", "enable_model_summary": "false"}
    args = ["fit", f"--config={tmp_path / 'readme.yaml'}", *(f"--trainer.{name}={value}" for name, value in (flags | quiet).items())]
    cli = LightningCLI(Net, args=args, seed_everything_default=1, save_config_callback=None)
    (callback,) = [one for one in cli.trainer.callbacks if isinstance(one, ModuleMonitorCallback)]  # type: ignore[attr-defined]
    assert callback.last_record is not None
    keys = set(callback.last_record.values)
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
            assert (ROOT / words[words.index("-c") + 1]).is_file()
        elif words[0] == "lightning-module-monitor":
            assert words[1] in [one.NAME for one in COMMANDS]
            assert (ROOT / words[2]).is_file()  # tests/width_check/test_command.py runs it
        else:
            assert words == [".venv/bin/pre-commit", "install"], f"{command} is run by no test"


def test_make_demo_is_the_example_that_is_tested() -> None:
    """What ``make demo`` runs is what tests/test_examples.py runs."""
    done = subprocess.run(["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "examples/digits.py fit --config configs/digits.yaml" in done.stdout


def test_links_and_named_tests_of_the_readme_exist() -> None:
    """No dead link, and the test that holds a promise is there."""
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for path, _, name in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", README):
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(), name


def test_tables_of_the_readme_are_complete() -> None:
    """Every kind and every statistic is in its table."""
    for name in (*KINDS, *STATISTICS):
        assert f"`{name}`" in README, name


def test_the_model_of_the_snippets_is_a_lightning_module() -> None:
    """It is what a reader has."""
    assert isinstance(Model(), LightningModule)
