"""Causes in sizes: inputs, targets, initial weights and steps that are too large or too small."""

from __future__ import annotations

import math

from lightning_module_monitor.health.cause import GROWTH, SYMPTOMS, Cause, search_named
from lightning_module_monitor.health.finding_names import LARGE_START, LARGE_STEPS, NONFINITE, NOT_LEARNING
from lightning_module_monitor.health.run_history import History
from lightning_module_monitor.record import Finding


def _is_zero_from_start(finding: Finding) -> bool:
    """Whether zeros were there before any update, as those of a module that is not used; later ones are of units that died."""
    return finding.name == "zero_gradients" and finding.first_step == 0


def _first_sizes_remark(history: History) -> str:
    sizes = {"loss": history.losses.first, "gradient": history.first.get("gradient"), "output": history.first.get("output")}
    known = (f"{name} {size:.2g}" for name, size in sizes.items() if size is not None and not math.isnan(size))
    return f"In the first record: {', '.join(known)}."


def _decay_remark(history: History) -> str:
    decay = max((group.weight_decay for group in history.facts.groups), default=0.0)
    return f"weight_decay is {decay:.3g}." if decay > 0 else "No optimizer has a weight decay, so look for a penalty in the loss."


CAUSES_IN_SIZES = (
    Cause(
        "missing_normalization",
        "Activations grow from layer to layer",
        evidence_for=("growing_over_depth",),
        advice="normalization layers, an initialization that keeps the scale (He for ReLU, Xavier for tanh), residual connections",
        explains=(*GROWTH, *SYMPTOMS, NONFINITE),
        needs="from the first record on, and not in the first module",
        is_shown=lambda finding, history: finding.first_step == 0 and not history.explodes_in_first_module,
    ),
    Cause(
        "summed_loss",
        "The loss is summed over the samples: the learning rate is as many times too high",
        evidence_for=(*GROWTH, "dead_units", NOT_LEARNING, NONFINITE),
        advice="the mean over the samples: reduction='mean'; or a learning rate that is divided by the size of a batch",
        explains=(*GROWTH, *SYMPTOMS, NONFINITE),
        needs="the graph of the loss has the sum, and the loss has risen",
        is_shown=lambda finding, history: (
            history.facts.is_summed and history.losses.has_risen and search_named("", "learning_rate", "update")(finding, history)
        ),
    ),
    Cause(
        "unscaled_targets",
        "The targets are far larger than the outputs of the model",
        evidence_for=(NOT_LEARNING, *GROWTH, "dead_units", "saturation", "zero_gradients"),
        advice="scale the targets: subtract their mean and divide by their standard deviation",
        explains=(*GROWTH, *SYMPTOMS, NONFINITE),
        needs="a large first loss, with outputs much smaller than its square root",
        is_shown=lambda finding, history: history.has_small_outputs and not _is_zero_from_start(finding),
        remark=lambda history: f"The first loss was {history.losses.first:.3g}, with outputs of {history.first['output']:.2g} (rms).",
        is_from_start=True,
    ),
    Cause(
        "unscaled_input",
        "The input is far from a size of 1",
        evidence_for=(NOT_LEARNING, *GROWTH, "dead_units", "saturation", "zero_gradients", NONFINITE),
        advice="scale the input: subtract its mean and divide by its standard deviation",
        explains=(*GROWTH, *SYMPTOMS, NONFINITE),
        needs="the input had a value above 50 in the first record, or none above 0.02",
        is_shown=lambda finding, history: (
            history.has_unscaled_input
            and not _is_zero_from_start(finding)
            and search_named("", "learning_rate", "update")(finding, history)
        ),
        is_from_start=True,
    ),
    Cause(
        "explodes_from_start",
        "Outputs or gradients are huge before any update",
        evidence_for=(LARGE_START, "exploding", "growing_weights", "growing_over_depth", "diverging", NONFINITE),
        advice="clipping of gradients; for a recurrent network an orthogonal initialization, LSTM or GRU; else normalization layers",
        explains=(*GROWTH, *SYMPTOMS, NONFINITE),
        needs="before any update the gradient is 1000 times the loss or the output 1000 times the input; or a recurrent module makes NaN",
        is_shown=lambda finding, history: finding.cause == "recurrent" or history.explodes_from_start,
        remark=_first_sizes_remark,
    ),
    Cause(
        "vanishes_from_start",
        "Outputs are next to nothing before any update: they shrink from layer to layer",
        evidence_for=("dead_units", "zero_gradients", "vanishing", NOT_LEARNING),
        advice="an initialization that keeps the scale (He for ReLU, Xavier for tanh), normalization layers, residual connections",
        explains=("zero_gradients", "frozen_updates", "dead_units", "vanishing", NOT_LEARNING),
        needs="in the first record the output of the last module is less than a 10,000th of the input",
        is_shown=lambda _finding, history: history.vanishes_from_start,
        remark=_first_sizes_remark,
        is_from_start=True,
    ),
    Cause(
        "own_targets",
        "Targets that the model computes itself run away",
        evidence_for=("diverging", "exploding"),
        advice="for values of reinforcement learning no further value behind the last state (1 - done), a discount below 1, a target "
        "network that follows slowly; else look at what is compared",
        explains=(*GROWTH, *SYMPTOMS, NONFINITE),
        needs="training_step calls the model without gradients, too, and steps are not large",
        is_shown=lambda _finding, history: history.facts.computes_targets and not history.has_large_steps,
    ),
    Cause(
        "learning_rate",
        "The learning rate is too high",
        evidence_for=(LARGE_STEPS, "exploding", "growing_weights", "growing_over_depth", "diverging", NONFINITE),
        advice="a learning rate that is ten times lower, warm-up, clipping of gradients",
        explains=(*GROWTH, *SYMPTOMS, NONFINITE, "shrinking_weights"),
        needs="of NaN and infinity: magnitudes had grown there, or steps are as large",
        is_shown=lambda finding, history: (
            search_named("learning_rate")(finding, history) or (not finding.cause and history.has_large_steps)
        ),
        evidence_against="the loss has not risen above its first values, nor jumped, and steps are not as large",
        is_ruled_out=lambda history: not (history.losses.has_risen or history.has_large_steps),
        remark=lambda history: (
            f"The loss rose from {history.losses.first:.3g} to {history.losses.largest:.3g}." if history.losses.has_risen else ""
        ),
    ),
    Cause(
        "weight_decay",
        "Weight decay, or a penalty on the weights, pulls them to zero",
        evidence_for=("shrinking_weights",),
        advice="a smaller weight_decay; torch.optim.Adam adds it to the gradient, which it then divides by its size, so that 0.1, "
        "customary with AdamW, is far too much; a smaller penalty in the loss",
        explains=SYMPTOMS,
        remark=_decay_remark,
    ),
)
