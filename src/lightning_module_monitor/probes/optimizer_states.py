"""States that optimizers keep of parameters."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_module_monitor.errors import shortened
from lightning_module_monitor.model.names import ParameterSite
from lightning_module_monitor.model.outputs import named_tensors
from lightning_module_monitor.probes.base import StepTools, WatchedParameter
from lightning_module_monitor.statistics.stream import Stream

STATE = "optimizer_state"


class StateReader:
    """Finds the states of parameters in a step: every floating tensor of the parameter's shape that an optimizer keeps of it.

    Args:
        select: Returns what is recorded of a state of a parameter; ``None`` if nothing is.
        totals: Returns the totals of all states that were selected so far.
        report_unmatched: Receives all states, each with its parameter, at the end of a step in which there are any.
        tools: The tools of the step.
    """

    def __init__(
        self,
        select: Callable[[WatchedParameter, str], Stream | None],
        totals: Callable[[], Iterable[Stream]],
        report_unmatched: Callable[[Collection[tuple[ParameterSite, str]]], None],
        tools: StepTools,
    ) -> None:
        self._select = select
        self.totals = totals
        self._report_unmatched = report_unmatched
        self._tools = tools
        self._read: set[str] = set()
        """The sites of parameters whose states were read."""
        self._states: dict[tuple[ParameterSite, str], None] = {}
        """All states of the parameters' shapes, by parameter and name."""
        self._stateless: dict[str, None] = {}
        """The classes of optimizers that stepped, and keep no such tensor."""
        self._unsupported: defaultdict[torch.dtype | type, list[str]] = defaultdict(list)
        self._other_shapes: list[str] = []
        self.is_asked = False
        """Whether any optimizer was given."""

    def states(
        self, optimizers: Iterable[Optimizer], watched: Iterable[WatchedParameter], *, has_stepped: bool
    ) -> Iterator[tuple[WatchedParameter, Stream, Tensor]]:
        """The states of parameters, each parameter once in a step.

        Args:
            optimizers: The optimizers that keep them.
            watched: The parameters.
            has_stepped: Whether the optimizers are known to have stepped: one that has may keep nothing.
        """
        unread = [target for target in watched if target.site.name not in self._read]
        for optimizer in optimizers:
            self.is_asked, num_states = True, len(self._states)
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} if has_stepped else set()
            for target in unread:
                parameter = target.site.tensor()
                kept = None if parameter is None else optimizer.state.get(parameter)
                if parameter is not None and kept:
                    self._read.add(target.site.name)
                    for name, value in kept.items():
                        yield from self._state(optimizer, target, parameter, str(name), value)
            if num_states == len(self._states) and any(id(target.site.tensor()) in own for target in unread):
                self._stateless[type(optimizer).__name__] = None

    def _state(
        self, optimizer: Optimizer, target: WatchedParameter, parameter: Tensor, name: str, value: object
    ) -> Iterator[tuple[WatchedParameter, Stream, Tensor]]:
        """A state of a parameter, if it is one that is recorded; another is noted, except for counters."""
        state = value if isinstance(value, Tensor) and value.shape == parameter.shape else None
        is_number = isinstance(value, Tensor) and value.dim() == 0 and (state is None or is_counter(optimizer, name))
        if is_number or not any(named_tensors(value)):
            return
        full_name, stream = f"{target.site.name}.{name}", self._select(target, name)
        if state is not None:
            self._states[target.site, name] = None
        if stream is None:
            return
        if state is None:
            self._other_shapes.append(full_name)
        elif not state.is_floating_point():
            self._unsupported[state.dtype].append(full_name)
        else:
            yield target, stream, state

    def finish(self) -> None:
        """Log, once, what is not recorded, and patterns that match nothing."""
        self._tools.log_unsupported("optimizer states", self._unsupported)
        log_once = self._tools.reporter.log_once
        if self._other_shapes:
            names = shortened(self._other_shapes)
            log_once(f"{names}: optimizer states of another shape than their parameter are not recorded.", once=f"{STATE} shapes")
        if self._stateless:
            names = shortened([*self._stateless])
            log_once(f"{STATE}: {names} keeps no tensors of the shapes of its parameters; there is nothing to record.", logging.WARNING)
        if not self.is_asked:
            log_once(f"{STATE}: no optimizer was given; expected monitor_updates(optimizers=optimizer) after its step.", logging.WARNING)
        if self._states:
            self._report_unmatched(self._states)


def is_counter(optimizer: Optimizer, name: str) -> bool:
    """Whether a state without dimensions is a counter, and not the state of a parameter without dimensions: larger ones have it alike."""
    larger = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.dim()]
    kept = ((parameter, optimizer.state.get(parameter, {}).get(name)) for parameter in larger)
    is_of_larger = any(isinstance(value, Tensor) and value.shape == parameter.shape for parameter, value in kept)
    return name == "step" or (bool(larger) and not is_of_larger)
