"""Options in containers of other programs (Hydra, NumPy, any sequence or mapping) equal options in plain containers."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from helpers.lightning_package import CSVLogger
from helpers.tiny import KeepRecords, Tiny, fit
from hydra.utils import instantiate
from jsonargparse import Namespace
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_module_monitor import (
    Alert,
    Capture,
    GradientFlow,
    GradientGainMonitor,
    GradientNoise,
    Health,
    ModuleMonitor,
    ModuleMonitorCallback,
    RefinedCoordinateCheck,
    Rule,
    TorchWatcher,
    load_store,
)
from lightning_module_monitor.config.plain import plain
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.trainer.options import Options as ParsedOptions
from lightning_module_monitor.width_check.settings import Settings

Options = dict[str, Any]
Container = Callable[[Any], Any]


def spread(x: Tensor) -> Tensor:
    """A user function."""
    return x.std()


RULE: Options = {
    "kinds": ["activation", "activation_gradient"],
    "sites": ["model.0", "model.2"],
    "exclude": ["model.2"],
    "types": ["torch.nn.Linear", "Linear"],
    "leaf_modules": True,
    "statistics": ["rms", "max", "hist"],
    "functions": {"spread": spread, "path": "torch.median", "made": {"class_path": "torchmetrics.MeanMetric", "init_args": {}}},
    "aggregate": "max",
    "every_n_steps": [0, 2],
    "per_module": None,
    "singular_values": 0,
    "max_features": 512,
    "gather": False,
}
TOTAL: Options = {"kinds": ["gradient"], "statistics": ["norm"], "per_module": ["_root_", "model.[02]"]}
DIFFERENCES: Options = {"kinds": ["activation_difference", "parameter_difference"], "statistics": ["ratio", "cosine"]}
OPTIONS: Options = {
    "every_n_steps": [0, 2, 3],
    "module": "model",
    "exclude": ["model.1", "nothing"],
    "rules": [RULE, {"kinds": ["gradient", "update"], "statistics": ["norm", "rms"]}, DIFFERENCES, TOTAL],
    "reference": "init",
    "rcc": True,
    "save_reference": True,
    "attention": False,
    "gradient_flow": {"blocks": ["model.0", "model.2"], "norm": "l1", "thresholds": [0.25, 4.0]},
    "gradient_noise": {"per_module": ["_root_", "model.2"]},
    "capture": {"sites": ["model.0", "model.2.weight"], "steps": [0, 3], "kinds": ["activation", "parameter"]},
    "health": {
        "nonfinite": "always",
        "watch": ["vanishing", "exploding"],
        "then": ["warn", "capture"],
        "capture_steps": 2,
    },
    "alerts": [
        {"keys": ["run1/gradient/.*", "run1/update/.*"], "above": 1e3, "below": 0.0, "for_steps": 2, "then": ["warn", "checkpoint"]},
        {"keys": ["run1/gradient/.*"], "relative_to_median": True, "above": 90.0, "name": "wild"},
    ],
    "store": True,
    "report": False,
    "callback_metrics": ["run1/gradient/.*/norm", "run1/update/.*/rms"],
    "progress_bar": False,
    "stages": ["train", "validate"],
    "prefix": "run1",
    "max_logged_keys": 500,
    "max_overhead": None,
    "compiled": "uncompiled",
    "on_error": "raise",
    "dry_run": False,
}
"""Every option, with every option inside."""
NESTED: dict[str, tuple[type, Options]] = {
    "rules": (Rule, RULE | {"per_module": TOTAL["per_module"]}),
    "gradient_flow": (GradientFlow, OPTIONS["gradient_flow"]),
    "gradient_noise": (GradientNoise, OPTIONS["gradient_noise"]),
    "capture": (Capture, OPTIONS["capture"]),
    "health": (Health, OPTIONS["health"]),
    "alerts": (Alert, OPTIONS["alerts"][0] | OPTIONS["alerts"][1]),
}


def of_hydra(value: Any) -> Any:
    """A value in Hydra's containers."""
    return OmegaConf.create(value, flags={"allow_objects": True}) if isinstance(value, dict | list) else value


def converted(value: Any, mapping: Container, sequence: Container) -> Any:
    """A value with other mappings and sequences at each depth."""
    if isinstance(value, dict):
        return mapping({key: converted(one, mapping, sequence) for key, one in value.items()})
    return sequence([converted(one, mapping, sequence) for one in value]) if isinstance(value, list) else value


def in_array(values: list[Any]) -> Any:
    """Numbers as an array of NumPy, anything else as a deque."""
    return np.array(values) if all(isinstance(one, int | float) for one in values) else deque(values)


def in_view(values: list[Any]) -> Any:
    """The values of a dict."""
    return dict(enumerate(values)).values()


CONTAINERS: dict[str, Container] = {
    "omegaconf": of_hydra,
    "tuples and proxies": lambda value: converted(value, MappingProxyType, tuple),
    "arrays and ordered dicts": lambda value: converted(value, OrderedDict, in_array),
    "views and namespaces of jsonargparse": lambda value: converted(value, lambda one: Namespace(**one), in_view),
}


def callback(options: Options) -> ModuleMonitorCallback:
    """The callback with these options, none of which is an error."""
    made = ModuleMonitorCallback(**options)
    assert isinstance(made.monitor, ModuleMonitor)
    return made


def parsed(made: ModuleMonitorCallback) -> ParsedOptions:
    """The options of a callback."""
    assert not isinstance(made._prepared, ConfigError), made._prepared
    return made._prepared.options


def series(root: Path, made: ModuleMonitorCallback) -> dict[str, dict[int, float]]:
    """The records of a run; NaN, which equals nothing, as a text."""
    records = KeepRecords(made)
    root.mkdir()
    fit(root, [made, records], max_steps=4, max_epochs=2, accumulate_grad_batches=2)
    own = ("monitor/overhead", "monitor/seconds")
    kept = {key: values for key, values in records.series().items() if not key.startswith(own)}
    return {key: {step: "nan" if math.isnan(value) else value for step, value in values.items()} for key, values in kept.items()}


def test_the_table_has_every_option() -> None:
    """Every option has a row, also those of rules, captures, flows, health and alerts."""
    assert [*OPTIONS] == [*inspect.signature(ModuleMonitorCallback).parameters]
    for options, given in NESTED.values():
        assert {field.name for field in dataclasses.fields(options)} == given.keys()


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", [name for name, value in OPTIONS.items() if isinstance(value, dict | list)])
def test_an_option_is_the_same_in_any_container(name: str, container: str) -> None:
    """Parsed options, the stored configuration and the pickled callback have no container of another package."""
    others = {key: value for key, value in OPTIONS.items() if key != name}
    given = callback({**others, name: CONTAINERS[container](OPTIONS[name])})
    expected = callback(OPTIONS)
    options = parsed(given)
    assert options.arguments == parsed(expected).arguments
    assert options.described() == parsed(expected).described()
    assert type(options.arguments[name]) is type(OPTIONS[name])
    pickled = pickle.dumps(given)
    assert b"omegaconf" not in pickled
    assert b"jsonargparse" not in pickled
    assert parsed(pickle.loads(pickled)).described() == parsed(expected).described()
    assert parsed(copy.deepcopy(given)).arguments == parsed(expected).arguments


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_run_is_the_same_in_any_container(container: str, tmp_path: Path) -> None:
    """Every value of every step, the attributes of the store, and a checkpoint of plain values, which ``weights_only`` can load."""
    expected = callback(OPTIONS)
    given = callback({name: CONTAINERS[container](value) for name, value in OPTIONS.items()})
    recorded = series(tmp_path / "plain", expected)
    assert series(tmp_path / "given", given) == recorded
    assert {
        "run1/activation/model.0/made",
        "run1/gradient/model.0.weight/norm",
        "run1/gradient/model.0/norm",
        "run1/gradient_flow/model.0-model.2/gain",
        "run1/gradient_noise/model.2/scale",
    } <= recorded.keys()
    configurations = []
    for one in (given, expected):
        assert one.store_path is not None
        [run] = load_store(one.store_path).attributes["configurations"]
        configurations.append(run["configuration"])
    assert configurations[0] == configurations[1]
    torch.save(given.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["format_version"] == 1


@pytest.mark.parametrize(("options", "fields"), NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_dataclass_of_options_holds_plain_values(options: type, fields: Options, container: str) -> None:
    """A ``Rule`` in Python code accepts any container, too, and equals a rule with lists and dicts."""
    given = options(**{name: CONTAINERS[container](value) for name, value in fields.items()})
    assert given == options(**fields)
    assert vars(given) == fields


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (range(0, 6, 2), [0, 2, 4]),
        (np.arange(3), [0, 1, 2]),
        (torch.tensor([1, 4]), [1, 4]),
        (np.int64(3), [0, 3]),
        ({5: None, 1: None}.keys(), [1, 5]),
        (frozenset({0, 5}), [0, 5]),
        (ListConfig([0, 3]), [0, 3]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_steps_in_any_collection(value: Any, steps: list[int], tmp_path: Path) -> None:
    """The steps of the monitor's and a rule's schedule equal the collection."""
    given = callback({"every_n_steps": value, "rules": [{"kinds": "activation", "statistics": "rms"}]})
    assert [step for step in range(6) if given.monitor.is_step_monitored(step)] == steps


def test_minutes_in_a_mapping_of_hydra() -> None:
    """The schedule by the clock."""
    given = callback({"every_n_steps": DictConfig({"minutes": 5})})
    assert str(parsed(given).every_n_steps) == "every 5 minutes"


def test_other_classes_take_any_container(tmp_path: Path) -> None:
    """The monitor of a plain loop, the watcher, the gains and the coordinate check at several widths."""
    of_lists = ModuleMonitor([0, 2], exclude=["model.1"], rules=[RULE], capture=OPTIONS["capture"], gradient_flow=OPTIONS["gradient_flow"])
    monitor = ModuleMonitor(
        of_hydra([0, 2]),
        exclude=of_hydra(["model.1"]),
        rules=of_hydra([RULE]),
        capture=of_hydra(OPTIONS["capture"]),
        gradient_flow=of_hydra(OPTIONS["gradient_flow"]),
    )
    for one in (of_lists, monitor):
        one.set_module(Tiny())
        one.add_rules(of_hydra([{"kinds": ["update"], "statistics": ["norm", "ratio"]}]))
    assert monitor.planned_keys() == of_lists.planned_keys()
    assert [step for step in range(5) if monitor.is_step_monitored(step)] == [0, 2, 3]
    monitor.set_reference_module(Tiny())
    RefinedCoordinateCheck(monitor, statistics=of_hydra(["rms", "norm"]))
    assert "rcc_output/model.0/norm" in monitor.planned_keys()
    monitor.close()
    of_lists.close()

    watcher = TorchWatcher(Tiny(), CSVLogger(tmp_path), track_layers=(nn.Linear,), tensor_stats=of_hydra(["mean", "norm"]))
    watcher.close()
    gains = GradientGainMonitor(nn.Sequential(nn.ReLU(), nn.Tanh()), thresholds=of_hydra([0.25, 4.0]))
    assert gains.thresholds == (0.25, 4.0)
    gains.close()

    exponents = {"model.head": {"effective_update": 0.0}, "model.*": None}
    of_hydra_s = {"widths": [8, 16], "seeds": [0, 1], "terms": ["effective_update"], "trainer": {"devices": [0], "precision": "32-true"}}
    rest = {"steps": 1, "tolerance": 0.25}
    given = Settings.parse(**{name: of_hydra(value) for name, value in of_hydra_s.items()}, parametrization=of_hydra(exponents), **rest)
    assert given == Settings.parse(**of_hydra_s, parametrization=exponents, **rest)
    assert type(given.trainer["devices"]) is list


def test_what_can_be_iterated_and_called_stays_as_it_is() -> None:
    """Modules, classes and metrics are values of options, not collections."""
    module, metric = nn.Sequential(nn.ReLU()), MeanMetric()
    values: Mapping[str, Any] = plain(MappingProxyType({"a": module, "b": (nn.Linear, metric), "c": "text", "d": b"bytes"}))
    assert values["a"] is module
    assert values["b"] == [nn.Linear, metric]
    assert (values["c"], values["d"]) == ("text", b"bytes")


@pytest.mark.parametrize("convert", ["none", "partial", "all", "object"])
def test_hydra_makes_the_callback_in_every_mode(convert: str) -> None:
    """``_convert_`` decides which containers arrive; also for objects inside, which OmegaConf keeps by the hints of their class."""
    made = {"_target_": "torchmetrics.MeanMetric"}
    functions = {"spread": {"_target_": "hydra.utils.get_method", "path": "torch.std"}, "made": made}
    types = [{"_target_": "hydra.utils.get_class", "path": "torch.nn.Linear"}]
    config = OmegaConf.create(
        {
            "_target_": "lightning_module_monitor.ModuleMonitorCallback",
            "_convert_": convert,
            "every_n_steps": ["${max_logged_keys}", 3],
            "max_logged_keys": 2,
            "rules": [
                {"_target_": "lightning_module_monitor.Rule", "kinds": ["activation"], "statistics": ["rms"], "every_n_steps": [0]},
                {"_target_": "lightning_module_monitor.Rule", "kinds": "activation", "types": types, "functions": functions},
                {"kinds": ["gradient"], "statistics": ["norm"]},
            ],
            "gradient_flow": {"_target_": "lightning_module_monitor.GradientFlow", "blocks": ["model.0", "model.2"]},
            "capture": {"_target_": "lightning_module_monitor.Capture", "sites": ["model.0"], "steps": [0, 1]},
            "health": {"_target_": "lightning_module_monitor.Health", "watch": ["vanishing"]},
            "alerts": [{"_target_": "lightning_module_monitor.Alert", "keys": ["gradient/.*"], "above": 100}],
        }
    )
    given = instantiate(config)
    expected = ModuleMonitorCallback(
        every_n_steps=[2, 3],
        max_logged_keys=2,
        rules=[
            Rule(kinds=["activation"], statistics=["rms"], every_n_steps=[0]),
            Rule(kinds="activation", types=[nn.Linear], functions={"spread": torch.std, "made": MeanMetric()}),
            {"kinds": ["gradient"], "statistics": ["norm"]},
        ],
        gradient_flow=GradientFlow(blocks=["model.0", "model.2"]),
        capture=Capture(sites=["model.0"], steps=[0, 1]),
        health=Health(watch=["vanishing"]),
        alerts=[Alert(keys=["gradient/.*"], above=100)],
    )
    keys = []
    for one in (given, expected):
        assert [step for step in range(4) if one.monitor.is_step_monitored(step)] == [0, 1, 2, 3]
        one.monitor.set_module(Tiny())
        keys.append(one.monitor.planned_keys())
        one.monitor.close()
    assert keys[0] == keys[1]
    assert {"activation/model.0/spread", "activation/model.1/rms", "gradient/model.0.bias/norm"} <= {*keys[0]}
    assert [rule.outputs for rule in given.monitor.engine.recipe.rules] == [rule.outputs for rule in expected.monitor.engine.recipe.rules]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": ["train", "val"]}, "stages 'val' is not a stage; expected train, validate, test, predict; nearest: 'validate'"),
        ({"stages": {"train": True}}, "stages {'train': True} is not a stage; expected train, validate, test, predict."),
        ({"gradient_flow": {"blocks": "model", "thresholds": [2.0, 0.5]}}, "gradient_flow.thresholds is [2.0, 0.5]; expected two numbers"),
        ({"rules": [{"kinds": ["activation"], "statistics": ["nrom"]}]}, "rules[0].statistics 'nrom' is not a statistic; expected mean"),
        ({"rules": [["activation"]]}, "rules[0] is ['activation']; expected options, e.g."),
        ({"rules": [{"kinds": "activation", "stats": ["rms"]}]}, "rules[0] has no option 'stats'; expected kinds"),
        ({"every_n_steps": [0, "a"]}, "every_n_steps lists 'a'; expected step numbers >= 0"),
        ({"every_n_steps": []}, "every_n_steps is an empty list; expected at least one step."),
        ({"health": ["dead_units"]}, "health is ['dead_units']; expected options, e.g. {nonfinite: always}."),
        ({"store": {"path": "a.h5"}}, "store is {'path': 'a.h5'}; expected the path of a file, or true or false."),
        ({"capture": {"sites": ["model"]}}, "capture lacks steps; expected e.g. {sites: model.head, steps: [0, 100]}."),
    ],
)
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_wrong_value_is_named_as_in_plain_containers(options: Options, message: str, container: str) -> None:
    """The same words as for lists and dicts: no container of another package is in the message."""
    refusals = []
    for one in (options, {name: CONTAINERS[container](one) for name, one in options.items()}):
        with pytest.raises(ConfigError, match=re.escape(message)) as error:
            _monitor = ModuleMonitorCallback(**one).monitor
        refusals.append(str(error.value))
    assert refusals[0] == refusals[1]
    assert refusals[0].startswith(message)


def test_a_class_path_that_cannot_be_made() -> None:
    """The message has the object's error."""
    functions = {"made": {"class_path": "torchmetrics.MeanMetric", "init_args": {"nan_strategy": "bad"}}}
    with pytest.raises(ConfigError, match=r"rules\[0\]\.functions 'made' 'torchmetrics.MeanMetric' was not made \(ValueError: "):
        ModuleMonitor(rules=[{"kinds": "activation", "functions": functions}])
