"""What monitoring costs: process CPU time of full training steps, with and without, interleaved in one run.

Seven statistics (mean, std, norm, min, max, var, abs_mean) of every activation, parameter and gradient, at every step::

    python benchmarks/overhead.py
    python benchmarks/overhead.py --workloads W2 --steps 200 --skip-peers
    python benchmarks/overhead.py --precision bf16-mixed
    python benchmarks/overhead.py --threads 2

On W1 also the forward pass of a reference, alone and with the refined coordinate check; and attention, head by head, beside one forward
pass of all attention without the fused kernel.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.autograd.profiler_util import FunctionEvent
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_module_monitor import ModuleMonitor, RefinedCoordinateCheck, Rule, TorchWatcher
from lightning_module_monitor.config import GradientFlow, attention_rules
from lightning_module_monitor.kernels import numba_kernel, transfer
from lightning_module_monitor.modules.names import Namer
from lightning_module_monitor.probes.finite_step import FiniteStep
from lightning_module_monitor.random_states import RandomStates

WARM_UP_STEPS = 5
NUM_BATCHES = 8
"""Batches that are made in advance and taken in turn."""

SEED = 0
KINDS = ["activation", "parameter", "gradient"]
STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "std": torch.std,
    "norm": torch.linalg.vector_norm,
    "min": torch.amin,
    "max": torch.amax,
    "var": torch.var,
    "abs_mean": lambda x: x.abs().mean(),
}
"""The statistics by the name that the engine knows, as functions for the tool that has none built in."""

PLAIN, IDLE, OURS, FLOOR, NONFINITE = "plain", "idle", "ours", "floor", "nonfinite: always"
REFERENCE, RCC = "reference forward", "reference + RCC"
PEER = "torch-module-monitor"
UNFUSED, ATTENTION = "attention forward, not fused", "attention"
FLOW, HISTOGRAMS = "gradient flow", "histograms"
IDLE_TARGET = 0.01
NONFINITE_TARGET = 0.02
"""Most that looking for values that are not finite at every step may add to a plain step, on the workloads that have it."""
RCC_TARGET = 2.0
"""Forward passes that the check may cost beyond that of the reference."""
NUM_RESAMPLES = 1000
"""How often the rounds are drawn anew, to tell how sure a figure is."""
FLOOR_TARGET = 1.5
"""Most that the seven statistics may add to a plain step, in what the floor adds."""
PEER_TARGET = 1 / 8
"""The same, in what torch-module-monitor adds."""
TIMED = (OURS, FLOOR, PEER)
"""Whose own calls are timed too: all that they do is done in forward hooks and between the parts of a step."""
ATTENTION_TARGET = 1.0
"""Forward passes of attention, not fused, that watching it may cost."""

FLOAT32, MIXED, BFLOAT16 = "32-true", "bf16-mixed", "bf16-true"
"""Precisions by the names that Lightning has for them: all in float32; float32 weights under autocast; all in bfloat16."""

Batch = tuple[Tensor, Tensor]

# ----------------------------------------------------------------------------------------------------------- workloads


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.query_key_value(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return merged


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        grown: Tensor = x + self.mlp(self.norm2(x))
        return grown


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module | None = None
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        grown: Tensor = self.relu(y + (x if self.shortcut is None else self.shortcut(x)))
        return grown


class ResidualCNN(nn.Module):
    """Two residual blocks at each of three resolutions, the second and third of half the size and twice the channels."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        widths = [channels, channels, channels, 2 * channels, 2 * channels, 4 * channels, 4 * channels]
        blocks = [Residual(old, new, stride=1 if old == new else 2) for old, new in pairwise(widths)]
        self.block1, self.block2, self.block3, self.block4, self.block5, self.block6 = blocks
        self.head = nn.Linear(4 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        for block in (self.block1, self.block2, self.block3, self.block4, self.block5, self.block6):
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def make_mlp(layers: int, width: int) -> nn.Module:
    """Linear and ReLU in turn."""
    linears = [nn.Linear(width, width) for _ in range(layers)]
    for linear in linears:
        # torch's default shrinks the signal in each layer: after 64 the gradients' squares are denormal, and slow.
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    return nn.Sequential(*(module for linear in linears for module in (linear, nn.ReLU())))


def text_batch() -> Batch:
    """Random tokens, and those that follow them."""
    tokens = torch.randint(512, (8, 129))
    return tokens[:, :-1], tokens[:, 1:]


def vector_batch() -> Batch:
    """Random vectors with random classes."""
    return torch.randn(64, 128), torch.randint(128, (64,))


def image_batch() -> Batch:
    """Random images with random classes."""
    return torch.randn(32, 3, 32, 32), torch.randint(10, (32,))


@dataclass(frozen=True)
class Workload:
    """A model, its data, and what monitoring it may cost."""

    name: str
    description: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    """Of inputs and classes; the model gives logits of shape ``(*classes.shape, number of classes)``."""
    target: float
    """Most that our engine may add to a plain step, as a fraction of it."""


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "W1",
            "GPT, 6 layers, width 256, vocabulary 512, batch 8 x 128 tokens",
            partial(GPT, 512, 128, 6, 256, 8),
            text_batch,
            target=0.23,
        ),
        Workload("W2", "64 x (Linear 128 + ReLU), batch 64", partial(make_mlp, 64, 128), vector_batch, target=0.90),
        Workload("W3", "residual CNN with BatchNorm, batch 32 x 3 x 32 x 32", partial(ResidualCNN, 16, 10), image_batch, target=0.42),
    )
}

# ------------------------------------------------------------------------------------------------------------ variants


class Observer:
    """What a variant adds to a training step; this one adds nothing."""

    def begin(self, step: int) -> None:
        """Before the forward pass."""

    def before_forward(self, inputs: Tensor) -> None:
        """Right before the forward pass, with what the model will get."""

    def before_update(self) -> None:
        """After the backward pass, before the optimizer moves the parameters."""

    def end(self) -> int:
        """After the update.

        Returns:
            Number of finished values.
        """
        return 0

    def close(self) -> None:
        """Leave the model."""


class TimedHook:
    """A forward hook that adds the time it takes to that of its observer."""

    def __init__(self, hook: Callable[..., object], observer: TimedObserver) -> None:
        self.hook = hook
        self.observer = observer

    def __call__(self, *args: object) -> object:
        with self.observer.clock():
            return self.hook(*args)


class TimedObserver(Observer):
    """Another observer, and the CPU time that its own calls take, those of its forward hooks among them.

    What a hook costs before and after it is called is not in it, nor what the model's own work is slowed down by.
    """

    def __init__(self, observer: Observer, model: nn.Module) -> None:
        self.observer = observer
        self.model = model
        self.seconds = 0.0

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Count what is done within."""
        start = time.process_time()
        try:
            yield
        finally:
            self.seconds += time.process_time() - start

    def _hooks(self) -> Iterator[tuple[dict[int, Any], int, Any]]:
        for module in self.model.modules():
            yield from ((module._forward_hooks, number, hook) for number, hook in list(module._forward_hooks.items()))

    def begin(self, step: int) -> None:
        with self.clock():
            self.observer.begin(step)
        for hooks, number, hook in self._hooks():
            hooks[number] = TimedHook(hook, self)

    def before_forward(self, inputs: Tensor) -> None:
        with self.clock():
            self.observer.before_forward(inputs)

    def before_update(self) -> None:
        with self.clock():
            self.observer.before_update()

    def end(self) -> int:
        with self.clock():
            num_values = self.observer.end()
        for hooks, number, hook in self._hooks():
            hooks[number] = hook.hook
        return num_values


class Engine(Observer):
    """Our engine, due at every n-th step."""

    def __init__(self, model: nn.Module, every_n_steps: int) -> None:
        self.monitor = ModuleMonitor(every_n_steps, rules=[Rule(kinds=KINDS, statistics=list(STATISTICS))])
        self.monitor.set_module(model)

    def begin(self, step: int) -> None:
        self.monitor.begin_step(step)

    def before_update(self) -> None:
        self.monitor.monitor_gradients()
        self.monitor.monitor_parameters()

    def end(self) -> int:
        record = self.monitor.end_step()
        # As numbers of Python's, which others give too; without the monitor's own figure, its count of errors.
        return 0 if record is None else len([*record.values.values()]) - 1

    def close(self) -> None:
        self.monitor.close()


class EagerEngine(Engine):
    """Our engine without the compiled kernel, as where numba is not installed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, every_n_steps=1)
        self.no_kernel = mock.patch.object(numba_kernel, "loops", return_value=None)

    def begin(self, step: int) -> None:
        self.no_kernel.start()
        super().begin(step)

    def end(self) -> int:
        num_values = super().end()
        self.no_kernel.stop()
        return num_values


class Floor(Observer):
    """The least that looks at every tensor: a norm of each, and one transfer."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: list[Tensor] = list(model.parameters())
        self.norms: list[Tensor] = []
        self.handles = [module.register_forward_hook(self._observe) for module in model.modules()]

    def _observe(self, _module: nn.Module, _args: object, output: Tensor) -> None:
        self.norms.append(torch.linalg.vector_norm(output.detach()))

    @torch.no_grad()
    def before_update(self) -> None:
        self.norms += torch._foreach_norm(self.parameters)
        self.norms += torch._foreach_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])

    def end(self) -> int:
        # Through the engine's own function, where transfers are counted.
        values = transfer.transfer(torch.stack(self.norms)).tolist()
        self.norms.clear()
        return len(values)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


class ReferenceForward(Observer):
    """The forward pass of a reference, and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        self.reference = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def before_forward(self, inputs: Tensor) -> None:
        self.reference(inputs)


class CoordinateCheck(ReferenceForward):
    """A reference and the refined coordinate check by our engine."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.monitor = ModuleMonitor()
        self.monitor.set_module(model)
        self.monitor.set_reference_module(self.reference)
        self.check = RefinedCoordinateCheck(self.monitor)

    def begin(self, step: int) -> None:
        self.monitor.begin_step(step)

    def before_update(self) -> None:
        self.check.refined_coordinate_check()

    def end(self) -> int:
        record = self.monitor.end_step()
        return 0 if record is None else len(record.values) - 1

    def close(self) -> None:
        self.monitor.close()


class PeerCheck(ReferenceForward):
    """A reference and the refined coordinate check by torch-module-monitor."""

    def __init__(self, model: nn.Module) -> None:
        import torch_module_monitor
        from torch_module_monitor.refined_coordinate_check import RefinedCoordinateCheck as Check

        super().__init__(model)
        self.is_mixed = False
        self.monitor: Any = torch_module_monitor.ModuleMonitor(monitor_step_fn=lambda _step: True)
        self.monitor.set_module(model)
        self.monitor.set_reference_module(self.reference)
        self.check: Any = Check(self.monitor)

    def begin(self, step: int) -> None:
        self.monitor.begin_step(step)

    def before_forward(self, inputs: Tensor) -> None:
        super().before_forward(inputs)
        self.is_mixed = torch.is_autocast_enabled("cpu")

    def before_update(self) -> None:
        # It runs modules again, which has to be done as it was the first time.
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_mixed):
            self.check.refined_coordinate_check()

    def end(self) -> int:
        self.monitor.end_step()
        return len(self.monitor.get_step_metrics())

    def close(self) -> None:
        self.monitor.activation_hooks.remove_all_hooks()
        self.check.rcc_forward_hooks.remove_all_hooks()


class UnfusedAttention(Observer):
    """Every call of attention once more, without a graph and without the fused kernel, and nothing else."""

    def __init__(self, _model: nn.Module) -> None:
        self.fused = F.scaled_dot_product_attention
        self.patch = mock.patch.object(F, "scaled_dot_product_attention", self._attend)

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            self.fused(*args, **kwargs)
        return self.fused(*args, **kwargs)

    def begin(self, step: int) -> None:
        self.patch.start()

    def end(self) -> int:
        self.patch.stop()
        return 0


class WatchedAttention(Engine):
    """Our engine with the rules of ``attention: true`` alone."""

    def __init__(self, model: nn.Module) -> None:
        self.monitor = ModuleMonitor(rules=attention_rules())
        self.monitor.set_module(model)


class CountedHistograms(Engine):
    """Our engine with histograms of what ``wandb.watch`` has histograms of."""

    def __init__(self, model: nn.Module) -> None:
        self.monitor = ModuleMonitor(rules=[Rule(kinds=["parameter", "gradient"], statistics="hist")])
        self.monitor.set_module(model)

    def end(self) -> int:
        record = self.monitor.end_step()
        return 0 if record is None else len(record.histograms)


class WatchedFlow(Engine):
    """Our engine with the gain of the gradient from block to block."""

    def __init__(self, model: nn.Module) -> None:
        self.monitor = ModuleMonitor(gradient_flow=GradientFlow(blocks="blocks"))
        self.monitor.set_module(model)


class NoLogger:
    """Counts what it is given."""

    num_values = 0

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        """Take the values of a step."""
        self.num_values = len(metrics)


class OneLine(Observer):
    """TorchWatcher's use: one line in the loop, for the outputs of every layer, their gradients, and the parameters with theirs."""

    def __init__(self, model: nn.Module) -> None:
        self.logger = NoLogger()
        self.watcher = TorchWatcher(model, self.logger, tensor_stats=["mean", "std", "norm", "min", "max"])
        self.step = 0

    def begin(self, step: int) -> None:
        self.step = step

    def end(self) -> int:
        # Where the optimizer's hook has told of the update, this finishes the step.
        self.watcher.watch(self.step, track_parameters=True)
        return self.logger.num_values

    def close(self) -> None:
        self.watcher.close()


class Nonfinite(Observer):
    """What ``health: {nonfinite: always}`` does at every step: random states are kept, and the gradients that tell are looked at."""

    def __init__(self, model: nn.Module) -> None:
        self.finite = FiniteStep(Namer().module_sites(model))
        self.random_states: RandomStates | None = None

    def begin(self, step: int) -> None:
        self.random_states = RandomStates.now(torch.device("cpu"))

    def before_update(self) -> None:
        self.finite.see_gradients()
        assert self.finite.is_finite()
        self.finite.forget()


class TorchModuleMonitor(Observer):
    """torch-module-monitor, with the same statistics as functions."""

    def __init__(self, model: nn.Module) -> None:
        import torch_module_monitor

        self.monitor: Any = torch_module_monitor.ModuleMonitor(monitor_step_fn=lambda _step: True)
        for name, function in STATISTICS.items():
            self.monitor.add_activation_metric(name, function)
            self.monitor.add_parameter_metric(name, function)
            self.monitor.add_gradient_metric(name, function)
        self.monitor.set_module(model)

    def begin(self, step: int) -> None:
        self.monitor.begin_step(step)

    def before_update(self) -> None:
        self.monitor.monitor_gradients()
        self.monitor.monitor_parameters()

    def end(self) -> int:
        self.monitor.end_step()
        return len(self.monitor.get_step_metrics())

    def close(self) -> None:
        self.monitor.activation_hooks.remove_all_hooks()


class WandbWatch(Observer):
    """wandb.watch in a run that is offline, in a folder that is removed."""

    def __init__(self, model: nn.Module) -> None:
        import wandb

        self.folder = tempfile.TemporaryDirectory()
        # Its sampling of the machine is no part of watch, and would fall into the other variants' steps.
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, save_code=False)
        self.run = wandb.init(project="overhead", mode="offline", dir=self.folder.name, settings=settings)
        self.model = model
        self.num_parameters = len(list(model.parameters()))
        self.step = 0
        wandb.watch(model, log="all", log_freq=1)

    def begin(self, step: int) -> None:
        self.step = step

    def end(self) -> int:
        # What watch has gathered is written when something is logged.
        self.run.log({"step": self.step})
        return 2 * self.num_parameters

    def close(self) -> None:
        import wandb

        wandb.unwatch(self.model)
        self.run.finish()
        self.folder.cleanup()


@dataclass(frozen=True)
class Variant:
    """A way to train: plain, or observed."""

    name: str
    note: str
    attach: Callable[[nn.Module], Observer]
    package: str = ""
    """Import name of the peer that is needed, if any; its distribution has the same name with dashes."""
    workloads: tuple[str, ...] = ("W1", "W2", "W3")
    """Where it is measured."""


VARIANTS = (
    Variant(PLAIN, "no monitor", lambda _model: Observer()),
    Variant(IDLE, "our engine, at steps that are not monitored", partial(Engine, every_n_steps=1_000_000_000)),
    Variant(OURS, "our engine, seven statistics, finished on the host", partial(Engine, every_n_steps=1)),
    Variant("ours, eager", "the same without the extra fast: torch's own operations", EagerEngine),
    Variant(NONFINITE, "whether any value is NaN or infinite, at every step", Nonfinite, workloads=("W1", "W2")),
    Variant(FLOOR, "one norm of each tensor", Floor),
    Variant(REFERENCE, "the forward pass of a reference, alone", ReferenceForward, workloads=("W1",)),
    Variant(RCC, "reference and refined coordinate check, all terms and norms", CoordinateCheck, workloads=("W1",)),
    Variant(UNFUSED, "all attention once more, not fused and without a graph", UnfusedAttention, workloads=("W1",)),
    Variant(ATTENTION, "attention: true: four figures of every head", WatchedAttention, workloads=("W1",)),
    Variant(FLOW, "gain of the gradient from block to block", WatchedFlow, workloads=("W1",)),
    Variant(HISTOGRAMS, "histograms of all parameters and gradients, in 261 bins, exact", CountedHistograms),
    Variant("TorchWatcher, one line", "five statistics of outputs, their gradients, parameters and theirs", OneLine),
    Variant("torch-module-monitor, RCC", "its refined coordinate check", PeerCheck, "torch_module_monitor", workloads=("W1",)),
    Variant(PEER, "the same seven statistics", TorchModuleMonitor, "torch_module_monitor"),
    Variant(
        "wandb.watch",
        "only histograms, of parameters and gradients, not of activations; its writer process is not counted",
        WandbWatch,
        "wandb",
    ),
)


def choose_variants(skip_peers: bool, only: Sequence[str] | None = None) -> list[Variant]:
    """Those of the variants that can be measured here; says which cannot, and why. The plain one is always among them."""
    chosen = []
    for variant in VARIANTS:
        if only is not None and variant.name not in (PLAIN, *only):
            continue
        if variant.package and skip_peers:
            print(f"{variant.name} is skipped: --skip-peers was given.")
        elif variant.package and importlib.util.find_spec(variant.package) is None:
            print(f"{variant.name} is skipped: it is not installed; pip install {variant.package.replace('_', '-')}")
        else:
            chosen.append(variant)
    return chosen


# --------------------------------------------------------------------------------------------------------- measurement


class Lane:
    """A variant with a model and an optimizer of its own, which start and train like those of every other."""

    def __init__(self, variant: Variant, workload: Workload, precision: str = FLOAT32) -> None:
        self.variant = variant
        self.precision = precision
        torch.manual_seed(SEED)
        self.model = workload.make_model()
        if precision == BFLOAT16:
            self.model.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.observer = variant.attach(self.model)
        self.step = 0

    def train_step(self, batch: Batch) -> int:
        """One full step; returns the number of values that were monitored."""
        inputs, classes = batch
        if self.precision == BFLOAT16 and inputs.is_floating_point():
            inputs = inputs.to(torch.bfloat16)
        self.step += 1
        self.observer.begin(self.step)
        with torch.autocast("cpu", torch.bfloat16) if self.precision == MIXED else nullcontext():
            self.observer.before_forward(inputs)
            loss = F.cross_entropy(self.model(inputs).flatten(0, -2), classes.flatten())
        loss.backward()
        self.observer.before_update()
        self.optimizer.step()
        num_values = self.observer.end()
        self.optimizer.zero_grad()
        return num_values


@dataclass(frozen=True)
class Counts:
    """What one step does, in numbers that are the same on every machine."""

    dispatches: int
    host_reads: int
    transfers: int
    values: int


def count(lane: Lane, batch: Batch) -> Counts:
    """Take one step and count, by torch's profiler: under a dispatch mode nothing is observed."""
    with mock.patch.object(transfer, "transfer", wraps=transfer.transfer) as transfers, profile() as recorded:
        values = lane.train_step(batch)
    operations = [event for event in recorded.function_events or () if event.name.startswith("aten::")]
    host_reads = sum(event.name == "aten::_local_scalar_dense" for event in operations)
    return Counts(sum(map(_is_outermost, operations)), host_reads, transfers.call_count, values)


def _is_outermost(operation: FunctionEvent) -> bool:
    """Whether no other operation has called it."""
    caller = operation.cpu_parent
    while caller is not None and not caller.name.startswith("aten::"):
        caller = caller.cpu_parent
    return caller is None


@contextmanager
def exact(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Norm and std of every activation and parameter in float64 by key; activations are there when the block is left."""
    outputs: defaultdict[str, list[Tensor]] = defaultdict(list)

    def keep(name: str, _module: nn.Module, _args: object, output: Tensor) -> None:
        outputs[f"activation/{name or '_root_'}"].append(output.detach().double().flatten())

    def note(site: str, elements: Tensor) -> None:
        expected[f"{site}/norm"] = elements.square().sum().sqrt()
        expected[f"{site}/std"] = ((elements - elements.mean()).square().sum() / (len(elements) - 1)).sqrt()

    expected: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        note(f"parameter/{name}", parameter.detach().double().flatten())
    handles = [module.register_forward_hook(partial(keep, name)) for name, module in model.named_modules()]
    try:
        yield expected
    finally:
        for handle in handles:
            handle.remove()
    for site, calls in outputs.items():
        note(site, torch.cat(calls))


def largest_errors(lane: Lane, batch: Batch) -> dict[str, float]:
    """Largest relative error of std and of norm against float64, over the activations and parameters of one step."""
    assert isinstance(lane.observer, Engine)
    with exact(lane.model) as expected:
        lane.train_step(batch)
    found = lane.observer.monitor.get_step_metrics()
    errors = {"std": 0.0, "norm": 0.0}
    for key, tensor in expected.items():
        value, right = found[key], tensor.item()
        # Where the right value is zero (a bias that never moved), only zero is right.
        error = abs(value - right) / right if right else (0.0 if value == 0 else float("inf"))
        statistic = key.rpartition("/")[2]
        errors[statistic] = max(errors[statistic], error)
    return errors


@dataclass
class Result:
    """What was found of one workload; by name of the variant."""

    workload: Workload
    seconds: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    """Largest relative error of our engine by statistic."""
    own_seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of those in ``TIMED`` what their own calls took, in further rounds."""

    def ratios(self, name: str) -> list[float]:
        """Time of a variant's step, in plain steps of the same round."""
        return [one / plain for one, plain in zip(self.seconds[name], self.seconds[PLAIN], strict=True)]

    def added(self, name: str) -> float:
        """What a variant adds to a plain step, as a fraction of it; the median over the rounds."""
        return statistics.median(self.ratios(name)) - 1

    def beyond(self, name: str, other: str) -> float:
        """Seconds that a variant's step takes beyond another's of the same round, the median: what a round is slowed down by is in both."""
        return statistics.median(one - less for one, less in zip(self.seconds[name], self.seconds[other], strict=True))

    def resampled(self) -> Iterator[Result]:
        """As if it had been measured again: as many of the rounds, drawn with replacement."""
        draw, rounds = random.Random(SEED), range(len(self.seconds[PLAIN]))
        for _ in range(NUM_RESAMPLES):
            drawn = draw.choices(rounds, k=len(rounds))
            again = [{name: [one[i] for i in drawn] for name, one in kind.items()} for kind in (self.seconds, self.own_seconds)]
            yield replace(self, seconds=again[0], own_seconds=again[1])

    def extra(self, name: str) -> Counts:
        """What a variant's step does beyond a plain one: an optimizer reads values on the host too."""
        own, plain = self.counts[name], self.counts[PLAIN]
        return Counts(own.dispatches - plain.dispatches, own.host_reads - plain.host_reads, own.transfers, own.values)


def measure(workload: Workload, variants: Sequence[Variant], num_steps: int, precision: str) -> Result:
    """Train all variants side by side, a step of each in a round, and count in a last round."""
    torch.manual_seed(SEED)
    batches = [workload.make_batch() for _ in range(NUM_BATCHES)]
    lanes = [Lane(variant, workload, precision) for variant in variants if workload.name in variant.workloads]
    result = Result(workload, {lane.variant.name: [] for lane in lanes})
    try:
        for step in range(WARM_UP_STEPS):
            for lane in lanes:
                lane.train_step(batches[step % NUM_BATCHES])
        time_rounds(lanes, batches, num_steps, result)
        if torch.get_num_threads() == 1:  # another thread, which waits for work in a loop, would be in it
            time_own_calls([lane for lane in lanes if lane.variant.name in TIMED], batches, num_steps, result)
        for lane in lanes:
            result.counts[lane.variant.name] = count(lane, batches[0])
            if lane.variant.name == OURS:
                result.errors = largest_errors(lane, batches[0])
    finally:
        for lane in lanes:
            lane.observer.close()
    return result


def time_own_calls(lanes: Sequence[Lane], batches: Sequence[Batch], num_rounds: int, result: Result) -> None:
    """As many rounds again, in which only the calls of the observers are timed.

    What is a hundredth of a step is not to be told by the difference of two steps where these differ by more from round to round.
    """
    result.own_seconds.update({lane.variant.name: [] for lane in lanes})
    for step in range(num_rounds):
        for lane in lanes:
            observer = lane.observer
            lane.observer = timed = TimedObserver(observer, lane.model)
            try:
                lane.train_step(batches[step % NUM_BATCHES])
            finally:
                lane.observer = observer
            result.own_seconds[lane.variant.name].append(timed.seconds)


def time_rounds(lanes: Sequence[Lane], batches: Sequence[Batch], num_rounds: int, result: Result) -> None:
    """Time a step of each lane in every round."""
    shuffle = random.Random(SEED)
    order = list(lanes)
    gc.collect()
    gc.freeze()  # what is there already is not traversed in somebody's step; what a variant leaves behind is its cost
    try:
        for step in range(num_rounds):
            shuffle.shuffle(order)  # nobody always follows the one that empties the caches
            for lane in order:
                start = time.process_time()
                lane.train_step(batches[step % NUM_BATCHES])
                result.seconds[lane.variant.name].append(time.process_time() - start)
    finally:
        gc.unfreeze()


# -------------------------------------------------------------------------------------------------------------- report

SECTION = "## "

HEADER = (
    "workload",
    "variant",
    "ms CPU",
    "to plain",
    "quartiles",
    "host reads",
    "transfers",
    "dispatches",
    "values",
    "what it does",
)


def percent(fraction: float) -> str:
    """A fraction as it stands in the table: ``+5.3 %``."""
    return f"{100 * fraction:+.1f} %"


def row(result: Result, variant: Variant) -> list[str]:
    """A variant's line of the table."""
    ratios = result.ratios(variant.name)
    lower, _median, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    extra = result.extra(variant.name)
    plain = variant.name == PLAIN
    return [
        result.workload.name,
        variant.name,
        f"{1000 * statistics.median(result.seconds[variant.name]):.2f}",
        "1" if plain else percent(result.added(variant.name)),
        "" if plain else f"{percent(lower - 1)} to {percent(upper - 1)}",
        str(extra.host_reads),
        "-" if variant.package else str(extra.transfers),
        str(extra.dispatches),
        str(extra.values),
        variant.note,
    ]


def accuracy_line(result: Result) -> str:
    """How far our engine's values are from those of float64."""
    found = ", ".join(f"{name} {error:.1e}" for name, error in result.errors.items())
    return f"{result.workload.name}: largest relative error of ours against float64, all activations and parameters of a step: {found}"


Figure = Callable[[Result], float]


def sure(result: Result, figure: Figure, write: Callable[[float], str]) -> str:
    """A figure, and in brackets where 95 of 100 lie when the rounds are drawn anew (bootstrap percentiles)."""
    again = sorted(map(figure, result.resampled()))
    return f"{write(figure(result))} ({write(again[len(again) // 40])} to {write(again[-1 - len(again) // 40])})"


def at_most(result: Result, what: str, figure: Figure, target: float, unit: str) -> str:
    """Whether a figure is within its target."""
    verdict = "met" if figure(result) <= target else "MISSED"
    return f"{what} {sure(result, figure, '{:.2f}'.format)} {unit}, target at most {target:g}: {verdict}"


def target_line(result: Result) -> str:
    """What our engine should cost, and what it does."""
    measured, checks = result.seconds, []
    if OURS in measured:
        extra = result.extra(OURS)
        for name, number, wanted in (("transfers", extra.transfers, 1), ("host reads", extra.host_reads, 0)):
            checks.append(f"{name} {number}, target {wanted}: {'met' if number == wanted else 'MISSED'}")
    for name, target in ((OURS, result.workload.target), (IDLE, IDLE_TARGET), (NONFINITE, NONFINITE_TARGET)):
        if name in measured:
            figure = partial(Result.added, name=name)
            verdict = "met" if figure(result) <= target else "MISSED"
            checks.append(f"{name} {sure(result, figure, percent)}, target at most {percent(target)}: {verdict}")
    for unit, target in ((FLOOR, FLOOR_TARGET), (PEER, PEER_TARGET)):
        if {OURS, unit} <= measured.keys():
            checks.append(at_most(result, OURS, partial(relation, of=(OURS, PLAIN), to=(unit, PLAIN)), target, f"of {unit}"))
        if {OURS, unit} <= result.own_seconds.keys():
            checks.append(at_most(result, f"{OURS}, its own calls alone,", partial(own_relation, of=OURS, to=unit), target, f"of {unit}'s"))
    for name, of, to, target, unit in (
        (RCC, (RCC, REFERENCE), (REFERENCE, PLAIN), RCC_TARGET, "forward passes beyond the reference's"),
        (ATTENTION, (ATTENTION, PLAIN), (UNFUSED, PLAIN), ATTENTION_TARGET, "forward passes of it, not fused"),
    ):
        if {*of, *to} <= measured.keys():
            checks.append(at_most(result, name, partial(relation, of=of, to=to), target, unit))
    return f"{result.workload.name}: " + "; ".join(checks)


def relation(result: Result, of: tuple[str, str], to: tuple[str, str]) -> float:
    """What one variant takes beyond another, in what a third takes beyond a fourth."""
    return result.beyond(*of) / result.beyond(*to)


def own_relation(result: Result, of: str, to: str) -> float:
    """What one variant's own calls take, in what another's do."""
    return statistics.median(result.own_seconds[of]) / statistics.median(result.own_seconds[to])


def processor() -> str:
    """The processor's name, as far as the system tells."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def environment(variants: Sequence[Variant], num_steps: int) -> str:
    """What the figures depend on."""
    peers = [f"{name} {version(name)}" for name in (variant.package.replace("_", "-") for variant in variants) if name]
    threads = torch.get_num_threads()
    numba = [f"numba {version('numba')}"] if numba_kernel.loops() is not None else []
    parts = [f"torch {torch.__version__}", *numba, *peers, f"Python {platform.python_version()}", processor(), f"torch threads: {threads}"]
    return f"{datetime.now(timezone.utc):%Y-%m-%d}; {', '.join(parts)}; {num_steps} steps of each after {WARM_UP_STEPS} to warm up."


NOTES = """\
A step is a full training step (forward, backward, AdamW), in milliseconds of the process's CPU time, the median. *To plain* is
the median over rounds of a step in relation to the plain step of the same round; *quartiles* are those of the same ratios. Counts
are of one monitored step, beyond those of a plain one: *host reads* are single values read on the host
(`aten._local_scalar_dense`), *dispatches* are torch operations that no other operation called, *transfers* are copies of many
values at once (those of the peers are not counted). *Forward passes* are medians of differences between steps of the same round:
that of the check and the reference alone, over that of the reference alone and the plain step; of attention likewise, and of what
ours adds in relation to the floor and to torch-module-monitor. *Its own calls alone*: the time within the calls of the monitor
and of its hooks, in further rounds; it leaves out what the model's own work is slowed down by, and tells where that is less than
steps differ by. In brackets: where 95 of 100 lie when the rounds are drawn anew."""


def section(rows: Sequence[Sequence[str]], results: Sequence[Result], surroundings: str) -> str:
    """What was found in one configuration."""
    lines = [surroundings, "", f"| {' | '.join(HEADER)} |", "|---|---|" + "---:|" * 7 + "---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    if any(OURS in result.seconds for result in results):
        lines += ["", "Accuracy:", "", *(f"- {accuracy_line(result)}" for result in results)]
    lines += ["", "Targets:", "", *(f"- {target_line(result)}" for result in results)]
    return "\n".join(lines)


def markdown(sections: Mapping[str, str]) -> str:
    """The whole report, of what was found by configuration."""
    intro = "\n".join(["# What monitoring costs", "", *(f"- {one.name}: {one.description}" for one in WORKLOADS.values()), "", NOTES])
    return "\n\n".join([intro, *(f"{SECTION}{title}\n\n{text}" for title, text in sections.items())]) + "\n"


def read_sections(report: Path) -> dict[str, str]:
    """What a report already has, by configuration."""
    written = report.read_text(encoding="utf-8") if report.exists() else ""
    parts = [part.partition("\n") for part in ("\n" + written).split("\n" + SECTION)[1:]]
    return {title: text.strip() for title, _newline, text in parts}


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print the lines of one workload, with rich where it is installed, without the columns that its title tells."""
    shown = [cells[1:-1] for cells in (HEADER, *rows)]
    if importlib.util.find_spec("rich") is not None:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        written = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in shown[0]:
            written.add_column(name, justify="left" if name == "variant" else "right")
        for cells in shown[1:]:
            written.add_row(*cells)
        console = Console()
        # In a file or a pipe rich assumes 80 columns, and would break the figures.
        console.width = console.width if console.is_terminal else max(console.width, 110)
        console.print(written)
        return
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    print(f"\n{title}")
    for cells in shown:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)))


def positive(text: str) -> int:
    """A number of the command line that must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure what monitoring adds to a training step.")
    parser.add_argument("--steps", type=positive, default=60, help="timed steps of each variant (default 60)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="which to run (default all)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("RESULTS.md"),
        help="Markdown file to write; what it has of other precisions and numbers of threads stays",
    )
    parser.add_argument("--threads", type=positive, default=1, help="torch threads (default 1)")
    parser.add_argument(
        "--precision", choices=[FLOAT32, MIXED, BFLOAT16], default=FLOAT32, help=f"as Lightning's Trainer has it (default {FLOAT32})"
    )
    parser.add_argument(
        "--variants", nargs="+", choices=[one.name for one in VARIANTS], help="only these, beside the plain one, in a section of their own"
    )
    parser.add_argument("--skip-peers", action="store_true", help="measure only our own variants and the floor")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the report."""
    options = parse_arguments(arguments)
    options.output.parent.mkdir(parents=True, exist_ok=True)  # now, and not after minutes of measuring
    torch.set_num_threads(options.threads)
    variants = choose_variants(options.skip_peers, options.variants)
    results = []
    for name in options.workloads:
        print(f"{name}: {WORKLOADS[name].description}", file=sys.stderr, flush=True)
        results.append(measure(WORKLOADS[name], variants, options.steps, options.precision))
    rows = [row(result, variant) for result in results for variant in variants if variant.name in result.seconds]
    for result in results:
        print_table(f"{result.workload.name}: {result.workload.description}", [cells for cells in rows if cells[0] == result.workload.name])
    for variant in variants:
        print(f"{variant.name}: {variant.note}")
    print(
        *(
            describe(result)
            for describe in (accuracy_line, target_line)
            for result in results
            if OURS in result.seconds or describe is target_line
        ),
        sep="\n",
    )
    title = f"{options.precision}, {options.threads} {'thread' if options.threads == 1 else 'threads'}"
    title += f", only {', '.join(options.variants)}" if options.variants else ""
    sections = read_sections(options.output) | {title: section(rows, results, environment(variants, options.steps))}
    options.output.write_text(markdown(sections), encoding="utf-8")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
