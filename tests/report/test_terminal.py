"""The verdict in a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.stores import write_store

from lightning_module_monitor.cli import main


def test_eighty_columns_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The evidence is under the name of the check, indented, and keys stay whole; the verdict is the last line."""
    monkeypatch.setenv("COLUMNS", "80")
    site = "model.encoder.layers.{}.feed_forward.activation_after_it.weight"
    zeros = {f"gradient/{site.format(number)}/norm": [1.0, *[0.0] * 12] for number in range(3)}
    store = write_store(tmp_path / "m.h5", {**zeros, "gradient/head.weight/norm": [1.0] * 13, "context/loss": [1.0] * 13})
    assert main(["summary", str(store)]) == 0
    lines = capsys.readouterr().out.splitlines()
    name = lines.index("watch zero_gradients")
    titles = (lines[0], lines[-1], next(line for line in lines if line.startswith("1. ")))
    assert lines[name + 1].startswith("   step 100: ")
    assert all(len(line) <= 80 or len(line.split()) == 1 or line in titles for line in lines), lines
    assert [line.strip() for line in lines if line.strip() in zeros] == [*zeros]
    assert lines[-1].startswith("watch: ")


def test_the_number_of_further_rates_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rates by layer have a group for each; six are enough."""
    rates = {f"context/{name}": [0.1] * 3 for name in ("lr", *(f"lr_{number}" for number in range(1, 9)))}
    assert main(["summary", str(write_store(tmp_path / "m.h5", rates))]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("Learning rate") + 1
    shown = [f"   {name}: 0.1 to 0.1, largest 0.1 at step 0" for name in ("lr", *(f"lr_{number}" for number in range(1, 6)))]
    assert lines[first : first + 7] == [*shown, "   and 3 more"]
