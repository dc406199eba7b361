"""A tensor that cannot be measured costs its own values, and is reported; all other values of the step are there."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain_steps import in_step, record_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

from lightning_module_monitor import Capture, ModuleMonitor, Record, Rule
from lightning_module_monitor.kernels import numba_kernel


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Stored(Tensor):
    """A tensor kept as whole numbers and a factor. Operations on it are those on the tensor that it stands for."""

    whole: Tensor

    @staticmethod
    def __new__(cls: type[Stored], whole: Tensor) -> Stored:
        made: Stored = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)
        made.whole = whole
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole)
        return func(*tree_map(lambda one: one.whole / 8 if isinstance(one, Stored) else one, args), **(kwargs or {}))


class Double(torch.autograd.Function):
    """Makes two tensors of one. A gradient of two tensors arrives at them."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return TwoTensor(x.clone(), 2 * x)

    @staticmethod
    def backward(_ctx: Any, gradient: TwoTensor) -> Tensor:  # type: ignore[override]
        first: Tensor = gradient.a
        return first


class First(torch.autograd.Function):
    """The first of two tensors."""

    @staticmethod
    def forward(_ctx: Any, two: TwoTensor) -> Tensor:
        first: Tensor = two.a.clone()
        return first

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return TwoTensor(gradient.contiguous(), gradient.contiguous())


def observe(net: nn.Module, rules: list[Rule], *inputs: Tensor, **options: Any) -> Record:
    """A step with a forward and a backward pass; every parameter doubles."""
    with in_step(net, rules=rules, **options) as monitor:
        for x in inputs:
            output = net(x)
            (output.real if output.is_complex() else output).sum().backward()
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(2)
        return record_of(monitor)


def rms(tensor: Tensor) -> float:
    """In float64."""
    return tensor.detach().double().pow(2).mean().sqrt().item()


@pytest.mark.parametrize(
    "wanted",
    [
        {"statistics": ["rms"]},
        {"statistics": ["rms", "hist"]},
        {"statistics": ["rms", "dead_fraction"]},
        {"statistics": ["rms"], "functions": {"mean": torch.mean}},
        {"statistics": ["rms"], "functions": {"all": lambda x: x}, "aggregate": torch.max},
    ],
    ids=["moments", "histogram", "units", "function", "aggregate"],
)
@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "plain"])
def test_an_output_of_two_tensors_costs_its_own_values(wanted: dict[str, Any], is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for: its values are NaN, a histogram of it is absent, it is counted once, and all others are there."""
    if not is_fast:
        monkeypatch.setattr(numba_kernel, "loops", lambda: None)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Calls(lambda x: TwoTensor(x, 2 * x)), Calls(lambda x: x.a), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    of_sites = {"0": net[0](x), "2": net[0](x), "3": net[3](net[0](x)), "_root_": net[3](net[0](x))}
    record = observe(net, [Rule(kinds="activation", **wanted)], x)
    found = {key.split("/")[1]: value for key, value in record.values.items() if key.endswith("/rms")}
    assert math.isnan(found.pop("1"))
    assert found == pytest.approx({site: rms(output) for site, output in of_sites.items()}, rel=1e-6)
    assert all(math.isnan(value) == ("/1/" in key) for key, value in record.values.items())
    assert set(record.histograms) == {f"activation/{site}/hist" for site in of_sites if "hist" in wanted["statistics"]}
    assert all(one.row.sum() == of_sites[key.split("/")[1]].numel() for key, one in record.histograms.items())
    assert record.values["monitor/errors"] == 1.0


def test_its_gradient_its_attention_and_its_raw_tensor_cost_their_own_too(caplog: pytest.LogCaptureFixture) -> None:
    """Each kind is reported once, and every tensor counted; the attention of plain heads in the same module is there."""

    def attend(x: Tensor) -> Tensor:
        for one in (x, TwoTensor(x, x)):
            F.scaled_dot_product_attention(one, one, one)
        return x

    net = nn.Sequential(nn.Linear(4, 4), Calls(attend), Calls(Double.apply), nn.ReLU(), Calls(First.apply))
    rules = [Rule(kinds=["activation_gradient", "attention_sink"], statistics=["rms", "hist"])]
    record = observe(net, rules, torch.randn(1, 1, 3, 4), capture=Capture(sites=".*", steps=[0], kinds="activation"))
    assert record.values["attention_sink/1.head_0/rms"] > 0
    assert {"activation_gradient/0/hist", "activation_gradient/4/hist", "attention_sink/1.head_0/hist"} <= set(record.histograms)
    assert {one.site for one in record.tensors} == {"0", "1", "4", "_root_"}
    assert record.values["monitor/errors"] == 5.0  # two gradients, two outputs, one call of attention
    assert sum("no plain tensor" in message for message in caplog.messages) == 3


@pytest.mark.parametrize(
    "wanted", [{"statistics": ["rms", "hist"]}, {"statistics": ["rms"], "functions": {"mean": torch.mean}}], ids=["histogram", "function"]
)
def test_a_parameter_of_two_tensors_costs_its_own_values(wanted: dict[str, Any]) -> None:
    """So does its update; those of the others are there, also what is relative to the parameter."""

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two = nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x) * self.two.a
            return y

    net = Uses()
    weight = rms(net.fc.weight)
    rules = [Rule(kinds=["parameter", "gradient"], **wanted), Rule(kinds="update", statistics=["rms", "ratio"])]
    values = observe(net, rules, torch.randn(3, 4)).values
    assert values["parameter/fc.weight/rms"] == pytest.approx(weight, rel=1e-6)
    assert values["update/fc.weight/rms"] == pytest.approx(weight, rel=1e-6)
    assert values["update/fc.weight/ratio"] == pytest.approx(1.0)
    assert math.isnan(values["parameter/two/rms"])
    assert math.isnan(values["update/two/ratio"])
    assert "gradient/fc.bias/rms" in values


def test_a_wrapper_that_stands_for_a_tensor_is_measured_as_that() -> None:
    """Numbers kept as 8-bit integers, say: statistics, histogram and functions are of what operations give."""
    whole = torch.arange(-4, 8, dtype=torch.int8).view(3, 4)
    net = nn.Sequential(Calls(lambda _x: Stored(whole)), Calls(lambda x: x + torch.zeros(4, requires_grad=True)))
    rule = Rule(kinds="activation", statistics=["rms", "hist", "zero_fraction"], functions={"mean": torch.mean})
    record = observe(net, [rule], torch.ones(1))
    for site in "01":
        assert record.values[f"activation/{site}/rms"] == pytest.approx(rms(whole / 8), rel=1e-6)
        assert record.values[f"activation/{site}/mean"] == pytest.approx(float(whole.double().mean() / 8))
        assert record.values[f"activation/{site}/zero_fraction"] == pytest.approx(1 / 12)
    assert (record.histograms["activation/0/hist"].row == record.histograms["activation/1/hist"].row).all()
    assert record.values["monitor/errors"] == 0.0


class Quantized(Stored):
    """A tensor that no operation but its own takes, as torchao keeps frozen weights and the states of its optimizers."""

    def dequantize(self) -> Tensor:  # type: ignore[override]  # torch declares no return type
        return self.whole / 8

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole)
        if func is torch.ops.aten.t.default:
            return cls(args[0].whole.t())
        if func is torch.ops.aten.mm.default:
            return func(args[0], args[1].dequantize())
        if func is torch.ops.aten.mul_.Tensor:
            args[0].whole.mul_(args[1])
            return args[0]
        raise NotImplementedError(f"{func} of a quantized tensor")


class Frozen(nn.Module):
    """A layer with a quantized weight, as for QLoRA."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3, bias=False)
        self.base.weight = nn.Parameter(Quantized(whole), requires_grad=False)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.base(x))
        return y


def test_a_quantized_parameter_is_measured_as_what_it_stands_for(caplog: pytest.LogCaptureFixture) -> None:
    """Its statistics, its difference from the reference, its update, functions of it, and a copy; the check of layers leaves it out."""
    whole = torch.arange(-4, 8, dtype=torch.int8).view(3, 4)
    truth = rms(whole / 8)
    net = Frozen(whole.clone())
    head = rms(net.head.weight)
    rules = [
        Rule(kinds="parameter", statistics=["rms", "hist", "zero_fraction"], functions={"first": lambda x: x.flatten()[0]}),
        Rule(kinds="parameter_difference", statistics=["rms"], functions={"both": lambda x, y: (x + y).flatten()[0]}),
        Rule(kinds="update", statistics=["rms", "ratio"]),
        Rule(kinds=["rcc_output", "rcc_effective_update"], statistics=["rms"]),
        Rule(kinds="rcc_operator_norm"),
    ]
    capture = Capture(sites="base.weight", steps=[0], kinds=["parameter", "update"])
    with caplog.at_level(logging.INFO):
        record = observe(net, rules, torch.randn(3, 4), reference=Frozen(whole.clone()), capture=capture)
    values = record.values
    assert values["parameter/base.weight/rms"] == pytest.approx(truth, rel=1e-6)
    assert values["parameter/base.weight/zero_fraction"] == pytest.approx(1 / 12)
    assert values["parameter/base.weight/first"] == -0.5
    assert values["parameter_difference/base.weight/rms"] == 0.0
    assert values["parameter_difference/base.weight/both"] == -1.0
    assert values["update/base.weight/rms"] == pytest.approx(truth, rel=1e-6)
    assert values["update/base.weight/ratio"] == pytest.approx(1.0)
    assert values["update/head.weight/rms"] == pytest.approx(head, rel=1e-6)
    assert record.histograms["parameter/base.weight/hist"].row.sum() == 12
    assert all(torch.equal(one.value, whole / 8) for one in record.tensors)
    assert len(record.tensors) == 2
    assert values["monitor/errors"] == 0.0
    assert not any(key.startswith("rcc/base") for key in values)
    assert sum("quantized" in message for message in caplog.messages) == 1


class Complex(nn.Module):
    """Complex parameters, and some of integers, beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.wave = nn.Linear(4, 4, dtype=torch.complex64)
        self.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wave(self.fc(x).to(torch.complex64))
        return y


@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_complex_parameters_are_reported_once(
    is_fast: bool, scale: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line names them, for all kinds and steps, and they have no keys, planned or recorded; the real ones are as without them.

    Torch warns of nothing (a warning is an error here), not even where raw tensors are captured, which are complex.
    """
    if not is_fast:
        monkeypatch.setattr(numba_kernel, "loops", lambda: None)
    net = Complex()
    kinds = ["parameter", "gradient_before_clip", "gradient", "update"]
    captured = ["activation", "activation_gradient", "parameter", "gradient", "update"]
    rule = Rule(kinds=kinds, statistics=["norm", "hist"], functions={"mean": torch.mean})
    with ModuleMonitor(rules=[rule], capture=Capture(sites="wave.*", steps=[0], kinds=captured)) as monitor, caplog.at_level(logging.INFO):
        monitor.set_module(net)
        planned = monitor.planned_keys()
        for step in range(2):
            monitor.begin_step(step)
            monitor.begin_backward(scale)
            (net(torch.ones(2, 4)).real.sum() * (scale or 1.0)).backward()
            monitor.end_backward()
            norm = float(torch.linalg.vector_norm(net.fc.weight.grad.double())) / (scale or 1.0)
            before = net.wave.weight.detach().clone()
            gradient = net.wave.weight.grad.detach().clone() if scale is None else net.wave.weight.grad / scale
            monitor.monitor_gradients(before_clip=True, scale=scale)
            monitor.monitor_gradients(scale=scale)
            monitor.monitor_parameters()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(2)
            record = record_of(monitor)
            assert {*record.values, *record.histograms} == {*planned}
            assert {key.split("/")[1] for key in planned} == {"fc.weight", "fc.bias", "errors"}
            assert record.values["gradient/fc.weight/norm"] == pytest.approx(norm, rel=1e-6)
            assert record.values["monitor/errors"] == 0.0
            if step == 0:
                of_weight = {one.kind: one.value for one in record.tensors if one.site == "wave.weight"}
                assert torch.equal(of_weight["update"], before)
                assert torch.equal(of_weight["gradient"], gradient)
            net.zero_grad()
    assert [message for message in caplog.messages if "complex" in message] == [
        "wave.weight, wave.bias: parameters of dtype torch.complex64 are not recorded; only real floating ones are. "
        "Totals are without them."
    ]
    assert [message for message in caplog.messages if "int8" in message] == [
        "codes: parameters of dtype torch.int8 are not recorded; only real floating ones are. Totals are without them."
    ]
