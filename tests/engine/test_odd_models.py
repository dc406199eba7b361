"""What odd models, functions and schedules did to an earlier state of the engine: each was found by trying to break it."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.plain_steps import in_step, record_of
from helpers.training import Classifier, loader, trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, Record, RefinedCoordinateCheck, Rule, load_store

RULES = [Rule(kinds=["activation", "activation_gradient"], statistics=["rms", "max"])]


class Returns(nn.Module):
    """A layer whose output is built by a function."""

    def __init__(self, build: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.build = build

    def forward(self, x: Tensor) -> Any:
        return self.build(self.inner(x))


def observe(model: nn.Module, *inputs: Tensor, rules: list[Rule] = RULES, call: Any = None) -> Record:
    """One step of forward passes."""
    with in_step(model, rules=rules) as monitor:
        for x in inputs:
            (call or model)(x)
        record = record_of(monitor)
    assert not any(module._forward_hooks for module in model.modules())
    return record


@dataclasses.dataclass
class Unset:
    """A dataclass that leaves a field unset."""

    a: Tensor
    b: Tensor = dataclasses.field(init=False)


def cyclic(y: Tensor) -> dict[str, Any]:
    """A dict that holds itself."""
    output: dict[str, Any] = {"x": y}
    output["self"] = output
    return output


def test_a_field_that_is_not_set_is_no_output() -> None:
    """The fields that are set have their values."""
    record = observe(Returns(Unset), torch.ones(2, 4))
    assert record.values["activation/_root_.output_a/rms"] == record.values["activation/inner/rms"] > 0
    assert record.values["monitor/errors"] == 0
    assert not any("output_b" in key for key in record.values)


def test_an_output_that_cannot_be_taken_apart_ends_nothing() -> None:
    """The module's values are NaN, the others' are there, and the failure is counted."""
    record = observe(Returns(cyclic), torch.ones(2, 4))
    assert math.isnan(record.values["activation/_root_/rms"])
    assert record.values["activation/inner/rms"] > 0
    assert record.values["monitor/errors"] > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")  # torch's encoder makes them
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_has_the_elements_of_its_parts(layout: torch.layout) -> None:
    """An encoder of torch's makes one in eval mode with a padding mask; it has no shape."""
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.full((3, 4), 2.0)], layout=layout)
    record = observe(nn.Identity(), nested)
    assert record.values["activation/_root_/rms"] == pytest.approx(math.sqrt((8 + 12 * 4) / 20))
    assert record.values["monitor/errors"] == 0


def test_a_container_of_what_could_not_be_measured_is_not_measured_either() -> None:
    """Memory was given back: NaN for the part and for the container that returns the same tensor, whatever comes after."""
    for num_calls in (1, 2):
        outputs = iter((given_back(), torch.ones(3, 4)))
        model = nn.Sequential(Returns(lambda _y, outputs=outputs: next(outputs)))
        record = observe(model, *[torch.ones(2, 4)] * num_calls)
        assert math.isnan(record.values["activation/0/rms"])
        assert math.isnan(record.values["activation/_root_/rms"])


def test_outputs_whose_names_look_alike_do_not_mix() -> None:
    """Each path to a tensor has a series of its own."""
    x = torch.ones(2, 4)
    record = observe(
        nn.Sequential(Returns(lambda y: {"a": {"b": y * 0 + 1}, "a_b": y * 0 + 2, 1: y * 0 + 3, "1": y * 0 + 4})), x, rules=RULES[:1]
    )
    largest = {key: value for key, value in record.values.items() if key.startswith("activation/0.output") and key.endswith("max")}
    assert largest == {
        "activation/0.output_a_b/max": 1.0,
        "activation/0.output_a_b_2/max": 2.0,
        "activation/0.output_1/max": 3.0,
        "activation/0.output_1_2/max": 4.0,
    }


def test_a_model_that_is_copied_or_pickled_in_a_monitored_step() -> None:
    """It works as without the monitor, and the copy is not watched."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with in_step(model, rules=[*RULES, Rule(kinds="activation", functions={"f": lambda x: x.mean()})]) as monitor:
        model(torch.ones(2, 4)).sum().backward()
        torch.save(model, io.BytesIO())
        twin = copy.deepcopy(model)
        twin(torch.full((2, 4), 100.0))
        record = record_of(monitor)
    expected = model(torch.ones(2, 4)).detach().max()
    assert record.values["activation/_root_/max"] == float(expected)
    assert record.values["monitor/errors"] == 0


@pytest.mark.parametrize("device", ["sparse", "meta"])
def test_an_odd_result_of_a_function_costs_its_own_value_only(device: str) -> None:
    """Sparse ones are made dense; one that has no data is refused, counted, and NaN."""

    def function(x: Tensor) -> Tensor:
        return x.abs().sum().to_sparse() if device == "sparse" else torch.empty((), device="meta")

    rule = Rule(kinds="activation", statistics="rms", functions={"f": function, "n": lambda x: np.int64(len(x))})
    record = observe(nn.Identity(), torch.full((2, 3), 2.0), rules=[rule])
    assert record.values["activation/_root_/rms"] == 2.0
    assert record.values["activation/_root_/n"] == 2.0
    value = record.values["activation/_root_/f"]
    assert value == 12.0 if device == "sparse" else math.isnan(value)
    assert record.values["monitor/errors"] == (0 if device == "sparse" else 1)


def test_a_function_may_call_the_model() -> None:
    """It is called once for each output of the step itself: what runs within it is not observed, and calls it no further."""
    model, calls = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]), []

    def again(_activation: Tensor) -> Tensor:
        calls.append(1)
        output: Tensor = model(torch.ones(2, 4))
        return output.mean()

    rules = [Rule(kinds="activation", statistics="rms"), Rule(kinds="activation", functions={"again": again})]
    x = torch.randn(3, 4)
    values = observe(model, x, rules=rules).values
    assert len(calls) == 7
    assert values["activation/3/again"] == pytest.approx(model(torch.ones(2, 4)).mean().item(), rel=1e-6)
    assert values["activation/_root_/rms"] == pytest.approx(model(x).square().mean().sqrt().item(), rel=1e-6)
    assert values["monitor/errors"] == 0


def test_parameters_that_cannot_be_read_are_nan_and_not_zero() -> None:
    """One without data (on the meta device): no value of the kind is made up, activations are there, it is counted."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_parameter("absent", nn.Parameter(torch.empty(3, device="meta")))
    with in_step(model, rules=[Rule(kinds=["activation", "parameter"], statistics=["norm", "nonfinite_count"])]) as monitor:
        model(torch.ones(2, 4))
        monitor.monitor_parameters()
        record = record_of(monitor)
    assert record.values["activation/0/norm"] > 0
    of_parameters = {key: math.isnan(value) for key, value in record.values.items() if key.startswith("parameter/")}
    assert len(of_parameters) == 6
    assert all(is_nan == ("absent" in key) for key, is_nan in of_parameters.items())
    assert record.values["monitor/errors"] == 1


def test_the_default_device_is_not_the_monitors() -> None:
    """Somebody sets one for new tensors; those of the monitor stay where they belong."""
    torch.set_default_device("meta")
    try:
        record = observe(nn.Identity(), torch.full((2, 3), 2.0, device="cpu"), rules=[Rule(kinds="activation", statistics="rms")])
    finally:
        torch.set_default_device(None)
    assert record.values == {"activation/_root_/rms": 2.0, "monitor/errors": 0.0}


def test_a_schedule_that_raises_is_said_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It means that the step is not monitored."""
    callback = ModuleMonitorCallback(every_n_steps=lambda step: 1 // (step - 1) > 0, store=False)
    run = trainer(tmp_path, [callback], max_steps=4)
    run.fit(Classifier("mlp"), loader(), loader(8))
    assert run.global_step == 4
    assert callback.last_record is not None
    assert callback.last_record.step == 2
    reason = "ZeroDivisionError: integer division or modulo by zero"
    expected = f"every_n_steps failed at step 1 ({reason}): no rule is due in such a step. Logged once."
    assert [message for message in caplog.messages if "every_n_steps failed" in message] == [expected]


def test_a_scripted_part_is_passed_over() -> None:
    """It has neither Python hooks nor Python parameters."""
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        scripted = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(scripted, nn.Linear(4, 4))
    record = observe(model, torch.ones(2, 4), rules=[Rule(kinds=["activation", "parameter"], statistics="rms")])
    assert {key.split("/")[1] for key in record.values if key.startswith("activation")} == {"1", "_root_"}


def test_layers_of_configure_model_are_watched_outside_of_fit_too(tmp_path: Path) -> None:
    """And a rule that matches nothing is refused there."""

    class Configured(Classifier):
        def configure_model(self) -> None:
            self.late = nn.Identity()

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.late(torch.full((2,), 7.0))

    callback = ModuleMonitorCallback(rules=[Rule(kinds="activation", sites="late", statistics="max")], stages="validate", store=False)
    trainer(tmp_path, [callback]).validate(Configured("mlp"), loader(8), verbose=False)
    assert callback.last_record is not None
    assert callback.last_record.values["validation/activation/late/max"] == 7.0
    wrong = ModuleMonitorCallback(rules=[Rule(kinds="activation", sites="lste", statistics="max")], stages="validate", store=False)
    with pytest.raises(ValueError, match="matches none of"):
        trainer(tmp_path, [wrong]).validate(Configured("mlp"), loader(8), verbose=False)


def test_a_path_object_is_a_path(tmp_path: Path) -> None:
    """As a text is."""
    callback = ModuleMonitorCallback(1, store=tmp_path / "mine.h5")  # type: ignore[arg-type]  # a text in YAML
    trainer(tmp_path, [callback], max_steps=2).fit(Classifier("mlp"), loader(), loader(8))
    assert load_store(tmp_path / "mine.h5").keys()


def zeros_without_memory() -> Tensor:
    """A part of a tensor of zeros that torch keeps no memory for."""
    return torch._efficientzerotensor((8, 4))[4:]


def given_back() -> Tensor:
    """A tensor whose memory was given back, as a program that streams weights does it."""
    tensor = torch.ones(1 << 20)
    tensor.untyped_storage().resize_(0)
    return tensor


def given_back_in_part() -> Tensor:
    """A tensor of which only the first elements are left."""
    tensor = torch.ones(1 << 20).view(1024, 1024).T
    tensor.untyped_storage().resize_(64)
    return tensor


@pytest.mark.parametrize(
    ("make", "norm", "num_errors"), [(zeros_without_memory, 0.0, 0), (given_back, math.nan, 1), (given_back_in_part, math.nan, 1)]
)
def test_memory_that_is_not_there_is_not_read(make: Any, norm: float, num_errors: int) -> None:
    """To read it would end the process."""
    record = observe(Returns(lambda _y: make()), torch.ones(2, 4))
    assert record.values["activation/_root_/rms"] == pytest.approx(norm, nan_ok=True)
    assert record.values["monitor/errors"] == num_errors


@pytest.mark.parametrize("what", ["parameter", "gradient", "gradient of a scaled loss", "update", "update, afterwards"])
def test_a_parameter_whose_memory_was_given_back_fails_alone(what: str) -> None:
    """To read or to copy it would end the process. The other parameters have their values, and it is said which has none."""
    kind, scale = re.findall(r"\w+", what)[0], 8.0 if "scaled" in what else None
    net = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 400), nn.Linear(400, 2))
    rule = Rule(kinds=kind, sites=".*weight", statistics=["norm", "hist"], functions={"length": torch.linalg.vector_norm})
    with in_step(net, rules=[rule], capture={"kinds": kind, "sites": ".*weight", "steps": 0}) as monitor:
        net(torch.ones(2, 4)).sum().backward()
        weights = [net[place].weight for place in range(3)]
        watched = [weight.grad if kind == "gradient" else weight for weight in weights]
        expected = [tensor.detach().clone() / (scale or 1.0) for tensor in watched]
        if "afterwards" not in what:
            watched[1].untyped_storage().resize_(0)
        monitor.monitor_gradients(scale=scale)
        monitor.monitor_parameters()
        for place in (0, 2):
            weights[place].data.mul_(2.0)  # so that the update is what it was
        watched[1].untyped_storage().resize_(0)
        monitor.monitor_updates()
        record = record_of(monitor)
    for place in (0, 2):
        norm = expected[place].double().norm().item()
        assert record.values[f"{kind}/{place}.weight/norm"] == pytest.approx(norm, rel=1e-6)
        assert record.values[f"{kind}/{place}.weight/length"] == pytest.approx(norm, rel=1e-4)
        assert record.histograms[f"{kind}/{place}.weight/hist"].row.sum() == expected[place].numel()
    assert math.isnan(record.values[f"{kind}/1.weight/norm"])
    assert math.isnan(record.values[f"{kind}/1.weight/length"])
    assert f"{kind}/1.weight/hist" not in record.histograms
    assert {one.site for one in record.tensors} == {"0.weight", "2.weight"}
    assert record.values["monitor/errors"] >= 2


def test_weights_that_are_there_while_their_module_runs_end_nothing() -> None:
    """A program that streams weights takes them away before anything can be compared with them: what needs them is not known."""
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    reference, aside = copy.deepcopy(net), {}

    def bring(module: nn.Module, _args: object) -> None:
        for one in module.parameters():
            if one in aside:
                one.untyped_storage().resize_(4 * one.numel())
                one.data.copy_(aside.pop(one))

    def take_away(module: nn.Module, _args: object, _output: object) -> None:
        for one in module.parameters():
            aside[one] = one.detach().clone()
            one.untyped_storage().resize_(0)

    for module in net:
        module.register_forward_pre_hook(bring)
        module.register_forward_hook(take_away)
    expected = reference(torch.ones(2, 4)).detach()
    with ModuleMonitor(rules=[Rule(kinds=["activation", "parameter_difference"], statistics="norm")]) as monitor, torch.no_grad():
        monitor.set_module(net)
        monitor.set_reference_module(reference)
        RefinedCoordinateCheck(monitor)
        for step in range(2):
            monitor.begin_step(step)
            with monitor.no_monitor():
                reference(torch.ones(2, 4))
            assert torch.equal(net(torch.ones(2, 4)), expected)
            monitor.monitor_parameters()
            record = record_of(monitor)
            assert record.values["activation/_root_/norm"] == pytest.approx(expected.double().norm().item(), rel=1e-6)
            of_weights = [key for key in record.values if key.startswith(("rcc_operator", "parameter_difference"))]
            assert all(math.isnan(record.values[key]) for key in of_weights if step == 1 or "operator" not in key)
            assert {key.split("/")[1] for key in of_weights} >= {"0", "1", "2", "0.weight", "2.bias"}
            # The terms are taken before the program's hook takes the weights away.
            assert record.values["rcc_output/2/rms"] == pytest.approx(expected.double().square().mean().sqrt().item(), rel=1e-6)
            assert record.values["rcc_effective_update/2/rms"] == 0
            assert record.values["monitor/errors"] > 0


class TooLarge(nn.Module):
    """Raises an error after its layer has run, for more than two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inner(x)
        if len(x) > 2:
            raise MemoryError
        return h


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_an_error_that_the_caller_catches_ends_no_observation(is_checkpointed: bool) -> None:
    """A batch that is too large is cut in two: what returned counts once, also if the backward pass runs it again."""
    block, x = TooLarge(), torch.randn(4, 4)

    def run(part: Tensor) -> Tensor:
        result: Tensor = checkpoint(block, part, use_reentrant=False) if is_checkpointed else block(part)
        return result

    outputs: list[Tensor] = []
    with in_step(block, rules=RULES, on_error="raise") as monitor:
        try:
            run(x)
        except MemoryError:
            outputs = [run(part) for part in x.split(2)]
        monitor.begin_backward()
        (torch.cat(outputs) ** 3).sum().backward()
        values, whole = record_of(monitor).values, torch.cat(outputs).detach().double()
    assert values["activation/_root_/rms"] == pytest.approx(whole.square().mean().sqrt().item(), rel=1e-6)
    gradient = 3 * whole.square()
    assert values["activation_gradient/_root_/rms"] == pytest.approx(gradient.square().mean().sqrt().item(), rel=1e-5)
    inner = torch.cat([block.inner(part) for part in (x, *x.split(2))]).detach().double()
    assert values["activation/inner/max"] == pytest.approx(inner.max().item(), rel=1e-6)
    assert values["activation/inner/rms"] == pytest.approx(inner.square().mean().sqrt().item(), rel=1e-6)


class Splits(nn.Module):
    """Of what it returns, one part is used."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(2)


def test_a_part_that_is_not_used_gets_no_gradient() -> None:
    """Autograd calls the hooks of an unused part without a gradient; in the other micro-batch it gets one."""
    splits = Splits()
    with in_step(splits, rules=[Rule(kinds="activation_gradient", statistics="norm")], on_error="raise") as monitor:
        for uses_second in (True, False):
            first, second = splits(torch.ones(4, 3, requires_grad=True) * 2)
            (first.sum() + (second.sum() if uses_second else 0.0)).backward()
            monitor.after_micro_batch()
        record = record_of(monitor)
    assert record.values["activation_gradient/_root_/norm"] == pytest.approx(math.sqrt(12))
    assert record.values["activation_gradient/_root_.output_1/norm"] == pytest.approx(math.sqrt(6))
