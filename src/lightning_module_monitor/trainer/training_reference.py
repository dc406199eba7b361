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


class _TrainerWithoutLoggers:
    """What a copy takes for its trainer: the model's, but for the loggers; what the copy sets on it reaches nothing.

    Args:
        trainer: The model's.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.logger = DummyLogger()
        self.loggers = [self.logger]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute of a trainer
        return getattr(object.__getattribute__(self, "_trainer"), name)  # that of a copy that is being made is not there yet


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stands in a copy for what would log or print."""


def _refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Stands in a copy for what would reach the optimizers of the model."""
    raise RuntimeError("the reference has no optimizers; give module, the submodule to watch, whose sibling is then called alone")


_SILENT = {
    **dict.fromkeys(("log", "log_dict", "print"), _do_nothing),
    **dict.fromkeys(("optimizers", "lr_schedulers", "manual_backward"), _refuse),
}


def silence(twin: LightningModule) -> None:
    """Take from a copy, and from the LightningModules within it, what logs or reaches optimizers: attributes shadow methods."""
    for part in twin.modules():
        if isinstance(part, LightningModule):
            vars(part).update(_SILENT)


def run_training_step(twin: LightningModule, trainer: Trainer, batch: object, batch_idx: int) -> Any:  # noqa: ANN401  # as its own
    """Run a copy's ``training_step`` as Lightning is about to run the model's.

    Args:
        twin: A silenced copy.
        trainer: The copy is attached to this, without its loggers, while it runs.
        batch: On the device and in the precision of the run. The copy gets a copy, for it may write into it.
        batch_idx: Its number.

    Returns:
        What it returned.
    """
    takes_index = is_param_in_hook_signature(twin.training_step, "batch_idx", min_args=2)
    arguments = (copy.deepcopy(batch), batch_idx) if takes_index else (copy.deepcopy(batch),)
    twin.trainer = _TrainerWithoutLoggers(trainer)  # type: ignore[assignment]
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
