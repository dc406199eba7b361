"""Small trainings whose fault raises no exception, each beside a healthy one that looks like it: for the verdict's tests."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from helpers.lightning_package import LightningModule
from helpers.small_data import batches, characters, digits, tabular
from helpers.small_models import Contrastive, Gpt, Module, Transposed, adam, cnn, mlp, sgd, trained
from helpers.trainings import EITHER, Case

COLLAPSES = ("watch", "sick", "unknown")
"""Of what may look as if it learned."""
NOTHING = ("cleared_gradients", "zero_gradient")
"""Of gradients that are not there, or 0."""
ALONE = ("healthy",)

# ------------------------------------------------------------------------------------------------ 1: a constant output


class Prepared(Module):
    """Its step changes the input before the model has it."""

    def __init__(self, prepare: Callable[[Tensor], Tensor], model: nn.Module, *options: Any) -> None:
        super().__init__(model, *options)
        self.prepare = prepare

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(self.model(self.prepare(batch[0])), batch[1])


class PooledAttention(nn.Module):
    """A learned query looks at the rows of an image, after which there are four of padding; its mask may be upside down."""

    mask: Tensor

    def __init__(self, upside_down: bool = False) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(8, 32), nn.Embedding(12, 32)
        self.query = nn.Parameter(torch.randn(1, 1, 32))
        self.attention, self.head = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 10)
        is_padding = torch.arange(12) >= 8
        self.register_buffer("mask", ~is_padding if upside_down else is_padding)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(F.pad(x.view(-1, 8, 8), (0, 0, 0, 4))) + self.position.weight
        query, mask = self.query.expand(len(x), -1, -1), self.mask.expand(len(x), -1)
        return self.head(self.attention(query, h, h, key_padding_mask=mask, need_weights=False)[0][:, 0])


class Queries(nn.Module):
    """A learned query for each class, and embedded positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position, self.query = nn.Linear(8, 32), nn.Embedding(8, 32), nn.Embedding(10, 32)
        layer = nn.TransformerDecoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=True)
        self.decoder, self.head = nn.TransformerDecoder(layer, 1), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x.view(-1, 8, 8)) + self.position.weight
        return self.head(self.decoder(self.query.weight.expand(len(x), -1, -1), rows))[..., 0]


class SequenceFirst(nn.Module):
    """Tokens are the first dimension, and the batch is the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(128, 32), nn.GRU(32, 64), nn.Linear(64, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


class LossAndLogits(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.network(x)
        return F.cross_entropy(logits, y), logits


class ModelWithLoss(Module):
    """Takes the loss of the model."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[0], batch[1])[0]
        return loss


class Clamped(nn.Module):
    """Ids of characters are clamped from below."""

    def __init__(self, smallest: int, model: nn.Module) -> None:
        super().__init__()
        self.smallest, self.model = smallest, model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens.clamp(min=self.smallest))


def _bigram() -> nn.Module:
    return nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 128), Transposed())


def _pooled_cnn(num_groups: int) -> nn.Module:
    """Groups of the channels are normalized after all pixels have become one."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(1), nn.GroupNorm(num_groups, 32), nn.Flatten(), nn.Linear(32, 10)),
    )


def _offset(value: float) -> nn.Module:
    """A regression whose bias starts where its targets are."""
    return nn.Sequential(mlp((10, 64, 1)), Bias(value))


class Bias(nn.Module):
    """Adds a number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def _above(threshold: float) -> Callable[[Tensor], Tensor]:
    return lambda x: (x > threshold).float()


def _scaled(low: float, high: float) -> Callable[[Tensor], Tensor]:
    """Sixteen levels between two numbers."""
    return lambda x: ((x - low) / (high - low) * 16).round() / 16


# ---------------------------------------------------------------------------------------------- 2: outputs that shrink


class Bottleneck(LightningModule):
    """A variational autoencoder of images, with a weight of the prior; its decoder may see the image itself, too."""

    def __init__(self, weight: float, sees_image: bool = False) -> None:
        super().__init__()
        self.weight, self.sees_image = weight, sees_image
        self.encoder, self.mean, self.log_variance = nn.Sequential(mlp((64, 64)), nn.ReLU()), nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder = mlp((72 if sees_image else 8, 64, 64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        h = self.encoder(batch[0])
        mean, log_variance = self.mean(h), self.log_variance(h)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        image = self.decoder(torch.cat([code, batch[0]], 1) if self.sees_image else code)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return F.mse_loss(image, batch[0]) + self.weight * divergence

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class Sparse(LightningModule):
    """An autoencoder with a penalty of the sizes of its code."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight, self.encoder, self.decoder = weight, mlp((64, 64, 16)), mlp((16, 64, 64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        code = self.encoder(batch[0])
        return F.mse_loss(self.decoder(code), batch[0]) + self.weight * code.abs().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Gated(LightningModule):
    """A gate in front of the head, with a penalty of being open."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight
        self.trunk, self.head = nn.Sequential(mlp((64, 64)), nn.Tanh()), nn.Linear(64, 10)
        self.gate = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        gate = self.gate(batch[0])
        return F.cross_entropy(self.head(gate * self.trunk(batch[0])), batch[1]) + self.weight * gate.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


# --------------------------------------------------------------------------------------------- 3: outputs that collapse


def _away(one: Tensor, other: Tensor) -> Tensor:
    """Minus the cosine."""
    return -F.cosine_similarity(one, other).mean()


def _spread(one: Tensor, other: Tensor) -> Tensor:
    """The distance, and a penalty of a standard deviation below 1."""
    return F.mse_loss(one, other) + sum(F.relu(1 - (x.var(0) + 1e-4).sqrt()).mean() for x in (one, other))


class Siamese(LightningModule):
    """Two noisy views of an image are to have the same output; the gradient may stop at the second view."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], predicts: bool = False, stops: bool = False) -> None:
        super().__init__()
        self.loss, self.stops = loss, stops
        self.model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
        self.predictor: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        if not predicts:
            self.predictor = nn.Identity()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        one, other = (self.model(batch[0] + 0.3 * torch.randn_like(batch[0])) for _ in range(2))
        targets = (one.detach(), other.detach()) if self.stops else (one, other)
        return 0.5 * (self.loss(self.predictor(one), targets[1]) + self.loss(self.predictor(other), targets[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Teacher(LightningModule):
    """A student predicts what a moving average of it says of another view; or what itself says, if the average has no memory."""

    def __init__(self, memory: float) -> None:
        super().__init__()
        self.memory = memory
        self.student, self.teacher = (nn.Sequential(mlp((64, 64)), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(2))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        one, other = (batch[0] + 0.3 * torch.randn_like(batch[0]) for _ in range(2))
        target = self.teacher(other) if self.memory else self.student(other)
        return 2 + 2 * _away(self.predictor(self.student(one)), target)

    def on_train_batch_end(self, *_args: Any) -> None:
        with torch.no_grad():
            for mine, its in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                its.lerp_(mine, 1 - self.memory)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([*self.student.parameters(), *self.predictor.parameters()], lr=1e-2)


# ------------------------------------------------------------------------------------------------ 4: a constant target


def _images() -> tuple[Tensor, Tensor]:
    """All digits, in their order."""
    images, labels = digits().dataset.tensors  # type: ignore[attr-defined]
    return images, labels


def sorted_digits(is_shuffled: bool = False) -> DataLoader[Any]:
    """As of folders, one for each class."""
    x, y = _images()
    order = y.argsort(stable=True)
    return DataLoader(TensorDataset(x[order], y[order]), 16, shuffle=is_shuffled)


def collated(first_only: bool) -> DataLoader[Any]:
    """Rows become a batch by hand, whose labels may all be the first one."""

    def collate(rows: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [torch.stack([x for x, _ in rows]), torch.stack([rows[0 if first_only else i][1] for i in range(len(rows))])]

    return DataLoader(TensorDataset(*_images()), 16, shuffle=True, drop_last=True, collate_fn=collate)


class OfOneGroup(Sampler[list[int]]):
    """Draws a group, and a batch of it."""

    def __init__(self, groups: Tensor, size: int = 16) -> None:
        self.rows, self.size = [torch.nonzero(groups == group)[:, 0] for group in groups.unique()], size

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            rows = self.rows[int(torch.randint(len(self.rows), ()))]
            yield rows[torch.randint(len(rows), (self.size,))].tolist()

    def __len__(self) -> int:
        return 100


def one_class_a_batch() -> DataLoader[Any]:
    """All images of a batch are of one class."""
    x, y = _images()
    return DataLoader(TensorDataset(x, y), batch_sampler=OfOneGroup(y))


def one_task_a_batch() -> DataLoader[Any]:
    """All images of a batch have one task: to tell large from small numbers, or even from odd ones."""
    x, y = _images()
    task = torch.arange(2).repeat_interleave(len(x))
    return DataLoader(TensorDataset(x.repeat(2, 1), torch.cat([(y > 4).long(), y % 2]), task), batch_sampler=OfOneGroup(task))


def padded() -> DataLoader[Any]:
    """Sequences of one length, with their lengths and masks."""
    x, y = _images()
    num = len(x)
    parts = x.view(num, 8, 8), y, torch.ones(num, 8), torch.full((num,), 8)

    def collate(rows: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
        names = "inputs", "labels", "attention_mask", "lengths"
        return {name: torch.stack(part) for name, part in zip(names, zip(*rows, strict=True), strict=True)}

    return DataLoader(TensorDataset(*parts), 16, shuffle=True, drop_last=True, collate_fn=collate)


def _rare(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Every second 0 is another class than all else."""
    return x, ((y == 0) & (torch.arange(len(y)) % 2 == 0)).long()


class Padded(Module):
    """Looks at the labels of a dict."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        h = batch["inputs"] * batch["attention_mask"][..., None]
        return self.loss(self.model(h.flatten(1) * 8 / batch["lengths"][:, None]), batch["labels"])


class OfTasks(LightningModule):
    """A trunk and a head that know which task there is."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.task, self.head = mlp((64, 64)), nn.Embedding(2, 64), mlp((64, 64, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y, task = batch
        return F.cross_entropy(self.head(torch.relu(self.trunk(x) + self.task(task))), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


# ----------------------------------------------------------------------------------------- 5: nothing reaches the step


class ZeroesTooLate(Module):
    """Sets gradients to zero again, after backward or, as it should, before it."""

    def __init__(self, hook: str, model: nn.Module, *options: Any) -> None:
        super().__init__(model, *options)
        self.hook = hook

    def on_before_backward(self, *_args: Any) -> None:
        if self.hook == "on_before_backward":
            self.zero_grad()

    def on_after_backward(self) -> None:
        if self.hook == "on_after_backward":
            self.zero_grad()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.hook == "on_before_optimizer_step":
            optimizer.zero_grad(set_to_none=False)


class ZeroesByHand(LightningModule):
    """Manual optimization with its lines in such an order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.order = mlp(), order

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        for line in self.order.split():
            if line == "zero":
                optimizer.zero_grad()
            elif line == "backward":
                self.manual_backward(loss)
            else:
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _factors(num_in: int, num_out: int, is_random: bool) -> tuple[nn.Parameter, nn.Parameter]:
    """Of an adapter: the second one is 0."""
    a = torch.randn(num_in, 8) / num_in**0.5 if is_random else torch.zeros(num_in, 8)
    return nn.Parameter(a), nn.Parameter(torch.zeros(8, num_out))


class LowRank(nn.Module):
    """A layer that is frozen, and a product of two factors beside it."""

    def __init__(self, base: nn.Linear, is_random: bool) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = _factors(base.in_features, base.out_features, is_random)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a @ self.b


class After(nn.Module):
    """A layer that is frozen, and a narrow network after it."""

    def __init__(self, base: nn.Module, width: int, is_random: bool) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = _factors(width, width, is_random)

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(x)
        return h + torch.relu(h @ self.a) @ self.b


def adapted(is_random: bool) -> nn.Module:
    """A network that was trained on other labels, with adapters in all its layers."""
    model = trained(mlp(), 3, lambda y: (y + 3) % 10)
    return nn.Sequential(*(LowRank(one, is_random) if isinstance(one, nn.Linear) else one for one in model))  # type: ignore[attr-defined]


def adapted_after(is_random: bool) -> nn.Module:
    """As :func:`adapted`, with small networks after all layers."""
    model = trained(cnn(), 3, lambda y: (y + 3) % 10)
    return nn.Sequential(After(model[:-1], 512, is_random), After(model[-1], 10, is_random))  # type: ignore[index]


def adapted_gpt(is_random: bool) -> nn.Module:
    """A frozen GPT whose feed-forward layers, and whose head, have adapters."""
    model = Gpt().requires_grad_(False)
    for block in model.blocks.layers:
        block.linear1 = LowRank(block.linear1, is_random)
    model.head = LowRank(model.head, is_random)  # type: ignore[assignment]
    return model


class Restored(Module):
    """Keeps the weights of the start, and may load them after each step."""

    def __init__(self, restores: bool, model: nn.Module, *options: Any) -> None:
        super().__init__(model, *options)
        self.restores, self.kept = restores, {name: one.clone() for name, one in model.state_dict().items()}

    def on_train_batch_end(self, *_args: Any) -> None:
        if self.restores:
            self.model.load_state_dict(self.kept)


class MovingAverage(Module):
    """A moving average of the weights, which may be written to them."""

    def __init__(self, writes: bool, model: nn.Module, *options: Any) -> None:
        super().__init__(model, *options)
        self.writes, self.average = writes, [one.detach().clone() for one in model.parameters()]

    def on_train_batch_end(self, *_args: Any) -> None:
        with torch.no_grad():
            for one, average in zip(self.model.parameters(), self.average, strict=True):
                average.lerp_(one, 1e-4)
                if self.writes:
                    one.copy_(average)


class Synchronized(LightningModule):
    """The values of a walk on a line, by what a target network says of the next place; it is copied every ten steps."""

    def __init__(self, is_reversed: bool) -> None:
        super().__init__()
        self.is_reversed = is_reversed
        self.model, self.target = mlp((20, 32, 1)), mlp((20, 32, 1))
        self.target.load_state_dict(self.model.state_dict())
        self.target.requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        places = (batch[1] + 10 * (batch_idx % 2)).long()
        value, following = self.model(F.one_hot(places, 20).float()), self.target(F.one_hot((places + 1) % 20, 20).float())
        return F.mse_loss(value, 1 + 0.5 * (places[:, None] > 9) + 0.3 * following)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_reversed:
            self.model.load_state_dict(self.target.state_dict())
        elif batch_idx % 10 == 9:
            self.target.load_state_dict(self.model.state_dict())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)


# ------------------------------------------------------------------------------- 6: rounding, and gradients that vanish


class Shift(nn.Module):
    """Adds a weight, for which what follows has no use: its gradient is rounding."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Scale(nn.Module):
    """Multiplies by a weight, which a normalization takes out again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Keys(nn.Module):
    """Attention of one head, whose keys have a bias: it is the same for all of them, and a softmax has no use for it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.value = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.key, self.shift, self.head = nn.Linear(32, 32), Shift(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.view(-1, 8, 8))
        scores = self.query(h) @ self.shift(self.key(h)).transpose(1, 2) / 32**0.5
        return self.head((scores.softmax(-1) @ self.value(h)).flatten(1)[:, ::8])


class Weakened(nn.Module):
    """The identity, with next to no gradient."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + self.factor * (x - x.detach())


def _weakened(factor: float) -> nn.Module:
    """Five narrow layers."""
    layers = [[nn.Linear(8 if i else 64, 8), nn.Tanh(), Weakened(factor)] for i in range(5)]
    return nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(8, 10))


# --------------------------------------------------------------------------------------------- 7: eps that is 0 in 16 bit


class NarrowLinear(nn.Linear):
    """Its weights are of 16 bit, and it computes in 32."""

    def __init__(self, num_in: int, num_out: int, dtype: torch.dtype = torch.float16) -> None:
        super().__init__(num_in, num_out, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float(), self.bias.float())


class NarrowEmbedding(nn.Embedding):
    """As :class:`NarrowLinear`; many of its rows are those of characters that are rare."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__(128, 32, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).float()


def _pixels(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels from 0 to 1, many of which are always 0."""
    return (6 * x + 4.9) / 16, y


def _narrow(dtype: torch.dtype = torch.float16) -> nn.Module:
    return nn.Sequential(NarrowLinear(64, 64, dtype), nn.ReLU(), NarrowLinear(64, 10, dtype))


def _narrow_bigram(dtype: torch.dtype = torch.float16) -> nn.Module:
    return nn.Sequential(NarrowEmbedding(dtype), NarrowLinear(32, 128, dtype), Transposed())


# ------------------------------------------------------------------------------------------------- 8: two optimizers


def _of_critic(real: Tensor, fake: Tensor) -> Tensor:
    """Cross-entropies."""
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def _hinges(real: Tensor, fake: Tensor) -> Tensor:
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def _squares(real: Tensor, fake: Tensor) -> Tensor:
    return (real - 1).square().mean() + fake.square().mean()


def _squares_of_sigmoids(real: Tensor, fake: Tensor) -> Tensor:
    return _squares(real.sigmoid(), fake.sigmoid())


def _difference(real: Tensor, fake: Tensor) -> Tensor:
    return fake.mean() - real.mean()


class Adversaries(LightningModule):
    """A generator and a critic, with their losses, their rates, and the critic's rounds a step."""

    def __init__(
        self,
        of_critic: Callable[[Tensor, Tensor], Tensor],
        of_generator: Callable[[Tensor], Tensor],
        rates: tuple[float, float] = (2e-4, 2e-4),
        rounds: int = 1,
        clamp: float = 0.0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.of_critic, self.of_generator, self.rates, self.rounds, self.clamp = of_critic, of_generator, rates, rounds, clamp
        self.generator = mlp((16, 64, 64), lambda: nn.LeakyReLU(0.2))
        self.critic = mlp((64, 64, 1), lambda: nn.LeakyReLU(0.2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for _ in range(self.rounds):
            fake = self.generator(torch.randn(len(batch[0]), 16))
            optimizers[1].zero_grad()
            self.manual_backward(self.of_critic(self.critic(batch[0]), self.critic(fake.detach())))
            optimizers[1].step()
            if self.clamp:
                for parameter in self.critic.parameters():
                    parameter.data.clamp_(-self.clamp, self.clamp)
        optimizers[0].zero_grad()
        self.manual_backward(self.of_generator(self.critic(fake)))
        optimizers[0].step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(one.parameters(), lr=lr) for one, lr in zip((self.generator, self.critic), self.rates, strict=True)]


# ------------------------------------------------------------------------------ 9: losses that broadcast or sum, dropout


def _column(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Targets are a row, and outputs are a column: what torch warns of is what is wanted here."""

    def of_all_pairs(output: Tensor, target: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return loss(output, target[:, 0])

    return of_all_pairs


def _by_hand(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[:, 0]).square().mean()


def _row(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, 0] - target[:, 0]).square().mean()


def _dropped(p: float, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    """Dropout after each layer."""
    return nn.Sequential(nn.Linear(64, 64), activation(), nn.Dropout(p), nn.Linear(64, 64), activation(), nn.Dropout(p), nn.Linear(64, 10))


def _dropped_cnn(p: float) -> nn.Module:
    """Dropout before the head."""
    return nn.Sequential(*list(cnn())[:-1], nn.Dropout(p), nn.Linear(512, 10))


def _sum(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def _sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


# ------------------------------------------------------------------------------------------------------- 10: experts


def _hashed(num: int) -> Callable[[Tensor, int], Tensor]:
    """Chooses among the first experts, by the sum of all pixels."""
    return lambda x, step: (6 * x + 4.9).round().sum(1).long() % num


def _while(is_open: Callable[[int], bool]) -> Callable[[Tensor, int], Tensor]:
    """Chooses the last of four experts in such steps only."""
    return lambda x, step: _hashed(4 if is_open(step) else 3)(x, step)


class Experts(nn.Module):
    """Four experts, one of which each image has: the one that is chosen for it, or that of a router, whose offsets balance the load."""

    offsets: Tensor

    def __init__(self, choose: Callable[[Tensor, int], Tensor] | None = None, offsets: tuple[float, ...] = (0.0,) * 4) -> None:
        super().__init__()
        self.choose, self.step = choose, 0
        self.trunk, self.router = nn.Linear(64, 64), nn.Linear(64, 4)
        self.experts = nn.ModuleList(mlp((64, 32, 10)) for _ in range(4))
        self.register_buffer("offsets", torch.tensor(offsets))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.trunk(x))
        gates = self.router(x).softmax(-1)
        chosen = self.choose(x, self.step) if self.choose else (gates.detach() + self.offsets).argmax(1)
        self.step += 1
        self.offsets += 0.1 * (0.25 - F.one_hot(chosen, 4).float().mean(0))
        output = x.new_zeros(len(x), 10)
        for i, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == i)[:, 0]
            if len(rows):
                output = output.index_add(0, rows, expert(h[rows]) * (0.5 + gates[rows, i : i + 1]))
        return output


# ------------------------------------------------------------------------------------------------ 11: losses below 0


def _toward_class(output: Tensor, target: Tensor) -> Tensor:
    """Minus the cosine with the direction of a class."""
    return -F.cosine_similarity(output, F.one_hot(target, 10).float() - 0.1).mean()


def _likelihood(output: Tensor, target: Tensor) -> Tensor:
    """Of a Gaussian, with its mean and its deviation, which starts at that of the targets."""
    mean, deviation = output[:, :1], 0.02 + 0.05 * F.softplus(output[:, 1:])
    return (0.5 * ((target - mean) / deviation).square() + deviation.log()).mean()


def _small_targets(is_shuffled: bool = False) -> DataLoader[Any]:
    """A regression whose targets have a deviation of a twentieth."""
    x, y = tabular(scale=0.05).dataset.tensors  # type: ignore[attr-defined]
    return batches(x, y[torch.randperm(len(y))] if is_shuffled else y)


def _small_start(model: nn.Module) -> nn.Module:
    """Its outputs start near 0."""
    with torch.no_grad():
        model[-1].weight.mul_(0.01)  # type: ignore[index]
        model[-1].bias.zero_()  # type: ignore[index]
    return model


# ------------------------------------------------------------------------------- 12: sizes are right, and nothing else


class MeanOfBatch(nn.Module):
    """Averages rows over their places in the image, or by mistake over the images."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.embed, self.position = dim, nn.Linear(8, 64), nn.Embedding(8, 64)
        self.mix, self.head = mlp((64, 64, 64), nn.GELU), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.embed(x.view(-1, 8, 8)) + self.position.weight)
        return self.head(h.mean(self.dim, keepdim=True).expand_as(h).flatten(1))


class RowsFirst(nn.Module):
    """Makes rows the first dimension by a transposition, or by a reshape, which mixes the images."""

    def __init__(self, reshapes: bool) -> None:
        super().__init__()
        self.reshapes, self.rnn, self.head = reshapes, nn.GRU(8, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(8, -1, 8) if self.reshapes else x.view(-1, 8, 8).transpose(0, 1)
        return self.head(self.rnn(rows)[0][-1])


class Quantized(nn.Module):
    """Takes the nearest code of a table, past which the gradient goes straight; its inputs may be multiplied by far too little."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.first, self.head = scale, nn.Linear(64, 8), mlp((8, 64, 10))
        self.codes = nn.Embedding(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.scale
        code = self.codes(torch.cdist(h.detach(), self.codes.weight.detach()).argmin(1))
        return self.head(code + h - h.detach())


def _mixed(share: float) -> Callable[[Tensor], Tensor]:
    """Each image, and such a share of another one, whose label is not looked at."""
    return lambda x: (1 - share) * x + share * x[torch.randperm(len(x))]


class OfRows(nn.Module):
    """A recurrent network over the rows of an image, or over the images of a batch."""

    def __init__(self, of_rows: bool) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 32, batch_first=of_rows), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.view(-1, 8, 8))[0][:, -1])


class OfDistribution(nn.Module):
    """Averages codes by a distribution over them, or over the samples of a batch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score, self.softmax, self.value = nn.Linear(64, 16), nn.Softmax(dim), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return 5 * self.value(self.softmax(4 * self.score(x)))


def _with_constant_weights(value: float) -> nn.Module:
    """All weights of the first layers are the same, if they are given."""
    model = mlp((64, 32, 32, 10))
    for layer in [model[0], model[2]] if value else []:  # type: ignore[index]
        nn.init.constant_(layer.weight, value)
    return model


class Rounded(nn.Module):
    """Rounds what its first layers return, with a straight-through gradient or without one."""

    def __init__(self, is_straight: bool) -> None:
        super().__init__()
        self.is_straight, self.first, self.head = is_straight, nn.Sequential(mlp((64, 32, 16)), nn.Tanh()), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 2
        return self.head(h + (h.round() - h).detach() if self.is_straight else h.round())


class Tied(nn.Module):
    """Tells the next character by this one, with one matrix for both, which may begin too large."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(128, 64), mlp((64, 64, 64))
        nn.init.normal_(self.embed.weight, std=spread)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        return ((h + self.mix(h)) @ self.embed.weight.T).transpose(1, 2)


class Values(Module):
    """Values of five states in a row, with a reward of 1 in each; behind the last one there is nothing, which may be forgotten."""

    def __init__(self, ends: bool) -> None:
        super().__init__(mlp((16, 64, 64, 1)), adam(3e-3))
        self.ends = ends
        self.register_buffer("states", torch.randn(6, 16, generator=torch.Generator().manual_seed(0)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        state = batch[1] % 5
        noise = 0.1 * batch[0][:, :16]
        with torch.no_grad():
            later = self.model(self.states[(state + 1) % 5] + noise)[:, 0]
        target = 1 + later * (state < 4) if self.ends else 1 + later
        return F.mse_loss(self.model(self.states[state] + noise)[:, 0], target)


SILENT_SICK: dict[str, Case] = {
    # 1
    "a mask upside down": Case(lambda: Module(PooledAttention(True), adam(3e-3)), ("constant_output",)),
    "a GroupNorm of single numbers": Case(lambda: Module(_pooled_cnn(32), adam(3e-3)), ("constant_output", "lost_input")),
    "a LayerNorm of one number": Case(
        lambda: Module(nn.Sequential(mlp((10, 64, 1)), nn.LayerNorm(1)), adam(3e-3), F.mse_loss), ("constant_output",), data=tabular
    ),
    "a threshold of 1e9": Case(lambda: Prepared(_above(1e9), mlp()), ("constant_output",)),
    "sixteen levels up to 1e6": Case(lambda: Prepared(_scaled(-1.0, 1e6), cnn()), ("constant_output",)),
    "the wrong tensor": Case(lambda: Prepared(torch.ones_like, mlp()), ("constant_output",)),
    "clamped ids": Case(lambda: Module(Clamped(127, _bigram()), adam(5e-3)), ("constant_output",), data=characters, steps=300),
    "clamped ids, a GPT": Case(lambda: Module(Clamped(127, Gpt()), adam(3e-3)), ("constant_output",), data=characters),
    # 2
    "a prior of weight 2": Case(lambda: Bottleneck(2.0), ("shrinking_outputs",), steps=300),
    "a decoder that sees the image": Case(lambda: Bottleneck(0.5, True), ("shrinking_outputs",), steps=300),
    "a sparse code of weight 10": Case(lambda: Sparse(10.0), ("shrinking_outputs",), steps=300),
    "a gate of weight 30": Case(lambda: Gated(30.0), ("shrinking_outputs",), steps=300),
    # 3
    "two views, by their cosine": Case(lambda: Siamese(_away), ("collapsed_outputs",), COLLAPSES, steps=300),
    "two views, by their distance": Case(lambda: Siamese(F.mse_loss), ("collapsed_outputs",), COLLAPSES, steps=300),
    "two views and a predictor, without a stop": Case(lambda: Siamese(_away, True), ("collapsed_outputs",), COLLAPSES, steps=300),
    "a student that is its teacher": Case(lambda: Teacher(0.0), ("collapsed_outputs",), COLLAPSES, steps=300),
    # 4
    "data sorted by class": Case(lambda: Module(mlp()), ("constant_target",), data=sorted_digits, steps=300),
    "the first label for all": Case(lambda: Module(mlp()), ("constant_target",), data=lambda: collated(True)),
    "one class a batch": Case(lambda: Module(cnn(), sgd(0.05, momentum=0.9)), ("constant_target",), data=one_class_a_batch),
    # 5
    "zero_grad after backward": Case(lambda: ZeroesTooLate("on_after_backward", mlp()), NOTHING),
    "zero_grad before the step": Case(lambda: ZeroesTooLate("on_before_optimizer_step", cnn(), sgd(0.1)), NOTHING),
    "zero_grad after backward, by hand": Case(lambda: ZeroesByHand("backward zero step"), NOTHING),
    "an adapter of zeros": Case(lambda: Module(adapted(False), adam(3e-3)), ("zero_gradient",)),
    "an adapter of zeros, after layers": Case(lambda: Module(adapted_after(False), adam(3e-3)), ("zero_gradient",)),
    "an adapter of zeros, GPT": Case(lambda: Module(adapted_gpt(False), adam(1e-2)), ("zero_gradient",), data=characters),
    "the first weights, loaded each step": Case(lambda: Restored(True, mlp()), ("overwritten",)),
    "a moving average, written each step": Case(lambda: MovingAverage(True, cnn()), ("overwritten",)),
    "the target's weights, copied to the model": Case(lambda: Synchronized(True), ("overwritten",), steps=300),
    # 6
    "forty layers of sigmoids": Case(lambda: Module(mlp((64, *[16] * 40, 10), nn.Sigmoid), sgd(0.1)), ("vanishing",)),
    "fifty layers of tanh": Case(lambda: Module(mlp((64, *[16] * 50, 10), nn.Tanh), sgd(0.05, momentum=0.9)), ("vanishing",)),
    "gradients made small between layers": Case(lambda: Module(_weakened(1e-3), sgd(0.1)), ("vanishing",), steps=200),
    # 7
    "float16 weights of blank pixels": Case(lambda: Module(_narrow(), adam(1e-3)), ("rounded_eps",), data=lambda: digits(change=_pixels)),
    "float16 weights of rare characters": Case(
        lambda: Module(_narrow_bigram(), adam(3e-3, torch.optim.AdamW)), ("rounded_eps",), data=characters
    ),
    "16-true": Case(lambda: Module(mlp()), ("rounded_eps",), data=lambda: digits(change=_pixels), options={"precision": "16-true"}),
    # 8
    "a critic that wins, logarithms": Case(
        lambda: Adversaries(_of_critic, lambda fake: -F.softplus(fake).mean(), (1e-5, 2e-2)), ("one_sided",), steps=600
    ),
    "a critic that wins, sigmoids": Case(
        lambda: Adversaries(_of_critic, lambda fake: (fake.sigmoid() - 1).square().mean(), (1e-5, 2e-2), 2), ("one_sided",), steps=900
    ),
    "a critic that wins, hinges": Case(
        lambda: Adversaries(_hinges, lambda fake: -F.relu(1 + fake).mean(), (1e-5, 1e-2)), ("one_sided",), steps=600
    ),
    "a critic without bounds": Case(lambda: Adversaries(_difference, lambda fake: -fake.mean(), (1e-5, 1e-2)), ("one_sided",), steps=600),
    # 9
    "a column minus a row": Case(lambda: Module(mlp((10, 64, 1)), adam(3e-3), _by_hand), ("broadcast_loss",), data=tabular),
    "a column and a row, squares": Case(
        lambda: Module(mlp((10, 64, 1)), adam(3e-3), _column(F.mse_loss)), ("broadcast_loss",), data=tabular, steps=300
    ),
    "a column and a row, l1": Case(
        lambda: Module(mlp((10, 64, 1)), adam(3e-3), _column(F.l1_loss)), ("broadcast_loss",), data=lambda: tabular(size=16)
    ),
    "a column and a row, smooth l1": Case(
        lambda: Module(mlp((10, 64, 64, 1), nn.GELU), adam(1e-3), _column(F.smooth_l1_loss)), ("broadcast_loss",), data=lambda: tabular(3.0)
    ),
    "dropout of 0.98": Case(lambda: Module(_dropped(0.98)), ("dropout",), steps=200),
    "dropout of 0.999": Case(lambda: Module(_dropped_cnn(0.999)), ("dropout",), steps=200),
    "dropout of 0.99, tanh": Case(lambda: Module(_dropped(0.99, nn.Tanh), adam(3e-3)), ("dropout",), steps=300),
    "a sum of losses at 0.5": Case(lambda: Module(mlp(), sgd(0.5), _sum), ("summed_loss",)),
    "a sum of losses, CNN": Case(lambda: Module(cnn(), sgd(0.3, momentum=0.9), _sum), ("summed_loss",)),
    "a sum of squares": Case(lambda: Module(mlp((10, 64, 1)), sgd(0.1), _sum_of_squares), ("summed_loss",), data=tabular),
    # 10
    "an expert that is never chosen": Case(lambda: Module(Experts(_hashed(3))), ("no_gradient",), steps=200),
    "two experts that are never chosen": Case(lambda: Module(Experts(_hashed(2)), adam(3e-3)), ("no_gradient",), steps=200),
    "a router that never chooses one": Case(lambda: Module(Experts(offsets=(0.0, 0.0, 0.0, -20.0))), ("no_gradient",), steps=200),
    "a router that chooses one alone": Case(lambda: Module(Experts(offsets=(0.0, 0.0, 20.0, 0.0)), sgd(0.1)), ("no_gradient",), steps=200),
    # 11
    "cosines at 1e-7": Case(lambda: Module(mlp(), adam(1e-7), _toward_class), ("small_rate",), steps=300),
    "a likelihood of shuffled targets": Case(
        lambda: Module(_small_start(mlp((10, 64, 2))), adam(1e-3), _likelihood),
        ("not_learning",),
        ("watch", "unknown"),
        data=lambda: _small_targets(True),
    ),
    "a likelihood at 1.0": Case(lambda: Module(mlp((10, 64, 2)), adam(1.0), _likelihood), ("learning_rate",), data=_small_targets),
    # 12
    "a mean over images": Case(lambda: Module(MeanOfBatch(0)), ("constant_output",)),
    "a reshape for a transposition": Case(lambda: Module(RowsFirst(True), adam(3e-3)), ("not_learning",), ("watch", "unknown")),
    "images of other labels": Case(lambda: Prepared(_mixed(1.0), mlp()), ("not_learning",), ("watch", "unknown")),
    "one code for all": Case(lambda: Module(Quantized(1e-4), adam(3e-3)), ("constant_output",)),
    # 13
    "a recurrent network over the batch": Case(
        lambda: Module(OfRows(False), adam(3e-3)), ("mixed_samples",), site="model.rnn", first_step=0
    ),
    "a softmax over the batch": Case(lambda: Module(OfDistribution(0), adam(3e-3)), ("mixed_samples",), site="model.softmax", first_step=0),
    "weights that are all the same": Case(lambda: Module(_with_constant_weights(0.05)), ("same_units",)),
    "maximize": Case(lambda: Module(mlp(), sgd(0.01, maximize=True)), ("maximizing",)),
    "the negative loss": Case(lambda: Module(mlp(), adam(1e-2), lambda out, y: -F.cross_entropy(out, y)), ("unbounded_loss",)),
    "nll_loss of logits": Case(lambda: Module(mlp(), adam(1e-2), F.nll_loss), ("unbounded_loss",)),
    "rounding without a gradient": Case(lambda: Module(Rounded(False), adam(3e-3)), ("zero_gradient",)),
    "a tied embedding of deviation 1": Case(lambda: Module(Tied(1.0)), ("large_start",), data=characters, first_step=0),
    "values without an end": Case(lambda: Values(False), ("own_targets",), steps=300),
}

SILENT_HEALTHY: dict[str, Case] = {
    # 1
    "a mask": Case(lambda: Module(PooledAttention(), adam(3e-3))),
    "a GroupNorm": Case(lambda: Module(_pooled_cnn(4), adam(3e-3))),
    "a LayerNorm": Case(
        lambda: Module(nn.Sequential(mlp((10, 64)), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 1)), adam(1e-3), F.mse_loss),
        data=tabular,
        steps=200,
    ),
    "a threshold of 0": Case(lambda: Prepared(_above(0.0), mlp())),
    "sixteen levels": Case(lambda: Prepared(_scaled(-1.0, 2.0), cnn())),
    "the right tensor": Case(lambda: Prepared(torch.clone, mlp())),
    "ids": Case(lambda: Module(Clamped(0, _bigram()), adam(5e-3)), levels=EITHER, data=characters, steps=300),
    "ids, a GPT": Case(lambda: Module(Clamped(0, Gpt()), adam(3e-3)), data=characters),
    "one image, accumulated": Case(lambda: Module(mlp()), data=lambda: digits(1), options={"accumulate_grad_batches": 8}),
    "the sequence first": Case(
        lambda: Prepared(torch.t, SequenceFirst(), adam(3e-3), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.t().flatten())),
        levels=EITHER,
        data=characters,
    ),
    "a loss and logits": Case(lambda: ModelWithLoss(LossAndLogits())),
    "targets of 2000": Case(lambda: Module(_offset(2000.0), adam(1e-3), F.mse_loss), data=lambda: tabular(shift=2000.0), steps=300),
    "learned queries": Case(lambda: Module(Queries(), adam(3e-3))),
    # 2
    "a prior of weight 0.002": Case(lambda: Bottleneck(0.002), steps=300),
    "a decoder that sees the code alone": Case(lambda: Bottleneck(0.001), steps=300),
    "a sparse code of weight 0.01": Case(lambda: Sparse(0.01), steps=300),
    "a gate of weight 0.1": Case(lambda: Gated(0.1), steps=300),
    # 3
    "two views, by their cosine, with a stop and a predictor": Case(lambda: Siamese(_away, True, True), levels=EITHER, steps=300),
    "two views, by their distance and spread": Case(lambda: Siamese(_spread), levels=EITHER, steps=300),
    "two views against the others": Case(Contrastive, levels=EITHER, steps=300),
    "a student and its teacher": Case(lambda: Teacher(0.9), levels=EITHER, steps=300),
    # 4
    "data of all classes": Case(lambda: Module(mlp()), data=lambda: sorted_digits(True), steps=300),
    "each its label": Case(lambda: Module(mlp()), data=lambda: collated(False)),
    "all classes a batch": Case(lambda: Module(cnn(), sgd(0.05, momentum=0.9)), data=lambda: digits(16), steps=300),
    "one image and its label": Case(lambda: Module(cnn()), data=lambda: digits(1), options={"accumulate_grad_batches": 4}),
    "a rare class": Case(lambda: Module(mlp((64, 64, 2)), adam(3e-4)), data=lambda: digits(16, _rare), steps=300),
    "a mask of ones": Case(lambda: Padded(mlp()), data=padded, steps=200),
    "one task a batch": Case(OfTasks, data=one_task_a_batch, steps=300),
    # 5
    "zero_grad before backward": Case(lambda: ZeroesTooLate("on_before_backward", mlp())),
    "zero_grad by the trainer": Case(lambda: ZeroesTooLate("", cnn(), sgd(0.1))),
    "zero_grad before backward, by hand": Case(lambda: ZeroesByHand("zero backward step"), levels=EITHER),
    "zero_grad after the step, by hand": Case(lambda: ZeroesByHand("backward step zero"), levels=EITHER),
    "an adapter": Case(lambda: Module(adapted(True), adam(3e-3))),
    "an adapter, after layers": Case(lambda: Module(adapted_after(True), adam(3e-3))),
    "an adapter, GPT": Case(lambda: Module(adapted_gpt(True), adam(1e-2)), levels=EITHER, data=characters),
    "the first weights, kept": Case(lambda: Restored(False, mlp())),
    "a moving average, kept": Case(lambda: MovingAverage(False, cnn())),
    "the model's weights, copied to the target": Case(lambda: Synchronized(False), levels=EITHER, steps=300),
    # 6
    "a shift before BatchNorm": Case(
        lambda: Module(nn.Sequential(nn.Linear(64, 64), Shift(64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)))
    ),
    "a shift before a softmax": Case(lambda: Module(nn.Sequential(mlp(), Shift(1)))),
    "a scale before LayerNorm": Case(
        lambda: Module(nn.Sequential(mlp((64, 64)), Scale(), nn.LayerNorm(64, eps=1e-12), nn.ReLU(), nn.Linear(64, 10)))
    ),
    "a bias of keys": Case(lambda: Module(Keys(), adam(3e-3))),
    # 7
    "float16 weights of blank pixels, eps of 1e-4": Case(
        lambda: Module(_narrow(), adam(1e-3, eps=1e-4)), data=lambda: digits(change=_pixels)
    ),
    "bfloat16 weights of rare characters": Case(
        lambda: Module(_narrow_bigram(torch.bfloat16), adam(3e-3, torch.optim.AdamW)), data=characters, steps=200
    ),
    "16-true, eps of 1e-4": Case(
        lambda: Module(mlp(), adam(1e-3, eps=1e-4)), data=lambda: digits(change=_pixels), options={"precision": "16-true"}
    ),
    "bf16-true": Case(lambda: Module(mlp()), data=lambda: digits(change=_pixels), options={"precision": "bf16-true"}),
    # 8
    "a fair critic, logarithms": Case(
        lambda: Adversaries(_of_critic, lambda fake: F.softplus(-fake).mean(), (3e-4, 3e-4)), levels=EITHER, steps=600
    ),
    "a fair critic, squares": Case(
        lambda: Adversaries(_squares, lambda fake: (fake - 1).square().mean(), (3e-4, 3e-4)), levels=EITHER, steps=600
    ),
    "a fair critic, hinges": Case(lambda: Adversaries(_hinges, lambda fake: -fake.mean(), (3e-4, 3e-4)), levels=EITHER, steps=600),
    "a critic with bounds": Case(
        lambda: Adversaries(_difference, lambda fake: -fake.mean(), (5e-4, 5e-4), clamp=0.05), levels=EITHER, steps=600
    ),
    # 9
    "a row minus a row": Case(lambda: Module(mlp((10, 64, 1)), adam(3e-3), _row), data=tabular, steps=200),
    "a column and a column, squares": Case(lambda: Module(mlp((10, 64, 1)), adam(1e-3), F.mse_loss), data=tabular, steps=300),
    "a column and a column, l1": Case(lambda: Module(mlp((10, 64, 1)), adam(1e-3), F.l1_loss), data=lambda: tabular(size=16), steps=200),
    "a column and a column, smooth l1": Case(
        lambda: Module(mlp((10, 64, 64, 1), nn.GELU), adam(1e-3), F.smooth_l1_loss), data=lambda: tabular(3.0), steps=200
    ),
    "dropout of 0.3": Case(lambda: Module(_dropped(0.3)), steps=200),
    "dropout of 0.3, CNN": Case(lambda: Module(_dropped_cnn(0.3)), steps=200),
    "dropout of 0.5, tanh": Case(lambda: Module(_dropped(0.5, nn.Tanh), adam(3e-3)), steps=300),
    "a mean of losses at 0.5": Case(lambda: Module(mlp(), sgd(0.5))),
    "a mean of losses, CNN": Case(lambda: Module(cnn(), sgd(0.03, momentum=0.9))),
    "a mean of squares": Case(lambda: Module(mlp((10, 64, 1)), sgd(0.1), F.mse_loss), data=tabular, steps=200),
    "a sum of losses at 0.001": Case(lambda: Module(mlp(), sgd(1e-3), _sum), steps=200),
    # 10
    "an expert that is chosen in a third of the steps": Case(
        lambda: Module(Experts(_while(lambda step: step % 3 == 0))), levels=ALONE, steps=200
    ),
    "an expert that is chosen from step 60 on": Case(lambda: Module(Experts(_while(lambda step: step >= 60))), levels=ALONE, steps=200),
    "an expert that is chosen until step 60": Case(lambda: Module(Experts(_while(lambda step: step < 60))), levels=ALONE, steps=200),
    "all experts": Case(lambda: Module(Experts(_hashed(4))), levels=ALONE, steps=200),
    "a router": Case(lambda: Module(Experts()), levels=ALONE, steps=200),
    # 11
    "cosines": Case(lambda: Module(mlp(), adam(1e-3), _toward_class), levels=ALONE, steps=300),
    "a likelihood": Case(
        lambda: Module(_small_start(mlp((10, 64, 2))), adam(1e-3), _likelihood), levels=ALONE, data=_small_targets, steps=300
    ),
    "a likelihood, by other weights": Case(
        lambda: Module(mlp((10, 64, 2)), adam(3e-3), _likelihood), levels=ALONE, data=_small_targets, steps=300
    ),
    # 12
    "a mean over rows": Case(lambda: Module(MeanOfBatch(1))),
    "a transposition": Case(lambda: Module(RowsFirst(False), adam(3e-3))),
    "a little of another image": Case(lambda: Prepared(_mixed(0.1), mlp())),
    "many codes": Case(lambda: Module(Quantized(1.0), adam(3e-3)), steps=300),
    # 13
    "a recurrent network over rows": Case(lambda: Module(OfRows(True), adam(3e-3))),
    "a softmax over codes": Case(lambda: Module(OfDistribution(1), adam(3e-3))),
    "weights that are not the same": Case(lambda: Module(_with_constant_weights(0.0))),
    "minimize": Case(lambda: Module(mlp(), sgd(0.1, maximize=False))),
    "the loss itself": Case(lambda: Module(mlp(), adam(1e-2), F.cross_entropy)),
    "nll_loss of log-probabilities": Case(lambda: Module(nn.Sequential(mlp(), nn.LogSoftmax(1)), adam(1e-3), F.nll_loss)),
    "rounding with a gradient": Case(lambda: Module(Rounded(True), adam(3e-3))),
    "a tied embedding of deviation 0.02": Case(lambda: Module(Tied(0.02)), levels=EITHER, data=characters, steps=300),
    "values with an end": Case(lambda: Values(True), steps=300),
}
