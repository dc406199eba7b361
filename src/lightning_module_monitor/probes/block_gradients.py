"""The gradients that arrive at the outputs of blocks, each told by the block's place: one module may stand at several."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_module_monitor.model.hooks import ForwardHook, HookSet
from lightning_module_monitor.model.outputs import in_graph, main_tensor
from lightning_module_monitor.probes.backward import BackwardProbe

MAX_WAITING_CALLS = 1024
"""Calls of one module, in one micro-batch, that a backward pass may run again."""

NO_BACKWARD = -1
"""The number of the backward pass where none is under way."""


class BlockGradientProbe(BackwardProbe):
    """Tells which gradient arrived at which place. Who wants to know overrides :meth:`receive` and :meth:`fail`.

    A module that stands at two places of ``blocks`` is called twice in a forward pass: its first call is the block at the
    first place, its second call the one at the second, and so in turn.

    Under reentrant checkpointing outputs get a gradient only when they are computed again, within the backward pass. Those
    calls are matched with the ones that they repeat: stretches of the model are run again from the last to the first, each
    from its beginning to its end.

    Args:
        blocks: The modules, in the order of the forward pass.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._places = {block: _Places([place for place, other in enumerate(blocks) if other is block]) for block in blocks}
        self._module_hooks = HookSet()
        self._gradient_hooks: weakref.WeakSet[_GradientHook] = weakref.WeakSet()
        """Weak, because nobody tells when a graph is gone that no backward pass went through."""
        self._repeated: list[tuple[_Places, _GradientHook]] = []
        """The calls of the stretch that is being run again, of which it is not yet known which calls they repeat."""
        self._outer_pass: dict[int, int] = {}
        """The backward pass that a pass within it belongs to."""

    def receive(self, place: int, gradient: Tensor, backward_pass: int) -> None:
        """Take the gradient in that arrived at the block at a place.

        Args:
            place: Index into the blocks.
            gradient: Any shape; may be overwritten as soon as this returns, and be part of a graph.
            backward_pass: Number of the call of ``backward``.
        """
        raise NotImplementedError

    def fail(self, place: int, output: object, error: Exception) -> None:
        """Take note of an output that could not be taken apart."""
        raise NotImplementedError

    def attach(self) -> None:
        """Put the hooks on."""
        for block in self._places:
            self._module_hooks.add_forward(block, _ForwardHook(self))

    def end_micro_batch(self) -> None:
        """Forget the outputs of the micro-batch that is over."""
        for hook in list(self._gradient_hooks):
            hook.remove()
        self.restart()

    def restart(self) -> None:
        """The next call of every module is that at its first place."""
        for places in self._places.values():
            places.num_calls = 0
            places.waiting.clear()
        self._repeated.clear()
        self._outer_pass.clear()

    def close(self) -> None:
        """Take every hook off."""
        self._module_hooks.close()
        self.end_micro_batch()

    def see_output(self, block: nn.Module, output: object) -> None:
        """A block was called: look out for the gradient of its output."""
        places = self._places[block]
        backward_pass = torch._C._current_graph_task_id()
        place = places.next() if backward_pass == NO_BACKWARD else None
        try:
            tensor = main_tensor(output)
            tensor = None if tensor is None else in_graph(tensor)
            if tensor is None or not tensor.requires_grad:
                if place is not None:
                    places.waiting.append(place)
            elif place is not None:
                self._watch(tensor, _GradientHook(self, place))
            elif places.waiting:
                hook = _GradientHook(self, None, self._outer_pass.get(backward_pass, backward_pass))
                self._watch(tensor, hook)
                self._repeated.append((places, hook))
        except Exception as error:
            if place is not None:
                self.fail(place, output, error)

    def see_gradient(self, hook: _GradientHook, gradient: Tensor) -> None:
        """A gradient arrived."""
        if not self.takes_gradients():
            return
        if hook.place is None:
            self._place_repeated()
        self._repeated.clear()
        if hook.place is not None:
            self.receive(hook.place, gradient, self._backward_pass(hook))

    def _watch(self, tensor: Tensor, hook: _GradientHook) -> None:
        hook.handle = tensor.register_hook(hook)
        self._gradient_hooks.add(hook)

    def _place_repeated(self) -> None:
        """The stretch is complete, as a gradient arrives in it: its calls repeat the last ones that wait, in their order."""
        for places, hook in reversed(self._repeated):
            hook.place = places.waiting.pop() if places.waiting else None

    def _backward_pass(self, hook: _GradientHook) -> int:
        """The call of ``backward`` that brings a gradient; what is run again has a pass of its own within it."""
        current = torch._C._current_graph_task_id()
        if hook.outer_pass is not None:
            self._outer_pass = {current: hook.outer_pass}
        return self._outer_pass.get(current, current)


class _Places:
    """The places of one module."""

    def __init__(self, places: list[int]) -> None:
        self._places = places
        self.num_calls = 0
        self.waiting: deque[int] = deque(maxlen=MAX_WAITING_CALLS)
        """The places of calls whose output takes no gradient: they may be run again, and then does."""

    def next(self) -> int:
        """The place of the call that comes now."""
        place = self._places[self.num_calls % len(self._places)]
        self.num_calls += 1
        return place


class _ForwardHook(ForwardHook):
    """Called after a block's forward. Returns nothing: what a forward hook returns replaces the output."""

    def __init__(self, probe: BlockGradientProbe) -> None:
        self._probe = probe

    def see(self, module: nn.Module, _args: object, output: object) -> None:
        if self._probe.is_open:
            self._probe.see_output(module, output)


class _GradientHook:
    """Called with the gradient of an output. Returns nothing: what a tensor hook returns replaces the gradient."""

    def __init__(self, probe: BlockGradientProbe, place: int | None, outer_pass: int | None = None) -> None:
        self._probe = probe
        self.place = place
        """``None`` for a call that was run again, until it is known which call it repeats."""
        self.outer_pass = outer_pass
        """The backward pass in which the call was run again."""
        self.handle: torch.utils.hooks.RemovableHandle | None = None

    def __call__(self, gradient: Tensor | None) -> None:
        # None: of several outputs of one function (of ``chunk``, say) this one was not used.
        if gradient is not None:
            self._probe.see_gradient(self, gradient)

    def remove(self) -> None:
        """Take the hook off the output."""
        if self.handle is not None:
            self.handle.remove()
