"""Causes in steps that move weights too little, or not at all."""

from __future__ import annotations

import math

from lightning_module_monitor.health.cause import Cause, max_change_remark
from lightning_module_monitor.health.finding_names import NOT_LEARNING
from lightning_module_monitor.health.learning import SMALL_CHANGE
from lightning_module_monitor.health.run_history import History
from lightning_module_monitor.keys import Key
from lightning_module_monitor.record import Finding


def _has_moved(finding: Finding, history: History) -> bool:
    """Whether the norm of a parameter has changed between the last two records."""
    before, last = (values.get(Key("parameter", finding.site, "norm"), math.nan) for values in (history.before, history.last))
    return abs(last - before) > 0  # not if either is NaN


def _lacks_gradient(finding: Finding, history: History) -> bool:
    """Whether a parameter that does not move has a gradient of zeros, or none, in the newest record, where others have one."""
    return finding.name == "frozen_updates" and history.num_gradients > 0 and not history.gradient_of(finding.site) > 0


def _rate_remark(history: History) -> str:
    name, rate = max(history.rates.items(), key=lambda item: item[1].largest)
    rises = history.newest(name) == rate.largest > 2 * rate.first
    warm_up = ", and its warm-up is longer than the run (Lightning steps a scheduler once per epoch, unless its interval is step)"
    eps = max((group.eps for group in history.facts.groups), default=0.0)
    damped = f" Its optimizer divides by at least eps, which is {eps:.2g}: a smaller one makes larger steps." if eps > 1e-3 else ""
    return f"The learning rate is at most {rate.largest:.2g}{warm_up if rises else ''}.{damped}"


CAUSES_IN_STEPS = (
    Cause(
        "clipping",
        "Clipping limits every step to next to nothing",
        evidence_for=(NOT_LEARNING, "frozen_updates"),
        advice="a larger gradient_clip_val; 1.0 is customary",
        explains=(NOT_LEARNING, "frozen_updates"),
        needs="gradients have the largest size that clipping allows in 9 of 10 records, and with a norm of 1 the steps would be large "
        "enough",
        is_shown=lambda _finding, history: history.is_clipped,
        remark=lambda history: f"gradient_clip_val is {history.facts.clip:.3g}. {max_change_remark(history)}",
    ),
    Cause(
        "small_rate",
        "The learning rate is too low",
        evidence_for=(NOT_LEARNING, "frozen_updates"),
        advice="a learning rate that is ten times higher, and so on until the loss falls",
        explains=(NOT_LEARNING, "frozen_updates"),
        needs=f"all steps together can move no weight by more than {SMALL_CHANGE:.0%} of its norm; and what stands still has a gradient",
        is_shown=lambda finding, history: history.max_relative_change < SMALL_CHANGE and not _lacks_gradient(finding, history),
        remark=lambda history: f"{max_change_remark(history)} {_rate_remark(history)}",
    ),
    Cause(
        "decayed_rate",
        "The schedule has brought the learning rate down to next to nothing",
        evidence_for=(NOT_LEARNING, "frozen_updates"),
        advice="a slower schedule; look whether it counts steps or epochs (interval of lr_scheduler)",
        explains=("frozen_updates", NOT_LEARNING),
        needs="the newest rate is below a millionth of the largest one; or below a hundredth, and the last two thirds of the steps can "
        "move no weight by more than 2 % of its norm",
        is_shown=lambda finding, history: (
            history.is_stopped_by_schedule if finding.name == NOT_LEARNING else history.has_decayed(finding.site)
        ),
        remark=lambda history: (
            f"The largest learning rate was {max(rate.largest for rate in history.rates.values()):.2g}, "
            f"and {max(map(history.newest, history.rates)):.2g} at the end."
        ),
    ),
    Cause(
        "no_gradient",
        "Parameters that are to be trained get no gradient",
        evidence_for=("frozen_updates",),
        advice="look for a detach() or no_grad() between the parameters and the loss, and for a checkpoint with use_reentrant=True; if the "
        "model does not use the parameters, as the mask token of a checkpoint, set requires_grad to False",
        explains=("frozen_updates", NOT_LEARNING),
        needs="the newest record has gradients of others, and none of this parameter",
        is_shown=lambda finding, history: _lacks_gradient(finding, history) and math.isnan(history.gradient_of(finding.site)),
    ),
    Cause(
        "zero_gradient",
        "A part of the model gets gradients of nothing but zeros",
        evidence_for=("no_gradients", "zero_gradients", "frozen_updates"),
        advice="look for an input of zeros, for two factors that are both 0, for a detach() or no_grad(), for a zero_grad() between the "
        "backward pass and the step, and for what has a derivative of 0: rounding, argmax, a softmax over one value; check whether it is "
        "meant to be idle",
        explains=(NOT_LEARNING,),
        needs="for parameters that do not move: the newest record has a gradient of 0",
        is_shown=lambda finding, history: finding.name != "frozen_updates" or history.gradient_of(finding.site) == 0,
    ),
    Cause(
        "frozen",
        "Parameters that are to be trained do not move",
        evidence_for=("frozen_updates",),
        advice="in half precision, updates that are smaller than the weights' rounding are lost: keep the weights in float32 (precision: "
        "bf16-mixed); else look for code that writes the weights back, and for a detach() or no_grad()",
        explains=(NOT_LEARNING,),
        needs="the newest record has it as in the record before",
        is_shown=lambda finding, history: not _has_moved(finding, history),
    ),
)
