"""The pages on health: the reference is made from the code, and the blocks of the guide run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.documents import DOCUMENTS, generated, snippets
from helpers.lightning_package import LightningCLI
from helpers.training import Classifier, loader
from torch import nn
from torch.utils.data import DataLoader

from lightning_module_monitor import ModuleMonitorCallback
from lightning_module_monitor.health.causes import CAUSES
from lightning_module_monitor.health.detector import Detector
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.kinds import FACT_KIND

GUIDE, REFERENCE = "docs/health.md", "docs/reference/detectors.md"


@pytest.mark.parametrize("detector", DETECTORS.values(), ids=lambda detector: detector.name)
def test_every_detector_is_documented(detector: Detector) -> None:
    """In a section of its own, with its formula, limit, source and diagnoses; and in a table, with the values that it reads."""
    page = generated("detectors")
    section = page.partition(f"### {detector.name}\n")[2].partition("\n#")[0]
    for label, text in (
        ("Measures", detector.formula),
        ("Limit", detector.limit),
        ("Source", detector.source),
    ):
        assert f"- **{label}:** {text[0].upper()}{text[1:].removesuffix('.')}." in section
    causes = [cause.name for cause in CAUSES if detector.name in cause.evidence_for]
    assert all(f"`{name}`" in section.partition("- **Diagnoses:** ")[2].partition("\n")[0] for name in causes)
    [row] = [line for line in page.splitlines() if line.startswith(f"| [`{detector.name}`](#{detector.name}) |")]
    kinds, statistics = detector.sources[0]
    assert kinds[0] == FACT_KIND or (f"`{kinds[0]}/" in row and f"/{statistics[0]}`" in row)
    assert detector.num_needed >= 1
    assert f"| {detector.num_needed} | {detector.severity} |" in row
    assert detector.rule is None or detector.rule.phrase


def test_a_falling_loss_silences() -> None:
    """The section of a detector that is silent in healthy runs has the part by which the loss falls, in percent."""
    sections = [section.partition("\n") for section in generated("detectors").split("\n### ")[1:]]
    silent = {name: found[1] for name, _, text in sections if (found := re.search(r"\*\*Silent:\*\* .* (\d+) %", text))}
    of_halves = (
        "dead_units",
        "saturation",
        "growing_weights",
        "shrinking_weights",
        "growing_over_depth",
        "constant_input",
        "vanishing",
    )
    halves = dict.fromkeys(of_halves, "50")
    assert silent == halves | {"exploding": "10", "maximizing": "0"}


def test_the_reference_asks_for_the_generated_parts() -> None:
    """No other table there is maintained by hand than the measured ones."""
    page = DOCUMENTS[REFERENCE]
    assert re.findall(r"<!-- generated: (\w+) -->$", page, re.MULTILINE) == ["diagnoses", "detectors"]
    before, measured = page.split("## What decides\n")
    assert "|---" not in before
    assert "|---" not in measured.partition("## Details\n")[2]


def test_every_detector_decides_a_verdict() -> None:
    """The measured tables name all detectors and causes there are; no healthy run has a finding."""
    section = DOCUMENTS[REFERENCE].split("## What decides\n")[1].partition("## Details\n")[0]
    rows = [re.findall(r"`?(\w+)`?", line) for line in section.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [*DETECTORS, *dict.fromkeys(cause.name for cause in CAUSES)]
    for name, fires, decides, healthy in rows[: len(DETECTORS)]:
        assert int(fires) >= int(decides) > 0 == int(healthy), name
    never = [name for name, first, _healthy in rows[len(DETECTORS) :] if not int(first)]
    assert f"{['No', 'One', 'Two', 'Three', 'Four'][len(never)]} causes are the first diagnosis of none" in section
    assert {*never} <= {*re.findall(r"`(\w+)`", section.rpartition("|")[2])}


def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The configuration through the real LightningCLI, and the store's findings afterwards."""

    class Net(Classifier):
        def __init__(self) -> None:
            super().__init__("mlp", lr=1.0)
            self.model.head = nn.Linear(1, 1)  # a module that the page names

        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

        val_dataloader = train_dataloader

    [yaml], [python] = snippets("yaml", GUIDE), snippets("python", GUIDE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.yaml").write_text(yaml.replace("every_n_steps: 20", "every_n_steps: 1\n        store: monitor.h5"))
    flags = {"max_steps": 4, "accelerator": "cpu", "logger": "false", "default_root_dir": tmp_path, "limit_val_batches": 0}
    quiet = {"enable_progress_bar": "false", "enable_checkpointing": "false", "enable_model_summary": "false"}
    args = ["fit", "--config=page.yaml", *(f"--trainer.{name}={value}" for name, value in (flags | quiet).items())]
    cli = LightningCLI(Net, args=args, seed_everything_default=1, save_config_callback=None)
    [callback] = [one for one in cli.trainer.callbacks if isinstance(one, ModuleMonitorCallback)]  # type: ignore[attr-defined]
    exec(python)  # the page is ours
    printed = capsys.readouterr().out
    assert [f"{one.step} {one.name} {one.site} {one.words}" for one in callback.findings] == printed.splitlines()
