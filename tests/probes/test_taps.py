"""One tap for modules and one for parameters: hooks and reads are counted with all kinds, capture, shapes, flow and a reference on."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.lightning_package import LightningModule, SingleDeviceStrategy
from helpers.plain_steps import in_step, record_of
from helpers.zoo import batches, make
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import Capture, GradientFlow, ModuleMonitor, Record, Rule
from lightning_module_monitor.kernels.table import MomentTable
from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.probes.parameters import ParameterAccess

OBSERVED = [name for name, kind in KINDS.items() if not (kind.of_heads or kind.has_option or name.startswith("rcc_"))]
PAIRS = [name for name in OBSERVED if KINDS[name].is_pair]
SINGLE = [name for name in OBSERVED if not KINDS[name].is_pair]
FLOWS = {"mlp": "layers", "cnn": ["stem.0", "stem.2", "block", "head"], "outputs": "tuple|dict|head"}


class CountReads(ParameterAccess):
    """Counts how often each parameter, and each gradient, is read."""

    def __init__(self, *, makes_copies: bool) -> None:
        self.makes_copies = makes_copies
        self.reads: Counter[tuple[str, int]] = Counter()

    def parameter(self, parameter: Tensor) -> Tensor | None:
        self.reads["parameter", id(parameter)] += 1
        value = super().parameter(parameter)
        return value.detach().clone() if self.makes_copies and value is not None else value

    def gradient(self, parameter: Tensor) -> Tensor | None:
        self.reads["gradient", id(parameter)] += 1
        return super().gradient(parameter)

    def take(self, model: nn.Module) -> set[tuple[str, str, int]]:
        """What was read since the last time, and how often."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        taken = {(what, names[identity], number) for (what, identity), number in self.reads.items()}
        self.reads.clear()
        return taken


def with_everything(model: nn.Module, name: str, access: ParameterAccess | None = None) -> ModuleMonitor:
    """A monitor that records every kind but RCC and attention, and has functions, capture, gradient flow and a reference."""
    rules = [
        Rule(kinds=SINGLE, statistics=["norm", "hist"], functions={"own": torch.sum}),
        Rule(kinds=PAIRS, statistics=["norm", "hist"], functions={"own": lambda x, y: (x - y).sum()}),
        Rule(kinds="update", statistics="ratio"),
    ]
    capture = Capture(sites=".*", steps=0, kinds=[name for name, kind in KINDS.items() if kind.can_be_captured])
    monitor = ModuleMonitor(rules=rules, gradient_flow=GradientFlow(blocks=FLOWS[name]), capture=capture, on_error="raise")
    monitor.access = access or monitor.access
    monitor.set_module(model)
    monitor.set_reference_module(copy.deepcopy(model), follows=True)
    return monitor


@pytest.mark.parametrize("makes_copies", [False, True])
def test_a_parameter_is_read_once_at_each_moment_of_a_step(makes_copies: bool) -> None:
    """Measuring, functions, the reference and the capture share one read: before and after clipping, before and after the update."""
    model = make("mlp")
    names = [name for name, _parameter in model.named_parameters()]
    once = {what: {(what, name, 1) for name in names} for what in ("parameter", "gradient")}
    x, y = batches(4)[0]
    access = CountReads(makes_copies=makes_copies)
    with with_everything(model, "mlp", access) as monitor:
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        monitor.begin_step(0)
        F.cross_entropy(model(x), y).backward()
        assert access.take(model) == set()
        monitor.monitor_gradients(before_clip=True)
        assert access.take(model) == once["gradient"]
        monitor.monitor_gradients()
        assert access.take(model) == once["gradient"]
        monitor.monitor_parameters()
        assert access.take(model) == once["parameter"]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
        record = record_of(monitor)
        assert access.take(model) == once["parameter"]
    captured = {(raw.kind, raw.site): raw.value for raw in record.tensors}
    for name in names:
        for kind in ("parameter", "gradient_before_clip", "gradient", "update", "parameter_difference"):
            assert {f"{kind}/{name}/norm", f"{kind}/{name}/own"} <= record.values.keys()
        assert torch.equal(captured["parameter", name], before[name])
        assert record.values[f"parameter/{name}/norm"] == pytest.approx(float(before[name].norm()), rel=1e-6)
        assert record.values[f"parameter/{name}/own"] == pytest.approx(float(before[name].sum()), rel=1e-5, abs=1e-5)
        assert record.values[f"update/{name}/own"] == pytest.approx(float(captured["update", name].sum()), rel=1e-6)
        torch.testing.assert_close(captured["update", name], torch.full_like(before[name], 0.5))
        assert record.values[f"update/{name}/ratio"] == pytest.approx(
            0.5 * before[name].numel() ** 0.5 / float(before[name].norm()), rel=1e-5
        )


@pytest.mark.parametrize("name", FLOWS)
def test_a_module_has_one_forward_hook_and_an_output_one_gradient_hook(name: str) -> None:
    """With everything on; a hook before forward has the root alone, for the reference that follows it."""
    model = make(name)
    x, y = batches(4)[0]
    returned: Counter[int] = Counter()
    outputs: dict[int, Tensor] = {}

    def tensors(output: Any) -> list[Tensor]:
        if isinstance(output, Tensor):
            return [output]
        if not isinstance(output, (dict, tuple, list)):
            output = getattr(output, "__dict__", {})
        parts = output.values() if isinstance(output, dict) else output
        return [tensor for part in parts for tensor in tensors(part)]

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        own = {id(tensor): tensor for tensor in tensors(output)}
        outputs.update(own)
        returned.update(own.keys())

    with with_everything(model, name) as monitor:
        monitor.begin_step(0)
        calls = Counter({module: len(module._forward_hooks) for module in model.modules()})
        assert set(calls.values()) == {1}
        assert [module for module in model.modules() if module._forward_pre_hooks] == [model]
        assert len(model._forward_pre_hooks) == 1
        handles = [module.register_forward_hook(note) for module in model.modules()]
        F.cross_entropy(model(x), y).backward()
        with_gradient = {key: tensor for key, tensor in outputs.items() if tensor.requires_grad}
        assert len(with_gradient) >= 4
        for key, tensor in with_gradient.items():
            # What works in place takes the hooks on the tensor's former value out of this dictionary.
            num_hooks, most = len(tensor._backward_hooks or ()), returned[key]
            assert num_hooks <= most if name == "cnn" else num_hooks == most
        monitor.after_micro_batch()
        assert not any(tensor._backward_hooks for tensor in with_gradient.values())
        for handle in handles:
            handle.remove()
        record = record_of(monitor)
    assert {raw.kind for raw in record.tensors} >= {"activation", "activation_gradient"}
    kinds = {key.split("/")[0] for key in record.values}
    assert kinds >= {"activation", "activation_gradient", "activation_difference", "gradient_flow"}
    assert all(info.output_shape is not None for info in record.modules)


class Redirected(LightningModule):
    """Its step calls it twice: once in vain, and once more."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("on purpose")
        return self.fc(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.fails = True
        with contextlib.suppress(KeyError):
            self(x)
        self.fails = False
        return F.cross_entropy(self(x), y)


class Wrapper(nn.Module):
    """What a strategy wraps a module in, as DDP does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def test_the_call_of_a_wrapper_is_no_call_of_the_module() -> None:
    """Lightning runs ``training_step`` as the forward of the wrapped module: its loss is no activation, calls within it are observed."""
    redirect = SingleDeviceStrategy("cpu")._forward_redirection
    model = Redirected()
    wrapper, reference = Wrapper(model), copy.deepcopy(model)
    calls: list[int] = []
    reference.fc.register_forward_hook(lambda *_call: calls.append(0))
    batch = batches(4)[0]
    rules = [Rule(kinds=["activation", "activation_gradient", "activation_difference"], statistics=["norm", "nonfinite_count"])]
    with ModuleMonitor(rules=rules, on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.engine.model.wrapper = wrapper
        monitor.set_reference_module(reference, follows=True)
        for step in range(2):
            monitor.begin_step(step)
            assert [module for module in model.modules() if module._forward_pre_hooks] == [model]
            redirect(wrapper, model, "training_step", batch, 0).backward()
            record = record_of(monitor)
            output = model.fc(batch[0]).detach()
            assert record.values["activation/_root_/norm"] == pytest.approx(float(output.norm()), rel=1e-6)
            assert record.values["activation_difference/_root_/norm"] == 0.0
            (gradient,) = torch.autograd.grad(F.cross_entropy(logits := output.requires_grad_(), batch[1]), logits)
            assert record.values["activation_gradient/_root_/norm"] == pytest.approx(float(gradient.norm()), rel=1e-6)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert len(calls) == 4


class Stretches(nn.Module):
    """Three stretches, of which each calls the first block again; they are computed again in the backward pass, or not (``None``)."""

    def __init__(self, *, is_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)])
        self.act = nn.Tanh()
        self.head = nn.Linear(6, 3)
        self._is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:

            def run(x: Tensor, block: nn.Module = block) -> Tensor:
                return self.act(self.blocks[0](self.act(block(x))))

            x = run(x) if self._is_reentrant is None else checkpoint(run, x, use_reentrant=self._is_reentrant)
            with torch.no_grad():
                self.act(x)
        return self.head(x)


def observed(is_reentrant: bool | None, **options: Any) -> Record:
    """A step of two micro-batches."""
    model = Stretches(is_reentrant=is_reentrant)
    with in_step(model, on_error="raise", **({"rules": []} | options)) as monitor:
        for x, y in batches(3, 4):
            monitor.end_backward()
            loss = F.cross_entropy(model(x), y)
            monitor.begin_backward()
            loss.backward()
            monitor.after_micro_batch()
        return record_of(monitor)


@pytest.mark.parametrize("is_reentrant", [None, False, True])
def test_consumers_of_one_tap_do_not_disturb_each_other(is_reentrant: bool | None) -> None:
    """What each of measuring, gradient flow and capture observes alone they observe together, also of what is computed again."""
    rules = [Rule(kinds=["activation", "activation_gradient"], statistics=["norm", "mean"])]
    flow = GradientFlow(blocks=["blocks.0", "blocks.1", "act", "head"])
    capture = Capture(sites="blocks.0|head", steps=0, kinds=["activation", "activation_gradient"])
    together = observed(is_reentrant, rules=rules, gradient_flow=flow, capture=capture)
    plain = observed(None, rules=rules, gradient_flow=flow, capture=capture)
    alone = {**observed(is_reentrant, rules=rules).values, **observed(is_reentrant, gradient_flow=flow).values}
    assert together.values == alone
    assert together.values == pytest.approx(plain.values, rel=1e-5, abs=1e-7)
    assert together.values["gradient_flow/blocks.0-blocks.1/gain"] > 0
    kept, of_plain = ({(raw.kind, raw.site, raw.call): raw.value for raw in record.tensors} for record in (together, plain))
    of_capture = {(raw.kind, raw.site, raw.call): raw.value for raw in observed(is_reentrant, capture=capture).tensors}
    assert len(kept) == 2 * 2 * (4 + 1)  # kinds, micro-batches, calls of the first block and of the head
    assert kept.keys() == of_capture.keys() == of_plain.keys()
    for key, value in kept.items():
        assert torch.equal(value, of_capture[key]), key
        torch.testing.assert_close(value, of_plain[key], msg=str(key))


def test_what_updates_are_relative_to_is_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the updates are: an accelerator measures all tensors that are given together by one launch."""
    model, together = make("mlp"), list[int]()
    measure = MomentTable.add_all
    monkeypatch.setattr(
        MomentTable, "add_all", lambda table, rows, *rest, scale: together.append(len(rows)) or measure(table, rows, *rest, scale=scale)
    )
    monkeypatch.setattr(MomentTable, "add", None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ModuleMonitor(rules=[Rule(kinds="update", statistics=["norm", "ratio"])], on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.begin_step(0)
        before = [parameter.detach().double() for parameter in model.parameters()]
        model(batches(4)[0][0]).sum().backward()
        monitor.monitor_parameters()
        optimizer.step()
        record = monitor.end_step()
    assert together == [len(before), len(before)]
    assert record is not None
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        ratio = (parameter.detach().double() - old).norm() / old.norm()
        assert record.values[f"update/{name}/ratio"] == pytest.approx(ratio.item(), rel=1e-4)


def record_of_two_passes(*, at_the_same_time: bool) -> Record:
    """The gradients of two networks in one step, each by a backward pass in a thread of its own."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Sequential(*(nn.Linear(4, 4) for _layer in range(40))) for _network in range(2))
    rules = [Rule(kinds="activation_gradient", statistics=["norm", "mean"], functions={"own": lambda x: x.abs().sum()})]
    with ModuleMonitor(rules=rules, on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.begin_step(0)
        losses = [network(torch.randn(3, 4)).sum() for network in model]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        if at_the_same_time:
            for thread in threads:
                thread.start()
        for thread in threads:
            if not at_the_same_time:
                thread.start()
            thread.join()
        record = monitor.end_step()
    assert record is not None
    return record


def test_two_threads_of_autograd_in_one_step() -> None:
    """As of a model on two devices, for each of which autograd runs a thread: the values are those of one thread after the other."""
    expected = record_of_two_passes(at_the_same_time=False).values
    assert len(expected) >= 3 * 80
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _repetition in range(10):
            assert record_of_two_passes(at_the_same_time=True).values == expected
    finally:
        sys.setswitchinterval(before)
