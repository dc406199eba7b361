"""Where Triton does not work, there is no Triton kernel, and one warning."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from lightning_module_monitor.kernels import triton_kernel


@pytest.fixture(autouse=True)
def _not_tried_yet() -> Iterator[None]:
    """Whether Triton works is found out once for each device of a process: here, for each test."""
    triton_kernel._works.cache_clear()
    yield
    triton_kernel._works.cache_clear()


def asked_three_times(device: torch.device, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of three calls, none of which gives a kernel."""
    with caplog.at_level(logging.WARNING):
        assert [triton_kernel.triton_kernel(device) for _time in range(3)] == [None] * 3
    return [record.getMessage() for record in caplog.records]


def test_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """There is no kernel where Triton is not installed, and one warning says so, and what happens instead."""
    monkeypatch.setitem(sys.modules, "lightning_module_monitor.kernels.triton_loops", None)
    (warning,) = asked_three_times(torch.device("cuda", 0), caplog)
    assert warning.startswith("Triton does not work on cuda:0 (ModuleNotFoundError: ")
    assert "tensors there are measured by torch operations" in warning


def test_where_the_first_launch_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An old GPU or a missing compiler shows when the first kernel is launched, which is before a tensor depends on it."""

    class Fails(triton_kernel.TritonKernel):
        def __init__(self, device: torch.device) -> None:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton_kernel, "TritonKernel", Fails)
    (warning,) = asked_three_times(torch.device("cuda", 1), caplog)
    assert warning.startswith("Triton does not work on cuda:1 (RuntimeError: Failed to find C compiler)")


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_other_devices(device: str, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel is for CUDA and ROCm. Nothing is wrong with other devices, and nothing is logged of them."""
    assert asked_three_times(torch.device(device), caplog) == []
