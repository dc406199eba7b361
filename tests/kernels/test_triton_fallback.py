"""Where Triton does not work, there is no Triton kernel, and one warning; where memory is full, it works all the same."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.kernels import assert_textbook
from torch import Tensor, nn

from lightning_module_monitor import ModuleMonitor, Rule
from lightning_module_monitor.kernels import numba_kernel, table, triton_kernel
from lightning_module_monitor.kernels.moments import Moments, Need, merged
from lightning_module_monitor.kernels.table import MomentTable
from lightning_module_monitor.kernels.torch_kernel import TorchKernel
from lightning_module_monitor.kernels.triton_kernel import TritonKernel


@pytest.fixture(autouse=True)
def _not_tried_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether Triton works is found out once for each device of a process: here, for each test."""
    monkeypatch.setattr(triton_kernel, "_is_working", {})


def asked_three_times(device: torch.device, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of three calls, all of which find that Triton does not work."""
    with caplog.at_level(logging.WARNING):
        assert [triton_kernel.works(device) for _time in range(3)] == [False] * 3
    return [record.getMessage() for record in caplog.records]


def test_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A single warning reports that Triton is not installed, and what happens instead."""
    monkeypatch.setitem(sys.modules, "lightning_module_monitor.kernels.triton_loops", None)
    (warning,) = asked_three_times(torch.device("cuda", 0), caplog)
    assert warning.startswith("Triton does not work on cuda:0 (ModuleNotFoundError: ")
    assert "tensors there are measured by torch operations" in warning


def test_where_the_first_launch_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An old GPU or a missing compiler shows when the first kernel is launched, which is before a tensor depends on it."""

    def fail(_device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton_kernel, "TritonKernel", fail)
    (warning,) = asked_three_times(torch.device("cuda", 1), caplog)
    assert warning.startswith("Triton does not work on cuda:1 (RuntimeError: Failed to find C compiler)")


class Fails(TritonKernel):
    """Every launch of it fails."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def add(self, *_arguments: object, **_scale: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    add_all = add  # type: ignore[assignment]

    def collect(self, num_rows: int) -> Tensor:
        return torch.stack(Moments.empty(num_rows))


X, Y = torch.arange(8.0, dtype=torch.float64).view(1, 8), torch.full((1, 8), 3.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("add", "expected"),
    [
        (lambda rows: rows.add((0,), X, Need.EVERYTHING), X),
        (lambda rows: rows.add_all([0, 0], [X, Y], [Need.EVERYTHING] * 2), torch.cat([X, Y])),
        (lambda rows: rows.add((0,), X, Need.EVERYTHING, Y), X - Y),
    ],
    ids=["a tensor", "many", "a difference"],
)
def test_where_a_later_launch_fails(
    add: Callable[[MomentTable], object], expected: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be launched is measured by torch operations, every element once, and Triton is used no longer."""
    monkeypatch.setattr(triton_kernel, "_is_working", {X.device: True})
    monkeypatch.setattr(table, "TritonKernel", Fails)
    monkeypatch.setattr(triton_kernel, "takes", lambda tensor: triton_kernel.works(tensor.device))
    rows = MomentTable()
    with caplog.at_level(logging.WARNING):
        add(rows)
        add(rows)
    assert not triton_kernel.works(X.device)
    assert_textbook(
        Moments(*torch.from_numpy(merged([share.numpy() for share in rows.collect(1)], 1))), torch.cat([expected, expected]), 1e-12
    )
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("Triton does not work on cpu (RuntimeError: out of resource: shared memory)")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices(device: str, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel is for CUDA and ROCm. Nothing is wrong with other devices, and nothing is logged of them."""
    assert not triton_kernel.takes(torch.empty(3, device=device))
    assert not caplog.records


class IsFull(TritonKernel):
    """A kernel on a device whose memory is full at the first tensor."""

    num_left = 1

    def __init__(self, device: torch.device) -> None:
        self._torch_kernel = TorchKernel(device)

    def add(self, *arguments: Any, **scale: Any) -> None:
        if IsFull.num_left:
            IsFull.num_left -= 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        self._torch_kernel.add(*arguments, **scale)

    def add_all(self, *arguments: Any, **scale: Any) -> None:
        if IsFull.num_left:
            IsFull.num_left -= 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        self._torch_kernel.add_all(*arguments, **scale)

    def collect(self, num_rows: int) -> Tensor:
        return self._torch_kernel.collect(num_rows)


@pytest.fixture
def _is_full_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_is_working", {X.device: True})
    monkeypatch.setattr(table, "TritonKernel", IsFull)
    monkeypatch.setattr(numba_kernel, "takes", lambda _tensor: False)
    monkeypatch.setattr(triton_kernel, "takes", lambda tensor: triton_kernel.works(tensor.device))
    monkeypatch.setattr(IsFull, "num_left", 1)


@pytest.mark.usefixtures("_is_full_once")
def test_without_memory_nothing_is_tried_that_needs_more(caplog: pytest.LogCaptureFixture) -> None:
    """The error is the tensor's own, of one or of many; Triton works as before, and measures what comes next."""
    rows = MomentTable()
    with caplog.at_level(logging.WARNING):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            rows.add((0,), X, Need.EVERYTHING)
        IsFull.num_left = 1
        failed = rows.add_all([0, 0], [X, Y], [Need.EVERYTHING] * 2)
        rows.add((0,), X, Need.EVERYTHING)
    assert [(index, type(error)) for index, error in failed] == [(0, torch.cuda.OutOfMemoryError), (1, torch.cuda.OutOfMemoryError)]
    assert triton_kernel.works(X.device)
    assert not caplog.records
    assert_textbook(Moments(*torch.from_numpy(merged([share.numpy() for share in rows.collect(1)], 1))), X, 1e-12)


@pytest.mark.usefixtures("_is_full_once")
def test_without_memory_a_value_is_nan_and_counted() -> None:
    """In a step with a monitor: the others of the step have their values, and the next step has all."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    monitor = ModuleMonitor(rules=[Rule(kinds="activation", sites="[01]", statistics="norm")])
    monitor.set_module(net)
    records = []
    for step in range(2):
        monitor.begin_step(step)
        net(torch.ones(2, 4))
        record = monitor.end_step()
        assert record is not None
        records.append(dict(record.values))
    monitor.close()
    assert math.isnan(records[0]["activation/0/norm"])
    assert records[0]["monitor/errors"] == 1
    assert records[0]["activation/1/norm"] == records[1]["activation/1/norm"] == pytest.approx(net(torch.ones(2, 4)).norm().item())
    assert records[1]["activation/0/norm"] > 0


def test_a_first_launch_without_memory_says_nothing_of_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is asked again for the next tensor."""

    def fail(_device: torch.device) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(triton_kernel, "TritonKernel", fail)
    for _time in range(2):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            triton_kernel.works(torch.device("cuda", 0))
    assert not caplog.records
