"""Several processes that train together, started as a cluster's launcher would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parents[1]
TIMEOUT = 480


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start(script: Path, num_ranks: int, *arguments: object) -> list[subprocess.Popen[str]]:
    """A process for each rank."""
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks), "NODE_RANK": "0"}
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    return [
        subprocess.Popen(
            [sys.executable, "-W", "error:::lightning_module_monitor", str(script), *map(str, arguments)],
            env={**os.environ, **together, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def finish(processes: Sequence[subprocess.Popen[str]], timeout: float = TIMEOUT) -> list[str]:
    """What each of them printed, once all have ended; those that do not end in time are killed."""
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        raise AssertionError("Not in time:\n" + "\n\n".join(process.communicate()[0][-3000:] for process in processes)) from None


def results(folder: Path, scenario: str, num_ranks: int) -> list[Any]:
    """What a scenario returned on each rank."""
    return [torch.load(folder / f"{scenario}.{rank}.pt", weights_only=False) for rank in range(num_ranks)]
