"""What monitoring costs: the time of full training steps, with and without, interleaved in one run.

Seven statistics (mean, std, norm, min, max, var, abs_mean) of every activation, parameter and gradient, at every step: by the callback in
Lightning's Trainer, and by the engine in a plain loop, beside the floor and torch-module-monitor::

    python benchmarks/overhead.py
    python benchmarks/overhead.py --workloads W2 --steps 200 --skip-peers
    python benchmarks/overhead.py --precision bf16-mixed
    python benchmarks/overhead.py --threads 2

Also the forward pass of a reference, alone and with the refined coordinate check, and the statistics that cost more.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import report
from measuring import measure
from variants import VARIANTS, choose_variants
from workloads import BFLOAT16, FLOAT32, MIXED, WORKLOADS


def positive(text: str) -> int:
    """A number of the command line that must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure what monitoring adds to a training step.")
    parser.add_argument("--steps", type=positive, default=60, help="timed steps of each variant (default 60)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS], help="which to run (default all)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("RESULTS.md"),
        help="Markdown file to write (default RESULTS.md here); its sections of other configurations stay",
    )
    parser.add_argument("--threads", type=positive, default=1, help="torch threads (default 1)")
    parser.add_argument(
        "--precision", choices=[FLOAT32, MIXED, BFLOAT16], default=FLOAT32, help=f"as Lightning's Trainer has it (default {FLOAT32})"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(dict.fromkeys(variant.name for variant in VARIANTS)),
        help="only these, beside the ones without a monitor, in a section of their own",
    )
    parser.add_argument("--skip-peers", action="store_true", help="measure only our own variants and the floor")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the report."""
    options = parse_arguments(arguments)
    options.output.parent.mkdir(parents=True, exist_ok=True)  # now, and not after minutes of measuring
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    variants = choose_variants(options.skip_peers, options.variants)
    results = []
    for name in options.workloads:
        workload = WORKLOADS[name]
        print(f"{name}: {workload.description}", file=sys.stderr, flush=True)
        results.append(measure(workload, variants, options.steps, options.precision))
    tables = report.tables(results, variants)
    for title, cells in tables.items():
        report.print_table(title, cells)
    print(*(f"{variant.name}: {variant.note}" for variant in variants), *report.lines_below(results), sep="\n")
    title = f"{options.precision}, {options.threads} {'thread' if options.threads == 1 else 'threads'}"
    title += f", only {', '.join(options.variants)}" if options.variants else ""
    surroundings = report.environment(variants, options.steps)
    sections = report.read_sections(options.output) | {title: report.section(tables, results, surroundings)}
    descriptions = [f"{workload.name}: {workload.description}" for workload in WORKLOADS.values()]
    options.output.write_text(report.markdown(sections, descriptions), encoding="utf-8")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
