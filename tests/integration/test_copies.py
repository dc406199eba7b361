"""The callback, copied and pickled in the middle of a run: the run goes on as if nothing was, and the copy serves another."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.lightning_package import Callback
from helpers.tiny import KeepRecords
from helpers.training import Classifier, loader, seed, trainer
from torch import nn

from lightning_module_monitor import Alert, Capture, Health, ModuleMonitor, ModuleMonitorCallback, Record, Rule, load_store
from lightning_module_monitor.lightning_packages import messages

EVENTS = [
    "setup",
    "on_fit_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_fit_end",
]
COPIES: dict[str, Callable[[ModuleMonitorCallback], ModuleMonitorCallback]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda callback: pickle.loads(pickle.dumps(callback)),  # our own bytes
}
SIZE = 300_000
"""Bytes of the model's weights, more than what a pickled callback takes."""


def everything(**options: Any) -> ModuleMonitorCallback:
    """All that there is, at every step, so that every part of the run is there to be copied."""
    rules = [
        Rule(kinds=["activation", "activation_gradient", "parameter", "gradient", "update"], statistics=["norm", "std", "hist"]),
        Rule(kinds=["activation_difference", "parameter_difference"], statistics="ratio"),
    ]
    defaults: dict[str, Any] = {
        "rules": rules,
        "reference": "init",
        "rcc": True,
        "attention": True,
        "gradient_flow": {"blocks": "model.(embedding|attention|mlp|head)"},
        "capture": Capture(sites=".*head", steps=[0, 2], kinds=["activation", "gradient"]),
        "stages": ["train", "validate"],
        "health": Health(nonfinite="always", watch="all"),
        "alerts": [Alert(keys=".*/norm", below=-1.0)],
        "on_error": "raise",
    }
    return ModuleMonitorCallback(1, **(defaults | options))


class Copies(Callback):
    """Copies a callback at the events of a run, each time that they come."""

    def __init__(self, callback: ModuleMonitorCallback, how: str) -> None:
        self.callback, self.how = callback, how
        self.copies: dict[str, ModuleMonitorCallback] = {}


def _copying(name: str) -> Callable[..., None]:
    def event(self: Copies, *_args: Any, **_options: Any) -> None:
        self.copies[name] = COPIES[self.how](self.callback)

    return event


for _name in EVENTS:
    setattr(Copies, _name, _copying(_name))


def fit(callback: ModuleMonitorCallback, folder: Path, *more: Callback, model: str = "transformer") -> list[Record]:
    """The records of a short run of a new model, with validation in the middle of it, and of an accumulated step."""
    seed()
    records, before = KeepRecords(callback), callback.last_record
    options: dict[str, Any] = {"max_steps": 4, "accumulate_grad_batches": 2, "val_check_interval": 3}
    trainer(folder, [callback, records, *more], **options).fit(Classifier(model), loader(), loader(8))
    return [record for record in records.records if record is not before]


def assert_same(records: list[Record], expected: list[Record]) -> None:
    """Steps, values and histograms."""
    assert [record.step for record in records] == [record.step for record in expected]
    for first, other in zip(records, expected, strict=True):
        assert dict(first.values) == pytest.approx(dict(other.values), rel=0, abs=0, nan_ok=True)
        assert first.histograms == other.histograms


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The records of a run in which nothing is copied."""
    return fit(everything(), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_in_the_middle_of_a_run_works_and_changes_nothing(how: str, tmp_path: Path, expected: list[Record]) -> None:
    """Copies at every event, with the store open, in a monitored step; a run of each copy records the same as the original."""
    callback = everything()
    copies = Copies(callback, how)
    assert_same(fit(callback, tmp_path / "original", copies), expected)
    assert copies.copies.keys() == set(EVENTS)
    assert load_store(callback.store_path or "").keys()
    for name in ("on_before_optimizer_step", "on_validation_batch_end"):
        twin = copies.copies[name]
        assert (twin.monitor.module, twin.monitor.reference_module, twin.monitor.current_step) == (None, None, None)
        assert_same(fit(twin, tmp_path / name), expected)


@pytest.mark.parametrize("how", COPIES)
def test_closing_a_copy_changes_nothing_of_the_original(how: str, tmp_path: Path, expected: list[Record]) -> None:
    """Hooks, modes, files and the entry among the monitors of a module belong to the original."""

    class ClosesCopies(Copies):
        def on_before_backward(self, *args: Any, **options: Any) -> None:
            for event in ("on_exception", "teardown"):
                getattr(COPIES[self.how](self.callback), event)(*args)

    callback = everything()
    assert_same(fit(callback, tmp_path, ClosesCopies(callback, how)), expected)


@pytest.mark.parametrize(
    "options", [{}, {"rcc": True, "attention": True, "alerts": [Alert(keys="gradient/.*", above=1)]}], ids=["default", "more"]
)
def test_a_callback_is_written_as_yaml(options: dict[str, Any]) -> None:
    """As libraries that keep callbacks among their hyperparameters do; copies still log where the callback does."""
    assert "every_n_steps: 7" in yaml.dump(ModuleMonitorCallback(7, **options))
    assert copy.deepcopy(messages) is pickle.loads(pickle.dumps(messages)) is messages


def test_a_pickle_of_a_running_callback_holds_no_weights(tmp_path: Path) -> None:
    """Neither weights of the model or the reference, nor tensors of the step."""
    sizes = []

    class Sizes(Callback):
        def on_before_optimizer_step(self, *_args: Any) -> None:
            sizes.append(len(pickle.dumps(callback)))

    callback = everything(
        gradient_flow=None, capture=None, attention=False, health=None, rules=[Rule(kinds=["activation", "update"], statistics="norm")]
    )
    seed()
    model = nn.Sequential(nn.Linear(6, SIZE // 40), nn.Linear(SIZE // 40, 3))
    trainer(tmp_path, [callback, Sizes()], max_steps=3, limit_val_batches=0).fit(Classifier(model), loader(), loader(8))
    assert len(sizes) == 3
    assert max(sizes) < SIZE


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_monitor_in_the_middle_of_a_step(how: str) -> None:
    """In a plain loop the original continues, also when the copy is closed; the copy takes another module."""
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with ModuleMonitor(rules=[Rule(kinds=["activation", "activation_gradient"], statistics="norm")]) as monitor:
        monitor.set_module(net)
        monitor.begin_step(0)
        monitor.log_scalar("own/value", 1.0, aggregation_fn=lambda values: values.sum())
        output = net(torch.ones(1, 2))
        twin = copy.deepcopy(monitor) if how == "deepcopy" else pickle.loads(pickle.dumps(monitor))  # our own bytes
        with twin:
            twin.set_module(other)
            assert twin.begin_step(3)
            other(torch.ones(1, 2))
            record = twin.end_step()
        output.sum().backward()
        mine = monitor.end_step()
    assert record is not None
    assert record.values["activation/_root_/norm"] == pytest.approx(other(torch.ones(1, 2)).norm().item())
    assert mine is not None
    assert mine.values["activation/_root_/norm"] == pytest.approx(output.norm().item())
    assert mine.values["activation_gradient/_root_/norm"] == pytest.approx(2**0.5)
    assert mine.values["own/value"] == 1.0
    assert not net._forward_hooks
    assert not other._forward_hooks
