"""Parameters that other code moves than the Trainer's optimizers: true values from the second monitored step on, and never a false 0."""

from __future__ import annotations

import logging
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
            values["gradient"] = self.arrived[name]
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


WAYS: dict[str, tuple[Callable[[], Own], tuple[str, ...]]] = {
    "within backward, no optimizer": (WithinBackward, ("first.", "last.")),
    "within backward, and an optimizer": (lambda: WithinBackward("all"), ("first.", "last.")),
    "within backward, and an optimizer of the rest": (lambda: WithinBackward("rest", "last"), ("first.",)),
    "by hand": (ByHand, ("first.", "last.")),
}


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer:UserWarning")
@pytest.mark.parametrize("name", WAYS)
def test_true_values_or_none(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first step shows that parameters move elsewhere, and has none of their values; one warning says so; the next ones have all."""
    make, elsewhere = WAYS[name]
    records: list[Record] = []
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds=KINDS, statistics="norm")], on_error="raise")
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
    warnings = [message for message in caplog.messages if "moved by other code" in message]
    assert len(warnings) == 1
    assert all(kind in warnings[0] for kind in KINDS)
    findings = read_run(load_store(callback.store_path)).verdict().findings
    assert [finding.name for finding in findings] == []
