"""The history of a run: its losses and learning rates, and sizes in its first and last record. Causes are judged by it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.alerts import has_fallen
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.health.figures import VARYING
from lightning_module_monitor.health.kept_columns import NO_COLUMN, KeptColumns, Sizes
from lightning_module_monitor.health.loss_tests import (
    A_GOOD_PART,
    A_LITTLE,
    FALLS,
    excludes_fall,
    fell_at_once,
    may_have_fallen_at_once,
    rank_test,
)
from lightning_module_monitor.keys import Key, is_rate, name_of_rate
from lightning_module_monitor.kinds import LOSS
from lightning_module_monitor.record import is_absent

MIN_MOVEMENTS = 5
"""Number of records of which it is known how far their steps can move a weight, below which that is not judged."""
MIN_LOSSES = 10
"""Number of losses below which a run is not judged by them."""
MIN_STEPS, MIN_STEPS_OF_ANY_SIZE = 100, 20
"""Number of steps below which a loss that does not fall is not judged, if the steps are small, and whatever their size."""
MIN_FOR_THIRDS = 15
"""Number of losses from which the last third is compared with the first; below it are halves."""
MIN_IN_THIRD = 4
"""Number of losses in a third of the records below which a loss is not judged to have stalled."""
SMALL_REACH, NO_REACH = 0.05, 0.02
"""The largest part of its norm by which all steps together move a weight: below the first, steps are too small if the loss does not fall;
below the second, if it falls by less than ``A_LITTLE``."""
A_LARGE_PART = 1 / 3
"""A loss that falls within the first records alone falls by more than this part of its first value where a network learns. It falls by less
where its outputs only shrink to the mean of its targets."""
CONVERGED = 1 / 3
"""A loss below this part of its first value has converged where it stalls."""
NUM_FIRST = 5
"""Number of losses that are the start of a loss that diverges."""
HARDLY = 0.03
"""A loss that has fallen by less than this part of its start has hardly fallen."""
CHANCE = 0.5
"""A cross-entropy below it begins better than chance, which is log 2 or more: the weights are trained."""
NEAR_CHANCE = 0.95
"""A cross-entropy above this part of the logarithm of the number of classes is not better than guessing."""
SMALL_RATE = 0.01
"""A learning rate below this part of its largest value has been brought down by a schedule."""
LARGE_STEP = 3.0
"""Steps that can move most weights by more than so many times of their norms keep nothing of them."""
_OF_LOSS = re.compile(r"loss|(?<![a-z])(ce|bce|nll|mse)(?![a-z])")
"""Names of what a module logs as a loss or a part of it."""

NO_FACTS = Facts()
"""The facts of a run of which only numbers are known: none."""

Learning = Literal[
    "falls", "hardly", "above", "not finite", "chance", "stalled", "stopped", "at once", "flat", "still", "settled", "unclear",
    "too few", "short", "none", "manual",
]  # fmt: skip


class Rate(NamedTuple):
    """A learning rate in the records of a run."""

    num_records: int
    largest: float
    first: float


class History:
    """The losses and learning rates of a run, and sizes in its first and last record."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        """The steps of the losses."""
        self.losses: list[float] = []
        self.parts: dict[str, list[float]] = {}
        """What a module logs as a loss, by name."""
        self.rates: dict[str, Rate] = {}
        """Learning rates by name."""
        self.movements: list[tuple[int, float]] = []
        """Steps, and the largest part of its norm by which each can move a weight, of the records of which it is known."""
        self.num_gradients, self.num_clipped = 0, 0
        """Number of records with gradients, and number of records whose gradients have the largest size that clipping allows."""
        self.first: dict[str, float] = {}
        """Of the first record ``gradient``, ``output`` (size of the last module's), ``first_output`` (of the first module's),
        ``input_abs_max``, ``constant_from``, ``same_units``, and ``median_movement`` (of the weights)."""
        self.first_norms: dict[str, float] = {}
        """The norms of parameters in the first record, by site."""
        self.num_without_loss = 0
        """Number of records of training without a loss."""
        self.inputs: list[float] = []
        """Of each record the largest magnitude of the input, if it is known."""
        self.targets: list[float] = []
        """Of each record with labels the label, if they were all the same; else NaN."""
        self.largest_variation = 0.0
        """The largest variation of the output in records in which the input varied."""
        self.gradients_by_optimizer: list[list[float]] = []
        """Under manual optimization, of each record the norm of the gradients of each optimizer's parameters; NaN without any."""
        self.frozen: dict[int, dict[str, float]] = {}
        """The norms of parameters that a finding is about because they did not move, by the step of the finding."""
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
        """The values of the record before."""
        return {} if self._before is None else self._before.values

    def add(self, step: int, numbers: NDArray[np.float64], kept: KeptColumns) -> None:
        """Add the numbers of a record, of which ``kept`` are those of training that it uses. The last number is NaN."""
        is_there = ~is_absent(numbers)
        self.was_skipped = bool(numbers[kept.skipped] > 0)
        if not is_there[kept.columns].any():
            return
        self._context = {name: float(numbers[column]) for name, column in kept.context.items() if is_there[column]}
        self._note_context(step)
        norms = numbers[kept.gradients][is_there[kept.gradients]]
        has_root = kept.root != NO_COLUMN and is_there[kept.root]
        norm = float(numbers[kept.root]) if has_root else math.hypot(*norms)
        if len(norms) or norm > 0 or is_there[kept.parameters].any():
            self._before, self._last = self._last, Sizes(kept, numbers)
            movements = kept.movements(numbers)
            movement = float(np.fmax.reduce(movements, initial=math.nan))
            self.movements += [] if math.isnan(movement) else [(step, movement)]
            self.num_gradients += len(norms) > 0 or norm > 0
            self.num_clipped += 0 < kept.least_clipped <= norm
            if self.facts.is_manual and len(kept.gradients_by_optimizer) > 1:
                sizes = [numbers[columns] for columns in kept.gradients_by_optimizer]
                there = [size[~is_absent(size)].tolist() for size in sizes]
                self.gradients_by_optimizer.append([math.hypot(*size) if size else math.nan for size in there])
            if not self.first:
                norms_of = self._last.values.items()
                self.first_norms = {key.site: value for key, value in norms_of if (key.kind, key.statistic) == ("parameter", "norm")}
                outputs = numbers[kept.outputs][is_there[kept.outputs]].tolist()
                self.first = {
                    name: self._context[name] for name in ("input_abs_max", "constant_from", "same_units") if name in self._context
                }
                if not math.isnan(movement) and kept.is_adam.all():  # steps of others become smaller with the gradients
                    self.first["median_movement"] = float(np.nanmedian(movements))
                self.first |= {"gradient": norm, **({"output": outputs[-1], "first_output": outputs[0]} if outputs else {})}

    def _note_context(self, step: int) -> None:
        """Note the losses, rates, inputs and targets of a record."""
        if LOSS in self._context:
            self.steps.append(step)
            self.losses.append(self._context[LOSS])
        else:
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
    def first_loss(self) -> float:
        """The first finite loss; NaN without one."""
        return next(filter(math.isfinite, self.losses), math.nan)

    @property
    def largest_loss(self) -> float:
        """The largest loss; infinite if one was not finite."""
        return max(self.losses, default=math.nan) if all(map(math.isfinite, self.losses)) else math.inf

    @property
    def loss(self) -> float:
        """The loss of the newest record; NaN without one."""
        return self.newest(LOSS)

    @property
    def ends(self) -> tuple[list[float], list[float]]:
        """The finite losses of the first and the last third of the records; of halves where they are few."""
        losses = [*filter(math.isfinite, self.losses)]
        num = len(losses) // (2 if len(losses) < MIN_FOR_THIRDS else 3)
        return losses[:num], losses[len(losses) - num :]

    @property
    def learning(self) -> Learning:
        """Whether the loss falls, or the reason why that is not known."""
        unjudged = self._unjudged()
        if unjudged is not None:
            return unjudged
        before, after = self.ends
        if self.has_negative_losses:
            return self._learning_by_ranks(before, after)
        is_chance = np.median(after) > NEAR_CHANCE * math.log(self.facts.num_classes or math.inf)
        if rank_test(before, after) > FALLS or fell_at_once(self.first_loss, after, A_LARGE_PART):
            return "chance" if is_chance else self._fall_to(float(np.median(after)))
        if fell_at_once(self.first_loss, after) and not is_chance:
            return "at once"
        if not excludes_fall(before, after, A_GOOD_PART) or may_have_fallen_at_once(self.first_loss, after):
            return "chance" if is_chance else "unclear"
        return self._without_fall(before)

    def _without_fall(self, before: Sequence[float]) -> Learning:
        """The result for losses of which a fall is excluded."""
        if self.is_very_short or (self.is_short and self.reach < SMALL_REACH):
            return "short"
        return "settled" if self.facts.is_classification and np.median(before) < CHANCE else "flat"

    def _learning_by_ranks(self, before: Sequence[float], after: Sequence[float]) -> Learning:
        """The result for losses that have no ratio to the first one."""
        if rank_test(before, after) > FALLS:
            is_finite, last = math.isfinite(self.losses[-1]), float(np.median(after))
            return "not finite" if not is_finite else "above" if last > self.first_loss else "falls"
        is_at_once = float(np.mean(after)) + 4 * float(np.std(after)) < self.first_loss and max(after) < self.first_loss
        return "falls" if is_at_once else "unclear"

    def _fall_to(self, last: float) -> Learning:
        """What a fall by ranks amounts to: none where the loss only came down from a peak, or is lost in the end."""
        if not math.isfinite(self.losses[-1]):
            return "not finite"
        if last > self.first_loss:
            return "above"
        if last > (1 - HARDLY) * max(self.first_loss, float(np.median(self.ends[0]))):
            return "hardly"
        return "falls" if self.stalled_since is None else "stopped" if self.is_stopped_by_schedule else "stalled"

    @property
    def stalled_since(self) -> int | None:
        """The step from which on the loss does not fall any more, far above what a converged run reaches; ``None`` if it falls.

        The last third of the records is compared with the third before it, so the loss may have stalled earlier.
        """
        records = [(step, loss) for step, loss in zip(self.steps, self.losses, strict=True) if math.isfinite(loss)]
        num = len(records) // 3
        if num < MIN_IN_THIRD:
            return None
        before, after = ([loss for _step, loss in part] for part in (records[-2 * num : -num], records[-num:]))
        is_low = np.median(after) < CONVERGED * self.first_loss
        return None if is_low or not excludes_fall(before, after, A_LITTLE) else records[-2 * num][0]

    def _unjudged(self) -> Learning | None:
        """The result for the loss that needs no rank test, or the reason why there is no test; ``None`` if it is to be tested."""
        before, after = self.ends
        is_enough = sum(map(math.isfinite, self.losses)) >= MIN_LOSSES
        if is_enough and self.reach < NO_REACH:
            low, high = float(np.median(after)), float(np.median(before))
            if not (rank_test(before, after) > FALLS if self.has_negative_losses else has_fallen(high, low, A_LITTLE)):
                return "short" if self.is_short else "still"
        if self.facts.is_manual:
            return "manual"
        return None if is_enough else "too few" if self.losses else "none"

    @property
    def is_short(self) -> bool:
        """Whether the run has so few steps that small ones need not show in the loss, as those of a warm-up."""
        return bool(self.steps) and self.steps[-1] - self.steps[0] < MIN_STEPS

    @property
    def is_very_short(self) -> bool:
        """Whether the run has so few steps that a loss need not fall in them."""
        return bool(self.steps) and self.steps[-1] - self.steps[0] < MIN_STEPS_OF_ANY_SIZE

    @property
    def has_negative_losses(self) -> bool:
        """Whether a loss was below 0, or the first one 0: then a ratio to the first loss means nothing."""
        return any(loss < 0 for loss in self.losses) or self.first_loss == 0

    @property
    def rise(self) -> float:
        """The newest loss relative to the largest of the first losses; 0 if the rise is within the noise, or not known.

        NaN under manual optimization, and for losses below 0: a loss that crosses 0 has no factor by which it grows.
        """
        if self.facts.is_manual or min(self.losses, default=0.0) < 0:
            return math.nan
        first, newest = self.losses[:NUM_FIRST], self.loss
        is_known = len(self.losses) > NUM_FIRST and all(map(math.isfinite, [*first, newest]))
        if not is_known or min(first) <= 0 or newest <= max(first):
            return 0.0
        changes = np.abs(np.diff(np.log([loss for loss in self.losses[:-1] if 0 < loss < math.inf])))
        spread = 1.05 * float(np.median(changes))  # the standard deviation of the logarithm, of normal noise
        return newest / max(first) if math.log(newest / max(first)) > 2 * spread else 0.0

    @property
    def has_risen(self) -> bool:
        """Whether the loss rose above its first values, or jumped."""
        losses = [*filter(math.isfinite, self.losses)]
        if len(losses) < len(self.losses) or len(losses) < 2:
            return len(losses) < len(self.losses)
        lowest = np.minimum.accumulate(losses)
        jump = max(value - low for value, low in zip(losses[1:], lowest[:-1], strict=True))
        half = losses[len(losses) // 2 :]
        return bool(max(losses[1:]) > 1.1 * losses[0] or jump > 0.5 * abs(losses[0]) or np.median(half) > 1.1 * losses[0])

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

    def gradient_of(self, site: str) -> float:
        """The norm of the gradient of a parameter in the last record; NaN without one."""
        return self.last.get(Key("gradient", site, "norm"), math.nan)

    @property
    def has_small_outputs(self) -> bool:
        """Whether a regression began with outputs much smaller than the root of its loss, so that its targets are far larger."""
        is_large = not self.facts.is_classification and self.first_loss > 100
        return is_large and self.first.get("output", math.nan) < 0.1 * math.sqrt(self.first_loss)

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
        return is_large_output or self.first.get("gradient", math.nan) > 1e3 * max(abs(self.first_loss), 1.0)

    @property
    def vanishes_from_start(self) -> bool:
        """Whether the first output of the last module was not 0, and less than a 10,000th of the input, or of 1."""
        return 0 < self.first.get("output", 0.0) < 1e-4 * min(self.first.get("input_abs_max", 1.0), 1.0)

    @property
    def explodes_in_first_module(self) -> bool:
        """Whether the first output of the first module was more than 1000 times the input."""
        return self.first.get("first_output", 0.0) > 1e3 * max(self.first.get("input_abs_max", math.inf), 1.0)

    @property
    def reach(self) -> float:
        """The largest part of its norm by which all steps together can move a weight; NaN if not known."""
        return self._reach_since(0)

    def _reach_since(self, begin: int) -> float:
        movements = [(step, movement) for step, movement in self.movements if step >= begin]
        between = ((step - before) * max(earlier, later) for (before, earlier), (step, later) in itertools.pairwise(movements))
        return movements[0][1] + sum(between) if movements else math.nan

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
        return len(self.movements) >= MIN_MOVEMENTS and LARGE_STEP < self.first.get("median_movement", math.nan) < math.inf

    @property
    def is_stopped_by_schedule(self) -> bool:
        """Whether all learning rates have come down so far that the steps of the last two thirds of the records can move no weight."""
        begin = self.steps[-2 * (len(self.steps) // 3)]
        have_come_down = [self.newest(name) < SMALL_RATE * rate.largest for name, rate in self.rates.items()]
        return bool(have_come_down) and all(have_come_down) and self._reach_since(begin) < NO_REACH

    @property
    def is_clipped(self) -> bool:
        """Whether clipping limits every step, and makes all steps together too small: with a gradient of size 1 they would suffice."""
        is_at_limit = self.facts.clip > 0 and self.num_clipped > 0.9 * self.num_gradients
        return is_at_limit and self.reach < SMALL_REACH <= self.reach / self.facts.clip

    # A checkpoint

    def state(self) -> dict[str, Any]:
        """The state in plain numbers and texts."""
        return {
            "steps": [*self.steps],
            "losses": [*self.losses],
            "parts": {name: [*losses] for name, losses in self.parts.items()},
            "rates": {name: tuple(rate) for name, rate in self.rates.items()},
            "first": dict(self.first),
            "movements": [*self.movements],
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
        self.steps, self.losses = [*content.get("steps", ())], [*content.get("losses", ())]
        self.parts = {name: [*losses] for name, losses in content.get("parts", {}).items()}
        self.rates = {name: Rate(*rate) for name, rate in content.get("rates", {}).items()}
        self.first = dict(content.get("first", {}))
        self.movements = [*content.get("movements", ())]
        self.first_norms = dict(content.get("first_norms", {}))
        self.targets = [*content.get("targets", ())]
        self.inputs, self.num_without_loss = [*content.get("inputs", ())], content.get("num_without_loss", 0)
        self.largest_variation = content.get("largest_variation", 0.0)
        self.gradients_by_optimizer = [*content.get("gradients_by_optimizer", ())]
        self.frozen = {step: dict(norms) for step, norms in content.get("frozen", {}).items()}
        self.num_gradients, self.num_clipped = content.get("clipped", (0, 0))
