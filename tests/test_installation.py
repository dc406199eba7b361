"""The command ``info``: what is installed, and the self-check."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
import torch

from lightning_module_monitor import installation
from lightning_module_monitor.cli import main
from lightning_module_monitor.kernels import numba_kernel
from lightning_module_monitor.sinks.recent_records import StorageManager

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOR_DEVELOPERS = {"all", "bench", "deepspeed", "dev", "docs", "examples", "test", "test-core", "triton"}
KERNEL = "numba" if numba_kernel.loops() is not None else "torch operations"


def info(capsys: pytest.CaptureFixture[str], status: int) -> dict[str, object]:
    """What ``info --json`` prints."""
    assert main(["info", "--json"]) == status
    content: dict[str, object] = json.loads(capsys.readouterr().out)
    return content


def test_versions_and_extras(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the metadata; of each extra for users in pyproject.toml, its packages."""
    content = info(capsys, 0)
    assert content["python"] == sys.version.split()[0]
    packages = content["packages"]
    assert packages["torch"] == torch.__version__
    assert packages["h5py"] == importlib.metadata.version("h5py")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = content["extras"]
    assert {*extras} == project["optional-dependencies"].keys() - FOR_DEVELOPERS
    assert extras["parquet"] == {"pandas": importlib.metadata.version("pandas"), "pyarrow": importlib.metadata.version("pyarrow")}


def test_the_self_check_passes_on_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    """And names the kernel that measures there."""
    checks = info(capsys, 0)["checks"]
    assert {"name": "cpu", "detail": KERNEL, "error": None} in checks
    assert {"name": "store", "detail": "HDF5", "error": None} in checks
    assert len(checks) == 2 + torch.cuda.device_count()


def test_a_device_that_measures_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The check names the statistic, its value, and the right one; the status is 1."""
    step = installation._monitored_step
    monkeypatch.setattr(installation, "_monitored_step", lambda device: (step(device)[0], step(device)[1] * 2))
    cpu, store = info(capsys, 1)["checks"][0], info(capsys, 1)["checks"][-1]
    assert cpu["error"].startswith("ValueError: mean of an output is ")
    assert store["error"] is None


def test_a_store_that_cannot_be_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the file is in the line of the store."""

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(StorageManager, "save_hdf5", fail)
    assert main(["info"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["store", "HDF5:", "OSError:", "no", "space"]


def test_an_extra_that_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The table names the packages that it lacks."""
    version = importlib.metadata.version

    def without_pyarrow(name: str) -> str:
        if name == "pyarrow":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_pyarrow)
    assert main(["info"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["parquet", "not installed: pyarrow"] in lines
    assert ["pandas", f"pandas {version('pandas')}"] in lines
