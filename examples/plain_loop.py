"""The engine without Lightning: a plain torch loop with micro-batches and clipping, on scikit-learn's digits.

Run it::

    python examples/plain_loop.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitor, Record, Rule

MICRO_BATCHES = 4
MAX_GRADIENT_NORM = 0.25


def load_data() -> tuple[Tensor, Tensor]:
    """1,797 images as 64 features each, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def describe(record: Record, loss: float) -> str:
    """One line of what a step was like."""
    values = record.values
    return (
        f"step {record.step:4d}  loss {loss:.3f}"
        f"  hidden rms {values['activation/1/rms']:.3f}"
        f"  gradient of 0.weight {values['gradient_before_clip/0.weight/norm']:.4f}"
        f" -> clipped {values['gradient/0.weight/norm']:.4f}"
        f"  update ratio {values['update/0.weight/ratio']:.5f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Arguments instead of those of the process.
    """
    parser = argparse.ArgumentParser(description="Monitor a plain torch loop.")
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--every_n_steps", type=int, default=20)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    images, labels = load_data()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    monitor = ModuleMonitor(
        options.every_n_steps,
        rules=[
            Rule(kinds=["activation", "activation_gradient"], leaf_modules=True, statistics=["rms", "abs_max"]),
            Rule(kinds=["parameter", "gradient_before_clip", "gradient"], statistics="norm"),
            Rule(kinds="update", statistics="ratio"),
        ],
    )
    monitor.set_module(model)

    for step in range(options.max_steps):
        monitor.begin_step(step)
        loss_sum = 0.0
        for _ in range(MICRO_BATCHES):
            chosen = torch.randint(len(images), (32,))
            loss = F.cross_entropy(model(images[chosen]), labels[chosen]) / MICRO_BATCHES
            loss.backward()
            loss_sum += loss.item()
            monitor.after_micro_batch()  # one step however many there are: its statistics are of all of them together
        monitor.monitor_gradients(before_clip=True)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        monitor.monitor_gradients()
        monitor.monitor_parameters()  # before the optimizer moves them
        optimizer.step()
        optimizer.zero_grad()
        record = monitor.end_step()  # hooks off; None where the step was not monitored
        if record is not None:
            print(describe(record, loss_sum))
    monitor.close()

    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    print(f"accuracy on all digits: {accuracy:.3f}")


if __name__ == "__main__":
    main()
