"""Gain of the gradient from block to block: norms are taken as gradients arrive, and divided on the host after the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_module_monitor.probes.block_gradients import BlockGradientProbe
from lightning_module_monitor.probes.probe import elements_of
from lightning_module_monitor.record import SUMMARY_SITE, Key
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.gains import EPS, NORMS, SUMMARY, Thresholds, summary, transitions
from lightning_module_monitor.statistics.spec import MetricSpec

KIND = "gradient_flow"


def norm_watch(name: str, norm: str, *, is_compared: bool = False) -> MetricSpec:
    """The wish for a norm of the gradient at a block, one of :data:`~lightning_module_monitor.statistics.gains.NORMS`."""
    return MetricSpec(KIND, name, statistics={norm: NORMS[norm]}, is_compared=is_compared)


@dataclass(frozen=True)
class Chain:
    """Blocks in the order of the forward pass, and what the transitions between them are called."""

    blocks: Sequence[nn.Module]
    watches: Sequence[MetricSpec]
    """For the norm at each block, all of different sites. Their values go into gains and are not recorded."""
    transitions: Sequence[str]
    """Site of each transition; one fewer than there are blocks."""
    thresholds: Thresholds
    prefix: str

    def keys(self) -> list[str]:
        """Every key of a step."""
        of_transitions = [self._key(site, name) for site in self.transitions for name in ("gain", "log_gain")]
        return of_transitions + [self._key(SUMMARY_SITE, name) for name in SUMMARY]

    def values(self, norms: Sequence[float | None]) -> dict[str, float]:
        """Value by key; what there is none of, because a block got no gradient, is absent.

        Args:
            norms: Norm at each block, ``None`` where no gradient arrived.
        """
        found = transitions(norms, EPS, self.thresholds)
        sums = summary(found)
        of_transitions = [value for one in found for value in (one.gain, one.log_gain)]
        by_key = zip(self.keys(), [*of_transitions, *(sums[name] for name in SUMMARY)], strict=True)
        return {key: float(value) for key, value in by_key if value is not None}

    def _key(self, site: str, name: str) -> str:
        return Key(KIND, site, name, prefix=self.prefix).format()


class GradientFlowProbe(BlockGradientProbe):
    """Watches the blocks of a chain for the length of one step; all of its micro-batches count, as one.

    Args:
        chain: The blocks.
        observation: Where gradients go.
    """

    def __init__(self, chain: Chain, observation: StepAccumulator) -> None:
        super().__init__(chain.blocks)
        self._chain = chain
        self._observation = observation

    def receive(self, place: int, gradient: Tensor, backward_pass: int) -> None:
        """Take the gradient at a block in."""
        self._observation.observe(self._chain.watches[place], elements_of(gradient, self.scale))

    def fail(self, place: int, output: object, error: Exception) -> None:
        """Take note of an output that could not be taken apart."""
        self._observation.fail(self._chain.watches[place], output, error)

    def derive(self, values: dict[str, float]) -> None:
        """Put gains in the place of norms."""
        norms = [values.pop(key, None) for watch in self._chain.watches for key in watch.statistic_keys]
        values.update(self._chain.values(norms))
