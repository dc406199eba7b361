"""TorchWatcher: table 2 of the features row by row, in several training loops."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.lightning_package import CSVLogger, TensorBoardLogger
from helpers.operations import operations
from helpers.textbook import histogram, textbook
from helpers.zoo import ZOO, RawTensors, batches, make, raw_tensors
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import STATISTICS, TorchWatcher
from lightning_module_monitor.errors import ConfigError

STATS = ["mean", "std", "norm", "min", "max", "var", "abs_mean"]
PREFIX = "model_internals"


class Run:
    """A logger for the watcher that keeps the logged values."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, data: dict[str, float], step: int) -> None:
        self.logged.append((step, data))

    def steps(self) -> list[int]:
        return [step for step, _values in self.logged]

    def kinds(self) -> set[str]:
        """The values of the last step."""
        return {key.removeprefix(f"{PREFIX}/").split("/")[0] for key in self.logged[-1][1]} - {"monitor"}


def activations(values: dict[str, float], statistic: str = "mean") -> dict[str, float]:
    """The value of every site."""
    return {key.split("/")[-2]: value for key, value in values.items() if "/activation/" in key and key.endswith(f"/{statistic}")}


def means(model: nn.Module, *inputs: Tensor) -> dict[str, float]:
    """Mean of every layer's output over all inputs, as in evaluation mode: for models without randomness."""
    raw = raw_tensors(model, [(x, torch.zeros(len(x), dtype=torch.long)) for x in inputs], F.cross_entropy)
    return {site: textbook("mean", torch.cat(parts)) for (kind, site), parts in raw.items() if kind == "activation"}


class Plain(nn.Module):
    """Two layers without randomness."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.fc(x)))


def hooks(model: nn.Module) -> int:
    """The number of hooks on the layers, without the model's pre-hook."""
    return sum(len(part._forward_hooks) for part in model.modules())


def assert_nothing_is_left(model: nn.Module) -> None:
    """Assert that neither model nor optimizers have a hook."""
    from torch.optim.optimizer import _global_optimizer_post_hooks

    assert hooks(model) == 0
    assert not any(part._forward_pre_hooks or part._backward_hooks for part in model.modules())
    assert not _global_optimizer_post_hooks


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_on_optimizers() -> Iterator[None]:
    yield
    gc.collect()
    assert_nothing_is_left(nn.Linear(1, 1))


def assert_textbook(values: dict[str, float], raw: RawTensors) -> None:
    """Every value equals the formula."""
    found = 0
    for key, value in values.items():
        assert key.startswith(f"{PREFIX}/")
        if key == f"{PREFIX}/monitor/errors":
            assert value == 0
            continue
        kind, site, statistic = key.removeprefix(f"{PREFIX}/").split("/")
        whole = torch.cat([part.reshape(-1) for part in raw[kind, site]])
        if not whole.numel():
            continue
        scale = textbook("abs_mean", whole)
        assert value == pytest.approx(textbook(statistic, whole), rel=1e-5, abs=1e-6 * scale), key
        found += 1
    assert found > 20


# Table 2, row by row


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "shared", "outputs"])
def test_row_1_all_layers_without_configuration(name: str) -> None:
    """Every layer of every model, also in-place layers and unusual outputs, by the formulas in float64."""
    model = make(name)
    (batch,) = batches(7)
    run = Run()
    torch.manual_seed(3)
    raw = raw_tensors(model, [batch], F.cross_entropy)
    with TorchWatcher(model, run, tensor_stats=STATS) as watcher:
        torch.manual_seed(3)
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        watcher.watch(0, track_parameters=True)
    (step, values) = run.logged[0]
    assert step == 0
    assert_textbook(values, raw)
    for kind, site in raw:
        if raw[kind, site][0].numel():
            assert f"{PREFIX}/{kind}/{site}/mean" in values
    assert_nothing_is_left(model)


def test_row_1_layers_by_type() -> None:
    """``track_layers`` takes one or several classes or names, and selects their parameters, too. A missing class is an error."""
    for types in ([nn.Linear], nn.Linear, "Linear"):
        model, run = Plain(), Run()
        with TorchWatcher(model, run, track_layers=types, tensor_stats="mean") as watcher:
            model(torch.randn(2, 6)).sum().backward()
            watcher.watch(0, track_parameters=True)
        values = run.logged[0][1]
        assert activations(values).keys() == {"fc", "head"}
        assert {key.split("/")[2] for key in values if "/parameter/" in key} == {"fc.weight", "fc.bias", "head.weight", "head.bias"}
    with pytest.raises(ConfigError, match="types Conv2d"):
        TorchWatcher(model, run, track_layers=[nn.Conv2d])
    with pytest.raises(ConfigError, match=r"'Linea'.*nearest: 'Linear'"):
        TorchWatcher(model, run, track_layers=["Linea"])


def test_row_1_steps_that_are_not_watched_have_no_hook_on_a_layer() -> None:
    """With ``every_n_steps`` they run the same operations as without a watcher; the logged values belong to the logged steps."""
    counts: dict[bool, list[int]] = {}
    for is_watched in (False, True):
        model, run = Plain(), Run()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watcher = TorchWatcher(model, run, every_n_steps=3) if is_watched else None
        expected, on_layers = [], []
        for step, (x, y) in enumerate(batches(*[4] * 8)):
            before = copy.deepcopy(model)
            with operations() as called:
                loss = F.cross_entropy(model(x), y)
                on_layers.append(hooks(model))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            counts.setdefault(is_watched, []).append(len(called.names))
            if watcher is not None:
                watcher.watch(step)
            if step % 3 == 0:
                expected.append(means(before, x))
        if watcher is not None:
            watcher.close()
    assert run.steps() == [0, 3, 6]
    assert [num > 0 for num in on_layers] == [True, False, False] * 2 + [True, False]
    for step in (1, 2, 4, 5, 7):
        assert counts[True][step] == counts[False][step]
    for (_step, values), truth in zip(run.logged, expected, strict=True):
        assert activations(values) == pytest.approx(truth, rel=1e-5, abs=1e-7)


def test_row_2_statistics_and_histogram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All eight names, a user's name in ``STATISTICS``, and histograms in a logger that has a type for them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setitem(STATISTICS, "largest", lambda x: x.abs().max())
    model = Plain()
    (batch,) = batches(9)
    raw = raw_tensors(model, [batch], F.cross_entropy)
    logger = TensorBoardLogger(tmp_path, name="", version="tb")
    with TorchWatcher(model, logger, tensor_stats=[*STATS, "hist", "largest"]) as watcher:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        watcher.watch(4, prefix="train")
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"histograms": 0})
    events.Reload()
    for statistic in STATS:
        (event,) = events.Scalars(f"train/{PREFIX}/activation/fc/{statistic}")
        assert event.step == 4
        assert event.value == pytest.approx(textbook(statistic, torch.cat(raw["activation", "fc"])), rel=1e-5)
    assert events.Scalars(f"train/{PREFIX}/activation/fc/largest")[0].value > 0
    for kind, site in raw:
        if kind != "parameter":
            (event,) = events.Histograms(f"train/{PREFIX}/{kind}/{site}/hist")
            counts, edges = histogram(torch.cat(raw[kind, site]).float()).occupied()
            assert event.histogram_value.bucket == counts.tolist()
            assert event.histogram_value.bucket_limit == edges[1:].tolist()
    with pytest.raises(ValueError, match=r"'meen' is not a statistic; expected .*; nearest: 'mean'"):
        TorchWatcher(model, logger, tensor_stats=["meen"])


@pytest.mark.parametrize("track_activations", [True, False])
@pytest.mark.parametrize("track_gradients", [True, False])
@pytest.mark.parametrize("track_parameters", [True, False])
def test_row_3_each_on_or_off_per_call(track_activations: bool, track_gradients: bool, track_parameters: bool) -> None:
    """Gradients of outputs and of parameters, by their names. Off in one call, on in the next."""
    model, run = Plain(), Run()
    with TorchWatcher(model, run) as watcher:
        for switches in (
            {"track_activations": track_activations, "track_gradients": track_gradients, "track_parameters": track_parameters},
            {"track_activations": True, "track_gradients": True, "track_parameters": True},
            {},
        ):
            model(torch.randn(2, 6)).sum().backward()
            watcher.watch(len(run.logged), **switches)
            on = {"track_activations": True, "track_gradients": True, "track_parameters": False} | switches
            expected = {"activation"} if on["track_activations"] else set()
            expected |= {"activation_gradient", "gradient"} if on["track_gradients"] else set()
            assert run.kinds() == expected | ({"parameter"} if on["track_parameters"] else set())


def test_row_4_names() -> None:
    """``base_namespace`` and ``prefix`` come before the kind; names that no logger takes are errors."""
    model, run = Plain(), Run()
    with TorchWatcher(model, run, base_namespace="debug/inside") as watcher:
        for prefix in ("train", "validation", None):
            model(torch.randn(2, 6))
            watcher.watch(0, prefix=prefix)
        for wrong in ("a b", 5, ["train"]):
            with pytest.raises(ConfigError, match=rf"prefix {re.escape(repr(wrong))} cannot stand in a key"):
                watcher.watch(0, prefix=wrong)  # type: ignore[arg-type]  # what the test is about
    for (_step, values), before in zip(run.logged, ("train/", "validation/", ""), strict=True):
        assert f"{before}debug/inside/activation/fc/mean" in values
        assert all(key.startswith(f"{before}debug/inside/") for key in values)
    with pytest.raises(ConfigError, match=r"base_namespace 'a b' cannot stand in a key"):
        TorchWatcher(model, run, base_namespace="a b")


@pytest.mark.parametrize("how", ["eval", "no_grad only"])
@pytest.mark.parametrize("back_in_training", [True, False])
def test_row_4_a_validation_forward_does_not_overwrite_the_training_steps_values(how: str, back_in_training: bool) -> None:
    """It runs between the step and ``watch``; training's values are logged first, validation's by the next call."""
    model, run = Plain(), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (train, first, second) = batches(4, 5, 6)
    with TorchWatcher(model, run) as watcher:
        truth = means(model, train[0])
        F.cross_entropy(model(train[0]), train[1]).backward()
        optimizer.step()
        validated = means(model, 10 + first[0], 10 + second[0])
        model.train(how == "no_grad only")
        with torch.no_grad():
            model(10 + first[0])
            model(10 + second[0])
        if back_in_training:
            model.train()
            watcher.watch(0, prefix="train")
            watcher.watch(0, prefix="validation")
        elif how == "eval":
            watcher.watch(0, prefix="validation")
            model.train()
            watcher.watch(0, prefix="train")
            run.logged.reverse()
        else:
            watcher.watch(0, prefix="train")
            watcher.watch(0, prefix="validation")
    (trained, evaluated) = (values for _step, values in run.logged)
    assert all(key.startswith("train/") for key in trained)
    assert activations(trained) == pytest.approx(truth, rel=1e-5, abs=1e-7)
    assert activations(evaluated) == pytest.approx(validated, rel=1e-5, abs=1e-7)
    assert not [key for key in evaluated if "gradient/" in key], "those that the parameters have are training's"
    assert [key for key in trained if "/activation_gradient/" in key]


def test_row_4_a_validation_loop_after_unwatched_steps() -> None:
    """Values of earlier steps are not logged for it; its values are not logged for the next step."""
    model, run = Plain(), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TorchWatcher(model, run) as watcher:
        for epoch in range(2):
            model.train()
            for step, (x, y) in enumerate(batches(4, 4, 4)):
                truth = means(model, x)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if epoch and step == 0:
                    watcher.watch(3, prefix="train")
                    assert activations(run.logged[-1][1]) == pytest.approx(truth, rel=1e-5, abs=1e-7)
            model.eval()
            inputs = [10 + x for x, _y in batches(5, 5)]
            with torch.inference_mode():
                for x in inputs:
                    model(x)
            if epoch:
                watcher.watch(5, prefix="validation")
                assert activations(run.logged[-1][1]) == pytest.approx(means(model, *inputs), rel=1e-5, abs=1e-7)
    assert run.steps() == [3, 5]


def test_row_4_a_validation_that_is_not_logged_leaves_no_hook_to_training() -> None:
    """Training continues without its hooks and values."""
    model, run = Plain(), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches(4, 4, 4)
    with TorchWatcher(model, run, every_n_steps=2) as watcher:
        step_of(model, optimizer, data[0])
        watcher.watch(0)
        model.eval()
        model(10 + data[0][0])
        assert hooks(model) > 0
        model.train()
        step_of(model, optimizer, data[1])
        assert hooks(model) == 0
        watcher.watch(1)
        truth = means(model, data[2][0])
        step_of(model, optimizer, data[2])
        watcher.watch(2)
    assert run.steps() == [0, 2]
    assert activations(run.logged[1][1]) == pytest.approx(truth, rel=1e-5, abs=1e-7)


def test_row_5_any_object_that_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The real CSVLogger by position and name; a logger without histograms is reported once; an object that cannot log is an error."""
    model = Plain()
    logger = CSVLogger(tmp_path, name="", version="csv")
    with TorchWatcher(model, logger, None, ["mean", "hist"], "debug") as watcher, caplog.at_level(logging.WARNING):
        for step in range(3):
            model(torch.randn(2, 6)).sum().backward()
            watcher.watch(step, track_activations=True, track_gradients=True, track_parameters=True, prefix="train")
    logger.save()
    lines = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    assert len(lines) == 4
    assert "train/debug/parameter/fc.weight/mean" in lines[0].split(",")
    assert "hist" not in lines[0]
    assert [record.getMessage() for record in caplog.records] == ["Histograms are left out: CSVLogger has no type for them. Logged once."]
    with pytest.raises(ConfigError, match=r"run is a object; expected an object with log_metrics"):
        TorchWatcher(model, object())  # type: ignore[arg-type]  # refused
    with pytest.raises(ValueError, match=r"expected a torch.nn.Module"):
        TorchWatcher(object(), logger)  # type: ignore[arg-type]  # as above


def test_row_5_nothing_is_held_between_steps() -> None:
    """After ``watch`` no tensor of the step is alive, and no layer has a hook; during the step no activation is kept."""
    alive: list[weakref.ref[Tensor]] = []

    def batches() -> set[int]:
        return {id(one) for one in gc.get_objects() if type(one) is Tensor and one.shape == (4, 6)}

    class Remembered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            alive.append(weakref.ref(y))
            return y + 1

    model, run = nn.Sequential(nn.Linear(6, 6), Remembered(), Remembered(), nn.Linear(6, 3)), Run()
    of_others = batches()  # other tests may have left some
    with TorchWatcher(model, run, tensor_stats=[*STATS, "hist"]) as watcher:
        loss = model(torch.randn(4, 6)).sum()
        loss.backward()
        del loss
        gc.collect()
        assert [one() for one in alive] == [None, None]
        watcher.watch(0)
        assert hooks(model) == 0
        assert not batches() - of_others


def test_row_6_warnings_instead_of_crashes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A statistic, a logger and a schedule that raise: each is reported once, the loop continues, and other values are logged."""

    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError(f"cannot do {x.dim()}")

    class Down(Run):
        def log_metrics(self, data: dict[str, float], step: int) -> None:
            super().log_metrics(data, step)
            raise ConnectionError("service unavailable")

    def schedule(step: int) -> bool:
        if step == 2:
            raise LookupError("no such step")
        return True

    monkeypatch.setitem(STATISTICS, "fails", fails)
    model, run = Plain(), Down()
    with TorchWatcher(model, run, tensor_stats=["mean", "fails"], every_n_steps=schedule) as watcher, caplog.at_level(logging.WARNING):
        for step in range(4):
            model(torch.randn(2, 6)).sum().backward()
            watcher.watch(step)
    assert run.steps() == [0, 1, 3]
    values = run.logged[0][1]
    assert values[f"{PREFIX}/activation/fc/mean"] == values[f"{PREFIX}/activation/fc/mean"]
    assert values[f"{PREFIX}/activation/fc/fails"] != values[f"{PREFIX}/activation/fc/fails"], "NaN"
    assert values[f"{PREFIX}/monitor/errors"] > 0
    messages = [record.getMessage() for record in caplog.records]
    assert sum("Down did not take the values (ConnectionError: service unavailable)" in message for message in messages) == 1
    assert sum("Observation failed (LookupError: no such step)" in message for message in messages) == 1
    assert sum("fails failed with ArithmeticError: cannot do 2" in message for message in messages) == 3  # once for each kind
    assert len(messages) == 5


# The loops that people put it into


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    """Forward, backward, update."""
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


Loop = Callable[[TorchWatcher, nn.Module, torch.optim.Optimizer, list[tuple[Tensor, Tensor]]], None]


def after_the_update(watcher: TorchWatcher, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    """As in the documentation's example."""
    for step, batch in enumerate(data):
        step_of(model, optimizer, batch)
        watcher.watch(step=step)


def before_the_update(watcher: TorchWatcher, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    """As in its README."""
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        watcher.watch(step=step)
        optimizer.step()


def at_the_start(watcher: TorchWatcher, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    """As in some programs: the logged step is the previous step."""
    for step, batch in enumerate([*data, data[0]]):
        if step:
            watcher.watch(step=step - 1)
        step_of(model, optimizer, batch)


def now_and_then(watcher: TorchWatcher, model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    """Every second step."""
    for step, batch in enumerate(data):
        step_of(model, optimizer, batch)
        if step % 2 == 0:
            watcher.watch(step=step)


@pytest.mark.parametrize("loop", [after_the_update, before_the_update, at_the_start, now_and_then], ids=lambda one: one.__name__)
@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_a_loop_as_it_was(loop: Loop, every_n_steps: int) -> None:
    """For any position and frequency of ``watch``, a step's values belong to this step alone."""
    data = batches(4, 3, 5, 4, 6)
    model = Plain()
    truth: list[dict[str, float]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in data:
        truth.append(means(model, batch[0]))
        step_of(model, optimizer, batch)
    model, run = Plain(), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TorchWatcher(model, run, every_n_steps=every_n_steps) as watcher:
        loop(watcher, model, optimizer, data)
    expected = [0, 2, 4] if every_n_steps == 2 or loop is now_and_then else [0, 1, 2, 3, 4]
    assert run.steps() == expected
    for step, values in run.logged:
        assert activations(values) == pytest.approx(truth[step], rel=1e-5, abs=1e-7)
        assert [key for key in values if "/activation_gradient/" in key]


@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_all_micro_batches_of_a_step_count(every_n_steps: int) -> None:
    """Of 3 and 5 samples: over all elements, not only the last micro-batch."""
    model, run = Plain(), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth = []
    with TorchWatcher(model, run, every_n_steps=every_n_steps) as watcher:
        for step in range(4):
            micro_batches = batches(3, 5, seed=step)
            truth.append(means(model, *(x for x, _y in micro_batches)))
            for x, y in micro_batches:
                (F.cross_entropy(model(x), y) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            watcher.watch(step)
    assert run.steps() == list(range(0, 4, every_n_steps))
    for step, values in run.logged:
        assert activations(values) == pytest.approx(truth[step], rel=1e-5, abs=1e-7)


def test_steps_without_a_call_of_watch_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """They are observed, which takes time; the message has the option to set."""
    model, run = Plain(), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TorchWatcher(model, run) as watcher, caplog.at_level(logging.INFO):
        now_and_then(watcher, model, optimizer, batches(4, 4, 4, 4, 4, 4))
    message = "A step was observed, but watch() was not called. Set every_n_steps. Logged once."
    assert [record.getMessage() for record in caplog.records] == [message]


def test_a_number_that_was_not_expected(caplog: pytest.LogCaptureFixture) -> None:
    """After a jump to a step that is due, its layers were not observed: a warning, its parameters are logged, and later steps too."""
    model, run = Plain(), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TorchWatcher(model, run, every_n_steps=10) as watcher, caplog.at_level(logging.WARNING):
        for step, batch in zip([0, 1, 50, 51], batches(4, 4, 4, 4), strict=True):
            step_of(model, optimizer, batch)
            watcher.watch(step, track_parameters=True)
    assert run.steps() == [0, 50]
    assert run.kinds() == {"parameter"}
    assert [record.getMessage() for record in caplog.records] == [
        "The layers were not observed in step 50: after the previous step, another number was expected. Logged once."
    ]


def test_two_optimizers_one_without_parameters_of_the_model() -> None:
    """The step of an optimizer without parameters of the model does not end a step."""
    model, other, run = Plain(), nn.Linear(2, 2), Run()
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
    inputs = [x for x, _y in batches(3, 5)]
    with TorchWatcher(model, run) as watcher:
        truth = means(model, *inputs)
        for x in inputs:
            model(x).sum().backward()
            other(torch.ones(1, 2)).sum().backward()
            elsewhere.step()
        watcher.watch(0)
    assert activations(run.logged[0][1]) == pytest.approx(truth, rel=1e-5, abs=1e-7)


def test_training_in_evaluation_mode() -> None:
    """Fine-tuning with frozen statistics, always in ``model.eval()``: the values and gradients of each step."""
    model, run = Plain().eval(), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth = []
    with TorchWatcher(model, run) as watcher:
        for step, batch in enumerate(batches(4, 5, 6, 7)):
            truth.append(means(model, batch[0]))
            step_of(model, optimizer, batch)
            if step % 2:
                watcher.watch(step)
    assert run.steps() == [1, 3]
    for step, values in run.logged:
        assert activations(values) == pytest.approx(truth[step], rel=1e-5, abs=1e-7)
        assert [key for key in values if "/activation_gradient/" in key]


def test_evaluation_can_be_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """``evaluation=False``: no hook on a layer in evaluation mode; a call of ``watch`` in it is reported once."""
    model, run = Plain(), Run()
    with TorchWatcher(model, run, evaluation=False) as watcher, caplog.at_level(logging.WARNING):
        model(torch.ones(2, 6)).sum().backward()
        truth = means(model, torch.ones(2, 6))
        model.eval()
        model(torch.zeros(2, 6))
        watcher.watch(0, prefix="validation")
        model.train()
        watcher.watch(0)
        model.eval()
        model(torch.zeros(2, 6))
        assert hooks(model) == 0
    assert len(run.logged) == 1
    assert activations(run.logged[0][1]) == pytest.approx(truth, rel=1e-5, abs=1e-7)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ZOO)
def test_watching_does_not_change_training(name: str) -> None:
    """Weights, losses, buffers and random states over 12 steps with a validation in between are bit-identical."""
    ends = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        model, run, losses = make(name), Run(), []
        optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
        watcher = TorchWatcher(model, run, tensor_stats=[*STATS, "hist"], every_n_steps=2) if is_watched else None
        for step, (x, y) in enumerate(batches(*[4] * 12)):
            loss = F.cross_entropy(model(x), y)
            losses.append(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if watcher is not None:
                watcher.watch(step, track_parameters=True)
            if step % 4 == 3:
                model.eval()
                with torch.no_grad():
                    model(x)
                if watcher is not None:
                    watcher.watch(step, prefix="validation")
                model.train()
        if watcher is not None:
            assert len(run.logged) == 6 + 3
            watcher.close()
        ends.append((losses, model.state_dict(), torch.get_rng_state(), np.random.get_state()[1], random.getstate()))
    (losses, weights, *states), (watched_losses, watched_weights, *watched_states) = ends
    assert all(torch.equal(a, b) for a, b in zip(losses, watched_losses, strict=True))
    assert all(torch.equal(weights[key], watched_weights[key]) for key in weights)
    assert torch.equal(states[0], watched_states[0])
    assert np.array_equal(states[1], watched_states[1])
    assert states[2] == watched_states[2]


@pytest.mark.parametrize("how", ["close", "with", "forgotten", "error in forward"])
def test_nothing_is_left_behind(how: str) -> None:
    """Closed, exited, deleted or after an error, in the middle of a step: no hook; a copy made before is not observed."""
    model, plain, run = Plain(), Plain(), Run()
    watcher = TorchWatcher(model, run)
    model(torch.randn(2, 6))
    assert hooks(model) > 0
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # our own bytes
        twin(torch.randn(2, 6))
    if how == "error in forward":
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5))
        model.zero_grad()
        model(torch.randn(2, 6))
    if how == "with":
        with watcher:
            pass
    elif how == "forgotten":
        gone = weakref.ref(watcher)
        del watcher
        gc.collect()
        assert gone() is None
    else:
        watcher.close()
        watcher.close()
    assert_nothing_is_left(model)
    for part, other in zip(model.modules(), plain.modules(), strict=True):
        assert part.__dict__.keys() == other.__dict__.keys()
    assert not run.logged
