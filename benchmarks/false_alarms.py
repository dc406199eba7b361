"""How many healthy trainings other tools of this kind raise an alarm on.

pip install --no-deps torchmortem==0.1.1 training-doctor==0.1.0
python benchmarks/false_alarms.py

The trainings are those of tests/helpers/trainings.py that are healthy and have a loss. An alarm is anything above information.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.training import trainer  # type: ignore[import-not-found]  # a folder of the repository
from helpers.trainings import HEALTHY, UNKNOWN, run_seed  # type: ignore[import-not-found]  # a folder of the repository

from lightning_module_monitor import ModuleMonitorCallback


def _loss(outputs: STEP_OUTPUT) -> float:
    assert isinstance(outputs, Mapping)
    return float(outputs["loss"])


class Torchmortem(Callback):
    """The autopsy of a run, as its page tells to use it."""

    def __init__(self) -> None:
        self.alarms: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put its hooks on the model."""
        from torchmortem import Autopsy  # type: ignore[import-not-found]  # only installed for this

        self._autopsy = Autopsy(pl_module, optimizer=trainer.optimizers[0])
        self._autopsy.attach()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, *_batch: Any) -> None:
        """Give it the loss."""
        self._autopsy.step(loss=_loss(outputs))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what it warns of."""
        self._autopsy.detach()
        report = self._autopsy.get_report()
        self.alarms = [str(one.title) for one in report.findings if int(one.severity) > 0]


class TrainingDoctor(Callback):
    """The doctor of a run, with loss and learning rate."""

    def __init__(self) -> None:
        from training_doctor import Doctor  # type: ignore[import-not-found]  # only installed for this

        self._doctor = Doctor()
        self.alarms: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, *_batch: Any) -> None:
        """Give it the loss."""
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        found = self._doctor.log(trainer.global_step, loss=_loss(outputs), lr=float(rate))
        self.alarms += [str(one) for one in found if one.severity.value != "info"]


def main() -> None:
    """Run every training with each tool, and print how many raised an alarm."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)
    cases = {name: case for name, case in HEALTHY.items() if case.levels != UNKNOWN}
    alarms: dict[str, list[str]] = {"this": [], "torchmortem": [], "training-doctor": []}
    for name, case in cases.items():
        for tool, names in alarms.items():
            run_seed(0)
            callback: Any = {"torchmortem": Torchmortem, "training-doctor": TrainingDoctor}.get(tool, lambda: ModuleMonitorCallback(10))()
            options = {"max_steps": case.steps, "max_epochs": -1, "limit_val_batches": 0} | case.options
            trainer(Path(tempfile.mkdtemp()), [callback], **options).fit(case.make(), case.data())
            found = callback.findings if tool == "this" else callback.alarms
            if found:
                names.append(name)
    for tool, names in alarms.items():
        print(f"{tool}: alarms on {len(names)} of {len(cases)} healthy trainings ({', '.join(names)})")


if __name__ == "__main__":
    main()
