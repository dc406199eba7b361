"""Tensors with metadata: what is recorded is as of plain tensors, and the monitor runs no code of their class."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers.plain_steps import in_step, record_of
from helpers.tiny import KeepRecords
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from lightning_module_monitor import Capture, GradientFlow, GradientGainMonitor, ModuleMonitor, ModuleMonitorCallback, Record, Rule, track
from lightning_module_monitor.kernels import numba_kernel

Make = Callable[[Tensor], Tensor]
ATTENTION = ["attention_entropy", "attention_max_logit", "attention_sink"]
RCC = ["rcc_effective_update", "rcc_propagating_update", "rcc_input_change", "rcc_operator_norm", "rcc_alignment"]
ALONE = [
    Rule(
        kinds=["activation", "activation_gradient", "parameter", "gradient", "update"],
        statistics=["rms", "std", "min", "token_norm", "hist"],
        functions={"largest": lambda x: x.max()},
    ),
    Rule(kinds="activation", statistics="dead_fraction"),
    Rule(kinds=ATTENTION, statistics=["mean"]),
]
COMPARED = [
    Rule(kinds="activation_difference", statistics=["norm", "cosine"], functions={"sum": lambda x, other: (x - other).sum()}),
    Rule(kinds=["parameter_difference", *RCC[:3]], statistics=["norm"]),
    *(Rule(kinds=kind) for kind in RCC[3:]),
]


class Scan(Tensor):
    """A tensor with metadata, which all results of operations on it have too."""

    num_calls: ClassVar[int] = 0
    """How often code of the class ran."""
    meta: dict[str, Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Scan.num_calls += 1
        result = super().__torch_function__(func, types, args, kwargs or {})
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Scan)]
        for one in tree_leaves(result):
            if isinstance(one, Scan) and given:
                one.meta = dict(given[0].meta)
        return result


def scan(tensor: Tensor) -> Scan:
    """A tensor with metadata."""
    made = tensor.as_subclass(Scan)
    made.meta = {"spacing": 2.0}
    return made


class Attends(nn.Module):
    """Attention by torch's function and by its module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(3, 3, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0]
        z: Tensor = self.attention(y, y, y)[0]
        return x + z


def network() -> nn.Sequential:
    """Layers of several kinds, an in-place one among them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), Attends(), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 2))


def train(net: nn.Module, monitor: ModuleMonitor, inputs: Sequence[Tensor], *, is_monitored: bool = True) -> Record | None:
    """A step of several micro-batches; every parameter becomes less by 0.1."""
    if is_monitored:
        monitor.begin_step(0)
    for x in inputs:
        net(x).pow(2).sum().backward()
        monitor.after_micro_batch()
    monitor.monitor_gradients()
    monitor.monitor_parameters()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.sub_(0.1)
    return monitor.end_step() if is_monitored else None


def observed(make: Make, *, is_compared: bool = False) -> tuple[Record, nn.Module, int]:
    """What a monitored step recorded, the network after it, and how often the class ran beyond a step that is not monitored."""
    flow, capture = GradientFlow(blocks=["0", "2", "4"]), Capture(sites="5", steps=[0])
    net, other = network(), network()
    inputs = [make(x) for x in torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(1))]
    rules = ALONE + (COMPARED if is_compared else [])
    with ModuleMonitor(rules=rules, gradient_flow=flow, capture=capture, on_error="raise") as monitor:
        monitor.set_module(net)
        if is_compared:
            for parameter in other.parameters():
                parameter.data.mul_(0.9)
            monitor.set_reference_module(other, follows=True)
        start = Scan.num_calls
        train(network(), monitor, inputs, is_monitored=False)
        between = Scan.num_calls
        torch.manual_seed(2)
        record = train(net, monitor, inputs)
    assert record is not None
    return record, net, (Scan.num_calls - between) - (between - start)


@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize("is_compared", [False, True])
def test_every_kind_is_recorded_as_of_plain_tensors(is_compared: bool, is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, as are gradients; without a reference, whose forward runs it too, no code of the class is run."""
    if not is_fast:
        monkeypatch.setattr(numba_kernel, "loops", lambda: None)
    expected, plain_net, _calls = observed(lambda x: x, is_compared=is_compared)
    record, net, num_calls = observed(scan, is_compared=is_compared)
    assert record.values == expected.values
    assert record.values["monitor/errors"] == 0.0
    assert all(math.isfinite(value) for key, value in record.values.items() if "cosine" not in key)
    kinds = {key.split("/")[0] for key in record.values}
    assert kinds >= {
        "activation",
        "activation_gradient",
        "gradient_flow",
        *ATTENTION,
        *(("activation_difference", *RCC) if is_compared else ()),
    }
    assert record.histograms.keys() == expected.histograms.keys()
    assert all((record.histograms[key].row == one.row).all() for key, one in expected.histograms.items())
    assert [(one.site, type(one.value)) for one in record.tensors] == [(one.site, Tensor) for one in expected.tensors]
    assert all(torch.equal(one.value, other.value) for one, other in zip(record.tensors, expected.tensors, strict=True))
    for one, other in zip(net.parameters(), plain_net.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert is_compared or num_calls == 0


def test_values_are_those_of_float64() -> None:
    """An activation, and the gradient that arrives at it."""
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.randn(3, 4)
    with in_step(net, rules=[Rule(kinds=["activation", "activation_gradient"], statistics="rms")], on_error="raise") as monitor:
        net(scan(x)).pow(2).sum().backward()
        record = record_of(monitor)
    before = F.linear(x.double(), net[0].weight.double(), net[0].bias.double())
    gradient = torch.where(before > 0, 2 * before, 0.0)
    assert record.values["activation/0/rms"] == pytest.approx(before.pow(2).mean().sqrt().item(), rel=1e-6)
    assert record.values["activation_gradient/0/rms"] == pytest.approx(gradient.pow(2).mean().sqrt().item(), rel=1e-6)


class Blocked(nn.Module):
    """Calls a part without a graph on a tensor that requires a gradient; that part returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.same = nn.Linear(4, 4), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        with torch.no_grad():
            self.same(y)
        z: Tensor = y.sum()
        return z


@pytest.mark.parametrize("make", [lambda x: x, scan], ids=["plain", "scan"])
def test_a_gradient_arrives_at_an_output_of_a_part_without_a_graph(make: Make) -> None:
    """Whether it requires one is a question to the tensor itself."""
    net = Blocked()
    with in_step(net, rules=[Rule(kinds="activation_gradient", statistics="norm")], on_error="raise") as monitor:
        net(make(torch.ones(1, 4))).backward()
        record = record_of(monitor)
    assert record.values["activation_gradient/same/norm"] == 2.0


class OnScans(Classifier):
    """Trained on tensors with metadata; its loss is one."""

    def __init__(self, make: Make, bad_step: int = -1) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)))
        self.make, self.bad_step = make, bad_step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = self.make(batch[0]), batch[1]
        if batch_idx == self.bad_step:
            self.model[0].weight.data[0, 0] = math.nan
        loss = F.cross_entropy(self.model(x), y)
        assert isinstance(loss, Scan) == (self.make is scan)
        return loss


def fit(folder: Path, make: Make, callbacks: list[Any]) -> tuple[KeepLosses, dict[str, Tensor], int]:
    """Losses, weights, and how often code of the class ran."""
    seed()
    live, keep, before = OnScans(make), KeepLosses(), Scan.num_calls
    trainer(folder, [*callbacks, keep], max_steps=3).fit(live, loader(), loader(8))
    return keep, live.state_dict(), Scan.num_calls - before


def test_the_callback_by_default_runs_no_code_of_the_class(tmp_path: Path) -> None:
    """Values are those of plain tensors, training is bit-identical, and the losses are scans."""
    plain, scans = (KeepRecords(ModuleMonitorCallback(every_n_steps=1, on_error="raise")) for _ in range(2))
    fit(tmp_path / "plain", lambda x: x, [plain.monitor, plain])
    without, weights, num_calls = fit(tmp_path / "without", scan, [])
    watched, watched_weights, num_calls_of_both = fit(tmp_path / "scans", scan, [scans.monitor, scans])
    assert num_calls_of_both == num_calls
    assert [one.values for one in scans.records] == [one.values for one in plain.records]
    assert all(torch.equal(a, b) for a, b in zip(watched.losses, without.losses, strict=True))
    assert all(torch.equal(watched_weights[name], one) for name, one in weights.items())


@pytest.mark.parametrize("module", [None, "model"])
def test_differences_from_a_reference_are_zero_at_step_0(module: str | None, tmp_path: Path) -> None:
    """With dropout; training is bit-identical, and the coordinate check leaves no call out."""
    callback = ModuleMonitorCallback(
        1, rules=[Rule(kinds="activation_difference", statistics="abs_max")], reference="init", rcc=True, module=module, on_error="raise"
    )
    records = KeepRecords(callback)
    without, weights, _calls = fit(tmp_path / "without", scan, [])
    watched, watched_weights, _calls = fit(tmp_path / "with", scan, [callback, records])
    first, second, _third = (one.values for one in records.records)
    compared = [key for key in first if key.startswith("activation_difference/")]
    assert len(compared) >= 5
    assert {first[key] for key in compared} == {0.0}
    assert all(second[key] > 0 for key in compared)
    assert second["monitor/rcc_skipped_calls"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(watched.losses, without.losses, strict=True))
    assert all(torch.equal(watched_weights[name], one) for name, one in weights.items())


@pytest.mark.parametrize("nonfinite", ["warn", "always"])
def test_the_origin_of_a_value_that_is_not_finite_is_found(nonfinite: str, tmp_path: Path) -> None:
    """By the probe of a monitored step, and by a second run of it."""
    callback = ModuleMonitorCallback(every_n_steps=1, health={"nonfinite": nonfinite}, on_error="raise")
    seed()
    trainer(tmp_path, [callback], max_steps=3).fit(OnScans(scan, bad_step=1), loader(), loader(8))
    [finding] = [one for one in callback.findings if one.name == "nonfinite"]
    assert (finding.step, finding.site) == (1, "model.0")


def test_the_tracker_and_the_gain_of_gradients_run_no_code_of_the_class() -> None:
    """Their values are those of plain tensors, in plain tensors."""
    found: list[Any] = []
    for make in (lambda x: x, scan):
        net, x = network().eval(), make(torch.ones(5, 3, 4))
        before = Scan.num_calls
        net(x).sum().backward()
        between = Scan.num_calls
        with track(net) as tracker, GradientGainMonitor(list(net[:5:2])) as gain:
            net(x).sum().backward()
        assert Scan.num_calls - between == between - before
        assert {type(one.first_value) for one in tracker} == {Tensor}
        found.append(([(one.name, one.grad) for one in tracker], [one.first_value for one in tracker], gain.norms()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))
    assert found[0][2] == found[1][2]


class Own(nn.Parameter):
    """A parameter of a class of its own."""


class Scales(nn.Module):
    """Parameters of classes: with code that every operation runs, without it, and one that has no values yet."""

    def __init__(self) -> None:
        super().__init__()
        self.scan = nn.Parameter(scan(torch.arange(1.0, 5.0)))
        self.own = Own(torch.arange(1.0, 5.0))
        self.lazy = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.scan * self.own
        return y


def test_parameters_of_classes_are_recorded() -> None:
    """Value, gradient, update and raw tensor; a function receives a plain tensor; one without values costs its own alone."""
    net, received = Scales(), []
    assert type(net.scan) is Scan
    kinds = ["parameter", "gradient", "update"]
    rules = [Rule(kinds=kinds, statistics=["norm", "min"], functions={"keep": lambda x: float(received.append(x) or 0)})]
    with in_step(net, rules=rules, capture=Capture(sites="scan|own", steps=[0], kinds=kinds)) as monitor:
        net(torch.ones(4)).sum().backward()
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        with torch.no_grad():
            net.scan.mul_(2)
            net.own.mul_(2)
        record = record_of(monitor)
    norm = float(torch.arange(1.0, 5.0).double().norm())
    for name in ("scan", "own"):
        for kind in kinds:
            assert record.values[f"{kind}/{name}/norm"] == pytest.approx(norm)
            assert record.values[f"{kind}/{name}/min"] == 1.0
    assert record.values["monitor/errors"] == 0.0
    assert {type(one) for one in received} == {Tensor}
    assert {type(one.value) for one in record.tensors} == {Tensor}
    assert len(record.tensors) == 6
