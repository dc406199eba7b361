"""The tables, the targets and the file that they are written to."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from lightning_module_monitor.kernels import numba_kernel
from measuring import WARM_UP_STEPS, Result
from variants import (
    CALLBACK,
    DEFAULTS,
    DEFAULTS_IDLE,
    EAGER,
    FLOOR,
    IDLE,
    LOGGED,
    OURS,
    PEER,
    PLAIN,
    RCC,
    REFERENCE,
    TRAINER,
    Variant,
)

FLOOR_TARGET, PEER_TARGET = 1.6, 1 / 8
"""What the seven statistics may add to a plain step, in what the floor adds, and in what torch-module-monitor adds."""
IDLE_TARGET = 0.01
RCC_TARGET = 2.0
"""Forward passes that the check may cost beyond that of the reference."""
CALLBACK_TARGET = 1.5
"""What the callback with its store may add to a step of the Trainer, in what the engine alone adds."""
DEFAULTS_TARGET = 0.005
"""The largest share of the run with the default configuration."""
DEFAULT_CADENCE = 50

Cells = list[str]
Column = tuple[str, Callable[[Result, Variant], str]]
Figure = Callable[[Result], float]


def percent(fraction: float, digits: int = 1) -> str:
    """A fraction as it stands in the table: ``+5.3 %``."""
    return f"{100 * fraction:+.{digits}f} %"


def milliseconds(seconds: Sequence[float]) -> str:
    """The median."""
    return f"{1000 * statistics.median(seconds):.2f}"


def quartiles(added: Sequence[float]) -> str:
    """First and third quartile of shares of a plain step."""
    lower, _median, upper = statistics.quantiles(added, n=4, method="inclusive") if len(added) > 1 else [*added] * 3
    return f"{percent(lower)} to {percent(upper)}"


def _to_plain(result: Result, variant: Variant) -> str:
    return "1" if variant.name == variant.base else percent(result.added(variant.name, variant.base))


def _quartiles(result: Result, variant: Variant) -> str:
    return "" if variant.name == variant.base else quartiles([ratio - 1 for ratio in result.ratios(variant.name, variant.base)])


def _transfers(result: Result, variant: Variant) -> str:
    return "-" if variant.package else str(result.counts[variant.name].transfers)


WORKLOAD: Column = ("workload", lambda result, _variant: result.workload.name)
NAME: Column = ("variant", lambda _result, variant: variant.name)
NOTE: Column = ("what it does", lambda _result, variant: variant.note)
RATIOS: tuple[Column, ...] = (("to plain", _to_plain), ("quartiles", _quartiles))
CPU_TIME: Column = ("ms CPU", lambda result, variant: milliseconds(result.seconds[variant.name]))
HOST_READS: Column = ("host reads", lambda result, variant: str(result.extra(variant.name).host_reads))
TRANSFERS: Column = ("transfers", _transfers)
DISPATCHES: Column = ("dispatches", lambda result, variant: str(result.extra(variant.name).dispatches))
VALUES: Column = ("values", lambda result, variant: str(result.counts[variant.name].values))

TRAINER_TABLE = (WORKLOAD, NAME, CPU_TIME, *RATIOS, NOTE)
LOOP_TABLE = (WORKLOAD, NAME, CPU_TIME, *RATIOS, HOST_READS, TRANSFERS, DISPATCHES, VALUES, NOTE)


def tables(results: Sequence[Result], variants: Sequence[Variant]) -> dict[str, list[Cells]]:
    """By title: the names of the columns, and a row for each workload and variant."""
    found = {}
    for title, base, columns in (("In Lightning's Trainer", TRAINER, TRAINER_TABLE), ("The engine alone", PLAIN, LOOP_TABLE)):
        rows = []
        for result in results:
            measured = [variant for variant in variants if variant.base == base and variant.name in result.seconds]
            rows += [[write(result, variant) for _name, write in columns] for variant in measured]
            rows += logger_rows(result) if base == TRAINER else []
        if rows:
            found[title] = [[name for name, _write in columns], *rows]
    return found


def logger_rows(result: Result) -> list[Cells]:
    """What the logger itself takes: the difference of two variants."""
    if not {LOGGED, CALLBACK} <= result.seconds.keys():
        return []
    seconds = result.differences(LOGGED, CALLBACK)
    added = [difference / plain for difference, plain in zip(seconds, result.seconds[TRAINER], strict=True)]
    share, note = percent(statistics.median(added)), f"{LOGGED}, less {CALLBACK}"
    return [[result.workload.name, "TensorBoard itself, under the callback", milliseconds(seconds), share, quartiles(added), note]]


def accuracy_line(result: Result) -> str:
    """The distance of our engine's values from those in float64."""
    found = ", ".join(f"{name} {error:.1e}" for name, error in result.errors.items())
    return f"{result.workload.name}: largest relative error of ours against float64, all activations and parameters of a step: {found}"


def sure(result: Result, figure: Figure, write: Callable[[float], str]) -> str:
    """A figure, and in brackets the interval that holds 95 of 100 when the rounds are drawn anew (bootstrap percentiles)."""
    again = sorted(map(figure, result.resampled()))
    return f"{write(figure(result))} ({write(again[len(again) // 40])} to {write(again[-1 - len(again) // 40])})"


def verdict(is_met: bool) -> str:
    """How a target's line ends."""
    return "met" if is_met else "MISSED"


def at_most(result: Result, what: str, figure: Figure, target: float, unit: str) -> str:
    """Whether a relation of two costs is within its target; where one of them is negative, the steps differ by more than they cost."""
    found = figure(result)
    judged = verdict(found <= target) if found >= 0 else "NOT RESOLVED"
    return f"{what} {sure(result, figure, '{:.2f}'.format)} {unit}, target at most {target:g}: {judged}"


def share_at_most(result: Result, what: str, figure: Figure, target: float, digits: int = 1) -> str:
    """Whether a share of a plain step is within its target."""
    write = partial(percent, digits=digits)
    return f"{what} {sure(result, figure, write)}, target at most {write(target)}: {verdict(figure(result) <= target)}"


def count_checks(result: Result) -> list[str]:
    """What our engine should do in a step, and what it does."""
    extra = result.extra(OURS)
    return [
        f"{name} {number}, target {wanted}: {verdict(number == wanted)}"
        for name, number, wanted in (("transfers", extra.transfers, 1), ("host reads", extra.host_reads, 0))
    ]


def time_checks(result: Result) -> list[str]:
    """What our engine should cost in a plain loop, and what it costs."""
    measured, checks = result.seconds, []
    for name, target in ((OURS, result.workload.target), (IDLE, IDLE_TARGET)):
        if name in measured and target is not None:
            checks.append(share_at_most(result, name, partial(Result.added, name=name), target))
    for unit, target in ((FLOOR, FLOOR_TARGET), (PEER, PEER_TARGET)):
        if {OURS, unit} <= measured.keys():
            checks.append(at_most(result, OURS, partial(relation, of=(OURS, PLAIN), to=(unit, PLAIN)), target, f"of {unit}"))
        if {OURS, unit} <= result.own_seconds.keys():
            checks.append(at_most(result, f"{OURS}, its own calls alone,", partial(own_relation, of=OURS, to=unit), target, f"of {unit}'s"))
    for name, of, to, target, unit in (
        (EAGER, (EAGER, PLAIN), (PEER, PLAIN), 1.0, f"of {PEER}"),
        (RCC, (RCC, REFERENCE), (REFERENCE, PLAIN), RCC_TARGET, "forward passes beyond the reference's"),
    ):
        if {*of, *to} <= measured.keys():
            checks.append(at_most(result, name, partial(relation, of=of, to=to), target, unit))
    return checks


def trainer_checks(result: Result) -> list[str]:
    """What the callback should cost in a Trainer, and what it costs."""
    checks = []
    if {CALLBACK, TRAINER, OURS} <= result.seconds.keys():
        figure = partial(relation, of=(CALLBACK, TRAINER), to=(OURS, PLAIN))
        checks.append(at_most(result, CALLBACK, figure, CALLBACK_TARGET, "of the engine alone"))
    if {CALLBACK, OURS} <= result.own_seconds.keys():
        figure = partial(own_relation, of=CALLBACK, to=OURS)
        checks.append(at_most(result, f"{CALLBACK}, its own calls alone,", figure, CALLBACK_TARGET, "of the engine's"))
    if {DEFAULTS, DEFAULTS_IDLE} <= result.own_seconds.keys():
        what = f"default configuration, every {DEFAULT_CADENCE} steps with TensorBoard, share of the run"
        checks.append(share_at_most(result, what, share_of_defaults, DEFAULTS_TARGET, digits=2))
    return checks


def target_line(result: Result) -> str:
    """All targets that were measured."""
    counted = count_checks(result) if OURS in result.seconds else []
    return f"{result.workload.name}: " + "; ".join([*trainer_checks(result), *counted, *time_checks(result)])


def relation(result: Result, of: tuple[str, str], to: tuple[str, str]) -> float:
    """What one variant takes beyond another, in what a third takes beyond a fourth."""
    return result.beyond(*of) / result.beyond(*to)


def own_relation(result: Result, of: str, to: str) -> float:
    """What one variant's own calls take, in what another's do."""
    return statistics.median(result.own_seconds[of]) / statistics.median(result.own_seconds[to])


def share_of_defaults(result: Result) -> float:
    """CPU time of the callback's own calls with the default configuration, in that of the plain steps of the same run."""
    monitored, other = (statistics.median(result.own_seconds[name]) for name in (DEFAULTS, DEFAULTS_IDLE))
    return (monitored + (DEFAULT_CADENCE - 1) * other) / DEFAULT_CADENCE / statistics.median(result.seconds[TRAINER])


def processor() -> str:
    """The processor's name, as far as the system reports it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def environment(variants: Sequence[Variant], num_steps: int) -> str:
    """What the figures depend on."""
    packages = {"lightning": any(variant.base == TRAINER for variant in variants), "numba": numba_kernel.loops() is not None}
    packages |= {variant.package.replace("_", "-"): True for variant in variants if variant.package}
    versions = [f"{name} {version(name)}" for name, is_used in packages.items() if is_used]
    parts = [f"torch {torch.__version__}", *versions, f"Python {platform.python_version()}", processor()]
    parts.append(f"torch threads: {torch.get_num_threads()}")
    return f"{datetime.now(timezone.utc):%Y-%m-%d}; {', '.join(parts)}; {num_steps} steps of each after {WARM_UP_STEPS} to warm up."


NOTES = """\
A step is a full training step (forward, backward, AdamW), in milliseconds of the process's CPU time, the median. *To plain* is the
median over rounds of a step in relation to the plain step of the same round; *quartiles* are those of the same ratios. All variants
take one step in each round, in shuffled order. Counts are of one monitored step, beyond those of a plain one: *host reads* are single
values read on the host (`aten._local_scalar_dense`), *dispatches* are torch operations that no other operation called, *transfers* are
copies of many values at once (those of the peers are not counted). Relations to the floor, to a peer or to a forward pass are those of
medians of differences between steps of the same round. *Its own calls alone* is the CPU time within the calls of a monitor and of its
hooks, in further rounds; it leaves out any slowdown of the model's own work, and is more precise than the difference of two steps. The
share of the default configuration is made of such times: those of a monitored step and of 49 others, in 50 plain steps. In brackets: the
interval that holds 95 of 100 figures when the rounds are drawn anew."""
SECTION = "## "


def section(found: Mapping[str, Sequence[Cells]], results: Sequence[Result], surroundings: str) -> str:
    """What was found in one configuration."""
    lines = [surroundings]
    for title, (header, *rows) in found.items():
        lines += ["", f"### {title}", "", f"| {' | '.join(header)} |", "|---|---|" + "---:|" * (len(header) - 3) + "---|"]
        lines += [f"| {' | '.join(cells)} |" for cells in rows]
    lines += ["", "Targets:", "", *(f"- {line}" for line in lines_below(results))]
    return "\n".join(lines)


def lines_below(results: Sequence[Result]) -> list[str]:
    """What stands below the tables."""
    return [*map(target_line, results), *(accuracy_line(result) for result in results if result.errors)]


def markdown(sections: Mapping[str, str], descriptions: Sequence[str]) -> str:
    """The whole report, from what was found by configuration."""
    intro = "\n".join(["# What monitoring costs", "", *(f"- {line}" for line in descriptions), "", NOTES])
    return "\n\n".join([intro, *(f"{SECTION}{title}\n\n{text}" for title, text in sections.items())]) + "\n"


def read_sections(report: Path) -> dict[str, str]:
    """What a report already has, by configuration."""
    written = report.read_text(encoding="utf-8") if report.exists() else ""
    parts = [part.partition("\n") for part in ("\n" + written).split("\n" + SECTION)[1:]]
    return {title: text.strip() for title, _newline, text in parts}


def print_table(title: str, cells: Sequence[Cells]) -> None:
    """Print a table without its notes."""
    shown = [row[:-1] for row in cells]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    print(f"\n{title}")
    for row in shown:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
