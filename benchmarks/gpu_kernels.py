"""Compile what the Triton kernel launches for the benchmark's Trainers, and compare its values with those of torch's operations.

    python benchmarks/gpu_kernels.py FIGURES.json

The callback does the same before the first step. Here each launch is timed, and the others are looked at also where one is wrong.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

import gpu
import in_trainer
from lanes import Parts, Training, make_batches, make_model, make_trainer
from lightning_module_monitor.kernels import numba_kernel, triton_kernel
from lightning_module_monitor.kernels.moments import Need
from lightning_module_monitor.kernels.warm_up import Launch, compare
from lightning_module_monitor.trainer import controller
from measuring import Processor
from stages import Found, write_json
from workloads import FLOAT32, Workload

CONFIGURATIONS: tuple[Callable[[Path], Parts], ...] = (
    lambda folder: in_trainer.defaults(folder, every_n_steps=1),
    in_trainer.callback,
    in_trainer.everything,
)
"""The callbacks that the benchmark measures; what the first one launches is looked at first."""


def launches_of(make_parts: Callable[[Path], Parts], workload: Workload, device: torch.device) -> set[Launch]:
    """What a callback compiles before the first step of a run."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(controller, "warm_up") as warm_up:
        trainer = make_trainer(make_parts(Path(folder)), workload.precision or FLOAT32, device, folder, max_steps=0)
        trainer.fit(Training(make_model(workload, device)), make_batches(workload))
    launches: set[Launch] = warm_up.call_args.args[1]
    return launches


def all_launches(place: Processor) -> list[Launch]:
    """Those of all configurations on all workloads, each once."""
    return [
        *dict.fromkeys(
            launch
            for make_parts in CONFIGURATIONS
            for workload in gpu.workloads_of(place)
            for launch in sorted(launches_of(make_parts, workload, place.device), key=repr)
        )
    ]


def described(launch: Launch) -> Found:
    """A launch in words."""
    needs = [name.lower() for name, bit in vars(Need).items() if name.isupper() and bit & launch.needs and bit.bit_count() == 1]
    return {"form": launch.form.value, "dtype": str(launch.dtype).removeprefix("torch."), "needs": needs}


def check(launch: Launch, device: torch.device) -> Found:
    """Compile a launch and compare; says how long it took, and what is wrong, if anything."""
    start, wrong = time.perf_counter(), ""
    try:
        compare(device, launch)
    # As the callback does: Triton, its C compiler and the driver fail in many ways.
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    return described(launch) | {"seconds": round(time.perf_counter() - start, 3), "wrong": wrong}


def check_all(device: torch.device, launches: list[Launch], output: Path) -> None:
    """Check every launch on a GPU; ends with a message where one is wrong."""
    start = time.perf_counter()
    works = triton_kernel.works(device)
    figures: Found = {"device": str(device), "works": works, "first_s": round(time.perf_counter() - start, 3), "launches": []}
    for launch in launches if works else ():
        figures["launches"].append(check(launch, device))
        write_json(output, figures)
    write_json(output, figures)
    if not works:
        sys.exit("Triton does not work on this device; the warning above has the reason")
    wrong = [f"{one['form']} of {one['dtype']}: {one['wrong']}" for one in figures["launches"] if one["wrong"]]
    if wrong:
        sys.exit(f"{len(wrong)} of {len(launches)} launches are wrong, the first with {wrong[0]}")


def main() -> None:
    """Check the kernels; without a GPU only say what one would compile, and whether there are compiled loops."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    output, place = Path(sys.argv[1]), gpu.processor_here()
    launches = all_launches(place)
    if place.is_gpu:
        check_all(torch.device("cuda", 0), launches, output)
        return
    start = time.perf_counter()
    has_loops = numba_kernel.loops() is not None
    figures = {"device": "cpu", "works": False, "loops": has_loops, "first_s": round(time.perf_counter() - start, 3)}
    write_json(output, figures | {"launches": [described(launch) for launch in launches]})


if __name__ == "__main__":
    main()
