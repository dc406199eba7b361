"""All that tells who made the first value that is not finite: numbers of outputs, of inputs that are none, and of their gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lightning_module_monitor.distributed.shards import local_part
from lightning_module_monitor.model.hooks import ForwardHook, HookSet, is_in_backward, is_tracing
from lightning_module_monitor.model.names import ROOT, ModuleSite
from lightning_module_monitor.model.outputs import named_tensors
from lightning_module_monitor.statistics.magnitudes import UNKNOWN, Magnitudes

NOBODY = -1
"""Stands for the caller of what the LightningModule itself calls."""


class Call(NamedTuple):
    """A moment of the forward pass: a module was entered, or has returned, or, where nothing else happens within, both."""

    site: int
    """Number of the module."""
    caller: int
    """Number of the innermost module that was running: whose own code has called it."""
    input: int
    """Place of the number of its first tensor."""
    is_new: bool
    """Whether that tensor is not the output that came last, untouched: then code has made it."""
    output: int
    entered: int
    """Which call has entered it; ``NOBODY`` for one that does."""
    others: tuple[int, ...] = ()
    """Places of the numbers of what it was given beside its first tensor."""
    is_further: bool = False
    """Whether it is but another output of the call before, of a module that has no others in it."""


class Gradient(NamedTuple):
    """A gradient that has arrived, in the order in which they do."""

    call: int
    """The call that it is about."""
    of_input: bool
    """Whether it is of the call's input, which was nobody's output; else of its output."""
    place: int
    """Of its number."""


@dataclass
class Pass:
    """A micro-batch: its forward pass, and its backward pass."""

    calls: list[Call] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    loss: int = UNKNOWN
    """Place of the number of the loss."""


@dataclass(frozen=True)
class Seen:
    """What one rank saw in a step in which something was not finite, on the host."""

    sites: Sequence[ModuleSite]
    """The modules, by number."""
    passes: Sequence[Pass]
    """The micro-batches."""
    values: Sequence[float]
    """The largest magnitudes, by place. One more, 0, stands at the end, for what there is not."""
    weights: Mapping[str, float]
    """Largest magnitude of every parameter by name, as it was in the step."""

    def is_bad(self, place: int) -> bool:
        """Whether what has its number at a place is not finite."""
        return not math.isfinite(self.values[place])


class NonfiniteProbe:
    """Looks at every module's input and output, and at the gradients that arrive at them, with one number each.

    An input that is the very tensor which was the last output is not looked at again.

    Args:
        sites: The modules.
        report: Told of an error in a hook; from then on nothing of this micro-batch counts.
    """

    def __init__(self, sites: Sequence[ModuleSite], report: Callable[[Exception], None]) -> None:
        self.report = report
        self._sites = [site for site in sites if site.name != ROOT]
        self._hooks, self._tensor_hooks = HookSet(), HookSet()
        self._numbers = Magnitudes()
        self.is_open = False
        """Whether what happens now counts."""
        self._is_in_backward = False
        """Whether gradients count, which those of an inner ``autograd.grad`` do not."""
        self._running: list[tuple[int, int]] = []
        """The modules that run, each with the call that entered it; the innermost last."""
        self._passes: list[Pass] = []
        self._weights: dict[str, int] = {}
        self._last: tuple[Tensor | None, int, int] = None, 0, UNKNOWN
        """The tensor that came last, its version, and the place of its number."""

    # The step

    def attach(self) -> None:
        """Put the hooks on."""
        for number, site in enumerate(self._sites):
            if next(site.module.children(), None) is None:
                self._hooks.add_forward(site.module, _LeafHook(self, number), with_kwargs=True)
            else:
                self._hooks.add(site.module.register_forward_pre_hook(_EntryHook(self, number), with_kwargs=True))
                self._hooks.add_forward(site.module, _ExitHook(self, number), with_kwargs=True)

    def is_attached(self) -> bool:
        """Whether the hooks are on."""
        return len(self._hooks) > 0

    def begin_micro_batch(self) -> None:
        """What happens from now on counts, and is of another micro-batch."""
        self.end_micro_batch()
        self.is_open = True
        self._passes.append(Pass())

    def begin_backward(self, loss: Tensor) -> None:
        """The loss of a micro-batch is there, and gradients are those of it."""
        if self.is_open and not is_tracing():
            self._is_in_backward = True
            self._passes[-1].loss = self._numbers.add(loss)

    def end_backward(self) -> None:
        """The gradients of the loss are there."""
        self._is_in_backward = False

    def end_micro_batch(self) -> None:
        """What happens from now on does not count."""
        self.is_open = self._is_in_backward = False
        self._running.clear()
        self._tensor_hooks.close()
        self._last = None, 0, UNKNOWN

    def see_weights(self) -> None:
        """Look at the parameters, before the optimizer moves them."""
        if is_tracing():
            return
        self._weights = {
            f"{site.name}.{name}": self._numbers.add(_part_here(parameter))
            for site in self._sites
            for name, parameter in site.module._parameters.items()
            if parameter is not None and not isinstance(parameter, UninitializedParameter) and parameter.is_floating_point()
        }

    def forget(self) -> None:
        """The step is over."""
        self.end_micro_batch()
        self._numbers.clear()
        self._passes.clear()
        self._weights.clear()

    def close(self) -> None:
        """Take every hook off and forget every tensor; a second call does no harm."""
        self._hooks.close()
        self.forget()

    # What the hooks see

    def enter(self, number: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """A module that has others in it was called."""
        caller, calls = self._caller(), self._passes[-1].calls
        values = [*args, *kwargs.values()]
        value = next((one for one in values if isinstance(one, Tensor)), None)
        others = self._others(values, value, None)
        place, is_new = self._place(value)
        self._running.append((number, len(calls)))
        self._note(Call(number, caller, place, is_new, UNKNOWN, NOBODY, others), value, None)

    def leave(self, number: int, output: object) -> None:
        """It has returned."""
        while self._running:
            one, entered = self._running.pop()
            if one == number:
                break  # others in between have ended by an exception that somebody caught
        else:
            return
        for tensor, place in self._places(output):
            self._note(Call(number, self._caller(), UNKNOWN, is_new=False, output=place, entered=entered), None, tensor)

    def see_call(self, number: int, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        """A module that has no others in it was called, and has returned."""
        # What it has written into is gone, and was looked at if it was somebody's output.
        value = args[0] if args and isinstance(args[0], Tensor) and args[0] is not output else None
        place, is_new = self._place(value)
        others = self._others([*args, *kwargs.values()], value, output) if len(args) > 1 or value is None or kwargs else ()
        for number_of_output, (tensor, of_output) in enumerate(self._places(output)):
            is_further = number_of_output > 0
            self._note(Call(number, self._caller(), place, is_new and not is_further, of_output, NOBODY, others, is_further), value, tensor)

    def _others(self, values: Sequence[object], value: Tensor | None, output: object) -> tuple[int, ...]:
        """The places of what a call was given beside its first tensor, and has not returned."""
        tensors = (tensor for _path, tensor in named_tensors(values) if tensor is not value and tensor is not output)
        return tuple(self._numbers.add(_part_here(tensor)) for tensor in tensors if tensor.is_floating_point())

    def _caller(self) -> int:
        return self._running[-1][0] if self._running else NOBODY

    def _note(self, call: Call, value: Tensor | None, output: Tensor | None) -> None:
        calls = self._passes[-1].calls
        for tensor, of_input in ((value if call.is_new else None, True), (output, False)):
            if tensor is not None and tensor.requires_grad:
                self._tensor_hooks.add(tensor.register_hook(functools.partial(self._see_gradient, len(calls), of_input)))
        calls.append(call)

    def _see_gradient(self, call: int, of_input: bool, gradient: Tensor | None) -> None:
        # Returns nothing: what a tensor hook returns replaces the gradient.
        if gradient is not None and self._is_in_backward and not is_tracing():
            try:
                self._passes[-1].gradients.append(Gradient(call, of_input, self._numbers.add(_part_here(gradient))))
            except Exception as error:
                self._is_in_backward = False
                self.report(error)

    def _place(self, value: Tensor | None) -> tuple[int, bool]:
        """The place of an input's number, and whether it is nobody's output."""
        if value is None or not value.is_floating_point():
            return UNKNOWN, False
        tensor, version, place = self._last
        if value is tensor and value._version == version:
            return place, False
        return self._add(value), True

    def _places(self, output: object) -> Iterator[tuple[Tensor, int]]:
        """The tensors of an output, each with the place of its number."""
        if isinstance(output, Tensor) and output is self._last[0] and output._version == self._last[1]:
            yield output, self._last[2]  # a container returns what its last part has returned
            return
        for tensor in (output,) if isinstance(output, Tensor) else (tensor for _path, tensor in named_tensors(output)):
            if tensor.is_floating_point():
                yield tensor, self._add(tensor)

    def _add(self, tensor: Tensor) -> int:
        place = self._numbers.add(_part_here(tensor))
        if not tensor.is_inference():
            self._last = tensor, tensor._version, place
        return place

    # Afterwards

    def seen(self) -> Seen | None:
        """What was seen, if anything of it is not finite: read by one transfer."""
        if not self._numbers.may_have_nonfinite():
            return None
        if not self._weights:
            self.see_weights()
        values = self._numbers.read()
        if all(map(math.isfinite, values)):
            return None
        weights = {name: values[place] for name, place in self._weights.items() if place != UNKNOWN}
        return Seen(self._sites, list(self._passes), [*values, 0.0], weights)


def _part_here(tensor: Tensor) -> Tensor:
    """What there is on this rank; also of what is still to be added up over ranks: what is not finite in a part is not in the sum."""
    return local_part(tensor, is_reduced=False)


class _Hook(ForwardHook):
    """Called when a module is called or has returned. Returns nothing: what a hook returns replaces the arguments, or the output."""

    def __init__(self, probe: NonfiniteProbe, number: int) -> None:
        self._probe = probe
        self._number = number

    def see(self, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object = None) -> None:
        """Look at the call, unless it was looked at before; an error ends that for this micro-batch."""
        # What checkpointing computes again was looked at before.
        if self._probe.is_open and not is_in_backward():
            try:
                self.look(args, kwargs, output)
            except Exception as error:
                self._probe.is_open = False
                self._probe.report(error)

    def look(self, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        """Look at the call; where the module was entered, there is no output yet."""
        raise NotImplementedError


class _LeafHook(_Hook):
    """Of a module that has no others in it, when it has returned."""

    def look(self, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        self._probe.see_call(self._number, args, kwargs, output)


class _EntryHook(_Hook):
    """Of a module that has others in it, when it is called."""

    def look(self, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        self._probe.enter(self._number, args, kwargs)


class _ExitHook(_Hook):
    """Of such a module, when it has returned."""

    def look(self, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        self._probe.leave(self._number, output)
