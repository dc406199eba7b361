"""Detectors that need the whole run, and are judged at its end (``whole_run.py``)."""

from __future__ import annotations

from lightning_module_monitor.health.detector import ARITHMETIC, HEURISTIC, NO_LOSS, NORMS, NORMS_OF_GRADIENTS, Detector
from lightning_module_monitor.health.finding_names import (
    CONSTANT_TARGET,
    DROPOUT,
    GROWING_INPUT,
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
from lightning_module_monitor.kinds import CONTEXT_KIND, FACT_KIND, LOSS

DETECTORS_OF_RUNS = (
    Detector(
        NOT_LEARNING,
        [([CONTEXT_KIND], [LOSS])],
        formula="a rank test (Mann-Whitney, one-sided) of the losses of the last third of the records against those of the first; "
        "of halves below 15 records. It also falls if it fell by a third within the first records, far more than it varies; a smaller "
        "fall in them alone is not judged. A loss below 0 is judged by its ranks alone. Not judged are losses of manual optimization, "
        "a cross-entropy that begins below 0.5, as that of trained weights does, and one that falls no further than to the logarithm "
        "of the number of classes, which is guessing",
        limit="no significant decrease (5 %), and a decrease of 20 % is ruled out (5 %), also relative to the first record; otherwise "
        "undecided. Or all steps together can move no weight by more than 2 % of its norm, and the loss is not 10 % lower; or a schedule "
        "has brought the learning rate down so far that the steps of the last two thirds of the records cannot, and the loss has stalled. "
        "Where the steps can move no weight by more than 5 %, it needs 100 steps",
        source='H. Mann, D. Whitney, "On a Test of Whether one of Two Random Variables is Stochastically Larger than the Other", 1947',
        without=NO_LOSS,
        min_records=10,
    ),
    Detector(
        ZERO_RATE,
        [([CONTEXT_KIND], ["lr"]), (["gradient"], ["norm"])],
        formula="the learning rates of parameter groups whose parameters have a gradient",
        limit="0 in every record, at least 3",
        source=ARITHMETIC,
        severity="error",
        without="no learning rate was recorded",
        min_records=3,
    ),
    Detector(
        OVERWRITTEN,
        NORMS,
        formula="the largest change of a trained parameter's norm since the first record, over its norm, and over how far all steps "
        "together can move a weight",
        limit="below a thousandth of either, where the steps can move a weight by more than 30 % of its norm, in at least 5 records; "
        "not for weights of 16 bits, which rounding may hold, nor if the loss falls, or has fallen by half",
        source=HEURISTIC,
        severity="error",
        min_records=5,
    ),
    Detector(
        UNBOUNDED,
        [([CONTEXT_KIND], [LOSS])],
        formula="the training loss, under automatic optimization",
        limit="below 0, as the median of the last third of at least 10 records, 100 times as large as the first one, or as 1, and below "
        "that of the third before by a tenth of the whole fall",
        source=HEURISTIC,
        severity="error",
        without=NO_LOSS,
        min_records=10,
    ),
    Detector(
        ZERO_LOSS,
        [([CONTEXT_KIND], [LOSS])],
        formula="the training loss",
        limit="exactly 0 in every record, at least 3",
        source=ARITHMETIC,
        severity="error",
        without=NO_LOSS,
        min_records=3,
    ),
    Detector(
        SKIPPED,
        [([CONTEXT_KIND], [LOSS])],
        formula="the number of records without a loss, behind the first with one, under automatic optimization: training_step has returned "
        "None",
        limit="a third or more of at least 10 records",
        source=HEURISTIC,
        without=NO_LOSS,
        min_records=1,
    ),
    Detector(
        GROWING_INPUT,
        [([CONTEXT_KIND], ["input_abs_max"])],
        formula="the largest magnitude of the input: the median of the last third of the records, over the largest of the first third; of "
        "halves below 15 records",
        limit="more than 1.25 times, and by a rank test (Mann-Whitney, one-sided, 1 %) of the two, with at least 10 records",
        source=HEURISTIC,
        without="no floating tensor was found in a batch",
        min_records=10,
    ),
    Detector(
        LARGE_START,
        [([CONTEXT_KIND], [LOSS])],
        formula="the first loss, if it is the mean of a cross-entropy, over the logarithm of the number of classes",
        limit="more than 5 times, with at least 3 records",
        source="plain arithmetic: a network that guesses has a ratio of 1",
        without=NO_LOSS,
        min_records=3,
    ),
    Detector(
        LARGE_STEPS,
        NORMS,
        formula="how far the first recorded step of Adam and its relatives can move a weight, over its norm: the median of all weights",
        limit="more than 3 times, with at least 5 records: nothing of the initial weights is left",
        source=HEURISTIC,
        min_records=5,
    ),
    Detector(
        ONE_SIDED,
        NORMS_OF_GRADIENTS,
        formula="under manual optimization with several optimizers, the norm of the gradients of each one's parameters, as the "
        "median of the last third of the records, over the first",
        limit="below a thousandth, or above 1000 times, with at least 6 records",
        source=HEURISTIC,
        without="there are no two optimizers under manual optimization",
        min_records=6,
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
        source=HEURISTIC,
        min_records=10,
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
)
