"""Figures that detectors judge, made of the values of one record."""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.alerts import Figures
from lightning_module_monitor.keys import Key
from lightning_module_monitor.kinds import ROOT_SITE

FINITE_STATISTICS = ("nonfinite_count", "norm", "rms", "abs_max", "abs_mean", "mean", "min", "max", "token_norm", "token_rms")
"""Statistics that show a non-finite element: the number of such elements, and statistics that are finite for every finite tensor, unlike
the ``std`` of one element or a ratio to zero."""

ORDER_OF_EVENTS = ("parameter", "activation", "activation_gradient", "gradient_before_clip", "gradient", "update")
"""Kinds in the order of a step, in which causes precede effects."""
_BACKWARD = ("activation_gradient", "gradient_before_clip", "gradient")

NUM_BEFORE = 3
"""Number of preceding weights, in the order of the model, that show whether the gradient of a single weight is small."""


def is_weight(site: str) -> bool:
    """Whether a parameter is a weight by its own name, or by that of the weight that a parametrization computes from it.

    >>> is_weight("fc.weight"), is_weight("weights.0.bias"), is_weight("fc.parametrizations.weight.original0")
    (True, False, True)
    """
    *path, name = site.split(".")
    return "weight" in name or (path[-2:-1] == ["parametrizations"] and "weight" in path[-1])


@functools.lru_cache(maxsize=64)
def _is_weight(keys: tuple[str, ...]) -> NDArray[np.bool_]:
    return np.array([is_weight(Key.parse(key).site) for key in keys], bool)


def relative_to_largest(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """For each weight the largest value of it and the three weights before it, relative to the largest value of all weights.

    A gradient that reaches a weight reaches the weights before it: the gradients of queries and keys alone are tiny while attention is
    uniform. Zeros are left out, because a weight without a gradient has not faded. Biases are left out, because the gradient of a bias in
    front of BatchNorm is a rounding error.
    """
    is_size = _is_weight(keys) & (values > 0) & np.isfinite(values)
    sizes = values[is_size]
    nearby = np.concatenate([np.zeros(NUM_BEFORE), sizes])
    figures = np.zeros(len(values))
    figures[is_size] = np.max([nearby[shift : shift + len(sizes)] for shift in range(NUM_BEFORE + 1)], axis=0) / sizes.max(initial=0.0)
    return Figures(keys, figures, keys, is_there=is_size)


@functools.lru_cache(maxsize=64)
def _indices_by_kind(keys: tuple[str, ...]) -> dict[str, NDArray[np.intp]]:
    """Indices of the keys of tensors, by kind."""
    parsed = [Key.parse(key) for key in keys]
    kinds = np.array([key.kind if key.site != ROOT_SITE else "" for key in parsed])
    return {kind: np.flatnonzero(kinds == kind) for kind in sorted({*kinds.tolist()} - {""})}


@functools.lru_cache(maxsize=64)
def _roots(keys: tuple[str, ...]) -> dict[str, int]:
    """Index of the key of all tensors together, by kind."""
    return {key.kind: index for index, key in enumerate(map(Key.parse, keys)) if key.site == ROOT_SITE}


def totals(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The norm of all tensors of a kind together, where it is finite and not 0, shown by the largest tensor.

    The recorded one, of ``_root_``, where there is one: those of single tensors may be of a part of the model.
    """
    by_kind, roots = _indices_by_kind(keys), _roots(keys)
    kinds = sorted({*by_kind, *roots})
    norms = np.array([values[roots[kind]] if kind in roots else math.hypot(*values[by_kind[kind]]) for kind in kinds])
    largest = [keys[by_kind[kind][values[by_kind[kind]].argmax()] if kind in by_kind else roots[kind]] for kind in kinds]
    # Two names: if rules have schedules of their own, some records have one of the two.
    names = tuple(f"{kind} {ROOT_SITE}" if kind in roots else kind for kind in kinds)
    return Figures(names, norms, largest, is_there=np.isfinite(norms) & (norms > 0))


NEGLIGIBLE = 1e-4
"""Part of the largest norm of a gradient below which a gradient is negligible: its parameter may stay as it is."""


@functools.lru_cache(maxsize=64)
def _parameters_and_gradients(keys: tuple[str, ...]) -> tuple[NDArray[np.intp], NDArray[np.intp], tuple[str, ...]]:
    """Indices of the parameters, index of the gradient of each parameter (-1: none), and the keys of the parameters."""
    parsed = [Key.parse(key) for key in keys]
    gradient_by_site = {key.site: index for index, key in enumerate(parsed) if key.kind == "gradient"}
    parameters = [index for index, key in enumerate(parsed) if key.kind == "parameter"]
    gradients = [gradient_by_site.get(parsed[index].site, -1) for index in parameters]
    return np.array(parameters, np.intp), np.array(gradients, np.intp), tuple(keys[index] for index in parameters)


def moved_by_gradients(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The norm of every parameter whose gradient is not negligible; no figure for a step without gradients."""
    parameters, gradients, parameter_keys = _parameters_and_gradients(keys)
    norms = values[_indices_by_kind(keys).get("gradient", np.empty(0, np.intp))]
    least = NEGLIGIBLE * norms[np.isfinite(norms)].max(initial=0.0)
    # Without gradients, training_step left the batch out.
    is_there = np.where(gradients < 0, math.inf, values[gradients]) > least if len(norms) else np.zeros(len(parameters), bool)
    return Figures(parameter_keys, values[parameters], parameter_keys, is_there, is_idle=gradients < 0)


@functools.lru_cache(maxsize=64)
def _is_first_output(keys: tuple[str, ...]) -> NDArray[np.bool_]:
    return np.array([key.kind == "activation" and "output_" not in key.site.rpartition(".")[2] for key in map(Key.parse, keys)], bool)


def over_the_input(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """Every size relative to the smaller of the sizes of the first module and the input, at least 1.

    Zero and non-finite sizes are left out, and further outputs of modules: some are masks that hold the lowest number of their dtype.
    """
    is_size = _is_first_output(keys) & np.isfinite(values) & (values > 0)
    input_sizes = values[np.array([key.endswith("/input_abs_max") for key in keys], bool)]
    base = max(min([*values[is_size][:1], *input_sizes], default=1.0), 1.0)
    return Figures(keys, values / base, keys, is_there=is_size)


@functools.lru_cache(maxsize=64)
def _in_order_of_events(keys: tuple[str, ...]) -> tuple[NDArray[np.intp], tuple[str, ...]]:
    """Indices of the keys, and the keys, in the order of a step, in which causes precede effects; modules run in reverse order backward."""
    kinds = [Key.parse(key).kind for key in keys]
    ranks = [(ORDER_OF_EVENTS.index(kind), -index if kind in _BACKWARD else index) for index, kind in enumerate(kinds)]
    order = sorted(range(len(keys)), key=ranks.__getitem__)
    return np.array(order, np.intp), tuple(keys[index] for index in order)


def not_finite(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """1 for every count of non-finite elements above 0, and for every other value that is not finite; else 0."""
    order, ordered = _in_order_of_events(keys)
    is_count = np.array([key.endswith(FINITE_STATISTICS[0]) for key in ordered], bool)
    values = values[order]
    return Figures(ordered, np.where(is_count, values > 0, ~np.isfinite(values)).astype(float), ordered)


def zeros_of_outputs(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The fraction of zeros of every output where it is recorded, else 1 for every size that is 0.

    Further outputs of modules are left out: a part of the loss may be 0 by design, and a module may pass on what it got.
    """
    is_fraction = np.array([key.endswith("zero_fraction") for key in keys], bool)
    return Figures(keys, np.where(is_fraction, values, values == 0), keys, is_there=_is_first_output(keys))


def zeros_of_weights(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """1 for every weight whose gradient is 0. The gradient of a bias may be 0 in theory, as in the last layer of a Wasserstein critic."""
    return Figures(keys, (values == 0).astype(float), keys, is_there=_is_weight(keys))


def at_least_typical(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """Every size; its first value counts as a tenth of the median of all sizes at least, as an adapter may begin at zero."""
    is_size = np.isfinite(values) & (values > 0)
    floor = 0.1 * float(np.median(values[is_size])) if is_size.any() else 0.0
    return Figures(keys, values, keys, first=np.maximum(values, floor))


def weights_only(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The values of weights, without biases: a bias that begins at zero moves by many times its size."""
    return Figures(keys, values, keys, is_there=_is_weight(keys))
