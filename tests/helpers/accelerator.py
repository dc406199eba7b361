"""A stub of an accelerator: the tensors of a CPU are taken for those of a device that the host would wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from torch import Tensor

from lightning_module_monitor.kernels import elements
from lightning_module_monitor.nonfinite import magnitudes
from lightning_module_monitor.trainer import strategy


@contextmanager
def as_accelerator() -> Iterator[list[int]]:
    """Take every tensor for one of an accelerator: the sizes of what is brought to the host."""
    sizes: list[int] = []

    def transfer(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor.to("cpu")

    with ExitStack() as stack:
        stack.enter_context(patch.object(elements, "transfer", transfer))
        for module in (elements, magnitudes):
            stack.enter_context(patch.object(module, "is_on_host", lambda _tensor: False))
        stack.enter_context(patch.object(strategy, "reads_at_once", lambda _trainer: False))
        yield sizes
