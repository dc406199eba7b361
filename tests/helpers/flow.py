"""The gradient at the outputs of blocks, by ``torch.autograd.grad`` in float64: the truth that gradient flow is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

NORM_FORMULAS: dict[str, Callable[[np.ndarray], float]] = {
    "l2": lambda g: float(np.sqrt((g**2).sum())),
    "l1": lambda g: float(np.abs(g).sum()),
    "linf": lambda g: float(np.abs(g).max()),
    "mean": lambda g: float(np.abs(g).mean()),
}
"""Each norm by its formula, in numpy's float64."""


class Block(nn.Module):
    """A layer that changes the gradient: a linear map and a tanh, beside a residual path."""

    def __init__(self, width: int = 6, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.3 + self.scale * torch.tanh(self.linear(x))


def chain(num_blocks: int = 4, seed: int = 0) -> list[nn.Module]:
    """Blocks of different strength, always the same."""
    torch.manual_seed(seed)
    return [Block(scale=0.4 * (i + 1)) for i in range(num_blocks)]


def batch(size: int, seed: int = 3, width: int = 6) -> Tensor:
    """An input of shape (size, 6), always the same."""
    return torch.randn(size, width, generator=torch.Generator().manual_seed(seed + size))


def loss_of(h: Tensor) -> Tensor:
    """Any loss that is not symmetric in its elements."""
    return (h * torch.arange(1.0, h.numel() + 1, dtype=h.dtype).view_as(h)).pow(2).mean()


def true_gradients(blocks: Sequence[nn.Module], x: Tensor, loss_fn: Callable[[Tensor], Tensor] = loss_of) -> list[np.ndarray | None]:
    """Gradient of the loss with respect to the output of each block of a plain chain; ``None`` where there is none."""
    twins = copy.deepcopy(nn.ModuleList(blocks)).double()
    outputs = []
    h = x.detach().double().requires_grad_(x.requires_grad)
    for block in twins:
        h = block(h)
        outputs.append(h)
    needed = [output for output in outputs if output.requires_grad]
    gradients = iter(torch.autograd.grad(loss_fn(h), needed, allow_unused=True))
    found = [next(gradients) if output.requires_grad else None for output in outputs]
    return [None if gradient is None else gradient.numpy() for gradient in found]


def true_norms(
    blocks: Sequence[nn.Module], *inputs: Tensor, norm: str = "l2", loss_fn: Callable[[Tensor], Tensor] = loss_of
) -> list[float | None]:
    """Norm, at each block, of the gradients of all inputs together."""
    by_input = [true_gradients(blocks, x, loss_fn) for x in inputs]
    together = zip(*by_input, strict=True)
    return [
        None if any(part is None for part in parts) else NORM_FORMULAS[norm](np.concatenate([part.ravel() for part in parts]))  # type: ignore[union-attr]
        for parts in together
    ]
