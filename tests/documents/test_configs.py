"""Every file in configs/ runs through the real LightningCLI, does what it says, and names what there is to name."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from helpers.documents import program
from helpers.lightning_package import Trainer, seed_everything
from helpers.tiny import is_logged
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_module_monitor import Alert, Capture, GradientFlow, Health, ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.trainer.overhead import HostClock

pytestmark = pytest.mark.xdist_group("configs")  # one worker makes what they share

ROOT = Path(__file__).parents[2]
# A width check is no configuration of LightningCLI: tests/width_check/test_command.py runs it.
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem != "coordinate_check")


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    """The program that runs all three configurations."""
    return program("examples/digits.py")


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fit(digits: ModuleType, name: str) -> Trainer:
    """One epoch (23 steps) of a configuration."""
    trainer: Trainer = digits.main(["fit", "--config", str(ROOT / "configs" / name), "--trainer.max_epochs", "1"]).trainer
    return trainer


def log_dir(trainer: Trainer) -> Path:
    """The folder of the run."""
    assert trainer.log_dir is not None
    return Path(trainer.log_dir)


def print_config(digits: ModuleType, path: Path) -> str:
    """What ``--print_config`` prints for a file."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as stop:
        digits.main(["fit", "--config", str(path), "--print_config"])
    assert stop.value.code == 0
    return printed.getvalue()


def callback_options(config: dict[str, Any]) -> dict[str, Any]:
    """What a configuration gives to our callback."""
    callbacks = config["trainer"]["callbacks"]
    (options,) = [one["init_args"] for one in callbacks if one["class_path"] == "lightning_module_monitor.ModuleMonitorCallback"]
    assert isinstance(options, dict)
    return options


def test_minimal_records_the_default_rules(digits: ModuleType) -> None:
    """With nothing but a cadence there is what the default promises, and the first record is of the initial weights."""
    trainer = fit(digits, "minimal.yaml")
    store = load_store(log_dir(trainer) / "monitor.h5")
    assert {key.split("/")[0] + "/" + key.split("/")[-1] for key in store} == {
        *("activation/rms", "activation/abs_max", "activation/nonfinite_count"),
        *("parameter/norm", "gradient/norm", "activation/dead_fraction", "gradient/rms", "monitor/errors"),
        *("context/loss", "context/lr", "context/batch_size", "context/train_loss", "context/val_accuracy"),
        *("context/input_abs_max", "context/input_is_constant", "context/input_variation", "context/stale_gradients"),
        *("context/output_variation", "context/constant_from", "context/same_units", "context/target_min", "context/target_max"),
    }
    steps, norms = store.series("parameter/model.head.weight/norm")
    assert steps.tolist() == [0, 10, 20]
    seed_everything(1)
    expected = digits.DigitsClassifier().model.head.weight.double().pow(2).sum().sqrt().item()
    assert norms[0] == pytest.approx(expected, rel=1e-6)


def test_full_does_what_its_options_say(digits: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix, module, exclude, rules with sites, types, functions, aggregation and cadence, stages, callback metrics."""
    monkeypatch.setattr(HostClock, "seconds", lambda *_timestamps: 1.0)  # a busy machine would reach the limit of max_overhead
    trainer = fit(digits, "full.yaml")
    store = load_store(log_dir(trainer) / "monitor.h5")
    keys = store.keys()
    assert all(key.startswith("run1/") for key in keys)
    convolutions_and_linear = [f"model.{name}" for name in ("conv1", "conv2", "conv3", "head")]
    assert [key.split("/")[2] for key in keys if re.fullmatch("run1/activation/.*/median", key)] == convolutions_and_linear
    assert [key.split("/")[3] for key in keys if re.fullmatch("run1/validation/activation/.*/mean", key)] == convolutions_and_linear
    assert store.series("run1/activation/model.head/mean")[0].tolist() == [0, 10, 20]
    flow = {key.split("/")[2] for key in keys if key.startswith("run1/gradient_flow/")}
    assert flow == {"model.conv1-model.conv2", "model.conv2-model.conv3", "model.conv3-model.head", "_summary_"}
    assert store.series("run1/gradient_flow/_summary_/num_missing")[1].tolist() == [0.0] * 5
    assert [(one.kind, one.site, one.step) for one in store.tensors()] == [
        (kind, site, step)
        for step in (0, 20)
        for kind, site in [("activation", "model.head"), ("gradient", "model.head.weight"), ("update", "model.head.weight")]
    ]
    assert store.series("run1/gradient/model.head.weight/norm")[0].tolist() == [0, 5, 10, 15, 20]
    sites = ["_root_", *convolutions_and_linear]
    assert [key.split("/")[2] for key in keys if key.startswith("run1/gradient/") and key.split("/")[2] in sites] == sites
    # A step has one batch here, so torchmetrics' mean of it is the built-in mean.
    torch.testing.assert_close(
        torch.tensor(store.series("run1/activation/model.conv1/running_mean")[1]),
        torch.tensor(store.series("run1/activation/model.conv1/mean")[1]),
        rtol=1e-4,
        atol=1e-6,
    )
    ratio = "run1/update/model.head.weight/ratio"
    assert trainer.callback_metrics[ratio].item() == pytest.approx(store.series(ratio)[1][-1], rel=1e-6)
    assert store.series("run1/monitor/errors")[1].max() == 0


def test_digits_gives_tensorboard_what_the_store_has(digits: ModuleType) -> None:
    """Logger and store have the same values on the same x axis."""
    trainer = fit(digits, "digits.yaml")
    assert log_dir(trainer).parts[-3:] == ("demo_output", "digits", "version_0")
    store = load_store(log_dir(trainer) / "monitor.h5")
    events = EventAccumulator(str(log_dir(trainer)))
    events.Reload()
    keys = store.keys()
    assert {key.split("/")[0] for key in keys} == {
        *("activation", "activation_gradient", "parameter", "gradient_before_clip", "gradient", "update", "monitor", "context"),
    }
    for key in keys:
        steps, values = store.series(key)
        if not is_logged(key) or (key.endswith(("nonfinite_count", "monitor/errors")) and not values.any()):
            assert key not in events.Tags()["scalars"]  # loggers have what is logged already, and no counts of zero
            continue
        scalars = events.Scalars(key)
        assert [scalar.step for scalar in scalars] == steps.tolist() == [0, 5, 10, 15, 20]
        assert [scalar.value for scalar in scalars] == pytest.approx(values.tolist(), rel=1e-6)  # TensorBoard keeps float32


def test_full_names_every_option() -> None:
    """An option that is new in the callback, or in any of what it is made of, has to appear in the file."""
    options = callback_options(yaml.safe_load((ROOT / "configs" / "full.yaml").read_text()))
    assert list(options) == [name for name in inspect.signature(ModuleMonitorCallback.__init__).parameters if name != "self"]
    fullest = max(options["rules"], key=len)
    assert list(fullest) == [field.name for field in dataclasses.fields(Rule)]
    assert list(options["gradient_flow"]) == [field.name for field in dataclasses.fields(GradientFlow)]
    assert list(options["capture"]) == [field.name for field in dataclasses.fields(Capture)]
    assert list(options["health"]) == [field.name for field in dataclasses.fields(Health)]
    assert list(options["alerts"][0]) == [field.name for field in dataclasses.fields(Alert)]


def test_full_tells_the_true_defaults() -> None:
    """The comment above each option says its default, and that is the one in the code."""
    text = (ROOT / "configs" / "full.yaml").read_text()
    comment_of: dict[tuple[str, str], str] = {}
    comment = section = ""
    for line in text.partition("init_args:")[2].splitlines():
        if match := re.match(r" +# (.*)", line):
            comment += match[1] + " "
        elif match := re.match(r"( +)(?:- )?(\w+):", line):
            is_nested = len(match[1]) > 8
            section = section if is_nested else match[2]
            if comment:
                comment_of[section if is_nested else "", match[2]] = comment
            comment = ""
    parameters = inspect.signature(ModuleMonitorCallback.__init__).parameters
    defaults = {("", name): one.default for name, one in parameters.items() if name != "self"}
    for section, least, given in (
        ("rules", Rule(kinds="activation"), {"kinds"}),
        ("gradient_flow", GradientFlow(blocks=""), {"blocks"}),
        ("capture", Capture(sites="", steps=0), {"sites", "steps"}),
        ("health", Health(), set()),
        ("alerts", Alert(keys=""), {"keys"}),
    ):
        fields = [field.name for field in dataclasses.fields(least) if field.name not in given]
        defaults |= {(section, name): getattr(least, name) for name in fields}
    documented = {}
    for option in defaults:
        match = re.search(r"Default: (\[.*?\]|\S+)", comment_of[option])
        assert match, f"the comment of {option[1]} tells no default"
        documented[option] = yaml.safe_load(match[1])
    assert documented == defaults


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_print_config_round_trips(digits: ModuleType, path: Path, tmp_path: Path) -> None:
    """What is printed can be loaded, and prints the same; nothing of what the file says is lost."""
    printed = print_config(digits, path)
    again = tmp_path / "printed.yaml"
    again.write_text(printed)
    assert print_config(digits, again) == printed
    said, kept = callback_options(yaml.safe_load(path.read_text())), callback_options(yaml.safe_load(printed))
    rules, kept_rules = said.pop("rules", []), kept.pop("rules") or []
    assert said.items() <= kept.items()
    for rule, kept_rule in zip(rules, kept_rules, strict=True):
        # A torchmetrics object gets all its arguments.
        assert {name: value for name, value in rule.items() if name != "functions"}.items() <= kept_rule.items()
        assert rule.get("functions", {}).keys() == kept_rule["functions"].keys()
