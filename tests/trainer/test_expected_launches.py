"""What a run asks to compile before its first step, against what it then measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import MixedPrecision, Trainer
from helpers.training import Classifier, loader, trainer
from torch import Tensor
from torch.amp import GradScaler

from lightning_module_monitor import ModuleMonitorCallback, Rule
from lightning_module_monitor.kernels import table
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.torch_kernel import TorchKernel
from lightning_module_monitor.kernels.warm_up import Form, Launch
from lightning_module_monitor.trainer import controller

EVERYTHING = Rule(kinds=["activation", "activation_gradient", "parameter", "gradient", "update"], statistics=["norm", "std", "hist"])
DRIFT = Rule(kinds=["activation_difference", "parameter_difference"], statistics=["ratio", "cosine"])
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "all kinds": {"rules": EVERYTHING},
    "all detectors": {"health": {"watch": ["all"]}},
    "reference": {"reference": "init", "rules": [EVERYTHING, DRIFT]},
    "coordinate check": {"reference": "init", "rcc": True},
    "gradient flow": {"gradient_flow": {"blocks": "model.layers"}},
}


class Measured(TorchKernel):
    """Measures all tensors, as the Triton kernel does on a GPU, and notes how each comes."""

    launches: set[Launch]
    is_within = False
    """Whether ``add`` is called by the kernel itself."""

    def add(self, rows: Any, tensor: Tensor, needs: int, *operands: Tensor | None, scale: Tensor | None = None) -> None:
        form = Form.SCALED if scale is not None else Form.ONE
        if any(operand is not None for operand in operands):
            form = Form.DIFFERENCE
        if not self.is_within:
            Measured.launches.add(Launch(tensor.dtype, needs, form))
        super().add(rows, tensor, needs, *operands, scale=scale)

    def add_product(self, row: int, tensor: Tensor, other: Tensor, sign: int) -> None:
        Measured.launches.add(Launch(tensor.dtype, Need.MEAN, Form.PRODUCT))
        self.is_within = True
        super().add_product(row, tensor, other, sign)
        self.is_within = False

    def add_all(self, rows: Any, tensors: Any, needs: Any, *, scale: Tensor | None = None) -> None:
        Measured.launches |= {Launch(tensor.dtype, need, Form.MANY) for tensor, need in zip(tensors, needs, strict=True)}
        self.is_within = True
        super().add_all(rows, tensors, needs, scale=scale)
        self.is_within = False


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true", "16-mixed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_measures_nothing_that_was_not_compiled(name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each precision, with and without a reference, and with scaled losses."""
    asked = set[Launch]()
    monkeypatch.setattr(controller, "warm_up", lambda _device, launches: asked.update(launches))
    monkeypatch.setattr(Measured, "launches", set(), raising=False)
    monkeypatch.setattr(table, "TorchKernel", Measured)
    monkeypatch.setattr(table.numba_kernel, "takes", lambda _tensor: False)
    callback = ModuleMonitorCallback(every_n_steps=1, store=None, **OPTIONS[name])
    how: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        how = {"plugins": MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=1024.0))}
    run: Trainer = trainer(tmp_path, [callback], max_steps=3, limit_val_batches=0, **how)
    run.fit(Classifier("mlp"), loader(), loader(8))
    assert len(Measured.launches) >= 2
    assert Measured.launches <= asked
    assert {launch.dtype for launch in asked} <= {torch.float32, torch.float64, torch.bfloat16, torch.float16}
