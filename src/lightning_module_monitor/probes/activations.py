"""Outputs of modules, and the gradients that arrive at them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.model.hooks import HookSet, UncopiedHook, is_in_backward
from lightning_module_monitor.model.outputs import Path, in_graph, is_first, named_tensors
from lightning_module_monitor.probes.backward import BackwardProbe
from lightning_module_monitor.probes.probe import WatchedModule, elements_of
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.spec import MetricSpec

OutputName = Callable[[str, Path], str]
"""Gives the name of a further output: from the module's site and the path to the output."""


KINDS = ("activation", "activation_gradient")
"""The kinds that this probe sees to."""


class ActivationProbe(BackwardProbe):
    """Watches modules for the length of one observation.

    Hooks only look: they return nothing, keep no tensor, and read no value on the host. The gradient of an output is taken
    by a hook on the output itself, which unlike a module's backward hook leaves in-place layers alone.

    Args:
        watched: The modules, of each of which one of ``KINDS`` is recorded.
        observation: Takes tensors.
        output_name: Names further outputs.
        say: Logs a message once.
    """

    def __init__(
        self, watched: Sequence[WatchedModule], observation: StepAccumulator, output_name: OutputName, say: Callable[[str], None]
    ) -> None:
        self._watched = watched
        self._observation = observation
        self._output_name = output_name
        self._say = say
        self._module_hooks = HookSet()
        self._tensor_hooks = HookSet()

    def attach(self) -> None:
        """Put the hooks on."""
        for one in self._watched:
            after = functools.partial(self._after_forward, one, one.watches.get("activation"), one.watches.get("activation_gradient"))
            self._module_hooks.add_forward(one.site.module, UncopiedHook(after))

    def end_micro_batch(self) -> None:
        """Forget the outputs of the micro-batch that is over."""
        self._tensor_hooks.close()

    def close(self) -> None:
        """Take every hook off."""
        self._module_hooks.close()
        self._tensor_hooks.close()

    def _after_forward(  # torch's protocol, behind what is known of the module
        self,
        watched: WatchedModule,
        activation: MetricSpec | None,
        gradient: MetricSpec | None,
        _module: nn.Module,
        _args: object,
        output: object,
    ) -> None:
        if not self.is_open:
            return
        try:
            for path, tensor in (((), output),) if isinstance(output, Tensor) else named_tensors(output):
                if not tensor.is_floating_point():
                    what = f"its output of dtype {tensor.dtype} is not watched; only real floating outputs are"
                    self._say(f"{watched.site.name}: {what}.")
                    continue
                of_output, of_gradient = activation, gradient
                if path and not is_first(path):
                    name = self._output_name(watched.site.name, path)
                    of_output, of_gradient = activation and activation.at(name), gradient and gradient.at(name)
                # The gradient hook is put on a recomputed output, too: under reentrant checkpointing no other gets a gradient.
                if of_output is not None and not is_in_backward():
                    self._observation.observe(of_output, elements_of(tensor))
                if of_gradient is not None:
                    self._await_gradient(of_gradient, tensor)
        except MonitorError:
            raise
        except Exception as error:
            # An output that cannot be taken apart (one that holds itself, say) is no reason for training to end.
            for watch in (activation, gradient):
                if watch is not None:
                    self._observation.fail(watch, output, error)

    def _await_gradient(self, watch: MetricSpec, tensor: Tensor) -> None:
        """Take in the gradient of an output when it arrives."""
        differentiated = in_graph(tensor)
        if differentiated.requires_grad:
            self._tensor_hooks.add(differentiated.register_hook(_GradientHook(self, watch)))

    def see_gradient(self, watch: MetricSpec, gradient: Tensor) -> None:
        """Take in the gradient that arrives at an output."""
        if self.takes_gradients():
            self._observation.observe(watch, elements_of(gradient, self.scale))


class _GradientHook:
    """Called with the gradient of an output. Returns nothing: what a tensor hook returns replaces the gradient."""

    def __init__(self, probe: ActivationProbe, watch: MetricSpec) -> None:
        self._probe = probe
        self._watch = watch

    def __call__(self, gradient: Tensor | None) -> None:
        # None: of several outputs of one function (of ``chunk``, say) this one was not used.
        if gradient is not None:
            self._probe.see_gradient(self._watch, gradient)
