"""A small GPT over the source text of Python's standard library, with accumulation and clipping, configured in Python.

Real text that is on every machine. Run it; it takes about a minute::

    python examples/char_gpt.py
    python examples/char_gpt.py --max_steps 1000 --layers 4 --width 256
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_module_monitor import ModuleMonitorCallback, Rule, load_store

VOCABULARY = 256
"""A character is a byte of UTF-8: of source text nearly all are ASCII."""


def read_standard_library(num_bytes: int) -> Tensor:
    """The first bytes of the standard library's top-level modules, sorted by name, as a tensor of type uint8."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    return torch.frombuffer(text[:num_bytes], dtype=torch.uint8)


class Windows(Dataset[Tensor]):
    """Pieces of a text that lie side by side, each with the one character more that is to be predicted last."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.windows = text.unfold(0, context + 1, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index].long()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.query_key_value(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return merged


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        grown: Tensor = x + self.mlp(self.norm2(x))
        return grown


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.tokens(characters) + self.positions.weight[: characters.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class CharGPT(LightningModule):
    """Predicts the next character."""

    def __init__(self, layers: int, width: int, heads: int, context: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.gpt = GPT(layers, width, heads, context)

    def loss(self, windows: Tensor) -> Tensor:
        """Cross entropy in nats per character."""
        logits = self.gpt(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, windows: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(windows)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


@torch.no_grad()
def held_out_loss(model: CharGPT, windows: Tensor) -> float:
    """The loss on text that training does not see."""
    model.eval()
    loss = model.loss(windows).item()
    model.train()
    return loss


def print_update_ratios(store_path: Path) -> None:
    """How far an optimizer step moves each weight, relative to its size: about 0.001 is usual, 0.1 is a leap."""
    store = load_store(store_path)
    print(f"\n{'norm of update / norm of weight':44}{'first':>10}{'last':>10}{'largest':>10}")
    for key in store:
        if key.startswith("update/"):
            _steps, ratios = store.series(key)
            print(f"{key.split('/')[1]:44}{ratios[0]:10.2g}{ratios[-1]:10.2g}{ratios.max():10.2g}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Arguments instead of those of the process.
    """
    parser = argparse.ArgumentParser(description="Train a small GPT on the source text of the standard library, monitored.")
    parser.add_argument("--max_steps", type=int, default=300)
    parser.add_argument("--every_n_steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=12)
    parser.add_argument("--megabytes", type=float, default=3.0, help="of text")
    parser.add_argument("--output", default="demo_output")
    options = parser.parse_args(arguments)

    # Slicing a tensor is no work for other processes. And Lightning 2.6 calls what torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)

    seed_everything(0)
    text = read_standard_library(int(options.megabytes * 1e6))
    windows = Windows(text, options.context)
    unseen = torch.stack([windows[index] for index in range(len(windows) - 64, len(windows))])
    windows.windows = windows.windows[:-64]
    model = CharGPT(options.layers, options.width, options.heads, options.context, learning_rate=1e-3)

    monitor = ModuleMonitorCallback(
        every_n_steps=options.every_n_steps,
        rules=[
            Rule(kinds=["activation", "activation_gradient"], leaf_modules=True, statistics=["rms", "abs_max", "nonfinite_count"]),
            Rule(kinds=["gradient_before_clip", "gradient"], statistics="norm"),
            Rule(kinds="update", sites=".*weight", types=[nn.Linear, nn.Embedding], statistics="ratio"),
        ],
        attention=True,
        callback_metrics=[r"update/gpt\.head\.weight/ratio"],
        progress_bar=True,
    )
    trainer = Trainer(
        max_steps=options.max_steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=CSVLogger(options.output, name="char_gpt"),
        callbacks=[monitor],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    before = held_out_loss(model, unseen)
    trainer.fit(model, DataLoader(windows, options.batch_size, shuffle=True))
    after = held_out_loss(model, unseen)

    print(f"\n{len(text):,} characters; loss on 64 unseen pieces: {before:.3f} before, {after:.3f} after {trainer.global_step} steps")
    assert monitor.store_path is not None
    print_update_ratios(Path(monitor.store_path))
    print(f"\nstore: {os.path.relpath(monitor.store_path)}")


if __name__ == "__main__":
    main()
