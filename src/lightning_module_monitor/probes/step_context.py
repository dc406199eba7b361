"""The time in which one step, or one validation loop, is observed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from lightning_module_monitor.distributed.exchange import Exchange
from lightning_module_monitor.model.eager_mode import Uncompiled
from lightning_module_monitor.model.hooks import Unobserved
from lightning_module_monitor.probes.attention import AttentionProbe
from lightning_module_monitor.probes.base import Probe
from lightning_module_monitor.probes.whole_tensors import WholeTensors
from lightning_module_monitor.statistics.observation import Observation


class Window:
    """One step, or one loop of another stage, while it is observed: its probes and what they saw.

    Args:
        step: What its record is plotted against.
        stage: ``train``, ``validation``, ``test`` or ``predict``.
        observation: What its probes fill.
        exchange: Brings what all ranks have seen together; ``None`` where there is one.
        whole_tensors: Puts together what is laid out over ranks.
    """

    def __init__(self, step: int, stage: str, observation: Observation, exchange: Exchange | None, whole_tensors: WholeTensors) -> None:
        self.step = step
        self.stage = stage
        self.observation = observation
        self.exchange = exchange
        self.whole_tensors = whole_tensors
        self.attention: AttentionProbe | None = None
        """The one of the probes that can be told of attention by hand."""
        self.probes: Sequence[Probe] = ()
        self._uncompiled = Uncompiled()
        self._num_unobserved = Unobserved.number

    def attach(self, attention: AttentionProbe, others: Sequence[Probe]) -> None:
        """Put the probes on."""
        self._uncompiled.begin()
        self.attention = attention
        self.probes = (*others, attention)
        for probe in self.probes:
            probe.attach()

    def has_missed(self) -> bool:
        """Whether something was not observed because torch traced it."""
        return Unobserved.number > self._num_unobserved

    def set_open(self, is_open: bool) -> None:
        """Whether what happens from now on is observed."""
        for probe in self.probes:
            probe.is_open = is_open

    def set_suspended(self, is_suspended: bool) -> None:
        """Whether a loop of another stage runs in the middle of the step."""
        for probe in self.probes:
            probe.is_suspended = is_suspended

    def close(self) -> None:
        """Take every hook off and forget every tensor; a second call closes what an error or Ctrl-C in the first has left open."""
        with ExitStack() as stack:
            stack.callback(self._uncompiled.end)
            for probe in reversed(self.probes):
                stack.callback(probe.close)

    def lose(self) -> None:
        """Give up what was seen: there will be no record, on no rank."""
        self.close()
        self.attention, self.probes = None, ()
        self.whole_tensors.forget()
        self.observation.is_lost = True
