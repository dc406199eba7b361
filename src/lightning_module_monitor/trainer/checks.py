"""Checks of a run that cannot be monitored, before its first batch."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.plan import Planner
from lightning_module_monitor.probes.base import LogOnce


def check_compiled(pl_module: LightningModule, *, at_every_step: bool) -> None:
    """Refuse a compiled model whose values would be wrong; ``at_every_step`` non-finite values are searched for."""
    compiled = [name or "The model" for name, module in pl_module.named_modules() if _is_compiled(module)]
    if compiled and at_every_step:
        expected = "expected health: {nonfinite: warn}, which looks at monitored steps, when it runs uncompiled"
        raise ConfigError(
            f"health.nonfinite looks at every step, and {compiled[0]} is compiled, and hooks do not run in compiled modules; {expected}."
        )
    if compiled and not hasattr(torch.compiler, "set_stance"):
        why = f"torch {torch.__version__} cannot run it uncompiled in monitored steps"
        raise ConfigError(
            f"{compiled[0]} is compiled, and {why}; expected torch 2.6 or later. Leave the callback out of this run, or do not compile it."
        )


def check_manual_optimization(pl_module: LightningModule, planner: Planner, *, runs_training_step: bool) -> None:
    """Under manual optimization refuse a reference that runs its own ``training_step``, and gradients before clipping."""
    if pl_module.automatic_optimization:
        return
    model = type(pl_module).__name__
    if runs_training_step:
        remedy = "give module, the name of the submodule to watch: its sibling is then called with its arguments"
        raise ConfigError(f"{model} uses manual optimization, and no reference can run its training_step; {remedy}.")
    rule = planner.first_of_kind("gradient_before_clip", without="gradient")
    if rule is not None:
        why = f"{model} uses manual optimization, and when it clips, if it does, is not known"
        raise ConfigError(f"{rule}: {why}; expected 'gradient', what the optimizer uses.")


def check_monitored_keys(trainer: Trainer, keys: Collection[str], patterns: Sequence[re.Pattern[str]], say: LogOnce) -> None:
    """Check that the other callbacks get the keys of ours that they monitor.

    Args:
        trainer: Has the callbacks.
        keys: Our planned keys of numbers.
        patterns: Those of ``callback_metrics``.
        say: Reports a callback that does without its key.

    Raises:
        ConfigError: If EarlyStopping would end the run by an error.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector, where mypy does not look
        key = getattr(callback, "monitor", None)
        if not isinstance(key, str) or key not in keys or any(pattern.fullmatch(key) for pattern in patterns):
            continue
        wrong = f"{type(callback).__name__} monitors {key!r}, and callback_metrics does not match it"
        message = f"{wrong}; expected callback_metrics: [{key!r}] among the options of ModuleMonitorCallback."
        if isinstance(callback, EarlyStopping) and callback.strict:
            raise ConfigError(message)
        say(message, logging.WARNING)


def makes_layers_late(pl_module: LightningModule) -> bool:
    """Whether the module may make layers after the ``setup`` of the callbacks."""
    return any(is_overridden(hook, pl_module, LightningModule) for hook in ("setup", "configure_model"))


def _is_compiled(module: nn.Module) -> bool:
    # Lightning unwraps a compiled LightningModule, and keeps the compiler in `_compiler_ctx`.
    is_wrapper = type(module).__name__ == "OptimizedModule"
    return is_wrapper or module._compiled_call_impl is not None or getattr(module, "_compiler_ctx", None) is not None
