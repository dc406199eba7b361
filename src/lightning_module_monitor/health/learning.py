"""Whether a run learns: what its losses show of a fall, by tests of ranks, or why they are not judged."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from lightning_module_monitor.health.alerts import has_fallen
from lightning_module_monitor.health.facts import Facts
from lightning_module_monitor.health.loss_tests import (
    A_GOOD_PART,
    A_LITTLE,
    FALLS,
    excludes_fall,
    fell_at_once,
    may_have_fallen_at_once,
    rank_test,
)
from lightning_module_monitor.health.losses import MIN_LOSSES, Losses

MIN_STEPS, MIN_STEPS_OF_ANY_SIZE = 100, 20
"""Number of steps below which a loss that does not fall is not judged, if the steps are small, and whatever their size."""
SMALL_CHANGE, NO_CHANGE = 0.05, 0.02
"""Limits of :attr:`History.max_relative_change`. Below the first, a loss that does not fall means that steps are too small; below the
second, so does a loss that falls by less than ``A_LITTLE``."""
A_LARGE_PART = 1 / 3
"""A loss that falls within the first records alone falls by more than this part of its first value where a network learns. It falls by less
where its outputs only shrink to the mean of its targets."""
HARDLY = 0.03
"""A loss that has fallen by less than this part of its start has hardly fallen."""
CHANCE = 0.5
"""A cross-entropy below it begins better than chance, which is log 2 or more: the weights are trained."""
NEAR_CHANCE = 0.95
"""A cross-entropy above this part of the logarithm of the number of classes is not better than guessing."""

Learning = Literal[
    "falls", "hardly", "above", "not finite", "chance", "stalled", "stopped", "at once", "flat", "still", "settled", "unclear",
    "too few", "short", "none", "manual",
]  # fmt: skip


def learning_of(losses: Losses, facts: Facts, max_relative_change: float) -> Learning:
    """Whether the loss of a run falls, or the reason why that is not known.

    Args:
        losses: The losses.
        facts: The facts of training.
        max_relative_change: See :attr:`History.max_relative_change`.
    """
    without_test = _result_without_test(losses, facts, max_relative_change)
    if without_test is not None:
        return without_test
    if losses.has_negative:
        return _result_of_ranks(losses)
    before, after = losses.ends
    is_chance = losses.last_median > NEAR_CHANCE * math.log(facts.num_classes or math.inf)
    if rank_test(before, after) > FALLS or fell_at_once(losses.first, after, A_LARGE_PART):
        return "chance" if is_chance else _result_of_fall(losses)
    if fell_at_once(losses.first, after) and not is_chance:
        return "at once"
    if not excludes_fall(before, after, A_GOOD_PART) or may_have_fallen_at_once(losses.first, after):
        return "chance" if is_chance else "unclear"
    return _result_without_fall(losses, facts, max_relative_change)


def _result_without_test(losses: Losses, facts: Facts, max_relative_change: float) -> Learning | None:
    """The result for losses that need no test for a fall, or allow none; ``None`` for losses to be tested."""
    is_enough = len(losses.finite) >= MIN_LOSSES
    if is_enough and max_relative_change < NO_CHANGE and not _falls_at_least_a_little(losses):
        return "short" if losses.num_steps < MIN_STEPS else "still"
    if facts.is_manual:
        return "manual"
    if is_enough:
        return None
    return "too few" if losses.values else "none"


def _falls_at_least_a_little(losses: Losses) -> bool:
    before, after = losses.ends
    return rank_test(before, after) > FALLS if losses.has_negative else has_fallen(float(np.median(before)), losses.last_median, A_LITTLE)


def _result_of_ranks(losses: Losses) -> Learning:
    """The result for losses that have no ratio to the first one."""
    before, after = losses.ends
    if rank_test(before, after) > FALLS:
        return _lost_in_the_end(losses) or "falls"
    is_at_once = float(np.mean(after)) + 4 * float(np.std(after)) < losses.first and max(after) < losses.first
    return "falls" if is_at_once else "unclear"


def _result_of_fall(losses: Losses) -> Learning:
    """The result for losses that fall by ranks: no fall if the loss only came down from a peak, or is lost in the end."""
    is_small = losses.last_median > (1 - HARDLY) * max(losses.first, float(np.median(losses.ends[0])))
    return _lost_in_the_end(losses) or ("hardly" if is_small else "falls" if losses.stalled_since is None else "stalled")


def _lost_in_the_end(losses: Losses) -> Learning | None:
    if not math.isfinite(losses.values[-1]):
        return "not finite"
    return "above" if losses.last_median > losses.first else None


def _result_without_fall(losses: Losses, facts: Facts, max_relative_change: float) -> Learning:
    """The result for losses of which a fall is excluded."""
    if losses.num_steps < (MIN_STEPS if max_relative_change < SMALL_CHANGE else MIN_STEPS_OF_ANY_SIZE):
        return "short"
    return "settled" if facts.is_classification and np.median(losses.ends[0]) < CHANCE else "flat"
