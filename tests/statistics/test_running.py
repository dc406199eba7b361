"""The compiled kernel: what it reads, what it leaves to torch's own operations, and what happens without it."""

from __future__ import annotations

import copy
import ctypes
import datetime
import logging
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch
from helpers.textbook import PLAIN, histogram, textbook
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_module_monitor import STATISTICS, ModuleMonitor, Rule, Statistic
from lightning_module_monitor.statistics import compiled, dlpack, running
from lightning_module_monitor.statistics.loss_scale import unscaled
from lightning_module_monitor.statistics.magnitudes import Magnitudes
from lightning_module_monitor.statistics.moments import HostMoments, Moments, Need
from lightning_module_monitor.statistics.observation import Observation
from lightning_module_monitor.statistics.rows import Rows
from lightning_module_monitor.statistics.running import RunningRows, in_memory, takes
from lightning_module_monitor.statistics.watch import Watch


def finished(moments: Moments, row: int = 0) -> dict[str, float]:
    """Every plain statistic of a row."""
    found = {}
    for name in PLAIN:
        statistic = STATISTICS[name]
        assert isinstance(statistic, Statistic)
        with np.errstate(all="ignore"):
            found[name] = float(statistic.finish(HostMoments(*(field[row : row + 1].numpy() for field in moments)))[0])
    return found


def assert_textbook(moments: Moments, tensor: Tensor, row: int = 0, *, has_tokens: bool = True) -> None:
    """All statistics as their formulas say, to the last digits of float64."""
    for name, value in finished(moments, row).items():
        if name.startswith("token") and not has_tokens:
            continue
        # A mean near zero is as right as the magnitudes that it is a sum of.
        near = 1e-14 * (1 + textbook("abs_mean", tensor)) if name == "mean" else 1e-14
        assert value == pytest.approx(textbook(name, tensor), rel=1e-12, abs=near, nan_ok=True), name


def test_the_kernels_numbers_are_those_of_moments_and_needs() -> None:
    """They stand in its file, so that a change of one is a change of the file, which numba's cache looks at."""
    fields = [getattr(compiled, name.upper()) for name in Moments._fields]
    assert fields == list(range(compiled.NUM_FIELDS)) == list(range(running.NUM_FIELDS))
    assert compiled.NEED_SQUARES == Need.SQUARES
    assert compiled.NEED_EXTREMES == Need.EXTREMES
    assert compiled.NEED_ZEROS == Need.ZEROS
    assert compiled.NEED_TOKENS == Need.TOKENS
    assert compiled.NEED_SUMS == Need.MEAN | Need.DEVIATIONS | Need.MAGNITUDE
    assert compiled.NEED_ORDER == Need.EXTREMES | Need.ZEROS | Need.NONFINITE
    formats = {torch.float32: compiled.FLOAT32, torch.bfloat16: compiled.BFLOAT16, torch.float16: compiled.FLOAT16}
    assert formats == running.ELEMENT_FORMATS


def normal(*shape: int) -> Tensor:
    """Numbers of the standard normal distribution, some of them zero."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return torch.where(x.abs() < 0.05, 0.0, x)


VIEWS = {
    "transposed": normal(70, 90).T,
    "every third": normal(40, 300)[:, ::3],
    "expanded": normal(1, 50).expand(20, 50),
    "channels last": normal(3, 5, 7, 9).to(memory_format=torch.channels_last),
    "negated by a flag": torch._neg_view(normal(30, 40)),
    "zeros without memory": torch._efficientzerotensor((6, 5)),
    "one element": normal(1, 1),
    "with a graph": (normal(20, 30).requires_grad_() * 2),
    "a parameter": nn.Parameter(normal(20, 30)),
    "in another place of its storage": normal(1000)[17:900],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("together", [False, True])
def test_any_view_is_read_right(name: str, together: bool) -> None:
    """However the elements lie in memory."""
    tensor = VIEWS[name]
    assert takes(tensor)
    rows = RunningRows()
    if together:
        rows.add_all([(0, tensor, Need.EVERYTHING), (1, tensor, Need.EVERYTHING)])
    else:
        rows.add(0, tensor, Need.EVERYTHING)
        rows.add_last_again(1)
    for row in (0, 1):
        expected = tensor.detach().resolve_neg().reshape(tensor.shape)
        if name != "one element":
            assert_textbook(Moments(*rows.moments(2)), expected, row)
        else:
            assert finished(Moments(*rows.moments(2)), row)["norm"] == pytest.approx(abs(float(expected)), rel=1e-12)


def with_first(count: int, value: float) -> Tensor:
    """Numbers of which the first ones are others."""
    x = normal(100, 100)
    x.view(-1)[:count] = value
    return x


HARD = {
    "sorted": normal(100, 100).flatten().sort().values,
    "in steps": torch.arange(10_000.0).div(64, rounding_mode="floor"),
    "constant": torch.full((90, 100), 0.1),
    "zeros": torch.zeros(50, 100),
    "zeros of both signs": torch.tensor([0.0, -0.0]).repeat(3000),
    "large mean": normal(100, 100) * 1e-2 + 1e4,
    "an outlier at first": with_first(1, 1e6),
    "outliers at first": with_first(64, -1e5),
    "outliers where the center is sought": torch.cat([with_first(1, 1e6).flatten(), torch.tensor([-1e6, 1e6])]),
    "a chunk between outliers": torch.cat([torch.tensor([3e38]), normal(4094), torch.tensor([3e38])]),
    "zeros at first": with_first(500, 0.0),
    "huge": normal(100, 100) * 1e37,
    "squares leave float32": normal(100, 100) * 1e25,
    "tiny": normal(100, 100) * 1e-30,
    "subnormal": normal(100, 100) * 1e-41,
    "two tiny ones": torch.tensor([1e-30, -1e-30]).repeat(2500),
    "all negative": -normal(100, 100).abs() - 1,
    "all positive": normal(100, 100).abs() + 1,
    "NaN": with_first(1, float("nan")),
    "NaN of the other sign": torch.cat([normal(5000), torch.tensor([-1], dtype=torch.int32).view(torch.float32)]),
    "infinite": with_first(2, float("inf")),
    "infinite downwards": -with_first(3, float("inf")),
    "both infinities": torch.cat([with_first(2, float("inf")).flatten(), torch.tensor([-float("inf")])]),
    "a chunk and one more": normal(4097),
    "a long chunk and one more": normal(16385),
    "three long chunks": normal(3, 16384),
    "a long chunk between outliers": torch.cat([torch.tensor([3e38]), normal(16382), torch.tensor([3e38]), normal(300)]),
    "a NaN in the last of long chunks": torch.cat([normal(40000), torch.tensor([float("nan")])]),
    "fewer than the sample": normal(13),
    "one": torch.tensor([-2.5]),
}


WITHOUT_TOKENS = Need.EVERYTHING & ~Need.TOKENS
"""What is read in long chunks."""


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("needs", [Need.EVERYTHING, WITHOUT_TOKENS, Need.SQUARES, Need.EXTREMES, Need.ZEROS | Need.NONFINITE])
def test_numbers_that_float32_is_too_small_for(name: str, needs: int) -> None:
    """Their squares leave it, their mean hides their spread, they are not finite, or they are few."""
    tensor = HARD[name]
    rows = RunningRows()
    rows.add(0, tensor, needs)
    if needs in (Need.EVERYTHING, WITHOUT_TOKENS):
        assert_textbook(Moments(*rows.moments(1)), tensor, has_tokens=needs == Need.EVERYTHING)
        return
    of_needs = {Need.SQUARES: ["norm", "rms"], Need.EXTREMES: ["min", "max", "abs_max"]}.get(needs, ["zero_fraction", "nonfinite_count"])
    for one in of_needs:
        assert finished(Moments(*rows.moments(1)))[one] == pytest.approx(textbook(one, tensor), rel=1e-12, nan_ok=True), one


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_of_half_precision_is_widened_exactly(dtype: torch.dtype) -> None:
    """All 65,536, each so many times that vectors and what they leave over are both there: their mean, largest and smallest."""
    repeats = 67
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    tensor = numbers.unsqueeze(1).expand(-1, repeats).contiguous()
    place, element_format = tensor.data_ptr(), running.ELEMENT_FORMATS[dtype]
    rows = RunningRows()
    for row in range(len(numbers)):
        rows.add_at(row, place + row * repeats * 2, element_format, repeats, 1, Need.MEAN | Need.EXTREMES)
    moments, expected = Moments(*rows.moments(len(numbers))), numbers.double()
    assert torch.equal(moments.mean.nan_to_num(7.0), expected.nan_to_num(7.0))
    is_number = ~expected.isnan()
    for found in (moments.maximum, moments.minimum):
        assert bool(found[~is_number].isnan().all())
        # As bits: zeros have a sign.
        assert torch.equal(found[is_number].view(torch.int64), expected[is_number].view(torch.int64))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_hard_numbers_in_half_precision(dtype: torch.dtype) -> None:
    """What float32 is too small for, as far as half precision has it: rounded, infinite, or zero; subnormal; in odd numbers."""
    for wide in HARD.values():
        tensor = wide.to(dtype)
        rows = RunningRows()
        rows.add(0, tensor, Need.EVERYTHING)
        assert_textbook(Moments(*rows.moments(1)), tensor)


SOME = {
    "all": (
        Need.MEAN | Need.DEVIATIONS | Need.MAGNITUDE | Need.SQUARES | Need.EXTREMES | Need.ZEROS,
        ["mean", "std", "norm", "min", "zero_fraction"],
    ),
    "sums": (Need.MEAN | Need.DEVIATIONS | Need.MAGNITUDE | Need.SQUARES, ["mean", "std", "abs_mean", "rms"]),
    "deviations": (Need.DEVIATIONS, ["std", "var"]),
    "order": (Need.EXTREMES | Need.ZEROS | Need.NONFINITE, ["min", "max", "abs_max", "zero_fraction", "nonfinite_count"]),
    "order and squares": (Need.EXTREMES | Need.SQUARES, ["min", "max", "norm"]),
    "squares": (Need.SQUARES, ["norm"]),
}
"""What loops over vectors there are, with statistics that each is for."""


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("some", SOME)
def test_what_vectors_leave_over_counts_too(some: str, dtype: torch.dtype) -> None:
    """Any number of elements, the last one the largest or the smallest, and not aligned to anything."""
    needs, names = SOME[some]
    numbers = normal(5000).to(dtype)
    for size in [*range(1, 52), 4095, 4096, 4097, 4096 + 16, 4096 + 33]:
        for last in (9.0, -9.0):
            tensor = numbers[7 : 7 + size].clone()
            tensor[-1] = last
            shifted = torch.cat([numbers[:3], tensor])[3:]
            rows = RunningRows()
            rows.add(0, shifted, needs)
            found = finished(Moments(*rows.moments(1)))
            for name in names:
                expected = textbook(name, tensor)
                assert found[name] == pytest.approx(expected, rel=1e-12, abs=1e-13, nan_ok=True), (size, name)


TOKENS = [(3, 5000), (1, 9000), (2, 4096), (5, 4097), (700, 13), (4097, 1), (33, 7), (1, 1, 2), (2,)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("shape", TOKENS, ids=str)
def test_tokens_that_chunks_cut(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A token may be longer than a chunk, or lie in two, or end with one."""
    tensor = normal(*shape).to(dtype)
    rows = RunningRows()
    rows.add(0, tensor, Need.EVERYTHING)
    assert_textbook(Moments(*rows.moments(1)), tensor)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_parts_of_other_precisions_merge(dtype: torch.dtype) -> None:
    """A site whose calls differ in precision, as under autocast; and the tensor that was added last, once more."""
    first, second = normal(50, 300), (normal(70, 300) * 3 + 100).to(dtype)
    rows = RunningRows()
    rows.add(0, first, Need.EVERYTHING)
    rows.add(0, second, Need.EVERYTHING)
    rows.add_last_again(1)
    assert_textbook(Moments(*rows.moments(2)), torch.cat([first, second.float()]))
    assert_textbook(Moments(*rows.moments(2)), second, row=1)


class Operations(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_what_lies_in_order_is_read_where_it_lies(dtype: torch.dtype) -> None:
    """By no operation of torch's: alone and with others, for moments and histograms."""
    tensor = normal(50, 300).to(dtype)
    norm = STATISTICS["norm"]
    assert isinstance(norm, Statistic)
    read, measured = (Watch("activation", site, statistics={"norm": norm}) for site in ("read", "measured"))
    counted = Watch("activation", "counted", statistics={"norm": norm}, histograms={"hist": None})
    rows = Rows()
    observation, place = Observation(lambda *_trouble: None, rows), rows.place(read, may_be_returned=True)
    observation.observe(counted, tensor)  # which makes the rows
    assert place is not None
    assert rows.place(counted) is None
    with Operations() as operations:
        assert observation.read(place, tensor)
        observation.measure_all([(measured, tensor), (measured, tensor)])
        observation.observe(counted, tensor)
    assert operations.names == []
    expected = textbook("norm", tensor)
    assert observation.collect() == {
        read.key("norm"): pytest.approx(expected, rel=1e-12),
        measured.key("norm"): pytest.approx(2**0.5 * expected, rel=1e-12),
        counted.key("norm"): pytest.approx(2**0.5 * expected, rel=1e-12),
    }
    assert observation.histograms == {counted.key("hist"): histogram(torch.cat([tensor, tensor]))}


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_what_is_out_of_order_is_copied_as_it_is(dtype: torch.dtype) -> None:
    """Into its own precision, by one operation."""
    tensor = normal(301, 130).to(dtype).T
    rows = RunningRows()
    with Operations() as operations:
        rows.add(0, tensor, Need.EVERYTHING)
    assert [name for name in operations.names if name != "detach"] == ["clone"]
    rows.add_last_again(1)
    for row in (0, 1):
        assert_textbook(Moments(*rows.moments(2)), tensor, row)


def test_more_rows_than_there_were_at_first() -> None:
    """Rows are added as sites turn up, in any order, and what was in them stays."""
    rows = RunningRows()
    numbers = [0, 5000, 300, 255, 256, 10_000]
    for number in numbers:
        rows.add(number, torch.full((3,), float(number + 1)), Need.MEAN)
    rows.add_last_again(20_000)
    moments = Moments(*rows.moments(20_001))
    assert [float(moments.mean[number]) for number in numbers] == [number + 1 for number in numbers]
    assert float(moments.mean[20_000]) == 10_001
    assert float(moments.elements.sum()) == 3 * (len(numbers) + 1)


def test_the_first_tensor_may_come_within_a_transform() -> None:
    """What torch makes there has no memory; a tensor from outside has."""
    made, outside = [], torch.full((3,), 2.0)

    def function(x: Tensor) -> Tensor:
        made.append(RunningRows())
        made[0].add(0, outside, Need.MEAN)
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert float(Moments(*made[0].moments(1)).mean[0]) == 2


def test_only_real_memory_of_a_cpu_is_read() -> None:
    """All else goes to torch's own operations, which know what to do or raise."""
    assert takes(torch.ones(3))
    assert takes(torch.ones(3, dtype=torch.bfloat16))
    assert not takes(torch.ones(3, dtype=torch.float64))
    assert not takes(torch.ones(3, device="meta"))

    class Elsewhere(Tensor):
        pass

    assert not takes(torch.ones(3).as_subclass(Elsewhere))


def readable() -> dict[str, Tensor]:
    """Plain float32 tensors in order, of every sort."""
    whole = torch.arange(30, dtype=torch.float32)
    with torch.inference_mode():
        inference = torch.arange(3.0)
    return {
        "plain": whole,
        "parameter": nn.Parameter(whole.clone()),
        "of a graph": nn.Parameter(whole.clone()) * 2,
        "part": whole[7:],
        "matrix": whole.view(5, 6)[2:4],
        "single row": torch.ones(4, 6)[1:2],
        "single element of a matrix": torch.arange(24.0).view(4, 6)[2:3, 3:4],
        "single": torch.tensor(3.0),
        "many dimensions": torch.arange(8.0).view(1, 2, 1, 2, 1, 2),
        "inference": inference,
        "sharing": torch._lazy_clone(whole),
    }


def test_the_address_of_what_can_be_read_is_that_of_the_first_element() -> None:
    """Of everything that is a plain float32 tensor in order."""
    for name, tensor in readable().items():
        found = ctypes.c_float.from_address(running.readable_address(tensor)).value
        assert found == tensor.detach().flatten()[0].item(), name


@pytest.fixture(params=[True, False], ids=["looks", "is told"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernel looks at tensors itself, or is told an address, as where torch has no function for it."""
    if request.param and not dlpack.description_function():
        pytest.skip("this version of torch has no such function")
    if not request.param:
        monkeypatch.setattr(dlpack, "description_function", lambda: 0)
    return bool(request.param)


def test_what_can_be_read_is_taken(looks: bool) -> None:
    """In any precision; what shares its memory until somebody writes keeps its values."""
    tensors = list(readable().values())
    tensors += [normal(50, 300).to(dtype)[3:] for dtype in HALVES]
    rows, start = RunningRows(), 2 * running.FIRST_CAPACITY
    assert rows._can_look is looks
    assert all(rows.take(start + place, tensor, Need.EVERYTHING) for place, tensor in enumerate(tensors))
    rows.add_last_again(0)
    moments = Moments(*rows.moments(start + len(tensors)))
    for place, tensor in enumerate(tensors):
        assert_textbook(moments, tensor.detach(), start + place)
    assert_textbook(moments, tensors[-1])


def test_what_can_be_read_is_taken_all_at_once(looks: bool) -> None:
    """What cannot be read is said not to be, and keeps no other from being read; nor is what has no place in memory."""
    good, bad = list(readable().values()), unreadable()
    without_memory = ["empty", "meta", "given back", "given back in part", "part of what was given back in part", "zeros without memory"]
    for names in (["double", "integer", "complex", "out of order", "repeated", *without_memory], []):
        tensors = [*good, *(bad[name] for name in names), normal(90, 11)]
        rows = RunningRows()
        rows.reserve(300 + len(tensors))
        numbers = np.arange(300, 300 + len(tensors))[::-1].copy()
        taken = rows.take_all(numbers, tensors, np.full(len(tensors), Need.EVERYTHING))
        assert taken == ([1] * len(good) + [0] * len(names) + [1] if looks else [0] * len(tensors))
        moments = Moments(*rows.moments(300 + len(tensors)))
        for row, tensor, is_taken in zip(numbers, tensors, taken, strict=True):
            assert float(moments.elements[row]) == (tensor.numel() if is_taken and isinstance(tensor, Tensor) else 0)
            if is_taken and isinstance(tensor, Tensor):
                assert_textbook(moments, tensor.detach(), int(row))
    for name in ("nothing", "number", "sparse", "subclass", "negated by a flag, in order", "without a shape", "outlived vmap", "fake"):
        rows = RunningRows()
        assert rows.take_all(np.arange(2), [normal(5), bad[name]], np.full(2, Need.EVERYTHING)) == [0, 0], name
        assert Moments(*rows.moments(2)).elements.tolist() == [0, 0]


def test_half_precision_has_an_address_where_it_is_asked_for() -> None:
    """Kernels that read float32 alone do not get it; an element takes two bytes of its storage, no more."""
    for dtype in HALVES:
        tensor = torch.ones(8, dtype=dtype)
        assert running.readable_address(tensor) == 0
        assert running.readable_address(tensor, running.ELEMENT_FORMATS) == tensor.data_ptr()
        assert running.readable_address(tensor[3:], running.ELEMENT_FORMATS) == tensor.data_ptr() + 6
        tensor.untyped_storage().resize_(14)
        assert running.readable_address(tensor, running.ELEMENT_FORMATS) == 0


class Elsewhere(Tensor):
    """Its elements may be anywhere."""


def unreadable() -> dict[str, object]:
    """What a kernel of float32 must not read: it would give other numbers, or end the process."""
    given_back, shrunk, part = torch.ones(8), torch.ones(8), torch.ones(8)[3:]
    given_back.untyped_storage().resize_(0)
    shrunk.untyped_storage().resize_(16)
    part.untyped_storage().resize_(0)
    shrunk_part = torch.ones(8)[3:]
    shrunk_part.untyped_storage().resize_(24)  # as many bytes as its elements have, and more, but not where they are
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    negative = torch.ones(1, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    outlived: list[Tensor] = []
    torch.vmap(lambda x: (outlived.append(x * 2), x)[1])(torch.ones(3, 2))
    torch.func.grad(lambda x: (outlived.append(x * 2), x.sum())[1])(torch.ones(3))
    with FakeTensorMode():
        fake = torch.empty(3)
    return {
        "nothing": None,
        "number": 3,
        "double": torch.ones(3, dtype=torch.float64),
        "integer": torch.ones(3, dtype=torch.int32),
        "complex": torch.ones(3, dtype=torch.complex64),
        "out of order": torch.ones(3, 2).t(),
        "channels last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "repeated": torch.ones(1).expand(4),
        "empty": torch.empty(0, 3),
        "meta": torch.ones(3, device="meta"),
        "fake": fake,
        "sparse": torch.eye(3).to_sparse(),
        "negated by a flag": negative,
        "negated by a flag, in order": torch._neg_view(torch.ones(3)),
        "zeros without memory": torch._efficientzerotensor((3,)),
        "part of zeros without memory": torch._efficientzerotensor((8, 4))[4:],
        "functional": torch._to_functional_tensor(torch.ones(3)),
        "subclass": torch.ones(3).as_subclass(Elsewhere),
        "nested": nested,
        "without a shape": nn.UninitializedParameter(),
        "given back": given_back,
        "given back in part": shrunk,
        "part of what was given back": part,
        "part of what was given back in part": shrunk_part,
        "outlived vmap": outlived[0],
        "outlived grad": outlived[1],
    }


def test_what_does_not_lie_in_memory_as_it_seems_has_no_address_to_read() -> None:
    """Reading it all the same would give other numbers, or end the process."""
    for name, value in unreadable().items():
        assert running.readable_address(value) == 0, name
    assert running.readable_address(torch.ones(3, dtype=torch.bfloat16)) == 0

    addresses: list[int] = []

    def noted(x: Tensor) -> Tensor:
        addresses.append(running.readable_address(x))
        return x * 2

    torch.vmap(noted)(torch.ones(3, 2))
    torch.func.grad(lambda x: noted(x).sum())(torch.ones(3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.trace.* is deprecated", DeprecationWarning)
        torch.jit.trace(noted, torch.ones(3), check_trace=False)
    assert addresses == [0, 0, 0]


def test_operations_of_torch_get_nothing_whose_memory_was_given_back() -> None:
    """They would read on; of any other tensor they know themselves what to do."""
    others = unreadable()
    for name in [name for name in others if "given back" in name]:
        tensor = others.pop(name)
        assert isinstance(tensor, Tensor)
        for read in (in_memory, Magnitudes().add, lambda one: unscaled(one, torch.tensor(2.0))):
            with pytest.raises(ValueError, match="its memory was given back"):
                read(tensor)
    assert all(in_memory(one) is one for one in others.values() if isinstance(one, Tensor))


def test_what_does_not_lie_in_memory_as_it_seems_is_not_taken(looks: bool) -> None:
    """Nor is an error left behind, or a row touched."""
    rows, taken = RunningRows(), []
    for name, value in unreadable().items():
        assert not rows.take(0, value, Need.EVERYTHING), name

    def noted(x: Tensor) -> Tensor:
        taken.append(rows.take(0, x, Need.EVERYTHING))
        return x * 2

    torch.vmap(noted)(torch.ones(3, 2))
    torch.func.grad(lambda x: noted(x).sum())(torch.ones(3))
    torch.func.functionalize(noted)(torch.ones(3))
    assert taken == [False] * 3
    assert rows._can_look is looks
    assert Moments(*rows.moments(1)).elements.tolist() == [0]


@pytest.mark.parametrize("table", [None, "no capsule", datetime.datetime_CAPI])
def test_where_torch_has_no_function_for_it_there_is_no_address(monkeypatch: pytest.MonkeyPatch, table: object) -> None:
    """Nothing, what is no table, or a capsule of something else: then tensors are read all the same, by what Python tells of them."""
    monkeypatch.setattr(Tensor, "__dlpack_c_exchange_api__", table, raising=False)
    dlpack.description_function.cache_clear()
    try:
        assert dlpack.description_function() == 0
        rows = RunningRows()
        assert rows.take(0, torch.full((3,), 2.0), Need.EVERYTHING)
        assert_textbook(Moments(*rows.moments(1)), torch.full((3,), 2.0))
    finally:
        dlpack.description_function.cache_clear()


def test_what_is_traced_is_taken_and_leaves_no_trace() -> None:
    """While torch.jit traces, sizes are tensors in Python, and numbers to the kernel."""
    rows = RunningRows()

    def doubled(x: Tensor) -> Tensor:
        y = x * 2
        assert rows.take(0, y[1:], Need.EVERYTHING)
        return y

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.trace.* is deprecated", DeprecationWarning)
        traced = torch.jit.trace(doubled, torch.ones(3), check_trace=False)
    assert_textbook(Moments(*rows.moments(1)), torch.full((2,), 2.0))
    assert [node.kind() for node in traced.graph.nodes()] == ["prim::Constant", "aten::mul"]


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The kernel is looked for anew, before and after."""
    monkeypatch.delitem(sys.modules, "lightning_module_monitor.statistics.compiled", raising=False)
    monkeypatch.delattr(sys.modules["lightning_module_monitor.statistics"], "compiled", raising=False)
    running.kernel.cache_clear()
    yield monkeypatch
    running.kernel.cache_clear()


def observed() -> dict[str, float]:
    """Values of one forward pass."""
    statistics = [name for name in PLAIN if name != "nonfinite_count"]
    with ModuleMonitor(rules=[Rule(kinds=["activation", "parameter"], statistics=statistics)]) as monitor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 70))
        monitor.set_module(model)
        monitor.begin_step(0)
        model(normal(33, 8))
        monitor.monitor_parameters()
        record = monitor.end_step()
    assert record is not None
    return dict(record.values)


def test_without_numba_the_values_are_the_same(without_kernel: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The extra makes it faster, not other."""
    with_numba = observed()
    running.kernel.cache_clear()
    without_kernel.delitem(sys.modules, "lightning_module_monitor.statistics.compiled")
    without_kernel.delattr(sys.modules["lightning_module_monitor.statistics"], "compiled")
    without_kernel.setitem(sys.modules, "numba", None)
    with caplog.at_level(logging.WARNING):
        without = observed()
    assert running.kernel() is None
    assert not caplog.records
    assert without == pytest.approx(with_numba, rel=1e-6, abs=1e-7)
    assert without != with_numba, "the second run used the kernel, too"


@pytest.mark.parametrize("reason", ["switched off", "another numpy"])
def test_a_numba_that_does_not_work_is_said(reason: str, without_kernel: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its just-in-time compiler may be switched off, for a debugger; or it does not go with the installed numpy."""
    if reason == "switched off":
        without_kernel.setattr(numba.config, "DISABLE_JIT", 1)
    else:

        class Refuses:
            def find_spec(self, name: str, *_more: object) -> None:
                if name == "numba":
                    raise ImportError("Numba needs NumPy 2.2 or less.")

        for name in [name for name in sys.modules if name.partition(".")[0] == "numba"]:
            without_kernel.delitem(sys.modules, name)
        without_kernel.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    with caplog.at_level(logging.WARNING):
        values = observed()
    assert values["activation/0/norm"] > 0
    (message,) = [record.getMessage() for record in caplog.records]
    assert ("NUMBA_DISABLE_JIT is set" if reason == "switched off" else "Numba needs NumPy 2.2 or less.") in message


def test_rows_can_be_copied() -> None:
    """A model that holds its monitor may be deep-copied in the middle of a step."""
    rows = RunningRows()
    rows.add(0, torch.ones(5), Need.EVERYTHING)
    twin = copy.deepcopy(rows)
    rows.add(0, torch.ones(7), Need.EVERYTHING)
    assert float(Moments(*twin.moments(1)).elements[0]) == 5
    other = pickle.loads(pickle.dumps(twin))
    assert Moments(*other.moments(1)).squares[0] == 5
    # Each goes on in memory of its own.
    twin.take(0, torch.ones(11), Need.EVERYTHING)
    other.add(0, torch.ones(13), Need.EVERYTHING)
    other.add_last_again(1)
    assert [Moments(*one.moments(2)).elements.tolist() for one in (rows, twin, other)] == [[12, 0], [16, 0], [18, 13]]


def test_a_kernel_that_cannot_be_compiled_is_said_once(without_kernel: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No place for numba's cache, say; training goes on."""

    class Broken:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("cannot cache function '_add': no locator available")

    without_kernel.setitem(sys.modules, "numba", Broken())  # type: ignore[arg-type]  # stands for a numba that does not work
    with caplog.at_level(logging.WARNING):
        values = observed(), observed()
    assert values[0] == values[1]
    assert values[0]["activation/0/norm"] > 0
    assert [record.getMessage() for record in caplog.records] == [
        "The compiled kernel is not used (RuntimeError: cannot cache function '_add': no locator available); "
        "monitoring costs more without it."
    ]
