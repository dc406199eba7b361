"""Gain of the gradient from block to block, in any loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor, nn

from lightning_module_monitor.config import parse_norm, parse_thresholds
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.probes.base import elements_of
from lightning_module_monitor.probes.gradient_flow import BlockGradientProbe, norm_watch
from lightning_module_monitor.standalone.gain_report import GainReport, gain_report
from lightning_module_monitor.statistics.accumulator import StepAccumulator
from lightning_module_monitor.statistics.gains import EPS, HEURISTIC, Transition, summary, transitions
from lightning_module_monitor.statistics.spec import MetricSpec

NOTHING_YET = (
    "No gradients recorded: no backward pass has reached any of the blocks. Call backward() on a loss of a forward pass "
    "that ran while the monitor was open."
)


class GradientGainMonitor:
    r"""Measures how the gradient grows and shrinks from block to block, for one backward pass.

    The gain of the transition from block i - 1 to block i, with :math:`h_i` the output of block i, is

    .. math:: \gamma_i = \lVert \partial L / \partial h_{i-1} \rVert \; / \; \lVert \partial L / \partial h_i \rVert

    what block i makes of the gradient on its way back. Of an output that is a mapping or an object, ``hidden_states`` or
    ``last_hidden_state`` is :math:`h`, else the first floating tensor in it, as of a tuple.

    Hooks are on from here to :meth:`close`, or for the length of a ``with`` block; nothing is read on the host before a
    result is asked for.

    Args:
        blocks: Modules in the order of the forward pass: a list, ``nn.ModuleList``, ``nn.Sequential``. A module that stands
            at two places is called twice: its first call is the block at the first place.
        norm_type: ``l2``, ``l1``, ``linf`` (largest magnitude) or ``mean`` (mean magnitude, which is no norm).
        strict_single_backward: Whether a second backward pass that reaches a block without :meth:`reset` before it is an
            error. If not, each block has the norm of the latest pass that reached it.
        eps: A norm below this has vanished.
        thresholds: A gain below the first counts as damping, one above the second as amplifying. Heuristics.

    Raises:
        ConfigError: If a value is wrong; says which, what was expected, and the nearest right one. It is a ``ValueError``.

    Example:
        >>> import torch
        >>> blocks = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Tanh())
        >>> x = torch.tensor([-2.0, 0.0, 1.0], requires_grad=True)
        >>> with GradientGainMonitor(blocks) as monitor:
        ...     blocks(x).sum().backward()
        >>> [round(gain, 4) for gain in monitor.gains()]
        [0.2847, 0.8517]
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        norm_type: str = "l2",
        strict_single_backward: bool = True,
        eps: float = EPS,
        *,
        thresholds: Iterable[float] = HEURISTIC,
    ) -> None:
        self.blocks = _checked_blocks(blocks)
        self.norm_type = parse_norm(norm_type, "norm_type")
        self.strict_single_backward = strict_single_backward
        if not isinstance(eps, float | int) or not eps > 0:
            raise ConfigError(f"eps is {eps!r}; expected a number above 0, below which a norm has vanished.")
        self.eps = eps
        self.thresholds = parse_thresholds(thresholds, "thresholds")
        self._watches = [norm_watch(f"block {place}", self.norm_type) for place in range(len(self.blocks))]
        self._probe = _Probe(self.blocks, self._watches, strict_single_backward)
        self._probe.attach()

    def norms(self) -> list[float | None]:
        """The norm of the gradient at each block's output.

        Returns:
            One for each block; ``None`` where no gradient arrived.

        Raises:
            RuntimeError: If no gradient has arrived anywhere yet.
        """
        if not self._probe.has_seen_any():
            raise RuntimeError(NOTHING_YET)
        return self._probe.norms()

    def gains(self) -> list[float | None]:
        """The gain of each transition, one fewer than there are blocks.

        Returns:
            Norm at a block over norm at the next one: inf where the latter is below ``eps``; ``None`` where one of the two
            got no gradient.

        Raises:
            RuntimeError: If no gradient has arrived anywhere yet.
        """
        return [one.gain for one in self._transitions()]

    def log_gains(self) -> list[float | None]:
        """The natural logarithm of each gain.

        Returns:
            As :meth:`gains`: inf where the later block's norm is below ``eps``, else -inf where the earlier one's is.

        Raises:
            RuntimeError: If no gradient has arrived anywhere yet.
        """
        return [one.log_gain for one in self._transitions()]

    def summary_stats(self) -> dict[str, float | int | None]:
        """What the transitions sum up to.

        Returns:
            ``mean_gain``, ``min_gain``, ``max_gain`` and ``mean_log_gain``, of those that are not infinite, ``None`` where
            there are none and NaN where one is; and how many are which: ``num_amplifying``, ``num_damping``,
            ``num_healthy``, ``num_vanishing`` (the later block's norm is below ``eps``), ``num_missing`` (no gradient).

        Raises:
            RuntimeError: If no gradient has arrived anywhere yet.
        """
        return summary(self._transitions())

    def report(self) -> GainReport:
        """All of it as a text of some lines, plain for a log file; ``rich.print`` shows it in colours."""
        if not self._probe.has_seen_any():
            return GainReport(NOTHING_YET)
        return gain_report(self.norms(), self._transitions(), self.norm_type, self.thresholds)

    def reset(self) -> None:
        """Forget what was measured: for the next backward pass, and after a forward pass that failed."""
        self._probe.reset()

    def close(self) -> None:
        """Take every hook off; what was measured stays. May be called twice."""
        self._probe.close()

    def __len__(self) -> int:
        return len(self.blocks)

    def __enter__(self) -> GradientGainMonitor:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _transitions(self) -> list[Transition]:
        return transitions(self.norms(), self.eps, self.thresholds)


class _Pass:
    """What one backward pass brought."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.observation = StepAccumulator(
            lambda watch, _name, seen, error: _warn(f"Gradient at {watch.site}, {seen}", error, "Its norm is NaN.")
        )


class _Probe(BlockGradientProbe):
    """Keeps, for each block, the backward pass that reached it last."""

    def __init__(self, blocks: list[nn.Module], watches: list[MetricSpec], is_strict: bool) -> None:
        super().__init__(blocks)
        self._watches = watches
        self._is_strict = is_strict
        self._latest: _Pass | None = None
        self._pass_of: dict[int, _Pass] = {}
        self._norms: list[float | None] | None = None

    def has_seen_any(self) -> bool:
        """Whether any block got a gradient."""
        return bool(self._pass_of)

    def norms(self) -> list[float | None]:
        """The norm at each block, with one transfer for each backward pass and device; read again only after a new gradient."""
        if self._norms is None:
            values = {one: one.observation.collect() for one in set(self._pass_of.values())}
            key_of = [watch.statistic_keys[0] for watch in self._watches]
            seen = {place: values[one][key_of[place]] for place, one in self._pass_of.items()}
            self._norms = [seen.get(place) for place in range(len(self._watches))]
        return list(self._norms)

    def reset(self) -> None:
        """Forget every pass."""
        self._latest = self._norms = None
        self._pass_of.clear()
        self.forget_calls()

    def observe_gradient(self, place: int, gradient: Tensor) -> None:
        """Take the gradient at a block in."""
        now = self._entered(self.backward_pass())
        before = self._pass_of.get(place, now)
        if before is not now and self._is_strict:
            raise RuntimeError(
                f"The gradient hook of block {place} fired twice: a second backward pass reached it. Call reset() between "
                "backward passes, or give strict_single_backward=False, which keeps the latest."
            )
        self._pass_of[place] = now
        self._norms = None
        now.observation.observe(self._watches[place], elements_of(gradient))

    def fail_block(self, place: int, output: object, error: Exception) -> None:
        """Say that an output could not be taken apart: no gradient of it will be seen."""
        _warn(f"Block {place}, a {type(output).__name__}", error, "It counts as a block without a gradient.")

    def _entered(self, backward_pass: int) -> _Pass:
        if self._latest is None or self._latest.number != backward_pass:
            self._latest = _Pass(backward_pass)
        return self._latest


def _checked_blocks(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    expected = "expected a list of modules, a ModuleList or a Sequential, e.g. model.blocks"
    if not isinstance(blocks, Iterable):
        raise ConfigError(f"blocks is a {type(blocks).__name__}; {expected}.")
    checked = list(blocks)
    for place, block in enumerate(checked):
        if not isinstance(block, nn.Module):
            raise ConfigError(f"blocks[{place}] is a {type(block).__name__}; {expected}.")
    return checked


def _warn(seen: str, error: Exception, consequence: str) -> None:
    """An output or gradient that cannot be read ends nothing."""
    warnings.warn(f"{seen}: {type(error).__name__}: {error}. {consequence}", RuntimeWarning, stacklevel=2)
