"""The package's root: its names, and what it costs to import."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_module_monitor as package


@pytest.mark.parametrize("name", package.__all__)
def test_every_public_name_comes_from_its_home(name: str) -> None:
    """The root has what the home has, and lists it."""
    home = importlib.import_module(f"{package.__name__}.{package._HOME_BY_NAME[name]}")
    assert getattr(package, name) is getattr(home, name)
    assert name in dir(package)


def test_what_it_does_not_have_is_an_attribute_error() -> None:
    """As of any module."""
    assert set(package._HOME_BY_NAME) == {*package.__all__}
    with pytest.raises(AttributeError, match="has no attribute 'load_stores'"):
        _ = package.load_stores


def test_who_reads_a_store_does_not_wait_for_torch() -> None:
    """Neither torch nor Lightning is imported, by the reader nor by the command line's help."""
    program = (
        "import contextlib, sys; from lightning_module_monitor import cli, load_store\n"
        "with contextlib.suppress(SystemExit): cli.main(['--help'])\n"
        "print([name for name in ('torch', 'lightning', 'pandas', 'plotly') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_that_of_the_metadata() -> None:
    """In Python and on the command line, which is also a module to run."""
    version = importlib.metadata.version("lightning-module-monitor")
    assert package.__version__ == version
    for program in (["-m", "lightning_module_monitor"], ["-c", "from lightning_module_monitor.cli import main; main()"]):
        done = subprocess.run([sys.executable, *program, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"lightning-module-monitor {version}\n"


def test_the_lowest_versions_are_those_of_pyproject() -> None:
    """``make test-lowest`` pins every lower bound of the dependencies and of the extra ``test-core``, which names other extras."""
    root = Path(__file__).parents[1]
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    [named] = re.findall(r"lightning-module-monitor\[(.*?)\]", extras["test-core"][0])
    needed = [*project["dependencies"], *extras["test-core"][1:], *(one for name in named.split(",") for one in extras[name])]
    bounds = dict(re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)", one).groups() for one in needed)
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (root / "constraints-lowest.txt").read_text(), re.MULTILINE))
    assert len(bounds) > 20
    assert {name: pins.get(name) for name in bounds} == bounds


def test_a_dependency_is_imported() -> None:
    """A dependency that no file imports would be installed for nothing."""
    root = Path(__file__).parents[1]
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    dependencies = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[\[>=]", dependency)[0].replace("-", "_") for dependency in dependencies}
    sources = "\n".join(path.read_text() for path in (root / "src").rglob("*.py"))
    assert len(names) > 5
    assert names == {name for name in names if re.search(rf"^\s*(from|import) {name}\b", sources, re.MULTILINE)}


def test_a_dependency_has_its_reason_and_no_upper_bound() -> None:
    """In a comment beside it; also the extras for users. An upper bound would keep users from what they need."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    dependencies = text.partition("\ndependencies = [\n")[2].partition("\n]")[0].splitlines()
    extras = [line for line in text.splitlines() if re.match(r"(fast|cli|pandas|plot|parquet|report|xarray) = ", line)]
    assert (len(dependencies), len(extras)) == (7, 7)
    for line in (*dependencies, *extras):
        assert re.search(r'["\]],? # \w', line), f"{line}: expected its reason in a comment"
        assert not re.search(r"[<=~]=?\d", line.replace(">=", "")), f"{line}: expected no upper bound"


PRIVATE_NAMES = {
    ("model/compiled.py", "torch._dynamo"): "whether the compiler was imported, how often it compiled, and when it compiles",
    ("model/hooks.py", "torch.jit._trace"): "torch.jit.trace also runs a module outside of its tracing, to check the trace",
    ("model/hooks.py", "torch._C._current_graph_task_id"): "which backward pass runs: a forward pass within it is a recomputation",
    ("model/hooks.py", "torch.utils._python_dispatch"): "whether a dispatch mode is active, under which nothing is observed",
    ("model/hooks.py", "torch._C._functorch.get_interpreter_stack"): "whether a transform of torch.func is active, as above",
    (
        "model/unchanged.py",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ): "the base of dispatch modes, which torch documents here alone",
    ("probes/attention.py", "torch.overrides._get_current_function_mode_stack"): "the place of a mode among those of the model",
    ("probes/rcc_terms.py", "torch._C.DisableTorchFunction"): "modes of torch functions run code of others",
    ("trainer/facts_reader.py", "torch.nn.modules.dropout._DropoutNd"): "the base of all dropout layers",
    ("trainer/reference_controller.py", "torch.distributed.fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2"): "a strategy that users can pass",
}
"""The private names of torch that the package uses, each with its reason: torch may change them in any version."""


class PrivateNames(ast.NodeVisitor):
    """Collects the private names of torch in a file: imports, attributes, and modules in strings; operators are none."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._full_names: dict[str, str] = {}

    def add(self, name: str) -> None:
        if name.startswith("torch.") and re.search(r"\._(?!_)", name) and not name.startswith("torch.ops."):
            self.found.add(name)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._full_names[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else alias.name.partition(".")[0]
            self.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._full_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            self.add(f"{node.module}.{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names, value = [node.attr], node.value
        while isinstance(value, ast.Attribute):
            names.append(value.attr)
            value = value.value
        root = self._full_names.get(value.id, "") if isinstance(value, ast.Name) else ""
        if root not in self.found:  # what a private name has is counted with it
            self.add(".".join((root, *reversed(names))))
        self.visit(value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and re.fullmatch(r"torch(\.\w+)+", node.value):
            self.add(node.value)


def test_private_names_of_torch_are_few_and_have_a_reason() -> None:
    """A new one replaces another, or is done without."""
    root, found = Path(package.__file__).parent, set()
    for path in root.rglob("*.py"):
        names = PrivateNames()
        names.visit(ast.parse(path.read_text()))
        found |= {(path.relative_to(root).as_posix(), name) for name in names.found}
    assert found == PRIVATE_NAMES.keys()
    assert len(found) <= 12
