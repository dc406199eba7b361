"""The reference in a plain loop: differences against raw tensors in float64, and a model that trains as without a monitor."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from helpers.memory import peak_bytes
from helpers.plain_steps import in_step, record_of, run_both
from helpers.textbook import textbook
from helpers.zoo import EXPECTED_OUTPUTS, ZOO, batches, make
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanSquaredError
from torchmetrics.regression import CosineSimilarity

from lightning_module_monitor import ModuleMonitor, RefinedCoordinateCheck, Rule
from lightning_module_monitor.model.copies import frozen_copy

STATISTICS = ["mean", "std", "norm", "rms", "max", "abs_mean", "token_norm", "ratio", "cosine"]


def moved(model: nn.Module) -> nn.Module:
    """The same model after some training."""
    generator = torch.Generator().manual_seed(7)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return other


def raw_outputs(model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> dict[str, list[Tensor]]:
    """Every floating output of a copy of the model, by site, under the random numbers of seed 5."""
    model = copy.deepcopy(model)
    raw: dict[str, list[Tensor]] = {}
    names = {module: name or "_root_" for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}

    def keep(module: nn.Module, _args: object, output: Any) -> None:
        site = names[module]
        parts = [("", output)] if isinstance(output, Tensor) else EXPECTED_OUTPUTS.get(site, lambda _output: [])(output)
        for suffix, tensor in parts:
            if tensor.is_floating_point():
                raw.setdefault(site + suffix, []).append(tensor.detach().double().clone())

    for module in model.modules():
        module.register_forward_hook(keep)
    torch.manual_seed(5)
    for x, _y in micro_batches:
        model(x)
    return raw


def expected_statistics(current: list[Tensor], reference: list[Tensor]) -> dict[str, float]:
    """Every statistic of a difference by its formula, in numpy's float64."""
    both = [torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]) for tensors in (current, reference)]
    difference = both[0] - both[1]
    a, b = (tensor.numpy().ravel() for tensor in both)
    values = {name: textbook(name, difference) for name in STATISTICS if name not in ("ratio", "cosine")}
    with np.errstate(all="ignore"):
        return values | {"ratio": np.linalg.norm(a - b) / np.linalg.norm(b), "cosine": a @ b / np.linalg.norm(a) / np.linalg.norm(b)}


@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_every_statistic_of_every_difference(name: str, cpu_offload: bool) -> None:
    """All sites, dropout, in-place layers, shared modules, odd outputs, two micro-batches: equal to two separate runs."""
    reference = make(name)
    model = moved(reference)
    micro_batches = batches(3, 5)
    current, other = raw_outputs(model, micro_batches), raw_outputs(reference, micro_batches)
    rules = [Rule(kinds=["activation_difference", "parameter_difference"], statistics=STATISTICS)]
    with ModuleMonitor(rules=rules, cpu_offload=cpu_offload, on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        torch.manual_seed(5)
        monitor.begin_step(0)
        for x, _y in micro_batches:
            run_both(monitor, reference, model, x)
            monitor.after_micro_batch()
        monitor.monitor_parameters()
        record = record_of(monitor)
    pairs = {f"activation_difference/{site}": (current[site], other[site]) for site in current if site != "empty"}
    for site, parameter in model.named_parameters():
        pairs[f"parameter_difference/{site}"] = ([parameter.detach().double()], [reference.get_parameter(site).detach().double()])
    assert {key.rpartition("/")[0] for key in record.values if "/empty/" not in key} == {*pairs, "monitor"}
    for site, (tensors, references) in pairs.items():
        scale = max(float(tensor.abs().max()) for tensor in (*tensors, *references))
        for statistic, value in expected_statistics(tensors, references).items():
            # The rounding error of a small difference of large numbers is of the size of their last digits.
            assert record.values[f"{site}/{statistic}"] == pytest.approx(value, rel=2e-5, abs=2e-7 * scale, nan_ok=True), (site, statistic)


def test_differences_of_half_precision_are_not_rounded_again() -> None:
    """bfloat16 numbers that differ in their last bit: the difference is exact."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    reference = copy.deepcopy(model)
    model.weight.data.mul_(1 + 2**-7)
    with in_step(model, rules=Rule(kinds="parameter_difference", statistics=["norm", "cosine"]), reference=reference) as monitor:
        monitor.monitor_parameters()
        record = record_of(monitor)
    W, W0 = model.weight.detach().double(), reference.weight.detach().double()
    assert record.values["parameter_difference/weight/norm"] == pytest.approx(float((W - W0).norm()), rel=1e-6)
    assert record.values["parameter_difference/weight/cosine"] == pytest.approx(float((W * W0).sum() / W.norm() / W0.norm()), rel=1e-6)


@pytest.mark.filterwarnings("ignore:Metric `CosineSimilarity` will save:UserWarning")
def test_functions_get_both_tensors_and_torchmetrics_objects_pairs() -> None:
    """(current, reference), in this order; every element of all micro-batches."""
    reference = make("mlp")
    model = moved(reference)
    functions = {"of_current": lambda a, b: a.sum() + 0 * b.sum(), "mse": MeanSquaredError(), "cos": CosineSimilarity(reduction="mean")}
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.add_rules(Rule(kinds="activation_difference", sites="layers.0", functions=functions))
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        monitor.add_activation_difference_metric("asymmetric", lambda a, b: a - 2 * b, "layers.0")
        monitor.add_activation_difference_metric("norm", None, "layers")
        monitor.add_parameter_difference_metric("largest", lambda a, b: (a - b).abs().max())
        with pytest.raises(ValueError, match="metric 'norm' of kind 'activation_difference'"):
            monitor.add_activation_difference_metric("norm")
        monitor.begin_step(0)
        for x, _y in batches(3, 5):
            run_both(monitor, reference, model, x)
            monitor.after_micro_batch()
        monitor.monitor_parameters()
        values = monitor.end_step().values  # type: ignore[union-attr]
    a, b = (torch.cat([m.layers[0](x) for x, _y in batches(3, 5)]).detach().double() for m in (model, reference))  # type: ignore[index, operator]
    site = "activation_difference/layers.0"
    assert values[f"{site}/asymmetric"] == pytest.approx(float((a - 2 * b).mean()), rel=1e-5)
    assert values[f"{site}/mse"] == pytest.approx(float((a - b).square().mean()), rel=1e-5)
    assert values[f"{site}/cos"] == pytest.approx(float(F.cosine_similarity(a, b).mean()), rel=1e-5)
    assert values[f"{site}/norm"] == pytest.approx(float((a - b).norm()), rel=1e-5)
    W, W0 = model.get_parameter("layers.0.weight").detach(), reference.get_parameter("layers.0.weight").detach()
    assert values["parameter_difference/layers.0.weight/largest"] == pytest.approx(float((W - W0).abs().max()), rel=1e-6)


def test_misuse_of_the_reference_is_an_error() -> None:
    """No module, other names, other shapes; for a monitored submodule a reference of it or of the model."""
    monitor = ModuleMonitor()
    with pytest.raises(ValueError, match="no module that this could be the reference of"):
        monitor.set_reference_module(nn.Linear(2, 2))
    monitor.set_module(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    with pytest.raises(ValueError, match=r"not in both, or of different shapes: 2$"):
        monitor.set_reference_module(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.ReLU()))
    with pytest.raises(ValueError, match=r"different shapes: 0\.bias, 0\.weight$"):
        monitor.set_reference_module(nn.Sequential(nn.Linear(2, 4), nn.ReLU()))
    assert not monitor.has_reference_module()
    with pytest.raises(ValueError, match="There is no reference to run"), monitor.running_reference():
        pass
    monitor.set_reference_module(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    assert monitor.has_reference_module()
    monitor.remove_reference_module()
    assert not monitor.has_reference_module()
    within = ModuleMonitor(module="0")
    within.set_module(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    for fitting in (nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3), nn.ReLU())):
        within.set_reference_module(fitting)
    with pytest.raises(ValueError, match=r"different shapes: bias, weight$"):
        within.set_reference_module(nn.Linear(2, 4))


def test_without_a_reference_there_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    """A removed reference costs nothing; the log reports a reference that did not run, or ran too often."""
    model = make("mlp")
    reference = copy.deepcopy(model)
    monitor = ModuleMonitor(rules=Rule(kinds="activation_difference", statistics="norm", sites="layers.0"))
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    x = batches(4)[0][0]
    with caplog.at_level("INFO"):
        monitor.begin_step(0)
        assert monitor.engine.awaits_reference()
        model(x)
        assert monitor.end_step().values == {"monitor/errors": 0}  # type: ignore[union-attr]
        assert "The reference has not run before the model" in caplog.text
        monitor.begin_step(1)
        reference(x), reference(x)
        model(x)
        monitor.after_micro_batch()
        assert monitor.end_step().values == {"activation_difference/layers.0/norm": 0, "monitor/errors": 0}  # type: ignore[union-attr]
        assert "The reference ran modules more often than the model did; such calls are not compared: layers.0" in caplog.text
    monitor.remove_reference_module()
    monitor.begin_step(2)
    assert not monitor.engine.awaits_reference()
    assert not any(part._forward_hooks for part in reference.modules())
    model(x)
    assert monitor.end_step().values == {"monitor/errors": 0}  # type: ignore[union-attr]


def test_a_loop_of_another_stage_in_the_middle_of_a_step_is_not_compared() -> None:
    """A validation between two micro-batches, with the reference run in it as well."""
    model = make("mlp")
    reference = moved(model)
    records = []
    for validates in (False, True):
        with in_step(
            model, rules=Rule(kinds=["activation", "activation_difference"], statistics="norm"), on_error="raise", reference=reference
        ) as monitor:
            for seed, (x, _y) in enumerate(batches(3, 5)):
                torch.manual_seed(seed)
                with monitor.no_monitor():
                    reference(x)
                if validates:
                    monitor.engine.begin_stage("validation", 0)
                    with torch.no_grad(), torch.random.fork_rng():
                        reference(x * 2), model(x * 2)
                    monitor.engine.end_stage()
                model(x)
                monitor.after_micro_batch()
            records.append(monitor.end_step())
    assert records[0] == records[1]
    assert records[0] is not None
    assert records[0].values["activation_difference/layers.0/norm"] > 0


def test_memory_is_that_of_the_compared_activations() -> None:
    """12 layers whose outputs take 2 MB each: the extra peak is that of the compared outputs, and a few layers' work."""
    layer = 2**21
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(64, 64), nn.Tanh())))
    reference = frozen_copy(model)
    x = torch.randn(layer // 4 // 64, 64)

    def step(monitor: ModuleMonitor | None) -> None:
        if monitor is not None:
            monitor.begin_step(0)
        model(x).sum().backward()
        model.zero_grad()
        if monitor is not None:
            monitor.end_step()

    peaks = {"plain": peak_bytes(lambda: step(None))}
    rules_by_name: dict[str, list[Rule]] = {
        "one": [Rule(kinds="activation_difference", sites="20", statistics="ratio")],
        "linear": [Rule(kinds="activation_difference", types=nn.Linear, statistics="ratio")],
        "all": [Rule(kinds="activation_difference", leaf_modules=True, statistics="ratio")],
    }
    for name, rules in rules_by_name.items():
        with ModuleMonitor(rules=rules, on_error="raise") as monitor:
            monitor.set_module(model)
            monitor.set_reference_module(reference, follows=True)
            step(monitor)
            peaks[name] = peak_bytes(lambda monitor=monitor: step(monitor))  # type: ignore[misc]
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference, follows=True)
        RefinedCoordinateCheck(monitor)
        step(monitor)
        peaks["rcc"] = peak_bytes(lambda: step(monitor))
    extra = {name: (peak - peaks["plain"]) / layer for name, peak in peaks.items()}
    print(extra)
    assert peaks["plain"] > 12 * layer
    # Kept outputs are released while the model's activations grow.
    slack = 6  # the layer at work: its difference, a copy, the table's buffers
    assert extra["one"] <= 1 + slack
    assert extra["linear"] <= 12 + slack
    assert extra["all"] <= 24 + slack
    # Input and output of each Linear layer: an output of Tanh is the input of the next layer, and the first input is added.
    assert extra["rcc"] <= 24 + slack
    assert extra["one"] < extra["all"] or extra["all"] <= slack


class WritesInPlace(nn.Module):
    """Returns its input after several in-place operations."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Write into the input."""
        y = x * 2
        x = self.dropout(self.relu(x))
        x += y
        x[:, 0] = 0
        x.index_put_((torch.arange(len(x)),), torch.ones(x.shape), accumulate=True)
        return x.masked_fill_(x > 2, -1.0)


def test_large_tensors_are_written_in_place_by_several_threads() -> None:
    """Copies of the reference's tensors do not share memory that several threads write."""
    reference = nn.Sequential(nn.Linear(16, 256), WritesInPlace(), nn.Linear(256, 256), WritesInPlace())
    model = moved(reference)
    x = torch.randn(1024, 16)
    assert x.shape[0] * 256 > 4 * 32768  # elements that torch gives to one thread
    current, other = raw_outputs(model, [(x, x)]), raw_outputs(reference, [(x, x)])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ModuleMonitor(rules=[Rule(kinds=["activation_difference"], statistics=["norm"])], on_error="raise") as monitor:
            monitor.set_module(model)
            monitor.set_reference_module(reference)
            torch.manual_seed(5)
            monitor.begin_step(0)
            with torch.no_grad():
                reference(x)
            torch.manual_seed(5)
            model(x)
            record = record_of(monitor)
    finally:
        torch.set_num_threads(num_threads)
    for site, tensors in current.items():
        expected = textbook("norm", tensors[0] - other[site][0])
        assert record.values[f"activation_difference/{site}/norm"] == pytest.approx(expected, rel=1e-5)


def test_a_container_has_the_activation_of_its_last_part() -> None:
    """Also if the reference and the check measure other tensors between the two outputs, which are the same tensor."""
    reference = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    model = moved(reference)
    statistics = ["mean", "std", "norm", "max", "hist"]
    rules = [Rule(kinds="activation", statistics=statistics), Rule(kinds="activation_difference", statistics="norm")]
    with ModuleMonitor(rules=rules) as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        RefinedCoordinateCheck(monitor)
        monitor.begin_step(0)
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
        run_both(monitor, reference, model, x)
        record = record_of(monitor)
    output = model(x).detach()
    for site in ("1", "_root_"):
        for name in statistics[:-1]:
            assert record.values[f"activation/{site}/{name}"] == pytest.approx(textbook(name, output), rel=1e-6), (site, name)
        assert record.histograms[f"activation/{site}/hist"] == record.histograms["activation/1/hist"]


class Routed(nn.Module):
    """An expert whose number of tokens depends on a trained threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold, self.expert, self.head = nn.Parameter(torch.zeros(())), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > self.threshold
        output: Tensor = self.head(x)
        return output.sum() + self.expert(x[chosen]).sum()


def test_calls_with_other_token_counts_are_skipped_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Routed experts are not an error; calls with equal counts are compared."""
    torch.manual_seed(0)
    model = Routed()
    reference = copy.deepcopy(model)
    x = torch.linspace(-1, 1, 8).unsqueeze(1).repeat(1, 6)
    with ModuleMonitor(rules=[Rule(kinds="activation_difference", statistics="norm")], on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        is_compared = []
        for step, threshold in enumerate((0.0, 0.5, 0.5)):
            model.threshold.data.fill_(threshold)
            monitor.begin_step(step)
            with monitor.no_monitor():
                reference(x)
            with caplog.at_level("INFO"):
                model(x)
                record = record_of(monitor)
            assert record.values["monitor/errors"] == 0
            assert record.values["activation_difference/head/norm"] == 0
            is_compared.append("activation_difference/expert/norm" in record.values)
    assert is_compared == [True, False, False]
    assert sum("outputs of other shapes" in record.getMessage() for record in caplog.records) == 1


class BehindAHook(nn.Module):
    """A frozen embedding whose output a hook of another library makes differentiable, in front of a checkpointed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.layer, self.embedding(x), use_reentrant=True)
        return output


def test_a_checkpointed_reference_without_the_hooks_of_others_does_not_warn() -> None:
    """Warnings are errors here; Python's filters stay as they were."""
    model = BehindAHook()
    reference = copy.deepcopy(model)
    model.embedding.register_forward_hook(lambda _module, _args, output: output.requires_grad_())
    before = list(warnings.filters)
    with in_step(model, rules=[Rule(kinds="activation_difference", statistics="norm")], on_error="raise", reference=reference) as monitor:
        with monitor.no_monitor():
            reference(torch.ones(2, 6))
        model(torch.ones(2, 6)).sum().backward()
        record = record_of(monitor)
    assert record.values["activation_difference/layer/norm"] == 0
    assert list(warnings.filters) == before
