"""Parameters are looked up anew each time; modules are found by their class."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune

from lightning_module_monitor import ModuleMonitor, Rule
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.keys import Key
from lightning_module_monitor.model.names import ModelIndex, Namer


def test_a_table_of_parameters_may_have_its_own_way_to_get_one() -> None:
    """One that fetches them, and one that is no dict."""

    class Fetching(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            return fetched

    fetched = nn.Parameter(torch.ones(1))
    for table in (Fetching(weight=nn.Parameter(torch.zeros(1))), UserDict(weight=fetched)):
        module = nn.Linear(1, 1, bias=False)
        sites = Namer().parameter_sites(module)
        vars(module)["_parameters"] = table
        assert [id(site.tensor()) for site in sites] == [id(fetched)]


def test_parameters_are_what_they_are_now() -> None:
    """As they were, replaced, frozen, gone, without a shape yet, or of a class of their own."""

    class Own(nn.Parameter):
        pass

    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abcde"})
    sites = Namer().parameter_sites(model)
    assert [site.tensor() for site in sites] == [*model.parameters()]
    model["a"].weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    del model["b"].weight
    model["c"].bias = None
    model["d"]._parameters["weight"] = nn.UninitializedParameter()
    model["e"]._parameters["weight"] = Own(torch.ones(2, 2))
    actual = {site.name: site.tensor() for site in sites}
    assert {name for name, tensor in actual.items() if tensor is None} == {"b.weight", "c.bias", "d.weight"}
    assert actual["a.weight"] is model["a"].weight
    assert type(actual["e.weight"]) is Own


def test_types_may_be_named_as_in_the_model() -> None:
    """By the name of a class, also of the user, or of a base class; as by the class itself."""

    class MyBlock(nn.Linear):
        pass

    net = nn.Sequential(MyBlock(2, 2), nn.Linear(2, 2), nn.ReLU())
    sites = {}
    for types in ("MyBlock", MyBlock, "Linear", nn.Linear, ["MyBlock", "torch.nn.ReLU"]):
        with ModuleMonitor(rules=Rule(kinds=["activation", "parameter"], types=types, statistics="rms")) as monitor:
            monitor.set_module(net)
            sites[str(types)] = {Key.parse(key).site for key in monitor.planned_keys()} - {""}
    assert list(sites.values()) == [
        *([{"0", "0.weight", "0.bias"}] * 2),
        *([{"0", "1", "0.weight", "0.bias", "1.weight", "1.bias"}] * 2),
        {"0", "0.weight", "0.bias", "2"},
    ]


class Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, original: torch.Tensor) -> torch.Tensor:
        return self.scale * original


def scaled(layer: nn.Module) -> nn.Module:
    """A layer with two parametrized attributes."""
    parametrize.register_parametrization(layer, "bias", Scaled())
    return parametrize.register_parametrization(layer, "weight", Scaled())


class Lora(nn.Module):
    """An adapter around a layer, as those of PEFT."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a = nn.Parameter(torch.zeros(base_layer.in_features, 1))
        self.lora_b = nn.ModuleDict({"default": nn.Linear(1, base_layer.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_b["default"](x @ self.lora_a)


def picked(model: nn.Module, **options: Any) -> set[str]:
    """The sites of a rule."""
    with ModuleMonitor(rules=Rule(statistics="rms", **options)) as monitor:
        monitor.set_module(model)
        return {Key.parse(key).site for key in monitor.planned_keys()} - {""}


LISTED = "0.parametrizations.weight.original"


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    ("change", "parameters"),
    [
        (nn.utils.weight_norm, {"0.bias", "0.weight_g", "0.weight_v"}),
        (nn.utils.spectral_norm, {"0.bias", "0.weight_orig"}),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), {"0.bias", "0.weight_orig"}),
        (parametrizations.weight_norm, {"0.bias", f"{LISTED}0", f"{LISTED}1"}),
        (parametrizations.spectral_norm, {"0.bias", LISTED}),
        (parametrizations.orthogonal, {"0.bias", LISTED}),
        (scaled, {"0.parametrizations.bias.original", LISTED}),
        (Lora, {"0.base_layer.weight", "0.base_layer.bias", "0.lora_b.default.weight"}),
    ],
    ids=["weight_norm", "spectral_norm", "pruning", "weight_norm, new", "spectral_norm, new", "orthogonal", "two attributes", "adapter"],
)
@pytest.mark.parametrize("types", [nn.Linear, "Linear"])
def test_a_parameter_is_of_the_layer_whose_attribute_it_makes(
    change: Callable[[nn.Linear], nn.Module], parameters: set[str], types: type[nn.Module] | str
) -> None:
    """Also where a parametrization has it, and under every name of that class."""
    model = nn.Sequential(change(nn.Linear(2, 2)), nn.Conv1d(2, 2, 1))
    assert picked(model, kinds="parameter", types=types) == parameters


def test_a_parametrization_has_its_own_parameters() -> None:
    """They are of its class, as those of an adapter."""
    model = nn.Sequential(scaled(nn.Linear(2, 2)), Lora(nn.Linear(2, 2)))
    assert picked(model, kinds="parameter", types="Scaled") == {f"0.parametrizations.{name}.0.scale" for name in ("weight", "bias")}
    assert picked(model, kinds=["parameter", "activation"], types="Lora") == {"1", "1.lora_a"}
    with pytest.raises(ConfigError, match=r"'ParametrizedLinear' is the class of none of \d+ modules; .*; nearest: 'ParametrizationList'"):
        picked(model, kinds="parameter", types="ParametrizedLinear")


def test_a_parametrized_layer_is_a_leaf() -> None:
    """What computes its parameters is no layer inside of it; an adapter has one."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)), nn.ReLU(), Lora(nn.Linear(2, 2)))
    of_weights = {"0.bias", f"{LISTED}0", f"{LISTED}1", "2.base_layer.weight", "2.base_layer.bias", "2.lora_b.default.weight"}
    assert picked(model, kinds="parameter", leaf_modules=True) == of_weights
    outputs = {"0", "0.parametrizations.weight.0", "1", "2.base_layer", "2.lora_b.default"}
    assert picked(model, kinds="activation", leaf_modules=True) == outputs


def test_wrappers_are_no_new_layers() -> None:
    """As checkpoints of activations put around layers when a strategy is set up; a layer, or a parameter, that is new is one."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    index = ModelIndex(model, None, (), str)
    model[0] = checkpoint_wrapper(model[0])
    assert index.is_complete()
    model.append(nn.ReLU())
    assert not index.is_complete()
    del model[2]
    assert index.is_complete()
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    assert not index.is_complete()
