"""Groups of rows that are merged on the host are those that the kernels' merge makes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_module_monitor.kernels.moments import NUM_FIELDS, Moments, Need, merged_groups
from lightning_module_monitor.kernels.torch_kernel import TorchKernel


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_merging_on_the_host_is_the_kernels_merge(bad: float | None) -> None:
    """Rows of any number of elements, also without one, and with elements that are not finite."""
    torch.manual_seed(0)
    values = torch.randn(7, 9, dtype=torch.float64) * 10.0 ** torch.arange(-3, 4).unsqueeze(1) + 5
    if bad is not None:
        values[2, 3] = bad
    counts = torch.arange(9) < torch.tensor([9, 1, 5, 0, 0, 2, 9]).unsqueeze(1)
    kernel = TorchKernel(torch.device("cpu"))
    kernel.add_rows(range(7), values, counts, [Need.EVERYTHING] * 7)
    rows = Moments(*kernel.collect(7))
    first, index = np.array([0, 1, 4]), torch.tensor([0, 1, 1, 1, 2, 2, 2])
    found = merged_groups(torch.stack(tuple(rows)).numpy(), first)
    expected = torch.stack(tuple(rows.merge(index, 3)))
    assert found.shape == (NUM_FIELDS, 3)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-12, atol=0, equal_nan=True)
    assert list(Moments(*found).elements) == [9, 6, 11]
