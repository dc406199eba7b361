"""Profile one monitored step of the default callback in Lightning's Trainer.

python benchmarks/gpu_profile.py FIGURES.json
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

import gpu
from gpu_variants import ON_GPU
from lanes import make_batches
from measuring import WARM_UP_STEPS, is_on_device, profiler, set_up_profiler
from stages import Found, write_json
from variants import DEFAULTS
from workloads import FLOAT32

ROWS = 25
Row = dict[str, str | int | float]


def largest(events: Sequence[FunctionEvent], *, on_device: bool) -> list[Row]:
    """The names that take most time: of kernels and copies on the device, or of calls on the host without those that they make."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for event in events:
        if is_on_device(event) if on_device else event.device_type == DeviceType.CPU:
            found[event.name].append(event.time_range.elapsed_us() if on_device else event.self_cpu_time_total)
    rows: list[Row] = [{"name": name, "calls": len(each), "ms": sum(each) / 1000} for name, each in found.items()]
    return sorted(rows, key=lambda row: -float(row["ms"]))[:ROWS]


def main() -> None:
    """Profile a step after some others."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    place = gpu.processor_here()
    workload, _other = gpu.workloads_of(place)
    set_up_profiler(place.device)
    variant = next(variant for variant in ON_GPU["default"] if variant.name == DEFAULTS)
    lane = variant.start(workload, workload.precision or FLOAT32, place.device)
    batch = make_batches(workload, place.device)[0]
    for _ in range(WARM_UP_STEPS):
        lane.train_step(batch)
    recorded = profiler(place.device)
    lane.train_step(batch, recorded)
    lane.close()
    events = recorded.events() or []
    tables = {"on_the_device": largest(events, on_device=True), "on_the_host": largest(events, on_device=False)}
    found: Found = {"workload": workload.description, "variant": variant.name, **tables}
    write_json(Path(sys.argv[1]), found)


if __name__ == "__main__":
    main()
