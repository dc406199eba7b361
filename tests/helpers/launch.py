"""Starts the ranks of a training as a cluster's launcher does, but forks them from a server process that has imported torch and Lightning.

The import takes four seconds of a core. Other processes of the tests are new interpreters: those of ``helpers.processes`` import neither
package, and commands, examples and launchers are tested as users start them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

TESTS = Path(__file__).parents[1]
TIMEOUT = 240
"""Seconds until processes that train together are killed."""

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["helpers.preloaded"])


def free_port() -> int:
    """A free TCP port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Rank:
    """A rank: a forked process that runs a script with its own environment and output."""

    def __init__(self, script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._output = tempfile.NamedTemporaryFile("r", prefix="rank_", errors="replace")  # noqa: SIM115  # closed by finish()
        args = (str(script), list(arguments), dict(environment), self._output.name)
        self._process: BaseProcess = _SERVER.Process(target=_run, args=args, daemon=True)  # killed with the process of the tests
        self._process.start()

    def finish(self, timeout: float) -> str:
        """Wait until the process ends, or kill it after ``timeout`` seconds; returns its output."""
        self._process.join(timeout)
        note = f"\nkilled: it had not ended after {timeout:g} s" if self._process.is_alive() else ""
        self._process.kill()
        self._process.join()
        with self._output as file:
            return file.read() + note


def _run(script: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Run the script in the forked process as ``python script *arguments`` does, with its output in a file."""
    multiprocessing.current_process().daemon = False  # so that it may start processes
    with open(output, "w") as file:  # noqa: PTH123  # for its descriptor
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = int(environment["RANK"])  # Lightning takes it from the environment when it is imported
    sys.argv = [script, *arguments]
    warnings.filterwarnings("error", module=r"lightning_module_monitor\Z")
    runpy.run_path(script, run_name="__main__")


def start(script: Path, num_ranks: int, *arguments: object) -> list[Rank]:
    """Start one process for each rank, with the environment variables that a launcher sets."""
    cluster = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks), "NODE_RANK": "0"}
    interpreter = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    with patch.dict(os.environ, interpreter):  # also for the server, which starts with the first rank
        return [
            Rank(script, [*map(str, arguments)], {**os.environ, **cluster, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(num_ranks)
        ]


def finish(ranks: Sequence[Rank], timeout: float = TIMEOUT) -> list[str]:
    """The outputs of all ranks, once they have ended; see :meth:`Rank.finish`."""
    return [rank.finish(timeout) for rank in ranks]


def results(folder: Path, scenario: str, num_ranks: int) -> list[Any]:
    """The result of a scenario on each rank."""
    return [torch.load(folder / f"{scenario}.{rank}.pt", weights_only=False) for rank in range(num_ranks)]
