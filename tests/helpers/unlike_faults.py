"""Healthy trainings with something that resembles a fault: margins that are satisfied, masks, weights of constant norm, bags of samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from helpers.lightning_package import LightningModule
from helpers.small_data import batches, characters, digits
from helpers.small_models import Module, adam, mlp, sgd
from helpers.trainings import EITHER, Case


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Normalized(Module):
    """The rows of all weights have the norm 1 before each step, as in nGPT (arXiv 2410.01131)."""

    def on_train_batch_start(self, *_args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(F.normalize(parameter, dim=-1))


class Bigram(nn.Module):
    """The logits of the next character, which are cosines times a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(128, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.normalize(self.hidden(self.embedding(x)), dim=-1)
        return 10 * self.head(hidden).flatten(0, 1)


def _cross_entropy_of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.flatten())


class Scores(nn.Module):
    """The scores of attention; those of the future are the lowest number of their dtype."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, torch.finfo(scores.dtype).min)


class Attention(nn.Module):
    """A language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(128, 32), nn.Embedding(16, 32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.scores, self.head = Scores(), nn.Linear(32, 128)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.position(torch.arange(x.shape[1]))
        weights = self.scores(self.query(hidden), self.key(hidden)).softmax(-1)
        return self.head(hidden + weights @ self.value(hidden)).flatten(0, 1)


class Bag(nn.Module):
    """One number for a bag of instances, whose weights are a softmax over the bag (M. Ilse and others, arXiv 1802.04712)."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = mlp((64, 64, 32)), nn.Linear(32, 1)
        self.weights = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1), nn.Softmax(dim=0))

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        return self.head((self.weights(features) * features).sum(0))


def _bags() -> DataLoader[Any]:
    """Bags of ten digits, with the label of each, and whether one is a nine."""
    x, y = digits().dataset.tensors  # type: ignore[attr-defined]
    indices = torch.randint(len(x), (800, 10), generator=torch.Generator().manual_seed(0))
    bags = [(x[some], y[some], (y[some] == 9).any().float()[None]) for some in indices]
    return DataLoader(bags, batch_size=None, shuffle=True)  # type: ignore[arg-type]


class OfBags(LightningModule):
    """Tells bags with a nine from others."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Bag()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, _labels, label = batch
        return F.binary_cross_entropy_with_logits(self.model(x), label)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Towers(LightningModule):
    """Matches the upper halves of images with the lower ones: a log-softmax over the rows of all pairs, and one over the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = mlp((32, 64, 32)), mlp((32, 64, 32))
        self.rows, self.columns = nn.LogSoftmax(1), nn.LogSoftmax(0)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        upper, lower = F.normalize(self.upper(batch[0][:, :32]), dim=-1), F.normalize(self.lower(batch[0][:, 32:]), dim=-1)
        pairs = 15 * upper @ lower.T
        return -(self.rows(pairs).diag().mean() + self.columns(pairs).diag().mean()) / 2

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class Triplets(LightningModule):
    """Keeps two classes apart by a margin, which is satisfied after some steps: then the loss is 0, and so are the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp((4, 32, 8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        output = self.model(x)
        distances, are_same = torch.cdist(output, output), (y[:, None] == y).float()
        return F.relu((distances * are_same).amax(1) - (distances + 1e6 * are_same).amin(1) + 1.0).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def _two_clusters() -> DataLoader[Any]:
    y = torch.arange(320) % 2
    return batches(_random(320, 4) / 4 + 2 * y[:, None], y, 16)


class Cart(LightningModule):
    """Pushes a cart as far as it can, by forces of at most 1: minus the way falls below 0, and has a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
        with torch.no_grad():
            self.model[-1].weight.mul_(0.03)  # type: ignore[operator, union-attr]
            self.model[-1].bias.zero_()  # type: ignore[operator, union-attr]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        place, speed = torch.zeros(len(x), 1), 0.1 * x[:, 1:2]
        for _ in range(20):
            speed = speed + torch.tanh(self.model(torch.cat([place / 50, speed / 10, x[:, 2:]], 1)))
            place = place + speed
        return -place.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Deviation(LightningModule):
    """A mean and a deviation, which comes down to that of the noise; its module is the last one that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean = nn.Sequential(mlp((10, 64, 64)), nn.ReLU()), nn.Linear(64, 1)
        self.deviation = nn.Sequential(nn.Linear(64, 1), nn.Softplus())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.body(batch[0])
        mean, deviation = self.mean(hidden), self.deviation(hidden) + 1e-3
        return (0.5 * ((batch[1] - mean) / deviation) ** 2 + deviation.log()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def _little_noise() -> DataLoader[Any]:
    x = _random(4000, 10)
    return batches(x, torch.tanh(x @ _random(10, 1, seed=1) / 2) + 0.02 * _random(4000, 1, seed=2), 64)


class Replay(LightningModule):
    """Fills a buffer before it learns: until then, ``training_step`` returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp((4, 32, 1))
        self.buffer: list[list[Tensor]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.buffer.append(batch)
        if len(self.buffer) < 150:
            return None
        x, y = zip(*(self.buffer[index] for index in torch.randint(len(self.buffer), (4,)).tolist()), strict=True)
        return F.mse_loss(self.model(torch.cat(x)), torch.cat(y))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def _transitions() -> DataLoader[Any]:
    x = _random(4000, 4)
    return batches(x, torch.tanh(x @ _random(4, 1, seed=1)), 4)


class Branches(nn.Module):
    """A network beside a branch that is masked, and runs last, as in KAN (arXiv 2404.19756)."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.branch = mlp((64, 64, 10)), nn.Linear(64, 10, bias=False)
        nn.init.zeros_(self.branch.weight)
        self.branch.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x) + self.branch(x)


class OpenGates(nn.Module):
    """A recurrent network whose gates begin open, for a long memory (C. Tallec, Y. Ollivier, arXiv 1804.11188)."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.hidden, self.head = nn.Linear(8, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 10)
        self.gate = nn.Sequential(nn.Linear(72, 64), nn.Sigmoid())
        nn.init.constant_(self.gate[0].bias, 5.0)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), 64)
        for row in x.view(-1, 8, 8).unbind(1):
            gate = self.gate(torch.cat([row, hidden], 1))
            hidden = gate * hidden + (1 - gate) * torch.tanh(self.input(row) + self.hidden(hidden))
        return self.head(hidden)


class Kernels(nn.Module):
    """Radial basis functions, as many as the batch has samples: a difference inside of the model has the shape of a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.head = nn.Linear(10, 1), mlp((32, 32, 1))
        self.register_buffer("centers", torch.linspace(-3, 3, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.exp(-4 * (self.place(x) - self.centers) ** 2))


def _sines() -> DataLoader[Any]:
    x = _random(3000, 10)
    return batches(x, torch.sin(2 * x[:, :1]) + 0.1 * _random(3000, 1, seed=1))


class Completion(nn.Module):
    """A matrix of rank 2 from small factors: the loss stays for a while, and falls while the gradient and the weights grow."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(100, 4), nn.Embedding(80, 4)
        for factor in (self.rows, self.columns):
            nn.init.normal_(factor.weight, std=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.rows(x[:, 0]) * self.columns(x[:, 1])).sum(1)


def _entries() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    places = torch.stack([torch.randint(num, (20_000,), generator=generator) for num in (100, 80)], 1)
    return batches(places, (_random(100, 2)[places[:, 0]] * _random(80, 2, seed=1)[places[:, 1]]).sum(1), 512)


UNLIKE_FAULTS: dict[str, Case] = {
    "rows of norm 1": Case(lambda: Normalized(Bigram(), adam(1e-2), _cross_entropy_of_tokens), levels=EITHER, data=characters, steps=300),
    "scores with a mask": Case(
        lambda: Module(Attention(), adam(3e-3), _cross_entropy_of_tokens), levels=EITHER, data=characters, steps=300
    ),
    "a softmax over a bag": Case(OfBags, data=_bags, steps=400),
    "a softmax of all pairs": Case(Towers, steps=300),
    "margins that are satisfied": Case(Triplets, levels=EITHER, data=_two_clusters, steps=300),
    "a cart pushed far": Case(Cart, data=lambda: batches(_random(2000, 3), torch.zeros(2000)), steps=300),
    "a deviation that comes down": Case(Deviation, data=_little_noise, steps=800, every=20),
    "a buffer filled first": Case(Replay, data=_transitions, steps=400),
    "a branch that is masked": Case(lambda: Module(Branches(), adam(1e-3))),
    "gates that begin open": Case(lambda: Module(OpenGates(), adam(3e-3)), steps=200),
    "kernels as many as samples": Case(lambda: Module(Kernels(), adam(5e-3), F.mse_loss), data=_sines, steps=300),
    "a matrix of small factors": Case(lambda: Module(Completion(), sgd(5.0), F.mse_loss), data=_entries, steps=400),
}
