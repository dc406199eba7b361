"""The table of detectors: the values that each judges, its limit, and the limit's source. ``causes.py`` has the advice.

All are judged record by record, while training and later on a store, by the same code (``judge.py``). Those without a rule need the whole
run and are judged at its end. The limits of the tests on the loss are constants of ``run_history.py``.
"""

from __future__ import annotations

import functools

from lightning_module_monitor.health.alerts import AlertRule, nothing
from lightning_module_monitor.health.bound import ORDER_OF_EVENTS
from lightning_module_monitor.health.detector import Detector
from lightning_module_monitor.health.figures import (
    FINITE_STATISTICS,
    constant_output,
    moved_by_gradients,
    not_finite,
    of_outputs,
    over_the_input,
    relative_to_largest,
    totals,
    without_gradient,
    zeros_of_weights,
)
from lightning_module_monitor.kinds import CONTEXT_KIND, FACT_KIND, LOSS

_rule = functools.partial(AlertRule, "", nothing)
_SIZES = ("rms", "norm", "abs_max", "abs_mean")
_OF_PARAMETERS = ((("parameter",), ("norm",)), (("gradient",), ("norm",)))
_HEURISTIC = "a heuristic"
_NO_LOSS, _NO_OUTPUT, _NO_ATTENTION = "no loss was recorded", "no output of a module was recorded", "no attention ran"
_NO_WEIGHT = "no trained parameter, other than biases, has a gradient"
CONSTANT_TARGET = "constant_target"
DIVERGING = "diverging"
DROPOUT = "dropout"
GROWING_INPUT = "growing_input"
GROWING_WEIGHTS = "growing_weights"
LINEAR = "linear_model"
LARGE_START, LARGE_STEPS = "large_start", "large_steps"
NONFINITE = "nonfinite"
NOT_LEARNING = "not_learning"
ONE_SIDED = "one_sided"
OVERWRITTEN = "overwritten"
SKIPPED = "skipped_batches"
UNBOUNDED = "unbounded_loss"
ZERO_LOSS = "zero_loss"
ZERO_RATE = "zero_rate"

DETECTORS = {
    detector.name: detector
    for detector in (
        Detector(
            NONFINITE,
            [(ORDER_OF_EVENTS, FINITE_STATISTICS)],
            formula="whether a tensor has NaN or infinity, in the order of events of a step; training searches for its origin instead",
            limit="one element",
            source="plain arithmetic",
            severity="error",
            recorded_by="health: {nonfinite: always}",
            rule=_rule(figures=not_finite, above=0.0, needs_step=True, phrase="The first value that is not finite is in {kind} {sites}"),
        ),
        Detector(
            NOT_LEARNING,
            [([CONTEXT_KIND], [LOSS])],
            formula="a rank test (Mann-Whitney, one-sided) of the losses of the last third of the records against those of the first; "
            "of halves below 15 records. It also falls if it fell by a third within the first records, far more than it varies; a smaller "
            "fall in them alone is not judged. A loss below 0 is judged by its ranks alone. Not judged are losses of manual optimization, "
            "a cross-entropy that begins below 0.5, as that of trained weights does, and one that falls no further than to the logarithm "
            "of the number of classes, which is guessing",
            limit="the last losses are not lower at the level of 5 %, and that they are lower by 20 % is excluded at 5 %, also from the "
            "first record on; between the two nothing is known. Or all steps together can move no weight by more than 2 % of its norm, "
            "and the loss is not 10 % lower; or a schedule has brought the rate down so far that those of the last two thirds of the "
            "records cannot, and the loss has stalled. Where the steps can move no weight by more than 5 %, it needs 100 steps",
            source='H. Mann, D. Whitney, "On a Test of Whether one of Two Random Variables is Stochastically Larger than the Other", 1947',
            without=_NO_LOSS,
            min_records=10,
        ),
        Detector(
            ZERO_RATE,
            [([CONTEXT_KIND], ["lr"]), (["gradient"], ["norm"])],
            formula="the learning rates of parameter groups whose parameters have a gradient",
            limit="0 in every record, at least 3",
            source="plain arithmetic",
            severity="error",
            without="no learning rate was recorded",
            min_records=3,
        ),
        Detector(
            "no_gradients",
            [([FACT_KIND], ["no_gradient"]), (["gradient"], ["norm"])],
            formula="whether no parameter that an optimizer has has a gradient when it steps, or all gradients are exactly zero",
            limit="in 3 records",
            source="plain arithmetic",
            severity="error",
            rule=_rule(
                figures=without_gradient, above=0.5, for_steps=3, needs_step=True, phrase="No parameter gets a gradient other than zero"
            ),
        ),
        Detector(
            OVERWRITTEN,
            _OF_PARAMETERS,
            formula="the largest change of a trained parameter's norm since the first record, over its norm, and over how far all steps "
            "together can move a weight",
            limit="below a thousandth of either, where the steps can move a weight by more than 30 % of its norm, in at least 5 records; "
            "not for weights of 16 bits, which rounding may hold",
            source=_HEURISTIC,
            severity="error",
            min_records=5,
        ),
        Detector(
            "maximizing",
            [([FACT_KIND], ["maximizes"])],
            formula="whether an optimizer has the option maximize",
            limit="in 3 records, under automatic optimization, while the training loss is not below the first one",
            source="plain arithmetic",
            severity="error",
            rule=_rule(above=0.5, for_steps=3, unless_loss_falls=0.0, phrase="An optimizer maximizes the loss"),
        ),
        Detector(
            "mixed_samples",
            [([FACT_KIND], ["mixes_samples"])],
            formula="whether a recurrent or attention module with batch_first=False gets an input of three dimensions, of which the first, "
            "and not the second, has the length of the batch; or a softmax is over that dimension",
            limit="in 1 record",
            source="plain arithmetic",
            severity="error",
            rule=_rule(above=0.5, is_of_facts=True, phrase="{sites}: the samples of a batch are mixed"),
        ),
        Detector(
            "same_units",
            [([CONTEXT_KIND], ["same_units"])],
            formula="the number of linear and convolutional layers whose units, without their biases, return the same for all samples, in "
            "the first record; layers that return the same for all samples do not count",
            limit="above 0",
            source="plain arithmetic: units with the same weights get the same gradients",
            without="no linear or convolutional layer of several units ran",
            rule=_rule(above=0.5, phrase="The units of {value:.0f} layers return the same"),
        ),
        Detector(
            UNBOUNDED,
            [([CONTEXT_KIND], [LOSS])],
            formula="the training loss, under automatic optimization",
            limit="below 0, as the median of the last third of at least 10 records, and 100 times as large as the first one, or as 1",
            source=_HEURISTIC,
            severity="error",
            without=_NO_LOSS,
            min_records=10,
        ),
        Detector(
            ZERO_LOSS,
            [([CONTEXT_KIND], [LOSS])],
            formula="the training loss",
            limit="exactly 0 in every record, at least 3",
            source="plain arithmetic",
            severity="error",
            without=_NO_LOSS,
            min_records=3,
        ),
        Detector(
            SKIPPED,
            [([CONTEXT_KIND], [LOSS])],
            formula="the number of records without a loss, under automatic optimization: training_step has returned None",
            limit="a third or more of at least 10 records, while others have one",
            source=_HEURISTIC,
            without=_NO_LOSS,
            min_records=1,
        ),
        Detector(
            GROWING_INPUT,
            [([CONTEXT_KIND], ["input_abs_max"])],
            formula="the largest magnitude of the input: the median of the last third of the records, over the largest of the first third",
            limit="more than 1.25 times, with at least 10 records",
            source=_HEURISTIC,
            without="no floating tensor was found in a batch",
            min_records=10,
        ),
        Detector(
            LARGE_START,
            [([CONTEXT_KIND], [LOSS])],
            formula="the first loss, if it is the mean of a cross-entropy, over the logarithm of the number of classes",
            limit="more than 5 times, with at least 3 records",
            source="plain arithmetic: a network that guesses has a ratio of 1",
            without=_NO_LOSS,
            min_records=3,
        ),
        Detector(
            LARGE_STEPS,
            _OF_PARAMETERS,
            formula="how far the first recorded step of Adam and its relatives can move a weight, over its norm: the median of all weights",
            limit="more than 3 times, with at least 5 records: nothing of the initial weights is left",
            source=_HEURISTIC,
            min_records=5,
        ),
        Detector(
            ONE_SIDED,
            _OF_PARAMETERS[1:],
            formula="under manual optimization with several optimizers, the norm of the gradients of each one's parameters, as the "
            "median of the last third of the records, over the first",
            limit="below a thousandth, or above 1000 times, with at least 6 records",
            source=_HEURISTIC,
            without="there are no two optimizers under manual optimization",
            min_records=6,
        ),
        Detector(
            "in_eval",
            [([FACT_KIND], ["in_eval"])],
            formula="whether a module with running statistics is in eval (module.training is False) while its own weights are trained",
            limit="in 3 records",
            source="plain arithmetic",
            rule=_rule(above=0.5, for_steps=3, is_of_facts=True, phrase="{sites}: in eval mode while the weights are trained"),
        ),
        Detector(
            "softmax_twice",
            [([FACT_KIND], ["softmax_twice"])],
            formula="whether the graph of the loss has a softmax before the log-softmax of a cross-entropy, or a sigmoid before that "
            "of a binary cross-entropy with logits",
            limit="in 1 record",
            source="plain arithmetic",
            rule=_rule(above=0.5, phrase="The loss takes the softmax or sigmoid of one"),
        ),
        Detector(
            "broadcast_loss",
            [([FACT_KIND], ["is_broadcast"])],
            formula="whether a loss of squares or magnitudes expands outputs of shape (N, 1) to (N, N)",
            limit="in 1 record",
            source="plain arithmetic",
            severity="error",
            rule=_rule(above=0.5, phrase="The loss compares each output with the targets of all samples"),
        ),
        Detector(
            "unregistered",
            [([FACT_KIND], ["num_unregistered"])],
            formula="the number of weights in the graph of the loss, by which an input is multiplied, that neither the module nor "
            "an optimizer has",
            limit="above 0, if the module or an optimizer has others",
            source="plain arithmetic",
            rule=_rule(above=0.5, phrase="{value:.0f} weights that get a gradient belong neither to the module nor to an optimizer"),
        ),
        Detector(
            "two_optimizers",
            [([FACT_KIND], ["in_two_optimizers"])],
            formula="whether an optimizer has all parameters of another one, and others besides",
            limit="in 1 record",
            source="plain arithmetic",
            rule=_rule(above=0.5, is_of_facts=True, phrase="{sites}: in two optimizers, of which one has other parameters, too"),
        ),
        Detector(
            "swapped_betas",
            [([FACT_KIND], ["has_swapped_betas"])],
            formula="whether the first beta of an optimizer is larger than the second one",
            limit="in 1 record",
            source="D. Kingma, J. Ba, Adam, arXiv 1412.6980: convergence needs the square of the first below the root of the second",
            rule=_rule(above=0.5, phrase="The first beta of the optimizer is larger than the second one"),
        ),
        Detector(
            "two_values",
            [([FACT_KIND], ["of_two_values"])],
            formula="whether a normalization layer normalizes two values at a time, in the first record",
            limit="in 1 record",
            source="plain arithmetic: what is left of two values is the sign of their difference",
            rule=_rule(above=0.5, is_of_facts=True, phrase="{sites}: two values at a time are normalized"),
        ),
        Detector(
            LINEAR,
            [([FACT_KIND], ["is_linear"]), ([CONTEXT_KIND], [LOSS])],
            formula="whether the graph of the loss has a product by a weight behind another one, and none but linear functions behind them",
            limit="if the loss does not fall by 3 %, or no further than guessing",
            source="plain arithmetic: linear functions of linear functions are linear",
            min_records=10,
        ),
        Detector(
            DROPOUT,
            [([FACT_KIND], ["dropout"]), ([CONTEXT_KIND], [LOSS])],
            formula="the largest probability of a dropout module in training mode",
            limit="above 0.9, if the loss does not fall, or that is not known",
            source=_HEURISTIC,
            min_records=10,
        ),
        Detector(
            "constant_output",
            [([CONTEXT_KIND], ["output_variation", "input_variation"])],
            formula="how much the last output of the model varies between the samples of a micro-batch: the norm of their differences from "
            "the first sample, over the norm of all elements; the largest of a step's calls",
            limit="below 1e-6 in 3 records, while that of the largest tensor of the batch is above 0.01",
            source="plain arithmetic: what is below is rounding",
            severity="error",
            without="no output of several samples was found",
            rule=_rule(figures=constant_output, below=1e-6, for_steps=3, phrase="The output is the same for all samples, which differ"),
        ),
        Detector(
            CONSTANT_TARGET,
            [([CONTEXT_KIND], ["target_min", "target_max"])],
            formula="whether the labels that a cross-entropy compares with are all the same in a step of at least 8; how probable so many "
            "such steps are, whatever the frequencies of the classes, if the order is random",
            limit="below a millionth",
            source="plain arithmetic: the likelihood of the frequencies that make it largest, times the number of orders",
            severity="error",
            without="the loss is no cross-entropy of the only labels in the batch",
            min_records=3,
        ),
        Detector(
            "shrinking_outputs",
            [(["activation"], ["rms"])],
            formula="the rms of a module's first output, or 1 if it is larger, over the largest of its first 3 records",
            limit="below a tenth in 9 records in which the training loss is below the first one",
            source=_HEURISTIC,
            without=_NO_OUTPUT,
            rule=_rule(
                figures=of_outputs,
                below=0.1,
                relative_to="first",
                for_steps=9,
                needs_step=True,
                needs_fall=True,
                of_samples=True,
                phrase="{sites}: the size of the output is {times:.2g} of its start",
            ),
        ),
        Detector(
            "constant_input",
            [([CONTEXT_KIND], ["input_is_constant"])],
            formula="whether the largest tensor of a batch, and every other with several numbers a sample, is the same for all samples",
            limit="in 3 records",
            source="plain arithmetic",
            without="no tensor of two or more samples was found in a batch",
            rule=_rule(above=0.5, for_steps=3, unless_loss_falls=0.5, phrase="The input is the same for all samples of a batch"),
        ),
        Detector(
            "stale_gradients",
            [([CONTEXT_KIND], ["stale_gradients"])],
            formula="whether an optimizer's gradients were not zero when each backward pass of a step began",
            limit="in 3 records",
            source="plain arithmetic",
            severity="error",
            without="no step of an optimizer was observed",
            rule=_rule(above=0.5, for_steps=3, phrase="Gradients of earlier steps were still there when the backward pass began"),
        ),
        Detector(
            "dead_units",
            [(["activation"], ["dead_fraction"])],
            formula="the fraction of a ReLU's units that were zero for every input of the last 10 records, over all micro-batches and "
            "ranks; a unit is a channel of an output with four or five dimensions, else an index of its last dimension",
            limit="more than half of the units, for 10 records, on all ranks: they get no gradient, and stay dead",
            source="L. Lu, Y. Shin, Y. Su, G. Karniadakis, Dying ReLU and Initialization, arXiv 1903.06733; the limit is a heuristic",
            types=("ReLU", "ReLU6"),
            without="no such module ran",
            rule=_rule(above=0.5, for_steps=10, unless_loss_falls=0.5, phrase="{sites}: {value:.0%} of the units are zero for every input"),
        ),
        Detector(
            "saturation",
            [(["activation"], ["saturated_fraction"])],
            formula="for a Sigmoid or Tanh, the fraction of its outputs at which its slope is below 4 % of its largest slope; for a "
            "Softmax, the fraction of its distributions with a probability above 0.99",
            limit="more than 90 % of the outputs in the flat part in 3 records: next to no gradient comes through",
            source="X. Glorot, Y. Bengio, Understanding the difficulty of training deep feedforward neural networks, AISTATS 2010; "
            "the limit is a heuristic",
            types=("Sigmoid", "Tanh", "Softmax"),
            without="no such module ran",
            rule=_rule(above=0.9, for_steps=3, unless_loss_falls=0.5, phrase="{sites}: {value:.0%} of the outputs are in the flat part"),
        ),
        Detector(
            "vanishing",
            [(["gradient"], ["rms"])],
            formula="the largest rms among the gradients of a weight and of the three weights before it, over the largest rms of all "
            "weight gradients; gradients that are exactly zero are left out",
            limit="below a millionth of the largest weight gradient's rms in 3 records, as those of the weights before it",
            source="S. Hochreiter, Untersuchungen zu dynamischen neuronalen Netzen, 1991; Y. Bengio, P. Simard, P. Frasconi, "
            "Learning Long-Term Dependencies with Gradient Descent is Difficult, 1994; the limit is a heuristic",
            without=_NO_WEIGHT,
            rule=_rule(
                figures=relative_to_largest,
                below=1e-6,
                for_steps=3,
                needs_step=True,
                unless_loss_falls=0.5,
                parameters="trained",
                phrase="{sites}: the gradient is {value:.1e} of the largest one",
            ),
        ),
        Detector(
            "exploding",
            _OF_PARAMETERS[1:],
            formula="the norm of all gradients of trained parameters together, over the largest such norm of the first 3 records",
            limit="more than 100 times",
            source="R. Pascanu, T. Mikolov, Y. Bengio, On the difficulty of training recurrent neural networks, arXiv 1211.5063; "
            "the limit is a heuristic",
            severity="error",
            rule=_rule(
                figures=totals,
                above=100.0,
                relative_to="first",
                needs_step=True,
                unless_loss_falls=0.1,
                parameters="trained",
                phrase="Total {kind} {statistic}: {times:.3g} times its start{most}",
            ),
        ),
        Detector(
            GROWING_WEIGHTS,
            _OF_PARAMETERS[:1],
            formula="the norm of all trained parameters together, over that of the first record",
            limit="more than 5 times, in 2 records within 200 steps; later, gradients, outputs and the loss show it. Or more than 100 "
            "times in the last record, also if the loss falls",
            source=_HEURISTIC,
            rule=_rule(
                figures=totals,
                above=5.0,
                relative_to="first",
                num_base=1,
                for_steps=2,
                until_step=200,
                needs_step=True,
                unless_loss_falls=0.5,
                parameters="trained",
                phrase="Total {kind} {statistic}: {times:.3g} times its start{most}",
            ),
        ),
        Detector(
            "shrinking_weights",
            _OF_PARAMETERS[:1],
            formula="the norm of all trained parameters together, over that of the first record",
            limit="below a tenth, in 3 records",
            source=_HEURISTIC,
            rule=_rule(
                figures=totals,
                below=0.1,
                relative_to="first",
                num_base=1,
                for_steps=3,
                needs_step=True,
                unless_loss_falls=0.5,
                parameters="trained",
                phrase="Total {kind} {statistic}: {times:.3g} times its start",
            ),
        ),
        Detector(
            "frozen_updates",
            _OF_PARAMETERS,
            formula="whether the norm of a trained parameter equals that of the record before to the last bit; a parameter is passed over "
            "while the norm of its gradient is below 1e-4 of the largest one, while it has no gradient but had one before, as an "
            "expert that was not chosen, while its learning rate is 0, and, under manual optimization, while others of its group move",
            limit="3 times",
            source="plain arithmetic: what moves changes its norm",
            rule=_rule(
                figures=moved_by_gradients,
                is_unchanged=True,
                for_steps=3,
                needs_step=True,
                parameters="trained",
                needs_rate=True,
                phrase="{sites}: in an optimizer, but without any movement",
            ),
        ),
        Detector(
            "no_optimizer",
            [(["gradient"], ["norm"])],
            formula="the norm of the gradient of a parameter that requires a gradient and belongs to no optimizer",
            limit="above 0: it does not learn, and its gradient may accumulate",
            source="plain arithmetic",
            severity="error",
            rule=_rule(above=0.0, parameters="untrained", is_of_facts=True, phrase="{sites}: with a gradient, but in no optimizer"),
        ),
        Detector(
            DIVERGING,
            [([CONTEXT_KIND], [LOSS])],
            formula="the training loss over the largest of its first 5 records, while none is below 0; only under automatic optimization",
            limit="in 3 records more than 3 times, and by more than its noise: twice the spread of its logarithm from record to record",
            source=_HEURISTIC,
            min_records=8,
            without=_NO_LOSS,
            rule=_rule(
                judges_rise=True, above=3.0, for_steps=3, phrase="The training loss is {value:.3g} times the largest of its first records"
            ),
        ),
        Detector(
            "growing_over_depth",
            [(["activation"], ["rms"]), ([CONTEXT_KIND], ["input_abs_max"])],
            formula="the rms of a module's first output, over the smaller of that of the first module and the largest input, or over 1",
            limit="more than 10,000 times, in 3 records: magnitudes multiply from layer to layer, or from token to token",
            source="K. He, X. Zhang, S. Ren, J. Sun, Delving Deep into Rectifiers, arXiv 1502.01852, on what keeps magnitudes; "
            "the limit is a heuristic",
            severity="error",
            without=_NO_OUTPUT,
            rule=_rule(
                figures=over_the_input,
                above=1e4,
                for_steps=3,
                unless_loss_falls=0.5,
                of_samples=True,
                phrase="{sites}: the output is {value:.3g} times as large as the input",
            ),
        ),
        Detector(
            "large_logits",
            [(["attention_max_logit"], ["max"])],
            formula="the largest logit of a head",
            limit="above 1000 in 3 records; training tends to fail near 10,000",
            source="M. Wortsman and others, Small-scale proxies for large-scale Transformer training instabilities, arXiv 2309.14322",
            without=_NO_ATTENTION,
            rule=_rule(above=1e3, for_steps=3, phrase="{sites}: the largest logit of attention is {value:.3g}"),
            is_by_default=False,
        ),
        Detector(
            "zero_gradients",
            [(["gradient"], _SIZES)],
            formula="whether the gradient of a weight is exactly zero",
            limit="in 10 records",
            source="plain arithmetic",
            without=_NO_WEIGHT,
            rule=_rule(figures=zeros_of_weights, above=0.99, for_steps=10, needs_step=True, phrase="{sites}: gradients are exactly zero"),
        ),
    )
}
"""Detector by name, which is the name of its findings."""

BUILT_IN = {name: detector for name, detector in DETECTORS.items() if name != NONFINITE}
"""Detectors that ``health.watch`` may name."""
