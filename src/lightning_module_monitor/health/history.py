"""What causes are judged by, besides findings: the losses and learning rates of a run, and sizes in its first and last record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from lightning_module_monitor.record import CONTEXT_KIND, LOSS, OWN_KIND, STEP_SKIPPED, TRAIN, Facts, Key

MIN_LOSSES = 10
"""Number of losses below which a run is not judged by them."""
MIN_FOR_THIRDS = 15
"""Number of losses from which the last third is compared with the first; below it are halves."""
FALLS, MAY_FALL = 2.326, 1.645
"""Quantiles of the normal distribution for 1 % and 5 %."""
SMALL_REACH = 0.05
"""Steps that together move no weight by more than this part of its norm are too small to learn by."""

NO_FACTS = Facts()
"""Nothing is known beside the numbers."""

Learning = Literal["falls", "flat", "unclear", "too few", "none", "manual", "negative"]


def rank_test(before: Sequence[float], after: Sequence[float]) -> float:
    """The normal approximation of Mann and Whitney's statistic: above 2.33, ``after`` is lower at the level of 1 %.

    >>> round(rank_test([4, 5, 6, 7, 8], [0, 1, 2, 3, 3]), 2), rank_test([1, 2], [1, 2])
    (2.61, 0.0)
    """
    one, other = np.asarray(before)[:, np.newaxis], np.asarray(after)[np.newaxis]
    num_one, num_other = len(before), len(after)
    wins = (one > other).sum() + 0.5 * (one == other).sum()
    return float((wins - num_one * num_other / 2) / math.sqrt(num_one * num_other * (num_one + num_other + 1) / 12))


def is_kept(key: Key) -> bool:
    """Whether a history looks at a value: the context of training, sizes of parameters and outputs, updates."""
    sizes = {"parameter": "norm", "gradient": "norm", "activation": "rms", "update": "ratio", OWN_KIND: STEP_SKIPPED}
    return key.stage == TRAIN and (sizes.get(key.kind) == key.statistic or (key.kind == CONTEXT_KIND and not key.site))


class History:
    """The course of a run, of which little is kept."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        """Of the losses."""
        self.losses: list[float] = []
        self.rates: dict[str, tuple[int, float]] = {}
        """Number of records and largest value of every learning rate, by its name."""
        self.first: dict[str, float] = {}
        """Sizes in the first record: ``gradient``, ``output``, ``input_abs_max``."""
        self.last: Mapping[Key, float] = {}
        """The values of the last record with parameters."""
        self._context: Mapping[str, float] = {}
        self.facts = NO_FACTS

    def add(self, step: int, values: Mapping[Key, float]) -> None:
        """Add the values of training of a record; keys have no prefix."""
        self._context = {key.statistic: value for key, value in values.items() if key.kind == CONTEXT_KIND and not key.site}
        if LOSS in self._context:
            self.steps.append(step)
            self.losses.append(self._context[LOSS])
        for name, value in self._context.items():
            if name == "lr" or (name.startswith("lr_") and name[3:].isdigit()):
                num_records, largest = self.rates.get(name, (0, 0.0))
                self.rates[name] = num_records + 1, max(largest, value)
        norms = [value for key, value in values.items() if key.kind == "gradient"]
        if norms or any(key.kind == "parameter" for key in values):
            self.last = values
            if not self.first:
                outputs = [value for key, value in values.items() if key.kind == "activation"]
                self.first = {name: self._context[name] for name in ("input_abs_max",) if name in self._context}
                self.first |= {"gradient": math.hypot(*norms), **({"output": outputs[-1]} if outputs else {})}

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
        return self._context.get(LOSS, math.nan)

    @property
    def ends(self) -> tuple[list[float], list[float]]:
        """The finite losses of the first and the last third of the records; of halves where they are few."""
        losses = [*filter(math.isfinite, self.losses)]
        num = len(losses) // (2 if len(losses) < MIN_FOR_THIRDS else 3)
        return losses[:num], losses[len(losses) - num :]

    @property
    def learning(self) -> Learning:
        """Whether the loss falls, or why that is not known."""
        before, after = self.ends
        if self.facts.is_manual:
            return "manual"
        if not self.losses:
            return "none"
        if any(loss <= 0 for loss in self.losses):
            return "negative"
        if len(self.losses) < MIN_LOSSES or not before:
            return "too few"
        statistic = rank_test(before, after)
        if statistic > FALLS or self._fell_at_once(after):
            return "falls"
        return "unclear" if statistic > MAY_FALL else "flat"

    def _fell_at_once(self, after: Sequence[float]) -> bool:
        """Whether the loss fell within the first records by far more than it varies, and has stayed there."""
        mean, first = float(np.mean(after)), self.losses[0]
        return mean < 0.8 * first and mean + 4 * float(np.std(after)) < first and max(after) < first

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

    # Sizes

    def rate_of(self, site: str) -> float:
        """The learning rate of a parameter in the newest record; NaN where it is not known."""
        parameter = self.facts.parameters.get(site)
        return math.nan if parameter is None else self._context.get(name_of_rate(parameter.group), math.nan)

    def has_decayed(self, site: str) -> bool:
        """Whether the learning rate of a parameter is below a millionth of the largest that it has had."""
        parameter = self.facts.parameters.get(site)
        largest = 0.0 if parameter is None else self.rates.get(name_of_rate(parameter.group), (0, 0.0))[1]
        return 0 < self.rate_of(site) < 1e-6 * largest

    def sites_of(self, rate: str) -> list[str]:
        """Trained parameters with a learning rate, by its name, whose last gradient was not 0."""
        parameters = self.facts.parameters
        own = [name for name, one in parameters.items() if one.training == "trained" and name_of_rate(one.group) == rate]
        return [name for name in own if self.last.get(Key("gradient", name, "norm"), 0.0) > 0]

    @property
    def has_small_outputs(self) -> bool:
        """Whether a regression began with outputs that are much smaller than the root of its loss, as far from its targets."""
        is_large = not self.facts.is_classification and self.first_loss > 100
        return is_large and self.first.get("output", math.nan) < 0.1 * math.sqrt(self.first_loss)

    @property
    def has_large_input(self) -> bool:
        """Whether the input had values far from 1 in the first record."""
        return self.first.get("input_abs_max", math.nan) > 50

    @property
    def explodes_from_start(self) -> bool:
        """Whether the first gradient was more than 1000 times the first loss, or the first output 1000 times the input."""
        sizes = {"output": 1.0, "input_abs_max": 1.0} | self.first
        is_large_output = sizes["output"] > 1e3 * max(sizes["input_abs_max"], 1.0)
        return is_large_output or self.first.get("gradient", math.nan) > 1e3 * max(abs(self.first_loss), 1.0)

    @property
    def reach(self) -> float:
        """By how much of its norm all steps together can move a weight, the largest of all; NaN where it is not known."""
        reaches = [math.nan]
        num_steps = self.steps[-1] - self.steps[0] + 1 if self.steps else 0
        for name, one in self.facts.parameters.items():
            norm, gradient = (self.last.get(Key(kind, name, "norm"), math.nan) for kind in ("parameter", "gradient"))
            ratio = self.last.get(Key("update", name, "ratio"), math.nan)
            if one.training != "trained" or "weight" not in name or one.group < 0 or not norm > 0:
                continue
            group, rate = self.facts.groups[one.group], self.rates.get(name_of_rate(one.group), (0, math.nan))[1]
            # Adam and its kin move every element by the learning rate at most; SGD moves it by its gradient.
            size = gradient / (1 - min(group.momentum, 0.99)) if group.optimizer == "SGD" else math.sqrt(one.numel)
            reaches.append(num_steps * (ratio if math.isfinite(ratio) else rate * size / norm))
        return float(np.fmax.reduce(reaches))

    # A checkpoint

    def state(self) -> dict[str, Any]:
        """The state in plain numbers and texts."""
        return {"steps": [*self.steps], "losses": [*self.losses], "rates": dict(self.rates), "first": dict(self.first)}

    def load(self, content: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state`."""
        self.steps, self.losses = [*content.get("steps", ())], [*content.get("losses", ())]
        self.rates, self.first = dict(content.get("rates", {})), dict(content.get("first", {}))


def name_of_rate(number: int) -> str:
    """The name of a learning rate under ``context``."""
    return f"lr_{number}" if number else "lr"
