"""The bare callback: what is wrong with thirteen sick runs is the first diagnosis, and fifteen healthy runs have no finding."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import Callback, LightningModule, MixedPrecision, StochasticWeightAveraging
from helpers.training import Classifier, seed, trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import ModuleMonitorCallback, load_store
from lightning_module_monitor.report.stored_run import read_run


def digits(batch_size: int = 64, row: int | None = None, value: float = 0.0) -> DataLoader[Any]:
    """Real images of 8 x 8 as vectors, standardized, in a fixed order; one row has a value of its own."""
    x, y = load_digits(return_X_y=True)
    data = (torch.tensor(x, dtype=torch.float32) - 4.9) / 6.0
    if row is not None:
        data[row] = value
    return DataLoader(TensorDataset(data, torch.tensor(y)), batch_size=batch_size, drop_last=True)


def fit(folder: Path, module: LightningModule, steps: int, data: DataLoader[Any] | None = None, **options: Any) -> ModuleMonitorCallback:
    """A run with the bare callback."""
    callback = ModuleMonitorCallback()
    callbacks = [*options.pop("callbacks", ()), callback]
    run = trainer(folder, callbacks, **{"max_steps": steps, "max_epochs": -1, "limit_val_batches": 0} | options)
    run.fit(module, data or digits(), digits() if isinstance(module, Classifier) else None)
    return callback


def mlp(width: int = 32, depth: int = 2, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """A plain network for the digits."""
    sizes = [64, *[width] * depth]
    layers = [one for i in range(depth) for one in (nn.Linear(sizes[i], sizes[i + 1]), activation())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


# Sick


def learning_rate_of_50() -> Classifier:
    """SGD with a learning rate that is a thousand times too high."""
    return Classifier(mlp(), torch.optim.SGD, lr=50.0)


def dead_from_the_start() -> Classifier:
    """Biases of -10."""
    model = mlp(depth=3)
    nn.init.constant_(model[2].bias, -10.0)
    return Classifier(model, torch.optim.SGD, lr=0.01)


class DiesAtOnce(Classifier):
    """One update that is far too large, as a learning rate without warm-up makes it, then a usual one."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 5 else 1e-4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def growing_outputs() -> Classifier:
    """Twenty layers, each of which doubles its input's magnitude and more."""
    model = mlp(depth=20)
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=0.6)
    return Classifier(model, torch.optim.SGD, lr=1e-30)


def forty_plain_layers() -> Classifier:
    """Their gradient vanishes."""
    return Classifier(mlp(8, 40, nn.Tanh), torch.optim.SGD, lr=0.1)


class WithNorm(nn.Module):
    """A convolution, BatchNorm and a head without a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x.view(-1, 1, 8, 8)))).flatten(1))


class Attention(nn.Module):
    """A softmax of logits without the scale of 1 / sqrt(d), and with large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.softmax, self.head = nn.Linear(8, 32), nn.Softmax(-1), nn.Linear(32, 10)
        nn.init.normal_(self.embed.weight, std=5.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.view(-1, 8, 8))
        return self.head((self.softmax(h @ h.transpose(1, 2)) @ h).mean(1))


class Forgetful(Classifier):
    """Its optimizer gets the last layer alone."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model[-1].parameters())


class Detached(nn.Module):
    """The gradient does not get past its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(torch.relu(self.below(x)).detach())


class Normalize(nn.Module):
    """Divides by the norm, which is zero for a blank image."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


def half_precision() -> Classifier:
    """Weights whose products leave float16."""
    model = mlp()
    with torch.no_grad():
        model[2].weight.mul_(1e5)
    return Classifier(model)


def saturated() -> Classifier:
    """Sigmoids of very large inputs."""
    model = mlp(activation=nn.Sigmoid)
    with torch.no_grad():
        model[0].weight.mul_(300)
    return Classifier(model, torch.optim.SGD, lr=1e-3)


def in_float16() -> dict[str, Any]:
    """16-mixed, on a CPU."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0))]}


SICK: dict[str, tuple[Callable[[], LightningModule], dict[str, Any], str, str, int, int]] = {
    # The model, the run, and what is found: diagnosis, site, its first step, and by which step.
    "a learning rate of 50": (learning_rate_of_50, {}, "learning_rate", "", 50, 100),
    "a learning rate of 50, with BatchNorm": (lambda: Classifier(WithNorm(), torch.optim.SGD, lr=50.0), {}, "learning_rate", "", 50, 100),
    "Adam with a learning rate a hundred times too high": (lambda: Gpt(lr=0.3), {}, "growth", "", 50, 100),
    "dead from the start": (dead_from_the_start, {}, "dead_from_start", "model.3", 0, 450),
    "dead by the first updates": (lambda: DiesAtOnce(mlp(depth=3)), {}, "learning_rate", "", 50, 100),
    "missing normalization": (growing_outputs, {}, "missing_normalization", "", 0, 100),
    "vanishing gradients": (forty_plain_layers, {}, "vanishing", "model.0.weight", 0, 100),
    "saturated attention": (lambda: Classifier(Attention(), torch.optim.SGD, lr=1e-6), {}, "saturation", "model.softmax", 0, 100),
    "a layer without an optimizer": (lambda: Forgetful(mlp()), {}, "no_optimizer", "model.0.weight", 0, 0),
    "frozen by mistake": (lambda: Classifier(Detached()), {}, "frozen", "model.below.weight", 50, 150),
    "data with a NaN": (lambda: Classifier(mlp()), {"data": digits(16, row=37 * 16 + 5, value=math.nan)}, "data", "_root_", 37, 37),
    "overflow in half precision": (half_precision, in_float16(), "overflow", "model.2", 0, 0),
    "saturated sigmoids": (saturated, {}, "saturation", "model.1", 0, 100),
    "zero by zero between monitored steps": (
        lambda: Classifier(nn.Sequential(nn.Linear(64, 32, bias=False), Normalize(), nn.Linear(32, 10))),
        {"data": digits(16, row=37 * 16 + 5, value=0.0)},
        "nonfinite",
        "model.1",
        37,
        37,
    ),
}


@pytest.mark.parametrize("case", SICK)
def test_a_sick_run_gets_the_right_diagnosis_first(case: str, tmp_path: Path) -> None:
    """By name, site and first step, in time, with advice; the stored run shows the same."""
    make, options, name, site, first_step, by_step = SICK[case]
    seed()
    callback = fit(tmp_path, make(), by_step + 1, **options)
    first = callback.diagnose()[0]
    assert (first.name, first.first_step) == (name, first_step), callback.findings
    assert site in ("", first.site)
    assert callback.findings[0].step <= by_step
    assert first.advice
    assert f"from step {first_step} {'at the latest' if first.key and first_step else 'on'}" in str(first)
    stored = read_run(load_store(callback.store_path)).verdict().diagnoses[0]
    assert (stored.name, stored.first_step) == (name, first_step)


# Healthy


class Block(nn.Module):
    """A residual block of a small ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(h + x)


def resnet() -> nn.Module:
    """Two blocks with BatchNorm."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        Block(8),
        Block(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


class Vit(nn.Module):
    """Rows of the image as tokens, a learned position, two pre-norm encoder layers."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.embed, self.position = nn.Linear(8, 32), nn.Parameter(torch.randn(8, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.view(-1, 8, 8)) + self.position).mean(1))


class Lstm(nn.Module):
    """Rows of the image, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 8, 8))[0][:, -1])


class Gpt(LightningModule):
    """Next pixel of a row, of 17 values, by a causal transformer with tied embeddings."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.embed, self.position = nn.Embedding(17, 32), nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.1, batch_first=True, norm_first=True, activation="gelu")
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 17, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = (batch[0] * 6 + 4.9).round().long().clamp(0, 16)
        h = self.embed(tokens[:, :-1]) + self.position.weight[:63]
        h = self.norm(self.blocks(h, mask=nn.Transformer.generate_square_subsequent_mask(63), is_causal=True))
        return F.cross_entropy(self.head(h).transpose(1, 2), tokens[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Autoencoder(LightningModule):
    """Through eight numbers and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class LargeTargets(LightningModule):
    """Outputs have to grow from nothing to thousands."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.l1_loss(self.model(batch[0]).squeeze(1), 3000 + 100 * batch[1].float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Confident(LightningModule):
    """A sigmoid at the output, of a task that it learns to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 1), nn.Sigmoid())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.binary_cross_entropy(self.model(batch[0]).squeeze(1), (batch[1] == 0).float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class Masked(nn.Module):
    """Logits of classes that there are not are minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).masked_fill(torch.arange(12) > 9, -math.inf)


class Gan(LightningModule):
    """Two networks against each other, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64))
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real, of_generator, of_discriminator = batch[0], *self.optimizers()
        fake = self.generator(torch.randn(len(real), 16))
        of_generator.zero_grad()
        self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
        of_generator.step()
        of_discriminator.zero_grad()
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake.detach())).mean()
        self.manual_backward(loss)
        of_discriminator.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(one.parameters(), lr=2e-4, betas=(0.5, 0.999)) for one in (self.generator, self.discriminator)]


class Lora(nn.Module):
    """A frozen layer with a trained low-rank term, which begins at zero."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a, self.b = nn.Linear(layer.in_features, 4, bias=False), nn.Linear(4, layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.b(self.a(x))


def with_lora() -> Classifier:
    """Adapters in a network that is frozen otherwise."""
    model = mlp(64)
    model[0], model[2] = Lora(model[0]), Lora(model[2])
    return Classifier(model)


class Scheduled(Classifier):
    """A learning rate that changes at every step, by a factor."""

    def __init__(self, factor: Callable[[int], float]) -> None:
        super().__init__(mlp())
        self.factor = factor

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def warm_up(step: int) -> float:
    """Linear over 100 steps."""
    return min(1.0, (step + 1) / 100)


def restarts(step: int) -> float:
    """A cosine of 60 steps, again and again."""
    return 0.5 * (1 + math.cos(math.pi * (step % 60) / 60)) + 1e-3


def averaging() -> dict[str, Any]:
    """Stochastic weight averaging."""
    callback: Callback = StochasticWeightAveraging(1e-3, swa_epoch_start=2, annealing_epochs=2)
    return {"callbacks": [callback], "max_epochs": 18, "max_steps": -1}


HEALTHY: dict[str, tuple[Callable[[], LightningModule], dict[str, Any]]] = {
    "a plain network": (lambda: Classifier(mlp()), {"accumulate_grad_batches": 2}),
    "a ResNet": (lambda: Classifier(resnet()), {}),
    "a GPT": (Gpt, {"data": digits(8), "gradient_clip_val": 1.0}),
    "an LSTM": (lambda: Classifier(Lstm()), {}),
    "a ViT": (lambda: Classifier(Vit(), lr=1e-3), {}),
    "an autoencoder": (Autoencoder, {}),
    "a GAN": (Gan, {}),
    "large targets": (LargeTargets, {}),
    "a confident sigmoid": (Confident, {}),
    "masked logits": (lambda: Classifier(nn.Sequential(Masked())), {}),
    "LoRA": (with_lora, {}),
    "warm-up": (lambda: Scheduled(warm_up), {}),
    "cosine restarts": (lambda: Scheduled(restarts), {}),
    "weight averaging": (lambda: Classifier(mlp()), averaging()),
    "mixed precision": (lambda: Classifier(mlp()), {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_run_has_no_finding(case: str, tmp_path: Path) -> None:
    """Also not on the stored run, in eleven records."""
    make, options = HEALTHY[case]
    seed()
    callback = fit(tmp_path, make(), 501, **options)
    assert callback.findings == []
    assert callback.diagnose() == []
    verdict = read_run(load_store(callback.store_path)).verdict()
    assert verdict.diagnoses == []
    assert verdict.level == ("unknown" if case == "a GAN" else "healthy")  # its losses work against each other
