"""Precisions: values without the scale that a GradScaler puts on the loss, and steps that it skips."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import Callback, LightningModule, MixedPrecision, Trainer
from helpers.operations import no_host_reads
from helpers.textbook import histogram, slack, textbook
from helpers.tiny import KeepRecords
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from helpers.zoo import batches, make
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F

from lightning_module_monitor import Capture, GradientFlow, ModuleMonitor, ModuleMonitorCallback, Record, Rule, load_store

KINDS = ["activation", "activation_gradient", "parameter", "gradient", "gradient_before_clip", "update"]
NAMES = ["mean", "std", "norm", "abs_max", "zero_fraction", "nonfinite_count", "skewness", "kurtosis"]
LAYERS = ["model.layers.0", "model.layers.3"]
WEIGHT = "model.layers.0.weight"


def scaled(init_scale: float, **options: Any) -> MixedPrecision:
    """16-mixed on a CPU, with a scale that changes after every step."""
    return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=init_scale, growth_interval=1, **options))


class Truth(Callback):
    """Raw tensors of every step, divided in float64 by the scaler's scale at that time."""

    def __init__(self) -> None:
        self.now: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self.steps: list[dict[tuple[str, str], list[Tensor]]] = []
        self.dtypes: set[torch.dtype] = set()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scaler = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        self.scale = scaler.get_scale
        self.handles = [pl_module.get_submodule(site).register_forward_hook(self.look(site)) for site in LAYERS]

    def look(self, site: str) -> Any:
        def hook(module: nn.Module, _args: Any, output: Tensor) -> None:
            if module.training:
                self.now["activation", site].append(output.detach().double())
            if output.requires_grad:
                output.register_hook(keep_gradient)

        def keep_gradient(gradient: Tensor) -> None:
            self.dtypes.add(gradient.dtype)
            self.now["activation_gradient", site].append(gradient.double() / self.scale())

        return hook

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        weight = pl_module.get_parameter(WEIGHT)
        assert weight.grad is not None
        factor = self.scale() if getattr(optimizer, "_step_supports_amp_scaling", False) else 1.0
        self.now["parameter", WEIGHT] = [weight.detach().double()]
        self.now["gradient_before_clip", WEIGHT] = [weight.grad.double() / factor]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_args: Any) -> None:
        if ("parameter", WEIGHT) in self.now:
            weight = pl_module.get_parameter(WEIGHT)
            assert weight.grad is not None
            self.now["gradient", WEIGHT] = [weight.grad.double()]  # a fused optimizer, too, has unscaled it by now
            self.now["update", WEIGHT] = [weight.detach().double() - self.now["parameter", WEIGHT][0]]
            self.steps.append(self.now)
            self.now = defaultdict(list)


def whole(tensors: list[Tensor]) -> Tensor:
    """All elements of several tensors."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def assert_true(record: Record, truth: dict[tuple[str, str], list[Tensor]]) -> None:
    """Every statistic is that of the raw tensors."""
    for (kind, site), tensors in truth.items():
        x = whole(tensors)
        for name in NAMES:
            near = 1e-6 * slack(name, x)
            expected = pytest.approx(textbook(name, x), rel=2e-6, abs=near, nan_ok=True)
            assert record.values[f"{kind}/{site}/{name}"] == expected, f"{kind} {site} {name}"


@pytest.mark.parametrize("init_scale", [256.0, 300.0])
def test_values_do_not_depend_on_the_scale_of_the_loss(init_scale: float, tmp_path: Path) -> None:
    """All kinds, histograms, gains and raw tensors, under accumulation and clipping; the scale doubles with every step."""
    rules = [
        Rule(kinds=KINDS, sites=[*LAYERS, WEIGHT], statistics=NAMES),
        Rule(kinds="activation_gradient", sites=LAYERS, statistics="hist"),
    ]
    more: dict[str, Any] = {
        "gradient_flow": GradientFlow(blocks=LAYERS),
        "capture": Capture(sites=[LAYERS[0], WEIGHT], steps=1, kinds=["activation_gradient", "gradient"]),
    }
    callback = ModuleMonitorCallback(every_n_steps=1, rules=rules, store=str(tmp_path / "monitor.h5"), **more)
    records, truth = KeepRecords(callback), Truth()
    plugin = scaled(init_scale)
    run = trainer(tmp_path, [callback, records, truth], accumulate_grad_batches=3, gradient_clip_val=0.02, plugins=[plugin])
    seed()
    run.fit(Classifier("mlp"), loader(40), loader(8))
    assert truth.dtypes == {torch.float16}  # otherwise this would show less
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 16 * init_scale
    assert [record.step for record in records.records] == [0, 1, 2, 3]
    for record, step in zip(records.records, truth.steps, strict=True):
        assert_true(record, step)
        first, second = (textbook("norm", whole(step["activation_gradient", site])) for site in LAYERS)
        assert record.values["gradient_flow/model.layers.0-model.layers.3/gain"] == pytest.approx(first / second, rel=2e-6)
        assert record.values["monitor/step_skipped"] == 0
        assert record.values["monitor/errors"] == 0
        if init_scale == 256:  # no rounding: every element is in its bin
            for site in LAYERS:
                expected = histogram(whole(step["activation_gradient", site]))
                assert (record.histograms[f"activation_gradient/{site}/hist"].counts == expected.counts).all()
    store = load_store(tmp_path / "monitor.h5")
    captured = [store.tensor("activation_gradient", LAYERS[0], step=1, call=call) for call in range(3)]
    expected_tensors = truth.steps[1]["activation_gradient", LAYERS[0]]
    for tensor, expected_tensor in zip(captured, expected_tensors, strict=True):
        torch.testing.assert_close(tensor.double(), expected_tensor, rtol=1e-7, atol=0)
    torch.testing.assert_close(store.tensor("gradient", WEIGHT, step=1).double(), truth.steps[1]["gradient", WEIGHT][0], rtol=0, atol=0)


@pytest.mark.parametrize("init_scale", [256.0, 300.0])
def test_optimizers_that_unscale_themselves(init_scale: float, tmp_path: Path) -> None:
    """Fused optimizers get scaled gradients; both gradient kinds are unscaled. Lightning allows no clipping then."""
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[Rule(kinds=KINDS, sites=[*LAYERS, WEIGHT], statistics=NAMES)])
    records, truth = KeepRecords(callback), Truth()
    run = trainer(tmp_path, [callback, records, truth], accumulate_grad_batches=2, plugins=[scaled(init_scale)], max_steps=4)
    seed()
    run.fit(Classifier("mlp", torch.optim.AdamW, fused=True), loader(40), loader(8))
    assert len(records.records) == len(truth.steps) == 4
    for record, step in zip(records.records, truth.steps, strict=True):
        assert_true(record, step)
        assert record.values["monitor/step_skipped"] == 0


class Meddles(Callback):
    """Changes weights at the end of a step, before the monitor's event."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_args: Any) -> None:
        with torch.no_grad():
            pl_module.get_parameter(WEIGHT).add_(1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_is_no_update(fused: bool, tmp_path: Path) -> None:
    """The first step overflows: ``step_skipped`` 1, update 0 even if other code moves weights, gradients unchanged."""
    rules = [Rule(kinds=KINDS, sites=[*LAYERS, WEIGHT], statistics=NAMES), Rule(kinds="update", statistics="ratio")]
    callback = ModuleMonitorCallback(every_n_steps=1, rules=rules, callback_metrics="run1/monitor/step_skipped", prefix="run1")
    records, truth = KeepRecords(callback), Truth()
    callbacks = [Meddles(), callback, records, truth] if not fused else [callback, records, truth]
    plugin = scaled(2.0**40, backoff_factor=2.0**-32)
    run = trainer(tmp_path, callbacks, plugins=[plugin], max_steps=2)
    seed()
    run.fit(Classifier("mlp", torch.optim.AdamW, fused=fused), loader(40), loader(8))
    skipped, stepped = records.records
    assert set(skipped.values) == set(stepped.values)
    assert (skipped.values["run1/monitor/step_skipped"], stepped.values["run1/monitor/step_skipped"]) == (1, 0)
    assert run.callback_metrics["run1/monitor/step_skipped"] == 0
    for name in ("abs_max", "norm", "nonfinite_count", "ratio"):
        assert skipped.values[f"run1/update/{WEIGHT}/{name}"] == 0
    assert stepped.values[f"run1/update/{WEIGHT}/norm"] > 0
    for kind in ("gradient", "gradient_before_clip", "activation_gradient"):
        site = LAYERS[1] if kind == "activation_gradient" else WEIGHT
        bad = int((~torch.isfinite(whole(truth.steps[0][kind, site]))).sum())
        assert skipped.values[f"run1/{kind}/{site}/nonfinite_count"] == bad > 0
        assert stepped.values[f"run1/{kind}/{site}/nonfinite_count"] == 0
    parameter = truth.steps[0]["parameter", WEIGHT][0]
    assert skipped.values[f"run1/parameter/{WEIGHT}/norm"] == pytest.approx(textbook("norm", parameter), rel=1e-6)


def test_without_a_scaler_there_is_no_key_of_skipped_steps(tmp_path: Path) -> None:
    """The key exists only with an enabled scaler."""
    for options in ({"precision": "bf16-mixed"}, {"plugins": [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", enabled=False))]}):
        callback = ModuleMonitorCallback(every_n_steps=1)
        trainer(tmp_path, [callback], max_steps=1, **options).fit(Classifier("mlp"), loader(), loader(8))
        assert callback.last_record is not None
        assert "monitor/step_skipped" not in callback.last_record.values


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_scaler_changes_nothing_of_the_training(model: str, fused: bool, tmp_path: Path) -> None:
    """Promise 1, with skipped steps and a scale that changes."""
    runs = []
    for monitored in (False, True):
        seed()
        module, keep, plugin = Classifier(model, torch.optim.AdamW, fused=fused), KeepLosses(), scaled(2.0**34, backoff_factor=2.0**-8)
        rules = [Rule(kinds=KINDS, statistics=[*NAMES, "hist"]), Rule(kinds=["activation_difference"], statistics="norm")]
        options: dict[str, Any] = {"attention": True, "reference": "init", "rcc": True, "capture": Capture(sites=".*", steps=[1, 3])}
        callback = ModuleMonitorCallback(every_n_steps=2, rules=rules, on_error="raise", **options)
        run = trainer(tmp_path, [callback, keep] if monitored else [keep], plugins=[plugin], max_epochs=2, accumulate_grad_batches=2)
        run.fit(module, loader(shuffle=True), loader(8))
        assert plugin.scaler is not None
        runs.append((keep, module.state_dict(), plugin.scaler.state_dict()))
    (plain, weights, scale), (monitored, monitored_weights, monitored_scale) = runs
    assert scale == monitored_scale
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, monitored.losses, strict=True))
    assert plain.random_states == monitored.random_states
    assert all(torch.equal(weights[name], monitored_weights[name]) for name in weights)


def test_a_plain_loop_passes_its_scale() -> None:
    """As a tensor, without a host read in a hook, or a number: the statistics are, to the last digit, those without a scaler."""
    rules = [Rule(kinds=["activation_gradient", "gradient"], statistics=[*NAMES, "hist"])]
    results = []
    for how in ("no scaler", "tensor", "number"):
        model = make("mlp").eval()
        scaler = GradScaler("cpu", init_scale=1024.0, enabled=how != "no scaler")
        factor = scaler.scale(torch.ones(()))
        scale = {"no scaler": None, "tensor": factor, "number": 1024.0}[how]
        with ModuleMonitor(rules=rules) as monitor:
            monitor.set_module(model)
            monitor.begin_step(0)
            for x, y in batches(3, 5):
                loss = scaler.scale(F.cross_entropy(model(x), y))
                with no_host_reads():
                    monitor.begin_backward(scale)
                    loss.backward()
                    monitor.end_backward()
                    monitor.after_micro_batch()
            with no_host_reads():
                monitor.monitor_gradients(scale=scale)
            record = monitor.end_step()
        assert record is not None
        assert record.values["activation_gradient/layers.0/norm"] > 0
        results.append((record.values, {key: histogram.counts.tolist() for key, histogram in record.histograms.items()}))
    assert results[0] == results[1] == results[2]


def test_gains_of_backward_passes_with_different_scales() -> None:
    """A step may have several backward passes, each with its scale; gains are those of the unscaled losses."""
    results = []
    for scales in ((None, None), (4.0, 1024.0)):
        model = make("mlp").eval()
        with ModuleMonitor(gradient_flow=GradientFlow(blocks="layers")) as monitor:
            monitor.set_module(model)
            monitor.begin_step(0)
            for (x, y), scale in zip(batches(3, 5), scales, strict=True):
                loss = F.cross_entropy(model(x), y) * (scale or 1.0)
                monitor.begin_backward(scale)
                loss.backward()
                monitor.after_micro_batch()
            record = monitor.end_step()
        assert record is not None
        results.append(record.values)
    assert results[0]["gradient_flow/layers.0-layers.1/gain"] > 0
    assert results[0] == results[1]
