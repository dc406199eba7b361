"""Layers that hooks of the module make, after the callback has read the names of the model."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import Trainer
from helpers.training import Classifier, loader, trainer
from torch import Tensor, nn

from lightning_module_monitor import (
    Health,
    ModuleMonitor,
    ModuleMonitorCallback,
    NonfiniteError,
    Rule,
    load_store,
)
from lightning_module_monitor.monitor import monitor_of


class BuildsLate(Classifier):
    """Makes its last layer in a hook, which runs after that of the callback."""

    def __init__(self, hook: str) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), torch.optim.SGD, lr=0.1)
        self.hook = hook
        self.norms: dict[str, float] = {}

    def build(self, hook: str) -> None:
        if hook == self.hook and len(self.model) == 2:
            self.model.append(nn.Linear(8, 3))

    def on_fit_start(self) -> None:
        self.build("on_fit_start")

    def on_train_start(self) -> None:
        self.build("on_train_start")

    def configure_optimizers(self) -> Any:
        self.build("configure_optimizers")
        return super().configure_optimizers()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = self.named_parameters()
        self.norms = {name: parameter.grad.double().norm().item() for name, parameter in parameters if parameter.grad is not None}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.model(batch[0])


@pytest.mark.parametrize("is_validated_before", [False, True])
@pytest.mark.parametrize("hook", ["configure_optimizers", "on_fit_start", "on_train_start"])
def test_layers_that_hooks_of_the_module_build_are_observed(hook: str, is_validated_before: bool, tmp_path: Path) -> None:
    """With all kinds, also of the reference, and in totals; an optimizer that was made before does not have such a layer."""
    callback = ModuleMonitorCallback(1, reference="init", stages=["train", "validate"])
    module = BuildsLate(hook)
    limits = {"num_sanity_val_steps": 1 if is_validated_before else 0, "limit_val_batches": 1}
    run = trainer(tmp_path, [callback], max_epochs=1, limit_train_batches=3, **limits)
    run.fit(module, loader(), loader(8))
    assert callback.store_path is not None
    store = load_store(callback.store_path)
    values = {key: store[key][1][-1] for key in store}
    assert {f"{kind}/model.2/{statistic}" for kind, statistic in (("activation", "rms"), ("activation_difference", "ratio"))} <= {*values}
    assert "validation/activation/model.2/rms" in values
    assert len(module.norms) == 4
    assert {name: values[f"gradient/{name}/norm"] for name in module.norms} == pytest.approx(module.norms, rel=1e-6)
    assert values["gradient/_root_/norm"] == pytest.approx(math.hypot(*module.norms.values()), rel=1e-6)
    assert bool([finding for finding in callback.findings if finding.name == "no_optimizer"]) == (hook != "configure_optimizers")


class AddsParameters(Classifier):
    """Adds a parameter to a layer, and normalizes the weight of another, after its ``__init__``."""

    def configure_optimizers(self) -> Any:
        self.model[0].scale = nn.Parameter(torch.ones(()))
        nn.utils.weight_norm(self.model[1])
        self.model[0].register_forward_hook(lambda layer, _args, output: output * layer.scale)
        return super().configure_optimizers()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_parameters_that_a_hook_of_the_module_adds(tmp_path: Path) -> None:
    """To layers that there were."""
    callback = ModuleMonitorCallback(1, on_error="raise")
    module = AddsParameters(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), torch.optim.SGD, lr=0.1)
    fit(tmp_path, module, callback)
    assert callback.last_record is not None
    gradients = {name: parameter.grad.double().norm().item() for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert {"model.0.scale", "model.1.weight_g", "model.1.weight_v"} <= {*gradients}
    values = {name: callback.last_record.values[f"gradient/{name}/norm"] for name in gradients}
    assert values == pytest.approx(gradients, rel=1e-6)
    assert callback.last_record.values["gradient/_root_/norm"] == pytest.approx(math.hypot(*gradients.values()), rel=1e-6)


def fit(folder: Path, module: Classifier, callback: ModuleMonitorCallback, **options: Any) -> Trainer:
    """Three steps."""
    run = trainer(folder, [callback], **{"max_epochs": 1, "limit_train_batches": 3, "limit_val_batches": 0} | options)
    run.fit(module, loader(), loader(8))
    return run


def test_all_that_knows_the_model_knows_them(tmp_path: Path) -> None:
    """The table of modules in the store, and the monitor of such a layer, which a sanity check finds as well."""

    class Asks(BuildsLate):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            assert monitor_of(self.model[2]) is callback.monitor
            loss: Tensor = super().training_step(batch, batch_idx)
            return loss

    callback = ModuleMonitorCallback(1, store=tmp_path / "run.h5")
    fit(tmp_path, Asks("on_fit_start"), callback, limit_val_batches=1, num_sanity_val_steps=1)
    assert callback.last_record is not None
    assert "activation/model.2/rms" in callback.last_record.values
    store = load_store(tmp_path / "run.h5")
    assert [(info.name, info.type, info.num_parameters, info.output_shape) for info in store.modules()][1:] == [
        ("model", "Sequential", 83, (4, 3)),
        ("model.0", "Linear", 56, (4, 8)),
        ("model.1", "ReLU", 0, (4, 8)),
        ("model.2", "Linear", 27, (4, 3)),
    ]


class Logarithm(nn.Module):
    """Of numbers below 0, which is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(-1 - x.abs())


def test_a_nan_in_such_a_layer_is_found_before_the_step(tmp_path: Path) -> None:
    """By its name, also where it has replaced another layer; the weights are as before the step."""

    class Fails(BuildsLate):
        def build(self, hook: str) -> None:
            if hook == self.hook:
                self.model[1] = Logarithm()
                self.model.append(nn.Linear(8, 3))

    module = Fails("on_fit_start")
    with pytest.raises(NonfiniteError, match=r"Step 0, model\.1: NaN"):
        fit(tmp_path, module, ModuleMonitorCallback(1, health=Health(nonfinite="stop")))
    assert all(parameter.isfinite().all() for parameter in module.parameters())


class Adapted(Classifier):
    """Puts a module around a layer, as LoRA does."""

    def configure_optimizers(self) -> Any:
        self.model[0] = nn.Sequential(self.model[0], nn.Linear(8, 8))
        return super().configure_optimizers()


def test_options_that_name_what_was_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They hold for the model before, and a line tells why later layers are not observed; without such options all are."""
    network = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    named = ModuleMonitorCallback(1, rules=Rule(kinds="gradient", sites=r"model\.0\.weight", statistics="norm"))
    run = fit(tmp_path / "named", module := Adapted(copy.deepcopy(network), torch.optim.SGD, lr=0.1), named)
    assert isinstance(module.model[0], nn.Sequential)
    gradient = module.model[0][0].weight.grad
    assert gradient is not None
    assert named.last_record is not None
    assert named.last_record.values["gradient/model.0.weight/norm"] == pytest.approx(gradient.double().norm().item(), rel=1e-6)
    assert named.last_record.values["monitor/errors"] == 0.0
    assert run.state.finished
    [line] = [message for message in caplog.messages if "not observed" in message]
    assert line.startswith("Layers that were made since setup are not observed, as options are for the model before: ")
    assert "model.0.weight" in line.replace("\\", "")
    whole = ModuleMonitorCallback(1)
    fit(tmp_path / "whole", Adapted(copy.deepcopy(network), torch.optim.SGD, lr=0.1), whole)
    assert whole.last_record is not None
    assert {"gradient/model.0.0.weight/norm", "gradient/model.0.1.weight/norm"} <= {*whole.last_record.values}


def test_a_metric_that_equals_another_is_no_new_layer() -> None:
    """Modules are compared by identity: some define ``__eq__``, or have a hash that changes."""

    class Odd(nn.Module):
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = nn.Module.__hash__

    model = nn.Sequential(nn.Linear(2, 2), Odd())
    with ModuleMonitor(rules=Rule(kinds="parameter", statistics="norm")) as monitor:
        monitor.set_module(model)
        index = monitor.engine.model.index
        assert index.is_complete()
        model.append(nn.Linear(2, 2))
        assert not index.is_complete()
