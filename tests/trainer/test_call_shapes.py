"""What the shape of a module's input shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from lightning_module_monitor.trainer.call_shapes import mixes_samples, normalizes_two_values

NORMS: list[tuple[nn.Module, Sequence[int], bool]] = [
    (nn.BatchNorm1d(3), (2, 3), True),
    (nn.BatchNorm1d(3), (1, 3, 2), True),
    (nn.BatchNorm1d(3), (2, 3, 2), False),
    (nn.BatchNorm1d(3), (3, 3), False),
    (nn.BatchNorm2d(3), (2, 3, 1, 1), True),
    (nn.BatchNorm2d(3), (2, 3, 4, 4), False),
    (nn.BatchNorm1d(3).eval(), (2, 3), False),
    (nn.GroupNorm(2, 4), (5, 4), True),
    (nn.GroupNorm(2, 4), (5, 4, 1, 1), True),
    (nn.GroupNorm(2, 4), (5, 4, 2), False),
    (nn.GroupNorm(1, 4), (5, 4), False),
    (nn.InstanceNorm1d(3), (5, 3, 2), True),
    (nn.InstanceNorm2d(3), (5, 3, 2, 2), False),
    (nn.LayerNorm(2), (5, 2), True),
    (nn.LayerNorm((1, 2)), (5, 1, 2), True),
    (nn.LayerNorm(4), (5, 4), False),
    (nn.Linear(2, 2), (2, 2), False),
]


@pytest.mark.parametrize(("norm", "shape", "expected"), NORMS)
def test_normalization_of_two_values(norm: nn.Module, shape: Sequence[int], expected: bool) -> None:
    """What is left of two values is a sign: all magnitudes of the output are the same; not of more."""
    x = 1e4 * torch.randn(shape, generator=torch.Generator().manual_seed(0))  # far from eps
    assert normalizes_two_values(norm, (x,)) is expected
    if norm.training and not isinstance(norm, nn.Linear):
        are_signs = torch.allclose(norm(x).abs(), torch.ones(()), atol=1e-2)
        assert are_signs is expected


def test_calls_without_a_tensor() -> None:
    """Are of no use."""
    assert not normalizes_two_values(nn.LayerNorm(2), ())
    assert not normalizes_two_values(nn.LayerNorm(2), ("text",))
    assert not mixes_samples(nn.GRU(2, 2), (), 4)


@pytest.mark.parametrize(("shape", "expected"), [((4, 7, 2), True), ((7, 4, 2), False), ((4, 4, 2), False)])
def test_samples_that_are_taken_for_a_sequence(shape: Sequence[int], expected: bool) -> None:
    """The first dimension has the length of the batch, and the second one has not."""
    assert mixes_samples(nn.GRU(2, 2), (torch.randn(shape),), 4) is expected
    assert not mixes_samples(nn.GRU(2, 2, batch_first=True), (torch.randn(shape),), 4)
