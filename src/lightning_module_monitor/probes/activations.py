"""Outputs of modules, and the gradients that arrive at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.modules.hooks import ForwardHook, HookSet, is_in_backward, is_tracing
from lightning_module_monitor.modules.outputs import Path, in_graph, is_first, named_tensors
from lightning_module_monitor.probes.backward import BackwardProbe
from lightning_module_monitor.probes.probe import WatchedModule, observe_or_fail
from lightning_module_monitor.statistics.observation import Observation
from lightning_module_monitor.statistics.rows import Place, Rows
from lightning_module_monitor.statistics.watch import Watch

OutputName = Callable[[str, Path], str]
"""Gives the name of a further output: from the module's site and the path to the output."""


KINDS = ("activation", "activation_gradient")
"""The kinds that this probe sees to."""


class ActivationProbe(BackwardProbe):
    """Watches modules for the length of one observation.

    Hooks only look: they return nothing, keep no tensor, and read no value on the host. The gradient of an output is taken
    by a hook on the output itself, which unlike a module's backward hook leaves in-place layers alone.

    Args:
        outputs: The modules, of each of which one of ``KINDS`` is wanted.
        observation: Where tensors go.
        output_name: Names further outputs.
        say: Takes a sentence for the user.
    """

    def __init__(self, outputs: WatchedOutputs, observation: Observation, output_name: OutputName, say: Callable[[str], None]) -> None:
        self._outputs = outputs
        self._observation = observation
        self._output_name = output_name
        self._say = say
        self._module_hooks = HookSet()
        self._tensor_hooks = HookSet()

    def attach(self) -> None:
        """Put the hooks on."""
        self._outputs.probe = self
        self._module_hooks.add_forwards(self._outputs.modules, self._outputs.hooks)

    def end_micro_batch(self) -> None:
        """Forget the outputs of the micro-batch that is over."""
        self._tensor_hooks.close()

    def close(self) -> None:
        """Take every hook off."""
        self._module_hooks.close()
        self._tensor_hooks.close()
        if self._outputs.probe is self:
            self._outputs.probe = None

    def see_plain_output(self, place: Place, output: object) -> bool:
        """Take in an output that is one plain tensor, in the quickest way; whether it was one, and was to be taken in."""
        return not is_in_backward() and self._observation.read(place, output)

    def see_outputs(self, watched: WatchedModule, output: object) -> None:
        """Take in every tensor of a module's output."""
        if isinstance(output, Tensor):
            self._see_output(watched, (), output)
        else:
            for path, tensor in named_tensors(output):
                self._see_output(watched, path, tensor)

    def fail(self, watched: WatchedModule, output: object, error: Exception) -> None:
        """An output that cannot be taken apart (one that holds itself, say) is no reason for training to end."""
        for kind in KINDS:
            if kind in watched.watches:
                self._observation.fail(watched.watches[kind], output, error)

    def _see_output(self, watched: WatchedModule, path: Path, tensor: Tensor) -> None:
        """Take in one tensor of a module's output."""
        if not tensor.is_floating_point():
            self._say(f"{watched.site.name}: its output of dtype {tensor.dtype} is not watched; only real floating outputs are.")
            return
        activation, gradient = watched.watches.get("activation"), watched.watches.get("activation_gradient")
        if path and not is_first(path):
            name = self._output_name(watched.site.name, path)
            activation = activation and activation.at(name)
            gradient = gradient and gradient.at(name)
        # The gradient hook is wanted also of a recomputed output: under reentrant checkpointing no other gets a gradient.
        if activation is not None and not is_in_backward():
            observe_or_fail(self._observation, activation, tensor)
        if gradient is not None:
            self.await_gradient(gradient, tensor)

    def await_gradient(self, watch: Watch, tensor: Tensor) -> None:
        """Take in the gradient of an output when it arrives."""
        differentiated = in_graph(tensor)
        if differentiated.requires_grad:
            self._tensor_hooks.add(differentiated.register_hook(_GradientHook(self, watch)))

    def see_gradient(self, watch: Watch, gradient: Tensor) -> None:
        """Take in the gradient that arrives at an output."""
        if self.takes_gradients():
            observe_or_fail(self._observation, watch, gradient, self.scale)


class WatchedOutputs:
    """The modules whose outputs are watched, and their hooks, which are made once and put on in every step that watches them.

    Args:
        watched: The modules.
        rows: Where what is seen of them is gathered.

    Attributes:
        modules: The same, without what is wanted of them.
        hooks: A hook for each.
        probe: Who is told by them; ``None`` between the steps.
    """

    def __init__(self, watched: Sequence[WatchedModule], rows: Rows) -> None:
        self._watched = watched
        self._rows = rows
        self.modules = [one.site.module for one in watched]
        self.hooks = [_ForwardHook(self, one, rows) for one in watched]
        self.probe: ActivationProbe | None = None

    def __reduce__(self) -> tuple[type[WatchedOutputs], tuple[Sequence[WatchedModule], Rows]]:
        """A copy has hooks of its own, and nobody to tell."""
        return WatchedOutputs, (self._watched, self._rows)


class _ForwardHook(ForwardHook):
    """Called after a watched module's forward. Returns nothing: what a forward hook returns replaces the output."""

    def __init__(self, outputs: WatchedOutputs, watched: WatchedModule, rows: Rows) -> None:
        self._outputs = outputs
        self._watched = watched
        activation, site = watched.watches.get("activation"), watched.site
        self._place: Place | None = None
        """Where the output goes, if it is one plain tensor: the commonest there is."""
        if activation is not None:
            self._place = rows.place(activation, may_return_last=site.is_container, may_be_returned=site.is_last_part)
        self._gradient = watched.watches.get("activation_gradient")

    def __call__(self, _module: nn.Module, _args: object, output: object) -> None:
        """Observe an output, as ``see`` of the other hooks, without a call in between: no hook is called as often."""
        probe = self._outputs.probe
        if probe is None or not probe.is_open or is_tracing():
            return
        try:
            if self._place is None or not probe.see_plain_output(self._place, output):
                probe.see_outputs(self._watched, output)
            elif self._gradient is not None and isinstance(output, Tensor):
                probe.await_gradient(self._gradient, output)
        except MonitorError:
            raise
        except Exception as error:
            probe.fail(self._watched, output, error)


class _GradientHook:
    """Called with the gradient of an output. Returns nothing: what a tensor hook returns replaces the gradient."""

    def __init__(self, probe: ActivationProbe, watch: Watch) -> None:
        self._probe = probe
        self._watch = watch

    def __call__(self, gradient: Tensor | None) -> None:
        # None: of several outputs of one function (of ``chunk``, say) this one was not used.
        if gradient is not None:
            self._probe.see_gradient(self._watch, gradient)
