"""The implementations of the contract of kernels, and how a test measures tensors by one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.textbook import PLAIN, slack, textbook
from lightning_module_monitor import STATISTICS, Statistic
from lightning_module_monitor.kernels import numba_kernel
from lightning_module_monitor.kernels.moments import Moments, Need, merged
from lightning_module_monitor.kernels.numba_kernel import NumbaKernel
from lightning_module_monitor.kernels.table import Kernel
from lightning_module_monitor.kernels.torch_kernel import TorchKernel
from lightning_module_monitor.statistics.finisher import nan_where_empty

CPU = torch.device("cpu")
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Implementation:
    """A kernel, and what it promises.

    Attributes:
        make: Makes one, with rows of its own.
        dtypes: The dtypes it takes.
        rtol: Its relative accuracy against float64.
        takes: Whether it reads a tensor; another kernel reads those it does not.
        device: Where its tensors are.
    """

    make: Callable[[], Kernel]
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32, *HALVES)
    rtol: float = 1e-12
    takes: Callable[[Tensor], bool] = lambda _tensor: True
    device: torch.device = CPU


def torch_kernel(portion: int | None = None, wide: torch.dtype = torch.float64) -> TorchKernel:
    """The kernel of any device; as of an accelerator by the size of its portions, as of one without float64 by its sums' dtype."""
    kernel = TorchKernel(CPU)
    kernel._wide = wide
    kernel._portion = portion or kernel._portion
    return kernel


IMPLEMENTATIONS = {
    "numba": Implementation(lambda: NumbaKernel(CPU), (torch.float32, *HALVES), takes=numba_kernel.takes),
    "torch": Implementation(torch_kernel),
    "torch in small portions": Implementation(lambda: torch_kernel(portion=1000)),
    "torch without float64": Implementation(lambda: torch_kernel(wide=torch.float32), (torch.float32, *HALVES), 1e-5),
}
"""By name. What is true of every kernel is tested for each of these."""

EXACT = {name: one for name, one in IMPLEMENTATIONS.items() if one.rtol < 1e-9}
"""Those that sum in float64."""

DTYPED = [pytest.param(one, dtype, id=f"{name}, {dtype}") for name, one in IMPLEMENTATIONS.items() for dtype in one.dtypes]
"""Every implementation with every dtype it takes."""

over_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
over_exact_ones = pytest.mark.parametrize("implementation", EXACT.values(), ids=EXACT)
over_dtypes = pytest.mark.parametrize(("implementation", "dtype"), DTYPED)


def without_numba(patch: pytest.MonkeyPatch) -> None:
    """From now on tensors in host memory are measured by operations of torch."""
    patch.setattr(numba_kernel, "loops", lambda: None)


def collected(kernel: Kernel, num_rows: int = 1) -> Moments:
    """The moments of the first rows, on the host."""
    return Moments(*kernel.collect(num_rows).cpu())


def measured(implementation: Implementation, tensors: Sequence[Tensor], needs: int = Need.EVERYTHING) -> Moments:
    """Moments of one row that all the tensors were added to."""
    kernel = implementation.make()
    for tensor in tensors:
        kernel.add((0,), tensor.to(implementation.device), needs)
    return collected(kernel)


def merge(*several: Moments) -> Moments:
    """Moments of the same rows, merged."""
    shares = [torch.stack(tuple(one)).numpy() for one in several]
    return Moments(*torch.from_numpy(merged(shares, shares[0].shape[1])))


def finished(name: str, moments: Moments, row: int = 0) -> float:
    """A statistic of a row, as it is recorded."""
    statistic = STATISTICS[name]
    assert isinstance(statistic, Statistic)
    with np.errstate(all="ignore"):
        return float(statistic.finish(Moments(*nan_where_empty(torch.stack(tuple(moments)).numpy())))[row])


def needs_of(name: str) -> int:
    """What a statistic is finished from."""
    statistic = STATISTICS[name]
    assert isinstance(statistic, Statistic)
    return statistic.needs


def assert_textbook(moments: Moments, whole: Tensor, rtol: float, names: Sequence[str] = PLAIN, row: int = 0) -> None:
    """Statistics of a row are those of a tensor by their formulas."""
    for name in names:
        assert finished(name, moments, row) == expected(name, whole, rtol), name


def expected(name: str, whole: Tensor, rtol: float) -> object:
    """The textbook's statistic, to be compared with."""
    return pytest.approx(textbook(name, whole), rel=rtol, abs=rtol * slack(name, whole), nan_ok=True)


def assert_measured(implementation: Implementation, tensors: Sequence[Tensor], rtol: float | None = None) -> None:
    """Every statistic over all the tensors is the textbook's: measured by what it needs alone, and together with all others."""
    whole = torch.cat([tensor.detach().double().reshape(-1, tensor.shape[-1] if tensor.dim() else 1) for tensor in tensors])
    everything = measured(implementation, tensors)
    alone = {needs: measured(implementation, tensors, needs) for needs in {needs_of(name) for name in PLAIN}}
    for name in PLAIN:
        value = expected(name, whole, implementation.rtol if rtol is None else rtol)
        assert finished(name, everything) == value, name
        assert finished(name, alone[needs_of(name)]) == value, f"{name} alone"


def views(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Tensors whose elements lie in memory in every way, each with its elements in order."""
    x = torch.randn(90, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    images = x[:45].reshape(3, 5, 7, 30)
    with_graph = x.clone().requires_grad_() * 2
    return {
        "transposed": (x.T, torch.stack(x.unbind(1))),
        "every third": (x[:, ::3], torch.stack([x[:, column] for column in range(0, 70, 3)], dim=1)),
        "expanded": (x[:1].expand(20, 70), torch.stack([x[0]] * 20)),
        "channels last": (images.to(memory_format=torch.channels_last), images),
        "negated by a flag": (torch._neg_view(x), x * -1),
        "negated by a flag, transposed": (torch._neg_view(x).T, torch.stack(x.unbind(1)) * -1),
        "zeros without memory": (torch._efficientzerotensor((6, 5), dtype=dtype), torch.zeros(6, 5, dtype=dtype)),
        "with a graph": (with_graph.detach(), x * 2),
        "a parameter": (nn.Parameter(x).detach(), x),
        "in another place of its storage": (x.view(-1)[17:900], x.view(-1)[17:900].clone()),
        "many dimensions": (x[:2, :3].reshape(1, 2, 1, 3, 1), x[:2, :3].reshape(6, 1)),
        "sharing until one writes": (torch._lazy_clone(x), x),
    }
