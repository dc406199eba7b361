"""No value of a run is lost without a word: models whose values an earlier state of the callback lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.attention import truth
from helpers.tiny import KeepRecords
from helpers.training import Classifier, loader, trainer
from helpers.zoo import make
from torch import nn

from lightning_module_monitor import ModuleMonitorCallback


def first_record(net: nn.Module, root: Path, **options: object) -> dict[str, float]:
    """The values of the first of two monitored training steps."""
    callback = ModuleMonitorCallback(1, store=False, **options)  # type: ignore[arg-type]
    records = KeepRecords(callback)
    trainer(root, [callback, records], max_steps=2, logger=False).fit(Classifier(net), loader(), loader(8))
    assert len(records.records) == 2
    return dict(records.records[0].values)


@pytest.mark.parametrize("options", [{"attention": True}, {"health": {"watch": "all"}}], ids=str)
def test_a_module_of_generated_code_is_monitored(options: dict[str, object], tmp_path: Path) -> None:
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
