"""Mistakes that are no wrong value, such as a stage without a loop: one line names what is missing, and the nearest right name."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import NAME, LightningModule
from helpers.tiny import Tiny, fit, loader, trainer
from torch import Tensor, nn

from lightning_module_monitor import Alert, Health, ModuleMonitor, ModuleMonitorCallback, Rule
from lightning_module_monitor.errors import ConfigError

Model = Callable[[], LightningModule]


class Other(Tiny):
    """A model with another function than ReLU."""

    function: Callable[[], nn.Module] = nn.GELU

    def __init__(self) -> None:
        super().__init__()
        self.model[1] = type(self).function()


class WithLeakyReLU(Other):
    """Its class has a similar name."""

    function = nn.LeakyReLU


class WithoutValidation(LightningModule):
    """It has no ``validation_step``, but a method with a similar name."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 3)

    configure_optimizers = Tiny.configure_optimizers

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0]).pow(2).mean()

    def validate_step(self, batch: list[Tensor], batch_idx: int) -> None:
        raise AssertionError("Lightning does not call it")


def warnings_of(caplog: pytest.LogCaptureFixture, run: Callable[[], object]) -> list[str]:
    """The warnings of the monitor."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=NAME):
        run()
    return [record.getMessage() for record in caplog.records if record.name.startswith(NAME)]


# A stage without a loop


@pytest.mark.filterwarnings("ignore:You (defined a .validation_step. but have no|passed in a .val_dataloader. but)")
@pytest.mark.parametrize(
    ("model", "has_loader", "options", "reason"),
    [
        (WithoutValidation, True, {}, "WithoutValidation has no validation_step; nearest: 'validate_step'"),
        (Tiny, False, {}, "it has no dataloader for validation"),
        (Tiny, True, {"limit_val_batches": 0}, "limit_val_batches is 0"),
        (Tiny, True, {"check_val_every_n_epoch": 5, "max_epochs": 2}, "check_val_every_n_epoch is 5, and max_epochs is 2"),
    ],
)
@pytest.mark.parametrize("stages", ["validate", ["train", "validate"]])
def test_a_stage_without_a_validation_loop_is_reported(  # noqa: PLR0917  # a mistake and its message
    model: Model, has_loader: bool, options: Any, reason: str, stages: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in two fits, before the first step, with the reason."""
    callback, module = ModuleMonitorCallback(1, stages=stages, rules=[Rule(kinds="activation", statistics="rms")], store=False), model()
    loaders = [loader(2)] if has_loader else []

    def run() -> None:
        for _ in range(2):
            trainer(tmp_path, [callback], **{"max_epochs": 1, **options}).fit(module, loader(), *loaders)

    expected = f"stages has 'validate', and this fit runs no validation loop: {reason}. Nothing is recorded under validation/."
    assert warnings_of(caplog, run) == [expected]


@pytest.mark.parametrize("stages", ["validate", ["train", "validate"], "train", ["train", "test"]])
def test_a_stage_with_a_loop_is_not_reported(stages: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is a stage of another loop than that of a fit."""
    assert warnings_of(caplog, lambda: fit(tmp_path, [ModuleMonitorCallback(1, stages=stages, store=False)], max_epochs=2)) == []


# Keys that cannot occur


@pytest.mark.parametrize(
    ("option", "label"),
    [
        (lambda keys: {"alerts": [Alert(keys=keys, above=1e9)]}, "alerts[0].keys"),
        (lambda keys: {"callback_metrics": keys}, "callback_metrics"),
    ],
)
@pytest.mark.parametrize(
    ("keys", "near"),
    [
        ("grad/.*/norm", "as a whole; 'gradient/.*/norm' matches 4 of them."),
        ("weights/.*/norm", "as a whole; 'parameter/.*/norm' matches 4 of them."),
        ("own/score", "; expected e.g. 'context/loss', 'context/lr', 'context/batch_size'."),
    ],
)
def test_keys_that_do_not_occur_are_reported_with_the_nearest(  # noqa: PLR0917  # a mistake and its message
    option: Callable[[str], Any], label: str, keys: str, near: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, at the first record: the model may log such a key itself later."""
    rules = [Rule(kinds=["parameter", "gradient"], statistics="norm")]
    callback = ModuleMonitorCallback(1, rules=rules, store=False, **option(keys))
    [message] = warnings_of(caplog, lambda: fit(tmp_path, [callback], max_epochs=2))
    start, end = f"{label} {keys!r} matches none of ", " Later records may have such keys."
    assert message.startswith(start)
    assert message.endswith(end)
    assert near in message


# Names that an exclude does not match


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": ["model.2", "model.l"]}, "exclude 'model.l' matches none of 9 names; nearest: 'model.2'"),
        (
            {"exclude": "model.2.bias", "rules": [Rule(kinds="parameter", statistics="norm", exclude=["model.2.biaz", ".*0.bias"])]},
            "rules[0].exclude 'model.2.biaz' matches none of 9 names; nearest: 'model.2.bias'",
        ),
        ({"exclude": "zzz", "module": "model"}, "exclude 'zzz' matches none of 8 names; expected e.g. 'model', 'model.0', 'model.1'."),
    ],
)
def test_an_exclude_that_matches_nothing_is_reported(
    options: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in two fits, with the nearest name, excluded or not; a pattern that matches an excluded name is right."""
    callback, module = ModuleMonitorCallback(1, store=False, **options), Tiny()

    def run() -> None:
        for _ in range(2):
            trainer(tmp_path, [callback], max_epochs=1).fit(module, loader(), loader(2))

    assert warnings_of(caplog, run) == [message]


def test_an_exclude_of_the_whole_model_is_refused(tmp_path: Path) -> None:
    """It would leave nothing; a pattern that matches the name of the root among others leaves the others."""
    with pytest.raises(ConfigError, match="exclude '_root_' is the whole model; expected names inside of it"):
        fit(tmp_path, [ModuleMonitorCallback(1, store=False, exclude=["model.0", "_root_"])])
    callback = ModuleMonitorCallback(1, store=False, exclude="(?!model).*")
    fit(tmp_path, [callback])
    assert callback.last_record is not None
    assert "gradient/model.0.weight/norm" in callback.last_record.values


def test_an_exclude_may_wait_for_states_of_optimizers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their names are known after the first step."""
    rules = [Rule(kinds="optimizer_state", statistics="norm", exclude=".*momentum_buffer")]
    callback = ModuleMonitorCallback(1, rules=rules, exclude=".*bias.exp_avg", store=False)
    assert not any("matches none" in message for message in warnings_of(caplog, lambda: fit(tmp_path, [callback])))


# Many patterns that match nothing

OTHERS = [f"encoder.{number}.weight" for number in range(3_000)]
"""Names of another model."""
THREE = "'encoder.0.weight', 'encoder.1.weight', 'encoder.2.weight' and 2997 more"
NEAR = "; nearest: 'model.0.weight', 'model.2.weight'."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": OTHERS}, f"exclude {THREE} match none of 9 names{NEAR}"),
        (
            {"rules": [Rule(kinds="gradient", statistics="norm", exclude=OTHERS)]},
            f"rules[0].exclude {THREE} match none of 9 names{NEAR}",
        ),
        (
            {"rules": [Rule(kinds="gradient", statistics="norm", sites=[".*", *OTHERS])]},
            f"rules[0].sites {THREE} match none of 9 names{NEAR}",
        ),
        (
            {"callback_metrics": [f"own/{number}" for number in range(3_000)]},
            "callback_metrics 'own/0', 'own/1', 'own/2' and 2997 more match none of 35 keys of the first record; "
            "expected e.g. 'parameter/_root_/norm', 'gradient/_root_/norm', 'context/loss'. Later records may have such keys.",
        ),
    ],
    ids=["exclude", "exclude of a rule", "sites", "callback_metrics"],
)
def test_many_patterns_that_match_nothing_are_one_line(
    options: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the first three, the number of the others and the nearest names, and no line for each."""
    callback = ModuleMonitorCallback(1, store=False, **options)
    assert warnings_of(caplog, lambda: fit(tmp_path, [callback])) == [message]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sites": OTHERS}, rf"rules\[0\].sites {THREE} match none of 4 parameter names{NEAR}"),
        ({"exclude": [".*", *OTHERS]}, r"exclude \.\*, encoder.0.weight, encoder.1.weight and 2998 more leave nothing"),
    ],
    ids=["sites", "exclude"],
)
def test_many_patterns_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    """A rule that picks nothing."""
    with pytest.raises(ConfigError, match=message):
        ModuleMonitor(rules=Rule(kinds="gradient", statistics="norm", **options)).set_module(Tiny())


def test_many_patterns_are_described_in_one_line() -> None:
    """What a notebook shows of a monitor."""
    monitor = ModuleMonitor(rules=Rule(kinds="gradient", statistics="norm", sites=OTHERS, per_module=["_root_", *OTHERS]))
    assert (
        "encoder.0.weight, encoder.1.weight, encoder.2.weight and 2997 more together, of _root_, encoder.0.weight," in monitor._repr_html_()
    )


# Null


def test_null_is_the_default(tmp_path: Path) -> None:
    """Of every option, as YAML has it, in the callback and in a rule; an option without a default is still required."""
    options = [name for name in inspect.signature(ModuleMonitorCallback).parameters if name != "store"]
    rule = {
        "kinds": "gradient",
        "statistics": "norm",
        **dict.fromkeys(("sites", "aggregate", "every_n_steps", "leaf_modules", "functions")),
    }
    callback = ModuleMonitorCallback(**{**dict.fromkeys(options), "rules": [rule], "store": False})
    fit(tmp_path, [callback])
    assert callback.last_record is not None
    assert {key for key in callback.last_record.values if key.startswith("gradient/")} == {
        f"gradient/model.{layer}.{name}/norm" for layer in (0, 2) for name in ("weight", "bias")
    }
    with pytest.raises(ConfigError, match=r"capture\.sites is empty"):
        ModuleMonitorCallback(capture={"sites": None, "steps": 0}).monitor  # noqa: B018  # the property raises


# A detector without anything to judge


class Attention(nn.Module):
    """One head."""

    def forward(self, x: Tensor) -> Tensor:
        y = x[None, None]
        return torch.nn.functional.scaled_dot_product_attention(y, y, y)[0, 0]


class WithAttention(Other):
    """It has attention."""

    function = Attention


@pytest.mark.parametrize("prefix", ["", "run1"])
@pytest.mark.parametrize("rules", [None, [Rule(kinds="parameter", statistics="norm")]])
@pytest.mark.parametrize(
    ("watch", "model", "reason"),
    [
        ("dead_units", WithLeakyReLU, "the model has no ReLU or ReLU6."),
        ("dead_units", Other, "the model has no ReLU or ReLU6."),
        ("saturation", Tiny, "the model has no Sigmoid, Tanh or Softmax."),
        ("large_logits", Tiny, "no attention ran."),
    ],
)
def test_a_detector_without_anything_to_judge_is_reported(  # noqa: PLR0917  # a mistake and its message
    watch: str, model: Model, reason: str, rules: Any, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for what ``watch`` names."""
    callback = ModuleMonitorCallback(1, rules=rules, health=Health(watch=[watch, "vanishing", "diverging"]), store=False, prefix=prefix)
    [message] = warnings_of(caplog, lambda: fit(tmp_path, [callback], model))
    assert message.startswith(f"health.watch {watch!r} has nothing to judge: {reason}")


@pytest.mark.parametrize(
    ("health", "model"),
    [
        (None, Other),
        (Health(watch="all"), Other),
        (Health(watch="dead_units"), Tiny),
        (Health(watch=["large_logits", "vanishing"]), WithAttention),
        (Health(watch=["in_eval", "zero_rate", "stale_gradients"]), Other),
    ],
)
def test_a_detector_that_judges_or_that_is_not_named_is_not_reported(
    health: Health | None, model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither by default, nor where ``all`` are named."""
    assert warnings_of(caplog, lambda: fit(tmp_path, [ModuleMonitorCallback(1, health=health, store=False)], model)) == []


# Two callbacks


@pytest.mark.parametrize(
    "options",
    [
        ({}, {}),
        ({"every_n_steps": 5}, {"rules": [Rule(kinds="update", statistics="norm")]}),
        ({"prefix": "a"},) * 2,
        ({"module": "model.0"}, {"module": "model.2"}),  # both would have monitor/errors
        ({"module": "model"}, {"module": "model.0"}),
    ],
)
def test_two_callbacks_of_one_prefix_are_refused(options: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    """Also if their modules differ. The error names the option, every time."""
    callbacks = [ModuleMonitorCallback(store=False, **one) for one in options]
    for _ in range(2):  # as a cell of a notebook that runs again
        with pytest.raises(ConfigError, match=r"Give each callback a prefix of its own, e\.g\. prefix: second"):
            fit(tmp_path, callbacks)


def test_the_state_of_a_callback_has_the_same_place_in_every_run(tmp_path: Path) -> None:
    """By prefix and module, also in a checkpoint that is saved after the run, and in a further Trainer."""
    callback = ModuleMonitorCallback(2, prefix="a")
    for _ in range(2):
        run = fit(tmp_path, [callback])
        run.save_checkpoint(tmp_path / "end.ckpt")
        state = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"]
        assert [*state] == ["ModuleMonitorCallback[prefix=a]"]
        assert state["ModuleMonitorCallback[prefix=a]"]["store"] == callback.store_path


# Names that are like none


def test_a_name_like_none_is_answered_with_three() -> None:
    """Of modules, parameters and keys: the outermost first."""
    model = nn.ModuleDict({"stem": nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "head": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match=r"^module 'zzz' is none of the model's 5 modules; expected e.g. 'stem', 'head', 'stem.0'.$"):
        ModuleMonitor(module="zzz").set_module(model)
    for rule, names in (
        (Rule(kinds="activation", sites="zzz", statistics="rms"), "'stem', 'head', 'stem.0'"),
        (Rule(kinds="gradient", sites=["zzz", "yyy"], statistics="rms"), "'head.weight', 'head.bias', 'stem.0.weight'"),
    ):
        with pytest.raises(ConfigError, match=f"match(es)? none of . (module|parameter) names; expected e.g. {names}.$"):
            ModuleMonitor(rules=[rule]).set_module(model)
    with pytest.raises(ConfigError, match=r"parameter names; nearest: 'head.bias'"):
        ModuleMonitor(rules=[Rule(kinds="gradient", sites=["zzz", "head.bies"], statistics="rms")]).set_module(model)
    with pytest.raises(ConfigError, match=r"as a pattern matches none; expected e.g. 'stem', 'head', 'stem.0'.$"):
        ModuleMonitor(gradient_flow={"blocks": "zzz"}).set_module(model)
