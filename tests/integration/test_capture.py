"""``capture`` in a real Trainer: tensors are read as they were, with accumulation, killed and resumed runs."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import ModelCheckpoint
from helpers.training import Classifier, KeepRawTensors, loader, seed, trainer
from torch import nn

from lightning_module_monitor import Capture, ModuleMonitorCallback, Rule, load_store

LAYER = "model.layers.0"
KINDS = ["activation", "activation_gradient", "parameter", "gradient_before_clip", "gradient", "update"]


PRECISIONS: dict[str, torch.dtype] = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-mixed": torch.bfloat16,
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_round_trip_is_bit_exact_in_every_dtype(precision: Any, tmp_path: Path) -> None:
    """Every kind under accumulation and clipping: dtype, shape and bits, each micro-batch a call of its own."""
    capture = Capture(sites=f"{LAYER}(.weight)?", steps=[0, 2, 3], kinds=KINDS)
    callback, truth = ModuleMonitorCallback(rules=[Rule(kinds="parameter", statistics="norm")], capture=capture), KeepRawTensors(LAYER)
    seed()
    # The short last group of ten batches too: 3, 3, 3 and 1.
    run = trainer(tmp_path, [callback, truth], accumulate_grad_batches=3, gradient_clip_val=0.02, precision=precision)
    run.fit(Classifier("mlp"), loader(40), loader(8))
    store = load_store(callback.store_path or "")
    expected = {
        (kind, step, call): value for step in (0, 2, 3) for kind, tensors in truth.steps[step].items() for call, value in enumerate(tensors)
    }
    assert len(expected) == 3 * 4 + 2 * (3 + 3 + 1)
    assert len(store.tensors()) == len(expected)
    for (kind, step, call), value in expected.items():
        back = store.tensor(kind, LAYER if "activation" in kind else f"{LAYER}.weight", step, call)
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert torch.equal(back.view(torch.uint8), value.view(torch.uint8)), (kind, step, call)
    assert store.tensor("activation", LAYER, 0).dtype == PRECISIONS[precision]
    norm = float(store.tensor("parameter", f"{LAYER}.weight", 0).double().norm())
    assert store.series(f"parameter/{LAYER}.weight/norm")[1][0] == pytest.approx(norm, rel=1e-6)


def test_capture_alone_is_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a rule: the steps of the capture are monitored beside those of the schedule, and what is captured is announced."""
    callback = ModuleMonitorCallback(rules=[], capture=Capture(sites="model.layers.3.*", steps=[1, 3]))
    with caplog.at_level(logging.INFO):
        trainer(tmp_path, [callback], max_steps=6).fit(Classifier("mlp"), loader(), loader(8))
    store = load_store(tmp_path / "monitor.h5")
    assert [key for key in store if not key.startswith("context/")] == ["monitor/errors"]
    assert store.series("monitor/errors")[0].tolist() == [0, 1, 3]
    assert [(one.kind, one.site, one.step) for one in store.tensors()] == [
        (kind, site, step)
        for step in (1, 3)
        for kind, site in [
            ("activation", "model.layers.3"),
            ("activation_gradient", "model.layers.3"),
            ("parameter", "model.layers.3.weight"),
            ("parameter", "model.layers.3.bias"),
            ("gradient", "model.layers.3.weight"),
            ("gradient", "model.layers.3.bias"),
        ]
    ]
    assert any(message.endswith("Raw tensors of 1 module, 2 parameters.") for message in caplog.messages)
    assert callback.last_record is not None
    assert callback.last_record.tensors == ()  # they may be large, and the callback lives on


def test_validation_is_not_captured_and_module_and_exclude_hold(tmp_path: Path) -> None:
    """Also in the middle of an accumulated step; excluded modules are not captured."""
    capture = Capture(sites=".*", steps=[0, 1], kinds="activation")
    callback = ModuleMonitorCallback(module="model.layers", exclude=".*3", capture=capture, stages=["train", "validate"])
    run = trainer(tmp_path, [callback], accumulate_grad_batches=4, val_check_interval=2, num_sanity_val_steps=2, max_steps=2)
    run.fit(Classifier("mlp"), loader(32), loader(8))
    listed = load_store(tmp_path / "monitor.h5").tensors()
    assert {one.site for one in listed} == {"model.layers", *(f"model.layers.{number}" for number in (0, 1, 2))}
    assert {(one.step, one.call) for one in listed} == {(step, call) for step in (0, 1) for call in range(4)}
    assert len(listed) == 4 * 8


def test_a_dry_run_says_what_would_be_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sites by kind, and known sizes; nothing is written."""
    callback = ModuleMonitorCallback(rules=[], capture=Capture(sites="model.layers.0.*", steps=[0]), dry_run=True)
    trainer(tmp_path, [callback], max_steps=2).fit(Classifier("mlp"), loader(), loader(8))
    # 6 x 16 weights and 16 biases of 4 bytes, themselves and their gradients.
    assert (
        "raw tensors beside the store (activation: 1 site, activation_gradient: 1 site, parameter: 2 sites, gradient: 2 sites): "
        "896 B a step of parameters" in capsys.readouterr().out
    )
    assert not list(tmp_path.rglob("*.h5"))


def test_fast_dev_run_writes_no_file(tmp_path: Path) -> None:
    """Like the store."""
    callback = ModuleMonitorCallback(capture=Capture(sites=".*", steps=0))
    trainer(tmp_path, [callback], fast_dev_run=True).fit(Classifier("mlp"), loader(), loader(8))
    assert not list(tmp_path.rglob("*.h5"))


def test_a_second_run_has_its_own_files(tmp_path: Path) -> None:
    """The first run's tensors are unchanged."""
    callback = ModuleMonitorCallback(capture=Capture(sites="model", steps=0))
    trainer(tmp_path, [callback], max_steps=2).fit(Classifier("mlp"), loader(), loader(8))
    before = (tmp_path / "monitor.tensors.h5").read_bytes()
    trainer(tmp_path, [callback], max_steps=2).fit(Classifier("mlp"), loader(), loader(8))
    assert (tmp_path / "monitor.tensors.h5").read_bytes() == before
    assert len(load_store(tmp_path / "monitor-2.h5").tensors()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("monitor-2.h5", "monitor-2.tensors.h5", "monitor.h5", "monitor.tensors.h5"),
    ]


def test_a_test_after_the_fit_leaves_the_tensors(tmp_path: Path) -> None:
    """A further loop of the same Trainer continues the same files."""
    callback = ModuleMonitorCallback(capture=Capture(sites="model", steps=[0, 3], kinds="activation"), stages=["train", "test"])
    run = trainer(tmp_path, [callback], max_steps=4)
    module = Classifier("mlp")
    run.fit(module, loader(), loader(8))
    run.test(module, loader(8), verbose=False)
    assert [one.step for one in load_store(tmp_path / "monitor.h5").tensors()] == [0, 3]


def fit(folder: Path, max_steps: int, resume: Path | None = None, **capture: Any) -> ModuleMonitorCallback:
    """A run that saves a checkpoint every five steps."""
    seed()
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds="parameter", statistics="norm")], capture=Capture(**capture))
    checkpoint = ModelCheckpoint(folder / f"to_{max_steps}", every_n_train_steps=5, save_top_k=-1, filename="{step}")
    run = trainer(folder, [callback, checkpoint], enable_checkpointing=True, max_steps=max_steps, max_epochs=-1)
    run.fit(Classifier(nn.Linear(6, 3)), loader(), loader(8), ckpt_path=resume)
    return callback


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """Repeated steps are superseded; the tensors equal those of an uninterrupted run bit for bit."""
    capture = {"sites": "model.*", "steps": [0, 4, 11, 12, 15], "kinds": KINDS}
    whole = fit(tmp_path / "whole", 20, **capture)
    first = fit(tmp_path / "parts", 13, **capture)
    second = fit(tmp_path / "parts", 20, tmp_path / "parts" / "to_13" / "step=10.ckpt", **capture)
    assert second.store_path == first.store_path
    expected, resumed = load_store(whole.store_path or ""), load_store(second.store_path or "")
    listed = [one[:6] for one in expected.tensors()]
    assert [one[:6] for one in resumed.tensors()] == listed
    assert {one[2] for one in listed} == {0, 4, 11, 12, 15}
    for one in listed:
        assert torch.equal(expected.tensor(*one[:4]), resumed.tensor(*one[:4])), one
    assert sorted(path.name for path in (tmp_path / "parts").glob("*.h5")) == ["monitor.h5", "monitor.tensors.h5"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 on this system")
def test_what_was_captured_survives_kill_9_of_the_training(tmp_path: Path) -> None:
    """A run that kills itself in the middle of step 7 leaves the tensors of the steps before."""
    script = f"""
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from helpers.training import Classifier, loader, seed, trainer
        from helpers.lightning_package import Callback
        from lightning_module_monitor import Capture, ModuleMonitorCallback

        class Kill(Callback):
            def on_before_optimizer_step(self, trainer, *_args):
                if trainer.global_step == 7:
                    os.kill(os.getpid(), signal.SIGKILL)

        seed()
        callback = ModuleMonitorCallback(rules=[], capture=Capture(sites="model.*", steps=[0, 5, 6, 7]))
        trainer(Path({str(tmp_path)!r}), [callback, Kill()]).fit(Classifier("mlp"), loader(), loader(8))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, env=dict(os.environ), timeout=200
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = load_store(tmp_path / "monitor.h5")
    assert {one.step for one in store.tensors()} == {0, 5, 6}
    seed()
    weight = Classifier("mlp").get_parameter(f"{LAYER}.weight")
    assert torch.equal(store.tensor("parameter", f"{LAYER}.weight", 0), weight)
    assert math.isfinite(float(store.tensor("activation", "model", 6).norm()))
    store.repair()
    assert len(store.tensors()) == len(load_store(tmp_path / "monitor.h5").tensors()) > 30
