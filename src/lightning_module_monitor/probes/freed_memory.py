"""What one step frees and the next takes again stays with the process.

glibc gives what is free at the end of its heap back to the system, once it is more than a limit; the next step gets it again page by
page, each of them zeroed: with a reference and the width of a small GPT 8,000 pages a step, on a shared machine a fifth of the step's
forward pass. The limit is twice the size of the largest block that was ever mapped by itself and freed, up to 32 MiB (mallopt(3),
``M_MMAP_THRESHOLD``). A program that has had one such block, as a large model has, is as quick as can be; one that has not gets it here.
"""

from __future__ import annotations

import functools
from contextlib import suppress

import torch

BLOCK_BYTES = 31 << 20
"""Less than 32 MiB with what the allocators put before it. Twice as much may stay with the process."""
NUM_BLOCKS = 4
"""At the same time: one or the other may be cut from what is free in the heap, and not be mapped by itself."""


@functools.cache
def keep_freed_memory() -> None:
    """Have what is freed kept, in a program whose ``malloc`` is glibc's and was not told otherwise; elsewhere nothing happens."""
    with suppress(RuntimeError):  # where there is no room for blocks that nobody writes to, it is not for this to say so
        # No tensors, which torch fills where it is to be deterministic.
        _ = [torch.UntypedStorage(BLOCK_BYTES, device="cpu") for _ in range(NUM_BLOCKS)]
