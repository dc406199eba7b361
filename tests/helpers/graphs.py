"""What nodes of autograd's graph know."""

from __future__ import annotations

import pytest
import torch


def needs_node_shapes() -> None:
    """Skip a test if nodes do not know the shapes of their results, so that the targets of a loss are not found."""
    if not hasattr(torch.ones(2, requires_grad=True).exp().grad_fn, "_input_metadata"):
        pytest.skip(f"nodes of the graph have no shapes in torch {torch.__version__}")
