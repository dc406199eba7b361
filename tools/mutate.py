"""Check the tests: change random lines of the package in a copy, and print which test fails, or that the mutation lives.

python tools/mutate.py --seed 1 --count 20 --only 3 7 --own-tests --workers 2
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = Path("src", "lightning_module_monitor")
OPPOSITES = (("+", "-"), ("<", "<="), (">", ">="), ("==", "!="), ("is", "is not"), ("and", "or"))
REPLACED = {old: new for pair in OPPOSITES for old, new in (pair, pair[::-1])}
OPERATOR = re.compile(r"==|!=|<=|>=|[<>+-]|\b(?:is not|is|and|or)\b")
LOGGING = ("debug", "info", "warning", "error", "exception")
REMOVABLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Delete, ast.Continue, ast.Break)
KEPT = ("'", '"', "...", "__all__")  # how statements begin that are not removed
KINDS = ("sign", "comparison", "removed")
LIMIT_S = 1800.0  # a run of tests that takes longer hangs


class Mutation(NamedTuple):
    """A line of a file, and what replaces it."""

    path: Path
    line: int
    kind: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """The source with the mutation."""
        lines = source.split("\n")
        return "\n".join([*lines[: self.line - 1], self.new, *lines[self.line :]])


def visited(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those inside, without annotations, messages, and f-strings, of which Python 3.10 has no positions."""
    is_message = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and getattr(node.value.func, "attr", "") in LOGGING
    if is_message or isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns") and not isinstance(node, ast.Raise):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visited(child)


def operands(node: ast.AST) -> list[ast.expr]:
    """The operands that have an operator between them which has an opposite."""
    if isinstance(node, ast.Compare | ast.BoolOp):
        return [node.left, *node.comparators] if isinstance(node, ast.Compare) else node.values
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
        return [node.left, node.right] if isinstance(node, ast.BinOp) else [node.target, node.value]
    return []


def candidates(path: Path, source: str) -> Iterator[Mutation]:
    """Flipped signs, changed comparisons, and removed statements of a file."""
    lines = source.encode().split(b"\n")

    def mutation(kind: str, number: int, start: int, end: int, new: bytes) -> Mutation:
        line = lines[number - 1]
        return Mutation(path, number, kind, line.decode(), (line[:start] + new + line[end:]).decode())

    for node in visited(ast.parse(source)):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield mutation("sign", node.lineno, node.col_offset, node.col_offset, b"-")
        for left, right in pairwise(operands(node)):
            start = left.end_col_offset or 0
            found = OPERATOR.search(lines[right.lineno - 1][start : right.col_offset].decode()) if left.end_lineno == right.lineno else None
            if found is not None:
                kind = "sign" if found[0] in "+-" else "comparison"
                yield mutation(kind, right.lineno, start + found.start(), start + found.end(), REPLACED[found[0]].encode())
        if isinstance(node, REMOVABLE) and node.lineno == node.end_lineno and not ast.unparse(node).startswith(KEPT):
            yield mutation("removed", node.lineno, node.col_offset, node.end_col_offset or 0, b"pass")


def code_of(source: str) -> CodeType:
    """The code of a file, without its positions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno = node.end_lineno = 1
            node.col_offset = node.end_col_offset = 0
    return compile(ast.fix_missing_locations(tree), "", "exec", dont_inherit=True)


def changes_code(mutation: Mutation, source: str) -> bool:
    """Whether the file compiles with a mutation, and to another code."""
    try:
        return code_of(mutation.apply(source)) != code_of(source)
    except SyntaxError:
        return False


def pick(seed: int, count: int) -> list[Mutation]:
    """As many mutations of each kind, the same for one seed; those of kernels for a GPU are left out."""
    paths = [path for path in sorted((ROOT / PACKAGE).rglob("*.py")) if not path.name.startswith("triton_")]
    sources = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}
    everything = [mutation for path, source in sources.items() for mutation in candidates(path, source)]
    random.Random(seed).shuffle(everything)
    by_kind = {kind: iter([mutation for mutation in everything if mutation.kind == kind]) for kind in KINDS}
    chosen: list[Mutation] = []
    while len(chosen) < count:
        mutation = next(by_kind[KINDS[len(chosen) % len(KINDS)]])
        if changes_code(mutation, sources[mutation.path]):
            chosen.append(mutation)
    return chosen


def tests_of(path: Path) -> Path:
    """The tests of a file's package."""
    names = (f"test_{path.stem}.py", path.relative_to(PACKAGE).parts[0], "engine")
    return next(Path("tests", name) for name in names if (ROOT / "tests" / name).exists())


def run_tests(copy: Path, arguments: list[str]) -> str | None:
    """Run tests in a copy until one fails; its name, or ``None`` if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *arguments]
    variables = os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=copy, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "it hangs"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return failed[1] if failed else None if process.returncode in (0, 5) else "pytest itself"


def judge(mutation: Mutation, copies: queue.Queue[Path], *, own_tests: bool) -> str:
    """The first test that fails with a mutation, or ``LIVES``."""
    copy, first = copies.get(), tests_of(mutation.path).as_posix()
    source = (copy / mutation.path).read_text(encoding="utf-8")
    try:
        (copy / mutation.path).write_text(mutation.apply(source), encoding="utf-8")
        failed = run_tests(copy, [first])
        if failed is None and not own_tests:
            failed = run_tests(copy, ["tests", f"--ignore={first}", "-m", "not slow"])
    finally:
        (copy / mutation.path).write_text(source, encoding="utf-8")
        copies.put(copy)
    return failed or "LIVES"


def copied(folder: Path) -> Path:
    """A copy of the repository in a folder, which Python imports there."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv*", ".*_cache", "build", "dist"))
    command = [sys.executable, "-c", "import lightning_module_monitor as package; print(package.__file__)"]
    variables = os.environ | {"PYTHONPATH": str(folder / "src")}
    imported = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=True).stdout
    if not Path(imported.strip()).is_relative_to(folder):
        raise SystemExit(f"{imported.strip()} would be tested, and not the copy in {folder}.")
    return folder


def main() -> None:
    """Pick mutations, test each in a copy, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--seed", 0), ("--count", 20), ("--workers", 1)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--only", type=int, nargs="+", help="indices of mutations in the table")
    parser.add_argument("--own-tests", action="store_true", help="run the tests of the package alone")
    options = parser.parse_args()
    chosen = [entry for entry in enumerate(pick(options.seed, options.count)) if options.only is None or entry[0] in options.only]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored, and tests that interrupt would fail
    copies: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        for number in range(options.workers):
            copies.put(copied(Path(folder, str(number)).resolve()))
        test = partial(judge, copies=copies, own_tests=options.own_tests)
        print("| | file | line | kind | old | new | caught by |\n|---|---|---|---|---|---|---|")
        for (index, found), failed in zip(chosen, pool.map(test, [found for _, found in chosen]), strict=True):
            old, new = (line.strip().replace("|", "\\|") for line in (found.old, found.new))
            place = f"{found.path.relative_to(PACKAGE).as_posix()} | {found.line} | {found.kind}"
            print(f"| {index} | {place} | `{old}` | `{new}` | {failed} |", flush=True)


if __name__ == "__main__":
    main()
