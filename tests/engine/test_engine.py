"""The engine in a plain loop, against the raw tensors of the same step in float64."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.plain_steps import in_step, record_of
from helpers.textbook import PLAIN, slack, textbook
from helpers.zoo import ZOO, RawTensors, Shared, batches, make, raw_tensors
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import Capture, ModuleMonitor, Record, Rule
from lightning_module_monitor.engine.phases import StepEngine
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.kernels import numba_kernel

KINDS = ["activation", "activation_gradient", "parameter", "gradient"]


def run_step(model: nn.Module, monitor: ModuleMonitor, micro_batches: list[tuple[Tensor, Tensor]], step: int = 0) -> Record:
    """One step of a plain loop, without an update."""
    monitor.begin_step(step)
    for x, y in micro_batches:
        F.cross_entropy(model(x), y).backward()
        monitor.after_micro_batch()
    monitor.monitor_gradients()
    monitor.monitor_parameters()
    return record_of(monitor)


def assert_record_equals(record: Record, raw: RawTensors) -> None:
    """Every value is the textbook's, and there is none too many and none too few."""
    expected = {}
    for (kind, site), tensors in raw.items():
        rows = [tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1) for tensor in tensors]
        whole = torch.cat(rows) if len({row.shape[1] for row in rows}) == 1 else torch.cat([row.reshape(-1) for row in rows])
        for name in PLAIN:
            if whole.numel():
                expected[f"{kind}/{site}/{name}"] = (textbook(name, whole), slack(name, whole))
    recorded = {key: value for key, value in record.values.items() if not key.startswith("monitor/")}
    assert {key for key in recorded if not key.startswith(("activation/empty/", "activation_gradient/empty/"))} == set(expected)
    for key, (value, magnitude) in expected.items():
        assert recorded[key] == pytest.approx(value, rel=2e-6, abs=1e-6 * magnitude, nan_ok=True), key


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("sizes", [(8,), (3, 5)], ids=str)
def test_every_statistic_of_every_tensor(name: str, sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    """All kinds, all sites, all statistics; micro-batches count as their concatenation, in-place layers as they were."""
    model = make(name)
    torch.manual_seed(5)
    raw = raw_tensors(model, batches(*sizes), F.cross_entropy)
    with ModuleMonitor(rules=[Rule(kinds=KINDS, statistics=PLAIN)]) as monitor:
        monitor.set_module(model)
        torch.manual_seed(5)
        with caplog.at_level(logging.INFO):
            record = run_step(model, monitor, batches(*sizes))
    assert_record_equals(record, raw)
    assert record.values["monitor/errors"] == 0
    logged = [message for message in caplog.messages if "are not recorded" in message]
    assert len(logged) == (3 if name == "outputs" else 0)  # int64, bool, complex


def test_values_of_a_linear_layer_by_hand() -> None:
    """W = [[1, 2], [3, 4]], x = [[1, 1], [0, 1]], loss = sum of outputs: everything is known on paper."""
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    monitor = ModuleMonitor(
        rules=[Rule(kinds=KINDS, statistics=["mean", "norm"]), Rule(kinds="update", statistics=["norm", "ratio", "max"])]
    )
    monitor.set_module(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monitor.begin_step(7)
    model(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).sum().backward()  # outputs [[3, 7], [2, 4]]
    monitor.monitor_gradients()
    monitor.monitor_parameters()
    optimizer.step()
    record = record_of(monitor)
    assert record.step == 7
    assert record.values == pytest.approx(
        {
            "activation/_root_/mean": 4.0,
            "activation/_root_/norm": 78**0.5,
            "activation_gradient/_root_/mean": 1.0,
            "activation_gradient/_root_/norm": 2.0,
            "parameter/weight/mean": 2.5,
            "parameter/weight/norm": 30**0.5,
            "gradient/weight/mean": 1.5,  # column sums of x are 1 and 2, for both rows of W
            "gradient/weight/norm": 10**0.5,
            "update/weight/norm": 0.5 * 10**0.5,
            "update/weight/ratio": 0.5 * 10**0.5 / 30**0.5,
            "update/weight/max": -0.5,
            "monitor/errors": 0.0,
        }
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_update_is_after_minus_before(dtype: torch.dtype) -> None:
    """The parameters themselves are compared; in half precision the difference is not rounded again."""
    model = make("mlp").to(dtype)
    with ModuleMonitor(rules=[Rule(kinds="update", statistics=["norm", "std", "abs_max", "ratio"])]) as monitor:
        monitor.set_module(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        before = {name: parameter.detach().clone().double() for name, parameter in model.named_parameters()}
        monitor.begin_step(0)
        model(batches(8)[0][0].to(dtype)).float().pow(2).sum().backward()
        monitor.monitor_parameters()
        optimizer.step()
        record = record_of(monitor)
    for name, parameter in model.named_parameters():
        update = parameter.detach().double() - before[name]
        expected = {"norm": update.norm(), "std": update.std(), "abs_max": update.abs().max(), "ratio": update.norm() / before[name].norm()}
        for statistic, value in expected.items():
            assert record.values[f"update/{name}/{statistic}"] == pytest.approx(float(value), rel=1e-6)


def test_before_clip_and_after_clip_have_keys_of_their_own() -> None:
    """``gradient`` is what the optimizer uses."""
    model = make("mlp")
    with ModuleMonitor() as monitor:
        monitor.add_gradient_metric("norm", lambda g: g.norm())
        monitor.set_module(model)
        monitor.begin_step(0)
        F.cross_entropy(model(batches(8)[0][0]), batches(8)[0][1]).backward()
        monitor.monitor_gradients(before_clip=True)
        total = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        monitor.monitor_gradients()
        monitor.end_step()
        values = monitor.get_step_metrics()
    names = [name for name, _parameter in model.named_parameters()]
    for kind, expected in (("gradient_before_clip", total), ("gradient", 0.01)):
        assert np.linalg.norm([values[f"{kind}/{name}/norm"] for name in names]) == pytest.approx(expected, rel=1e-4)


def test_a_shared_module_and_a_tied_weight_are_matched_by_either_name_and_counted_once() -> None:
    """The first name is reported."""
    for pattern, site in (("inner", "inner"), ("again", "inner")):
        with ModuleMonitor(rules=[Rule(kinds="activation", sites=pattern, statistics="norm")]) as monitor:
            monitor.set_module(Shared())
            assert monitor.planned_keys() == [f"activation/{site}/norm", "monitor/errors"]
    for pattern in ("encoder.weight", "decoder.weight"):
        with ModuleMonitor(rules=[Rule(kinds="gradient", sites=pattern, statistics="norm")]) as monitor:
            monitor.set_module(Shared())
            assert monitor.planned_keys() == ["gradient/encoder.weight/norm", "monitor/errors"]


def test_selection_by_type_leaf_exclusion_and_submodule() -> None:
    """``types``, ``leaf_modules``, ``exclude`` with all that is inside, ``module`` without renaming."""

    def planned(model: nn.Module, *rules: Rule, **options: object) -> set[str]:
        with ModuleMonitor(rules=rules, **options) as monitor:  # type: ignore[arg-type]
            monitor.set_module(model)
            return {key.split("/")[1] for key in monitor.planned_keys() if not key.startswith("monitor/")}

    cnn = make("cnn")
    assert planned(cnn, Rule(kinds="activation", types=["torch.nn.Conv2d", nn.BatchNorm2d], statistics="rms")) == {
        "stem.0",
        "stem.1",
        "block",
    }
    assert planned(cnn, Rule(kinds="parameter", types=nn.Linear, statistics="rms")) == {"head.weight", "head.bias"}
    assert planned(cnn, Rule(kinds="activation", leaf_modules=True, statistics="rms")) == {"stem.0", "stem.1", "stem.2", "block", "head"}
    everything = Rule(kinds=["activation", "parameter"], statistics="rms")
    weights = Rule(kinds="parameter", sites=".*weight", exclude="stem", statistics="rms")
    assert planned(cnn, weights) == {"block.weight", "head.weight"}
    assert planned(cnn, everything, exclude="stem") == {"_root_", "block", "head", "block.weight", "block.bias", "head.weight", "head.bias"}
    assert planned(cnn, Rule(kinds="activation", exclude=[".*[0-9]", "_root_"], statistics="rms")) == {"stem", "block", "head"}
    assert planned(cnn, everything, module="stem.1") == {"stem.1", "stem.1.weight", "stem.1.bias"}
    assert planned(cnn, everything, excluded_modules_regex="st|he") == {"_root_", "block", "block.weight", "block.bias"}


def test_schedules_of_rules_and_of_the_monitor() -> None:
    """A number, a list, ``log`` and a function; a rule's own cadence stands beside the monitor's."""
    model = nn.Linear(2, 2)
    rules = [
        Rule(kinds="parameter", sites="weight", statistics="mean"),
        Rule(kinds="parameter", sites="weight", statistics="max", every_n_steps=[1, 4]),
        Rule(kinds="parameter", sites="weight", statistics="min", every_n_steps="log"),
        Rule(kinds="parameter", sites="weight", statistics="norm", every_n_steps=lambda step: step == 7),
    ]
    steps_by_name: dict[str, list[int]] = {}
    with ModuleMonitor(3, rules=rules) as monitor:
        monitor.set_module(model)
        for step in range(12):
            assert monitor.begin_step(step) == monitor.is_step_monitored(step)
            monitor.monitor_parameters()
            record = monitor.end_step()
            for key in record.values if record else ():
                steps_by_name.setdefault(key.rpartition("/")[2], []).append(step)
    assert {name: steps for name, steps in steps_by_name.items() if name != "errors"} == {
        "mean": [0, 3, 6, 9],
        "max": [1, 4],
        "min": [1, 2, 5, 10],
        "norm": [7],
    }


@pytest.mark.parametrize(
    ("aggregate", "scalars", "tensors"),
    [("mean", (3 * 3 + 5 * 5) / 8, 36 / 8), ("sum", 8.0, 36.0), ("min", 3.0, 1.0), ("max", 5.0, 8.0)],
)
def test_results_of_functions_are_aggregated(aggregate: str, scalars: float, tensors: float) -> None:
    """A scalar weighs as many elements as it was computed from, a tensor as many as it has."""
    rules = [
        Rule(kinds="activation", functions={"rows": lambda x: torch.tensor(float(len(x))), "number": len}, aggregate=aggregate),
        Rule(kinds="activation", functions={"all": lambda x: x.flatten()}, aggregate=aggregate),
    ]
    with in_step(identity := nn.Identity(), rules=rules) as monitor:
        identity(torch.arange(1.0, 4.0).view(3, 1))
        monitor.after_micro_batch()
        identity(torch.arange(4.0, 9.0).view(5, 1))
        record = record_of(monitor)
    assert record.values["activation/_root_/rows"] == record.values["activation/_root_/number"] == scalars
    assert record.values["activation/_root_/all"] == tensors


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"functions": {"spread": torch.std}}, "<function 'spread' of activation 'inner'>"),
        ({"functions": {"sum": torch.sum}, "aggregate": torch.std}, "<aggregate of activation/inner/sum>"),
    ],
)
def test_a_warning_of_a_function_names_the_function_and_its_site(options: dict[str, Any], place: str) -> None:
    """A function of torch's has no line of Python: without this the line of ours that calls it would be named."""
    model, rule = nn.ModuleDict({"inner": nn.Identity()}), Rule(kinds="activation", sites="inner", **options)

    def run() -> None:
        with in_step(model, rules=[rule]) as monitor:
            model["inner"](torch.ones(1))
            record_of(monitor)

    with pytest.warns(UserWarning, match="degrees of freedom") as warned:
        run()
    assert [warning.filename for warning in warned] == [place]


@pytest.mark.parametrize(("aggregate", "scalars", "tensors"), [("mean", 34 / 8, 36 / 8), ("max", 5.0, 8.0), (torch.median, 3.0, 4.0)])
def test_each_part_of_a_dict_that_a_function_returns_is_a_value_of_its_own(aggregate: Any, scalars: float, tensors: float) -> None:
    """Its key is ``statistic.part``; it is aggregated as a single result, and may be absent from some micro-batches."""

    def split(x: Tensor) -> dict[str, Any]:
        return {"rows": len(x), "all": x.flatten(), **({"n/a": x.sum()} if len(x) == 3 else {})}

    with in_step(identity := nn.Identity(), rules=[Rule(kinds="activation", functions={"f": split}, aggregate=aggregate)]) as monitor:
        identity(torch.arange(1.0, 4.0).view(3, 1))
        monitor.after_micro_batch()
        identity(torch.arange(4.0, 9.0).view(5, 1))
        record = record_of(monitor)
    assert record.values == {
        "activation/_root_/f.rows": scalars,
        "activation/_root_/f.all": tensors,
        "activation/_root_/f.n_a": 6.0,
        "monitor/errors": 0.0,
    }


def test_a_function_that_fails_in_one_micro_batch_has_no_part_of_the_others() -> None:
    """All parts of its dict are NaN in that step, and right again in the next."""

    def split(x: Tensor) -> dict[str, Tensor]:
        if len(x) == 5:
            raise ArithmeticError("five rows")
        return {"least": x.min(), "most": x.max()}

    with ModuleMonitor(rules=[Rule(kinds="activation", functions={"f": split, "g": len})]) as monitor:
        monitor.set_module(identity := nn.Identity())
        records = []
        for step, sizes in enumerate([(3, 5), (3, 3)]):
            monitor.begin_step(step)
            for size in sizes:
                identity(torch.arange(float(size)))
                monitor.after_micro_batch()
            records.append(record_of(monitor))
    values = [{key.rpartition("/")[2]: value for key, value in record.values.items()} for record in records]
    nan = pytest.approx(math.nan, nan_ok=True)
    assert values[0] == {"f": nan, "f.least": nan, "f.most": nan, "g": (3 * 3 + 5 * 5) / 8, "errors": 1.0}
    assert values[1] == {"f.least": 0.0, "f.most": 2.0, "g": 3.0, "errors": 0.0}


def test_a_function_that_fails_costs_no_other_that_is_named_like_a_part_of_it() -> None:
    """Also at further outputs, whose streams are derived as those of parts are."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, 2 * x

    with in_step(model := Two(), rules=[Rule(kinds="activation", functions={"f": lambda x: x.missing, "f.x": torch.sum})]) as monitor:
        model(torch.tensor([3.0]))
        values = record_of(monitor).values
    assert values["activation/_root_/f.x"] == 3.0
    assert values["activation/_root_.output_1/f.x"] == 6.0
    assert math.isnan(values["activation/_root_/f"])


@pytest.mark.parametrize(
    "functions",
    [{"a": lambda x: {"b": x.sum()}, "a.b": len}, {"a": lambda x: {"x/y": x.sum(), "x y": len(x)}}],
    ids=["a function has the name of a part", "two parts, cleaned"],
)
def test_two_values_of_one_key_are_an_error_and_not_a_mean(functions: dict[str, Any]) -> None:
    """Which is reported as that of any function, and gives NaN."""
    with in_step(identity := nn.Identity(), rules=[Rule(kinds="activation", functions=functions)]) as monitor:
        identity(torch.tensor([7.0]))
        values = record_of(monitor).values
    assert all(math.isnan(value) for key, value in values.items() if key != "monitor/errors"), values
    assert values["monitor/errors"] == 1.0


def test_an_aggregate_of_the_users_sees_all_results_and_may_return_a_dict() -> None:
    """Custom function over the concatenated values; the keys of a dict are appended."""
    with ModuleMonitor() as monitor:
        monitor.set_module(identity := nn.Identity())
        monitor.add_activation_metric(
            "abs", lambda x: x.abs(), metric_aggregation_fn=lambda values: {"median": values.median(), "n/a": len(values)}
        )
        monitor.add_activation_metric("mean", metric_aggregation_fn=None)
        monitor.begin_step(0)
        for values in ([1.0, -9.0], [2.0, 4.0, 3.0]):
            identity(torch.tensor(values))
            monitor.after_micro_batch()
        monitor.end_step()
    values = monitor.get_step_metrics()
    assert values["activation/_root_/abs.median"] == 3.0
    assert values["activation/_root_/abs.n_a"] == 5.0
    assert values["activation/_root_/mean"] == pytest.approx(0.2)


def test_torchmetrics_objects_see_every_element_and_start_afresh_each_step() -> None:
    """A Metric is cloned for each site, fed (N, D) float tensors, computed and reset at the end of the step."""
    from torchmetrics import MaxMetric, MeanMetric

    metrics = {"average": MeanMetric(), "largest": MaxMetric()}
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    with ModuleMonitor(rules=[Rule(kinds="activation", sites="[01]", functions=metrics)]) as monitor:
        monitor.set_module(model)
        for step, factor in enumerate((1.0, 0.5)):
            monitor.begin_step(step)
            model(factor * torch.tensor([[-2.0, 1.0]]))
            model(factor * torch.tensor([[4.0, 5.0], [6.0, 8.0]]))
            record = record_of(monitor)
            assert record.values["activation/0/average"] == pytest.approx(factor * 22 / 6)
            assert record.values["activation/1/average"] == pytest.approx(factor * 24 / 6)
            assert record.values["activation/0/largest"] == factor * 8
    assert metrics["average"].update_count == 0  # the user's own object is not touched


def test_a_function_cannot_change_training() -> None:
    """It may write into its tensor, draw random numbers, and would see autocast: nobody else notices."""
    import random

    def rude(x: Tensor) -> Tensor:
        x.zero_()
        np.random.random()  # the global state is the point
        random.random()
        assert not torch.is_autocast_enabled("cpu")
        return torch.rand(3)

    model = make("mlp")
    outputs = []
    for rules in ([], [Rule(kinds=KINDS, functions={"rude": rude})]):
        torch.manual_seed(3)
        np.random.seed(3)  # the global state is the point
        random.seed(3)
        with ModuleMonitor(rules=rules) as monitor, torch.autocast("cpu", torch.bfloat16):
            monitor.set_module(model)
            model.zero_grad()
            monitor.begin_step(0)
            out = model(batches(8)[0][0])
            out.float().sum().backward()
            monitor.monitor_gradients()
            monitor.monitor_parameters()
            record = record_of(monitor)
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        outputs.append([out, *gradients, torch.rand(2), torch.tensor([np.random.random(), random.random()])])  # as above
    assert record.values["monitor/errors"] == 0
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def test_a_metric_that_raises_is_logged_once_and_is_nan(caplog: pytest.LogCaptureFixture) -> None:
    """Module, shape and cause are named; the others' values are there; every failure is counted."""

    def picky(x: Tensor) -> Tensor:
        raise RuntimeError(f"no tensors of shape {tuple(x.shape)} please")

    model = make("mlp")
    functions = {"picky": picky, "text": lambda x: "hello", "fine": lambda x: x.mean()}
    with ModuleMonitor(rules=[Rule(kinds="activation", sites="layers.[03]", functions=functions)]) as monitor:
        monitor.set_module(model)
        records = [run_step(model, monitor, batches(3, 5), step) for step in range(2)]
    for record in records:
        for site in ("layers.0", "layers.3"):
            assert np.isnan(record.values[f"activation/{site}/picky"])
            assert np.isnan(record.values[f"activation/{site}/text"])
            assert np.isfinite(record.values[f"activation/{site}/fine"])
        assert record.values["monitor/errors"] == 2 * 2 * 2
    picky_said, text_said = caplog.messages
    assert (
        "activation 'layers.0', tensor of shape (3, 16): picky failed with RuntimeError: no tensors of shape (3, 16) please" in picky_said
    )
    assert "text failed with TypeError: returned a str; expected a real tensor, a number, or a dict of these" in text_said


def test_on_error_raise_is_an_error_with_module_shape_and_cause() -> None:
    """For those who want it."""
    rule, error = (
        Rule(kinds="activation", functions={"bad": lambda x: 1 / 0}),
        r"tensor of shape \(8, 16\): bad failed with ZeroDivisionError",
    )
    with in_step(model := make("mlp"), rules=rule, on_error="raise"), pytest.raises(RuntimeError, match=f"activation 'layers.0', {error}"):
        model(batches(8)[0][0])


def test_an_error_in_the_model_leaves_no_window_open() -> None:
    """The next step begins as if nothing had been, monitored or not; a lower step number, as after a resume, is fine."""
    model = make("mlp")
    with ModuleMonitor([2, 5], rules=[Rule(kinds="activation", statistics="norm")], capture=Capture(sites=".*", steps=5)) as monitor:
        monitor.set_module(model)
        for following in (3, 2):
            monitor.begin_step(5)
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                model(torch.randn(2, 5))
            assert monitor.begin_step(following) is (following == 2)
            assert any(module._forward_hooks for module in model.modules()) is (following == 2)
            model(batches(8)[0][0])
            record = monitor.end_step()
        assert record is not None
        assert record.step == 2
        assert monitor.get_all_metrics().keys() == {2}
    assert not any(module._forward_hooks for module in model.modules())


def test_no_monitor_hides_what_happens_inside() -> None:
    """Forward passes under ``no_monitor`` do not count, those around it do."""
    with in_step(identity := nn.Identity(), rules=[Rule(kinds="activation", statistics="max")]) as monitor:
        identity(torch.tensor([1.0]))
        with monitor.no_monitor():
            assert not monitor.is_monitoring()
            identity(torch.tensor([100.0]))
        identity(torch.tensor([2.0]))
        assert monitor.is_monitoring()
        record = record_of(monitor)
    assert record.values["activation/_root_/max"] == 2.0


def test_values_of_the_users_own_are_recorded_and_joined() -> None:
    """``log_scalar``, ``log_scalars``, ``log_tensor``; only in monitored steps, unless forced."""
    with ModuleMonitor(2, rules=[Rule(kinds="parameter", statistics="norm")]) as monitor:
        monitor.set_module(nn.Linear(1, 1))
        for step in range(2):
            monitor.begin_step(step)
            monitor.log_scalar("mine/loss", 1.0)
            monitor.log_scalar("mine/loss", torch.tensor(3.0))
            monitor.log_scalars({"a": 1, "b/c/d": torch.tensor([1.0, 2.0])})
            monitor.log_tensor("t", torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.max)
            monitor.end_step()
        assert monitor.get_all_metrics().keys() == {0}
        values = monitor.get_all_metrics()[0]
        monitor.log_scalar("late", 9.0, force=True)
        assert monitor.get_step_metrics()["late"] == 9.0
        with pytest.raises(ValueError, match=r"key 'a/b/c/d' does not fit; expected at most three parts .* e.g. 'a/b/c'"):
            monitor.log_scalar("a/b/c/d", 1.0)
    assert (values["mine/loss"], values["a"], values["b/c/d"], values["t"]) == (2.0, 1.0, 1.5, 6.0)


@pytest.mark.parametrize(
    "key", ["activation/fc/rms", "activation/fc/largest", "parameter/fc.weight/hist", "monitor/errors", "monitor/step_skipped"]
)
def test_a_value_of_the_users_own_overwrites_none_of_ours(key: str) -> None:
    """It is refused when it is logged, also in a step that is not monitored."""
    rules = [
        Rule(kinds="activation", statistics="rms", functions={"largest": torch.max}),
        Rule(kinds="parameter", statistics="hist"),
    ]
    with ModuleMonitor(2, rules=rules, prefix="run1") as monitor:
        monitor.set_module(nn.Sequential(OrderedDict(fc=nn.Linear(2, 2))))
        for step in range(2):
            monitor.begin_step(step)
            with pytest.raises(
                ValueError, match=f"key 'run1/{key}' is one that the monitor records itself; expected one of your own, e.g. 'own/"
            ):
                monitor.log_scalar(key, 1.0, force=True)
            monitor.log_scalar("activation/fc/own", 1.0)
            monitor.end_step()
        assert monitor.get_step_metrics() == {"run1/activation/fc/own": 1.0, "run1/monitor/errors": 0.0}


def test_a_logged_value_with_a_key_of_the_monitor_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A further output has a key that is not known before it comes: what was measured is recorded."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, 2 * x

    with ModuleMonitor(rules=[Rule(kinds="activation", statistics="max")]) as monitor:
        monitor.set_module(nn.Sequential(OrderedDict(two=Two())))
        for step in range(2):
            monitor.begin_step(step)
            monitor.log_scalar("activation/two.output_1/max", 7.0)
            monitor.engine.model.planner.index.within(torch.ones(2))
            record = record_of(monitor)
            assert record.values["activation/two.output_1/max"] == 2.0
    [said] = [one.getMessage() for one in caplog.records]
    assert said == "'activation/two.output_1/max' is logged, and is measured too: what is measured is recorded."


def test_names_are_fit_for_every_logger(caplog: pytest.LogCaptureFixture) -> None:
    """Characters that some logger strips become ``_``, two that would then be alike get numbers, both are said."""
    model = nn.ModuleDict({"a b": nn.Linear(2, 2), "a:b": nn.Linear(2, 2), "x" * 200: nn.Linear(2, 2)})
    with caplog.at_level(logging.INFO), ModuleMonitor(rules=[Rule(kinds="parameter", sites=".*weight", statistics="norm")]) as monitor:
        monitor.set_module(model)
        keys = monitor.planned_keys()
    assert keys[:2] == ["parameter/a_b.weight/norm", "parameter/a_b.weight_2/norm"]
    assert len(keys[2].split("/")[1]) == 128
    assert any("'a:b.weight' is called 'a_b.weight_2' in keys" in message for message in caplog.messages)


def test_sparse_gradients_are_measured_with_their_zeros() -> None:
    """An embedding with ``sparse=True``: the rows that no token used count as zeros."""
    model = nn.Embedding(10, 4, sparse=True)
    with in_step(model, rules=[Rule(kinds="gradient", statistics=["zero_fraction", "mean", "norm"])]) as monitor:
        model(torch.tensor([1, 1, 3])).sum().backward()
        monitor.monitor_gradients()
        record = record_of(monitor)
    assert record.values["gradient/weight/zero_fraction"] == 0.8
    assert record.values["gradient/weight/mean"] == pytest.approx(12 / 40)
    assert record.values["gradient/weight/norm"] == pytest.approx((4 * 4 + 4 * 1) ** 0.5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_activation_and_its_gradient_count_once(use_reentrant: bool) -> None:
    """The recomputation in the backward pass is not a second activation."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
            self.head = nn.Linear(6, 3)
            self.use_checkpoint = True

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            h = checkpoint(self.inner, x, use_reentrant=use_reentrant) if self.use_checkpoint else self.inner(x)
            return self.head(h)

    torch.manual_seed(0)
    model = Checkpointed()
    records = []
    for model.use_checkpoint in (False, True):
        with ModuleMonitor(rules=[Rule(kinds=["activation", "activation_gradient"], statistics=["norm", "mean"])]) as monitor:
            monitor.set_module(model)
            records.append(run_step(model, monitor, batches(8)).values)
    if use_reentrant:
        # The container's own output is the checkpoint's: it is recomputed, and gets its gradient, as the last layer's does.
        assert records[0].keys() == records[1].keys()
    assert records[1] == pytest.approx(records[0], rel=1e-6, abs=1e-9)


def test_gradients_of_an_inner_autograd_grad_do_not_count_between_backward_phases() -> None:
    """A gradient penalty differentiates before the backward pass: only what arrives in the pass itself is the loss's."""
    model = nn.Linear(3, 1, bias=False)
    x = torch.ones(2, 3, requires_grad=True)
    with in_step(model, rules=[Rule(kinds="activation_gradient", statistics=["norm", "nonfinite_count"])]) as monitor:
        monitor.end_backward()
        out = model(x)
        (inner,) = torch.autograd.grad(out.sum() * 100, x, create_graph=True)
        monitor.begin_backward()
        (out.sum() + 0 * inner.sum()).backward()
        monitor.end_backward()
        record = record_of(monitor)
    assert record.values["activation_gradient/_root_/norm"] == pytest.approx(2**0.5)


def test_the_constructor_has_the_names_that_people_know(caplog: pytest.LogCaptureFixture) -> None:
    """Those of torch-module-monitor: every third step, names as the user makes them, no head, problems said to the user's logger."""

    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError("never")

    monitor = ModuleMonitor(
        monitor_step_fn=lambda step: step % 3 == 0,
        format_module_name_fn=lambda name: f"net.{name}",
        excluded_modules_regex=r"net\.head",
        logger=logging.getLogger("of.the.user"),
        cpu_offload=True,
    )
    monitor.add_activation_metric("mean", None, r"net\.bo")
    monitor.add_activation_metric("fails", fails)
    model = nn.Sequential()
    model.body, model.head = nn.Linear(2, 2), nn.Linear(2, 2)  # type: ignore[assignment]  # named children
    with monitor, caplog.at_level(logging.WARNING):
        monitor.set_module(model)
        steps = []
        for step in range(5):
            if monitor.begin_step(step):
                steps.append(step)
            model(torch.ones(1, 2))
            monitor.end_step()
        values = monitor.get_step_metrics()
    assert steps == [0, 3]
    assert values.keys() == {"activation/net.body/mean", "activation/net.body/fails", "activation/net./fails", "monitor/errors"}
    assert {record.name for record in caplog.records} == {"of.the.user"}


def test_hooks_come_off_by_close_and_with() -> None:
    """In the middle of a step too; a monitor that was closed takes another module."""

    def hooks(model: nn.Module) -> int:
        return sum(len(part._forward_hooks) for part in model.modules())

    monitor, model = ModuleMonitor(rules=[Rule(kinds="activation", statistics="mean")]), make("mlp")
    monitor.set_module(model)
    monitor.begin_step(0)
    assert hooks(model) > 0
    monitor.close()
    monitor.close()
    assert hooks(model) == 0
    with monitor:
        monitor.set_module(model)
        monitor.begin_step(1)
        assert hooks(model) > 0
    assert hooks(model) == 0


def test_metrics_match_by_the_beginning_of_a_name_and_return_any_shape() -> None:
    """``re.match``, all arguments by name; a custom aggregation gets what every micro-batch gave, one after the other."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    shapes = []

    def widest(results: Tensor) -> Tensor:
        shapes.append(tuple(results.shape))
        return results.max() - results.min()

    with ModuleMonitor() as monitor:
        name, function = "width", lambda x: x * 2.0
        monitor.add_activation_metric(metric_name=name, metric_fn=function, metric_regex="0", metric_aggregation_fn=widest)
        for add in (monitor.add_parameter_metric, monitor.add_gradient_metric):
            add(metric_name=name, metric_fn=function, metric_regex="0")
        monitor.set_module(model)
        monitor.begin_step(0)
        inputs = torch.randn(3, 2), torch.randn(5, 2)
        for x in inputs:
            model(x).sum().backward()
            monitor.after_micro_batch()
        monitor.monitor_parameters()
        monitor.monitor_gradients()
        monitor.end_step()
        values = monitor.get_step_metrics()
    first = model.get_submodule("0")
    outputs = torch.cat([first(x) for x in inputs]).detach()
    expected = {"activation/0/width": 2 * float(outputs.max() - outputs.min()), "monitor/errors": 0}
    for name, parameter in first.named_parameters():
        assert parameter.grad is not None
        expected[f"parameter/0.{name}/width"] = 2 * float(parameter.detach().mean())
        expected[f"gradient/0.{name}/width"] = 2 * float(parameter.grad.mean())
    assert values == pytest.approx(expected, rel=1e-6)
    assert [math.prod(shape) for shape in shapes] == [8 * 3]


def test_a_frozen_parameter_has_no_gradient_and_no_message(caplog: pytest.LogCaptureFixture) -> None:
    """Elsewhere that is a warning for each of them at every step."""
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    with caplog.at_level(logging.WARNING), ModuleMonitor() as monitor:
        monitor.add_gradient_metric("norm")
        monitor.add_parameter_metric("norm")
        monitor.set_module(model)
        for step in range(2):
            monitor.begin_step(step)
            model(torch.ones(1, 2)).sum().backward()
            monitor.monitor_gradients(before_clip=True)
            monitor.monitor_gradients()
            monitor.monitor_parameters()
            monitor.end_step()
        keys = monitor.get_step_metrics().keys()
    assert {key for key in keys if key.startswith("gradient")} == {
        f"{kind}/1.{name}/norm" for kind in ("gradient", "gradient_before_clip") for name in ("weight", "bias")
    }
    assert "parameter/0.weight/norm" in keys
    assert caplog.records == []


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_no_wrapper_is_in_a_name(wrapper: str) -> None:
    """Around the whole, around a part, and around both; a name that only looks like one stays."""

    def wrapped(module: nn.Module) -> nn.Module:
        outside = nn.Module()
        setattr(outside, wrapper, module)
        return outside

    model = nn.Sequential(OrderedDict({"block": wrapped(nn.Sequential(nn.Linear(2, 2))), f"my{wrapper}": nn.Linear(2, 2)}))
    for root in (model, wrapped(model)):
        with ModuleMonitor(rules=Rule(kinds=["activation", "parameter"], statistics="norm", exclude=".*bias")) as monitor:
            monitor.set_module(root)
            sites = {key.split("/")[1] for key in monitor.planned_keys() if not key.startswith("monitor/")}
        assert sites == {"_root_", "block", "block.0", "block.0.weight", f"my{wrapper}", f"my{wrapper}.weight"}


def test_module_names_has_every_module_by_the_name_that_it_has_in_keys() -> None:
    """As in torch-module-monitor, excluded ones too: formatted, without wrappers, and as loggers take them."""
    shared = nn.Linear(2, 2)
    model = nn.Sequential(OrderedDict({"a": shared, "b c": nn.ReLU(), "again": shared, "_orig_mod": nn.Sequential(nn.Tanh())}))
    monitor = ModuleMonitor(rules=Rule(kinds="activation", statistics="norm"), exclude="0")
    assert monitor.module_names == {}
    with monitor:
        monitor.set_module(model)
        names = monitor.module_names
        assert {names[module] for module in model if module is not model[3]} <= {key.split("/")[1] for key in monitor.planned_keys()}
    assert names == {model: "_root_", shared: "a", model[1]: "b_c", model[3]: "_root_", model[3][0]: "0"}
    assert monitor.module_names == {}

    formatted = ModuleMonitor(format_module_name_fn=lambda name: f"net.{name}", excluded_modules_regex=r"net\.0")
    formatted.set_module(plain := nn.Sequential(nn.ReLU(), nn.ReLU()))
    assert formatted.module_names == {plain: "net.", plain[0]: "net.0", plain[1]: "net.1"}
    formatted.close()


def test_misuse_of_the_engine_is_an_error() -> None:
    """A second module, no module, a repeated name."""
    monitor = ModuleMonitor()
    with pytest.raises(ValueError, match="There is no module to monitor; call set_module"):
        monitor.begin_step(0)
    with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module"):
        monitor.set_module("model")  # type: ignore[arg-type]
    monitor.set_module(make("mlp"))
    with pytest.raises(ValueError, match="A module was set before"):
        monitor.set_module(make("mlp"))
    monitor.add_activation_metric("rms")
    with pytest.raises(ValueError, match="There is a metric 'rms' of kind 'activation' already"):
        monitor.add_activation_metric("rms", lambda x: x.norm())
    monitor.add_parameter_metric("rms")


def test_late_outputs_get_their_own_names_beside_children_of_the_same_name() -> None:
    """A child module that is called like an output does not share its key."""

    class Awkward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output_1 = nn.Identity()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.output_1(x), x * 10

    model = nn.Sequential(Awkward())
    with in_step(model, rules=[Rule(kinds="activation", sites="0.*", statistics="max")]) as monitor:
        model(torch.ones(2))
        record = record_of(monitor)
    assert {key: value for key, value in record.values.items() if key.startswith("activation")} == {
        "activation/0.output_1/max": 1.0,
        "activation/0/max": 1.0,
        "activation/0.output_1_2/max": 10.0,
    }


def test_history_is_bounded_and_goes_to_a_file_and_back(tmp_path: Path) -> None:
    """``storage`` keeps the last records, saves them, and reads its own file back, NaN and all."""
    with ModuleMonitor(rules=[Rule(kinds="activation", statistics=["max", "std"])], history=3) as monitor:
        monitor.set_module(identity := nn.Identity())
        for step in range(5):
            monitor.begin_step(step)
            identity(torch.tensor([float(step)]))  # a single element has no standard deviation
            monitor.end_step()
        assert list(monitor.get_all_metrics()) == [2, 3, 4]
        path = monitor.storage.save_hdf5(tmp_path / "history.h5")
        loaded = monitor.storage.load_hdf5(path)
        assert monitor.storage.save_hdf5(tmp_path / "history.h5").name == "history-2.h5"
    assert list(loaded) == [2, 3, 4]
    for step, values in loaded.items():
        assert values["activation/_root_/max"] == step
        assert np.isnan(values["activation/_root_/std"])
        assert values.keys() == monitor.get_all_metrics()[step].keys()


@pytest.mark.parametrize("has_numba", [True, False])
def test_a_container_that_returns_its_last_parts_output_has_values_of_its_own(has_numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor, three rows; also if it was overwritten in between: each row has what stood there at its time."""
    if not has_numba:
        monkeypatch.setattr(numba_kernel, "loops", lambda: None)

    class Doubles(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).mul_(2)

    size = 70_001  # several chunks, a rest
    for model, last in ((nn.Sequential(nn.Sequential(nn.ReLU())), 1.0), (Doubles(nn.Sequential(nn.ReLU())), 2.0)):
        with in_step(model, rules=[Rule(kinds="activation", statistics=["norm", "max"])]) as monitor:
            for x in (torch.ones(size), torch.full((3, 2), 5.0)):
                model(x)
            record = record_of(monitor)
        sites = [name or "_root_" for name, _module in model.named_modules()]
        for site, factor in zip(sites, [last, 1.0, 1.0], strict=True):
            assert record.values[f"activation/{site}/max"] == 5 * factor
            assert record.values[f"activation/{site}/norm"] == pytest.approx(factor * (size + 6 * 25) ** 0.5, rel=1e-6)


def test_units_are_remembered_over_steps_with_different_rules() -> None:
    """A unit that lives in one of the last ten monitored steps is not dead, whatever other rules were due in that step."""
    rules = [Rule(kinds="activation", statistics="dead_fraction"), Rule(kinds="parameter", statistics="norm", every_n_steps=2)]
    with ModuleMonitor(1, rules=rules) as monitor:
        monitor.set_module(nn.Sequential(OrderedDict(relu=nn.PReLU(2, init=0.0))))
        found = []
        for step, x in enumerate(torch.tensor([[[-1.0, -1.0]], [[1.0, -1.0]], [[-1.0, -1.0]]])):
            monitor.begin_step(step)
            assert monitor.module is not None
            monitor.module(x)
            record = record_of(monitor)
            found.append(record.values["activation/relu/dead_fraction"])
    assert found == [1.0, 0.5, 0.5]


@pytest.mark.parametrize("other", [{"functions": {"spread": torch.amin}}, {"functions": {"rms": torch.amax}}])
def test_two_rules_that_give_one_name_to_different_things_are_refused(other: dict[str, Any]) -> None:
    """Only one of them could be recorded. One thing under one name by two rules is recorded once."""
    rules = [Rule(kinds="activation", statistics="rms", functions={"spread": torch.amax}) for _ in range(2)]
    net = nn.Sequential(OrderedDict(fc=nn.Linear(2, 2)))
    with ModuleMonitor(1, rules=rules) as monitor:
        monitor.set_module(net)
        assert "activation/fc/spread" in monitor.planned_keys()
        with pytest.raises(ConfigError, match=r"two: another rule records something else as '.*' of kind 'activation' at '_root_'"):
            monitor.add_rules(Rule(kinds="activation", **other), "two")
        assert len(monitor.engine.recipe.rules) == 2
    with (
        ModuleMonitor(1, rules=[*rules, Rule(kinds="activation", **other)]) as monitor,
        pytest.raises(ConfigError, match=r"rules.2.: another rule records something else as '.*' of kind 'activation' at '_root_'"),
    ):
        monitor.set_module(net)


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_loop_that_cannot_begin_leaves_the_step_around_it(is_ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no record of the loop; the next loop, which closes it if it was not ended, and the step around both have theirs."""

    def fail(_engine: StepEngine) -> None:
        raise RuntimeError("on purpose")

    with ModuleMonitor(1, rules=[Rule(kinds="activation", statistics="max")]) as monitor:
        monitor.set_module(nn.Sequential(OrderedDict(relu=nn.ReLU())))
        assert monitor.module is not None
        monitor.begin_step(3)
        monitor.module(torch.ones(1, 2))
        with monkeypatch.context() as patched:
            patched.setattr(StepEngine, "check_agreement", fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                monitor.engine.begin_stage("validation", 3)
        if is_ended:
            assert monitor.engine.end_stage() is None
        monitor.engine.begin_stage("test", 3)
        monitor.module(torch.full((1, 2), 2.0))
        of_loop = monitor.engine.end_stage()
        record = record_of(monitor)
    assert of_loop is not None
    assert of_loop.values["test/activation/relu/max"] == 2.0
    assert (record.step, record.values["activation/relu/max"]) == (3, 1.0)


def test_a_closer_look_lasts_for_its_steps() -> None:
    """What is recorded of a site in some steps after a finding is not recorded of every validation loop after them."""
    with ModuleMonitor(1, rules=[Rule(kinds="activation", statistics="max")]) as monitor:
        monitor.set_module(nn.Sequential(OrderedDict(relu=nn.ReLU())))
        assert monitor.module is not None
        monitor.engine.model.add_detail(Rule(kinds="activation", statistics="min", every_n_steps=[1]), Capture(sites="relu", steps=1))
        found = []
        for step in range(3):
            monitor.begin_step(step)
            monitor.module(torch.ones(1, 2))
            record = record_of(monitor)
            found.append("activation/relu/min" in record.values)
        monitor.engine.begin_stage("validation", 3)
        monitor.module(torch.ones(1, 2))
        record = monitor.engine.end_stage()
    assert found == [False, True, False]
    assert record is not None
    assert [key for key in record.values if "relu" in key] == ["validation/activation/relu/max"]
