"""Strategies of a Trainer: whose values can be had together under each, and which cannot be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, XLAStrategy

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.health.options import ALWAYS, STOP, ParsedHealth
from lightning_module_monitor.record import KINDS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OF_PARAMETERS = tuple(kind.name for kind in KINDS.values() if kind.site == "parameter" or kind.needs_reference)
"""The kinds that read parameters, or copy them into a reference."""


def is_known(trainer: Trainer) -> bool:
    """Whether it is known which elements of the parameters each rank has; a subclass of a known strategy has them in the same way."""
    strategy = trainer.strategy
    if isinstance(strategy, XLAStrategy):  # subclasses of DDPStrategy that keep parameters and gradients elsewhere
        return False
    return trainer.world_size == 1 or isinstance(strategy, DDPStrategy | ModelParallelStrategy)


def ranks_of(trainer: Trainer) -> bool | DeviceMesh:
    """Which ranks have their values together; see ``distributed`` of :class:`~lightning_module_monitor.monitor.ModuleMonitor`."""
    if isinstance(trainer.strategy, ModelParallelStrategy):
        mesh: DeviceMesh = trainer.strategy.device_mesh["tensor_parallel"]
        return mesh
    return is_known(trainer) and trainer.world_size > 1


def check_unknown(trainer: Trainer, health: ParsedHealth) -> None:
    """Refuse what all ranks would have to decide together, where each has values of its own.

    Raises:
        ConfigError: If a finding of one rank would stop the run, or save a checkpoint.
    """
    if is_known(trainer) or trainer.world_size == 1:
        return
    together = [f"{rule.name!r}: then {action!r}" for rule in health.alerts for action in rule.then if action in ("stop", "checkpoint")]
    if health.nonfinite == STOP:
        together.insert(0, f"health.nonfinite: {STOP!r}")
    if together:
        why = f"under {type(trainer.strategy).__name__} each rank judges its own values, and the others would wait for it"
        raise ConfigError(f"{together[0]}: {why}; expected 'warn' or 'capture', or nonfinite: {ALWAYS}.")


def left_out_in_words(trainer: Trainer, kinds: list[str]) -> str:
    """What is not recorded under a strategy that is not known, and whose values the others are."""
    whose = "; values are those of rank 0 alone" if trainer.world_size > 1 else ""
    what = f"{', '.join(kinds)} {'is' if len(kinds) == 1 else 'are'} left out" if kinds else "nothing of parameters is recorded"
    works = "DDPStrategy, ModelParallelStrategy and their subclasses give all kinds"
    return f"{type(trainer.strategy).__name__} keeps parameters in a way that is not known: {what}{whose}. {works}."
