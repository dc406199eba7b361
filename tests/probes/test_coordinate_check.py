"""The refined coordinate check in a plain loop, against independent formulas in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import mup
import pytest
import torch
from helpers.plain_steps import record_of, run_both
from helpers.zoo import ZOO, batches, make
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import ModuleMonitor, RefinedCoordinateCheck, Rule, register_rcc_layer
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.model.copies import frozen_copy
from lightning_module_monitor.probes.rcc_layers import EFFECTIVE, OUTPUT, PROPAGATING, REFERENCE_OUTPUT, TERMS, layer_parts
from lightning_module_monitor.probes.rcc_terms import finished_norms, operator_norms
from lightning_module_monitor.statistics.precision import Difference
from lightning_module_monitor.statistics.spectra import TOLERANCE

ROUNDING = 1e-5
"""By how much an operator norm may be too large."""


class Scale(nn.Module):
    """A layer of a user's weights type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, values: Tensor) -> Tensor:
        return values * self.weight + self.bias


register_rcc_layer(Scale, lambda x, weight, bias, module: x * weight + bias)


class Conv1D(nn.Module):
    """Hugging Face's linear layer with a transposed weight."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


def mup_readout(shared: bool = False) -> nn.Module:
    """A readout of mup's, twice as wide as its base: it multiplies its input by 3 / 2."""

    def make_layer(width: int) -> nn.Module:
        if shared:
            return mup.MuSharedReadout(nn.Embedding(6, width).weight, bias=False, output_mult=3.0)
        return mup.MuReadout(width, 6, output_mult=3.0)

    layer = make_layer(4)
    mup.set_base_shapes(layer, make_layer(2), delta=make_layer(3))
    return layer


@pytest.fixture(autouse=True)
def hugging_face_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check knows the class by its name. It has that name only within a test, because other tests import every class by name."""
    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "linear": (lambda: nn.Linear(4, 6), ((3, 5, 4),), {}),
    "linear without bias": (lambda: nn.Linear(4, 6, bias=False), ((5, 4),), {}),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), ((3, 4, 9),), {}),
    "conv2d in groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding="same"), ((3, 4, 7, 8),), {}),
    "conv2d, circular": (lambda: nn.Conv2d(2, 3, (2, 3), padding=(1, 2), padding_mode="circular"), ((3, 2, 5, 6),), {}),
    "conv3d, no batch": (lambda: nn.Conv3d(2, 3, 2), ((2, 4, 4, 3),), {}),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(4, 6, 3), ((3, 4, 5),), {}),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), ((3, 4, 5, 4),), {}),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 2, 2, dilation=2), ((2, 2, 3, 3, 3),), {}),
    "layer norm": (lambda: nn.LayerNorm((3, 4)), ((5, 3, 4),), {}),
    "layer norm without bias": (lambda: nn.LayerNorm(4, bias=False), ((5, 4),), {}),
    "rms norm": (lambda: nn.RMSNorm(4), ((5, 4),), {}),
    "group norm": (lambda: nn.GroupNorm(2, 4), ((3, 4, 5),), {}),
    "batch norm": (lambda: nn.BatchNorm2d(4), ((3, 4, 2, 5),), {}),
    "batch norm, frozen": (lambda: nn.BatchNorm1d(4).eval(), ((5, 4),), {}),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), ((6, 3), (6, 4)), {}),
    "a type of the user": (Scale, ((3, 4),), {}),
    "Conv1D": (lambda: Conv1D(6, 4), ((3, 5, 4),), {}),
    "readout of mup": (mup_readout, ((3, 5, 4),), {}),
    "shared readout of mup": (lambda: mup_readout(shared=True), ((5, 4),), {}),
}


class Keep:
    """A user's function that keeps its arguments in the order of the calls."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __call__(self, x: Tensor) -> float:
        self.tensors.append(x)
        return 0.0


def keepers(kinds: tuple[str, ...] = TERMS) -> tuple[dict[str, Keep], list[Rule]]:
    """Rules that keep the tensors of each kind."""
    kept = {kind: Keep() for kind in kinds}
    return kept, [Rule(kinds=kind, functions={"keep": keep}) for kind, keep in kept.items()]


def checked_step(model: nn.Module, reference: nn.Module, x: Tensor, statistics: Sequence[str] = ("rms",)) -> dict[str, float]:
    """The values of a step with the coordinate check, in which model and reference get the same input."""
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        RefinedCoordinateCheck(monitor, statistics)
        monitor.begin_step(0)
        run_both(monitor, reference, model, x)
        record = record_of(monitor)
    return dict(record.values)


class Run:
    """A module and a reference that has other weights, called on other inputs, under a monitor."""

    def __init__(self, name: str, rules: list[Rule]) -> None:
        torch.manual_seed(3)
        make_layer, args, kwargs = LAYERS[name]
        self.module = make_layer().double()
        self.reference = frozen_copy(self.module)
        for parameter in self.module.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        for buffer in self.module.buffers():
            buffer.add_(1)
        self.x, self.x0 = (
            ([torch.randn(shape).double() for shape in args], {n: torch.randn(shape).double() for n, shape in kwargs.items()})
            for _which in range(2)
        )
        self.monitor = ModuleMonitor(rules=rules, on_error="raise")
        self.monitor.set_module(self.module)
        self.monitor.set_reference_module(self.reference)
        self.outputs: list[Any] = []
        self.values = self.step()

    def step(self) -> dict[str, float]:
        self.monitor.begin_step(0)
        with self.monitor.no_monitor():
            self.outputs.append(self.reference(*copy.deepcopy(self.x0[0]), **copy.deepcopy(self.x0[1])))
        self.outputs.append(self.module(*copy.deepcopy(self.x[0]), **copy.deepcopy(self.x[1])))
        record = self.monitor.end_step()
        assert record is not None
        return dict(record.values)


def first_tensor(output: Any) -> Tensor:
    """An output, or the first part of it."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output.detach()


@pytest.mark.parametrize("name", LAYERS)
def test_the_two_terms_add_up(name: str) -> None:
    """Effective plus propagating update is W x - W0 x0, and effective is what another run of both modules on x gives."""
    kept, rules = keepers()
    torch.manual_seed(9)
    state = torch.get_rng_state()
    run = Run(name, rules)
    w0x0, wx = (first_tensor(output) for output in run.outputs)
    effective, propagating = kept[EFFECTIVE].tensors[0], kept[PROPAGATING].tensors[0]
    layout = [tensor.movedim(1, -1) if name in CHANNELS_SECOND else tensor for tensor in (wx, w0x0)]
    if name == "conv3d, no batch":
        layout = [tensor.movedim(0, -1) for tensor in (wx, w0x0)]
    torch.testing.assert_close(effective + propagating, layout[0] - layout[1], rtol=0, atol=1e-13)
    torch.testing.assert_close(kept[OUTPUT].tensors[0], layout[0], rtol=0, atol=0)
    torch.testing.assert_close(kept[REFERENCE_OUTPUT].tensors[0], layout[1], rtol=0, atol=0)
    assert effective.abs().max() > 1e-3
    assert propagating.abs().max() > 1e-3
    torch.set_rng_state(state)


MUP_READOUTS = ("readout of mup", "shared readout of mup")
CHANNELS_SECOND = {name for name in LAYERS if "conv" in name or name == "group norm" or "batch norm" in name} - {"conv3d, no batch"}


def by_hand(module: Any, reference: Any, x: Tensor, x0: Tensor) -> dict[str, Tensor]:
    """The terms of some layers' weights alone, written out: sums over indices, without torch's layers."""
    W, W0 = module.weight.detach(), reference.weight.detach()
    if isinstance(module, mup.MuReadout):
        W, W0 = 1.5 * W, 1.5 * W0
    if isinstance(module, nn.Linear):
        return {EFFECTIVE: torch.einsum("oi,...i->...o", W - W0, x), PROPAGATING: torch.einsum("oi,...i->...o", W0, x - x0)}
    if isinstance(module, nn.Conv1d):
        patches, patches0 = (F.pad(tensor, (1, 1)).unfold(2, 3, 2) for tensor in (x, x0))
        return {
            EFFECTIVE: torch.einsum("oik,nilk->nlo", W - W0, patches),
            PROPAGATING: torch.einsum("oik,nilk->nlo", W0, patches - patches0),
        }
    dims = {nn.LayerNorm: (-1,), nn.BatchNorm2d: (0, 2, 3)}[type(module)]
    hat, hat0 = (
        (tensor - tensor.mean(dims, keepdim=True)) / (tensor.var(dims, unbiased=False, keepdim=True) + module.eps).sqrt()
        for tensor in (x, x0)
    )
    if isinstance(module, nn.BatchNorm2d):
        hat, hat0 = hat.movedim(1, -1), hat0.movedim(1, -1)
    return {EFFECTIVE: (W - W0) * hat, PROPAGATING: W0 * (hat - hat0)}


@pytest.mark.parametrize("name", ["linear", "linear without bias", "conv1d", "layer norm without bias", "batch norm", *MUP_READOUTS])
def test_the_terms_of_the_weight_alone(name: str) -> None:
    """At ``fc.weight``: (W - W0) x and W0 (x - x0), written out; their rms is the textbook's."""
    run = Run(name, [Rule(kinds=list(TERMS), statistics=["rms", "token_norm"])])
    expected = by_hand(run.module, run.reference, run.x[0][0], run.x0[0][0])
    for kind, tensor in expected.items():
        assert run.values[f"{kind}/_root_.weight/rms"] == pytest.approx(float(tensor.square().mean().sqrt()), rel=1e-9), kind
        assert run.values[f"{kind}/_root_.weight/token_norm"] == pytest.approx(float(tensor.norm(dim=-1).mean()), rel=1e-9), kind
    bias = getattr(run.module, "bias", None)
    is_without = bias is None
    assert (run.values[f"{EFFECTIVE}/_root_/rms"] == run.values[f"{EFFECTIVE}/_root_.weight/rms"]) == is_without
    assert run.values[f"{PROPAGATING}/_root_/rms"] == run.values[f"{PROPAGATING}/_root_.weight/rms"]


WITHOUT_BOUND = ("batch norm, frozen", "bilinear", "a type of the user")
"""Layers without an alignment."""


def matrix_of(module: nn.Module, weight: Tensor) -> list[Tensor]:
    """The matrices of a weight, group by group, or its diagonal."""
    if weight.dim() == 1 or isinstance(module, nn.LayerNorm):
        return [torch.diag(weight.flatten())]
    groups = getattr(module, "groups", 1)
    return [part.flatten(1) for part in weight.chunk(groups)]


@pytest.mark.parametrize("name", LAYERS)
def test_operator_norms_are_the_largest_singular_values_and_no_alignment_is_above_one(name: str) -> None:
    """Against an SVD in float64; the alignment is the term's norm over the product of operator norm and input norm.

    There is no alignment if it is not known how the weight is applied, or if the product of the norms is no bound.
    """
    kinds = [kind for kind in ("rcc_operator_norm", "rcc_alignment") if layer_parts(LAYERS[name][0]())[""].has_kind(kind)]
    run = Run(name, [Rule(kinds=kind) for kind in kinds])
    weight, reference = run.module.weight.detach(), run.reference.weight.detach()  # type: ignore[operator, union-attr]
    for which, tensor in (("update", weight - reference), ("reference", reference)):
        expected = max(float(torch.linalg.matrix_norm(matrix, 2)) for matrix in matrix_of(run.module, tensor))
        assert run.values[f"rcc_operator_norm/_root_/{which}"] == pytest.approx(expected, rel=TOLERANCE), which
    alignments = {key.rpartition("/")[2]: value for key, value in run.values.items() if key.startswith("rcc_alignment")}
    assert alignments.keys() == (set() if name in WITHOUT_BOUND else {"effective", "propagating"})
    assert all(0.05 < value <= 1 for value in alignments.values())
    if name == "linear" or name in MUP_READOUTS:
        x = run.x[0][0]
        expected = float((x @ (weight - reference).T).norm() / torch.linalg.matrix_norm(weight - reference, 2) / x.norm())
        assert run.values["rcc_alignment/_root_/effective"] == pytest.approx(expected, rel=TOLERANCE)
    if name == "conv1d":
        x = F.pad(run.x[0][0] - run.x0[0][0], (1, 1)).unfold(2, 3, 2)
        term = torch.einsum("oik,nilk->nlo", reference, x)
        expected = float(term.norm() / torch.linalg.matrix_norm(reference.flatten(1), 2) / x.norm())
        assert run.values["rcc_alignment/_root_/propagating"] == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d in groups", "conv2d, circular", "transposed conv1d", "transposed conv2d"])
def test_an_alignment_reaches_one_and_not_more(name: str) -> None:
    """With an input along the leading direction of the weight's change; overlapping patches count each."""
    run = Run(name, [Rule(kinds="rcc_alignment")])
    groups = getattr(run.module, "groups", 1)
    change = torch.zeros_like(run.module.weight)  # type: ignore[arg-type]
    change[...] = 1.0 if groups == 1 else 0.0
    change[: len(change) // groups] = 1.0
    run.module.weight.data = run.reference.weight.data + change  # type: ignore[operator, union-attr]
    run.x[0][0].fill_(1.0)
    alignment = run.step()["rcc_alignment/_root_/effective"]
    assert alignment <= 1
    if name == "linear":
        assert alignment == pytest.approx(1.0, rel=1e-6)


def test_no_alignment_is_above_one_if_the_norm_is_too_small() -> None:
    """Singular values that are all alike have no leading direction: the norm is too small, and the input is the leading direction."""
    torch.manual_seed(0)
    module = nn.Linear(512, 512)
    reference = copy.deepcopy(module)
    left, right = (torch.linalg.qr(torch.randn(512, 512).double())[0] for _side in range(2))
    values = torch.linspace(1, 0, 512).double().sqrt()
    with torch.no_grad():
        module.weight.add_((left * values @ right).float())
    monitor = ModuleMonitor(rules=[Rule(kinds="rcc_operator_norm"), Rule(kinds="rcc_alignment")])
    monitor.set_module(module)
    monitor.set_reference_module(reference)
    monitor.begin_step(0)
    x = right[:1].float()
    with monitor.no_monitor():
        reference(x)
    module(x)
    monitor.end_step()
    values_of_step = monitor.get_step_metrics()
    assert 1 - TOLERANCE < values_of_step["rcc_operator_norm/_root_/update"] < 1 - ROUNDING
    assert values_of_step["rcc_alignment/_root_/effective"] == 1


def test_the_second_input_of_a_bilinear_layer_has_a_site() -> None:
    """Its terms of the input are recorded at ``input_1``."""
    run = Run("bilinear", [Rule(kinds=list(TERMS), statistics="rms")])
    second = run.x[0][1]
    assert run.values["rcc_input/_root_.input_1/rms"] == pytest.approx(float(second.square().mean().sqrt()))


def test_an_embedding_has_no_input_terms() -> None:
    """Its effective update is that of the selected rows."""
    module = nn.Embedding(10, 4).double()
    reference = copy.deepcopy(module)
    module.weight.data.add_(torch.arange(40.0).view(10, 4))
    ids = torch.tensor([[1, 7, 1]])
    values = checked_step(module, reference, ids)
    expected = torch.arange(40.0).view(10, 4)[ids].square().mean().sqrt()
    assert values["rcc_effective_update/_root_/rms"] == pytest.approx(float(expected))
    kinds = {key.split("/")[0] for key in values}
    assert kinds == {"rcc_output", "rcc_reference_output", "rcc_effective_update", "rcc_operator_norm", "monitor"}


def training(  # noqa: PLR0917  # a loop and its parts
    model: nn.Module,
    monitor: ModuleMonitor,
    steps: list[list[tuple[Tensor, Tensor]]],
    optimizer: torch.optim.Optimizer,
    check: RefinedCoordinateCheck | None = None,
    reference: nn.Module | None = None,
) -> list[dict[str, float]]:
    """Steps of micro-batches in a plain loop, with the reference run by hand; the check comes after the optimizer has stepped."""
    records = []
    for step, micro_batches in enumerate(steps):
        monitor.begin_step(step)
        for x, y in micro_batches:
            if reference is not None:
                with monitor.no_monitor():
                    reference(x)
            F.cross_entropy(model(x), y, reduction="sum").backward()
            monitor.after_micro_batch()
        monitor.monitor_parameters()
        optimizer.step()
        optimizer.zero_grad()
        if check is not None:
            check.refined_coordinate_check()
        record = record_of(monitor)
        records.append(dict(record.values))
    return records


@pytest.mark.parametrize("name", ZOO)
def test_everything_is_exactly_zero_at_step_0(name: str) -> None:
    """Dropout, BatchNorm, attention, in-place layers, odd outputs: same input, same random numbers, same mode."""
    model = make(name)
    reference = copy.deepcopy(model)
    zero = ["rcc_effective_update", "rcc_propagating_update", "rcc_input_change", "activation_difference", "parameter_difference"]
    with ModuleMonitor(rules=Rule(kinds=zero, statistics="abs_max"), on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        first, second = training(model, monitor, [batches(3, 5), batches(8)], optimizer, reference=reference)
    # An empty tensor has no maximum.
    values = {key: value for key, value in first.items() if not key.startswith("monitor/") and "/empty/" not in key}
    assert len(values) >= 20
    assert {key: value for key, value in values.items() if value != 0} == {}
    # After a step every trained parameter has changed, so the zeros are values.
    assert sum(second[key] > 0 for key in values if key in second) >= 6


class Transposes(nn.Module):
    """Layers get inputs that are not in order, as in a state space model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(16, 9, bias=False)
        self.projection = nn.Linear(48, 9)
        self.norm, self.convolution = nn.LayerNorm(16), nn.Conv1d(48, 48, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.convolution(self.first(x).transpose(1, 2))
        first, second = self.second(self.norm(hidden)), self.projection(hidden.transpose(1, 2))
        return first.sum() + second.sum()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_inputs_out_of_order_are_exactly_zero_at_step_0(is_frozen: bool) -> None:
    """Torch multiplies them by another kernel if a gradient is needed; so does the check."""
    torch.manual_seed(0)
    model = Transposes()
    model.first.requires_grad_(not is_frozen)
    reference = copy.deepcopy(model)
    x = torch.randn(3, 16, 32)
    values = checked_step(model, reference, x, statistics=["abs_max"])
    changes = [value for key, value in values.items() if key.startswith((f"{EFFECTIVE}/", f"{PROPAGATING}/"))]
    assert changes == [0.0] * 20


def test_frozen_layer_first_layer_and_the_closed_form_of_an_sgd_step() -> None:
    """One step of plain SGD on sum over b of the loss: (W - W0) x = -lr * sum_b g_b (x_b . x), with g the gradient at the output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4).requires_grad_(False), nn.Linear(4, 3)).double()
    reference = copy.deepcopy(model)
    kept, rules = keepers((EFFECTIVE,))
    (x, y), (new_x, new_y) = batches(7, 4)
    x, new_x = x.double(), new_x.double()
    logits: list[Tensor] = []
    handle = model[0].register_forward_hook(lambda _m, _a, output: (output.retain_grad(), logits.append(output), None)[2])
    with ModuleMonitor(rules=[*rules, Rule(kinds=[EFFECTIVE, PROPAGATING], statistics="abs_max")], on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        _first, second = training(model, monitor, [[(x, y)], [(new_x, new_y)]], optimizer, reference=reference)
    handle.remove()
    gradient = logits[0].grad
    assert gradient is not None
    weight_term = -0.05 * torch.einsum("bo,bi,ni->no", gradient, x, new_x)
    bias_term = -0.05 * gradient.sum(0)
    sites = 3  # three Linear layers, with and without bias; the first layer comes first in both steps
    first_layer = kept[EFFECTIVE].tensors[2 * sites : 2 * sites + 2]
    torch.testing.assert_close(first_layer[0], weight_term + bias_term, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(first_layer[1], weight_term, rtol=1e-10, atol=1e-14)
    assert second["rcc_effective_update/2/abs_max"] == second["rcc_effective_update/2.weight/abs_max"] == 0
    assert second["rcc_propagating_update/2/abs_max"] > 0
    assert second["rcc_propagating_update/0/abs_max"] == 0
    assert second["rcc_effective_update/0/abs_max"] > 0


@pytest.mark.parametrize("name", ["linear", "conv2d in groups", "batch norm", "layer norm"])
def test_token_rms_is_token_norm_over_the_root_of_the_features(name: str) -> None:
    """Features are the last dimension, and the channels of convolutions and BatchNorm."""
    run = Run(name, [Rule(kinds=list(TERMS), statistics=["token_rms", "token_norm"])])
    features = {"linear": (4, 6), "conv2d in groups": (4, 6), "batch norm": (4, 4), "layer norm": (4, 4)}[name]
    for kind in TERMS:
        size = features[0] if "input" in kind else features[1]
        assert run.values[f"{kind}/_root_/token_rms"] == pytest.approx(run.values[f"{kind}/_root_/token_norm"] / size**0.5, rel=1e-12), kind


def test_the_check_is_the_same_whatever_the_split_into_micro_batches() -> None:
    """8 samples at once, 3 and 5, or one by one: the same values, operator runs and alignments too."""
    runs = []
    for sizes in ((8,), (3, 5), (1,) * 8):
        model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).double()
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.data.normal_()
        reference = copy.deepcopy(model)
        x, y = batches(8)[0]
        parts = list(zip(x.double().split(sizes), y.split(sizes), strict=True))
        with ModuleMonitor(on_error="raise") as monitor:
            monitor.set_module(model)
            monitor.set_reference_module(reference)
            check = RefinedCoordinateCheck(monitor, statistics=("rms", "token_norm", "abs_max"))
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            runs.append(training(model, monitor, [parts] * 3, optimizer, check, reference))
    assert len(runs[0][2]) > 60
    for split in runs[1:]:
        for whole_step, split_step in zip(runs[0], split, strict=True):
            assert split_step == pytest.approx(whole_step, rel=1e-9, abs=1e-14)


def test_terms_without_the_bias_are_those_of_the_forward_pass_although_the_optimizer_has_stepped() -> None:
    """A bias that the optimizer moves by 100 between forward and check."""
    model = nn.Linear(6, 3).double()
    reference = copy.deepcopy(model)
    x, y = batches(8)[0]
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        check = RefinedCoordinateCheck(monitor)
        weight = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), 1000.0)
        (values,) = training(model, monitor, [[(x.double(), y)]], optimizer, check, reference)
    assert (model.bias - reference.bias).abs().max() > 100
    assert values["rcc_effective_update/_root_.weight/rms"] == 0
    assert values["rcc_operator_norm/_root_/update"] == 0
    assert values["rcc_output/_root_.weight/rms"] == pytest.approx(float((x.double() @ weight.T).square().mean().sqrt()), rel=1e-12)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_checkpointing_computes_again_counts_once(use_reentrant: bool) -> None:
    """The recomputation within the backward pass is not a call of the module."""

    class Checkpointed(nn.Module):
        def __init__(self, use_checkpoint: bool) -> None:
            super().__init__()
            self.inner, self.head, self.use = nn.Linear(6, 6), nn.Linear(6, 3), use_checkpoint

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            return self.head(checkpoint(self.inner, x, use_reentrant=use_reentrant) if self.use else self.inner(x))

    runs = []
    for use in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(use)
        reference = copy.deepcopy(model)
        with ModuleMonitor(on_error="raise") as monitor:
            monitor.set_module(model)
            monitor.set_reference_module(reference)
            check = RefinedCoordinateCheck(monitor, statistics=["rms", "norm"])
            monitor.add_activation_difference_metric("norm")
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            runs.append(training(model, monitor, [batches(8)] * 2, optimizer, check, reference))
    assert runs[0] == runs[1]
    assert runs[1][1]["rcc_effective_update/inner/norm"] > 0


def test_a_module_called_several_times_is_checked_call_by_call() -> None:
    """The terms of two calls in a step are those of both calls, each with its weights input."""
    model, reference = make("shared").double(), make("shared").double()
    reference.load_state_dict(model.state_dict())
    model.inner.weight.data.add_(0.3)
    x = batches(8)[0][0].double()
    values = checked_step(model, reference, x)
    W, W0, b = model.inner.weight.detach(), reference.inner.weight.detach(), model.inner.bias.detach()
    second, second0 = torch.relu(x @ W.T + b), torch.relu(x @ W0.T + b)
    effective = torch.cat([x, second]) @ (W - W0).T
    propagating = torch.cat([torch.zeros_like(x), second - second0]) @ W0.T
    assert values["rcc_effective_update/inner/rms"] == pytest.approx(float(effective.square().mean().sqrt()), rel=1e-9)
    assert values["rcc_propagating_update/inner/rms"] == pytest.approx(float(propagating.square().mean().sqrt()), rel=1e-9)


def test_which_modules_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    """Modules of the table's types; attention by its projections; one line names other modules with weights."""

    class WithToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(8))
            self.attention = nn.MultiheadAttention(8, 2)
            self.blocks = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))
            self.recurrent = nn.LSTM(8, 8)

    monitor = ModuleMonitor()
    monitor.set_module(WithToken())
    monitor.set_reference_module(WithToken())
    with caplog.at_level("INFO"):
        RefinedCoordinateCheck(monitor)
    planned = monitor.planned_keys()
    projections = [f"attention.{name}_proj{weight}" for name in "qkv" for weight in ("", ".weight")]
    assert [key.split("/")[1] for key in planned if key.startswith("rcc_output/")] == [*projections, "blocks.0", "blocks.0.weight"]
    norms = ["attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.out_proj", "blocks.0"]
    assert [key for key in planned if key.startswith("rcc_operator_norm/")] == [
        f"rcc_operator_norm/{site}/{which}" for site in norms for which in ("update", "reference")
    ]
    assert "monitor/rcc_skipped_calls" in planned
    (line,) = [record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()]
    of_torch = "blocks.2 (Linear), recurrent (LSTM)"
    left_out = f"_root_ ({__name__}.{WithToken.__qualname__}), {of_torch}"  # libraries have classes of the names of torch's
    why = "whose type is not in its table, or whose weight is quantized or computed from others"
    assert line == f"rcc leaves out modules {why}: {left_out}. register_rcc_layer(type, function) adds a type."


@pytest.mark.parametrize("has_one_weight", [True, False])
def test_attention_is_checked_by_its_projections(has_one_weight: bool) -> None:
    """The terms of q, k and v are computed from the parts of the weights in float64, with masks, dropout and keywords."""
    torch.manual_seed(0)
    sizes = {} if has_one_weight else {"kdim": 6, "vdim": 5}
    model = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True, **sizes).double()
    reference = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    features = {"query": 4, "key": sizes.get("kdim", 4), "value": sizes.get("vdim", 4)}
    x, x0 = ({name: torch.randn(2, 3, size).double() for name, size in features.items()} for _which in range(2))
    mask = torch.full((3, 3), -torch.inf).double().triu(1)
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        RefinedCoordinateCheck(monitor)
        monitor.begin_step(0)
        with monitor.no_monitor():
            reference(**x0, attn_mask=mask)
        model(x["query"], key=x["key"], value=x["value"], attn_mask=mask)
        record = record_of(monitor)
    assert all(map(math.isfinite, record.values.values()))
    for index, (letter, name) in enumerate(zip("qkv", features, strict=True)):
        weights = [
            each.in_proj_weight[4 * index : 4 * index + 4] if has_one_weight else getattr(each, f"{letter}_proj_weight")
            for each in (model, reference)
        ]
        W, W0 = (weight.detach() for weight in weights)
        b, b0 = (each.in_proj_bias[4 * index : 4 * index + 4].detach() for each in (model, reference))
        expected = {
            f"rcc_output/attention.{letter}_proj": x[name] @ W.T + b,
            f"rcc_reference_output/attention.{letter}_proj": x0[name] @ W0.T + b0,
            f"rcc_effective_update/attention.{letter}_proj": x[name] @ (W - W0).T + b - b0,
            f"rcc_effective_update/attention.{letter}_proj.weight": x[name] @ (W - W0).T,
            f"rcc_propagating_update/attention.{letter}_proj": (x[name] - x0[name]) @ W0.T,
            f"rcc_input/attention.{letter}_proj": x[name],
            f"rcc_input_change/attention.{letter}_proj": x[name] - x0[name],
        }
        for key, tensor in expected.items():
            value = record.values[key.replace("attention.", "_root_.") + "/rms"]
            assert value == pytest.approx(float(tensor.square().mean().sqrt()), rel=1e-12), key
        norm = float(torch.linalg.matrix_norm(W - W0, 2))
        assert record.values[f"rcc_operator_norm/_root_.{letter}_proj/update"] == pytest.approx(norm, rel=TOLERANCE)
        aligned = float((x[name] @ (W - W0).T).norm() / norm / x[name].norm())
        assert record.values[f"rcc_alignment/_root_.{letter}_proj/effective"] == pytest.approx(aligned, rel=TOLERANCE)
    out = float(torch.linalg.matrix_norm((model.out_proj.weight - reference.out_proj.weight).detach(), 2))
    assert record.values["rcc_operator_norm/out_proj/update"] == pytest.approx(out, rel=TOLERANCE)


def test_a_check_by_hand_needs_a_module_and_a_reference() -> None:
    """The error names what is missing."""
    with pytest.raises(ValueError, match="has no module"):
        RefinedCoordinateCheck(ModuleMonitor())
    monitor = ModuleMonitor()
    monitor.set_module(nn.Linear(6, 3))
    with pytest.raises(ValueError, match="has no reference"):
        RefinedCoordinateCheck(monitor)


class Calls(nn.Module):
    """A layer that a test calls in odd ways."""

    def __init__(self, call: Callable[[nn.Linear, Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        self.call(self.layer, x)
        return self.layer(x)


SKIPPED_CALLS: dict[str, tuple[Callable[[nn.Linear, Tensor], object], int]] = {
    "a tensor subclass": (lambda layer, x: layer(TwoTensor(x, x)), 1),
    "no call at all": (lambda _layer, _x: None, 0),
}


@pytest.mark.parametrize("name", SKIPPED_CALLS)
def test_a_call_without_plain_tensors_is_skipped_and_counted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The other call of the same step is compared as usual, without an error."""
    call, num_skipped = SKIPPED_CALLS[name]
    torch.manual_seed(0)
    model = Calls(call)
    reference = copy.deepcopy(model)
    model.layer.weight.data.add_(0.1)
    x = torch.randn(4, 6)
    with caplog.at_level("INFO"):
        values = checked_step(model, reference, x)
    assert values["monitor/rcc_skipped_calls"] == num_skipped
    assert values["monitor/errors"] == 0
    expected = x.double() @ torch.full((6, 3), 0.1).double()
    assert values["rcc_effective_update/layer/rms"] == pytest.approx(float(expected.square().mean().sqrt()), rel=1e-5)
    assert sum("monitor/rcc_skipped_calls" in record.getMessage() for record in caplog.records) == bool(num_skipped)


class Experts(nn.Module):
    """Routed experts: the number of tokens of each depends on trained weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.experts = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        output = x.new_zeros(len(x), 3)
        for index, expert in enumerate(self.experts):
            if (chosen == index).any():
                output[chosen == index] = expert(x[chosen == index])
        return output


def test_experts_with_other_token_counts_than_in_the_reference_are_skipped() -> None:
    """Their operator norms stay, which depend on the weights alone; likewise without a call of the reference."""
    torch.manual_seed(0)
    model = Experts()
    reference = copy.deepcopy(model)
    x = torch.randn(16, 6)
    counts0 = torch.bincount(reference.router(x).argmax(-1), minlength=2)
    model.router.bias.data[0] += 0.5
    counts = torch.bincount(model.router(x).argmax(-1), minlength=2)
    assert (counts0 > 0).all()
    assert (counts != counts0).all()
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        RefinedCoordinateCheck(monitor)
        for step in range(2):
            monitor.begin_step(step)
            if step == 0:
                with monitor.no_monitor():
                    reference(x)
            model(x)
            values = monitor.end_step().values  # type: ignore[union-attr]
            assert values["monitor/rcc_skipped_calls"] == (2 if step == 0 else 3)
            assert values["monitor/errors"] == 0
            assert ("rcc_output/router/rms" in values) == (step == 0)
            assert not [key for key in values if key.startswith("rcc_effective_update/experts")]
            expected = float(torch.linalg.matrix_norm(reference.experts[1].weight.detach(), 2))  # type: ignore[operator, union-attr]
            assert values["rcc_operator_norm/experts.1/reference"] == pytest.approx(expected, rel=TOLERANCE)


def test_no_module_of_the_reference_is_called_within_the_live_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the reference's module there would run its hooks on the model's arguments and context."""
    model, called = make("transformer"), []
    reference = copy.deepcopy(model)
    parts = set(reference.modules())
    call = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args, **kwargs: (called.append(self), call(self, *args, **kwargs))[1])
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        RefinedCoordinateCheck(monitor)
        monitor.begin_step(0)
        with monitor.no_monitor():
            reference(batches(4)[0][0])
        assert parts & set(called)
        called.clear()
        model(batches(4)[0][0])
        record = record_of(monitor)
    assert len([key for key in record.values if key.startswith("rcc_effective_update")]) == 16
    assert len(called) == len([module for module in model.modules() if not isinstance(module, NonDynamicallyQuantizableLinear)])
    assert not parts & set(called)


def test_functions_of_the_table_run_outside_of_function_modes() -> None:
    """A mode of the program gets the model's functions, and none of the check's."""

    class Functions(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Conv1d(3, 3, 1))
    reference = copy.deepcopy(model)
    x = torch.randn(2, 3, 6)
    functions = []
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        RefinedCoordinateCheck(monitor)
        for step in (None, 0):
            if step is not None:
                monitor.begin_step(step)
                with monitor.no_monitor():
                    reference(x)
            with Functions() as mode:
                model(x)
            functions.append([name for name in mode.names if name in ("linear", "layer_norm", "conv1d", "sub", "rsub")])
        record = record_of(monitor)
    assert functions == [["linear", "layer_norm", "conv1d"]] * 2
    assert "rcc_propagating_update/2/rms" in record.values


def test_a_model_without_a_layer_of_the_table_has_no_check() -> None:
    """The weights of a GRU are not a single linear map; the error names the rule."""
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(nn.Sequential(nn.GRU(4, 3)))
        monitor.set_reference_module(nn.Sequential(nn.GRU(4, 3)))
        with pytest.raises(ConfigError, match="none of 2 modules is a layer that the coordinate check knows"):
            RefinedCoordinateCheck(monitor)


def test_invalid_registrations() -> None:
    """A type that is not a class of modules, and a function without four arguments."""
    with pytest.raises(TypeError, match=r"layer_type is 3; expected a subclass of torch.nn.Module\."):
        register_rcc_layer(3, lambda x, weight, bias, module: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"does not take the arguments \(x, weight, bias, module\): too many positional arguments\."):
        register_rcc_layer(Scale, lambda x, weight: x)


def test_layers_with_another_computation_than_their_type_are_skipped() -> None:
    """An overridden forward, in a subclass or on the instance; computed weights; an embedding that writes into its weight."""

    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    class Standardized(nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(input, weight - weight.mean(), bias)

    patched = nn.Linear(2, 2)
    patched.forward = lambda input: input  # type: ignore[method-assign, assignment]
    inherits = type("Inherits", (nn.Linear,), {})(2, 2)
    skipped = [
        *(Own(2, 2), Standardized(2, 2, 1), patched, nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
        *(nn.Embedding(3, 2, max_norm=1.0), nn.EmbeddingBag(3, 2), nn.LayerNorm(2, elementwise_affine=False), nn.LSTM(2, 2)),
        *(nn.Linear(2, 2, dtype=torch.complex64), nn.SyncBatchNorm(2)),
    ]
    assert [name for layer in skipped for name in layer_parts(layer)] == []
    assert list(layer_parts(inherits)) == [""]


def norms_of(weights: dict[str, Difference]) -> dict[str, float]:
    """Operator norms as a step finishes them."""
    numbers = operator_norms(weights)
    return dict(zip(numbers, finished_norms([each.double().numpy() for each in numbers.values()]), strict=True))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("kind", ["random", "low rank", "zero", "small"])
def test_operator_norm_is_within_its_tolerance(kind: str, scale: float) -> None:
    """And never too large, for matrices with and without a leading direction; several at once."""
    torch.manual_seed(1)
    matrices = {
        "random": torch.randn(2, 1024, 512),
        "low rank": torch.randn(2, 300, 2) @ torch.randn(2, 2, 200),
        "zero": torch.zeros(1, 300, 200),
        "small": torch.randn(3, 2, 5),
    }[kind]
    expected = max(float(torch.linalg.matrix_norm(matrix.double(), 2)) for matrix in matrices) * scale
    norm = norms_of({"another": Difference(matrices), "scaled": Difference(matrices * scale)})["scaled"]
    assert expected * (1 - TOLERANCE) <= norm <= expected * (1 + ROUNDING)


def test_operator_norms_of_many_random_matrices() -> None:
    """The worst is within the stated tolerance, the median much closer, and none is too large."""
    matrices = torch.randn(100, 128, 256, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.matrix_norm(matrices.double(), 2)
    norms = norms_of({str(i): Difference(matrix.unsqueeze(0)) for i, matrix in enumerate(matrices)})
    missing = 1 - torch.tensor(list(norms.values())).double() / expected
    assert missing.max() < TOLERANCE
    assert missing.median() < 1e-6
    assert missing.min() > -ROUNDING


def test_operator_norms_of_differences() -> None:
    """Groups, shapes that differ, weights in half precision and out of order, and non-finite elements."""
    torch.manual_seed(1)
    weights = {"linear": torch.randn(1, 70, 40), "groups": torch.randn(3, 8, 40), "wide": torch.randn(1, 5, 90)}
    weights["half"] = torch.randn(1, 20, 40).bfloat16()
    weights["out of order"] = torch.randn(1, 40, 20).transpose(1, 2)
    other = {name: weight + 1e-3 * torch.randn_like(weight) for name, weight in weights.items()}
    other["rank one"] = weights["linear"] + 1e-3 * torch.randn(1, 70, 1) * torch.randn(1, 1, 40)
    weights["rank one"] = weights["linear"]
    norms = norms_of({name: Difference(weight, other[name]) for name, weight in weights.items()})
    for name, weight in weights.items():
        change = Difference(weight, other[name]).computed().double()
        expected = max(float(torch.linalg.matrix_norm(matrix, 2)) for matrix in change)
        assert expected * (1 - TOLERANCE) <= norms[name] <= expected * (1 + ROUNDING), name
    for bad in (torch.nan, torch.inf):
        broken = weights["linear"].clone()
        broken[0, 3, 4] = bad
        norms = norms_of({"bad": Difference(broken, other["linear"]), "good": Difference(weights["linear"], other["linear"])})
        assert not math.isfinite(norms["bad"])
        assert math.isfinite(norms["good"])


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 24])
def test_operator_norms_where_rows_of_one_direction_would_cancel_out(num_rows: int) -> None:
    """Order, signs and growing sizes of the rows do not matter."""
    torch.manual_seed(0)
    direction, signs = torch.randn(20), torch.tensor([1.0, -1.0]).repeat(num_rows)[:num_rows]
    # All rows have a common part, and larger parts that cancel out.
    hidden = torch.zeros(num_rows, 20)
    hidden[:, 0], hidden[:, 1] = 0.5, 2.0 * signs
    matrices = {
        "opposite": torch.outer(signs, direction),
        "hidden": hidden,
        "growing": torch.logspace(-35, 2, num_rows).unsqueeze(1) * torch.randn(num_rows, 20),
        "late": torch.zeros(num_rows, 20),
        "tiny": torch.outer(signs, direction) * 1e-40,
    }
    matrices["late"][-1] = direction
    norms = norms_of({name: Difference(matrix.unsqueeze(0)) for name, matrix in matrices.items()})
    for name, matrix in matrices.items():
        expected = float(torch.linalg.matrix_norm(matrix.double(), 2))
        assert norms[name] == pytest.approx(expected, rel=1e-5), name
        # Other matrices in the same call change nothing.
        assert norms_of({"alone": Difference(matrix.unsqueeze(0))})["alone"] == pytest.approx(norms[name], rel=1e-6), name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operator_norms_beside_an_empty_weight_and_with_another_default_device(device: str) -> None:
    """The norm of an empty weight is 0; the program's default device does not matter."""
    weights = {"empty": torch.ones(1, 0, 4), "none": torch.ones(0), "one": torch.full((1, 2, 2), 0.5)}
    with torch.device(device):
        norms = norms_of({name: Difference(weight) for name, weight in weights.items()})
    assert norms == pytest.approx({"empty": 0.0, "none": 0.0, "one": 1.0})


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_operator_norms_follow_a_weight_that_trains(optimizer: type[torch.optim.Optimizer]) -> None:
    """30 steps of batches that differ: at each the norm of W - W0 is that of an SVD, within the tolerance, and no alignment is above 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    reference = copy.deepcopy(model)
    instance = optimizer(model.parameters(), lr=0.01)
    checked = 0
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        check = RefinedCoordinateCheck(monitor)
        for step in range(30):
            changes = {i: (model[i].weight - reference[i].weight).detach().double() for i in (0, 2, 4)}
            (values,) = training(model, monitor, [batches(16, seed=step)], instance, check, reference)
            for i, change in changes.items():
                if step:
                    expected = float(torch.linalg.matrix_norm(change, 2))
                    assert values[f"rcc_operator_norm/{i}/update"] == pytest.approx(expected, rel=TOLERANCE), step
                    checked += 1
            alignments = [value for key, value in values.items() if key.startswith("rcc_alignment")]
            assert all(0 < value <= 1 for value in alignments)
            assert len(alignments) == (5 if step else 0)
    assert checked == 29 * 3


@pytest.mark.parametrize("name", ["linear", "linear without bias"])
def test_histograms_of_terms_count_every_element(name: str) -> None:
    """At both sites, even if both are the same tensor."""
    run = Run(name, [Rule(kinds=list(TERMS), statistics=["rms", "hist"]), Rule(kinds="rcc_alignment")])
    run.monitor.begin_step(1)
    with run.monitor.no_monitor():
        run.reference(*run.x0[0])
    output = run.module(*run.x[0])
    record = run.monitor.end_step()
    assert record is not None
    for kind in TERMS:
        size = run.x[0][0].numel() if "input" in kind else output.numel()
        for site in ("_root_", "_root_.weight"):
            assert int(record.histograms[f"{kind}/{site}/hist"].counts.sum()) == size, (kind, site)
    assert not any("alignment" in key for key in record.histograms)
