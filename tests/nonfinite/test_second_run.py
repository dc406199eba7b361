"""A step that is run again: the data that is kept, its limit, and the findings if the module cannot be shown."""

from __future__ import annotations

import weakref
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import Classifier, loader, seed, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import Finding, Health, ModuleMonitorCallback
from lightning_module_monitor.nonfinite import second_run
from lightning_module_monitor.nonfinite.second_run import SecondRun


def alive(batches: list[Any], limit: int, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each batch still exists when the last micro-batch runs, without other references to it."""
    monkeypatch.setattr(second_run, "MAX_EARLIER_BYTES", limit)
    step, tensors = SecondRun(Classifier("mlp"), [], []), []
    for number in range(len(batches)):
        tensors.append(weakref.ref(batches[0][0]))
        step.keep(batches.pop(0), number)
    return [tensor() is not None for tensor in tensors]


def test_kept_batches_of_a_step_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of earlier micro-batches hold at most that many bytes; the running batch is held anyway."""

    def batches() -> list[Any]:
        return [[torch.zeros(64), {"y": torch.zeros(16, dtype=torch.int32)}] for _ in range(5)]  # 256 and 64 bytes

    assert alive(batches(), 4 * 320, monkeypatch) == [True] * 5
    assert alive(batches(), 4 * 320 - 1, monkeypatch) == [True, True, True, False, True]
    assert alive(batches(), 0, monkeypatch) == [False] * 4 + [True]


def test_shared_memory_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a tensor hold its whole storage, once; and no further memory if the running batch is a part, too."""

    def parts() -> list[Any]:
        whole = torch.zeros(4, 64)
        return [[whole[number]] for number in range(4)]

    assert alive([*parts(), [torch.zeros(1)]], 4 * 256, monkeypatch) == [True] * 5
    assert alive([*parts(), [torch.zeros(1)]], 4 * 256 - 1, monkeypatch) == [False] * 4 + [True]
    assert alive(parts(), 0, monkeypatch) == [True] * 4


def test_a_model_whose_weights_were_given_back_is_not_copied() -> None:
    """Torch would read past the end, and crash."""
    model = Classifier("mlp")
    next(model.parameters()).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="its memory was given back"):
        SecondRun(model, [], [])._sibling()


NOTES: list[tuple[int, nn.Parameter]] = []


class Noting(nn.Linear):
    """Notes where its weight lies in each call in training, and the weight; returns NaN."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            NOTES.append((self.weight.untyped_storage().data_ptr(), self.weight))
        return super().forward(x) * torch.nan


def test_the_copy_that_is_run_shares_the_weights(tmp_path: Path) -> None:
    """It takes no memory for weights or their gradients, which a full device does not have."""
    NOTES.clear()
    module = Classifier(nn.Sequential(nn.Linear(6, 6), Noting(6, 6), nn.Linear(6, 3)), torch.optim.SGD)
    callback = ModuleMonitorCallback(50, health=Health(nonfinite="always"), store=str(tmp_path / "monitor.h5"))
    trainer(tmp_path, [callback], max_steps=1, limit_val_batches=0).fit(module, loader(), loader(8))
    assert [finding.site for finding in callback.findings] == ["model.1"]
    [first, second] = NOTES
    assert first[0] == second[0]
    assert first[1] is not second[1]
    assert second[1].requires_grad
    assert second[1].grad is None


class Writing(nn.Linear):
    """Writes into its weight in its forward pass, as ``Embedding(max_norm)`` and normalized prototypes do; returns NaN."""

    def __init__(self, way: str) -> None:
        super().__init__(6, 6)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "in place":
            with torch.no_grad():
                self.weight.mul_(0.9)
        elif self.way == "data":
            self.weight.data.mul_(0.9)
        else:
            self.weight.data = self.weight.data * 0.9
        return super().forward(x) * torch.nan


@pytest.mark.parametrize("way", ["in place", "data", "other data"])
def test_a_forward_that_writes_into_its_weight_writes_once(way: str, tmp_path: Path) -> None:
    """Weights are bit for bit those of a run without the callback, in every step."""
    runs = []
    for health in ("ignore", "always"):
        seed()
        module = Classifier(nn.Sequential(nn.Linear(6, 6), Writing(way), nn.Linear(6, 3)), torch.optim.SGD, lr=0.0)
        for parameter in module.parameters():
            parameter.register_hook(torch.zeros_like)  # the update leaves finite weights
        callback = ModuleMonitorCallback(50, health=Health(nonfinite=health))
        trainer(tmp_path / health, [callback], max_steps=2, limit_val_batches=0).fit(module, loader(), loader(8))
        assert len(callback.findings) == (health == "always")
        runs.append(module.state_dict())
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(runs[0][name], runs[1][name]) and bool(runs[0][name].isfinite().all()) for name in runs[0])


RATES: list[float] = []
WEIGHTS: list[nn.Parameter] = []


class ReadsOptimizers(Classifier):
    """Reads the rate and the weights of its optimizer, and lowers the rate itself."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        assert schedule.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        RATES.extend([optimizer.param_groups[0]["lr"], *schedule.get_last_lr()])
        decay = sum(weight.square().sum() for weight in optimizer.param_groups[0]["params"])
        return super().training_step(batch, batch_idx) + decay

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class WithGlobalWeight(Classifier):
    """Adds the norm of a weight that it reaches by a name of the program: its gradient is finite."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.ones(3))
        WEIGHTS[:] = [self.scale]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + WEIGHTS[0].norm()


@pytest.mark.parametrize("kind", [ReadsOptimizers, WithGlobalWeight])
def test_a_step_that_reaches_outside_of_the_copy_changes_nothing_there(kind: type[Classifier], tmp_path: Path) -> None:
    """Neither rates nor gradients of the model, and the module is named."""
    runs, sites = [], []
    RATES.clear()
    for health in ("ignore", "always"):
        seed()
        NOTES.clear()
        module = kind(nn.Sequential(nn.Linear(6, 6), Noting(6, 6), nn.Linear(6, 3)), torch.optim.SGD, lr=0.5)
        gradients: list[Tensor] = []
        module.on_before_optimizer_step = lambda _optimizer, module=module, kept=gradients: kept.extend(  # type: ignore[method-assign]
            parameter.grad.nan_to_num(7.0) for parameter in module.parameters()
        )
        callback = ModuleMonitorCallback(50, health=Health(nonfinite=health))
        run = trainer(tmp_path / health, [callback], max_steps=1, limit_val_batches=0)
        run.fit(module, loader(), loader(8))
        sites.append([found.site for found in callback.findings])
        runs.append([*gradients, torch.tensor(run.optimizers[0].param_groups[0]["lr"])])
    assert sites == [[], ["model.1"]]
    assert len(NOTES) == 2
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert ([0.25, 0.5, 0.25, 0.5, 0.25, 0.5] if kind is ReadsOptimizers else []) == RATES


def bad_sample(at: int) -> DataLoader[Any]:
    """Eight samples, of which one is not finite."""
    x = torch.ones(8, 6)
    x[at] = torch.nan
    return DataLoader(TensorDataset(x, torch.zeros(8, dtype=torch.long)))


def found_in(folder: Path, module: Classifier, data: DataLoader[Any]) -> Finding:
    """What is found of values that are not finite in one step of eight micro-batches."""
    callback = ModuleMonitorCallback(1, health=Health(nonfinite="warn"), on_error="raise")
    trainer(folder, [callback], accumulate_grad_batches=8, limit_val_batches=0).fit(module, data, loader(8))
    [found] = callback.findings
    return found


def model() -> nn.Module:
    """Two layers."""
    seed()
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))


def test_the_finding_names_a_micro_batch_that_was_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its number and the reason; the result of another micro-batch is labelled as such."""
    monkeypatch.setattr(second_run, "MAX_EARLIER_BYTES", 2**20)
    monkeypatch.setattr(second_run, "_memory", lambda tensor: (id(tensor), 2**20))  # each of two tensors
    finding = found_in(tmp_path, Classifier(model()), bad_sample(3))
    assert finding.site == "_root_"
    assert finding.words.startswith(
        "The first non-finite value occurred in micro-batch 3, and the module that made it is not known: its batch was not"
    )
    assert finding.words.endswith("those before it hold 1 MiB, or would with it. In micro-batch 7, run again instead, all was finite.")


class Scaling(Classifier):
    """Writes into its batch: it takes the logarithm of 1 at first, and of 0 the next time."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        value = self.model(torch.log(batch[0])).mean()
        batch[0].sub_(1)
        return value + torch.nan


def test_a_batch_that_was_written_into_names_no_module(tmp_path: Path) -> None:
    """Run again it is another batch; the result is labelled as such."""
    finding = found_in(tmp_path, Scaling(model()), bad_sample(7))
    assert finding.site == "_root_"
    assert (
        "in micro-batch 0, and the module that made it is not known: its batch was written into in the step, and cannot be run again"
        in finding.words
    )
    assert (
        "Run again on the batch as it is now, it was in training_step: The first module of the pass, model, was given infinity"
        in finding.words
    )


class Taking(Classifier):
    """Takes its batch apart."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        batch["x"] = batch["x"] * 2
        return self.model(batch.pop("x") - 2 * batch.pop("x1")).mean()


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_batch_that_was_taken_apart_is_run_again_as_it_was(kind: type[Any], tmp_path: Path) -> None:
    """Its tensors are unchanged: taking a container apart is no write into tensors."""
    data = DataLoader(bad_sample(3).dataset, collate_fn=lambda samples: kind(x=samples[0][0][None], x1=torch.zeros(6)))
    finding = found_in(tmp_path, Taking(model()), data)
    assert finding.words.startswith("NaN in the batch, in the forward pass of micro-batch 3 (epoch 0, batch_idx 3). The first module")
