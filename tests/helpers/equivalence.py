"""The matrix of ways to train by what is recorded, docs/equivalence.md: which test shows which cell.

A test says it with a marker; names in braces are its parameters, so that each case shows its own row::

    @pytest.mark.shows("DDP, {num_ranks} ranks", "activations", "gradients")
    @pytest.mark.refuses("FSDP2, 2 ranks", "RCC")

``refuses`` is for a test of the error that says before the first batch why not; without columns it is of all of them. The test hands
the error over: ``record_property("refusal", str(error.value))``. Rows and columns are those below: a new way to train is one more
line in :data:`ROWS`. A case of a parametrized test that shows something else has its marker in ``pytest.param(..., marks=...)``.
Then write the page, from a run of all these tests::

    OMP_NUM_THREADS=1 python -m pytest -n 2 -m "shows or refuses" --write-equivalence

tests/test_equivalence.py fails as long as the page is not what the markers say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"

COLUMNS = (
    "activations", "activation gradients", "parameters", "gradients", "updates", "differences", "RCC", "attention", "gradient flow",
    "histograms", "functions", "store and loggers", "raw tensors", "training unchanged", "nothing left behind",
)  # fmt: skip

TENSORS = COLUMNS[:5]
"""What every step has, without a reference."""

PARAMETERS = COLUMNS[2:5]

COMPILED = (
    "whole",
    "whole, in place",
    "part",
    "in place",
    "late",
    "blocks",
    "blocks, in place",
    "blocks, forward",
    "blocks, a decorated forward",
    "blocks, checkpointed",
    "a function that a module holds",
    "a method that a module holds",
    "a function around the model",
)
"""How a model is compiled: by ``torch.compile`` or in place, the LightningModule, its model or the blocks of that."""

ROWS = (
    # Loops
    "plain loop",
    "Trainer, one device",
    "Trainer, one CUDA device",
    "Fabric, one process",
    "Fabric, FSDP2, 2 processes",
    "Fabric, FSDP2, 3 processes",
    # Several processes
    "DDP, 2 ranks",
    "DDP, 3 ranks",
    "DDP, accumulation without synchronization, clipping",
    "DDP, uneven batches",
    "DDP, what one rank alone has",
    "DDP, an error on one rank",
    "DDP in torch's Join",
    "ranks that differ",
    "DDP, rules that differ from rank to rank",
    "FSDP2, 2 ranks",
    "FSDP2, 3 ranks",
    "FSDP2, uneven and empty shards",
    "FSDP2, an error on one rank",
    "tensor parallel, 2 ranks",
    "tensor parallel, DTensor activations",
    "tensor parallel and FSDP2, 4 ranks",
    "FSDP1, FULL_SHARD",
    "FSDP1, SHARD_GRAD_OP",
    "FSDP1, accumulation, clipping by value",
    "FSDP1, NO_SHARD",
    "FSDP1, CPU offload",
    "FSDP1, mixed precision",
    "FSDP1, uneven and empty shards, 4 ranks",
    "FSDP1, HYBRID_SHARD, 4 ranks",
    "FSDP1, use_orig_params=False",
    "a subclass of a strategy",
    "a strategy that is not known",
    # Batches and precision
    "accumulation",
    "clipping",
    "32-true",
    "bf16-mixed",
    "bf16-true",
    "64-true",
    "16-mixed with a GradScaler",
    "16-mixed, fused optimizers",
    "16-mixed, a skipped step",
    "accumulation, bf16-mixed, clipping",
    # Optimization
    "manual optimization, two optimizers",
    "manual optimization, several steps in a batch",
    "manual optimization, clipping by hand",
    "manual optimization, accumulation by hand",
    "manual optimization with a GradScaler",
    "LBFGS",
    "frozen parameters",
    "parameters frozen and unfrozen",
    "parameter groups added later",
    "adapters (LoRA)",
    "shared modules, tied weights",
    "layers built late, lazy",
    "layers built late, configure_model",
    # Graph
    "checkpointing, use_reentrant=True",
    "checkpointing, use_reentrant=False",
    *(f"compiled: keep, {how}" for how in COMPILED),
    "compiled: keep, bf16-mixed by inductor",
    "compiled: keep, DDP, whole",
    "compiled: keep, DDP, part",
    "compiled: keep, DDP, blocks",
    "compiled: keep, DDP, blocks in place",
    "compiled: keep, FSDP2, compiled before",
    "compiled: keep, FSDP2, compiled after",
    "compiled: keep, Fabric, compiled before",
    "compiled: keep, Fabric, compiled after",
    *(f"compiled: uncompiled, {how}" for how in COMPILED),
    "inner autograd.grad",
    "torch.func and no_grad inside of a forward",
    "hooks of other libraries",
    "in-place layers",
    # Life
    "validate, test, predict",
    "resume at a step",
    "resume in mid-epoch",
    "resume in mid-accumulation",
    "resume with another configuration",
    "two fits",
    "several callbacks",
    "ModelCheckpoint, EarlyStopping",
    "EMA (WeightAveraging)",
    "SWA",
    "fast_dev_run",
    "overfit_batches",
    "Tuner",
    "pickled callback",
    "ddp_spawn",
    "ddp from a script",
    "kill -9",
    "an exception",
    "Ctrl-C",
    "end of fit",
)

HEADER = """
# Right under every way to train

Rows are ways to train, columns what is recorded. The numbers of a cell are those of the tests below that show it: they compare with raw
tensors in float64, with a closed form, or with the same training in one process, without the callback, or without the interruption.
Where a test did not pass, or was not run, the cell says so; *refused* is an error before the first batch. An empty cell has no test of
its own, which does not mean that it is wrong. What several ranks cost, and where the limits are: [distributed.md](distributed.md).
"""


@dataclass(frozen=True)
class Claim:
    """What one marker of one test says."""

    row: str
    columns: tuple[str, ...]
    is_refusal: bool = False


CLAIMS = pytest.StashKey[dict[str, tuple[Claim, ...]]]()
"""What all tests that were collected claim, by node id, also those that were deselected since: in the stash of pytest's config."""


def claims_of(item: pytest.Item) -> list[Claim]:
    """What a test says that it shows.

    Raises:
        pytest.UsageError: If a row or a column is not known.
    """
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    claims = []
    for mark in [*item.iter_markers("shows"), *item.iter_markers("refuses")]:
        row, *columns = mark.args
        claim = Claim(row.format(**parameters), tuple(columns), mark.name == "refuses")
        wrong = [name for name in claim.columns if name not in COLUMNS] + [claim.row] * (claim.row not in ROWS)
        if wrong or not (columns or claim.is_refusal):
            raise pytest.UsageError(f"{item.nodeid}: {mark.name}{mark.args} has {wrong or 'no column'}; see tests/helpers/equivalence.py")
        claims.append(claim)
    return claims


def function_of(nodeid: str) -> str:
    """A test without its parameters, from the project's root."""
    return nodeid.partition("[")[0]


@dataclass(frozen=True)
class Outcome:
    """How one case of one test ended."""

    nodeid: str
    claims: tuple[Claim, ...]
    outcome: str
    """``passed``, ``failed`` or ``skipped``."""
    reason: str = ""
    """Of a test that was skipped."""
    refusal: str = ""
    """The error, in a test of one."""


Cells = dict[tuple[str, str], list[str]]
"""The tests of a cell, by row and column."""


def cells(claims: Iterable[tuple[str, Sequence[Claim]]]) -> Cells:
    """The tests of each cell, sorted, from what tests claim."""
    found: dict[tuple[str, str], set[str]] = {}
    for nodeid, of_test in claims:
        for claim in of_test:
            for column in claim.columns or COLUMNS:
                found.setdefault((claim.row, column), set()).add(function_of(nodeid))
    return {cell: sorted(tests) for cell, tests in found.items()}


def page(outcomes: Sequence[Outcome], versions: str) -> str:
    """The page: its header, the matrix, the tests that its numbers stand for, and what the errors say."""
    tests = sorted({function_of(one.nodeid) for one in outcomes})
    number = {test: place for place, test in enumerate(tests, 1)}
    matrix = cells((one.nodeid, one.claims) for one in outcomes)
    lines = [HEADER.strip(), "", versions, "", "| way to train | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in ROWS:
        of_row = [_cell(row, column, matrix.get((row, column), []), outcomes, number) for column in COLUMNS]
        if any(of_row):
            lines.append(f"| {row} | " + " | ".join(of_row) + " |")
    lines += ["", "## Tests", ""]
    for test in tests:
        path, _, name = test.partition("::")
        lines.append(f"{number[test]}. [{path}](../{path}) `{name}`: {_summary([o for o in outcomes if function_of(o.nodeid) == test])}")
    refusals = {(claim.row, one.refusal): None for one in outcomes for claim in one.claims if claim.is_refusal}
    lines += ["", "## What the errors say", ""]
    lines += [f"- {row}: {refusal}" for row in ROWS for of_row, refusal in refusals if of_row == row]
    return "\n".join(lines) + "\n"


def _cell(row: str, column: str, tests: Sequence[str], outcomes: Sequence[Outcome], number: dict[str, int]) -> str:
    """The numbers of a cell's tests; where one did not pass, that."""
    shown = []
    for test in tests:
        of_cell = [
            (one, claim) for one in outcomes for claim in one.claims
            if function_of(one.nodeid) == test and claim.row == row and column in (claim.columns or COLUMNS)
        ]  # fmt: skip
        ends = {one.outcome for one, _claim in of_cell}
        what = "refused " if any(claim.is_refusal for _one, claim in of_cell) else ""
        how = " FAILED" if "failed" in ends else " not run" if "passed" not in ends else ""
        shown.append(f"{what}{number[test]}{how}")
    return ", ".join(shown)


def _summary(outcomes: Sequence[Outcome]) -> str:
    """How the cases of one test ended."""
    counts = {end: sum(one.outcome == end for one in outcomes) for end in ("passed", "failed", "skipped")}
    said = ", ".join(f"{count} {end}" for end, count in counts.items() if count)
    reasons = sorted({one.reason for one in outcomes if one.reason})
    return said + (f" ({'; '.join(reasons)})" if reasons else "")


def read(text: str) -> Cells:
    """The cells of a page that :func:`page` has written."""
    tests = {int(number): f"{path}::{name}" for number, path, name in re.findall(r"^(\d+)\. \[(.*?)\].*? `(.*?)`", text, re.MULTILINE)}
    rows = [[cell.strip() for cell in line.strip("|").split(" |")] for line in text.splitlines() if line.startswith("| ")]
    columns = rows[0][1:]
    return {
        (row, column): sorted(tests[int(number)] for number in re.findall(r"\d+", cell))
        for row, *of_row in rows[1:]
        for column, cell in zip(columns, of_row, strict=True)
        if cell
    }
