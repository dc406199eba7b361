"""Outputs of modules, and the gradients that arrive at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_module_monitor.model.hooks import is_in_backward
from lightning_module_monitor.model.outputs import Path, in_graph, is_first, named_tensors
from lightning_module_monitor.probes.base import GradientHook, GradientProbe, PassedOver, WatchedModule, elements_of
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.spec import MetricSpec

KINDS = ("activation", "activation_gradient")
"""The kinds of this probe."""

_Target = tuple[str, MetricSpec | None, MetricSpec | None]
"""Name of a module, and what is recorded of its output and of the gradient."""


class ActivationProbe(GradientProbe[_Target]):
    """Observes outputs and their gradients. It keeps no tensor, and reads no value on the host.

    Args:
        watched: The modules, of each of which one of ``KINDS`` is recorded.
        accumulator: Takes tensors.
        output_name: Names further outputs, from the module's site and the path to the output.
        say: Logs a message once.
    """

    def __init__(
        self,
        watched: Sequence[WatchedModule],
        accumulator: StepAccumulator,
        output_name: Callable[[str, Path], str],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(
            [(one.site.module, (one.site.name, one.specs.get("activation"), one.specs.get("activation_gradient"))) for one in watched]
        )
        self._accumulator = accumulator
        self._output_name = output_name
        self._say = say
        self._passed_over = PassedOver("outputs")

    def observe_call(self, target: _Target, _args: object, output: object) -> None:
        """Observe every output."""
        site, activation, gradient = target
        for path, tensor in (((), output),) if isinstance(output, Tensor) else named_tensors(output):
            if not tensor.is_floating_point():
                self._passed_over.add(site, tensor)
                continue
            of_output, of_gradient = activation, gradient
            if path and not is_first(path):
                name = self._output_name(site, path)
                of_output, of_gradient = activation and activation.at(name), gradient and gradient.at(name)
            if of_output is not None and not is_in_backward():
                self._accumulator.observe(of_output, elements_of(tensor))
            # A recomputed output gets a hook too: under reentrant checkpointing no other output has a gradient.
            if of_gradient is not None and (differentiated := in_graph(tensor)).requires_grad:
                self.watch_gradient(differentiated, GradientHook(self, of_gradient))

    def finish(self) -> None:
        """Report which outputs were passed over."""
        self._passed_over.report(self._say)

    def fail(self, target: _Target, output: object, error: Exception) -> None:
        """Record NaN for an output that cannot be taken apart."""
        for spec in target[1:]:
            if spec is not None:
                self._accumulator.fail(spec, output, error)

    def observe_gradient(self, spec: MetricSpec, gradient: Tensor) -> None:
        """Observe the gradient of an output."""
        self._accumulator.observe(spec, elements_of(gradient, self.scale))

    def fail_gradient(self, spec: MetricSpec, gradient: Tensor, error: Exception) -> None:
        """Record NaN for a gradient that cannot be read."""
        self._accumulator.fail(spec, gradient, error)
