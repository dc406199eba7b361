"""Before the first step the kernel of a device is compiled, and the Triton kernel is compared with the kernel of torch operations."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.cuda import OutOfMemoryError  # torch.OutOfMemoryError since torch 2.5

from lightning_module_monitor.kernels import numba_kernel, triton_kernel
from lightning_module_monitor.kernels.bins_of_floats import needed_bins
from lightning_module_monitor.kernels.elements import WIDE
from lightning_module_monitor.kernels.moments import FIELDS_OF_NEED, Moments, Need
from lightning_module_monitor.kernels.table import Kernel
from lightning_module_monitor.kernels.torch_kernel import TorchKernel
from lightning_module_monitor.kernels.triton_kernel import TritonKernel

RTOL = 1e-6
"""Both kernels sum in float64; a kernel that is compiled wrongly is not nearly right."""

NOTICEABLE_S = 1.0
"""Compiling for longer than this is logged."""

_log = logging.getLogger(__name__)


class Form(Enum):
    """How tensors come to the kernel."""

    ONE = "one tensor"
    MANY = "many tensors"
    SCALED = "one tensor of a scaled loss"
    DIFFERENCE = "a difference of tensors"
    PRODUCT = "a product of tensors"
    """Only its mean is needed."""


class Launch(NamedTuple):
    """A measurement that is compiled by itself."""

    dtype: torch.dtype
    needs: int
    form: Form


def warm_up(device: torch.device, launches: Collection[Launch]) -> None:
    """Compile the kernel of a device, so that no step does.

    Args:
        device: Where the model will be.
        launches: What the Triton kernel will measure. Where it fails to, or its values are not those of torch's operations, torch's
            operations measure in this process, and a warning gives the reason.
    """
    if device.type == "cpu":
        numba_kernel.loops()
    elif device.type == "cuda":
        check_triton(device, launches)


def check_triton(device: torch.device, launches: Collection[Launch]) -> None:
    """Compile what the Triton kernel will launch, and compare its values with those of torch's operations."""
    start = time.perf_counter()
    try:
        if not triton_kernel.works(device):
            return
        for launch in sorted(launches, key=repr):
            compare(device, launch)
    except OutOfMemoryError:  # no error of Triton
        return
    except Exception as error:
        triton_kernel.give_up(device, error)
        return
    duration = time.perf_counter() - start
    if duration > NOTICEABLE_S:
        _log.info("Compiled and checked the kernels for %s in %.1f s; Triton caches them.", device, duration)


def compare(device: torch.device, launch: Launch) -> None:
    """Measure a few tensors by both kernels.

    Raises:
        ValueError: If their values differ.
    """
    ours, expected = TritonKernel(device), TorchKernel(device)
    num_rows = 1 + max(_add(kernel, device, launch) for kernel in (ours, expected))
    found, known = ours.collect(num_rows), expected.collect(num_rows)
    is_equal = torch.isclose(found, known, rtol=RTOL, atol=0.0, equal_nan=True).all(1).tolist()
    what = f"{launch.form.value} of {launch.dtype}"
    fields = {name for need, names in FIELDS_OF_NEED.items() if need & launch.needs for name in names}
    for name, values, true_values, is_right in zip(Moments._fields, found, known, is_equal, strict=True):
        if name in fields and not is_right:
            raise ValueError(f"{name} of {what} was {values.tolist()}, expected {true_values.tolist()}")
    for bins in needed_bins(launch.needs):
        if not torch.equal(ours.counts(bins, range(num_rows)), expected.counts(bins, range(num_rows))):
            raise ValueError(f"counts of {what} differ from those of torch's operations")


def _add(kernel: Kernel, device: torch.device, launch: Launch) -> int:
    """Add tensors to a kernel, each to its row; returns the number of rows. The row after the last stays empty."""
    tensors, needs = _tensors(launch, device), launch.needs
    match launch.form:
        case Form.MANY:
            kernel.add_all(range(len(tensors)), tensors, [needs] * len(tensors))
        case Form.PRODUCT:
            for row, tensor in enumerate(tensors):
                kernel.add_product(row, tensor, tensor.flip(0), -1)
        case Form.DIFFERENCE:
            row = 0
            for tensor in tensors:
                other, shift = tensor * 0.5, tensor[0] * 0.25
                # The shift is a bias, which is float32 under autocast.
                shifts = [None, shift] if tensor.dtype in WIDE else [None, shift, shift.float()]
                for taken, shifted in itertools.product((None, other), shifts):
                    if taken is not None or shifted is not None:
                        kernel.add((row,), tensor, needs, taken, shifted)
                        row += 1
            return row
        case _:
            # Float32, as of a GradScaler.
            scale = torch.full((), 4096.0, dtype=torch.float32, device=device) if launch.form is Form.SCALED else None
            for row, tensor in enumerate(tensors):
                kernel.add((row,), tensor, needs, scale=scale)
    return len(tensors)


def _tensors(launch: Launch, device: torch.device) -> list[Tensor]:
    """Tensors with a large mean, with gaps in memory, and with NaN; they take no random numbers."""
    waves = torch.arange(40 * 70, dtype=torch.float64, device="cpu").sin().pow(4).view(40, 70)
    several, long = ((1000 + 5 * tensor).to(launch.dtype).to(device) for tensor in (waves, waves.repeat(1, 60)[:3]))
    sick = waves.clone()
    sick[3, :2] = torch.tensor([torch.nan, torch.inf], device="cpu")
    tensors = [several, several[:, :33], sick.to(launch.dtype).to(device)]
    # Rows of other lengths are compiled for themselves, where they are not one stretch.
    return [*tensors, several[:, :3], long] if launch.needs & Need.TOKENS or launch.form is Form.DIFFERENCE else tensors
