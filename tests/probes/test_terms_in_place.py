"""Terms that are read where the tensors lie, against the same in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitor, RefinedCoordinateCheck
from lightning_module_monitor.probes.terms import Part
from lightning_module_monitor.probes.terms_in_place import NORMALIZED
from lightning_module_monitor.statistics import running
from lightning_module_monitor.statistics.observation import Observation

pytestmark = pytest.mark.skipif(running.kernel() is None, reason="needs the compiled kernel")

FEATURES = 1500
"""More than a chunk of the kernel."""

LAYERS: dict[str, nn.Module] = {
    "linear": nn.Linear(FEATURES, 6),
    "linear without bias": nn.Linear(FEATURES, 6, bias=False),
    "layer norm": nn.LayerNorm(FEATURES),
    "layer norm without bias": nn.LayerNorm(FEATURES, bias=False, eps=0.1),
    "rms norm": nn.RMSNorm(FEATURES),
}


def rms(x: Tensor) -> float:
    """The root of the mean square."""
    return float(x.detach().square().mean().sqrt())


def applied_to(module: Any, x: Tensor) -> Tensor:
    """What the weight is applied to, in float64."""
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    return F.rms_norm(x, module.normalized_shape, eps=torch.finfo(torch.float32).eps) if isinstance(module, nn.RMSNorm) else x


def expected(module: Any, reference: Any, x: Tensor, x0: Tensor) -> dict[str, float]:
    """Every term, by the formulas."""
    own, before = copy.deepcopy(module).double(), copy.deepcopy(reference).double()
    x, x0 = x.double(), x0.double()
    with torch.no_grad():
        wx, again, w0x0 = own(x), before(x), before(x0)
        bias = 0.0 if getattr(own, "bias", None) is None else own.bias
        bias0 = 0.0 if getattr(own, "bias", None) is None else before.bias
        n, n0 = applied_to(own, x), applied_to(own, x0)
        terms = {
            "rcc_output/fc": wx,
            "rcc_output/fc.weight": wx - bias,
            "rcc_reference_output/fc": w0x0,
            "rcc_reference_output/fc.weight": w0x0 - bias0,
            "rcc_effective_update/fc": wx - again,
            "rcc_effective_update/fc.weight": wx - again - (bias - bias0),
            "rcc_propagating_update/fc": again - w0x0,
            "rcc_propagating_update/fc.weight": again - w0x0,
            "rcc_input/fc": x,
            "rcc_input/fc.weight": n,
            "rcc_input_change/fc": x - x0,
            "rcc_input_change/fc.weight": n - n0,
        }
        values = {f"{site}/rms": rms(term) for site, term in terms.items()}
        for name, weight in {"update": own.weight - before.weight, "reference": before.weight}.items():
            norm = torch.linalg.matrix_norm(weight, 2) if weight.dim() == 2 else weight.abs().max()
            values[f"rcc_operator_norm/fc/{name}"] = float(norm)
        size, change = wx.numel() ** 0.5, n.numel() ** 0.5
        effective = values["rcc_effective_update/fc.weight/rms"] * size / (values["rcc_operator_norm/fc/update"] * rms(n) * change)
        propagating = rms(again - w0x0) * size / (values["rcc_operator_norm/fc/reference"] * rms(n - n0) * change)
        return values | {"rcc_alignment/fc/effective": effective, "rcc_alignment/fc/propagating": propagating}


def checked(module: nn.Module, reference: nn.Module, x: Tensor, x0: Tensor, statistics: tuple[str, ...] = ("rms",)) -> dict[str, float]:
    """What the check gives for one step."""
    model, before = nn.ModuleDict({"fc": module}), nn.ModuleDict({"fc": reference})
    monitor = ModuleMonitor(on_error="raise", module="fc")
    monitor.set_module(model)
    monitor.set_reference_module(before)
    RefinedCoordinateCheck(monitor, statistics=statistics)
    for step in range(2):  # what is prepared in the first step is used in the second
        monitor.begin_step(step)
        with monitor.no_monitor():
            before["fc"](x0)
        model["fc"](x)
        record = monitor.end_step()
    assert record is not None
    return dict(record.values)


def models(name: str) -> tuple[nn.Module, nn.Module]:
    """A layer, and one with other weights."""
    torch.manual_seed(1)
    reference = copy.deepcopy(LAYERS[name])
    module = copy.deepcopy(reference)
    for parameter in module.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return module, reference


def test_the_kernel_counts_parts_as_the_probe_does() -> None:
    """Machine code has numbers of its own, for its cache does not see when those of others change."""
    compiled, normalized = running.compiled_terms(), running.compiled_normalized()
    assert compiled is not None
    assert normalized is not None
    assert {part.name: part.value for part in Part} == {part.name: getattr(compiled, part.name) for part in Part}
    assert len(Part) == compiled.NUM_PARTS
    assert len(NORMALIZED) == normalized.NUM_FORMS


@pytest.fixture
def only_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower way is an error."""

    def refuse(*_args: object) -> None:
        raise AssertionError("not read in place")

    monkeypatch.setattr(Observation, "observe_for", refuse)


@pytest.mark.usefixtures("only_in_place")
@pytest.mark.parametrize("name", LAYERS)
def test_every_term_is_that_of_float64(name: str) -> None:
    """All of them in place, of two tensors of several tokens."""
    module, reference = models(name)
    x, x0 = torch.randn(3, 5, FEATURES) + 0.3, torch.randn(3, 5, FEATURES) - 0.2
    found, truth = checked(module, reference, x, x0), expected(module, reference, x, x0)
    assert found.keys() - {"monitor/errors"} == truth.keys()
    for key, value in truth.items():
        is_of_norm = key.startswith(("rcc_operator_norm", "rcc_alignment"))
        assert found[key] == pytest.approx(value, rel=0.05 if is_of_norm else 2e-6), key


@pytest.mark.parametrize("name", LAYERS)
def test_norms_of_tokens_are_taken_the_other_way(name: str) -> None:
    """Where more than squares are wanted, all terms go the other way, and give the same."""
    module, reference = models(name)
    x, x0 = torch.randn(5, FEATURES), torch.randn(5, FEATURES)
    found, others = checked(module, reference, x, x0), checked(module, reference, x, x0, ("rms", "token_norm"))
    for key, value in found.items():
        assert others[key] == pytest.approx(value, rel=2e-6), key
    assert any(key.endswith("token_norm") for key in others)


@pytest.mark.usefixtures("only_in_place")
@pytest.mark.parametrize("name", LAYERS)
def test_what_has_not_changed_is_exactly_zero(name: str) -> None:
    """Whatever order of operations the compiler has found."""
    reference = copy.deepcopy(LAYERS[name])
    x = torch.randn(7, FEATURES) * 1e-3
    found = checked(copy.deepcopy(reference), reference, x, x.clone())
    zeros = ("rcc_effective_update", "rcc_propagating_update", "rcc_input_change")
    assert {value for key, value in found.items() if key.startswith(zeros)} == {0.0}


@pytest.mark.usefixtures("only_in_place")
@pytest.mark.parametrize("name", ["layer norm", "rms norm"])
@pytest.mark.parametrize(("scale", "shift"), [(1e-25, 0.0), (1e25, 0.0), (1.0, 1e4), (1e-3, 0.0), (0.0, 1.0)])
def test_normalized_inputs_of_any_magnitude(name: str, scale: float, shift: float) -> None:
    """Squares that leave float32, and means that leave little of its digits, are taken in float64; half of the tokens are the same."""
    module, reference = models(name)
    x = torch.randn(8, FEATURES) * scale + shift
    x0 = x.clone()
    x0[::2] += torch.randn(4, FEATURES) * scale * 1e-2
    found = checked(module, reference, x, x0)
    own, before = applied_to(module, x.double()), applied_to(module, x0.double())
    assert found["rcc_input/fc/rms"] == pytest.approx(rms(x.double()), rel=1e-6)
    assert found["rcc_input_change/fc/rms"] == pytest.approx(rms(x.double() - x0.double()), rel=1e-6)
    assert found["rcc_input/fc.weight/rms"] == pytest.approx(rms(own), rel=2e-6)
    assert found["rcc_input_change/fc.weight/rms"] == pytest.approx(rms(own - before), rel=2e-5)


@pytest.mark.usefixtures("only_in_place")
def test_values_that_are_not_finite_are_not_hidden() -> None:
    """A single NaN in the input of a norm."""
    module, reference = models("layer norm")
    x = torch.randn(4, FEATURES)
    x0 = x.clone()
    x[2, 7] = float("nan")
    found = checked(module, reference, x, x0)
    for key in ("rcc_input/fc/rms", "rcc_input_change/fc/rms", "rcc_input/fc.weight/rms", "rcc_input_change/fc.weight/rms"):
        assert found[key] != found[key], key


def test_a_layer_that_becomes_another_is_seen_as_that() -> None:
    """What was prepared for a layer is made anew once it loses its bias, or is parametrized."""
    module, reference = models("linear")
    model, before = nn.ModuleDict({"fc": module}), nn.ModuleDict({"fc": reference})
    monitor = ModuleMonitor(on_error="raise", module="fc")
    monitor.set_module(model)
    monitor.set_reference_module(before)
    RefinedCoordinateCheck(monitor)
    x = torch.randn(4, FEATURES)
    for step, change in enumerate(
        (lambda layer: None, lambda layer: layer.register_parameter("bias", None), nn.utils.parametrizations.weight_norm)
    ):
        for layer in (model["fc"], before["fc"]):
            change(layer)
        monitor.begin_step(step)
        with monitor.no_monitor():
            w0x0 = before["fc"](x)
        wx = model["fc"](x)
        record = monitor.end_step()
        assert record is not None
        assert record.values["rcc_effective_update/fc/rms"] == pytest.approx(rms(wx.double() - w0x0.double()), rel=1e-5)
        of_weight = wx.double() - (0.0 if step else model["fc"].bias.double())
        assert record.values["rcc_output/fc.weight/rms"] == pytest.approx(rms(of_weight), rel=1e-5)
