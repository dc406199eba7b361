"""The mutation check picks what can be tested; no tests are run with mutations here."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parent.parent / "tools"

SOURCE = '''
"""Documented."""

import logging

__all__ = ["pick"]


def pick(values: dict[str, int], first: int = 1) -> int | None:
    """Documented."""
    logging.info("%s", first + 1)
    if first < 0 and values is not None:
        raise ValueError(f"{first + 1} < 0")
    total: int
    total = 3 - first
    total += len(values)
    while True:
        break
    return total if total == 3 or first >= 0 else values[-1]
'''


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the mutation check."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("mutate")


def test_mutations_are_of_code_alone(mutate: ModuleType) -> None:
    """Not of docstrings, imports, annotations, messages and f-strings."""
    changed = [(found.kind, found.new.strip()) for found in mutate.candidates(Path("pick.py"), SOURCE)]
    ends = [
        ("sign", "def pick(values: dict[str, int], first: int = -1) -> int | None:"),
        ("comparison", "if first < 0 or values is not None:"),
        ("comparison", "if first <= 0 and values is not None:"),
        ("sign", "if first < -0 and values is not None:"),
        ("comparison", "if first < 0 and values is None:"),
        ("removed", "pass"),  # raise
        ("removed", "pass"),  # total = ...
        ("sign", "total = 3 + first"),
        ("sign", "total = -3 - first"),
        ("sign", "total -= len(values)"),
        ("removed", "pass"),
        ("removed", "pass"),  # break
        ("removed", "pass"),  # return
        ("comparison", "return total if total == 3 and first >= 0 else values[-1]"),
        ("comparison", "return total if total != 3 or first >= 0 else values[-1]"),
        ("sign", "return total if total == -3 or first >= 0 else values[-1]"),
        ("comparison", "return total if total == 3 or first > 0 else values[-1]"),
        ("sign", "return total if total == 3 or first >= -0 else values[-1]"),
        ("sign", "return total if total == 3 or first >= 0 else values[--1]"),
    ]
    assert sorted(changed) == sorted(ends)


def test_a_mutation_without_effect_is_not_picked(mutate: ModuleType) -> None:
    """Minus zero is zero; the same code in another line is the same."""
    without = [found.new.strip() for found in mutate.candidates(Path("pick.py"), SOURCE) if not mutate.changes_code(found, SOURCE)]
    assert without == ["if first < -0 and values is not None:", "return total if total == 3 or first >= -0 else values[-1]"]
    assert mutate.code_of("x = 1") == mutate.code_of("\n\nx   = 1")
    assert mutate.code_of("x = 0.0") != mutate.code_of("x = -0.0")


def test_a_seed_picks_the_same_mutations(mutate: ModuleType) -> None:
    """As many of each kind, each of which compiles and changes one line; none is of a kernel for a GPU, and each has tests."""
    picked = mutate.pick(3, 30)
    assert picked == mutate.pick(3, 30)
    assert picked != mutate.pick(4, 30)
    assert [mutation.kind for mutation in picked] == [*mutate.KINDS] * 10
    for mutation in picked:
        source = (mutate.ROOT / mutation.path).read_text(encoding="utf-8")
        mutated = mutation.apply(source)
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
        assert sum(line != other for line, other in zip(source.split("\n"), mutated.split("\n"), strict=True)) == 1
        assert not mutation.path.name.startswith("triton_")
        assert (mutate.ROOT / mutate.tests_of(mutation.path)).exists()
