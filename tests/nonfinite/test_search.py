"""The source of the first non-finite value: how training ends, what is kept, and how the step is run again."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.lightning_package import Callback, LightningModule, Trainer
from helpers.operations import operations
from helpers.training import BAD_STEP, Bad, Classifier, KeepLosses, loader, seed, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_module_monitor import Health, ModuleMonitorCallback, Rule, load_store
from lightning_module_monitor.errors import ConfigError, NonfiniteError
from lightning_module_monitor.model.names import Namer
from lightning_module_monitor.nonfinite import magnitudes, step_search
from lightning_module_monitor.nonfinite.flag import MarkedSteps
from lightning_module_monitor.trainer import strategy
from lightning_module_monitor.trainer.health_controller import HealthController
from lightning_module_monitor.trainer.run import step_of


def sick() -> Classifier:
    """A model that goes bad in its fourth step."""
    seed()
    return Classifier(nn.Sequential(nn.Linear(6, 6), Bad(), nn.Linear(6, 3)), torch.optim.SGD, lr=0.1)


def test_it_ends_before_the_optimizer_uses_it(tmp_path: Path) -> None:
    """One error with the report; weights are those of before; the store has the finding, in a step that was not monitored."""
    module = sick()
    callback = ModuleMonitorCallback(50, health=Health(nonfinite="stop"))
    with pytest.raises(
        NonfiniteError, match=r"Step 3, model\.1: NaN in model\.1, .*micro-batch 0 \(epoch 0, batch_idx 3\).*Training ends here"
    ) as raised:
        trainer(tmp_path, [callback]).fit(module, loader(shuffle=True), loader(8))
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    [found] = load_store(callback.store_path).findings()
    assert (found.step, found.name, found.site, found.severity) == (3, "nonfinite", "model.1", "error")
    assert found.words in str(raised.value)
    assert load_store(callback.store_path).series("activation/model.0/rms")[0].tolist() == [0]


def zero_with_infinite_slope(x: Tensor) -> Tensor:
    """Zeros, whose gradient is NaN."""
    return torch.sqrt((x * 0) ** 2)


class Between(nn.Module):
    """Code between two parts, of which the first returns what its own last part returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 6))), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        logits: Tensor = self.head(h + zero_with_infinite_slope(h))
        return logits


class InTheLoss(Classifier):
    """Code of the LightningModule, behind a container."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]) + zero_with_infinite_slope(logits).sum()


@pytest.mark.parametrize("every_n_steps", [1, [5]])
@pytest.mark.parametrize(
    ("make", "site", "words"),
    [
        (
            lambda: Classifier(Between()),
            "model",
            "Its own code between its modules receives a finite gradient, and passes NaN back to ",
        ),
        (
            lambda: InTheLoss(nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 3)))),
            "_root_",
            "The loss is finite, and its gradient that arrives at model.1.1 has NaN. The largest magnitude of the output before it, of ",
        ),
    ],
    ids=["between modules", "in the loss"],
)
def test_code_behind_a_container_is_not_taken_for_its_own(
    make: Callable[[], Classifier], site: str, words: str, every_n_steps: Any, tmp_path: Path
) -> None:
    """The container returns what its last part returns, unchanged: no code of its own lies between."""
    seed()
    callback = ModuleMonitorCallback(every_n_steps, health=Health(nonfinite="always"))
    trainer(tmp_path, [callback], max_steps=2).fit(make(), loader(), loader(8))
    found = callback.findings[0]
    assert (found.name, found.site) == ("nonfinite", site)
    assert words in found.words


class OwnWeight(nn.Module):
    """Has a weight of its own beside layers, which is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head, self.scale = nn.Linear(6, 6), nn.Linear(6, 3), nn.Parameter(torch.full((6,), math.nan))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.fc(x) * self.scale)
        return logits


class OwnWeightAtTheRoot(Classifier):
    """The same, in the LightningModule itself."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 3))
        self.scale = nn.Parameter(torch.full((6,), math.nan))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([batch[0] * self.scale, batch[1]], batch_idx)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Classifier(OwnWeight()), "passes NaN to model.head, and weights of model are not finite (model.scale has NaN)."),
        (OwnWeightAtTheRoot, "was given NaN, and weights of the LightningModule are not finite (scale has NaN)."),
    ],
)
def test_code_between_modules_may_use_a_weight_that_is_not_finite(make: Callable[[], Classifier], words: str, tmp_path: Path) -> None:
    """Then it has not made NaN of finite values, and the weights are the cause."""
    callback = ModuleMonitorCallback(1)
    trainer(tmp_path, [callback], max_steps=1).fit(make(), loader(), loader(8))
    assert words in callback.findings[0].words
    assert [one.name for one in callback.diagnose()] == ["update"]


class Graphs:
    """A batch of graphs as PyTorch Geometric has it: no container, with tensors that have a row for each node."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.num_graphs = x, y, len(y)

    def to(self, *args: Any, **options: Any) -> Graphs:
        return Graphs(self.x.to(*args, **options), self.y.to(*args, **options))

    def to_dict(self) -> dict[str, Tensor]:
        return {"x": self.x, "y": self.y}


class Unknown:
    """A batch that shows nothing of what it holds."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors


class OfGraphs(Classifier):
    """Two nodes for each graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch["inner"] if isinstance(batch, dict) else batch
        x, y = batch.tensors if isinstance(batch, Unknown) else (batch.x, batch.y) if isinstance(batch, Graphs) else batch
        return super().training_step([x.reshape(len(y), -1, 6).mean(1), y], batch_idx)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Graphs, "The batch has NaN, in row 5 of batch_x."),
        (lambda x, y: [x, y], "The batch has NaN, in row 5 of batch_0."),
        (lambda x, y: [x[::2], y], ", in sample 2."),
        (Unknown, "own code before it. The batch holds objects that cannot be looked into."),
        (lambda x, y: {"inner": Unknown(x, y), "y": y}, "own code before it. The batch holds objects that cannot be looked into."),
    ],
    ids=["graphs", "rows", "samples", "unknown", "partly unknown"],
)
def test_a_batch_with_nan_is_named_by_what_is_known_of_it(make: Callable[[Tensor, Tensor], Any], words: str, tmp_path: Path) -> None:
    """A row is a sample if all tensors have as many rows."""
    seed()
    x, y = torch.randn(8, 6), torch.arange(4) % 3
    x[4:6] = torch.tensor([[math.nan] if words.endswith("2.") else [0.0], [math.nan]])
    batch, callback = make(x, y), ModuleMonitorCallback(1)
    module = OfGraphs(nn.Linear(6, 3))
    trainer(tmp_path, [callback], max_steps=1, limit_val_batches=0).fit(module, DataLoader([0], collate_fn=lambda _rows: batch), loader(8))
    assert callback.findings[0].words.endswith(words)


class WritesIntoItsBatch(Classifier):
    """Takes the logarithm of a finite batch in place, in its second step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            batch[0].sub_(9.0).log_()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("every_n_steps", [1, 50])
def test_what_training_step_writes_into_its_batch_is_not_blamed_on_the_data(every_n_steps: int, tmp_path: Path) -> None:
    """The finding says that the batch was written into, in a light check, too."""
    seed()
    callback = ModuleMonitorCallback(every_n_steps)
    trainer(tmp_path, [callback], max_steps=2, accumulate_grad_batches=1).fit(WritesIntoItsBatch(nn.Linear(6, 3)), loader(), loader(8))
    [found] = [one for one in callback.findings if one.name == "nonfinite"]
    assert "its batch was written into in the step" in found.words
    assert "data" not in [one.name for one in callback.diagnose()]


class AddsToItsBatch(Classifier):
    """Puts the logarithm of a finite input into the dict that it got, in its second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["log"] = batch["x"] if batch_idx == 0 else torch.log(batch["x"] * 0.0 - 1.0)
        return super().training_step([batch["log"], batch["y"]], batch_idx)


@pytest.mark.parametrize("every_n_steps", [1, 50])
def test_what_training_step_adds_to_its_batch_is_not_data(every_n_steps: int, tmp_path: Path) -> None:
    """The step is run again on the batch as it was, also after a light check."""
    seed()
    rows = DataLoader([{"x": torch.randn(6), "y": torch.tensor(1)} for _ in range(8)], 4)
    callback = ModuleMonitorCallback(every_n_steps)
    module = AddsToItsBatch(nn.Linear(6, 3))
    trainer(tmp_path, [callback], max_steps=2, accumulate_grad_batches=1, limit_val_batches=0).fit(module, rows, loader(8))
    [found] = [one for one in callback.findings if one.name == "nonfinite"]
    assert found.words.endswith("or the LightningModule's own code before it. The batch is finite.")


def test_a_model_that_keeps_an_output_is_run_again(tmp_path: Path) -> None:
    """A tensor of the last forward pass, with its graph, is no hindrance; it stays what it was."""

    class Keeps(Bad):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = [super().forward(x)]
            return self.kept[0]

    seed()
    module = Classifier(nn.Sequential(nn.Linear(6, 6), Keeps(), nn.Linear(6, 3)), torch.optim.SGD)
    callback = ModuleMonitorCallback(50, health=Health(nonfinite="stop"))
    with pytest.raises(NonfiniteError, match=r"Step 3, model\.1: NaN in model\.1"):
        trainer(tmp_path, [callback]).fit(module, loader(), loader(8))
    assert module.model[1].kept[0].grad_fn is not None


class Counts(nn.Module):
    """Its fourth output is NaN: a second run, which is its fifth call, is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += self.training
        return x * (math.nan if self.num_calls == 4 else 1.0)


@pytest.mark.parametrize(
    ("every_n_steps", "nonfinite", "site"),
    [(1, "warn", "model.1"), (3, "always", "model.1"), (50, "warn", "_root_"), (50, "always", "_root_")],
)
def test_the_record_names_the_module_where_a_second_run_is_finite(every_n_steps: int, nonfinite: str, site: str, tmp_path: Path) -> None:
    """In a monitored step; else nothing is known but that the loss or a gradient is not finite."""
    seed()
    module = Classifier(nn.Sequential(nn.Linear(6, 6), Counts(), nn.Linear(6, 3)), torch.optim.SGD)
    callback = ModuleMonitorCallback(every_n_steps, health=Health(nonfinite=nonfinite))
    trainer(tmp_path, [callback], max_steps=6, accumulate_grad_batches=1, limit_val_batches=0).fit(module, loader(), loader(8))
    [found] = [one for one in callback.findings if one.name == "nonfinite"]
    assert (found.step, found.site) == (3, site)
    assert "all was finite when the step was run again" in found.words
    in_record = "In the order of a step, activation/model.1/rms is the first recorded value that shows it."
    assert found.words.endswith(in_record) == (site == "model.1")


@pytest.mark.parametrize("ends_by", ["stop", "an exception"])
def test_what_no_record_can_name_is_a_finding_still(ends_by: str, tmp_path: Path) -> None:
    """Training ends in the step, before its record, by the option or by another callback."""

    class Raises(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
            if trainer.global_step == 3:
                raise ZeroDivisionError

    seed()
    module = Classifier(nn.Sequential(nn.Linear(6, 6), Counts(), nn.Linear(6, 3)), torch.optim.SGD)
    callback = ModuleMonitorCallback(1, health=Health(nonfinite="stop" if ends_by == "stop" else "warn"))
    run = trainer(tmp_path, [callback, *([] if ends_by == "stop" else [Raises()])], accumulate_grad_batches=1, limit_val_batches=0)
    with pytest.raises(NonfiniteError if ends_by == "stop" else ZeroDivisionError):
        run.fit(module, loader(), loader(8))
    [found] = [one for one in callback.findings if one.name == "nonfinite"]
    assert (found.step, found.site) == (3, "_root_")


class ByHand(Classifier):
    """Manual optimization, two passes a step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, torch.optim.SGD)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            self.manual_backward(nn.functional.cross_entropy(self.model(batch[0]), batch[1]))
        optimizer.step()


def test_under_manual_optimization(tmp_path: Path) -> None:
    """No step can be run again: there every step is looked at as a whole."""
    module = ByHand(sick().model)
    callback = ModuleMonitorCallback(50, health=Health(nonfinite="stop"))
    with pytest.raises(NonfiniteError, match=r"Step 1, model\.1"):
        trainer(tmp_path, [callback]).fit(module, loader(), loader(8))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_a_step_that_cannot_be_run_again_is_told_all_the_same(tmp_path: Path) -> None:
    """Where the model cannot be copied nobody is accused, and training goes on."""

    class Uncopied(Classifier):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("not this one")

    module = Uncopied(sick().model, torch.optim.SGD)
    callback = ModuleMonitorCallback(50, health=Health(nonfinite="always"))
    trainer(tmp_path, [callback]).fit(module, loader(), loader(8))
    [found] = callback.findings
    assert (found.site, found.step) == ("_root_", 3)
    assert "could not be run again (RuntimeError: not this one)" in found.words


def test_a_model_whose_copy_shares_modules_with_it_is_left_alone(tmp_path: Path) -> None:
    """A model that is its own copy would be silenced itself."""

    class Single(Classifier):
        def __deepcopy__(self, memo: Any) -> Any:
            return self

    module = Single(sick().model, torch.optim.SGD)
    callback = ModuleMonitorCallback(50, health=Health(nonfinite="always"))
    trainer(tmp_path, [callback]).fit(module, loader(), loader(8))
    assert type(module) is Single
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    [found] = callback.findings
    assert "a copy of Single shares its " in found.words


class TwoByHand(Classifier):
    """Two optimizers; the loss of the first is never finite, and its gradients are."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for part, offset, optimizer in zip(self.model, (float("nan"), 0.0), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(part(batch[0]).sum() + offset)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.0) for part in self.model]


def test_it_is_said_once_where_another_optimizer_s_part_is_finite(tmp_path: Path) -> None:
    """Well is a step in which all parts are."""
    callback = ModuleMonitorCallback(1, health=Health(watch=[]))
    trainer(tmp_path, [callback]).fit(TwoByHand(), loader(), loader(8))
    assert [(one.step, one.site) for one in callback.findings] == [(0, "_root_")]


def test_a_flag_keeps_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many marked steps the first one that was not finite, until it is asked for; nothing is read on the way."""
    layer = nn.Linear(3, 2)
    flag = MarkedSteps(Namer().module_sites(nn.Sequential(layer)))

    def refuse(_tensor: Tensor) -> Any:
        raise AssertionError("a value was read")

    for step, (loss, gradient) in enumerate([(1.0, 0.0), (1.0, 0.0), (1.0, math.inf), (math.nan, 0.0), (1.0, 0.0)]):
        layer.weight.grad, layer.bias.grad = torch.zeros(2, 3), torch.tensor([gradient, 0.0])
        with monkeypatch.context() as context:
            context.setattr(magnitudes, "is_on_host", lambda _tensor: False)
            context.setattr(Tensor, "item", refuse)
            context.setattr(Tensor, "__bool__", refuse)
            flag.observe_loss(torch.tensor(loss))
            flag.observe_gradients(lightly=True)
            flag.mark(step)
    found = flag.steps_since(10)
    assert found is not None
    assert found.item() == 8.0
    assert flag.steps_since(11) is None
    flag.observe_loss(torch.tensor(1.0))
    flag.observe_gradients(lightly=True)
    flag.mark(11)
    later = flag.steps_since(12)
    assert later is not None
    assert later.item() == 0.0


@pytest.mark.parametrize(("bad_step", "record_step"), [(3, 5), (8, 10)])
def test_on_an_accelerator_the_next_record_has_the_first_step(
    bad_step: int, record_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the flag stays on the device: no step is run again, and the finding comes with the next record."""
    monkeypatch.setattr(strategy, "reads_at_once", lambda _trainer: False)
    monkeypatch.setattr(step_search, "SecondRun", None)
    x = torch.randn(48, 6)
    x[bad_step * 4] = math.nan
    data = DataLoader(TensorDataset(x, torch.zeros(48, dtype=torch.long)), batch_size=4)
    seed()
    callback = ModuleMonitorCallback(5, health=Health(watch=[]))
    steps: list[int] = []
    monkeypatch.setattr(HealthController, "follow", lambda self, findings: steps.extend([step_of(self._trainer)] * len(findings)))
    trainer(tmp_path, [callback], limit_val_batches=0).fit(Classifier(nn.Sequential(nn.Linear(6, 3))), data, loader(8))
    [found] = callback.findings
    assert (found.step, found.name, found.site, found.severity) == (bad_step, "nonfinite", "_root_", "error")
    assert steps == [record_step]


def test_what_refers_to_the_model_is_not_called_again(tmp_path: Path) -> None:
    """A hook and a function that count their calls, in a run that goes on after an infinite loss: bit-identical without the callback."""

    class Counting(Classifier):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
            self.calls: list[float] = []
            self.register_buffer("scale", torch.ones(()))
            self.grow = lambda: self.scale.add_(0.01)
            self.model[0].register_forward_hook(lambda *_: self.calls.append(1.0))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.grow()
            loss = super().training_step(batch, batch_idx) * self.scale * len(self.calls)
            return loss + math.inf if self.global_step == 3 else loss

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            for parameter in self.parameters():
                parameter.grad.nan_to_num_()  # type: ignore[union-attr]

    def fit(callbacks: list[Any]) -> tuple[list[Tensor], list[Tensor], int]:
        seed()
        module, losses = Counting(), KeepLosses()
        trainer(tmp_path, [*callbacks, losses], max_steps=8, limit_val_batches=0).fit(module, loader(), loader(8))
        return losses.losses, list(module.parameters()), len(module.calls)

    callback = ModuleMonitorCallback(store=False)
    plain, monitored = fit([]), fit([callback])
    assert [one.step for one in callback.findings if one.name == "nonfinite"] == [3]
    assert monitored[2] == plain[2] == 8
    assert all(map(torch.equal, monitored[0], plain[0]))
    assert all(map(torch.equal, monitored[1], plain[1]))


class WritesAtTimes(Classifier):
    """Writes into a weight, in its forward pass, in the step whose loss is infinite, and goes on."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        is_bad = self.global_step == 3
        if is_bad:
            with torch.no_grad():
                self.model[0].weight.mul_(0.5)
        loss = super().training_step(batch, batch_idx)
        return loss + math.inf if is_bad else loss


def test_a_weight_that_only_the_bad_step_writes_is_written_once(tmp_path: Path) -> None:
    """Bit-identical with the callback: what is run again has weights of its own, whatever the monitored steps have shown."""

    def fit(callbacks: list[Any]) -> list[Tensor]:
        seed()
        module = WritesAtTimes(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), torch.optim.SGD, lr=0.1)
        trainer(tmp_path, callbacks, max_steps=6, limit_val_batches=0).fit(module, loader(), loader(8))
        return list(module.parameters())

    callback = ModuleMonitorCallback(store=False)
    plain, monitored = fit([]), fit([callback])
    assert [one.step for one in callback.findings if one.name == "nonfinite"] == [3]
    assert all(map(torch.equal, monitored, plain))


def test_a_lazy_layer_that_never_runs_costs_no_record(tmp_path: Path) -> None:
    """Its parameters have no size, and are not trained."""

    class Unused(Classifier):
        def __init__(self) -> None:
            super().__init__("mlp")
            self.unused = nn.LazyLinear(3)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

    callback = ModuleMonitorCallback(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that lazy modules are a new feature
        trainer(tmp_path, [callback], max_steps=5, limit_val_batches=0).fit(Unused(), loader(), loader(8))
    assert callback.last_record is not None
    assert callback.last_record.step == 4
    assert load_store(callback.store_path).series("context/loss")[0].tolist() == [0, 1, 2, 3, 4]
    assert callback.findings == []


def test_a_module_without_parameters_is_monitored(tmp_path: Path) -> None:
    """The default rules match what there is."""

    class Nothing(LightningModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> None:
            pass

    callback = ModuleMonitorCallback()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of what is missing
        trainer(tmp_path, [callback], max_steps=3).fit(Nothing(), loader())
    assert callback.findings == []


def test_a_model_with_complex_weights_is_monitored(tmp_path: Path) -> None:
    """Their gradients are looked at by their parts, and nothing fails."""

    class Spectral(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * self.phase).real

    callback = ModuleMonitorCallback(1, on_error="raise")
    trainer(tmp_path, [callback], max_steps=5).fit(Classifier(Spectral(), torch.optim.SGD), loader(), loader(8))
    assert callback.findings == []
    assert callback.last_record is not None


class Spectrum(nn.Module):
    """A filter of complex frequencies, which divides by 0 from its fourth call in training on: in its forward or its backward pass."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.num_calls = way, 0
        self.filter = nn.Linear(4, 4, dtype=torch.cfloat)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += self.training
        is_bad = self.num_calls > BAD_STEP
        h = self.filter(x)
        if self.way == "forward":
            return h / (0.0 if is_bad else 1.0)
        return h + (zero_with_infinite_slope(h.real) if is_bad else 0.0)


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("every_n_steps", [1, 50])
def test_the_module_that_makes_it_of_complex_numbers_is_named(way: str, every_n_steps: int, tmp_path: Path) -> None:
    """Its inputs, outputs and weights are complex."""

    class Fourier(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.model(torch.fft.rfft(batch[0])).abs().mean()

    callback = ModuleMonitorCallback(every_n_steps, health=Health(nonfinite="always", watch=[]), on_error="raise")
    module = Fourier(
        nn.Sequential(nn.Linear(4, 4, dtype=torch.cfloat), Spectrum(way), nn.Linear(4, 2, dtype=torch.cfloat)), torch.optim.SGD
    )
    trainer(tmp_path, [callback], max_steps=5, limit_val_batches=0).fit(module, loader(), loader(8))
    [found] = callback.findings
    assert (found.step, found.site) == (BAD_STEP, "model.1")
    assert f"in model.1, in the {way} pass" in found.words


def test_looking_again_changes_nothing(tmp_path: Path) -> None:
    """A run that has gone bad goes on bit for bit as it would: random states, buffers, weights."""
    runs = []
    for health in (Health(), Health(nonfinite="always")):
        module, keep = sick(), KeepLosses()
        callback = ModuleMonitorCallback(50, health=health)
        trainer(tmp_path, [callback, keep]).fit(module, loader(shuffle=True), loader(8))
        runs.append((keep, module.state_dict()))
    (one, weights), (other, watched) = runs
    assert one.random_states == other.random_states
    assert all(torch.equal(weights[name], watched[name]) or bool(weights[name].isnan().any()) for name in weights)
    assert torch.equal(weights["model.1.num_calls"], watched["model.1.num_calls"])


def test_a_compiled_model_is_refused_at_every_step(tmp_path: Path) -> None:
    """With ``compiled: uncompiled``: no hook runs in the other steps; the message has the alternatives."""
    module = Classifier(nn.Sequential(nn.Linear(6, 3)))
    module.model.compile(backend="eager")
    callback = ModuleMonitorCallback(50, health=Health(nonfinite="always"), compiled="uncompiled")
    with pytest.raises(ConfigError, match="nonfinite: warn"):
        trainer(tmp_path, [callback]).fit(module, loader(), loader(8))


@pytest.mark.parametrize(
    ("device", "world_size", "expected"), [("cpu", 1, True), ("cpu", 2, False), ("cuda", 1, False), ("mps", 1, False), ("xpu", 1, False)]
)
def test_records_show_it_where_a_read_would_wait(device: str, world_size: int, expected: bool) -> None:
    """For a device, or for other ranks."""
    run: Any = SimpleNamespace(world_size=world_size, strategy=SimpleNamespace(root_device=torch.device(device)))
    assert strategy.reads_at_once(run) == expected


def on_accelerator(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the search take tensors for those of an accelerator; returns the sizes of what it reads from there."""
    reads: list[int] = []
    to_host = magnitudes.to_host

    def count(tensors: list[Tensor]) -> Any:
        reads.extend([len(tensors)] if tensors else [])
        return to_host(tensors)

    monkeypatch.setattr(strategy, "reads_at_once", lambda _trainer: False)
    monkeypatch.setattr(magnitudes, "is_on_host", lambda _tensor: False)
    monkeypatch.setattr(magnitudes, "to_host", count)
    return reads


@pytest.mark.parametrize(("option", "num_reads"), [("warn", 0), ("always", 6)])
def test_on_an_accelerator_a_monitored_step_reads_nothing(
    option: str, num_reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``warn`` finds by the common record whether all is finite; ``always`` reads one flag in each step."""
    reads, host_reads = on_accelerator(monkeypatch), []
    callback = ModuleMonitorCallback(2, health=Health(nonfinite=option, watch=[]), on_error="raise")

    def counted(run: Callable[..., None], *args: object) -> None:
        with operations() as called:
            run(*args)
        host_reads.extend(called.host_reads())

    for name in ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step"):
        setattr(callback, name, functools.partial(counted, getattr(callback, name)))
    trainer(tmp_path, [callback], max_steps=6, accumulate_grad_batches=1).fit(Classifier("mlp"), loader(), loader(8))
    assert (len(reads), callback.findings) == (num_reads, [])
    assert host_reads == []
    assert load_store(callback.store_path).series("gradient/model.layers.0.weight/norm")[0].tolist() == [0, 2, 4]


class Slope(nn.Module):
    """Its gradient is NaN from the fourth backward pass on."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + zero_with_infinite_slope(x) if self.num_calls > 3 else x


def made_of(part: nn.Module) -> Classifier:
    """A part between two layers."""
    seed()
    return Classifier(nn.Sequential(nn.Linear(6, 6), part, nn.Linear(6, 3)), torch.optim.SGD, lr=0.1)


def with_bad_weight() -> Classifier:
    """A weight that is not finite before the first step."""
    module = made_of(nn.ReLU())
    module.model[2].weight.data[0, 0] = math.nan
    return module


@pytest.mark.parametrize(
    ("make", "rules", "expected"),
    [
        (sick, None, (3, "model.2", "", "NaN or infinity in the activation of model.2. ")),  # the first leaf module
        (sick, [], (3, "_root_", "", "The loss is not finite, and no recorded activation shows a non-finite value. ")),
        (
            lambda: made_of(Slope()),
            Rule(kinds=["activation", "activation_gradient", "gradient"], statistics="norm"),
            (3, "model.0", "", "NaN or infinity in the activation gradient of model.0. "),
        ),
        (
            with_bad_weight,
            Rule(kinds=["parameter", "gradient"], statistics="rms"),
            (0, "model.2.weight", "update", "model.2.weight is not finite before the update. "),
        ),
    ],
    ids=["forward", "the loss alone", "backward", "before the step"],
)
def test_on_an_accelerator_a_record_names_the_first_site(
    make: Callable[[], Classifier], rules: Any, expected: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of a step, once; nothing is read for that, no hook is on after the step, and ``always`` is named for more."""
    reads = on_accelerator(monkeypatch)
    monkeypatch.setattr(step_search, "SecondRun", None)
    monkeypatch.setattr(step_search, "NonfiniteProbe", None)
    module, callback = make(), ModuleMonitorCallback(1, rules=rules, health=Health(watch=["vanishing"]), on_error="raise")
    trainer(tmp_path, [callback], limit_val_batches=0, accumulate_grad_batches=1).fit(module, loader(shuffle=True), loader(8))
    [found] = [one for one in callback.findings if one.name == "nonfinite"]
    *place, words = expected
    assert ([found.step, found.site, found.cause], found.severity) == (place, "error")
    assert found.words.startswith(words)
    assert found.words.endswith("health: {nonfinite: always} names the module.")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert reads == []
