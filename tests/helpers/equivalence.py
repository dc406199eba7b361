"""The matrix of ways to train by what is recorded, docs/equivalence.md: which tests show which cells.

A test names its cells with a marker; names in braces are its parameters, so that each case has its own row::

    @pytest.mark.shows("DDP, {num_ranks} ranks", "activations", "gradients")
    @pytest.mark.refuses("tensor parallel, 2 ranks", "RCC")

``refuses`` is for a test of the error that is raised before the first batch; without columns it stands in all of them. The page is made
when tests are collected, and tests/test_equivalence.py compares. Write it with::

    python -m pytest tests --collect-only -q --write-equivalence
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"

COLUMNS = (
    "activations", "activation gradients", "parameters", "gradients", "updates", "differences", "RCC", "attention", "gradient flow",
    "histograms", "functions", "store and loggers", "raw tensors", "training unchanged", "nothing left behind",
)  # fmt: skip

TENSORS = COLUMNS[:5]
"""What every step has, without a reference."""

PARAMETERS = COLUMNS[2:5]

HEADER = """
# Right under every way to train

Rows are ways to train, columns what is recorded. The numbers of a cell are those of the tests below that show it: they compare with raw
tensors in float64, with a closed form, or with the same training in one process, without the callback, or without the interruption.
*refused* is an error before the first batch. An empty cell has no test of its own, which does not mean that it is wrong.
What several ranks cost, and where the limits are: [distributed.md](distributed.md).
"""


def page(items: Sequence[pytest.Item]) -> str:
    """Return the page: the header, the matrix, and the tests that its numbers stand for.

    Raises:
        pytest.UsageError: If a marker names an unknown column, or none.
    """
    needs: dict[str, str] = {}
    cells: dict[str, dict[str, set[tuple[str, bool]]]] = {}
    for item in items:
        for mark in [*item.iter_markers("shows"), *item.iter_markers("refuses")]:
            row, columns = _cells(item, mark)
            test = item.nodeid.partition("[")[0]
            needs[test] = "".join(f": skipped where {skip.kwargs['reason']}" for skip in item.iter_markers("skipif"))
            for column in columns:
                cells.setdefault(row, {}).setdefault(column, set()).add((test, mark.name == "refuses"))
    numbers = {test: number for number, test in enumerate(sorted(needs), 1)}
    lines = [HEADER.strip(), "", "| way to train | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in sorted(cells, key=str.lower):
        texts = (
            ", ".join(f"{'refused ' * is_refusal}{numbers[test]}" for test, is_refusal in sorted(cells[row].get(column, ())))
            for column in COLUMNS
        )
        lines.append(f"| {row} | " + " | ".join(texts) + " |")
    lines += ["", "## Tests", ""]
    for test, number in numbers.items():
        path, _, name = test.partition("::")
        lines.append(f"{number}. [{path}](../{path}) `{name}`{needs[test]}")
    return "\n".join(lines) + "\n"


def _cells(item: pytest.Item, mark: pytest.Mark) -> tuple[str, Sequence[str]]:
    """The row and the columns that a marker names."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    row, *columns = mark.args
    unknown = [column for column in columns if column not in COLUMNS]
    if unknown or not (columns or mark.name == "refuses"):
        raise pytest.UsageError(f"{item.nodeid}: {mark.name}{mark.args} has {unknown or 'no column'}; see tests/helpers/equivalence.py")
    return row.format(**parameters), columns or COLUMNS
