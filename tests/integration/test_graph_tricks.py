"""What a forward pass does besides calling layers: transforms, parts without a graph, and the hooks of other libraries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import Callback, LightningModule, Trainer
from helpers.textbook import slack, textbook
from helpers.tiny import KeepRecords
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from lightning_module_monitor import Capture, GradientFlow, ModuleMonitorCallback, Record, Rule, load_store

NAMES = ["mean", "std", "norm", "abs_max", "zero_fraction", "skewness", "kurtosis"]
# Torch's own forward mode, and its compiler, call what torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")


class Tricks(nn.Module):
    """A layer mapped over the samples, one with other weights than its own, one without a graph, and one that is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped, self.called = nn.Linear(6, 6), nn.Linear(6, 6)
        self.silent, self.differentiated = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = vmap(self.mapped)(x)
        doubled = {name: 2 * parameter for name, parameter in self.called.named_parameters()}
        h = torch.tanh(functional_call(self.called, doubled, (h,)))
        with torch.no_grad():
            shift = self.silent(x)
        slope = grad(lambda z: torch.tanh(self.differentiated(z)).sum())(h)
        prediction: Tensor = self.head(h + shift + slope)
        return prediction

    def by_hand(self, x: Tensor) -> dict[str, Tensor]:
        """Every layer's output, without any trick."""
        found = {"mapped": F.linear(x, self.mapped.weight, self.mapped.bias)}
        found["called"] = F.linear(found["mapped"], 2 * self.called.weight, 2 * self.called.bias)
        h = torch.tanh(found["called"])
        found["silent"] = F.linear(x, self.silent.weight, self.silent.bias).detach()
        found["differentiated"] = F.linear(h, self.differentiated.weight, self.differentiated.bias)
        slope = (1 - torch.tanh(found["differentiated"]) ** 2) @ self.differentiated.weight
        found["head"] = F.linear(h + found["silent"] + slope, self.head.weight, self.head.bias)
        return found


class Before(Callback):
    """Keeps the weights and the batch that every step begins with."""

    def __init__(self) -> None:
        self.steps: list[tuple[dict[str, Tensor], list[Tensor]]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        state = {name: value.detach().clone() for name, value in pl_module.model.state_dict().items()}
        self.steps.append((state, [one.clone() for one in batch]))


def run(model: Callable[[], nn.Module], folder: Path, **options: Any) -> tuple[list[Record], Before, LightningModule]:
    """Three steps with the monitor; as many without it have the same losses and weights."""
    runs = []
    for monitored in (False, True):
        rules = [Rule(kinds=["activation", "activation_gradient", "parameter", "gradient"], statistics=NAMES)]
        callback, keep, before = ModuleMonitorCallback(1, rules=rules, **options), KeepLosses(), Before()
        records = KeepRecords(callback)
        seed()
        module = Classifier(model(), torch.optim.SGD, lr=0.1)
        callbacks: list[Callback] = [before, callback, records, keep] if monitored else [keep]
        trainer(folder, callbacks, max_steps=3, limit_val_batches=0).fit(module, loader(), loader(8))
        runs.append((keep.losses, module.state_dict()))
    (plain, weights), (losses, others) = runs
    assert all(torch.equal(a, b) for a, b in zip(plain, losses, strict=True))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert len(records.records) == 3
    return records.records, before, module


def assert_true(record: Record, kind: str, site: str, truth: Tensor) -> None:
    """Every statistic is the textbook's."""
    for name in NAMES:
        near = 1e-6 * slack(name, truth)
        value = record.values[f"{kind}/model.{site}/{name}"]
        assert value == pytest.approx(textbook(name, truth), rel=1e-5, abs=near), f"{kind} {site} {name}"


def test_transforms_and_parts_without_a_graph(tmp_path: Path) -> None:
    """Nothing of a layer under a transform; the output that a call with other weights had; what has no gradient has none recorded."""
    capture = Capture(sites="model.called", kinds=["activation", "activation_gradient"], steps=[2])
    flow = GradientFlow(blocks=["model.called", "model.head"])
    records, before, _module = run(Tricks, tmp_path, capture=capture, gradient_flow=flow)
    for record, (state, (x, y)) in zip(records, before.steps, strict=True):
        model = Tricks().double()
        model.load_state_dict(state)
        truth = model.by_hand(x.double())
        for output in truth.values():
            if output.requires_grad:
                output.retain_grad()
        F.cross_entropy(truth["head"], y).backward()
        assert record.values["monitor/errors"] == 0
        for site in ("called", "silent", "head"):
            assert_true(record, "activation", site, truth[site].detach())
        norms = {}
        for site in ("called", "head"):
            gradient = truth[site].grad
            assert gradient is not None
            norms[site] = float(gradient.norm())
            assert_true(record, "activation_gradient", site, gradient)
        gain = record.values["gradient_flow/model.called-model.head/gain"]
        assert gain == pytest.approx(norms["called"] / norms["head"], rel=1e-5)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert_true(record, "gradient", name, parameter.grad)
        absent = "activation_gradient/model.silent", "gradient/model.silent", "activation/model.mapped", "activation/model.differentiated"
        assert not any(key.startswith(absent) for key in record.values)
    store = load_store(tmp_path / "monitor.h5")
    assert truth["called"].grad is not None
    torch.testing.assert_close(store.tensor("activation", "model.called", step=2).double(), truth["called"].detach())
    torch.testing.assert_close(store.tensor("activation_gradient", "model.called", step=2).double(), truth["called"].grad)


class Hooked(nn.Module):
    """Layers with hooks of all sorts, as other libraries put them on, and a weight that is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6), nn.Linear(6, 3)
        self.calls: Counter[str] = Counter()
        self.first.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
        self.second.register_forward_hook(lambda _module, _args, output: output + 1)
        self.second.register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] / 2,))
        self.head.register_full_backward_pre_hook(lambda _module, outputs: (outputs[0] * 3,))
        self.second.weight.register_hook(lambda gradient: gradient * 2)
        self.head.weight.register_post_accumulate_grad_hook(lambda _weight: self.count("weight"))
        for name in ("first", "second", "head"):
            self.get_submodule(name).register_forward_hook(lambda *_args, name=name: self.count(name))

    def count(self, name: str) -> None:
        self.calls[name] += 1

    def forward(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return prediction

    def by_hand(self, x: Tensor, y: Tensor) -> dict[tuple[str, str], Tensor]:
        """Activations with what hooks do to them, and gradients with what hooks do to these, by the chain rule written out."""
        first = F.linear(2 * x, self.first.weight, self.first.bias)
        second = F.linear(torch.tanh(first), self.second.weight, self.second.bias) + 1
        head = F.linear(torch.tanh(second), self.head.weight, self.head.bias)
        of_loss = (head.softmax(1) - F.one_hot(y, 3)) / len(y)
        of_second = 3 * of_loss @ self.head.weight * (1 - torch.tanh(second) ** 2)
        of_first = of_second @ self.second.weight / 2 * (1 - torch.tanh(first) ** 2)
        return {
            ("activation", "first"): first,
            ("activation", "second"): second,
            ("activation", "head"): head,
            ("activation_gradient", "head"): 3 * of_loss,
            ("activation_gradient", "second"): of_second,
            ("activation_gradient", "first"): of_first,
            ("gradient", "head.weight"): 3 * of_loss.T @ torch.tanh(second),
            ("gradient", "second.weight"): 2 * of_second.T @ torch.tanh(first),
        }


def test_hooks_of_others_on_the_same_modules(tmp_path: Path) -> None:
    """What they change is measured as they have changed it; they are called as often as without the monitor, and stay."""
    records, before, module = run(Hooked, tmp_path, store=False)
    for record, (state, (x, y)) in zip(records, before.steps, strict=True):
        model = Hooked().double()
        model.load_state_dict(state)
        with torch.no_grad():
            truth = model.by_hand(x.double(), y)
        assert record.values["monitor/errors"] == 0
        for (kind, site), tensor in truth.items():
            assert_true(record, kind, site, tensor)
    assert module.model.calls == {"first": 3, "second": 3, "head": 3, "weight": 3}
    assert [len(part._forward_hooks) for part in (module.model.first, module.model.second, module.model.head)] == [1, 2, 1]
