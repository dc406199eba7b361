"""What tests of several sinks need of the machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 12 MB."""
    mount = shutil.which("mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], capture_output=True, check=False).returncode
    ):
        pytest.skip("a small disk cannot be mounted here (needs Linux and root)")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
