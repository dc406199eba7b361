"""The columns of a record that a history uses, and what is known of them while the facts are the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.bound import is_weight
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.keys import Key, is_total, name_of_rate
from lightning_module_monitor.kinds import CONTEXT_KIND, OWN_KIND, ROOT_SITE, STEP_SKIPPED, TRAIN
from lightning_module_monitor.record import is_absent

_ADAM_LIKE = ("Adam", "Lion", "RMSprop", "Adagrad")
"""Parts of the names of optimizers that move an element by the learning rate at most."""
_OF_OWN_RATE = "DAdapt"
"""A part of the names of optimizers whose learning rate is a factor of one that they find."""


def is_kept(key: Key) -> bool:
    """Whether a history uses a value: the context of training, sizes of parameters and outputs, updates."""
    sizes = {"parameter": "norm", "gradient": "norm", "activation": "rms", "update": "ratio", OWN_KIND: STEP_SKIPPED}
    return key.stage == TRAIN and (sizes.get(key.kind) == key.statistic or (key.kind == CONTEXT_KIND and not key.site))


class KeptColumns:
    """The columns of a record that a history uses, and what is known of them while the facts are the same.

    Args:
        keys: The keys that it uses, without prefix, by column.
        facts: The facts of training.
    """

    def __init__(self, keys: Mapping[int, Key], facts: Facts) -> None:
        self.keys = keys
        self.columns = np.array([*keys], np.intp)
        by_key = {key: column for column, key in keys.items()}
        self.context = {key.statistic: column for column, key in keys.items() if key.kind == CONTEXT_KIND}
        self.skipped = by_key.get(Key(OWN_KIND, "", STEP_SKIPPED), NO_COLUMN)
        self.root = by_key.get(Key("gradient", ROOT_SITE, "norm"), NO_COLUMN)
        """The norm of the whole gradient."""
        self.gradients = self._of("gradient", without=ROOT_SITE)
        self.gradients_by_optimizer = [
            np.array([column for column, key in keys.items() if key.kind == "gradient" and facts.optimizer_of(key.site) == number], np.intp)
            for number in range(facts.num_optimizers)
        ]
        self.parameters = self._of("parameter")
        self.outputs = self._of("activation")
        trained = {site: parameter for site, parameter in facts.parameters.items() if parameter.training == "trained"}
        groups = {site: facts.groups[parameter.group] for site, parameter in trained.items() if 0 <= parameter.group < len(facts.groups)}
        weights = {site: trained[site] for site in groups if is_weight(site)}
        norms = [[by_key.get(Key(*name), NO_COLUMN) for name in _norms_of(site)] for site in weights]
        self.norms = np.array(norms, np.intp).reshape(-1, 3).T
        """Columns of the norms of the trained weights and of their gradients, and of the ratios of their updates."""
        self.rates = np.array([self.context.get(name_of_rate(parameter.group), NO_COLUMN) for parameter in weights.values()], np.intp)
        optimizers = [groups[site] for site in weights]
        self.divisors = np.array([1 - min(group.momentum, 0.99) for group in optimizers])
        self.eps = np.array([group.eps for group in optimizers])
        self.sizes = np.sqrt([float(parameter.numel) for parameter in weights.values()])
        self.is_sgd = np.array([group.optimizer == "SGD" for group in optimizers], bool)
        names = [group.optimizer if _OF_OWN_RATE not in group.optimizer else "" for group in optimizers]
        self.is_adam = np.array([any(part in name for part in _ADAM_LIKE) for name in names], bool)
        num = sum(parameter.numel for parameter in trained.values())
        self.least_clipped = facts.clip * (0.5 * math.sqrt(num) if facts.clips_values else 0.99)
        """The norm at which gradients of trained parameters have the largest size that clipping allows; 0 without clipping."""

    def _of(self, kind: str, *, without: str = "") -> NDArray[np.intp]:
        return np.array([column for column, key in self.keys.items() if key.kind == kind and key.site != without], np.intp)

    def relative_steps(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """The part of its norm by which a step can move each weight, given the numbers of a record.

        Infinite if its optimizer is not known, NaN if it has no gradient.
        """
        norm, gradient, ratio = numbers[self.norms]
        with np.errstate(all="ignore"):
            rate = numbers[self.rates]
            by_sgd = rate * gradient / self.divisors / norm
            by_adam = rate * self.sizes / norm * gradient / (gradient + self.eps * self.sizes)
        estimate = np.where(self.is_sgd, by_sgd, np.where(self.is_adam, by_adam, math.inf))
        relative_step = np.where(np.isfinite(ratio), ratio, estimate)
        return np.where((norm > 0) & (gradient > 0), relative_step, math.nan)


def _norms_of(site: str) -> tuple[tuple[str, str, str], ...]:
    return ("parameter", site, "norm"), ("gradient", site, "norm"), ("update", site, "ratio")


NO_COLUMN = -1
"""The last number of the judge's vector, which is NaN."""


class Sizes:
    """The numbers of a record with parameters."""

    def __init__(self, kept: KeptColumns, numbers: NDArray[np.float64]) -> None:
        self._kept, self._numbers = kept, numbers

    @functools.cached_property
    def values(self) -> Mapping[Key, float]:
        """Value by key, without those of all parameters together."""
        numbers = self._numbers[self._kept.columns]
        known = zip(self._kept.keys.values(), numbers.tolist(), is_absent(numbers).tolist(), strict=True)
        return {key: value for key, value, absent in known if not (absent or is_total(key))}
