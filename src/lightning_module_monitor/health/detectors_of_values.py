"""Detectors of sizes and other values of a record."""

from __future__ import annotations

from lightning_module_monitor.health.bound import ORDER_OF_EVENTS
from lightning_module_monitor.health.detector import (
    ARITHMETIC,
    HEURISTIC,
    NO_LOSS,
    NORMS,
    NORMS_OF_GRADIENTS,
    NORMS_OF_PARAMETERS,
    Detector,
    condition,
)
from lightning_module_monitor.health.figures import (
    FINITE_STATISTICS,
    constant_output,
    moved_by_gradients,
    not_finite,
    of_outputs,
    over_the_input,
    relative_to_largest,
    totals,
    zeros_of_weights,
)
from lightning_module_monitor.health.finding_names import DIVERGING, GROWING_WEIGHTS, NONFINITE
from lightning_module_monitor.kinds import CONTEXT_KIND, LOSS

_SIZES = ("rms", "norm", "abs_max", "abs_mean")
_NO_WEIGHT = "no trained parameter, other than biases, has a gradient"
_NO_OUTPUT, _NO_ATTENTION = "no output of a module was recorded", "no attention ran"

DETECTORS_OF_VALUES = (
    Detector(
        NONFINITE,
        [(ORDER_OF_EVENTS, FINITE_STATISTICS)],
        formula="whether a tensor has NaN or infinity, in the order of events of a step; a training run searches for its origin instead",
        limit="one element",
        source=ARITHMETIC,
        severity="error",
        recorded_by="health: {nonfinite: always}",
        rule=condition(figures=not_finite, above=0.0, needs_step=True, phrase="The first value that is not finite is in {kind} {sites}"),
    ),
    Detector(
        "constant_output",
        [([CONTEXT_KIND], ["output_variation", "input_variation"])],
        formula="how much the last output of the model varies between the samples of a micro-batch: the norm of their differences from "
        "the first sample, over the norm of all elements; the largest of a step's calls",
        limit="below 1e-6 in 3 records, while that of the largest tensor of the batch is above 0.01",
        source="plain arithmetic: smaller variations are rounding errors",
        severity="error",
        without="no output of several samples was found",
        rule=condition(figures=constant_output, below=1e-6, for_steps=3, phrase="The output is the same for all samples, which differ"),
    ),
    Detector(
        "shrinking_outputs",
        [(["activation"], ["rms"])],
        formula="the rms of a module's first output, counted as at most 1, over the largest such value of its first 3 records; not that "
        "of the last module, which is to be as large as the targets",
        limit="below a tenth in 9 records in which the training loss is below the first one",
        source=HEURISTIC,
        without=_NO_OUTPUT,
        rule=condition(
            figures=of_outputs,
            below=0.1,
            relative_to="first",
            for_steps=9,
            needs_step=True,
            needs_fall=True,
            of_samples=True,
            without_last=True,
            phrase="{sites}: the size of the output is {times:.2g} of its start",
        ),
    ),
    Detector(
        "constant_input",
        [([CONTEXT_KIND], ["input_is_constant"])],
        formula="whether the largest tensor of a batch, and every other with several numbers a sample, is the same for all samples",
        limit="in 3 records",
        source=ARITHMETIC,
        without="batches have no tensor of two or more samples, or also objects of other classes, such as NumPy arrays",
        rule=condition(above=0.5, for_steps=3, unless_loss_falls=0.5, phrase="The input is the same for all samples of a batch"),
    ),
    Detector(
        "stale_gradients",
        [([CONTEXT_KIND], ["stale_gradients"])],
        formula="whether an optimizer's gradients were not zero when each backward pass of a step began",
        limit="in 3 records",
        source=ARITHMETIC,
        severity="error",
        without="no step of an optimizer was observed",
        rule=condition(above=0.5, for_steps=3, phrase="Gradients of earlier steps were still there when the backward pass began"),
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
        rule=condition(above=0.5, for_steps=10, unless_loss_falls=0.5, phrase="{sites}: {value:.0%} of the units are zero for every input"),
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
        rule=condition(above=0.9, for_steps=3, unless_loss_falls=0.5, phrase="{sites}: {value:.0%} of the outputs are in the flat part"),
    ),
    Detector(
        "vanishing",
        [(["gradient"], ["rms"])],
        formula="the largest rms among the gradients of a weight and of the three weights before it, over the largest rms of all "
        "weight gradients; gradients that are exactly zero are left out",
        limit="below a millionth in 3 records: the gradients of the weight and of the three weights before it are all that small",
        source="S. Hochreiter, Untersuchungen zu dynamischen neuronalen Netzen, 1991; Y. Bengio, P. Simard, P. Frasconi, "
        "Learning Long-Term Dependencies with Gradient Descent is Difficult, 1994; the limit is a heuristic",
        without=_NO_WEIGHT,
        rule=condition(
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
        NORMS_OF_GRADIENTS,
        formula="the norm of all gradients of trained parameters together, over the largest such norm of the first 3 records",
        limit="more than 100 times",
        source="R. Pascanu, T. Mikolov, Y. Bengio, On the difficulty of training recurrent neural networks, arXiv 1211.5063; "
        "the limit is a heuristic",
        severity="error",
        rule=condition(
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
        NORMS_OF_PARAMETERS,
        formula="the norm of all trained parameters together, over that of the first record",
        limit="more than 5 times, in 2 records within 200 steps; later, gradients, outputs and the loss show it. Or more than 100 "
        "times in the last record, if the loss has not fallen to a third",
        source=HEURISTIC,
        rule=condition(
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
        NORMS_OF_PARAMETERS,
        formula="the norm of all trained parameters together, over that of the first record",
        limit="below a tenth, in 3 records",
        source=HEURISTIC,
        rule=condition(
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
        NORMS,
        formula="whether the norm of a trained parameter equals that of the previous record to the last bit; a parameter is not judged "
        "while its learning rate is 0, while the norm of its gradient is below 1e-4 of the largest one, while it has no gradient but had "
        "one before (an expert that was not chosen), or, under manual optimization, while other parameters of its group move",
        limit="3 times",
        source="plain arithmetic: the norm of a parameter that moves changes",
        rule=condition(
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
        source=ARITHMETIC,
        severity="error",
        rule=condition(above=0.0, parameters="untrained", is_of_facts=True, phrase="{sites}: with a gradient, but in no optimizer"),
    ),
    Detector(
        DIVERGING,
        [([CONTEXT_KIND], [LOSS])],
        formula="the training loss over the largest of its first 5 records, while none is below 0; only under automatic optimization",
        limit="in 3 records more than 3 times, and by more than its noise: twice the spread of its logarithm from record to record",
        source=HEURISTIC,
        min_records=8,
        without=NO_LOSS,
        rule=condition(
            judges_rise=True, above=3.0, for_steps=3, phrase="The training loss is {value:.3g} times the largest of its first records"
        ),
    ),
    Detector(
        "growing_over_depth",
        [(["activation"], ["rms"]), ([CONTEXT_KIND], ["input_abs_max", LOSS])],
        formula="the rms of a module's first output, or the largest of later outputs and of the loss if that is less, over the rms of the "
        "first module's output or the largest magnitude of the input, whichever is smaller, or over 1 if that is larger",
        limit="more than 10,000 times, in 3 records: magnitudes multiply from layer to layer, or from token to token",
        source="K. He, X. Zhang, S. Ren, J. Sun, Delving Deep into Rectifiers, arXiv 1502.01852, on what keeps magnitudes; "
        "the limit is a heuristic",
        severity="error",
        without=_NO_OUTPUT,
        rule=condition(
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
        rule=condition(above=1e3, for_steps=3, phrase="{sites}: the largest logit of attention is {value:.3g}"),
        is_by_default=False,
    ),
    Detector(
        "zero_gradients",
        [(["gradient"], _SIZES), ([CONTEXT_KIND], [LOSS])],
        formula="whether the gradient of a weight is exactly zero",
        limit="in 10 records in which the loss is not 0",
        source=ARITHMETIC,
        without=_NO_WEIGHT,
        rule=condition(figures=zeros_of_weights, above=0.99, for_steps=10, needs_step=True, phrase="{sites}: gradients are exactly zero"),
    ),
)
