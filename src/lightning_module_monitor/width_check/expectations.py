r"""How the terms of the refined coordinate check should depend on the width n, by parametrization, role and optimizer.

A term's root mean square is :math:`\Theta(n^e)`; this file says e. Where an e cannot be known it is ``None``; where a term is
exactly zero it is ``-inf``.

**mup**, the maximal update parametrization, is the one in which every e is 0: each layer's change of weights, and what it passes
on, has an effect that depends neither on the width nor on the optimizer. It is what a sound parametrization is judged by.

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

import math
import re
from collections.abc import Iterable, Mapping, Set
from typing import Literal, cast

from lightning_module_monitor.config import parse_patterns
from lightning_module_monitor.errors import ConfigError, nearest
from lightning_module_monitor.width_check.layers import GROWTH, Layer
from lightning_module_monitor.width_check.topology import Upstream

TERMS: Mapping[str, str] = {
    "effective_update": "rcc_effective_update/{}/rms",
    "propagating_update": "rcc_propagating_update/{}/rms",
    "effective_alignment": "rcc_alignment/{}/effective",
    "propagating_alignment": "rcc_alignment/{}/propagating",
}
"""Key in a record by the term's name."""

NAMED = ("mup", "sp", "ntp")
NOTHING = -math.inf
"""The exponent of what is exactly zero."""

Exponents = Mapping[str, float | Mapping[str, float | None] | None]
"""The user's own: by pattern (``re.fullmatch``) of module names a number for all terms, or numbers by term. ``None`` leaves open."""

Parametrization = Literal["mup", "sp", "ntp"] | Exponents
Expected = dict[tuple[str, str], float | None]
"""Exponent by module and term."""


def parse_parametrization(parametrization: object) -> Parametrization:
    """Check what can be checked before any model is there.

    Returns:
        The same, as what it is.

    Raises:
        ConfigError: If it is no parametrization; says what was expected.
    """
    if isinstance(parametrization, str):
        if parametrization not in NAMED:
            expected = f"{', '.join(NAMED)}, or exponents by pattern, e.g. {{'model.head': 0.0}}"
            raise ConfigError(f"parametrization is {parametrization!r}; expected {expected}{nearest(parametrization, NAMED)}")
        return cast(Parametrization, parametrization)
    if not isinstance(parametrization, Mapping) or not parametrization:
        raise ConfigError(f"parametrization is {parametrization!r}; expected {', '.join(NAMED)}, or exponents by pattern of module names.")
    for pattern, wish in parametrization.items():
        label = f"parametrization[{pattern!r}]"
        parse_patterns(pattern, "parametrization")
        for term, number in wish.items() if isinstance(wish, Mapping) else [(None, wish)]:
            if term is not None and term not in TERMS:
                raise ConfigError(f"{label} has the term {term!r}; expected {', '.join(TERMS)}{nearest(str(term), TERMS)}")
            if not (number is None or (isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number))):
                raise ConfigError(f"{label} is {number!r}; expected a number, or null for an exponent that is left open.")
    return parametrization


def expected_exponents(parametrization: Parametrization, layers: Mapping[str, Layer], steps: int) -> Expected:
    """The exponents of every layer's terms.

    Args:
        parametrization: A name, or the user's own numbers.
        layers: The layers, by name.
        steps: Number of optimizer steps before the terms were measured.

    Returns:
        Exponent by module and term.

    Raises:
        ConfigError: As :func:`own_exponents`.
    """
    if isinstance(parametrization, Mapping):
        return own_exponents(parametrization, layers)
    scaling = _Maximal(layers) if parametrization == "mup" else _Standard(layers, is_tangent=parametrization == "ntp")
    updates: Expected = {}
    for name in layers:
        updates[name, "effective_update"] = scaling.effective(name)
        updates[name, "propagating_update"] = scaling.propagating(name)
    if steps > 1 and any(exponent is not None and exponent > 0 for exponent in updates.values()):
        # What grew in the first step changes the gradients of the next ones.
        updates = {key: exponent if exponent == NOTHING else None for key, exponent in updates.items()}
    # The exponents above rest on alignments that do not depend on the width.
    aligned = {(name, "effective_alignment"): 0.0 for name in layers} | {(name, "propagating_alignment"): 0.0 for name in layers}
    return updates | aligned


def own_exponents(parametrization: Exponents, layers: Iterable[str]) -> Expected:
    """The user's own exponents, of the layers of these names.

    Returns:
        Exponent by module and term.

    Raises:
        ConfigError: If a pattern matches no layer.
    """
    names = tuple(layers)
    expected: Expected = {}
    for text, wish in parametrization.items():
        pattern = re.compile(text)
        matched = [name for name in names if pattern.fullmatch(name)]
        if not matched:
            raise ConfigError(f"parametrization {text!r} matches none of the {len(names)} modules that own weights{nearest(text, names)}")
        for name in matched:
            for term, number in wish.items() if isinstance(wish, Mapping) else dict.fromkeys(TERMS, wish).items():
                expected.setdefault((name, term), number)  # of two patterns that match, the first counts
    return expected


class _Scaling:
    """The exponents of a network, layer by layer along the way from its input to its output."""

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        self._layers = layers
        self._change_by_name: dict[str, float | None] = {}

    def effective(self, name: str) -> float | None:
        """Exponent of the effective update."""
        raise NotImplementedError

    def propagating(self, name: str) -> float | None:
        """Exponent of the propagating update."""
        raise NotImplementedError

    def _arriving(self, upstream: Upstream) -> float | None:
        """Exponent of how much an input changes."""
        return self._sum({self._change(name) for name in upstream.names})

    def _change(self, name: str) -> float | None:
        if name not in self._change_by_name:
            self._change_by_name[name] = None  # met again while it is being computed: a layer that feeds itself
            self._change_by_name[name] = self._sum({self.effective(name), self.propagating(name)})
        return self._change_by_name[name]

    def _sum(self, exponents: Set[float | None]) -> float | None:
        """The exponent of a sum; unknown where that of a part is."""
        return None if None in exponents else max((one for one in exponents if one is not None), default=NOTHING)


class _Maximal(_Scaling):
    """The maximal update parametrization: a wish, which holds also where layers are of unknown kinds."""

    def effective(self, name: str) -> float | None:
        layer = self._layers[name]
        if not layer.is_trained:
            return NOTHING
        # Of a layer that does not get wider, in front of those that do, it says nothing.
        return None if layer.role == "fixed" else 0.0

    def propagating(self, name: str) -> float | None:
        upstream = self._layers[name].upstream
        if upstream is None:
            return 0.0
        return self._arriving(upstream)

    def _sum(self, exponents: Set[float | None]) -> float | None:
        return 0.0 if 0.0 in exponents else super()._sum(exponents)  # what is unknown is no more than is wished


class _Standard(_Scaling):
    """The standard parametrization, or that of the neural tangent kernel; of layers whose shapes, inputs and optimizer are known."""

    def __init__(self, layers: Mapping[str, Layer], is_tangent: bool) -> None:
        super().__init__(layers)
        self._is_tangent = is_tangent
        feeding = set().union(*(layer.upstream.names for layer in layers.values() if layer.upstream is not None))
        # Gradients are of the size that is said above where the loss sees a layer of fixed size.
        ends_fixed = all(layer.role in ("output", "fixed") for name, layer in layers.items() if name not in feeding)
        # And where every layer on their way back is known.
        self._knows_gradients = ends_fixed and all(layer.upstream is not None and layer.role != "unknown" for layer in layers.values())

    def effective(self, name: str) -> float | None:
        layer = self._layers[name]
        if not layer.is_trained:
            return NOTHING
        if layer.role == "unknown" or layer.is_shared or layer.matrix_rate is None or layer.vector_rate is None:
            return None
        if layer.optimizer is None or (layer.optimizer == "sgd" and not self._knows_gradients):
            return None
        fan_in_grows, fan_out_grows = GROWTH[layer.role]
        rate, size_of_entry = layer.matrix_rate, 0.0
        if layer.optimizer == "sgd":
            size_of_entry = -0.5 if fan_out_grows else 0.0
        if fan_in_grows:
            rate += 1.0
            if self._is_tangent:
                rate -= 1.0 if layer.optimizer == "sgd" else 0.5
        exponent = max(rate, layer.vector_rate) + size_of_entry
        decay = max(layer.matrix_rate, layer.vector_rate)
        # Weight decay changes W x by a share of it; where that is more than the gradient does, sizes decide, not exponents.
        return None if layer.has_weight_decay and decay > exponent else exponent

    def propagating(self, name: str) -> float | None:
        layer = self._layers[name]
        if layer.upstream is None:
            return None
        change = self._arriving(layer.upstream)
        if change is None or change == NOTHING:
            return change
        is_bounded = not (layer.is_linear and layer.upstream.is_homogeneous)
        if layer.role == "unknown" or (change > 0 and is_bounded):
            return None
        return change + (0.5 if layer.role == "output" else 0.0)
