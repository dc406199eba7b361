r"""How the terms of the refined coordinate check should depend on the width n, by parametrization, role and optimizer.

A term's root mean square is :math:`\Theta(n^e)`. An exponent e that cannot be known is ``None``; that of a term which is exactly zero
is ``-inf``.

**mup**, the maximal update parametrization: every e is 0. The effects of a layer's change of weights, and of the change of its input,
depend neither on the width nor on the optimizer. This is the criterion of a sound parametrization.

**sp**, the standard parametrization: weights of standard deviation :math:`\sqrt{1 / \text{fan-in}}`, and learning rates
:math:`\eta \propto n^c`, whose c is read from the optimizer at every width. At initialization activations are
:math:`\Theta(1)`, gradients at outputs :math:`\Theta(n^d)`, with d = -1/2 for a layer whose fan-out grows and 0 for others. In one step

- SGD changes W by :math:`-\eta\, \delta x^\top`, so W - W0 times x has e = c + d + i, with i = 1 where the fan-in grows (the sum
  over it is aligned) and 0 where not;
- Adam changes every entry by :math:`\eta`, so e = c + i;
- a bias is like a weight with one input, i = 0. A module's e is the largest of its parameters'.

Propagating: the largest e of the layers that feed it, effective or propagating, and 1/2 more where only the fan-in grows: there
W0 sums n entries, of size :math:`n^{-1/2}`, with which the change is aligned.

**ntp**, the neural tangent parametrization: weights of standard deviation 1 behind a factor :math:`n^{-1/2}` where the fan-in grows. In
the product of both it is sp with SGD's learning rate times 1/n and Adam's times :math:`n^{-1/2}`.

These are the exponents of the first step. Later steps keep them as long as none is above 0, where the outputs diverge.

References:
    Yang and others, "Tensor Programs V", 2022, arXiv 2203.03466, tables 3 and 8 (mup by role and optimizer).
    Haas and others, 2025, arXiv 2505.22491 (effective and propagating updates under sp, and their alignment).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Literal, cast

from lightning_module_monitor.config.rules import check_choice, parse_patterns
from lightning_module_monitor.errors import ConfigError, nearest_pattern
from lightning_module_monitor.width_check.layers import GROWTH, Layer

TERMS: Mapping[str, str] = {
    "effective_update": "rcc_effective_update/{}/rms",
    "propagating_update": "rcc_propagating_update/{}/rms",
    "effective_alignment": "rcc_alignment/{}/effective",
    "propagating_alignment": "rcc_alignment/{}/propagating",
}
"""Key in a record by the term's name."""

NAMED = ("mup", "sp", "ntp")
NOTHING = -math.inf
"""The exponent of a term that is exactly zero."""

Exponents = Mapping[str, float | Mapping[str, float | None] | None]
"""The user's own: by pattern (``re.fullmatch``) of module names a number for all terms, or numbers by term. ``None`` leaves open."""

Parametrization = Literal["mup", "sp", "ntp"] | Exponents
Expected = dict[tuple[str, str], float | None]
"""Exponent by module and term."""


def parse_parametrization(parametrization: object) -> Parametrization:
    """Check the parts of a parametrization that need no model, and return it.

    Raises:
        ConfigError: If it is not a parametrization.
    """
    if isinstance(parametrization, str):
        expected = f"{', '.join(NAMED)}, or exponents by pattern, e.g. {{'model.head': 0.0}}"
        check_choice(parametrization, NAMED, f"parametrization is {parametrization!r}", expected)
        return cast(Parametrization, parametrization)
    if not isinstance(parametrization, Mapping) or not parametrization:
        raise ConfigError(f"parametrization is {parametrization!r}; expected {', '.join(NAMED)}, or exponents by pattern of module names.")
    for pattern, exponents in parametrization.items():
        label = f"parametrization[{pattern!r}]"
        parse_patterns(pattern, "parametrization")
        for term, number in exponents.items() if isinstance(exponents, Mapping) else [(None, exponents)]:
            if term is not None:
                check_choice(term, TERMS, f"{label} has the term {term!r}")
            if not (number is None or (isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number))):
                raise ConfigError(f"{label} is {number!r}; expected a number, or null for an exponent that is left open.")
    return parametrization


def expected_exponents(parametrization: Parametrization, layers: Mapping[str, Layer], steps: int) -> Expected:
    """The expected exponents of every layer's terms, measured after so many optimizer steps.

    Raises:
        ConfigError: As :func:`own_exponents`.
    """
    if isinstance(parametrization, Mapping):
        return own_exponents(parametrization, layers)
    updates = _maximal(layers) if parametrization == "mup" else _standard(layers, is_tangent=parametrization == "ntp")
    if steps > 1 and any(exponent is not None and exponent > 0 for exponent in updates.values()):
        # Growth in the first step changes the gradients of the next ones.
        updates = {key: exponent if exponent == NOTHING else None for key, exponent in updates.items()}
    # The exponents above assume alignments that do not depend on the width.
    return updates | dict.fromkeys(itertools.product(layers, ("effective_alignment", "propagating_alignment")), 0.0)


def own_exponents(parametrization: Exponents, layers: Iterable[str]) -> Expected:
    """The user's own exponents for the layers of these names.

    Raises:
        ConfigError: If a pattern matches no layer.
    """
    names = tuple(layers)
    expected: Expected = {}
    for pattern, exponents in parametrization.items():
        matched = [name for name in names if re.fullmatch(pattern, name)]
        if not matched:
            near = nearest_pattern(pattern, names)
            raise ConfigError(f"parametrization {pattern!r} matches none of the {len(names)} modules that own weights{near}")
        for name in matched:
            for term, number in exponents.items() if isinstance(exponents, Mapping) else dict.fromkeys(TERMS, exponents).items():
                expected.setdefault((name, term), number)  # the first pattern that matches counts
    return expected


def _sum(exponents: Set[float | None]) -> float | None:
    """The exponent of a sum; unknown if that of a part is."""
    return None if None in exponents else max((one for one in exponents if one is not None), default=NOTHING)


def _along(
    layers: Mapping[str, Layer],
    effective: Callable[[Layer], float | None],
    propagating: Callable[[Layer, float | None], float | None],
    add: Callable[[Set[float | None]], float | None] = _sum,
) -> Expected:
    """The exponents of all updates, from the input of a network to its output.

    ``effective`` and ``propagating`` give those of a layer, the latter from that of the change of its input (``None`` if unknown); ``add``
    gives that of a sum.
    """
    changes: dict[str, float | None] = {}

    def change(name: str) -> float | None:
        if name not in changes:
            changes[name] = None  # for a layer that feeds itself
            changes[name] = add({effective(layers[name]), passed_on(layers[name])})
        return changes[name]

    def passed_on(layer: Layer) -> float | None:
        return propagating(layer, None if layer.upstream is None else add({change(name) for name in layer.upstream.names}))

    updates: Expected = {}
    for name, layer in layers.items():
        updates[name, "effective_update"] = effective(layer)
        updates[name, "propagating_update"] = passed_on(layer)
    return updates


def _maximal(layers: Mapping[str, Layer]) -> Expected:
    """The maximal update parametrization, a requirement also for layers of unknown kinds."""

    def effective(layer: Layer) -> float | None:
        if not layer.is_trained:
            return NOTHING
        return None if layer.role == "fixed" else 0.0  # it requires nothing of a layer before those that get wider

    def propagating(layer: Layer, arriving: float | None) -> float | None:
        return 0.0 if layer.upstream is None else arriving

    # An unknown part is at most what is required.
    return _along(layers, effective, propagating, lambda exponents: 0.0 if 0.0 in exponents else _sum(exponents))


def _standard(layers: Mapping[str, Layer], *, is_tangent: bool) -> Expected:
    """The standard or neural tangent parametrization, for layers whose shapes, inputs and optimizer are known."""
    feeding = set().union(*(layer.upstream.names for layer in layers.values() if layer.upstream is not None))
    # The sizes of gradients above hold if the loss uses layers of fixed size, and every layer on the way back is known.
    ends_fixed = all(layer.role in ("output", "fixed") for name, layer in layers.items() if name not in feeding)
    knows_gradients = ends_fixed and all(layer.upstream is not None and layer.role != "unknown" for layer in layers.values())

    def effective(layer: Layer) -> float | None:
        if not layer.is_trained:
            return NOTHING
        if layer.role == "unknown" or layer.is_shared or layer.matrix_rate is None or layer.vector_rate is None:
            return None
        is_sgd = layer.optimizer == "sgd"
        if layer.optimizer is None or (is_sgd and not knows_gradients):
            return None
        fan_in_grows, fan_out_grows = GROWTH[layer.role]
        sum_over_fan_in = 1.0 - (is_tangent * (1.0 if is_sgd else 0.5)) if fan_in_grows else 0.0
        size_of_entry = -0.5 if is_sgd and fan_out_grows else 0.0
        exponent = max(layer.matrix_rate + sum_over_fan_in, layer.vector_rate) + size_of_entry
        # Weight decay changes W x by a share of it. If that is more than the effect of the gradient, sizes decide, not exponents.
        return None if layer.has_weight_decay and max(layer.matrix_rate, layer.vector_rate) > exponent else exponent

    def propagating(layer: Layer, arriving: float | None) -> float | None:
        if layer.upstream is None or arriving is None or arriving == NOTHING:
            return arriving
        is_bounded = not (layer.is_linear and layer.upstream.is_homogeneous)
        if layer.role == "unknown" or (arriving > 0 and is_bounded):
            return None
        return arriving + (0.5 if layer.role == "output" else 0.0)

    return _along(layers, effective, propagating)
