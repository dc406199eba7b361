"""The models that are trained, and their data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FLOAT32, MIXED, BFLOAT16 = "32-true", "bf16-mixed", "bf16-true"
"""Precisions, by Lightning's names: everything in float32; float32 weights under autocast; everything in bfloat16."""

Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.query_key_value(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return merged


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        grown: Tensor = x + self.mlp(self.norm2(x))
        return grown


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module | None = None
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        grown: Tensor = self.relu(y + (x if self.shortcut is None else self.shortcut(x)))
        return grown


class ResidualCNN(nn.Module):
    """Two residual blocks at each of three resolutions, the second and third of half the size and twice the channels."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        widths = [channels, channels, channels, 2 * channels, 2 * channels, 4 * channels, 4 * channels]
        blocks = [Residual(old, new, stride=1 if old == new else 2) for old, new in pairwise(widths)]
        self.block1, self.block2, self.block3, self.block4, self.block5, self.block6 = blocks
        self.head = nn.Linear(4 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        for block in (self.block1, self.block2, self.block3, self.block4, self.block5, self.block6):
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def make_mlp(layers: int, width: int) -> nn.Module:
    """Linear and ReLU in turn."""
    linears = [nn.Linear(width, width) for _ in range(layers)]
    for linear in linears:
        # torch's default shrinks the signal in each layer: after 64 the gradients' squares are denormal, and slow.
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    return nn.Sequential(*(module for linear in linears for module in (linear, nn.ReLU())))


def text_batch(vocabulary: int, batch: int, context: int) -> Batch:
    """Random tokens, and those that follow them."""
    tokens = torch.randint(vocabulary, (batch, context + 1))
    return tokens[:, :-1], tokens[:, 1:]


def vector_batch() -> Batch:
    """Random vectors with random classes."""
    return torch.randn(64, 128), torch.randint(128, (64,))


def image_batch() -> Batch:
    """Random images with random classes."""
    return torch.randn(32, 3, 32, 32), torch.randint(10, (32,))


@dataclass(frozen=True)
class Workload:
    """A model and its data."""

    name: str
    description: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    """Of inputs and classes; the model gives logits of shape ``(*classes.shape, number of classes)``."""
    target: float | None = None
    """The largest fraction of a plain step on one CPU thread that our engine may add."""
    precision: str | None = None
    """The precision that replaces the one of the command line."""


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "W1",
            "GPT, 6 layers, width 256, vocabulary 512, batch 8 x 128 tokens",
            partial(GPT, 512, 128, 6, 256, 8),
            partial(text_batch, 512, 8, 128),
            target=0.23,
        ),
        Workload("W2", "64 x (Linear 128 + ReLU), batch 64", partial(make_mlp, 64, 128), vector_batch, target=0.90),
        Workload("W3", "residual CNN with BatchNorm, batch 32 x 3 x 32 x 32", partial(ResidualCNN, 16, 10), image_batch, target=0.42),
    )
}


GPT_100M = Workload(
    "GPT",
    "GPT, 98M parameters, 12 layers, width 768, vocabulary 8192, batch 8 x 1024 tokens, bf16-mixed",
    partial(GPT, 8192, 1024, 12, 768, 12),
    partial(text_batch, 8192, 8, 1024),
    precision=MIXED,
)
"""For a GPU."""
GPT_1M = Workload(
    "GPT",
    "GPT, 1.1M parameters, 2 layers, width 192, vocabulary 512, batch 4 x 64 tokens, bf16-mixed",
    partial(GPT, 512, 64, 2, 192, 4),
    partial(text_batch, 512, 4, 64),
    precision=MIXED,
)
"""In its place where there is no GPU."""
