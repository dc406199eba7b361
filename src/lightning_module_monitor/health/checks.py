"""The result of each detector in a run: found, not found, or the reason why it has no result."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_module_monitor.health.alerts import Fired
from lightning_module_monitor.health.detector import NO_GRADIENT, Detector
from lightning_module_monitor.health.finding_names import DIVERGING, NOT_LEARNING, ONE_SIDED
from lightning_module_monitor.health.losses import MIN_LOSSES
from lightning_module_monitor.health.run_history import History
from lightning_module_monitor.health.whole_run import flat_part, has_only_constant_targets, sees_its_labels

FOUND, NOT_FOUND, TOO_FEW, UNCLEAR = "found", "not found", "too few records", "unclear"
PASSED_OVER = "skipped: the loss has fallen"
NOT_RECORDED, NOT_COMPUTED, NOT_APPLICABLE = "not recorded", "not computed", "does not apply"
WITHOUT_ANSWER = (TOO_FEW, UNCLEAR, NOT_COMPUTED, NOT_RECORDED)
"""Statuses of checks that could find nothing in this run, and might in another."""
WITHOUT_FINDING = (NOT_FOUND, PASSED_OVER, *WITHOUT_ANSWER, NOT_APPLICABLE)
"""Statuses of checks without a finding, in the order in which reports show them."""

_DOUBTS = {
    "above": "loss {first:.3g} to {last:.3g}, which is above its start",
    "not finite": "the loss is not finite at the end",
    "hardly": "loss {first:.3g} to {last:.3g}, a fall of less than 3 %",
    "stalled": "loss {first:.3g} to {last:.3g}, without a clear fall since step {stalled_since}",
    "chance": "loss {first:.3g} to {last:.3g}, which is no better than guessing among {num_classes} classes",
    "at once": "loss {first:.3g} to {last:.3g} within the first records, without a clear fall since",
    "unclear": "too noisy losses to tell whether they fall",
    "short": "{num_steps} steps, too few or too small to show in the loss",
    "settled": "the loss hardly changes, as that of trained weights may",
    "too few": f"too few losses ({{num}} of {MIN_LOSSES}), use a smaller every_n_steps",
    "none": "no loss was recorded",
    "manual": "a loss is not judged under manual optimization",
}
"""Why it is not known whether the loss falls, by the result of :attr:`History.learning`; results without an entry leave no doubt."""


@dataclass(frozen=True)
class Check:
    """The result of a detector in a run.

    Attributes:
        name: Name of the detector.
        status: ``found``, ``not found``, ``skipped: the loss has fallen``, ``too few records``, ``unclear``, ``not recorded``,
            ``not computed``, or ``does not apply``.
        num_series: Number of series that it judged, without those that have no value.
        num_records: Number of records with values of these series.
        num_needed: Number of records below which it cannot find anything.
        reason: Why it has no result, and the option that records the values it needs.
        fired: The figures that met the condition, the first of each key.
    """

    name: str
    status: str
    num_series: int
    num_records: int
    num_needed: int
    reason: str = ""
    fired: Sequence[Fired] = field(default=(), repr=False)


class Judged(NamedTuple):
    """The series and records that a detector judged in a run, and whether it found something."""

    is_found: bool
    num_series: int
    """Number of series with a value."""
    num_without_value: int
    """Number of series that were NaN in all records."""
    num_records: int
    num_passed_over: int
    """Number of records that were not judged, because the loss had fallen."""
    is_watched: bool
    """Whether the run recorded the values for it."""


def doubt_about_loss(history: History) -> str:
    """Why it is not known whether the loss falls; empty where it is known."""
    losses, facts, learning = history.losses, history.facts, history.learning
    if learning == "falls" and facts.compares_outputs:
        return "the loss falls, and whether outputs differ between samples was not looked at"
    if learning == "falls" and (part := flat_part(history)):
        return f"the loss falls, and {part}, which is logged, does not"
    if learning == "falls" and sees_its_labels(history):
        return f"loss {losses.last_median:.3g} for tokens: the model may see its labels (look at shift and mask)"
    if has_only_constant_targets(history):
        return "all targets that were looked at are the same"
    return _DOUBTS.get(learning, "").format(
        first=losses.first,
        last=losses.last_median,
        stalled_since=losses.stalled_since,
        num_steps=losses.num_steps,
        num=len(losses.finite),
        num_classes=facts.num_classes,
    )


def status_of(detector: Detector, judged: Judged, history: History, doubt: str, types: Collection[str]) -> tuple[str, str]:
    """The status of a check and the reason: those of the first row whose condition is true.

    Args:
        detector: The detector.
        judged: What it judged.
        history: The history of the run.
        doubt: Why it is not known whether the loss falls; empty where it is known.
        types: Names of the classes of the model's modules; empty where they are not known.
    """
    name, num_series, num_records = detector.name, judged.num_series, judged.num_records
    not_found = PASSED_OVER if judged.num_passed_over else NOT_FOUND
    lacks_types = bool(detector.types and types) and {*types}.isdisjoint(detector.types)
    has_judged = num_series > 0 and num_records > 0
    is_recorded = num_series > 0 or detector.is_always_recorded or (judged.is_watched and not detector.recorded_by)
    is_recorded &= detector.without != NO_GRADIENT or history.records_each_gradient
    option = detector.recorded_by or f"health: {{watch: {name}}}"
    rows = (
        (judged.is_found, FOUND, ""),
        (
            judged.num_without_value > 0 and not num_series,
            NOT_COMPUTED,
            f"no value could be computed: NaN in all of {judged.num_without_value} series",
        ),
        (lacks_types, NOT_APPLICABLE, f"no {_alternatives(detector.types)} module"),
        (name in (NOT_LEARNING, DIVERGING) and history.learning == "manual", NOT_APPLICABLE, doubt),
        (name == DIVERGING and history.losses.has_negative, NOT_APPLICABLE, "a loss below 0 has no factor by which it grows"),
        (name == ONE_SIDED and not history.gradients_by_optimizer, NOT_APPLICABLE, detector.without),
        (detector.judges_facts and not num_records, NOT_APPLICABLE, "known of a Trainer's runs alone"),
        (detector.judges_facts, not_found, ""),
        (num_series > 0 and not num_records and detector.needs_rate and history.has_no_rate, NOT_APPLICABLE, "all learning rates are 0"),
        (not has_judged and not is_recorded, NOT_RECORDED, f"add {option}"),
        (not has_judged, NOT_APPLICABLE, detector.without),
        (num_records < detector.num_needed, TOO_FEW, f"{num_records} of {detector.num_needed}"),
        (name == NOT_LEARNING and doubt != "", UNCLEAR, doubt),
    )
    return next(((status, reason) for is_true, status, reason in rows if is_true), (not_found, ""))


def _alternatives(names: Sequence[str]) -> str:
    """Names as in ``Sigmoid, Tanh or Softmax``."""
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
