"""Every option as YAML and as command line flags, through the real LightningCLI: judged by what the run then records."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.lightning_package import LightningCLI, LightningDataModule
from helpers.tiny import Tiny, loader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_module_monitor import ModuleMonitorCallback, load_store
from lightning_module_monitor.errors import ConfigError

CLASS_PATH = "lightning_module_monitor.ModuleMonitorCallback"
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "max_steps": 6,
}


class Data(LightningDataModule):
    """Six batches, always the same ones."""

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return loader()

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return loader(2)


def kurtosis(x: Tensor) -> Tensor:
    """A function of the user's own, in a module of the user's own."""
    return ((x - x.mean()) / x.std()).pow(4).mean()


def is_third(step: int) -> bool:
    """A schedule of the user's own."""
    return step % 3 == 2


@pytest.fixture(autouse=True)
def in_tmp_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs leave their files here, and model and data do not depend on other tests."""
    monkeypatch.chdir(tmp_path)


def write_config(**init_args: Any) -> str:
    """The YAML file of a run with one callback; returns the flag that names it."""
    callback = {"class_path": CLASS_PATH, "init_args": init_args}
    Path("config.yaml").write_text(yaml.safe_dump({"seed_everything": 0, "trainer": {**QUIET, "callbacks": [callback]}}))
    return "--config=config.yaml"


def monitors(cli: LightningCLI) -> list[ModuleMonitorCallback]:
    """The monitors of a Trainer that the CLI has made."""
    return [callback for callback in cli.trainer.callbacks if isinstance(callback, ModuleMonitorCallback)]


def run_cli(*args: str) -> ModuleMonitorCallback:
    """Run ``fit`` with these arguments; returns the one monitor."""
    [callback] = monitors(LightningCLI(Tiny, Data, args=["fit", *args], save_config_callback=None))
    return callback


def fit_with(**init_args: Any) -> ModuleMonitorCallback:
    """Run ``fit`` with these options of the callback in a YAML file."""
    return run_cli(write_config(**init_args))


def keys(callback: ModuleMonitorCallback) -> set[str]:
    """The keys of the newest record, without the monitor's own and the context of training."""
    assert callback.last_record is not None
    return {key for key in callback.last_record.values if "monitor/" not in key and "context/" not in key}


def stored_steps(key: str, path: str = "monitor.h5") -> list[int]:
    """The steps at which a key has a value, from the run's store."""
    return [int(step) for step in load_store(path).series(key)[0]]


def rule(**options: Any) -> dict[str, Any]:
    """A rule as YAML has it, by default for the activations' rms."""
    return {"kinds": "activation", "statistics": "rms", **options} if "functions" not in options else {"kinds": "activation", **options}


# Schedules


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (1, [0, 1, 2, 3, 4, 5]),
        (4, [0, 4]),
        ([0, 3, 100], [0, 3]),
        ("log", [1, 2, 5]),
        (f"{__name__}.is_third", [2, 5]),
    ],
)
def test_every_n_steps_in_all_its_forms(value: Any, steps: list[int]) -> None:
    """A number, a list, ``log``, or the import path of a function: the store holds just those steps."""
    fit_with(every_n_steps=value, rules=[rule()])
    assert stored_steps("activation/model.0/rms") == steps


def test_a_rule_has_its_own_cadence() -> None:
    """A rule's every_n_steps is its own; the callback's is that of the others."""
    fit_with(every_n_steps=2, rules=[rule(), rule(kinds="parameter", every_n_steps=[3]), rule(kinds="gradient", every_n_steps="log")])
    assert stored_steps("activation/model.0/rms") == [0, 2, 4]
    assert stored_steps("parameter/model.0.weight/rms") == [3]
    assert stored_steps("gradient/model.0.weight/rms") == [1, 2, 5]


@pytest.mark.parametrize("blocks", ["model", ["model.0", "model.1", "model.2"], r"model\.\d"], ids=["container", "list", "pattern"])
def test_gradient_flow_in_all_its_forms(blocks: str | list[str]) -> None:
    """A container's name, a list of names, or a pattern: the same gains, at the callback's own cadence."""
    callback = fit_with(every_n_steps=2, rules=[], gradient_flow={"blocks": blocks, "norm": "l2", "thresholds": [0.5, 2.0]})
    transitions = ["gradient_flow/model.0-model.1", "gradient_flow/model.1-model.2"]
    assert {key.rpartition("/")[0] for key in keys(callback)} == {*transitions, "gradient_flow/_summary_"}
    assert callback.last_record is not None
    values = callback.last_record.values
    gains = [values[f"{transition}/gain"] for transition in transitions]
    assert 0 < gains[0] <= 1  # a ReLU takes from the gradient
    assert values["gradient_flow/_summary_/mean_gain"] == sum(gains) / 2
    assert stored_steps(f"{transitions[0]}/log_gain") == [0, 2, 4]


# Rules


@pytest.mark.parametrize(
    ("kinds", "statistics", "sites"),
    [("gradient", "norm", r"model\.0\..*"), (["gradient"], ["norm"], [r"model\.0\.weight", r"model\.0\.bias"])],
    ids=["one", "list"],
)
def test_one_or_several(kinds: Any, statistics: Any, sites: Any) -> None:
    """Where one value may stand, a list may, and the other way round."""
    callback = fit_with(every_n_steps=1, rules=[rule(kinds=kinds, statistics=statistics, sites=sites)])
    assert keys(callback) == {"gradient/model.0.weight/norm", "gradient/model.0.bias/norm"}


@pytest.mark.parametrize("types", ["torch.nn.Linear", ["torch.nn.Linear", "torch.nn.Conv2d"]])
def test_types_by_import_path(types: Any) -> None:
    """Types are import paths; only modules of these classes are watched."""
    callback = fit_with(every_n_steps=1, rules=[rule(types=types)])
    assert keys(callback) == {"activation/model.0/rms", "activation/model.2/rms"}


def test_functions_by_import_path() -> None:
    """Functions of torch and of the user's own modules, under the name that the rule gives them."""
    functions = {"kurtosis": f"{__name__}.kurtosis", "middle": "torch.median"}
    callback = fit_with(every_n_steps=[0], rules=[rule(functions=functions, sites=r"model\.0")])
    assert keys(callback) == {"activation/model.0/kurtosis", "activation/model.0/middle"}
    torch.manual_seed(0)
    output = Tiny().model[0](next(iter(loader()))[0])
    assert callback.last_record is not None
    assert callback.last_record.values["activation/model.0/kurtosis"] == pytest.approx(kurtosis(output).item(), rel=1e-5)
    assert callback.last_record.values["activation/model.0/middle"] == pytest.approx(output.median().item(), rel=1e-6)


def test_torchmetrics_by_class_path() -> None:
    """A torchmetrics object with its arguments, and one without."""
    functions = {
        "average": {"class_path": "torchmetrics.MeanMetric", "init_args": {"nan_strategy": "disable"}},
        "largest": {"class_path": "torchmetrics.MaxMetric", "init_args": {"nan_strategy": "disable"}},
    }
    callback = fit_with(every_n_steps=[0], rules=[rule(functions=functions, statistics=["mean", "max"], sites=r"model\.2")])
    assert callback.last_record is not None
    values = callback.last_record.values
    assert values["activation/model.2/average"] == pytest.approx(values["activation/model.2/mean"], rel=1e-5)
    assert values["activation/model.2/largest"] == pytest.approx(values["activation/model.2/max"], rel=1e-6)


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("mean", lambda a, b: (a + b) / 2), ("sum", lambda a, b: a + b), ("min", min), ("max", max), ("torch.numel", lambda a, b: 2.0)],
)
def test_aggregate_by_name_or_import_path(aggregate: str, expected: Any) -> None:
    """How the results of two micro-batches are joined: by name, or by a function of the concatenated results."""
    config = write_config(every_n_steps=[0], rules=[rule(functions={"f": "torch.amax"}, aggregate=aggregate, sites=r"model\.0")])
    callback = run_cli(config, "--trainer.accumulate_grad_batches=2")
    torch.manual_seed(0)
    first_layer = Tiny().model[0]
    first, second = [first_layer(x).amax().item() for (x,) in itertools.islice(loader(), 2)]
    assert callback.last_record is not None
    assert callback.last_record.values["activation/model.0/f"] == pytest.approx(expected(first, second), rel=1e-6)


# The callback's own options


def test_store_is_off_on_or_at_a_path() -> None:
    """``false`` writes no file; ``true`` monitor.h5 in the run's directory; a path that file, with missing folders made."""
    fit_with(every_n_steps=2, rules=[rule()], store=False)
    assert not list(Path().rglob("*.h5"))
    fit_with(every_n_steps=2, rules=[rule()], store=True)
    assert [str(path) for path in Path().rglob("*.h5")] == ["monitor.h5"]
    callback = fit_with(every_n_steps=2, rules=[rule()], store="some/folder/mine.h5")
    assert stored_steps("activation/model.0/rms", "some/folder/mine.h5") == [0, 2, 4]
    assert callback.last_record is not None
    stored = load_store("some/folder/mine.h5").series("activation/model.0/rms")[1]
    assert stored[-1] == callback.last_record.values["activation/model.0/rms"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"health": 1}, "health is 1; expected options, e.g. {nonfinite: always}."),
        (
            {"health": {"nonfinit": "stop"}},
            "health has no option 'nonfinit'; expected nonfinite, watch, then, capture_steps; nearest: 'nonfinite'",
        ),
        ({"alerts": [{"keys": ".*", "above": 1, "for_steps": 2.5}]}, "alerts[0].for_steps is 2.5; expected a whole number >= 1."),
        ({"alerts": [{"above": 1}]}, "alerts[0].keys is empty; expected at least one pattern, e.g. 'gradient/.*/norm'."),
    ],
)
def test_what_is_wrong_in_health_and_alerts_is_one_line(options: dict[str, Any], message: str) -> None:
    """Of ours, and not many of LightningCLI's own: also a misspelt option, and a value of a wrong type."""
    with pytest.raises(ConfigError) as raised:
        fit_with(**options)
    assert str(raised.value) == message


def test_numbers_in_quotes_are_numbers() -> None:
    """As LightningCLI takes them."""
    alert = {"keys": "parameter/model.0.weight/norm", "above": "0.0", "for_steps": "2", "then": ["warn", "stop"]}
    callback = fit_with(every_n_steps=1, health={"watch": ["all"], "capture_steps": "3"}, alerts=[alert])
    assert [one.step for one in callback.findings] == [1]
    assert callback.last_record.step == 1


def test_the_short_name_is_known_once_the_class_is_imported() -> None:
    """As it is here, at the top."""
    Path("config.yaml").write_text(yaml.safe_dump({"seed_everything": 0, "trainer": QUIET}))
    name = CLASS_PATH.rpartition(".")[2]
    callback = run_cli(
        "--config=config.yaml",
        f"--trainer.callbacks={name}",
        "--trainer.callbacks.every_n_steps=3",
        "--trainer.callbacks.health.nonfinite=always",
    )
    assert load_store(callback.store_path).series("monitor/errors")[0].tolist() == [0, 3]


# print_config, and flags

FULL: dict[str, Any] = {
    "every_n_steps": [0, 3],
    "module": "model",
    "exclude": ".*dropout.*",
    "rules": [
        {"kinds": ["activation", "activation_gradient"], "statistics": ["rms", "abs_max", "zero_fraction"]},
        {"kinds": ["parameter", "gradient"], "statistics": ["norm"], "every_n_steps": 100},
        {"kinds": "update", "statistics": "ratio", "sites": ".*weight", "every_n_steps": "log"},
        {"kinds": "activation", "types": ["torch.nn.Linear"], "functions": {"kurtosis": "torch.var"}, "aggregate": "max"},
        {"kinds": "activation", "functions": {"m": {"class_path": "torchmetrics.MaxMetric"}}, "leaf_modules": True},
        {"kinds": "gradient", "functions": {"own": f"{__name__}.kurtosis"}, "aggregate": "torch.median"},
    ],
    "attention": True,
    "gradient_flow": {"blocks": ["model.0", "model.2"], "norm": "linf", "thresholds": [0.25, 4.0]},
    "capture": {"sites": ["model", r"model\.0.*"], "steps": [0, 3], "kinds": ["activation", "gradient"]},
    "store": "some/run.h5",
    "callback_metrics": ["update/.*/ratio"],
    "progress_bar": True,
    "stages": ["train", "validate"],
    "prefix": "run1",
    "max_logged_keys": 10,
    "max_overhead": 0.05,
    "on_error": "raise",
    "dry_run": False,
}


def print_config(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``--print_config`` prints."""
    with pytest.raises(SystemExit) as done:
        LightningCLI(Tiny, Data, args=["fit", flag, "--print_config"])
    assert done.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "init_args",
    [{}, FULL, {"every_n_steps": 7}, {"every_n_steps": "log"}, {"store": False}],
    ids=["defaults", "full", "number", "log", "no store"],
)
def test_print_config_round_trips(init_args: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed, loaded and printed again is the same byte for byte, and still says what was asked for."""
    first = print_config(write_config(**init_args), capsys)
    Path("again.yaml").write_text(first)
    assert print_config("--config=again.yaml", capsys) == first
    [printed] = yaml.safe_load(first)["trainer"]["callbacks"]
    assert printed["class_path"] == CLASS_PATH
    for name, value in init_args.items():
        if name == "rules":
            for given, shown in zip(value, printed["init_args"]["rules"], strict=True):
                simple = {key: one for key, one in given.items() if "class_path" not in str(one)}
                assert simple.items() <= {key: one for key, one in shown.items() if key in simple}.items()
        else:
            assert printed["init_args"][name] == value


def make(*args: str) -> list[ModuleMonitorCallback]:
    """The monitors of a CLI that was given these arguments, and did not run."""
    quiet = [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items()]
    return monitors(LightningCLI(Tiny, Data, args=[*quiet, *args], run=False, save_config_callback=None))


def test_a_callback_from_flags_alone() -> None:
    """``+=`` adds it, further flags set its options, with or without init_args in the path."""
    flags = [
        f"--trainer.callbacks+={CLASS_PATH}",
        "--trainer.callbacks.every_n_steps=3",
        "--trainer.callbacks.init_args.prefix=mine",
        "--trainer.callbacks.rules=[{kinds: parameter, statistics: norm, sites: '.*bias'}]",
    ]
    config = [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items()]
    callback = run_cli(*config, *flags)
    assert keys(callback) == {"mine/parameter/model.0.bias/norm", "mine/parameter/model.2.bias/norm"}
    assert stored_steps("mine/parameter/model.0.bias/norm") == [0, 3]


def test_several_callbacks_from_flags_keep_their_order() -> None:
    """Each ``+=`` adds one; flags apply to the last."""
    first, second = make(
        f"--trainer.callbacks+={CLASS_PATH}",
        "--trainer.callbacks.prefix=a",
        f"--trainer.callbacks+={CLASS_PATH}",
        "--trainer.callbacks.prefix=b",
        "--trainer.callbacks.every_n_steps=log",
    )
    assert [callback.monitor.engine.recipe.prefix for callback in (first, second)] == ["a", "b"]
    assert [first.monitor.is_step_monitored(step) for step in (0, 5, 50)] == [True, False, True]
    assert [second.monitor.is_step_monitored(step) for step in (0, 5, 50)] == [False, True, True]


def test_a_flag_adds_to_or_changes_what_the_file_says() -> None:
    """``+=`` appends to the file's callbacks; without it a flag overrides an option of the file's."""
    config = write_config(every_n_steps=10, prefix="file")
    both = make(config, f"--trainer.callbacks+={CLASS_PATH}", "--trainer.callbacks.prefix=flag")
    assert [callback.monitor.engine.recipe.prefix for callback in both] == ["file", "flag"]
    [changed] = make(config, "--trainer.callbacks.every_n_steps=4")
    assert changed.monitor.engine.recipe.prefix == "file"
    assert [changed.monitor.is_step_monitored(step) for step in (4, 10)] == [True, False]


def test_help_has_every_option_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    """``--trainer.callbacks.help`` lists all options, with what the docstring says of them."""
    with pytest.raises(SystemExit):
        make(f"--trainer.callbacks.help={CLASS_PATH}")
    shown = " ".join(capsys.readouterr().out.split())
    assert set(FULL) <= {option.split(".")[-1] for option in re.findall(r"--([\w.]+)", shown)}
    assert "Print what would be recorded and what it would cost, and record nothing." in shown
