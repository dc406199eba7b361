"""The history of a run: its losses and learning rates, and sizes in its first and last record. Causes are judged by it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.health.figures import VARYING
from lightning_module_monitor.health.kept_columns import NO_COLUMN, KeptColumns, Sizes
from lightning_module_monitor.health.learning import NO_CHANGE, SMALL_CHANGE, Learning, learning_of
from lightning_module_monitor.health.losses import Losses
from lightning_module_monitor.keys import Key, is_rate, name_of_rate
from lightning_module_monitor.kinds import LOSS
from lightning_module_monitor.record import is_absent

MIN_RELATIVE_STEPS = 5
"""Number of records with a known relative step below which relative steps are not judged."""
SMALL_RATE = 0.01
"""A learning rate below this part of its largest value has been brought down by a schedule."""
LARGE_STEP = 3.0
"""Steps that can move most weights by more than so many times of their norms keep nothing of them."""
_OF_LOSS = re.compile(r"loss|(?<![a-z])(ce|bce|nll|mse)(?![a-z])")
"""Matches names of logged losses."""

NO_FACTS = Facts()
"""The facts of a run of which only numbers are known: none."""


class Rate(NamedTuple):
    """A learning rate in the records of a run."""

    num_records: int
    largest: float
    first: float


class History:
    """The losses and learning rates of a run, and sizes in its first and last record."""

    def __init__(self) -> None:
        self.losses = Losses()
        self.parts: dict[str, list[float]] = {}
        """Further logged losses by name."""
        self.rates: dict[str, Rate] = {}
        """Learning rates by name."""
        self.relative_steps: list[tuple[int, float]] = []
        """Steps, and the largest part of its norm by which each can move a weight, of the records of which it is known."""
        self.num_gradients, self.num_clipped = 0, 0
        """Number of records with gradients, and number of records whose gradients have the largest size that clipping allows."""
        self.first: dict[str, float] = {}
        """Sizes in the first record: ``gradient``, ``output`` (of the last module), ``first_output`` (of the first module),
        ``input_abs_max``, ``constant_from``, ``same_units``, and ``median_relative_step`` (of the weights)."""
        self.first_norms: dict[str, float] = {}
        """The norms of parameters in the first record, by site."""
        self.num_without_loss = 0
        """Number of records of training without a loss, after the first one with a loss: batches that fill a buffer have none."""
        self.inputs: list[float] = []
        """The largest magnitude of the input in each record that has it."""
        self.targets: list[float] = []
        """The label in each record with labels, if all are the same; else NaN."""
        self.largest_variation = 0.0
        """The largest variation of the output in records in which the input varied."""
        self.gradients_by_optimizer: list[list[float]] = []
        """Under manual optimization, the norm of the gradients of each optimizer's parameters in each record; NaN without any."""
        self.frozen: dict[int, dict[str, float]] = {}
        """Norms of the parameters in a finding about weights that do not move, by the step of the finding."""
        self.was_skipped = False
        """Whether a ``GradScaler`` skipped the step of the newest record."""
        self._last: Sizes | None = None
        self._before: Sizes | None = None
        self._context: Mapping[str, float] = {}
        self.facts = NO_FACTS

    @property
    def last(self) -> Mapping[Key, float]:
        """The values of the last record with parameters."""
        return {} if self._last is None else self._last.values

    @property
    def before(self) -> Mapping[Key, float]:
        """The values of the record with parameters before it."""
        return {} if self._before is None else self._before.values

    def add(self, step: int, numbers: NDArray[np.float64], kept: KeptColumns) -> None:
        """Add the numbers of a record, of which ``kept`` are those of training that it uses. The last number is NaN."""
        is_recorded = ~is_absent(numbers)
        self.was_skipped = bool(numbers[kept.skipped] > 0)
        if not is_recorded[kept.columns].any():
            return
        self._context = {name: float(numbers[column]) for name, column in kept.context.items() if is_recorded[column]}
        self._add_context(step)
        gradients = numbers[kept.gradients][is_recorded[kept.gradients]]
        has_root = kept.root != NO_COLUMN and is_recorded[kept.root]
        norm = float(numbers[kept.root]) if has_root else math.hypot(*gradients)
        has_gradient = len(gradients) > 0 or norm > 0
        if not (has_gradient or is_recorded[kept.parameters].any()):
            return
        self._before, self._last = self._last, Sizes(kept, numbers)
        self.num_gradients += has_gradient
        self.num_clipped += 0 < kept.least_clipped <= norm
        if self.facts.is_manual and len(kept.gradients_by_optimizer) > 1:
            sizes = [numbers[columns] for columns in kept.gradients_by_optimizer]
            recorded = [size[~is_absent(size)].tolist() for size in sizes]
            self.gradients_by_optimizer.append([math.hypot(*size) if size else math.nan for size in recorded])
        relative_steps = kept.relative_steps(numbers)
        relative_step = float(np.fmax.reduce(relative_steps, initial=math.nan))
        if not math.isnan(relative_step):
            self.relative_steps.append((step, relative_step))
        if not self.first:
            outputs = numbers[kept.outputs][is_recorded[kept.outputs]].tolist()
            self._add_first(self._last, norm, outputs)
            if not math.isnan(relative_step) and kept.is_adam.all():  # steps of others become smaller with the gradients
                self.first["median_relative_step"] = float(np.nanmedian(relative_steps))

    def _add_first(self, sizes: Sizes, gradient: float, outputs: Sequence[float]) -> None:
        """Keep the sizes of the first record with parameters."""
        norms = ((key.site, value) for key, value in sizes.values.items() if (key.kind, key.statistic) == ("parameter", "norm"))
        self.first_norms = dict(norms)
        of_context = ("input_abs_max", "constant_from", "same_units")
        self.first = {name: self._context[name] for name in of_context if name in self._context}
        self.first["gradient"] = gradient
        if outputs:
            self.first |= {"output": outputs[-1], "first_output": outputs[0]}

    def _add_context(self, step: int) -> None:
        """Add the losses, rates, inputs and targets of a record."""
        if LOSS in self._context:
            self.losses.add(step, self._context[LOSS])
        elif self.losses:
            self.num_without_loss += 1
        if "input_abs_max" in self._context:
            self.inputs.append(self._context["input_abs_max"])
        for name, value in self._context.items():
            if _OF_LOSS.search(name) and name != LOSS:
                self.parts.setdefault(name, []).append(value)
            if is_rate(name):
                num_records, largest, first = self.rates.get(name, (0, 0.0, value))
                self.rates[name] = Rate(num_records + 1, max(largest, value), first)
        if self._context.get("input_variation", 0.0) > VARYING:
            self.largest_variation = max(self.largest_variation, self._context.get("output_variation", math.inf))
        if (target := self._context.get("target_min")) is not None:
            self.targets.append(target if target == self._context.get("target_max") else math.nan)

    @property
    def has_no_rate(self) -> bool:
        """Whether every learning rate was 0 in all records."""
        return bool(self.rates) and all(rate.largest == 0 for rate in self.rates.values())

    # The loss

    @property
    def loss(self) -> float:
        """The loss of the newest record; NaN without one."""
        return self.newest(LOSS)

    @property
    def rise(self) -> float:
        """See :attr:`Losses.rise`; NaN under manual optimization."""
        return math.nan if self.facts.is_manual else self.losses.rise

    @property
    def learning(self) -> Learning:
        """Whether the loss falls, or the reason why that is not known."""
        learning = learning_of(self.losses, self.facts, self.max_relative_change)
        return "stopped" if learning == "stalled" and self.is_stopped_by_schedule else learning

    def newest(self, name: str) -> float:
        """A value of the context in the newest record; NaN without one."""
        return self._context.get(name, math.nan)

    # Sizes

    def rate_of(self, site: str) -> float:
        """The learning rate of a parameter in the newest record; NaN where it is not known."""
        parameter = self.facts.parameters.get(site)
        return math.nan if parameter is None else self.newest(name_of_rate(parameter.group))

    def has_decayed(self, site: str) -> bool:
        """Whether the learning rate of a parameter is below a millionth of its largest rate in this run."""
        parameter = self.facts.parameters.get(site)
        rate = None if parameter is None else self.rates.get(name_of_rate(parameter.group))
        return rate is not None and 0 < self.rate_of(site) < 1e-6 * rate.largest

    def sites_of(self, rate: str) -> list[str]:
        """The trained parameters with this learning rate (its name) whose last gradient was not 0."""
        parameters = self.facts.parameters.items()
        sites = [site for site, facts in parameters if facts.training == "trained" and name_of_rate(facts.group) == rate]
        return [site for site in sites if self.gradient_of(site) > 0]

    @property
    def records_each_gradient(self) -> bool:
        """Whether the gradients of parameters are recorded, if any are, and not those of whole modules alone."""
        return not self.num_gradients or any(key.kind == "gradient" for key in self.last)

    def gradient_of(self, site: str) -> float:
        """The norm of the gradient of a parameter in the last record; NaN without one."""
        return self.last.get(Key("gradient", site, "norm"), math.nan)

    @property
    def has_small_outputs(self) -> bool:
        """Whether a regression began with outputs much smaller than the root of its loss, so that its targets are far larger."""
        is_large = not self.facts.is_classification and self.losses.first > 100
        return is_large and self.first.get("output", math.nan) < 0.1 * math.sqrt(self.losses.first)

    @property
    def has_unscaled_input(self) -> bool:
        """Whether the input had values far from 1 in the first record, or none that are not."""
        size = self.first.get("input_abs_max", math.nan)
        return size > 50 or 0 < size < 0.02

    @property
    def explodes_from_start(self) -> bool:
        """Whether the first gradient was more than 1000 times the first loss, or the first output 1000 times the input."""
        sizes = {"output": 1.0, "input_abs_max": 1.0} | self.first
        is_large_output = sizes["output"] > 1e3 * max(sizes["input_abs_max"], 1.0)
        return is_large_output or self.first.get("gradient", math.nan) > 1e3 * max(abs(self.losses.first), 1.0)

    @property
    def vanishes_from_start(self) -> bool:
        """Whether the first output of the last module was not 0, and less than a 10,000th of the input, or of 1."""
        return 0 < self.first.get("output", 0.0) < 1e-4 * min(self.first.get("input_abs_max", 1.0), 1.0)

    @property
    def explodes_in_first_module(self) -> bool:
        """Whether the first output of the first module was more than 1000 times the input."""
        return self.first.get("first_output", 0.0) > 1e3 * max(self.first.get("input_abs_max", math.inf), 1.0)

    @property
    def max_relative_change(self) -> float:
        """The largest part of its norm by which all steps together can move a weight; NaN if not known."""
        return self._max_relative_change_since(0)

    def _max_relative_change_since(self, begin: int) -> float:
        known = [(step, relative_step) for step, relative_step in self.relative_steps if step >= begin]
        between = ((step - before) * max(earlier, later) for (before, earlier), (step, later) in itertools.pairwise(known))
        return known[0][1] + sum(between) if known else math.nan

    @property
    def frozen_part(self) -> float:
        """The part of the elements of all parameters that require no gradient."""
        sizes = [(parameter.numel, parameter.training == "frozen") for parameter in self.facts.parameters.values()]
        return sum(numel for numel, is_frozen in sizes if is_frozen) / max(sum(numel for numel, _is_frozen in sizes), 1)

    def norm_of(self, site: str) -> float:
        """The norm of a parameter in the last record; NaN without one."""
        return self.last.get(Key("parameter", site, "norm"), math.nan)

    @property
    def has_large_steps(self) -> bool:
        """Whether the first recorded step could move most weights by several times of their norms."""
        return len(self.relative_steps) >= MIN_RELATIVE_STEPS and LARGE_STEP < self.first.get("median_relative_step", math.nan) < math.inf

    @property
    def is_stopped_by_schedule(self) -> bool:
        """Whether all learning rates have come down so far that the steps of the last two thirds of the records can move no weight."""
        begin = self.losses.steps[-2 * (len(self.losses) // 3)]
        have_come_down = [self.newest(name) < SMALL_RATE * rate.largest for name, rate in self.rates.items()]
        return bool(have_come_down) and all(have_come_down) and self._max_relative_change_since(begin) < NO_CHANGE

    @property
    def is_clipped(self) -> bool:
        """Whether clipping limits every step, and makes all steps together too small: with a gradient of size 1 they would suffice."""
        is_at_limit = self.facts.clip > 0 and self.num_clipped > 0.9 * self.num_gradients
        return is_at_limit and self.max_relative_change < SMALL_CHANGE <= self.max_relative_change / self.facts.clip

    # A checkpoint

    def state(self) -> dict[str, Any]:
        """The state in plain numbers and texts."""
        return {
            "steps": [*self.losses.steps],
            "losses": [*self.losses.values],
            "parts": {name: [*losses] for name, losses in self.parts.items()},
            "rates": {name: tuple(rate) for name, rate in self.rates.items()},
            "first": dict(self.first),
            "relative_steps": [*self.relative_steps],
            "first_norms": dict(self.first_norms),
            "targets": [*self.targets],
            "inputs": [*self.inputs],
            "num_without_loss": self.num_without_loss,
            "largest_variation": self.largest_variation,
            "gradients_by_optimizer": [*self.gradients_by_optimizer],
            "frozen": dict(self.frozen),
            "clipped": (self.num_gradients, self.num_clipped),
        }

    def load(self, content: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state`."""
        self.losses = Losses([*content.get("steps", ())], [*content.get("losses", ())])
        self.parts = {name: [*losses] for name, losses in content.get("parts", {}).items()}
        self.rates = {name: Rate(*rate) for name, rate in content.get("rates", {}).items()}
        self.first = dict(content.get("first", {}))
        self.relative_steps = [*content.get("relative_steps", ())]
        self.first_norms = dict(content.get("first_norms", {}))
        self.targets = [*content.get("targets", ())]
        self.inputs, self.num_without_loss = [*content.get("inputs", ())], content.get("num_without_loss", 0)
        self.largest_variation = content.get("largest_variation", 0.0)
        self.gradients_by_optimizer = [*content.get("gradients_by_optimizer", ())]
        self.frozen = {step: dict(norms) for step, norms in content.get("frozen", {}).items()}
        self.num_gradients, self.num_clipped = content.get("clipped", (0, 0))
