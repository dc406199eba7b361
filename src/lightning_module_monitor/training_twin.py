"""A copy of a LightningModule that runs its own ``training_step``, and that nobody else notices."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn


class _Silent(LightningModule):
    """What a copy does not do, whatever its class does: log anywhere, or touch the optimizers of the model."""

    def log(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def log_dict(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def print(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    @property
    def logger(self) -> DummyLogger:
        return DummyLogger()

    @property
    def loggers(self) -> list[Any]:
        return [DummyLogger()]

    def optimizers(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError("the reference has no optimizers; give module, the submodule to watch, whose sibling is then called alone")

    lr_schedulers = optimizers
    manual_backward = optimizers


def silence(twin: LightningModule) -> None:
    """Make a copy one that nobody notices; also the LightningModules within it."""
    for part in twin.modules():
        if isinstance(part, LightningModule) and not isinstance(part, _Silent):
            part.__class__ = type(type(part).__name__, (_Silent, type(part)), {})


def run_training_step(twin: LightningModule, trainer: Trainer, batch: object, batch_idx: int) -> Any:  # noqa: ANN401  # as its own
    """Run a copy's ``training_step`` as Lightning is about to run the model's.

    Args:
        twin: A silenced copy.
        trainer: It is attached to this while it runs.
        batch: On the device and in the precision of the run. The copy gets a copy, for it may write into it.
        batch_idx: Its number.

    Returns:
        What it returned.
    """
    takes_index = is_param_in_hook_signature(twin.training_step, "batch_idx", min_args=2)
    arguments = (copy.deepcopy(batch), batch_idx) if takes_index else (copy.deepcopy(batch),)
    twin.trainer = trainer
    try:
        with trainer.precision_plugin.train_step_context(), _unchanged_attributes(twin):
            return twin.training_step(*arguments)
    finally:
        twin.trainer = None


@contextmanager
def _unchanged_attributes(twin: LightningModule) -> Iterator[None]:
    """After the block the copy's attributes are what they were. What it gathers for the end of an epoch nobody would clear."""
    attributes = [(part, dict(vars(part))) for part in twin.modules() if isinstance(part, LightningModule)]
    own = [value for _part, values in attributes for name, value in values.items() if name not in _OF_TORCH]
    inner = [value for one in own if isinstance(one, dict) for value in one.values()]
    gathered = [(one, copy.copy(one)) for one in (*own, *inner) if type(one) in (list, dict, set, deque)]
    try:
        yield
    finally:
        for part, values in attributes:
            vars(part).clear()
            vars(part).update(values)
        for one, before in gathered:
            one.clear()
            (one.extend if isinstance(one, list | deque) else one.update)(before)


_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module: buffers are seen to elsewhere."""
