"""Small trainings, sick and healthy, with what is known of each: for the verdict's tests."""

from __future__ import annotations

import inspect
import itertools
import math
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from helpers.lightning_package import Callback, LightningModule, MixedPrecision, StochasticWeightAveraging

# Data


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


def tabular(scale: float = 1.0, shift: float = 0.0, inputs: float = 1.0) -> DataLoader[Any]:
    """A regression of ten inputs, with noise."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2000, 10, generator=generator)
    y = torch.tanh(x @ torch.randn(10, 1, generator=generator)) + 0.1 * torch.randn(2000, 1, generator=generator)
    return batches(x * inputs, y * scale + shift)


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


# Models


class Module(LightningModule):
    """A model, a loss of its outputs and the targets, and an optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Any] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    ) -> None:
        super().__init__()
        self.model, self.optimizer, self.loss = model, optimizer or adam(1e-3), loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.model)


def adam(lr: float, kind: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> Callable[[nn.Module], Any]:
    """An optimizer of all parameters that are trained."""
    return lambda model: kind([one for one in model.parameters() if one.requires_grad], lr=lr, **options)  # type: ignore[call-arg]


def sgd(lr: float, **options: Any) -> Callable[[nn.Module], Any]:
    """SGD."""
    return adam(lr, torch.optim.SGD, **options)


def scheduled(lr: float, factor: Callable[[int], float]) -> Callable[[nn.Module], Any]:
    """Adam with a schedule by step."""

    def make(model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return make


def groups(lrs: Sequence[float]) -> Callable[[nn.Module], Any]:
    """A group, with its learning rate, for the head and one for all before it."""

    def make(model: nn.Module) -> Any:
        *rest, head = [one for one in model.children() if any(True for _ in one.parameters())]
        parts = [[parameter for one in rest for parameter in one.parameters()], [*head.parameters()]]
        return torch.optim.Adam([{"params": part, "lr": lr} for part, lr in zip(parts, lrs, strict=True)])

    return make


def mlp(
    sizes: Sequence[int] = (64, 64, 64, 10), activation: Callable[[], nn.Module] = nn.ReLU, weights: float = 1.0, bias: float | None = None
) -> nn.Sequential:
    """Linear layers with activations between."""
    layers: list[nn.Module] = []
    for one, other in itertools.pairwise(sizes):
        layers += [nn.Linear(one, other), activation()]
    for layer in layers[::2]:
        with torch.no_grad():
            layer.weight.mul_(weights)  # type: ignore[operator,union-attr]
            if bias is not None:
                layer.bias.fill_(bias)  # type: ignore[operator,union-attr]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    """Two convolutions with BatchNorm."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
    )


class Gpt(nn.Module):
    """Characters, two pre-norm layers, tied to nothing."""

    def __init__(self, vocabulary: int = 128, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks, self.norm = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.position.weight
        return self.head(self.norm(self.blocks(h, mask=self.mask))).transpose(1, 2)


class Recurrent(nn.Module):
    """Rows, or single pixels, of an image, one after the other."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, size: int = 8, scale: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.size, self.rnn, self.head = size, kind(size, 32, batch_first=True, **options), nn.Linear(32, 10)
        if scale:
            nn.init.orthogonal_(self.rnn.weight_hh_l0, scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.view(len(x), -1, self.size))[0][:, -1])


class Code(nn.Module):
    """A function between two networks."""

    def __init__(self, function: Callable[[Tensor], Tensor], first: nn.Module | None = None, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = first or mlp((64, 64)), second or mlp((64, 64, 10))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


class Autoencoder(LightningModule):
    """Through eight numbers and back, perhaps variational."""

    def __init__(self, is_variational: bool = False) -> None:
        super().__init__()
        self.is_variational = is_variational
        self.encoder, self.decoder = mlp((64, 64, 16)), mlp((8, 64, 64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        mean, log_variance = self.encoder(batch[0]).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.is_variational else mean
        loss = F.mse_loss(self.decoder(code), batch[0])
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean()
        return loss + 0.01 * divergence if self.is_variational else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Contrastive(LightningModule):
    """Two noisy views of an image against those of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp((64, 64, 16))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        one, other = (F.normalize(self.model(batch[0] + 0.3 * torch.randn_like(batch[0])), dim=1) for _ in range(2))
        return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class MultiTask(LightningModule):
    """The digit and its parity, of one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.digit, self.parity = mlp((64, 64, 64)), nn.Linear(64, 10), nn.Linear(64, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        h = torch.relu(self.trunk(batch[0]))
        parity = F.binary_cross_entropy_with_logits(self.parity(h)[:, 0], (batch[1] % 2).float())
        return F.cross_entropy(self.digit(h), batch[1]) + parity

    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)


class Policy(LightningModule):
    """A contextual bandit by the gradient of its policy: the loss is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        choice = torch.distributions.Categorical(logits=self.model(batch[0]))
        action = choice.sample()
        return -(choice.log_prob(action) * ((action == batch[1]).float() - 0.1)).mean() - 0.01 * choice.entropy().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class ByHand(LightningModule):
    """A classifier under manual optimization, which may forget to set its gradients to zero."""

    def __init__(self, zeroes: bool = True, lr: float = 0.05) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.zeroes, self.lr = mlp(), zeroes, lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if self.zeroes:
            optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class NeverZeroed(Module):
    """Overrides the hook that sets gradients to zero by nothing."""

    def optimizer_zero_grad(self, *_args: Any) -> None:
        return


class Gan(LightningModule):
    """Two networks against each other; a Wasserstein critic is clamped."""

    def __init__(self, clamp: float = 0.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.clamp = clamp
        self.generator = mlp((16, 64, 64), lambda: nn.LeakyReLU(0.2))
        self.critic = mlp((64, 64, 1), lambda: nn.LeakyReLU(0.2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        score = (lambda x: self.critic(x).mean()) if self.clamp else (lambda x: -F.softplus(-self.critic(x)).mean())
        fake = self.generator(torch.randn(len(batch[0]), 16))
        of_critic.zero_grad()
        self.manual_backward(-score(batch[0]) - (-score(fake.detach()) if self.clamp else -F.softplus(self.critic(fake.detach())).mean()))
        of_critic.step()
        if self.clamp:
            for parameter in self.critic.parameters():
                parameter.data.clamp_(-self.clamp, self.clamp)
        of_generator.zero_grad()
        self.manual_backward(-score(fake))
        of_generator.step()

    def configure_optimizers(self) -> Any:
        rate, kind = (5e-4, torch.optim.RMSprop) if self.clamp else (2e-4, torch.optim.Adam)
        return [kind(one.parameters(), lr=rate) for one in (self.generator, self.critic)]


class Factors(LightningModule):
    """Factors of users and items, small at first, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (nn.Embedding(num, 8, sparse=True) for num in (60, 90))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        users, items = batch[0].T
        return F.binary_cross_entropy_with_logits((self.users(users) * self.items(items)).sum(1), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.parameters()), lr=2e-2)


class LargeLogits(nn.Module):
    """A softmax of logits without the scale of 1 / sqrt(d), and with large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.softmax, self.head = nn.Linear(8, 32), nn.Softmax(-1), nn.Linear(32, 10)
        nn.init.normal_(self.embed.weight, std=5.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.view(-1, 8, 8))
        return self.head((self.softmax(h @ h.transpose(1, 2)) @ h).mean(1))


class MaskedLogits(nn.Linear):
    """Logits of classes that there are not are minus infinity."""

    def __init__(self) -> None:
        super().__init__(64, 12)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).masked_fill(torch.arange(12) > 9, -math.inf)


class Residual(nn.Module):
    """A residual block with BatchNorm, and a ReLU in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)) + x)


def trained(model: nn.Module, num_epochs: int = 1, change: Callable[[Tensor], Tensor] = lambda y: y) -> nn.Module:
    """A network after a training on digits, whose labels may be others."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for x, y in itertools.chain.from_iterable(digits(128) for _ in range(num_epochs)):
        F.cross_entropy(model(x), change(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class FineTuning(Module):
    """A trained network, of which the head alone is trained anew."""

    def __init__(self) -> None:
        model = trained(cnn(), change=lambda y: y % 2)
        model[:-1].requires_grad_(False)  # type: ignore[index]
        super().__init__(model)


def _finished() -> nn.Module:
    return trained(nn.Sequential(mlp((64, 64)), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)), 10)


class EvalNorm(Module):
    """BatchNorm is in eval, as in a network that was loaded, and its weights are trained."""

    def on_train_batch_start(self, *_args: Any) -> None:
        for one in self.model.modules():
            if isinstance(one, nn.BatchNorm2d):
                one.eval()


class Averaged(Module):
    """Averages its weights from the third epoch on."""

    def configure_callbacks(self) -> list[Callback]:
        return [StochasticWeightAveraging(1e-3, swa_epoch_start=2, annealing_epochs=2)]


def float16() -> dict[str, Any]:
    """16-mixed on a CPU."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0))]}


def frozen_head() -> nn.Module:
    """All but the first layer requires no gradient."""
    model = mlp()
    model[2:].requires_grad_(False)
    return model


class MaskedAttention(nn.Module):
    """Attention over rows of which, for a blank image, none is visible."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Linear(8, 16), nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 8, 8)
        h = self.embed(rows)
        hidden = rows.sum((1, 2)).abs() > 1e4
        mask = hidden[:, None].expand(-1, 8)
        return self.head(self.attention(h, h, h, key_padding_mask=mask)[0].mean(1))


# Changes of the data


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


@dataclass
class Case:
    """A training."""

    make: Callable[[], LightningModule]
    causes: tuple[str, ...] = ()
    """Of a sick run: the names that the first diagnosis may have."""
    levels: tuple[str, ...] = ("sick", "watch")
    data: Callable[[], DataLoader[Any]] = digits
    steps: int = 150
    every: int = 10
    options: dict[str, Any] = field(default_factory=dict)
    site: str = ""
    """Of a sick run: the site of the first diagnosis, if it is known."""
    first_step: int | None = None
    """Of a sick run: the step from which on the first diagnosis holds, if it is known."""


def _softmax_head() -> nn.Module:
    return nn.Sequential(mlp(), nn.Softmax(-1))


def _mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def _dropout() -> nn.Module:
    """A network of which dropout leaves next to nothing."""
    layers = [[nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.95)] for _ in range(3)]
    return nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(64, 10))


def _heavy_tailed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.tanh(x[:, 10:11]) + torch.randn(len(x), 1) * torch.randn(len(x), 1) ** 2


def _noise_of_one() -> DataLoader[Any]:
    return digits(1, _heavy_tailed)


def _distances(output: Tensor, _target: Tensor) -> Tensor:
    """Of all pairs, also of each with itself."""
    return ((output[:, None] - output[None]) ** 2).sum(-1).sqrt().mean()


class TwoScales(Module):
    """A classifier whose outputs are also to be numbers of hundreds: SGD makes them overflow within a few steps."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        output = self.model(batch[0])
        return F.cross_entropy(output, batch[1]) + F.mse_loss(output[:, 0], 100.0 * batch[1])


HOUSE = dict(scale=2e4, shift=2e5)
"""Prices."""


def _house(lr: float) -> Case:
    return Case(lambda: Module(mlp((10, 64, 1)), adam(lr), _mse), ("unscaled_targets",), data=lambda: tabular(**HOUSE))


UNKNOWN = ("unknown",)
EITHER = ("healthy", "unknown")

SICK: dict[str, Case] = {
    "Adam at 1e-9": Case(lambda: Module(mlp(), adam(1e-9)), ("small_rate",), steps=300),
    "Adam at 1e-6": Case(lambda: Module(mlp(), adam(1e-6)), ("small_rate",), steps=300),
    "SGD at 1e-6": Case(lambda: Module(cnn(), sgd(1e-6)), ("small_rate",), steps=300),
    "shuffled labels": Case(lambda: Module(mlp()), ("not_learning",), data=lambda: digits(change=shuffled), steps=120),
    "shuffled labels, CNN": Case(
        lambda: Module(cnn(), sgd(0.01)), ("not_learning",), levels=("watch", "unknown"), data=lambda: digits(change=shuffled)
    ),
    "Adam at 1.0": Case(lambda: Module(mlp(), adam(1.0)), ("learning_rate",)),
    "SGD at 50": Case(lambda: Module(mlp(), sgd(50.0)), ("learning_rate",)),
    "momentum at 5": Case(lambda: Module(cnn(), sgd(5.0, momentum=0.9)), ("learning_rate", "growth", "not_learning"), steps=200),
    "GPT at 1.0": Case(lambda: Module(Gpt(), adam(1.0)), ("learning_rate",), data=characters),
    "the sum of losses": Case(
        lambda: Module(mlp(), sgd(0.5), lambda output, target: F.cross_entropy(output, target, reduction="sum")), ("learning_rate",)
    ),
    "house prices at 1e-4": _house(1e-4),
    "house prices at 1e-3": _house(1e-3),
    "house prices at 1e-2": _house(1e-2),
    "house prices at 1e-1": _house(1e-1),
    "inputs of thousands": Case(lambda: Module(mlp((10, 64, 1)), sgd(0.01), _mse), ("unscaled_input",), data=lambda: tabular(inputs=1e3)),
    "a constant batch": Case(lambda: Module(mlp()), ("constant_input",), data=lambda: digits(change=constant(1.0))),
    "a batch of zeros": Case(lambda: Module(cnn()), ("constant_input",), data=lambda: digits(change=constant(0.0))),
    "a group with rate 0": Case(lambda: Module(mlp(), groups((0.0, 1e-3))), ("zero_rate",)),
    "the head with rate 0": Case(lambda: Module(mlp(), groups((1e-3, 0.0))), ("zero_rate",)),
    "rate 0": Case(lambda: Module(mlp(), sgd(0.0)), ("zero_rate",)),
    "half of the parameters": Case(
        lambda: Module(mlp(), lambda model: torch.optim.Adam(model[2:].parameters())),
        ("no_optimizer",),
        site="model.0.weight",
        first_step=0,
    ),
    "a detached middle": Case(lambda: Module(Code(Tensor.detach)), ("frozen",), site="model.first.0.weight", first_step=10),
    "an exploding RNN": Case(
        lambda: Module(Recurrent(nn.RNN, 1, 1.8, nonlinearity="relu"), sgd(0.01)), ("explodes_from_start", "missing_normalization")
    ),
    "gradients never zeroed by hand": Case(lambda: ByHand(zeroes=False), ("stale_gradients",), steps=300),
    "gradients never zeroed": Case(lambda: NeverZeroed(mlp(), sgd(0.05)), ("stale_gradients",), steps=200),
    "BatchNorm in eval": Case(lambda: EvalNorm(cnn()), ("in_eval",)),
    "a softmax before cross-entropy": Case(lambda: Module(_softmax_head()), ("softmax_twice",)),
    "a sigmoid before its cross-entropy": Case(
        lambda: Module(
            nn.Sequential(mlp((64, 32, 1)), nn.Sigmoid()),
            loss=lambda output, target: F.binary_cross_entropy_with_logits(output[:, 0], (target > 4).float()),
        ),
        ("softmax_twice",),
    ),
    "dead ReLUs": Case(lambda: Module(mlp((64, 32, 32, 10), bias=-10.0), sgd(0.01)), ("dead_from_start",), site="model.1", first_step=0),
    "saturated sigmoids": Case(
        lambda: Module(mlp(activation=nn.Sigmoid, weights=200.0), sgd(1e-4)), ("saturation",), site="model.1", first_step=0
    ),
    "vanishing gradients": Case(
        lambda: Module(mlp((64, *[8] * 40, 10), nn.Tanh), sgd(0.1)), ("vanishing",), site="model.0.weight", first_step=0
    ),
    "growing outputs": Case(lambda: Module(mlp((64, *[64] * 12, 10), weights=8.0), sgd(1e-30)), ("missing_normalization",), first_step=0),
    "a softmax over one value": Case(
        lambda: Module(nn.Sequential(mlp((64, 32, 1)), nn.Softmax(1)), loss=lambda out, y: F.mse_loss(out[:, 0], (y > 4).float())),
        ("saturation", "zero"),
    ),
    "a large weight decay": Case(lambda: Module(mlp(), adam(3e-3, torch.optim.AdamW, weight_decay=50.0)), ("weight_decay",), steps=300),
    "data with a NaN": Case(lambda: Module(mlp()), ("data",), data=lambda: digits(change=one_row(math.nan)), site="_root_"),
    "data with an infinity": Case(lambda: Module(cnn()), ("data",), data=lambda: digits(change=one_row(math.inf))),
    "a logarithm of zero": Case(lambda: Module(Code(lambda h: torch.log(torch.relu(h)))), ("nonfinite",), site="model", first_step=0),
    "float16": Case(lambda: Module(mlp(weights=300.0)), ("overflow",), options=float16(), site="model.2", first_step=0),
    "a row without keys": Case(lambda: Module(MaskedAttention()), ("masked_row",), data=lambda: digits(change=one_row(1e5))),
    "a root of zero": Case(lambda: Module(mlp(), loss=_distances), ("infinite_slope",)),
    "a root of zero, in a model": Case(lambda: Module(Code(lambda h: h + (h - h).square().sqrt())), ("infinite_slope",)),
    "an overflow between records": Case(lambda: TwoScales(mlp(), sgd(1e-2, momentum=0.9)), ("learning_rate",), every=50, steps=300),
    "an overflow between records, SGD": Case(lambda: TwoScales(mlp(), sgd(2e-2)), ("learning_rate",), every=25, steps=300),
    "clipped to nothing": Case(lambda: Module(cnn(), sgd(0.05)), ("clipping",), steps=300, options={"gradient_clip_val": 1e-4}),
    "clipped to nothing, momentum": Case(
        lambda: Module(mlp(), sgd(0.01, momentum=0.9)), ("clipping",), options={"gradient_clip_val": 1e-5}
    ),
    "clipped by value": Case(
        lambda: Module(mlp(), sgd(0.05)), ("clipping",), options={"gradient_clip_val": 1e-7, "gradient_clip_algorithm": "value"}
    ),
    "clipped, and a rate of next to nothing": Case(lambda: Module(mlp(), sgd(1e-6)), ("small_rate",), options={"gradient_clip_val": 0.1}),
    "a warm-up that is too long": Case(lambda: Module(mlp(), scheduled(1e-3, lambda step: (step + 1) / 1e6)), ("small_rate",), steps=500),
    "a GPT with a warm-up that is too long": Case(
        lambda: Module(Gpt(), scheduled(1e-3, lambda step: (step + 1) / 1e7)), ("small_rate",), data=characters, steps=200
    ),
    "by hand, at 1e-7": Case(lambda: ByHand(lr=1e-7), ("small_rate",)),
    "an RNN that explodes from the start": Case(
        lambda: Module(Recurrent(nn.RNN, 1, 4.0, nonlinearity="relu"), adam(1e-3)), ("explodes_from_start",)
    ),
    "Adam with a large eps": Case(lambda: Module(mlp(), adam(1e-3, eps=1e4)), ("small_rate",)),
    "a rate that ends too soon": Case(lambda: Module(cnn(), scheduled(1e-3, lambda step: 1.0 if step < 10 else 1e-5)), ("decayed_rate",)),
    "pixels of thousands": Case(
        lambda: Module(mlp(), sgd(0.1)), ("unscaled_input",), data=lambda: digits(change=lambda x, y: (16 * (6 * x + 4.9), y))
    ),
    "dropout of 0.95": Case(lambda: Module(_dropout()), (), UNKNOWN, steps=200),
    "a GPT whose loss stalls": Case(
        lambda: Module(Gpt(), adam(0.1, torch.optim.AdamW)), (), UNKNOWN, data=lambda: characters(size=32), steps=300
    ),
    "SGD at 50, BatchNorm": Case(lambda: Module(cnn(), sgd(50.0)), ("learning_rate",), first_step=50, steps=101, every=50),
    "a GPT at 0.3, three records": Case(lambda: Module(Gpt(), adam(0.3)), (), UNKNOWN, data=characters, steps=101, every=50),
    "a GPT at 0.3": Case(
        lambda: Module(Gpt(), adam(0.3)), ("growth", "learning_rate"), ("sick", "watch", "unknown"), data=characters, steps=200
    ),
    "dead by the first updates": Case(
        lambda: Module(mlp(), scheduled(1.0, lambda step: 1.0 if step < 5 else 1e-4)),
        ("learning_rate",),
        first_step=50,
        steps=101,
        every=50,
    ),
    "saturated attention": Case(
        lambda: Module(LargeLogits(), sgd(1e-6)), ("saturation",), site="model.softmax", first_step=0, steps=101, every=50
    ),
    "zero by zero between records": Case(
        lambda: Module(Code(lambda h: h / h.norm(dim=-1, keepdim=True), nn.Linear(64, 64, bias=False))),
        ("nonfinite",),
        data=lambda: digits(change=one_row(0.0)),
        every=50,
        site="model",
    ),
    "one record": Case(lambda: Module(mlp(), adam(1.0)), (), UNKNOWN, steps=45, every=50),
    "seven records": Case(lambda: Module(mlp(bias=-1.0), sgd(1e-3)), (), UNKNOWN, steps=70),
    "five records": Case(lambda: Module(mlp()), (), UNKNOWN, steps=50),
}

HEALTHY: dict[str, Case] = {
    "an MLP": Case(lambda: Module(mlp())),
    "SGD": Case(lambda: Module(mlp(), sgd(0.1))),
    "momentum": Case(lambda: Module(cnn(), sgd(0.05, momentum=0.9))),
    "AdamW": Case(lambda: Module(mlp(), adam(1e-3, torch.optim.AdamW, weight_decay=0.1))),
    "a CNN": Case(lambda: Module(cnn())),
    "a CNN, accumulated": Case(lambda: Module(cnn()), options={"accumulate_grad_batches": 2}),
    "a GPT": Case(lambda: Module(Gpt(), adam(3e-3)), data=characters),
    "a GPT, warmed up": Case(lambda: Module(Gpt(), scheduled(3e-3, lambda step: min(1.0, step / 50))), data=characters),
    "a cosine": Case(lambda: Module(mlp(), scheduled(2e-3, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / 150)))),
    "an LSTM": Case(lambda: Module(Recurrent(), adam(5e-3))),
    "an autoencoder": Case(Autoencoder),
    "a variational autoencoder": Case(lambda: Autoencoder(True)),
    "a regression": Case(lambda: Module(mlp((10, 64, 1)), adam(1e-3), _mse), data=tabular),
    "a GAN": Case(Gan, levels=UNKNOWN, steps=300),
    "a Wasserstein GAN": Case(lambda: Gan(0.01), levels=UNKNOWN, steps=300),
    "a policy": Case(Policy, levels=UNKNOWN),
    "by hand": Case(ByHand, levels=UNKNOWN),
    "fine-tuning": Case(FineTuning),
    "a frozen part": Case(lambda: Module(frozen_head(), adam(3e-3))),
    "contrastive": Case(Contrastive),
    "two tasks": Case(MultiTask),
    "bfloat16": Case(lambda: Module(mlp()), options={"precision": "bf16-mixed"}),
    "float16": Case(lambda: Module(mlp()), options=float16()),
    "a tiny batch": Case(lambda: Module(mlp()), data=lambda: digits(4), steps=300),
    "noisy labels": Case(lambda: Module(mlp()), data=lambda: digits(change=noisy)),
    "clipped": Case(lambda: Module(Recurrent(nn.GRU), adam(5e-3)), options={"gradient_clip_val": 0.1}),
    "every step": Case(lambda: Module(mlp(), adam(3e-3)), steps=30, every=1),
    "ten records": Case(lambda: Module(cnn(), adam(3e-3)), steps=100),
    "trained already": Case(lambda: Module(_finished(), adam(1e-5, torch.optim.AdamW)), levels=UNKNOWN, steps=300),
    "trained already, many records": Case(lambda: Module(_finished(), sgd(3e-3)), levels=UNKNOWN, steps=600, every=5),
    "a batch of one": Case(
        lambda: Module(mlp((64, 32, 1)), sgd(3e-3), F.huber_loss), levels=EITHER, data=_noise_of_one, steps=900, every=15
    ),
    "a batch of one, Adam": Case(lambda: Module(mlp((64, 32, 1)), adam(3e-4), _mse), levels=EITHER, data=_noise_of_one, steps=600),
    "a ResNet": Case(lambda: Module(nn.Sequential(cnn()[:-2], Residual(32), cnn()[-2:])), steps=501, every=50),
    "large targets": Case(
        lambda: Module(mlp((64, 32, 1), nn.GELU), adam(0.1), lambda out, y: F.l1_loss(out[:, 0], 3000 + 100 * y.float())),
        steps=501,
        every=50,
    ),
    "a confident sigmoid": Case(
        lambda: Module(
            nn.Sequential(mlp((64, 32, 1), nn.GELU), nn.Sigmoid()),
            adam(3e-3),
            lambda out, y: F.binary_cross_entropy(out[:, 0], (y == 0).float()),
        ),
        steps=501,
        every=50,
    ),
    "masked logits": Case(lambda: Module(Code(torch.relu, second=MaskedLogits())), steps=501, every=50),
    "cosine restarts": Case(
        lambda: Module(mlp(), scheduled(5e-3, lambda step: 0.5 * (1 + math.cos(math.pi * (step % 60) / 60)) + 1e-3)), steps=501, every=50
    ),
    "weight averaging": Case(lambda: Averaged(mlp()), steps=-1, every=50, options={"max_epochs": 9}),
    "sparse embeddings": Case(Factors, data=ratings, steps=300),
    "a group at 0 by schedule": Case(lambda: Module(mlp(), scheduled(3e-3, lambda step: float(step >= 60))), steps=200),
}


def run_seed(seed: int) -> None:
    """Seed every generator."""
    torch.manual_seed(seed)
    np.random.seed(seed)
