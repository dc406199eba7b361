"""Training runs over several processes: each runs the scenario of its arguments, and saves what it returns.

Run as a script, by every rank: ``scenarios.py FOLDER NAME``
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from helpers import deep
from helpers.accelerator import as_accelerator
from helpers.lightning_package import (
    LOGGER,
    Callback,
    DDPStrategy,
    FSDPStrategy,
    LightningModule,
    ModelParallelStrategy,
    ParallelStrategy,
    Trainer,
    is_overridden,
)
from helpers.other_code import OF_CALLBACK, OF_MODULE, Visitor, Visits, fresh, is_within, records_of
from helpers.training import Classifier, trainer
from helpers.zoo import batches, make
from lightning.fabric import Fabric
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    _init_utils,
    fully_shard,
    fully_sharded_data_parallel,
)
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, wrap
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_module_monitor import Capture, GradientFlow, Health, ModuleMonitor, ModuleMonitorCallback, Record, Rule
from lightning_module_monitor.config import schedule
from lightning_module_monitor.distributed import ranks
from lightning_module_monitor.distributed.shards import is_flattened, is_laid_out, is_sharded
from lightning_module_monitor.engine.step_context import StepContext
from lightning_module_monitor.errors import ConfigError, RanksLostError
from lightning_module_monitor.kernels.table import MomentTable
from lightning_module_monitor.step.accumulator import StepAccumulator
from lightning_module_monitor.trainer.optimizers import OptimizerTracker
from lightning_module_monitor.trainer.overhead import HostClock

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Keep(Callback):
    """Keeps the weights that every step begins with, and its record."""

    def __init__(self, monitor: ModuleMonitorCallback) -> None:
        self.monitor = monitor
        self.records: list[Record] = []
        self.states: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_args: Any) -> None:
        if not is_laid_out(pl_module):
            self.states.setdefault(trainer.global_step, copy.deepcopy(pl_module.state_dict()))

    def on_train_batch_end(self, *_args: Any) -> None:
        record = self.monitor.last_record
        if record is not None and all(record is not kept for kept in self.records):
            self.records.append(record)

    on_validation_epoch_end = on_train_batch_end


class Messages(logging.Handler):
    """Keeps the messages of the monitor."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """The messages of the monitor within the block."""
    handler, logger = Messages(), logging.getLogger(LOGGER)
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)


@contextmanager
def counting_collectives() -> Iterator[list[str]]:
    """The collectives that Python code starts within the block, by name; those of DDP's reducer are not among them."""
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier", "reduce", "gather")
    calls: list[str] = []
    originals = {name: getattr(distributed, name) for name in names}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(distributed, name, counted(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(distributed, name, original)


def collectives_of_steps(callback: ModuleMonitorCallback) -> list[list[str]]:
    """The collectives that end each of the steps to come."""
    counts: list[list[str]] = []
    end_step = callback.monitor.engine.end_step

    def counted() -> Record | None:
        with counting_collectives() as calls:
            record = end_step()
        counts.append(calls)
        return record

    callback.monitor.engine.end_step = counted  # type: ignore[method-assign]
    return counts


def sizes(rank: int, world: int, steps: int = 3, micro_batches: int = 2) -> list[int]:
    """How many samples each micro-batch of a rank has: as uneven as can be."""
    return [2 + rank + (2 * number + rank) % world for number in range(steps * micro_batches)]


def data(rank: int, world: int, **options: int) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a rank."""
    return batches(*sizes(rank, world, **options), seed=10 + rank)


def fit(
    folder: Path,
    module: LightningModule,
    callback: ModuleMonitorCallback,
    micro_batches: list[Any] | None = None,
    more: Sequence[Callback] = (),
    **options: Any,
) -> dict[str, Any]:
    """Train by DDP, and return what there is to see of it."""
    keep = Keep(callback)
    defaults: dict[str, Any] = {"devices": WORLD, "strategy": DDPStrategy(find_unused_parameters=True), "use_distributed_sampler": False}
    run = trainer(folder / f"rank_{RANK}", [callback, keep, *more], **(defaults | options))
    batches_of_rank: DataLoader[Any] = DataLoader(data(RANK, WORLD) if micro_batches is None else micro_batches, batch_size=None)
    with listening() as messages:
        run.fit(module, batches_of_rank, batches_of_rank if is_overridden("validation_step", module) else None)
    return {
        "folder": folder,
        "records": keep.records,
        "states": keep.states,
        "messages": messages,
        "files": sorted(str(path.relative_to(folder)) for path in (folder / f"rank_{RANK}").rglob("*") if path.is_file()),
        "state": _whole_state(module),
    }


def _whole_state(module: LightningModule) -> dict[str, Tensor]:
    """All weights; none of those of FSDP1, of which a unit alone has no state."""
    state = {} if any(is_flattened(parameter) for parameter in module.parameters()) else module.state_dict()
    return {name: value.full_tensor() if is_sharded(value) else value.clone() for name, value in state.items()}


EVERYTHING = ["mean", "std", "skewness", "kurtosis", "norm", "rms", "min", "max", "abs_mean", "zero_fraction", "nonfinite_count"]
EVERYTHING += ["token_norm", "token_rms", "hist"]


QUANTILES = {"p05": 0.05, "median": 0.5, "p95": 0.95}
FINE = [*QUANTILES, *(f"{loss}_float8_e4m3fn" for loss in ("underflow", "overflow", "scaled_underflow")), "dynamic_range", "peak_to_rms"]
"""Those that are made of fine counts, and of the largest magnitude."""

OF_PARTS = [name for name in EVERYTHING if not name.startswith("token")]
"""Those that parts of a tensor show."""


def _rules(*, are_sharded: bool = False) -> list[Rule]:
    """Every statistic of every kind, also of modules' parameters together; of parameters that are laid out over ranks without tokens."""
    outputs, parameters = ["activation", "activation_gradient"], ["parameter", "gradient_before_clip", "gradient", "update"]
    return [
        Rule(kinds=outputs, statistics=EVERYTHING),
        Rule(kinds=parameters, statistics=OF_PARTS if are_sharded else EVERYTHING),
        Rule(kinds="update", statistics="ratio"),
        Rule(kinds=parameters, statistics=OF_PARTS, per_module=".*"),
        Rule(kinds="update", statistics="ratio", per_module=".*"),
    ]


def zoo(model: str) -> Callable[[Path], dict[str, Any]]:
    """Every statistic of every kind, over uneven micro-batches, with clipping."""

    def scenario(folder: Path) -> dict[str, Any]:
        torch.manual_seed(RANK)  # DDP gives every rank the weights of the first
        fine = Rule(kinds=["activation", "activation_gradient", "parameter", "gradient"], statistics=FINE)
        channels = Rule(kinds="activation", statistics="outlier_channels")
        callback = ModuleMonitorCallback(every_n_steps=1, rules=[*_rules(), fine, channels], on_error="raise")
        module = Classifier(model, torch.optim.SGD, lr=0.1)
        return fit(folder, module, callback, accumulate_grad_batches=2, gradient_clip_val=0.5, max_epochs=1)

    return scenario


class Silent(Classifier):
    """Logs nothing: every key is known before the first step."""

    def log(self, *_args: Any, **_options: Any) -> None:
        pass


def noise(folder: Path) -> dict[str, Any]:
    """Gradient noise of uneven micro-batches: two in a step, of an epoch's last step one; and with one in every step. A plain loop too."""
    torch.manual_seed(0)
    results = {}
    for num, micro_batches in ((2, 5), (1, 3)):
        callback = ModuleMonitorCallback(
            1, rules=[], gradient_noise={"per_module": ["_root_", r"model\..*"]}, on_error="raise", store=False
        )
        counts = collectives_of_steps(callback)
        module = Silent("shared", torch.optim.SGD, lr=0.1)
        own = data(RANK, WORLD)[:micro_batches]
        results[num] = fit(folder / str(num), module, callback, own, accumulate_grad_batches=num, gradient_clip_val=0.5)
        results[num]["collectives"] = counts
    refusal = ""
    try:
        ModuleMonitor(gradient_noise=True).set_module(module)
    except ConfigError as error:
        refusal = str(error)
    model = make("mlp").double().eval()  # without dropout
    wrapped = nn.parallel.DistributedDataParallel(model)
    with ModuleMonitor(gradient_noise=True, distributed=True, on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.begin_step(0)
        own = [(x.double(), y) for x, y in data(RANK, WORLD)[:2]]
        for number, (x, y) in enumerate(own):
            monitor.monitor_context("batch_size", len(x), "sum")
            with wrapped.no_sync() if number == 0 else nullcontext():
                (F.cross_entropy(wrapped(x), y) / 2).backward()
            monitor.after_micro_batch()
        monitor.monitor_gradients()
        record = monitor.end_step()
    return {**results, "refusal": refusal, "own loop": (model.state_dict(), record)}


class Attending(nn.Module):
    """Attention, normalization, and a block that is called twice; nothing random, nothing that depends on the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x.unsqueeze(-1))
        normed = self.norm(h)
        h = h + self.attention(normed, normed, normed)[0]
        for block in (*self.blocks, self.blocks[0]):
            h = h + torch.tanh(block(h))
        prediction: Tensor = self.head(h.mean(1))
        return prediction


def everything() -> ModuleMonitorCallback:
    """All kinds there are."""
    rules = [
        *_rules(),
        Rule(kinds=["activation_difference", "parameter_difference"], statistics=["norm", "ratio", "cosine", "hist"]),
        Rule(kinds="parameter_difference", statistics=["norm", "ratio", "cosine", "hist"], per_module=["_root_", "model[.]blocks"]),
        Rule(kinds=["attention_entropy", "attention_max_logit"], statistics=["mean", "max"]),
        Rule(kinds="activation", functions={"mse": MeanSquaredErrorOfZero(), "third": third_moment}, sites="model.blocks.*"),
        Rule(kinds=["activation", "parameter"], functions={"largest": largest}, aggregate="max", sites="model.head.*"),
        Rule(kinds="activation", functions={"least": least}, aggregate="min", sites="model.head"),
        Rule(kinds="activation", functions={"total": torch.sum}, aggregate="sum", sites="model.head"),
        Rule(kinds="activation", functions={"spread": torch.flatten}, aggregate=spread, sites="model.head"),
    ]
    flow = GradientFlow(blocks="model.blocks")
    return ModuleMonitorCallback(
        every_n_steps=1, rules=rules, attention=True, gradient_flow=flow, reference="init", rcc=True, stages=["train", "validate"],
        on_error="raise", callback_metrics=["(validation/)?activation/model.head/rms"],
    )  # fmt: skip


class MeanSquaredErrorOfZero(Metric):
    """Mean of squares, by a state that torchmetrics synchronizes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("squares", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.squares += x.square().sum()
        self.count += x.numel()

    def compute(self) -> Tensor:
        return self.squares / self.count


def third_moment(x: Tensor) -> Tensor:
    """A tensor of the input's shape."""
    return x**3


def largest(x: Tensor) -> Tensor:
    """The largest element."""
    return x.max()


def least(x: Tensor) -> Tensor:
    """The least element."""
    return x.min()


def spread(values: Tensor) -> dict[str, Tensor]:
    """An aggregate of all values of a step."""
    return {"low": values.quantile(0.25), "high": values.quantile(0.75)}


FULL_BATCH = 12


def even_data(rank: int, world: int, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """A rank's share of batches of twelve."""
    whole = batches(*[FULL_BATCH] * steps, seed=3)
    size = FULL_BATCH // world
    return [(x[rank * size : (rank + 1) * size], y[rank * size : (rank + 1) * size]) for x, y in whole]


def whole_and_parts(folder: Path) -> dict[str, Any]:
    """All kinds there are, of batches that are shared out evenly: the same as of the whole batches in one process."""
    torch.manual_seed(0)
    module = Classifier(Attending(), torch.optim.SGD, lr=0.1)
    strategy = DDPStrategy() if WORLD > 1 else "auto"
    options: dict[str, Any] = {"strategy": strategy, "max_epochs": 2, "limit_val_batches": 2}
    return fit(folder, module, everything(), even_data(RANK, WORLD), **options)


def transfers(folder: Path) -> dict[str, Any]:
    """What is brought to the host in each step, by the default callback and by one that records all kinds there are."""
    results: dict[str, Any] = {}
    for name, callback in {"default": ModuleMonitorCallback(2), "everything": everything()}.items():
        torch.manual_seed(0)
        module = Classifier(Attending(), torch.optim.SGD, lr=0.1)
        strategy = DDPStrategy() if WORLD > 1 else "auto"
        with as_accelerator() as sizes:
            result = fit(folder / name, module, callback, even_data(RANK, WORLD, 6), strategy=strategy, max_epochs=1, limit_val_batches=0)
        results[name] = sizes, [len(record.values) for record in result["records"]]
    return results


def operations(folder: Path) -> dict[str, tuple[int, int]]:
    """Operations of torch in a monitored step and in another one, by the callback of the run."""
    callbacks = {"plain": None, "without health": ModuleMonitorCallback(2, health=False), "default": ModuleMonitorCallback(2)}
    options: dict[str, Any] = {"strategy": "ddp", "devices": WORLD}
    return {name: deep.operations_of_steps(callback, folder / name, **options) for name, callback in callbacks.items()}


class OwnDDPStrategy(DDPStrategy):
    """A user's, which has parameters as DDP does."""


class OwnModelParallelStrategy(ModelParallelStrategy):
    """A user's, which has parameters as Lightning's does."""


class UnknownStrategy(ParallelStrategy):
    """A user's, in which every rank trains a model of its own."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": WORLD, "rank": RANK}

    def model_to_device(self) -> None:
        pass

    def setup_environment(self) -> None:
        self.set_world_ranks()
        super().setup_environment()

    def set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(RANK)
        self.cluster_environment.set_world_size(WORLD)

    def barrier(self, name: str | None = None) -> None:
        distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        everything = [obj]
        distributed.broadcast_object_list(everything, src)
        return everything[0]

    def reduce(self, tensor: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return tensor


def of_a_subclass(folder: Path) -> dict[str, Any]:
    """DDP and FSDP2 by strategies that a user has derived from Lightning's, and by these: the values of both."""
    values: dict[str, list[list[dict[str, float]]]] = {}
    for classes in ([DDPStrategy, OwnDDPStrategy], [ModelParallelStrategy, OwnModelParallelStrategy]):
        for kind in classes:
            torch.manual_seed(0)
            is_ddp = issubclass(kind, DDPStrategy)
            module = Classifier("mlp", torch.optim.SGD) if is_ddp else Laid(fully_sharded)
            callback = ModuleMonitorCallback(1, rules=_rules(are_sharded=not is_ddp), on_error="raise")
            strategy = kind() if is_ddp else kind(WORLD, 1)
            result = fit(folder, module, callback, even_data(RANK, WORLD), strategy=strategy, limit_val_batches=0)
            values.setdefault(classes[0].__name__, []).append([dict(record.values) for record in result["records"]])
    return {"values": values}


def of_an_unknown_strategy(folder: Path) -> dict[str, Any]:
    """Each rank has a model and values of its own; in the last step the last rank has a bad batch."""
    torch.manual_seed(RANK)
    micro_batches = data(RANK, WORLD, micro_batches=1)
    if RANK == WORLD - 1:
        micro_batches[-1][0][0, 0] = torch.nan
    rules = [Rule(kinds=["activation", "activation_gradient", "parameter", "gradient", "activation_difference"], statistics="norm")]
    results = {}
    for health in ("warn", "always"):
        callback = ModuleMonitorCallback(2, rules=rules, reference="init", health=Health(nonfinite=health), on_error="raise")
        module = Classifier(nn.Linear(6, 3), torch.optim.SGD, lr=0.1)
        with counting_collectives() as calls:
            result = fit(folder / health, module, callback, micro_batches, strategy=UnknownStrategy(), limit_val_batches=0)
        results[health] = result | {"findings": callback.findings, "all_reduces": calls.count("all_reduce")}
    return results


def unchanged(folder: Path) -> dict[str, Any]:
    """Training with the callback, dropout and all, and without it."""
    states = []
    for monitored in (False, True):
        torch.manual_seed(0)
        module = Classifier("transformer", torch.optim.AdamW)
        callback = ModuleMonitorCallback(2, rules=_rules(), attention=True, reference="init", rcc=True, on_error="raise")
        options: dict[str, Any] = {"devices": WORLD, "strategy": "ddp", "use_distributed_sampler": False, "accumulate_grad_batches": 2}
        trainer(folder, [callback] if monitored else [], **options).fit(module, DataLoader(data(RANK, WORLD, steps=6), batch_size=None))
        states.append({name: value.clone() for name, value in module.state_dict().items()} | {"random": torch.get_rng_state()})
    return {"states": states, "num_values": len(callback.last_record.values) if callback.last_record is not None else 0}


def unchanged_with_parts(folder: Path) -> dict[str, Any]:
    """Training with parameters that are laid out over ranks, with the callback and without it: FSDP2, then tensor parallel."""
    states: dict[str, list[dict[str, Tensor]]] = {}
    for way, lay, num_sharing in (("FSDP2", fully_sharded, 1), ("tensor parallel", tensor_parallel, 2)):
        for monitored in (False, True):
            rules = [Rule(kinds=["activation", "activation_gradient", "parameter", "gradient", "update"], statistics=["norm", "hist"])]
            rules.append(Rule(kinds=["parameter", "gradient"], functions={"product": second_to_last}))
            rules.append(Rule(kinds="parameter_difference", statistics="norm"))
            capture = Capture(sites="network.up.*", kinds=["parameter", "update"], steps=[1])
            callback = ModuleMonitorCallback(1, rules=rules, reference="init", rcc=way == "FSDP2", capture=capture, on_error="raise")
            strategy = ModelParallelStrategy(WORLD // num_sharing, num_sharing)
            options: dict[str, Any] = {"strategy": strategy, "devices": WORLD, "use_distributed_sampler": False, "limit_val_batches": 0}
            module = Laid(lay)
            micro_batches: DataLoader[Any] = DataLoader(even_data(RANK // num_sharing, WORLD // num_sharing), batch_size=None)
            trainer(folder, [callback] if monitored else [], **options).fit(module, micro_batches)
            weights = {name: tensor.full_tensor() if is_sharded(tensor) else tensor.clone() for name, tensor in module.state_dict().items()}
            states.setdefault(way, []).append(weights | {"random": torch.get_rng_state()})
    return states


def other_code(folder: Path) -> dict[str, list[Record]]:
    """Records without other code that runs the model, and with such code in each event of a callback, or hook of the module."""
    options: dict[str, Any] = {"devices": WORLD, "strategy": "ddp", "use_distributed_sampler": False}
    records = {"": records_of(folder, fresh(), **options)}
    for event, is_first in itertools.product(OF_CALLBACK, (True, False)):
        name = f"callback {event} {'after us' if is_first else 'before us'}"
        records[name] = records_of(folder, fresh(), Visitor(event, Visits()), is_first=is_first, **options)
    for event in OF_MODULE:
        if not is_within(event, is_manual=False):
            records[f"module {event}"] = records_of(folder, fresh(event, Visits()), **options)
    return records


class Sick(nn.Module):
    """Half of its units are dead on all ranks, and two more on each; what is large in its input it makes infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu, self.head = nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 3)
        with torch.no_grad():
            self.fc.weight.copy_(torch.tensor([[1.0], [1.0], [-1.0], [-1.0], [0.0], [0.0], [0.0], [0.0]]))
            self.fc.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, -1.0, -1.0, -1.0, -1.0]))

    def forward(self, x: Tensor) -> Tensor:
        side = torch.ones(len(x), 1) if RANK == 0 else -torch.ones(len(x), 1)
        return self.head(self.relu(self.fc(side))) + torch.log((x.abs().amax() < 50).float())


def sick(health: Health) -> Callable[[Path], dict[str, Any]]:
    """What is found, on every rank; of the last one the second micro-batch of the last step is bad."""

    def run(folder: Path) -> dict[str, Any]:
        torch.manual_seed(0)
        micro_batches = data(RANK, WORLD)
        if RANK == WORLD - 1:
            micro_batches[5][0][0, 0] = 100.0
        callback = ModuleMonitorCallback(2, rules=[Rule(kinds="activation", statistics="rms")], health=health, on_error="raise")
        module = Classifier(Sick(), torch.optim.SGD, lr=1e-3)
        result = fit(folder, module, callback, micro_batches, accumulate_grad_batches=2, limit_val_batches=0)
        return result | {"findings": callback.findings}

    return run


class OnAllRanks(Sick):
    """The same, and its result is of all ranks: the forward pass of one waits for the others."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        total = y.detach().sum()
        distributed.all_reduce(total)
        return y + 0 * total


def sick_and_not_copied(folder: Path) -> dict[str, Any]:
    """The last rank cannot copy the model, the others can: none may run the step again, nor wait for it."""
    torch.manual_seed(0)
    micro_batches = data(RANK, WORLD)
    if RANK == 0:
        micro_batches[1][0][0, 0] = 100.0
    callback = ModuleMonitorCallback(50, health=Health(nonfinite="always"), on_error="raise")
    module = Classifier(OnAllRanks(), torch.optim.SGD, lr=1e-3)
    if RANK == WORLD - 1:
        module.lock = threading.Lock()
    return fit(folder, module, callback, micro_batches, limit_val_batches=0) | {"findings": callback.findings}


def sick_between(folder: Path) -> dict[str, Any]:
    """Step 1 is bad on the last rank, and steps 0 and 3 are monitored; collectives of every step are counted."""
    torch.manual_seed(0)
    micro_batches = data(RANK, WORLD)
    if RANK == WORLD - 1:
        micro_batches[1][0][0, 0] = 100.0
    callback = ModuleMonitorCallback(3, rules=[Rule(kinds="activation", statistics="rms")], on_error="raise")
    result = fit(folder, Classifier(Sick(), torch.optim.SGD, lr=1e-3), callback, micro_batches, limit_val_batches=0)
    return result | {"findings": callback.findings}


class Branches(nn.Module):
    """What runs depends on the rank and on the step: a tuple on the last rank only, a module and a head from a later step on."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(6, 6)
        self.only = nn.Linear(6, 6)
        self.pair = Pairs()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.common(x)
        if RANK == WORLD - 1:
            h = h + self.only(h)
            h = h + self.pair(h)[0]
            if self.step > 0:
                h = h + self.attention(h.unsqueeze(1), h.unsqueeze(1), h.unsqueeze(1))[0].squeeze(1)
        self.step += 1
        prediction: Tensor = self.head(h)
        return prediction


class Pairs(nn.Module):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x[:, :2] * 3


def branches(folder: Path) -> dict[str, Any]:
    """Modules, outputs and heads that only the last rank has: no rank waits, no rows mix; collectives are counted."""
    torch.manual_seed(0)
    model = Branches()
    rules = [
        Rule(kinds=["activation", "activation_gradient"], statistics=["mean", "norm", "hist"]),
        Rule(
            kinds="activation",
            # In float64: the sum of one rank may all but cancel that of another.
            functions={"total": lambda x: x.double().sum(), "metric": MeanSquaredErrorOfZero()},
            aggregate="sum",
            sites="model.(only|pair)",
        ),
        Rule(kinds="attention_entropy", statistics="mean"),
    ]
    callback = ModuleMonitorCallback(every_n_steps=1, rules=rules, on_error="raise")
    counts = collectives_of_steps(callback)
    module = Classifier(model, torch.optim.SGD, lr=0.1)
    return fit(folder, module, callback, limit_val_batches=0) | {"collectives": counts}


class Count(Callback):
    """Counts steps."""

    def __init__(self) -> None:
        self.step = 0

    def on_train_batch_end(self, *_args: Any) -> None:
        self.step += 1


BROKEN = {
    1: (ModuleMonitor, "begin_backward"),
    2: (MomentTable, "add_all"),
    3: (OptimizerTracker, "finish"),
    5: (StepAccumulator, "_observed"),
    7: (OptimizerTracker, "finish"),
}
"""What of the monitor raises on the last rank, by step; the last of them in the last step."""


@contextmanager
def breaking(count: Count) -> Iterator[None]:
    """Within the block the monitor of the last rank is broken, step after step in another place."""
    originals = {(owner, name): getattr(owner, name) for owner, name in BROKEN.values()}

    def broken(owner: type, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if RANK == WORLD - 1 > 0 and BROKEN.get(count.step) == (owner, name):
                raise RuntimeError(f"{name} is broken, on purpose")
            return originals[owner, name](*args, **kwargs)

        return call

    for owner, name in originals:
        setattr(owner, name, broken(owner, name))
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


def one_rank_fails(folder: Path) -> dict[str, Any]:
    """On the last rank a function raises in step 4, and in other steps the monitor itself: training goes on everywhere."""
    count = Count()

    def fails(x: Tensor) -> Tensor:
        if RANK == WORLD - 1 and count.step == 4:
            raise ValueError("on purpose")
        return x.mean()

    rules = [
        Rule(kinds="activation", statistics="norm", functions={"fails": fails}, sites="model.layers.0"),
        Rule(kinds="gradient", statistics="norm", sites="model.layers.0.weight"),
        # These bring their results together by themselves, after the two collectives.
        Rule(kinds="activation", functions={"mse": MeanSquaredErrorOfZero()}, sites="model.layers.0"),
        Rule(kinds="activation", functions={"spread": torch.flatten}, aggregate=spread, sites="model.layers.0"),
    ]
    torch.manual_seed(0)
    module = Classifier("mlp", torch.optim.SGD, lr=0.1)
    with breaking(count):
        micro_batches = data(RANK, WORLD, steps=8, micro_batches=1)
        return fit(folder, module, ModuleMonitorCallback(1, rules=rules), micro_batches, more=[count], limit_val_batches=0)


def one_rank_cannot_begin(folder: Path) -> dict[str, Any]:
    """On the last rank the second step, and the second loop of validation, cannot be opened; training goes on everywhere."""
    count, original, num_loops = Count(), StepContext.__init__, [0]

    def breaks(context: StepContext, model: Any, due: Any, step: int, stage: str, *args: Any) -> None:
        num_loops[0] += stage != "train"
        if RANK == WORLD - 1 > 0 and (count.step == 1 if stage == "train" else num_loops[0] == 2):
            raise RuntimeError("it cannot begin, on purpose")
        original(context, model, due, step, stage, *args)

    callback = ModuleMonitorCallback(1, rules=[Rule(kinds="activation", statistics="norm")], stages=["train", "validate"], store=False)
    torch.manual_seed(0)
    with patch.object(StepContext, "__init__", breaks):
        micro_batches = data(RANK, WORLD, steps=4, micro_batches=1)
        result = fit(folder, Classifier("mlp"), callback, micro_batches, more=[count], val_check_interval=1, limit_val_batches=1)
    return result | {"loops": num_loops[0]}


class ReplacesLate(Classifier):
    """Has another activation after a first loop of validation: numbers from 2 to 3."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.optim.SGD, lr=0.1)

    def on_train_start(self) -> None:
        self.model[1] = nn.Hardtanh(2.0, 3.0)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.model(batch[0])


def late_layers(folder: Path) -> dict[str, Any]:
    """A module is replaced when the monitors of all ranks have met: they do not meet again. Returns the number of groups, too."""
    rules = [Rule(kinds="activation", statistics=["min", "rms"])]
    torch.manual_seed(0)
    with patch.object(distributed, "new_group", wraps=distributed.new_group) as new_group:
        result = fit(folder, ReplacesLate(), ModuleMonitorCallback(1, rules=rules), limit_val_batches=1, num_sanity_val_steps=1)
    return result | {"num_groups": new_group.call_count}


class OwnOptimizer(LightningModule):
    """Steps an optimizer that Lightning does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = make("mlp")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.own.zero_grad()
        self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]))
        self.own.step()

    def configure_optimizers(self) -> None:
        self.own = torch.optim.SGD(self.parameters(), lr=0.1)


def own_optimizer(folder: Path) -> dict[str, Any]:
    """Parameters that move elsewhere."""
    torch.manual_seed(0)
    callback = ModuleMonitorCallback(1, rules=[Rule(kinds=["parameter", "gradient", "update"], statistics="norm")], store=False)
    micro_batches = data(RANK, WORLD, steps=4, micro_batches=1)
    return fit(folder, OwnOptimizer(), callback, micro_batches, limit_val_batches=0) | {"findings": callback.findings}


def one_rank_fails_of_those_with_parts(folder: Path) -> dict[str, Any]:
    """The same where parameters are laid out over ranks, and functions and the file want whole ones in every step."""
    count = Count()
    rules = [
        Rule(kinds="activation", statistics="norm", sites="network.up"),
        Rule(kinds=["parameter", "gradient"], statistics="norm", functions={"product": second_to_last}),
    ]
    capture = Capture(sites="network.up.*", kinds=["parameter", "gradient"], steps=list(range(8)))
    callback = ModuleMonitorCallback(1, rules=rules, capture=capture)
    options: dict[str, Any] = {"strategy": ModelParallelStrategy(WORLD, 1) if WORLD > 1 else "auto", "limit_val_batches": 0}
    with breaking(count):
        return fit(folder, Laid(fully_sharded), callback, even_data(RANK, WORLD, steps=8), more=[count], **options)


def limited(folder: Path) -> dict[str, Any]:
    """A limit of the time, by clocks that are set: a step takes a second, a metric half a second on the first rank, one on the next.

    On the last rank the hooks of the first step cannot be put on.
    """
    count, time = Count(), [0.0]
    now, attach = HostClock.now, StepContext.attach

    def metric(x: Tensor) -> Tensor:
        time[0] += 0.5 * (RANK + 1)
        return x.mean()

    def breaks(window: StepContext, *args: Any) -> None:
        if RANK == WORLD - 1 > 0 and count.step == 0:
            raise RuntimeError("attach is broken, on purpose")
        attach(window, *args)

    class Timed(Classifier):
        def training_step(self, *args: Any) -> Tensor:
            time[0] += 1.0
            return super().training_step(*args)

    torch.manual_seed(0)
    module = Timed("mlp", torch.optim.SGD, lr=0.1)
    rules = [Rule(kinds="activation", functions={"slow": metric}, sites="model.layers.0")]
    callback = ModuleMonitorCallback(1, rules=rules, max_overhead=0.1, store=False)
    HostClock.now, StepContext.attach = lambda _clock: time[0], breaks  # type: ignore[method-assign]
    try:
        return fit(folder, module, callback, data(RANK, WORLD, steps=36, micro_batches=1), more=[count], limit_val_batches=0)
    finally:
        HostClock.now, StepContext.attach = now, attach  # type: ignore[method-assign]


def by_the_clock(folder: Path) -> dict[str, Any]:
    """Steps by the minute, by clocks that are set: a step takes a second on the first rank, two on the next.

    On the last rank the hooks of the third step that is monitored cannot be put on.
    """
    count, now = Count(), [0.0]
    clock, attach = schedule.time.monotonic, StepContext.attach

    def breaks(window: StepContext, *args: Any) -> None:
        if RANK == WORLD - 1 > 0 and count.step == 11:
            raise RuntimeError("attach is broken, on purpose")
        attach(window, *args)

    class Timed(Classifier):
        def training_step(self, *args: Any) -> Tensor:
            now[0] += RANK + 1.0
            return super().training_step(*args)

    torch.manual_seed(0)
    module = Timed("mlp", torch.optim.SGD, lr=0.1)
    rules = [Rule(kinds="parameter", statistics="norm", sites=".*weight")]
    callback = ModuleMonitorCallback({"minutes": 0.5}, rules=rules, store=False)
    schedule.time.monotonic, StepContext.attach = lambda: now[0], breaks  # type: ignore[method-assign]
    try:
        return fit(folder, module, callback, data(RANK, WORLD, steps=120, micro_batches=1), more=[count], limit_val_batches=0)
    finally:
        schedule.time.monotonic, StepContext.attach = clock, attach  # type: ignore[method-assign]


class OnPurposeError(Exception):
    """An error that user code catches."""


def own_loop(folder: Path) -> dict[str, Any]:
    """DDP without Lightning: logged values, and errors on the last rank that the loop catches."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    parallel = nn.parallel.DistributedDataParallel(model)
    with ModuleMonitor(rules=[Rule(kinds=["activation", "gradient"], statistics="norm")], distributed=True) as monitor:
        monitor.set_module(model)
        for step, (x, y) in enumerate(own_data(RANK, WORLD)):
            fails_in = {2: "train", 3: "validation", 5: "test"}.get(step) if RANK == WORLD - 1 else None
            with suppress(OnPurposeError):
                _monitored_step(monitor, parallel, step, (x, y), fails_in)
        return {"values": monitor.get_all_metrics()}


def own_data(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """A batch for each of eight steps."""
    return data(rank, world, steps=8, micro_batches=1)


def _monitored_step(
    monitor: ModuleMonitor, model: nn.parallel.DistributedDataParallel, step: int, batch: tuple[Tensor, Tensor], fails_in: str | None
) -> None:
    """A step, from the third on with a validation loop in the middle, and from the fifth on with a test loop after it."""
    monitor.begin_step(step)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    monitor.log_scalar(f"own/site/of_rank_{RANK}", step + 0.5)
    monitor.log_tensor("own/site/largest", torch.tensor([float(RANK), float(step)]), lambda values: values.max())
    if step > 3:
        monitor.log_scalar("own/site/late", float(RANK))
    if fails_in == "train":
        raise OnPurposeError
    if step >= 3:
        _monitored_loop(monitor, model.module, "validation", step, batch[0], fails=fails_in == "validation")
    monitor.end_step()
    if step >= 5:
        _monitored_loop(monitor, model.module, "test", step, batch[0], fails=fails_in == "test")


def _monitored_loop(monitor: ModuleMonitor, model: nn.Module, stage: str, step: int, x: Tensor, *, fails: bool) -> None:
    monitor.engine.begin_stage(stage, step)
    model(x)
    if fails:
        raise OnPurposeError
    monitor.engine.end_stage()


class Corrupts(Callback):
    """Adds to one weight, on the last rank, before step 1."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and RANK == WORLD - 1:
            with torch.no_grad():
                pl_module.get_parameter("model.blocks.1.weight")[0, 0] += 0.25


def corrupted(folder: Path) -> dict[str, Any]:
    """One weight of one rank differs from step 1 on; the loss is not what it was, and gradients are reduced all the same."""
    torch.manual_seed(0)
    rules = [Rule(kinds=["parameter", "gradient", "update"], statistics=["norm", "mean", "max", "hist"])]
    callback = ModuleMonitorCallback(1, rules=rules, on_error="raise")
    counts = collectives_of_steps(callback)
    module = Classifier(Attending(), torch.optim.SGD, lr=0.1)
    options: dict[str, Any] = {"limit_val_batches": 0, "strategy": DDPStrategy()}
    result = fit(folder, module, callback, even_data(RANK, WORLD), more=[Corrupts()], **options)
    return result | {"findings": callback.findings, "collectives": counts}


def local_steps(folder: Path) -> dict[str, Any]:
    """A loop of one's own in which every rank trains alone: ranks begin alike, and come apart at once; the tied weight has no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    model[0].bias.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records, states = [], []
    with ModuleMonitor(rules=Rule(kinds=["parameter", "gradient"], statistics=["norm", "mean"]), distributed=True) as monitor:
        monitor.set_module(model)
        for step, (x, y) in enumerate(data(RANK, WORLD, micro_batches=1)):
            monitor.begin_step(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            monitor.monitor_gradients()
            monitor.monitor_parameters()
            states.append({name: (parameter.detach().clone(), parameter.grad) for name, parameter in model.named_parameters()})
            optimizer.step()
            records.append(monitor.end_step())
        return {"records": records, "states": states, "findings": monitor.engine.findings}


@contextmanager
def waiting_for(seconds: float) -> Iterator[None]:
    """Within the block the monitors that are made do not wait for other ranks for longer."""
    original, ranks.TIMEOUT = ranks.TIMEOUT, timedelta(seconds=seconds)
    try:
        yield
    finally:
        ranks.TIMEOUT = original


def join(folder: Path) -> dict[str, Any]:
    """A loop of one's own in torch's ``Join``: the last rank has two batches of six; with the monitor, and without it."""
    results = []
    for monitored in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        parallel = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        logger = logging.getLogger(LOGGER)
        monitor = ModuleMonitor(rules=Rule(kinds=["activation", "parameter"], statistics="norm"), distributed=monitored, logger=logger)
        with waiting_for(3), listening() as messages, monitor:
            monitor.set_module(model)
            with Join([parallel]):
                for step, (x, y) in enumerate(data(RANK, WORLD, micro_batches=1, steps=6)[: 2 if RANK == WORLD - 1 else 6]):
                    if monitored:
                        monitor.begin_step(step)
                    optimizer.zero_grad()
                    F.cross_entropy(parallel(x), y).backward()
                    optimizer.step()
                    monitor.end_step()
            results.append({"state": model.state_dict(), "values": monitor.get_all_metrics(), "messages": messages})
    return {"plain": results[0], "monitored": results[1]}


def one_rank_leaves(folder: Path) -> dict[str, Any]:
    """On the last rank the collectives of the monitor fail from step 2 on, in its record and where every step is looked at."""
    results, all_reduce = {}, ranks.Ranks.all_reduce
    for option in ("warn", "always"):
        count = Count()

        def fails(process_ranks: ranks.Ranks, tensor: Tensor, how: Any, count: Count = count) -> Tensor:
            if RANK == WORLD - 1 and count.step >= 2:
                raise RanksLostError("on purpose")
            return all_reduce(process_ranks, tensor, how)

        torch.manual_seed(0)
        rules = [Rule(kinds=["activation", "parameter", "gradient"], statistics="norm")]
        callback = ModuleMonitorCallback(1, rules=rules, health=Health(nonfinite=option), on_error="raise", stages=["train", "validate"])
        module = Classifier("mlp", torch.optim.SGD, lr=0.1)
        ranks.Ranks.all_reduce = fails  # type: ignore[method-assign]
        try:
            with waiting_for(3):
                results[option] = fit(folder / option, module, callback, data(RANK, WORLD, micro_batches=1, steps=6), more=[count])
        finally:
            ranks.Ranks.all_reduce = all_reduce  # type: ignore[method-assign]
        results[option]["hooks"] = sum(len(part._forward_hooks) for part in module.modules())
    return results


def other_rules(folder: Path) -> dict[str, Any]:
    """The last rank wants something else of the same model, or in other steps."""
    model, errors, calls = nn.Linear(6, 3), [], []
    is_other = RANK == WORLD - 1
    for options in (
        {"rules": Rule(kinds="activation", statistics=["norm", "hist"] if is_other else "norm")},
        {"rules": Rule(kinds="activation", statistics="norm", every_n_steps=[0, 2] if is_other else [0, 1])},
        {"rules": Rule(kinds="activation", statistics="norm"), "capture": Capture(sites="_root_", steps=[0, 2] if is_other else [0])},
    ):
        with ModuleMonitor(**options, distributed=True) as monitor, counting_collectives() as collectives:  # type: ignore[arg-type]
            monitor.set_module(model)
            try:
                monitor.begin_step(0)
            except ConfigError as error:
                errors.append(str(error))
            model(torch.ones(2, 6))
            monitor.end_step()
            calls.append(collectives)
    return {"errors": errors, "collectives": calls}


def own_reference(folder: Path) -> dict[str, Any]:
    """A reference that is handed over, and made from another seed on every rank."""
    torch.manual_seed(RANK)
    reference = Classifier(Attending(), torch.optim.SGD)
    rules = [Rule(kinds=["activation_difference", "parameter_difference"], statistics="norm")]
    callback = ModuleMonitorCallback(every_n_steps=1, rules=rules, reference=reference, on_error="raise")
    options: dict[str, Any] = {"max_steps": 1, "limit_val_batches": 0}
    return fit(folder, Classifier(Attending(), torch.optim.SGD), callback, data(RANK, WORLD, steps=1, micro_batches=1), **options)


class Laid(LightningModule):
    """A network whose parameters are laid out over ranks in ``configure_model``; in one process they are not.

    Args:
        lay: Lays the network out, given the mesh of Lightning's strategy.
    """

    def __init__(self, lay: Callable[[nn.Module, DeviceMesh], None]) -> None:
        super().__init__()
        self._lay = lay
        self.network: nn.Module | None = None

    def configure_model(self) -> None:
        if self.network is None:
            torch.manual_seed(0)
            self.network = Uneven()
            if self.device_mesh is not None:
                self._lay(self.network, self.device_mesh)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.network is not None
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Uneven(nn.Module):
    """Weights of five rows and of one: over ranks some have fewer rows than others, and some have none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.gate = nn.Linear(5, 1, bias=False)
        self.up = nn.Linear(5, 12)
        nn.init.constant_(self.up.bias, 0.5)  # parts of it are alike
        self.down = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)
        self.squash = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h * torch.sigmoid(self.gate(h))
        h = self.norm(self.down(self.squash(self.up(h))))
        prediction: Tensor = self.head(h)
        return prediction.full_tensor() if is_sharded(prediction) else prediction


def fully_sharded(network: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 of every layer, and of the whole."""
    for part in network.children():
        if [*part.parameters()]:
            fully_shard(part, mesh=mesh["data_parallel"])
    fully_shard(network, mesh=mesh["data_parallel"])


def tensor_parallel(network: nn.Module, mesh: DeviceMesh) -> None:
    """A pair of layers by columns and rows, whose local slices are plain tensors."""
    parallelize_module(network, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def laid_out_activations(network: nn.Module, mesh: DeviceMesh) -> None:
    """The same, with activations that are themselves laid out over ranks, and a head whose output is."""
    plan = {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
    }
    parallelize_module(network, mesh["tensor_parallel"], plan)


def both_ways(network: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallel within a group of ranks, FSDP2 over the groups."""
    tensor_parallel(network, mesh)
    fully_sharded(network, mesh)


def sharded_in_half_precision(network: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 that computes in bfloat16, with weights in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(network.get_submodule("first"), mesh=mesh["data_parallel"], mp_policy=policy)
    fully_shard(network, mesh=mesh["data_parallel"], mp_policy=policy)


class Logarithm(nn.Module):
    """Of what is negative."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x - 1e6)


def sick_and_sharded(network: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 of a network with a module that makes NaN."""
    network.squash = Logarithm()
    fully_sharded(network, mesh)


def sick_with_parts(folder: Path) -> dict[str, Any]:
    """What is found where no copy of the model can be made."""
    rules = [Rule(kinds="parameter", statistics="norm")]
    callback = ModuleMonitorCallback(50, rules=rules, health=Health(nonfinite="always"), on_error="raise")
    options: dict[str, Any] = {"strategy": ModelParallelStrategy(WORLD, 1), "max_steps": 2, "limit_val_batches": 0}
    result = fit(folder, Laid(sick_and_sharded), callback, even_data(RANK, WORLD), **options)
    return result | {"findings": [(finding.name, finding.site, finding.step) for finding in callback.findings]}


def reference_in_half_precision(folder: Path) -> dict[str, Any]:
    """The coordinate check of a submodule, with weights that are computed with in another precision than they have."""
    rules = [Rule(kinds=["activation_difference", "parameter_difference"], statistics="norm")]
    callback = ModuleMonitorCallback(1, rules=rules, reference="init", rcc=True, module="network", on_error="raise")
    options: dict[str, Any] = {"strategy": ModelParallelStrategy(WORLD, 1), "max_epochs": 1, "limit_val_batches": 0}
    return fit(folder, Laid(sharded_in_half_precision), callback, even_data(RANK, WORLD), **options)


SPECTRA = Rule(kinds="parameter", statistics=["spectral_norm", "stable_rank", "effective_rank"], gather=True, every_n_steps=[0, 1])
"""Statistics of singular values, of matrices that are assembled."""


def laid(lay: Callable[[nn.Module, DeviceMesh], None], tensor_parallel: int) -> Callable[[Path], dict[str, Any]]:
    """All kinds that there are, with functions of whole parameters in steps 0 and 1; in tensor parallel training no reference runs."""

    def scenario(folder: Path) -> dict[str, Any]:
        rules = [
            *(dataclasses.replace(rule, exclude="network.squash") for rule in _rules(are_sharded=True)),
            Rule(kinds=["parameter", "gradient", "update"], functions={"product": second_to_last}, every_n_steps=[0, 1]),
            Rule(kinds="parameter_difference", statistics=["norm", "ratio", "cosine"]),
            Rule(kinds="parameter_difference", statistics=["norm", "ratio", "cosine"], per_module="_root_"),
            Rule(kinds="parameter_difference", functions={"largest": largest_difference}, every_n_steps=[0, 1]),
            dataclasses.replace(SPECTRA, kinds=["parameter", "gradient", "update", "parameter_difference"]),
            # Of this one nothing else: of a part there is then no mean that would tell it from another.
            Rule(kinds="activation", statistics="hist", sites="network.squash"),
            Rule(kinds="activation_gradient", functions={"positive": num_positive}, aggregate="sum", sites="network.squash"),
        ]
        if tensor_parallel > 1:
            rules[0] = dataclasses.replace(rules[0], statistics=OF_PARTS)
        if tensor_parallel == 1:  # the reference is laid out as the model, and runs
            rules.append(Rule(kinds="activation", statistics=["effective_rank", "centered_stable_rank"], exclude="network.squash"))
            rules.append(Rule(kinds="activation_difference", statistics=["norm", "ratio", "cosine"], exclude="network.squash"))
        callback = ModuleMonitorCallback(
            every_n_steps=1,
            reference="init",
            rcc=tensor_parallel == 1,
            rules=rules,
            gradient_flow=GradientFlow(blocks=["network.first", "network.up", "network.head"]),
            capture=Capture(sites="network.*", kinds=["activation", "parameter", "gradient", "update"], steps=[1]),
            on_error="raise",
        )
        strategy = ModelParallelStrategy(WORLD // tensor_parallel, tensor_parallel) if WORLD > 1 else "auto"
        groups = WORLD // tensor_parallel if WORLD > 1 else 1
        counts = collectives_of_steps(callback)
        options: dict[str, Any] = {"strategy": strategy, "max_epochs": 1, "limit_val_batches": 0}
        micro_batches = even_data(RANK // tensor_parallel if WORLD > 1 else 0, groups)
        return fit(folder, Laid(lay), callback, micro_batches, **options) | {"collectives": counts}

    return scenario


class OfOneRank(torch.optim.AdamW):
    """Keeps something more on the first rank alone, as optimizers do that share out their work."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values() if RANK == 0 else ():
            state["extra"] = state["exp_avg"] * 2
        return loss


def states_of_optimizers(way: str) -> Callable[[Path], dict[str, Any]]:
    """What an optimizer keeps, and cosines of updates and of that, per parameter and of modules; ``way`` lays parameters out."""

    def scenario(folder: Path) -> dict[str, Any]:
        states, cosines = (
            Rule(kinds="optimizer_state", statistics=[*OF_PARTS, "cosine_to_gradient"]),
            ["cosine_to_gradient", "cosine_to_previous"],
        )
        rules = [
            states,
            Rule(kinds="update", statistics=["ratio", *cosines]),
            Rule(kinds="update", per_module=["_root_", ".*down"], statistics=cosines),
            Rule(
                kinds="optimizer_state",
                sites=".*exp_avg",
                per_module=["_root_", ".*down"],
                statistics=["norm", "hist", "cosine_to_gradient"],
            ),
        ]
        if way == "ddp":
            rules.append(Rule(kinds="optimizer_state", functions={"product": second_to_last}))
        callback = ModuleMonitorCallback(every_n_steps=1, rules=rules, on_error="raise")
        counts = collectives_of_steps(callback)
        strategies = {
            "ddp": DDPStrategy,
            "fully_sharded": lambda: ModelParallelStrategy(WORLD, 1),
            "flat": lambda: OwnFSDPStrategy(sharding_strategy="FULL_SHARD", **wrapping(module)),
        }

        def optimizer(self: LightningModule) -> torch.optim.Optimizer:
            return (OfOneRank if way == "ddp" else torch.optim.AdamW)(self.parameters(), lr=0.05, eps=0.1, amsgrad=True)

        with fsdp_on_a_cpu(), patch.object(Flat if way == "flat" else Laid, "configure_optimizers", optimizer):
            module: LightningModule = Flat() if way == "flat" else Laid(fully_sharded)
            strategy = strategies[way]() if WORLD > 1 else "auto"
            options: dict[str, Any] = {"strategy": strategy, "max_epochs": 1, "limit_val_batches": 0}
            return fit(folder, module, callback, even_data(RANK, WORLD), **options) | {"collectives": counts}

    return scenario


class OwnFSDPStrategy(FSDPStrategy):
    """A user's: Lightning's own class takes no CPU."""


@contextmanager
def fsdp_on_a_cpu() -> Iterator[None]:
    """Within the block torch wraps by FSDP1 on a CPU, and offloads to it, both of which it refuses without an accelerator."""

    def init_device_handle(state: Any, *_args: Any) -> Any:
        state._device_handle = _FSDPDeviceHandle.from_device(torch.device("cpu"))
        return state

    def nothing(self: Any, *_args: Any) -> Any:
        return self

    with ExitStack() as stack:
        for target, name, new in (
            (_init_utils, "_init_device_handle", init_device_handle),
            (fully_sharded_data_parallel, "_init_device_handle", init_device_handle),
            (Tensor, "pin_memory", nothing),
            (torch.cpu.Stream, "synchronize", nothing),
        ):
            stack.enter_context(patch.object(target, name, new, create=True))
        yield


class Flat(Classifier):
    """A network with a parameter that FSDP1 leaves alone, and layers in units of their own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Uneven(), torch.optim.SGD, lr=0.1)
        self.ignored = nn.Linear(3, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.ignored(self.model(batch[0]).to(self.ignored.weight.dtype)), batch[1])

    def on_after_backward(self) -> None:
        # FSDP1 does not reduce the gradients of what it ignores.
        for parameter in self.ignored.parameters():
            assert parameter.grad is not None
            if WORLD > 1:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= WORLD


class WholeParameters(Callback):
    """Norms and sums of whole parameters and gradients, as FSDP puts them together, before each step, in float64."""

    def __init__(self) -> None:
        self.truth: list[dict[str, tuple[float, float]]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        step_values = {}
        with FullyShardedDataParallel.summon_full_params(trainer.strategy.model, with_grads=True):
            for name, parameter in pl_module.named_parameters():
                for kind, tensor in (("parameter", parameter), ("gradient", parameter.grad)):
                    clean = name.replace("_fsdp_wrapped_module.", "")
                    step_values[f"{kind}/{clean}"] = (float(tensor.detach().double().norm()), float(tensor.detach().double().mean()))
        self.truth.append(step_values)


def wrapping(module: Flat) -> dict[str, Any]:
    """Options of FSDP1: a unit for each linear layer, and what it leaves alone."""
    return {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "ignored_modules": [module.ignored]}


def hybrid_groups() -> tuple[Any, Any]:
    """The group of ranks that share parameters out, and that of the ranks with the same part; of four."""
    inner = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    outer = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    return inner[RANK // 2], outer[RANK % 2]


def flat(way: str, precision: str = "32-true", training: dict[str, Any] | None = None, **options: Any) -> Callable[[Path], dict[str, Any]]:
    """FSDP1: all kinds that need no running reference, with functions of whole parameters in steps 0 and 1."""

    def scenario(folder: Path) -> dict[str, Any]:
        kinds = ["parameter", "gradient", "update"]
        rules = [
            Rule(kinds=["activation", "activation_gradient"], statistics=EVERYTHING),
            Rule(kinds=[*kinds, "gradient_before_clip"], statistics=OF_PARTS),
            Rule(kinds="update", statistics="ratio"),
            Rule(kinds=[*kinds, "gradient_before_clip"], statistics=OF_PARTS, per_module=".*"),
            Rule(kinds=["update", "parameter_difference"], statistics="ratio", per_module=".*"),
            Rule(kinds=kinds, functions={"product": second_to_last}, every_n_steps=[0, 1]),
            Rule(kinds="parameter_difference", statistics=["norm", "ratio", "cosine"]),
            Rule(kinds="parameter_difference", functions={"largest": largest_difference}, every_n_steps=[0, 1]),
            dataclasses.replace(SPECTRA, kinds=[*kinds, "parameter_difference"]),
        ]
        is_running = precision == "32-true" and options.get("use_orig_params", True)
        if is_running:
            rules.append(Rule(kinds="activation_difference", statistics=["norm", "ratio", "cosine"]))
        capture = Capture(sites="model.*", kinds=["activation", *kinds], steps=[1])
        callback = ModuleMonitorCallback(every_n_steps=1, reference="init", rcc=is_running, rules=rules, capture=capture, on_error="raise")
        module, truth, counts = Flat(), WholeParameters(), collectives_of_steps(callback)
        settings: dict[str, Any] = {"limit_val_batches": 0, "strategy": "auto", "precision": precision} | (training or {})
        num_batches = 3 * settings.get("accumulate_grad_batches", 1)
        more: list[Callback] = []
        if WORLD > 1:
            groups = {"process_group": hybrid_groups()} if way.startswith("HYBRID") else {}
            settings["strategy"] = OwnFSDPStrategy(sharding_strategy=way, **wrapping(module), **groups, **options)
            more = [truth] * options.get("use_orig_params", True)
        with fsdp_on_a_cpu():
            result = fit(folder, module, callback, even_data(RANK, WORLD, num_batches), more=more, **settings)
        return {name: result[name] for name in ("folder", "records", "messages", "files")} | {"truth": truth.truth, "collectives": counts}

    return scenario


class FlatLate(Flat):
    """Wraps some of its layers itself, when the strategy asks for it."""

    def configure_model(self) -> None:
        network = self.model
        for name in ("first", "up"):
            setattr(network, name, wrap(getattr(network, name)))
        self.model = wrap(network)


def flat_references(folder: Path) -> dict[str, Any]:
    """FSDP1: a reference of a submodule in another precision, one of a model in a single unit, and one of a model that wraps itself."""
    results = {}
    rules = [Rule(kinds=["activation_difference", "parameter_difference"], statistics=["norm", "ratio"])]
    ways: dict[str, tuple[type[Flat], dict[str, Any], dict[str, Any]]] = {
        "beside": (Flat, {"module": "model"}, {"precision": "bf16-mixed"}),
        "one unit": (Flat, {}, {}),
        "by hand": (FlatLate, {}, {}),
    }
    for name, (kind, options, settings) in ways.items():
        module = kind()
        callback = ModuleMonitorCallback(1, rules=rules, reference="init", rcc=True, on_error="raise", **options)
        wrapped = wrapping(module) if name == "beside" else {"ignored_modules": [module.ignored]}
        settings["strategy"] = OwnFSDPStrategy(sharding_strategy="FULL_SHARD", **wrapped) if WORLD > 1 else "auto"
        with fsdp_on_a_cpu():
            results[name] = fit(folder / name, module, callback, even_data(RANK, WORLD), limit_val_batches=0, **settings)["records"]
    return results


class WholeWeights(Callback):
    """The weights at the end, as FSDP puts them together."""

    weights: dict[str, Tensor]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with FullyShardedDataParallel.summon_full_params(trainer.strategy.model):
            self.weights = {name: parameter.detach().clone() for name, parameter in pl_module.named_parameters()}


def unchanged_flat(folder: Path) -> list[dict[str, Tensor]]:
    """The weights that training by FSDP1 ends with, without the callback and with it: whole tensors are put together in every step."""
    results = []
    for monitored in (False, True):
        rules = [Rule(kinds=["activation", "activation_gradient", "parameter", "gradient", "update"], statistics=["norm", "hist"])]
        rules.append(Rule(kinds=["parameter", "gradient"], functions={"product": second_to_last}))
        rules.append(Rule(kinds=["activation_difference", "parameter_difference"], statistics="norm"))
        capture = Capture(sites="model.*", kinds=["parameter", "update"], steps=[1])
        callback = ModuleMonitorCallback(1, rules=rules, reference="init", rcc=True, capture=capture, on_error="raise")
        module, end = Flat(), WholeWeights()
        options: dict[str, Any] = {"devices": WORLD, "use_distributed_sampler": False, "limit_val_batches": 0, "accumulate_grad_batches": 2}
        options["strategy"] = OwnFSDPStrategy(sharding_strategy="FULL_SHARD", **wrapping(module))
        micro_batches: DataLoader[Any] = DataLoader(even_data(RANK, WORLD, steps=6), batch_size=None)
        with fsdp_on_a_cpu():
            trainer(folder, [callback, end] if monitored else [end], **options).fit(module, micro_batches)
        results.append(end.weights | {"random": torch.get_rng_state()})
    return results


def flat_loop(folder: Path) -> dict[str, Any]:
    """A loop of one's own with FSDP1, and without it in one process; the monitor gets what is wrapped, and then the wrapper."""
    torch.manual_seed(0)
    network = Uneven()
    records, error = [], ""

    def wrapped(module: nn.Module) -> nn.Module:
        policy = ModuleWrapPolicy({nn.Linear})
        return FullyShardedDataParallel(module, auto_wrap_policy=policy, use_orig_params=True) if WORLD > 1 else module

    with fsdp_on_a_cpu():
        reference = wrapped(copy.deepcopy(network).requires_grad_(requires_grad=False))
        model = wrapped(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        differences = ["activation_difference", "parameter_difference", "rcc_effective_update"]
        rules = Rule(kinds=["activation", "parameter", "gradient", "update", *differences], statistics=["norm", "mean"])
        with ModuleMonitor(rules=rules, distributed=WORLD > 1) as monitor:
            monitor.set_module(network)
            try:
                monitor.begin_step(0)
            except ConfigError as refusal:
                error = str(refusal)
        with ModuleMonitor(rules=rules, distributed=WORLD > 1, on_error="raise") as monitor:
            monitor.set_module(model)
            monitor.set_reference_module(reference)
            for step, (x, y) in enumerate(even_data(RANK, WORLD)):
                monitor.begin_step(step)
                with monitor.no_monitor():
                    reference(x)
                F.cross_entropy(model(x), y).backward()
                monitor.monitor_gradients()
                monitor.monitor_parameters()
                optimizer.step()
                optimizer.zero_grad()
                records.append(monitor.end_step())
    return {"records": records, "error": error}


def plain_loop(folder: Path, fabric: Fabric | None = None) -> dict[str, Any]:
    """A loop of one's own, with two micro-batches in a step and clipping; by Fabric, if that is given, or by torch alone."""
    torch.manual_seed(0)
    network = Uneven()
    model: nn.Module = network if fabric is None else fabric.setup_module(network)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = plain if fabric is None else fabric.setup_optimizers(plain)
    rules = [
        *_rules(are_sharded=True),
        Rule(kinds=["activation", "gradient"], functions={"total": torch.sum}, aggregate="sum", sites="down(.weight)?"),
    ]
    flow = GradientFlow(blocks=["first", "up", "head"])
    records = []
    with ModuleMonitor(rules=rules, gradient_flow=flow, distributed=fabric is not None and WORLD > 1) as monitor:
        monitor.set_module(network)
        for step, (x, y) in enumerate(even_data(RANK, WORLD)):
            monitor.begin_step(step)
            for half, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = F.cross_entropy(model(half), targets) / 2
                loss.backward() if fabric is None else fabric.backward(loss)
                monitor.after_micro_batch()
            monitor.monitor_gradients(before_clip=True)
            if fabric is None:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            else:
                fabric.clip_gradients(model, optimizer, max_norm=0.05)
            monitor.monitor_gradients()
            monitor.monitor_parameters()
            optimizer.step()
            optimizer.zero_grad()
            record = monitor.end_step()
            assert record is not None
            records.append(record)
    state = {name: value.full_tensor() if is_sharded(value) else value.clone() for name, value in network.state_dict().items()}
    return {"records": records, "state": state}


def fabric_loop(folder: Path) -> dict[str, Any]:
    """The same under Fabric, with parameters laid out by plain ``fully_shard`` where there are several processes."""

    def share_out(network: nn.Module, mesh: DeviceMesh) -> nn.Module:
        fully_sharded(network, mesh)
        return network

    strategy = FabricModelParallelStrategy(share_out, data_parallel_size=WORLD, tensor_parallel_size=1) if WORLD > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
    fabric.launch()
    return plain_loop(folder, fabric)


def largest_difference(x: Tensor, y: Tensor) -> Tensor:
    """A function of two whole tensors."""
    return (x - y).abs().max() * x.numel()


def num_positive(x: Tensor) -> Tensor:
    """How many elements are positive."""
    return (x > 0).sum()


def second_to_last(x: Tensor) -> Tensor:
    """A function that parts of a tensor do not tell of: of its last element and the one before."""
    return x.flatten()[-1] - 2 * x.flatten()[-min(2, x.numel())]


CLIPPED = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
"""Lightning clips no norms under FSDP1."""

FLAT = {
    "flat_full": flat("FULL_SHARD"),
    "flat_grad_op": flat("SHARD_GRAD_OP"),
    "flat_not": flat("NO_SHARD"),
    "flat_offloaded": flat("FULL_SHARD", cpu_offload=True),
    "flat_accumulated": flat("FULL_SHARD", training={"accumulate_grad_batches": 2} | CLIPPED),
    "flat_mixed": flat("FULL_SHARD", precision="bf16-mixed"),
    "flat_hybrid": flat("HYBRID_SHARD"),
    "flat_without_names": flat("FULL_SHARD", use_orig_params=False),
    "flat_loop": flat_loop,
    "flat_references": flat_references,
}
"""FSDP1."""

SCENARIOS: dict[str, Callable[[Path], Any]] = {
    **FLAT,
    **{f"zoo_{name}": zoo(name) for name in ("cnn", "outputs", "shared", "frozen")},
    "late_layers": late_layers,
    "whole_and_parts": whole_and_parts,
    "transfers": transfers,
    "operations": operations,
    "unchanged": unchanged,
    "unchanged_with_parts": unchanged_with_parts,
    "other_code": other_code,
    "unchanged_flat": unchanged_flat,
    "sick": sick(Health(nonfinite="always", watch=["dead_units"])),
    "sick_by_default": sick(Health()),
    "sick_between": sick_between,
    "sick_and_not_copied": sick_and_not_copied,
    "branches": branches,
    "noise": noise,
    "one_rank_fails": one_rank_fails,
    "one_rank_cannot_begin": one_rank_cannot_begin,
    "own_optimizer": own_optimizer,
    "one_rank_fails_of_those_with_parts": one_rank_fails_of_those_with_parts,
    "limited": limited,
    "by_the_clock": by_the_clock,
    "of_a_subclass": of_a_subclass,
    "of_an_unknown_strategy": of_an_unknown_strategy,
    "own_loop": own_loop,
    "corrupted": corrupted,
    "local_steps": local_steps,
    "join": join,
    "one_rank_leaves": one_rank_leaves,
    "other_rules": other_rules,
    "own_reference": own_reference,
    "fully_sharded": laid(fully_sharded, 1),
    "reference_in_half_precision": reference_in_half_precision,
    "sick_with_parts": sick_with_parts,
    "tensor_parallel": laid(tensor_parallel, 2),
    "laid_out_activations": laid(laid_out_activations, 2),
    "both_ways": laid(both_ways, 2),
    "fabric_loop": fabric_loop,
    "states_ddp": states_of_optimizers("ddp"),
    "states_fully_sharded": states_of_optimizers("fully_sharded"),
    "states_flat": states_of_optimizers("flat"),
}


def main(folder: Path, name: str) -> None:
    """Run a scenario, and save what it returns, or its error."""
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        result = SCENARIOS[name](folder / name)
    except BaseException as error:  # returned to the test
        traceback.print_exc()
        result = error if isinstance(error, Exception) else RuntimeError(repr(error))
    try:
        torch.save(result, folder / f"{name}.{RANK}.pt")
    except Exception as error:  # an exception that cannot be pickled
        torch.save(RuntimeError(f"{result!r}: {error!r}"), folder / f"{name}.{RANK}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
