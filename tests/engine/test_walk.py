"""The way of a value through the package is short, and written down."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from helpers.lightning_package import Callback, CSVLogger, LightningModule, Trainer
from torch import Tensor, nn

import lightning_module_monitor
from lightning_module_monitor import ModuleMonitorCallback, Record, Rule, load_store
from lightning_module_monitor.record import NumbersOfStep

PACKAGE = Path(lightning_module_monitor.__file__).parent
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
MAX_FILES = 28
MAX_LINES = 450
STEP = 2
"""The step that is followed: in the first one kernels are compiled, and files are opened."""


class Walk:
    """Notes the files with a function that holds an activation, or its sum of squares or rms, among its arguments and variables."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._elements = np.empty(0)
        self._numbers: list[float] = []

    def follow(self, activation: Tensor) -> None:
        """Follow an activation with these elements."""
        self._elements = activation.detach().double().numpy().reshape(-1)
        squares = float((self._elements**2).sum())
        self._numbers = [squares, (squares / activation.numel()) ** 0.5]

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "return" and path.is_relative_to(PACKAGE):
            name = path.relative_to(PACKAGE).as_posix()
            if name not in self.files and any(map(self._is_it, [*frame.f_locals.values(), argument])):
                self.files[name] = None

    def _is_it(self, value: Any, depth: int = 3) -> bool:
        if isinstance(value, Tensor | np.ndarray):
            numbers = value.detach().double().numpy() if isinstance(value, Tensor) else np.asarray(value)
            is_activation = numbers.size == self._elements.size and np.allclose(numbers.reshape(-1), self._elements)
            return is_activation or (numbers.dtype == np.float64 and self._is_among(numbers))
        if isinstance(value, Record | NumbersOfStep):
            return self._is_among(value.numbers if isinstance(value, Record) else value.finished())
        if isinstance(value, float):
            return self._is_among([value])
        if depth and isinstance(value, Mapping):
            return any(self._is_it(item, depth - 1) for item in value.values())
        if depth and isinstance(value, list | tuple):
            return any(self._is_it(item, depth - 1) for item in value)
        return hasattr(value, "moments") and self._is_it(value.moments)

    def _is_among(self, numbers: Any) -> bool:
        return any(np.isclose(np.asarray(numbers, np.float64), number, rtol=1e-6, atol=0.0).any() for number in self._numbers)


class Tiny(LightningModule):
    """Two layers; the first one's activation is followed in one step, from its hooks to the end of the batch."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 3), nn.Linear(3, 1)
        self._walk = walk

    def training_step(self, batch: Tensor, _batch_idx: int) -> Tensor:
        if self.global_step == STEP:
            self._walk.follow(nn.functional.linear(batch, self.layer.weight, self.layer.bias))
            handle = self.layer.register_forward_pre_hook(lambda *_args: sys.setprofile(self._walk.note))
        hidden = self.layer(batch)
        if self.global_step == STEP:
            sys.setprofile(None)
            handle.remove()
        return self.head(hidden).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Profiled(Callback):
    """Begins to take notes before the callback ends the step of a batch, or ends to, if it is given no walk."""

    def __init__(self, walk: Walk | None) -> None:
        self._walk = walk

    def on_train_batch_end(self, trainer: Trainer, _module: LightningModule, _outputs: Any, _batch: Any, batch_idx: int) -> None:
        sys.setprofile(self._walk.note if self._walk is not None and batch_idx == STEP else None)


def test_an_activation_passes_few_files_and_contributing_names_them(tmp_path: Path) -> None:
    """From the forward hook by judge and logger to the HDF5 file at most 28 files hold it: those that CONTRIBUTING.md lists."""
    section = CONTRIBUTING.read_text(encoding="utf-8").partition("### The way of a value\n")[2]
    listed = set(re.findall(r"`([\w/]+\.py)`", section.partition("Other files")[0]))
    walk = Walk()
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds="activation", sites="layer", statistics="rms")])
    run = Trainer(
        max_steps=STEP + 1,
        accelerator="cpu",
        logger=CSVLogger(tmp_path),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=[Profiled(walk), callback, Profiled(None)],
    )
    try:
        run.fit(Tiny(walk), torch.utils.data.DataLoader(100 * torch.randn(12, 4), batch_size=4))  # type: ignore[arg-type]
    finally:
        sys.setprofile(None)
    assert callback.store_path is not None
    assert load_store(callback.store_path).series("activation/layer/rms")[1][STEP] == callback.last_record.values["activation/layer/rms"]  # type: ignore[union-attr]
    assert set(walk.files) == listed
    assert len(walk.files) <= MAX_FILES
    assert all(len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) <= MAX_LINES for name in walk.files)
