"""The way of a value through the package is short, and written down."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch
from helpers.plain_steps import record_of
from torch import nn

import lightning_module_monitor
from lightning_module_monitor import ModuleMonitor, Rule
from lightning_module_monitor.sinks.store.writer import Store

PACKAGE = Path(lightning_module_monitor.__file__).parent
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
MAX_FILES = 20


class Walk:
    """Notes the files of the package whose functions are called within the block, in their order."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}

    def __enter__(self) -> None:
        sys.setprofile(self._note)

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.files[path.relative_to(PACKAGE).as_posix()] = None


def test_an_activation_passes_few_files_and_contributing_names_them(tmp_path: Path) -> None:
    """From the forward hook to the HDF5 file an activation passes at most 20 files: those that CONTRIBUTING.md lists."""
    section = CONTRIBUTING.read_text(encoding="utf-8").partition("### The way of a value\n")[2]
    listed = set(re.findall(r"`([\w/]+\.py)`", section.partition("A value of the coordinate check")[0]))
    model, walk = nn.Sequential(nn.Linear(4, 3)), Walk()
    store = Store(tmp_path / "monitor.h5", configuration={}, keys=[])
    with ModuleMonitor(rules=[Rule(kinds="activation", sites="0", statistics="rms")]) as monitor:
        monitor.set_module(model)
        for step in range(2):  # in the first step kernels are compiled, and the file is opened
            monitor.begin_step(step)
            x = torch.randn(2, 4)
            with walk if step else Walk():
                model(x)
                record = record_of(monitor)
                store.write(record)
    store.close()
    assert "activation/0/rms" in record.values
    assert len(walk.files) <= MAX_FILES
    assert set(walk.files) == listed
