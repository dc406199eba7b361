"""Alarms that need the history of a whole run, and conditions on this history, which checks and causes use as well."""

from __future__ import annotations

import collections
import math

import numpy as np

from lightning_module_monitor.health.alerts import Alarm, Fired, has_fallen
from lightning_module_monitor.health.detectors import DETECTORS
from lightning_module_monitor.health.finding_names import (
    CONSTANT_TARGET,
    DROPOUT,
    GROWING_INPUT,
    GROWING_WEIGHTS,
    LARGE_START,
    LARGE_STEPS,
    LINEAR,
    NOT_LEARNING,
    ONE_SIDED,
    OVERWRITTEN,
    SKIPPED,
    UNBOUNDED,
    ZERO_LOSS,
    ZERO_RATE,
)
from lightning_module_monitor.health.loss_tests import A_LITTLE, FALLS, rank_test
from lightning_module_monitor.health.losses import CONVERGED, MIN_LOSSES, num_at_end
from lightning_module_monitor.health.run_history import MIN_RELATIVE_STEPS, History
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import CONTEXT_KIND, LOSS
from lightning_module_monitor.record import Finding

RUNAWAY = 100.0
"""Growth of the norm of all parameters above which they have run away."""
MAX_DROPOUT = 0.9
"""The largest probability of a dropout module that is not reported."""

NOT_FALLING = ("flat", "chance", "hardly")
"""Results of :attr:`History.learning` if the loss does not fall."""
NOT_SURELY_FALLING = ("flat", "still", "chance", "stalled", "at once", "unclear", "above")
"""Results of :attr:`History.learning` if it is not known that the loss falls."""

_LOSS_PHRASES = {
    "flat": "does not fall by more than its noise",
    "still": "hardly falls, and the weights hardly move",
    "stopped": "falls no more, and the weights hardly move",
}
"""What is wrong with the loss, by the result of :attr:`History.learning`."""
MAX_START = 5.0
"""A first cross-entropy of more than so many times that of guessing shows outputs that are far too large."""
MIN_LOSSES_AT_START = 3
"""Number of losses below which their start is not judged."""
UNBOUNDED_BELOW = 100.0
"""A loss below 0 has no lower bound if its magnitude is more than so many times that of the first loss, or 1 if that is larger."""
LARGE_CHANGE = 0.3
"""Weights are written over if all steps together can move one by more than this part of its norm, and none moves."""
FADED = 1e-3
"""Gradients of an optimizer have faded if their norm is below this part of its start, and exploded if it is above the inverse of it."""
MIN_RECORDS_OF_OPTIMIZER = 6
"""Number of records with gradients of an optimizer below which they are not judged."""
HARDLY_VARIES = 1e-3
"""An output hardly differs between samples if its variation was never above this."""
GROWN = 1.25
"""An input has grown if its largest magnitude is more than so many times that of the first records."""
FORESEEN = 0.05
"""A cross-entropy of tokens below this part of its start predicts nearly all of them, which no text allows."""
MIN_SAMPLES = 8
"""The least number of samples in a batch whose targets are compared."""


def alarms_of(history: History) -> list[Alarm]:
    """The alarms that need the whole run."""
    judges = [
        _zero_rates,
        _zero_loss,
        _skipped,
        _growing_input,
        _not_learning,
        _constant_target,
        _overwritten,
        _large_steps,
        _runaway_weights,
        _one_sided,
        _linear,
        _dropout,
        _unbounded,
        _large_start,
    ]
    return [alarm for judge in judges for alarm in judge(history)]


def constant_from(history: History) -> str:
    """The module from which on all outputs were constant in the first record, while the one before it varied; empty without one."""
    begin, order = history.first.get("constant_from", math.nan), history.facts.order
    return order[int(begin)] if 0 <= begin < len(order) else ""


def varies_before(history: History, site: str) -> bool:
    """Whether the outputs of the modules that ran before a module were not constant in the first record."""
    begin, order = constant_from(history), [*history.facts.order]
    return not begin or site not in order or order.index(site) <= order.index(begin)


def hardly_varies(history: History) -> bool:
    """Whether the output has hardly differed between samples in any record, while the input did."""
    return 0 < history.largest_variation < HARDLY_VARIES


def has_only_constant_targets(history: History) -> bool:
    """Whether all batches whose targets were compared have the same single target."""
    return len(history.targets) >= MIN_LOSSES and all(target == history.targets[0] for target in history.targets)  # not if any is NaN


def sees_its_labels(history: History) -> bool:
    """Whether tokens are predicted from tokens with almost no error, as by a language model that sees its labels."""
    return history.facts.of_tokens and 0 < history.losses.last_median < FORESEEN * history.losses.first


def is_sorted_by_class(history: History) -> bool:
    """Whether more batches have targets of one class only than a random order gives, except for once in a million runs."""
    num_by_class = [*collections.Counter(target for target in history.targets if not math.isnan(target)).values()]
    if len(num_by_class) < 2:
        return False
    # The largest probability of this result for batches of at least MIN_SAMPLES samples, whatever the frequencies of the classes are:
    # the number of ways to choose the batches of one class, and their classes, and the probability of each way.
    num_batches, num_constant = len(history.targets), sum(num_by_class)
    log_choices = math.lgamma(num_batches + 1) - math.lgamma(num_constant + 1) - math.lgamma(num_batches - num_constant + 1)
    log_orders = math.lgamma(num_constant + 1) - sum(math.lgamma(num + 1) for num in num_by_class)
    log_likelihood = MIN_SAMPLES * sum(num * math.log(num / num_constant) for num in num_by_class)
    return log_orders + log_choices + log_likelihood < math.log(1e-6)


def is_overwritten(history: History) -> bool:
    """Whether no parameter's norm has changed by a thousandth of itself, or of the change that all steps can make if that is less.

    Not where the loss has fallen: weights that are normalized after each step learn.
    """
    expected, losses = history.max_relative_change, history.losses
    is_judged = len(history.relative_steps) >= MIN_RELATIVE_STEPS and LARGE_CHANGE < expected < math.inf
    has_learned = history.learning == "falls" or has_fallen(losses.first, losses.last_median, 0.5)
    if not is_judged or has_learned or not history.first_norms or any(group.is_half for group in history.facts.groups):
        return False
    first = {site: norm for site, norm in history.first_norms.items() if norm > 0 and _is_trained(history, site)}
    changes = [abs(history.norm_of(site) - norm) / norm for site, norm in first.items()]
    return bool(changes) and max(changes) < 1e-3 * min(expected, 1.0)


def _is_trained(history: History, site: str) -> bool:
    parameter = history.facts.parameters.get(site)
    return parameter is not None and parameter.training == "trained"


def optimizer_out_of_balance(history: History) -> tuple[int, float] | None:
    """The first optimizer whose gradients have faded or exploded, and their size relative to their start; ``None`` without one."""
    for number, sizes in enumerate(np.array(history.gradients_by_optimizer).T):
        known = sizes[np.isfinite(sizes)]  # an optimizer that steps only now and then has no gradients in other records
        if len(known) >= MIN_RECORDS_OF_OPTIMIZER and known[0] > 0:
            times = float(np.median(known[-(len(known) // 3) :]) / known[0])
            if times < FADED or times > 1 / FADED:
                return number, times
    return None


def flat_part(history: History) -> str:
    """The name of a further logged loss that does not fall, though it varies from record to record; empty if all fall.

    One that has the values of the loss itself is no further loss.
    """
    for name, losses in history.parts.items():
        num = num_at_end(len(losses))
        varies = len({*losses}) > 0.8 * len(losses)
        is_loss = len(losses) == len(history.losses) and np.allclose(losses, history.losses.values, rtol=1e-3)
        if len(losses) < MIN_LOSSES or is_loss or not varies or not 0 < min(losses) <= max(losses) < math.inf:
            continue
        before, after = losses[:num], losses[-num:]
        start, end = max(losses[0], float(np.median(before))), float(np.median(after))
        if not has_fallen(start, end, A_LITTLE) and rank_test(before, after) <= FALLS:
            return name
    return ""


def is_unbounded(history: History) -> bool:
    """Whether the loss has fallen below 0 by orders of magnitude, and still falls, which no useful loss does."""
    is_judged = not history.facts.is_manual and len(history.losses) >= MIN_LOSSES and history.losses.falls_at_end
    return is_judged and history.losses.last_median < -UNBOUNDED_BELOW * max(1.0, abs(history.losses.first))


def has_large_start(history: History) -> bool:
    """Whether the first cross-entropy was many times that of guessing among the classes."""
    guessing = math.log(max(history.facts.num_classes, 1))
    return guessing > 0 and len(history.losses) >= MIN_LOSSES_AT_START and history.losses.first > MAX_START * guessing


def _zero_rates(history: History) -> list[Alarm]:
    alarms = []
    for name, rate in history.rates.items():
        sites = history.sites_of(name)
        if rate.largest == 0 and rate.num_records >= DETECTORS[ZERO_RATE].min_records and sites:
            more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
            words = f"{sites[0]}{more}: the learning rate is 0 in all {rate.num_records} records, and the gradient is not."
            alarms.append(_alarm_of_run(history, ZERO_RATE, sites[0], name, words))
    return alarms


def _zero_loss(history: History) -> list[Alarm]:
    if len(history.losses) < DETECTORS[ZERO_LOSS].min_records or any(loss != 0 for loss in history.losses.values):
        return []
    return [_alarm_of_run(history, ZERO_LOSS, "", LOSS, f"The loss is exactly 0 in all {len(history.losses)} records.")]


def _skipped(history: History) -> list[Alarm]:
    num_without, num_records = history.num_without_loss, history.num_without_loss + len(history.losses)
    if num_records < MIN_LOSSES or not history.losses or 3 * num_without < num_records or history.facts.is_manual:
        return []
    words = f"training_step has returned no loss in {num_without} of {num_records} records."
    return [_alarm_of_run(history, SKIPPED, "", LOSS, words)]


def _growing_input(history: History) -> list[Alarm]:
    sizes = history.inputs
    if len(sizes) < MIN_LOSSES:
        return []
    num = num_at_end(len(sizes))
    first, last = max(sizes[:num]), float(np.median(sizes[-num:]))
    if not 0 < GROWN * first < last < math.inf or rank_test(sizes[-num:], sizes[:num]) <= FALLS:
        return []
    words = f"The largest magnitude of the input is at most {first:.3g} in the first {num} records, and {last:.3g} in the last."
    return [_alarm_of_run(history, GROWING_INPUT, "", "input_abs_max", words)]


def _not_learning(history: History) -> list[Alarm]:
    before, after = history.losses.ends
    what = _LOSS_PHRASES.get(history.learning)
    if what is None:
        return []
    medians = f"its median is {np.median(before):.4g} in the first {len(before)} records and {np.median(after):.4g} in the last"
    words = f"The loss {what}: {medians} {len(after)}."
    since = history.losses.stalled_since if history.learning == "stopped" else None
    return [_alarm_of_run(history, NOT_LEARNING, "", LOSS, words, since=since)]


def _constant_target(history: History) -> list[Alarm]:
    if not is_sorted_by_class(history):
        return []
    num_constant = sum(not math.isnan(target) for target in history.targets)
    words = f"The targets of a batch are all the same in {num_constant} of {len(history.targets)} records, and differ between records."
    return [_alarm_of_run(history, CONSTANT_TARGET, "", "target_max", words)]


def _overwritten(history: History) -> list[Alarm]:
    if not is_overwritten(history):
        return []
    words = f"The weights stand still, and all steps together can move one by {history.max_relative_change:.2g} of its norm."
    return [_alarm_of_run(history, OVERWRITTEN, "", LOSS, words)]


def _large_steps(history: History) -> list[Alarm]:
    if not history.has_large_steps:
        return []
    words = f"The first step can move a weight by {history.first['median_relative_step']:.2g} of its norm (median of all weights)."
    return [_alarm_of_run(history, LARGE_STEPS, "", LOSS, words)]


def _runaway_weights(history: History) -> list[Alarm]:
    first = math.hypot(*history.first_norms.values())
    last = math.hypot(*filter(math.isfinite, map(history.norm_of, history.first_norms)))
    has_converged = history.learning != "chance" and 0 <= history.losses.last_median < CONVERGED * history.losses.first
    if history.facts.is_manual or len(history.losses.steps) < 2 or has_converged or not 0 < first < last / RUNAWAY:
        return []
    words = f"The norm of all parameters is {last / first:.3g} times its start, and the loss has not converged."
    return [_alarm_of_run(history, GROWING_WEIGHTS, "", LOSS, words, since=history.losses.steps[1])]


def _one_sided(history: History) -> list[Alarm]:
    found, facts = optimizer_out_of_balance(history), history.facts
    if found is None:
        return []
    number, times = found
    site = next((site for site in facts.parameters if facts.optimizer_of(site) == number), "")
    words = f"{site}, and all other parameters of optimizer {number}: the norm of their gradients is {times:.2g} of its start."
    return [_alarm_of_run(history, ONE_SIDED, site, LOSS, words)]


def _unbounded(history: History) -> list[Alarm]:
    if not is_unbounded(history):
        return []
    words = f"The loss falls below 0 without end: from {history.losses.first:.3g} to {history.losses.last_median:.3g}."
    return [_alarm_of_run(history, UNBOUNDED, "", LOSS, words)]


def _large_start(history: History) -> list[Alarm]:
    if not has_large_start(history):
        return []
    guessing = math.log(history.facts.num_classes)
    words = f"The first loss is {history.losses.first:.3g}, and that of guessing among {history.facts.num_classes} classes {guessing:.3g}."
    return [_alarm_of_run(history, LARGE_START, "", LOSS, words)]


def _linear(history: History) -> list[Alarm]:
    if not history.facts.is_linear or history.learning not in NOT_FALLING:
        return []
    return [_alarm_of_run(history, LINEAR, "", LOSS, "No function between the layers is other than linear, and the loss does not fall.")]


def _dropout(history: History) -> list[Alarm]:
    probability = history.facts.dropout
    if probability <= MAX_DROPOUT or history.learning not in NOT_SURELY_FALLING:
        return []
    words = f"A dropout module has a probability of {probability:.3g}, and it is not known that the loss falls."
    return [_alarm_of_run(history, DROPOUT, "", LOSS, words)]


def _alarm_of_run(history: History, name: str, site: str, statistic: str, words: str, *, since: int | None = None) -> Alarm:
    """An alarm at the last step, about a value of the context. Its condition is met since a step, by default the first of the run."""
    steps = history.losses.steps or [0]
    first = steps[0] if since is None else since
    last, key = steps[-1], Key(CONTEXT_KIND, "", statistic).format()
    severity = DETECTORS[name].severity
    finding = Finding(step=last, name=name, site=site, key=key, words=words, severity=severity, steps_before=last - first)
    return Alarm(finding, fired=[Fired(key, math.nan, 1.0, first)])
