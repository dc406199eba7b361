"""Observes the attention of modules, head by head, without a change to the model."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.model.compiled import CallHook, CompiledParts
from lightning_module_monitor.model.hooks import HookSet, UncopiedHook, as_torch_itself, is_capturing, is_in_backward, is_tracing
from lightning_module_monitor.model.names import ModuleSite
from lightning_module_monitor.probes.attention_calls import (
    AttentionCall,
    RawCall,
    Reader,
    read_multi_head_attention_forward,
    read_multihead_attention,
    read_scaled_dot_product_attention,
)
from lightning_module_monitor.probes.base import Probe, StepTools, WatchedModule, failing_alone
from lightning_module_monitor.statistics.attention_figures import MAX_QUERIES, attention_figures, query_stride

FIGURES = {kind.name: kind.name.removeprefix("attention_") for kind in KINDS.values() if kind.of_heads}
"""The field of :class:`AttentionFigures` for each kind."""

NEEDED_KEYS = {"attention_relative_entropy": 2}
"""The smallest number of visible keys for a kind, if it is more than 1: a single key always has all the weight."""

TENSOR_KINDS = ("activation", "activation_difference")
"""The kinds for which the tensors of heads are recorded."""

READERS: Mapping[Callable[..., Any], Reader] = {
    F.scaled_dot_product_attention: read_scaled_dot_product_attention,
    F.multi_head_attention_forward: read_multi_head_attention_forward,
}
"""The observed functions."""


class _HookedModule:
    """A module with hooks, and how attention within it is observed."""

    def __init__(self, module: nn.Module, watched: WatchedModule | None, compiled: CompiledParts) -> None:
        self.module = module
        self.watched = watched
        """``None`` for a compiled module, or a caller of compiled code, without a kind of heads: no call of its own is observed."""
        forward = getattr(self.module.forward, "__func__", None)
        defined_in = getattr(forward, "__module__", None) or ""  # None for generated code, such as torch.fx's
        self.is_without_mode = defined_in.startswith("torch.nn.modules.") or (
            module in compiled.outermost | compiled.callers | compiled.unhooked
        )
        """Whether the mode is off while it runs, because its forward is torch's own or runs compiled code.

        Only ``nn.MultiheadAttention`` of torch's own modules calls attention, and a mode may change the path that it takes, and the
        rounding. Compiled code would be compiled again."""
        self.is_attention = forward is nn.MultiheadAttention.forward
        """Whether its forward is that of ``nn.MultiheadAttention``; the hook observes its calls."""


class AttentionProbe(Probe):
    """Observes every call of attention within the recorded modules, head by head.

    A call belongs to the innermost recorded module that is running; hooks before and after each forward keep track of it. While a module
    runs that is not torch's own, a ``TorchFunctionMode`` is on, which gets the calls of ``F.scaled_dot_product_attention`` and
    ``F.multi_head_attention_forward`` under whatever name the model calls them. It is off whenever no recorded module runs.

    Args:
        with_heads: The modules with a kind of heads.
        tools: The tools of the step.
        is_requested: Whether a user's rule asks for a kind of heads, and not only a built-in rule.
    """

    def __init__(self, with_heads: Sequence[WatchedModule], tools: StepTools, *, is_requested: bool) -> None:
        self.is_requested = is_requested
        self.has_observed = False
        """Whether there was a call of attention."""
        compiled, by_module = tools.names.compiled, {recorded.site.module: recorded for recorded in with_heads}
        modules = dict.fromkeys((*by_module, *compiled.outermost, *compiled.callers)) if by_module else {}
        hooked = (_HookedModule(module, by_module.get(module), compiled) for module in modules)
        # A layer of torch's own without children has no attention within it.
        self._hooked = [each for each in hooked if each.is_attention or not each.is_without_mode or [*each.module.children()]]
        self._tools = tools
        self._accumulator = tools.accumulator
        self._unhooked = [_HookedModule(module, None, compiled) for module in compiled.unhooked] if by_module else []
        self._hooks = HookSet()
        self._calls: list[CallHook] = []
        self._running: list[_HookedModule] = []
        """The modules whose forward is running, outermost first."""
        self._mode = _AttentionMode(self, self._running)
        self._is_on = False
        self._num_above = 0
        """The number of modes above ours in torch's stack of modes when ours was removed."""
        self._last: tuple[ModuleSite, list[weakref.ref[Tensor]], bool] | None = None
        """The last call: its module, its arguments query and key, and whether the model reported it."""
        self._reference_calls: defaultdict[str, deque[dict[str, Tensor]]] = defaultdict(deque)
        """By site, calls of the reference that the model has not made yet: the tensors of heads by name."""

    def attach(self) -> None:
        """Register the hooks."""
        for hooked in self._hooked:
            enter, leave = UncopiedHook(functools.partial(self._enter, hooked)), UncopiedHook(functools.partial(self._leave, hooked))
            self._hooks.add_forward(hooked.module, enter, is_before=True)
            self._hooks.add_forward(hooked.module, leave, with_kwargs=True, always_call=True)
        for hooked in self._unhooked:
            self._calls.append(CallHook(hooked.module, functools.partial(self._enter, hooked), functools.partial(self._end, hooked)))

    def end_micro_batch(self) -> None:
        """Release the last call, and calls of the reference that the model has not made."""
        self._last = None
        self._reference_calls.clear()

    def close(self) -> None:
        """Remove every hook, and the mode, which stays on if Ctrl-C ends a forward."""
        self._hooks.close()
        while self._calls:
            self._calls[-1].remove()
            self._calls.pop()
        self._running.clear()
        self.end_micro_batch()
        self._switch()

    def observe(self, watched: WatchedModule, read: Reader, call: RawCall, *, is_reported: bool = False) -> None:
        """Observe a call of a module.

        Args:
            watched: The module.
            read: Splits the call into heads.
            call: The function's arguments and output.
            is_reported: Whether the model itself reports the call. A call that is both reported and intercepted counts once.
        """
        # A forward pass within a backward pass recomputes a checkpointed one, which was counted.
        if not self._tools.observes_calls() or is_in_backward() or is_tracing() or (self._tools.gate.may_be_captured and is_capturing()):
            return
        self.has_observed = True
        with failing_alone(functools.partial(self._fail, watched, call)), torch.no_grad():
            heads = as_torch_itself(read, call, not watched.streams.keys().isdisjoint(TENSOR_KINDS))
            if not self._is_repeated(watched, heads, is_reported):
                self._observe_figures(watched, heads)
                self._observe_heads(watched, heads)

    def keep_of_reference(self, watched: WatchedModule, call: RawCall, *, to_host: bool) -> None:
        """Keep the tensors of the heads of a call of the reference until the model makes the same call, if they are compared.

        Arguments as for :meth:`observe`; with ``to_host`` the tensors are kept in host memory.
        """
        if "activation_difference" not in watched.streams or self._tools.is_suspended():
            return
        with failing_alone(functools.partial(self._fail, watched, call)), torch.no_grad():
            tensors = self._tensors(watched, as_torch_itself(read_scaled_dot_product_attention, call, True))
            kept = {name: tensor.to("cpu", copy=True) if to_host else tensor.clone() for name, tensor in tensors}
            self._reference_calls[watched.site.name].append(kept)

    def _fail(self, watched: WatchedModule, call: RawCall, error: Exception) -> None:
        # E.g. tensors of a functorch transform.
        for kind, stream in watched.streams.items():
            if KINDS[kind].of_heads:
                self._accumulator.fail(stream, call.output, error)

    def _is_repeated(self, watched: WatchedModule, call: AttentionCall, is_reported: bool) -> bool:
        """Whether the last call was this call: first intercepted and then reported by the model, or the other way round."""
        last, self._last = self._last, None
        if not call.arguments:
            return False
        if last is not None:
            site, arguments, was_reported = last
            is_same = all(reference() is argument for reference, argument in zip(arguments, call.arguments, strict=True))
            if is_same and site is watched.site and was_reported != is_reported:
                return True
        self._last = watched.site, [weakref.ref(argument) for argument in call.arguments], is_reported
        return False

    def _observe_figures(self, watched: WatchedModule, call: AttentionCall) -> None:
        kinds = [kind for kind in FIGURES if kind in watched.streams]
        query, key = call.query, call.key
        if not kinds or not (query.numel() and key.numel()):
            return
        if query.is_meta:
            raise ValueError("it is on the meta device, and has no data")
        if query_stride(query.shape[0], query.shape[2]) > 1:
            self._tools.reporter.log_once(f"{watched.site.name}: evenly spaced query tokens are measured, as there are over {MAX_QUERIES}.")
        figures = attention_figures(query, key, call.masks, is_causal=call.is_causal, scale=call.scale)
        values = torch.stack([getattr(figures, FIGURES[kind]) for kind in kinds])
        counts = torch.stack([figures.visible >= NEEDED_KEYS.get(kind, 1) for kind in kinds])
        names = [self._tools.names.part_name(watched.site.name, f"head_{head}") for head in range(query.shape[1])]
        streams = [watched.streams[kind].at(name) for kind in kinds for name in names]
        # From (kinds, batch, heads, queries) to a row for each kind and head.
        rows, counting = (tensor.transpose(1, 2).reshape(len(streams), -1) for tensor in (values, counts))
        self._accumulator.observe_rows(streams, rows, counting)

    def _observe_heads(self, watched: WatchedModule, call: AttentionCall) -> None:
        """Observe the tensors of every head as activations, and their differences from the reference's."""
        activation, difference = (watched.streams.get(kind) for kind in TENSOR_KINDS)
        if activation is not None:
            self._accumulator.observe_all((activation.at(name), tensor) for name, tensor in self._tensors(watched, call))
        waiting = self._reference_calls[watched.site.name]
        if difference is not None and waiting:
            references = waiting.popleft()
            for name, tensor in self._tensors(watched, call):
                if name in references:
                    self._accumulator.observe_pair(difference.at(name), tensor, references[name].to(tensor.device))

    def _tensors(self, watched: WatchedModule, call: AttentionCall) -> Iterator[tuple[str, Tensor]]:
        tensors = {"query": call.query, "key": call.key, "value": call.value, "activation": call.output}
        for name, tensor in tensors.items():
            for head, head_tensor in enumerate(() if tensor is None else tensor.detach().unbind(1)):
                yield self._tools.names.part_name(watched.site.name, f"head_{head}.{name}"), head_tensor

    def _enter(self, hooked: _HookedModule, *_call: object) -> None:
        if not self._tools.observes_calls() or self._tools.gate.is_redirected(hooked.module):
            return
        if not self._running:
            self._num_above = 0
        self._running.append(hooked)
        self._switch()

    def _leave(self, hooked: _HookedModule, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """The forward of a module is over; its output is ``None`` after an exception."""
        self._end(hooked)
        if hooked.is_attention and hooked.watched is not None and output is not None:
            self.observe(hooked.watched, read_multihead_attention, RawCall((module, *args), kwargs, output))

    def _end(self, hooked: _HookedModule) -> None:
        # Ctrl-C has ended the modules after it in the list, whose hooks did not run.
        if hooked in self._running:
            while self._running.pop() is not hooked:
                pass
        self._switch()

    def _switch(self) -> None:
        """Turn the mode on or off, as the innermost running module requires."""
        is_wanted = bool(self._running) and not self._running[-1].is_without_mode
        if is_wanted and not self._is_on:
            # The flag is set before the mode is on, and cleared after it is off: after Ctrl-C in between, `close` turns the mode off.
            self._is_on = True
            # The mode returns to its former position, because the model removes its own modes from the top of the stack.
            modes = _get_current_function_mode_stack()
            above = modes[max(len(modes) - self._num_above, 0) :]
            for mode in reversed(above):
                _pop(mode)
            for mode in (self._mode, *above):
                _push(mode)
        elif self._is_on and not is_wanted:
            self._num_above = _remove(self._mode)
            self._is_on = False


class _AttentionMode(TorchFunctionMode):
    """Gets every call of a torch function, and passes calls of attention to the probe, as calls of the innermost running module."""

    def __init__(self, probe: AttentionProbe, running: Sequence[_HookedModule]) -> None:
        super().__init__()
        self._probe = probe
        self._running = running

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return output
        read = READERS.get(func)
        if read is not None and self._running and (watched := self._running[-1].watched) is not None:
            self._probe.observe(watched, read, RawCall(args, kwargs, output))
        return output


def _remove(mode: TorchFunctionMode) -> int:
    """Remove a mode from torch's stack of modes, at any position; returns the number of modes above it."""
    above: list[TorchFunctionMode] = []
    try:
        for top in reversed(_get_current_function_mode_stack()):
            _pop(top)
            if top is mode:
                break
            above.append(top)
    finally:
        for other in reversed(above):
            _push(other)
    return len(above)


def _push(mode: TorchFunctionMode) -> None:
    """Put a mode on torch's stack, without code of its class."""
    TorchFunctionMode.__enter__(mode)


def _pop(mode: TorchFunctionMode) -> None:
    """Take the topmost mode off torch's stack, without code of its class."""
    TorchFunctionMode.__exit__(mode, None, None, None)
