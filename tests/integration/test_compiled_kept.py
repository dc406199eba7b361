"""Models under torch.compile with ``compiled: keep``: as many compilations and runs as without the callback, and the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.compiling import WAYS, WITHOUT_OUTSIDE, CountingBackend, compiled, plain_state
from helpers.tiny import KeepRecords
from helpers.training import KeepLosses, loader, seed, trainer
from lightning.pytorch import Callback
from torch import Tensor

from lightning_module_monitor import ModuleMonitorCallback, Record, Rule

# Importing torch's compiler calls what torch 2.13 has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
    # Its tracer reads the gradient of the input of a compiled block.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

OF_PARAMETERS = ["parameter", "gradient", "update"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Run(NamedTuple):
    counts: list[tuple[int, int]]
    """Compilations and runs after the first fit, the second one, and the resumed one."""
    losses: list[Tensor]
    random_states: list[Any]
    weights: dict[str, Tensor]
    records: list[Record]
    callback: ModuleMonitorCallback | None


def run(how: str, folder: Path, options: dict[str, Any] | None, *, fullgraph: bool = False, **of_trainer: Any) -> Run:
    """Two fits of six steps with loops of validation, and a third one from the first one's checkpoint; ``options`` are the callback's."""
    torch._dynamo.reset()
    backend, counts, losses = CountingBackend(), [], KeepLosses()
    seed()
    module, given = compiled(how, backend, fullgraph=fullgraph)
    callback = None if options is None else ModuleMonitorCallback(**({"every_n_steps": 2, "on_error": "raise", "store": False} | options))
    records = None if callback is None else KeepRecords(callback)
    callbacks: list[Callback] = [losses] if callback is None or records is None else [callback, records, losses]
    limits: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1, "num_sanity_val_steps": 1} | of_trainer
    for number, resumed in enumerate((None, None, folder / "0.ckpt")):
        fit = trainer(folder, callbacks, **(limits | ({"max_epochs": 3} if resumed else {})))
        fit.fit(given, loader(), loader(8), ckpt_path=resumed, weights_only=False)
        fit.save_checkpoint(folder / f"{number}.ckpt")
        counts.append(backend.counts)
    return Run(counts, losses.losses, losses.random_states, plain_state(module), [] if records is None else records.records, callback)


def everything(how: str) -> dict[str, Any]:
    """Every option that has something outside of the compiled code."""
    rules = [{"kinds": OF_PARAMETERS, "statistics": ["norm", "hist"]}, {"kinds": "parameter_difference", "statistics": "ratio"}]
    common = {"health": {"nonfinite": "always"}, "stages": ["train", "validate"], "reference": "init", "store": True}
    if how in WITHOUT_OUTSIDE:
        return {**common, "rules": rules}
    kinds = ["activation", "activation_gradient", "activation_difference"]
    flow = ["model.blocks.0", "model.blocks.1"] if how.startswith("blocks") else ["model.stem", "model.head"]
    return {
        **common,
        "rules": [*rules, {"kinds": kinds, "statistics": ["mean", "hist"]}, {"kinds": "activation_difference", "statistics": "ratio"}],
        # A mode of torch's is on in the module that calls the function.
        "attention": how != "a function around the model",
        "rcc": True,
        "gradient_flow": {"blocks": flow},
        "capture": {"sites": "model.head", "steps": [0, 2], "kinds": ["activation", "gradient"]},
    }


@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
@pytest.mark.parametrize("which", ["default rules", "parameters only", "everything"])
@pytest.mark.parametrize("how", WAYS)
def test_as_many_compilations_and_runs_as_without_the_callback(how: str, which: str, fullgraph: bool, tmp_path: Path) -> None:
    """In every way: over monitored and other steps, loops of validation, a second fit and a resumed one; and training is the same."""
    options: dict[str, dict[str, Any]] = {
        "default rules": {},
        "parameters only": {"rules": [Rule(kinds=OF_PARAMETERS, statistics="norm")]},
        "everything": everything(how),
    }
    plain = run(how, tmp_path, None, fullgraph=fullgraph)
    monitored = run(how, tmp_path, options[which], fullgraph=fullgraph)
    assert plain.counts[0][0] >= 1
    assert monitored.counts == plain.counts
    assert all(torch.equal(one, other) for one, other in zip(plain.losses, monitored.losses, strict=True))
    assert monitored.random_states == plain.random_states
    assert all(torch.equal(monitored.weights[name], value) for name, value in plain.weights.items())
    recorded = [record.step for record in monitored.records if "gradient/model.head.weight/norm" in record.values]
    assert recorded[:3] == [0, 2, 4]
