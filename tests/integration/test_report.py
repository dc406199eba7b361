"""The callback's option ``report``: a page at the end of the run, however it ends."""

from __future__ import annotations

import errno
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import Tiny, fit, loader, trainer
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_module_monitor import ModuleMonitorCallback, Rule
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.trainer import sinks as trainer_sinks


class Fail(Callback):
    """Ends the run with an error at step 3."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_args: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("out of patience")


def test_the_page_is_there_when_fit_is_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside the store, of all its steps; where it is is said; without the option there is none."""
    callback = ModuleMonitorCallback(2, report=True)
    with caplog.at_level(logging.INFO, "lightning.pytorch.module_monitor"):
        fit(tmp_path, [callback])
    html = (tmp_path / "monitor.html").read_text()
    assert "3 monitored steps, 0 to 4; 7 sites" in html
    assert f"Report on the run: {tmp_path / 'monitor.html'}" in caplog.messages
    fit(tmp_path / "other", [ModuleMonitorCallback(2)])
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["monitor.h5"]


def test_the_page_is_there_after_an_exception(tmp_path: Path) -> None:
    """With the steps until then; the exception is the run's own."""
    with pytest.raises(RuntimeError, match="out of patience"):
        fit(tmp_path, [Fail(), ModuleMonitorCallback(1, report=True)])
    assert "3 monitored steps, 0 to 2" in (tmp_path / "monitor.html").read_text()


def test_trouble_with_the_page_is_said_and_hides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends as it does without the option, also where it ends by an exception."""

    def fail(*_args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(trainer_sinks, "write_report", fail)
    fit(tmp_path, [ModuleMonitorCallback(1, report=True)])
    expected = "No report was written (OSError: no space left). Later: lightning-module-monitor report "
    assert f"{expected}{tmp_path / 'monitor.h5'}" in caplog.messages
    with pytest.raises(RuntimeError, match="out of patience"):
        fit(tmp_path / "second", [Fail(), ModuleMonitorCallback(1, report=True)])


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a folder is in its place, say."""
    (tmp_path / "monitor.html").mkdir()
    fit(tmp_path, [ModuleMonitorCallback(3, report=True)])
    assert any(message.startswith("No report was written (IsADirectoryError: ") for message in caplog.messages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["monitor.h5", "monitor.html"]


def test_a_loop_after_fit_writes_it_again(tmp_path: Path) -> None:
    """With what that recorded."""
    rules = [Rule(kinds="activation", statistics="rms")]
    used = trainer(tmp_path, [ModuleMonitorCallback(3, rules=rules, stages=["train", "validate"], report=True)])
    model = Tiny()
    used.fit(model, loader(), loader(2))
    before = (tmp_path / "monitor.html").read_text()
    used.validate(model, loader(2), verbose=False)
    assert (tmp_path / "monitor.html").read_text() != before


def test_a_missing_extra_is_said_before_the_first_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the run is over."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r"report is true, and plotly is not installed.*\[report\]"):
        fit(tmp_path, [ModuleMonitorCallback(1, report=True)])


def test_no_store_is_no_page(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no file could be begun, one warning says so, and nothing points to a file that is not there."""

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    fit(tmp_path, [ModuleMonitorCallback(1, report=True)])
    (warned,) = [message for message in caplog.messages if str(tmp_path) in message]
    assert warned.endswith("Training goes on; there is no file yet; later records are tried again.")
    assert list(tmp_path.iterdir()) == []
