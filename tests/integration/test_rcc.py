"""The coordinate check beside models whose modules get objects, other modules and caches, or share state with foreign hooks.

Training is bit-identical, because the check never calls a module: it computes ``W0 x`` by the function of the layer's type.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.tiny import KeepRecords
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitorCallback


class Graph:
    """A batch that modules write into, as in graph libraries."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class WritesIntoItsArgument(nn.Module):
    """Each layer takes a graph, replaces the features in it, and returns the same graph."""

    class Layer(nn.Module):
        """A linear layer with a scale."""

        def __init__(self, in_features: int, out_features: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(out_features))
            self.linear = nn.Linear(in_features, out_features)

        def forward(self, graph: Graph) -> Graph:
            graph.x = self.linear(graph.x) * self.scale
            return graph

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Layer(6, 6), self.Layer(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        graph = Graph(x)
        return self.second(self.first(graph)).x


class GetsAnotherModule(nn.Module):
    """A module with a weight that calls its argument, a module with running statistics."""

    class Apply(nn.Module):
        """Multiplies, and calls its argument."""

        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor, norm: nn.Module) -> Tensor:
            result: Tensor = norm(x * self.gain)
            return result

    def __init__(self) -> None:
        super().__init__()
        self.apply_norm, self.norm, self.head = self.Apply(), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.apply_norm(x, self.norm))
        return output


class Cache:
    """Outputs of layers, as in libraries of language models."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class AppendsToACache(nn.Module):
    """A layer appends its output to a cache; the loss is computed from the sum of the cache."""

    class Layer(nn.Module):
        """Appends to the cache."""

        def __init__(self) -> None:
            super().__init__()
            self.key = nn.Linear(6, 3)
            self.gain = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.keys.append(self.key(x) * self.gain)
            return torch.stack(cache.keys).sum(0)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(), self.Layer()])

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for layer in self.layers:
            output = layer(x, cache)
        return output


COLLECTED: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("collected", default=None)


@contextmanager
def collecting() -> Iterator[list[Tensor]]:
    """Within the block the hooks of routers append their logits to a list."""
    logits: list[Tensor] = []
    token = COLLECTED.set(logits)
    try:
        yield logits
    finally:
        COLLECTED.reset(token)


class CollectsByHooks(nn.Module):
    """Router logits are collected by forward hooks through a context variable; their size is a part of the loss."""

    class Router(nn.Module):
        """A linear layer of an unknown type."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 6))
            self.register_forward_hook(self.collect)

        def collect(self, _module: nn.Module, _args: object, output: Tensor) -> None:
            """Append the logits to the list of the context."""
            logits = COLLECTED.get()
            if logits is not None:
                logits.append(output)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.router, self.linear = self.Router(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with collecting() as logits:
            output = self.router(x) + self.linear(x)
        scaled: Tensor = output * torch.stack(logits).square().sum() / 10
        return scaled


class TokenAroundAttention(nn.Module):
    """A container with a class token around attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), self.embedding(x.unsqueeze(-1))], 1)
        output: Tensor = self.head(self.attention(tokens, tokens, tokens)[0][:, 0])
        return output


class Vmapped(nn.Module):
    """A layer is called under vmap over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.func.vmap(self.inner)(x))
        return output


class Experts(nn.Module):
    """Routed experts, whose numbers of tokens change as the router learns."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        output = x.new_zeros(len(x), 3)
        for index, expert in enumerate(self.experts):
            chosen = gates.argmax(-1) == index
            if chosen.any():
                output[chosen] = expert(x[chosen]) * gates[chosen, index, None]
        return output


MODELS: dict[str, tuple[type[nn.Module], str]] = {
    "writes into its argument": (WritesIntoItsArgument, "model.second.linear"),
    "gets another module": (GetsAnotherModule, "model.norm"),
    "appends to a cache": (AppendsToACache, "model.layers.1.key"),
    "collects by hooks": (CollectsByHooks, "model.linear"),
    "a token around attention": (TokenAroundAttention, "model.attention.v_proj"),
    "under vmap": (Vmapped, "model.head"),
    "experts": (Experts, "model.router"),
}
"""A model, and a site with values of the check."""


Trained = tuple[list[Tensor], dict[str, Tensor], list[dict[str, float]]]


def run(make: Callable[[], nn.Module], folder: Path, *, is_monitored: bool) -> Trained:
    """Losses, weights and buffers of a training, with the check or without it, and the records."""
    seed()
    module, keep = Classifier(make()), KeepLosses()
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[], rcc=True, store=False, on_error="raise")
    records = KeepRecords(callback)
    trainer(folder, [callback, records, keep] if is_monitored else [keep], max_steps=8).fit(module, loader(32), loader(8))
    return keep.losses, dict(module.state_dict()), [dict(record.values) for record in records.records]


@pytest.mark.parametrize("name", MODELS)
def test_the_check_does_not_change_training(name: str, tmp_path: Path) -> None:
    """Promise 1: losses, weights and buffers are bit-identical, and the layers of known types have values without an error."""
    make, site = MODELS[name]
    losses, weights, _none = run(make, tmp_path, is_monitored=False)
    with_check, others, records = run(make, tmp_path, is_monitored=True)
    assert list(map(float, with_check)) == list(map(float, losses))
    assert others.keys() == weights.keys()
    for key, tensor in weights.items():
        assert torch.equal(others[key], tensor), key
    assert len(records) == 8
    assert records[0][f"rcc_effective_update/{site}/rms"] == 0.0
    assert records[7][f"rcc_effective_update/{site}/rms"] > 0.0
    assert {values["monitor/errors"] for values in records} == {0.0}
    skipped = [values["monitor/rcc_skipped_calls"] for values in records]
    if name == "experts":
        assert sum(skipped) > 0
    else:
        assert sum(skipped) == 0
