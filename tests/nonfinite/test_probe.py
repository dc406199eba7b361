"""The flag and the probe for non-finite values: exact in every precision, and without a host read."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.operations import no_host_reads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import kernels
from lightning_module_monitor.model.names import Namer
from lightning_module_monitor.nonfinite import magnitudes
from lightning_module_monitor.nonfinite.flag import ReadFlag
from lightning_module_monitor.nonfinite.magnitudes import UNKNOWN, Magnitudes
from lightning_module_monitor.nonfinite.probe import NonfiniteProbe
from lightning_module_monitor.nonfinite.producer import producer


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_largest_magnitude_is_exact(dtype: torch.dtype, is_on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where sums overflow, in any layout, and for NaN and infinity at any position."""
    monkeypatch.setattr(magnitudes, "is_on_host", lambda _tensor: is_on_host)
    largest = torch.finfo(dtype).max
    x = torch.full((7, 1000), -largest, dtype=dtype)
    cases: list[tuple[Tensor, float]] = [(x, largest), (x.T, largest), (x[:, ::3], largest), (torch.zeros(3, dtype=dtype), 0.0)]
    for value in (math.nan, math.inf, -math.inf):
        bad = torch.ones(7, 1000, dtype=dtype)
        bad[6, 999] = value
        cases.append((bad, abs(value)))
    indices, elements = torch.tensor([[0, 2]]), torch.tensor([1.0, -3.0], dtype=dtype)
    cases.append((torch.sparse_coo_tensor(indices, elements, (4,), check_invariants=True), 3.0))
    cases.append((torch.sparse_coo_tensor(indices, elements * math.nan, (4,), check_invariants=True), math.nan))
    if dtype in (torch.float32, torch.float64):  # complex numbers count by their parts
        cases.append((torch.complex(elements, -2 * elements), 6.0))
        cases.append((torch.complex(elements, elements * math.inf).conj(), math.inf))
    numbers = Magnitudes()
    indices = [numbers.add(tensor) for tensor, _expected in cases]
    assert numbers.add(torch.empty(0)) == UNKNOWN
    assert numbers.add(torch.sparse_coo_tensor(size=(4,), dtype=dtype, check_invariants=True)) == UNKNOWN
    values = numbers.read()
    assert indices == list(range(len(cases)))
    for value, (_tensor, expected) in zip(values, cases, strict=True):
        assert value == expected or (math.isnan(value) and math.isnan(expected))


def test_one_transfer_reads_all_numbers_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tensors there were."""
    monkeypatch.setattr(magnitudes, "is_on_host", lambda _tensor: False)
    transfers: list[int] = []
    original = kernels.elements.transfer

    def count(tensor: Tensor) -> Tensor:
        transfers.append(tensor.numel())
        return original(tensor)

    monkeypatch.setattr(kernels.elements, "transfer", count)
    numbers = Magnitudes()
    for number in range(20):
        numbers.add(torch.full((5,), float(number)))
    assert numbers.read() == [float(number) for number in range(20)]
    assert transfers == [40]  # both extremes of each


def test_nothing_is_read_in_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read in forward or backward would make the host wait; the producer is found at the end."""
    monkeypatch.setattr(magnitudes, "is_on_host", lambda _tensor: False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.LSTM(4, 4))
    with torch.no_grad():
        model[1][0].weight[0, 0] = 3e38
        model[1][0].weight[0, 1] = 3e38
    sites = Namer().module_sites(model)
    probe, finite = NonfiniteProbe(sites, pytest.fail), ReadFlag(sites)
    probe.attach()
    x = torch.full((2, 3, 4), 2.0)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    with no_host_reads():
        probe.begin_micro_batch()
        loss = model(x)[0].sum()
        probe.begin_backward(loss)
        finite.observe_loss(loss)
        loss.backward()
        finite.observe_gradients()
        probe.end_micro_batch()
    assert finite.first_nonfinite() is not None
    observed = probe.observed()
    assert observed is not None
    source = producer(observed)
    assert source is not None
    assert (source.site, source.is_forward, source.micro_batch) == ("1.0", True, 0)
    assert "3e+38" in source.words
    probe.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_non_finite_gradient_is_detected() -> None:
    """By the gradient of the bias if there is one beside a weight, else by that of any parameter."""
    for model, name in (
        (nn.Linear(3, 3), "bias"),
        (nn.Linear(3, 3, bias=False), "weight"),
        (nn.Embedding(3, 3), "weight"),
        (nn.LSTM(3, 3), "weight_hh_l0"),
        (nn.LayerNorm(3), "bias"),
    ):
        finite = ReadFlag(Namer().module_sites(model))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        finite.observe_gradients()
        assert finite.first_nonfinite() is None
        finite.forget()
        bad = model.get_parameter(name).grad
        assert bad is not None
        bad.view(-1)[-1] = torch.inf
        finite.observe_gradients()
        assert finite.first_nonfinite() is not None


class Mask(nn.Module):
    """The causal mask that is added to logits."""

    def forward(self, logits: Tensor) -> Tensor:
        return torch.full_like(logits, -math.inf).triu(1)


class Masked(nn.Module):
    """Attention by hand; its mask and its softmax are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.softmax = Mask(), nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ x.T
        attended: Tensor = self.softmax(logits + self.mask(logits)) @ x
        return attended


class Log(nn.Module):
    """Makes NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(-1 - x.abs())


class ByHand(Masked):
    """Also uses the mask's output beside the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x @ x.T)
        return self.softmax(mask) * mask


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize(("attention", "culprit"), [(Masked, "log"), (ByHand, "mask")])
def test_infinities_of_a_mask_are_a_fault_only_if_they_are_used(is_inside: bool, attention: type[Masked], culprit: str) -> None:
    """With the softmax in the same module, and with both called by the model."""
    inner = attention()
    model = nn.Sequential(inner, Log()) if is_inside else inner
    if not is_inside:
        inner.add_module("log", Log())
    probe = NonfiniteProbe(Namer().module_sites(model), pytest.fail)
    probe.attach()
    probe.begin_micro_batch()
    x = model(torch.randn(3, 3))
    loss = (x if is_inside else inner.get_submodule("log")(x)).sum()
    probe.begin_backward(loss)
    observed = probe.observed()
    probe.close()
    assert observed is not None
    source = producer(observed)
    assert source is not None
    assert source.site == ({"log": "1", "mask": "0.mask"}[culprit] if is_inside else culprit)


class TwoInputs(nn.Module):
    """Calls a module with another module's output and with its own second input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3), inner

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        summed: Tensor = self.inner(self.first(x), other)
        return summed


class Add(nn.Module):
    """Has no submodule."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other


class AddByKeyword(nn.Module):
    """Calls a submodule with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.add = Add()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        summed: Tensor = self.add(x=x, other=other)
        return summed


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("inner", [Add, AddByKeyword])
def test_a_non_finite_further_input_is_not_the_fault_of_the_module(inner: type[nn.Module], value: float) -> None:
    """As second argument and as keyword, of modules with and without submodules."""
    model = TwoInputs(inner())
    probe = NonfiniteProbe(Namer().module_sites(model), pytest.fail)
    probe.attach()
    probe.begin_micro_batch()
    probe.begin_backward(model(torch.ones(2, 3), torch.tensor(value)).sum())
    observed = probe.observed()
    probe.close()
    assert observed is not None
    source = producer(observed)
    assert source is not None
    is_known = inner is Add or math.isnan(value)  # infinities given to a module with submodules may be a mask
    assert source.site == ("_root_" if is_known else "inner")
    assert "was given" in source.words or not is_known


@pytest.mark.parametrize("other", ["recomputed", "outside of the step"])
def test_only_calls_of_the_step_count(other: str) -> None:
    """Neither those of a recomputation in the backward pass, nor those of other code, such as a callback that draws samples."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    is_in_step = True
    probe = NonfiniteProbe(Namer().module_sites(model), pytest.fail, lambda: is_in_step)
    probe.attach()
    probe.begin_micro_batch()
    x = torch.ones(2, 4, requires_grad=True)
    if other == "recomputed":
        loss = checkpoint(model, x, use_reentrant=False).sum()
        probe.begin_backward(loss)
        loss.backward()
    else:
        model(x)
        is_in_step = False
        model(torch.full((2, 4), math.nan))
    probe.end_micro_batch()
    is_in_step = True
    model(torch.full((2, 4), math.nan))  # between two micro-batches
    assert [call.site.name for call in probe._passes[-1].calls] == ["0", "1"]
    assert probe.observed() is None
    probe.close()
