"""The reference runs with the model's grad mode and flags, by which torch selects kernels, and leaves no state."""

from __future__ import annotations

import copy
import gc
import random
import re
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers.architectures import ARCHITECTURES
from helpers.memory import peak_bytes
from helpers.plain_steps import in_step, record_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import ModuleMonitor, Rule
from lightning_module_monitor.model.copies import frozen_copy

RULES = Rule(kinds=["activation_difference"], statistics="abs_max")


def inputs(size: int = 8) -> Tensor:
    """A batch of six numbers each."""
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(2))


def differences(
    model: nn.Module,
    call: Callable[[nn.Module], Tensor] = lambda model: model(inputs()),
    reference: nn.Module | None = None,
    run_reference: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> dict[str, float]:
    """The differences from a copy in one step, with the reference called by hand or following a part of the model."""
    follows = "module" in options
    if reference is None:
        reference = frozen_copy(model.get_submodule(options["module"]) if follows else model)
    with in_step(model, rules=RULES, on_error="raise", **options, reference=reference, follows=follows) as monitor:
        torch.manual_seed(0)
        if not follows:
            with monitor.no_monitor():
                (run_reference or call)(reference)
        loss = call(model).square().mean()
        if loss.requires_grad:
            loss.backward()
        record = record_of(monitor)
    differences = {key: value for key, value in record.values.items() if key.startswith("activation_difference")}
    assert differences
    return differences


class Noisy(nn.Module):
    """Draws from every generator, changes a buffer, and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        noise = random.random() + np.random.rand() + torch.rand(())
        return self.norm(F.dropout(self.linear(x) * noise, 0.5, self.training))


@pytest.mark.parametrize("follows", [False, True])
def test_the_reference_leaves_no_trace_on_random_states_buffers_modes_and_graph(follows: bool) -> None:
    """It draws the model's next random numbers, in the model's mode, and restores all state: differences are exactly 0."""
    model = Noisy()
    reference = copy.deepcopy(model).eval()
    model.norm.eval()
    with ModuleMonitor(rules=Rule(kinds="activation_difference", statistics=["abs_max", "norm"]), on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference, follows=follows)
        before = {name: buffer.clone() for name, buffer in reference.named_buffers()}
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        x = torch.randn(8, 6, requires_grad=True)
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        monitor.begin_step(0)
        if not follows:
            with monitor.no_monitor():
                output = reference(x)
            assert not output.requires_grad
            assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
        assert torch.is_grad_enabled()
        assert model(x).requires_grad
        drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        record = monitor.end_step()
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        torch.randn(8, 6)
        model(x)
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == drawn
    assert record is not None
    assert {key: value for key, value in record.values.items() if value != 0} == {}
    assert len(record.values) == 7
    assert all(torch.equal(before[name], buffer) for name, buffer in reference.named_buffers())
    assert reference.calls == 0
    assert not any(part.training for part in reference.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for root in (model, reference) for part in root.modules())


def test_a_reference_that_fails_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    """If the user calls it, the error is raised, and all state is restored; if it follows the model, the error is logged."""

    class Breaks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            if self.bias.sum() > 1e6:
                raise RuntimeError("on purpose")
            return super().forward(x)

    model = Breaks(6, 3)
    reference = copy.deepcopy(model)
    reference.bias.data.fill_(1e6)
    monitor = ModuleMonitor(rules=Rule(kinds="activation_difference", statistics="norm"))
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    monitor.begin_step(0)
    state = torch.get_rng_state()
    with monitor.no_monitor(), pytest.raises(RuntimeError, match="on purpose"):
        reference(torch.ones(1, 6))
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    monitor.set_reference_module(reference, follows=True)
    monitor.begin_step(1)
    with caplog.at_level("WARNING"):
        model(torch.ones(1, 6)).sum().backward()
    record = record_of(monitor)
    assert record.values == {"monitor/errors": 1}
    assert "The reference could not run (RuntimeError: on purpose)" in caplog.text
    assert model.weight.grad is not None


def test_a_reference_that_writes_into_its_input_does_not_write_into_the_models() -> None:
    """A pre-activation block, which begins with an in-place layer, gets the same input as without a reference."""
    model = nn.Sequential(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)), nn.Linear(6, 3))
    reference = copy.deepcopy(model[0])
    reference[1].weight.data.zero_()
    x = torch.randn(8, 6)
    expected = model(x.clone())
    with in_step(
        model, rules=Rule(kinds="activation_difference", statistics="norm"), module="0", on_error="raise", reference=reference, follows=True
    ) as monitor:
        inputs: list[Tensor] = []
        handle = model[0].register_forward_pre_hook(lambda _module, args: inputs.append(args[0].clone()))
        output = model(x)
        handle.remove()
        record = record_of(monitor)
    assert torch.equal(output, expected)
    assert (inputs[0] < 0).any()
    assert set(record.values) == {f"activation_difference/{site}/norm" for site in ("0", "0.0", "0.1")} | {"monitor/errors"}
    assert record.values["activation_difference/0/norm"] > 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_reference_that_the_user_calls_without_grad_is_exact(name: str) -> None:
    """In a training step the model has a graph, and so has the reference in any grad mode of the user."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name]()

    def without_grad(reference: nn.Module) -> None:
        with torch.no_grad():
            reference(inputs())

    assert {key: value for key, value in differences(model, run_reference=without_grad).items() if value != 0.0} == {}


class Adapted(nn.Module):
    """A frozen model in eval mode, for which torch uses kernels of inference, and a trained head."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.eval().requires_grad_(False)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


@pytest.mark.parametrize("module", [None, "base"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_frozen_part_runs_with_the_kernels_of_inference_in_both(name: str, module: str | None) -> None:
    """Each parameter has the model's flag."""
    torch.manual_seed(0)
    model = Adapted(ARCHITECTURES[name]())
    options = {} if module is None else {"module": module}
    assert {key: value for key, value in differences(model, **options).items() if value != 0.0} == {}


class Gate(torch.autograd.Function):
    """Keeps a weak reference to its context, which shows whether the graph is alive."""

    contexts: ClassVar[list[weakref.ref[Any]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        Gate.contexts.append(weakref.ref(ctx))
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, gradients[0] * x


class Remembers(nn.Module):
    """Keeps computed tensors in attributes, as auxiliary losses and ``weight_norm`` do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.last: Tensor | None = None
        self.all: list[dict[str, Tensor]] = []
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(Gate.apply(x, self.weight))
        self.last = x
        self.all.append({"output": x})
        return x + self.frozen


@pytest.mark.parametrize("module", [None, "0"])
def test_flags_are_as_before_and_no_graph_lives(module: str | None) -> None:
    """Also for a reference with other flags and modes; the values of its attributes stay."""
    model = nn.Sequential(Remembers(), nn.Linear(6, 2))
    reference = copy.deepcopy(model if module is None else model[0]).eval()
    flags = {name: index % 2 == 0 for index, (name, _one) in enumerate(reference.named_parameters())}
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(flags[name])
    Gate.contexts.clear()
    assert set(differences(model, reference=reference, **({} if module is None else {"module": module})).values()) == {0.0}
    assert {name: parameter.requires_grad for name, parameter in reference.named_parameters()} == flags
    assert all(parameter.is_leaf and parameter.grad is None for parameter in reference.parameters())
    assert not any(part.training for part in reference.modules())
    own = reference if module is not None else reference[0]  # type: ignore[index]
    assert isinstance(own, Remembers)
    assert own.last is not None
    assert not own.last.requires_grad
    assert not own.all[0]["output"].requires_grad
    assert model[0].last.requires_grad  # type: ignore[union-attr]  # that of the model is its own matter
    gc.collect()
    reference_context, model_context = Gate.contexts
    assert reference_context() is None
    assert model_context() is not None


def test_an_output_of_the_reference_has_no_graph() -> None:
    """A loss between model and reference has gradients in the model alone, for outputs in any container."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.linear(x)
            return {"view": y[:, 0], "both": (y, [y.t()])}

    model = Pair()
    reference = frozen_copy(model)
    with in_step(model, rules=RULES, on_error="raise", reference=reference) as monitor:
        with monitor.no_monitor():
            target = reference(inputs())
        assert not any(tensor.requires_grad for tensor in (target["view"], target["both"][0], target["both"][1][0]))
        output = model(inputs())
        ((output["view"] - target["view"] - 1).square().mean() + (output["both"][0] * target["both"][0]).sum()).backward()
        monitor.end_step()
    assert model.linear.weight.grad is not None
    assert reference.linear.weight.grad is None


class Deep(nn.Sequential):
    """12 layers whose outputs take 2 MB each."""

    def __init__(self) -> None:
        super().__init__(*(part for _ in range(12) for part in (nn.Linear(64, 64), nn.Tanh())))


LAYER = 2**21


def test_memory_is_not_grown_by_a_graph() -> None:
    """The reference saves nothing for a backward pass: a graph would hold 12 layers and more."""
    model = Deep()
    reference = frozen_copy(model)
    x = torch.randn(LAYER // 4 // 64, 64)
    with in_step(
        model, rules=Rule(kinds="activation_difference", sites="20", statistics="norm"), on_error="raise", reference=reference
    ) as monitor:
        peak = peak_bytes(lambda: monitor.engine.run_reference(lambda: reference(x)))
        model(x)
        record = record_of(monitor)
    assert record.values["activation_difference/20/norm"] == 0.0
    assert peak_bytes(lambda: model(x)) > 12 * LAYER
    assert peak <= 5 * LAYER


class Differentiates(nn.Module):
    """Forces are the gradient of an energy with respect to positions, as in a model of atoms."""

    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.scale = nn.Linear(6, 3)
        self.by_function = by_function

    def forward(self, x: Tensor) -> Tensor:
        if self.by_function:
            return self.scale(torch.func.grad(lambda x: self.energy(x).sum())(x))
        x = x.detach().requires_grad_()
        return self.scale(torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0])


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("module", [None, "0"])
def test_a_reference_that_differentiates_in_its_forward_pass_runs(module: str | None, by_function: bool) -> None:
    """After its first failure the tensors for its backward pass are saved."""
    model = nn.Sequential(Differentiates(by_function))
    options = {} if module is None else {"module": module}
    assert set(differences(model, **options).values()) == {0.0}


class Checkpointed(nn.Module):
    """A checkpointed part."""

    def __init__(self, use_reentrant: bool, around: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(6, 6))
        self.use_reentrant, self.around = use_reentrant, around

    def part(self, x: Tensor) -> Tensor:
        return self.block(x) if self.around else checkpoint(self.block, x, use_reentrant=self.use_reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return self.head(checkpoint(self.part, x, use_reentrant=self.use_reentrant) if self.around else self.part(x))


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("module", [None, "block"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_reference_is_exact_and_makes_no_warning(use_reentrant: bool, module: str | None, around: bool) -> None:
    """Its inputs have the model's flags, as torch warns if none needs a gradient. Gradients are as without a reference."""
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant, around)
    torch.manual_seed(0)
    model(inputs()).square().mean().backward()
    plain = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    assert set(differences(model, **({} if module is None else {"module": module})).values()) == {0.0}
    assert all(torch.equal(plain[name], parameter.grad) for name, parameter in model.named_parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [
    lambda x: x, lambda x: x.t().contiguous().t(), lambda x: torch.cat([x, x], 1)[:, ::2], lambda x: x[:1].expand(8, 6), lambda x: x * 1,
    lambda x: torch.cat([x, x], 1)[:, :6] * 1,
])  # fmt: skip
@pytest.mark.parametrize("requires_grad", [False, True])
def test_arguments_of_a_sibling_have_the_flags_and_strides_of_the_models(make: Callable[[Tensor], Tensor], requires_grad: bool) -> None:
    """They may be written into without a change of the model's arguments."""
    calls: list[tuple[bool, bool, tuple[int, ...], Tensor]] = []

    class Recording(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append((x.requires_grad, x.is_leaf, x.stride(), x.detach().clone()))
            if not (x.requires_grad and x.is_leaf) and 0 not in x.stride():
                x = x.relu_()
            return super().forward(x)

    model = nn.Sequential(Recording(6, 3))
    x = make(inputs().requires_grad_(requires_grad))
    assert set(differences(model, lambda model: model(x), module="0").values()) == {0.0}
    reference_input, model_input = calls
    assert reference_input[:3] == model_input[:3]
    assert torch.equal(reference_input[3], model_input[3])


class OddBuffers(nn.Module):
    """Buffers that are expanded, written into, resized, replaced, created late, and part of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("expanded", torch.arange(6.0).expand(8, 6))
        self.register_buffer("counted", torch.zeros(2))
        self.register_buffer("resized", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("joined", torch.zeros(8, 6))
        self.alias = [self.counted]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.expanded
        self.expanded.zero_()
        self.alias[0].add_(1)
        self.resized.resize_(9).fill_(3)
        self.replaced = torch.ones(3)
        self.register_buffer("late", torch.ones(3))
        self.joined.copy_(y)
        return y + self.counted.sum() + self.resized.sum()


class Cached(nn.Module):
    """Positions that are kept in a buffer, for inputs up to a length that a number has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.length = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.length:
            self.length = len(x)
            self.register_buffer("positions", torch.arange(len(x)).cos()[:, None], persistent=False)
        return self.linear(x) * self.positions[: len(x)]


@pytest.mark.parametrize("module", [None, "0"])
def test_a_buffer_that_is_kept_from_call_to_call_is_made_again(module: str | None) -> None:
    """The number that tells whether it is there is put back with it, so that a second run of the reference makes it, too."""
    model = nn.Sequential(Cached())
    reference = frozen_copy(model if module is None else model[0])
    for _ in range(2):
        assert set(differences(model, reference=reference, **({} if module is None else {"module": module})).values()) == {0.0}


@pytest.mark.parametrize("module", [None, "0"])
def test_odd_buffers_are_as_before(module: str | None) -> None:
    """Tensors, shapes, strides and values."""
    model = nn.Sequential(OddBuffers())
    reference = frozen_copy(model if module is None else model[0])
    before = {name: (tensor, tensor.stride(), tensor.clone()) for name, tensor in reference.named_buffers()}
    assert set(differences(model, reference=reference, **({} if module is None else {"module": module})).values()) == {0.0}
    after = dict(reference.named_buffers())
    assert after.keys() == before.keys()
    for name, (tensor, stride, values) in before.items():
        assert after[name] is tensor, name
        assert tensor.stride() == stride, name
        assert torch.equal(tensor, values), name
        assert not tensor.requires_grad, name


def test_autocast_keeps_no_weights_of_a_sibling() -> None:
    """Otherwise they would stay, with their graph, until the model's autocast ends, and hide later changes of weights."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    reference = frozen_copy(model[1])
    with (
        in_step(model, rules=RULES, on_error="raise", module="1", reference=reference, follows=True) as monitor,
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(inputs()).sum().backward()
        assert torch.is_autocast_cache_enabled()
        monitor.end_step()
        with torch.no_grad():
            reference.weight.zero_()
            reference.bias.zero_()
        reference.requires_grad_()
        assert not reference(torch.ones(1, 6)).any()


def test_a_model_whose_attention_forms_a_loss_with_the_sibling_keeps_its_gradients() -> None:
    """The model's saved-tensor hooks around a sibling get none of its tensors."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor

    counts = []
    for options in ({}, {"module": "1"}):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if options:
                differences(model, lambda model: F.gelu(model(inputs())), **options)
            else:
                F.gelu(model(inputs())).square().mean()
        counts.append(list(packed))
    assert counts[0] == counts[1]


class Graph:
    """A library's batch, which is written into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __deepcopy__(self, _memo: object) -> Graph:
        raise AssertionError("copied")


class OfGraph(nn.Module):
    """Writes into its batch, and adds the output of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, batch: Graph | Tensor, other: nn.Module | None = None) -> Tensor:
        if isinstance(batch, Tensor):
            return self.linear(batch)
        batch.x = self.linear(batch.x) if other is None else other(self.linear(batch.x))
        return batch.x


def test_a_sibling_is_not_called_with_objects(caplog: pytest.LogCaptureFixture) -> None:
    """Such a call is not compared, which is reported once; other calls are. Training and buffers are unchanged."""
    runs = []
    for is_monitored in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"body": OfGraph(), "norm": nn.BatchNorm1d(6)})
        monitor = ModuleMonitor(rules=RULES, module="body", on_error="raise")
        records = []
        if is_monitored:
            monitor.set_module(model)
            monitor.set_reference_module(frozen_copy(model["body"]), follows=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for step in range(3):
            if is_monitored:
                monitor.begin_step(step)
            with caplog.at_level("INFO"):
                outputs = [
                    model["body"](inputs()),
                    model["body"](Graph(inputs())),
                    model["body"](inputs()),
                    model["body"](inputs(), model["norm"]),
                ]
            loss = sum(output.square().mean() for output in outputs)
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()
            losses.append(loss.item())  # type: ignore[union-attr]
            records.append(monitor.end_step() if is_monitored else None)
        runs.append((losses, model.state_dict()))
        monitor.close()
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())
    assert all(record is not None and record.values["monitor/errors"] == 0 for record in records)
    assert records[0].values["activation_difference/body.linear/abs_max"] == 0.0  # type: ignore[union-attr]
    assert records[2].values["activation_difference/body.linear/abs_max"] > 0  # type: ignore[union-attr]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert re.match(
        r"body is called with a \S+\.Graph: this call is not compared\. The reference takes tensors, numbers, strings", messages[0]
    )


def test_one_message_for_each_cause(caplog: pytest.LogCaptureFixture) -> None:
    """For a reference that fails, and for modules that only one of both runs: not for each site, kind and step."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
            self.calls: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            for number in self.calls:
                x = self.experts[number](x)
            if len(self.calls) == 7:
                raise ValueError("first line\nsecond line")
            return x

    model = Experts()
    reference = frozen_copy(model)
    rules = Rule(kinds=["activation_difference"], statistics=["norm", "ratio"])
    with ModuleMonitor(rules=rules) as monitor, caplog.at_level("INFO"):
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        plans = [([0], [1, 2, 3, 4, 5, 6]), ([2, 3], [3, 2, 4]), ([1], [0, 2]), ([0] * 7, [1, 2]), ([0] * 7, [5])]
        for step, (reference_calls, model_calls) in enumerate(plans):
            monitor.begin_step(step)
            reference.calls, model.calls = reference_calls, model_calls
            monitor.engine.run_reference(lambda: reference(inputs()))
            model(inputs())
            monitor.end_step()
    assert [record.getMessage() for record in caplog.records] == [
        "The model ran modules more often than the reference did; such calls are not compared: "
        "experts.1, experts.2, experts.3, experts.4, experts.5 and 1 more.",
        "The reference ran modules more often than the model did; such calls are not compared: experts.0.",
        "The reference could not run (ValueError: first line). Logged once; monitor/errors counts them.",
    ]
