"""Parameters are looked up anew each time; modules are found by their class."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch import nn

from lightning_module_monitor import ModuleMonitor, Rule
from lightning_module_monitor.keys import Key
from lightning_module_monitor.model.names import Namer


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
            sites[str(types)] = {Key.parse(key).site for key in monitor.planner.planned_keys()} - {""}
    assert list(sites.values()) == [
        *([{"0", "0.weight", "0.bias"}] * 2),
        *([{"0", "1", "0.weight", "0.bias", "1.weight", "1.bias"}] * 2),
        {"0", "0.weight", "0.bias", "2"},
    ]
