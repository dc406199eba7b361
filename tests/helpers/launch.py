"""Several processes that train together, as a cluster's launcher would start them, forked from one that has imported what they need.

An import of torch and Lightning takes four seconds of a core. Other processes of the tests are interpreters of their own: those of
``helpers.processes`` import neither, and commands, examples and launchers are tested as users start them.
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
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Rank:
    """A process that runs a script, forked with the environment of its rank."""

    def __init__(self, script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._output = tempfile.NamedTemporaryFile("r", prefix="rank_", errors="replace")  # noqa: SIM115  # closed by finish()
        what = (str(script), list(arguments), dict(environment), self._output.name)
        self._process: BaseProcess = _SERVER.Process(target=_run, args=what, daemon=True)  # killed with the process of the tests
        self._process.start()

    def finish(self, timeout: float) -> str:
        """What it has printed, once it has ended; it is killed if it does not end in time."""
        self._process.join(timeout)
        late = f"\nkilled: it had not ended after {timeout:g} s" if self._process.is_alive() else ""
        self._process.kill()
        self._process.join()
        with self._output as file:
            return file.read() + late


def _run(script: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Run the script as an interpreter would that is started with these arguments; the forked process does nothing else."""
    multiprocessing.current_process().daemon = False  # it may start processes
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
    """A process for each rank."""
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks), "NODE_RANK": "0"}
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    with patch.dict(os.environ, own):  # of the server, which the first rank starts
        return [
            Rank(script, [*map(str, arguments)], {**os.environ, **together, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(num_ranks)
        ]


def finish(ranks: Sequence[Rank], timeout: float = TIMEOUT) -> list[str]:
    """What each of them printed, once all have ended; those that do not end in time are killed."""
    return [rank.finish(timeout) for rank in ranks]


def results(folder: Path, scenario: str, num_ranks: int) -> list[Any]:
    """What a scenario returned on each rank."""
    return [torch.load(folder / f"{scenario}.{rank}.pt", weights_only=False) for rank in range(num_ranks)]
