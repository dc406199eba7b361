"""What figures depend on: the device, its driver, the packages, and the commit."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import report

PACKAGES = ("torch", "lightning", "triton", "numba", "numpy", "h5py", "torch-module-monitor")
UNKNOWN = "unknown"


def surroundings() -> dict[str, str | None]:
    """What is known of the machine and the packages; ``None`` for what is not there."""
    is_gpu = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if is_gpu else None
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "commit": _first_line(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]),
        "device": properties.name if properties else None,
        "compute_capability": f"{properties.major}.{properties.minor}" if properties else None,
        "memory": f"{properties.total_memory / 2**30:.0f} GiB" if properties else None,
        "driver": _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) if is_gpu else None,
        "cuda": torch.version.cuda,
        "processor": report.processor(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_line(command: Sequence[str]) -> str:
    """What a command prints, where it is there and succeeds."""
    if shutil.which(command[0]) is None:
        return UNKNOWN
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0] if done.returncode == 0 else UNKNOWN
