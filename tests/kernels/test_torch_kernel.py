"""The kernel of any device: its pieces, and how it sums where there is no float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.kernels import assert_textbook, collected, torch_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.torch_kernel import FLOAT32_PIECE, has_float64


def test_apples_devices_alone_have_no_float64() -> None:
    """The others sum in it."""
    assert [has_float64(torch.device(name)) for name in ("cpu", "cuda", "xpu", "mps")] == [True, True, True, False]


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
