"""Small trainings, sick and healthy, with what is known of each: for the verdict's tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from helpers.lightning_package import LightningModule
from helpers.small_data import (
    characters,
    constant,
    digits,
    markov_chain,
    noise_as_targets,
    noisy,
    one_row,
    ratings,
    shuffled,
    tabular,
)
from helpers.small_models import (
    Autoencoder,
    Averaged,
    ByHand,
    Code,
    Contrastive,
    EvalNorm,
    Factors,
    FineTuning,
    Gan,
    Gpt,
    LargeLogits,
    MaskedAttention,
    MaskedLogits,
    Module,
    MultiTask,
    NeverZeroed,
    Policy,
    Recurrent,
    Residual,
    Transposed,
    adam,
    cnn,
    finished,
    float16,
    frozen_head,
    groups,
    mlp,
    scheduled,
    sgd,
)


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


def _bigram() -> nn.Module:
    """Tells the next token by this one alone."""
    return nn.Sequential(nn.Embedding(20, 32), nn.Linear(32, 20), Transposed())


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
    "noise as targets": Case(
        lambda: Module(mlp((10, 64, 1)), adam(1e-3), _mse), ("not_learning",), ("watch", "unknown"), data=noise_as_targets
    ),
    "noise as targets, large batches": Case(
        lambda: Module(mlp((10, 64, 1)), adam(1e-3), _mse), ("not_learning",), ("watch", "unknown"), data=lambda: noise_as_targets(128)
    ),
    "Adam at 1.0": Case(lambda: Module(mlp(), adam(1.0)), ("learning_rate",)),
    "SGD at 50": Case(lambda: Module(mlp(), sgd(50.0)), ("learning_rate",)),
    "momentum at 5": Case(lambda: Module(cnn(), sgd(5.0, momentum=0.9)), ("learning_rate", "growth", "not_learning"), steps=200),
    "GPT at 1.0": Case(lambda: Module(Gpt(), adam(1.0)), ("learning_rate",), data=characters),
    "the sum of losses": Case(
        lambda: Module(mlp(), sgd(0.5), lambda output, target: F.cross_entropy(output, target, reduction="sum")), ("summed_loss",)
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
    "a detached middle": Case(lambda: Module(Code(Tensor.detach)), ("no_gradient",), site="model.first.0.weight", first_step=10),
    "an exploding RNN": Case(
        lambda: Module(Recurrent(nn.RNN, 1, 2.2, nonlinearity="relu"), sgd(0.01)), ("explodes_from_start", "missing_normalization")
    ),
    "gradients never zeroed by hand": Case(lambda: ByHand(zeroes=False), ("stale_gradients",), steps=300),
    "gradients never zeroed": Case(lambda: NeverZeroed(mlp(), sgd(0.05)), ("stale_gradients",), steps=200),
    "BatchNorm in eval": Case(lambda: EvalNorm(cnn()), ("in_eval",)),
    "a softmax before cross-entropy": Case(lambda: Module(_softmax_head()), ("softmax_twice",)),
    "a sigmoid before cross-entropy": Case(lambda: Module(nn.Sequential(mlp(), nn.Sigmoid())), ("softmax_twice",)),
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
    "bfloat16 weights, and steps below their rounding": Case(
        lambda: Module(mlp((64, 64, 64, 10), nn.GELU), sgd(1e-4)), ("frozen", "small_rate"), options={"precision": "bf16-true"}, steps=300
    ),
    "LayerNorm in bfloat16": Case(
        lambda: Module(nn.Sequential(mlp((64, 64)), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10)), adam(1e-4, torch.optim.AdamW)),
        ("frozen",),
        site="model.1.weight",
        options={"precision": "bf16-true"},
        steps=300,
    ),
    "Adam with the weight decay of AdamW": Case(
        lambda: Module(mlp((64, 64, 64, 64, 10), nn.Tanh), adam(3e-3, weight_decay=0.3)), ("weight_decay",), steps=1000, every=50
    ),
    "weights that are too small": Case(
        lambda: Module(mlp((64, *[64] * 8, 10), weights=0.28, bias=0.0), sgd(0.05, momentum=0.9)), ("vanishes_from_start",), steps=300
    ),
    "a ReLU at the end, and targets below 0": Case(
        lambda: Module(nn.Sequential(mlp((10, 64, 1)), nn.ReLU()), adam(1e-3), _mse),
        ("dead_units", "dead_from_start"),
        data=lambda: tabular(shift=-4.0),
        site="model.1",
        steps=400,
    ),
    "growing outputs": Case(lambda: Module(mlp((64, *[64] * 12, 10), weights=8.0), sgd(1e-30)), ("missing_normalization",), first_step=0),
    "a softmax over one value": Case(
        lambda: Module(nn.Sequential(mlp((64, 32, 1)), nn.Softmax(1)), loss=lambda out, y: F.mse_loss(out[:, 0], (y > 4).float())),
        ("constant_output",),
        site="model.1",
        first_step=0,
    ),
    "a large weight decay": Case(lambda: Module(mlp(), adam(3e-3, torch.optim.AdamW, weight_decay=50.0)), ("weight_decay",), steps=300),
    "data with a NaN": Case(lambda: Module(mlp()), ("data",), data=lambda: digits(change=one_row(math.nan)), site="_root_"),
    "data with an infinity": Case(lambda: Module(cnn()), ("data",), data=lambda: digits(change=one_row(math.inf))),
    "a logarithm of zero": Case(lambda: Module(Code(lambda h: torch.log(torch.relu(h)))), ("nonfinite",), site="model", first_step=0),
    "float16": Case(lambda: Module(mlp(weights=600.0)), ("overflow",), options=float16(), site="model.2", first_step=0),
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
    "dropout of 0.95": Case(lambda: Module(_dropout()), ("dropout",), ("watch", "unknown"), steps=200),
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
    "a rate that rises without end": Case(lambda: Module(cnn(), scheduled(1e-3, lambda step: 1.02**step)), ("learning_rate",), steps=600),
    "a GPT whose rate rises without end": Case(
        lambda: Module(Gpt(), scheduled(1e-3, lambda step: 1.02**step)), ("learning_rate",), data=characters, steps=370
    ),
    "one record": Case(lambda: Module(mlp(), adam(1.0)), (), UNKNOWN, steps=45, every=50),
    "seven records": Case(lambda: Module(mlp(bias=-1.0), sgd(1e-3)), ("constant_output",), steps=70, site="model.3", first_step=0),
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
    "a GPT, warmed up": Case(lambda: Module(Gpt(), scheduled(3e-3, lambda step: min(1.0, step / 50))), data=characters, steps=250),
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
    "float16, scaled": Case(lambda: Module(mlp()), options=float16()),
    "a tiny batch": Case(lambda: Module(mlp()), data=lambda: digits(4), steps=300),
    "noisy labels": Case(lambda: Module(mlp()), data=lambda: digits(change=noisy)),
    "clipped": Case(lambda: Module(Recurrent(nn.GRU), adam(5e-3)), options={"gradient_clip_val": 0.1}),
    "every step": Case(lambda: Module(mlp(), adam(3e-3)), steps=30, every=1),
    "ten records": Case(lambda: Module(cnn(), adam(3e-3)), steps=100),
    "trained already": Case(lambda: Module(finished(), adam(1e-5, torch.optim.AdamW)), levels=UNKNOWN, steps=300),
    "trained already, many records": Case(lambda: Module(finished(), sgd(3e-3)), levels=UNKNOWN, steps=600, every=5),
    "a batch of one": Case(
        lambda: Module(mlp((64, 32, 1)), sgd(3e-3), F.huber_loss), levels=EITHER, data=_noise_of_one, steps=900, every=15
    ),
    "a batch of one, Adam": Case(lambda: Module(mlp((64, 32, 1)), adam(3e-4), _mse), levels=EITHER, data=_noise_of_one, steps=600),
    "a ResNet": Case(lambda: Module(nn.Sequential(cnn()[:-2], Residual(32), cnn()[-2:])), steps=501, every=50),
    "a bigram model": Case(lambda: Module(_bigram(), adam(1e-2)), levels=EITHER, data=lambda: markov_chain(1.0), steps=1000, every=50),
    "a bigram model, next to no order": Case(lambda: Module(_bigram(), adam(1e-2)), levels=EITHER, data=lambda: markov_chain(1.4)),
    "a linear regression in noise": Case(lambda: Module(nn.Linear(10, 1), adam(0.1), _mse), levels=EITHER, data=lambda: tabular(noise=1.0)),
    "a linear regression in large noise": Case(
        lambda: Module(nn.Linear(10, 1), adam(0.1), _mse), levels=EITHER, data=lambda: tabular(noise=2.0)
    ),
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
