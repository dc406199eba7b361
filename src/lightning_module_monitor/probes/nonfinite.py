"""Largest magnitudes that show whether a step has a non-finite value, and which module produced it.

A flag of each step covers losses and gradients. The module is found from outputs, further inputs, and the gradients of both.
Attention that masks all keys of a query is found by itself: its softmax divides zero by zero.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

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
from lightning_module_monitor.probes.base import failing_alone
from lightning_module_monitor.statistics.magnitudes import UNKNOWN, Magnitudes

NO_CALL = -1
"""No event; the caller of modules that the LightningModule itself calls."""

MAX_VECTORS = 16
"""Limit of gradients that are observed lightly, evenly spaced: a non-finite gradient reaches all earlier layers."""

Args = tuple[object, ...]
Kwargs = dict[str, object]


class Call(NamedTuple):
    """An event of the forward pass: a module with submodules was entered or has returned, or a module without submodules was called."""

    site: int
    """Index of the module."""
    caller: int
    """The event in which the innermost running module was entered, whose code called it."""
    input: int
    """Index of the largest magnitude of its first input that is a tensor; ``UNKNOWN`` without one."""
    is_new: bool
    """Whether that tensor was made by code between modules: it is not the last output, or that was changed."""
    output: int
    """Index of the largest magnitude of its output, or of one of its outputs; ``UNKNOWN`` while it runs."""
    entered: int
    """The event in which the module was entered; ``NO_CALL`` if it is this event."""
    others: tuple[int, ...] = ()
    """Indices of the largest magnitudes of its further inputs."""


class Gradient(NamedTuple):
    """A gradient that arrived."""

    call: int
    """The call whose input or output has the gradient."""
    at_input: bool
    """Whether it is the gradient of the call's input, which no module returned; else of its output."""
    magnitude: int
    """Index of its largest magnitude."""


@dataclass
class Pass:
    """The forward and the backward pass of a micro-batch."""

    calls: list[Call] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    loss: int = UNKNOWN
    """Index of the loss."""


@dataclass(frozen=True)
class ObservedPasses:
    """Observations of a rank in a step with a non-finite value, on the host."""

    sites: Sequence[ModuleSite]
    """The modules, by the index in a call."""
    passes: Sequence[Pass]
    """The micro-batches."""
    values: Sequence[float]
    """The largest magnitudes by index, and a 0 at the end for the index ``UNKNOWN``."""
    weights: Mapping[str, float]
    """Largest magnitude of every parameter before the update, by name."""


class FiniteStep:
    """Flags a step with a non-finite value by the largest magnitudes of losses and gradients, without hooks.

    A non-finite value in the forward pass makes the loss non-finite; in the backward pass it reaches the gradients of earlier layers. The
    gradient of a bias is the sum of the gradients at the module's output: it shows as much as that of the weight, and is smaller.
    """

    def __init__(self, sites: Sequence[ModuleSite]) -> None:
        self._owners = [site.module for site in sites if site.module._parameters]
        self._numbers = Magnitudes()
        self._micro_batches: list[int] = []
        """The micro-batch of each number."""
        self.micro_batch = 0
        """The running micro-batch."""
        self._vectors: list[list[nn.Parameter]] | None = None
        """The biases and normalization weights to observe lightly, in groups; ``None`` before :meth:`observe_gradients`."""
        self._since: Tensor | None = None
        """The first marked step with a non-finite value, shape ``()``, on the device of the loss; -1 without one."""

    def observe_loss(self, loss: Tensor) -> None:
        """Observe a loss."""
        if not is_tracing():
            self._add(loss)

    @torch.no_grad()
    def observe_gradients(self, *, lightly: bool = False) -> None:
        """Observe the gradients of a backward pass; ``lightly``: only of some biases and normalization weights, by a few operations."""
        if is_tracing():
            return
        groups: Iterable[Sequence[nn.Parameter]] = self._all_vectors() if not lightly or self._vectors is None else self._vectors
        for members in groups:
            gradients = [parameter.grad for parameter in members if parameter.grad is not None]
            if gradients and type(gradients[0]) is not Tensor:
                gradients = [local_part(gradient) for gradient in gradients]
            if gradients:
                self._add(torch.cat(gradients))

    def _all_vectors(self) -> Iterable[list[nn.Parameter]]:
        """Observe the gradients of all other parameters, and return the biases and normalization weights, in groups."""
        vectors = []
        for owner in self._owners:
            parameters = owner._parameters
            bias = parameters.get("bias")
            is_shown_by_bias = bias is not None and bias.requires_grad and parameters.keys() == {"weight", "bias"}
            for parameter in (bias,) if is_shown_by_bias else parameters.values():
                if parameter is None or is_lazy(parameter):
                    continue
                if parameter.dim() == 1 and parameter.layout is torch.strided:
                    vectors.append(parameter)
                elif parameter.grad is not None:
                    self._add(local_part(parameter.grad))
        # By device and dtype: reading many vectors at once costs as much as reading a single vector.
        groups: defaultdict[object, list[nn.Parameter]] = defaultdict(list)
        for parameter in vectors:
            groups[type(parameter), parameter.device, parameter.dtype].append(parameter)
        self._vectors = [members[:: -(-len(members) // MAX_VECTORS)] for members in groups.values()]
        return groups.values()

    def _add(self, tensor: Tensor) -> None:
        if self._numbers.add(tensor) != UNKNOWN:
            self._micro_batches.append(self.micro_batch)

    def first_nonfinite(self) -> int | None:
        """The first micro-batch with a non-finite value, ``None`` if all are finite; one transfer from each device."""
        numbers = zip(self._micro_batches, self._numbers.read(), strict=True)
        return next((micro_batch for micro_batch, value in numbers if not math.isfinite(value)), None)

    def mark(self, step: int) -> None:
        """Record on the device, without a host read, whether this is the first step with a non-finite value."""
        is_bad = self._numbers.nonfinite()
        since = torch.full_like(is_bad, -1, dtype=torch.float32) if self._since is None else self._since
        self._since = torch.where((since < 0) & is_bad, float(step), since)
        self.forget()

    def steps_since(self, step: int) -> Tensor | None:
        """Number of steps since the first non-finite value, shape ``()``, 0 without one; ``None`` if no step was marked."""
        since, self._since = self._since, None
        return None if since is None else torch.where(since < 0, 0.0, step - since)

    def forget(self) -> None:
        """Release the numbers of the step."""
        self._numbers = Magnitudes()
        self._micro_batches.clear()


class NonfiniteProbe:
    """Takes the largest magnitudes of every module's inputs and outputs, and of the gradients that arrive at them.

    An input that is the last output, unchanged, is not read again. An error in a hook is passed to ``report``, and ends the observation
    of the micro-batch.
    """

    def __init__(self, sites: Sequence[ModuleSite], report: Callable[[Exception], None]) -> None:
        self._report = report
        self._owners = {"" if site.name == ROOT else f"{site.name}.": site.module for site in sites}
        """The modules that have parameters, by the beginning of the parameters' names."""
        self._sites = [site for site in sites if site.name != ROOT]
        self._hooks, self._tensor_hooks = HookSet(), HookSet()
        self._numbers = Magnitudes()
        self._is_open = False
        """Whether a micro-batch is being observed."""
        self._is_in_backward = False
        """Whether gradients are those of the loss, and not of an inner ``autograd.grad``."""
        self._running: list[int] = []
        """The events in which the running modules were entered; the innermost last."""
        self._passes: list[Pass] = []
        self._weights: dict[str, int] = {}
        self._last: tuple[Tensor | None, int, int] = None, 0, UNKNOWN
        """The last tensor, its version, and its index."""

    # The step

    def attach(self) -> None:
        """Register the hooks, unless they are on."""
        if len(self._hooks):
            return
        for index, site in enumerate(self._sites):
            if next(site.module.children(), None) is None:
                self._hooks.add_forward(site.module, self._hook(self._observe_call, index), with_kwargs=True)
            else:
                self._hooks.add_forward(site.module, self._hook(self._enter, index), with_kwargs=True, is_before=True)
                self._hooks.add_forward(site.module, self._hook(self._leave, index), with_kwargs=True)

    def _hook(self, observe: Callable[[int, Args, Kwargs, object], None], site: int) -> UncopiedHook:
        def hook(_module: nn.Module, args: Args, kwargs: Kwargs, output: object = None) -> None:
            # A checkpointed module that is recomputed was observed before.
            if self._is_open and not is_in_backward():
                with failing_alone(self._fail):
                    observe(site, args, kwargs, output)

        return UncopiedHook(hook)

    def _fail(self, error: Exception) -> None:
        self._is_open = self._is_in_backward = False
        self._report(error)

    def begin_micro_batch(self) -> None:
        """A micro-batch begins."""
        self.end_micro_batch()
        self._is_open = True
        self._passes.append(Pass())

    def begin_backward(self, loss: Tensor) -> None:
        """The loss of the micro-batch exists; the gradients that follow are its own."""
        if self._is_open and not is_tracing():
            self._is_in_backward = True
            self._passes[-1].loss = self._numbers.add(loss)

    def end_backward(self) -> None:
        """The gradients of the loss exist."""
        self._is_in_backward = False

    def end_micro_batch(self) -> None:
        """The micro-batch is over."""
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
            if parameter is not None and not is_lazy(parameter) and parameter.is_floating_point()
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

    def _enter(self, site: int, args: Args, kwargs: Kwargs, _output: object) -> None:
        """A module with submodules was called."""
        value, index, is_new, others = self._inputs(args, kwargs, None)
        call = Call(site, self._caller(), index, is_new, UNKNOWN, NO_CALL, others)
        self._running.append(len(self._passes[-1].calls))
        self._add_call(call, value, None)

    def _leave(self, site: int, _args: Args, _kwargs: Kwargs, output: object) -> None:
        """A module with submodules has returned."""
        calls = self._passes[-1].calls
        while self._running:
            entered = self._running.pop()
            if calls[entered].site == site:
                break  # modules within it have ended by an exception that was caught
        else:
            return
        for tensor, index in self._outputs(output):
            self._add_call(Call(site, self._caller(), UNKNOWN, is_new=False, output=index, entered=entered), None, tensor)

    def _observe_call(self, site: int, args: Args, kwargs: Kwargs, output: object) -> None:
        """A module without submodules was called, and has returned."""
        value, index, is_new, others = self._inputs(args, kwargs, output)
        for tensor, output_index in self._outputs(output):
            self._add_call(Call(site, self._caller(), index, is_new, output_index, NO_CALL, others), value, tensor)
            is_new = False  # several outputs are several calls, whose input has one gradient

    def _inputs(self, args: Args, kwargs: Kwargs, output: object) -> tuple[Tensor | None, int, bool, tuple[int, ...]]:
        """The first input that is a tensor, its index, and whether it is new; and the indices of all further tensors."""
        # An input that the module overwrote no longer exists; it was observed if it was an output.
        values = [value for value in (*args, *kwargs.values()) if value is not output]
        first = next((value for value in values if isinstance(value, Tensor)), None)
        tensors = (plain(tensor) for _path, tensor in named_tensors(values) if tensor is not first and tensor is not output)
        others = tuple(self._numbers.add(_local_elements(tensor)) for tensor in tensors if tensor.is_floating_point())
        return first, *self._index(first), others

    def _caller(self) -> int:
        return self._running[-1] if self._running else NO_CALL

    def _add_call(self, call: Call, value: Tensor | None, output: Tensor | None) -> None:
        calls = self._passes[-1].calls
        for tensor, at_input in ((value if call.is_new else None, True), (output, False)):
            if tensor is not None and requires_gradient(tensor):
                observe = functools.partial(self._observe_gradient, len(calls), at_input)
                self._tensor_hooks.add(register_gradient_hook(tensor, observe))
        calls.append(call)

    def _observe_gradient(self, call: int, at_input: bool, gradient: Tensor | None) -> None:
        # It returns nothing, because a value returned by a tensor hook replaces the gradient.
        if gradient is not None and self._is_in_backward and not is_tracing() and not (gradient.is_cuda and is_capturing()):
            with failing_alone(self._fail):
                self._passes[-1].gradients.append(Gradient(call, at_input, self._numbers.add(_local_elements(gradient))))

    def _index(self, value: Tensor | None) -> tuple[int, bool]:
        """The index of an input or output, and whether it is not the last output, unchanged."""
        elements = None if value is None else plain(value)
        if elements is None or not elements.is_floating_point():
            return UNKNOWN, False
        tensor, version, index = self._last
        if value is tensor and elements._version == version:
            return index, False
        index = self._numbers.add(_local_elements(elements))
        if not elements.is_inference():
            self._last = value, elements._version, index
        return index, True

    def _outputs(self, output: object) -> Iterator[tuple[Tensor, int]]:
        """The tensors of an output, each with its index."""
        for _path, tensor in named_tensors(output):
            if plain(tensor).is_floating_point():
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
        return ObservedPasses(self._sites, list(self._passes), [*values, 0.0], weights)


def _local_elements(tensor: Tensor) -> Tensor:
    """The elements of a tensor on this rank, even if ranks still sum it: a non-finite part makes the sum non-finite."""
    return local_part(plain(tensor), is_reduced=False)


_SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)
_MASKS = {F.scaled_dot_product_attention: ("attn_mask",), F.multi_head_attention_forward: ("attn_mask", "key_padding_mask")}


class MaskedRows(TorchFunctionMode):
    """Reads the results of softmax and attention on the host, in a step that is known to have a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.is_found = False
        """Whether a result was NaN because all keys of a row were masked."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  # the result of the function
        result = func(*args, **(kwargs or {}))
        if not self.is_found and (func in _SOFTMAX or func in _MASKS):
            output = result[0] if isinstance(result, tuple) else result
            if isinstance(output, Tensor) and bool(output.isnan().any()):
                self.is_found = self._has_masked_row(func, args, kwargs or {})
        return result

    def _has_masked_row(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if func in _SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            return bool((args[0] == -torch.inf).all(dim=dim).any())
        is_sdpa = func is F.scaled_dot_product_attention
        positional = args[3] if is_sdpa and len(args) > 3 else None
        masks = [mask for name in _MASKS[func] if isinstance(mask := kwargs.get(name, positional), Tensor)]
        # A boolean mask is true for the visible keys of scaled dot product attention, and for the hidden ones of the other function.
        hidden = [(~mask if is_sdpa else mask) if mask.dtype is torch.bool else mask == -torch.inf for mask in masks]
        return any(bool(keys.all(dim=-1).any()) for keys in hidden)
