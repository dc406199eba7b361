"""Keys of callback_metrics reach the real EarlyStopping, ModelCheckpoint and progress bar; no others do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_package import Callback, EarlyStopping, ModelCheckpoint, Trainer
from helpers.tiny import KeepRecords, Tiny, fit
from torch import Tensor

from lightning_module_monitor import ModuleMonitorCallback, Rule
from lightning_module_monitor.errors import ConfigError

KEY = "parameter/model.0.weight/norm"
VALIDATION_KEY = "validation/activation/model.2/rms"
BATCHES = 6  # an epoch of fit(), without accumulation


class Swinging(Tiny):
    """Its weights shrink for two epochs and grow afterwards: neither its first nor its last epoch is the smallest."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.current_epoch < 2 else -loss


def monitor(patterns: list[str], **options: Any) -> ModuleMonitorCallback:
    """A monitor of weights and activations that gives keys of these patterns away."""
    rules = [Rule(kinds="parameter", statistics="norm"), Rule(kinds="activation", statistics="rms")]
    return ModuleMonitorCallback(**{"every_n_steps": 1, "rules": rules, "store": False, "callback_metrics": patterns, **options})


def recorded(root: Path, key: str, epochs: int, **options: Any) -> dict[int, float]:
    """The values of a key in a run that nobody stops, by step."""
    callback = monitor([key], **options)
    kept = KeepRecords(callback)
    fit(root, [callback, kept], Swinging, max_epochs=epochs)
    return kept.series()[key]


@pytest.mark.parametrize("is_first", [True, False])
def test_early_stopping_stops_on_a_monitored_key(is_first: bool, tmp_path: Path) -> None:
    """Training ends after the epoch in which the value crossed the threshold, at any position of EarlyStopping in the list."""
    values = recorded(tmp_path, KEY, 2)
    threshold = (values[2 * BATCHES - 1] + values[BATCHES - 1]) / 2
    stopping = EarlyStopping(KEY, mode="min", stopping_threshold=threshold, patience=100, check_on_train_epoch_end=True)
    callbacks: list[Callback] = [monitor([KEY])]
    callbacks.insert(0 if is_first else 1, stopping)
    trainer = fit(tmp_path, callbacks, Swinging, max_epochs=10)
    assert stopping.stopped_epoch == 1
    assert trainer.global_step == 2 * BATCHES
    assert trainer.callback_metrics[KEY].item() == pytest.approx(values[2 * BATCHES - 1], rel=1e-6)


def test_early_stopping_stops_on_a_key_of_validation(tmp_path: Path) -> None:
    """With the stage on, values of the validation loop exist when EarlyStopping reads them, at the loop's end."""
    options: dict[str, Any] = {"stages": ["train", "validate"]}
    values = list(recorded(tmp_path, VALIDATION_KEY, 3, **options).values())
    assert values[1] < values[0]
    stopping = EarlyStopping(VALIDATION_KEY, mode="min", stopping_threshold=(values[0] + values[1]) / 2, patience=100)
    trainer = fit(tmp_path, [monitor(["validation/.*"], **options), stopping], Swinging, max_epochs=10)
    assert trainer.global_step == 2 * BATCHES
    assert trainer.callback_metrics[VALIDATION_KEY].item() == pytest.approx(values[1], rel=1e-6)


def test_validation_alone_gives_its_keys(tmp_path: Path) -> None:
    """If only validation is monitored, its keys are available, and keys of training are not."""
    trainer = fit(tmp_path, [monitor([VALIDATION_KEY], stages=["validate"])])
    assert VALIDATION_KEY in trainer.callback_metrics
    with pytest.raises(ConfigError, match="matches none of the"):
        fit(tmp_path, [monitor([KEY], stages=["validate"])])


def test_model_checkpoint_picks_the_best_epoch(tmp_path: Path) -> None:
    """The kept checkpoint is that of the epoch with the smallest last value."""
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", monitor=KEY, mode="min", save_top_k=1, save_on_train_epoch_end=True)
    callback = monitor([KEY])
    kept = KeepRecords(callback)
    fit(tmp_path, [checkpoint, callback, kept], Swinging, max_epochs=4, enable_checkpointing=True)
    ends = [kept.series()[KEY][epoch * BATCHES - 1] for epoch in range(1, 5)]
    assert ends.index(min(ends)) == 1, "the smallest must be neither the first nor the last"
    assert checkpoint.best_model_score is not None
    assert checkpoint.best_model_score.item() == pytest.approx(min(ends), rel=1e-6)
    saved = torch.load(checkpoint.best_model_path, weights_only=True)
    assert (saved["epoch"], saved["global_step"]) == (1, 2 * BATCHES)


def test_model_checkpoint_picks_the_best_step(tmp_path: Path) -> None:
    """A checkpoint of every step is judged by the value of that step, not of the step before."""
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints", monitor=KEY, mode="min", save_top_k=1, every_n_train_steps=1)
    callback = monitor([KEY])
    kept = KeepRecords(callback)
    fit(tmp_path, [checkpoint, callback, kept], Swinging, max_epochs=4, enable_checkpointing=True)
    values = kept.series()[KEY]
    best = min(values, key=values.__getitem__)
    assert 0 < best < 4 * BATCHES - 1
    saved = torch.load(checkpoint.best_model_path, weights_only=True)
    assert saved["global_step"] == best + 1


def test_values_of_a_sparse_schedule_exist_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    """The newest value stays, also if the last step of the epoch was not monitored."""
    callback = monitor([KEY], every_n_steps=4)
    kept = KeepRecords(callback)
    stopping = EarlyStopping(KEY, check_on_train_epoch_end=True, patience=100)
    trainer = fit(tmp_path, [callback, kept, stopping], max_epochs=2)
    assert set(kept.series()[KEY]) == {0, 4, 8}
    assert trainer.callback_metrics[KEY].item() == pytest.approx(kept.series()[KEY][8], rel=1e-6)


def test_only_matching_keys_become_callback_metrics(tmp_path: Path) -> None:
    """A pattern matches the whole key (re.fullmatch); other keys are in loggers and store only."""
    trainer = fit(tmp_path, [monitor(["parameter/.*weight/norm"])])
    metrics = {key for key in trainer.callback_metrics if "/" in key}
    assert metrics == {"parameter/model.0.weight/norm", "parameter/model.2.weight/norm"}


class Bar(Callback):
    """Keeps the values of the progress bar, step by step."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_args: Any) -> None:
        self.values.append(dict(trainer.progress_bar_metrics))


def test_the_progress_bar_shows_them_on_request(tmp_path: Path) -> None:
    """With progress_bar the bar has each step's value; without it, none."""
    callback = monitor([KEY], progress_bar=True)
    kept, bar = KeepRecords(callback), Bar()
    fit(tmp_path, [callback, kept, bar])
    assert [values[KEY] for values in bar.values] == pytest.approx(list(kept.series()[KEY].values()), rel=1e-6)
    assert {key for values in bar.values for key in values if "/" in key} == {KEY}
    silent = Bar()
    fit(tmp_path, [monitor([KEY]), silent])
    assert not any(KEY in values for values in silent.values)


@pytest.mark.parametrize(
    ("pattern", "prefix", "nearest"), [("parameter/model.0.weigth/norm", "", KEY), (VALIDATION_KEY, "", ""), (KEY, "run1", f"run1/{KEY}")]
)
def test_a_pattern_that_matches_no_key_is_refused(pattern: str, prefix: str, nearest: str, tmp_path: Path) -> None:
    """Before the first batch, with the nearest key: a typo, a key of a stage that is off, or a key without the prefix."""
    with pytest.raises(ConfigError) as refused:
        fit(tmp_path, [monitor([pattern], prefix=prefix)])
    message = str(refused.value)
    assert message.startswith(f"callback_metrics {pattern!r} matches none of the 10 keys")
    assert f"; nearest: '{nearest}" in message
    trainer = fit(tmp_path, [monitor([f"run1/{KEY}"], prefix="run1")])
    assert f"run1/{KEY}" in trainer.callback_metrics


def test_early_stopping_without_its_key_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    """It would end the run with an error after the first epoch; the message has the option, which then works."""
    with pytest.raises(ConfigError, match=rf"EarlyStopping monitors '{KEY}', and .* expected callback_metrics: \['{KEY}'\]"):
        fit(tmp_path, [monitor([VALIDATION_KEY], stages=["train", "validate"]), EarlyStopping(KEY)], max_steps=1)
    trainer = fit(tmp_path, [monitor([KEY]), EarlyStopping(KEY, check_on_train_epoch_end=True)], max_epochs=1)
    assert KEY in trainer.callback_metrics
    fit(tmp_path, [monitor([]), EarlyStopping("loss", check_on_train_epoch_end=True)], max_epochs=1)  # a key of the module's


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")  # Lightning's own, at the end of the epoch
def test_a_checkpoint_without_its_key_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A ModelCheckpoint, and an EarlyStopping that is not strict, would do nothing: one warning each with the option."""
    callbacks: list[Callback] = [monitor([]), ModelCheckpoint(tmp_path, monitor=KEY), EarlyStopping(KEY, strict=False, verbose=False)]
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, callbacks, max_epochs=1, enable_checkpointing=True, limit_val_batches=0)
    messages = [record.message for record in caplog.records if "callback_metrics does not match it" in record.message]
    assert [message.split()[0] for message in messages] == ["EarlyStopping", "ModelCheckpoint"]
    assert all(f"expected callback_metrics: ['{KEY}']" in message for message in messages)


@pytest.mark.parametrize(("pattern", "is_logged"), [("zzz", True), ("mine/.*", False)])
def test_a_pattern_of_no_key_is_logged_with_the_first_record(
    pattern: str, is_logged: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be of a key that the model logs itself; if the first record has none either, there may be a typo."""

    class Logs(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_args: Any) -> None:
            callback.monitor.log_scalar("mine/value", 1.0)

    callback = monitor([pattern])
    fit(tmp_path, [callback, Logs()])
    messages = [record.getMessage() for record in caplog.records if "callback_metrics" in record.getMessage()]
    assert len(messages) == is_logged
    assert all(message.startswith(f"callback_metrics {pattern!r} matches none of ") for message in messages)
    assert all(" keys of the first record" in message for message in messages)
