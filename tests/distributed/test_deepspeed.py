"""DeepSpeed: every value against one process in float64 on the whole batch. Needs the extra ``deepspeed``: ``make test-deepspeed``."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed.deepspeed_run import BATCH, KINDS, STATISTICS, STEPS, Frozen, data
from helpers.launch import TESTS
from helpers.textbook import textbook
from torch import Tensor
from torch.nn import functional as F

from lightning_module_monitor import load_store

SCRIPT = Path(__file__).with_name("deepspeed_run.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make test-deepspeed"),
]


def launch(folder: Path, *arguments: object) -> str:
    """Run the script; Lightning starts the other processes. Returns what they log."""
    variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, str(SCRIPT), str(folder), *map(str, arguments)]
    result = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stderr


def truth(devices: int, accumulated: int, clipped: float | None) -> list[dict[tuple[str, str], Tensor]]:
    """The tensors of every step by kind and site, of one process in float64.

    The loss is divided by ``accumulated`` twice: Lightning and DeepSpeed both do. Gradients at activations are of each rank's own loss.
    """
    module, (x, y) = Frozen(accumulated).double(), data(accumulated)
    optimizer, steps = module.configure_optimizers(), []
    for step in range(STEPS):
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        rows = slice(step * BATCH * accumulated, (step + 1) * BATCH * accumulated)
        outputs, hidden = {}, x[rows].double()
        for number, layer in enumerate(module.net):
            hidden = outputs[f"net.{number}"] = layer(hidden)
            hidden.retain_grad()
        optimizer.zero_grad()
        (F.cross_entropy(hidden, y[rows]) / accumulated).backward()
        trained = {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None}
        results = {("activation", name): tensor.detach() for name, tensor in outputs.items()}
        results |= {("activation_gradient", name): tensor.grad * devices for name, tensor in outputs.items() if tensor.grad is not None}
        results |= {("parameter", name): tensor for name, tensor in before.items()}
        results |= {("gradient_before_clip", name): tensor for name, tensor in trained.items()}
        if clipped is None:
            results |= {("gradient", name): tensor for name, tensor in trained.items()}
        else:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clipped)
        optimizer.step()
        results |= {("update", name): parameter.detach() - before[name] for name, parameter in module.named_parameters() if name in trained}
        steps.append(results)
    return steps


@pytest.mark.parametrize(
    ("options", "devices", "accumulated", "clipped"),
    [
        ("--stage 1", 1, 1, None),
        ("--stage 2", 4, 1, None),
        ("--stage 3", 2, 1, None),
        ("--stage 3", 4, 1, None),
        ("--stage 3", 1, 1, 0.05),
        ("--stage 1", 2, 2, None),
        ("--stage 3", 2, 2, None),
        ("--stage 2 --offload optimizer", 2, 1, None),
        ("--stage 3 --offload optimizer parameters", 2, 1, None),
        ("--stage 2 --precision 16-mixed", 2, 1, None),
        ("--stage 3 --precision 16-mixed", 2, 1, None),
        ("--stage 2 --precision bf16-mixed", 2, 1, None),
    ],
)
def test_values_are_those_of_one_process(options: str, devices: int, accumulated: int, clipped: float | None, tmp_path: Path) -> None:
    """All kinds and sites, in every step, each tensor read once at a time; what the engine clips within its step is left out by name."""
    clipping = [] if clipped is None else ["--clipped", clipped]
    logged = launch(tmp_path, *options.split(), "--devices", devices, "--accumulated", accumulated, *clipping)
    assert ("gradient is left out" in logged) == (clipped is not None)
    store = load_store(tmp_path / "monitor.h5")
    sites = set()
    rel, abs_ = (0.03, 1e-4) if "precision" in options else (1e-4, 1e-7)
    for step, results in enumerate(truth(devices, accumulated, clipped)):
        for (kind, site), tensor in results.items():
            for statistic in STATISTICS:
                steps, values = store.series(f"{kind}/{site}/{statistic}")
                expected = textbook(statistic, tensor)
                assert values[steps.tolist().index(step)] == pytest.approx(expected, rel=rel, abs=abs_), (step, kind, site, statistic)
            sites.add((kind, site))
    assert {kind for kind, _site in sites} == set(KINDS) - ({"gradient"} if clipped is not None else set())
    recorded = {(key.split("/")[0], key.split("/")[1]) for key in store.keys() if key.split("/")[0] in KINDS}  # noqa: SIM118
    still = {("update", "net.0.bias"), ("activation", "_root_"), ("activation", "net")}
    assert {key for key in recorded - sites if key not in still and key[1] not in ("_root_", "net")} == set()
    # A parameter is read before and after its update, a gradient before and after clipping: also in the step whose tensors are captured.
    trained, per_step = ("net.0.weight", "net.2.weight", "net.2.bias"), 2 if clipped is None else 1
    once = {"gathered net.0.bias": 2, **dict.fromkeys((f"parameter {name}" for name in trained), 2)}
    reads = once | dict.fromkeys((f"gradient {name}" for name in trained), per_step)
    assert json.loads((tmp_path / "reads.json").read_text()) == [reads] * STEPS


def test_a_step_that_overflows_is_skipped(tmp_path: Path) -> None:
    """A loss of 2**24 times the size overflows in float16: the engine leaves the parameters where they are, and lowers the scale."""
    launch(tmp_path, "--stage", 2, "--precision", "16-mixed", "--scale-power", 24)
    store = load_store(tmp_path / "monitor.h5")
    assert store.series("monitor/step_skipped")[1][0] == 1.0
    assert store.series("update/net.0.weight/norm")[1][0] == 0.0
    assert not math.isfinite(store.series("gradient/net.0.weight/norm")[1][0])
