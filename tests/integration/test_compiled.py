"""Models under torch.compile with ``compiled: uncompiled``: monitored steps run uncompiled, with the values of the model as written."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.lightning_package import Callback, LightningModule, Trainer
from helpers.tiny import KeepRecords
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import ModuleMonitor, ModuleMonitorCallback, Record, Rule
from lightning_module_monitor.model.compiled import OriginalCode

RULES = [
    Rule(
        kinds=["activation", "activation_gradient", "parameter", "gradient", "update"], statistics=["mean", "std", "norm", "zero_fraction"]
    ),
    Rule(kinds=["activation_difference", "parameter_difference"], statistics=["norm", "ratio"]),
]


# Importing torch's compiler calls what torch 2.13 has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated"),
    pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch before 2.6 cannot run compiled models uncompiled"),
]


class Quiet(Classifier):
    """Logs nothing: what Lightning logs with cannot be compiled."""

    def log(self, *_args: Any, **_options: Any) -> None:
        pass

    validation_step = LightningModule.validation_step


class CompileLate(Callback):
    """Compiles a part once the fit has begun."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.model.compile(backend=self.backend)


class Run(NamedTuple):
    records: list[Record]
    weights: dict[str, Tensor]
    losses: list[Tensor]
    num_graphs: int


def run(how: str, folder: Path, monitored: bool = True, backend: str = "eager", **options: Any) -> Run:
    """Train the CNN of the zoo, compiled in one of several ways, for twelve steps."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    seed()
    module = Quiet("cnn", torch.optim.SGD, lr=0.1)
    model: Any = module
    callback = ModuleMonitorCallback(
        4, rules=RULES, reference="init", rcc=True, on_error="raise", store=False, compiled="uncompiled", **options
    )
    records, losses = KeepRecords(callback), KeepLosses()
    callbacks: list[Callback] = [callback, records, losses] if monitored else [losses]
    if how == "whole":
        model = torch.compile(module, backend=counter)
    elif how == "part":
        module.model.stem = torch.compile(module.model.stem, backend=counter)
    elif how == "in place":
        module.model.compile(backend=counter)
    elif how == "late":
        callbacks.append(CompileLate(counter))
    trainer(folder, callbacks, max_steps=12, max_epochs=-1).fit(model, loader(num_samples=32))
    weights = {name.replace("_orig_mod.", ""): value.clone() for name, value in module.state_dict().items()}
    return Run(records.records, weights, losses.losses, counter.frame_count)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [{}, {"module": "model"}], ids=["all", "within the model"])
@pytest.mark.parametrize("how", ["whole", "part", "in place", "late"])
def test_values_are_those_of_the_model_as_it_was_written(how: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Every key and every value is the same, also of the reference and the coordinate check; the compiler makes no further graph."""
    eager, compiled = run("eager", tmp_path, **options), run(how, tmp_path, **options)
    assert [record.step for record in compiled.records] == [0, 4, 8]
    for first, other in zip(eager.records, compiled.records, strict=True):
        assert first.values.keys() == other.values.keys()
        assert all(other.values[key] == value or math.isnan(value) for key, value in first.values.items())
    # The backend runs the graph as it is, so that nothing is rounded otherwise.
    assert all(torch.equal(compiled.weights[name], value) for name, value in eager.weights.items())
    plain = run(how, tmp_path, monitored=False)
    assert 1 <= compiled.num_graphs <= plain.num_graphs + 2
    assert all(torch.equal(first, other) for first, other in zip(plain.losses, compiled.losses, strict=True))


@pytest.mark.parametrize(("how", "name"), [("whole", "The model"), ("part", "model.stem"), ("eager", None)])
def test_the_cost_of_a_monitored_step_is_announced(how: str, name: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A compiled model may fit on a device where the uncompiled one does not; without compiled code nothing is announced."""
    with caplog.at_level(logging.INFO):
        run(how, tmp_path)
    announced = [record.getMessage() for record in caplog.records if "uncompiled" in record.getMessage()]
    expected = f"{name} is compiled: monitored steps run it uncompiled, with the time and the memory that this takes."
    assert [message.split(" compiled: keep")[0] for message in announced] == ([] if name is None else [expected])


def test_within_the_compiler_s_own_rounding(tmp_path: Path) -> None:
    """With a backend that decomposes the graph: monitored steps round like eager steps, other steps like compiled steps."""
    eager, compiled = run("eager", tmp_path), run("in place", tmp_path, backend="aot_eager")
    for first, other in zip(eager.records, compiled.records, strict=True):
        for key, value in first.values.items():
            if "difference" not in key and "rcc" not in key:
                assert other.values[key] == pytest.approx(value, rel=1e-3, abs=1e-6, nan_ok=True), key


def is_compiling() -> Callable[[], bool]:
    """Tells whether what is compiled runs compiled now."""
    counter = CompileCounter()

    def is_compiled() -> bool:
        before = counter.frame_count
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend=counter)(torch.ones(2))
        return bool(counter.frame_count > before)

    return is_compiled


def test_overlapping_monitors_leave_the_compiler_as_it_was() -> None:
    """Two monitors begin one after the other and end in the same order: compiled code runs again when the last has ended."""
    is_compiled = is_compiling()
    first, second = OriginalCode(), OriginalCode()
    states = [is_compiled()]
    for call in (first.begin, first.begin, second.begin, first.end, first.end, second.end):
        call()
        states.append(is_compiled())
    assert states == [True, False, False, False, False, False, True]


def test_an_error_in_a_monitored_step_leaves_the_compiler_as_it_was() -> None:
    """Also a step that is never ended."""
    is_compiled = is_compiling()
    model = torch.nn.Linear(2, 2)
    monitor = ModuleMonitor(rules=[Rule(kinds="activation", statistics="norm")], compiled="uncompiled")
    monitor.set_module(model)
    monitor.begin_step(0)
    assert not is_compiled()
    monitor.close()
    assert is_compiled()


def test_a_function_that_is_compiled_around_the_model_is_observed_inside() -> None:
    """No module holds the function: all compiled code runs uncompiled."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    step = torch.compile(lambda x: model(x).sum(), backend="eager")
    x = torch.randn(5, 4)
    step(x)
    with ModuleMonitor(rules=[Rule(kinds="activation", statistics="norm")], compiled="uncompiled") as monitor:
        monitor.set_module(model)
        for number in range(3):
            monitor.begin_step(number)
            step(x).backward()
            record = monitor.end_step()
            assert record is not None
            assert record.values["activation/1/norm"] == pytest.approx(float(model(x).detach().double().norm()), rel=1e-6)


class ByItsNorm(nn.Module):
    """Divides by the norm, which is zero for a row of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


def test_the_module_that_made_a_nan_is_named(tmp_path: Path) -> None:
    """In a step that is not monitored: it is run again uncompiled."""
    seed()
    x = torch.randn(40, 6)
    x[5 * 4] = 0.0
    model = nn.Sequential(nn.Linear(6, 6, bias=False), ByItsNorm(), nn.Linear(6, 3))
    module = Quiet(torch.compile(model, backend="eager"))  # type: ignore[arg-type]  # a module, too
    callback = ModuleMonitorCallback()
    data = DataLoader(TensorDataset(x, torch.zeros(40, dtype=torch.long)), batch_size=4)
    trainer(tmp_path, [callback], limit_val_batches=0, logger=False).fit(module, data)
    [finding] = callback.findings
    assert (finding.name, finding.step, finding.site) == ("nonfinite", 5, "model.1")
