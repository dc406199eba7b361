"""The public calls as users write them: mypy checks that they are typed, and that wrong ones are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_module_monitor import (
    STATISTICS,
    ModuleMonitor,
    ModuleMonitorCallback,
    Record,
    Rule,
    Statistic,
    WidthCheck,
    coordinate_check,
    load_store,
)
from lightning_module_monitor.statistics.moments import Need


def kurtosis(x: Tensor) -> Tensor:
    """A function of a user's."""
    return ((x - x.mean()) / x.std()).pow(4).mean()


def callback() -> Trainer:
    """All options of the callback and of a rule."""
    rules = [
        Rule(kinds="activation", statistics="rms", types=[nn.Linear, "torch.nn.Conv2d"], leaf_modules=True),
        Rule(kinds=["parameter"], sites=[".*weight"], exclude="head", functions={"k": kurtosis, "m": MeanMetric()}, aggregate=torch.median),
        Rule(kinds="update", statistics=["ratio"], every_n_steps=lambda step: step % 7 == 0),
    ]
    one = ModuleMonitorCallback(
        every_n_steps="log",
        module="model",
        exclude=[".*dropout.*"],
        rules=rules,
        store="run.h5",
        callback_metrics=["update/.*"],
        progress_bar=True,
        stages=["train", "validate"],
        prefix="run1",
        max_logged_keys=100,
        on_error="raise",
        dry_run=True,
    )
    wrong = ModuleMonitorCallback(every_n_steps="sometimes")  # type: ignore[arg-type]
    record: Record | None = one.last_record
    assert record is None
    return Trainer(callbacks=[one, wrong])


def engine(model: nn.Module) -> Mapping[str, float]:
    """The engine in a plain loop."""
    STATISTICS["range"] = Statistic(Need.EXTREMES, lambda moments: moments.maximum - moments.minimum)
    with ModuleMonitor([0, 10], rules=[Rule(kinds="gradient", statistics="norm")]) as monitor:
        monitor.set_module(model)
        monitor.add_activation_metric("k", kurtosis, ".*", torch.max)
        begun: bool = monitor.begin_step(0)
        assert begun
        monitor.monitor_gradients(before_clip=True)
        record = monitor.end_step()
    return record.values if record is not None else {}


def read(path: str) -> NDArray[np.float64]:
    """The store."""
    steps, values = load_store(path).series("gradient/fc.weight/norm")
    return values[steps > 10]


def widths(make_module: Callable[[int], LightningModule], batches: DataLoader[Tensor]) -> pd.DataFrame:
    """The width check."""
    check: WidthCheck = coordinate_check(
        make_module,
        [128, 256],
        batches,
        seeds=[1, 2],
        steps=2,
        parametrization={"head": 0.0, ".*": {"effective_update": None}},
        terms="effective_update",
        confidence=0.9,
        tolerance=0.1,
        trainer={"precision": "bf16-mixed"},
        quiet=True,
    )
    wrong = coordinate_check(make_module, [128, 256], parametrization="mupp")  # type: ignore[arg-type]
    exponents: list[float] = [row.exponent for row in check if row.is_offending]
    check.figure().savefig("check.png")
    return check.to_frame() if exponents else wrong.to_frame()
