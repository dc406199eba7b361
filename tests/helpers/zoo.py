"""Models as people have them, and the raw tensors of a step, collected by hooks of the plainest kind."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RawTensors = dict[tuple[str, str], list[Tensor]]
"""Tensors by kind and site, in float64."""


class Mlp(nn.Module):
    """Linear layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Cnn(nn.Module):
    """Convolutions with BatchNorm and in-place ReLU, and a residual that is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.block = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.view(-1, 1, 2, 3))
        y = self.block(h)
        y += h
        return self.head(y.mean((2, 3)))


class Transformer(nn.Module):
    """Attention by nn.MultiheadAttention, LayerNorm, dropout; the sequence is the six inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x.unsqueeze(-1))
        normed = self.norm(h)
        h = h + self.attention(normed, normed, normed)[0]
        h = h + self.mlp(h)
        return self.head(h.mean(1))


class Gpt(nn.Module):
    """Causal attention by the function, with dropout; the sequence is the six inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 8)
        self.query_key_value = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x.unsqueeze(-1))
        query, key, value = self.query_key_value(h).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(h.mean(1))


class Shared(nn.Module):
    """A module called twice under two names, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.again = self.inner
        self.encoder = nn.Linear(6, 3, bias=False)
        self.decoder = nn.Linear(6, 3, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inner(x))
        h = self.again(h)
        return self.encoder(h) + self.decoder(x)


class Frozen(nn.Module):
    """A frozen layer, a parameter that no loss depends on, and a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.free = nn.Linear(6, 3)
        self.unused = nn.Parameter(torch.ones(4))
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.free(self.frozen(x))


@dataclass
class Answer:
    """An output that is a dataclass."""

    logits: Tensor
    label: str


class Pair(NamedTuple):
    """An output that is a named tuple."""

    first: Tensor
    rest: list[Tensor]


class Outputs(nn.Module):
    """Parts that return a tuple, a list, a dict, a dataclass, a named tuple, nested ones, and what is not watched."""

    class Returns(nn.Module):
        """Returns what `build` makes from two tensors."""

        def __init__(self, build: Callable[[Tensor, Tensor], Any]) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)
            self.build = build

        def forward(self, x: Tensor) -> Any:
            return self.build(self.a(x), self.b(x))

    def __init__(self) -> None:
        super().__init__()
        self.tuple = self.Returns(lambda a, b: (a, b))
        self.list = self.Returns(lambda a, b: [a, b])
        self.dict = self.Returns(lambda a, b: {"hidden states": a, "other": b})
        self.dataclass = self.Returns(lambda a, b: Answer(a + b.mean(), "yes"))
        self.named = self.Returns(lambda a, b: Pair(a, [b, b * 2]))
        self.nested = self.Returns(lambda a, b: (a, {"deep": (b, None)}))
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.integer = self.Returns(lambda a, b: (b.argmax(-1), a > 0))
        self.complex = self.Returns(lambda a, b: torch.complex(a, a))
        self.empty = self.Returns(lambda a, b: a[:0])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = sum(self.tuple(x)[i].mean(-1, keepdim=True) for i in (0, 1)) + x
        h = h + self.list(h)[0] + self.dict(h)["hidden states"] + self.dataclass(h).logits
        h = h + self.named(h).rest[1].mean() + self.nested(h)[1]["deep"][0].mean()
        h = h + self.lstm(h.unsqueeze(1))[0].squeeze(1)
        self.integer(h), self.empty(h)
        return self.head(h + self.complex(h).real)


ZOO = {"mlp": Mlp, "cnn": Cnn, "transformer": Transformer, "gpt": Gpt, "shared": Shared, "frozen": Frozen, "outputs": Outputs}


def batches(*sizes: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of inputs of shape (size, 6) and classes."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)) for size in sizes]


def make(name: str) -> nn.Module:
    """A model of the zoo, always the same."""
    torch.manual_seed(0)
    return ZOO[name]()


def raw_tensors(
    model: nn.Module, micro_batches: Sequence[tuple[Tensor, Tensor]], loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> RawTensors:
    """Run a copy of the model over the micro-batches and keep every tensor: the truth that a monitor is compared with."""
    model = copy.deepcopy(model)
    raw: RawTensors = defaultdict(list)
    names = {module: name or "_root_" for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}

    def keep(site: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            raw["activation", site].append(tensor.detach().double().clone())
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: raw["activation_gradient", site].append(gradient.double().clone()))

    def look(module: nn.Module, _args: object, output: Any) -> None:
        name = names[module]
        if isinstance(output, Tensor):
            keep(name, output)
        else:
            for suffix, tensor in EXPECTED_OUTPUTS.get(name, lambda _output: [])(output):
                keep(f"{name}{suffix}", tensor)

    for module in model.modules():
        module.register_forward_hook(look)
    for x, y in micro_batches:
        loss_fn(model(x), y).backward()
    for name, parameter in model.named_parameters():
        raw["parameter", name].append(parameter.detach().double())
        if parameter.grad is not None:
            raw["gradient", name].append(parameter.grad.double())
    return raw


EXPECTED_OUTPUTS: dict[str, Callable[[Any], list[tuple[str, Tensor]]]] = {
    "attention": lambda o: [("", o[0]), (".output_1", o[1])],
    "tuple": lambda o: [("", o[0]), (".output_1", o[1])],
    "list": lambda o: [("", o[0]), (".output_1", o[1])],
    "dict": lambda o: [(".output_hidden_states", o["hidden states"]), (".output_other", o["other"])],
    "dataclass": lambda o: [(".output_logits", o.logits)],
    "named": lambda o: [(".output_first", o.first), (".output_rest_0", o.rest[0]), (".output_rest_1", o.rest[1])],
    "nested": lambda o: [("", o[0]), (".output_1_deep_0", o[1]["deep"][0])],
    "lstm": lambda o: [("", o[0]), (".output_1_0", o[1][0]), (".output_1_1", o[1][1])],
}
"""Names and tensors of outputs that are not one tensor, written down by hand."""
