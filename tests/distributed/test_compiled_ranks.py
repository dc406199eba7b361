"""Compiled models on two ranks: as many compilations and runs with a monitor as without, and the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.compiled_runs import SCENARIOS, compared
from helpers.launch import finish, results, start

pytestmark = pytest.mark.xdist_group("compiled_ranks")  # one worker makes what they share

SCRIPT = Path(__file__).with_name("compiled_runs.py")
EXPECTED_KEYS = {
    "parameters": ("gradient/model.blocks.0.fc.weight/norm",),
    "blocks": (
        "activation/model.blocks.0/mean",
        "activation_gradient/model.blocks.1/mean",
        "optimizer_state/model.head.weight.exp_avg/norm",
    ),
    "Fabric": (
        "activation/body.blocks.0/norm",
        "activation_gradient/body.blocks.1/norm",
        "activation/head/norm",
        "gradient/head.weight/norm",
    ),
}


def assert_same(plain: dict[str, Any], monitored: dict[str, Any], expected: tuple[str, ...]) -> None:
    """Compilations, runs, losses and weights are the same; what is outside has values, and nothing else of the modules has."""
    assert monitored["counts"] == plain["counts"]
    assert all(torch.equal(loss, other) for loss, other in zip(plain["losses"], monitored["losses"], strict=True))
    assert all(torch.equal(monitored["weights"][name], value) for name, value in plain["weights"].items())
    # In a loop of one's own DDP's wrapper has a name.
    assert set(expected) <= {key.replace(".module", "") for key in monitored["values"]}
    assert not any(key.startswith("activation") and ".fc/" in key for key in monitored["values"])


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has counted and trained."""
    folder = tmp_path_factory.mktemp("compiled")
    messages = finish(start(SCRIPT, 2, folder))
    try:
        return results(folder, "compiled", 2)
    except FileNotFoundError:
        pytest.fail("\n\n".join(messages)[-6000:])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_as_many_compilations_and_runs_on_two_ranks(name: str, on_two_ranks: list[dict[str, Any]]) -> None:
    """Compiled before and after the strategy has wrapped the model: in a fit, a second one and a resumed one."""
    has_outputs = "blocks" in name or "FSDP2" in name
    for by_options in (rank_results[name] for rank_results in on_two_ranks):
        assert isinstance(by_options, dict), by_options
        plain = by_options.pop("")
        counts = plain["counts"]
        assert (counts[0] if isinstance(counts[0], tuple) else counts)[0] >= 1
        for which, monitored in by_options.items():
            outside = "Fabric" if "Fabric" in name else "blocks" if has_outputs and which == "everything" else "parameters"
            assert_same(plain, monitored, EXPECTED_KEYS[outside])


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not")
@pytest.mark.parametrize("name", ["Fabric, compiled before", "Fabric, compiled after"])
def test_as_many_compilations_and_runs_in_a_loop_with_fabric(name: str, tmp_path: Path) -> None:
    """In one process."""
    assert_same(*compared(name, tmp_path, "default rules").values(), EXPECTED_KEYS["Fabric"])
