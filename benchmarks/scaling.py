"""How the cost of monitoring grows: with the number of sites, of keys in the store, of steps, and of processes.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --parts sites store

What is measured is the process's CPU time, but for processes that wait for each other, whose time is the clock's.
"""

from __future__ import annotations

import argparse
import gc
import json
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
from torch import nn

from lightning_module_monitor import ModuleMonitor, Record, Rule, load_store
from lightning_module_monitor.sinks.hdf5 import Store

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
            record = Record(step, {key: float(step + place) for place, key in enumerate(keys)})
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
        f" {sum(seconds):.2f} s in all, {size / NUM_KEYS / NUM_RECORDS:.1f} bytes a value (they are easy to compress)",
        f"- to read one key back {1e3 * one_key:.0f} ms, all as a frame {everything:.2f} s",
    ]


def memory(num_steps: int) -> Lines:
    """Memory that is held from step to step, by the process's own account."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(64, 256)

    def step(monitor: ModuleMonitor, number: int) -> None:
        monitor.begin_step(number)
        model(x).square().mean().backward()
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        optimizer.step()
        optimizer.zero_grad()
        monitor.end_step()

    rule = Rule(kinds=["activation", "activation_gradient", "parameter", "gradient", "update"], statistics=STATISTICS)
    with ModuleMonitor(rules=[rule], history=1) as monitor:
        monitor.set_module(model)
        for number in range(20):
            step(monitor, number)
        gc.collect()
        before = resident_bytes()
        for number in range(20, 20 + 20 * num_steps):
            step(monitor, number)
        gc.collect()
        grown = resident_bytes() - before
    return [f"- 20 layers, five kinds: {grown / 1e6:+.1f} MB after {20 * num_steps} further monitored steps"]


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
    "memory": ("Memory between steps", memory),
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
