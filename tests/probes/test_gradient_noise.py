"""Gradient noise against gradients of each micro-batch by hand, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.noise import NAMES, Batch, Loss, batches, by_hand, gradients, scales, values_of
from helpers.operations import no_host_reads
from helpers.plain_steps import in_step, record_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import GradientNoise, ModuleMonitor, Record, Rule
from lightning_module_monitor.config.rules import ConfigError
from lightning_module_monitor.record import is_undefined


def mlp() -> nn.Sequential:
    """Two layers in float64."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean squared error."""
    return F.mse_loss(model(batch[0]), batch[1])


def observe_step(monitor: ModuleMonitor, model: nn.Module, micro_batches: Sequence[Batch], step: int = 0, loss: Loss = loss_of) -> Record:
    """A step of a plain loop, whose losses are divided by their number."""
    monitor.begin_step(step)
    for batch in micro_batches:
        monitor.monitor_context("batch_size", len(batch[0]), "sum")
        (loss(model, batch) / len(micro_batches)).backward()
        monitor.after_micro_batch()
    monitor.monitor_gradients()
    record = record_of(monitor)
    model.zero_grad()
    return record


def observed(model: nn.Module, micro_batches: Sequence[Batch], noise: Any = True, **options: Any) -> Record:
    """One step with gradient noise only."""
    loss = options.pop("loss", loss_of)
    with ModuleMonitor(gradient_noise=noise, on_error="raise", **options) as monitor:
        monitor.set_module(model)
        return observe_step(monitor, model, micro_batches, loss=loss)


# In the engine


@pytest.mark.parametrize("sizes", [(4, 4), (5, 1, 3), (2, 2, 2, 2, 7)], ids=str)
def test_each_micro_batch_counts_as_a_gradient_by_hand(sizes: tuple[int, ...]) -> None:
    """All values of the whole model, also with sizes that differ, in float64."""
    model, micro_batches = mlp(), batches(sizes)
    expected = by_hand(gradients(model, micro_batches, loss_of), sizes)
    values = values_of(observed(model, micro_batches))
    assert list(values) == list(NAMES)
    assert values == pytest.approx({**expected, "scale": scales([expected])[0], "largest_rank": 0}, rel=1e-12, nan_ok=True)
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_each_module_has_the_noise_of_its_own_parameters() -> None:
    """With patterns of modules; planned keys are those of the record, with the prefix."""
    model, sizes = mlp(), (3, 5, 4)
    micro_batches = batches(sizes)
    grads = gradients(model, micro_batches, loss_of)
    with ModuleMonitor(gradient_noise={"per_module": ["_root_", r"\d"]}, prefix="a/b") as monitor:
        monitor.set_module(model)
        planned = monitor.planned_keys()
        record = observe_step(monitor, model, micro_batches)
    assert planned == [key for key in record.values if key != "a/b/context/batch_size"]
    assert planned[:6] == [f"a/b/gradient_noise/_root_/{name}" for name in NAMES]
    for site, of_site in (("_root_", slice(None)), ("0", slice(2)), ("2", slice(2, None))):
        expected = by_hand([each[of_site] for each in grads], sizes)
        values = {name: record.values[f"a/b/gradient_noise/{site}/{name}"] for name in expected}
        assert values == pytest.approx(expected, rel=1e-12)
    assert "a/b/gradient_noise/1/noise" not in record.values


def test_the_scale_is_the_ratio_of_averages_over_records() -> None:
    """First noise over signal, then averages with a decay of 0.95; NaN while the average of the signal is not above 0."""
    model, expected, found = nn.Linear(6, 3).double(), [], []
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # the best there is for labels that are noise: there is next to no signal
    with ModuleMonitor(gradient_noise=True) as monitor:
        monitor.set_module(model)
        for step in range(12):
            sizes = (2, 1 + step % 3, 3)
            micro_batches = batches(sizes, 20 + step)
            expected.append(by_hand(gradients(model, micro_batches, loss_of), sizes))
            found.append(values_of(observe_step(monitor, model, micro_batches, step))["scale"])
    wanted = scales(expected)
    assert found == pytest.approx(wanted, rel=1e-9, nan_ok=True)
    assert {True, False} == {math.isnan(value) for value in wanted}, "both cases occur"


def test_one_gradient_is_not_comparable() -> None:
    """Noise, signal and scale are undefined, and later records are as if it had not been there."""
    model = mlp()
    with ModuleMonitor(gradient_noise=True) as monitor:
        monitor.set_module(model)
        alone = values_of(observe_step(monitor, model, batches((4,))))
        together = values_of(observe_step(monitor, model, batches((4, 4)), 1))
    assert is_undefined([alone[name] for name in ("noise", "signal", "scale")]).all()
    assert alone["largest"] == 1
    assert together["scale"] == pytest.approx(together["noise"] / together["signal"]) or together["signal"] <= 0


class Shared(nn.Module):
    """One layer that runs inside of three checkpointed segments and outside of them."""

    def __init__(self, is_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 6)
        self.block = nn.Linear(6, 6)
        self.alias = self.block
        self.head = nn.Linear(6, 3)
        self.is_reentrant = is_reentrant
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.segment(x) if self.is_reentrant is None else checkpoint(self.segment, x, use_reentrant=self.is_reentrant)
        return self.head(self.alias(x))

    def segment(self, x: Tensor) -> Tensor:
        return torch.tanh(self.block(x))


@pytest.mark.parametrize("is_reentrant", [None, True, False], ids=str)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
def test_parts_of_a_shared_weight_are_added_before_squaring(is_reentrant: bool | None, set_to_none: bool) -> None:
    """A tied weight counts once, and its gradient may arrive in several parts: in the first step as in later ones."""
    model, sizes = Shared(is_reentrant), (3, 2, 4)
    plain = Shared(None)
    with ModuleMonitor(gradient_noise={"per_module": ["_root_", "alias"]}, on_error="raise") as monitor:
        monitor.set_module(model)
        for step in range(3):
            if not set_to_none:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            micro_batches = batches(sizes, step)
            grads = gradients(plain, micro_batches, loss_of)
            record = observe_step(monitor, model, micro_batches, step)
            for site, of_site in (("_root_", slice(None)), ("block", slice(2, 4))):
                expected = by_hand([each[of_site] for each in grads], sizes)
                assert {name: values_of(record, site)[name] for name in expected} == pytest.approx(expected, rel=1e-10)


def test_no_value_is_read_on_the_host() -> None:
    """Neither in a hook, nor at the end of a micro-batch or of a step."""
    model = Shared(True)
    with ModuleMonitor(gradient_noise={"per_module": ".*"}) as monitor:
        monitor.set_module(model)
        observe_step(monitor, model, batches((2, 3)))
        micro_batches = batches((4, 3))
        with no_host_reads():
            monitor.begin_step(1)
            for batch in micro_batches:
                monitor.monitor_context("batch_size", len(batch[0]), "sum")
                monitor.begin_backward(torch.tensor(2.0))
                loss_of(model, batch).backward()
                monitor.end_backward()
                monitor.after_micro_batch()
            monitor.monitor_gradients(scale=torch.tensor(2.0))
        assert monitor.end_step() is not None


def test_sparse_gradients_are_coalesced() -> None:
    """Rows of an embedding that occur twice in a batch add up before they are squared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3)).double()
    micro_batches = [(torch.tensor(rows), torch.randn(len(rows), 3).double()) for rows in ([[1, 1, 2], [1, 0, 0]], [[3, 3, 3], [2, 2, 4]])]
    dense = copy.deepcopy(model)
    dense[0].sparse = False
    expected = by_hand(gradients(dense, micro_batches, loss_of), (2, 2))
    values = values_of(observed(model, micro_batches))
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_frozen_lazy_and_unused_parameters() -> None:
    """A frozen parameter has no part in it, a lazy one has from the first step on, and one without a gradient counts as 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 3))
    model[2].bias.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3))
    sizes = (4, 2)
    micro_batches = [(x.float(), y.float()) for x, y in batches(sizes)]

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(module, nn.Sequential)
        return F.mse_loss(module[2](module[1](module[0](batch[0]))), batch[1])

    record = observed(model, micro_batches, loss=loss)
    expected = by_hand(gradients(model, micro_batches, loss), sizes)
    assert {name: values_of(record)[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert model[2].bias.grad is None


def test_gradients_of_something_else_do_not_count() -> None:
    """An inner ``autograd.grad`` and a backward pass outside of the loss's, where its begin and end are known; complex ones do."""
    model, sizes = mlp(), (3, 4)
    micro_batches = batches(sizes)
    with in_step(model, gradient_noise=True) as monitor:
        for batch in micro_batches:
            monitor.end_backward()
            monitor.monitor_context("batch_size", len(batch[0]))
            torch.autograd.grad(loss_of(model, batch) ** 2, list(model.parameters()))
            monitor.begin_backward(torch.tensor(4.0))
            (loss_of(model, batch) * 4.0 / 2).backward()
            monitor.end_backward()
            monitor.after_micro_batch()
        monitor.monitor_gradients(before_clip=True, scale=4.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        monitor.monitor_gradients()
        values = values_of(monitor.end_step())
    expected = by_hand(gradients(model, micro_batches, loss_of), sizes)
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("steps_early", [False, True], ids=["cleared", "stepped early"])
def test_gradients_that_are_cleared_within_a_step(steps_early: bool) -> None:
    """What was cleared does not count, as in a GAN; where all was used and cleared before it was observed, nothing is known."""
    model, sizes = mlp(), (3, 4)
    micro_batches = batches(sizes)
    with ModuleMonitor(gradient_noise={"per_module": ["_root_", "2"]}) as monitor:
        monitor.set_module(model)
        for step in range(2):
            monitor.begin_step(step)
            for number, batch in enumerate(micro_batches):
                monitor.monitor_context("batch_size", len(batch[0]), "sum")
                if number == 0:
                    loss_of(model, batches((5,))[0]).backward()
                    model.zero_grad()
                (loss_of(model, batch) / 2).backward()
                monitor.after_micro_batch()
            if steps_early:
                model[2].zero_grad()
            monitor.monitor_gradients()
            record = monitor.end_step()
            model.zero_grad()
            for site, of_site in (("_root_", slice(None)), ("2", slice(2, None))):
                values = values_of(record, site)
                expected = by_hand([each[of_site] for each in gradients(model, micro_batches, loss_of)], sizes)
                assert math.isnan(values["noise"]) if steps_early else values["noise"] == pytest.approx(expected["noise"], rel=1e-9)


def test_submodules_excluded_and_empty_parameters() -> None:
    """``_root_`` is what is monitored: the submodule, without what is excluded in it; an empty parameter adds nothing."""
    model = nn.Module()
    model.inner, model.outer = mlp(), nn.Linear(3, 3).double()
    model.inner.empty = nn.Parameter(torch.zeros(0, 3).double())

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        empty = module.inner.empty.sum()  # type: ignore[union-attr]
        return F.mse_loss(module.outer(module.inner(batch[0])), batch[1]) + empty  # type: ignore[operator]

    with ModuleMonitor(gradient_noise=True, module="inner", exclude=r"inner\.2") as monitor:
        model.inner.forward = nn.Sequential(model.inner[0], model.inner[1], model.inner[2]).forward
        monitor.set_module(model)
        record = observe_step(monitor, model, batches((3, 4)), loss=loss)
    names = [name for name, _parameter in model.named_parameters()]
    kept = [names.index("inner.0.weight"), names.index("inner.0.bias")]
    grads = [torch.autograd.grad(loss(model, batch), list(model.parameters())) for batch in batches((3, 4))]
    expected = by_hand([[each[index] for index in kept] for each in grads], (3, 4))
    assert {name: values_of(record)[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_complex_parameters_count_with_both_parts() -> None:
    """The squared norm of a complex gradient is that of its real and imaginary part together."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"w": nn.Parameter(torch.randn(3, dtype=torch.complex128))})

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(module, nn.ParameterDict)
        return ((batch[0][:, :3] * module["w"]).abs() ** 2).mean()

    micro_batches = batches((2, 5))
    grads = [[torch.view_as_real(g.resolve_conj()) for g in each] for each in gradients(model, micro_batches, loss)]
    expected = by_hand(grads, (2, 5))
    values = values_of(observed(model, micro_batches, loss=loss))
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("missing", ["size", "gradients", "zeroing"])
def test_what_is_not_known_is_not_guessed(missing: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without the number of samples, without the gradient of the step, or with gradients of an earlier step in it, values are NaN."""
    model = mlp()
    with ModuleMonitor(gradient_noise=True) as monitor:
        monitor.set_module(model)
        for step in range(2):
            monitor.begin_step(step)
            for batch in batches((3, 4), step):
                if missing != "size":
                    monitor.monitor_context("batch_size", len(batch[0]), "sum")
                loss_of(model, batch).div(2).backward()
                monitor.after_micro_batch()
            if missing != "gradients":
                monitor.monitor_gradients()
            if missing != "zeroing":
                model.zero_grad()
            values = values_of(monitor.end_step())
    assert math.isnan(values["noise"])
    assert math.isnan(values["signal"])
    expected = {
        "size": "monitor_context('batch_size', len(batch), 'sum')",
        "gradients": "expected monitor.monitor_gradients()",
        "zeroing": "",
    }
    assert expected[missing] in caplog.text


def test_gradients_that_are_not_finite_leave_the_averages_as_they_are() -> None:
    """Their record is NaN, with the micro-batch that has them, and the next one goes on with the averages before."""
    model, sizes = mlp(), (3, 4, 2)
    found, expected = [], []
    with ModuleMonitor(gradient_noise=True) as monitor:
        monitor.set_module(model)
        for step in range(3):
            micro_batches = batches(sizes, step)
            if step == 1:
                micro_batches[1][0][0, 0] = math.nan
            else:
                expected.append(by_hand(gradients(model, micro_batches, loss_of), sizes))
            found.append(values_of(observe_step(monitor, model, micro_batches, step)))
    assert all(math.isnan(found[1][name]) and not is_undefined([found[1][name]]).any() for name in ("noise", "signal", "scale", "largest"))
    assert found[1]["largest_micro_batch"] == 1
    assert [found[0]["scale"], found[2]["scale"]] == pytest.approx(scales(expected), rel=1e-9, nan_ok=True)


def test_an_error_in_a_hook_costs_the_values_of_the_step_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on; the values of the step are NaN, and the error is counted."""
    model = mlp()
    with monkeypatch.context() as patched, ModuleMonitor(gradient_noise=True) as monitor:
        monitor.set_module(model)
        patched.setattr("lightning_module_monitor.probes.gradient_noise.norm_of", lambda _gradient: 1 / 0)
        record = observe_step(monitor, model, batches((2, 2)))
        patched.undo()
        later = observe_step(monitor, model, batches((2, 2)), 1)
    assert record.values["monitor/errors"] > 0
    assert all(math.isnan(values_of(record)[name]) for name in ("noise", "signal", "scale", "largest"))
    assert "gradient noise of this step could not be taken (ZeroDivisionError" in caplog.text
    assert math.isfinite(values_of(later)["noise"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("yes", "gradient_noise is 'yes'; expected true, false, or options, e.g. {per_module: _root_}."),
        (1, "gradient_noise is 1; expected true, false"),
        ({"per_modul": "_root_"}, "gradient_noise has no option 'per_modul'; expected per_module; nearest: 'per_module'"),
        ({"per_module": []}, "gradient_noise.per_module is empty; expected at least one pattern"),
        ({"per_module": "("}, "gradient_noise.per_module '(' is not a regular expression"),
        ({"per_module": "layer"}, "gradient_noise.per_module 'layer' matches none of 4 module names"),
        ({"per_module": "1"}, "gradient_noise.per_module matches only modules without a parameter"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(option: Any, message: str) -> None:
    """With the value, what was expected, and the nearest right name."""
    with pytest.raises(ConfigError) as caught:
        ModuleMonitor(gradient_noise=option).set_module(mlp())
    assert message in str(caught.value)


@pytest.mark.parametrize("option", [False, None])
def test_without_the_option_nothing_is_recorded(option: Any) -> None:
    """Nor is anything hooked."""
    model = mlp()
    with in_step(model, rules=[Rule(kinds="gradient", statistics="norm")], gradient_noise=option) as monitor:
        assert not any(parameter._backward_hooks for parameter in model.parameters())
        assert not any("noise" in key for key in monitor.planned_keys())


def linear_regression(num_steps: int, size: int, num_micro_batches: int) -> tuple[float, float]:
    """Noise and signal, each averaged over steps at the same weights."""
    generator = torch.Generator().manual_seed(11)
    model = nn.Linear(5, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(0.3)
    found = []
    with ModuleMonitor(gradient_noise=GradientNoise()) as monitor:
        monitor.set_module(model)
        for step in range(num_steps):
            micro_batches = []
            for _ in range(num_micro_batches):
                x = torch.randn(size, 5, generator=generator).double()
                micro_batches.append((x, 0.5 * torch.randn(size, 1, generator=generator).double()))
            values = values_of(observe_step(monitor, model, micro_batches, step))
            found.append([values["noise"], values["signal"]])
    noise, signal = np.mean(found, 0)
    return float(noise), float(signal)


def test_linear_regression_has_the_noise_and_the_signal_of_its_closed_form() -> None:
    """Within 15 % over 300 steps.

    With labels ``e`` of variance ``s``, ``n`` normal features ``x`` and weights ``w``, the gradient of a sample is ``2 (x.w - e) x``, its
    mean ``2 w``, and the trace of its covariance ``4 ((n + 2) |w|^2 + n s) - 4 |w|^2``.
    """
    num_features, square, variance = 5, 5 * 0.3**2, 0.25
    signal = 4 * square
    noise = 4 * ((num_features + 2) * square + num_features * variance) - signal
    assert linear_regression(300, 4, 4) == pytest.approx((noise, signal), rel=0.15)


@pytest.mark.parametrize("steps", [[0, 2], [2, 3]], ids=["first step", "later steps"])
def test_compiled_models_are_not_compiled_again(steps: list[int]) -> None:
    """Hooks on parameters come and go without a compilation, weights are those of a run without, and values are right."""
    weights = []
    for monitored in (steps, []):
        torch._dynamo.reset()
        model = mlp()
        compiled, optimizer = torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), lr=0.1)
        num_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with ModuleMonitor(steps, gradient_noise=True, on_error="raise") as monitor:
            monitor.set_module(model)
            for step in range(4):
                micro_batches = batches((4, 4), step)
                expected = by_hand(gradients(model, micro_batches, loss_of), (4, 4)) if step in monitored else {}
                if step in monitored:
                    monitor.begin_step(step)
                for batch in micro_batches:
                    monitor.monitor_context("batch_size", len(batch[0]), "sum")
                    (loss_of(compiled, batch) / 2).backward()
                    monitor.after_micro_batch()
                monitor.monitor_gradients()
                optimizer.step()
                optimizer.zero_grad()
                record = monitor.end_step()
                if expected:
                    assert {name: values_of(record)[name] for name in expected} == pytest.approx(expected, rel=1e-9)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - num_before == 1
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))
