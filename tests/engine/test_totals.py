"""``per_module``: all picked parameters inside a module count as one tensor, whatever the model, compared with one flat tensor."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.operations import no_host_reads
from helpers.plain_steps import in_step, record_of
from helpers.textbook import PLAIN, histogram, slack, textbook
from torch import Tensor, nn

from lightning_module_monitor import ModuleMonitor, Record, Rule

KINDS = ["gradient", "parameter", "update"]
NAMES = [name for name in PLAIN if not name.startswith("token")]
TOTAL = Rule(kinds=KINDS, statistics=[*NAMES, "hist"], per_module="_root_")


class Tied(nn.Module):
    """A weight with two names, a frozen layer, a layer without a gradient, a bare and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 4, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(6, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.embedding(x))
        for block in self.blocks:
            h = block(h).tanh()
        return self.scale * (h @ self.head.weight) + self.none.sum()


def tied() -> Tied:
    """The model, always the same."""
    torch.manual_seed(0)
    return Tied()


def step(model: nn.Module, rules: list[Rule], **options: Any) -> tuple[Record, dict[str, dict[str, Tensor]]]:
    """A step of plain training: its record; and by kind and by name the tensors that it is about, in float64."""
    torch.manual_seed(1)
    before = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], 0.5)
    with ModuleMonitor(rules=rules, **options) as monitor:
        monitor.set_module(model)
        if any("parameter_difference" in rule.kinds for rule in rules):
            reference = copy.deepcopy(model)
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.mul_(0.9).add_(0.01)
            monitor.set_reference_module(reference)
        monitor.begin_step(0)
        with no_host_reads():
            model(torch.randn(5, 6)).square().mean().backward()
            monitor.monitor_gradients()
            monitor.monitor_parameters()
            optimizer.step()
        gradients = {name: parameter.grad.double().clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        record = record_of(monitor)
    updates = {name: parameter.detach().double() - before[name] for name, parameter in model.named_parameters()}
    return record, {"parameter": before, "gradient": gradients, "update": updates}


def flat(tensors: dict[str, Tensor], inside: Iterable[str] = ("",)) -> Tensor:
    """All elements of the tensors whose names begin like this."""
    return torch.cat([tensor.flatten() for name, tensor in tensors.items() if name.startswith(tuple(inside))])


def assert_total(record: Record, kind: str, site: str, whole: Tensor, names: Iterable[str] = NAMES) -> None:
    """Every statistic is that of one tensor."""
    for name in names:
        near = 1e-6 * slack(name, whole)
        assert record.values[f"{kind}/{site}/{name}"] == pytest.approx(textbook(name, whole), rel=2e-6, abs=near), f"{kind} {site} {name}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_statistic_of_the_whole_model_is_that_of_one_flat_tensor(kind: str) -> None:
    """A tied weight counts once, a frozen one in ``parameter`` and in ``update`` as 0, and one without a gradient not in ``gradient``."""
    record, tensors = step(tied(), [TOTAL])
    whole = flat(tensors[kind])
    assert_total(record, kind, "_root_", whole)
    counts = record.histograms[f"{kind}/_root_/hist"].counts
    assert abs(counts - histogram(whole.float()).counts).sum() <= (2 if kind == "update" else 0)  # an update in float32 is rounded
    assert counts.sum() == whole.numel()
    assert record.values["monitor/errors"] == 0


@pytest.mark.parametrize("kind", ["gradient", "parameter"])
def test_what_fine_counts_give_is_that_of_one_flat_tensor(kind: str) -> None:
    """Quantiles within their bound, and what casts lose exactly, of the whole model and of blocks that count beside each other."""
    names = {"p05": 0.05, "median": 0.5, "p95": 0.95}
    rule = Rule(
        kinds=KINDS, statistics=[*names, "underflow_float8_e4m3fn", "dynamic_range", "peak_to_rms"], per_module=["_root_", "blocks"]
    )
    record, tensors = step(tied(), [rule])
    for site, whole in (("_root_", flat(tensors[kind])), ("blocks", flat(tensors[kind], ["blocks."]))):
        for name, share in names.items():
            truth = np.quantile(whole.numpy(), share, method="inverted_cdf")
            assert record.values[f"{kind}/{site}/{name}"] == pytest.approx(truth, rel=0.045), (site, name)
        values, magnitudes = whole.float(), whole.abs()[whole != 0]
        lost = (values.to(torch.float8_e4m3fn).float() == 0) & (values != 0)
        assert record.values[f"{kind}/{site}/underflow_float8_e4m3fn"] == pytest.approx(float(lost.sum()) / len(magnitudes))
        assert record.values[f"{kind}/{site}/dynamic_range"] == pytest.approx(float((magnitudes.max() / magnitudes.min()).log2()), abs=0.13)
        assert record.values[f"{kind}/{site}/peak_to_rms"] == pytest.approx(
            float(whole.abs().max() / whole.square().mean().sqrt()), rel=1e-6
        )


def test_only_the_whole_is_recorded() -> None:
    """Parameters that a total needs have no keys of their own."""
    record, _tensors = step(tied(), [TOTAL])
    assert {key.split("/")[1] for key in {*record.values, *record.histograms}} == {"_root_", "errors"}


@pytest.mark.parametrize(
    ("pattern", "sites"),
    [
        (r"blocks\.\d", {"blocks.0": ["blocks.0."], "blocks.1": ["blocks.1."]}),
        ("blocks", {"blocks": ["blocks."]}),
        ("head|embedding", {"embedding": ["embedding."], "head": ["embedding."]}),
        (["frozen", "unused"], {"frozen": ["frozen."], "unused": ["unused."]}),
    ],
)
def test_a_module_has_the_parameters_inside_of_it(pattern: Any, sites: dict[str, list[str]]) -> None:
    """Containers, too; a tied weight is inside of both modules; a module without values of a kind has no key of it."""
    record, tensors = step(tied(), [Rule(kinds=KINDS, statistics=["norm", "std"], per_module=pattern)])
    for kind in KINDS:
        for site, inside in sites.items():
            names = [name for name in tensors[kind] if name.startswith(tuple(inside))]
            assert (f"{kind}/{site}/norm" in record.values) == bool(names), f"{kind} {site}"
            if names:
                assert_total(record, kind, site, flat(tensors[kind], inside), ["norm", "std"])
    assert len({key.split("/")[1] for key in record.values} - {"errors"}) == len(sites)


def test_a_rule_counts_what_it_picks() -> None:
    """``sites``, ``exclude`` and ``types`` select parameters before they are counted together."""
    rules = [
        Rule(kinds="gradient", sites=".*weight", exclude=r"blocks\.0", types=nn.Linear, statistics="norm", per_module="_root_"),
        Rule(kinds="gradient", sites=".*bias", statistics="rms", per_module="_root_"),
    ]
    record, tensors = step(tied(), rules)
    weights = torch.cat([tensors["gradient"][name].flatten() for name in ("embedding.weight", "blocks.1.weight")])
    biases = torch.cat([tensors["gradient"][name] for name in ("blocks.0.bias", "blocks.1.bias")])
    assert record.values["gradient/_root_/norm"] == pytest.approx(textbook("norm", weights), rel=2e-6)
    assert record.values["gradient/_root_/rms"] == pytest.approx(textbook("rms", biases), rel=2e-6)


def test_ratio_and_cosine_of_the_whole() -> None:
    """``ratio`` of an update is to all parameters, frozen ones included; ``cosine`` is between all weights and the reference's."""
    rules = [
        Rule(kinds=["update", "parameter_difference"], statistics=["ratio", "norm"], per_module=["_root_", "blocks"]),
        Rule(kinds="parameter_difference", statistics="cosine", per_module=["_root_", "blocks"]),
    ]
    record, tensors = step(tied(), rules)
    for site, inside in (("_root_", ""), ("blocks", "blocks")):
        weights = flat(tensors["parameter"], [inside])
        reference = weights.float().mul(0.9).add(0.01).double()
        update = flat(tensors["update"], [inside])
        assert record.values[f"update/{site}/ratio"] == pytest.approx(float(update.norm() / weights.norm()), rel=1e-5)
        difference = (weights - reference).norm()
        assert record.values[f"parameter_difference/{site}/norm"] == pytest.approx(float(difference), rel=1e-5)
        assert record.values[f"parameter_difference/{site}/ratio"] == pytest.approx(float(difference / reference.norm()), rel=1e-5)
        cosine = torch.dot(weights, reference) / weights.norm() / reference.norm()
        assert record.values[f"parameter_difference/{site}/cosine"] == pytest.approx(float(cosine), rel=1e-6)


def test_a_total_beside_the_values_of_each_parameter() -> None:
    """A parameter has its own statistics, and what totals need of it besides has no key."""
    rules = [Rule(kinds="gradient", statistics="abs_max"), Rule(kinds="gradient", statistics="norm", per_module="_root_")]
    record, tensors = step(tied(), rules)
    assert record.values["gradient/blocks.0.weight/abs_max"] == tensors["gradient"]["blocks.0.weight"].abs().max()
    assert record.values["gradient/_root_/norm"] == pytest.approx(float(flat(tensors["gradient"]).norm()), rel=1e-6)
    assert "gradient/blocks.0.weight/norm" not in record.values
    assert next(iter(record.values)) == "gradient/_root_/norm"


@pytest.mark.parametrize(
    ("options", "left_out"),
    [({"module": "blocks"}, lambda name: not name.startswith("blocks")), ({"exclude": "blocks"}, lambda name: name.startswith("blocks"))],
    ids=["module", "exclude"],
)
def test_root_is_what_is_monitored(options: dict[str, Any], left_out: Callable[[str], bool]) -> None:
    """Under ``module`` and ``exclude`` nothing else counts."""
    record, tensors = step(tied(), [Rule(kinds=KINDS, statistics="norm", per_module="_root_")], **options)
    for kind in KINDS:
        whole = torch.cat([tensor.flatten() for name, tensor in tensors[kind].items() if not left_out(name)])
        assert record.values[f"{kind}/_root_/norm"] == pytest.approx(float(whole.norm()), rel=1e-5)


def test_a_parameter_that_cannot_be_measured_makes_its_totals_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A total without it would look right; totals of other modules have their values."""
    model = tied()
    real = ModuleMonitor().access.gradient

    def gradient(parameter: Tensor) -> Tensor | None:
        found = real(parameter)
        return found.to("meta") if parameter is model.blocks[0].weight else found  # type: ignore[union-attr]

    rules = [Rule(kinds="gradient", statistics=["norm", "hist"], per_module=["_root_", r"blocks\.\d"])]
    monitor = ModuleMonitor(rules=rules)
    monkeypatch.setattr(monitor.access, "gradient", gradient)
    monitor.set_module(model)
    monitor.begin_step(0)
    model(torch.randn(5, 6)).square().mean().backward()
    monitor.monitor_gradients()
    record = record_of(monitor)
    monitor.close()
    assert math.isnan(record.values["gradient/_root_/norm"])
    assert math.isnan(record.values["gradient/blocks.0/norm"])
    assert record.values["gradient/blocks.1/norm"] > 0
    assert {*record.histograms} == {"gradient/blocks.1/hist"}
    assert record.values["monitor/errors"] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_elements_that_are_not_finite_are_never_hidden(bad: float) -> None:
    """They are counted, and the norm is not finite."""
    model = tied()
    with torch.no_grad():
        model.unused.bias[1] = bad
    record, _tensors = step(model, [Rule(kinds="parameter", statistics=["norm", "nonfinite_count"], per_module=["_root_", "blocks"])])
    assert record.values["parameter/_root_/nonfinite_count"] == 1
    assert not math.isfinite(record.values["parameter/_root_/norm"])
    assert math.isfinite(record.values["parameter/blocks/norm"])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_magnitudes_whose_squares_leave_float32(scale: float) -> None:
    """The norm of all is right."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    with in_step(model, rules=[Rule(kinds="parameter", statistics="norm", per_module="_root_")]) as monitor:
        monitor.monitor_parameters()
        record = record_of(monitor)
    whole = torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
    assert record.values["parameter/_root_/norm"] == pytest.approx(float(whole.norm()), rel=1e-6)


def test_sparse_gradients_and_complex_parameters() -> None:
    """A sparse gradient counts as the tensor that it is; parameters that are not real do not count."""
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 2))
    model.register_parameter("phase", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    with in_step(model, rules=[Rule(kinds=["gradient", "parameter"], statistics="norm", per_module="_root_")]) as monitor:
        model(torch.tensor([1, 1, 4])).square().sum().backward()
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        record = record_of(monitor)
    real = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    gradient = torch.cat([parameter.grad.to_dense().double().flatten() for parameter in real if parameter.grad is not None])
    assert record.values["gradient/_root_/norm"] == pytest.approx(float(gradient.norm()), rel=1e-6)
    weights = torch.cat([parameter.detach().double().flatten() for parameter in real])
    assert record.values["parameter/_root_/norm"] == pytest.approx(float(weights.norm()), rel=1e-6)


def test_lazy_layers_and_parameters_of_two_optimizers() -> None:
    """A layer that gets its shape in the first batch counts from then on; parts of the parameters may be observed one after the other."""
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with in_step(model, rules=[Rule(kinds="gradient", statistics="norm", per_module="_root_")]) as monitor:
        model(torch.randn(5, 6)).square().sum().backward()
        for layer in model:
            monitor.monitor_gradients(parameters=layer.parameters())
        record = record_of(monitor)
    gradient = torch.cat([parameter.grad.double().flatten() for parameter in model.parameters() if parameter.grad is not None])
    assert record.values["gradient/_root_/norm"] == pytest.approx(float(gradient.norm()), rel=1e-6)


def test_rules_with_schedules_of_their_own() -> None:
    """A total is recorded when its rule is due, and values of parameters when theirs is."""
    rules = [
        Rule(kinds="parameter", statistics="norm", every_n_steps=2),
        Rule(kinds="parameter", statistics="norm", per_module="_root_", every_n_steps=3),
    ]
    recorded = {}
    model = tied()
    with ModuleMonitor([0], rules=rules) as monitor:
        monitor.set_module(model)
        for number in range(7):
            monitor.begin_step(number)
            monitor.monitor_parameters()
            record = monitor.end_step()
            keys = () if record is None else record.values
            recorded[number] = ("parameter/_root_/norm" in keys, "parameter/scale/norm" in keys)
    assert recorded == {number: (number % 3 == 0, number % 2 == 0) for number in range(7)}
