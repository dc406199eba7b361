"""The page about one run of ``make gpu``, made from what is in gpu.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from report import percent
from stages import WELL, Found
from variants import TRAINER

TRIAL = """\
**This was a trial on a CPU: there was no GPU, sizes were cut down, and the figures mean nothing.** It shows that the command runs to its
end."""
COST = """\
A step is a full training step (forward, backward, AdamW) of Lightning's Trainer; milliseconds are medians, on a GPU those between two
events and those of the clock. Every variant has a Trainer, a model and an optimizer of its own and takes one step in each round, in
shuffled order. *To plain* is the median over rounds of the ratio to the Trainer alone in the same round, *quartiles* are those of the same
ratios. *Busy* is the time of all kernels and copies of a step. Counts are of one step, beyond those of the Trainer alone, whose row has
all of its own, with what torch's profiler adds; *waits* are calls that wait for the device. *Peak* is the largest memory of a step, with
the model, the optimizer and the observer of that variant."""
COUNTS = ("launches", "copies_to_host", "copies_to_device", "waits", "host_reads", "dispatches")
NONE = "-"


def page(found: Found) -> str:
    """The whole page."""
    stages: dict[str, Found] = found["stages"]
    parts = ["# One run on a GPU", *([TRIAL] if found["is_trial"] else []), surroundings(found["surroundings"]), outcomes(stages)]
    for name, stage in stages.items():
        parts.append(f"## {name}: {stage['what']}")
        if stage["outcome"] != WELL:
            parts.append(f"**{stage['outcome']}** {stage['reason']}")
        if stage["figures"] and name in SECTIONS:
            parts += SECTIONS[name](stage["figures"])
        if stage["output"]:
            parts += ["The end of what it printed:", "\n".join(["```text", *stage["output"], "```"])]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of numbers are on the right."""
    lines = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    columns = [*zip(*lines, strict=True)] if lines else [()] * len(header)
    sides = ["---:" if all(cell[:1] in "+-0123456789" for cell in column) else "---" for column in columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, sides, *lines))


def surroundings(known: Found) -> str:
    """What the figures depend on."""
    others = (f"{name.replace('_', ' ')} {value}" for name, value in known.items() if name not in ("date", "commit") and value is not None)
    return f"`make gpu`, {known['date']}, commit {known['commit']}; {', '.join(others)}."


def outcomes(stages: dict[str, Found]) -> str:
    """What became of each stage."""
    rows = [[name, one["outcome"], f"{one['seconds']:.0f}", f"{one['limit_s']:.0f}", one["reason"]] for name, one in stages.items()]
    return table(["stage", "outcome", "seconds", "limit", "why"], rows)


def kernels(figures: Found) -> Iterator[str]:
    """What was compiled, in how many seconds, and whether it is right."""
    launches = figures["launches"]
    if figures["device"] == "cpu":
        yield f"No GPU: no Triton kernel was compiled. The compiled loops for CPUs are {'' if figures['loops'] else 'not '}there."
    else:
        state = "works" if figures["works"] else "does not work"
        yield f"Triton {state} on {figures['device']}; its first kernel took {figures['first_s']:.1f} s."
    yield f"{len(launches)} launches, each compared with torch's operations:" if figures["works"] else f"{len(launches)} launches of a GPU:"
    rows = [
        [
            launch["form"],
            launch["dtype"],
            ", ".join(launch["needs"]),
            f"{launch['seconds']:.1f}" if "seconds" in launch else NONE,
            verdict(launch),
        ]
        for launch in launches
    ]
    yield table(["form", "dtype", "moments", "seconds", "values"], rows)


def verdict(launch: Found) -> str:
    """What was found about a launch."""
    return launch["wrong"] or "equal" if "wrong" in launch else "not compared"


def cost(figures: Found) -> Iterator[str]:
    """A table for each workload."""
    yield COST
    for name in figures["not_installed"]:
        yield f"{name} was not measured: it is not installed."
    for name, workload in figures["workloads"].items():
        yield f"### {name}"
        yield f"{workload['workload']}; {workload['rounds']} rounds."
        header = ["variant", "ms", "by the clock", "to plain", "quartiles", "busy ms", *COUNTS, "peak MiB", "what it does"]
        plain = workload["variants"][TRAINER]
        rows = [[label, *cells_of(variant, {} if variant is plain else plain["counts"])] for label, variant in workload["variants"].items()]
        yield table([label.replace("_", " ") for label in header], rows)
        if workload["targets"]:
            yield "\n".join(f"- {line}" for line in workload["targets"])


def cells_of(variant: Found, plain: Found) -> list[str]:
    """A row of the table of costs, whose counts are those beyond the plain ones."""
    added = [percent(ratio - 1) for ratio in (variant["ratio"], *variant["quartiles"])] if plain else ["1", NONE, NONE]
    ratios = [added[0], f"{added[1]} to {added[2]}" if plain else NONE]
    counts = variant.get("counts")
    if counts is None:  # an average, of which no step was counted
        return [f"{variant['ms']:.2f}", NONE, *ratios, *[NONE] * (len(COUNTS) + 2), variant["note"]]
    numbers = [f"{counts[name] - plain[name]:+d}" if plain else str(counts[name]) for name in COUNTS]
    peak = f"{variant['peak_bytes'] / 2**20:.0f}" if variant["peak_bytes"] else NONE
    times = [f"{variant['ms']:.2f}", f"{variant['ms_by_clock']:.2f}"]
    return [*times, *ratios, f"{1000 * counts['device_seconds']:.2f}", *numbers, peak, variant["note"]]


def profile(figures: Found) -> Iterator[str]:
    """Where the time of a step goes."""
    yield f"{figures['variant']}; {figures['workload']}."
    for title, rows in (
        ("Kernels and copies", figures["on_the_device"]),
        ("Calls on the host, each without what it calls", figures["on_the_host"]),
    ):
        if rows:
            yield f"{title}:"
            yield table(["name", "calls", "ms"], [[f"`{row['name']}`", str(row["calls"]), f"{row['ms']:.3f}"] for row in rows])


def tests(figures: Found) -> Iterator[str]:
    """What became of the tests."""
    yield "{passed} passed, {failed} failed, {skipped} skipped, {not_run} were not run.".format(**figures)
    listed = [f"- `{name}`: {reason}" for name, reason in figures["failures"].items()]
    listed += [f"- {number} skipped: {reason}" for reason, number in figures["reasons_to_skip"].items()]
    yield from ["\n".join(listed)] if listed else []


SECTIONS: dict[str, Callable[[Found], Iterator[str]]] = {
    "kernels": kernels,
    "default": cost,
    "everything": cost,
    "profile": profile,
    "tests": tests,
}
"""What is written about a stage, by its name."""
