"""W2 of the benchmarks in a Trainer, and the operations of torch in each of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from helpers.lightning_package import Callback, LightningModule, Trainer

NUM_TENSORS = 129 + 128 + 128
"""Activations, parameters and gradients of the model, each measured once in a monitored step."""


class Deep(LightningModule):
    """64 times a linear layer and a ReLU, 385 recorded tensors."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _layer in range(64) for layer in (nn.Linear(128, 128), nn.ReLU())]
        self.model = nn.Sequential(*layers)

    def training_step(self, batch: Sequence[Any], _batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(folder: Path, callbacks: Sequence[Callback], num_steps: int, **options: Any) -> None:
    """Train the model, on a CPU unless ``options`` say otherwise."""
    torch.manual_seed(0)
    batches = [(torch.randn(64, 128), torch.randint(128, (64,))) for _step in range(num_steps)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(**({"accelerator": "cpu"} | quiet | options), max_steps=num_steps, default_root_dir=folder, callbacks=[*callbacks])
    trainer.fit(Deep(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]  # a list is a dataset


class _Begin(Callback):
    """Profiles each step, from the first callback's ``on_train_batch_start`` to the last one's ``on_train_batch_end``."""

    def __init__(self, activity: ProfilerActivity) -> None:
        self.activity = activity
        self.counts: list[int] = []

    def on_train_batch_start(self, *_args: object) -> None:
        self.profile = profile(activities=[self.activity])
        self.profile.__enter__()

    def end(self) -> None:
        self.profile.__exit__(None, None, None)
        is_counted = _is_operation if self.activity is ProfilerActivity.CPU else _is_kernel
        self.counts.append(sum(map(is_counted, self.profile.events())))


def _is_operation(event: Any) -> bool:
    return bool(event.name.startswith("aten::"))


def _is_kernel(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))


class _End(Callback):
    def __init__(self, begin: _Begin) -> None:
        self.begin = begin

    def on_train_batch_end(self, *_args: object) -> None:
        self.begin.end()


def operations_of_steps(
    callback: Callback | None, folder: Path, activity: ProfilerActivity = ProfilerActivity.CPU, **options: Any
) -> tuple[int, int]:
    """Operations of torch in a monitored step and in another one, of a run that is monitored in every second step.

    They are the rows ``aten::`` of torch's profiler, nested ones included: the most of four steps of each sort. With the activity
    ``CUDA`` they are the kernels that are launched.
    """
    begin = _Begin(activity)
    callbacks = [begin, *([] if callback is None else [callback]), _End(begin)]
    fit(folder, callbacks, 12, **options)
    return max(begin.counts[4::2]), max(begin.counts[5::2])
