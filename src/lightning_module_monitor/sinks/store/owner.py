"""The owner of a store on a file system without locks: the journal's head names the process, and its time shows that it runs."""

from __future__ import annotations

import os
import platform
import sys
import threading
from contextlib import suppress
from pathlib import Path

from lightning_module_monitor.sinks.store.journal import Head, Journal
from lightning_module_monitor.sinks.store.schema import Version

_RENEWED_EVERY_S = 15.0
_DEAD_AFTER_S = 120.0


class Renewal:
    """Renews the time of a journal, which shows other hosts that its writer runs, even while nothing is recorded."""

    def __init__(self, path: Path) -> None:
        self._path, self._has_ended = path, threading.Event()
        threading.Thread(target=self._renew, name="monitor-renewal", daemon=True).start()

    def _renew(self) -> None:
        while not self._has_ended.wait(_RENEWED_EVERY_S):
            with suppress(OSError):
                os.utime(self._path)

    def end(self) -> None:
        """Renew it no more."""
        self._has_ended.set()


def head(version: Version) -> Head:
    """The head of a journal that this process begins."""
    return Head(version.lineage, version.generation, version.run, platform.node(), os.getpid(), _start_of(os.getpid()) or 0.0)


def has_ended(path: Path, clock: Path, resumed_run: str) -> bool:
    """Whether the run that began a journal writes no more.

    Args:
        path: The journal.
        clock: A file of this process in the same folder: its time is compared, since the hosts' clocks may differ.
        resumed_run: Identifier of the run that is resumed, if its checkpoint has one: that run has ended.
    """
    index = None
    try:
        with path.open("rb") as file:
            modified = os.fstat(file.fileno()).st_mtime
            with suppress(Exception):  # it is damaged, and only its time tells
                index = Journal(file).index
    except FileNotFoundError:
        return True
    if index is not None and (index.has_ended or index.head.run == resumed_run):
        return True
    if index is not None and index.head.host == platform.node() and sys.platform != "win32":
        start = _start_of(index.head.pid)
        return start is None or (index.head.process_start > 0 and start != index.head.process_start)
    os.utime(clock)
    return clock.stat().st_mtime - modified > _DEAD_AFTER_S


def _start_of(pid: int) -> float | None:
    """Start of a process of this host, in ticks since the host's start; 0 if it is not reported, ``None`` if there is no such process."""
    with suppress(OSError, ValueError, IndexError):
        # The second field, the command in parentheses, may have spaces; the 22nd is the start.
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:  # a process of another user
        return 0.0
    return 0.0
