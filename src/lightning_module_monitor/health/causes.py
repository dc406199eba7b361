"""The table of causes, in the order in which they are tried."""

from __future__ import annotations

from lightning_module_monitor.health.cause import GROWTH, SYMPTOMS, Cause, max_change_remark, search_named
from lightning_module_monitor.health.causes_in_layers import CAUSES_IN_LAYERS
from lightning_module_monitor.health.causes_in_setup import CAUSES_IN_SETUP
from lightning_module_monitor.health.causes_in_sizes import CAUSES_IN_SIZES
from lightning_module_monitor.health.causes_in_steps import CAUSES_IN_STEPS
from lightning_module_monitor.health.finding_names import NONFINITE, NOT_LEARNING

UNEXPLAINED = (
    Cause(
        "update",
        "Weights are not finite: an update, or code of the model that writes into them, has made them so",
        evidence_for=(NONFINITE,),
        advice="health: {nonfinite: always}, which names the module with the first non-finite gradient",
        explains=(NONFINITE, *GROWTH, *SYMPTOMS),
        needs="the weights themselves are not finite when the step begins",
        is_shown=search_named("update"),
    ),
    Cause(
        NONFINITE,
        "A value is not finite",
        evidence_for=(NONFINITE,),
        advice="look in the named code for logarithms of 0, divisions by 0 and overflow of exp",
        explains=(NONFINITE, *GROWTH, *SYMPTOMS),
    ),
    Cause(
        "shrinking_outputs",
        "An output has shrunk to next to nothing: it carries less and less",
        evidence_for=("shrinking_outputs",),
        advice="for a variational autoencoder a smaller or slowly growing weight of the KL term, or a weaker decoder; else a smaller "
        "penalty",
        explains=(NOT_LEARNING,),
    ),
    Cause(
        "growth",
        "Sizes grow, and the loss does not rise",
        evidence_for=("exploding", "growing_weights", "diverging", "growing_over_depth"),
        advice="clipping of gradients, a normalization layer, weight decay; look at the scale of inputs and targets",
        explains=(*GROWTH, NOT_LEARNING),
        remark=lambda _history: "The loss has not risen above its first values, so this alone does not show that the rate is too high.",
    ),
    Cause(
        "frozen_parameters",
        "Most of the model is frozen, and the rest cannot learn it",
        evidence_for=(NOT_LEARNING,),
        advice="requires_grad_(True) for what is to be trained; for trained weights more layers",
        explains=(NOT_LEARNING,),
        needs="9 of 10 elements of the parameters require no gradient",
        is_shown=lambda _finding, history: history.frozen_part > 0.9,
        remark=lambda history: f"{history.frozen_part:.1%} of the elements of all parameters are frozen.",
    ),
    Cause(
        NOT_LEARNING,
        "The loss does not fall, and no check that could judge shows why",
        evidence_for=(NOT_LEARNING,),
        advice="check that labels belong to their inputs, and that output and target have the same shape; train on one batch until its "
        "loss is near 0; other learning rates. The loss of trained weights may stay where it is",
        remark=max_change_remark,
    ),
)
"""Findings that no other cause explains, each under its own name."""

CAUSES = (*CAUSES_IN_SETUP, *CAUSES_IN_SIZES, *CAUSES_IN_LAYERS, *CAUSES_IN_STEPS, *UNEXPLAINED)
"""In the order in which they are tried: what is certain comes before what is likely."""
