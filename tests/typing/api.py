"""The public calls as users write them: mypy checks that they are typed, and that wrong ones are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_module_monitor import (
    STATISTICS,
    Alert,
    Capture,
    Diagnosis,
    Event,
    Finding,
    GradientFlow,
    GradientGainMonitor,
    GradientNoise,
    Health,
    Histogram,
    ModuleMonitor,
    ModuleMonitorCallback,
    MonitorMixin,
    Need,
    Record,
    RefinedCoordinateCheck,
    Rule,
    Stash,
    Statistic,
    TorchWatcher,
    Tracker,
    WidthCheck,
    coordinate_check,
    load_store,
    monitor_scaled_dot_product_attention,
    track,
    write_report,
)


def kurtosis(x: Tensor) -> Tensor:
    """A function of a user's."""
    return ((x - x.mean()) / x.std()).pow(4).mean()


def findings(one: ModuleMonitorCallback) -> list[str]:
    """What was found to be wrong, in the run and in its store."""
    diagnoses: list[Diagnosis] = one.diagnose()
    assert all(diagnosis.advice for diagnosis in diagnoses)
    found: list[Finding] = one.findings + load_store("monitor.h5").findings()
    return [f"{finding.step} {finding.name} {finding.site}: {finding.words}" for finding in found]


def callback() -> Trainer:
    """All options of the callback and of a rule."""
    rules = [
        Rule(kinds="activation", statistics="rms", types=[nn.Linear, "torch.nn.Conv2d"], leaf_modules=True),
        Rule(kinds=["parameter"], sites=[".*weight"], exclude="head", functions={"k": kurtosis, "m": MeanMetric()}, aggregate=torch.median),
        Rule(kinds="update", statistics=["ratio"], every_n_steps=lambda step: step % 7 == 0),
        Rule(kinds="gradient", statistics="norm", per_module=["_root_", "blocks.*"]),
    ]
    one = ModuleMonitorCallback(
        every_n_steps={"minutes": 5},
        module="model",
        exclude=(".*dropout.*",),
        rules=rules,
        reference="init",
        health=Health(nonfinite="stop", watch=["dead_units"], then="checkpoint"),
        alerts=[Alert(keys="gradient/.*/norm", above=100, for_steps=3, then=["stop", "capture"])],
        rcc=True,
        save_reference=False,
        attention=True,
        gradient_flow=GradientFlow(blocks="model.blocks", norm="l2", thresholds=(0.5, 2.0)),
        gradient_noise=GradientNoise(per_module=["_root_", r"model\.blocks\.\d+"]),
        capture=Capture(sites="model.head", steps=range(0, 100, 10), kinds=["activation", "gradient"]),
        store="run.h5",
        report=True,
        callback_metrics=["update/.*"],
        progress_bar=True,
        stages=["train", "validate"],
        prefix="run1",
        max_logged_keys=100,
        max_overhead=0.02,
        compiled="keep",
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
        step: int | None = monitor.current_step
        assert begun
        assert step == 0
        monitor.current_step = 1  # type: ignore[misc]
        x = torch.zeros(2, 2, 3, 4)
        monitor_scaled_dot_product_attention(monitor, "attn", x, x, x, None, 0.0, True, activation=x)
        monitor.begin_backward(torch.tensor(256.0))
        monitor.begin_backward(256.0)
        monitor.monitor_gradients(before_clip=True)
        monitor.monitor_gradients(parameters=model.parameters(), scale=256.0)
        monitor.monitor_parameters(model.parameters())
        monitor.monitor_updates(model.parameters(), is_skipped=True)
        monitor.monitor_updates(optimizers=torch.optim.SGD(model.parameters()))
        record = monitor.end_step()
    return record.values if record is not None else {}


def compared(model: nn.Module, reference: nn.Module) -> None:
    """The reference and the coordinate check in a plain loop."""
    monitor = ModuleMonitor(cpu_offload=True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("cosine")
    monitor.add_parameter_difference_metric("largest", lambda current, other: (current - other).abs().max())
    check = RefinedCoordinateCheck(monitor, statistics=("rms", "token_norm"))
    with monitor.running_reference():
        reference(torch.ones(1))
    check.refined_coordinate_check()
    watched: list[nn.Module | None] = [monitor.module, monitor.reference_module, check.module, check.reference_module]
    assert watched[0] is model
    names: dict[nn.Module, str] = monitor.module_names
    assert names[model] == "_root_"
    monitor.module = model  # type: ignore[misc]
    monitor.reference_module = None  # type: ignore[misc]
    check.module = check.reference_module = None  # type: ignore[misc]
    has_one: bool = monitor.has_reference_module()
    if has_one:
        monitor.remove_reference_module()


def gains(blocks: nn.ModuleList, loss: Tensor) -> list[float | None]:
    """Gradient flow without a Trainer."""
    with GradientGainMonitor(blocks, norm_type="l2", strict_single_backward=True, eps=1e-30, thresholds=(0.5, 2.0)) as monitor:
        loss.backward()
        text: str = monitor.report()
        mean: float | None = monitor.summary_stats()["mean_gain"]
    assert len(text) > 0
    assert mean is not None
    GradientGainMonitor(3)  # type: ignore[arg-type]
    return monitor.gains()


def read(path: str) -> NDArray[np.float64]:
    """The store."""
    with load_store(Path(path)) as store:
        steps, values = store["gradient/fc.weight/norm"]
        keys: list[str] = [key for key in store if key in store]
    assert len(store) == len(keys)
    page: Path = write_report(path)
    write_report([path, store, Path(path)], page)
    write_report(3)  # type: ignore[arg-type]
    return values[steps > 10]


def drawn(path: str) -> list[Axes]:
    """Figures of the store."""
    plot = load_store(path).plot
    heat = plot.heatmap("activation", "rms", sites=".*relu")
    plot.heatmap("activation")  # type: ignore[call-arg]
    several = [
        plot.profile("gradient", "norm", steps=[0, 100]),
        plot.profile("gradient", "norm", steps=0, sites=".*weight"),
        plot.series("loss", "monitor/errors"),
        plot.series("gradient/.*/norm"),
        plot.histogram("gradient/fc.weight/hist", ax=heat),
        plot.attention("attention_sink", "mean", step=100),
    ]
    return [heat, *several]


def raw(path: str) -> list[Tensor]:
    """What was captured."""
    store = load_store(path)
    return [store.tensor(one.kind, one.site, one.step, call=one.call) for one in store.tensors(kind="activation", step=0)]


def tracked(model: nn.Module) -> Tracker:
    """Raw tensors in a list."""

    def keep(event: Event) -> Stash:
        return Stash(event.name, event.type, event.grad, None)

    with track(model, include="attention", stash=keep, max_bytes=10**9) as tracker:
        model(torch.ones(1))
    first: Stash = tracker[0]
    assert not first.grad
    tracker.to_frame(torch.linalg.vector_norm, stat_name="norm")
    return tracker


def histograms(path: str, record: Record) -> NDArray[np.int64]:
    """A histogram of a record, and those of the store."""
    one: Histogram = record.histograms["gradient/fc.weight/hist"]
    _steps, counts, edges = load_store(path).histogram("gradient/fc.weight/hist")
    assert np.array_equal(edges, one.edges)
    return counts + one.counts


def watch(model: nn.Module) -> None:
    """A Lightning logger is a run."""
    with TorchWatcher(model, CSVLogger("logs"), [nn.Linear], ["mean", "hist"], "debug", every_n_steps=10) as watcher:
        watcher.watch(3, track_activations=False, track_gradients=True, track_parameters=True, prefix="train")
        watcher.watch("3")  # type: ignore[arg-type]


class Own(nn.Module, MonitorMixin):
    """Values of a module's own."""

    def forward(self, x: Tensor) -> Tensor:
        """Log some."""
        monitor = self.get_module_monitor()
        if self.is_monitoring and monitor is not None:
            monitor.log_tensor("own/fc/half", x / 2)
        return x


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
        tolerance=0.1,
        trainer={"precision": "bf16-mixed"},
        quiet=True,
    )
    wrong = coordinate_check(make_module, [128, 256], parametrization="mupp")  # type: ignore[arg-type]
    exponents: list[float] = [row.exponent for row in check if row.is_offending]
    check.figure().savefig("check.png")
    check.plot("effective_update", ax=check.plot())
    return check.to_frame() if exponents else wrong.to_frame()
