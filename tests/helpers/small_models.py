"""Small models for trainings of seconds, with their losses and optimizers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.lightning_package import Callback, LightningModule, MixedPrecision, StochasticWeightAveraging
from helpers.small_data import digits


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


def finished() -> nn.Module:
    """A network that has learned the digits."""
    return trained(nn.Sequential(mlp((64, 64)), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)), 10)


class EvalNorm(Module):
    """BatchNorm is in eval, as in a network that was loaded, and its weights are trained."""

    def on_train_batch_start(self, *_args: Any) -> None:
        for one in self.model.modules():
            if isinstance(one, nn.BatchNorm2d):
                one.eval()


class Transposed(nn.Module):
    """Classes in front of tokens, as a cross-entropy wants them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


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
