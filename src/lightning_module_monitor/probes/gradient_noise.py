"""Gradient noise: the squared norm of each micro-batch's own gradient, from hooks on parameters, and of the gradient of the whole step."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_module_monitor.distributed.ranks import Ranks
from lightning_module_monitor.errors import MonitorError
from lightning_module_monitor.kernels.elements import strided
from lightning_module_monitor.kernels.table import Scale
from lightning_module_monitor.kernels.torch_kernel import widest
from lightning_module_monitor.model.hooks import HookSet, is_capturing, is_tracing, register_gradient_hook, requires_gradient
from lightning_module_monitor.model.names import ParameterSite
from lightning_module_monitor.probes.base import Probe, Selected, StepTools
from lightning_module_monitor.probes.tap import ModuleTap
from lightning_module_monitor.record import UNDEFINED, NumbersOfStep, is_undefined
from lightning_module_monitor.statistics.functions import Value
from lightning_module_monitor.statistics.noise_scale import NoiseAndSignal, largest_over_median, noise_and_signal
from lightning_module_monitor.statistics.precision import divided_by_scale
from lightning_module_monitor.statistics.stream import Stream

KIND = "gradient_noise"

VALUES = ("noise", "signal", "scale", "largest", "largest_rank", "largest_micro_batch")
"""Names of the values of a site."""

_Index: TypeAlias = tuple[int, int]
"""A micro-batch of the step, and the rank that ran it."""


@dataclass(frozen=True, eq=False)
class NoiseSites:
    """The modules whose gradient noise is recorded, each with the parameters inside, whose gradients count as one."""

    parameters: Sequence[ParameterSite]
    members: Mapping[str, Sequence[int]]
    """Indices of the parameters inside each module, by the module's name."""
    prefix: str
    _streams: dict[tuple[int, int], dict[str, Stream]] = field(default_factory=dict, init=False)

    def keys(self) -> list[str]:
        """The keys of a step."""
        return [key for stream in self.recorded_streams.values() for key in stream.keys.values()]

    @functools.cached_property
    def recorded_streams(self) -> dict[str, Stream]:
        """The streams of what is recorded, by site; the outputs are in the order of :data:`VALUES`."""
        return {site: Stream(KIND, site, {name: Value() for name in VALUES}, prefix=self.prefix) for site in self.members}

    # What ranks exchange, and no record has: each stream has a value of each rank.

    @functools.cached_property
    def step_streams(self) -> dict[str, Stream]:
        """The streams of the squared norm of the whole step's gradient, by site: the same on all ranks."""
        return {site: Stream(KIND, site, {"square": Value("max")}, prefix=self.prefix) for site in self.members}

    def micro_batch_streams(self, number: int, num_ranks: int) -> dict[str, Stream]:
        """The streams of a micro-batch by site: of the squared norm of its gradient, and under ``""`` of its number of samples."""
        if (number, num_ranks) not in self._streams:
            outputs = {of_rank(number, rank): Value("sum") for rank in range(num_ranks)}
            streams = {site: Stream(KIND, site, outputs, prefix=self.prefix) for site in ("", *self.members)}
            self._streams[number, num_ranks] = streams
        return self._streams[number, num_ranks]

    def streams(self, num_micro_batches: int, num_ranks: int) -> list[Stream]:
        """All streams of a step with so many micro-batches."""
        of_micro_batches = (self.micro_batch_streams(number, num_ranks).values() for number in range(num_micro_batches))
        return [*self.step_streams.values(), *itertools.chain.from_iterable(of_micro_batches)]


def of_rank(number: int, rank: int) -> str:
    """The name of what a rank has measured in a micro-batch."""
    return f"micro_batch_{number}_rank_{rank}"


@dataclass(eq=False)
class NoiseState:
    """State that lives from step to step."""

    averages: dict[str, NoiseAndSignal] = field(default_factory=dict)
    """By site."""
    in_parts: set[str] = field(default_factory=set)
    """Parameters whose gradient arrives in several parts in one backward pass: shared weights under reentrant checkpointing."""
    loss_divisor: int | None = None
    """Divisor of the loss of each micro-batch; ``None`` for the number of micro-batches in the step."""
    trained: Selected = None
    """The parameters that an optimizer has; ``None`` for all. Nothing clears the gradients of others."""

    def state(self) -> dict[str, list[float]]:
        """The averages, for a checkpoint."""
        return {site: [*average] for site, average in self.averages.items()}

    def load(self, averages: Mapping[str, Sequence[float]]) -> None:
        """Continue with the averages of a :meth:`state`."""
        self.averages = {site: NoiseAndSignal(*numbers) for site, numbers in averages.items()}


class GradientNoiseProbe(Probe):
    """Measures the gradients of one step.

    Args:
        sites: What is measured.
        tools: The tools of the step.
        tap: Has the scale of the loss, and whether gradients that arrive are those of the loss.
        ranks: The ranks that train together; ``None`` for one process.
        state: What lives from step to step.
    """

    def __init__(self, sites: NoiseSites, tools: StepTools, tap: ModuleTap, ranks: Ranks | None, state: NoiseState) -> None:
        self._sites = sites
        self._tools = tools
        self._accumulator = tools.accumulator
        self._tap = tap
        self._state = state
        self._rank, self._num_ranks = (0, 1) if ranks is None else (ranks.index, ranks.size)
        self._hooks = HookSet()
        self._parameters = [site.registered() for site in sites.parameters]  # also those of lazy layers
        self._number = 0
        self._size: float | Tensor | None = None
        """Its number of samples; ``None`` while it is not known."""
        self._norms: dict[torch.device, Tensor] = {}
        """Norms of its gradients, shape ``(parameters,)``, by device; 0 where none has arrived."""
        self._arrived: set[int] = set()
        """Indices of the parameters whose gradient has arrived in it."""
        self._parts: dict[int, Tensor] = {}
        """Sums of the parts of gradients that arrive in several."""
        self._arrived_in_step: set[int] = set()
        self._leftovers: dict[int, Tensor] = {}
        """NaN for parameters that had a gradient before the step, which would be taken for one of its micro-batches; else 0."""
        self._whole_norms: dict[torch.device, Tensor] = {}
        """Norms of the gradients of the whole step, by device."""
        self._observed: set[int] = set()
        """Indices of the parameters whose gradient of the whole step was observed."""
        self._has_failed = False
        self._pairs: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def attach(self) -> None:
        """Register a hook on each parameter that is trained."""
        for index, parameter in enumerate(self._parameters):
            if parameter is not None and self._is_trained(parameter):
                self._hooks.add(register_gradient_hook(parameter, functools.partial(self._arrive, index)))

    def count_samples(self, number: float | Tensor) -> None:
        """Add samples to the micro-batch that runs."""
        self._size = number if self._size is None else self._size + number

    # Gradients

    def _arrive(self, index: int, gradient: Tensor) -> None:
        """The hook on a parameter. It returns nothing: what a tensor hook returns replaces the gradient."""
        is_observed = self._tap.counts_gradients and self._tools.gate.observer is self._accumulator
        if is_tracing() or (gradient.is_cuda and is_capturing()) or not is_observed:
            return
        try:
            with torch.no_grad():
                self._measure(index, gradient)
        except MonitorError:
            raise
        except Exception as error:
            self._fail(error)

    def _measure(self, index: int, gradient: Tensor) -> None:
        """Measure the gradient of a parameter, or add a further part of it."""
        parameter, name = self._parameters[index], self._sites.parameters[index].name
        assert parameter is not None
        norm, before = self._buffer(self._norms, gradient.device)[index], parameter.grad
        # A gradient that was cleared since, as a discriminator's is after the generator's backward pass, is no part of the step's.
        if index not in self._arrived or before is None:
            if before is not None and index not in self._arrived_in_step:
                self._leftovers[index] = zero_or_nan(norm_of(before))
            self._arrived.add(index)
            self._arrived_in_step.add(index)
            norm.copy_(norm_of(gradient))
            if name in self._state.in_parts:
                self._parts[index] = gradient.detach().clone()
        elif index in self._parts:
            self._parts[index] = self._parts[index] + gradient
            norm.copy_(norm_of(self._parts[index]))
        else:
            # The first time: .grad has the first part, unless an earlier micro-batch has added to it.
            self._state.in_parts.add(name)
            self._parts[index] = before + gradient
            is_first = (norm_of(before) - norm).abs() <= 1e-9 * norm
            norm.copy_(torch.where(is_first, norm_of(self._parts[index]), math.nan))

    def observe_gradients(self, only: Selected, scale: Scale) -> None:
        """Observe the gradients of the whole step, of some parameters or of all: before clipping, and of all ranks together."""
        for index, parameter in enumerate(self._parameters):
            if parameter is None or index in self._observed or not (only is None or id(parameter) in only):
                continue
            gradient = parameter.grad
            self._observed.add(index)
            if not self._is_trained(parameter):
                continue
            if gradient is None:
                if index in self._arrived_in_step:  # it was used and cleared before, as by an optimizer that steps in the backward pass
                    self._buffer(self._whole_norms, parameter.device)[index] = math.nan
                continue
            norm = divided_by_scale(norm_of(gradient), scale)
            if index not in self._arrived_in_step and self._num_ranks == 1:
                norm = zero_or_nan(norm)  # it is of no micro-batch of this step
            elif index in self._leftovers:
                norm = norm + self._leftovers[index]
            self._buffer(self._whole_norms, gradient.device)[index] = norm

    # Phases

    def end_micro_batch(self) -> None:
        """Add up the squares of the micro-batch's gradients."""
        if self._arrived:
            name = of_rank(self._number, self._rank)
            streams = self._sites.micro_batch_streams(self._number, self._num_ranks)
            self._add_squares(streams, name, self._norms, self._tap.scale)
            if self._size is None:
                expected = "monitor_context('batch_size', len(batch), 'sum') in training_step; a Trainer's is callback.monitor"
                self._warn("the number of samples of a micro-batch is not known", expected)
            else:
                self._accumulator.add_result(streams[""], name, self._size, 1)
        self._number += 1
        for norms in self._norms.values():
            norms.zero_()
        self._arrived.clear()
        self._parts.clear()
        self._size = None

    def finish(self) -> None:
        """End a micro-batch that was not ended, and add up the squares of the step's gradients."""
        if self._arrived:
            self.end_micro_batch()
        if not self._arrived_in_step <= self._observed:
            self._has_failed = True
            self._warn("the gradient of the whole step was not observed", "monitor_gradients(), or before clipping with before_clip=True")
        if self._arrived_in_step or self._has_failed:
            self._add_squares(self._sites.step_streams, "square", self._whole_norms, None)

    def close(self) -> None:
        """Remove the hooks, and release all tensors."""
        self._hooks.close()
        self._parts.clear()
        self._parameters = [None] * len(self._parameters)

    def _add_squares(self, streams: Mapping[str, Stream], name: str, norms: Mapping[torch.device, Tensor], scale: Scale) -> None:
        """Add the squares of norms, without a scale of the loss, to the streams of all sites; NaN after an error."""
        if self._has_failed:
            norms = {torch.device("cpu"): torch.full((len(self._parameters),), math.nan, dtype=torch.float64, device="cpu")}
        for device, on_device in norms.items():
            squares = divided_by_scale(on_device, scale).square()
            parameters, sites = self._pairs_on(device)
            sums = squares.new_zeros(len(self._sites.members)).index_add_(0, sites, squares[parameters])
            for site, total in zip(self._sites.members, sums.unbind(), strict=True):
                self._accumulator.add_result(streams[site], name, total, 1)

    # After the step, on the host

    def derive(self, numbers: NumbersOfStep) -> None:
        """Replace squared norms by noise, signal and what follows from them."""
        if self._accumulator.is_lost:
            return
        squares, sizes = self._exchanged(numbers)
        for site, stream in self._sites.step_streams.items():
            whole = numbers.pop(stream.keys["square"])
            if whole is not None and squares[site]:
                keys = self._sites.recorded_streams[site].series.values()
                numbers.write(numbers.columns.add(keys), self._finished(site, squares[site], sizes, whole))

    def _exchanged(self, numbers: NumbersOfStep) -> tuple[dict[str, dict[_Index, float]], dict[_Index, float]]:
        """Squared norms by site, and numbers of samples, each by micro-batch and rank; taken out of the numbers."""
        by_site: dict[str, dict[_Index, float]] = {site: {} for site in ("", *self._sites.members)}
        for number in itertools.count():
            streams = self._sites.micro_batch_streams(number, self._num_ranks)
            keys = [(site, rank, key) for site, stream in streams.items() for rank, key in enumerate(stream.keys.values())]
            taken = [(site, rank, value) for site, rank, key in keys if (value := numbers.pop(key)) is not None]
            if not taken and number >= self._number:  # other ranks may have had more micro-batches
                break
            for site, rank, value in taken:
                by_site[site][number, rank] = value
        sizes = by_site.pop("")
        return by_site, sizes

    def _finished(self, site: str, squares: Mapping[_Index, float], sizes: Mapping[_Index, float], whole: float) -> list[float]:
        """The values of a site, in the order of :data:`VALUES`."""
        num = len(squares)
        # The gradient of a micro-batch arrives divided as its loss is; the step's is the sum of these, averaged over the ranks.
        divisor = self._state.loss_divisor or num / self._num_ranks
        undivided = np.array([*squares.values()]) * divisor**2
        known = [sizes.get(index, UNDEFINED) for index in squares]
        estimate = noise_and_signal(undivided, np.array(known), whole * (divisor * self._num_ranks / num) ** 2)
        scale = UNDEFINED if is_undefined(estimate.noise) else math.nan
        if all(map(math.isfinite, estimate)):
            average = self._state.averages[site] = estimate.moving_average(self._state.averages.get(site))
            scale = average.noise_scale()
        index, ratio = largest_over_median(undivided)
        number, rank = [*squares][index]
        return [estimate.noise, estimate.signal, scale, ratio, float(rank), float(number)]

    # Inside

    def _is_trained(self, parameter: Tensor) -> bool:
        trained = self._state.trained
        return requires_gradient(parameter) and (trained is None or id(parameter) in trained)

    def _buffer(self, buffers: dict[torch.device, Tensor], device: torch.device) -> Tensor:
        """The norms of a device, in float64 where it has it."""
        if device not in buffers:
            buffers[device] = torch.zeros(len(self._parameters), dtype=widest(device), device=device)
        return buffers[device]

    def _pairs_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The index of the parameter and that of the site for each parameter inside a site, on a device."""
        if device not in self._pairs:
            pairs = [(index, site) for site, members in enumerate(self._sites.members.values()) for index in members]
            self._pairs[device] = tuple(torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2).T.to(device))
        return self._pairs[device]

    def _warn(self, what: str, expected: str) -> None:
        message = f"gradient_noise: {what}, and the values are NaN; expected monitor.{expected}."
        self._tools.reporter.log_once(message, logging.WARNING)

    def _fail(self, error: Exception) -> None:
        """Report a gradient that cannot be read: the values of this step are NaN."""
        self._has_failed = True
        self._tools.reporter.not_taken("gradient noise", error, self._accumulator)


def norm_of(gradient: Tensor) -> Tensor:
    """The norm of a gradient of any layout and dtype, shape ``()``, in float64 where its device has it."""
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.detach().coalesce().values()  # entries of the same index add up
    values = strided(gradient).detach()
    norm: Tensor = torch.linalg.vector_norm(values.abs() if values.is_complex() else values, dtype=widest(values.device))
    return norm


def zero_or_nan(norm: Tensor) -> Tensor:
    """0 where a norm is 0, else NaN."""
    return torch.where(norm == 0, 0.0, math.nan)
