"""Compiled models on two ranks: what was counted and trained with a callback and without, for tests/distributed/test_compiled_ranks.py."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers.compiling import OF_PARAMETERS, CountingBackend, Net, Trained, compiled, everything, plain_state
from helpers.lightning_package import Callback, DDPStrategy, LightningModule, ModelParallelStrategy, Trainer
from helpers.tiny import KeepRecords
from helpers.training import KeepLosses, loader, seed, trainer
from lightning.fabric import Fabric
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, Rule
from lightning_module_monitor.config.rules import as_tuple

Scenario = Callable[[Path, str], dict[str, Any]]
"""A training, with a folder for its files and a name of options; with the name ``""`` it has no monitor."""

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
WHICH = ("default rules", "parameters only", "everything")
OPTIONS: dict[str, dict[str, Any]] = {"default rules": {}, "parameters only": {"rules": [{"kinds": OF_PARAMETERS, "statistics": "norm"}]}}


class Sharded(Trained):
    """Parts of it are laid out over ranks, and blocks compiled before or after that."""

    def __init__(self, backend: CountingBackend, first: str) -> None:
        super().__init__(Net(dropout=0.0))
        self._backend, self._first, self._is_sharded = backend, first, False

    def configure_model(self) -> None:
        if self._is_sharded:
            return
        self._is_sharded = True
        mesh: DeviceMesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            if self._first == "compiled":
                block.compile(backend=self._backend)
            fully_shard(block, mesh=mesh)
            if self._first == "sharded":
                block.compile(backend=self._backend)
        fully_shard(self.model, mesh=mesh)


def fits(
    folder: Path,
    which: str,
    backend: CountingBackend,
    module: nn.Module,
    *others: Callback,
    strategy: Callable[[], Any],
    how: str,
    given: Any = None,
) -> dict[str, Any]:
    """Two fits of two epochs with loops of validation, and one that resumes the first: what the test compares.

    Args:
        folder: For files.
        which: The options of the callback; ``""``: no callback.
        backend: Counts.
        module: What is trained.
        others: Further callbacks.
        strategy: Makes the strategy of a Trainer.
        how: How the module is compiled, as in ``everything``.
        given: What the Trainer gets, if it is not the module.
    """
    options = OPTIONS.get(which)
    if which == "everything":
        options = everything(how)
    if which == "everything" and strategy is not DDPStrategy:
        # FSDP2 has no gradient noise, and no reference for a model that an earlier fit has laid out.
        rules = [rule for rule in options["rules"] if not any("difference" in kind for kind in as_tuple(rule["kinds"]))]
        rules += [{"kinds": ["activation", "activation_gradient"], "statistics": ["mean", "hist", "median"]}]
        options |= {"rules": rules, "reference": None, "rcc": False, "gradient_noise": False}
    losses = KeepLosses()
    callback = None if options is None else ModuleMonitorCallback(**{"every_n_steps": 2, "store": False, "on_error": "raise", **options})
    records = None if callback is None else KeepRecords(callback)
    callbacks: list[Callback] = [*others, losses] if callback is None or records is None else [*others, callback, records, losses]
    limits = {"limit_train_batches": 3, "limit_val_batches": 1, "devices": WORLD, "use_distributed_sampler": strategy is DDPStrategy}
    counts, values = [], dict[str, float]()
    for number, resumed in enumerate((None, None, folder / "0.ckpt")):
        run = trainer(folder, callbacks, strategy=strategy(), max_epochs=3 if resumed else 2, **limits)
        run.fit(module if given is None else given, loader(), loader(8), ckpt_path=resumed, weights_only=False)
        run.save_checkpoint(folder / f"{number}.ckpt")
        counts.append(backend.counts)
    for record in [] if records is None else records.records:
        values |= record.values
    return outcome(counts, module, losses.losses, values)


def outcome(counts: Any, module: nn.Module, losses: list[Tensor], values: dict[str, float] | None) -> dict[str, Any]:
    """What the test compares."""
    weights = {name: local(value) for name, value in plain_state(module).items()}
    return {"counts": counts, "losses": losses, "weights": weights, "values": values}


def local(value: Any) -> Tensor:
    """The part of a tensor that this rank has."""
    part: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return part


def ddp(how: str) -> Scenario:
    """A model that is compiled before DDP wraps it."""

    def run(folder: Path, which: str) -> dict[str, Any]:
        backend = CountingBackend()
        module, given = compiled(how, backend, Trained(Net(dropout=0.0)))
        return fits(folder, which, backend, module, strategy=DDPStrategy, how=how, given=given)

    return run


class CompilesWrapper(Callback):
    """Compiles what DDP has wrapped."""

    def __init__(self, backend: CountingBackend) -> None:
        self._backend = backend

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.model.compile(backend=self._backend)


def ddp_compiled_after(folder: Path, which: str) -> dict[str, Any]:
    """DDP's wrapper is compiled in place."""
    backend, module = CountingBackend(), Trained(Net(dropout=0.0))
    return fits(folder, which, backend, module, CompilesWrapper(backend), strategy=DDPStrategy, how="whole")


def fsdp2(first: str) -> Scenario:
    """Blocks that are ``compiled`` first, or ``sharded``."""

    def run(folder: Path, which: str) -> dict[str, Any]:
        backend = CountingBackend()
        strategy, how = partial(ModelParallelStrategy, WORLD, 1), "blocks, in place"
        return fits(folder, which, backend, Sharded(backend, first), strategy=strategy, how=how)

    return run


def fabric_loop(reapplies: bool) -> Scenario:
    """A loop of one's own; ``reapplies``: Fabric compiles what its strategy has wrapped, in place of what was compiled."""

    def run(_folder: Path, which: str) -> dict[str, Any]:
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
        monitored = bool(which)
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
        return outcome(backend.counts, nn.ModuleList([network, head]), losses, values)

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


def compared(name: str, folder: Path, *which: str) -> dict[str, dict[str, Any]]:
    """The same training without a monitor, with the name ``""``, and with one of each of these options."""
    results = {}
    for number, options in enumerate(("", *which)):
        torch._dynamo.reset()
        seed()
        results[options] = SCENARIOS[name](folder / f"{name} {number}", options)
    return results


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo")
    results: dict[str, Any] = {}
    for scenario in SCENARIOS:
        try:
            results[scenario] = compared(scenario, Path(sys.argv[1]), *WHICH[:1] if "Fabric" in scenario else WHICH)
        except Exception as error:  # returned to the test
            results[scenario] = f"{type(error).__name__}: {error}"
    torch.save(results, Path(sys.argv[1]) / f"compiled.{RANK}.pt")
    distributed.destroy_process_group()
