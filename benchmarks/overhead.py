"""What monitoring costs: the time of full training steps, with and without, interleaved in one run.

Seven statistics (mean, std, norm, min, max, var, abs_mean) of every activation, parameter and gradient, at every step: by the callback in
Lightning's Trainer, and by the engine in a plain loop, beside the floor and the peers::

    python benchmarks/overhead.py
    python benchmarks/overhead.py --workloads W2 --steps 200 --skip-peers
    python benchmarks/overhead.py --precision bf16-mixed
    python benchmarks/overhead.py --threads 2
    python benchmarks/overhead.py --device cuda

On W1 also the forward pass of a reference, alone and with the refined coordinate check; and attention, head by head, beside one forward
pass of all attention without the fused kernel.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import report
from gpu import Gpu
from measuring import Processor, measure
from variants import VARIANTS, Variant, choose_variants
from workloads import BFLOAT16, FLOAT32, G1, MIXED, WORKLOADS, Workload, gpt_that_fits

REPORTS = {"cpu": "RESULTS.md", "cuda": "RESULTS-cuda.md"}


def positive(text: str) -> int:
    """A number of the command line that must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with status 2 where it asks for what is not there."""
    parser = argparse.ArgumentParser(description="Measure what monitoring adds to a training step.")
    parser.add_argument("--device", choices=REPORTS, default="cpu", help="where to train (default cpu)")
    parser.add_argument("--steps", type=positive, default=60, help="timed steps of each variant (default 60)")
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS, G1], help="which to run (default all; G1 needs --device cuda)")
    parser.add_argument(
        "--output",
        type=Path,
        help="Markdown file to write (default RESULTS.md or RESULTS-cuda.md here); its sections of other configurations stay",
    )
    parser.add_argument("--threads", type=positive, default=1, help="torch threads (default 1)")
    parser.add_argument(
        "--precision", choices=[FLOAT32, MIXED, BFLOAT16], default=FLOAT32, help=f"as Lightning's Trainer has it (default {FLOAT32})"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(dict.fromkeys(one.name for one in VARIANTS)),
        help="only these, beside the ones without a monitor, in a section of their own",
    )
    parser.add_argument("--skip-peers", action="store_true", help="measure only our own variants and the floor")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "--device cuda needs a GPU, and torch finds none; expected a machine with one and torch for CUDA or ROCm.\n")
    if options.device == "cpu" and G1 in (options.workloads or ()):
        parser.exit(2, f"--workloads {G1} is too large for a CPU; expected {', '.join(WORKLOADS)}, or --device cuda.\n")
    here = [one.name for one in VARIANTS if options.device in one.devices]
    elsewhere = [name for name in options.variants or () if name not in here]
    if elsewhere:
        parser.exit(
            2, f"--variants {elsewhere[0]!r} is not measured with --device {options.device}; expected {', '.join(map(repr, here))}.\n"
        )
    options.workloads = options.workloads or [*WORKLOADS, *([G1] if options.device == "cuda" else [])]
    options.output = options.output or Path(__file__).with_name(REPORTS[options.device])
    return options


def workload_of(name: str, variants: Sequence[Variant], place: Processor) -> Workload:
    """The workload by its name; the size of G1 depends on the free memory and on the number of variants."""
    if isinstance(place, Gpu) and name == G1:
        return gpt_that_fits(place.free_bytes(), sum(G1 in variant.workloads for variant in variants))
    return WORKLOADS[name]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the report."""
    options = parse_arguments(arguments)
    options.output.parent.mkdir(parents=True, exist_ok=True)  # now, and not after minutes of measuring
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    place = Processor() if options.device == "cpu" else Gpu(torch.device(options.device))
    variants = choose_variants(options.device, options.skip_peers, options.variants)
    results = []
    for name in options.workloads:
        workload = workload_of(name, variants, place)
        print(f"{name}: {workload.description}", file=sys.stderr, flush=True)
        results.append(measure(workload, variants, options.steps, options.precision, place))
    tables = report.tables(results, variants)
    for title, cells in tables.items():
        report.print_table(title, cells)
    print(*(f"{variant.name}: {variant.note}" for variant in variants), *report.lines_below(results), sep="\n")
    title = f"{options.precision}, {options.threads} {'thread' if options.threads == 1 else 'threads'}"
    title += f", only {', '.join(options.variants)}" if options.variants else ""
    surroundings = report.environment(variants, options.steps, place.is_gpu)
    sections = report.read_sections(options.output) | {title: report.section(tables, results, surroundings)}
    descriptions = [
        f"{one.name}: {one.description}" for one in ({**WORKLOADS} | {one.workload.name: one.workload for one in results}).values()
    ]
    options.output.write_text(report.markdown(sections, descriptions, place.is_gpu), encoding="utf-8")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
