"""The transfer of a step's results to the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_module_monitor.kernels.elements import to_host


class Concatenated(TorchDispatchMode):
    """Notes the dtypes of what is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[list[torch.dtype]] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # noqa: ANN001, ANN204
        if function.overloadpacket is torch.ops.aten.cat:
            self.dtypes.append([tensor.dtype for tensor in arguments[0]])
        return function(*arguments, **(keywords or {}))


def test_results_arrive_in_their_order_and_shapes() -> None:
    """Float64, also those of other dtypes, of which each is cast once and not tensor by tensor; none needs a cast where all are alike."""
    tensors: list[Tensor] = []
    for number in range(50):
        tensors += [torch.tensor(number / 3), torch.full((2, 3), number, dtype=torch.int64), torch.full((4,), number / 7).double()]
    with Concatenated() as concatenated:
        arrived = to_host(tensors)
    assert [[*map(len, map(set, concatenated.dtypes))], len(concatenated.dtypes[-1])] == [[1, 1, 1, 3], 3]
    for tensor, values in zip(tensors, arrived, strict=True):
        assert values.dtype == np.float64
        np.testing.assert_array_equal(values, tensor.double().numpy(), strict=True)
    with Concatenated() as concatenated:
        assert [values.tolist() for values in to_host(tensors[::3])] == [float(np.float32(number / 3)) for number in range(50)]
    assert len(concatenated.dtypes) == 1
    with Concatenated() as concatenated:
        assert to_host(tensors[1:2])[0].shape == (2, 3)
        assert to_host([]) == []
    assert not concatenated.dtypes
