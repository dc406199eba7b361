"""A run under DeepSpeed on CPUs, which Lightning starts."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from helpers.lightning_package import Callback, CPUAccelerator, DeepSpeedStrategy, LightningModule, Trainer
from helpers.lightning_package import deepspeed as lightning_deepspeed
from helpers.training import trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_module_monitor import Capture, ModuleMonitorCallback, Rule

BATCH = 16
STEPS = 3
KINDS = ["activation", "activation_gradient", "parameter", "gradient_before_clip", "gradient", "update"]
STATISTICS = ["rms", "std", "abs_max", "norm"]


class OnCPU(DeepSpeedStrategy):
    """Lightning refuses DeepSpeed without a GPU, and numbers devices."""

    def setup_environment(self) -> None:
        with (
            mock.patch.object(lightning_deepspeed, "CUDAAccelerator", CPUAccelerator),
            mock.patch.object(lightning_deepspeed, "_validate_device_index_selection"),
        ):
            super().setup_environment()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)


def data(accumulated: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of all steps."""
    generator = torch.Generator().manual_seed(1)
    size = BATCH * STEPS * accumulated
    return torch.randn(size, 8, generator=generator), torch.randint(3, (size,), generator=generator)


class Frozen(LightningModule):
    """One of its parameters is not trained."""

    def __init__(self, accumulated: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.accumulated = accumulated
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.net[0].bias.requires_grad_(requires_grad=False)

    def training_step(self, batch: list[Tensor], _batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self) -> DataLoader[Any]:
        ranks = self.trainer.world_size
        data_set = TensorDataset(*data(self.accumulated))
        return DataLoader(data_set, BATCH // ranks, sampler=DistributedSampler(data_set, ranks, self.global_rank, shuffle=False))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.1, momentum=0.9)


class Reads(Callback):
    """Counts how often the parameters and gradients are read in each step, each of which is a collective of DeepSpeed in stage 3."""

    def __init__(self) -> None:
        self.by_step: list[Counter[str]] = []
        self.names: dict[Tensor, str] = {}
        deepspeed = importlib.import_module("deepspeed")
        utils, zero = deepspeed.utils, deepspeed.zero
        utils.safe_get_full_fp32_param = self._counted(utils.safe_get_full_fp32_param, "parameter", lambda args: [args[0]])
        utils.safe_get_full_grad = self._counted(utils.safe_get_full_grad, "gradient", lambda args: [args[0]])
        zero.GatheredParameters = self._counted(zero.GatheredParameters, "gathered", lambda args: args[0])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to count anew in the first micro-batch of a step."""
        self.names = {parameter: name for name, parameter in pl_module.named_parameters()}
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.by_step.append(Counter())

    def _counted(self, function: Callable[..., Any], what: str, read: Callable[[Any], Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            if self.by_step:
                self.by_step[-1].update(f"{what} {self.names[parameter]}" for parameter in read(args))
            return function(*args, **kwargs)

        return counting


def main() -> None:
    """Train for three steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accumulated", type=int, default=1)
    parser.add_argument("--clipped", type=float)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--scale-power", type=int, default=8)
    parser.add_argument("--offload", nargs="*", default=[], choices=["optimizer", "parameters"])
    options = parser.parse_args()
    importlib.import_module("deepspeed.comm.torch")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # compiles for a minute
    cpu = importlib.import_module("deepspeed.accelerator.cpu_accelerator")
    cpu.CPU_Accelerator.is_fp16_supported = lambda _self: True  # by torch it is, slowly
    strategy = OnCPU(
        stage=options.stage,
        offload_optimizer="optimizer" in options.offload,
        offload_parameters="parameters" in options.offload,
        initial_scale_power=options.scale_power,
        process_group_backend="gloo",
        zero_allow_untested_optimizer=True,
    )
    strategy.config["zero_force_ds_cpu_optimizer"] = False  # type: ignore[index]  # its own one has to be compiled
    capture = Capture(steps=[1], sites=".*", kinds=["gradient_before_clip", "update"])
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds=KINDS, statistics=STATISTICS)], capture=capture)
    more = {} if options.clipped is None else {"gradient_clip_val": options.clipped}
    reads = Reads()
    run = trainer(
        options.folder,
        [reads, callback],
        devices=options.devices,
        strategy=strategy,
        max_steps=STEPS,
        accumulate_grad_batches=options.accumulated,
        precision=options.precision,
        **more,
    )
    run.fit(Frozen(options.accumulated))
    if run.global_rank == 0:
        (options.folder / "reads.json").write_text(json.dumps(reads.by_step))


if __name__ == "__main__":
    main()
