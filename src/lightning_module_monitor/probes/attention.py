"""Attention of the recorded modules, head by head, without a change to the model."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from lightning_module_monitor.model.compiled import CallHook, CompiledParts
from lightning_module_monitor.model.hooks import HookSet, UncopiedHook, as_torch_itself, is_in_backward, is_tracing
from lightning_module_monitor.model.names import ModuleSite
from lightning_module_monitor.probes.attention_calls import (
    AttentionCall,
    RawCall,
    Reader,
    read_multi_head_attention_forward,
    read_multihead_attention,
    read_scaled_dot_product_attention,
)
from lightning_module_monitor.probes.base import Probe, StepTools, Watched, WatchedModule
from lightning_module_monitor.probes.reporting import failing_alone
from lightning_module_monitor.record import KINDS
from lightning_module_monitor.statistics.attention import MAX_QUERIES, attention_figures, stride_of

FIGURES = {f"attention_{figure}": figure for figure in ("entropy", "relative_entropy", "max_logit", "sink")}
"""The field of :class:`AttentionFigures` that each kind records."""

NEEDED_KEYS = {"attention_relative_entropy": 2}
"""The number of keys that a token must attend to, where it is not one: with a single key there is nothing to choose."""

KINDS_OF_TENSORS = ("activation", "activation_difference")
"""The kinds that record the tensors of heads."""

READERS: Mapping[Callable[..., Any], Reader] = {
    F.scaled_dot_product_attention: read_scaled_dot_product_attention,
    F.multi_head_attention_forward: read_multi_head_attention_forward,
}
"""The functions whose calls are observed."""


class _HookedModule:
    """A recorded module, and how attention within it is observed."""

    def __init__(self, module: nn.Module, watched: WatchedModule | None, compiled: CompiledParts) -> None:
        self.module = module
        self.watched = watched
        """``None`` for a compiled module of which no kind of heads is recorded: nothing within it is observed."""
        forward = getattr(self.module.forward, "__func__", None)
        defined_in = getattr(forward, "__module__", None) or ""  # None: generated code, as that of torch.fx
        self.is_without_mode = defined_in.startswith("torch.nn.modules.") or (
            module in compiled.outermost | compiled.callers | compiled.unhooked
        )
        """Whether no mode is on while it runs: its forward is torch's own, or runs compiled code.

        The former calls attention only in ``nn.MultiheadAttention``, and may take another path, with other rounding, where a mode is on.
        The latter would be compiled again."""
        self.is_attention = forward is nn.MultiheadAttention.forward
        """Whether its forward is that of ``nn.MultiheadAttention``, which the hook observes."""


class AttentionProbe(Probe):
    """Observes every call of attention within the recorded modules, head by head.

    A call belongs to the innermost recorded module that is running, which hooks before and after each module's forward find. While a
    module runs that is not torch's own, a ``TorchFunctionMode`` is on, which gets the calls of ``F.scaled_dot_product_attention`` and
    ``F.multi_head_attention_forward`` under whatever name the model calls them. It is off whenever no recorded module runs.

    Of the modules ``with_heads`` a kind of heads is recorded; ``is_requested``: by a rule of the user's, and not only by a built-in one.
    """

    def __init__(
        self,
        watched: Sequence[WatchedModule],
        with_heads: Sequence[WatchedModule],
        tools: StepTools,
        *,
        is_requested: bool,
    ) -> None:
        self.is_requested = is_requested
        self.has_observed = False
        """Whether there was any call of attention."""
        self._all = watched
        compiled, by_module = tools.names.compiled, {one.site.module: one for one in with_heads}
        modules = dict.fromkeys((*by_module, *compiled.outermost)) if by_module else {}
        hooked = (_HookedModule(module, by_module.get(module), compiled) for module in modules)
        # A layer of torch's own without children has no attention within it.
        self._hooked = [
            one for one in hooked if one.is_attention or not one.is_without_mode or next(one.module.children(), None) is not None
        ]
        self._tools = tools
        self._accumulator = tools.accumulator
        self._unhooked = [_HookedModule(one, None, compiled) for one in compiled.unhooked] if by_module else []
        self._hooks = HookSet()
        self._calls: list[CallHook] = []
        self._mode = _AttentionMode(self)
        self._running: list[_HookedModule] = []
        """The recorded modules whose forward is running, outermost first."""
        self._is_on = False
        self._num_above = 0
        """The number of modes above ours in torch's stack of modes when ours was removed."""
        self._last: tuple[ModuleSite, list[weakref.ref[Tensor]], bool] | None = None
        """The last call: its module, its query and key, and whether the model reported it."""
        self._of_reference: defaultdict[str, deque[dict[str, Tensor]]] = defaultdict(deque)
        """By site, the tensors of heads by name, of calls of the reference that the model has not made yet."""

    def attach(self) -> None:
        """Register the hooks."""
        for one in self._hooked:
            enter, leave = UncopiedHook(functools.partial(self._enter, one)), UncopiedHook(functools.partial(self._leave, one))
            self._hooks.add_forward_pre(one.module, enter)
            self._hooks.add_forward(one.module, leave, with_kwargs=True, always_call=True)
        for one in self._unhooked:
            self._calls.append(CallHook(one.module, functools.partial(self._enter, one), functools.partial(self._end, one)))

    def end_micro_batch(self) -> None:
        """Forget the last call, and calls of the reference that the model has not made."""
        self._last = None
        self._of_reference.clear()

    def close(self) -> None:
        """Remove every hook, and the mode, which Ctrl-C in a forward leaves on."""
        self._hooks.close()
        while self._calls:
            self._calls[-1].remove()
            self._calls.pop()
        self._running.clear()
        self.end_micro_batch()
        self._switch()

    def watched(self, site: ModuleSite) -> WatchedModule:
        """What is recorded of a module, of all kinds."""
        return next((one for one in self._all if one.site is site), Watched(site, {}))

    def observe(self, watched: WatchedModule, read: Reader, call: RawCall, *, is_reported: bool = False) -> None:
        """Observe a call of a module.

        Args:
            watched: The module.
            read: Splits the call into heads.
            call: The function's arguments and output.
            is_reported: Whether the model itself reports the call; a call that is reported and found counts once.
        """
        # A forward pass within a backward pass is the recomputation of a checkpointed one, which was counted.
        if not self._tools.is_observed() or is_in_backward() or is_tracing():
            return
        self.has_observed = True
        with failing_alone(functools.partial(self._fail, watched, call)), torch.no_grad():
            heads = as_torch_itself(read, call, not watched.streams.keys().isdisjoint(KINDS_OF_TENSORS))
            if not self._is_repeated(watched, heads, is_reported):
                self._observe_figures(watched, heads)
                self._observe_heads(watched, heads)

    def keep_of_reference(self, watched: WatchedModule, read: Reader, call: RawCall, *, to_host: bool) -> None:
        """Keep the tensors of the heads of a call of the reference until the model makes it, if they are compared.

        Arguments as :meth:`observe` takes them; with ``to_host`` they are kept in the memory of the host.
        """
        if "activation_difference" not in watched.streams or self._tools.is_suspended():
            return
        with failing_alone(functools.partial(self._fail, watched, call)), torch.no_grad():
            tensors = self._tensors(watched, as_torch_itself(read, call, True))
            kept = {name: one.to("cpu", copy=True) if to_host else one.clone() for name, one in tensors}
            self._of_reference[watched.site.name].append(kept)

    def observe_innermost(self, read: Reader, call: RawCall) -> None:
        """Observe a call within the innermost recorded module that is running."""
        if self._running and (watched := self._running[-1].watched) is not None:
            self.observe(watched, read, call)

    def _fail(self, watched: WatchedModule, call: RawCall, error: Exception) -> None:
        # E.g. tensors of a functorch transform.
        for kind, stream in watched.streams.items():
            if KINDS[kind].of_heads:
                self._accumulator.fail(stream, call.output, error)

    def _is_repeated(self, watched: WatchedModule, call: AttentionCall, is_reported: bool) -> bool:
        """Whether the last call was this one: found first and then reported by the model, or the other way round."""
        last, self._last = self._last, None
        if not call.given:
            return False
        if last is not None:
            site, given, was_reported = last
            if (
                site is watched.site
                and was_reported != is_reported
                and all(one() is two for one, two in zip(given, call.given, strict=True))
            ):
                return True
        self._last = watched.site, [weakref.ref(one) for one in call.given], is_reported
        return False

    def _observe_figures(self, watched: WatchedModule, call: AttentionCall) -> None:
        wanted = [(kind, watched.streams[kind]) for kind in FIGURES if kind in watched.streams]
        query, key = call.query, call.key
        if not wanted or not (query.numel() and key.numel()):
            return
        if query.is_meta:
            raise ValueError("it is on the meta device, and has no data")
        if stride_of(query.shape[2]) > 1:
            self._tools.reporter.log_once(f"{watched.site.name}: of more than {MAX_QUERIES} query tokens evenly spaced ones are measured.")
        figures = attention_figures(query, key, call.masks, is_causal=call.is_causal, scale=call.scale)
        values = torch.stack([getattr(figures, FIGURES[kind]) for kind, _stream in wanted])
        counts = torch.stack([figures.visible >= NEEDED_KEYS.get(kind, 1) for kind, _stream in wanted])
        names = [self._tools.names.head_name(watched.site.name, f"head_{head}") for head in range(query.shape[1])]
        streams = [stream.at(name) for _kind, stream in wanted for name in names]
        # From (kinds, batch, heads, queries) to a row for each kind and head.
        rows, counting = (one.transpose(1, 2).reshape(len(streams), -1) for one in (values, counts))
        self._accumulator.observe_rows(streams, rows, counting)

    def _observe_heads(self, watched: WatchedModule, call: AttentionCall) -> None:
        """Observe the tensors of every head, as activations, and their differences from the reference's."""
        activation, difference = (watched.streams.get(kind) for kind in KINDS_OF_TENSORS)
        if activation is not None:
            self._accumulator.observe_all((activation.at(name), one) for name, one in self._tensors(watched, call))
        waiting = self._of_reference[watched.site.name]
        if difference is not None and waiting:
            of_reference = waiting.popleft()
            for name, one in self._tensors(watched, call):
                if name in of_reference:
                    self._accumulator.observe_pair(difference.at(name), one, of_reference[name].to(one.device))

    def _tensors(self, watched: WatchedModule, call: AttentionCall) -> Iterator[tuple[str, Tensor]]:
        """Query, key, value and output of every head, with their names."""
        tensors = {"query": call.query, "key": call.key, "value": call.value, "activation": call.output}
        for name, tensor in tensors.items():
            for head, of_head in enumerate(() if tensor is None else tensor.detach().unbind(1)):
                yield self._tools.names.head_name(watched.site.name, f"head_{head}.{name}"), of_head

    def _enter(self, one: _HookedModule, *_call: object) -> None:
        """The forward of a recorded module begins."""
        if not self._tools.is_observed() or self._tools.gate.is_redirected(one.module):
            return
        if not self._running:
            self._num_above = 0
        self._running.append(one)
        self._switch()

    def _leave(self, one: _HookedModule, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """The forward of a recorded module is over; its output is ``None`` after an exception."""
        self._end(one)
        if one.is_attention and one.watched is not None and output is not None:
            self.observe(one.watched, read_multihead_attention, RawCall((module, *args), kwargs, output))

    def _end(self, one: _HookedModule) -> None:
        # Modules above it in the list were ended by Ctrl-C, and did not get here.
        places = [place for place, running in enumerate(self._running) if running is one]
        del self._running[places[-1] if places else len(self._running) :]
        self._switch()

    def _switch(self) -> None:
        """Turn the mode on or off, as the innermost running module requires."""
        is_wanted = bool(self._running) and not self._running[-1].is_without_mode
        if is_wanted and not self._is_on:
            # The flag is set before the mode is on, and cleared after it is off: if Ctrl-C comes in between, `close` turns it off.
            self._is_on = True
            # The mode returns to its old position: the model removes its own modes from the top of the stack, in its own order.
            _insert(self._mode, self._num_above)
        elif self._is_on and not is_wanted:
            self._num_above = _remove(self._mode)
            self._is_on = False


class _AttentionMode(TorchFunctionMode):
    """Gets every call of a torch function, and gives calls of attention to the probe."""

    def __init__(self, probe: AttentionProbe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return output
        read = READERS.get(func)
        if read is not None:
            self._probe.observe_innermost(read, RawCall(args, kwargs, output))
        return output


def _remove(mode: TorchFunctionMode) -> int:
    """Remove a mode from torch's stack of modes, at any position; returns the number of modes above it."""
    above: list[TorchFunctionMode] = []
    try:
        while torch._C._len_torch_function_stack():
            top = _pop_mode()
            if top is mode:
                break
            above.append(top)
    finally:
        for one in reversed(above):
            _push_mode(one)
    return len(above)


def _insert(mode: TorchFunctionMode, num_above: int) -> None:
    """Insert a mode into torch's stack of modes, below the ``num_above`` topmost ones."""
    above = [_pop_mode() for _ in range(min(num_above, torch._C._len_torch_function_stack()))]
    for one in (mode, *reversed(above)):
        _push_mode(one)
