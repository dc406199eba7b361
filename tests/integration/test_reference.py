"""The reference in a real Trainer: differences, where it comes from, and that training does not change."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from helpers.lightning_package import LOGGER, Callback, CSVLogger, FSDPStrategy, LightningModule, ModelCheckpoint, Trainer
from helpers.memory import peak_bytes
from helpers.tiny import KeepRecords, measured
from helpers.training import Classifier, KeepLosses, Reseed, loader, seed, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_module_monitor import ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.trainer.reference_controller import LaidOutCopy

DIFFERENCES = Rule(kinds=["activation_difference", "parameter_difference"], statistics=["norm", "ratio", "cosine"])


class Truth(Callback):
    """Expected differences: another model at initialization, called on the batch, in float64."""

    def __init__(self, module: LightningModule) -> None:
        self.model = module.model
        self.steps: list[dict[str, float]] = []
        self.outputs: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.outputs.append((copy.deepcopy(pl_module.model)(batch[0]).double(), self.model.double()(batch[0].double())))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        current, reference = (torch.cat(tensors) for tensors in zip(*self.outputs, strict=True))
        weight, initial = (each.model.layers[0].weight.detach().double() for each in (pl_module, self))
        self.outputs = []
        self.steps.append(
            {
                "activation_difference/model/norm": float((current - reference).norm()),
                "activation_difference/model/ratio": float((current - reference).norm() / reference.norm()),
                "activation_difference/model/cosine": float((current * reference).sum() / current.norm() / reference.norm()),
                "parameter_difference/model.layers.0.weight/ratio": float((weight - initial).norm() / initial.norm()),
            }
        )


class KeepReference(Callback):
    """Keeps the reference of a callback's run."""

    def __init__(self, callback: ModuleMonitorCallback) -> None:
        self.callback = callback
        self.reference: nn.Module | None = None

    def on_train_end(self, *_args: Any) -> None:
        self.reference = self.callback.monitor.reference_module


class WithoutDropout(Classifier):
    """Two layers and a GELU: a further call of the model changes nothing."""

    def __init__(self) -> None:
        super().__init__("mlp")
        self.model.layers[2] = nn.Identity()  # type: ignore[operator]


@pytest.mark.parametrize("module", [None, "model"])
def test_drift_from_the_initialization_is_that_of_another_copy(module: str | None, tmp_path: Path) -> None:
    """With accumulation, at every step, for a reference that runs its training_step and for a sibling of a submodule."""
    seed()
    live = WithoutDropout()
    seed()
    truth = Truth(WithoutDropout())
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference="init", module=module, on_error="raise")
    records = KeepRecords(callback)
    trainer(tmp_path, [callback, records, truth], accumulate_grad_batches=3, max_epochs=2).fit(live, loader(), loader(8))
    assert len(records.records) == len(truth.steps) == 8
    for record, expected in zip(records.records, truth.steps, strict=True):
        for key, value in expected.items():
            assert record.values[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (record.step, key)
    assert records.records[-1].values["activation_difference/model/norm"] > 0.1
    prefixes = {key.split("/")[1].split(".")[0] for key in records.records[0].values if "difference" in key}
    assert prefixes == ({"model"} if module else {"model", "_root_"} - {"_root_"})


class Talkative(Classifier):
    """Logs in every way, keeps a metric, writes into its batch, and counts its calls."""

    def __init__(self) -> None:
        super().__init__("mlp")
        self.accuracy = MulticlassAccuracy(3)
        self.names: list[str] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        batch[0].mul_(2)
        logits = self.model(batch[0])
        self.accuracy(logits, batch[1])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        self.log_dict({"accuracy": self.accuracy, "step": float(self.trainer.global_step)})
        self.logger.log_metrics({"own": float(loss.detach())}, self.global_step)  # type: ignore[union-attr]
        self.print("x")
        return loss


@pytest.mark.parametrize("module", [None, "model"])
def test_the_reference_has_what_hooks_set_before_the_first_batch(module: str | None, tmp_path: Path) -> None:
    """Weights that on_train_start initializes, after a validation loop, and attributes that on_train_epoch_start sets."""

    class Initializes(WithoutDropout):
        def on_train_start(self) -> None:
            for parameter in self.parameters():
                nn.init.uniform_(parameter)

        def on_train_epoch_start(self) -> None:
            self.losses: list[Tensor] = []

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.losses.append(super().training_step(batch, batch_idx))
            return self.losses[-1]

    callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference="init", module=module, on_error="raise")
    records = KeepRecords(callback)
    trainer(tmp_path, [callback, records], max_steps=2, num_sanity_val_steps=1).fit(Initializes(), loader(), loader(8))
    first, second = [
        [value for key, value in one.values.items() if "difference/" in key and key.endswith("norm")] for one in records.records
    ]
    assert set(first) == {0.0}
    assert min(second) > 0


def test_a_reference_that_needs_the_optimizers_is_an_error_and_training_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It can read the model's optimizers, and not use them."""

    class Asks(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            assert self.optimizers().param_groups[0]["lr"] == 0.01
            self.optimizers().zero_grad()
            return super().training_step(batch, batch_idx)

    callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference="init")
    run = trainer(tmp_path, [callback], max_steps=2)
    run.fit(Asks("mlp"), loader(), loader(8))
    assert run.global_step == 2
    assert (
        "The reference could not run (RuntimeError: a copy of the model cannot use the optimizers; of a reference, give module"
        in caplog.text
    )
    assert callback.last_record is not None
    assert callback.last_record.values["monitor/errors"] == 1
    assert callback.last_record.values["parameter_difference/model.layers.0.weight/norm"] > 0


def test_the_reference_collects_nothing_over_steps(tmp_path: Path) -> None:
    """A model clears its collected outputs at the end of an epoch, which the reference never reaches."""

    class Gathers(Classifier):
        def __init__(self) -> None:
            super().__init__("mlp")
            self.num_steps = 0
            self.losses: list[Tensor] = []
            self.outputs: dict[str, list[Tensor]] = {"train": []}

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.num_steps += 1
            self.losses.append(loss.detach())
            self.outputs["train"].append(loss.detach())
            self.last_loss = loss.detach()
            sizes.append((len(self.losses), len(self.outputs["train"]), self.num_steps))
            return loss

        def on_train_epoch_end(self) -> None:
            self.losses.clear()
            self.outputs["train"].clear()

    sizes: list[tuple[int, int, int]] = []
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference="init", on_error="raise")
    keep = KeepReference(callback)
    trainer(tmp_path, [callback, keep], max_epochs=2, limit_train_batches=2).fit(Gathers(), loader(), loader(8))
    reference, model_sizes = (1, 1, 1), [(1, 1, 1), (2, 2, 2), (1, 1, 3), (2, 2, 4)]
    assert sizes == [size for model_size in model_sizes for size in (reference, model_size)]
    assert keep.reference is not None
    assert not hasattr(keep.reference, "last_loss")


ALL: dict[str, Any] = {"every_n_steps": 1, "rules": [DIFFERENCES], "rcc": True, "on_error": "raise"}


def run(root: Path, callback: ModuleMonitorCallback, model: LightningModule, ckpt_path: str | None = None) -> dict[int, dict[str, float]]:
    """Two epochs of three steps with a checkpoint after the first, or the rest of a resumed run."""
    records = KeepRecords(callback)
    save = ModelCheckpoint(root, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit = trainer(root, [Reseed(), callback, records, save], enable_checkpointing=True, max_epochs=2)
    fit.fit(model, loader(12), loader(8), ckpt_path=ckpt_path)
    return {record.step: dict(record.values) for record in records.records}


def compared(values: dict[str, float]) -> dict[str, float]:
    """The values that depend on a reference."""
    return {key: value for key, value in values.items() if "_difference/" in key or key.startswith("rcc_")}


class BuiltLate(Classifier):
    """Creates its layers in configure_model."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            self.model = Classifier("mlp").model


class BuiltInSetup(Classifier):
    """Creates its layers in setup, after the callbacks' setup."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def setup(self, stage: str) -> None:
        if isinstance(self.model, nn.Identity):
            self.model = Classifier("mlp").model


class BuiltBeforeSetup(Classifier):
    """Has a setup that creates no layers."""

    def setup(self, stage: str) -> None:
        pass


MODELS = {
    "in __init__": Classifier,
    "in __init__, with a setup": BuiltBeforeSetup,
    "in setup": BuiltInSetup,
    "in configure_model": BuiltLate,
}


def model(random_seed: int, made: str = "in __init__") -> LightningModule:
    """A model whose layers may not exist yet."""
    torch.manual_seed(random_seed)
    return MODELS[made]()


@pytest.mark.parametrize("module", [None, "model"])
@pytest.mark.parametrize("made", ["in __init__", "in setup", "in configure_model"])
def test_a_resumed_run_compares_with_the_first_runs_initialization(made: str, module: str | None, tmp_path: Path) -> None:
    """Resumed from other weights after step 3: all differences, terms and norms are those of the uninterrupted run."""
    whole = run(tmp_path / "whole", ModuleMonitorCallback(**ALL, module=module), model(0, made))
    resumed = run(
        tmp_path / "resumed", ModuleMonitorCallback(**ALL, module=module), model(99, made), str(tmp_path / "whole" / "step=3.ckpt")
    )
    assert sorted(whole) == [0, 1, 2, 3, 4, 5]
    assert sorted(resumed) == [3, 4, 5]
    assert len(compared(resumed[3])) > 50
    for step, values in resumed.items():
        assert compared(values) == compared(whole[step]), step
    assert all(value == 0 for key, value in whole[0].items() if key.startswith("parameter_difference") and key.endswith("norm"))


@pytest.mark.parametrize("module", [None, "model"])
def test_a_run_that_is_resumed_in_the_middle_of_an_epoch_compares_with_the_same(module: str | None, tmp_path: Path) -> None:
    """With BatchNorm and accumulation. All batches are equal, because Lightning restarts an ordinary loader."""
    x, y = next(iter(loader(3, 3)))
    data: DataLoader[Any] = DataLoader(TensorDataset(x.repeat(10, 1), y.repeat(10)), batch_size=3)

    def part(name: str, random_seed: int, ckpt_path: str | None = None) -> dict[int, dict[str, float]]:
        torch.manual_seed(random_seed)
        callback = ModuleMonitorCallback(**ALL, module=module)
        records, save = KeepRecords(callback), ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 2, "accumulate_grad_batches": 3}
        trainer(tmp_path / name, [callback, records, save], **options).fit(Classifier("cnn"), data, loader(8), ckpt_path=ckpt_path)
        return {record.step: dict(record.values) for record in records.records}

    whole = part("whole", 0)
    resumed = part("resumed", 99, str(tmp_path / "whole" / "step=2.ckpt"))
    assert (sorted(whole), sorted(resumed)) == ([0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7])
    for step, values in resumed.items():
        assert compared(values) == pytest.approx(compared(whole[step]), rel=0, abs=0, nan_ok=True), step


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_that_ends_before_its_first_batch_keeps_the_reference(tmp_path: Path) -> None:
    """A checkpoint that is saved when training starts has the reference of the first run, though none was made yet."""

    class SavesAtStart(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "start.ckpt")
            trainer.should_stop = True

    run(tmp_path, ModuleMonitorCallback(**ALL), model(0, "in __init__"))
    callback = ModuleMonitorCallback(**ALL)
    resumed = trainer(tmp_path / "resumed", [callback, SavesAtStart()], max_epochs=2)
    resumed.fit(model(99, "in __init__"), loader(), loader(8), ckpt_path=str(tmp_path / "step=3.ckpt"))
    saved, again = (
        torch.load(path, weights_only=True)["callbacks"]["ModuleMonitorCallback"]["reference"]
        for path in (tmp_path / "step=3.ckpt", tmp_path / "start.ckpt")
    )
    assert saved["source"] == again["source"]
    assert saved["tensors"].keys() == again["tensors"].keys()
    assert all(torch.equal(again["tensors"][name], tensor) for name, tensor in saved["tensors"].items())


@pytest.mark.parametrize("made", MODELS)
def test_a_run_without_a_saved_reference_reports_it(made: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """save_reference: false makes checkpoints smaller, and a resumed run logs its reference."""
    run(tmp_path / "saved", ModuleMonitorCallback(**ALL), model(0, made))
    run(tmp_path / "whole", ModuleMonitorCallback(**ALL, save_reference=False), model(0, made))
    path = tmp_path / "whole" / "step=3.ckpt"
    weights = sum(tensor.numel() * tensor.element_size() for tensor in Classifier("mlp").state_dict().values())
    assert (tmp_path / "saved" / "step=3.ckpt").stat().st_size - path.stat().st_size > weights
    assert not caplog.messages or "holds no reference" not in caplog.text
    resumed = run(tmp_path / "resumed", ModuleMonitorCallback(**ALL, save_reference=False), model(99, made), str(path))
    is_late = made in ("in setup", "in configure_model")
    what = "the checkpoint's weights" if is_late else "a new initialization"
    assert f"The checkpoint holds no reference of this callback's: differences are from {what}" in caplog.text
    drift = resumed[3]["parameter_difference/model.layers.0.weight/norm"]
    assert drift == 0 if is_late else drift > 1


def test_a_checkpoint_holds_tensors_only_also_when_it_is_saved_after_the_run(tmp_path: Path) -> None:
    """It loads with ``weights_only``, and a resumed run has the first initialization."""
    callback = ModuleMonitorCallback(**ALL)
    first = model(0)
    initial = first.model.layers[0].weight.detach().clone()  # type: ignore[union-attr, operator, index]
    fit = trainer(tmp_path, [Reseed(), callback], max_epochs=1)
    fit.fit(first, loader(12), loader(8))
    fit.save_checkpoint(tmp_path / "after.ckpt")
    state = torch.load(tmp_path / "after.ckpt", weights_only=True)["callbacks"]["ModuleMonitorCallback"]
    assert torch.equal(state["reference"]["tensors"]["model.layers.0.weight"], initial)
    again = run(tmp_path / "again", ModuleMonitorCallback(**ALL), model(99), str(tmp_path / "after.ckpt"))
    whole = run(tmp_path / "whole", ModuleMonitorCallback(**ALL), model(0))
    assert compared(again[3]) == compared(whole[3])


@pytest.mark.parametrize("module", [None, "model"])
@pytest.mark.parametrize("form", ["checkpoint", "state_dict"])
def test_a_reference_from_a_file(form: str, module: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A Lightning checkpoint or a state_dict; checkpoints hold its path, and a resumed run with another path logs it."""
    other = model(5)
    path = str(tmp_path / "other.ckpt")
    if form == "checkpoint":
        fit = trainer(tmp_path, [])
        fit.strategy.connect(other)
        fit.save_checkpoint(path)
    else:
        torch.save((other.model if module else other).state_dict(), path)  # type: ignore[union-attr]
    live = model(0)
    expected = [(a - b).detach().double().norm().item() for a, b in zip(live.parameters(), other.parameters(), strict=True)]
    given: Any = Path(path) if form == "checkpoint" else path
    records = run(tmp_path / "run", ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference=given, module=module), live)
    norms = [value for key, value in records[0].items() if key.startswith("parameter_difference") and key.endswith("/norm")]
    assert norms == pytest.approx(expected, rel=1e-6)
    checkpoint = str(tmp_path / "run" / "step=3.ckpt")
    state = torch.load(checkpoint, weights_only=True)["callbacks"]
    (saved,) = [entry["reference"] for name, entry in state.items() if name.startswith("ModuleMonitorCallback")]
    assert (saved["source"], saved["tensors"]) == (path, {})
    resumed = run(tmp_path / "again", ModuleMonitorCallback(every_n_steps=1, reference="init", module=module), model(9), checkpoint)
    assert f"The run that is resumed had reference {path!r}; this one has 'init'." in caplog.text
    assert resumed[3]["parameter_difference/model.layers.0.weight/ratio"] > 0.5


@pytest.mark.parametrize("module", [None, "model"])
def test_a_module_as_reference_stays_as_it_is(module: str | None, tmp_path: Path) -> None:
    """The model is compared with it; it is neither moved, frozen, silenced nor called."""
    other = model(5)
    calls: list[int] = []
    other.register_forward_hook(lambda *_args: calls.append(1))
    kind, weights = type(other), {name: tensor.clone() for name, tensor in other.state_dict().items()}
    reference = other.model if module else other
    callback = ModuleMonitorCallback(every_n_steps=1, reference=reference, module=module, rules=[DIFFERENCES])  # type: ignore[arg-type]
    live = model(0)
    expected = float((live.model.layers[0].weight - other.model.layers[0].weight).detach().norm())  # type: ignore[union-attr, operator, index]
    records = run(tmp_path, callback, live)
    assert records[0]["parameter_difference/model.layers.0.weight/norm"] == pytest.approx(expected, rel=1e-5)
    assert type(other) is kind
    assert calls == []
    assert all(parameter.requires_grad for parameter in other.parameters())
    assert all(torch.equal(weights[name], tensor) for name, tensor in other.state_dict().items())


def test_ratio_is_recorded_if_no_rule_uses_the_reference(tmp_path: Path) -> None:
    """Beside other rules; ``rcc`` alone has its own reference and needs no ratio."""
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[Rule(kinds="gradient", statistics="norm")], reference="init", store=False)
    trainer(tmp_path, [callback], max_steps=2).fit(model(0), loader(), loader(8))
    assert callback.last_record is not None
    kinds = {(key.split("/")[0], key.split("/")[-1]) for key in measured(callback.last_record)}
    assert kinds == {("gradient", "norm"), ("activation_difference", "ratio"), ("parameter_difference", "ratio"), ("monitor", "errors")}
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[], rcc=True, module="model.layers")
    trainer(tmp_path, [callback], max_steps=2).fit(model(0), loader(), loader(8))
    assert {key.split("/")[0] for key in measured(callback.last_record)} == {
        *("rcc_effective_update", "rcc_propagating_update", "rcc_output", "rcc_reference_output", "rcc_input", "rcc_input_change"),
        *("rcc_operator_norm", "rcc_alignment", "monitor"),
    }
    store = load_store(callback.store_path or "")
    steps, values = store.series("rcc_effective_update/model.layers.0.weight/rms")
    assert steps.tolist() == [0, 1]
    assert values[0] == 0 < values[1]


def test_ratio_of_a_reference_that_was_given_is_recorded_beside_the_coordinate_check(tmp_path: Path) -> None:
    """The same values as without ``rcc``; none where a rule needs the reference."""
    found: list[dict[str, float]] = []
    needing = [Rule(kinds="rcc_input", statistics="rms")]
    for options in ({}, {"rcc": True}, {"rcc": True, "rules": needing}):
        callback = ModuleMonitorCallback(**{"every_n_steps": 1, "rules": [], "reference": "init", "store": False, **options})
        trainer(tmp_path, [callback], max_steps=2).fit(model(0), loader(), loader(8))
        assert callback.last_record is not None
        found.append({key: value for key, value in callback.last_record.values.items() if "_difference/" in key})
    alone, beside, needed = found
    assert {key.split("/")[0] for key in alone} == {"activation_difference", "parameter_difference"}
    assert beside == alone
    assert needed == {}


def test_the_reference_runs_in_monitored_steps_only(tmp_path: Path) -> None:
    """And never if only parameters are compared."""

    class Counts(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            calls.append(self.global_step)
            return super().training_step(batch, batch_idx)

    calls: list[int] = []
    for rule, expected in ((DIFFERENCES, [0, 0, 1, 2, 2, 3]), (Rule(kinds="parameter_difference", statistics="norm"), [0, 1, 2, 3])):
        calls.clear()
        callback = ModuleMonitorCallback(every_n_steps=2, rules=[rule], reference="init", on_error="raise")
        trainer(tmp_path, [callback], max_steps=4).fit(Counts("mlp"), loader(), loader(8))
        assert calls == expected


class Noise(nn.Module):
    """A parametrization that draws numbers."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.1 * torch.randn_like(weight)


def parametrized(name: str) -> nn.Module:
    """Two layers; one or both have a weight that is computed whenever it is read."""
    layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    if name == "spectral norm":
        layers = layers.apply(lambda layer: parametrizations.spectral_norm(layer) if isinstance(layer, nn.Linear) else layer)
    elif name == "weight norm":
        parametrizations.weight_norm(layers[0])
    elif name == "weight norm by a hook":
        nn.utils.weight_norm(layers[0])
    else:
        parametrize.register_parametrization(layers[0], name.removeprefix("noisy "), Noise())
    return layers


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("module", [None, "model"])
@pytest.mark.parametrize("name", ["spectral norm", "weight norm", "weight norm by a hook", "noisy weight", "noisy bias"])
def test_a_computed_weight_is_skipped_by_the_check_and_nothing_changes(
    name: str, module: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The check does not read it: reading changes two buffers of spectral norm, and draws random numbers of others."""
    runs = []
    for monitored in (False, True):
        seed()
        live, keep = Classifier(parametrized(name)), KeepLosses()
        norm = torch.linalg.matrix_norm(copy.deepcopy(live.model[2]).weight, 2).item()  # type: ignore[index, union-attr]
        caplog.set_level("INFO")
        callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], rcc=True, module=module, on_error="raise")
        records = KeepRecords(callback)
        trainer(tmp_path, [callback, keep, records] if monitored else [keep], max_steps=4).fit(live, loader(), loader(8))
        runs.append((keep, [*live.parameters(), *live.buffers()]))
    (plain, tensors), (monitored, monitored_tensors) = runs
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, monitored.losses, strict=True))
    assert plain.random_states == monitored.random_states
    assert all(torch.equal(a, b) for a, b in zip(tensors, monitored_tensors, strict=True))
    first, *later = (record.values for record in records.records)
    changes = ("_difference/", "_update/", "_change/", "rcc_operator_norm/model.2/update")
    changed = [key for key in first if any(change in key for change in changes) and not key.endswith(("cosine", "ratio"))]
    assert len(changed) >= 12
    assert [key for key in changed if first[key] != 0] == []
    assert not [key for key in first if key.startswith("rcc") and "/model.0" in key]
    if name == "spectral norm":
        assert "rcc: none of the" in caplog.text
    else:
        assert all(values["rcc_effective_update/model.2.weight/rms"] > 0 for values in later)
        assert first["rcc_operator_norm/model.2/reference"] == pytest.approx(norm, rel=0.05)
    assert "the reference has not run" not in caplog.text  # a weight that is read is no further call of its parametrization
    assert "more often than the model" not in caplog.text


@pytest.mark.filterwarnings("ignore:`torch.jit.script", "ignore::DeprecationWarning")
def test_a_part_in_torchscript_is_copied(tmp_path: Path) -> None:
    """Its copy is frozen, too: other modules differ from step 1 on by the distance from the initialization."""
    seed()
    live = Classifier(nn.Sequential(nn.Linear(6, 8), torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), nn.Linear(8, 3)))
    start = live.model[2].weight.detach().clone()  # type: ignore[index, union-attr]
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], rcc=True, on_error="raise")
    records = KeepRecords(callback)
    before: list[float] = []

    class Distance(Callback):
        def on_before_optimizer_step(self, *_args: Any) -> None:
            before.append(float((live.model[2].weight.detach().double() - start.double()).norm()))  # type: ignore[index, union-attr]

    trainer(tmp_path, [callback, records, Distance()], max_steps=3).fit(live, loader(), loader(8))
    values = [record.values for record in records.records]
    assert [step["activation_difference/model/norm"] > 0 for step in values] == [False, True, True]
    assert [step["parameter_difference/model.2.weight/norm"] for step in values] == pytest.approx(before, rel=1e-6)


def patched() -> nn.Module:
    """A network with BatchNorm whose forward is a function with two references to it."""
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def doubled(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: 2 * forward(x)

    network.forward = doubled(doubled(network.forward))  # type: ignore[assignment]
    return network


@pytest.mark.parametrize("module", [None, "model"])
def test_a_patched_forward_of_the_reference_does_not_call_the_model(module: str | None, tmp_path: Path) -> None:
    """A plain copy of the function would call the model again, and change its buffers."""
    runs, callback = [], ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], rcc=True, module=module, on_error="raise")
    records = KeepRecords(callback)
    for callbacks in ([], [callback, records]):
        seed()
        live, keep = Classifier(patched()), KeepLosses()
        trainer(tmp_path, [*callbacks, keep], max_steps=4).fit(live, loader(), loader(8))
        runs.append((keep, live.state_dict()))
    (plain, tensors), (monitored, monitored_tensors) = runs
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, monitored.losses, strict=True))
    assert all(torch.equal(tensors[name], monitored_tensors[name]) for name in tensors)
    first, *later = (record.values for record in records.records)
    for site in ("model", "model.0", "model.1", "model.2"):
        assert first[f"activation_difference/{site}/norm"] == 0
        assert all(values[f"activation_difference/{site}/norm"] > 0 for values in later)


class CannotBeCopied(Classifier):
    def __init__(self) -> None:
        super().__init__(parametrized("weight norm"))
        self.model[0].lock = threading.Lock()  # type: ignore[index]
        self.last = self.model(torch.zeros(1, 6))


class PartCannotBeCopied(Classifier):
    def __init__(self) -> None:
        super().__init__("mlp")
        self.model.lock = threading.Lock()  # type: ignore[assignment]


class Lazy(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.LazyLinear(3)))


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__("mlp")
        self.automatic_optimization = False


def given_back() -> Classifier:
    """As in a program that streams weights."""
    classifier = Classifier()
    next(classifier.parameters()).untyped_storage().resize_(0)
    return classifier


WRONG: dict[str, tuple[dict[str, Any], Callable[[], Classifier], str]] = {
    "kind without a reference": (
        {"rules": [Rule(kinds="activation_difference", statistics="norm")]},
        Classifier,
        r"rules\[0\]\.kinds 'activation_difference' needs a reference; expected reference: init, or the path of a checkpoint",
    ),
    "no such file": (
        {"reference": "inti"},
        Classifier,
        "reference is 'inti', and there is no such file; expected 'init', or the path of a",
    ),
    "no checkpoint": ({"reference": __file__}, Classifier, r"reference '.*' cannot be read \(\w+\); expected a Lightning checkpoint, or a"),
    "no reference at all": ({"reference": ""}, Classifier, "reference is ''; expected 'init', the path of a checkpoint, or a module"),
    "number": ({"reference": 3}, Classifier, "reference is 3; expected 'init'"),
    "rcc is no boolean": ({"rcc": "yes"}, Classifier, "rcc is 'yes'; expected true or false"),
    "save_reference is no boolean": ({"save_reference": 1}, Classifier, "save_reference is 1; expected true or false"),
    "module of another structure": ({"reference": Classifier("cnn")}, Classifier, "reference: .*not in both.*: model.block, model.head"),
    "module without a training_step": (
        {"reference": nn.Linear(2, 2)},
        Classifier,
        "reference is a Linear, and has no training_step; expected a",
    ),
    "deepcopy fails": (
        {"reference": "init"},
        CannotBeCopied,
        r"reference is a copy of the model, and model.0.lock cannot be copied .*Take it off",
    ),
    "a weight without memory": (
        {"reference": "init"},
        given_back,
        r"reference is a copy of the model, and model\.\S+ cannot be copied \(its memory was given back\)\. Bring it back",
    ),
    "deepcopy of a part fails": (
        {"reference": "init", "module": "model"},
        PartCannotBeCopied,
        r"reference is a copy of the model, and model\.lock cannot be copied \(TypeError: cannot pickle '_thread.lock' object\)",
    ),
    "no values yet": (
        {"reference": "init", "module": "model"},
        Lazy,
        r"reference is a copy of the model, and model\.0\.weight has no values before the first batch. Run a batch through",
    ),
    "manual optimization": (
        {"rcc": True},
        Manual,
        r"rcc is given; Manual uses manual optimization, and a reference cannot run its training_step\. Expected module, .* leave rcc out",
    ),
    "ratio of a term": (
        {"rcc": True, "rules": [Rule(kinds="rcc_input", statistics="ratio")]},
        Classifier,
        "'ratio' is relative, and 'rcc_input'",
    ),
    "cosine of an activation": (
        {"rules": [Rule(kinds="activation", statistics="cosine")]},
        Classifier,
        "'cosine' compares with another tensor \\(reference\\), and 'activation' has none; "
        "expected kinds activation_difference, parameter_difference",
    ),
    "functions of one and two tensors": (
        {"reference": "init", "rules": [Rule(kinds=["activation", "activation_difference"], functions={"f": torch.mean})]},
        Classifier,
        "some have two tensors, some one; expected a rule for each sort",
    ),
    "values of a kind": (
        {"rcc": True, "rules": [Rule(kinds="rcc_operator_norm", statistics="updates")]},
        Classifier,
        "'updates' is none of 'rcc_operator_norm'; expected update, reference; nearest: 'update'",
    ),
    "values with another kind": (
        {"rcc": True, "rules": [Rule(kinds=["rcc_alignment", "rcc_input"], statistics="rms")]},
        Classifier,
        "'rcc_alignment' has values that are not statistics; expected a rule of its own for it",
    ),
    "functions of values": (
        {"rcc": True, "rules": [Rule(kinds="rcc_alignment", functions={"f": torch.mean})]},
        Classifier,
        "'rcc_alignment' has no tensor to call them with; expected statistics: effective, propagating",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_reference_is_refused(case: str, tmp_path: Path) -> None:
    """Before the first batch, with the wrong value, the expected values and a remedy."""
    options, make_model, message = WRONG[case]
    with pytest.raises(ConfigError, match=message) as refused:
        trainer(tmp_path, [ModuleMonitorCallback(**options)], max_steps=1).fit(make_model(), loader(), loader(8))
    assert len(str(refused.value)) <= 300


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    """Also a dict of something else."""
    path = str(tmp_path / "other.pt")
    torch.save({0: torch.ones(2)}, path)
    with pytest.raises(ConfigError, match=r"other.pt' holds a dict; expected a Lightning checkpoint or a state_dict"):
        trainer(tmp_path, [ModuleMonitorCallback(reference=path)], max_steps=1).fit(Classifier("mlp"), loader(), loader(8))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    """With the names that differ."""
    path = str(tmp_path / "other.pt")
    torch.save(Classifier("cnn").state_dict(), path)
    with pytest.raises(ConfigError, match=r"reference '.*other.pt' is not of this model: .*model\.layers\.0\.weight"):
        trainer(tmp_path, [ModuleMonitorCallback(reference=path)], max_steps=1).fit(Classifier("mlp"), loader(), loader(8))


class Deep(LightningModule):
    """12 layers whose outputs take 2 MB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(64, 64), nn.Tanh())))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_memory_of_a_reference_that_runs_its_own_training_step(tmp_path: Path) -> None:
    """The extra peak is that of the compared outputs, in units of a layer's output: no other outputs, and no graph."""
    layer = 2**21
    batches = DataLoader(TensorDataset(torch.randn(2 * layer // 4 // 64, 64)), batch_size=layer // 4 // 64)

    def peak(**options: Any) -> float:
        callbacks = [ModuleMonitorCallback(every_n_steps=1, reference="init", on_error="raise", **options)] if options else []
        torch.manual_seed(0)
        fit = trainer(tmp_path, callbacks, max_epochs=1)
        return peak_bytes(lambda: fit.fit(Deep(), batches)) / layer

    plain = peak()
    assert plain > 12
    single = peak(rules=[Rule(kinds="activation_difference", sites="layers.20", statistics="ratio")])
    everything = peak(rules=[Rule(kinds="activation_difference", leaf_modules=True, statistics="ratio")])
    slack = 6  # the layer at work: its difference, a copy, the table's buffers
    assert single <= plain + 1 + slack
    assert everything <= plain + 24 + slack
    checked = peak(rules=[], rcc=True)
    assert checked <= plain + 24 + slack
    print(plain, single, everything, checked)


Batch = TypeVar("Batch")


class OfBatches(Generic[Batch], LightningModule):
    """Objects cannot change to a class with several bases, whose memory layout differs."""


class Nested(OfBatches[list[Tensor]]):
    """Logs in every way, by itself and by a LightningModule within a plain container."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Talkative())
        self.steps = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model[0].model(x), y)
        self.log("loss", loss)
        self.model[0].log_dict({"inner": loss})
        assert self.logger is not None
        assert self.trainer.logger is not None
        for logger in (self.logger, self.trainer.logger, *self.loggers):
            logger.log_metrics({"own": float(loss.detach())}, self.global_step)
        self.print("x")
        self.trainer.should_stop = self.trainer.global_step == 3
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")  # of the inner module, which Lightning does not attach
@pytest.mark.parametrize(("kind", "site"), [(Talkative, "model"), (Nested, "model.0.model")])
def test_the_reference_is_silent_and_the_model_gets_its_batch_unchanged(
    kind: type[LightningModule], site: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is logged, printed or written twice, also by nested modules and the reference's trainer; training is unchanged."""
    runs = []
    for monitored in (False, True):
        seed()
        module, keep = kind(), KeepLosses()
        callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference="init", on_error="raise", store=False)
        logger = CSVLogger(tmp_path / str(monitored), flush_logs_every_n_steps=1)
        options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "max_steps": 5}
        reference = KeepReference(callback)
        fit = trainer(tmp_path, [callback, reference, keep] if monitored else [keep], **options)
        fit.fit(module, loader(), loader(8) if kind is Talkative else None)
        names, *rows = [line.split(",") for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()]
        columns = {name: [row[names.index(name)] for row in rows] for name in ("own", "accuracy", "loss") if name in names}
        logged = {name: [value for value in values if value] for name, values in columns.items()}
        weights = [tensor.tolist() for tensor in module.state_dict().values()]
        runs.append((logged, fit.global_step, list(map(float, keep.losses)), capsys.readouterr().out, sorted(fit.logged_metrics), weights))
        if monitored:
            assert callback.last_record is not None
            assert callback.last_record.values[f"activation_difference/{site}/norm"] > 0
            assert callback.last_record.values["monitor/errors"] == 0
            again = copy.deepcopy(reference.reference)
            assert kind is Talkative or pickle.loads(pickle.dumps(again)).model[0].log is again.model[0].log  # type: ignore[union-attr, index]
    assert runs[0] == runs[1]
    assert (runs[0][1], len(runs[0][0]["own"])) == ((5, 5) if kind is Talkative else (4, 12))


class WithoutLayers(Classifier):
    """Has parameters, and no layer of a type that the coordinate check knows."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Tanh()))
        self.cell = nn.LSTMCell(6, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.cell(self.model(batch[0]))[0], batch[1])


def test_a_coordinate_check_without_a_layer_that_it_knows_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not an error, because everything else is recorded; a rule of such a kind is an error."""
    callback = ModuleMonitorCallback(
        every_n_steps=1, rcc=True, module="model", rules=[Rule(kinds="activation", statistics="rms")], on_error="raise"
    )
    with caplog.at_level("INFO"):
        trainer(tmp_path, [callback], max_steps=2).fit(WithoutLayers(), loader(), loader(8))
    messages = [record.getMessage() for record in caplog.records if "rcc" in record.getMessage()]
    assert messages == [
        "rcc: none of the 3 modules is a layer that the coordinate check knows (Linear, convolution, embedding, normalization); "
        "nothing of it is recorded."
    ]
    assert callback.last_record is not None
    assert callback.last_record.values["activation/model.1/rms"] > 0
    tanh = Rule(kinds=["rcc_output", "rcc_input"], statistics="rms", sites="model.*")
    refused = ModuleMonitorCallback(reference="init", rules=[tanh])
    expected = (
        r"rules\[0\]\.kinds rcc_output, rcc_input: none of 5 modules is a layer that the coordinate check knows \(Linear, convolution"
    )
    with pytest.raises(ConfigError, match=expected):
        trainer(tmp_path, [refused], max_steps=1).fit(WithoutLayers(), loader(), loader(8))


def test_ignored_states_of_fsdp_are_mapped_to_a_copy_and_an_iterator_is_not_exhausted() -> None:
    """The model is wrapped after the copy: its wrapper must get the user's arguments."""
    module = Classifier("mlp")
    given = [*module.parameters()]
    strategy = FSDPStrategy(ignored_states=given)
    copied = LaidOutCopy(strategy, module)
    mapped = copied._options["ignored_states"]
    assert list(map(id, mapped)) == list(map(id, copied.module.parameters()))
    strategy = FSDPStrategy(ignored_states=iter(given))
    LaidOutCopy(strategy, module)
    assert list(map(id, strategy.kwargs["ignored_states"])) == list(map(id, given))


class CallsParts(Classifier):
    """Its training step calls the layers of a submodule, and never the submodule itself."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.model.layers:
            x = layer(x)
        return x.float().pow(2).mean()


def test_a_submodule_that_is_never_called_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its reference gets no arguments: one line suggests another name, and parameters are compared."""
    callback = ModuleMonitorCallback(1, reference="init", module="model")
    with caplog.at_level("INFO", LOGGER):
        trainer(tmp_path, [callback], max_steps=2).fit(CallsParts("mlp"), loader(), loader(8))
    assert [message for message in caplog.messages if "was not called" in message] == [
        "model itself was not called, only modules within it, so its reference did not run: no activation is compared. "
        "Give module the name of a submodule that is called as a whole."
    ]
    kinds = {key.split("/")[0] for key in load_store(callback.store_path or "")}
    assert ("parameter_difference" in kinds, "activation_difference" in kinds) == (True, False)
