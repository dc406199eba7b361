"""A table gives every tensor to the kernel that reads it; what cannot be read fails alone."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.kernels import assert_textbook, views, without_numba
from helpers.textbook import histogram
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_module_monitor.histogram import Histogram
from lightning_module_monitor.kernels import bins_of_floats, numba_kernel, torch_kernel
from lightning_module_monitor.kernels.bins_of_floats import HISTOGRAM
from lightning_module_monitor.kernels.elements import in_memory
from lightning_module_monitor.kernels.moments import NUM_FIELDS, Moments, Need, merged
from lightning_module_monitor.kernels.table import MomentTable
from lightning_module_monitor.nonfinite.magnitudes import Magnitudes
from lightning_module_monitor.statistics.precision import divided_by_scale

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, params=["with numba", "without numba"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here is true with the compiled loops, and without them."""
    if request.param == "with numba":
        assert numba_kernel.loops() is not None, "numba is missing; pip install 'lightning-module-monitor[fast]'"
    else:
        without_numba(monkeypatch)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of the standard normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def collected(table: MomentTable, num_rows: int = 1) -> Moments:
    """The moments of the rows."""
    shares = table.collect(num_rows)
    assert all(share.shape == (NUM_FIELDS, num_rows) and share.dtype == torch.float64 for share in shares)
    return Moments(*torch.from_numpy(merged([share.numpy() for share in shares], num_rows)))


def counted(table: MomentTable, row: int = 0) -> Histogram:
    """The histogram of a row."""
    return Histogram(torch.stack([share[0] for share in table.collect_counts(HISTOGRAM, [row])]).sum(0).long().numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", views(torch.float32))
def test_any_view_is_read_right(name: str, dtype: torch.dtype) -> None:
    """However the elements lie in memory, or where there is none; alone, with others, and as a difference."""
    tensor, plain = views(dtype)[name]
    table = MomentTable()
    table.add((0, 2), tensor, Need.EVERYTHING | Need.HISTOGRAM)
    assert not table.add_all([1, 1], [tensor, tensor], [Need.EVERYTHING | Need.HISTOGRAM] * 2)
    table.add((3,), tensor, Need.EVERYTHING, tensor.neg())
    moments = collected(table, 4)
    for row, expected in enumerate([plain, torch.stack([plain, plain]), plain, plain.float() * 2]):
        assert_textbook(moments, expected, 1e-12, row=row)
    assert counted(table, 0) == counted(table, 2) == histogram(plain)
    assert counted(table, 1) == histogram(torch.stack([plain, plain]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_is_left_as_it_is(dtype: torch.dtype) -> None:
    """A tensor may be part of one, or a parameter; nothing is added to it, and it can still be differentiated."""
    parameter = nn.Parameter(normal(20, 30).to(dtype))
    output = parameter * 2
    table, node = MomentTable(), output.grad_fn
    table.add((0,), output, Need.EVERYTHING | Need.HISTOGRAM)
    table.add_all([1, 2], [output, parameter], [Need.EVERYTHING] * 2)
    table.add((3,), output, Need.EVERYTHING, parameter)
    assert output.grad_fn is node
    moments = collected(table, 4)
    assert not any(field.requires_grad for field in moments)
    for row, factor in enumerate([2, 2, 1, 1]):
        assert_textbook(moments, parameter.detach() * factor, 1e-12 if row < 3 else 1e-6, row=row)
    output.sum().backward()
    assert parameter.grad is not None


def test_precisions_of_one_row_merge() -> None:
    """A site whose calls differ in precision: every kernel has a share of the row."""
    parts = [(normal(40, 30, seed=seed) * (seed + 1) + seed).to(dtype) for seed, dtype in enumerate(DTYPES)]
    one_by_one, together = MomentTable(), MomentTable()
    for part in parts:
        one_by_one.add((0,), part, Need.EVERYTHING | Need.HISTOGRAM)
    assert not together.add_all([0] * len(parts), parts, [Need.EVERYTHING | Need.HISTOGRAM] * len(parts))
    whole = torch.cat([part.double() for part in parts])
    for table in (one_by_one, together):
        assert_textbook(collected(table), whole, 1e-12)
        assert counted(table) == histogram(whole)


def test_an_empty_tensor_changes_nothing() -> None:
    """Alone, beside others, and as a difference; nothing that is needed changes nothing either."""
    x = normal(4, 5)
    table, alone = MomentTable(), MomentTable()
    alone.add((0,), x, Need.EVERYTHING | Need.HISTOGRAM)
    empty = torch.empty(0, 5)
    table.add((0,), empty, Need.EVERYTHING | Need.HISTOGRAM)
    table.add((0,), x, Need.EVERYTHING | Need.HISTOGRAM)
    assert not table.add_all([0, 0], [empty, torch.empty(3, 0)], [Need.EVERYTHING | Need.HISTOGRAM] * 2)
    table.add((0,), empty, Need.EVERYTHING | Need.HISTOGRAM, empty)
    assert all(torch.equal(*pair) for pair in zip(collected(table), collected(alone), strict=True))
    assert counted(table) == counted(alone)
    assert all(torch.equal(*pair) for pair in zip(collected(MomentTable()), Moments.empty(1), strict=True))


def test_rows_of_a_matrix_are_merged_beside_tensors() -> None:
    """Each by its elements that count, with what it needs."""
    x = normal(3, 40)
    table, is_counted = MomentTable(), torch.arange(40) < torch.tensor([40, 10, 20]).unsqueeze(1)
    table.add((0,), x, Need.EVERYTHING)
    table.add_rows([0, 5, 0], x, is_counted, [Need.EVERYTHING, Need.EVERYTHING | Need.HISTOGRAM, Need.EVERYTHING])
    moments = collected(table, 6)
    in_0 = torch.cat([x.flatten(), x[0], x[2, :20]])
    for name, expected in (("elements", 180), ("mean", in_0.mean()), ("squares", in_0.square().sum()), ("maximum", in_0.max())):
        assert getattr(moments, name)[0].item() == pytest.approx(float(expected), rel=1e-5), name
    assert_textbook(moments, x[1, :10].unsqueeze(1), 1e-12, row=5)
    assert counted(table, 5) == histogram(x[1, :10])
    assert moments.elements[1:5].tolist() == [0] * 4


def test_a_table_can_be_copied() -> None:
    """A model that holds its monitor may be deep-copied, or pickled, in the middle of a step; each goes on by itself."""
    table = MomentTable()
    table.add((0,), torch.ones(5), Need.EVERYTHING | Need.HISTOGRAM)
    twin, other = copy.deepcopy(table), pickle.loads(pickle.dumps(table))
    for target, size in ((table, 7), (twin, 11), (other, 13)):
        target.add((0,), torch.ones(size), Need.EVERYTHING | Need.HISTOGRAM)
    assert [float(collected(target).elements[0]) for target in (table, twin, other)] == [12, 16, 18]
    assert [int(counted(target).row.sum()) for target in (table, twin, other)] == [12, 16, 18]


def test_what_a_transform_wraps_is_not_read_as_memory() -> None:
    """Under vmap and grad, and what has outlived them: the compiled loops do not take it."""
    taken: list[bool] = []
    outlived: list[Tensor] = []

    def noted(x: Tensor) -> Tensor:
        taken.append(numba_kernel.takes(x))
        outlived.append(x * 2)
        return outlived[-1]

    torch.vmap(noted)(torch.ones(3, 2))
    torch.func.grad(lambda x: noted(x).sum())(torch.ones(3))
    torch.func.functionalize(noted)(torch.ones(3))
    assert taken == [False] * 3
    assert [numba_kernel.takes(tensor) for tensor in outlived] == [False] * 3


class Elsewhere(Tensor):
    """Its elements may be anywhere."""


def given_back() -> Iterator[Tensor]:
    """Tensors of which a program that streams weights has given some of the memory back."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        whole, part = torch.ones(8, dtype=dtype), torch.ones(8, dtype=dtype)[3:]
        size = whole.untyped_storage().nbytes()
        for tensor, left in ((whole, 0), (torch.ones(8, dtype=dtype), size // 2), (part, 0)):
            tensor.untyped_storage().resize_(left)
            yield tensor
        part = torch.ones(8, dtype=dtype)[3:]
        part.untyped_storage().resize_(size // 8 * 6)  # as many bytes as its elements have, and more, but not where they are
        yield part
        matrix = torch.ones(4, 6, dtype=dtype).T
        matrix.untyped_storage().resize_(size * 3 - 1)
        yield matrix


def test_memory_that_was_given_back_is_not_read() -> None:
    """Reading it would end the process; all else of the step goes on, and no row is touched."""
    for tensor in given_back():
        table = MomentTable()
        for add in (
            lambda x, table=table: table.add((0,), x, Need.EVERYTHING),
            lambda x, table=table: table.add((0,), x, Need.EVERYTHING, None, torch.ones(1)),
            lambda x, table=table: table.add((0,), torch.ones(x.shape), Need.EVERYTHING, x),
            in_memory,
            Magnitudes().add,
            lambda x: divided_by_scale(x, torch.tensor(2.0)),
        ):
            with pytest.raises(ValueError, match="its memory was given back"):
                add(tensor)
        ((index, error),) = table.add_all([0, 0], [torch.ones(3), tensor], [Need.EVERYTHING] * 2)
        assert index == 1
        assert "its memory was given back" in str(error)
        assert collected(table).elements.tolist() == [3]


def test_what_has_no_elements_of_its_own() -> None:
    """The meta device has none, which is an error. A subclass without operations of its own, sparse and nested tensors have theirs."""
    table = MomentTable()
    with pytest.raises(ValueError, match="it is on the meta device, and has no data"):
        table.add((0,), torch.ones(3, device="meta"), Need.EVERYTHING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    others = {"subclass": torch.ones(3).as_subclass(Elsewhere), "sparse": torch.eye(3).to_sparse(), "nested": nested}
    for row, other in enumerate(others.values()):
        assert not numba_kernel.takes(other)
        table.add((row,), other, Need.EVERYTHING)
    assert collected(table, 3).elements.tolist() == [3, 9, 9]
    assert collected(table, 3).zeros.tolist() == [0, 6, 0]


def test_only_real_memory_of_a_cpu_is_read_by_compiled_loops() -> None:
    """All else goes to torch's own operations, which know what to do or raise."""
    has_numba = numba_kernel.loops() is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert numba_kernel.takes(torch.ones(3, dtype=dtype)) == has_numba
        assert numba_kernel.takes(nn.Parameter(torch.ones(3, dtype=dtype))) == has_numba
        assert numba_kernel.takes(torch.ones(3, 4, dtype=dtype).T) == has_numba
    with torch.inference_mode():
        assert numba_kernel.takes(torch.ones(3)) == has_numba
    not_memory: list[object] = [torch.ones(3, dtype=dtype) for dtype in (torch.float64, torch.int32, torch.complex64)]
    not_memory += [
        torch.ones(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.ones(3).as_subclass(Elsewhere),
        nn.UninitializedParameter(),
    ]
    not_memory += [torch._to_functional_tensor(torch.ones(3)), torch._neg_view(torch.ones(3)), None, 3, *given_back()]
    for value in not_memory:
        assert not numba_kernel.takes(value)


def test_a_table_under_inference_mode_and_after_it() -> None:
    """A step may begin in a validation loop, and go on outside of it."""
    bins_of_floats._cells_on.cache_clear()
    table, x = MomentTable(), normal(10, 6)
    with torch.inference_mode():
        table.add((0,), x.clone(), Need.EVERYTHING | Need.HISTOGRAM)
        table.add_rows([1], x.reshape(1, -1), torch.ones(1, 60, dtype=torch.bool), [Need.EVERYTHING])
    table.add((0,), x.clone().requires_grad_(), Need.EVERYTHING | Need.HISTOGRAM)
    moments = collected(table, 2)
    assert_textbook(moments, x.repeat(2, 1), 1e-12)
    assert_textbook(moments, x.reshape(-1, 1), 1e-12, row=1)
    assert counted(table) == histogram(x.repeat(2, 1))


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of a product of tensors."""

    num = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mul_.Tensor:
            self.num = max(self.num, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(60, 50), (3000,), (2, 1500), (1, 3000), (), (0, 3)], ids=str)
@pytest.mark.parametrize("is_negated", [False, True])
def test_a_product_takes_little_memory(
    shape: tuple[int, ...], is_negated: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mean is that of the whole product, of which one part after the other is made, if any."""
    monkeypatch.setattr(torch_kernel, "CPU_PORTION", 400)
    monkeypatch.setattr(numba_kernel, "PORTION", 400)
    x, y = normal(*shape).to(dtype), normal(*shape, seed=1).to(dtype)
    table = MomentTable()
    with Largest() as largest:
        for tensor, other in ((x, y), (x.T, y.T) if x.dim() == 2 else (x.clone(), y)):
            table.add_product(0, 1, tensor, other, is_negated=is_negated)
    moments = collected(table, 2)
    assert float(moments.elements[1]) == 2 * x.numel()
    if x.numel():
        mean = (-1 if is_negated else 1) * float((x.double() * y.double()).mean())
        assert float(moments.mean[1]) == pytest.approx(mean, rel=1e-12)
    assert largest.num <= 400
