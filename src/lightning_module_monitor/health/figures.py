"""Figures that detectors judge, made of the values of one record."""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from lightning_module_monitor.health.alerts import Figures
from lightning_module_monitor.record import Key

FINITE_STATISTICS = ("nonfinite_count", "norm", "rms", "abs_max", "abs_mean", "mean", "min", "max", "token_norm", "token_rms")
"""Statistics that show a non-finite element: the number of such elements, and those that are finite for finite tensors, unlike the ``std``
of one element or a ratio to a zero."""

ORDER_OF_EVENTS = ("parameter", "activation", "activation_gradient", "gradient_before_clip", "gradient", "update")
"""Kinds in the order of a step: earlier ones are the cause of later ones."""
_BACKWARD = ("activation_gradient", "gradient_before_clip", "gradient")

NUM_BEFORE = 3
"""So many weights before one, in the order of the model, show whether its gradient alone is small."""


@functools.lru_cache(maxsize=64)
def _is_weight(keys: tuple[str, ...]) -> NDArray[np.bool_]:
    return np.array(["weight" in Key.parse(key).site for key in keys])


def relative_to_largest(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The largest value of every weight and the three before it, over the largest one of all.

    What reaches a weight reaches those before it: the gradients of queries and keys alone are tiny where attention is still uniform. Zeros
    are left out, as a weight without any gradient has not faded, and biases: in front of BatchNorm one gets no more than what rounding
    leaves.
    """
    is_size = _is_weight(keys) & (values > 0) & np.isfinite(values)
    sizes = values[is_size]
    nearby = np.concatenate([np.zeros(NUM_BEFORE), sizes])
    figures = np.zeros(len(values))
    figures[is_size] = np.max([nearby[place : place + len(sizes)] for place in range(NUM_BEFORE + 1)], axis=0) / sizes.max(initial=0.0)
    return Figures(keys, figures, keys, is_there=is_size)


@functools.lru_cache(maxsize=64)
def _of_kinds(keys: tuple[str, ...]) -> dict[str, NDArray[np.intp]]:
    """Places of the keys of each kind."""
    kinds = np.array([Key.parse(key).kind for key in keys])
    return {kind: np.flatnonzero(kinds == kind) for kind in sorted({*kinds.tolist()})}


def totals(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The norm of all tensors of a kind together, where it is finite and not 0, shown by the largest of them."""
    places = _of_kinds(keys)
    norms = np.array([math.hypot(*values[own]) for own in places.values()])
    largest = [keys[own[values[own].argmax()]] for own in places.values()]
    return Figures(tuple(places), norms, largest, is_there=np.isfinite(norms) & (norms > 0))


NEGLIGIBLE = 1e-4
"""A gradient whose norm is below this part of the largest one moves little: its parameter may stay as it is."""


@functools.lru_cache(maxsize=64)
def _parameters_and_gradients(keys: tuple[str, ...]) -> tuple[NDArray[np.intp], NDArray[np.intp], tuple[str, ...]]:
    """Places of the parameters, of the gradient of each (-1: none), and the parameters' keys."""
    parts = [Key.parse(key) for key in keys]
    gradients = {one.site: place for place, one in enumerate(parts) if one.kind == "gradient"}
    places = [place for place, one in enumerate(parts) if one.kind == "parameter"]
    own = [gradients.get(parts[place].site, -1) for place in places]
    return np.array(places, np.intp), np.array(own, np.intp), tuple(keys[place] for place in places)


def moved_by_gradients(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The norm of every parameter whose gradient is not negligible; no figure for a step without any gradient."""
    places, own, named = _parameters_and_gradients(keys)
    gradients = values[_of_kinds(keys).get("gradient", np.empty(0, np.intp))]
    least = NEGLIGIBLE * gradients[np.isfinite(gradients)].max(initial=0.0)
    # Without any gradient, training_step left the batch out.
    is_there = np.where(own < 0, math.inf, values[own]) > least if len(gradients) else np.zeros(len(places), bool)
    return Figures(named, values[places], named, is_there, is_idle=own < 0)


@functools.lru_cache(maxsize=64)
def _is_first_output(keys: tuple[str, ...]) -> NDArray[np.bool_]:
    return np.array([one.kind == "activation" and "output_" not in one.site.rpartition(".")[2] for one in map(Key.parse, keys)])


def over_the_input(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """Every size over that of the first module or of the input, the smaller one, or over 1; zero and non-finite sizes are left out.

    Further outputs of modules are left out, too: masks are among them, with the lowest number that there is.
    """
    is_size = _is_first_output(keys) & np.isfinite(values) & (values > 0)
    of_input = values[[key.endswith("/input_abs_max") for key in keys]]
    base = max(min([*values[is_size][:1], *of_input], default=1.0), 1.0)
    return Figures(keys, values / base, keys, is_there=is_size)


@functools.lru_cache(maxsize=64)
def _in_order_of_events(keys: tuple[str, ...]) -> tuple[NDArray[np.intp], tuple[str, ...]]:
    """Places of keys in the order of a step: earlier ones are the cause of later ones; backward, modules are in reverse order."""
    kinds = [Key.parse(key).kind for key in keys]
    places = sorted(range(len(keys)), key=lambda at: (ORDER_OF_EVENTS.index(kinds[at]), -at if kinds[at] in _BACKWARD else at))
    return np.array(places, np.intp), tuple(keys[place] for place in places)


def not_finite(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """1 for every count of non-finite elements above 0, and for every other value that is not finite; else 0."""
    places, ordered = _in_order_of_events(keys)
    is_count = np.array([key.endswith(FINITE_STATISTICS[0]) for key in ordered])
    values = values[places]
    return Figures(ordered, np.where(is_count, values > 0, ~np.isfinite(values)).astype(float), ordered)


def zeros(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The fraction of zeros, where it is recorded; else 1 for every size that is 0."""
    is_fraction = np.array([key.endswith("zero_fraction") for key in keys])
    return Figures(keys, np.where(is_fraction, values, values == 0), keys)


def zeros_of_weights(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """1 for every gradient of a weight that is 0; that of a bias may be so in theory, as the last one's of a Wasserstein critic."""
    return zeros(keys, values)._replace(is_there=_is_weight(keys))


def at_least_typical(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """Every size, or a tenth of the median of all where it is smaller: what begins at zero, as an adapter, has not exploded."""
    is_size = np.isfinite(values) & (values > 0)
    floor = 0.1 * float(np.median(values[is_size])) if is_size.any() else 0.0
    return Figures(keys, np.maximum(values, floor), keys)


def of_weights(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The values of weights: a bias that begins at zero moves by many times its size."""
    return Figures(keys, values, keys, is_there=_is_weight(keys))


def strengths(keys: tuple[str, ...], values: NDArray[np.float64]) -> Figures:
    """The larger of a gain and its inverse."""
    with np.errstate(divide="ignore"):
        return Figures(keys, np.maximum(values, 1 / values), keys)
