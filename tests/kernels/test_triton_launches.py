"""How often the Triton kernel is launched, and what it copies and waits for; ``make test-triton`` installs Triton and runs these tests."""

from __future__ import annotations

import pytest
import torch
from helpers.textbook import histogram
from helpers.triton import DEVICE, IGNORED_WARNINGS, IS_INTERPRETED, assert_moments, random, skip_without_triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.kernels import slots, triton_kernel
from lightning_module_monitor.kernels.bins_of_floats import FINE, HISTOGRAM
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.triton_kernel import TritonKernel

skip_without_triton()
pytestmark = [pytest.mark.gpu, *IGNORED_WARNINGS]
needs_cuda = pytest.mark.skipif(IS_INTERPRETED or not torch.cuda.is_available(), reason="no CUDA device here, or Triton interprets")


WITHOUT_LAUNCH = {"empty", "is_pinned", "_pin_memory", "lift_fresh", "detach", "alias", "view", "select", "slice", "unbind"}
"""Operations of torch that allocate memory or make a view."""


class Launches(TorchDispatchMode):
    """Counts the launches of the kernel, in whose place nothing is done, and the operations of torch that launch or copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.launched = self.dispatched = 0
        monkeypatch.setattr(triton_kernel, "launch", self._launch)

    def _launch(self, *_arguments: object, **_constants: object) -> None:
        self.launched += 1

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # noqa: ANN001, ANN204
        assert function is not torch.ops.aten._local_scalar_dense.default, "a value is read on the host"
        self.dispatched += function.overloadpacket.__name__ not in WITHOUT_LAUNCH
        return function(*arguments, **(keywords or {}))


def test_launches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for a tensor and a difference, one for all tensors of a dtype whose rows are alike, at most 20 to finish; nothing is read."""
    needs = Need.EVERYTHING | Need.COUNTS
    kernel, launches = TritonKernel(DEVICE), Launches(monkeypatch)
    with launches:
        kernel.add((0,), random(3, 1 << 19), needs)
        assert launches.launched == 1
        kernel.add((1,), random(40, 70), needs, random(40, 70), random(70))
        assert launches.launched == 2
        tensors = [random(n, dtype=dtype) for n in (5, 10, 4) for dtype in (torch.float32, torch.bfloat16)]
        kernel.add_all(range(6), tensors, [needs] * 6)
        assert launches.launched == 4
        for _tensor in range(100):
            kernel.add((2,), tensors[0], needs)
        assert launches.launched == 104
        launches.launched = launches.dispatched = 0
        kernel.collect(6)
        kernel.counts(HISTOGRAM, range(6))
        kernel.counts(FINE, range(6))
    assert launches.launched == 1
    assert launches.launched + launches.dispatched <= 20


def heads(layout: str) -> list[Tensor]:
    """The heads of an attention, of which each is a slice: shape ``(batch, tokens, features)``."""
    x = random(4, 3, 50, 8) if layout == "(batch, heads, tokens, features)" else random(4, 50, 3, 8).transpose(1, 2)
    return [*x.unbind(1)]


@pytest.mark.parametrize("layout", ["(batch, heads, tokens, features)", "(batch, tokens, heads, features)"])
@pytest.mark.parametrize("needs", [Need.EVERYTHING, Need.SQUARES | Need.EXTREMES])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_no_tensor_is_copied(layout: str, needs: int, scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither heads, whose elements are not in one stretch, nor what is divided by a scale; values are the textbook's."""
    divisor = None if scale is None else torch.tensor(scale, device=DEVICE)
    tensors, kernel = heads(layout), TritonKernel(DEVICE)
    with monkeypatch.context() as patch, Launches(patch) as launches:
        TritonKernel(DEVICE).add((0,), tensors[0], needs, scale=divisor)
        assert launches.dispatched == 0
        TritonKernel(DEVICE).add_all(range(3), tensors, [needs] * 3, scale=divisor)
        assert launches.dispatched <= 1  # where the tensors lie
    kernel.add((0,), tensors[0], needs, scale=divisor)
    kernel.add_all([1, 2, 3], tensors, [needs] * 3, scale=divisor)
    moments = kernel.collect(4)
    for row, tensor in enumerate([tensors[0], *tensors]):
        assert_moments(moments[:, row], [tensor / (scale or 1.0)], needs)


def test_parts_of_a_full_chunk_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of rows with parts in several chunks are the textbook's, also of tensors that share a launch or fill a chunk."""
    monkeypatch.setattr(slots, "PARTS_OF_CHUNK", 7)
    monkeypatch.setattr(triton_kernel, "num_programs_of", lambda _device: 3)
    kernel = TritonKernel(DEVICE)
    tensors = [random(4000 + 700 * seed, mean=seed, seed=seed) for seed in range(9)]
    for number, tensor in enumerate(tensors):
        kernel.add((number % 2,), tensor, Need.EVERYTHING)
        kernel.add_all([2, 3], [tensor[:50], tensor], [Need.EVERYTHING] * 2)
    moments = kernel.collect(4)
    for row, members in enumerate([tensors[::2], tensors[1::2], [tensor[:50] for tensor in tensors], tensors]):
        assert_moments(moments[:, row], [torch.cat(members)], Need.EVERYTHING & ~Need.TOKENS)


def test_parts_of_a_thousand_large_tensors_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four programs for each of the 132 multiprocessors of an H100, each with 14 numbers: 56 MiB, of which 2 MiB are there at once."""
    meta = torch.device("meta")
    with monkeypatch.context() as patch, Launches(patch) as launches, Allocated() as allocated:
        kernel = TritonKernel(meta)
        for _tensor in range(1000):
            kernel.add((0,), torch.empty(1 << 30, device=meta), Need.SQUARES)
        parts, places = kernel._parts.all()
    assert launches.launched == 1000 + 1000 // (slots.PARTS_OF_CHUNK // 528)
    assert len(places) == 1000
    assert parts.nbytes < 2 << 20
    assert allocated.num_bytes <= 4 << 20  # the chunk, what was merged, and both together


class Allocated(TorchDispatchMode):
    """Counts the bytes of float64 that are allocated."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # noqa: ANN001, ANN204
        result = function(*arguments, **(keywords or {}))
        if function.overloadpacket.__name__ in ("empty", "cat") and result.dtype is torch.float64:
            self.num_bytes += result.nbytes
        return result


def test_where_tensors_lie_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that lie where they lay in the step before cost no copy to the device; others, or others' sizes, do."""
    copied: list[int] = []
    copy = triton_kernel.copied
    monkeypatch.setattr(triton_kernel, "copied", lambda *arguments: copied.append(1) or copy(*arguments))
    memory = random(3000)
    tensors = [memory[:1000], memory[1000:]]
    for _step in range(3):
        TritonKernel(DEVICE).add_all([0, 1], tensors, [Need.MEAN] * 2)
    assert len(copied) == 1
    kernel = TritonKernel(DEVICE)
    kernel.add_all([0, 1], [memory[:1000], memory[1000:2000]], [Need.MEAN] * 2)
    assert len(copied) == 2
    assert kernel.collect(2)[0].tolist() == [1000, 1000]


def test_what_cannot_be_launched_raises_and_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table can measure the tensor otherwise: no row has a part of it."""
    kernel, x = TritonKernel(DEVICE), random(50)
    kernel.add((0,), x, Need.EVERYTHING)

    def fails(*_arguments: object, **_constants: object) -> None:
        raise RuntimeError("ptxas failed")

    with monkeypatch.context() as patch:
        patch.setattr(triton_kernel, "launch", fails)
        for add in (kernel.add, lambda rows, tensor, needs: kernel.add_all(rows, [tensor], [needs])):
            with pytest.raises(RuntimeError, match="ptxas failed"):
                add((0,), x, Need.EVERYTHING | Need.HISTOGRAM)
    assert_moments(kernel.collect(1)[:, 0], [x])
    assert not kernel.counts(HISTOGRAM, [0]).any()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_nothing_waits_for_the_device() -> None:
    """A step is measured, collected and counted without one synchronization, once the kernels are compiled."""

    def step() -> tuple[Tensor, Tensor]:
        kernel = TritonKernel(DEVICE)
        kernel.add((0,), x, needs)
        kernel.add((1,), x, needs, y, y[0])
        kernel.add_all([2, 3], [x, y], [needs] * 2)
        return kernel.collect(4), kernel.counts(HISTOGRAM, [0, 1, 2, 3])

    x, y, needs = random(300, 70), random(300, 70, seed=1), Need.EVERYTHING | Need.HISTOGRAM
    step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        moments, counts = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for row, tensor in enumerate([x, x - y - y[0], x, y]):
        assert_moments(moments[:, row], [tensor])
        assert Histogram(counts[row].long().cpu().numpy()) == histogram(tensor.cpu())


@pytest.mark.gpu
@needs_cuda
def test_tensors_of_several_streams() -> None:
    """What is added on a stream is measured in its order; collecting waits, on the device, for all of them."""
    kernel, x, matrix = TritonKernel(DEVICE), random(1 << 22), random(4096, 4096)
    torch.cuda.synchronize()
    for stream in [torch.cuda.Stream(), torch.cuda.Stream()]:
        with torch.cuda.stream(stream):
            for _time in range(50):
                matrix @ matrix  # keeps the stream busy while the host goes on
            kernel.add((0,), x, Need.EVERYTHING | Need.HISTOGRAM)
    assert_moments(kernel.collect(1)[:, 0], [x, x], rel=1e-10)
    assert kernel.counts(HISTOGRAM, [0]).sum().item() == 2 * x.numel()
