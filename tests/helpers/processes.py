"""Processes that write a store, to be killed, to race, or to run out of disk."""

from __future__ import annotations

import signal
import subprocess
import sys

PROLOGUE = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background has them ignore Ctrl-C
from pathlib import Path
from lightning_module_monitor.record import Record
from lightning_module_monitor.sinks.store.writer import Store
path = Path(sys.argv[1])
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process that runs the script with the package's store."""
    command = [sys.executable, "-c", PROLOGUE + script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str], said: str) -> int:
    """Kill a process that prints numbers; the last one that it said in full, the first line of which was read before.

    From the reader that has read that line, and may have taken in more of them: ``communicate`` would pass those by.
    """
    with process:
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        rest = process.stdout.read()
        errors = process.stderr.read() if process.stderr is not None else ""
    assert process.returncode == -signal.SIGKILL, errors
    # The pipe's last line can be cut off in the middle.
    return int((said + rest).rpartition("\n")[0].split()[-1])
