"""Real Lightning runs of the zoo's models on a CPU, as quiet as they can be."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from helpers.lightning_package import Callback, LightningModule, Trainer
from helpers.zoo import ZOO


class Classifier(LightningModule):
    """A model of the zoo, trained to tell three classes."""

    def __init__(self, model: str | nn.Module = "mlp", optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        super().__init__()
        self.model = ZOO[model]() if isinstance(model, str) else model
        self._optimizer = (optimizer, {"lr": 0.01} | options)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        # Parameters are in bfloat16 or float64 under the true precisions.
        loss = F.cross_entropy(self.model(x).float(), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validation_loss", F.cross_entropy(self.model(batch[0]).float(), batch[1]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.model(batch[0])

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        prediction: Tensor = self.model(batch[0])
        return prediction

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer, options = self._optimizer
        return optimizer((parameter for parameter in self.parameters() if parameter.requires_grad), **options)


BAD_STEP = 3
"""The step in which a model goes :class:`Bad`."""


class Bad(nn.Module):
    """Takes the logarithm of what is not positive, after some noise, from its fourth call in training on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += self.training
        h = self.dropout(self.fc(x))
        return torch.log(torch.where(self.num_calls > BAD_STEP, h, h.exp()))


class KeepLosses(Callback):
    """Keeps every loss, and the random state of all generators at every batch."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.random_states: list[tuple[bytes, float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_args: Any) -> None:
        self.losses.append(outputs["loss"].clone())
        numpy_state = np.random.get_state()
        self.random_states.append((torch.get_rng_state().numpy().tobytes(), float(numpy_state[1].sum()), hash(random.getstate())))


class KeepRawTensors(Callback):
    """Keeps the raw tensors of a layer at every step: its outputs, its weight and their gradients, one for each call."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.steps: list[dict[str, list[Tensor]]] = []
        self.now: dict[str, list[Tensor]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.handle = pl_module.get_submodule(self.layer).register_forward_hook(self._keep_output)

    def _keep_output(self, module: nn.Module, _args: object, output: Tensor) -> None:
        if module.training:
            self.now.setdefault("activation", []).append(output.detach().clone())
            output.register_hook(lambda gradient: self.now.setdefault("activation_gradient", []).append(gradient.clone()))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        weight = pl_module.get_parameter(f"{self.layer}.weight")
        assert weight.grad is not None
        self.now["parameter"] = [weight.detach().clone()]
        self.now["gradient_before_clip"] = [weight.grad.clone()]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_args: Any) -> None:
        if "parameter" in self.now:
            weight, [before] = pl_module.get_parameter(f"{self.layer}.weight"), self.now["parameter"]
            assert weight.grad is not None
            self.now["gradient"] = [weight.grad.clone()]
            is_half = before.dtype in (torch.bfloat16, torch.float16)
            self.now["update"] = [weight.detach().float() - before.float() if is_half else weight.detach() - before]
            self.steps.append(self.now)
            self.now = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.handle.remove()


class Reseed(Callback):
    """Lightning's checkpoints hold no random states: here dropout's masks are a function of the step."""

    def on_train_batch_start(self, trainer: Trainer, *_args: Any) -> None:
        torch.manual_seed(trainer.global_step)


def loader(num_samples: int = 40, batch_size: int = 4, shuffle: bool = False) -> DataLoader[Any]:
    """Inputs of shape (6,) and classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 6, generator=generator)
    y = torch.randint(3, (num_samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


def trainer(folder: Path, callbacks: list[Callback], **options: Any) -> Trainer:
    """A Trainer that writes nothing but what a callback does."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "default_root_dir": folder,
    }
    return Trainer(callbacks=callbacks, **(quiet | options))


def seed() -> None:
    """Seed every generator."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
