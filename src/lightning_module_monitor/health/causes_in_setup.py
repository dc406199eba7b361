"""Causes in the set-up of training: data, targets, loss, optimizers, modes and precision. Their evidence is certain."""

from __future__ import annotations

from lightning_module_monitor.health.cause import FLAT, GROWTH, SYMPTOMS, Cause, max_change_remark, search_named
from lightning_module_monitor.health.finding_names import (
    CONSTANT_TARGET,
    GROWING_INPUT,
    NONFINITE,
    NOT_LEARNING,
    ONE_SIDED,
    OVERWRITTEN,
    SKIPPED,
    UNBOUNDED,
    ZERO_LOSS,
    ZERO_RATE,
)
from lightning_module_monitor.kinds import RANK_DISAGREEMENT

ADVICE_ON_RANKS = "look for code that changes it on a single rank, e.g. a parameter that the reduction of gradients leaves out"
"""Advice if parameters differ between ranks."""

CAUSES_IN_SETUP = (
    Cause(
        "data",
        "The data has NaN or infinity",
        evidence_for=(NONFINITE,),
        advice="look at the batch of that step, and drop or clip what is not finite in the data set",
        explains=(*SYMPTOMS, *GROWTH, NONFINITE),
        needs="the batch itself is not finite",
        is_shown=search_named("data"),
    ),
    Cause(
        RANK_DISAGREEMENT,
        "Ranks have come apart: copies of one parameter differ",
        evidence_for=(RANK_DISAGREEMENT,),
        advice=ADVICE_ON_RANKS,
        explains=GROWTH,
    ),
    Cause(
        "no_optimizer",
        "Some parameters get a gradient but are in no optimizer",
        evidence_for=("no_optimizer",),
        advice="give them to the optimizer in configure_optimizers, or set requires_grad to False where they are to stay as they are",
        explains=("frozen_updates", "exploding", NOT_LEARNING),
    ),
    Cause(
        ZERO_RATE,
        "The learning rate of a parameter group is 0",
        evidence_for=(ZERO_RATE,),
        advice="give the group a learning rate; for a warm-up in steps, configure the scheduler with interval: step, as Lightning's "
        "default is a step per epoch; or set requires_grad to False where the group is to stay as it is",
        explains=("frozen_updates", OVERWRITTEN, NOT_LEARNING),
    ),
    Cause(
        ZERO_LOSS,
        "The loss is exactly 0: nothing is left of it",
        evidence_for=(ZERO_LOSS,),
        advice="look for targets that are all ignored or masked, a weight of 0, and zero_infinity of a CTC loss whose inputs are too short",
        explains=SYMPTOMS,
    ),
    Cause(
        SKIPPED,
        "Many batches are left out: training_step returns no loss",
        evidence_for=(SKIPPED,),
        advice="look at the condition under which training_step returns None",
        explains=SYMPTOMS,
    ),
    Cause(
        "cleared_gradients",
        "Optimizers step without any gradient",
        evidence_for=("no_gradients",),
        advice="look for a zero_grad() between the backward pass and the step, and for a loss that does not depend on the parameters",
        explains=SYMPTOMS,
        needs="no parameter of an optimizer has a gradient when it steps",
        is_shown=lambda _finding, history: history.facts.no_gradient,
    ),
    Cause(
        OVERWRITTEN,
        "Weights are written over after each step",
        evidence_for=(OVERWRITTEN,),
        advice="look for code that writes into the weights, such as a moving average or a state_dict that is loaded in each step; a moving "
        "average belongs into a copy",
        explains=("frozen_updates", NOT_LEARNING),
        remark=max_change_remark,
    ),
    Cause(
        "stale_gradients",
        "Gradients are never set to zero: each step adds to the gradients of earlier steps",
        evidence_for=("stale_gradients",),
        advice="optimizer.zero_grad() before the backward pass",
        explains=(*GROWTH, *SYMPTOMS, NONFINITE),
    ),
    Cause(
        "maximizing",
        "The optimizer maximizes the loss",
        evidence_for=("maximizing",),
        advice="maximize=False; or minus the quantity that is to become large as the loss",
        explains=(*GROWTH, *SYMPTOMS, NONFINITE),
    ),
    Cause(
        "mixed_samples",
        "A module takes the samples of a batch for the elements of a sequence, or of a distribution",
        evidence_for=("mixed_samples",),
        advice="batch_first=True, or an input whose first dimension is that of the sequence; a softmax over the last dimension",
        explains=(*GROWTH, *SYMPTOMS, NONFINITE),
    ),
    Cause(
        "same_units",
        "All units of a layer are the same: they begin with the same weights, and stay together",
        evidence_for=("same_units",),
        advice="random weights, as torch's layers have by default; zeros for the last layer of a residual branch alone",
        explains=SYMPTOMS,
    ),
    Cause(
        UNBOUNDED,
        "The loss has no lower bound, and falls without end",
        evidence_for=(UNBOUNDED,),
        advice="look at its sign, and at what it expects: nll_loss gets log-probabilities (log_softmax), and a likelihood a smallest "
        "deviation",
        explains=(*GROWTH, *SYMPTOMS, NONFINITE),
    ),
    Cause(
        "softmax_twice",
        "The loss takes a softmax or sigmoid twice: the model has one, and the loss its own",
        evidence_for=("softmax_twice",),
        advice="give the loss the logits of the model",
        explains=(*FLAT, "zero_gradients", NOT_LEARNING),
    ),
    Cause(
        "broadcast_loss",
        "The loss compares each output with the targets of all samples, as their shapes are (N, 1) and (N,)",
        evidence_for=("broadcast_loss",),
        advice="give both one shape: output.squeeze(1), or target.unsqueeze(1)",
        explains=SYMPTOMS,
    ),
    Cause(
        "two_values",
        "A normalization layer gets two values at a time: only the sign of their difference is left",
        evidence_for=("two_values",),
        advice="larger batches for BatchNorm, which does not see accumulated ones; else LayerNorm or GroupNorm over more features",
        explains=(*SYMPTOMS, *GROWTH),
    ),
    Cause(
        "unregistered",
        "Some weights belong neither to the module nor to an optimizer: they are not trained",
        evidence_for=("unregistered",),
        advice="nn.ModuleList, nn.ModuleDict or nn.ParameterList in place of a list or dict, and nn.Parameter in place of a tensor; "
        "requires_grad_(False) for what is not to be trained",
        explains=SYMPTOMS,
    ),
    Cause(
        "two_optimizers",
        "Two optimizers step the same parameters",
        evidence_for=("two_optimizers",),
        advice="give each optimizer the parameters of its own network alone",
        explains=(*SYMPTOMS, *GROWTH, ONE_SIDED),
    ),
    Cause(
        "swapped_betas",
        "The betas of an optimizer are swapped: it averages gradients over more steps than their squares",
        evidence_for=("swapped_betas",),
        advice="betas=(0.9, 0.999), which is Adam's default",
        explains=(*SYMPTOMS, *GROWTH),
    ),
    Cause(
        "constant_input",
        "The input is the same for all samples",
        evidence_for=("constant_input",),
        advice="look at what the data set returns, and at its transforms",
        explains=(*SYMPTOMS, *GROWTH),
    ),
    Cause(
        GROWING_INPUT,
        "The input grows while the model trains",
        evidence_for=(GROWING_INPUT,),
        advice="look for an augmentation or a transform that writes into the data itself: x = x.clone() before it",
        explains=(*SYMPTOMS, *GROWTH),
    ),
    Cause(
        CONSTANT_TARGET,
        "Each batch has samples of one class alone",
        evidence_for=(CONSTANT_TARGET,),
        advice="shuffle the data: shuffle=True in the DataLoader, or a sampler that mixes classes",
        explains=(*SYMPTOMS, *GROWTH),
    ),
    Cause(
        "in_eval",
        "Normalization layers are in eval while their weights are trained",
        evidence_for=("in_eval",),
        advice="call train() on the model before the fit, or freeze their weights by requires_grad = False where it is meant",
        explains=(*GROWTH, *FLAT, NOT_LEARNING, NONFINITE),
    ),
    Cause(
        "masked_row",
        "Attention has a row in which all keys are masked",
        evidence_for=(NONFINITE,),
        advice="leave one key visible for every query, e.g. the token itself; or drop samples that are padding alone",
        explains=(*SYMPTOMS, *GROWTH, NONFINITE),
        needs="a softmax gets a row of minus infinity, or a mask without a visible key",
        is_shown=search_named("masked_row"),
    ),
    Cause(
        "rounded_eps",
        "The eps of the optimizer is rounded to 0 in float16, so that it divides 0 by 0",
        evidence_for=(NONFINITE,),
        advice="an eps of at least 1e-4; or weights in float32 (precision: 16-mixed or bf16-mixed)",
        explains=(NONFINITE, *GROWTH, *SYMPTOMS),
        needs="the weights are in float16, and not finite after an update",
        is_shown=lambda finding, history: (
            any(group.eps_is_zero for group in history.facts.groups)
            and search_named("overflow", "update", "learning_rate")(finding, history)
        ),
    ),
    Cause(
        "overflow",
        "Values overflow float16",
        evidence_for=(NONFINITE,),
        advice="precision: bf16-mixed, which has the range of float32; smaller weights, inputs or losses",
        explains=(NONFINITE, NOT_LEARNING, "frozen_updates"),
        needs="the run computes in float16",
        is_shown=search_named("overflow"),
    ),
    Cause(
        "infinite_slope",
        "The derivative of a function is infinite at its input",
        evidence_for=(NONFINITE,),
        advice="the derivative of a root or a norm is infinite at 0: add a small number below the root, e.g. 1e-8; torch.where passes on a "
        "NaN from the branch that it does not take",
        explains=(*SYMPTOMS, *GROWTH, NONFINITE),
        needs="all values are finite, and a gradient is not",
        is_shown=search_named("infinite_slope"),
    ),
)
