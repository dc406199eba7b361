"""How much outputs, inputs and labels differ between samples, and from which module on outputs are constant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.graphs import needs_node_shapes
from helpers.lightning_package import LightningModule
from helpers.training import trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import ModuleMonitorCallback, Record
from lightning_module_monitor.health.whole_run import constant_from
from lightning_module_monitor.trainer import variation as module
from lightning_module_monitor.trainer.variation import sample_dimension, variation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
@pytest.mark.parametrize(("shape", "dimension"), [((6,), 0), ((6, 5), 0), ((5, 6), 1), ((3, 6, 2, 4), 1)])
def test_the_formula(dtype: torch.dtype, shape: tuple[int, ...], dimension: int) -> None:
    """Against float64, with samples along any dimension."""
    torch.manual_seed(0)
    x = (100 * torch.rand(shape) + 20).to(dtype)
    samples = x.double().movedim(dimension, 0).flatten(1) if x.dim() > 1 else x.double()[:, None]
    expected = float((samples - samples[:1]).norm() / samples.norm())
    # The difference of two numbers of half precision is rounded.
    assert float(variation(x, dimension)) == pytest.approx(expected, rel=2e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-5)


def test_samples_that_are_the_same() -> None:
    """Exactly 0, also if all elements are 0; an element that is not finite makes it NaN."""
    assert float(variation(torch.rand(1, 7).expand(4, 7), 0)) == 0.0
    assert float(variation(torch.zeros(4, 7), 0)) == 0.0
    assert float(variation(torch.full((4, 7), 2000.0) + 1e-3 * torch.rand(4, 1), 0)) > 1e-8
    assert torch.isnan(variation(torch.tensor([[1.0], [torch.inf]]), 0))


def test_of_a_large_tensor_some_features_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly spaced ones; all samples count."""
    monkeypatch.setattr(module, "MAX_ELEMENTS", 100)
    x = torch.zeros(10, 40)
    x[9, 4] = 1.0  # every fourth feature is looked at
    assert float(variation(x, 0)) == pytest.approx(1.0)
    assert float(variation(x.T, 1)) == pytest.approx(1.0)


def test_the_dimension_of_the_samples() -> None:
    """The first of the batch's length; none for a single sample."""
    assert [sample_dimension(torch.zeros(4, 8, 4), num) for num in (4, 8, 5, 1, 0)] == [0, 1, None, None, None]


class Parts(LightningModule):
    """Layers, of which one may forget its input; its last module but one is constant by design."""

    def __init__(self, forgets: str = "", turns: bool = False) -> None:
        super().__init__()
        self.position = nn.Embedding(1, 6)
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 3)
        self.forgets, self.turns = forgets, turns
        if forgets == "middle":
            nn.init.zeros_(self.middle[1].weight)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0] * 0 + 1 if self.forgets == "input" else batch[0]
        x = x.expand(2, -1, -1) if self.turns else x
        h = self.middle(self.first(x)) + self.position.weight
        y = self.last(h)
        return F.cross_entropy(y[0] if self.turns else y, batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.last(torch.randn(len(batch[0]), 6))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def data(size: int = 8, labels: Tensor | None = None) -> DataLoader[Any]:
    """Four batches whose input varies."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(4 * size) % 3 if labels is None else labels
    return DataLoader(TensorDataset(torch.rand(4 * size, 6, generator=generator), y), batch_size=size)


def fitted(folder: Path, model: LightningModule, batches: DataLoader[Any], **options: Any) -> tuple[ModuleMonitorCallback, list[Record]]:
    """The callback and the records of three steps."""
    records: list[Record] = []
    callback = ModuleMonitorCallback(1, store=False, on_error="raise")
    model.on_train_batch_end = lambda *_args: records.append(callback.last_record)  # type: ignore[assignment, method-assign]
    trainer(folder, [callback], max_steps=3, **{"limit_val_batches": 0} | options).fit(model, batches, batches)
    return callback, [*{record.step: record for record in records if record is not None}.values()]


def of_context(records: list[Record], name: str) -> list[float]:
    """A number of the context in each record that has it."""
    return [record.values[f"context/{name}"] for record in records if f"context/{name}" in record.values]


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(("forgets", "site"), [("", None), ("input", "first"), ("middle", "middle.1")])
def test_where_outputs_become_constant(forgets: str, site: str | None, turns: bool, tmp_path: Path) -> None:
    """The module from which on all are; an embedding of positions does not count, nor a container that returns what its last part does."""
    callback, records = fitted(tmp_path, Parts(forgets, turns), data())
    order = callback._shown.results.history.facts.order
    assert order == ("first", "middle.0", "middle.1", "last")
    [begin] = {*of_context(records, "constant_from")}  # of the first record, in each of them
    assert (None if begin == -1 else order[int(begin)]) == site
    assert all((value < 1e-6) == (site is not None) for value in of_context(records, "output_variation"))
    assert len(of_context(records, "output_variation")) == 3
    assert constant_from(callback._shown.results.history) == (site or "")


def test_the_numbers_are_those_of_the_step(tmp_path: Path) -> None:
    """Of the largest tensor of the batch and of the last module's output; validation in between adds nothing."""
    model, batches = Parts(), data()
    _callback, records = fitted(tmp_path, model, batches, limit_val_batches=1, val_check_interval=1)
    for record, (x, _y) in zip(records, batches, strict=False):
        output = model.last(model.middle(model.first(x)) + model.position.weight).detach()
        assert record.values["context/input_variation"] == pytest.approx(float(variation(x, 0)), rel=1e-6)
        assert record.values["context/output_variation"] == pytest.approx(float(variation(output, 0)), rel=1e-5)
    assert not any(part._forward_hooks for part in model.modules())


def test_micro_batches_count_by_the_largest(tmp_path: Path) -> None:
    """And those of a single sample do not count; eight labels are the fewest."""
    batches = data(4)
    _callback, [record, *_rest] = fitted(tmp_path, Parts(), batches, accumulate_grad_batches=2)
    expected = max(float(variation(x, 0)) for x, _y in [*batches][:2])
    assert record.values["context/input_variation"] == pytest.approx(expected, rel=1e-6)
    assert "context/target_min" not in record.values
    _callback, records = fitted(tmp_path, Parts(), data(1), accumulate_grad_batches=2)
    names = {key for one in records for key in one.values}
    assert names.isdisjoint({"context/input_variation", "context/output_variation", "context/constant_from", "context/same_units"})


@pytest.mark.parametrize("labels", [torch.arange(32) % 3, torch.arange(32) // 8 % 3])
def test_the_range_of_labels(labels: Tensor, tmp_path: Path) -> None:
    """The least and the largest label of a batch, which are the same in batches of one class."""
    needs_node_shapes()
    _callback, records = fitted(tmp_path, Parts(), data(8, labels))
    expected = [(int(of_batch.min()), int(of_batch.max())) for of_batch in labels.split(8)[:3]]
    assert [*zip(of_context(records, "target_min"), of_context(records, "target_max"), strict=True)] == expected


class Detector(nn.Module):
    """Returns something before its output that is the same for all samples, and a second output, which is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.second = nn.Linear(6, 3), nn.Linear(6, 2)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"anchors": torch.arange(4.0).expand(len(x), 4), "logits": self.layer(x), "second": self.second(x)}


class Inner(LightningModule):
    """Computes the loss of a module inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0])["logits"], batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_model_that_returns_several_tensors(tmp_path: Path) -> None:
    """Which one is the output is not known: the one that varies most counts."""
    module, batches = Inner(Detector()), data()
    _callback, records = fitted(tmp_path, module, batches)
    outputs = [module.model.layer(x).detach() for x, _y in batches][:3]
    assert of_context(records, "output_variation") == pytest.approx([float(variation(output, 0)) for output in outputs], rel=1e-5)
    assert min(of_context(records, "output_variation")) > 0.1


class Layers(nn.Module):
    """Returns logits, and what each of many layers returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(x)} | {f"layer {number}": x for number in range(20)}


def test_few_tensors_of_an_output_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of the model's, in each step."""
    taken = []
    monkeypatch.setattr(module, "variation", lambda tensor, dimension: taken.append(1) or variation(tensor, dimension))
    fitted(tmp_path, Inner(Layers()), data())
    assert len(taken) == (1 + 1 + 4) + 4 + 4  # the layer and its units, too, in the first step


class Agent(nn.Module):
    """Computes values, and the targets of these from its own values of what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.last = nn.Linear(6, 3), nn.Identity()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            following = self.values(x.flip(0))
        return {"logits": self.last(self.values(x) + 0 * following)}


class Frozen(nn.Module):
    """A frozen part that runs without gradients, and shares its activation with the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.activation = nn.Linear(6, 6), nn.Linear(6, 3), nn.ReLU()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            hidden = self.activation(self.body(x))
        return {"logits": self.activation(self.head(hidden))}


@pytest.mark.parametrize(("make", "expected"), [(Agent, True), (Frozen, False), (Detector, False)])
def test_targets_that_a_module_computes_inside(make: type[nn.Module], expected: bool, tmp_path: Path) -> None:
    """The last layer with parameters runs with gradients and without, though the module around it always has them."""
    callback, _records = fitted(tmp_path, Inner(make()), data())
    assert callback._shown.results.calls.without_gradient is expected
