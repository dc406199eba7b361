"""Gain of the gradient from block to block: norms are measured as gradients arrive, and divided on the host after the step."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from lightning_module_monitor.config.gradient_options import ParsedGradientFlow
from lightning_module_monitor.kernels.elements import plain
from lightning_module_monitor.kernels.table import Scale
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import SUMMARY_SITE
from lightning_module_monitor.model.hooks import is_in_backward
from lightning_module_monitor.model.names import ModelIndex, Namer
from lightning_module_monitor.model.outputs import NamedTensors
from lightning_module_monitor.probes.base import StepTools
from lightning_module_monitor.probes.tap import Awaited, Consumer, counted_elements
from lightning_module_monitor.record import NumbersOfStep
from lightning_module_monitor.statistics.gains import EPS, NORMS, Thresholds, summary, transitions
from lightning_module_monitor.statistics.stream import Stream

KIND = "gradient_flow"

MAIN_NAMES = ("hidden_states", "last_hidden_state")
"""Conventional names of the main part of an output."""


def norm_stream(name: str, norm: str, *, is_compared: bool = False) -> Stream:
    """The stream of a norm of the gradient at a block, one of :data:`~lightning_module_monitor.statistics.gains.NORMS`."""
    return Stream(KIND, name, {norm: NORMS[norm]}, is_compared=is_compared)


@dataclass(frozen=True)
class Chain:
    """Blocks in the order of the forward pass, and the names of the transitions between them."""

    blocks: Sequence[nn.Module]
    streams: Sequence[Stream]
    """For the norm at each block, each at its own site. Gains are computed from the norms, which are not recorded."""
    transitions: Sequence[str]
    """Site of each transition; one fewer than there are blocks."""
    thresholds: Thresholds
    prefix: str

    @classmethod
    def of(cls, option: ParsedGradientFlow, index: ModelIndex, prefix: str, *, is_compared: bool) -> Chain:
        """The chain of the blocks that a user has named.

        Raises:
            ConfigError: If there are no such blocks.
        """
        names = index.blocks(option.blocks)
        norm_namer = Namer()  # a namer of its own, because the norms are not recorded
        return cls(
            blocks=[index.module_by_name[name] for name in names],
            streams=[norm_stream(norm_namer.name(name), option.norm, is_compared=is_compared) for name in names],
            transitions=[index.namer.name(f"{earlier}-{later}") for earlier, later in pairwise(names)],
            thresholds=option.thresholds,
            prefix=prefix,
        )

    def keys(self) -> list[str]:
        """The keys of a step."""
        return [key.format() for key in self.gains([None] * len(self.blocks))]

    def gains(self, norms: Sequence[float | None]) -> dict[Key, float | None]:
        """The values of a step by key; ``None`` where one needs the norm of a block without a gradient.

        Args:
            norms: Norm of the gradient at each block; ``None`` without a gradient.
        """
        changes = transitions(norms, EPS, self.thresholds)
        by_site: dict[str, Mapping[str, float | None]] = {
            site: {"gain": change.gain, "log_gain": change.log_gain} for site, change in zip(self.transitions, changes, strict=True)
        }
        by_site[SUMMARY_SITE] = summary(changes)
        return {Key(KIND, site, name, prefix=self.prefix): value for site, values in by_site.items() for name, value in values.items()}


def main_tensor(output: object, tensors: NamedTensors) -> Tensor | None:
    """The tensor of a block's output that is the input of the next block.

    It is the output itself; for a mapping or an object its ``hidden_states`` or ``last_hidden_state``; else, or if that is no real
    floating tensor, the first real floating tensor of all ``tensors`` in it. ``None`` without such a tensor.
    """
    for name in () if isinstance(output, Tensor) else MAIN_NAMES:
        part = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(part, Tensor) and plain(part).is_floating_point():
            return part
    return next((tensor for _path, tensor in tensors if plain(tensor).is_floating_point()), None)


class BlockGradientProbe(Consumer[tuple[int, ...]]):
    """Calls :meth:`observe_gradient` with the gradient that arrives at each block, and the block's index.

    The blocks are in the order of the forward pass. A module with two indices is called twice in a forward pass: its first
    call has the first index, its second call the second, and so in turn.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__((block, tuple(i for i, other in enumerate(blocks) if other is block)) for block in dict.fromkeys(blocks))
        self._num_calls: Counter[tuple[int, ...]] = Counter()
        """Number of calls of a module, by its indices."""

    def observe_output(self, indices: tuple[int, ...], output: object, tensors: NamedTensors, is_repeated: bool) -> Iterable[Awaited]:
        """Await the gradient of a block's output."""
        tensor = main_tensor(output, tensors)
        return ((tensor, indices, None if is_repeated else self._next_index(indices)),)

    def fail(self, indices: tuple[int, ...], output: object, error: Exception) -> None:
        """Report an output that cannot be taken apart, once for a call and its recomputation."""
        if not is_in_backward():
            self.fail_block(self._next_index(indices), output, error)

    def _next_index(self, indices: tuple[int, ...]) -> int:
        """The block's index of the call that is over now."""
        self._num_calls[indices] += 1
        return indices[(self._num_calls[indices] - 1) % len(indices)]

    @abstractmethod
    def fail_block(self, index: int, output: object, error: Exception) -> None:
        """Report that the output of a block cannot be taken apart."""

    def end_micro_batch(self) -> None:
        """Start again with the first index of every module."""
        self._num_calls.clear()


class GradientFlowProbe(BlockGradientProbe):
    """Observes the blocks of a chain for one step; its micro-batches count as one batch."""

    def __init__(self, chain: Chain, tools: StepTools) -> None:
        super().__init__(chain.blocks)
        self._chain = chain
        self._accumulator = tools.accumulator

    def observe_gradient(self, index: int, gradient: Tensor, scale: Scale) -> None:
        """Observe the gradient at a block."""
        self._accumulator.observe(self._chain.streams[index], counted_elements(gradient), scale)

    def fail_block(self, index: int, output: object, error: Exception) -> None:
        """Record NaN for an output that cannot be taken apart."""
        self._accumulator.fail(self._chain.streams[index], output, error)

    def fail_gradient(self, index: int, gradient: Tensor, error: Exception) -> None:
        """Record NaN for a gradient that cannot be read."""
        self.fail_block(index, gradient, error)

    def derive(self, numbers: NumbersOfStep) -> None:
        """Replace norms by gains; a value that needs the norm of a block without a gradient is absent."""
        norms = [numbers.pop(key) for stream in self._chain.streams for key in stream.keys.values()]
        for key, gain in self._chain.gains(norms).items():
            if gain is not None:
                numbers.put(key, float(gain))
