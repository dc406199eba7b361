"""The refined coordinate check in a plain loop, against independent formulas in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.zoo import ZOO, batches, make
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_module_monitor import ModuleMonitor, RefinedCoordinateCheck, Rule
from lightning_module_monitor.probes.checked_modules import EFFECTIVE, INPUT_CHANGE, OUTPUT, PROPAGATING, REFERENCE_OUTPUT, TERMS
from lightning_module_monitor.probes.operator_norms import TOLERANCE, operator_norms
from lightning_module_monitor.statistics.difference import Difference

CLOSE = 0.05
"""What operator norms of the matrices here are within; others may be as far off as ``TOLERANCE``."""


class Gate(nn.Module):
    """A layer of nobody's type: draws numbers, writes into its input, takes keyword arguments, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor, *, shift: Tensor, dropout: float = 0.5) -> tuple[Tensor, dict[str, Tensor]]:
        x = F.dropout(x.add_(shift), dropout) * self.scale
        return x.sum(-1), {"gated": x}


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
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), ((3, 4, 6),), {}),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), ((6, 3), (6, 4)), {}),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True),
        ((2, 5, 4),),
        {"key": (2, 3, 4), "value": (2, 3, 4)},
    ),
    "lstm": (lambda: nn.LSTM(4, 3, 2, dropout=0.5), ((5, 2, 4),), {}),
    "gate": (Gate, ((3, 4),), {"shift": (4,)}),
}


class Keep:
    """A function of the user's that keeps what it gets, by kind and site, in the order of the calls."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __call__(self, x: Tensor) -> float:
        self.tensors.append(x)
        return 0.0


def keepers(kinds: tuple[str, ...] = TERMS) -> tuple[dict[str, Keep], list[Rule]]:
    """Rules that keep the tensors of each kind."""
    kept = {kind: Keep() for kind in kinds}
    return kept, [Rule(kinds=kind, functions={"keep": keep}) for kind, keep in kept.items()]


class Run:
    """A module and a reference that has other weights, called on other inputs, under a monitor."""

    def __init__(self, name: str, rules: list[Rule]) -> None:
        torch.manual_seed(3)
        make_layer, args, kwargs = LAYERS[name]
        self.module = make_layer().double()
        self.reference = copy.deepcopy(self.module)
        for parameter in self.module.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        for buffer in self.module.buffers():
            buffer.add_(1)
        self.x, self.x0 = (
            ([torch.randn(shape).double() for shape in args], {n: torch.randn(shape).double() for n, shape in kwargs.items()})
            for _which in range(2)
        )
        if name == "attention":
            for inputs in (self.x, self.x0):
                inputs[1]["need_weights"] = True  # type: ignore[assignment]
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
@pytest.mark.shows("plain loop", "RCC")
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


CHANNELS_SECOND = {name for name in LAYERS if "conv" in name or name in ("group norm", "instance norm") or "batch norm" in name} - {
    "conv3d, no batch"
}


def by_hand(module: Any, reference: Any, x: Tensor, x0: Tensor) -> dict[str, Tensor]:
    """The terms of some layers' weights alone, written out: sums over indices, without torch's layers."""
    W, W0 = module.weight.detach(), reference.weight.detach()
    if isinstance(module, nn.Linear):
        return {EFFECTIVE: torch.einsum("oi,...i->...o", W - W0, x), PROPAGATING: torch.einsum("oi,...i->...o", W0, x - x0)}
    if isinstance(module, nn.Conv1d):
        patches, patches0 = (F.pad(one, (1, 1)).unfold(2, 3, 2) for one in (x, x0))
        return {
            EFFECTIVE: torch.einsum("oik,nilk->nlo", W - W0, patches),
            PROPAGATING: torch.einsum("oik,nilk->nlo", W0, patches - patches0),
        }
    dims = {nn.LayerNorm: (-1,), nn.BatchNorm2d: (0, 2, 3)}[type(module)]
    hat, hat0 = (
        (one - one.mean(dims, keepdim=True)) / (one.var(dims, unbiased=False, keepdim=True) + module.eps).sqrt() for one in (x, x0)
    )
    if isinstance(module, nn.BatchNorm2d):
        hat, hat0 = hat.movedim(1, -1), hat0.movedim(1, -1)
    return {EFFECTIVE: (W - W0) * hat, PROPAGATING: W0 * (hat - hat0)}


@pytest.mark.parametrize("name", ["linear", "linear without bias", "conv1d", "layer norm without bias", "batch norm"])
@pytest.mark.shows("plain loop", "RCC")
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


def matrix_of(module: nn.Module, weight: Tensor) -> list[Tensor]:
    """The matrices of a weight, group by group, or its diagonal."""
    if weight.dim() == 1 or isinstance(module, nn.LayerNorm):
        return [torch.diag(weight.flatten())]
    groups = getattr(module, "groups", 1)
    return [part.flatten(1) for part in weight.chunk(groups)]


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("attention", "lstm", "gate", "batch norm, frozen", "bilinear")])
def test_operator_norms_are_the_largest_singular_values_and_no_alignment_is_above_one(name: str) -> None:
    """Against an SVD in float64; the alignment is the term's norm over operator norm times norm of all that the weight is applied to."""
    run = Run(name, [Rule(kinds="rcc_operator_norm"), Rule(kinds="rcc_alignment")])
    weight, own = run.module.weight.detach(), run.reference.weight.detach()  # type: ignore[operator, union-attr]
    for which, tensor in (("update", weight - own), ("reference", own)):
        expected = max(float(torch.linalg.matrix_norm(one, 2)) for one in matrix_of(run.module, tensor))
        assert run.values[f"rcc_operator_norm/_root_/{which}"] == pytest.approx(expected, rel=CLOSE), which
    for which in ("effective", "propagating"):
        assert 0.05 < run.values[f"rcc_alignment/_root_/{which}"] <= 1
    if name == "linear":
        x = run.x[0][0]
        expected = float((x @ (weight - own).T).norm() / torch.linalg.matrix_norm(weight - own, 2) / x.norm())
        assert run.values["rcc_alignment/_root_/effective"] == pytest.approx(expected, rel=CLOSE)
    if name == "conv1d":
        x = F.pad(run.x[0][0] - run.x0[0][0], (1, 1)).unfold(2, 3, 2)
        term = torch.einsum("oik,nilk->nlo", own, x)
        expected = float(term.norm() / torch.linalg.matrix_norm(own.flatten(1), 2) / x.norm())
        assert run.values["rcc_alignment/_root_/propagating"] == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d in groups", "conv2d, circular", "transposed conv1d", "transposed conv2d"])
def test_an_alignment_reaches_one_and_not_more(name: str) -> None:
    """With the input that a weight's change grows most: of one leading direction, everywhere; overlapping patches count each."""
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


def test_no_alignment_is_above_one_where_the_norm_is_found_too_small() -> None:
    """A random matrix has no leading direction: its norm is found a few percent too small, and here the input is what it grows most."""
    torch.manual_seed(0)
    module = nn.Linear(256, 256)
    reference = copy.deepcopy(module)
    with torch.no_grad():
        module.weight.add_(change := torch.randn(256, 256))
    _left, values, right = torch.linalg.svd(change.double())
    monitor = ModuleMonitor(rules=[Rule(kinds="rcc_operator_norm"), Rule(kinds="rcc_alignment")])
    monitor.set_module(module)
    monitor.set_reference_module(reference)
    monitor.begin_step(0)
    x = right[:1].float()
    with monitor.no_monitor():
        reference(x)
    module(x)
    monitor.end_step()
    found = monitor.get_step_metrics()
    assert 0.9 * float(values[0]) < found["rcc_operator_norm/_root_/update"] < 0.999 * float(values[0])
    assert found["rcc_alignment/_root_/effective"] == 1


def test_bilinear_weight_is_a_matrix_of_pairs_and_has_no_alignment() -> None:
    """Its operator norms are of shape (out, in1 * in2)."""
    run = Run("bilinear", [Rule(kinds="rcc_operator_norm"), Rule(kinds="rcc_alignment"), Rule(kinds=list(TERMS), statistics="rms")])
    expected = float(torch.linalg.matrix_norm(run.reference.weight.detach().flatten(1), 2))  # type: ignore[operator, union-attr]
    assert run.values["rcc_operator_norm/_root_/reference"] == pytest.approx(expected, rel=CLOSE)
    assert not [key for key in run.values if key.startswith("rcc_alignment")]
    second = run.x[0][1]
    assert run.values["rcc_input/_root_.input_1/rms"] == pytest.approx(float(second.square().mean().sqrt()))


def test_further_outputs_and_inputs_have_names() -> None:
    """A tuple's second output, an argument by keyword."""
    run = Run("gate", [Rule(kinds=list(TERMS), statistics="rms")])
    sites = {kind: {key.split("/")[1] for key in run.values if key.startswith(f"{kind}/")} for kind in TERMS}
    assert sites[EFFECTIVE] == {"_root_", "_root_.output_1_gated"}
    assert sites[INPUT_CHANGE] == {"_root_", "_root_.input_shift"}


def test_an_embedding_has_no_input_terms() -> None:
    """Its effective update is that of the rows that were looked up."""
    module = nn.Embedding(10, 4).double()
    reference = copy.deepcopy(module)
    module.weight.data.add_(torch.arange(40.0).view(10, 4))
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(module)
        monitor.set_reference_module(reference)
        RefinedCoordinateCheck(monitor)
        ids = torch.tensor([[1, 7, 1]])
        monitor.begin_step(0)
        with monitor.no_monitor():
            reference(ids)
        module(ids)
        record = monitor.end_step()
    assert record is not None
    expected = torch.arange(40.0).view(10, 4)[ids].square().mean().sqrt()
    assert record.values["rcc_effective_update/_root_/rms"] == pytest.approx(float(expected))
    kinds = {key.split("/")[0] for key in record.values}
    assert kinds == {"rcc_output", "rcc_reference_output", "rcc_effective_update", "rcc_operator_norm", "monitor"}


def training(  # noqa: PLR0917  # a loop and what is in it
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
        record = monitor.end_step()
        assert record is not None
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
    # Of an empty tensor there is no maximum.
    values = {key: value for key, value in first.items() if not key.startswith("monitor/") and "/empty/" not in key}
    assert len(values) >= 20
    assert {key: value for key, value in values.items() if value != 0} == {}
    # And not because nothing was looked at: after a step all that trains has moved.
    assert sum(second[key] > 0 for key in values if key in second) >= 7


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
    of_weight = -0.05 * torch.einsum("bo,bi,ni->no", gradient, x, new_x)
    of_bias = -0.05 * gradient.sum(0)
    sites = 3  # of three Linear layers, each with and without its bias; those of the first come first, in both steps
    first_layer = kept[EFFECTIVE].tensors[2 * sites : 2 * sites + 2]
    torch.testing.assert_close(first_layer[0], of_weight + of_bias, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(first_layer[1], of_weight, rtol=1e-10, atol=1e-14)
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


@pytest.mark.shows("accumulation", "RCC")
def test_the_check_is_the_same_whatever_the_split_into_micro_batches() -> None:
    """8 samples at once, 3 and 5, or one by one: the same values, operator norms and alignments too."""
    found = []
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
            found.append(training(model, monitor, [parts] * 3, optimizer, check, reference))
    assert len(found[0][2]) > 60
    for split in found[1:]:
        for whole_step, split_step in zip(found[0], split, strict=True):
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
@pytest.mark.shows("checkpointing, use_reentrant={use_reentrant}", "RCC")
def test_what_checkpointing_computes_again_counts_once(use_reentrant: bool) -> None:
    """The recomputation within the backward pass is no call of the module's."""

    class Checkpointed(nn.Module):
        def __init__(self, use_checkpoint: bool) -> None:
            super().__init__()
            self.inner, self.head, self.use = nn.Linear(6, 6), nn.Linear(6, 3), use_checkpoint

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            return self.head(checkpoint(self.inner, x, use_reentrant=use_reentrant) if self.use else self.inner(x))

    found = []
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
            found.append(training(model, monitor, [batches(8)] * 2, optimizer, check, reference))
    assert found[0] == found[1]
    assert found[1][1]["rcc_effective_update/inner/norm"] > 0


def test_a_module_called_several_times_is_checked_call_by_call() -> None:
    """Twice in a step: the terms are of both calls together, each with its own input."""
    model, reference = make("shared").double(), make("shared").double()
    reference.load_state_dict(model.state_dict())
    model.inner.weight.data.add_(0.3)
    x = batches(8)[0][0].double()
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        RefinedCoordinateCheck(monitor)
        monitor.begin_step(0)
        with monitor.no_monitor():
            reference(x)
        model(x)
        record = monitor.end_step()
    assert record is not None
    W, W0, b = model.inner.weight.detach(), reference.inner.weight.detach(), model.inner.bias.detach()
    second, second0 = torch.relu(x @ W.T + b), torch.relu(x @ W0.T + b)
    effective = torch.cat([x, second]) @ (W - W0).T
    propagating = torch.cat([torch.zeros_like(x), second - second0]) @ W0.T
    assert record.values["rcc_effective_update/inner/rms"] == pytest.approx(float(effective.square().mean().sqrt()), rel=1e-9)
    assert record.values["rcc_propagating_update/inner/rms"] == pytest.approx(float(propagating.square().mean().sqrt()), rel=1e-9)


def test_which_modules_are_checked() -> None:
    """Those that own weights; attention as a whole; a container that owns some, and its parts."""

    class WithToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(8))
            self.attention = nn.MultiheadAttention(8, 2)
            self.blocks = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))

    monitor = ModuleMonitor()
    monitor.set_module(WithToken())
    monitor.set_reference_module(WithToken())
    RefinedCoordinateCheck(monitor)
    planned = monitor.wishes.planned_keys()
    assert [key.split("/")[1] for key in planned if key.startswith("rcc_output/")] == [
        *("_root_", "attention", "blocks.0", "blocks.0.weight", "blocks.2", "blocks.2.weight"),
    ]
    assert [key for key in planned if key.startswith("rcc_operator_norm/")] == [
        f"rcc_operator_norm/blocks.{i}/{which}" for i in (0, 2) for which in ("update", "reference")
    ]


def test_without_a_run_of_the_reference_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The effective update needs none; the rest is absent."""
    model = nn.Linear(6, 3)
    monitor = ModuleMonitor()
    monitor.set_module(model)
    with pytest.raises(ValueError, match="has no reference"):
        RefinedCoordinateCheck(monitor)
    monitor.set_reference_module(copy.deepcopy(model))
    check = RefinedCoordinateCheck(monitor)
    monitor.begin_step(0)
    with caplog.at_level("INFO"):
        model(torch.ones(2, 6))
    check.refined_coordinate_check()
    record = monitor.end_step()
    assert record is not None
    assert "the reference has not run for this call" in caplog.text
    kinds = {key.split("/")[0] for key in record.values}
    assert kinds == {"rcc_effective_update", "rcc_output", "rcc_input", "rcc_operator_norm", "monitor"}
    monitor.close()
    with pytest.raises(ValueError, match="has no module"):
        RefinedCoordinateCheck(ModuleMonitor())


def test_a_model_without_a_layer_of_a_known_type_has_terms_alone() -> None:
    """There is no weight of which there could be an operator norm."""
    model = nn.Sequential(nn.GRU(4, 3))
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(copy.deepcopy(model))
        RefinedCoordinateCheck(monitor)
        keys = monitor.wishes.plan().keys()
        assert {key.split("/")[0] for key in keys} == set(TERMS)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("kind", ["random", "low rank", "zero", "small"])
def test_operator_norm_is_within_its_tolerance(kind: str, scale: float) -> None:
    """And never too large: of random matrices, which have no leading direction, of low rank, of zeros; several at once."""
    torch.manual_seed(1)
    matrices = {
        "random": torch.randn(2, 1024, 512),
        "low rank": torch.randn(2, 300, 2) @ torch.randn(2, 2, 200),
        "zero": torch.zeros(1, 300, 200),
        "small": torch.randn(3, 2, 5),
    }[kind]
    expected = max(float(torch.linalg.matrix_norm(one.double(), 2)) for one in matrices) * scale
    found = operator_norms({"another": Difference(matrices), "sought": Difference(matrices * scale)})
    norm = float(found["sought"])
    assert expected * (1 - CLOSE) <= norm <= expected * (1 + 1e-5)


def test_operator_norms_of_many_random_matrices() -> None:
    """The worst is within the stated tolerance, the median much closer, and none is too large."""
    matrices = torch.randn(100, 128, 256, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.matrix_norm(matrices.double(), 2)
    found = operator_norms({str(i): Difference(one.unsqueeze(0)) for i, one in enumerate(matrices)})
    missing = 1 - torch.stack(list(found.values())) / expected
    assert missing.max() < TOLERANCE
    assert missing.median() < 0.025
    assert missing.min() > -1e-5


@pytest.mark.parametrize("is_compiled", [True, False])
def test_operator_norms_of_differences_with_and_without_the_compiled_kernel(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups, shapes that differ, weights in half precision and out of order, and what is not finite."""
    if not is_compiled:
        monkeypatch.setattr("lightning_module_monitor.statistics.running.kernel", lambda: None)
    torch.manual_seed(1)
    own = {"linear": torch.randn(1, 70, 40), "groups": torch.randn(3, 8, 40), "wide": torch.randn(1, 5, 90), "half": torch.randn(1, 20, 40)}
    own["half"] = own["half"].bfloat16()
    own["out of order"] = torch.randn(1, 40, 20).transpose(1, 2)
    other = {name: weight + 1e-3 * torch.randn_like(weight) for name, weight in own.items()}
    other["rank one"] = own["linear"] + 1e-3 * torch.randn(1, 70, 1) * torch.randn(1, 1, 40)
    own["rank one"] = own["linear"]
    found = operator_norms({name: Difference(weight, other[name]) for name, weight in own.items()})
    for name, weight in own.items():
        change = Difference(weight, other[name]).computed().double()
        expected = max(float(torch.linalg.matrix_norm(one, 2)) for one in change)
        assert expected * (1 - CLOSE) <= float(found[name]) <= expected * (1 + 1e-5), name
    for bad in (torch.nan, torch.inf):
        broken = own["linear"].clone()
        broken[0, 3, 4] = bad
        found = operator_norms({"bad": Difference(broken, other["linear"]), "good": Difference(own["linear"], other["linear"])})
        assert not math.isfinite(float(found["bad"]))
        assert math.isfinite(float(found["good"]))


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 24])
def test_operator_norms_where_rows_of_one_direction_would_cancel_out(num_rows: int) -> None:
    """The start is a sum of the rows: their order, their signs, and sizes that grow from row to row do not matter."""
    torch.manual_seed(0)
    direction, signs = torch.randn(20), torch.tensor([1.0, -1.0]).repeat(num_rows)[:num_rows]
    # Its rows have a part in common, by which all get the same sign, and then the larger parts cancel out.
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
    found = operator_norms({name: Difference(matrix.unsqueeze(0)) for name, matrix in matrices.items()})
    for name, matrix in matrices.items():
        expected = float(torch.linalg.matrix_norm(matrix.double(), 2))
        assert float(found[name]) == pytest.approx(expected, rel=1e-5), name
        # And whatever else is computed in the same call.
        assert float(operator_norms({"alone": Difference(matrix.unsqueeze(0))})["alone"]) == float(found[name]), name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operator_norms_beside_an_empty_weight_and_with_another_default_device(device: str) -> None:
    """The norm of nothing is 0, and keeps nobody from theirs; new tensors of the program's are none of the monitor's."""
    weights = {"empty": torch.ones(1, 0, 4), "none": torch.ones(0), "one": torch.full((1, 2, 2), 0.5)}
    with torch.device(device):
        found = operator_norms({name: Difference(weight) for name, weight in weights.items()})
    assert {name: float(norm) for name, norm in found.items()} == pytest.approx({"empty": 0.0, "none": 0.0, "one": 1.0})


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_operator_norms_follow_a_weight_that_trains(optimizer: type[torch.optim.Optimizer]) -> None:
    """30 steps of batches that differ: at each the norm of W - W0 is that of an SVD, within the tolerance, and no alignment is above 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    reference = copy.deepcopy(model)
    one = optimizer(model.parameters(), lr=0.01)
    checked = 0
    with ModuleMonitor(on_error="raise") as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        check = RefinedCoordinateCheck(monitor)
        for step in range(30):
            changes = {i: (model[i].weight - reference[i].weight).detach().double() for i in (0, 2, 4)}
            (values,) = training(model, monitor, [batches(16, seed=step)], one, check, reference)
            for i, change in changes.items():
                if step:
                    expected = float(torch.linalg.matrix_norm(change, 2))
                    assert values[f"rcc_operator_norm/{i}/update"] == pytest.approx(expected, rel=CLOSE), step
                    checked += 1
            alignments = [value for key, value in values.items() if key.startswith("rcc_alignment")]
            assert all(0 < value <= 1 for value in alignments)
            assert len(alignments) == (5 if step else 0)
    assert checked == 29 * 3


@pytest.mark.parametrize("name", ["linear", "linear without bias"])
@pytest.mark.shows("plain loop", "histograms")
def test_histograms_of_terms_count_every_element(name: str) -> None:
    """At both sites; where both are the same tensor it is counted for both."""
    run = Run(name, [Rule(kinds=list(TERMS), statistics=["rms", "hist"]), Rule(kinds="rcc_alignment")])
    run.monitor.begin_step(1)
    with run.monitor.no_monitor():
        run.reference(*run.x0[0])
    output = run.module(*run.x[0])
    found = run.monitor.end_step()
    assert found is not None
    for kind in TERMS:
        size = run.x[0][0].numel() if "input" in kind else output.numel()
        for site in ("_root_", "_root_.weight"):
            assert int(found.histograms[f"{kind}/{site}/hist"].counts.sum()) == size, (kind, site)
    assert not any("alignment" in key for key in found.histograms)
