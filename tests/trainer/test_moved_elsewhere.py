"""Parameters that other code moves than the Trainer's optimizers: true values from the second monitored step on, and never a false 0."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import Callback, LightningModule
from helpers.training import loader, seed, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitorCallback, Record, Rule, load_store
from lightning_module_monitor.report.stored_run import read_run

KINDS = ("parameter", "gradient", "update")


class Own(LightningModule):
    """Keeps the truth of each step: parameters before it, their gradients, and their change, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.truth: list[dict[str, dict[str, float]]] = []
        self.before: dict[str, Tensor] = {}
        self.arrived: dict[str, float] = {}

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.last(torch.tanh(self.first(batch[0]))), batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = {name: one.detach().double() for name, one in self.named_parameters()}
        self.arrived = {}

    def on_train_batch_end(self, *_args: Any) -> None:
        parameters = {name: one.detach().double() for name, one in self.named_parameters()}
        now = {name: {"parameter": float(one.norm())} for name, one in self.before.items()}
        for name, values in now.items():
            values["update"] = float((parameters[name] - self.before[name]).norm())
            values["gradient"] = self.arrived.get(name, 0.0)
        self.truth.append(now)

    def note(self, parameter: Tensor) -> None:
        """The gradient of a parameter has arrived."""
        name = next(name for name, one in self.named_parameters() if one is parameter)
        assert parameter.grad is not None
        self.arrived[name] = float(parameter.grad.double().norm())


class WithinBackward(Own):
    """An optimizer for each parameter steps as soon as its gradient is there, except for the names that the Trainer's optimizer has."""

    def __init__(self, of_trainer: str = "none", others: str = "") -> None:
        super().__init__()
        self.of_trainer, self.others = of_trainer, others

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, one in self.named_parameters():
            if one.grad is not None and name not in self.arrived:
                self.note(one)

    def configure_optimizers(self) -> Any:
        def step(parameter: Tensor) -> None:
            self.note(parameter)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        names = dict(self.named_parameters())
        kept = [one for name, one in names.items() if self.of_trainer != "none" and name.startswith(self.others)]
        within = [one for name, one in names.items() if not (self.others and name.startswith(self.others))]
        optimizers = {one: torch.optim.SGD([one], lr=0.1, momentum=0.9) for one in within}
        for one in within:
            one.register_post_accumulate_grad_hook(step)
        return torch.optim.SGD(kept, lr=0.1) if kept else None


class ByHand(Own):
    """A loop of another library within ``training_step``, whose optimizer Lightning does not know, and which sets gradients to zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        loss.backward()
        for one in self.parameters():
            self.note(one)
        self.own.step()
        self.own.zero_grad(set_to_none=False)
        self.log("loss", loss)

    def configure_optimizers(self) -> None:
        self.own = torch.optim.Adam(self.parameters(), lr=1e-2)


class Kept(ByHand):
    """The same beside an optimizer of the Trainer's, which never steps, and gradients that stay where they are until the next step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.own.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        for one in self.parameters():
            self.note(one)
        self.own.step()

    def configure_optimizers(self) -> Any:
        super().configure_optimizers()
        return torch.optim.SGD(self.parameters(), lr=0.1)


WAYS: dict[str, tuple[Callable[[], Own], tuple[str, ...]]] = {
    "within backward, no optimizer": (WithinBackward, ("first.", "last.")),
    "within backward, and an optimizer": (lambda: WithinBackward("all"), ("first.", "last.")),
    "within backward, and an optimizer of the rest": (lambda: WithinBackward("rest", "last"), ("first.",)),
    "by hand": (ByHand, ("first.", "last.")),
    "by hand, with gradients that stay": (Kept, ("first.", "last.")),
}


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer:UserWarning")
@pytest.mark.parametrize("name", WAYS)
def test_true_values_or_none(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first step shows that parameters move elsewhere, and has none of their values; one warning says so; the next ones have all."""
    make, elsewhere = WAYS[name]
    records: list[Record] = []
    total = Rule(kinds="parameter", statistics="norm", per_module="_root_")
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds=KINDS, statistics="norm"), total], on_error="raise")
    keep = type("Keep", (Callback,), {"on_train_batch_end": lambda *_args: records.append(callback.last_record)})()
    seed()
    module = make()
    caplog.set_level(logging.INFO)
    trainer(tmp_path, [callback, keep], max_epochs=3, limit_train_batches=5).fit(module, loader())
    assert [record.step for record in records] == [*range(15)]
    for number, record in enumerate(records):
        for site, values in module.truth[number].items():
            is_known = number > 0 or not site.startswith(elsewhere)
            for kind, value in values.items():
                expected = pytest.approx(value, rel=1e-5) if is_known else None
                assert record.values.get(f"{kind}/{site}/norm") == expected, (number, kind, site)
        whole = math.hypot(*(values["parameter"] for values in module.truth[number].values()))
        assert record.values.get("parameter/_root_/norm") == (pytest.approx(whole, rel=1e-5) if number else None)
    warnings = [message for message in caplog.messages if "moved by other code" in message]
    assert len(warnings) == 1
    assert all(kind in warnings[0] for kind in KINDS)
    findings = read_run(load_store(callback.store_path)).verdict().findings
    assert [finding.name for finding in findings] == []


class Target(Own):
    """Two optimizers, or one, by hand, and a target that follows after their steps, or before them, and requires a gradient."""

    def __init__(self, num_optimizers: int, is_last: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.target, self.num_optimizers, self.is_last = nn.Linear(8, 3), num_optimizers, is_last

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if not self.is_last:
            self.follow()
        optimizers: Any = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()
        for name, one in self.named_parameters():
            self.arrived[name] = 0.0 if one.grad is None else float(one.grad.double().norm())
        if self.is_last:
            self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        for one, other in zip(self.target.parameters(), self.last.parameters(), strict=True):
            one.lerp_(other, 0.1)

    def configure_optimizers(self) -> Any:
        parts = [self.first, self.last] if self.num_optimizers == 2 else [nn.ModuleList([self.first, self.last])]
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_a_target_that_follows(num_optimizers: int, is_last: bool, tmp_path: Path) -> None:
    """Its update is its change in the whole step, whenever it moves, and never a false 0; those of the others are as ever."""
    records: list[Record] = []
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds=KINDS, statistics="norm")], on_error="raise", store=False)
    keep = type("Keep", (Callback,), {"on_train_batch_end": lambda *_args: records.append(callback.last_record)})()
    seed()
    module = Target(num_optimizers, is_last)
    trainer(tmp_path, [callback, keep], max_steps=4 * num_optimizers, limit_val_batches=0).fit(module, loader())
    assert len(records) == 4
    for number, record in enumerate(records):
        for site, values in module.truth[number].items():
            is_known = is_last or number > 0 or not site.startswith("target")
            for kind in ("update", "parameter") if site.startswith("target") else KINDS:
                expected = pytest.approx(values[kind], rel=1e-5) if is_known else None
                assert record.values.get(f"{kind}/{site}/norm") == expected, (number, kind, site)
    assert [finding.name for finding in callback.findings] == []


class Sometimes(Own):
    """Code normalizes a part in each step, of which the first has no gradient of it; later it is an ordinary one."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.last.weight.div_(self.last.weight.norm())
        if self.trainer.global_step == 0:
            return self.first(batch[0]).square().mean()
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.arrived = {name: 0.0 if one.grad is None else float(one.grad.double().norm()) for name, one in self.named_parameters()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_parameter_that_its_optimizer_steps_again(tmp_path: Path) -> None:
    """From the second step with a gradient on it is observed as any other: its gradient is the whole one of accumulated micro-batches."""
    records: list[Record] = []
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds=KINDS, statistics="norm")], on_error="raise", store=False)
    keep = type("Keep", (Callback,), {"on_train_batch_end": lambda *_args: records.append(callback.last_record)})()
    seed()
    module = Sometimes()
    trainer(tmp_path, [callback, keep], max_steps=4, limit_val_batches=0, accumulate_grad_batches=2).fit(module, loader())
    last, truth = records[-1], module.truth[-1]
    assert last.step == 3
    for site in ("last.weight", "last.bias", "first.weight"):
        assert last.values[f"gradient/{site}/norm"] == pytest.approx(truth[site]["gradient"], rel=1e-5)
