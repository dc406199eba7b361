"""What is planned can occur: containers are never called, and have no keys."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

import pytest
import torch
from helpers.lightning_package import Callback
from helpers.plain_steps import in_step, record_of
from helpers.training import Classifier, loader, trainer
from torch import Tensor, nn

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, Rule, load_store, monitor_scaled_dot_product_attention
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.probes import parameters

RULES = [Rule(kinds=["activation", "activation_gradient", "parameter", "gradient"], statistics=["rms", "hist"])]


class Summed(nn.ModuleList):
    """A container with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([one(x) for one in self]).sum(0)


class Contains(nn.Module):
    """Containers of every sort around what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6)])
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 3)})
        self.scales = nn.ParameterList([torch.ones(6)])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(6))})
        self.summed = Summed([nn.Linear(6, 6)])
        self.patched = nn.ModuleList([nn.Linear(6, 6)])
        self.patched.forward = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.summed(self.blocks[0](x)) * self.scales[0] + self.shifts["a"]
        y: Tensor = self.heads["a"](self.patched(self.patched[0](h)))
        return y


def planned_and_recorded(net: nn.Module, rules: list[Rule]) -> list[str]:
    """The keys that are planned, also of histograms. A step records them, no more and no fewer."""
    with in_step(net, rules=rules) as monitor:
        planned = monitor.planned_keys()
        net(torch.ones(2, 6)).sum().backward()
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        record = record_of(monitor)
    assert {*record.values, *record.histograms} == {*planned}
    assert len(record.values) + len(record.histograms) == len(planned)
    return planned


def test_every_key_that_is_planned_is_recorded() -> None:
    """Of a model that runs as a whole: no more, no fewer, of numbers and of histograms."""
    sites = {key.split("/")[1] for key in planned_and_recorded(Contains(), RULES) if key.startswith("activation/")}
    assert sites == {"_root_", "blocks.0", "heads.a", "summed", "summed.0", "patched", "patched.0"}


def test_no_line_names_keys_of_containers_as_new(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of functions and of singular values, in the first validation loop, whose record comes after the store has its columns."""
    rules = [Rule(kinds="activation", statistics="effective_rank", functions={"median": torch.median})]
    callback = ModuleMonitorCallback(1, rules=rules, stages=["train", "validate"])
    with caplog.at_level(logging.INFO):
        trainer(tmp_path, [callback], max_steps=2, val_check_interval=1).fit(Classifier(Contains()), loader(), loader(8))
    assert callback.store_path is not None
    assert "validation/activation/model.patched/median" in load_store(callback.store_path)
    assert [message for message in caplog.messages if "activation/" in message] == []


def test_a_rule_on_containers_alone_is_refused() -> None:
    """In one line with the container's name; the pattern that it shows is one that works."""
    message = r"rules\[0\]\.sites matches only containers, which are never called \(blocks, heads\)"
    monitor = ModuleMonitor(rules=Rule(kinds="activation", sites=["blocks", "heads"], statistics="rms"))
    with pytest.raises(ConfigError, match=message) as refused:
        monitor.set_module(Contains())
    (shown,) = re.findall(r"e\.g\. '([^']*)'", str(refused.value))
    with ModuleMonitor(rules=Rule(kinds="activation", sites=shown, statistics="rms")) as monitor:
        monitor.set_module(Contains())
        assert monitor.planned_keys() == ["activation/blocks.0/rms", "monitor/errors"]


def test_a_container_may_report_attention_by_hand() -> None:
    """From a method other than forward: its heads, and their tensors under the rule for activations."""

    class Attends(nn.ModuleList):
        def attend(self, monitor: ModuleMonitor, x: Tensor) -> None:
            y = nn.functional.scaled_dot_product_attention(x, x, x)
            monitor_scaled_dot_product_attention(monitor, self, x, x, x, activation=y)

    net = Attends()
    rules = [Rule(kinds="attention_entropy", statistics="mean"), Rule(kinds=["attention_sink", "activation"], statistics="mean")]
    with ModuleMonitor(rules=rules) as monitor:
        monitor.set_module(net)
        assert monitor.planned_keys() == ["monitor/errors"]
        monitor.begin_step(0)
        net.attend(monitor, torch.ones(1, 1, 4, 2))
        record = record_of(monitor)
    assert record.values["attention_entropy/_root_.head_0/mean"] == pytest.approx(torch.tensor(4.0).log().item())
    assert record.values["activation/_root_.head_0.query/mean"] == 1.0


def test_the_forecast_counts_what_can_occur(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dry run's sites times statistics are its keys."""
    rules = [Rule(kinds="activation", statistics=["rms", "max"], sites="model[.].*")]
    run = trainer(tmp_path, [ModuleMonitorCallback(1, rules=rules, store=False, dry_run=True)], max_steps=1)
    run.fit(Classifier(Contains()), loader(), loader(8))
    printed = capsys.readouterr().out
    assert "  activation: 6 sites x 2 (rms, max)\n" in printed
    assert "  13 keys and 12 context keys; " in printed


def test_a_parameter_that_was_removed_is_an_error_in_each_step(caplog: pytest.LogCaptureFixture) -> None:
    """Its planned values are NaN and counted, and one line for each kind names it; all others are recorded."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with ModuleMonitor(rules=Rule(kinds=["parameter", "update"], statistics="norm")) as monitor:
        monitor.set_module(net)
        net[1].bias = None
        for step in range(2):
            monitor.begin_step(step)
            monitor.monitor_parameters()
            record = record_of(monitor)
            assert {key for key, value in record.values.items() if math.isnan(value)} == {"parameter/1.bias/norm", "update/1.bias/norm"}
            assert record.values["monitor/errors"] == 2
            assert record.values["parameter/1.weight/norm"] == pytest.approx(net[1].weight.norm().item())
    assert [one for one in caplog.messages if "1.bias" in one] == [
        f"{kind} '1.bias', a Linear: norm failed with LookupError: the module has no parameter of this name any more. "
        "It is recorded as NaN. Logged once; monitor/errors counts them."
        for kind in ("parameter", "update")
    ]


def test_a_parameter_that_cannot_be_placed_costs_its_own_values(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An error in finding this rank's part of one parameter leaves those of all others, and is counted."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def is_sharded(tensor: Tensor) -> bool:
        if tensor is net[1].bias:
            raise RuntimeError("no such mesh")
        return False

    monkeypatch.setattr(parameters, "is_sharded", is_sharded)
    with in_step(net, rules=Rule(kinds="parameter", statistics="norm")) as monitor:
        monitor.monitor_parameters()
        record = record_of(monitor)
    assert [key for key, value in record.values.items() if math.isnan(value)] == ["parameter/1.bias/norm"]
    assert len(record.values) == 5
    assert record.values["monitor/errors"] == 1
    assert "parameter '1.bias', tensor of shape (2,): norm failed with RuntimeError: no such mesh." in caplog.text


class Wraps(nn.Module):
    """Returns an object that nothing is known of."""

    def forward(self, x: Tensor) -> object:
        return Opaque()


class Opaque:
    """Holds no tensor that can be found."""


def test_an_output_without_a_tensor_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """In one line with its class; a module that did not run, or returned nothing, is none."""
    caplog.set_level(logging.INFO)
    net = nn.ModuleDict({"wraps": Wraps(), "idle": Wraps()})
    with ModuleMonitor(rules=Rule(kinds="activation", statistics="norm")) as monitor:
        monitor.set_module(net)
        for step in range(2):
            monitor.begin_step(step)
            net["wraps"](torch.ones(2))
            record = record_of(monitor)
            assert dict(record.values) == {"monitor/errors": 0.0}
    assert caplog.messages == ["wraps: outputs of class Opaque are not recorded; no tensor is found in them."]


class KeepPlannedKeys(Callback):
    """Keeps the planned keys of a callback at some events of a run."""

    def __init__(self, callback: ModuleMonitorCallback) -> None:
        self.callback = callback
        self.keys: dict[str, list[str]] = {}

    def setup(self, *_args: object, **_options: object) -> None:
        self.keys["setup"] = self.callback.planned_keys()

    def on_train_start(self, *_args: object) -> None:
        self.keys["train"] = self.callback.planned_keys()


def test_a_callback_gives_the_keys_of_the_run_in_progress(tmp_path: Path) -> None:
    """Of numbers and of histograms, of every monitored stage; none without a run."""
    rules = [Rule(kinds="activation", sites="model", statistics=["rms", "hist"])]
    callback = ModuleMonitorCallback(1, rules=rules, store=False, health=False, prefix="a", stages=["train", "validate"])
    keep = KeepPlannedKeys(callback)
    assert callback.planned_keys() == []
    trainer(tmp_path, [callback, keep], max_steps=1).fit(Classifier(nn.Linear(6, 3)), loader(), loader(8))
    assert callback.planned_keys() == []
    assert keep.keys["setup"] == keep.keys["train"]
    measured = {key for key in keep.keys["train"] if "/context/" not in key}
    own = {"a/monitor/errors", "a/validation/monitor/errors"}
    hists = {"a/activation/model/hist", "a/validation/activation/model/hist"}
    assert measured == {"a/activation/model/rms", "a/validation/activation/model/rms"} | own | hists


def test_a_refused_callback_has_no_monitor() -> None:
    """What would use it gets the error that ``setup`` raises; the callback's results are empty."""
    callback = ModuleMonitorCallback(stages=["val"])
    for _attempt in range(2):
        with pytest.raises(ConfigError, match="stages 'val' is not a stage"):
            callback.monitor.add_parameter_metric("norm")
    assert (callback.last_record, callback.store_path, list(callback.findings), list(callback.diagnose())) == (None, None, [], [])
    assert (callback.state_dict(), callback.planned_keys()) == ({}, [])


def test_totals_are_planned_first_and_listed_apart_in_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is planned of modules' parameters together is recorded, no more and no fewer: a module of frozen ones has no gradient."""
    rules = [
        Rule(kinds="activation", statistics="rms"),
        Rule(kinds=["parameter", "gradient"], statistics=["norm", "hist"], per_module=["_root_", "heads", "blocks", "scales", "patched"]),
    ]
    net = Contains()
    net.patched[0].requires_grad_(requires_grad=False)
    planned = planned_and_recorded(net, rules)
    sites = ["_root_", "blocks", "heads", "scales", "patched"]
    assert planned[:9] == [f"parameter/{site}/norm" for site in sites] + [f"gradient/{site}/norm" for site in sites[:-1]]
    run = trainer(tmp_path, [ModuleMonitorCallback(1, store=False, dry_run=True)], max_steps=1)
    run.fit(Classifier("mlp"), loader(), loader(8))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "of all parameters" in line] == [
        f"  {kind} of all parameters of a module: _root_ x 1 (norm)" for kind in ("parameter", "gradient")
    ]
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["activation", "parameter", "gradient"]
