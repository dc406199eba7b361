"""Modules whose weights are trained without a call of the module itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.training import Classifier, KeepRawTensors, loader, seed, trainer
from helpers.zoo import ZOO
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitorCallback, load_store


class CallsForward(nn.Module):
    """Calls one layer, the forward of another, and a function with the weight of a third; a fourth does not run. A list has no forward.

    That of a fifth one is an attribute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Module()
        self.scale.weight = nn.Parameter(torch.ones(3))
        self.scale.forward = lambda x: x * self.scale.weight
        self.called, self.direct, self.read = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.unused, self.factors = nn.Linear(6, 6), nn.ParameterList([nn.Parameter(torch.ones(3))])

    def forward(self, x: Tensor) -> Tensor:
        return self.scale.forward(F.linear(self.direct.forward(self.called(x)).relu(), self.read.weight)) * self.factors[0]


def test_layers_without_an_observed_call_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line names them. Those that did not run have no gradients, and are not named; values of others are right."""
    seed()
    callback, raw = ModuleMonitorCallback(1), KeepRawTensors("model.called")
    trainer(tmp_path, [callback, raw], max_steps=3, limit_val_batches=0).fit(Classifier(CallsForward()), loader(), loader(8))
    assert [message for message in caplog.messages if "no call that hooks observe" in message] == [
        "model.scale, model.direct, model.read had gradients in step 0, but no call that hooks observe, so there are no values of the "
        "output. Call the module itself, and not its forward or another method."
    ]
    assert callback.store_path is not None
    store = load_store(callback.store_path)
    assert {key.split("/")[1] for key in store if key.startswith("activation/")} == {"model.called"}
    expected = [step["activation"][0].double().square().mean().sqrt().item() for step in raw.steps]
    assert store.series("activation/model.called/rms")[1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("model", sorted(ZOO))
def test_a_model_that_calls_its_modules_gets_no_such_line(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where ``nn.MultiheadAttention`` reads the weights of its output layer."""
    trainer(tmp_path, [ModuleMonitorCallback(1)], max_steps=2, limit_val_batches=0).fit(Classifier(model), loader(), loader(8))
    assert "no call that hooks observe" not in caplog.text
