"""Expected exponents: the published ones, and those that are left open."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.width_check.expectations import NOTHING, expected_exponents, parse_parametrization
from lightning_module_monitor.width_check.layers import Layer, Role, Upstream


def layer(role: Role, *fed_by: str, rate: float = 0.0, optimizer: Any = "sgd", is_homogeneous: bool = True, **others: Any) -> Layer:
    """A linear layer without bias, trained."""
    facts: dict[str, Any] = {
        "matrix_rate": rate,
        "vector_rate": -math.inf,
        "has_weight_decay": False,
        "is_shared": False,
        "is_linear": True,
        "upstream": Upstream(frozenset(fed_by), is_homogeneous),
    }
    return Layer(role=role, optimizer=optimizer, **(facts | others))


def mlp(**facts: Any) -> dict[str, Layer]:
    """The network of the published exponents."""
    return {"in": layer("input", **facts), "mid": layer("hidden", "in", **facts), "out": layer("output", "mid", **facts)}


def exponents(parametrization: Any, layers: dict[str, Layer], term: str, steps: int = 1) -> list[float | None]:
    """Of one term, in the layers' order."""
    expected = expected_exponents(parametrization, layers, steps)
    return [expected[name, term] for name in layers]


@pytest.mark.parametrize(
    ("parametrization", "facts", "effective", "propagating"),
    [
        ("sp", {"optimizer": "sgd"}, [-0.5, 0.5, 1], [NOTHING, -0.5, 1]),
        ("sp", {"optimizer": "sgd", "rate": -0.5}, [-1, 0, 0.5], [NOTHING, -1, 0.5]),  # the largest rate at which features are stable
        ("sp", {"optimizer": "sgd", "rate": -1.0}, [-1.5, -0.5, 0], [NOTHING, -1.5, 0]),  # the largest at which the output is
        ("sp", {"optimizer": "entrywise", "rate": -1.0}, [-1, 0, 0], [NOTHING, -1, 0.5]),
        ("sp", {"optimizer": "entrywise"}, [0, 1, 1], [NOTHING, 0, 1.5]),
        ("ntp", {"optimizer": "sgd"}, [-0.5, -0.5, 0], [NOTHING, -0.5, 0]),  # features stay, the function moves: the kernel regime
        ("ntp", {"optimizer": "entrywise", "rate": -0.5}, [-0.5, 0, 0], [NOTHING, -0.5, 0.5]),
        ("mup", {"optimizer": "sgd"}, [0, 0, 0], [NOTHING, 0, 0]),
        ("mup", {"optimizer": None}, [0, 0, 0], [NOTHING, 0, 0]),
    ],
)
def test_published_exponents(parametrization: str, facts: dict[str, Any], effective: list[float], propagating: list[float]) -> None:
    """ArXiv 2505.22491 (sp), 2203.03466 (mup), and the kernel regime (ntp), for the network with two hidden layers."""
    assert exponents(parametrization, mlp(**facts), "effective_update") == effective
    assert exponents(parametrization, mlp(**facts), "propagating_update") == propagating
    assert exponents(parametrization, mlp(**facts), "effective_alignment") == [0, 0, 0]


def test_a_change_is_passed_on_along_the_graph() -> None:
    """A deeper hidden layer gets what the one before it changed; a parallel one does not; a residual sum gets the most."""
    layers = {
        "in": layer("input"),
        "query": layer("hidden", "in"),
        "key": layer("hidden", "in"),
        "deep": layer("hidden", "query", "in"),
        "shallow": layer("hidden", "in"),
        "out": layer("output", "deep", "key", "shallow"),
        "early": layer("output", "in"),
    }
    assert exponents("sp", layers, "propagating_update") == [NOTHING, -0.5, -0.5, 0.5, -0.5, 1, 0]


def test_biases_norms_and_frozen_layers() -> None:
    """A bias counts where its learning rate is larger; a gain is like an input layer; what is frozen passes on what it gets."""
    layers = {
        "in": layer("input"),
        "norm": layer("input", "in", matrix_rate=-math.inf, vector_rate=0.0, is_linear=False),
        "frozen": layer("hidden", "norm", matrix_rate=-math.inf),
        "mid": layer("hidden", "frozen", rate=-2.0, vector_rate=1.0),
        "out": layer("output", "mid"),
    }
    assert exponents("sp", layers, "effective_update") == [-0.5, -0.5, NOTHING, 0.5, 1]
    assert exponents("sp", layers, "propagating_update") == [NOTHING, -0.5, -0.5, -0.5, 1]


@pytest.mark.parametrize(
    "facts",
    [{"optimizer": None}, {"rate": None}, {"is_shared": True}, {"role": "unknown"}, {"vector_rate": None}],
    ids=lambda facts: next(iter(facts)),
)
def test_what_is_not_known_is_left_open(facts: dict[str, Any]) -> None:
    """Of such a layer nothing is said under sp, nor of what it feeds; mup still wishes 0. One of no known kind hides the gradients."""
    layers = mlp()
    layers["mid"] = layer(facts.get("role", "hidden"), "in", **{name: value for name, value in facts.items() if name != "role"})
    assert exponents("sp", layers, "effective_update") == ([None, None, None] if "role" in facts else [-0.5, None, 1])
    assert exponents("sp", layers, "propagating_update")[2] is None
    assert exponents("mup", layers, "effective_update") == [0, 0, 0]
    assert exponents("mup", layers, "propagating_update") == [NOTHING, 0, 0]


def test_without_the_graph_gradients_are_not_known() -> None:
    """SGD's exponents hang on them, Adam's do not; what feeds a layer is needed for what it passes on."""
    for optimizer, effective in (("sgd", [None, None, None]), ("entrywise", [0, 1, 1])):
        layers = mlp(optimizer=optimizer) | {"mid": layer("hidden", optimizer=optimizer, upstream=None)}
        assert exponents("sp", layers, "effective_update") == effective
        assert exponents("sp", layers, "propagating_update") == [NOTHING, None, None]
        assert exponents("mup", layers, "propagating_update") == [NOTHING, 0, 0]


def test_a_loss_of_wide_features_is_left_open_under_sgd() -> None:
    """Where the network ends in a layer that gets wider, the size of the gradients is not that of the theory."""
    layers = {"in": layer("input"), "mid": layer("hidden", "in")}
    assert exponents("sp", layers, "effective_update") == [None, None]


def test_growth_through_what_is_bounded_is_left_open() -> None:
    """A tanh, a norm: what grows in front of them need not behind them; what does not grow passes."""
    bounded = mlp() | {"out": layer("output", "mid", is_homogeneous=False)}
    assert exponents("sp", bounded, "propagating_update") == [NOTHING, -0.5, None]
    assert exponents("sp", bounded | {"mid": layer("hidden", "in", rate=-0.5)}, "propagating_update") == [NOTHING, -0.5, 0.5]


def test_weight_decay_that_may_win_is_left_open() -> None:
    """It takes a share of W x, which under SGD's -1/2 in the input layer falls slower than the gradient's part."""
    assert exponents("sp", mlp(has_weight_decay=True), "effective_update") == [None, 0.5, 1]
    assert exponents("sp", mlp(has_weight_decay=True, optimizer="entrywise"), "effective_update") == [0, 1, 1]


def test_a_layer_that_feeds_itself_is_left_open() -> None:
    """A recurrent one, under sp; mup wishes 0."""
    layers = mlp() | {"mid": layer("hidden", "in", "mid")}
    assert exponents("sp", layers, "propagating_update") == [NOTHING, None, None]
    assert exponents("mup", layers, "propagating_update") == [NOTHING, 0, 0]
    assert exponents("mup", {"mid": layer("hidden", "mid")}, "propagating_update") == [0]


def test_layers_that_do_not_get_wider() -> None:
    """Mup says nothing of them; a layer fed by nothing else has an open propagating update."""
    layers = {"stem": layer("fixed")} | mlp()
    layers["in"] = layer("input", "stem")
    assert exponents("mup", layers, "effective_update") == [None, 0, 0, 0]
    assert exponents("mup", layers, "propagating_update") == [NOTHING, None, 0, 0]
    assert exponents("sp", layers, "effective_update") == [0, -0.5, 0.5, 1]


def test_later_steps_of_what_grows_are_left_open() -> None:
    """After the first step diverging outputs change the gradients; where nothing grows the exponents stay."""
    assert exponents("sp", mlp(), "effective_update", steps=2) == [None, None, None]
    assert exponents("sp", mlp(), "propagating_update", steps=2) == [NOTHING, None, None]
    assert exponents("ntp", mlp(), "effective_update", steps=9) == [-0.5, -0.5, 0]
    assert exponents("mup", mlp(), "effective_update", steps=9) == [0, 0, 0]


def test_own_exponents_by_pattern() -> None:
    """The first pattern that matches counts, for all terms or for those that are named; the rest is open."""
    wish = {"out": {"effective_update": 0.25, "propagating_update": None}, "mid|out": 1}
    expected = expected_exponents(wish, mlp(), steps=1)
    assert [expected.get((name, "effective_update")) for name in mlp()] == [None, 1, 0.25]
    assert [expected.get((name, "propagating_update")) for name in mlp()] == [None, 1, None]
    assert expected["out", "effective_alignment"] == 1
    with pytest.raises(ConfigError, match=r"parametrization 'outt' matches none of the 3 modules that own weights; nearest: 'out'"):
        expected_exponents({"outt": 0}, mlp(), steps=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("mupp", "parametrization is 'mupp'; expected mup, sp, ntp, or exponents by pattern, .*; nearest: 'mup'"),
        (3, "parametrization is 3; expected mup, sp, ntp, or exponents"),
        ({}, "parametrization is {}; expected"),
        ({"(": 0}, r"parametrization '\(' is not a regular expression"),
        ({"out": "0"}, r"parametrization\['out'\] is '0'; expected a number, or null"),
        ({"out": math.nan}, r"parametrization\['out'\] is nan; expected a number"),
        ({"out": {"effective": 0}}, r"parametrization\['out'\] has the term 'effective'; expected .*; nearest: 'effective_update'"),
    ],
)
def test_wrong_parametrizations(wrong: object, message: str) -> None:
    """Said before anything is trained."""
    with pytest.raises(ConfigError, match=message):
        parse_parametrization(wrong)
