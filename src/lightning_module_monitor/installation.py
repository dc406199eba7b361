"""What is installed here: versions, extras, the kernel of each device, and a check that they measure and store right.

Internal: it may change in any version.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lightning_module_monitor.errors import package_version
from lightning_module_monitor.kernels import numba_kernel, triton_kernel
from lightning_module_monitor.monitor import ModuleMonitor
from lightning_module_monitor.sinks.store.reader import load_store

PACKAGES = ("torch", "lightning", "pytorch-lightning", "torchmetrics", "numpy", "h5py", "fsspec", "triton")
EXTRAS = ("fast", "cli", "pandas", "plot", "parquet", "report", "xarray")
"""The extras for users; the others are for tests, documents and examples."""
SEED = 0
RTOL = 1e-6


@dataclass(frozen=True)
class Check:
    """Whether a part works."""

    name: str
    """A device, or ``store``."""
    detail: str
    """What measures there, or how the store is written."""
    error: str | None
    """Why it does not work."""


@dataclass(frozen=True)
class Installation:
    """What is installed, and what works."""

    version: str
    python: str
    platform: str
    packages: dict[str, str | None]
    """Version by name; ``None`` for a package that is not installed."""
    extras: dict[str, dict[str, str | None]]
    """The packages of each extra."""
    checks: list[Check]

    def as_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """A table."""
        parts = [
            (f"lightning-module-monitor {self.version}", [("Python", self.python), ("platform", self.platform)]),
            ("packages", [(name, version or "not installed") for name, version in self.packages.items()]),
            ("extras", [(name, _extra_in_words(packages)) for name, packages in self.extras.items()]),
            ("self-check", [(check.name, f"{check.detail}: {check.error or 'right'}") for check in self.checks]),
        ]
        width = 2 + max(len(name) for _, rows in parts for name, _ in rows)
        return "\n\n".join("\n".join([heading, *(f"  {name:{width}}{text}" for name, text in rows)]) for heading, rows in parts if rows)


def _extra_in_words(packages: dict[str, str | None]) -> str:
    absent = [name for name, version in packages.items() if version is None]
    return f"not installed: {', '.join(absent)}" if absent else ", ".join(f"{name} {version}" for name, version in packages.items())


def installation() -> Installation:
    """Read the versions, and check every device and the store."""
    devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    return Installation(
        version=package_version(),
        python=sys.version.split()[0],
        platform=platform.platform(),
        packages={name: _version(name) for name in PACKAGES} | {"torch": torch.__version__},  # which names its build, as +cu130
        extras=_extras(),
        checks=[
            *(Check(name, _kernel_of(torch.device(name)), _error_of(_check_device, torch.device(name))) for name in devices),
            Check("store", "HDF5", _error_of(_check_store)),
        ],
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extras() -> dict[str, dict[str, str | None]]:
    """The packages of the extras; none where this package has no metadata, as a folder of sources on the path."""
    packages: defaultdict[str, dict[str, str | None]] = defaultdict(dict)
    requirements = (importlib.metadata.requires("lightning-module-monitor") or []) if package_version() != "unknown" else []
    for requirement in requirements:
        parts = re.match(r"([\w.-]+).*; *extra *== *[\"'](\w+)[\"']", requirement)
        if parts is not None and parts[2] in EXTRAS:
            packages[parts[2]][parts[1]] = _version(parts[1])
    return {extra: packages[extra] for extra in EXTRAS if extra in packages}


def _kernel_of(device: torch.device) -> str:
    """What measures tensors there."""
    if device.type == "cpu" and numba_kernel.loops() is not None:
        return "numba"
    if device.type == "cuda":
        kernel = "Triton" if triton_kernel.works(device) else "torch operations"
        return f"{torch.cuda.get_device_name(device)}, {kernel}"
    return "torch operations"


# ------------------------------------------------------------------ checks


def _error_of(check: Callable[..., None], *arguments: object) -> str | None:
    try:
        check(*arguments)
    except Exception as error:  # whatever fails is the answer
        return f"{type(error).__name__}: {error}"
    return None


def _monitored_step(device: torch.device) -> tuple[ModuleMonitor, torch.Tensor]:
    """The monitor of one step of a linear layer, and the layer's output."""
    generator = torch.Generator().manual_seed(SEED)
    layer = nn.Linear(64, 32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, generator=generator)
    monitor = ModuleMonitor(rules=[{"kinds": "activation", "statistics": ["mean", "std", "norm", "abs_max"]}], on_error="raise")
    monitor.set_module(layer.to(device))
    monitor.begin_step(0)
    output: torch.Tensor = layer(torch.randn(128, 64, generator=generator).to(device))
    monitor.end_step()
    monitor.close()
    return monitor, output.detach().cpu()


def _check_device(device: torch.device) -> None:
    """Compare what is measured of a layer's output with its formulas in float64.

    Raises:
        ValueError: If a statistic differs.
    """
    monitor, output = _monitored_step(device)
    numbers = output.double().numpy()
    expected = {"mean": numbers.mean(), "std": numbers.std(ddof=1), "norm": np.linalg.norm(numbers), "abs_max": np.abs(numbers).max()}
    values = monitor.get_step_metrics()
    for name, number in expected.items():
        [value] = [value for key, value in values.items() if key.endswith(f"/{name}")]
        if not np.isclose(value, number, rtol=RTOL, atol=RTOL):
            raise ValueError(f"{name} of an output is {value!r}, expected {float(number)!r}")


def _check_store() -> None:
    """Write a step to a store, and read it back.

    Raises:
        ValueError: If it has other values then.
    """
    monitor, _ = _monitored_step(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        store = load_store(monitor.storage.save_hdf5(Path(folder) / "monitor.h5"))
        for key, value in monitor.get_step_metrics().items():
            _, [stored] = store.series(key)
            if stored != value:
                raise ValueError(f"{key} was {value!r}, and is {float(stored)!r} in the store")
