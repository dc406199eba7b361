"""Attention of the watched modules, head by head, without a change to the model."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.model.hooks import ForwardHook, HookSet, is_in_backward, is_tracing
from lightning_module_monitor.model.names import ModuleSite
from lightning_module_monitor.probes.attention_calls import (
    AttentionCall,
    RawCall,
    Reader,
    read_multi_head_attention_forward,
    read_multihead_attention,
    read_scaled_dot_product_attention,
)
from lightning_module_monitor.probes.probe import Probe, Watched, WatchedModule
from lightning_module_monitor.record import KINDS
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.attention import MAX_QUERIES, AttentionFigures, attention_figures, stride_of

FIGURES: Mapping[str, Callable[[AttentionFigures], Tensor]] = {
    "attention_entropy": lambda figures: figures.entropy,
    "attention_relative_entropy": lambda figures: figures.relative_entropy,
    "attention_max_logit": lambda figures: figures.max_logit,
    "attention_sink": lambda figures: figures.sink,
}
"""What is taken of a call's figures, by kind."""

NEEDED_KEYS = {"attention_relative_entropy": 2}
"""How many keys a token must see to count, where it is not one: of one key there is nothing to choose."""

KINDS_OF_TENSORS = ("activation", "activation_difference")
"""The kinds that the tensors of heads are of."""

READERS: Mapping[Callable[..., Any], Reader] = {
    F.scaled_dot_product_attention: read_scaled_dot_product_attention,
    F.multi_head_attention_forward: read_multi_head_attention_forward,
}
"""The functions whose calls are seen."""

HeadName = Callable[[str, str], str]
"""Gives the name of a head or of a tensor of it: from the module's site and what is put behind it."""


@dataclass(frozen=True, eq=False)
class _Watching:
    """A watched module, and how attention within it is seen."""

    watched: WatchedModule
    is_of_torch: bool
    """Whether its forward is torch's own, which calls no attention but in ``nn.MultiheadAttention``.

    It may look whether a mode is there, and take another path then, which rounds otherwise; so there is none meanwhile."""
    is_attention: bool
    """Whether its forward is that of ``nn.MultiheadAttention``, whose call is seen by the hook."""

    def can_attend(self) -> bool:
        """Whether there can be attention within it: not in a layer of torch's own without children."""
        return self.is_attention or not self.is_of_torch or next(self.watched.site.module.children(), None) is not None

    @classmethod
    def of(cls, watched: WatchedModule) -> _Watching:
        forward = getattr(watched.site.module.forward, "__func__", None)
        defined_in = getattr(forward, "__module__", None) or ""  # None: generated code, as that of torch.fx
        of_torch = defined_in.startswith("torch.nn.modules.")
        return cls(watched, of_torch, forward is nn.MultiheadAttention.forward)


class AttentionProbe(Probe):
    """Sees every call of attention within the watched modules, and measures it head by head.

    A call belongs to the innermost watched module that is running: hooks before and after each module's forward tell which.
    While one runs that is not of torch's own, a ``TorchFunctionMode`` is on, which sees ``F.scaled_dot_product_attention`` and
    ``F.multi_head_attention_forward`` under whatever name the model calls them. It is off whenever no watched module runs.

    Args:
        watched: The modules.
        with_heads: Those of them of which a kind of heads is wanted.
        observation: Where figures go.
        head_name: Names heads.
        say: Takes a sentence for the user.
        is_asked_for: Whether a rule of the user's is about attention, and not only one of a built-in watch.

    Attributes:
        is_asked_for: As above.
        has_observed: Whether there was any call of attention.
    """

    def __init__(
        self,
        watched: Sequence[WatchedModule],
        with_heads: Sequence[WatchedModule],
        observation: StepAccumulator,
        head_name: HeadName,
        say: Callable[[str], None],
        *,
        is_asked_for: bool,
    ) -> None:
        self.is_asked_for = is_asked_for
        self.has_observed = False
        self._all = watched
        self._watched = [one for one in map(_Watching.of, with_heads) if one.can_attend()]
        self._observation = observation
        self._head_name = head_name
        self._say = say
        self._hooks = HookSet()
        self._mode = _AttentionMode(self)
        self._running: list[_Watching] = []
        """The watched modules whose forward is running, outermost first."""
        self._is_on = False
        self._num_above = 0
        """How many modes lay above ours when it was taken off."""
        self._last: _Seen | None = None
        self._of_reference: defaultdict[str, deque[dict[str, Tensor]]] = defaultdict(deque)
        """Tensors of heads by name, of calls of the reference's that the model has not come to, by site."""

    def attach(self) -> None:
        """Put the hooks on."""
        for one in self._watched:
            module = one.watched.site.module
            self._hooks.add(module.register_forward_pre_hook(_EnterHook(self, one)))
            self._hooks.add(module.register_forward_hook(_LeaveHook(self, one), with_kwargs=True, always_call=True))

    def end_micro_batch(self) -> None:
        """Forget the call that was seen last, and what the model did not come to."""
        self._last = None
        self._of_reference.clear()

    def close(self) -> None:
        """Take every hook off, and the mode, which Ctrl-C in a forward leaves on."""
        self._hooks.close()
        self._running.clear()
        self.end_micro_batch()
        self._switch()

    def watched(self, site: ModuleSite) -> WatchedModule:
        """What is wanted of a module, of all kinds."""
        return next((one for one in self._all if one.site is site), Watched(site, {}))

    def see(self, watched: WatchedModule, read: Reader, call: RawCall, *, by_hand: bool = False) -> None:
        """Take a call in.

        Args:
            watched: The module that it belongs to.
            read: Makes heads of it.
            call: What was called, and what came of it.
            by_hand: Whether the model itself tells of it; a call that it tells of and that is seen as well counts once.
        """
        # A forward pass within a backward pass is the recomputation of a checkpointed one, which was counted.
        if not self.is_open or is_in_backward() or is_tracing():
            return
        self.has_observed = True
        try:
            with torch.no_grad():
                heads = read(call, not watched.watches.keys().isdisjoint(KINDS_OF_TENSORS))
                if not self._was_seen(watched, heads, by_hand):
                    self._measure(watched, heads)
                    self._see_heads(watched, heads)
        except MonitorError:
            raise
        except Exception as error:
            self._fail(watched, call, error)

    def see_reference(self, watched: WatchedModule, read: Reader, call: RawCall, *, to_host: bool) -> None:
        """Keep the tensors of the heads of a call of the reference's until the model comes to it, if that is wanted.

        Args:
            watched: The module of the model whose sibling it belongs to.
            read: Makes heads of it.
            call: What was called, and what came of it.
            to_host: Whether they wait in the memory of the host.
        """
        if "activation_difference" not in watched.watches or self.is_suspended:
            return
        try:
            with torch.no_grad():
                tensors = self._tensors(watched, read(call, True))
                self._of_reference[watched.site.name].append(
                    {name: one.to("cpu", copy=True) if to_host else one.clone() for name, one in tensors}
                )
        except Exception as error:
            self._fail(watched, call, error)

    def see_innermost(self, read: Reader, call: RawCall) -> None:
        """Take in a call of the watched module that is running."""
        if self._running:
            self.see(self._running[-1].watched, read, call)

    def _fail(self, watched: WatchedModule, call: RawCall, error: Exception) -> None:
        """What cannot be read (a tensor of a functorch transform, say) is no reason for training to end."""
        for kind, watch in watched.watches.items():
            if KINDS[kind].of_heads:
                self._observation.fail(watch, call.output, error)

    def _was_seen(self, watched: WatchedModule, call: AttentionCall, by_hand: bool) -> bool:
        """Whether the call that came last was this one, told by hand and seen, or seen and told by hand."""
        last, self._last = self._last, None
        if call.given and last is not None and last.is_other_side_of(watched, call, by_hand):
            return True
        if call.given:
            self._last = _Seen(watched, tuple(weakref.ref(one) for one in call.given), by_hand)
        return False

    def _measure(self, watched: WatchedModule, call: AttentionCall) -> None:
        """Take in the figures of every query token, by head."""
        wanted = [(kind, watched.watches[kind]) for kind in FIGURES if kind in watched.watches]
        query, key = call.query, call.key
        if not wanted or not (query.numel() and key.numel()):
            return
        if query.is_meta:
            raise ValueError("it is on the meta device, and has no data")
        if stride_of(query.shape[2]) > 1:
            self._say(f"{watched.site.name}: of more than {MAX_QUERIES} query tokens evenly spaced ones are measured.")
        figures = attention_figures(query, key, call.masks, is_causal=call.is_causal, scale=call.scale)
        values = torch.stack([FIGURES[kind](figures) for kind, _watch in wanted])
        counts = torch.stack([figures.visible >= NEEDED_KEYS.get(kind, 1) for kind, _watch in wanted])
        num_heads = query.shape[1]
        names = [self._head_name(watched.site.name, f"head_{head}") for head in range(num_heads)]
        watches = [watch.at(name) for _kind, watch in wanted for name in names]
        # From (kinds, batch, heads, queries) to a row for each kind and head.
        rows, counting = (one.transpose(1, 2).reshape(len(watches), -1) for one in (values, counts))
        self._observation.observe_rows(watches, rows, counting)

    def _see_heads(self, watched: WatchedModule, call: AttentionCall) -> None:
        """Take in the tensors of every head, as activations, and their differences from the reference's."""
        activation, difference = (watched.watches.get(kind) for kind in KINDS_OF_TENSORS)
        if activation is not None:
            self._observation.observe_all((activation.at(name), one) for name, one in self._tensors(watched, call))
        waiting = self._of_reference[watched.site.name]
        if difference is not None and waiting:
            of_reference = waiting.popleft()
            for name, one in self._tensors(watched, call):
                if name in of_reference:
                    self._observation.observe_pair(difference.at(name), one, of_reference[name].to(one.device))

    def _tensors(self, watched: WatchedModule, call: AttentionCall) -> Iterator[tuple[str, Tensor]]:
        """Query, key, value and output of every head, with their names."""
        tensors = {"query": call.query, "key": call.key, "value": call.value, "activation": call.output}
        for name, tensor in tensors.items():
            for head, of_head in enumerate(() if tensor is None else tensor.detach().unbind(1)):
                yield self._head_name(watched.site.name, f"head_{head}.{name}"), of_head

    def enter(self, one: _Watching) -> None:
        """The forward of a watched module begins."""
        if not self._running:
            self._num_above = 0
        self._running.append(one)
        self._switch()

    def leave(self, one: _Watching, call: RawCall) -> None:
        """The forward of a watched module is over, by an exception if its output is ``None``."""
        # The last time that it is there, and what is above: a module that Ctrl-C ended was not left.
        places = [place for place, running in enumerate(self._running) if running is one]
        del self._running[places[-1] if places else len(self._running) :]
        self._switch()
        if one.is_attention and call.output is not None:
            self.see(one.watched, read_multihead_attention, call)

    def _switch(self) -> None:
        """Put the mode on or take it off, as the innermost module that is running wants it."""
        is_wanted = bool(self._running) and not self._running[-1].is_of_torch
        if is_wanted and not self._is_on:
            # Set before it is on, and below after it is off: where Ctrl-C comes in between, `close` takes it off.
            self._is_on = True
            # In its old place: a mode of the model's that lies above ours will be taken off by who has put it there.
            _put_on(self._mode, self._num_above)
        elif self._is_on and not is_wanted:
            self._num_above = _take_off(self._mode)
            self._is_on = False


class _EnterHook(ForwardHook):
    """Called before a watched module's forward. Returns nothing, like the next one."""

    def __init__(self, probe: AttentionProbe, one: _Watching) -> None:
        self._probe = probe
        self._one = one

    def see(self, _module: nn.Module, _args: object) -> None:
        if self._probe.is_open:
            self._probe.enter(self._one)


class _LeaveHook(ForwardHook):
    """Called after a watched module's forward, also if it raises."""

    def __init__(self, probe: AttentionProbe, one: _Watching) -> None:
        self._probe = probe
        self._one = one

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        self._probe.leave(self._one, RawCall((module, *args), kwargs, output))


class _Seen(NamedTuple):
    """A call that was taken in, and which way it came."""

    watched: WatchedModule
    given: tuple[weakref.ref[Tensor], ...]
    by_hand: bool

    def is_other_side_of(self, watched: WatchedModule, call: AttentionCall, by_hand: bool) -> bool:
        """Whether a call is this one, and came the other way."""
        same = self.watched.site is watched.site and all(one() is other for one, other in zip(self.given, call.given, strict=True))
        return same and self.by_hand != by_hand


class _AttentionMode(TorchFunctionMode):
    """Told of every call of a torch function; does what the function does, and tells the probe of attention."""

    def __init__(self, probe: AttentionProbe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        read = READERS.get(func)
        if read is not None:
            self._probe.see_innermost(read, RawCall(args, kwargs, output))
        return output


def _take_off(mode: TorchFunctionMode) -> int:
    """Take a mode off, wherever it lies; returns how many lay above it."""
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


def _put_on(mode: TorchFunctionMode, num_above: int) -> None:
    """Put a mode on, with so many of those that are on above it."""
    above = [_pop_mode() for _ in range(min(num_above, torch._C._len_torch_function_stack()))]
    for one in (mode, *reversed(above)):
        _push_mode(one)
