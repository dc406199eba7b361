"""The blocks of a model, and the rules that record values by block where loggers get roll-ups."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_module_monitor import ModuleMonitor, Rule
from lightning_module_monitor.plan.blocks import block_rules, blocks_of
from lightning_module_monitor.plan.planner import Planner


class Net(nn.Module):
    """Three blocks, each with a Sequential of two layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(3))
        self.head = nn.Linear(2, 2)


def planner_of(model: nn.Module, rules: Any = None, **options: Any) -> Planner:
    """The planner of a monitor that has the model."""
    monitor = ModuleMonitor(rules=rules or [Rule(kinds="gradient", statistics="norm")], **options)
    monitor.set_module(model)
    return monitor.engine.model.planner


def tied() -> nn.Module:
    """A list with one block in all of its places, beside a list of two."""
    block = nn.Linear(2, 2)
    return nn.ModuleDict({"one": nn.ModuleList([block] * 4), "two": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})


NAMES = [f"blocks.{number}" for number in range(3)]


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (Net(), {}, NAMES),
        (nn.ModuleDict({"net": Net()}), {}, [f"net.{name}" for name in NAMES]),
        (nn.ModuleDict({"net": Net()}), {"module": "net.stem"}, ["net.stem.0", "net.stem.4"]),
        (Net(), {"exclude": r"blocks\.[12]"}, ["stem.0", "stem.4"]),
        (tied(), {}, ["two.0", "two.1"]),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), {}, ["0", "2"]),
        (nn.ModuleDict({"net": Net(), "heads": nn.ModuleList(nn.Linear(2, 2) for _ in range(9))}), {}, [f"net.{name}" for name in NAMES]),
        (
            nn.ModuleDict({"net": Net(), "heads": nn.ModuleList(weight_norm(nn.Linear(2, 2)) for _ in range(9))}),
            {},
            [f"net.{name}" for name in NAMES],
        ),
        (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), {}, []),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {}, []),
        (nn.Linear(2, 2), {}, []),
    ],
)
def test_blocks_are_the_children_of_the_longest_list(model: nn.Module, options: dict[str, Any], expected: list[str]) -> None:
    """Every monitored child with parameters is a block, once. A list of layers counts only where no list has other children."""
    assert blocks_of(planner_of(model, **options).index) == expected


NORM = Rule(kinds=["activation", "parameter", "gradient"], statistics="norm")


@pytest.mark.parametrize(
    ("rules", "keys"),
    [
        ([NORM], {"parameter/norm", "gradient/norm"}),
        ([Rule(kinds="gradient", statistics=["rms", "hist", "token_rms"], functions={"f": len})], {"gradient/rms"}),
        (
            [Rule(kinds="gradient", statistics="norm", sites=".*weight"), Rule(kinds="gradient", statistics="norm", sites=".*bias")],
            {"gradient/norm"},
        ),
        ([NORM, Rule(kinds="gradient", statistics="norm", sites=".*bias", every_n_steps=7)], {"parameter/norm"}),
        ([NORM, Rule(kinds="gradient", statistics="norm", per_module="_root_")], {"parameter/norm", "gradient/norm"}),
        ([NORM, Rule(kinds="gradient", statistics="norm", per_module=r"blocks\..*", sites=".*weight")], {"parameter/norm"}),
        ([Rule(kinds="gradient", statistics="norm", per_module="_root_")], set()),
        ([Rule(kinds="activation", statistics="rms")], set()),
    ],
)
def test_values_by_block_are_those_of_the_users_rules(rules: list[Rule], keys: set[str]) -> None:
    """A total has the kind, statistic and parameters of its rule. A statistic without totals, or with several schedules, has none."""
    planner = planner_of(Net(), rules)
    added = block_rules(planner.recipe.rules, planner.index, NAMES)
    before = {*planner.planned_keys()}
    for rule in added:
        planner = planner.with_rule(rule)
    new = {*planner.planned_keys()} - before
    assert new == {f"{key.split('/')[0]}/{block}/{key.split('/')[1]}" for key in keys for block in NAMES}
    for total in planner.plan().totals:
        if total.number_keys[0] in new:
            assert [member.site for member in total.members] == [f"{total.site}.{i}.{name}" for i in (0, 2) for name in ("weight", "bias")]


def test_a_part_of_the_parameters_has_its_total() -> None:
    """A rule about weights has totals of weights."""
    planner = planner_of(Net(), [Rule(kinds="gradient", statistics="norm", sites=".*weight")])
    [rule] = block_rules(planner.recipe.rules, planner.index, NAMES)
    totals = planner.with_rule(rule).plan().totals
    assert [[member.site for member in total.members] for total in totals] == [[f"{block}.{i}.weight" for i in (0, 2)] for block in NAMES]
    assert rule.sites[0].fullmatch("blocks.0.0.weight")
    assert not re.fullmatch(rule.sites[0], "blocks.0.0.bias")
