"""The contract of the kernels: rows of moments and of counts that tensors of one device are added to while a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Kernel(Protocol):
    """Rows of moments, and where a histogram is asked for rows of counts, of the tensors of one device.

    A tensor may change as soon as a method returns. No method reads a value on the host before :meth:`collect`, and on an
    accelerator not even that does. ``needs`` are bits of :class:`~lightning_module_monitor.kernels.moments.Need`, always the same
    for one row. A method that raises has added nothing.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device) -> None: ...

    def add(self, rows: Sequence[int], tensor: Tensor, needs: int) -> None:
        """Measure a tensor once and merge it into rows.

        Args:
            rows: Numbers of the rows.
            tensor: Any shape with at least one element, any real floating dtype of this kernel, strided, detached.
            needs: What the rows need.
        """

    def add_all(self, rows: Sequence[int], tensors: Sequence[Tensor], needs: Sequence[int]) -> None:
        """:meth:`add` of many tensors that exist at the same time, each into one row."""

    def add_difference(self, rows: Sequence[int], tensor: Tensor, other: Tensor | None, shift: Tensor | None, needs: int) -> None:
        """:meth:`add` of ``tensor - other - shift``.

        Args:
            rows: Numbers of the rows.
            tensor: As for :meth:`add`.
            other: Of the same shape and device; ``None`` for zero.
            shift: Of a shape that is broadcast to that; ``None`` for zero.
            needs: What the rows need.
        """

    def collect(self, num_rows: int) -> Tensor:
        """The moments of the rows from 0 to ``num_rows``, float64, shape ``(NUM_FIELDS, num_rows)``, on the kernel's device.

        A device without float64 gives them on the host. A row that nothing was added to has the moments of an empty tensor.
        """

    def counts(self, rows: Sequence[int]) -> Tensor:
        """The counts of some rows, float64, shape ``(len(rows), NUM_COUNTS)``, on the same device; zeros for rows without any."""
