"""The tap of a step: one forward hook on each observed module, and one hook on the gradient of each of its output tensors."""

from __future__ import annotations

import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_module_monitor.distributed.shards import local_part
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.kernels.table import Scale
from lightning_module_monitor.model.hooks import (
    NO_PASS,
    HookSet,
    UncopiedHook,
    backward_pass,
    is_capturing,
    is_tracing,
    register_gradient_hook,
    requires_gradient,
)
from lightning_module_monitor.model.outputs import NamedTensors, named_tensors
from lightning_module_monitor.probes.base import Gate, Probe

TargetT = TypeVar("TargetT")

MAX_WAITING_CALLS = 1024
"""Calls of one module, in one micro-batch, that a backward pass may run again."""

Awaited = tuple[Tensor | None, Hashable, Any]
"""A gradient that a consumer awaits: the output tensor, the name of its series of calls, and the call.

The name is ``None`` if calls need not be distinguished. Otherwise recomputed calls are matched with original calls by this name, in order,
including calls without a gradient. A recomputation has no call."""


class Consumer(Probe, Generic[TargetT], ABC):
    """Takes the outputs of modules from a :class:`ModuleTap`, and the gradients that it awaits.

    An error in one consumer does not affect the others.
    """

    def __init__(self, targets: Iterable[tuple[nn.Module, TargetT]]) -> None:
        self.targets = list(targets)
        """The modules, each with what the consumer's methods get with its outputs."""

    @abstractmethod
    def observe_output(self, target: TargetT, output: object, tensors: NamedTensors, is_repeated: bool) -> Iterable[Awaited]:
        """Observe the output of a call, and return the gradients to await.

        Args:
            target: What was given with the module.
            output: The output; it may be overwritten as soon as this returns.
            tensors: All tensors in it.
            is_repeated: Whether the call is the recomputation of a checkpointed call.
        """

    @abstractmethod
    def fail(self, target: TargetT, output: object, error: Exception) -> None:
        """Report an output that cannot be taken apart or observed."""

    def observe_gradient(self, call: Any, gradient: Tensor, scale: Scale) -> None:  # noqa: ANN401  # as it was awaited
        """Observe an awaited gradient, of the loss times ``scale``. It may be part of a graph, and is valid in this method only."""

    def fail_gradient(self, call: Any, gradient: Tensor, error: Exception) -> None:  # noqa: ANN401  # as above
        """Report a gradient that cannot be observed. Without a report of its own a consumer lets the backward pass fail."""
        raise error


Consumers = tuple[tuple[Consumer[Any], Any], ...]
"""The consumers of a module's outputs, or of a gradient; each with what its methods get with it."""


class ModuleTap(Probe):
    """Gives the outputs of modules, and the gradients that arrive at them, to consumers.

    Unlike a module's backward hook, a hook on a tensor leaves in-place layers as they are. Only gradients between
    :meth:`begin_backward` and :meth:`end_backward` count, and so not those of an inner ``autograd.grad``.

    Under reentrant checkpointing an output has a gradient only when it is recomputed, within the backward pass. Such a gradient is
    assigned to the first call: segments are recomputed last to first.

    Autograd runs a thread for each device. The lock lets only one of them at a time change what consumers and a step share.
    """

    def __init__(self, consumers: Iterable[Consumer[Any]], gate: Gate, step: object) -> None:
        self.gate = gate
        self.step = step
        """The step; the gate has it as its observer while this tap observes."""
        self.lock = threading.RLock()  # an observed gradient may come up while another one is observed, as of a function's own pass
        self._by_module: defaultdict[nn.Module, Consumers] = defaultdict(tuple)
        for consumer in consumers:
            for module, target in consumer.targets:
                self._by_module[module] += ((consumer, target),)
        self._module_hooks = HookSet()
        self._are_redirected: list[bool] = []
        """Whether each running call of a wrapped module is the wrapper's, the outermost first."""
        self._gradient_hooks: weakref.WeakKeyDictionary[GradientHook, RemovableHandle] = weakref.WeakKeyDictionary()
        """Weak: a graph that no backward pass went through takes its hooks with it, and a micro-batch may never be ended."""
        self.counts_gradients = True
        """Whether gradients that arrive are those of the loss."""
        self.scale: Scale = None
        """The factor of the loss that is differentiated."""
        self._waiting: defaultdict[Hashable, deque[Any]] = defaultdict(functools.partial(deque, maxlen=MAX_WAITING_CALLS))
        """Calls whose output has no gradient, by name: a backward pass may run them again."""
        self._repeated: list[tuple[GradientHook, Consumer[Any], deque[Any]]] = []
        """Hooks of the segment that is being recomputed, each with a consumer and the calls that it may repeat."""
        self._outer_pass: dict[int, int] = {}
        """The backward pass that recomputes a segment, by the pass within it."""

    def attach(self) -> None:
        """Register the hooks on modules."""
        for module, consumers in self._by_module.items():
            if module is self.gate.wrapped:
                self._module_hooks.add_forward(module, UncopiedHook(self._begin_wrapped), prepend=True, is_before=True)
                end = UncopiedHook(functools.partial(self._end_wrapped, consumers))
                self._module_hooks.add_forward(module, end, always_call=True)
            else:
                self._module_hooks.add_forward(module, UncopiedHook(functools.partial(self._observe, consumers)))

    def begin_backward(self, scale: Scale = None) -> None:
        """Gradients that arrive from now on count."""
        self.counts_gradients = True
        self.scale = scale

    def end_backward(self) -> None:
        """Gradients that arrive from now on do not count."""
        self.counts_gradients = False

    def backward_pass(self) -> int:
        """Number of the call of ``backward`` that runs now; a recomputation has a pass of its own within it."""
        current = backward_pass()
        return self._outer_pass.get(current, current)

    def end_micro_batch(self) -> None:
        """Release the outputs of the micro-batch."""
        for handle in list(self._gradient_hooks.values()):
            handle.remove()
        self.release_calls()

    def release_calls(self) -> None:
        """Release the calls that wait for a recomputation."""
        self._waiting.clear()
        self._repeated.clear()
        self._outer_pass.clear()

    def close(self) -> None:
        """Remove every hook."""
        self._module_hooks.close()
        self.end_micro_batch()

    def _observe(self, consumers: Consumers, _module: nn.Module, _args: object, output: object) -> None:
        """Take the output of a call apart once, and give it to every consumer."""
        gate = self.gate
        # `is_of_others`, without a further call for every module.
        if gate.observer is not self.step or (gate.is_in_step is not None and not gate.is_in_step() and gate.is_of_others()):
            return
        is_repeated = backward_pass() != NO_PASS  # is_in_backward without a further call for every module
        try:
            tensors: NamedTensors = (((), output),) if isinstance(output, Tensor) else [*named_tensors(output)]
        except Exception as error:  # e.g. of an output that contains itself
            for consumer, target in consumers:
                consumer.fail(target, output, error)
            return
        hooks: dict[int, GradientHook] = {}
        with self.lock:
            for consumer, target in consumers:
                try:  # and no `failing_alone`, whose calls would be paid at every call of a module
                    for awaited in consumer.observe_output(target, output, tensors, is_repeated):
                        self._await_gradient(hooks, consumer, is_repeated, awaited)
                except MonitorError:
                    raise
                except Exception as error:
                    consumer.fail(target, output, error)

    def _begin_wrapped(self, module: nn.Module, _args: object) -> None:
        self._are_redirected.append(self.gate.is_redirected(module))

    def _end_wrapped(self, consumers: Consumers, *call: Any) -> None:
        """Leave out the wrapper's own call, which has others within it. The output of a call that failed is ``None``."""
        if not (self._are_redirected and self._are_redirected.pop()):
            self._observe(consumers, *call)

    def _await_gradient(self, hooks: dict[int, GradientHook], consumer: Consumer[Any], is_repeated: bool, awaited: Awaited) -> None:
        """Wait for the gradient of an output, or of its recomputation. ``hooks`` has the hooks of the output's tensors by ``id``."""
        tensor, name, call = awaited
        if tensor is None or not requires_gradient(tensor):
            if name is not None and not is_repeated:
                self._waiting[name].append(call)
            return
        waiting = self._waiting[name] if name is not None and is_repeated else None
        if waiting is not None and not waiting:
            return
        hook = hooks.get(id(tensor)) if hooks else None
        if hook is None:
            hook = hooks[id(tensor)] = GradientHook(self)
            self._gradient_hooks[hook] = register_gradient_hook(tensor, hook)
        if waiting is None:
            hook.takers += ((consumer, call),)
            hook.is_numbered |= name is not None
        else:
            hook.outer_pass = self.backward_pass()
            self._repeated.append((hook, consumer, waiting))

    def begin_gradient(self, hook: GradientHook) -> None:
        """A gradient arrives at an output whose calls are numbered."""
        if any(hook is repeated for repeated, _consumer, _waiting in self._repeated):
            # The segment is complete, as a gradient arrives in it: its calls repeat the last ones that wait, in their order.
            for repeated, consumer, waiting in reversed(self._repeated):
                if waiting:
                    repeated.takers += ((consumer, waiting.pop()),)
        self._repeated.clear()
        if hook.outer_pass is not None:
            self._outer_pass = {backward_pass(): hook.outer_pass}


class GradientHook:
    """The hook on the gradient of an output tensor. It returns nothing: what a tensor hook returns replaces the gradient."""

    def __init__(self, tap: ModuleTap) -> None:
        self._tap = tap
        self.takers: Consumers = ()
        """Consumers with the call that each has given; of a recomputation, once it is known which call it repeats."""
        self.is_numbered = False
        """Whether any consumer distinguishes the call from others of the same module."""
        self.outer_pass: int | None = None
        """The backward pass in which the call was run again."""

    def __call__(self, gradient: Tensor | None) -> None:
        """Give the gradient to the consumers, if it is one of the loss."""
        tap = self._tap
        # None: this output of a multi-output function, such as ``chunk``, was not used.
        if gradient is None or not tap.counts_gradients or is_tracing() or (gradient.is_cuda and is_capturing()):
            return
        with tap.lock:
            if self.is_numbered or self.outer_pass is not None:
                tap.begin_gradient(self)
            for consumer, call in self.takers:
                try:
                    consumer.observe_gradient(call, gradient, tap.scale)
                except MonitorError:
                    raise
                except Exception as error:
                    consumer.fail_gradient(call, gradient, error)


def counted_elements(tensor: Tensor) -> Tensor:
    """The elements of an activation, or of its gradient, that this rank counts."""
    tensor = plain(tensor)
    return tensor if type(tensor) is Tensor else local_part(tensor)
