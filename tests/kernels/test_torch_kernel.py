"""The kernel of any device: its pieces, and how it sums where there is no float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.kernels import assert_textbook, collected, torch_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_module_monitor.kernels.moments import Moments, Need
from lightning_module_monitor.kernels.torch_kernel import FLOAT32_PIECE, widest


@pytest.mark.parametrize(
    ("kind", "is_wide"), [("cpu", True), ("cuda", True), ("mps", False), ("xpu", False), ("hpu", False), ("xla", False)]
)
def test_devices_that_may_not_have_float64(kind: str, is_wide: bool) -> None:
    """Sums there are of float32; so are they on a device that is not known."""
    assert widest(torch.device(kind)) == (torch.float64 if is_wide else torch.float32)


@pytest.mark.parametrize("wide", [torch.float64, torch.float32], ids=str)
@settings(max_examples=60, deadline=None)
@given(num_tokens=st.integers(1, 300), features=st.integers(1, 9000))
def test_pieces_cover_a_tensor_once_and_cut_no_token(wide: torch.dtype, num_tokens: int, features: int) -> None:
    """Whatever the sizes: no element is lost or counted twice, and the tokens are whole."""
    kernel = torch_kernel(portion=20_000, wide=wide)
    num_tokens = min(num_tokens, 200_000 // features + 1)
    x = torch.ones(num_tokens, features)
    kernel.add((0,), x, Need.EVERYTHING)
    moments = collected(kernel)
    assert moments.elements.tolist() == [x.numel()]
    assert moments.tokens.tolist() == [num_tokens]
    assert moments.squares.tolist() == pytest.approx([x.numel()], rel=1e-6)
    assert moments.token_norm.tolist() == pytest.approx([num_tokens * features**0.5], rel=1e-5)
    assert moments.token_rms.tolist() == pytest.approx([num_tokens], rel=1e-5)


@pytest.mark.parametrize("wide", [torch.float64, torch.float32], ids=str)
def test_elements_of_rows_that_do_not_count_are_left_out(wide: torch.dtype) -> None:
    """Each row's moments are those of its counting elements; a row without any is the identity of merging."""
    values = torch.tensor([[1.0, -2.0, 0.0, torch.nan], [5.0, torch.nan, 7.0, torch.inf], [1.0, 1.0, 1.0, 1.0]])
    counts = torch.tensor([[True, True, True, False], [True, False, True, True], [False] * 4])
    kernel, only_mean = torch_kernel(wide=wide), torch_kernel(wide=wide)
    kernel.add_rows(range(3), values, counts, [Need.EVERYTHING] * 3)
    rows = [dict(zip(Moments._fields, row, strict=True)) for row in kernel.collect(3).T.tolist()]
    assert rows[2] == dict.fromkeys(Moments._fields, 0.0) | {"maximum": -math.inf, "minimum": math.inf}
    assert rows[0] == pytest.approx(
        {
            "elements": 3, "mean": -1 / 3, "squares": 5, "deviations": 5 - 1 / 3, "third": -20 / 9, "fourth": 98 / 9,
            "magnitude": 3, "maximum": 1, "minimum": -2, "zeros": 1,
            "nonfinite": 0, "tokens": 3, "token_norm": 3, "token_rms": 3,
        }, rel=1e-6 if wide == torch.float64 else 1e-5,
    )  # fmt: skip
    assert (rows[1]["elements"], rows[1]["nonfinite"], rows[1]["minimum"], rows[1]["maximum"]) == (3, 1, 5, math.inf)
    only_mean.add_rows(range(3), values, counts, [Need.MEAN] * 3)
    moments = Moments(*only_mean.collect(3))
    assert moments.mean[0].item() == pytest.approx(-1 / 3)
    assert not moments.magnitude.any()


class Dtypes(TorchDispatchMode):
    """Notes what dtypes and operations there are."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.names: set[str] = set()
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operations += 1
        self.names.add(func.__name__.partition(".")[0])
        self.dtypes |= {
            value.dtype for value in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(value, torch.Tensor)
        }
        return result


HOST_READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select", "unique"}


@pytest.mark.parametrize("wide", [torch.float64, torch.float32], ids=str)
def test_measuring_reads_nothing_on_the_host(wide: torch.dtype) -> None:
    """And makes no float64 where the device has none."""
    kernel, x = torch_kernel(wide=wide), torch.randn(70, 300)
    with Dtypes() as actual:
        kernel.add((0, 1), x, Need.EVERYTHING)
        kernel.add_all([2, 3, 4], [x, x, x.bfloat16()], [Need.EVERYTHING] * 3)
        kernel.add((5,), x, Need.EVERYTHING, x + 1, x[0])
    assert not actual.names & HOST_READS
    assert (torch.float64 in actual.dtypes) == (wide == torch.float64)


@pytest.mark.parametrize(("size", "most"), [(1, 20), (1 << 17, 20), (1 << 20, 160)])
def test_a_portion_takes_few_operations(size: int, most: int) -> None:
    """On an accelerator each is a launch at least, and on a CPU it costs more than to read ten thousand elements."""
    kernel, x = torch_kernel(), torch.randn(size)
    with Dtypes() as actual:
        kernel.add((0,), x, Need.MEAN | Need.DEVIATIONS | Need.SQUARES | Need.MAGNITUDE | Need.EXTREMES)
    assert actual.num_operations <= most


def test_where_there_is_no_float64_pieces_are_scaled_into_float32() -> None:
    """Squares of 1e30 and of 1e-30 leave float32; each piece is scaled by a power of two of its own."""
    x = torch.randn(5 * FLOAT32_PIECE, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([1.0, 1e30, 1e-30, 1e-10, 3e37]).repeat_interleave(FLOAT32_PIECE)
    kernel = torch_kernel(wide=torch.float32)
    kernel.add((0,), x, Need.EVERYTHING)
    for piece, part in enumerate(x.split(FLOAT32_PIECE)):
        kernel.add((1 + piece,), part, Need.EVERYTHING)
    moments = collected(kernel, 6)
    assert_textbook(moments, x.view(-1, 1), 1e-5, ["mean", "std", "norm", "rms", "min", "max", "abs_mean"])
    for piece, part in enumerate(x.split(FLOAT32_PIECE)):
        assert_textbook(moments, part, 1e-5, row=1 + piece)
