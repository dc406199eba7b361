"""Print how large the package is: lines, modules, files, classes and functions. Nothing depends on the figures."""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "lightning_module_monitor"
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
FILLERS = ("one", "place", "found", "own", "given")


def num_lines(path: Path) -> int:
    """Lines of a file, empty ones included."""
    return len(path.read_text(encoding="utf-8").splitlines())


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Lines of a function's body without its docstring, comments and empty lines."""
    first = function.body[1] if ast.get_docstring(function) is not None and len(function.body) > 1 else function.body[0]
    body = lines[first.lineno - 1 : function.end_lineno]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in body)


def nodes(paths: list[Path]) -> Iterator[tuple[Path, ast.AST]]:
    """Every node of every file."""
    for path in paths:
        yield from ((path, node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def names(paths: list[Path]) -> Iterator[str]:
    """Every use of a variable and every argument, by name."""
    for _, node in nodes(paths):
        if isinstance(node, ast.Name | ast.arg):
            yield node.id if isinstance(node, ast.Name) else node.arg


def main() -> None:
    """Print the figures, and the largest files and classes."""
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    python = [path for path in files if path.suffix == ".py"]
    modules = [path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"]
    bodies = [code_lines(node, path.read_text(encoding="utf-8").splitlines()) for path, node in nodes(python) if isinstance(node, Function)]
    methods = {
        f"{path.relative_to(PACKAGE)}:{node.name}": sum(isinstance(child, Function) for child in node.body)
        for path, node in nodes(python)
        if isinstance(node, ast.ClassDef)
    }
    print(f"lines under src: {sum(map(num_lines, files))}, of Python: {sum(map(num_lines, python))} in {len(python)} files")
    print(f"modules at the top: {len(modules)} ({', '.join(sorted(modules))})")
    print(f"functions: {len(bodies)}, code lines: median {statistics.median(bodies):g}, largest {max(bodies)}")
    print("largest files: " + ", ".join(f"{path.relative_to(PACKAGE)} {num_lines(path)}" for path in sorted(python, key=num_lines)[:-6:-1]))
    print("classes with most methods: " + ", ".join(f"{name} {methods[name]}" for name in sorted(methods, key=methods.__getitem__)[:-6:-1]))
    counts = Counter(names(python))
    print("names that say nothing: " + ", ".join(f"{name} {counts[name]}" for name in FILLERS))
    for folder in sorted(path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"):
        print(f"{folder.name:14s} {sum(num_lines(path) for path in files if folder in path.parents):6d}")


if __name__ == "__main__":
    main()
