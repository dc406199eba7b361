"""Where the Triton kernel is tested, and what it is compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.kernels import triton_kernel
from lightning_module_monitor.kernels.bins_of_floats import HISTOGRAM
from lightning_module_monitor.kernels.moments import FIELDS_OF_NEED, Moments, Need
from lightning_module_monitor.kernels.triton_kernel import TritonKernel

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if IS_INTERPRETED else torch.device("cuda", 0)

# The interpreter computes with numpy, which warns where a GPU does not.
IGNORED_WARNINGS = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN (axis|slice) encountered:RuntimeWarning"),
]


def skip_without_triton() -> None:
    """Skip the module that is being imported where the Triton kernel cannot run."""
    pytest.importorskip("triton", reason="Triton is not installed; make test-triton installs it")
    if not IS_INTERPRETED and not torch.cuda.is_available():
        reason = "no CUDA device here, and Triton interprets only with TRITON_INTERPRET=1; make test-triton sets it"
        pytest.skip(reason, allow_module_level=True)


def random(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, std: float = 1.0, seed: int = 0) -> Tensor:
    """Normal numbers on the device of the tests."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * std + mean).to(dtype).to(DEVICE)


def textbook_moments(tensors: Sequence[Tensor]) -> dict[str, float]:
    """The moments of all elements of tensors, by their formulas in float64."""
    x = torch.cat([tensor.detach().cpu().double().reshape(-1) for tensor in tensors])
    norms, roots = [], []
    for tensor in tensors:
        tokens = tensor.detach().cpu().double().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
        norms.append((tokens**2).sum(1).sqrt())
        roots.append((tokens**2).mean(1).sqrt())
    d = x - x.mean()
    return {
        "elements": float(len(x)),
        "mean": x.mean().item(),
        "deviations": (d**2).sum().item(),
        "third": (d**3).sum().item(),
        "fourth": (d**4).sum().item(),
        "squares": (x**2).sum().item(),
        "magnitude": x.abs().sum().item(),
        "maximum": x.max().item(),
        "minimum": x.min().item(),
        "zeros": float((x == 0).sum()),
        "nonfinite": float((~x.isfinite()).sum()),
        "tokens": float(sum(map(len, norms))),
        "token_norm": torch.cat(norms).sum().item(),
        "token_rms": torch.cat(roots).sum().item(),
    }


def with_pairs(rel: float) -> float:
    """A relative error, for a kernel whose sums may be pairs of float32 numbers: these have some ten digits."""
    return max(rel, 1e-8) if triton_kernel.has_slow_float64(DEVICE) else rel


def assert_moments(found: Tensor, tensors: Sequence[Tensor], needs: int = Need.EVERYTHING, rel: float = 1e-12) -> None:
    """The column of moments is that of the tensors' elements, as far as it is needed; pairs of float32 numbers have fewer digits."""
    rel = with_pairs(rel)
    expected = textbook_moments(tensors)
    scale = {"mean": expected["magnitude"] / expected["elements"], "third": expected["fourth"] ** 0.75 * expected["elements"] ** 0.25}
    moments = Moments(*found.cpu().tolist())
    assert moments.elements == expected["elements"]
    for need, fields in FIELDS_OF_NEED.items():
        for name in fields if need & needs else ():
            # The mean and the third moment may be the small difference of large sums.
            tolerance = rel * abs(scale.get(name, 0.0)) if np.isfinite(scale.get(name, 0.0)) else 0.0
            assert getattr(moments, name) == pytest.approx(expected[name], rel=rel, abs=tolerance, nan_ok=True), name


def measured(add: Callable[[TritonKernel], None]) -> Tensor:
    """The moments of row 0."""
    kernel = TritonKernel(DEVICE)
    add(kernel)
    return kernel.collect(1)[:, 0]


def assert_added(tensor: Tensor, needs: int = Need.EVERYTHING, rel: float = 1e-12) -> None:
    """A tensor's moments are those of its formulas."""
    assert_moments(measured(lambda kernel: kernel.add((0,), tensor, needs)), [tensor], needs, rel)


def row_of_counts(kernel: TritonKernel, row: int = 0) -> Histogram:
    """The histogram of a row."""
    return Histogram(kernel.counts(HISTOGRAM, [row])[0].long().cpu().numpy())
