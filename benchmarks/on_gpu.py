"""Everything that only a GPU can show, in one command of less than eight minutes: ``make gpu``.

It writes gpu.json and, from that alone, GPU.md beside this file. Without a GPU it is a trial: the same on the CPU, with small sizes, into
the folder build.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gpu_page import page
from machine import surroundings
from stages import FOLDER, WELL, Found, Stage, pending, run_stage, write_json

STAGES = (
    Stage("kernels", "the Triton kernel against torch's operations", ("gpu_kernels.py",), 90),
    Stage("default", "cost of the default callback in a Trainer", ("gpu_cost.py", "default"), 110),
    Stage("everything", "cost of everything in a Trainer", ("gpu_cost.py", "everything"), 90),
    Stage("profile", "profile of a monitored step", ("gpu_profile.py",), 30),
    Stage("tests", "tests that need a GPU", ("gpu_tests.py",), 140),
)
"""With seconds for each: less than eight minutes together. The tests are last, and have what the others leave: they take longest."""


def folder_for(*, is_gpu: bool) -> Path:
    """Where to write: a trial leaves what a GPU has shown as it is."""
    return FOLDER if is_gpu else FOLDER.parent / "build"


def run(stages: Sequence[Stage], folder: Path) -> int:
    """Run the stages one after the other; returns the status, 1 where one has not ended well.

    Args:
        stages: What to run. A stage has its own seconds, and those that stages before it have left.
        folder: For both files, which are written after each stage: what is known stays known if the machine is taken away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[str, Found] = {stage.name: pending(stage) for stage in stages}
    found: Found = {"is_trial": not torch.cuda.is_available(), "surroundings": surroundings(), "stages": done}
    end = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        # With an empty cache at first: how long compiling takes is a finding. Stages that come later find what is compiled.
        environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(scratch, "triton"))}
        for stage in stages:
            end += stage.seconds
            print(f"{stage.name}: {stage.what} ...", flush=True)
            done[stage.name] = run_stage(stage, end - time.monotonic(), Path(scratch), environment)
            print("{outcome} after {seconds:.0f} s {reason}".format(**done[stage.name]), flush=True)
            write_json(folder / "gpu.json", found)
            (folder / "GPU.md").write_text(page(found), encoding="utf-8")
    print(f"written: {folder / 'gpu.json'} and {folder / 'GPU.md'}")
    return 0 if all(stage["outcome"] == WELL for stage in done.values()) else 1


if __name__ == "__main__":
    sys.exit(run(STAGES, folder_for(is_gpu=torch.cuda.is_available())))
