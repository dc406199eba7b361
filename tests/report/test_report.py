"""The end of a run, however it ends: the page, by the callback's option ``report``, and the line about the files."""

from __future__ import annotations

import errno
import logging
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.lightning_package import LOGGER, Callback, LightningModule, Trainer
from helpers.tiny import Tiny, fit, loader, trainer

from lightning_module_monitor import ModuleMonitorCallback, Rule, cli
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.sinks.store import successor
from lightning_module_monitor.trainer import sinks_controller as trainer_sinks


class Fail(Callback):
    """Ends the run with an error at step 3."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_args: Any) -> None:
        if trainer.global_step == 3:
            raise RuntimeError("out of patience")


def test_the_page_is_there_when_fit_is_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside the store, of all its steps; one line has both paths; without the option there is none."""
    callback = ModuleMonitorCallback(2, report=True)
    with caplog.at_level(logging.INFO, LOGGER):
        fit(tmp_path, [callback])
    html = (tmp_path / "monitor.html").read_text()
    assert "3 monitored steps, 0 to 4; 7 sites" in html
    store = tmp_path / "monitor.h5"
    (line,) = [message for message in caplog.messages if "monitor.h5" in message]
    command = f"lightning-module-monitor summary {store}"
    assert line == f"Monitored values: {store}; page: {tmp_path / 'monitor.html'}. Verdict: {command}"
    fit(tmp_path / "other", [ModuleMonitorCallback(2)])
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["monitor.h5"]


def test_one_line_at_the_end_has_the_store_and_the_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a run and after an exception; the command can be copied, also with a space in the path; without a store there is no line."""
    for options in ([ModuleMonitorCallback(2)], [Fail(), ModuleMonitorCallback(1)]):
        folder = tmp_path / f"my runs {len(options)}"
        with caplog.at_level(logging.INFO, LOGGER), suppress(RuntimeError):
            fit(folder, options)
        (line,) = [message for message in caplog.messages if "lightning-module-monitor " in message]
        caplog.clear()
        words, command = line.split(" Page: ")
        assert words == f"Monitored values: {folder / 'monitor.h5'}."
        assert cli.main(shlex.split(command)[1:]) == 0
    with caplog.at_level(logging.INFO, LOGGER):
        fit(tmp_path / "none", [ModuleMonitorCallback(2, store=False)])
    assert not [message for message in caplog.messages if "lightning-module-monitor" in message]


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
    assert "The page was not written (OSError: no space left)." in caplog.messages
    with pytest.raises(RuntimeError, match="out of patience"):
        fit(tmp_path / "second", [Fail(), ModuleMonitorCallback(1, report=True)])


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a folder is in its place, say."""
    (tmp_path / "monitor.html").mkdir()
    fit(tmp_path, [ModuleMonitorCallback(3, report=True)])
    assert any(message.startswith("The page was not written (IsADirectoryError: ") for message in caplog.messages)
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
    """Where no file could be begun, a warning says so at once, and another at the end; nothing points to a file that is not there."""

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(successor, "os", SimpleNamespace(fsync=refuse))
    callback = ModuleMonitorCallback(1, report=True)
    fit(tmp_path, [callback])
    warned, last = [message for message in caplog.messages if str(tmp_path) in message]
    assert warned.endswith("Training goes on; there is no file yet; later records are tried again.")
    assert last == f"No value was stored: {tmp_path / 'monitor.h5'} could not be written."
    assert callback.store_path is None
    assert list(tmp_path.iterdir()) == []
