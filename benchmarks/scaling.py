"""How the cost of monitoring grows: with the number of sites, of keys in the store, of steps, and of processes.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --parts sites store

What is measured is the process's CPU time, but for processes that wait for each other, whose time is the clock's.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import Alert, Capture, GradientFlow, Health, ModuleMonitor, ModuleMonitorCallback, Record, Rule, load_store
from lightning_module_monitor.sinks.store.writer import Store

STATISTICS = ["mean", "std", "norm", "min", "max", "var", "abs_mean"]
NUM_SITES = (10, 100, 1000, 10_000)
NUM_KEYS, NUM_RECORDS = 5000, 200
NUM_RANKS = (1, 2, 4)
WIDTH = 8
"""Of tiny modules: what they compute takes no time."""

Lines = list[str]


def tiny_modules(number: int) -> nn.Sequential:
    """Modules that do next to nothing."""
    return nn.Sequential(*(nn.ReLU() for _ in range(number)))


def median_ms(step: Callable[[], object], number: int, clock: Callable[[], float] = time.process_time) -> float:
    """Median time of a step in milliseconds, after two to warm up."""
    seconds = []
    for _ in range(number + 2):
        start = clock()
        step()
        seconds.append(clock() - start)
    return 1e3 * statistics.median(seconds[2:])


def sites(num_steps: int) -> Lines:
    """Cost of a monitored forward pass beyond that of a plain one, over the number of modules."""
    lines = ["| sites | plain forward ms | monitored ms | microseconds a site |", "|---:|---:|---:|---:|"]
    x = torch.randn(4, WIDTH)
    for number in NUM_SITES:
        model = tiny_modules(number)
        rule = Rule(kinds="activation", statistics=STATISTICS, leaf_modules=True)
        repetitions = max(3, min(num_steps, 20_000 // number))
        with ModuleMonitor(rules=[rule]) as monitor:
            monitor.set_module(model)
            step = 0

            def monitored(monitor: ModuleMonitor = monitor, model: nn.Module = model) -> None:
                nonlocal step
                monitor.begin_step(step)
                model(x)
                monitor.end_step()
                step += 1

            plain_ms = median_ms(lambda model=model: model(x), repetitions)  # type: ignore[misc]  # a default binds the loop's variable
            monitored_ms = median_ms(monitored, repetitions)
        lines.append(f"| {number} | {plain_ms:.2f} | {monitored_ms:.2f} | {1e3 * (monitored_ms - plain_ms) / number:.1f} |")
    return lines


def store(_num_steps: int) -> Lines:
    """Time to write records of many keys, with a flush each, and to read one key and all of them back."""
    keys = [f"activation/layer{i // 7}/{STATISTICS[i % 7]}" for i in range(NUM_KEYS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "monitor.h5")
        written = Store(path, configuration={}, keys=keys)
        seconds = []
        for step in range(NUM_RECORDS):
            record = Record.of(step, {key: float(step + place) for place, key in enumerate(keys)})
            start = time.process_time()
            written.write(record)
            seconds.append(time.process_time() - start)
        written.close()
        start = time.process_time()
        read = load_store(path)
        _steps, values = read.series(keys[-1])
        one_key = time.process_time() - start
        start = time.process_time()
        frame = read.to_frame()
        everything = time.process_time() - start
        size = path.stat().st_size
    assert values[-1] == NUM_RECORDS - 1 + NUM_KEYS - 1
    assert len(frame) == NUM_KEYS * NUM_RECORDS
    return [
        f"- {NUM_KEYS} keys x {NUM_RECORDS} steps, each flushed: {1e3 * statistics.median(seconds):.2f} ms a step,"
        f" {sum(seconds):.2f} s in all, {size / NUM_KEYS / NUM_RECORDS:.1f} bytes a value",
        f"- to read one key back {1e3 * one_key:.0f} ms, all as a frame {everything:.2f} s",
    ]


class Net(LightningModule):
    """A layer of attention between two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.model = nn.Sequential(nn.Linear(4, 16), attention, nn.Linear(16, 4))

    def training_step(self, batch: list[Tensor], _batch_idx: int) -> Tensor:
        """Loss of a batch."""
        loss: Tensor = self.model(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Held(Callback):
    """Notes memory and descriptors of the process at the start of some steps."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = steps
        self.noted: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: Trainer, *_arguments: object) -> None:
        """Note them."""
        if trainer.global_step in self._steps:
            self.noted.append(held())


def held() -> tuple[int, int]:
    """Resident memory in bytes, and the number of open descriptors."""
    gc.collect()
    folder = Path("/proc/self/fd")
    return resident_bytes(), len(list(folder.iterdir())) if folder.exists() else 0


def fit(num_steps: int, folder: str, callbacks: Sequence[Callback] = ()) -> None:
    """Train with everything on at every step."""
    rule = Rule(kinds=["activation", "activation_gradient", "parameter", "gradient", "update"], statistics=[*STATISTICS, "hist"])
    monitor = ModuleMonitorCallback(
        1,
        rules=[rule],
        reference="init",
        rcc=True,
        attention=True,
        gradient_flow=GradientFlow(blocks=r"model\.[0-9]"),
        capture=Capture(sites="model", steps=[0]),
        health=Health(nonfinite="always", watch="all"),
        alerts=[Alert(keys=".*/norm", below=-1.0)],
    )
    trainer = Trainer(
        accelerator="cpu",
        max_steps=num_steps,
        default_root_dir=folder,
        callbacks=[*callbacks, monitor],
        logger=TensorBoardLogger(folder, name=None),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(64, 6, 4)), batch_size=8))


def memory(num_steps: int) -> Lines:
    """Memory and descriptors that are held from step to step and from fit to fit, with everything on."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        steps = [20 * num_steps, 60 * num_steps]  # by default the first 1,000 fill the history of records
        noted = Held(steps)
        fit(steps[-1] + 1, folder, [noted])
        lines.append(f"- {steps[-1] - steps[0]} monitored steps after {steps[0]}, everything on: {grown(*noted.noted)}")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(6 * num_steps):
            if number == 2 * num_steps:
                before = held()
            fit(2, folder)
        lines.append(f"- {4 * num_steps} fits of 2 steps after {2 * num_steps}, everything on: {grown(before, held())}")
    return lines


def grown(before: tuple[int, int], after: tuple[int, int]) -> str:
    """The difference, in words."""
    return f"{(after[0] - before[0]) / 1e6:+.1f} MB, {after[1] - before[1]:+d} descriptors"


def resident_bytes() -> int:
    """Resident memory; where the system does not tell, its peak."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def ranks(num_steps: int) -> Lines:
    """Time of a step of processes that train together, plain and monitored, over their number."""
    lines = ["| processes | plain step ms | monitored ms | added ms |", "|---:|---:|---:|---:|"]
    for number in NUM_RANKS:
        plain_ms, monitored_ms = launch(number, num_steps)
        lines.append(f"| {number} | {plain_ms:.2f} | {monitored_ms:.2f} | {monitored_ms - plain_ms:.2f} |")
    lines.append("")
    lines.append(f"The clock's time of rank 0, gloo, {os.cpu_count()} cores: processes beyond that number wait for each other anyway.")
    return lines


def launch(number: int, num_steps: int) -> tuple[float, float]:
    """Run :func:`train_together` in so many processes; returns what rank 0 found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rank-of", str(num_steps)]
    started = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in range(number)
    ]
    printed = [process.communicate(timeout=600)[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"one of {number} processes failed; see above")
    found: list[float] = json.loads(printed[0].splitlines()[-1])
    return found[0], found[1]


def train_together(num_steps: int) -> None:
    """A process of several that train one model; the first prints its times."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(128, 128) for _ in range(16)))
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 128)
    monitor = ModuleMonitor(rules=[Rule(kinds=["activation", "parameter", "gradient"], statistics=STATISTICS)], distributed=True, history=1)
    monitor.set_module(module)
    number = 0

    def step(is_monitored: bool) -> None:
        nonlocal number
        if is_monitored:
            monitor.begin_step(number)
        model(x).square().mean().backward()
        if is_monitored:
            monitor.monitor_gradients()
            monitor.monitor_parameters()
        optimizer.step()
        optimizer.zero_grad()
        if is_monitored:
            monitor.end_step()
        number += 1

    found = [median_ms(lambda kind=kind: step(kind), num_steps, time.perf_counter) for kind in (False, True)]  # type: ignore[misc]  # as above
    monitor.close()
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    # gloo's thread needs Python's lock to let go of the last collective, and who takes the group down waits for that thread with the lock.
    time.sleep(0.2)
    torch.distributed.destroy_process_group()


PARTS: dict[str, tuple[str, Callable[[int], Lines]]] = {
    "sites": ("Over the number of sites", sites),
    "store": ("The store", store),
    "memory": ("Memory and descriptors between steps and fits", memory),
    "ranks": ("Over the number of processes", ranks),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description="Measure how the cost of monitoring grows.")
    parser.add_argument("--steps", type=int, default=50, help="steps of each measurement (default 50)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default all)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("SCALING.md"), help="Markdown file to write")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_of is not None:
        train_together(options.rank_of)
        return
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    lines = ["# How the cost of monitoring grows", ""]
    lines += [f"{datetime.now(timezone.utc):%Y-%m-%d}; torch {torch.__version__}, Python {platform.python_version()}, one thread each."]
    for name in options.parts:
        title, measure = PARTS[name]
        print(title, file=sys.stderr, flush=True)
        lines += ["", f"## {title}", "", *measure(options.steps)]
    text = "\n".join(lines) + "\n"
    print(text)
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
