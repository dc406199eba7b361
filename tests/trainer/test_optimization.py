"""Ways to optimize: by hand with several optimizers, closures that are called many times, parameters that are frozen or come late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import BaseFinetuning, Callback, LightningModule, MixedPrecision, Trainer
from helpers.textbook import slack, textbook
from helpers.tiny import KeepRecords, measured
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torchmetrics import MetricCollection

from lightning_module_monitor import Capture, ModuleMonitor, ModuleMonitorCallback, Rule, load_store

KINDS = ["activation", "activation_gradient", "parameter", "gradient", "update"]
NAMES = ["mean", "std", "norm", "abs_max", "zero_fraction", "skewness", "kurtosis"]
RawTensors = dict[tuple[str, str], list[Tensor]]


def assert_true(values: Any, truth: RawTensors) -> None:
    """Every statistic is that of the raw tensors."""
    for (kind, site), tensors in truth.items():
        x = torch.cat([tensor.double().reshape(-1) for tensor in tensors])
        for name in NAMES:
            near = 1e-6 * slack(name, x)
            assert values[f"{kind}/{site}/{name}"] == pytest.approx(textbook(name, x), rel=2e-6, abs=near, nan_ok=True), (
                f"{kind} {site} {name}"
            )


class Pair(LightningModule):
    """An encoder and a decoder with an optimizer each, and a scale without optimizer; keeps every tensor by the simplest means."""

    def __init__(self, way: Callable[[Pair, list[Tensor], int], None] | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 3)
        self.free = nn.Parameter(torch.ones(3))
        self.way = way
        self.truth: list[RawTensors] = []
        for name in ("encoder", "decoder"):
            self.get_submodule(name).register_forward_hook(self._look(name))

    def _look(self, site: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            if self._trainer is None or not self.trainer.training:
                return
            now = self.truth[-1]
            now["activation", site].append(output.detach().clone())
            if output.requires_grad:
                output.register_hook(lambda gradient: now["activation_gradient", site].append(gradient.double() / self.scale()))

        return hook

    def scale(self) -> float:
        """The factor of the loss."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else scaler.get_scale()

    def loss(self, batch: list[Tensor]) -> Tensor:
        """The optimizers of both."""
        return F.cross_entropy((self.decoder(torch.tanh(self.encoder(batch[0]))) * self.free).float(), batch[1])

    def keep(self, kind: str, optimizer: Any, of: Callable[[Tensor], Tensor]) -> None:
        """Keep tensors of the optimizer's parameters at its first step in this batch."""
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.named_parameters():
            if id(parameter) in ids and not self.truth[-1][kind, name]:
                self.truth[-1][kind, name] = [of(parameter).detach().double().clone()]

    def step(self, optimizer: Any, factor: float = 1.0) -> None:
        """Step, and keep the tensors before and after."""
        before = {id(parameter): parameter.detach().double().clone() for parameter in self.parameters()}
        self.keep("parameter", optimizer, lambda parameter: parameter)
        self.keep("gradient", optimizer, lambda parameter: parameter.grad.double() / factor)  # type: ignore[union-attr]
        optimizer.step()
        self.keep("update", optimizer, lambda parameter: parameter.double() - before[id(parameter)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.truth.append(defaultdict(list))
        assert self.way is not None
        self.way(self, batch, batch_idx)
        self.truth[-1]["parameter", "free"] = [self.free.detach().double()]
        return torch.zeros(())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.encoder.parameters(), lr=0.01), torch.optim.SGD(self.decoder.parameters(), lr=0.1)


def in_turn(self: Pair, batch: list[Tensor], batch_idx: int) -> None:
    """A backward pass and a step for each."""
    for optimizer in self.optimizers():
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.step(optimizer, self.scale())


def toggled(self: Pair, batch: list[Tensor], batch_idx: int) -> None:
    """While an optimizer has its turn, the other's parameters are frozen."""
    for optimizer in self.optimizers():
        self.toggle_optimizer(optimizer)
        self.manual_backward(self.loss(batch))
        self.step(optimizer)
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)


def several_steps(self: Pair, batch: list[Tensor], batch_idx: int) -> None:
    """The decoder steps three times, with several backward passes each, before the encoder does."""
    encoder, decoder = self.optimizers()
    for optimizer in (decoder, decoder, encoder, decoder):
        optimizer.zero_grad()
        for _time in range(2):
            self.manual_backward(self.loss(batch) / 2)
        self.step(optimizer)


def one_backward(self: Pair, batch: list[Tensor], batch_idx: int) -> None:
    """One backward pass for both, and clipping before they step."""
    encoder, decoder = self.optimizers()
    self.manual_backward(self.loss(batch))
    for optimizer in (encoder, decoder):
        self.clip_gradients(optimizer, 0.01, "norm")
        self.step(optimizer)
        optimizer.zero_grad()


def past_lightning(self: Pair, batch: list[Tensor], batch_idx: int) -> None:
    """The optimizers themselves, without what Lightning puts around them: their hooks are all that tells of them."""
    for optimizer in self.optimizers(use_pl_optimizer=False):
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.step(optimizer)


def closures(self: Pair, batch: list[Tensor], batch_idx: int) -> None:
    """Backward passes run inside of the steps."""
    for optimizer in self.optimizers():
        before = {id(other): other.detach().double().clone() for other in self.parameters()}

        def closure(optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.keep("parameter", optimizer, lambda parameter: parameter)
            self.keep("gradient", optimizer, lambda parameter: parameter.grad)  # type: ignore[arg-type,return-value]
            return loss

        optimizer.step(closure=closure)
        self.keep("update", optimizer, lambda parameter, before=before: parameter.double() - before[id(parameter)])  # type: ignore[misc]


def run_pair(way: Any, folder: Path, options: dict[str, Any] | None = None, **monitoring: Any) -> tuple[Pair, KeepRecords]:
    """Train a pair for five batches; with the monitor if anything is wished for."""
    callback = ModuleMonitorCallback(every_n_steps=1, store=str(folder / "monitor.h5"), **monitoring)
    records = KeepRecords(callback)
    seed()
    module = Pair(way)
    trainer(folder, [callback, records] if monitoring else [], limit_train_batches=5, limit_val_batches=0, **(options or {})).fit(
        module, loader()
    )
    return module, records


@pytest.mark.parametrize(
    "way",
    [
        in_turn,
        toggled,
        several_steps,
        one_backward,
        past_lightning,
        closures,
    ],
)
def test_each_parameter_at_its_own_optimizers_event(way: Any, tmp_path: Path) -> None:
    """Every step (a batch) has the same keys, from the first step of each optimizer and all backward passes. Training is the same."""
    rules = [Rule(kinds=KINDS, sites=r"encoder.*|decoder.*", statistics=NAMES), Rule(kinds="parameter", sites="free", statistics=NAMES)]
    module, records = run_pair(way, tmp_path, rules=rules, capture=Capture(sites="decoder.weight", steps=2, kinds=["gradient", "update"]))
    assert [record.step for record in records.records] == [0, 1, 2, 3, 4]
    num_keys = len(NAMES) * (2 * 2 + 3 * 4 + 1) + 1
    for record, truth in zip(records.records, module.truth, strict=True):
        assert len(measured(record)) == num_keys
        assert len(truth) == 2 * 2 + 3 * 4 + 1
        assert_true(record.values, truth)
        assert record.values["monitor/errors"] == 0
    store = load_store(tmp_path / "monitor.h5")
    assert len(store.tensors()) == 2
    torch.testing.assert_close(
        store.tensor("gradient", "decoder.weight", step=2).double(), module.truth[2]["gradient", "decoder.weight"][0]
    )
    torch.testing.assert_close(store.tensor("update", "decoder.weight", step=2).double(), module.truth[2]["update", "decoder.weight"][0])
    plain, _none = run_pair(way, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), module.state_dict().values(), strict=True))
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in module.trainer.optimizers)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_under_manual_optimization(fused: bool, tmp_path: Path) -> None:
    """Gradients of the loss without its scale, which changes between the optimizers of a batch; also if an optimizer unscales."""

    class Scaled(Pair):
        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(part.parameters(), lr=0.01, fused=fused) for part in (self.encoder, self.decoder)]

    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=300.0, growth_interval=1))
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[Rule(kinds=KINDS, sites="encoder.*|decoder.*", statistics=NAMES)], store=False)
    records = KeepRecords(callback)
    seed()
    module = Scaled(in_turn)
    trainer(tmp_path, [callback, records], limit_train_batches=3, limit_val_batches=0, plugins=[plugin]).fit(module, loader())
    assert len(records.records) == 3
    for record, truth in zip(records.records, module.truth, strict=True):
        del truth["parameter", "free"]
        assert_true(record.values, truth)
        assert record.values["monitor/step_skipped"] == 0
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 300.0 * 2**6


def test_one_of_two_optimizers_skips(tmp_path: Path) -> None:
    """The decoder's gradient overflows: its update is 0, the encoder's is not, and the step counts as skipped."""

    def overflows(self: Pair, batch: list[Tensor], batch_idx: int) -> None:
        encoder, decoder = self.optimizers()
        for optimizer, factor in ((encoder, 1.0), (decoder, float("inf") if batch_idx == 1 else 1.0)):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) * factor)
            optimizer.step()

    rules = [Rule(kinds=["gradient", "update"], sites=".*weight", statistics=["norm", "nonfinite_count"])]
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=16.0))
    _module, records = run_pair(overflows, tmp_path, {"plugins": [plugin]}, rules=rules)
    for record in records.records:
        is_bad = record.step == 1
        assert record.values["monitor/step_skipped"] == is_bad
        assert (record.values["update/decoder.weight/norm"] == 0) == is_bad
        assert record.values["update/encoder.weight/norm"] > 0
        assert record.values["gradient/decoder.weight/nonfinite_count"] == (12 if is_bad else 0)
        assert record.values["gradient/encoder.weight/nonfinite_count"] == 0


def test_the_first_of_two_steps_is_skipped(tmp_path: Path) -> None:
    """The first step counts: its gradients, and an update of 0, though the second step moves the weights."""

    def tries_again(self: Pair, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            for factor in (float("inf"), 1.0):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch) * factor)
                optimizer.step()

    rules = [Rule(kinds=["gradient", "update"], sites=".*weight", statistics=["norm", "nonfinite_count"])]
    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**20))
    _module, records = run_pair(tries_again, tmp_path, {"plugins": [plugin]}, rules=rules)
    for record in records.records:
        assert record.values["monitor/step_skipped"] == 1
        for name, size in (("encoder", 24), ("decoder", 12)):
            assert record.values[f"update/{name}.weight/norm"] == 0
            assert record.values[f"gradient/{name}.weight/nonfinite_count"] == size


def test_accumulation_by_hand(tmp_path: Path) -> None:
    """A batch without a step of an optimizer has its parameters, updates of 0 and no gradients, which are not complete."""

    def accumulates(self: Pair, batch: list[Tensor], batch_idx: int) -> None:
        encoder, decoder = self.optimizers()
        self.manual_backward(self.loss(batch))
        for optimizer, every in ((encoder, 1), (decoder, 2)):
            if (batch_idx + 1) % every == 0:
                self.step(optimizer)
                optimizer.zero_grad()

    rules = [Rule(kinds=KINDS, sites=r"encoder.*|decoder.*", statistics=NAMES)]
    module, records = run_pair(accumulates, tmp_path, rules=rules)
    for record, truth in zip(records.records, module.truth, strict=True):
        del truth["parameter", "free"]
        assert_true(record.values, truth)
        steps = record.step % 2 == 1
        assert ("gradient/decoder.weight/norm" in record.values) == steps
        assert (record.values["update/decoder.weight/norm"] > 0) == steps
        assert record.values["parameter/decoder.weight/norm"] > 0
        assert record.values["gradient/encoder.weight/norm"] > 0
    assert [len(truth) for truth in module.truth] == [10, 16, 10, 16, 10]


def test_one_optimizer_by_hand_that_does_not_always_step(tmp_path: Path) -> None:
    """As with two optimizers; its parameters are those of the whole model."""

    class Single(Classifier):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]))
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

    callback = ModuleMonitorCallback(1, rules=[Rule(kinds=["parameter", "gradient", "update"], statistics="norm")], store=False)
    records = KeepRecords(callback)
    trainer(tmp_path, [callback, records], limit_train_batches=4, limit_val_batches=0).fit(Single("mlp"), loader(), loader(8))
    assert [record.step for record in records.records] == [0, 1, 2, 3]
    for record in records.records:
        assert len(measured(record)) == (13 if record.step % 2 else 9)
        assert (record.values["update/model.layers.0.weight/norm"] > 0) == bool(record.step % 2)


class ShrinksToo(torch.optim.SGD):
    """Halves all parameters after the step of its base class."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)
        return loss


def test_a_step_around_that_of_a_base_class_is_one_step(tmp_path: Path) -> None:
    """The hooks of torch run for both, once an object of the base class exists; the update is what the whole step moves."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds="update", statistics="norm")], store=False)
    module = Classifier("mlp", ShrinksToo, lr=0.0)
    before = {name: float(value.detach().double().norm()) for name, value in module.named_parameters()}
    trainer(tmp_path, [callback], max_steps=1).fit(module, loader(), loader(8))
    assert callback.last_record is not None
    for name, norm in before.items():
        assert callback.last_record.values[f"update/{name}/norm"] == pytest.approx(norm / 2, rel=1e-6)


def test_a_reference_under_manual_optimization_is_that_of_a_submodule(tmp_path: Path) -> None:
    """At step 0 nothing differs before the first optimizer has stepped; later it does. The coordinate check adds up."""

    def once(self: Pair, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    rules = [Rule(kinds=["activation_difference", "parameter_difference"], statistics="norm")]
    monitoring: dict[str, Any] = {"rules": rules, "reference": "init", "rcc": True, "module": "decoder"}
    _module, records = run_pair(once, tmp_path, **monitoring)
    first, later = records.records[0].values, records.records[4].values
    keys = [key for key in first if "difference" in key or "effective_update" in key]
    assert len(keys) >= 4
    assert all(first[key] == 0 for key in keys)
    assert all(later[key] > 0 for key in keys)
    assert first["monitor/errors"] == later["monitor/errors"] == 0


def test_of_many_calls_of_a_closure_the_first_counts(tmp_path: Path) -> None:
    """LBFGS under automatic optimization: values of all kinds are those of the first call, whose loss differs here."""

    class Counting(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.calls = 0

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.calls += 1
            if self.calls == 1:
                self.first = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
            return super().training_step([batch[0] * self.calls, batch[1]], batch_idx)

    callback = ModuleMonitorCallback(1, rules=[Rule(kinds=KINDS, sites="model(.weight)?", statistics=NAMES)], store=False)
    records = KeepRecords(callback)
    seed()
    module = Counting(nn.Linear(6, 3), torch.optim.LBFGS, lr=0.1, max_iter=4)
    trainer(tmp_path, [callback, records], max_steps=1, limit_val_batches=0).fit(module, loader(), loader(8))
    assert module.calls > 1
    x, y = next(iter(loader()))
    weight, bias = (module.first[name].double().requires_grad_() for name in ("weight", "bias"))
    output = F.linear(x.double(), weight, bias)
    output.retain_grad()
    F.cross_entropy(output, y).backward()
    assert output.grad is not None
    assert weight.grad is not None
    truth = {
        ("activation", "model"): [output.detach()],
        ("activation_gradient", "model"): [output.grad],
        ("parameter", "model.weight"): [weight.detach()],
        ("gradient", "model.weight"): [weight.grad],
    }
    for (kind, site), (tensor,) in truth.items():
        assert records.records[0].values[f"{kind}/{site}/norm"] == pytest.approx(textbook("norm", tensor), rel=1e-5), kind
    moved = module.model.weight.detach() - module.first["weight"]
    assert records.records[0].values["update/model.weight/norm"] == pytest.approx(textbook("norm", moved), rel=1e-5)


class ByHand(Classifier):
    """Steps its optimizer itself, twice a batch."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        for _time in range(2):
            self.optimizers().zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.optimizers().step()
        return {"loss": loss.detach()}


@pytest.mark.parametrize(
    "way",
    [
        "by hand",
        "LBFGS",
    ],
)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_monitoring_changes_nothing(model: str, way: str, tmp_path: Path) -> None:
    """Promise 1 with everything on: losses, weights, buffers and random states are the same."""
    runs = []
    for monitored in (False, True):
        rules = [
            Rule(kinds=KINDS, statistics=[*NAMES, "hist"]),
            Rule(kinds="activation", functions={"noise": torch.rand_like}),
        ]
        more: dict[str, Any] = {"reference": "init", "rcc": True, "attention": True, "capture": Capture(sites=".*", steps=[1, 2])}
        callback = ModuleMonitorCallback(2, rules=rules, module="model", on_error="raise", **more)
        keep = KeepLosses()
        seed()
        module: Classifier = ByHand(model) if way == "by hand" else Classifier(model, torch.optim.LBFGS, lr=0.1, max_iter=3)
        run = trainer(tmp_path, [callback, keep] if monitored else [keep], val_check_interval=3)
        run.fit(module, loader(shuffle=True), loader(8))
        runs.append((keep, module.state_dict()))
    (plain, weights), (monitored, monitored_weights) = runs
    assert len(plain.losses) == 10
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, monitored.losses, strict=True))
    assert plain.random_states == monitored.random_states
    assert all(torch.equal(weights[name], monitored_weights[name]) for name in weights)


class Unfreezes(BaseFinetuning):
    """The first layer is frozen for the first epoch, and then gets a further parameter group."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.get_submodule("model.layers.0"))

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.get_submodule("model.layers.0"), optimizer, lr=0.01)


def test_parameters_that_are_frozen_first(tmp_path: Path) -> None:
    """While frozen: no gradient, update 0. Then both, in late columns of the store. Training is the same."""
    runs = []
    for monitored in (True, False):
        callback = ModuleMonitorCallback(1, rules=[Rule(kinds=["parameter", "gradient", "update"], statistics="norm")])
        records, keep = KeepRecords(callback), KeepLosses()
        seed()
        callbacks = [Unfreezes(), callback, records, keep] if monitored else [Unfreezes(), keep]
        run = trainer(tmp_path, callbacks, max_epochs=2, limit_train_batches=3, limit_val_batches=0)
        run.fit(Classifier("mlp", torch.optim.SGD, lr=0.1), loader(), loader(8))
        runs.append(keep.losses)
        if monitored:
            assert len(run.optimizers[0].param_groups) == 2
            assert callback.store_path is not None
            series = records.series()
            store = load_store(callback.store_path)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    name = "model.layers.0.weight/norm"
    assert list(series[f"parameter/{name}"]) == [0, 1, 2, 3, 4, 5]
    assert list(series[f"gradient/{name}"]) == [3, 4, 5]
    assert [value > 0 for value in series[f"update/{name}"].values()] == [False] * 3 + [True] * 3
    for step in (3, 4, 5):  # plain SGD: the update is the gradient times the group's learning rate
        assert series[f"update/{name}"][step] == pytest.approx(0.01 * series[f"gradient/{name}"][step], rel=1e-4)
        assert series["update/model.layers.3.weight/norm"][step] == pytest.approx(
            0.1 * series["gradient/model.layers.3.weight/norm"][step], rel=1e-4
        )
    steps, values = store.series(f"gradient/{name}")
    assert dict(zip(steps.tolist(), values.tolist(), strict=True)) == series[f"gradient/{name}"]


class Replaces(Callback):
    """A new last layer, and a new optimizer, for the second epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            pl_module.get_submodule("model").add_module("2", nn.Linear(8, 3))
            trainer.optimizers = [pl_module.configure_optimizers()]  # type: ignore[list-item]


def test_a_replaced_module_has_no_more_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Values of removed parameters are not recorded for their replacements; one message is logged, and all other values are recorded."""
    layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds=KINDS, statistics="norm")], reference="init", rcc=True)
    records = KeepRecords(callback)
    run = trainer(tmp_path, [callback, records, Replaces()], max_epochs=2, limit_train_batches=2, limit_val_batches=0)
    run.fit(Classifier(layers, torch.optim.SGD, lr=0.1), loader(), loader(8))
    series = records.series()
    for kind in KINDS:
        of_parameters = ".weight" if kind in ("parameter", "gradient", "update") else ""
        assert list(series[f"{kind}/model.2{of_parameters}/norm"]) == [0, 1]
        assert list(series[f"{kind}/model.0{of_parameters}/norm"]) == [0, 1, 2, 3]
    assert set(series["monitor/errors"].values()) == {0.0}
    assert caplog.text.count("model.2 was taken out of the model while it trains") == 1


class LossesOfStages(Classifier):
    """A loss that training does not call, metrics, and layers: all replaced by new ones when a checkpoint is loaded."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.optim.SGD, lr=0.1)
        self.criterion, self.metrics = nn.MSELoss(), MetricCollection([])
        self.replaced: list[str] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.criterion, self.metrics = nn.MSELoss(), MetricCollection([])
        for name in self.replaced:
            self.model.add_module(name, nn.Linear(6, 8) if name == "0" else nn.Linear(8, 3))


@pytest.mark.parametrize("replaced", [[], ["0"], ["0", "2"]], ids=len)
def test_modules_that_are_replaced_before_the_first_step_are_observed(
    replaced: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As every model of darts replaces some where a run is resumed: the new ones have the names, and no line is logged."""
    run = trainer(tmp_path, [], max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    run.fit(LossesOfStages(), loader(), loader(8))
    run.save_checkpoint(tmp_path / "end.ckpt")
    resumed = LossesOfStages()
    resumed.replaced = replaced
    callback = ModuleMonitorCallback(1)
    run = trainer(tmp_path, [callback], max_epochs=2, limit_train_batches=2, limit_val_batches=0)
    run.fit(resumed, loader(), loader(8), ckpt_path=tmp_path / "end.ckpt")
    assert not [message for message in caplog.messages if "taken out" in message]
    assert callback.last_record is not None
    for name, gradient in ((name, parameter.grad) for name, parameter in resumed.model.named_parameters()):
        assert gradient is not None
        assert callback.last_record.values[f"gradient/model.{name}/norm"] == pytest.approx(gradient.double().norm().item(), rel=1e-6)


class Wraps(torch.optim.Optimizer):
    """An optimizer around another one that does not call ``Optimizer.__init__``, as that of Opacus: it takes no hooks."""

    def __init__(self, original: torch.optim.Optimizer) -> None:
        self.original = original

    param_groups = property(lambda self: self.original.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.original.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.original.defaults)  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.original.step(closure)


class Wrapped(Classifier):
    """Has such an optimizer."""

    def configure_optimizers(self) -> Any:
        return Wraps(super().configure_optimizers())


def test_an_optimizer_that_takes_no_hooks(tmp_path: Path) -> None:
    """What its steps leave is read at the end of the batch: all values are those of the optimizer inside."""
    records = []
    for make in (Classifier, Wrapped):
        torch.manual_seed(0)
        callback = ModuleMonitorCallback(1, rules=[Rule(kinds=KINDS, statistics="norm"), Rule(kinds="optimizer_state", statistics="norm")])
        module = make(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.optim.SGD, lr=0.1, momentum=0.9)
        records.append(KeepRecords(callback))
        run = trainer(tmp_path, [callback, records[-1]], max_epochs=1, limit_train_batches=4, limit_val_batches=0)
        run.fit(module, loader(), loader(8))
    plain, wrapped = (keep.series() for keep in records)
    assert wrapped == plain
    assert [*wrapped["update/model.0.weight/norm"]] == [0, 1, 2, 3]
    assert wrapped["update/model.0.weight/norm"][3] > 0
    assert set(wrapped["monitor/errors"].values()) == {0.0}


class Twice(Wrapped):
    """Steps twice in a batch, by hand."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False
        self.moved: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer, before = self.optimizers(), self.model[0].weight.detach().clone()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]))
            optimizer.step()
        self.moved.append((self.model[0].weight.detach() - before).double().norm().item())


def test_an_optimizer_that_takes_no_hooks_and_steps_twice(tmp_path: Path) -> None:
    """The update is the whole change of the batch."""
    callback = ModuleMonitorCallback(1, rules=Rule(kinds="update", statistics="norm"))
    records, module = KeepRecords(callback), Twice(nn.Sequential(nn.Linear(6, 3)), torch.optim.SGD, lr=0.1)
    trainer(tmp_path, [callback, records], max_epochs=1, limit_train_batches=3, limit_val_batches=0).fit(module, loader(), loader(8))
    assert [*records.series()["update/model.0.weight/norm"].values()] == pytest.approx(module.moved, rel=1e-4)
    assert min(module.moved) > 0


def test_a_scaler_and_an_optimizer_that_takes_no_hooks(tmp_path: Path) -> None:
    """Whether the scaler skips is not known, and not recorded; a skipped step has no update."""
    callback = ModuleMonitorCallback(1, rules=Rule(kinds="update", statistics="norm"))
    records, module = KeepRecords(callback), Wrapped(nn.Sequential(nn.Linear(6, 3)), torch.optim.SGD, lr=0.1)
    precision = MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=1e38))
    run = trainer(tmp_path, [callback, records], max_epochs=1, limit_train_batches=2, limit_val_batches=0, plugins=[precision])
    run.fit(module, loader(), loader(8))
    assert set(records.series()["update/model.0.weight/norm"].values()) == {0.0}
    assert "monitor/step_skipped" not in records.series()


@pytest.mark.parametrize("way", ["lazy", "configure_model"])
def test_layers_that_are_built_late(way: str, tmp_path: Path) -> None:
    """A lazy layer gets its shape in the first forward pass; that step is monitored, and has all kinds of the layer."""

    class Late(Classifier):
        def configure_model(self) -> None:
            if way == "configure_model" and isinstance(self.model, nn.Identity):
                self.model = nn.Linear(6, 3)

    runs = []
    for monitored in (True, False):
        callback = ModuleMonitorCallback(1, rules=[Rule(kinds=KINDS, sites="model.*", statistics=NAMES)], store=False)
        records, keep = KeepRecords(callback), KeepLosses()
        seed()
        module = (Late if way == "configure_model" else Classifier)(
            nn.LazyLinear(3) if way == "lazy" else nn.Identity(), torch.optim.SGD, lr=0.1
        )
        trainer(tmp_path, [callback, records, keep] if monitored else [keep], max_steps=2, limit_val_batches=0).fit(
            module, loader(), loader(8)
        )
        runs.append((keep.losses, module.model.weight))
        if monitored:
            kept = records.records
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert torch.equal(runs[0][1], runs[1][1])
    assert kept[0].values.keys() == kept[1].values.keys()
    for record, (x, y) in zip(kept, loader(), strict=False):
        assert len(measured(record)) == len(NAMES) * (2 + 2 * 3) + 1
        norms = [record.values[f"{kind}/model.weight/norm"] for kind in ("gradient", "update")]
        assert norms[1] == pytest.approx(0.1 * norms[0], rel=1e-4)
        assert len(x) == len(y) == 4


def test_a_plain_loop_with_two_optimizers() -> None:
    """``parameters`` selects the optimizer's parameters; each parameter is recorded once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    x, y = next(iter(loader()))
    truth: RawTensors = defaultdict(list)
    with ModuleMonitor(rules=[Rule(kinds=["parameter", "gradient", "update"], statistics=NAMES)]) as monitor:
        monitor.set_module(model)
        monitor.begin_step(0)
        for index, (part, optimizer) in enumerate(zip(model, optimizers, strict=True)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            parameters = list(part.parameters())
            monitor.monitor_gradients(parameters=parameters)
            monitor.monitor_parameters(parameters)
            before = {name: parameter.detach().clone() for name, parameter in part.named_parameters()}
            optimizer.step()
            monitor.monitor_updates(parameters)
            for name, parameter in part.named_parameters():
                assert parameter.grad is not None
                truth["parameter", f"{index}.{name}"] = [before[name]]
                truth["gradient", f"{index}.{name}"] = [parameter.grad.clone()]
                truth["update", f"{index}.{name}"] = [parameter.detach() - before[name]]
        record = monitor.end_step()
    assert record is not None
    assert len(measured(record)) == len(NAMES) * 12 + 1
    assert_true(record.values, truth)
