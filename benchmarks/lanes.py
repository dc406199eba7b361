"""One model in training, in a plain loop or in Lightning's Trainer; it advances by one step at a time."""

from __future__ import annotations

import itertools
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional as F

from observers import Observer
from own_time import own_time
from workloads import BFLOAT16, MIXED, Batch, Workload

SEED = 0
NUM_BATCHES = 8
"""Batches that are made in advance and used in turn."""
CPU = torch.device("cpu")
Within = AbstractContextManager[object]
"""What a step is taken within, as torch's profiler."""
NOTHING: Within = nullcontext()
LEARNING_RATE = 1e-4


def make_batches(workload: Workload, device: torch.device = CPU) -> list[Batch]:
    """The batches of a workload, the same in every call."""
    torch.manual_seed(SEED)
    batches = [workload.make_batch() for _ in range(NUM_BATCHES)]
    return [(inputs.to(device), classes.to(device)) for inputs, classes in batches]


def make_model(workload: Workload, device: torch.device) -> nn.Module:
    """The model of a workload, with the same weights in every call."""
    torch.manual_seed(SEED)
    with device:
        return workload.make_model()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The cross entropy of the model's logits."""
    inputs, classes = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), classes.flatten())


class Lane(ABC):
    """A variant with a model and an optimizer of its own."""

    model: nn.Module

    @abstractmethod
    def train_step(self, batch: Batch, within: Within = NOTHING) -> int:
        """Take one full training step.

        Args:
            batch: What to train on.
            within: Is entered and left by the thread that takes the step; torch's profiler sees the operations of its own thread alone.

        Returns:
            The number of values that the observer has computed.
        """

    @abstractmethod
    def own_seconds(self, batch: Batch) -> float:
        """Take one step, and return the CPU time of the observer's own calls."""

    @abstractmethod
    def close(self) -> None:
        """Detach the observer from the model."""


class LoopLane(Lane):
    """A plain training loop, with an observer."""

    def __init__(self, attach: Callable[[nn.Module], Observer], workload: Workload, precision: str, device: torch.device = CPU) -> None:
        self.precision = precision
        self.device = device
        self.model = make_model(workload, device)
        if precision == BFLOAT16:
            self.model.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.observer = attach(self.model)
        self.step = 0

    def train_step(self, batch: Batch, within: Within = NOTHING) -> int:
        """Take one full training step; returns the number of values."""
        with within:
            return self._step(*batch)

    def _step(self, inputs: Tensor, classes: Tensor) -> int:
        if self.precision == BFLOAT16 and inputs.is_floating_point():
            inputs = inputs.to(torch.bfloat16)
        self.step += 1
        self.observer.begin(self.step)
        with torch.autocast(self.device.type, torch.bfloat16) if self.precision == MIXED else nullcontext():
            self.observer.before_forward(inputs)
            loss = loss_of(self.model, (inputs, classes))
        loss.backward()
        self.observer.before_update()
        self.optimizer.step()
        num_values = self.observer.end()
        self.optimizer.zero_grad()
        return num_values

    def own_seconds(self, batch: Batch) -> float:
        """Take one step, and return the CPU time of the observer's own calls."""
        with own_time(self.observer, ("begin", "before_forward", "before_update", "end"), self.model) as own:
            self.train_step(batch)
        return own.seconds

    def close(self) -> None:
        """Detach the observer from the model."""
        self.observer.close()


class Parts(NamedTuple):
    """What a Trainer gets beside the model."""

    callbacks: list[Callback]
    logger: Logger | None = None


def make_trainer(parts: Parts, precision: str, device: torch.device, folder: str, max_steps: int = -1) -> Trainer:
    """A Trainer that shows nothing and saves no checkpoints."""
    return Trainer(
        accelerator=device.type,
        devices=1,
        precision=precision,  # type: ignore[arg-type]  # one of Lightning's names, from the command line
        max_epochs=1,
        max_steps=max_steps,
        logger=parts.logger or False,
        callbacks=parts.callbacks,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


class TrainerLane(Lane):
    """Lightning's Trainer in a thread of its own, which waits before each step until it is asked for the step."""

    def __init__(self, make_parts: Callable[[Path], Parts], workload: Workload, precision: str, device: torch.device = CPU) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.parts = make_parts(Path(self.folder.name))
        self.module = Training(make_model(workload, device))
        self.model = self.module.model
        self.trainer = make_trainer(
            self.parts._replace(callbacks=[Turns(self), *self.parts.callbacks]), precision, device, self.folder.name
        )
        self.batches = make_batches(workload, device)
        self.within, self.entered = NOTHING, ExitStack()
        self.turn, self.is_done = threading.Semaphore(0), threading.Semaphore(0)
        self.is_over = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._fit, daemon=True)
        self.thread.start()
        self._wait()

    def __iter__(self) -> Iterator[Batch]:
        """The batches in turn, until the lane is closed."""
        return itertools.takewhile(lambda _batch: not self.is_over, itertools.cycle(self.batches))

    def _fit(self) -> None:
        try:
            self.trainer.fit(self.module, self)
        except BaseException as error:  # it is raised again in the thread that waits
            self.error = error
        finally:
            self.entered.close()
            self.is_done.release()

    def take_turn(self) -> None:
        """Report that the step before is done, and wait for the next turn; in the Trainer's thread."""
        if self.is_over:
            return
        self.entered.close()
        self.is_done.release()
        self.turn.acquire()
        self.entered.enter_context(self.within)

    def _wait(self) -> None:
        self.is_done.acquire()
        if self.error is not None:
            raise self.error

    def train_step(self, _batch: Batch, within: Within = NOTHING) -> int:
        """Take a step with the Trainer's own next batch."""
        self.within = within
        self.turn.release()
        self._wait()
        return 0

    def own_seconds(self, batch: Batch) -> float:
        """Take one step, and return the CPU time of the first callback's own calls."""
        callback = self.parts.callbacks[0]
        events = [name for name in vars(type(callback)) if name.startswith("on_") and hasattr(Callback, name)]
        with own_time(callback, sorted(events, key="on_train_batch_start".__ne__), self.model) as own:
            self.train_step(batch)
        return own.seconds

    def close(self) -> None:
        """Let the Trainer finish, and remove its folder."""
        self.is_over, self.within = True, NOTHING
        self.turn.release()
        self.thread.join()
        self.folder.cleanup()


class Turns(Callback):
    """Makes the Trainer wait before each step; it must be the Trainer's first callback."""

    def __init__(self, lane: TrainerLane) -> None:
        self.lane = lane

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        """Between two steps."""
        self.lane.take_turn()


class Training(LightningModule):
    """The training of the plain loop as a LightningModule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The same optimizer as in the plain loop."""
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
