"""Runs ``training_step`` on a copy of a LightningModule, without effects outside of the copy: it logs nothing and moves no weight.

Internal: it may change in any version.
"""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from lightning_module_monitor.lightning_packages import LightningModule, Trainer, is_a, package_of
from lightning_module_monitor.model.compiled import MODULE_ATTRIBUTES
from lightning_module_monitor.model.outputs import with_tensors


class _ReadOnly:
    """An optimizer or a scheduler as a copy sees it, which may read its values: a learning rate, for the log."""

    def __init__(self, original: object) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute of an optimizer
        value = getattr(object.__getattribute__(self, "_original"), name)  # without recursion, as below
        if isinstance(value, Optimizer):
            return _ReadOnly(value)
        if callable(value):
            return value if name == "get_last_lr" else _refuse
        return with_tensors(value, lambda tensor: tensor.detach())  # containers are copies, which may be written to


class _TrainerOfCopy:
    """The ``trainer`` of a copy: reads from the model's trainer, without its loggers. Attributes that the copy sets stay here."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.logger = package_of(trainer).loggers.logger.DummyLogger()
        self.loggers = [self.logger]
        self.optimizers = [_ReadOnly(optimizer) for optimizer in trainer.optimizers]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute of a trainer
        return getattr(
            object.__getattribute__(self, "_trainer"), name
        )  # without recursion while this object is copied, and has no such attribute yet


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "a copy of the model cannot use the optimizers; of a reference, give module, the name of a submodule: it is called instead"
    )


def optimizers(reference: LightningModule, use_pl_optimizer: bool = True) -> Any:  # noqa: ANN401  # as the method of a LightningModule
    """What a copy's method of this name returns: its trainer's optimizers, or the only one."""
    return _alone(reference.trainer.optimizers)


def lr_schedulers(reference: LightningModule) -> Any:  # noqa: ANN401  # as the method of a LightningModule
    """What a copy's method of this name returns: objects that read the schedulers, or the only one; ``None`` without one."""
    return _alone([_ReadOnly(config.scheduler) for config in reference.trainer.lr_scheduler_configs]) or None


def _alone(objects: list[Any]) -> Any:  # noqa: ANN401  # the only one of a list, as LightningModules return it; or the list
    return objects[0] if len(objects) == 1 else objects


_SILENT = {
    **dict.fromkeys(("log", "log_dict", "print"), _do_nothing),
    **dict.fromkeys(("manual_backward", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer"), _refuse),
}


def silence(reference: nn.Module) -> None:
    """Shadow the methods of a copy, and of the LightningModules within it, that log or reach optimizers."""
    for part in reference.modules():
        if is_a(part, "LightningModule"):
            vars(part).update(_SILENT)
            for name, method in (("optimizers", optimizers), ("lr_schedulers", lr_schedulers)):
                vars(part)[name] = types.MethodType(method, part)  # a copy of the copy gets its own


def attach(copied: nn.Module, trainer: Trainer) -> None:
    """Attach a copy to the trainer of the model, without the loggers."""
    copied.trainer = _TrainerOfCopy(trainer)  # type: ignore[assignment]


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
