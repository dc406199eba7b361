"""Largest magnitudes that show whether a step has a non-finite value, and which module made it.

A flag for each step reads losses and gradients alone. The module is found from outputs, other inputs, and the gradients of both.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_module_monitor.distributed.shards import local_part
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.model.hooks import (
    HookSet,
    UncopiedHook,
    is_in_backward,
    is_tracing,
    register_gradient_hook,
    requires_gradient,
)
from lightning_module_monitor.model.names import ROOT, ModuleSite
from lightning_module_monitor.model.outputs import named_tensors
from lightning_module_monitor.statistics.magnitudes import UNKNOWN, Magnitudes

NO_CALL = -1
"""The caller of what the LightningModule itself calls."""

MAX_VECTORS = 16
"""As many gradients are observed lightly, evenly spaced from the first on: what is not finite reaches every layer before it."""

Args = tuple[object, ...]
Kwargs = dict[str, object]


class Call(NamedTuple):
    """An event of the forward pass: a module was entered, or has returned, or both, if it has no submodules."""

    site: int
    """Number of the module."""
    caller: int
    """Number of the innermost running module, whose own code called it."""
    input: int
    """Place of the largest magnitude of its first tensor; the other places likewise."""
    is_new: bool
    """Whether that tensor is not the last output, unchanged: then code between modules made it."""
    output: int
    entered: int
    """The event that entered the module; ``NO_CALL`` if this one did."""
    others: tuple[int, ...] = ()
    """Places of its further inputs."""
    is_further: bool = False
    """Whether this is another output of the call before."""


class Gradient(NamedTuple):
    """A gradient that has arrived."""

    call: int
    """The call whose input or output it is of."""
    of_input: bool
    """Whether it is of the call's input, which was no output; else of its output."""
    place: int


@dataclass
class Pass:
    """A micro-batch: its forward pass, and its backward pass."""

    calls: list[Call] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    loss: int = UNKNOWN
    """Place of the loss."""


@dataclass(frozen=True)
class Observed:
    """What one rank observed in a step with a non-finite value, on the host."""

    sites: Sequence[ModuleSite]
    """The modules; a call has their index."""
    passes: Sequence[Pass]
    """The micro-batches."""
    values: Sequence[float]
    """The largest magnitudes, by place, and a 0 at the end, which ``UNKNOWN`` points to."""
    weights: Mapping[str, float]
    """Largest magnitude of every parameter by name, as it was in the step."""

    def is_bad(self, place: int) -> bool:
        """Whether the tensor at a place has non-finite elements."""
        return not math.isfinite(self.values[place])


class FiniteStep:
    """Takes the largest magnitude of losses and gradients; needs no hook.

    A non-finite value of the forward pass makes the loss non-finite; one of the backward pass reaches the gradients of earlier layers. The
    gradient of a bias is the sum of what arrives at its module: where there is one, it shows as much as that of the weight, and is small.
    """

    def __init__(self, sites: Sequence[ModuleSite]) -> None:
        self._owners = [site.module for site in sites if site.module._parameters]
        self._numbers = Magnitudes()
        self._micro_batches: list[int] = []
        """The micro-batch of every number."""
        self.micro_batch = 0
        """The running one."""
        self._vectors: list[list[nn.Parameter]] | None = None
        """The biases and gains to observe lightly, those that go together; ``None`` before :meth:`observe_gradients`."""
        self._since: Tensor | None = None
        """The first step that :meth:`mark` found, shape ``()``, on the device of the loss; -1 if there is none."""

    def observe_loss(self, loss: Tensor) -> None:
        """Observe a loss."""
        if not is_tracing():
            self._numbers.add(loss)
            self._note()

    @torch.no_grad()
    def observe_gradients(self, *, lightly: bool = False) -> None:
        """Observe the gradients of a backward pass; ``lightly`` those of some biases and gains alone, at the cost of a few operations."""
        if is_tracing():
            return
        if not lightly or self._vectors is None:
            self._observe_all_gradients()
        else:
            self._observe_vectors(self._vectors)
        self._note()

    def _observe_all_gradients(self) -> None:
        vectors = []
        for owner in self._owners:
            own = owner._parameters
            bias = own.get("bias")
            is_shown_by_bias = bias is not None and bias.requires_grad and len(own) == 2 and "weight" in own
            for parameter in (bias,) if is_shown_by_bias else own.values():
                if parameter is None or nn.parameter.is_lazy(parameter):
                    continue
                if parameter.dim() == 1 and parameter.layout is torch.strided:
                    vectors.append(parameter)
                elif parameter.grad is not None:
                    self._numbers.add(local_part(parameter.grad))
        # By device and dtype: reading many vectors at once costs as much as reading one.
        groups: defaultdict[object, list[nn.Parameter]] = defaultdict(list)
        for parameter in vectors:
            groups[type(parameter), parameter.device, parameter.dtype].append(parameter)
        self._vectors = [members[:: -(-len(members) // MAX_VECTORS)] for members in groups.values()]
        self._observe_vectors(groups.values())

    def _observe_vectors(self, groups: Iterable[Sequence[nn.Parameter]]) -> None:
        for members in groups:
            gradients = [parameter.grad for parameter in members if parameter.grad is not None]
            if gradients and type(gradients[0]) is not Tensor:
                gradients = [local_part(gradient) for gradient in gradients]
            if gradients:
                self._numbers.add(torch.cat(gradients))

    def _note(self) -> None:
        self._micro_batches += [self.micro_batch] * (len(self._numbers) - len(self._micro_batches))

    def first_nonfinite(self) -> int | None:
        """The first micro-batch with a non-finite value; ``None`` if all values are finite. One transfer for each other device."""
        numbers = zip(self._micro_batches, self._numbers.read(), strict=True)
        return next((micro_batch for micro_batch, value in numbers if not math.isfinite(value)), None)

    def mark(self, step: int) -> None:
        """Note on the device, without a read, whether a step is the first one with a non-finite value since :meth:`steps_since`."""
        is_bad = self._numbers.nonfinite()
        since = torch.full_like(is_bad, -1, dtype=torch.float32) if self._since is None else self._since
        self._since = torch.where((since < 0) & is_bad, float(step), since)
        self.forget()

    def steps_since(self, step: int) -> Tensor | None:
        """How many steps before this one the first marked one was, shape ``()``, 0 if there is none; ``None`` if no step was looked at."""
        since, self._since = self._since, None
        return None if since is None else torch.where(since < 0, 0.0, step - since)

    def forget(self) -> None:
        """Forget the step."""
        self._numbers.clear()
        self._micro_batches.clear()


class NonfiniteProbe:
    """Takes the largest magnitude of every module's input and output, and of the gradients that arrive at them.

    An input that is the very tensor that was the last output is not read again. An error in a hook is raised, or given to
    ``report``; from then on nothing of this micro-batch counts.
    """

    def __init__(self, sites: Sequence[ModuleSite], report: Callable[[Exception], None] | None = None) -> None:
        self._report = report
        self._sites = [site for site in sites if site.name != ROOT]
        self._hooks, self._tensor_hooks = HookSet(), HookSet()
        self._numbers = Magnitudes()
        self.is_open = False
        """Whether a micro-batch is being observed."""
        self._is_in_backward = False
        """Whether gradients count, which those of an inner ``autograd.grad`` do not."""
        self._running: list[tuple[int, int]] = []
        """The running modules, each with the call that entered it; the innermost last."""
        self._passes: list[Pass] = []
        self._weights: dict[str, int] = {}
        self._last: tuple[Tensor | None, int, int] = None, 0, UNKNOWN
        """The last tensor, its version, and its place."""

    # The step

    def attach(self) -> None:
        """Register the hooks."""
        for number, site in enumerate(self._sites):
            if next(site.module.children(), None) is None:
                self._hooks.add_forward(site.module, self._hook(self._observe_call, number), with_kwargs=True)
            else:
                self._hooks.add_forward_pre(site.module, self._hook(self._enter, number), with_kwargs=True)
                self._hooks.add_forward(site.module, self._hook(self._leave, number), with_kwargs=True)

    def _hook(self, observe: Callable[[int, Args, Kwargs, object], None], number: int) -> UncopiedHook:
        def hook(_module: nn.Module, args: Args, kwargs: Kwargs, output: object = None) -> None:
            # What checkpointing computes again was observed before.
            if self.is_open and not is_in_backward():
                try:
                    observe(number, args, kwargs, output)
                except Exception as error:
                    self.is_open = False
                    self._fail(error)

        return UncopiedHook(hook)

    def is_attached(self) -> bool:
        """Whether the hooks are on."""
        return len(self._hooks) > 0

    def begin_micro_batch(self) -> None:
        """A micro-batch begins."""
        self.end_micro_batch()
        self.is_open = True
        self._passes.append(Pass())

    def begin_backward(self, loss: Tensor) -> None:
        """The loss of the micro-batch exists; the gradients that follow are its gradients."""
        if self.is_open and not is_tracing():
            self._is_in_backward = True
            self._passes[-1].loss = self._numbers.add(loss)

    def end_backward(self) -> None:
        """The gradients of the loss exist."""
        self._is_in_backward = False

    def end_micro_batch(self) -> None:
        """The micro-batch is over."""
        self.is_open = self._is_in_backward = False
        self._running.clear()
        self._tensor_hooks.close()
        self._last = None, 0, UNKNOWN

    def observe_weights(self) -> None:
        """Observe the parameters, before the optimizer moves them."""
        if is_tracing():
            return
        self._weights = {
            f"{site.name}.{name}": self._numbers.add(_part_here(parameter))
            for site in self._sites
            for name, parameter in site.module._parameters.items()
            if parameter is not None and not is_lazy(parameter) and parameter.is_floating_point()
        }

    def forget(self) -> None:
        """The step is over."""
        self.end_micro_batch()
        self._numbers.clear()
        self._passes.clear()
        self._weights.clear()

    def close(self) -> None:
        """Remove every hook and release every tensor; a second call does nothing."""
        self._hooks.close()
        self.forget()

    # What the hooks observe

    def _enter(self, number: int, args: Args, kwargs: Kwargs, _output: object) -> None:
        """A module with submodules was called."""
        caller = self._caller()
        values = [*args, *kwargs.values()]
        value = next((one for one in values if isinstance(one, Tensor)), None)
        others = self._others(values, value, None)
        place, is_new = self._place(value)
        self._running.append((number, len(self._passes[-1].calls)))
        self._note(Call(number, caller, place, is_new, UNKNOWN, NO_CALL, others), value, None)

    def _leave(self, number: int, _args: Args, _kwargs: Kwargs, output: object) -> None:
        """A module with submodules has returned."""
        while self._running:
            one, entered = self._running.pop()
            if one == number:
                break  # others in between ended by an exception that was caught
        else:
            return
        for tensor, place in self._places(output):
            self._note(Call(number, self._caller(), UNKNOWN, is_new=False, output=place, entered=entered), None, tensor)

    def _observe_call(self, number: int, args: Args, kwargs: Kwargs, output: object) -> None:
        """A module without submodules was called, and has returned."""
        # An input that the module wrote into no longer exists; it was observed if it was an output.
        value = args[0] if args and isinstance(args[0], Tensor) and args[0] is not output else None
        place, is_new = self._place(value)
        others = self._others([*args, *kwargs.values()], value, output) if len(args) > 1 or value is None or kwargs else ()
        is_further = False
        for tensor, of_output in self._places(output):
            call = Call(number, self._caller(), place, is_new and not is_further, of_output, NO_CALL, others, is_further)
            self._note(call, value, tensor)
            is_further = True

    def _others(self, values: Sequence[object], value: Tensor | None, output: object) -> tuple[int, ...]:
        """Places of a call's inputs beside its first tensor, without those that it returned."""
        tensors = (tensor for _path, tensor in named_tensors(values) if tensor is not value and tensor is not output)
        return tuple(self._numbers.add(_part_here(tensor)) for tensor in map(plain, tensors) if tensor.is_floating_point())

    def _caller(self) -> int:
        return self._running[-1][0] if self._running else NO_CALL

    def _note(self, call: Call, value: Tensor | None, output: Tensor | None) -> None:
        calls = self._passes[-1].calls
        for tensor, of_input in ((value if call.is_new else None, True), (output, False)):
            if tensor is not None and requires_gradient(tensor):
                observe = functools.partial(self._observe_gradient, len(calls), of_input)
                self._tensor_hooks.add(register_gradient_hook(tensor, observe))
        calls.append(call)

    def _observe_gradient(self, call: int, of_input: bool, gradient: Tensor | None) -> None:
        # Returns nothing: what a tensor hook returns replaces the gradient.
        if gradient is not None and self._is_in_backward and not is_tracing():
            try:
                self._passes[-1].gradients.append(Gradient(call, of_input, self._numbers.add(_part_here(gradient))))
            except Exception as error:
                self._is_in_backward = False
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._report is None:
            raise error
        self._report(error)

    def _place(self, value: Tensor | None) -> tuple[int, bool]:
        """The place of an input or output, and whether it is not the last output, unchanged."""
        elements = None if value is None else plain(value)
        if elements is None or not elements.is_floating_point():
            return UNKNOWN, False
        tensor, version, place = self._last
        if value is tensor and elements._version == version:
            return place, False
        place = self._numbers.add(_part_here(elements))
        if not elements.is_inference():
            self._last = value, elements._version, place
        return place, True

    def _places(self, output: object) -> Iterator[tuple[Tensor, int]]:
        """The tensors of an output, each with its place."""
        for tensor in (output,) if isinstance(output, Tensor) else (tensor for _path, tensor in named_tensors(output)):
            if plain(tensor).is_floating_point():
                yield tensor, self._place(tensor)[0]  # a container may return the output of its last part

    # Afterwards

    def observed(self) -> Observed | None:
        """What was observed, if anything of it is not finite."""
        if all(map(math.isfinite, self._numbers.read())):
            return None
        if not self._weights:
            self.observe_weights()
        values = self._numbers.read()
        weights = {name: values[place] for name, place in self._weights.items() if place != UNKNOWN}
        return Observed(self._sites, list(self._passes), [*values, 0.0], weights)


def _part_here(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank, also of one that is still to be summed over ranks: a non-finite part makes the sum so."""
    return local_part(plain(tensor), is_reduced=False)
