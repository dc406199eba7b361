"""Histograms: rows of counts over fixed bins, filled while a step runs, without a host read, and exact in every dtype.

An element's bin is in its bits: sign and exponent, and whether the mantissa is zero. Integer arithmetic finds it, on every device the
same, without a rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_module_monitor.bins import HIGHEST_EXPONENT, LOWEST_EXPONENT, NUM_BINS, NUM_COUNTS
from lightning_module_monitor.statistics.running import ELEMENT_FORMATS, address, compiled_histogram, in_order, readable_address, takes

FIRST_CAPACITY = 64
ZERO_PLACE = 1 + NUM_BINS // 2
"""Place of the zeros in a row of counts."""

SPREAD = 64
"""Rows that the counts of a tensor are spread over on an accelerator: elements that are counted at once seldom wait for one another."""


class FloatFormat(NamedTuple):
    """Where a float has its sign, exponent and mantissa (IEEE 754)."""

    integers: torch.dtype
    exponent_bits: int
    mantissa_bits: int


FORMATS = {torch.float32: FloatFormat(torch.int32, 8, 23), torch.float64: FloatFormat(torch.int64, 11, 52)}


def places_of_codes(exponent_bits: int) -> NDArray[np.int64]:
    """Where elements are counted, by their code.

    Args:
        exponent_bits: Number of bits of the exponent.

    Returns:
        Place in a row of counts, shape ``(2, 2, 2**exponent_bits)``: by whether the mantissa is not zero, whether the sign is
        negative, and the exponent's bits.
    """
    num_exponents = 2**exponent_bits
    exponent = np.arange(num_exponents) - (num_exponents // 2 - 1)
    # 1: smaller than any power of two that has a bin; subnormal numbers of every dtype here are among them.
    distance = np.clip(exponent, LOWEST_EXPONENT - 1, HIGHEST_EXPONENT + 1) - LOWEST_EXPONENT + 2
    places = np.array([[ZERO_PLACE + distance, ZERO_PLACE - distance]] * 2, dtype=np.int64)
    places[0, :, 0] = ZERO_PLACE
    places[0, :, -1] = NUM_COUNTS - 2, 0  # infinities
    places[1, :, -1] = NUM_COUNTS - 1  # NaN
    return places


class Histograms:
    """Rows of counts, by number, on the devices that the tensors are on."""

    def __init__(self) -> None:
        self._on_device: dict[tuple[int, torch.device], Tensor] = {}
        self._compiled: CompiledRows | None = None
        self._last: tuple[torch.device, Tensor] | CompiledRows | None = None
        """The counts of the tensor that was added last, or who has them."""

    def add(self, row: int, tensor: Tensor) -> None:
        """Count all elements of a tensor in a row.

        The tensor may change as soon as this returns.

        Args:
            row: Number of the row.
            tensor: Any shape with at least one element, any real floating dtype, strided.
        """
        if takes(tensor):
            if self._compiled is None:
                self._compiled = CompiledRows()
            self._compiled.add(row, tensor)
            self._last = self._compiled
        else:
            self._last = tensor.device, counts(tensor.detach())
            self._add_counts(row, *self._last)

    def add_counted(self, row: int, tensor: Tensor, counting: Tensor) -> None:
        """Count the elements of a tensor for which ``counting``, boolean, of its shape, is true; like :meth:`add` else."""
        row_of_counts = counts(torch.where(counting, tensor, torch.nan))
        row_of_counts[-1] -= counting.logical_not().sum()  # those that do not count are among the NaN
        self._add_counts(row, tensor.device, row_of_counts)

    def add_last_again(self, row: int) -> None:
        """Count the tensor that was added last in one more row."""
        assert self._last is not None
        if isinstance(self._last, CompiledRows):
            self._last.add_last_again(row)
        else:
            self._add_counts(row, *self._last)

    def collect(self, rows: Sequence[int]) -> list[Tensor]:
        """The counts of some rows.

        Args:
            rows: Their numbers.

        Returns:
            Shares of the rows of counts, to be added up, each float64, shape ``(len(rows), NUM_COUNTS)``, still on its device.
        """
        shares = [] if self._compiled is None else [self._compiled.counts(rows)]
        for device in {device: None for _row, device in self._on_device}:
            nothing = torch.zeros(NUM_COUNTS, dtype=torch.int64, device=device)
            shares.append(torch.stack([self._on_device.get((row, device), nothing) for row in rows]).double())
        return shares

    def _add_counts(self, row: int, device: torch.device, counted: Tensor) -> None:
        before = self._on_device.get((row, device))
        # Not in place: a step may begin in a validation loop under inference mode, and go on outside of it.
        self._on_device[row, device] = counted if before is None else before + counted


def counts(tensor: Tensor) -> Tensor:
    """The row of counts of a tensor, by torch operations, none of which waits for the device.

    Args:
        tensor: Any shape, any real floating dtype, strided, without a graph.

    Returns:
        Counts, int64, shape ``(NUM_COUNTS,)``, on the tensor's device.
    """
    # Narrower dtypes fit into float32 without a rounding, their subnormal numbers as normal ones.
    wide = (tensor if tensor.dtype in FORMATS else tensor.float()).resolve_neg().reshape(-1)
    integers, exponent_bits, mantissa_bits = FORMATS[wide.dtype]
    bits = wide.view(integers)
    mantissa = (1 << mantissa_bits) - 1
    # Bit `mantissa_bits` of the sum is set if any bit of the mantissa is: moved to the left of sign and exponent.
    codes = (bits & mantissa).add_(mantissa).bitwise_right_shift_(mantissa_bits).bitwise_left_shift_(exponent_bits + 1)
    codes |= (bits >> mantissa_bits).bitwise_and_((1 << (exponent_bits + 1)) - 1)
    places = _places_on(tensor.device, exponent_bits).index_select(0, codes)
    return torch.bincount(places, minlength=NUM_COUNTS) if places.is_cpu else scattered_counts(places)


def scattered_counts(places: Tensor) -> Tensor:
    """How often each place occurs. ``torch.bincount`` reads the largest on the host, where this does not.

    Args:
        places: Int64, shape ``(elements,)``.

    Returns:
        Counts, int64, shape ``(NUM_COUNTS,)``.
    """
    spread = torch.arange(len(places), device=places.device).remainder_(SPREAD).mul_(NUM_COUNTS).add_(places)
    spread_counts = torch.zeros(SPREAD * NUM_COUNTS, dtype=torch.int64, device=places.device)
    spread_counts.scatter_add_(0, spread, torch.ones_like(spread))
    return spread_counts.view(SPREAD, NUM_COUNTS).sum(0)


@functools.lru_cache(maxsize=32)
def _places_on(device: torch.device, exponent_bits: int) -> Tensor:
    # It may be called first under inference mode.
    with torch.inference_mode(mode=False):
        return torch.from_numpy(places_of_codes(exponent_bits).reshape(-1)).to(device)


def _kernel() -> ModuleType:
    kernel = compiled_histogram()
    assert kernel is not None
    return kernel


class CompiledRows:
    """Rows of counts of tensors that the compiled kernel reads."""

    def __init__(self) -> None:
        kernel = _kernel()
        # A code of the kernel has no mantissa: of those that share it, it stands for subnormal numbers and NaN.
        self._place_of_code = np.ascontiguousarray(places_of_codes(FORMATS[torch.float32].exponent_bits)[1].reshape(-1))
        self._lanes = np.empty((kernel.LANES, kernel.NUM_CODES), dtype=np.uint32)
        self._rows = np.zeros((FIRST_CAPACITY, NUM_COUNTS), dtype=np.int64)
        self._latest = np.empty(NUM_COUNTS, dtype=np.int64)

    def add(self, row: int, tensor: Tensor) -> None:
        """Count a tensor that ``takes`` is true of."""
        self._grow_to(row)
        ordered = tensor if readable_address(tensor, ELEMENT_FORMATS) else in_order(tensor)
        place, element_format = address(ordered), ELEMENT_FORMATS[tensor.dtype]
        _kernel().count(place, element_format, tensor.numel(), self._place_of_code, self._lanes, self._rows, row, self._latest)

    def add_last_again(self, row: int) -> None:
        """Count the tensor that was added last in one more row."""
        self._grow_to(row)
        self._rows[row] += self._latest

    def counts(self, rows: Sequence[int]) -> Tensor:
        """The counts of some rows, float64, shape ``(len(rows), NUM_COUNTS)``."""
        self._grow_to(max(rows, default=0))
        return torch.from_numpy(self._rows[list(rows)]).double()

    def _grow_to(self, row: int) -> None:
        if row >= len(self._rows):
            more = np.zeros((max(len(self._rows), row + 1 - len(self._rows)), NUM_COUNTS), dtype=np.int64)
            self._rows = np.concatenate([self._rows, more])
