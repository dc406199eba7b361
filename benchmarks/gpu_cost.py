"""Measure what the callback costs in Lightning's Trainer on a GPU, on a GPT and on W2.

python benchmarks/gpu_cost.py default FIGURES.json
python benchmarks/gpu_cost.py everything FIGURES.json
"""

from __future__ import annotations

import logging
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

import gpu
from gpu_variants import FLOOR_IN_TRAINER, ON_GPU
from measuring import Result, measure
from report import DEFAULT_CADENCE, at_most, relation, verdict
from stages import Found, write_json
from variants import CALLBACK, DEFAULTS, DEFAULTS_IDLE, TRAINER, Variant
from workloads import FLOAT32

ROUNDS, TRIAL_ROUNDS, SECONDS_OF_ROUNDS = 60, 3, 20.0
"""Most rounds on a workload, on a GPU and on a CPU; and no further one begins after so many seconds."""
AVERAGE = f"default callback, average of {DEFAULT_CADENCE} steps"
FLOOR_TARGET = 1.5
"""What the seven statistics may add to a plain step, in what the floor adds."""
LAUNCHES_PER_OUTPUT, LAUNCHES_BESIDE = 2, 8 + 8 + 20
"""Most launches of the seven statistics for an output; and for all parameters, for all gradients, and to finish the step."""


def times(seconds: Sequence[float], plain: Sequence[float]) -> Found:
    """The median step in milliseconds, and its ratio to the plain step of the same round."""
    ratios = [second / other for second, other in zip(seconds, plain, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"ms": 1000 * statistics.median(seconds), "ratio": median, "quartiles": [lower, upper]}


def figures_of(result: Result, variants: Sequence[Variant]) -> Found:
    """What was found on a workload."""
    plain = result.seconds[TRAINER]
    measured = {
        variant.name: times(result.seconds[variant.name], plain)
        | {
            "ms_by_clock": 1000 * statistics.median(result.wall_seconds[variant.name]),
            "counts": asdict(result.counts[variant.name]),
            "peak_bytes": result.peak_bytes[variant.name],
            "note": variant.note,
        }
        for variant in variants
    }
    if {DEFAULTS, DEFAULTS_IDLE} <= measured.keys():
        both = zip(result.seconds[DEFAULTS], result.seconds[DEFAULTS_IDLE], strict=True)
        averages = [(monitored + (DEFAULT_CADENCE - 1) * other) / DEFAULT_CADENCE for monitored, other in both]
        measured[AVERAGE] = times(averages, plain) | {"note": "made of the two, by round"}
    return {"workload": result.workload.description, "rounds": len(plain), "variants": measured, "targets": targets(result)}


def targets(result: Result) -> list[str]:
    """What the seven statistics should cost on a GPU, and what they cost."""
    if not {CALLBACK, FLOOR_IN_TRAINER} <= result.seconds.keys():
        return []
    launches, most = result.extra(CALLBACK, TRAINER).launches, LAUNCHES_PER_OUTPUT * result.num_outputs + LAUNCHES_BESIDE
    to_floor = partial(relation, of=(CALLBACK, TRAINER), to=(FLOOR_IN_TRAINER, TRAINER))
    return [
        f"{CALLBACK}: {launches} launches, target at most {most}: {verdict(launches <= most)}",
        at_most(result, CALLBACK, to_floor, FLOOR_TARGET, "of the floor"),
    ]


def main() -> None:
    """Measure a set of variants on each workload."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    chosen, output, place = ON_GPU[sys.argv[1]], Path(sys.argv[2]), gpu.processor_here()
    variants = [variant for variant in chosen if variant.is_installed]
    figures: Found = {"not_installed": [variant.name for variant in chosen if not variant.is_installed], "workloads": {}}
    for workload in gpu.workloads_of(place):
        num_rounds = ROUNDS if place.is_gpu else TRIAL_ROUNDS
        result = measure(workload, variants, num_rounds, FLOAT32, place=place, most_seconds=SECONDS_OF_ROUNDS)
        figures["workloads"][workload.name] = figures_of(result, variants)
        write_json(output, figures)


if __name__ == "__main__":
    main()
