"""Small data for trainings of seconds, and what may be wrong with it."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


@cache
def _digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return (torch.tensor(x, dtype=torch.float32) - 4.9) / 6.0, torch.tensor(y)


def batches(x: Tensor, y: Tensor, size: int = 32) -> DataLoader[Any]:
    """Shuffled batches of whole size."""
    return DataLoader(TensorDataset(x, y), batch_size=size, shuffle=True, drop_last=True)


def digits(size: int = 32, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None) -> DataLoader[Any]:
    """Standardized images of 8 x 8 as vectors."""
    x, y = (one.clone() for one in _digits())
    return batches(*(change(x, y) if change else (x, y)), size)


def tabular(scale: float = 1.0, shift: float = 0.0, inputs: float = 1.0, noise: float = 0.1, size: int = 32) -> DataLoader[Any]:
    """A regression of ten inputs, with noise."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2000, 10, generator=generator)
    y = torch.tanh(x @ torch.randn(10, 1, generator=generator)) + noise * torch.randn(2000, 1, generator=generator)
    return batches(x * inputs, y * scale + shift, size)


def noise_as_targets(size: int = 32) -> DataLoader[Any]:
    """A regression whose targets have nothing to do with its inputs."""
    generator = torch.Generator().manual_seed(3)
    return batches(torch.randn(2000, 10, generator=generator), torch.randn(2000, 1, generator=generator), size)


def markov_chain(temperature: float, num_tokens: int = 20) -> DataLoader[Any]:
    """Pieces of a text in which a token depends on the one before, and the same one token on: no model is better than its table."""
    generator = torch.Generator().manual_seed(1)
    table = torch.softmax(torch.randn(num_tokens, num_tokens, generator=generator) / temperature, -1)
    tokens = [torch.tensor(0)]
    for _ in range(8000):
        tokens.append(torch.multinomial(table[tokens[-1]], 1, generator=generator)[0])
    text = torch.stack(tokens)
    return batches(text[:-1].view(500, 16), text[1:].view(500, 16), 16)


def ratings() -> DataLoader[Any]:
    """Whether users like items, by three tastes."""
    generator = torch.Generator().manual_seed(0)
    users, items = (torch.randn(num, 3, generator=generator) for num in (60, 90))
    pairs = torch.stack([torch.randint(len(table), (4000,), generator=generator) for table in (users, items)], 1)
    return batches(pairs, ((users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) > 0).float(), 64)


@cache
def _characters() -> Tensor:
    text = inspect.getsource(pathlib)[:60_000] + inspect.getsource(inspect)[:60_000]
    return torch.tensor([min(ord(one), 127) for one in text])


def characters(length: int = 16, size: int = 16) -> DataLoader[Any]:
    """Pieces of the standard library's source, and the same one character on."""
    text = _characters()
    num = (len(text) - 1) // length
    return batches(text[: num * length].view(num, length), text[1 : num * length + 1].view(num, length), size)


def one_row(value: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """One image has a value of its own."""

    def change(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x[777] = value
        return x, y

    return change


def shuffled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Labels that belong to other images."""
    return x, y[torch.randperm(len(y))]


def noisy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A fifth of the labels is wrong."""
    return x, torch.where(torch.rand(len(y)) < 0.2, torch.randint(10, y.shape), y)


def constant(value: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The same image everywhere."""
    return lambda x, y: (torch.full_like(x, value) if value == 0 else x[:1].expand_as(x).clone(), y)
