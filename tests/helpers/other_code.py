"""Code that runs the model in an event of a callback, or in a hook of the LightningModule, while a monitor records a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.lightning_package import Callback, LightningModule
from helpers.training import loader, seed, trainer
from lightning_module_monitor import ModuleMonitorCallback, Record, Rule

RULES = [
    Rule(kinds=["activation", "activation_gradient", "parameter", "gradient", "update"], statistics=["rms", "abs_max", "mean"]),
    Rule(kinds="activation", types="ReLU", statistics="dead_fraction"),
    Rule(kinds="attention_max_logit", statistics="max"),
]


def _names(base: type) -> list[str]:
    """The hooks of a base class."""
    return [name for name in dir(base) if name.startswith("on_")]


OF_CALLBACK = _names(Callback)
OF_MODULE = [
    *(name for name in _names(LightningModule) if name not in ("on_gpu",)),
    *("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "backward", "lr_scheduler_step", "log"),
    *("transfer_batch_to_device",),
]
"""Hooks, and methods that a module overrides."""


class Mixer(nn.Module):
    """Layers, attention, and a part that a checkpoint runs again."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.first, self.act, self.again, self.last = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        h = checkpoint(self.again, h, use_reentrant=False) if self.checkpointed and torch.is_grad_enabled() else self.again(h)
        h = F.scaled_dot_product_attention(h[None], h[None], h[None])[0]
        return self.last(h)


class Fitted(LightningModule):
    """Trains a mixer; ``visit`` is called in a hook of its own."""

    def __init__(self, event: str = "", visit: Callable[[LightningModule], None] | None = None, is_manual: bool = False) -> None:
        super().__init__()
        self.model, self.automatic_optimization = Mixer(), not is_manual
        if event:
            original = getattr(self, event)

            @functools.wraps(original)
            def visited(*args: Any, **kwargs: Any) -> Any:
                assert visit is not None
                visit(self)
                return original(*args, **kwargs)

            setattr(self, event, visited)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.model(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


class Visitor(Callback):
    """Runs the model in one event."""

    def __init__(self, event: str, visit: Callable[[LightningModule], None]) -> None:
        setattr(self, event, lambda _trainer, module, *_args: visit(module))


class Visits:
    """Runs a model on inputs that are far larger than those of training, as code does that draws samples."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, module: LightningModule) -> None:
        with torch.no_grad():
            module.model(torch.full((4, 6), 100.0))  # type: ignore[operator]
        if torch.is_grad_enabled():
            module.model(torch.full((4, 6), -100.0))  # type: ignore[operator]
        self.num += 1


def records_of(folder: Path, model: LightningModule, *callbacks: Callback, is_first: bool = True, **options: Any) -> list[Record]:
    """The records of four steps, and of validation, with other callbacks before or after the monitor."""
    records: list[Record] = []
    reference = "init" if model.automatic_optimization else None
    monitor = ModuleMonitorCallback(1, rules=RULES, store=False, on_error="raise", stages=["train", "validate"], reference=reference)
    seed()
    end = type("End", (Callback,), {"on_train_batch_end": lambda *_args: records.append(monitor.last_record)})()
    ordered = [monitor, *callbacks] if is_first else [*callbacks, monitor]
    trainer(folder, [*ordered, end], max_steps=4, limit_val_batches=2, val_check_interval=2, **options).fit(model, loader(), loader())
    return [*records, monitor.last_record]


def fresh(event: str = "", visit: Callable[[LightningModule], None] | None = None, is_manual: bool = False) -> Fitted:
    """A model with the same weights each time."""
    seed()
    return Fitted(event, visit, is_manual)


def is_within(event: str, is_manual: bool) -> bool:
    """Whether ``training_step`` itself calls a method, so that what it runs counts."""
    return event == "log" or (is_manual and event == "backward")


def assert_same(records: list[Record], others: list[Record]) -> None:
    """All values, to the last bit."""
    assert len(records) == len(others) > 4
    for one, other in zip(records, others, strict=True):
        assert one.step == other.step
        assert [*one.values] == [*other.values]
        assert [*one.values.values()] == pytest.approx([*other.values.values()], rel=0, abs=0, nan_ok=True)
