"""The documents' blocks of code, and what their reader has: a model, data, a Trainer."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from helpers.lightning_package import Trainer
from helpers.training import Classifier, loader

ROOT = Path(__file__).parents[2]
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")))}
"""Text by path."""


def snippets(language: str, document: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENTS[document], re.DOTALL | re.MULTILINE)


def documents_with(language: str, but: Collection[str] = ()) -> list[str]:
    """Paths of the documents with blocks of a language."""
    return [path for path in DOCUMENTS if snippets(language, path) and path not in but]


def program(path: str) -> ModuleType:
    """A Python file of the repository as a new module."""
    spec = importlib.util.spec_from_file_location(f"program_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", list(sys.path)):  # a file may add the folders of its own imports
        spec.loader.exec_module(module)
    return module


@functools.cache
def generated(part: str) -> str:
    """A part of the site that ``docs/generated.py`` makes from code."""
    return str(program("docs/generated.py").PARTS[part]())


class Block(nn.Module):
    """Attention with two heads over the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).view(1, len(x), 2, 4).transpose(1, 2)
        return x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(len(x), 8)


class Net(nn.Module):
    """It has the layers that the documents name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(self.dropout(self.first(x))))
        return y


class Model(Classifier):
    """The LightningModule of a reader."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        super().__init__(model or Net(), **options)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    val_dataloader = train_dataloader


def quiet_trainer(**options: Any) -> Trainer:
    """The documents' Trainer."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**{"accelerator": "cpu", "limit_val_batches": 0, **quiet, **options})


def names_in_a_trainer() -> dict[str, Any]:
    """The names of a reader with a Trainer."""
    torch.manual_seed(0)
    return {"Trainer": quiet_trainer, "model": Model(), "batches": loader()}


def names_in_a_loop() -> dict[str, Any]:
    """The names of a reader with a loop."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "blocks": model.blocks, "batches": loader(80), "loss_fn": F.cross_entropy, "optimizer": optimizer}
