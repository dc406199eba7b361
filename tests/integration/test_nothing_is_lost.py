"""No value of a run is lost without a message."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.attention import truth
from helpers.lightning_package import LOGGER, Callback
from helpers.tiny import KeepRecords
from helpers.training import Classifier, loader, trainer
from helpers.zoo import make
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_module_monitor import ModuleMonitorCallback, Rule, monitor_scaled_dot_product_attention
from lightning_module_monitor.monitor import monitor_of


def first_record(net: nn.Module, root: Path, **options: Any) -> dict[str, float]:
    """The values of the first of two monitored training steps."""
    callback = ModuleMonitorCallback(1, store=False, **options)
    records = KeepRecords(callback)
    trainer(root, [callback, records], max_steps=2, logger=False).fit(Classifier(net), loader(), loader(8))
    assert len(records.records) == 2
    return dict(records.records[0].values)


@pytest.mark.parametrize("options", [{"attention": True}, {"health": {"watch": "all"}}], ids=str)
def test_a_module_of_generated_code_is_monitored(options: dict[str, Any], tmp_path: Path) -> None:
    """The forward of a ``torch.fx`` graph module names no Python module. Its attention is that of the plain model in float64."""
    x = next(iter(loader()))[0]
    plain = make("gpt")
    query, key, _value = plain.query_key_value(plain.embedding(x.unsqueeze(-1))).detach().unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    entropy = np.nanmean(truth(query, key, is_causal=True).attention_entropy, axis=(0, 2))
    values = first_record(torch.fx.symbolic_trace(make("gpt")), tmp_path, **options)
    if "attention" in options:
        found = [values[f"attention_entropy/model.head_{head}/mean"] for head in (0, 1)]
        assert found == pytest.approx(entropy.tolist(), rel=1e-5)
    embedded = plain.embedding(x.unsqueeze(-1)).detach().double()
    assert values["activation/model.embedding/rms"] == pytest.approx(embedded.pow(2).mean().sqrt().item(), rel=1e-6)
    assert values["monitor/errors"] == 0.0


class Attends(nn.Module):
    """Attention of one head over the six inputs, written out or by torch's function; neither if ``how`` is ``None``."""

    def __init__(self, how: str | None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(1, 8), nn.Linear(8, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x.unsqueeze(-1)).unsqueeze(1)
        if self.how == "eager":
            h = (h @ h.mT / math.sqrt(8)).softmax(-1) @ h
        elif self.how == "sdpa":
            h = F.scaled_dot_product_attention(h, h, h)
        elif self.how == "by hand":
            h = attended(self, h)
        y: Tensor = self.head(h.mean((1, 2)))
        return y


def attended(module: nn.Module, h: Tensor) -> Tensor:
    """Attention in plain operations, and reported."""
    output = (h @ h.mT / math.sqrt(8)).softmax(-1) @ h
    monitor = monitor_of(module)
    if monitor is not None and monitor.is_monitoring():
        monitor_scaled_dot_product_attention(monitor, module, h, h, h, activation=output)
    return output


ATTENTION = {"attention": True}
OF_HEADS = {"rules": [Rule(kinds=["activation", "attention_sink"], statistics="max", every_n_steps=[2, 3])]}
WATCHES = {"health": {"watch": "all"}}


@pytest.mark.parametrize(
    ("how", "options", "step"),
    [
        ("eager", ATTENTION, 0),
        ("eager", OF_HEADS, 2),
        (None, ATTENTION, 0),
        ("sdpa", ATTENTION, None),
        ("by hand", ATTENTION, None),
        ("eager", WATCHES, None),
    ],
    ids=str,
)
def test_attention_that_was_never_observed_is_reported(
    how: str | None, options: dict[str, Any], step: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One message after the first monitored step without it, with the remedy; none if only a built-in detector uses it."""
    num_reports: list[int] = []

    class Listens(Callback):
        def on_train_batch_end(self, *_args: Any) -> None:
            num_reports.append(sum("attention: step" in message for message in caplog.messages))

    callback = ModuleMonitorCallback(1, store=False, **options)
    trainer(tmp_path, [callback, Listens()], max_steps=4).fit(Classifier(Attends(how)), loader(), loader(8))
    assert num_reports == [int(step is not None and done >= step) for done in range(4)]
    if step is not None:
        (message,) = [message for message in caplog.messages if "attention: step" in message]
        assert message.startswith(f"attention: step {step} called none of F.scaled_dot_product_attention")
        assert 'attn_implementation="sdpa"' in message


def test_attention_that_pauses_is_not_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Values of the first step may be missing in a later step."""
    net = Attends("sdpa")

    class Pauses(Callback):
        def on_train_batch_end(self, *_args: Any) -> None:
            net.how = None

    trainer(tmp_path, [ModuleMonitorCallback(1, store=False, attention=True), Pauses()], max_steps=3).fit(
        Classifier(net), loader(), loader(8)
    )
    assert not [message for message in caplog.messages if "attention: step" in message]


class Loops(Classifier):
    """Computes attention in its training step only."""

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.model.how = None
        super().test_step(batch, batch_idx)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.model.how = None
        return super().predict_step(batch, batch_idx)


def median_fails(x: Tensor) -> Tensor:
    """A user function that fails."""
    raise ValueError("no median")


@pytest.mark.parametrize("how", [None, "sdpa"])
def test_a_message_comes_once_in_all_runs_of_a_model(how: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fit, test, predict and a second fit, by several Trainers, repeat only the message with the store's path; another model logs again."""
    rule = Rule(kinds=["activation", "update"], types=nn.Linear, functions={"median": median_fails})
    options: dict[str, Any] = {"attention": True, "rcc": True, "rules": [rule], "stages": ["train", "test", "predict"]}
    options |= {"callback_metrics": "own/.*", "alerts": [{"keys": "mine/.*", "above": 1.0}]}
    callback = ModuleMonitorCallback(1, **options)

    def run(model: Loops) -> None:
        caplog.clear()
        for loop in ("fit", "test", "predict", "fit"):
            validation = [loader(8)] if loop == "fit" else []
            getattr(trainer(tmp_path, [callback], max_steps=2), loop)(model, loader(), *validation)

    with caplog.at_level("INFO"):
        for number in range(2):
            run(Loops(Attends(how)))
            ours = [one.getMessage() for one in caplog.records if one.name == LOGGER]
            of_runs = ("Monitored values", "The store at", "[monitor]")  # files and findings are those of a run
            messages = [one for one in ours if not any(part in one for part in of_runs)]
            assert len(messages) == len({*messages}), messages
            assert sum("attention: step" in one for one in messages) == (how is None)
            assert sum("median failed with ValueError" in one for one in messages) == 2
            assert sum(one.startswith("Watching ") for one in messages) == 1
            waiting = [sum("Later records may have such keys" in one and key in one for one in messages) for key in ("own/", "mine/")]
            assert waiting == ([1, 1] if number == 0 else [0, 0])  # the options, which stay the same, are the cause
