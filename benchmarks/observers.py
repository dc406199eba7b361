"""What observes a step of a plain training loop: our engine, the floor and the peers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_module_monitor import ModuleMonitor, RefinedCoordinateCheck, Rule
from lightning_module_monitor.kernels import elements, numba_kernel, triton_kernel

KINDS = ["activation", "parameter", "gradient"]
STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "std": torch.std,
    "norm": torch.linalg.vector_norm,
    "min": torch.amin,
    "max": torch.amax,
    "var": torch.var,
    "abs_mean": lambda x: x.abs().mean(),
}
"""The statistics by the engine's names, as functions for torch-module-monitor, which has none of its own."""


class Observer:
    """What a variant adds to a training step; this one adds nothing."""

    def begin(self, step: int) -> None:
        """Before the forward pass."""

    def before_forward(self, inputs: Tensor) -> None:
        """Right before the forward pass, with what the model will get."""

    def before_update(self) -> None:
        """After the backward pass, before the optimizer moves the parameters."""

    def end(self) -> int:
        """After the update.

        Returns:
            Number of finished values.
        """
        return 0

    def close(self) -> None:
        """Leave the model."""


def seven_statistics() -> Rule:
    """The rule of the tables: seven statistics of all activations, parameters and gradients."""
    return Rule(kinds=KINDS, statistics=list(STATISTICS))


class Engine(Observer):
    """Our engine, due at every n-th step."""

    def __init__(self, model: nn.Module, every_n_steps: int) -> None:
        self.monitor = ModuleMonitor(every_n_steps, rules=[seven_statistics()])
        self.monitor.set_module(model)

    def begin(self, step: int) -> None:
        self.monitor.begin_step(step)

    def before_update(self) -> None:
        self.monitor.monitor_gradients()
        self.monitor.monitor_parameters()

    def end(self) -> int:
        record = self.monitor.end_step()
        # As numbers of Python's, which others give too; without the monitor's own figure, its count of errors.
        return 0 if record is None else len([*record.values.values()]) - 1

    def close(self) -> None:
        self.monitor.close()


def _no_loops() -> None:
    """In place of the compiled loops. A mock would record each of thousands of calls."""


def _takes_none(_tensor: Tensor) -> bool:
    return False


class EagerEngine(Engine):
    """Our engine with torch's operations alone, as without numba, and without Triton."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, every_n_steps=1)
        self.patches = ExitStack()

    def begin(self, step: int) -> None:
        self.patches.enter_context(mock.patch.object(numba_kernel, "loops", _no_loops))
        self.patches.enter_context(mock.patch.object(triton_kernel, "takes", _takes_none))
        super().begin(step)

    def end(self) -> int:
        num_values = super().end()
        self.patches.close()
        return num_values


class Floor(Observer):
    """The least that looks at every tensor: a norm of each, and one transfer."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: list[Tensor] = list(model.parameters())
        self.norms: list[Tensor] = []
        self.handles = [module.register_forward_hook(self._observe) for module in model.modules()]

    def _observe(self, _module: nn.Module, _args: object, output: Tensor) -> None:
        self.norms.append(torch.linalg.vector_norm(output.detach()))

    @torch.no_grad()
    def before_update(self) -> None:
        self.norms += torch._foreach_norm(self.parameters)
        self.norms += torch._foreach_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])

    def end(self) -> int:
        # Through the engine's own function, where transfers are counted.
        values = elements.transfer(torch.stack(self.norms)).tolist()
        self.norms.clear()
        return len(values)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


class ReferenceForward(Observer):
    """The forward pass of a reference, and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        self.reference = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def before_forward(self, inputs: Tensor) -> None:
        self.reference(inputs)


class CoordinateCheck(ReferenceForward):
    """A reference and the refined coordinate check by our engine."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.monitor = ModuleMonitor()
        self.monitor.set_module(model)
        self.monitor.set_reference_module(self.reference)
        self.check = RefinedCoordinateCheck(self.monitor)

    def begin(self, step: int) -> None:
        self.monitor.begin_step(step)

    def before_update(self) -> None:
        self.check.refined_coordinate_check()

    def end(self) -> int:
        record = self.monitor.end_step()
        return 0 if record is None else len(record.values) - 1

    def close(self) -> None:
        self.monitor.close()


class Statistics(Engine):
    """Our engine with some statistics of some kinds."""

    def __init__(self, model: nn.Module, kinds: Sequence[str], statistics: Sequence[str]) -> None:
        self.monitor = ModuleMonitor(rules=[Rule(kinds=kinds, statistics=statistics)])
        self.monitor.set_module(model)


class WatchedNoise(Engine):
    """Our engine with the gradient noise of the whole model: norms of each gradient as it arrives, and of the gradient of the step."""

    def __init__(self, model: nn.Module) -> None:
        self.monitor = ModuleMonitor(gradient_noise=True)
        self.monitor.set_module(model)

    def begin(self, step: int) -> None:
        super().begin(step)
        self.monitor.monitor_context("batch_size", 1, "sum")


class TorchModuleMonitor(Observer):
    """torch-module-monitor, with the same statistics as functions."""

    def __init__(self, model: nn.Module) -> None:
        import torch_module_monitor

        self.monitor: Any = torch_module_monitor.ModuleMonitor(monitor_step_fn=lambda _step: True)
        self.monitor.set_module(model)
        for name, function in STATISTICS.items():
            self.monitor.add_activation_metric(name, function)
            self.monitor.add_parameter_metric(name, function)
            self.monitor.add_gradient_metric(name, function)

    def begin(self, step: int) -> None:
        self.monitor.begin_step(step)

    def before_update(self) -> None:
        self.monitor.monitor_gradients()
        self.monitor.monitor_parameters()

    def end(self) -> int:
        self.monitor.end_step()
        return len(self.monitor.get_step_metrics())

    def close(self) -> None:
        self.monitor.activation_hooks.remove_all_hooks()
