"""What probes share: the phases of a step, and the hooks on modules and on the gradients of their outputs."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_module_monitor.distributed.shards import local_part
from lightning_module_monitor.errors import MonitorError, shortened
from lightning_module_monitor.kernels.elements import unwrapped
from lightning_module_monitor.model.hooks import HookSet, UncopiedHook, backward_pass, is_tracing, register_gradient_hook, requires_gradient
from lightning_module_monitor.model.names import ModelIndex, ModuleSite, ParameterSite
from lightning_module_monitor.model.outputs import in_graph
from lightning_module_monitor.probes.reporting import ErrorReporter
from lightning_module_monitor.record import RawTensor
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.precision import unscaled
from lightning_module_monitor.statistics.spec import MetricSpec

SiteT = TypeVar("SiteT", ModuleSite, ParameterSite)
TargetT = TypeVar("TargetT")

MAX_WAITING_CALLS = 1024
"""Calls of one module, in one micro-batch, that a backward pass may run again."""


@dataclass(frozen=True)
class Watched(Generic[SiteT]):
    """A module or parameter, and what is recorded of it, by kind."""

    site: SiteT
    specs: Mapping[str, MetricSpec]
    layers: Mapping[str, Mapping[str, MetricSpec]] = field(default_factory=dict)
    """What is recorded of the linear maps of a module by kind and by the name of the map's site."""

    def all_specs(self) -> list[MetricSpec]:
        """What is recorded of every kind, linear maps included."""
        return [*self.specs.values(), *(spec for by_site in self.layers.values() for spec in by_site.values())]


WatchedModule = Watched[ModuleSite]
WatchedParameter = Watched[ParameterSite]
Among = Collection[int] | None
"""Some of the parameters, by their ``id``; ``None`` for all."""


class StepTools(NamedTuple):
    """What the probes of a step have in common."""

    accumulator: StepAccumulator
    names: ModelIndex
    """Names further outputs, inputs and heads."""
    reporter: ErrorReporter

    def log_unsupported(self, what: str, names: Mapping[torch.dtype | type, list[str]]) -> None:
        """Log the names of outputs or parameters that are no real floating tensors, in one line for each dtype or class."""
        for sort, of_sort in names.items():
            of_what = f"dtype {sort}" if isinstance(sort, torch.dtype) else f"class {sort.__name__}"
            why = "only real floating ones are" if isinstance(sort, torch.dtype) else "no tensor is found in them"
            self.reporter.log_once(f"{shortened(of_sort)}: {what} of {of_what} are not recorded; {why}.")

    def report_not_captured(self, what: str, error: Exception) -> None:
        """Report and count a raw tensor that could not be captured."""
        self.reporter.count(f"{what} could not be captured", "capture", error, self.accumulator)


class Probe:
    """Observes one step from :meth:`attach` to :meth:`close`. A probe overrides the phases that concern it."""

    is_open = True
    """Whether calls are observed now: not under ``no_monitor``, and not in a loop of another stage."""
    is_suspended = False
    """Whether a loop of another stage runs in the middle of the step. The reference is run under ``no_monitor`` too, and a call of it
    belongs to the step only where this is false."""

    def overrides(self, method: Callable[..., object]) -> bool:
        """Whether the probe does anything in a phase, one of the methods below."""
        return getattr(type(self), method.__name__) is not method

    def attach(self) -> None:
        """Register the hooks."""

    def begin_backward(self, scale: Tensor | None = None) -> None:
        """The backward pass of the loss times ``scale``, shape ``()``, begins. In a loop that never reports one, every gradient counts."""

    def end_backward(self) -> None:
        """The backward pass of the loss is over."""

    def observe_parameters(self, among: Among = None) -> None:
        """The optimizer is about to move ``among``, or all parameters."""

    def observe_gradients(self, kind: str, among: Among = None, scale: Tensor | None = None) -> None:
        """The gradients of parameters are complete.

        Args:
            kind: ``gradient_before_clip``, or ``gradient`` if the optimizer is about to use them.
            among: Of which parameters; all without it.
            scale: The factor of the loss that they still have, shape ``()``, on any device.
        """

    def observe_updates(self, among: Among = None, *, is_skipped: bool = False) -> None:
        """The optimizer has moved parameters, or skipped its step: then the update is 0, whatever else has changed them."""

    def end_micro_batch(self) -> None:
        """One of several micro-batches of the step is over."""

    def finish(self) -> None:
        """The step is over: record what was deferred. Before :meth:`close`."""

    def tensors(self) -> list[RawTensor]:
        """The captured tensors of the step, on the host. Before :meth:`close`."""
        return []

    def close(self) -> None:
        """Remove every hook and release every tensor; a second call does nothing."""

    def derive(self, values: dict[str, float]) -> None:
        """After the step, on the host: replace values that are only parts of others by those others."""


class ModuleProbe(Probe, Generic[TargetT], ABC):
    """Calls :meth:`observe_call` after each forward of a module, with the target that was given with the module."""

    def __init__(self, targets: Iterable[tuple[nn.Module, TargetT]]) -> None:
        self._targets = list(targets)
        self._module_hooks = HookSet()

    def attach(self) -> None:
        """Register the hooks."""
        for module, target in self._targets:
            self._module_hooks.add_forward(module, CallHook(self, target))

    @abstractmethod
    def observe_call(self, target: TargetT, *args: Any, **kwargs: Any) -> None:
        """Observe a call of a module, from its target, arguments (keyword ones if the hook has them) and output.

        An error goes to :meth:`fail`. ``kwargs`` is empty: with it a subclass may name its parameters.
        """

    @abstractmethod
    def fail(self, target: TargetT, output: object, error: Exception) -> None:
        """Report a call that cannot be observed, e.g. because its output contains itself."""

    def close(self) -> None:
        """Remove the hooks."""
        self._module_hooks.close()


class CallHook(UncopiedHook):
    """Calls a probe after a module's forward. It returns nothing: what a forward hook returns replaces the output."""

    def __init__(self, probe: ModuleProbe[TargetT], target: TargetT) -> None:
        super().__init__(probe.observe_call)
        self._probe: ModuleProbe[Any] = probe
        self._target = target

    def __call__(self, _module: nn.Module, *call: Any) -> None:
        """Observe the call, unless torch traces it; arguments as torch gives them."""
        if is_tracing() or not self._probe.is_open:
            return
        try:  # and no `failing_alone`, whose calls would be paid at every call of a module
            self._function(self._target, *call)
        except MonitorError:
            raise
        except Exception as error:
            self._probe.fail(self._target, call[-1], error)


class GradientProbe(ModuleProbe[TargetT]):
    """Observes the gradients that arrive at outputs of modules, by a hook on each output.

    Unlike a module's backward hook, a hook on a tensor leaves in-place layers as they are. Only gradients between
    :meth:`begin_backward` and :meth:`end_backward` count, and so not those of an inner ``autograd.grad``.

    Under reentrant checkpointing an output has a gradient only when it is computed again, within the backward pass.
    :meth:`follow` assigns such a gradient to the first call: stretches of the model are run again from the last to the first, each
    from its beginning to its end.
    """

    counts_gradients = True
    """Whether gradients that arrive now are those of the loss."""
    scale: Tensor | None = None
    """The factor of the loss that is differentiated."""

    def __init__(self, targets: Iterable[tuple[nn.Module, TargetT]]) -> None:
        super().__init__(targets)
        self._gradient_hooks: weakref.WeakKeyDictionary[GradientHook, RemovableHandle] = weakref.WeakKeyDictionary()
        """Weak: a graph that no backward pass went through takes its hooks with it, and a micro-batch may never be ended."""
        self._waiting: defaultdict[Hashable, deque[Any]] = defaultdict(functools.partial(deque, maxlen=MAX_WAITING_CALLS))
        """Calls whose output has no gradient, by what was called: a backward pass may run them again."""
        self.repeated: list[tuple[deque[Any], GradientHook]] = []
        """Hooks of the stretch that is being run again, each with the calls of which it repeats one."""
        self.outer_pass: dict[int, int] = {}
        """The backward pass that runs a stretch again, by the pass within it."""

    def begin_backward(self, scale: Tensor | None = None) -> None:
        """Gradients that arrive from now on count."""
        self.counts_gradients = True
        self.scale = scale

    def end_backward(self) -> None:
        """Gradients that arrive from now on do not count."""
        self.counts_gradients = False

    @abstractmethod
    def observe_gradient(self, call: Any, gradient: Tensor) -> None:  # noqa: ANN401  # as it was given to `watch_gradient`
        """Observe a gradient of a call that was given to :meth:`follow`. It may be part of a graph, and is valid in this method only."""

    def fail_gradient(self, call: Any, gradient: Tensor, error: Exception) -> None:  # noqa: ANN401  # as above
        """Report a gradient that cannot be observed. Without a report of its own a probe lets the backward pass fail."""
        raise error

    def watch_gradient(self, tensor: Tensor, hook: GradientHook) -> None:
        """Register a hook on an output that requires a gradient."""
        self._gradient_hooks[hook] = register_gradient_hook(tensor, hook)

    def follow(self, key: Hashable, output: Tensor | None, call: object) -> None:
        """Wait for the gradient of an output of a call of ``key``, or of its recomputation.

        Args:
            key: What is called.
            output: ``None`` for a call without such an output.
            call: Which call it is, for :meth:`observe_gradient`; ``None`` for a recomputation.
        """
        tensor, waiting = None if output is None else in_graph(output), self._waiting[key]
        if tensor is None or not requires_gradient(tensor):
            if call is not None:
                waiting.append(call)
        elif call is not None:
            self.watch_gradient(tensor, GradientHook(self, call))
        elif waiting:
            hook = GradientHook(self, None, self.backward_pass())
            self.watch_gradient(tensor, hook)
            self.repeated.append((waiting, hook))

    def backward_pass(self) -> int:
        """Number of the call of ``backward`` that runs now; a recomputation has a pass of its own within it."""
        current = backward_pass()
        return self.outer_pass.get(current, current)

    def end_micro_batch(self) -> None:
        """Release the outputs of the micro-batch."""
        for handle in list(self._gradient_hooks.values()):
            handle.remove()
        self.forget_calls()

    def forget_calls(self) -> None:
        """Forget the calls that wait for a recomputation."""
        self._waiting.clear()
        self.repeated.clear()
        self.outer_pass.clear()

    def close(self) -> None:
        """Remove the hooks."""
        super().close()
        self.end_micro_batch()


class GradientHook:
    """Called with the gradient of an output. It returns nothing: what a tensor hook returns replaces the gradient."""

    def __init__(self, probe: GradientProbe[Any], call: object, outer_pass: int | None = None) -> None:
        self._probe = probe
        self.call = call
        """``None`` for a recomputation, until it is known which call it repeats."""
        self.outer_pass = outer_pass
        """The backward pass in which the call was run again."""

    def __call__(self, gradient: Tensor | None) -> None:
        """Observe the gradient, if it is one of the loss."""
        # None: of several outputs of one function (of ``chunk``, say) this one was not used.
        if gradient is None or not self._probe.counts_gradients or is_tracing():
            return
        if self._probe.repeated:
            # The stretch is complete, as a gradient arrives in it: its calls repeat the last ones that wait, in their order.
            for waiting, repeated in reversed(self._probe.repeated) if self.call is None else ():
                repeated.call = waiting.pop() if waiting else None
            self._probe.repeated.clear()
        if self.call is None:
            return
        if self.outer_pass is not None:
            self._probe.outer_pass = {backward_pass(): self.outer_pass}
        try:
            self._probe.observe_gradient(self.call, gradient)
        except MonitorError:
            raise
        except Exception as error:
            self._probe.fail_gradient(self.call, gradient, error)


def elements_of(tensor: Tensor, scale: Tensor | None = None) -> Tensor:
    """The elements of an activation, or of its gradient without a scale, that this rank counts: of all samples under ``vmap``."""
    return unscaled(local_part(unwrapped(tensor)), scale)
