"""Commands of a release, which must not see the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from helpers.documents import ROOT


def run(command: list[str], folder: Path, *, status: int = 0, **environment: str) -> str:
    """What a command prints, without the source tree on its path.

    Raises:
        AssertionError: If its exit status is another.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=inherited | environment)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + (done.stderr if status else "")


def copy_of_source(folder: Path) -> None:
    """Copy what git knows of this repository, or would take in."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, run(listed, ROOT).split("\0")):
        if (ROOT / name).is_file():  # else it was deleted, and that is not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
