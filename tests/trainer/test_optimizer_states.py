"""States of optimizers, and cosines of updates, in runs of a Trainer: against tensors that hooks of the optimizers keep."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import Callback, LightningModule, MixedPrecision, ModelCheckpoint, Trainer
from helpers.tiny import KeepRecords
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from lightning_module_monitor import Health, ModuleMonitorCallback, Record, Rule

RULES = [
    Rule(kinds="optimizer_state", statistics=["norm", "cosine_to_gradient"]),
    Rule(kinds="update", statistics=["ratio", "cosine_to_gradient", "cosine_to_previous"]),
    Rule(kinds="update", per_module="_root_", statistics=["cosine_to_gradient", "cosine_to_previous"]),
    Rule(kinds="optimizer_state", per_module="_root_", statistics="norm"),
]
WEIGHT = "model.layers.0.weight"


class Moved:
    """What an optimizer's step began and ended with."""

    def __init__(self, before: dict[str, Tensor]) -> None:
        self.before = before
        self.update: dict[str, Tensor] = {}
        self.gradient: dict[str, Tensor] = {}
        self.states: dict[str, Tensor] = {}


class Steps(Callback):
    """Keeps the first step of every optimizer in each batch, by step of the run and number of the optimizer."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[int, Moved]] = {}
        self.batch = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names = {id(parameter): name for name, parameter in pl_module.named_parameters()}

        def parameters(optimizer: Optimizer) -> dict[str, Tensor]:
            return {names[id(parameter)]: parameter for group in optimizer.param_groups for parameter in group["params"]}

        def before(optimizer: Optimizer, *_args: Any) -> None:
            pending[optimizer] = Moved({name: parameter.detach().clone() for name, parameter in parameters(optimizer).items()})

        def after(optimizer: Optimizer, *_args: Any) -> None:
            moved = pending.pop(optimizer)
            for name, parameter in parameters(optimizer).items():
                moved.update[name] = parameter.detach().double() - moved.before[name].double()
                assert parameter.grad is not None
                moved.gradient[name] = parameter.grad.detach().double()
                for key, value in optimizer.state[parameter].items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        moved.states[f"{name}.{key}"] = value.detach().double()
            self.steps.setdefault(self.batch, {}).setdefault(trainer.optimizers.index(optimizer), moved)

        pending: dict[Optimizer, Moved] = {}
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(after)

    def on_train_batch_start(self, *_args: Any) -> None:
        self.batch += 1


def cosine(x: Tensor, y: Tensor) -> float:
    """In float64; NaN of zero."""
    x, y = x.flatten(), y.flatten()
    return float(x @ y / (x.norm() * y.norm()))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """All elements of several tensors."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def assert_true(record: Record, moved: Moved, previous: dict[str, Tensor]) -> None:
    """The record of a step has the figures of the tensors of an optimizer."""
    for name, update in moved.update.items():
        near = {"abs": 2e-6, "nan_ok": True}
        assert record.values[f"update/{name}/cosine_to_gradient"] == pytest.approx(-cosine(update, moved.gradient[name]), **near)
        expected = cosine(update, previous[name]) if name in previous else math.nan
        assert record.values[f"update/{name}/cosine_to_previous"] == pytest.approx(expected, **near)
    for site, state in moved.states.items():
        assert record.values[f"optimizer_state/{site}/norm"] == pytest.approx(float(state.norm()), rel=1e-6)
        gradient = moved.gradient[site.rpartition(".")[0]]
        assert record.values[f"optimizer_state/{site}/cosine_to_gradient"] == pytest.approx(cosine(state, gradient), **near)
    assert record.values["monitor/errors"] == 0


def run(
    folder: Path, module: LightningModule, options: dict[str, Any] | None = None, every_n_steps: int = 1, **monitoring: Any
) -> tuple[list[Record], Steps]:
    """Train with the monitor, and return its records and what the optimizers did."""
    callback = ModuleMonitorCallback(every_n_steps, **{"rules": RULES, "store": False, "on_error": "raise", **monitoring})
    records, steps = KeepRecords(callback), Steps()
    trainer(folder, [callback, records, steps], limit_val_batches=0, **{"max_steps": 6, **(options or {})}).fit(module, loader(), loader(8))
    return records.records, steps


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(AdamW, {"amsgrad": True}), (AdamW, {"fused": True}), (SGD, {"momentum": 0.9, "nesterov": True})],
)
def test_states_and_cosines_in_a_trainer(optimizer: type[Optimizer], options: dict[str, Any], tmp_path: Path) -> None:
    """Per parameter and of the whole model, with clipping and accumulation, in every second step; previous is the monitored one."""
    training = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_steps": 5}
    records, steps = run(tmp_path, Classifier("mlp", optimizer, **options), training, every_n_steps=2)
    assert [record.step for record in records] == [0, 2, 4]
    moved = [steps.steps[2 * record.step + 1][0] for record in records]
    previous: dict[str, Tensor] = {}
    for record, now in zip(records, moved, strict=True):
        assert_true(record, now, previous)
        whole = flat(now.update)
        assert record.values["update/_root_/cosine_to_gradient"] == pytest.approx(-cosine(whole, flat(now.gradient)), abs=2e-6)
        expected = cosine(whole, flat(previous)) if previous else math.nan
        assert record.values["update/_root_/cosine_to_previous"] == pytest.approx(expected, abs=2e-6, nan_ok=True)
        for state in {site.rpartition(".")[2] for site in now.states} - {"step"}:
            together = flat({site: tensor for site, tensor in now.states.items() if site.endswith(f".{state}")})
            assert record.values[f"optimizer_state/_root_.{state}/norm"] == pytest.approx(float(together.norm()), rel=1e-6)
        previous = now.update


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_does_not_replace_the_update_before(fused: bool, tmp_path: Path) -> None:
    """Its own cosines are undefined, its states are those of the step before, and the next step is compared with the last that moved."""

    class Overflows(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 2 else 1.0)

    plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=16.0))
    records, steps = run(tmp_path, Overflows("mlp", AdamW, fused=fused), {"plugins": [plugin], "max_steps": 5})
    assert [record.values["monitor/step_skipped"] for record in records] == [0, 0, 1, 0, 0]
    previous: dict[str, Tensor] = {}
    for number, record in enumerate(records):
        if number == 2:
            cosines = [value for key, value in record.values.items() if "cosine" in key]
            assert len(cosines) == 4 * 2 + 8 + 2
            assert all(math.isnan(value) for value in cosines)
            states = {key: value for key, value in records[1].values.items() if key.startswith("optimizer_state") and "cosine" not in key}
            assert states == {key: record.values[key] for key in states}
            continue
        assert_true(record, steps.steps[number][0], previous)
        previous = steps.steps[number][0].update


class TwoByHand(Classifier):
    """An optimizer for each layer: the first steps twice in a batch, the second in every other batch."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            for _time in range(2 if number == 0 else batch_idx % 2):
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]))
                optimizer.step()

    def configure_optimizers(self) -> Any:
        first, second = self.model.layers[0], self.model.layers[3]
        return AdamW(first.parameters(), lr=0.01), SGD(second.parameters(), lr=0.1, momentum=0.9)


def test_several_optimizers_by_hand(tmp_path: Path) -> None:
    """The first step of each counts; one that rests keeps its states, and the update before."""
    records, steps = run(tmp_path, TwoByHand("mlp"))
    previous: dict[str, Tensor] = {}
    for number, record in enumerate(records):
        moved = steps.steps[number]
        assert moved.keys() == ({0, 1} if number % 2 else {0})
        for one in moved.values():
            assert_true(record, one, previous)
            previous |= one.update
        if number % 2 == 0:
            assert record.values["update/model.layers.3.weight/ratio"] == 0
            assert math.isnan(record.values["update/model.layers.3.weight/cosine_to_previous"])
            if number:
                kept = steps.steps[number - 1][1].states["model.layers.3.weight.momentum_buffer"]
                value = record.values["optimizer_state/model.layers.3.weight.momentum_buffer/norm"]
                assert value == pytest.approx(float(kept.norm()), rel=1e-6)


def test_an_optimizer_that_calls_its_closure_several_times(tmp_path: Path) -> None:
    """LBFGS: the update is that of the whole step, and the gradient the one that it left."""
    records, steps = run(tmp_path, Classifier("mlp", LBFGS, max_iter=4), {"max_steps": 3}, rules=RULES[1:3])
    previous: dict[str, Tensor] = {}
    for number, record in enumerate(records):
        moved = steps.steps[number][0]
        moved.states.clear()
        assert_true(record, moved, previous)
        previous = moved.update


@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizer_that_writes_into_the_gradient(foreach: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nesterov's momentum with foreach overwrites the gradient: there is no cosine with that, and one line names the optimizer."""
    module = Classifier("mlp", SGD, momentum=0.9, nesterov=True, foreach=foreach)
    records, _steps = run(tmp_path, module, {"max_steps": 3})
    for record in records[1:]:
        cosines = [value for key, value in record.values.items() if key.endswith("cosine_to_gradient")]
        assert len(cosines) == 4 + 4 + 1
        assert all(math.isnan(value) == foreach for value in cosines)
        assert record.values[f"update/{WEIGHT}/ratio"] > 0
        assert record.values[f"update/{WEIGHT}/cosine_to_previous"] > -1
    message = "cosine_to_gradient: SGD writes into the gradients as it steps, and what it used is lost: NaN is recorded. Try foreach=False."
    assert [text for text in caplog.messages if "cosine" in text] == [message] * foreach


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"amsgrad": True}])
def test_training_is_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    """Losses, weights, states of the optimizer and random states are bit-identical."""
    runs = []
    for callbacks in ([], [ModuleMonitorCallback(2, rules=RULES, on_error="raise", store=False)]):
        seed()
        module, keep = Classifier("mlp", AdamW, **options), KeepLosses()
        used = trainer(tmp_path, [*callbacks, keep], max_steps=8, precision="bf16-mixed")
        used.fit(module, loader(shuffle=True), loader(8))
        runs.append((keep, module.state_dict(), used.optimizers[0].state_dict()["state"]))
    (plain, weights, states), (monitored, monitored_weights, monitored_states) = runs
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, monitored.losses, strict=True))
    assert plain.random_states == monitored.random_states
    assert all(torch.equal(weights[name], monitored_weights[name]) for name in weights)
    for number, state in states.items():
        assert all(torch.equal(value, monitored_states[number][name]) for name, value in state.items())


def test_a_resumed_run_has_no_update_before(tmp_path: Path) -> None:
    """Updates are not in checkpoints: the first cosine of a resumed run is undefined. States are those of the checkpoint."""
    checkpoint, other = (ModelCheckpoint(tmp_path / name, every_n_train_steps=3) for name in ("first", "resumed"))
    callback = ModuleMonitorCallback(1, rules=RULES, store=False)
    options: dict[str, Any] = {"enable_checkpointing": True, "limit_val_batches": 0}
    trainer(tmp_path, [callback, checkpoint], max_steps=3, **options).fit(Classifier("mlp"), loader(), loader(8))
    path = checkpoint.best_model_path
    saved = torch.load(path, weights_only=False)["callbacks"]
    (state,) = (state for key, state in saved.items() if "ModuleMonitorCallback" in key)
    assert "tensor(" not in str(state)
    callback = ModuleMonitorCallback(1, rules=RULES, store=False)
    records = KeepRecords(callback)
    trainer(tmp_path, [callback, records, other], max_steps=5, **options).fit(Classifier("mlp"), loader(), loader(8), ckpt_path=path)
    assert [record.step for record in records.records] == [3, 4]
    cosines = [record.values[f"update/{WEIGHT}/cosine_to_previous"] for record in records.records]
    assert [math.isnan(value) for value in cosines] == [True, False]
    assert records.records[0].values[f"optimizer_state/{WEIGHT}.exp_avg/norm"] > 0


def test_a_dry_run_has_the_memory_and_what_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """States are known later; a pattern of their names waits; one update is kept."""
    rules = [Rule(kinds="optimizer_state", sites=[".*exp_avg", ".*weight"], statistics="norm"), RULES[1]]
    callback = ModuleMonitorCallback(1, rules=rules, dry_run=True)
    trainer(tmp_path, [callback], max_steps=2).fit(Classifier("mlp"), loader(), loader(8))
    # Two weights and two biases of 163 floats.
    assert capsys.readouterr().out.splitlines()[1:-2] == [
        "  update: 4 sites x 3 (ratio, cosine_to_gradient, cosine_to_previous)",
        "  optimizer_state: states of up to 4 parameters, known after the first step, x 1 (norm)",
        "  a copy of the parameters whose update is recorded: 652 B during the step",
        "  the last update for cosine_to_previous, in the dtype of the parameters: 652 B from step to step",
        "  rules[0].sites '.*exp_avg' matches no parameter; names of states are known after the first step",
    ]


def test_options_may_name_keys_of_states(tmp_path: Path) -> None:
    """callback_metrics and alerts wait for the first record."""
    key = f"optimizer_state/{WEIGHT}.exp_avg/norm"
    callback = ModuleMonitorCallback(1, rules=RULES, store=False, callback_metrics=key, health=Health(watch=[]))
    used = trainer(tmp_path, [callback], max_steps=2)
    used.fit(Classifier("mlp"), loader(), loader(8))
    assert callback.last_record is not None
    assert used.callback_metrics[key] == pytest.approx(callback.last_record.values[key])


def test_parameters_that_take_turns(tmp_path: Path) -> None:
    """A GAN's two optimizers, of which each freezes the other's parameters."""

    class Toggled(TwoByHand):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]))
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

    records, steps = run(tmp_path, Toggled("mlp"), {"max_steps": 6})
    previous: dict[str, Tensor] = {}
    for number, record in enumerate(records):
        for moved in steps.steps[number].values():
            assert_true(record, moved, previous)
            previous |= moved.update
