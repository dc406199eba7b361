r"""The expected exponents: how the terms of the refined coordinate check should depend on the width n.

A term's root mean square is :math:`\Theta(n^e)`. Under **mup**, the maximal update parametrization, every e is 0: the effects of a
layer's change of weights, and of the change of its input, depend neither on the width nor on the optimizer. This is the criterion of a
sound parametrization. Users may give other exponents, by name of the layer.

References:
    Yang and others, "Tensor Programs V", 2022, arXiv 2203.03466, tables 3 and 8 (mup by role and optimizer).
    Haas and others, 2025, arXiv 2505.22491 (effective and propagating updates, and their alignment).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, cast

from lightning_module_monitor.config.rules import check_choice, parse_patterns
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.suggestions import nearest_pattern
from lightning_module_monitor.width_check.layers import Layer

TERMS: Mapping[str, str] = {
    "effective_update": "rcc_effective_update/{}/rms",
    "propagating_update": "rcc_propagating_update/{}/rms",
    "effective_alignment": "rcc_alignment/{}/effective",
    "propagating_alignment": "rcc_alignment/{}/propagating",
}
"""Key in a record by the term's name."""

NOTHING = -math.inf
"""The exponent of a term that is exactly zero."""

Exponents = Mapping[str, float | Mapping[str, float | None] | None]
"""The user's exponents: by pattern (``re.fullmatch``) of module names a number for all terms, or numbers by term. ``None`` leaves open."""

Parametrization = Literal["mup"] | Exponents
Expected = dict[tuple[str, str], float | None]
"""Exponent by module and term, ``None`` where none is expected."""


def parse_parametrization(parametrization: object) -> Parametrization:
    """Check the parts of a parametrization that need no model, and return it.

    Raises:
        ConfigError: If it is not a parametrization.
    """
    if parametrization == "mup":
        return cast(Parametrization, parametrization)
    if not isinstance(parametrization, Mapping) or not parametrization:
        expected = "mup, or exponents by pattern of module names, e.g. {'model.head': 0.0}"
        raise ConfigError(f"parametrization is {parametrization!r}; expected {expected}.")
    for pattern, exponents in parametrization.items():
        label = f"parametrization[{pattern!r}]"
        parse_patterns(pattern, "parametrization")
        for term, number in exponents.items() if isinstance(exponents, Mapping) else [(None, exponents)]:
            if term is not None:
                check_choice(term, TERMS, f"{label} has the term {term!r}")
            if not (number is None or (isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number))):
                raise ConfigError(f"{label} is {number!r}; expected a number, or null for an exponent that is left open.")
    return parametrization


def expected_exponents(parametrization: Parametrization, layers: Mapping[str, Layer]) -> Expected:
    """The expected exponents of every layer's terms.

    Raises:
        ConfigError: As :func:`exponents_by_pattern`.
    """
    if isinstance(parametrization, Mapping):
        return exponents_by_pattern(parametrization, layers)
    expected: Expected = {(name, term): 0.0 for name in layers for term in TERMS}
    has_fixed = any(layer.role == "fixed" and layer.is_trained for layer in layers.values())
    for name, layer in layers.items():
        if not layer.is_trained:
            expected[name, "effective_update"] = NOTHING
        elif layer.role == "fixed":  # mup requires nothing of a layer that does not get wider
            expected[name, "effective_update"] = None
        if has_fixed and layer.role in ("input", "fixed"):  # may be fed by such a layer
            expected[name, "propagating_update"] = None
    return expected


def exponents_by_pattern(parametrization: Exponents, layers: Iterable[str]) -> Expected:
    """The user's exponents for the layers of these names.

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
