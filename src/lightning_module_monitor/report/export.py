"""Writes the numbers of stores into a file for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_module_monitor.errors import require, writing
from lightning_module_monitor.sinks.store.reader import StoreReader

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a text begins that a spreadsheet would run."""


def export(stores: Sequence[StoreReader], path: Path, file_format: str) -> int:
    """Write a row for each recorded value; of several stores, each row begins with the path of its store.

    Returns:
        The number of rows.

    Raises:
        ConfigError: If the file cannot be written.
        ImportError: If an extra is not installed.
    """
    pandas = require("pandas", "pandas")
    if file_format == "parquet":
        require("pyarrow", "parquet")
    frames = {store.location: store.to_frame() for store in stores}
    frame = pandas.concat(frames, names=["run"]).reset_index("run").reset_index(drop=True) if len(stores) > 1 else frames.popitem()[1]
    with writing(path):
        if file_format == "parquet":
            frame.to_parquet(path, index=False)
        else:
            names = [name for name in ("run", "stage", "kind", "site", "statistic") if name in frame]
            texts = {name: frame[name].map(lambda text: f"'{text}" if text.startswith(FORMULA) else text) for name in names}
            frame.assign(**texts).to_csv(path, index=False)
    return len(frame)
