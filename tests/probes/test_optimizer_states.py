"""What optimizers keep of parameters, and cosines of updates and states with gradients and earlier updates: against raw tensors."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain_steps import in_step, record_of
from lion_pytorch import Lion
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adagrad, AdamW, NAdam, Optimizer, RMSprop, SparseAdam

from lightning_module_monitor import ModuleMonitor, Record, Rule

STATES = "optimizer_state"
RULES = [
    Rule(kinds=STATES, statistics=["norm", "mean", "abs_max", "hist", "cosine_to_gradient"]),
    Rule(kinds="update", statistics=["ratio", "cosine_to_gradient", "cosine_to_previous"]),
]


class Net(nn.Module):
    """A matrix, a vector, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(6, 5, bias=False), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.fc(x))) * self.scale
        return y


def cosine(x: Tensor, y: Tensor) -> float:
    """In float64."""
    x, y = x.detach().double().flatten(), y.detach().double().flatten()
    return float(x @ y / (x.norm() * y.norm()))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Samples of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(7, 6, generator=generator), torch.randint(3, (7,), generator=generator)


Truth = dict[tuple[str, str], tuple[Tensor, Tensor, Tensor | None]]
"""By kind and site: a tensor, the gradient, and the tensor of the monitored step before."""


def train(
    model: nn.Module, optimizer: Optimizer, monitor: ModuleMonitor | None = None, num_steps: int = 4
) -> tuple[list[Record], list[Truth]]:
    """Train, and return the records with the tensors that they are of."""
    records, truths = [], []
    previous: dict[str, Tensor] = {}
    if monitor is not None:
        monitor.set_module(model)
    for step in range(num_steps):
        x, y = batch(step)
        if monitor is not None:
            monitor.begin_step(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        if monitor is not None:
            monitor.monitor_gradients()
            monitor.monitor_parameters()
        optimizer.step()
        if monitor is not None:
            monitor.monitor_updates(optimizers=optimizer)
            record = record_of(monitor)
            records.append(record)
        truth: Truth = {}
        for name, parameter in model.named_parameters():
            if name in gradients:
                update = parameter.detach().double() - before[name].double()
                truth["update", name] = update, -gradients[name], previous.get(name)
                previous[name] = update
                for key, value in optimizer.state[parameter].items():
                    if isinstance(value, Tensor) and key != "step" and value.shape == parameter.shape:
                        truth[STATES, f"{name}.{key}"] = value.clone(), gradients[name], None
        truths.append(truth)
    return records, truths


def assert_true(records: list[Record], truths: list[Truth]) -> None:
    """Every value is that of the raw tensors, and there are no others."""
    for record, truth in zip(records, truths, strict=True):
        sites = {(key.split("/")[0], key.split("/")[1]) for key in record.values if not key.startswith("monitor/")}
        assert sites == truth.keys()
        assert record.values["monitor/errors"] == 0
        for (kind, site), (tensor, gradient, previous) in truth.items():
            near = {"rel": 1e-5, "abs": 1e-6, "nan_ok": True}
            assert record.values[f"{kind}/{site}/cosine_to_gradient"] == pytest.approx(cosine(tensor, gradient), **near)
            if kind == "update":
                value = record.values[f"{kind}/{site}/cosine_to_previous"]
                assert value == pytest.approx(math.nan if previous is None else cosine(tensor, previous), **near)
            else:
                assert record.values[f"{kind}/{site}/norm"] == pytest.approx(float(tensor.double().norm()), rel=1e-6)
                assert record.values[f"{kind}/{site}/mean"] == pytest.approx(float(tensor.double().mean()), **near)
                assert record.values[f"{kind}/{site}/abs_max"] == pytest.approx(float(tensor.abs().max()), rel=1e-6)
                assert record.histograms[f"{kind}/{site}/hist"].row.sum() == tensor.numel()


MADE: dict[str, tuple[Callable[[nn.Module], Optimizer], set[str]]] = {
    "AdamW": (lambda model: AdamW(model.parameters(), lr=0.01), {"exp_avg", "exp_avg_sq"}),
    "AdamW, fused": (lambda model: AdamW(model.parameters(), lr=0.01, fused=True), {"exp_avg", "exp_avg_sq"}),
    "AdamW, foreach": (lambda model: AdamW(model.parameters(), lr=0.01, foreach=True), {"exp_avg", "exp_avg_sq"}),
    "AdamW, amsgrad": (lambda model: AdamW(model.parameters(), lr=0.01, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    "SGD": (lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9), {"momentum_buffer"}),
    "RMSprop": (lambda model: RMSprop(model.parameters(), momentum=0.9), {"square_avg", "momentum_buffer"}),
    "Adagrad": (lambda model: Adagrad(model.parameters()), {"sum"}),
    "NAdam": (lambda model: NAdam(model.parameters()), {"exp_avg", "exp_avg_sq"}),
    "Lion": (lambda model: Lion(model.parameters(), lr=0.001), {"exp_avg"}),
}


@pytest.mark.parametrize("name", MADE)
def test_states_and_cosines_of_every_optimizer(name: str) -> None:
    """Sites, statistics, histograms and cosines are those of the optimizer's own tensors; no counter is among them."""
    make, states = MADE[name]
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    with ModuleMonitor(rules=RULES, on_error="raise") as monitor:
        optimizer = make(model)
        records, truths = train(model, optimizer, monitor)
    if name == "NAdam":  # it has a product of its own of a parameter without dimensions, as of all others
        for truth in truths:
            del truth[STATES, "scale.mu_product"]
    assert_true(records, truths)
    names = {key.split("/")[1].rpartition(".")[2] for key in records[-1].values if key.startswith(STATES)}
    assert names == states
    train(plain, make(plain))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_keeps_matrices_alone() -> None:
    """Muon for matrices and AdamW for the rest, which step one after the other."""
    model = Net()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.01), AdamW(rest, lr=0.01)]
    with ModuleMonitor(rules=Rule(kinds=STATES, statistics="norm"), on_error="raise") as monitor:
        monitor.set_module(model)
        x, y = batch(0)
        monitor.begin_step(0)
        F.cross_entropy(model(x), y).backward()
        monitor.monitor_parameters()
        for optimizer, parameters in zip(optimizers, (matrices, rest), strict=True):
            optimizer.step()
            monitor.monitor_updates(parameters, optimizers=optimizer)
        record = record_of(monitor)
    expected = {f"{name}.weight.momentum_buffer" for name in ("fc", "head")}
    expected |= {f"{name}.{state}" for name in ("head.bias", "scale") for state in ("exp_avg", "exp_avg_sq")}
    assert {key.split("/")[1] for key in record.values if key.startswith(STATES)} == expected
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            (name,) = (known for known, other in model.named_parameters() if other is parameter)
            for key in state.keys() - {"step"}:
                value = record.values[f"{STATES}/{name}.{key}/norm"]
                assert value == pytest.approx(float(state[key].double().norm()), rel=1e-6)


def test_plain_descent_has_a_cosine_of_one() -> None:
    """With the sign changed: the update of SGD without momentum is the gradient's opposite."""
    model = Net()
    with ModuleMonitor(rules=Rule(kinds="update", statistics="cosine_to_gradient")) as monitor:
        records, _truths = train(model, SGD(model.parameters(), lr=0.1), monitor)
    for record in records:
        cosines = [value for key, value in record.values.items() if key.endswith("cosine_to_gradient")]
        assert cosines == [pytest.approx(1.0, abs=1e-6)] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    """States and updates of the parameter's dtype; the update before is rounded to it."""
    model = Net().to(dtype)
    x = batch(0)[0].to(dtype)
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.5)
    previous: dict[str, Tensor] = {}
    with ModuleMonitor(rules=RULES, on_error="raise") as monitor:
        monitor.set_module(model)
        for step in range(3):
            monitor.begin_step(step)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            monitor.monitor_parameters()
            before = {name: parameter.detach().clone().double() for name, parameter in model.named_parameters()}
            optimizer.step()
            monitor.monitor_updates(optimizers=[optimizer])
            record = record_of(monitor)
            for name, parameter in model.named_parameters():
                update = parameter.detach().double() - before[name]
                assert parameter.grad is not None
                values = {key.rpartition("/")[2]: value for key, value in record.values.items() if key.startswith(f"update/{name}/")}
                assert values["cosine_to_gradient"] == pytest.approx(cosine(-update, parameter.grad), abs=1e-6, nan_ok=True)
                expected = cosine(update, previous[name]) if name in previous else math.nan
                assert values["cosine_to_previous"] == pytest.approx(expected, abs=1e-2, nan_ok=True)
                kept = optimizer.state[parameter]["momentum_buffer"]
                value = record.values[f"{STATES}/{name}.momentum_buffer/norm"]
                assert value == pytest.approx(float(kept.double().norm()), rel=1e-6)
                previous[name] = update


def kept_bytes(monitor: ModuleMonitor) -> int:
    """The bytes of the updates that wait for the next monitored step."""
    return sum(update.nbytes for update in monitor.engine.model.previous_updates._kept.values())


def test_one_update_is_kept_in_the_dtype_of_the_parameter() -> None:
    """For cosine_to_previous as many bytes as the parameters have; for nothing else any."""
    for rules, copies in ((RULES, 1), ([Rule(kinds=["update", STATES], statistics=["norm", "cosine_to_gradient"])], 0)):
        for dtype in (torch.float32, torch.bfloat16):
            model = Net().to(dtype)
            with in_step(model, rules=rules) as monitor:
                monitor.monitor_parameters()
                monitor.monitor_updates(optimizers=SGD(model.parameters(), momentum=0.9))
                monitor.end_step()
                assert kept_bytes(monitor) == copies * sum(parameter.nbytes for parameter in model.parameters())


def test_unmonitored_steps_are_passed_over() -> None:
    """The cosine is with the update of the monitored step before, also where rules have schedules of their own."""
    rules = [
        Rule(kinds="update", statistics="cosine_to_previous", every_n_steps=2),
        Rule(kinds="parameter", statistics="norm", every_n_steps=3),
    ]
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    updates, cosines = [], []
    with ModuleMonitor([100], rules=rules) as monitor:
        monitor.set_module(model)
        for step in range(7):
            monitor.begin_step(step)
            optimizer.zero_grad()
            x, y = batch(step)
            F.cross_entropy(model(x), y).backward()
            before = model.fc.weight.detach().clone()
            monitor.monitor_parameters()
            optimizer.step()
            updates.append(model.fc.weight.detach().double() - before.double())
            record = monitor.end_step()
            if record is not None and "update/fc.weight/cosine_to_previous" in record.values:
                cosines.append(record.values["update/fc.weight/cosine_to_previous"])
    expected = [math.nan, *(cosine(updates[step], updates[step - 2]) for step in (2, 4, 6))]
    assert cosines == pytest.approx(expected, abs=1e-6, nan_ok=True)


def together(truth: Truth, kind: str, picked: Callable[[str], bool], row: int) -> Tensor:
    """One flat tensor in float64 of several; zeros for one that there is not."""
    chosen = [tensors for (known, site), tensors in truth.items() if known == kind and picked(site)]
    return torch.cat([torch.zeros_like(one[0]).double().flatten() if one[row] is None else one[row].double().flatten() for one in chosen])


@pytest.mark.parametrize("name", ["AdamW", "AdamW, amsgrad", "SGD", "Lion"])
def test_all_states_of_a_module_are_one_tensor(name: str) -> None:
    """With per_module states have a total for each of their names, and the cosines of totals are those of the flat tensors."""
    make, states = MADE[name]
    model = Net()
    rules = [
        Rule(kinds=STATES, per_module=["_root_", "head"], statistics=["norm", "mean", "hist", "cosine_to_gradient"]),
        Rule(kinds="update", per_module=["_root_", "head"], statistics=["ratio", "cosine_to_gradient", "cosine_to_previous"]),
        Rule(kinds=STATES, sites="fc.*", statistics="max"),
    ]
    with ModuleMonitor(rules=rules, on_error="raise") as monitor:
        records, truths = train(model, make(model), monitor)
    for record, truth in zip(records, truths, strict=True):
        sites = {key.split("/")[1] for key in record.values if key.startswith((STATES, "update"))}
        modules = ("_root_", "head")
        assert sites == {*modules, *(f"{module}.{state}" for module in (*modules, "fc.weight") for state in states)}
        for module in modules:
            inside = "" if module == "_root_" else f"{module}."
            for state in states:
                tensor, gradient = (
                    together(
                        truth, STATES, lambda site, inside=inside, state=state: site.startswith(inside) and site.endswith(f".{state}"), row
                    )
                    for row in (0, 1)
                )
                values = {key.rpartition("/")[2]: value for key, value in record.values.items() if f"/{module}.{state}/" in key}
                assert values["norm"] == pytest.approx(float(tensor.norm()), rel=1e-6)
                assert values["mean"] == pytest.approx(float(tensor.mean()), rel=1e-5, abs=1e-9)
                assert values["cosine_to_gradient"] == pytest.approx(cosine(tensor, gradient), abs=1e-6)
                assert record.histograms[f"{STATES}/{module}.{state}/hist"].row.sum() == len(tensor)
            update, gradient, previous = (
                together(truth, "update", lambda site, inside=inside: site.startswith(inside), row) for row in range(3)
            )
            values = {key.rpartition("/")[2]: value for key, value in record.values.items() if f"update/{module}/" in key}
            assert values["cosine_to_gradient"] == pytest.approx(cosine(update, gradient), abs=1e-6)
            assert values["cosine_to_previous"] == pytest.approx(cosine(update, previous), abs=1e-6, nan_ok=True)


def test_patterns_select_the_states_of_a_total() -> None:
    """By the names of states; a parameter that has no such state counts nothing."""
    assert patterns(Rule(kinds=STATES, sites=".*exp_avg", per_module="_root_", statistics="norm")) == {"_root_.exp_avg/norm"}
    assert patterns(Rule(kinds=STATES, exclude=".*exp_avg", per_module="fc", statistics="norm")) == {"fc.exp_avg_sq/norm"}
    assert patterns(
        Rule(kinds=STATES, sites=r"head\..*exp_avg", per_module="_root_", statistics="norm"),
        Rule(kinds=STATES, sites=r".*_sq", per_module="_root_", statistics="max"),
    ) == {"_root_.exp_avg/norm", "_root_.exp_avg_sq/max"}


# Names


def patterns(*rules: Rule) -> set[str]:
    """The sites of states that rules record with AdamW."""
    model = Net()
    with ModuleMonitor(rules=rules, on_error="raise") as monitor:
        records, _truths = train(model, AdamW(model.parameters()), monitor, num_steps=2)
    keys = [{key for key in record.values if key.startswith(STATES)} for record in records]
    assert keys[0] == keys[1]
    return {key.removeprefix(f"{STATES}/") for key in keys[0]}


def test_patterns_match_a_parameter_or_a_state() -> None:
    """Rules of a parameter's states add up, and exclude leaves out parameters, modules and states."""
    assert patterns(Rule(kinds=STATES, sites=r"head\.bias", statistics="norm")) == {"head.bias.exp_avg/norm", "head.bias.exp_avg_sq/norm"}
    assert patterns(Rule(kinds=STATES, sites=r".*weight\.exp_avg", statistics="norm")) == {
        "fc.weight.exp_avg/norm", "head.weight.exp_avg/norm",
    }  # fmt: skip
    assert patterns(
        Rule(kinds=STATES, sites="fc.*", statistics="norm"), Rule(kinds=STATES, sites=".*_sq", exclude="head|scale", statistics="max")
    ) == {"fc.weight.exp_avg/norm", "fc.weight.exp_avg_sq/norm", "fc.weight.exp_avg_sq/max"}
    assert patterns(Rule(kinds=STATES, exclude=[r".*exp_avg", "head"], statistics="rms")) == {
        "fc.weight.exp_avg_sq/rms", "scale.exp_avg_sq/rms",
    }  # fmt: skip
    assert patterns(Rule(kinds=STATES, types=nn.Linear, sites=".*exp_avg", statistics="rms")) == {
        f"{name}.exp_avg/rms" for name in ("fc.weight", "head.weight", "head.bias")
    }


def test_the_monitors_own_exclude_leaves_out_states() -> None:
    """Of modules, and by the names of states."""
    model = Net()
    with ModuleMonitor(rules=Rule(kinds=STATES, statistics="norm"), exclude=["head", ".*_sq"]) as monitor:
        records, _truths = train(model, AdamW(model.parameters()), monitor, num_steps=1)
    assert {key for key in records[0].values if key.startswith(STATES)} == {
        f"{STATES}/fc.weight.exp_avg/norm",
        f"{STATES}/scale.exp_avg/norm",
    }


@pytest.mark.parametrize("option", ["sites", "exclude"])
def test_a_pattern_that_matches_nothing_waits_and_then_warns(option: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once, after the first step with states, with a pattern that matches; one that matches a state never does."""
    model = Net()
    patterns = [r".*exp_avg", "exp_avg_sq", *([".*"] if option == "sites" else [])]
    rules = [Rule(kinds=STATES, statistics="norm", **{option: patterns})]
    with ModuleMonitor(rules=rules, on_error="raise") as monitor:
        optimizer = AdamW(model.parameters())
        monitor.set_module(model)
        assert caplog.records == []
        monitor.close()
        train(model, optimizer, monitor, num_steps=3)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"rules[0].{option} 'exp_avg_sq' matches none of 12 names of parameters and of their states as a whole; "
        "'.*exp_avg_sq.*' matches 4 of them."
    )


def test_many_patterns_that_match_no_state_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """With the first three, the number of the others, and the nearest names."""
    model = Net()
    rules = [Rule(kinds=STATES, statistics="norm", sites=[".*", *(f"head.{number}.exp_avg" for number in range(3_000))])]
    with ModuleMonitor(rules=rules, on_error="raise") as monitor:
        train(model, AdamW(model.parameters()), monitor, num_steps=3)
    assert [record.getMessage() for record in caplog.records] == [
        "rules[0].sites 'head.0.exp_avg', 'head.1.exp_avg', 'head.2.exp_avg' and 2997 more match none of 12 names of parameters "
        "and of their states; nearest: 'head.bias.exp_avg'."
    ]


def test_a_pattern_may_name_a_state_by_any_name_of_its_parameter(caplog: pytest.LogCaptureFixture) -> None:
    """A tied weight has two names, and its key has the first."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    with ModuleMonitor(rules=Rule(kinds=STATES, sites=r"1\.weight\.exp_avg", statistics="norm"), on_error="raise") as monitor:
        records, truths = train(model, AdamW(model.parameters()), monitor, num_steps=1)
    assert {key: value for key, value in records[0].values.items() if key.startswith(STATES)} == {
        f"{STATES}/0.weight.exp_avg/norm": pytest.approx(float(truths[0][STATES, "0.weight.exp_avg"][0].norm()), rel=1e-6)
    }
    assert caplog.messages == []


def test_keys_of_states_are_not_planned() -> None:
    """They are known after the first step; those of cosines of updates are known before."""
    with ModuleMonitor(rules=[*RULES]) as monitor:
        monitor.set_module(Net())
        keys = monitor.planned_keys()
        assert not any(key.startswith(STATES) for key in keys)
        assert "update/fc.weight/cosine_to_previous" in keys
        assert not monitor.engine.model.planner.plan().knows_all_keys(STATES)
        assert monitor.engine.model.planner.plan().knows_all_keys("update")


# What is not recorded


class Odd(Optimizer):
    """Keeps what is not floating, and a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "state1": torch.zeros(parameter.shape, dtype=torch.uint8),
                    "absmax": torch.zeros(7),
                    "history": [torch.zeros_like(parameter)],
                    "exp_avg": torch.ones_like(parameter),
                    "count": 3,
                    "none": None,
                    "beta": torch.tensor(0.5),
                }


def test_states_that_are_not_floating_or_of_other_shapes_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """In one line each; the others are recorded."""
    caplog.set_level(logging.INFO)
    model = nn.Linear(2, 3)
    with ModuleMonitor(rules=Rule(kinds=STATES, statistics="norm"), on_error="raise") as monitor:
        records, _truths = train(nn.Sequential(nn.Linear(6, 2), model), Odd(model.parameters()), monitor, num_steps=2)
    assert {key for key in records[1].values if key.startswith(STATES)} == {
        f"{STATES}/1.{name}.exp_avg/norm" for name in ("weight", "bias")
    }
    assert [record.getMessage() for record in caplog.records] == [
        "1.weight.state1, 1.bias.state1: optimizer states of dtype torch.uint8 are not recorded; only real floating ones are.",
        "1.weight.absmax, 1.weight.history, 1.bias.absmax and 1 more: "
        "optimizer states of another shape than their parameter are not recorded.",
    ]


def test_lbfgs_has_no_states_of_parameters(caplog: pytest.LogCaptureFixture) -> None:
    """It keeps what it needs of all parameters together, in one vector."""
    caplog.set_level(logging.INFO)
    model = Net()
    optimizer = LBFGS(model.parameters())
    with ModuleMonitor(rules=Rule(kinds=[STATES, "update"], statistics="norm"), on_error="raise") as monitor:
        monitor.set_module(model)
        x, y = batch(0)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        monitor.begin_step(0)
        monitor.monitor_parameters()
        optimizer.step(closure)
        monitor.monitor_updates(optimizers=optimizer)
        record = record_of(monitor)
    assert not any(key.startswith(STATES) for key in record.values)
    assert record.values["update/fc.weight/norm"] > 0
    assert re.search(r"d, .*optimizer states of another shape", caplog.text)
    assert "LBFGS keeps no tensors of the shapes of its parameters; there is nothing to record." in caplog.text


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="this torch has no Adafactor")
def test_factored_states_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Adafactor keeps factors of matrices, and vectors whole."""
    caplog.set_level(logging.INFO)
    model = Net()
    with ModuleMonitor(rules=Rule(kinds=STATES, statistics="norm"), on_error="raise") as monitor:
        records, _truths = train(model, torch.optim.Adafactor(model.parameters()), monitor, num_steps=2)
    assert {key for key in records[1].values if key.startswith(STATES)} == {
        f"{STATES}/{name}.variance/norm" for name in ("head.bias", "scale")
    }
    assert "fc.weight.row_var, fc.weight.col_var" in caplog.text


def test_an_optimizer_without_states_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """SGD without momentum; and a loop that gives no optimizer."""
    model = Net()
    with ModuleMonitor(rules=Rule(kinds=STATES, statistics="norm"), on_error="raise") as monitor:
        train(model, SGD(model.parameters()), monitor, num_steps=3)
    expected = f"{STATES}: SGD keeps no tensors of the shapes of its parameters; there is nothing to record."
    assert [record.getMessage() for record in caplog.records] == [expected]
    caplog.clear()
    with ModuleMonitor(rules=Rule(kinds=STATES, statistics="norm"), on_error="raise") as monitor:
        monitor.set_module(model)
        for step in range(2):
            monitor.begin_step(step)
            monitor.end_step()
    expected = f"{STATES}: no optimizer was given; expected monitor_updates(optimizers=optimizer) after its step."
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_sparse_gradients_and_frozen_parameters() -> None:
    """A sparse gradient is compared as a dense one; what has no gradient has a cosine that is undefined, and no states."""
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    model[1].requires_grad_(False)
    optimizer = SparseAdam([model[0].weight])
    with in_step(model, rules=RULES, on_error="raise") as monitor:
        model(torch.tensor([1, 3, 3])).square().sum().backward()
        before = model[0].weight.detach().clone()
        monitor.monitor_parameters()
        optimizer.step()
        monitor.monitor_updates(optimizers=optimizer)
        record = record_of(monitor)
    gradient = model[0].weight.grad.to_dense()
    update = model[0].weight.detach().double() - before.double()
    assert record.values["update/0.weight/cosine_to_gradient"] == pytest.approx(cosine(-update, gradient), abs=1e-6)
    assert record.values[f"{STATES}/0.weight.exp_avg/cosine_to_gradient"] == pytest.approx(1.0, abs=1e-6)
    assert math.isnan(record.values["update/1.weight/cosine_to_gradient"])
    assert {key.split("/")[1] for key in record.values if key.startswith(STATES)} == {"0.weight.exp_avg", "0.weight.exp_avg_sq"}
    assert record.values["monitor/errors"] == 0


def test_an_optimizer_of_other_parameters_is_not_said_to_keep_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A GAN has two, of which the monitored part has one."""
    model, other = Net(), nn.Linear(6, 1)
    optimizers = [AdamW(other.parameters()), AdamW(model.parameters())]
    with ModuleMonitor(rules=Rule(kinds=STATES, statistics="norm"), on_error="raise") as monitor:
        monitor.set_module(model)
        x, y = batch(0)
        monitor.begin_step(0)
        (F.cross_entropy(model(x), y) + other(x).mean()).backward()
        monitor.monitor_parameters()
        for optimizer in optimizers:
            optimizer.step()
            monitor.monitor_updates(optimizers=optimizer)
        record = record_of(monitor)
    assert sum(key.endswith(".exp_avg/norm") for key in record.values) == len([*model.parameters()])
    assert "keeps no tensors" not in caplog.text
