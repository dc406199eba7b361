"""Training runs over several processes, one after the other: each of these runs all that it is told to, and keeps what they return.

Run as a script, by every rank: ``scenarios.py FOLDER NAME...``
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from helpers.training import Classifier, trainer
from helpers.zoo import batches
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed
from torch.utils.data import DataLoader

from lightning_module_monitor import ModuleMonitorCallback, Record

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Keep(Callback):
    """Keeps the weights that every step begins with, and its record."""

    def __init__(self, monitor: ModuleMonitorCallback) -> None:
        self.monitor = monitor
        self.records: list[Record] = []
        self.states: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_args: Any) -> None:
        self.states.setdefault(trainer.global_step, copy.deepcopy(pl_module.state_dict()))

    def on_train_batch_end(self, *_args: Any) -> None:
        record = self.monitor.last_record
        if record is not None and all(record is not kept for kept in self.records):
            self.records.append(record)

    on_validation_epoch_end = on_train_batch_end


class Said(logging.Handler):
    """Keeps what the monitor says."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """What the monitor says within the block."""
    said, logger = Said(), logging.getLogger("lightning.pytorch.module_monitor")
    logger.addHandler(said)
    try:
        yield said.messages
    finally:
        logger.removeHandler(said)


@contextmanager
def counting_collectives() -> Iterator[list[str]]:
    """The collectives that Python code starts within the block, by name; those of DDP's reducer are not among them."""
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier", "reduce", "gather")
    calls: list[str] = []
    originals = {name: getattr(distributed, name) for name in names}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(distributed, name, counted(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(distributed, name, original)


def sizes(rank: int, world: int, steps: int = 3, micro_batches: int = 2) -> list[int]:
    """How many samples each micro-batch of a rank has: as uneven as can be."""
    return [2 + rank + (2 * number + rank) % world for number in range(steps * micro_batches)]


def data(rank: int, world: int, **options: int) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a rank."""
    return batches(*sizes(rank, world, **options), seed=10 + rank)


def fit(
    folder: Path, module: LightningModule, callback: ModuleMonitorCallback, micro_batches: list[Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Train by DDP, and return what there is to see of it."""
    keep = Keep(callback)
    defaults: dict[str, Any] = {"devices": WORLD, "strategy": DDPStrategy(find_unused_parameters=True), "use_distributed_sampler": False}
    run = trainer(folder / f"rank_{RANK}", [callback, keep], **(defaults | options))
    batches_of_rank: DataLoader[Any] = DataLoader(data(RANK, WORLD) if micro_batches is None else micro_batches, batch_size=None)
    with listening() as said:
        run.fit(module, batches_of_rank, batches_of_rank)
    return {
        "records": keep.records,
        "states": keep.states,
        "said": said,
        "files": sorted(str(path.relative_to(folder)) for path in (folder / f"rank_{RANK}").rglob("*") if path.is_file()),
        "state": {name: value.clone() for name, value in module.state_dict().items()},
    }


EVERYTHING = ["mean", "std", "norm", "rms", "min", "max", "abs_mean", "zero_fraction", "nonfinite_count", "token_norm", "token_rms", "hist"]


def _rules() -> list[Any]:
    from lightning_module_monitor import Rule

    kinds = ["activation", "activation_gradient", "parameter", "gradient_before_clip", "gradient", "update"]
    return [Rule(kinds=kinds, statistics=EVERYTHING), Rule(kinds="update", statistics="ratio")]


def zoo(model: str) -> Callable[[Path], dict[str, Any]]:
    """Every statistic of every kind, over uneven micro-batches, with clipping."""

    def scenario(folder: Path) -> dict[str, Any]:
        torch.manual_seed(RANK)  # DDP gives every rank the weights of the first
        callback = ModuleMonitorCallback(every_n_steps=1, rules=_rules(), on_error="raise")
        module = Classifier(model, torch.optim.SGD, lr=0.1)
        return fit(folder, module, callback, accumulate_grad_batches=2, gradient_clip_val=0.5, max_epochs=1)

    return scenario


SCENARIOS: dict[str, Callable[[Path], Any]] = {f"zoo_{name}": zoo(name) for name in ("cnn", "outputs", "shared", "frozen")}


def main(folder: Path, names: list[str]) -> None:
    """Run scenarios. One that raises is told of, and the next one runs."""
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        try:
            result = SCENARIOS[name](folder / name)
        except BaseException as error:  # told to the test
            traceback.print_exc()
            result = error if isinstance(error, Exception) else RuntimeError(repr(error))
        try:
            torch.save(result, folder / f"{name}.{RANK}.pt")
        except Exception as error:  # an exception that cannot be pickled
            torch.save(RuntimeError(f"{result!r}: {error!r}"), folder / f"{name}.{RANK}.pt")
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
