"""Expected exponents: those of muP and the user's own."""

from __future__ import annotations

import math

import pytest

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.width_check.expectations import NOTHING, TERMS, expected_exponents, parse_parametrization
from lightning_module_monitor.width_check.layers import Layer

MLP = {"in": Layer("input", True), "mid": Layer("hidden", True), "out": Layer("output", True)}


def exponents(layers: dict[str, Layer], term: str) -> list[float | None]:
    """The exponents that muP expects of one term, in the layers' order."""
    expected = expected_exponents("mup", layers)
    return [expected[name, term] for name in layers]


@pytest.mark.parametrize("term", TERMS)
def test_every_exponent_of_mup_is_zero(term: str) -> None:
    """No term depends on the width, also of a layer whose role is not known."""
    assert exponents(MLP | {"own": Layer("unknown", True)}, term) == [0, 0, 0, 0]


def test_a_layer_that_is_not_trained_has_no_effective_update() -> None:
    """Its input may change."""
    layers = MLP | {"mid": Layer("hidden", False), "own": Layer("unknown", False), "stem": Layer("fixed", False)}
    assert exponents(layers, "effective_update") == [0, NOTHING, 0, NOTHING, NOTHING]
    assert exponents(layers, "propagating_update") == [0, 0, 0, 0, 0]


def test_layers_that_do_not_get_wider() -> None:
    """MuP expects nothing of their updates, nor of what they may pass on to a layer with a fan-in of one size."""
    layers = {"stem": Layer("fixed", True)} | MLP
    assert exponents(layers, "effective_update") == [None, 0, 0, 0]
    assert exponents(layers, "propagating_update") == [None, None, 0, 0]


def test_exponents_by_pattern_by_pattern() -> None:
    """The first pattern that matches counts, for all terms or for the named ones; others are open."""
    patterns = {"out": {"effective_update": 0.25, "propagating_update": None}, "mid|out": 1}
    expected = expected_exponents(patterns, MLP)
    assert [expected.get((name, "effective_update")) for name in MLP] == [None, 1, 0.25]
    assert [expected.get((name, "propagating_update")) for name in MLP] == [None, 1, None]
    assert expected["out", "effective_alignment"] == 1
    with pytest.raises(ConfigError, match=r"parametrization 'outt' matches none of the 3 modules that own weights; nearest: 'out'"):
        expected_exponents({"outt": 0}, MLP)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("sp", "parametrization is 'sp'; expected mup, or exponents by pattern of module names, e.g. {'model.head': 0.0}"),
        ("ntp", "parametrization is 'ntp'; expected mup, or exponents"),
        (3, "parametrization is 3; expected mup, or exponents"),
        ({}, "parametrization is {}; expected"),
        ({"(": 0}, r"parametrization '\(' is not a regular expression"),
        ({"out": "0"}, r"parametrization\['out'\] is '0'; expected a number, or null"),
        ({"out": math.nan}, r"parametrization\['out'\] is nan; expected a number"),
        ({"out": {"effective": 0}}, r"parametrization\['out'\] has the term 'effective'; expected .*; nearest: 'effective_update'"),
    ],
)
def test_wrong_parametrizations(wrong: object, message: str) -> None:
    """An error before anything is trained."""
    with pytest.raises(ConfigError, match=message):
        parse_parametrization(wrong)
