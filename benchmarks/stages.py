"""Parts of a long command: each is a process that has so many seconds, and what it has found until then is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
NOT_RUN, WELL, FAILED, RAN_OVER = "did not run", "ended well", "failed", "ran over"
LINES_OF_OUTPUT = 30
"""So many of the last lines are kept of a stage that did not end well."""

Found = dict[str, Any]
"""What is written as JSON."""


class Stage(NamedTuple):
    """A program of this folder. It writes figures to the file that is its last argument, once or again and again."""

    name: str
    what: str
    command: tuple[str, ...]
    """The name of the program, and its first arguments."""
    seconds: float


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """Write a file that is complete whenever it is read."""
    written = path.with_suffix(".part")
    written.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    written.replace(path)


def pending(stage: Stage) -> Found:
    """A stage before it runs."""
    return {"what": stage.what, "outcome": NOT_RUN, "reason": "", "seconds": 0.0, "limit_s": stage.seconds, "figures": {}, "output": []}


def run_stage(stage: Stage, seconds: float, folder: Path, environment: Mapping[str, str]) -> Found:
    """Run a stage, and end it with all its processes where it takes longer than so many seconds.

    Args:
        stage: What to run.
        seconds: Its time. The time that stages before it have left may make it longer than the stage's own.
        folder: For its files.
        environment: Variables of its processes.
    """
    figures, log = folder / f"{stage.name}.json", folder / f"{stage.name}.log"
    program, *arguments = stage.command
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(FOLDER / program), *arguments, str(figures)],
            cwd=FOLDER.parent,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            outcome = WELL if process.wait(timeout=seconds) == 0 else FAILED
        except subprocess.TimeoutExpired:
            outcome = RAN_OVER
        finally:
            _end(process)
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    reason = {WELL: "", RAN_OVER: f"ended after {seconds:.0f} s"}.get(outcome, lines[-1] if lines else f"status {process.returncode}")
    return pending(stage) | {
        "outcome": outcome,
        "reason": reason,
        "seconds": round(time.monotonic() - start, 1),
        "limit_s": round(seconds, 1),
        "figures": json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {},
        "output": [] if outcome == WELL else lines[-LINES_OF_OUTPUT:],
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started: they are in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        """All have ended."""
    process.wait()
