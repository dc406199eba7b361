"""A GPU, its clock and its memory; and what is measured where there is none."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from torch import cuda

from measuring import Processor, Times
from workloads import GPT_1M, GPT_100M, WORKLOADS, Workload


class Gpu(Processor):
    """The current CUDA or ROCm device: the time is that between two of its events."""

    is_gpu = True
    device = torch.device("cuda")

    def time(self, step: Callable[[], object]) -> Times:
        """Take a step."""
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize()
        wall = time.perf_counter()
        start.record()
        step()
        end.record()
        cuda.synchronize()
        wall = time.perf_counter() - wall
        return Times(start.elapsed_time(end) / 1000, wall)

    def allocated(self) -> int:
        """Bytes of tensors on the device."""
        gc.collect()
        return cuda.memory_allocated()

    def peak(self, step: Callable[[], object]) -> int:
        """The largest number of bytes on the device in a step."""
        cuda.reset_peak_memory_stats()
        step()
        return cuda.max_memory_allocated()


def processor_here() -> Processor:
    """The GPU, or the CPU for a trial where there is none."""
    return Gpu() if cuda.is_available() else Processor()


def workloads_of(place: Processor) -> tuple[Workload, Workload]:
    """A GPT, on a CPU a small one, and W2."""
    return (GPT_100M if place.is_gpu else GPT_1M, WORKLOADS["W2"])
