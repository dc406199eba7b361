"""Small trainings whose fault shows in structure, optimizers, loss or input, each beside a healthy one: for the verdict's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from helpers.lightning_package import LightningModule
from helpers.small_data import batches, characters, digits, tabular
from helpers.small_models import Gpt, Module, Transposed, adam, cnn, mlp, sgd
from helpers.trainings import EITHER, Case

# ----------------------------------------------------------------------------------- normalization of two values at a time


def _of_images(norm: nn.Module) -> nn.Module:
    """Channels are normalized after all pixels have become one."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(1)),
        *(norm, nn.Flatten(), nn.Linear(32, 10)),
    )


def _normalized(norm: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), norm, nn.ReLU(), nn.Linear(width, 10))


# -------------------------------------------------------------------------------------- weights that the module does not have


class Listed(LightningModule):
    """Its layers are in a list, or a dict, which a module does not look into; with ``given`` the optimizer has them all the same."""

    def __init__(self, keep: Callable[[list[nn.Module]], Any], given: bool = False, is_trained: bool = True) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        hidden = [nn.Linear(64, 64).requires_grad_(is_trained) for _ in range(3)]
        self.hidden, self.given = keep([*hidden]), hidden if given else []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        h = F.relu(self.first(batch[0]))
        for layer in self.hidden.values() if isinstance(self.hidden, dict) else self.hidden:
            h = F.relu(layer(h))
        return F.cross_entropy(self.head(h), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        others = [parameter for layer in self.given for parameter in layer.parameters()]
        return torch.optim.Adam([*{*self.parameters(), *others}], lr=1e-3)


class Product(nn.Module):
    """Multiplies by a tensor that is a parameter or not."""

    def __init__(self, is_parameter: bool) -> None:
        super().__init__()
        weight = torch.randn(64, 64) / 8
        self.weight = nn.Parameter(weight) if is_parameter else weight.requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.weight)


def _product(is_parameter: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), Product(is_parameter), nn.Linear(64, 10))


class Points(LightningModule):
    """Solves y' = -y by the derivative at points of the step, or at points that it keeps, besides its data."""

    def __init__(self, are_kept: bool) -> None:
        super().__init__()
        self.network = mlp((1, 32, 32, 1), nn.Tanh)
        self.points = torch.linspace(0, 2, 40)[:, None].requires_grad_() if are_kept else None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points = torch.rand(40, 1, requires_grad=True) if self.points is None else self.points
        y = self.network(points)
        slope = torch.autograd.grad(y.sum(), points, create_graph=True)[0]
        return (slope + y).square().mean() + (self.network(points[:1] * 0) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


# ---------------------------------------------------------------------------------------------------------- optimizers


class Rivals(LightningModule):
    """A generator and a critic by hand; the first optimizer has what ``of_first`` says."""

    def __init__(self, of_first: Callable[[Rivals], Iterable[Tensor]]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = mlp((16, 64, 64), lambda: nn.LeakyReLU(0.2)), mlp((64, 64, 1), lambda: nn.LeakyReLU(0.2))
        self.of_first = of_first

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        fake = self.generator(torch.randn(len(batch[0]), 16))
        second.zero_grad()
        self.manual_backward((F.softplus(-self.critic(batch[0])) + F.softplus(self.critic(fake.detach()))).mean())
        second.step()
        first.zero_grad()
        self.manual_backward(F.softplus(-self.critic(fake)).mean())
        first.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.of_first(self), lr=3e-4), torch.optim.Adam(self.critic.parameters(), lr=3e-4)]


class InTurns(LightningModule):
    """Two optimizers of one model step in turns."""

    def __init__(self, *parts: Callable[[nn.Sequential], nn.Module]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.parts = mlp(), parts

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        kinds = (torch.optim.Adam, torch.optim.AdamW)
        return [kind(part(self.model).parameters(), lr=1e-3) for kind, part in zip(kinds, self.parts, strict=True)]


class NowAndThen(Rivals):
    """The generator has its step in every fifth batch, or only after some batches, which may be those of the critic as well."""

    def __init__(self, generator_steps: Callable[[int], bool], critic_steps: Callable[[int], bool]) -> None:
        super().__init__(lambda module: module.generator.parameters())
        self.steps = generator_steps, critic_steps

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        number = self.trainer.fit_loop.epoch_loop.total_batch_idx
        fake = self.generator(torch.randn(len(batch[0]), 16))
        if self.steps[1](number):
            second.zero_grad()
            self.manual_backward((F.softplus(-self.critic(batch[0])) + F.softplus(self.critic(fake.detach()))).mean())
            second.step()
        if self.steps[0](number):
            first.zero_grad()
            self.manual_backward(F.softplus(-self.critic(fake)).mean())
            first.step()


class BeginsLater(Module):
    """A second head, whose loss has a weight of 0 in the first 100 steps."""

    def __init__(self, *options: Any) -> None:
        super().__init__(nn.ModuleList([mlp((64, 64)), nn.Linear(64, 10), nn.Linear(64, 2)]), *options)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        body, first, second = self.model
        h, weight = F.relu(body(batch[0])), float(self.trainer.global_step >= 100)
        return F.cross_entropy(first(h), batch[1]) + weight * F.cross_entropy(second(h), batch[1] % 2)


class LoadedTarget(Module):
    """A target, which requires a gradient and is in no optimizer, gets the weights of the model now and then."""

    def __init__(self, every: int) -> None:
        super().__init__(mlp())
        self.target, self.every = mlp(), every

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step % self.every == 0:
            self.target.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            soft = self.target(batch[0]).softmax(-1)
        logits = self.model(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.1 * F.cross_entropy(logits, soft)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)


class Codebook(Module):
    """An autoencoder whose codes are moved to the mean of what is near them, beside an optimizer of the rest."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList([mlp((64, 64, 8)), mlp((8, 64, 64))]))
        self.codes = nn.Parameter(torch.zeros(32, 8))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        encoder, decoder = self.model
        h = encoder(batch[0])
        if self.trainer.global_step == 0:
            self.codes.data.copy_(h.detach())
        nearest = torch.cdist(h.detach(), self.codes.detach()).argmin(1)
        with torch.no_grad():
            for code in nearest.unique():
                self.codes[code].lerp_(h[nearest == code].mean(0), 0.1)
        code = self.codes.detach()[nearest]
        return F.mse_loss(decoder(h + (code - h).detach()), batch[0]) + 0.25 * F.mse_loss(h, code)


# ------------------------------------------------------------------------------------------ nothing that is not linear, or frozen


def rings(inputs: int = 2) -> DataLoader[Any]:
    """Two classes by the distance from the origin."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2000, inputs, generator=generator)
    distance = x.norm(dim=1)
    return batches(x, (distance > distance.median()).long())


def _convolutions(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 10)), nn.Conv1d(1, 16, 3, padding=1), nn.BatchNorm1d(16), activation()),
        *(nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16), activation(), nn.Flatten(), nn.Linear(160, 2)),
    )


def _with_frozen(model: nn.Sequential, num: int) -> nn.Sequential:
    """The first modules are frozen."""
    model[:num].requires_grad_(False)
    return model


def _frozen_but(name: str, model: nn.Module) -> nn.Module:
    """One parameter is trained."""
    for other, parameter in model.named_parameters():
        parameter.requires_grad_(other == name)
    return model


# -------------------------------------------------------------------------------------------------- labels that the model sees


class Shifted(Module):
    """Tells the tokens from themselves, or each from those before it."""

    def __init__(self, by: int, model: nn.Module, *options: Any) -> None:
        super().__init__(model, *options)
        self.by = by

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, _next = batch
        length = tokens.shape[1] - self.by
        return F.cross_entropy(self.model(tokens[:, :length]), tokens[:, self.by :])


def unmasked(model: Gpt) -> Gpt:
    """Every token sees all others."""
    model.mask.zero_()  # type: ignore[operator]
    return model


def _bigram() -> nn.Module:
    return nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 128), Transposed())


# -------------------------------------------------------------------------------- losses that are 0 or not there, inputs that grow


class Ignoring(Module):
    """Labels, or positions, may all be left out of the loss by a mask."""

    def __init__(self, keep: Callable[[Tensor], Tensor], *options: Any) -> None:
        super().__init__(mlp(), *options)
        self.keep = keep

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self.model(batch[0]), batch[1], reduction="none")
        return (losses * self.keep(batch[1])).sum() / len(losses)


class Aligned(LightningModule):
    """Reads five digits of each image from as many frames, by CTC."""

    def __init__(self, num_frames: int) -> None:
        super().__init__()
        self.network, self.num_frames = mlp((64, 64, num_frames * 11)), num_frames

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        scores = self.network(x).view(len(x), self.num_frames, 11).transpose(0, 1).log_softmax(-1)
        targets = torch.stack([y + 1, (y + 1) % 10 + 1, (y + 2) % 10 + 1, (y + 3) % 10 + 1, (y + 4) % 10 + 1], 1)
        lengths = torch.full((len(x),), self.num_frames), torch.full((len(x),), 5)
        return F.ctc_loss(scores, targets, *lengths, zero_infinity=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Choosy(Module):
    """Leaves a batch out if its loss, or something else, is not as it should be."""

    def __init__(self, accept: Callable[[int, Tensor], bool], model: nn.Module | None = None, *options: Any) -> None:
        super().__init__(mlp() if model is None else model, *options)
        self.accept = accept

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return loss if self.accept(self.trainer.fit_loop.epoch_loop.total_batch_idx, loss.detach()) else None


def written(change: Callable[[Tensor], Tensor], copies: bool = False) -> DataLoader[Any]:
    """Images that are changed when they are loaded, in place or in a copy."""
    x, y = (torch.stack(one) for one in zip(*digits().dataset, strict=True))

    def collate(rows: list[int]) -> list[Tensor]:
        if not copies:
            x[rows] = change(x[rows])
        return [change(x[rows]) if copies else x[rows].clone(), y[rows]]

    return DataLoader(list(range(320)), batch_size=32, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]


_LEAKY = 1.0
"""A slope of ``True``, which is meant for ``inplace``."""

STRUCTURAL_SICK: dict[str, Case] = {
    "a BatchNorm of two images": Case(
        lambda: Module(_normalized(nn.BatchNorm1d(64), 64)), ("two_values",), data=lambda: digits(2), site="model.1", first_step=0
    ),
    "a GroupNorm of pairs": Case(lambda: Module(_of_images(nn.GroupNorm(16, 32)), adam(3e-3)), ("two_values",), site="model.4"),
    "a LayerNorm of two units": Case(lambda: Module(_normalized(nn.LayerNorm(2), 2), adam(3e-3)), ("two_values",), site="model.1"),
    "a list of layers": Case(lambda: Listed(lambda layers: layers), ("unregistered",), first_step=0),
    "a dict of layers": Case(lambda: Listed(lambda layers: {str(one): layer for one, layer in enumerate(layers)}), ("unregistered",)),
    "a tensor for a weight": Case(lambda: Module(_product(False), sgd(0.1)), ("unregistered",)),
    "a generator's optimizer with the critic": Case(
        lambda: Rivals(Rivals.parameters), ("two_optimizers",), steps=200, site="critic.0.weight", first_step=0
    ),
    "an optimizer of the head and one of all": Case(
        lambda: InTurns(lambda model: model[-1], lambda model: model), ("two_optimizers",), steps=200, site="model.4.weight"
    ),
    "an optimizer of all and one without the head": Case(
        lambda: InTurns(lambda model: model, lambda model: model[:-1]), ("two_optimizers",), steps=200, site="model.0.weight"
    ),
    "swapped betas": Case(lambda: Module(mlp(), adam(1e-3, betas=(0.999, 0.9))), ("swapped_betas",), steps=200),
    "swapped betas, AdamW": Case(
        lambda: Module(Gpt(), adam(3e-3, torch.optim.AdamW, betas=(0.95, 0.9))), ("swapped_betas",), data=characters
    ),
    "swapped betas, NAdam": Case(lambda: Module(cnn(), adam(1e-3, torch.optim.NAdam, betas=(0.99, 0.5))), ("swapped_betas",)),
    "a slope of 1": Case(
        lambda: Module(mlp((2, 64, 64, 2), lambda: nn.LeakyReLU(_LEAKY)), adam(3e-3)), ("linear_model",), data=rings, steps=300
    ),
    "layers without activations": Case(
        lambda: Module(mlp((4, 64, 64, 2), lambda: nn.Dropout(0.1)), adam(3e-3)), ("linear_model",), data=lambda: rings(4), steps=400
    ),
    "convolutions without activations": Case(
        lambda: Module(_convolutions(nn.Identity), adam(1e-3)), ("linear_model",), ("watch", "unknown"), data=lambda: rings(10), steps=600
    ),
    "all but a bias frozen": Case(
        lambda: Module(_frozen_but("4.bias", mlp()), sgd(0.1)), ("frozen_parameters",), ("watch", "unknown"), steps=200
    ),
    "all but a bias frozen, convolutions": Case(lambda: Module(_frozen_but("1.bias", cnn()), adam(1e-2)), ("frozen_parameters",)),
    "all but the first bias frozen": Case(
        lambda: Module(_frozen_but("0.bias", mlp()), adam(1e-3)), ("frozen_parameters",), ("watch", "unknown"), steps=200
    ),
    "no label that counts": Case(lambda: Ignoring(lambda y: y > 9), ("zero_loss",), first_step=0),
    "a weight of 0": Case(lambda: Module(cnn(), adam(1e-3), lambda out, y: 0 * F.cross_entropy(out, y)), ("zero_loss",), steps=100),
    "four frames for five digits": Case(lambda: Aligned(4), ("zero_loss",), steps=200),
    "three of four batches left out": Case(lambda: Choosy(lambda number, _loss: number % 4 == 0), ("skipped_batches",), steps=400),
    "losses above 1.8 left out": Case(
        lambda: Choosy(lambda number, loss: number < 60 or bool(loss < 0.1), cnn(), sgd(0.001)), ("skipped_batches",), steps=300
    ),
    "batches of odd numbers alone, after a while": Case(
        lambda: Choosy(lambda number, _loss: number < 100), ("skipped_batches",), steps=300
    ),
    "noise that is written into the images": Case(
        lambda: Module(mlp()), ("growing_input",), data=lambda: written(lambda x: x + 0.4 * torch.randn(x.shape)), steps=300
    ),
    "contrast that is written into the images": Case(
        lambda: Module(cnn()), ("growing_input",), data=lambda: written(lambda x: 1.05 * x), steps=200
    ),
    "brightness that is written into the images": Case(
        lambda: Module(mlp(activation=nn.Tanh)), ("growing_input",), data=lambda: written(lambda x: x + 0.2), steps=300
    ),
    "tokens of themselves, a GPT": Case(lambda: Shifted(0, unmasked(Gpt()), adam(1e-2)), (), ("unknown",), characters, 600),
    "tokens of themselves, a table": Case(lambda: Shifted(0, _bigram(), adam(2e-2)), (), ("unknown",), characters, 600),
    "a mask that hides nothing": Case(lambda: Module(unmasked(Gpt(width=64)), adam(1e-2)), (), ("unknown",), characters, 1500, 50),
}

STRUCTURAL_HEALTHY: dict[str, Case] = {
    "a BatchNorm of sixteen images": Case(lambda: Module(_normalized(nn.BatchNorm1d(64), 64)), data=lambda: digits(16)),
    "a BatchNorm of the pixels of two images": Case(lambda: Module(cnn()), data=lambda: digits(2), steps=400),
    "a GroupNorm of four channels": Case(lambda: Module(_of_images(nn.GroupNorm(8, 32)), adam(3e-3))),
    "a LayerNorm of sixteen units": Case(lambda: Module(_normalized(nn.LayerNorm(16), 16), adam(3e-3))),
    "a list of modules": Case(lambda: Listed(nn.ModuleList)),
    "a list of layers that the optimizer has": Case(lambda: Listed(lambda layers: layers, given=True)),
    "a list of layers that are not to be trained": Case(lambda: Listed(lambda layers: layers, is_trained=False)),
    "a parameter": Case(lambda: Module(_product(True), sgd(0.1))),
    "points of a step": Case(lambda: Points(False), steps=300),
    "points that are kept": Case(lambda: Points(True), steps=300),
    "an optimizer each": Case(lambda: Rivals(lambda module: module.generator.parameters()), levels=EITHER, steps=200),
    "two optimizers of all": Case(lambda: InTurns(lambda model: model, lambda model: model), levels=EITHER, steps=200),
    "an optimizer of the head and one of the rest": Case(
        lambda: InTurns(lambda model: model[-1], lambda model: model[:-1]), levels=EITHER, steps=200
    ),
    "a generator that steps in every fifth batch": Case(
        lambda: NowAndThen(lambda number: number % 5 == 0, lambda _number: True), levels=EITHER, steps=400, every=3
    ),
    "a critic that begins later": Case(
        lambda: NowAndThen(lambda _number: True, lambda number: number >= 100), levels=EITHER, steps=300, every=5
    ),
    "a part whose loss begins later": Case(lambda: BeginsLater(adam(1e-3)), steps=300, every=5),
    "networks that take turns": Case(
        lambda: NowAndThen(lambda number: number % 2 == 0, lambda number: number % 2 == 1), levels=EITHER, steps=200, every=1
    ),
    "a target that is loaded now and then": Case(lambda: LoadedTarget(50), steps=300),
    "a target that is loaded once": Case(lambda: LoadedTarget(10_000), steps=200),
    "a codebook that follows": Case(Codebook, levels=EITHER, steps=300),
    "betas of a GAN": Case(lambda: Module(mlp(), adam(1e-3, betas=(0.5, 0.9))), steps=200),
    "betas that are the same": Case(lambda: Module(mlp(), adam(1e-3, betas=(0.9, 0.9)))),
    "a slope of 0.01": Case(lambda: Module(mlp((2, 64, 64, 2), nn.LeakyReLU), adam(3e-3)), data=rings, steps=300),
    "layers with activations": Case(lambda: Module(mlp((4, 64, 64, 2)), adam(3e-3)), data=lambda: rings(4), steps=400),
    "layers without activations, for images": Case(lambda: Module(mlp(activation=nn.Identity))),
    "layers without activations, for numbers": Case(
        lambda: Module(mlp((10, 32, 1), nn.Identity), adam(3e-3), F.mse_loss), data=tabular, steps=200
    ),
    "a frozen half": Case(lambda: Module(_with_frozen(mlp(), 2), adam(3e-3))),
    "five labels that count": Case(lambda: Ignoring(lambda y: y > 4)),
    "ten frames for five digits": Case(lambda: Aligned(10), steps=300),
    "a module that computes the loss": Case(lambda: Module(cnn(), adam(3e-3), nn.CrossEntropyLoss()), steps=300),
    "one of four batches left out": Case(lambda: Choosy(lambda number, _loss: number % 4 != 1), steps=200),
    "noise in a copy": Case(lambda: Module(mlp()), data=lambda: written(lambda x: x + 0.4 * torch.randn(x.shape), True), steps=200),
    "contrast in a copy": Case(
        lambda: Module(cnn()), data=lambda: written(lambda x: (0.7 + 0.6 * torch.rand(len(x), 1)) * x, True), steps=200
    ),
    "tokens of those before": Case(lambda: Shifted(1, Gpt(length=15), adam(1e-2)), (), ("healthy",), characters, 600),
    "a mask of a language model": Case(lambda: Module(Gpt(width=64), adam(1e-2)), (), ("healthy",), characters, 1500, 50),
}
