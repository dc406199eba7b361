"""The page on health says what the code does, and what it shows can be run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.training import Classifier, loader
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader

from lightning_module_monitor import ModuleMonitorCallback
from lightning_module_monitor.health.detectors import BUILT_IN, DETECTORS

PAGE = (Path(__file__).parents[2] / "docs" / "health.md").read_text()


def block(language: str) -> str:
    """The page's one block of a language."""
    [found] = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.mark.parametrize("watch", BUILT_IN.values(), ids=lambda watch: watch.name)
def test_every_watch_is_documented(watch: Any) -> None:
    """With its formula, from where on it speaks, its source, and what to try, in the words of the code."""
    section = PAGE.partition(f"### `{watch.name}`\n")[2].partition("\n#")[0]
    for said in (watch.formula, watch.limit, watch.source, watch.cure, watch.sources[0][1][0]):
        assert said in section


def test_every_detector_of_a_whole_run_is_documented() -> None:
    """In a row of the table, in the words of the code."""
    for one in DETECTORS.values():
        assert one.rule is not None or f"| {one.name} | {one.formula} | {one.limit} | {one.source} | {one.cure} |" in PAGE


def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The configuration through the real LightningCLI, and the store's findings afterwards."""

    class Net(Classifier):
        def __init__(self) -> None:
            super().__init__("mlp", lr=1.0)
            self.model.head = nn.Linear(1, 1)  # a module that the page names

        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

        val_dataloader = train_dataloader

    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.yaml").write_text(block("yaml").replace("every_n_steps: 20", "every_n_steps: 1\n        store: monitor.h5"))
    flags = {"max_steps": 4, "accelerator": "cpu", "logger": "false", "default_root_dir": tmp_path, "limit_val_batches": 0}
    quiet = {"enable_progress_bar": "false", "enable_checkpointing": "false", "enable_model_summary": "false"}
    args = ["fit", "--config=page.yaml", *(f"--trainer.{name}={value}" for name, value in (flags | quiet).items())]
    cli = LightningCLI(Net, args=args, seed_everything_default=1, save_config_callback=None)
    [callback] = [one for one in cli.trainer.callbacks if isinstance(one, ModuleMonitorCallback)]  # type: ignore[attr-defined]
    exec(block("python"))  # the page is ours
    printed = capsys.readouterr().out
    assert [f"{one.step} {one.name} {one.site} {one.words}" for one in callback.findings] == printed.splitlines()
