"""Statistics of singular values, as they are recorded: against ``torch.linalg.svdvals`` in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.lightning_package import Callback, LightningModule, Trainer
from helpers.ranks import Meeting, ThreadRank
from helpers.training import trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import STATISTICS, ModuleMonitor, ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.distributed.reduce import sum_rows
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.statistics.spectral_statistics import LARGEST_VALUES, SPECTRAL_STATISTICS
from lightning_module_monitor.statistics.stream import Output, Stream
from lightning_module_monitor.step.accumulator import StepAccumulator
from lightning_module_monitor.step.state import SeriesState

OF_MATRICES = ["spectral_norm", "stable_rank", "effective_rank"]
OF_FEATURES = ["stable_rank", "effective_rank", "centered_stable_rank", "centered_effective_rank"]
TOLERANCES = {"spectral_norm": 1e-5, "stable_rank": 1e-4, "effective_rank": 1e-3, "singular_value_1": 1e-5, "singular_value_2": 1e-4}
"""Of small matrices, of which all steps are made; 1e-3, 2e-3 and 1e-2 are allowed."""


class Net(LightningModule):
    """Layers whose weights are matrices in different ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.grouped = nn.Conv2d(4, 6, 3, groups=2)
        self.transposed = nn.ConvTranspose2d(6, 8, 2, groups=2)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.embedding = nn.Embedding(100, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.transposed(self.grouped(x).relu()).flatten(2).transpose(1, 2))
        tokens = tokens + self.embedding(torch.arange(tokens.shape[1]))
        return self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def loader() -> DataLoader[Any]:
    """Twelve samples in batches of two."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(12, 4, 6, 6, generator=generator), torch.arange(12) % 3), batch_size=2)


class Truth(Callback):
    """Keeps what a step has, by kind and site, by hooks of its own."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}
        self.of_step: dict[str, list[Tensor]] = {}
        """Those of the first optimizer step."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name in ("grouped", "norm", "head"):
            self.outputs[name] = []
            pl_module.get_submodule(name).register_forward_hook(
                lambda _m, _i, output, name=name: self.outputs[name].append(output.detach())
            )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        if trainer.global_step == 0:
            for name, parameter in pl_module.named_parameters():
                before = parameter.detach().double()
                assert parameter.grad is not None
                self.kept[name] = {"parameter": before, "gradient": parameter.grad.double()}
            self.outputs, self.of_step = {name: [] for name in self.outputs}, self.outputs

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1 and "update" not in self.kept["head.weight"]:
            for name, parameter in pl_module.named_parameters():
                kept = self.kept[name]
                kept["update"] = (parameter.detach() - kept["parameter"].float()).double()
                state = trainer.optimizers[0].state[parameter]
                kept["optimizer_state"] = state["momentum_buffer"].double()


def matrices(name: str, tensor: Tensor) -> list[Tensor]:
    """A parameter as matrices: written out for each layer."""
    match name:
        case "grouped.weight":
            return [tensor[:3].reshape(3, -1), tensor[3:].reshape(3, -1)]
        case "transposed.weight":  # (inputs, outputs / groups, 2, 2)
            return [part.transpose(0, 1).reshape(4, -1) for part in (tensor[:3], tensor[3:])]
        case _:
            return [tensor.reshape(1, -1) if tensor.dim() == 1 else tensor]


def truth(several: Sequence[Tensor]) -> dict[str, float]:
    """The statistics of the block-diagonal matrix of several."""
    values = torch.cat([torch.linalg.svdvals(matrix) for matrix in several]).sort(descending=True).values
    if not values[0]:
        return dict.fromkeys(TOLERANCES, math.nan) | {"spectral_norm": 0.0, "singular_value_1": 0.0}
    shares = values[values > 1e-7 * values[0]] / values.sum()
    return {
        "spectral_norm": float(values[0]),
        "stable_rank": float((values**2).sum() / values[0] ** 2),
        "effective_rank": math.exp(-float((shares * shares.log()).sum())),
        "singular_value_1": float(values[0]),
        "singular_value_2": float(values[1]) if len(values) > 1 else math.nan,
    }


def of_features(output: Tensor) -> dict[str, float]:
    """The statistics of samples and tokens by features."""
    rows = output.double()
    rows = rows.movedim(1, -1).reshape(-1, rows.shape[1]) if rows.dim() == 4 else rows.reshape(-1, rows.shape[-1])
    plain, centered = truth([rows]), truth([rows - rows.mean(0)])
    return {name: (centered if name.startswith("centered") else plain)[name.removeprefix("centered_")] for name in OF_FEATURES}


KINDS = ["parameter", "gradient", "update", "optimizer_state"]
RULES = [
    Rule(kinds=KINDS, statistics=OF_MATRICES, singular_values=2),
    Rule(kinds="parameter_difference", statistics=["spectral_norm", "norm"]),
    Rule(kinds="activation", sites=["grouped", "norm", "head"], statistics=OF_FEATURES),
]


def run(tmp_path: Path, callbacks: list[Callback]) -> Net:
    """Two optimizer steps of three micro-batches each."""
    module = Net()
    trainer(tmp_path, callbacks, max_steps=2, accumulate_grad_batches=3).fit(module, loader())
    return module


def test_a_run(tmp_path: Path) -> None:
    """Of every kind, of grouped and transposed convolutions, of attention, of vectors; exact over micro-batches; training as without."""
    callback, kept = ModuleMonitorCallback(every_n_steps=1, rules=RULES, reference="init"), Truth()
    module = run(tmp_path / "monitored", [kept, callback])
    assert callback.store_path is not None
    store = load_store(callback.store_path)

    def at(step: int, key: str) -> float:
        steps, series = store[key]
        return float(series[list(steps).index(step)])

    for name, by_kind in kept.kept.items():
        for kind, tensor in by_kind.items():
            site = f"{name}.momentum_buffer" if kind == "optimizer_state" else name
            expected = truth(matrices(name, tensor))
            for statistic, tolerance in TOLERANCES.items():
                found = at(0, f"{kind}/{site}/{statistic}")
                assert found == pytest.approx(expected[statistic], rel=tolerance, nan_ok=True), (kind, name, statistic)
            assert at(0, f"{kind}/{site}/residual_1") <= 1.5e-4 * expected["spectral_norm"]  # some gradients have few directions
    for name, outputs in kept.of_step.items():
        assert len(outputs) == 3
        for statistic, right in of_features(torch.cat(outputs)).items():
            assert at(0, f"activation/{name}/{statistic}") == pytest.approx(right, rel=1e-6)
    for name, by_kind in kept.kept.items():
        assert at(0, f"parameter_difference/{name}/spectral_norm") == 0
        # After the first step the difference is its update.
        expected = truth(matrices(name, by_kind["update"]))["spectral_norm"]
        assert at(1, f"parameter_difference/{name}/spectral_norm") == pytest.approx(expected, rel=1e-5)
    plain = run(tmp_path / "plain", [])
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def recorded(kind: str, tensors: Sequence[Tensor], outputs: dict[str, Output]) -> dict[str, float]:
    """The statistics of a stream's tensors together."""
    accumulator = StepAccumulator(lambda _stream, names, _source, error: errors.append(f"{names}: {error}"))
    errors.clear()
    stream = Stream(kind, "fc", outputs)
    for tensor in tensors:
        accumulator.observe(stream, tensor)
    values = accumulator.collect().values
    return {name: values[f"{kind}/fc/{name}"] for name in outputs}


errors: list[str] = []
FEATURES: dict[str, Output] = {name: SPECTRAL_STATISTICS[name] for name in OF_FEATURES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(40, 8), (4, 7, 8), (3, 8, 4, 5), (2, 8, 3, 4, 2), (8,), (3, 1)], ids=str)
def test_features(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The channels of images and volumes, else the last dimension; a large mean counts unless they are centred."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 5).to(dtype)
    parts = [x, 3 * x.flip(0)] if x.dim() > 1 else [x]
    num_features = {1: 1, 2: shape[-1], 3: shape[-1]}.get(x.dim(), 8)
    rows = [(part.movedim(1, -1) if x.dim() > 3 else part).double().reshape(-1, num_features) for part in parts]
    expected = of_features(torch.cat(rows))
    for name, found in recorded("activation", parts, FEATURES).items():
        assert found == pytest.approx(expected[name], rel=1e-4, nan_ok=True), name


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite(bad: float) -> None:
    """It is never hidden."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    x[2, 1] = bad
    assert all(map(math.isnan, recorded("activation", [torch.ones(6, 4), x], FEATURES).values()))
    assert not errors


def test_no_rank_of_zeros() -> None:
    """Where there is no rank there is no value, and no error."""
    assert all(map(math.isnan, recorded("activation", [torch.zeros(6, 4)], FEATURES).values()))
    assert not errors


def test_more_features_than_the_limit() -> None:
    """One error for all calls of a step, which names the limit; other statistics of the tensor are as ever."""
    outputs: dict[str, Any] = {**FEATURES, "norm": STATISTICS["norm"]}
    found = recorded("activation", [torch.ones(2, 1025)] * 3, outputs)
    assert found.pop("norm") == pytest.approx(math.sqrt(6 * 1025))
    assert all(map(math.isnan, found.values()))
    assert errors == [f"{', '.join(FEATURES)}: it has 1025 features; expected at most max_features=1024: time grows with their third power"]


def test_ranks_together_are_as_one() -> None:
    """Each has other samples, and one has none; a step in which no rank has any costs no collective more."""
    calls = [torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows)) for rows in (4, 30, 7)]

    def work(rank: ThreadRank) -> list[list[float]]:
        stream, state = Stream("activation", "fc", FEATURES), SeriesState()
        state.layout.add([stream])
        values = []
        for tensors in ([calls[:1], calls[1:], []][rank.index], []):
            accumulator = StepAccumulator(lambda *_error: None, state)
            for tensor in tensors:
                accumulator.observe(stream, tensor)
            numbers = accumulator.collect(rank).values
            values.append([numbers[key] for name in FEATURES if (key := f"activation/fc/{name}") in numbers])
        return values

    meeting: Meeting[list[list[float]]] = Meeting(3)
    expected = [*of_features(torch.cat(calls)).values()]
    for first, second in meeting.run(work):
        assert first == pytest.approx(expected, rel=1e-9)
        assert second == []
    assert sorted(meeting.calls) == ["max", "max", "max", "sum", "sum", "sum"]


def test_rows_of_ranks() -> None:
    """Rows that some ranks have are those of all; of rows that differ in length there is no sum."""

    def work(rank: ThreadRank) -> dict[str, list[float]]:
        rows = [{"both": [1.0, 2.0], "one": [3.0], "other": [1.0, 1.0]}, {"both": [10.0, 20.0], "other": [1.0]}][rank.index]
        found = sum_rows(["both", "one", "none", "other"], {name: np.array(row) for name, row in rows.items()}, rank)
        return {name: row.tolist() for name, row in found.items()}

    meeting: Meeting[dict[str, list[float]]] = Meeting(2)
    for found in meeting.run(work):
        assert found.pop("other") == pytest.approx([math.nan, math.nan], nan_ok=True)
        assert found == {"both": [11.0, 22.0], "one": [3.0]}
    assert meeting.calls == ["max", "sum"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kinds": "parameter", "statistics": "centered_effective_rank"},
            "'centered_effective_rank' is of the features of a layer, and 'parameter' has none",
        ),
        ({"kinds": "activation", "statistics": "spectral_norm"}, "'spectral_norm' is of matrices, and 'activation' has none"),
        ({"kinds": "activation", "singular_values": 2}, r"rules\[0\]\.singular_values 2 is of matrices, and 'activation' has none"),
        (
            {"kinds": "parameter", "statistics": "singular_value_3"},
            "'singular_value_3' is recorded by an option; expected sing",
        ),
        (
            {"kinds": "attention_entropy", "statistics": "stable_rank"},
            "'stable_rank' is of matrices or features, and 'attention_ent",
        ),
        ({"kinds": "parameter", "singular_values": 9}, "singular_values is 9; expected a whole number from 0 to 8"),
        ({"kinds": "parameter", "singular_values": True}, "singular_values is True; expected a whole number"),
        (
            {"kinds": "parameter", "statistics": "effective_rank", "max_features": 5000},
            "max_features is 5000; expected a whole number from 1 to",
        ),
        ({"kinds": "parameter", "statistics": "norm", "gather": 1}, "gather is 1; expected true or false"),
        ({"kinds": "parameter", "statistics": "stable_rank", "per_module": "_root_"}, "per_module: 'stable_rank' is of one matrix"),
        ({"kinds": "parameter", "singular_values": 1, "per_module": "_root_"}, "per_module: singular_values are of one matrix"),
    ],
)
def test_a_wrong_rule(options: dict[str, Any], message: str) -> None:
    """It is refused with what would be right."""
    with pytest.raises(ConfigError, match=message):
        ModuleMonitor(rules=[Rule(**options)]).set_module(nn.Linear(2, 2))


def test_a_matrix_that_is_laid_out_over_ranks() -> None:
    """Such a rule is refused before anything runs, unless it is to be assembled; so are features of which a rank may have parts."""
    layer = nn.Linear(2, 2)
    layer.weight._fsdp_flattened = True  # type: ignore[assignment]  # FSDP's own mark
    rule = Rule(kinds=["gradient", "update"], statistics=["norm", "stable_rank"], sites="weight")
    message = "'stable_rank' of 'weight': it is laid out over ranks .*; gather: true assembles it"
    with pytest.raises(ConfigError, match=message):
        ModuleMonitor(rules=rule).set_module(layer)
    ModuleMonitor(rules=dataclasses.replace(rule, gather=True)).set_module(layer)
    ModuleMonitor(rules=dataclasses.replace(rule, sites="bias")).set_module(layer)
    states = Rule(kinds="optimizer_state", singular_values=1, gather=True)
    with pytest.raises(ConfigError, match=r"'singular_value_1' of 'weight': it is laid .*; expected kinds without optimizer_state"):
        ModuleMonitor(rules=states).set_module(layer)


def test_a_matrix_that_is_too_large() -> None:
    """It is refused by name, before anything runs, where all its singular values are needed; its smaller side counts."""
    model = nn.Sequential(nn.Embedding(5000, 20), nn.Linear(40, 30))
    rule = Rule(kinds="parameter", statistics=["spectral_norm", "effective_rank"], max_features=25)
    with pytest.raises(ConfigError, match=r"'effective_rank' of '1\.weight' needs all 30 singular values, and max_features is 25"):
        ModuleMonitor(rules=rule).set_module(model)
    ModuleMonitor(rules=dataclasses.replace(rule, exclude=r"1\..*")).set_module(model)
    ModuleMonitor(rules=dataclasses.replace(rule, statistics="spectral_norm")).set_module(model)


def test_eigenvalues_that_do_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one value that cannot be computed, and no record that is lost: other statistics of the step are as ever."""

    def fails(_matrix: object) -> object:
        raise np.linalg.LinAlgError("Eigenvalues did not converge")

    monkeypatch.setattr(np.linalg, "eigvalsh", fails)
    outputs: dict[str, Any] = {"effective_rank": FEATURES["effective_rank"], "norm": STATISTICS["norm"]}
    values = recorded("activation", [torch.ones(3, 4)], outputs)
    assert math.isnan(values["effective_rank"])
    assert values["norm"] == pytest.approx(math.sqrt(12))
    assert errors == ["effective_rank: Eigenvalues did not converge"]


def test_calls_with_different_features() -> None:
    """Their products have no sum."""
    assert all(map(math.isnan, recorded("activation", [torch.ones(2, 4), torch.ones(2, 5)], FEATURES).values()))
    assert errors == [f"{', '.join(FEATURES)}: it has 5 features, and another call of the step had 4; expected as many"]


def test_a_dry_run_has_the_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In multiplications, beside the forward pass of the same weights."""
    rules = [Rule(kinds="gradient", types="Linear", sites="head.weight", statistics=OF_MATRICES), RULES[2]]
    run(tmp_path, [ModuleMonitorCallback(1, rules=rules, dry_run=True, store=False)])
    # Three steps of 3 x 8 elements, with the matrix and its transpose, and 3 x 11 numbers of known directions; then nine products of eight,
    # and eigenvalues.
    number = 3 * (2 * 24 + 3 * 11) + 9 * (8 + 4 * 3)
    forward = f"as a forward pass of {round(number / 48)} samples or tokens"
    text = capsys.readouterr().out
    assert f"  singular values of 2 tensors: {number:.2g} multiplications, {forward}\n" in text
    assert "  all singular values of the features of grouped, norm, head: for each sample or token" in text


def of_matrix(matrix: Tensor, num_values: int = 8) -> dict[str, float]:
    """The largest singular values of a parameter, their residuals, and its spectral norm, as they are recorded."""
    layer = nn.Module()
    layer.weight = nn.Parameter(matrix)
    with ModuleMonitor(rules=[Rule(kinds="parameter", statistics=["spectral_norm", "norm"], singular_values=num_values)]) as monitor:
        monitor.set_module(layer)
        monitor.begin_step(0)
        monitor.monitor_parameters()
        record = monitor.end_step()
    assert record is not None
    return {key.rpartition("/")[2]: value for key, value in record.values.items() if key.startswith("parameter/weight/")}


def test_a_residual_has_what_was_taken_for_rounding() -> None:
    """Small values of a matrix of low rank are further from the true ones than the bidiagonal matrix tells: they are not known."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(40, 40, generator=generator))[0] for _side in range(2))
    true = torch.tensor([1.0, 0.5, 9e-5, 8e-5, 7e-5, *[0.0] * 35])
    found = of_matrix((left * true) @ right, 5)
    for number, value in enumerate(true[:5].tolist(), start=1):
        residual = found[f"residual_{number}"]
        assert math.isnan(found[f"singular_value_{number}"]) == (number > 2)
        assert residual >= 1e-4
        assert number > 2 or found[f"singular_value_{number}"] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("shape", [(200_000,), (1, 200_000), (20_000, 8), (8, 20_000)], ids=str)
def test_long_sums(shape: tuple[int, ...]) -> None:
    """The spectral norm of what has one direction is its norm, whatever float32 makes of a long sum."""
    found = of_matrix(torch.full(shape, 0.3), 1)
    assert found["spectral_norm"] == pytest.approx(0.3 * math.sqrt(math.prod(shape)), rel=2e-6)
    assert found["spectral_norm"] <= found["norm"] * (1 + 1e-7)


def test_sparse_gradients() -> None:
    """They are made dense, as for other statistics."""
    model = nn.Embedding(50, 4, sparse=True)
    with ModuleMonitor(rules=[Rule(kinds="gradient", statistics=[*OF_MATRICES, "norm"])]) as monitor:
        monitor.set_module(model)
        monitor.begin_step(0)
        model(torch.arange(9)).square().sum().backward()
        monitor.monitor_gradients()
        record = monitor.end_step()
    assert record is not None
    assert model.weight.grad is not None
    expected = truth([model.weight.grad.to_dense().double()])
    assert record.values["monitor/errors"] == 0
    for name in OF_MATRICES:
        assert record.values[f"gradient/weight/{name}"] == pytest.approx(expected[name], rel=1e-4)


def test_names_of_values() -> None:
    """Two rules with different numbers of them go together."""
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 3.0], [4.0, 0.0]]))
    with ModuleMonitor(rules=[Rule(kinds="parameter", singular_values=1), Rule(kinds="parameter", singular_values=3)]) as monitor:
        monitor.set_module(layer)
        monitor.begin_step(0)
        monitor.monitor_parameters()
        record = monitor.end_step()
    assert record is not None
    values = {key.rpartition("/")[2]: value for key, value in record.values.items() if key.startswith("parameter/weight/")}
    assert [*values] == [*LARGEST_VALUES][:6]
    assert values["singular_value_1"] == pytest.approx(4)
    assert values["singular_value_2"] == pytest.approx(3)
    assert math.isnan(values["singular_value_3"])  # there is none
