"""Largest magnitudes of outputs, further inputs, and the gradients of both, which show the module that made a non-finite value."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_module_monitor.distributed.shards import local_part
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.model.hooks import (
    HookSet,
    UncopiedHook,
    is_capturing,
    is_in_backward,
    is_tracing,
    register_gradient_hook,
    requires_gradient,
)
from lightning_module_monitor.model.names import ROOT, ModuleSite
from lightning_module_monitor.model.outputs import named_tensors
from lightning_module_monitor.nonfinite.magnitudes import UNKNOWN, Magnitudes, has_fractions
from lightning_module_monitor.probes.base import failing_alone

NO_CALL = -1
"""No event; the caller of modules that the LightningModule itself calls."""

Event = int
"""Index of an event in :attr:`Pass.calls`."""
Number = int
"""Index of a largest magnitude in :attr:`ObservedPasses.values`; ``UNKNOWN`` without one."""
Args = tuple[object, ...]
Kwargs = dict[str, object]


class Call(NamedTuple):
    """An event of the forward pass: a module with submodules was entered or has returned, or a module without submodules was called."""

    site: ModuleSite
    caller: Event
    """The event in which the innermost running module was entered, whose code called it."""
    input: Number
    """Its first input that is a tensor."""
    is_new: bool
    """Whether that tensor was made by code between modules: it is not the last output, or that was changed."""
    output: Number
    """Its output, or one of its outputs; ``UNKNOWN`` while it runs."""
    entered: Event
    """The event in which the module was entered; ``NO_CALL`` if it is this event."""
    others: tuple[Number, ...] = ()
    """Its further inputs."""


class Gradient(NamedTuple):
    """A gradient that arrived."""

    call: Event
    """The call whose input or output has the gradient."""
    at_input: bool
    """Whether it is the gradient of the call's input, which no module returned; else of its output."""
    magnitude: Number


@dataclass
class Pass:
    """The forward and the backward pass of a micro-batch."""

    calls: list[Call] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    loss: Number = UNKNOWN


@dataclass(frozen=True)
class ObservedPasses:
    """Observations of a rank in a step with a non-finite value, on the host."""

    passes: Sequence[Pass]
    """The micro-batches."""
    values: Sequence[float]
    """The largest magnitudes by index, and a 0 at the end for the index ``UNKNOWN``."""
    weights: Mapping[str, float]
    """Largest magnitude of every parameter before the update, by name."""


class NonfiniteProbe:
    """Takes the largest magnitudes of every module's inputs and outputs, and of the gradients that arrive at them.

    An input that is the last output, unchanged, is not read again. An error in a hook is passed to ``report``, and ends the observation
    of the micro-batch. Calls count while ``is_in_step`` is true; by default all do.
    """

    def __init__(
        self, sites: Sequence[ModuleSite], report: Callable[[Exception], None], is_in_step: Callable[[], bool] | None = None
    ) -> None:
        self._report, self._is_in_step = report, is_in_step
        self._owners = {"" if site.name == ROOT else f"{site.name}.": site.module for site in sites}
        """The modules that have parameters, by the beginning of the parameters' names."""
        self._sites = [site for site in sites if site.name != ROOT]
        self._hooks, self._tensor_hooks = HookSet(), HookSet()
        self._lock = threading.Lock()  # autograd runs a thread for each device
        self._numbers = Magnitudes()
        self._is_open = False
        """Whether a micro-batch is being observed."""
        self._is_in_backward = False
        """Whether gradients are those of the loss, and not of an inner ``autograd.grad``."""
        self._running: list[Event] = []
        """The events in which the running modules were entered; the innermost last."""
        self._passes: list[Pass] = []
        self._weights: dict[str, Number] = {}
        self._last: tuple[weakref.ref[Tensor] | None, int, Number] = None, 0, UNKNOWN
        """The last tensor, its version, and its index. Torch alone keeps it alive: the logits of a language model may be gigabytes."""

    # The step

    def attach(self) -> None:
        """Register the hooks, unless they are on."""
        if len(self._hooks):
            return
        for site in self._sites:
            if next(site.module.children(), None) is None:
                self._hooks.add_forward(site.module, self._hook(self._observe_call, site), with_kwargs=True)
            else:
                self._hooks.add_forward(site.module, self._hook(self._enter, site), with_kwargs=True, is_before=True)
                self._hooks.add_forward(site.module, self._hook(self._leave, site), with_kwargs=True)

    def _hook(self, observe: Callable[[ModuleSite, Args, Kwargs, object], None], site: ModuleSite) -> UncopiedHook:
        def hook(_module: nn.Module, args: Args, kwargs: Kwargs, output: object = None) -> None:
            # A checkpointed module that is recomputed was observed before.
            if self._is_open and not is_in_backward() and (self._is_in_step is None or self._is_in_step()):
                with failing_alone(self._fail):
                    observe(site, args, kwargs, output)

        return UncopiedHook(hook)

    def _fail(self, error: Exception) -> None:
        self._is_open = self._is_in_backward = False
        self._report(error)

    def begin_micro_batch(self) -> None:
        """Begin to observe a micro-batch."""
        self.end_micro_batch()
        self._is_open = True
        self._passes.append(Pass())

    def begin_backward(self, loss: Tensor) -> None:
        """Observe the loss of the micro-batch, and the gradients that follow."""
        if self._is_open and not is_tracing():
            self._is_in_backward = True
            self._passes[-1].loss = self._numbers.add(loss)

    def end_backward(self) -> None:
        """Observe no more gradients of the loss."""
        self._is_in_backward = False

    def end_micro_batch(self) -> None:
        """Observe no more calls, and release the tensors of the micro-batch."""
        self._is_open = self._is_in_backward = False
        self._running.clear()
        self._tensor_hooks.close()
        self._last = None, 0, UNKNOWN

    def observe_weights(self) -> None:
        """Observe the parameters before the optimizer changes them."""
        if is_tracing():
            return
        self._weights = {
            start + name: self._numbers.add(_local_elements(parameter))
            for start, module in self._owners.items()
            for name, parameter in module._parameters.items()
            if parameter is not None and not is_lazy(parameter) and has_fractions(parameter)
        }

    def forget(self) -> None:
        """Release the observations of the step."""
        self.end_micro_batch()
        self._numbers = Magnitudes()
        self._passes.clear()
        self._weights.clear()

    def close(self) -> None:
        """Remove every hook and release every tensor; a second call does nothing."""
        self._hooks.close()
        self.forget()

    # Hooks

    def _enter(self, site: ModuleSite, args: Args, kwargs: Kwargs, _output: object) -> None:
        value, index, is_new, others = self._inputs(args, kwargs, None)
        call = Call(site, self._caller(), index, is_new, UNKNOWN, NO_CALL, others)
        self._running.append(len(self._passes[-1].calls))
        self._add_call(call, value, None)

    def _leave(self, site: ModuleSite, _args: Args, _kwargs: Kwargs, output: object) -> None:
        calls = self._passes[-1].calls
        while self._running:
            entered = self._running.pop()
            if calls[entered].site is site:
                break  # modules within it have ended by an exception that was caught
        else:
            return
        for tensor, index in self._outputs(output):
            self._add_call(Call(site, self._caller(), UNKNOWN, is_new=False, output=index, entered=entered), None, tensor)

    def _observe_call(self, site: ModuleSite, args: Args, kwargs: Kwargs, output: object) -> None:
        value, index, is_new, others = self._inputs(args, kwargs, output)
        for tensor, output_index in self._outputs(output):
            self._add_call(Call(site, self._caller(), index, is_new, output_index, NO_CALL, others), value, tensor)
            is_new = False  # several outputs are several calls, whose input has one gradient

    def _inputs(self, args: Args, kwargs: Kwargs, output: object) -> tuple[Tensor | None, Number, bool, tuple[Number, ...]]:
        """The first input that is a tensor, its index, and whether it is new; and the indices of all further tensors."""
        # An input that the module overwrote no longer exists; it was observed if it was an output.
        values = [value for value in (*args, *kwargs.values()) if value is not output]
        first = next((value for value in values if isinstance(value, Tensor)), None)
        tensors = (plain(tensor) for _path, tensor in named_tensors(values) if tensor is not first and tensor is not output)
        others = tuple(self._numbers.add(_local_elements(tensor)) for tensor in tensors if has_fractions(tensor))
        return first, *self._index(first), others

    def _caller(self) -> Event:
        return self._running[-1] if self._running else NO_CALL

    def _add_call(self, call: Call, value: Tensor | None, output: Tensor | None) -> None:
        calls = self._passes[-1].calls
        for tensor, at_input in ((value if call.is_new else None, True), (output, False)):
            if tensor is not None and requires_gradient(tensor):
                observe = functools.partial(self._observe_gradient, len(calls), at_input)
                self._tensor_hooks.add(register_gradient_hook(tensor, observe))
        calls.append(call)

    def _observe_gradient(self, call: Event, at_input: bool, gradient: Tensor | None) -> None:
        # It returns nothing, because a value returned by a tensor hook replaces the gradient.
        if gradient is not None and self._is_in_backward and not is_tracing() and not (gradient.is_cuda and is_capturing()):
            with failing_alone(self._fail), self._lock:
                self._passes[-1].gradients.append(Gradient(call, at_input, self._numbers.add(_local_elements(gradient))))

    def _index(self, value: Tensor | None) -> tuple[Number, bool]:
        """The index of an input or output, and whether it is not the last output, unchanged."""
        if value is None or not has_fractions(elements := plain(value)):
            return UNKNOWN, False
        last, version, index = self._last
        if last is not None and value is last() and elements._version == version:
            return index, False
        index = self._numbers.add(_local_elements(elements))
        if not elements.is_inference():
            self._last = weakref.ref(value), elements._version, index
        return index, True

    def _outputs(self, output: object) -> Iterator[tuple[Tensor, Number]]:
        for _path, tensor in named_tensors(output):
            if has_fractions(plain(tensor)):
                yield tensor, self._index(tensor)[0]  # a container may return the output of its last part

    # Result

    def observed(self, *, was_cut_short: bool = False) -> ObservedPasses | None:
        """The observations, if a value is not finite.

        Of a pass that ``was_cut_short`` if one is NaN: its infinities may be those of a mask.
        """
        numbers = self._numbers.read()
        if not any(map(math.isnan, numbers)) and (was_cut_short or all(map(math.isfinite, numbers))):
            return None
        if not self._weights:
            self.observe_weights()
        values = self._numbers.read()
        weights = {name: values[index] for name, index in self._weights.items() if index != UNKNOWN}
        return ObservedPasses(list(self._passes), [*values, 0.0], weights)


def _local_elements(tensor: Tensor) -> Tensor:
    """The elements of a tensor on this rank, even if ranks still sum it: a non-finite part makes the sum non-finite."""
    return local_part(plain(tensor), is_reduced=False)
