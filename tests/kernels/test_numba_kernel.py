"""The compiled loops: their numbers, their cache, and what happens without them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from helpers.textbook import PLAIN
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_module_monitor import ModuleMonitor, Rule
from lightning_module_monitor.kernels import moments, numba_kernel, numba_loops
from lightning_module_monitor.kernels.moments import FIELDS_OF_NEED, Moments, Need
from lightning_module_monitor.kernels.table import MomentTable

LOOPS = "lightning_module_monitor.kernels.numba_loops"


def test_the_loops_numbers_are_those_of_moments_and_needs() -> None:
    """They stand in its file, so that a change of one is a change of the file, which numba's cache looks at."""
    fields = [getattr(numba_loops, name.upper()) for name in Moments._fields]
    assert fields == list(range(numba_loops.NUM_FIELDS)) == list(range(moments.NUM_FIELDS))
    assert numba_loops.NEED_SUMS == Need.MEAN | Need.DEVIATIONS | Need.MAGNITUDE | Need.POWERS
    assert numba_loops.NEED_SQUARES == Need.SQUARES
    assert numba_loops.NEED_ZEROS == Need.ZEROS
    assert numba_loops.NEED_COUNTS == Need.ZEROS | Need.NONFINITE
    assert numba_loops.NEED_ORDER == Need.EXTREMES | Need.ZEROS | Need.NONFINITE
    assert numba_loops.NEED_TOKENS == Need.TOKENS
    assert numba_loops.NEED_POWERS == Need.POWERS


def test_each_need_is_a_bit_of_its_own() -> None:
    """Everything is all of them but the rows of counts."""
    bits = [value for name, value in vars(Need).items() if name.isupper() and name not in ("NOTHING", "EVERYTHING", "COUNTS")]
    assert sorted(bits) == [1 << bit for bit in range(len(bits))]
    assert sum(bits) == Need.EVERYTHING | Need.COUNTS
    assert not Need.EVERYTHING & Need.COUNTS
    assert Need.COUNTS == Need.HISTOGRAM | Need.FINE_COUNTS


def test_a_compiled_merge_is_that_of_the_moments() -> None:
    """Two definitions of one formula, on numbers of all sizes, with empty rows and rows that are not finite."""
    generator = np.random.default_rng(0)
    rows = []
    for _row in range(40):
        row = generator.normal(size=moments.NUM_FIELDS) * 10.0 ** generator.integers(-3, 4)
        row[numba_loops.ELEMENTS] = generator.integers(1, 1000)
        row[numba_loops.MINIMUM] = row[numba_loops.MAXIMUM] - abs(row[numba_loops.MINIMUM])
        for field in (numba_loops.DEVIATIONS, numba_loops.FOURTH, numba_loops.SQUARES):
            row[field] = abs(row[field])
        rows.append(row)
    rows[3][[numba_loops.MAXIMUM, numba_loops.MINIMUM, numba_loops.MEAN]] = np.nan
    rows[5][numba_loops.MAXIMUM] = rows[5][numba_loops.MEAN] = np.inf
    nothing = np.array([float(field) for field in Moments.empty(1)])
    rows[7] = nothing.copy()
    for row, other in zip(rows, [*rows[1:], nothing], strict=True):
        actual = row.copy()
        numba_loops.merge(other, actual)
        pair = Moments(*torch.from_numpy(np.stack([row, other], axis=1)))
        expected = torch.stack(tuple(pair.merge(torch.zeros(2, dtype=torch.int64), 1)))[:, 0].numpy()
        scale = np.nan_to_num(np.abs(expected).max(), nan=1.0, posinf=1.0)
        is_finite = np.isfinite(expected)
        assert (np.isfinite(actual) == is_finite).all()
        np.testing.assert_allclose(actual[is_finite], expected[is_finite], rtol=1e-9, atol=1e-12 * scale)


class Operations(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "others"), [(torch.float32, set()), (torch.bfloat16, {"view"}), (torch.float16, {"_to_copy"})], ids=str)
def test_what_lies_in_order_is_read_where_it_lies(dtype: torch.dtype, others: set[str]) -> None:
    """No operation of torch copies float32 or bfloat16; float16 is widened by one."""
    tensor = torch.randn(50, 300).to(dtype)
    table = MomentTable()
    table.add((0,), tensor, Need.EVERYTHING)
    with Operations() as operations:
        table.add((0,), tensor, Need.EVERYTHING)
        table.add_all([0, 1], [tensor, tensor], [Need.EVERYTHING] * 2)
    assert set(operations.names) <= {"detach", "alias", "as_strided"} | others
    assert float(Moments(*table.collect(2)[0]).elements[0]) == 3 * tensor.numel()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The loops are looked for anew, before and after."""
    monkeypatch.delitem(sys.modules, LOOPS, raising=False)
    monkeypatch.delattr(sys.modules["lightning_module_monitor.kernels"], "numba_loops", raising=False)
    numba_kernel.loops.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    numba_kernel.loops.cache_clear()


def observed() -> dict[str, float]:
    """Values of one forward pass."""
    statistics = [name for name in PLAIN if name != "nonfinite_count"]
    x = torch.randn(33, 8, generator=torch.Generator().manual_seed(0))
    with ModuleMonitor(rules=[Rule(kinds=["activation", "parameter"], statistics=statistics)]) as monitor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 70))
        monitor.set_module(model)
        monitor.begin_step(0)
        model(x)
        monitor.monitor_parameters()
        record = monitor.end_step()
    assert record is not None
    return dict(record.values)


def assert_same(values: dict[str, float], others: dict[str, float]) -> None:
    """Numba makes it faster, and nothing else; sums in another order differ by less than float32 could tell."""
    assert values.keys() == others.keys()
    for key, value in values.items():
        assert value == pytest.approx(others[key], rel=1e-9, abs=1e-9), key


class Refuses:
    """An import system without a numba that goes with the installed numpy."""

    def find_spec(self, name: str, *_more: object) -> None:
        if name == "numba":
            raise ImportError("Numba needs NumPy 2.2 or less.")


class Broken:
    """A numba that does not work."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("cannot cache function '_sums': no locator available")


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("not installed", None),
        ("another numpy", "ImportError: Numba needs NumPy 2.2 or less."),
        ("cannot be compiled", "RuntimeError: cannot cache function '_sums': no locator available"),
        ("switched off", None),
    ],
)
def test_without_a_numba_that_works_the_values_are_the_same(
    state: str, error: str | None, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of numba is logged once, and nothing where it is not installed; ``NUMBA_DISABLE_JIT`` is set to debug other code."""
    with_numba = observed()
    assert numba_kernel.loops() is not None
    numba_kernel.loops.cache_clear()
    fresh.delitem(sys.modules, LOOPS)
    fresh.delattr(sys.modules["lightning_module_monitor.kernels"], "numba_loops")
    if state == "switched off":
        fresh.setattr(numba.config, "DISABLE_JIT", 1)
    elif state == "another numpy":
        for name in [name for name in sys.modules if name.partition(".")[0] == "numba"]:
            fresh.delitem(sys.modules, name)
        fresh.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    else:
        fresh.setitem(sys.modules, "numba", Broken() if error else None)  # type: ignore[arg-type]  # stands for a numba that does not work
    with caplog.at_level(logging.WARNING):
        values = observed(), observed()
    messages = [record.getMessage() for record in caplog.records]
    if state == "switched off":
        assert len(messages) <= 1
    else:
        assert messages == [f"The compiled kernel is not used ({error}); monitoring costs more without it."] * bool(error)
        assert numba_kernel.loops() is None
    for result in values:
        assert_same(result, with_numba)


SCRIPT = """
import logging
import sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
import torch
from lightning_module_monitor.kernels import numba_kernel
from lightning_module_monitor.kernels.moments import Moments, Need
from lightning_module_monitor.kernels.table import MomentTable
table = MomentTable()
table.add((0,), torch.arange(5.0), Need.EVERYTHING)
table.add((0,), torch.arange(5.0).bfloat16(), Need.EVERYTHING | Need.HISTOGRAM)
print("found", *(Moments(*sum(table.collect(1)))[field].item() for field in (0, 1, 5)), numba_kernel.loops() is not None)
"""


def run(cache: Path) -> str:
    """Another process, with numba's cache in a folder."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("state", ["damaged", "read-only", "a file"])
def test_a_cache_that_cannot_be_used_is_no_error(state: str, tmp_path: Path) -> None:
    """Damaged by a full disk, or a read-only installation, say: at most one warning, and the values are right."""
    cache = tmp_path / "cache"
    if state == "damaged":
        assert run(cache) == "found 10.0 2.0 60.0 True\n"
        files = [path for path in cache.rglob("*") if path.suffix in (".nbi", ".nbc")]
        assert len(files) > 5
        for index, path in enumerate(sorted(files)):
            content = path.read_bytes()
            path.write_bytes((content[: len(content) // 2], b"\x80garbage" * 50, b"")[index % 3])
    elif state == "read-only":
        cache.mkdir(mode=0o500)
    else:
        cache.write_text("")
    *messages, actual = run(cache).splitlines()
    assert actual.startswith("found 10.0 2.0 60.0 ")
    assert len(messages) <= 1
    assert not messages or messages[0].startswith("The compiled kernel is not used (")


def test_every_combination_of_needs_is_measured_as_everything_is() -> None:
    """A moment does not depend on which others are measured."""
    x = torch.randn(37, 130, generator=torch.Generator().manual_seed(0))
    x[0, :3] = 0
    everything = moments_of(x, Need.EVERYTHING)
    for needs in range(1, Need.EVERYTHING + 1):
        actual = moments_of(x, needs)
        for need, fields in FIELDS_OF_NEED.items():
            for field in fields if needs & need else ():
                expected = float(getattr(everything, field))
                assert float(getattr(actual, field)) == pytest.approx(expected, rel=1e-12, abs=1e-9), (field, f"{needs:b}")
        assert float(actual.elements) == x.numel()


def moments_of(tensor: Tensor, needs: int) -> Moments:
    """Of one tensor."""
    table = MomentTable()
    table.add((0,), tensor, needs)
    return Moments(*table.collect(1)[0])


@pytest.mark.slow
def test_compiling_is_logged_and_reading_the_cache_is_not(tmp_path: Path) -> None:
    """The first process compiles the loops, the second reads them from numba's cache, however long that takes."""
    program = """
import logging
logging.basicConfig(level=logging.INFO)
from lightning_module_monitor.kernels import numba_kernel
numba_kernel.NOTICEABLE_S = 0.0
assert numba_kernel.loops() is not None
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    logged = [
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True).stderr
        for _ in range(2)
    ]
    assert ["Compiled the kernel for CPU tensors" in text for text in logged] == [True, False]
