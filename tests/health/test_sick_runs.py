"""Runs that were made sick on purpose: what is wrong, and where, is named within the steps that are promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import MixedPrecision
from helpers.training import Classifier, loader, seed, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import Finding, Health, ModuleMonitorCallback, load_store
from lightning_module_monitor.report.stored_run import read_run

ALL = "all"


def findings(folder: Path, model: nn.Module, health: Health, steps: int = 12, **options: Any) -> list[Finding]:
    """What is found in a run whose every step is monitored; the store has it, and judged by itself shows the same sites and steps."""
    seed()
    module = Sick(model, options.pop("optimizer", torch.optim.SGD), lr=options.pop("lr", 0.1))
    callback = ModuleMonitorCallback(1, health=health, on_error="raise")
    run = trainer(folder, [callback], max_steps=steps, max_epochs=-1, limit_val_batches=0, **{"precision": "32-true"} | options)
    run.fit(module, loader(32, 8), loader(8))
    store = load_store(callback.store_path)
    assert callback.findings == store.findings()
    order = [(one.name, one.site, one.step, one.words) for one in callback.findings]
    assert sorted((one.name, one.site, one.step, one.words) for one in read_run(store).verdict().findings) == sorted(order)
    # Runs of twelve steps are about other conditions than the loss; what follows from a cause is not the cause.
    follows = {"not_learning", *(name for one in callback.diagnose() for name in one.consequences)}
    return [one for one in callback.findings if one.name not in follows]


class Sick(Classifier):
    """Its optimizer gets what its model says that it gets."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer, options = self._optimizer
        return optimizer(getattr(self.model, "trained", self.model.parameters)(), **options)


def test_an_exploding_learning_rate(tmp_path: Path) -> None:
    """The first record that shows it, the second, has a finding that names the parameter with most of the gradient."""
    found = findings(tmp_path, nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), Health(watch=ALL), lr=1e3)
    assert (found[0].name, found[0].step) == ("exploding", 1)
    assert found[0].site.startswith("model.")
    assert "times its start, most of it in model." in found[0].words


def test_dead_relus(tmp_path: Path) -> None:
    """A bias of -10 kills a layer: the only finding comes after ten records."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    nn.init.constant_(model[2].bias, -10.0)
    [found] = findings(tmp_path, model, Health(watch=ALL))
    assert (found.name, found.site, found.step, found.key) == ("dead_units", "model.3", 9, "activation/model.3/dead_fraction")
    assert found.words == "model.3: 100% of the units are zero for every input, since step 0."


class Log(nn.Module):
    """A block with a logarithm between its layers."""

    def __init__(self, is_safe: bool) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.is_safe = is_safe

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x))
        return self.fc2(torch.log1p(h) if self.is_safe else torch.log(h))


@pytest.mark.parametrize("nonfinite", ["warn", "always"])
def test_a_logarithm_of_zero_in_one_block(nonfinite: str, tmp_path: Path) -> None:
    """The block whose code it is is named, and neither the layer that gets it nor those it spreads to; once."""
    model = nn.Sequential(Log(True), Log(True), Log(False), Log(True), nn.Linear(6, 3))
    [found] = findings(tmp_path, model, Health(nonfinite=nonfinite))
    assert (found.name, found.site, found.step, found.severity) == ("nonfinite", "model.2", 0, "error")
    assert "forward pass of micro-batch 0" in found.words
    assert "passes it to model.2.fc2" in found.words
    assert "infinity" in found.words


class Masked(nn.Module):
    """A softmax over masked logits, as its own module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.softmax = nn.Linear(6, 6), nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(self.fc(x).masked_fill(torch.arange(6) > 2, -torch.inf))


def test_a_mask_that_comes_before_is_not_accused(tmp_path: Path) -> None:
    """Infinities that a softmax has taken out again were there first, and are nobody's fault."""
    [found] = findings(tmp_path, nn.Sequential(Masked(), Log(True), Log(False), nn.Linear(6, 3)), Health(nonfinite="always"))
    assert (found.name, found.site) == ("nonfinite", "model.2")


def test_an_overflow_of_float16(tmp_path: Path) -> None:
    """The layer whose output leaves float16 is named, with the magnitudes of its input and its weights."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    with torch.no_grad():
        model[0].weight.mul_(100)
        model[1].weight.mul_(10_000)
    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    found, *_skipped = findings(tmp_path, model, Health(nonfinite="always"), plugins=[scaled], precision=None)
    assert (found.name, found.site, found.step) == ("nonfinite", "model.1", 0)
    assert "Its input is finite" in found.words
    assert "its output has infinity" in found.words or "its output has NaN" in found.words
    assert f"weights is {model[1].weight.abs().max().item():.4g}" in found.words


class Attention(nn.Module):
    """Attention by torch's function, or by a softmax of its own, on logits that are scaled at will."""

    def __init__(self, scale: float, own: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.softmax = nn.Linear(1, 8), nn.Linear(8, 3), nn.Softmax(-1)
        self.scale, self.own = scale, own

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.unsqueeze(-1))
        query, key, value = h, h, h
        if self.own:
            mixed = self.softmax(query @ key.transpose(1, 2) * self.scale) @ value
        else:
            mixed = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], scale=self.scale)[:, 0]
        return self.head(mixed.mean(1))


@pytest.mark.parametrize(("own", "name", "site"), [(False, "large_logits", "model.head_0"), (True, "saturation", "model.softmax")])
def test_a_saturated_softmax(own: bool, name: str, site: str, tmp_path: Path) -> None:
    """Logits that are far too large: in the third record."""
    found, *_logits = findings(tmp_path, Attention(1e5, own), Health(watch=ALL), lr=1e-6)
    assert (found.name, found.site, found.step) == (name, site, 2)


class Forgotten(nn.Sequential):
    """A model whose optimizer gets the head alone."""

    def trained(self) -> Any:
        return self[2].parameters()


class Detached(nn.Sequential):
    """A model whose first layer gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[1](self[0](x)).detach())


@pytest.mark.parametrize(("kind", "name", "step"), [(Forgotten, "no_optimizer", 0), (Detached, "frozen_updates", 3)])
def test_a_layer_that_is_frozen_by_mistake(kind: type[nn.Sequential], name: str, step: int, tmp_path: Path) -> None:
    """One that gets a gradient and that no optimizer has, in the first record; one that has not moved, after three."""
    found, *_updates = findings(tmp_path, kind(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), Health(watch=ALL))
    assert (found.name, found.site, found.step) == (name, "model.0.weight", step)
    assert "model.0.weight and 1 more" in found.words
    assert "model.2" not in found.words


def test_vanishing_gradients(tmp_path: Path) -> None:
    """In 40 plain layers the first ones get next to none: in the third record, the first layer before all."""
    layers = [module for _ in range(40) for module in (nn.Linear(6, 6), nn.Tanh())]
    [found] = findings(tmp_path, nn.Sequential(*layers, nn.Linear(6, 3)), Health(watch=ALL))
    assert (found.name, found.site, found.step) == ("vanishing", "model.0.weight", 2)
    assert "and" in found.words


# Further producers


class Root(nn.Module):
    """The square root, whose slope at 0 is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sqrt(x - x.detach())


class RootBetween(nn.Module):
    """The same in the code of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(h + torch.sqrt(h - h.detach()))


@pytest.mark.parametrize("nonfinite", ["warn", "always"])
@pytest.mark.parametrize("middle", [Root, RootBetween])
def test_a_gradient_that_goes_bad(middle: type[nn.Module], nonfinite: str, tmp_path: Path) -> None:
    """All outputs are finite, and so is the gradient that arrives at what makes infinity of it on its way back."""
    model = nn.Sequential(nn.Linear(6, 6), middle(), nn.Linear(6, 3))
    [found] = findings(tmp_path, model, Health(nonfinite=nonfinite))
    assert (found.name, found.site, found.step) == ("nonfinite", "model.1", 0)
    assert "in the backward pass" in found.words


def test_weights_that_went_bad_before(tmp_path: Path) -> None:
    """Then the module is not accused of its output."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    nn.init.constant_(model[1].bias, float("inf"))
    [found] = findings(tmp_path, model, Health(nonfinite="always"))
    assert found.site == "model.1"
    assert "Its weights are not finite (model.1.bias has infinity)" in found.words


def test_a_batch_that_is_bad(tmp_path: Path) -> None:
    """The finding names the batch, its step and its micro-batch."""
    x = torch.randn(32, 6)
    x[20, 3] = float("nan")
    data = DataLoader(TensorDataset(x, torch.zeros(32, dtype=torch.long)), batch_size=4)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    seed()
    callback = ModuleMonitorCallback(50, health=Health(nonfinite="always"))
    trainer(tmp_path, [callback], accumulate_grad_batches=2, limit_val_batches=0).fit(Classifier(model), data, loader(8))
    [found] = callback.findings
    assert (found.site, found.step) == ("_root_", 2)
    assert "micro-batch 1" in found.words
    assert found.words.endswith("the batch has it, or the LightningModule's own code before it. The batch has NaN, in sample 0.")


class BadLoss(Classifier):
    """Takes the logarithm of zero for its loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0]).pow(2).mean() + torch.log(torch.zeros(())) * (self.global_step == 3)


def test_a_loss_that_is_bad(tmp_path: Path) -> None:
    """No module is accused."""
    callback = ModuleMonitorCallback(50, health=Health(nonfinite="always"))
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    trainer(tmp_path, [callback], limit_val_batches=0).fit(BadLoss(model, torch.optim.SGD), loader(), loader(8))
    assert [(one.site, one.step) for one in callback.findings] == [("_root_", 0)]
    assert "the loss is NaN" in callback.findings[0].words
    assert callback.findings[0].words.endswith("The batch is finite.")
