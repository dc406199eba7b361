"""The reference is exact at step 0 on models whose kernels torch selects by grad mode and flags, and training is as without it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.architectures import ARCHITECTURES
from helpers.lightning_package import ModelCheckpoint
from helpers.tiny import KeepRecords, Tiny, fit, measured
from helpers.training import Classifier, KeepLosses, Reseed, loader, seed, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitorCallback, Rule

DIFFERENCES = Rule(kinds=["activation_difference", "parameter_difference"], statistics=["abs_max", "norm"])


def run(name: str, folder: Path, callbacks: list[Any], **options: Any) -> tuple[KeepLosses, dict[str, Tensor]]:
    """Three steps of two micro-batches: losses, random states and weights."""
    seed()
    live, keep = Classifier(ARCHITECTURES[name]() if name in ARCHITECTURES else name), KeepLosses()
    trainer(folder, [*callbacks, keep], max_steps=3, accumulate_grad_batches=2, **options).fit(live, loader(), loader(8))
    return keep, live.state_dict()


MODELS = [
    *((name, precision) for name in [*ARCHITECTURES, "cnn"] for precision in ("32-true", "bf16-mixed")),
    *((name, precision) for name in ("cnn", "transformer") for precision in ("bf16-true", "64-true")),
]
"""Architectures, and a model with BatchNorm, each with a precision."""


@pytest.mark.parametrize("module", [None, "model"])
@pytest.mark.parametrize(("name", "precision"), MODELS)
def test_every_difference_is_exactly_zero_at_step_0_and_training_is_bit_identical(
    name: str, module: str | None, precision: Any, tmp_path: Path
) -> None:
    """In train mode with dropout, as a sibling and by its own ``training_step``; also every term of the coordinate check."""
    callback = ModuleMonitorCallback(1, rules=[DIFFERENCES], reference="init", rcc=True, module=module, on_error="raise")
    records = KeepRecords(callback)
    try:
        plain, weights = run(name, tmp_path, [], precision=precision)
    except RuntimeError as error:  # of torch 2.4, by the CPU
        if "primitive descriptor" not in str(error):
            raise
        pytest.skip(f"torch cannot run this model here, also without the callback: {error}")
    monitored, monitored_weights = run(name, tmp_path, [callback, records], precision=precision)
    first, *later = (record.values for record in records.records)
    terms = ("rcc_effective_update/", "rcc_propagating_update/", "rcc_input_change/")
    compared = [key for key in first if "_difference/" in key or key.startswith(terms)]
    assert len({key.split("/")[1] for key in compared if key.startswith("activation")}) >= 4
    assert {key: first[key] for key in compared if first[key] != 0.0} == {}
    for values in later:
        assert values["activation_difference/model.head/norm"] > 0
        assert values["parameter_difference/model.head.weight/norm"] > 0
        assert values["rcc_effective_update/model.head/rms"] > 0
    assert len(plain.losses) == len(monitored.losses) == 6
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, monitored.losses, strict=True))
    assert plain.random_states == monitored.random_states
    assert all(torch.equal(weights[key], monitored_weights[key]) for key in weights)


class Cache:
    """Keeps outputs, as key and value caches of libraries do."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []


class Used(Classifier):
    """Buffers that are expanded or grow with the longest batch, and an object that keeps the last output."""

    def __init__(self) -> None:
        super().__init__("mlp")
        self.register_buffer("scale", torch.ones(1).expand(6), persistent=False)
        self.register_buffer("positions", torch.zeros(1), persistent=False)
        self.cache = Cache()
        self.computed = deque(maxlen=2)  # type: ignore[var-annotated]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.positions.resize_(len(x)).copy_(torch.arange(len(x)))
        logits = self.model(x * self.scale + self.positions.unsqueeze(1))
        self.cache.layers = [{"keys": logits}]
        self.computed.append(logits)
        return F.cross_entropy(logits, y)


@pytest.mark.parametrize("module", [None, "model"])
def test_a_model_that_was_used_before_has_a_reference_with_all_its_buffers(module: str | None, tmp_path: Path) -> None:
    """Tensors in objects are copied without their graph; a resumed run has the same reference."""

    def fit(name: str, live: Used, ckpt_path: str | None = None) -> list[dict[str, float]]:
        callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference="init", module=module, on_error="raise")
        records, save = KeepRecords(callback), ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        run = trainer(tmp_path / name, [Reseed(), callback, records, save], enable_checkpointing=True, max_epochs=2)
        run.fit(live, loader(8), loader(8), ckpt_path=ckpt_path)
        return [measured(record) for record in records.records]

    seed()
    live = Used()
    live.training_step([torch.ones(3, 6), torch.zeros(3, dtype=torch.long)], 0)
    whole = fit("whole", live)
    assert {key: value for key, value in whole[0].items() if value != 0} == {}
    assert len(live.positions) == 4
    resumed = fit("resumed", live, str(tmp_path / "whole" / "step=2.ckpt"))
    assert len(resumed) == 2
    assert resumed == whole[2:]
    assert whole[2]["activation_difference/model/norm"] > 0


class WithTeacher(Tiny):
    """A copy of the first layer that ``training_step`` moves, as BYOL and DINO do."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.teacher = nn.Linear(4, 8).requires_grad_(False)
        self.moved: list[float] = []
        self.start = {name: values.clone() for name, values in self.teacher.state_dict().items()}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for teacher, student in zip(self.teacher.parameters(), self.model[0].parameters(), strict=True):
            if self.in_place:
                teacher.data.mul_(0.9).add_(student.data, alpha=0.1)
            else:
                teacher.data = 0.9 * teacher.data + 0.1 * student.data
        self.moved.append((self.teacher.weight - self.start["weight"]).norm().item())
        return (self.model[0](batch[0]) - self.teacher(batch[0])).square().mean()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_teacher_that_training_step_moves_stays_in_the_reference(in_place: bool, tmp_path: Path) -> None:
    """The reference runs ``training_step`` too."""
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference="init", on_error="raise")
    records, model = KeepRecords(callback), WithTeacher(in_place)
    fit(tmp_path, [callback, records], lambda: model)
    recorded = records.series()["parameter_difference/teacher.weight/norm"].values()
    assert [*recorded] == pytest.approx(model.moved, rel=1e-5)
    assert len(model.moved) >= 5
    assert records.series()["activation_difference/teacher/norm"][0] == 0
