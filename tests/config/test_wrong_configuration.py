"""A wrong configuration is refused before the first batch, with what was wrong, what was expected, and the nearest right name."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from helpers.lightning_package import (
    Callback,
    DeepSpeedStrategy,
    FSDPStrategy,
    LightningCLI,
    LightningModule,
    ModelParallelStrategy,
    Trainer,
)
from helpers.tiny import Tiny, fit, loader, measured
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_module_monitor import Alert, Capture, Health, ModuleMonitor, ModuleMonitorCallback, Rule
from lightning_module_monitor.config.health_options import parse_health
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.trainer.strategy import check_strategy

Options = dict[str, Any]


class CountBatches(Callback):
    """How far a run came."""

    def __init__(self) -> None:
        self.started = 0

    def on_train_batch_start(self, *_args: Any) -> None:
        self.started += 1


def size(x: Tensor) -> Tensor:
    """A function of the user's."""
    return x.abs().mean()


def rule(**options: Any) -> Options:
    """The callback's options with one rule, by default a right one."""
    return {"rules": [{"kinds": "activation", "statistics": "rms", **options}]}


def flow(**options: Any) -> Options:
    """The callback's options with a gradient flow, by default a right one."""
    return {"gradient_flow": {"blocks": "model", **options}}


def build(options: Options) -> ModuleMonitorCallback:
    """The callback of these options, as a Python program makes it that has them in dicts."""
    return ModuleMonitorCallback(**options)


def assert_short(message: str) -> None:
    """One or two lines, which fit on a screen."""
    assert message.count("\n") <= 1
    assert len(message) <= 300, message


def refusal(root: Path, make: Callable[[], list[Callback]], model: Callable[[], LightningModule] = Tiny, **options: Any) -> str:
    """The message with which a configuration is refused before the first batch."""
    count = CountBatches()
    with pytest.raises(ConfigError) as refused:
        fit(root, [*make(), count], model, max_steps=3, **options)
    assert count.started == 0
    message = str(refused.value)
    assert_short(message)
    return message


# Wrong values, and what the message must hold: the value, what was expected, the nearest right name.

STATISTICS = "expected mean, std, var, skewness, kurtosis, norm, rms, min, max, abs_mean, abs_max, zero_fraction, nonfinite_count"
SCHEDULES = "expected a whole number of steps, a list of steps, 'log', {minutes: 5}, or a function of the step"
IN_A_KEY = "cannot stand in a key; expected at most 40 letters, digits"

WRONG: dict[str, tuple[Options, tuple[str, ...]]] = {
    "kind": (
        rule(kinds="activations"),
        ("rules[0].kinds 'activations'", "expected activation, activation_gradient", "nearest: 'activation'"),
    ),
    "second kind": (rule(kinds=["activation", "gradients"]), ("'gradients'", "nearest: 'gradient'")),
    **{f"kind {kind}": (rule(kinds=kind), (f"{kind!r}", f"nearest: '{kind.lower()}'")) for kind in ("Gradient", "Activation", "PARAMETER")},
    "no kind": (rule(kinds=[]), ("rules[0].kinds is empty", "expected at least one of activation")),
    "second rule": (
        {"rules": [*rule()["rules"], *rule(kinds="udpate", statistics="norm")["rules"]]},
        ("rules[1].kinds 'udpate'", "nearest: 'update'"),
    ),
    "statistic": (rule(statistics="nrom"), ("rules[0].statistics 'nrom'", STATISTICS, "nearest: 'norm'")),
    "statistic in capitals": (rule(statistics="RMS"), ("rules[0].statistics 'RMS'", STATISTICS, "nearest: 'rms'")),
    "statistic in a list": (rule(statistics=["rms", "zero_fractoin"]), ("'zero_fractoin'", "nearest: 'zero_fraction'")),
    "neither statistics nor functions": (rule(statistics=[]), ("rules[0]", "neither statistics nor functions", "expected at least one")),
    "ratio of an activation": (
        rule(statistics="ratio"),
        ("rules[0].statistics 'ratio'", "'activation'", "expected kinds activation_difference, parameter_difference, update"),
    ),
    "ratio of one of two kinds": (
        rule(kinds=["update", "gradient"], statistics="ratio"),
        ("'ratio'", "'gradient'", "expected kinds activation_difference, parameter_difference, update"),
    ),
    "comparison of a gradient": (
        rule(kinds="gradient", statistics="cosine_to_gradient"),
        ("'cosine_to_gradient' compares with another tensor (gradient), and 'gradient' has none",),
    ),
    "comparison of a state": (
        rule(kinds="optimizer_state", statistics="cosine_to_previous"),
        ("'optimizer_state' has none; expected kinds update. ",),
    ),
    "ratio of a state": (rule(kinds="optimizer_state", statistics="ratio"), ("'optimizer_state' is relative to nothing",)),
    "states of nothing": (
        rule(kinds="optimizer_state", exclude=".*", statistics="norm"),
        ("exclude .* leave nothing of the parameter names",),
    ),
    **{
        f"rule of the option {kind}": (
            rule(kinds=kind),
            (f"'{kind}' is recorded by the option {kind}, and by no rule; expected activation",),
        )
        for kind in ("gradient_noise", "gradient_flow")
    },
    "sites match no module": (rule(sites="modle.0"), ("rules[0].sites 'modle.0' matches none of 5 module names; nearest: 'model.0'",)),
    "sites match no parameter": (
        rule(kinds="parameter", sites="model.0.wieght"),
        ("rules[0].sites 'model.0.wieght' matches none of 4 parameter names; nearest: 'model.0.weight'",),
    ),
    "sites as for a search": (
        rule(sites="odel.[02]"),
        ("rules[0].sites 'odel.[02]' matches none of 5 module names as a whole; '.*odel.[02].*' matches 2 of them.",),
    ),
    "sites that begin like a name": (
        rule(kinds="parameter", sites="^model.0|model.2$"),
        ("matches none of 4 parameter names as a whole; '.*(^model.0|model.2$).*' matches 2 of them.",),
    ),
    "sites as a glob": (
        rule(sites=["nothing", "mo*.1"]),
        ("rules[0].sites 'nothing', 'mo*.1' match none of 5 module names; nearest: 'mo.*.1'.",),
    ),
    "sites as a glob that is no pattern": (rule(sites="*.0"), ("'*.0' is not a regular expression", "a pattern like '.*.0'")),
    "statistic of a textbook": (rule(statistics="L2"), ("rules[0].statistics 'L2'", "nearest: 'norm'")),
    "statistic of another tool": (rule(statistics="sparsity"), ("'sparsity' is not a statistic", "nearest: 'zero_fraction'")),
    "statistic like none": (rule(statistics="xyz"), ("'xyz' is not a statistic", "in STATISTICS).")),
    "kind of another tool": (rule(kinds="grad"), ("rules[0].kinds 'grad' is not a kind", "nearest: 'gradient'")),
    "weights": (rule(kinds="weights"), ("rules[0].kinds 'weights' is not a kind", "nearest: 'parameter'")),
    "action of another tool": (
        {"alerts": [{"keys": ".*", "above": 1, "then": "halt"}]},
        ("alerts[0].then 'halt' is unknown", "nearest: 'stop'"),
    ),
    "callback_metrics as for a search": (
        {"callback_metrics": "model.0.*nor"},
        ("callback_metrics 'model.0.*nor' matches none of the", "keys as a whole; '.*model.0.*nor.*' matches 4 of them."),
    ),
    "no sites": (rule(sites=[]), ("rules[0].sites is empty", "expected")),
    "sites are no pattern": (rule(sites="model.*["), ("rules[0].sites 'model.*['", "not a regular expression", "expected a pattern like")),
    "exclude of a rule is no pattern": (rule(exclude="("), ("rules[0].exclude '('", "not a regular expression")),
    "exclude is no pattern": ({"exclude": ["ok", "*"]}, ("exclude '*'", "not a regular expression")),
    "exclude leaves nothing": ({"exclude": ".*"}, ("exclude '.*'", "expected")),
    "name of a class that is not in the model": (
        rule(types=["ReLU", "Linea"]),
        ("rules[0].types 'Linea' is the class of none of 5 modules; expected e.g.", "or an import path; nearest: 'Linear'"),
    ),
    "type in no module": (rule(types="torch.n.Linear"), ("rules[0].types 'torch.n.Linear'", "cannot be imported")),
    "type that is not there": (rule(types=["torch.nn.Linea"]), ("rules[0].types 'torch.nn.Linea'", "nearest: 'Linear'")),
    "type that is no module": (rule(types="torch.optim.SGD"), ("rules[0].types 'torch.optim.SGD'", "not a module class", "expected")),
    "type of which there is none": (rule(types="torch.nn.Conv2d"), ("rules[0]", "types", "Conv2d", "expected at least one")),
    "leaf_modules is no boolean": (rule(leaf_modules=3), ("rules[0].leaf_modules is 3", "expected true or false")),
    "per_module of a module's kind": (
        rule(per_module="_root_"),
        ("rules[0].per_module: kind 'activation' is of modules; expected kinds parameter, parameter_difference, gradient",),
    ),
    "per_module of tokens": (
        rule(kinds="gradient", per_module="_root_", statistics=["norm", "token_norm"]),
        ("rules[0].per_module: 'token_norm' is of tokens", "expected kinds parameter", "e.g. norm"),
    ),
    "per_module of units": (
        rule(kinds="parameter", per_module="_root_", statistics="dead_fraction"),
        ("rules[0].per_module: 'dead_fraction' is of units",),
    ),
    "per_module of functions": (
        rule(kinds="gradient", per_module="_root_", functions={"f": size}),
        ("rules[0].per_module: functions get one parameter at a time",),
    ),
    "per_module of a module that is not there": (
        rule(kinds="gradient", per_module=["_root_", "modle"]),
        ("rules[0].per_module 'modle' matches none of 5 module names; nearest: 'model'",),
    ),
    "per_module of a module without parameters": (
        rule(kinds="gradient", per_module=r"model\.1"),
        ("rules[0].per_module matches only modules without a parameter that the rule picks (model.1)", "or _root_ for all"),
    ),
    "per_module is no pattern": (rule(kinds="gradient", per_module="("), ("rules[0].per_module '('", "not a regular expression")),
    "no per_module": (rule(kinds="gradient", per_module=[]), ("rules[0].per_module is empty", "_root_ for the whole model")),
    "two totals with one key": (
        {
            "rules": [
                {"kinds": "gradient", "per_module": "_root_", "statistics": "norm"},
                {"kinds": "gradient", "per_module": "_root_", "sites": ".*weight", "statistics": "norm"},
            ]
        },
        ("rules[1].per_module: another rule has 'gradient/_root_/norm' of other parameters; expected the same sites",),
    ),
    "no types": (rule(types=[]), ("rules[0].types is empty", "expected")),
    "aggregate": (
        rule(functions={"f": size}, aggregate="averge"),
        ("rules[0].aggregate 'averge'", "expected mean, sum, min, max, or a function"),
    ),
    "function that is none": (rule(functions={"f": 3}), ("rules[0].functions 'f' is 3", "expected a function of a tensor")),
    "name of a function": (rule(functions={"a/b": size}), ("rules[0].functions 'a/b'", IN_A_KEY)),
    "name of a function is empty": (rule(functions={"": size}), ("rules[0].functions ''", IN_A_KEY)),
    "name used twice": (rule(functions={"rms": size}), ("rules[0].functions 'rms' is also in its statistics", "expected another name")),
    "functions are a list": (rule(functions=[size]), ("rules[0].functions", "expected")),
    "rule that is none": ({"rules": [3]}, ("rules[0] is 3", "expected options, e.g. {kinds: activation, statistics: norm}")),
    "option of a rule": (
        {"rules": [{"kinds": "activation", "statistic": "norm"}]},
        ("rules[0] has no option 'statistic'; expected kinds, sites", "nearest: 'statistics'"),
    ),
    "rule of no kind": ({"rules": [{"statistics": "norm"}]}, ("rules[0] lacks kinds; expected e.g. {kinds: activation",)),
    "function that is not there": (
        {"rules": [{"kinds": "activation", "functions": {"f": "math.squirt"}}]},
        ("rules[0].functions 'f' 'math.squirt': math has no 'squirt'; nearest: 'sqrt'",),
    ),
    "option of gradient_flow": (
        {"gradient_flow": {"blocks": "model", "threshold": [1, 2]}},
        ("gradient_flow has no option 'threshold'", "nearest: 'thresholds'"),
    ),
    "option of capture": ({"capture": {"site": "model", "steps": [0]}}, ("capture has no option 'site'", "nearest: 'sites'")),
    "capture at a step that is none": (
        {"capture": {"sites": "model", "steps": "often"}},
        ("capture.steps lists 'often'", "expected step numbers"),
    ),
    "cadence of a rule": (rule(every_n_steps=0), ("rules[0].every_n_steps is 0", "expected a whole number of steps >= 1")),
    "every 0 steps": ({"every_n_steps": 0}, ("every_n_steps is 0", "expected a whole number of steps >= 1")),
    "every -5 steps": ({"every_n_steps": -5}, ("every_n_steps is -5", "expected a whole number of steps >= 1")),
    "every 'every' steps": ({"every_n_steps": "every"}, ("every_n_steps is 'every'", SCHEDULES)),
    "every 1.5 steps": ({"every_n_steps": 1.5}, ("every_n_steps is 1.5", SCHEDULES)),
    "every True steps": ({"every_n_steps": True}, ("every_n_steps is True", SCHEDULES)),
    "every 0 minutes": ({"every_n_steps": {"minutes": 0}}, ("every_n_steps.minutes is 0", "expected a number > 0")),
    "every 'five' minutes": ({"every_n_steps": {"minutes": "five"}}, ("every_n_steps.minutes is 'five'", "expected a number > 0")),
    "every hour": ({"every_n_steps": {"hours": 1}}, ("every_n_steps has the unit 'hours'; expected minutes, e.g. {minutes: 5}",)),
    "cadence of a rule by the clock": (
        rule(every_n_steps={"minutes": 5}),
        ("rules[0].every_n_steps is {'minutes': 5", "expected a whole number of steps, a list of steps, 'log', or a function"),
    ),
    "no steps": ({"every_n_steps": []}, ("every_n_steps is an empty list", "expected at least one step")),
    "a negative step": ({"every_n_steps": [0, -2]}, ("every_n_steps lists -2", "expected step numbers >= 0")),
    "gradient_flow of blocks that are not there": (
        flow(blocks="modle"),
        ("gradient_flow.blocks 'modle' is none of the 5 module names, and as a pattern matches none; nearest: 'model'",),
    ),
    "gradient_flow of what is no container": (
        flow(blocks="model.0"),
        ("gradient_flow.blocks 'model.0' is a Linear", "expected a ModuleList, Sequential or ModuleDict", "nearest: 'model'"),
    ),
    "gradient_flow of a list with a wrong name": (
        flow(blocks=["model.0", "model.3"]),
        ("gradient_flow.blocks 'model.3' is none of the 5 module names; nearest: 'model.",),
    ),
    "gradient_flow of one block": (
        flow(blocks=r"model\.0"),
        (r"gradient_flow.blocks 'model\\.0' gives 1 blocks ('model.0')", "expected at least two"),
    ),
    "gradient_flow of no blocks": (flow(blocks=[]), ("gradient_flow.blocks is []", "expected a container's name")),
    "gradient_flow of a broken pattern": (flow(blocks="model.("), ("gradient_flow.blocks 'model.('", "not a regular expression")),
    "norm of gradient_flow": (flow(norm="L1"), ("gradient_flow.norm 'L1' is not a norm; expected l2, l1, linf, mean; nearest: 'l1'",)),
    "thresholds of gradient_flow": (flow(thresholds=[2, 0.5]), ("gradient_flow.thresholds is [2", "expected two numbers", "e.g. [0.5, 2]")),
    "one threshold of gradient_flow": (flow(thresholds=[2.0]), ("gradient_flow.thresholds is [2.0]", "expected two numbers")),
    "gradient_flow is a text": ({"gradient_flow": "model"}, ("gradient_flow is 'model'", "expected options, e.g. {blocks: model.blocks}")),
    "capture of a kind": (
        {"capture": {"sites": "model", "steps": 0, "kinds": ["activation", "gradeint"]}},
        ("capture.kinds 'gradeint'", "expected activation, activation_gradient", "nearest: 'gradient'"),
    ),
    "capture of a site": (
        {"capture": {"sites": "modle.0", "steps": [0]}},
        ("capture.sites 'modle.0' matches none of 9 module and parameter names; nearest: 'model.0'",),
    ),
    "capture of a parameter": (
        {"capture": {"sites": "model.0.wieght", "steps": [0], "kinds": "parameter"}},
        ("capture.sites 'model.0.wieght' matches none of 4 parameter names; nearest: 'model.0.weight'",),
    ),
    "capture at no step": ({"capture": {"sites": "model", "steps": []}}, ("capture.steps is empty", "e.g. [0, 100]")),
    "capture at a negative step": (
        {"capture": {"sites": "model", "steps": [-1]}},
        ("capture.steps lists -1", "expected step numbers >= 0"),
    ),
    "capture of no kind": ({"capture": {"sites": "model", "steps": 0, "kinds": []}}, ("capture.kinds is empty",)),
    "capture of a broken pattern": ({"capture": {"sites": "model.(", "steps": 0}}, ("capture.sites 'model.('", "not a regular expression")),
    "capture at step True": ({"capture": {"sites": "model", "steps": True}}, ("capture.steps lists True", "expected step numbers >= 0")),
    "capture at no site": ({"capture": {"sites": [], "steps": 0}}, ("capture.sites is empty", "e.g. 'model.head'")),
    "capture that is none": (
        {"capture": "model.head"},
        ("capture is 'model.head'", "expected options, e.g. {sites: model.head, steps: [0, 100]}"),
    ),
    "capture without a store": (
        {"capture": {"sites": "model", "steps": 0}, "store": False},
        ("capture is given, and store is false", "expected a store"),
    ),
    "report": ({"report": "yes"}, ("report is 'yes'", "expected true or false")),
    "report without a store": ({"report": True, "store": False}, ("report is true, and store is false", "expected a store")),
    "stage": (
        {"stages": ["train", "validation"]},
        ("stages 'validation'", "expected train, validate, test, predict", "nearest: 'validate'"),
    ),
    "prefix with a blank": ({"prefix": "run 1"}, ("prefix 'run 1'", IN_A_KEY)),
    "prefix with a part too few": ({"prefix": "run1/"}, ("prefix 'run1/'", IN_A_KEY)),
    "prefix that is too long": ({"prefix": "x" * 41}, ("prefix 'xxxx", IN_A_KEY)),
    "prefix with a stage": ({"prefix": "validation"}, ("prefix 'validation' has the name of a stage in it",)),
    "prefix that is no text": ({"prefix": 3}, ("prefix", "3", "expected")),
    "on_error": ({"on_error": "ignore"}, ("on_error is 'ignore'", "expected 'warn' or 'raise'")),
    "module is no text": ({"module": 3}, ("module is 3; expected the name of a submodule",)),
    "module is a module": ({"module": nn.Linear(1, 1)}, ("module is Linear(in_features=1", "expected the name of a submodule")),
    "no rules": ({"rules": []}, ("rules is empty",)),
    "statistic in a list of a list": (rule(statistics=[["rms"]]), ("rules[0].statistics ['rms'] is not a statistic",)),
    "rules are a number": ({"rules": 3}, ("rules[0] is 3; expected options",)),
    "store is a list": ({"store": ["a"]}, ("store is ['a']; expected the path of a file",)),
    "store is a number": ({"store": 3}, ("store is 3; expected the path of a file, or true or false",)),
    "stage in a list of a list": ({"stages": [["train"]]}, ("stages ['train'] is not a stage",)),
    "no stages": ({"stages": []}, ("stages is empty, and nothing would be recorded; expected one or several of train, validate",)),
    "stages are a mapping": ({"stages": {"train": True}}, ("stages {'train': True} is not a stage; expected train",)),
    "health is a number": ({"health": 3}, ("health is 3; expected options",)),
    "option of health": ({"health": {"nonfinit": "always"}}, ("health has no option 'nonfinit'", "nearest: 'nonfinite'")),
    "dry_run is a text": ({"dry_run": "false"}, ("dry_run is 'false'; expected true or false",)),
    "dry_run is a number": ({"dry_run": 3}, ("dry_run is 3; expected true or false",)),
    "module": ({"module": "modell"}, ("module 'modell' is none of the model's 5 modules; nearest: 'model'",)),
    "callback_metrics match no key": (
        {"callback_metrics": ["parameter/model.0.wieght/norm"]},
        ("callback_metrics 'parameter/model.0.wieght/norm' matches none of the ", "keys; nearest: 'parameter/model.0.weight/norm'"),
    ),
    "callback_metrics are no pattern": ({"callback_metrics": ["("]}, ("callback_metrics '('", "not a regular expression")),
    "attention": ({"attention": "yes"}, ("attention is 'yes'", "expected true or false")),
    "kind of attention": (rule(kinds="attention_max_logits"), ("'attention_max_logits' is not a kind", "nearest: 'attention_max_logit'")),
    "progress_bar alone": ({"progress_bar": True}, ("progress_bar is true", "callback_metrics is empty", "expected patterns of the keys")),
    "max_logged_keys": ({"max_logged_keys": 0}, ("max_logged_keys is 0", "expected a whole number >= 1")),
    "max_overhead of nothing": ({"max_overhead": 0}, ("max_overhead is 0", "more than 0 and less than 1")),
    "max_overhead in percent": ({"max_overhead": 2.0}, ("max_overhead is 2.0", "expected a share of the time")),
    "max_overhead is no number": ({"max_overhead": "2%"}, ("max_overhead is '2%'", "expected a share of the time")),
    "max_logged_keys is no number": ({"max_logged_keys": "many"}, ("max_logged_keys is 'many'", "expected a whole number >= 1")),
    "max_logged_keys is a flag": ({"max_logged_keys": True}, ("max_logged_keys is True", "expected a whole number >= 1")),
}

THROUGH_THE_CLI = [  # one of each place where a value is checked: options, dataclasses within them, names in the model, functions by path
    *("second rule", "option of a rule", "sites as a glob", "type that is not there", "function that is not there", "cadence of a rule"),
    *("every 0 steps", "module", "callback_metrics match no key", "max_overhead in percent", "report without a store"),
    *("gradient_flow of blocks that are not there", "option of gradient_flow", "capture at a step that is none", "option of capture"),
    # of types that the annotations exclude
    *("every 0 minutes", "every 'five' minutes", "every hour", "cadence of a rule by the clock"),
    *("every True steps", "every 1.5 steps", "prefix that is no text", "max_logged_keys is no number", "max_logged_keys is a flag"),
    *("max_overhead is no number", "gradient_flow is a text", "capture that is none", "rule that is none"),
    *("module is no text", "rules are a number", "store is a list", "stages are a mapping", "health is a number", "option of health"),
    "dry_run is a number",
]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_refused_in_python(case: str, tmp_path: Path) -> None:
    """Before the first batch, in one or two lines that name the value, what was expected, and the nearest right name."""
    options, parts = WRONG[case]
    message = refusal(tmp_path, lambda: [build(options)])
    assert not [part for part in parts if part not in message], message


def in_yaml(value: Any) -> Any:
    """The same options as YAML has them: functions by import path."""
    if isinstance(value, dict):
        return {key: in_yaml(one) for key, one in value.items()}
    if isinstance(value, list):
        return [in_yaml(one) for one in value]
    return f"{__name__}.{value.__name__}" if callable(value) else value


def run_cli(root: Path, options: Options) -> None:
    """Run ``fit`` through LightningCLI with these options of the callback."""
    quiet: Options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["num_sanity_val_steps"] = 0
    callback = {"class_path": "lightning_module_monitor.ModuleMonitorCallback", "init_args": in_yaml(options)}
    counter = {"class_path": f"{__name__}.CountBatches"}
    trainer = {**quiet, "accelerator": "cpu", "max_steps": 3, "default_root_dir": str(root), "callbacks": [callback, counter]}
    (root / "config.yaml").write_text(yaml.safe_dump({"seed_everything": 0, "trainer": trainer}))
    LightningCLI(WithData, args=["fit", f"--config={root / 'config.yaml'}"], save_config_callback=None)


class WithData(Tiny):
    """Brings its own data, and does not survive a batch."""

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        raise AssertionError("a batch was run")


@pytest.mark.parametrize("case", THROUGH_THE_CLI)
def test_a_wrong_value_is_refused_through_the_cli(case: str, tmp_path: Path) -> None:
    """The same message, alone: not within the many lines that jsonargparse makes of an error while it builds a callback."""
    options, parts = WRONG[case]
    with pytest.raises(ConfigError) as refused:
        run_cli(tmp_path, options)
    message = str(refused.value)
    assert_short(message)
    assert not [part for part in parts if part not in message], message


def test_what_jsonargparse_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown option of the callback itself does not get past the parser, which names it."""
    with pytest.raises(SystemExit) as refused:
        run_cli(tmp_path, {"every_n_step": 5})
    assert refused.value.code == 2
    assert "Option 'every_n_step' is not accepted" in capsys.readouterr().err


# Runs that cannot be monitored


class Manual(Tiny):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


# Importing torch's compiler calls what torch 2.13 has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")
def test_a_compiled_model_is_refused_where_torch_cannot_run_it_uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.6 there is no way around a graph."""

    class Compiled(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.model[2].compile()

    monkeypatch.delattr(torch.compiler, "set_stance")
    message = refusal(tmp_path, lambda: [ModuleMonitorCallback(compiled="uncompiled")], Compiled)
    assert message.startswith("model.2 is compiled, and torch ")
    assert "expected torch 2.6 or later" in message


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"health": Health(nonfinite="stop")}, "health.nonfinite: 'stop'"),
        ({"health": Health(then="checkpoint")}, "'no_gradients': then 'checkpoint'"),
        ({"alerts": [Alert(keys="activation/.*", above=1.0, then=["capture", "stop"], name="mine")]}, "'mine': then 'stop'"),
    ],
)
def test_what_ranks_would_decide_together_is_refused_where_each_has_values_of_its_own(
    options: Options, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a strategy that is not known, a finding of one rank alone cannot stop the run or save a checkpoint: the others would wait."""
    monkeypatch.setattr(Trainer, "world_size", property(lambda self: 2))
    message = refusal(tmp_path, lambda: [ModuleMonitorCallback(**options)])
    assert message.startswith(f"{found}: under SingleDeviceStrategy each rank judges its own values, and the others would wait for it;")


@pytest.mark.parametrize("strategy", [FSDPStrategy(), ModelParallelStrategy()])
def test_norms_of_tokens_of_sharded_parameters_are_refused(strategy: object) -> None:
    """A rank may have parts of a token; under NO_SHARD it has all."""
    rules = Rule(kinds=["activation", "gradient"], statistics=["norm", "token_rms"])
    recipe, health = ModuleMonitor(rules=rules).engine.recipe, parse_health(None, (), has_default_rules=True)
    trainer = SimpleNamespace(strategy=strategy, world_size=2)
    with pytest.raises(ConfigError, match=rf"rules\[0\]\.statistics 'token_rms': under {type(strategy).__name__} a rank has parts"):
        check_strategy(cast("Trainer", trainer), health, recipe)
    trainer.strategy = FSDPStrategy(sharding_strategy="NO_SHARD")
    check_strategy(cast("Trainer", trainer), health, recipe)


@pytest.mark.parametrize(
    ("strategy", "rule", "message"),
    [
        (
            FSDPStrategy(),
            Rule(kinds="optimizer_state", functions={"own": torch.sum}),
            r"functions 'own': under FSDPStrategy a rank has parts of the states",
        ),
        (
            ModelParallelStrategy(),
            Rule(kinds=["optimizer_state", "update"], functions={"own": torch.sum}),
            r"functions 'own': under ModelParallelStrategy a rank has parts of the states",
        ),
        (
            ModelParallelStrategy(),
            Rule(kinds="optimizer_state", statistics="token_rms"),
            r"statistics 'token_rms': under ModelParallelStrategy a rank has parts of the tokens",
        ),
        (
            object.__new__(DeepSpeedStrategy),
            Rule(kinds=["gradient", "optimizer_state"], statistics="norm"),
            r"kinds 'optimizer_state': DeepSpeedStrategy keeps the states of the optimizer in parts of its own",
        ),
        (
            object.__new__(DeepSpeedStrategy),
            Rule(kinds="update", statistics=["ratio", "cosine_to_gradient"]),
            r"statistics 'cosine_to_gradient': DeepSpeedStrategy clears gradients in its step",
        ),
    ],
)
def test_states_and_gradients_that_a_strategy_does_not_show_are_refused(strategy: object, rule: Rule, message: str) -> None:
    """Before the first batch, by the path of the rule; a rule without them is not."""
    health, trainer = parse_health(None, (), has_default_rules=True), SimpleNamespace(strategy=strategy, world_size=2)
    with pytest.raises(ConfigError, match=rf"rules\[0\]\.{message}"):
        check_strategy(cast("Trainer", trainer), health, ModuleMonitor(rules=rule).engine.recipe)
    fine = ModuleMonitor(rules=Rule(kinds="update", statistics=["ratio", "cosine_to_previous"])).engine.recipe
    check_strategy(cast("Trainer", trainer), health, fine)


@pytest.mark.parametrize(
    ("option", "label"),
    [
        ({"rules": [Rule(kinds=["parameter", "gradient_before_clip"], statistics="norm")]}, "rules[0]"),
        ({"capture": Capture(sites="model.0.weight", steps=0, kinds="gradient_before_clip")}, "capture"),
    ],
)
def test_gradients_before_clipping_are_refused_under_manual_optimization(option: Options, label: str, tmp_path: Path) -> None:
    """Nobody tells when the module clips: what would be recorded may be clipped already. The right kind is named."""
    message = refusal(tmp_path, lambda: [ModuleMonitorCallback(**option)], Manual)
    expected = "Manual uses manual optimization, and when it clips, if it does, is not known; expected 'gradient'"
    assert message.startswith(f"{label}.kinds 'gradient_before_clip': {expected}")


# The store's path


PATHS_OF_NO_FILE = {
    "a folder": "{folder}",
    "a folder that does not exist": "{folder}/runs/",
    "inside a file": "{folder}/file/monitor.h5",
    "empty": "",
    "a space": " ",
    "a device": os.devnull,
    "a long name": f"{{folder}}/{'m' * 250}.h5",  # the name of its journal is longer than a file system takes
    "a loop of links": "{folder}/loop/monitor.h5",
    "a null character": "monitor\0.h5",
    "of an unknown user": "~nobody-of-that-name/monitor.h5",
    "a bucket": "s3://bucket",
    "no bucket": "memory://monitor.h5",
    "a folder of a bucket": "s3://bucket/runs/",
}


@pytest.mark.parametrize("kind", PATHS_OF_NO_FILE)
def test_a_store_that_cannot_be_is_refused(kind: str, tmp_path: Path) -> None:
    """A path at which no file can be made is said before the first batch, and not found out at the first record."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = PATHS_OF_NO_FILE[kind].format(folder=tmp_path)
    message = refusal(tmp_path, lambda: [ModuleMonitorCallback(every_n_steps=1, store=path)])
    assert "store" in message
    assert (repr(path) if len(path) < 150 else repr(path[:60])) in message
    assert "expected" in message


class MeshOfTwo:
    """All that is asked of the mesh of two ranks that share their input, before anything runs."""

    def size(self) -> int:
        return 2


def test_what_parts_of_tensors_do_not_tell_is_refused() -> None:
    """Norms of tokens, and heads of attention, where a rank has a part of them and nobody knows which."""
    mesh = cast("DeviceMesh", MeshOfTwo())
    for wish, message in (
        (Rule(kinds="activation", statistics="token_norm"), "statistics 'token_norm': in tensor parallel training a rank may have parts"),
        (Rule(kinds="attention_entropy", statistics="mean"), "kinds 'attention_entropy': in tensor parallel training a rank may have some"),
    ):
        with pytest.raises(ConfigError, match=message):
            ModuleMonitor(rules=wish, distributed=mesh).set_module(nn.Linear(2, 2))
        with ModuleMonitor(distributed=mesh) as monitor:
            monitor.set_module(nn.Linear(2, 2))
            with pytest.raises(ConfigError, match=message):
                monitor.add_rules(wish)


def test_a_prefix_and_a_module_of_one_name_are_two_identities(tmp_path: Path) -> None:
    """Their keys differ, so they work side by side."""
    first = ModuleMonitorCallback(1, prefix="model", store=False)
    second = ModuleMonitorCallback(1, module="model", store=False)
    fit(tmp_path, [first, second], max_steps=2)
    assert first.last_record is not None
    assert second.last_record is not None
    own = {key.removeprefix("model/") for key in first.last_record.values if key.startswith("model/")}
    assert {key for key in second.last_record.values if "model.0" in key} <= own


def test_a_right_configuration_is_not_refused(tmp_path: Path) -> None:
    """The options that all wrong ones are made from."""
    callback = build({**rule(functions={"size": size}, types=nn.Linear), "every_n_steps": 1, "store": False})
    count = CountBatches()
    fit(tmp_path, [callback, count], max_steps=3)
    assert count.started == 3
    assert callback.last_record is not None
    assert measured(callback.last_record).keys() == {
        *(f"activation/model.{i}/{statistic}" for i in (0, 2) for statistic in ("rms", "size")),
        "monitor/errors",
    }


def test_a_pattern_of_several_that_matches_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """With what may be meant: the others are recorded; the names of modules and parameters count alike."""
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    monitor = ModuleMonitor(rules=[Rule(kinds=["activation", "gradient"], sites=["stem", "haed", "head.weight"], statistics="rms")])
    with caplog.at_level(logging.WARNING):
        monitor.set_module(model)
    assert caplog.messages == ["rules[0].sites 'haed' matches none of 7 names; nearest: 'head'"]
