"""Gradient noise under DDP: each rank's micro-batches count as those of one process do."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed.scenarios import data
from helpers.lightning_package import LightningModule
from helpers.noise import Batch, by_hand, gradients, values_of
from helpers.tiny import KeepRecords
from helpers.training import Classifier, trainer
from helpers.zoo import make
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_module_monitor import ModuleMonitorCallback

RunScenarios = Callable[[int, str], list[Any]]


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    """The loss of a classifier, or of its model."""
    model = module.model if isinstance(module, LightningModule) else module
    return F.cross_entropy(model(batch[0]), batch[1])


def flat(names: list[tuple[int, int]], batches: list[Batch], module: nn.Module) -> dict[str, float]:
    """What the formulas give for micro-batches, which are named by number and rank."""
    expected = by_hand(gradients(module, batches, loss_of), [len(x) for x, _y in batches])
    number, rank = names[int(expected["largest_micro_batch"])]
    return {**expected, "largest_micro_batch": number, "largest_rank": rank}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num", [1, 2], ids=["one each", "two each"])
def test_every_micro_batch_of_every_rank_is_a_gradient(num: int, num_ranks: int, run_scenarios: RunScenarios) -> None:
    """Uneven sizes, clipping, a last step with one micro-batch a rank; the same on all ranks, by two collectives a step."""
    by_rank = run_scenarios(num_ranks, "noise")
    results = [result[num] for result in by_rank]
    module = Classifier("shared")
    assert len(results[0]["records"]) == 3
    for record in results[0]["records"]:
        numbers = range(num * record.step, min(num * record.step + num, 5 if num == 2 else 3))
        names = [(number - numbers[0], rank) for number in numbers for rank in range(num_ranks)]
        batches = [data(rank, num_ranks)[number] for number in numbers for rank in range(num_ranks)]
        module.load_state_dict(results[0]["states"][record.step])
        expected = flat(names, batches, module)
        assert {name: values_of(record)[name] for name in expected} == pytest.approx(expected, rel=1e-3)
        assert record.values["monitor/errors"] == 0
    for result in results:
        assert result["collectives"] == [["all_reduce", "all_reduce"]] * 3
        for record, other in zip(results[0]["records"], result["records"], strict=True):
            np.testing.assert_equal(dict(record.values), dict(other.values))


def test_two_ranks_equal_two_micro_batches(run_scenarios: RunScenarios, tmp_path: Path) -> None:
    """One process that accumulates the micro-batches of both ranks has the same noise, signal and scale."""
    result = run_scenarios(2, "noise")[0][1]
    callback = ModuleMonitorCallback(1, rules=[], gradient_noise={"per_module": ["_root_", r"model\..*"]}, store=False)
    records, module = KeepRecords(callback), Classifier("shared", torch.optim.SGD, lr=0.1)
    module.load_state_dict(result["states"][0])
    batches = [data(rank, 2)[number] for number in range(3) for rank in range(2)]
    run = trainer(tmp_path, [callback, records], accumulate_grad_batches=2, gradient_clip_val=0.5)
    run.fit(module, DataLoader(batches, batch_size=None), DataLoader(batches, batch_size=None))
    for record, of_ranks in zip(records.records, result["records"], strict=True):
        for site in {key.split("/")[1] for key in record.values if key.startswith("gradient_noise/")}:
            ours, theirs = values_of(record, site), values_of(of_ranks, site)
            assert [theirs.pop("largest_rank"), theirs.pop("largest_micro_batch")] == [
                ours.pop("largest_micro_batch"),
                ours.pop("largest_rank"),
            ]
            assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_own_loop(num_ranks: int, run_scenarios: RunScenarios) -> None:
    """With ``no_sync``; a monitor of one rank alone is refused."""
    by_rank = run_scenarios(num_ranks, "noise")
    model = make("mlp").double().eval()
    for result in by_rank:
        state, record = result["own loop"]
        assert f"the gradients of {num_ranks} ranks are compared, and each rank is monitored by itself" in result["refusal"]
    model.load_state_dict(state)
    names = [(number, rank) for number in range(2) for rank in range(num_ranks)]
    expected = flat(names, [(x.double(), y) for number, rank in names for x, y in [data(rank, num_ranks)[number]]], model)
    assert {name: values_of(record)[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert math.isfinite(values_of(record)["noise"])
