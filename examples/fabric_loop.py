"""The engine under Lightning Fabric: a loop of your own, a logger of Fabric's, two processes that share the parameters (FSDP2).

It needs torch 2.6. Run it; the values, of both processes together, are in ``demo_output/fabric/version_0/metrics.csv`` then::

    python examples/fabric_loop.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers.csv_logs import CSVLogger
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import ModuleMonitor, Rule


def build_fabric(devices: int, logger: CSVLogger) -> Fabric:
    """Fabric on as many processes of the CPU, each of which has its share of every parameter."""
    if devices == 1:
        return Fabric(accelerator="cpu", devices=1, loggers=logger)
    strategy = ModelParallelStrategy(share_out, data_parallel_size=devices, tensor_parallel_size=1)
    return Fabric(accelerator="cpu", devices=devices, strategy=strategy, loggers=logger)


def share_out(network: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every layer's parameters are shared out over the processes, and put together when it runs."""
    for layer in network.children():
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(network, mesh=mesh["data_parallel"])
    return network


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Arguments instead of those of the process.
    """
    parser = argparse.ArgumentParser(description="Monitor a Fabric loop.")
    parser.add_argument("--max_epochs", type=int, default=5)
    parser.add_argument("--every_n_steps", type=int, default=10)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--output", default="demo_output")
    options = parser.parse_args(arguments)

    logger = CSVLogger(options.output, name="fabric")
    fabric = build_fabric(options.devices, logger)
    fabric.launch()
    fabric.seed_everything(0)

    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=64, shuffle=True))
    network = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    model = fabric.setup_module(network)
    optimizer = cast(torch.optim.Optimizer, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3)))

    monitor = ModuleMonitor(
        options.every_n_steps,
        rules=[
            Rule(kinds=["activation", "activation_gradient"], leaf_modules=True, statistics=["rms", "abs_max", "nonfinite_count"]),
            Rule(kinds=["parameter", "gradient_before_clip", "gradient"], statistics="norm"),
            Rule(kinds="update", statistics="ratio"),
        ],
        distributed=fabric.world_size > 1,  # every process has the values of all of them
    )
    monitor.set_module(network)  # the module itself and not Fabric's wrapper

    step = 0
    for epoch in range(options.max_epochs):
        for inputs, targets in loader:
            monitor.begin_step(step)
            loss = F.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            monitor.monitor_gradients(before_clip=True)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            monitor.monitor_gradients()
            monitor.monitor_parameters()
            optimizer.step()
            optimizer.zero_grad()
            record = monitor.end_step()
            if record is not None:
                logger.log_metrics({"loss": loss.item(), **record.values}, step=record.step)
            step += 1
        fabric.print(f"epoch {epoch}: loss {loss.item():.3f}")
    monitor.close()
    logger.finalize("success")  # CSVLogger writes every 100 records, and what is left now
    fabric.print(f"values: {Path(logger.log_dir) / 'metrics.csv'}")


if __name__ == "__main__":
    main()
