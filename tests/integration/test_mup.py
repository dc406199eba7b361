"""Networks of the package mup in a Trainer. mup sets attributes on parameters, which a copy of the network needs, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers.tiny import KeepRecords
from helpers.training import KeepLosses, seed, trainer
from helpers.widths import MicrosoftMlp
from torch import Tensor

from lightning_module_monitor import ModuleMonitorCallback, Rule

DIFFERENCES = Rule(kinds=["activation_difference", "parameter_difference"], statistics=["abs_max", "norm"])


def run(optimizer: Literal["sgd", "adam"], folder: Path, callbacks: list[Any]) -> tuple[KeepLosses, dict[str, Tensor]]:
    """Train for two steps; return the losses and the weights."""
    seed()
    live, keep = MicrosoftMlp(256, optimizer), KeepLosses()
    trainer(folder, [*callbacks, keep], max_steps=2).fit(live)
    return keep, live.state_dict()


@pytest.mark.parametrize("module", [None, "net"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_reference_of_a_network_of_mup(optimizer: Literal["sgd", "adam"], module: str | None, tmp_path: Path) -> None:
    """Differences from the reference are zero at step 0 and not later; training is bit-identical; the check skips no call."""
    callback = ModuleMonitorCallback(every_n_steps=1, rules=[DIFFERENCES], reference="init", rcc=True, module=module, on_error="raise")
    records = KeepRecords(callback)
    plain, weights = run(optimizer, tmp_path, [])
    monitored, monitored_weights = run(optimizer, tmp_path, [callback, records])
    first, second = (record.values for record in records.records)
    compared = [key for key in first if "_difference/" in key]
    assert len({key.split("/")[1] for key in compared if key.startswith("activation")}) >= 5
    assert {key: first[key] for key in compared if first[key] != 0.0} == {}
    assert second["activation_difference/net.4/norm"] > 0
    for kind in ("effective", "propagating"):
        assert first[f"rcc_{kind}_update/net.4/rms"] == 0
        assert second[f"rcc_{kind}_update/net.4/rms"] > 0
    assert second["monitor/errors"] == second["monitor/rcc_skipped_calls"] == 0
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, monitored.losses, strict=True))
    assert all(torch.equal(weights[key], monitored_weights[key]) for key in weights)


def test_the_readout_that_overflows_is_found(tmp_path: Path) -> None:
    """The search for the first non-finite value repeats the step on a copy of the network."""

    class Overflowing(MicrosoftMlp):
        def on_train_start(self) -> None:
            self.net[4].weight.data.fill_(1e38)

    seed()
    callback = ModuleMonitorCallback(every_n_steps=1, health={"nonfinite": "always"}, store=False, on_error="raise")
    trainer(tmp_path, [callback], max_steps=1).fit(Overflowing(256))
    [finding] = [finding for finding in callback.findings if finding.name == "nonfinite"]
    assert finding.site == "net.4"
