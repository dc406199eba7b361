"""Compiled models on two ranks: what was counted and trained with a callback and without, for tests/distributed/test_compiled_ranks.py."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers.compiling import CountingBackend, Net, Trained, compiled, plain_state
from helpers.lightning_package import Callback, DDPStrategy, LightningModule, ModelParallelStrategy, Trainer
from helpers.training import KeepLosses, loader, seed, trainer
from lightning.fabric import Fabric
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, Rule

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
OF_PARAMETERS = {"kinds": ["parameter", "gradient", "update"], "statistics": "norm"}
OF_OPTIMIZERS = {"kinds": ["optimizer_state", "update"], "statistics": ["norm", "cosine_to_gradient"]}
OF_ALL = {"kinds": "gradient", "statistics": "norm", "per_module": "_root_"}
OF_BLOCKS = {"kinds": ["activation", "activation_gradient"], "statistics": ["mean", "norm", "median"], "sites": r"model\.(head|blocks\.\d)"}


class Sharded(Trained):
    """Parts of it are laid out over ranks, and blocks compiled before or after that."""

    def __init__(self, backend: CountingBackend, first: str) -> None:
        super().__init__(Net(dropout=0.0))
        self._backend, self._first = backend, first

    def configure_model(self) -> None:
        mesh: DeviceMesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            if self._first == "compiled":
                block.compile(backend=self._backend)
            fully_shard(block, mesh=mesh)
            if self._first == "sharded":
                block.compile(backend=self._backend)
        fully_shard(self.model, mesh=mesh)


def fit(
    folder: Path, given: Any, options: dict[str, Any], monitored: bool, *others: Callback
) -> tuple[list[Tensor], ModuleMonitorCallback | None]:
    """Two epochs of three steps with loops of validation; gives the losses, and the callback."""
    losses = KeepLosses()
    rules = options.pop("rules")
    callback = ModuleMonitorCallback(2, rules=rules, store=False, on_error="raise") if monitored else None
    callbacks: list[Callback] = [*others, losses] if callback is None else [*others, callback, losses]
    limits: dict[str, Any] = {
        "max_epochs": 2,
        "limit_train_batches": 3,
        "limit_val_batches": 1,
        "devices": WORLD,
        "use_distributed_sampler": True,
    }
    trainer(folder, callbacks, **(limits | options)).fit(given, loader(), loader(8))
    return losses.losses, callback


def outcome(backend: CountingBackend, module: nn.Module, losses: list[Tensor], values: dict[str, float] | None) -> dict[str, Any]:
    """What the test compares."""
    return {
        "counts": backend.counts,
        "losses": losses,
        "weights": {name: local(value) for name, value in plain_state(module).items()},
        "values": values,
    }


def local(value: Any) -> Tensor:
    """The part of a tensor that this rank has."""
    part: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return part


def ddp(how: str) -> Callable[[Path, bool], dict[str, Any]]:
    """A model that is compiled before DDP wraps it."""

    def run(folder: Path, monitored: bool) -> dict[str, Any]:
        backend = CountingBackend()
        module, given = compiled(how, backend, Trained(Net(dropout=0.0)))
        rules = [OF_PARAMETERS, OF_OPTIMIZERS, OF_ALL, *([OF_BLOCKS] if how.startswith("blocks") else [])]
        losses, callback = fit(folder, given, {"strategy": DDPStrategy(), "rules": rules}, monitored)
        record = None if callback is None else callback.last_record
        return outcome(backend, module, losses, None if record is None else dict(record.values.items()))

    return run


class CompilesWrapper(Callback):
    """Compiles what DDP has wrapped."""

    def __init__(self, backend: CountingBackend) -> None:
        self._backend = backend

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.model.compile(backend=self._backend)


def ddp_compiled_after(folder: Path, monitored: bool) -> dict[str, Any]:
    """DDP's wrapper is compiled in place."""
    backend, module = CountingBackend(), Trained(Net(dropout=0.0))
    options = {"strategy": DDPStrategy(), "rules": [OF_PARAMETERS, OF_OPTIMIZERS, OF_ALL]}
    losses, callback = fit(folder, module, options, monitored, CompilesWrapper(backend))
    record = None if callback is None else callback.last_record
    return outcome(backend, module, losses, None if record is None else dict(record.values.items()))


def fsdp2(first: str) -> Callable[[Path, bool], dict[str, Any]]:
    """Blocks that are ``compiled`` first, or ``sharded``."""

    def run(folder: Path, monitored: bool) -> dict[str, Any]:
        backend = CountingBackend()
        module = Sharded(backend, first)
        options = {
            "strategy": ModelParallelStrategy(WORLD, 1),
            "rules": [OF_PARAMETERS, OF_OPTIMIZERS, OF_ALL, OF_BLOCKS],
            "use_distributed_sampler": False,
        }
        losses, callback = fit(folder, module, options, monitored)
        record = None if callback is None else callback.last_record
        return outcome(backend, module, losses, None if record is None else dict(record.values.items()))

    return run


def fabric_loop(reapplies: bool) -> Callable[[Path, bool], dict[str, Any]]:
    """A loop of one's own; ``reapplies``: Fabric compiles what its strategy has wrapped, in place of what was compiled."""

    def run(_folder: Path, monitored: bool) -> dict[str, Any]:
        backend = CountingBackend()
        network = Net(dropout=0.0)
        network.blocks[0].compile(backend=backend)
        fabric = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto")
        fabric.launch()
        network.blocks[1] = torch.compile(network.blocks[1], backend=backend)  # type: ignore[assignment]  # a module, too
        head = fabric.setup_module(torch.compile(network.head, backend=backend), _reapply_compile=reapplies)
        network.head = nn.Identity()  # type: ignore[assignment]
        model = fabric.setup_module(network)
        optimizer = fabric.setup_optimizers(torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1))
        losses, monitor = [], ModuleMonitor(rules=[Rule(kinds=["activation", "activation_gradient", "gradient"], statistics="norm")])
        monitor.distributed = WORLD > 1
        if monitored:
            monitor.set_module(nn.ModuleDict({"body": model, "head": head}))
        for step, (x, y) in enumerate(list(loader())[:6]):
            if monitored and step % 2 == 0:
                monitor.begin_step(step)
            loss = F.cross_entropy(head(model(x)), y)
            fabric.backward(loss)
            if monitored and step % 2 == 0:
                monitor.monitor_gradients()
                monitor.end_step()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        values = dict(monitor.get_step_metrics()) if monitored else None
        monitor.close()
        return outcome(backend, nn.ModuleList([network, head]), losses, values)

    return run


SCENARIOS = {
    "DDP, whole": ddp("whole"),
    "DDP, part": ddp("part"),
    "DDP, blocks": ddp("blocks"),
    "DDP, blocks in place": ddp("blocks, in place"),
    "DDP, compiled after": ddp_compiled_after,
    "FSDP2, compiled before": fsdp2("compiled"),
    "FSDP2, compiled after": fsdp2("sharded"),
    "Fabric, compiled before": fabric_loop(False),
    "Fabric, compiled after": fabric_loop(True),
}


def both(name: str, folder: Path) -> list[dict[str, Any]]:
    """The same training without a monitor and with one."""
    results = []
    for monitored in (False, True):
        torch._dynamo.reset()
        seed()
        results.append(SCENARIOS[name](folder, monitored))
    return results


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo")
    results: dict[str, Any] = {}
    for scenario in SCENARIOS:
        try:
            results[scenario] = both(scenario, Path(sys.argv[1]))
        except Exception as error:  # returned to the test
            results[scenario] = f"{type(error).__name__}: {error}"
    torch.save(results, Path(sys.argv[1]) / f"compiled.{RANK}.pt")
    distributed.destroy_process_group()
