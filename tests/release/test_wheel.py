"""The wheel by itself: in this environment, or by ``make test-wheel`` in one that has nothing but the wheel and what it asks for."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from helpers.documents import ROOT
from helpers.releases import run

PACKAGE = "lightning_module_monitor"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("release")]  # one worker makes what they share
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
OF_EXTRAS = (
    *("numba", "jsonargparse", "pandas", "pyarrow", "matplotlib", "jinja2", "plotly", "rich", "xarray", "h5netcdf"),
    *("sklearn", "tensorboard"),
)
"""What extras install; a program without extras must not find it."""

WITHOUT_EXTRAS = """
import contextlib, io, sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

imported = [name for name in sys.modules if name.partition(".")[0] in {absent}]
sys.modules.update(dict.fromkeys([*imported, *{absent}]))  # as if they were not installed, for what is imported from here on

import lightning_module_monitor as package
from lightning_module_monitor import ModuleMonitorCallback, load_store
from lightning_module_monitor.cli import main


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


for name in package.__all__:
    getattr(package, name)
torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(3, (64,))), batch_size=8)
flow, capture = dict(blocks=["model.0", "model.2"]), dict(sites="model.0", steps=[0])
callback = ModuleMonitorCallback(every_n_steps=2, module="model", rcc=True, gradient_flow=flow, capture=capture)
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
Trainer(max_epochs=2, callbacks=[callback], **options).fit(Net(), data)
callback.diagnose()
path = callback.store_path
store = load_store(path)
steps, norms = store.series("gradient/_root_/norm")
assert steps.tolist() == [*range(0, 16, 2)] and (norms > 0).all()
assert (store.series("rcc_effective_update/model.2/rms")[1][1:] > 0).all()
for command in (["keys", path], ["info"], ["repair", path], ["summary", "--json", path], ["summary", "--markdown", path]):
    assert main(command) == 0, command


def message_of(call):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            call()
        except (ImportError, ValueError) as error:
            return str(error)
    return errors.getvalue()


needed = [
    ("report", lambda: main(["report", path])),
    ("report", lambda: main(["summary", path])),
    ("report", lambda: ModuleMonitorCallback(report=True).monitor),
    ("pandas", lambda: main(["export", path])),
    ("pandas", lambda: store.to_frame()),
    ("xarray", lambda: store.to_xarray("gradient")),
    ("plot", lambda: store.plot.series("context/loss")),
]
for extra, call in needed:
    assert f"pip install 'lightning-module-monitor[{{extra}}]'" in message_of(call), (extra, message_of(call))
print("everything works without extras")
"""

FULLY_SHARD = """
try:
    from torch.distributed.fsdp import fully_shard
except ImportError as error:
    print(error)
"""

USER = """
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_module_monitor import STATISTICS, Finding, ModuleMonitor, ModuleMonitorCallback, Need, Rule, Statistic, load_store


def entropy(x: Tensor) -> Tensor:
    p = x.softmax(-1)
    return -(p * p.log()).sum(-1).mean()


rules = [Rule(kinds="activation", functions={"entropy": entropy})]
callback = ModuleMonitorCallback(every_n_steps=10, rules=rules, health={"watch": "all"})
found: list[Finding] = callback.findings
STATISTICS["range"] = Statistic(Need.EXTREMES, lambda moments: moments.maximum - moments.minimum)
monitor = ModuleMonitor("log", rules=Rule(kinds="gradient", statistics="norm"))
monitor.set_module(nn.Linear(2, 3))


def norms(path: Path) -> NDArray[np.float64]:
    steps, values = load_store(path).series("gradient/_root_/norm")
    return values
"""


def has(python: Path, *modules: str) -> bool:
    """Whether the environment has all of some modules."""
    program = f"import importlib.util; print(all(map(importlib.util.find_spec, {modules!r})))"
    return run([str(python), "-c", program], python.parent).strip() == "True"


in_own_environment = pytest.mark.skipif(
    "WHEEL_PYTHON" not in os.environ, reason="make test-wheel runs it with the wheel; others run the sources"
)


def needs_extras(python: Path) -> None:
    """Skip a test where the wheel alone is installed; ``make test-wheel`` installs the extras after the tests without them."""
    if not has(python, *OF_EXTRAS):
        pytest.skip("this environment has the wheel without extras")


def test_the_wheel_works_without_the_source_tree(python: Path, tmp_path: Path) -> None:
    """The package is that of the environment, with its version, and its command is there."""
    program = f"import {PACKAGE}; print({PACKAGE}.__file__); print({PACKAGE}.__version__)"
    file, version = run([str(python), "-c", program], tmp_path).splitlines()
    assert Path(file).is_relative_to(python.parents[1])
    assert run([str(python.with_name("lightning-module-monitor")), "--version"], tmp_path).split() == ["lightning-module-monitor", version]


def test_everything_works_without_extras_or_names_the_one_it_needs(python: Path, tmp_path: Path) -> None:
    """A training with all that the callback records, the reader and the commands; torch's operations measure."""
    (tmp_path / "program.py").write_text(WITHOUT_EXTRAS.format(absent=OF_EXTRAS))
    assert run([str(python), "program.py"], tmp_path, **ONE_THREAD).splitlines()[-1] == "everything works without extras"


def test_the_self_check_of_the_environment_passes(python: Path, tmp_path: Path) -> None:
    """With its versions, which are of this environment."""
    content = json.loads(run([str(python), "-m", PACKAGE, "info", "--json"], tmp_path, **ONE_THREAD))
    assert [check["error"] for check in content["checks"]] == [None] * len(content["checks"])
    assert content["python"] == run([str(python), "-c", "import platform; print(platform.python_version())"], tmp_path).strip()


@in_own_environment
def test_types_of_the_wheel_are_checked_in_a_program_of_a_user(python: Path, tmp_path: Path) -> None:
    """By mypy --strict, which finds them by ``py.typed``; a wrong type is an error."""
    (tmp_path / "program.py").write_text(USER)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "--cache-dir", "cache", "program.py"]
    assert run(mypy, tmp_path).startswith("Success")
    (tmp_path / "program.py").write_text(USER + 'callback.store_path + 1\nRule(kinds="activation", sites=3)\n')
    errors = run(mypy, tmp_path, status=1)
    assert re.search(r"Unsupported (left )?operand", errors)
    assert 'Argument "sites" to "Rule"' in errors


@in_own_environment
@pytest.mark.parametrize(
    "command",
    [
        "char_gpt.py --max_steps 3 --every_n_steps 2 --layers 1 --width 32 --heads 2 --context 32 --megabytes 0.1",
        "plain_loop.py --max_steps 21 --every_n_steps 20",
        "without_trainer.py --max_steps 40",
        "fabric_loop.py --max_epochs 1 --every_n_steps 10",
        "gan.py --max_epochs 1 --every_n_steps 7",
        "lora.py --max_epochs 1",
        "coordinate_check.py --output check/curves.png",
    ],
)
def test_an_example_runs(command: str, python: Path, tmp_path: Path) -> None:
    """Outside of the source tree; ``tests/documents/test_examples.py`` reads what they print and store."""
    needs_extras(python)
    program, *arguments = shlex.split(command)
    if program == "fabric_loop.py" and "cannot import" in run([str(python), "-c", FULLY_SHARD], tmp_path):
        pytest.skip("fabric_loop.py needs torch 2.6, which has fully_shard")
    shutil.copy(ROOT / "examples" / program, tmp_path)
    assert run([str(python), program, *arguments], tmp_path, **ONE_THREAD)


def test_the_demo_runs_and_every_command_reads_its_store(python: Path, tmp_path: Path) -> None:
    """What ``make demo`` runs, and then the commands."""
    needs_extras(python)
    for folder in ("examples", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    target = run(["make", "--dry-run", "demo"], ROOT)
    [command] = [shlex.split(line) for line in target.splitlines() if "examples/digits.py" in line]
    printed = run([str(python), *command[1:]], tmp_path, **ONE_THREAD)
    assert float(printed.partition("validation accuracy: ")[2].split()[0]) > 0.9
    [store] = map(str, tmp_path.rglob("monitor.h5"))
    monitor = str(python.with_name("lightning-module-monitor"))
    assert "healthy" in run([monitor, "summary", store], tmp_path).splitlines()[-1]
    assert "gradient/model.head.weight/norm" in run([monitor, "keys", store], tmp_path)
    for arguments in (
        ["report", store, "-o", "page.html"],
        ["compare", store, store, "-o", "pages.html"],
        ["export", store, "--format", "parquet"],
    ):
        run([monitor, *arguments], tmp_path)
    assert (tmp_path / "page.html").stat().st_size > 100_000
    run([str(python), "examples/plot_store.py", store, "--output", "figure.png"], tmp_path)
