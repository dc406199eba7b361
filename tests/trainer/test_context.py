"""The context of monitored steps (loss, learning rates, samples, logged metrics) equals what the module itself has observed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import CSVLogger, EarlyStopping, MixedPrecision, Trainer
from helpers.operations import no_host_reads
from helpers.tiny import KeepRecords, Tiny, fit, loader, trainer
from torch import Tensor
from torch.amp import GradScaler
from torch.utils.data import DataLoader

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.kernels import elements
from lightning_module_monitor.keys import Key
from lightning_module_monitor.nonfinite import magnitudes
from lightning_module_monitor.report.stored_run import read_run
from lightning_module_monitor.trainer import logged_metrics, step

NORMS = [Rule(kinds="parameter", statistics="norm")]


class Losses(Tiny):
    """Keeps the loss of every call of ``training_step``, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[int, list[float]] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.model(batch[0]).pow(2).mean()
        self.losses.setdefault(self.trainer.fit_loop.epoch_loop._batches_that_stepped, []).append(loss.item())
        return loss


def monitored(folder: Path, module: Any, every_n_steps: int = 1, **options: Any) -> KeepRecords:
    """The records of a run."""
    keep = KeepRecords(ModuleMonitorCallback(every_n_steps=every_n_steps, rules=NORMS, on_error="raise"))
    fit(folder, [keep.monitor, keep], lambda: module, **options)
    return keep


@pytest.mark.parametrize(
    "options",
    [
        {"limit_val_batches": 0},
        {"accumulate_grad_batches": 4},
        {"plugins": [MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=4096.0, growth_interval=1))]},
        {"precision": "64-true"},
    ],
)
def test_the_loss_of_a_step_is_the_mean_of_what_training_step_returned(options: dict[str, Any], tmp_path: Path) -> None:
    """The mean over its micro-batches, also for a shorter last step, without accumulation's 1/N and the scaler's factor."""
    module = Losses()
    keep = monitored(tmp_path, module, max_epochs=2, **options)
    assert len(keep.records) == len(module.losses) >= 4
    expected = {step: sum(losses) / len(losses) for step, losses in module.losses.items()}
    assert keep.series()["context/loss"] == pytest.approx(expected, rel=1e-6)
    steps, values = load_store(keep.monitor.store_path).series("context/loss")
    assert dict(zip(steps.tolist(), values.tolist(), strict=True)) == keep.series()["context/loss"]


class TwoLosses(Losses):
    """Manual optimization: two losses and two optimizers a step, the second with two groups that have different rates."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rates: dict[int, list[float]] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        for optimizer, weight in ((first, 1.0), (second, 3.0)):
            loss = weight * self.model(batch[0]).pow(2).mean()
            self.losses.setdefault(step, []).append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.rates.setdefault(step, []).extend(group["lr"] for group in optimizer.param_groups)
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.model[2].weight, "lr": 0.02}, {"params": self.model[2].bias, "lr": 0.03}]
        return [torch.optim.SGD(self.model[0].parameters(), lr=0.1), torch.optim.SGD(groups)]


def test_manual_optimization_has_the_losses_of_manual_backward_and_the_rates_of_all_groups(tmp_path: Path) -> None:
    """The mean of both losses; the rates that the optimizers used, not the rates after the step."""
    module = TwoLosses()
    keep = monitored(tmp_path, module, every_n_steps=2)
    series = keep.series()
    assert [record.step for record in keep.records] == [0, 2, 4]
    assert series["context/loss"] == pytest.approx({step: sum(module.losses[step]) / 2 for step in (0, 2, 4)}, rel=1e-6)
    for number, name in enumerate(["lr", "lr_1", "lr_2"]):
        assert series[f"context/{name}"] == {step: module.rates[step][number] for step in (0, 2, 4)}
    assert "context/lr_3" not in series


class GetsAGroup(Tiny):
    """The first of two optimizers gets a further group for the second epoch, as from a callback that unfreezes layers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.model(batch[0]).pow(2).mean())
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.model[0].weight], lr=0.1), torch.optim.SGD(self.model[2].parameters(), lr=0.02)]

    def on_fit_start(self) -> None:
        if self.trainer.ckpt_path is not None:
            self.add_group()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.trainer.ckpt_path is None:
            self.add_group()

    def add_group(self) -> None:
        self.trainer.optimizers[0].add_param_group({"params": [self.model[0].bias], "lr": 0.5})


def test_the_rate_of_a_group_keeps_its_key_if_another_optimizer_gets_a_group(tmp_path: Path) -> None:
    """The new group has the next number, also in a resumed run, in which it is there from the first step on; so have the facts."""
    options: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 0}
    for first_epochs in (2, None):
        callback = ModuleMonitorCallback(1, rules=NORMS)
        run = trainer(tmp_path, [callback], max_epochs=first_epochs or 3, **options)
        module = GetsAGroup()
        run.fit(module, loader(), loader(1), ckpt_path=None if first_epochs else tmp_path / "two.ckpt")
        run.save_checkpoint(tmp_path / "two.ckpt")
    assert callback.store_path is not None
    store = load_store(callback.store_path)
    expected = {"lr": (range(6), 0.1), "lr_1": (range(6), 0.02), "lr_2": (range(2, 6), 0.5)}
    for name, (steps, rate) in expected.items():
        assert [values.tolist() for values in store.series(f"context/{name}")] == [list(steps), [rate] * len(steps)]
    groups = {name: facts.group for name, facts in store.facts()[-1][1].parameters.items()}
    assert groups == {"model.0.weight": 0, "model.0.bias": 2, "model.2.weight": 1, "model.2.bias": 1}
    assert [group.number for group in store.facts()[-1][1].groups] == [0, 1, 0]


def test_parameter_groups_are_stored_with_their_names(tmp_path: Path) -> None:
    """The group's own ``name``, as LearningRateMonitor uses it; empty without one, or where it is no text."""

    class Named(Losses):
        def configure_optimizers(self) -> Any:
            weight, bias = self.model[0].weight, self.model[0].bias
            groups = [{"params": weight, "name": "decay"}, {"params": bias}, {"params": self.model[2].parameters(), "name": 3}]
            return torch.optim.SGD(groups, lr=0.1)

    monitored(tmp_path, Named())
    [(step, facts)] = load_store(tmp_path / "monitor.h5").facts()
    assert step == 0
    assert [(group.optimizer, group.name) for group in facts.groups] == [("SGD", "decay"), ("SGD", ""), ("SGD", "")]


def test_the_learning_rate_is_the_rate_that_the_step_used(tmp_path: Path) -> None:
    """A scheduler has already changed it when the batch ends."""

    class Scheduled(Losses):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    assert monitored(tmp_path, Scheduled()).series()["context/lr"] == {step: 0.5**step for step in range(6)}


def test_the_batch_size_counts_all_samples_of_a_step(tmp_path: Path) -> None:
    """Six batches of five samples: the first step has four batches, the last step two."""
    assert monitored(tmp_path, Losses(), accumulate_grad_batches=4).series()["context/batch_size"] == {0: 20.0, 1: 10.0}


class Graphs:
    """A batch of graphs as PyTorch Geometric has it: no container, with a row for each node, and its number of graphs."""

    def __init__(self, x: Tensor, num_graphs: int) -> None:
        self.x, self.num_graphs = x, num_graphs

    def to(self, *args: Any, **options: Any) -> Graphs:
        return Graphs(self.x.to(*args, **options), self.num_graphs)

    def to_dict(self) -> dict[str, Any]:
        return {"x": self.x, "names": ["a"]}


class OfAnyBatch(Tiny):
    """The input is ``x`` of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch["x"] if isinstance(batch, dict) else batch.x).pow(2).mean()


def context_of(folder: Path, batch: object, **options: Any) -> dict[str, float]:
    """The context of a step on a batch."""
    keep = KeepRecords(ModuleMonitorCallback(every_n_steps=1, rules=NORMS, on_error="raise", **options))
    data = DataLoader([0, 0], collate_fn=lambda _rows: batch)
    trainer(folder, [keep.monitor, keep], max_steps=1, accumulate_grad_batches=2, limit_val_batches=0).fit(OfAnyBatch(), data, loader())
    return {key.removeprefix("context/"): value for key, value in keep.records[0].values.items() if key.startswith("context/")}


def test_a_batch_of_graphs_counts_its_graphs(tmp_path: Path) -> None:
    """And not its nodes, which are the first tensor; what is largest in it is known, too."""
    x = torch.arange(24.0).view(6, 4)
    context = context_of(tmp_path, Graphs(x, 2))
    assert (context["batch_size"], context["input_abs_max"], context["input_is_constant"]) == (4.0, 23.0, 0.0)


@pytest.mark.parametrize("is_constant", [True, False])
def test_the_input_is_constant_if_no_other_tensor_may_be_the_input(is_constant: bool, tmp_path: Path) -> None:
    """The largest tensor may be an offset of zeros, and the data a smaller one; targets of one number for each sample vary anyhow."""
    x = torch.ones(3, 4) if is_constant else torch.randn(3, 4)
    context = context_of(tmp_path, {"x": x, "offsets": torch.zeros(3, 5, 3), "y": torch.randn(3, 1)})
    assert context["input_is_constant"] == is_constant


class AttributeDict(dict[str, Any]):
    """A dict whose attributes are its entries, so that one that is missing is a ``KeyError``."""

    __getattr__ = dict.__getitem__


class Opaque:
    """A batch that shows nothing of what it holds."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_a_batch_of_any_class_costs_no_step(tmp_path: Path) -> None:
    """One whose attributes raise errors is a dict all the same; of one that cannot be looked into it is not said that it is constant."""
    context = context_of(tmp_path, AttributeDict(x=torch.randn(5, 4)))
    assert (context["batch_size"], context["input_is_constant"]) == (10.0, 0.0)
    context = context_of(tmp_path, {"x": torch.ones(5, 4), "rest": Opaque(torch.randn(5, 4))})
    assert context["batch_size"] == 10.0
    assert "input_is_constant" not in context


@pytest.mark.parametrize(("num_targets", "warns"), [(3, False), (2, True)])
def test_the_noise_scale_says_what_it_counts(num_targets: int, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where tensors of the batch differ in length, its first tensor may have no row for each sample."""
    context_of(tmp_path, {"x": torch.randn(3, 4), "y": torch.randn(num_targets)}, gradient_noise=True)
    said = [message for message in caplog.messages if "gradient_noise counts batch_size in rows of the first tensor" in message]
    assert len(said) == warns


def test_the_noise_scale_says_once_what_it_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the lengths differ from batch to batch, as the numbers of atoms do."""
    batches = iter([{"x": torch.randn(num, 4), "y": torch.randn(2)} for num in (3, 4, 5, 6)])
    callback = ModuleMonitorCallback(every_n_steps=1, rules=NORMS, gradient_noise=True)
    data = DataLoader([0] * 4, collate_fn=lambda _rows: next(batches))
    trainer(tmp_path, [callback], max_steps=2, accumulate_grad_batches=2, limit_val_batches=0).fit(OfAnyBatch(), data, loader())
    assert caplog.text.count("gradient_noise counts batch_size in rows of the first tensor") == 1


class Logging(Losses):
    """Logs in every way that Lightning offers."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", 2 * loss)
        self.log("train/loss", 3 * loss, on_step=True, on_epoch=True, logger=False)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(7.0 + self.current_epoch))


def test_a_logged_metric_is_recorded_by_its_name(tmp_path: Path) -> None:
    """Values are those of callback metrics at the end of the step; names are made valid, and none replaces the loss."""
    module = Logging()
    series = monitored(tmp_path, module, max_epochs=2).series()
    losses = {step: losses[0] for step, losses in module.losses.items()}
    assert series["context/loss"] == pytest.approx(losses)
    assert series["context/loss_2"] == pytest.approx({step: 2 * loss for step, loss in losses.items()})
    assert series["context/train_loss"] == pytest.approx({step: 3 * loss for step, loss in losses.items()})
    first = 3 * sum(losses[step] for step in range(6)) / 6
    assert series["context/train_loss_epoch"] == pytest.approx(dict.fromkeys(range(6, 12), first))
    assert series["context/val_loss"] == dict.fromkeys(range(6, 12), 7.0)
    assert not any("train_loss_step" in key for key in series)


class OwnKeys(Tiny):
    """Logs under names that look like keys of a monitor."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("gradient/net/size", 3.0)
        self.log("monitor/own", 4.0)
        return super().training_step(batch, batch_idx)


def test_keys_that_monitors_pass_to_lightning_are_no_context_and_names_like_them_are(tmp_path: Path) -> None:
    """Neither keys of this callback nor of another, context or not; what the module logs is context, whatever its name is."""
    patterns = {"": ["context/loss", "parameter/.*"], "run1": ["run1/monitor/errors", "run1/context/lr"]}
    callbacks = [
        ModuleMonitorCallback(1, rules=NORMS, callback_metrics=patterns[prefix], prefix=prefix, store=False) for prefix in patterns
    ]
    keeps = [KeepRecords(callback) for callback in callbacks]
    run = fit(tmp_path, [*callbacks, *keeps], OwnKeys, limit_val_batches=0)
    assert {key for key in run.callback_metrics if key.startswith(("context/", "parameter/", "run1/"))} == {
        "context/loss", "run1/context/lr", "run1/monitor/errors", *(key for key in keeps[0].series() if key.startswith("parameter/")),
    }  # fmt: skip
    names = {"loss", "lr", "batch_size", "input_abs_max", "input_is_constant", "stale_gradients"}
    names |= {"input_variation", "output_variation", "constant_from", "same_units"}
    names |= {"loss_2", "own_weight_norm", "gradient_net_size", "monitor_own"}
    for prefix, keep in zip(["", "run1/"], keeps, strict=True):
        series = keep.series()
        assert {key for key in series if key.startswith(f"{prefix}context/")} == {f"{prefix}context/{name}" for name in names}
        assert series[f"{prefix}context/gradient_net_size"] == dict.fromkeys(range(6), 3.0)
        assert series[f"{prefix}context/monitor_own"] == dict.fromkeys(range(6), 4.0)


def test_loggers_get_loss_and_rate_of_the_context_which_counts_for_no_limit(tmp_path: Path) -> None:
    """Lightning logs the rest itself. The four norms and the number of errors are five keys: no roll-ups."""
    callback = ModuleMonitorCallback(every_n_steps=1, rules=NORMS, max_logged_keys=5)
    fit(tmp_path, [callback], logger=CSVLogger(tmp_path))
    [file] = tmp_path.rglob("metrics.csv")
    header = file.read_text().splitlines()[0].split(",")
    assert "parameter/model.0.weight/norm" in header
    assert {name for name in header if "context" in name} == {"context/loss", "context/lr"}


def test_callback_metrics_have_the_context_only_if_a_pattern_names_it(tmp_path: Path) -> None:
    """A pattern that matches everything gives no context; a pattern that names the context does."""
    names = {}
    for patterns in (".*", "context/(loss|lr)"):
        callback = ModuleMonitorCallback(every_n_steps=1, rules=NORMS, callback_metrics=patterns)
        stopping = EarlyStopping("context/loss" if "context" in patterns else "monitor/errors", check_on_train_epoch_end=True)
        run = fit(tmp_path, [callback, stopping])
        names[patterns] = {name for name in run.callback_metrics if "/" in name}
        # Metrics that the monitor passed to Lightning are not recorded as logged metrics.
        assert callback.last_record is not None
        assert not any("norm" in key for key in callback.last_record.values if key.startswith("context/") and "own" not in key)
    assert not any("context" in name for name in names[".*"])
    assert names["context/(loss|lr)"] == {"context/loss", "context/lr"}


def test_there_is_no_context_without_a_loss(tmp_path: Path) -> None:
    """In validation, and without a Trainer; and users cannot log a value under its key."""
    callback = ModuleMonitorCallback(every_n_steps=1, stages=["validate"])
    trainer(tmp_path, [callback]).validate(Tiny(), loader(), verbose=False)
    assert callback.last_record is not None
    assert not any("context" in key for key in callback.last_record.values)
    with ModuleMonitor(rules=NORMS) as monitor:
        monitor.set_module(module := Tiny())
        monitor.begin_step(0)
        with pytest.raises(ValueError, match="'context/loss' is one that the monitor records itself"):
            monitor.log_scalar("context/loss", 1.0)
        assert not any("context" in key for key in monitor.end_step().values)  # type: ignore[union-attr]
        # A loop without a Trainer can pass the context.
        monitor.begin_step(1)
        monitor.monitor_context("loss", module.model(torch.ones(1, 4)).mean())
        assert monitor.end_step().values["context/loss"] == pytest.approx(module.model(torch.ones(1, 4)).mean().item())  # type: ignore[union-attr]


def test_the_context_is_not_read_on_the_host_and_needs_no_further_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the transfer at the end of the step nothing is read, whatever is logged: a read would wait for the device."""
    monkeypatch.setattr(magnitudes, "is_on_host", lambda _tensor: False)
    monkeypatch.setattr(magnitudes, "to_host", lambda tensors: [tensor.numpy() for tensor in tensors])  # a device marks its steps instead
    transfers: list[int] = []
    original = elements.transfer

    def counted(tensor: Tensor) -> Tensor:
        transfers.append(tensor.numel())
        return original(tensor)

    class Watched(ModuleMonitorCallback):
        def on_before_backward(self, *args: Any) -> None:
            with no_host_reads():
                super().on_before_backward(*args)

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            end = self.monitor.engine.end_step
            reads = no_host_reads()
            reads.__enter__()

            def ended() -> Any:
                reads.__exit__(None, None, None)
                return end()

            monkeypatch.setattr(self.monitor.engine, "end_step", ended)
            super().on_train_batch_end(trainer, *args)
            monkeypatch.setattr(self.monitor.engine, "end_step", end)

    monkeypatch.setattr(elements, "transfer", counted)
    callback = Watched(every_n_steps=1, rules=NORMS)
    fit(tmp_path, [callback], Logging)
    assert callback.last_record is not None
    assert callback.last_record.values.keys() >= {"context/loss", "context/lr", "context/loss_2", "context/train_loss"}
    assert len(transfers) == 6


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("context/loss", Key("context", "", "loss")),
        ("runs/one/context/lr_1", Key("context", "", "lr_1", prefix="runs/one")),
        ("activation/context/rms", Key("activation", "context", "rms")),
        ("run1/validation/activation/context/rms", Key("activation", "context", "rms", "validation", "run1")),
    ],
)
def test_keys_of_the_context_have_no_site(key: str, parts: Key) -> None:
    """Also with a prefix; a module may have the same name."""
    assert Key.parse(key) == parts
    assert parts.format() == key


class LogsInValidation(Tiny):
    """Logs the number of its validation loops."""

    num_loops = 0

    def on_validation_epoch_end(self) -> None:
        self.num_loops += 1
        self.log("checked", float(self.num_loops))


@pytest.mark.parametrize("num_sanity_val_steps", [0, 2])
def test_the_last_validation_has_a_record(num_sanity_val_steps: int, tmp_path: Path) -> None:
    """At the step that would have followed, with nothing of training; other records have what was logged until then."""
    callback = ModuleMonitorCallback(4, rules=[Rule(kinds="parameter", statistics="norm")])
    run = trainer(tmp_path, [callback], max_epochs=3, num_sanity_val_steps=num_sanity_val_steps)
    run.fit(LogsInValidation(), loader(6), loader(1))
    store = load_store(str(callback.store_path))
    num_before = num_sanity_val_steps // 2
    steps, values = store["context/checked"]
    assert (steps.tolist(), values.tolist()) == ([8, 12, 16, 18], [1.0 + num_before, 2.0 + num_before, 2.0 + num_before, 3.0 + num_before])
    assert store["context/validation_loss"][0].tolist() == [8, 12, 16, 18]
    assert store["context/loss"][0].tolist() == store["context/own_weight_norm"][0].tolist() == [0, 4, 8, 12, 16]
    assert read_run(store).steps == [0, 4, 8, 12, 16]


def test_a_metric_that_raises_at_the_end_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line says what is missing; the verdict is logged, and the store is closed, as always."""

    def fail(_trainer: Trainer) -> None:
        raise RuntimeError("no metric")

    monkeypatch.setattr(logged_metrics, "logged_metrics", fail)
    callback = ModuleMonitorCallback(4, rules=[Rule(kinds="parameter", statistics="norm")])
    with caplog.at_level("INFO"):
        trainer(tmp_path, [callback]).fit(LogsInValidation(), loader(6), loader(1))
    assert "What the last validation logged was not stored (RuntimeError: no metric)." in caplog.messages
    assert any("Verdict: " in message for message in caplog.messages)
    assert load_store(str(callback.store_path))["context/loss"][0].tolist() == [0, 4]


def test_a_run_without_a_step_of_training_has_no_names_of_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation alone announces no context of training when it ends."""
    monkeypatch.setattr(step, "announce_context", pytest.fail)
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds="parameter", statistics="norm")], stages=["validate"])
    trainer(tmp_path, [callback]).validate(LogsInValidation(), loader(1), verbose=False)
    assert callback.last_record is not None
