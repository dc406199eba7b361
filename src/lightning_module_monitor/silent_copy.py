"""Runs ``training_step`` on a copy of a LightningModule, without effects outside of the copy."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from lightning_module_monitor.lightning_packages import LightningModule, Trainer, is_a, package_of
from lightning_module_monitor.model.compiled import MODULE_ATTRIBUTES


class _TrainerWithoutLoggers:
    """The ``trainer`` of a copy: reads from the model's trainer, except its loggers. Attributes that the copy sets stay here."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.logger = package_of(trainer).loggers.logger.DummyLogger()
        self.loggers = [self.logger]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute of a trainer
        return getattr(
            object.__getattribute__(self, "_trainer"), name
        )  # without recursion while this object is copied, and has no such attribute yet


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "the reference has no optimizers; give module, the name of a submodule: then the reference of that submodule is called instead"
    )


_SILENT = {
    **dict.fromkeys(("log", "log_dict", "print"), _do_nothing),
    **dict.fromkeys(("optimizers", "lr_schedulers", "manual_backward"), _refuse),
}


def silence(reference: nn.Module) -> None:
    """Shadow the methods of a copy, and of the LightningModules within it, that log or reach optimizers."""
    for part in reference.modules():
        if is_a(part, "LightningModule"):
            vars(part).update(_SILENT)


def attach(copied: nn.Module, trainer: Trainer) -> None:
    """Attach a copy to the trainer of the model, without the loggers."""
    copied.trainer = _TrainerWithoutLoggers(trainer)  # type: ignore[assignment]


def run_training_step(reference: LightningModule, trainer: Trainer, batch: object, batch_idx: int, wrapper: nn.Module | None = None) -> Any:  # noqa: ANN401  # the result of training_step
    """Run a silenced copy's ``training_step`` as Lightning is about to run the model's, and return the result.

    While it runs, the copy is attached to the trainer, without its loggers. It gets a copy of the batch, which is on the device and in the
    precision of the run, because it may write into it. ``wrapper`` is the unit of FSDP1 that runs it: it calls its first argument with
    all others.
    """
    takes_index = package_of(trainer).utilities.signature_utils.is_param_in_hook_signature(reference.training_step, "batch_idx", min_args=2)
    arguments = (copy.deepcopy(batch), batch_idx) if takes_index else (copy.deepcopy(batch),)
    attach(reference, trainer)
    try:
        with trainer.precision_plugin.train_step_context(), _unchanged_attributes(reference):
            return reference.training_step(*arguments) if wrapper is None else wrapper(reference.training_step, *arguments)
    finally:
        reference.trainer = None


@contextmanager
def _unchanged_attributes(reference: nn.Module) -> Iterator[None]:
    """Restore the copy's attributes after the block: it never reaches an end of an epoch, where it would clear its lists."""
    attributes = [(part, dict(vars(part))) for part in reference.modules() if is_a(part, "LightningModule")]
    attribute_values = [value for _part, values in attributes for name, value in values.items() if name not in MODULE_ATTRIBUTES]
    inner = [value for values in attribute_values if isinstance(values, dict) for value in values.values()]
    containers = [(value, copy.copy(value)) for value in (*attribute_values, *inner) if type(value) in (list, dict, set, deque)]
    try:
        yield
    finally:
        for part, values in attributes:
            vars(part).clear()
            vars(part).update(values)
        for container, before in containers:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(before)
