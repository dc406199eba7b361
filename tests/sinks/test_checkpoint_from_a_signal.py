"""A handler of a signal saves a checkpoint, as Lightning's does before SLURM ends a job: it may come in the middle of a write."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from helpers.training import Classifier, loader, seed, trainer

from lightning_module_monitor import ModuleMonitorCallback, load_store
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.store import successor, writer
from lightning_module_monitor.sinks.store.writer import Store

WRITTEN = (writer.__file__, successor.__file__)
"""The files with the lines before which the signal comes."""

needs_signals = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")


def raise_before(number: int, call: Callable[[], object]) -> int:
    """Call, with a signal before one of the different lines that run in :data:`WRITTEN`; returns how many they are."""
    lines: set[tuple[str, int]] = set()

    def step(frame: FrameType, event: str, _argument: object) -> Any:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and line not in lines:
            if len(lines) == number:
                signal.raise_signal(signal.SIGUSR1)
            lines.add(line)
        return step

    before = sys.gettrace()
    sys.settrace(lambda frame, _event, _argument: step if frame.f_code.co_filename in WRITTEN else None)
    try:
        call()
    finally:
        sys.settrace(before)
    return len(lines)


@needs_signals
@pytest.mark.parametrize("part", ["write", "checkpoint"])
def test_rows_are_written_once(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before whichever line the checkpoint comes, each record is in the store once, and nothing is reported."""
    num_lines, number, handler = 1, 0, signal.getsignal(signal.SIGUSR1)
    try:
        while number < num_lines:
            path = tmp_path / f"{number}.h5"
            with closing(Store(path, configuration={})) as store:
                signal.signal(signal.SIGUSR1, lambda _number, _frame, store=store: store.checkpoint())
                for step in range(2):
                    store.write(Record.of(step, {"activation/fc/rms": float(step)}))
                late = functools.partial(store.write, Record.of(2, {"activation/late/rms": 2.0}))
                num_lines = raise_before(number, late if part == "write" else store.checkpoint)
                if part == "checkpoint":
                    late()
            read = load_store(path)
            np.testing.assert_array_equal(read.series("activation/fc/rms"), [[0, 1], [0, 1]], err_msg=str(number))
            np.testing.assert_array_equal(read.series("activation/late/rms"), [[2], [2]], err_msg=str(number))
            number += 1
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert num_lines > 10
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_checkpoint_while_the_run_ends_has_its_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is no longer monitored then; the state was an error, which ended the run."""
    seed()
    callback = ModuleMonitorCallback(1, reference="init")
    states: list[dict[str, Any]] = []
    close = callback.monitor.close

    def close_and_save() -> None:
        close()
        states.append(callback.state_dict())

    monkeypatch.setattr(callback.monitor, "close", close_and_save)
    trainer(tmp_path, [callback], max_steps=2, limit_val_batches=0).fit(Classifier(), loader(), loader(8))
    assert states
    assert states[-1] is callback.state_dict()
    assert states[-1]["store"] == callback.store_path
    assert "reference" in states[-1]
