"""Causes in layers and networks: units that are dead or saturated, outputs without information, gradients that vanish."""

from __future__ import annotations

from lightning_module_monitor.health.alerts import has_fallen
from lightning_module_monitor.health.cause import FLAT, GROWTH, STILL, SYMPTOMS, Cause
from lightning_module_monitor.health.finding_names import DROPOUT, LARGE_START, LINEAR, NOT_LEARNING, ONE_SIDED
from lightning_module_monitor.health.learning import SMALL_CHANGE
from lightning_module_monitor.health.whole_run import constant_from, hardly_varies, varies_before

CAUSES_IN_LAYERS = (
    Cause(
        "attention",
        "Attention is saturated: heads look at a single key",
        evidence_for=("large_logits",),
        advice="a normalization of queries and keys, a scale of 1 / sqrt(d), a lower learning rate, longer warm-up",
        explains=("saturation", "vanishing", "zero_gradients", NOT_LEARNING),
    ),
    Cause(
        "dead_from_start",
        "ReLU units are dead from the start: the initialization kills them",
        evidence_for=("dead_units",),
        advice="biases that start at 0, He initialization, LeakyReLU or GELU, a normalization layer in front",
        explains=(*STILL, "vanishing", "constant_output", NOT_LEARNING),
        needs="from the first record on, and the input of the ReLU differs between samples",
        is_shown=lambda finding, history: finding.first_step == 0 and varies_before(history, finding.site),
    ),
    Cause(
        "constant_output",
        "The output does not depend on the input",
        evidence_for=("constant_output",),
        advice="look at the module that is named, and at what training_step gives to it: a mask that is upside down, a normalization over "
        "one feature, an input that is overwritten",
        explains=SYMPTOMS,
        needs="from the first record on, all outputs from one module on are the same for all samples, and those before it are not",
        is_shown=lambda finding, history: finding.first_step == 0 and bool(constant_from(history)),
        site=constant_from,
    ),
    Cause(
        LINEAR,
        "The model has no function that is not linear, so that it is a single linear layer",
        evidence_for=(LINEAR,),
        advice="an activation function between the layers; nn.LeakyReLU(True) has a slope of 1: inplace is its second argument",
        explains=SYMPTOMS,
    ),
    Cause(
        DROPOUT,
        "Dropout leaves next to nothing",
        evidence_for=(DROPOUT,),
        advice="a probability of 0.1 to 0.5",
        explains=SYMPTOMS,
    ),
    Cause(
        "dead_units",
        "ReLU units have died while training",
        evidence_for=("dead_units",),
        advice="a lower learning rate, warm-up, LeakyReLU or GELU, a normalization layer in front; a model whose targets are below 0 does "
        "not end in a ReLU",
        explains=(*STILL, "vanishing", "constant_output", "shrinking_outputs", NOT_LEARNING),
    ),
    Cause(
        "saturation",
        "Activation functions are saturated: next to no gradient comes through",
        evidence_for=("saturation",),
        advice="a smaller initialization, a normalization layer in front, ReLU or GELU; for a softmax a scale of 1 / sqrt(d)",
        explains=(LARGE_START, "vanishing", *STILL, "constant_output", "shrinking_outputs", NOT_LEARNING),
    ),
    Cause(
        LARGE_START,
        "The outputs are far too large at the start: the first loss is many times that of guessing",
        evidence_for=(LARGE_START,),
        advice="smaller weights of the last layer, such as a deviation of 0.02, also where it shares them with an embedding; a "
        "normalization layer in front; for trained weights look whether the labels have the numbers that they were trained with",
        explains=(NOT_LEARNING, "exploding", "growing_weights", "saturation", "large_logits"),
        is_from_start=True,
    ),
    Cause(
        "vanishing",
        "Gradients vanish on their way back",
        evidence_for=("vanishing",),
        advice="residual connections, normalization layers, an initialization that keeps the scale, fewer layers; where the gradients were "
        "larger at first, a lower learning rate and warm-up",
        explains=(*STILL, "constant_output", NOT_LEARNING),
        evidence_against="the loss has fallen by more than half",
        is_ruled_out=lambda history: not history.facts.is_manual and has_fallen(history.losses.first, history.loss, 0.5),
    ),
    Cause(
        ONE_SIDED,
        "The networks have come out of balance: the gradients of one optimizer have faded or exploded",
        evidence_for=(ONE_SIDED,),
        advice="for a GAN a loss that does not saturate (-log D(G(z)) for the generator), a slower discriminator, a gradient penalty",
        explains=(*GROWTH, *FLAT, *STILL, "dead_units", "constant_output", "shrinking_outputs"),
    ),
    Cause(
        "lost_input",
        "The output hardly depends on the input",
        evidence_for=("constant_output", NOT_LEARNING),
        advice="look for a normalization over a single feature, and for a mask that is upside down; if it came later, a lower learning "
        "rate and warm-up",
        explains=SYMPTOMS,
        needs="for a loss that does not fall: the output's variation between samples was never above 0.001, and steps were large enough",
        is_shown=lambda finding, history: (
            finding.name != NOT_LEARNING or (hardly_varies(history) and not history.max_relative_change < SMALL_CHANGE)
        ),
        remark=lambda history: f"The output's variation between samples was at most {history.largest_variation:.2g}.",
    ),
)
