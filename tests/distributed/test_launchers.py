"""Processes that Lightning starts itself, and an error of the user's on one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed.launched import share
from helpers.launch import TESTS
from helpers.textbook import textbook
from helpers.training import Classifier, seed
from helpers.zoo import raw_tensors
from torch.nn import functional as F

from lightning_module_monitor import load_store

SCRIPT = Path(__file__).with_name("launched.py")


def launch(folder: Path, way: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the script, as a user would; Lightning starts the other process."""
    cluster = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    environment = {name: value for name, value in os.environ.items() if name not in cluster} | variables
    command = [sys.executable, "-W", "error:::lightning_module_monitor", str(SCRIPT), str(folder), way]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("way", ["script", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_that_lightning_starts(way: str, tmp_path: Path) -> None:
    """One store, of both processes' elements: the first step against raw tensors of both their batches."""
    result = launch(tmp_path, way)
    assert result.returncode == 0, result.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == ["monitor.h5"]
    seed()
    module = Classifier("shared", torch.optim.SGD, lr=0.1)
    raw = raw_tensors(module.model, [share(rank)[0] for rank in range(2)], lambda y, t: F.cross_entropy(y, t) / 2)
    store = load_store(tmp_path / "monitor.h5")
    for (kind, site), tensors in raw.items():
        if kind != "activation_gradient":
            whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
            key = f"{kind}/model" + (f".{site}" if site != "_root_" else "")
            steps, values = store.series(f"{key}/norm")
            assert steps.tolist() == [0, 1, 2]
            assert values[0] == pytest.approx(textbook("norm", whole), rel=1e-5), key
            assert store.histogram(f"{key}/hist")[1][0].sum() == whole.numel()
        if kind == "gradient":
            assert store.series(f"update/model.{site}/norm")[1][0] == pytest.approx(0.1 * textbook("norm", whole), rel=1e-5)


def test_an_error_of_the_users_on_one_rank_ends_all_of_them(tmp_path: Path) -> None:
    """No rank waits in a collective of the monitor, and the previous step is in the store."""
    result = launch(tmp_path, "raises")
    assert result.returncode != 0
    assert "on purpose" in result.stderr
    assert load_store(tmp_path / "monitor.h5").series("activation/model/norm")[0].tolist() == [0]
