"""A gradient of a scaled loss is measured as if it had been divided by the scale, which is not done in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.kernels import DTYPED, Implementation, assert_textbook
from torch import nn

from lightning_module_monitor import ModuleMonitor, Rule
from lightning_module_monitor.kernels.bins_of_floats import FINE, HISTOGRAM
from lightning_module_monitor.kernels.moments import Moments, Need
from lightning_module_monitor.kernels.numba_kernel import NumbaKernel
from lightning_module_monitor.kernels.table import MomentTable

POWER_OF_TWO, OTHER_SCALE = 65536.0, 3.1
NEEDS = Need.EVERYTHING | Need.COUNTS


def gradient(dtype: torch.dtype) -> torch.Tensor:
    """Elements of which the smallest underflow in half precision when they are divided by the scale."""
    elements = torch.randn(30, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    elements[::2] *= 1e-7
    elements[0, :3] = torch.tensor([0.0, torch.inf, torch.nan])
    return elements.to(dtype)


@pytest.mark.parametrize("number", [POWER_OF_TWO, OTHER_SCALE])
@pytest.mark.parametrize(("implementation", "dtype"), DTYPED)
def test_values_are_those_of_the_quotient(implementation: Implementation, dtype: torch.dtype, number: float) -> None:
    """To the last digits for a power of two; else to the rounding of float32, or of float64 where the tensor is."""
    x, scale = gradient(dtype), torch.tensor(number, dtype=torch.float32)
    wide = x if dtype == torch.float64 else x.float()
    for expected in (wide / scale, (wide / scale).nan_to_num(0.0, 0.0, 0.0)):
        measured = x if expected.isnan().any() else x.nan_to_num(0.0, 0.0, 0.0)
        alone, together = implementation.make(), implementation.make()
        alone.add((0,), measured, NEEDS, scale=scale)
        together.add_all([0, 1], [measured, measured], [NEEDS] * 2, scale=scale)
        for kernel in (alone, together):
            fields = kernel.collect(1 if kernel is alone else 2)
            for row in range(fields.shape[1]):
                assert_textbook(Moments(*fields[:, [row]]), expected, implementation.rtol)
            for bins in (HISTOGRAM, FINE):
                counter = implementation.make()
                counter.add((0,), expected, NEEDS)
                assert torch.equal(kernel.counts(bins, [0]), counter.counts(bins, [0]))


@pytest.mark.parametrize("scale", [4.0, torch.tensor(4.0), torch.tensor(4.0, dtype=torch.float64)], ids=["number", "float32", "float64"])
def test_a_table_takes_a_number_or_a_tensor(scale: torch.Tensor | float) -> None:
    """For one tensor and for many, of different dtypes."""
    x, y = gradient(torch.float32)[1:], gradient(torch.bfloat16)[1:]
    table = MomentTable()
    table.add((0,), x, Need.SQUARES, scale=scale)
    assert table.add_all([1, 2], [y, x.double()], [Need.SQUARES] * 2, scale=scale) == []
    squares = sum(share for share in table.collect(3))[5].tolist()
    assert squares == pytest.approx([(tensor.double() / 4.0).square().sum().item() for tensor in (x, y, x)], rel=1e-12)


def test_the_kernel_gets_the_gradient_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of outputs, at blocks and of parameters: it is not divided in memory, in which a GPU would have to allocate it."""
    read = set[int]()
    add = NumbaKernel.add

    def noting(self: NumbaKernel, rows: Any, tensor: torch.Tensor, *arguments: Any, scale: torch.Tensor | None = None) -> None:
        if scale is not None:
            read.add(tensor.data_ptr())
        add(self, rows, tensor, *arguments, scale=scale)

    monkeypatch.setattr(NumbaKernel, "add", noting)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    monitor = ModuleMonitor(rules=[Rule(kinds=["gradient", "activation_gradient"], statistics="norm")])
    monitor.set_module(net)
    monitor.begin_step(0)
    hidden = net[0](torch.ones(2, 4))
    of_hidden = list[torch.Tensor]()
    hidden.register_hook(of_hidden.append)
    monitor.begin_backward(1024.0)
    (1024.0 * net[1](hidden)).sum().backward()
    monitor.end_backward()
    monitor.monitor_gradients(scale=1024.0)
    record = monitor.end_step()
    monitor.close()
    gradients = [parameter.grad for parameter in net.parameters()]
    assert {gradient.data_ptr() for gradient in (*of_hidden, *gradients) if gradient is not None} <= read
    assert record is not None
    assert record.values["activation_gradient/0/norm"] == pytest.approx((of_hidden[0].double() / 1024).norm().item())
    assert record.values["gradient/1.bias/norm"] == pytest.approx(2.0)
