"""Resumed, interrupted, repeated, tuned and averaged runs: as an uninterrupted run, or as one without the callback."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from helpers.lightning_package import (
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    LightningModule,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Trainer,
    Tuner,
    callbacks,
)
from helpers.textbook import textbook
from helpers.tiny import KeepRecords
from helpers.training import Classifier, KeepLosses, loader, seed, trainer
from helpers.zoo import raw_tensors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_module_monitor import ModuleMonitorCallback, Record, Rule, load_store
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.trainer import reference_controller

IS_OLD = not hasattr(callbacks, "EMAWeightAveraging")
"""Whether Lightning is older than 2.6."""

KINDS = ["activation", "activation_gradient", "parameter", "gradient_before_clip", "gradient", "update"]
RULES = [
    Rule(kinds=KINDS, statistics=["norm", "std", "abs_max", "hist"]),
    Rule(kinds=["activation_difference", "parameter_difference"], statistics=["norm", "ratio"]),
]


def everything(**options: Any) -> ModuleMonitorCallback:
    """All kinds there are, at every step."""
    defaults: dict[str, Any] = {"rules": RULES, "reference": "init", "rcc": True, "attention": True, "on_error": "raise"}
    return ModuleMonitorCallback(1, **(defaults | options))


def of_the_model(record: Record) -> dict[str, float]:
    """A record's values, without the monitor's figures, the loss of validation, and operator norms, which continue an earlier estimate."""
    others = ("monitor/", "context/validation_loss", "rcc_operator_norm", "rcc_alignment")
    return {key: value for key, value in record.values.items() if not key.startswith(others)}


def assert_same_records(records: list[Record], expected: list[Record]) -> None:
    """The same steps, and at each of them the same values to the last bit."""
    assert [record.step for record in records] == [record.step for record in expected]
    for first, other in zip(records, expected, strict=True):
        np.testing.assert_equal(of_the_model(first), of_the_model(other), err_msg=f"step {first.step}")
        assert first.histograms == other.histograms


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    """To the last bit."""
    assert model.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


class KeepSteps(Callback):
    """Keeps the weights at the begin of each step, and its micro-batches, from which its values can be computed again."""

    def __init__(self) -> None:
        self.steps: list[tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]] = []
        self.is_new = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.is_new:
            self.steps.append((copy.deepcopy(pl_module.state_dict()), []))
        self.steps[-1][1].append(tuple(batch))
        self.is_new = not trainer.fit_loop._should_accumulate()


def assert_true(record: Record, step: tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]], accumulated: int = 1) -> None:
    """A record of a :class:`Steady` model is what raw tensors in float64 say."""
    module = Classifier("shared")
    module.load_state_dict(step[0])
    raw = raw_tensors(module.model, step[1], lambda y, t: F.cross_entropy(y, t) / accumulated)
    for (kind, site), tensors in raw.items():
        whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
        key = f"{kind}/model" + (f".{site}" if site != "_root_" else "")
        assert record.values[f"{key}/norm"] == pytest.approx(textbook("norm", whole), rel=2e-5), key


class Steady(Classifier):
    """A model without dropout, with a shared layer and a tied weight."""

    def __init__(self) -> None:
        super().__init__("shared", torch.optim.SGD, lr=0.1, momentum=0.9)


class Resumable:
    """Batches whose position a checkpoint keeps, as torchdata's loader does."""

    def __init__(self, num_batches: int) -> None:
        self.batches = list(loader(4 * num_batches))
        self.index = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.index %= len(self.batches)  # after the last one the next epoch begins
        while self.index < len(self.batches):
            self.index += 1
            yield self.batches[self.index - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["place"]


class SaveInTheMiddle(Callback):
    """Saves a checkpoint after a batch, also within an accumulated step."""

    def __init__(self, path: Path, batch_idx: int) -> None:
        self.path, self.batch_idx = path, batch_idx

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx and not self.path.exists():
            trainer.save_checkpoint(self.path)


RunResult = tuple[ModuleMonitorCallback, KeepRecords, KeepSteps, LightningModule]


def run_steady(folder: Path, save_at: int, resume: Path | None = None, **options: Any) -> RunResult:
    """Two epochs of seven batches, without what costs the most."""
    seed()
    callback, module, steps = everything(attention=False), Steady(), KeepSteps()
    records = KeepRecords(callback)
    save = SaveInTheMiddle(folder / "middle.ckpt", save_at)
    run = trainer(folder, [callback, records, steps, save], **({"max_epochs": 2, "limit_val_batches": 0} | options))
    run.fit(module, Resumable(7), loader(8), ckpt_path=resume)
    return callback, records, steps, module


def series(path: str | None) -> dict[str, dict[int, float]]:
    """Value by step, by key, of a store, in which every step is once."""
    assert path is not None
    series: dict[str, dict[int, float]] = {}
    for row in load_store(path).to_frame().itertuples():
        of_key = series.setdefault(f"{row.kind}/{row.site}/{row.statistic}", {})
        assert row.step not in of_key
        of_key[row.step] = row.value
    return series


def test_a_run_resumed_in_the_middle_of_an_epoch_is_as_if_never_interrupted(tmp_path: Path) -> None:
    """Every value of every step is the same, also in the store, which holds repeated steps once."""
    whole = run_steady(tmp_path / "whole", 99)
    first = run_steady(tmp_path / "parts", 3, max_steps=6)
    assert len(whole[1].records) == 14
    second = run_steady(tmp_path / "parts", 99, tmp_path / "parts" / "middle.ckpt")
    kept = [record for record in first[1].records if record.step < second[1].records[0].step]
    assert len(kept) == 4
    assert_same_records(kept + second[1].records, whole[1].records)
    assert_same_weights(second[3], whole[3])
    assert second[0].store_path == first[0].store_path
    resumed, expected = series(second[0].store_path), series(whole[0].store_path)
    assert resumed.keys() == expected.keys()
    for key in expected:
        if not key.startswith(("rcc_operator_norm", "rcc_alignment")):
            np.testing.assert_equal(resumed[key], expected[key], err_msg=key)


def test_a_run_resumed_in_the_middle_of_an_accumulated_step_records_what_it_does(tmp_path: Path) -> None:
    """Lightning does not keep accumulated gradients: the step's values are those of the micro-batches that the resumed run has."""
    options: dict[str, Any] = {"accumulate_grad_batches": 3}
    first = run_steady(tmp_path, 4, max_steps=2, **options)
    second = run_steady(tmp_path, 99, tmp_path / "middle.ckpt", **options)
    # Of seven batches an epoch: steps of 3, 3 and 1. The fifth batch was the second of step 1.
    assert [record.step for record in second[1].records] == [1, 2, 3, 4, 5]
    assert [len(step[1]) for step in second[2].steps] == [1, 1, 3, 3, 1]
    for records, steps in (first[1:3], second[1:3]):
        for record, step in zip(records.records, steps.steps, strict=True):
            assert_true(record, step, accumulated=3)
    stored = series(second[0].store_path)["gradient/model.encoder.weight/norm"]
    expected = {record.step: record.values["gradient/model.encoder.weight/norm"] for record in (first[1].records[0], *second[1].records)}
    assert stored == expected


def test_another_configuration_at_resume_is_logged_and_not_mixed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The store has both configurations, each with its first step; a key of one configuration has rows of its steps only."""

    def part(rules: list[Rule], every: int, resume: Path | None = None) -> ModuleMonitorCallback:
        seed()
        callback = ModuleMonitorCallback(every, rules=rules)
        save = SaveInTheMiddle(tmp_path / "middle.ckpt", 3)
        trainer(tmp_path, [callback, save], limit_val_batches=0).fit(Steady(), Resumable(10), loader(8), ckpt_path=resume)
        return callback

    common = Rule(kinds="parameter", statistics="norm", sites="model.encoder.weight")
    caplog.set_level(logging.INFO)
    part([common, Rule(kinds="activation", statistics="rms", sites="model")], 1)
    assert not [message for message in caplog.messages if "another configuration" in message]
    same = part([common, Rule(kinds="activation", statistics="rms", sites="model")], 1, tmp_path / "middle.ckpt")
    assert not [message for message in caplog.messages if "another configuration" in message]
    other = part([common, Rule(kinds="activation", functions={"rms": torch.mean}, sites="model.inner")], 2, tmp_path / "middle.ckpt")
    assert other.store_path == same.store_path
    (message,) = [message for message in caplog.messages if "another configuration" in message]
    assert "every_n_steps was 1, is 2; rules was [{" in message
    assert message.endswith("In the store, rows from step 4 on belong to the new one.")
    recorded = series(other.store_path)
    assert list(recorded["parameter/model.encoder.weight/norm"]) == [0, 1, 2, 3, 4, 6, 8]
    assert list(recorded["activation/model/rms"]) == [0, 1, 2, 3]
    assert list(recorded["activation/model.inner/rms"]) == [4, 6, 8]
    configurations = load_store(other.store_path or "").attributes["configurations"]
    assert [(configuration["first_step"], configuration["configuration"]["every_n_steps"]) for configuration in configurations] == [
        (0, 1),
        (4, 1),
        (4, 2),
    ]


def with_and_without(folder: Path, more: Callable[[], list[Callback]], model: str = "cnn", **options: Any) -> KeepRecords:
    """Train with and without the callback, and compare losses, weights and random states; returns the records."""
    runs = []
    for monitored in (False, True):
        seed()
        callback, keep, module = everything(stages=["train", "validate"]), KeepLosses(), Classifier(model, torch.optim.SGD, lr=0.05)
        records = KeepRecords(callback)
        mine: list[Callback] = [callback, records] if monitored else []
        run = trainer(folder / str(monitored), [*mine, *more(), keep], **({"max_epochs": 3} | options))
        run.fit(module, loader(16), loader(8))
        runs.append((keep, module))
    (plain, weights), (monitored_run, monitored_weights) = runs
    assert len(plain.losses) > 1
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, monitored_run.losses, strict=True))
    assert plain.random_states == monitored_run.random_states
    assert_same_weights(weights, monitored_weights)
    return records


@pytest.mark.skipif(IS_OLD, reason="Lightning before 2.6 has no EMAWeightAveraging")
def test_an_average_of_weights_beside_the_monitor(tmp_path: Path) -> None:
    """Values of training equal those of a run without averaging; validation runs, and is recorded, with the averaged weights."""
    averaged = with_and_without(tmp_path / "ema", lambda: [callbacks.EMAWeightAveraging(decay=0.5)])
    plain = with_and_without(tmp_path / "plain", list)
    of_training = [[record for record in records.records if "monitor/errors" in record.values] for records in (averaged, plain)]
    assert_same_records(*of_training)
    in_validation = [records.series()["validation/activation/model/norm"] for records in (averaged, plain)]
    assert in_validation[0].keys() == in_validation[1].keys() == {3, 7, 11}
    assert all(in_validation[0][step] != in_validation[1][step] for step in in_validation[0])


def test_stochastic_weight_averaging_beside_the_monitor(tmp_path: Path) -> None:
    """Its last pass, which updates the statistics of BatchNorm, is a further step without gradients and without an update."""
    rates: list[float] = []

    class KeepRates(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    records = with_and_without(tmp_path, lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1), KeepRates()])
    rates = rates[len(rates) // 2 :]
    assert rates[11] < rates[0]
    of_training = [record for record in records.records if "monitor/errors" in record.values]
    assert [record.step for record in of_training] == list(range(13))
    gradients = [record.values.get("gradient/model.head.weight/norm") for record in of_training]
    updates = [record.values["update/model.head.weight/norm"] for record in of_training]
    for gradient, update, rate in zip(gradients[:-1], updates[:-1], rates[:12], strict=True):
        assert gradient is not None
        assert update == pytest.approx(rate * gradient, rel=1e-4)
    assert (gradients[-1], updates[-1]) == (None, 0.0)


@pytest.mark.parametrize("is_permanent", [False, True])
def test_pruning_beside_the_monitor(is_permanent: bool, tmp_path: Path) -> None:
    """From its first epoch on the parameter has another name in its module: it is recorded by the name that it had."""
    norms: list[tuple[float, float]] = []

    class KeepNorms(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_args: Any) -> None:
            named = dict(pl_module.model.head.named_parameters())
            weight = named.get("weight_orig", named.get("weight"))
            assert weight is not None
            assert weight.grad is not None
            norms.append((weight.detach().double().norm().item(), weight.grad.double().norm().item()))

    def prune() -> list[Callback]:
        return [ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=is_permanent), KeepNorms()]

    series = with_and_without(tmp_path, prune).series()
    norms = norms[len(norms) // 2 :]
    assert len(norms) == 12
    for kind, expected in zip(("parameter", "gradient"), zip(*norms, strict=True), strict=True):
        assert [*series[f"{kind}/model.head.weight/norm"].values()] == pytest.approx(expected, rel=1e-5)
    updates = series["update/model.head.weight/norm"]
    assert [*updates.values()] == pytest.approx([0.05 * gradient for _parameter, gradient in norms], rel=1e-4)
    assert set(series["monitor/errors"].values()) == {0.0}


def test_checkpoints_hold_what_they_would_hold_without_the_monitor(tmp_path: Path) -> None:
    """Checkpoints differ only by the monitor's state, and load without executing anything."""
    with_and_without(
        tmp_path, lambda: [ModelCheckpoint(filename="{step}", every_n_train_steps=5, save_top_k=-1)], enable_checkpointing=True
    )
    plain, monitored = (
        {path.name: torch.load(path, weights_only=True) for path in sorted((tmp_path / name).rglob("*.ckpt"))} for name in ("False", "True")
    )
    assert plain.keys() == monitored.keys() == {"step=5.ckpt", "step=10.ckpt"}
    for name, checkpoint in plain.items():
        assert monitored[name]["callbacks"].pop("ModuleMonitorCallback")["store"] == str(tmp_path / "True" / "monitor.h5")
        for state in (checkpoint, monitored[name]):
            state.pop("callbacks")
        assert_equal(checkpoint, monitored[name])


def assert_equal(first: Any, other: Any) -> None:
    """Nested containers with tensors."""
    assert type(first) is type(other)
    if isinstance(first, Tensor):
        assert torch.equal(first, other)
    elif isinstance(first, dict):
        assert first.keys() == other.keys()
        for key, value in first.items():
            assert_equal(value, other[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(other)
        for a, b in zip(first, other, strict=True):
            assert_equal(a, b)
    else:
        assert first == other


SHORT = {"fast_dev_run": ({"fast_dev_run": 2}, [0, 1]), "overfit_batches": ({"overfit_batches": 2}, [0, 1, 2, 3, 4, 5])}


@pytest.mark.parametrize("way", SHORT)
def test_short_runs_of_the_trainer(way: str, tmp_path: Path) -> None:
    """Training is the same as without the monitor, and every step is recorded."""
    options, steps = SHORT[way]
    records = with_and_without(tmp_path, list, **options)
    assert [record.step for record in records.records if "monitor/errors" in record.values] == steps
    assert bool(list(tmp_path.rglob("*.h5"))) == (way != "fast_dev_run")


@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
def test_overfitted_batches_are_recorded_as_they_come_again(tmp_path: Path) -> None:
    """Values of the same two batches in every epoch equal those of raw tensors."""
    callback, steps = everything(), KeepSteps()
    records = KeepRecords(callback)
    trainer(tmp_path, [callback, records, steps], overfit_batches=2, max_epochs=3).fit(Steady(), loader(), loader(8))
    assert len(records.records) == 6
    for record, step in zip(records.records, steps.steps, strict=True):
        assert_true(record, step)
        assert torch.equal(step[1][0][0], steps.steps[record.step % 2][1][0][0])
    assert list(series(callback.store_path)["activation/model/norm"]) == list(range(6))


class Tuned(Steady):
    """Finds its learning rate or its batch size first."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.01, 2

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(12, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(8)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def _tune_rate(run: Trainer, module: LightningModule) -> None:
    Tuner(run).lr_find(module, num_training=6)


def _tune_size(run: Trainer, module: LightningModule) -> None:
    Tuner(run).scale_batch_size(module, max_trials=2, steps_per_trial=2)


def _tune_nothing(run: Trainer, module: LightningModule) -> None:
    """A callback does."""


needs_sound_tuners = pytest.mark.skipif(
    IS_OLD, reason="before Lightning 2.6 the run after a tuner has other batches, or none, also without a monitor"
)
TUNERS: dict[str, tuple[Callable[[Trainer, LightningModule], None], Callable[[], list[Callback]]]] = {
    "lr_find": (_tune_rate, list),
    "scale_batch_size": (_tune_size, list),
    "LearningRateFinder": (_tune_nothing, lambda: [LearningRateFinder(num_training_steps=6)]),
    "BatchSizeFinder": (_tune_nothing, lambda: [BatchSizeFinder(max_trials=2, steps_per_trial=2)]),
}


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.parametrize("how", ["lr_find", *(pytest.param(tuner, marks=needs_sound_tuners) for tuner in TUNERS if tuner != "lr_find")])
def test_what_the_tuner_tries_is_not_recorded(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run after the trials is the same as without the monitor; its records begin at step 0, and no hook or file is left."""
    tune, callbacks = TUNERS[how]
    weights: list[LightningModule] = []
    for monitored in (False, True):
        seed()
        callback, steps, module = everything(), KeepSteps(), Tuned()
        records = KeepRecords(callback)
        mine: list[Callback] = [callback, records, steps] if monitored else []
        run = trainer(tmp_path / str(monitored), [*callbacks(), *mine], limit_val_batches=0)
        tune(run, module)
        assert not any(part._forward_hooks for part in module.modules())
        assert not list(tmp_path.rglob("*.h5"))
        run.fit(module)
        weights.append(module)
    assert_same_weights(*weights)
    assert (weights[0].lr, weights[0].batch_size) == (weights[1].lr, weights[1].batch_size)
    num_steps = 12 // module.batch_size
    assert [record.step for record in records.records] == list(range(num_steps))
    for record, step in zip(records.records[:3], steps.steps, strict=False):
        assert_true(record, step)
    ratios = [record.values["activation_difference/model/ratio"] for record in records.records]
    assert ratios[0] == 0 < ratios[1] < ratios[-1]
    assert list(series(callback.store_path)["update/model.encoder.weight/norm"]) == list(range(num_steps))
    assert not [message for message in caplog.messages if "holds no reference" in message]


def fit_three_steps(callback: ModuleMonitorCallback, folder: Path) -> list[Record]:
    """The records of a run of a new model; a callback may have served another before."""
    seed()
    records, before = KeepRecords(callback), callback.last_record
    trainer(folder, [callback, records], max_steps=3, limit_val_batches=0).fit(Classifier("transformer"), loader(), loader(8))
    assert list(series(callback.store_path)["gradient/model.head.weight/norm"]) == [0, 1, 2]
    return [record for record in records.records if record is not before]


def test_a_second_fit_has_the_values_of_a_first(tmp_path: Path) -> None:
    """No value of the first run is in the second."""
    callback = everything()
    fit_three_steps(callback, tmp_path / "first")
    assert_same_records(fit_three_steps(callback, tmp_path / "second"), fit_three_steps(everything(), tmp_path / "other"))


def test_a_callback_that_was_pickled_works_before_and_after_a_run(tmp_path: Path) -> None:
    """Launchers that start processes pickle it."""
    plain = fit_three_steps(everything(), tmp_path / "plain")
    once = pickle.loads(pickle.dumps(everything()))  # our own bytes
    assert_same_records(fit_three_steps(once, tmp_path / "once"), plain)
    assert_same_records(fit_three_steps(pickle.loads(pickle.dumps(once)), tmp_path / "twice"), plain)  # as above


def test_what_was_recorded_before_ctrl_c_is_in_the_store(tmp_path: Path) -> None:
    """The rows of an uninterrupted run before the interrupted step, in a file that any program opens."""

    class Interrupt(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, *_args: Any) -> None:
            if trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    stores = []
    for folder, more in (("whole", []), ("part", [Interrupt()])):
        seed()
        callback = everything()
        run = trainer(tmp_path / folder, [callback, *more], max_steps=6, limit_val_batches=0)
        # A shell that starts this suite in the background has it ignore Ctrl-C.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            if more:
                with pytest.raises(SystemExit):
                    run.fit(Classifier("transformer"), loader(), loader(8))
            else:
                run.fit(Classifier("transformer"), loader(), loader(8))
        finally:
            signal.signal(signal.SIGINT, handler)
        stores.append(series(callback.store_path))
    whole, part = stores
    with h5py.File(tmp_path / "part" / "monitor.h5") as file:
        assert file["activation"]["steps"][:].tolist() == [0, 1, 2]
    np.testing.assert_equal(part, {key: {step: value for step, value in of_key.items() if step < 3} for key, of_key in whole.items()})


@pytest.mark.parametrize("row", ["tensor parallel, 2 ranks", "tensor parallel and FSDP2, 4 ranks"])
def test_a_reference_that_runs_is_refused_where_the_model_is_laid_out_over_ranks(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every layout; the comparison of parameters is among the tests of several ranks."""
    monkeypatch.setattr(reference_controller, "is_laid_out", lambda _module: True)
    with pytest.raises(ConfigError, match="needs a reference that runs, and the model is laid out over ranks"):
        trainer(tmp_path, [ModuleMonitorCallback(1, rcc=True)]).fit(Classifier("mlp"), loader(), loader(8))
