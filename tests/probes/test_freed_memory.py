"""What a reference gives in one step is put where that of the next one was, and not into memory that the system has to clear first."""

from __future__ import annotations

import platform
import resource
import statistics
import subprocess
import sys

import pytest
import torch

from lightning_module_monitor.probes.freed_memory import keep_freed_memory

SCRIPT = """
import copy, resource
import torch
from torch import nn
from lightning_module_monitor import ModuleMonitor, RefinedCoordinateCheck

def num_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 768), nn.GELU(), nn.Linear(768, 256)) for _ in range(8)))
monitor = ModuleMonitor()
monitor.set_module(model)
reference = copy.deepcopy(model)
monitor.set_reference_module(reference)
RefinedCoordinateCheck(monitor)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
x = torch.randn(512, 256)
for step in range(16):
    monitor.begin_step(step)
    with monitor.no_monitor():
        reference(x)
    before = num_faults()
    output = model(x)
    print(num_faults() - before)
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.end_step()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc has other ways")
def test_what_a_step_frees_the_next_one_takes() -> None:
    """In a program of its own: the suite has freed large blocks long ago. A page has 4 KiB, and a step's forward pass takes 20 MiB."""
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    faults = [int(line) for line in found.stdout.split()]
    assert len(faults) == 16
    # Now and then a block does not fit where one has been.
    assert statistics.median(faults[4:]) < 100


def test_nobody_writes_to_the_blocks() -> None:
    """Torch fills new tensors where it is to be deterministic; 124 MiB have 31,744 pages."""
    torch.use_deterministic_algorithms(True)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        keep_freed_memory.__wrapped__()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 5_000
    finally:
        torch.use_deterministic_algorithms(False)
