"""The table of causes: what shows each, what rules it out, what it explains, and what to try."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_module_monitor.health.alerts import has_fallen
from lightning_module_monitor.health.detectors import (
    CONSTANT_TARGET,
    DROPOUT,
    GROWING_INPUT,
    LARGE_START,
    LARGE_STEPS,
    LINEAR,
    NONFINITE,
    NOT_LEARNING,
    ONE_SIDED,
    OVERWRITTEN,
    SKIPPED,
    UNBOUNDED,
    ZERO_LOSS,
    ZERO_RATE,
)
from lightning_module_monitor.health.run_history import SMALL_REACH, History
from lightning_module_monitor.health.whole_run import constant_from, hardly_varies, varies_before
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import RANK_DISAGREEMENT
from lightning_module_monitor.record import Finding

CURE = "look for code that changes it on a single rank, e.g. a parameter that the reduction of gradients leaves out"
"""What to try where ranks disagree."""


@dataclass(frozen=True)
class Cause:
    """An entry of the table of causes."""

    name: str
    headline: str
    evidence_for: tuple[str, ...]
    """Names of the findings that show it."""
    advice: str
    explains: tuple[str, ...] = ()
    """Names of the findings that may follow from it, unless they begin earlier."""
    needs: str = ""
    """Further evidence for it, in words; ``is_shown`` tests it."""
    is_shown: Callable[[Finding, History], bool] = lambda _finding, _history: True
    """Whether a finding with such a name shows the cause, given the history of the run."""
    evidence_against: str = ""
    """The evidence that rules it out, in words; ``is_ruled_out`` tests it."""
    is_ruled_out: Callable[[History], bool] = lambda _history: False
    remark: Callable[[History], str] = lambda _history: ""
    """A sentence with the figures that show it, or that rule other causes out."""
    is_from_start: bool = False
    """Whether the first record shows it, whenever its findings come."""
    site: Callable[[History], str] = lambda _history: ""
    """The module or parameter that shows it, where its findings have none."""


def _cause_is(*names: str) -> Callable[[Finding, History], bool]:
    """Whether the search for a non-finite value named one of these causes; an empty name stands for no cause."""
    return lambda finding, _history: finding.name != NONFINITE or finding.cause in names


def _is_idle(finding: Finding) -> bool:
    """Whether zeros were there before any update, as those of a module that is not used; later ones are of units that died."""
    return finding.name == "zero_gradients" and finding.first_step == 0


def _has_moved(finding: Finding, history: History) -> bool:
    """Whether the norm of a parameter has changed between the last two records."""
    before, last = (values.get(Key("parameter", finding.site, "norm"), math.nan) for values in (history.before, history.last))
    return abs(last - before) > 0  # not if either is NaN


def _first_sizes_in_words(history: History) -> str:
    sizes = {"loss": history.first_loss, "gradient": history.first.get("gradient"), "output": history.first.get("output")}
    known = (f"{name} {size:.2g}" for name, size in sizes.items() if size is not None and not math.isnan(size))
    return f"In the first record: {', '.join(known)}."


def _reach_in_words(history: History) -> str:
    reach = history.reach
    times = f"{reach:.0f} times" if reach >= 10 else f"{reach:.2g} of"
    return f"All steps together can move a weight by {times} its norm." if math.isfinite(reach) else ""


def _rate_in_words(history: History) -> str:
    name, rate = max(history.rates.items(), key=lambda item: item[1].largest)
    rises = history.newest(name) == rate.largest > 2 * rate.first
    warm_up = ", and its warm-up is longer than the run (Lightning steps a scheduler once per epoch, unless its interval is step)"
    eps = max((group.eps for group in history.facts.groups), default=0.0)
    damped = f" Its optimizer divides by at least eps, which is {eps:.2g}: a smaller one makes larger steps." if eps > 1e-3 else ""
    return f"The learning rate is at most {rate.largest:.2g}{warm_up if rises else ''}.{damped}"


def _decay_in_words(history: History) -> str:
    decay = max((group.weight_decay for group in history.facts.groups), default=0.0)
    return f"weight_decay is {decay:.3g}." if decay > 0 else "No optimizer has a weight decay, so look for a penalty in the loss."


_GROWTH = (LARGE_STEPS, LARGE_START, "exploding", "growing_weights", "diverging", "growing_over_depth", ONE_SIDED)
_FLAT = ("saturation", "vanishing", "large_logits")
_STILL = ("zero_gradients", "no_gradients", "frozen_updates", OVERWRITTEN)
_SYMPTOMS = (*_STILL, *_FLAT, "dead_units", "constant_output", "shrinking_outputs", NOT_LEARNING)
_SLOWER = "a learning rate that is ten times lower, warm-up, clipping of gradients"

CAUSES = (
    Cause(
        "data",
        "The data has NaN or infinity",
        (NONFINITE,),
        "look at the batch of that step, and drop or clip what is not finite in the data set",
        (*_SYMPTOMS, *_GROWTH, NONFINITE),
        "the batch itself is not finite",
        is_shown=_cause_is("data"),
    ),
    Cause(RANK_DISAGREEMENT, "Ranks have come apart: copies of one parameter differ", (RANK_DISAGREEMENT,), CURE, _GROWTH),
    Cause(
        "no_optimizer",
        "Some parameters get a gradient but are in no optimizer",
        ("no_optimizer",),
        "give them to the optimizer in configure_optimizers, or set requires_grad to False where they are to stay as they are",
        ("frozen_updates", "exploding", NOT_LEARNING),
    ),
    Cause(
        ZERO_RATE,
        "The learning rate of a parameter group is 0",
        (ZERO_RATE,),
        "give the group a learning rate; for a warm-up in steps, configure the scheduler with interval: step, as Lightning's default is a "
        "step per epoch; or set requires_grad to False where the group is to stay as it is",
        ("frozen_updates", OVERWRITTEN, NOT_LEARNING),
    ),
    Cause(
        ZERO_LOSS,
        "The loss is exactly 0: nothing is left of it",
        (ZERO_LOSS,),
        "look for targets that are all ignored or masked, a weight of 0, and zero_infinity of a CTC loss whose inputs are too short",
        (*_SYMPTOMS,),
    ),
    Cause(
        SKIPPED,
        "Many batches are left out: training_step returns no loss",
        (SKIPPED,),
        "look at the condition under which training_step returns None",
        (*_SYMPTOMS,),
    ),
    Cause(
        "cleared_gradients",
        "Optimizers step without any gradient",
        ("no_gradients",),
        "look for a zero_grad() between the backward pass and the step, and for a loss that does not depend on the parameters",
        (*_SYMPTOMS,),
        "no parameter of an optimizer has a gradient when it steps",
        is_shown=lambda _finding, history: history.facts.no_gradient,
    ),
    Cause(
        OVERWRITTEN,
        "Weights are written over after each step",
        (OVERWRITTEN,),
        "look for code that writes into the weights, such as a moving average or a state_dict that is loaded in each step; a moving "
        "average belongs into a copy",
        ("frozen_updates", NOT_LEARNING),
        remark=_reach_in_words,
    ),
    Cause(
        "stale_gradients",
        "Gradients are never set to zero: each step adds to the gradients of earlier steps",
        ("stale_gradients",),
        "optimizer.zero_grad() before the backward pass",
        (*_GROWTH, *_SYMPTOMS, NONFINITE),
    ),
    Cause(
        "maximizing",
        "The optimizer maximizes the loss",
        ("maximizing",),
        "maximize=False; or minus the quantity that is to become large as the loss",
        (*_GROWTH, *_SYMPTOMS, NONFINITE),
    ),
    Cause(
        "mixed_samples",
        "A module takes the samples of a batch for the elements of a sequence, or of a distribution",
        ("mixed_samples",),
        "batch_first=True, or an input whose first dimension is that of the sequence; a softmax over the last dimension",
        (*_GROWTH, *_SYMPTOMS, NONFINITE),
    ),
    Cause(
        "same_units",
        "All units of a layer are the same: they begin with the same weights, and stay together",
        ("same_units",),
        "random weights, as torch's layers have by default; zeros for the last layer of a residual branch alone",
        (*_SYMPTOMS,),
    ),
    Cause(
        UNBOUNDED,
        "The loss has no lower bound, and falls without end",
        (UNBOUNDED,),
        "look at its sign, and at what it expects: nll_loss gets log-probabilities (log_softmax), and a likelihood a smallest deviation",
        (*_GROWTH, *_SYMPTOMS, NONFINITE),
    ),
    Cause(
        "softmax_twice",
        "The loss takes a softmax or sigmoid twice: the model has one, and the loss its own",
        ("softmax_twice",),
        "give the loss the logits of the model",
        (*_FLAT, "zero_gradients", NOT_LEARNING),
    ),
    Cause(
        "broadcast_loss",
        "The loss compares each output with the targets of all samples, as their shapes are (N, 1) and (N,)",
        ("broadcast_loss",),
        "give both one shape: output.squeeze(1), or target.unsqueeze(1)",
        (*_SYMPTOMS,),
    ),
    Cause(
        "two_values",
        "A normalization layer gets two values at a time: only the sign of their difference is left",
        ("two_values",),
        "larger batches for BatchNorm, which does not see accumulated ones; else LayerNorm or GroupNorm over more features",
        (*_SYMPTOMS, *_GROWTH),
    ),
    Cause(
        "unregistered",
        "Some weights belong neither to the module nor to an optimizer: they are not trained",
        ("unregistered",),
        "nn.ModuleList, nn.ModuleDict or nn.ParameterList in place of a list or dict, and nn.Parameter in place of a tensor; "
        "requires_grad_(False) for what is not to be trained",
        (*_SYMPTOMS,),
    ),
    Cause(
        "two_optimizers",
        "Two optimizers step the same parameters",
        ("two_optimizers",),
        "give each optimizer the parameters of its own network alone",
        (*_SYMPTOMS, *_GROWTH, ONE_SIDED),
    ),
    Cause(
        "swapped_betas",
        "The betas of an optimizer are swapped: it averages gradients over more steps than their squares",
        ("swapped_betas",),
        "betas=(0.9, 0.999), which is Adam's default",
        (*_SYMPTOMS, *_GROWTH),
    ),
    Cause(
        "constant_input",
        "The input is the same for all samples",
        ("constant_input",),
        "look at what the data set returns, and at its transforms",
        (*_SYMPTOMS, *_GROWTH),
    ),
    Cause(
        GROWING_INPUT,
        "The input grows while the model trains",
        (GROWING_INPUT,),
        "look for an augmentation or a transform that writes into the data itself: x = x.clone() before it",
        (*_SYMPTOMS, *_GROWTH),
    ),
    Cause(
        CONSTANT_TARGET,
        "Each batch has samples of one class alone",
        (CONSTANT_TARGET,),
        "shuffle the data: shuffle=True in the DataLoader, or a sampler that mixes classes",
        (*_SYMPTOMS, *_GROWTH),
    ),
    Cause(
        "in_eval",
        "Normalization layers are in eval while their weights are trained",
        ("in_eval",),
        "call train() on the model before the fit, or freeze their weights by requires_grad = False where it is meant",
        (*_GROWTH, *_FLAT, NOT_LEARNING, NONFINITE),
    ),
    Cause(
        "masked_row",
        "Attention has a row in which all keys are masked",
        (NONFINITE,),
        "leave one key visible for every query, e.g. the token itself; or drop samples that are padding alone",
        (*_SYMPTOMS, *_GROWTH, NONFINITE),
        "a softmax gets a row of minus infinity, or a mask without a visible key",
        is_shown=_cause_is("masked_row"),
    ),
    Cause(
        "rounded_eps",
        "The eps of the optimizer is rounded to 0 in float16, so that it divides 0 by 0",
        (NONFINITE,),
        "an eps of at least 1e-4; or weights in float32 (precision: 16-mixed or bf16-mixed)",
        (NONFINITE, *_GROWTH, *_SYMPTOMS),
        "the weights are in float16, and not finite after an update",
        is_shown=lambda finding, history: (
            any(group.eps_is_zero for group in history.facts.groups) and _cause_is("overflow", "update", "learning_rate")(finding, history)
        ),
    ),
    Cause(
        "overflow",
        "Values overflow float16",
        (NONFINITE,),
        "precision: bf16-mixed, which has the range of float32; smaller weights, inputs or losses",
        (NONFINITE, NOT_LEARNING, "frozen_updates"),
        "the run computes in float16",
        is_shown=_cause_is("overflow"),
    ),
    Cause(
        "infinite_slope",
        "The derivative of a function is infinite at its input",
        (NONFINITE,),
        "the derivative of a root or a norm is infinite at 0: add a small number below the root, e.g. 1e-8; torch.where passes on a NaN "
        "from the branch that it does not take",
        (*_SYMPTOMS, *_GROWTH, NONFINITE),
        "all values are finite, and a gradient is not",
        is_shown=_cause_is("infinite_slope"),
    ),
    Cause(
        "missing_normalization",
        "Activations grow from layer to layer",
        ("growing_over_depth",),
        "normalization layers, an initialization that keeps the scale (He for ReLU, Xavier for tanh), residual connections",
        (*_GROWTH, *_SYMPTOMS, NONFINITE),
        "from the first record on, and not in the first module",
        is_shown=lambda finding, history: finding.first_step == 0 and not history.explodes_in_first_module,
    ),
    Cause(
        "summed_loss",
        "The loss is summed over the samples: the learning rate is as many times too high",
        (*_GROWTH, "dead_units", NOT_LEARNING, NONFINITE),
        "the mean over the samples: reduction='mean'; or a learning rate that is divided by the size of a batch",
        (*_GROWTH, *_SYMPTOMS, NONFINITE),
        "the graph of the loss has the sum, and the loss has risen",
        is_shown=lambda finding, history: (
            history.facts.is_summed and history.has_risen and _cause_is("", "learning_rate", "update")(finding, history)
        ),
    ),
    Cause(
        "unscaled_targets",
        "The targets are far larger than the outputs of the model",
        (NOT_LEARNING, *_GROWTH, "dead_units", "saturation", "zero_gradients"),
        "scale the targets: subtract their mean and divide by their standard deviation",
        (*_GROWTH, *_SYMPTOMS, NONFINITE),
        "a large first loss, with outputs much smaller than its square root",
        is_shown=lambda finding, history: history.has_small_outputs and not _is_idle(finding),
        remark=lambda history: f"The first loss was {history.first_loss:.3g}, with outputs of {history.first['output']:.2g} (rms).",
        is_from_start=True,
    ),
    Cause(
        "unscaled_input",
        "The input is far from a size of 1",
        (NOT_LEARNING, *_GROWTH, "dead_units", "saturation", "zero_gradients", NONFINITE),
        "scale the input: subtract its mean and divide by its standard deviation",
        (*_GROWTH, *_SYMPTOMS, NONFINITE),
        "the input had a value above 50 in the first record, or none above 0.02",
        is_shown=lambda finding, history: (
            history.has_unscaled_input and not _is_idle(finding) and _cause_is("", "learning_rate", "update")(finding, history)
        ),
        is_from_start=True,
    ),
    Cause(
        "explodes_from_start",
        "Outputs or gradients are huge before any update",
        (LARGE_START, "exploding", "growing_weights", "growing_over_depth", "diverging", NONFINITE),
        "clipping of gradients; for a recurrent network an orthogonal initialization, LSTM or GRU; else normalization layers",
        (*_GROWTH, *_SYMPTOMS, NONFINITE),
        "before any update the gradient is 1000 times the loss or the output 1000 times the input; or a recurrent module makes NaN",
        is_shown=lambda finding, history: finding.cause == "recurrent" or history.explodes_from_start,
        remark=_first_sizes_in_words,
    ),
    Cause(
        "vanishes_from_start",
        "Outputs are next to nothing before any update: they shrink from layer to layer",
        ("dead_units", "zero_gradients", "vanishing", NOT_LEARNING),
        "an initialization that keeps the scale (He for ReLU, Xavier for tanh), normalization layers, residual connections",
        ("zero_gradients", "frozen_updates", "dead_units", "vanishing", NOT_LEARNING),
        "in the first record the output of the last module is less than a 10,000th of the input",
        is_shown=lambda _finding, history: history.vanishes_from_start,
        remark=_first_sizes_in_words,
        is_from_start=True,
    ),
    Cause(
        "own_targets",
        "Targets that the model computes itself run away",
        ("diverging", "exploding"),
        "for values of reinforcement learning no further value behind the last state (1 - done), a discount below 1, a target network that "
        "follows slowly; else look at what is compared",
        (*_GROWTH, *_SYMPTOMS, NONFINITE),
        "training_step calls the model without gradients, too, and steps are not large",
        is_shown=lambda _finding, history: history.facts.computes_targets and not history.has_large_steps,
    ),
    Cause(
        "learning_rate",
        "The learning rate is too high",
        (LARGE_STEPS, "exploding", "growing_weights", "growing_over_depth", "diverging", NONFINITE),
        _SLOWER,
        (*_GROWTH, *_SYMPTOMS, NONFINITE, "shrinking_weights"),
        "of NaN and infinity: magnitudes had grown there, or steps are as large",
        is_shown=lambda finding, history: _cause_is("learning_rate")(finding, history) or (not finding.cause and history.has_large_steps),
        evidence_against="the loss has not risen above its first values, nor jumped, and steps are not as large",
        is_ruled_out=lambda history: not (history.has_risen or history.has_large_steps),
        remark=lambda history: f"The loss rose from {history.first_loss:.3g} to {history.largest_loss:.3g}." if history.has_risen else "",
    ),
    Cause(
        "weight_decay",
        "Weight decay, or a penalty on the weights, pulls them to zero",
        ("shrinking_weights",),
        "a smaller weight_decay; torch.optim.Adam adds it to the gradient, which it then divides by its size, so that 0.1, customary with "
        "AdamW, is far too much; a smaller penalty in the loss",
        (*_SYMPTOMS,),
        remark=_decay_in_words,
    ),
    Cause(
        "attention",
        "Attention is saturated: heads look at a single key",
        ("large_logits",),
        "a normalization of queries and keys, a scale of 1 / sqrt(d), a lower learning rate, longer warm-up",
        ("saturation", "vanishing", "zero_gradients", NOT_LEARNING),
    ),
    Cause(
        "dead_from_start",
        "ReLU units are dead from the start: the initialization kills them",
        ("dead_units",),
        "biases that start at 0, He initialization, LeakyReLU or GELU, a normalization layer in front",
        (*_STILL, "vanishing", "constant_output", NOT_LEARNING),
        "from the first record on, and the input of the ReLU differs between samples",
        is_shown=lambda finding, history: finding.first_step == 0 and varies_before(history, finding.site),
    ),
    Cause(
        "constant_output",
        "The output does not depend on the input",
        ("constant_output",),
        "look at the module that is named, and at what training_step gives to it: a mask that is upside down, a normalization over one "
        "feature, an input that is overwritten",
        (*_SYMPTOMS,),
        "from the first record on, all outputs from one module on are the same for all samples, and those before it are not",
        is_shown=lambda finding, history: finding.first_step == 0 and bool(constant_from(history)),
        site=constant_from,
    ),
    Cause(
        LINEAR,
        "The model has no function that is not linear, so that it is a single linear layer",
        (LINEAR,),
        "an activation function between the layers; nn.LeakyReLU(True) has a slope of 1: inplace is its second argument",
        (*_SYMPTOMS,),
    ),
    Cause(
        DROPOUT,
        "Dropout leaves next to nothing",
        (DROPOUT,),
        "a probability of 0.1 to 0.5",
        (*_SYMPTOMS,),
    ),
    Cause(
        "dead_units",
        "ReLU units have died while training",
        ("dead_units",),
        "a lower learning rate, warm-up, LeakyReLU or GELU, a normalization layer in front; a model whose targets are below 0 does not end "
        "in a ReLU",
        (*_STILL, "vanishing", "constant_output", "shrinking_outputs", NOT_LEARNING),
    ),
    Cause(
        "saturation",
        "Activation functions are saturated: next to no gradient comes through",
        ("saturation",),
        "a smaller initialization, a normalization layer in front, ReLU or GELU; for a softmax a scale of 1 / sqrt(d)",
        (LARGE_START, "vanishing", *_STILL, "constant_output", "shrinking_outputs", NOT_LEARNING),
    ),
    Cause(
        LARGE_START,
        "The outputs are far too large at the start: the first loss is many times that of guessing",
        (LARGE_START,),
        "smaller weights of the last layer, such as a deviation of 0.02, also where it shares them with an embedding; a normalization "
        "layer in front; for trained weights look whether the labels have the numbers that they were trained with",
        (NOT_LEARNING, "exploding", "growing_weights", "saturation", "large_logits"),
        is_from_start=True,
    ),
    Cause(
        "vanishing",
        "Gradients vanish on their way back",
        ("vanishing",),
        "residual connections, normalization layers, an initialization that keeps the scale, fewer layers; where the gradients were larger "
        "at first, a lower learning rate and warm-up",
        (*_STILL, "constant_output", NOT_LEARNING),
        evidence_against="the loss has fallen by more than half",
        is_ruled_out=lambda history: not history.facts.is_manual and has_fallen(history.first_loss, history.loss, 0.5),
    ),
    Cause(
        ONE_SIDED,
        "The networks have come out of balance: the gradients of one optimizer have faded or exploded",
        (ONE_SIDED,),
        "for a GAN a loss that does not saturate (-log D(G(z)) for the generator), a slower discriminator, a gradient penalty",
        (*_GROWTH, *_FLAT, *_STILL, "dead_units", "constant_output", "shrinking_outputs"),
    ),
    Cause(
        "lost_input",
        "The output hardly depends on the input",
        ("constant_output", NOT_LEARNING),
        "look for a normalization over a single feature, and for a mask that is upside down; if it came later, a lower learning rate and "
        "warm-up",
        (*_SYMPTOMS,),
        "for a loss that does not fall: the output's variation between samples was never above 0.001, and steps were large enough",
        is_shown=lambda finding, history: finding.name != NOT_LEARNING or (hardly_varies(history) and not history.reach < SMALL_REACH),
        remark=lambda history: f"The output's variation between samples was at most {history.largest_variation:.2g}.",
    ),
    Cause(
        "clipping",
        "Clipping limits every step to next to nothing",
        (NOT_LEARNING, "frozen_updates"),
        "a larger gradient_clip_val; 1.0 is customary",
        (NOT_LEARNING, "frozen_updates"),
        "gradients have the largest size that clipping allows in 9 of 10 records, and with a norm of 1 the steps would be large enough",
        is_shown=lambda _finding, history: history.is_clipped,
        remark=lambda history: f"gradient_clip_val is {history.facts.clip:.3g}. {_reach_in_words(history)}",
    ),
    Cause(
        "small_rate",
        "The learning rate is too low",
        (NOT_LEARNING, "frozen_updates"),
        "a learning rate that is ten times higher, and so on until the loss falls",
        (NOT_LEARNING, "frozen_updates"),
        f"all steps together can move no weight by more than {SMALL_REACH:.0%} of its norm",
        is_shown=lambda _finding, history: history.reach < SMALL_REACH,
        remark=lambda history: f"{_reach_in_words(history)} {_rate_in_words(history)}",
    ),
    Cause(
        "decayed_rate",
        "The schedule has brought the learning rate down to next to nothing",
        (NOT_LEARNING, "frozen_updates"),
        "a slower schedule; look whether it counts steps or epochs (interval of lr_scheduler)",
        ("frozen_updates", NOT_LEARNING),
        "the newest rate is below a millionth of the largest one; or below a hundredth, and the last two thirds of the steps can move no "
        "weight by more than 2 % of its norm",
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
        ("frozen_updates",),
        "look for a detach() or no_grad() between the parameters and the loss, and for a checkpoint with use_reentrant=True; if the model "
        "does not use the parameters, as the mask token of a checkpoint, set requires_grad to False",
        ("frozen_updates", NOT_LEARNING),
        "the newest record has gradients of others, and none of this parameter",
        is_shown=lambda finding, history: history.num_gradients > 0 and math.isnan(history.gradient_of(finding.site)),
    ),
    Cause(
        "zero_gradient",
        "A part of the model gets gradients of nothing but zeros",
        ("no_gradients", "zero_gradients", "frozen_updates"),
        "look for an input of zeros, for two factors that are both 0, for a detach() or no_grad(), for a zero_grad() between the backward "
        "pass and the step, and for what has a derivative of 0: rounding, argmax, a softmax over one value; check whether it is meant to "
        "be idle",
        (NOT_LEARNING,),
        "for parameters that do not move: the newest record has a gradient of 0",
        is_shown=lambda finding, history: finding.name != "frozen_updates" or history.gradient_of(finding.site) == 0,
    ),
    Cause(
        "frozen",
        "Parameters that are to be trained do not move",
        ("frozen_updates",),
        "in half precision, updates that are smaller than the weights' rounding are lost: keep the weights in float32 (precision: "
        "bf16-mixed); else look for code that writes the weights back, and for a detach() or no_grad()",
        (NOT_LEARNING,),
        "the newest record has it as in the record before",
        is_shown=lambda finding, history: not _has_moved(finding, history),
    ),
    Cause(
        "update",
        "Weights are not finite: an update, or code of the model that writes into them, has made them so",
        (NONFINITE,),
        "health: {nonfinite: always}, which names the module with the first non-finite gradient",
        (NONFINITE, *_GROWTH, *_SYMPTOMS),
        "the weights themselves are not finite when the step begins",
        is_shown=_cause_is("update"),
    ),
    Cause(
        NONFINITE,
        "A value is not finite",
        (NONFINITE,),
        "look in the named code for logarithms of 0, divisions by 0 and overflow of exp",
        (NONFINITE, *_GROWTH, *_SYMPTOMS),
    ),
    Cause(
        "shrinking_outputs",
        "An output has shrunk to next to nothing: it carries less and less",
        ("shrinking_outputs",),
        "for a variational autoencoder a smaller or slowly growing weight of the KL term, or a weaker decoder; else a smaller penalty",
        (NOT_LEARNING,),
    ),
    Cause(
        "growth",
        "Sizes grow, and the loss does not rise",
        ("exploding", "growing_weights", "diverging", "growing_over_depth"),
        "clipping of gradients, a normalization layer, weight decay; look at the scale of inputs and targets",
        (*_GROWTH, NOT_LEARNING),
        remark=lambda _history: "The loss has not risen above its first values, so this alone does not show that the rate is too high.",
    ),
    Cause(
        "frozen_parameters",
        "Most of the model is frozen, and the rest cannot learn it",
        (NOT_LEARNING,),
        "requires_grad_(True) for what is to be trained; for trained weights more layers",
        (NOT_LEARNING,),
        "9 of 10 elements of the parameters require no gradient",
        is_shown=lambda _finding, history: history.frozen_part > 0.9,
        remark=lambda history: f"{history.frozen_part:.1%} of the elements of all parameters are frozen.",
    ),
    Cause(
        NOT_LEARNING,
        "The loss does not fall, and no check that could judge shows why",
        (NOT_LEARNING,),
        "check that labels belong to their inputs, and that output and target have the same shape; train on one batch until its loss is "
        "near 0; other learning rates. The loss of trained weights may stay where it is",
        remark=_reach_in_words,
    ),
)
"""In the order in which they are tried: what is certain comes before what is likely."""
