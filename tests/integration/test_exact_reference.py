"""The reference is exact at step 0 on models whose kernels torch selects by grad mode and flags, and training is as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.architectures import ARCHITECTURES
from helpers.tiny import KeepRecords
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from torch import Tensor

from lightning_module_monitor import ModuleMonitorCallback, Rule

DIFFERENCES = Rule(kinds=["activation_difference", "parameter_difference"], statistics=["abs_max", "norm"])


def run(name: str, folder: Path, callbacks: list[Any], **options: Any) -> tuple[KeepLosses, dict[str, Tensor]]:
    """Three steps of two micro-batches: losses, random states and weights."""
    seed()
    live, keep = Classifier(ARCHITECTURES[name]()), KeepLosses()
    trainer(folder, [*callbacks, keep], max_steps=3, accumulate_grad_batches=2, **options).fit(live, loader(), loader(8))
    return keep, live.state_dict()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("module", [None, "model"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_difference_is_exactly_zero_at_step_0_and_training_is_bit_identical(
    name: str, module: str | None, precision: Any, tmp_path: Path
) -> None:
    """In train mode with dropout, both as a sibling and by its own ``training_step``."""
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference="init", module=module, on_error="raise")
    records = KeepRecords(callback)
    plain, weights = run(name, tmp_path, [], precision=precision)
    monitored, monitored_weights = run(name, tmp_path, [callback, records], precision=precision)
    first, *later = (record.values for record in records.records)
    compared = [key for key in first if "_difference/" in key]
    assert len({key.split("/")[1] for key in compared if key.startswith("activation")}) >= 4
    assert {key: first[key] for key in compared if first[key] != 0.0} == {}
    for values in later:
        assert values["activation_difference/model.head/norm"] > 0
        assert values["parameter_difference/model.head.weight/norm"] > 0
    assert len(plain.losses) == len(monitored.losses) == 6
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, monitored.losses, strict=True))
    assert plain.random_states == monitored.random_states
    assert all(torch.equal(weights[key], monitored_weights[key]) for key in weights)
