"""Terms that are read where the tensors lie, against the same in float64."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitor, RefinedCoordinateCheck, Rule
from lightning_module_monitor.modules.names import ModuleSite
from lightning_module_monitor.probes.checked_modules import EFFECTIVE, PROPAGATING
from lightning_module_monitor.probes.coordinate_check import Units
from lightning_module_monitor.probes.probe import Watched
from lightning_module_monitor.probes.reference import Reference
from lightning_module_monitor.probes.terms import Part
from lightning_module_monitor.probes.terms_in_place import NORMALIZED
from lightning_module_monitor.statistics import running
from lightning_module_monitor.statistics.observation import Observation
from lightning_module_monitor.statistics.registry import STATISTICS
from lightning_module_monitor.statistics.watch import Watch

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


def watched(module: nn.Module, reference: nn.Module, on_error: str = "raise") -> tuple[nn.ModuleDict, nn.ModuleDict, ModuleMonitor]:
    """A model of one layer, its reference, and a monitor of both."""
    model, before = nn.ModuleDict({"fc": module}), nn.ModuleDict({"fc": reference})
    monitor = ModuleMonitor(on_error=on_error, module="fc")
    monitor.set_module(model)
    monitor.set_reference_module(before)
    return model, before, monitor


def one_step(
    watching: tuple[nn.ModuleDict, nn.ModuleDict, ModuleMonitor], step: int, x: Tensor, x0: Tensor
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Outputs of both, and the values of the step."""
    model, before, monitor = watching
    monitor.begin_step(step)
    with monitor.no_monitor():
        w0x0 = before["fc"](x0)
    wx = model["fc"](x)
    record = monitor.end_step()
    assert record is not None
    return wx, w0x0, dict(record.values)


def checked(module: nn.Module, reference: nn.Module, x: Tensor, x0: Tensor, statistics: tuple[str, ...] = ("rms",)) -> dict[str, float]:
    """What the check gives for one step."""
    watching = watched(module, reference)
    RefinedCoordinateCheck(watching[-1], statistics=statistics)
    one_step(watching, 0, x, x0)
    return one_step(watching, 1, x, x0)[-1]  # what is prepared in the first step is used in the second


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
@pytest.mark.parametrize("name", ["layer norm", "layer norm without bias", "rms norm"])
@pytest.mark.parametrize("change", [1.0, 3e-4, 1e-6])
@pytest.mark.parametrize("how", ["each", "all by one number", "all by one factor"])
def test_a_small_change_of_a_normalized_input_keeps_its_digits(name: str, change: float, how: str) -> None:
    """It is not the difference of two that are near each other, as early in training; nor what is left of a change that is taken out."""
    module, reference = models(name)
    x0 = torch.randn(40, FEATURES) + 1
    x = {"each": x0 + change * torch.randn(40, FEATURES), "all by one number": x0 + change, "all by one factor": x0 * (1 + change)}[how]
    values = checked(module, reference, x, x0)
    own, before = applied_to(module, x.double()), applied_to(module, x0.double())
    right = {
        "rcc_input_change/fc": x.double() - x0.double(),
        "rcc_input_change/fc.weight": own - before,
        "rcc_propagating_update/fc": (own - before) * reference.weight,
    }
    for site, term in right.items():
        # Of a change that is taken out by the norm nothing is left but what float64 rounds away.
        assert values[f"{site}/rms"] == pytest.approx(rms(term), rel=5e-7, abs=1e-15 * rms(own))


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
    watching = watched(module, reference)
    RefinedCoordinateCheck(watching[-1])
    x = torch.randn(4, FEATURES)
    for step, change in enumerate(
        (lambda layer: None, lambda layer: layer.register_parameter("bias", None), nn.utils.parametrizations.weight_norm)
    ):
        for layer in (module, reference):
            change(layer)
        wx, w0x0, values = one_step(watching, step, x, x)
        assert values["rcc_effective_update/fc/rms"] == pytest.approx(rms(wx.double() - w0x0.double()), rel=1e-5)
        of_weight = wx.double() - (0.0 if step else module.bias.double())
        assert values["rcc_output/fc.weight/rms"] == pytest.approx(rms(of_weight), rel=1e-5)


class Tripled(nn.LayerNorm):
    """Not what it is derived from."""

    def forward(self, x: Tensor) -> Tensor:
        """Three times the output."""
        return 3 * super().forward(x)


def hooked(layer: nn.Module) -> nn.Module:
    """With somebody's hook."""
    layer.register_forward_hook(lambda _module, _args, output: 3 * output)
    return layer


def overridden(layer: Any) -> nn.Module:
    """With a forward of its own."""
    forward = layer.forward
    layer.forward = lambda x: 3 * forward(x)
    return layer


OTHERS: dict[str, Any] = {
    "the model's has a hook": lambda: (hooked(nn.LayerNorm(6)), nn.LayerNorm(6)),
    "the reference's has a hook": lambda: (nn.LayerNorm(6), hooked(nn.LayerNorm(6))),
    "a forward of its own": lambda: (overridden(nn.RMSNorm(6)), nn.RMSNorm(6)),
    "another class": lambda: (nn.LayerNorm(6), Tripled(6)),
    "another epsilon": lambda: (nn.LayerNorm(6), nn.LayerNorm(6, eps=1.0)),
    "a linear layer's reference has a hook": lambda: (nn.Linear(6, 6), hooked(nn.Linear(6, 6))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_layer_does_besides_is_seen(name: str) -> None:
    """The two terms are of what the modules give, and add up to the change of the output."""
    module, reference = OTHERS[name]()
    x, x0 = torch.randn(4, 6), torch.randn(4, 6)
    found = checked(module, reference, x, x0)
    with torch.no_grad():
        wx, again, w0x0 = module(x), reference(x), reference(x0)
    assert found["rcc_effective_update/fc/rms"] == pytest.approx(rms(wx - again), rel=1e-5)
    assert found["rcc_propagating_update/fc/rms"] == pytest.approx(rms(again - w0x0), rel=1e-5)


@pytest.mark.parametrize("layer", [nn.LayerNorm(6), nn.Linear(6, 6), nn.MultiheadAttention(6, 2)])
def test_hooks_that_change_arguments_do_so_once(layer: nn.Module) -> None:
    """In the reference as in the model, also where they draw numbers: of equal weights and inputs every change is zero."""

    def noisy(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(F.dropout(one * 2 + 1) for one in args)

    module, reference = copy.deepcopy(layer), copy.deepcopy(layer)
    for one in (module, reference):
        one.register_forward_pre_hook(noisy)
    model, before, monitor = watched(module, reference)
    monitor.add_rules([Rule(kinds=[EFFECTIVE, PROPAGATING], statistics="rms")])
    args = [torch.randn(4, 6)] * (3 if isinstance(layer, nn.MultiheadAttention) else 1)
    monitor.begin_step(0)
    with monitor.running_reference():
        before["fc"](*args)
    model["fc"](*args)
    record = monitor.end_step()
    assert record is not None
    assert record.values.keys() >= {"rcc_effective_update/fc/rms", "rcc_propagating_update/fc/rms"}
    assert set(record.values.values()) == {0.0}


@pytest.mark.parametrize("layer", [nn.LayerNorm(6), nn.Linear(6, 6)])
@pytest.mark.parametrize("shaped", [lambda x: x.unflatten(-1, (2, 3)), lambda x: x.repeat(1, 2), lambda x: x.repeat(2, 1)])
def test_an_output_of_another_shape_than_the_parameters_is_not_read_beyond_them(layer: nn.Module, shaped: Any) -> None:
    """A hook of somebody's may give an output any shape: the kernel would read, and write, memory that is not the layer's."""
    module, reference = copy.deepcopy(layer), copy.deepcopy(layer)
    for one in (module, reference):
        one.register_forward_hook(lambda _module, _args, output: shaped(output))
    watching = watched(module, reference, "warn")
    watching[-1].add_rules([Rule(kinds="rcc_output", statistics="rms")])
    x = torch.randn(4, 6)
    output, _w0x0, values = one_step(watching, 0, x, x)
    if output.shape[-1] == 6:
        assert values["rcc_output/fc/rms"] == pytest.approx(rms(output), rel=1e-6)
    else:  # whose bias is of other features
        assert values["monitor/errors"] == 1


@pytest.mark.parametrize("layer", [nn.Linear(6, 1), nn.LayerNorm(1)])
def test_an_output_that_a_hook_makes_a_number_is_compared(layer: Any) -> None:
    """As that of a layer for a single value: it has no last dimension."""
    module, reference = copy.deepcopy(layer), copy.deepcopy(layer)
    for one in (module, reference):
        nn.init.normal_(one.weight)
        nn.init.normal_(one.bias)
        one.register_forward_hook(lambda _module, _args, output: output.squeeze())
    x, x0 = torch.randn(2, *reference.weight.shape[-1:])
    found = checked(module, reference, x, x0)
    assert found["rcc_effective_update/fc/rms"] == pytest.approx(rms(module(x) - reference(x)), rel=1e-5)
    assert found["rcc_propagating_update/fc/rms"] == pytest.approx(rms(reference(x) - reference(x0)), rel=1e-5)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_inputs_gives_its_bias() -> None:
    """There are no numbers in its input to divide anything by."""
    module, reference = nn.Linear(0, 5), nn.Linear(0, 5)
    nn.init.normal_(module.bias)
    nn.init.normal_(reference.bias)
    x = torch.randn(4, 0)
    found = checked(module, reference, x, x)
    assert found["rcc_effective_update/fc/rms"] == pytest.approx(rms(module.bias - reference.bias), rel=1e-6)
    assert found["rcc_propagating_update/fc/rms"] == 0
    assert found["monitor/errors"] == 0


@pytest.mark.parametrize(("epsilon", "normalized"), [(0.0, float("nan")), (1e-200, 0.0)])
def test_what_cannot_be_normalized_is_no_error_and_leaves_nothing_behind(epsilon: float, normalized: float) -> None:
    """A token of zeros without an epsilon; the values of the step after are right."""
    watching = watched(nn.RMSNorm(6, eps=epsilon), nn.RMSNorm(6, eps=epsilon))
    RefinedCoordinateCheck(watching[-1])
    _wx, _w0x0, values = one_step(watching, 0, torch.zeros(4, 6), torch.zeros(4, 6))
    assert values["rcc_input/fc.weight/rms"] == pytest.approx(normalized, nan_ok=True)
    assert values["rcc_input/fc/rms"] == 0
    output, _w0x0, values = one_step(watching, 1, torch.randn(4, 6), torch.randn(4, 6))
    assert values["rcc_output/fc/rms"] == pytest.approx(rms(output), rel=1e-6)


def test_an_error_in_the_kernel_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other kernel has measured its terms by then."""
    watching = watched(nn.LayerNorm(6), nn.LayerNorm(6), "warn")
    RefinedCoordinateCheck(watching[-1])
    x, broken = torch.randn(4, 6), SimpleNamespace(add_normalized=lambda *_args: 1 / 0)
    with monkeypatch.context() as patch:
        patch.setattr("lightning_module_monitor.probes.terms_in_place.compiled_normalized", lambda: broken)
        _wx, _w0x0, values = one_step(watching, 0, x, x)
    assert values["monitor/errors"] > 0
    nn.init.constant_(watching[0]["fc"].weight, 3.0)
    output, _w0x0, values = one_step(watching, 1, x, x)
    assert values["rcc_output/fc/rms"] == pytest.approx(rms(output), rel=1e-6)


def without_bias(layer: nn.Module) -> None:
    """A change of structure."""
    layer.register_parameter("bias", None)


def with_epsilon(layer: Any) -> None:
    """A change of no parameter."""
    layer.eps = 0.5


def longer(layer: Any) -> None:
    """A change of shapes."""
    layer.weight, layer.bias, layer.normalized_shape = nn.Parameter(torch.ones(9)), nn.Parameter(torch.zeros(9)), (9,)


@pytest.mark.parametrize(
    ("changes", "whose"), [(without_bias, "reference"), (with_epsilon, "both"), (with_epsilon, "model"), (longer, "both")]
)
def test_what_changes_between_steps_is_seen(changes: Any, whose: str) -> None:
    """In the model, the reference or both; after a step that has prepared for what was before."""
    module, reference = nn.LayerNorm(6), nn.LayerNorm(6)
    for parameter in (*module.parameters(), *reference.parameters()):
        nn.init.normal_(parameter)
    watching = watched(module, reference)
    RefinedCoordinateCheck(watching[-1])
    one_step(watching, 0, torch.randn(4, 6), torch.randn(4, 6))
    for one in {"model": [module], "reference": [reference], "both": [module, reference]}[whose]:
        changes(one)
    x, x0 = (torch.randn(4, *module.normalized_shape) for _ in range(2))
    wx, w0x0, values = one_step(watching, 1, x, x0)
    with torch.no_grad():
        again = reference(x)
    assert values["rcc_effective_update/fc/rms"] == pytest.approx(rms(wx - again), rel=1e-5, abs=1e-6)
    assert values["rcc_propagating_update/fc/rms"] == pytest.approx(rms(again - w0x0), rel=1e-5)


def test_a_copy_of_what_was_prepared_is_prepared_anew() -> None:
    """It has addresses, which are those of the original."""
    model, before = nn.ModuleDict({"fc": nn.Linear(6, 6)}), nn.ModuleDict({"fc": nn.Linear(6, 6)})
    reference = Reference(model, before, follows=False, cpu_offload=False)
    sites = [
        Watched(ModuleSite("fc", ("fc",), model["fc"]), {"rcc_output": Watch("rcc_output", "fc", statistics={"rms": STATISTICS["rms"]})})
    ]
    units = Units()
    assert units.of(sites, reference) is units.of(sites, reference)
    for copied, its_reference in (copy.deepcopy((units, reference)), pickle.loads(pickle.dumps((units, reference)))):
        assert not copied.of(sites, its_reference)  # the original's modules have no sibling there


def test_a_monitor_is_copied_while_a_step_is_checked() -> None:
    """With the model, as by a program that keeps its best state; the step goes on as before."""
    module, reference = nn.Linear(6, 6), nn.Linear(6, 6)
    watching = model, before, monitor = watched(module, reference)
    RefinedCoordinateCheck(monitor)
    x, x0 = torch.randn(2, 4, 6)
    _wx, _w0x0, expected_values = one_step(watching, 0, x, x0)
    monitor.begin_step(1)
    copy.deepcopy(watching)
    with monitor.no_monitor():
        before["fc"](x0)
    model["fc"](x)
    record = monitor.end_step()
    assert record is not None
    assert record.values == pytest.approx(expected_values, rel=1e-6)


class Doubling(nn.Linear):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        """The output for twice the input."""
        return super().forward(x.mul_(2))


def doubling(layer: Any) -> nn.Module:
    """With a forward of its own that writes into its input."""
    forward = layer.forward
    layer.forward = lambda x: forward(x.mul_(2))
    return layer


def doubled(layer: nn.Module) -> nn.Module:
    """With somebody's hook that writes into the input."""

    def write(_module: nn.Module, args: tuple[Tensor], _output: Tensor) -> None:
        args[0].mul_(2)

    layer.register_forward_hook(write)
    return layer


@pytest.mark.parametrize("make", [lambda: Doubling(6, 6), lambda: doubling(nn.Linear(6, 6))], ids=["its class", "itself"])
def test_a_layer_that_overwrites_its_input_does_so_once(make: Any) -> None:
    """In the model's tensor, and not once more as the reference is run on it; the input is that from before."""
    watching = watched(make(), make())
    RefinedCoordinateCheck(watching[-1])
    x, x0 = torch.ones(4, 6), torch.ones(4, 6)
    with torch.no_grad():
        _wx, _w0x0, values = one_step(watching, 0, x, x0)
    assert torch.equal(x, torch.full((4, 6), 2.0))
    assert values["rcc_input/fc/rms"] == 1
    assert values["rcc_input_change/fc/rms"] == 0
    assert values["rcc_propagating_update/fc/rms"] == 0


def test_a_hook_that_overwrites_the_input_does_not_do_so_again() -> None:
    """The reference's hooks run on a copy of the model's tensor."""
    watching = watched(doubled(nn.Linear(6, 6)), doubled(nn.Linear(6, 6)))
    RefinedCoordinateCheck(watching[-1])
    x = torch.ones(4, 6)
    with torch.no_grad():
        one_step(watching, 0, x, torch.ones(4, 6))
    assert torch.equal(x, torch.full((4, 6), 2.0))
