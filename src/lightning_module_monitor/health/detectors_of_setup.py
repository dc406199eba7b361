"""Detectors of mistakes in the set-up of training, by facts about the loss, the modules and the optimizers."""

from __future__ import annotations

from lightning_module_monitor.health.detector import ARITHMETIC, Detector, condition
from lightning_module_monitor.health.figures import without_gradient
from lightning_module_monitor.kinds import CONTEXT_KIND, FACT_KIND, LOSS

DETECTORS_OF_SETUP = (
    Detector(
        "no_gradients",
        [([FACT_KIND], ["no_gradient"]), (["gradient"], ["norm"]), ([CONTEXT_KIND], [LOSS])],
        formula="whether no parameter that an optimizer has has a gradient when it steps, or all gradients are exactly zero, and the loss "
        "is not",
        limit="in 3 records, unless there are gradients in the end",
        source=ARITHMETIC,
        severity="error",
        rule=condition(
            figures=without_gradient, above=0.5, for_steps=3, needs_step=True, phrase="No parameter gets a gradient other than zero"
        ),
    ),
    Detector(
        "maximizing",
        [([FACT_KIND], ["maximizes"])],
        formula="whether an optimizer has the option maximize",
        limit="in 3 records, under automatic optimization, while the training loss is not below the first one",
        source=ARITHMETIC,
        severity="error",
        rule=condition(above=0.5, for_steps=3, unless_loss_falls=0.0, phrase="An optimizer maximizes the loss"),
    ),
    Detector(
        "mixed_samples",
        [([FACT_KIND], ["mixes_samples"])],
        formula="whether a recurrent or attention module with batch_first=False gets an input of three dimensions, of which the first, "
        "and not the second, has the length of the batch; or a softmax is over that dimension, and its input is no square. Not where a "
        "cross-entropy has no label for each",
        limit="in 1 record",
        source=ARITHMETIC,
        severity="error",
        rule=condition(above=0.5, is_of_facts=True, phrase="{sites}: the samples of a batch are mixed"),
    ),
    Detector(
        "same_units",
        [([CONTEXT_KIND], ["same_units"])],
        formula="the number of linear and convolutional layers whose units, without their biases, return the same for all samples, in "
        "the first record; layers that return the same for all samples do not count",
        limit="above 0",
        source="plain arithmetic: units with the same weights get the same gradients",
        without="no linear or convolutional layer of several units ran",
        rule=condition(above=0.5, phrase="The units of {value:.0f} layers return the same"),
    ),
    Detector(
        "in_eval",
        [([FACT_KIND], ["in_eval"])],
        formula="whether a module with running statistics is in eval (module.training is False) while its own weights are trained",
        limit="in 3 records",
        source=ARITHMETIC,
        rule=condition(above=0.5, for_steps=3, is_of_facts=True, phrase="{sites}: in eval mode while the weights are trained"),
    ),
    Detector(
        "softmax_twice",
        [([FACT_KIND], ["softmax_twice"])],
        formula="whether the graph of the loss has a softmax or sigmoid before the log-softmax of a cross-entropy, or before a binary "
        "cross-entropy with logits",
        limit="in 1 record",
        source=ARITHMETIC,
        rule=condition(above=0.5, phrase="The loss takes the softmax or sigmoid of one"),
    ),
    Detector(
        "broadcast_loss",
        [([FACT_KIND], ["is_broadcast"])],
        formula="whether a loss of squares or magnitudes expands outputs of shape (N, 1) to (N, N); not inside of the model",
        limit="in 1 record",
        source=ARITHMETIC,
        severity="error",
        rule=condition(above=0.5, phrase="The loss compares each output with the targets of all samples"),
    ),
    Detector(
        "unregistered",
        [([FACT_KIND], ["num_unregistered"])],
        formula="the number of weights in the graph of the loss, by which an input is multiplied, that neither the module nor "
        "an optimizer has",
        limit="above 0, if the module or an optimizer has others",
        source=ARITHMETIC,
        rule=condition(above=0.5, phrase="{value:.0f} weights that get a gradient belong neither to the module nor to an optimizer"),
    ),
    Detector(
        "two_optimizers",
        [([FACT_KIND], ["in_two_optimizers"])],
        formula="whether an optimizer has all parameters of another one, and others besides",
        limit="in 1 record",
        source=ARITHMETIC,
        rule=condition(above=0.5, is_of_facts=True, phrase="{sites}: in two optimizers, of which one has other parameters, too"),
    ),
    Detector(
        "swapped_betas",
        [([FACT_KIND], ["has_swapped_betas"])],
        formula="whether the first beta of an optimizer is larger than the second one",
        limit="in 1 record",
        source="D. Kingma, J. Ba, Adam, arXiv 1412.6980: convergence needs the square of the first below the root of the second",
        rule=condition(above=0.5, phrase="The first beta of the optimizer is larger than the second one"),
    ),
    Detector(
        "two_values",
        [([FACT_KIND], ["of_two_values"])],
        formula="whether a normalization layer normalizes two values at a time, in the first record",
        limit="in 1 record",
        source="plain arithmetic: what is left of two values is the sign of their difference",
        rule=condition(above=0.5, is_of_facts=True, phrase="{sites}: two values at a time are normalized"),
    ),
)
