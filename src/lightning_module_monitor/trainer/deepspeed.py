"""DeepSpeed: it keeps parameters and gradients in parts of its own, which are read through its public functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.probes.parameters import ParameterAccess

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class DeepSpeedAccess(ParameterAccess):
    """Reads whole parameters, in float32 where the optimizer has them so, and whole gradients.

    Each read of what is laid out over ranks is a collective of DeepSpeed's own, so all ranks read the same in the same order.
    """

    makes_copies = True

    def parameter(self, parameter: Tensor) -> Tensor | None:
        """The copy that the optimizer moves; of a parameter that is not trained, itself."""
        import deepspeed  # noqa: PLC0415  # is optional, and takes seconds

        if parameter.requires_grad:
            value: Tensor | None = deepspeed.utils.safe_get_full_fp32_param(parameter)
            if value is not None:
                return value
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient, reduced over ranks."""
        import deepspeed  # noqa: PLC0415  # is optional, and takes seconds

        return deepspeed.utils.safe_get_full_grad(parameter) if parameter.requires_grad else None

    def is_empty(self, parameter: Tensor) -> bool:
        """Whether it has no element, on any rank: between its uses stage 3 leaves a parameter none."""
        return not getattr(parameter, "ds_numel", parameter.numel())


def clips(trainer: Trainer, strategy: DeepSpeedStrategy) -> bool:
    """Whether DeepSpeed clips gradients, which it does within its step: what the optimizer uses cannot be read."""
    configuration = strategy.config if isinstance(strategy.config, dict) else {}
    return bool(trainer.gradient_clip_val or configuration.get("gradient_clipping"))


class EngineTracker:
    """Notifies a monitor of parameters, gradients and updates where DeepSpeed's engine steps.

    The engine has no hooks, and one optimizer with all parameters: what it does is over when the micro-batch is.

    Args:
        monitor: The monitor; it has begun a step.
        engine: The engine.
    """

    def __init__(self, monitor: ModuleMonitor, engine: DeepSpeedEngine) -> None:
        self._monitor = monitor
        self._engine = engine
        self.scale: Tensor | None = None
        """What the loss was multiplied by; shape ``()``."""
        self._steps = False

    def begin_backward(self, loss: Tensor) -> None:
        """The backward pass of a loss begins; under fp16 the engine scales it."""
        if self._engine.fp16_enabled():
            self.scale = torch.tensor(float(self._engine.optimizer.cur_scale), device=loss.device)
        self._monitor.begin_backward(self.scale)

    def before_clipping(self, _optimizer: Optimizer) -> None:
        """The gradients are complete, and the engine is about to step."""
        # Reading takes collectives of training: no rank begins them alone.
        if not self._all_monitor():
            return
        self._steps = True
        self._monitor.monitor_gradients(before_clip=True, scale=self.scale)
        self._monitor.monitor_gradients(scale=self.scale)
        self._monitor.monitor_parameters()

    def finish(self) -> None:
        """End the step: the engine has moved the parameters, unless they overflowed."""
        if self._steps and self._all_monitor():
            is_skipped = not self._engine.was_step_applied()
            if self.scale is not None:
                self._monitor.monitor_skipped_step(is_skipped)
            self._monitor.monitor_updates(is_skipped=is_skipped)

    def close(self) -> None:
        """There are no hooks."""

    def _all_monitor(self) -> bool:
        ranks = self._monitor.ranks
        is_monitoring = self._monitor.is_monitoring()
        if ranks is None:
            return is_monitoring
        return bool(ranks.all_reduce(torch.tensor([-float(is_monitoring)], dtype=torch.float64, device="cpu"), "max") < 0)
