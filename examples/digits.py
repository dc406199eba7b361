"""A Lightning program configured in YAML: a small CNN on real digits, and what the monitor saw inside it.

Run it from the repository's root::

    python examples/digits.py fit --config configs/digits.yaml

The callback stands in the YAML file only. Nothing in this program knows of it before the run is over: then the summary is
read from the store that it wrote.
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import ArgsType, LightningCLI
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from lightning_module_monitor import Key, ModuleMonitorCallback, load_store

Batch = tuple[Tensor, Tensor]

TRAINER_DEFAULTS = {"default_root_dir": "demo_output", "accelerator": "cpu", "log_every_n_steps": 5, "enable_model_summary": False}
"""Where the YAML file says nothing else: a small run on the processor, with all output in one folder."""


class Digits(LightningDataModule):
    """1,797 scanned digits of 8 x 8 pixels, which come with scikit-learn.

    Args:
        batch_size: Images in a batch.
    """

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        dataset: Dataset[tuple[Tensor, ...]] = TensorDataset(pixels, torch.tensor(labels))
        self.train_set, self.val_set = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, self.batch_size)


class DigitsClassifier(LightningModule):
    """Three convolutions and a linear layer.

    Args:
        width: Channels of the first convolution.
        dropout: Share of the features that dropout zeroes.
        learning_rate: AdamW's.
    """

    def __init__(self, width: int = 16, dropout: float = 0.25, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        # Names instead of numbers: they are what the loggers, the store and the pictures call the layers.
        self.model = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False),
                norm1=nn.BatchNorm2d(width),
                relu1=nn.ReLU(inplace=True),
                conv2=nn.Conv2d(width, 2 * width, kernel_size=3, padding=1, bias=False),
                norm2=nn.BatchNorm2d(2 * width),
                relu2=nn.ReLU(inplace=True),
                pool2=nn.MaxPool2d(2),
                conv3=nn.Conv2d(2 * width, 4 * width, kernel_size=3, padding=1, bias=False),
                norm3=nn.BatchNorm2d(4 * width),
                relu3=nn.ReLU(inplace=True),
                pool3=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                dropout=nn.Dropout(dropout),
                head=nn.Linear(4 * width, 10),
            )
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self.model(images).argmax(dim=1) == labels).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class DigitsCLI(LightningCLI):
    """LightningCLI, which calls ``after_fit`` when training is over."""

    def after_fit(self) -> None:
        """Show what was monitored, and where all of it lies."""
        console = Console()
        accuracy = self.trainer.callback_metrics.get("val_accuracy")
        if accuracy is not None:
            console.print(f"\nvalidation accuracy: {accuracy:.3f}")
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined] # Trainer sets it where mypy does not look
            if isinstance(callback, ModuleMonitorCallback) and callback.store_path is not None:
                store_path = Path(callback.store_path)
                console.print(summary(store_path))
                console.print(directions(store_path, self.trainer.loggers), soft_wrap=True, highlight=False)


def summary(store_path: Path) -> Table:
    """What a store holds, one row for each kind.

    Args:
        store_path: Path of ``monitor.h5``.

    Returns:
        Number of sites, the site with the widest range of elements over all steps, and how many elements were not finite.
    """
    store = load_store(store_path)
    sites_by_kind: defaultdict[str, dict[str, None]] = defaultdict(dict)
    lowest: dict[tuple[str, str], float] = {}
    highest: dict[tuple[str, str], float] = {}
    nonfinite: dict[str, int] = {}
    all_steps: set[int] = set()
    for text in store:
        key = Key.parse(text)
        steps, values = store.series(text)
        finite = values[np.isfinite(values)]
        if not key.site or not finite.size:
            continue  # one of the monitor's own figures, or nothing to show
        kind = key._replace(site="", statistic="").format()  # with prefix and stage: validation/activation
        sites_by_kind[kind][key.site] = None
        all_steps.update(steps.tolist())
        if key.statistic == "min":
            lowest[kind, key.site] = finite.min()
        elif key.statistic == "max":
            highest[kind, key.site] = finite.max()
        elif key.statistic == "abs_max":
            # Bounds both sides, where minimum and maximum were not recorded.
            lowest.setdefault((kind, key.site), -finite.max())
            highest.setdefault((kind, key.site), finite.max())
        elif key.statistic == "nonfinite_count":
            nonfinite[kind] = nonfinite.get(kind, 0) + int(finite.sum())

    # As little around the columns as lets them fit into 80 characters.
    title = f"Seen at {len(all_steps)} steps, {min(all_steps)} to {max(all_steps)}"
    table = Table(title=title, title_justify="left", box=box.HORIZONTALS, show_edge=False, pad_edge=False, collapse_padding=True)
    for column in ("kind", "sites", "widest range", "of site", "non-finite"):
        table.add_column(column, justify="left" if column in ("kind", "of site") else "right", overflow="fold")
    for kind, sites in sites_by_kind.items():
        ranges = {site: (lowest[kind, site], highest[kind, site]) for site in sites if (kind, site) in highest}
        widest = max(ranges, key=lambda site: ranges[site][1] - ranges[site][0], default=None)
        extent = "" if widest is None else "{:.2g} .. {:.2g}".format(*ranges[widest])
        table.add_row(kind, str(len(sites)), extent, widest, str(nonfinite.get(kind, "")))
    return table


def directions(store_path: Path, loggers: Sequence[Logger]) -> str:
    """Where the output lies, and the commands that show more of it."""
    # The interpreter that runs this program, so that the commands work where no environment is activated.
    python = os.path.relpath(sys.executable) if Path.cwd() in Path(sys.executable).parents else sys.executable
    store = os.path.relpath(store_path)
    plot = [python, os.path.relpath(Path(__file__).with_name("plot_store.py")), store]
    places = [f"store: {store} ({store_path.stat().st_size / 1024:.0f} KiB)"]
    report = store_path.with_suffix(".html")
    if report.exists():
        places.append(f"report, to open in a browser: {os.path.relpath(report)}")
    commands = [shlex.join(plot)]
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            places.append(f"TensorBoard logs: {os.path.relpath(logger.log_dir)}")
            commands.append(shlex.join([python, "-m", "tensorboard.main", "--logdir", os.path.relpath(logger.log_dir)]))
    return "\n".join(["", *places, "", "Look further:", *(f"  {command}" for command in commands)])


def main(args: ArgsType = None) -> DigitsCLI:
    """Run the command line.

    Args:
        args: Arguments instead of those of the process.
    """
    # Loading 64 images of 8 x 8 pixels is no work for other processes.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # Lightning 2.6 calls what torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
    return DigitsCLI(DigitsClassifier, Digits, args=args, seed_everything_default=1, trainer_defaults=TRAINER_DEFAULTS)


if __name__ == "__main__":
    main()
