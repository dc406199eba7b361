"""The published matrix of ways to train has the cells that the tests' markers give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.equivalence import CLAIMS, COLUMNS, PAGE, Claim, Outcome, cells, claims_of, function_of, page, read


def test_the_page_has_the_cells_that_the_tests_give(request: pytest.FixtureRequest) -> None:
    """Of the files that were collected whole, in both directions: no cell without its test, no test without its cells."""
    claims = request.config.stash[CLAIMS]
    cut = {argument.partition("::")[0] for argument in request.config.args if "::" in argument}
    files = {nodeid.partition("::")[0] for nodeid in claims} - cut
    written = {cell: [test for test in tests if test.partition("::")[0] in files] for cell, tests in read(PAGE.read_text()).items()}
    given = cells((nodeid, of_test) for nodeid, of_test in claims.items() if nodeid.partition("::")[0] in files)
    how = 'write the page: pytest -m "shows or refuses" --write-equivalence'
    assert {cell: tests for cell, tests in written.items() if tests} == given, how


def test_every_named_test_exists() -> None:
    """Also in files that are not collected now."""
    tests = {test for of_cell in read(PAGE.read_text()).values() for test in of_cell}
    assert len(tests) > 30
    for test in tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (PAGE.parents[1] / path).read_text(), test


def test_a_page_says_how_the_tests_ended() -> None:
    """Numbers of those that passed, and in words what failed, was not run, or is refused; what is written can be read."""
    outcomes = [
        Outcome("tests/a.py::test_one[x]", (Claim("DDP, 2 ranks", ("activations", "updates")),), "passed"),
        Outcome("tests/a.py::test_one[y]", (Claim("DDP, 3 ranks", ("activations",)),), "failed"),
        Outcome("tests/b.py::test_two", (Claim("DDP, 3 ranks", ("activations",)),), "passed"),
        Outcome("tests/b.py::test_gpu", (Claim("Trainer, one CUDA device", ("gradients",)),), "skipped", "no CUDA device here"),
        Outcome("tests/b.py::test_refused", (Claim("LBFGS", ("RCC",), is_refusal=True),), "passed", refusal="It cannot be; do that."),
    ]
    text = page(outcomes, "Versions.")
    found = {line.split(" |")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert found["DDP, 2 ranks"].split(" |")[1:3] == [" 1", " "]
    assert found["DDP, 3 ranks"].split(" |")[1] == " 1 FAILED, 4"
    assert found["Trainer, one CUDA device"].split(" |")[4] == " 2 not run"
    assert found["LBFGS"].split(" |")[1 + COLUMNS.index("RCC")] == " refused 3"
    assert "`test_gpu`: 1 skipped (no CUDA device here)" in text
    assert "`test_one`: 1 passed, 1 failed" in text
    assert "- LBFGS: It cannot be; do that." in text
    assert read(text) == cells((one.nodeid, one.claims) for one in outcomes)
    assert function_of(outcomes[0].nodeid) == "tests/a.py::test_one"


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (pytest.mark.shows("DPP, 2 ranks", "gradients"), "'DPP, 2 ranks'"),
        (pytest.mark.shows("DDP, {num_ranks} ranks", "gradient"), "'gradient'"),
        (pytest.mark.shows("LBFGS"), "no column"),
    ],
)
def test_a_marker_with_a_wrong_name_is_an_error(mark: pytest.MarkDecorator, message: str) -> None:
    """Rather than a cell that nobody looks for."""
    item: Any = SimpleNamespace(
        nodeid="tests/a.py::test_one[2]",
        callspec=SimpleNamespace(params={"num_ranks": 2}),
        iter_markers=lambda name: [mark.mark] * (name == mark.name),
    )
    with pytest.raises(pytest.UsageError, match=message):
        claims_of(item)
