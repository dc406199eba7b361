"""Figures that detectors judge, made of the values of one record."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.alerts import Figures
from lightning_module_monitor.health.bound import Bound
from lightning_module_monitor.kinds import LOSS, ROOT_SITE

FINITE_STATISTICS = ("nonfinite_count", "norm", "rms", "abs_max", "abs_mean", "mean", "min", "max", "token_norm", "token_rms")
"""Statistics that show a non-finite element: the number of such elements, and statistics that are finite for every finite tensor, unlike
the ``std`` of one element or a ratio to zero."""

NUM_BEFORE = 3
"""Number of preceding weights, in the order of the model, that show whether the gradient of a single weight is small."""
ROUNDING, CLIFF = 1e-7, 1e6
"""A gradient below the first part of the largest one, and so many times smaller than one of the weights right behind it, is a rounding
error: what fades on its way back does so from weight to weight."""
VARYING = 0.01
"""An input varies between samples if its variation is above this."""


def relative_to_largest(bound: Bound, values: NDArray[np.float64]) -> Figures:
    """For each weight the largest value of it and the three weights before it, relative to the largest value of all weights.

    A gradient that reaches a weight reaches the weights before it: the gradients of queries and keys alone are tiny while attention is
    uniform. Zeros are left out, because a weight without a gradient has not faded. Biases are left out, because the gradient of a bias in
    front of BatchNorm is a rounding error; and so are weights whose gradient is one.
    """
    is_size = bound.is_weight & (values > 0) & np.isfinite(values)
    sizes = values[is_size]
    behind = np.concatenate([sizes, np.zeros(NUM_BEFORE)])
    largest_behind = np.max([behind[shift : shift + len(sizes)] for shift in range(1, NUM_BEFORE + 1)], axis=0)
    is_size[is_size] = ~((sizes < ROUNDING * sizes.max(initial=0.0)) & (CLIFF * sizes < largest_behind))
    sizes = values[is_size]
    nearby = np.concatenate([np.zeros(NUM_BEFORE), sizes])
    figures = np.zeros(len(values))
    figures[is_size] = np.max([nearby[shift : shift + len(sizes)] for shift in range(NUM_BEFORE + 1)], axis=0) / sizes.max(initial=0.0)
    return Figures(bound.texts, figures, bound.texts, is_present=is_size)


def totals(bound: Bound, values: NDArray[np.float64]) -> Figures:
    """The norm of all tensors of a kind together, where it is finite and not 0, shown by the largest tensor.

    The recorded one, of ``_root_``, where there is one: those of single tensors may be of a part of the model.
    """
    by_kind, roots = bound.by_kind, bound.roots
    kinds = sorted({*by_kind, *roots})
    norms = np.array([values[roots[kind]] if kind in roots else math.hypot(*values[by_kind[kind]]) for kind in kinds])
    largest = [bound.texts[by_kind[kind][values[by_kind[kind]].argmax()] if kind in by_kind else roots[kind]] for kind in kinds]
    # Two names: if rules have schedules of their own, some records have one of the two.
    names = tuple(f"{kind} {ROOT_SITE}" if kind in roots else kind for kind in kinds)
    return Figures(names, norms, largest, is_present=np.isfinite(norms) & (norms > 0))


NEGLIGIBLE = 1e-4
"""Part of the largest norm of a gradient below which a gradient is negligible: its parameter may stay as it is."""


def moved_by_gradients(bound: Bound, values: NDArray[np.float64]) -> Figures:
    """The norm of every parameter whose gradient is not negligible; no figure for a step without gradients."""
    parameters, gradients = bound.parameters, bound.gradients
    norms = values[bound.by_kind.get("gradient", np.empty(0, np.intp))]
    least = NEGLIGIBLE * norms[np.isfinite(norms)].max(initial=0.0)
    # Without gradients, training_step left the batch out.
    is_present = np.where(gradients < 0, math.inf, values[gradients]) > least if len(norms) else np.zeros(len(parameters), bool)
    return Figures(bound.parameter_texts, values[parameters], bound.parameter_texts, is_present, lacks_gradient=gradients < 0)


def over_the_input(bound: Bound, values: NDArray[np.float64]) -> Figures:
    """Every size, or a later one or the loss if that is less, relative to the smaller of the sizes of the first module and the input.

    What no later module and no loss has is the number of a mask, such as the lowest of a dtype in scores of attention. Zero and non-finite
    sizes are left out, and further outputs of modules, which may be masks, too.
    """
    is_size = bound.is_first_output & np.isfinite(values) & (values > 0)
    sizes, losses = values[is_size], np.abs(values[bound.has_statistic(LOSS)])
    base = max(min([*sizes[:1], *values[bound.has_statistic("input_abs_max")]], default=1.0), 1.0)
    figures = values / base
    # A loss that is not known, or not finite, limits nothing.
    figures[is_size] = np.minimum(sizes, _largest_behind(sizes, float(np.fmin.reduce(losses, initial=math.inf)))) / base
    return Figures(bound.texts, figures, bound.texts, is_present=is_size)


def _largest_behind(sizes: NDArray[np.float64], loss: float) -> NDArray[np.float64]:
    """For each module the largest size of the later modules and the loss. Modules in a row with one size return the same tensor."""
    largest = np.maximum.accumulate([loss, *sizes[:0:-1]])[::-1]
    ends = np.flatnonzero(np.append(sizes[1:] != sizes[:-1], True))
    return np.asarray(largest[ends[np.searchsorted(ends, np.arange(len(sizes)))]])


def not_finite(bound: Bound, values: NDArray[np.float64]) -> Figures:
    """1 for every count of non-finite elements above 0, and for every other value that is not finite; else 0."""
    order, texts = bound.order_of_events, bound.texts_in_order_of_events
    figures = np.where(bound.has_statistic(FINITE_STATISTICS[0]), values > 0, ~np.isfinite(values))
    return Figures(texts, figures[order].astype(float), texts)


def constant_output(bound: Bound, values: NDArray[np.float64]) -> Figures:
    """The variation of the output between samples, where the input varies; no figure for a batch of one sample."""
    by_name = dict(zip((key.statistic for key in bound.keys), values.tolist(), strict=True))
    figure, is_present = by_name.get("output_variation", math.nan), by_name.get("input_variation", math.nan) > VARYING
    names = bound.texts[: len(by_name) and 1]
    return Figures(names, np.full(len(names), figure), names, is_present=np.full(len(names), is_present and not math.isnan(figure)))


def without_gradient(bound: Bound, values: NDArray[np.float64]) -> Figures:
    """1 if the optimizers got no gradient at all, or none but zeros; else 0.

    The gradients of a loss of 0, as of margins that are satisfied, are not judged.
    """
    is_norm, is_loss = np.array([key.kind == "gradient" for key in bound.keys], bool), bound.has_statistic(LOSS)
    norms, has_none = values[is_norm], bool(values[~(is_norm | is_loss)].any())
    is_zero = len(norms) > 0 and not norms.any()
    is_judged = has_none or not is_zero or 0 not in values[is_loss]
    keys = [text for text, is_other in zip(bound.texts, is_loss, strict=True) if not is_other][:1]
    figures = np.full(len(keys), float(has_none or is_zero))
    return Figures(("all",)[: len(keys)], figures, keys, is_present=np.full(len(keys), is_judged))


def of_outputs(bound: Bound, values: NDArray[np.float64]) -> Figures:
    """The size of every module's first output, at most 1: what begins far larger may become smaller."""
    return Figures(bound.texts, np.minimum(values, 1.0), bound.texts, is_present=bound.is_first_output)


def zeros_of_weights(bound: Bound, values: NDArray[np.float64]) -> Figures:
    """1 for every weight whose gradient is 0, unless the loss is 0.

    The gradient of a bias may be 0 in theory, as in the last layer of a Wasserstein critic.
    """
    is_loss = bound.has_statistic(LOSS)
    is_present = bound.is_weight & ~is_loss & (0 not in values[is_loss])
    return Figures(bound.texts, (values == 0).astype(float), bound.texts, is_present=is_present)
