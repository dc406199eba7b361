"""Gain of the gradient from block to block, in any loop, and its report for a terminal or a log file."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_module_monitor.config.gradient_options import parse_thresholds
from lightning_module_monitor.config.rules import check_choice
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.kernels.table import Scale
from lightning_module_monitor.probes.base import Gate
from lightning_module_monitor.probes.gradient_flow import BlockGradientProbe, norm_stream
from lightning_module_monitor.probes.tap import ModuleTap, counted_elements
from lightning_module_monitor.statistics.gains import EPS, HEURISTIC, NORMS, Category, Thresholds, Transition, summary, transitions
from lightning_module_monitor.statistics.stream import Stream
from lightning_module_monitor.step.accumulator import StepAccumulator

if TYPE_CHECKING:
    from rich.text import Text

NOTHING_YET = (
    "No gradients recorded: no backward pass has reached any of the blocks. Call backward() on a loss of a forward pass "
    "that ran while the monitor was open."
)

MARKS: dict[Category, str] = {
    "healthy": "[Healthy]",
    "amplifying": "[AMPLIFYING]",
    "damping": "[DAMPING]",
    "vanishing": "[VANISHING]",
    "missing": "[no gradient]",
    "undefined": "[NOT FINITE]",
}

STYLES = {
    r"^\w.*$": "bold",
    r"\[Healthy\]": "green",
    r"\[no gradient\]|: none$": "dim",
    r"\[(AMPLIFYING|DAMPING)\]": "yellow",
    r"\[(VANISHING|NOT FINITE)\]": "bold red",
}
"""Styles of rich by pattern."""


class GainReport(str):
    """Plain ASCII text; ``rich.print`` shows it in colours."""

    __slots__ = ()

    def __rich__(self) -> Text:
        """The same text in colours."""
        from rich.text import Text  # noqa: PLC0415  # the caller has rich; it is not a dependency

        text = Text(str(self))
        for pattern, style in STYLES.items():
            text.highlight_regex(f"(?m){pattern}", style)
        return text


class GradientGainMonitor:
    """Measures how the gradient of a backward pass grows and shrinks from block to block.

    The gain of the transition from block ``i - 1`` to block ``i``, with ``h[i]`` the output of block ``i`` and ``L`` the loss, is
    ``norm(dL/dh[i-1]) / norm(dL/dh[i])``: the factor by which block ``i`` changes the gradient on its way back. In an output that is a
    mapping or an object, ``h`` is ``hidden_states`` or ``last_hidden_state``; otherwise, as in a tuple, the first floating tensor.

    Hooks stay registered until :meth:`close`, or until the ``with`` block ends. Values are copied to the host when a result is
    requested.

    Args:
        blocks: Modules in the order of the forward pass: a list, ``nn.ModuleList``, ``nn.Sequential``. A module that is
            listed twice is called twice: its first call is the first of the two blocks.
        norm_type: ``l2``, ``l1``, ``linf`` (largest magnitude) or ``mean`` (mean magnitude, not a norm).
        strict_single_backward: Whether a second backward pass that reaches a block is an error without a :meth:`reset` before it. If
            not, each block has the norm of the latest pass that reached it.
        eps: A norm below this has vanished.
        thresholds: A gain below the first counts as damping, a gain above the second as amplifying. Heuristics.

    Raises:
        ConfigError: If a value is wrong. It is a ``ValueError``.

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
        check_choice(norm_type, NORMS, f"norm_type {norm_type!r} is not a norm")
        self.norm_type = norm_type
        self.strict_single_backward = strict_single_backward
        if not isinstance(eps, float | int) or not eps > 0:
            raise ConfigError(f"eps is {eps!r}; expected a number above 0, below which a norm has vanished.")
        self.eps = eps
        self.thresholds = parse_thresholds(thresholds, "thresholds")
        self._probe = _Probe(self.blocks, self.norm_type, strict_single_backward)
        self._probe.tap.attach()

    def norms(self) -> list[float | None]:
        """The norm of the gradient at each block's output.

        Returns:
            A norm for each block; ``None`` if no gradient arrived.

        Raises:
            RuntimeError: If no gradient has arrived at any block.
        """
        if not self._probe.reached:
            raise RuntimeError(NOTHING_YET)
        return self._probe.norms()

    def gains(self) -> list[float | None]:
        """The gain of each transition between two blocks. Raises as :meth:`norms`.

        Returns:
            Norm at a block over norm at the next block: inf if the latter is below ``eps``; ``None`` if one of the two got
            no gradient.
        """
        return [transition.gain for transition in self._transitions()]

    def log_gains(self) -> list[float | None]:
        """The natural logarithm of each gain. Raises as :meth:`norms`.

        Returns:
            As :meth:`gains`: inf if the later block's norm is below ``eps``, else -inf if the earlier block's norm is.
        """
        return [transition.log_gain for transition in self._transitions()]

    def summary_stats(self) -> dict[str, float | int | None]:
        """The summary of all transitions. Raises as :meth:`norms`.

        Returns:
            ``mean_gain``, ``min_gain``, ``max_gain`` and ``mean_log_gain`` of the values that are not infinite: ``None`` without
            such values, NaN if a value is NaN. Number of transitions by category: ``num_amplifying``, ``num_damping``, ``num_healthy``,
            ``num_vanishing`` (the later block's norm is below ``eps``), ``num_missing`` (no gradient).
        """
        return summary(self._transitions())

    def report(self) -> GainReport:
        """Norms, gains and their summary as plain text; ``rich.print`` shows it in colours."""
        if not self._probe.reached:
            return GainReport(NOTHING_YET)
        return _report(self.norms(), self._transitions(), self.norm_type, self.thresholds)

    def reset(self) -> None:
        """Discard all measurements: before the next backward pass, and after a forward pass that failed."""
        self._probe.reset()

    def close(self) -> None:
        """Remove every hook; measurements stay available. A second call does nothing."""
        self._probe.tap.close()

    def __len__(self) -> int:
        return len(self.blocks)

    def __enter__(self) -> GradientGainMonitor:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _transitions(self) -> list[Transition]:
        return transitions(self.norms(), self.eps, self.thresholds)


class _Probe(BlockGradientProbe):
    """Keeps for each block the norm of the latest backward pass that reached it."""

    def __init__(self, blocks: list[nn.Module], norm: str, is_strict: bool) -> None:
        super().__init__(blocks)
        self._streams = [norm_stream(f"block {index}", norm) for index in range(len(blocks))]
        self._is_strict = is_strict
        self.tap = ModuleTap([self], Gate(), None)
        self.reset()

    def reset(self) -> None:
        self.reached: dict[int, StepAccumulator] = {}
        """The accumulator of the latest backward pass that reached a block, by the block's index."""
        self._current_pass = -1
        self._norms: list[float | None] = []
        """Empty after a new gradient."""
        self.tap.release_calls()
        self.end_micro_batch()

    def norms(self) -> list[float | None]:
        """The norm at each block: one transfer for each backward pass and device, repeated only after a new gradient."""
        if not self._norms:
            values = {accumulator: accumulator.collect().values for accumulator in set(self.reached.values())}
            keys = [stream.number_keys[0] for stream in self._streams]
            self._norms = [values[self.reached[index]][key] if index in self.reached else None for index, key in enumerate(keys)]
        return list(self._norms)

    def observe_gradient(self, index: int, gradient: Tensor, _scale: Scale) -> None:
        if self._current_pass != self.tap.backward_pass():
            self._current_pass, self._accumulator = self.tap.backward_pass(), StepAccumulator(_warn_of_gradient)
        if self._is_strict and self.reached.get(index, self._accumulator) is not self._accumulator:
            raise RuntimeError(
                f"The gradient hook of block {index} fired twice: a second backward pass reached it. Call reset() between "
                "backward passes, or give strict_single_backward=False, which keeps the latest."
            )
        self.reached[index] = self._accumulator
        self._norms = []
        self._accumulator.observe(self._streams[index], counted_elements(gradient))

    def fail_block(self, index: int, output: object, error: Exception) -> None:
        message = f"Block {index}, a {type(output).__name__}: {type(error).__name__}: {error}. It counts as a block without a gradient."
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _checked_blocks(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    expected = "expected a list of modules, a ModuleList or a Sequential, e.g. model.blocks"
    if not isinstance(blocks, Iterable):
        raise ConfigError(f"blocks is a {type(blocks).__name__}; {expected}.")
    checked = list(blocks)
    for index, block in enumerate(checked):
        if not isinstance(block, nn.Module):
            raise ConfigError(f"blocks[{index}] is a {type(block).__name__}; {expected}.")
    return checked


def _warn_of_gradient(stream: Stream, _name: str, observed: str, error: Exception) -> None:
    message = f"Gradient at {stream.site}, {observed}: {type(error).__name__}: {error}. Its norm is NaN."
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _report(norms: Sequence[float | None], transitions: Sequence[Transition], norm_type: str, thresholds: Thresholds) -> GainReport:
    """The norm at each block and the transitions between blocks, in lines of about 80 characters."""
    width = max(2, len(str(len(norms) - 1)))
    low, high = thresholds
    figures = summary(transitions)
    categories = {
        f"Healthy ({low:g} <= gamma <= {high:g}):": figures["num_healthy"],
        f"Amplifying (gamma > {high:g}):": figures["num_amplifying"],
        f"Damping (gamma < {low:g}):": figures["num_damping"],
        "Vanishing (gamma = inf):": figures["num_vanishing"],
        "Missing (no gradient):": figures["num_missing"],
    }
    longest = max(map(len, categories))
    gains = [f"gamma={_number(item.gain)}, log_gamma={_number(item.log_gain)} {MARKS[item.category]}" for item in transitions]
    lines = [
        "Gradient Flow Analysis",
        f"  norm: {norm_type}; blocks: {len(norms)}",
        *("", "Gradient Norms:"),
        *(f"  Block {i:{width}d}: {_number(norm, '.4e')}" for i, norm in enumerate(norms)),
        *("", "Gradient Gains (norm over norm of the next block; marks are heuristics):"),
        *(f"  Transition {i:{width}d} to {i + 1:{width}d}: {text}" for i, text in enumerate(gains)),
        *("", "Summary Statistics:"),
        f"  Mean gain:     {_number(figures['mean_gain'])}",
        f"  Min gain:      {_number(figures['min_gain'])}",
        f"  Max gain:      {_number(figures['max_gain'])}",
        f"  Mean log-gain: {_number(figures['mean_log_gain'])}",
        *("", "Transition Categories:"),
        *(f"  {label:<{longest}} {number}" for label, number in categories.items()),
    ]
    return GainReport("\n".join(lines))


def _number(value: float | None, form: str = "") -> str:
    """Four decimal places, or scientific notation for small and large values.

    >>> list(map(_number, (2.0, 0.00012345, 54321.0, 0.0, None)))
    ['2.0000', '1.2345e-04', '5.4321e+04', '0.0000', 'none']
    """
    if value is None:
        return "none"
    is_plain = value == 0 or not math.isfinite(value) or 1e-2 <= abs(value) < 1e4
    return format(value, form or (".4f" if is_plain else ".4e"))
