"""A GPU: its clock, its memory, and which GPT fits into it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from torch import cuda

from measuring import Processor, Times

SHARE_OF_MEMORY = 0.9
"""The rest is for libraries, and for what the allocator cannot use."""


class Gpu(Processor):
    """The current CUDA or ROCm device: the time is that between two of its events."""

    is_gpu = True
    floor_target = 1.5
    peer_target = 1 / 10

    def __init__(self, device: torch.device) -> None:
        self.device = device

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

    def free_bytes(self) -> int:
        """The memory for models and their training."""
        gc.collect()
        cuda.empty_cache()
        free, _total = cuda.mem_get_info()
        return int(SHARE_OF_MEMORY * free)
