"""The files that a release wrote, which all later versions must read; ``make released-files`` writes those of the present version."""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from helpers.lightning_package import Callback, LightningModule
from helpers.stores import copy_of_killed
from helpers.training import trainer
from lightning_module_monitor import ModuleMonitorCallback, Rule, __version__

FOLDER = Path(__file__).parents[1] / "stability"
STEPS, SAVED_AFTER, KILLED_AFTER, BATCH = 10, 5, 7, 8
RULES = [
    Rule(kinds=["parameter", "gradient"], statistics="norm"),
    Rule(kinds="activation", statistics=["rms", "hist"], sites="fc"),
    Rule(kinds="parameter_difference", statistics="ratio"),
]


class Net(LightningModule):
    """A linear layer whose weights and data come from formulas: no version of torch changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        with torch.no_grad():
            for parameter in self.fc.parameters():
                parameter.copy_(torch.arange(1.0, 1 + parameter.numel()).sin().view_as(parameter))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.fc(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Truth(Callback):
    """Norms by their formula in float64; a checkpoint after a step, and a copy of the store as a kill after another would leave it."""

    def __init__(self, folder: Path, callback: ModuleMonitorCallback) -> None:
        self.folder, self.callback = folder, callback
        self.series: defaultdict[str, list[float]] = defaultdict(list)
        self.initial: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            value = parameter.detach().double()
            initial = self.initial.setdefault(name, value.clone())
            self.series[f"parameter/{name}/norm"].append(value.norm().item())
            self.series[f"gradient/{name}/norm"].append(parameter.grad.double().norm().item())
            self.series[f"parameter_difference/{name}/ratio"].append(((value - initial).norm() / initial.norm()).item())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.series["context/loss"].append(outputs["loss"].item())
        if batch_idx + 1 == SAVED_AFTER:
            trainer.save_checkpoint(self.folder / "saved.ckpt")
        if batch_idx + 1 == KILLED_AFTER:
            copy_of_killed(Path(str(self.callback.store_path)), self.folder / "killed.h5")


def batches() -> DataLoader[Any]:
    """One batch, again and again: a resumed epoch begins with its first batch."""
    x = torch.arange(BATCH * 4.0).view(-1, 4).mul(0.7).sin().repeat(STEPS, 1)
    return DataLoader(TensorDataset(x, torch.arange(BATCH).remainder(3).repeat(STEPS)), BATCH)


def monitor() -> ModuleMonitorCallback:
    """The callback of the run."""
    return ModuleMonitorCallback(1, rules=RULES, reference="init", capture={"sites": "fc", "steps": [0, 9]})


def write() -> None:
    """Train, and pack what the run wrote and the truth into the archive of this version."""
    with tempfile.TemporaryDirectory() as name:
        folder, callback = Path(name), monitor()
        truth = Truth(folder, callback)
        trainer(folder, [callback, truth], max_steps=STEPS).fit(Net(), batches())
        (folder / "truth.json").write_text(json.dumps({"version": __version__, "series": truth.series}))
        with tarfile.open(FOLDER / f"{__version__}.tar.xz", "w:xz", preset=9) as archive:
            for file in ("monitor.h5", "monitor.tensors.h5", "killed.h5", "killed.h5.journal", "saved.ckpt", "truth.json"):
                archive.add(folder / file, file)


if __name__ == "__main__":
    write()
