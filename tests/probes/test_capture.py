"""Raw tensors of a step, against tensors that were kept by other means: values, dtypes, numbers of the calls, and what is left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain_steps import in_step, record_of
from helpers.zoo import ZOO, batches, make, raw_tensors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import Capture, ModuleMonitor, Record, Rule
from lightning_module_monitor.errors import MonitorError

EVERY_KIND = ["activation", "activation_gradient", "parameter", "gradient_before_clip", "gradient", "update"]
Batches = list[tuple[Tensor, Tensor]]


def capture(model: nn.Module, micro_batches: Batches, sites: str = ".*", kinds: Any = None, lr: float = 0.1) -> Record:
    """The record of one step of SGD, with what was captured."""
    wish = {"sites": sites, "steps": 0} | ({} if kinds is None else {"kinds": kinds})
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with ModuleMonitor(capture=Capture(**wish)) as monitor:
        monitor.set_module(model)
        assert monitor.begin_step(0)
        for x, y in micro_batches:
            monitor.end_backward()
            loss = F.cross_entropy(model(x), y)
            monitor.begin_backward()
            loss.backward()
            monitor.after_micro_batch()
        monitor.monitor_gradients(before_clip=True)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        optimizer.step()
        record = record_of(monitor)
    assert record.values == {"monitor/errors": 0.0}
    return record


def by_name(record: Record) -> dict[tuple[str, str, int], Tensor]:
    """The captured tensors by kind, site and call; no two have one name."""
    assert len({(one.kind, one.site, one.call) for one in record.tensors}) == len(record.tensors)
    return {(one.kind, one.site, one.call): one.value for one in record.tensors}


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "frozen", "outputs"])
def test_captured_tensors_are_those_of_plain_hooks(name: str) -> None:
    """Every output, the gradient that arrives at it, every parameter and its gradient, of micro-batches of 3 and 5, bit for bit."""
    micro_batches = batches(3, 5)
    model = make(name)
    torch.manual_seed(1)
    truth = raw_tensors(model, micro_batches, F.cross_entropy)
    torch.manual_seed(1)
    record = capture(model, micro_batches, kinds=["activation", "activation_gradient", "parameter", "gradient_before_clip"])
    captured: dict[tuple[str, str], list[Tensor]] = {}
    for raw in record.tensors:
        if raw.value.is_floating_point():
            kind = "gradient" if raw.kind == "gradient_before_clip" else raw.kind
            captured.setdefault((kind, raw.site), []).append(raw.value)
    assert captured.keys() == truth.keys()
    assert len(truth) > 8
    for key, tensors in truth.items():
        assert len(captured[key]) == len(tensors), key
        for value, tensor in zip(captured[key], tensors, strict=True):
            assert torch.equal(value.double(), tensor), key
            assert value.dtype == torch.float32


def test_clipped_gradients_and_updates() -> None:
    """``gradient`` is what the optimizer used, ``update`` what it did with it; a frozen parameter has neither."""
    model = make("frozen")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    captured = by_name(capture(model, batches(4), ".*(weight|bias|unused)", EVERY_KIND))
    norm = torch.stack([captured["gradient", f"free.{name}", 0].norm() for name in ("weight", "bias")]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)
    for name, parameter in model.named_parameters():
        assert torch.equal(captured["parameter", name, 0], before[name])
        assert torch.equal(captured["update", name, 0], parameter.detach() - before[name])
    assert torch.equal(captured["gradient", "free.weight", 0], model.free.weight.grad)
    assert ("gradient", "frozen.weight", 0) not in captured
    assert ("gradient", "unused", 0) not in captured


def test_outputs_of_any_dtype_are_captured() -> None:
    """Integers, booleans and complex numbers, as they are."""
    model = make("outputs")
    torch.manual_seed(1)
    (micro_batch,) = batches(4)
    kept: dict[str, Any] = {}
    for name in ("integer", "complex", "empty"):
        getattr(model, name).register_forward_hook(lambda _module, _args, output, name=name: kept.__setitem__(name, output))
    captured = by_name(capture(model, [micro_batch], "integer|complex|empty", "activation"))
    assert torch.equal(captured["activation", "integer", 0], kept["integer"][0])
    assert torch.equal(captured["activation", "integer.output_1", 0], kept["integer"][1])
    assert captured["activation", "integer.output_1", 0].dtype == torch.bool
    assert torch.equal(captured["activation", "complex", 0], kept["complex"])
    assert captured["activation", "empty", 0].shape == (0, 6)


def test_a_sparse_gradient_is_captured_with_its_zeros() -> None:
    """Of an embedding."""
    model = nn.Embedding(7, 3, sparse=True)
    with in_step(model, capture=Capture(sites="weight", steps=[0], kinds="gradient")) as monitor:
        model(torch.tensor([1, 4])).sum().backward()
        monitor.monitor_gradients()
        (raw,) = record_of(monitor).tensors
    assert raw.value.layout is torch.strided
    assert raw.value.shape == (7, 3)
    assert raw.value.abs().sum(1).nonzero().flatten().tolist() == [1, 4]


# Numbers of the calls


def test_calls_are_numbered_over_micro_batches_and_gradients_go_with_their_outputs() -> None:
    """A layer called twice in each of two micro-batches has four calls; gradient k is that of output k, though it comes in reverse."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1, bias=False)
            nn.init.constant_(self.fc.weight, 3.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x))

    model = Twice()
    with in_step(model, capture=Capture(sites="fc", steps=0)) as monitor:
        for scale in (1.0, 10.0):
            (scale * model(torch.ones(1, 1))).backward()
            monitor.after_micro_batch()
        record = record_of(monitor)
    captured = {key: float(value) for key, value in by_name(record).items()}
    assert [captured["activation", "fc", call] for call in range(4)] == [3, 9, 3, 9]
    # d(scale y)/dy = scale at the second call of each, and scale times the weight at the first.
    assert [captured["activation_gradient", "fc", call] for call in range(4)] == [3, 1, 30, 10]


def test_a_forward_pass_without_gradient_is_a_call_and_one_under_no_monitor_is_none() -> None:
    """The output of the first has a number, and no gradient: the gradient of the next keeps the number of its own output."""
    model = nn.Linear(2, 2)
    with in_step(model, capture=Capture(sites=".*", steps=0, kinds=["activation", "activation_gradient"])) as monitor:
        with monitor.no_monitor():
            model(torch.zeros(1, 2))
        with torch.no_grad():
            model(torch.zeros(1, 2))
        model(torch.ones(1, 2)).sum().backward()
        record = record_of(monitor)
    assert [(one.kind, one.call) for one in record.tensors] == [("activation", 0), ("activation", 1), ("activation_gradient", 1)]


class Checkpointed(nn.Module):
    """Two stretches, in each of which the same layer is called twice, computed again in the backward pass, or not."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for _stretch in range(2):
            x = self.run(lambda x: torch.tanh(self.fc(torch.tanh(self.fc(x)))), x)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_no_further_call(reentrant: bool) -> None:
    """Outputs and gradients have the numbers and values that they have without checkpointing."""
    kept = []
    for run in (lambda part, x: part(x), lambda part, x: checkpoint(part, x, use_reentrant=reentrant)):
        micro_batches = [(x.requires_grad_(), y) for x, y in batches(3, 5)]
        kept.append(by_name(capture(Checkpointed(run), micro_batches, "fc", ["activation", "activation_gradient"])))
    plain, again = kept
    assert len(plain) == 2 * 8
    assert plain.keys() == again.keys()
    for key, value in plain.items():
        torch.testing.assert_close(again[key], value, msg=str(key))


def test_an_inner_gradient_of_the_users_is_not_captured() -> None:
    """Between forward and backward of the loss, an ``autograd.grad`` counts for nothing."""
    model = nn.Linear(2, 1)
    with in_step(model, capture=Capture(sites=".*", steps=0, kinds="activation_gradient")) as monitor:
        monitor.end_backward()
        x = torch.ones(1, 2, requires_grad=True)
        output = model(x)
        torch.autograd.grad(5 * output.sum(), x, retain_graph=True)
        monitor.begin_backward()
        (7 * output.sum()).backward()
        monitor.end_backward()
        record = record_of(monitor)
    assert [(one.call, float(one.value)) for one in record.tensors] == [(0, 7.0)]


# In-place layers, nobody else's memory


def test_a_copy_is_what_the_layer_returned_whatever_overwrites_it() -> None:
    """An in-place ReLU after the layer, the optimizer's step, and the reader's own writes change nothing."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
    reference = copy.deepcopy(model)
    (x, y), *_ = batches(4)
    record = capture(model, [(x, y)])
    captured = by_name(record)
    with torch.no_grad():
        assert torch.equal(captured["activation", "0", 0], reference[0](x))
        assert torch.equal(captured["activation", "1", 0], reference[0](x).relu())
    assert (captured["activation", "0", 0] < 0).any()
    assert torch.equal(captured["parameter", "0.weight", 0], reference[0].weight)
    assert not torch.equal(model[0].weight, reference[0].weight)
    before = model[0].weight.detach().clone()
    for raw in record.tensors:
        assert raw.value.requires_grad is False
        raw.value.fill_(7)
    assert torch.equal(model[0].weight, before)


def test_captures_only_what_is_asked_and_when() -> None:
    """Only the sites, kinds and steps of the wish; on other steps there is not a hook."""
    model = make("mlp")
    wish = Capture(sites="layers.0(.weight)?", steps=[2, 4], kinds=["activation", "gradient"])
    rules = [Rule(kinds="parameter", statistics="norm", every_n_steps=3)]
    captured: dict[int, list[tuple[str, str]]] = {}
    with ModuleMonitor(3, rules=rules, capture=wish) as monitor:
        monitor.set_module(model)
        for step in range(6):
            begun = monitor.begin_step(step)
            assert begun == monitor.is_step_monitored(step) == (step in (0, 2, 3, 4))
            hooks = sum(len(one._forward_hooks) for one in model.modules())
            # In the first step every module is looked at once, for the table of modules.
            assert hooks == (len([*model.modules()]) if step == 0 else 1 if step in (2, 4) else 0)
            F.cross_entropy(model(batches(4)[0][0]), batches(4)[0][1]).backward()
            monitor.monitor_gradients()
            monitor.monitor_parameters()
            record = monitor.end_step()
            assert sum(len(one._forward_hooks) for one in model.modules()) == 0
            if record is not None:
                captured[step] = [(one.kind, one.site) for one in record.tensors]
                assert any("parameter" in key for key in record.values) == (step in (0, 3))
    expected = [("activation", "layers.0"), ("gradient", "layers.0.weight")]
    assert captured == {0: [], 2: expected, 3: [], 4: expected}


# Trouble


class Unreadable(nn.Module):
    """Its output has no data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        class Odd(dict[str, Tensor]):
            def items(self) -> Any:
                raise RuntimeError("no items for you")

        return Odd(a=self.fc(x))


def test_what_cannot_be_captured_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The step goes on, the rest is captured; with ``on_error='raise'`` it is an error that names the module, and no hook is left."""
    model = Unreadable()
    with ModuleMonitor(capture=Capture(sites=".*", steps=[0, 1], kinds="activation")) as monitor:
        monitor.set_module(model)
        for step in range(2):
            monitor.begin_step(step)
            model(torch.ones(1, 2))
            record = record_of(monitor)
            assert record.values["monitor/errors"] == 1
            assert [one.site for one in record.tensors] == ["fc"]
    assert [message for message in caplog.messages if "captured" in message] == [
        "The output of '_root_' could not be captured (RuntimeError: no items for you). Logged once; monitor/errors counts them."
    ]
    said = "The output of '_root_' could not be captured"
    with in_step(model, capture=Capture(sites=".*", steps=0), on_error="raise"), pytest.raises(MonitorError, match=said):
        model(torch.ones(1, 2))
    assert sum(len(one._forward_hooks) for one in model.modules()) == 0


def test_every_model_of_the_zoo_can_be_captured() -> None:
    """All kinds of all sites."""
    for name in ZOO:
        record = capture(make(name), batches(3), kinds=EVERY_KIND)
        assert {one.kind for one in record.tensors} == set(EVERY_KIND)
