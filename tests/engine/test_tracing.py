"""While torch records operations, or runs them on stand-ins for tensors, nothing is observed: the user's trace is the user's own."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from functorch.compile import aot_module, nop
from helpers.plain_steps import in_step, record_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lightning_module_monitor import Capture, GradientFlow, ModuleMonitor, MonitorMixin, Rule, TorchWatcher, track
from lightning_module_monitor.config.rules import attention_rules, coordinate_check_rules
from lightning_module_monitor.kernels import numba_kernel

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]

KINDS = ["activation", "activation_gradient", "parameter", "gradient", "update"]
MESSAGE = "Modules ran while torch recorded operations"


class Net(nn.Module, MonitorMixin):
    """Two blocks, attention, a layer whose output is not contiguous, and a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.turned = nn.Identity()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        y = y + F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])[0, 0]
        if self.is_monitoring:
            monitor = self.get_module_monitor()
            assert monitor is not None
            monitor.log_tensor("own/y/mean", y)
        return self.head(self.turned(y.t()))  # type: ignore[no-any-return]  # a module's result


def everything(net: nn.Module, *, follows: bool = True) -> ModuleMonitor:
    """A monitor with every probe on, and a reference."""
    rules = [
        Rule(kinds=KINDS, statistics=["norm", "std", "hist"], functions={"largest": torch.max}),
        Rule(kinds=["activation_difference", "parameter_difference"], statistics="ratio"),
        *attention_rules(),
        *coordinate_check_rules(),
    ]
    capture = Capture(sites=".*", steps=list(range(10)), kinds=["activation", "activation_gradient", "gradient"])
    monitor = ModuleMonitor(rules=rules, gradient_flow=GradientFlow(blocks="blocks"), capture=capture)
    monitor.set_module(net)
    reference = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.01)
    monitor.set_reference_module(reference, follows=follows)
    return monitor


def batch() -> Tensor:
    """Five tokens, always the same."""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def monitored_step(
    monitor: ModuleMonitor, net: nn.Module, in_between: Callable[[], object] = lambda: None, step: int = 0
) -> dict[str, Any]:
    """A step of training, with something in the middle of it, between the forward and the backward pass; all that it recorded."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monitor.begin_step(step)
    loss = net(batch()).square().mean()
    in_between()
    loss.backward()
    monitor.monitor_gradients()
    monitor.monitor_parameters()
    optimizer.step()
    monitor.monitor_updates()
    optimizer.zero_grad()
    record = record_of(monitor)
    histograms = {key: one.counts.tolist() for key, one in record.histograms.items()}
    tensors = [(one.kind, one.site, one.call, one.value.tolist()) for one in record.tensors]
    return {"values": dict(record.values), "histograms": histograms, "tensors": tensors}


def inputs(net: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
    """What a traced function of parameters and batch is called with."""
    return {name: one.detach() for name, one in net.named_parameters()}, batch()


def functional(net: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """The module as a function of its parameters."""
    return lambda parameters, x: torch.func.functional_call(net, parameters, (x,))  # type: ignore[no-any-return]  # a module's result


def traced_by_aot(net: nn.Module) -> str:
    """The graphs of forward and backward pass."""
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(str(graph.graph))
        return nop(graph, _inputs)

    aot_module(net, fw_compiler=keep)(batch()).sum().backward()
    net.zero_grad()
    return "".join(graphs)


def traced_by_jit(function: Callable[[Tensor], Tensor], **options: Any) -> str:
    """The operations of a trace by TorchScript, in their order; names in it differ from trace to trace."""
    traced = torch.jit.trace(function, batch(), **options)
    return " ".join(node.kind() for node in traced.inlined_graph.nodes())


TRACES: dict[str, Callable[[nn.Module], str]] = {
    "torch.jit.trace": traced_by_jit,
    "torch.jit.trace of a function": lambda net: traced_by_jit(lambda x: net.get_submodule("turned")(x.t()) * 2, check_trace=False),
    "make_fx": lambda net: str(make_fx(functional(net))(*inputs(net)).graph),
    "make_fx, fake": lambda net: str(make_fx(functional(net), tracing_mode="fake")(*inputs(net)).graph),
    "make_fx, symbolic": lambda net: str(make_fx(functional(net), tracing_mode="symbolic")(*inputs(net)).graph),
    "make_fx, before dispatch": lambda net: str(make_fx(functional(net), pre_dispatch=True)(*inputs(net)).graph),
    "torch.export": lambda net: str(torch.export.export(net, (batch(),), strict=False).graph),
    "torch.export, strict": lambda net: str(torch.export.export(net, (batch(),), strict=True).graph),
    "aot_module": traced_by_aot,
}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The record of a step in which nothing is traced."""
    torch.manual_seed(0)
    net = Net()
    with everything(net) as monitor:
        return monitored_step(monitor, net)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What monitors reported."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("lightning_module_monitor")]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # says that a condition is not traced
@pytest.mark.parametrize("how", TRACES)
def test_a_watched_module_is_traced_in_a_monitored_step(how: str, plain: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The trace is that of a module which no monitor watches, the record that of a step without a trace, and one line reports it."""
    torch.manual_seed(0)
    net = Net()
    expected = TRACES[how](copy.deepcopy(net))
    traces: list[str] = []
    with everything(net) as monitor:
        record = monitored_step(monitor, net, lambda: traces.append(TRACES[how](net)))
        assert record == plain
        monitored_step(monitor, net, lambda: traces.append(TRACES[how](net)), step=1)
    assert traces == [expected] * 2
    (message,) = said(caplog)
    assert message.startswith(MESSAGE)


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "vmap": lambda net: torch.func.vmap(net)(batch()[None]),
    "vmap over another dimension": lambda net: torch.func.vmap(net, in_dims=1)(batch()[:, None]),
    "grad": lambda net: torch.func.grad(lambda x: net(x).square().sum())(batch()),
    "grad of every sample": lambda net: torch.func.vmap(torch.func.grad(lambda x: net(x).square().sum()))(batch()[None]),
    "jvp": lambda net: torch.func.jvp(net.get_submodule("blocks"), (batch(),), (batch(),)),
    "vjp": lambda net: torch.func.vjp(net, batch())[1](torch.ones(4, 3)),
    "functionalize": lambda net: torch.func.functionalize(net)(batch()),
    "functionalize and vmap": lambda net: torch.func.functionalize(torch.func.vmap(net))(batch()[None]),
    "vmap and functionalize": lambda net: torch.func.vmap(torch.func.functionalize(net))(batch()[None]),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of attention under vmap, before torch 2.5
@pytest.mark.parametrize("how", TRANSFORMS)
def test_nothing_is_observed_under_a_transform(how: str, plain: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The result is that of a module which no monitor watches, the record that of a step without the call, and one line reports it."""
    torch.manual_seed(0)
    net = Net()
    expected, results = TRANSFORMS[how](copy.deepcopy(net)), []
    with everything(net) as monitor:
        assert monitored_step(monitor, net, lambda: results.append(TRANSFORMS[how](net))) == plain
        monitored_step(monitor, net, lambda: TRANSFORMS[how](net), step=1)
    torch.testing.assert_close(results, [expected], rtol=0, atol=0)
    (message,) = said(caplog)
    assert message.startswith(MESSAGE)


def test_a_tensor_that_has_outlived_its_transform_ends_nothing() -> None:
    """A module that returns one costs its own values at most; those of the others are there."""
    kept: list[Tensor] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for transform in (torch.func.vmap, torch.func.functionalize):
                transform(lambda part: kept.append(part * 2) or part)(x)
            torch.func.grad(lambda part: (kept.append(part * 2) or part).sum())(x)
            return kept[-1]

    net = nn.ModuleDict({"keeps": Keeps(), "first": nn.Identity(), "last": nn.Linear(4, 2)})
    rule = Rule(kinds=["activation"], statistics=["norm", "hist"], functions={"largest": torch.max})
    with in_step(net, rules=[rule]) as monitor:
        net["keeps"](batch())
        for tensor in kept:
            net["first"](tensor)
        output = net["last"](batch())
        record = record_of(monitor)
    assert record.values["activation/last/norm"] == pytest.approx(output.norm().item())


class Counts(TorchDispatchMode):
    """Counts operations, and does nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_counter_of_operations_counts_the_users_own(has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a dispatch mode a monitored step does what one does that is not monitored, from its begin until before its end."""
    if not has_kernel:
        monkeypatch.setattr(numba_kernel, "loops", lambda: None)
    net, x, zero, names, flops = Net(), batch(), torch.zeros(()), [], []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with everything(net, follows=False) as monitor:
        assert monitor.begin_step(0)
        assert monitor.engine.awaits_reference()
        monitor.end_step()
        for is_monitored in (False, True):
            with Counts() as counts, FlopCounterMode(display=False) as flop_counter:
                if is_monitored:
                    assert monitor.begin_step(1)
                assert not monitor.is_monitoring()
                assert not monitor.engine.awaits_reference()
                monitor.begin_backward()
                net(x).square().mean().backward()
                monitor.end_backward()
                monitor.after_micro_batch()
                monitor.log_scalar("own/loss", zero)
                monitor.monitor_gradients()
                monitor.monitor_parameters()
                monitor.monitor_skipped_step(zero)
                optimizer.step()
                monitor.monitor_updates()
            names.append(counts.names)
            flops.append(flop_counter.get_total_flops())
            optimizer.zero_grad()
        record = record_of(monitor)
    assert names[0] == names[1]
    assert flops[0] == flops[1] > 0
    own = {key: value for key, value in record.values.items() if not key.startswith("gradient_flow/_summary_")}
    assert own == {"monitor/errors": 0.0, "monitor/rcc_skipped_calls": 0.0}
    assert not record.tensors


def test_gradients_that_arrive_under_a_mode_are_not_observed(plain: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Of a forward pass that was observed: its activations are recorded, and what arrives is not."""
    torch.manual_seed(0)
    net = Net()
    with everything(net) as monitor:
        monitor.begin_step(0)
        loss = net(batch()).square().mean()
        with Counts():
            loss.backward()
        record = record_of(monitor)
    assert record.values["activation/head/norm"] == plain["values"]["activation/head/norm"]
    assert not [key for key in (*record.values, *record.histograms) if key.startswith("activation_gradient")]
    assert record.values["gradient_flow/_summary_/num_missing"] == 1
    assert record.values["monitor/errors"] == 0
    assert {one.kind for one in record.tensors} == {"activation"}
    assert [message.startswith(MESSAGE) for message in said(caplog)] == [True]


def test_a_step_on_stand_ins_costs_the_next_one_nothing(plain: dict[str, Any]) -> None:
    """All of a step under ``FakeTensorMode``, its begin and end too; the operator norms of the next are those of the real weights."""
    torch.manual_seed(0)
    net = Net()
    with everything(net) as monitor:
        with FakeTensorMode(allow_non_fake_inputs=True):
            monitor.begin_step(0)
            net(batch()).sum().backward()
            monitor.monitor_gradients()
            monitor.monitor_parameters()
            monitor.monitor_updates()
            monitor.end_step()
        net.zero_grad()
        assert monitored_step(monitor, net) == plain


class Selective(Net):
    """Checkpoints its first part so that products of matrices are kept, and all else is computed again."""

    def forward(self, x: Tensor) -> Tensor:
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        keeps = functools.partial(create_selective_checkpoint_contexts, products)
        y: Tensor = checkpoint(self.blocks, x, use_reentrant=False, context_fn=keeps)
        return self.head(y.t())  # type: ignore[no-any-return]  # a module's result


def test_selective_checkpointing_keeps_what_the_model_computes(caplog: pytest.LogCaptureFixture) -> None:
    """It returns kept results in their order: if the monitor computed products there, the model's gradients would be wrong."""
    gradients = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        net = Selective()
        with everything(net) as monitor:
            if is_watched:
                monitor.begin_step(0)
            net(batch()).square().mean().backward()
            record = monitor.end_step()
        gradients.append([torch.empty(0) if one.grad is None else one.grad.clone() for one in net.parameters()])
    assert all(torch.equal(one, other) and one.any() for one, other in zip(*gradients, strict=True))
    assert record is not None
    assert record.values["activation/head/norm"] > 0
    assert "activation/blocks.0.0/norm" not in record.values
    assert record.values["monitor/errors"] == 0
    assert [message.startswith(MESSAGE) for message in said(caplog) if not message.startswith("attention")] == [True]


class Run:
    """Takes what a watcher logs."""

    def __init__(self) -> None:
        self.logged: list[Mapping[str, float]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.logged.append(metrics)


def test_a_watcher_opens_no_step_for_a_trace() -> None:
    """A trace before the first forward pass is no forward pass; what is logged is that of a run without it."""
    logged = []
    for is_traced in (False, True):
        torch.manual_seed(0)
        net, run = Net(), Run()
        with TorchWatcher(net, run) as watcher:
            if is_traced:
                assert TRACES["make_fx"](net) == TRACES["make_fx"](copy.deepcopy(net))
            net(batch()).sum().backward()
            watcher.watch(0)
        logged.append(run.logged)
    assert logged[0] == logged[1] != []


def test_a_tracker_keeps_nothing_of_a_trace_and_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    """The trace is that of a module that is not tracked."""
    net = Net()
    with track(net) as tracker:
        assert TRACES["make_fx"](net) == TRACES["make_fx"](copy.deepcopy(net))
        torch.func.vmap(torch.func.grad(lambda x: net.blocks(x).sum()))(batch())
        assert len(tracker) == 0
        loss = net(batch()).sum()
        assert len(tracker) == 10
        with Counts():
            loss.backward()
        assert len(tracker) == 10
    assert [message.startswith("Modules ran while torch recorded operations") for message in said(caplog)] == [True]


PROGRAM = """
import sys
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from lightning_module_monitor import ModuleMonitor, Rule
from lightning_module_monitor.kernels import numba_kernel

class Wraps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return torch._to_functional_tensor(result) if func is torch.ops.aten.clone.default else result

def on_fake_tensors():
    with FakeTensorMode(allow_non_fake_inputs=True):
        net(real)

def by_make_fx():
    make_fx(lambda x: (net(real), x)[1], tracing_mode="fake", _allow_non_fake_inputs=True)(real)

def under_a_mode_that_wraps_results():
    with Wraps():
        net(real)

def on_functional_tensors():
    net(torch._to_functional_tensor(torch.ones(3, 4)).t())

if sys.argv[1] == "without":
    numba_kernel.loops = lambda: None
net, real = nn.Sequential(nn.Identity(), nn.Identity()), torch.ones(4, 3).t()
for run in (on_fake_tensors, by_make_fx, under_a_mode_that_wraps_results, on_functional_tensors):
    print(run.__name__, flush=True)
    rule = Rule(kinds=["activation"], statistics=["norm", "hist"], functions={"largest": torch.max})
    with ModuleMonitor(rules=[rule]) as monitor:
        monitor.set_module(net)
        monitor.begin_step(0)
        run()
        monitor.end_step()
        monitor.begin_step(1)
        net(real)
        assert monitor.end_step().values["activation/1/norm"] == 12 ** 0.5
print("alive")
"""


@pytest.mark.parametrize("kernel", ["with", pytest.param("without", marks=pytest.mark.slow)])
def test_the_interpreter_lives(kernel: str) -> None:
    """Outputs that have no memory where they seem to have some, of modules whose output is not contiguous; the next step is as ever."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, kernel], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "alive"), done.stdout + done.stderr


# CUDA graphs


def test_nothing_is_observed_while_a_stream_is_captured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Calls before and after the capture alone count, of outputs, gradients and values of the model's own; one line says so."""
    is_capturing = False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    net = Net()
    values = []
    for has_capture in (False, True):
        monitor = everything(net)
        monitor.begin_step(0)
        outputs = [net(batch())]
        if has_capture:
            is_capturing = True
            outputs.append(net(100 * batch()))
            outputs[-1].sum().backward()
            assert not net.is_monitoring
            is_capturing = False
            net.zero_grad()
        monitor.begin_backward()
        outputs[0].sum().backward()
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        record = monitor.end_step()
        monitor.close()
        net.zero_grad()
        assert record is not None
        values.append(record.values)
        lines = [line for line in caplog.messages if line.startswith(MESSAGE)]
        assert len(lines) == has_capture
    assert values[0] == values[1]
    assert {key.partition("/")[0] for key in values[0]} >= {"activation", "activation_gradient", "own", "gradient"}
